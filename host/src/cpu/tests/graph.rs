//! Capture and replay.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use super::super::{Event, Item, Stream};
use super::{add, capture, failing, fold, launch, value};
use crate::Error;

#[test]
fn a_graph_replays_with_the_contents_of_the_moment() {
    let (stream, target) = (Stream::new(), Arc::default());
    let graph = capture(&stream, || {
        stream.run(&launch(fold, &target, 1)).unwrap();
        let ticket = stream
            .enqueue(Item::Launch(launch(add, &target, 2)))
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
    let (stream, target) = (Stream::new(), Arc::<AtomicU64>::default());
    let record = Event::new();
    let calls = Arc::new(AtomicU32::new(0));
    let first = capture(&stream, || stream.run(&launch(add, &target, 1)).unwrap());
    let second = capture(&stream, || {
        stream.enqueue(Item::Graph(first.clone())).unwrap();
        let calls = Arc::clone(&calls);
        let count = move || {
            calls.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        stream.enqueue(Item::HostFn(Arc::new(count))).unwrap();
        stream.record(&record).unwrap();
        stream.wait_event(&record).unwrap();
    });
    assert_eq!(Arc::strong_count(&target), 2);
    drop(first);
    drop(stream);
    let other = Stream::new();
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
    let (one, two, target) = (Stream::new(), Stream::new(), Arc::default());
    let (fork, join) = (Event::new(), Event::new());
    let graph = capture(&one, || {
        one.run(&launch(fold, &target, 1)).unwrap();
        one.record(&fork).unwrap();
        two.wait_event(&fork).unwrap();
        assert!(two.is_capturing());
        assert!(matches!(two.end_capture(), Err(Error::CaptureState { .. })));
        two.enqueue(Item::Launch(launch(fold, &target, 2))).unwrap();
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
    let (stream, target) = (Stream::new(), Arc::default());
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
    let stream = Stream::new();
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
    let once = Item::Host(Box::new(|| Ok(())));
    assert!(matches!(
        stream.enqueue(once),
        Err(Error::CaptureState { .. })
    ));
    let empty = stream.end_capture().unwrap();
    assert!(empty.is_empty());
    empty.instantiate().unwrap().run(&stream).unwrap();
    // A capture that its stream takes along frees the streams that joined it.
    let (event, joined) = (Event::new(), Stream::new());
    stream.begin_capture().unwrap();
    stream.record(&event).unwrap();
    joined.wait_event(&event).unwrap();
    drop(stream);
    assert!(!joined.is_capturing());
    joined.synchronize().unwrap();
}
