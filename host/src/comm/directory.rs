//! Which ranks are on which host: what rank 0 tells the others when all have come.

/// The hosts of all ranks, as runs of ranks that follow each other: its size is that of the hosts, where
/// a launcher fills one host after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Directory {
    /// Number of ranks, and their host.
    runs: Vec<(u32, String)>,
}

/// How a meeting has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// All ranks have come, and fit together.
    Complete(Directory),
    /// Why they do not meet.
    Refused(String),
}

impl Directory {
    /// Adds the next rank.
    pub(super) fn push(&mut self, host: &str) {
        match self.runs.last_mut() {
            Some((count, last)) if last == host => *count += 1,
            _ => self.runs.push((1, host.to_owned())),
        }
    }

    /// First rank and number of ranks of each run on `host`.
    pub(super) fn runs_on<'a>(&'a self, host: &'a str) -> impl Iterator<Item = (u32, u32)> + 'a {
        let mut first = 0;
        self.runs.iter().filter_map(move |(count, theirs)| {
            let run = (first, *count);
            first += count;
            (theirs == host).then_some(run)
        })
    }

    /// The first rank that is not on `host`, and where it is.
    pub(super) fn first_elsewhere(&self, host: &str) -> Option<(u32, &str)> {
        let mut first = 0;
        for (count, theirs) in &self.runs {
            if theirs != host {
                return Some((first, theirs));
            }
            first += count;
        }
        None
    }
}

impl Verdict {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Refused(detail) => [&[0], detail.as_bytes()].concat(),
            Self::Complete(directory) => {
                let mut bytes = vec![1];
                for (count, host) in &directory.runs {
                    bytes.extend(count.to_le_bytes());
                    bytes.extend((host.len() as u32).to_le_bytes());
                    bytes.extend(host.as_bytes());
                }
                bytes
            }
        }
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = bytes.split_first()?;
        if *kind == 0 {
            return Some(Self::Refused(String::from_utf8_lossy(rest).into_owned()));
        }
        let mut directory = Directory::default();
        while !rest.is_empty() {
            let (count, after) = rest.split_first_chunk()?;
            let (length, after) = after.split_first_chunk()?;
            let (host, after) = after.split_at_checked(u32::from_le_bytes(*length) as usize)?;
            let host = str::from_utf8(host).ok()?.to_owned();
            directory.runs.push((u32::from_le_bytes(*count), host));
            rest = after;
        }
        Some(Self::Complete(directory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_as_long_as_its_hosts() {
        let mut directory = Directory::default();
        for host in ["a", "a", "b", "b", "b", "a"] {
            directory.push(host);
        }
        assert_eq!(directory.runs.len(), 3);
        assert!(directory.runs_on("a").eq([(0, 2), (5, 1)]));
        assert!(directory.runs_on("b").eq([(2, 3)]));
        assert_eq!(directory.first_elsewhere("a"), Some((2, "b")));
        let verdict = Verdict::Complete(directory);
        let bytes = verdict.to_bytes();
        assert_eq!(Verdict::from_bytes(&bytes), Some(verdict));
        assert_eq!(Verdict::from_bytes(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Verdict::from_bytes(&[]), None);
        let refused = Verdict::Refused("why".to_owned());
        assert_eq!(Verdict::from_bytes(&refused.to_bytes()), Some(refused));
    }
}
