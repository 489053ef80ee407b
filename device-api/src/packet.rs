//! Packets: data and flag in one atomic unit, so that data needs no signal of its own.
//!
//! # The packet protocol
//! A block has two sets of slots (even and odd epochs), each with one slot per source rank. In
//! epoch e every rank writes a stream of units into its slot at every rank, and reads every rank's
//! stream.
//!
//! - **Who may overwrite what:** a rank overwrites its slot of epoch e at a peer in epoch e + 2;
//! - **after having acquired** the peer's stream of epoch e + 1 (it reads all of it before it
//!   ends);
//! - **released by** the peer, which wrote that stream after it had read everything of epoch e.
//!
//! Every rank receives from every rank in every epoch of this family, and a rank with no elements
//! still sends the first unit; so two sets suffice, and there is no exit barrier.
//!
//! # Ranks that are not reachable by load and store
//! A network does not promise that data and flag of a unit arrive together. The sender writes the
//! stream to the slot for itself in its own workspace, which nothing else uses, puts it from there
//! to the peer's slot, and signals. In blocks of one lane, the signal is the flag of the stream.
//! Otherwise it is a word of the done line with the number of the epoch, which the receiver awaits
//! before it looks at units. The protocol above also covers the sender's own slot: it is written
//! again in epoch e + 2, and a peer that has sent its stream of epoch e + 1 has received the put.
//!
//! # Units
//! - Where a block has one lane (CPU) the unit is the whole stream: its data, then a flag of 8
//!   bytes stored by release, 48 bits of epoch and 16 of fingerprint. Up to 56 bytes share the
//!   flag's line; more follow it, so that they move by whole vectors.
//! - Elsewhere: 16 bytes, two packets of 4 bytes of data and a flag of 4, the epoch's low half. The
//!   first unit of a stream is the header `{fingerprint, flag, count, flag}`. Slots are scrubbed
//!   within 2^31 epochs, so that a flag that has wrapped around never matches stale data.

use crate::args::In;
use crate::bulk;
use crate::comm::{Comm, WindowAddr, ring};
use crate::element::Element;
use crate::group::{Block, Group, Machine};
use crate::layout::{FailureKind, LINE};
use crate::mem::{self, Order, Policy, Scope};
use crate::net::{Action, Request, Requests};
use crate::session::{Aborted, Session, Unvoted};
use crate::wait::WaitKind;

/// Data bytes that share a line with the flag of a stream (one lane a block).
pub const LINE_DATA: usize = 56;
/// Data bytes of a two-packet unit.
pub const PAIR_DATA: usize = 8;
/// Offset from a ready line of the word that says that a stream has arrived by the network: the
/// second one of the done line.
const ARRIVED_AT: u64 = LINE + 8;
/// Number of peers whose slots a lane looks up at once.
const PEERS_AT_ONCE: usize = 4;
/// Number of units that a lane reads before it sends the first, after the prefetched one. Then a
/// block of 512 lanes reads 16 KiB in one memory round trip.
const UNITS_AT_ONCE: usize = 3;
/// Epochs from one scrub of a part of the slots to the next.
const SCRUB_PERIOD: u64 = 4096;
/// Two-packet units that one scrub clears in each slot.
const SCRUB_UNITS: u64 = 64;

/// Returns the bytes of data that a slot of `slot` bytes carries, with either kind of unit.
pub const fn capacity(slot: u64) -> u64 {
    if slot < 2 * LINE {
        8
    } else {
        (slot / 16 - 1) * PAIR_DATA as u64
    }
}

/// The packet slots of one epoch of one block.
#[derive(Debug)]
pub struct Slots {
    block: u32,
    epoch: u64,
    flag: u64,
    /// This rank's slot of source 0.
    own: *mut u8,
    /// Addresses of the workspaces of the team's ranks.
    workspaces: *const u64,
    /// Offset in a workspace of the slot that this rank fills.
    mine: u64,
    slot: u64,
    bytes: usize,
}

impl Slots {
    /// Opens the next epoch of packet slots for this launch, for streams of `bytes` bytes: at most
    /// [`capacity`] of the slot, and the same on all ranks. All lanes together.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::Capacity`], if the streams do not fit a slot.
    #[inline(always)]
    #[track_caller]
    pub fn open<M: Machine>(session: &mut Session<M>, bytes: usize) -> Result<Self, Aborted> {
        session.block().uniform([bytes as u64]);
        let room = capacity(session.comm().workspace().packet_slot);
        if bytes as u64 > room {
            return Err(session.refuse(FailureKind::Capacity, 0, bytes as u64, room));
        }
        let epoch = session.next_packet_epoch();
        let comm = session.comm();
        let slot = comm.workspace().packet_slot;
        let ranks = u64::from(comm.size());
        let set = u64::from(session.block().index()) * 2 + (epoch & 1);
        let flag = if M::LANES == 1 {
            epoch << 16 | session.fingerprint()
        } else {
            epoch & 0xffff_ffff
        };
        let base = comm.workspace().packets + set * ranks * slot;
        Ok(Self {
            block: session.block().index(),
            epoch,
            flag,
            own: comm.own(base),
            workspaces: comm.workspaces(),
            mine: base + u64::from(comm.rank()) * slot,
            slot,
            bytes,
        })
    }

    /// Opens the next epoch as [`Slots::open`] does, for a kernel that sends by
    /// [`Slots::send_stream`], or by [`Slots::send_header`] and [`Slots::send_pairs`].
    ///
    /// # Errors
    /// As [`Slots::open`]. [`Aborted`] after recording [`FailureKind::NoRoute`], if not all ranks
    /// are reachable by load and store.
    #[inline(always)]
    #[track_caller]
    pub fn open_direct<M: Machine>(
        session: &mut Session<M>,
        bytes: usize,
    ) -> Result<Self, Aborted> {
        if session.comm().is_split() {
            let comm = session.comm();
            // The ranks of a team follow each other.
            let far = if comm.reaches(0) { comm.members() } else { 0 };
            let (far, ranks) = (u64::from(far), u64::from(comm.size()));
            return Err(session.refuse(FailureKind::NoRoute, u32::MAX, far, ranks));
        }
        Self::open(session, bytes)
    }

    /// Returns the address at which `source`'s stream arrives.
    #[inline(always)]
    fn arrival(&self, source: u32) -> *mut u8 {
        self.own
            .wrapping_add((u64::from(source) * self.slot) as usize)
    }

    /// Returns the address of the slot at `rank` for this rank's stream. If `rank` is not reachable
    /// by load and store, this is the slot for this rank in its own workspace.
    #[inline(always)]
    fn departure(&self, comm: &Comm, rank: u32) -> *mut u8 {
        let at = match comm.reaches(rank) {
            true => rank,
            false => comm.rank(),
        };
        let at = self.workspaces.wrapping_add(comm.member(at) as usize);
        // SAFETY: the rank is in the team, and the table has an entry for each rank of the team.
        let workspace = unsafe { at.read() } as *mut u8;
        workspace.wrapping_add(self.mine as usize)
    }

    /// Sends this rank's stream, `data`, to every other rank. All lanes together, once an epoch.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::Index`], if `data` is shorter than the stream.
    #[inline(always)]
    #[track_caller]
    pub fn send_elements<M: Machine, T: Element>(
        &self,
        session: &mut Session<M>,
        data: In<T>,
    ) -> Result<(), Aborted> {
        let data = data.require(session, self.bytes.div_ceil(size_of::<T>()))?;
        // SAFETY: `data` has the stream's bytes, which fit the slot (`open`).
        unsafe { self.send_to_all(session, data.as_ptr().cast()) };
        Ok(())
    }

    /// Sends this rank's stream, at `from`, to every other rank. All lanes together.
    ///
    /// # Safety
    /// `from` must be readable for the stream's bytes.
    #[inline(always)]
    pub unsafe fn send_to_all<M: Machine>(&self, session: &mut Session<M>, from: *const u8) {
        // SAFETY: `from` is readable for the stream by the precondition.
        unsafe {
            let prefetch = Prefetch::read(session.block(), from, self.bytes, Segments::ONE);
            self.send(session, (from, Segments::ONE), prefetch, false);
        }
    }

    /// Sends as [`Slots::send_to_all`] does the stream in the segments at `from`, with its
    /// `prefetch`. Blocks of several lanes send to this rank, too, so that it can receive its own
    /// stream as any other. Blocks of one lane send one segment.
    ///
    /// # Safety
    /// The segments at `from` must be readable; `prefetch` must be that of the same stream.
    #[inline(always)]
    pub unsafe fn send_to_each<M: Machine>(
        &self,
        session: &mut Session<M>,
        from: (*const u8, Segments),
        prefetch: Prefetch,
    ) {
        // SAFETY: the precondition of this function.
        unsafe { self.send(session, from, prefetch, true) };
    }

    /// Sends to all other ranks and, if `to_self` is true, to this one. A lane reads a unit once,
    /// before it sends it. So a rank that has received its own unit may overwrite its elements.
    #[inline(always)]
    unsafe fn send<M: Machine>(
        &self,
        session: &mut Session<M>,
        (from, segments): (*const u8, Segments),
        prefetch: Prefetch,
        to_self: bool,
    ) {
        let block = session.block();
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        let bytes = self.bytes;
        session.advance();
        if M::LANES == 1 {
            // The network reads this rank's own slot, so the stream is written there only once.
            let mut is_staged = false;
            for step in 1..ranks {
                let peer = ring(me, step, ranks);
                let slot = self.departure(session.comm(), peer);
                let Some(ring) = session.network_to(peer) else {
                    // SAFETY: the stream is in `from` by the precondition, and fits the slot.
                    unsafe { self.send_stream(session, peer, from, bytes) };
                    continue;
                };
                if !is_staged {
                    // SAFETY: as above.
                    unsafe { self.write_stream(block, slot, from, bytes) };
                    is_staged = true;
                }
                self.put(session, &ring, peer, [LINE_DATA as u64, self.flag]);
            }
            return;
        }
        let units = 1 + bytes.div_ceil(PAIR_DATA);
        let header = self.header(session);
        // All lanes walk units, whose data is in registers while it goes to all peers.
        let steps = ranks + u32::from(to_self);
        let (lane, lanes) = (block.rank() as usize, block.size() as usize);
        let is_aligned = (from as usize).is_multiple_of(PAIR_DATA);
        let mut unit = lane;
        while unit < units {
            // The last unit of the batch ends at this byte.
            let end = (unit + (UNITS_AT_ONCE - 1) * lanes) * PAIR_DATA;
            if is_aligned && unit != lane && end <= bytes {
                let data = core::array::from_fn(|i| {
                    let at = segments.find((unit - 1 + i * lanes) * PAIR_DATA);
                    let at = from.wrapping_add(at);
                    // SAFETY: the unit is within the stream by the condition, and aligned.
                    unsafe { mem::read(at.cast::<u64>()) }
                });
                // SAFETY: the units are within the stream by the condition.
                unsafe { self.send_units::<M, UNITS_AT_ONCE>(session, unit, data, steps) };
                unit += UNITS_AT_ONCE * lanes;
                continue;
            }
            let data = if unit == 0 {
                header
            } else if unit == lane {
                prefetch.0
            } else {
                // SAFETY: the unit is within the stream, which is readable at `from`.
                unsafe { segments.read_pair(from, bytes, unit - 1) }
            };
            // SAFETY: `unit < units`.
            unsafe { self.send_units::<M, 1>(session, unit, [data], steps) };
            unit += lanes;
        }
        if session.comm().is_split() {
            block.publish();
            let mut peer = block.rank();
            while peer < ranks {
                if let Some(ring) = session.network_to(peer) {
                    let signal = session.comm().inbox(block.index(), me) + ARRIVED_AT;
                    self.put(
                        session,
                        &ring,
                        peer,
                        [signal.wrapping_sub(self.mine), self.epoch],
                    );
                }
                peer += block.size();
            }
        }
    }

    /// Returns the data of the header.
    #[inline(always)]
    fn header<M: Machine>(&self, session: &Session<M>) -> u64 {
        session.fingerprint() | (self.bytes as u64) << 32
    }

    /// Copies `bytes` bytes of a stream to the slot at `slot`, in the place for data of this
    /// epoch's streams. One lane.
    #[inline(always)]
    unsafe fn write_stream<M: Machine>(
        &self,
        block: Block<M>,
        slot: *mut u8,
        from: *const u8,
        bytes: usize,
    ) {
        // SAFETY: `from` has the bytes by the precondition of the callers; they are no more than
        // those for which `open` has checked the slot.
        unsafe {
            if self.bytes <= LINE_DATA {
                copy_short(slot, from, bytes);
            } else {
                let to = slot.add(LINE as usize);
                bulk::copy(block, to, from, bytes, Policy::Cached);
            }
        }
    }

    /// Sends the `bytes` bytes at `from` to `peer`, as this rank's stream. Each rank must send a
    /// stream to each other rank, once an epoch. For blocks of one lane.
    ///
    /// # Safety
    /// `peer` must be a rank that is reachable by load and store. `bytes` must be no more than
    /// those for which the slots have been opened, and `from` be readable for them.
    #[inline(always)]
    pub unsafe fn send_stream<M: Machine>(
        &self,
        session: &Session<M>,
        peer: u32,
        from: *const u8,
        bytes: usize,
    ) {
        let slot = self.departure(session.comm(), peer);
        // SAFETY: the precondition of this function; the flag is within the slot.
        unsafe {
            self.write_stream(session.block(), slot, from, bytes);
            let flag = slot.add(LINE_DATA).cast::<u64>();
            mem::store_u64(flag, self.flag, Order::Release, Scope::System);
        }
    }

    /// Sends the header of this rank's stream to `peer`. Each rank must send a header to each other
    /// rank, once an epoch. For blocks of several lanes; by any lane.
    ///
    /// # Safety
    /// `peer` must be a rank that is reachable by load and store.
    #[inline(always)]
    pub unsafe fn send_header<M: Machine>(&self, session: &Session<M>, peer: u32) {
        let to = self.departure(session.comm(), peer).cast::<u64>();
        let header = self.header(session);
        let [low, high] = [self.pack(header as u32), self.pack((header >> 32) as u32)];
        // SAFETY: each slot has a header.
        unsafe { mem::store_packets(to, [low, high]) };
    }

    /// Sends `data[i]` as pair `pair` of the stream for the rank at step `step + i` of the ring, if
    /// that step is below `steps`. Step 0 and step P are this rank. For blocks of several lanes; by
    /// any lane.
    ///
    /// # Safety
    /// `pair` must be within the streams for which the slots have been opened. `step` must be at
    /// least 1, and `steps` no more than P + 1. All ranks must be reachable by load and store.
    #[inline(always)]
    pub unsafe fn send_pairs<M: Machine, const N: usize>(
        &self,
        session: &Session<M>,
        pair: usize,
        data: [u64; N],
        [step, steps]: [u32; 2],
    ) {
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        // Loads the addresses before the first store, so that they do not wait for each other.
        let slots: [*mut u8; N] = core::array::from_fn(|i| {
            let step = (step + i as u32).min(steps - 1);
            self.departure(session.comm(), ring(me, step, ranks))
        });
        for i in 0..N {
            if step + (i as u32) < steps {
                let to = slots[i].wrapping_add((1 + pair) * 16).cast::<u64>();
                let [low, high] = [self.pack(data[i] as u32), self.pack((data[i] >> 32) as u32)];
                // SAFETY: the unit is within the stream by the precondition, and `open` has checked
                // that the stream fits the slot.
                unsafe { mem::store_packets(to, [low, high]) };
            }
        }
    }

    /// Sends units `first`, `first + lanes`, .. of the stream, whose bytes are `data`, to the ranks
    /// at steps `1..steps` of the ring. One lane.
    ///
    /// # Safety
    /// The units must be within the stream.
    #[inline(always)]
    unsafe fn send_units<M: Machine, const N: usize>(
        &self,
        session: &Session<M>,
        first: usize,
        data: [u64; N],
        steps: u32,
    ) {
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        let lanes = session.block().size() as usize;
        let mut step = 1;
        while step < steps {
            // Loads the addresses before the first store, so that they do not wait for each other.
            let slots: [*mut u8; PEERS_AT_ONCE] = core::array::from_fn(|i| {
                let step = (step + i as u32).min(steps - 1);
                self.departure(session.comm(), ring(me, step, ranks))
            });
            for n in 0..N {
                let low = self.pack(data[n] as u32);
                let high = self.pack((data[n] >> 32) as u32);
                for i in 0..PEERS_AT_ONCE {
                    if step + (i as u32) < steps {
                        let unit = first + n * lanes;
                        let to = slots[i].wrapping_add(unit * 16).cast::<u64>();
                        // SAFETY: the unit is within the stream, and `open` has checked that the
                        // stream fits the slot.
                        unsafe { mem::store_packets(to, [low, high]) };
                    }
                }
            }
            step += PEERS_AT_ONCE as u32;
        }
    }

    /// Puts this rank's stream from its own slot to that at `peer`, and signals with `value`,
    /// `signal` bytes from the slot. One lane, after the stream is in the own slot.
    fn put<M: Machine>(
        &self,
        session: &Session<M>,
        ring: &Requests,
        peer: u32,
        [signal, value]: [u64; 2],
    ) {
        let (first, bytes) = match M::LANES {
            1 if self.bytes <= LINE_DATA => (0, self.bytes),
            1 => (LINE, self.bytes),
            _ => (0, 16 * (1 + self.bytes.div_ceil(PAIR_DATA))),
        };
        let at = |offset| WindowAddr::new(0, self.mine.wrapping_add(offset));
        let request = Request {
            action: Action::Put,
            block: session.block().index(),
            peer,
            remote: at(first),
            local: at(first),
            value: [value, 0],
            bytes: bytes as u64,
            after: 0,
        };
        let after = session.request(ring, request);
        let signal = Request {
            action: Action::Signal,
            remote: at(signal),
            local: WindowAddr::NONE,
            bytes: 8,
            after,
            ..request
        };
        session.request(ring, signal);
    }

    /// Returns true if `source` is reachable by load and store, or its stream has arrived.
    #[inline(always)]
    fn has_arrived(&self, comm: &Comm, source: u32) -> bool {
        if comm.reaches(source) {
            return true;
        }
        let word = comm.own(comm.inbox(self.block, source) + ARRIVED_AT);
        // SAFETY: a word of this rank's own lines, which is only accessed atomically.
        let seen = unsafe { mem::load_u64(word.cast(), Order::Acquire, Scope::System) };
        // The source may be an epoch ahead.
        seen >= self.epoch
    }

    /// Returns true if both packets of a unit have the flag of this epoch. In 32 bits, because a
    /// GPU compares 64 bits by two instructions.
    #[inline(always)]
    fn is_flagged(&self, [low, high]: [u64; 2]) -> bool {
        let flag = self.flag as u32;
        (low >> 32) as u32 == flag && (high >> 32) as u32 == flag
    }

    #[inline(always)]
    fn pack(&self, data: u32) -> u64 {
        self.flag << 32 | u64::from(data)
    }

    /// Awaits the whole stream of `source`, a rank of the communicator. Returns its address. For
    /// blocks of one lane; by any lane.
    #[inline(always)]
    pub fn receive_stream<M: Machine>(
        &self,
        session: &Session<M>,
        source: u32,
    ) -> Unvoted<*const u8> {
        if source >= session.comm().size() {
            return refuse_rank(session, source);
        }
        let slot = self.arrival(source);
        let flag = slot.wrapping_add(LINE_DATA).cast::<u64>();
        let data = if self.bytes <= LINE_DATA {
            slot
        } else {
            slot.wrapping_add(LINE as usize)
        };
        let arrived = session
            .ctx()
            .until(WaitKind::Packet, source, self.flag, || {
                // SAFETY: a flag word of this rank's own slots.
                let seen = unsafe { mem::load_u64(flag, Order::Acquire, Scope::System) };
                if seen == self.flag {
                    Ok(data.cast_const())
                } else {
                    Err(seen)
                }
            });
        Unvoted::from_wait(arrived)
    }

    /// Awaits two-packet unit `unit` of `source`'s stream, and returns its 8 bytes. Unit 0 is the
    /// header, whose call is compared. By any lane.
    ///
    /// # Safety
    /// `source` must be a rank of the communicator and `unit` within the slot.
    #[inline(always)]
    pub unsafe fn receive_pair<M: Machine>(
        &self,
        session: &Session<M>,
        source: u32,
        unit: usize,
    ) -> Unvoted<u64> {
        let at = self.arrival(source).wrapping_add(unit * 16).cast::<u64>();
        let arrived = session
            .ctx()
            .until(WaitKind::Packet, source, self.flag, || {
                if !self.has_arrived(session.comm(), source) {
                    return Err(0);
                }
                // SAFETY: a unit of this rank's own slots.
                let [low, high] = unsafe { mem::load_packets(at) };
                if self.is_flagged([low, high]) {
                    Ok(low & 0xffff_ffff | high << 32)
                } else {
                    Err(low)
                }
            });
        let Some(data) = arrived else {
            return Unvoted::from_wait(None);
        };
        let (expected, sent) = (session.fingerprint(), data & 0xffff);
        if unit == 0 && sent != expected {
            // The flag distinguishes epochs; the header distinguishes calls.
            let ctx = session.ctx();
            ctx.fail(
                FailureKind::Mismatch,
                WaitKind::Packet,
                source,
                source,
                expected,
                sent,
                0,
            );
            return Unvoted::from_wait(None);
        }
        Unvoted::new(data)
    }

    /// Loads the two-packet units `unit .. unit + N` of `source`'s stream once, without waiting
    /// between the loads. Returns their bytes, and true if all have arrived. By any lane.
    ///
    /// # Safety
    /// As [`Slots::receive_pair`], for all units.
    #[inline(always)]
    pub unsafe fn peek_pairs<const N: usize>(
        &self,
        comm: &Comm,
        source: u32,
        unit: usize,
    ) -> ([u64; N], bool) {
        let at = self.arrival(source).wrapping_add(unit * 16).cast::<u64>();
        let mut data = [0; N];
        let mut there = self.has_arrived(comm, source);
        for i in 0..N {
            // SAFETY: units of this rank's own slots.
            let [low, high] = unsafe { mem::load_packets(at.wrapping_add(2 * i)) };
            there &= self.is_flagged([low, high]);
            data[i] = low & 0xffff_ffff | high << 32;
        }
        (data, there)
    }

    /// Awaits the two-packet units `unit .. unit + N` of `source`'s stream, and returns their
    /// bytes. For units that carry data: see [`Slots::receive_header`] for the header. By any lane.
    ///
    /// # Safety
    /// As [`Slots::receive_pair`], for all units.
    #[inline(always)]
    pub unsafe fn receive_pairs<M: Machine, const N: usize>(
        &self,
        session: &Session<M>,
        source: u32,
        unit: usize,
    ) -> Unvoted<[u64; N]> {
        let arrived = session
            .ctx()
            .until(WaitKind::Packet, source, self.flag, || {
                // A failure record has the awaited epoch, not the number of the missing unit.
                // SAFETY: the precondition of this function.
                match unsafe { self.peek_pairs::<N>(session.comm(), source, unit) } {
                    (_, true) => Ok(()),
                    (_, false) => Err(0),
                }
            });
        // The units stay until this rank has sent its stream of the next epoch.
        // SAFETY: the precondition of this function.
        let read = || unsafe { self.peek_pairs::<N>(session.comm(), source, unit) };
        Unvoted::from_wait(arrived.map(|()| read().0))
    }

    /// Awaits the first unit of `source`'s stream, which is there even if the stream is empty. A
    /// kernel must have received every unit of every rank's stream, this one at least, before it
    /// ends. By any lane.
    #[inline(always)]
    pub fn receive_header<M: Machine>(&self, session: &Session<M>, source: u32) -> Unvoted<()> {
        if M::LANES == 1 {
            return self.receive_stream(session, source).map(|_| ());
        }
        if source >= session.comm().size() {
            return refuse_rank(session, source);
        }
        // SAFETY: `source` is a rank, and every slot has a header.
        unsafe { self.receive_pair(session, source, 0) }.map(|_| ())
    }

    /// Awaits the 8-byte word `index` of `source`'s stream. By any lane.
    #[inline(always)]
    pub fn receive_word<M: Machine>(
        &self,
        session: &Session<M>,
        source: u32,
        index: usize,
    ) -> Unvoted<u64> {
        let words = self.bytes / 8;
        if index >= words {
            let (index, words) = (index as u64, words as u64);
            session.faults().record(FailureKind::Word, 0, index, words);
            return Unvoted::from_wait(None);
        }
        if M::LANES == 1 {
            let stream = self.receive_stream(session, source);
            // SAFETY: the stream has been acquired, and the word is within it.
            return stream.map(|stream| unsafe { mem::read(stream.cast::<u64>().add(index)) });
        }
        if source >= session.comm().size() {
            return refuse_rank(session, source);
        }
        // SAFETY: `source` is a rank, and the word is within the stream, which fits the slot.
        unsafe { self.receive_pair(session, source, 1 + index) }
    }

    /// Ends the epoch: now and then scrubs a part of this rank's slots of it. All lanes together.
    ///
    /// The slots are this rank's alone until it sends epoch + 1, which its peers acquire before
    /// they write epoch + 2 into the same set.
    #[inline(always)]
    pub fn close<M: Machine>(&self, session: &Session<M>) {
        if M::LANES == 1
            || !self.epoch.is_multiple_of(SCRUB_PERIOD)
                && !(self.epoch + 1).is_multiple_of(SCRUB_PERIOD)
        {
            return;
        }
        let block: Block<M> = session.block();
        block.sync();
        if session.comm().is_split() {
            // The network may still read this rank's slot of itself, until all lanes' puts are
            // complete. After an error the launch fails, and stale flags are never read.
            let flushed = session.flush();
            if session.vote(flushed).is_err() {
                return;
            }
        }
        // A slot has at least a header. The lower bound tells the compiler not to check the
        // divisor.
        let units = (self.slot / 16).max(1);
        let start = self.epoch / SCRUB_PERIOD * SCRUB_UNITS % units;
        let mut i = u64::from(block.rank());
        while i < SCRUB_UNITS * u64::from(session.comm().size()) {
            let source = (i / SCRUB_UNITS) as u32;
            let unit = (start + i % SCRUB_UNITS) % units;
            let at = self.arrival(source).wrapping_add(unit as usize * 16);
            // SAFETY: within this rank's own slots, which nothing else writes now.
            unsafe { mem::store_packets(at.cast(), [0, 0]) };
            i += u64::from(block.size());
        }
        mem::fence(Order::AcqRel, Scope::System);
        block.sync();
    }
}

/// Records that `source` is no rank.
#[inline(always)]
fn refuse_rank<M: Machine, T>(session: &Session<M>, source: u32) -> Unvoted<T> {
    let (source, ranks) = (u64::from(source), u64::from(session.comm().size()));
    session
        .faults()
        .record(FailureKind::Rank, u32::MAX, source, ranks);
    Unvoted::from_wait(None)
}

/// The first bytes of a stream that a lane sends. A kernel reads them before it begins its session,
/// so that the load is in flight while the launch enters the communicator.
#[derive(Clone, Copy, Debug)]
pub struct Prefetch(u64);

impl Prefetch {
    /// Reads this lane's first bytes of the stream of `bytes` bytes, in the segments at `from`,
    /// that the block sends.
    ///
    /// # Safety
    /// The segments at `from` must be readable for `bytes` bytes.
    #[inline(always)]
    pub unsafe fn read<M: Machine>(
        block: Block<M>,
        from: *const u8,
        bytes: usize,
        segments: Segments,
    ) -> Self {
        // Unit 0 is the header. Blocks of one lane copy whole streams.
        let unit = block.rank() as usize;
        if M::LANES == 1 || unit == 0 || (unit - 1) * PAIR_DATA >= bytes {
            return Self(0);
        }
        // SAFETY: the precondition of this function; the pair begins below `bytes`.
        Self(unsafe { segments.read_pair(from, bytes, unit - 1) })
    }
}

/// Places of the bytes of a stream in the memory from which it is sent: segments of equal size at
/// equal distances, both powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segments {
    /// Binary logarithm of the bytes of a segment.
    size: u32,
    /// Binary logarithm of the distance, in segments.
    distance: u32,
}

impl Segments {
    /// The whole stream in one segment.
    pub const ONE: Self = Self {
        size: usize::BITS - 1,
        distance: 0,
    };

    /// Segments of `1 << size` bytes, at least [`PAIR_DATA`], of which each begins `1 << distance`
    /// segments after the one before.
    #[inline(always)]
    pub const fn new(size: u32, distance: u32) -> Self {
        Self { size, distance }
    }

    /// Returns the offset in memory of byte `at` of the stream.
    #[inline(always)]
    pub const fn find(self, at: usize) -> usize {
        let segment = at >> self.size;
        at + (segment << (self.size + self.distance)) - (segment << self.size)
    }

    /// Does what [`read_pair`] does, for a stream in these segments.
    #[inline(always)]
    unsafe fn read_pair(self, from: *const u8, bytes: usize, pair: usize) -> u64 {
        let start = pair * PAIR_DATA;
        let from = from.wrapping_add(self.find(start) - start);
        // SAFETY: a pair is in one segment, which begins at a multiple of its size. The rest is the
        // precondition of `read_pair`.
        unsafe { read_pair(from, bytes, pair) }
    }
}

/// Returns up to 8 bytes of `from` at pair `pair`, zero beyond `bytes`.
///
/// # Safety
/// `from` must be readable for `bytes` bytes.
#[inline(always)]
pub unsafe fn read_pair(from: *const u8, bytes: usize, pair: usize) -> u64 {
    let start = pair * PAIR_DATA;
    // SAFETY: every read stays below `bytes`; whole pairs are read by the widest aligned access.
    unsafe {
        let at = from.add(start);
        if start + PAIR_DATA <= bytes {
            match at as usize % 8 {
                0 => return mem::read(at.cast::<u64>()),
                4 => {
                    let low = mem::read(at.cast::<u32>());
                    return u64::from(low) | u64::from(mem::read(at.add(4).cast::<u32>())) << 32;
                }
                _ => {}
            }
        }
        let mut data = 0;
        let mut i = 0;
        while i < PAIR_DATA && start + i < bytes {
            data |= u64::from(mem::read(at.add(i))) << (8 * i);
            i += 1;
        }
        data
    }
}

/// Copies at most 56 bytes by whole words and then bytes, without a call.
#[inline(always)]
unsafe fn copy_short(to: *mut u8, from: *const u8, bytes: usize) {
    let mut i = 0;
    // SAFETY: both ranges have `bytes` bytes; every access stays below `bytes`.
    unsafe {
        while i + 8 <= bytes {
            mem::write(
                to.add(i).cast::<u64>(),
                mem::read(from.add(i).cast::<u64>()),
            );
            i += 8;
        }
        while i < bytes {
            mem::write(to.add(i), mem::read(from.add(i)));
            i += 1;
        }
    }
}
