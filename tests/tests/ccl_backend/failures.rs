//! Checks the errors of ranks that are late, ranks that abort, and ranks that make different calls.
//! An error must occur within the timeout, and later calls must return the same error.

use core::time::Duration;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use fusewire::{Communicator, Error, ReduceOp, Result};

use crate::{Fake, TEST_TIMEOUT, ranks_of};

fn sum(comm: &Communicator) -> Result<()> {
    comm.all_reduce([1f32; 64].as_mut_slice(), ReduceOp::Sum)
}

/// Checks that every later call immediately returns `error` and does not call the library.
fn assert_poisoned(comm: &Communicator, error: &Error) {
    let started = Instant::now();
    for later in [
        sum(comm),
        comm.barrier(),
        comm.failure().map_or(Ok(()), Err),
    ] {
        let later = later.expect_err("after a failure");
        assert_eq!(later.to_string(), error.to_string());
    }
    assert!(started.elapsed() < Duration::from_secs(1));
}

/// Returns the ranks that called `name`, in ascending order.
fn called(fake: &Fake, name: &str) -> Vec<i64> {
    let records = fake.take();
    let mut ranks: Vec<_> = records
        .iter()
        .filter(|record| record.name == name)
        .map(|record| record.rank)
        .collect();
    ranks.sort_unstable();
    ranks
}

#[test]
fn a_late_rank_is_a_time_out() {
    let fake = Fake::new();
    let mut options = fake.options();
    options.timeout = Duration::from_secs(1);
    let waited = Barrier::new(2);
    let results = ranks_of("nccl", 2, &options, |comm| {
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
        message.starts_with("backend nccl: all_reduce: timed out after 1s"),
        "{message}"
    );
    assert!(*took >= Duration::from_millis(990), "{took:?}");
    assert!(*took < Duration::from_secs(20), "{took:?}");
    let (message, _) = second.as_ref().expect("it joined");
    assert!(
        message.starts_with("backend nccl: all_reduce: "),
        "{message}"
    );
    // Each rank has aborted the library's communicator exactly once.
    assert_eq!(called(&fake, "ncclCommAbort"), [0, 1]);
}

/// Checks that a call uses its own timeout, even if that is shorter than the timeout of the
/// previous call.
#[test]
fn a_calls_own_time_out() {
    let fake = Fake::new();
    let ready = Barrier::new(2);
    let errors = fake.all(2, |comm| {
        let patient = comm.with_timeout(TEST_TIMEOUT);
        if comm.rank() == 1 {
            thread::sleep(Duration::from_millis(200));
        }
        sum(&patient)?;
        ready.wait();
        if comm.rank() == 1 {
            ready.wait();
            return Ok(None);
        }
        let started = Instant::now();
        let error = sum(&comm.with_timeout(Duration::from_millis(300)));
        let error = error.expect_err("no other rank calls it");
        assert!(started.elapsed() < TEST_TIMEOUT / 2);
        ready.wait();
        Ok(Some(error.to_string()))
    });
    let [Some(error), None] = &errors[..] else {
        panic!("{errors:?}");
    };
    assert!(error.contains("timed out after 300ms"), "{error}");
}

#[test]
fn abort_ends_waits() {
    let fake = Fake::new();
    let results = fake.all(2, |comm| {
        let started = Instant::now();
        let mut aborting = None;
        if comm.rank() == 0 {
            let other = comm.clone();
            aborting = Some(thread::spawn(move || {
                thread::sleep(Duration::from_millis(300));
                other.abort();
            }));
        }
        // Each rank waits to receive from the other rank.
        let waited = comm.recv([0u8; 1].as_mut_slice(), 1 - comm.rank());
        assert!(started.elapsed() < TEST_TIMEOUT / 2);
        if let Some(aborting) = aborting {
            aborting.join().expect("no panic");
        }
        let error = waited.expect_err("aborted");
        assert!(sum(&comm).is_err());
        Ok(error.to_string())
    });
    for error in results {
        assert!(error.contains("abort"), "{error}");
    }
    assert_eq!(called(&fake, "ncclCommAbort"), [0, 1]);
}

#[test]
fn different_counts_are_an_error_on_both_ranks() {
    let fake = Fake::new();
    for error in fake.all(2, |comm| {
        let count = 10 + comm.rank() as usize;
        let mut x = vec![0u8; 2 * count];
        let error = comm.all_gather_single(&mut x, &vec![1u8; count]);
        let error = error.expect_err("other counts");
        assert_poisoned(&comm, &error);
        Ok(error.to_string())
    }) {
        let is_reported =
            error.contains("the ranks' calls differ") || error.contains("aborted by one");
        assert!(is_reported && error.contains("ncclAllGather"), "{error}");
    }
}

#[test]
fn different_message_lengths_are_an_error_on_both_ranks() {
    let fake = Fake::new();
    for error in fake.all(2, |comm| {
        let error = if comm.rank() == 0 {
            comm.send([1i32; 4].as_slice(), 1)
        } else {
            comm.recv([0i32; 3].as_mut_slice(), 0)
        };
        let error = error.expect_err("four sent, three asked for");
        assert_poisoned(&comm, &error);
        Ok(error.to_string())
    }) {
        assert!(
            error.contains("invalid usage") || error.contains("aborted by one"),
            "{error}"
        );
    }
}

/// Checks that peers stop waiting with an error if a rank returns without `finalize`.
#[test]
fn a_rank_that_leaves_frees_the_others() {
    let fake = Fake::new();
    let started = Instant::now();
    let results = fake.ranks(2, |comm| {
        if comm.rank() == 1 {
            return Err(Error::InvalidArgument {
                operation: "this test",
                detail: "leaves".to_owned(),
            });
        }
        sum(&comm)
    });
    assert!(started.elapsed() < TEST_TIMEOUT / 2);
    let error = results[0].as_ref().expect_err("it is alone");
    assert!(error.to_string().contains("aborted by one"), "{error}");
}

/// Checks that all ranks immediately get the error of a rank whose library is missing.
#[test]
fn a_rank_without_its_library_is_named_by_the_others() {
    let fake = Fake::new();
    for lacking in [0u32, 2] {
        let store = std::sync::Arc::new(fusewire::store::MemoryStore::new());
        let started = Instant::now();
        let errors: Vec<String> = thread::scope(|scope| {
            let make = |rank: u32| {
                let mut options = fake.options();
                options.store = Some(std::sync::Arc::clone(&store) as _);
                options.rank_size = Some((rank, 3));
                if rank == lacking {
                    let path = "/nowhere/libnccl.so".to_owned();
                    options.hints.insert("library_path".to_owned(), path);
                }
                let made = fusewire::new_comm("nccl", fusewire::Device::Cpu, "lacking", options);
                made.expect_err("one rank has no library").to_string()
            };
            let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || make(rank))).collect();
            let join = |rank: thread::ScopedJoinHandle<'_, String>| rank.join().expect("no panic");
            ranks.into_iter().map(join).collect()
        });
        assert!(started.elapsed() < TEST_TIMEOUT / 2);
        for error in errors {
            assert!(error.contains("/nowhere/libnccl.so"), "{error}");
        }
    }
}
