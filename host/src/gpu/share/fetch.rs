//! The side that gets a descriptor.

use core::fmt;
use core::time::Duration;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use socket2::{Domain, SockAddr, Socket, Type};

use super::message::{self, REPLY_BYTES, Reply};
use super::token::Token;
use crate::process;
use crate::transport::{credentials, entry, poll};

/// Between two looks at a process that the system cannot watch, and between two attempts at a busy one.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long a process that has begun to end may take for that.
const GRACE: Duration = Duration::from_secs(1);

/// What to do where ranks cannot reach each other's sockets.
const NAMESPACES: &str = "ranks that share memory need one network namespace and one process id namespace: \
    set FUSEWIRE_HOST_ID to different values for ranks of different containers";

/// What kind of failure it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FetchFailure {
    /// The process has ended, or another one has its id.
    Gone,
    /// The process lives, but in another network or process id namespace.
    Namespace,
    /// The process lives and has withdrawn the descriptor.
    Withdrawn,
    /// The process does not answer this user, or is not the one that the token means.
    Refused,
    /// The process did not answer in time.
    TimedOut,
    /// The answer is not one, or the descriptor did not come through.
    Answer,
    /// The system refused a call.
    System,
}

/// Why a descriptor could not be fetched.
#[derive(Clone, Debug)]
pub(crate) struct FetchError {
    /// What to decide on.
    #[cfg_attr(not(test), expect(dead_code, reason = "the text says it"))]
    pub(crate) failure: FetchFailure,
    /// What happened, and what to do.
    pub(crate) detail: String,
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl core::error::Error for FetchError {}

/// Gets a descriptor of what the token's process has published under it; closed on execution of
/// another program.
///
/// # Errors
/// [`FetchError`]; the end of the process is noticed at once, not at the time-out.
pub(crate) fn fetch(token: &Token, timeout: Duration) -> Result<OwnedFd, FetchError> {
    let owner = Owner::find(token, timeout)?;
    loop {
        if let Some(descriptor) = owner.ask()? {
            return Ok(descriptor);
        }
        // It was busy.
        owner.pause()?;
    }
}

/// The process that published the descriptor.
struct Owner<'a> {
    token: &'a Token,
    /// Readable when the process ends; where the system has that.
    process: Option<OwnedFd>,
    /// None when the time is more than can be counted.
    deadline: Option<Instant>,
    timeout: Duration,
}

/// Whether the other end of a connection may still say something.
#[derive(PartialEq, Eq)]
enum Line {
    Open,
    Lost,
}

impl<'a> Owner<'a> {
    fn find(token: &'a Token, timeout: Duration) -> Result<Self, FetchError> {
        // In this order: what was opened before the start time was right is the right process, or
        // says that it has ended.
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

    /// Asks once; `None` when the process is busy.
    fn ask(&self) -> Result<Option<OwnedFd>, FetchError> {
        let Some(socket) = self.connect()? else {
            return Ok(None);
        };
        self.identify(&socket)?;
        // A connection that is lost here may still hold a reply.
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

    /// Connects; `None` when too many others wait to be let in.
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

    /// Makes sure that the one who listens is the process of the token.
    fn identify(&self, socket: &Socket) -> Result<(), FetchError> {
        let listening = credentials(socket).map_err(|error| self.system("getsockopt", &error))?;
        match u32::try_from(listening.pid) {
            Ok(pid) if pid == self.token.pid => Ok(()),
            Ok(0) => Err(self.error(
                FetchFailure::Namespace,
                format!(
                    "is not the one that listens, which is in another process id namespace; {NAMESPACES}"
                ),
            )),
            _ => Err(self.error(
                FetchFailure::Refused,
                format!(
                    "is not the one that listens at its socket: process {} of user {} is; {NAMESPACES}",
                    listening.pid, listening.uid
                ),
            )),
        }
    }

    fn receive(&self, socket: &Socket) -> Result<Option<OwnedFd>, FetchError> {
        // One byte more than a reply has, to notice more.
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

    /// Waits until the socket is ready, the process ends, or the time is over.
    fn wait(&self, socket: &Socket, events: i16) -> Result<(), FetchError> {
        self.sleep(Some((socket, events)), None)?;
        self.check()
    }

    /// Waits before another attempt.
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
        // A negative descriptor is passed over.
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

    /// Fails when the process has ended or the time is over.
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

    /// The connection ended without a reply.
    fn closed_without_reply(&self) -> FetchError {
        if let Err(error) = self.await_end() {
            return error;
        }
        self.error(
            FetchFailure::Withdrawn,
            "hung up without an answer; it has withdrawn all descriptors".to_owned(),
        )
    }

    /// Fails when the process is about to end: its sockets close a moment before it does.
    fn await_end(&self) -> Result<(), FetchError> {
        let since = Instant::now();
        // Not without bound: a process can go on after its first thread has ended, which looks the same.
        while process::is_ending(self.token.pid, self.token.start_time) && since.elapsed() < GRACE {
            self.pause()?;
        }
        Ok(())
    }

    /// Nobody listens, though the process lives.
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
                "is gone: {why} (or it is on another host or in a container of its own: {NAMESPACES})"
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

/// Whether the error says that the other side has closed the connection.
fn lost(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::NotConnected
    )
}
