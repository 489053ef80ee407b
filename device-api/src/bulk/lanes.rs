//! The reduction of a block of several lanes: 16-byte vectors side by side.

use crate::element::{Element, Number, Reduction};
use crate::group::{Block, Machine};
use crate::mem;

use super::{Range, Tables, mask, reduce_one, unpack};

/// Inputs that a lane loads before it combines the first: with the one in front of them, the four or
/// eight of a node are under way in one or two flights.
const BATCH: u32 = 3;

#[inline(always)]
pub(super) unsafe fn reduce_lanes<M: Machine, T: Element, O: Reduction<T>>(
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
            let mut add = |rank, pair| {
                let scalar = tables.scalar(rank);
                for i in 0..16 / size_of::<T>() {
                    acc[i] = O::combine(acc[i], O::lift(unpack::<T>(pair, i), scalar));
                }
            };
            let mut rank = 1;
            while rank + BATCH <= range.ranks {
                let pairs = [load(rank), load(rank + 1), load(rank + 2)];
                add(rank, pairs[0]);
                add(rank + 1, pairs[1]);
                add(rank + 2, pairs[2]);
                rank += BATCH;
            }
            while rank < range.ranks {
                add(rank, load(rank));
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
