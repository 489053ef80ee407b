//! Tests of the transport, run with all providers.

mod failures;
mod moves;
mod processes;
mod strangers;
mod verbs;

use core::time::Duration;
use std::env;

use super::{Memory, SharedMemory, Tcp, Transport, TransportFailure, Verbs};
use crate::{Error, Result};

const LONG: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Tcp,
    Shared,
    Verbs,
}

/// Returns the providers to test. RDMA is tested if this host has a device, and must be tested if
/// `FUSEWIRE_REQUIRE` lists `verbs`.
fn kinds() -> Vec<Kind> {
    let required = env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    let has_device = transport(Kind::Verbs).supported();
    if required.split(',').any(|required| required == "verbs") {
        assert!(
            has_device,
            "no RDMA device: {:?}",
            transport(Kind::Verbs).bind().err()
        );
    }
    let mut kinds = vec![Kind::Tcp, Kind::Shared];
    match has_device {
        true => kinds.push(Kind::Verbs),
        false => eprintln!("skipped for RDMA: this host has no device"),
    }
    kinds
}

/// Returns a time that is short for a person, and long for this machine. The virtual machine of
/// `.ci/rdma-vm` is slow.
fn soon() -> Duration {
    let is_virtual = env::var_os("FUSEWIRE_TEST_RDMA").is_some();
    Duration::from_secs(if is_virtual { 15 } else { 2 })
}

fn transport(kind: Kind) -> Transport {
    match kind {
        Kind::Tcp => Transport::new(Tcp::local()),
        Kind::Shared => Transport::new(SharedMemory),
        Kind::Verbs => Transport::new(Verbs::new()),
    }
}

/// Binds both transports and connects them to each other.
fn join(a: &Transport, b: &Transport) {
    let (url_a, url_b) = (a.bind().unwrap(), b.bind().unwrap());
    a.connect(&url_b, LONG).unwrap();
    b.connect(&url_a, LONG).unwrap();
    assert!(a.connected() && b.connected());
}

fn pair(kind: Kind) -> (Transport, Transport) {
    let (a, b) = (transport(kind), transport(kind));
    assert!(a.supported() && !a.connected());
    join(&a, &b);
    (a, b)
}

/// Returns two [`Memory`] objects of `bytes` bytes. With the shared-memory provider, a peer maps
/// the first one and accesses the second one through the socket.
fn memories(bytes: usize) -> [Memory; 2] {
    [
        Memory::allocate(bytes).unwrap(),
        Memory::register(vec![0; bytes]).unwrap(),
    ]
}

fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_to(0, &mut bytes).unwrap();
    bytes
}

fn failure(result: Result<()>) -> TransportFailure {
    match result {
        Err(Error::Call { kind, .. }) => kind,
        other => panic!("no failure of a transport: {other:?}"),
    }
}
