//! Which ranks are on which host: what rank 0 makes of all cards, and what each host gets of it.

use std::collections::BTreeMap;

/// The ranks of every host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Directory {
    hosts: BTreeMap<String, Vec<(u32, u32)>>,
    /// Host of the rank that came last, and how many have come.
    last: Option<(String, u32)>,
    /// First rank of the host that came second.
    second: Option<(u32, String)>,
}

/// What the ranks of one host have to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Neighbours {
    /// First rank and number of ranks, for each run of ranks on this host. One run, where a launcher
    /// fills one host after the other.
    pub(super) runs: Vec<(u32, u32)>,
    /// A rank on another host, and where it is.
    pub(super) elsewhere: Option<(u32, String)>,
}

/// How a meeting has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// All ranks have come, and fit together.
    Complete,
    /// Why they do not meet.
    Refused(String),
}

impl Directory {
    /// Adds the next rank.
    pub(super) fn push(&mut self, host: &str) {
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

    /// Each host with what its ranks have to know.
    pub(super) fn hosts(&self) -> impl Iterator<Item = (&str, Neighbours)> {
        let first = self
            .hosts
            .iter()
            .find(|(_, runs)| runs[0].0 == 0)
            .map(|(host, _)| (0, host.clone()));
        self.hosts.iter().map(move |(host, runs)| {
            let other = |found: &&(u32, String)| found.1 != *host;
            let neighbours = Neighbours {
                runs: runs.clone(),
                elsewhere: first
                    .as_ref()
                    .filter(|_| self.hosts.len() > 1)
                    .filter(other)
                    .or(self.second.as_ref())
                    .cloned(),
            };
            (host.as_str(), neighbours)
        })
    }
}

impl Neighbours {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.runs.len() as u32).to_le_bytes().to_vec();
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
        let (count, mut rest) = bytes.split_first_chunk()?;
        let mut neighbours = Self::default();
        for _ in 0..u32::from_le_bytes(*count) {
            let (first, after) = rest.split_first_chunk()?;
            let (count, after) = after.split_first_chunk()?;
            let run = (u32::from_le_bytes(*first), u32::from_le_bytes(*count));
            neighbours.runs.push(run);
            rest = after;
        }
        if !rest.is_empty() {
            let (rank, host) = rest.split_first_chunk()?;
            let host = str::from_utf8(host).ok()?.to_owned();
            neighbours.elsewhere = Some((u32::from_le_bytes(*rank), host));
        }
        Some(neighbours)
    }
}

impl Verdict {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Complete => vec![1],
            Self::Refused(detail) => [&[0], detail.as_bytes()].concat(),
        }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (1, []) => Some(Self::Complete),
            (0, detail) => Some(Self::Refused(String::from_utf8_lossy(detail).into_owned())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(hosts: &[&str]) -> Vec<(String, Neighbours)> {
        let mut directory = Directory::default();
        hosts.iter().for_each(|host| directory.push(host));
        let hosts = directory.hosts();
        hosts.map(|(host, n)| (host.to_owned(), n)).collect()
    }

    #[test]
    fn each_host_gets_its_runs_and_one_rank_elsewhere() {
        let found = directory(&["b", "b", "a", "a", "a", "b", "c"]);
        let expected = [
            ("a", vec![(2, 3)], (0, "b")),
            ("b", vec![(0, 2), (5, 1)], (2, "a")),
            ("c", vec![(6, 1)], (0, "b")),
        ];
        assert_eq!(found.len(), expected.len());
        for ((host, neighbours), (name, runs, (rank, elsewhere))) in found.iter().zip(expected) {
            assert_eq!((host.as_str(), &neighbours.runs), (name, &runs));
            assert_eq!(neighbours.elsewhere, Some((rank, elsewhere.to_owned())));
            let bytes = neighbours.to_bytes();
            assert_eq!(Neighbours::from_bytes(&bytes).as_ref(), Some(neighbours));
            assert_eq!(Neighbours::from_bytes(&bytes[..7]), None);
        }
        let alone = directory(&["a", "a"]);
        assert_eq!(alone[0].1.runs, [(0, 2)]);
        assert_eq!(alone[0].1.elsewhere, None);
        let bytes = alone[0].1.to_bytes();
        assert_eq!(Neighbours::from_bytes(&bytes), Some(alone[0].1.clone()));
    }

    #[test]
    fn verdicts_survive_their_bytes() {
        for verdict in [Verdict::Complete, Verdict::Refused("why".to_owned())] {
            assert_eq!(Verdict::from_bytes(&verdict.to_bytes()), Some(verdict));
        }
        assert_eq!(Verdict::from_bytes(&[]), None);
        assert_eq!(Verdict::from_bytes(&[1, 2]), None);
    }
}
