//! Requesting side of a link: queues operations, sends their requests, and receives the answers in
//! order.
//!
//! The thread that starts an operation immediately sends as many bytes as the socket accepts, up to
//! [`CALLERS_BYTES`]. The sender thread of the link sends the remaining bytes, receives the answers
//! and enforces the deadlines.

use core::mem;
use core::time::Duration;
use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::Core;
use crate::TransportFailure;
use crate::key::RemoteBuffer;
use crate::memory::StorageRange;
use crate::pending::Pending;
use crate::socket::{GONE, Receiver, Socket};
use crate::wire::{Answer, Request, Verb};
use crate::{Error, Result};
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

/// Operation that has not completed.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) name: &'static str,
    pub(super) verb: Verb,
    pub(super) local: StorageRange,
    pub(super) remote: RemoteBuffer,
    pub(super) deadline: Instant,
    pub(super) pending: Pending,
    id: u64,
    head: [u8; Request::BYTES],
    /// Number of bytes sent so far, including the header and, for a write, the payload.
    sent: usize,
    /// Number of bytes of a read's payload received so far.
    received: usize,
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
                Verb::Read => "read",
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

    fn payload(&self) -> usize {
        match self.verb {
            Verb::Write { .. } => self.local.len,
            Verb::Read => 0,
        }
    }
}

/// Operations that were completed under the lock, with their results. The results are reported
/// after the lock is released.
pub(super) type CompletedOps = Vec<(Pending, Result<()>)>;

/// State of the requesting side.
#[derive(Debug)]
pub(super) struct Outgoing {
    socket: Option<Socket>,
    queue: VecDeque<Operation>,
    in_flight: VecDeque<Operation>,
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
    pub(super) fn new() -> Self {
        Self {
            socket: None,
            queue: VecDeque::new(),
            in_flight: VecDeque::new(),
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

    /// Returns true if every operation has completed.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.in_flight.is_empty()
    }

    /// Queues an operation. If no other operation is queued, sends as many bytes as the socket
    /// accepts. Returns true if the caller must wake the sender thread.
    pub(super) fn post(&mut self, mut operation: Operation) -> io::Result<bool> {
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
        self.queue.push_back(operation);
        if self.queue.len() == 1 {
            self.flush(CALLERS_BYTES)?;
        }
        Ok(!self.queue.is_empty() || self.sleeps_until.is_none_or(|until| deadline < until))
    }

    /// Sends up to about `budget` bytes.
    fn flush(&mut self, budget: usize) -> io::Result<()> {
        let Some(socket) = &self.socket else {
            return Ok(());
        };
        let mut left = budget;
        while let Some(operation) = self.queue.front_mut() {
            let payload = operation.payload();
            let head = &operation.head[operation.sent.min(Request::BYTES)..];
            let (body, len) = match operation.verb {
                Verb::Write { .. } => operation
                    .local
                    .rest(operation.sent.saturating_sub(Request::BYTES)),
                Verb::Read => (operation.local.start(), 0),
            };
            // SAFETY: the body lies within the operation's view, which keeps the memory alive.
            let Some(count) = (unsafe { socket.send(head, body, len.min(left)) })? else {
                return Ok(());
            };
            operation.sent += count;
            left = left.saturating_sub(count);
            if operation.sent == Request::BYTES + payload {
                self.in_flight.extend(self.queue.pop_front());
            }
            if left == 0 {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Receives answers, up to about [`TURN_BYTES`].
    fn receive(&mut self, core: &Core, finished: &mut CompletedOps) -> io::Result<()> {
        let mut budget = TURN_BYTES;
        while budget > 0 {
            let Some(socket) = &self.socket else {
                return Ok(());
            };
            if self.data_left > 0 {
                let operation = self.in_flight.front_mut().ok_or_else(nonsense)?;
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
                self.answered(core, answer, id, finished)?;
            } else if !self.receiver.fill(socket)? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn answered(
        &mut self,
        core: &Core,
        answer: Answer,
        id: u64,
        finished: &mut CompletedOps,
    ) -> io::Result<()> {
        let operation = self.in_flight.front().ok_or_else(nonsense)?;
        if operation.id != id {
            return Err(nonsense());
        }
        let missing = match operation.verb {
            Verb::Write { .. } => 0,
            Verb::Read => operation.local.len - operation.received,
        };
        let result = match answer {
            Answer::Data(len) if len > 0 && len <= missing as u64 => {
                self.data_left = len as usize;
                return Ok(());
            }
            Answer::Done if missing == 0 => Ok(()),
            Answer::Refused(refusal) => Err(core.error(
                operation.name,
                TransportFailure::Refused,
                format!(
                    "{}: {} bytes at offset {} of a memory of {} bytes",
                    refusal.describe(),
                    operation.remote.len,
                    operation.remote.offset,
                    operation.remote.key.bytes
                ),
            )),
            _ => return Err(nonsense()),
        };
        let operation = self.in_flight.pop_front().ok_or_else(nonsense)?;
        finished.push((operation.pending, result));
        Ok(())
    }

    /// Returns true if the deadline of an operation has passed.
    fn expired(&mut self, now: Instant) -> bool {
        if self.next_deadline.is_none_or(|deadline| now < deadline) {
            return false;
        }
        let operations = self.queue.iter().chain(&self.in_flight);
        self.next_deadline = operations.map(|operation| operation.deadline).min();
        self.next_deadline.is_some_and(|deadline| deadline <= now)
    }
}

/// Runs the sender thread of a link, until the link ends.
pub(super) fn run(core: &Core) {
    loop {
        let (fd, events, sleep) = {
            let mut outgoing = core.outgoing();
            let Some(socket) = &outgoing.socket else {
                return;
            };
            let fd = socket.raw();
            let mut events = libc::POLLIN | libc::POLLRDHUP;
            if !outgoing.queue.is_empty() {
                events |= libc::POLLOUT;
            }
            let now = Instant::now();
            let until = outgoing
                .next_deadline
                .map_or(now + TICK, |deadline| deadline.min(now + TICK));
            outgoing.sleeps_until = Some(until);
            (fd, events, until.saturating_duration_since(now))
        };
        let mut entries = [
            entry(core.wake_sender.raw(), libc::POLLIN),
            entry(fd, events),
        ];
        let polled = poll(&mut entries, Some(sleep));
        if entries[0].revents != 0 {
            core.wake_sender.clear();
        }
        if core.has_failed() {
            break;
        }
        let ready = entries[1].revents;
        let mut finished = CompletedOps::new();
        {
            let mut outgoing = core.outgoing();
            let mut moved = polled;
            if moved.is_ok() && ready & (libc::POLLIN | GONE) != 0 {
                moved = outgoing.receive(core, &mut finished);
            }
            if moved.is_ok() && ready & libc::POLLOUT != 0 {
                moved = outgoing.flush(TURN_BYTES);
            }
            if let Err(error) = moved {
                core.fail(TransportFailure::Broken, error.to_string());
            } else if outgoing.expired(Instant::now()) {
                let detail = "an operation timed out, so the connection was reset";
                core.fail(TransportFailure::Timeout, detail.to_owned());
            }
        }
        report(finished);
        if core.has_failed() {
            break;
        }
    }
    end(core);
}

/// Completes the operations of a failed link.
fn end(core: &Core) {
    let now = Instant::now();
    let timed_out = core.failure_kind() == Some(TransportFailure::Timeout);
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
    let (queue, in_flight) = {
        let mut outgoing = core.outgoing();
        (
            mem::take(&mut outgoing.queue),
            mem::take(&mut outgoing.in_flight),
        )
    };
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
            (operation.pending, Err::<(), Error>(error))
        })
        .collect();
    report(finished);
}

fn report(finished: CompletedOps) {
    for (pending, result) in finished {
        pending.finish(result);
    }
}

fn nonsense() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the peer sent an answer that matches no request; is it another version?",
    )
}
