//! Ranks that meet in a store: they exchange memory, agree, and wait for each other.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use crate::bootstrap::host_id;
use crate::cpu::{Segment, SegmentDescriptor};
use crate::store::Store;
use crate::{Error, Result};

/// Ranks that meet in a store.
pub(super) struct Meeting<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) prefix: &'a str,
    pub(super) name: &'a str,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) timeout: Duration,
}

impl Meeting<'_> {
    /// Publishes this rank's segment and maps everybody's. `what` holds whatever must agree: a rank with
    /// something else is told so.
    pub(super) fn share(&self, what: &str, own: Arc<Segment>) -> Result<Vec<Arc<Segment>>> {
        let key = |rank: u32| format!("{}/{}/{rank}", self.prefix, class(what));
        let mut card = own.descriptor().to_bytes().to_vec();
        let host = host_id()?;
        card.extend((what.len() as u32).to_le_bytes());
        card.extend(what.as_bytes());
        card.extend(host.as_bytes());
        self.store.set(&key(self.rank), &card)?;
        let mut all = Vec::with_capacity(self.size as usize);
        for rank in 0..self.size {
            if rank == self.rank {
                all.push(Arc::clone(&own));
                continue;
            }
            let card = self
                .store
                .get(&key(rank), self.timeout)
                .map_err(|error| match error {
                    Error::StoreTimeout { .. } => self.refuse(format!(
                        "rank {rank} did not come within {:.1} s",
                        self.timeout.as_secs_f64()
                    )),
                    other => other,
                })?;
            let (descriptor, theirs, their_host) = parse(&card)
                .ok_or_else(|| self.refuse(format!("rank {rank} published something else")))?;
            if theirs != what {
                return Err(self.refuse(format!(
                    "rank {rank} has other options (or calls) than rank {}: all agreed options \
                     must be equal on all ranks",
                    self.rank
                )));
            }
            if their_host != host {
                return Err(self.refuse(format!(
                    "rank {rank} is on another host ({their_host}) than rank {} ({host}): memory \
                     cannot be shared, and there is no network transport yet",
                    self.rank
                )));
            }
            if descriptor.bytes != own.bytes() {
                return Err(self.refuse(format!(
                    "rank {rank} contributes {} bytes, rank {} {}: sizes must be equal",
                    descriptor.bytes,
                    self.rank,
                    own.bytes()
                )));
            }
            all.push(Segment::open(&descriptor, rank)?);
        }
        Ok(all)
    }

    /// What rank 0 says, for decisions that must be the same on all ranks.
    pub(super) fn agree(&self, what: &str, own: bool) -> Result<bool> {
        let key = format!("{}/{what}", self.prefix);
        if self.rank == 0 {
            self.store.set(&key, &[u8::from(own)])?;
            return Ok(own);
        }
        Ok(self.store.get(&key, self.timeout)? == [1])
    }

    /// Waits until all ranks are here; rank 0 also until all others know it, because its process may host
    /// the store and end right after.
    pub(super) fn barrier(&self, what: &str) -> Result<()> {
        if self.size == 1 {
            return Ok(());
        }
        let key = format!("{}/{what}", self.prefix);
        let started = Instant::now();
        let (all, gone) = (format!("{key}/all"), format!("{key}/gone"));
        if self.store.add(&key, 1)? == i64::from(self.size) {
            self.store.set(&all, b"1")?;
        } else {
            self.await_key(&all, started)?;
        }
        if self.rank == 0 {
            self.await_key(&gone, started)
        } else if self.store.add(&format!("{key}/left"), 1)? == i64::from(self.size) - 1 {
            // If rank 0 sees the key it may leave at once, with the store: the answer does not matter.
            let _ = self.store.set(&gone, b"1");
            Ok(())
        } else {
            Ok(())
        }
    }

    fn await_key(&self, key: &str, started: Instant) -> Result<()> {
        self.store
            .wait(&[key], self.timeout)
            .map_err(|error| match error {
                Error::StoreTimeout { .. } => self.refuse(format!(
                    "not all of the {} ranks came within {:.1} s",
                    self.size,
                    started.elapsed().as_secs_f64()
                )),
                other => other,
            })
    }

    fn refuse(&self, detail: String) -> Error {
        Error::Communicator {
            name: self.name.to_owned(),
            detail,
        }
    }
}

/// The key of a publication: without the hash of what must agree, so that ranks that differ meet.
fn class(what: &str) -> &str {
    what.strip_prefix("pad-").map_or(what, |_| "pad")
}

fn parse(card: &[u8]) -> Option<(SegmentDescriptor, &str, &str)> {
    let (descriptor, rest) = card.split_at_checked(SegmentDescriptor::ENCODED_BYTES)?;
    let (length, rest) = rest.split_at_checked(4)?;
    let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
    let (what, host) = rest.split_at_checked(length)?;
    let descriptor = SegmentDescriptor::from_bytes(descriptor).ok()?;
    Some((
        descriptor,
        str::from_utf8(what).ok()?,
        str::from_utf8(host).ok()?,
    ))
}
