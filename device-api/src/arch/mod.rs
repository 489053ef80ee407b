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
pub const SHARED_BYTES: usize = 38 * 1024;

/// Bytes at the end of it that are the library's own in every kernel: the communicator's constants
/// while a session lasts, and what reductions and broadcasts of the block need.
pub const RESERVED_BYTES: usize = 1088;

/// Waits until the launches that this one depends on have ended and what they wrote is visible,
/// where the launch was allowed to begin before ("programmatic dependent launch", NVIDIA from sm_90
/// on); elsewhere it began after they ended. Nothing of the communicator may be touched before.
#[inline(always)]
pub fn await_dependency() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    nvptx::await_dependency();
}

/// Allows launches that depend on this one to begin when every block has come here; what they must
/// not touch before this one has ended is behind their own [`await_dependency`].
#[inline(always)]
pub fn allow_dependents() {
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
    nvptx::allow_dependents();
}
