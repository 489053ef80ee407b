//! Tables of the inputs and outputs of a reduction.

use crate::group::{Block, Machine};
use crate::layout::MAX_RANKS;

/// Tables of pointers that a block keeps in shared memory for a reduction: where each rank's input
/// lies, that rank's scalar, and where the result goes.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    sources: *mut u64,
    scalars: *mut u64,
    targets: *mut u64,
}

impl Tables {
    /// Returns the tables in `block`'s shared memory (its first 1,536 bytes).
    ///
    /// # Safety
    /// While the tables are used, nothing else may use these bytes: the kernel has no
    /// [`Shared`](crate::Shared) arrays there.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(block: Block<M>) -> Self {
        let sources = block.shared().cast::<u64>();
        Self {
            sources,
            scalars: sources.wrapping_add(MAX_RANKS),
            targets: sources.wrapping_add(2 * MAX_RANKS),
        }
    }

    /// Sets the input of rank `rank`. One lane a rank; the block must synchronise before use.
    #[inline(always)]
    pub fn set_source(&self, rank: u32, at: *const u8, scalar: u64) {
        let index = rank as usize % MAX_RANKS;
        // SAFETY: within the table; one lane writes an entry.
        unsafe {
            self.sources.add(index).write(at as u64);
            self.scalars.add(index).write(scalar);
        }
    }

    /// Sets target `index`. One lane an entry; the block must synchronise before use.
    #[inline(always)]
    pub fn set_target(&self, index: u32, at: *mut u8) {
        // SAFETY: within the table; one lane writes an entry.
        unsafe {
            self.targets
                .add(index as usize % MAX_RANKS)
                .write(at as u64)
        }
    }

    /// Returns the input of rank `rank`.
    #[inline(always)]
    pub fn source(&self, rank: u32) -> *const u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.sources.add(rank as usize % MAX_RANKS).read() as *const u8 }
    }

    /// Returns the scalar of rank `rank`.
    #[inline(always)]
    pub fn scalar(&self, rank: u32) -> u64 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.scalars.add(rank as usize % MAX_RANKS).read() }
    }

    /// Returns target `index`.
    #[inline(always)]
    pub fn target(&self, index: u32) -> *mut u8 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.targets.add(index as usize % MAX_RANKS).read() as *mut u8 }
    }
}
