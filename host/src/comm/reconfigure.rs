//! Fault tolerance: changes the members of a communicator, after a failure or without one.
//!
//! Every member of the new communicator calls [`Communicator::reconfigure`], or
//! [`Candidate::reconfigure`] if it is in no communicator yet, with the same handles and the same
//! new number. The keys of their rendezvous in the store contain that number. The rendezvous does
//! not wait for other ranks of the old communicator, so these may be dead. The result is a new
//! communicator with new workspaces, new epochs and the next generation. From then on the old
//! communicator and its graphs return an error.

use core::fmt;
use core::str::FromStr;
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::config::CommConfig;
use super::group::random;
use super::observe::Hooks;
use super::rendezvous::WatchedMember;
use super::submit::invalid;
use super::{Communicator, Inner};
use crate::bootstrap::host_id;
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;
use crate::{EndReason, Error, Result};

/// Identifies a future member of a communicator to the other members. Convert it to text to send it
/// to them.
///
/// `fusewire:RANK:GROUP:GENERATION:IDENTITY@HOST`
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InitHandle {
    /// Rank in the current communicator.
    rank: u32,
    /// Number of the current communicator: that of its reconfiguration, or a hash of its name.
    group: u64,
    generation: u64,
    /// Random number that distinguishes this handle from all others.
    identity: u64,
    host: String,
}

impl fmt::Display for InitHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            group,
            generation,
            identity,
            host,
        } = self;
        write!(
            f,
            "fusewire:{rank}:{group:016x}:{generation}:{identity:016x}@{host}"
        )
    }
}

/// Serializes the handle as its text.
impl Serialize for InitHandle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Parses the handle's text.
impl<'de> Deserialize<'de> for InitHandle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl FromStr for InitHandle {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let (head, host) = text.split_once('@')?;
            let mut parts = head.split(':');
            (parts.next()? == "fusewire").then_some(())?;
            let handle = Self {
                rank: parts.next()?.parse().ok()?,
                group: u64::from_str_radix(parts.next()?, 16).ok()?,
                generation: parts.next()?.parse().ok()?,
                identity: u64::from_str_radix(parts.next()?, 16).ok()?,
                host: host.to_owned(),
            };
            parts.next().is_none().then_some(handle)
        };
        parse().ok_or_else(|| invalid("reconfigure", format!("\"{text}\" is no init handle")))
    }
}

/// The members of a new communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Members {
    /// Member i becomes rank i.
    Ordered(Vec<InitHandle>),
    /// The library orders the members, in the same way on all members: first the largest group of
    /// members from one communicator, by their ranks in it, then the others by their handles.
    Set(Vec<InitHandle>),
}

impl Members {
    /// Returns the members by rank.
    fn by_rank(&self) -> Result<Vec<InitHandle>> {
        let members = match self {
            Self::Ordered(members) => members.clone(),
            Self::Set(members) => quorum_first(members),
        };
        let mut identities: Vec<u64> = members.iter().map(|member| member.identity).collect();
        identities.sort_unstable();
        if identities.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(invalid(
                "reconfigure",
                "a handle is in the list twice".to_owned(),
            ));
        }
        Ok(members)
    }
}

fn quorum_first(members: &[InitHandle]) -> Vec<InitHandle> {
    let size_of = |group: u64| {
        members
            .iter()
            .filter(|member| member.group == group)
            .count()
    };
    let quorum = members
        .iter()
        .map(|member| (core::cmp::Reverse(size_of(member.group)), member.group))
        .min()
        .map(|(_, group)| group);
    let mut members = members.to_vec();
    members.sort_by_key(|member| {
        let outside = Some(member.group) != quorum;
        (outside, member.group, member.rank, member.identity)
    });
    members
}

/// Arguments of [`Communicator::reconfigure`]; the same on all members.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReconfigureOptions {
    /// Number of the new communicator, which must not have been used in this store before.
    pub uuid: u64,
    /// Members of the new communicator.
    pub members: Members,
    /// Timeout of the rendezvous. `None` selects that of the communicator's options.
    pub timeout: Option<Duration>,
    /// Hints that are added to those of the communicator ([`Options::HINTS`]).
    pub hints: BTreeMap<String, String>,
}

impl ReconfigureOptions {
    /// Creates the options for communicator number `uuid` with `members`.
    pub fn new(uuid: u64, members: Members) -> Self {
        Self {
            uuid,
            members,
            timeout: None,
            hints: BTreeMap::new(),
        }
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, name: &str, value: &str) -> Self {
        self.hints.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the timeout of the rendezvous.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// A process (or thread) that is in no communicator yet: one that joins late, or any process before
/// the first communicator is formed.
#[derive(Clone, Debug)]
pub struct Candidate {
    handle: InitHandle,
    device: Device,
    store: Arc<dyn Store>,
    name: String,
    options: Options,
}

impl Candidate {
    /// Creates a candidate for communicator `name`, with the same options as the other members.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the host has no identity.
    pub fn new(
        device: Device,
        store: Arc<dyn Store>,
        name: &str,
        options: Options,
    ) -> Result<Self> {
        let identity = random()?;
        Ok(Self {
            handle: InitHandle {
                rank: 0,
                // A group of one: no two candidates have the same group.
                group: identity,
                generation: 0,
                identity,
                host: host_id()?,
            },
            device,
            store,
            name: name.to_owned(),
            options,
        })
    }

    /// Returns the handle that identifies this candidate to the other members.
    pub fn init_handle(&self) -> InitHandle {
        self.handle.clone()
    }

    /// Joins the communicator. All its members must call this together.
    ///
    /// # Errors
    /// The errors of [`Communicator::reconfigure`].
    pub fn reconfigure(&self, options: &ReconfigureOptions) -> Result<Communicator> {
        let config = CommConfig {
            device: self.device,
            rank: 0,
            size: 0,
            prefix: String::new(),
            store: Arc::clone(&self.store),
            name: self.name.clone(),
            label: self.name.clone(),
            has_private_store: false,
            options: self.options.clone(),
            generation: 0,
            hooks: Hooks::default(),
            rendezvous_timeout: None,
            reach: crate::backend::Reach::Host,
            parent: None,
            replaced: None,
            members: Vec::new(),
        };
        join(config, &self.handle, options, None)
    }
}

impl Communicator {
    /// Returns the handle that identifies this rank to the members of a new communicator. Works
    /// after a failure too.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] if the host has no identity.
    pub fn init_handle(&self) -> Result<InitHandle> {
        let inner = &self.inner;
        Ok(InitHandle {
            rank: inner.group.rank,
            group: inner.executor.constants.id,
            generation: inner.group.generation,
            identity: inner.group.identity,
            host: host_id()?,
        })
    }

    /// Creates the communicator with the members and the number of `options`, after a failure or
    /// without one. It may have fewer or more ranks, or ranks of several communicators. All members
    /// must call this together; other ranks must not call it. Keeps name, options, hooks and
    /// backend.
    ///
    /// From then on this value and its clones, but not its splits, return an error, and so do
    /// graphs that were captured on them. Members of the old communicator that are left out and
    /// wait for this rank fail by their timeout, or earlier if an abort reaches them.
    ///
    /// While this rank waits for other members to join, [`Communicator::abort`] on this rank, from
    /// another thread, ends the call on all waiting members. An abort by another rank does not end
    /// it, because that rank may join later.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this rank is not among the members, a member is listed twice,
    /// or the number was used before; [`Error::Communicator`], which names the missing member, if a
    /// member does not join or has aborted the call; [`Error::Ended`] if this rank has aborted it.
    pub fn reconfigure(&self, options: &ReconfigureOptions) -> Result<Self> {
        let inner = &self.inner;
        inner.group.check_store("reconfigure")?;
        let handle = self.init_handle()?;
        let config = CommConfig {
            device: inner.group.device,
            rank: 0,
            size: 0,
            prefix: String::new(),
            store: Arc::clone(&inner.group.store),
            name: inner.group.full_name.clone(),
            label: inner.group.name.clone(),
            has_private_store: false,
            options: inner.group.requested_options(),
            generation: 0,
            hooks: inner.observer.hooks.clone(),
            rendezvous_timeout: None,
            reach: inner.executor.reach,
            parent: None,
            replaced: Some((Arc::clone(inner), inner.aborts())),
            members: inner.watched_handles(&options.members.by_rank()?),
        };
        // Communicators across hosts have the backend `fusewire` too: the rendezvous determines the
        // hosts of the new members again.
        let backend = inner
            .executor
            .backend
            .as_ref()
            .map(|backend| backend.name().to_owned())
            .filter(|name| name != "fusewire");
        let made = join(config, &handle, options, backend.as_deref())?;
        inner.replace(made.inner.group.generation);
        Ok(Self {
            stream: self.stream.clone(),
            ..made.called_like(self)
        })
    }
}

fn join(
    mut config: CommConfig,
    handle: &InitHandle,
    options: &ReconfigureOptions,
    backend: Option<&str>,
) -> Result<Communicator> {
    let members = options.members.by_rank()?;
    if !options.hints.is_empty() {
        config.options.hints.extend(options.hints.clone());
        config.options = config.options.with_hints_applied()?;
    }
    let Some(rank) = members
        .iter()
        .position(|member| member.identity == handle.identity)
    else {
        return Err(invalid(
            "reconfigure",
            "this rank's own handle is not among the members; who is left out does not call"
                .to_owned(),
        ));
    };
    config.rank = rank as u32;
    config.size = members.len() as u32;
    config.generation = 1 + members
        .iter()
        .map(|member| member.generation)
        .max()
        .unwrap_or(0);
    // Does not end with a number, because the prefixes of numbered rendezvous do.
    config.prefix = format!("fusewire/reconfigure-{:016x}", options.uuid);
    config.rendezvous_timeout = options.timeout.filter(|timeout| !timeout.is_zero());
    let list: Vec<String> = members.iter().map(ToString::to_string).collect();
    let list = list.join(" ");
    let agreed =
        config
            .store
            .compare_set(&format!("{}/members", config.prefix), b"", list.as_bytes())?;
    if agreed != list.as_bytes() {
        return Err(invalid(
            "reconfigure",
            format!(
                "number {:#x} was used before, or members differ: another rank has {}",
                options.uuid,
                String::from_utf8_lossy(&agreed)
            ),
        ));
    }
    let taken = format!("{}/member/{rank}", config.prefix);
    let own = format!("{:016x}", handle.identity);
    let there = config.store.compare_set(&taken, b"", own.as_bytes())?;
    if there != own.as_bytes() {
        return Err(invalid(
            "reconfigure",
            format!(
                "number {:#x} was used before, or members differ: rank {rank} of it is another one",
                options.uuid
            ),
        ));
    }
    match backend {
        Some(name) => Communicator::form_over(name, config),
        None => Communicator::form_checked(config),
    }
}

impl Inner {
    /// Returns those members of a new communicator that are ranks of this one.
    fn watched_handles(&self, members: &[InitHandle]) -> Vec<WatchedMember> {
        let rank = |member: &InitHandle| {
            let is_own = (member.group, member.generation)
                == (self.executor.constants.id, self.group.generation);
            if is_own { member.rank } else { u32::MAX }
        };
        self.group.watched_members(members.iter().map(rank))
    }

    /// Fails this communicator, because one of `generation` has replaced it.
    fn replace(&self, generation: u64) {
        let error = Error::Ended {
            name: self.group.full_name.clone(),
            reason: EndReason::Replaced,
            detail: format!(
                "generation {} was replaced by generation {generation}: use the communicator that \
                 reconfigure returned, and capture graphs again",
                self.group.generation
            ),
        };
        let _ = self.status.replaced.set(error.clone());
        self.status
            .finalized
            .store(true, core::sync::atomic::Ordering::Release);
        self.stop(error);
        if let Some(backend) = &self.executor.backend {
            backend.abort();
        }
    }
}
