//! Copies and reductions over ranges of payload, by all lanes of a block together.
//!
//! If a block has one lane, the loops are tiles of a fixed number of elements that vectorise.
//! Otherwise adjacent lanes take adjacent 16-byte vectors, or single elements if addresses do not
//! share their alignment. Both give the same bits: an element is reduced by itself, in rank order.

mod copy;
mod lanes;
mod single;
mod tables;

use crate::arch::opaque;
use crate::element::{Element, Reduction};
use crate::group::{Block, Machine};
use crate::mem::{self, Policy};

pub use copy::{copy, copy_rows, copy_shared, copy_staged};
pub use tables::Tables;

use lanes::reduce_lanes;
use single::reduce_single;

/// Bytes from a store to the line that is prefetched meanwhile.
const AHEAD: usize = 1024;

/// Prefetches a line for writing on a CPU. A GPU's stores do not wait for each other.
#[inline(always)]
fn prefetch_write(at: *const u8) {
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    mem::prefetch_write(at);
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    let _ = at;
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
    /// Cache policy of the outputs.
    pub policy: Policy,
}

/// Reduces `range` by all lanes of `block` together.
///
/// # Safety
/// Every table entry must be valid for `range.count` elements of `T`, aligned to `T`; inputs must
/// not be written and outputs not accessed by others until the block has synchronised. An output
/// may be the very same range as an input.
#[inline(always)]
pub unsafe fn reduce<M: Machine, T: Element, O: Reduction<T>>(
    block: Block<M>,
    tables: Tables,
    range: Range,
) {
    // SAFETY: the precondition of this function.
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

/// Does what [`reduce`] does, in less code: for reductions that are switched at run time, of which
/// a kernel holds dozens. Small tiles or single elements, no streaming stores; on a CPU one
/// function for all kernels.
///
/// # Safety
/// As [`reduce`].
#[inline(always)]
pub unsafe fn reduce_rare<M: Machine, T: Element, O: Reduction<T>>(
    block: Block<M>,
    tables: Tables,
    range: Range,
) {
    // SAFETY: the precondition; code of a machine runs only if its instruction set exists.
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

/// Reduces one element per lane at a time: adjacent elements go to adjacent lanes, so accesses
/// still coalesce.
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
        // SAFETY: the precondition of this function; `index` is in range.
        unsafe { reduce_one::<T, O>(tables, range, index) };
    }
}

/// The functions that [`reduce_rare`] calls, one per instruction set.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod rare {
    use super::single::reduce_tiles;
    use super::{Block, Element, Machine, Range, Reduction, Tables, reduce_one};

    /// # Safety
    /// As [`super::reduce`].
    #[inline(always)]
    unsafe fn single<T: Element, O: Reduction<T>>(tables: Tables, range: Range) {
        // SAFETY: the precondition of this function.
        unsafe {
            // At least one vector of every instruction set.
            let mut index = reduce_tiles::<T, O, 64, false>(tables, range, 0);
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
        // SAFETY: the precondition of this function.
        unsafe { single::<T, O>(tables, range) }
    }

    /// # Safety
    /// As [`super::reduce`]; the machine must have AVX2.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2<T: Element, O: Reduction<T>>(tables: Tables, range: Range) {
        // SAFETY: the precondition of this function.
        unsafe { single::<T, O>(tables, range) }
    }

    /// # Safety
    /// As [`super::reduce`]; the machine must have AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn avx512<T: Element, O: Reduction<T>>(tables: Tables, range: Range) {
        // SAFETY: the precondition of this function.
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
        // SAFETY: the precondition of this function.
        unsafe { super::reduce_elements::<M, T, O>(block, tables, range) }
    }
}

/// Reduces one element, in rank order.
#[inline(always)]
unsafe fn reduce_one<T: Element, O: Reduction<T>>(tables: Tables, range: Range, index: usize) {
    // SAFETY: the tables are valid for `range.count` elements; `index` is in range.
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
            rank = opaque(rank + 1);
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
const fn mask(size: usize) -> u64 {
    if size == 8 {
        u64::MAX
    } else {
        (1 << (size * 8)) - 1
    }
}

/// Returns the element `index` of 16 bytes.
#[inline(always)]
pub fn unpack<T: Element>(pair: [u64; 2], index: usize) -> T {
    let byte = index * size_of::<T>();
    T::from_bits(pair[byte / 8] >> (byte % 8 * 8) & mask(size_of::<T>()))
}

/// Puts `value` at element `index` of 16 bytes, whose bits there must be zero.
#[inline(always)]
pub fn pack<T: Element>(pair: &mut [u64; 2], index: usize, value: T) {
    let byte = index * size_of::<T>();
    pair[byte / 8] |= (value.to_bits() & mask(size_of::<T>())) << (byte % 8 * 8);
}
