//! The client of a TCP store.

use core::str::FromStr;
use core::time::Duration;
use std::io::{self, ErrorKind, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use super::Store;
use super::secret::StoreSecret;
use super::talk::{
    Greeting, authenticate, cancel_wait, describe, greet, is_hang_up, read_array, read_vector,
    stop_waiting, unexpected,
};
use super::wire::{self, Dialect, Query, Writer};
use crate::{Error, Result};

/// PyTorch's `TCPStore` puts this in front of every key; the same here, so that both see the same
/// keys.
const KEY_PREFIX: &str = "/";

/// Idle connections that are kept.
const MAX_IDLE: usize = 8;

/// Which protocol a TCP store server speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreProtocol {
    /// Found out at the first connection.
    #[default]
    Auto,
    /// That of PyTorch 2.1 and later, and of [`TcpStoreServer`](super::TcpStoreServer).
    Current,
    /// That of PyTorch before 2.1.
    Legacy,
}

impl FromStr for StoreProtocol {
    type Err = Error;

    /// Reads `auto`, `current` or `legacy`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "current" => Ok(Self::Current),
            "legacy" => Ok(Self::Legacy),
            _ => Err(Error::bootstrap(format!(
                "FUSEWIRE_STORE_PROTOCOL=\"{text}\" must be auto, current or legacy"
            ))),
        }
    }
}

/// How a client meets its server.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Which protocol the server speaks.
    pub protocol: StoreProtocol,
    /// The secret that the server wants, and has to have.
    pub secret: Option<StoreSecret>,
}

impl StoreOptions {
    /// The protocol in `FUSEWIRE_STORE_PROTOCOL` (`auto`, `current` or `legacy`) and the secret in
    /// `FUSEWIRE_STORE_SECRET`.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] when the protocol is none of these.
    pub fn from_env() -> Result<Self> {
        let protocol = match std::env::var("FUSEWIRE_STORE_PROTOCOL") {
            Ok(text) if !text.is_empty() => text.parse()?,
            _ => StoreProtocol::Auto,
        };
        let secret = StoreSecret::from_env();
        Ok(Self { protocol, secret })
    }

    /// These options with another protocol.
    #[must_use]
    pub fn with_protocol(mut self, protocol: StoreProtocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// These options with a secret.
    #[must_use]
    pub fn with_secret(mut self, secret: StoreSecret) -> Self {
        self.secret = Some(secret);
        self
    }
}

/// Client of a [`TcpStoreServer`](super::TcpStoreServer), or of the server of PyTorch's `TCPStore`
/// (also the one before 2.1, which numbers its requests otherwise).
///
/// Each call uses a connection of its own while it runs, so that a thread which waits for a key
/// does not hold up the thread that sets it; idle connections are kept and used again.
///
/// A server of PyTorch before 2.1 has no [`Store::append`], and does not tell those who wait about a
/// key that [`Store::compare_set`] has made.
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
    /// [`Error::Store`] when no server answered in time or server and client have not the same secret,
    /// [`Error::Bootstrap`] when a variable has a value that means nothing.
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
        store.give_back(connection);
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

    fn open_until(&self, start: Instant, timeout: Duration) -> Result<TcpStream> {
        let mut pause = Duration::from_millis(5);
        loop {
            let left = timeout
                .saturating_sub(start.elapsed())
                .max(Duration::from_millis(1));
            let error = match self.open(left) {
                Ok(connection) => return Ok(connection),
                Err(error) => error,
            };
            if error.kind() == ErrorKind::PermissionDenied {
                let address = format!("{}:{}", self.host, self.port);
                return Err(Error::store_io("connect", &address, error));
            }
            if start.elapsed() + pause >= timeout {
                let address = format!("{}:{}", self.host, self.port);
                return Err(Error::Store {
                    operation: "connect",
                    key: address,
                    detail: format!(
                        "no store server answered within {} s ({error}); is rank 0 running, and \
                         are MASTER_ADDR and MASTER_PORT the same on all ranks?",
                        timeout.as_secs_f64()
                    ),
                    source: Some(error.into()),
                });
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    /// One attempt: connects, and makes sure that a store server is at the other end.
    fn open(&self, timeout: Duration) -> io::Result<TcpStream> {
        let mut failure = io::Error::new(ErrorKind::NotFound, "the host name has no address");
        let greetings: &[Greeting] = match (self.greeting.get(), self.options.protocol) {
            (Some(known), _) => core::slice::from_ref(known),
            // Only a server of this crate knows secrets.
            _ if self.options.secret.is_some() => &[Greeting::Ping],
            (None, StoreProtocol::Auto) => &[Greeting::Ping, Greeting::Legacy, Greeting::Count],
            (None, StoreProtocol::Current) => &[Greeting::Ping, Greeting::Count],
            (None, StoreProtocol::Legacy) => &[Greeting::Legacy],
        };
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            for greeting in greetings {
                let mut connection = match TcpStream::connect_timeout(&address, timeout) {
                    Ok(connection) => connection,
                    Err(error) => {
                        failure = error;
                        break;
                    }
                };
                connection.set_nodelay(true)?;
                connection.set_read_timeout(Some(timeout))?;
                connection.set_write_timeout(Some(timeout))?;
                if let Some(secret) = &self.options.secret {
                    authenticate(&mut connection, secret)?;
                }
                match greet(&mut connection, *greeting) {
                    Ok(()) => {
                        connection.set_write_timeout(Some(self.io_timeout()))?;
                        // Another thread may have been first, with the same answer.
                        let _ = self.greeting.set(*greeting);
                        return Ok(connection);
                    }
                    // A server that does not know the greeting hangs up.
                    Err(error) if is_hang_up(&error) => failure = describe(error),
                    Err(error) => return Err(error),
                }
            }
        }
        Err(failure)
    }

    fn io_timeout(&self) -> Duration {
        // Zero is refused by the socket option.
        self.timeout.max(Duration::from_millis(1))
    }

    fn take(&self) -> Result<TcpStream> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        match idle {
            Some(connection) => Ok(connection),
            None => self.open_until(Instant::now(), self.timeout),
        }
    }

    fn give_back(&self, connection: TcpStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    /// Runs `talk` on a connection. A connection on which something failed is closed, because its
    /// next byte could belong to the failed request.
    fn exchange<R>(
        &self,
        operation: &'static str,
        key: &str,
        talk: impl FnOnce(&mut TcpStream) -> io::Result<R>,
    ) -> Result<R> {
        let mut connection = self.take()?;
        let answer = connection
            .set_read_timeout(Some(self.io_timeout()))
            .and_then(|()| talk(&mut connection))
            .map_err(|error| Error::store_io(operation, key, describe(error)))?;
        self.give_back(connection);
        Ok(answer)
    }

    /// Waits for keys on one connection, then runs `talk` on it.
    fn wait_then<R>(
        &self,
        operation: &'static str,
        keys: &[&str],
        timeout: Duration,
        talk: impl FnOnce(&mut TcpStream) -> io::Result<R>,
    ) -> Result<R> {
        let request = self.key_list(operation, Query::Wait, keys)?;
        let first = keys.first().copied().unwrap_or_default();
        let legacy = self.dialect() == Dialect::Legacy;
        let mut connection = self.take()?;
        let answer = (|| {
            connection.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
            connection.write_all(&request)?;
            let arrived = stop_waiting(&mut connection)?;
            connection.set_read_timeout(Some(self.io_timeout()))?;
            if arrived {
                return talk(&mut connection).map(Some);
            }
            if !legacy {
                cancel_wait(&mut connection)?;
            }
            Ok(None)
        })()
        .map_err(|error| Error::store_io(operation, first, describe(error)))?;
        // An old server cannot call a wait off, so its late answer must not meet another request.
        if !legacy || answer.is_some() {
            self.give_back(connection);
        }
        if let Some(answer) = answer {
            return Ok(answer);
        }
        let mut missing = first;
        for key in keys {
            if !self.check(&[key])? {
                missing = key;
                break;
            }
        }
        Err(Error::StoreTimeout {
            key: missing.to_owned(),
            seconds: timeout.as_secs_f64(),
        })
    }

    fn key_list(&self, operation: &'static str, query: Query, keys: &[&str]) -> Result<Vec<u8>> {
        limit_count(operation, keys.len())?;
        let mut request = self.query(query).u64(keys.len() as u64);
        for key in keys {
            request = request.vector(&checked(operation, key, &[])?);
        }
        Ok(request.finish())
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let wire_key = checked("set", key, value)?;
        // SET has no answer. The CHECK behind it has one, and so tells that the value has arrived.
        let request = self
            .query(Query::Set)
            .vector(&wire_key)
            .vector(value)
            .then(Query::Check)
            .u64(1)
            .vector(&wire_key)
            .finish();
        self.exchange("set", key, |connection| {
            connection.write_all(&request)?;
            read_array::<1>(connection).map(drop)
        })
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let request = self
            .query(Query::Get)
            .vector(&checked("get", key, &[])?)
            .finish();
        self.wait_then("get", &[key], timeout, |connection| {
            connection.write_all(&request)?;
            read_vector(connection)
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        self.wait_then("wait", keys, timeout, |_| Ok(()))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let request = self
            .query(Query::Add)
            .vector(&checked("add", key, &[])?)
            .i64(amount)
            .finish();
        self.exchange("add", key, |connection| {
            connection.write_all(&request)?;
            read_array(connection).map(i64::from_ne_bytes)
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        checked("compare_set", key, expected)?;
        let request = self
            .query(Query::CompareSet)
            .vector(&checked("compare_set", key, desired)?)
            .vector(expected)
            .vector(desired)
            .finish();
        self.exchange("compare_set", key, |connection| {
            connection.write_all(&request)?;
            read_vector(connection)
        })
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let Some(first) = keys.first() else {
            return Ok(true);
        };
        let request = self.key_list("check", Query::Check, keys)?;
        self.exchange("check", first, |connection| {
            connection.write_all(&request)?;
            match read_array(connection)? {
                [wire::CHECK_READY] => Ok(true),
                [wire::CHECK_NOT_READY] => Ok(false),
                [other] => Err(unexpected(&format!("{other} in answer to a check"))),
            }
        })
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let request = self
            .query(Query::DeleteKey)
            .vector(&checked("delete", key, &[])?)
            .finish();
        self.exchange("delete", key, |connection| {
            connection.write_all(&request)?;
            read_array(connection).map(|count| i64::from_ne_bytes(count) == 1)
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        if self.dialect() == Dialect::Legacy {
            return Err(Error::store(
                "append",
                key,
                "the server speaks the protocol of PyTorch before 2.1, which has no append",
            ));
        }
        let wire_key = checked("append", key, value)?;
        let request = self
            .query(Query::Append)
            .vector(&wire_key)
            .vector(value)
            .then(Query::Check)
            .u64(1)
            .vector(&wire_key)
            .finish();
        self.exchange("append", key, |connection| {
            connection.write_all(&request)?;
            read_array::<1>(connection).map(drop)
        })
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let request = match self.dialect() {
            Dialect::Current => self.key_list("multi_get", Query::MultiGet, keys)?,
            Dialect::Legacy => {
                let mut requests = Writer::to(Dialect::Legacy);
                for key in keys {
                    let key = checked("multi_get", key, &[])?;
                    requests = requests.then(Query::Get).vector(&key);
                }
                requests.finish()
            }
        };
        self.wait_then("multi_get", keys, timeout, |connection| {
            connection.write_all(&request)?;
            // Through a buffer: thousands of small values are not as many system calls.
            let mut answers = io::BufReader::with_capacity(64 << 10, connection);
            keys.iter().map(|_| read_vector(&mut answers)).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let Some((last, _)) = pairs.last() else {
            return Ok(());
        };
        limit_count("multi_set", pairs.len())?;
        let legacy = self.dialect() == Dialect::Legacy;
        let mut request = Writer::to(self.dialect());
        if !legacy {
            request = request.then(Query::MultiSet).u64(pairs.len() as u64);
        }
        for (key, value) in pairs {
            if legacy {
                request = request.then(Query::Set);
            }
            request = request
                .vector(&checked("multi_set", key, value)?)
                .vector(value);
        }
        let request = request
            .then(Query::Check)
            .u64(1)
            .vector(&checked("multi_set", last, &[])?)
            .finish();
        self.exchange("multi_set", last, |connection| {
            connection.write_all(&request)?;
            read_array::<1>(connection).map(drop)
        })
    }

    fn num_keys(&self) -> Result<u64> {
        let request = self.query(Query::KeyCount).finish();
        self.exchange("num_keys", "", |connection| {
            connection.write_all(&request)?;
            read_array(connection).map(u64::from_ne_bytes)
        })
    }
}

/// The key as it goes over the wire, once key and value are known to be within the limits.
fn checked(operation: &'static str, key: &str, value: &[u8]) -> Result<Vec<u8>> {
    let wire_key = format!("{KEY_PREFIX}{key}").into_bytes();
    if wire_key.len() as u64 > wire::MAX_KEY_BYTES || value.len() as u64 > wire::MAX_VALUE_BYTES {
        return Err(Error::InvalidArgument {
            operation,
            detail: format!(
                "key of {} bytes and value of {} bytes; the limits are {} and {}",
                wire_key.len(),
                value.len(),
                wire::MAX_KEY_BYTES,
                wire::MAX_VALUE_BYTES
            ),
        });
    }
    Ok(wire_key)
}

fn limit_count(operation: &'static str, count: usize) -> Result<()> {
    if count as u64 > wire::MAX_KEYS {
        return Err(Error::InvalidArgument {
            operation,
            detail: format!("{count} keys; the limit is {}", wire::MAX_KEYS),
        });
    }
    Ok(())
}
