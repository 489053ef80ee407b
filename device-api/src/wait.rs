//! Bounded, abortable waits and the failure record.
//!
//! A wait polls. If it does not end soon, it yields the core, checks the abort word, compares
//! progress with the peers after 50 microseconds (so that different operations are reported at
//! once, not at the timeout), and fails at the timeout. The first failure on a rank claims that
//! rank's [`FailureRecord`] and writes the abort word of every rank of the team. Hosts write the
//! abort words of other teams, and keep a [`Mirror`] of each rank outside of the team.

#[cfg(test)]
mod tests;
mod yielding;

use core::mem::offset_of;

use crate::arch;
use crate::call::Call;
use crate::comm::{Comm, WindowAddr};
use crate::layout::{
    ABORT, BLOCKS_AT, BlockState, CommState, FailureKind, FailureRecord, LINE, Mirror, Progress,
};
use crate::mem::{self, Order, Scope};

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
}

/// False only if kernels are compiled with `--cfg fusewire_unbounded`, to measure the cost of
/// bounded waits. Then nothing is recorded, compared or refused, and a rank whose peer is gone
/// waits forever.
pub(crate) const BOUNDED: bool = !cfg!(fusewire_unbounded);

/// Time after which a stalled wait compares its progress with that of its peers.
const COMPARE_NS: u64 = 50_000;

/// Maximum number of naps while another lane records a failure: about 40 ms on a GPU.
const MOST_NAPS: u32 = 20_000;

/// Bounds of one launch's waits.
#[derive(Clone, Copy, Debug)]
pub struct WaitContext {
    pub(crate) comm: Comm,
    pub(crate) call: Call,
    pub(crate) count: u64,
    pub(crate) sequence: u64,
    pub(crate) block: u32,
    /// 0 selects the communicator's timeout.
    pub(crate) timeout_ns: u64,
}

/// The state of one wait that does not end quickly.
#[derive(Debug)]
struct Stall {
    started: u64,
    compared: u64,
    naps: u32,
    /// A rank without which the wait cannot end, found dead before the last poll. That poll has
    /// seen all that the rank ever did.
    dead: Option<u32>,
}

impl WaitContext {
    /// Returns the sequence number of the launch.
    #[inline(always)]
    pub(crate) fn sequence(&self) -> u64 {
        // Read from shared memory, to save registers.
        #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
        // SAFETY: written before the barrier that ends the prologue.
        return unsafe { (&raw const (*crate::shared_cache::at(arch::shared())).sequence).read() };
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        self.sequence
    }

    /// Sets the sequence number. Lanes of a GPU read it from shared memory instead.
    #[inline(always)]
    pub(crate) fn set_sequence(&mut self, sequence: u64) {
        self.sequence = sequence;
    }

    /// Returns the context for a call of a function that is not inlined. On a CPU this is a copy:
    /// the address of the session's own context would keep the whole session out of registers. On a
    /// GPU it would be memory in either case.
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    #[inline(always)]
    fn outlined(&self) -> Self {
        *self
    }

    /// Returns the context for a call of a function that is not inlined.
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    #[inline(always)]
    fn outlined(&self) -> &Self {
        self
    }

    /// Polls until `poll` returns a value. Returns `None` after a failure, which is then recorded.
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
        self.poll::<T, false>(wait, || awaited, expected, poll)
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
        self.poll::<T, true>(wait, awaited, expected, poll)
    }

    #[inline(always)]
    fn poll<T, const COMPARE: bool>(
        &self,
        wait: WaitKind,
        awaited: impl Fn() -> u32,
        expected: u64,
        poll: impl Fn() -> Result<T, u64>,
    ) -> Option<T> {
        let spins = self.spins();
        let (mut polls, mut late) = (0, 0);
        let mut stall = Stall {
            started: 0,
            compared: 0,
            naps: 0,
            dead: None,
        };
        loop {
            let observed = match poll() {
                Ok(value) => {
                    let stalled = COMPARE && BOUNDED && polls >= spins;
                    if stalled && !self.outlined().agrees(wait, awaited(), expected) {
                        return None;
                    }
                    return Some(value);
                }
                Err(observed) => observed,
            };
            polls += 1;
            if polls < spins || !BOUNDED {
                pause();
                continue;
            }
            if stall.naps.is_multiple_of(64) {
                late = awaited();
            }
            // The wait fails if rank `needed` is dead. Only waits of windows can be for several
            // ranks.
            let needed = match wait {
                WaitKind::Sum if COMPARE => self
                    .outlined()
                    .dead_contributor()
                    .unwrap_or_else(|| self.comm.rank()),
                _ => late,
            };
            let ctx = self.outlined();
            if !ctx.stalled(&mut stall, wait, [late, needed], expected, observed) {
                return None;
            }
        }
    }

    /// Compares the call of this rank with those of its peers. Records a failure if they differ.
    #[cold]
    #[inline(never)]
    fn agrees(&self, wait: WaitKind, awaited: u32, expected: u64) -> bool {
        let kind = FailureKind::Mismatch;
        if let Some(rank) = self.mismatch() {
            self.fail(kind, wait, awaited, rank, expected, expected, 0);
            return false;
        }
        if let Some((rank, call)) = self.recent_mismatch() {
            let mut theirs = self.progress(rank);
            theirs.call = call;
            self.record(kind, wait, [awaited, rank], [expected; 2], 0, &theirs);
            return false;
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn stalled(
        &self,
        stall: &mut Stall,
        wait: WaitKind,
        [awaited, needed]: [u32; 2],
        expected: u64,
        observed: u64,
    ) -> bool {
        self.nap(stall.naps);
        stall.naps = stall.naps.saturating_add(1);
        if self.aborted() {
            return false;
        }
        let now = arch::clock_ns();
        if stall.started == 0 {
            (stall.started, stall.compared) = (now, now);
            return true;
        }
        let elapsed = now.wrapping_sub(stall.started);
        if let Some(dead) = stall.dead {
            let kind = FailureKind::Dead;
            self.fail(kind, wait, dead, dead, expected, observed, elapsed);
            return false;
        }
        // Polls once more before it fails, because the rank may have published before it ended.
        stall.dead = match self.is_dead(needed) {
            true => Some(needed),
            // The awaited rank may be waiting for the dead one, or be late itself.
            false if self.call.is_collective() => self.dead_contributor(),
            false => None,
        };
        if now.wrapping_sub(stall.compared) > COMPARE_NS {
            stall.compared = now;
            if let Some(rank) = self.mismatch() {
                self.fail(
                    FailureKind::Mismatch,
                    wait,
                    awaited,
                    rank,
                    expected,
                    observed,
                    elapsed,
                );
                return false;
            }
        }
        let timeout_ns = match self.timeout_ns {
            0 => self.comm.constants().timeout_ns,
            given => given,
        };
        // A wait for a tile of this rank's own input times out earlier, so that this rank is
        // reported before the peers that wait for its next signal time out.
        // A wait for other blocks times out later: they may wait for other ranks. Block 0 collects
        // the others, so that a wait for block 0 times out last.
        let limit = match wait {
            WaitKind::Tile => timeout_ns - timeout_ns / 8,
            WaitKind::Grid if expected >> 32 == 0 => timeout_ns.saturating_mul(3),
            WaitKind::Grid => timeout_ns.saturating_mul(2),
            _ => timeout_ns,
        };
        if elapsed > limit {
            let blamed = match wait {
                // Only this rank could have done what is awaited.
                WaitKind::Tile | WaitKind::Network | WaitKind::Grid | WaitKind::Counter => awaited,
                _ => self.least_progress(awaited),
            };
            self.fail(
                FailureKind::Timeout,
                wait,
                awaited,
                blamed,
                expected,
                observed,
                elapsed,
            );
            return false;
        }
        true
    }

    /// Returns a dead rank that has not finished this launch. If the launch is not collective, the
    /// progress of a dead rank is not known, so that all others must be dead.
    fn dead_contributor(&self) -> Option<u32> {
        if self.dead_ranks() == 0 {
            return None;
        }
        let is_dead = |rank| self.is_marked(rank);
        let mut others = (0..self.comm.size()).filter(|&rank| rank != self.comm.rank());
        if !self.call.is_collective() {
            return match others.clone().all(is_dead) {
                true => others.next(),
                false => None,
            };
        }
        others.find(|&rank| is_dead(rank) && self.finished(rank) < self.sequence())
    }

    /// Returns the number of collectives that the block of this index has finished on `rank`. For a
    /// rank outside of the team, the collective that its block 0 is in counts as finished.
    fn finished(&self, rank: u32) -> u64 {
        if !self.comm.reaches(rank) {
            return sequence_of(self.progress(rank).call, self.sequence());
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

    /// Returns true if any rank has failed this communicator.
    #[inline(always)]
    pub fn aborted(&self) -> bool {
        let state = self.comm.own(0).cast::<CommState>();
        // SAFETY: every workspace starts with a CommState; the abort word is only accessed
        // atomically.
        let word =
            unsafe { mem::load_u64(&raw const (*state).abort, Order::Acquire, Scope::System) };
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
            if self.aborted() {
                return;
            }
            self.nap(round);
        }
    }

    /// Stores the abort word where the host reads it. Several lanes may do so; the host keeps the
    /// first that it sees.
    #[cold]
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
        let mine = self.progress(self.comm.rank()).call;
        if !Call::from_progress(mine).is_collective() {
            // Block 0, which writes the progress, is still in the previous launch: a transfer,
            // which does not advance the sequence number.
            return None;
        }
        (0..self.comm.size()).find(|&rank| {
            let theirs = self.progress(rank).call;
            theirs >> 40 == mine >> 40
                && theirs != mine
                && Call::from_progress(theirs).is_collective()
        })
    }

    /// Returns a peer that was in another call of the same sequence number, and its progress word,
    /// if both calls are of kernels with windows.
    fn recent_mismatch(&self) -> Option<(u32, u64)> {
        let call = |rank| {
            let at = self.progress_line(rank).wrapping_add(self.recent());
            // SAFETY: every workspace has a progress line for block 0; its words are accessed
            // atomically.
            unsafe { mem::load_u64(at, Order::Relaxed, Scope::System) }
        };
        let mine = call(self.comm.rank());
        let mut ranks = (0..self.comm.size())
            .filter(|_| self.call.is_collective())
            .map(|rank| (rank, call(rank)));
        ranks.find(|&(_, theirs)| theirs >> 40 == mine >> 40 && theirs != mine)
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

    /// Records a failure, if it is this rank's first, and stops every peer.
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
        elapsed_ns: u64,
    ) {
        let ctx = self.outlined();
        ctx.record_failure(kind, wait, awaited, blamed, expected, observed, elapsed_ns);
    }

    /// Does what [`WaitContext::fail`] does.
    #[cold]
    #[inline(never)]
    #[allow(clippy::too_many_arguments)] // the fields of a record
    fn record_failure(
        &self,
        kind: FailureKind,
        wait: WaitKind,
        awaited: u32,
        blamed: u32,
        expected: u64,
        observed: u64,
        elapsed_ns: u64,
    ) {
        let (ranks, values) = ([awaited, blamed], [expected, observed]);
        let progress = self.progress(blamed);
        self.record(kind, wait, ranks, values, elapsed_ns, &progress);
    }

    /// Does what [`WaitContext::fail`] does, with the progress of the blamed rank.
    fn record(
        &self,
        kind: FailureKind,
        wait: WaitKind,
        [awaited, blamed]: [u32; 2],
        [expected, observed]: [u64; 2],
        elapsed_ns: u64,
        progress: &Progress,
    ) {
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
                    kind as u64,
                    self.sequence(),
                    self.call.0,
                    self.count,
                    u64::from(self.block),
                    wait as u64,
                    u64::from(awaited),
                    u64::from(blamed),
                    sequence_of(progress.call, self.sequence()),
                    Call::from_progress(progress.call).0,
                    progress.count,
                    expected,
                    observed,
                    elapsed_ns,
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

/// Stops a communicator from outside of its kernels: this rank records a failure of kind `kind` and
/// sets the abort word of every peer, if the communicator has not failed before.
pub fn abort(comm: &Comm, kind: FailureKind) {
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
    let rank = comm.rank();
    ctx.fail(kind, WaitKind::Launch, rank, rank, 0, 0, 0);
}

#[inline(always)]
fn pause() {
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    arch::pause();
}

const _: () = assert!(size_of::<FailureRecord>() == 16 * 8);
