//! Tests of the transport, run with both providers.

mod failures;
mod moves;
mod processes;
mod strangers;

use core::time::Duration;

use super::{Memory, SharedMemory, Tcp, Transport, TransportFailure};
use crate::{Error, Result};

const LONG: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Tcp,
    Shared,
}

const KINDS: [Kind; 2] = [Kind::Tcp, Kind::Shared];

fn transport(kind: Kind) -> Transport {
    match kind {
        Kind::Tcp => Transport::new(Tcp::local()),
        Kind::Shared => Transport::new(SharedMemory),
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
