//! Communicators created by backend name, adopted from a backend, or split from another
//! communicator.

use core::sync::atomic::Ordering;
use std::sync::Arc;

use super::Communicator;
use super::bootstrap::{agreed_hash, store_of_environment, validate};
use super::config::CommConfig;
use super::observe::{Buffers, Hooks};
use super::rendezvous::RankClaim;
use super::submit::invalid;
use super::topology::Locality;
use crate::Result;
use crate::backend::{self, Backend, Reach, Setup};
use crate::bootstrap::{RankSize, host_id};
use crate::cpu::SegmentDescriptor;
use crate::device::Device;
use crate::memory::MemoryDescriptor;
use crate::options::{Options, check_environment};
use crate::store::{PrefixStore, Store};

/// Creates a communicator with the backend of that name: `fusewire` (its own kernels), `nccl`,
/// `ncclx`, `rccl`, `rcclx`, `gloo`, or one that [`backend::register_backend`],
/// [`backend::register_external_backend`] or `FUSEWIRE_BACKEND_PATH_<NAME>` has added. Takes rank
/// and size from [`Options::rank_size`] or else from the environment, and the store from
/// [`Options::store`] or else from `MASTER_ADDR` and `MASTER_PORT`. All ranks must call this
/// together.
///
/// The defaults are those of torchcomms: a watchdog ends the process when the communicator fails,
/// unless [`Options::abort_process_on_timeout_or_error`], `TORCHCOMM_ABORT_ON_ERROR` or
/// [`Options::enable_reconfigure`] disables it.
///
/// ```
/// use std::sync::Arc;
/// use fusewire::{Device, Options, ReduceOp, new_comm, store::MemoryStore};
///
/// let options = Options::new()
///     .store(Arc::new(MemoryStore::new()))
///     .rank_size(0, 1);
/// let comm = new_comm("fusewire", Device::Cpu, "alone", options)?;
/// let mut x = [1, 2];
/// comm.all_reduce(&mut x, ReduceOp::Sum)?;
/// comm.finalize()?;
/// # Ok::<(), fusewire::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::InvalidArgument`] for a backend that is not in this build, or a hint with a
/// wrong value; [`crate::Error::Backend`] if the backend's library is missing; and the errors of
/// [`Communicator::new`].
pub fn new_comm(
    backend: &str,
    device: Device,
    name: &str,
    options: Options,
) -> Result<Communicator> {
    backend::check_name(backend)?;
    check_environment()?;
    let mut options = options.with_hints_applied()?;
    options
        .abort_process_on_timeout_or_error
        .get_or_insert(true);
    let (rank, size) = match options.rank_size {
        Some(rank_size) => rank_size,
        None => {
            let RankSize { rank, size, .. } = RankSize::from_env()?;
            (rank, size)
        }
    };
    let store = match &options.store {
        Some(store) => Arc::clone(store),
        None => store_of_environment(rank, size, options.rendezvous_timeout())?,
    };
    if backend == "fusewire" {
        let comm = Communicator::new(device, rank, size, store, name, options)?;
        return Ok(comm.requiring_finalize(true));
    }
    if size == 0 || rank >= size {
        return Err(invalid("new_comm", format!("rank {rank} of {size}")));
    }
    let RankClaim { prefix } = RankClaim::take(&*store, name, rank, &host_id()?)?;
    let config = CommConfig {
        device,
        rank,
        size,
        prefix,
        store,
        name: name.to_owned(),
        label: name.to_owned(),
        has_private_store: false,
        options,
        generation: 0,
        hooks: Hooks::default(),
        rendezvous_timeout: None,
        reach: Reach::Host,
        parent: None,
        replaced: None,
        members: Vec::new(),
    };
    Ok(Communicator::form_over(backend, config)?.requiring_finalize(true))
}

impl CommConfig {
    /// Joins the other ranks, on any hosts, and calls `make` before the rendezvous ends.
    fn within_rendezvous<R>(&self, make: impl FnOnce(Reach) -> Result<R>) -> Result<(R, Reach)> {
        let agreed = format!("workspace-{:016x}", agreed_hash(self.size, &self.options));
        let (rendezvous, host) = (self.rendezvous(), host_id()?);
        // A placeholder: backends share no workspace, so no rank maps this descriptor.
        let nothing = MemoryDescriptor::Host(SegmentDescriptor {
            pid: std::process::id(),
            fd: 0,
            bytes: 1,
            inode: 0,
            start_time: 0,
        });
        let gathered = rendezvous.gather(&agreed, &nothing, &Locality::on_host(&host))?;
        let reach = gathered.elsewhere.map_or(Reach::Host, |_| Reach::Network);
        let made = make(reach)?;
        rendezvous.end("made", &agreed, &host, &[])?;
        Ok((made, reach))
    }

    /// Returns the arguments of a backend. Its store has a key prefix of its own.
    pub(super) fn setup(&self, reach: Reach) -> Setup {
        Setup {
            rank: self.rank,
            size: self.size,
            store: Arc::new(PrefixStore::new(
                format!("{}/backend", self.prefix),
                Arc::clone(&self.store),
            )),
            name: self.name.clone(),
            device: self.device,
            options: self.options.clone(),
            reach,
        }
    }
}

impl Communicator {
    /// Joins the other ranks and creates the communicator of backend `name`.
    pub(super) fn form_over(name: &str, config: CommConfig) -> Result<Self> {
        config.check_multi_rank_grid(Some(name))?;
        let (made, reach) =
            config.within_rendezvous(|reach| backend::create(name, &config.setup(reach)))?;
        Self::over(made, CommConfig { reach, ..config })
    }

    /// Wraps an existing communicator of a backend, such as an adopted `ncclComm_t` or a
    /// [`Backend`] that is not registered. [`Communicator::dup`], and [`Communicator::split`] if
    /// the backend cannot split itself, need a store that all ranks share
    /// ([`field@Options::store`]). Ranks that share one must adopt communicators of one name in the
    /// same order, and groups of ranks that share one must use different names.
    ///
    /// # Errors
    /// The errors of allocating the communicator's state.
    pub fn adopt(
        backend: Arc<dyn Backend>,
        name: &str,
        device: Device,
        options: Options,
    ) -> Result<Self> {
        let (rank, size) = (backend.rank(), backend.size());
        let has_private_store = options.store.is_none();
        let (store, prefix): (Arc<dyn Store>, _) = match &options.store {
            Some(store) => {
                // All ranks adopt communicators of one name in the same order.
                let adopted = store.add(&format!("fusewire/adopted/{name}/rank-{rank}"), 1)?;
                let prefix = format!("fusewire/adopted/{name}/{adopted}");
                (Arc::clone(store), prefix)
            }
            None => (
                Arc::new(crate::store::MemoryStore::new()),
                format!("fusewire/{name}"),
            ),
        };
        let config = CommConfig {
            device,
            rank,
            size,
            prefix,
            store,
            name: name.to_owned(),
            label: name.to_owned(),
            has_private_store,
            options,
            generation: 0,
            hooks: Hooks::default(),
            rendezvous_timeout: None,
            reach: Reach::Host,
            parent: None,
            replaced: None,
            members: Vec::new(),
        };
        Self::over(backend, config)
    }

    /// Creates a communicator of the ranks `ranks` of this one, in that order: `ranks[i]` becomes
    /// rank i. All ranks of this communicator must call this together, each with the list that
    /// contains it. A rank that passes an empty list gets `None`. Different ranks may pass disjoint
    /// groups. Groups of different calls may overlap, and the result can be split again.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a rank that is out of range or listed twice, or a list
    /// without this rank; and the errors of [`Communicator::new`].
    pub fn split(&self, ranks: &[u32], name: &str) -> Result<Option<Self>> {
        self.hooked("split", None, Buffers::default, |_| {
            self.make_part(ranks, name, None)
        })
    }

    /// Runs [`Communicator::split`] with `options` for the new communicator instead of those of
    /// this one. All ranks of this communicator must call this together, also those with an empty
    /// list. Store, rank and size in the options are not used. The agreed options must be equal on
    /// all ranks of the list.
    ///
    /// # Errors
    /// The errors of [`Communicator::split`].
    pub fn split_with(&self, ranks: &[u32], name: &str, options: Options) -> Result<Option<Self>> {
        self.hooked("split", None, Buffers::default, |_| {
            self.make_part(ranks, name, Some(options))
        })
    }

    fn make_part(
        &self,
        ranks: &[u32],
        name: &str,
        options: Option<Options>,
    ) -> Result<Option<Self>> {
        // Counted even if the list is refused, so that the keys of later calls agree on all ranks.
        let call = self.inner.group.next_host_call();
        let refuse = |detail: String| Err(invalid("split", detail));
        for (at, rank) in ranks.iter().enumerate() {
            if *rank >= self.size() {
                return refuse(format!("rank {rank}; ranks are 0 to {}", self.size() - 1));
            }
            if ranks[..at].contains(rank) {
                return refuse(format!("rank {rank} is in the list twice"));
            }
        }
        self.inner.check()?;
        let part_of_backend = |backend: &Arc<dyn Backend>| {
            // The library allows one call at a time, so this call follows the enqueued operations.
            self.synchronize()?;
            let part = backend.split(ranks);
            part.inspect_err(|error| self.inner.poison(error))
        };
        // A part that the library splits off has the library's options of this communicator.
        let splits = self.inner.executor.backend.as_ref();
        let splits = splits.filter(|_| options.is_none());
        if ranks.is_empty() {
            // The library may require a call on every rank.
            splits.map(part_of_backend).transpose()?;
            return Ok(None);
        }
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank()) else {
            return refuse(format!(
                "the list does not have this rank, {}; a rank of no group calls with an empty list",
                self.rank()
            ));
        };
        // Including the list keeps the keys of the groups of one call distinct.
        let list: Vec<String> = ranks.iter().map(u32::to_string).collect();
        let suffix = format!("{name}.{call}.{}", list.join("-"));
        let mut config = self.config(&suffix, rank as u32, ranks);
        config.label = name.to_owned();
        let part = splits.map(part_of_backend).transpose()?.flatten();
        let has_options = options.is_some();
        if let Some(options) = options {
            config.options = options.with_hints_applied()?.resolved(self.device());
        }
        let part = match part {
            Some(part) => Self::over(part, config)?,
            None => self.sibling(config)?,
        };
        let part = part.part_of(self, ranks);
        Ok(Some(match has_options {
            true => part,
            false => part.called_like(self),
        }))
    }

    /// Records the ranks of `parent` that form this communicator, and whether dropping it without
    /// [`Communicator::finalize`] prints a warning.
    pub(super) fn part_of(self, parent: &Self, ranks: &[u32]) -> Self {
        let world = parent.inner.group.world();
        let ranks = ranks.iter().map(|rank| world[*rank as usize]).collect();
        let _ = self.inner.group.world.set(ranks);
        let required = &parent.inner.status.must_finalize;
        self.requiring_finalize(required.load(Ordering::Relaxed))
    }

    /// Sets whether dropping the communicator without [`Communicator::finalize`] prints a warning.
    pub(super) fn requiring_finalize(self, required: bool) -> Self {
        let must_finalize = &self.inner.status.must_finalize;
        must_finalize.store(required, Ordering::Relaxed);
        self
    }

    /// Creates a communicator of the same backend.
    pub(super) fn sibling(&self, config: CommConfig) -> Result<Self> {
        self.inner.group.check_store("creating it")?;
        match &self.inner.executor.backend {
            Some(backend) if backend.name() != "fusewire" => {
                let made = backend::create(backend.name(), &config.setup(config.reach))?;
                Self::over(made, config)
            }
            // Runs a rendezvous even if the parent spans hosts, because this group may be on one
            // host.
            _ => {
                validate(&config.name, config.rank, config.size, &config.options)?;
                Self::form(config)
            }
        }
    }

    /// Returns this communicator with the call options of `parent`.
    pub(super) fn called_like(self, parent: &Self) -> Self {
        Self {
            timeout_ns: parent.timeout_ns,
            algorithm: parent.algorithm,
            ..self
        }
    }

    /// Returns the configuration of a communicator of the ranks `ranks` of this one, in which this
    /// rank is `rank`. Its name is that of this communicator with `suffix`.
    pub(super) fn config(&self, suffix: &str, rank: u32, ranks: &[u32]) -> CommConfig {
        let name = format!("{}.{suffix}", self.inner.group.full_name);
        CommConfig {
            device: self.inner.group.device,
            rank,
            size: ranks.len() as u32,
            prefix: format!("{}/{name}", self.inner.group.prefix),
            store: Arc::clone(&self.inner.group.store),
            label: name.clone(),
            name,
            has_private_store: self.inner.group.has_private_store,
            options: self.inner.group.requested_options(),
            generation: 0,
            hooks: self.inner.observer.hooks.of_part(),
            rendezvous_timeout: (self.timeout_ns != 0).then(|| self.timeout()),
            reach: self.inner.executor.reach,
            parent: Some(Arc::clone(&self.inner)),
            replaced: None,
            members: self.inner.group.watched_members(ranks.iter().copied()),
        }
    }
}

impl Communicator {
    /// Returns the store of the ranks' rendezvous.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.group.store
    }
}
