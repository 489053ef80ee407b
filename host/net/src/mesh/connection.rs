//! One connection of a mesh: a queue of messages to send, and the message that is being received.

use core::ptr;
use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use super::message::{self, Head, Kind};
use crate::socket::{Receiver, Socket};
use crate::wire::{Challenge, Hello, Welcome};

/// Zeros that are sent in place of memory that is no longer accessible.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Maximum number of bytes that one system call receives.
const RECEIVE_BYTES: usize = 1 << 20;

/// Maximum number of messages that one system call sends.
const MESSAGES: usize = 16;

/// Range of an endpoint's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) endpoint: u64,
    /// Address in the endpoint's memory.
    pub(super) address: u64,
    pub(super) start: *mut u8,
    pub(super) length: usize,
}

/// Payload of a message to send.
#[derive(Debug)]
pub(super) enum Body {
    Nothing,
    Memory(Range),
    Bytes(Box<[u8]>),
    Zeros(usize),
}

impl Body {
    fn length(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Memory(range) => range.length,
            Self::Bytes(bytes) => bytes.len(),
            Self::Zeros(length) => *length,
        }
    }

    /// Returns the address and the length of bytes to send next, after the first `sent`.
    fn rest(&self, sent: usize) -> (*const u8, usize) {
        match self {
            Self::Nothing => (ptr::null(), 0),
            Self::Memory(range) => (range.start.wrapping_add(sent), range.length - sent),
            Self::Bytes(bytes) => (bytes.as_ptr().wrapping_add(sent), bytes.len() - sent),
            Self::Zeros(length) => (ZEROS.as_ptr(), (length - sent).min(ZEROS.len())),
        }
    }
}

/// Message to send.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) head: Head,
    bytes: [u8; message::BYTES],
    pub(super) body: Body,
}

impl Message {
    pub(super) fn new(head: Head, body: Body) -> Self {
        Self {
            head,
            bytes: head.to_bytes(),
            body,
        }
    }

    fn length(&self) -> usize {
        message::BYTES + self.body.length()
    }
}

/// Destination of a payload that is being received.
#[derive(Debug)]
pub(super) enum Sink {
    /// Memory of an endpoint.
    Memory(Range),
    /// A notice for an endpoint.
    Notice(Vec<u8>),
    Discard,
}

/// Request that the peer will answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    pub(super) kind: Kind,
    pub(super) sender: u64,
    pub(super) number: u64,
    pub(super) endpoint: u64,
    /// Target of a get, while its endpoint permits the access.
    pub(super) target: Option<Range>,
}

/// State of a connection.
#[derive(Debug)]
pub(super) enum Stage {
    /// This side is connecting.
    Dialing,
    /// The challenge of the side that accepts has not arrived.
    Challenged,
    /// The welcome has not arrived.
    Greeted(Hello),
    /// This side has accepted the connection, and the caller's hello has not arrived.
    Accepted(Challenge),
    /// Messages are exchanged.
    Open,
}

/// Received part of a message.
#[derive(Debug)]
pub(super) enum Received {
    /// Nothing, for now.
    Nothing,
    /// A head. [`Connection::expect`] must be called if it has a payload.
    Head(Head),
    /// All of a payload.
    Payload(Head, Sink),
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Socket,
    pub(super) stage: Stage,
    /// True if this side has opened the connection.
    pub(super) is_outgoing: bool,
    /// Number of the peer, once it is known.
    pub(super) peer: Option<usize>,
    /// Time by which the handshake must have ended. `None` after it.
    pub(super) deadline: Option<Instant>,
    pub(super) receiver: Receiver,
    pub(super) queue: VecDeque<Message>,
    /// Bytes of the first message that have been sent.
    sent: usize,
    pub(super) expected: VecDeque<Expected>,
    payload: Option<(Head, Sink)>,
    /// Bytes of the payload that have arrived.
    arrived: usize,
    /// True if the socket accepts no more bytes.
    pub(super) is_full: bool,
    /// True if the peer receives no answers any more.
    pub(super) is_mute: bool,
    /// True if no more requests are received until answers have been sent.
    pub(super) is_clogged: bool,
    /// True if the connection is in the mesh's list of those with messages to send.
    pub(super) is_listed: bool,
}

impl Connection {
    pub(super) fn new(socket: Socket, stage: Stage, deadline: Instant) -> Self {
        Self {
            socket,
            is_outgoing: matches!(stage, Stage::Dialing),
            stage,
            peer: None,
            deadline: Some(deadline),
            receiver: Receiver::new(),
            queue: VecDeque::new(),
            sent: 0,
            expected: VecDeque::new(),
            payload: None,
            arrived: 0,
            is_full: false,
            is_mute: false,
            is_clogged: false,
            is_listed: false,
        }
    }

    /// Sends bytes of the handshake, for which the send buffer of a new socket has room.
    pub(super) fn send_all(&self, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: the length of the body is 0, so `send` reads no bytes of the body.
        match unsafe { self.socket.send(bytes, bytes.as_ptr(), 0) }? {
            Some(sent) if sent == bytes.len() => Ok(()),
            _ => Err(io::Error::other("a new connection accepts no bytes")),
        }
    }

    /// Sends queued messages until the socket accepts no more bytes. Calls `done` for each message
    /// that was sent.
    pub(super) fn send(&mut self, mut done: impl FnMut(&Message)) -> io::Result<()> {
        self.is_full = false;
        while !self.queue.is_empty() {
            let mut parts = [(ptr::null(), 0); 2 * MESSAGES];
            let mut offered = 0;
            let mut count = 0;
            let mut skip = self.sent;
            for message in self.queue.iter().take(MESSAGES) {
                let head = message.bytes.get(skip..).unwrap_or_default();
                let (body, length) = message.body.rest(skip.saturating_sub(message::BYTES));
                parts[count] = (head.as_ptr(), head.len());
                parts[count + 1] = (body, length);
                count += 2;
                offered += head.len() + length;
                let is_whole = skip + head.len() + length == message.length();
                skip = 0;
                if !is_whole {
                    break;
                }
            }
            // SAFETY: heads are in the queue. The memory of bodies is accessible until the owner of
            // an endpoint calls `forget`, which replaces them.
            let Some(mut sent) = unsafe { self.socket.send_parts(&parts[..count]) }? else {
                self.is_full = true;
                return Ok(());
            };
            let was_short = sent < offered;
            while sent > 0 {
                let Some(first) = self.queue.front() else {
                    break;
                };
                let missing = first.length() - self.sent;
                if sent < missing {
                    self.sent += sent;
                    break;
                }
                sent -= missing;
                self.sent = 0;
                if let Some(first) = self.queue.pop_front() {
                    done(&first);
                }
            }
            if was_short {
                self.is_full = true;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Sets the destination of the payload of `head`.
    pub(super) fn expect(&mut self, head: Head, sink: Sink) {
        self.payload = Some((head, sink));
        self.arrived = 0;
    }

    /// Receives a head or a payload. Receives nothing from the socket once the budget is used up.
    pub(super) fn receive(&mut self, budget: &mut usize) -> io::Result<Received> {
        loop {
            if let Some((head, sink)) = &mut self.payload {
                let missing = head.length as usize - self.arrived;
                if missing == 0 {
                    let (head, sink) = (*head, core::mem::replace(sink, Sink::Discard));
                    self.payload = None;
                    return Ok(Received::Payload(head, sink));
                }
                let most = missing.min(RECEIVE_BYTES);
                let mut scratch = [0u8; 4 << 10];
                let (at, room) = match sink {
                    Sink::Memory(range) => (range.start.wrapping_add(self.arrived), most),
                    _ => (scratch.as_mut_ptr(), most.min(scratch.len())),
                };
                // SAFETY: `at` has room for `room` bytes: it is the scratch buffer, or the rest of
                // a range that is accessible until the owner of an endpoint calls `forget`, which
                // replaces the sink.
                let mut count = unsafe { self.receiver.take(at, room) };
                if count == 0 {
                    if *budget == 0 {
                        return Ok(Received::Nothing);
                    }
                    // SAFETY: see above.
                    match unsafe { self.socket.receive(at, room) }? {
                        Some(received) => count = received,
                        None => return Ok(Received::Nothing),
                    }
                }
                if let Sink::Notice(bytes) = sink {
                    bytes.extend_from_slice(&scratch[..count]);
                }
                self.arrived += count;
                *budget = budget.saturating_sub(count);
            } else if let Some(bytes) = self.receiver.message() {
                let head = Head::from_bytes(&bytes, self.is_outgoing).ok_or_else(invalid)?;
                return Ok(Received::Head(head));
            } else if *budget == 0 || !self.receiver.fill(&self.socket)? {
                return Ok(Received::Nothing);
            } else {
                *budget = budget.saturating_sub(self.receiver.buffered());
            }
        }
    }

    /// Ends all accesses to memory of an endpoint at addresses that `selects` selects: what is
    /// still to be sent from there becomes zeros, and what arrives for it is discarded.
    pub(super) fn forget(&mut self, endpoint: u64, selects: &dyn Fn(u64) -> bool) {
        let is_in = |range: &Range| range.endpoint == endpoint && selects(range.address);
        for message in &mut self.queue {
            if let Body::Memory(range) = &message.body
                && is_in(range)
            {
                message.body = Body::Zeros(range.length);
            }
        }
        for expected in &mut self.expected {
            expected.target = expected.target.filter(|target| !is_in(target));
        }
        if let Some((_, sink)) = &mut self.payload
            && let Sink::Memory(range) = sink
            && is_in(range)
        {
            *sink = Sink::Discard;
        }
    }

    /// Removes the queued puts, stores and signals of an endpoint, except a message that has been
    /// sent in part.
    pub(super) fn drop_requests(&mut self, sender: u64) {
        let is_partly_sent = self.sent > 0;
        let mut at = 0;
        self.queue.retain(|message| {
            at += 1;
            let kind = message.head.kind;
            let is_request = matches!(kind, Kind::Put | Kind::Store | Kind::Signal);
            (at == 1 && is_partly_sent) || !is_request || message.head.sender != sender
        });
    }
}

impl Connection {
    /// Takes the next message of the handshake, if it has arrived.
    pub(super) fn handshake<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        loop {
            if let Some(message) = self.receiver.message() {
                return Ok(Some(message));
            }
            if !self.receiver.fill(&self.socket)? {
                return Ok(None);
            }
        }
    }

    /// Decodes the answer to `hello` by the process whose URL has this secret.
    pub(super) fn welcome(
        &mut self,
        hello: &Hello,
        secret: crate::Nonce,
    ) -> io::Result<Option<Welcome>> {
        let Some(message) = self.handshake()? else {
            return Ok(None);
        };
        let welcome = Welcome::from_bytes(&message, secret, hello);
        let welcome = welcome.ok_or_else(|| {
            io::Error::other("the answer does not prove the URL's secret; who listens there?")
        })?;
        Ok(Some(welcome))
    }
}

pub(super) fn invalid() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "the peer sent an invalid message; is it another version?",
    )
}
