//! Streams and events.

use core::ffi::c_void;

use super::{Callback, DeviceDriver, RawEvent, RawStream};
use crate::{Error, Result};

/// Priority of a stream's work over the work of other streams of the process on the same GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamPriority {
    /// The driver's default.
    #[default]
    Normal,
    /// Pending blocks of the stream start before pending blocks of streams with a lower priority.
    /// Running blocks are not interrupted.
    High,
    /// The highest priority of the GPU, which may be that of [`StreamPriority::High`]. The library
    /// copies abort words on a stream of this priority. Work of other streams of this priority may
    /// delay aborts, because they may share a hardware queue with that stream.
    Highest,
}

/// Streams.
pub trait StreamDriver: DeviceDriver {
    /// Creates a stream that does not synchronise with the legacy default stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn create_stream(&self, priority: StreamPriority) -> Result<RawStream>;

    /// Destroys a stream after its work is complete.
    ///
    /// # Safety
    /// `stream` must come from `create_stream` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()>;

    /// Returns true if the stream synchronises with the legacy default stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn is_blocking(&self, stream: RawStream) -> Result<bool>;

    /// Returns the number of SMs that kernels of a stream may use: those of the green context to
    /// which the stream belongs, or those that MPS leaves to the process. `None` if the driver does
    /// not report the number.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn stream_multiprocessors(&self, stream: RawStream) -> Result<Option<u32>> {
        let _ = stream;
        Ok(None)
    }

    /// Returns whether all work of a stream is complete.
    ///
    /// # Errors
    /// `Error::Driver`, also for an earlier failure on the device.
    fn query_stream(&self, stream: RawStream) -> Result<bool>;

    /// Blocks until all work of a stream is complete.
    ///
    /// # Errors
    /// `Error::Driver`, also for an earlier failure on the device.
    fn synchronize_stream(&self, stream: RawStream) -> Result<()>;

    /// Enqueues a call of `callback` with `data`. The driver makes the call once, or once per
    /// replay if the stream is capturing. The callback must not call the driver.
    ///
    /// # Safety
    /// `data` must be valid for `callback` at every call.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn host_function(
        &self,
        stream: RawStream,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()>;

    /// Makes later work of a stream wait until the u32 at device address `at` has reached `value`:
    /// until the wrapping difference `*at - value`, interpreted as an i32, is not negative. The
    /// wait has no time limit.
    ///
    /// # Safety
    /// `at` must be aligned to 4 bytes and must stay mapped until the stream has executed the
    /// operation.
    ///
    /// # Errors
    /// `Error::Driver`, also if the driver has no stream memory operations.
    unsafe fn wait_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _ = (stream, at, value);
        Err(self.no_stream_memory())
    }

    /// Enqueues a write of `value` to the u32 at device address `at`, ordered after all writes of
    /// the stream's earlier work.
    ///
    /// # Safety
    /// `at` must be aligned to 4 bytes and must stay mapped until the stream has executed the
    /// operation.
    ///
    /// # Errors
    /// `Error::Driver`, also if the driver has no stream memory operations.
    unsafe fn write_value(&self, stream: RawStream, at: u64, value: u32) -> Result<()> {
        let _ = (stream, at, value);
        Err(self.no_stream_memory())
    }

    /// Returns the error for a library without stream memory operations.
    fn no_stream_memory(&self) -> Error {
        Error::Driver {
            library: self.library(),
            call: "stream memory operations",
            detail: "this library has none; have a kernel wait for the word, or write it"
                .to_owned(),
        }
    }
}

/// Events.
pub trait EventDriver {
    /// Creates an event. `timed` must be true for events that are passed to
    /// [`EventDriver::elapsed`].
    ///
    /// # Errors
    /// `Error::Driver`.
    fn create_event(&self, timed: bool) -> Result<RawEvent>;

    /// Destroys an event.
    ///
    /// # Safety
    /// `event` must come from `create_event` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()>;

    /// Records an event after all earlier work of a stream.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()>;

    /// Returns whether the latest record of an event is complete. An event that was never recorded
    /// counts as complete.
    ///
    /// # Errors
    /// `Error::Driver`, also for an earlier failure on the device.
    fn query_event(&self, event: RawEvent) -> Result<bool>;

    /// Makes later work of a stream wait for the latest record of an event.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()>;

    /// Returns the milliseconds from `start` to `end`. Both events must be timed and complete.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32>;
}
