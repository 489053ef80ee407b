//! The server of a TCP store: one thread, one table, PyTorch's wire protocol.

use core::mem;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};

use super::table::Table;
use super::wire::{self, Query, Request, Unread, Writer};
use crate::{Error, Result};

/// Bytes of unread answers at which a connection is not listened to any more.
const MAX_PENDING_ANSWER: usize = 1 << 20;

/// Serves a table to [`TcpStore`](super::TcpStore) clients and to PyTorch's `TCPStore` clients of
/// the same byte order.
///
/// The server runs on a thread of its own and stops when this value is dropped; clients that are
/// connected then get errors. There is no authentication: whoever reaches the port can read
/// and write, so it belongs on a cluster's inner network, as PyTorch's does.
#[derive(Debug)]
pub struct TcpStoreServer {
    port: u16,
    stop: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Listens at `address`; port 0 takes any free port, which [`TcpStoreServer::port`] tells.
    ///
    /// # Errors
    /// [`Error::Store`] when the address cannot be bound or the thread cannot be started.
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        Self::start(address).map_err(|error| Error::store_io("bind", "", error))
    }

    fn start(address: impl ToSocketAddrs) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let (stop, stopped) = UnixStream::pair()?;
        let server = Server {
            listener,
            stopped,
            table: Table::default(),
            clients: Vec::new(),
        };
        let thread = thread::Builder::new()
            .name("fusewire-store".to_owned())
            .spawn(|| server.run())?;
        Ok(Self {
            port,
            stop,
            thread: Some(thread),
        })
    }

    /// The port that the server listens at.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        // The thread wakes by this hang-up; a failure would mean that it is gone already.
        let _ = self.stop.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::warn!("the thread of the TCP store server panicked");
        }
    }
}

struct Server {
    listener: TcpListener,
    stopped: UnixStream,
    table: Table,
    clients: Vec<Client>,
}

struct Client {
    stream: TcpStream,
    validated: bool,
    open: bool,
    /// Bytes that have arrived and are not a whole request yet.
    incoming: Vec<u8>,
    /// Answers that the peer has not taken yet.
    outgoing: Vec<u8>,
    /// Keys of a wait that is not over.
    awaited: Option<Vec<Vec<u8>>>,
}

impl Server {
    fn run(mut self) {
        let mut scratch = vec![0; 64 << 10];
        let mut fds = Vec::new();
        loop {
            fds.clear();
            fds.push(poll_entry(self.stopped.as_raw_fd(), libc::POLLIN));
            fds.push(poll_entry(self.listener.as_raw_fd(), libc::POLLIN));
            fds.extend(self.clients.iter().map(Client::poll_entry));
            // SAFETY: the pointer and the length are those of a live, exclusively borrowed vector.
            let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, -1) };
            if ready < 0 {
                let error = io::Error::last_os_error();
                if error.kind() == ErrorKind::Interrupted {
                    continue;
                }
                tracing::warn!(%error, "the TCP store server stops: poll failed");
                return;
            }
            if fds[0].revents != 0 {
                return;
            }
            for (client, fd) in self.clients.iter_mut().zip(&fds[2..]) {
                if fd.revents != 0 && client.serve(&mut self.table, &mut scratch) {
                    client.open &= client.outgoing.is_empty() || client.flush().is_ok();
                }
            }
            self.wake_waiting();
            self.clients.retain(|client| client.open);
            if fds[1].revents != 0 {
                self.accept();
            }
        }
    }

    fn accept(&mut self) {
        match self
            .listener
            .accept()
            .and_then(|(stream, _)| Client::new(stream))
        {
            Ok(client) => self.clients.push(client),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => {
                // Out of descriptors, most likely: the listener stays readable, so go slowly.
                tracing::warn!(%error, "the TCP store server could not accept a client");
                thread::sleep(core::time::Duration::from_millis(10));
            }
        }
    }

    /// Answers every wait whose keys are all there.
    fn wake_waiting(&mut self) {
        for client in &mut self.clients {
            let over = client
                .awaited
                .as_ref()
                .is_some_and(|keys| keys.iter().all(|key| self.table.contains(key)));
            if over {
                client.awaited = None;
                client.outgoing.push(wire::STOP_WAITING);
                client.open &= client.flush().is_ok();
            }
        }
    }
}

impl Client {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            validated: false,
            open: true,
            incoming: Vec::new(),
            outgoing: Vec::new(),
            awaited: None,
        })
    }

    fn poll_entry(&self) -> libc::pollfd {
        let mut events = 0;
        if !self.outgoing.is_empty() {
            events |= libc::POLLOUT;
        }
        if self.outgoing.len() < MAX_PENDING_ANSWER {
            events |= libc::POLLIN;
        }
        poll_entry(self.stream.as_raw_fd(), events)
    }

    /// Reads once, handles all whole requests, writes what the peer takes. Closes the connection
    /// on any failure. Returns whether it is still open.
    fn serve(&mut self, table: &mut Table, scratch: &mut [u8]) -> bool {
        let served = self
            .flush()
            .map_err(|error| error.to_string())
            .and_then(|()| self.receive(scratch))
            .and_then(|()| self.handle_all(table));
        if let Err(detail) = served {
            // A peer that has left is no news; `detail` is empty for it.
            if !detail.is_empty() {
                tracing::warn!(%detail, "the TCP store server closes a connection");
            }
            self.open = false;
        }
        self.open
    }

    fn receive(&mut self, scratch: &mut [u8]) -> Result<(), String> {
        if self.outgoing.len() >= MAX_PENDING_ANSWER {
            return Ok(());
        }
        match self.stream.read(scratch) {
            Ok(0) => Err(String::new()),
            Ok(count) if self.incoming.len() + count > wire::MAX_REQUEST_BYTES => {
                Err("a request is too long".to_owned())
            }
            Ok(count) => {
                self.incoming.extend_from_slice(&scratch[..count]);
                Ok(())
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

    fn handle_all(&mut self, table: &mut Table) -> Result<(), String> {
        let incoming = mem::take(&mut self.incoming);
        let mut at = 0;
        while at < incoming.len() && self.outgoing.len() < MAX_PENDING_ANSWER {
            if !self.validated && incoming[at] != Query::Validate as u8 {
                return Err("the first request was no validation; this is no store client".into());
            }
            match wire::parse(&incoming[at..]) {
                Ok((request, len)) => {
                    self.handle(table, request)?;
                    at += len;
                }
                Err(Unread::Incomplete) => break,
                Err(Unread::Invalid(detail)) => return Err(detail),
            }
        }
        self.incoming = incoming;
        self.incoming.drain(..at);
        if self.incoming.is_empty() {
            // One large value must not hold its memory for the life of the connection.
            self.incoming.shrink_to(64 << 10);
        }
        Ok(())
    }

    fn handle(&mut self, table: &mut Table, request: Request<'_>) -> Result<(), String> {
        let answer = Writer::default();
        let answer = match request {
            Request::Validate(magic) => {
                if magic != wire::VALIDATION_MAGIC {
                    return Err("the validation number is wrong; this is no store client".into());
                }
                self.validated = true;
                answer
            }
            Request::Set(key, value) => {
                table.set(key, value);
                answer
            }
            Request::CompareSet(key, expected, desired) => {
                answer.vector(&table.compare_set(key, expected, desired).0)
            }
            Request::Get(key) => answer.vector(present(table, key)?),
            Request::Add(key, amount) => answer.i64(table.add(key, amount)?),
            Request::Check(keys) => answer.u8(if keys.iter().all(|key| table.contains(key)) {
                wire::CHECK_READY
            } else {
                wire::CHECK_NOT_READY
            }),
            Request::Wait(keys) => {
                // Answered by `Server::wake_waiting`, which follows every round of requests.
                self.awaited = Some(keys.into_iter().map(<[u8]>::to_vec).collect());
                answer
            }
            Request::KeyCount => answer.i64(table.len() as i64),
            Request::DeleteKey(key) => answer.i64(i64::from(table.delete(key))),
            Request::Append(key, value) => {
                let len = table.get(key).map_or(0, <[u8]>::len) + value.len();
                if len as u64 > wire::MAX_VALUE_BYTES {
                    return Err(format!("append makes a value of {len} bytes"));
                }
                table.append(key, value);
                answer
            }
            Request::MultiGet(keys) => {
                let mut answer = answer;
                let mut total = 0;
                for key in keys {
                    let value = present(table, key)?;
                    total += value.len();
                    if total > wire::MAX_REQUEST_BYTES {
                        return Err("the answer is too long".into());
                    }
                    answer = answer.vector(value);
                }
                answer
            }
            Request::MultiSet(pairs) => {
                for (key, value) in pairs {
                    table.set(key, value);
                }
                answer
            }
            Request::CancelWait => {
                self.awaited = None;
                answer.u8(wire::WAIT_CANCELED)
            }
            Request::Ping(nonce) => answer.u32(nonce),
        };
        self.outgoing.extend_from_slice(&answer.finish());
        Ok(())
    }

    /// Writes as much of the pending answers as the peer takes now.
    fn flush(&mut self) -> io::Result<()> {
        let mut written = 0;
        while written < self.outgoing.len() {
            match self.stream.write(&self.outgoing[written..]) {
                Ok(count) => written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        self.outgoing.drain(..written);
        Ok(())
    }
}

/// The value of a key that a client has waited for. As in PyTorch there is no answer for an absent
/// key (another rank has deleted it in between): the connection is closed.
fn present<'a>(table: &'a Table, key: &[u8]) -> Result<&'a [u8], String> {
    table.get(key).ok_or_else(|| {
        format!(
            "key \"{}\" was asked for and does not exist",
            String::from_utf8_lossy(key)
        )
    })
}

fn poll_entry(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}
