//! The server of a TCP store: one thread that serves one table over the wire protocol of PyTorch.

use core::cmp::Ordering;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::secret::StoreSecret;
use super::session::{self, ServerState, Session, Token, Wake};
use crate::{Error, Result, notice};

/// Number of connections that may wait to be accepted. Linux limits it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// Maximum number of bytes that a server without a secret keeps: stored values, requests that were
/// received but not handled, and answers that were not sent.
const MAX_OPEN_BYTES: usize = 256 << 20;

/// Number of descriptors that a server leaves to the rest of its process. If a quarter of the
/// descriptor limit is less than this, the server leaves only that quarter.
const SPARE_DESCRIPTORS: usize = 64;

/// Maximum number of closed connections for which the server reports the reason to the user.
const MAX_NOTICES: u32 = 8;

/// Counts of what a server has handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreTraffic {
    /// Connections that were accepted.
    pub connections: u64,
    /// Requests that were handled.
    pub requests: u64,
    /// Bytes received from clients.
    pub received: u64,
    /// Bytes sent to clients.
    pub sent: u64,
}

#[derive(Debug, Default)]
struct Counters {
    connections: AtomicU64,
    requests: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
}

/// Serves a key-value table to [`TcpStore`](super::TcpStore) clients and to PyTorch's `TCPStore`
/// clients. The clients and the server must have the same byte order. PyTorch clients before 2.1
/// number their requests differently; the first bytes of a connection show which numbering the
/// client uses. The request `watch_key` of those old clients is not supported.
///
/// The server runs on its own thread and stops when this value is dropped. Calls of clients that
/// are still connected then fail.
///
/// Without a secret there is no authentication: every process that reaches the port can read and
/// write. The port must therefore be on the inner network of a cluster, as with PyTorch. A server
/// without a secret keeps at most 256 MiB of values, requests and answers. A server with a
/// [`StoreSecret`] serves only clients that have the same secret. Neither kind of server encrypts
/// anything.
///
/// The server leaves at least 64 descriptors to the rest of its process, or a quarter of the
/// process's descriptor limit if the limit is below 256. If no descriptor is left for a new client,
/// the server closes the oldest connection that has not sent a request.
#[derive(Debug)]
pub struct TcpStoreServer {
    addresses: Vec<SocketAddr>,
    wants_secret: bool,
    stop: UnixStream,
    counters: Arc<Counters>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Listens at `address`. Port 0 selects any free port, which [`TcpStoreServer::port`] returns.
    /// If `FUSEWIRE_STORE_SECRET` is set, clients must have the secret in this variable.
    ///
    /// # Errors
    /// [`Error::Call`] when the address cannot be bound or the thread cannot be started.
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        Self::bind_with(address, StoreSecret::from_env())
    }

    /// Binds like [`TcpStoreServer::bind`], but with the given secret, or without one. A server
    /// with a secret refuses PyTorch clients.
    ///
    /// # Errors
    /// Same as [`TcpStoreServer::bind`].
    pub fn bind_with(address: impl ToSocketAddrs, secret: Option<StoreSecret>) -> Result<Self> {
        let limit = secret.is_none().then_some(MAX_OPEN_BYTES);
        Self::start(address, secret, limit).map_err(|error| Error::io("bind", "", error))
    }

    /// Binds like [`TcpStoreServer::bind_with`]. The server keeps at most `limit` bytes.
    pub(super) fn start(
        address: impl ToSocketAddrs,
        secret: Option<StoreSecret>,
        limit: Option<usize>,
    ) -> io::Result<Self> {
        let listeners = listen(address)?;
        let addresses = listeners.iter().map(TcpListener::local_addr);
        let addresses = addresses.collect::<io::Result<_>>()?;
        let (stop, stopped) = UnixStream::pair()?;
        let counters = Arc::<Counters>::default();
        let wants_secret = secret.is_some();
        let server = Server {
            poll: Poll::new()?,
            listeners,
            stopped,
            hub: ServerState::with_limit(limit),
            secret,
            clients: HashMap::new(),
            max_clients: max_clients(),
            held: 0,
            notices: 0,
            next: FIRST_CLIENT,
            counters: Arc::clone(&counters),
        };
        server.poll.add(server.stopped.as_raw_fd(), STOP)?;
        for (token, listener) in (LISTENERS..FIRST_CLIENT).zip(&server.listeners) {
            server.poll.add(listener.as_raw_fd(), token)?;
        }
        let thread = thread::Builder::new()
            .name("fusewire-store".to_owned())
            .spawn(|| server.run())?;
        Ok(Self {
            addresses,
            wants_secret,
            stop,
            counters,
            thread: Some(thread),
        })
    }

    /// Returns the port that the server listens at.
    pub fn port(&self) -> u16 {
        self.addresses[0].port()
    }

    /// Returns true if clients must prove that they have a secret.
    pub fn wants_secret(&self) -> bool {
        self.wants_secret
    }

    /// Returns the addresses that the server listens at. The slice has at least one element.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Returns the counts of what the server has handled.
    pub fn traffic(&self) -> StoreTraffic {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        StoreTraffic {
            connections: read(&self.counters.connections),
            requests: read(&self.counters.requests),
            received: read(&self.counters.received),
            sent: read(&self.counters.sent),
        }
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        // Closing the socket pair wakes the thread. An error means that the thread has already
        // stopped.
        let _ = self.stop.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::warn!("the thread of the TCP store server panicked");
        }
    }
}

const STOP: Token = 0;
const LISTENERS: Token = 1;
const FIRST_CLIENT: Token = LISTENERS + MAX_LISTENERS as Token;

/// Maximum number of addresses that one server listens at.
const MAX_LISTENERS: usize = 16;

/// Listens at every address that `address` resolves to, because some clients may resolve the same
/// name to its IPv6 address and others to its IPv4 address. Skips addresses that cannot be bound,
/// such as those of other hosts, and fails if none is left. An address in use is always an error.
/// With port 0, listens at only one address.
fn listen(address: impl ToSocketAddrs) -> io::Result<Vec<TcpListener>> {
    let mut bound = Vec::<TcpListener>::new();
    let mut taken = Vec::new();
    let mut failure = io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        if taken.contains(&address) || bound.len() == MAX_LISTENERS {
            continue;
        }
        match TcpListener::bind(address) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                // SAFETY: `listener` keeps the descriptor open during the call, which takes no
                // pointers. A second `listen` on a socket only changes the backlog.
                if unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) } != 0 {
                    return Err(io::Error::last_os_error());
                }
                bound.push(listener);
                taken.push(address);
                if address.port() == 0 {
                    break;
                }
            }
            // Another server listens at this address. Clients could mistake it for this server.
            Err(error) if error.kind() == ErrorKind::AddrInUse => return Err(error),
            Err(error) => failure = error,
        }
    }
    if bound.is_empty() {
        return Err(failure);
    }
    Ok(bound)
}

struct Server {
    poll: Poll,
    listeners: Vec<TcpListener>,
    stopped: UnixStream,
    hub: ServerState,
    secret: Option<StoreSecret>,
    clients: HashMap<Token, Client>,
    /// Maximum number of clients at a time.
    max_clients: usize,
    /// Total of [`Client::held`] over all clients.
    held: usize,
    /// Number of connections that the server has closed because of an error. Limits the warnings to
    /// [`MAX_NOTICES`].
    notices: u32,
    next: Token,
    counters: Arc<Counters>,
}

struct Client {
    stream: TcpStream,
    peer: SocketAddr,
    session: Session,
    /// Result of the latest call of [`Session::held`].
    held: usize,
    /// The events of this client that the poll set waits for.
    interest: u32,
}

impl Server {
    fn run(mut self) {
        let mut scratch = vec![0; 64 << 10];
        let mut events = vec![libc::epoll_event { events: 0, u64: 0 }; 256];
        loop {
            let count = match self.poll.wait(&mut events) {
                Ok(count) => count,
                Err(error) => {
                    tracing::warn!(%error, "the TCP store server stops: epoll failed");
                    return;
                }
            };
            for event in &events[..count] {
                match event.u64 {
                    STOP => return,
                    token @ LISTENERS..FIRST_CLIENT => self.accept((token - LISTENERS) as usize),
                    token => self.serve(token, &mut scratch),
                }
            }
            self.wake();
            self.counters.requests.store(self.hub.requests, Relaxed);
        }
    }

    fn accept(&mut self, listener: usize) {
        loop {
            let accepted = self.listeners[listener]
                .accept()
                .and_then(|(stream, peer)| {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    self.poll.add(stream.as_raw_fd(), self.next)?;
                    Ok((stream, peer))
                });
            match accepted {
                Ok((_, peer)) if self.clients.len() >= self.max_clients && !self.evict() => {
                    self.report(
                        peer,
                        "this process has no descriptors left for more clients (ulimit -n)",
                    );
                }
                Ok((stream, peer)) => {
                    let client = Client {
                        stream,
                        peer,
                        session: Session::new(self.next, self.secret.clone()),
                        held: 0,
                        interest: libc::EPOLLIN as u32,
                    };
                    self.clients.insert(self.next, client);
                    self.next += 1;
                    self.counters.connections.fetch_add(1, Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    // The process has probably run out of descriptors. The listener stays readable,
                    // so pause to avoid a busy loop.
                    tracing::warn!(%error, "the TCP store server could not accept a client");
                    thread::sleep(core::time::Duration::from_millis(10));
                    return;
                }
            }
        }
    }

    /// Closes the oldest connection that has not sent a complete request. Returns true if a
    /// connection of this kind existed.
    fn evict(&mut self) -> bool {
        let silent = self
            .clients
            .iter()
            .filter(|(_, client)| client.session.is_silent());
        let Some(oldest) = silent.map(|(token, _)| *token).min() else {
            return false;
        };
        self.close(oldest);
        true
    }

    fn close(&mut self, token: Token) {
        if let Some(mut client) = self.clients.remove(&token) {
            client.session.leave(&mut self.hub);
            self.held -= client.held;
            // Dropping `client` closes the descriptor, which also removes it from the poll set.
        }
    }

    /// Reports why the connection of `peer` is closed.
    fn report(&mut self, peer: SocketAddr, detail: &str) {
        self.notices += 1;
        match self.notices.cmp(&MAX_NOTICES) {
            Ordering::Less => {
                notice::warn(format_args!(
                    "the store server closes the connection of {peer}: {detail}"
                ));
            }
            Ordering::Equal => notice::warn(format_args!(
                "the store server closes the connection of {peer}: {detail}; further ones are not \
                 reported"
            )),
            Ordering::Greater => tracing::debug!(%peer, detail, "a connection is closed"),
        }
    }

    /// Reads once from the client, handles all complete requests and writes as much of the answers
    /// as the socket accepts. Closes the connection on any failure.
    fn serve(&mut self, token: Token, scratch: &mut [u8]) {
        let Some(client) = self.clients.get_mut(&token) else {
            return;
        };
        let mut served = client
            .flush(&self.counters)
            .map_err(|_| String::new())
            .and_then(|()| client.receive(scratch, &self.counters));
        while served.is_ok() {
            served = client.session.handle_all(&mut self.hub);
            // If the pending answers became too large, `handle_all` may have left requests in the
            // buffer. Continue with them once the answers are written.
            let full = client.session.is_full();
            if !full || client.flush(&self.counters).is_err() || client.session.is_full() {
                break;
            }
        }
        self.finish(token, served);
    }

    /// Checks the pending waits of the clients whose keys have been set.
    fn wake(&mut self) {
        while let Some(Wake { token, offer }) = self.hub.woken.pop() {
            if let Some(client) = self.clients.get_mut(&token) {
                client.session.wake(&mut self.hub, offer);
                self.finish(token, Ok(()));
            } else if let Some(key) = offer {
                self.hub.withdraw(&key);
            }
        }
    }

    /// Sends the pending answers. Then closes the connection if something failed; otherwise keeps
    /// listening.
    ///
    /// Sends nothing if [`Session::is_full`] returns true. The server handles the buffered requests
    /// of such a client when the socket is writable, but the poll set reports this only while
    /// answers are unsent.
    fn finish(&mut self, token: Token, served: Result<(), String>) {
        let Some(client) = self.clients.get_mut(&token) else {
            return;
        };
        let refused = served.is_err();
        let flushed = if client.session.is_full() {
            Ok(())
        } else {
            client.flush(&self.counters)
        };
        let flushed = flushed
            .and_then(|()| client.listen(&self.poll, token))
            .map_err(|_| String::new());
        let held = client.session.held();
        let grows = held > client.held;
        self.held = self.held - client.held + held;
        client.held = held;
        let Err(detail) = served.and(flushed) else {
            if grows {
                self.shed();
            }
            return;
        };
        // `detail` is empty if the client has disconnected, which is not reported.
        if refused && !detail.is_empty() {
            let peer = client.peer;
            self.report(peer, &detail);
        }
        self.close(token);
    }

    /// Closes the connections for which the server holds the most bytes, until the total is within
    /// the limit.
    fn shed(&mut self) {
        let Some(limit) = self.hub.limit else {
            return;
        };
        while self.held > 0 && self.hub.bytes() + self.held > limit {
            let largest = self.clients.iter().max_by_key(|(_, client)| client.held);
            let Some((token, peer)) = largest.map(|(token, client)| (*token, client.peer)) else {
                return;
            };
            self.report(peer, &session::full(limit));
            self.close(token);
        }
    }
}

impl Client {
    fn receive(&mut self, scratch: &mut [u8], counters: &Counters) -> Result<(), String> {
        if self.session.is_full() {
            return Ok(());
        }
        match self.stream.read(scratch) {
            Ok(0) => Err(String::new()),
            Ok(count) => {
                counters.received.fetch_add(count as u64, Relaxed);
                self.session.receive(&scratch[..count])
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Err(String::new()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Writes as much of the pending answers as the socket accepts without blocking.
    fn flush(&mut self, counters: &Counters) -> io::Result<()> {
        let outgoing = &mut self.session.outgoing;
        let mut written = 0;
        while written < outgoing.len() {
            match self.stream.write(&outgoing[written..]) {
                Ok(count) => written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        outgoing.drain(..written);
        if outgoing.is_empty() {
            outgoing.shrink_to(4 << 10);
        }
        counters.sent.fetch_add(written as u64, Relaxed);
        Ok(())
    }

    fn listen(&mut self, poll: &Poll, token: Token) -> io::Result<()> {
        let mut interest = 0;
        if !self.session.outgoing.is_empty() {
            interest |= libc::EPOLLOUT;
        }
        if !self.session.is_full() {
            interest |= libc::EPOLLIN;
        }
        let interest = interest as u32;
        if interest != self.interest {
            poll.change(self.stream.as_raw_fd(), token, interest)?;
            self.interest = interest;
        }
        Ok(())
    }
}

/// Returns the maximum number of clients that leaves enough descriptors to the rest of this
/// process.
fn max_clients() -> usize {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a live rlimit that nothing else borrows, so the call may write to it.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return usize::MAX;
    }
    let all = usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX);
    (all - (all / 4).min(SPARE_DESCRIPTORS)).max(1)
}

/// An epoll instance: the set of descriptors that the server waits for.
struct Poll {
    fd: OwnedFd,
}

impl Poll {
    fn new() -> io::Result<Self> {
        // SAFETY: `epoll_create1` takes no pointers.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `epoll_create1` has just returned this open descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    fn add(&self, fd: RawFd, token: Token) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, libc::EPOLLIN as u32)
    }

    fn change(&self, fd: RawFd, token: Token, events: u32) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, events)
    }

    fn control(&self, operation: i32, fd: RawFd, token: Token, events: u32) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: token };
        // SAFETY: `event` outlives the call. For an invalid descriptor, `epoll_ctl` returns an
        // error code.
        let result = unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), operation, fd, &raw mut event) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Waits for events and returns the number of elements of `events` that were filled in.
    fn wait(&self, events: &mut [libc::epoll_event]) -> io::Result<usize> {
        loop {
            // SAFETY: the pointer and the length are those of `events`, which is borrowed
            // exclusively.
            let count = unsafe {
                libc::epoll_wait(
                    self.fd.as_raw_fd(),
                    events.as_mut_ptr(),
                    events.len() as i32,
                    -1,
                )
            };
            if let Ok(count) = usize::try_from(count) {
                return Ok(count);
            }
            let error = io::Error::last_os_error();
            if error.kind() != ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}
