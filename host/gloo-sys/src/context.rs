//! The context: one rank's connections to all others, how it is made and how it ends.

use core::fmt;
use core::time::Duration;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};

use cxx::UniquePtr;

use crate::error::Error;
use crate::ffi::{self, Bridge, StoreBox};
use crate::rendezvous::Rendezvous;

/// The network interface that the TCP transport listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TcpOptions {
    /// The address that this host name resolves to. It must be an address of this machine.
    Hostname(String),
    /// The first address of this interface, such as `eth0`.
    Interface(String),
    /// This address of this machine, such as `127.0.0.1`.
    Address(core::net::IpAddr),
}

impl TcpOptions {
    /// The loopback address: all ranks on this machine.
    #[must_use]
    pub const fn loopback() -> Self {
        Self::Address(core::net::IpAddr::V4(core::net::Ipv4Addr::LOCALHOST))
    }
}

/// What one call can set for itself.
///
/// `Call::default()` has tag 0 and the context's time-out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    tag: u32,
    timeout: Option<Duration>,
}

impl Call {
    /// Tag 0 and the context's time-out.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            tag: 0,
            timeout: None,
        }
    }

    /// The tag: equal on all ranks of the operation, and different from that of every other
    /// operation of the same name in flight on the context. The messages of a
    /// [`batch`](Context::batch) have tags of their own, and do not use it.
    #[must_use]
    pub const fn tag(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }

    /// The time for the whole call, in place of the context's.
    #[must_use]
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    pub(crate) const fn tag_value(&self) -> u32 {
        self.tag
    }
}

/// One rank of a group, connected to every other rank.
///
/// # Who may call together
///
/// `&self` methods may run on several threads at once, as long as operations of the same name in
/// flight have different [tags](Call::tag): Gloo distinguishes their messages by name and tag only.
/// (`gather` and `gatherv` have different names in this sense, and so do `send`, `recv` and `batch`
/// together.) All ranks must call the same operations with the same tags; the order matters only
/// between operations of one name and tag. [`abort`](Self::abort) may be called at any time from
/// any thread. Several contexts in one process do not know of each other.
///
/// # After an error
///
/// A failed operation leaves unknown bytes in its output and unfinished messages between the ranks,
/// so the first error closes all connections of the context: the other ranks fail soon, not at
/// their own time-outs, and every later call returns [`Error::Closed`]. The exception is
/// [`Error::Invalid`] for an argument that this crate refuses before anything is sent.
pub struct Context {
    bridge: UniquePtr<Bridge>,
    rank: usize,
    size: usize,
    timeout: Duration,
    /// The failure that closed the context.
    first: Mutex<Option<String>>,
}

// SAFETY: the C++ object has no tie to the thread that made it: Gloo's context, transport and
// buffers use their own locks, and the deadline in thread-local storage lives within one call.
unsafe impl Send for Context {}

// SAFETY: the methods of the C++ object are const; what they share is Gloo's transport, which locks
// for each pair and buffer, and the registry of buffers, which has a mutex. Operations that use
// the same name and tag mix up their messages, but each stays within its own buffers.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("timeout", &self.timeout)
            .field("closed_since", &self.first())
            .finish_non_exhaustive()
    }
}

impl Context {
    /// Connects rank `rank` of `size` to all others: publishes this rank's addresses in `store`,
    /// waits for those of the others, and opens a TCP connection to each. Blocks until all
    /// connections stand; returns within about twice `timeout` in any case (once for the
    /// addresses, once for a connection that does not come up), if the `store` keeps to its
    /// time-outs. `timeout` is also that of later operations which do not set one.
    ///
    /// The context owns two threads: one moves the bytes, and one looks, 20 times a second while an
    /// operation runs, whether the peers it waits for are still connected.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank out of range, a time-out below a millisecond, or a device that
    /// Gloo cannot open; [`Error::Rendezvous`] where the store fails; [`Error::Timeout`] where a
    /// rank does not come; [`Error::Io`] where a connection fails.
    pub fn new(
        rank: usize,
        size: usize,
        timeout: Duration,
        device: &TcpOptions,
        store: Box<dyn Rendezvous>,
    ) -> Result<Self, Error> {
        const NAME: &str = "connect";
        if rank >= size {
            return Err(Error::invalid(
                NAME,
                format!("rank {rank} in a group of {size}"),
            ));
        }
        let (Ok(rank_code), Ok(size_code)) = (i32::try_from(rank), i32::try_from(size)) else {
            return Err(Error::invalid(NAME, format!("a group of {size}")));
        };
        let timeout_ms = milliseconds(NAME, timeout)?;
        let (kind, target) = match device {
            TcpOptions::Hostname(name) => (0, own_address(name).map(|address| address.to_string())),
            TcpOptions::Address(address) => (
                0,
                TcpListener::bind((*address, 0)).map(|_| address.to_string()),
            ),
            TcpOptions::Interface(name) => (1, Ok(name.clone())),
        };
        let target =
            target.map_err(|error| Error::invalid(NAME, format!("{device:?}: {error}")))?;
        if target.is_empty() {
            return Err(Error::invalid(NAME, "an empty interface name"));
        }
        let store = StoreBox(store);
        let bridge = ffi::connect(rank_code, size_code, timeout_ms, kind, &target, &store)
            .map_err(|error| Error::from_bridge(NAME, &error))?;
        Ok(Self {
            bridge,
            rank,
            size,
            timeout,
            first: Mutex::new(None),
        })
    }

    /// This rank.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// The time-out of operations that do not set one.
    #[must_use]
    pub const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the context has failed or was aborted, so that every call is refused.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.first().is_some()
    }

    /// Makes blocked operations of this process on this context return [`Error::Aborted`] soon,
    /// and refuses later ones. Closes all connections, so that the other ranks fail soon too. Call
    /// it from any thread; a second call does nothing. A context that is being made by
    /// [`new`](Self::new) cannot be aborted: its time-out bounds it.
    pub fn abort(&self) {
        self.fail("aborted by this process".to_owned());
    }

    /// Ends the context in good order, as dropping it does: what was sent still arrives.
    /// Call it when no other rank waits for this one, for instance after a
    /// [`barrier`](Self::barrier): an operation of another rank that needs this rank fails.
    pub fn close(self) {}

    /// Runs one operation unless the context is closed; its failure closes the context.
    pub(crate) fn run(
        &self,
        operation: &'static str,
        call: Call,
        body: impl FnOnce(&Bridge, &ffi::Call) -> Result<(), cxx::Exception>,
    ) -> Result<(), Error> {
        let timeout_ms = milliseconds(operation, call.timeout.unwrap_or(self.timeout))?;
        self.check_open(operation)?;
        let call = ffi::Call {
            tag: call.tag,
            timeout_ms,
        };
        body(&self.bridge, &call).map_err(|error| {
            let error = Error::from_bridge(operation, &error);
            self.fail(error.to_string());
            error
        })
    }

    pub(crate) fn check_open(&self, operation: &'static str) -> Result<(), Error> {
        match self.first() {
            Some(first) => Err(Error::Closed { operation, first }),
            None => Ok(()),
        }
    }

    fn first(&self) -> Option<String> {
        self.first
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn fail(&self, reason: String) {
        {
            let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
            if first.is_some() {
                return;
            }
            *first = Some(reason);
        }
        // Closing what is broken can find it broken; the reason above is what counts.
        let _ = self.bridge.abort();
    }
}

/// The first address of `name` that a socket can be bound to. Gloo follows a null pointer where
/// there is none.
fn own_address(name: &str) -> io::Result<core::net::IpAddr> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (name, 0).to_socket_addrs()? {
        match TcpListener::bind(address) {
            Ok(_) => return Ok(address.ip()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Milliseconds for the C++ side; at most a year, so that no clock overflows.
fn milliseconds(operation: &'static str, timeout: Duration) -> Result<u64, Error> {
    const YEAR: u64 = 365 * 24 * 3600 * 1000;
    match u64::try_from(timeout.as_millis()).unwrap_or(YEAR).min(YEAR) {
        0 => Err(Error::invalid(
            operation,
            format!("a time-out of {timeout:?}"),
        )),
        timeout_ms => Ok(timeout_ms),
    }
}
