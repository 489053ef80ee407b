//! Serving side of a link: admits one peer, then serves its requests.

use core::mem;
use core::time::Duration;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::Core;
use super::outgoing::GRACE;
use crate::TransportFailure;
use crate::memory::{Revoke, Target, WORD_BYTES, export, store_word};
use crate::socket::{GONE, Listener, Receiver, Socket};
use crate::wire::{Answer, Challenge, Hello, MAX_DATA_BYTES, Refusal, Request, Verb, Welcome};
use fusewire_driver::descriptor::{entry, poll};

/// Time limit for the first message on a new connection.
const HELLO_TIME: Duration = Duration::from_secs(5);

/// Maximum number of connections on which the first message has not arrived. If the limit is
/// reached, the next connection replaces the oldest of these.
const MAX_CALLERS: usize = 32;

/// Maximum number of bytes of answers that are sent together.
const ANSWER_BYTES: usize = 4 << 10;

/// Maximum number of bytes that one system call receives. The limit is small because a
/// deregistration of the memory waits for the call.
const PIECE_BYTES: usize = 256 << 10;

/// Runs the serving thread of a link, until the link ends.
pub(super) fn run(core: &Arc<Core>, listener: Listener) {
    if let Some(socket) = admit(core, listener) {
        let server = Server {
            core,
            socket: &socket,
            receiver: Receiver::new(),
            answers: Vec::new(),
            scratch: Vec::new(),
        };
        let detail = server.run();
        core.wait_for_cause();
        core.fail(TransportFailure::Broken, detail);
        if core.failure_kind() == Some(TransportFailure::Timeout) {
            // An operation of this side has timed out. Wait until the peer closes its connection,
            // which it does after its serving thread has stopped.
            let start = Instant::now();
            let mut entries = [entry(socket.raw(), libc::POLLRDHUP)];
            while entries[0].revents & GONE == 0 && start.elapsed() < GRACE {
                let left = GRACE.saturating_sub(start.elapsed());
                if poll(&mut entries, Some(left)).is_err() {
                    break;
                }
            }
        }
        socket.reset();
    }
    core.server_has_ended();
}

/// Connection on which the first message has not arrived yet.
struct Caller {
    socket: Socket,
    receiver: Receiver,
    challenge: Challenge,
    since: Instant,
}

/// Waits until the peer connects. Returns `None` if the link ends before the peer connects. Callers
/// that are not the peer are rejected and cannot delay the peer.
fn admit(core: &Core, listener: Listener) -> Option<Socket> {
    let mut callers: Vec<Caller> = Vec::new();
    loop {
        let mut entries = vec![
            entry(core.stop.raw(), libc::POLLIN),
            entry(listener.raw(), libc::POLLIN),
        ];
        let waiting = callers
            .iter()
            .map(|caller| entry(caller.socket.raw(), libc::POLLIN));
        entries.extend(waiting);
        let bound = (!callers.is_empty()).then_some(HELLO_TIME);
        if let Err(error) = poll(&mut entries, bound) {
            core.fail(TransportFailure::System, format!("poll: {error}"));
            return None;
        }
        if entries[0].revents != 0 {
            return None;
        }
        for at in (0..callers.len()).rev() {
            let caller = &mut callers[at];
            let mut keep = caller.since.elapsed() < HELLO_TIME;
            if entries[2 + at].revents != 0 {
                keep &= caller.receiver.fill(&caller.socket).is_ok();
                if let Some(message) = caller.receiver.message() {
                    let caller = callers.swap_remove(at);
                    if welcome(core, &caller, &message) {
                        return Some(caller.socket);
                    }
                    continue;
                }
            }
            if !keep {
                callers.swap_remove(at);
            }
        }
        if entries[1].revents != 0 {
            match listener.accept().and_then(challenge) {
                Ok(caller) => {
                    if callers.len() == MAX_CALLERS {
                        callers.remove(0);
                    }
                    callers.push(caller);
                }
                Err(error) => {
                    tracing::debug!(%error, "a transport could not accept a caller");
                    // If the process has no free descriptors, the listener stays readable. The
                    // pause avoids a busy loop.
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
    }
}

/// Sends the first message to a new caller.
fn challenge(socket: Socket) -> io::Result<Caller> {
    let challenge = Challenge::new().map_err(io::Error::other)?;
    let bytes = challenge.to_bytes();
    // SAFETY: the length of the body is 0, so `send` reads no bytes of the body. The send buffer of
    // a new socket has room for the message.
    unsafe { socket.send(&bytes, bytes.as_ptr(), 0) }?;
    Ok(Caller {
        socket,
        receiver: Receiver::new(),
        challenge,
        since: Instant::now(),
    })
}

/// Answers the first message of a caller. Returns true if the caller is the peer.
fn welcome(core: &Core, caller: &Caller, message: &[u8; Hello::BYTES]) -> bool {
    let Some(hello) = Hello::from_bytes(message, core.url.nonce(), &caller.challenge) else {
        tracing::debug!("a transport rejected an unknown caller");
        return false;
    };
    if !core.let_in(hello.from) {
        return false;
    }
    let connected = core.outgoing().connect_queue(hello.queue.as_ref());
    if let Err(error) = connected {
        core.fail(TransportFailure::Connect, error.to_string());
        return false;
    }
    let welcome = Welcome {
        bell: core.inbox.descriptor(),
        queue: core.queue_address(),
    };
    let bytes = welcome.to_bytes(core.url.nonce(), &hello);
    // SAFETY: the length of the body is 0, so `send` reads no bytes of the body.
    let sent = unsafe { caller.socket.send(&bytes, bytes.as_ptr(), 0) };
    // The send buffer of a new socket should have room for the whole message. If it does not, the
    // connection is closed, and the peer's `connect` fails.
    matches!(sent, Ok(Some(Welcome::BYTES)))
}

struct Server<'a> {
    core: &'a Arc<Core>,
    socket: &'a Socket,
    receiver: Receiver,
    /// Encoded answers that have not been sent.
    answers: Vec<u8>,
    /// Buffer for zeros to send and for bytes to discard.
    scratch: Vec<u8>,
}

impl Server<'_> {
    /// Serves until the link ends. Returns the reason.
    fn run(mut self) -> String {
        loop {
            if let Err(detail) = self.step() {
                return detail;
            }
        }
    }

    fn step(&mut self) -> Result<(), String> {
        let Some(message) = self.receiver.message() else {
            return self.fill();
        };
        let invalid = "the peer sent an invalid request; is it another version?";
        let request = Request::from_bytes(&message).ok_or(invalid)?;
        let uses_queue_pair = self.core.rdma.is_some();
        if uses_queue_pair != matches!(request.verb, Verb::Resolve | Verb::Revoked) {
            return Err(invalid.to_owned());
        }
        let outcome = match request.verb {
            Verb::Resolve => {
                self.resolve(&request);
                return Ok(());
            }
            Verb::Revoked => {
                self.core.is_revoked(request.key);
                return Ok(());
            }
            Verb::Write { notify } => {
                let outcome = self.write(&request)?;
                if notify && outcome.is_ok() {
                    // The notification must be posted after the bytes are written, so that its
                    // receiver sees the bytes.
                    self.core.inbox.post();
                }
                outcome
            }
            Verb::Store => self.store(&request)?,
            Verb::Read => self.read(&request)?,
        };
        let answer = outcome.map_or_else(Answer::Refused, |()| Answer::Done);
        self.answers.extend_from_slice(&answer.to_bytes(request.id));
        if self.answers.len() >= ANSWER_BYTES {
            self.send_answers()?;
        }
        Ok(())
    }

    /// Registers a memory for the peer.
    fn resolve(&mut self, request: &Request) {
        let Some(rdma) = &self.core.rdma else {
            return;
        };
        let link: Weak<dyn Revoke> = Arc::<Core>::downgrade(self.core);
        let exported = export(request.key, &rdma.context, link);
        let answer = exported.map_or_else(Answer::Refused, Answer::Region);
        self.answers.extend_from_slice(&answer.to_bytes(request.id));
    }

    /// Receives bytes into the buffer. Returns an error, so that the bytes are discarded, if the
    /// peer has reset the connection. In this case the peer reports to its caller that the bytes
    /// were not written.
    fn fill(&mut self) -> Result<(), String> {
        loop {
            // Sending may have cleared the event of a revocation, so this is checked after it.
            let keys = mem::take(&mut self.core.status().to_revoke);
            let answers = keys.iter().flat_map(|key| Answer::Revoke.to_bytes(*key));
            self.answers.extend(answers);
            if self.answers.is_empty() {
                break;
            }
            self.send_answers()?;
        }
        self.wait(libc::POLLIN, None)?;
        self.receiver.fill(self.socket).map_err(|e| e.to_string())?;
        self.wait(0, Some(Duration::ZERO))
    }

    /// Receives the payload of a write. Consumes the bytes of the stream even if the write is
    /// refused.
    fn write(&mut self, request: &Request) -> Result<Result<(), Refusal>, String> {
        let found = Target::find(request.key, request.offset, request.len);
        let (target, refusal) = match found {
            Ok(target) => {
                let mut left = request.len;
                loop {
                    if left > 0 && self.receiver.buffered() == 0 {
                        self.send_answers()?;
                        self.wait(libc::POLLIN, None)?;
                    }
                    let (receiver, socket) = (&mut self.receiver, self.socket);
                    let moved = target.access((request.len - left) as usize, |start, capacity| {
                        if capacity == 0 {
                            return Ok(Some(0));
                        }
                        // SAFETY: `access` passes memory that is valid for `capacity` bytes.
                        let taken = unsafe { receiver.take(start, capacity) };
                        if taken > 0 {
                            return Ok(Some(taken));
                        }
                        // SAFETY: `access` passes memory that is valid for `capacity` bytes.
                        unsafe { socket.receive(start, capacity.min(PIECE_BYTES)) }
                    });
                    match moved {
                        Some(Ok(count)) => left -= count.unwrap_or(0) as u64,
                        Some(Err(error)) => return Err(error.to_string()),
                        None => break (left, Refusal::Key),
                    }
                    if left == 0 {
                        return Ok(Ok(()));
                    }
                }
            }
            Err(refusal) => (request.len, refusal),
        };
        self.discard(target)?;
        Ok(Err(refusal))
    }

    /// Receives a word, and stores it by one instruction.
    fn store(&mut self, request: &Request) -> Result<Result<(), Refusal>, String> {
        if request.len != WORD_BYTES as u64 {
            return Err(
                "the peer stores a word of another size; is it another version?".to_owned(),
            );
        }
        let word = loop {
            match self.receiver.message() {
                Some(word) => break word,
                None => self.fill()?,
            }
        };
        Ok(Target::find(request.key, request.offset, request.len)
            .and_then(|target| {
                // SAFETY: `access` passes memory that is valid for the 8 bytes of the target. Peers
                // and this process access it by copies of the system, or atomically.
                let stored = target.access(0, |start, _| unsafe { store_word(start, word) });
                stored.ok_or(Refusal::Key)
            })
            .and_then(|is_aligned| is_aligned.then_some(()).ok_or(Refusal::Alignment)))
    }

    fn discard(&mut self, mut left: u64) -> Result<(), String> {
        while left > 0 {
            let buffered = usize::try_from(left).unwrap_or(usize::MAX);
            left -= self.receiver.skip(buffered) as u64;
            if left == 0 {
                break;
            }
            self.send_answers()?;
            self.wait(libc::POLLIN, None)?;
            self.scratch.resize(64 << 10, 0);
            let len = self
                .scratch
                .len()
                .min(usize::try_from(left).unwrap_or(usize::MAX));
            let scratch = self.scratch.as_mut_ptr();
            // SAFETY: `scratch` is exclusively borrowed and at least `len` bytes long.
            let count = unsafe { self.socket.receive(scratch, len) }.map_err(|e| e.to_string())?;
            left -= count.unwrap_or(0) as u64;
        }
        Ok(())
    }

    /// Sends the payload of a read in pieces.
    fn read(&mut self, request: &Request) -> Result<Result<(), Refusal>, String> {
        let target = match Target::find(request.key, request.offset, request.len) {
            Ok(target) => target,
            Err(refusal) => return Ok(Err(refusal)),
        };
        self.send_answers()?;
        let mut sent = 0;
        while sent < request.len {
            let piece = (request.len - sent).min(MAX_DATA_BYTES);
            let head = Answer::Data(piece).to_bytes(request.id);
            if !self.send_piece(&target, sent as usize, &head, piece as usize)? {
                return Ok(Err(Refusal::Key));
            }
            sent += piece;
        }
        // The key must be valid even for a read of 0 bytes.
        Ok(target.access(0, |_, _| ()).ok_or(Refusal::Key))
    }

    /// Sends `head`, which announces a piece of `len` bytes, and then the piece. If the memory is
    /// deregistered during the call, sends zeros for the remainder of the piece and returns false.
    fn send_piece(
        &mut self,
        target: &Target,
        from: usize,
        head: &[u8],
        len: usize,
    ) -> Result<bool, String> {
        let total = head.len() + len;
        let mut sent = 0;
        let mut open = true;
        while sent < total {
            let rest = &head[sent.min(head.len())..];
            let at = sent.saturating_sub(head.len());
            let socket = self.socket;
            let moved = target
                .access(from + at, |start, _| {
                    // SAFETY: `access` passes the bytes that start at `from + at`, which include
                    // the `len - at` bytes of the remainder of the piece.
                    unsafe { socket.send(rest, start, len - at) }
                })
                .filter(|_| open);
            let moved = match moved {
                Some(moved) => moved,
                None => {
                    open = false;
                    self.scratch.clear();
                    self.scratch.resize(64 << 10, 0);
                    let count = self.scratch.len().min(len - at);
                    // SAFETY: `scratch` has at least `count` bytes, by the computation of `count`.
                    unsafe { socket.send(rest, self.scratch.as_ptr(), count) }
                }
            };
            match moved.map_err(|error| error.to_string())? {
                Some(count) => sent += count,
                None => self.wait(libc::POLLOUT, None)?,
            }
        }
        Ok(open)
    }

    fn send_answers(&mut self) -> Result<(), String> {
        let mut sent = 0;
        while sent < self.answers.len() {
            let rest = &self.answers[sent..];
            // SAFETY: the length of the body is 0, so `send` reads no bytes of the body.
            let count = unsafe { self.socket.send(rest, rest.as_ptr(), 0) };
            match count.map_err(|error| error.to_string())? {
                Some(count) => sent += count,
                None => self.wait(libc::POLLOUT, None)?,
            }
        }
        self.answers.clear();
        Ok(())
    }

    /// Waits for the socket, or for a memory to revoke. Returns an error if the link has ended or
    /// the peer has closed its connection.
    fn wait(&self, events: i16, timeout: Option<Duration>) -> Result<(), String> {
        loop {
            let mut entries = [
                entry(self.core.stop.raw(), libc::POLLIN),
                entry(self.socket.raw(), events | libc::POLLRDHUP),
                entry(self.core.wake_server.raw(), libc::POLLIN),
            ];
            poll(&mut entries, timeout).map_err(|error| error.to_string())?;
            if entries[0].revents != 0 {
                return Err("the link was stopped".to_owned());
            }
            if entries[1].revents & GONE != 0 {
                return Err("the peer closed the connection, died, or is unreachable".to_owned());
            }
            if entries[2].revents != 0 {
                self.core.wake_server.clear();
                return Ok(());
            }
            if entries[1].revents != 0 || timeout.is_some() {
                return Ok(());
            }
        }
    }
}
