//! Operations over a queue pair. The sockets of the link carry only requests for registrations.
//!
//! The link's lock protects the queue pair. Every thread that holds the lock may post requests and
//! take completions.

use std::collections::HashMap;
use std::io;

use super::Core;
use super::operations::{Operation, Operations, nonsense};
use crate::key::RemoteBuffer;
use crate::memory::WORD_BYTES;
use crate::socket::Socket;
use crate::verbs::{Completion, Opcode, QueuePair, WorkRequest};
use crate::wire::{Answer, Refusal, RemoteRegion, Request, Verb};

/// Maximum number of bytes of a request. The protocol permits 2^31.
const PIECE_BYTES: usize = 1 << 30;

#[derive(Debug)]
pub(super) struct Rdma {
    pub(super) queue_pair: QueuePair,
    /// Registrations of the peer's memory, by key.
    regions: HashMap<u64, KnownRegion>,
    /// Key whose registration this side has requested for the first operation of the queue.
    resolving: Option<u64>,
    /// Number of regions that are revoked.
    revoked: usize,
    /// Encoded requests that have not been sent.
    control: Vec<u8>,
    /// Number of read requests that have not completed.
    reads: usize,
    batch: Vec<WorkRequest>,
    taken: Vec<Completion>,
}

#[derive(Debug)]
struct KnownRegion {
    region: RemoteRegion,
    /// True if the owner waits for the confirmation that the memory is no longer accessed. Requests
    /// that have been posted may still access it.
    is_revoked: bool,
}

impl Rdma {
    pub(super) fn new(queue_pair: QueuePair) -> Self {
        Self {
            queue_pair,
            regions: HashMap::new(),
            resolving: None,
            revoked: 0,
            control: Vec::new(),
            reads: 0,
            batch: Vec::new(),
            taken: Vec::new(),
        }
    }

    /// Returns true if requests for the socket are waiting until it accepts bytes.
    pub(super) fn has_control(&self) -> bool {
        !self.control.is_empty()
    }

    /// Posts the requests of queued operations, until the send queue is full or a registration is
    /// missing, which it then requests.
    pub(super) fn flush(
        &mut self,
        operations: &mut Operations,
        socket: &Socket,
        core: &Core,
    ) -> io::Result<()> {
        self.confirm_revocations(operations);
        self.batch.clear();
        let free = self.queue_pair.free() as usize;
        while let Some(operation) = operations.queue.front_mut() {
            let key = operation.remote.key.id;
            let region = match self.regions.get(&key) {
                Some(known) if !known.is_revoked || operation.sent > 0 => known.region,
                // The registration is requested again after the revocation has been confirmed.
                Some(_) => break,
                None => {
                    if self.resolving.is_none() {
                        self.resolving = Some(key);
                        self.request(Verb::Resolve, key);
                    }
                    break;
                }
            };
            if !contains(&region, &operation.remote) {
                operations.refuse_first(core, Refusal::Range);
                continue;
            }
            let address = region.address + operation.remote.offset;
            if operation.verb == Verb::Store && !address.is_multiple_of(WORD_BYTES as u64) {
                operations.refuse_first(core, Refusal::Alignment);
                continue;
            }
            let opcode = match operation.verb {
                Verb::Write { notify: true } => Opcode::WriteNotify,
                Verb::Write { notify: false } | Verb::Store => Opcode::Write,
                _ => Opcode::Read,
            };
            let len = operation.local.len;
            let is_registered = operation.needs_registration(self.queue_pair.inline_bytes());
            let local_key = match is_registered {
                true => operation
                    .local
                    .local_key(self.queue_pair.context())
                    .map(Some),
                false => Ok(None),
            };
            let local_key = match local_key {
                Ok(key) => key,
                // A later operation must not signal that the bytes of this one have been written.
                Err(error) => return Err(io::Error::other(error.to_string())),
            };
            while self.batch.len() < free {
                let request = next_piece(operation, opcode, &region, local_key, self.reads > 0);
                self.reads += usize::from(opcode == Opcode::Read);
                self.batch.push(request);
                if operation.sent == len {
                    break;
                }
            }
            let is_posted = self
                .batch
                .last()
                .is_some_and(|last| last.id == operation.id);
            if !is_posted || operation.sent < len {
                break;
            }
            operations.in_flight.extend(operations.queue.pop_front());
        }
        // SAFETY: an operation keeps its memory alive, and `local_key` has registered it. The
        // operation leaves the queues after its last request has completed, or after the queue pair
        // has been dropped.
        unsafe { self.queue_pair.post(&self.batch) }?;
        self.send_control(socket)
    }

    /// Takes completions and posts further requests. Returns true if more completions may be
    /// available.
    pub(super) fn progress(
        &mut self,
        operations: &mut Operations,
        socket: Option<&Socket>,
        core: &Core,
    ) -> io::Result<bool> {
        self.taken.clear();
        let more = self.queue_pair.poll(&mut self.taken);
        let mut has_space = false;
        for index in 0..self.taken.len() {
            match self.taken[index] {
                Completion::Notified => core.inbox.post(),
                Completion::Done(id) => {
                    has_space = true;
                    self.done(operations, id)?;
                }
            }
        }
        let more = more?;
        match socket {
            Some(socket) if has_space || self.has_control() => {
                self.flush(operations, socket, core)?;
            }
            _ => {}
        }
        Ok(more)
    }

    /// Handles the completion of a request of the oldest operation.
    fn done(&mut self, operations: &mut Operations, id: u64) -> io::Result<()> {
        // An operation of several requests is still queued if not all of them have been posted.
        let is_posted = !operations.in_flight.is_empty();
        let first = operations.in_flight.front_mut();
        let operation = first
            .or(operations.queue.front_mut())
            .ok_or_else(nonsense)?;
        if operation.id != id {
            return Err(nonsense());
        }
        self.reads -= usize::from(operation.verb == Verb::Read);
        operation.received += piece_len(operation.local.len - operation.received);
        if is_posted && operation.received == operation.local.len {
            operations.finish_oldest(Ok(()));
        }
        Ok(())
    }

    /// Handles a message of the owner of the peer's memory.
    pub(super) fn answered(
        &mut self,
        operations: &mut Operations,
        core: &Core,
        answer: Answer,
        id: u64,
    ) -> io::Result<()> {
        match answer {
            Answer::Region(region)
                if self.resolving == Some(id)
                    && region.address.checked_add(region.len).is_some() =>
            {
                self.resolving = None;
                let is_revoked = false;
                self.regions.insert(id, KnownRegion { region, is_revoked });
            }
            Answer::Refused(refusal) if self.resolving == Some(id) => {
                self.resolving = None;
                operations.refuse_first(core, refusal);
            }
            Answer::Revoke => match self.regions.get_mut(&id) {
                Some(known) if !known.is_revoked => {
                    known.is_revoked = true;
                    self.revoked += 1;
                }
                _ => return Err(nonsense()),
            },
            _ => return Err(nonsense()),
        }
        Ok(())
    }

    /// Confirms the revocations of memories that no posted request accesses.
    fn confirm_revocations(&mut self, operations: &Operations) {
        if self.revoked == 0 {
            return;
        }
        let partly_posted = operations
            .queue
            .front()
            .filter(|operation| operation.sent > 0);
        let posted = || operations.in_flight.iter().chain(partly_posted);
        let mut confirmed = Vec::new();
        self.regions.retain(|key, known| {
            let keep =
                !known.is_revoked || posted().any(|operation| operation.remote.key.id == *key);
            if !keep {
                confirmed.push(*key);
            }
            keep
        });
        self.revoked -= confirmed.len();
        for key in confirmed {
            self.request(Verb::Revoked, key);
        }
    }

    fn request(&mut self, verb: Verb, key: u64) {
        let request = Request {
            verb,
            id: key,
            key,
            offset: 0,
            len: 0,
        };
        self.control.extend_from_slice(&request.to_bytes());
    }

    fn send_control(&mut self, socket: &Socket) -> io::Result<()> {
        while !self.control.is_empty() {
            // SAFETY: the length of the body is 0, so `send` reads no bytes of the body.
            let sent = unsafe { socket.send(&self.control, self.control.as_ptr(), 0) }?;
            match sent {
                Some(count) => drop(self.control.drain(..count)),
                None => break,
            }
        }
        Ok(())
    }
}

/// Creates the next request of an operation.
fn next_piece(
    operation: &mut Operation,
    opcode: Opcode,
    region: &RemoteRegion,
    local_key: Option<u32>,
    after_reads: bool,
) -> WorkRequest {
    let (local, rest) = operation.local.rest(operation.sent);
    let len = piece_len(rest);
    let is_last = len == rest;
    let request = WorkRequest {
        id: operation.id,
        opcode: match opcode {
            Opcode::WriteNotify if !is_last => Opcode::Write,
            opcode => opcode,
        },
        local: local as u64,
        len: len as u32,
        local_key,
        remote: region.address + operation.remote.offset + operation.sent as u64,
        remote_key: region.key,
        // A device may execute a write before an earlier read has returned its data.
        fence: opcode != Opcode::Read && after_reads,
    };
    operation.sent += len;
    request
}

fn piece_len(rest: usize) -> usize {
    rest.min(PIECE_BYTES)
}

fn contains(region: &RemoteRegion, remote: &RemoteBuffer) -> bool {
    let end = remote.offset.checked_add(remote.len);
    end.is_some_and(|end| end <= region.len)
}
