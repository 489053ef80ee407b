//! Events: points in the order of a stream's work.

use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::graph::Capture;
use crate::{Error, Result};

/// A point in a stream's work that other streams and threads can wait for. Clones refer to the same
/// event.
///
/// The semantics are those of CUDA events. A wait applies to the latest record that was enqueued
/// before the wait. A later record of the same event does not affect the wait. An event that was
/// never recorded counts as complete.
#[derive(Clone, Debug, Default)]
pub struct CpuEvent {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the latest enqueued record.
    issued: u64,
    /// Number of the latest completed record.
    completed: u64,
    /// Completion time of the latest completed record.
    at: Option<Instant>,
    /// Number of waiting threads. If no thread waits, completing a record makes no system call.
    waiting: u32,
    /// The capture in which the event was last recorded, if any.
    capture: Weak<Capture>,
}

impl CpuEvent {
    /// Creates an event that was never recorded.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if the latest record is complete or the event was never recorded.
    pub fn query(&self) -> bool {
        let state = self.state();
        state.completed >= state.issued
    }

    /// Blocks until the latest record is complete. Does not wait for records that are enqueued
    /// during the call.
    pub fn synchronize(&self) {
        let issued = self.state().issued;
        self.wait_for(issued);
    }

    /// Returns the time from the latest completed record of `start` to the latest completed record
    /// of this event, or zero if this event completed first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if either event is not complete or was never recorded.
    pub fn elapsed_since(&self, start: &Self) -> Result<Duration> {
        let time = |event: &Self| {
            let state = event.state();
            state
                .at
                .filter(|_| state.completed >= state.issued)
                .ok_or_else(|| Error::InvalidArgument {
                    operation: "elapsed time",
                    detail: "both events must have been recorded and be complete".to_owned(),
                })
        };
        Ok(time(self)?.saturating_duration_since(time(start)?))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state inconsistent, because the state is valid after every
        // statement. A poisoned lock can therefore be used.
        self.inner
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a record that is about to be enqueued and returns its number.
    pub(super) fn issue(&self) -> u64 {
        let mut state = self.state();
        state.capture = Weak::new();
        state.issued += 1;
        state.issued
    }

    /// Returns the number of the latest enqueued record.
    pub(super) fn issued(&self) -> u64 {
        self.state().issued
    }

    /// Marks a record as complete.
    pub(super) fn complete(&self, record: u64) {
        let mut state = self.state();
        if record >= state.completed {
            state.completed = record;
            state.at = Some(Instant::now());
        }
        if state.waiting > 0 {
            self.inner.changed.notify_all();
        }
    }

    /// Blocks until a record is complete.
    pub(super) fn wait_for(&self, record: u64) {
        let mut state = self.state();
        while state.completed < record {
            state.waiting += 1;
            state = self
                .inner
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Sets `capture` as the capture of the latest record.
    pub(super) fn set_capture(&self, capture: &Arc<Capture>) {
        self.state().capture = Arc::downgrade(capture);
    }

    /// Returns the capture of the latest record, if that capture is still active.
    pub(super) fn capture(&self) -> Option<Arc<Capture>> {
        let capture = self.state().capture.upgrade();
        capture.filter(|capture| capture.is_active())
    }
}
