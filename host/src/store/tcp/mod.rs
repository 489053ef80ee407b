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

/// The counter of workers of PyTorch's `TCPStore`, which has not the prefix of other keys.
const WORKERS: &[u8] = b"init/";

/// Client of a [`TcpStoreServer`](crate::store::TcpStoreServer), or of the server of PyTorch's
/// `TCPStore` (also the one before 2.1, which numbers its requests otherwise).
///
/// Each call uses a connection of its own while it runs, so that a thread which waits for a key
/// does not hold up the thread that sets it; idle connections are kept and used again.
///
/// A server of PyTorch before 2.1 has no [`Store::append`](crate::store::Store::append). It, and a
/// server of any version with `use_libuv=False`, does
/// not wake clients that wait for a key that
/// [`Store::compare_set`](crate::store::Store::compare_set) has made.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    timeout: Duration,
    options: StoreOptions,
    /// The first greeting that succeeded.
    greeting: OnceLock<Greeting>,
    idle: Mutex<Vec<TcpStream>>,
}

impl TcpStore {
    /// Connects to the server with [`StoreOptions::from_env`], trying again until `timeout` has
    /// passed. The same time bounds the answer to each later request that does not wait for a key.
    ///
    /// # Errors [`Error::Store`](crate::Error::Store) when no server answered in time or server and
    /// client have not the same secret, [`Error::Bootstrap`](crate::Error::Bootstrap) when a
    /// variable has a value that means nothing.
    pub fn connect(host: impl Into<String>, port: u16, timeout: Duration) -> Result<Self> {
        Self::connect_with(StoreOptions::from_env()?, host, port, timeout)
    }

    /// Connects like [`TcpStore::connect`], with the given options.
    ///
    /// # Errors
    /// As [`TcpStore::connect`].
    pub fn connect_with(
        options: StoreOptions,
        host: impl Into<String>,
        port: u16,
        timeout: Duration,
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

    /// Counts this client among the workers of a PyTorch master: `TCPStore(host, port, world_size,
    /// is_master=True)` returns when `world_size` clients, itself included, have been counted.
    /// Every `TCPStore` that has a world size counts itself. The server of this crate does not
    /// wait.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the store cannot be reached.
    pub fn join_as_worker(&self) -> Result<()> {
        let request = self.query(Query::Add).vector(WORKERS).i64(1).finish();
        let key = String::from_utf8_lossy(WORKERS);
        self.exchange("add", &key, |connection| {
            connection.write_all(&request)?;
            read_array::<8>(connection).map(drop)
        })
    }

    /// The protocol that the server speaks.
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
