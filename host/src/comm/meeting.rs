//! Ranks that meet in a store: they exchange memory, agree, and wait for each other.
//!
//! What a rank sends and gets does not grow with the number of ranks, but on rank 0. Each publishes its
//! card. Rank 0 reads them all, compares, publishes for each host which ranks are there, and then its
//! [`Verdict`]: that all have come, or why there is no meeting. The others wait for that one value, and
//! read the cards of their own host (of all hosts, where the ranks are in one NVLink domain).
//!
//! The meetings of one name are numbered. Whoever finds that one has ended, well or not, moves the
//! number on, so that a meeting that failed is not in the way of the next.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::path::Path;
use std::time::Instant;

use super::directory::{Directory, Neighbours, Site, Verdict};
use crate::cpu::SegmentDescriptor;
use crate::device::Device;
use crate::memory::{Memory, MemoryDescriptor};
use crate::store::Store;
use crate::{Error, Result};

/// Cards that are read in one request.
const BATCH: u32 = 1024;

/// How long a rank waits for another to find out who is missing.
const GRACE: Duration = Duration::from_secs(5);

/// Ranks that meet in a store.
pub(super) struct Meeting<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) prefix: &'a str,
    pub(super) name: &'a str,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) timeout: Duration,
}

/// What a rank publishes of itself, as another one reads it.
#[derive(Debug)]
pub(super) struct Card {
    pub(super) rank: u32,
    pub(super) memory: MemoryDescriptor,
    /// Whether the rank is on the reader's host: else there are no processes and descriptors of it.
    pub(super) is_here: bool,
}

/// A place among those who meet under a name.
#[derive(Debug)]
pub(super) struct Seat {
    /// What the keys of this meeting begin with.
    pub(super) prefix: String,
}

impl Seat {
    /// Takes the seat of `rank` in the present meeting of `name`.
    pub(super) fn take(store: &dyn Store, name: &str, rank: u32, host: &str) -> Result<Self> {
        /// Tells threads of one process from each other.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let own = format!("{}/{count}/{host}", std::process::id());
        loop {
            let number = store.add(&number_key(name), 0)?;
            let prefix = format!("fusewire/{name}/{number}");
            let key = format!("{prefix}/seat/{rank}");
            let mut there = store.compare_set(&key, b"", own.as_bytes())?;
            if there != own.as_bytes() && is_dead(&there, host) {
                there = store.compare_set(&key, &there, own.as_bytes())?;
            }
            // The meeting may have ended before the seat was taken; then there is a next one.
            let taken = there == own.as_bytes();
            if store.add(&number_key(name), 0)? != number {
                if taken {
                    let _ = store.delete(&key);
                }
                continue;
            }
            if taken {
                return Ok(Self { prefix });
            }
            let there = String::from_utf8_lossy(&there).into_owned();
            let process = there.split('/').next().unwrap_or_default();
            return Err(Error::Communicator {
                name: name.to_owned(),
                detail: format!(
                    "rank {rank} is taken, by process {process} ({there}): each rank joins once"
                ),
            });
        }
    }
}

fn number_key(name: &str) -> String {
    format!("fusewire/{name}/number")
}

/// Whether a seat is that of a process of this host which is no more.
fn is_dead(seat: &[u8], host: &str) -> bool {
    let Ok(seat) = str::from_utf8(seat) else {
        return false;
    };
    let mut parts = seat.splitn(3, '/');
    let (process, _, theirs) = (parts.next(), parts.next(), parts.next());
    theirs == Some(host)
        && process
            .and_then(|process| process.parse::<u32>().ok())
            .is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists())
}

impl Meeting<'_> {
    /// Publishes this rank's segment and maps everybody's. `what` holds whatever must agree: a rank with
    /// something else is told so.
    pub(super) fn share(&self, device: Device, what: &str, own: Memory) -> Result<Vec<Memory>> {
        let site = Site::of(device)?;
        let (elsewhere, cards) = self.gather(what, &own.descriptor()?, &site)?;
        if let Some((rank, theirs)) = elsewhere {
            return Err(self.refuse(format!(
                "rank {rank} is on another host ({theirs}) than rank {} ({}): memory cannot be shared",
                self.rank, site.host
            )));
        }
        self.open(device, own, cards)
    }

    /// Maps everybody's segment.
    pub(super) fn open(
        &self,
        device: Device,
        own: Memory,
        cards: Vec<Card>,
    ) -> Result<Vec<Memory>> {
        let mut all = Vec::with_capacity(self.size as usize);
        for card in cards {
            all.push(if card.rank == self.rank {
                own.clone()
            } else {
                Memory::open(device, &card.memory, card.rank)?
            });
        }
        Ok(all)
    }

    /// Publishes this rank's card; returns a rank that cannot be reached, if there is one, and the cards of those that
    /// can, in the order of ranks: of this rank's host, or of all hosts of its NVLink domain.
    #[expect(clippy::type_complexity, reason = "one use")]
    pub(super) fn gather(
        &self,
        what: &str,
        own: &MemoryDescriptor,
        site: &Site,
    ) -> Result<(Option<(u32, String)>, Vec<Card>)> {
        let class = class(what);
        let descriptor = own.to_bytes();
        let mut card = (descriptor.len() as u32).to_le_bytes().to_vec();
        card.extend(descriptor);
        card.extend((what.len() as u32).to_le_bytes());
        card.extend(what.as_bytes());
        card.extend(site.to_bytes());
        self.store.set(&self.card(class, self.rank), &card)?;
        let verdict = if self.rank == 0 {
            let verdict = match self.collect(class, what, own) {
                Ok(directory) => {
                    self.publish_hosts(class, &directory)?;
                    Verdict::Complete
                }
                Err(Error::Communicator { detail, .. }) => Verdict::Refused(detail),
                Err(other) => return Err(other),
            };
            self.publish(class, verdict)?
        } else {
            self.verdict(class)?
        };
        if let Verdict::Refused(detail) = verdict {
            return Err(self.refuse(detail));
        }
        let neighbours = self
            .store
            .get(&self.host(class, &site.host), self.timeout)?;
        let neighbours = Neighbours::from_bytes(&neighbours).ok_or_else(|| self.unreadable(0))?;
        let mut cards = Vec::new();
        for (first, count) in neighbours.runs {
            self.read_cards(class, first, count, |rank, card| {
                let (memory, _, theirs) = parse(card).ok_or_else(|| self.unreadable(rank))?;
                let is_here = theirs.host == site.host;
                cards.push(Card {
                    rank,
                    memory,
                    is_here,
                });
                Ok(())
            })?;
        }
        // All ranks see the same cards, so all of them refuse.
        let local = |card: &&Card| !card.memory.is_for_other_hosts();
        if cards.iter().any(|card| !card.is_here)
            && let Some(card) = cards.iter().find(local)
        {
            return Err(self.refuse(format!(
                "the memory of rank {} can be shared on its own host only, and the ranks are on several hosts of one \
                 NVLink domain, which takes memory with fabric handles: allocate it by Communicator::alloc",
                card.rank
            )));
        }
        Ok((neighbours.elsewhere, cards))
    }

    /// Rank 0: reads all cards and compares them with its own.
    fn collect(&self, class: &str, what: &str, own: &MemoryDescriptor) -> Result<Directory> {
        let mut directory = Directory::default();
        self.read_cards(class, 0, self.size, |rank, card| {
            let (descriptor, theirs, site) = parse(card).ok_or_else(|| self.unreadable(rank))?;
            if theirs != what {
                return Err(self.refuse(format!(
                    "rank {rank} has other options (or calls) than rank 0: all agreed options \
                     must be equal on all ranks"
                )));
            }
            if descriptor.bytes() != own.bytes() {
                return Err(self.refuse(format!(
                    "rank {rank} contributes {} bytes, rank 0 {}: sizes must be equal",
                    descriptor.bytes(),
                    own.bytes()
                )));
            }
            directory.push(&site);
            Ok(())
        })?;
        Ok(directory)
    }

    /// Rank 0: tells each host which ranks are there.
    fn publish_hosts(&self, class: &str, directory: &Directory) -> Result<()> {
        let values: Vec<_> = directory
            .hosts()
            .map(|(host, neighbours)| (self.host(class, host), neighbours.to_bytes()))
            .collect();
        for batch in values.chunks(BATCH as usize) {
            let pairs: Vec<_> = batch
                .iter()
                .map(|(key, value)| (key.as_str(), value.as_slice()))
                .collect();
            self.store.multi_set(&pairs)?;
        }
        Ok(())
    }

    /// Reads the cards of `count` ranks from `first` on, as they come.
    fn read_cards(
        &self,
        class: &str,
        first: u32,
        count: u32,
        mut each: impl FnMut(u32, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let started = Instant::now();
        let mut from = first;
        while from < first + count {
            let to = (from + BATCH).min(first + count);
            let keys: Vec<_> = (from..to).map(|rank| self.card(class, rank)).collect();
            let keys: Vec<_> = keys.iter().map(String::as_str).collect();
            let left = self.timeout.saturating_sub(started.elapsed());
            let cards = self
                .store
                .multi_get(&keys, left.max(Duration::from_millis(1)))
                .map_err(|error| match error {
                    // A prefix of the store may precede the key.
                    Error::StoreTimeout { key, .. } => {
                        let missing = keys.iter().position(|known| key.ends_with(known));
                        self.missing(from + missing.unwrap_or_default() as u32)
                    }
                    other => other,
                })?;
            for (rank, card) in (from..to).zip(&cards) {
                each(rank, card)?;
            }
            from = to;
        }
        Ok(())
    }

    /// Other ranks: waits for the verdict. The first whose time is over finds out who is missing, and
    /// tells the others.
    fn verdict(&self, class: &str) -> Result<Verdict> {
        let key = self.verdict_key(class);
        let read = |timeout| {
            self.store
                .get(&key, timeout)
                .and_then(|bytes| Verdict::from_bytes(&bytes).ok_or_else(|| self.unreadable(0)))
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
        self.publish(class, Verdict::Refused(detail))
    }

    /// The first rank without a card. Rank 0 if there is none: it has not said so.
    fn first_missing(&self, class: &str) -> Result<u32> {
        for rank in 0..self.size {
            if !self.store.check(&[&self.card(class, rank)])? {
                return Ok(rank);
            }
        }
        Ok(0)
    }

    /// Publishes how the meeting has ended, unless another was first; returns what holds.
    fn publish(&self, class: &str, verdict: Verdict) -> Result<Verdict> {
        let key = self.verdict_key(class);
        // First, so that whoever knows the end comes into the next meeting.
        if let Some(number) = self.prefix.rsplit('/').next()
            && let Ok(next) = number.parse::<i64>().map(|number| number + 1)
        {
            let next = next.to_string();
            self.store
                .compare_set(&number_key(self.name), number.as_bytes(), next.as_bytes())?;
        }
        let own = verdict.to_bytes();
        let holds = self.store.compare_set(&key, b"", &own)?;
        if holds == own {
            // Again, because a server of PyTorch before 2.1 wakes nobody for the above.
            self.store.set(&key, &own)?;
            return Ok(verdict);
        }
        Verdict::from_bytes(&holds).ok_or_else(|| self.unreadable(0))
    }

    fn card(&self, class: &str, rank: u32) -> String {
        format!("{}/{class}/{rank}", self.prefix)
    }

    fn host(&self, class: &str, host: &str) -> String {
        format!("{}/{class}/host/{host}", self.prefix)
    }

    fn verdict_key(&self, class: &str) -> String {
        format!("{}/{class}/all", self.prefix)
    }

    /// Every rank's bytes.
    pub(super) fn exchange(&self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let key = |rank: u32| format!("{}/{what}/{rank}", self.prefix);
        // Not nothing: some stores know no empty value.
        let mut value = vec![0];
        value.extend(own);
        self.store.set(&key(self.rank), &value)?;
        let keys: Vec<_> = (0..self.size).map(key).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let mut all = self.store.multi_get(&keys, self.timeout)?;
        for value in &mut all {
            if !value.is_empty() {
                value.remove(0);
            }
        }
        Ok(all)
    }

    /// What rank 0 says, for decisions that must be the same on all ranks.
    pub(super) fn agree(&self, what: &str, own: bool) -> Result<bool> {
        Ok(self.told(what, || vec![u8::from(own)])? == [1])
    }

    /// The bytes, not none, that rank 0 has for all.
    pub(super) fn told(&self, what: &str, own: impl FnOnce() -> Vec<u8>) -> Result<Vec<u8>> {
        let key = format!("{}/{what}", self.prefix);
        if self.rank == 0 {
            let own = own();
            self.store.set(&key, &own)?;
            return Ok(own);
        }
        self.store.get(&key, self.timeout)
    }

    /// Waits until all ranks are here; rank 0 also until all others know it, because its process may host
    /// the store and end right after.
    pub(super) fn barrier(&self, what: &str) -> Result<()> {
        self.barrier_then(what, || ())
    }

    /// The last barrier of a meeting: all have read what there was to read, and it is deleted.
    pub(super) fn end(
        &self,
        what: &str,
        published: &str,
        host: &str,
        agreed: &[&str],
    ) -> Result<()> {
        let class = class(published);
        self.barrier_then(what, || {
            // What cannot be deleted stays; it is in nobody's way.
            let _ = self.store.delete(&self.card(class, self.rank));
            let _ = self
                .store
                .delete(&format!("{}/seat/{}", self.prefix, self.rank));
            let _ = self.store.delete(&self.host(class, host));
            if self.rank == 0 {
                let _ = self.store.delete(&self.verdict_key(class));
                for key in agreed {
                    let _ = self.store.delete(&format!("{}/{key}", self.prefix));
                }
            }
        })
    }

    /// `clean` runs when all ranks are here, and before the store may go.
    pub(super) fn barrier_then(&self, what: &str, clean: impl FnOnce()) -> Result<()> {
        if self.size == 1 {
            clean();
            return Ok(());
        }
        let key = format!("{}/{what}", self.prefix);
        let started = Instant::now();
        let (all, gone, left) = (
            format!("{key}/all"),
            format!("{key}/gone"),
            format!("{key}/left"),
        );
        if self.store.add(&key, 1)? == i64::from(self.size) {
            self.store.set(&all, b"1")?;
        } else {
            self.await_key(&all, started)?;
        }
        clean();
        if self.rank == 0 {
            self.await_key(&gone, started)?;
            for key in [&key, &all, &left, &gone] {
                let _ = self.store.delete(key);
            }
        } else if self.store.add(&left, 1)? == i64::from(self.size) - 1 {
            // If rank 0 sees the key it may leave at once, with the store: the answer does not matter.
            let _ = self.store.set(&gone, b"1");
        }
        Ok(())
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

    fn missing(&self, rank: u32) -> Error {
        self.refuse(format!(
            "rank {rank} did not come within {:.1} s",
            self.timeout.as_secs_f64()
        ))
    }

    fn unreadable(&self, rank: u32) -> Error {
        self.refuse(format!("rank {rank} published something else"))
    }

    fn refuse(&self, detail: String) -> Error {
        Error::Communicator {
            name: self.name.to_owned(),
            detail,
        }
    }
}

/// Meets as [`Communicator::new`](super::Communicator::new) does, on the pretended host `host`, without
/// mapping memory; returns how many ranks are on it. For measurements.
///
/// # Errors
/// As [`Communicator::new`](super::Communicator::new).
#[doc(hidden)]
pub fn rehearse_meeting(
    store: &dyn Store,
    name: &str,
    (rank, size): (u32, u32),
    host: &str,
    timeout: Duration,
) -> Result<usize> {
    let seat = Seat::take(store, name, rank, host)?;
    let meeting = Meeting {
        store,
        prefix: &seat.prefix,
        name,
        rank,
        size,
        timeout,
    };
    let own = MemoryDescriptor::Host(SegmentDescriptor {
        pid: std::process::id(),
        fd: rank,
        bytes: 1,
        inode: 1,
        start_time: 1,
    });
    let (_, cards) = meeting.gather("pad-rehearsal", &own, &Site::on_host(host))?;
    meeting.agree("crowded", true)?;
    meeting.end("mapped", "pad-rehearsal", host, &["crowded"])?;
    Ok(cards.len())
}

/// The key of a publication: without the hash of what must agree, so that ranks that differ meet.
fn class(what: &str) -> &str {
    what.strip_prefix("pad-").map_or(what, |_| "pad")
}

fn parse(card: &[u8]) -> Option<(MemoryDescriptor, &str, Site)> {
    let (length, rest) = card.split_at_checked(4)?;
    let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
    let (descriptor, rest) = rest.split_at_checked(length)?;
    let (length, rest) = rest.split_at_checked(4)?;
    let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
    let (what, site) = rest.split_at_checked(length)?;
    let descriptor = MemoryDescriptor::from_bytes(descriptor)?;
    Some((
        descriptor,
        str::from_utf8(what).ok()?,
        Site::from_bytes(site)?,
    ))
}
