//! Requesting side of a link: queues operations, sends their requests, and receives the answers in
//! order.
//!
//! The thread that starts an operation immediately sends as many bytes as the socket accepts, up to
//! [`CALLERS_BYTES`]. The sender thread of the link sends the remaining bytes, receives the answers
//! and enforces the deadlines.

use core::mem;
use core::time::Duration;
use std::io;
use std::time::Instant;

use super::Core;
use super::operations::{CompletedOps, Operation, Operations, nonsense, refused, report};
use super::rdma::Rdma;
use crate::Error;
use crate::TransportFailure;
use crate::socket::{GONE, Receiver, Socket};
use crate::verbs::{QueueAddress, QueuePair};
use crate::wire::{Answer, Request, Verb};
use fusewire_driver::descriptor::{entry, poll};

/// Approximate maximum number of bytes that the thread that starts an operation sends itself.
const CALLERS_BYTES: usize = 128 << 10;

/// Maximum number of bytes that are sent while the lock is held.
const TURN_BYTES: usize = 1 << 20;

/// Maximum sleep of the sender thread. An operation whose deadline is after the end of the sleep
/// need not wake the thread.
const TICK: Duration = Duration::from_secs(1);

/// Time limit for steps of the shutdown of a link. After a timeout, the serving thread waits this
/// long for the peer to close its connection, and the sender thread waits twice as long for the
/// serving thread to stop. After other failures, the sender thread waits this long for the serving
/// thread to stop.
pub(super) const GRACE: Duration = Duration::from_millis(100);

/// State of the requesting side.
#[derive(Debug)]
pub(super) struct Outgoing {
    socket: Option<Socket>,
    /// Queue pair of the link, if it uses one. Dropped before the operations, whose memory the
    /// device accesses.
    rdma: Option<Rdma>,
    operations: Operations,
    receiver: Receiver,
    /// Number of bytes that are still to arrive for the current piece of a read.
    data_left: usize,
    next_id: u64,
    /// Lower bound of the deadlines of all operations.
    next_deadline: Option<Instant>,
    /// Time at which the sender thread wakes up if no other thread wakes it.
    sleeps_until: Option<Instant>,
}

impl Outgoing {
    pub(super) fn new(queue_pair: Option<QueuePair>) -> Self {
        Self {
            socket: None,
            rdma: queue_pair.map(Rdma::new),
            operations: Operations::default(),
            receiver: Receiver::new(),
            data_left: 0,
            next_id: 0,
            next_deadline: None,
            sleeps_until: None,
        }
    }

    pub(super) fn attach(&mut self, socket: Socket) {
        self.socket = Some(socket);
    }

    pub(super) fn attached(&self) -> bool {
        self.socket.is_some()
    }

    /// Connects the queue pair, if this link uses one, to that of the peer.
    pub(super) fn connect_queue(&mut self, peer: Option<&QueueAddress>) -> io::Result<()> {
        match (&mut self.rdma, peer) {
            (Some(rdma), Some(peer)) => {
                let connected = rdma.queue_pair.connect(peer);
                connected.map_err(|error| io::Error::other(error.to_string()))
            }
            (None, None) => Ok(()),
            _ => Err(io::Error::other(
                "one side uses RDMA and the other does not; use the same provider on both sides",
            )),
        }
    }

    /// Takes completions of the queue pair. Returns true if more may be available.
    pub(super) fn progress(&mut self, core: &Core) -> io::Result<bool> {
        let socket = self.socket.as_ref();
        match &mut self.rdma {
            Some(rdma) => rdma.progress(&mut self.operations, socket, core),
            None => Ok(false),
        }
    }

    /// Destroys the queue pair, if there is one.
    pub(super) fn destroy_queue_pair(&mut self) {
        self.rdma = None;
    }

    /// Takes the operations that have completed since the last call. The caller must [`report`]
    /// them after it has released the lock.
    pub(super) fn take_finished(&mut self) -> CompletedOps {
        mem::take(&mut self.operations.finished)
    }

    /// Returns true if every operation has completed.
    pub(super) fn is_idle(&self) -> bool {
        self.operations.iter().next().is_none()
    }

    /// Queues an operation. If no other operation is queued, sends as many bytes as the socket or
    /// queue pair accepts. Returns true if the caller must wake the sender thread.
    pub(super) fn post(&mut self, core: &Core, mut operation: Operation) -> io::Result<bool> {
        self.next_id += 1;
        operation.id = self.next_id;
        operation.head = Request {
            verb: operation.verb,
            id: operation.id,
            key: operation.remote.key.id,
            offset: operation.remote.offset,
            len: operation.remote.len,
        }
        .to_bytes();
        let deadline = operation.deadline;
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |d| d.min(deadline)));
        let queue = &mut self.operations.queue;
        queue.push_back(operation);
        if queue.len() == 1 {
            self.flush(core, CALLERS_BYTES)?;
        }
        let is_posted = self.operations.queue.is_empty();
        Ok(!is_posted || self.sleeps_until.is_none_or(|until| deadline < until))
    }

    /// Sends up to about `budget` bytes.
    fn flush(&mut self, core: &Core, budget: usize) -> io::Result<()> {
        let Some(socket) = &self.socket else {
            return Ok(());
        };
        let operations = &mut self.operations;
        if let Some(rdma) = &mut self.rdma {
            return rdma.flush(operations, socket, core);
        }
        let mut left = budget;
        while let Some(operation) = operations.queue.front_mut() {
            let payload = operation.payload();
            let head = &operation.head[operation.sent.min(Request::BYTES)..];
            let (body, len) = match operation.verb.has_payload() {
                true => operation
                    .local
                    .rest(operation.sent.saturating_sub(Request::BYTES)),
                false => (operation.local.start(), 0),
            };
            // SAFETY: the body lies within the operation's view, which keeps the memory alive.
            let Some(count) = (unsafe { socket.send(head, body, len.min(left)) })? else {
                return Ok(());
            };
            operation.sent += count;
            left = left.saturating_sub(count);
            if operation.sent == Request::BYTES + payload {
                operations.in_flight.extend(operations.queue.pop_front());
            }
            if left == 0 {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Receives answers, up to about [`TURN_BYTES`].
    fn receive(&mut self, core: &Core) -> io::Result<()> {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            let Some(socket) = &self.socket else {
                return Ok(());
            };
            if self.data_left > 0 {
                let in_flight = &mut self.operations.in_flight;
                let operation = in_flight.front_mut().ok_or_else(nonsense)?;
                let (target, _) = operation.local.rest(operation.received);
                // SAFETY: `answered` accepts a piece only if it fits the remainder of the view, so
                // `target` is writable for `data_left` bytes.
                let mut count = unsafe { self.receiver.take(target, self.data_left) };
                if count == 0 {
                    // SAFETY: `answered` accepts a piece only if it fits the remainder of the view,
                    // so `target` is writable for `data_left` bytes.
                    match unsafe { socket.receive(target, self.data_left) }? {
                        Some(received) => count = received,
                        None => return Ok(()),
                    }
                }
                operation.received += count;
                self.data_left -= count;
                budget = budget.saturating_sub(count);
            } else if let Some(message) = self.receiver.message() {
                let (answer, id) = Answer::from_bytes(&message).ok_or_else(nonsense)?;
                self.answered(core, answer, id)?;
            } else if !self.receiver.fill(socket)? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn answered(&mut self, core: &Core, answer: Answer, id: u64) -> io::Result<()> {
        let operations = &mut self.operations;
        if let Some(rdma) = &mut self.rdma {
            return rdma.answered(operations, core, answer, id);
        }
        let operation = operations.in_flight.front().ok_or_else(nonsense)?;
        if operation.id != id {
            return Err(nonsense());
        }
        let missing = match operation.verb {
            Verb::Read => operation.local.len - operation.received,
            _ => 0,
        };
        let result = match answer {
            Answer::Data(len) if len > 0 && len <= missing as u64 => {
                self.data_left = len as usize;
                return Ok(());
            }
            Answer::Done if missing == 0 => Ok(()),
            Answer::Refused(refusal) => Err(refused(core, operation, refusal)),
            _ => return Err(nonsense()),
        };
        operations.finish_oldest(result);
        Ok(())
    }

    /// Returns true if the deadline of an operation has passed.
    fn expired(&mut self, now: Instant) -> bool {
        if self.next_deadline.is_none_or(|deadline| now < deadline) {
            return false;
        }
        let deadlines = self.operations.iter().map(|operation| operation.deadline);
        self.next_deadline = deadlines.min();
        self.next_deadline.is_some_and(|deadline| deadline <= now)
    }
}

/// Runs the sender thread of a link, until the link ends.
pub(super) fn run(core: &Core) {
    // `poll` ignores entries without a descriptor.
    const NONE: i32 = -1;
    while !core.has_failed() {
        let (socket, completions, events, sleep) = {
            let mut outgoing = core.outgoing();
            let mut events = libc::POLLIN | libc::POLLRDHUP;
            let has_bytes = match &outgoing.rdma {
                Some(rdma) => rdma.has_control(),
                None => !outgoing.operations.queue.is_empty(),
            };
            if has_bytes {
                events |= libc::POLLOUT;
            }
            let now = Instant::now();
            let until = outgoing
                .next_deadline
                .map_or(now + TICK, |deadline| deadline.min(now + TICK));
            outgoing.sleeps_until = Some(until);
            let socket = outgoing.socket.as_ref().map_or(NONE, Socket::raw);
            let rdma = outgoing.rdma.as_ref();
            let completions = rdma.map_or(NONE, |rdma| rdma.queue_pair.event_fd());
            let sleep = until.saturating_duration_since(now);
            (socket, completions, events, sleep)
        };
        let mut entries = [
            entry(core.wake_sender.raw(), libc::POLLIN),
            entry(socket, events),
            entry(completions, libc::POLLIN),
        ];
        let polled = poll(&mut entries, Some(sleep));
        if entries[0].revents != 0 {
            core.wake_sender.clear();
        }
        if core.has_failed() {
            break;
        }
        let moved = polled.and_then(|()| {
            core.with_outgoing(|outgoing| {
                outgoing.turn(core, entries[1].revents, entries[2].revents != 0)
            })
        });
        if let Err(error) = moved {
            core.wait_for_cause();
            core.fail(TransportFailure::Broken, error.to_string());
        }
        core.progress(true);
    }
    end(core);
}

impl Outgoing {
    /// Handles the events of the socket, and of the completion queue.
    fn turn(&mut self, core: &Core, ready: i16, completed: bool) -> io::Result<()> {
        if ready & (libc::POLLIN | GONE) != 0 {
            self.receive(core)?;
        }
        if let Some(rdma) = self.rdma.as_mut().filter(|_| completed) {
            rdma.queue_pair.acknowledge()?;
        }
        // An answer may have been the registration for which queued operations wait.
        if ready & libc::POLLOUT != 0 || (self.rdma.is_some() && ready != 0) {
            self.flush(core, TURN_BYTES)?;
        }
        if self.expired(Instant::now()) {
            let detail = "an operation timed out, so the connection was reset";
            core.fail(TransportFailure::Timeout, detail.to_owned());
        }
        Ok(())
    }
}

/// Completes the operations of a failed link.
fn end(core: &Core) {
    let now = Instant::now();
    let timed_out = core.failure_kind() == Some(TransportFailure::Timeout);
    // Operations and notifications that have completed are not affected by the failure. The queue
    // pair is destroyed before the socket is reset, which tells the peer that this side's device
    // accesses no more memory.
    core.stop_queue_pair();
    if !timed_out {
        // Closing this connection tells the peer that this side's serving thread writes no more
        // bytes for the peer, so the serving thread must stop first.
        core.wait_for_server_end(GRACE);
    }
    let socket = core.outgoing().socket.take();
    if let Some(socket) = socket {
        socket.reset();
    }
    if timed_out {
        // The serving thread stops when the peer closes its connection, or after `GRACE`. A peer
        // that has closed its connection writes no more bytes.
        core.wait_for_server_end(2 * GRACE);
    }
    let Operations {
        queue,
        in_flight,
        finished,
    } = mem::take(&mut core.outgoing().operations);
    report(finished);
    let finished = in_flight
        .into_iter()
        .chain(queue)
        .map(|operation| {
            let error = if timed_out && operation.deadline <= now {
                core.error(
                    operation.name,
                    TransportFailure::Timeout,
                    format!(
                        "{} bytes were not transferred in time; the peer is stopped, overloaded or \
                         unreachable. The connection was reset: bind and connect again on both \
                         sides",
                        operation.remote.len
                    ),
                )
            } else {
                core.failure(operation.name)
                    .unwrap_or_else(|| core.not_connected(operation.name))
            };
            (operation, Err::<(), Error>(error))
        })
        .collect();
    report(finished);
}
