//! The reduction of a block of several lanes: adjacent lanes take adjacent 16-byte vectors.

use crate::element::{DType, Element, Ordered, Reduction};
use crate::group::{Block, Group, Machine};
use crate::mem::{self, Policy};

use super::{Range, Tables, mask, reduce_one, unpack};

#[inline(always)]
pub(super) unsafe fn reduce_lanes<M: Machine, T: Element, O: Reduction<T>>(
    block: Block<M>,
    tables: Tables,
    range: Range,
) {
    // SAFETY: the tables are valid by the precondition; every index stays below `range.count`.
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
        let lanes = block.size() as usize;
        let mut vector = block.rank() as usize;
        // A vector of smaller elements has more sums, which take the registers that a second vector
        // would need. On AMD, a second vector's sums would be in memory.
        let doubles = size == 4 && !cfg!(target_arch = "amdgpu");
        while doubles && vector + lanes < vectors {
            reduce_vectors::<T, O, 2>(tables, range, (head + vector * per) * size, 16 * lanes);
            vector += 2 * lanes;
        }
        while vector < vectors {
            reduce_vectors::<T, O, 1>(tables, range, (head + vector * per) * size, 0);
            vector += lanes;
        }
        let tail = head + vectors * per;
        for index in block.elements_of_block(range.count - tail) {
            reduce_one::<T, O>(tables, range, tail + index);
        }
    }
}

/// Reduces `N` vectors of 16 bytes, `apart` bytes from each other, the first at byte `at`. The
/// loads of four ranks are in flight together, because each can be a round trip to another GPU.
///
/// # Safety
/// As [`super::reduce`]; the vectors are within the range and aligned.
#[inline(always)]
unsafe fn reduce_vectors<T: Element, O: Reduction<T>, const N: usize>(
    tables: Tables,
    range: Range,
    at: usize,
    apart: usize,
) {
    let ranks = range.ranks;
    let load = |rank| {
        let from = tables.source(rank).wrapping_add(at);
        let mut pairs = [[0; 2]; N];
        for n in 0..N {
            // SAFETY: the precondition of this function. Each input is read once, so caches near
            // the lanes need not keep it.
            pairs[n] = unsafe { mem::read_16(from.wrapping_add(n * apart), Policy::Streaming) };
        }
        pairs
    };
    let mut acc = [[T::Acc::ZERO; 16]; N];
    let mut fold = |rank: u32, pairs: [[u64; 2]; N], is_first: bool| {
        let scalar = tables.scalar(rank);
        for n in 0..N {
            for i in 0..16 / size_of::<T>() {
                let next = O::lift(unpack::<T>(pairs[n], i), scalar);
                acc[n][i] = if is_first {
                    next
                } else {
                    O::combine(acc[n][i], next)
                };
            }
        }
    };
    // On AMD, only three ranks are in flight for f16, because its conversion takes registers.
    let narrow = T::DTYPE == DType::F16 && cfg!(not(target_arch = "nvptx64"));
    let mut rank = if ranks >= 4 && !narrow {
        let four = [load(0), load(1), load(2), load(3)];
        fold(0, four[0], true);
        fold(1, four[1], false);
        fold(2, four[2], false);
        fold(3, four[3], false);
        4
    } else if ranks >= 2 {
        let two = [load(0), load(1)];
        fold(0, two[0], true);
        fold(1, two[1], false);
        2
    } else {
        fold(0, load(0), true);
        1
    };
    while narrow && rank + 3 <= ranks {
        let three = [load(rank), load(rank + 1), load(rank + 2)];
        fold(rank, three[0], false);
        fold(rank + 1, three[1], false);
        fold(rank + 2, three[2], false);
        rank += 3;
    }
    while !narrow && rank + 4 <= ranks {
        let four = [load(rank), load(rank + 1), load(rank + 2), load(rank + 3)];
        fold(rank, four[0], false);
        fold(rank + 1, four[1], false);
        fold(rank + 2, four[2], false);
        fold(rank + 3, four[3], false);
        rank += 4;
    }
    while rank < ranks {
        fold(rank, load(rank), false);
        rank += 1;
    }
    let size = size_of::<T>();
    let mut out = [[0u64; 2]; N];
    for n in 0..N {
        for i in 0..16 / size_of::<T>() {
            let bits = O::finish(acc[n][i], ranks).to_bits() & mask(size);
            out[n][i * size / 8] |= bits << (i * size % 8 * 8);
        }
    }
    let mut target = 0;
    while target < range.targets {
        let to = tables.target(target).wrapping_add(at);
        for n in 0..N {
            // SAFETY: the precondition of this function.
            unsafe { mem::write_16(to.wrapping_add(n * apart), out[n], range.policy) };
        }
        target += 1;
    }
}
