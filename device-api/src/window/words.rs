//! The words of a window: where they are, and who writes them.
//!
//! ```text
//! slots[signal][sender][block] | sent[signal][peer][block] | taken[signal][sender][block]
//!     | counters | barriers[barrier][sender and own count] | cells
//! ```
//!
//! `sent` has a copy of this rank's slot at each peer, and `taken` counts the waits of each block;
//! [`super::queue`] uses both for other values. Only this rank accesses them, except that a peer
//! that resets a signal, while no rank uses it, also clears the copies in `sent`.

use super::DeviceWindow;
use crate::comm::{Comm, PeerPtr, WindowAddr};
use crate::group::{Group, Machine};
use crate::mem::{self, Order, Scope};
use crate::net::{Action, Request, Route, SignalOp};
use crate::session::{Session, Unvoted};
use crate::wait::WaitKind;

/// Returns the bytes of the words of a window with that many signals, counters, barriers and cells,
/// on `size` ranks with up to `blocks` blocks.
pub const fn signal_pad_bytes(
    size: u32,
    blocks: u32,
    signals: u32,
    counters: u32,
    barriers: u32,
    cells: u32,
) -> u64 {
    let size = size as u64;
    let slots = signals as u64 * size * blocks as u64;
    (3 * slots + counters as u64 + barriers as u64 * (size + 1) + cells as u64) * 8
}

impl DeviceWindow {
    /// Returns the number of slots.
    #[inline(always)]
    pub(super) const fn slots(&self) -> u64 {
        self.signals as u64 * self.size as u64 * self.blocks as u64
    }

    /// Returns the offset of the slot of signal `id` that block `block` of `sender` writes.
    #[inline(always)]
    pub const fn slot_at(&self, id: u32, sender: u32, block: u32) -> u64 {
        let row = id as u64 * self.size as u64 + sender as u64;
        (row * self.blocks as u64 + block as u64) * 8
    }

    /// Returns the offset of the copy of the slot that block `block` of this rank has at `peer`.
    #[inline(always)]
    pub const fn sent_at(&self, id: u32, peer: u32, block: u32) -> u64 {
        self.slots() * 8 + self.slot_at(id, peer, block)
    }

    /// Returns the offset of the number of times that block `block` of this rank has waited for
    /// signal `id` of `sender`.
    #[inline(always)]
    pub const fn taken_at(&self, id: u32, sender: u32, block: u32) -> u64 {
        self.slots() * 16 + self.slot_at(id, sender, block)
    }

    /// Returns the offset of counter `id`.
    #[inline(always)]
    pub const fn counter_at(&self, id: u32) -> u64 {
        (self.slots() * 3 + id as u64) * 8
    }

    /// Returns the offset of the word of barrier `id` that `sender` writes; that of this rank's own
    /// count for `sender == size`.
    #[inline(always)]
    pub const fn barrier_at(&self, id: u32, sender: u32) -> u64 {
        let row = id as u64 * (self.size as u64 + 1) + sender as u64;
        (self.slots() * 3 + self.counters as u64 + row) * 8
    }

    /// Returns the offset of cell `id`.
    #[inline(always)]
    pub const fn cell_at(&self, id: u32) -> u64 {
        self.barrier_at(self.barriers, 0) + id as u64 * 8
    }

    /// Returns the address of `count` words of this rank.
    #[inline(always)]
    pub(super) fn own(&self, comm: &Comm, offset: u64, count: u64) -> Option<*mut u64> {
        comm.pointer(PeerPtr::new(self.signal_pad, comm.rank(), offset), count)
    }

    /// Returns the value of signal `id` of this rank for `from`, or the sum over all ranks. Reads
    /// the slots relaxed.
    #[inline(always)]
    pub(super) fn value(&self, comm: &Comm, id: u32, from: Option<u32>) -> u64 {
        let blocks = u64::from(self.blocks);
        let (sender, count) = match from {
            Some(sender) => (sender, blocks),
            None => (0, blocks * u64::from(self.size)),
        };
        let Some(first) = self.own(comm, self.slot_at(id, sender, 0), count) else {
            return 0;
        };
        let slots = (0..count as usize).map(|slot| {
            // SAFETY: `own` has checked the slots, which are only accessed atomically.
            unsafe { mem::load_u64(first.wrapping_add(slot), Order::Relaxed, Scope::System) }
        });
        slots.fold(0, u64::wrapping_add)
    }

    /// Returns the other rank that has contributed least to the sum of signal `id` of this rank;
    /// this rank if there is no other.
    #[inline(always)]
    pub(super) fn lagging(&self, comm: &Comm, id: u32) -> u32 {
        let count = u64::from(self.blocks) * u64::from(self.size);
        match self.own(comm, self.slot_at(id, 0, 0), count) {
            Some(slots) => lagging(slots, self.size, self.blocks, comm.rank()),
            None => comm.rank(),
        }
    }

    /// Updates this block's slot of signal `id` at `peer`. One lane, after the block has published
    /// its writes. Returns false if the peer cannot be reached.
    #[inline(always)]
    pub(super) fn update<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        peer: u32,
        op: SignalOp,
        after: u64,
    ) -> bool {
        let block = s.block().index();
        let sent = self.own(s.comm(), self.sent_at(id, peer, 0), u64::from(self.blocks));
        let Some(sent) = sent else {
            return false;
        };
        let load = |block: u32| {
            let word = sent.wrapping_add(block as usize);
            // SAFETY: `own` has checked the words, which are only accessed atomically.
            unsafe { mem::load_u64(word, Order::Acquire, Scope::Device) }
        };
        let value = match op {
            SignalOp::Add(value) => load(block).wrapping_add(value),
            // The sum of the slots becomes `value`.
            SignalOp::Set(value) => (0..self.blocks)
                .filter(|other| *other != block)
                .fold(value, |value, other| value.wrapping_sub(load(other))),
        };
        if !self.post(s, peer, self.slot_at(id, s.rank(), block), value, after) {
            return false;
        }
        // Stored after the slot, so that a block that acquires the copy also covers the slot.
        // SAFETY: as above; only this block stores to its word.
        unsafe {
            let word = sent.wrapping_add(block as usize);
            mem::store_u64(word, value, Order::Release, Scope::Device);
        }
        true
    }

    /// Enters barrier `id` and waits for all ranks. The count of this rank is stored by
    /// [`DeviceWindow::leave_barrier`], after a vote. `no_route` records that a rank cannot be
    /// reached. All lanes together.
    ///
    /// - **Who may overwrite what:** a rank overwrites its word at a peer at any time, because the
    ///   words only grow;
    /// - **after having acquired** nothing; it leaves after having acquired every peer's count,
    /// - **released by** the peer after all it wrote.
    #[inline(always)]
    #[track_caller]
    pub(super) fn barrier<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        no_route: impl Fn(u32),
    ) -> Unvoted<()> {
        let (block, comm) = (s.block(), s.comm());
        let count = self.count(comm, id).wrapping_add(1);
        block.publish();
        let mut arrived = Unvoted::new(());
        if s.faults().is_pending() {
            return arrived;
        }
        let mut peer = block.rank();
        while peer < self.size {
            if !self.post(s, peer, self.barrier_at(id, comm.rank()), count, 0) {
                no_route(peer);
                arrived = Unvoted::from_wait(None);
            }
            peer += block.size();
        }
        let mut peer = block.rank();
        while peer < self.size && !arrived.is_failed() {
            let word = self.own(comm, self.barrier_at(id, peer), 1);
            arrived = Unvoted::from_wait(s.ctx().until(WaitKind::Signal, peer, count, || {
                let seen = match word {
                    // SAFETY: a word of this rank's signal pad.
                    Some(word) => unsafe { mem::load_u64(word, Order::Acquire, Scope::System) },
                    None => 0,
                };
                if seen >= count { Ok(()) } else { Err(seen) }
            }));
            peer += block.size();
        }
        arrived
    }

    /// Stores how often this rank has entered barrier `id`. All lanes together, after a vote.
    #[inline(always)]
    #[track_caller]
    pub(super) fn leave_barrier<M: Machine>(&self, s: &Session<M>, id: u32) {
        let count = self.count(s.comm(), id).wrapping_add(1);
        s.block().sync();
        if s.block().is_leader()
            && let Some(own) = self.own(s.comm(), self.barrier_at(id, self.size), 1)
        {
            // SAFETY: this rank's count, which only the block that uses the barrier accesses.
            unsafe { mem::store_u64(own, count, Order::Relaxed, Scope::Device) };
        }
        s.block().sync();
    }

    /// Returns how often this rank has entered barrier `id`.
    #[inline(always)]
    fn count(&self, comm: &Comm, id: u32) -> u64 {
        match self.own(comm, self.barrier_at(id, self.size), 1) {
            // SAFETY: this rank's count, which only the block that uses the barrier accesses.
            Some(own) => unsafe { mem::load_u64(own, Order::Relaxed, Scope::Device) },
            None => 0,
        }
    }

    /// Stores `value` in a word of `peer` that only this block writes. One lane, after the block
    /// has published its writes, which the new value covers: on a network those of the requests
    /// from number `after` on. Returns false if the peer cannot be reached.
    #[inline(always)]
    pub(super) fn post<M: Machine>(
        &self,
        s: &Session<M>,
        peer: u32,
        offset: u64,
        value: u64,
        after: u64,
    ) -> bool {
        if s.faults().is_pending() {
            return true;
        }
        let remote = WindowAddr::new(self.signal_pad, offset);
        match Route::to(s.comm(), remote, peer, 8) {
            Route::Direct(word) => {
                // SAFETY: the word was checked against its window.
                unsafe { mem::store_u64(word.cast(), value, Order::Release, Scope::System) };
            }
            Route::Network(ring) => {
                let request = Request {
                    action: Action::Signal,
                    block: s.block().index(),
                    peer,
                    remote,
                    local: WindowAddr::NONE,
                    value: [value, 0],
                    bytes: 8,
                    after,
                };
                s.request(&ring, request);
            }
            Route::None => return false,
        }
        true
    }
}

/// Returns the rank other than `own` whose slots have the least sum, of `size` ranks with `blocks`
/// slots each.
#[cold]
#[inline(never)]
fn lagging(slots: *const u64, size: u32, blocks: u32, own: u32) -> u32 {
    let (mut least, mut found) = (u64::MAX, own);
    for rank in (0..size).filter(|&rank| rank != own) {
        let first = rank as usize * blocks as usize;
        let of_rank = (first..first + blocks as usize).map(|slot| {
            // SAFETY: the caller has checked the slots, which are only accessed atomically.
            unsafe { mem::load_u64(slots.wrapping_add(slot), Order::Relaxed, Scope::System) }
        });
        let sum = of_rank.fold(0, u64::wrapping_add);
        if sum < least {
            (least, found) = (sum, rank);
        }
    }
    found
}
