//! Waits in the store that end early: when a rank that must join has ended or has left the
//! communicator that makes the call, or when that communicator has failed or was aborted. A
//! reconfiguration usually follows a failure, so a failure of the replaced communicator does not
//! end its waits; an abort on this rank does. Another rank may abort the communicator in order to
//! leave an operation and to join the reconfiguration.
//!
//! A wait that finds a rank ended asks the store once more, and fails if the key is still missing.
//! A rank may end its process after it has left the last barrier of a call. Until then all other
//! ranks have entered that barrier, so the keys that they wait for are there.

use core::time::Duration;
use std::time::Instant;

use super::Rendezvous;
use crate::comm::Inner;
use crate::store::{self, Error as StoreError};
use crate::{EndReason, Error, Result, process};

/// First time between two looks at the other ranks. The times double: each look interrupts a wait
/// in the store, which costs the server several messages.
const FIRST_LOOK: Duration = Duration::from_millis(10);

/// Longest time between two looks.
const LONGEST_LOOK: Duration = Duration::from_millis(500);

/// Process id and start time.
type Process = (u32, u64);

/// Ranks and failures that end the waits of a rendezvous.
#[derive(Clone, Default)]
pub(in crate::comm) struct Watched<'a> {
    /// Communicator whose failure ends the waits.
    pub(in crate::comm) communicator: Option<&'a Inner>,
    /// Communicator that the rendezvous replaces, and the number of its aborts on this rank when
    /// the call began. A further abort ends the waits.
    pub(in crate::comm) replaced: Option<(&'a Inner, u64)>,
    /// The other ranks of the rendezvous on this host.
    pub(in crate::comm) members: Vec<WatchedMember>,
}

/// A rank of a rendezvous.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct WatchedMember {
    /// Rank in the rendezvous.
    pub(in crate::comm) member: u32,
    /// Rank in the communicator that makes the call.
    pub(in crate::comm) rank: u32,
    pub(in crate::comm) process: Process,
}

impl Watched<'_> {
    /// Returns the failure of the communicator that makes the call, or the abort of the
    /// communicator that the rendezvous replaces.
    pub(super) fn check(&self) -> Result<()> {
        if let Some((replaced, aborts)) = self.replaced
            && replaced.aborts() != aborts
        {
            return Err(Error::Ended {
                name: replaced.group.full_name.clone(),
                reason: EndReason::Aborted,
                detail: "aborted by the program during reconfigure".to_owned(),
            });
        }
        let Some(communicator) = self.communicator else {
            return Ok(());
        };
        // On a GPU, another rank writes the failure to device memory, and no kernel of this rank
        // runs that would report it.
        communicator.executor.look();
        communicator.check()
    }

    /// Returns true if a rank has ended or has left the communicator.
    pub(super) fn has_ended(&self) -> bool {
        let mut members = self.members.iter();
        members.any(|member| self.end_of(member).is_some())
    }

    /// Returns the reason why a rank will not join any more, if there is one.
    fn end_of(&self, member: &WatchedMember) -> Option<String> {
        let (rank, (pid, start)) = (member.member, member.process);
        if process::has_ended(pid, start) {
            return Some(format!("rank {rank} has ended (its process {pid} is gone)"));
        }
        let has_left = |inner: &Inner| inner.is_marked(member.rank);
        self.communicator.is_some_and(has_left).then(|| {
            format!("rank {rank} has left the communicator (a thread of process {pid} dropped it)")
        })
    }

    fn is_empty(&self) -> bool {
        self.communicator.is_none() && self.replaced.is_none() && self.members.is_empty()
    }
}

impl Rendezvous<'_> {
    /// Waits for a key as [`store::Store::get`], and ends early as the module describes.
    pub(super) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.read(&[key], timeout, |timeout| self.store.get(key, timeout))
    }

    /// Waits for keys as [`store::Store::multi_get`], and ends early as the module describes.
    pub(super) fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.read(keys, timeout, |timeout| self.store.multi_get(keys, timeout))
    }

    fn read<T>(
        &self,
        keys: &[&str],
        timeout: Duration,
        mut read: impl FnMut(Duration) -> store::Result<T>,
    ) -> Result<T> {
        if self.watched.is_empty() {
            return Ok(read(timeout)?);
        }
        let started = Instant::now();
        let mut look = FIRST_LOOK;
        loop {
            // Looked at before the check of the keys, which finds all that a rank has published
            // before it ended.
            if let Some(error) = self.doomed() {
                return match self.store.check(keys)? {
                    true => Ok(read(timeout)?),
                    false => Err(error),
                };
            }
            let left = timeout.saturating_sub(started.elapsed());
            match read(look.min(left).max(Duration::from_millis(1))) {
                Err(StoreError::Timeout { key, .. }) if started.elapsed() >= timeout => {
                    let seconds = timeout.as_secs_f64();
                    return Err(StoreError::Timeout { key, seconds }.into());
                }
                Err(StoreError::Timeout { .. }) => look = (2 * look).min(LONGEST_LOOK),
                result => return Ok(result?),
            }
        }
    }

    /// Returns the reason why the rendezvous cannot succeed any more, if there is one.
    fn doomed(&self) -> Option<Error> {
        let watched = &self.watched;
        if let Err(error) = watched.check() {
            return Some(error);
        }
        let ended = watched.members.iter();
        let ended: Vec<String> = ended.filter_map(|member| watched.end_of(member)).collect();
        if ended.is_empty() {
            return None;
        }
        Some(self.refuse(format!(
            "{} while rank {} waited in a call of all ranks; the others can go on by \
             Communicator::reconfigure",
            ended.join(", "),
            self.rank
        )))
    }
}
