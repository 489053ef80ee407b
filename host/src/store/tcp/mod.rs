//! The client of a TCP store.

mod connections;
mod options;
mod requests;

use core::time::Duration;
use std::net::TcpStream;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

pub use self::options::{StoreOptions, StoreProtocol};
use super::talk::Greeting;
use super::wire::{Dialect, Query, Writer};
use crate::Result;

/// Client of a [`TcpStoreServer`](crate::store::TcpStoreServer), or of the server of PyTorch's `TCPStore`
/// (also the one before 2.1, which numbers its requests otherwise).
///
/// Each call uses a connection of its own while it runs, so that a thread which waits for a key
/// does not hold up the thread that sets it; idle connections are kept and used again.
///
/// A server of PyTorch before 2.1 has no [`Store::append`](crate::store::Store::append), and does
/// not wake clients that wait for a key that
/// [`Store::compare_set`](crate::store::Store::compare_set) has made.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    timeout: Duration,
    options: StoreOptions,
    /// How the server was greeted the first time, with success.
    greeting: OnceLock<Greeting>,
    idle: Mutex<Vec<TcpStream>>,
}

impl TcpStore {
    /// Connects to the server with [`StoreOptions::from_env`], trying again until `timeout` has passed.
    /// The same time bounds the answer to each later request that does not wait for a key.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when no server answered in time or server and client have not the same
    /// secret,
    /// [`Error::Bootstrap`](crate::Error::Bootstrap) when a variable has a value that means nothing.
    pub fn connect(host: impl Into<String>, port: u16, timeout: Duration) -> Result<Self> {
        Self::connect_with(StoreOptions::from_env()?, host, port, timeout)
    }

    /// As [`TcpStore::connect`], with options of the caller's.
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
