//! Bounded, abortable waits and the failure record.
//!
//! A wait polls. If it does not end soon, it yields the core, checks the abort word, compares
//! progress with the peers after 50 microseconds (so that different operations are reported at
//! once, not at the timeout), and fails at the timeout. The first failure on a rank claims that
//! rank's [`FailureRecord`] and writes the abort word of every rank of the team; on a GPU, this
//! happens at the end of the kernel. Hosts write the abort words of other teams, and keep a
//! [`Mirror`] of each rank outside of the team.

#[cfg(test)]
mod tests;
mod yielding;

use core::mem::offset_of;

use crate::arch;
use crate::call::Call;
use crate::comm::{Comm, WindowAddr};
use crate::faults::Faults;
use crate::layout::{
    ABORT, BLOCKS_AT, BlockState, CommState, FailureKind, FailureRecord, LINE, Mirror, Progress,
};
use crate::mem::{self, Order, Scope};
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
use crate::net::Requests;
use crate::shared_cache::Fault;

pub use crate::context::WaitContext;

/// Event that a wait awaits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum WaitKind {
    /// A peer's entry into the operation.
    Ready = 1,
    /// A peer's exit from a round of the operation.
    Done = 2,
    /// A peer's packet.
    Packet = 3,
    /// A free slot of the channel to a peer.
    Credit = 4,
    /// A filled slot of the channel from a peer.
    Slot = 5,
    /// A user signal.
    Signal = 6,
    /// The launch itself, before any wait.
    Launch = 7,
    /// The arrival counter of a tile, which a producer of this rank raises. The expected value is
    /// the tile in the upper 32 bits, and the awaited count in the lower ones.
    Tile = 8,
    /// Room in the ring of network requests, or their completion, by this rank's host.
    Network = 9,
    /// Room in the ring of a queue at a peer.
    Room = 10,
    /// A batch of a queue from a peer.
    Rows = 11,
    /// Another block of the launch, in a barrier of all blocks. The expected value is the index of
    /// the block in the upper 32 bits, and its number of barriers in the lower ones.
    Grid = 12,
    /// User signals of several ranks, which add up to a value. The awaited rank is the one that has
    /// contributed least.
    Sum = 13,
    /// A counter of a window, which blocks of this rank raise.
    Counter = 14,
    /// A word from another block of the launch. The expected value is the index of the block in the
    /// upper 32 bits, and the index of the word in the lower ones.
    BlockWord = 15,
}

/// Outcome of a wait for a rank that may be absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The event has happened.
    Arrived,
    /// It has not happened in time.
    Late,
    /// The rank's process has ended.
    Dead,
    /// The launch has failed.
    Failed,
}

/// Consequence of an awaited rank that is late, or whose process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Absence {
    /// The launch fails.
    Fails,
    /// The wait ends after the timeout.
    AfterTimeout,
    /// The wait ends after two polls.
    AtOnce,
}

/// The end of a wait.
enum Ended<T> {
    Value(T),
    Late,
    Dead,
    Failed,
}

impl<T> Ended<T> {
    #[inline(always)]
    fn value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            _ => None,
        }
    }
}

/// False only if kernels are compiled with `--cfg fusewire_unbounded`, to measure the cost of
/// bounded waits. Then nothing is recorded, compared or refused, and a rank whose peer is gone
/// waits forever.
pub(crate) const BOUNDED: bool = !cfg!(fusewire_unbounded);

/// Number of polls between two calls of the network's agent, until the wait sleeps.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
const POLLS_PER_DRIVE: u32 = 8;

/// Time after which a stalled wait compares its progress with that of its peers.
const COMPARE_NS: u64 = 50_000;

/// Kind of a fault that is the consequence of another one: of another rank or lane.
const ALREADY_FAILED: u32 = 0;

/// Maximum number of naps while another lane records a failure: about 40 ms on a GPU.
const MOST_NAPS: u32 = 20_000;

/// The state of one wait that does not end quickly: two words, which a GPU passes in registers.
#[derive(Clone, Copy, Debug)]
struct Stall {
    /// Time of the first nap; 0 before it. After a failure, the duration of the wait.
    started: u64,
    /// From the lowest bit: true if a rank without which the wait cannot end was found dead before
    /// the last poll, which has seen all that the rank ever did; the number of naps in 31 bits; the
    /// time of the last comparison after the start, in 31 bits of units of 1024 ns; 0. After a
    /// failure: the rank to blame in 32 bits; the [`FailureKind`], or [`ALREADY_FAILED`], in 31
    /// bits; 1.
    rest: u64,
}

impl Stall {
    const NEW: Self = Self {
        started: 0,
        rest: 0,
    };

    const fn failed(kind: u32, blamed: u32, elapsed: u64) -> Self {
        Self {
            started: elapsed,
            rest: 1 << 63 | (kind as u64) << 32 | blamed as u64,
        }
    }

    #[inline(always)]
    const fn has_failed(self) -> bool {
        self.rest >> 63 == 1
    }

    /// Returns the [`FailureKind`], or [`ALREADY_FAILED`], after a failure.
    #[inline(always)]
    const fn kind(self) -> u32 {
        (self.rest >> 32) as u32 & 0x7fff_ffff
    }

    #[inline(always)]
    const fn naps(self) -> u32 {
        self.rest as u32 >> 1
    }

    #[inline(always)]
    const fn found_dead(self) -> bool {
        self.rest & 1 == 1
    }

    /// Returns true if more than [`COMPARE_NS`] have passed since the last comparison.
    const fn must_compare(self, elapsed: u64) -> bool {
        let since = (elapsed >> 10).wrapping_sub(self.rest >> 32) & 0x7fff_ffff;
        since > COMPARE_NS >> 10
    }

    /// Returns the state after another nap. `compared` is the time of a comparison in it.
    const fn next(self, found_dead: bool, compared: Option<u64>) -> Self {
        let naps = self.naps() + (self.naps() < u32::MAX >> 1) as u32;
        let compared = match compared {
            Some(elapsed) => (elapsed >> 10 & 0x7fff_ffff) << 32,
            None => self.rest >> 32 << 32,
        };
        Self {
            started: self.started,
            rest: compared | (naps as u64) << 1 | found_dead as u64,
        }
    }
}

impl WaitContext {
    /// Returns the sequence number of the launch.
    #[inline(always)]
    pub(crate) fn sequence(&self) -> u64 {
        // Read from shared memory, to save registers.
        #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
        // SAFETY: written before the barrier that ends the prologue.
        return unsafe {
            (&raw const (*crate::shared_cache::at(arch::shared())).context.sequence).read()
        };
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        self.sequence
    }

    /// Sets the sequence number. Lanes of a GPU read it from shared memory instead.
    #[inline(always)]
    pub(crate) fn set_sequence(&mut self, sequence: u64) {
        self.sequence = sequence;
    }

    /// Returns the context for a call of a function that is not inlined: on a CPU a copy, on a GPU
    /// the one in shared memory. The address of the session's own context would keep the session
    /// out of registers.
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    #[inline(always)]
    fn outlined(&self) -> Self {
        *self
    }

    /// Returns the context for a call of a function that is not inlined.
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    #[inline(always)]
    fn outlined(&self) -> &Self {
        let cache = crate::shared_cache::at(arch::shared());
        // SAFETY: the leader writes the context before the barrier that ends the prologue. All
        // lanes call this after that barrier, and nothing writes the context during the session.
        unsafe { &(*cache).context }
    }

    /// Polls until `poll` returns a value. Returns `None` after a failure. On a GPU, the failure is
    /// recorded at the end of the kernel.
    ///
    /// `poll` returns `Err(observed)` until the event has happened.
    #[inline(always)]
    pub fn until<T>(
        &self,
        wait: WaitKind,
        awaited: u32,
        expected: u64,
        poll: impl Fn() -> Result<T, u64>,
    ) -> Option<T> {
        self.poll::<T, false>(wait, || awaited, expected, Absence::Fails, poll)
            .value()
    }

    /// Does what [`WaitContext::until`] does for requests to a network. `peer` returns the peer of
    /// the one that is late, for the message. The wait does not end earlier if that peer is dead,
    /// because requests to it are executed in any case.
    #[inline(always)]
    pub(crate) fn until_executed<T>(
        &self,
        peer: impl Fn() -> u32,
        expected: u64,
        poll: impl Fn() -> Result<T, u64>,
    ) -> Option<T> {
        self.poll::<T, false>(WaitKind::Network, peer, expected, Absence::Fails, poll)
            .value()
    }

    /// Does what [`WaitContext::until`] does. Fails also if the wait ends after it has stalled and
    /// another rank is then in a different call: signals of windows do not carry the call.
    /// `awaited` is called when the wait stalls.
    #[inline(always)]
    pub(crate) fn until_signalled<T>(
        &self,
        wait: WaitKind,
        awaited: impl Fn() -> u32,
        expected: u64,
        poll: impl Fn() -> Result<T, u64>,
    ) -> Option<T> {
        self.poll::<T, true>(wait, awaited, expected, Absence::Fails, poll)
            .value()
    }

    /// Does what [`WaitContext::until_signalled`] does for a signal of rank `from`, which may be
    /// absent.
    #[inline(always)]
    pub(crate) fn until_raised(
        &self,
        from: u32,
        expected: u64,
        absence: Absence,
        poll: impl Fn() -> Result<(), u64>,
    ) -> Arrival {
        match self.poll::<(), true>(WaitKind::Signal, || from, expected, absence, poll) {
            Ended::Value(()) => Arrival::Arrived,
            Ended::Late => Arrival::Late,
            Ended::Dead => Arrival::Dead,
            Ended::Failed => Arrival::Failed,
        }
    }

    #[inline(always)]
    fn poll<T, const COMPARE: bool>(
        &self,
        wait: WaitKind,
        awaited: impl Fn() -> u32,
        expected: u64,
        absence: Absence,
        poll: impl Fn() -> Result<T, u64>,
    ) -> Ended<T> {
        let spins = self.spins();
        let (mut polls, mut late) = (0, 0);
        // After the time limit of an absent rank: the kind of failure.
        let mut expired = ALREADY_FAILED;
        let mut stall = Stall::NEW;
        loop {
            let observed = match poll() {
                Ok(value) => {
                    let stalled = COMPARE && BOUNDED && polls >= spins;
                    let rank = match absence {
                        _ if !stalled => None,
                        Absence::Fails => self.outlined().disagrees(),
                        _ => {
                            let from = awaited();
                            let differs = self.outlined().disagrees_with(from);
                            differs.then_some(from)
                        }
                    };
                    if let Some(rank) = rank {
                        let kind = FailureKind::Mismatch;
                        self.fail(kind, wait, awaited(), rank, expected, expected, 0);
                        return Ended::Failed;
                    }
                    return Ended::Value(value);
                }
                Err(observed) => observed,
            };
            // The poll after the time limit, in case this process was stopped until then.
            if expired != ALREADY_FAILED {
                return match expired == FailureKind::Dead as u32 {
                    true => Ended::Dead,
                    false => Ended::Late,
                };
            }
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            if (polls % POLLS_PER_DRIVE == 0 || stall.naps() >= arch::YIELDS)
                && let Some(requests) = Requests::of(&self.comm)
            {
                requests.drive(false);
            }
            polls += 1;
            if polls < spins || !BOUNDED {
                pause();
                continue;
            }
            if stall.naps().is_multiple_of(64) && !stall.found_dead() {
                late = awaited();
            }
            // The wait fails if rank `needed` is dead. Only waits of windows can be for several
            // ranks.
            let needed = match wait {
                WaitKind::Sum if COMPARE => self
                    .outlined()
                    .dead_contributor()
                    .unwrap_or_else(|| self.comm.rank()),
                WaitKind::Network => self.comm.rank(),
                _ => late,
            };
            // A wait for a tile of this rank's own input times out earlier, so that this rank is
            // reported before the peers that wait for its next signal time out.
            // A wait for other blocks times out later: they may wait for other ranks. Block 0
            // collects the others, so that a wait for block 0 times out last.
            let eighths = match wait {
                WaitKind::Tile => 7,
                WaitKind::Grid if expected >> 32 == 0 => 24,
                WaitKind::Grid | WaitKind::BlockWord => 16,
                _ => 8,
            };
            stall = match absence {
                Absence::Fails => self.outlined().stalled(stall, needed, eighths),
                Absence::AfterTimeout => self.outlined().stalled_for(stall, needed, 8),
                Absence::AtOnce => self.outlined().stalled_for(stall, needed, 0),
            };
            if stall.has_failed() {
                let kind = stall.kind();
                let is_absent =
                    kind == FailureKind::Timeout as u32 || kind == FailureKind::Dead as u32;
                if absence != Absence::Fails && is_absent {
                    expired = kind;
                    continue;
                }
                self.note(Fault {
                    claim: 1,
                    kind: Fault::pair(stall.kind(), late),
                    observed,
                    expected,
                    wait: Fault::pair(wait as u32, stall.rest as u32),
                    elapsed: stall.started,
                });
                return Ended::Failed;
            }
        }
    }

    /// Makes a fault the failure of the launch: at once on a CPU, at the end of the kernel on a
    /// GPU. A call at each wait would take registers from the kernel.
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    #[inline(always)]
    fn note(&self, fault: Fault) {
        Faults::here().note(fault);
    }

    /// Makes a fault the failure of the launch.
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    #[inline(always)]
    fn note(&self, fault: Fault) {
        if fault.kind as u32 != ALREADY_FAILED {
            self.conclude(fault);
        }
    }

    /// Returns a rank whose call differs from that of this rank.
    #[cold]
    #[inline(never)]
    fn disagrees(&self) -> Option<u32> {
        self.mismatch().or_else(|| Some(self.recent_mismatch()?.0))
    }

    /// Returns true if the call of `rank` differs from that of this rank.
    #[cold]
    #[inline(never)]
    fn disagrees_with(&self, rank: u32) -> bool {
        let differs = |mine: u64, theirs: u64| theirs >> 40 == mine >> 40 && theirs != mine;
        let call = |rank| self.progress_call(rank);
        let is_collective = |call| Call::from_progress(call).is_collective();
        let (mine, theirs) = (call(self.comm.rank()), call(rank));
        let now = is_collective(mine) && is_collective(theirs) && differs(mine, theirs);
        let recent = |rank| self.recent_call(rank);
        now || differs(recent(self.comm.rank()), recent(rank))
    }

    /// Changes this rank's word [`Progress::beat`].
    fn beat(&self) {
        let line = self.comm.own(self.comm.workspace().progress).cast::<u64>();
        // SAFETY: the line belongs to this rank; its words are only accessed atomically.
        unsafe {
            let at = line.add(offset_of!(Progress, beat) / 8);
            mem::store_u64(at, arch::clock_ns(), Order::Relaxed, Scope::System);
        }
    }

    /// Returns true if `rank` itself waits for a rank that may be absent. Watches it for at most an
    /// eighth of the timeout.
    fn is_waiting(&self, rank: u32) -> bool {
        if rank >= self.comm.size() {
            return false;
        }
        let at = self.progress_line(rank);
        let at = at.wrapping_add(offset_of!(Progress, beat) / 8);
        // SAFETY: every workspace has a progress line; its words are only accessed atomically.
        let beat = || unsafe { mem::load_u64(at, Order::Acquire, Scope::System) };
        let (first, began) = (beat(), arch::clock_ns());
        loop {
            self.nap(u32::MAX >> 1);
            self.beat();
            if beat() != first {
                return true;
            }
            if self.aborted() || arch::clock_ns().saturating_sub(began) > self.timeout() / 8 {
                return false;
            }
        }
    }

    /// Naps once, and returns the next state of the wait. `needed` is a rank without which the wait
    /// cannot end; the time limit is `eighths` eighths of the timeout.
    #[cold]
    #[inline(never)]
    fn stalled(&self, mut stall: Stall, needed: u32, eighths: u32) -> Stall {
        self.nap(stall.naps());
        if self.aborted() {
            return Stall::failed(ALREADY_FAILED, 0, 0);
        }
        let now = arch::clock_ns();
        if stall.started == 0 {
            stall.started = now;
            return stall.next(false, None);
        }
        // Not below 0, in case the clock goes back.
        let elapsed = now.saturating_sub(stall.started);
        let dead = match self.is_dead(needed) {
            true => Some(needed),
            // The awaited rank may be waiting for the dead one, or be late itself.
            false if self.call.is_collective() => self.dead_contributor(),
            false => None,
        };
        // Fails only if the rank was already dead before the last poll. That poll has seen
        // everything that the rank published before it ended.
        if let Some(dead) = dead
            && stall.found_dead()
        {
            return Stall::failed(FailureKind::Dead as u32, dead, elapsed);
        }
        let compares = stall.must_compare(elapsed);
        if compares && let Some(rank) = self.mismatch() {
            return Stall::failed(FailureKind::Mismatch as u32, rank, elapsed);
        }
        if elapsed > (self.timeout() / 8).saturating_mul(u64::from(eighths)) {
            return Stall::failed(FailureKind::Timeout as u32, 0, elapsed);
        }
        stall.next(dead.is_some(), compares.then_some(elapsed))
    }

    /// Does what [`WaitContext::stalled`] does for a rank that may be absent. Nothing that other
    /// ranks do ends the wait earlier. If the rank itself waits for one that may be absent, the
    /// limit is four times as long.
    #[cold]
    #[inline(never)]
    fn stalled_for(&self, mut stall: Stall, rank: u32, eighths: u32) -> Stall {
        self.nap(stall.naps());
        if self.aborted() {
            return Stall::failed(ALREADY_FAILED, 0, 0);
        }
        self.beat();
        let now = arch::clock_ns();
        if stall.started == 0 {
            stall.started = now;
            return stall.next(false, None);
        }
        let elapsed = now.saturating_sub(stall.started);
        let limit_ns = (self.timeout() / 8).saturating_mul(u64::from(eighths));
        // As in `stalled`; at the limit, the caller polls once more.
        let is_dead = self.is_dead(rank);
        if is_dead && (stall.found_dead() || elapsed > limit_ns) {
            return Stall::failed(FailureKind::Dead as u32, rank, elapsed);
        }
        let compares = stall.must_compare(elapsed);
        if compares && self.call.is_collective() && self.disagrees_with(rank) {
            return Stall::failed(FailureKind::Mismatch as u32, rank, elapsed);
        }
        // A rank that itself waits for an absent rank is late because of that rank.
        if elapsed > limit_ns && (elapsed >= limit_ns.saturating_mul(4) || !self.is_waiting(rank)) {
            return Stall::failed(FailureKind::Timeout as u32, 0, elapsed);
        }
        stall.next(is_dead, compares.then_some(elapsed))
    }

    /// Returns the timeout in nanoseconds.
    #[inline(always)]
    fn timeout(&self) -> u64 {
        match self.timeout_ns {
            0 => self.comm.constants().timeout_ns,
            given => given,
        }
    }

    /// Returns a dead rank that has not finished this launch. If the launch is not collective, the
    /// progress of a dead rank is not known, so that all others must be dead.
    #[cold]
    #[inline(never)]
    fn dead_contributor(&self) -> Option<u32> {
        if self.dead_ranks() == 0 {
            return None;
        }
        let is_collective = self.call.is_collective();
        let (mut first, mut all) = (None, true);
        for rank in (0..self.comm.size()).filter(|&rank| rank != self.comm.rank()) {
            if !self.is_marked(rank) {
                all = false;
            } else if !is_collective {
                first = first.or(Some(rank));
            } else if self.finished(rank) < self.sequence() {
                return Some(rank);
            }
        }
        first.filter(|_| all)
    }

    /// Returns the number of collectives that the block of this index has finished on `rank`. For a
    /// rank outside of the team, the collective that its block 0 is in counts as finished.
    fn finished(&self, rank: u32) -> u64 {
        if !self.comm.reaches(rank) {
            return sequence_of(self.progress_call(rank), self.sequence());
        }
        let offset = BLOCKS_AT + u64::from(self.block) * LINE;
        let state = self.comm.workspace_of(rank).wrapping_add(offset as usize);
        // SAFETY: every workspace has a state for each block; the word is only accessed atomically.
        unsafe {
            let state = state.cast::<BlockState>();
            mem::load_u64(&raw const (*state).sequence, Order::Relaxed, Scope::System)
        }
    }

    /// Returns true if `rank` is marked: its process has ended, or it has left the communicator.
    fn is_dead(&self, rank: u32) -> bool {
        rank != self.comm.rank() && self.dead_ranks() != 0 && self.is_marked(rank)
    }

    /// Returns the number of ranks whose processes have ended.
    fn dead_ranks(&self) -> u64 {
        let state = self.comm.own(0).cast::<CommState>();
        // SAFETY: every workspace starts with a CommState; the word is only accessed atomically.
        unsafe { mem::load_u64(&raw const (*state).dead, Order::Acquire, Scope::System) }
    }

    /// Returns true if `rank` is marked as one whose process has ended.
    fn is_marked(&self, rank: u32) -> bool {
        if rank >= self.comm.size() {
            return false;
        }
        let word = self.comm.workspace().dead + u64::from(rank / 64) * 8;
        // SAFETY: the workspace has a bit for each rank; the words are only accessed atomically.
        let word = unsafe {
            let at = self.comm.own(word).cast::<u64>().cast_const();
            mem::load_u64(at, Order::Acquire, Scope::System)
        };
        word >> (rank % 64) & 1 == 1
    }

    /// Returns true if any rank has failed this communicator, or if a lane of this block has
    /// recorded a fault that is not yet a failure of the rank.
    #[inline(always)]
    pub fn aborted(&self) -> bool {
        // A GPU reports the word at the end of the kernel.
        #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
        return self.abort_word() != 0 || Faults::here().is_pending();
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        self.report_abort()
    }

    #[inline(always)]
    fn abort_word(&self) -> u64 {
        let state = self.comm.own(0).cast::<CommState>();
        // SAFETY: every workspace starts with a CommState; the abort word is only accessed
        // atomically.
        unsafe { mem::load_u64(&raw const (*state).abort, Order::Acquire, Scope::System) }
    }

    /// Returns true if any rank has failed this communicator. If so, stores the abort word where
    /// the host reads it.
    #[inline(always)]
    fn report_abort(&self) -> bool {
        let word = self.abort_word();
        if word != 0 {
            self.report_to_host(word);
        }
        word != 0
    }

    /// Waits until the lane that has claimed the failure record has written the abort word, and
    /// reports this word to the host. That lane may belong to another launch. Without the wait,
    /// this launch could end before the host has the failure, and would appear to have succeeded.
    ///
    /// The other lane waits for nothing between its claim and the abort word, so this wait ends.
    /// The bound is for a lane that a driver has stopped in between.
    #[cold]
    fn await_abort(&self) {
        for round in 0..MOST_NAPS {
            if self.report_abort() {
                return;
            }
            self.nap(round);
        }
    }

    /// Stores the abort word where the host reads it. Several lanes may do so; the host keeps the
    /// first that it sees.
    #[cold]
    #[inline(never)]
    fn report_to_host(&self, word: u64) {
        let at = self.comm.constants().host_word as *mut u64;
        if !at.is_null() {
            // SAFETY: the host's constants have the address of a live word, only accessed
            // atomically.
            unsafe { mem::store_u64(at, word, Order::Release, Scope::System) };
        }
    }

    /// Returns the address of the progress of block 0 of `rank`, or of its copy in the mirror of a
    /// rank outside of the team.
    fn progress_line(&self, rank: u32) -> *const u64 {
        let workspace = self.comm.workspace();
        let line = if self.comm.reaches(rank) {
            let line = workspace.progress as usize;
            self.comm.workspace_of(rank).wrapping_add(line)
        } else {
            let mirror = u64::from(rank) * size_of::<Mirror>() as u64;
            self.comm.own(workspace.mirrors + mirror)
        };
        line.cast_const().cast()
    }

    /// Returns [`Progress::call`] of `rank`, a rank of the communicator.
    fn progress_call(&self, rank: u32) -> u64 {
        // Acquires, because a loop over ranks ends by this value, and the verifier demands that
        // such a load of an AMD image acquires. SAFETY: every workspace has a progress line for
        // block 0; its words are accessed atomically.
        unsafe { mem::load_u64(self.progress_line(rank), Order::Acquire, Scope::System) }
    }

    fn progress(&self, rank: u32) -> Progress {
        if rank >= self.comm.size() {
            return bytemuck::Zeroable::zeroed();
        }
        let at = self.progress_line(rank);
        let load = |word: usize| {
            // SAFETY: every workspace has a progress line for block 0; its words are accessed
            // atomically.
            unsafe { mem::load_u64(at.add(word), Order::Relaxed, Scope::System) }
        };
        let mut progress: Progress = bytemuck::Zeroable::zeroed();
        (progress.call, progress.count, progress.step) = (load(0), load(1), load(2));
        progress
    }

    /// Returns a peer that is in another collective with the same sequence number.
    fn mismatch(&self) -> Option<u32> {
        if !self.call.is_collective() {
            return None;
        }
        let mine = self.progress_call(self.comm.rank());
        if !Call::from_progress(mine).is_collective() {
            // Block 0, which writes the progress, is still in the previous launch: a transfer,
            // which does not advance the sequence number.
            return None;
        }
        (0..self.comm.size()).find(|&rank| {
            let theirs = self.progress_call(rank);
            theirs >> 40 == mine >> 40
                && theirs != mine
                && Call::from_progress(theirs).is_collective()
        })
    }

    /// Returns a peer that was in another call of the same sequence number, and its progress word,
    /// if both calls are of kernels with windows.
    fn recent_mismatch(&self) -> Option<(u32, u64)> {
        let mine = self.recent_call(self.comm.rank());
        let mut ranks = (0..self.comm.size())
            .filter(|_| self.call.is_collective())
            .map(|rank| (rank, self.recent_call(rank)));
        ranks.find(|&(_, theirs)| theirs >> 40 == mine >> 40 && theirs != mine)
    }

    /// Returns the call of `rank` with the sequence number of this launch, if it is a call of a
    /// kernel with windows, or another call.
    #[inline(always)]
    fn recent_call(&self, rank: u32) -> u64 {
        let at = self.progress_line(rank).wrapping_add(self.recent());
        // SAFETY: every workspace has a progress line for block 0; its words are accessed
        // atomically.
        unsafe { mem::load_u64(at, Order::Relaxed, Scope::System) }
    }

    /// Returns the index in a progress line of the word of this launch among [`Progress::recent`].
    #[inline(always)]
    fn recent(&self) -> usize {
        offset_of!(Progress, recent) / 8 + self.sequence() as usize % 4
    }

    /// Stores the call of a kernel with windows. By the leader of each block, before its signals.
    #[inline(always)]
    pub(crate) fn note_call(&self) {
        if self.block != 0 || !BOUNDED || !self.call.is_collective() {
            return;
        }
        let word = self.sequence() << 40 | self.call.0 & 0xff_ffff_ffff;
        let line = self.comm.own(self.comm.workspace().progress).cast::<u64>();
        // SAFETY: the line belongs to this block; peers read its words atomically.
        unsafe { mem::store_u64(line.add(self.recent()), word, Order::Relaxed, Scope::System) };
    }

    /// Returns the rank with the least progress; `awaited` if it is among several.
    fn least_progress(&self, awaited: u32) -> u32 {
        let base = self.sequence();
        // Sequence numbers are compared by their distance from this rank's own, 24 bits signed.
        let key = |rank: u32| {
            let progress = self.progress(rank);
            let distance = sequence_of(progress.call, base).wrapping_sub(base) as i64;
            // The words may be those of two operations.
            let is_of_call = progress.step >> 40 == progress.call >> 40;
            let steps = if is_of_call { progress.step } else { 0 };
            (distance, steps & 0xff_ffff_ffff)
        };
        let mut least = awaited;
        let mut least_key = key(awaited);
        for rank in 0..self.comm.size() {
            if self.call.is_collective() && rank != self.comm.rank() {
                let this = key(rank);
                if this < least_key {
                    (least, least_key) = (rank, this);
                }
            }
        }
        least
    }

    /// Resolves `bytes` bytes that `rank` named, or records the failure. See [`Comm::resolve`].
    #[inline(always)]
    pub fn resolve(&self, addr: WindowAddr, rank: u32, bytes: u64) -> Option<*mut u8> {
        let at = self.comm.resolve(addr, rank, bytes);
        if at.is_none() {
            let (kind, wait) = (FailureKind::Bounds, WaitKind::Ready);
            self.fail(kind, wait, rank, rank, bytes, addr.0, 0);
        }
        at
    }

    /// Records a failure, if it is this rank's first, and stops every peer. A GPU does so at the
    /// end of the kernel.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // the fields of a record
    pub fn fail(
        &self,
        kind: FailureKind,
        wait: WaitKind,
        awaited: u32,
        blamed: u32,
        expected: u64,
        observed: u64,
        elapsed: u64,
    ) {
        self.note(Fault {
            observed,
            expected,
            wait: Fault::pair(wait as u32, blamed),
            elapsed,
            ..Fault::new(kind, awaited)
        });
    }

    /// Reports a launch that does not enter. If another launch is in flight, records the failure.
    /// Otherwise the communicator has failed and has a record, which is reported to the host.
    #[inline(always)]
    pub(crate) fn refuse(&self, is_busy: bool) {
        self.outlined().record_refusal(is_busy);
    }

    #[cold]
    #[inline(never)]
    fn record_refusal(&self, is_busy: bool) {
        if !is_busy {
            // Acquires the abort word, which covers the failure record.
            self.report_abort();
            return;
        }
        self.conclude(Fault {
            observed: 1,
            ..Fault::new(FailureKind::Overlap, 0)
        });
    }

    /// Makes the fault of the block the failure of the launch. Without one, and if no rank has
    /// failed, records that the kernel stopped.
    #[inline(always)]
    pub(crate) fn report(&self, faults: Faults) {
        self.outlined().record_fault(faults);
    }

    #[cold]
    #[inline(never)]
    fn record_fault(&self, faults: Faults) {
        let kind_of = |fault: Fault| fault.kind as u32;
        let fault = faults
            .read()
            .filter(|&fault| kind_of(fault) != ALREADY_FAILED);
        let is_consequence = fault.is_none_or(|fault| kind_of(fault) == FailureKind::Abort as u32);
        if is_consequence && self.report_abort() {
            return;
        }
        self.conclude(fault.unwrap_or(Fault::new(FailureKind::User, u32::MAX)));
    }

    /// Records a fault as the failure of the launch, if it is this rank's first, and stops every
    /// peer.
    #[inline(always)]
    fn conclude(&self, fault: Fault) {
        let ctx = self.outlined();
        ctx.record(
            fault.kind,
            fault.wait,
            fault.expected,
            fault.observed,
            fault.elapsed,
        );
    }

    /// Does what [`WaitContext::conclude`] does, with the words of a fault.
    #[cold]
    #[inline(never)]
    fn record(&self, kind: u64, wait: u64, expected: u64, observed: u64, elapsed: u64) {
        let (kind, mut awaited) = (kind as u32, (kind >> 32) as u32);
        let (mut wait, mut blamed) = (wait as u32, (wait >> 32) as u32);
        if wait == 0 {
            (wait, blamed) = (WaitKind::Launch as u32, self.comm.rank());
            if kind == FailureKind::Overlap as u32 {
                awaited = blamed;
            }
        }
        if kind == FailureKind::Dead as u32 {
            awaited = blamed;
        }
        // Only the awaited rank could have ended these waits.
        let own = [
            WaitKind::Tile,
            WaitKind::Network,
            WaitKind::Grid,
            WaitKind::Counter,
            WaitKind::BlockWord,
        ];
        if kind == FailureKind::Timeout as u32 {
            // On a GPU this is later than the timeout: the other lanes had to leave their waits.
            blamed = match own.iter().any(|&own| own as u32 == wait) {
                true => awaited,
                false => self.least_progress(awaited),
            };
        }
        let mut progress = self.progress(blamed);
        if kind == FailureKind::Mismatch as u32
            && self.mismatch() != Some(blamed)
            && let Some((rank, call)) = self.recent_mismatch()
            && rank == blamed
        {
            progress.call = call;
        }
        let state = self.comm.own(0).cast::<CommState>();
        // SAFETY: the record is this rank's own; the claim makes this lane its only writer, and
        // readers look at it only after `state` is 2.
        unsafe {
            let record = &raw mut (*state).failure;
            let claim = &raw mut (*record).state;
            if mem::compare_exchange_u64(claim, 0, 1, Order::AcqRel, Scope::System) != 0 {
                self.await_abort();
                return;
            }
            mem::write(
                record
                    .cast::<[u64; 16]>()
                    .cast::<u64>()
                    .add(1)
                    .cast::<[u64; 15]>(),
                [
                    u64::from(kind),
                    self.sequence(),
                    self.call.0,
                    self.count,
                    u64::from(self.block),
                    u64::from(wait),
                    u64::from(awaited),
                    u64::from(blamed),
                    sequence_of(progress.call, self.sequence()),
                    Call::from_progress(progress.call).0,
                    progress.count,
                    expected,
                    observed,
                    elapsed,
                    self.comm.constants().generation,
                ],
            );
            mem::store_u64(claim, 2, Order::Release, Scope::System);
            // The word of the first rank is written first. If ranks fail concurrently, the hosts of
            // all ranks report the record that this word names.
            for rank in 0..self.comm.size() {
                if self.comm.reaches(rank) {
                    let peer = self.comm.workspace_of(rank).cast::<CommState>();
                    mem::compare_exchange_u64(
                        &raw mut (*peer).abort,
                        0,
                        ABORT | u64::from(self.comm.rank()),
                        Order::AcqRel,
                        Scope::System,
                    );
                }
            }
        }
        self.report_to_host(ABORT | u64::from(self.comm.rank()));
    }

    /// Writes this launch's progress: the operation that block 0 is in.
    #[inline(always)]
    pub(crate) fn enter(&self) {
        if self.block != 0 || !BOUNDED {
            return;
        }
        let at = self.comm.own(self.comm.workspace().progress).cast::<u64>();
        let tag = self.sequence() << 40;
        // SAFETY: the line belongs to this block; peers read its words atomically.
        unsafe {
            mem::store_u64(at.add(2), tag, Order::Relaxed, Scope::System);
            mem::store_u64(
                at.add(1),
                self.sequence() << 48 | self.count & 0xffff_ffff_ffff,
                Order::Relaxed,
                Scope::System,
            );
            mem::store_u64(
                at,
                tag | self.call.0 & 0xff_ffff_ffff,
                Order::Relaxed,
                Scope::System,
            );
        }
    }

    /// Stores the number of steps of the operation that are complete.
    #[inline(always)]
    pub(crate) fn step(&self, steps: u64) {
        if self.block != 0 || !BOUNDED {
            return;
        }
        let at = self
            .comm
            .own(self.comm.workspace().progress + 16)
            .cast::<u64>();
        // SAFETY: as in `enter`.
        unsafe {
            mem::store_u64(
                at,
                self.sequence() << 40 | steps & 0xff_ffff_ffff,
                Order::Relaxed,
                Scope::System,
            );
        }
    }

    /// Returns the address of a block's state.
    #[inline(always)]
    pub(crate) fn block_state(comm: &Comm, block: u32) -> *mut BlockState {
        comm.own(BLOCKS_AT + u64::from(block) * LINE).cast()
    }
}

/// Returns the sequence number in a progress word, which has 24 bits of it and is near to `base`.
pub const fn sequence_of(call: u64, base: u64) -> u64 {
    let distance = ((call >> 40) as i64 - (base & 0xff_ffff) as i64) << 40 >> 40;
    base.wrapping_add_signed(distance)
}

/// Stops a communicator from outside of its kernels, on a CPU: this rank records a failure of kind
/// `kind` and sets the abort word of every peer, if the communicator has not failed before.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub fn abort(comm: &Comm, kind: FailureKind) {
    blame(comm, kind, WaitKind::Launch, comm.rank());
}

/// Records a failure of this rank, which `blamed` has caused, and stops the ranks of the team. For
/// the host.
#[cold]
pub fn blame(comm: &Comm, kind: FailureKind, wait: WaitKind, blamed: u32) {
    let state = WaitContext::block_state(comm, 0);
    // SAFETY: the state lies in the workspace; its words are only accessed atomically.
    let finished =
        unsafe { mem::load_u64(&raw const (*state).sequence, Order::Relaxed, Scope::System) };
    let mut ctx = WaitContext {
        comm: *comm,
        call: Call(0),
        count: 0,
        sequence: finished,
        block: 0,
        timeout_ns: 0,
    };
    // The operation that this rank is in, or was in last.
    let progress = ctx.progress(comm.rank());
    ctx.sequence = sequence_of(progress.call, finished);
    ctx.call = Call::from_progress(progress.call);
    ctx.count = progress.count & 0xffff_ffff_ffff;
    ctx.fail(kind, wait, blamed, blamed, 0, 0, 0);
}

#[inline(always)]
fn pause() {
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    arch::pause();
}

const _: () = assert!(size_of::<FailureRecord>() == 16 * 8);
