//! Rank, size and store from the environment.

use core::time::Duration;
use std::sync::Arc;

use crate::Result;
use crate::bootstrap::{RankSize, store_from_env};
use crate::comm::Communicator;
use crate::device::Device;
use crate::options::Options;
use crate::store::{self, Store};

impl Communicator {
    /// Joins the communicator `"world"` as the rank that the environment names (`fusewire run`,
    /// `torchrun`, `mpirun`), over the store at `MASTER_ADDR:MASTER_PORT`.
    ///
    /// # Errors
    /// [`Error::Bootstrap`](crate::Error::Bootstrap) if the environment names no rank or store; and
    /// the errors of [`Communicator::new`].
    pub fn from_env(device: Device, options: Options) -> Result<Self> {
        let RankSize { rank, size, .. } = RankSize::from_env()?;
        let store = store_of_environment(rank, size, options.rendezvous_timeout())?;
        Self::new(device, rank, size, store, "world", options)
    }
}

/// Returns the store that the environment names. Rank 0 serves it, unless a launcher does.
pub(in crate::comm) fn store_of_environment(
    rank: u32,
    size: u32,
    timeout: Duration,
) -> Result<Arc<dyn Store>> {
    let hosted = store_from_env(rank, size, timeout)?;
    Ok(Arc::new(EnvStore {
        store: hosted.store(),
        _hosted: hosted,
    }))
}

/// A store together with the server that rank 0 may host for it.
#[derive(Debug)]
struct EnvStore {
    store: Arc<dyn Store>,
    _hosted: crate::bootstrap::BootstrapStore,
}

impl Store for EnvStore {
    fn set(&self, key: &str, value: &[u8]) -> store::Result<()> {
        self.store.set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> store::Result<Vec<u8>> {
        self.store.get(key, timeout)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> store::Result<()> {
        self.store.wait(keys, timeout)
    }
    fn add(&self, key: &str, amount: i64) -> store::Result<i64> {
        self.store.add(key, amount)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> store::Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }
    fn check(&self, keys: &[&str]) -> store::Result<bool> {
        self.store.check(keys)
    }
    fn delete(&self, key: &str) -> store::Result<bool> {
        self.store.delete(key)
    }
    fn append(&self, key: &str, value: &[u8]) -> store::Result<()> {
        self.store.append(key, value)
    }
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> store::Result<Vec<Vec<u8>>> {
        self.store.multi_get(keys, timeout)
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> store::Result<()> {
        self.store.multi_set(pairs)
    }
    fn num_keys(&self) -> store::Result<u64> {
        self.store.num_keys()
    }
    fn list_keys(&self) -> store::Result<Vec<String>> {
        self.store.list_keys()
    }
    fn barrier(&self, key: &str, size: u32, timeout: Duration) -> store::Result<()> {
        self.store.barrier(key, size, timeout)
    }
}
