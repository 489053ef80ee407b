//! Assembly of a communicator from its parts.

use core::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use fusewire_device::layout::{
    CONST_MAGIC, CONSTANTS_AT, CommConst, LAYOUT_VERSION, NEAR_RANKS, WorkspaceLayout,
};

use crate::backend::Backend;
use crate::comm::config::CommConfig;
use crate::comm::executor::Executor;
use crate::comm::group::Group;
use crate::comm::group::random;
use crate::comm::network::{Attached, Network, NetworkParts, TestNetwork};
use crate::comm::observe::{Observer, Recorder};
use crate::comm::on_gpu::{OnGpu, SharedGpu};
use crate::comm::state::Status;
use crate::comm::windows::Windows;
use crate::comm::{Communicator, Inner, nanoseconds, peers};
use crate::device::isa;
use crate::digest;
use crate::gpu::driver::StreamPriority;
use crate::gpu::multi_rank_grid::MultiRankGrid;
use crate::memory::Memory;
use crate::stream::Stream;
use crate::{Error, Result};

/// Number of polls of a wait on a GPU between checks of the clock and of the abort word.
const GPU_SPINS: u32 = 1000;

/// Parts of a communicator.
pub(in crate::comm) struct Parts {
    /// Rank and size in the constants of kernels.
    pub(in crate::comm) rank_and_size: (u32, u32),
    pub(in crate::comm) layout: WorkspaceLayout,
    /// Grid that combines the launches of all ranks, if they share one.
    pub(in crate::comm) grid: Option<Arc<MultiRankGrid>>,
    pub(in crate::comm) oversubscribed: bool,
    pub(in crate::comm) workspaces: Vec<Option<Memory>>,
    /// Id and start time of each rank's process; `None` for a process on another host.
    pub(in crate::comm) processes: Vec<Option<(u32, u64)>>,
    /// Maximum numbers of blocks of a launch and of a large one.
    pub(in crate::comm) blocks: (u32, u32),
    /// The ranks that share this rank's GPU, if Fusewire's kernels run on it.
    pub(in crate::comm) shared: Option<SharedGpu>,
    /// Set if windows can have multicast addresses.
    pub(in crate::comm) multicast: bool,
    pub(in crate::comm) backend: Option<Arc<dyn Backend>>,
    /// Number of successive ranks that reach each other's memory.
    pub(in crate::comm) team: u32,
    /// Connections to the other ranks, if there are any.
    pub(in crate::comm) network: Option<NetworkParts>,
}

impl Communicator {
    /// Creates a communicator from its parts.
    pub(super) fn assemble(config: CommConfig, parts: Parts) -> Result<Self> {
        let CommConfig {
            device,
            rank,
            size,
            store,
            has_private_store,
            name,
            label,
            mut options,
            prefix,
            generation,
            hooks,
            rendezvous_timeout: _,
            reach,
            parent: _,
            replaced: _,
            members: _,
        } = config;
        let Parts {
            rank_and_size: (team_rank, team_size),
            layout,
            grid,
            oversubscribed,
            workspaces,
            processes,
            blocks,
            shared,
            multicast,
            backend,
            team: members,
            network: by_network,
        } = parts;
        let requested_blocks = options.block_limits();
        (options.blocks, options.large_blocks) = blocks;
        let workspace = workspaces[team_rank as usize].clone();
        let workspace = workspace.ok_or_else(|| Error::Bootstrap {
            detail: "this rank has no workspace".to_owned(),
        })?;
        let gpu = workspace.gpu().cloned();
        // Falls back to a hash of address and time if the system provides no random numbers.
        let identity = random().unwrap_or_else(|_| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            digest::of_words(&[
                u64::from(std::process::id()),
                workspace.ptr() as u64,
                now.map_or(0, |now| now.as_nanos() as u64),
            ])
        });
        if gpu.is_some() && options.testing.network.is_some() {
            return Err(Error::InvalidArgument {
                operation: "new_comm",
                detail: "the network for tests connects ranks on the CPU".to_owned(),
            });
        }
        let test_network = options.testing.network.map(|_| {
            let network = TestNetwork::new(options.blocks, options.testing.lanes);
            Network::Test(network)
        });
        let team_first = team_rank / members * members;
        let windows = Windows::new(gpu.as_ref(), team_first..team_first + members, multicast)?;
        let windows = Arc::new(windows);
        windows.add(team_rank, workspaces.clone(), workspace.bytes())?;
        let on_gpu = gpu
            .map(|gpu| OnGpu::new(gpu, options.threads, grid, shared))
            .transpose()?;
        let team = &workspaces[team_first as usize..][..members as usize];
        let addresses = team.iter().flatten();
        let addresses = addresses.map(|workspace| workspace.ptr() as u64);
        let addresses: Box<[u64]> = addresses.collect();
        let mut near = [0; NEAR_RANKS];
        for (near, address) in near.iter_mut().zip(&addresses) {
            *near = *address;
        }
        let is_near = addresses.len() <= NEAR_RANKS;
        let table = match &on_gpu {
            _ if is_near => CommConst::near_of(workspace.ptr() as u64 + CONSTANTS_AT),
            Some(on_gpu) => on_gpu.hold(&addresses)?,
            None => addresses.as_ptr() as u64,
        };
        let mut constants = Box::new(CommConst {
            magic: CONST_MAGIC,
            version: LAYOUT_VERSION,
            bytes: size_of::<CommConst>() as u32,
            rank: team_rank,
            size: team_size,
            team_first,
            team_size: members,
            max_blocks: options.large_blocks,
            spins: options.testing.spins.unwrap_or(if on_gpu.is_some() {
                GPU_SPINS
            } else if members <= cores() && options.testing.lanes == 1 {
                4_000
            } else {
                1
            }),
            id: digest::of_text(&prefix),
            generation,
            timeout_ns: nanoseconds(options.timeout),
            windows: windows.table(),
            state: workspace.ptr() as u64,
            contexts: 0,
            workspace: layout,
            host_word: on_gpu.as_ref().map_or(0, OnGpu::host_word),
            window_stride: windows.stride(),
            workspaces: table,
            near,
        });
        let network = by_network.map(|parts| {
            let grid = (
                options.large_blocks.max(options.blocks),
                options.testing.lanes,
            );
            let workspace = workspace.clone();
            Network::Proxy(Attached::new(parts, &constants, grid, &windows, workspace))
        });
        let network = network.or(test_network);
        constants.contexts = network.as_ref().map_or(0, Network::context);
        // SAFETY: the workspace reserves this memory for the constants, and no kernel runs yet.
        unsafe { workspace.write(CONSTANTS_AT, bytemuck::bytes_of(&*constants))? };
        if let Some(on_gpu) = &on_gpu {
            on_gpu.publish(&constants)?;
        }
        // The constants in the workspace are complete. The boxed constants are for blocks of one
        // lane, which read the addresses from memory of the process.
        constants.workspaces = addresses.as_ptr() as u64;
        let priority = match options.high_priority_stream {
            true => StreamPriority::High,
            false => StreamPriority::Normal,
        };
        let stream = Stream::with_priority(device, priority)?;
        let memory_id = match &backend {
            // Ranks that are threads see each other's memory at the same addresses.
            None => workspaces
                .first()
                .and_then(Option::as_ref)
                .map_or(constants.id, |first| first.ptr() as u64),
            Some(_) => constants.id,
        };
        let inner = Arc::new(Inner {
            executor: Executor {
                isa: isa(),
                constants,
                workspace,
                workspaces,
                _addresses: addresses,
                network,
                on_gpu,
                backend,
                reach,
                last_stream: AtomicUsize::new(0),
                submissions: AtomicUsize::new(0),
                order: Mutex::default(),
                longest_timeout_ns: Arc::default(),
            },
            windows,
            observer: Observer {
                hooks,
                recorder: Arc::new(Recorder::new(options.flight_recorder_entries, size)),
            },
            status: Status::default(),
            group: Group {
                full_name: name,
                name: label,
                rank,
                size,
                device,
                options,
                requested_blocks,
                oversubscribed,
                generation,
                identity,
                memory_id,
                processes,
                prefix,
                store,
                has_private_store,
                timeout_ns: AtomicU64::new(0),
                host_calls: AtomicU64::new(0),
                world: OnceLock::new(),
            },
        });
        inner.observer.hooks.join(&inner);
        Inner::watch(&inner);
        peers::watch(&inner);
        Network::start(&inner)?;
        Ok(Self {
            algorithm: inner.group.options.algorithm,
            inner,
            stream,
            timeout_ns: 0,
            tag: 0,
            is_inside_call: false,
        })
    }
}

pub(in crate::comm) fn cores() -> u32 {
    // SAFETY: sysconf has no preconditions.
    let cores = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    u32::try_from(cores).unwrap_or(1).max(1)
}
