//! The client side: fetches a descriptor from another process.

use core::fmt;
use core::time::Duration;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use socket2::{Domain, SockAddr, Socket, Type};

use super::message::{self, REPLY_BYTES, Reply};
use super::token::Token;
use crate::descriptor::{credentials, entry, poll};
use crate::process;

/// Interval between checks that the owner process is still running, if no process descriptor is
/// available. Also the interval between requests to a busy server.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Maximum time to wait for an exiting process to exit completely.
const GRACE: Duration = Duration::from_secs(1);

/// Advice in the errors that occur if ranks cannot reach each other's sockets.
const NAMESPACES: &str = "ranks that share memory need one network namespace and one process id \
    namespace: set FUSEWIRE_HOST_ID to different values for ranks of different containers";

/// The kind of a [`FetchError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FetchFailure {
    /// The owner process has exited, or its id now belongs to another process.
    Gone,
    /// The owner process is running in another network or process id namespace.
    Namespace,
    /// The owner process is running, but it does not publish the descriptor any more, or it cannot
    /// be reached and its network namespace is unknown.
    Withdrawn,
    /// The owner process does not accept requests from this user, or the process that listens on
    /// the socket is not the owner process.
    Refused,
    /// The owner process did not reply in time.
    TimedOut,
    /// The reply is invalid, or the descriptor was not delivered.
    Answer,
    /// A system call failed.
    System,
}

/// A failure to fetch a descriptor.
#[derive(Clone, Debug)]
pub(crate) struct FetchError {
    /// The kind of the failure.
    #[cfg_attr(not(test), expect(dead_code, reason = "only tests match on it"))]
    pub(crate) failure: FetchFailure,
    /// Description of the failure, with advice on how to fix it.
    pub(crate) detail: String,
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl core::error::Error for FetchError {}

/// Fetches the descriptor that `token` identifies. The returned descriptor is closed on `exec`.
///
/// # Errors
/// [`FetchError`]. If the owner process exits, the function returns immediately instead of at the
/// timeout.
pub(crate) fn fetch(token: &Token, timeout: Duration) -> Result<OwnedFd, FetchError> {
    let owner = Owner::find(token, timeout)?;
    loop {
        if let Some(descriptor) = owner.ask()? {
            return Ok(descriptor);
        }
        owner.pause()?;
    }
}

/// The process that published the descriptor.
struct Owner<'a> {
    token: &'a Token,
    /// A process descriptor (pidfd), which becomes readable when the process exits. `None` if the
    /// system does not support process descriptors.
    process: Option<OwnedFd>,
    /// `None` if the deadline exceeds the range of `Instant`.
    deadline: Option<Instant>,
    timeout: Duration,
}

/// The state of a connection to the server.
#[derive(PartialEq, Eq)]
enum Line {
    Open,
    Lost,
}

impl<'a> Owner<'a> {
    fn find(token: &'a Token, timeout: Duration) -> Result<Self, FetchError> {
        // The process descriptor must be opened before the start time is checked. If the start time
        // matches afterwards, the process that the token identifies existed when the descriptor was
        // opened, so the descriptor refers to that process.
        let owner = Self {
            token,
            process: process::descriptor(token.pid),
            deadline: Instant::now().checked_add(timeout),
            timeout,
        };
        match process::start_time(token.pid) {
            Ok(start) if start == token.start_time => {}
            Ok(_) => return Err(owner.gone("another process has its id now")),
            Err(error) if process::says_gone(&error) => {
                return Err(owner.gone("no process has its id"));
            }
            Err(error) => return Err(owner.system("reading /proc", &error)),
        }
        owner.check()?;
        Ok(owner)
    }

    /// Sends one request. Returns `None` if the server is busy.
    fn ask(&self) -> Result<Option<OwnedFd>, FetchError> {
        let Some(socket) = self.connect()? else {
            return Ok(None);
        };
        self.identify(&socket)?;
        // The server may have replied before it closed the connection, so a lost connection is not
        // an error here.
        let request = message::request(&self.token.secret);
        let mut sent = 0;
        while sent < request.len() {
            match message::send(&socket, &request[sent..], None) {
                Ok(Some(count)) => sent += count,
                Ok(None) => self.wait(&socket, libc::POLLOUT)?,
                Err(error) if lost(&error) => break,
                Err(error) => return Err(self.system("sendmsg", &error)),
            }
        }
        self.receive(&socket)
    }

    /// Connects to the server. Returns `None` if the listener's queue is full.
    fn connect(&self) -> Result<Option<Socket>, FetchError> {
        let name = format!("\0{}", self.token.socket_name());
        let address =
            SockAddr::unix(name).map_err(|error| self.system("naming a socket", &error))?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)
            .map_err(|error| self.system("socket", &error))?;
        socket
            .set_nonblocking(true)
            .map_err(|error| self.system("setting up a socket", &error))?;
        match socket.connect(&address) {
            Ok(()) => Ok(Some(socket)),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                io::ErrorKind::ConnectionRefused => Err(self.unreachable()),
                _ => Err(self.system("connect", &error)),
            },
        }
    }

    /// Checks that the listening process is the process that the token identifies.
    fn identify(&self, socket: &Socket) -> Result<(), FetchError> {
        let listening = credentials(socket).map_err(|error| self.system("getsockopt", &error))?;
        match u32::try_from(listening.pid) {
            Ok(pid) if pid == self.token.pid => Ok(()),
            Ok(0) => Err(self.error(
                FetchFailure::Namespace,
                format!(
                    "is not the one that listens, which is in another process id namespace; \
                     {NAMESPACES}"
                ),
            )),
            _ => Err(self.error(
                FetchFailure::Refused,
                format!(
                    "is not the one that listens at its socket: process {} of user {} is; \
                     {NAMESPACES}",
                    listening.pid, listening.uid
                ),
            )),
        }
    }

    fn receive(&self, socket: &Socket) -> Result<Option<OwnedFd>, FetchError> {
        // The buffer is one byte longer than a valid reply, so that replies that are too long are
        // detected.
        let mut bytes = [0; REPLY_BYTES + 1];
        let mut count = 0;
        let mut descriptors = Vec::new();
        let mut cut = false;
        let mut line = Line::Open;
        while count < REPLY_BYTES && line == Line::Open {
            match message::receive(socket, &mut bytes[count..]) {
                Ok(Some(received)) if received.count > 0 => {
                    count += received.count;
                    descriptors.extend(received.descriptors);
                    cut |= received.cut;
                }
                Ok(Some(_)) => line = Line::Lost,
                Ok(None) => self.wait(socket, libc::POLLIN)?,
                Err(error) if lost(&error) => line = Line::Lost,
                Err(error) => return Err(self.system("recvmsg", &error)),
            }
        }
        if count == 0 {
            return Err(self.closed_without_reply());
        }
        if cut {
            return Err(self.error(
                FetchFailure::Answer,
                "sent a descriptor that this process could not take; see its limit of open files \
                 (ulimit -n)"
                    .to_owned(),
            ));
        }
        let number = descriptors.len();
        match (Reply::from_bytes(&bytes[..count]), descriptors.pop()) {
            (Some(Reply::Granted), Some(descriptor)) if number == 1 => Ok(Some(descriptor)),
            (Some(Reply::Busy), None) => Ok(None),
            (Some(Reply::Unknown), None) => Err(self.error(
                FetchFailure::Withdrawn,
                "has no such descriptor; it was withdrawn, or the token is of something else"
                    .to_owned(),
            )),
            (Some(Reply::Refused), None) => Err(self.error(
                FetchFailure::Refused,
                "refused the request; ranks that share memory must run under one user".to_owned(),
            )),
            _ => Err(self.error(
                FetchFailure::Answer,
                format!(
                    "answered with {count} bytes and {number} descriptors, which is no reply of \
                     this version; all ranks must run the same one"
                ),
            )),
        }
    }

    /// Blocks until the socket is ready. Fails if the owner process exits or the deadline passes.
    fn wait(&self, socket: &Socket, events: i16) -> Result<(), FetchError> {
        self.sleep(Some((socket, events)), None)?;
        self.check()
    }

    /// Pauses before another request.
    fn pause(&self) -> Result<(), FetchError> {
        self.sleep(None, Some(POLL_INTERVAL))?;
        self.check()
    }

    fn sleep(
        &self,
        socket: Option<(&Socket, i16)>,
        bound: Option<Duration>,
    ) -> Result<(), FetchError> {
        let (fd, events) = socket.map_or((-1, 0), |(socket, events)| (socket.as_raw_fd(), events));
        // `poll` ignores negative descriptors.
        let process = self.process.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let mut entries = [entry(fd, events), entry(process, libc::POLLIN)];
        let left = self
            .deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let interval = self.process.is_none().then_some(POLL_INTERVAL);
        let time = [left, interval, bound].into_iter().flatten().min();
        poll(&mut entries, time).map_err(|error| self.system("poll", &error))?;
        Ok(())
    }

    /// Fails if the owner process has exited or the deadline has passed.
    fn check(&self) -> Result<(), FetchError> {
        if self.has_ended() {
            return Err(self.gone("it ended before it answered"));
        }
        if self
            .deadline
            .is_some_and(|deadline| Instant::now() >= deadline)
        {
            return Err(self.error(
                FetchFailure::TimedOut,
                format!(
                    "did not answer within {:.3} s; it is stopped, or the host is overloaded",
                    self.timeout.as_secs_f64()
                ),
            ));
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        let Some(process) = &self.process else {
            return process::has_ended(self.token.pid, self.token.start_time);
        };
        let mut entries = [entry(process.as_raw_fd(), libc::POLLIN)];
        poll(&mut entries, Some(Duration::ZERO)).is_ok() && entries[0].revents != 0
    }

    /// Returns the error for a connection that was closed without a reply.
    fn closed_without_reply(&self) -> FetchError {
        if let Err(error) = self.await_end() {
            return error;
        }
        self.error(
            FetchFailure::Withdrawn,
            "hung up without an answer; it has withdrawn all descriptors".to_owned(),
        )
    }

    /// If the owner process is exiting, waits until the exit is complete, because the sockets of an
    /// exiting process are closed shortly before its exit is complete. Fails if the process has
    /// exited.
    fn await_end(&self) -> Result<(), FetchError> {
        let since = Instant::now();
        // The wait is bounded, because a process whose main thread has exited also counts as
        // exiting, and its other threads can continue to run.
        while process::is_ending(self.token.pid, self.token.start_time) && since.elapsed() < GRACE {
            self.pause()?;
        }
        Ok(())
    }

    /// Returns the error for a refused connection: no process listens on the socket.
    fn unreachable(&self) -> FetchError {
        if let Err(error) = self.await_end() {
            return error;
        }
        let network = |process: &str| fs::read_link(format!("/proc/{process}/ns/net"));
        let pid = self.token.pid.to_string();
        match (network("thread-self"), network(&pid)) {
            (Ok(own), Ok(other)) if own != other => self.error(
                FetchFailure::Namespace,
                format!("is in another network namespace than this one; {NAMESPACES}"),
            ),
            (Ok(_), Ok(_)) => self.error(
                FetchFailure::Withdrawn,
                "does not listen any more; it has withdrawn all descriptors".to_owned(),
            ),
            _ => self.error(
                FetchFailure::Withdrawn,
                format!(
                    "does not listen: it has withdrawn all descriptors, or is in another network \
                     namespace, which cannot be seen from here; {NAMESPACES}"
                ),
            ),
        }
    }

    fn gone(&self, why: &str) -> FetchError {
        self.error(
            FetchFailure::Gone,
            format!(
                "is gone: {why} (or it is on another host or in a container of its own: \
                 {NAMESPACES})"
            ),
        )
    }

    fn system(&self, call: &str, error: &io::Error) -> FetchError {
        self.error(
            FetchFailure::System,
            format!("could not be asked: {call} failed: {error}"),
        )
    }

    fn error(&self, failure: FetchFailure, what: String) -> FetchError {
        FetchError {
            failure,
            detail: format!(
                "process {}, which offered a descriptor, {what}",
                self.token.pid
            ),
        }
    }
}

/// Returns true if the error means that the peer has closed the connection.
fn lost(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected
    )
}
