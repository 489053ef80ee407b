//! Merge of all ranks' results for some rows: keys by their order, sums in rank order.

use fusewire_device::packet::Slots;
use fusewire_device::session::{Aborted, Session};
use fusewire_device::{Machine, math, mem};

use super::key::{Partial, base, column, log_sum_exp, logit};
use super::lanes::Sorter;
use super::shared::{self, BUFFER};
use super::single::List;
use super::{Outputs, Words};

/// Some rows of all ranks: this rank's words, and the packets of the others.
#[derive(Debug)]
pub(super) struct Merge<'a, M> {
    pub(super) session: &'a Session<M>,
    pub(super) slots: &'a Slots,
    pub(super) words: Words,
    /// This rank's words.
    pub(super) own: *const u64,
    pub(super) outputs: Outputs,
}

impl<M: Machine> Merge<'_, M> {
    /// Returns word `index` of `rank`'s stream, or `None` after a failure.
    ///
    /// # Safety
    /// `own` must have the word.
    #[inline(always)]
    unsafe fn word(&self, rank: u32, index: usize) -> Option<u64> {
        if rank == self.session.rank() {
            // SAFETY: the precondition. The block has written its words before a barrier.
            return Some(unsafe { mem::read(self.own.add(index)) });
        }
        self.slots.receive_word(self.session, rank, index).ok()
    }

    /// Writes the results of `count` rows, of which the first is row `first` of the outputs. All
    /// lanes together; ends with a barrier after the last word was read.
    ///
    /// # Safety
    /// The outputs must have these rows, and `own` their words.
    #[inline(always)]
    pub(super) unsafe fn run(&self, first: usize, count: usize) -> Result<(), Aborted> {
        let block = self.session.block();
        let (me, ranks) = (self.session.rank(), self.session.ranks());
        let mut failed = false;
        for source in block.elements_of_block(ranks as usize) {
            let source = source as u32;
            failed |= source != me && self.slots.receive_header(self.session, source).is_failed();
        }
        self.session.settle(!block.any(failed))?;
        for row in block.elements_of_block(count) {
            // SAFETY: `row` is below `count`; the rest is the precondition.
            if unsafe { self.row_of_lane(first, row) }.is_none() {
                failed = true;
                break;
            }
        }
        self.session.settle(!block.any(failed))?;
        if self.words.k > 1 {
            let mut row = 0;
            while row < count {
                // SAFETY: `row` is below `count`; the rest is the precondition.
                let merged = unsafe {
                    if M::LANES == 1 {
                        self.keys_single(first, row)
                    } else {
                        self.keys_lanes(first, row)
                    }
                };
                self.session.settle(merged)?;
                row += 1;
            }
        }
        Ok(())
    }

    /// Writes the results of a row that one lane computes: the log-sum-exp, and the greatest key if
    /// `k` is 1. Returns `None` after a failure.
    ///
    /// # Safety
    /// As [`Merge::run`]; `row` is below its count.
    #[inline(always)]
    unsafe fn row_of_lane(&self, first: usize, row: usize) -> Option<()> {
        if self.words.has_sum {
            // SAFETY: the words and the outputs have this row.
            unsafe {
                let sum = self.sum(row)?;
                mem::write(self.outputs.log_sum_exp.add(first + row), sum);
            }
        }
        if self.words.k == 1 {
            let mut best = 0;
            let mut rank = 0;
            while rank < self.session.ranks() {
                // SAFETY: the words have this row.
                let key = unsafe { self.word(rank, row * self.words.each()) }?;
                best = if key > best { key } else { best };
                rank += 1;
            }
            // SAFETY: the outputs have this row, of which no other lane writes the entry.
            unsafe { self.outputs.put(first + row, best) };
        }
        Some(())
    }

    /// Returns the row's log-sum-exp, or `None` after a failure.
    ///
    /// # Safety
    /// As [`Merge::run`]; `row` is below its count.
    #[inline(always)]
    unsafe fn sum(&self, row: usize) -> Option<f32> {
        let ranks = self.session.comm().size();
        let index = row * self.words.each() + self.words.k;
        let mut greatest = f32::NEG_INFINITY;
        let mut rank = 0;
        while rank < ranks {
            // SAFETY: the words have this row.
            let partial = Partial::from_word(unsafe { self.word(rank, index) }?);
            greatest = if partial.greatest > greatest {
                partial.greatest
            } else {
                greatest
            };
            rank += 1;
        }
        let common = base(greatest);
        let mut sum = 0.0;
        let mut rank = 0;
        while rank < ranks {
            // SAFETY: the words have this row.
            let partial = Partial::from_word(unsafe { self.word(rank, index) }?);
            // A sum whose maximum is infinite is 0, infinite or NaN: a finite positive factor
            // changes none.
            let factor = if partial.greatest.abs() == f32::INFINITY {
                1.0
            } else {
                math::exp(partial.greatest - common)
            };
            sum += partial.sum * factor;
            rank += 1;
        }
        Some(log_sum_exp(common, sum))
    }

    /// Writes the `k` greatest keys of a row, by one lane. Returns false after a failure.
    ///
    /// # Safety
    /// As [`Merge::run`]; `row` is below its count.
    #[inline(always)]
    unsafe fn keys_single(&self, first: usize, row: usize) -> bool {
        let k = self.words.k;
        let at = shared::list(self.session.block());
        // SAFETY: shared memory has a list of `MAX_K` keys, which no other lane uses.
        let mut list = unsafe { List::new(at, k) };
        let mut rank = 0;
        while rank < self.session.comm().size() {
            for i in 0..k {
                let index = row * self.words.each() + i;
                // SAFETY: the words have this row.
                let Some(key) = (unsafe { self.word(rank, index) }) else {
                    return false;
                };
                // A rank's keys descend.
                if !list.offer(key) {
                    break;
                }
            }
            rank += 1;
        }
        for i in 0..k {
            // SAFETY: `i` is below the length of the list; the outputs have this row.
            unsafe { self.outputs.put((first + row) * k + i, at.add(i).read()) };
        }
        true
    }

    /// Does what [`Merge::keys_single`] does, by all lanes together.
    ///
    /// # Safety
    /// As [`Merge::run`]; `row` is below its count.
    #[inline(always)]
    unsafe fn keys_lanes(&self, first: usize, row: usize) -> bool {
        let block = self.session.block();
        let k = self.words.k;
        // A u32, so that the compiler sees that the divisor is not 0.
        let each = (k as u32).max(1);
        let ranks = self.session.comm().size();
        let sorter = Sorter { block, k };
        let list = shared::list(block);
        let buffer = shared::buffer(block);
        // The greatest keys of the previous ranks take the first entries of the buffer.
        let most = ((BUFFER - super::MAX_K) as u32 / each).max(1);
        let mut sorted = 0;
        let mut rank = 0;
        while rank < ranks {
            let group = if ranks - rank < most {
                ranks - rank
            } else {
                most
            };
            let mut failed = false;
            for i in block.elements_of_block(group as usize * k) {
                let (source, position) = (rank + i as u32 / each, i as u32 % each);
                let index = row * self.words.each() + position as usize;
                // SAFETY: the words have this row.
                let Some(key) = (unsafe { self.word(source, index) }) else {
                    failed = true;
                    break;
                };
                // SAFETY: `sorted` is at most `MAX_K`, and a group has at most `BUFFER - MAX_K`
                // keys; one lane writes the entry.
                unsafe { buffer.add(sorted + i).write(key) };
            }
            sorter.clear();
            // The vote is also the barrier that `Sorter::sort` requires.
            if block.any(failed) {
                return false;
            }
            sorter.sort(sorted + group as usize * k);
            rank += group;
            if rank < ranks {
                for i in block.elements_of_block(k) {
                    // SAFETY: `i` is less than `k`; one lane accesses both entries.
                    unsafe { buffer.add(i).write(list.add(i).read()) };
                }
                sorted = k;
            }
        }
        for i in block.elements_of_block(k) {
            // SAFETY: `i` is below the length of the list, which the block wrote before a barrier;
            // the outputs have this row, and one lane writes an entry.
            unsafe { self.outputs.put((first + row) * k + i, list.add(i).read()) };
        }
        true
    }
}

impl Outputs {
    /// Writes a key as entry `at`.
    ///
    /// # Safety
    /// The outputs must have the entry, and no other lane may write it.
    #[inline(always)]
    unsafe fn put(&self, at: usize, key: u64) {
        let column = column(key);
        // SAFETY: the precondition. An index of 8 bytes is two words.
        unsafe {
            if !self.values.is_null() {
                mem::write(self.values.add(at), logit((key >> 32) as u32));
            }
            if self.wide {
                let sign = ((column as i32) >> 31) as u32;
                mem::write(self.indices.add(2 * at).cast::<[u32; 2]>(), [column, sign]);
            } else {
                mem::write(self.indices.add(at), column);
            }
        }
    }
}
