//! Events of any device.

use core::time::Duration;
use std::sync::{Arc, OnceLock};

use crate::cpu;
use crate::gpu::{self, Gpu};
use crate::{Error, Result};

/// A point in a stream's work that others can wait for. Clones are the same event.
///
/// As on CUDA, a wait is for the latest record that was enqueued before it, recording anew does not disturb earlier
/// waits, and an event that was never recorded counts as complete. An event belongs to the device on which it is recorded
/// first.
#[derive(Clone, Debug, Default)]
pub struct Event {
    pub(super) cpu: cpu::Event,
    pub(super) gpu: Arc<OnceLock<gpu::Event>>,
}

impl Event {
    /// An event that was never recorded.
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

    /// Whether the latest record is complete.
    pub fn query(&self) -> bool {
        match self.gpu.get() {
            Some(event) => event.query().unwrap_or(true),
            None => self.cpu.query(),
        }
    }

    /// Waits until the record that is the latest now is complete.
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

    /// Time between the latest completed records of `start` and of this event; zero when this one came first. A GPU
    /// measures by its own clock.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when one of them is not complete or was never recorded.
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
