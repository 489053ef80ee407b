//! The providers of this crate: TCP, shared memory and RDMA.

use core::net::{IpAddr, Ipv4Addr};
use std::io;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::process;
use std::sync::Arc;

use fusewire_driver::Segment;

use crate::inbox::Inbox;
use crate::interface;
use crate::link::Link;
use crate::provider::{ByteTransport, Provider};
use crate::socket::Listener;
use crate::url::{Nonce, Url, fill_random};
use crate::verbs::{LinkLayer, PortChoice, QueuePair};
use crate::{Error, Result, TransportFailure};

/// Provider of links over TCP. Both sides prove that they know the secret of the peer's URL, which
/// is never sent. Afterwards, the bytes are neither encrypted nor authenticated: anyone who can
/// read or change the packets between the hosts can read or change the data.
#[derive(Clone, Copy, Debug)]
pub struct Tcp {
    address: IpAddr,
}

impl Tcp {
    /// Creates a provider that listens on the loopback address, for peers on the same host.
    pub fn local() -> Self {
        Self::at(Ipv4Addr::LOCALHOST.into())
    }

    /// Creates a provider that listens on the network interface of this name, such as `eth0`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this host has no such interface; the message lists those that
    /// it has.
    pub fn interface(name: &str) -> Result<Self> {
        interface::by_name(name).map(Self::at)
    }

    /// Creates a provider that listens on the address that peers on other hosts most likely reach:
    /// the first IPv4 address of an interface that is neither a loopback interface nor a bridge of
    /// containers, else an IPv6 address, else any address. The environment variable
    /// `FUSEWIRE_SOCKET_IFNAME` restricts the interfaces; its syntax is that of
    /// `NCCL_SOCKET_IFNAME`: `eth,ib` (prefixes of names), `=eth0` (whole names), `^docker` (all
    /// but these).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no interface matches the variable.
    pub fn automatic() -> Result<Self> {
        interface::automatic().map(Self::at)
    }

    /// Returns the address on which links listen.
    pub fn address(&self) -> IpAddr {
        self.address
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
        bind_tcp(self.scheme(), self.address, None)
    }
}

/// Creates a link that listens on a free port of `address`.
fn bind_tcp(
    scheme: &str,
    address: IpAddr,
    queue_pair: Option<QueuePair>,
) -> Result<Arc<dyn ByteTransport>> {
    let nonce = Nonce::random()?;
    let failed = |error| system("bind", format!("{scheme}://{address}"), error);
    let listener = TcpListener::bind((address, 0)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?.to_string();
    let url = Url::new(scheme, &address, nonce);
    let link = Link::start(Listener::Tcp(listener), url, Inbox::private(), queue_pair);
    Ok(Arc::new(link.map_err(failed)?))
}

/// Provider of links over RDMA devices: InfiniBand and RoCE, through libibverbs, which is opened at
/// run time. [`verbs_ports`](super::verbs_ports) lists the ports.
///
/// A link uses one reliable connected queue pair. Writes and reads are RDMA writes and reads. After
/// the first access to a key, which the owner's process must answer, they complete even while that
/// process is suspended; writes with notification stop after 256 that it has not received. The link
/// also has a TCP connection for each direction. A side requests the registration of a
/// [`RemoteKey`] over this connection before its first access, and detects by this connection that
/// the peer's process has ended. Dropping a [`Memory`] that a peer has accessed takes a round trip,
/// in which the peer confirms that it will not access the memory; if no confirmation arrives within
/// 1 s, this side destroys the connection before the drop returns.
///
/// The device registers all bytes of a memory when an operation first uses it. Registered memory is
/// locked, so it counts towards the limit `ulimit -l`.
///
/// On a NIC, an operation fails 0.5 s to 2 s after the peer's device has stopped answering, or when
/// its timeout has passed. Soft-RoCE retries without limit. The TCP connections detect within about
/// 10 s that the peer's host is unreachable.
///
/// # Security
/// The TCP connection authenticates the peer, as it does for [`Tcp`]. The bytes on the RDMA network
/// are neither encrypted nor authenticated: RDMA has no protection against hosts on the same
/// network that forge packets, and a peer that has connected may access all memory that this
/// process has exported on the same device, if it guesses the device's 32-bit keys.
///
/// [`RemoteKey`]: super::RemoteKey
/// [`Memory`]: super::Memory
#[derive(Clone, Debug, Default)]
pub struct Verbs {
    choice: PortChoice,
    traffic_class: u8,
    address: Option<IpAddr>,
}

impl Verbs {
    /// Creates a provider that uses the first active port of this host's RDMA devices.
    ///
    /// ```
    /// use fusewire_net::{Transport, Verbs};
    ///
    /// // A NIC near the GPU at this PCI address, for the second rank of this host.
    /// let transport = Transport::new(Verbs::new().near("0000:3b:00.0").rail(1));
    /// if transport.supported() {
    ///     println!("{}", transport.bind()?.public());
    /// }
    /// # Ok::<(), fusewire_net::Error>(())
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires the device of this name, such as `mlx5_0`.
    pub fn device(mut self, name: &str) -> Self {
        self.choice.device = Some(name.to_owned());
        self
    }

    /// Requires the port of this number. The first port is 1.
    pub fn port(mut self, number: u8) -> Self {
        self.choice.port = Some(number);
        self
    }

    /// Requires this entry of the port's table of GIDs. The default is the first RoCE v2 address
    /// that is an IPv4 address, else an IPv6 address that routers forward, else a link-local
    /// address; on InfiniBand, the first entry.
    pub fn gid_index(mut self, index: u32) -> Self {
        self.choice.gid_index = Some(index);
        self
    }

    /// Prefers the ports that are nearest to the PCI device of this bus id, such as `0000:3b:00.0`:
    /// below the same switch, else below the same root complex, else on the same NUMA node. The
    /// distances are those of `/sys`; no test ran on a machine with several NICs.
    pub fn near(mut self, bus_id: &str) -> Self {
        self.choice.near = Some(bus_id.to_owned());
        self
    }

    /// Chooses the port of this number, modulo their count, among the ports that are equally near.
    /// If each rank passes its local rank, the ranks of a host share the ports evenly. Ranks with
    /// the same local rank use the same rail if their hosts list the same ports in the same order.
    /// The default is 0.
    pub fn rail(mut self, number: u32) -> Self {
        self.choice.rail = number;
        self
    }

    /// Sets the traffic class of the packets (on RoCE v2, the DSCP and ECN bits of the IP header).
    /// The default is 0.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Sets the address of this host on which the link listens for the TCP connection of its peer.
    /// The default is the IP address of the GID or, on InfiniBand, that of [`Tcp::automatic`].
    pub fn control_address(mut self, address: IpAddr) -> Self {
        self.address = Some(address);
        self
    }
}

impl Verbs {
    /// Returns the link layer of the port that links use.
    pub(crate) fn link_layer(&self) -> Result<LinkLayer> {
        let queue_pair = QueuePair::new(&self.choice, self.traffic_class)?;
        Ok(queue_pair.link_layer())
    }
}

impl Provider for Verbs {
    fn scheme(&self) -> &'static str {
        "verbs"
    }

    fn supported(&self) -> bool {
        self.link_layer().is_ok()
    }

    fn bind(&self) -> Result<Arc<dyn ByteTransport>> {
        let queue_pair = QueuePair::new(&self.choice, self.traffic_class)?;
        let address = match self.address.or_else(|| queue_pair.ip()) {
            Some(address) => address,
            None => interface::automatic()?,
        };
        bind_tcp(self.scheme(), address, Some(queue_pair))
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
        let link = Link::start(Listener::Unix(listener), url, Inbox::shared()?, None);
        let link = link.map_err(failed)?;
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
