//! Timeouts for the calls of NCCL, NCCLX, RCCL and RCCLX, which have no timeouts themselves.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use fusewire_ccl_sys::Comm;

/// Thread that aborts a communicator when a call exceeds its timeout.
#[derive(Debug)]
pub(super) struct Guard {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Locked during a call, because the library accepts only one call at a time.
    calls: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    comm: Arc<Comm>,
    watched: Mutex<WatchState>,
    changed: Condvar,
    aborted: AtomicBool,
}

#[derive(Debug, Default)]
struct WatchState {
    /// Deadline of the current call.
    until: Option<Instant>,
    /// Time at which the thread wakes up, or `None` if it sleeps until it is notified.
    sleeps: Option<Instant>,
    expired: bool,
    end: bool,
}

impl Shared {
    fn watched(&self) -> MutexGuard<'_, WatchState> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        if let Err(error) = self.comm.abort() {
            tracing::warn!(%error, "the library's abort failed");
        }
    }

    fn run(&self) {
        let mut watched = self.watched();
        while !watched.end {
            watched.sleeps = watched.until;
            let Some(until) = watched.until else {
                watched = self
                    .changed
                    .wait(watched)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                watched.expired = true;
                watched.until = None;
                drop(watched);
                self.abort();
                watched = self.watched();
                continue;
            }
            (watched, _) = self
                .changed
                .wait_timeout(watched, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Guard {
    pub(super) fn new(comm: Arc<Comm>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            comm,
            watched: Mutex::default(),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
        });
        let own = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("fusewire-ccl".to_owned())
            .spawn(move || own.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
            calls: Mutex::new(()),
        })
    }

    /// Runs `call`, and aborts the communicator if the call exceeds `timeout`. The second part of
    /// the result is true if the communicator was aborted.
    pub(super) fn during<R>(&self, timeout: Duration, call: impl FnOnce() -> R) -> (R, bool) {
        let _one = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let mut watched = self.shared.watched();
        let until = Instant::now().checked_add(timeout);
        watched.until = until;
        // The thread may be asleep until the deadline of an earlier call. If that deadline is
        // before the deadline of this call, the thread wakes up in time to read the new deadline,
        // so it need not be notified.
        let late = until.is_some_and(|until| watched.sleeps.is_none_or(|sleeps| until < sleeps));
        drop(watched);
        if late {
            self.shared.changed.notify_one();
        }
        let result = call();
        let mut watched = self.shared.watched();
        watched.until = None;
        (result, watched.expired)
    }

    pub(super) fn abort(&self) {
        self.shared.abort();
    }

    pub(super) fn was_aborted(&self) -> bool {
        self.shared.aborted.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.watched().end = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
