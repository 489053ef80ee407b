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

use core::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use crate::args::{In, InOut};
use crate::comm::{Comm, PeerPtr};
use crate::element::Element;
use crate::group::{Block, Group, Machine};
use crate::layout::{CommConst, FailureKind};
use crate::mem::{self, Order, Scope};
use crate::net::{self, NoRoute, SignalOp};
use crate::session::{Aborted, Session, Unvoted};
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
    #[track_caller]
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
    #[track_caller]
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
    #[track_caller]
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
    #[track_caller]
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

/// A window as an argument of a kernel. All lanes of a block call the functions that take the
/// session together, with equal arguments.
///
/// Every rank has a part of [`Window::len`] elements. If a rank, range, signal or barrier does not
/// exist, the function accesses nothing and fails the launch. The message names the argument and
/// the value.
#[derive(Debug)]
pub struct Window<'a, T> {
    window: DeviceWindow,
    argument: u32,
    launch: PhantomData<&'a T>,
}

impl<T> Clone for Window<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Window<'_, T> {}

impl<'a, T: Element> Window<'a, T> {
    /// Wraps the argument with number `argument`. Called by `#[kernel]`.
    ///
    /// # Safety
    /// `window` must describe a window of the session's communicator that is alive during the
    /// launch.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(
        session: &Session<M>,
        argument: u32,
        window: *const DeviceWindow,
    ) -> Self {
        let _ = session;
        Self {
            // SAFETY: the description is valid, and nothing writes it while kernels run.
            window: unsafe { mem::read(window) },
            argument,
            launch: PhantomData,
        }
    }

    /// Returns the number of elements of each rank's part.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.window.bytes as usize / size_of::<T>()
    }

    /// Returns true if the parts have no elements.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of signals.
    #[inline(always)]
    pub fn signals(&self) -> u32 {
        self.window.signals
    }

    /// Returns the description, whose functions report errors by return values only.
    #[inline(always)]
    pub fn description(&self) -> &DeviceWindow {
        &self.window
    }

    /// Returns this rank's part. After a wait for a peer's signal it contains what that peer has
    /// put before.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::NoRoute`], if the window has been freed.
    #[inline(always)]
    pub fn own<M: Machine>(&self, s: &mut Session<M>) -> Result<InOut<'a, T>, Aborted> {
        self.direct(s, s.rank())
    }

    /// Returns `rank`'s part, for loads and stores of this rank. Only for ranks that are reachable
    /// by load and store: a kernel that calls this for a peer cannot run over a network.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::Rank`] or [`FailureKind::NoRoute`].
    #[inline(always)]
    pub fn direct<M: Machine>(
        &self,
        s: &mut Session<M>,
        rank: u32,
    ) -> Result<InOut<'a, T>, Aborted> {
        let at = self.address(s, rank, 0, self.len())?;
        // SAFETY: the window is alive during the launch. Its parts are accessed by peers, through
        // device memory operations.
        Ok(unsafe { InOut::new(s, self.argument, at, self.len() as u64) })
    }

    /// Writes the elements of `source` to elements `first ..` of `rank`'s part, which may be this
    /// rank's own. They are visible to a peer that has acquired a later signal of this block. The
    /// source must not overlap the target.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::Rank`], [`FailureKind::Index`],
    /// [`FailureKind::NoRoute`] or [`FailureKind::Aliasing`].
    #[inline(always)]
    #[track_caller]
    pub fn put<M: Machine>(
        &self,
        s: &mut Session<M>,
        rank: u32,
        first: usize,
        source: In<T>,
    ) -> Result<(), Aborted> {
        let block = s.block();
        block.uniform([u64::from(rank), first as u64, source.len() as u64]);
        let target = self.address(s, rank, first, source.len())?;
        let bytes = source.len() * size_of::<T>();
        let (to, from) = (target as usize, source.as_ptr() as usize);
        if to.abs_diff(from) < bytes {
            let distance = to.abs_diff(from) as u64;
            return Err(s.refuse(FailureKind::Aliasing, self.argument, distance, bytes as u64));
        }
        // SAFETY: `address` has checked the target against the window; the source has `bytes`
        // bytes and does not overlap it. That no rank reads the target meanwhile is the kernel's
        // protocol; elements have no invalid values.
        unsafe {
            let from = source.as_ptr().cast();
            crate::bulk::copy(block, target, from, bytes, mem::Policy::Cached);
        }
        Ok(())
    }

    /// Changes this rank's slot of signal `id` at `rank`. A wait that sees the new value makes all
    /// earlier puts of this block to `rank` visible. Two blocks must not change one slot
    /// concurrently.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::Rank`], [`FailureKind::Id`] or
    /// [`FailureKind::NoRoute`].
    #[inline(always)]
    #[track_caller]
    pub fn signal<M: Machine>(
        &self,
        s: &mut Session<M>,
        rank: u32,
        id: u32,
        op: SignalOp,
    ) -> Result<(), Aborted> {
        let (block, comm) = (s.block(), *s.comm());
        block.uniform([u64::from(rank), u64::from(id)]);
        self.check_rank(s, rank)?;
        self.check_id(s, id, self.window.signals)?;
        // SAFETY: the window is alive on the peer until all ranks have freed it.
        let sent = unsafe { self.window.signal(block, &comm, rank, id, op) };
        sent.map_err(|NoRoute| self.no_route(s, rank))
    }

    /// Waits until `compare` holds between signal `id` of this rank and `value`. Compares the slot
    /// of the rank `from`, or the sum of all slots if `from` is `None`.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::Rank`], [`FailureKind::Id`] or
    /// [`FailureKind::NoRoute`], if a lane has recorded an error, or after a timeout, which names
    /// `from`, or this rank if `from` is `None`.
    #[inline(always)]
    #[track_caller]
    pub fn wait<M: Machine>(
        &self,
        s: &mut Session<M>,
        id: u32,
        from: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> Result<(), Aborted> {
        let (block, comm, ctx) = (s.block(), *s.comm(), *s.ctx());
        block.uniform([u64::from(id), from.map_or(u64::MAX, u64::from), value]);
        self.check_id(s, id, self.window.signals)?;
        self.own(s)?;
        if let Some(from) = from {
            self.check_rank(s, from)?;
        }
        let mut arrived = Unvoted::new(());
        if block.is_leader() {
            let awaited = from.unwrap_or(comm.rank());
            arrived = Unvoted::from_wait(ctx.until(WaitKind::Signal, awaited, value, || {
                let seen = self.window.read_signal(&comm, id, from);
                if compare.holds(seen, value) {
                    Ok(())
                } else {
                    Err(seen)
                }
            }));
        }
        s.vote(arrived)
    }

    /// Waits until every rank has entered barrier `id` as often as this one. All writes of the
    /// blocks before the barrier are visible to them after it. Only one block of a launch may use
    /// a given barrier.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::Id`] or [`FailureKind::NoRoute`], or a timeout,
    /// which names the late rank. Errors that lanes have recorded are not returned.
    #[inline(always)]
    #[track_caller]
    pub fn barrier<M: Machine>(&self, s: &mut Session<M>, id: u32) -> Result<(), Aborted> {
        let (block, comm, ctx) = (s.block(), *s.comm(), *s.ctx());
        block.uniform([u64::from(id)]);
        self.check_id(s, id, self.window.barriers)?;
        self.own(s)?;
        let arrived = self.window.barrier(block, &ctx, &comm, id);
        s.settle(arrived)
    }

    /// Returns the address of elements `first .. first + len` of `rank`'s part.
    #[inline(always)]
    fn address<M: Machine>(
        &self,
        s: &mut Session<M>,
        rank: u32,
        first: usize,
        len: usize,
    ) -> Result<*mut u8, Aborted> {
        self.check_rank(s, rank)?;
        let all = self.len();
        if first > all || len > all - first {
            let last = first.saturating_add(len).saturating_sub(1);
            let (last, all) = (last as u64, all as u64);
            return Err(s.refuse(FailureKind::Index, self.argument, last, all));
        }
        let size = size_of::<T>() as u64;
        let (offset, bytes) = (first as u64 * size, len as u64 * size);
        match self.window.address(s.comm(), rank, offset, bytes) {
            Some(at) => Ok(at),
            None => Err(self.no_route(s, rank)),
        }
    }

    #[inline(always)]
    fn check_rank<M: Machine>(&self, s: &mut Session<M>, rank: u32) -> Result<(), Aborted> {
        let ranks = s.ranks();
        if rank < ranks {
            return Ok(());
        }
        Err(s.refuse(
            FailureKind::Rank,
            self.argument,
            u64::from(rank),
            u64::from(ranks),
        ))
    }

    #[inline(always)]
    fn check_id<M: Machine>(&self, s: &mut Session<M>, id: u32, count: u32) -> Result<(), Aborted> {
        if id < count {
            return Ok(());
        }
        Err(s.refuse(
            FailureKind::Id,
            self.argument,
            u64::from(id),
            u64::from(count),
        ))
    }

    #[inline(always)]
    fn no_route<M: Machine>(&self, s: &mut Session<M>, rank: u32) -> Aborted {
        let ranks = u64::from(s.ranks());
        s.refuse(FailureKind::NoRoute, self.argument, u64::from(rank), ranks)
    }
}
