//! Events: points in the order of a stream's work.

use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use super::graph::Capture;
use crate::{Error, Result};

/// A point in a stream's work that others can wait for. Clones are the same event.
///
/// As on CUDA, a wait is for the latest record that was enqueued before it, recording anew does not
/// disturb earlier waits, and an event that was never recorded counts as complete.
#[derive(Clone, Debug, Default)]
pub struct Event {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Records that were enqueued.
    issued: u64,
    /// The latest of them that the stream has come to.
    completed: u64,
    /// When that was.
    at: Option<Instant>,
    /// Threads in a wait: without any, a record makes no system call.
    waiting: u32,
    /// The capture in which the event was recorded last, if it was in one.
    capture: Weak<Capture>,
}

impl Event {
    /// An event that was never recorded.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the latest record is complete.
    pub fn query(&self) -> bool {
        let state = self.state();
        state.completed >= state.issued
    }

    /// Waits until the record that is the latest now is complete.
    pub fn synchronize(&self) {
        let issued = self.state().issued;
        self.wait_for(issued);
    }

    /// Time between the latest completed records of `start` and of this event; zero when this one
    /// came first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when one of them is not complete or was never recorded.
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
        // Plain numbers, valid after every statement.
        self.inner
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// A record is enqueued; returns its number.
    pub(super) fn issue(&self) -> u64 {
        let mut state = self.state();
        state.capture = Weak::new();
        state.issued += 1;
        state.issued
    }

    /// The number of the latest record.
    pub(super) fn issued(&self) -> u64 {
        self.state().issued
    }

    /// The stream has come to a record.
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

    /// Waits until a record is complete.
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

    /// Notes that the event was recorded in `capture`.
    pub(super) fn set_capture(&self, capture: &Arc<Capture>) {
        self.state().capture = Arc::downgrade(capture);
    }

    /// The capture that the latest record belongs to, while it goes on.
    pub(super) fn capture(&self) -> Option<Arc<Capture>> {
        let capture = self.state().capture.upgrade();
        capture.filter(|capture| capture.is_active())
    }
}
