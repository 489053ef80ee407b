//! Streams and the work that they execute: copies, host functions, and waits for and writes of
//! words in device memory.

use core::ffi::{c_uint, c_void};

use cudarc::driver::sys;

use super::context::Cuda;
use super::device;
use super::error::NOT_READY;
use super::library::Library;
use crate::environment::DeviceStreams;
use crate::gpu::{Callback, RawStream, StreamDriver, StreamPriority};
use crate::{Result, environment};

/// Converts a stream to the library's type.
pub(super) const fn raw(stream: RawStream) -> sys::CUstream {
    stream.0 as sys::CUstream
}

/// Creates a stream in the current context and adds it to `streams`. The stream does not
/// synchronise with the legacy default stream.
pub(super) fn create(
    library: &Library,
    streams: &DeviceStreams,
    priority: StreamPriority,
) -> Result<RawStream> {
    // A smaller number is a higher priority. Both numbers are 0 if the device has no priorities.
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: `least` and `greatest` are writable.
    library.check("cuCtxGetStreamPriorityRange", unsafe {
        (library.cuCtxGetStreamPriorityRange)(&raw mut least, &raw mut greatest)
    })?;
    let priority = match priority {
        StreamPriority::Normal => least,
        // One below the highest, if there are more than two.
        StreamPriority::High if greatest + 1 < least => greatest + 1,
        StreamPriority::High | StreamPriority::Highest => greatest,
    };
    let mut stream = core::ptr::null_mut();
    let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
    // SAFETY: `stream` is writable.
    library.check("cuStreamCreateWithPriority", unsafe {
        (library.cuStreamCreateWithPriority)(&raw mut stream, flags, priority)
    })?;
    let stream = RawStream(stream.addr());
    environment::CUDA.count(streams, stream, priority);
    Ok(stream)
}

/// Buffer for a `CUdevResource`. The struct has grown in CUDA 13, so the buffer is larger than the
/// struct of the bindings.
#[repr(C, align(16))]
struct GreenResources([u64; 64]);

const _: () = assert!(size_of::<GreenResources>() >= 2 * size_of::<sys::CUdevResource>());

impl GreenResources {
    /// Returns the first word of the union, which is the number of SMs.
    fn multiprocessors(&self) -> u32 {
        self.0[core::mem::offset_of!(sys::CUdevResource, __bindgen_anon_1) / 8] as u32
    }
}

impl StreamDriver for Cuda {
    /// Creates a stream.
    fn create_stream(&self, priority: StreamPriority) -> Result<RawStream> {
        let library = self.relaxed()?;
        create(&library, &self.streams, priority)
    }

    /// Destroys a stream.
    ///
    /// # Safety
    /// The preconditions of [`Driver::destroy_stream`](crate::gpu::Driver::destroy_stream).
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let library = self.relaxed()?;
        // SAFETY: the caller guarantees that the stream came from `create_stream` and is no longer
        // used.
        library.check("cuStreamDestroy", unsafe {
            (library.cuStreamDestroy_v2)(raw(stream))
        })?;
        self.streams.remove(stream);
        Ok(())
    }

    /// Returns true if the stream synchronises with the legacy default stream.
    fn is_blocking(&self, stream: RawStream) -> Result<bool> {
        if matches!(stream, RawStream::LEGACY | RawStream::PER_THREAD) {
            return Ok(true);
        }
        let library = self.relaxed()?;
        let mut flags = 0;
        // SAFETY: `stream` is a live handle, and `flags` is writable.
        library.check("cuStreamGetFlags", unsafe {
            (library.cuStreamGetFlags)(raw(stream), &raw mut flags)
        })?;
        Ok(flags & sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint == 0)
    }

    /// Returns the number of SMs that kernels of a stream may use.
    fn stream_multiprocessors(&self, stream: RawStream) -> Result<Option<u32>> {
        let library = self.relaxed()?;
        // With MPS, the attribute is the part of the GPU that the process may use.
        let all = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let all = device::attribute(&library, self.device, all)?;
        // The legacy default stream cannot be queried while another stream is capturing, and
        // belongs to no green context.
        let (Some(ask), Some(resource)) = (
            library.cuStreamGetGreenCtx.find(),
            library.cuGreenCtxGetDevResource.find(),
        ) else {
            return Ok(Some(all));
        };
        if stream == RawStream::LEGACY {
            return Ok(Some(all));
        }
        let mut context = core::ptr::null_mut();
        // SAFETY: `stream` is a live handle, and `context` is writable.
        library.check("cuStreamGetGreenCtx", unsafe {
            ask(raw(stream), &raw mut context)
        })?;
        if context.is_null() {
            return Ok(Some(all));
        }
        let mut resources = GreenResources([0; 64]);
        // SAFETY: `context` is a live green context, because the stream is live. `resources` is
        // larger than `CUdevResource` of every CUDA version.
        library.check("cuGreenCtxGetDevResource", unsafe {
            resource(
                context,
                (&raw mut resources).cast(),
                sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM,
            )
        })?;
        Ok(Some(all.min(resources.multiprocessors())))
    }

    /// Returns true if all work of a stream is complete.
    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        let library = self.relaxed()?;
        // SAFETY: `stream` is a live handle (documentation of the module `gpu`).
        let code = unsafe { (library.cuStreamQuery)(raw(stream)) };
        if code == NOT_READY {
            return Ok(false);
        }
        library.check("cuStreamQuery", code).map(|()| true)
    }

    /// Blocks until all work of a stream is complete.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let library = self.relaxed()?;
        // SAFETY: `stream` is a live handle (documentation of the module `gpu`).
        library.check("cuStreamSynchronize", unsafe {
            (library.cuStreamSynchronize)(raw(stream))
        })
    }

    /// Enqueues a call of `callback` with `data` on a stream.
    ///
    /// # Safety
    /// The preconditions of [`Driver::host_function`](crate::gpu::Driver::host_function).
    unsafe fn host_function(
        &self,
        stream: RawStream,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()> {
        let library = self.enter()?;
        // SAFETY: `stream` is a live handle. The caller guarantees that `data` is valid for
        // `callback` at every call.
        library.check("cuLaunchHostFunc", unsafe {
            (library.cuLaunchHostFunc)(raw(stream), Some(callback), data)
        })
    }

    /// Makes a stream wait until the word at `at` has reached `value`. The `_v2` functions require
    /// no device attribute for 32-bit words (attributes 122 and 123 are for 64-bit words and for
    /// NOR). The call fails on a device that does not support these functions, such as some virtual
    /// GPUs.
    ///
    /// # Safety
    /// The preconditions of [`Driver::wait_value`](crate::gpu::Driver::wait_value).
    unsafe fn wait_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let library = self.enter()?;
        let function = library.cuStreamWaitValue32_v2.need()?;
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as c_uint;
        // SAFETY: `stream` is a live handle. The caller guarantees that the word at `at` is mapped.
        library.check("cuStreamWaitValue32", unsafe {
            function(raw(stream), at, value, flags)
        })
    }

    /// Makes a stream write `value` to the word at `at`. With the default flags, a memory barrier
    /// precedes the write.
    ///
    /// # Safety
    /// The preconditions of [`Driver::write_value`](crate::gpu::Driver::write_value).
    unsafe fn write_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let library = self.enter()?;
        let function = library.cuStreamWriteValue32_v2.need()?;
        let flags = sys::CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_DEFAULT as c_uint;
        // SAFETY: `stream` is a live handle. The caller guarantees that the word at `at` is mapped.
        library.check("cuStreamWriteValue32", unsafe {
            function(raw(stream), at, value, flags)
        })
    }
}
