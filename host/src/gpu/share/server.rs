//! The server thread, which sends the published descriptors of this process.

use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use core::time::Duration;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::failed;
use super::message::{self, REQUEST_BYTES, Reply};
use super::token::{Random, Token, same, socket_name};
use crate::Result;
use crate::descriptor::{WakeFd, credentials, entry, poll};
use crate::process::start_time;

/// Time limit for a peer to send its request after the connection was accepted.
pub(super) const CALLER_TIME: Duration = Duration::from_secs(2);

/// Maximum number of connections with incomplete requests. If the limit is exceeded, the server
/// replies [`Reply::Busy`] to the oldest connection and closes it.
pub(super) const MAX_CALLERS: usize = 64;

/// Pause after `accept` or `poll` has failed, for example because the process has too many open
/// descriptors.
const PAUSE: Duration = Duration::from_millis(5);

/// The server of this process. A forked child creates a new [`Process`], because the mutex of the
/// inherited [`Process`] may be locked forever, and because the inherited server thread does not
/// run in the child.
struct Process {
    pid: u32,
    server: Mutex<Option<Server>>,
}

/// The running server thread. It exists while at least one descriptor is published.
struct Server {
    start_time: u64,
    socket: Random,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    wake: WakeFd,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: Vec<(Random, Weak<OwnedFd>)>,
    stop: bool,
}

impl Process {
    /// Returns the [`Process`] of the calling process. The first call in each process, including
    /// forked children, creates the value.
    fn current() -> &'static Self {
        static CURRENT: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());
        let pid = process::id();
        let mut seen = CURRENT.load(Ordering::Acquire);
        loop {
            // SAFETY: every non-null pointer that was stored in `CURRENT` came from `Box::into_raw`
            // and is never freed.
            let current: Option<&'static Self> = unsafe { seen.as_ref() };
            if let Some(current) = current.filter(|current| current.pid == pid) {
                return current;
            }
            let new = Box::into_raw(Box::new(Self {
                pid,
                server: Mutex::new(None),
            }));
            match CURRENT.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => seen = new,
                Err(now) => {
                    seen = now;
                    // SAFETY: `Box::into_raw` returned `new` above. The exchange failed, so no
                    // other thread has the pointer.
                    drop(unsafe { Box::from_raw(new) });
                }
            }
        }
    }

    fn server(&self) -> MutexGuard<'_, Option<Server>> {
        // The protected value is valid after every statement, so a poisoned lock can be used.
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is valid after every statement, so a poisoned lock can be used.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    fn start() -> Result<Self> {
        let start_time = start_time(process::id()).map_err(failed("reading /proc"))?;
        let socket = random()?;
        let address = SocketAddr::from_abstract_name(socket_name(&socket))
            .map_err(failed("naming a socket"))?;
        let listener = UnixListener::bind_addr(&address).map_err(failed("bind"))?;
        listener
            .set_nonblocking(true)
            .map_err(failed("setting up a socket"))?;
        let shared = Arc::new(Shared {
            wake: WakeFd::new().map_err(failed("eventfd"))?,
            table: Mutex::default(),
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("fusewire-share".to_owned())
            .spawn(move || run(&of_thread, &listener))
            .map_err(failed("starting a thread"))?;
        Ok(Self {
            start_time,
            socket,
            shared,
            thread,
        })
    }
}

/// Publishes a descriptor. Starts the server thread if it is not running.
pub(super) fn add(descriptor: Weak<OwnedFd>) -> Result<Token> {
    let process = Process::current();
    let secret = random()?;
    let mut slot = process.server();
    let server = match slot.take() {
        Some(server) => server,
        None => Server::start()?,
    };
    let server = slot.insert(server);
    server.shared.table().entries.push((secret, descriptor));
    Ok(Token {
        pid: process.pid,
        start_time: server.start_time,
        socket: server.socket,
        secret,
    })
}

/// Withdraws a descriptor. After this function returns, the server thread does not send the
/// descriptor to any process. Withdrawing the last descriptor stops the server thread.
pub(super) fn remove(token: &Token) {
    let process = Process::current();
    if process.pid != token.pid {
        return;
    }
    let mut slot = process.server();
    let Some(server) = slot.as_ref() else {
        return;
    };
    let mut table = server.shared.table();
    let found = table
        .entries
        .iter()
        .position(|(secret, _)| same(secret, &token.secret));
    if let Some(at) = found {
        table.entries.swap_remove(at);
    }
    if !table.entries.is_empty() {
        return;
    }
    table.stop = true;
    drop(table);
    let server = slot.take();
    // Releases the lock before joining the thread, so that a concurrent publication can start a new
    // thread.
    drop(slot);
    if let Some(server) = server {
        server.shared.wake.wake();
        if server.thread.join().is_err() {
            tracing::warn!("the thread that shares descriptors panicked");
        }
    }
}

fn random() -> Result<Random> {
    let mut bytes = Random::default();
    getrandom::fill(&mut bytes)
        .map_err(|error| io::Error::other(error.to_string()))
        .map_err(failed("getting random numbers"))?;
    Ok(bytes)
}

/// A connection whose request is incomplete.
struct Caller {
    socket: UnixStream,
    since: Instant,
    request: [u8; REQUEST_BYTES + 1],
    count: usize,
}

fn run(shared: &Shared, listener: &UnixListener) {
    let mut callers: Vec<Caller> = Vec::new();
    let mut paused = false;
    loop {
        // `poll` ignores negative descriptors.
        let listens = if paused { -1 } else { listener.as_raw_fd() };
        let mut entries = vec![
            entry(shared.wake.raw(), libc::POLLIN),
            entry(listens, libc::POLLIN),
        ];
        entries.extend(
            callers
                .iter()
                .map(|caller| entry(caller.socket.as_raw_fd(), libc::POLLIN)),
        );
        let oldest = callers.iter().map(|caller| caller.since).min();
        let bound = oldest.map(|since| CALLER_TIME.saturating_sub(since.elapsed()));
        let bound = if paused {
            Some(bound.map_or(PAUSE, |bound| bound.min(PAUSE)))
        } else {
            bound
        };
        if let Err(error) = poll(&mut entries, bound) {
            tracing::warn!(%error, "the thread that shares descriptors could not wait");
            thread::sleep(PAUSE);
            entries.iter_mut().for_each(|entry| entry.revents = 0);
        }
        if shared.table().stop {
            return close(listener, callers);
        }
        for at in (0..callers.len()).rev() {
            let has_data = entries[2 + at].revents != 0;
            let caller = &mut callers[at];
            let done =
                (has_data && caller.receive(shared)) || caller.since.elapsed() >= CALLER_TIME;
            if done {
                hang_up(&callers.remove(at).socket);
            }
        }
        paused = false;
        if entries[1].revents != 0 {
            paused = !take_callers(listener, &mut callers);
        }
    }
}

/// Accepts waiting connections. Returns false if `accept` fails, for example because the system is
/// out of resources.
fn take_callers(listener: &UnixListener, callers: &mut Vec<Caller>) -> bool {
    // Accepts at most half of `MAX_CALLERS` per call, so that the server reads from every
    // connection at least once before a newer connection can displace it.
    for _ in 0..MAX_CALLERS / 2 {
        match listener.accept() {
            Ok((socket, _)) => {
                if !admissible(&socket) {
                    reply(&socket, Reply::Refused);
                    hang_up(&socket);
                    continue;
                }
                if callers.len() == MAX_CALLERS {
                    // `callers` is in the order of acceptance, so the first entry is the oldest.
                    let oldest = callers.remove(0);
                    reply(&oldest.socket, Reply::Busy);
                    hang_up(&oldest.socket);
                }
                callers.push(Caller {
                    socket,
                    since: Instant::now(),
                    request: [0; REQUEST_BYTES + 1],
                    count: 0,
                });
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return true,
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                _ => {
                    tracing::debug!(%error, "the thread that shares descriptors cannot accept");
                    return false;
                }
            },
        }
    }
    true
}

impl Caller {
    /// Reads from the connection and replies if the request is complete. Returns true if the
    /// connection can be closed.
    fn receive(&mut self, shared: &Shared) -> bool {
        // If the peer attaches descriptors, the system closes them, because `read` provides no
        // buffer for them.
        match (&self.socket).read(&mut self.request[self.count..]) {
            Ok(0) => return true,
            Ok(count) => self.count += count,
            Err(error) => {
                return !matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                );
            }
        }
        if self.count < REQUEST_BYTES {
            return false;
        }
        match message::secret(&self.request[..self.count]) {
            Some(secret) => self.answer(shared, &secret),
            None => {
                tracing::debug!("a process sent something else than a request for a descriptor")
            }
        }
        true
    }

    fn answer(&self, shared: &Shared, secret: &Random) {
        // Holds the lock of the table while the descriptor is sent, so that no descriptor is sent
        // after `remove` has returned.
        let table = shared.table();
        // Compares the secret with all entries, so that the run time does not reveal which entry
        // matches.
        let mut found = None;
        for (of_entry, descriptor) in &table.entries {
            if same(of_entry, secret) {
                found = Some(descriptor);
            }
        }
        let Some(descriptor) = found.and_then(Weak::upgrade) else {
            return reply(&self.socket, Reply::Unknown);
        };
        let bytes = Reply::Granted.to_bytes();
        let sent = message::send(&self.socket, &bytes, Some(descriptor.as_fd()));
        drop(descriptor);
        drop(table);
        match sent {
            // The send buffer of the socket was empty, so all bytes of the reply fit.
            Ok(Some(_)) => {}
            // Too many descriptors are in transit.
            Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) => {
                reply(&self.socket, Reply::Busy);
            }
            Ok(None) => reply(&self.socket, Reply::Busy),
            Err(error) => tracing::debug!(%error, "a descriptor could not be sent"),
        }
    }
}

/// Makes the socket non-blocking. Returns true if the connected process belongs to this user or to
/// root.
fn admissible(socket: &UnixStream) -> bool {
    // SAFETY: geteuid has no preconditions.
    let own = unsafe { libc::geteuid() };
    credentials(socket).is_ok_and(|caller| caller.uid == own || caller.uid == 0)
        && socket.set_nonblocking(true).is_ok()
}

/// Sends a reply without a descriptor. If sending fails, the peer only sees that the connection is
/// closed.
fn reply(socket: &UnixStream, reply: Reply) {
    if let Err(error) = message::send(socket, &reply.to_bytes(), None) {
        tracing::debug!(%error, "a process that asked for a descriptor could not be answered");
    }
}

/// Shuts down a connection. Unlike closing the descriptor, this also works if a forked child has a
/// copy of the descriptor.
fn hang_up(socket: &UnixStream) {
    // Ignores the error, because the peer may have closed the connection.
    let _ = socket.shutdown(Shutdown::Both);
}

/// Stops listening and replies [`Reply::Unknown`] to all waiting peers.
fn close(listener: &UnixListener, callers: Vec<Caller>) {
    // Shuts down the socket, because a forked child may have a copy of the descriptor.
    // SAFETY: `listener` keeps the descriptor open, and the call accesses no memory.
    unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
    let waiting = core::iter::from_fn(|| listener.accept().ok()).map(|(socket, _)| socket);
    for socket in callers
        .into_iter()
        .map(|caller| caller.socket)
        .chain(waiting)
    {
        reply(&socket, Reply::Unknown);
        hang_up(&socket);
    }
}
