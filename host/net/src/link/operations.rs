//! Operations of a link that have not completed.

use core::time::Duration;
use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::Core;
use crate::TransportFailure;
use crate::key::RemoteBuffer;
use crate::memory::StorageRange;
use crate::pending::Pending;
use crate::wire::{Refusal, Request, Verb};
use crate::{Error, Result};

/// Operation that has not completed.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) name: &'static str,
    pub(super) verb: Verb,
    pub(super) local: StorageRange,
    pub(super) remote: RemoteBuffer,
    pub(super) deadline: Instant,
    pub(super) pending: Pending,
    pub(super) id: u64,
    pub(super) head: [u8; Request::BYTES],
    /// Over a socket, the number of bytes sent so far, including the header and, for a write, the
    /// payload. Over a queue pair, the number of bytes of the requests posted so far.
    pub(super) sent: usize,
    /// Over a socket, the number of bytes of a read's payload received so far. Over a queue pair,
    /// the number of bytes of the requests completed so far.
    pub(super) received: usize,
}

impl Operation {
    pub(super) fn new(
        verb: Verb,
        local: StorageRange,
        remote: RemoteBuffer,
        timeout: Duration,
        pending: Pending,
    ) -> Self {
        let now = Instant::now();
        Self {
            name: match verb {
                Verb::Write { .. } => "write",
                Verb::Store => "store",
                _ => "read",
            },
            verb,
            local,
            remote,
            deadline: now
                .checked_add(timeout)
                .unwrap_or(now + Duration::from_secs(1 << 30)),
            pending,
            id: 0,
            head: [0; Request::BYTES],
            sent: 0,
            received: 0,
        }
    }

    /// Returns true if an RDMA device that sends up to `inline_bytes` bytes inline can execute the
    /// operation only if its memory is registered.
    pub(super) fn needs_registration(&self, inline_bytes: usize) -> bool {
        match self.verb {
            _ if self.local.is_on_device() => self.local.len > 0,
            Verb::Read => self.local.len > 0,
            _ => self.local.len > inline_bytes,
        }
    }

    pub(super) fn payload(&self) -> usize {
        match self.verb.has_payload() {
            true => self.local.len,
            false => 0,
        }
    }
}

/// Operations that have not completed, in the order of their calls.
#[derive(Debug, Default)]
pub(super) struct Operations {
    /// Operations of which not all bytes have been sent.
    pub(super) queue: VecDeque<Operation>,
    /// Operations of which all bytes have been sent. They precede those in `queue`.
    pub(super) in_flight: VecDeque<Operation>,
    pub(super) finished: CompletedOps,
}

impl Operations {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Operation> {
        self.in_flight.iter().chain(&self.queue)
    }

    /// Completes the oldest operation, which is in flight.
    pub(super) fn finish_oldest(&mut self, result: Result<()>) {
        let operation = self.in_flight.pop_front();
        self.finished
            .extend(operation.map(|operation| (operation, result)));
    }

    /// Completes the first queued operation.
    pub(super) fn finish_first(&mut self, result: Result<()>) {
        let operation = self.queue.pop_front();
        self.finished
            .extend(operation.map(|operation| (operation, result)));
    }

    /// Completes the first queued operation with the error that the peer refused it.
    pub(super) fn refuse_first(&mut self, core: &Core, refusal: Refusal) {
        if let Some(operation) = self.queue.front() {
            let error = refused(core, operation, refusal);
            self.finish_first(Err(error));
        }
    }
}

pub(super) fn refused(core: &Core, operation: &Operation, refusal: Refusal) -> Error {
    core.error(
        operation.name,
        TransportFailure::Refused,
        format!(
            "{}: {} bytes at offset {} of a memory of {} bytes",
            refusal.describe(),
            operation.remote.len,
            operation.remote.offset,
            operation.remote.key.bytes
        ),
    )
}

/// Operations that were completed under the lock, with their results. They are reported and dropped
/// after the lock is released, because dropping one may end a registration, which takes long.
pub(super) type CompletedOps = Vec<(Operation, Result<()>)>;

pub(super) fn report(finished: CompletedOps) {
    for (operation, result) in finished {
        operation.pending.finish(result);
    }
}

pub(super) fn nonsense() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the peer sent an answer that matches no request; is it another version?",
    )
}
