//! The part of a communicator that runs operations: the memory of the ranks, the device, and the
//! order of launches.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusewire_device::layout::{CommConst, Mirror};
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::native::Isa;

use super::network::Network;
use super::on_gpu::OnGpu;
use super::words::{ABORT_AT, FAILURE_AT};
use crate::backend::{Backend, Reach};
use crate::gpu::multi_rank_grid::MultiRankGrid;
use crate::memory::Memory;
use crate::stream::{Event, Stream};

/// Memory, device and order of launches of a rank.
pub(super) struct Executor {
    pub(super) isa: Isa,
    pub(super) constants: Box<CommConst>,
    pub(super) workspace: Memory,
    /// Workspaces by rank; `None` for ranks of other processes that only a network reaches.
    pub(super) workspaces: Vec<Option<Memory>>,
    /// Addresses of the workspaces, for kernels ([`CommConst::workspaces`]).
    pub(super) _addresses: Box<[u64]>,
    pub(super) network: Option<Network>,
    /// State for kernels on a GPU; `None` on the CPU.
    pub(super) on_gpu: Option<OnGpu>,
    /// Library that executes the operations; `None` for Fusewire's kernels.
    pub(super) backend: Option<Arc<dyn Backend>>,
    pub(super) reach: Reach,
    /// Id of the stream of the last launch, or 0 while it changes.
    pub(super) last_stream: AtomicUsize,
    /// Number of threads that are submitting operations on windows (`submit/bound_windows.rs`).
    pub(super) submissions: AtomicUsize,
    pub(super) order: Mutex<Option<(Stream, Event)>>,
    /// Longest timeout of a call in nanoseconds, or 0 if no call had a longer one than the
    /// communicator's.
    pub(super) longest_timeout_ns: Arc<AtomicU64>,
}

impl Executor {
    /// Returns the abort word; on a GPU, the copy that kernels write to host memory.
    #[inline]
    pub(super) fn abort_word(&self) -> u64 {
        match (&self.on_gpu, self.workspace.word(ABORT_AT)) {
            // SAFETY: the workspace starts with a CommState, whose abort word is only accessed
            // atomically.
            (None, Some(at)) => unsafe { mem::load_u64(at, Order::Acquire, Scope::System) },
            (Some(on_gpu), _) => on_gpu.abort_word(),
            (None, None) => 0,
        }
    }

    /// Returns the abort word itself, which on a GPU requires a copy from device memory.
    pub(super) fn abort_word_on_device(&self) -> u64 {
        let word = self.workspace.load(ABORT_AT);
        if let Some(on_gpu) = self.on_gpu.as_ref().filter(|_| word != 0) {
            on_gpu.set_abort_word(word);
        }
        word
    }

    /// Checks device memory for a failure that no kernel of this rank has reported to the host yet.
    pub(super) fn look(&self) {
        if self.on_gpu.is_some() && self.abort_word() == 0 {
            self.abort_word_on_device();
        }
    }

    /// Returns true if this rank reaches `rank` by load and store.
    pub(super) fn reaches(&self, rank: u32) -> bool {
        rank.wrapping_sub(self.constants.team_first) < self.constants.team_size
    }

    /// Returns true if not all ranks reach each other by load and store.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        self.constants.team_size < self.constants.size
    }

    /// Returns the memory in which this rank sees the progress and the failure record of `rank`,
    /// with their offsets. The memory is the workspace of `rank`, or a mirror in this rank's
    /// workspace.
    pub(super) fn view(&self, rank: u32) -> (&Memory, u64, u64) {
        let layout = &self.constants.workspace;
        if self.reaches(rank)
            && let Some(workspace) = &self.workspaces[rank as usize]
        {
            return (workspace, layout.progress, FAILURE_AT);
        }
        let mirror = layout.mirrors + u64::from(rank) * size_of::<Mirror>() as u64;
        let failure = mirror + offset_of!(Mirror, failure) as u64;
        (&self.workspace, mirror, failure)
    }

    /// Locks the stream of the last launch, and the event after that launch.
    pub(super) fn lock_order(&self) -> MutexGuard<'_, Option<(Stream, Event)>> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the multi-rank grid, if the communicator uses one.
    pub(super) fn grid(&self) -> Option<&Arc<MultiRankGrid>> {
        self.on_gpu.as_ref()?.grid()
    }
}
