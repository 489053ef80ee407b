//! A link over sockets. Each side opens one connection for its own requests, and serves the
//! connection of the other side. The two directions therefore do not wait for each other.

mod operations;
mod outgoing;
mod rdma;
mod serve;

use core::net::SocketAddr;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::io;
use std::net::ToSocketAddrs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use socket2::{Domain, Type};

use self::operations::{Operation, report};
use self::outgoing::Outgoing;
use super::TransportFailure;
use super::direct::Direct;
use super::inbox::Inbox;
use super::key::RemoteBuffer;
use super::memory::{Revoke, StorageRange, View, ViewMut, on_device};
use super::pending::Pending;
use super::provider::{ByteTransport, Notify};
use super::socket::{Listener, Receiver, Socket};
use super::url::{PeerId, Url};
use super::verbs::{Context, QueueAddress, QueuePair};
use super::wire::{Challenge, Hello, VERSION, Verb, Welcome};
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
    /// Event after which the serving thread sends revocations.
    wake_server: WakeFd,
    rdma: Option<RdmaEndpoint>,
    outgoing: Mutex<Outgoing>,
    failed: AtomicBool,
    status: Mutex<Status>,
    changed: Condvar,
}

/// Queue pair of a link, for the peer, and its device.
#[derive(Debug)]
struct RdmaEndpoint {
    address: QueueAddress,
    context: Arc<Context>,
    inline_bytes: usize,
}

#[derive(Debug, Default)]
struct Status {
    /// The peer's URL without its secret.
    peer: Option<String>,
    /// The peer to which this side is connecting or has connected.
    callee: Option<PeerId>,
    /// The peer that this side has admitted.
    caller: Option<PeerId>,
    /// The first failure.
    failure: Option<(TransportFailure, String)>,
    server_ended: bool,
    /// Keys whose revocation has not been sent to the peer.
    to_revoke: Vec<u64>,
    /// Keys whose revocation the peer has not confirmed.
    revoking: Vec<u64>,
}

impl Core {
    fn status(&self) -> MutexGuard<'_, Status> {
        // The state is consistent after every statement, so a poisoned lock is harmless.
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `change` with the lock, and reports the operations that it completed.
    fn with_outgoing<R>(&self, change: impl FnOnce(&mut Outgoing) -> R) -> R {
        let mut outgoing = self.outgoing();
        let result = change(&mut outgoing);
        let finished = outgoing.take_finished();
        drop(outgoing);
        report(finished);
        result
    }

    /// Takes all completions of the queue pair, if the link uses one. Returns at once if another
    /// thread holds the lock and `must_wait` is false.
    fn progress(&self, must_wait: bool) {
        if self.rdma.is_none() {
            return;
        }
        loop {
            let mut outgoing = match self.outgoing.try_lock() {
                Ok(outgoing) => outgoing,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if must_wait => self.outgoing(),
                Err(TryLockError::WouldBlock) => return,
            };
            let more = outgoing.progress(self);
            let finished = outgoing.take_finished();
            drop(outgoing);
            report(finished);
            match more {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.fail(TransportFailure::Broken, error.to_string()),
            }
        }
    }

    /// Takes all completions, and destroys the queue pair, if the link uses one. Afterwards, this
    /// side's device accesses no memory for this link.
    fn stop_queue_pair(&self) {
        // Completions of requests that were flushed report errors. There are at most as many as the
        // queues hold, and each call takes some.
        const CALLS: usize = 100;
        for _ in 0..CALLS {
            if !matches!(self.with_outgoing(|o| o.progress(self)), Ok(true) | Err(_)) {
                break;
            }
        }
        self.outgoing().destroy_queue_pair();
    }

    /// Gives the queue pair a short time to report why the peer has closed its sockets. A peer
    /// closes them after its device has refused a request, and the device's response may arrive
    /// later.
    fn wait_for_cause(&self) {
        const TIME: Duration = Duration::from_millis(20);
        let start = Instant::now();
        while self.rdma.is_some() && start.elapsed() < TIME {
            self.progress(true);
            if self.has_failed() || self.outgoing().is_idle() {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
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
        self.changed.notify_all();
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
    pub(super) fn let_in(&self, caller: PeerId) -> bool {
        let mut status = self.status();
        if status.failure.is_some() || status.callee.is_some_and(|callee| callee != caller) {
            return false;
        }
        status.caller = Some(caller);
        true
    }

    /// Records that the peer no longer accesses the memory of `key`.
    fn is_revoked(&self, key: u64) {
        self.status().revoking.retain(|known| *known != key);
        self.changed.notify_all();
    }

    fn queue_address(&self) -> Option<QueueAddress> {
        self.rdma.as_ref().map(|rdma| rdma.address)
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

impl Revoke for Core {
    fn revoke(&self, key: u64) {
        let mut status = self.status();
        status.to_revoke.push(key);
        status.revoking.push(key);
        drop(status);
        self.wake_server.wake();
    }

    fn wait_for_revocation(&self, key: u64, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(self.status(), left, |status| {
                status.failure.is_none() && status.revoking.contains(&key)
            });
        let (status, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let is_confirmed = !status.revoking.contains(&key);
        drop(status);
        if !is_confirmed {
            // A later registration may get the same address and key, so requests of this peer must
            // not be executed any more.
            let detail = "the peer did not confirm that it no longer accesses memory that this \
                          side has dropped; is it suspended?";
            self.fail(TransportFailure::Broken, detail.to_owned());
            self.stop_queue_pair();
        }
    }
}

/// Link over TCP, over a Unix socket and shared memory, or over a queue pair and TCP.
#[derive(Debug)]
pub(super) struct Link {
    core: Arc<Core>,
    direct: OnceLock<Direct>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Link {
    /// Creates a link that serves connections to `listener`, which peers reach at `url`. With a
    /// queue pair, writes and reads use the queue pair.
    pub(super) fn start(
        listener: Listener,
        url: Url,
        inbox: Inbox,
        queue_pair: Option<QueuePair>,
    ) -> io::Result<Self> {
        listener.set_nonblocking()?;
        let rdma = queue_pair.as_ref().map(|queue_pair| RdmaEndpoint {
            address: queue_pair.address(),
            context: Arc::clone(queue_pair.context()),
            inline_bytes: queue_pair.inline_bytes(),
        });
        let core = Arc::new(Core {
            url,
            inbox,
            stop: WakeFd::new()?,
            wake_sender: WakeFd::new()?,
            wake_server: WakeFd::new()?,
            rdma,
            outgoing: Mutex::new(Outgoing::new(queue_pair)),
            failed: AtomicBool::new(false),
            status: Mutex::default(),
            changed: Condvar::new(),
        });
        let this = Self {
            core,
            direct: OnceLock::new(),
            threads: Mutex::default(),
        };
        this.spawn("fusewire-serve", move |core| serve::run(core, listener))?;
        // Without a queue pair, the sender thread has nothing to do before `connect`.
        if this.core.rdma.is_some() {
            this.spawn("fusewire-send", |core| outgoing::run(core))?;
        }
        Ok(this)
    }

    fn spawn(&self, name: &str, run: impl FnOnce(&Arc<Core>) + Send + 'static) -> io::Result<()> {
        let core = Arc::clone(&self.core);
        let thread = thread::Builder::new().name(name.to_owned());
        let thread = thread.spawn(move || run(&core))?;
        self.lock_threads().push(thread);
        Ok(())
    }

    fn dial(&self, peer: &Url, timeout: Duration) -> io::Result<(Socket, Welcome)> {
        let start = Instant::now();
        let socket = if peer.scheme() != "shm" {
            let mut failure = io::Error::other("the address names no host");
            let mut found = None;
            for address in peer.address().to_socket_addrs()? {
                let left = timeout.saturating_sub(start.elapsed());
                match self.dial_tcp(&address, left.max(Duration::from_millis(1))) {
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
        let mut receiver = Receiver::new();
        let far = start + Duration::from_secs(1 << 30);
        let deadline = start.checked_add(timeout).unwrap_or(far);
        let message = self.receive_message(&socket, &mut receiver, deadline)?;
        let challenge = Challenge::from_bytes(&message)
            .ok_or_else(|| io::Error::other("no transport listens there, but another service"))?;
        if challenge.version != VERSION {
            return Err(io::Error::other(format!(
                "the peer uses version {} of the protocol, this side {VERSION}; use the same \
                 library on both sides",
                challenge.version
            )));
        }
        let hello = Hello {
            from: self.core.url.nonce().peer_id(),
            challenge: Challenge::new().map_err(io::Error::other)?.random,
            queue: self.core.queue_address(),
        };
        let bytes = hello.to_bytes(peer.nonce(), &challenge);
        // SAFETY: the length of the body is 0, so `send` reads no bytes of the body.
        unsafe { socket.send(&bytes, bytes.as_ptr(), 0) }?;
        let message = self.receive_message(&socket, &mut receiver, deadline)?;
        let welcome = Welcome::from_bytes(&message, peer.nonce(), &hello).ok_or_else(|| {
            io::Error::other("the answer does not prove the URL's secret; who listens there?")
        })?;
        Ok((socket, welcome))
    }

    /// Receives the peer's next message during `connect`.
    fn receive_message<const BYTES: usize>(
        &self,
        socket: &Socket,
        receiver: &mut Receiver,
        deadline: Instant,
    ) -> io::Result<[u8; BYTES]> {
        loop {
            if let Some(message) = receiver.message() {
                return Ok(message);
            }
            let left = deadline.saturating_duration_since(Instant::now());
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
            receiver.fill(socket).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => io::Error::new(
                    error.kind(),
                    "the peer rejected this side: the URL is not its newest, or it is connected to \
                     another process",
                ),
                _ => error,
            })?;
        }
    }

    /// Opens a TCP connection from the address on which this link listens, so that it uses the same
    /// interface.
    fn dial_tcp(&self, peer: &SocketAddr, timeout: Duration) -> io::Result<socket2::Socket> {
        let socket = socket2::Socket::new(Domain::for_address(*peer), Type::STREAM, None)?;
        let own = self.core.url.address().parse::<SocketAddr>().ok();
        if let Some(mut own) = own.filter(|own| own.is_ipv4() == peer.is_ipv4()) {
            own.set_port(0);
            socket.bind(&own.into())?;
        }
        socket.connect_timeout(&(*peer).into(), timeout)?;
        Ok(socket)
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
        if core.rdma.is_none() && operation.local.is_on_device() {
            return Pending::finished(Err(on_device(operation.name)));
        }
        // Registers the memory before the lock is taken, because this may take long.
        if let Some(rdma) = &core.rdma
            && operation.needs_registration(rdma.inline_bytes)
            && let Err(error) = operation.local.local_key(&rdma.context)
        {
            // A later operation must not signal that the bytes of this one have been written.
            core.fail(TransportFailure::System, error.to_string());
        }
        core.with_outgoing(|outgoing| {
            if let Some(error) = core.failure(operation.name) {
                return Pending::finished(Err(error));
            }
            if !outgoing.attached() {
                return Pending::finished(Err(core.not_connected(operation.name)));
            }
            self.start_operation(outgoing, operation);
            pending
        })
    }

    /// Executes an operation directly, or queues it.
    fn start_operation(&self, outgoing: &mut Outgoing, operation: Operation) {
        let core = &*self.core;
        // Direct access must not overtake earlier operations, so it is used only if all of them
        // have completed.
        if outgoing.is_idle()
            && let Some(direct) = self.direct.get()
        {
            let moved = match operation.verb {
                Verb::Write { .. } => direct.write(&operation.local, &operation.remote),
                Verb::Store => direct.store(&operation.local, &operation.remote),
                _ => direct.read(&operation.local, &operation.remote),
            };
            if moved {
                if operation.verb == (Verb::Write { notify: true }) {
                    direct.bell.post();
                }
                operation.pending.finish(Ok(()));
                return;
            }
        }
        match outgoing.post(core, operation) {
            Ok(true) => core.wake_sender.wake(),
            Ok(false) => {}
            // The sender thread completes the operation with an error.
            Err(error) => core.fail(TransportFailure::Broken, error.to_string()),
        }
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
            if status
                .caller
                .is_some_and(|caller| caller != peer.nonce().peer_id())
            {
                return Err(refused("another peer has connected to this side's URL"));
            }
            status.callee = Some(peer.nonce().peer_id());
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
            let mut outgoing = core.outgoing();
            outgoing.connect_queue(welcome.queue.as_ref())?;
            outgoing.attach(socket);
            drop(outgoing);
            match core.rdma {
                Some(_) => {
                    core.wake_sender.wake();
                    Ok(())
                }
                None => self.spawn("fusewire-send", |core| outgoing::run(core)),
            }
        });
        match dialled {
            Ok(()) => core.failure("connect").map_or(Ok(()), Err),
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

    fn store(&self, word: u64, target: RemoteBuffer, timeout: Duration) -> Pending {
        self.submit(Verb::Store, StorageRange::of_word(word), target, timeout)
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
            core.progress(failure.is_some());
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
