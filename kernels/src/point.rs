//! send and recv, over the channel between the two ranks. Protocol: [`fusewire_device::channel`].
//!
//! A send returns once its data is in the channel, so short messages need no receiver yet.

use fusewire_device::channel;
use fusewire_device::{Aborted, Machine, Session, kernel};

/// Parts of a message that blocks share start at multiples of this many bytes.
const PART: usize = 256;

/// Sends the bytes at `source` to the call's peer. The count of the launch is in bytes.
///
/// # Safety
/// `source` readable for the bytes.
#[kernel]
pub unsafe fn send(session: &mut Session<impl Machine>, source: *const u8) -> Result<(), Aborted> {
    let (first, last) = session.block().slice(session.count() as usize, PART);
    let from = source.wrapping_add(first);
    let (peer, bytes) = (session.call().root(), (last - first) as u64);
    // SAFETY: this block's part of the caller's buffer.
    let moved = unsafe { channel::send(session, peer, from, bytes) };
    session.settle(moved)
}

/// Receives bytes from the call's peer to `target`. The count of the launch is in bytes.
///
/// # Safety
/// `target` writable for the bytes.
#[kernel]
pub unsafe fn recv(session: &mut Session<impl Machine>, target: *mut u8) -> Result<(), Aborted> {
    let (first, last) = session.block().slice(session.count() as usize, PART);
    let to = target.wrapping_add(first);
    let (peer, bytes) = (session.call().root(), (last - first) as u64);
    // SAFETY: this block's part of the caller's buffer.
    let moved = unsafe { channel::receive(session, peer, to, bytes) };
    session.settle(moved)
}
