//! Collective calls that run on the host only: ranks share memory, exchange bytes or wait for each
//! other through the store.
//!
//! A host call has one outcome on all ranks, or it stops the communicator. If a step can fail on
//! one rank only, such as an allocation, its result is an argument of the next step in which all
//! ranks take part. The last step is [`HostCall::agreed`], which fails on all ranks if one has
//! failed. Before this step, no operation can use a new window, so each rank can remove it without
//! waiting for the others. If an access to the store fails, the other ranks may have continued, so
//! the communicator stops.

use core::cell::RefCell;

use fusewire_device::layout::MAX_WINDOWS;

use super::network::Network;
use super::rendezvous::{Rendezvous, Watched};
use super::windows::{ReservedWindow, WindowPart, WindowParts};
use super::{Communicator, Inner};
use crate::memory::{Memory, MemoryDescriptor};
use crate::{Error, Result};

/// A collective call that runs on the host. All ranks take part in the same steps.
pub(super) struct HostCall<'a> {
    pub(super) comm: &'a Communicator,
    operation: &'static str,
    /// Prefix of the keys of this call.
    prefix: String,
    /// Keys of this rank that remain until the call ends.
    published: RefCell<Vec<String>>,
}

impl Communicator {
    /// Begins a host call. All ranks must call this together. The call uses one number, even if a
    /// rank does not complete all steps, so that the keys of later calls are equal on all ranks.
    pub(super) fn host_call(&self, operation: &'static str) -> HostCall<'_> {
        let group = &self.inner.group;
        HostCall {
            comm: self,
            operation,
            prefix: format!("{}/{operation}-{}", group.prefix, group.next_host_call()),
            published: RefCell::default(),
        }
    }

    /// Returns the view of the ranks whose keys start with `prefix`.
    pub(super) fn rendezvous<'a>(&'a self, prefix: &'a str) -> Rendezvous<'a> {
        let inner = &*self.inner;
        Rendezvous {
            store: &*inner.group.store,
            prefix,
            name: &inner.group.full_name,
            rank: inner.group.rank,
            size: inner.group.size,
            timeout: self.timeout(),
            watched: Watched {
                communicator: Some(inner),
                replaced: None,
                members: inner.group.watched_members(0..inner.group.size),
            },
        }
    }
}

impl<'a> HostCall<'a> {
    /// Returns the bytes of every rank. Stops the communicator on failure.
    pub(super) fn exchange(&self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let rendezvous = self.comm.rendezvous(&self.prefix);
        let key = rendezvous.exchange_key(what, self.comm.rank());
        self.published.borrow_mut().push(key);
        rendezvous
            .exchange(what, own)
            .inspect_err(|error| self.comm.inner.stop(error.clone()))
    }

    /// Ends the call with this rank's result. Returns the result if no rank has failed; otherwise
    /// this rank's error or that of another rank. Stops the communicator if the ranks cannot agree
    /// on the outcome.
    pub(super) fn agreed<T>(self, result: Result<T>) -> Result<T> {
        let inner = &*self.comm.inner;
        let store = &*inner.group.store;
        let failure = result.as_ref().err().map(|error| self.failure(error));
        let outcome = self
            .comm
            .rendezvous(&self.prefix)
            .agree("end", failure, || {
                for key in self.published.take() {
                    // A key that cannot be deleted remains, but no later call uses it.
                    let _ = store.delete(&key);
                }
            });
        match outcome {
            Ok(None) => result,
            Ok(Some(reason)) => {
                let (reason, stops) = match reason.strip_prefix(STOPPED) {
                    Some(reason) => (reason, true),
                    None => (reason.as_str(), false),
                };
                let error = inner.group.error(reason);
                if stops {
                    // Done before `result` is dropped, which keeps its windows in this case.
                    inner.stop(error.clone());
                }
                result.and(Err(error))
            }
            Err(error) => {
                // Done before `result` is dropped, which keeps its windows in this case.
                inner.stop(error.clone());
                Err(error)
            }
        }
    }

    /// Returns the message of the other ranks if this rank has failed.
    fn failure(&self, error: &Error) -> String {
        let (operation, rank) = (self.operation, self.comm.rank());
        if self.comm.inner.check().is_err() {
            return format!("{STOPPED}{operation} failed on rank {rank}: {error}");
        }
        format!(
            "{operation} failed on rank {rank}: {error}; no rank has the window, and the call can \
             be repeated"
        )
    }

    /// Shares this rank's `parts` with all ranks, and reserves a window for each part. Window i has
    /// `bytes[i]` bytes on each rank. A rank that has no parts passes the reason. The parts must
    /// live until [`Self::agreed`].
    pub(super) fn add_windows(
        &self,
        parts: Result<Vec<WindowPart>>,
        bytes: &[u64],
    ) -> Result<NewWindows<'a>> {
        let comm: &'a Communicator = self.comm;
        let (inner, windows) = (&*comm.inner, &comm.inner.windows);
        let parts = parts.and_then(|parts| match windows.count() + bytes.len() > MAX_WINDOWS {
            true => Err(inner.group.error(format!(
                "{} of {MAX_WINDOWS} windows are in use, and this call needs {}; free windows, end \
                 registrations, or allocate fewer and larger tensors and slice them",
                windows.count(),
                bytes.len()
            ))),
            false => Ok(parts),
        });
        let shared = self.share(parts, bytes);
        let mut new = NewWindows {
            inner,
            reserved: Vec::new(),
        };
        let mut failed = None;
        // A rank that has failed takes part in the exchanges of multicast objects.
        for (at, bytes) in bytes.iter().enumerate() {
            let parts = shared.as_ref().map(|shared| &shared[at]);
            let own = parts.map(|parts| parts[comm.rank() as usize].as_ref());
            let multicast = self.multicast(at, own.ok().flatten());
            let reserved = multicast.and_then(|multicast| {
                let parts = parts.map_err(Clone::clone)?.clone();
                let own = parts[comm.rank() as usize].as_ref();
                let coarse = own.is_some_and(|(memory, _)| comm.is_coarse(memory));
                let address = multicast.as_ref().map_or(0, |multicast| multicast.address);
                let window = windows.reserve(comm.rank(), parts, *bytes, address, coarse)?;
                if let Some(multicast) = multicast {
                    windows.hold(window.id, multicast);
                }
                Ok(window)
            });
            match reserved {
                Ok(reserved) => new.reserved.push(reserved),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(new), Err)
    }

    /// Publishes this rank's parts, or the reason why it has none, and maps the parts of all ranks.
    /// Returns the parts of all ranks for each window.
    fn share(&self, own: Result<Vec<WindowPart>>, bytes: &[u64]) -> Result<Vec<WindowParts>> {
        let own = own.and_then(|own| Ok((encode(&own)?, own)));
        let message = match &own {
            Ok((message, _)) => message.clone(),
            Err(error) => [&[REFUSED], self.failure(error).as_bytes()].concat(),
        };
        let messages = self.exchange("parts", &message)?;
        let (_, own) = own?;
        let inner = &*self.comm.inner;
        let mut described = Vec::new();
        for (rank, message) in (0..).zip(&messages) {
            if let Some((&REFUSED, reason)) = message.split_first() {
                let reason = String::from_utf8_lossy(reason);
                return Err(inner.group.error(reason.trim_start_matches(STOPPED)));
            }
            described.push(decode(message, bytes.len()).ok_or_else(|| {
                let detail = format!("the message of rank {rank} cannot be decoded");
                inner.group.error(detail)
            })?);
        }
        // All ranks read the same descriptors, so all of them refuse.
        let is_local = |parts: &Vec<(MemoryDescriptor, u64)>| {
            parts.iter().any(|(memory, _)| !memory.is_for_other_hosts())
        };
        let processes = &inner.group.processes;
        let network = inner.executor.network.as_ref();
        let maps = |rank| inner.executor.reaches(rank) || network.is_none_or(Network::maps_all);
        if network.is_none()
            && processes.iter().any(Option::is_none)
            && let Some(rank) = described.iter().position(is_local)
        {
            return Err(inner.group.error(format!(
                "the memory of rank {rank} can be shared on its own host only, and the ranks are \
                 on several hosts of one NVLink domain, which requires fabric handles: allocate \
                 it with Communicator::alloc"
            )));
        }
        let mut all: Vec<WindowParts> = vec![Vec::new(); bytes.len()];
        for (rank, theirs) in (0..).zip(described) {
            for (at, (descriptor, offset)) in theirs.into_iter().enumerate() {
                let end = offset.checked_add(bytes[at]);
                if end.is_none_or(|end| end > descriptor.bytes()) {
                    return Err(Error::PeerSegment {
                        rank,
                        detail: format!(
                            "its part of {} bytes at offset {offset} exceeds its memory of {}",
                            bytes[at],
                            descriptor.bytes()
                        ),
                    });
                }
                let memory = match rank == self.comm.rank() {
                    true => Some(own[at].0.clone()),
                    false if maps(rank) => {
                        Some(Memory::open(self.comm.device(), &descriptor, rank)?)
                    }
                    false => None,
                };
                all[at].push(memory.map(|memory| (memory, offset)));
            }
        }
        Ok(all)
    }
}

/// First character of the reason of a rank whose communicator has failed during the call. The other
/// ranks stop, too.
const STOPPED: char = '\u{1}';

/// First byte of a message with the reason why a rank has no parts.
const REFUSED: u8 = 0;
/// First byte of a message with parts.
const PARTS: u8 = 1;

fn encode(parts: &[WindowPart]) -> Result<Vec<u8>> {
    let mut message = vec![PARTS];
    for (memory, offset) in parts {
        let descriptor = memory.descriptor()?.to_bytes();
        message.extend(offset.to_le_bytes());
        message.extend((descriptor.len() as u32).to_le_bytes());
        message.extend(descriptor);
    }
    Ok(message)
}

fn decode(message: &[u8], count: usize) -> Option<Vec<(MemoryDescriptor, u64)>> {
    let mut rest = message.strip_prefix(&[PARTS])?;
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let (offset, tail) = rest.split_first_chunk()?;
        let (length, tail) = tail.split_first_chunk()?;
        let (descriptor, tail) = tail.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        let descriptor = MemoryDescriptor::from_bytes(descriptor)?;
        parts.push((descriptor, u64::from_le_bytes(*offset)));
        rest = tail;
    }
    (parts.len() == count).then_some(parts)
}

/// New windows that the ranks have not agreed on. Dropping the value frees their numbers.
#[derive(Debug)]
pub(super) struct NewWindows<'a> {
    inner: &'a Inner,
    reserved: Vec<ReservedWindow>,
}

impl NewWindows<'_> {
    /// Returns the number of the window of part `at`.
    pub(super) fn id(&self, at: usize) -> usize {
        self.reserved[at].id
    }

    /// Lets operations use the windows, after all ranks have agreed.
    pub(super) fn publish(mut self) {
        for window in self.reserved.drain(..) {
            self.inner.windows.list(&window);
        }
    }
}

impl Drop for NewWindows<'_> {
    fn drop(&mut self) {
        // If the communicator has failed, a peer may have agreed and use this rank's memory. The
        // windows then live as long as the communicator, whose later calls fail.
        if self.inner.check().is_ok() {
            for window in self.reserved.drain(..) {
                self.inner.windows.remove(window.id, true);
            }
        }
    }
}
