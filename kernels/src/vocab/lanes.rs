//! The greatest keys by a block of several lanes.
//!
//! Each lane finds the greatest key of its columns. The k-th greatest of these is a bound: at least
//! k keys are not less, and seldom many more; only the k lanes with a greater maximum have any.
//! They are written side by side, and a key's position in order is the number of greater ones.
//! Where they are more than the buffer holds (fewer lanes than k, or a row that puts its greatest
//! logits into few lanes), the greatest of the lanes' maxima is taken k times, and its lane looks
//! for its next.
//!
//! No two keys are equal, so what is chosen does not depend on how.

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
    /// The greatest key of `part` in every lane; the `k` greatest are in the list, of which lane i
    /// reads entry i (and all whose index is the same modulo the lanes). All lanes together; `turn`
    /// counts the calls of [`Sorter::greatest`].
    ///
    /// # Safety
    /// The row is readable.
    #[inline(always)]
    pub(super) unsafe fn top<T: Element<Acc = f32>>(
        &self,
        part: &RowPart<T>,
        turn: &mut usize,
    ) -> u64 {
        let block = self.block;
        // SAFETY: the caller's promise.
        let mine = unsafe { greatest_of_lane(block, part, u64::MAX) };
        self.clear();
        // SAFETY: each lane has an entry.
        unsafe {
            shared::maxima(block).add(block.rank() as usize).write(mine);
            if block.is_leader() {
                // Above NONE.
                shared::threshold(block).write(1);
            }
        }
        let top = self.greatest(mine, turn);
        if self.k == 1 {
            if block.is_leader() {
                // SAFETY: the list's first entry is the leader's.
                unsafe { shared::list(block).write(top) };
            }
        } else if self.k > 1 {
            // SAFETY: the caller's promise; the maxima are there since the barrier in `greatest`.
            unsafe { self.choose(part, mine, turn) };
        }
        top
    }

    /// Empties the list. An entry is that of the lane that reads it.
    #[inline(always)]
    pub(super) fn clear(&self) {
        for i in self.block.elements_of_block(self.k) {
            // SAFETY: within the list.
            unsafe { shared::list(self.block).add(i).write(NONE) };
        }
    }

    /// The greatest key of all lanes. All lanes together; one barrier.
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
            // SAFETY: the warps have written their entries, and passed a barrier.
            let other = unsafe { table.add(index as usize).read() };
            top = if other > top { other } else { top };
            index += 1;
        }
        top
    }

    /// # Safety
    /// As [`Sorter::top`]; the block has written the maxima, and passed a barrier.
    #[inline(always)]
    unsafe fn choose<T: Element<Acc = f32>>(&self, part: &RowPart<T>, mine: u64, turn: &mut usize) {
        let block = self.block;
        let mut above = 0;
        let mut other = 0;
        while other < block.size() as usize {
            // SAFETY: within the table.
            above += usize::from(unsafe { shared::maxima(block).add(other).read() } > mine);
            other += 1;
        }
        if mine != NONE && above + 1 == self.k {
            // SAFETY: keys differ, so this is one lane.
            unsafe { shared::threshold(block).write(mine) };
        }
        block.sync();
        // SAFETY: written before the barrier.
        let threshold = unsafe { shared::threshold(block).read() };
        let mut own = 0;
        if mine >= threshold {
            // SAFETY: the caller's promise.
            unsafe { each_of_lane(block, part, |key| own += u32::from(key >= threshold)) };
        }
        let (before, total) = block.exclusive_sum(own);
        if total as usize <= BUFFER {
            if mine >= threshold {
                let mut at = before as usize;
                let write = |key: u64| {
                    if key >= threshold {
                        // SAFETY: below the sum of all counts, which the buffer holds.
                        unsafe { shared::buffer(block).add(at).write(key) };
                        at += 1;
                    }
                };
                // SAFETY: the caller's promise.
                unsafe { each_of_lane(block, part, write) };
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
                // SAFETY: within the list, of which this entry is this lane's.
                unsafe { shared::list(block).add(position).write(top) };
            }
            if mine == top && top != NONE {
                // SAFETY: the caller's promise.
                mine = unsafe { greatest_of_lane(block, part, top) };
            }
            position += 1;
        }
        block.sync();
    }

    /// Puts the `k` greatest of the buffer's first `count` keys into the list, which is empty. All
    /// lanes together, behind a barrier; one barrier.
    #[inline(always)]
    pub(super) fn sort(&self, count: usize) {
        let block = self.block;
        let buffer = shared::buffer(block);
        for i in block.elements_of_block(count) {
            // SAFETY: within the buffer, which nobody writes before the barrier.
            let key = unsafe { buffer.add(i).read() };
            let mut above = 0;
            let mut other = 0;
            while other < count {
                // SAFETY: as above.
                above += usize::from(unsafe { buffer.add(other).read() } > key);
                other += 1;
            }
            if above < self.k && key != NONE {
                // SAFETY: within the list; keys differ, so one lane writes this entry.
                unsafe { shared::list(block).add(above).write(key) };
            }
        }
        block.sync();
    }
}

/// The greatest key below `bound` of this lane's columns.
///
/// # Safety
/// The row is readable.
#[inline(always)]
unsafe fn greatest_of_lane<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    part: &RowPart<T>,
    bound: u64,
) -> u64 {
    let mut best = NONE;
    let take = |key: u64| best = if key > best && key < bound { key } else { best };
    // SAFETY: the caller's promise.
    unsafe { each_of_lane(block, part, take) };
    best
}

/// `take` of the key of each of this lane's columns; of [`NONE`] beyond the row.
///
/// # Safety
/// The row is readable.
#[inline(always)]
unsafe fn each_of_lane<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    part: &RowPart<T>,
    mut take: impl FnMut(u64),
) {
    for chunk in block.elements_of_block(part.columns.div_ceil(CHUNK)) {
        let at = chunk * CHUNK;
        // SAFETY: the caller's promise.
        let logits = unsafe { part.logits::<M, CHUNK>(at) };
        for i in 0..CHUNK {
            let column = part.first + (at + i) as u32;
            let key = key(sortable(logits[i]), column);
            take(if at + i < part.columns { key } else { NONE });
        }
    }
}
