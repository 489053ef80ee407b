//! Connections to every other rank, established through the store.

use core::net::{Ipv4Addr, SocketAddr};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Instant, SystemTime};

use fusewire_backend_abi as abi;

use crate::failure::{Failure, Result};
use crate::store::Store;

/// Timeout for the first bytes of an incoming connection.
const HELLO: Duration = Duration::from_secs(2);

/// One stream to every other rank, `None` for this rank.
#[derive(Debug)]
pub(crate) struct Mesh {
    pub(crate) rank: u32,
    pub(crate) peers: Vec<Option<TcpStream>>,
    aborted: AtomicBool,
}

impl Mesh {
    /// Connects to the other ranks. Fails if not all ranks are connected by `deadline`. Rank r
    /// connects to the ranks below r and accepts connections from the ranks above r.
    pub(crate) fn connect(
        rank: u32,
        size: u32,
        store: &Store<'_>,
        deadline: Instant,
    ) -> Result<Self> {
        let mut peers: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
        if size > 1 {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
            let listener = listener.map_err(|error| Failure::io("listen", &error))?;
            let port = listener
                .local_addr()
                .map_err(|error| Failure::io("listen", &error))?;
            let token = token(rank);
            let address = format!("{} {token}", port.port());
            store.set(&format!("address/{rank}"), address.as_bytes())?;
            for peer in 0..rank {
                peers[peer as usize] = Some(call(rank, peer, store, deadline)?);
            }
            accept(&listener, token, rank, &mut peers, deadline)?;
        }
        for stream in peers.iter().flatten() {
            let set = stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true));
            set.map_err(|error| Failure::io("socket options", &error))?;
        }
        Ok(Self {
            rank,
            peers,
            aborted: AtomicBool::new(false),
        })
    }

    pub(crate) fn size(&self) -> u32 {
        self.peers.len() as u32
    }

    /// Shuts the streams down, which ends all waits on this rank and on its peers. May be called
    /// from any thread.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        for stream in self.peers.iter().flatten() {
            // Ignores errors, because the peer may already have closed the stream.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }
}

/// Returns a number that an unrelated process is unlikely to send by accident.
fn token(rank: u32) -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_nanos() as u64);
    let count = COUNT.fetch_add(1, Ordering::Relaxed) << 40;
    now ^ count
        ^ u64::from(std::process::id()) << 32
        ^ u64::from(rank).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn left(deadline: Instant, what: &str) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Failure::new(
            abi::CODE_TIMEOUT,
            format!("no time is left to {what}"),
        ));
    }
    Ok(left)
}

/// Connects to `peer` and sends the token and this rank's number.
fn call(rank: u32, peer: u32, store: &Store<'_>, deadline: Instant) -> Result<TcpStream> {
    let what = format!("connect to rank {peer}");
    let address = store.get(&format!("address/{peer}"), left(deadline, &what)?)?;
    let address = String::from_utf8_lossy(&address);
    let parsed = address
        .split_once(' ')
        .and_then(|(port, token)| Some((port.parse::<u16>().ok()?, token.parse::<u64>().ok()?)));
    let Some((port, token)) = parsed else {
        return Err(Failure::invalid(format!(
            "rank {peer} has the address \"{address}\""
        )));
    };
    let target = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let stream = TcpStream::connect_timeout(&target, left(deadline, &what)?);
    let mut stream = stream.map_err(|error| Failure::io(&what, &error))?;
    let mut hello = [0u8; 12];
    hello[..8].copy_from_slice(&token.to_le_bytes());
    hello[8..].copy_from_slice(&rank.to_le_bytes());
    stream
        .write_all(&hello)
        .map_err(|error| Failure::io(&what, &error))?;
    Ok(stream)
}

/// Accepts connections from all higher ranks. Closes all other incoming connections.
fn accept(
    listener: &TcpListener,
    token: u64,
    rank: u32,
    peers: &mut [Option<TcpStream>],
    deadline: Instant,
) -> Result<()> {
    let unblocked = listener.set_nonblocking(true);
    unblocked.map_err(|error| Failure::io("listen", &error))?;
    let above = rank as usize + 1;
    while let Some(missing) = peers[above..].iter().position(Option::is_none) {
        let missing = missing + above;
        match listener.accept() {
            Ok((stream, _)) => {
                if let Some((peer, stream)) = hello(stream, token, deadline)
                    && let Some(slot @ None) = peers.get_mut(peer).filter(|_| peer >= above)
                {
                    *slot = Some(stream);
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                left(
                    deadline,
                    &format!("accept rank {missing}, which has not connected"),
                )?;
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::io("accept", &error)),
        }
    }
    Ok(())
}

/// Returns the rank at the other end of an incoming connection, or `None` if that end does not send
/// the token.
fn hello(mut stream: TcpStream, token: u64, deadline: Instant) -> Option<(usize, TcpStream)> {
    let bound = left(deadline, "listen").ok()?.min(HELLO);
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(bound)).ok()?;
    let mut hello = [0u8; 12];
    stream.read_exact(&mut hello).ok()?;
    let (received, peer) = hello.split_at(8);
    let peer = u32::from_le_bytes(peer.try_into().ok()?);
    (received == token.to_le_bytes()).then_some((peer as usize, stream))
}
