//! Tests abort, the timeouts of calls, abort hooks, the watchdog and finalize.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use fusewire::{
    CallOptions, Communicator, Compare, DType, Error, Operation, Options, ReduceOp, WindowOptions,
    new_comm,
};
use fusewire_tests::device::{device, run_threads, tensor};
use fusewire_tests::process::{Host, Ranks, report, role};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = TEST_TIMEOUT;
    options
}

/// A call in which ranks wait while rank 0 aborts.
type Wait = fn(&Communicator) -> fusewire::Result<()>;

const WAITS: [(&str, Wait); 6] = [
    ("barrier", |comm| comm.barrier()),
    ("all_reduce", |comm| {
        comm.all_reduce([1f32; 8].as_mut_slice(), ReduceOp::Sum)
    }),
    ("large all_gather", |comm| {
        let input = vec![1u8; 1 << 20];
        let mut output = vec![0u8; input.len() * comm.size() as usize];
        comm.all_gather_single(output.as_mut_slice(), input.as_slice())
    }),
    ("recv", |comm| comm.recv([0u8; 8].as_mut_slice(), 0)),
    ("batch", |comm| {
        let mut batch = comm.batch_op_create();
        batch.recv(&tensor(DType::U8, 8)?, 0)?;
        batch.issue()
    }),
    ("enqueued", |comm| {
        let x = tensor(DType::F32, 8)?;
        comm.all_reduce_async(&x, ReduceOp::Sum)?.wait_blocking()
    }),
];

#[test]
fn abort_ends_waits() {
    let mut slowest = Duration::ZERO;
    for (name, wait) in WAITS {
        let aborted = Mutex::new(None);
        let results = run_threads(3, &options(), |comm| {
            comm.barrier()?;
            if comm.rank() == 0 {
                // The aborting thread makes no other call on the communicator.
                let other = comm.clone();
                std::thread::sleep(Duration::from_millis(50));
                let at = std::thread::spawn(move || {
                    let at = Instant::now();
                    other.abort();
                    other.abort();
                    at
                });
                let at = at.join().expect("no panic");
                *aborted.lock().expect("no panic") = Some(at);
                assert!(comm.is_aborted());
                return Ok(None);
            }
            assert!(!comm.is_aborted());
            let error = wait(&comm).expect_err("aborted");
            let freed = Instant::now();
            assert!(
                error.to_string().contains("aborted by the program"),
                "{error}"
            );
            assert!(comm.is_aborted());
            // Later calls return the same error.
            assert_eq!(
                comm.barrier().expect_err("aborted").to_string(),
                error.to_string()
            );
            Ok(Some(freed))
        });
        let aborted = aborted
            .lock()
            .expect("no panic")
            .expect("rank 0 has aborted");
        for result in results {
            if let Some(freed) = result.unwrap_or_else(|error| panic!("{name}: {error}")) {
                slowest = slowest.max(freed.saturating_duration_since(aborted));
            }
        }
    }
    println!("from the abort to the end of the last wait: {slowest:?}");
    assert!(slowest < TEST_TIMEOUT / 2);
}

#[test]
fn a_time_out_names_the_late_rank_and_every_activity() {
    let seen = Arc::new(AtomicU32::new(0));
    let results = run_threads(3, &options(), |comm| {
        let counter = Arc::clone(&seen);
        comm.register_abort_hook(move |error| {
            assert!(matches!(error, Error::Timeout(_)));
            counter.fetch_add(1, Ordering::Relaxed);
        });
        comm.barrier()?;
        comm.barrier()?;
        let short = CallOptions::new().timeout(Duration::from_millis(100));
        if comm.rank() == 2 {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return comm.failure().map_or(Ok(()), Err);
        }
        let mut x = [0f32; 4];
        comm.with_options(&short)?
            .all_reduce(x.as_mut_slice(), ReduceOp::Sum)
    });
    for result in results {
        let error = result.expect_err("rank 2 does not call it");
        assert!(
            error
                .to_string()
                .contains("rank 2 never entered all_reduce #3"),
            "{error}"
        );
        let Error::Timeout(failure) = error else {
            panic!("{error}");
        };
        assert_eq!(failure.rank, 2);
        let doing: Vec<_> = failure
            .progress
            .iter()
            .map(|p| (p.operation, p.sequence))
            .collect();
        assert_eq!(
            doing,
            [
                (Operation::AllReduce, 3),
                (Operation::AllReduce, 3),
                (Operation::Barrier, 2)
            ]
        );
    }
    assert_eq!(
        seen.load(Ordering::Relaxed),
        3,
        "calls of hooks: one per rank"
    );
}

/// Zero stands for the communicator's timeout, as torchcomms' `kNoTimeout` does.
#[test]
fn a_timeout_of_zero_is_that_of_the_communicator() {
    for result in run_threads(2, &options(), |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        comm.with_timeout(Duration::ZERO).barrier()?;
        comm.set_timeout(Duration::ZERO);
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(50));
        }
        comm.barrier()
    }) {
        result.expect("no timeout");
    }
    let mut options = options();
    options.timeout = Duration::ZERO;
    for result in run_threads(1, &options, |comm| comm.barrier()) {
        let error = result.expect_err("a wait that cannot succeed").to_string();
        assert!(error.contains("timeout is 0"), "{error}");
    }
}

#[test]
fn calls_after_finalize_fail_and_a_window_wait_can_be_aborted() {
    let results = run_threads(2, &options(), |comm| {
        let x = tensor(DType::F32, 1000)?;
        let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
        comm.finalize()?;
        assert!(work.is_completed());
        comm.finalize()?;
        for error in [
            comm.barrier().expect_err("finalized"),
            comm.alloc(DType::F32, 8).expect_err("finalized"),
            comm.dup().expect_err("finalized"),
        ] {
            assert!(error.to_string().contains("finalized"), "{error}");
        }
        assert!(!comm.is_aborted());
        Ok(())
    });
    results
        .into_iter()
        .for_each(|result| result.unwrap_or_else(|error| panic!("{error}")));
    let results = run_threads(2, &options(), |comm| {
        let window = comm.alloc_window(DType::U8, 8, WindowOptions::default())?;
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(30));
            comm.abort();
            return Ok(());
        }
        let error = window
            .wait_signal(0, None, Compare::Equal, 1)
            .expect_err("aborted");
        assert!(
            error.to_string().contains("aborted by the program"),
            "{error}"
        );
        Ok(())
    });
    results
        .into_iter()
        .for_each(|result| result.unwrap_or_else(|error| panic!("{error}")));
}

/// The operation fails while `finalize` waits for it.
#[test]
fn finalize_reports_a_failure_to_abort_hooks() {
    let seen = Arc::new(AtomicU32::new(0));
    let ended = Barrier::new(2);
    let results = run_threads(2, &options(), |comm| {
        let counter = Arc::clone(&seen);
        if comm.rank() == 1 {
            ended.wait();
            return Ok(());
        }
        comm.register_abort_hook(move |error| {
            assert!(matches!(error, Error::Timeout(_)));
            counter.fetch_add(1, Ordering::Relaxed);
        });
        let x = tensor(DType::F32, 8)?;
        let short = CallOptions::new().timeout(Duration::from_millis(100));
        let work = comm
            .with_options(&short)?
            .all_reduce_async(&x, ReduceOp::Sum)?;
        let error = comm.finalize().expect_err("rank 1 never calls all_reduce");
        assert!(matches!(error, Error::Timeout(_)), "{error}");
        assert!(work.is_completed());
        ended.wait();
        comm.finalize()
    });
    for result in results {
        result.unwrap_or_else(|error| panic!("{error}"));
    }
    assert_eq!(seen.load(Ordering::Relaxed), 1, "calls of the hook");
}

/// If this process is a child, lets an operation time out, so that the watchdog may end the
/// process. Returns true if the process is a child and survives.
fn watched() -> bool {
    let Some(kind) = role() else { return false };
    let mut options = Options::default();
    options.timeout = Duration::from_millis(300);
    match kind.as_str() {
        // The default is the same as in torchcomms.
        "default" => {}
        "asked" => options.abort_process_on_timeout_or_error = Some(true),
        "not" => options.abort_process_on_timeout_or_error = Some(false),
        "reconfigurable" => options.enable_reconfigure = true,
        _ => return false,
    }
    let comm = new_comm("fusewire", device(), "watched", options).expect("a communicator");
    if comm.rank() == 0 {
        let x = tensor(DType::F32, 8).expect("a tensor");
        let work = comm.all_reduce_async(&x, ReduceOp::Sum).expect("enqueued");
        drop(work);
    }
    std::thread::sleep(Duration::from_millis(1500));
    report("alive");
    // On a GPU, a rank without a launch detects the failure only in this call.
    comm.failure().expect("rank 1 never called");
    comm.finalize().expect_err("rank 1 never called");
    true
}

#[test]
fn the_watchdog_ends_the_process_only_if_enabled() {
    if watched() {
        return;
    }
    let test = "abort::the_watchdog_ends_the_process_only_if_enabled";
    for (kind, dies) in [
        ("default", true),
        ("asked", true),
        ("not", false),
        ("reconfigurable", false),
    ] {
        let mut ranks = Ranks::start(test, kind, 2, Host::Parent, &[]);
        for process in &mut ranks.processes {
            let said = process.next_report(TEST_TIMEOUT);
            if dies {
                let error = said.expect_err("the watchdog ends it");
                assert!(
                    error.contains("abort_process_on_timeout_or_error"),
                    "{kind}: {error}"
                );
            } else {
                assert_eq!(said.as_deref(), Ok("alive"), "{kind}");
            }
        }
    }
}
