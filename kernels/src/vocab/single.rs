//! The greatest keys by a block of one lane, which keeps an ordered list and skips each tile of the
//! row whose greatest logit is not above the list's least key.

use fusewire_device::{Element, Machine};

use super::key::{NONE, key, logit, sortable};
use super::row::{RowPart, TILE};

/// The `k` greatest keys among those that were offered, in order.
#[derive(Debug)]
pub(super) struct List {
    at: *mut u64,
    k: usize,
    /// The least key.
    last: u64,
}

impl List {
    /// Returns an empty list at `at`.
    ///
    /// # Safety
    /// `at` must have room for `k` keys, which no other lane accesses while the list is in use.
    #[inline(always)]
    pub(super) unsafe fn new(at: *mut u64, k: usize) -> Self {
        for i in 0..k {
            // SAFETY: there is room for `k` keys.
            unsafe { at.add(i).write(NONE) };
        }
        Self { at, k, last: NONE }
    }

    /// Inserts `key` if it is among the greatest. Returns false if it is not.
    #[inline(always)]
    pub(super) fn offer(&mut self, key: u64) -> bool {
        if key <= self.last || self.k == 0 {
            return false;
        }
        let mut i = self.k - 1;
        // SAFETY: all indices are below `k`; the list has room for `k` keys, by `new`.
        unsafe {
            while i > 0 && self.at.add(i - 1).read() < key {
                self.at.add(i).write(self.at.add(i - 1).read());
                i -= 1;
            }
            self.at.add(i).write(key);
            self.last = self.at.add(self.k - 1).read();
        }
        true
    }

    /// Offers a part of a row. Returns its greatest logit.
    #[inline(always)]
    pub(super) fn offer_part<M: Machine, T: Element<Acc = f32>>(
        &mut self,
        part: &RowPart<T>,
    ) -> f32 {
        let mut greatest = 0;
        let mut at = 0;
        while at < part.columns() {
            let logits = part.logits::<M, TILE>(at);
            let mut words = [0; TILE];
            let mut most = 0;
            for i in 0..TILE {
                words[i] = sortable(logits[i]);
                most = if words[i] > most { words[i] } else { most };
            }
            greatest = if most > greatest { most } else { greatest };
            // Of equal logits the lower column wins, and the list has only lower columns.
            if self.k > 0 && (self.last == NONE || most > (self.last >> 32) as u32) {
                let left = part.columns() - at;
                let mut i = 0;
                while i < TILE && i < left {
                    self.offer(key(words[i], part.column(at + i)));
                    i += 1;
                }
            }
            at += TILE;
        }
        greatest_logit(greatest)
    }
}

/// Returns the logit of the upper half of the greatest key of a row; -inf if all are NaN.
#[inline(always)]
pub(super) fn greatest_logit(sortable: u32) -> f32 {
    if sortable == 0 {
        f32::NEG_INFINITY
    } else {
        logit(sortable)
    }
}
