//! The outcome of a rendezvous, which all ranks read.

use core::time::Duration;

use super::Rendezvous;
use super::claim::number_key;
use crate::comm::topology::Outcome;
use crate::{Error, Result};

/// How long a rank waits for another to find out who is missing.
const GRACE: Duration = Duration::from_secs(5);

impl Rendezvous<'_> {
    /// Waits for the outcome, on ranks other than 0. The first rank that times out finds the missing rank
    /// and publishes the outcome.
    pub(super) fn outcome(&self, class: &str) -> Result<Outcome> {
        let key = self.outcome_key(class);
        let read = |timeout| {
            self.store
                .get(&key, timeout)
                .and_then(|bytes| Outcome::from_bytes(&bytes).ok_or_else(|| self.unreadable(0)))
        };
        match read(self.timeout) {
            Err(Error::StoreTimeout { .. }) => {}
            other => return other,
        }
        if self.store.add(&format!("{key}/late"), 1)? != 1 {
            return match read(GRACE) {
                Err(Error::StoreTimeout { .. }) => Err(self.refuse(format!(
                    "not all of the {} ranks came within {:.1} s",
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

    /// The first rank without a peer info. Rank 0 if there is none: it has not said so.
    fn first_missing(&self, class: &str) -> Result<u32> {
        for rank in 0..self.size {
            if !self.store.check(&[&self.peer_info_key(class, rank)])? {
                return Ok(rank);
            }
        }
        Ok(0)
    }

    /// Publishes how the rendezvous has ended, unless another was first; returns what holds.
    pub(super) fn publish(&self, class: &str, outcome: Outcome) -> Result<Outcome> {
        let key = self.outcome_key(class);
        // First, so that whoever knows the end comes into the next rendezvous.
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
            // Again, because a server of PyTorch before 2.1 wakes nobody for the above.
            self.store.set(&key, &own)?;
            return Ok(outcome);
        }
        Outcome::from_bytes(&holds).ok_or_else(|| self.unreadable(0))
    }
}
