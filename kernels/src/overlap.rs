//! all_gather with a ready flag per chunk, and reduce_scatter with an arrival counter per tile. A
//! consumer starts as soon as a part of the output has arrived; a producer's part leaves as soon as
//! it is done. Here the parts of both are called tiles, and `chunk` is what fits staging. Protocol:
//! rounds (`exchange`), and words of this rank's own. The consumer's or producer's stream is called
//! the compute stream.
//!
//! # Words
//! A word is a u32 in memory of the rank's own device; no peer touches it. The host clears all
//! words of an operation on the compute stream, before the computation and before this kernel: so
//! the values that a captured graph waits for are not present at the start of any replay.
//!
//! **Tiles of an all_gather.** Tile `source * tiles_per_rank + t` is units `[t * span, (t + 1) *
//! span)` of what `source` sends.
//! - **Who may overwrite what:** the kernel writes a tile of the output and its word; the next
//!   operation on the compute stream clears the word and may overwrite the tile;
//! - **after having acquired:** the kernel the end of the stream's work before it (its launch); the
//!   next one the end of this kernel (an event);
//! - **released by:** the consumer, after its last read of the tile; this kernel, after its last
//!   write of tile and word.
//!
//! Blocks add the units that they have moved to the tile's arrivals; whoever completes it stores
//! [`THERE`] by system release, having acquired the parts of the others. A launch that fails stores
//! [`FAILED`] in every word that is still 0: nobody waits for ever for what does not come.
//!
//! **Tiles of a reduce_scatter.** Tile `row * tiles_per_row + t` is elements `[t * span, (t + 1) *
//! span)` of row `row` of the input.
//! - **Who may overwrite what:** the producer writes a tile of this rank's input, and peers read
//!   it; the next one on the compute stream clears the word and overwrites the tile;
//! - **after having acquired:** a peer this rank's ready signal of the tile's round, the next one
//!   the end of this kernel, which has acquired every peer's done signal of every round;
//! - **released by:** this rank, after it has acquired the tile's counter, which the producer
//!   raised by release after its last write of the tile; the peer, after its last read.
//!
//! So there is one round for tile t of all rows: tiles are needed in the order of t, those of all
//! rows together.

use core::marker::PhantomData;

use fusewire_device::bulk;
use fusewire_device::comm::{WindowAddr, ring};
use fusewire_device::element::Sum;
use fusewire_device::layout::CommConst;
use fusewire_device::mem::{self, Order, Policy, Scope};
use fusewire_device::session::Session;
use fusewire_device::wait;
use fusewire_device::{Aborted, Block, Element, Group, Machine, kernel};

use crate::exchange::{Body, CHUNKED, Memory, Round, SOURCE_STAGED, Words, word};
use crate::policy;
use crate::reduce_scatter::OwnRow;
use crate::reducer::{DynReducer, Reducer, StaticReducer, memory};

/// Word of a tile that is there.
pub const THERE: u32 = 1;

/// Word of a tile that will not come: the launch has failed. Not less than [`THERE`], also in the
/// cyclic comparison of stream memory operations.
pub const FAILED: u32 = 0x4000_0000;

/// Which piece of `span` element `at` lies in. (Nothing that could panic is left in a kernel, so 0
/// is asked for here.)
#[inline(always)]
const fn piece(at: usize, span: usize) -> usize {
    match at.checked_div(span) {
        Some(piece) => piece,
        None => 0,
    }
}

/// Pieces of `span` that `count` elements take.
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
struct FlaggedTiles {
    words: *mut u32,
    /// Units of each tile that have arrived.
    arrivals: *mut u64,
    /// Units of a tile, not 0.
    span: usize,
    /// Tiles of a rank.
    per_rank: usize,
    policy: Policy,
}

impl FlaggedTiles {
    /// `units` more of tile `tile` of `rank` are there, as far as this block moves them. All lanes
    /// together.
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
        // The leader speaks for all.
        block.publish(Scope::Device);
        if !block.is_leader() {
            return;
        }
        let rest = memory.count - tile * self.span;
        let whole = if rest < self.span { rest } else { self.span };
        let index = rank as usize * self.per_rank + tile;
        // SAFETY: the caller's arrays have an entry for every tile.
        let arrivals = unsafe { self.arrivals.add(index) };
        // SAFETY: as above; arrivals are only accessed atomically while the kernel runs.
        let before =
            unsafe { mem::fetch_add_u64(arrivals, units as u64, Order::AcqRel, Scope::Device) };
        if before + units as u64 == whole as u64 {
            // SAFETY: as above.
            let at = unsafe { self.words.add(index) };
            // SAFETY: as above; words are only accessed atomically while the kernel runs.
            unsafe { mem::store_u32(at, THERE, Order::Release, Scope::System) };
        }
    }

    /// This rank's own row, which needs no peer. All lanes together.
    ///
    /// # Safety
    /// The memory is valid as for [`Memory::run`].
    #[inline(always)]
    unsafe fn own<M: Machine>(&self, session: &Session<M>, memory: &Memory) {
        let block = session.block();
        let rank = session.comm().rank();
        let row = rank as usize * memory.count * memory.size;
        let row = memory.target.wrapping_add(row);
        let (mut tile, mut start) = (0, 0);
        while start < memory.count {
            let rest = memory.count - start;
            let length = if rest < self.span { rest } else { self.span };
            let (first, last) = block.slice(length, memory.alignment);
            if last > first {
                let at = (start + first) * memory.size;
                let (to, from) = (row.wrapping_add(at), memory.source.wrapping_add(at));
                if !core::ptr::eq(to, from) {
                    let bytes = (last - first) * memory.size;
                    // SAFETY: within the caller's input and row.
                    unsafe { bulk::copy(block, to, from, bytes, self.policy) };
                }
                self.arrive(session, memory, rank, tile, last - first);
            }
            start += length;
            tile += 1;
        }
    }
}

impl<M: Machine> Body<M> for FlaggedTiles {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let block = session.block();
        let (me, size) = (session.comm().rank(), session.comm().size());
        let (mine, limit) = memory.part(block, round, 0);
        let mut step = 1;
        while step < size {
            let rank = ring(me, step, size);
            // What lies in staging was put there by the peer's block of this number, its part only.
            // What lies in user memory is all there, and blocks share each tile, so that one is
            // complete before the next.
            let staged = session.word(rank, word::FLAGS) & SOURCE_STAGED != 0;
            let (from, to) = if staged {
                (mine, limit)
            } else {
                (0, round.len())
            };
            let (mut low, end) = (round.start + from, round.start + to);
            let mut tile = piece(low, self.span);
            while low < end {
                let limit = (tile + 1) * self.span;
                let high = if limit < end { limit } else { end };
                let (first, last) = if staged {
                    (0, high - low)
                } else {
                    block.slice(high - low, memory.alignment)
                };
                if last > first {
                    let (at, length) = (low + first, last - first);
                    let found = memory.source_of(session, round, rank, 0, at - round.start, length);
                    let Some(from) = found else {
                        return false;
                    };
                    let to = (rank as usize * memory.count + at) * memory.size;
                    let to = memory.target.wrapping_add(to);
                    // SAFETY: the source was checked against its window; the target is the
                    // caller's.
                    unsafe { bulk::copy(block, to, from, length * memory.size, self.policy) };
                    self.arrive(session, memory, rank, tile, length);
                }
                low = high;
                tile += 1;
            }
            step += 1;
        }
        block.sync();
        true
    }
}

/// Runs an all_gather that raises a word as soon as a tile is there: `count` units of `size` bytes
/// of every rank, to row r of every rank's output; own row first, then those of the next ranks
/// round the ring. `span` is units of a tile; `words` and `arrivals` have an entry for every tile
/// of every rank, all 0.
///
/// # Safety
/// The buffers valid for what the operation reads and
/// writes; `chunk` units of each row (a multiple of [`crate::ALIGNMENT`]) must fit staging; `span`
/// is not 0.
#[kernel(
    // SAFETY: the words are those of the launch.
    on_failure(unsafe { mark_failed(block, header_constants, header_count, words, span) })
)]
pub unsafe fn all_gather_with_flags(
    session: &mut Session<impl Machine>,
    size: u64,
    source: *const u8,
    source_at: u64,
    target: *mut u8,
    chunk: u64,
    words: *mut u32,
    arrivals: *mut u64,
    span: u64,
    hint: u32,
) -> Result<(), Aborted> {
    let count = session.count();
    let policy = policy(hint);
    let span = if span == 0 { 1 } else { span as usize };
    let tiles = FlaggedTiles {
        words,
        arrivals,
        span,
        per_rank: pieces(count as usize, span),
        policy,
    };
    let memory = Memory {
        size: size as usize,
        count: count as usize,
        chunk: chunk as usize,
        source,
        source_at: WindowAddr(source_at),
        source_rows: 1,
        target,
        target_at: WindowAddr::NONE,
        target_shared: false,
        shards: 1,
        alignment: crate::ALIGNMENT,
        scalar: 0,
    };
    // SAFETY: the caller's promise.
    unsafe { tiles.own(session, &memory) };
    // SAFETY: the caller's promise.
    let done = unsafe { memory.run(session, policy, &tiles) };
    session.settle(done)
}

/// Stores [`FAILED`] in every word that is still 0.
///
/// # Safety
/// `constants` must be those of the launch's communicator, and `words` have an entry for every tile
/// of every rank.
#[inline(always)]
unsafe fn mark_failed<M: Machine>(
    block: Block<M>,
    constants: *const CommConst,
    count: u64,
    words: *mut u32,
    span: u64,
) {
    let span = if span == 0 { 1 } else { span as usize };
    // SAFETY: the caller's promise.
    let ranks = unsafe { fusewire_device::comm::Comm::new(constants) }.size() as usize;
    for index in block.elements_of_block(ranks * pieces(count as usize, span)) {
        // SAFETY: an entry of the caller's array.
        let at = unsafe { words.add(index) };
        // SAFETY: as above; words are only accessed atomically while the kernel runs.
        unsafe { mem::compare_exchange_u32(at, 0, FAILED, Order::AcqRel, Scope::System) };
    }
}

/// Tiles of this rank's input, and how their counters stand.
#[derive(Clone, Copy)]
struct CountedTiles<R> {
    rows: OwnRow<R>,
    counters: *const u32,
    /// Elements of a tile, not 0.
    span: usize,
    /// What a counter reaches when its tile is done.
    wanted: u32,
}

impl<M: Machine, R: Reducer> Body<M> for CountedTiles<R> {
    #[inline(always)]
    fn words(&self, session: &Session<M>) -> Words {
        let _ = session;
        Words {
            extra: [0; 3],
            flags: CHUNKED,
        }
    }

    /// Awaits the counters of all tiles that the round touches, in every row.
    #[inline(always)]
    unsafe fn before(&self, session: &Session<M>, memory: &Memory, round: Round) -> bool {
        let block = session.block();
        let first = piece(round.start, self.span);
        let last = pieces(round.end, self.span);
        let per_row = pieces(memory.count, self.span);
        let (me, rows) = (session.comm().rank(), session.comm().size() as usize);
        let mut failed = false;
        let mut of_row = first;
        // A round is of one tile, as a rule: lanes share the rows.
        while of_row < last && !failed {
            let mut row = block.rank() as usize;
            while row < rows && !failed {
                let tile = row * per_row + of_row;
                let expected = (tile as u64) << 32 | u64::from(self.wanted);
                let counter = self.counters.wrapping_add(tile);
                let there = session.ctx().until(wait::WaitKind::Tile, me, expected, || {
                    // SAFETY: a counter of the caller's, which is only accessed atomically while
                    // the kernel runs.
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
        !failed
    }

    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.rows.round(session, memory, round) }
    }
}

/// # Safety
/// As the kernels below promise.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // the arguments of a kernel
unsafe fn reduce_tiles<M: Machine, R: Reducer>(
    session: &mut Session<M>,
    reducer: R,
    memory: Memory,
    policy: Policy,
    counters: *const u32,
    span: u64,
    wanted: u32,
) -> bool {
    let memory = Memory {
        source_rows: session.comm().size(),
        ..memory
    };
    let tiles = CountedTiles {
        rows: OwnRow { reducer, policy },
        counters,
        span: if span == 0 { 1 } else { span as usize },
        wanted,
    };
    // SAFETY: the caller's promise.
    unsafe { memory.run(session, policy, &tiles) }
}

/// Runs a reduce_scatter by sum that takes each tile as soon as its counter says so: `count`
/// elements a rank; the input has `count` times the number of ranks. Rounds are of `chunk` elements
/// of every row; a counter of `wanted` says that its tile, `span` elements, is done.
///
/// # Safety
/// The buffers valid for what the operation reads and
/// writes; `chunk` elements of each row, rounded up to [`crate::ALIGNMENT`], must fit staging;
/// `counters` has an entry for every tile of every row; `span` is not 0.
#[kernel(each(T: f32 = f32, f16 = fusewire_device::F16, bf16 = fusewire_device::Bf16))]
pub unsafe fn reduce_scatter_on_arrival<T: Element>(
    session: &mut Session<impl Machine>,
    source: *const u8,
    source_at: u64,
    target: *mut u8,
    scalar: u64,
    chunk: u64,
    counters: *const u32,
    span: u64,
    wanted: u32,
    hint: u32,
) -> Result<(), Aborted> {
    let count = session.count();
    let reducer = StaticReducer::<T, Sum>(PhantomData);
    let none = WindowAddr::NONE.0;
    let memory = memory(
        reducer, count, source, source_at, target, none, scalar, chunk,
    );
    let policy = policy(hint);
    // SAFETY: the caller's promise.
    let done = unsafe { reduce_tiles(session, reducer, memory, policy, counters, span, wanted) };
    session.settle(done)
}

/// Does what [`reduce_scatter_on_arrival`] does, for every type and reduction: they are switched at
/// run time.
///
/// # Safety
/// As there.
#[kernel(params = ReduceScatterOnArrivalParams)]
pub unsafe fn reduce_scatter_on_arrival_any(
    session: &mut Session<impl Machine>,
    source: *const u8,
    source_at: u64,
    target: *mut u8,
    scalar: u64,
    chunk: u64,
    counters: *const u32,
    span: u64,
    wanted: u32,
    hint: u32,
) -> Result<(), Aborted> {
    let count = session.count();
    let Some(reducer) = DynReducer::of(session.call()) else {
        return session.settle(false);
    };
    let none = WindowAddr::NONE.0;
    let memory = memory(
        reducer, count, source, source_at, target, none, scalar, chunk,
    );
    let policy = policy(hint);
    // SAFETY: the caller's promise.
    let done = unsafe { reduce_tiles(session, reducer, memory, policy, counters, span, wanted) };
    session.settle(done)
}
