//! Merge of all ranks' results for some rows: keys by their order, sums in rank order.

use fusewire_device::packet::Slots;
use fusewire_device::session::Session;
use fusewire_device::{Machine, math, mem};

use super::key::{Partial, base, column, log_sum_exp, logit};
use super::lanes::Sorter;
use super::shared::{self, BUFFER};
use super::single::List;
use super::{Outputs, Words};

/// Some rows of all ranks: this rank's words, and what arrives.
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
    /// Word `index` of `rank`'s stream. `None` after a failure.
    ///
    /// # Safety
    /// The word is within the streams.
    #[inline(always)]
    unsafe fn word(&self, rank: u32, index: usize) -> Option<u64> {
        if rank == self.session.comm().rank() {
            // SAFETY: the caller's promise; the block has written its words, and passed a barrier.
            return Some(unsafe { mem::read(self.own.add(index)) });
        }
        self.slots.receive_word(self.session, rank, index).ok()
    }

    /// Puts together `count` rows, of which the first is row `first` of the outputs. False after a
    /// failure. All lanes together; ends with a barrier behind the last word that was read.
    ///
    /// # Safety
    /// The rows are within the outputs, and their words in the streams.
    #[inline(always)]
    pub(super) unsafe fn run(&self, first: usize, count: usize) -> bool {
        let block = self.session.block();
        let (me, ranks) = (self.session.comm().rank(), self.session.comm().size());
        let mut failed = false;
        for source in block.elements_of_block(ranks as usize) {
            let source = source as u32;
            failed |= source != me && self.slots.receive_header(self.session, source).is_failed();
        }
        if block.any(failed) {
            return false;
        }
        for row in block.elements_of_block(count) {
            // SAFETY: the caller's promise; a row is this lane's.
            if !unsafe { self.row_of_lane(first, row) } {
                failed = true;
                break;
            }
        }
        if block.any(failed) {
            return false;
        }
        if self.words.k > 1 {
            let mut row = 0;
            while row < count {
                // SAFETY: the caller's promise.
                let merged = unsafe {
                    if M::LANES == 1 {
                        self.keys_single(first, row)
                    } else {
                        self.keys_lanes(first, row)
                    }
                };
                if !merged {
                    return false;
                }
                row += 1;
            }
        }
        true
    }

    /// What one lane does for a row: its sum, and its greatest key where no more are wanted.
    ///
    /// # Safety
    /// As [`Merge::run`].
    #[inline(always)]
    unsafe fn row_of_lane(&self, first: usize, row: usize) -> bool {
        if self.words.has_sum {
            // SAFETY: the caller's promise.
            let Some(value) = (unsafe { self.sum(row) }) else {
                return false;
            };
            // SAFETY: the caller's promise.
            unsafe { mem::write(self.outputs.log_sum_exp.add(first + row), value) };
        }
        if self.words.k == 1 {
            let mut best = 0;
            let mut rank = 0;
            while rank < self.session.comm().size() {
                // SAFETY: the caller's promise.
                let Some(key) = (unsafe { self.word(rank, row * self.words.each()) }) else {
                    return false;
                };
                best = if key > best { key } else { best };
                rank += 1;
            }
            // SAFETY: the caller's promise.
            unsafe { self.outputs.put(first + row, best) };
        }
        true
    }

    /// The row's log-sum-exp.
    ///
    /// # Safety
    /// As [`Merge::run`].
    #[inline(always)]
    unsafe fn sum(&self, row: usize) -> Option<f32> {
        let ranks = self.session.comm().size();
        let index = row * self.words.each() + self.words.k;
        let mut greatest = f32::NEG_INFINITY;
        let mut rank = 0;
        while rank < ranks {
            // SAFETY: the caller's promise.
            let partial = Partial::from_word(unsafe { self.word(rank, index)? });
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
            // SAFETY: the caller's promise.
            let partial = Partial::from_word(unsafe { self.word(rank, index)? });
            // The sum of an infinite maximum is 0, infinite or NaN: no factor changes it.
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

    /// # Safety
    /// As [`Merge::run`].
    #[inline(always)]
    unsafe fn keys_single(&self, first: usize, row: usize) -> bool {
        let k = self.words.k;
        let at = shared::list(self.session.block());
        // SAFETY: the list is this lane's alone.
        let mut list = unsafe { List::new(at, k) };
        let mut rank = 0;
        while rank < self.session.comm().size() {
            for i in 0..k {
                let index = row * self.words.each() + i;
                // SAFETY: the caller's promise.
                let Some(key) = (unsafe { self.word(rank, index) }) else {
                    return false;
                };
                // A rank's keys descend.
                // SAFETY: as above.
                if !unsafe { list.offer(key) } {
                    break;
                }
            }
            rank += 1;
        }
        for i in 0..k {
            // SAFETY: within the list, and the outputs.
            unsafe { self.outputs.put((first + row) * k + i, at.add(i).read()) };
        }
        true
    }

    /// # Safety
    /// As [`Merge::run`].
    #[inline(always)]
    unsafe fn keys_lanes(&self, first: usize, row: usize) -> bool {
        let block = self.session.block();
        let k = self.words.k;
        // Of 32 bits, so that it is seen not to be 0.
        let each = (k as u32).max(1);
        let ranks = self.session.comm().size();
        let sorter = Sorter { block, k };
        let list = shared::list(block);
        let buffer = shared::buffer(block);
        // Behind the best of the ranks before.
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
                // SAFETY: the caller's promise.
                let Some(key) = (unsafe { self.word(source, index) }) else {
                    failed = true;
                    break;
                };
                // SAFETY: within the buffer, and this lane's.
                unsafe { buffer.add(sorted + i).write(key) };
            }
            sorter.clear();
            // The vote is a barrier, too.
            if block.any(failed) {
                return false;
            }
            sorter.sort(sorted + group as usize * k);
            rank += group;
            if rank < ranks {
                for i in block.elements_of_block(k) {
                    // SAFETY: within both; the entry is this lane's.
                    unsafe { buffer.add(i).write(list.add(i).read()) };
                }
                sorted = k;
            }
        }
        for i in block.elements_of_block(k) {
            // SAFETY: within the list, which the block has written, and the outputs.
            unsafe { self.outputs.put((first + row) * k + i, list.add(i).read()) };
        }
        true
    }
}

impl Outputs {
    /// Writes a key as entry `at`.
    ///
    /// # Safety
    /// The entry is within the outputs, and this lane's.
    #[inline(always)]
    unsafe fn put(&self, at: usize, key: u64) {
        if !self.values.is_null() {
            // SAFETY: the caller's promise.
            unsafe { mem::write(self.values.add(at), logit((key >> 32) as u32)) };
        }
        let column = column(key);
        // SAFETY: as above.
        unsafe {
            if self.wide {
                let index = i64::from(column as i32);
                mem::write(self.indices.cast::<i64>().add(at), index);
            } else {
                mem::write(self.indices.cast::<u32>().add(at), column);
            }
        }
    }
}
