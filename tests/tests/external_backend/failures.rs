//! Checks that ranks that are late, killed or aborted cause errors within the timeout. The errors
//! contain the library's message, and later calls return the same error.

use core::time::Duration;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use fusewire::{Communicator, Device, Error, ReduceOp, Result, new_comm};
use fusewire_tests::process::{Host, Ranks, report, role};

use crate::{TEST_TIMEOUT, options, ranks, sample};

fn sum(comm: &Communicator) -> Result<()> {
    comm.all_reduce([1f32; 64].as_mut_slice(), ReduceOp::Sum)
}

/// Checks that every later call immediately returns `error`.
fn assert_poisoned(comm: &Communicator, error: &Error) {
    let started = Instant::now();
    let later = [
        sum(comm),
        comm.barrier(),
        comm.broadcast([0u8; 3].as_mut_slice(), 0),
        comm.failure().map_or(Ok(()), Err),
    ];
    for later in later {
        let later = later.expect_err("after a failure");
        assert_eq!(later.to_string(), error.to_string());
    }
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_late_rank_is_a_time_out() {
    let mut options = options();
    options.timeout = Duration::from_secs(1);
    let waited = Barrier::new(2);
    let results = ranks(2, &options, |comm| {
        sum(&comm)?;
        if comm.rank() == 1 {
            waited.wait();
            let error = sum(&comm).expect_err("rank 0 has given up");
            assert_poisoned(&comm, &error);
            return Ok((error.to_string(), Duration::ZERO));
        }
        let started = Instant::now();
        let error = sum(&comm).expect_err("rank 1 is late");
        let took = started.elapsed();
        waited.wait();
        assert!(matches!(error, Error::Backend { .. }), "{error}");
        assert_poisoned(&comm, &error);
        Ok((error.to_string(), took))
    });
    let [first, second] = &results[..] else {
        panic!("two ranks");
    };
    let (message, took) = first.as_ref().expect("it joined");
    assert!(
        message.starts_with("backend sample: all_reduce: timed out"),
        "{message}"
    );
    assert!(message.contains("between rank 0 and rank 1"), "{message}");
    assert!(*took >= Duration::from_millis(990), "{took:?}");
    assert!(*took < Duration::from_secs(10), "{took:?}");
    let (message, _) = second.as_ref().expect("it joined");
    assert!(message.contains("rank 0 has gone"), "{message}");
}

#[test]
fn a_rank_that_never_launches_is_named() {
    crate::register();
    let mut options = options();
    options.timeout = Duration::from_millis(300);
    options.store = Some(std::sync::Arc::new(fusewire::store::MemoryStore::new()));
    for (rank, named) in [(0, "rank 1"), (1, "rank 0")] {
        options.rank_size = Some((rank, 2));
        let started = Instant::now();
        let error = new_comm(
            "sample",
            Device::Cpu,
            &format!("alone-{rank}"),
            options.clone(),
        );
        let error = error.expect_err("alone").to_string();
        assert!(started.elapsed() < Duration::from_secs(10));
        // The library is not called before all ranks have joined.
        assert!(error.contains(named) && error.contains("alone-"), "{error}");
    }
}

#[test]
fn different_counts_are_an_error_on_both_ranks() {
    for result in ranks(2, &options(), |comm| {
        let count = 10 + comm.rank() as usize;
        let mut x = vec![0u8; 2 * count];
        let error = comm
            .all_gather_single(&mut x, &vec![1u8; count])
            .expect_err("other counts");
        assert_poisoned(&comm, &error);
        Ok(error.to_string())
    }) {
        let message = result.expect("it joined");
        let is_reported =
            message.contains("the ranks' calls differ") || message.contains("has gone");
        assert!(is_reported, "{message}");
    }
}

#[test]
fn abort_ends_waits() {
    let results = ranks(2, &options(), |comm| {
        if comm.rank() == 1 {
            // Like the receive on rank 0, this receive waits until rank 0 aborts.
            return Ok(comm
                .recv([0u8; 1].as_mut_slice(), 0)
                .map_err(|error| error.to_string()));
        }
        let other = comm.clone();
        let aborting = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            other.abort();
        });
        let started = Instant::now();
        let waited = comm.recv([0u8; 1].as_mut_slice(), 1);
        assert!(started.elapsed() < TEST_TIMEOUT / 2);
        aborting.join().expect("no panic");
        Ok(waited.map_err(|error| error.to_string()))
    });
    for result in results {
        let error = result.expect("it joined").expect_err("aborted");
        assert!(error.contains("abort"), "{error}");
    }
}

#[test]
fn a_killed_process_is_an_error_of_the_others() {
    const TEST: &str = "failures::a_killed_process_is_an_error_of_the_others";
    if role().as_deref() == Some("killed") {
        let comm = new_comm("sample", Device::Cpu, "killed", options()).expect("a communicator");
        for i in 0.. {
            if i == 100 {
                report("running");
            }
            if let Err(error) = sum(&comm) {
                assert_poisoned(&comm, &error);
                report(error);
                return;
            }
        }
    }
    let environment = [(
        "FUSEWIRE_BACKEND_PATH_SAMPLE",
        sample().display().to_string(),
    )];
    let mut ranks = Ranks::start(TEST, "killed", 2, Host::Parent, &environment);
    for rank in &mut ranks.processes {
        assert_eq!(rank.next_report(TEST_TIMEOUT).as_deref(), Ok("running"));
    }
    ranks.processes[1].signal(libc::SIGKILL);
    let killed = Instant::now();
    let error = ranks.processes[0]
        .next_report(TEST_TIMEOUT)
        .expect("a report");
    // The closed connection reveals the killed rank long before the timeout.
    assert!(killed.elapsed() < TEST_TIMEOUT / 2);
    assert!(
        error.contains("a peer failed") && error.contains("rank 1"),
        "{error}"
    );
    ranks.processes[0]
        .succeed(TEST_TIMEOUT)
        .expect("rank 0 ends by itself");
}
