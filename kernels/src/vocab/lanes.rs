//! The greatest keys by a block of several lanes.
//!
//! Each lane finds the greatest key of its columns. The k-th greatest of these maxima is the
//! threshold: at least k keys reach it, rarely many more, and all of them are in lanes whose
//! maximum reaches it. These lanes write such keys to a buffer. The position of a key in the list
//! is the number of greater keys.
//! If the buffer is too small (fewer lanes than k, or a row with its greatest logits in few lanes),
//! the block instead selects the greatest of the lanes' maxima k times. After each time, the lane
//! that had this key finds its next one.
//!
//! Keys are distinct, so both methods select the same keys.

use fusewire_device::{Block, Element, Group, Machine};

use super::key::{NONE, key, sortable};
use super::row::{CHUNK, RowPart};
use super::shared::{self, BUFFER};

/// A block that works on a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sorter<M> {
    pub(super) block: Block<M>,
    pub(super) k: usize,
}

impl<M: Machine> Sorter<M> {
    /// Returns the greatest key of `part` in every lane, and puts the `k` greatest into the list.
    /// Without another barrier, a lane may read only the entries that [`Block::elements_of_block`]
    /// gives it. All lanes together; `turn` counts the calls of [`Sorter::greatest`].
    #[inline(always)]
    pub(super) fn top<T: Element<Acc = f32>>(&self, part: &RowPart<T>, turn: &mut usize) -> u64 {
        let block = self.block;
        let mine = greatest_of_lane(block, part, u64::MAX);
        self.clear();
        // SAFETY: each lane has an entry.
        unsafe {
            shared::maxima(block).add(block.rank() as usize).write(mine);
            if block.is_leader() {
                // The least value that is greater than `NONE`, so every key reaches it.
                shared::threshold(block).write(1);
            }
        }
        let top = self.greatest(mine, turn);
        if self.k == 1 {
            if block.is_leader() {
                // SAFETY: the list has `k` entries; only the leader writes the first.
                unsafe { shared::list(block).write(top) };
            }
        } else if self.k > 1 {
            // SAFETY: the block has written the maxima before the barrier in `greatest`.
            unsafe { self.choose(part, mine, turn) };
        }
        top
    }

    /// Empties the list. Each lane clears the entries that it reads.
    #[inline(always)]
    pub(super) fn clear(&self) {
        for i in self.block.elements_of_block(self.k) {
            // SAFETY: the list has `k` entries.
            unsafe { shared::list(self.block).add(i).write(NONE) };
        }
    }

    /// Returns the greatest key of all lanes. All lanes together; one barrier.
    #[inline(always)]
    fn greatest(&self, mine: u64, turn: &mut usize) -> u64 {
        let block = self.block;
        let table = shared::warps(block, *turn);
        *turn += 1;
        let warp = block.warp();
        let size = warp.size().max(1);
        let of_warp = warp.reduce(mine, |a, b| if a > b { a } else { b });
        if warp.is_leader() {
            // SAFETY: each warp has an entry.
            unsafe { table.add((block.rank() / size) as usize).write(of_warp) };
        }
        block.sync();
        let mut top = NONE;
        let mut index = 0;
        while index * size < block.size() {
            // SAFETY: the warps have written their entries before the barrier.
            let other = unsafe { table.add(index as usize).read() };
            top = if other > top { other } else { top };
            index += 1;
        }
        top
    }

    /// Puts the `k` greatest keys into the list. All lanes together; `mine` is the greatest key of
    /// this lane.
    ///
    /// # Safety
    /// The block must have written the maxima and then passed a barrier.
    #[inline(always)]
    unsafe fn choose<T: Element<Acc = f32>>(&self, part: &RowPart<T>, mine: u64, turn: &mut usize) {
        let block = self.block;
        let mut above = 0;
        let mut other = 0;
        while other < block.size() as usize {
            // SAFETY: the table has an entry for each lane, written before a barrier by the
            // precondition.
            above += usize::from(unsafe { shared::maxima(block).add(other).read() } > mine);
            other += 1;
        }
        if mine != NONE && above + 1 == self.k {
            // SAFETY: keys are distinct, so only one lane writes the threshold.
            unsafe { shared::threshold(block).write(mine) };
        }
        block.sync();
        // SAFETY: written before the barrier.
        let threshold = unsafe { shared::threshold(block).read() };
        let mut own = 0;
        if mine >= threshold {
            each_of_lane(block, part, |key| own += u32::from(key >= threshold));
        }
        let (before, total) = block.exclusive_sum(own);
        if total as usize <= BUFFER {
            if mine >= threshold {
                let mut at = before as usize;
                let write = |key: u64| {
                    if key >= threshold {
                        // SAFETY: `at` is less than `total`, which is at most `BUFFER`.
                        unsafe { shared::buffer(block).add(at).write(key) };
                        at += 1;
                    }
                };
                each_of_lane(block, part, write);
            }
            block.sync();
            self.sort(total as usize);
            return;
        }
        let mut mine = mine;
        let lanes = block.size().max(1) as usize;
        let mut position = 0;
        while position < self.k {
            let top = self.greatest(mine, turn);
            if block.rank() as usize == position % lanes {
                // SAFETY: `position` is less than `k`; one lane writes the entry.
                unsafe { shared::list(block).add(position).write(top) };
            }
            if mine == top && top != NONE {
                mine = greatest_of_lane(block, part, top);
            }
            position += 1;
        }
        block.sync();
    }

    /// Puts the `k` greatest of the buffer's first `count` keys (at most [`BUFFER`]) into the list,
    /// which is empty. All lanes together, after a barrier; one barrier.
    #[inline(always)]
    pub(super) fn sort(&self, count: usize) {
        let block = self.block;
        let buffer = shared::buffer(block);
        for i in block.elements_of_block(count) {
            // SAFETY: `i` is less than `count`; no lane writes the buffer before the barrier.
            let key = unsafe { buffer.add(i).read() };
            let mut above = 0;
            let mut other = 0;
            while other < count {
                // SAFETY: as above, for `other`.
                above += usize::from(unsafe { buffer.add(other).read() } > key);
                other += 1;
            }
            if above < self.k && key != NONE {
                // SAFETY: `above` is less than `k`; keys differ, so one lane writes this entry.
                unsafe { shared::list(block).add(above).write(key) };
            }
        }
        block.sync();
    }
}

/// Returns the greatest key below `bound` of this lane's columns.
#[inline(always)]
fn greatest_of_lane<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    part: &RowPart<T>,
    bound: u64,
) -> u64 {
    let mut best = NONE;
    let take = |key: u64| best = if key > best && key < bound { key } else { best };
    each_of_lane(block, part, take);
    best
}

/// Calls `take` with the key of each of this lane's columns, and with [`NONE`] beyond the row.
#[inline(always)]
fn each_of_lane<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    part: &RowPart<T>,
    mut take: impl FnMut(u64),
) {
    for chunk in block.elements_of_block(part.columns().div_ceil(CHUNK)) {
        let at = chunk * CHUNK;
        let logits = part.logits::<M, CHUNK>(at);
        for i in 0..CHUNK {
            let key = key(sortable(logits[i]), part.column(at + i));
            take(if at + i < part.columns() { key } else { NONE });
        }
    }
}
