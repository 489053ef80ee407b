//! Streams, events and host functions.

use core::ffi::c_void;
use core::ptr;

use super::bindings::{self as hip, hipEvent_t, hipStream_t};
use super::device::Hip;
use crate::gpu::{Callback, EventDriver, RawEvent, RawStream, StreamDriver, StreamPriority};
use crate::{Result, environment};

impl StreamDriver for Hip {
    fn create_stream(&self, priority: StreamPriority) -> Result<RawStream> {
        let _relaxed = self.relaxed()?;
        // A smaller number is a higher priority.
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: `least` and `greatest` are writable.
        let status =
            unsafe { (self.functions.hipDeviceGetStreamPriorityRange)(&mut least, &mut greatest) };
        self.functions
            .check("hipDeviceGetStreamPriorityRange", status)?;
        let number = match priority {
            // HIP has a priority below the default, which is 0.
            StreamPriority::Normal => least.min(0),
            // HIP has one priority above the default.
            StreamPriority::High | StreamPriority::Highest => greatest,
        };
        let mut stream: hipStream_t = ptr::null_mut();
        // SAFETY: `stream` is writable.
        let status = unsafe {
            (self.functions.hipStreamCreateWithPriority)(
                &mut stream,
                hip::STREAM_NON_BLOCKING,
                number,
            )
        };
        self.functions
            .check("hipStreamCreateWithPriority", status)?;
        let stream = RawStream(stream as usize);
        environment::HIP.count(&self.streams, stream, number);
        Ok(stream)
    }

    /// # Safety
    /// The preconditions of `Driver::destroy_stream`.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: the caller guarantees that the stream is not in use.
        let status = unsafe { (self.functions.hipStreamDestroy)(stream.0 as hipStream_t) };
        self.functions.check("hipStreamDestroy", status)?;
        self.streams.remove(stream);
        Ok(())
    }

    fn is_blocking(&self, stream: RawStream) -> Result<bool> {
        if matches!(stream, RawStream::LEGACY | RawStream::PER_THREAD) {
            return Ok(true);
        }
        let _relaxed = self.relaxed()?;
        let mut flags = 0;
        // SAFETY: `stream` is a live handle, and `flags` is writable.
        let status =
            unsafe { (self.functions.hipStreamGetFlags)(stream.0 as hipStream_t, &mut flags) };
        self.functions.check("hipStreamGetFlags", status)?;
        Ok(flags & hip::STREAM_NON_BLOCKING == 0)
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        let _relaxed = self.relaxed()?;
        // SAFETY: `stream` is a live handle (documentation of the module `gpu`).
        let status = unsafe { (self.functions.hipStreamQuery)(stream.0 as hipStream_t) };
        self.functions.ready("hipStreamQuery", status)
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: `stream` is a live handle (documentation of the module `gpu`).
        let status = unsafe { (self.functions.hipStreamSynchronize)(stream.0 as hipStream_t) };
        self.functions.check("hipStreamSynchronize", status)
    }

    /// # Safety
    /// The preconditions of `Driver::host_function`.
    unsafe fn host_function(
        &self,
        stream: RawStream,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: `stream` is a live handle. The caller guarantees that `data` is valid for
        // `callback` at every call.
        let status = unsafe {
            (self.functions.hipLaunchHostFunc)(stream.0 as hipStream_t, Some(callback), data)
        };
        self.functions.check("hipLaunchHostFunc", status)
    }

    /// Makes a stream wait until the word at `at` has reached `value`. Depending on the kind of
    /// memory, either the command processor or a small kernel waits. Returns an error if the
    /// runtime cannot wait or cannot capture the wait.
    ///
    /// # Safety
    /// The preconditions of `Driver::wait_value`.
    unsafe fn wait_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _current = self.current()?;
        let (stream, at) = (stream.0 as hipStream_t, at as *mut c_void);
        // SAFETY: `stream` is a live handle. The caller guarantees that the word at `at` is mapped.
        let status = unsafe {
            (self.functions.hipStreamWaitValue32)(
                stream,
                at,
                value,
                hip::STREAM_WAIT_VALUE_GTE,
                u32::MAX,
            )
        };
        self.functions.check("hipStreamWaitValue32", status)
    }

    /// # Safety
    /// The preconditions of `Driver::write_value`.
    unsafe fn write_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _current = self.current()?;
        let (stream, at) = (stream.0 as hipStream_t, at as *mut c_void);
        // SAFETY: `stream` is a live handle. The caller guarantees that the word at `at` is mapped.
        // The flags are reserved and must be 0.
        let status = unsafe { (self.functions.hipStreamWriteValue32)(stream, at, value, 0) };
        self.functions.check("hipStreamWriteValue32", status)
    }
}

impl EventDriver for Hip {
    fn create_event(&self, timed: bool) -> Result<RawEvent> {
        let _relaxed = self.relaxed()?;
        let flags = if timed {
            hip::EVENT_DEFAULT
        } else {
            hip::EVENT_DISABLE_TIMING
        };
        let mut event: hipEvent_t = ptr::null_mut();
        // SAFETY: `event` is writable.
        let status = unsafe { (self.functions.hipEventCreateWithFlags)(&mut event, flags) };
        self.functions.check("hipEventCreateWithFlags", status)?;
        Ok(RawEvent(event as usize))
    }

    /// # Safety
    /// The preconditions of `Driver::destroy_event`.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: the caller guarantees that the event is not in use.
        let status = unsafe { (self.functions.hipEventDestroy)(event.0 as hipEvent_t) };
        self.functions.check("hipEventDestroy", status)
    }

    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: `event` and `stream` are live handles (documentation of the module `gpu`).
        let status = unsafe {
            (self.functions.hipEventRecord)(event.0 as hipEvent_t, stream.0 as hipStream_t)
        };
        self.functions.check("hipEventRecord", status)
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        let _relaxed = self.relaxed()?;
        // SAFETY: `event` is a live handle (documentation of the module `gpu`).
        let status = unsafe { (self.functions.hipEventQuery)(event.0 as hipEvent_t) };
        self.functions.ready("hipEventQuery", status)
    }

    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: `stream` and `event` are live handles, and the flags are 0 as required.
        let status = unsafe {
            (self.functions.hipStreamWaitEvent)(stream.0 as hipStream_t, event.0 as hipEvent_t, 0)
        };
        self.functions.check("hipStreamWaitEvent", status)
    }

    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        let _relaxed = self.relaxed()?;
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is writable, and `start` and `end` are live handles.
        let status = unsafe {
            (self.functions.hipEventElapsedTime)(
                &mut milliseconds,
                start.0 as hipEvent_t,
                end.0 as hipEvent_t,
            )
        };
        self.functions.check("hipEventElapsedTime", status)?;
        Ok(milliseconds)
    }
}
