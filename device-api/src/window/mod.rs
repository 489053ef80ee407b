//! Windows: memory of which every rank has a part that the others can write, with signals.
//!
//! A kernel takes a [`Window`] as an argument. [`Window::at`] gives a peer's part, to which a block
//! puts data, and [`Window::local`] gives this rank's own. A **signal** tells a peer that data has
//! arrived; a wait returns [`Received`], through which a kernel reads what the signal covers. Peers
//! that are not reachable by load and store are served by requests to the network
//! ([`crate::net`]), with the same functions.
//!
//! The kernel's protocol says when a put may overwrite its target.
//!
//! # Signals
//! A signal of a rank has a word, its *slot*, for each block of each sender. Only that block writes
//! the slot, so neither setting nor adding needs an atomic update of remote memory, and blocks that
//! add at the same time lose nothing. The value of a signal for one sender is the sum of the
//! sender's slots.
//!
//! - **Who may overwrite what:** a block overwrites its own slot at a peer at any time; the peer
//!   compares values and needs no particular one;
//! - **after having acquired** nothing: the block keeps a copy of the slot in its own memory;
//! - **released by** the block after its puts to that peer, which the new value covers.
//!
//! There are two ways to use a signal, and a kernel chooses one for each signal:
//! - [`Remote::raise`] and [`Window::wait`] count by themselves, block by block: the n-th wait of
//!   block b for a rank ends when block b of that rank has raised the signal n times, over all
//!   launches and replays. The host raises and waits as block 0 does.
//! - [`Remote::signal`] and [`Window::wait_value`] set, add and compare values. Two blocks must not
//!   *set* one signal of one peer at the same time. On a network, a block that sets what another
//!   block has changed first waits for that block's [`Window::flush`].
//!
//! # Memory
//! A window is two windows of the communicator: the elements, and the words of the signals,
//! counters, barriers and [cells](Fetch), which [`DeviceWindow`] describes.

mod cells;
mod queue;
mod remote;
mod scratch;
mod words;

use core::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use crate::args::{In, InOut, LaunchScope};
use crate::comm::{Rank, Team, WindowAddr};
use crate::element::Element;
use crate::faults::Faults;
use crate::group::{Group, Machine};
use crate::layout::FailureKind;
use crate::mem::{self, Order, Scope};
use crate::net::SignalOp;
use crate::session::{Aborted, Session, Unvoted};
use crate::wait::{Absence, WaitKind};

pub use crate::wait::Arrival;

pub use self::cells::Fetch;
pub use self::queue::{AllRows, Batch, QUEUE_SIGNALS, Queue, Rows, queue_elements};
pub use self::remote::{Get, Put, Remote};
pub use self::scratch::{Scratch, scratch_bytes};
pub use self::words::signal_pad_bytes;

/// A window as kernels see it; plain data in device memory, written once by the host.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct DeviceWindow {
    /// Number of the window that holds the user's memory.
    pub window: u32,
    /// Number of the window that holds the words.
    pub signal_pad: u32,
    /// Byte offset of the part for user data in the window. Differs between ranks only if each rank
    /// registered memory of its own.
    pub offset: u64,
    /// Size in bytes of the part for user data.
    pub bytes: u64,
    /// Signals.
    pub signals: u32,
    /// Counters.
    pub counters: u32,
    /// Barriers.
    pub barriers: u32,
    /// Ranks.
    pub size: u32,
    /// Most blocks of a launch.
    pub blocks: u32,
    /// Rows of the rings of a queue: a power of two; 0 if the window is not that of a queue.
    pub ring: u32,
    /// Elements of a row of a queue.
    pub width: u32,
    /// Cells.
    pub cells: u32,
}

const _: () = assert!(size_of::<DeviceWindow>() == 56);

/// Comparison of the value that a wait reads with the one that it is given.
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

/// The ranks that take part in a signal, for [`Window::wait_present`] and
/// [`Window::raise_present`].
pub trait Presence: Copy {
    /// Returns true if `rank` gets the signal or is awaited.
    fn includes(self, rank: Rank) -> bool;

    /// Returns true if the wait ends without a rank that is late or whose process has ended. If
    /// false, the launch then fails.
    fn may_be_absent(self) -> bool;

    /// Notes the outcome of the wait for `rank`. Called on one lane, which waits for its ranks in
    /// turn.
    fn awaited(self, rank: Rank, arrival: Arrival);
}

/// All ranks take part; if one is late, the launch fails.
#[derive(Clone, Copy, Debug)]
pub struct Everyone;

impl Presence for Everyone {
    #[inline(always)]
    fn includes(self, _rank: Rank) -> bool {
        true
    }

    #[inline(always)]
    fn may_be_absent(self) -> bool {
        false
    }

    #[inline(always)]
    fn awaited(self, _rank: Rank, _arrival: Arrival) {}
}

/// A window as an argument of a kernel.
///
/// Every rank has a part of [`Window::len`] elements. Unless a function says otherwise, all lanes
/// of a block call it together, with equal arguments.
///
/// # Errors
/// A range, signal, counter, barrier or cell that does not exist is recorded as an error, with the
/// name of the argument and the value, and nothing is accessed. The next function that votes
/// returns the error on all lanes ([`crate::session`]).
#[derive(Debug)]
pub struct Window<'a, T> {
    window: DeviceWindow,
    argument: u32,
    faults: Faults,
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
        _launch: &'a LaunchScope,
        session: &Session<M>,
        argument: u32,
        window: *const DeviceWindow,
    ) -> Self {
        Self {
            // SAFETY: the description is valid, and nothing writes it while kernels run.
            window: unsafe { mem::read(window) },
            argument,
            faults: session.faults(),
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

    /// Returns `rank`'s part. Any lane.
    #[inline(always)]
    pub fn at(&self, rank: Rank) -> Remote<'a, T> {
        Remote::new(*self, rank)
    }

    /// Returns this rank's part: the source of puts and the target of gets. To read what a peer
    /// has put there, wait for a signal ([`Received`]).
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::NoRoute`], if the window has been freed.
    #[inline(always)]
    pub fn local<M: Machine>(&self, s: &Session<M>) -> Result<Local<'a, T>, Aborted> {
        let part = self.at(s.me()).direct(s)?;
        Ok(Local {
            elements: part,
            window: self.window.window,
            offset: self.window.offset,
        })
    }

    /// Waits until block b of the rank `from` has raised signal `id` once more than in the last
    /// wait, where b is the index of this block.
    ///
    /// # Errors
    /// [`Aborted`] after a timeout, which names `from`, or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn wait<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        from: Rank,
    ) -> Result<Received<'a, T>, Aborted> {
        let block = s.block();
        block.uniform([u64::from(id), u64::from(from.index())]);
        let mut arrived = Unvoted::new(());
        if block.is_leader() {
            let arrival = self.await_raise(s, id, from, Absence::Fails);
            if arrival == Arrival::Failed {
                arrived = Unvoted::from_wait(None);
            }
        }
        s.vote(arrived)?;
        self.received(s)
    }

    /// Does what [`Window::wait`] does for all ranks of a team, this rank included.
    ///
    /// # Errors
    /// As [`Window::wait`].
    #[inline(always)]
    #[track_caller]
    pub fn wait_all<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        team: Team,
    ) -> Result<Received<'a, T>, Aborted> {
        self.wait_present(s, id, team, Everyone)
    }

    /// Does what [`Window::wait_all`] does for the ranks that `presence` includes. If ranks may be
    /// absent, the wait ends without a rank that has not raised the signal within the timeout or
    /// whose process has ended, instead of failing the launch. A rank that itself waits so for
    /// another rank gets up to four times the timeout: when it gives up, it may still arrive.
    ///
    /// # Errors
    /// As [`Window::wait`], but not because of a rank that is absent.
    #[inline(always)]
    #[track_caller]
    pub fn wait_present<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        team: Team,
        presence: impl Presence,
    ) -> Result<Received<'a, T>, Aborted> {
        s.block().uniform([u64::from(id)]);
        let mut arrived = Unvoted::new(());
        let mut absence = match presence.may_be_absent() {
            true => Absence::AfterTimeout,
            false => Absence::Fails,
        };
        for from in s.peers_of_lane(team) {
            if !presence.includes(from) {
                continue;
            }
            let arrival = self.await_raise(s, id, from, absence);
            if arrival == Arrival::Late {
                // The signals of the other ranks have had the same time to arrive.
                absence = Absence::AtOnce;
            }
            if arrival == Arrival::Failed {
                arrived = Unvoted::from_wait(None);
            }
            presence.awaited(from, arrival);
        }
        s.vote(arrived)?;
        self.received(s)
    }

    /// Waits until `compare` holds between signal `id` of this rank and `value`. The signal's value
    /// is what `from` has made of it, or the sum over all ranks if `from` is `None`.
    ///
    /// # Errors
    /// [`Aborted`] after a timeout, which names `from`, or the rank that has contributed least to
    /// the sum if `from` is `None`; or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn wait_value<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        from: Option<Rank>,
        compare: Compare,
        value: u64,
    ) -> Result<Received<'a, T>, Aborted> {
        let block = s.block();
        let from = from.map(Rank::index);
        block.uniform([u64::from(id), from.map_or(u64::MAX, u64::from), value]);
        let mut arrived = Unvoted::new(());
        let has_rank = from.is_none_or(|from| self.has_rank(from));
        if block.is_leader() && has_rank && self.has_signal(id) && self.is_alive(s) {
            arrived = self.await_value(s, id, from, compare, value);
        }
        s.vote(arrived)?;
        self.received(s)
    }

    /// Raises signal `id` of every rank of a team, this rank included. See [`Remote::raise`].
    #[inline(always)]
    #[track_caller]
    pub fn raise_all<M: Machine>(&self, s: &Session<M>, id: u32, team: Team) {
        self.raise_present(s, id, team, Everyone);
    }

    /// Does what [`Window::raise_all`] does for the ranks that `presence` includes.
    #[inline(always)]
    #[track_caller]
    pub fn raise_present<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        team: Team,
        presence: impl Presence,
    ) {
        self.update_each(s, id, SignalOp::Add(1), team, presence);
    }

    /// Updates signal `id` of every rank of a team, this rank included. See [`Remote::signal`].
    #[inline(always)]
    #[track_caller]
    pub fn signal_all<M: Machine>(&self, s: &Session<M>, id: u32, op: SignalOp, team: Team) {
        self.update_each(s, id, op, team, Everyone);
    }

    #[inline(always)]
    #[track_caller]
    fn update_each<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        op: SignalOp,
        team: Team,
        presence: impl Presence,
    ) {
        let block = s.block();
        block.uniform([u64::from(id)]);
        block.publish();
        // After an error, the peers must not trust the data, so they get no signal.
        if !s.faults().is_pending() {
            for peer in s.peers_of_lane(team) {
                if presence.includes(peer) {
                    self.update(s, id, peer, op, 0);
                }
            }
        }
    }

    /// Stores `value` as element `index` of the part of every rank of a team, this rank included.
    /// See [`Remote::store`].
    #[inline(always)]
    pub fn store_each<M: Machine>(&self, s: &Session<M>, index: usize, value: T, team: Team) {
        for peer in s.peers_of_lane(team) {
            self.at(peer).store(s, index, [value]);
        }
    }

    /// Waits until every rank has entered barrier `id` as often as this one. All writes of the
    /// blocks before the barrier are visible to them after it. Only one block of a launch may use
    /// a given barrier.
    ///
    /// # Errors
    /// [`Aborted`] after a timeout, which names the late rank, or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn barrier<M: Machine>(&self, s: &Session<M>, id: u32) -> Result<Received<'a, T>, Aborted> {
        let block = s.block();
        block.uniform([u64::from(id)]);
        let entered = if id < self.window.barriers {
            self.window.barrier(s, id, |rank| self.no_route(rank))
        } else {
            self.refuse(FailureKind::Id, id, self.window.barriers);
            Unvoted::new(())
        };
        s.vote(entered)?;
        self.window.leave_barrier(s, id);
        self.received(s)
    }

    /// Waits until the sources of all puts of this block may be reused.
    ///
    /// # Errors
    /// [`Aborted`] after a timeout, or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn flush<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        s.vote(s.flush())
    }

    /// Adds 1 to counter `id` of this rank once the sources of all puts of this block may be
    /// reused. All blocks of the rank share a counter.
    ///
    /// # Errors
    /// As [`Window::flush`].
    #[inline(always)]
    #[track_caller]
    pub fn count<M: Machine>(&self, s: &Session<M>, id: u32) -> Result<(), Aborted> {
        s.block().uniform([u64::from(id)]);
        let counter = self.counter(s, id);
        self.flush(s)?;
        if s.block().is_leader()
            && let Some(word) = counter
        {
            // SAFETY: a counter of this rank's signal pad, only accessed atomically.
            unsafe { increment(word) };
        }
        Ok(())
    }

    /// Waits until `compare` holds between counter `id` of this rank and `value`. The sources of
    /// the puts that the counter covers may then be reused, those of other blocks included. A block
    /// that waits for blocks of its own launch needs a kernel whose blocks run at the same time.
    ///
    /// # Errors
    /// [`Aborted`] after a timeout, which names this rank, or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn wait_counter<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        compare: Compare,
        value: u64,
    ) -> Result<(), Aborted> {
        let block = s.block();
        block.uniform([u64::from(id), value]);
        let mut reached = Unvoted::new(());
        if let Some(word) = self.counter(s, id)
            && block.is_leader()
            && !s.faults().is_pending()
        {
            let (ctx, rank) = (s.ctx(), s.rank());
            reached = Unvoted::from_wait(ctx.until(WaitKind::Counter, rank, value, || {
                // SAFETY: a counter of this rank's signal pad, only accessed atomically.
                let seen = unsafe { mem::load_u64(word, Order::Acquire, Scope::Device) };
                match compare.holds(seen, value) {
                    true => Ok(()),
                    false => Err(seen),
                }
            }));
        }
        s.vote(reached)
    }

    /// Returns the value of counter `id` of this rank, or 0 after recording an error. Any lane by
    /// itself. To reuse the sources that the counter covers, call [`Window::wait_counter`].
    #[inline(always)]
    pub fn read_counter<M: Machine>(&self, s: &Session<M>, id: u32) -> u64 {
        self.counter(s, id).map_or(0, |word| {
            // SAFETY: a counter of this rank's signal pad, only accessed atomically.
            unsafe { mem::load_u64(word, Order::Relaxed, Scope::Device) }
        })
    }

    /// Sets counter `id` of this rank to 0. No block may count or wait meanwhile.
    #[inline(always)]
    #[track_caller]
    pub fn reset_counter<M: Machine>(&self, s: &Session<M>, id: u32) {
        let block = s.block();
        block.uniform([u64::from(id)]);
        let counter = self.counter(s, id);
        block.sync();
        if let Some(word) = counter
            && block.is_leader()
        {
            // SAFETY: a counter of this rank's signal pad, only accessed atomically.
            unsafe { mem::store_u64(word, 0, Order::Relaxed, Scope::Device) };
        }
        block.sync();
    }

    /// Returns the value of signal `id` of this rank, that of `from` or the sum over all ranks, or
    /// 0 after recording an error. Any lane by itself. To read what the signal covers, call
    /// [`Window::wait_value`], which returns at once if the value satisfies the comparison.
    #[inline(always)]
    pub fn read_signal<M: Machine>(&self, s: &Session<M>, id: u32, from: Option<Rank>) -> u64 {
        let from = from.map(Rank::index);
        if from.is_none_or(|from| self.has_rank(from)) && self.has_signal(id) && self.is_alive(s) {
            return self.window.value(s.comm(), id, from);
        }
        0
    }

    /// Returns the address that all ranks use for elements `first .. first + len` of their part, or
    /// records an error.
    #[inline(always)]
    pub(crate) fn addr<M: Machine>(
        &self,
        s: &Session<M>,
        first: usize,
        len: usize,
    ) -> Option<WindowAddr> {
        let part = self.at(s.me()).slice(first, len);
        (part.len() == len).then(|| {
            let offset = self.window.offset + first as u64 * size_of::<T>() as u64;
            WindowAddr::new(self.window.window, offset)
        })
    }

    /// Returns the address of counter `id` of this rank, or records an error.
    #[inline(always)]
    fn counter<M: Machine>(&self, s: &Session<M>, id: u32) -> Option<*mut u64> {
        if id >= self.window.counters {
            self.refuse(FailureKind::Id, id, self.window.counters);
            return None;
        }
        let word = self.window.own(s.comm(), self.window.counter_at(id), 1);
        if word.is_none() {
            self.no_route(s.rank());
        }
        word
    }

    /// Waits on one lane until the value of a signal satisfies `compare`.
    #[inline(always)]
    fn await_value<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        from: Option<u32>,
        compare: Compare,
        value: u64,
    ) -> Unvoted<()> {
        if s.faults().is_pending() {
            return Unvoted::new(());
        }
        let wait = match from {
            Some(_) => WaitKind::Signal,
            None => WaitKind::Sum,
        };
        let awaited = || from.unwrap_or_else(|| self.window.lagging(s.comm(), id));
        Unvoted::from_wait(s.ctx().until_signalled(wait, awaited, value, || {
            // The slots are read relaxed, so that the loads are in flight together.
            let first = self.window.value(s.comm(), id, from);
            if !compare.holds(first, value) {
                return Err(first);
            }
            // The loads may have seen only some slots of an update of several. After the fence, the
            // second read is at least as new as all that the first values cover.
            mem::fence(Order::Acquire, Scope::System);
            let again = self.window.value(s.comm(), id, from);
            match compare.holds(again, value) {
                true => Ok(()),
                false => Err(again),
            }
        }))
    }

    /// Waits on one lane until `from`'s block of this index has raised signal `id` again.
    #[inline(always)]
    fn await_raise<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        from: Rank,
        absence: Absence,
    ) -> Arrival {
        let (window, block, from) = (&self.window, s.block().index(), from.index());
        if !self.has_signal(id)
            || !self.has_block(block)
            || !self.has_rank(from)
            || s.faults().is_pending()
        {
            return Arrival::Arrived;
        }
        let slot = window.own(s.comm(), window.slot_at(id, from, block), 1);
        let taken = window.own(s.comm(), window.taken_at(id, from, block), 1);
        let (Some(slot), Some(taken)) = (slot, taken) else {
            self.no_route(from);
            return Arrival::Arrived;
        };
        // SAFETY: only this block of this rank accesses this word.
        let value = unsafe { mem::load_u64(taken, Order::Relaxed, Scope::Device) }.wrapping_add(1);
        let arrival = s.ctx().until_raised(from, value, absence, || {
            // SAFETY: a slot of this rank's signal pad.
            let seen = unsafe { mem::load_u64(slot, Order::Acquire, Scope::System) };
            // The sender may be ahead.
            match (seen.wrapping_sub(value) as i64) < 0 {
                true => Err(seen),
                false => Ok(()),
            }
        });
        // SAFETY: as above.
        unsafe { mem::store_u64(taken, value, Order::Relaxed, Scope::Device) };
        arrival
    }

    /// Updates signal `id` of `peer` on one lane, after the block has published its writes. The
    /// signal covers the network requests from number `after` on.
    #[inline(always)]
    fn update<M: Machine>(&self, s: &Session<M>, id: u32, peer: Rank, op: SignalOp, after: u64) {
        if self.has_signal(id)
            && self.has_block(s.block().index())
            && !self.window.update(s, id, peer.index(), op, after)
        {
            self.no_route(peer.index());
        }
    }

    /// Returns proof that a wait of the block has ended.
    #[inline(always)]
    fn received<M: Machine>(&self, s: &Session<M>) -> Result<Received<'a, T>, Aborted> {
        let elements = self.at(s.me()).direct(s)?.as_in();
        Ok(Received { elements })
    }

    #[inline(always)]
    fn has_signal(&self, id: u32) -> bool {
        if id >= self.window.signals {
            self.refuse(FailureKind::Id, id, self.window.signals);
        }
        id < self.window.signals
    }

    #[inline(always)]
    fn has_rank(&self, rank: u32) -> bool {
        if rank >= self.window.size {
            self.refuse(FailureKind::Rank, rank, self.window.size);
        }
        rank < self.window.size
    }

    #[inline(always)]
    fn is_alive<M: Machine>(&self, s: &Session<M>) -> bool {
        let is_alive = self.window.own(s.comm(), 0, 1).is_some();
        if !is_alive {
            self.no_route(s.rank());
        }
        is_alive
    }

    #[inline(always)]
    fn has_block(&self, block: u32) -> bool {
        if block >= self.window.blocks {
            self.refuse(FailureKind::Id, block, self.window.blocks);
        }
        block < self.window.blocks
    }

    #[inline(always)]
    fn refuse(&self, kind: FailureKind, observed: u32, expected: u32) {
        let (observed, expected) = (u64::from(observed), u64::from(expected));
        self.faults.record(kind, self.argument, observed, expected);
    }

    #[inline(always)]
    fn no_route(&self, rank: u32) {
        self.refuse(FailureKind::NoRoute, rank, self.window.size);
    }
}

/// Adds 1 to a counter. Releases the earlier writes of this lane, and those that it has acquired.
///
/// # Safety
/// `word` must be a counter, which is only accessed atomically.
#[inline(always)]
unsafe fn increment(word: *mut u64) {
    // SAFETY: the precondition of this function.
    unsafe { mem::fetch_add_u64(word, 1, Order::AcqRel, Scope::Device) };
}

/// This rank's part of a window, or [`Scratch`] memory: the source of puts and the target of gets,
/// because a network needs memory that it knows.
#[derive(Debug)]
pub struct Local<'a, T> {
    elements: InOut<'a, T>,
    window: u32,
    offset: u64,
}

impl<T> Clone for Local<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Local<'_, T> {}

impl<'a, T: Element> Local<'a, T> {
    /// Returns the number of elements.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns true if there are no elements.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns elements `first .. first + len`. A range that is not within these elements is
    /// recorded as an error, and the result is empty. Any lane by itself.
    #[inline(always)]
    #[must_use]
    pub fn slice(self, first: usize, len: usize) -> Self {
        Self {
            elements: self.elements.slice(first, len),
            offset: self
                .offset
                .wrapping_add(first.wrapping_mul(size_of::<T>()) as u64),
            ..self
        }
    }

    /// Returns the elements, which this rank may read and write.
    #[inline(always)]
    pub fn elements(&self) -> InOut<'a, T> {
        self.elements
    }

    /// Returns the address of the elements that peers and the network use.
    #[inline(always)]
    fn addr(&self) -> WindowAddr {
        WindowAddr::new(self.window, self.offset)
    }
}

/// Elements that peers have put into this rank's part of a window: proof that a wait has ended.
#[derive(Debug)]
pub struct Received<'a, T> {
    elements: In<'a, T>,
}

impl<'a, T: Element> Received<'a, T> {
    /// Returns the number of elements of the part.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns true if the part has no elements.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns element `index`, or zero if there is none, which is recorded as an error. Any lane
    /// by itself.
    #[inline(always)]
    pub fn get(&self, index: usize) -> T {
        self.elements.get(index)
    }

    /// Returns elements `first .. first + len`. A range that is not within the part is recorded as
    /// an error, and the result is empty. Any lane by itself.
    #[inline(always)]
    pub fn slice(&self, first: usize, len: usize) -> In<'a, T> {
        self.elements.slice(first, len)
    }
}
