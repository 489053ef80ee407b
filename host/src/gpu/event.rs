//! Events of a GPU.

use core::fmt;
use core::time::Duration;
use std::sync::Arc;

use super::device::Gpu;
use super::driver::RawEvent;
use crate::Result;

/// A point in a stream's work. Clones refer to the same event.
#[derive(Clone)]
pub(crate) struct Event {
    inner: Arc<Inner>,
}

struct Inner {
    gpu: Arc<Gpu>,
    raw: RawEvent,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.inner.raw).finish()
    }
}

impl Event {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Ok(Self {
            inner: Arc::new(Inner {
                gpu: Arc::clone(gpu),
                raw: gpu.driver().create_event(true)?,
            }),
        })
    }

    pub(super) fn raw(&self) -> RawEvent {
        self.inner.raw
    }

    pub(crate) fn query(&self) -> Result<bool> {
        Ok(self.inner.gpu.driver().query_event(self.inner.raw)?)
    }

    pub(crate) fn elapsed_since(&self, start: &Self) -> Result<Duration> {
        let milliseconds = self
            .inner
            .gpu
            .driver()
            .elapsed(start.inner.raw, self.inner.raw)?;
        Ok(Duration::from_secs_f64(
            f64::from(milliseconds.max(0.0)) / 1e3,
        ))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: `new` created the event, and its last handle is being dropped. The driver keeps
        // the event's state until all enqueued waits for the event are complete.
        if let Err(error) = unsafe { self.gpu.driver().destroy_event(self.raw) } {
            tracing::warn!(%error, "an event could not be destroyed");
        }
    }
}
