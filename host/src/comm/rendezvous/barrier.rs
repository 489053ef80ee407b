//! Barriers in the store, in which ranks also agree on success. The last barrier of a rendezvous
//! deletes the rendezvous' keys.

use core::time::Duration;
use std::time::Instant;

use super::claim::duplicate_key;
use super::outcome::Outcome;
use super::{Rendezvous, class};
use crate::store::Error as StoreError;
use crate::{Error, Result};

/// Time that the other ranks have to leave a barrier after the process of one of them has ended.
const LEAVING: Duration = Duration::from_secs(30);

/// Added to a barrier's counter by a rank that has failed. The lower bits count the ranks.
const FAILED: i64 = 1 << 32;

/// Time between two looks at the processes of the other ranks.
const LOOK: Duration = Duration::from_millis(500);

impl Rendezvous<'_> {
    /// Runs the last barrier of a rendezvous and, after all ranks have read its keys, deletes them.
    pub(in crate::comm) fn end(
        &self,
        what: &str,
        published: &str,
        host: &str,
        agreed: &[&str],
    ) -> Result<()> {
        let class = class(published);
        self.barrier_then(what, || {
            // A key that cannot be deleted remains, but no later rendezvous uses it.
            let _ = self.store.delete(&self.peer_info_key(class, self.rank));
            let _ = self
                .store
                .delete(&format!("{}/claim/{}", self.prefix, self.rank));
            let _ = self.store.delete(&self.host(class, host));
            if self.rank == 0 {
                let _ = self.store.delete(&self.outcome_key(class));
                let _ = self.store.delete(&duplicate_key(self.prefix));
                for key in agreed {
                    let _ = self.store.delete(&format!("{}/{key}", self.prefix));
                }
            }
        })
    }

    /// Waits until all ranks have entered, then calls `clean`. Rank 0 also waits until all others
    /// have left, because its process may serve the store and exit directly afterwards.
    pub(in crate::comm) fn barrier_then(&self, what: &str, clean: impl FnOnce()) -> Result<()> {
        self.agree(what, None, clean).map(drop)
    }

    /// Waits and cleans like [`Self::barrier_then`]. `failure` is the reason why this rank has
    /// failed, if it has. Returns the reason of one failed rank, the same on every rank, or `None`
    /// if no rank has failed.
    pub(in crate::comm) fn agree(
        &self,
        what: &str,
        failure: Option<String>,
        clean: impl FnOnce(),
    ) -> Result<Option<String>> {
        if self.size == 1 {
            clean();
            return Ok(failure);
        }
        let key = format!("{}/{what}", self.prefix);
        let started = Instant::now();
        let [failed, all, gone, left] =
            ["failed", "all", "gone", "left"].map(|name| format!("{key}/{name}"));
        let mut step = 1;
        if let Some(failure) = &failure {
            // Written before this rank enters, so that the last rank finds it.
            self.store.set(&failed, failure.as_bytes())?;
            step += FAILED;
        }
        let entered = self.store.add(&key, step)?;
        let outcome = if entered % FAILED == i64::from(self.size) {
            let outcome = match entered < FAILED {
                true => Outcome::Complete,
                false => {
                    let reason = self.store.get(&failed, self.timeout)?;
                    let _ = self.store.delete(&failed);
                    Outcome::Refused(String::from_utf8_lossy(&reason).into_owned())
                }
            };
            self.store.set(&all, &outcome.to_bytes())?;
            outcome
        } else {
            let outcome = self.await_key(&all, started)?;
            Outcome::from_bytes(&outcome).ok_or_else(|| self.unreadable(0))?
        };
        clean();
        if self.rank == 0 {
            if self.await_others(&gone, started)? {
                for key in [&key, &all, &left, &gone] {
                    let _ = self.store.delete(key);
                }
            }
        } else if self.store.add(&left, 1)? == i64::from(self.size) - 1 {
            // The result is ignored: rank 0 may exit, and the store with it, as soon as it sees the
            // key.
            let _ = self.store.set(&gone, b"1");
        }
        Ok(match outcome {
            Outcome::Complete => None,
            Outcome::Refused(reason) => Some(reason),
        })
    }

    /// Waits, on rank 0, until the other ranks have left the barrier, and returns true. A rank may
    /// end its process as soon as it has left. If one has ended, and the others do not leave within
    /// [`LEAVING`], it may have ended before it left. The barrier itself has succeeded then, and
    /// the function returns false.
    fn await_others(&self, gone: &str, started: Instant) -> Result<bool> {
        let mut ended = None;
        loop {
            if ended.is_none() && self.watched.has_ended() {
                ended = Some(Instant::now());
            }
            match self.store.wait(&[gone], LOOK) {
                Err(StoreError::Timeout { .. }) => {}
                waited => return Ok(waited.map(|()| true)?),
            }
            if ended.is_some_and(|ended| ended.elapsed() > LEAVING) {
                return Ok(false);
            }
            self.watched.check()?;
            if started.elapsed() > self.timeout {
                return Err(self.late(started));
            }
        }
    }

    fn await_key(&self, key: &str, started: Instant) -> Result<Vec<u8>> {
        self.get(key, self.timeout).map_err(|error| match error {
            Error::Store(StoreError::Timeout { .. }) => self.late(started),
            other => other,
        })
    }

    fn late(&self, started: Instant) -> Error {
        self.refuse(format!(
            "not all of the {} ranks joined within {:.1} s",
            self.size,
            started.elapsed().as_secs_f64()
        ))
    }
}
