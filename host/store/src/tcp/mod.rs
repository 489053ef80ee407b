//! The client of a TCP store.

mod connections;
mod options;
mod requests;

use core::time::Duration;
use std::io::Write;
use std::net::TcpStream;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

pub use self::options::{StoreOptions, StoreProtocol};
use super::client_connection::{Greeting, read_array};
use super::wire::{Dialect, Query, Writer};
use crate::Result;

/// Key under which PyTorch's `TCPStore` counts workers. Unlike other keys, it has no prefix.
const WORKERS: &[u8] = b"init/";

/// Client of a [`TcpStoreServer`](crate::TcpStoreServer) or of the server of a PyTorch
/// `TCPStore`, including versions before 2.1, which number their requests differently.
///
/// Each call has exclusive use of one connection while it runs, so a thread that waits for a key
/// does not block the thread that sets the key. Idle connections are kept and reused.
///
/// A PyTorch server before 2.1 does not support [`Store::append`](crate::Store::append). A
/// PyTorch server before 2.1, or one of any version with `use_libuv=False`, does not wake clients
/// that wait for a key that [`Store::compare_set`](crate::Store::compare_set) has created.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    timeout: Duration,
    options: StoreOptions,
    /// The greeting that the server answered on the first connection. Later connections use it too.
    greeting: OnceLock<Greeting>,
    idle: Mutex<Vec<TcpStream>>,
}

impl TcpStore {
    /// Connects to the server with the options of [`StoreOptions::from_env`], and retries until
    /// `timeout` has passed. `timeout` is also the time limit for the answer to each later request
    /// that does not wait for a key.
    ///
    /// # Errors
    /// [`crate::Error::Call`] when no server answers in time or the server and the client do not
    /// have the same secret, [`crate::Error::InvalidArgument`] when an environment variable has an
    /// invalid value.
    pub fn connect(host: impl Into<String>, port: u16, timeout: Duration) -> Result<Self> {
        Self::connect_with(host, port, timeout, StoreOptions::from_env()?)
    }

    /// Connects like [`TcpStore::connect`], with the given options.
    ///
    /// # Errors
    /// Same as [`TcpStore::connect`].
    pub fn connect_with(
        host: impl Into<String>,
        port: u16,
        timeout: Duration,
        options: StoreOptions,
    ) -> Result<Self> {
        let store = Self {
            host: host.into(),
            port,
            timeout,
            options,
            greeting: OnceLock::new(),
            idle: Mutex::default(),
        };
        let connection = store.open_until(Instant::now(), timeout)?;
        store.put_back(connection);
        Ok(store)
    }

    /// Counts this client as a worker of a PyTorch master: `TCPStore(host, port, world_size,
    /// is_master=True)` returns when `world_size` clients, including the master, have been counted.
    /// Every `TCPStore` that has a world size counts itself.
    /// [`TcpStoreServer`](crate::TcpStoreServer) does not wait for workers.
    ///
    /// # Errors
    /// [`crate::Error::Call`] when the store cannot be reached.
    pub fn join_as_worker(&self) -> Result<()> {
        let request = self.query(Query::Add).vector(WORKERS).i64(1).finish();
        let key = String::from_utf8_lossy(WORKERS);
        self.exchange("add", &key, |connection| {
            connection.write_all(&request)?;
            read_array::<8>(connection).map(drop)
        })
    }

    /// Returns the protocol that the server uses.
    pub fn protocol(&self) -> StoreProtocol {
        match self.dialect() {
            Dialect::Legacy => StoreProtocol::Legacy,
            Dialect::Current => StoreProtocol::Current,
        }
    }

    fn dialect(&self) -> Dialect {
        self.greeting
            .get()
            .map_or(Dialect::Current, |greeting| greeting.dialect())
    }

    fn query(&self, query: Query) -> Writer {
        Writer::to(self.dialect()).then(query)
    }
}
