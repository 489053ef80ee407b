//! The state behind a stream: its queue, what is complete, and what has failed.
//!
//! One word of flags says at a glance whether the stream is idle. It is 0 exactly then, and a
//! compare-exchange from 0 to [`DIRECT`] is all that a blocking call on an idle stream needs.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::event::Event;
use super::graph::{Branch, Capture, Node};
use super::stream::Origin;
use crate::{Error, Result};

/// Flag: a thread runs work of the stream itself, outside of the queue.
pub(super) const DIRECT: u64 = 1;
/// Flag: the stream is, or was until lately, capturing.
pub(super) const CAPTURE: u64 = 2;
/// One queued or running piece of work; the bits above the flags count them.
pub(super) const UNIT: u64 = 4;

/// Failures whose tickets can still be asked for.
const MAX_FAILURES: usize = 1024;

/// Work in a queue.
#[expect(
    clippy::large_enum_variant,
    reason = "a boxed launch would allocate at each call"
)]
pub(super) enum Op {
    Node(Node),
    /// A record, with its number.
    Record(Event, u64),
    /// A wait, with the number of the record that it is for.
    Wait(Event, u64),
    Once(Box<dyn FnOnce() -> Result<()> + Send>),
    Nothing,
}

impl Op {
    pub(super) fn execute(self) -> Result<()> {
        match self {
            Self::Node(node) => return node.execute(),
            Self::Record(event, record) => event.complete(record),
            Self::Wait(event, record) => event.wait_for(record),
            Self::Once(call) => return call(),
            Self::Nothing => {}
        }
        Ok(())
    }
}

/// Who gets to know of a failure.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    /// The ticket, and the next synchronisation.
    Sticky,
    /// The ticket: its owner waits for it.
    TicketOnly,
}

pub(super) struct Entry {
    pub(super) seq: u64,
    pub(super) op: Op,
    pub(super) report: Report,
}

pub(super) struct Shared {
    /// [`DIRECT`], [`CAPTURE`], and the count of queued and running work.
    pub(super) flags: AtomicU64,
    /// Number of the last queued work that is complete.
    pub(super) completed: AtomicU64,
    state: Mutex<State>,
    /// The worker waits here.
    pub(super) work: Condvar,
    /// Threads that wait for work to complete.
    done: Condvar,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = self.flags.load(Ordering::Relaxed);
        f.debug_struct("Stream")
            .field("pending", &(flags / UNIT + flags % 2))
            .field("completed", &self.completed.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            flags: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        }
    }
}

pub(super) struct State {
    pub(super) queue: VecDeque<Entry>,
    /// Number of the next queued work; 0 is none's.
    pub(super) next: u64,
    pub(super) closing: bool,
    pub(super) worker_waits: bool,
    pub(super) origin: Origin,
    /// First failure since the last synchronisation.
    pub(super) sticky: Option<Error>,
    capture: Option<Arc<Capture>>,
    /// What the stream records into, where its part of the capture is a branch.
    pub(super) branch: Option<Branch>,
    waiting: u32,
    /// Failures by number, oldest first.
    failures: VecDeque<(u64, Error)>,
    /// Failures up to this number are not all kept.
    evicted: u64,
}

impl Default for State {
    fn default() -> Self {
        Self {
            queue: VecDeque::new(),
            next: 1,
            closing: false,
            worker_waits: false,
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
    /// The result of work that is complete.
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

    fn note(&mut self, seq: u64, report: Report, error: Error) {
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

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // No user code runs under the lock, so a panic cannot leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The capture that goes on. One that another stream has ended is forgotten here.
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

    /// Whether the worker has taken up a piece of work.
    pub(super) fn is_started(&self, seq: u64) -> bool {
        self.lock()
            .queue
            .front()
            .is_none_or(|entry| entry.seq > seq)
    }

    /// The next work for the worker; `None` when the stream is gone and the queue empty.
    pub(super) fn next_entry(&self) -> Option<Entry> {
        let mut state = self.lock();
        loop {
            // With work in the queue no other thread can begin to run work itself.
            if self.flags.load(Ordering::Acquire) & DIRECT == 0
                && let Some(entry) = state.queue.pop_front()
            {
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

    /// The worker has run a piece of work.
    pub(super) fn complete(&self, seq: u64, report: Report, result: Result<()>) {
        let mut state = self.lock();
        if let Err(error) = result {
            state.note(seq, report, error);
        }
        // First idle, then complete: who has seen the completion finds the stream idle.
        self.flags.fetch_sub(UNIT, Ordering::AcqRel);
        self.completed.store(seq, Ordering::Release);
        if state.waiting > 0 {
            self.done.notify_all();
        }
    }

    /// Waits until queued work is complete; `false` when the time is over first.
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
