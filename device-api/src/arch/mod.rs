//! Functions that differ between machines: identity of a lane, synchronisation, clock, nap.
//!
//! Every target has the same functions; nothing outside this module and [`crate::mem`] names a
//! target.

#[cfg(target_arch = "amdgpu")]
mod amdgcn;
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
mod gpu;
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod native;
#[cfg(target_arch = "nvptx64")]
mod nvptx;

#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
pub use self::gpu::*;
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use self::native::*;

/// Bytes of block-shared scratch memory that every machine offers: tables, and a row of 8192
/// numbers.
pub const SHARED_BYTES: usize = 39 * 1024;

/// Bytes at the end of the block-shared memory that the library reserves in every kernel: for the
/// communicator's constants, and for reductions and broadcasts of the block.
pub const RESERVED_BYTES: usize = 2112;

/// Greatest number of lanes of a block, on any machine.
pub const MAX_LANES: usize = 1024;

/// Greatest number of warps of a block, on any machine.
pub const MAX_WARPS: usize = 32;

const _: () = assert!(MAX_LANES <= MAX_WARPS * 32);

/// Waits until the launches that this one depends on have ended and their writes are visible. Does
/// nothing on machines where a launch never begins before they end, that is, without "programmatic
/// dependent launch" (NVIDIA from sm_90 on). The kernel must not access the communicator before
/// this call.
#[inline(always)]
pub fn await_dependency() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    nvptx::await_dependency();
}

/// Orders accesses by multicast addresses with those by the ordinary addresses of the same bytes,
/// if this lane is on the path of causality between them. See [`crate::multimem`]. Does nothing on
/// machines without such addresses.
#[inline(always)]
pub(crate) fn alias_fence() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    nvptx::alias_fence();
}

/// Allows the launches that depend on this one to begin once every block has made this call. They
/// wait for the end of this launch by [`await_dependency`].
#[inline(always)]
pub fn allow_dependents() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    nvptx::allow_dependents();
}
