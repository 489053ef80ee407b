//! Concurrent sends to and receives from several peers. Operations with different peers are not
//! ordered, so no pattern of them can deadlock. Protocol: [`fusewire_device::channel`]. Each step
//! moves one slot of an operation that can proceed.

use bytemuck::{Pod, Zeroable};
use fusewire_device::channel::{Message, Receiver, Sender};
use fusewire_device::mem::{self, Policy, Scope};
use fusewire_device::session::Session;
use fusewire_device::wait::WaitKind;
use fusewire_device::{Aborted, Group, Machine, bulk, kernel};

/// Parts of a message that blocks share start at multiples of this many bytes.
const PART: usize = 256;

/// Value of [`BatchOp::after`] if there is no preceding operation.
pub const NONE: u32 = u32::MAX;

/// Kind of a [`BatchOp`].
pub mod kind {
    /// Send to a peer.
    pub const SEND: u32 = 0;
    /// Receive from a peer.
    pub const RECV: u32 = 1;
    /// Copy from this rank to itself.
    pub const COPY: u32 = 2;
}

/// One operation of a batch; plain data in device memory.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BatchOp {
    /// [`kind::SEND`], [`kind::RECV`] or [`kind::COPY`].
    pub kind: u32,
    /// The peer.
    pub peer: u32,
    /// Index of the preceding operation of the same kind and peer, or [`NONE`]: messages between
    /// two ranks keep their order.
    pub after: u32,
    /// Unused.
    pub unused: u32,
    /// Fingerprint of the call, equal at both ends.
    pub fingerprint: u64,
    /// Bytes.
    pub bytes: u64,
    /// Address of the source, or of the target of a receive.
    pub at: u64,
    /// Address of a copy's target.
    pub to: u64,
}

/// Progress of a finished operation.
const FINISHED: u64 = u64::MAX;

/// Runs the first operations of `ops`, as many as the count of the launch. `progress` has a word
/// for each operation and block.
///
/// # Safety
/// `ops` must be readable for `count` operations, and their memory valid for their kind of access.
/// Only this launch may access `progress`. Peers must be ranks. An invalid `after` means none.
#[kernel]
pub unsafe fn batch(
    session: &mut Session<impl Machine>,
    ops: *const BatchOp,
    progress: *mut u64,
) -> Result<(), Aborted> {
    let (block, comm, count) = (session.block(), *session.comm(), session.count());
    let index = block.index();
    let progress = progress.wrapping_add((u64::from(index) * count) as usize);
    // SAFETY: `at < count` at every call, and `ops` has `count` operations (precondition).
    let operation = |at: u64| unsafe { mem::read(ops.add(at as usize)) };
    // SAFETY: `at < count` at every call. Only this block's leader accesses these words.
    let done = |at: u64| unsafe { mem::read(progress.add(at as usize)) };
    // SAFETY: as for `done`.
    let set = |at: u64, value: u64| unsafe { mem::write(progress.add(at as usize), value) };
    if block.is_leader() {
        let mut at = 0;
        while at < count {
            set(at, 0);
            at += 1;
        }
    }
    let mut left = count;
    let mut first = 0;
    while left > 0 {
        let mut picked = 0;
        if block.is_leader() {
            let mut awaited = 0;
            while awaited + 1 < count && done(awaited) == FINISHED {
                awaited += 1;
            }
            let waits = operation(awaited);
            let wait = if waits.kind == kind::SEND {
                WaitKind::Credit
            } else {
                WaitKind::Slot
            };
            let found = session.ctx().until(wait, waits.peer, 0, || {
                let mut seen = 0;
                let mut tried = 0;
                let mut at = first;
                while tried < count {
                    let op = operation(at);
                    let after = u64::from(op.after);
                    if done(at) != FINISHED && (after >= count || done(after) == FINISHED) {
                        let movable = match op.kind {
                            kind::SEND => {
                                // SAFETY: the peer is a rank (precondition).
                                let end = unsafe { Sender::new(session, op.peer) };
                                end.acquire(&comm, index)
                            }
                            kind::RECV => {
                                // SAFETY: the peer is a rank (precondition).
                                let end = unsafe { Receiver::new(session, op.peer) };
                                end.arrived(&comm, index)
                            }
                            _ => Ok(()),
                        };
                        match movable {
                            Ok(()) => return Ok(at),
                            Err(value) => seen = value,
                        }
                    }
                    tried += 1;
                    at += 1;
                    if at == count {
                        at = 0;
                    }
                }
                Err(seen)
            });
            if let Some(at) = found {
                let op = operation(at);
                let (from, to) = block.slice(op.bytes as usize, PART);
                let message = Message {
                    fingerprint: op.fingerprint,
                    bytes: (to - from) as u64,
                };
                let fits = op.kind != kind::RECV
                    // SAFETY: the peer is a rank (precondition).
                    || unsafe { Receiver::new(session, op.peer) }.check(session, message);
                if fits {
                    picked = at + 1;
                }
            }
        }
        let picked = block.broadcast(picked);
        if picked == 0 {
            return session.settle(false);
        }
        let at = picked - 1;
        let moved = block.broadcast(if block.is_leader() { done(at) } else { 0 });
        block.acquired(Scope::System);
        let op = operation(at);
        let (from, to) = block.slice(op.bytes as usize, PART);
        let message = Message {
            fingerprint: op.fingerprint,
            bytes: (to - from) as u64,
        };
        let memory = (op.at as *mut u8).wrapping_add(from);
        // SAFETY: `from..to` is in the buffers (precondition); the leader has acquired the slot.
        let moved = moved
            + unsafe {
                match op.kind {
                    kind::SEND => {
                        Sender::new(session, op.peer).push(session, message, memory, moved)
                    }
                    kind::RECV => {
                        Receiver::new(session, op.peer).pull(session, message, memory, moved)
                    }
                    _ => {
                        let target = (op.to as *mut u8).wrapping_add(from);
                        bulk::copy(block, target, memory, to - from, Policy::Cached);
                        message.bytes
                    }
                }
            };
        // All lanes must take the same branches below.
        let finished = block.broadcast(u64::from(moved >= message.bytes)) == 1;
        if block.is_leader() {
            set(at, if finished { FINISHED } else { moved });
        }
        if finished {
            left -= 1;
        }
        first = if picked == count { 0 } else { picked };
    }
    Ok(())
}
