//! State of a communicator on a GPU in addition to its workspace: constants in device memory, and
//! the word by which kernels report a failure to the host.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use fusewire_device::layout::{CommConst, NEAR_RANKS};

use super::bootstrap::CommConfig;
use super::rendezvous::{PeerInfo, Rendezvous};
use crate::device::Device;
use crate::gpu::driver::LaunchShape;
use crate::gpu::multi_rank_grid::MultiRankGrid;
use crate::gpu::{self, Gpu, HostLine, Scratch};
use crate::memory::MemoryDescriptor;
use crate::{Error, Result};

/// Default number of threads of a block, which is the maximum that the kernels are compiled for.
pub(super) const THREADS: u32 = 512;

/// Default number of blocks of an operation on a GPU.
pub(super) const BLOCKS: u32 = 16;

/// Shortest timeout without a warning if processes share a GPU, which then runs them in turns.
const SHARED_TIMEOUT_SECONDS: u64 = 10;

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
    ) -> Result<Self> {
        let apart = matches!(gpu.device(), Device::Hip(_));
        let constants = apart.then(|| Scratch::take(&gpu, size_of::<CommConst>()));
        Ok(Self {
            constants: constants.transpose()?,
            addresses: OnceLock::new(),
            line: gpu.take_line()?,
            threads: if threads == 0 { THREADS } else { threads },
            grid,
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
        // SAFETY: the scratch is large enough, and no kernel runs yet.
        unsafe { Ok(self.gpu.driver().write(scratch.address(), bytes)?) }
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

    /// Refuses ranks whose blocks would not all be resident, and warns if processes share a GPU.
    pub(super) fn check_ranks_of_gpu<'a>(
        &self,
        infos: impl Iterator<Item = &'a MemoryDescriptor>,
    ) -> Result<()> {
        let gpu = crate::gpus::open(self.device)?;
        let own = gpu.properties().uuid;
        let mut here = HashMap::<u32, u32>::new();
        for info in infos.filter(|info| info.uuid() == Some(own)) {
            *here.entry(info.process().0).or_default() += 1;
        }
        let ranks = here.get(&std::process::id()).copied().unwrap_or(1);
        if ranks > 1 {
            gpu.share();
        }
        let threads = match self.options.threads {
            0 => THREADS,
            threads => threads,
        };
        gpu.check_resident(self.options.blocks, threads, ranks)?;
        if here.len() > 1 && self.options.timeout.as_secs() < SHARED_TIMEOUT_SECONDS {
            tracing::warn!(
                "{} processes share {}, which runs them in turns: a timeout of {:.1} s may pass \
                 while all is well; {SHARED_TIMEOUT_SECONDS} s or more are advised",
                here.len(),
                self.device,
                self.options.timeout.as_secs_f64()
            );
        }
        Ok(())
    }
}

impl Rendezvous<'_> {
    /// Returns `own` if all ranks have a result, so that no rank continues and then waits for one
    /// that cannot take part.
    ///
    /// # Errors
    /// This rank's own error, or the first one that another rank has published.
    pub(super) fn all_agree<T>(&self, own: Result<T>) -> Result<T> {
        if self.size == 1 {
            return own;
        }
        let key = format!("{}/refused", self.prefix);
        if let Err(error) = &own {
            let text = format!("rank {} cannot take part: {error}", self.rank);
            // Only the first error is published.
            self.store.compare_set(&key, b"", text.as_bytes())?;
        }
        let mut refusal = Ok(None);
        self.barrier_then("able", || {
            refusal = self.store.check(&[&key]).and_then(|there| {
                let read = || self.store.get(&key, self.timeout);
                there.then(read).transpose()
            });
        })?;
        match (own, refusal?) {
            (Err(error), _) => Err(error),
            (Ok(_), Some(text)) => Err(Error::Communicator {
                name: self.name.to_owned(),
                detail: String::from_utf8_lossy(&text).into_owned(),
            }),
            (Ok(own), None) => Ok(own),
        }
    }
}
