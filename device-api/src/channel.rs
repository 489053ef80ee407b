//! A ring with credits between two ranks, on which send and receive are built.
//!
//! # The channel protocol
//! The receiver's workspace holds a ring of slots per sender. The sender fills them in turn: fill k
//! goes to slot k mod depth.
//!
//! - **Who may overwrite what:** the sender overwrites the slot of fill k with fill k + depth;
//! - **after having acquired** a credit word of at least k + 1;
//! - **released by** the receiver, after its last read of fill k.
//!
//! The receiver reads fill k after having acquired a tail word of at least k + 1, released by the
//! sender after its last write of the slot. Credit and tail only grow; both live where they are
//! polled: the tail in the receiver's workspace, the credit in the sender's. A block has channels
//! of its own.
//!
//! If only a network reaches the peer, the block sends the contents of slots, the tail and the
//! credit by requests ([`crate::net`]). Tail and credit are signals, so they are executed after the
//! block's earlier requests to the peer.

use crate::args::{In, Out};
use crate::comm::{Comm, HAS_NETWORK, Rank, WindowAddr};
use crate::group::{Group, Machine};
use crate::layout::{ChannelState, FailureKind, LINE};
use crate::mem::{self, Order, Policy, Scope};
use crate::net::{Action, Request, Requests};
use crate::session::{Aborted, Session, Unvoted};
use crate::wait::WaitKind;

/// Returns the index of a block's channel with a peer.
#[inline(always)]
fn index(comm: &Comm, block: u32, peer: u32) -> u64 {
    let peers = match HAS_NETWORK {
        true => comm.size(),
        // All ranks are in the team.
        false => comm.members(),
    };
    u64::from(block) * u64::from(peers) + u64::from(peer)
}

/// Returns the offset in a workspace of a line of the channel with `peer`.
#[inline(always)]
fn line_at(comm: &Comm, block: u32, peer: u32, which: u64) -> u64 {
    comm.workspace().channel_lines + (index(comm, block, peer) * 3 + which) * LINE
}

/// Returns the offset in a workspace of a slot of the channel from `source`.
#[inline(always)]
fn slot_at(comm: &Comm, block: u32, source: u32, fill: u64) -> u64 {
    let workspace = comm.workspace();
    let stride = workspace.channel_slot + LINE;
    let first = index(comm, block, source) * workspace.channel_depth;
    workspace.channel_slots + (first + fill % workspace.channel_depth.max(1)) * stride
}

#[inline(always)]
fn line(comm: &Comm, at: u32, block: u32, peer: u32, which: u64) -> *mut u8 {
    let offset = line_at(comm, block, peer, which);
    comm.workspace_of(at).wrapping_add(offset as usize)
}

#[inline(always)]
fn slot(comm: &Comm, at: u32, block: u32, source: u32, fill: u64) -> *mut u8 {
    let offset = slot_at(comm, block, source, fill);
    comm.workspace_of(at).wrapping_add(offset as usize)
}

/// Returns a request of the session's block for `bytes` bytes at byte `offset` of the workspace of
/// `peer`.
#[inline(always)]
fn request<M: Machine>(
    session: &Session<M>,
    action: Action,
    peer: u32,
    offset: u64,
    bytes: u64,
) -> Request {
    Request {
        action,
        block: session.block().index(),
        peer,
        remote: WindowAddr::new(0, offset),
        local: WindowAddr::NONE,
        value: [0; 2],
        bytes,
        after: 0,
    }
}

/// Publishes tail or credit `value` to `peer`. One lane.
#[inline(always)]
fn publish<M: Machine>(session: &Session<M>, peer: u32, which: u64, value: u64) {
    let (comm, block) = (session.comm(), session.block().index());
    match session.network_to(peer) {
        Some(ring) => {
            let at = line_at(comm, block, comm.rank(), which);
            let signal = Request {
                value: [value, 0],
                ..request(session, Action::Signal, peer, at, 8)
            };
            session.request(&ring, signal);
        }
        None => {
            let word = line(comm, peer, block, comm.rank(), which).cast::<u64>();
            // SAFETY: only this block of this rank writes the word.
            unsafe { mem::store_u64(word, value, Order::Release, Scope::System) };
        }
    }
}

/// Words of the header in a slot: fingerprint of the call, and the message's bytes.
const HEADER_WORDS: usize = 2;

/// Message that goes through a channel; both ends compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Fingerprint of the call.
    pub fingerprint: u64,
    /// Bytes of the whole message.
    pub bytes: u64,
}

/// This block's sending end of the channel to a peer. All lanes hold the same value.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    peer: u32,
    fill: u64,
}

impl Sender {
    /// Opens the end in the state that the last send left.
    ///
    /// # Safety
    /// `peer` must be a rank of the communicator.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(session: &Session<M>, peer: u32) -> Self {
        let comm = session.comm();
        let counters = counters(comm, session.block().index(), peer);
        // SAFETY: the counters belong to this block.
        let fill =
            unsafe { mem::load_u64(&raw const (*counters).sent, Order::Relaxed, Scope::Device) };
        Self { peer, fill }
    }

    /// Returns the credit that the next slot needs.
    #[inline(always)]
    pub fn needed(&self, comm: &Comm) -> u64 {
        (self.fill + 1).saturating_sub(comm.workspace().channel_depth)
    }

    /// Acquires the next slot if the peer has read its last fill; otherwise returns `Err(credit)`.
    /// For one lane.
    #[inline(always)]
    pub fn acquire(&self, comm: &Comm, block: u32) -> Result<(), u64> {
        let needed = self.needed(comm);
        if needed == 0 {
            return Ok(());
        }
        let credit = line(comm, comm.rank(), block, self.peer, 1).cast::<u64>();
        // SAFETY: the credit word of this rank's workspace.
        let seen = unsafe { mem::load_u64(credit, Order::Acquire, Scope::System) };
        if seen >= needed { Ok(()) } else { Err(seen) }
    }

    /// Writes the bytes of `message` from `sent` on to the next slot, as many as it holds, and
    /// publishes the slot. Returns their number. One lane must have acquired the slot. All lanes
    /// together.
    ///
    /// # Safety
    /// `from` must be readable for the message.
    #[inline(always)]
    pub unsafe fn push<M: Machine>(
        &mut self,
        session: &mut Session<M>,
        message: Message,
        from: *const u8,
        sent: u64,
    ) -> u64 {
        let comm = *session.comm();
        let block = session.block();
        block.acquired(Scope::System);
        let part = (message.bytes - sent).min(comm.workspace().channel_slot);
        match session.network_to(self.peer) {
            Some(ring) => {
                // SAFETY: `from` is readable by the precondition.
                let is_staged = unsafe { self.stage(session, &ring, message, from, sent, part) };
                if !is_staged {
                    return part;
                }
            }
            None => {
                let to = slot(&comm, self.peer, block.index(), comm.rank(), self.fill);
                // SAFETY: the credit says that the slot is free; `from` is readable by the
                // precondition.
                unsafe {
                    if block.is_leader() {
                        mem::write(
                            to.cast::<[u64; HEADER_WORDS]>(),
                            [message.fingerprint, message.bytes],
                        );
                    }
                    let target = to.add(LINE as usize);
                    let from = from.add(sent as usize);
                    crate::bulk::copy(block, target, from, part as usize, Policy::Cached);
                }
            }
        }
        session.publish();
        self.fill += 1;
        if block.is_leader() {
            publish(session, self.peer, 0, self.fill);
            let counters = counters(&comm, block.index(), self.peer);
            // SAFETY: only this block of this rank writes its own counters.
            unsafe {
                mem::store_u64(
                    &raw mut (*counters).sent,
                    self.fill,
                    Order::Relaxed,
                    Scope::Device,
                );
            }
        }
        part
    }
}

impl Sender {
    /// Sends `part` bytes of `message` from byte `sent` on to the next slot of a rank that only a
    /// network reaches, through the block's staging memory. Records a failure, and returns false
    /// then. All lanes together.
    ///
    /// # Safety
    /// `from` must be readable for the message.
    #[inline(always)]
    unsafe fn stage<M: Machine>(
        &self,
        session: &Session<M>,
        ring: &Requests,
        message: Message,
        from: *const u8,
        sent: u64,
        part: u64,
    ) -> bool {
        let (comm, block) = (session.comm(), session.block());
        let (staging, local, room) = ring.staging(block.index());
        let slot = slot_at(comm, block.index(), comm.rank(), self.fill);
        if block.is_leader() {
            let header = Request {
                value: [message.fingerprint, message.bytes],
                ..request(session, Action::Store, self.peer, slot, 16)
            };
            session.request(ring, header);
        }
        let mut done = 0;
        while done < part {
            let mut free = Unvoted::new(());
            if block.is_leader() {
                free = session.finish_requests(ring, || ring.reserved());
            }
            if session.vote(free).is_err() {
                session.faults().record(FailureKind::Abort, 0, 0, 0);
                return false;
            }
            let bytes = room.min(part - done);
            // SAFETY: the block's staging memory has room for `bytes` bytes, and all requests for
            // it have been executed; `from` is readable by the precondition.
            unsafe {
                let from = from.add((sent + done) as usize);
                crate::bulk::copy(block, staging, from, bytes as usize, Policy::Cached);
            }
            block.publish();
            if block.is_leader() {
                let at = slot + LINE + done;
                let put = Request {
                    local,
                    ..request(session, Action::Put, self.peer, at, bytes)
                };
                session.request(ring, put);
            }
            done += bytes;
        }
        true
    }
}

/// This block's receiving end of the channel from a peer. All lanes hold the same value.
#[derive(Clone, Copy, Debug)]
pub struct Receiver {
    peer: u32,
    fill: u64,
}

impl Receiver {
    /// Opens the end in the state that the last receive left.
    ///
    /// # Safety
    /// `peer` must be a rank of the communicator.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(session: &Session<M>, peer: u32) -> Self {
        let comm = session.comm();
        let counters = counters(comm, session.block().index(), peer);
        // SAFETY: the counters belong to this block.
        let fill = unsafe {
            mem::load_u64(
                &raw const (*counters).received,
                Order::Relaxed,
                Scope::Device,
            )
        };
        Self { peer, fill }
    }

    /// Returns the tail that the next slot needs.
    #[inline(always)]
    pub fn needed(&self) -> u64 {
        self.fill + 1
    }

    /// Acquires the next slot if it has arrived; otherwise returns `Err(tail)`. For one lane.
    #[inline(always)]
    pub fn arrived(&self, comm: &Comm, block: u32) -> Result<(), u64> {
        let tail = line(comm, comm.rank(), block, self.peer, 0).cast::<u64>();
        // SAFETY: the tail word of this rank's workspace.
        let seen = unsafe { mem::load_u64(tail, Order::Acquire, Scope::System) };
        if seen >= self.needed() {
            Ok(())
        } else {
            Err(seen)
        }
    }

    /// Returns true if the next slot, which this lane has acquired, belongs to `message`; records
    /// the failure otherwise.
    #[inline(always)]
    pub fn check<M: Machine>(&self, session: &Session<M>, message: Message) -> bool {
        let comm = session.comm();
        let block = session.block().index();
        let from = slot(comm, comm.rank(), block, self.peer, self.fill);
        // SAFETY: the slot has been acquired.
        let [fingerprint, size] = unsafe { mem::read(from.cast::<[u64; HEADER_WORDS]>()) };
        if fingerprint == message.fingerprint && size == message.bytes {
            return true;
        }
        let (kind, peer) = (FailureKind::Mismatch, self.peer);
        session
            .ctx()
            .fail(kind, WaitKind::Slot, peer, peer, message.bytes, size, 0);
        false
    }

    /// Copies the next slot to `to`, from byte `received` on, and returns its credit to the sender.
    /// Returns the number of bytes. One lane must have acquired and checked the slot. All lanes
    /// together.
    ///
    /// # Safety
    /// `to` must be writable for the message.
    #[inline(always)]
    pub unsafe fn pull<M: Machine>(
        &mut self,
        session: &mut Session<M>,
        message: Message,
        to: *mut u8,
        received: u64,
    ) -> u64 {
        let comm = *session.comm();
        let block = session.block();
        block.acquired(Scope::System);
        let part = (message.bytes - received).min(comm.workspace().channel_slot);
        let from = slot(&comm, comm.rank(), block.index(), self.peer, self.fill);
        // SAFETY: the slot has been acquired; `to` is writable by the precondition.
        unsafe {
            let source = from.add(LINE as usize);
            let target = to.add(received as usize);
            crate::bulk::copy(block, target, source, part as usize, Policy::Cached);
        }
        session.publish();
        self.fill += 1;
        if block.is_leader() {
            publish(session, self.peer, 1, self.fill);
            let counters = counters(&comm, block.index(), self.peer);
            // SAFETY: only this block of this rank writes its own counters.
            unsafe {
                mem::store_u64(
                    &raw mut (*counters).received,
                    self.fill,
                    Order::Relaxed,
                    Scope::Device,
                );
            }
        }
        part
    }
}

#[inline(always)]
fn counters(comm: &Comm, block: u32, peer: u32) -> *mut ChannelState {
    line(comm, comm.rank(), block, peer, 2).cast()
}

/// Sends `from` to `peer`, slot by slot. An empty message takes a slot, too. All lanes together.
///
/// # Errors
/// [`Aborted`] if a rank has failed, or after a timeout.
///
/// # Safety
/// Nothing else may write `from` until the function returns.
#[inline(always)]
#[track_caller]
pub unsafe fn send<M: Machine>(
    session: &mut Session<M>,
    peer: Rank,
    from: In<u8>,
) -> Result<(), Aborted> {
    let (comm, peer) = (*session.comm(), peer.index());
    let block = session.block();
    let message = Message {
        fingerprint: session.fingerprint(),
        bytes: from.len() as u64,
    };
    // SAFETY: a `Rank` is a rank of the communicator.
    let mut end = unsafe { Sender::new(session, peer) };
    let mut sent = 0;
    loop {
        let mut failed = false;
        if block.is_leader() {
            failed = session
                .ctx()
                .until(WaitKind::Credit, peer, end.needed(&comm), || {
                    end.acquire(&comm, block.index())
                })
                .is_none();
        }
        session.settle(!block.any(failed))?;
        // SAFETY: the message is as long as `from`; the leader has acquired the slot.
        sent += unsafe { end.push(session, message, from.as_ptr(), sent) };
        if sent >= message.bytes {
            return Ok(());
        }
    }
}

/// Receives a message from `peer` that fills `to`; another size or type is a mismatch. All lanes
/// together.
///
/// # Errors
/// [`Aborted`] if the message of the peer does not match, if a rank has failed, or after a timeout.
///
/// # Safety
/// Nothing else may access `to` until the function returns.
#[inline(always)]
#[track_caller]
pub unsafe fn receive<M: Machine>(
    session: &mut Session<M>,
    peer: Rank,
    to: Out<u8>,
) -> Result<(), Aborted> {
    let (comm, peer) = (*session.comm(), peer.index());
    let block = session.block();
    let message = Message {
        fingerprint: session.fingerprint(),
        bytes: to.len() as u64,
    };
    // SAFETY: a `Rank` is a rank of the communicator.
    let mut end = unsafe { Receiver::new(session, peer) };
    let mut received = 0;
    loop {
        let mut failed = false;
        if block.is_leader() {
            failed = session
                .ctx()
                .until(WaitKind::Slot, peer, end.needed(), || {
                    end.arrived(&comm, block.index())
                })
                .is_none()
                || !end.check(session, message);
        }
        session.settle(!block.any(failed))?;
        // SAFETY: the message is as long as `to`; the leader has acquired the slot.
        received += unsafe { end.pull(session, message, to.as_ptr(), received) };
        if received >= message.bytes {
            return Ok(());
        }
    }
}
