//! Events of any device.

use core::time::Duration;
use std::sync::{Arc, OnceLock};

use crate::cpu;
use crate::gpu::{self, Gpu};
use crate::{Error, Result};

/// A point in a stream's work that other streams and threads can wait for. Clones refer to the same
/// event.
///
/// The semantics are those of CUDA events. A wait applies to the latest record that was enqueued
/// before the wait. A later record of the same event does not affect the wait. An event that was
/// never recorded counts as complete. The first record binds the event to the device of the stream.
#[derive(Clone, Debug, Default)]
pub struct Event {
    pub(super) cpu: cpu::CpuEvent,
    pub(super) gpu: Arc<OnceLock<gpu::Event>>,
}

impl Event {
    /// Creates an event that was never recorded.
    pub fn new() -> Self {
        Self::default()
    }

    pub(super) fn on_gpu(&self, gpu: &Arc<Gpu>) -> Result<&gpu::Event> {
        if let Some(event) = self.gpu.get() {
            return Ok(event);
        }
        let made = gpu::Event::new(gpu)?;
        Ok(self.gpu.get_or_init(|| made))
    }

    /// Returns true if the latest record is complete or the event was never recorded. Also returns
    /// true if the query of a GPU event fails.
    pub fn query(&self) -> bool {
        match self.gpu.get() {
            Some(event) => event.query().unwrap_or(true),
            None => self.cpu.query(),
        }
    }

    /// Blocks until the latest record is complete. Also returns if a query of a GPU event fails. On
    /// a GPU, a record that is enqueued during the call may extend the wait.
    pub fn synchronize(&self) {
        match self.gpu.get() {
            Some(event) => {
                while !event.query().unwrap_or(true) {
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
            None => self.cpu.synchronize(),
        }
    }

    /// Returns the time from the latest completed record of `start` to the latest completed record
    /// of this event, or zero if this event completed first. On a GPU the time is measured by the
    /// GPU's clock.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if either event was never recorded, if exactly one of the events
    /// was recorded on a GPU, or if either event was recorded on the CPU and is not complete;
    /// [`Error::Driver`] if either event was recorded on a GPU and is not complete.
    pub fn elapsed_since(&self, start: &Self) -> Result<Duration> {
        match (self.gpu.get(), start.gpu.get()) {
            (Some(end), Some(start)) => end.elapsed_since(start),
            (None, None) => self.cpu.elapsed_since(&start.cpu),
            _ => Err(Error::InvalidArgument {
                operation: "elapsed time",
                detail: "both events must have been recorded on one device".to_owned(),
            }),
        }
    }
}
