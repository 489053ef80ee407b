//! Copies and reductions over ranges of payload, by all lanes of a block together.
//!
//! Where a block has one lane the loops are tiles of a fixed number of elements that vectorise;
//! elsewhere lanes take 16-byte vectors side by side, or single elements where addresses do not
//! share their alignment. Both give the same bits: an element is reduced by itself, in rank order.

use crate::comm::Comm;
use crate::element::{Element, Number, Reduction};
use crate::group::{Block, Machine};
use crate::layout::MAX_RANKS;
use crate::mem::{self, Policy};

/// Copies `bytes` bytes; the ranges must not overlap. All lanes together.
///
/// # Safety
/// Both ranges must be valid; nobody else may write the source or access the target until the
/// block has synchronised.
#[inline(always)]
pub unsafe fn copy<M: Machine>(
    block: Block<M>,
    to: *mut u8,
    from: *const u8,
    bytes: usize,
    policy: Policy,
) {
    // SAFETY: the caller's promise; every access below stays inside the ranges.
    unsafe {
        if M::LANES == 1 {
            copy_single(to, from, bytes, policy);
            return;
        }
        let skew = (to as usize ^ from as usize) % 16;
        if skew == 0 {
            let head = (16 - from as usize % 16) % 16;
            let head = if head < bytes { head } else { bytes };
            let vectors = (bytes - head) / 16;
            for i in block.elements_of_block(head) {
                mem::write(to.add(i), mem::read(from.add(i)));
            }
            for i in block.elements_of_block(vectors) {
                let at = head + i * 16;
                mem::write_16(to.add(at), mem::read_16(from.add(at), policy), policy);
            }
            let tail = head + vectors * 16;
            for i in block.elements_of_block(bytes - tail) {
                mem::write(to.add(tail + i), mem::read(from.add(tail + i)));
            }
        } else if skew.is_multiple_of(4) && (from as usize).is_multiple_of(4) {
            let words = bytes / 4;
            for i in block.elements_of_block(words) {
                mem::write(
                    to.cast::<u32>().add(i),
                    mem::read(from.cast::<u32>().add(i)),
                );
            }
            for i in block.elements_of_block(bytes % 4) {
                mem::write(to.add(words * 4 + i), mem::read(from.add(words * 4 + i)));
            }
        } else {
            for i in block.elements_of_block(bytes) {
                mem::write(to.add(i), mem::read(from.add(i)));
            }
        }
    }
}

/// The copy of a block of one lane. Short and cached ones are explicit vector moves: the C library's
/// string moves, which it takes from some kilobytes on, are several times slower on lines that
/// another core holds.
#[inline(always)]
unsafe fn copy_single(to: *mut u8, from: *const u8, bytes: usize, policy: Policy) {
    // SAFETY: the caller's ranges.
    unsafe {
        if bytes < 64 {
            mem::copy(to, from, bytes);
        } else if policy == Policy::Streaming {
            copy_lines(to, from, bytes, Policy::Streaming);
            mem::drain();
        } else {
            copy_lines(to, from, bytes, Policy::Cached);
        }
    }
}

/// How far ahead of their stores lines are asked for.
const AHEAD: usize = 1024;

/// See the CPU's function of this name; a GPU's stores do not wait for each other.
#[inline(always)]
fn prefetch_write(at: *const u8) {
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    mem::prefetch_write(at);
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    let _ = at;
}

/// Copies at least 64 bytes: the target's lines whole, its ends by vectors that may overlap.
#[inline(always)]
unsafe fn copy_lines(to: *mut u8, from: *const u8, bytes: usize, policy: Policy) {
    // SAFETY: the caller's ranges; every access stays inside.
    unsafe {
        let line = |at: usize, policy: Policy| {
            if policy == Policy::Cached {
                prefetch_write(to.wrapping_add(at + AHEAD));
            }
            let parts = [0, 16, 32, 48].map(|part| mem::read_16(from.add(at + part), policy));
            for (part, value) in parts.into_iter().enumerate() {
                mem::write_16(to.add(at + part * 16), value, policy);
            }
        };
        line(0, Policy::Cached);
        let mut at = 64 - to as usize % 64;
        while at + 64 <= bytes {
            line(at, policy);
            at += 64;
        }
        line(bytes - 64, Policy::Cached);
    }
}

/// Tables of pointers that a block keeps in shared memory for a reduction: where each rank's input
/// lies, that rank's scalar, and where the result goes.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    sources: *mut u64,
    scalars: *mut u64,
    targets: *mut u64,
}

impl Tables {
    /// The tables in `block`'s shared memory (its first 1,536 bytes).
    #[inline(always)]
    pub fn new<M: Machine>(block: Block<M>) -> Self {
        let sources = block.shared().cast::<u64>();
        Self {
            sources,
            scalars: sources.wrapping_add(MAX_RANKS),
            targets: sources.wrapping_add(2 * MAX_RANKS),
        }
    }

    /// Sets the input of rank `rank`. One lane a rank; the block must synchronise before use.
    #[inline(always)]
    pub fn set_source(&self, rank: u32, at: *const u8, scalar: u64) {
        let index = rank as usize % MAX_RANKS;
        // SAFETY: within the table; one lane writes an entry.
        unsafe {
            self.sources.add(index).write(at as u64);
            self.scalars.add(index).write(scalar);
        }
    }

    /// Sets target `index`. One lane an entry; the block must synchronise before use.
    #[inline(always)]
    pub fn set_target(&self, index: u32, at: *mut u8) {
        // SAFETY: within the table; one lane writes an entry.
        unsafe {
            self.targets
                .add(index as usize % MAX_RANKS)
                .write(at as u64)
        }
    }

    /// Input of rank `rank`.
    #[inline(always)]
    pub fn source(&self, rank: u32) -> *const u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.sources.add(rank as usize % MAX_RANKS).read() as *const u8 }
    }

    /// Scalar of rank `rank`.
    #[inline(always)]
    pub fn scalar(&self, rank: u32) -> u64 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.scalars.add(rank as usize % MAX_RANKS).read() }
    }

    /// Target `index`.
    #[inline(always)]
    pub fn target(&self, index: u32) -> *mut u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.targets.add(index as usize % MAX_RANKS).read() as *mut u8 }
    }
}

/// A range of elements to reduce: `count` elements that start at byte 0 of every table entry.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Inputs: entries `0..ranks` of the source table, combined in this order.
    pub ranks: u32,
    /// Outputs: entries `0..targets` of the target table.
    pub targets: u32,
    /// Elements.
    pub count: usize,
    /// How the outputs treat the caches.
    pub policy: Policy,
}

/// Reduces `range` by all lanes of `block` together.
///
/// # Safety
/// Every table entry must be valid for `range.count` elements of `T`, aligned to `T`; inputs must not
/// be written and outputs not accessed by others until the block has synchronised. An output may be
/// the very same range as an input.
#[inline(always)]
pub unsafe fn reduce<M: Machine, T: Element, O: Reduction<T>>(
    block: Block<M>,
    tables: Tables,
    range: Range,
) {
    // SAFETY: the caller's promise.
    unsafe {
        if M::LANES == 1 {
            if size_of::<T>() == 8 {
                reduce_single::<T, O, 32>(tables, range);
            } else {
                reduce_single::<T, O, 64>(tables, range);
            }
        } else {
            reduce_lanes::<M, T, O>(block, tables, range);
        }
    }
}

/// As [`reduce`], in less code: for reductions that are switched at run time, of which a kernel holds
/// dozens. Small tiles or single elements, no streaming stores; on a CPU one function for all kernels.
///
/// # Safety
/// As [`reduce`].
#[inline(always)]
pub unsafe fn reduce_rare<M: Machine, T: Element, O: Reduction<T>>(
    block: Block<M>,
    tables: Tables,
    range: Range,
) {
    // SAFETY: the caller's promise; code of a machine runs only where its instruction set exists.
    unsafe {
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        match (M::LANES, M::ISA) {
            #[cfg(target_arch = "x86_64")]
            (1, 3) => rare::avx512::<T, O>(tables, range),
            #[cfg(target_arch = "x86_64")]
            (1, 2) => rare::avx2::<T, O>(tables, range),
            (1, _) => rare::baseline::<T, O>(tables, range),
            _ => rare::lanes::<M, T, O>(block, tables, range),
        }
        #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
        reduce_elements::<M, T, O>(block, tables, range);
    }
}

/// One element a lane at a time: neighbours go to neighbouring lanes, so accesses still coalesce.
///
/// # Safety
/// As [`reduce`].
#[inline(always)]
unsafe fn reduce_elements<M: Machine, T: Element, O: Reduction<T>>(
    block: Block<M>,
    tables: Tables,
    range: Range,
) {
    for index in block.elements_of_block(range.count) {
        // SAFETY: the caller's promise; `index` is in range.
        unsafe { reduce_one::<T, O>(tables, range, index) };
    }
}

/// The functions behind [`reduce_rare`], one an instruction set.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod rare {
    use super::{Block, Element, Machine, Range, Reduction, Tables, reduce_one, reduce_tiles};

    /// # Safety
    /// As [`super::reduce`].
    #[inline(always)]
    unsafe fn single<T: Element, O: Reduction<T>>(tables: Tables, range: Range) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut index = reduce_tiles::<T, O, 16, false>(tables, range, 0);
            while index < range.count {
                reduce_one::<T, O>(tables, range, index);
                index += 1;
            }
        }
    }

    /// # Safety
    /// As [`super::reduce`].
    #[inline(never)]
    pub(super) unsafe fn baseline<T: Element, O: Reduction<T>>(tables: Tables, range: Range) {
        // SAFETY: the caller's promise.
        unsafe { single::<T, O>(tables, range) }
    }

    /// # Safety
    /// As [`super::reduce`]; the machine must have AVX2.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2<T: Element, O: Reduction<T>>(tables: Tables, range: Range) {
        // SAFETY: the caller's promise.
        unsafe { single::<T, O>(tables, range) }
    }

    /// # Safety
    /// As [`super::reduce`]; the machine must have AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn avx512<T: Element, O: Reduction<T>>(tables: Tables, range: Range) {
        // SAFETY: the caller's promise.
        unsafe { single::<T, O>(tables, range) }
    }

    /// # Safety
    /// As [`super::reduce`].
    #[inline(never)]
    pub(super) unsafe fn lanes<M: Machine, T: Element, O: Reduction<T>>(
        block: Block<M>,
        tables: Tables,
        range: Range,
    ) {
        // SAFETY: the caller's promise.
        unsafe { super::reduce_elements::<M, T, O>(block, tables, range) }
    }
}

/// One element, in rank order.
#[inline(always)]
unsafe fn reduce_one<T: Element, O: Reduction<T>>(tables: Tables, range: Range, index: usize) {
    // SAFETY: the caller's tables; `index` is in range.
    unsafe {
        let load = |rank: u32| {
            O::lift(
                mem::read(tables.source(rank).cast::<T>().add(index)),
                tables.scalar(rank),
            )
        };
        let mut acc = load(0);
        let mut rank = 1;
        while rank < range.ranks {
            acc = O::combine(acc, load(rank));
            rank += 1;
        }
        let out = O::finish(acc, range.ranks);
        let mut target = 0;
        while target < range.targets {
            mem::write(tables.target(target).cast::<T>().add(index), out);
            target += 1;
        }
    }
}

#[inline(always)]
unsafe fn reduce_single<T: Element, O: Reduction<T>, const TILE: usize>(
    tables: Tables,
    range: Range,
) {
    // SAFETY: the caller's tables; every index stays below `range.count`.
    unsafe {
        let mut index = 0;
        // Streaming stores need 16-byte alignment: single elements up to it.
        let mut streaming = range.policy == Policy::Streaming && range.targets > 0;
        if streaming {
            let misaligned = tables.target(0) as usize % 16;
            let head = (16 - misaligned) % 16 / size_of::<T>();
            while index < head && index < range.count {
                reduce_one::<T, O>(tables, range, index);
                index += 1;
            }
            let mut target = 1;
            while target < range.targets {
                streaming &= tables.target(target) as usize % 16 == misaligned;
                target += 1;
            }
        }
        index = if streaming {
            reduce_tiles::<T, O, TILE, true>(tables, range, index)
        } else {
            reduce_tiles::<T, O, TILE, false>(tables, range, index)
        };
        while index < range.count {
            reduce_one::<T, O>(tables, range, index);
            index += 1;
        }
        if streaming {
            mem::drain();
        }
    }
}

/// Reduces whole tiles from `index` on; gives the index behind them. Two loops, because parts of 16
/// bytes for streaming stores would cut the accumulators of the other one into pieces.
#[inline(always)]
unsafe fn reduce_tiles<T: Element, O: Reduction<T>, const TILE: usize, const STREAMING: bool>(
    tables: Tables,
    range: Range,
    mut index: usize,
) -> usize {
    // SAFETY: the caller's tables; every index stays below `range.count`.
    unsafe {
        while index + TILE <= range.count {
            let mut acc = [T::Acc::ZERO; TILE];
            let first = mem::read(tables.source(0).cast::<T>().add(index).cast::<[T; TILE]>());
            let scalar = tables.scalar(0);
            for i in 0..TILE {
                acc[i] = O::lift(first[i], scalar);
            }
            let mut rank = 1;
            while rank < range.ranks {
                let next = mem::read(
                    tables
                        .source(rank)
                        .cast::<T>()
                        .add(index)
                        .cast::<[T; TILE]>(),
                );
                let scalar = tables.scalar(rank);
                for i in 0..TILE {
                    acc[i] = O::combine(acc[i], O::lift(next[i], scalar));
                }
                rank += 1;
            }
            let mut out = first;
            for i in 0..TILE {
                out[i] = O::finish(acc[i], range.ranks);
            }
            let mut target = 0;
            while target < range.targets {
                let to = tables.target(target).cast::<T>().add(index);
                if STREAMING {
                    stream_tile(to, &out);
                } else {
                    let mut line = 0;
                    while line < TILE * size_of::<T>() {
                        prefetch_write(to.cast::<u8>().wrapping_add(AHEAD + line));
                        line += 64;
                    }
                    mem::write(to.cast::<[T; TILE]>(), out);
                }
                target += 1;
            }
            index += TILE;
        }
        index
    }
}

#[inline(always)]
unsafe fn stream_tile<T: Element, const TILE: usize>(to: *mut T, tile: &[T; TILE]) {
    let from = tile.as_ptr().cast::<u8>();
    let mut at = 0;
    while at < TILE * size_of::<T>() {
        // SAFETY: within the tile, whose size is a multiple of 16; `to` is 16-byte aligned.
        unsafe {
            let part = from.add(at).cast::<[u64; 2]>().read_unaligned();
            mem::write_16(to.cast::<u8>().add(at), part, Policy::Streaming);
        }
        at += 16;
    }
}

#[inline(always)]
unsafe fn reduce_lanes<M: Machine, T: Element, O: Reduction<T>>(
    block: Block<M>,
    tables: Tables,
    range: Range,
) {
    // SAFETY: the caller's tables; every index stays below `range.count`.
    unsafe {
        let size = size_of::<T>();
        let first = tables.source(0) as usize;
        let mut skew = 0;
        let mut rank = 1;
        while rank < range.ranks {
            skew |= first ^ tables.source(rank) as usize;
            rank += 1;
        }
        let mut target = 0;
        while target < range.targets {
            skew |= first ^ tables.target(target) as usize;
            target += 1;
        }
        let head = (16 - first % 16) % 16 / size;
        let head = if !skew.is_multiple_of(16) || range.count < head {
            range.count
        } else {
            head
        };
        for index in block.elements_of_block(head) {
            reduce_one::<T, O>(tables, range, index);
        }
        let per = 16 / size;
        let vectors = (range.count - head) / per;
        for vector in block.elements_of_block(vectors) {
            let at = (head + vector * per) * size;
            let load = |rank| mem::read_16(tables.source(rank).add(at), range.policy);
            let mut acc = [T::Acc::ZERO; 16];
            let pair = load(0);
            let scalar = tables.scalar(0);
            for i in 0..16 / size_of::<T>() {
                acc[i] = O::lift(unpack::<T>(pair, i), scalar);
            }
            let mut rank = 1;
            while rank < range.ranks {
                let pair = load(rank);
                let scalar = tables.scalar(rank);
                for i in 0..16 / size_of::<T>() {
                    acc[i] = O::combine(acc[i], O::lift(unpack::<T>(pair, i), scalar));
                }
                rank += 1;
            }
            let mut out = [0u64; 2];
            for i in 0..16 / size_of::<T>() {
                let bits = O::finish(acc[i], range.ranks).to_bits() & mask(size);
                out[i * size / 8] |= bits << (i * size % 8 * 8);
            }
            let mut target = 0;
            while target < range.targets {
                mem::write_16(tables.target(target).add(at), out, range.policy);
                target += 1;
            }
        }
        let tail = head + vectors * per;
        for index in block.elements_of_block(range.count - tail) {
            reduce_one::<T, O>(tables, range, tail + index);
        }
    }
}

#[inline(always)]
const fn mask(size: usize) -> u64 {
    if size == 8 {
        u64::MAX
    } else {
        (1 << (size * 8)) - 1
    }
}

/// Element `index` of 16 bytes.
#[inline(always)]
pub fn unpack<T: Element>(pair: [u64; 2], index: usize) -> T {
    let byte = index * size_of::<T>();
    T::from_bits(pair[byte / 8] >> (byte % 8 * 8) & mask(size_of::<T>()))
}

/// Resolves `bytes` bytes that `rank` named, or records the failure. See [`Comm::resolve`].
#[inline(always)]
pub fn resolve(
    comm: &Comm,
    watch: &crate::wait::Watch,
    place: crate::comm::Place,
    rank: u32,
    bytes: u64,
) -> Option<*mut u8> {
    let at = comm.resolve(place, rank, bytes);
    if at.is_none() {
        watch.fail(
            crate::layout::FailureKind::Bounds,
            crate::wait::Place::Ready,
            rank,
            rank,
            bytes,
            place.0,
            0,
        );
    }
    at
}
