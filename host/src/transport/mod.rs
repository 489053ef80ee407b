//! Transport between two processes: register memory, exchange keys, write and read each other's
//! memory, with notifications. The shape is that of torchcomms' `RdmaTransport`.
//!
//! ```
//! use core::time::Duration;
//! use fusewire::transport::{Memory, Notify, Tcp, Transport};
//!
//! let second = Duration::from_secs(1);
//! let (a, b) = (Transport::new(Tcp::local()), Transport::new(Tcp::local()));
//! // In two processes the urls and the key go through a store.
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
//! # Ok::<(), fusewire::Error>(())
//! ```
//!
//! # Order
//! Writes of one transport land in the order of their calls, and a notification is seen after the
//! bytes of its write and of all earlier ones. A read sees the earlier writes of its transport.
//!
//! # Failures
//! A refused key or range is an error of that operation alone. Everything else breaks the
//! connection: all pending operations and all later calls get [`TransportFailure::Broken`], at
//! once, except that notifications which had arrived are still handed out. `bind` and `connect`
//! then start afresh.
//!
//! An operation that times out breaks the connection. Its bytes do not land after its error: the
//! connection is reset, and the error is held back until the peer has closed its own connection,
//! which it does after its serving thread has stopped. A peer that does not answer within 0.2 s is
//! stopped or cut off. A stopped one finds the connection reset before it takes the next bytes,
//! because it looks after each wait and before each copy, and throws away what it had received;
//! from one that is cut off nothing is sent again. What remains is a peer that was stopped between
//! that look and the copy behind it: those bytes (at most 256 KiB) land when it runs again.
//!
//! # Trust
//! A peer proves itself with the secret of the url, and names memory by a random key; whatever else
//! it sends is checked, and no allocation follows a length that it claims. The bytes travel in the
//! clear.

mod direct;
mod failure;
mod inbox;
mod key;
mod link;
mod memory;
mod outgoing;
mod pending;
mod provider;
mod serve;
mod socket;
mod url;
mod wire;

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use failure::TransportFailure;
pub use key::{RemoteBuffer, RemoteKey};
pub use memory::{Memory, View, ViewMut};
pub use pending::Pending;
pub use provider::{ByteTransport, Notify, Provider, SharedMemory, Tcp};
pub use url::{Nonce, Url};

pub(crate) use socket::{WakeFd, counted, credentials, entry, poll};

use crate::{Error, Result};

/// One side of a connection between two processes. All calls may come from several threads; the
/// order of operations is that in which the calls began to run.
#[derive(Debug)]
pub struct Transport {
    provider: Box<dyn Provider>,
    link: Mutex<Option<Arc<dyn ByteTransport>>>,
}

impl Transport {
    /// A transport that is not bound yet.
    pub fn new(provider: impl Provider + 'static) -> Self {
        Self {
            provider: Box::new(provider),
            link: Mutex::default(),
        }
    }

    /// Whether this machine has what the provider needs.
    pub fn supported(&self) -> bool {
        self.provider.supported()
    }

    /// Starts to listen for one peer, and returns what the peer has to know. After a failure the
    /// call starts afresh, with a new url; before one it returns the url that there is.
    ///
    /// # Errors
    /// [`Error::Transport`] when the system refuses.
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
        // Joins its threads: not under the lock.
        drop(old);
        Ok(url)
    }

    /// Connects to the peer's url. The connection stands when the peer has connected to this side's
    /// url as well; operations of this side may start before.
    ///
    /// # Errors
    /// [`Error::Transport`] when there is no connection within `timeout`; it may be tried again.
    /// [`Error::InvalidArgument`] for a url of another provider.
    pub fn connect(&self, peer: &Url, timeout: Duration) -> Result<()> {
        if peer.scheme() != self.provider.scheme() {
            return Err(Error::InvalidArgument {
                operation: "connect",
                detail: format!(
                    "{} is no {} url; use the same provider on both sides",
                    peer.public(),
                    self.provider.scheme()
                ),
            });
        }
        self.link("connect")?.connect(peer, timeout)
    }

    /// Whether both directions stand.
    pub fn connected(&self) -> bool {
        self.link("connected").is_ok_and(|link| link.connected())
    }

    /// Writes a view to the peer's memory. The operation ends when the bytes are there. `timeout`
    /// bounds it from the call on.
    ///
    /// The operation's errors, which [`Pending::wait`] returns, are [`Error::Transport`] of kind
    /// `Refused` (the connection stays usable), `Timeout`, `Broken` or `Aborted`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the lengths differ, [`Error::Transport`] when there is no
    /// link.
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

    /// Reads the peer's memory into a view. The operation ends when the bytes are here. Errors are
    /// those of [`Transport::write`]; the view's bytes are undefined after one.
    ///
    /// # Errors
    /// As for [`Transport::write`].
    pub fn read(
        &self,
        target: ViewMut,
        source: RemoteBuffer,
        timeout: Duration,
    ) -> Result<Pending> {
        same_length("read", target.len(), &source)?;
        Ok(self.link("read")?.read(target, source, timeout))
    }

    /// Waits for a notified write of the peer: returns once for each, in order.
    ///
    /// # Errors
    /// [`Error::Transport`]: `Timeout` when none came in time (the connection stays usable),
    /// `Broken` when the connection ended and all that had arrived were taken, `Aborted`.
    pub fn wait_for_write(&self, timeout: Duration) -> Result<()> {
        self.link("wait_for_write")?.wait_for_write(timeout)
    }

    /// Ends the connection. Every call and operation that waits, in any thread, gets
    /// [`TransportFailure::Aborted`], and so does every later one until `bind`.
    pub fn abort(&self) {
        if let Ok(link) = self.link("abort") {
            link.abort();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn ByteTransport>>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self, operation: &'static str) -> Result<Arc<dyn ByteTransport>> {
        self.lock().clone().ok_or_else(|| Error::Transport {
            operation,
            peer: "no peer yet".to_owned(),
            kind: TransportFailure::NotConnected,
            detail: "call bind, exchange the urls, then call connect".to_owned(),
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
