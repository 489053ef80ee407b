//! A device with its primary context, and functions that set the current context and the capture
//! mode of the calling thread.

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
use crate::gpu::Properties;

/// A CUDA device with its retained primary context. A `Cuda` lives until the process exits, because
/// the primary context is never released.
pub(super) struct Cuda {
    pub(super) library: &'static Library,
    pub(super) device: sys::CUdevice,
    /// The device's primary context (`CUcontext`).
    pub(super) context: usize,
    pub(super) properties: Properties,
    /// Major version of the compute capability.
    pub(super) major: u32,
    /// Bit mask of the handle types (`CUmemAllocationHandleType`) with which shared memory is
    /// created. If 0, shared memory is allocated by `cuMemAlloc` and exported by IPC.
    pub(super) handles: u32,
    /// True if memory can be registered with a network card.
    pub(super) rdma: bool,
    /// Allocation granularity of shared memory in bytes. Every multiple of the granularity is also
    /// a valid size for binding memory to a multicast object.
    pub(super) granularity: u64,
    /// Number of live streams.
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
    /// Makes the primary context current on this thread. The context stays current after the call.
    pub(super) fn enter(&self) -> Result<&'static Library> {
        enter(self.library, self.context)?;
        Ok(self.library)
    }

    /// Makes the primary context current. Until the returned guard is dropped, this thread may make
    /// calls that a capture forbids.
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
    // SAFETY: `context` is a retained primary context, which is never released.
    library.check("cuCtxSetCurrent", unsafe {
        (library.cuCtxSetCurrent)(context as sys::CUcontext)
    })
}

/// Guard that keeps the calling thread in relaxed capture mode. In this mode the thread may make
/// calls that the stricter modes forbid during a capture, such as allocations, and these calls do
/// not invalidate a capture of this or another thread. Dropping the guard restores the previous
/// mode.
pub(super) struct RelaxedCapture {
    library: &'static Library,
    /// The previous mode of the thread (`CUstreamCaptureMode`).
    before: c_int,
    /// Makes the guard `!Send`, because the capture mode belongs to the thread.
    _thread: PhantomData<*mut ()>,
}

impl RelaxedCapture {
    /// Enters relaxed mode.
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
            tracing::warn!(%error, "cannot restore the thread's capture mode, which stays relaxed");
        }
    }
}

impl Deref for RelaxedCapture {
    type Target = Library;

    fn deref(&self) -> &Library {
        self.library
    }
}

/// Exchanges the calling thread's capture mode with `mode`.
fn exchange(library: &Library, mode: &mut c_int) -> Result<()> {
    const {
        assert!(size_of::<c_int>() == size_of::<sys::CUstreamCaptureMode>());
    }
    let mode: *mut c_int = mode;
    // SAFETY: `mode` is writable, has the size of the enumeration, and holds a valid mode.
    library.check("cuThreadExchangeStreamCaptureMode", unsafe {
        (library.cuThreadExchangeStreamCaptureMode)(mode.cast())
    })
}
