//! One launch on a communicator: it begins, publishes and awaits signals, and ends.
//!
//! # The signal protocol
//! For every (block, source rank) a workspace has a *ready line* (seven words, then the signal) and
//! a *done line*. One **round** is: every rank writes its words and ready signal to every rank and
//! awaits all; data moves; every rank signals done to every rank and awaits all.
//!
//! - **Who may overwrite what:** a rank overwrites its ready line at a peer, and its own user
//!   memory or staging that the words of round r named, in round r + 1;
//! - **after having acquired** the peer's done signal of round r;
//! - **released by** the peer, after its last read of the words and of the memory they named, and
//!   after its last write into memory that they named.
//!
//! If the peer has only read, its done signal need not release anything on a GPU
//! ([`Session::done_after`]), because its reads are complete.
//!
//! The lane that acquires a ready signal copies the words of the line to shared memory, where all
//! lanes read them after the barrier that ends [`Session::ready`].
//!
//! A barrier is a round without words and without done: it leaves the words of the ready lines as
//! they are, which a slow peer may still have to read, and signals only grow.
//!
//! Every operation of this family receives from every rank in every round, so one line suffices
//! where there is a done signal, and no credit is needed.
//!
//! # Failures
//! `#[kernel]` begins and ends the session. A kernel returns `Ok(())` on all lanes of a block, or
//! an error on all lanes; the first failure is recorded, and stops every rank.
//!
//! - Functions of the session that all lanes call together return `Result<_, Aborted>`, with the
//!   same result on all lanes, so that `?` keeps the lanes of a block together.
//! - The outcome of a single lane is an [`Unvoted`] value, on which `?` does not compile.
//!   [`Session::vote`] converts it to a result of the block.
//! - [`Session::ensure`] and [`Session::fault`] record failures of the kernel's author. They reach
//!   the other ranks when the kernel returns the error.
//! - Errors that lanes record, such as an index out of range, are returned by the next function
//!   that votes: [`Session::vote`], `ensure`, `ready`, `done`, `barrier`, `grid_barrier`,
//!   `last_block`, the waits, barriers and flushes of [`crate::Window`], [`crate::Remote::read`],
//!   the wait for a get, all functions of [`crate::Queue`] that return a result, and the end of the
//!   kernel.

mod block_words;
mod grid;
mod last_block;
mod prologue;

use crate::arch;
use crate::call::Call;
use crate::comm::{self, Comm, Peers, Rank, Team, WindowAddr};
use crate::faults::Faults;
use crate::group::{Block, Group, Machine};
use crate::layout::{CommConst, FailureKind, LINE, SIGNAL_WORDS};
use crate::mem::{self, Order, Policy, Scope};
use crate::net::{Action, Request, Requests, Route};
use crate::shared_cache::{self, WORDS_OF};
use crate::wait::{BOUNDED, WaitContext, WaitKind};

use prologue::{Epochs, Prologue};

#[doc(hidden)]
pub use prologue::Approach;

/// Proof that the launch has failed. The end of the kernel records the failure, unless it has been
/// recorded. Only the library makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted(());

/// The outcome of one lane or warp: a value, or a failure. It may differ between the lanes of a
/// block, so it is not a `Result`: `?` on it does not compile, because a lane that returns from a
/// kernel alone hangs a GPU. [`Session::vote`] converts it to a result of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a failure of a lane must be voted on, with Session::vote"]
pub struct Unvoted<T>(Option<T>);

impl<T> Unvoted<T> {
    /// Wraps the value of this lane.
    #[inline(always)]
    pub const fn new(value: T) -> Self {
        Self(Some(value))
    }

    /// Wraps the result of a wait of this lane.
    #[inline(always)]
    pub(crate) fn from_wait(value: Option<T>) -> Self {
        Self(value)
    }

    /// Returns the value of this lane, or `None` after a failure.
    #[inline(always)]
    pub fn ok(self) -> Option<T> {
        self.0
    }

    /// Returns true after a failure.
    #[inline(always)]
    pub const fn is_failed(&self) -> bool {
        self.0.is_none()
    }

    /// Returns `next`, or a failure if this or the next value is one.
    #[inline(always)]
    pub fn and<U>(self, next: Unvoted<U>) -> Unvoted<U> {
        Unvoted(self.0.and(next.0))
    }

    /// Applies `change` to the value.
    #[inline(always)]
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Unvoted<U> {
        Unvoted(self.0.map(change))
    }
}

/// A launch in flight on one block.
#[derive(Debug)]
pub struct Session<M> {
    block: Block<M>,
    comm: Comm,
    ctx: WaitContext,
    /// Rounds and packet epoch when the session began, for blocks of one lane. Other blocks have
    /// them in shared memory.
    begun: (u64, u64),
    /// Rounds of this launch. Not of the width of `steps`, so that the compiler does not pair them
    /// in a vector register.
    rounds: u64,
    /// True between `ready` and `done`.
    open: bool,
    /// True after a round or barrier that failed. No round can follow, because peers may still read
    /// the words of the last one, and a launch of a `#[kernel]` with a session then fails.
    failed: bool,
    /// Increase of the packet epoch during this launch.
    packets: u64,
    steps: u32,
    /// True if the kernel has windows. Known at compile time.
    has_windows: bool,
    /// True if all blocks of the launch run at the same time. Known at compile time.
    is_grid: bool,
    /// True if the rounds access memory by multicast addresses. Known at compile time.
    has_multicast: bool,
    /// Calls of [`Session::last_block`].
    last_blocks: u32,
}

impl<M: Machine> Session<M> {
    /// Begins to enter the communicator: requests the words that [`Session::begin_from`] needs, so
    /// that they are in flight while the kernel computes. All lanes of the block together.
    ///
    /// # Safety
    /// As [`Session::begin`].
    #[inline(always)]
    #[doc(hidden)]
    pub unsafe fn approach(block: Block<M>, constants: *const CommConst) -> Approach {
        // SAFETY: the precondition of this function.
        let comm = unsafe { Comm::new(constants) };
        Prologue::new::<M>(constants, &comm, block.index()).approach(block)
    }

    /// Enters the communicator: `None` if it has failed before, or if another launch of it is in
    /// flight (then a failure is recorded). All lanes of the block together.
    ///
    /// # Safety
    /// `constants` must describe a live communicator of which this launch is the next operation,
    /// and be the address that its host returns (`Communicator::constants`), not that of a copy. A
    /// block has one session at a time, which ends by [`Session::end`].
    #[inline(always)]
    pub unsafe fn begin(
        block: Block<M>,
        constants: *const CommConst,
        call: u64,
        count: u64,
        timeout_ns: u64,
    ) -> Option<Self> {
        // SAFETY: the precondition of this function.
        unsafe {
            let approach = Self::approach(block, constants);
            Self::begin_from(approach, block, constants, call, count, timeout_ns)
        }
    }

    /// Does what [`Session::begin`] does, after [`Session::approach`]. All lanes of the block
    /// together.
    ///
    /// # Safety
    /// As [`Session::begin`]; `approach` must be that of this launch, block and communicator.
    #[inline(always)]
    #[doc(hidden)]
    pub unsafe fn begin_from(
        approach: Approach,
        block: Block<M>,
        constants: *const CommConst,
        call: u64,
        count: u64,
        timeout_ns: u64,
    ) -> Option<Self> {
        // SAFETY: the precondition of this function.
        let comm = unsafe { Comm::new(constants) };
        let call = Call(call);
        let collective = u64::from(call.is_collective());
        let ctx = WaitContext {
            comm,
            call,
            count,
            sequence: 0,
            block: block.index(),
            timeout_ns,
        };
        let prologue = Prologue::new::<M>(constants, &comm, block.index());
        // SAFETY: the precondition of this function; `comm` and `prologue` are of `constants`.
        let (ctx, epochs) = unsafe { prologue.pass(block, constants, ctx, collective, approach) }?;
        let comm = ctx.comm;
        if M::LANES == 1 {
            Faults::new(block).clear();
        }
        if block.is_leader() {
            ctx.enter();
        }
        if block.index() == 0 && collective != 0 {
            Prologue::count_absent(block, &comm);
        }
        Some(Self {
            block,
            comm,
            ctx,
            begun: (epochs.rounds, epochs.packet_epoch),
            rounds: 0,
            open: false,
            failed: false,
            packets: 0,
            steps: 0,
            has_windows: false,
            is_grid: false,
            has_multicast: false,
            last_blocks: 0,
        })
    }

    /// Declares that the kernel has windows, whose signals do not carry the call. Called by
    /// `#[kernel]`.
    #[inline(always)]
    #[doc(hidden)]
    pub fn declare_windows(&mut self) {
        self.has_windows = true;
        if self.block.is_leader() {
            self.ctx.note_call();
        }
    }

    /// Declares that all blocks of the launch run at the same time. Called by `#[kernel]`.
    #[inline(always)]
    #[doc(hidden)]
    pub fn declare_grid(&mut self) {
        self.is_grid = true;
    }

    /// Declares that the rounds of the launch access memory by multicast addresses. The lanes that
    /// acquire or release signals then execute an alias fence. A fence on the path of causality
    /// suffices, so the other lanes need none ([`crate::multimem`]).
    #[inline(always)]
    #[doc(hidden)]
    pub fn declare_multicast(&mut self) {
        self.has_multicast = true;
    }

    /// Returns the communicator.
    #[inline(always)]
    pub fn comm(&self) -> &Comm {
        &self.comm
    }

    /// Returns the block.
    #[inline(always)]
    pub fn block(&self) -> Block<M> {
        self.block
    }

    /// Returns this rank.
    #[inline(always)]
    pub fn rank(&self) -> u32 {
        self.comm.rank()
    }

    /// Returns the number of ranks.
    #[inline(always)]
    pub fn ranks(&self) -> u32 {
        self.comm.size()
    }

    /// Returns this rank, as functions of windows take it.
    #[inline(always)]
    pub fn me(&self) -> Rank {
        Rank::new(self.rank())
    }

    /// Returns the rank with number `rank`, or `None` if it does not exist.
    #[inline(always)]
    pub fn peer(&self, rank: u32) -> Option<Rank> {
        (rank < self.ranks()).then(|| Rank::new(rank))
    }

    /// Returns the ranks of a team: the one after this rank first, this rank last.
    #[inline(always)]
    pub fn peers(&self, team: Team) -> Peers {
        Peers::new(&self.comm, team, 1, 1)
    }

    /// Returns the part of the ranks of a team that this lane of the block works on.
    #[inline(always)]
    pub(crate) fn peers_of_lane(&self, team: Team) -> Peers {
        let (lane, lanes) = (self.block.rank(), self.block.size());
        Peers::new(&self.comm, team, 1 + lane, lanes)
    }

    /// Returns every `stride`-th rank, from the one `start` positions after this one on.
    #[inline(always)]
    pub(crate) fn peers_of(&self, start: u32, stride: u32) -> Peers {
        Peers::new(&self.comm, Team::World, start, stride)
    }

    /// Appends a network request on one lane, and returns its number. A failure is recorded.
    #[inline(always)]
    pub(crate) fn request(&self, ring: &Requests, request: Request) -> u64 {
        match ring.append(&self.ctx, request) {
            Some(number) => number,
            None => {
                self.faults().record(FailureKind::Abort, 0, 0, 0);
                0
            }
        }
    }

    /// Returns the address of `bytes` bytes that `rank` named as `addr`, or records the failure. If
    /// the rank is not reachable by load and store, requests a copy to byte `staging` of this
    /// rank's workspace, which has arrived once [`Session::fetched`] has returned true. One lane.
    #[inline(always)]
    pub fn fetch(
        &self,
        addr: WindowAddr,
        rank: u32,
        bytes: u64,
        staging: u64,
    ) -> Option<*const u8> {
        let Some(ring) = self.network_to(rank) else {
            return self
                .ctx
                .resolve(addr, rank, bytes)
                .map(<*mut u8>::cast_const);
        };
        let local = WindowAddr::new(0, staging);
        let here = self.ctx.resolve(local, self.rank(), bytes)?;
        if let Route::None = Route::to(&self.comm, addr, rank, bytes) {
            self.ctx.fail(
                FailureKind::Bounds,
                WaitKind::Ready,
                rank,
                rank,
                bytes,
                addr.0,
                0,
            );
            return None;
        }
        let request = Request {
            action: Action::Get,
            block: self.block.index(),
            peer: rank,
            remote: addr,
            local,
            value: [0; 2],
            bytes,
            after: 0,
        };
        self.request(&ring, request);
        Some(here.cast_const())
    }

    /// Does what [`Session::fetch`] does, and waits for the bytes. The next call with the same
    /// `staging` may overwrite them. All lanes together.
    #[inline(always)]
    #[track_caller]
    pub fn pull(&self, addr: WindowAddr, rank: u32, bytes: u64, staging: u64) -> Option<*const u8> {
        if self.comm.reaches(rank) {
            return self.fetch(addr, rank, bytes, staging);
        }
        // Other lanes may still read the bytes of the previous call.
        self.block.sync();
        let mut failed = false;
        if self.block.is_leader() {
            failed = self.fetch(addr, rank, bytes, staging).is_none();
        }
        if self.block.any(failed) || !self.fetched() {
            return None;
        }
        Some(self.comm.own(staging).cast_const())
    }

    /// Waits until all bytes that lanes of the block have requested by [`Session::fetch`] have
    /// arrived. Returns false on all lanes after a failure. All lanes together.
    #[inline(always)]
    #[track_caller]
    pub fn fetched(&self) -> bool {
        !self.comm.is_split() || self.vote(self.flush()).is_ok()
    }

    /// Waits until the network requests of all lanes of the block have been executed, so that the
    /// sources of puts may be reused. All lanes together; the leader waits.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn flush(&self) -> Unvoted<()> {
        let Some(ring) = Requests::of(&self.comm) else {
            return Unvoted::new(());
        };
        // After the barrier, every lane has reserved its requests.
        self.block.sync();
        match self.block.is_leader() {
            true => self.finish_requests(&ring, || ring.reserved()),
            false => Unvoted::new(()),
        }
    }

    /// Waits on one lane until as many network requests have been executed as `count` returns.
    #[inline(always)]
    pub(crate) fn finish_requests(
        &self,
        ring: &Requests,
        count: impl FnOnce() -> u64,
    ) -> Unvoted<()> {
        Unvoted::from_wait(ring.finish(&self.ctx, count()))
    }

    /// Returns the call.
    #[inline(always)]
    pub fn call(&self) -> Call {
        self.ctx.call
    }

    /// Returns the number of elements that the host gave for messages.
    #[inline(always)]
    pub fn count(&self) -> u64 {
        self.ctx.count
    }

    /// Returns the number of this launch among the collective launches of the communicator, from 1
    /// on. It is equal in all blocks and on all ranks, and increases with each launch and replay,
    /// including those of other kernels. Its parity can therefore be equal in two successive
    /// launches of one kernel.
    #[inline(always)]
    pub fn epoch(&self) -> u64 {
        self.ctx.sequence()
    }

    /// Converts the outcome of each lane to a result of the block: an error on all lanes if a lane
    /// has failed, otherwise each lane's own value. All lanes together.
    ///
    /// # Errors
    /// [`Aborted`] if a lane has failed, or has recorded an error during this launch.
    #[inline(always)]
    #[track_caller]
    pub fn vote<T>(&self, outcome: Unvoted<T>) -> Result<T, Aborted> {
        let failed = self.any_failed(outcome.is_failed());
        self.block.acquired(Scope::System);
        if failed {
            return Err(Aborted(()));
        }
        // SAFETY: no lane has failed, so this one has not. A check would make the result depend on
        // this lane's own value, and the verifier could not see that it is uniform.
        Ok(unsafe { outcome.0.unwrap_unchecked() })
    }

    /// Fails the launch unless `ok` holds on all lanes. `code` chooses a text from the kernel's
    /// `failures`, in which `{a}` and `{b}` are the values of a lane on which `ok` is false. All
    /// lanes together.
    ///
    /// # Errors
    /// [`Aborted`] if `ok` is false on a lane, or if a lane has recorded an error during this
    /// launch.
    #[inline(always)]
    #[track_caller]
    pub fn ensure(&self, ok: bool, code: u32, a: u64, b: u64) -> Result<(), Aborted> {
        if !ok {
            self.fault(code, a, b);
        }
        self.vote(Unvoted::new(()))
    }

    /// Returns the result of a part of the kernel that has recorded its failures by itself. `ok` is
    /// equal on all lanes. All lanes together.
    ///
    /// # Errors
    /// [`Aborted`] if `ok` is false.
    #[inline(always)]
    pub fn settle(&self, ok: bool) -> Result<(), Aborted> {
        if ok { Ok(()) } else { Err(Aborted(())) }
    }

    /// Makes a failure of this lane that of the launch, at the end of the kernel, which votes. Any
    /// lane by itself. Until then, the block goes on as if the lane had not failed.
    #[inline(always)]
    #[doc(hidden)]
    pub fn fail_at_end(&mut self, outcome: Unvoted<()>) {
        self.failed |= outcome.is_failed();
    }

    /// Records a failure of the kernel's author on this lane, as [`Session::ensure`] does. The next
    /// vote of the block returns the error on all lanes. Any lane by itself.
    #[inline(always)]
    pub fn fault(&self, code: u32, a: u64, b: u64) {
        self.faults().record(FailureKind::User, code, a, b);
    }

    /// Fails the launch because of an argument that is equal on all lanes. All lanes together.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn refuse(
        &self,
        kind: FailureKind,
        code: u32,
        observed: u64,
        expected: u64,
    ) -> Aborted {
        if self.block.is_leader() {
            self.faults().record(kind, code, observed, expected);
        }
        // This barrier joins the paths of the leader and the other lanes. Without it, the compiler
        // may join them only where the kernel continues or returns, and the verifier could not see
        // that all lanes do the same.
        self.block.sync();
        Aborted(())
    }

    /// Returns the errors that lanes of this block record.
    #[inline(always)]
    pub(crate) fn faults(&self) -> Faults {
        Faults::new(self.block)
    }

    /// Returns true on all lanes if `failed` is true on one, or a lane has recorded an error. All
    /// lanes together.
    #[inline(always)]
    #[track_caller]
    fn any_failed(&self, failed: bool) -> bool {
        self.block.any(failed || self.faults().is_pending())
    }

    /// Returns the bounds of this launch's waits.
    #[inline(always)]
    pub fn ctx(&self) -> &WaitContext {
        &self.ctx
    }

    /// Returns the fingerprint of this launch's call.
    #[inline(always)]
    pub fn fingerprint(&self) -> u64 {
        if BOUNDED {
            self.ctx.call.fingerprint()
        } else {
            0
        }
    }

    /// Waits until, on every rank, the block with this index has entered the barrier as often as
    /// this one. All writes of these blocks before the barrier are visible to them after it. All
    /// lanes together.
    ///
    /// # Errors
    /// [`Aborted`] if a rank does not enter before the timeout, if the ranks made different calls,
    /// if a lane has recorded an error, or if an earlier round or barrier of the launch failed.
    #[inline(always)]
    #[track_caller]
    pub fn barrier(&mut self) -> Result<(), Aborted> {
        let value = self.next_round()?;
        let mut peer = self.block.rank();
        while peer < self.comm.size() {
            self.post(peer, 8 * SIGNAL_WORDS as u64, value, Order::Release);
            peer += self.block.size();
        }
        self.await_all::<false>(WaitKind::Ready, value, 8 * SIGNAL_WORDS)
    }

    /// Publishes what the block has written, and returns the signal of the next round.
    #[inline(always)]
    #[track_caller]
    fn next_round(&mut self) -> Result<u64, Aborted> {
        if self.failed {
            return Err(Aborted(()));
        }
        self.rounds += 1;
        self.publish();
        Ok(self.round() << 16 | self.fingerprint())
    }

    /// Opens a round: publishes everything that this block has written so far, sends `words(peer)`
    /// to each peer and awaits every peer's words. All lanes together.
    ///
    /// Closes a round that is still open first. The end of the kernel closes the last round.
    ///
    /// # Errors
    /// [`Aborted`] in the same cases as [`Session::barrier`].
    #[inline(always)]
    #[track_caller]
    pub fn ready(&mut self, words: impl Fn(u32) -> [u64; SIGNAL_WORDS]) -> Result<(), Aborted> {
        if self.open {
            // The peers may still read the words of the last round.
            self.done()?;
        }
        let value = self.next_round()?;
        self.open = true;
        let mut peer = self.block.rank();
        while peer < self.comm.size() {
            let words = words(peer);
            match self.network_to(peer) {
                Some(ring) => self.send_words(&ring, peer, words),
                None => {
                    let line = self.line(peer, self.comm.rank(), 0);
                    // SAFETY: the line at `peer` is this rank's to write: every done signal of the
                    // last round that carried words has been acquired.
                    unsafe { write_words(line, words) };
                }
            }
            if peer == self.rank() {
                self.keep_words(peer, words);
            }
            self.post(peer, 8 * SIGNAL_WORDS as u64, value, Order::Release);
            peer += self.block.size();
        }
        self.await_all::<true>(WaitKind::Ready, value, 8 * SIGNAL_WORDS)
    }

    /// Keeps the words of `rank` for [`Session::word`]. One lane, before the barrier of `ready`.
    #[inline(always)]
    fn keep_words(&self, rank: u32, words: [u64; SIGNAL_WORDS]) {
        if M::LANES == 1 || rank >= WORDS_OF {
            return;
        }
        let cache = shared_cache::at(self.block.shared());
        // SAFETY: `rank` is below the number of entries. All lanes have passed a barrier since they
        // read the words of the last round, and read these after the next one.
        unsafe {
            let words_of = (&raw mut (*cache).words).cast::<[u64; SIGNAL_WORDS]>();
            words_of.add(rank as usize).write(words);
        }
    }

    /// Loads word `index` of `rank` from its ready line of this rank's workspace.
    ///
    /// # Safety
    /// The lane must have acquired the ready signal of the round, and `index` must be a word.
    #[inline(always)]
    unsafe fn load_word(&self, rank: u32, index: usize) -> u64 {
        let line = self.line(self.comm.rank(), rank, 0);
        // SAFETY: the word is in a line of this rank's workspace, which the peer overwrites only
        // after this rank's done signal.
        unsafe { mem::load_u64(line.cast::<u64>().add(index), Order::Relaxed, Scope::System) }
    }

    /// Ends the rounds of the launch after a failure. Kernels whose own code fails in a round call
    /// this. The compiler then sees that no round is open at their end, and leaves out the code
    /// that would close it.
    #[inline(always)]
    #[doc(hidden)]
    pub fn abandon(&mut self) {
        self.open = false;
        self.failed = true;
    }

    /// Returns word `index` of what `peer` sent with its ready signal of this round; 0 for a rank
    /// or a word that does not exist. Outside of a round the value is unspecified.
    #[inline(always)]
    pub fn word(&self, peer: u32, index: usize) -> u64 {
        if index >= SIGNAL_WORDS || peer >= self.comm.size() {
            return 0;
        }
        if M::LANES == 1 || peer >= WORDS_OF {
            // SAFETY: `ready` has acquired the signal, and `index` is a word.
            return unsafe { self.load_word(peer, index) };
        }
        let cache = shared_cache::at(self.block.shared());
        // SAFETY: both indices are within the array, and `ready` ended with a barrier after the
        // lanes had written it.
        unsafe {
            let words_of = (&raw const (*cache).words).cast::<[u64; SIGNAL_WORDS]>();
            words_of.add(peer as usize).cast::<u64>().add(index).read()
        }
    }

    /// Closes a round: publishes this block's writes, signals every peer that this block no longer
    /// accesses its memory, and waits for the signals of all peers. If no round is open, calls
    /// [`Session::barrier`]. All lanes together.
    ///
    /// # Errors
    /// [`Aborted`] in the same cases as [`Session::barrier`].
    #[inline(always)]
    #[track_caller]
    pub fn done(&mut self) -> Result<(), Aborted> {
        self.close_round(Order::Release)
    }

    /// Does what [`Session::done`] does. If `has_written` is false, the signal only says that the
    /// block has read what it needs. On a GPU it is then relaxed: a lane has used every value that
    /// it has loaded before it arrives at the block's barrier, so these loads are complete. A fence
    /// would cost a microsecond.
    ///
    /// # Errors
    /// [`Aborted`] in the same cases as [`Session::barrier`].
    ///
    /// # Safety
    /// If `has_written` is false, the block must not have written memory that a peer reads after
    /// this signal, since the round was opened.
    #[inline(always)]
    #[track_caller]
    #[doc(hidden)]
    pub unsafe fn done_after(&mut self, has_written: bool) -> Result<(), Aborted> {
        self.close_round(match has_written {
            true => Order::Release,
            false => mem::AFTER_READS,
        })
    }

    #[inline(always)]
    #[track_caller]
    fn close_round(&mut self, order: Order) -> Result<(), Aborted> {
        if !self.open {
            return self.barrier();
        }
        self.open = false;
        self.publish();
        let value = self.round() << 16 | self.fingerprint();
        let mut peer = self.block.rank();
        if self.has_multicast && peer < self.comm.size() {
            arch::alias_fence();
        }
        while peer < self.comm.size() {
            if peer != self.comm.rank() {
                self.post(peer, LINE, value, order);
            }
            peer += self.block.size();
        }
        self.await_all::<false>(WaitKind::Done, value, LINE as usize)
    }

    /// Ends the launch with the kernel's result. All lanes together. Called by `#[kernel]`.
    ///
    /// # Safety
    /// Must be the last call of the session.
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    #[inline(always)]
    #[track_caller]
    #[doc(hidden)]
    pub unsafe fn finish(&mut self, outcome: Result<(), Aborted>) -> Result<(), Aborted> {
        self.close(outcome)
    }

    /// Ends the launch with the kernel's result. All lanes together. Called by `#[kernel]`. By
    /// value: otherwise the compiler does not see that a kernel has closed its last round, and adds
    /// another copy of [`Session::done`].
    ///
    /// # Safety
    /// None, because it takes the session. Unsafe because it is on a CPU.
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    #[inline(always)]
    #[doc(hidden)]
    pub unsafe fn finish(mut self, outcome: Result<(), Aborted>) -> Result<(), Aborted> {
        self.close(outcome)
    }

    #[inline(always)]
    #[track_caller]
    fn close(&mut self, outcome: Result<(), Aborted>) -> Result<(), Aborted> {
        let mut closed = match outcome {
            Ok(()) if self.open => self.done(),
            Ok(()) if self.failed => Err(Aborted(())),
            other => other,
        };
        if comm::HAS_NETWORK && closed.is_ok() && self.flush().is_failed() {
            closed = Err(Aborted(()));
        }
        // All lanes converge here, including those that return an error: otherwise a lane that the
        // kernel's last branch has split from its warp would enter the barrier alone. After the
        // barrier the epochs may advance.
        if self.any_failed(closed.is_err()) {
            self.report();
            // The record precedes all later code of the other lanes, such as the author's handling
            // of failures.
            self.block.sync();
            return Err(Aborted(()));
        }
        self.leave();
        Ok(())
    }

    /// Makes the lanes' error the failure of the launch. Without one, and if no rank has failed,
    /// records that the kernel stopped. There is one copy of this in a kernel, at its end.
    #[inline(always)]
    fn report(&self) {
        if self.block.is_leader() {
            self.ctx.report(self.faults());
        }
    }

    /// Ends the session with the kernel's result: advances the block's epochs, or records the
    /// failure. The last call of a kernel that has begun its session itself. All lanes
    /// together.
    #[inline(always)]
    pub fn end(self, outcome: Result<(), Aborted>) {
        self.block.sync();
        match outcome {
            Ok(()) => self.leave(),
            Err(_) => self.report(),
        }
    }

    /// Advances the block's epochs. After a barrier of the block.
    #[inline(always)]
    fn leave(&self) {
        if self.block.is_leader() {
            let state = Prologue::state(self.block, &self.comm);
            let epochs = Epochs {
                sequence: self.ctx.sequence(),
                rounds: self.round(),
                packet_epoch: self.current_packet_epoch(),
            };
            // SAFETY: the state belongs to this block, and by the busy word this is its only
            // launch.
            unsafe {
                let store = |at, value| mem::store_u64(at, value, Order::Relaxed, Scope::Device);
                if self.ctx.call.is_collective() {
                    store(&raw mut (*state).sequence, epochs.sequence);
                }
                store(&raw mut (*state).rounds, epochs.rounds);
                store(&raw mut (*state).packet_epoch, epochs.packet_epoch);
                if BOUNDED {
                    let busy = &raw mut (*state).busy;
                    mem::store_u64(busy, epochs.idle(), mem::AT_END, Scope::Device);
                }
            }
        }
    }

    /// Begins the next packet epoch and returns it. See [`crate::packet`].
    #[inline(always)]
    pub(crate) fn next_packet_epoch(&mut self) -> u64 {
        let before = self.current_packet_epoch();
        let mut epoch = before + 1;
        if epoch & 0xffff_ffff == 0 {
            // A packet's flag is the epoch's low half and never 0; two are skipped, so that the
            // parity still alternates.
            epoch += 2;
        }
        self.packets += epoch - before;
        epoch
    }

    #[inline(always)]
    fn current_packet_epoch(&self) -> u64 {
        Prologue::begun(self.block, self.begun).1 + self.packets
    }

    /// Returns the number of the block's signal rounds, including those of this launch.
    #[inline(always)]
    fn round(&self) -> u64 {
        Prologue::begun(self.block, self.begun).0 + self.rounds
    }

    /// Records one more published step.
    #[inline(always)]
    pub(crate) fn advance(&mut self) {
        self.steps += 1;
        if self.block.is_leader() {
            self.ctx.step(u64::from(self.steps));
        }
    }

    /// Runs a barrier of the block; what its lanes wrote is covered by the next release of one of
    /// them.
    #[inline(always)]
    #[track_caller]
    pub fn publish(&mut self) {
        self.block.publish();
        self.advance();
    }

    /// Returns the address of byte `which` of the line that `from` writes in the workspace of `at`.
    #[inline(always)]
    fn line(&self, at: u32, from: u32, which: u64) -> *mut u8 {
        let offset = self.comm.inbox(self.block.index(), from) + which;
        self.comm.workspace_of(at).wrapping_add(offset as usize)
    }

    /// Stores a signal in this block's line at `peer`, `offset` bytes from its start. One lane,
    /// after the block has published its writes, which the signal covers if `order` is
    /// [`Order::Release`].
    #[inline(always)]
    fn post(&self, peer: u32, offset: u64, value: u64, order: Order) {
        if self.is_mute() {
            return;
        }
        match self.network_to(peer) {
            Some(ring) => self.send(&ring, Action::Signal, peer, offset, [value, 0], 8),
            None => {
                let line = self.line(peer, self.comm.rank(), offset);
                // SAFETY: only this block of this rank writes this word, and it only grows.
                unsafe { mem::store_u64(line.cast(), value, order, Scope::System) };
            }
        }
    }

    /// Returns true if this rank must not signal, because it has recorded an error and the peers
    /// must not trust what it has written to their windows. A GPU signals all the same, which keeps
    /// its code short: there, peers learn of the error when the kernel ends.
    #[inline(always)]
    fn is_mute(&self) -> bool {
        comm::HAS_NETWORK && self.has_windows && self.faults().is_pending()
    }

    /// Returns the ring of requests if `peer` is not reachable by load and store.
    #[inline(always)]
    pub(crate) fn network_to(&self, peer: u32) -> Option<Requests> {
        if self.comm.reaches(peer) {
            return None;
        }
        Requests::of(&self.comm)
    }

    /// Sends the words of a round by requests.
    #[inline(always)]
    fn send_words(&self, ring: &Requests, peer: u32, words: [u64; SIGNAL_WORDS]) {
        let [a, b, c, d, e, f, g] = words;
        let mut at = 0;
        for pair in [[a, b], [c, d], [e, f], [g, 0]] {
            let bytes = (8 * SIGNAL_WORDS as u64 - at).min(16);
            self.send(ring, Action::Store, peer, at, pair, bytes);
            at += bytes;
        }
    }

    /// Sends up to 16 bytes to this block's line at `peer`.
    #[inline(always)]
    fn send(
        &self,
        ring: &Requests,
        action: Action,
        peer: u32,
        offset: u64,
        value: [u64; 2],
        bytes: u64,
    ) {
        let line = self.comm.inbox(self.block.index(), self.rank());
        let request = Request {
            action,
            block: self.block.index(),
            peer,
            remote: WindowAddr::new(0, line + offset),
            local: WindowAddr::NONE,
            value,
            bytes,
            after: 0,
        };
        self.request(ring, request);
    }

    #[inline(always)]
    #[track_caller]
    fn await_all<const WORDS: bool>(
        &mut self,
        wait: WaitKind,
        value: u64,
        offset: usize,
    ) -> Result<(), Aborted> {
        // After an error this rank has not signalled, so the peers might not, either.
        let mut failed = self.is_mute();
        let mut peer = self.block.rank();
        while peer < self.comm.size() && !failed {
            if peer != self.comm.rank() {
                let at = self
                    .line(self.comm.rank(), peer, 0)
                    .wrapping_add(offset)
                    .cast::<u64>();
                let arrived = self.ctx.until(wait, peer, value, || {
                    // SAFETY: a signal word of this rank's own workspace.
                    let seen = unsafe { mem::load_u64(at, Order::Acquire, Scope::System) };
                    // The peer may be a round ahead (barriers); a different call of the same
                    // round is reported by the stalled wait.
                    if seen == value || seen >> 16 > value >> 16 {
                        Ok(())
                    } else {
                        Err(seen)
                    }
                });
                if arrived.is_none() {
                    failed = true;
                    break;
                }
                if WORDS && M::LANES != 1 && peer < WORDS_OF {
                    let line = self.line(self.comm.rank(), peer, 0);
                    // SAFETY: this lane has acquired the signal, and the peer overwrites the words
                    // only after this rank's done signal.
                    self.keep_words(peer, unsafe { read_words(line) });
                }
                if WORDS && self.has_multicast {
                    arch::alias_fence();
                }
            }
            peer += self.block.size();
        }
        let failed = self.any_failed(failed);
        self.block.acquired(Scope::System);
        if failed {
            self.abandon();
            return Err(Aborted(()));
        }
        Ok(())
    }
}

/// Writes the words of a line, 16 bytes at a time: the fence of the signal waits until all writes
/// have reached the peer.
///
/// # Safety
/// As [`mem::write`], for the first [`SIGNAL_WORDS`] words at `line`, which must be aligned to
/// [`LINE`].
#[inline(always)]
unsafe fn write_words(line: *mut u8, words: [u64; SIGNAL_WORDS]) {
    let [a, b, c, d, e, f, g] = words;
    // SAFETY: the precondition of this function.
    unsafe {
        mem::write_16(line, [a, b], Policy::Cached);
        mem::write_16(line.add(16), [c, d], Policy::Cached);
        mem::write_16(line.add(32), [e, f], Policy::Cached);
        mem::write(line.add(48).cast::<u64>(), g);
    }
}

/// Reads the words of a line, all at once.
///
/// # Safety
/// As [`mem::read`], for the first [`SIGNAL_WORDS`] words at `line`, which must be aligned to
/// [`LINE`].
#[inline(always)]
unsafe fn read_words(line: *const u8) -> [u64; SIGNAL_WORDS] {
    // SAFETY: the precondition of this function.
    let ([a, b], [c, d], [e, f], g) = unsafe {
        (
            mem::read_16(line, Policy::Cached),
            mem::read_16(line.add(16), Policy::Cached),
            mem::read_16(line.add(32), Policy::Cached),
            mem::read(line.add(48).cast::<u64>()),
        )
    };
    [a, b, c, d, e, f, g]
}
