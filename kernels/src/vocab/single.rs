//! The greatest keys by a block of one lane: a list in order, which a tile of the row is compared
//! with at once.

use fusewire_device::{Element, Machine};

use super::key::{NONE, key, logit, sortable};
use super::row::{RowPart, TILE};

/// The `k` greatest keys among those that were offered, in order.
#[derive(Debug)]
pub(super) struct List {
    at: *mut u64,
    k: usize,
    /// The least one.
    last: u64,
}

impl List {
    /// An empty list at `at`.
    ///
    /// # Safety
    /// `at` is for `k` keys, and nobody else's while the list is in use.
    #[inline(always)]
    pub(super) unsafe fn new(at: *mut u64, k: usize) -> Self {
        for i in 0..k {
            // SAFETY: the caller's promise.
            unsafe { at.add(i).write(NONE) };
        }
        Self { at, k, last: NONE }
    }

    /// Takes `key` in if it is among the greatest; false if it is not.
    ///
    /// # Safety
    /// As [`List::new`]; `k` is not 0.
    #[inline(always)]
    pub(super) unsafe fn offer(&mut self, key: u64) -> bool {
        if key <= self.last {
            return false;
        }
        let mut i = self.k - 1;
        // SAFETY: all indices are below `k`.
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

    /// Offers a part of a row; gives its greatest logit.
    ///
    /// # Safety
    /// As [`List::new`]; the row is readable.
    #[inline(always)]
    pub(super) unsafe fn offer_part<M: Machine, T: Element<Acc = f32>>(
        &mut self,
        part: &RowPart<T>,
    ) -> f32 {
        let mut greatest = 0;
        let mut at = 0;
        while at < part.columns {
            // SAFETY: the caller's promise.
            let logits = unsafe { part.logits::<M, TILE>(at) };
            let mut words = [0; TILE];
            let mut most = 0;
            for i in 0..TILE {
                words[i] = sortable(logits[i]);
                most = if words[i] > most { words[i] } else { most };
            }
            greatest = if most > greatest { most } else { greatest };
            // In a full list a later column wins by its logit only.
            if self.k > 0 && (self.last == NONE || most > (self.last >> 32) as u32) {
                let left = part.columns - at;
                let mut i = 0;
                while i < TILE && i < left {
                    let column = part.first + (at + i) as u32;
                    // SAFETY: the caller's promise.
                    unsafe { self.offer(key(words[i], column)) };
                    i += 1;
                }
            }
            at += TILE;
        }
        greatest_logit(greatest)
    }
}

/// The logit of the upper half of the greatest key of a row; -inf where there is none but NaN.
#[inline(always)]
pub(super) fn greatest_logit(sortable: u32) -> f32 {
    if sortable == 0 {
        f32::NEG_INFINITY
    } else {
        logit(sortable)
    }
}
