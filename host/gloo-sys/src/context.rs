//! The context: one rank's connections to all others.

use core::fmt;
use core::time::Duration;
use std::io;
use std::net::{TcpListener, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};

use cxx::UniquePtr;

use crate::error::Error;
use crate::ffi::{self, Bridge, StoreBox};
use crate::rendezvous::Rendezvous;

/// Network address that the TCP transport listens on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TcpOptions {
    /// The address that this host name resolves to, which must be an address of this machine.
    Hostname(String),
    /// The first address of this interface, such as `eth0`.
    Interface(String),
    /// An address of this machine, such as `127.0.0.1`.
    Address(core::net::IpAddr),
}

impl TcpOptions {
    /// Returns the loopback address, for groups within this machine.
    #[must_use]
    pub const fn loopback() -> Self {
        Self::Address(core::net::IpAddr::V4(core::net::Ipv4Addr::LOCALHOST))
    }
}

/// Options of one call.
///
/// `Call::default()` has tag 0 and no timeout, so the context's timeout applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    tag: u32,
    timeout: Option<Duration>,
}

impl Call {
    /// Creates options with tag 0 and the context's timeout.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            tag: 0,
            timeout: None,
        }
    }

    /// Sets the tag. The tag must be equal on all ranks of the operation. It must differ from the
    /// tag of every other operation of the same name that is in flight on the context. A
    /// [`batch`](Context::batch) ignores this tag, because its messages carry their own tags.
    #[must_use]
    pub const fn tag(mut self, tag: u32) -> Self {
        self.tag = tag;
        self
    }

    /// Sets the timeout of the whole call, which replaces the context's timeout.
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
/// # Concurrent calls
///
/// `&self` methods may run on several threads at the same time if operations of the same name that
/// are in flight have different [tags](Call::tag): Gloo distinguishes their messages only by name
/// and tag. For this rule, `send`, `recv` and `batch` share one name, and `gather` and `gatherv`
/// have different names. All ranks must call the same operations with the same tags. The order
/// matters only between operations with the same name and tag. [`abort`](Self::abort) may be called
/// at any time from any thread. Contexts of one process are independent.
///
/// # After an error
///
/// A failed operation leaves its output undefined, and leaves unfinished messages between the
/// ranks. The first error therefore closes all connections of the context: the other ranks fail
/// soon, before their own timeouts, and every later call returns [`Error::Closed`]. There is one
/// exception: if this crate refuses an argument before it sends anything ([`Error::Invalid`]), the
/// context stays open.
pub struct Context {
    bridge: UniquePtr<Bridge>,
    rank: usize,
    size: usize,
    timeout: Duration,
    /// Message of the failure that closed the context.
    first: Mutex<Option<String>>,
}

// SAFETY: the C++ object is not bound to the thread that created it. Gloo's context, transport and
// buffers use their own locks, and the deadline in thread-local storage exists only during one
// call.
unsafe impl Send for Context {}

// SAFETY: the methods of the C++ object are const. They share Gloo's transport, which locks each
// pair and buffer, and the registry of buffers, which has a mutex. Concurrent operations with the
// same name and tag may receive each other's messages, but each operation stays within its own
// buffers.
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
    /// Connects rank `rank` of `size` to all other ranks: publishes this rank's addresses in
    /// `store`, waits for the addresses of the other ranks, and opens a TCP connection to each of
    /// them. Blocks until all connections are open. Returns within about twice `timeout` (one
    /// `timeout` for the addresses, and one for the connections), provided that `store` respects
    /// its timeouts. `timeout` is also the default of later operations.
    ///
    /// The context owns two threads. One thread moves the bytes. While an operation runs, the other
    /// thread checks 20 times a second that the peers which the operation waits for are still
    /// connected.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank out of range, a timeout below a millisecond, or a device that
    /// Gloo cannot open; [`Error::Rendezvous`] if the store fails; [`Error::Timeout`] if a rank
    /// does not join; [`Error::Io`] if a connection fails.
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

    /// Returns this rank's number.
    #[must_use]
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Returns the default timeout of operations.
    #[must_use]
    pub const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns true if the context has failed or was aborted. It then refuses every call.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.first().is_some()
    }

    /// Aborts the context. Operations of this process that are in progress on the context soon
    /// return [`Error::Aborted`], and the context refuses later operations. All connections are
    /// closed, so operations of the other ranks also fail soon. May be called from any thread; a
    /// second call does nothing. A context that [`new`](Self::new) is still constructing cannot be
    /// aborted; its timeout bounds the construction.
    pub fn abort(&self) {
        self.fail("aborted by this process".to_owned());
    }

    /// Closes the context in an orderly way, as dropping the context does: data that was sent still
    /// arrives. Call it only when no other rank waits for this rank, for instance after a
    /// [`barrier`](Self::barrier), because operations of other ranks that need this rank fail
    /// afterwards.
    pub fn close(self) {}

    /// Runs one operation unless the context is closed. If the operation fails, closes the context.
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
        // Closing a broken connection may fail; `reason` is the failure to report.
        let _ = self.bridge.abort();
    }
}

/// Returns the first address of `name` that a socket can be bound to. This check is necessary
/// because Gloo dereferences a null pointer if there is no such address.
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

/// Converts a timeout to milliseconds for the C++ side. The result is at most a year, so that no
/// clock overflows.
fn milliseconds(operation: &'static str, timeout: Duration) -> Result<u64, Error> {
    const YEAR: u64 = 365 * 24 * 3600 * 1000;
    match u64::try_from(timeout.as_millis()).unwrap_or(YEAR).min(YEAR) {
        0 => Err(Error::invalid(
            operation,
            format!("a timeout of {timeout:?}"),
        )),
        timeout_ms => Ok(timeout_ms),
    }
}
