//! The ranks of a communicator, and the store of their rendezvous.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Arc, OnceLock};

use super::rendezvous::WatchedMember;
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;
use crate::{Error, Result};

/// The ranks of a communicator: this rank's number and options, and the processes of all ranks.
pub(super) struct Group {
    /// Name that no other communicator of the ranks has.
    pub(super) full_name: String,
    /// Name that the program has given.
    pub(super) name: String,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) device: Device,
    /// The options. `blocks` and `large_blocks` are the numbers on which the ranks agreed.
    pub(super) options: Options,
    /// `Options::blocks` and `Options::large_blocks` as the caller chose them.
    pub(super) requested_blocks: (u32, u32),
    /// Set if the ranks outnumber the CPU cores of rank 0's host; rank 0 broadcasts the value.
    pub(super) oversubscribed: bool,
    /// Counts reconfigurations.
    pub(super) generation: u64,
    /// Number that identifies this rank among all ranks of all communicators.
    pub(super) identity: u64,
    /// Identifies the communicator among those of this process, in [`User`](crate::usage::User).
    pub(super) memory_id: u64,
    /// Id and start time of each rank's process; empty for backends, which detect failures
    /// themselves.
    pub(super) processes: Vec<Option<(u32, u64)>>,
    /// Prefix of this communicator's keys in the store.
    pub(super) prefix: String,
    pub(super) store: Arc<dyn Store>,
    /// Set if the other ranks have other stores, so that a rendezvous is impossible.
    pub(super) has_private_store: bool,
    /// Timeout in nanoseconds of calls that have none; 0 for that of the options.
    pub(super) timeout_ns: AtomicU64,
    /// Number of collective host calls (windows, dups) so far, which is part of their keys.
    pub(super) host_calls: AtomicU64,
    /// Ranks of this communicator in the numbering of the first ancestor that it was split or
    /// duplicated from; unset if it has no ancestor.
    pub(super) world: OnceLock<Vec<u32>>,
}

impl Group {
    /// Returns the options as the caller chose them, for a communicator of other ranks.
    pub(super) fn requested_options(&self) -> Options {
        let mut options = self.options.clone();
        (options.blocks, options.large_blocks) = self.requested_blocks;
        options.timeout = self.timeout(0);
        options
    }

    /// Fails if the ranks have no common store.
    pub(super) fn check_store(&self, operation: &str) -> Result<()> {
        if !self.has_private_store || self.size == 1 {
            return Ok(());
        }
        Err(self.error(format!(
            "{operation} needs a store that all ranks share, and the communicator was adopted \
             without one; set Options::store in the options of Communicator::adopt"
        )))
    }

    /// Returns the number of the next collective host call.
    pub(super) fn next_host_call(&self) -> u64 {
        self.host_calls.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the ranks of this communicator in the numbering of its first ancestor.
    pub(super) fn world(&self) -> Vec<u32> {
        self.world
            .get()
            .cloned()
            .unwrap_or_else(|| (0..self.size).collect())
    }

    /// Returns the ranks `members` on this host, except this rank, as members of a rendezvous in
    /// which member i becomes rank i.
    pub(super) fn watched_members(
        &self,
        members: impl IntoIterator<Item = u32>,
    ) -> Vec<WatchedMember> {
        let watched = |(member, rank): (u32, u32)| {
            Some(WatchedMember {
                member,
                rank,
                process: self.processes.get(rank as usize).copied().flatten()?,
            })
        };
        let members = (0..).zip(members).filter(|(_, rank)| *rank != self.rank);
        members.filter_map(watched).collect()
    }

    /// Returns the time limit of a wait: that of the call, or the communicator's if `timeout_ns` is
    /// 0.
    pub(super) fn timeout(&self, timeout_ns: u64) -> Duration {
        match (timeout_ns, self.timeout_ns.load(Ordering::Relaxed)) {
            (0, 0) => self.options.timeout,
            (0, nanoseconds) | (nanoseconds, _) => Duration::from_nanos(nanoseconds),
        }
    }

    /// Returns the error of a call that the communicator refuses.
    pub(super) fn error(&self, detail: impl Into<String>) -> Error {
        Error::Communicator {
            name: self.full_name.clone(),
            detail: detail.into(),
        }
    }
}

/// Returns a random number, for identities.
pub(super) fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| Error::Bootstrap {
        detail: format!("the system gives no random numbers ({error})"),
    })?;
    Ok(u64::from_le_bytes(bytes))
}
