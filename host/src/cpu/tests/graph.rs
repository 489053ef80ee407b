//! Tests of capture and replay.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use super::super::{Command, CpuEvent, CpuStream};
use super::{add, capture, failing, fold, launch, value};
use crate::Error;

#[test]
fn a_graph_replays_with_the_contents_of_the_moment() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    let graph = capture(&stream, || {
        stream.run(&launch(fold, &target, 1)).unwrap();
        let ticket = stream
            .enqueue(Command::Launch(launch(add, &target, 2)))
            .unwrap();
        assert!(stream.is_complete(ticket));
        stream.wait(ticket, None).unwrap();
    });
    assert_eq!(value(&target), 0, "captured work ran");
    for i in 0..1000 {
        target.store(i, Ordering::Relaxed);
        if i % 2 == 0 {
            graph.run(&stream).unwrap();
        } else {
            let ticket = graph.launch(&stream).unwrap();
            stream.wait(ticket, None).unwrap();
        }
        assert_eq!(value(&target), i * 3 + 3);
    }
}

#[test]
fn graphs_outlive_what_they_came_from() {
    let (stream, target) = (CpuStream::new(), Arc::<AtomicU64>::default());
    let record = CpuEvent::new();
    let calls = Arc::new(AtomicU32::new(0));
    let first = capture(&stream, || stream.run(&launch(add, &target, 1)).unwrap());
    let second = capture(&stream, || {
        stream.enqueue(Command::Graph(first.clone())).unwrap();
        let calls = Arc::clone(&calls);
        let count = move || {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        stream.enqueue(Command::Host(Arc::new(count))).unwrap();
        stream.record(&record).unwrap();
        stream.wait_event(&record).unwrap();
    });
    assert_eq!(Arc::strong_count(&target), 2);
    drop(first);
    drop(stream);
    let other = CpuStream::new();
    second.run(&other).unwrap();
    second.launch(&other).unwrap();
    other.synchronize().unwrap();
    assert_eq!((value(&target), calls.load(Ordering::Relaxed)), (2, 2));
    assert!(record.elapsed_since(&record).is_ok());
    drop(second);
    assert_eq!(Arc::strong_count(&target), 1, "a graph leaked");
}

#[test]
fn a_capture_spreads_along_events() {
    let (one, two, target) = (CpuStream::new(), CpuStream::new(), Arc::default());
    let (fork, join) = (CpuEvent::new(), CpuEvent::new());
    let graph = capture(&one, || {
        one.run(&launch(fold, &target, 1)).unwrap();
        one.record(&fork).unwrap();
        two.wait_event(&fork).unwrap();
        assert!(two.is_capturing());
        assert!(matches!(two.end_capture(), Err(Error::CaptureState { .. })));
        two.enqueue(Command::Launch(launch(fold, &target, 2)))
            .unwrap();
        two.record(&join).unwrap();
        one.wait_event(&join).unwrap();
        one.run(&launch(fold, &target, 3)).unwrap();
    });
    assert!(!two.is_capturing());
    two.run(&launch(add, &target, 0)).unwrap();
    assert_eq!(value(&target), 0);
    graph.run(&two).unwrap();
    assert_eq!(value(&target), (3 + 2) * 3 + 3);
}

#[test]
fn a_replay_ends_at_its_first_failure() {
    let (stream, target) = (CpuStream::new(), Arc::default());
    let graph = capture(&stream, || {
        stream.run(&launch(add, &target, 1)).unwrap();
        stream.enqueue(failing("inside")).unwrap();
        stream.run(&launch(add, &target, 1)).unwrap();
    });
    assert!(
        graph
            .run(&stream)
            .unwrap_err()
            .to_string()
            .contains("inside")
    );
    stream.synchronize().unwrap();
    graph.launch(&stream).unwrap();
    assert!(stream.synchronize().is_err());
    assert_eq!(value(&target), 2);
}

#[test]
fn captures_refuse_what_does_not_fit() {
    let stream = CpuStream::new();
    assert!(matches!(
        stream.end_capture(),
        Err(Error::CaptureState { .. })
    ));
    stream.begin_capture().unwrap();
    assert!(matches!(
        stream.begin_capture(),
        Err(Error::CaptureState { .. })
    ));
    assert!(matches!(
        stream.synchronize(),
        Err(Error::CaptureState { .. })
    ));
    let empty = stream.end_capture().unwrap();
    assert!(empty.is_empty());
    empty.instantiate().unwrap().run(&stream).unwrap();
    // Dropping the origin stream ends its capture and releases the streams that joined it.
    let (event, joined) = (CpuEvent::new(), CpuStream::new());
    stream.begin_capture().unwrap();
    stream.record(&event).unwrap();
    joined.wait_event(&event).unwrap();
    drop(stream);
    assert!(!joined.is_capturing());
    joined.synchronize().unwrap();
}

#[test]
fn a_branch_runs_concurrently_with_the_rest() {
    let (main, side) = (CpuStream::new(), CpuStream::new());
    let (fork, join, again) = (CpuEvent::new(), CpuEvent::new(), CpuEvent::new());
    let flag = Arc::new(AtomicU32::new(0));
    let seen = Arc::new(AtomicU32::new(0));
    let host = |stream: &CpuStream, call: Box<dyn Fn() -> crate::Result<()> + Send + Sync>| {
        stream.enqueue(Command::Host(Arc::from(call))).unwrap();
    };
    let set = |to: u32| {
        let flag = Arc::clone(&flag);
        Box::new(move || {
            flag.store(to, Ordering::Release);
            Ok(())
        })
    };
    let (awaited, noted) = (Arc::clone(&flag), Arc::clone(&seen));
    let graph = capture(&main, || {
        main.record(&fork).unwrap();
        side.wait_event(&fork).unwrap();
        side.branch();
        // The branch waits for later work of the origin stream, so a sequential replay would
        // deadlock.
        host(
            &side,
            Box::new(move || {
                while awaited.load(Ordering::Acquire) != 1 {
                    std::thread::yield_now();
                }
                noted.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }),
        );
        side.record(&join).unwrap();
        host(&main, set(1));
        main.wait_event(&join).unwrap();
        host(&main, set(2));
        // Tests an event in the opposite direction: the branch waits for the origin stream.
        main.record(&again).unwrap();
        side.wait_event(&again).unwrap();
        let (flag, seen) = (Arc::clone(&flag), Arc::clone(&seen));
        host(
            &side,
            Box::new(move || {
                let in_order = flag.load(Ordering::Acquire) == 2;
                seen.fetch_add(if in_order { 1 } else { 1000 }, Ordering::Relaxed);
                if seen.load(Ordering::Relaxed) >= 40 {
                    return Err(Error::launch("the branch fails"));
                }
                Ok(())
            }),
        );
    });
    assert!(!side.is_capturing());
    for replay in 1..20 {
        graph.run(&main).unwrap();
        // The replay also waits for branches that no stream joins.
        assert_eq!(seen.load(Ordering::Relaxed), 2 * replay);
    }
    let error = graph.run(&main).unwrap_err();
    assert!(error.to_string().contains("the branch fails"), "{error}");
    let ticket = graph.launch(&main).unwrap();
    assert!(main.wait(ticket, None).is_err());
}
