//! A credited ring between two ranks: what send and receive are made of.
//!
//! # The channel protocol
//! The receiver's pad holds a ring of slots a sender. Chunk k goes to slot k mod depth.
//!
//! - **Who may overwrite what:** the sender overwrites the slot of chunk k with chunk k + depth;
//! - **after having acquired** a credit word of at least k + 1;
//! - **released by** the receiver, after its last read of chunk k.
//!
//! The receiver reads chunk k after having acquired a tail word of at least k + 1, released by the
//! sender after its last write of the chunk. Credit and tail only grow; both live where they are
//! polled: the tail in the receiver's pad, the credit in the sender's. A block has channels of its own.

use crate::comm::Comm;
use crate::group::{Group, Machine};
use crate::layout::{ChannelState, FailureKind, LINE};
use crate::mem::{self, Order, Policy, Scope};
use crate::session::Session;
use crate::wait::Place;

#[inline(always)]
fn line(comm: &Comm, at: u32, block: u32, peer: u32, which: u64) -> *mut u8 {
    let index = u64::from(block) * u64::from(comm.size()) + u64::from(peer);
    let offset = comm.pad().channel_lines + (index * 3 + which) * LINE;
    comm.pad_of(at).wrapping_add(offset as usize)
}

#[inline(always)]
fn slot(comm: &Comm, at: u32, block: u32, source: u32, chunk: u64) -> *mut u8 {
    let pad = comm.pad();
    let index = u64::from(block) * u64::from(comm.size()) + u64::from(source);
    let stride = pad.channel_slot + LINE;
    let offset =
        pad.channel_slots + (index * pad.channel_depth + chunk % pad.channel_depth.max(1)) * stride;
    comm.pad_of(at).wrapping_add(offset as usize)
}

/// The header in front of a chunk: fingerprint of the call, and the message's bytes.
const HEADER_WORDS: usize = 2;

/// Sends `bytes` bytes at `from` to `peer`, chunk by chunk; at least one chunk, so that an empty message arrives
/// too. False after a failure. All lanes together.
///
/// # Safety
/// `from` must be readable for `bytes` bytes.
#[inline(always)]
pub unsafe fn send<M: Machine>(
    session: &mut Session<M>,
    peer: u32,
    from: *const u8,
    bytes: u64,
) -> bool {
    let comm = *session.comm();
    let block = session.block();
    let me = comm.rank();
    let counters = line(&comm, me, block.index(), peer, 2).cast::<ChannelState>();
    // SAFETY: the counters belong to this block.
    let mut chunk =
        unsafe { mem::load_u64(&raw const (*counters).sent, Order::Relaxed, Scope::Device) };
    let credit = line(&comm, me, block.index(), peer, 1).cast::<u64>();
    let tail = line(&comm, peer, block.index(), me, 0).cast::<u64>();
    let depth = comm.pad().channel_depth;
    let capacity = comm.pad().channel_slot;
    let mut sent = 0;
    loop {
        let mut failed = false;
        if block.is_leader() && chunk >= depth {
            let needed = chunk - depth + 1;
            failed = session
                .watch()
                .until(Place::Credit, peer, needed, || {
                    // SAFETY: the credit word of this rank's pad.
                    let seen = unsafe { mem::load_u64(credit, Order::Acquire, Scope::System) };
                    if seen >= needed { Ok(()) } else { Err(seen) }
                })
                .is_none();
        }
        if block.any(failed) {
            return false;
        }
        mem::fence(Order::Acquire, Scope::System);
        let part = if bytes - sent < capacity {
            bytes - sent
        } else {
            capacity
        };
        let to = slot(&comm, peer, block.index(), me, chunk);
        // SAFETY: the slot is free (credit); the source is the caller's.
        unsafe {
            if block.is_leader() {
                mem::write(
                    to.cast::<[u64; HEADER_WORDS]>(),
                    [session.fingerprint(), bytes],
                );
            }
            let target = to.add(LINE as usize);
            crate::bulk::copy(
                block,
                target,
                from.add(sent as usize),
                part as usize,
                Policy::Cached,
            );
        }
        session.publish();
        chunk += 1;
        if block.is_leader() {
            // SAFETY: only this block of this rank writes the tail and its own counters.
            unsafe {
                mem::store_u64(tail, chunk, Order::Release, Scope::System);
                mem::store_u64(
                    &raw mut (*counters).sent,
                    chunk,
                    Order::Relaxed,
                    Scope::Device,
                );
            }
        }
        sent += part;
        if sent >= bytes {
            return true;
        }
    }
}

/// Receives a message of exactly `bytes` bytes from `peer` to `to`; another size or type is a
/// mismatch. False after a failure. All lanes together.
///
/// # Safety
/// `to` must be writable for `bytes` bytes.
#[inline(always)]
pub unsafe fn receive<M: Machine>(
    session: &mut Session<M>,
    peer: u32,
    to: *mut u8,
    bytes: u64,
) -> bool {
    let comm = *session.comm();
    let block = session.block();
    let me = comm.rank();
    let counters = line(&comm, me, block.index(), peer, 2).cast::<ChannelState>();
    // SAFETY: the counters belong to this block.
    let mut chunk = unsafe {
        mem::load_u64(
            &raw const (*counters).received,
            Order::Relaxed,
            Scope::Device,
        )
    };
    let tail = line(&comm, me, block.index(), peer, 0).cast::<u64>();
    let credit = line(&comm, peer, block.index(), me, 1).cast::<u64>();
    let capacity = comm.pad().channel_slot;
    let mut received = 0;
    loop {
        let mut failed = false;
        let from = slot(&comm, me, block.index(), peer, chunk);
        if block.is_leader() {
            let needed = chunk + 1;
            failed = session
                .watch()
                .until(Place::Chunk, peer, needed, || {
                    // SAFETY: the tail word of this rank's pad.
                    let seen = unsafe { mem::load_u64(tail, Order::Acquire, Scope::System) };
                    if seen >= needed { Ok(()) } else { Err(seen) }
                })
                .is_none();
            if !failed {
                // SAFETY: the chunk has been acquired.
                let [fingerprint, size] = unsafe { mem::read(from.cast::<[u64; HEADER_WORDS]>()) };
                if fingerprint != session.fingerprint() || size != bytes {
                    let place = Place::Chunk;
                    session
                        .watch()
                        .fail(FailureKind::Mismatch, place, peer, peer, bytes, size, 0);
                    failed = true;
                }
            }
        }
        if block.any(failed) {
            return false;
        }
        mem::fence(Order::Acquire, Scope::System);
        let part = if bytes - received < capacity {
            bytes - received
        } else {
            capacity
        };
        // SAFETY: the chunk has been acquired; the target is the caller's.
        unsafe {
            let source = from.add(LINE as usize);
            let target = to.add(received as usize);
            crate::bulk::copy(block, target, source, part as usize, Policy::Cached);
        }
        session.publish();
        chunk += 1;
        if block.is_leader() {
            // SAFETY: only this block of this rank writes the credit and its own counters.
            unsafe {
                mem::store_u64(credit, chunk, Order::Release, Scope::System);
                mem::store_u64(
                    &raw mut (*counters).received,
                    chunk,
                    Order::Relaxed,
                    Scope::Device,
                );
            }
        }
        received += part;
        if received >= bytes {
            return true;
        }
    }
}
