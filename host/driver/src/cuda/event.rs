//! CUDA events.

use core::ffi::c_uint;

use cudarc::driver::sys;

use super::context::Cuda;
use super::error::NOT_READY;
use super::stream::raw as raw_stream;
use crate::Result;
use crate::gpu::{EventDriver, RawEvent, RawStream};

/// Converts an event to the library's type.
const fn raw(event: RawEvent) -> sys::CUevent {
    event.0 as sys::CUevent
}

/// Returns the flags with which an event is created.
const fn flags(timed: bool) -> c_uint {
    if timed {
        sys::CUevent_flags::CU_EVENT_DEFAULT as c_uint
    } else {
        sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint
    }
}

impl EventDriver for Cuda {
    /// Creates an event.
    fn create_event(&self, timed: bool) -> Result<RawEvent> {
        let library = self.relaxed()?;
        let mut event = core::ptr::null_mut();
        // SAFETY: `event` is writable.
        library.check("cuEventCreate", unsafe {
            (library.cuEventCreate)(&raw mut event, flags(timed))
        })?;
        Ok(RawEvent(event.addr()))
    }

    /// Destroys an event.
    ///
    /// # Safety
    /// The preconditions of [`Driver::destroy_event`](crate::gpu::Driver::destroy_event).
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
        let library = self.relaxed()?;
        // SAFETY: the caller guarantees that the event came from `create_event` and is no longer
        // used.
        library.check("cuEventDestroy", unsafe {
            (library.cuEventDestroy_v2)(raw(event))
        })
    }

    /// Records an event.
    fn record_event(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        let library = self.enter()?;
        // SAFETY: `event` and `stream` are live handles (documentation of the module `gpu`).
        library.check("cuEventRecord", unsafe {
            (library.cuEventRecord)(raw(event), raw_stream(stream))
        })
    }

    /// Returns true if an event has completed.
    fn query_event(&self, event: RawEvent) -> Result<bool> {
        let library = self.relaxed()?;
        // SAFETY: `event` is a live handle (documentation of the module `gpu`).
        let code = unsafe { (library.cuEventQuery)(raw(event)) };
        if code == NOT_READY {
            return Ok(false);
        }
        library.check("cuEventQuery", code).map(|()| true)
    }

    /// Makes a stream wait for an event.
    fn wait_event(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        let library = self.enter()?;
        // SAFETY: `event` and `stream` are live handles, and 0 is a valid value of the flags.
        library.check("cuStreamWaitEvent", unsafe {
            (library.cuStreamWaitEvent)(raw_stream(stream), raw(event), 0)
        })
    }

    /// Returns the milliseconds between two events.
    fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<f32> {
        let library = self.relaxed()?;
        let mut milliseconds = 0.0;
        // SAFETY: `start` and `end` are live handles, and `milliseconds` is writable.
        library.check("cuEventElapsedTime", unsafe {
            (library.cuEventElapsedTime)(&raw mut milliseconds, raw(start), raw(end))
        })?;
        Ok(milliseconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_timed_events_take_time() {
        assert_eq!((flags(true), flags(false)), (0, 2));
    }
}
