//! send and recv, over the channel between the two ranks. Protocol: [`fusewire_device::channel`].
//!
//! A send returns once its data is in the channel, so a short send does not wait for its receiver.

use fusewire_device::channel;
use fusewire_device::{Aborted, In, Machine, Out, Session, kernel};

/// Parts of a message that blocks share start at multiples of this many bytes.
const PART: usize = 256;

/// Sends `source` to the call's peer.
///
/// # Safety
/// During the launch, nothing else may write `source`.
#[kernel]
pub unsafe fn send(session: &mut Session<impl Machine>, source: In<u8>) -> Result<(), Aborted> {
    let Some(peer) = session.peer(session.call().root()) else {
        return session.settle(false);
    };
    let (first, last) = session.block().slice(source.len(), PART);
    // SAFETY: the precondition of this function.
    unsafe { channel::send(session, peer, source.slice(first, last - first)) }
}

/// Receives a message that fills `target` from the call's peer.
///
/// # Safety
/// During the launch, nothing else may access `target`.
#[kernel]
pub unsafe fn recv(session: &mut Session<impl Machine>, target: Out<u8>) -> Result<(), Aborted> {
    let Some(peer) = session.peer(session.call().root()) else {
        return session.settle(false);
    };
    let (first, last) = session.block().slice(target.len(), PART);
    // SAFETY: the precondition of this function.
    unsafe { channel::receive(session, peer, target.slice(first, last - first)) }
}
