//! The outcome of a rendezvous, which all ranks read.

/// The outcome of a rendezvous or of a barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All ranks have joined and their options agree; of a barrier: no rank has reported a failure.
    Complete,
    /// The reason for failure.
    Refused(String),
}

impl Outcome {
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
    use super::Outcome;

    #[test]
    fn outcomes_survive_their_bytes() {
        for outcome in [Outcome::Complete, Outcome::Refused("why".to_owned())] {
            assert_eq!(Outcome::from_bytes(&outcome.to_bytes()), Some(outcome));
        }
        assert_eq!(Outcome::from_bytes(&[]), None);
        assert_eq!(Outcome::from_bytes(&[1, 2]), None);
    }
}
