//! Errors that a lane finds by itself.
//!
//! A lane must not return from a kernel alone, and kernels do not trap. A lane therefore records an
//! error, such as an index out of range, in the block's [`Fault`], and the next vote of the block
//! fails on all lanes.
//!
//! - **Who may overwrite what:** the lane that claims the fault writes its words;
//! - **after having acquired** the cleared claim word, through the barrier that ends the prologue;
//! - **released by** the block's next barrier, after which the leader reads them.

use crate::group::{Block, Machine};
use crate::layout::FailureKind;
use crate::shared_cache::{self, Fault};

/// The fault of a block, as its lanes find it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    /// The block's shared memory. On a GPU its address is known without this.
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    shared: *mut u8,
}

impl Faults {
    #[inline(always)]
    pub(crate) fn new<M: Machine>(block: Block<M>) -> Self {
        let _ = block;
        Self {
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            shared: block.shared(),
        }
    }

    #[inline(always)]
    fn fault(self) -> *mut Fault {
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        let shared = self.shared;
        #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
        let shared = crate::arch::shared();
        let cache = shared_cache::at(shared);
        // SAFETY: computes an address within the block's shared memory.
        unsafe { &raw mut (*cache).fault }
    }

    /// Clears the fault. Called by the leader before the barrier that ends the prologue.
    #[inline(always)]
    pub(crate) fn clear(self) {
        // SAFETY: the block's own memory, which no other lane accesses before the barrier.
        unsafe { (&raw mut (*self.fault()).claim).write(0) };
    }

    /// Returns true if this lane has recorded a fault. May also return true for another lane's.
    #[inline(always)]
    pub(crate) fn is_pending(self) -> bool {
        let fault = self.fault();
        // SAFETY: the block's own memory; lanes that are threads access the word atomically. A GPU
        // lane need only see its own store.
        unsafe {
            let claim = &raw mut (*fault).claim;
            #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
            let claim = core::sync::atomic::AtomicU64::from_ptr(claim)
                .load(core::sync::atomic::Ordering::Relaxed);
            #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
            let claim = claim.read_volatile();
            claim != 0
        }
    }

    /// Records a fault, unless the block has one.
    #[cold]
    #[inline(never)]
    pub(crate) fn record(self, kind: FailureKind, code: u32, observed: u64, expected: u64) {
        let fault = self.fault();
        // SAFETY: the block's own memory, which lives as long as the launch.
        if unsafe { claim(&raw mut (*fault).claim) } {
            let kind = u64::from(code) << 32 | kind as u64;
            // SAFETY: the claim makes this lane the only writer until the next launch.
            unsafe {
                (&raw mut (*fault).kind).write(kind);
                (&raw mut (*fault).observed).write(observed);
                (&raw mut (*fault).expected).write(expected);
            }
        }
    }

    /// Returns the words of a fault: kind, code, observed and expected value. Called by the leader
    /// after a barrier.
    #[inline(always)]
    pub(crate) fn read(self) -> Option<(FailureKind, u32, u64, u64)> {
        if !self.is_pending() {
            return None;
        }
        let fault = self.fault();
        // SAFETY: the lane that claimed the fault wrote the words before the barrier.
        unsafe {
            let kind = (&raw const (*fault).kind).read();
            let observed = (&raw const (*fault).observed).read();
            let expected = (&raw const (*fault).expected).read();
            Some((decode(kind as u32), (kind >> 32) as u32, observed, expected))
        }
    }
}

/// Replaces 0 by 1. Returns true if the word was 0.
///
/// # Safety
/// `word` must be an aligned word of the block's shared memory, which is only accessed atomically.
#[inline(always)]
unsafe fn claim(word: *mut u64) -> bool {
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    {
        use core::sync::atomic::{AtomicU64, Ordering};
        // SAFETY: the precondition of this function.
        let word = unsafe { AtomicU64::from_ptr(word) };
        word.compare_exchange(0, 1, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    // SAFETY: the precondition of this function.
    unsafe {
        crate::arch::claim_shared(word)
    }
}

/// Returns the kind with this code, of those that kernels record.
const fn decode(kind: u32) -> FailureKind {
    match kind {
        5 => FailureKind::Abort,
        6 => FailureKind::NoRoute,
        9 => FailureKind::Index,
        10 => FailureKind::Rank,
        11 => FailureKind::Id,
        13 => FailureKind::Capacity,
        14 => FailureKind::Word,
        15 => FailureKind::Aliasing,
        16 => FailureKind::Batch,
        17 => FailureKind::NotGrid,
        19 => FailureKind::LastBlock,
        20 => FailureKind::Ticket,
        _ => FailureKind::User,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_their_codes() {
        for kind in [
            FailureKind::Abort,
            FailureKind::NoRoute,
            FailureKind::Index,
            FailureKind::Rank,
            FailureKind::Id,
            FailureKind::User,
            FailureKind::Capacity,
            FailureKind::Word,
            FailureKind::Aliasing,
            FailureKind::Batch,
            FailureKind::NotGrid,
            FailureKind::LastBlock,
            FailureKind::Ticket,
        ] {
            assert_eq!(decode(kind as u32), kind);
        }
    }
}
