//! Faults of a block: errors that lanes find and, on a GPU, failed waits.
//!
//! A lane must not return from a kernel alone, and kernels do not trap. A lane therefore records an
//! error, such as an index out of range, in the block's [`Fault`], and the next vote of the block
//! fails on all lanes. On a GPU, lanes record failed waits in the same way. The leader makes the
//! fault the failure of the launch at the end of the kernel, where few registers are in use.
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

    /// Returns the faults of the block that executes this.
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    #[inline(always)]
    pub(crate) fn here() -> Self {
        Self {}
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
        // SAFETY: the block's own memory; lanes that are threads access the word atomically. On a
        // GPU, the volatile load eventually sees another lane's store, which stalled waits rely on.
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

    /// Records an error of this lane, unless the block has one.
    #[cold]
    #[inline(never)]
    pub(crate) fn record(self, kind: FailureKind, code: u32, observed: u64, expected: u64) {
        self.note(Fault {
            observed,
            expected,
            ..Fault::new(kind, code)
        });
    }

    /// Writes `fault`, unless the block has one.
    #[inline(always)]
    pub(crate) fn note(self, fault: Fault) {
        let at = self.fault();
        // SAFETY: the block's own memory, which lives as long as the launch. The claim makes this
        // lane the only writer until the next launch.
        unsafe {
            if claim(&raw mut (*at).claim) {
                (&raw mut (*at).kind).write(fault.kind);
                (&raw mut (*at).observed).write(fault.observed);
                (&raw mut (*at).expected).write(fault.expected);
                (&raw mut (*at).wait).write(fault.wait);
                (&raw mut (*at).elapsed).write(fault.elapsed);
            }
        }
    }

    /// Returns the fault. Called by the leader after a barrier.
    #[inline(always)]
    pub(crate) fn read(self) -> Option<Fault> {
        // SAFETY: the lane that claimed the fault wrote the words before the barrier.
        self.is_pending().then(|| unsafe { self.fault().read() })
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
