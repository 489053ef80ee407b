//! Sends each call of [`Store`] as requests over a connection.

use core::time::Duration;
use std::io::{self, Write};
use std::net::TcpStream;

use super::TcpStore;
use crate::Store;
use crate::client_connection::{
    cancel_wait, describe, read_array, read_vector, stop_waiting, unexpected,
};
use crate::wire::{self, Dialect, Query, Writer};
use crate::{Error, Result};

/// Prefix of every key on the wire. PyTorch's `TCPStore` uses the same prefix, so PyTorch clients
/// and clients of this crate see the same keys.
const KEY_PREFIX: &str = "/";

impl TcpStore {
    /// Waits for `keys` on a connection, then runs `talk` on the same connection.
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
        .map_err(|error| Error::io(operation, first, describe(error)))?;
        // A legacy server cannot cancel a wait. Its late answer could be mistaken for the answer to
        // the next request, so this connection is not reused.
        if !legacy || answer.is_some() {
            self.put_back(connection);
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
        Err(Error::Timeout {
            key: missing.to_owned(),
            seconds: timeout.as_secs_f64(),
        })
    }

    /// Begins a request that does not exist in the protocol before PyTorch 2.1, or fails if the
    /// server uses that protocol.
    fn current_only(&self, operation: &'static str, key: &str, query: Query) -> Result<Writer> {
        if self.dialect() == Dialect::Legacy {
            return Err(Error::call(
                operation,
                key,
                "the server speaks the protocol of PyTorch before 2.1, which has no such request",
            ));
        }
        Ok(self.query(query))
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
        // SET has no answer, so a CHECK follows. The answer to CHECK confirms that the value has
        // arrived.
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
            return Err(Error::call(
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
            // Buffer the reads, because otherwise each of possibly thousands of small values needs
            // its own system calls.
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

    fn list_keys(&self) -> Result<Vec<String>> {
        let request = self
            .current_only("list_keys", "", Query::ListKeys)?
            .finish();
        let keys = self.exchange("list_keys", "", |connection| {
            connection.write_all(&request)?;
            let count = read_array(connection).map(u64::from_ne_bytes)?;
            let mut answers = io::BufReader::with_capacity(64 << 10, connection);
            (0..count)
                .map(|_| read_vector(&mut answers))
                .collect::<io::Result<Vec<_>>>()
        })?;
        // The list also contains keys of the server ("init/"), which do not begin with the prefix.
        let text = |key| {
            String::from_utf8(key)
                .ok()?
                .strip_prefix(KEY_PREFIX)
                .map(str::to_owned)
        };
        let mut keys: Vec<_> = keys.into_iter().filter_map(text).collect();
        keys.sort_unstable();
        Ok(keys)
    }

    fn barrier(&self, key: &str, size: u32, timeout: Duration) -> Result<()> {
        let request = self
            .current_only("barrier", key, Query::Barrier)?
            .vector(&checked("barrier", key, &[])?)
            .i64(i64::from(size))
            .finish();
        let mut connection = self.take()?;
        let passed = (|| {
            connection.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
            connection.write_all(&request)?;
            let passed = stop_waiting(&mut connection)?;
            connection.set_read_timeout(Some(self.io_timeout()))?;
            if !passed {
                cancel_wait(&mut connection)?;
            }
            Ok(passed)
        })()
        .map_err(|error| Error::io("barrier", key, describe(error)))?;
        self.put_back(connection);
        if passed {
            return Ok(());
        }
        Err(Error::Timeout {
            key: key.to_owned(),
            seconds: timeout.as_secs_f64(),
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

/// Returns the key with its wire prefix. Fails if the key or the value exceeds its limit.
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
