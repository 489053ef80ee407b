//! Key-value stores: how ranks find each other.
//!
//! A [`Store`] holds small values under keys and lets a rank wait for a key of another rank. Its
//! semantics are those of PyTorch's `c10d::Store`, so that a store of ours and a `TCPStore` of
//! `torch.distributed` can stand in for each other: counters are kept as decimal text, and
//! [`Store::compare_set`] on an absent key answers as PyTorch does.

mod client_connection;
mod file;
mod memory;
mod prefix;
mod secret;
mod server;
mod session;
mod table;
mod tcp;
mod wire;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

use core::fmt;
use core::time::Duration;

pub(crate) use client_connection::is_hang_up;
pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use secret::StoreSecret;
pub use server::{StoreTraffic, TcpStoreServer};
pub use tcp::{StoreOptions, StoreProtocol, TcpStore};

use crate::Result;

/// A key-value store that several ranks share.
///
/// Every call may be made from several threads at once; a call that waits holds up no other call,
/// so ranks that are threads of one process may share one value.
pub trait Store: Send + Sync + fmt::Debug {
    /// Stores `value` under `key`, in place of what was there. Once this returns, every other call
    /// of every rank sees the value.
    ///
    /// # Errors [`Error::Store`](crate::Error::Store) when the store cannot be reached or the value
    /// is too large.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists, then returns its value.
    ///
    /// # Errors
    /// [`Error::StoreTimeout`](crate::Error::StoreTimeout) when the key does not appear within
    /// `timeout`, [`Error::Store`](crate::Error::Store) when the store cannot be reached.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Waits until every one of `keys` exists.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Adds `amount` to the counter at `key` and returns the sum. An absent counter is 0. The
    /// value is kept as decimal text.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the value at `key` is no number, when the sum
    /// overflows, or when the store cannot be reached.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Stores `desired` if the value at `key` is `expected`, or if the key is absent and
    /// `expected` is empty. Returns the value that is there afterwards; for an absent key and an
    /// `expected` that is not empty, returns `expected` and stores nothing (as PyTorch does).
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the store cannot be reached.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Returns true if all of `keys` exist.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the store cannot be reached.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key`; returns whether it was there.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the store cannot be reached.
    fn delete(&self, key: &str) -> Result<bool>;

    /// Adds `value` to the end of the value at `key`; an absent key is empty.
    ///
    /// # Errors [`Error::Store`](crate::Error::Store) when the store has no append (a server of
    /// PyTorch before 2.1 has none), when the value becomes too large, or when the store cannot be
    /// reached.
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let _ = value;
        Err(crate::Error::store(
            "append",
            key,
            "this store has no append",
        ))
    }

    /// Waits until all of `keys` exist, then returns their values, in the order of `keys`.
    ///
    /// # Errors
    /// As [`Store::get`].
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, timeout)?;
        keys.iter().map(|key| self.get(key, timeout)).collect()
    }

    /// Stores every value under its key.
    ///
    /// # Errors
    /// As [`Store::set`]; some of the values may then have been stored.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs
            .iter()
            .try_for_each(|(key, value)| self.set(key, value))
    }

    /// Returns the number of keys, also of those outside of a prefix. A server of PyTorch counts
    /// one key of its own for each `TCPStore` that was given a world size.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the store cannot count, or cannot be reached.
    fn num_keys(&self) -> Result<u64> {
        Err(crate::Error::store(
            "num_keys",
            "",
            "this store does not count its keys",
        ))
    }

    /// Returns all keys that are valid UTF-8, sorted; those outside of a prefix are left out.
    ///
    /// # Errors
    /// [`Error::Store`](crate::Error::Store) when the store cannot list its keys (a server of
    /// PyTorch before 2.15 closes the connection), or cannot be reached.
    fn list_keys(&self) -> Result<Vec<String>> {
        Err(crate::Error::store(
            "list_keys",
            "",
            "this store does not list its keys",
        ))
    }

    /// Blocks until `size` callers have entered the barrier at `key`. A key serves one barrier: it
    /// counts the callers, and is not reset.
    ///
    /// # Errors
    /// [`Error::StoreTimeout`](crate::Error::StoreTimeout) when the others do not enter within
    /// `timeout`, [`Error::Store`](crate::Error::Store) when the store cannot be reached, or its
    /// server has no barrier (PyTorch before 2.15 closes the connection).
    fn barrier(&self, key: &str, size: u32, timeout: Duration) -> Result<()> {
        let all = format!("{key}/all");
        if self.add(key, 1)? >= i64::from(size) {
            return self.set(&all, b"1");
        }
        self.wait(&[&all], timeout)
    }
}
