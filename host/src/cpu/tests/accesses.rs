//! Accesses to tensors by operations that run directly on the calling thread.

use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::thread;

use crate::cpu::{Command, CpuStream};
use crate::usage::{Access, AccessList, InUse, Name, Usage, User, Uses};
use crate::{Error, Result};

fn write(usage: &Arc<Usage>) -> AccessList<'_> {
    let mut accesses = AccessList::new();
    accesses.push(Access::new(usage, 0, 8, true));
    accesses
}

/// Runs `work` on the stream directly, with a write access to the allocation. Returns true if the
/// stream favored the allocation.
fn run(stream: &CpuStream, usage: &Arc<Usage>, work: impl Fn()) -> Result<bool> {
    let accesses = write(usage);
    let uses = Uses {
        accesses: &accesses,
        user: User::this_thread().on_stream(stream.source_id()),
        operation: Name::Text("test"),
        flagged: None,
    };
    let mut held = None;
    let taken = match stream.take_favored(uses) {
        None => stream.take_unfavored(uses, &mut held)?,
        taken => taken,
    };
    let taken = taken.expect("an idle stream");
    work();
    let is_favored = taken.is_favored();
    drop((taken, held));
    Ok(is_favored)
}

/// Other threads end favor at any time. The work of all threads must be exclusive.
#[test]
fn direct_operations_exclude_other_threads() {
    for round in 0..400 {
        let (usage, stream) = (Usage::new(8), CpuStream::new());
        let users = AtomicI32::new(0);
        let alone = || {
            assert_eq!(users.fetch_add(1, Ordering::Relaxed), 0);
            assert_eq!(users.fetch_sub(1, Ordering::Relaxed), 1);
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..300 {
                    run(&stream, &usage, alone).expect("no ranks");
                }
            });
            for thread in 0..2 {
                let (usage, alone) = (&usage, &alone);
                scope.spawn(move || {
                    for _ in 0..1 + (round + thread) % 40 {
                        let accesses = write(usage);
                        let held = InUse::begin(&accesses, User::this_thread(), Name::Text("test"));
                        let _held = held.expect("no ranks");
                        alone();
                    }
                });
            }
        });
    }
}

#[test]
fn a_stream_favors_what_one_thread_uses() {
    let (usage, stream) = (Usage::new(8), CpuStream::new());
    let nothing = || ();
    let other_stream = CpuStream::new();
    let favored = |stream| run(stream, &usage, nothing).expect("no ranks");
    assert_eq!([favored(&stream), favored(&stream)], [false, true]);
    // This thread may also use the allocation by itself.
    let accesses = write(&usage);
    drop(InUse::begin(&accesses, User::this_thread(), Name::Text("test")).expect("no ranks"));
    assert!(favored(&stream));
    assert!(!favored(&other_stream));
    // Another thread waits for the end of the operation.
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let other = || {
            let accesses = write(&usage);
            drop(
                InUse::begin(&accesses, User::this_thread(), Name::Text("test")).expect("no ranks"),
            );
            assert!(ended.load(Ordering::Relaxed), "did not wait");
        };
        let work = || {
            scope.spawn(other);
            thread::sleep(Duration::from_millis(20));
            ended.store(true, Ordering::Relaxed);
        };
        assert!(run(&stream, &usage, work).expect("no ranks"));
    });
    assert_eq!([favored(&stream), favored(&stream)], [false, true]);
}

/// A thread that executes work does not wait for work that has not started, which must then wait
/// for the thread.
#[test]
fn work_that_has_not_started_is_held_back() -> Result<()> {
    let (usage, stream) = (Usage::new(8), CpuStream::new());
    let [is_in_work, has_accessed] = [const { AtomicBool::new(false) }; 2].map(Arc::new);
    let (gate, seen) = (Arc::clone(&is_in_work), Arc::clone(&has_accessed));
    let await_flag = |flag: &AtomicBool| {
        while !flag.load(Ordering::Acquire) {
            thread::yield_now();
        }
    };
    stream.enqueue(Command::Host(Arc::new(move || {
        await_flag(&gate);
        Ok(())
    })))?;
    let accesses = write(&usage);
    let uses = |user| Uses {
        accesses: &accesses,
        user,
        operation: Name::Text("test"),
        flagged: None,
    };
    let user = User::this_thread().on_stream(stream.source_id());
    let held = InUse::begin_enqueue(uses(user), false, |_| Ok(()))?;
    let ticket = stream.enqueue(Command::Host(Arc::new(move || {
        assert!(seen.load(Ordering::Acquire), "started during the access");
        Ok(())
    })))?;
    held.enqueued(&stream.work(ticket));
    let inside = User::this_thread().in_work(true);
    let held = InUse::begin(&accesses, inside, Name::Text("test"))?;
    is_in_work.store(true, Ordering::Release);
    thread::sleep(Duration::from_millis(50));
    has_accessed.store(true, Ordering::Release);
    drop(held);
    stream.synchronize()
}

/// A thread has seen that the stream is not capturing, and will wait for its operation, whose
/// memory it then frees.
#[test]
fn a_capture_that_began_meanwhile_refuses_the_work() -> Result<()> {
    let stream = CpuStream::new();
    let node = || Command::Host(Arc::new(|| Ok(())));
    stream.begin_capture()?;
    let refused = stream.enqueue_if(node(), false, false);
    assert!(
        matches!(refused, Err(Error::CaptureState { .. })),
        "{refused:?}"
    );
    stream.enqueue_if(node(), true, false)?;
    assert_eq!(stream.end_capture()?.len(), 1);
    let refused = stream.enqueue_if(node(), true, false);
    assert!(
        matches!(refused, Err(Error::CaptureState { .. })),
        "{refused:?}"
    );
    Ok(())
}
