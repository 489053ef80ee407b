//! Tests `reconfigure` with the same members, with fewer and with more members, and with merged and
//! split communicators. Also tests it after an abort and after a rank was killed.

use core::time::Duration;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use fusewire::store::{MemoryStore, Store};
use fusewire::{
    Candidate, Communicator, DType, EndReason, Error, InitHandle, Members, Options,
    ReconfigureOptions, ReduceOp, Result, Tensor,
};
use fusewire_tests::device;
use fusewire_tests::process::{Host, Ranks, report, role};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    options.testing.spins = Some(200);
    options.enable_reconfigure = true;
    options
}

/// Exchanges the handles of all `count` members through the store. `round` is the prefix of the
/// keys.
fn exchange(
    store: &dyn Store,
    round: &str,
    own: usize,
    count: usize,
    handle: &InitHandle,
) -> Result<Vec<InitHandle>> {
    store.set(&format!("{round}/{own}"), handle.to_string().as_bytes())?;
    (0..count)
        .map(|i| {
            let text = store.get(&format!("{round}/{i}"), TEST_TIMEOUT)?;
            String::from_utf8_lossy(&text).parse()
        })
        .collect()
}

fn check(comm: &Communicator, size: u32) -> Result<()> {
    assert_eq!(comm.size(), size);
    let mut x = [comm.rank() + 1, 1];
    comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
    assert_eq!(x, [size * (size + 1) / 2, size]);
    let large = comm.alloc(DType::F32, 100_000)?;
    large.copy_from(&vec![1.0f32; 100_000])?;
    comm.all_reduce(&large, ReduceOp::Sum)?;
    assert_eq!(large.to_vec::<f32>()?[99_999], size as f32);
    comm.barrier()
}

/// Runs `body` on `count` threads that share a store.
fn threads<R: Send>(
    count: usize,
    body: impl Fn(usize, Arc<dyn Store>, &Barrier) -> Result<R> + Sync,
) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let barrier = Barrier::new(count);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..count)
            .map(|i| {
                let (store, body, barrier) = (Arc::clone(&store), &body, &barrier);
                scope.spawn(move || body(i, store, barrier))
            })
            .collect();
        running
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(result) => result.unwrap_or_else(|error| panic!("{error}")),
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    })
}

fn first(i: usize, count: usize, name: &str, store: &Arc<dyn Store>) -> Result<Communicator> {
    let store = Arc::clone(store);
    Communicator::new(device(), i as u32, count as u32, store, name, options())
}

#[test]
fn identity_shrink_grow_and_back() {
    threads(4, |i, store, barrier| {
        let comm = first(i, 4, "world", &store)?;
        check(&comm, 4)?;
        // Reconfigure with the same members.
        let handles = exchange(&*store, "a", i, 4, &comm.init_handle()?)?;
        let all = ReconfigureOptions::new(1, Members::Set(handles.clone()));
        let same = comm.reconfigure(&all)?;
        assert_eq!((same.rank(), same.generation()), (i as u32, 1));
        check(&same, 4)?;
        let error = check(&comm, 4).expect_err("the old communicator was replaced");
        let text = error.to_string();
        assert!(
            text.contains("generation 0 was replaced by generation 1"),
            "{text}"
        );
        // Shrink: first the last rank leaves, then the middle rank.
        let handles = exchange(&*store, "b", i, 4, &same.init_handle()?)?;
        if i == 3 {
            barrier.wait();
        } else {
            let fewer = Members::Set(handles[..3].to_vec());
            let three = same.reconfigure(&ReconfigureOptions::new(2, fewer))?;
            assert_eq!(three.rank(), i as u32);
            check(&three, 3)?;
            barrier.wait();
            let handles = exchange(&*store, "c", i, 3, &three.init_handle()?)?;
            let fewer = Members::Set(vec![handles[2].clone(), handles[0].clone()]);
            if i != 1 {
                let two = three.reconfigure(&ReconfigureOptions::new(3, fewer))?;
                // The library orders an unordered set of members by their old ranks.
                assert_eq!(two.rank(), u32::from(i == 2));
                assert_eq!(two.generation(), 3);
                check(&two, 2)?;
            }
        }
        barrier.wait();
        // All four ranks join again as candidates, independently of their earlier communicators.
        let candidate = Candidate::new(device(), Arc::clone(&store), "world", options())?;
        let handles = exchange(&*store, "d", i, 4, &candidate.init_handle())?;
        let reversed: Vec<_> = handles.into_iter().rev().collect();
        let again =
            candidate.reconfigure(&ReconfigureOptions::new(4, Members::Ordered(reversed)))?;
        assert_eq!(
            again.rank(),
            3 - i as u32,
            "ordered members have their ranks"
        );
        check(&again, 4)
    });
}

/// `abort` ends a reconfiguration only on a rank that already waits in it, also if the communicator
/// had failed before.
#[test]
fn an_abort_ends_the_reconfiguration_of_the_same_rank() {
    // Nothing is asserted before the last barrier, which a failed rank would not enter.
    let results = threads(2, |i, store, barrier| {
        let comm = first(i, 2, "world", &store)?;
        let handles = exchange(&*store, "a", i, 2, &comm.init_handle()?)?;
        let all = ReconfigureOptions::new(1, Members::Ordered(handles.clone()));
        let first = if i == 0 {
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| comm.reconfigure(&all));
                barrier.wait();
                // Several times the longest interval between checks of the abort word.
                std::thread::sleep(Duration::from_millis(2500));
                let ended_early = waiting.is_finished();
                let started = Instant::now();
                comm.abort();
                let result = waiting.join().expect("no panic");
                barrier.wait();
                (result, ended_early || started.elapsed() > TEST_TIMEOUT / 10)
            })
        } else {
            // Rank 1 does not join. It aborts in order to leave an operation, for example.
            std::thread::sleep(Duration::from_millis(300));
            barrier.wait();
            comm.abort();
            barrier.wait();
            let started = Instant::now();
            (
                comm.reconfigure(&all),
                started.elapsed() > TEST_TIMEOUT / 10,
            )
        };
        barrier.wait();
        // The aborts before the call have no effect on it.
        let options = ReconfigureOptions::new(2, Members::Ordered(handles));
        let again = comm.reconfigure(&options).and_then(|comm| check(&comm, 2));
        Ok((first, again))
    });
    let errors = results.into_iter().map(|((result, is_wrong_time), again)| {
        let error = result.expect_err("rank 0 has aborted the call");
        assert!(!is_wrong_time, "{error}");
        again.expect("the second reconfiguration");
        error
    });
    let errors: Vec<Error> = errors.collect();
    assert_eq!(
        errors[0].end_reason(),
        Some(EndReason::Aborted),
        "{errors:?}"
    );
    let text = errors[1].to_string();
    assert!(
        text.contains("rank 0 cannot take part") && text.contains("aborted"),
        "{text}"
    );
}

#[test]
fn a_late_joiner_and_one_rank_that_becomes_many() {
    threads(3, |i, store, _| {
        let old = if i < 2 {
            Some(first(i, 2, "pair", &store)?)
        } else {
            None
        };
        let candidate = Candidate::new(device(), Arc::clone(&store), "pair", options())?;
        let handle = match &old {
            Some(comm) => comm.init_handle()?,
            None => candidate.init_handle(),
        };
        let handles = exchange(&*store, "grow", i, 3, &handle)?;
        let options = ReconfigureOptions::new(7, Members::Set(handles));
        let grown = match &old {
            Some(comm) => comm.reconfigure(&options)?,
            None => candidate.reconfigure(&options)?,
        };
        assert_eq!(
            grown.rank(),
            i as u32,
            "members of the old communicator come first"
        );
        check(&grown, 3)
    });
    threads(4, |i, store, _| {
        let alone = first(0, 1, &format!("alone-{i}"), &store)?;
        check(&alone, 1)?;
        let handles = exchange(&*store, "all", i, 4, &alone.init_handle()?)?;
        let all = alone.reconfigure(&ReconfigureOptions::new(9, Members::Ordered(handles)))?;
        assert_eq!(all.rank(), i as u32);
        check(&all, 4)
    });
}

#[test]
fn two_become_one_and_one_becomes_two() {
    threads(5, |i, store, _| {
        let (name, rank, size) = if i < 2 {
            ("left", i, 2)
        } else {
            ("right", i - 2, 3)
        };
        let half = first(rank, size, name, &store)?;
        check(&half, size as u32)?;
        let handles = exchange(&*store, "merge", i, 5, &half.init_handle()?)?;
        let whole = half.reconfigure(&ReconfigureOptions::new(20, Members::Set(handles)))?;
        // The ranks of the larger communicator keep their numbers.
        assert_eq!(whole.rank() as usize, if i < 2 { 3 + i } else { i - 2 });
        check(&whole, 5)?;
        let handles = exchange(
            &*store,
            "split",
            whole.rank() as usize,
            5,
            &whole.init_handle()?,
        )?;
        let low = whole.rank() < 2;
        let (members, number) = if low {
            (handles[..2].to_vec(), 21)
        } else {
            (handles[2..].to_vec(), 22)
        };
        let part =
            whole.reconfigure(&ReconfigureOptions::new(number, Members::Ordered(members)))?;
        check(&part, if low { 2 } else { 3 })
    });
}

#[test]
fn graphs_from_before_an_abort_report_their_generation() {
    threads(3, |i, store, barrier| {
        let comm = first(i, 3, "abort", &store)?;
        let x = comm.alloc(DType::F32, 64)?;
        comm.stream().begin_capture()?;
        comm.all_reduce_async(&x, ReduceOp::Sum)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        graph.run(comm.stream())?;
        if i == 1 {
            std::thread::sleep(Duration::from_millis(30));
            comm.abort();
        } else {
            let error = comm.barrier().expect_err("aborted");
            assert!(error.to_string().contains("aborted"), "{error}");
        }
        assert!(comm.is_aborted());
        assert!(graph.run(comm.stream()).is_err());
        barrier.wait();
        let handles = exchange(&*store, "revive", i, 3, &comm.init_handle()?)?;
        let revived = comm.reconfigure(&ReconfigureOptions::new(30, Members::Set(handles)))?;
        check(&revived, 3)?;
        let error = graph
            .run(comm.stream())
            .expect_err("a graph of generation 0");
        let text = error.to_string();
        assert!(
            text.contains("generation 0") && text.contains("generation 1"),
            "{text}"
        );
        // A graph of the new communicator works.
        let y: Tensor = revived.alloc(DType::F32, 64)?;
        y.copy_from(&[1.0f32; 64])?;
        revived.stream().begin_capture()?;
        revived.all_reduce_async(&y, ReduceOp::Sum)?;
        let graph = revived.stream().end_capture()?.instantiate()?;
        graph.run(revived.stream())?;
        assert_eq!(y.to_vec::<f32>()?, [3.0; 64]);
        revived.barrier()
    });
}

#[test]
fn refused_members_and_numbers() {
    threads(2, |i, store, barrier| {
        let comm = first(i, 2, "refuse", &store)?;
        let handles = exchange(&*store, "x", i, 2, &comm.init_handle()?)?;
        let other = vec![handles[1 - i].clone()];
        let error = comm
            .reconfigure(&ReconfigureOptions::new(40, Members::Set(other)))
            .expect_err("not among them");
        assert!(
            error.to_string().contains("not among the members"),
            "{error}"
        );
        let twice = vec![handles[i].clone(), handles[i].clone()];
        assert!(
            comm.reconfigure(&ReconfigureOptions::new(41, Members::Ordered(twice)))
                .is_err()
        );
        assert!("fusewire:1:2".parse::<InitHandle>().is_err());
        assert!("nccl:0:0:0:0@x".parse::<InitHandle>().is_err());
        // The communicator remains usable.
        check(&comm, 2)?;
        let next = comm.reconfigure(&ReconfigureOptions::new(42, Members::Set(handles)))?;
        check(&next, 2)?;
        barrier.wait();
        let handles = exchange(&*store, "y", i, 2, &next.init_handle()?)?;
        let reversed = handles.iter().rev().cloned().collect();
        let used = ReconfigureOptions::new(42, Members::Ordered(reversed));
        let error = next.reconfigure(&used).expect_err("used before");
        assert!(error.to_string().contains("was used before"), "{error}");
        barrier.wait();
        // The ranks pass different lists of members.
        let mine = if i == 0 {
            handles.clone()
        } else {
            vec![
                handles[1].clone(),
                Candidate::new(device(), Arc::clone(&store), "other", options())?.init_handle(),
            ]
        };
        let started = Instant::now();
        let differ = next.reconfigure(
            &ReconfigureOptions::new(44, Members::Ordered(mine))
                .timeout(Duration::from_millis(500)),
        );
        assert!(differ.is_err() && started.elapsed() < TEST_TIMEOUT);
        barrier.wait();
        // One member does not make the call.
        if i == 0 {
            let absent = ReconfigureOptions::new(43, Members::Ordered(handles))
                .timeout(Duration::from_millis(300));
            let started = Instant::now();
            let error = next
                .reconfigure(&absent)
                .expect_err("rank 1 does not call it");
            assert!(error.to_string().contains("rank 1"), "{error}");
            assert!(started.elapsed() < TEST_TIMEOUT);
        }
        Ok(())
    });
}

fn survivor() -> bool {
    if role().as_deref() != Some("survivor") {
        return false;
    }
    let mut options = options();
    options.timeout = Duration::from_secs(5);
    let comm = Communicator::from_env(device(), options).expect("a communicator");
    let (rank, size) = (comm.rank() as usize, comm.size() as usize);
    let handle = comm.init_handle().expect("a handle");
    let handles = exchange(&**comm.store(), "before", rank, size, &handle).expect("all handles");
    comm.barrier().expect("all alive");
    report("running");
    // The parent kills rank 5 before or during this allocation.
    let victim = 5;
    let x = comm.alloc(DType::F32, 1000);
    if rank == victim {
        std::thread::sleep(TEST_TIMEOUT);
    }
    // The short timeout stands for a supervisor that detects the killed rank and aborts.
    let quick = comm.with_timeout(Duration::from_millis(500));
    let error = loop {
        if let Err(error) = quick.barrier() {
            break error;
        }
    };
    drop(x);
    let left: Vec<_> = (0..size)
        .filter(|i| *i != victim)
        .map(|i| handles[i].clone())
        .collect();
    let started = Instant::now();
    let fewer = comm
        .reconfigure(&ReconfigureOptions::new(50, Members::Set(left)))
        .unwrap_or_else(|failed| panic!("after {error}: {failed}"));
    let took = started.elapsed();
    check(&fewer, size as u32 - 1).expect("the new communicator works");
    report(format!("{:.1}", took.as_secs_f64() * 1e3));
    true
}

#[test]
fn seven_ranks_continue_after_one_of_eight_was_killed() {
    if survivor() {
        return;
    }
    let test = "reconfigure::seven_ranks_continue_after_one_of_eight_was_killed";
    let mut ranks = Ranks::start(test, "survivor", 8, Host::Parent, &[]);
    for process in &mut ranks.processes {
        assert_eq!(
            process.next_report(TEST_TIMEOUT).expect("it runs"),
            "running"
        );
    }
    ranks.processes[5].signal(libc::SIGKILL);
    let mut times = Vec::new();
    for (rank, process) in ranks.processes.iter_mut().enumerate() {
        if rank != 5 {
            let said = process
                .next_report(TEST_TIMEOUT)
                .unwrap_or_else(|wrong| panic!("{wrong}"));
            times.push(said);
        }
    }
    println!(
        "milliseconds from the failure to the communicator of seven: {}",
        times.join(" ")
    );
}
