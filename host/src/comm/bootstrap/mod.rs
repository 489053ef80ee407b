//! Formation of communicators: ranks exchange memory descriptors through a store before any kernel
//! runs.

mod assemble;
mod environment;
mod limits;
mod workspace;

use std::sync::Arc;

use fusewire_device::layout::WorkspaceLayout;

pub(super) use self::environment::store_of_environment;
pub(super) use self::limits::{agreed_hash, validate};

pub(super) use self::assemble::{Parts, cores};
pub(super) use self::workspace::layout;
use self::workspace::write_state;
use super::Communicator;
use super::config::CommConfig;
use super::multi_rank_grid;
use super::multicast;
use super::observe::Hooks;
use super::rendezvous::{Gathered, PeerInfo, RankClaim, Rendezvous};
use super::topology::Locality;
use crate::Result;
use crate::backend::{Backend, Reach};
use crate::bootstrap::host_id;
use crate::device::Device;
use crate::memory::Memory;
use crate::options::{Options, check_environment};
use crate::store::Store;

impl Communicator {
    /// Joins the communicator `name` as `rank` of `size`. All ranks must call this together, with
    /// the same name, size and agreed options, over one store.
    ///
    /// Ranks on several hosts (distinguished by [`host_id`]) whose GPUs are all in one NVLink
    /// domain work like ranks of one host. On the CPU, kernels reach ranks on other hosts by a
    /// proxy in each process. Other GPUs, and the CPU with
    /// [`InterHost::Gloo`](crate::InterHost::Gloo), need a build with the feature `gloo`: kernels
    /// run within each host, Gloo connects the hosts, and windows are not available.
    /// [`Communicator::plan`] returns the path of an operation. With
    /// [`crate::Determinism::Bitwise`] results are bitwise equal to those of one host.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use fusewire::{Communicator, Device, Options, ReduceOp, store::MemoryStore};
    ///
    /// let store = Arc::new(MemoryStore::new());
    /// let comm = Communicator::new(Device::Cpu, 0, 1, store, "alone", Options::default())?;
    /// let mut x = [1.0f32, 2.0];
    /// comm.all_reduce(&mut x, ReduceOp::Sum)?;
    /// assert_eq!(x, [1.0, 2.0]);
    /// # Ok::<(), fusewire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Communicator`](crate::Error::Communicator) if ranks do not agree (size, options,
    /// hosts), [`Error::Store`](crate::Error::Store) if a rank does not join, and the
    /// errors of store and memory.
    pub fn new(
        device: Device,
        rank: u32,
        size: u32,
        store: Arc<dyn Store>,
        name: &str,
        options: Options,
    ) -> Result<Self> {
        check_environment()?;
        let options = options.resolved(device);
        validate(name, rank, size, &options)?;
        let RankClaim { prefix } = RankClaim::take(&*store, name, rank, &host_id()?)?;
        Self::form(CommConfig {
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
        })
    }

    /// Resolves and validates the options, then calls [`Communicator::form`].
    pub(super) fn form_checked(mut config: CommConfig) -> Result<Self> {
        config.options = config.options.resolved(config.device);
        validate(&config.name, config.rank, config.size, &config.options)?;
        Self::form(config)
    }

    /// Joins the other ranks at the store keys that start with the prefix, which no other
    /// communicator may have used.
    pub(super) fn form(config: CommConfig) -> Result<Self> {
        let CommConfig {
            rank,
            size,
            options,
            ..
        } = &config;
        let (rank, size) = (*rank, *size);
        config.check_multi_rank_grid(None)?;
        let team = options.team(size);
        let layout = layout(size, team, options);
        let agreed = format!("workspace-{:016x}", agreed_hash(size, options));
        let rendezvous = config.rendezvous();
        let workspace = config
            .new_workspace(&layout)
            .inspect_err(|error| rendezvous.withdraw(&agreed, error))?;
        let residency = config.device.is_gpu().then(|| config.residency());
        let locality = Locality {
            // If the number is not known, the error stops all ranks below.
            resident_blocks: match &residency {
                Some(Ok(residency)) => residency.on_device(),
                Some(Err(_)) => u32::MAX,
                None => 0,
            },
            ..Locality::of(config.device)?
        };
        let Gathered {
            elsewhere,
            team: of_hosts,
            infos,
        } = rendezvous.gather(&agreed, &workspace.descriptor()?, &locality)?;
        let emulated = options.testing.ranks_per_host;
        if let Some(elsewhere) = &elsewhere {
            config.check_multi_rank_grid_over(elsewhere)?;
            if options.inter_host.is_gloo(config.device) {
                let here = infos.iter().map(|info| info.rank).collect();
                return config.over_hosts(&agreed, here, elsewhere);
            }
        }
        if elsewhere.is_some() || emulated.is_some() {
            let team = emulated.unwrap_or(of_hosts);
            let (team, here) = (team.min(size), infos.len() as u32);
            return config.over_network(&agreed, &locality.host, team, here);
        }
        let process = |info: &PeerInfo| info.is_here.then(|| info.memory.process());
        let processes = infos.iter().map(process).collect();
        let multicast = multicast::is_possible(&infos);
        config.check_kinds(&infos)?;
        let in_grid = config.check_multi_rank_grid_of(infos.iter().map(|info| &info.memory))?;
        let (mut blocks, mut shared) = (config.options.block_limits(), None);
        let workspaces = if let Some(residency) = residency {
            // Keeps the workspace alive until all ranks have agreed, because other ranks map it
            // even if this rank is refused.
            let _offered = workspace.clone();
            let limited = residency.and_then(|residency| config.limit_blocks(residency, &infos));
            let opened = limited.and_then(|limited| {
                let workspaces = rendezvous.open(config.device, workspace, infos)?;
                Ok((workspaces, limited))
            });
            let (workspaces, limited) = rendezvous.all_agree(opened)?;
            (blocks, shared) = (limited.0, Some(limited.1));
            workspaces
        } else {
            rendezvous.open(config.device, workspace, infos)?
        };
        blocks.1 = blocks.1.min(in_grid);
        let oversubscribed = rendezvous
            .broadcast_bool("oversubscribed", !config.device.is_gpu() && size > cores())?;
        let grid = config.grid()?;
        let parts = Parts {
            rank_and_size: (rank, size),
            layout,
            grid,
            oversubscribed,
            workspaces,
            processes,
            blocks,
            shared,
            multicast,
            backend: None,
            team,
            network: None,
        };
        Self::assemble_and_end(config, parts, &agreed, &locality.host)
    }

    /// Assembles a communicator and ends its rendezvous.
    pub(super) fn assemble_and_end(
        config: CommConfig,
        parts: Parts,
        agreed: &str,
        host: &str,
    ) -> Result<Self> {
        let timeout = config.rendezvous().timeout;
        let comm = Self::assemble(config, parts)?;
        let rendezvous = Rendezvous {
            timeout,
            ..comm.rendezvous(&comm.inner.group.prefix)
        };
        let keys = ["oversubscribed", multi_rank_grid::KEY];
        rendezvous.end("mapped", agreed, host, &keys)?;
        Ok(comm)
    }

    /// Creates a communicator whose operations `backend` executes. Its workspace is local to this
    /// rank.
    pub(super) fn over(backend: Arc<dyn Backend>, mut config: CommConfig) -> Result<Self> {
        config.options = config.options.resolved(config.device);
        config.check_multi_rank_grid(Some(backend.name()))?;
        let layout = layout(1, 1, &config.options);
        let workspace = Memory::create(Device::Cpu, layout.bytes, "fusewire-workspace")?;
        write_state(&workspace, &layout, &config.options, config.generation)?;
        let parts = Parts {
            rank_and_size: (0, 1),
            layout,
            grid: None,
            oversubscribed: false,
            workspaces: vec![Some(workspace)],
            processes: Vec::new(),
            blocks: config.options.block_limits(),
            shared: None,
            multicast: false,
            backend: Some(backend),
            team: 1,
            network: None,
        };
        Self::assemble(config, parts)
    }
}

impl CommConfig {
    /// Creates this rank's workspace in the initial state.
    pub(super) fn new_workspace(&self, layout: &WorkspaceLayout) -> Result<Memory> {
        if self.device.is_gpu() {
            // Loads kernels before any kernel can wait for another, because loading may wait for
            // the device.
            crate::gpus::open(self.device)?.load()?;
        }
        let workspace = Memory::create(self.device, layout.bytes, "fusewire-workspace")?;
        write_state(&workspace, layout, &self.options, self.generation)?;
        Ok(workspace)
    }
}
