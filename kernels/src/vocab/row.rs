//! This rank's part of a row: its logits, and the sum of their exponentials.
//!
//! Partial sum j is that of the columns with index = j mod 2048, in order; the partials are added
//! by a fixed binary tree. So a row's sum depends on nothing but the row. The greatest logit is
//! found first, so a row is read twice: a sum whose reference grows on the way would round at each
//! growth, at points that depend on how the row is shared out.

use fusewire_device::math::exp;
use fusewire_device::{Block, Element, Group, Machine, mem};

use super::key::{Partial, base};
use super::shared::{self, SUMS};
use crate::fused::chunk;
use crate::fused::row::{PARTIALS, table_sum};

/// Columns that a lane takes at once.
pub(super) const CHUNK: usize = 8;
/// Columns that the lane of a block of one takes at once.
pub(super) const TILE: usize = 64;

/// Columns `first .. first + columns` of a row, which begin at `at`.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowPart<T> {
    at: *const T,
    pub(super) columns: usize,
    pub(super) first: u32,
    /// True if it can be read by 16 bytes.
    aligned: bool,
}

impl<T: Element<Acc = f32>> RowPart<T> {
    /// The part for a block.
    #[inline(always)]
    pub(super) fn new<M: Machine>(_: Block<M>, at: *const T, columns: usize, first: u32) -> Self {
        Self {
            at,
            columns,
            first,
            aligned: M::LANES == 1 || (at as usize).is_multiple_of(16),
        }
    }

    /// Columns `[at, at + N)`, -inf beyond the last one.
    ///
    /// # Safety
    /// The row is readable.
    #[inline(always)]
    pub(super) unsafe fn logits<M: Machine, const N: usize>(&self, at: usize) -> [f32; N] {
        if self.aligned && at + N <= self.columns {
            // SAFETY: within the row; `at` is a multiple of `N`.
            return chunk::widen(unsafe { chunk::read::<M, T, N>(self.at.add(at)) });
        }
        let mut out = [f32::NEG_INFINITY; N];
        for i in 0..N {
            if at + i < self.columns {
                // SAFETY: within the row.
                out[i] = unsafe { mem::read(self.at.add(at + i)) }.widen();
            }
        }
        out
    }

    /// Partial sums `group * N .. (group + 1) * N` of exp(logit - base).
    ///
    /// # Safety
    /// The row is readable.
    #[inline(always)]
    unsafe fn sums<M: Machine, const N: usize>(&self, group: usize, base: f32) -> [f32; N] {
        let mut sums = [0f32; N];
        let mut at = group * N;
        while at < self.columns {
            // SAFETY: the caller's promise.
            let logits = unsafe { self.logits::<M, N>(at) };
            // -inf beyond the row adds 0, which changes no bits.
            let mut add = |i: usize| sums[i] += exp(logits[i] - base);
            if M::LANES == 1 {
                for i in 0..N {
                    add(i);
                }
            } else {
                // A loop as long as this is not unrolled, and then the arrays lie in local memory.
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

    /// The part's maximum with its sum of exponentials, in every lane. All lanes together; two
    /// barriers.
    ///
    /// # Safety
    /// The row is readable; `greatest` is its greatest logit.
    #[inline(always)]
    pub(super) unsafe fn partial<M: Machine>(&self, block: Block<M>, greatest: f32) -> Partial {
        let base = base(greatest);
        let table = shared::sums(block);
        let sum = if M::LANES == 1 {
            // SAFETY: the table is this lane's alone.
            unsafe {
                self.fill::<M, TILE>(block, base, table);
                tree(table)
            }
        } else {
            // SAFETY: the table is this block's, and its last readers have passed a barrier since.
            unsafe { self.fill::<M, CHUNK>(block, base, table) };
            block.sync();
            let folded = shared::folded(block);
            for j in block.elements_of_block(PARTIALS) {
                // SAFETY: the block has written the table, and passed a barrier; entry j is this
                // lane's.
                unsafe { folded.add(j).write(fold(table.add(j))) };
            }
            block.sync();
            // SAFETY: as above.
            unsafe { table_sum(block, folded) }
        };
        Partial { greatest, sum }
    }

    /// # Safety
    /// As [`RowPart::sums`]; `table` is for [`SUMS`] elements.
    #[inline(always)]
    unsafe fn fill<M: Machine, const N: usize>(&self, block: Block<M>, base: f32, table: *mut f32) {
        for group in block.elements_of_block(SUMS / N) {
            // SAFETY: the caller's promise; these entries are this lane's.
            unsafe {
                let sums = self.sums::<M, N>(group, base);
                table.add(group * N).cast::<[f32; N]>().write(sums);
            }
        }
    }
}

/// The upper levels of the tree, for the entries with index = j mod [`PARTIALS`]; the first one is
/// at `table`.
///
/// # Safety
/// All of them are readable.
#[inline(always)]
unsafe fn fold(table: *const f32) -> f32 {
    const { assert!(SUMS / PARTIALS == 16) };
    // SAFETY: the caller's promise.
    let entry = |i: usize| unsafe { table.add(i * PARTIALS).read() };
    // No array: it would lie in local memory.
    let eight = |i: usize| entry(i) + entry(i + 8);
    let four = |i: usize| eight(i) + eight(i + 4);
    let two = |i: usize| four(i) + four(i + 2);
    two(0) + two(1)
}

/// The whole tree, by one lane.
///
/// # Safety
/// `table` is for [`SUMS`] elements, and nobody else's.
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
