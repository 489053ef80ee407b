//! The state of a stream: the queue of operations, the number of the latest completed operation,
//! and the failures.
//!
//! The flag word is 0 if and only if the stream is idle and not capturing. In that state, a
//! blocking call acquires the stream with one compare-exchange of the flag word from 0 to
//! [`DIRECT`].

use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::command::Command;
use super::graph::{Branch, Capture};
use super::stream::Origin;
use crate::usage::{DirectUse, WorkSource};
use crate::{Error, Result};

/// Flag: a calling thread is running work of the stream directly, without the queue.
pub(super) const DIRECT: u64 = 1;
/// Flag: the stream has joined a capture. The flag stays set after another stream ends the capture.
pub(super) const CAPTURE: u64 = 2;
/// The increment of the flag word per queued or running operation. The bits above the flags count
/// these operations.
pub(super) const UNIT: u64 = 4;

/// Maximum number of failures that are kept for the tickets of the failed operations.
const MAX_FAILURES: usize = 1024;

/// The places where a failure is reported.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    /// The result of the ticket, and the next synchronisation.
    Sticky,
    /// Only the result of the ticket, because the caller waits for the ticket.
    TicketOnly,
}

pub(super) struct Entry {
    pub(super) seq: u64,
    pub(super) command: Command,
    /// The result of [`Command::issue`].
    pub(super) record: u64,
    pub(super) report: Report,
}

pub(super) struct Shared {
    /// [`DIRECT`], [`CAPTURE`], and the number of queued and running operations in units of
    /// [`UNIT`].
    pub(super) flags: AtomicU64,
    /// Accesses of an operation that a thread runs directly.
    pub(super) direct_use: DirectUse,
    /// Number of the latest operation that the worker has taken from the queue.
    started: AtomicU64,
    /// Number of the latest completed operation of the queue.
    pub(super) completed: AtomicU64,
    state: Mutex<State>,
    /// Signals the worker that work is queued.
    pub(super) work: Condvar,
    /// Signals waiting threads that work is complete.
    done: Condvar,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = self.flags.load(Ordering::Relaxed);
        f.debug_struct("CpuStream")
            .field("pending", &(flags / UNIT + flags % 2))
            .field("completed", &self.completed.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            flags: AtomicU64::new(0),
            direct_use: DirectUse::default(),
            started: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        }
    }
}

pub(super) struct State {
    pub(super) queue: VecDeque<Entry>,
    /// Number of the next queued operation. Never 0.
    pub(super) next: u64,
    pub(super) closing: bool,
    pub(super) worker_waits: bool,
    /// Operations that may not start yet, of [`WorkSource::hold_back`].
    held_back: Vec<u64>,
    pub(super) origin: Origin,
    /// The first failure since the last synchronisation.
    pub(super) sticky: Option<Error>,
    capture: Option<Arc<Capture>>,
    /// The branch that the stream records into, if [`CpuStream::branch`](super::CpuStream::branch)
    /// was called in this capture.
    pub(super) branch: Option<Branch>,
    waiting: u32,
    /// Failed operations: number and error, oldest first.
    failures: VecDeque<(u64, Error)>,
    /// All failures with numbers up to `evicted` have been removed from `failures`.
    evicted: u64,
}

impl Default for State {
    fn default() -> Self {
        Self {
            queue: VecDeque::new(),
            next: 1,
            closing: false,
            worker_waits: false,
            held_back: Vec::new(),
            origin: Origin::Here,
            sticky: None,
            capture: None,
            branch: None,
            waiting: 0,
            failures: VecDeque::new(),
            evicted: 0,
        }
    }
}

impl State {
    /// Returns the result of a completed operation.
    pub(super) fn result(&self, seq: u64) -> Result<()> {
        match self
            .failures
            .binary_search_by_key(&seq, |(failed, _)| *failed)
        {
            Ok(at) => Err(self.failures[at].1.clone()),
            Err(_) if seq != 0 && seq <= self.evicted => Err(Error::launch(format!(
                "the result of this work is not kept any more: {MAX_FAILURES} failures followed"
            ))),
            Err(_) => Ok(()),
        }
    }

    fn record_failure(&mut self, seq: u64, report: Report, error: Error) {
        if report == Report::Sticky && self.sticky.is_none() {
            self.sticky = Some(error.clone());
        }
        if self.failures.len() == MAX_FAILURES
            && let Some((oldest, _)) = self.failures.pop_front()
        {
            self.evicted = oldest;
        }
        self.failures.push_back((seq, error));
    }
}

impl WorkSource for Shared {
    fn is_complete(&self, number: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= number
    }

    fn is_started(&self, number: u64) -> bool {
        self.is_started(number)
    }

    fn wait(&self, number: u64) {
        self.wait_complete(number, None);
    }

    fn result(&self, number: u64) -> Result<()> {
        self.lock().result(number)
    }

    fn is_current(&self) -> bool {
        super::stream::is_current(self)
    }

    fn hold_back(&self, number: u64) -> bool {
        let mut state = self.lock();
        let is_held = !self.is_started(number);
        if is_held {
            state.held_back.push(number);
        }
        is_held
    }

    fn let_go(&self, number: u64) {
        let mut state = self.lock();
        let held = state.held_back.iter().position(|held| *held == number);
        if let Some(held) = held {
            state.held_back.swap_remove(held);
        }
        drop(state);
        self.work.notify_one();
    }

    fn direct_use(&self) -> Option<&DirectUse> {
        Some(&self.direct_use)
    }

    fn meet_direct(&self) {
        self.flags.fetch_add(0, Ordering::AcqRel);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // No user code runs under the lock, so a panic cannot leave the state inconsistent, and a
        // poisoned lock can be used.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the active capture. If another stream has ended the capture, removes the capture
    /// from this stream and returns `None`.
    pub(super) fn active_capture(&self, state: &mut State) -> Option<Arc<Capture>> {
        let capture = state.capture.as_ref()?;
        if capture.is_active() {
            return Some(Arc::clone(capture));
        }
        self.clear_capture(state);
        None
    }

    pub(super) fn set_capture(&self, state: &mut State, capture: Arc<Capture>, origin: Origin) {
        state.capture = Some(capture);
        state.branch = None;
        state.origin = origin;
        self.flags.fetch_or(CAPTURE, Ordering::AcqRel);
    }

    pub(super) fn clear_capture(&self, state: &mut State) {
        state.capture = None;
        state.branch = None;
        self.flags.fetch_and(!CAPTURE, Ordering::AcqRel);
    }

    /// Returns true if the worker has taken the operation from the queue.
    pub(super) fn is_started(&self, seq: u64) -> bool {
        self.started.load(Ordering::Acquire) >= seq
    }

    /// Blocks until the worker may run an operation, and removes that operation from the queue.
    /// Returns `None` once the stream is closed and the queue is empty.
    pub(super) fn next_entry(&self) -> Option<Entry> {
        let mut state = self.lock();
        loop {
            // While the queue is not empty, the flag word is not 0, so no thread can set `DIRECT`
            // after this check.
            let next = state.queue.front().map_or(0, |entry| entry.seq);
            let may_start = self.flags.load(Ordering::Acquire) & DIRECT == 0
                && state.held_back.iter().all(|number| *number > next);
            if may_start && let Some(entry) = state.queue.pop_front() {
                self.started.store(entry.seq, Ordering::Release);
                return Some(entry);
            }
            if state.closing && state.queue.is_empty() {
                return None;
            }
            state.worker_waits = true;
            state = self
                .work
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            state.worker_waits = false;
        }
    }

    /// Marks an operation as complete.
    pub(super) fn complete(&self, seq: u64, report: Report, result: Result<()>) {
        let mut state = self.lock();
        if let Err(error) = result {
            state.record_failure(seq, report, error);
        }
        // Decrements the number of operations in `flags` before publishing the completion, so that
        // a thread that has seen the completion of the last operation finds the stream idle.
        self.flags.fetch_sub(UNIT, Ordering::AcqRel);
        self.completed.store(seq, Ordering::Release);
        if state.waiting > 0 {
            self.done.notify_all();
        }
    }

    /// Blocks until a queued operation is complete. Returns `false` if the timeout expires first.
    pub(super) fn wait_complete(&self, seq: u64, timeout: Option<Duration>) -> bool {
        let start = Instant::now();
        let mut state = self.lock();
        while self.completed.load(Ordering::Acquire) < seq {
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            state.waiting += 1;
            state = match left {
                None => self
                    .done
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    self.done
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
            state.waiting -= 1;
        }
        true
    }
}
