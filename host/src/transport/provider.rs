//! What moves the bytes: the traits, and the two providers of this crate.
//!
//! The seam lies at *write, read and notify*, not at a stream of bytes, because that is what the
//! best providers do by themselves: a verbs provider's `write` is `IBV_WR_RDMA_WRITE`, with
//! `_WITH_IMM` for a notification (ordered behind the earlier writes of its queue pair, as asked
//! for here), `read` is `IBV_WR_RDMA_READ`, `wait_for_write` counts receive completions, and a
//! polling thread finishes the [`Pending`]s from the completion queue. `bind` makes the queue pair
//! and puts its address into the url (or behind a TCP listener, as here, where it does not fit);
//! `connect` moves it to ready-to-send. The number in a [`RemoteKey`](super::RemoteKey) is then
//! looked up once with the owner over the control connection, which answers with address and rkey,
//! and the registration with the device is made at that time; a deregistration invalidates the
//! rkey. A time-out moves the queue pair to the error state and waits for its flush before it is
//! reported. Providers without one-sided operations serve requests with a thread, as those below
//! do.

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

/// Whether the peer's [`wait_for_write`](super::Transport::wait_for_write) counts a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// It does.
    Yes,
    /// It does not.
    No,
}

/// Makes links of one kind.
pub trait Provider: fmt::Debug + Send + Sync {
    /// The scheme of its urls, such as `tcp`.
    fn scheme(&self) -> &'static str;

    /// Whether this machine has what it needs.
    fn supported(&self) -> bool;

    /// A new side of a link that listens for its peer.
    ///
    /// # Errors
    /// [`Error::Transport`] or [`Error::MemoryMap`] when the system refuses.
    fn bind(&self) -> Result<Arc<dyn ByteTransport>>;
}

/// One side of a link between two processes. [`Transport`](super::Transport) documents what each
/// call promises; it has checked the lengths. A link that has failed stays failed: a new one is
/// bound in its place. Dropping it aborts it.
pub trait ByteTransport: fmt::Debug + Send + Sync {
    /// Where the peer finds this side.
    fn url(&self) -> &Url;

    /// Connects to the peer; once.
    ///
    /// # Errors
    /// [`Error::Transport`] when there is no connection within `timeout`.
    fn connect(&self, peer: &Url, timeout: Duration) -> Result<()>;

    /// Whether both directions stand.
    fn connected(&self) -> bool;

    /// Whether the link is broken or aborted.
    fn has_failed(&self) -> bool;

    /// Writes to the peer's memory; writes of one link land in order.
    fn write(
        &self,
        source: View,
        target: RemoteBuffer,
        notify: Notify,
        timeout: Duration,
    ) -> Pending;

    /// Reads the peer's memory, behind the earlier writes of this link.
    fn read(&self, target: ViewMut, source: RemoteBuffer, timeout: Duration) -> Pending;

    /// Takes one notification.
    ///
    /// # Errors
    /// [`Error::Transport`] when none comes in time, or the link ends.
    fn wait_for_write(&self, timeout: Duration) -> Result<()>;

    /// Ends the link; every call that waits gets an error.
    fn abort(&self);
}

/// Links over TCP.
#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    address: IpAddr,
}

impl Tcp {
    /// Listens at the loopback address: for peers on the same host.
    pub fn local() -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    /// Listens at an address of this host that peers reach.
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

/// Links between processes of one host and user. Memory of [`Memory::allocate`](super::Memory) is
/// mapped by the peer, which copies into it by itself, on the caller's thread: such a write has
/// ended when the call returns, and its time-out plays no part. Other memory is written through a
/// Unix socket.
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
        // The name is seen by all on this host, so it has nothing of the nonce.
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
