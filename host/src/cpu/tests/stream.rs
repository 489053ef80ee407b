//! Tests of the order of work, results, events and destruction.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, ThreadId};

use super::super::{Command, CpuEvent, CpuStream, LaunchInfo, LaunchOwner};
use super::{LONG, add, block, capture, failing, fold, increment, launch, panics, value};
use crate::{Error, Result};

#[test]
fn blocking_runs_use_the_callers_thread_when_idle() {
    #[derive(Debug, Default)]
    struct Owner(Mutex<Vec<ThreadId>>);
    impl LaunchOwner for Owner {
        fn before(&self, _info: &LaunchInfo) -> Result<u64> {
            self.0.lock().unwrap().push(thread::current().id());
            Ok(0)
        }
        fn after(&self, _word: u64, info: &LaunchInfo, _ran: bool) -> Result<()> {
            self.before(info).map(drop)
        }
    }
    let (stream, target, owner) = (CpuStream::new(), Arc::default(), Arc::new(Owner::default()));
    let launch = launch(add, &target, 5).owned_by(Arc::clone(&owner) as _, [0; 4]);
    stream.run(&launch).unwrap();
    assert_eq!(*owner.0.lock().unwrap(), [thread::current().id(); 2]);
    let release = block(&stream);
    thread::scope(|scope| {
        let run = scope.spawn(|| stream.run(&launch));
        thread::sleep(Duration::from_millis(10));
        assert_eq!(value(&target), 5, "work overtook the queue");
        release.send(()).unwrap();
        run.join().unwrap().unwrap();
    });
    assert_eq!(value(&target), 10);
    assert_eq!(owner.0.lock().unwrap().len(), 4);
}

#[test]
fn work_runs_in_order() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    let mut expected = 0u64;
    for i in 0..2000 {
        let launch = launch(fold, &target, i);
        if i % 7 == 0 {
            stream.run(&launch).unwrap();
        } else {
            stream.enqueue(Command::Launch(launch)).unwrap();
        }
        expected = expected.wrapping_mul(3).wrapping_add(i);
    }
    stream.synchronize().unwrap();
    assert!(stream.is_idle());
    assert_eq!(value(&target), expected);
}

#[test]
fn threads_may_share_a_stream() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    thread::scope(|scope| {
        for thread in 0..4 {
            let (stream, launch) = (stream.clone(), launch(increment, &target, 1));
            scope.spawn(move || {
                for i in 0..500 {
                    if (i + thread) % 3 == 0 {
                        stream.enqueue(Command::Launch(launch.clone())).unwrap();
                    } else {
                        stream.run(&launch).unwrap();
                    }
                    if i % 50 == 0 {
                        stream.synchronize().unwrap();
                    }
                }
            });
        }
    });
    stream.synchronize().unwrap();
    assert_eq!(
        value(&target),
        2000,
        "two launches of one stream overlapped"
    );
}

#[test]
fn tickets_return_their_own_result_and_synchronize_the_first() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    let release = block(&stream);
    let good = stream
        .enqueue(Command::Launch(launch(add, &target, 1)))
        .unwrap();
    let bad = stream.enqueue(failing("first")).unwrap();
    let worse = stream.enqueue(failing("second")).unwrap();
    let last = stream
        .enqueue(Command::Launch(launch(add, &target, 1)))
        .unwrap();
    assert!(!stream.is_complete(good) && stream.result(good).is_none());
    let timeout = stream.wait(last, Some(Duration::from_millis(10)));
    assert!(matches!(timeout, Err(Error::StreamTimeout { .. })));
    drop(release);
    stream.wait(last, Some(LONG)).unwrap();
    assert!(
        stream
            .wait(bad, None)
            .unwrap_err()
            .to_string()
            .contains("first")
    );
    assert!(
        stream
            .result(worse)
            .unwrap()
            .unwrap_err()
            .to_string()
            .contains("second")
    );
    stream.wait(good, None).unwrap();
    assert_eq!(value(&target), 2, "a failure stopped later work");
    assert!(
        stream
            .synchronize()
            .unwrap_err()
            .to_string()
            .contains("first")
    );
    stream.synchronize().unwrap();
    assert!(
        stream.wait(bad, None).is_err(),
        "the ticket keeps its result"
    );
}

#[test]
fn failures_beyond_those_kept_are_no_successes() {
    let stream = CpuStream::new();
    let first = stream.enqueue(failing("first")).unwrap();
    for _ in 0..1024 {
        stream.enqueue(failing("later")).unwrap();
    }
    let last = stream.enqueue(failing("last")).unwrap();
    assert!(stream.synchronize().is_err());
    assert!(
        stream
            .wait(first, None)
            .unwrap_err()
            .to_string()
            .contains("not kept")
    );
    assert!(
        stream
            .wait(last, None)
            .unwrap_err()
            .to_string()
            .contains("last")
    );
}

#[test]
fn panics_are_errors() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    let error = stream.run(&launch(panics, &target, 0)).unwrap_err();
    assert!(error.to_string().contains("out of order"), "{error}");
    let ticket = stream
        .enqueue(Command::Launch(launch(panics, &target, 0)))
        .unwrap();
    assert!(
        stream
            .wait(ticket, None)
            .unwrap_err()
            .to_string()
            .contains("out of order")
    );
    stream
        .enqueue(Command::Host(Arc::new(|| panic!("host"))))
        .unwrap();
    assert!(stream.synchronize().is_err());
    stream.run(&launch(add, &target, 1)).unwrap();
    assert_eq!(value(&target), 1);
}

#[test]
fn events_order_two_streams() {
    let (one, two, target) = (CpuStream::new(), CpuStream::new(), Arc::default());
    let (event, back) = (CpuEvent::new(), CpuEvent::new());
    assert!(event.query(), "never recorded counts as complete");
    let release = block(&one);
    let mut expected = 0u64;
    for i in 0..200 {
        one.enqueue(Command::Launch(launch(fold, &target, i)))
            .unwrap();
        one.enqueue(Command::Record(event.clone())).unwrap();
        two.wait_event(&event).unwrap();
        two.enqueue(Command::Launch(launch(fold, &target, 1000 + i)))
            .unwrap();
        two.record(&back).unwrap();
        one.enqueue(Command::Wait(back.clone())).unwrap();
        expected = expected.wrapping_mul(3).wrapping_add(i);
        expected = expected.wrapping_mul(3).wrapping_add(1000 + i);
    }
    assert!(!event.query() && !two.is_idle());
    assert!(event.elapsed_since(&back).is_err());
    drop(release);
    event.synchronize();
    back.synchronize();
    assert_eq!(value(&target), expected);
    two.synchronize().unwrap();
    one.synchronize().unwrap();
}

#[test]
fn events_measure_time() {
    let (stream, start, end) = (CpuStream::new(), CpuEvent::new(), CpuEvent::new());
    assert!(end.elapsed_since(&start).is_err());
    stream.record(&start).unwrap();
    let nap = || {
        thread::sleep(Duration::from_millis(5));
        Ok(())
    };
    stream.enqueue(Command::Host(Arc::new(nap))).unwrap();
    stream.record(&end).unwrap();
    end.synchronize();
    assert!(end.elapsed_since(&start).unwrap() >= Duration::from_millis(5));
    assert_eq!(start.elapsed_since(&end).unwrap(), Duration::ZERO);
}

#[test]
fn a_dropped_stream_finishes_its_queue() {
    let target = Arc::default();
    let stream = CpuStream::new();
    let release = block(&stream);
    for _ in 0..100 {
        stream
            .enqueue(Command::Launch(launch(add, &target, 1)))
            .unwrap();
    }
    let helper = thread::spawn(move || {
        thread::sleep(Duration::from_millis(10));
        drop(release);
    });
    drop(stream);
    assert_eq!((value(&target), Arc::strong_count(&target)), (100, 1));
    helper.join().unwrap();
}

#[test]
fn the_last_clone_may_go_on_the_worker() {
    let (target, stream) = (Arc::default(), CpuStream::new());
    let (sender, receiver) = mpsc::channel();
    let release = block(&stream);
    let clone = stream.clone();
    stream
        .enqueue(Command::Host(Arc::new(move || {
            let _kept = &clone;
            Ok(())
        })))
        .unwrap();
    stream
        .enqueue(Command::Launch(launch(add, &target, 1)))
        .unwrap();
    let notify = move || {
        sender.send(()).unwrap();
        Ok(())
    };
    stream.enqueue(Command::Host(Arc::new(notify))).unwrap();
    // This is not the last clone: the clone in the queue keeps the stream alive.
    drop(stream);
    drop(release);
    receiver.recv_timeout(LONG).unwrap();
    assert_eq!(value(&target), 1);
}

#[test]
fn waiting_for_a_stream_from_its_own_work_is_refused() {
    let stream = CpuStream::new();
    let own = stream.clone();
    let ticket = stream
        .enqueue(Command::Host(Arc::new(move || own.synchronize())))
        .unwrap();
    let error = stream.wait(ticket, Some(LONG)).unwrap_err();
    assert!(error.to_string().contains("its own work"), "{error}");
    let own = stream.clone();
    let exec = capture(&stream, || {
        let inner = launch(add, &Arc::default(), 0);
        let call = move || own.run(&inner);
        stream.enqueue(Command::Host(Arc::new(call))).unwrap();
    });
    // Repeats the check with work that runs directly on this thread.
    let _ = stream.synchronize();
    assert!(
        exec.run(&stream)
            .unwrap_err()
            .to_string()
            .contains("its own work")
    );
}

/// Another stream that waits for a capturing stream also waits for work that a thread had begun to
/// run directly before the capture.
#[test]
fn a_capture_does_not_hide_direct_work() {
    let (source, other) = (CpuStream::new(), CpuStream::new());
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let ran = source.try_direct(|| {
            let begun = scope.spawn(|| source.begin_capture()).join();
            begun.expect("no panic").expect("a capture");
            other.wait_issued(&source).expect("a wait");
            let (other, has_ended) = (&other, &has_ended);
            scope.spawn(move || {
                other.synchronize().expect("no failure");
                assert!(has_ended.load(Ordering::SeqCst), "synchronized too early");
            });
            thread::sleep(Duration::from_millis(100));
            has_ended.store(true, Ordering::SeqCst);
        });
        assert!(ran.is_some(), "an idle stream");
    });
    source.end_capture().expect("a graph");
    source.synchronize().expect("no failure");
}
