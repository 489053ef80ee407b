//! Shared test support: a rendezvous in a folder, ranks as threads, and contents of test buffers.
#![allow(dead_code)] // each test binary uses a part of it

use core::time::Duration;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fusewire_gloo_sys::{Context, Error, Rendezvous, TcpOptions};

/// Timeout that a passing test does not reach, even on a slow machine.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Rendezvous between threads or processes, with one file per key.
#[derive(Clone)]
pub(crate) struct Folder(pub(crate) PathBuf);

impl Rendezvous for Folder {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let part = self.0.join(format!(".{key}.part"));
        fs::write(&part, value).map_err(|error| error.to_string())?;
        fs::rename(part, self.0.join(key)).map_err(|error| error.to_string())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, String> {
        fs::read(self.0.join(key)).map_err(|error| error.to_string())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), String> {
        let start = Instant::now();
        loop {
            let missing: Vec<_> = keys
                .iter()
                .filter(|key| !self.0.join(key).exists())
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            if start.elapsed() >= timeout {
                return Err(format!("missing {missing:?}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

pub(crate) fn connect(
    rank: usize,
    size: usize,
    timeout: Duration,
    folder: &Path,
) -> Result<Context, Error> {
    let store = Box::new(Folder(folder.to_owned()));
    Context::new(rank, size, timeout, &TcpOptions::loopback(), store)
}

/// Runs `body` on `size` connected ranks, each a thread, and returns their results.
pub(crate) fn with_threads<T: Send>(
    size: usize,
    timeout: Duration,
    body: impl Fn(Context) -> T + Sync,
) -> Vec<T> {
    let folder = tempfile::tempdir().expect("a folder");
    let (folder, body) = (folder.path(), &body);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn(move || {
                    body(connect(rank, size, timeout, folder).expect("a connected context"))
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank without a panic"))
            .collect()
    })
}

/// Returns bytes that depend on sender, receiver and position.
pub(crate) fn pattern(from: usize, to: usize, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|index| (index * 7 + from * 31 + to * 101 + 13) as u8)
        .collect()
}

/// Content of an output buffer before a call.
pub(crate) const POISON: u8 = 0xA5;
