//! How ranks meet and part.

use core::time::Duration;
use std::sync::Arc;
use std::thread;

use super::Communicator;
use crate::device::Device;
use crate::options::Options;
use crate::store::{Store, TcpStore, TcpStoreServer};
use crate::{Error, Result};

const TIMEOUT: Duration = Duration::from_secs(10);

/// A store that lets others go ahead before it waits.
#[derive(Debug)]
struct Late(TcpStore);

impl Store for Late {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.0.get(key, timeout)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        thread::sleep(Duration::from_millis(300));
        self.0.wait(keys, timeout)
    }
    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.0.add(key, amount)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.0.compare_set(key, expected, desired)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.0.check(keys)
    }
    fn delete(&self, key: &str) -> Result<bool> {
        self.0.delete(key)
    }
}

fn join(rank: u32, store: Arc<dyn Store>) -> Result<()> {
    let options = Options {
        timeout: TIMEOUT,
        ..Options::default()
    };
    Communicator::new(Device::Cpu, rank, 3, store, "meeting", options).map(drop)
}

#[test]
fn a_rank_that_hosts_the_store_leaves_last() -> Result<()> {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    let port = server.port();
    let client = move || TcpStore::connect("127.0.0.1", port, TIMEOUT);
    let late: Vec<_> = (1..3)
        .map(|rank| thread::spawn(move || join(rank, Arc::new(Late(client()?)))))
        .collect();
    // Rank 0 comes last, so that it need not wait for the others.
    thread::sleep(Duration::from_millis(200));
    join(0, Arc::new(client()?))?;
    drop(server);
    for rank in late {
        rank.join().map_err(|_| Error::Communicator {
            name: "meeting".to_owned(),
            detail: "a rank panicked".to_owned(),
        })??;
    }
    Ok(())
}

#[test]
fn options_that_overflow_the_layout_are_refused() {
    let store = || Arc::new(crate::store::MemoryStore::new());
    let options = Options::default;
    for options in [
        Options {
            staging_bytes: 1 << 63,
            ..options()
        },
        Options {
            packet_slot_bytes: 1 << 62,
            ..options()
        },
        Options {
            channel_slot_bytes: 1 << 62,
            ..options()
        },
        Options {
            channel_depth: 1 << 60,
            ..options()
        },
    ] {
        let error = Communicator::new(Device::Cpu, 0, 1, store(), "large", options)
            .expect_err("more than an address space");
        assert!(error.to_string().contains("at most"), "{error}");
    }
}
