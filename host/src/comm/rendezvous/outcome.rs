//! The outcome of a rendezvous, which all ranks read.

use core::time::Duration;

use super::claim::number_key;
use super::waiting::WaitProgress;
use super::{Rendezvous, class};

use crate::store::Error as StoreError;
use crate::{Error, Result};

/// Time that a rank waits for another rank to find the missing rank.
const GRACE: Duration = Duration::from_secs(5);

/// The outcome of a rendezvous or of a barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All ranks have joined, and their options agree. No rank has failed before the barrier.
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

impl Rendezvous<'_> {
    /// Waits for the outcome, on ranks other than 0. The first rank that times out finds the
    /// missing rank and publishes the outcome.
    pub(super) fn outcome(&self, class: &str) -> Result<Outcome> {
        let key = self.outcome_key(class);
        let read = |timeout| {
            let bytes = self.get(&key, timeout)?;
            Outcome::from_bytes(&bytes).ok_or_else(|| self.unreadable(0))
        };
        let mut waiting = WaitProgress::new(self.timeout);
        loop {
            match read(waiting.slice(self.rank)) {
                Err(Error::Store(StoreError::Timeout { .. })) if waiting.is_over() => break,
                Err(Error::Store(StoreError::Timeout { .. })) => {
                    match self.look_at_first(class, &mut waiting) {
                        Err(Error::Communicator { detail, .. }) => {
                            return self.publish(class, Outcome::Refused(detail));
                        }
                        looked => looked?,
                    }
                }
                Err(error) => return Err(self.server_ended(error)),
                outcome => return outcome,
            }
        }
        if self.store.add(&format!("{key}/late"), 1)? != 1 {
            return match read(GRACE) {
                Err(Error::Store(StoreError::Timeout { .. })) => Err(self.refuse(format!(
                    "not all of the {} ranks joined within {:.1} s",
                    self.size,
                    self.timeout.as_secs_f64()
                ))),
                other => other,
            };
        }
        let missing = self.first_missing(class)?;
        let Error::Communicator { detail, .. } = self.missing(missing) else {
            unreachable!("the error of a missing rank")
        };
        self.publish(class, Outcome::Refused(detail))
    }

    /// Ends the rendezvous on all ranks, because this rank cannot publish `what`.
    pub(in crate::comm) fn withdraw(&self, what: &str, error: &Error) {
        let detail = format!("rank {} cannot take part: {error}", self.rank);
        if let Err(error) = self.publish(class(what), Outcome::Refused(detail)) {
            tracing::warn!(%error, "the other ranks wait for this one until their timeout");
        }
    }

    /// Explains the end of the store's server while this rank waited.
    fn server_ended(&self, error: Error) -> Error {
        match &error {
            Error::Store(store) if store.is_disconnect() => self.refuse(format!(
                "the store's server ended while rank {} waited for the other ranks ({error}); \
                 unless a launcher serves the store, rank 0 does: see why that ended",
                self.rank
            )),
            _ => error,
        }
    }

    /// Returns the first rank without peer info, or rank 0 if there is none: rank 0 has then not
    /// published the outcome.
    pub(super) fn first_missing(&self, class: &str) -> Result<u32> {
        for rank in 0..self.size {
            if !self.store.check(&[&self.peer_info_key(class, rank)])? {
                return Ok(rank);
            }
        }
        Ok(0)
    }

    /// Publishes the outcome of the rendezvous, unless another rank already has. Returns the valid
    /// outcome.
    pub(super) fn publish(&self, class: &str, outcome: Outcome) -> Result<Outcome> {
        let key = self.outcome_key(class);
        // Done before the outcome is published, so that a rank that has read the outcome joins the
        // next rendezvous.
        if let Some(number) = self.prefix.rsplit('/').next()
            && let Ok(next) = number.parse::<i64>().map(|number| number + 1)
        {
            let next = next.to_string();
            self.store
                .compare_set(&number_key(self.name), number.as_bytes(), next.as_bytes())?;
        }
        let own = outcome.to_bytes();
        let holds = self.store.compare_set(&key, b"", &own)?;
        if holds == own {
            // Set again, because on a server of PyTorch before 2.1 `compare_set` wakes no waiting
            // rank.
            self.store.set(&key, &own)?;
            return Ok(outcome);
        }
        Outcome::from_bytes(&holds).ok_or_else(|| self.unreadable(0))
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
