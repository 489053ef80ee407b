//! Traits of transport providers, and the two providers of this crate.
//!
//! The interface has the operations *write*, *read* and *notify* instead of a byte stream, because
//! RDMA hardware implements these operations. A verbs provider would map them as follows:
//!
//! - `write` is `IBV_WR_RDMA_WRITE`. With a notification it is `IBV_WR_RDMA_WRITE_WITH_IMM`, which
//!   is ordered after the earlier writes of its queue pair, as this interface requires.
//! - `read` is `IBV_WR_RDMA_READ`.
//! - `wait_for_write` counts receive completions. A polling thread completes the [`Pending`]s from
//!   the completion queue.
//! - `bind` creates the queue pair and stores its address in the URL. If the URL cannot hold the
//!   address, the URL names a TCP listener that sends the address to the peer.
//! - `connect` moves the queue pair to ready-to-send.
//! - The first use of a [`RemoteKey`](super::RemoteKey) sends a request to the owner of the memory
//!   over the control connection. The owner registers the memory with the device, and returns the
//!   memory's address and rkey. A deregistration invalidates the rkey.
//! - A timeout moves the queue pair to the error state. The timed-out operation reports its error
//!   after the queue pair has been flushed.
//!
//! Providers without one-sided operations use a thread that serves requests, as the two providers
//! below do.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;
use std::io;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::process;
use std::sync::Arc;

use super::TransportFailure;
use super::inbox::Inbox;
use super::key::RemoteBuffer;
use super::link::Link;
use super::memory::{View, ViewMut};
use super::pending::Pending;
use super::socket::Listener;
use super::url::{Nonce, Url, fill_random};
use crate::cpu::Segment;
use crate::{Error, Result};

/// Effect of a write on the peer's [`wait_for_write`](super::Transport::wait_for_write).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The write is a notification: it makes one call of `wait_for_write` return.
    Yes,
    /// The write is not a notification.
    No,
}

/// Creates links over one kind of connection.
pub trait Provider: fmt::Debug + Send + Sync {
    /// Returns the scheme of the provider's URLs, such as `tcp`.
    fn scheme(&self) -> &'static str;

    /// Returns true if this machine supports the provider.
    fn supported(&self) -> bool;

    /// Creates one side of a link, which listens for its peer.
    ///
    /// # Errors
    /// [`Error::Transport`] or [`Error::MemoryMap`] if a system call fails.
    fn bind(&self) -> Result<Arc<dyn ByteTransport>>;
}

/// One side of a link between two processes. [`Transport`](super::Transport) documents the calls,
/// and checks the lengths before it calls a link. A link that has failed stays failed; a new link
/// replaces it. Dropping a link aborts it.
pub trait ByteTransport: fmt::Debug + Send + Sync {
    /// Returns the URL at which the peer reaches this side.
    fn url(&self) -> &Url;

    /// Connects to the peer. Called once per link.
    ///
    /// # Errors
    /// [`Error::Transport`] if the connection is not established within `timeout`.
    fn connect(&self, peer: &Url, timeout: Duration) -> Result<()>;

    /// Returns true if both directions are connected.
    fn connected(&self) -> bool;

    /// Returns true if the link is broken or aborted.
    fn has_failed(&self) -> bool;

    /// Writes to the peer's memory. Writes of one link are applied in order.
    fn write(
        &self,
        source: View,
        target: RemoteBuffer,
        notify: Notify,
        timeout: Duration,
    ) -> Pending;

    /// Reads the peer's memory, after the earlier writes of this link.
    fn read(&self, target: ViewMut, source: RemoteBuffer, timeout: Duration) -> Pending;

    /// Takes one notification.
    ///
    /// # Errors
    /// [`Error::Transport`] if no notification arrives in time, or if the link ends.
    fn wait_for_write(&self, timeout: Duration) -> Result<()>;

    /// Ends the link. All waiting calls return an error.
    fn abort(&self);
}

/// Provider of links over TCP.
#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    address: IpAddr,
}

impl Tcp {
    /// Creates a provider that listens on the loopback address, for peers on the same host.
    pub fn local() -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    /// Creates a provider that listens on `address`, an address of this host that peers can reach.
    pub fn at(address: IpAddr) -> Self {
        Self { address }
    }
}

impl Provider for Tcp {
    fn scheme(&self) -> &'static str {
        "tcp"
    }

    fn supported(&self) -> bool {
        TcpListener::bind((self.address, 0)).is_ok()
    }

    fn bind(&self) -> Result<Arc<dyn ByteTransport>> {
        let nonce = Nonce::random()?;
        let failed = |error| system("bind", format!("tcp://{}", self.address), error);
        let listener = TcpListener::bind((self.address, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?.to_string();
        let url = Url::new(self.scheme(), &address, nonce);
        let link = Link::start(Listener::Tcp(listener), url, Inbox::private()).map_err(failed)?;
        Ok(Arc::new(link))
    }
}

/// Provider of links between processes of one host and one user. A side maps the peer's memory if
/// [`Memory::allocate`](super::Memory) allocated the memory, and copies on the caller's thread.
/// Such an operation is complete when the call returns, and its timeout does not apply. Other
/// memory is accessed through a Unix socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedMemory;

impl Provider for SharedMemory {
    fn scheme(&self) -> &'static str {
        "shm"
    }

    fn supported(&self) -> bool {
        Segment::create(1, "fusewire-probe").is_ok()
    }

    fn bind(&self) -> Result<Arc<dyn ByteTransport>> {
        let nonce = Nonce::random()?;
        let mut random = [0; 8];
        fill_random(&mut random)?;
        // The name must not contain a part of the nonce, because all processes of this host can see
        // the name.
        let name = format!(
            "fusewire-{}-{:016x}",
            process::id(),
            u64::from_le_bytes(random)
        );
        let failed = |error| system("bind", format!("shm://{name}"), error);
        let address = UnixAddr::from_abstract_name(&name).map_err(failed)?;
        let listener = UnixListener::bind_addr(&address).map_err(failed)?;
        let url = Url::new(self.scheme(), &name, nonce);
        let link = Link::start(Listener::Unix(listener), url, Inbox::shared()?).map_err(failed)?;
        Ok(Arc::new(link))
    }
}

fn system(operation: &'static str, peer: String, error: io::Error) -> Error {
    Error::Transport {
        operation,
        peer,
        kind: TransportFailure::System,
        detail: error.to_string(),
    }
}
