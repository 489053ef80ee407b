//! Common part of all kernels of the signal family: rounds over user memory or staging.
//!
//! # User memory and staging
//! - **Who may overwrite what:** a rank overwrites its input and its staging, and reads the output
//!   that peers wrote, after a round;
//! - **after having acquired** every peer's done signal of that round;
//! - **released by** each peer after its last read of the input and its last write of the output.
//!
//! Peers touch a rank's memory only after they acquired its ready signal of the round, which it
//! released after its last write of input or staging.
//!
//! Whether a rank's memory lies in a window is its own affair: it publishes a window address with
//! each round, its user memory or its staging, and a flag. Once a rank is staged all walk the range
//! in the same chunks (every rank has seen every flag in the first round); if none is, there is a
//! single round.
//!
//! Signals are those of one block, and blocks may be rounds apart. So each block has an area of its
//! own in staging: parts and rows lie where they lay in the round before, also in the last, shorter
//! round.

use fusewire_device::bulk::{self, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::group::{Block, Group, Machine, slice};
use fusewire_device::mem::Policy;
use fusewire_device::session::Session;

/// Index of the words that travel with a ready signal.
pub(crate) mod word {
    /// WindowAddr of the input.
    pub(crate) const SOURCE: usize = 0;
    /// WindowAddr of the output.
    pub(crate) const TARGET: usize = 1;
    /// 1: the input is staged; 2: the output is staged; 4: this rank walks in chunks.
    pub(crate) const FLAGS: usize = 2;
    /// This rank's scalar.
    pub(crate) const SCALAR: usize = 3;
    /// Elements for the receiver of the words (vector operations).
    pub(crate) const COUNT: usize = 4;
    /// Elements of the longest part (vector operations).
    pub(crate) const LONGEST: usize = 5;
    /// Three words of the body's own ([`super::Words`]).
    pub(crate) const EXTRA: usize = 4;
}

pub(crate) const SOURCE_STAGED: u64 = 1;
pub(crate) const TARGET_STAGED: u64 = 2;
pub(crate) const CHUNKED: u64 = 4;

/// This rank's memory in an operation over a range of `count` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    /// Bytes of an element.
    pub(crate) size: usize,
    /// Elements of a row.
    pub(crate) count: usize,
    /// Elements of a row that go into staging at once.
    pub(crate) chunk: usize,
    /// The input, and its window address.
    pub(crate) source: *const u8,
    pub(crate) source_at: WindowAddr,
    /// Rows of the input that peers read: 0, 1 or the number of ranks.
    pub(crate) source_rows: u32,
    /// The output, and its window address.
    pub(crate) target: *mut u8,
    pub(crate) target_at: WindowAddr,
    /// True if peers write the output.
    pub(crate) target_shared: bool,
    /// Parts into which a row is cut before blocks share it: 1, or the number of ranks.
    pub(crate) shards: u32,
    /// Elements to multiples of which parts start.
    pub(crate) alignment: usize,
    /// This rank's scalar.
    pub(crate) scalar: u64,
}

/// Where a part of a rank's input is.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In this rank's memory.
    Own(*const u8),
    /// At a peer, and the offset in this rank's workspace of memory for a copy.
    Peer(WindowAddr, u64),
}

/// One round: elements `[start, end)` of every row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Length that is cut into parts; longer than the round where blocks keep their areas in
    /// staging.
    cut: usize,
    /// Elements to multiples of which staged rows are rounded.
    alignment: usize,
}

impl Round {
    pub(crate) const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Elements from one staged row to the next.
    #[inline(always)]
    pub(crate) fn stride(&self) -> usize {
        self.cut.next_multiple_of(self.alignment.max(1))
    }
}

/// Words that a body adds to those that travel with a ready signal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    /// Words from [`word::EXTRA`] on.
    pub(crate) extra: [u64; 3],
    /// Added to this rank's flags.
    pub(crate) flags: u64,
}

/// Work of an operation in a round. A trait and not a closure: its method can be forced inline, so
/// that it is compiled for the instruction set of the entry that it is part of.
pub(crate) trait Body<M: Machine> {
    /// Moves one round's data. False after a failure. All lanes together.
    ///
    /// # Safety
    /// Every rank's words of the round have been acquired; the memory is valid as for
    /// [`Memory::run`].
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool;

    /// What this rank says besides, the same in every round.
    #[inline(always)]
    fn words(&self, session: &Session<M>) -> Words {
        let _ = session;
        Words {
            extra: [0; 3],
            flags: 0,
        }
    }

    /// Before a round: its part of the input must be there when this returns. False after a
    /// failure. All lanes together.
    ///
    /// # Safety
    /// As [`Body::round`], but for the words.
    #[inline(always)]
    unsafe fn before(&self, session: &Session<M>, memory: &Memory, round: Round) -> bool {
        let _ = (session, memory, round);
        true
    }

    /// After a round: every peer's done signal has been acquired. All lanes together.
    ///
    /// # Safety
    /// As [`Body::round`].
    #[inline(always)]
    unsafe fn finish(&self, session: &Session<M>, memory: &Memory, round: Round) {
        let _ = (session, memory, round);
    }
}

impl Memory {
    const fn flags(&self) -> u64 {
        let source = self.source_rows > 0 && !self.source_at.is_some();
        let target = self.target_shared && !self.target_at.is_some();
        (source as u64 * SOURCE_STAGED) | (target as u64 * TARGET_STAGED)
    }

    /// The round that starts at element `start`.
    #[inline(always)]
    fn round<M: Machine>(&self, block: Block<M>, start: usize, chunked: bool) -> Round {
        let several = chunked && self.count > self.chunk;
        let rest = self.count - start;
        let length = if several && rest > self.chunk {
            self.chunk
        } else {
            rest
        };
        let cut = if several && block.count() > 1 {
            self.chunk
        } else {
            length
        };
        Round {
            start,
            end: start + length,
            cut,
            alignment: self.alignment,
        }
    }

    /// The part of `round` that this block handles: its part of shard `shard`, from the round's
    /// start.
    #[inline(always)]
    pub(crate) fn part<M: Machine>(
        &self,
        block: Block<M>,
        round: Round,
        shard: u32,
    ) -> (usize, usize) {
        let (start, end) = slice(
            round.cut,
            self.alignment,
            shard as usize,
            self.shards as usize,
        );
        let (first, last) = block.slice(end - start, self.alignment);
        let length = round.len();
        let clip = |at: usize| if at < length { at } else { length };
        (clip(start + first), clip(start + last))
    }

    /// Runs the rounds of the operation; `body` moves one round's data. False after a failure.
    ///
    /// # Safety
    /// The memory must be valid: `source_rows` (at least 1 where `body` reads it) rows of `count`
    /// elements at `source`, and what `body` writes at `target`.
    #[inline(always)]
    pub(crate) unsafe fn run<M: Machine>(
        &self,
        session: &mut Session<M>,
        policy: Policy,
        body: &impl Body<M>,
    ) -> bool {
        let workspace = *session.comm().workspace();
        let flags = self.flags();
        let own = body.words(session);
        let mut chunked = flags | own.flags != 0;
        let mut first = true;
        let mut start = 0;
        loop {
            let mut round = self.round(session.block(), start, chunked);
            // SAFETY: the caller's promise.
            if !unsafe { body.before(session, self, round) } {
                return false;
            }
            if flags & SOURCE_STAGED != 0 {
                // SAFETY: staging has room for `source_rows` rows of a chunk; peers read it only
                // between ready and done.
                unsafe { self.stage(session, round, workspace.staging_in) };
            }
            let source = if flags & SOURCE_STAGED != 0 {
                WindowAddr::new(0, workspace.staging_in)
            } else {
                self.source_at
            };
            let target = if flags & TARGET_STAGED != 0 {
                WindowAddr::new(0, workspace.staging_out)
            } else {
                self.target_at
            };
            let [a, b, c] = own.extra;
            let words = [source.0, target.0, flags | own.flags, self.scalar, a, b, c];
            if session.ready(|_| words).is_err() {
                return false;
            }
            if first {
                first = false;
                let mut any = 0;
                let mut rank = 0;
                while rank < session.comm().size() {
                    any |= session.word(rank, word::FLAGS);
                    rank += 1;
                }
                chunked = any != 0;
                round = self.round(session.block(), start, chunked);
            }
            // SAFETY: ready has acquired every rank's words; the rest is the caller's promise.
            if !unsafe { body.round(session, self, round) } || session.done().is_err() {
                return false;
            }
            if flags & TARGET_STAGED != 0 {
                // SAFETY: every peer's writes into staging have been acquired by done.
                unsafe { self.unstage(session, round, workspace.staging_out, policy) };
            }
            // SAFETY: as above.
            unsafe { body.finish(session, self, round) };
            start = round.end;
            if start >= self.count {
                return true;
            }
        }
    }

    /// Copies the round's input into staging: the parts that this block's peers will read.
    #[inline(always)]
    unsafe fn stage<M: Machine>(&self, session: &Session<M>, round: Round, staging: u64) {
        let block = session.block();
        let to = session.comm().own(staging);
        let mut row = 0;
        while row < self.source_rows as usize {
            let mut shard = 0;
            while shard < self.shards {
                let (first, last) = self.part(block, round, shard);
                // SAFETY: within the caller's row, and within staging.
                unsafe {
                    bulk::copy(
                        block,
                        to.add((row * round.stride() + first) * self.size),
                        self.source
                            .add((row * self.count + round.start + first) * self.size),
                        (last - first) * self.size,
                        Policy::Cached,
                    );
                }
                shard += 1;
            }
            row += 1;
        }
    }

    /// Copies what peers wrote into staging to the output; this rank wrote its own shard there
    /// itself.
    #[inline(always)]
    unsafe fn unstage<M: Machine>(
        &self,
        session: &Session<M>,
        round: Round,
        staging: u64,
        policy: Policy,
    ) {
        let block = session.block();
        let from = session.comm().own(staging);
        let mut shard = 0;
        while shard < self.shards {
            if shard != session.comm().rank() {
                let (first, last) = self.part(block, round, shard);
                // SAFETY: within staging, and within the caller's output.
                unsafe {
                    bulk::copy(
                        block,
                        self.target.add((round.start + first) * self.size),
                        from.add(first * self.size),
                        (last - first) * self.size,
                        policy,
                    );
                }
            }
            shard += 1;
        }
        block.sync();
    }

    /// Returns the address of elements `[first, first + length)` of the round in row `row` of
    /// `rank`'s input: see [`Session::pull`]. All lanes together.
    #[inline(always)]
    pub(crate) fn pulled<M: Machine>(
        &self,
        session: &Session<M>,
        round: Round,
        rank: u32,
        row: usize,
        first: usize,
        length: usize,
    ) -> Option<*const u8> {
        match self.place_of(session, round, rank, row, first, length) {
            Place::Own(at) => Some(at),
            Place::Peer(addr, staging) => {
                session.pull(addr, rank, (length * self.size) as u64, staging)
            }
        }
    }

    /// Returns the address of elements `[first, first + length)` of the round in row `row` of
    /// `rank`'s input: see [`Session::fetch`]. One lane.
    #[inline(always)]
    pub(crate) fn source_of<M: Machine>(
        &self,
        session: &Session<M>,
        round: Round,
        rank: u32,
        row: usize,
        first: usize,
        length: usize,
    ) -> Option<*const u8> {
        match self.place_of(session, round, rank, row, first, length) {
            Place::Own(at) => Some(at),
            Place::Peer(addr, staging) => {
                session.fetch(addr, rank, (length * self.size) as u64, staging)
            }
        }
    }

    #[inline(always)]
    fn place_of<M: Machine>(
        &self,
        session: &Session<M>,
        round: Round,
        rank: u32,
        row: usize,
        first: usize,
        length: usize,
    ) -> Place {
        if length == 0 {
            return Place::Own(self.source);
        }
        if rank == session.comm().rank() {
            let index = row * self.count + round.start + first;
            return Place::Own(self.source.wrapping_add(index * self.size));
        }
        let staged = session.word(rank, word::FLAGS) & SOURCE_STAGED != 0;
        let index = if staged {
            row * round.stride() + first
        } else {
            row * self.count + round.start + first
        };
        // On a network, each rank has a row of staging for output, which is free.
        let part = (rank as usize * round.stride() + first) * self.size;
        let staging = session.comm().workspace().staging_out + part as u64;
        let addr = WindowAddr(session.word(rank, word::SOURCE));
        Place::Peer(self.inside(addr, index), staging)
    }

    /// Address of elements `[first, first + length)` of the round in `rank`'s output.
    #[inline(always)]
    pub(crate) fn target_of<M: Machine>(
        &self,
        session: &Session<M>,
        round: Round,
        rank: u32,
        first: usize,
        length: usize,
    ) -> Option<*mut u8> {
        if length == 0 {
            return Some(self.target);
        }
        if rank == session.comm().rank() {
            return Some(self.target.wrapping_add((round.start + first) * self.size));
        }
        let staged = session.word(rank, word::FLAGS) & TARGET_STAGED != 0;
        let index = if staged { first } else { round.start + first };
        let addr = WindowAddr(session.word(rank, word::TARGET));
        self.named(session, addr, rank, index, length)
    }

    /// Elements `[index, index + length)` behind `addr` of `rank`, checked against the window.
    #[inline(always)]
    pub(crate) fn named<M: Machine>(
        &self,
        session: &Session<M>,
        addr: WindowAddr,
        rank: u32,
        index: usize,
        length: usize,
    ) -> Option<*mut u8> {
        let inside = self.inside(addr, index);
        let bytes = (length * self.size) as u64;
        bulk::resolve(session.comm(), session.ctx(), inside, rank, bytes)
    }

    /// Returns the address of element `index` after `addr`.
    #[inline(always)]
    fn inside(&self, addr: WindowAddr, index: usize) -> WindowAddr {
        let offset = addr.offset().wrapping_add((index * self.size) as u64);
        WindowAddr::new(addr.window(), offset)
    }

    /// Fills the source table with every rank's part of row `row`. False after a failure;
    /// collective.
    #[inline(always)]
    pub(crate) fn fill_sources<M: Machine>(
        &self,
        session: &Session<M>,
        tables: Tables,
        round: Round,
        row: usize,
        first: usize,
        length: usize,
    ) -> bool {
        let block = session.block();
        let mut failed = false;
        for rank in block.elements_of_block(session.comm().size() as usize) {
            let rank = rank as u32;
            match self.source_of(session, round, rank, row, first, length) {
                Some(at) => tables.set_source(rank, at, session.word(rank, word::SCALAR)),
                None => failed = true,
            }
        }
        !block.any(failed) && session.fetched()
    }
}
