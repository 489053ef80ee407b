//! Handles of asynchronous operations.

use crate::stream::{Event, Stream, Ticket};
use crate::{Error, Result};
use core::time::Duration;
use std::sync::Arc;

/// State of an asynchronous operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkStatus {
    /// Enqueued; previous work on the stream has not completed.
    NotStarted,
    /// Running.
    InProgress,
    /// Completed; the result is available.
    Completed,
    /// A wait exceeded the timeout.
    TimedOut,
    /// Failed for another reason.
    Error,
}

/// An asynchronous operation.
///
/// A handle may be sent to and shared with other threads. Dropping it neither cancels the operation
/// nor waits for it: the operation runs to its end, its memory stays allocated until then, and the
/// next [`Stream::synchronize`] of its stream reports its failure. An operation cannot be cancelled
/// by itself; [`crate::Communicator::abort`] ends all operations of a communicator.
#[derive(Clone, Debug)]
pub struct Work {
    stream: Stream,
    ticket: Ticket,
    /// Previous work on the stream, whose failure is also the failure of this work.
    follows: Option<Arc<Self>>,
}

impl Work {
    pub(super) fn new(stream: Stream, ticket: Ticket) -> Self {
        Self::following(stream, ticket, None)
    }

    /// Creates a handle that fails if `follows`, which precedes it on the stream, fails.
    pub(super) fn following(stream: Stream, ticket: Ticket, follows: Option<Self>) -> Self {
        Self {
            stream,
            ticket,
            follows: follows.map(Arc::new),
        }
    }

    /// Returns this work such that it fails if `before`, which precedes it on the stream, fails.
    pub(super) fn behind(self, before: Self) -> Self {
        Self::following(self.stream, self.ticket, Some(before))
    }

    /// Returns the state of the operation.
    pub fn status(&self) -> WorkStatus {
        match self.result() {
            None if !self.stream.is_started(self.ticket) => WorkStatus::NotStarted,
            None => WorkStatus::InProgress,
            Some(Ok(())) => WorkStatus::Completed,
            Some(Err(Error::Timeout(_))) => WorkStatus::TimedOut,
            Some(Err(_)) => WorkStatus::Error,
        }
    }

    /// Returns the operation's result, once it has ended.
    pub(super) fn result(&self) -> Option<Result<()>> {
        let result = self.stream.result(self.ticket)?;
        let before = self.follows.as_ref().and_then(|work| work.result());
        Some(before.unwrap_or(Ok(())).and(result))
    }

    /// Returns true if the operation has ended, with or without success.
    pub fn is_completed(&self) -> bool {
        self.stream.is_complete(self.ticket)
    }

    /// Makes all work that is enqueued on `stream` from now on wait for this operation. It does not
    /// wait for later operations of this operation's stream. The host does not wait.
    ///
    /// If one of the streams is capturing, the wait is captured: `stream` joins the capture, and
    /// waits for all that the operation's stream has captured so far. If the operation was captured
    /// earlier, `stream` waits for all work of the operation's stream so far, replays included.
    ///
    /// # Errors
    /// The operation's failure, if it has failed already. If it fails later, the next
    /// [`Stream::synchronize`] of `stream` returns the failure, on the CPU. A GPU does not: there,
    /// the failure is returned by this handle, by [`Stream::synchronize`] of the operation's
    /// stream, and by every later call of the communicator.
    ///
    /// The errors of [`Stream::record`] and [`Stream::wait_event`]; the driver's error if it could
    /// not record the end of the operation.
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        let is_capturing = self.stream.is_capturing() || stream.is_capturing();
        if !is_capturing && let Some(Err(error)) = self.result() {
            return Err(error);
        }
        if !is_capturing && stream.wait_ticket(&self.stream, self.ticket)? {
            return Ok(());
        }
        let event = Event::new();
        self.stream.record(&event)?;
        stream.wait_event(&event)
    }

    /// Blocks this thread until the operation has ended, and returns its result.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait_blocking(&self) -> Result<()> {
        self.wait_for(None)
    }

    /// Blocks like [`Work::wait_blocking`], for at most `timeout`.
    ///
    /// # Errors
    /// [`Error::StreamTimeout`] if the operation has not ended within `timeout`; the operation's
    /// failure.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<()> {
        self.wait_for(Some(timeout))
    }

    fn wait_for(&self, timeout: Option<Duration>) -> Result<()> {
        let waited = self.stream.wait(self.ticket, timeout);
        if let Err(Error::StreamTimeout { .. }) = waited {
            return waited;
        }
        self.result().unwrap_or(waited)
    }
}
