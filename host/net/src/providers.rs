//! The providers of this crate: TCP and shared memory.

use core::net::{IpAddr, Ipv4Addr};
use std::io;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::process;
use std::sync::Arc;

use fusewire_driver::Segment;

use crate::inbox::Inbox;
use crate::link::Link;
use crate::provider::{ByteTransport, Provider};
use crate::socket::Listener;
use crate::url::{Nonce, Url, fill_random};
use crate::{Error, Result, TransportFailure};

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
    Error::Call {
        operation,
        peer,
        kind: TransportFailure::System,
        detail: error.to_string(),
    }
}
