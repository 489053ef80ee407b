//! Connections of a process to many others, driven by calls of [`Mesh::poll`] and not by threads.
//!
//! Processes open *endpoints*, which own memory. A request names an endpoint of another process and
//! an address in its memory: it writes, reads, stores, signals, or updates a word there. All
//! requests to a process, of all endpoints, use one TCP connection, and are executed in order. But
//! a get may also return the data of later puts. Connections are opened at the first request.
//!
//! - **Who may overwrite what:** the mesh of a process writes the memory of its endpoints: for
//!   requests of peers, and for gets that the endpoint has sent. It reads the sources of puts that
//!   the endpoint has sent;
//! - **after having acquired** the request. Its sender queues it after the last write to the source
//!   of a put, and after the last access to the target of a get;
//! - **released by** [`Event::Completed`] for the source of a put (the system has copied it) and
//!   for the target of a get (the data has arrived); by the word of a signal for the targets of
//!   earlier puts.
//!
//! [`Mesh::close`] and [`Mesh::forget`] end all accesses to an endpoint's memory before they
//! return, whatever peers send later.
//!
//! # Failures
//! If a connection to a process ends, the mesh receives on the connection in the other direction
//! until it ends, too, or nothing has arrived for one second. The process is then lost, and
//! [`Event::Lost`] names it. After the end of the first connection, requests to the process have no
//! effect, except that those with an answer are refused. New connections are possible after
//! [`Mesh::peer`] was called, or after the process has opened one.
//!
//! # Security
//! As for [`Tcp`](crate::Tcp): both sides prove that they know the secret of the URL; the bytes are
//! neither encrypted nor authenticated. Endpoints have random numbers. A process that knows the URL
//! and the number of an endpoint can access the memory that the endpoint permits, and no other. A
//! process that knows the URL could pretend to be another such process, and close its connections.

mod connection;
mod message;
#[cfg(test)]
mod tests;

use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use socket2::{Domain, Type};

use self::connection::{
    Body, Connection, Expected, Message, Range, Received, Sink, Stage, invalid,
};
use self::message::{Head, Kind, MAX_NOTICE};
use crate::memory::store_word;
use crate::socket::Socket;
use crate::url::{Nonce, PeerId, Url};
use crate::wire::{Challenge, Hello, VERSION, Welcome};
use crate::{Error, Result, TransportFailure};

/// Time limit for the handshake of a caller.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// Maximum number of callers, which are accepted connections whose handshake has not ended. Further
/// ones wait in the system's queue.
const MAX_CALLERS: usize = 1024;

/// Time for which no connection is accepted if there are too many callers, or if `accept` fails.
const LISTENER_PAUSE: Duration = Duration::from_millis(100);

/// Time after which a caller that has not sent its hello may be dropped, if there are too many
/// callers.
const CALLER_TIME: Duration = Duration::from_secs(1);

/// Time after which a process is lost if it does not answer the handshake, or does not acknowledge
/// sent bytes. Longer than a usual stop in a debugger.
const SILENCE: Duration = Duration::from_secs(60);

/// If one of the two connections to a process has ended: time without requests on the other one
/// after which the process is lost.
const GRACE: Duration = Duration::from_secs(1);

/// Approximate number of bytes that [`Mesh::poll`] receives from a connection.
const POLL_BYTES: usize = 1 << 20;

/// Maximum number of answers that wait to be sent on a connection. If a peer does not receive them,
/// its further requests wait.
const MAX_ANSWERS: usize = 4096;

/// The memory of an endpoint, and the receiver of its notices.
///
/// # Safety
/// A range that [`Endpoint::locate`] returns must be valid for reads and writes until
/// [`Mesh::close`] or [`Mesh::forget`] is called for it. Peers access it at any time, so the
/// process must access it by atomic operations or raw pointers, and expect any values.
pub unsafe trait Endpoint: Send + Sync {
    /// Returns the first byte of a range of the memory, or `None` if peers may not access it.
    fn locate(&self, address: u64, bytes: u64) -> Option<*mut u8>;

    /// Returns true if the endpoint expects no more requests. They have no effect then, and those
    /// with an answer are refused.
    fn is_closed(&self) -> bool {
        false
    }

    /// Receives a notice from endpoint `sender`, after the earlier requests of its process were
    /// executed.
    fn notice(&self, sender: u64, message: &[u8]);
}

/// Number of a peer of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer(usize);

/// Memory of an endpoint of this process: source of a put or target of a get.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// Address in the endpoint's memory, for [`Mesh::forget`].
    pub address: u64,
    /// First byte.
    pub start: *mut u8,
}

/// Request of an endpoint of this process.
#[derive(Clone, Copy, Debug)]
pub struct MeshRequest {
    /// The endpoint that sends the request.
    pub sender: u64,
    /// Number of the request, for events.
    pub number: u64,
    /// The endpoint of the peer.
    pub endpoint: u64,
    /// Address in the memory of that endpoint.
    pub address: u64,
    /// The operation.
    pub operation: Operation,
}

/// Operation of a request.
#[derive(Clone, Copy, Debug)]
pub enum Operation {
    /// Copies memory of the sender to memory of the peer.
    Put {
        /// Source.
        local: Local,
        /// Bytes.
        bytes: usize,
    },
    /// Writes the first `bytes` bytes, at most 16, of the values.
    Store {
        /// Values.
        values: [u64; 2],
        /// Bytes.
        bytes: usize,
    },
    /// Stores a word with release order.
    Signal(u64),
    /// Copies memory of the peer to memory of the sender.
    Get {
        /// Target.
        local: Local,
        /// Bytes.
        bytes: usize,
    },
    /// Adds to a word, wrapping, and fetches the value before.
    Add(u64),
    /// Replaces a word that is equal to the first value by the second, and fetches the value
    /// before.
    Swap(u64, u64),
}

/// Outcome of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request has been executed (get, add, swap) or handed to the system (the others).
    Completed {
        /// The endpoint that has sent the request.
        sender: u64,
        /// Number of the request.
        number: u64,
        /// The value before an add or swap.
        value: Option<u64>,
    },
    /// A request was not executed.
    Refused {
        /// The endpoint that has sent the request.
        sender: u64,
        /// Number of the request.
        number: u64,
        /// The endpoint that it was for.
        endpoint: u64,
        /// Cause.
        cause: RefusalCause,
    },
    /// A process can no longer be reached.
    Lost {
        /// The process.
        peer: Peer,
        /// Reason, as a sentence that names its address.
        reason: String,
    },
}

/// Cause for which a request was not executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RefusalCause {
    /// The range is not in the memory of the endpoint, or a word is not aligned.
    Range,
    /// The endpoint does not exist, or [`Endpoint::is_closed`] returns true, so a get, add or swap
    /// has no answer.
    Closed,
    /// The process can no longer be reached, for this reason, so a get, add or swap has no answer.
    Lost(String),
}

/// Another process.
#[derive(Debug)]
struct Process {
    /// Its URL, if [`Mesh::peer`] was called.
    url: Option<Url>,
    /// Connection for requests of this side.
    outgoing: Option<usize>,
    /// Connection for requests of the process.
    incoming: Option<usize>,
    /// Requests that wait for the connection.
    waiting: Vec<(Message, Option<Expected>)>,
    /// Set after the first connection has ended: the time at which the other one ends.
    losing: Option<(Instant, String)>,
    is_lost: bool,
}

/// The mesh of a process. See the module.
pub struct Mesh {
    url: Url,
    listener: TcpListener,
    epoll: OwnedFd,
    endpoints: HashMap<u64, Arc<dyn Endpoint>>,
    processes: Vec<Process>,
    by_id: HashMap<[u8; 16], usize>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    /// Connections with messages to send.
    to_send: Vec<usize>,
    /// Number of connections whose handshake has not ended.
    handshakes: usize,
    /// Number of those among them that others have opened.
    callers: usize,
    /// Number of processes that are about to be lost.
    losing: usize,
    /// End of the time in which callers are ignored.
    listens_from: Option<Instant>,
    events: Vec<Event>,
}

// SAFETY: the mesh accesses the memory at its raw pointers only in calls that have exclusive access
// to it, and the owner of the memory keeps it valid on all threads, as `Endpoint` demands.
unsafe impl Send for Mesh {}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mesh")
            .field("url", &self.url.public())
            .field("processes", &self.processes.len())
            .finish_non_exhaustive()
    }
}

impl Mesh {
    /// Scheme of the URLs of meshes.
    pub const SCHEME: &'static str = "mesh";

    /// Creates a mesh that listens at a free port of `address`.
    ///
    /// # Errors
    /// [`Error::Call`] if a system call fails.
    pub fn new(address: IpAddr) -> Result<Self> {
        let nonce = Nonce::random()?;
        let failed = |error: io::Error| Error::Call {
            operation: "listen",
            peer: format!("{}://{address}", Self::SCHEME),
            kind: TransportFailure::System,
            detail: error.to_string(),
        };
        let listener = listen(address).map_err(failed)?;
        let own = listener.local_addr().map_err(failed)?.to_string();
        // SAFETY: no preconditions.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(failed(io::Error::last_os_error()));
        }
        let mesh = Self {
            url: Url::new(Self::SCHEME, &own, nonce),
            listener,
            // SAFETY: a new descriptor, which has no other owner.
            epoll: unsafe { OwnedFd::from_raw_fd(epoll) },
            endpoints: HashMap::new(),
            processes: Vec::new(),
            by_id: HashMap::new(),
            connections: Vec::new(),
            free: Vec::new(),
            to_send: Vec::new(),
            handshakes: 0,
            callers: 0,
            losing: 0,
            listens_from: None,
            events: Vec::new(),
        };
        mesh.watch(mesh.listener.as_raw_fd(), LISTENER, libc::EPOLLIN, true)
            .map_err(failed)?;
        Ok(mesh)
    }

    /// Returns the URL that other processes need.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Returns a descriptor that is readable when [`Mesh::poll`] has something to do, except for
    /// the time limits of [`Mesh::next_limit`].
    pub fn descriptor(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Returns the time after which [`Mesh::poll`] must be called, if there is one.
    pub fn next_limit(&self) -> Option<Duration> {
        let has_limits = self.handshakes > 0 || self.losing > 0 || self.listens_from.is_some();
        has_limits.then_some(LISTENER_PAUSE)
    }

    /// Opens an endpoint with this number, which must be random: a process that knows the number
    /// and the URL can access the endpoint's memory.
    pub fn open(&mut self, number: u64, endpoint: Arc<dyn Endpoint>) {
        self.endpoints.insert(number, endpoint);
    }

    /// Closes an endpoint. Its memory is no longer accessed. Its puts, stores and signals that have
    /// not been sent are dropped, as are all its requests to processes without a connection. Its
    /// notices are still sent. Requests to the endpoint have no effect.
    pub fn close(&mut self, endpoint: u64) {
        self.endpoints.remove(&endpoint);
        for connection in self.connections.iter_mut().flatten() {
            connection.drop_requests(endpoint);
        }
        for process in &mut self.processes {
            process.waiting.retain(|(message, _)| {
                message.head.sender != endpoint || message.head.kind == Kind::Notice
            });
        }
        self.forget(endpoint, &|_| true);
    }

    /// Ends all accesses to an endpoint's memory at addresses that `selects` selects, which
    /// [`Endpoint::locate`] must no longer return.
    pub fn forget(&mut self, endpoint: u64, selects: &dyn Fn(u64) -> bool) {
        for connection in self.connections.iter_mut().flatten() {
            connection.forget(endpoint, selects);
        }
        for (message, expected) in self.processes.iter_mut().flat_map(|p| &mut p.waiting) {
            let is_in = |range: &Range| range.endpoint == endpoint && selects(range.address);
            if let Body::Memory(range) = &message.body
                && is_in(range)
            {
                message.body = Body::Zeros(range.length);
            }
            if let Some(expected) = expected {
                expected.target = expected.target.filter(|target| !is_in(target));
            }
        }
    }

    /// Returns the number of the process with this URL. If its connections have ended, requests
    /// open new ones; the next [`Mesh::poll`] still reports the loss.
    pub fn peer(&mut self, url: &Url) -> Peer {
        let index = self.process(url.nonce().peer_id());
        let process = &mut self.processes[index];
        process.url = Some(url.clone());
        self.complete_loss(index);
        self.processes[index].is_lost = false;
        Peer(index)
    }

    /// Returns true if the process is not lost, and there is a connection that either side has
    /// opened or is opening.
    pub fn is_connected(&self, peer: Peer) -> bool {
        let process = &self.processes[peer.0];
        !process.is_lost && (process.outgoing.is_some() || process.incoming.is_some())
    }

    /// Returns the address of the process, for messages.
    pub fn name(&self, peer: Peer) -> String {
        self.name_of(peer.0)
    }

    fn name_of(&self, index: usize) -> String {
        let url = self.processes[index].url.as_ref();
        url.map_or_else(|| "an unknown process".to_owned(), Url::public)
    }

    /// Queues a request. [`Mesh::poll`] sends it.
    ///
    /// # Safety
    /// The range of a put or get must be valid for reads or writes until the request's event, or
    /// until [`Mesh::close`] or [`Mesh::forget`] is called for it.
    pub unsafe fn post(&mut self, peer: Peer, request: MeshRequest) {
        let range = |local: Local, bytes| Range {
            endpoint: request.sender,
            address: local.address,
            start: local.start,
            length: bytes,
        };
        let (kind, values, length, body, target) = match request.operation {
            Operation::Put { local, bytes } => (
                Kind::Put,
                [0; 2],
                bytes,
                Body::Memory(range(local, bytes)),
                None,
            ),
            Operation::Store { values, bytes } => {
                (Kind::Store, values, bytes.min(16), Body::Nothing, None)
            }
            Operation::Signal(word) => (Kind::Signal, [word, 0], 8, Body::Nothing, None),
            Operation::Get { local, bytes } => {
                let target = range(local, bytes);
                (Kind::Get, [0; 2], bytes, Body::Nothing, Some(target))
            }
            Operation::Add(value) => (Kind::Add, [value, 0], 8, Body::Nothing, None),
            Operation::Swap(old, new) => (Kind::Swap, [old, new], 8, Body::Nothing, None),
        };
        let head = Head {
            kind,
            endpoint: request.endpoint,
            address: request.address,
            length: length as u64,
            values,
            sender: request.sender,
            number: request.number,
        };
        let expected = kind.is_answered().then_some(Expected {
            kind,
            sender: request.sender,
            number: request.number,
            endpoint: request.endpoint,
            target,
        });
        self.enqueue(peer.0, Message::new(head, body), expected);
    }

    /// Queues a notice of at most 1024 bytes, which has no event.
    pub fn notify(&mut self, peer: Peer, sender: u64, endpoint: u64, notice: &[u8]) {
        assert!(
            notice.len() <= MAX_NOTICE,
            "a notice of {} bytes",
            notice.len()
        );
        let head = Head {
            kind: Kind::Notice,
            endpoint,
            address: 0,
            length: notice.len() as u64,
            values: [0; 2],
            sender,
            number: 0,
        };
        self.enqueue(peer.0, Message::new(head, Body::Bytes(notice.into())), None);
    }

    /// Makes progress: accepts and opens connections, and sends and receives what is possible
    /// without waiting. Appends what happened to `events`. Returns true if anything was sent or
    /// received.
    pub fn poll(&mut self, events: &mut Vec<Event>) -> bool {
        let mut is_busy = self.flush();
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: `ready` has room for as many events as passed.
        let count = unsafe {
            libc::epoll_wait(
                self.epoll.as_raw_fd(),
                ready.as_mut_ptr(),
                ready.len() as i32,
                0,
            )
        };
        for event in &ready[..count.max(0) as usize] {
            is_busy = true;
            let (data, flags) = (event.u64, event.events);
            match data {
                LISTENER => self.accept(),
                index => self.advance(index as usize, flags),
            }
        }
        is_busy |= self.flush();
        if self.next_limit().is_some() {
            self.enforce_limits();
        }
        events.append(&mut self.events);
        is_busy
    }

    /// Returns true if all requests and notices have been handed to the system, or their processes
    /// are lost.
    pub fn is_flushed(&self) -> bool {
        let mut open = self.connections.iter().flatten();
        let mut processes = self.processes.iter();
        open.all(|connection| connection.queue.is_empty())
            && processes.all(|process| process.waiting.is_empty())
    }
}

/// Data of the listener's events.
const LISTENER: u64 = u64::MAX;

fn socket_of(fd: impl Into<OwnedFd>) -> io::Result<Socket> {
    let socket = Socket::new(fd, true)?;
    socket.set_user_timeout(SILENCE)?;
    Ok(socket)
}

fn listen(address: IpAddr) -> io::Result<TcpListener> {
    let address = SocketAddr::new(address, 0);
    let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.bind(&address.into())?;
    socket.listen(MAX_CALLERS as i32)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

impl Mesh {
    /// Returns the index of a process, which is new if it was not known.
    fn process(&mut self, id: PeerId) -> usize {
        let next = self.processes.len();
        let index = *self.by_id.entry(id.0).or_insert(next);
        if index == next {
            self.processes.push(Process {
                url: None,
                outgoing: None,
                incoming: None,
                waiting: Vec::new(),
                losing: None,
                is_lost: false,
            });
        }
        index
    }

    fn watch(&self, fd: RawFd, data: u64, flags: i32, is_new: bool) -> io::Result<()> {
        let mut event = libc::epoll_event {
            events: flags as u32,
            u64: data,
        };
        let operation = match is_new {
            true => libc::EPOLL_CTL_ADD,
            false => libc::EPOLL_CTL_MOD,
        };
        // SAFETY: `event` is a live value.
        match unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, fd, &raw mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn add(&mut self, connection: Connection, flags: i32) -> io::Result<usize> {
        let index = self.free.pop().unwrap_or(self.connections.len());
        let watched = self.watch(connection.socket.raw(), index as u64, flags, true);
        if index == self.connections.len() {
            self.connections.push(None);
        }
        match watched {
            Ok(()) => {
                self.handshakes += 1;
                self.callers += usize::from(!connection.is_outgoing);
                self.connections[index] = Some(connection);
                Ok(index)
            }
            Err(error) => {
                self.free.push(index);
                Err(error)
            }
        }
    }

    /// Removes a connection, which closes it.
    fn remove(&mut self, index: usize) -> Option<Connection> {
        let connection = self.connections.get_mut(index)?.take()?;
        if !matches!(connection.stage, Stage::Open) {
            self.handshakes -= 1;
            self.callers -= usize::from(!connection.is_outgoing);
        }
        self.to_send.retain(|listed| *listed != index);
        self.free.push(index);
        Some(connection)
    }

    fn enqueue(&mut self, index: usize, message: Message, expected: Option<Expected>) {
        let process = &mut self.processes[index];
        if process.is_lost || process.losing.is_some() {
            let reason = format!("{} is lost", self.name_of(index));
            self.settle(&message, expected, &reason);
            return;
        }
        let open = process
            .outgoing
            .and_then(|at| self.connections[at].as_mut());
        match open.filter(|connection| matches!(connection.stage, Stage::Open)) {
            Some(connection) => {
                connection.queue.push_back(message);
                connection.expected.extend(expected);
                if !connection.is_listed && !connection.is_full {
                    connection.is_listed = true;
                    self.to_send.extend(process.outgoing);
                }
            }
            None => {
                process.waiting.push((message, expected));
                if process.outgoing.is_none()
                    && let Err(error) = self.dial(index)
                {
                    self.lose(index, &error);
                }
            }
        }
    }

    /// Creates the event of a request to a lost process: completed, or refused if it has an answer.
    fn settle(&mut self, message: &Message, expected: Option<Expected>, reason: &str) {
        let Head { sender, number, .. } = message.head;
        match (message.head.kind, expected) {
            (_, Some(expected)) => self.refuse_expected(expected, reason),
            (Kind::Put | Kind::Store | Kind::Signal, None) => self.events.push(Event::Completed {
                sender,
                number,
                value: None,
            }),
            _ => {}
        }
    }

    /// Reports a request that a lost process does not answer.
    fn refuse_expected(&mut self, expected: Expected, reason: &str) {
        self.events.push(Event::Refused {
            sender: expected.sender,
            number: expected.number,
            endpoint: expected.endpoint,
            cause: RefusalCause::Lost(reason.to_owned()),
        });
    }

    /// Begins to connect to a process.
    fn dial(&mut self, index: usize) -> io::Result<()> {
        let url = self.processes[index].url.as_ref();
        let url = url.ok_or_else(|| io::Error::other("its URL is not known"))?;
        let parsed = url.address().parse::<SocketAddr>();
        let to = parsed.map_err(|_| io::Error::other("its URL has no address"))?;
        let socket = socket2::Socket::new(Domain::for_address(to), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        // From the address on which this mesh listens, so that it uses the same interface.
        let own = self.url.address().parse::<SocketAddr>().ok();
        if let Some(mut own) = own.filter(|own| own.is_ipv4() == to.is_ipv4()) {
            own.set_port(0);
            socket.bind(&own.into())?;
        }
        match socket.connect(&to.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let deadline = Instant::now() + SILENCE;
        let mut connection = Connection::new(socket_of(socket)?, Stage::Dialing, deadline);
        connection.peer = Some(index);
        let at = self.add(connection, libc::EPOLLIN | libc::EPOLLOUT)?;
        self.processes[index].outgoing = Some(at);
        Ok(())
    }

    fn accept(&mut self) {
        // Later callers wait in the system's queue.
        while self.callers < MAX_CALLERS || self.drop_oldest_caller() {
            let accepted = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::debug!(%error, "a mesh could not accept a caller");
                        self.pause_listening();
                    }
                    return;
                }
            };
            let challenged = socket_of(accepted).and_then(|socket| {
                let challenge = Challenge::new().map_err(io::Error::other)?;
                let deadline = Instant::now() + HANDSHAKE_TIME;
                let connection = Connection::new(socket, Stage::Accepted(challenge), deadline);
                connection.send_all(&challenge.to_bytes())?;
                self.add(connection, libc::EPOLLIN)
            });
            if let Err(error) = challenged {
                tracing::debug!(%error, "a mesh could not accept a caller");
            }
        }
        self.pause_listening();
    }

    /// Ignores callers for a short time, because there are too many, or no descriptors are left.
    fn pause_listening(&mut self) {
        if self
            .watch(self.listener.as_raw_fd(), LISTENER, 0, false)
            .is_ok()
        {
            self.listens_from = Some(Instant::now() + LISTENER_PAUSE);
        }
    }

    /// Removes the oldest caller that has not sent its hello, if it is older than [`CALLER_TIME`].
    /// Returns true if it has removed one.
    fn drop_oldest_caller(&mut self) -> bool {
        let late = Instant::now() + (HANDSHAKE_TIME - CALLER_TIME);
        let callers = (0..self.connections.len()).filter_map(|index| {
            let connection = self.connections[index].as_ref()?;
            let is_caller = matches!(connection.stage, Stage::Accepted(_));
            is_caller.then_some((connection.deadline?, index))
        });
        let oldest = callers.min().filter(|(deadline, _)| *deadline <= late);
        oldest.and_then(|(_, index)| self.remove(index)).is_some()
    }

    /// Sends and receives what is possible on a connection.
    fn advance(&mut self, index: usize, flags: u32) {
        let Some(connection) = self.connections.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        if flags & libc::EPOLLOUT as u32 != 0
            && connection.is_full
            && !core::mem::replace(&mut connection.is_listed, true)
        {
            self.to_send.push(index);
        }
        let has_ended = flags & (libc::EPOLLERR | libc::EPOLLHUP) as u32 != 0;
        let losing = connection
            .peer
            .filter(|peer| self.processes[*peer].losing.is_some());
        let received = match &connection.stage {
            Stage::Open if connection.is_clogged && has_ended => self.mute(index),
            Stage::Open => self.receive(index),
            _ => self.handshake(index),
        };
        if let Err(error) = received {
            self.end(index, &error);
        } else if let Some((limit, _)) =
            losing.and_then(|peer| self.processes[peer].losing.as_mut())
        {
            // Requests still arrive.
            *limit = Instant::now() + GRACE;
        }
    }

    /// Ends a connection after a failure.
    fn end(&mut self, index: usize, error: &io::Error) {
        let Some(connection) = self.remove(index) else {
            return;
        };
        let Some(peer) = connection.peer else {
            tracing::debug!(%error, "a caller of a mesh was not admitted");
            return;
        };
        let process = &mut self.processes[peer];
        for side in [&mut process.outgoing, &mut process.incoming] {
            *side = side.filter(|at| *at != index);
        }
        if connection.is_outgoing {
            // Settles the queue first, then, in `lose`, the requests that wait for a connection.
            let reason = self.reason(peer, error);
            for message in &connection.queue {
                self.settle(message, None, &reason);
            }
            for expected in connection.expected {
                self.refuse_expected(expected, &reason);
            }
        }
        self.lose(peer, error);
    }

    fn reason(&self, peer: usize, error: &io::Error) -> String {
        format!(
            "the connection to {} has ended: {error}",
            self.name_of(peer)
        )
    }

    /// Begins the loss of a process, and completes the loss if no connection is left.
    fn lose(&mut self, peer: usize, error: &io::Error) {
        let reason = self.reason(peer, error);
        let process = &mut self.processes[peer];
        if process.losing.is_none() && !process.is_lost {
            process.losing = Some((Instant::now() + GRACE, reason.clone()));
            self.losing += 1;
        }
        let waiting = core::mem::take(&mut self.processes[peer].waiting);
        for (message, expected) in waiting {
            self.settle(&message, expected, &reason);
        }
        let process = &self.processes[peer];
        if process.outgoing.is_none() && process.incoming.is_none() {
            self.complete_loss(peer);
        }
    }

    fn complete_loss(&mut self, peer: usize) {
        let process = &mut self.processes[peer];
        let Some((_, reason)) = process.losing.take() else {
            return;
        };
        self.losing -= 1;
        process.is_lost = true;
        let left = [process.outgoing.take(), process.incoming.take()];
        for at in left.into_iter().flatten() {
            let Some(connection) = self.remove(at) else {
                continue;
            };
            for message in &connection.queue {
                self.settle(message, None, &reason);
            }
            for expected in connection.expected {
                self.refuse_expected(expected, &reason);
            }
        }
        self.events.push(Event::Lost {
            peer: Peer(peer),
            reason,
        });
    }

    fn enforce_limits(&mut self) {
        let now = Instant::now();
        if self.listens_from.is_some_and(|limit| limit <= now) {
            let listener = self.listener.as_raw_fd();
            if self.watch(listener, LISTENER, libc::EPOLLIN, false).is_ok() {
                self.listens_from = None;
            }
        }
        for index in 0..self.connections.len() {
            let late = self.connections[index]
                .as_ref()
                .filter(|connection| connection.deadline.is_some_and(|deadline| deadline <= now));
            if late.is_some() {
                let error = io::Error::new(io::ErrorKind::TimedOut, "no answer to the handshake");
                self.end(index, &error);
            }
        }
        for peer in 0..self.processes.len() {
            let losing = self.processes[peer].losing.as_ref();
            if losing.is_some_and(|(limit, _)| *limit <= now) {
                self.complete_loss(peer);
            }
        }
    }

    /// Sends queued messages. Returns true if there were any.
    fn flush(&mut self) -> bool {
        let listed = core::mem::take(&mut self.to_send);
        let is_busy = !listed.is_empty();
        for index in listed {
            let events = &mut self.events;
            let Some(connection) = self.connections.get_mut(index).and_then(Option::as_mut) else {
                continue;
            };
            connection.is_listed = false;
            let was_full = connection.is_full;
            let sent = connection.send(|message| {
                if matches!(message.head.kind, Kind::Put | Kind::Store | Kind::Signal) {
                    events.push(Event::Completed {
                        sender: message.head.sender,
                        number: message.head.number,
                        value: None,
                    });
                }
            });
            let sent = match sent {
                // The peer receives no answers any more, but its requests may have arrived.
                Err(_) if !connection.is_outgoing => {
                    if let Err(error) = self.mute(index) {
                        self.end(index, &error);
                    }
                    continue;
                }
                sent => sent,
            };
            let is_full = connection.is_full;
            let was_clogged = connection.is_clogged;
            connection.is_clogged &= connection.queue.len() >= MAX_ANSWERS / 2;
            let is_free = was_clogged && !connection.is_clogged;
            let watched = sent.and_then(|()| match was_full != is_full || is_free {
                true => self.watch_as_needed(index),
                false => Ok(()),
            });
            // The receive buffer may hold requests, for which epoll reports no event.
            let received = watched.and_then(|()| match is_free {
                true => self.receive(index),
                false => Ok(()),
            });
            if let Err(error) = received {
                self.end(index, &error);
            }
        }
        is_busy
    }

    /// Discards the answers of a connection whose peer receives none any more, and executes the
    /// requests that have arrived.
    fn mute(&mut self, index: usize) -> io::Result<()> {
        if let Some(connection) = &mut self.connections[index] {
            connection.queue.clear();
            connection.is_mute = true;
            connection.is_full = false;
            connection.is_clogged = false;
        }
        self.watch_as_needed(index)?;
        self.receive(index)
    }

    /// Waits for the events that the connection needs.
    fn watch_as_needed(&self, index: usize) -> io::Result<()> {
        let Some(connection) = &self.connections[index] else {
            return Ok(());
        };
        let mut flags = if connection.is_clogged {
            0
        } else {
            libc::EPOLLIN
        };
        if connection.is_full {
            flags |= libc::EPOLLOUT;
        }
        self.watch(connection.socket.raw(), index as u64, flags, false)
    }

    fn handshake(&mut self, index: usize) -> io::Result<()> {
        let own = self.url.nonce();
        let Some(connection) = self.connections[index].as_mut() else {
            return Ok(());
        };
        let peer_url = connection
            .peer
            .and_then(|peer| self.processes[peer].url.clone());
        match &connection.stage {
            Stage::Dialing => {
                connection.socket.take_error()?;
                connection.stage = Stage::Challenged;
                self.watch_as_needed(index)?;
            }
            Stage::Challenged => {
                let Some(message) = connection.handshake()? else {
                    return Ok(());
                };
                let challenge = Challenge::from_bytes(&message)
                    .filter(|challenge| challenge.version == VERSION)
                    .ok_or_else(|| io::Error::other("another version or service listens there"))?;
                let hello = Hello {
                    from: own.peer_id(),
                    challenge: Challenge::new().map_err(io::Error::other)?.random,
                    queue: None,
                };
                let secret = peer_url.map(|url| url.nonce()).ok_or_else(invalid)?;
                connection.send_all(&hello.to_bytes(secret, &challenge))?;
                connection.stage = Stage::Greeted(hello);
            }
            Stage::Greeted(hello) => {
                let hello = *hello;
                let secret = peer_url.map(|url| url.nonce()).ok_or_else(invalid)?;
                if connection.welcome(&hello, secret)?.is_some() {
                    self.opened(index);
                }
            }
            Stage::Accepted(challenge) => {
                let challenge = *challenge;
                let Some(message) = connection.handshake()? else {
                    return Ok(());
                };
                let hello = Hello::from_bytes(&message, own, &challenge)
                    .ok_or_else(|| io::Error::other("it does not know the URL's secret"))?;
                let welcome = Welcome {
                    bell: None,
                    queue: None,
                };
                connection.send_all(&welcome.to_bytes(own, &hello))?;
                let peer = self.process(hello.from);
                // The peer may have lost its connections to this process, and this process may not
                // have detected it yet.
                self.complete_loss(peer);
                let process = &mut self.processes[peer];
                process.is_lost = false;
                if let Some(old) = process.incoming.replace(index) {
                    self.remove(old);
                }
                if let Some(connection) = &mut self.connections[index] {
                    connection.peer = Some(peer);
                }
                self.opened(index);
                // Requests may have arrived together with the hello.
                self.receive(index)?;
            }
            Stage::Open => {}
        }
        Ok(())
    }

    /// Notes that the handshake of a connection has ended, and queues the requests that waited.
    fn opened(&mut self, index: usize) {
        let Some(connection) = &mut self.connections[index] else {
            return;
        };
        connection.stage = Stage::Open;
        connection.deadline = None;
        self.handshakes -= 1;
        self.callers -= usize::from(!connection.is_outgoing);
        let peer = connection.peer.filter(|_| connection.is_outgoing);
        if let Some(peer) = peer {
            for (message, expected) in self.processes[peer].waiting.drain(..) {
                connection.queue.push_back(message);
                connection.expected.extend(expected);
            }
            if !connection.queue.is_empty() && !connection.is_listed {
                connection.is_listed = true;
                self.to_send.push(index);
            }
        }
    }

    /// Receives and executes messages.
    fn receive(&mut self, index: usize) -> io::Result<()> {
        let mut budget = POLL_BYTES;
        loop {
            let Some(connection) = &mut self.connections[index] else {
                return Ok(());
            };
            if !connection.is_outgoing && connection.queue.len() >= MAX_ANSWERS {
                connection.is_clogged = true;
                return self.watch_as_needed(index);
            }
            match connection.receive(&mut budget)? {
                Received::Nothing => return Ok(()),
                Received::Head(head) if connection.is_outgoing => self.answered(index, head)?,
                Received::Head(head) => self.execute(index, head),
                Received::Payload(head, sink) => self.arrived(head, sink),
            }
        }
    }

    /// Executes a request whose head has arrived.
    fn execute(&mut self, index: usize, head: Head) {
        let Some(connection) = &mut self.connections[index] else {
            return;
        };
        let endpoint = self.endpoints.get(&head.endpoint);
        let endpoint = endpoint.filter(|endpoint| !endpoint.is_closed());
        let is_open = endpoint.is_some();
        if head.kind == Kind::Notice {
            return connection.expect(head, Sink::Notice(Vec::new()));
        }
        let located = endpoint.and_then(|endpoint| endpoint.locate(head.address, head.length));
        let range = located.map(|start| Range {
            endpoint: head.endpoint,
            address: head.address,
            start,
            length: head.length as usize,
        });
        let word = located.map(<*mut u8>::cast::<u64>);
        let word = word.filter(|word| word.is_aligned() && head.length >= 8);
        // SAFETY: the word is aligned, and lies in a range of at least 8 bytes that `locate` has
        // returned, which is valid by the contract of `Endpoint`. All sides access words that
        // signals, adds and swaps address by atomic operations only.
        let word = word.map(|word| unsafe { AtomicU64::from_ptr(word) });
        let [first, second] = head.values;
        let answer = match (head.kind, range, word) {
            (Kind::Put, range, _) => {
                connection.expect(head, range.map_or(Sink::Discard, Sink::Memory));
                range.map_or(Some((Kind::Refused, 0, Body::Nothing)), |_| None)
            }
            (Kind::Store, Some(range), _) => {
                // SAFETY: the endpoint's range is valid, and a store has at most 16 bytes.
                unsafe { store(range.start, head.values, range.length) };
                None
            }
            (Kind::Signal, _, Some(word)) => {
                word.store(first, Ordering::Release);
                None
            }
            (Kind::Get, Some(range), _) => Some((Kind::Data, 0, Body::Memory(range))),
            (Kind::Add, _, Some(word)) => {
                let before = word.fetch_add(first, Ordering::AcqRel);
                Some((Kind::Value, before, Body::Nothing))
            }
            (Kind::Swap, _, Some(word)) => {
                let swapped =
                    word.compare_exchange(first, second, Ordering::AcqRel, Ordering::Acquire);
                let before = swapped.unwrap_or_else(|before| before);
                Some((Kind::Value, before, Body::Nothing))
            }
            (kind, ..) if kind.is_answered() => {
                Some((Kind::NoAnswer, u64::from(!is_open), Body::Nothing))
            }
            _ => Some((Kind::Refused, 0, Body::Nothing)),
        };
        match answer {
            // Requests to a closed endpoint have no effect. Its owner reports the reason to the
            // peers by other means.
            Some((Kind::Refused, ..)) if !is_open => {}
            Some((kind, value, body)) => self.answer(index, head, kind, value, body),
            None => {}
        }
    }

    fn answer(&mut self, index: usize, request: Head, kind: Kind, value: u64, body: Body) {
        let open = self.connections[index].as_mut();
        let Some(connection) = open.filter(|connection| !connection.is_mute) else {
            return;
        };
        let head = Head {
            kind,
            length: if kind == Kind::Data {
                request.length
            } else {
                0
            },
            values: [value, 0],
            ..request
        };
        connection.queue.push_back(Message::new(head, body));
        if !connection.is_listed && !connection.is_full {
            connection.is_listed = true;
            self.to_send.push(index);
        }
    }

    /// Reports a request that the peer has refused.
    fn refuse(&mut self, head: &Head) {
        self.events.push(Event::Refused {
            sender: head.sender,
            number: head.number,
            endpoint: head.endpoint,
            cause: match head.values[0] {
                0 => RefusalCause::Range,
                _ => RefusalCause::Closed,
            },
        });
    }

    /// Handles the head of an answer.
    fn answered(&mut self, index: usize, head: Head) -> io::Result<()> {
        let Some(connection) = &mut self.connections[index] else {
            return Ok(());
        };
        if head.kind == Kind::Refused {
            self.refuse(&head);
            return Ok(());
        }
        let expected = connection.expected.pop_front().ok_or_else(invalid)?;
        let Expected { sender, number, .. } = expected;
        let fits = (sender, number) == (head.sender, head.number);
        match (head.kind, expected.kind) {
            (Kind::NoAnswer, _) if fits => self.refuse(&head),
            (Kind::Value, Kind::Add | Kind::Swap) if fits => self.events.push(Event::Completed {
                sender,
                number,
                value: Some(head.values[0]),
            }),
            (Kind::Data, Kind::Get) if fits => {
                let target = expected.target;
                if target.is_some_and(|target| target.length as u64 != head.length) {
                    return Err(invalid());
                }
                connection.expect(head, target.map_or(Sink::Discard, Sink::Memory));
            }
            _ => return Err(invalid()),
        }
        Ok(())
    }

    /// Handles a message whose payload has arrived.
    fn arrived(&mut self, head: Head, sink: Sink) {
        match (head.kind, sink) {
            (Kind::Data, _) => self.events.push(Event::Completed {
                sender: head.sender,
                number: head.number,
                value: None,
            }),
            (Kind::Notice, Sink::Notice(bytes)) => {
                if let Some(endpoint) = self.endpoints.get(&head.endpoint) {
                    endpoint.notice(head.sender, &bytes);
                }
            }
            _ => {}
        }
    }
}

/// Stores the first `bytes` bytes of the values, by whole words where the target has them.
///
/// # Safety
/// `to` must be valid for writes of `bytes` bytes, at most 16.
unsafe fn store(to: *mut u8, values: [u64; 2], bytes: usize) {
    let values: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect();
    let (words, rest) = values[..bytes.min(16)].as_chunks::<8>();
    for (at, word) in words.iter().enumerate() {
        // SAFETY: the caller guarantees the validity of the range.
        unsafe {
            let to = to.add(8 * at);
            if !store_word(to, *word) {
                to.copy_from_nonoverlapping(word.as_ptr(), 8);
            }
        }
    }
    // SAFETY: the caller guarantees the validity of the range.
    unsafe {
        to.add(8 * words.len())
            .copy_from_nonoverlapping(rest.as_ptr(), rest.len())
    };
}
