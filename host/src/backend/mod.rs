//! Backends: libraries that carry out operations instead of Fusewire's own kernels.
//!
//! A [`Backend`] executes an [`Op`], which has what the ranks agree on, with [`Operands`], which
//! have this rank's buffers. Sends and receives in a group run together. [`compose`] carries out
//! the operations that a library lacks by groups of sends and receives. The communicator checks the
//! operands before it calls a backend. It makes one call at a time, in the order of its operations,
//! on the thread that runs the stream.
//!
//! Backends are chosen by name. [`register_backend`] adds a backend, [`backend_names`] lists them.
//! A shared library that exports the C table of the crate `fusewire-backend-abi` can also be a
//! backend. Fusewire need not be rebuilt for it. The library's path is given by
//! [`register_external_backend`] or by the environment variable `FUSEWIRE_BACKEND_PATH_<NAME>` (or
//! torchcomms' `TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`).

mod ccl;
pub mod compose;
mod external;
#[cfg(feature = "gloo")]
pub(crate) mod gloo;
#[cfg(feature = "gloo")]
mod interface;
mod registry;
mod setup;

use core::any::Any;
use core::fmt;
use core::time::Duration;
use std::sync::Arc;

pub use self::ccl::adopt_nccl;
pub use self::registry::{backend_names, is_backend, register_backend, register_external_backend};
pub(crate) use self::registry::{check_name, create};
pub use self::setup::{Factory, Reach, Setup};

use crate::collective::{Op, Operands};
use crate::{Error, Result};

/// Arguments that all calls of a backend take.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CallArgs {
    /// Timeout of the call.
    pub timeout: Duration,
    /// Driver handle of the device's stream. 0 on the CPU, where calls block.
    pub stream: u64,
}

impl CallArgs {
    /// Creates the arguments of a blocking CPU call.
    pub const fn new(timeout: Duration) -> Self {
        Self { timeout, stream: 0 }
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
/// The trait extends [`Any`], so a program can reach the methods that a backend has besides those
/// of the trait:
///
/// ```
/// # use core::any::Any;
/// # fn example<MyBackend: fusewire::backend::Backend>(comm: &fusewire::Communicator) {
/// let backend = comm.backend_impl().expect("a backend");
/// let own: Option<&MyBackend> = (&**backend as &dyn Any).downcast_ref();
/// # }
/// ```
pub trait Backend: Any + Send + Sync + fmt::Debug {
    /// Returns the name of the backend, such as `nccl`.
    fn name(&self) -> &str;

    /// Returns the version that the library reports.
    fn version(&self) -> String;

    /// Returns this rank's number.
    fn rank(&self) -> u32;

    /// Returns the number of ranks.
    fn size(&self) -> u32;

    /// Returns true if the backend can execute `op`, whatever its count, root or peer.
    fn supports(&self, op: &Op) -> bool;

    /// Returns true if reductions combine the ranks in rank order, so that results are bitwise
    /// identical on every rank and in every run, as [`crate::Determinism::Bitwise`] requires.
    fn is_bitwise(&self) -> bool {
        false
    }

    /// Returns true if [`Backend::execute`] reads the factor of a scaled sum from
    /// [`Operands::factor`], where that is a tensor. Otherwise the communicator reads the factor on
    /// the CPU, and refuses it on a GPU.
    fn reads_factor(&self) -> bool {
        false
    }

    /// Returns the route of `op`, or `None` if the backend has only one route.
    fn route(&self, _op: &Op) -> Option<Route> {
        None
    }

    /// Starts a group. An [`Op::Send`] or [`Op::Recv`] in the group runs when the group ends,
    /// together with the others. Its peer may be this rank.
    ///
    /// # Errors
    /// [`Error::Backend`].
    fn group_start(&self) -> Result<()>;

    /// Ends the group. On the CPU, waits for the calls of the group; on a GPU, enqueues them.
    ///
    /// # Errors
    /// [`Error::Backend`] of the first call that failed.
    fn group_end(&self) -> Result<()>;

    /// Executes `op` with this rank's buffers. On the CPU, blocks until the operation is complete.
    /// On a GPU, enqueues it on the stream of `args`.
    ///
    /// The communicator has checked lengths, types and overlap. An all_to_all or all_to_all_v has
    /// separate buffers. Other operations may run in place if NCCL allows it (input and output
    /// equal, or this rank's row of the buffer with rows).
    ///
    /// # Safety
    /// The operands are aligned memory of the communicator's device that `op` fits. They stay valid
    /// until the operation is complete: until this method returns on the CPU, until the stream has
    /// completed the operation on a GPU, and in a group until the group has.
    ///
    /// # Errors
    /// [`Error::Backend`].
    unsafe fn execute(&self, op: &Op, operands: &Operands<'_>, args: &CallArgs) -> Result<()>;

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

/// Reason why a backend refuses a fused operation.
pub(crate) const ONLY_KERNELS: &str = "only Fusewire's kernels implement this operation";

/// Creates an error that backend `backend` reports for `operation`.
pub fn backend_error(backend: &str, operation: &'static str, detail: impl Into<String>) -> Error {
    Error::Backend {
        backend: backend.to_owned(),
        operation,
        detail: detail.into(),
    }
}
