//! Transport between two processes. The processes register memory, exchange keys, write and read
//! each other's memory, and notify each other. The interface follows torchcomms' `RdmaTransport`.
//!
//! ```
//! use core::time::Duration;
//! use fusewire_net::{Memory, Notify, Tcp, Transport};
//!
//! let second = Duration::from_secs(1);
//! let (a, b) = (Transport::new(Tcp::local()), Transport::new(Tcp::local()));
//! // Two processes exchange URLs and the key through a store.
//! let (url_a, url_b) = (a.bind()?, b.bind()?);
//! a.connect(&url_b, second)?;
//! b.connect(&url_a, second)?;
//!
//! let source = Memory::register(*b"hello, peer")?;
//! let target = Memory::allocate(64)?;
//! let key = target.remote_key();
//! a.write(source.view(0..5)?, key.range(8, 5), Notify::Yes, second)?.wait()?;
//! b.wait_for_write(second)?;
//! let mut seen = [0; 5];
//! target.copy_to(8, &mut seen)?;
//! assert_eq!(&seen, b"hello");
//! # Ok::<(), fusewire_net::Error>(())
//! ```
//!
//! # Order
//! Writes of one transport are applied in the order of their calls. A notification is delivered
//! after the bytes of its write and of all earlier writes. A read returns the data of the
//! transport's earlier writes.
//!
//! # Failures
//! If the peer refuses a key or range, only that operation fails. Every other failure breaks the
//! connection: all pending operations and all later calls return [`TransportFailure::Broken`] at
//! once, but notifications that have already arrived are still delivered. Call `bind` and `connect`
//! again to create a new connection.
//!
//! RDMA differs: a suspended peer's device continues to write and read memory. After a timeout,
//! this side has destroyed its queue pair; packets that are already on the network may still be
//! applied until the peer destroys its own.
//!
//! An operation that times out breaks the connection. After the operation has returned its error,
//! none of its bytes are written: this side resets the connection, and delays the error until the
//! peer has closed its own connection. The peer closes its connection after its serving thread has
//! stopped. This side waits for at most 0.2 s. If the peer has not closed its connection by then,
//! the peer is suspended or unreachable:
//!
//! - A suspended peer detects the reset when it resumes, because it checks the connection after
//!   each wait and before each copy. The peer then discards received data. One case remains: if the
//!   peer was suspended between such a check and the following copy, the bytes of this copy (at
//!   most 256 KiB) are written when the peer resumes.
//! - If the peer is unreachable, this side does not send the bytes again.
//!
//! # Security
//! Each side proves with HMAC-SHA256 that it knows the URL's secret, which is never sent. A process
//! without the URL, or one that listens on a reused port, cannot impersonate the peer. A peer
//! addresses memory by a random key. The transport checks all other input. It never allocates
//! memory of a size that the peer sends.
//!
//! The connection is not encrypted, and its data is not authenticated. Anything that can read or
//! change the packets between the hosts can read or change the data. Use a network that only
//! trusted hosts reach, or an encrypted one, such as WireGuard. [`Verbs`] documents what RDMA adds
//! to this.

mod direct;
mod error;
mod failure;
mod inbox;
mod interface;
mod key;
mod link;
mod memory;
pub mod mesh;
mod pending;
mod provider;
mod providers;
mod route;
mod socket;
mod url;
mod verbs;
mod wire;

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use self::error::{Error, Result};
pub use self::failure::TransportFailure;
pub use interface::{Interface, interfaces};
pub use key::{RemoteBuffer, RemoteKey};
pub use memory::{DmaBuf, Memory, View, ViewMut};
pub use pending::Pending;
pub use provider::{ByteTransport, Notify, Provider};
pub use providers::{SharedMemory, Tcp, Verbs};
pub use route::{Connector, Endpoint, Route};
pub use url::{Nonce, Url};
pub use verbs::{Gid, GidKind, LinkLayer, VerbsPort, verbs_ports};

/// One side of a connection between two processes. All methods may be called from several threads.
/// The operations are ordered by the time at which their calls begin.
#[derive(Debug)]
pub struct Transport {
    provider: Box<dyn Provider>,
    link: Mutex<Option<Arc<dyn ByteTransport>>>,
}

impl Transport {
    /// Creates a transport that is not bound.
    pub fn new(provider: impl Provider + 'static) -> Self {
        Self {
            provider: Box::new(provider),
            link: Mutex::default(),
        }
    }

    /// Returns true if this machine supports the provider.
    pub fn supported(&self) -> bool {
        self.provider.supported()
    }

    /// Starts to listen for one peer, and returns the URL that the peer needs. Later calls return
    /// the same URL until the link fails. After a failure, the next call starts to listen again
    /// with a new URL.
    ///
    /// # Errors
    /// [`Error::Call`] if a system call fails.
    pub fn bind(&self) -> Result<Url> {
        let mut link = self.lock();
        if let Some(link) = &*link
            && !link.has_failed()
        {
            return Ok(link.url().clone());
        }
        let fresh = self.provider.bind()?;
        let url = fresh.url().clone();
        let old = link.replace(fresh);
        drop(link);
        // `old` is dropped after the lock is released, because dropping a link joins threads.
        drop(old);
        Ok(url)
    }

    /// Connects to the peer's URL. The connection is complete when the peer has also connected to
    /// this side's URL. This side may start operations before the peer has connected.
    ///
    /// # Errors
    /// [`Error::Call`] if the connection is not established within `timeout`; the call may be
    /// repeated. [`Error::InvalidArgument`] for a URL of another provider.
    pub fn connect(&self, peer: &Url, timeout: Duration) -> Result<()> {
        if peer.scheme() != self.provider.scheme() {
            return Err(Error::InvalidArgument {
                operation: "connect",
                detail: format!(
                    "{} is not a {} URL; use the same provider on both sides",
                    peer.public(),
                    self.provider.scheme()
                ),
            });
        }
        self.link("connect")?.connect(peer, timeout)
    }

    /// Returns true if both directions are connected.
    pub fn connected(&self) -> bool {
        self.link("connected").is_ok_and(|link| link.connected())
    }

    /// Writes `source` to the peer's memory. The operation completes when the bytes have been
    /// written. `timeout` starts with the call.
    ///
    /// [`Pending::wait`] returns the operation's error: [`Error::Call`] of kind `Refused` (the
    /// connection stays usable), `Timeout`, `Broken` or `Aborted`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the lengths differ, [`Error::Call`] if there is no link.
    pub fn write(
        &self,
        source: View,
        target: RemoteBuffer,
        notify: Notify,
        timeout: Duration,
    ) -> Result<Pending> {
        same_length("write", source.len(), &target)?;
        Ok(self.link("write")?.write(source, target, notify, timeout))
    }

    /// Stores `word` to the 8 bytes `target` of the peer's memory, as a signal that the earlier
    /// writes of this transport have been written. A thread of the peer that sees the word with an
    /// atomic acquire load also sees the bytes of the earlier writes. The address of the word in
    /// the peer's memory must be a multiple of 8; [`Memory::allocate`] aligns memory to pages.
    ///
    /// Over TCP and shared memory, one release store writes the word. RDMA guarantees neither an
    /// indivisible word nor, for a thread that polls, that the earlier writes are visible; only
    /// [`Transport::wait_for_write`] guarantees this on every device. On devices that place writes
    /// in order, polling works. Soft-RoCE writes the low bytes of a word first, so only increase
    /// the word, and wait until it is greater than or equal to the expected value: a partly written
    /// word is then never greater than the new one.
    ///
    /// The operation has the same errors as [`Transport::write`].
    ///
    /// # Errors
    /// The errors of [`Transport::write`].
    pub fn store(&self, word: u64, target: RemoteBuffer, timeout: Duration) -> Result<Pending> {
        same_length("store", memory::WORD_BYTES, &target)?;
        Ok(self.link("store")?.store(word, target, timeout))
    }

    /// Reads the peer's memory into a view. The operation completes when the bytes have arrived.
    /// The operation has the same errors as [`Transport::write`]. After an error, the bytes of the
    /// view are undefined.
    ///
    /// # Errors
    /// The errors of [`Transport::write`].
    pub fn read(
        &self,
        target: ViewMut,
        source: RemoteBuffer,
        timeout: Duration,
    ) -> Result<Pending> {
        same_length("read", target.len(), &source)?;
        Ok(self.link("read")?.read(target, source, timeout))
    }

    /// Waits for a write with notification. Each notification makes one call return, in the order
    /// of the writes.
    ///
    /// # Errors
    /// [`Error::Call`] of kind `Timeout` if no notification arrived in time (the connection
    /// stays usable), `Broken` if the connection has ended and all notifications that arrived were
    /// delivered, or `Aborted`.
    pub fn wait_for_write(&self, timeout: Duration) -> Result<()> {
        self.link("wait_for_write")?.wait_for_write(timeout)
    }

    /// Ends the connection. All waiting calls and operations, in any thread, return
    /// [`TransportFailure::Aborted`]. Later calls return the same error until `bind` is called.
    pub fn abort(&self) {
        if let Ok(link) = self.link("abort") {
            link.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn ByteTransport>>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self, operation: &'static str) -> Result<Arc<dyn ByteTransport>> {
        self.lock().clone().ok_or_else(|| Error::Call {
            operation,
            peer: "no peer yet".to_owned(),
            kind: TransportFailure::NotConnected,
            detail: "call bind, exchange the URLs, then call connect".to_owned(),
        })
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.abort();
    }
}

fn same_length(operation: &'static str, local: usize, remote: &RemoteBuffer) -> Result<()> {
    if local as u64 == remote.len {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        operation,
        detail: format!(
            "the view has {local} bytes and the remote buffer {}; both must be equal",
            remote.len
        ),
    })
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
