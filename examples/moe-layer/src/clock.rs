//! Times of the parts of the layer, measured on the stream.

use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fusewire::{Result, Stream};

/// Parts of the layer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    Router,
    Dispatch,
    Experts,
    Combine,
}

/// The number of parts.
pub(crate) const PARTS: usize = 4;

struct Laps {
    last: Instant,
    times: [Duration; PARTS],
}

/// A clock that host functions on a stream read, between the operations. A graph contains these
/// functions too, so each replay measures the times again.
pub(crate) struct Clock {
    stream: Stream,
    laps: Arc<Mutex<Laps>>,
}

impl Clock {
    pub(crate) fn new(stream: &Stream) -> Self {
        let laps = Laps {
            last: Instant::now(),
            times: [Duration::ZERO; PARTS],
        };
        Self {
            stream: stream.clone(),
            laps: Arc::new(Mutex::new(laps)),
        }
    }

    /// Enqueues a call of `change` with the current time.
    fn enqueue(&self, change: impl Fn(&mut Laps, Instant) + Send + Sync + 'static) -> Result<()> {
        let laps = Arc::clone(&self.laps);
        let call = move || {
            let mut laps = laps.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            change(&mut laps, now);
            laps.last = now;
            Ok(())
        };
        self.stream.host_fn(Arc::new(call)).map(drop)
    }

    /// Sets the times to 0 and starts the first lap, in stream order.
    pub(crate) fn start(&self) -> Result<()> {
        self.enqueue(|laps, _| laps.times = [Duration::ZERO; PARTS])
    }

    /// Adds the time since the previous lap to `part`, in stream order.
    pub(crate) fn lap(&self, part: Part) -> Result<()> {
        self.enqueue(move |laps, now| laps.times[part as usize] += now - laps.last)
    }

    /// Returns the times of the parts. The stream must be idle.
    pub(crate) fn times(&self) -> [Duration; PARTS] {
        self.laps
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .times
    }
}
