//! Data, position and order of transfers.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::thread;
use std::time::Instant;

use super::*;
use crate::{Connector, Notify, RemoteKey, Route};
use fusewire_driver::Segment;

#[test]
fn partial_views_land_where_they_belong_and_nowhere_else() {
    for kind in kinds() {
        let (a, b) = pair(kind);
        for (from, to) in [(&a, &b), (&b, &a)] {
            for target in memories(10_000) {
                let bytes = pattern(5_000, 7);
                let source = Memory::register(bytes.clone()).unwrap();
                // The key is converted to text and back, as if it were sent to another process.
                let key: RemoteKey = target.remote_key().to_string().parse().unwrap();
                let view = source.view(100..4_100).unwrap();
                let write = from.write(view, key.range(3_001, 4_000), Notify::Yes, LONG);
                write.unwrap().wait().unwrap();
                to.wait_for_write(LONG).unwrap();
                let mut expected = vec![0; 10_000];
                expected[3_001..7_001].copy_from_slice(&bytes[100..4_100]);
                assert!(contents(&target) == expected, "{kind:?}");

                let back = Memory::register(vec![9; 3_000]).unwrap();
                let view = back.view_mut(500..=1_499).unwrap();
                let read = from.read(view, key.range(6_500, 1_000), LONG).unwrap();
                read.wait().unwrap();
                let mut seen = vec![9; 3_000];
                seen[500..1_500].copy_from_slice(&expected[6_500..7_500]);
                assert!(contents(&back) == seen, "{kind:?}");
            }
        }
        let none = Duration::from_millis(1);
        assert_eq!(failure(a.wait_for_write(none)), TransportFailure::Timeout);
        assert!(a.connected() && b.connected());
    }
}

#[test]
fn no_bytes_and_many_bytes() {
    for kind in kinds() {
        let (a, b) = pair(kind);
        for bytes in [0, 1, 8_191, 8_193, 64 << 20] {
            for target in memories(bytes) {
                let sent = pattern(bytes, 3);
                let source = Memory::register(sent.clone()).unwrap();
                let key = target.remote_key();
                let view = source.view(..).unwrap();
                let write = a.write(view, key.whole(), Notify::Yes, LONG).unwrap();
                b.wait_for_write(LONG).unwrap();
                assert!(contents(&target) == sent, "{kind:?} {bytes}");
                write.wait().unwrap();
                let back = Memory::allocate(bytes).unwrap();
                let view = back.view_mut(..).unwrap();
                a.read(view, key.whole(), LONG).unwrap().wait().unwrap();
                assert!(contents(&back) == sent, "{kind:?} {bytes}");
            }
        }
    }
}

#[test]
fn notifications_are_counted_and_come_behind_their_bytes() {
    const COUNT: u64 = 5_000;
    // The test alternates between memory that the peer can map and memory that it cannot map. The
    // writes must not overtake each other.
    let way = |round: u64| usize::from(round.is_multiple_of(3));
    for kind in kinds() {
        let (a, b) = pair(kind);
        let targets = memories(8);
        let keys = targets.each_ref().map(Memory::remote_key);
        thread::scope(|scope| {
            scope.spawn(|| {
                let source = Memory::allocate(8 * COUNT as usize).unwrap();
                let mut pending = Vec::new();
                for round in 0..COUNT {
                    let at = 8 * round as usize;
                    source.copy_from(at, &(round + 1).to_le_bytes()).unwrap();
                    let view = source.view(at..at + 8).unwrap();
                    let key = keys[way(round)];
                    pending.push(a.write(view, key.whole(), Notify::Yes, LONG).unwrap());
                }
                for write in pending {
                    write.wait().unwrap();
                }
            });
            let mut newest = [0; 2];
            for round in 0..COUNT {
                newest[way(round)] = round + 1;
                b.wait_for_write(LONG).unwrap();
                for (memory, newest) in targets.iter().zip(newest) {
                    let mut seen = [0; 8];
                    memory.copy_to(0, &mut seen).unwrap();
                    // The memory contains the data of the newest write whose notification was
                    // taken, or of a later write.
                    let seen = u64::from_le_bytes(seen);
                    assert!(seen >= newest, "{kind:?}: {seen} instead of {newest}");
                }
            }
            let none = Duration::from_millis(20);
            assert_eq!(failure(b.wait_for_write(none)), TransportFailure::Timeout);
        });
    }
}

#[test]
fn both_sides_write_and_read_at_once() {
    for kind in kinds() {
        let (a, b) = pair(kind);
        let bytes = 8 << 20;
        let [to_a, to_b] = [0, 1].map(|_| Memory::register(vec![0; bytes]).unwrap());
        thread::scope(|scope| {
            for (side, own, other, seed) in [(&a, &to_a, &to_b, 1), (&b, &to_b, &to_a, 2)] {
                scope.spawn(move || {
                    let sent = pattern(bytes, seed);
                    let source = Memory::register(sent.clone()).unwrap();
                    let back = Memory::register(vec![0; bytes]).unwrap();
                    for _ in 0..4 {
                        let remote = other.remote_key().whole();
                        let view = source.view(..).unwrap();
                        let write = side.write(view, remote, Notify::Yes, LONG).unwrap();
                        let read = side.read(back.view_mut(..).unwrap(), remote, LONG).unwrap();
                        side.wait_for_write(LONG).unwrap();
                        write.wait().unwrap();
                        read.wait().unwrap();
                        assert!(contents(&back) == sent);
                    }
                    assert!(contents(own) == pattern(bytes, 3 - seed));
                });
            }
        });
    }
}

#[test]
fn memory_that_is_registered_twice_is_registered_once() {
    let segment = Segment::create(4096, "fusewire-test").unwrap();
    let first = Memory::register_segment(segment.clone()).unwrap();
    let second = Memory::register_segment(segment).unwrap();
    assert!(!first.reused_registration() && second.reused_registration());
    assert_eq!(first.remote_key(), second.remote_key());

    let mut bytes = vec![5; 64];
    // SAFETY: the bytes outlive both registrations, and nothing else uses them.
    let raw = unsafe { Memory::register_raw(bytes.as_mut_ptr(), 64) }.unwrap();
    // SAFETY: the bytes outlive both registrations, and nothing else uses them.
    let again = unsafe { Memory::register_raw(bytes.as_mut_ptr(), 64) }.unwrap();
    // SAFETY: the bytes outlive the registration, and nothing else uses them.
    let part = unsafe { Memory::register_raw(bytes.as_mut_ptr(), 63) }.unwrap();
    assert!(again.reused_registration() && !part.reused_registration());
    assert_eq!(raw.remote_key(), again.remote_key());
    assert_ne!(raw.remote_key(), part.remote_key());

    // The registration ends when the last of the two handles is dropped.
    let (a, _b) = pair(Kind::Tcp);
    let key = raw.remote_key();
    let source = Memory::register(vec![6; 64]).unwrap();
    let write = || {
        let view = source.view(..).unwrap();
        a.write(view, key.whole(), Notify::No, LONG).unwrap().wait()
    };
    drop(raw);
    write().unwrap();
    drop(again);
    assert_eq!(failure(write()), TransportFailure::Refused);
    drop(part);
    assert_eq!(bytes, [6; 64]);
}

#[test]
fn views_are_checked() {
    let memory = Memory::allocate(100).unwrap();
    assert_eq!(memory.view(..).unwrap().len(), 100);
    assert_eq!(memory.view(100..).unwrap().len(), 0);
    let backwards = core::ops::Range { start: 6, end: 5 };
    assert!(memory.view(backwards).is_err());
    assert!(memory.view(..101).is_err());
    assert!(memory.view(101..).is_err());
    assert!(memory.view_mut(..=usize::MAX).is_err());
    assert!(memory.copy_from(98, &[0; 3]).is_err());
    assert!(memory.copy_to(usize::MAX, &mut [0; 3]).is_err());
    // SAFETY: `register_raw` refuses null before it uses the pointer.
    assert!(unsafe { Memory::register_raw(core::ptr::null_mut(), 1) }.is_err());
    let (a, _b) = pair(Kind::Tcp);
    let remote = memory.remote_key().range(0, 99);
    assert!(
        a.write(memory.view(..).unwrap(), remote, Notify::No, LONG)
            .is_err()
    );
}

/// Words signal that the writes before them have been written.
#[test]
fn a_stored_word_follows_the_bytes_before_it() {
    const ROUNDS: u64 = 2_000;
    const SIZE: usize = 4_096;
    for kind in kinds() {
        let (a, b) = pair(kind);
        let data = memories(SIZE);
        let signal = Memory::allocate(64).unwrap();
        let keys = data.each_ref().map(Memory::remote_key);
        let word = signal.remote_key().range(8, 8);
        thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    let source = Memory::register(vec![round as u8; SIZE]).unwrap();
                    let key = keys[round as usize % 2];
                    let view = source.view(..).unwrap();
                    let write = a.write(view, key.whole(), Notify::No, LONG).unwrap();
                    // Both halves of the word change, so that a torn word is noticed.
                    let store = a.store(round << 32 | round, word, LONG).unwrap();
                    write.wait().unwrap();
                    store.wait().unwrap();
                    // The receiver answers, so that its memory is not overwritten.
                    a.wait_for_write(LONG).unwrap();
                }
            });
            // SAFETY: the word is aligned and lives as long as `signal`. It is accessed atomically.
            let seen = unsafe { AtomicU64::from_ptr(signal.as_ptr().add(8).cast()) };
            let empty = Memory::allocate(0).unwrap();
            for round in 1..=ROUNDS {
                let start = Instant::now();
                loop {
                    let value = seen.load(Ordering::Acquire);
                    if value == round << 32 | round {
                        break;
                    }
                    // Soft-RoCE writes the lower bytes first.
                    let before = (round - 1) << 32 | (round - 1);
                    let is_torn = value != before;
                    let may_be_torn = kind == Kind::Verbs && value < round << 32;
                    assert!(!is_torn || may_be_torn, "{kind:?} {round}: {value:#x}");
                    assert!(start.elapsed() < LONG);
                    thread::yield_now();
                }
                let bytes = contents(&data[round as usize % 2]);
                assert!(bytes == vec![round as u8; SIZE], "{kind:?} {round}");
                let view = empty.view(..).unwrap();
                let remote = empty.remote_key().whole();
                b.write(view, remote, Notify::Yes, LONG)
                    .unwrap()
                    .wait()
                    .unwrap();
            }
        });
        // Neighbouring bytes are untouched.
        let bytes = contents(&signal);
        assert!(bytes[..8] == [0; 8] && bytes[16..] == [0; 48]);
    }
}

#[test]
fn words_at_odd_addresses_and_of_other_sizes_are_refused() {
    for kind in kinds() {
        let (a, b) = pair(kind);
        for memory in [Memory::allocate(64).unwrap(), aligned(64)] {
            let key = memory.remote_key();
            for offset in [1, 4, 63, 64] {
                let store = a.store(u64::MAX, key.range(offset, 8), LONG).unwrap();
                assert_eq!(
                    failure(store.wait()),
                    TransportFailure::Refused,
                    "{kind:?} {offset}"
                );
            }
            assert!(a.store(1, key.range(0, 4), LONG).is_err());
            a.store(5, key.range(56, 8), LONG).unwrap().wait().unwrap();
            let mut expected = vec![0; 64];
            expected[56] = 5;
            assert_eq!(contents(&memory), expected, "{kind:?}");
        }
        assert!(a.connected() && b.connected());
    }
}

/// Returns registered memory at an aligned address that a peer cannot map.
fn aligned(bytes: usize) -> Memory {
    let words = vec![0_u64; bytes / 8].leak();
    // SAFETY: the memory is never freed, and only accessed through the result.
    unsafe { Memory::register_raw(words.as_mut_ptr().cast(), bytes) }.unwrap()
}

#[test]
fn connectors_choose_the_same_route_on_both_sides() {
    let has_rdma = kinds().contains(&Kind::Verbs);
    let connector = |host, forced| Connector::with(host, Verbs::new(), Some(Tcp::local()), forced);
    let between_hosts = if has_rdma { Route::Verbs } else { Route::Tcp };
    for (host, forced, route) in [
        ("a", None, Route::SharedMemory),
        ("b", None, between_hosts),
        ("a", Some(Route::Tcp), Route::Tcp),
    ] {
        let (a, b) = (connector("a", forced), connector(host, None));
        assert_eq!(a.route(b.endpoint()).unwrap(), route);
        let to_b = a.transport(b.endpoint()).unwrap();
        let to_a = b.transport(a.endpoint()).unwrap();
        join(&to_b, &to_a);
        assert_eq!(to_a.bind().unwrap().scheme(), route.to_string());
        let memory = Memory::register(vec![6; 100]).unwrap();
        let target = Memory::allocate(100).unwrap();
        let view = memory.view(..).unwrap();
        let write = to_b.write(view, target.remote_key().whole(), Notify::Yes, LONG);
        write.unwrap().wait().unwrap();
        to_a.wait_for_write(LONG).unwrap();
        assert_eq!(contents(&target), [6; 100]);
    }
}
