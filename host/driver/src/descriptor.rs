//! File descriptors: waits for events, wake-ups, and the process at the other end of a socket.

use core::time::Duration;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Returns the credentials of the process at the other end of a Unix socket: the process that
/// connected or that listens, as the system reports it. The process id is 0 if the process is
/// outside this process's PID namespace.
pub fn credentials(socket: &impl AsRawFd) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the system writes at most `len` bytes to a local variable of that size.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(credentials)
}

/// Converts the result of a system call that transfers bytes. Returns the number of bytes, or
/// `None` if the call must be repeated.
pub fn counted(result: isize) -> io::Result<Option<usize>> {
    match usize::try_from(result) {
        Ok(count) => Ok(Some(count)),
        Err(_) => {
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            }
        }
    }
}

/// Wakes a thread that waits in [`poll`].
#[derive(Debug)]
pub struct WakeFd(OwnedFd);

impl WakeFd {
    /// Creates an event that is not set.
    ///
    /// # Errors
    /// The error of `eventfd`.
    pub fn new() -> io::Result<Self> {
        // SAFETY: `eventfd` takes two integers and accesses no memory of this process.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was created above, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns the descriptor, which is readable while the event is set.
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Wakes the thread. The result of the write is ignored, because the write fails only if the
    /// event is already set.
    pub fn wake(&self) {
        let one = 1_u64;
        // SAFETY: `write` reads eight bytes, the size of the local variable `one`.
        unsafe { libc::write(self.raw(), (&raw const one).cast(), 8) };
    }

    /// Clears the event, so that the next wait sleeps.
    pub fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: `read` writes at most eight bytes, the size of the local variable `count`.
        unsafe { libc::read(self.raw(), (&raw mut count).cast(), 8) };
    }
}

/// Returns an entry of [`poll`] for the given events.
pub fn entry(fd: RawFd, events: i16) -> libc::pollfd {
    libc::pollfd {
        fd,
        events,
        revents: 0,
    }
}

/// Waits until one of the events occurs, or until `timeout`, if given, has passed. Returns early if
/// a signal arrives.
pub fn poll(entries: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<()> {
    let milliseconds = timeout.map_or(-1, |timeout| {
        // The timeout is rounded up to milliseconds, so that the caller's deadline has passed when
        // the wait times out.
        let rounded = timeout.as_nanos().div_ceil(1_000_000);
        i32::try_from(rounded).unwrap_or(i32::MAX)
    });
    // SAFETY: pointer and length are those of `entries`, an exclusively borrowed slice.
    let result = unsafe {
        libc::poll(
            entries.as_mut_ptr(),
            entries.len() as libc::nfds_t,
            milliseconds,
        )
    };
    if result < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        entries.iter_mut().for_each(|entry| entry.revents = 0);
    }
    Ok(())
}
