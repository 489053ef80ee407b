//! Memory: the only module that touches memory which another lane, block or rank can write.
//!
//! Three kinds of access:
//! - **words**: 4 and 8 byte loads, stores and read-modify-writes with an explicit [`Order`] and
//!   [`Scope`], of which signals, credits and counters are made;
//! - **packets**: two 8-byte words (each atomic by itself) in one 16-byte access;
//! - **payload**: plain reads and writes of data that a signal or a barrier protects.
//!
//! Nothing here takes or makes a reference to shared memory: on a GPU `&T` becomes a
//! non-coherent load.
//!
//! Under `cfg(loom)` and `cfg(shuttle)` every access resolves through a table of the model
//! checker's own atomics and cells (`model`), so that it checks the same source that runs on a GPU.

#[cfg(target_arch = "amdgpu")]
mod amdgcn;
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
mod gpu;
#[cfg(any(loom, shuttle))]
pub mod model;
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
#[cfg_attr(any(loom, shuttle), allow(dead_code, unreachable_pub))]
mod native;
#[cfg(target_arch = "nvptx64")]
mod nvptx;

#[cfg(target_arch = "amdgpu")]
pub use self::amdgcn::*;
#[cfg(any(loom, shuttle))]
pub use self::model::access::*;
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu", loom, shuttle)))]
pub use self::native::*;
#[cfg(target_arch = "nvptx64")]
pub use self::nvptx::*;

/// Memory order of an access, in the terms of C++ and Rust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Atomic, orders nothing.
    Relaxed,
    /// Later accesses of this lane stay after it (loads).
    Acquire,
    /// Earlier accesses of this lane stay before it (stores).
    Release,
    /// Both (read-modify-writes and fences).
    AcqRel,
}

/// Order of a signal that says only that this block has read what it needs. On a GPU, the loads of
/// lanes that have passed a barrier of the block are complete, because the lanes have used their
/// values. On a CPU, only a release orders loads before a later store.
pub(crate) const AFTER_READS: Order = if cfg!(any(target_arch = "nvptx64", target_arch = "amdgpu"))
{
    Order::Relaxed
} else {
    Order::Release
};

/// Set of threads that take part in the ordering. A peer is reached by [`Scope::System`] only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Lanes of this block.
    Block,
    /// Lanes of this GPU.
    Device,
    /// Other GPUs, the host, NICs.
    System,
}

/// Cache policy for payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Will be used again soon.
    Cached,
    /// Passes through once: streaming stores on a CPU, no allocation in L1 on a GPU.
    Streaming,
}

/// Order of the store that ends a launch of a block. On a GPU, the end of a kernel publishes what
/// it has written to the work that follows it.
pub(crate) const AT_END: Order = AFTER_READS;

/// Order of the exchange that begins a launch of a block. On a GPU, the stream orders a launch
/// after the launch before, whose last store releases nothing ([`AT_END`]).
pub(crate) const AT_BEGIN: Order = if cfg!(any(target_arch = "nvptx64", target_arch = "amdgpu")) {
    Order::Relaxed
} else {
    Order::Acquire
};

/// Atomics for state that lanes share on a CPU: the standard library's, or a model checker's.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub mod prim {
    #[cfg(not(any(loom, shuttle)))]
    pub use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    #[cfg(loom)]
    pub use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    #[cfg(shuttle)]
    pub use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}
