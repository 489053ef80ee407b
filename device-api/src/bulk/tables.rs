//! Tables of the inputs and outputs of a reduction.

use crate::group::{Block, Machine};

/// Tables that a block keeps in shared memory for a reduction: the address of each rank's input,
/// that rank's scalar, and the addresses of the results.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    pub(super) sources: *mut u64,
    pub(super) scalars: *mut u64,
    pub(super) targets: *mut u64,
}

impl Tables {
    /// Returns the bytes of the tables for `ranks` ranks.
    pub const fn bytes(ranks: u32) -> usize {
        3 * size_of::<u64>() * ranks as usize
    }

    /// Returns the tables for `ranks` ranks at the start of `block`'s shared memory.
    ///
    /// # Safety
    /// While the tables are used, nothing else may use the first [`Tables::bytes`] of the shared
    /// memory: the kernel has no [`Shared`](crate::Shared) arrays there. The other functions must
    /// be called with ranks and targets below `ranks`.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(block: Block<M>, ranks: u32) -> Self {
        // SAFETY: the precondition of this function.
        unsafe { Self::new_at(block, ranks, 0) }
    }

    /// Returns the tables for `ranks` ranks at byte `start` of `block`'s shared memory, a multiple
    /// of 8.
    ///
    /// # Safety
    /// As [`Tables::new`], for the bytes from `start` on, which must be in the shared memory.
    #[inline(always)]
    pub unsafe fn new_at<M: Machine>(block: Block<M>, ranks: u32, start: usize) -> Self {
        let sources = block.shared().wrapping_add(start).cast::<u64>();
        Self {
            sources,
            scalars: sources.wrapping_add(ranks as usize),
            targets: sources.wrapping_add(2 * ranks as usize),
        }
    }

    /// Sets the input of rank `rank`. One lane a rank; the block must synchronise before use.
    #[inline(always)]
    pub fn set_source(&self, rank: u32, at: *const u8, scalar: u64) {
        // SAFETY: within the table; one lane writes an entry.
        unsafe {
            self.sources.add(rank as usize).write(at as u64);
            self.scalars.add(rank as usize).write(scalar);
        }
    }

    /// Sets target `index`. One lane an entry; the block must synchronise before use.
    #[inline(always)]
    pub fn set_target(&self, index: u32, at: *mut u8) {
        // SAFETY: within the table; one lane writes an entry.
        unsafe { self.targets.add(index as usize).write(at as u64) };
    }

    /// Returns the input of rank `rank`, in a loop over ranks around the elements of a tile. LLVM
    /// vectorises no loop with volatile reads. Without them, it vectorises that loop for integers,
    /// with gathers, and not the elements.
    #[inline(always)]
    pub(super) fn source_volatile(&self, rank: u32) -> *const u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.sources.add(rank as usize).read_volatile() as *const u8 }
    }

    /// Returns the input of rank `rank`.
    #[inline(always)]
    pub fn source(&self, rank: u32) -> *const u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.sources.add(rank as usize).read() as *const u8 }
    }

    /// Returns the scalar of rank `rank`.
    #[inline(always)]
    pub fn scalar(&self, rank: u32) -> u64 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.scalars.add(rank as usize).read() }
    }

    /// Returns target `index`.
    #[inline(always)]
    pub fn target(&self, index: u32) -> *mut u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.targets.add(index as usize).read() as *mut u8 }
    }
}
