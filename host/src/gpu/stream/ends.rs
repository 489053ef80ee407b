//! Completion of work: detection by polling, reports to owners, and waits.

use core::cell::Cell;
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::sync::{Arc, TryLockError};
use std::thread;
use std::time::Instant;

use super::{Inner, Stream};
use crate::gpu::driver::CaptureStatus;
use crate::gpu::in_flight::InFlight;
use crate::{Error, Result};

/// Maximum number of failed operations per stream whose errors are kept.
const MAX_FAILURES: usize = 1024;

/// Time for which [`Stream::wait`] spins before it starts to sleep between polls.
const SPIN: Duration = Duration::from_micros(50);

thread_local! {
    /// Address of the stream whose completed work this thread is reporting to an owner, or 0. An
    /// owner must not wait for this stream in the report, because the wait would never return.
    static SETTLING: Cell<usize> = const { Cell::new(0) };
}

/// Returns true if this thread is reporting completed work to an owner. During the report, the
/// thread must not free device memory, because freeing may block on work that waits for this
/// thread.
pub(in crate::gpu) fn is_settling() -> bool {
    SETTLING.get() != 0
}

/// Returns true if this thread is reporting completed work of the stream to an owner.
pub(super) fn is_settling_of(stream: *const Inner) -> bool {
    SETTLING.get() == stream as usize
}

/// Settles work of the stream `stream`, which may have been dropped.
pub(in crate::gpu) fn settling<R>(stream: *const Inner, settle: impl FnOnce() -> R) -> R {
    let outer = SETTLING.replace(stream as usize);
    let result = settle();
    SETTLING.set(outer);
    result
}

impl Stream {
    /// Detects completed work and reports it to its owners.
    pub(super) fn poll(&self) {
        self.inner.poll();
    }

    pub(crate) fn is_complete(&self, number: u64) -> bool {
        if self.inner.progress.completed.load(Ordering::Acquire) >= number {
            return true;
        }
        self.poll();
        self.inner.progress.completed.load(Ordering::Acquire) >= number
    }

    /// Returns the result of an operation, or `None` if the operation is not complete.
    pub(crate) fn result(&self, number: u64) -> Option<Result<()>> {
        self.is_complete(number).then(|| self.failure_of(number))
    }

    fn failure_of(&self, number: u64) -> Result<()> {
        let state = self.state();
        state
            .failures
            .iter()
            .find(|(failed, _)| *failed == number)
            .map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// Refuses a call that would wait for the report that this thread is making.
    pub(crate) fn refuse_from_own_work(&self) -> Result<()> {
        match is_settling_of(Arc::as_ptr(&self.inner)) {
            true => Err(Error::launch("wait on a stream from within its own work")),
            false => Ok(()),
        }
    }

    /// Blocks until an operation is complete and returns its result.
    pub(crate) fn wait(&self, number: u64, timeout: Option<Duration>) -> Result<()> {
        if !self.is_complete(number) {
            self.refuse_from_own_work()?;
            let start = Instant::now();
            let mut naps = 0;
            while !self.is_complete(number) {
                let elapsed = start.elapsed();
                if let Some(timeout) = timeout.filter(|timeout| elapsed > *timeout) {
                    let seconds = timeout.as_secs_f64();
                    return Err(Error::StreamTimeout { seconds });
                }
                if elapsed < SPIN {
                    core::hint::spin_loop();
                } else {
                    naps += 1;
                    thread::sleep(Duration::from_micros(10 * u64::from(naps.min(20u32))));
                }
            }
        }
        self.failure_of(number)
    }

    /// Blocks until all work on the stream is complete. Returns the first failure of a `sticky`
    /// operation since the last call.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let own_thread = self.inner.check_thread().is_ok();
        if own_thread && self.capture_status()? != CaptureStatus::None {
            return Err(Error::capture("a capturing stream cannot be synchronized"));
        }
        let last = self.state().issued;
        let _ = self.wait(last, None);
        // Also waits for work that other libraries enqueued on the stream. On another thread, the
        // handle of a per-thread default stream refers to another stream.
        if own_thread {
            self.inner.gpu.driver().synchronize_stream(self.inner.raw)?;
        }
        self.state().sticky.take().map_or(Ok(()), Err)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.poll();
        if !self.state().in_flight.is_empty() {
            return false;
        }
        // A stream with a capture counts as idle. It is not queried, because a query would
        // invalidate the capture. The default stream of another thread cannot be queried.
        match self.capture_status() {
            Ok(CaptureStatus::None) => {
                let driver = self.inner.gpu.driver();
                driver.query_stream(self.inner.raw).unwrap_or(false)
            }
            Ok(_) => true,
            // Only the work of this library is known.
            Err(_) if self.inner.check_thread().is_err() => true,
            Err(_) => false,
        }
    }
}

impl Inner {
    pub(in crate::gpu) fn poll(&self) {
        // If another thread polls the stream, that thread reports all completed work.
        let _poller = match self.poller.try_lock() {
            Ok(poller) => poller,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let driver = self.gpu.driver();
        loop {
            let front = self.lock().in_flight.front().map(|work| {
                let recorded = work.unrecorded.is_none();
                (work.event, recorded)
            });
            let Some((event, recorded)) = front else {
                return;
            };
            let ended = if recorded {
                driver.query_event(event).map_err(Error::from)
            } else {
                self.is_past_unrecorded()
            };
            let mut lost = match ended {
                Ok(false) => return,
                Ok(true) => None,
                Err(error) => Some(error),
            };
            let Some(work) = self.lock().in_flight.pop_front() else {
                return;
            };
            let (mut result, words) = settling(self, || InFlight::settle(work.kind, lost.take()));
            if let Some(error) = work.unrecorded {
                result = result.and(Err(error));
            }
            let mut state = self.lock();
            state.events.push(work.event);
            state.words.extend(words);
            if let Err(error) = result {
                if work.sticky && state.sticky.is_none() {
                    state.sticky = Some(error.clone());
                }
                if state.failures.len() == MAX_FAILURES {
                    state.failures.pop_front();
                }
                state.failures.push_back((work.number, error));
            }
            self.progress
                .completed
                .store(work.number, Ordering::Release);
        }
    }

    /// Returns true if the whole stream is idle. An operation without a recorded event is known to
    /// be complete only if the whole stream is idle.
    fn is_past_unrecorded(&self) -> Result<bool> {
        self.check_thread()?;
        match self.capture_status()? {
            CaptureStatus::None => Ok(self.gpu.driver().query_stream(self.raw)?),
            // A query would invalidate the capture.
            _ => Ok(false),
        }
    }
}
