//! The interface to GPU driver libraries, implemented for CUDA and HIP.
//!
//! Handles such as [`RawStream`] are the driver library's handles as integers. They are `Copy`, and
//! dropping a handle frees nothing. A handle that is passed to a method must be live: it comes from
//! this driver (or, for a stream, from the same primary context) and has not been destroyed. Safe
//! code cannot break this rule, because constructors of handles from integers and methods that
//! destroy handles are unsafe.
//!
//! Every method makes the device's primary context current on the calling thread, and restores the
//! thread's previous context (CUDA) or device (HIP) before it returns. A method allocates device
//! memory, waits for the device or uses the legacy default stream only if its documentation says
//! so.
//!
//! Every error is [`Error::Driver`](crate::Error::Driver) with the name of the library function
//! that failed and the library's message. Methods that query or wait for a stream or an event also
//! report earlier asynchronous failures on the device.

mod graph;
mod handles;
mod memory;
mod module;
mod multicast;
mod properties;
mod stream;

use core::ffi::c_void;
use core::fmt;

pub use self::graph::{CaptureStatus, GraphDriver};
pub use self::handles::{RawEvent, RawFunction, RawGraph, RawGraphExec, RawModule, RawStream};
pub use self::memory::{
    CopyDriver, Export, HANDLE_BYTES, HostMemory, Import, MemoryDriver, MemoryKind, Origin,
    RawMemory, RawMulticast,
};
pub use self::module::{FunctionProperties, LaunchShape, ModuleDriver};
pub use self::multicast::MulticastDriver;
pub use self::properties::Properties;
pub use self::stream::{EventDriver, StreamDriver, StreamPriority};
use crate::Result;

/// A function that the driver library calls. The argument is the `data` pointer that was registered
/// together with the function.
pub type Callback = unsafe extern "C" fn(*mut c_void);

/// The library and the device of a driver.
pub trait DeviceDriver: fmt::Debug + Send + Sync {
    /// Returns the name of the library: `CUDA`, `HIP`.
    fn library(&self) -> &'static str;

    /// Returns the properties of the device.
    fn properties(&self) -> &Properties;

    /// Returns true if kernels of this device can execute atomics natively in the memory of the GPU
    /// with the identifier `peer`, another one; `None` if the process does not see that GPU. The
    /// default implementation sees no other GPU.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn native_atomics(&self, peer: &[u8; 16]) -> Result<Option<bool>> {
        let _ = peer;
        Ok(None)
    }
}

/// A driver library, bound to one device. Every type that implements the traits of all subjects
/// implements this trait.
pub trait Driver:
    DeviceDriver
    + MemoryDriver
    + CopyDriver
    + ModuleDriver
    + StreamDriver
    + EventDriver
    + GraphDriver
    + MulticastDriver
{
}

impl<T> Driver for T where
    T: DeviceDriver
        + MemoryDriver
        + CopyDriver
        + ModuleDriver
        + StreamDriver
        + EventDriver
        + GraphDriver
        + MulticastDriver
{
}
