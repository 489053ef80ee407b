//! Peer info: what each rank publishes of itself, and which ranks read it.

use core::time::Duration;
use std::time::Instant;

use super::outcome::Outcome;
use super::{Rendezvous, class};
use crate::comm::topology::{LocalRanks, Locality, Topology};
use crate::memory::MemoryDescriptor;
use crate::{Error, Result};

/// Number of ranks whose peer info is read in one request.
const BATCH: u32 = 1024;

/// What a rank publishes of itself, as another rank reads it.
#[derive(Debug)]
pub(in crate::comm) struct PeerInfo {
    pub(in crate::comm) rank: u32,
    pub(in crate::comm) memory: MemoryDescriptor,
    /// Whether the rank is on the reader's host: else there are no processes and descriptors of it.
    pub(in crate::comm) is_here: bool,
}

impl Rendezvous<'_> {
    /// Publishes this rank's peer info. Returns a rank whose memory cannot be reached, if there is
    /// one, and the peer info of the ranks that can be reached, in rank order: the ranks of this
    /// host, or of all hosts of its NVLink domain.
    #[expect(clippy::type_complexity, reason = "one use")]
    pub(in crate::comm) fn gather(
        &self,
        what: &str,
        own: &MemoryDescriptor,
        locality: &Locality,
    ) -> Result<(Option<(u32, String)>, Vec<PeerInfo>)> {
        let class = class(what);
        let descriptor = own.to_bytes();
        let mut info = (descriptor.len() as u32).to_le_bytes().to_vec();
        info.extend(descriptor);
        info.extend((what.len() as u32).to_le_bytes());
        info.extend(what.as_bytes());
        info.extend(locality.to_bytes());
        self.store
            .set(&self.peer_info_key(class, self.rank), &info)?;
        let outcome = if self.rank == 0 {
            let outcome = match self.collect(class, what, own) {
                Ok(topology) => {
                    self.publish_hosts(class, &topology)?;
                    Outcome::Complete
                }
                Err(Error::Communicator { detail, .. }) => Outcome::Refused(detail),
                Err(other) => return Err(other),
            };
            self.publish(class, outcome)?
        } else {
            self.outcome(class)?
        };
        if let Outcome::Refused(detail) = outcome {
            return Err(self.refuse(detail));
        }
        let local_ranks = self
            .store
            .get(&self.host(class, &locality.host), self.timeout)?;
        let local_ranks = LocalRanks::from_bytes(&local_ranks).ok_or_else(|| self.unreadable(0))?;
        let mut infos = Vec::new();
        for (first, count) in local_ranks.runs {
            self.read_peer_infos(class, first, count, |rank, info| {
                let (memory, _, theirs) = parse(info).ok_or_else(|| self.unreadable(rank))?;
                let is_here = theirs.host == locality.host;
                infos.push(PeerInfo {
                    rank,
                    memory,
                    is_here,
                });
                Ok(())
            })?;
        }
        // All ranks read the same peer info, so all of them refuse.
        let local = |info: &&PeerInfo| !info.memory.is_for_other_hosts();
        if infos.iter().any(|info| !info.is_here)
            && let Some(info) = infos.iter().find(local)
        {
            return Err(self.refuse(format!(
                "the memory of rank {} can be shared on its own host only, and the ranks are on \
                    several hosts of one \
                 NVLink domain, which takes memory with fabric handles: allocate it by Communicator::alloc",
                info.rank
            )));
        }
        Ok((local_ranks.elsewhere, infos))
    }

    /// Reads the peer info of all ranks, on rank 0, and compares it with its own.
    fn collect(&self, class: &str, what: &str, own: &MemoryDescriptor) -> Result<Topology> {
        let mut topology = Topology::default();
        self.read_peer_infos(class, 0, self.size, |rank, info| {
            let (descriptor, theirs, locality) =
                parse(info).ok_or_else(|| self.unreadable(rank))?;
            if theirs != what {
                return Err(self.refuse(format!(
                    "rank {rank} has other options (or calls) than rank 0: all agreed options \
                     must be equal on all ranks"
                )));
            }
            if descriptor.bytes() != own.bytes() {
                return Err(self.refuse(format!(
                    "rank {rank} contributes {} bytes, rank 0 {}: sizes must be equal",
                    descriptor.bytes(),
                    own.bytes()
                )));
            }
            topology.push(&locality);
            Ok(())
        })?;
        Ok(topology)
    }

    /// Publishes, on rank 0, which ranks each host has.
    fn publish_hosts(&self, class: &str, topology: &Topology) -> Result<()> {
        let values: Vec<_> = topology
            .hosts()
            .map(|(host, local_ranks)| (self.host(class, host), local_ranks.to_bytes()))
            .collect();
        for batch in values.chunks(BATCH as usize) {
            let pairs: Vec<_> = batch
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_slice()))
                .collect();
            self.store.multi_set(&pairs)?;
        }
        Ok(())
    }

    /// Reads the peer info of `count` ranks from `first` on, in batches.
    fn read_peer_infos(
        &self,
        class: &str,
        first: u32,
        count: u32,
        mut each: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let started = Instant::now();
        let mut from = first;
        while from < first + count {
            let to = (from + BATCH).min(first + count);
            let keys: Vec<_> = (from..to)
                .map(|rank| self.peer_info_key(class, rank))
                .collect();
            let keys: Vec<_> = keys.iter().map(String::as_str).collect();
            let left = self.timeout.saturating_sub(started.elapsed());
            let infos = self
                .store
                .multi_get(&keys, left.max(Duration::from_millis(1)))
                .map_err(|error| match error {
                    // A prefix of the store may precede the key.
                    Error::StoreTimeout { key, .. } => {
                        let missing = keys.iter().position(|known| key.ends_with(known));
                        self.missing(from + missing.unwrap_or_default() as u32)
                    }
                    other => other,
                })?;
            for (rank, info) in (from..to).zip(&infos) {
                each(rank, info)?;
            }
            from = to;
        }
        Ok(())
    }
}

fn parse(info: &[u8]) -> Option<(MemoryDescriptor, &str, Locality)> {
    let (length, rest) = info.split_at_checked(4)?;
    let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
    let (descriptor, rest) = rest.split_at_checked(length)?;
    let (length, rest) = rest.split_at_checked(4)?;
    let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
    let (what, locality) = rest.split_at_checked(length)?;
    let descriptor = MemoryDescriptor::from_bytes(descriptor)?;
    Some((
        descriptor,
        str::from_utf8(what).ok()?,
        Locality::from_bytes(locality)?,
    ))
}
