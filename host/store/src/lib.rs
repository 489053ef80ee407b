//! Key-value stores, through which ranks find each other.
//!
//! A [`Store`] holds small values under keys and lets a rank wait for a key that another rank sets.
//! It has the semantics of PyTorch's `c10d::Store`, so a store of this crate can replace a
//! `TCPStore` of `torch.distributed` and vice versa: counters are kept as decimal text, and
//! [`Store::compare_set`] on an absent key returns the same value as in PyTorch.

mod client_connection;
mod error;
mod file;
mod memory;
#[doc(hidden)]
pub mod notice;
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

pub use error::{Error, Result};
pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use secret::StoreSecret;
pub use server::{StoreTraffic, TcpStoreServer};
pub use tcp::{StoreOptions, StoreProtocol, TcpStore};

/// A key-value store that several ranks share.
///
/// Several threads may call a store at the same time. A call that waits does not block calls of
/// other threads, so ranks that are threads of one process may share one store.
pub trait Store: Send + Sync + fmt::Debug {
    /// Stores `value` under `key` and replaces any previous value. Once this call has returned,
    /// every later call of every rank sees the new value.
    ///
    /// # Errors
    /// [`Error::Call`] when the store cannot be reached or the value is too
    /// large.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists, then returns its value.
    ///
    /// # Errors
    /// [`Error::Timeout`] when the key does not appear within
    /// `timeout`, [`Error::Call`] when the store cannot be reached.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Waits until every one of `keys` exists.
    ///
    /// # Errors
    /// Same as [`Store::get`].
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Adds `amount` to the counter at `key` and returns the new count. An absent counter counts as
    /// 0. The store keeps the count as decimal text.
    ///
    /// # Errors
    /// [`Error::Call`] when the value at `key` is not a decimal number, when
    /// the new count overflows, or when the store cannot be reached.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Stores `desired` if the value at `key` is `expected`, or if the key is absent and `expected`
    /// is empty. Returns the value at `key` after the call. If the key is absent and `expected` is
    /// not empty, stores nothing and returns `expected` (as PyTorch does).
    ///
    /// # Errors
    /// [`Error::Call`] when the store cannot be reached.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Returns true if all of `keys` exist.
    ///
    /// # Errors
    /// [`Error::Call`] when the store cannot be reached.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key`. Returns true if the key existed.
    ///
    /// # Errors
    /// [`Error::Call`] when the store cannot be reached.
    fn delete(&self, key: &str) -> Result<bool>;

    /// Appends `value` to the value at `key`. An absent key counts as an empty value.
    ///
    /// # Errors
    /// [`Error::Call`] when the store does not support appending (a server of
    /// PyTorch before 2.1 does not), when the value becomes too large, or when the store cannot be
    /// reached.
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let _ = value;
        Err(crate::Error::call(
            "append",
            key,
            "this store has no append",
        ))
    }

    /// Waits until all of `keys` exist, then returns their values, in the order of `keys`.
    ///
    /// # Errors
    /// Same as [`Store::get`].
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, timeout)?;
        keys.iter().map(|key| self.get(key, timeout)).collect()
    }

    /// Stores every value under its key.
    ///
    /// # Errors
    /// Same as [`Store::set`]. After an error, some of the values may have been stored.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs
            .iter()
            .try_for_each(|(key, value)| self.set(key, value))
    }

    /// Returns the number of keys of the whole store, including those outside the prefix of a
    /// [`PrefixStore`]. With a PyTorch server, the number includes the key `init/`, in which
    /// `TCPStore` clients that were given a world size count themselves.
    ///
    /// # Errors
    /// [`Error::Call`] when the store cannot count, or cannot be reached.
    fn num_keys(&self) -> Result<u64> {
        Err(crate::Error::call(
            "num_keys",
            "",
            "this store does not count its keys",
        ))
    }

    /// Returns all keys that are valid UTF-8, sorted. A [`PrefixStore`] returns only the keys under
    /// its prefix.
    ///
    /// # Errors
    /// [`Error::Call`] when the store cannot list its keys (a PyTorch server
    /// before 2.15 then closes the connection), or cannot be reached.
    fn list_keys(&self) -> Result<Vec<String>> {
        Err(crate::Error::call(
            "list_keys",
            "",
            "this store does not list its keys",
        ))
    }

    /// Blocks until `size` callers have entered the barrier at `key`. The value at `key` counts the
    /// callers and is never reset, so each barrier needs a new key.
    ///
    /// # Errors
    /// [`Error::Timeout`] when fewer than `size` callers enter
    /// within `timeout`, [`Error::Call`] when the store cannot be reached, or
    /// when its server does not support barriers (a PyTorch server before 2.15 then closes the
    /// connection).
    fn barrier(&self, key: &str, size: u32, timeout: Duration) -> Result<()> {
        let all = format!("{key}/all");
        if self.add(key, 1)? >= i64::from(size) {
            return self.set(&all, b"1");
        }
        self.wait(&[&all], timeout)
    }
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
