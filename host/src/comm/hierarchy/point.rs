//! Point-to-point messages. Messages within a host use the channels of the local communicator, and
//! messages between hosts use Gloo.

use std::sync::PoisonError;
use std::thread;

use super::{GRACE, Hierarchy, Message, NAME, backend_error};
use crate::Result;
use crate::comm::{P2pKind, RawMessage};

impl Hierarchy {
    pub(super) fn start_group(&self) -> Result<()> {
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        if group.is_some() {
            return Err(backend_error(
                NAME,
                "group_start",
                "a group is open already",
            ));
        }
        *group = Some(Vec::new());
        Ok(())
    }

    pub(super) fn end_group(&self) -> Result<()> {
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        let messages = group.take().unwrap_or_default();
        drop(group);
        self.exchange(&messages, "group_end")
    }

    pub(super) fn message(&self, message: Message, operation: &'static str) -> Result<()> {
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(messages) = &mut *group {
            messages.push(message);
            return Ok(());
        }
        drop(group);
        self.exchange(&[message], operation)
    }

    /// Sends and receives all `messages` at once. Messages between two ranks keep their order,
    /// because they all take the same route.
    pub(super) fn exchange(&self, messages: &[Message], operation: &'static str) -> Result<()> {
        let own = self.own().host;
        let is_here = |message: &&Message| {
            message.peer != self.rank && self.coordinates[message.peer as usize].host == own
        };
        let here: Vec<Message> = messages.iter().filter(is_here).copied().collect();
        let there: Vec<Message> = messages.iter().filter(|m| !is_here(m)).copied().collect();
        if here.is_empty() {
            return self.exchange_there(&there, operation);
        }
        if there.is_empty() {
            return self.exchange_here(&here, operation);
        }
        // Messages within the host and between hosts are exchanged concurrently. If they were
        // exchanged in sequence, a ring of sends that includes messages of both kinds would
        // deadlock.
        thread::scope(|scope| {
            let between = scope.spawn(|| {
                let ran = self.exchange_there(&there, operation);
                if ran.is_err() {
                    // Aborts the local communicator, so that other ranks of this host do not wait
                    // for this rank's local messages.
                    self.local.abort();
                }
                ran
            });
            let inside = self.exchange_here(&here, operation);
            if inside.is_err() {
                super::Backend::abort(&self.all);
            }
            let between = between
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // If both exchanges failed, one of them may have failed only because the other one
            // aborted it. The error text contains both errors, because the order of the failures is
            // unknown.
            match (inside, between) {
                (Err(inside), Err(between)) => {
                    let detail = format!("{inside}; {between}");
                    Err(backend_error(NAME, operation, detail))
                }
                (inside, between) => inside.and(between),
            }
        })
    }

    fn exchange_there(&self, messages: &[Message], operation: &'static str) -> Result<()> {
        self.all
            .exchange(messages, operation)
            .map_err(self.between_failed(operation))
    }

    fn exchange_here(&self, messages: &[Message], operation: &'static str) -> Result<()> {
        let Some(timeout) = messages.iter().map(|message| message.timeout).max() else {
            return Ok(());
        };
        let raw: Vec<RawMessage> = messages
            .iter()
            .filter(|message| message.bytes > 0)
            .map(|message| RawMessage {
                kind: if message.is_send {
                    P2pKind::Send
                } else {
                    P2pKind::Recv
                },
                at: message.at,
                bytes: message.bytes,
                peer: self.coordinates[message.peer as usize].local,
            })
            .collect();
        if raw.is_empty() {
            return Ok(());
        }
        let local = self.local.with_timeout(timeout + GRACE);
        // SAFETY: the callers of `send` and `recv` guarantee that the buffers are valid until the
        // group has completed.
        unsafe { local.exchange_raw(&raw) }.map_err(self.here_failed(operation))
    }
}
