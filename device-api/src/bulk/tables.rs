//! Tables of the inputs and outputs of a reduction.

use crate::group::{Block, Machine};

/// A table of pointers that a block keeps in shared memory for a reduction: for each rank, where
/// its input lies and its scalar, and for each target, where the result goes.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// Entries of three words: source, scalar, target.
    entries: *mut [u64; 3],
}

impl Tables {
    /// Returns the bytes of the tables for `ranks` ranks.
    pub const fn bytes(ranks: u32) -> usize {
        size_of::<[u64; 3]>() * ranks as usize
    }

    /// Returns the tables at the start of `block`'s shared memory.
    ///
    /// # Safety
    /// While the tables are used, nothing else may use the first [`Tables::bytes`] of the shared
    /// memory: the kernel has no [`Shared`](crate::Shared) arrays there. The other functions must
    /// be called with ranks and targets below the number of ranks.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(block: Block<M>) -> Self {
        Self {
            entries: block.shared().cast(),
        }
    }

    /// Returns the address of word `word` of an entry.
    #[inline(always)]
    fn word(&self, index: u32, word: usize) -> *mut u64 {
        let entry = self.entries.wrapping_add(index as usize);
        entry.cast::<u64>().wrapping_add(word)
    }

    /// Sets the input of rank `rank`. One lane a rank; the block must synchronise before use.
    #[inline(always)]
    pub fn set_source(&self, rank: u32, at: *const u8, scalar: u64) {
        // SAFETY: within the table; one lane writes an entry.
        unsafe {
            self.word(rank, 0).write(at as u64);
            self.word(rank, 1).write(scalar);
        }
    }

    /// Sets target `index`. One lane an entry; the block must synchronise before use.
    #[inline(always)]
    pub fn set_target(&self, index: u32, at: *mut u8) {
        // SAFETY: within the table; one lane writes an entry.
        unsafe { self.word(index, 2).write(at as u64) };
    }

    /// Returns the input of rank `rank`.
    #[inline(always)]
    pub fn source(&self, rank: u32) -> *const u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.word(rank, 0).read() as *const u8 }
    }

    /// Returns the scalar of rank `rank`.
    #[inline(always)]
    pub fn scalar(&self, rank: u32) -> u64 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.word(rank, 1).read() }
    }

    /// Returns target `index`.
    #[inline(always)]
    pub fn target(&self, index: u32) -> *mut u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.word(index, 2).read() as *mut u8 }
    }
}
