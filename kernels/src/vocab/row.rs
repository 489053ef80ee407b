//! This rank's part of a row: its logits, and the sum of their exponentials.
//!
//! Partial sum j adds the columns with index = j mod 2048, in order; a fixed binary tree adds the
//! partial sums. So a row's sum depends only on the row. The row is read twice, first for its
//! greatest logit: a sum that is rescaled for each greater logit would be rounded at points that
//! depend on the division of the row among the lanes.

use fusewire_device::math::exp;
use fusewire_device::{Block, Element, Group, Machine, mem};

use super::key::{Partial, base};
use super::shared::{self, SUMS};
use crate::chunk;
use crate::fused::row::table_sum;
use crate::fused::stripe::PARTIALS;

/// Columns that a lane processes at a time.
pub(super) const CHUNK: usize = 8;
/// The same for a block of one lane.
pub(super) const TILE: usize = 64;

/// This rank's columns of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowPart<T> {
    logits: *const T,
    columns: usize,
    first: u32,
    /// True if 16 bytes can be read at once.
    aligned: bool,
}

impl<T: Element<Acc = f32>> RowPart<T> {
    /// Wraps `columns` logits, the first of which belongs to column `first`.
    ///
    /// # Safety
    /// The logits must be valid, and not be written, while the value is used.
    #[inline(always)]
    pub(super) unsafe fn new<M: Machine>(
        _: Block<M>,
        logits: *const T,
        columns: usize,
        first: u32,
    ) -> Self {
        Self {
            logits,
            columns,
            first,
            aligned: M::LANES == 1 || (logits as usize).is_multiple_of(16),
        }
    }

    /// Returns the number of columns.
    #[inline(always)]
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the index of the part's column `at` among the columns of all ranks.
    #[inline(always)]
    pub(super) fn column(&self, at: usize) -> u32 {
        self.first.wrapping_add(at as u32)
    }

    /// Returns columns `[at, at + N)`, with -inf beyond the last one. `at` is a multiple of `N`.
    #[inline(always)]
    pub(super) fn logits<M: Machine, const N: usize>(&self, at: usize) -> [f32; N] {
        let from = self.logits;
        if self.aligned && at + N <= self.columns() {
            // SAFETY: in range by the comparison; `at` is a multiple of `N`, so a chunk is aligned
            // if the first logit is.
            return chunk::widen(unsafe { chunk::read::<M, T, N>(from.add(at)) });
        }
        let mut out = [f32::NEG_INFINITY; N];
        for i in 0..N {
            if at + i < self.columns() {
                // SAFETY: in range by the comparison.
                out[i] = unsafe { mem::read(from.add(at + i)) }.widen();
            }
        }
        out
    }

    /// Returns partial sums `group * N .. (group + 1) * N` of exp(logit - base).
    #[inline(always)]
    fn sums<M: Machine, const N: usize>(&self, group: usize, base: f32) -> [f32; N] {
        let mut sums = [0f32; N];
        let mut at = group * N;
        while at < self.columns() {
            let logits = self.logits::<M, N>(at);
            // -inf beyond the row adds 0, which changes no bits.
            let mut add = |i: usize| sums[i] += exp(logits[i] - base);
            if M::LANES == 1 {
                for i in 0..N {
                    add(i);
                }
            } else {
                // A loop of this length is not unrolled, which puts the arrays into local memory.
                const { assert!(CHUNK == 8) };
                add(0);
                add(1);
                add(2);
                add(3);
                add(4);
                add(5);
                add(6);
                add(7);
            }
            at += SUMS;
        }
        sums
    }

    /// Returns `greatest`, the part's greatest logit, with the part's sum of exponentials, in every
    /// lane. All lanes together; two barriers.
    #[inline(always)]
    pub(super) fn partial<M: Machine>(&self, block: Block<M>, greatest: f32) -> Partial {
        let base = base(greatest);
        let table = shared::sums(block);
        let sum = if M::LANES == 1 {
            // SAFETY: shared memory has the table, which no other lane uses.
            unsafe {
                self.fill::<M, TILE>(block, base, table);
                tree(table)
            }
        } else {
            // SAFETY: shared memory has the table, whose last readers have passed a barrier.
            unsafe { self.fill::<M, CHUNK>(block, base, table) };
            block.sync();
            let folded = shared::folded(block);
            for j in block.elements_of_block(PARTIALS) {
                // SAFETY: the block has written the table before the barrier; only this lane
                // accesses entry j.
                unsafe { folded.add(j).write(fold(table.add(j))) };
            }
            block.sync();
            // SAFETY: the block has written the entries before the barrier.
            unsafe { table_sum(block, folded) }
        };
        Partial { greatest, sum }
    }

    /// Writes all partial sums to `table`.
    ///
    /// # Safety
    /// `table` must have [`SUMS`] elements, which no other lane accesses until the next barrier.
    #[inline(always)]
    unsafe fn fill<M: Machine, const N: usize>(&self, block: Block<M>, base: f32, table: *mut f32) {
        for group in block.elements_of_block(SUMS / N) {
            let sums = self.sums::<M, N>(group, base);
            // SAFETY: the entries of a group below `SUMS / N` are in the table.
            unsafe { table.add(group * N).cast::<[f32; N]>().write(sums) };
        }
    }
}

/// Adds, by the upper levels of the tree, the 16 entries of a table of partial sums whose indices
/// are equal modulo [`PARTIALS`]. The first one is at `table`.
///
/// # Safety
/// All 16 entries must be readable.
#[inline(always)]
unsafe fn fold(table: *const f32) -> f32 {
    const { assert!(SUMS / PARTIALS == 16) };
    // SAFETY: the precondition of this function.
    let entry = |i: usize| unsafe { table.add(i * PARTIALS).read() };
    // No array: it would lie in local memory.
    let eight = |i: usize| entry(i) + entry(i + 8);
    let four = |i: usize| eight(i) + eight(i + 4);
    let two = |i: usize| four(i) + four(i + 2);
    two(0) + two(1)
}

/// Returns the sum by the whole tree, by one lane.
///
/// # Safety
/// `table` must have [`SUMS`] elements, which no other lane accesses.
#[inline(always)]
unsafe fn tree(table: *mut f32) -> f32 {
    let mut width = SUMS / 2;
    while width > 0 {
        let mut j = 0;
        while j < width {
            // SAFETY: within the table.
            unsafe {
                let sum = table.add(j).read() + table.add(j + width).read();
                table.add(j).write(sum);
            }
            j += 1;
        }
        width /= 2;
    }
    // SAFETY: within the table.
    unsafe { table.read() }
}
