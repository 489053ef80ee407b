//! A view of a store that adds a prefix to every key.

use core::time::Duration;
use std::sync::Arc;

use super::Store;
use crate::Result;

/// A view of another store that puts `prefix/` before every key, like PyTorch's `PrefixStore`.
/// Communicators that share one store each use their own prefix.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// Returns a view of the keys of `inner` that begin with `prefix/`.
    pub fn new(prefix: impl Into<String>, inner: Arc<dyn Store>) -> Self {
        Self {
            prefix: prefix.into(),
            inner,
        }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn with_keys<R>(&self, keys: &[&str], call: impl FnOnce(&[&str]) -> Result<R>) -> Result<R> {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        call(&keys)
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.get(&self.key(key), timeout)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.with_keys(keys, |keys| self.inner.wait(keys, timeout))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.inner.add(&self.key(key), amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.inner.compare_set(&self.key(key), expected, desired)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.with_keys(keys, |keys| self.inner.check(keys))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.inner.delete(&self.key(key))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.append(&self.key(key), value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.with_keys(keys, |keys| self.inner.multi_get(keys, timeout))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let pairs: Vec<_> = pairs
            .iter()
            .map(|(key, value)| (self.key(key), *value))
            .collect();
        let pairs: Vec<_> = pairs
            .iter()
            .map(|(key, value)| (key.as_str(), *value))
            .collect();
        self.inner.multi_set(&pairs)
    }

    fn num_keys(&self) -> Result<u64> {
        self.inner.num_keys()
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let prefix = self.key("");
        let mut keys = self.inner.list_keys()?;
        keys.retain(|key| key.starts_with(&prefix));
        for key in &mut keys {
            key.drain(..prefix.len());
        }
        Ok(keys)
    }

    fn barrier(&self, key: &str, size: u32, timeout: Duration) -> Result<()> {
        self.inner.barrier(&self.key(key), size, timeout)
    }
}
