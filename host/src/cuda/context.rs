//! A device with its primary context, and the calling thread's relation to both.

use core::ffi::c_int;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use core::sync::atomic::AtomicU32;
use std::sync::Mutex;

use cudarc::driver::sys;

use super::library::Library;
use super::staging::Staging;
use crate::Result;
use crate::gpu::driver::Properties;

/// A device of the driver library. Lives as long as the process: a primary context is never
/// released.
pub(super) struct Cuda {
    pub(super) library: &'static Library,
    pub(super) device: sys::CUdevice,
    /// The device's primary context (`CUcontext`).
    pub(super) context: usize,
    pub(super) properties: Properties,
    /// Major number of the compute capability.
    pub(super) major: u32,
    /// Types of handles (`CUmemAllocationHandleType`, or-ed) that shared memory is created with; 0
    /// where it is allocated as a whole and shared by IPC.
    pub(super) handles: u32,
    /// Whether memory can be registered with a network card.
    pub(super) rdma: bool,
    /// Shared memory is allocated in multiples of so many bytes; each multiple can be bound to a
    /// multicast object.
    pub(super) granularity: u64,
    /// Streams that live.
    pub(super) streams: AtomicU32,
    pub(super) staging: Mutex<Staging>,
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("properties", &self.properties)
            .field("handles", &self.handles)
            .field("granularity", &self.granularity)
            .finish_non_exhaustive()
    }
}

impl Cuda {
    /// Makes the primary context current on this thread; it stays so.
    pub(super) fn enter(&self) -> Result<&'static Library> {
        enter(self.library, self.context)?;
        Ok(self.library)
    }

    /// As [`Cuda::enter`], and until the value is dropped this thread may make calls that a capture
    /// forbids.
    pub(super) fn relaxed(&self) -> Result<RelaxedCapture> {
        RelaxedCapture::new(self.enter()?)
    }
}

/// Makes a context current on this thread.
pub(super) fn enter(library: &Library, context: usize) -> Result<()> {
    let mut current = core::ptr::null_mut();
    // SAFETY: `current` is writable.
    library.check("cuCtxGetCurrent", unsafe {
        (library.cuCtxGetCurrent)(&raw mut current)
    })?;
    if current.addr() == context {
        return Ok(());
    }
    // SAFETY: a primary context that was retained and never is released.
    library.check("cuCtxSetCurrent", unsafe {
        (library.cuCtxSetCurrent)(context as sys::CUcontext)
    })
}

/// While it lives, this thread is in relaxed capture mode: no call of it is forbidden, nor does one
/// break a capture that this or another thread has under way.
pub(super) struct RelaxedCapture {
    library: &'static Library,
    /// The mode before, as a number: it goes back to the library as it came.
    before: c_int,
    /// The mode is the thread's.
    _thread: PhantomData<*mut ()>,
}

impl RelaxedCapture {
    /// Begins it.
    pub(super) fn new(library: &'static Library) -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        exchange(library, &mut mode)?;
        Ok(Self {
            library,
            before: mode,
            _thread: PhantomData,
        })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        let mut mode = self.before;
        if let Err(error) = exchange(self.library, &mut mode) {
            tracing::warn!(%error, "the thread's capture mode stays relaxed");
        }
    }
}

impl Deref for RelaxedCapture {
    type Target = Library;

    fn deref(&self) -> &Library {
        self.library
    }
}

/// Exchanges the thread's capture mode.
fn exchange(library: &Library, mode: &mut c_int) -> Result<()> {
    const {
        assert!(size_of::<c_int>() == size_of::<sys::CUstreamCaptureMode>());
    }
    let mode: *mut c_int = mode;
    // SAFETY: `mode` is writable, and as large as the enumeration; it holds a mode.
    library.check("cuThreadExchangeStreamCaptureMode", unsafe {
        (library.cuThreadExchangeStreamCaptureMode)(mode.cast())
    })
}
