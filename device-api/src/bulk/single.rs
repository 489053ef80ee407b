//! The reduction of a block of one lane: tiles of a fixed number of elements, which vectorise.

use crate::element::{Element, Ordered, Reduction};
use crate::mem::{self, Policy};

use super::{AHEAD, Range, Tables, prefetch_write, reduce_one};

#[inline(always)]
pub(super) unsafe fn reduce_single<T: Element, O: Reduction<T>, const TILE: usize>(
    tables: Tables,
    range: Range,
) {
    // SAFETY: the tables are valid by the precondition; every index stays below `range.count`.
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
        index = reduce_tiles::<T, O, 8, false>(tables, range, index);
        while index < range.count {
            reduce_one::<T, O>(tables, range, index);
            index += 1;
        }
        if streaming {
            mem::drain();
        }
    }
}

/// Reduces whole tiles from `index` on, and returns the index after them. Streaming has its own
/// loop, because its stores of 16 bytes would split the accumulators of the other loop.
#[inline(always)]
pub(super) unsafe fn reduce_tiles<
    T: Element,
    O: Reduction<T>,
    const TILE: usize,
    const STREAMING: bool,
>(
    tables: Tables,
    range: Range,
    mut index: usize,
) -> usize {
    // SAFETY: the tables are valid by the precondition; every index stays below `range.count`.
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
                let source = tables.source_volatile(rank).cast::<T>();
                let next = mem::read(source.add(index).cast::<[T; TILE]>());
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
pub(super) unsafe fn stream_tile<T: Element, const TILE: usize>(to: *mut T, tile: &[T; TILE]) {
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
