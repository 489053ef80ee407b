//! What differs between machines: identity of a lane, synchronisation, clock, nap.
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

/// Bytes of block-shared scratch memory that every machine offers.
pub const SHARED_BYTES: usize = 16 * 1024;
