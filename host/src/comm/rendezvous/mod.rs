//! Rendezvous of ranks in a store: they exchange memory descriptors, agree, and wait for each
//! other.
//!
//! Except on rank 0, the data that a rank sends and receives does not grow with the number of
//! ranks. Each rank publishes its [`PeerInfo`]. Rank 0 reads and compares all of them, publishes
//! for each host the ranks on it, and then publishes the [`Outcome`](self::outcome::Outcome): all
//! ranks have joined, or the reason for failure. The other ranks wait for this one value, and read
//! the peer info of their own host (of all hosts if the ranks are in one NVLink domain).
//!
//! The rendezvous of one name are numbered. A rank that detects the end of a rendezvous, with or
//! without success, increments the number, so that a failed rendezvous does not block the next one.

mod barrier;
mod bench;
mod claim;
mod outcome;
mod peer_info;
mod waiting;
mod watched;

use core::time::Duration;

pub use self::bench::bench_rendezvous;
pub(super) use self::claim::RankClaim;
pub(super) use self::peer_info::{Gathered, PeerInfo};
#[cfg(test)]
pub(super) use self::waiting::set_duplicate_grace;
pub(super) use self::watched::{Watched, WatchedMember};

use crate::device::Device;
use crate::memory::Memory;
use crate::store::{Error as StoreError, Store};
use crate::{Error, Result};

/// A rank's view of a rendezvous.
pub(super) struct Rendezvous<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) prefix: &'a str,
    pub(super) name: &'a str,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) timeout: Duration,
    pub(super) watched: Watched<'a>,
}

impl Rendezvous<'_> {
    /// Maps the segments of all ranks.
    pub(super) fn open(
        &self,
        device: Device,
        own: Memory,
        infos: Vec<PeerInfo>,
    ) -> Result<Vec<Option<Memory>>> {
        let mut all = Vec::with_capacity(self.size as usize);
        for info in infos {
            all.push(Some(if info.rank == self.rank {
                own.clone()
            } else {
                Memory::open(device, &info.memory, info.rank)?
            }));
        }
        Ok(all)
    }

    /// Returns the bytes of every rank. [`Self::exchange_key`] names the keys, which are not
    /// deleted.
    pub(super) fn exchange(&self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.size == 1 {
            return Ok(vec![own.to_vec()]);
        }
        // The value is never empty, because some stores do not support empty values.
        let mut value = vec![0];
        value.extend(own);
        self.store
            .set(&self.exchange_key(what, self.rank), &value)?;
        let keys: Vec<_> = (0..self.size)
            .map(|rank| self.exchange_key(what, rank))
            .collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let mut all = match self.multi_get(&keys, self.timeout) {
            Err(Error::Store(StoreError::Timeout { .. })) => {
                let is_there = |rank: &u32| self.store.check(&[keys[*rank as usize]]);
                let missing = (0..self.size).find(|rank| !is_there(rank).unwrap_or(true));
                return Err(self.missing(missing.unwrap_or_default()));
            }
            all => all?,
        };
        for value in &mut all {
            if !value.is_empty() {
                value.remove(0);
            }
        }
        Ok(all)
    }

    /// Returns the key of the bytes that `rank` passes to [`Self::exchange`].
    pub(super) fn exchange_key(&self, what: &str, rank: u32) -> String {
        format!("{}/{what}/{rank}", self.prefix)
    }

    /// Returns rank 0's value, for decisions that must be the same on all ranks.
    pub(super) fn broadcast_bool(&self, what: &str, own: bool) -> Result<bool> {
        Ok(self.broadcast(what, || vec![u8::from(own)])? == [1])
    }

    /// Returns rank 0's bytes. `own`, which only rank 0 calls, must not return an empty vector.
    pub(super) fn broadcast(&self, what: &str, own: impl FnOnce() -> Vec<u8>) -> Result<Vec<u8>> {
        let key = format!("{}/{what}", self.prefix);
        if self.rank == 0 {
            let own = own();
            self.store.set(&key, &own)?;
            return Ok(own);
        }
        self.get(&key, self.timeout)
    }

    fn peer_info_key(&self, class: &str, rank: u32) -> String {
        format!("{}/{class}/{rank}", self.prefix)
    }

    fn host(&self, class: &str, host: &str) -> String {
        format!("{}/{class}/host/{host}", self.prefix)
    }

    fn outcome_key(&self, class: &str) -> String {
        format!("{}/{class}/all", self.prefix)
    }

    fn missing(&self, rank: u32) -> Error {
        self.refuse(format!(
            "rank {rank} did not join within {:.1} s{}",
            self.timeout.as_secs_f64(),
            self.earlier()
        ))
    }

    /// Returns a hint for messages about missing ranks if the name was used before in this store:
    /// the other ranks may have joined an earlier rendezvous, or belong to another job.
    fn earlier(&self) -> String {
        match self.prefix.rsplit('/').next().map(str::parse::<u64>) {
            Some(Ok(number)) if number > 0 => format!(
                "; this is attempt {} to create \"{}\" in this store: unless this program has made \
                 the earlier ones, the store belongs to another job (MASTER_PORT), or more ranks \
                 were started than WORLD_SIZE says",
                number + 1,
                self.name
            ),
            _ => String::new(),
        }
    }

    pub(super) fn unreadable(&self, rank: u32) -> Error {
        self.refuse(format!("rank {rank} published something else"))
    }

    pub(super) fn refuse(&self, detail: String) -> Error {
        Error::Communicator {
            name: self.name.to_owned(),
            detail,
        }
    }
}

/// Returns the key of a publication without the hash of the agreed values, so that ranks with
/// different values use the same keys and can report the difference.
fn class(what: &str) -> &str {
    what.strip_prefix("workspace-")
        .map_or(what, |_| "workspace")
}
