//! Refusals, broken connections, aborts and timeouts within one process.

use core::time::Duration;
use std::thread;
use std::time::Instant;

use super::strangers::silent_peer;
use super::*;
use crate::{Notify, RemoteBuffer, RemoteKey};

#[test]
fn wrong_keys_and_ranges_are_refused_and_the_connection_stays() {
    for kind in kinds() {
        let (a, b) = pair(kind);
        let source = Memory::register(vec![1; 300_000]).unwrap();
        let back = Memory::register(vec![2; 300_000]).unwrap();
        for target in memories(300_000) {
            let key = target.remote_key();
            let mut wrong = key.to_bytes();
            wrong[8] ^= 1;
            let wrong = RemoteKey::from_bytes(&wrong).unwrap();
            let mut longer = key.to_bytes();
            longer[23] = 0x7f;
            let longer = RemoteKey::from_bytes(&longer).unwrap();
            let gone = Memory::allocate(300_000).unwrap().remote_key();
            for remote in [
                wrong.range(0, 300_000),
                key.range(1, 300_000),
                key.range(u64::MAX, 300_000),
                longer.range(300_000, 300_000),
                gone.whole(),
                wrong.range(0, 0),
                key.range(300_001, 0),
            ] {
                let len = remote.len as usize;
                let view = source.view(..len).unwrap();
                let write = a.write(view, remote, Notify::Yes, LONG).unwrap();
                assert_eq!(failure(write.wait()), TransportFailure::Refused);
                let view = back.view_mut(..len).unwrap();
                let read = a.read(view, remote, LONG).unwrap();
                let error = read.wait().unwrap_err();
                assert!(error.to_string().contains("refused"), "{error}");
                assert_eq!(failure(read.wait()), TransportFailure::Refused);
            }
            assert!(contents(&target) == vec![0; 300_000]);
            assert!(contents(&back) == vec![2; 300_000]);
            let none = Duration::from_millis(1);
            assert_eq!(failure(b.wait_for_write(none)), TransportFailure::Timeout);
            // The peer has mapped the memory. The peer must still detect that the memory was
            // dropped.
            let write = |remote: RemoteBuffer| {
                let view = source.view(..).unwrap();
                a.write(view, remote, Notify::No, LONG).unwrap().wait()
            };
            write(key.whole()).unwrap();
            assert!(contents(&target) == vec![1; 300_000]);
            drop(target);
            assert_eq!(failure(write(key.whole())), TransportFailure::Refused);
        }
        assert!(a.connected() && b.connected());
    }
}

#[test]
fn the_end_of_one_side_breaks_the_other_which_connects_again() {
    for kind in kinds() {
        let (a, b) = pair(kind);
        let memory = Memory::allocate(8).unwrap();
        let remote = memory.remote_key().whole();
        let write = |from: &Transport| {
            from.write(memory.view(..).unwrap(), remote, Notify::Yes, LONG)
                .and_then(|write| write.wait())
        };
        write(&b).unwrap();
        write(&b).unwrap();
        let old = a.bind().unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| [0, 1, 2].map(|_| a.wait_for_write(LONG)));
            thread::sleep(Duration::from_millis(50));
            let start = Instant::now();
            drop(b);
            let [first, second, third] = waits.join().unwrap();
            first.unwrap();
            second.unwrap();
            assert_eq!(failure(third), TransportFailure::Broken);
            assert!(start.elapsed() < soon());
        });
        assert!(!a.connected());
        assert_eq!(failure(write(&a)), TransportFailure::Broken);
        let c = transport(kind);
        let url_c = c.bind().unwrap();
        assert_eq!(failure(a.connect(&url_c, LONG)), TransportFailure::Broken);
        join(&a, &c);
        assert_ne!(a.bind().unwrap(), old);
        // No notification of the old connection remains.
        let none = Duration::from_millis(5);
        assert_eq!(failure(a.wait_for_write(none)), TransportFailure::Timeout);
        write(&c).unwrap();
        a.wait_for_write(LONG).unwrap();
        write(&a).unwrap();
    }
}

#[test]
fn a_wait_is_aborted_from_another_thread() {
    for kind in kinds() {
        let (a, b) = pair(kind);
        thread::scope(|scope| {
            let waits = scope.spawn(|| a.wait_for_write(LONG));
            thread::sleep(Duration::from_millis(50));
            let start = Instant::now();
            a.abort();
            assert_eq!(failure(waits.join().unwrap()), TransportFailure::Aborted);
            assert!(start.elapsed() < soon());
        });
        assert_eq!(failure(a.wait_for_write(LONG)), TransportFailure::Aborted);
        assert_eq!(failure(b.wait_for_write(LONG)), TransportFailure::Broken);
    }
}

#[test]
fn operations_are_aborted_or_time_out_in_time() {
    for abort in [true, false] {
        let a = transport(Kind::Tcp);
        let url = a.bind().unwrap();
        let (_silent, peer) = silent_peer(&url);
        a.connect(&peer, LONG).unwrap();
        let memory = Memory::register(vec![0; 64 << 20]).unwrap();
        let remote = memory.remote_key().whole();
        let write = |timeout| {
            let view = memory.view(..).unwrap();
            a.write(view, remote, Notify::No, timeout).unwrap()
        };
        let patient = write(LONG);
        let start = Instant::now();
        if abort {
            let read = a.read(memory.view_mut(..).unwrap(), remote, LONG).unwrap();
            assert!(patient.wait_timeout(Duration::from_millis(50)).is_none());
            a.abort();
            assert_eq!(failure(patient.wait()), TransportFailure::Aborted);
            assert_eq!(failure(read.wait()), TransportFailure::Aborted);
            assert!(start.elapsed() < soon());
            assert_eq!(failure(write(LONG).wait()), TransportFailure::Aborted);
        } else {
            let timeout = Duration::from_millis(200);
            let hasty = write(timeout);
            assert_eq!(failure(hasty.wait()), TransportFailure::Timeout);
            assert!((timeout..timeout + soon()).contains(&start.elapsed()));
            assert_eq!(failure(patient.wait()), TransportFailure::Broken);
            assert_eq!(failure(write(LONG).wait()), TransportFailure::Broken);
            assert_eq!(failure(a.wait_for_write(LONG)), TransportFailure::Broken);
        }
    }
}

#[test]
fn a_dropped_transport_ends_its_operations() {
    let a = transport(Kind::Tcp);
    let (_silent, peer) = silent_peer(&a.bind().unwrap());
    a.connect(&peer, LONG).unwrap();
    let memory = Memory::register(vec![0; 8]).unwrap();
    let remote = memory.remote_key().whole();
    let read = a.read(memory.view_mut(..).unwrap(), remote, LONG).unwrap();
    assert!(!read.is_done());
    drop(a);
    assert_eq!(failure(read.wait()), TransportFailure::Aborted);
}

#[test]
fn calls_before_bind_and_connect_say_so() {
    for kind in kinds() {
        let (a, b) = (transport(kind), transport(kind));
        let memory = Memory::allocate(8).unwrap();
        let remote = memory.remote_key().whole();
        let url_b = b.bind().unwrap();
        assert_eq!(
            failure(a.connect(&url_b, LONG)),
            TransportFailure::NotConnected
        );
        assert_eq!(
            failure(a.wait_for_write(LONG)),
            TransportFailure::NotConnected
        );
        a.bind().unwrap();
        let write = a
            .write(memory.view(..).unwrap(), remote, Notify::No, LONG)
            .unwrap();
        assert_eq!(failure(write.wait()), TransportFailure::NotConnected);
        drop(b);
        assert_eq!(failure(a.connect(&url_b, LONG)), TransportFailure::Connect);
        let other = kinds().into_iter().find(|other| *other != kind).unwrap();
        let other = transport(other).bind().unwrap();
        assert!(a.connect(&other, LONG).is_err());
        // The transport is still usable for its peer.
        join(&a, &transport(kind));
    }
}
