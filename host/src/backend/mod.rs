//! Backends: libraries that carry out operations instead of Fusewire's own kernels.
//!
//! [`Backend`] has NCCL's structure: a few primitives that every library has, groups of
//! point-to-point calls that run together, and operations that are composed from the primitives if
//! a library lacks them. The communicator checks the arguments before it calls a backend. It makes
//! one call at a time, in the order of its operations, on the thread that runs the stream.
//!
//! Backends are chosen by name. [`register_backend`] adds a backend, [`backend_names`] lists them.
//! A shared library that exports the C table of the crate `fusewire-backend-abi` can also be a
//! backend. Fusewire need not be rebuilt for it. The library's path is given by
//! [`register_external_backend`] or by the environment variable `FUSEWIRE_BACKEND_PATH_<NAME>` (or
//! torchcomms' `TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`).

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

/// Arguments that all calls of a backend take.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CallArgs {
    /// Type of the elements.
    pub dtype: DType,
    /// Timeout of the call.
    pub timeout: Duration,
    /// Driver handle of the device's stream. 0 on the CPU, where calls block.
    pub stream: u64,
}

impl CallArgs {
    /// Creates the arguments of a blocking CPU call on elements of `dtype`.
    pub const fn new(dtype: DType, timeout: Duration) -> Self {
        Self {
            dtype,
            timeout,
            stream: 0,
        }
    }

    /// Returns the size of `count` elements in bytes.
    pub const fn bytes(&self, count: usize) -> usize {
        count * self.dtype.size()
    }
}

/// Route of an operation through a backend that has several routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Number of hosts that the ranks run on.
    pub hosts: u32,
    /// Steps of the route, and the reason for its choice.
    pub way: &'static str,
}

impl Route {
    /// Creates the route `way` between `hosts` hosts.
    pub const fn new(hosts: u32, way: &'static str) -> Self {
        Self { hosts, way }
    }
}

/// This rank's part of a communicator of another library.
///
/// Pointers refer to memory of the communicator's device and are aligned to the element type. A
/// `count` is a number of elements. An operation may run in place (`from == to`, or this rank's row
/// of a gathered buffer) if NCCL allows it for that operation.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Returns the name of the backend, such as `nccl`.
    fn name(&self) -> &str;

    /// Returns the version that the library reports.
    fn version(&self) -> String;

    /// Returns this rank's number.
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn size(&self) -> u32;

    /// Returns true if the backend supports `operation` on elements of `dtype`, with `reduction` if
    /// the operation reduces. This includes operations that are composed from primitives.
    fn supports(
        &self,
        operation: Operation,
        dtype: DType,
        reduction: Option<ReductionCode>,
    ) -> bool;

    /// Returns true if reductions combine the ranks in rank order, so that results are bitwise
    /// identical on every rank and in every run, as [`crate::Determinism::Bitwise`] requires.
    fn is_bitwise(&self) -> bool {
        false
    }

    /// Returns the route of `operation` over `count` elements of `dtype` (per row, for operations
    /// on rows). Returns `None` if the backend has only one route.
    fn route(
        &self,
        _operation: Operation,
        _dtype: DType,
        _reduction: Option<ReductionCode>,
        _count: usize,
    ) -> Option<Route> {
        None
    }

    /// Starts a group. Calls of [`Backend::send`] and [`Backend::recv`] in the group run together
    /// when the group ends.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn group_start(&self) -> Result<()>;

    /// Ends the group. On the CPU, waits for the calls of the group; on a GPU, enqueues them.
    ///
    /// # Errors
    /// [`Error::Backend`] of the first call that failed.
    fn group_end(&self) -> Result<()>;

    /// Reduces `count` elements and stores the result on every rank.
    ///
    /// # Safety
    /// `from` is readable and `to` writable for `count` elements until the call (on a GPU: the
    /// stream) has completed the operation.
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
    /// The preconditions of [`Backend::all_reduce`]. Only the root uses `to`.
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

    /// Copies `count` elements of the root's `buffer` to the `buffer` of every rank.
    ///
    /// # Safety
    /// `buffer` is readable on the root, and writable on other ranks, for `count` elements until
    /// the call (on a GPU: the stream) has completed the operation.
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

    /// Gathers `count` elements of every rank r as row r of `to`.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`], where `to` holds one row of `count` elements
    /// per rank.
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

    /// Reduces row r of every rank's `from` and stores the result in `to` of rank r. A row has
    /// `count` elements.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`], where `from` holds one row per rank.
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

    /// Sends `count` elements to `peer`. In a group, `peer` may be this rank.
    ///
    /// # Safety
    /// `from` is readable for `count` elements until the call (on a GPU: the stream) has completed
    /// the operation, or, in a group, until the group has completed.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn send(&self, from: *const u8, count: usize, peer: u32, args: &CallArgs) -> Result<()>;

    /// Receives `count` elements from `peer`.
    ///
    /// # Safety
    /// `to` is writable for `count` elements until the call (on a GPU: the stream) has completed
    /// the operation, or, in a group, until the group has completed.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn recv(&self, to: *mut u8, count: usize, peer: u32, args: &CallArgs) -> Result<()>;

    /// Sends row r of `from` to each rank r. The receiver stores the row of sender s as row s of
    /// `to`. Rows have `count` elements.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`], where both buffers hold one row per rank and
    /// do not overlap.
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
        // SAFETY: this method and the called function have the same preconditions.
        unsafe { compose::all_to_all(self, from, to, count, args) }
    }

    /// Runs [`Backend::all_to_all`] with a separate row length for each rank. Rows are contiguous.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_to_all`], with the given lengths.
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
        // SAFETY: this method and the called function have the same preconditions.
        unsafe { compose::all_to_all_v(self, from, from_counts, to, to_counts, args) }
    }

    /// Runs [`Backend::all_gather`] with a separate row length for each rank. Rows are contiguous.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_gather`], with the given lengths.
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
        // SAFETY: this method and the called function have the same preconditions.
        unsafe { compose::all_gather_v(self, from, to, counts, args) }
    }

    /// Sends row r of the root's `from` to rank r's `to`.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`]. Only the root uses `from`, which holds one row
    /// per rank.
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
        // SAFETY: this method and the called function have the same preconditions.
        unsafe { compose::scatter(self, from, to, count, root, args) }
    }

    /// Gathers the `from` of every rank r as row r of the root's `to`.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`]. Only the root uses `to`, which holds one row
    /// per rank.
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
        // SAFETY: this method and the called function have the same preconditions.
        unsafe { compose::gather(self, from, to, count, root, args) }
    }

    /// Blocks until all ranks have called `barrier`. On a GPU, the call returns immediately, and
    /// the stream waits until all ranks have called `barrier`.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn barrier(&self, args: &CallArgs) -> Result<()> {
        compose::barrier(self, args)
    }

    /// Registers memory that operations will use often. May do nothing. Returns a handle for
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

    /// Creates a communicator of the listed ranks, in the order of the list. Returns `None` if the
    /// library cannot split a communicator; the caller then creates one through the store. All
    /// ranks of this communicator must call `split`. All ranks of a new communicator pass the same
    /// list, and the lists of different new communicators are disjoint. Ranks that join no new
    /// communicator pass an empty list, and get `None`.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn split(&self, _ranks: &[u32]) -> Result<Option<Arc<dyn Backend>>> {
        Ok(None)
    }

    /// Aborts the communicator: all waits in it return. May be called from any thread. The
    /// communicator cannot be used afterwards.
    fn abort(&self);

    /// Returns an error if the library has detected a failure asynchronously.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn async_error(&self) -> Result<()> {
        Ok(())
    }
}

/// Creates an error that backend `backend` reports for `operation`.
pub fn backend_error(backend: &str, operation: &'static str, detail: impl Into<String>) -> Error {
    Error::Backend {
        backend: backend.to_owned(),
        operation,
        detail: detail.into(),
    }
}
