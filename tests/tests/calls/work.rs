//! Handles of asynchronous operations: waits, drops and threads.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use fusewire::{DType, Options, ReduceOp, Work};
use fusewire_tests::device::{run_threads, stream, tensor};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A wait for an operation must not wait for later work of the operation's stream.
#[test]
fn a_wait_ends_before_later_work_of_the_stream() {
    for result in run_threads(2, &Options::default(), |comm| {
        let (first, second) = (stream(), stream());
        let comm = comm.on(&first);
        let x = tensor(DType::F32, 1000)?;
        x.copy_from(&[1.0f32; 1000])?;
        // Keeps the operation on the stream until the later work is enqueued.
        let (start, started) = channel::<()>();
        let started = std::sync::Mutex::new(started);
        first.host_fn(Arc::new(move || {
            let _ = started.lock().expect("the lock").recv_timeout(TEST_TIMEOUT);
            Ok(())
        }))?;
        let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
        let is_open = Arc::new(AtomicBool::new(false));
        let gate = Arc::clone(&is_open);
        first.host_fn(Arc::new(move || {
            let begin = std::time::Instant::now();
            while !gate.load(Ordering::Acquire) && begin.elapsed() < TEST_TIMEOUT {
                thread::yield_now();
            }
            Ok(())
        }))?;
        work.wait(&second)?;
        let was_open = Arc::new(AtomicBool::new(true));
        let (seen, gate) = (Arc::clone(&was_open), Arc::clone(&is_open));
        let after = second.host_fn(Arc::new(move || {
            seen.store(gate.load(Ordering::Acquire), Ordering::Release);
            Ok(())
        }))?;
        start.send(()).expect("the stream waits");
        second.wait(after, Some(TEST_TIMEOUT))?;
        assert!(work.is_completed(), "the wait ended before the operation");
        assert!(!was_open.load(Ordering::Acquire), "later work ended first");
        is_open.store(true, Ordering::Release);
        first.synchronize()?;
        assert_eq!(x.to_vec::<f32>()?, [2.0; 1000]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn a_dropped_handle_does_not_cancel_and_handles_move_between_threads() {
    const fn is_shared<T: Send + Sync + Clone>() {}
    is_shared::<Work>();
    for result in run_threads(2, &Options::default(), |comm| {
        let x = comm.alloc(DType::F32, 100_000)?;
        x.copy_from(&vec![1.0f32; 100_000])?;
        drop(comm.all_reduce_async(&x, ReduceOp::Sum)?);
        let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
        let other = work.clone();
        let waited = thread::spawn(move || other.wait_blocking());
        work.wait_blocking()?;
        waited.join().expect("the thread")?;
        assert_eq!(x.to_vec::<f32>()?, vec![4.0; 100_000]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}
