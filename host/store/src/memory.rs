//! A store in the memory of one process.

use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Store;
use super::table::Table;
use crate::{Error, Result};

/// A store for ranks that are threads of one process. Clones share the content.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    changed: Condvar,
}

impl MemoryStore {
    /// Returns an empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // A table is valid after every statement, so it stays usable if a thread panics with the
        // lock held.
        self.shared
            .table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all of `keys` exist. Returns the table, still locked.
    fn wait_locked(&self, keys: &[&str], timeout: Duration) -> Result<MutexGuard<'_, Table>> {
        let start = Instant::now();
        let mut table = self.table();
        loop {
            let Some(missing) = keys.iter().find(|key| !table.contains(key.as_bytes())) else {
                return Ok(table);
            };
            let Some(left) = timeout
                .checked_sub(start.elapsed())
                .filter(|left| !left.is_zero())
            else {
                return Err(Error::Timeout {
                    key: (*missing).to_owned(),
                    seconds: timeout.as_secs_f64(),
                });
            };
            table = self
                .shared
                .changed
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.table().set(key.as_bytes(), value);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let table = self.wait_locked(&[key], timeout)?;
        // `wait_locked` found the key, and the table has been locked ever since.
        Ok(table.get(key.as_bytes()).unwrap_or_default().to_vec())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_locked(keys, timeout).map(drop)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let sum = self.table().add(key.as_bytes(), amount);
        self.shared.changed.notify_all();
        sum.map_err(|detail| Error::call("add", key, detail))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let (answer, stored) = self.table().compare_set(key.as_bytes(), expected, desired);
        if stored {
            self.shared.changed.notify_all();
        }
        Ok(answer)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let table = self.table();
        Ok(keys.iter().all(|key| table.contains(key.as_bytes())))
    }

    fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.table().delete(key.as_bytes()))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.table().append(key.as_bytes(), value);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let table = self.wait_locked(keys, timeout)?;
        let value = |key: &&str| table.get(key.as_bytes()).unwrap_or_default().to_vec();
        Ok(keys.iter().map(value).collect())
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let mut table = self.table();
        for (key, value) in pairs {
            table.set(key.as_bytes(), value);
        }
        drop(table);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn num_keys(&self) -> Result<u64> {
        Ok(self.table().len() as u64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Ok(self.table().text_keys())
    }
}
