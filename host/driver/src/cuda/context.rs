//! A device with its primary context, and functions that set the current context and the capture
//! mode of the calling thread.

use core::ffi::c_int;
use core::fmt;
use core::marker::PhantomData;
use core::ops::Deref;
use std::sync::Mutex;

use cudarc::driver::sys;

use super::library::Library;
use super::staging::Staging;
use crate::Result;
use crate::environment::DeviceStreams;
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
    /// Live streams of this object.
    pub(super) streams: DeviceStreams,
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
    /// Makes the primary context current on this thread until the returned guard is dropped.
    pub(super) fn enter(&self) -> Result<CurrentContext> {
        CurrentContext::enter(self.library, self.context)
    }

    /// Makes the primary context current. Until the returned guard is dropped, this thread may make
    /// calls that a capture forbids.
    pub(super) fn relaxed(&self) -> Result<RelaxedCapture> {
        RelaxedCapture::new(self.enter()?)
    }
}

/// Guard that keeps a context current on the calling thread. Dropping the guard restores the
/// previously current context. If the context was already current, entering and dropping change
/// nothing.
pub(super) struct CurrentContext {
    library: &'static Library,
    /// True if the context was pushed onto the thread's stack of contexts.
    pushed: bool,
    /// Makes the guard `!Send`, because the current context belongs to the thread.
    _thread: PhantomData<*mut ()>,
}

impl CurrentContext {
    /// Makes a context current on this thread.
    pub(super) fn enter(library: &'static Library, context: usize) -> Result<Self> {
        let mut current = core::ptr::null_mut();
        // SAFETY: `current` is writable.
        library.check("cuCtxGetCurrent", unsafe {
            (library.cuCtxGetCurrent)(&raw mut current)
        })?;
        let pushed = current.addr() != context;
        if pushed {
            // SAFETY: `context` is a retained primary context, which is never released.
            library.check("cuCtxPushCurrent", unsafe {
                (library.cuCtxPushCurrent_v2)(context as sys::CUcontext)
            })?;
        }
        Ok(Self {
            library,
            pushed,
            _thread: PhantomData,
        })
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if !self.pushed {
            return;
        }
        let mut popped = core::ptr::null_mut();
        // SAFETY: `popped` is writable.
        let code = unsafe { (self.library.cuCtxPopCurrent_v2)(&raw mut popped) };
        if let Err(error) = self.library.check("cuCtxPopCurrent", code) {
            tracing::warn!(%error, "cannot restore the thread's current context");
        }
    }
}

impl Deref for CurrentContext {
    type Target = Library;

    fn deref(&self) -> &Library {
        self.library
    }
}

/// Guard that keeps the calling thread in relaxed capture mode. In this mode the thread may make
/// calls that the stricter modes forbid during a capture, such as allocations, and these calls do
/// not invalidate a capture of this or another thread. Dropping the guard restores the previous
/// mode.
pub(super) struct RelaxedCapture {
    /// The previous mode of the thread (`CUstreamCaptureMode`).
    before: c_int,
    context: CurrentContext,
}

impl RelaxedCapture {
    /// Enters relaxed mode.
    pub(super) fn new(context: CurrentContext) -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        exchange(&context, &mut mode)?;
        Ok(Self {
            before: mode,
            context,
        })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        let mut mode = self.before;
        if let Err(error) = exchange(&self.context, &mut mode) {
            tracing::warn!(%error, "cannot restore the thread's capture mode, which stays relaxed");
        }
    }
}

impl Deref for RelaxedCapture {
    type Target = Library;

    fn deref(&self) -> &Library {
        &self.context
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
