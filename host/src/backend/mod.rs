//! Backends: libraries that carry out what lies outside of Fusewire's own kernels.
//!
//! The trait has NCCL's shape: a few primitives that every library has, groups of point-to-point
//! calls that run at once, and operations that are composed of those where a library lacks them. A
//! backend gets calls whose arguments have been checked, one at a time and in the communicator's
//! order, on the thread that runs the stream.
//!
//! Backends are chosen by name: [`register_backend`] adds one of your own, [`backend_names`] lists
//! them. A shared library of anybody's is one too, without building Fusewire anew: it exports the C
//! table of the crate `fusewire-backend-abi` and is named by `FUSEWIRE_BACKEND_PATH_<NAME>` (or
//! torchcomms' `TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`), or by [`register_external_backend`].

mod ccl;
mod compose;
mod external;
#[cfg(feature = "gloo")]
mod gloo;
#[cfg(feature = "gloo")]
mod hierarchy;
#[cfg(feature = "gloo")]
mod interface;
mod registry;

use core::fmt;
use core::time::Duration;
use std::sync::Arc;

use fusewire_device::session::Operation;
use fusewire_device::{DType, element::ReductionCode};

pub use self::ccl::adopt_nccl;
pub use self::external::register_external_backend;
#[cfg(feature = "gloo")]
pub(crate) use self::hierarchy::Hierarchy;
pub use self::registry::{Factory, Reach, Setup, backend_names, is_backend, register_backend};
pub(crate) use self::registry::{check_name, create};

use crate::options::ReduceOp;
use crate::{Error, Result};

/// What all calls of a backend take.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CallArgs {
    /// Type of the elements.
    pub dtype: DType,
    /// Bound of the call.
    pub timeout: Duration,
    /// The device's stream as the driver names it; 0 on the CPU, where calls block.
    pub stream: u64,
}

impl CallArgs {
    /// A call over elements of `dtype`, bounded by `timeout`, that blocks (the CPU's way).
    pub const fn new(dtype: DType, timeout: Duration) -> Self {
        Self {
            dtype,
            timeout,
            stream: 0,
        }
    }

    /// Bytes of `count` elements.
    pub const fn bytes(&self, count: usize) -> usize {
        count * self.dtype.size()
    }
}

/// The way that an operation takes through a backend which has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Hosts that the ranks are on.
    pub hosts: u32,
    /// What happens, and why so.
    pub way: &'static str,
}

impl Route {
    /// The way `way` between `hosts` hosts.
    pub const fn new(hosts: u32, way: &'static str) -> Self {
        Self { hosts, way }
    }
}

/// A communicator of another library.
///
/// Pointers are to memory of the communicator's device, aligned to the element; `count`s are
/// elements. In place (`from == to`, or the own row of a gathered buffer) is allowed wherever NCCL
/// allows it.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Name, such as `nccl`.
    fn name(&self) -> &str;

    /// Version of the library, as it says itself.
    fn version(&self) -> String;

    /// This rank.
    fn rank(&self) -> u32;

    /// Number of ranks.
    fn size(&self) -> u32;

    /// Whether the library can do `operation` on elements of `dtype`, with `reduction` where it
    /// reduces, itself or composed.
    fn supports(
        &self,
        operation: Operation,
        dtype: DType,
        reduction: Option<ReductionCode>,
    ) -> bool;

    /// Whether reductions give the same bits on every rank and in every run, in rank order: what
    /// [`crate::Determinism::Bitwise`] asks for.
    fn is_bitwise(&self) -> bool {
        false
    }

    /// The way that `operation` over `count` elements of `dtype` (a row's, where there are rows)
    /// takes, where the backend has several.
    fn route(
        &self,
        _operation: Operation,
        _dtype: DType,
        _reduction: Option<ReductionCode>,
        _count: usize,
    ) -> Option<Route> {
        None
    }

    /// Starts a group: calls of [`Backend::send`] and [`Backend::recv`] run at its end, all at
    /// once.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn group_start(&self) -> Result<()>;

    /// Ends the group and waits for (or enqueues) what is in it.
    ///
    /// # Errors
    /// [`Error::Backend`] of the first call that failed.
    fn group_end(&self) -> Result<()>;

    /// Reduces `count` elements; every rank gets the result.
    ///
    /// # Safety
    /// `from` readable and `to` writable for `count` elements until the call (on a GPU: the stream)
    /// is done.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn all_reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        args: &CallArgs,
    ) -> Result<()>;

    /// Reduces `count` elements to `root`.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`]; `to` is used on the root only.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        root: u32,
        args: &CallArgs,
    ) -> Result<()>;

    /// Copies `count` elements of the root's `buffer` to every rank's.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`].
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn broadcast(
        &self,
        buffer: *mut u8,
        count: usize,
        root: u32,
        args: &CallArgs,
    ) -> Result<()>;

    /// Collects `count` elements of every rank as row r of `to`.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`]; `to` holds as many rows as ranks.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn all_gather(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        args: &CallArgs,
    ) -> Result<()>;

    /// Reduces row r (of `count` elements) of every rank's `from` to rank r.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`]; `from` holds as many rows as ranks.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn reduce_scatter(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        args: &CallArgs,
    ) -> Result<()>;

    /// Sends `count` elements to `peer`, which may be this rank within a group.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`].
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn send(&self, from: *const u8, count: usize, peer: u32, args: &CallArgs) -> Result<()>;

    /// Receives `count` elements from `peer`.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`].
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn recv(&self, to: *mut u8, count: usize, peer: u32, args: &CallArgs) -> Result<()>;

    /// Sends row r of `from` to rank r, where it becomes row (this rank) of `to`; rows have `count`
    /// elements.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`]; both hold as many rows as ranks and do not overlap.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn all_to_all(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        args: &CallArgs,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { compose::all_to_all(self, from, to, count, args) }
    }

    /// As [`Backend::all_to_all`] with a length for each rank; rows lie one after the other.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn all_to_all_v(
        &self,
        from: *const u8,
        from_counts: &[u64],
        to: *mut u8,
        to_counts: &[u64],
        args: &CallArgs,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { compose::all_to_all_v(self, from, from_counts, to, to_counts, args) }
    }

    /// As [`Backend::all_gather`] with a length for each rank.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn all_gather_v(
        &self,
        from: *const u8,
        to: *mut u8,
        counts: &[u64],
        args: &CallArgs,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { compose::all_gather_v(self, from, to, counts, args) }
    }

    /// Sends row r of the root's `from` to rank r's `to`.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`]; `from` is used on the root only.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn scatter(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        root: u32,
        args: &CallArgs,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { compose::scatter(self, from, to, count, root, args) }
    }

    /// Collects every rank's `from` as row r of the root's `to`.
    ///
    /// # Safety
    /// As [`Backend::all_reduce`]; `to` is used on the root only.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn gather(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        root: u32,
        args: &CallArgs,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { compose::gather(self, from, to, count, root, args) }
    }

    /// Returns (on a GPU: the stream continues) when all ranks have called it.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn barrier(&self, args: &CallArgs) -> Result<()> {
        compose::barrier(self, args)
    }

    /// Registers memory that will be used often; may do nothing. Returns a handle for
    /// [`Backend::deregister`].
    ///
    /// # Safety
    /// The memory must stay valid until it is deregistered.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn register(&self, _at: *mut u8, _bytes: usize) -> Result<u64> {
        Ok(0)
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn deregister(&self, _handle: u64) -> Result<()> {
        Ok(())
    }

    /// A communicator of the ranks `ranks` (in that order); `None` where the library cannot, and a
    /// new one is made through the store. All ranks of this communicator call it together, with
    /// disjoint lists: those that join none with an empty one, and they get `None`.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn split(&self, _ranks: &[u32]) -> Result<Option<Arc<dyn Backend>>> {
        Ok(None)
    }

    /// Frees whoever waits in this communicator, from any thread; it is of no use afterwards.
    fn abort(&self);

    /// A failure that the library found by itself since the last call.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn async_error(&self) -> Result<()> {
        Ok(())
    }
}

/// The error of backend `backend` in `operation`.
pub fn backend_error(backend: &str, operation: &'static str, detail: impl Into<String>) -> Error {
    Error::Backend {
        backend: backend.to_owned(),
        operation,
        detail: detail.into(),
    }
}
