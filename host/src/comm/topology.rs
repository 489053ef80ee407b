//! The ranks of each host. Rank 0 collects them from the peer info of all ranks and publishes each
//! host's part.
//!
//! Ranks on one host reach each other's memory. Ranks on several hosts do so if the GPUs of all
//! ranks are in one NVLink domain; they are then published as if they were on one host. A mixture
//! is not supported, because reachability by either path is not transitive.

use std::collections::BTreeMap;

use crate::Result;
use crate::bootstrap::host_id;
use crate::device::Device;

/// Host and NVLink domain of a rank, which determine the ranks whose memory it reaches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Locality {
    /// Name of the host. Processes of one host can find each other and pass descriptors.
    pub(super) host: String,
    /// NVLink domain of the rank's GPU, if other hosts can reach the GPU.
    pub(super) domain: Option<String>,
    /// Number of blocks that the rank's GPU can hold at once, shared by the ranks of its process on
    /// that GPU. 0 if the rank launches no kernels on a GPU.
    pub(super) resident_blocks: u32,
}

impl Locality {
    /// Returns the locality of a rank of this process with memory on `device`.
    pub(super) fn of(device: Device) -> Result<Self> {
        let domain = if device.is_gpu() {
            crate::gpus::open(device)?.properties().domain.clone()
        } else {
            None
        };
        Ok(Self {
            host: host_id()?,
            domain,
            resident_blocks: 0,
        })
    }

    /// Returns the locality of a rank on `host` whose memory other hosts cannot reach.
    pub(super) fn on_host(host: &str) -> Self {
        Self {
            host: host.to_owned(),
            domain: None,
            resident_blocks: 0,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.host.len() as u32).to_le_bytes().to_vec();
        bytes.extend(self.host.as_bytes());
        bytes.extend(self.resident_blocks.to_le_bytes());
        bytes.extend(self.domain.as_deref().unwrap_or_default().as_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = u32::from_le_bytes(*length) as usize;
        let (host, rest) = rest.split_at_checked(length)?;
        let (resident_blocks, domain) = rest.split_first_chunk()?;
        let domain = str::from_utf8(domain).ok()?;
        Some(Self {
            host: str::from_utf8(host).ok()?.to_owned(),
            domain: Some(domain.to_owned()).filter(|domain| !domain.is_empty()),
            resident_blocks: u32::from_le_bytes(*resident_blocks),
        })
    }
}

/// Ranks of every host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Topology {
    hosts: BTreeMap<String, Vec<(u32, u32)>>,
    /// Host of the last rank that was added, and the number of ranks added.
    last: Option<(String, u32)>,
    /// First rank of the second host, in the order of the ranks, and that host.
    second: Option<(u32, String)>,
    /// NVLink domain of all ranks that were added, if they have a common one.
    domain: Option<String>,
}

/// Part of the topology that the ranks of one host read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LocalRanks {
    /// First rank and number of ranks, for each run of consecutive ranks on this host. A launcher
    /// that fills hosts in sequence produces one run.
    pub(super) runs: Vec<(u32, u32)>,
    /// A rank on another host, and that host.
    pub(super) elsewhere: Option<(u32, String)>,
    /// Number of ranks of a team ([`Topology::team`]), equal on all hosts.
    pub(super) team: u32,
}

impl Topology {
    /// Returns the largest number of which all multiples divide the ranks into teams of successive
    /// ranks on one host. 1 if the ranks of no host follow each other in this way.
    fn team(&self) -> u32 {
        const fn divisor(a: u32, b: u32) -> u32 {
            match b {
                0 => a,
                _ => divisor(b, a % b),
            }
        }
        let all = self.last.as_ref().map_or(0, |(_, count)| *count);
        if self.domain.is_some() || self.hosts.len() == 1 {
            return all;
        }
        // A team may not contain the first rank of a run after its own first rank.
        let runs = self.hosts.values().flatten();
        runs.fold(all, |team, (first, _)| divisor(team, *first))
    }

    /// Adds the next rank.
    pub(super) fn push(&mut self, locality: &Locality) {
        let host = locality.host.as_str();
        match &self.last {
            None => self.domain.clone_from(&locality.domain),
            Some(_) if self.domain != locality.domain => self.domain = None,
            Some(_) => {}
        }
        let (extends, rank) = match &self.last {
            Some((last, count)) => (last == host, *count),
            None => (false, 0),
        };
        if !extends && rank > 0 && self.second.is_none() {
            self.second = Some((rank, host.to_owned()));
        }
        let runs = self.hosts.entry(host.to_owned()).or_default();
        match runs.last_mut() {
            Some((_, count)) if extends => *count += 1,
            _ => runs.push((rank, 1)),
        }
        self.last = Some((host.to_owned(), rank + 1));
    }

    /// Returns for each host the part that its ranks read. In one domain, all ranks are local.
    pub(super) fn hosts(&self) -> impl Iterator<Item = (&str, LocalRanks)> {
        let first = self
            .hosts
            .iter()
            .find(|(_, runs)| runs[0].0 == 0)
            .map(|(host, _)| (0, host.clone()));
        let all = self.last.as_ref().map_or(0, |(_, count)| *count);
        let team = self.team();
        self.hosts.iter().map(move |(host, runs)| {
            if self.domain.is_some() {
                let local_ranks = LocalRanks {
                    runs: vec![(0, all)],
                    elsewhere: None,
                    team,
                };
                return (host.as_str(), local_ranks);
            }
            let other = |found: &&(u32, String)| found.1 != *host;
            let local_ranks = LocalRanks {
                runs: runs.clone(),
                elsewhere: first
                    .as_ref()
                    .filter(|_| self.hosts.len() > 1)
                    .filter(other)
                    .or(self.second.as_ref())
                    .cloned(),
                team,
            };
            (host.as_str(), local_ranks)
        })
    }
}

impl LocalRanks {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.team.to_le_bytes().to_vec();
        bytes.extend((self.runs.len() as u32).to_le_bytes());
        for (first, count) in &self.runs {
            bytes.extend(first.to_le_bytes());
            bytes.extend(count.to_le_bytes());
        }
        if let Some((rank, host)) = &self.elsewhere {
            bytes.extend(rank.to_le_bytes());
            bytes.extend(host.as_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (team, rest) = bytes.split_first_chunk()?;
        let (count, mut rest) = rest.split_first_chunk()?;
        let mut local_ranks = Self {
            team: u32::from_le_bytes(*team),
            ..Self::default()
        };
        for _ in 0..u32::from_le_bytes(*count) {
            let (first, after) = rest.split_first_chunk()?;
            let (count, after) = after.split_first_chunk()?;
            let run = (u32::from_le_bytes(*first), u32::from_le_bytes(*count));
            local_ranks.runs.push(run);
            rest = after;
        }
        if !rest.is_empty() {
            let (rank, host) = rest.split_first_chunk()?;
            let host = str::from_utf8(host).ok()?.to_owned();
            local_ranks.elsewhere = Some((u32::from_le_bytes(*rank), host));
        }
        Some(local_ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(hosts: &[&str]) -> Vec<(String, LocalRanks)> {
        let localities: Vec<_> = hosts.iter().map(|host| Locality::on_host(host)).collect();
        of_localities(&localities)
    }

    fn of_localities(localities: &[Locality]) -> Vec<(String, LocalRanks)> {
        let mut topology = Topology::default();
        localities
            .iter()
            .for_each(|locality| topology.push(locality));
        let hosts = topology.hosts();
        hosts.map(|(host, n)| (host.to_owned(), n)).collect()
    }

    #[test]
    fn hosts_of_one_domain_are_as_one() {
        let locality = |host: &str, domain: &str| Locality {
            domain: Some(domain.to_owned()).filter(|domain| !domain.is_empty()),
            ..Locality::on_host(host)
        };
        let all = of_localities(&[locality("a", "d"), locality("b", "d"), locality("a", "d")]);
        assert_eq!(all.len(), 2);
        for (_, local_ranks) in all {
            assert_eq!(local_ranks.runs, [(0, 3)]);
            assert_eq!(local_ranks.elsewhere, None);
        }
        // If any rank has another domain, or none, hosts are separate, as without domains.
        for last in ["e", ""] {
            for at in 0..3 {
                let mut domains = ["d"; 3];
                domains[at] = last;
                let localities: Vec<_> = ["a", "b", "a"]
                    .iter()
                    .zip(domains)
                    .map(|(host, domain)| locality(host, domain))
                    .collect();
                assert_eq!(
                    of_localities(&localities),
                    topology(&["a", "b", "a"]),
                    "{localities:?}"
                );
            }
            // Ranks on one host reach each other even without a common domain.
            let localities = [locality("a", "d"), locality("a", last)];
            assert_eq!(of_localities(&localities), topology(&["a", "a"]));
        }
    }

    #[test]
    fn localities_survive_their_bytes() {
        for domain in [None, Some("d.7".to_owned())] {
            let locality = Locality {
                host: "a host".to_owned(),
                domain,
                resident_blocks: 132,
            };
            let bytes = locality.to_bytes();
            assert_eq!(Locality::from_bytes(&bytes), Some(locality));
            assert_eq!(Locality::from_bytes(&bytes[..6]), None);
            assert_eq!(Locality::from_bytes(&bytes[..12]), None);
        }
    }

    #[test]
    fn each_host_gets_its_runs_and_one_rank_elsewhere() {
        let found = topology(&["b", "b", "a", "a", "a", "b", "c"]);
        let expected = [
            ("a", vec![(2, 3)], (0, "b")),
            ("b", vec![(0, 2), (5, 1)], (2, "a")),
            ("c", vec![(6, 1)], (0, "b")),
        ];
        assert_eq!(found.len(), expected.len());
        for ((host, local_ranks), (name, runs, (rank, elsewhere))) in found.iter().zip(expected) {
            assert_eq!((host.as_str(), &local_ranks.runs), (name, &runs));
            assert_eq!(local_ranks.elsewhere, Some((rank, elsewhere.to_owned())));
            let bytes = local_ranks.to_bytes();
            assert_eq!(LocalRanks::from_bytes(&bytes).as_ref(), Some(local_ranks));
            assert_eq!(LocalRanks::from_bytes(&bytes[..7]), None);
        }
        let alone = topology(&["a", "a"]);
        assert_eq!(alone[0].1.runs, [(0, 2)]);
        assert_eq!(alone[0].1.elsewhere, None);
        let bytes = alone[0].1.to_bytes();
        assert_eq!(LocalRanks::from_bytes(&bytes), Some(alone[0].1.clone()));
    }
}
