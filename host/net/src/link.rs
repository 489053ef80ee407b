//! A link over sockets. Each side opens one connection for its own requests, and serves the
//! connection of the other side. The two directions therefore do not wait for each other.

mod outgoing;
mod serve;

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use self::outgoing::{Operation, Outgoing};
use super::TransportFailure;
use super::direct::Direct;
use super::inbox::Inbox;
use super::key::RemoteBuffer;
use super::memory::{StorageRange, View, ViewMut};
use super::pending::Pending;
use super::provider::{ByteTransport, Notify};
use super::socket::{Listener, Receiver, Socket};
use super::url::{Nonce, Url};
use super::wire::{Hello, VERSION, Verb, Welcome};
use crate::{Error, Result};
use fusewire_driver::descriptor::{WakeFd, entry, poll};

/// State that a link shares with its two threads.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) url: Url,
    pub(super) inbox: Inbox,
    /// Event that stops the serving thread. Never cleared.
    pub(super) stop: WakeFd,
    pub(super) wake_sender: WakeFd,
    outgoing: Mutex<Outgoing>,
    failed: AtomicBool,
    status: Mutex<Status>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Status {
    /// The peer's URL without its secret.
    peer: Option<String>,
    /// Nonce of the peer to which this side is connecting or has connected.
    callee: Option<Nonce>,
    /// Nonce of the peer that this side has admitted.
    caller: Option<Nonce>,
    /// The first failure.
    failure: Option<(TransportFailure, String)>,
    server_ended: bool,
}

impl Core {
    fn status(&self) -> MutexGuard<'_, Status> {
        // The state is consistent after every statement, so a poisoned lock is harmless.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the link as failed. Only the first failure is kept.
    pub(super) fn fail(&self, kind: TransportFailure, detail: String) {
        let mut status = self.status();
        if status.failure.is_none() {
            status.failure = Some((kind, detail));
        }
        drop(status);
        self.failed.store(true, Ordering::SeqCst);
        self.stop.wake();
        self.wake_sender.wake();
        self.inbox.ring();
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    pub(super) fn failure_kind(&self) -> Option<TransportFailure> {
        self.status().failure.as_ref().map(|(kind, _)| *kind)
    }

    /// Returns the error for a call on a failed link, or `None` if the link has not failed.
    pub(super) fn failure(&self, operation: &'static str) -> Option<Error> {
        if !self.has_failed() {
            return None;
        }
        let (kind, detail) = self.status().failure.clone()?;
        Some(match kind {
            TransportFailure::Aborted => {
                let detail = "this side aborted; bind and connect again".to_owned();
                self.error(operation, kind, detail)
            }
            _ => self.error(
                operation,
                TransportFailure::Broken,
                format!("{detail}; bind and connect again on both sides"),
            ),
        })
    }

    pub(super) fn error(
        &self,
        operation: &'static str,
        kind: TransportFailure,
        detail: String,
    ) -> Error {
        Error::Call {
            operation,
            peer: self
                .status()
                .peer
                .clone()
                .unwrap_or_else(|| "no peer yet".to_owned()),
            kind,
            detail,
        }
    }

    pub(super) fn not_connected(&self, operation: &'static str) -> Error {
        let detail = "call connect with the peer's URL first".to_owned();
        self.error(operation, TransportFailure::NotConnected, detail)
    }

    /// Returns true if `caller` may connect: the link has not failed, and this side has not
    /// connected to another peer. Records `caller` as the admitted peer. The serving thread then
    /// stops listening.
    pub(super) fn let_in(&self, caller: Nonce) -> bool {
        let mut status = self.status();
        if status.failure.is_some() || status.callee.is_some_and(|callee| callee != caller) {
            return false;
        }
        status.caller = Some(caller);
        true
    }

    pub(super) fn server_has_ended(&self) {
        self.status().server_ended = true;
        self.changed.notify_all();
    }

    pub(super) fn wait_for_server_end(&self, timeout: Duration) {
        // The result is ignored, because callers of this function continue in the same way after a
        // timeout.
        let _ = self
            .changed
            .wait_timeout_while(self.status(), timeout, |status| !status.server_ended);
    }
}

/// Link over TCP, or over a Unix socket and shared memory.
#[derive(Debug)]
pub(super) struct Link {
    core: Arc<Core>,
    direct: OnceLock<Direct>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Link {
    /// Creates a link that serves connections to `listener`, which peers reach at `url`.
    pub(super) fn start(listener: Listener, url: Url, inbox: Inbox) -> io::Result<Self> {
        listener.set_nonblocking()?;
        let core = Arc::new(Core {
            url,
            inbox,
            stop: WakeFd::new()?,
            wake_sender: WakeFd::new()?,
            outgoing: Mutex::new(Outgoing::new()),
            failed: AtomicBool::new(false),
            status: Mutex::default(),
            changed: Condvar::new(),
        });
        let served = Arc::clone(&core);
        let thread = thread::Builder::new()
            .name("fusewire-serve".to_owned())
            .spawn(move || serve::run(&served, listener))?;
        Ok(Self {
            core,
            direct: OnceLock::new(),
            threads: Mutex::new(vec![thread]),
        })
    }

    fn dial(&self, peer: &Url, timeout: Duration) -> io::Result<(Socket, Welcome)> {
        let start = Instant::now();
        let socket = if peer.scheme() == "tcp" {
            let mut failure = io::Error::other("the address names no host");
            let mut found = None;
            for address in peer.address().to_socket_addrs()? {
                let left = timeout.saturating_sub(start.elapsed());
                match TcpStream::connect_timeout(&address, left.max(Duration::from_millis(1))) {
                    Ok(stream) => {
                        found = Some(stream);
                        break;
                    }
                    Err(error) => failure = error,
                }
            }
            Socket::new(found.ok_or(failure)?, true)?
        } else {
            let address = UnixAddr::from_abstract_name(peer.address())?;
            Socket::new(UnixStream::connect_addr(&address)?, false)?
        };
        let hello = Hello {
            version: VERSION,
            to: peer.nonce(),
            from: self.core.url.nonce(),
        }
        .to_bytes();
        // SAFETY: the length of the body is 0, so `send` reads no bytes of the body.
        unsafe { socket.send(&hello, hello.as_ptr(), 0) }?;
        let mut receiver = Receiver::new();
        let message = loop {
            if let Some(message) = receiver.message() {
                break message;
            }
            let left = timeout.saturating_sub(start.elapsed());
            let mut entries = [
                entry(self.core.stop.raw(), libc::POLLIN),
                entry(socket.raw(), libc::POLLIN),
            ];
            poll(&mut entries, Some(left))?;
            if entries[0].revents != 0 {
                return Err(io::Error::other("this side was stopped during connect"));
            }
            if entries[1].revents == 0 && left.is_zero() {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "no answer in time; is the peer running?",
                ));
            }
            receiver.fill(&socket).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => io::Error::new(
                    error.kind(),
                    "the peer rejected this side: the URL is not its newest, or it is connected to \
                     another process",
                ),
                _ => error,
            })?;
        };
        let welcome = Welcome::from_bytes(&message).ok_or_else(|| {
            io::Error::other("the answer is not from a transport; does another service listen?")
        })?;
        if welcome.version != VERSION {
            return Err(io::Error::other(format!(
                "the peer uses version {} of the protocol, this side {VERSION}; use the same \
                 library on both sides",
                welcome.version
            )));
        }
        Ok((socket, welcome))
    }

    fn submit(
        &self,
        verb: Verb,
        local: StorageRange,
        remote: RemoteBuffer,
        timeout: Duration,
    ) -> Pending {
        let pending = Pending::unfinished();
        let operation = Operation::new(verb, local, remote, timeout, pending.clone());
        let core = &*self.core;
        let mut outgoing = core.outgoing();
        if let Some(error) = core.failure(operation.name) {
            return Pending::finished(Err(error));
        }
        if !outgoing.attached() {
            return Pending::finished(Err(core.not_connected(operation.name)));
        }
        // Direct access must not overtake earlier operations, so it is used only if all of them
        // have completed.
        if outgoing.is_idle()
            && let Some(direct) = self.direct.get()
        {
            let moved = match verb {
                Verb::Write { .. } => direct.write(&operation.local, &remote),
                Verb::Read => direct.read(&operation.local, &remote),
            };
            if moved {
                if verb == (Verb::Write { notify: true }) {
                    direct.bell.post();
                }
                return Pending::finished(Ok(()));
            }
        }
        match outgoing.post(operation) {
            Ok(true) => core.wake_sender.wake(),
            Ok(false) => {}
            // The sender thread completes the operation with an error.
            Err(error) => core.fail(TransportFailure::Broken, error.to_string()),
        }
        pending
    }
}

impl ByteTransport for Link {
    fn url(&self) -> &Url {
        &self.core.url
    }

    fn connect(&self, peer: &Url, timeout: Duration) -> Result<()> {
        let core = &self.core;
        if let Some(error) = core.failure("connect") {
            return Err(error);
        }
        let refused = |detail: &str| Error::Call {
            operation: "connect",
            peer: peer.public(),
            kind: TransportFailure::Connect,
            detail: detail.to_owned(),
        };
        {
            let mut status = core.status();
            if status.callee.is_some() {
                return Err(refused("connect was called before on this binding"));
            }
            if status.caller.is_some_and(|caller| caller != peer.nonce()) {
                return Err(refused("another peer has connected to this side's URL"));
            }
            status.callee = Some(peer.nonce());
            status.peer = Some(peer.public());
        }
        let dialled = self.dial(peer, timeout).and_then(|(socket, welcome)| {
            // The peer's doorbell is mapped only if its descriptor names the process at the other
            // end of the socket.
            let bell = welcome.bell.as_ref();
            if let Some(bell) = bell.filter(|bell| socket.peer_process() == Some(bell.pid)) {
                match Direct::new(bell) {
                    // `connect` reaches this line only once, so the value is set only once.
                    Ok(direct) => drop(self.direct.set(direct)),
                    Err(error) => {
                        tracing::debug!(%error, "the peer's memory cannot be mapped");
                    }
                }
            }
            core.outgoing().attach(socket);
            let shared = Arc::clone(core);
            thread::Builder::new()
                .name("fusewire-send".to_owned())
                .spawn(move || outgoing::run(&shared))
        });
        match dialled {
            Ok(thread) => {
                self.lock_threads().push(thread);
                core.failure("connect").map_or(Ok(()), Err)
            }
            Err(error) => {
                core.status().callee = None;
                Err(refused(&error.to_string()))
            }
        }
    }

    fn connected(&self) -> bool {
        !self.core.has_failed()
            && self.core.outgoing().attached()
            && self.core.status().caller.is_some()
    }

    fn has_failed(&self) -> bool {
        self.core.has_failed()
    }

    fn write(
        &self,
        source: View,
        target: RemoteBuffer,
        notify: Notify,
        timeout: Duration,
    ) -> Pending {
        let notify = notify == Notify::Yes;
        self.submit(Verb::Write { notify }, source.0, target, timeout)
    }

    fn read(&self, target: ViewMut, source: RemoteBuffer, timeout: Duration) -> Pending {
        self.submit(Verb::Read, target.0, source, timeout)
    }

    fn wait_for_write(&self, timeout: Duration) -> Result<()> {
        const NAME: &str = "wait_for_write";
        let core = &*self.core;
        let waited = core.inbox.wait(timeout, || {
            // The failure is read before the notifications are checked, so that notifications that
            // arrived before the failure are still delivered.
            let failure = core.failure(NAME);
            let aborted = core.failure_kind() == Some(TransportFailure::Aborted);
            if !(failure.is_some() && aborted) && core.inbox.take() {
                return Some(Ok(()));
            }
            failure.map(Err)
        });
        waited.unwrap_or_else(|| {
            Err(core.error(
                NAME,
                TransportFailure::Timeout,
                format!(
                    "no notification arrived within {} s; does the peer write with a notification? \
                     The connection is still usable",
                    timeout.as_secs_f64()
                ),
            ))
        })
    }

    fn abort(&self) {
        self.core
            .fail(TransportFailure::Aborted, "aborted".to_owned());
    }
}

impl Link {
    fn lock_threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.abort();
        let threads = core::mem::take(&mut *self.lock_threads());
        for handle in threads {
            // A waker may drop the transport on one of the transport's own threads. A thread cannot
            // join itself.
            if handle.thread().id() != thread::current().id() && handle.join().is_err() {
                tracing::warn!("a thread of a transport panicked");
            }
        }
    }
}
