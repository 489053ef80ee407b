//! A window with signals, counters and barriers for the user: torchcomms' device window.
//!
//! The memory behind it is two windows of the communicator: the user's part, and a signal pad with
//! the words of [`DeviceWindow`], which are apart from the library's own.
//!
//! A **signal** says that something has arrived: it has a slot for each sender, which only that
//! sender writes, so that SET and ADD need no agreement; a wait compares one slot, or the sum of
//! all. A **counter** says that a put's source may be reused. What a put overwrites, and when it
//! may, is the user's protocol; what the words promise is: a signal covers the puts of the same
//! block before it.

use bytemuck::{Pod, Zeroable};

use crate::comm::{Comm, PeerPtr};
use crate::group::{Block, Group, Machine};
use crate::layout::CommConst;
use crate::mem::{self, Order, Scope};
use crate::net::{self, NoRoute, SignalOp};
use crate::wait::{WaitContext, WaitKind};

/// A window as kernels see it; plain data in device memory, written once by the host.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct DeviceWindow {
    /// Address of the communicator's [`CommConst`].
    pub constants: u64,
    /// Number of the window that holds the user's memory.
    pub window: u32,
    /// Number of the window that holds the words.
    pub signal_pad: u32,
    /// Byte offset of the user's part in the window; differs between ranks only where each rank
    /// registered memory of its own.
    pub offset: u64,
    /// Bytes of the user's part.
    pub bytes: u64,
    /// Signals.
    pub signals: u32,
    /// Counters.
    pub counters: u32,
    /// Barriers.
    pub barriers: u32,
    /// Ranks.
    pub size: u32,
}

/// Comparison of the word that a wait reads with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Compare {
    /// Equal.
    Equal = 0,
    /// Not equal.
    NotEqual = 1,
    /// Less.
    Less = 2,
    /// Less or equal.
    LessEqual = 3,
    /// Greater.
    Greater = 4,
    /// Greater or equal.
    GreaterEqual = 5,
}

impl Compare {
    /// Returns the comparison with this code; greater or equal for codes that no comparison has.
    #[inline(always)]
    pub const fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Equal,
            1 => Self::NotEqual,
            2 => Self::Less,
            3 => Self::LessEqual,
            4 => Self::Greater,
            _ => Self::GreaterEqual,
        }
    }

    /// Returns true if `seen` satisfies it; unsigned.
    #[inline(always)]
    pub const fn holds(self, seen: u64, value: u64) -> bool {
        match self {
            Self::Equal => seen == value,
            Self::NotEqual => seen != value,
            Self::Less => seen < value,
            Self::LessEqual => seen <= value,
            Self::Greater => seen > value,
            Self::GreaterEqual => seen >= value,
        }
    }
}

/// Returns the bytes of the signal pad of a window with that many words of each kind, on `size`
/// ranks.
pub const fn signal_pad_bytes(size: u32, signals: u32, counters: u32, barriers: u32) -> u64 {
    let size = size as u64;
    (signals as u64 * size + counters as u64 + barriers as u64 * (size + 1)) * 8
}

impl DeviceWindow {
    /// Returns the communicator.
    ///
    /// # Safety
    /// As [`Comm::new`], for the constants that the window was made with.
    #[inline(always)]
    pub unsafe fn comm(&self) -> Comm {
        // SAFETY: the caller's promise.
        unsafe { Comm::new(self.constants as *const CommConst) }
    }

    /// Returns the offset in the signal pad of the slot of signal `id` that `sender` writes.
    #[inline(always)]
    pub const fn signal_at(&self, id: u32, sender: u32) -> u64 {
        (id as u64 * self.size as u64 + sender as u64) * 8
    }

    /// Returns the offset in the signal pad of counter `id`.
    #[inline(always)]
    pub const fn counter_at(&self, id: u32) -> u64 {
        (self.signals as u64 * self.size as u64 + id as u64) * 8
    }

    /// Returns the offset in the signal pad of the word of barrier `id` that `sender` writes; that
    /// of this rank's own count for `sender == size`.
    #[inline(always)]
    pub const fn barrier_at(&self, id: u32, sender: u32) -> u64 {
        let before = self.signals as u64 * self.size as u64 + self.counters as u64;
        (before + id as u64 * (self.size as u64 + 1) + sender as u64) * 8
    }

    /// A word of this rank's own signal pad.
    #[inline(always)]
    fn own(&self, comm: &Comm, offset: u64) -> Option<*mut u64> {
        comm.pointer(PeerPtr::new(self.signal_pad, comm.rank(), offset), 1)
    }

    /// Returns the address on this rank of byte `offset` of `rank`'s part of the user's memory, for
    /// `bytes` bytes, or `None` where the rank is not reachable by load and store or the range
    /// leaves the window.
    #[inline(always)]
    pub fn address(&self, comm: &Comm, rank: u32, offset: u64, bytes: u64) -> Option<*mut u8> {
        let fits = offset <= self.bytes && bytes <= self.bytes - offset;
        let addr = crate::comm::WindowAddr::new(self.window, self.offset + offset);
        if fits {
            comm.resolve(addr, rank, bytes)
        } else {
            None
        }
    }

    /// Writes `bytes` bytes at `from` to byte `offset` of `peer`'s part; then, where they are asked
    /// for, adds 1 to signal `signal` at the peer and to counter `counter` here. All lanes
    /// together. A put to this rank itself works.
    ///
    /// # Safety
    /// `from` must be readable; the range at the peer must be free to be written.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // torchcomms' face
    pub unsafe fn put<M: Machine>(
        &self,
        block: Block<M>,
        comm: &Comm,
        offset: u64,
        from: *const u8,
        bytes: u64,
        peer: u32,
        signal: Option<u32>,
        counter: Option<u32>,
    ) -> Result<(), NoRoute> {
        let target = self.address(comm, peer, offset, bytes).ok_or(NoRoute)?;
        // SAFETY: the caller's promise; the target was checked against its window.
        unsafe {
            crate::bulk::copy(block, target, from, bytes as usize, mem::Policy::Cached);
        }
        if let Some(id) = signal {
            // SAFETY: a signal word.
            unsafe { self.signal(block, comm, peer, id, SignalOp::Add(1))? };
        }
        if let Some(id) = counter {
            block.sync();
            if id >= self.counters {
                return Err(NoRoute);
            }
            let word = self.own(comm, self.counter_at(id)).ok_or(NoRoute)?;
            if block.is_leader() {
                // SAFETY: a counter of this rank's signal pad, only accessed atomically.
                unsafe { mem::fetch_add_u64(word, 1, Order::AcqRel, Scope::Device) };
            }
        }
        Ok(())
    }

    /// Reads `bytes` bytes from byte `offset` of `peer`'s part to `to`. All lanes together.
    ///
    /// # Safety
    /// `to` must be writable; the range at the peer must not be written meanwhile.
    #[inline(always)]
    pub unsafe fn get<M: Machine>(
        &self,
        block: Block<M>,
        comm: &Comm,
        to: *mut u8,
        offset: u64,
        bytes: u64,
        peer: u32,
    ) -> Result<(), NoRoute> {
        let source = self.address(comm, peer, offset, bytes).ok_or(NoRoute)?;
        // SAFETY: the caller's promise; the source was checked against its window.
        unsafe { crate::bulk::copy(block, to, source, bytes as usize, mem::Policy::Cached) };
        Ok(())
    }

    /// Changes this rank's slot of signal `id` at `peer`: everything that this block has put there
    /// before is visible to whoever acquires the new value. All lanes together.
    ///
    /// # Safety
    /// The window must be alive on the peer.
    #[inline(always)]
    pub unsafe fn signal<M: Machine>(
        &self,
        block: Block<M>,
        comm: &Comm,
        peer: u32,
        id: u32,
        op: SignalOp,
    ) -> Result<(), NoRoute> {
        if id >= self.signals {
            return Err(NoRoute);
        }
        let at = PeerPtr::new(self.signal_pad, peer, self.signal_at(id, comm.rank()));
        // SAFETY: a signal word, only accessed as one.
        unsafe { net::signal(block, comm, at, op) }
    }

    /// Returns signal `id` of this rank as `sender` has left it, or the sum over all senders;
    /// acquires what it covers.
    #[inline(always)]
    pub fn read_signal(&self, comm: &Comm, id: u32, sender: Option<u32>) -> u64 {
        let mut sum = 0u64;
        let (first, last) = match sender {
            Some(sender) => (sender, sender + 1),
            None => (0, self.size),
        };
        let mut rank = first;
        while rank < last {
            if let Some(word) = self.own(comm, self.signal_at(id, rank)) {
                // SAFETY: a signal word of this rank's signal pad.
                let seen = unsafe { mem::load_u64(word, Order::Acquire, Scope::System) };
                sum = sum.wrapping_add(seen);
            }
            rank += 1;
        }
        sum
    }

    /// Waits until signal `id`, of `sender` or summed over all, compares as wanted with `value`.
    /// False after a failure (bounded and abortable, by `ctx`). All lanes together.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // torchcomms' face
    pub fn wait_signal<M: Machine>(
        &self,
        block: Block<M>,
        ctx: &WaitContext,
        comm: &Comm,
        id: u32,
        sender: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> bool {
        let mut failed = id >= self.signals || sender.is_some_and(|sender| sender >= self.size);
        if block.is_leader() && !failed {
            let awaited = sender.unwrap_or(comm.rank());
            failed = ctx
                .until(WaitKind::Signal, awaited, value, || {
                    let seen = self.read_signal(comm, id, sender);
                    if compare.holds(seen, value) {
                        Ok(())
                    } else {
                        Err(seen)
                    }
                })
                .is_none();
        }
        let failed = block.any(failed);
        block.acquired(Scope::System);
        !failed
    }

    /// Sets all slots of signal `id` of this rank to 0. Only where no sender can be signalling. All
    /// lanes together.
    #[inline(always)]
    pub fn reset_signal<M: Machine>(&self, block: Block<M>, comm: &Comm, id: u32) {
        let mut rank = block.rank();
        while rank < self.size && id < self.signals {
            if let Some(word) = self.own(comm, self.signal_at(id, rank)) {
                // SAFETY: a signal word of this rank's signal pad.
                unsafe { mem::store_u64(word, 0, Order::Relaxed, Scope::System) };
            }
            rank += block.size();
        }
        block.sync();
    }

    /// Returns counter `id` of this rank.
    #[inline(always)]
    pub fn read_counter(&self, comm: &Comm, id: u32) -> u64 {
        match self.own(comm, self.counter_at(id)) {
            // SAFETY: a counter of this rank's signal pad.
            Some(word) if id < self.counters => unsafe {
                mem::load_u64(word, Order::Acquire, Scope::Device)
            },
            _ => 0,
        }
    }

    /// Sets counter `id` to 0. All lanes together.
    #[inline(always)]
    pub fn reset_counter<M: Machine>(&self, block: Block<M>, comm: &Comm, id: u32) {
        if block.is_leader()
            && id < self.counters
            && let Some(word) = self.own(comm, self.counter_at(id))
        {
            // SAFETY: a counter of this rank's signal pad.
            unsafe { mem::store_u64(word, 0, Order::Relaxed, Scope::Device) };
        }
        block.sync();
    }

    /// Waits until every rank has come to barrier `id` as often as this one. Everything that this
    /// block wrote before is visible to the ranks that leave. False after a failure. All lanes
    /// together.
    ///
    /// Who may overwrite what: a rank adds to its word at a peer at any time, because the words
    /// only grow; a rank leaves after having acquired every peer's count, released by it after all
    /// it wrote.
    #[inline(always)]
    pub fn barrier<M: Machine>(
        &self,
        block: Block<M>,
        ctx: &WaitContext,
        comm: &Comm,
        id: u32,
    ) -> bool {
        if id >= self.barriers {
            return false;
        }
        let Some(own) = self.own(comm, self.barrier_at(id, self.size)) else {
            return false;
        };
        // SAFETY: this rank's count of the barrier, touched by it only.
        let count = unsafe { mem::load_u64(own, Order::Relaxed, Scope::Device) } + 1;
        block.publish(Scope::System);
        let mut failed = false;
        let mut peer = block.rank();
        while peer < self.size {
            let at = PeerPtr::new(self.signal_pad, peer, self.barrier_at(id, comm.rank()));
            match comm.pointer::<u64>(at, 1) {
                // SAFETY: only this rank writes this word, and it only grows.
                Some(word) => unsafe { mem::store_u64(word, count, Order::Release, Scope::System) },
                None => failed = true,
            }
            peer += block.size();
        }
        let mut peer = block.rank();
        while peer < self.size && !failed {
            failed = ctx
                .until(WaitKind::Signal, peer, count, || {
                    let seen = match self.own(comm, self.barrier_at(id, peer)) {
                        // SAFETY: a word of this rank's signal pad.
                        Some(word) => unsafe { mem::load_u64(word, Order::Acquire, Scope::System) },
                        None => 0,
                    };
                    if seen >= count { Ok(()) } else { Err(seen) }
                })
                .is_none();
            peer += block.size();
        }
        let failed = block.any(failed);
        block.acquired(Scope::System);
        if block.is_leader() {
            // SAFETY: as above.
            unsafe { mem::store_u64(own, count, Order::Relaxed, Scope::Device) };
        }
        block.sync();
        !failed
    }
}

const _: () = assert!(size_of::<DeviceWindow>() == 48);
