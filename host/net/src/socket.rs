//! Non-blocking sockets, and functions to wait for them.

use core::time::Duration;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use socket2::{SockRef, TcpKeepalive};

use fusewire_driver::descriptor::{counted, credentials};

/// Poll events that report the end of a connection, even if unread bytes remain.
pub(super) const GONE: i16 = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;

/// A connected stream socket.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// Takes ownership of a connected TCP or Unix socket.
    pub(super) fn new(fd: impl Into<OwnedFd>, tcp: bool) -> io::Result<Self> {
        let fd = fd.into();
        let options = SockRef::from(&fd);
        options.set_nonblocking(true)?;
        if tcp {
            options.set_tcp_nodelay(true)?;
            // Keep-alive detects an unreachable peer after about ten seconds.
            let keepalive = TcpKeepalive::new()
                .with_time(Duration::from_secs(4))
                .with_interval(Duration::from_secs(2))
                .with_retries(3);
            options.set_tcp_keepalive(&keepalive)?;
            options.set_tcp_user_timeout(Some(Duration::from_secs(10)))?;
        }
        Ok(Self(fd))
    }

    pub(super) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Returns the id of the process at the other end of a Unix socket, as the system reports it.
    pub(super) fn peer_process(&self) -> Option<u32> {
        let process = u32::try_from(credentials(&self.0).ok()?.pid).ok()?;
        (process != 0).then_some(process)
    }

    /// Sets the time after which the connection ends if the peer does not receive what was sent.
    pub(super) fn set_user_timeout(&self, time: Duration) -> io::Result<()> {
        SockRef::from(&self.0).set_tcp_user_timeout(Some(time))
    }

    /// Returns the error of a connection attempt, if there is one.
    pub(super) fn take_error(&self) -> io::Result<()> {
        SockRef::from(&self.0).take_error()?.map_or(Ok(()), Err)
    }

    /// Resets the connection: unsent data is dropped, and the peer gets an error at once.
    pub(super) fn reset(self) {
        // If this call fails, the close is orderly. The peer treats an orderly close like a reset.
        let _ = SockRef::from(&self.0).set_linger(Some(Duration::ZERO));
    }

    /// Receives up to `len` bytes. Returns `None` if no bytes are available, and an error at the
    /// end of the stream.
    ///
    /// # Safety
    /// `start` must be valid for writes of `len` bytes.
    pub(super) unsafe fn receive(&self, start: *mut u8, len: usize) -> io::Result<Option<usize>> {
        // SAFETY: the caller guarantees that `len` bytes at `start` are writable. The descriptor is
        // open.
        let count = unsafe { libc::recv(self.raw(), start.cast(), len, libc::MSG_DONTWAIT) };
        match counted(count)? {
            Some(0) if len > 0 => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the peer closed the connection",
            )),
            count => Ok(count),
        }
    }

    /// Sends as many bytes as the system accepts: first `head`, then the `len` bytes at `body`.
    ///
    /// # Safety
    /// `body` must be valid for reads of `len` bytes.
    pub(super) unsafe fn send(
        &self,
        head: &[u8],
        body: *const u8,
        len: usize,
    ) -> io::Result<Option<usize>> {
        // SAFETY: `head` is readable, and the caller guarantees the same of `body`.
        unsafe { self.send_parts(&[(head.as_ptr(), head.len()), (body, len)]) }
    }

    /// Sends as many bytes of the parts as the system accepts, in order. A part is an address and a
    /// length. There are at most 32 parts.
    ///
    /// # Safety
    /// The parts must be valid for reads.
    pub(super) unsafe fn send_parts(
        &self,
        parts: &[(*const u8, usize)],
    ) -> io::Result<Option<usize>> {
        let mut vectors = [libc::iovec {
            iov_base: core::ptr::null_mut(),
            iov_len: 0,
        }; 32];
        for (vector, (start, len)) in vectors.iter_mut().zip(parts) {
            vector.iov_base = start.cast_mut().cast();
            vector.iov_len = *len;
        }
        // SAFETY: a message header in which all bytes are zero is valid.
        let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
        message.msg_iov = vectors.as_mut_ptr();
        message.msg_iovlen = parts.len().min(vectors.len()) as _;
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the message refers to the parts, which the caller guarantees to be readable.
        // `sendmsg` only reads these bytes.
        counted(unsafe { libc::sendmsg(self.raw(), &message, flags) })
    }
}

/// Receives messages of fixed size through a small buffer. Payload bytes that are not in the buffer
/// are received directly into their destination.
#[derive(Debug)]
pub(super) struct Receiver {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Receiver {
    pub(super) fn new() -> Self {
        Self {
            buffer: vec![0; 8 << 10].into(),
            start: 0,
            end: 0,
        }
    }

    /// Returns the number of received bytes that are still in the buffer.
    pub(super) fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Receives once into the buffer. Returns true if bytes arrived.
    pub(super) fn fill(&mut self, socket: &Socket) -> io::Result<bool> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let space = &mut self.buffer[self.end..];
        // SAFETY: `space` is an exclusively borrowed slice of `space.len()` bytes.
        let count = unsafe { socket.receive(space.as_mut_ptr(), space.len()) }?;
        self.end += count.unwrap_or(0);
        Ok(count.is_some_and(|count| count > 0))
    }

    /// Returns the next message, if it is in the buffer.
    pub(super) fn message<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.buffer[self.start..self.end].get(..N)?;
        let mut message = [0; N];
        message.copy_from_slice(bytes);
        self.start += N;
        Some(message)
    }

    /// Takes up to `len` bytes of payload from the buffer.
    ///
    /// # Safety
    /// `target` must be valid for writes of `len` bytes.
    pub(super) unsafe fn take(&mut self, target: *mut u8, len: usize) -> usize {
        let bytes = &self.buffer[self.start..self.end];
        let count = bytes.len().min(len);
        // SAFETY: the caller guarantees `len` writable bytes outside this private buffer, and
        // `count <= len`.
        unsafe { target.copy_from_nonoverlapping(bytes.as_ptr(), count) };
        self.start += count;
        count
    }

    /// Discards up to `len` buffered bytes.
    pub(super) fn skip(&mut self, len: usize) -> usize {
        let count = self.buffered().min(len);
        self.start += count;
        count
    }
}

/// Listening socket of a link.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => listener.set_nonblocking(true),
            Self::Unix(listener) => listener.set_nonblocking(true),
        }
    }

    pub(super) fn raw(&self) -> RawFd {
        match self {
            Self::Tcp(listener) => listener.as_fd().as_raw_fd(),
            Self::Unix(listener) => listener.as_fd().as_raw_fd(),
        }
    }

    pub(super) fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => Socket::new(listener.accept()?.0, true),
            Self::Unix(listener) => Socket::new(listener.accept()?.0, false),
        }
    }
}
