//! Peer info: the values that each rank publishes, and the ranks that read them.

use super::outcome::Outcome;
use super::waiting::WaitProgress;
use super::{Rendezvous, class};
use crate::comm::topology::{LocalRanks, Locality, Topology};
use crate::memory::MemoryDescriptor;
use crate::store::Error as StoreError;
use crate::{EndReason, Error, Result};

/// Number of ranks whose peer info is read in one request.
const BATCH: u32 = 1024;

/// Published values of a rank, for another rank.
#[derive(Debug)]
pub(in crate::comm) struct PeerInfo {
    pub(in crate::comm) rank: u32,
    pub(in crate::comm) memory: MemoryDescriptor,
    /// Set if the rank is on the reader's host. Otherwise its process and its descriptors are not
    /// accessible.
    pub(in crate::comm) is_here: bool,
    /// [`Locality::resident_blocks`] of the rank.
    pub(in crate::comm) resident_blocks: u32,
}

/// Result of [`Rendezvous::gather`].
#[derive(Debug)]
pub(in crate::comm) struct Gathered {
    /// A rank whose memory cannot be reached, and its host, if there is one.
    pub(in crate::comm) elsewhere: Option<(u32, String)>,
    /// Number of successive ranks that reach each other's memory: each multiple of it begins such a
    /// team.
    pub(in crate::comm) team: u32,
    /// The peer info of the reachable ranks in rank order: the ranks of this host, or of all hosts
    /// of its NVLink domain.
    pub(in crate::comm) infos: Vec<PeerInfo>,
}

impl Rendezvous<'_> {
    /// Publishes this rank's peer info, and returns what it learns of the others.
    pub(in crate::comm) fn gather(
        &self,
        what: &str,
        own: &MemoryDescriptor,
        locality: &Locality,
    ) -> Result<Gathered> {
        let class = class(what);
        let descriptor = own.to_bytes();
        let mut info = self.size.to_le_bytes().to_vec();
        info.extend((descriptor.len() as u32).to_le_bytes());
        info.extend(descriptor);
        info.extend((what.len() as u32).to_le_bytes());
        info.extend(what.as_bytes());
        info.extend(locality.to_bytes());
        self.store
            .set(&self.peer_info_key(class, self.rank), &info)?;
        let outcome = match self.rank {
            0 => self.lead(class, what, own),
            _ => self.outcome(class),
        };
        let outcome = outcome.inspect_err(|error| {
            if error.end_reason() == Some(EndReason::Aborted) {
                self.withdraw(what, error);
            }
        })?;
        if let Outcome::Refused(detail) = outcome {
            self.linger(class);
            return Err(self.refuse(detail));
        }
        let local_ranks = self.get(&self.host(class, &locality.host), self.timeout)?;
        let local_ranks = LocalRanks::from_bytes(&local_ranks).ok_or_else(|| self.unreadable(0))?;
        let has_own = |(first, count): &(u32, u32)| (*first..first + count).contains(&self.rank);
        if !local_ranks.runs.iter().any(has_own) {
            return Err(self.refuse(format!(
                "rank {} was started as one of {} ranks, but rank 0 counts fewer: the size \
                 (WORLD_SIZE) must be equal on all ranks",
                self.rank, self.size
            )));
        }
        let mut infos = Vec::new();
        let get = |keys: &[&str]| self.multi_get(keys, self.timeout);
        for (first, count) in local_ranks.runs {
            self.read_peer_infos(class, first, count, get, |rank, info| {
                let PublishedInfo {
                    memory,
                    locality: theirs,
                    ..
                } = PublishedInfo::parse(info).ok_or_else(|| self.unreadable(rank))?;
                let is_here = theirs.host == locality.host;
                infos.push(PeerInfo {
                    rank,
                    memory,
                    is_here,
                    resident_blocks: theirs.resident_blocks,
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
                 several hosts of one NVLink domain, which takes memory with fabric handles: \
                 allocate it by Communicator::alloc",
                info.rank
            )));
        }
        Ok(Gathered {
            elsewhere: local_ranks.elsewhere,
            team: local_ranks.team,
            infos,
        })
    }

    /// Waits for all ranks, on rank 0, and publishes the outcome.
    fn lead(&self, class: &str, what: &str, own: &MemoryDescriptor) -> Result<Outcome> {
        let outcome = match self.collect(class, what, own) {
            Ok(topology) => {
                self.publish_hosts(class, &topology)?;
                Outcome::Complete
            }
            Err(Error::Communicator { detail, .. }) => Outcome::Refused(detail),
            Err(other) => return Err(other),
        };
        self.publish(class, outcome)
    }

    /// Reads the peer info of all ranks, on rank 0, and compares it with its own.
    fn collect(&self, class: &str, what: &str, own: &MemoryDescriptor) -> Result<Topology> {
        let mut topology = Topology::default();
        let mut waiting = WaitProgress::new(self.timeout);
        let get = |keys: &[&str]| loop {
            match self.multi_get(keys, waiting.slice(self.rank)) {
                Err(Error::Store(StoreError::Timeout { .. })) if waiting.is_over() => {
                    break Err(self.missing(self.first_missing(class)?));
                }
                Err(Error::Store(StoreError::Timeout { .. })) => {
                    self.look_at_all(class, &mut waiting, |rank, info| {
                        self.verify(rank, info, what, own).map(drop)
                    })?;
                }
                other => break other,
            }
        };
        self.read_peer_infos(class, 0, self.size, get, |rank, info| {
            topology.push(&self.verify(rank, info, what, own)?.locality);
            Ok(())
        })?;
        Ok(topology)
    }

    /// Checks, on rank 0, that the published values of `rank` match those of this rank.
    fn verify<'a>(
        &self,
        rank: u32,
        info: &'a [u8],
        what: &str,
        own: &MemoryDescriptor,
    ) -> Result<PublishedInfo<'a>> {
        let published = PublishedInfo::parse(info).ok_or_else(|| self.unreadable(rank))?;
        if published.size != self.size {
            return Err(self.refuse(format!(
                "rank {rank} was started as one of {} ranks, rank 0 as one of {}: the size \
                 (WORLD_SIZE) must be equal on all ranks",
                published.size, self.size
            )));
        }
        if published.what != what {
            return Err(self.refuse(format!(
                "rank {rank} has other options (or calls) than rank 0: all agreed options must be \
                 equal on all ranks"
            )));
        }
        if published.memory.bytes() != own.bytes() {
            return Err(self.refuse(format!(
                "rank {rank} contributes {} bytes, rank 0 {}: sizes must be equal",
                published.memory.bytes(),
                own.bytes()
            )));
        }
        Ok(published)
    }

    /// Publishes, on rank 0, the ranks of each host.
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

    /// Reads the peer info of `count` ranks, starting at `first`, in batches. `get` reads one
    /// batch.
    fn read_peer_infos(
        &self,
        class: &str,
        first: u32,
        count: u32,
        mut get: impl FnMut(&[&str]) -> Result<Vec<Vec<u8>>>,
        mut each: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut from = first;
        while from < first + count {
            let to = (from + BATCH).min(first + count);
            let keys: Vec<_> = (from..to)
                .map(|rank| self.peer_info_key(class, rank))
                .collect();
            let keys: Vec<_> = keys.iter().map(String::as_str).collect();
            for (rank, info) in (from..to).zip(&get(&keys)?) {
                each(rank, info)?;
            }
            from = to;
        }
        Ok(())
    }
}

/// Published values of a rank, decoded from the bytes of its peer info.
struct PublishedInfo<'a> {
    /// Number of ranks that the rank was started with.
    size: u32,
    memory: MemoryDescriptor,
    /// Value that must be equal on all ranks.
    what: &'a str,
    locality: Locality,
}

impl<'a> PublishedInfo<'a> {
    fn parse(info: &'a [u8]) -> Option<Self> {
        let (size, rest) = info.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let (descriptor, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let (length, rest) = rest.split_first_chunk()?;
        let (what, locality) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        Some(Self {
            size: u32::from_le_bytes(*size),
            memory: MemoryDescriptor::from_bytes(descriptor)?,
            what: str::from_utf8(what).ok()?,
            locality: Locality::from_bytes(locality)?,
        })
    }
}
