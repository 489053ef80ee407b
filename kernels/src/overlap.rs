//! all_gather with a ready flag per chunk, and reduce_scatter with an arrival counter per tile. A
//! consumer starts as soon as a part of the output has arrived; a producer's part is sent as soon
//! as it is written. Here these parts are called tiles; a chunk is the part of a row that fits
//! staging. Protocol: rounds (`exchange`), and local words. The consumer's or producer's stream is
//! called the compute stream.
//!
//! # Words
//! A word is a u32 in memory of the rank's own device; no peer touches it. The host clears all
//! words of an operation on the compute stream, before the computation and before this kernel, so
//! that no replay of a captured graph starts with the values that it waits for.
//!
//! **Tiles of an all_gather.** Tile `source * tiles_per_rank + t` is units `[t * span, (t + 1) *
//! span)` of the input of rank `source`.
//! - **Who may overwrite what:** the kernel writes a tile of the output and its word; the next
//!   operation on the compute stream clears the word and may overwrite the tile;
//! - **after having acquired:** the kernel, the end of the stream's preceding work (by its launch);
//!   the next operation, the end of this kernel (by an event);
//! - **released by:** the consumer, after its last read of the tile; this kernel, after its last
//!   write of tile and word.
//!
//! Blocks add the units that they have moved to the tile's arrivals; the block that completes it
//! has acquired the parts of the others, and stores [`THERE`] by system release. A launch that
//! fails stores [`FAILED`] in every word that is still 0, so that no consumer waits forever.
//!
//! **Tiles of a reduce_scatter.** Tile `row * tiles_per_row + t` is elements `[t * span, (t + 1) *
//! span)` of row `row` of the input.
//! - **Who may overwrite what:** the producer writes a tile of this rank's input, and peers read
//!   it; the next operation on the compute stream clears the word and overwrites the tile;
//! - **after having acquired:** a peer, this rank's ready signal of the tile's round; the next
//!   operation, the end of this kernel, which has acquired every peer's done signal of every round;
//! - **released by:** this rank, after it has acquired the tile's counter, which the producer
//!   raised by release after its last write of the tile; the peer, after its last read.
//!
//! So one round handles tile t of all rows: the kernel needs tile t of every row before the tiles
//! after it.

use core::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use fusewire_device::bulk::Tables;
use fusewire_device::comm::ring;
use fusewire_device::element::{Number, Sum};
use fusewire_device::mem::{self, Order, Policy, Scope};
use fusewire_device::session::Session;
use fusewire_device::wait;
use fusewire_device::{Aborted, Block, Element, Group, In, InOut, Machine, Out, kernel};

use crate::Exchange;
use crate::exchange::{
    Body, CHUNKED, Memory, MemoryLayout, Part, Round, SOURCE_STAGED, Words, word,
};
use crate::reducer::{DynReducer, Reduce, Reducer, StaticReducer, rows};

/// The tiles of an operation.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Tiles {
    /// Elements or units of a tile, not 0.
    pub span: u64,
    /// Counter value at which a tile is complete. Unused by all_gather.
    pub wanted: u64,
}

impl Tiles {
    /// Returns the elements of a tile, at least 1: a kernel must not divide by 0.
    #[inline(always)]
    fn span(self) -> usize {
        if self.span == 0 {
            1
        } else {
            self.span as usize
        }
    }
}

/// Word of a tile that has arrived.
pub const THERE: u32 = 1;

/// Word of a tile that will not arrive, because the launch has failed. Not less than [`THERE`],
/// including in the cyclic comparison of stream memory operations.
pub const FAILED: u32 = 0x4000_0000;

/// Returns the piece of `span` elements in which element `at` lies. A kernel must not panic, so a
/// span of 0 gives 0.
#[inline(always)]
const fn piece(at: usize, span: usize) -> usize {
    match at.checked_div(span) {
        Some(piece) => piece,
        None => 0,
    }
}

/// Returns the number of pieces of `span` elements in `count` elements.
#[inline(always)]
const fn pieces(count: usize, span: usize) -> usize {
    if count == 0 {
        0
    } else {
        piece(count - 1, span) + 1
    }
}

/// The words of an all_gather's tiles.
#[derive(Clone, Copy)]
struct FlaggedTiles<'a> {
    words: InOut<'a, u32>,
    /// Units of each tile that have arrived.
    arrivals: InOut<'a, u64>,
    /// Units of a tile, not 0.
    span: usize,
    /// Tiles of a rank.
    per_rank: usize,
    policy: Policy,
}

impl FlaggedTiles<'_> {
    /// Adds `units` to the arrivals of tile `tile` of `rank`, after this block has written them.
    /// All lanes together.
    #[inline(always)]
    fn arrive<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
        rank: u32,
        tile: usize,
        units: usize,
    ) {
        let block = session.block();
        block.publish();
        let index = rank as usize * self.per_rank + tile;
        if !block.is_leader() {
            return;
        }
        let rest = memory.layout().count - tile * self.span;
        let whole = if rest < self.span { rest } else { self.span };
        let arrivals = self.arrivals.as_ptr().wrapping_add(index);
        // SAFETY: the kernel has compared the number of arrivals with the tiles, and accesses them
        // only atomically.
        let before =
            unsafe { mem::fetch_add_u64(arrivals, units as u64, Order::AcqRel, Scope::Device) };
        if before + units as u64 == whole as u64 {
            let at = self.words.as_ptr().wrapping_add(index);
            // SAFETY: as for the arrivals, of which there are as many.
            unsafe { mem::store_u32(at, THERE, Order::Release, Scope::System) };
        }
    }

    /// Copies this rank's row, which needs no peer. All lanes together.
    #[inline(always)]
    fn own<M: Machine>(&self, session: &Session<M>, memory: &Memory) {
        let (block, rank) = (session.block(), session.rank());
        let (round, mut tile, mut start) = (memory.whole(), 0, 0);
        while start < round.len() {
            let rest = round.len() - start;
            let length = if rest < self.span { rest } else { self.span };
            let (first, last) = block.slice(length, memory.layout().alignment);
            if last > first {
                let part = round.part(start + first, last - first);
                memory.copy_own(session.block(), part, rank, self.policy);
                self.arrive(session, memory, rank, tile, last - first);
            }
            start += length;
            tile += 1;
        }
    }
}

impl<M: Machine> Body<M> for FlaggedTiles<'_> {
    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let block = session.block();
        let (me, size) = (session.rank(), session.ranks());
        let mine = memory.part(block, round, 0);
        // SAFETY: the kernel uses the start of shared memory only for such tables.
        let tables = unsafe { Tables::new(block, size) };
        let session = &*session;
        let sources = Sources {
            session,
            memory,
            tables,
            whole: round.part(0, round.len()),
            mine,
        };
        sources.resolve()?;
        let mut step = 1;
        while step < size {
            let rank = ring(me, step, size);
            let (range, is_staged) = sources.range(rank);
            let (mut low, end) = (range.start(), range.start() + range.len());
            let mut tile = piece(low, self.span);
            while low < end {
                let limit = (tile + 1) * self.span;
                let high = if limit < end { limit } else { end };
                let (first, last) = if is_staged {
                    (0, high - low)
                } else {
                    block.slice(high - low, memory.layout().alignment)
                };
                if last > first {
                    let part = round.part(low + first - round.start(), last - first);
                    sources.copy(rank, part, self.policy)?;
                    self.arrive(session, memory, rank, tile, last - first);
                }
                low = high;
                tile += 1;
            }
            step += 1;
        }
        block.sync();
        Ok(())
    }
}

/// The inputs of all ranks in a round. Blocks of several lanes find their addresses before they
/// copy the first: one after the other, each would cost the latency of a load.
struct Sources<'a, M: Machine> {
    session: &'a Session<M>,
    memory: &'a Memory,
    tables: Tables,
    whole: Part,
    mine: Part,
}

impl<M: Machine> Sources<'_, M> {
    /// Returns what this block can copy of `rank`'s input, and whether that is staged. Staging has
    /// only the part that the peer's block of the same index has staged. User memory has the whole
    /// round: blocks share each tile, so that tiles complete in order.
    #[inline(always)]
    fn range(&self, rank: u32) -> (Part, bool) {
        // A peer may change its word. The table says what was checked.
        let is_staged = if self.is_known(rank) {
            self.tables.scalar(rank) != 0
        } else {
            self.is_staged(rank)
        };
        (self.part(is_staged), is_staged)
    }

    #[inline(always)]
    fn is_staged(&self, rank: u32) -> bool {
        self.session.word(rank, word::FLAGS) & SOURCE_STAGED != 0
    }

    #[inline(always)]
    fn part(&self, is_staged: bool) -> Part {
        if is_staged { self.mine } else { self.whole }
    }

    /// Returns true if the table has the address of `rank`'s input.
    #[inline(always)]
    fn is_known(&self, rank: u32) -> bool {
        M::LANES != 1 && self.session.comm().reaches(rank)
    }

    /// Finds the addresses. All lanes together.
    #[inline(always)]
    #[track_caller]
    fn resolve(&self) -> Result<(), Aborted> {
        if M::LANES == 1 {
            return Ok(());
        }
        let block = self.session.block();
        let mut failed = false;
        for rank in block.elements_of_block(self.session.ranks() as usize) {
            let rank = rank as u32;
            if self.is_known(rank) {
                let is_staged = self.is_staged(rank);
                let range = self.part(is_staged);
                match self.memory.fetch(self.session, range, rank, 0) {
                    Some(at) => self.tables.set_source(rank, at, u64::from(is_staged)),
                    None => failed = true,
                }
            }
        }
        self.session.settle(!block.any(failed))
    }

    /// Copies a part of `rank`'s input to its row of the output. All lanes together.
    #[inline(always)]
    #[track_caller]
    fn copy(&self, rank: u32, part: Part, policy: Policy) -> Result<(), Aborted> {
        if !self.is_known(rank) {
            let from = (rank, 0);
            return self.memory.pull(self.session, part, from, rank, policy);
        }
        let (range, _) = self.range(rank);
        let offset = (part.start() - range.start()) * self.memory.layout().size;
        let from = self.tables.source(rank).wrapping_add(offset);
        // SAFETY: `resolve` has checked the range, of which this is a part.
        unsafe {
            self.memory
                .copy_from(self.session, Some(from), part, rank, policy)
        }
    }
}

/// Runs an all_gather that stores the word of each tile as soon as the tile has arrived. `count`
/// units of rank r go to row r of every rank's output, in ring order from this rank. `words` and
/// `arrivals` have an entry for every tile of every rank; all are 0 when the launch begins.
///
/// # Safety
/// `exchange` must have the window address of the input, and a chunk of each row must fit staging.
/// During the launch, nothing else may write the input or the output, and `words` and `arrivals`
/// may only be accessed atomically.
#[kernel(
    // SAFETY: the entry's parameters describe the words, which the host keeps alive.
    on_failure(unsafe { mark_failed(block, words.cast(), words_len) })
)]
pub unsafe fn all_gather_with_flags(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    words: InOut<u32>,
    arrivals: InOut<u64>,
    #[words(6)] exchange: Exchange,
    #[words(2)] tiles: Tiles,
) -> Result<(), Aborted> {
    let policy = exchange.policy();
    let per_rank = pieces(session.count() as usize, tiles.span());
    let needed = per_rank.saturating_mul(session.ranks() as usize);
    let flagged = FlaggedTiles {
        words: words.require(session, needed)?,
        arrivals: arrivals.require(session, needed)?,
        span: tiles.span(),
        per_rank,
        policy,
    };
    let layout = MemoryLayout {
        target_rows: session.ranks(),
        ..exchange.layout(session.count(), exchange.size as usize)
    };
    // SAFETY: the precondition of this function.
    let memory = unsafe { Memory::new(session, source, target, layout)? };
    flagged.own(session, &memory);
    memory.run(session, policy, &flagged)
}

/// Stores [`FAILED`] in every word that is still 0.
///
/// # Safety
/// `words` must be `count` words that are only accessed atomically.
#[inline(always)]
unsafe fn mark_failed<M: Machine>(block: Block<M>, words: *mut u32, count: u64) {
    for index in block.elements_of_block(count as usize) {
        let at = words.wrapping_add(index);
        // SAFETY: `index` is below `count`.
        unsafe { mem::compare_exchange_u32(at, 0, FAILED, Order::AcqRel, Scope::System) };
    }
}

/// Tiles of this rank's input, and their counters.
#[derive(Clone, Copy)]
struct CountedTiles<'a, R> {
    rows: Reduce<R, false>,
    counters: In<'a, u32>,
    /// Elements of a tile, not 0.
    span: usize,
    /// Counter value at which a tile is complete.
    wanted: u32,
}

impl<M: Machine, R: Reducer> Body<M> for CountedTiles<'_, R> {
    #[inline(always)]
    fn words(&self, session: &Session<M>) -> Words {
        let _ = session;
        Words {
            extra: [0; 3],
            flags: CHUNKED,
        }
    }

    /// Waits for the counters of all tiles that the round touches, in every row.
    #[inline(always)]
    fn before(&self, session: &Session<M>, memory: &Memory, round: Round) -> Result<(), Aborted> {
        let block = session.block();
        let first = piece(round.start(), self.span);
        let last = pieces(round.start() + round.len(), self.span);
        let per_row = pieces(memory.layout().count, self.span);
        let (me, rows) = (session.rank(), session.ranks() as usize);
        let mut failed = false;
        let mut of_row = first;
        // A round usually has one tile of each row: lanes share the rows.
        while of_row < last && !failed {
            let mut row = block.rank() as usize;
            while row < rows && !failed {
                let tile = row * per_row + of_row;
                let expected = (tile as u64) << 32 | u64::from(self.wanted);
                let counter = self.counters.as_ptr().wrapping_add(tile);
                let there = session.ctx().until(wait::WaitKind::Tile, me, expected, || {
                    // SAFETY: `reduce_tiles` has compared the number of counters with the tiles;
                    // the kernel accesses them only atomically.
                    let seen = unsafe { mem::load_u32(counter, Order::Acquire, Scope::System) };
                    if seen >= self.wanted {
                        Ok(())
                    } else {
                        Err(u64::from(seen))
                    }
                });
                failed = there.is_none();
                row += block.size() as usize;
            }
            of_row += 1;
        }
        let failed = block.any(failed);
        block.acquired(Scope::System);
        session.settle(!failed)
    }

    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        self.rows.round(session, memory, round)
    }
}

/// Runs a reduce_scatter that waits for each tile's counter.
///
/// # Safety
/// As [`reduce_scatter_on_arrival`].
#[inline(always)]
unsafe fn reduce_tiles<M: Machine, R: Reducer>(
    session: &mut Session<M>,
    reducer: R,
    (source, target): (In<u8>, Out<u8>),
    counters: In<u32>,
    exchange: Exchange,
    tiles: Tiles,
) -> Result<(), Aborted> {
    let (layout, rows) = rows(session, reducer, &exchange);
    let needed = pieces(layout.count, tiles.span()).saturating_mul(session.ranks() as usize);
    let counted = CountedTiles {
        rows,
        counters: counters.require(session, needed)?,
        span: tiles.span(),
        wanted: tiles.wanted as u32,
    };
    // SAFETY: the precondition of this function.
    let memory = unsafe { Memory::new(session, source, target, layout)? };
    memory.run(session, exchange.policy(), &counted)
}

/// Runs a reduce_scatter by sum that reduces each tile as soon as its counter reaches
/// [`Tiles::wanted`]: `count` elements per rank. The input has a row for each rank. A round has a
/// chunk of every row. `counters` has an entry for every tile of every row.
///
/// # Safety
/// `exchange` must have the window address of the input, and a chunk of each row must fit staging.
/// During the launch, nothing else may access the output, a tile of the input may be written only
/// before its counter, and counters may only be accessed atomically.
#[kernel(each(T: f32 = f32, f16 = fusewire_device::F16, bf16 = fusewire_device::Bf16))]
pub unsafe fn reduce_scatter_on_arrival<T: Element<Acc: Number>>(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    counters: In<u32>,
    #[words(6)] exchange: Exchange,
    #[words(2)] tiles: Tiles,
) -> Result<(), Aborted> {
    let reducer = StaticReducer::<T, Sum>(PhantomData);
    // SAFETY: the precondition of this function.
    unsafe {
        reduce_tiles(
            session,
            reducer,
            (source, target),
            counters,
            exchange,
            tiles,
        )
    }
}

/// Does what [`reduce_scatter_on_arrival`] does, for all types and reductions, which are selected
/// at run time.
///
/// # Safety
/// As [`reduce_scatter_on_arrival`]. The factor of `exchange`, if there is one, must be an element
/// of the call's type that is not written during the launch.
#[kernel(params = ReduceScatterOnArrivalParams)]
pub unsafe fn reduce_scatter_on_arrival_any(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    counters: In<u32>,
    #[words(6)] exchange: Exchange,
    #[words(2)] tiles: Tiles,
) -> Result<(), Aborted> {
    let Some(reducer) = DynReducer::of(session.call()) else {
        return session.settle(false);
    };
    // SAFETY: the precondition of this function.
    unsafe {
        let exchange = exchange.with_factor(reducer.dtype());
        reduce_tiles(
            session,
            reducer,
            (source, target),
            counters,
            exchange,
            tiles,
        )
    }
}
