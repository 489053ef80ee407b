//! State of a communicator on a GPU in addition to its workspace: constants in device memory, and
//! the word by which kernels report a failure to the host.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use fusewire_device::layout::{CommConst, NEAR_RANKS};

use super::config::CommConfig;
use super::rendezvous::{PeerInfo, Rendezvous};
use crate::device::Device;
use crate::gpu::driver::LaunchShape;
use crate::gpu::multi_rank_grid::MultiRankGrid;
use crate::gpu::{self, Gpu, HostLine, Residency, Scratch};
use crate::stream::Stream;
use crate::{Error, Result};

/// Default number of threads of a block, which is the maximum that the kernels are compiled for.
pub(super) const THREADS: u32 = 512;

/// Default number of blocks of an operation on a GPU.
pub(super) const BLOCKS: u32 = 16;

/// Default number of blocks of a large operation on a GPU ([`field@Options::large_blocks`]).
pub(super) const LARGE_BLOCKS: u32 = 32;

/// Shortest timeout without a warning if processes share a GPU, which then runs them in turns.
const SHARED_TIMEOUT_SECONDS: u64 = 10;

/// Ranks of this process that share a GPU, and the blocks that an SM of the GPU can hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedGpu {
    /// Number of ranks of the communicator in this process on this rank's GPU.
    pub(super) ranks: u32,
    pub(super) residency: Residency,
}

/// State of a communicator on a GPU.
pub(super) struct OnGpu {
    gpu: Arc<Gpu>,
    /// Copy of the constants in cached memory, if the workspace is uncached memory.
    constants: Option<Scratch>,
    /// Addresses of the workspaces, if the team is too large for the constants to hold them.
    addresses: OnceLock<Scratch>,
    line: HostLine,
    threads: u32,
    grid: Option<Arc<MultiRankGrid>>,
    /// `None` if another backend executes the operations.
    shared: Option<SharedGpu>,
}

// SAFETY: the word in host memory is valid on all threads, and is only accessed atomically.
unsafe impl Send for OnGpu {}
// SAFETY: see `Send`.
unsafe impl Sync for OnGpu {}

impl fmt::Debug for OnGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnGpu")
            .field("threads", &self.threads)
            .finish_non_exhaustive()
    }
}

impl OnGpu {
    /// Creates the state. `threads` is the number of threads of a block, or 0 for the default.
    /// `grid` combines the launches of all ranks, if they share a grid.
    pub(super) fn new(
        gpu: Arc<Gpu>,
        threads: u32,
        grid: Option<Arc<MultiRankGrid>>,
        shared: Option<SharedGpu>,
    ) -> Result<Self> {
        let apart = matches!(gpu.device(), Device::Hip(_));
        let constants = apart.then(|| Scratch::take(&gpu, size_of::<CommConst>()));
        Ok(Self {
            constants: constants.transpose()?,
            addresses: OnceLock::new(),
            line: gpu.take_line()?,
            threads: if threads == 0 { THREADS } else { threads },
            grid,
            shared,
            gpu,
        })
    }

    /// Copies the addresses of the team's workspaces to device memory. Returns the address of the
    /// copy.
    pub(super) fn hold(&self, addresses: &[u64]) -> Result<u64> {
        let scratch = Scratch::holding(&self.gpu, bytemuck::cast_slice(addresses))?;
        Ok(self.addresses.get_or_init(|| scratch).address())
    }

    /// Writes the constants to their own device memory, if they have it.
    pub(super) fn publish(&self, constants: &CommConst) -> Result<()> {
        let Some(scratch) = &self.constants else {
            return Ok(());
        };
        let mut constants = *constants;
        if constants.team_size as usize <= NEAR_RANKS {
            constants.workspaces = CommConst::near_of(scratch.address());
        }
        let bytes = bytemuck::bytes_of(&constants);
        // SAFETY: no kernel runs yet.
        unsafe { scratch.write(0, bytes) }
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(super) fn grid(&self) -> Option<&Arc<MultiRankGrid>> {
        self.grid.as_ref()
    }

    /// Returns the device address of the constants, if they are not in the workspace.
    pub(super) fn constants(&self) -> Option<*const CommConst> {
        let scratch = self.constants.as_ref()?;
        Some(scratch.address() as *const CommConst)
    }

    /// Returns the device address of the word that kernels write.
    pub(super) fn host_word(&self) -> u64 {
        self.line.0.device
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: page-locked memory of at least a word, aligned, which lives as long as `self` and
        // is only accessed atomically.
        unsafe { AtomicU64::from_ptr(self.line.0.host.cast()) }
    }

    /// Returns the abort word that the host has, without reading device memory.
    #[inline]
    pub(super) fn abort_word(&self) -> u64 {
        self.word().load(Ordering::Acquire)
    }

    /// Sets the host's abort word, unless it is set already.
    pub(super) fn set_abort_word(&self, word: u64) {
        let _ = self
            .word()
            .compare_exchange(0, word, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Fails if launches of these ranks on the stream would run in sequence, or if its SMs cannot
    /// hold their `blocks` at the same time.
    pub(super) fn check_stream(&self, stream: &Stream, blocks: u32) -> Result<()> {
        let (Some(SharedGpu { ranks, residency }), None) = (self.shared, &self.grid) else {
            return Ok(());
        };
        if ranks > 1 && stream.is_legacy() {
            return Err(Error::launch(format!(
                "{ranks} ranks of this process share {} and therefore its legacy default stream, \
                 on which their kernels would run one after another, although they wait for each \
                 other; give each rank a separate stream",
                self.gpu.device()
            )));
        }
        let Some(multiprocessors) = stream.multiprocessors() else {
            return Ok(());
        };
        let fits = residency.blocks.saturating_mul(multiprocessors);
        let needed = blocks.saturating_mul(ranks);
        if needed <= fits {
            return Ok(());
        }
        Err(Error::launch(format!(
            "the SMs of this stream hold fewer blocks than the communicator launches: the stream \
             may use {multiprocessors} of {} SMs of {} (green context or MPS), which hold {fits} \
             blocks of {} threads of kernel {}; {ranks} ranks of this process launch {blocks} \
             blocks each, so the operation would time out; use a stream with more SMs, or create \
             the communicator with a smaller Options::blocks (Options::large_blocks for operations \
             of 4 MiB or more)",
            self.gpu.properties().multiprocessors,
            self.gpu.device(),
            residency.threads,
            residency.kernel,
        )))
    }

    /// Returns the shape of an operation's launch.
    pub(super) fn shape(&self, kernel: &gpu::Kernel, blocks: u32) -> LaunchShape {
        LaunchShape {
            blocks,
            threads: self.threads.min(kernel.properties.max_threads),
            ..LaunchShape::default()
        }
    }
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        // Kernels that write the word keep the communicator alive (`LaunchOwner`), so none runs
        // now.
        self.gpu.put_line(self.line);
    }
}

impl CommConfig {
    /// Refuses a communicator with ranks on the CPU if this rank is on a GPU. All ranks on GPUs
    /// reach the same result.
    pub(super) fn check_kinds(&self, infos: &[PeerInfo]) -> Result<()> {
        let other = infos.iter().find(|info| info.memory.uuid().is_none());
        match other {
            Some(PeerInfo { rank, .. }) if self.device.is_gpu() => Err(Error::Communicator {
                name: self.name.clone(),
                detail: format!(
                    "rank {} is on {}, rank {rank} on the CPU: all ranks use one kind of device",
                    self.rank, self.device
                ),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the number of threads of a block.
    pub(super) fn threads(&self) -> u32 {
        match self.options.threads {
            0 => THREADS,
            threads => threads,
        }
    }

    /// Returns the number of blocks that an SM of this rank's GPU can hold at once.
    pub(super) fn residency(&self) -> Result<Residency> {
        crate::gpus::open(self.device)?.residency(self.threads())
    }

    /// Returns the numbers of blocks of a launch and of a large one, for which the blocks of all
    /// ranks are resident at the same time on every GPU: at most `Options::blocks` and
    /// `Options::large_blocks`. All ranks get the same numbers, because they read the same peer
    /// info. Also warns if processes share a GPU.
    pub(super) fn limit_blocks(
        &self,
        residency: Residency,
        infos: &[PeerInfo],
    ) -> Result<((u32, u32), SharedGpu)> {
        let gpu = crate::gpus::open(self.device)?;
        let mut ranks_of = HashMap::<_, u32>::new();
        for info in infos {
            *ranks_of.entry(gpu_and_process(info)).or_default() += 1;
        }
        let ranks_with = |info: &PeerInfo| ranks_of[&gpu_and_process(info)];
        let least = infos
            .iter()
            .map(|info| (info.resident_blocks / ranks_with(info), info.rank))
            .min();
        let (limit, rank) = least.unwrap_or((u32::MAX, self.rank));
        let smallest = infos.iter().find(|info| info.rank == rank);
        let sharing = smallest.map_or(1, ranks_with);
        if limit == 0 {
            return Err(Error::launch(format!(
                "the GPU of rank {rank} can hold {} blocks of {} threads, but {sharing} ranks of \
                 that process share the GPU, and each needs at least one resident block; run fewer \
                 ranks on a GPU, or lower Options::threads on all ranks",
                smallest.map_or(0, |info| info.resident_blocks),
                self.threads(),
            )));
        }
        if limit < self.options.blocks {
            tracing::info!(
                "communicator \"{}\": launches use {limit} blocks instead of {}, because the GPU \
                 of rank {rank} holds no more for each of the {sharing} ranks of its process",
                self.name,
                self.options.blocks
            );
        }
        let own = infos.iter().find(|info| info.rank == self.rank);
        let ranks = own.map_or(1, ranks_with);
        if ranks > 1 {
            gpu.share();
        }
        let uuid = Some(gpu.properties().uuid);
        let processes = ranks_of.keys().filter(|place| place.0 == uuid).count();
        if processes > 1 && self.options.timeout.as_secs() < SHARED_TIMEOUT_SECONDS {
            tracing::warn!(
                "{processes} processes share {}, which runs them in turns: a timeout of {:.1} s \
                 may pass while all is well; {SHARED_TIMEOUT_SECONDS} s or more are advised",
                self.device,
                self.options.timeout.as_secs_f64()
            );
        }
        let shared = SharedGpu { ranks, residency };
        let (blocks, large) = self.options.block_limits();
        Ok(((limit.min(blocks), limit.min(large)), shared))
    }
}

/// Returns the GPU and the process of a rank.
fn gpu_and_process(info: &PeerInfo) -> (Option<[u8; 16]>, (u32, u64)) {
    (info.memory.uuid(), info.memory.process())
}

impl Rendezvous<'_> {
    /// Returns `own` if all ranks have a result, so that no rank continues and then waits for one
    /// that cannot take part.
    ///
    /// # Errors
    /// This rank's own error, or that of another rank.
    pub(super) fn all_agree<T>(&self, own: Result<T>) -> Result<T> {
        let refusal = |error| format!("rank {} cannot take part: {error}", self.rank);
        match self.agree("able", own.as_ref().err().map(refusal), || ())? {
            None => own,
            Some(reason) => own.and_then(|_| Err(self.refuse(reason))),
        }
    }
}
