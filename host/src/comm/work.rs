//! Handles of asynchronous operations.

use crate::stream::{Event, Stream, Ticket};
use crate::{Error, Result};
use core::time::Duration;
use std::sync::Arc;

/// State of an asynchronous operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WorkStatus {
    /// Enqueued; what is before it on the stream has not ended.
    NotStarted,
    /// Running.
    InProgress,
    /// Done; the result is there.
    Completed,
    /// A wait outlasted the timeout.
    TimedOut,
    /// Failed otherwise.
    Error,
}

/// An asynchronous operation. It may be dropped early: the operation runs on, and what it works on
/// stays alive.
#[derive(Clone, Debug)]
pub struct Work {
    stream: Stream,
    ticket: Ticket,
    /// Work before this on the stream, whose failure is this one's too.
    follows: Option<Arc<Self>>,
}

impl Work {
    pub(super) fn new(stream: Stream, ticket: Ticket) -> Self {
        Self::following(stream, ticket, None)
    }

    /// As [`Work::new`]; fails as `follows`, which is before it on the stream, fails.
    pub(super) fn following(stream: Stream, ticket: Ticket, follows: Option<Self>) -> Self {
        Self {
            stream,
            ticket,
            follows: follows.map(Arc::new),
        }
    }

    /// This work, failing as `before` fails, which is before it on the stream.
    pub(super) fn behind(self, before: Self) -> Self {
        Self::following(self.stream, self.ticket, Some(before))
    }

    /// Where the operation stands.
    pub fn status(&self) -> WorkStatus {
        match self.result() {
            None if !self.stream.is_started(self.ticket) => WorkStatus::NotStarted,
            None => WorkStatus::InProgress,
            Some(Ok(())) => WorkStatus::Completed,
            Some(Err(Error::Timeout(_))) => WorkStatus::TimedOut,
            Some(Err(_)) => WorkStatus::Error,
        }
    }

    /// The operation's result, once it has ended.
    pub(super) fn result(&self) -> Option<Result<()>> {
        let result = self.stream.result(self.ticket)?;
        let before = self.follows.as_ref().and_then(|work| work.result());
        Some(before.unwrap_or(Ok(())).and(result))
    }

    /// Whether the operation has ended, well or not.
    pub fn is_completed(&self) -> bool {
        self.stream.is_complete(self.ticket)
    }

    /// Makes what is enqueued on `stream` from now on wait for the operation. The host does not
    /// wait.
    ///
    /// # Errors
    /// As [`Stream::record`] and [`Stream::wait_event`].
    pub fn wait(&self, stream: &Stream) -> Result<()> {
        let event = Event::new();
        self.stream.record(&event)?;
        stream.wait_event(&event)?;
        Ok(())
    }

    /// Waits on this thread until the operation has ended; its result.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait_blocking(&self) -> Result<()> {
        self.wait_for(None)
    }

    /// As [`Work::wait_blocking`], for at most `timeout`.
    ///
    /// # Errors
    /// [`Error::StreamTimeout`] when the operation has not ended by then; its failure.
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
