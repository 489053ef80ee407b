//! GPUs: the identity of a lane is in registers, and synchronisation needs convergence.
//!
//! The functions are in the shim that `fusewire-build` links into every image (`shims/nvptx.ll`,
//! `shims/amdgcn.ll`), because Rust has neither convergent operations nor block-shared memory. They
//! are inlined.

#[cfg(target_arch = "amdgpu")]
pub use super::amdgcn::WARP;
#[cfg(target_arch = "nvptx64")]
pub use super::nvptx::WARP;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
pub(crate) use super::nvptx::e4m3_from_f32;
#[cfg(target_arch = "nvptx64")]
pub(crate) use super::nvptx::{bf16_from_f32, half_from_f32, half_to_f32, match_any, used_here};

// Defined in the shim with these signatures. `safe`: their only precondition is convergence,
// without which a kernel may hang, but accesses no invalid memory.
unsafe extern "unadjusted" {
    safe fn fusewire_lane() -> u32;
    safe fn fusewire_lanes() -> u32;
    safe fn fusewire_block() -> u32;
    safe fn fusewire_blocks() -> u32;
    safe fn fusewire_sync();
    safe fn fusewire_sync_warp();
    safe fn fusewire_any(value: u32) -> u32;
    safe fn fusewire_ballot(value: u32) -> u64;
    safe fn fusewire_shuffle(value: u32, from: u32) -> u32;
    safe fn fusewire_shuffle_xor(value: u32, mask: u32) -> u32;
    safe fn fusewire_shared() -> *mut u8;
    fn fusewire_shared_claim(at: *mut u64) -> u64;
    safe fn fusewire_clock_ns() -> u64;
    safe fn fusewire_nap(ns: u32);
    safe fn fusewire_panic() -> !;
    safe fn fusewire_sqrt_f32(value: f32) -> f32;
}

/// Returns the index of this lane in its block.
#[inline(always)]
pub fn lane() -> u32 {
    fusewire_lane()
}

/// Returns the number of lanes in the block.
#[inline(always)]
pub fn lanes() -> u32 {
    fusewire_lanes()
}

/// Returns the index of this block in the launch.
#[inline(always)]
pub fn block() -> u32 {
    fusewire_block()
}

/// Returns the number of blocks in the launch.
#[inline(always)]
pub fn blocks() -> u32 {
    fusewire_blocks()
}

/// Waits at a barrier for all lanes of the block; all its lanes together. Orders the block's shared
/// and global memory at block scope; publishes nothing to another rank.
#[inline(always)]
pub fn sync() {
    fusewire_sync();
}

/// Waits at a barrier for all lanes of the warp; all its lanes together.
#[inline(always)]
pub fn sync_warp() {
    fusewire_sync_warp();
}

/// Returns true in every lane of the block if `value` is true in one; all lanes together. Also a
/// barrier.
#[inline(always)]
pub fn any(value: bool) -> bool {
    fusewire_any(u32::from(value)) != 0
}

/// Returns the warp's votes, bit i for lane i; all lanes of the warp together.
#[inline(always)]
pub fn ballot(value: bool) -> u64 {
    fusewire_ballot(u32::from(value))
}

/// Returns `value` of lane `from` of the warp; all lanes of the warp together.
#[inline(always)]
pub fn shuffle(value: u32, from: u32) -> u32 {
    fusewire_shuffle(value, from)
}

/// Returns `value` of the lane whose index differs by `mask` (exclusive or); all lanes of the warp
/// together.
#[inline(always)]
pub fn shuffle_xor(value: u32, mask: u32) -> u32 {
    fusewire_shuffle_xor(value, mask)
}

/// Returns the block-shared scratch memory, [`super::SHARED_BYTES`] bytes, 128-byte aligned.
#[inline(always)]
pub fn shared() -> *mut u8 {
    fusewire_shared()
}

/// Replaces 0 by 1 in a word of the block-shared memory, atomically. Returns true if it was 0.
///
/// # Safety
/// `at` must be an aligned word of the block-shared memory.
#[inline(always)]
pub(crate) unsafe fn claim_shared(at: *mut u64) -> bool {
    // SAFETY: the precondition of this function.
    unsafe { fusewire_shared_claim(at) == 0 }
}

/// Returns the nanoseconds of a monotonic clock with an arbitrary epoch. Its resolution is up to a
/// microsecond (NVIDIA) or 10 ns (AMD).
#[inline(always)]
pub fn clock_ns() -> u64 {
    fusewire_clock_ns()
}

/// Pauses between two polls of the same word: does nothing, because a load from a peer takes long
/// enough.
#[inline(always)]
pub fn pause() {}

/// Yields issue slots for a moment; `round` counts the naps of one wait.
#[inline(always)]
pub fn nap(round: u32) {
    fusewire_nap(if round < 1000 { 100 } else { 2000 });
}

/// Returns the square root, correctly rounded.
#[inline(always)]
pub fn sqrt_f32(value: f32) -> f32 {
    fusewire_sqrt_f32(value)
}

/// Stops the grid, if no error can be reported. `fusewire-build check` finds every kernel that can
/// reach this.
#[cold]
#[inline(always)]
pub fn trap() -> ! {
    fusewire_panic()
}

/// Returns `value`. Hides nothing from the compiler, because a GPU's loops are not vectorised.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    value
}
