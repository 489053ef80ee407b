//! The client of a TCP store.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use super::Store;
use super::wire::{self, Query, Writer};
use crate::{Error, Result};

/// PyTorch's `TCPStore` puts this in front of every key; the same here, so that both see the same
/// keys.
const KEY_PREFIX: &str = "/";

/// Idle connections that are kept.
const MAX_IDLE: usize = 8;

/// Client of a [`TcpStoreServer`](super::TcpStoreServer), or of the server of PyTorch's `TCPStore`
/// (2.4 and later, which know `PING`).
///
/// Each call uses a connection of its own while it runs, so that a thread which waits for a key
/// does not hold up the thread that sets it; idle connections are kept and used again.
#[derive(Debug)]
pub struct TcpStore {
    host: String,
    port: u16,
    timeout: Duration,
    idle: Mutex<Vec<TcpStream>>,
}

impl TcpStore {
    /// Connects to the server, trying again until `timeout` has passed. The same time bounds the
    /// answer to each later request that does not wait for a key.
    ///
    /// # Errors
    /// [`Error::Store`] when no server answered in time.
    pub fn connect(host: impl Into<String>, port: u16, timeout: Duration) -> Result<Self> {
        let store = Self {
            host: host.into(),
            port,
            timeout,
            idle: Mutex::default(),
        };
        let connection = store.open_until(Instant::now(), timeout)?;
        store.give_back(connection);
        Ok(store)
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
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, timeout) {
                Ok(mut connection) => {
                    connection.set_nodelay(true)?;
                    connection.set_read_timeout(Some(timeout))?;
                    connection.set_write_timeout(Some(timeout))?;
                    validate(&mut connection)?;
                    connection.set_write_timeout(Some(self.io_timeout()))?;
                    return Ok(connection);
                }
                Err(error) => failure = error,
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
        let request = key_list(operation, Query::Wait, keys)?;
        let first = keys.first().copied().unwrap_or_default();
        let answer = self.exchange(operation, first, |connection| {
            connection.write_all(&request)?;
            connection.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
            let arrived = stop_waiting(connection);
            connection.set_read_timeout(Some(self.io_timeout()))?;
            if arrived? {
                talk(connection).map(Some)
            } else {
                cancel_wait(connection).map(|()| None)
            }
        })?;
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
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let wire_key = checked("set", key, value)?;
        // SET has no answer. The CHECK behind it has one, and so tells that the value has arrived.
        let request = Writer::query(Query::Set)
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
        let request = Writer::query(Query::Get)
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
        let request = Writer::query(Query::Add)
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
        let request = Writer::query(Query::CompareSet)
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
        let request = key_list("check", Query::Check, keys)?;
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
        let request = Writer::query(Query::DeleteKey)
            .vector(&checked("delete", key, &[])?)
            .finish();
        self.exchange("delete", key, |connection| {
            connection.write_all(&request)?;
            read_array(connection).map(|count| i64::from_ne_bytes(count) == 1)
        })
    }
}

/// Tells the server that this is a store client, and makes sure that it is a store server.
fn validate(connection: &mut TcpStream) -> io::Result<()> {
    static NONCE: AtomicU32 = AtomicU32::new(0x5157_0001);
    let nonce = NONCE.fetch_add(1, Ordering::Relaxed);
    let request = Writer::query(Query::Validate)
        .u32(wire::VALIDATION_MAGIC)
        .then(Query::Ping)
        .u32(nonce)
        .finish();
    connection.write_all(&request)?;
    if read_array(connection).map(u32::from_ne_bytes)? != nonce {
        return Err(unexpected("another number in answer to a ping"));
    }
    Ok(())
}

/// Waits for the end of a wait; `false` when the read timeout of the socket came first.
fn stop_waiting(connection: &mut TcpStream) -> io::Result<bool> {
    match read_array(connection) {
        Ok([wire::STOP_WAITING]) => Ok(true),
        Ok([other]) => Err(unexpected(&format!("{other} in answer to a wait"))),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Calls a wait off. The end of the wait may have crossed the cancellation; it is read and dropped.
fn cancel_wait(connection: &mut TcpStream) -> io::Result<()> {
    connection.write_all(&Writer::query(Query::CancelWait).finish())?;
    let mut answer = read_array(connection)?;
    if answer == [wire::STOP_WAITING] {
        answer = read_array(connection)?;
    }
    if answer != [wire::WAIT_CANCELED] {
        return Err(unexpected(&format!(
            "{} in answer to a cancelled wait",
            answer[0]
        )));
    }
    Ok(())
}

fn read_array<const N: usize>(connection: &mut TcpStream) -> io::Result<[u8; N]> {
    let mut array = [0; N];
    connection.read_exact(&mut array)?;
    Ok(array)
}

fn read_vector(connection: &mut TcpStream) -> io::Result<Vec<u8>> {
    let len = read_array(connection).map(u64::from_ne_bytes)?;
    if len > wire::MAX_VALUE_BYTES {
        return Err(unexpected(&format!("a value of {len} bytes")));
    }
    let mut value = Vec::new();
    // Memory grows with what arrives, not with what the length claims.
    connection.take(len).read_to_end(&mut value)?;
    if value.len() as u64 != len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(value)
}

fn unexpected(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the server sent {what}"))
}

/// Makes the two commonest failures say what they mean here.
fn describe(error: io::Error) -> io::Error {
    let meaning = match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "the server did not answer in time",
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            "the server closed the connection: it has stopped, or it refused the request"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), meaning)
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

fn key_list(operation: &'static str, query: Query, keys: &[&str]) -> Result<Vec<u8>> {
    if keys.len() as u64 > wire::MAX_KEYS {
        return Err(Error::InvalidArgument {
            operation,
            detail: format!("{} keys; the limit is {}", keys.len(), wire::MAX_KEYS),
        });
    }
    let mut request = Writer::query(query).u64(keys.len() as u64);
    for key in keys {
        request = request.vector(&checked(operation, key, &[])?);
    }
    Ok(request.finish())
}
