//! send and recv, over the channel between the two ranks. Protocol: [`fusewire_device::channel`].
//!
//! A send returns once its data is in the channel, so short messages need no receiver yet.

use fusewire_device::channel;
use fusewire_device::layout::CommConst;
use fusewire_device::session::{Call, Session};
use fusewire_device::{Block, Machine, kernel};

/// Parts of a message that blocks share start at multiples of this many bytes.
const PART: usize = 256;

/// Sends `bytes` bytes at `source` to the call's peer.
///
/// # Safety
/// `constants` as for [`Session::begin`]; `source` readable for `bytes` bytes.
#[kernel]
pub unsafe fn send(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    bytes: u64,
    timeout_ns: u64,
    source: *const u8,
) {
    // SAFETY: the caller's promise.
    let Some(mut session) = (unsafe { Session::begin(block, constants, call, bytes, timeout_ns) })
    else {
        return;
    };
    let (first, last) = block.slice(bytes as usize, PART);
    let from = source.wrapping_add(first);
    // SAFETY: this block's part of the caller's buffer.
    if unsafe { channel::send(&mut session, Call(call).root(), from, (last - first) as u64) } {
        session.end();
    }
}

/// Receives `bytes` bytes from the call's peer to `target`.
///
/// # Safety
/// `constants` as for [`Session::begin`]; `target` writable for `bytes` bytes.
#[kernel]
pub unsafe fn recv(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    bytes: u64,
    timeout_ns: u64,
    target: *mut u8,
) {
    // SAFETY: the caller's promise.
    let Some(mut session) = (unsafe { Session::begin(block, constants, call, bytes, timeout_ns) })
    else {
        return;
    };
    let (first, last) = block.slice(bytes as usize, PART);
    let to = target.wrapping_add(first);
    // SAFETY: this block's part of the caller's buffer.
    if unsafe { channel::receive(&mut session, Call(call).root(), to, (last - first) as u64) } {
        session.end();
    }
}
