//! Waits for ranks that have not joined: rank 0 checks that the rendezvous can still succeed, and
//! one rank reports the missing ranks.

#[cfg(test)]
use core::cell::Cell;
use core::time::Duration;
use std::time::Instant;

use super::claim::{duplicate_key, number_key};
use super::outcome::Outcome;
use super::{Rendezvous, class};
use crate::store::Error as StoreError;
use crate::{Error, Result};

/// Longest wait of rank 0 between checks that the rendezvous can still succeed.
const SLICE: Duration = Duration::from_millis(500);

/// Longest wait of other ranks between these checks. It is longer because there may be thousands of
/// ranks.
const LONG_SLICE: Duration = Duration::from_secs(8);

/// Time of the first check of every rank; the time between checks doubles.
const FIRST_SCAN: Duration = Duration::from_secs(1);

/// Time after which the missing ranks are reported to the user.
const FIRST_REPORT: Duration = Duration::from_secs(8);

/// Time for which the job may still complete although a rank was started twice: a rank of another
/// job that uses this store by mistake must not end this job.
const DUPLICATE_GRACE: Duration = Duration::from_secs(2);

#[cfg(test)]
thread_local! {
    /// [`DUPLICATE_GRACE`] of the ranks on this thread.
    static TEST_GRACE: Cell<Duration> = const { Cell::new(DUPLICATE_GRACE) };
}

/// Sets [`DUPLICATE_GRACE`] for the ranks on this thread.
#[cfg(test)]
pub(in crate::comm) fn set_duplicate_grace(grace: Duration) {
    TEST_GRACE.set(grace);
}

fn duplicate_grace() -> Duration {
    #[cfg(test)]
    return TEST_GRACE.get();
    #[cfg(not(test))]
    DUPLICATE_GRACE
}

/// Maximum number of ranks that a message names.
const MAX_NAMED: usize = 8;

/// Time that a rank waits for another rank to find the missing rank.
const GRACE: Duration = Duration::from_secs(5);

/// State of a rank's wait for the others.
pub(super) struct WaitProgress {
    started: Instant,
    timeout: Duration,
    next_scan: Duration,
}

impl WaitProgress {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            started: Instant::now(),
            timeout,
            next_scan: FIRST_SCAN,
        }
    }

    /// Returns the time that `rank` waits until its next check.
    pub(super) fn slice(&self, rank: u32) -> Duration {
        let left = self.timeout.saturating_sub(self.started.elapsed());
        let slice = match rank {
            0 => SLICE,
            _ => self.next_scan.min(LONG_SLICE),
        };
        slice.min(left).max(Duration::from_millis(1))
    }

    pub(super) fn is_over(&self) -> bool {
        self.started.elapsed() >= self.timeout
    }

    /// Returns true if a check of every rank is due.
    fn scans(&mut self) -> bool {
        let elapsed = self.started.elapsed();
        if elapsed < self.next_scan {
            return false;
        }
        while self.next_scan <= elapsed {
            self.next_scan *= 2;
        }
        true
    }

    fn reports(&self) -> bool {
        self.started.elapsed() >= FIRST_REPORT
    }
}

impl Rendezvous<'_> {
    /// Checks on rank 0, while ranks are missing, that the rendezvous can still succeed. `verify`
    /// checks the peer info of a rank that has joined.
    pub(super) fn look_at_all(
        &self,
        class: &str,
        waiting: &mut WaitProgress,
        mut verify: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let outcome = self.outcome_key(class);
        if self.store.check(&[&outcome])?
            && let Some(Outcome::Refused(detail)) = self.published(&outcome)?
        {
            return Err(self.refuse(detail));
        }
        self.look_for_duplicate(class, waiting)?;
        if !waiting.scans() {
            return Ok(());
        }
        let mut missing = Vec::new();
        for rank in 0..self.size {
            let key = self.peer_info_key(class, rank);
            if self.store.check(&[&key])? {
                verify(rank, &self.store.get(&key, self.timeout)?)?;
            } else {
                missing.push(rank);
            }
        }
        self.report(&missing, waiting);
        Ok(())
    }

    /// Checks on the other ranks that rank 0 can still publish the outcome. Only the first rank
    /// that has joined reports.
    pub(super) fn look_at_first(&self, class: &str, waiting: &mut WaitProgress) -> Result<()> {
        self.look_for_duplicate(class, waiting)?;
        if !waiting.scans() || !waiting.reports() {
            return Ok(());
        }
        let mut missing = Vec::new();
        for rank in 0..self.rank {
            if self.store.check(&[&self.peer_info_key(class, rank)])? {
                return Ok(());
            }
            missing.push(rank);
        }
        self.report(&missing, waiting);
        Ok(())
    }

    /// Fails if a rank was started twice and the rendezvous is still incomplete.
    fn look_for_duplicate(&self, class: &str, waiting: &WaitProgress) -> Result<()> {
        let key = duplicate_key(self.prefix);
        if waiting.started.elapsed() < duplicate_grace() || !self.store.check(&[&key])? {
            return Ok(());
        }
        let duplicate = match self.store.get(&key, SLICE) {
            // The key was deleted, so the rendezvous has ended.
            Err(StoreError::Timeout { .. }) => return Ok(()),
            duplicate => duplicate?,
        };
        let missing = self.first_missing(class)?;
        Err(self.refuse(format!(
            "{}, and rank {missing} has not joined",
            String::from_utf8_lossy(&duplicate)
        )))
    }

    fn report(&self, missing: &[u32], waiting: &WaitProgress) {
        if missing.is_empty() || !waiting.reports() {
            return;
        }
        crate::store::notice::warn(format_args!(
            "communicator \"{}\": rank {} has waited {:.0} s for {}, which {} not joined; it waits \
             up to {:.0} s{}",
            self.name,
            self.rank,
            waiting.started.elapsed().as_secs_f64(),
            ranks(missing, self.size),
            if missing.len() == 1 { "has" } else { "have" },
            waiting.timeout.as_secs_f64(),
            self.earlier()
        ));
    }

    /// Waits, on rank 0, until the others have read the reason of the failure, because the store
    /// may end with this process. On the other ranks, confirms the read.
    pub(super) fn linger(&self, class: &str) {
        const LIMIT: Duration = Duration::from_secs(1);
        let started = Instant::now();
        let key = format!("{}/read", self.outcome_key(class));
        if self.rank != 0 {
            let _ = self.store.add(&key, 1);
            return;
        }
        let joined = |rank: &u32| {
            let found = self.store.check(&[&self.peer_info_key(class, *rank)]);
            found.unwrap_or(false)
        };
        let joined = (1..self.size).filter(joined).count() as i64;
        while started.elapsed() < LIMIT {
            match self.store.add(&key, 0) {
                Ok(read) if read < joined => std::thread::sleep(Duration::from_millis(5)),
                _ => return,
            }
        }
    }

    /// Returns the outcome under `key`, which must exist.
    fn published(&self, key: &str) -> Result<Option<Outcome>> {
        match self.store.get(key, self.timeout) {
            Ok(bytes) => Ok(Outcome::from_bytes(&bytes)),
            Err(StoreError::Timeout { .. }) => Ok(None),
            Err(other) => Err(other.into()),
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
                 unless a launcher serves the store, rank 0 serves it: check why rank 0 ended",
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

/// Formats the names of some of `size` ranks.
fn ranks(some: &[u32], size: u32) -> String {
    let names: Vec<_> = some.iter().take(MAX_NAMED).map(u32::to_string).collect();
    let more = some.len().saturating_sub(MAX_NAMED);
    let more = if more > 0 {
        format!(" and {more} more")
    } else {
        String::new()
    };
    let noun = if some.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}{more} of {size}", names.join(", "))
}
