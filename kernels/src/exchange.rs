//! Rounds over user memory or staging: the common part of all kernels of the signal family.
//!
//! # User memory and staging
//! - **Who may overwrite what:** a rank overwrites its input and its staging, and reads the output
//!   that peers wrote, after a round;
//! - **after having acquired** every peer's done signal of that round;
//! - **released by** each peer after its last read of the input and its last write of the output.
//!
//! Peers access a rank's memory only after they acquired its ready signal of the round, which it
//! released after its last write of input or staging.
//!
//! Only the rank itself knows whether its memory is in a window. With each ready signal, it sends
//! the window addresses of its user memory or of its staging, and flags. If a rank uses staging,
//! all ranks divide the range into the same chunks (each rank has seen all flags in the first
//! round). If no rank does, there is a single round.
//!
//! Each block has its own signals, so blocks may be in different rounds. Therefore each block has
//! its own area of staging: parts and rows have the same offsets in every round, including the
//! last, shorter one.

use bytemuck::{Pod, Zeroable};
use fusewire_device::DType;
use fusewire_device::args::{In, Out};
use fusewire_device::bulk::{self, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::element::{Element, scalar_at};
use fusewire_device::group::{Block, Group, Machine, slice};
use fusewire_device::mem::Policy;
use fusewire_device::session::{Aborted, Session};

/// Arguments of the kernels of the signal family, in addition to their buffers.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Exchange {
    /// Window address of the input.
    pub source_at: WindowAddr,
    /// Window address of the output.
    pub target_at: WindowAddr,
    /// Factor of this rank's input (scaled sum), or flags of the kernel (`nvls`).
    pub scalar: u64,
    /// Address of the factor in this rank's memory, an element of the operation's type, or 0 if
    /// `scalar` is the factor. Only the kernels that select the reduction at run time read it.
    pub factor: u64,
    /// Elements of a row that are staged at once: a multiple of [`crate::ALIGNMENT`].
    pub chunk: u64,
    /// Bytes of an element, a power of two. Reductions take it from the type instead.
    pub size: u32,
    /// Cache policy of the output: 0 for cached, 1 for streaming.
    pub policy: u32,
}

impl Exchange {
    /// Returns these arguments with the factor in memory, if there is one, as the scalar.
    ///
    /// # Safety
    /// `factor` must be 0, or the address of an element of `dtype` that is not written during the
    /// launch.
    #[inline(always)]
    pub(crate) unsafe fn with_factor(self, dtype: DType) -> Self {
        if self.factor == 0 {
            return self;
        }
        // SAFETY: the precondition of this function.
        let scalar = unsafe { scalar_at(dtype, self.factor as *const u8) };
        Self { scalar, ..self }
    }

    /// Returns the cache policy of the output.
    #[inline(always)]
    pub(crate) fn policy(&self) -> Policy {
        match self.policy {
            1 => Policy::Streaming,
            _ => Policy::Cached,
        }
    }

    /// Returns the layout of an operation over rows of `count` elements of `size` bytes: one row of
    /// input and of output, which peers do not write.
    #[inline(always)]
    pub(crate) fn layout(&self, count: u64, size: usize) -> MemoryLayout {
        MemoryLayout {
            size,
            count: count as usize,
            chunk: self.chunk as usize,
            source_rows: 1,
            target_rows: 1,
            target_shared: false,
            shards: 1,
            alignment: crate::ALIGNMENT,
            source_at: self.source_at,
            target_at: self.target_at,
            scalar: self.scalar,
        }
    }
}

/// Indices of the words that are sent with a ready signal.
pub(crate) mod word {
    /// Window address of the input.
    pub(crate) const SOURCE: usize = 0;
    /// Window address of the output.
    pub(crate) const TARGET: usize = 1;
    /// 1: the input is staged; 2: the output is staged; 4: this rank uses chunks.
    pub(crate) const FLAGS: usize = 2;
    /// Factor of this rank's input (scaled sum), or flags of the kernel (`nvls`).
    pub(crate) const SCALAR: usize = 3;
    /// Number of elements for the rank that receives the words (vector operations).
    pub(crate) const COUNT: usize = 4;
    /// Number of elements of the longest part (vector operations).
    pub(crate) const LONGEST: usize = 5;
    /// Three words of the body ([`super::Words`]).
    pub(crate) const EXTRA: usize = 4;
}

pub(crate) const SOURCE_STAGED: u64 = 1;
pub(crate) const TARGET_STAGED: u64 = 2;
pub(crate) const CHUNKED: u64 = 4;

/// Shape of this rank's memory in an operation over rows of `count` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryLayout {
    /// Bytes of an element.
    pub(crate) size: usize,
    /// Elements of a row.
    pub(crate) count: usize,
    /// Elements of a row that are staged at once.
    pub(crate) chunk: usize,
    /// Rows of the input that ranks read: 0, 1 or the number of ranks.
    pub(crate) source_rows: u32,
    /// Rows of the output that this operation writes: 0, 1 or the number of ranks.
    pub(crate) target_rows: u32,
    /// True if peers write the output.
    pub(crate) target_shared: bool,
    /// Parts into which a row is cut before blocks share it: 1, or the number of ranks.
    pub(crate) shards: u32,
    /// Alignment of parts, in elements.
    pub(crate) alignment: usize,
    /// Window address of the input.
    pub(crate) source_at: WindowAddr,
    /// Window address of the output.
    pub(crate) target_at: WindowAddr,
    /// Factor of this rank's input (scaled sum), or flags of the kernel (`nvls`).
    pub(crate) scalar: u64,
}

/// This rank's memory in an operation: a layout with buffers that are long enough for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory {
    source: *const u8,
    target: *mut u8,
    layout: MemoryLayout,
}

/// One round: elements `[start, end)` of every row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    start: usize,
    end: usize,
    /// Length that is divided into parts: a whole chunk, even in a shorter last round, if blocks
    /// have areas of staging.
    cut: usize,
    /// Alignment of staged rows, in elements.
    alignment: usize,
}

impl Round {
    /// Returns the index of the first element in its row.
    #[inline(always)]
    pub(crate) const fn start(&self) -> usize {
        self.start
    }

    /// Returns the number of elements of a row.
    #[inline(always)]
    pub(crate) const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns elements `[first, first + len)` of the round.
    #[inline(always)]
    pub(crate) const fn part(self, first: usize, len: usize) -> Part {
        Part {
            round: self,
            first,
            len,
        }
    }

    /// Returns the number of elements from one staged row to the next.
    #[inline(always)]
    fn stride(&self) -> usize {
        self.cut.next_multiple_of(self.alignment.max(1))
    }
}

/// Elements of a round, in every row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    round: Round,
    /// Index of the first element in the round.
    first: usize,
    len: usize,
}

impl Part {
    /// Returns the index of the first element in its row.
    #[inline(always)]
    pub(crate) const fn start(&self) -> usize {
        self.round.start + self.first
    }

    /// Returns the index of the first element in its round.
    #[inline(always)]
    pub(crate) const fn first(&self) -> usize {
        self.first
    }

    /// Returns the number of elements of a row.
    #[inline(always)]
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Returns elements `[first, first + len)` of the part.
    #[inline(always)]
    pub(crate) const fn slice(self, first: usize, len: usize) -> Self {
        self.round.part(self.first + first, len)
    }
}

/// A part of a rank's input.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// In this rank's memory.
    Own(*const u8),
    /// At a peer. A copy from a network goes to byte `staging` of this rank's workspace.
    Peer {
        addr: WindowAddr,
        rank: u32,
        bytes: u64,
        staging: u64,
    },
}

impl Source {
    /// Returns the address for all lanes together: see [`Session::pull`].
    #[inline(always)]
    fn pull<M: Machine>(self, session: &Session<M>) -> Option<*const u8> {
        match self {
            Self::Own(at) => Some(at),
            Self::Peer {
                addr,
                rank,
                bytes,
                staging,
            } => session.pull(addr, rank, bytes, staging),
        }
    }

    /// Returns the address for one lane: see [`Session::fetch`].
    #[inline(always)]
    fn fetch<M: Machine>(self, session: &Session<M>) -> Option<*const u8> {
        match self {
            Self::Own(at) => Some(at),
            Self::Peer {
                addr,
                rank,
                bytes,
                staging,
            } => session.fetch(addr, rank, bytes, staging),
        }
    }
}

/// Words that a body adds to those that are sent with a ready signal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    /// Words from [`word::EXTRA`] on.
    pub(crate) extra: [u64; 3],
    /// Added to this rank's flags.
    pub(crate) flags: u64,
}

/// Work of an operation in a round. A trait instead of a closure: its method can be forced inline,
/// so that it is compiled for the instruction set of the kernel's entry.
pub(crate) trait Body<M: Machine> {
    /// Moves one round's data. Called after every rank's words of the round have been acquired. All
    /// lanes together.
    fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round)
    -> Result<(), Aborted>;

    /// Returns the additional words of this rank, which are the same in every round.
    #[inline(always)]
    fn words(&self, session: &Session<M>) -> Words {
        let _ = session;
        Words {
            extra: [0; 3],
            flags: 0,
        }
    }

    /// Waits until the round's part of the input is valid. All lanes together.
    #[inline(always)]
    fn before(&self, session: &Session<M>, memory: &Memory, round: Round) -> Result<(), Aborted> {
        let _ = (session, memory, round);
        Ok(())
    }

    /// Returns false if the body writes only memory of this rank that no peer reads before a later
    /// signal of this rank.
    #[inline(always)]
    fn writes_for_peers(&self) -> bool {
        true
    }

    /// Called after every peer's done signal of the round has been acquired. All lanes together.
    #[inline(always)]
    fn finish(&self, session: &Session<M>, memory: &Memory, round: Round) {
        let _ = (session, memory, round);
    }
}

impl Memory {
    /// Combines a layout with this rank's buffers. Before the first round: a rank without room must
    /// not tell its peers where to write.
    ///
    /// # Errors
    /// [`Aborted`] if the buffers are too short for the layout.
    ///
    /// # Safety
    /// The window addresses must be those of the buffers, and `chunk` elements of each row that is
    /// staged must fit the workspace's staging. Until the launch ends, nothing but this operation
    /// may write the input or access the output. The buffers may overlap only where the operation
    /// reads each element before it writes it.
    #[inline(always)]
    pub(crate) unsafe fn new<M: Machine, S: Element>(
        session: &Session<M>,
        source: In<S>,
        target: Out<u8>,
        layout: MemoryLayout,
    ) -> Result<Self, Aborted> {
        let row = layout.count.saturating_mul(layout.size);
        let bytes = |rows: u32| row.saturating_mul(rows as usize);
        let (inputs, outputs) = (bytes(layout.source_rows), bytes(layout.target_rows));
        let inputs = inputs.div_ceil(size_of::<S>());
        if source.len() < inputs || target.len() < outputs {
            // Both record an error if they are too short.
            let _ = (source.slice(0, inputs), target.slice(0, outputs));
            session.settle(false)?;
        }
        Ok(Self {
            source: source.as_ptr().cast(),
            target: target.as_ptr(),
            layout,
        })
    }

    /// Returns the layout.
    #[inline(always)]
    pub(crate) const fn layout(&self) -> &MemoryLayout {
        &self.layout
    }

    /// Returns the whole rows as a round.
    #[inline(always)]
    pub(crate) const fn whole(&self) -> Round {
        Round {
            start: 0,
            end: self.layout.count,
            cut: self.layout.count,
            alignment: self.layout.alignment,
        }
    }

    /// Returns the address of a part of row `row` of this rank's input, if the input has it.
    #[inline(always)]
    pub(crate) fn own_source(&self, row: u32, part: Part) -> Option<*const u8> {
        self.byte_of(row, part, self.layout.source_rows)
            .map(|byte| self.source.wrapping_add(byte))
    }

    /// Returns the address of a part of row `row` of this rank's output, if the output has it.
    #[inline(always)]
    pub(crate) fn own_target(&self, row: u32, part: Part) -> Option<*mut u8> {
        self.byte_of(row, part, self.layout.target_rows)
            .map(|byte| self.target.wrapping_add(byte))
    }

    /// Returns the offset of a part of row `row`, if it is within `rows` rows.
    #[inline(always)]
    fn byte_of(&self, row: u32, part: Part, rows: u32) -> Option<usize> {
        let index = row as usize * self.layout.count + part.start();
        let end = rows as usize * self.layout.count;
        (index + part.len <= end).then_some(index * self.layout.size)
    }

    #[inline(always)]
    const fn flags(&self) -> u64 {
        let source = self.layout.source_rows > 0 && !self.layout.source_at.is_some();
        let target = self.layout.target_shared && !self.layout.target_at.is_some();
        (source as u64 * SOURCE_STAGED) | (target as u64 * TARGET_STAGED)
    }

    /// Returns the round that starts at element `start`.
    #[inline(always)]
    fn round<M: Machine>(&self, block: Block<M>, start: usize, chunked: bool) -> Round {
        let (count, chunk) = (self.layout.count, self.layout.chunk);
        let several = chunked && count > chunk;
        let rest = count - start;
        let length = if several && rest > chunk { chunk } else { rest };
        let cut = if several && block.count() > 1 {
            chunk
        } else {
            length
        };
        Round {
            start,
            end: start + length,
            cut,
            alignment: self.layout.alignment,
        }
    }

    /// Returns the part of `round` that this block handles: its part of shard `shard`.
    #[inline(always)]
    pub(crate) fn part<M: Machine>(&self, block: Block<M>, round: Round, shard: u32) -> Part {
        let alignment = self.layout.alignment;
        let shards = self.layout.shards as usize;
        let (start, end) = slice(round.cut, alignment, shard as usize, shards);
        let (first, last) = block.slice(end - start, alignment);
        let length = round.len();
        let clip = |at: usize| if at < length { at } else { length };
        let (first, last) = (clip(start + first), clip(start + last));
        round.part(first, last - first)
    }

    /// Runs the rounds of the operation; `body` moves one round's data.
    #[inline(always)]
    pub(crate) fn run<M: Machine, B: Body<M>>(
        &self,
        session: &mut Session<M>,
        policy: Policy,
        body: &B,
    ) -> Result<(), Aborted> {
        let workspace = *session.comm().workspace();
        let flags = self.flags();
        let own = body.words(session);
        let mut chunked = flags | own.flags != 0;
        let mut first = true;
        let mut start = 0;
        loop {
            let mut round = self.round(session.block(), start, chunked);
            body.before(session, self, round)?;
            if flags & SOURCE_STAGED != 0 {
                self.stage(session, round, workspace.staging_in);
            }
            let source = if flags & SOURCE_STAGED != 0 {
                WindowAddr::new(0, workspace.staging_in)
            } else {
                self.layout.source_at
            };
            let target = if flags & TARGET_STAGED != 0 {
                WindowAddr::new(0, workspace.staging_out)
            } else {
                self.layout.target_at
            };
            let [a, b, c] = own.extra;
            let scalar = self.layout.scalar;
            let words = [source.0, target.0, flags | own.flags, scalar, a, b, c];
            session.ready(|_| words)?;
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
            if let Err(failure) = body.round(session, self, round) {
                session.abandon();
                return Err(failure);
            }
            // SAFETY: `writes_for_peers` is false only for bodies that write nothing that a peer
            // reads after this signal.
            unsafe { session.done_after(body.writes_for_peers())? };
            if flags & TARGET_STAGED != 0 {
                self.unstage(session, round, workspace.staging_out, policy);
            }
            body.finish(session, self, round);
            start = round.end;
            if start >= self.layout.count {
                return Ok(());
            }
        }
    }

    /// Copies the round's input into staging: the parts that this block's peers will read. Peers
    /// read staging only between ready and done.
    #[inline(always)]
    fn stage<M: Machine>(&self, session: &Session<M>, round: Round, staging: u64) {
        let MemoryLayout {
            size,
            count,
            source_rows,
            shards,
            ..
        } = self.layout;
        let block = session.block();
        let to = session.comm().own(staging);
        // SAFETY: the kernels of this family use the start of shared memory only for such tables.
        // There are at most as many rows as ranks: either rows are those of ranks, or shards.
        let tables = unsafe { Tables::new(block, session.comm().size()) };
        let parts = source_rows * shards;
        for index in block.elements_of_block(parts as usize) {
            let (row, shard) = if shards > 1 {
                (0, index as u32)
            } else {
                (index, 0)
            };
            let part = self.part(block, round, shard);
            let from = (row * count + part.start()) * size;
            let to = to.wrapping_add((row * round.stride() + part.first) * size);
            let bytes = (part.len * size) as u64;
            tables.set_source(index as u32, self.source.wrapping_add(from), bytes);
            tables.set_target(index as u32, to);
        }
        block.sync();
        // SAFETY: the lanes have set an entry for each part, and passed a barrier. A part is within
        // a row of the input; staging has room for a chunk of each row (both by `Memory::new`).
        unsafe { bulk::copy_rows(block, tables, parts, Policy::Cached) };
    }

    /// Copies what peers wrote into staging, which `done` has acquired, to the output. This rank
    /// has written its own shard to the output.
    #[inline(always)]
    fn unstage<M: Machine>(
        &self,
        session: &Session<M>,
        round: Round,
        staging: u64,
        policy: Policy,
    ) {
        let MemoryLayout { size, shards, .. } = self.layout;
        let block = session.block();
        let from = session.comm().own(staging);
        // SAFETY: as in `stage`; the round's data has moved, so that its tables are not used again.
        let tables = unsafe { Tables::new(block, session.comm().size()) };
        for shard in block.elements_of_block(shards as usize) {
            let shard = shard as u32;
            let part = self.part(block, round, shard);
            let is_own = shard == session.comm().rank();
            let bytes = if is_own { 0 } else { part.len * size };
            let from = from.wrapping_add(part.first * size);
            tables.set_source(shard, from, bytes as u64);
            tables.set_target(shard, self.target.wrapping_add(part.start() * size));
        }
        block.sync();
        // SAFETY: the lanes have set an entry for each shard, and passed a barrier. A part is
        // within a chunk of staging and within the output, which has a row if peers write it (both
        // by `Memory::new`).
        unsafe { bulk::copy_rows(block, tables, shards, policy) };
        block.sync();
    }

    /// Copies a part of row `row` of `rank`'s input to the same part of row `to` of the output. All
    /// lanes together; the block must synchronize before the output is read.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn pull<M: Machine>(
        &self,
        session: &Session<M>,
        part: Part,
        (rank, row): (u32, u32),
        to: u32,
        policy: Policy,
    ) -> Result<(), Aborted> {
        let source = self.source_of(session, part, rank, row);
        let source = source.and_then(|source| source.pull(session));
        // SAFETY: the source was checked against the input or its window.
        unsafe { self.copy_from(session, source, part, to, policy) }
    }

    /// Copies a part of an input from `source` to the same part of row `to` of the output. Fails if
    /// there is no source. All lanes together; the block must synchronize before the output is
    /// read.
    ///
    /// # Safety
    /// The part must be within the input or window of `source`, and its owner must not write it
    /// before this rank's done signal.
    #[inline(always)]
    #[track_caller]
    pub(crate) unsafe fn copy_from<M: Machine>(
        &self,
        session: &Session<M>,
        source: Option<*const u8>,
        part: Part,
        to: u32,
        policy: Policy,
    ) -> Result<(), Aborted> {
        let (Some(from), Some(to)) = (source, self.own_target(to, part)) else {
            return session.settle(false);
        };
        if !core::ptr::eq(to, from) {
            let bytes = part.len * self.layout.size;
            // SAFETY: the precondition; the target was checked against the output.
            unsafe { bulk::copy(session.block(), to, from, bytes, policy) };
        }
        Ok(())
    }

    /// Returns the address of a part of row `row` of `rank`'s input for one lane: see
    /// [`Session::fetch`].
    #[inline(always)]
    pub(crate) fn fetch<M: Machine>(
        &self,
        session: &Session<M>,
        part: Part,
        rank: u32,
        row: u32,
    ) -> Option<*const u8> {
        self.source_of(session, part, rank, row)?.fetch(session)
    }

    /// Copies a part of the first row of the input to the same part of row `to` of the output, if
    /// they have it. All lanes together; the block must synchronize before the output is read.
    #[inline(always)]
    pub(crate) fn copy_own<M: Machine>(
        &self,
        block: Block<M>,
        part: Part,
        to: u32,
        policy: Policy,
    ) {
        let (Some(from), Some(to)) = (self.own_source(0, part), self.own_target(to, part)) else {
            return;
        };
        if !core::ptr::eq(to, from) {
            // SAFETY: both ranges were checked. They are equal or do not overlap.
            unsafe { bulk::copy(block, to, from, part.len * self.layout.size, policy) };
        }
    }

    /// Returns the location of a part of row `row` of `rank`'s input, if this rank's input has it.
    #[inline(always)]
    fn source_of<M: Machine>(
        &self,
        session: &Session<M>,
        part: Part,
        rank: u32,
        row: u32,
    ) -> Option<Source> {
        if part.len == 0 {
            return Some(Source::Own(self.source));
        }
        if rank == session.comm().rank() {
            return self.own_source(row, part).map(Source::Own);
        }
        let row = row as usize;
        let staged = session.word(rank, word::FLAGS) & SOURCE_STAGED != 0;
        let index = if staged {
            row * part.round.stride() + part.first
        } else {
            row * self.layout.count + part.start()
        };
        // Copies from a network go to staging for output, which is free and has a row per rank.
        let copy = (rank as usize * part.round.stride() + part.first) * self.layout.size;
        let addr = WindowAddr(session.word(rank, word::SOURCE));
        Some(Source::Peer {
            addr: self.inside(addr, index),
            rank,
            bytes: (part.len * self.layout.size) as u64,
            staging: session.comm().workspace().staging_out + copy as u64,
        })
    }

    /// Returns the address of a part of `rank`'s output, or records the failure.
    #[inline(always)]
    pub(crate) fn target_of<M: Machine>(
        &self,
        session: &Session<M>,
        part: Part,
        rank: u32,
    ) -> Option<*mut u8> {
        if part.len == 0 {
            return Some(self.target);
        }
        if rank == session.comm().rank() {
            return self.own_target(0, part);
        }
        let staged = session.word(rank, word::FLAGS) & TARGET_STAGED != 0;
        let index = if staged { part.first } else { part.start() };
        let addr = WindowAddr(session.word(rank, word::TARGET));
        self.named(session, addr, rank, index, part.len)
    }

    /// Returns the address of elements `[index, index + length)` after `addr` of `rank`, or records
    /// the failure if they are not in the window.
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
        let bytes = (length * self.layout.size) as u64;
        session.ctx().resolve(inside, rank, bytes)
    }

    /// Returns the address of element `index` after `addr`.
    #[inline(always)]
    fn inside(&self, addr: WindowAddr, index: usize) -> WindowAddr {
        let offset = addr
            .offset()
            .wrapping_add((index * self.layout.size) as u64);
        WindowAddr::new(addr.window(), offset)
    }

    /// Fills the source table with every rank's part of row `row`. All lanes together.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn fill_sources<M: Machine>(
        &self,
        session: &Session<M>,
        tables: Tables,
        part: Part,
        row: u32,
    ) -> Result<(), Aborted> {
        let block = session.block();
        let mut failed = false;
        for rank in block.elements_of_block(session.comm().size() as usize) {
            let rank = rank as u32;
            match self.fetch(session, part, rank, row) {
                Some(at) => tables.set_source(rank, at, session.word(rank, word::SCALAR)),
                None => failed = true,
            }
        }
        session.settle(!block.any(failed) && session.fetched())
    }
}
