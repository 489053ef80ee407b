//! Communicators: ranks that share windows and run operations in one order.

mod attributes;
mod batch;
mod bootstrap;
mod collectives;
mod config;
mod create;
mod executor;
mod fused;
mod group;
#[cfg(feature = "gloo")]
mod hierarchy;
mod host_calls;
mod hosts;
mod kernel;
mod moe;
mod multi_rank_grid;
mod multicast;
mod network;
mod norm;
mod objects;
mod observability;
mod observe;
mod on_gpu;
mod operations;
mod p2p;
mod peers;
mod persistent;
mod quantized;
mod ready_flags;
mod reconfigure;
mod rendezvous;
mod rma;
mod state;
mod submit;
mod threads;
mod topology;
mod vocab;
mod warm_up;
mod windows;
mod words;
mod work;

#[cfg(test)]
mod tests;

use core::fmt;
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::HashMap;
use std::sync::Arc;

use fusewire_device::layout::{CONSTANTS_AT, CommConst, LaunchHeader};
use fusewire_device::{DType, Element};

pub use self::attributes::LaunchAttributes;
pub use self::batch::Batch;
#[cfg(feature = "gloo")]
pub(crate) use self::batch::RawMessage;
pub use self::create::new_comm;
pub use self::kernel::{KernelLaunch, PreparedKernel};
pub use self::moe::{
    Dispatched, MicroBatch, MissingRanks, Moe, MoeConfig, MoeInfo, MoeLayout, MoeMode, MoePayload,
    MoeReceived, MoeResults, MoeScales, MoeScalesLayout,
};
pub use self::norm::{Norm, ScaleLayout};
pub use self::observe::{
    FlightRecord, HookArguments, HookBuffer, HookHandle, RecordState, ReplayArguments, ReplayEdge,
};
pub use self::p2p::{P2pKind, P2pOp};
pub use self::persistent::AllGatherP;
pub use self::ready_flags::ReadyFlags;
pub use self::reconfigure::{Candidate, InitHandle, Members, ReconfigureOptions};
pub use self::rendezvous::bench_rendezvous;
pub use self::rma::{Queue, Registration, SignalUpdate, Window, WindowAccess, WindowOptions};
pub use self::threads::{run_threads, run_threads_each, run_threads_on, run_threads_with};
pub use self::vocab::VocabParallel;
pub use self::work::{Work, WorkStatus};

use self::executor::Executor;
use self::group::Group;
use self::host_calls::HostCall;
use self::observe::{Buffers, Observer};
use self::state::Status;
use self::windows::Windows;
use crate::algorithm::Algorithm;
use crate::backend::Backend;
use crate::device::Device;
use crate::memory::Memory;
use crate::options::{CallOptions, Options};
use crate::stream::Stream;
use crate::tensor::{Allocation, Tensor, bytes_of};
use crate::{Error, Result};

/// Maximum number of ranks of a communicator. The tables of a fused norm for this many ranks fit in
/// a block's shared memory.
pub const MAX_SIZE: u32 = fusewire_kernels::fused::MAX_RANKS;

/// A handle of one rank to a communicator.
///
/// All ranks must call the same operations in the same order. Blocking methods return when the
/// result is available; methods that end in `_async` enqueue the operation on the communicator's
/// stream and return a [`Work`]. A clone, and the value returned by [`Communicator::on`] or
/// [`Communicator::with_timeout`], refer to the same communicator. [`Communicator::dup`] creates
/// another communicator, whose operations are ordered independently.
///
/// After the first failure every call returns that failure.
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
    stream: Stream,
    timeout_ns: u64,
    /// Algorithm requested by the options or by the call.
    algorithm: Algorithm,
    /// Tag of sends and receives.
    tag: u32,
    /// True for the operations that are part of a call. They call no hooks, because the call does.
    is_inside_call: bool,
}

struct Inner {
    group: Group,
    executor: Executor,
    windows: Arc<Windows>,
    observer: Observer,
    status: Status,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("name", &self.group.full_name)
            .field("rank", &self.group.rank)
            .field("size", &self.group.size)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Communicator {
    /// Returns the rank of this process in the communicator.
    pub fn rank(&self) -> u32 {
        self.inner.group.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        self.inner.group.size
    }

    /// Returns the name that the communicator was created with. Messages use
    /// [`Communicator::full_name`].
    pub fn name(&self) -> &str {
        &self.inner.group.name
    }

    /// Returns the name that messages and the flight record use. The full name of a communicator
    /// from [`Communicator::split`] starts with that of its parent, and names the call and the
    /// ranks, so full names are unique.
    pub fn full_name(&self) -> &str {
        &self.inner.group.full_name
    }

    /// Returns the device that runs the kernels.
    pub fn device(&self) -> Device {
        self.inner.group.device
    }

    /// Returns the ranks of this communicator in the numbering of the communicator that it was
    /// first split from (torchcomms' `get_ranks`): element i is rank i of this communicator.
    pub fn world_ranks(&self) -> Vec<u32> {
        self.inner.group.world()
    }

    /// Returns the ranks of this communicator: 0 to size - 1.
    pub fn ranks(&self) -> core::ops::Range<u32> {
        0..self.size()
    }

    /// Returns the name of the backend.
    pub fn backend(&self) -> &str {
        self.inner
            .executor
            .backend
            .as_ref()
            .map_or("fusewire", |backend| backend.name())
    }

    /// Returns the version of the backend.
    pub fn backend_version(&self) -> String {
        self.inner.executor.backend.as_ref().map_or_else(
            || env!("CARGO_PKG_VERSION").to_owned(),
            |backend| backend.version(),
        )
    }

    /// Returns the backend, or `None` if Fusewire's kernels execute the operations.
    pub fn backend_impl(&self) -> Option<&Arc<dyn Backend>> {
        self.inner.executor.backend.as_ref()
    }

    /// Returns the number of reconfigurations that led to this communicator.
    pub fn generation(&self) -> u64 {
        self.inner.group.generation
    }

    /// Returns the options that the communicator was created with.
    pub fn options(&self) -> &Options {
        &self.inner.group.options
    }

    /// Returns the stream that asynchronous operations are enqueued on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns this communicator with another stream. Launches of one communicator on several
    /// streams run in the order in which they were issued.
    #[must_use]
    pub fn on(&self, stream: &Stream) -> Self {
        Self {
            stream: stream.clone(),
            ..self.clone()
        }
    }

    /// Returns this communicator with another timeout for the operations called on the returned
    /// value, [`Communicator::dup`], [`Communicator::split`] and windows included. Zero selects the
    /// communicator's timeout ([`Options::timeout`]).
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self {
            timeout_ns: self.inner.call_timeout(timeout),
            ..self.clone()
        }
    }

    /// Sets the timeout of all later calls of this rank on this communicator, its clones included,
    /// that have no timeout of their own. Zero selects [`Options::timeout`]. Graphs keep the
    /// timeouts of their captured calls.
    pub fn set_timeout(&self, timeout: Duration) {
        self.inner.set_timeout(timeout);
    }

    /// Returns the timeout of calls on this value.
    pub fn timeout(&self) -> Duration {
        self.inner.group.timeout(self.timeout_ns)
    }

    /// Returns this communicator with the options of `options`, which apply to the operations
    /// called on the returned value, and to windows and batches created from it. Logs a warning for
    /// unknown hints.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a known hint has an unknown value, or a value that the
    /// communicator's [`crate::Determinism`] excludes.
    pub fn with_options(&self, options: &CallOptions) -> Result<Self> {
        let mut comm = self.clone();
        if let Some(timeout) = options.timeout {
            comm.timeout_ns = self.inner.call_timeout(timeout);
        }
        comm.tag = options.tag.unwrap_or(self.tag);
        comm.algorithm = options.algorithm.unwrap_or(self.algorithm);
        for (name, value) in &options.hints {
            match name.as_str() {
                "algorithm" => comm.algorithm = value.parse()?,
                _ => crate::options::warn_unknown_hint(name, CallOptions::HINTS),
            }
        }
        if let Some(reason) = self.options().determinism.refuses(comm.algorithm) {
            return Err(Error::InvalidArgument {
                operation: "with_options",
                detail: reason.to_owned(),
            });
        }
        Ok(comm)
    }

    /// Creates another communicator of the same ranks, with its own operation order, epochs and
    /// workspaces. All ranks must call this together.
    ///
    /// # Errors
    /// The errors of [`Communicator::new`].
    pub fn dup(&self) -> Result<Self> {
        self.hooked("dup", None, Buffers::default, |_| self.make_dup())
    }

    fn make_dup(&self) -> Result<Self> {
        let call = self.inner.group.next_host_call();
        self.inner.check()?;
        let all: Vec<u32> = self.ranks().collect();
        let mut config = self.config(&format!("dup{call}"), self.rank(), &all);
        config.label = format!("{}.dup{call}", self.name());
        let dup = self.sibling(config)?;
        Ok(dup.part_of(self, &all).called_like(self))
    }

    /// Allocates `count` zeroed elements in a new window, to which every rank contributes the same
    /// number. Collectives work on them without a copy. All ranks must call this together.
    ///
    /// The next call of this function frees the memory of every window from this function whose
    /// tensors, and all work and graphs that use them, have been dropped on all ranks. Other
    /// windows live as long as the communicator.
    ///
    /// # Errors
    /// [`Error::Communicator`] if ranks ask for different sizes, if the communicator has too many
    /// windows, or if the call fails on another rank, which the message names; and the errors of
    /// [`Tensor::new`]. No rank has the window then, and all ranks can repeat the call.
    ///
    /// If the ranks cannot agree on the outcome, because the store fails or a rank does not make
    /// the call in time or ends, the communicator fails.
    pub fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        let bytes = bytes_of("alloc", dtype, count)?;
        self.inner.check()?;
        if self.inner.executor.backend.is_some() {
            // A backend registers memory itself.
            return self.tensor(dtype, count);
        }
        let call = self.host_call("alloc");
        self.free_dropped_windows(&call, bytes)?;
        let memory = Memory::create(self.device(), bytes, "fusewire-window");
        let parts = memory.clone().map(|memory| vec![(memory, 0)]);
        let windows = call.add_windows(parts, &[bytes]);
        let windows = call.agreed(windows)?;
        let id = windows.id(0);
        windows.publish();
        let owner = AllocatedWindow {
            inner: Arc::clone(&self.inner),
            id,
        };
        let allocation = Allocation::new(memory?, Some(Arc::new(owner)));
        Ok(Tensor::from_allocation(allocation, dtype, count))
    }

    /// Frees the windows of [`Communicator::alloc`] whose tensors all ranks have dropped. Fails if
    /// ranks pass different `bytes`. All ranks must call this together.
    ///
    /// An operation keeps the tensors of its rank until it has ended on this rank, which is after
    /// the last access of a peer to them. So nothing uses a window that all ranks have dropped.
    fn free_dropped_windows(&self, call: &HostCall<'_>, bytes: u64) -> Result<()> {
        let windows = &self.inner.windows;
        let own = windows.dropped();
        let message = [bytemuck::bytes_of(&bytes), bytemuck::cast_slice(&own)].concat();
        let all = call.exchange("dropped", &message)?;
        let decode = |word: &[u8; 4]| {
            let word = u32::from_ne_bytes(*word);
            (word >> 1, word & 1 == 1)
        };
        let of_ranks: Vec<HashMap<u32, bool>> = all
            .iter()
            .map(|words| words.as_chunks().0.iter().skip(2).map(decode).collect())
            .collect();
        // All ranks remove the same windows in the same order: that of the numbers.
        for id in own.iter().map(|word| word >> 1) {
            let captured = of_ranks.iter().map(|windows| windows.get(&id).copied());
            if let Some(captured) = captured.collect::<Option<Vec<bool>>>() {
                windows.retire(id as usize);
                windows.remove(id as usize, !captured.contains(&true));
            }
        }
        // All ranks read the same sizes, so all of them refuse.
        let size_of = |message: &Vec<u8>| message.first_chunk().copied().map(u64::from_ne_bytes);
        let sizes = all.iter().map(size_of);
        match (0..).zip(sizes).find(|(_, size)| *size != Some(bytes)) {
            None => Ok(()),
            Some((rank, size)) => Err(self.inner.group.error(format!(
                "alloc: rank {rank} contributes {} bytes, rank {} {bytes}: sizes must be equal",
                size.unwrap_or_default(),
                self.rank()
            ))),
        }
    }

    /// Returns true if memory of this rank is coarse-grained: peers may read it, and must not write
    /// it while a kernel runs. On AMD GPUs, memory of this library is uncached, and memory of other
    /// code is usually coarse-grained.
    fn is_coarse(&self, memory: &Memory) -> bool {
        let is_amd = matches!(self.device(), Device::Hip(_));
        memory.is_foreign_on_gpu() && (is_amd || self.inner.group.options.testing.coarse_memory)
    }

    /// Waits for all work on the stream and returns its first error.
    ///
    /// # Errors
    /// The first failure of asynchronous work since the last call.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Returns the bytes of workspace that this rank holds for the communicator: signals, slots and
    /// staging.
    pub fn workspace_bytes(&self) -> u64 {
        self.inner.executor.workspace.bytes()
    }

    /// Returns the device address of the communicator's constants, an argument of user kernels.
    pub fn constants(&self) -> *const CommConst {
        let inner = &*self.inner;
        // Must match `Machine::CONSTANTS_IN_WORKSPACE` of the kernels that receive the address.
        let in_workspace = (inner.executor.constants.state + CONSTANTS_AT) as *const CommConst;
        match &inner.executor.on_gpu {
            Some(on_gpu) => on_gpu.constants().unwrap_or(in_workspace),
            None if inner.group.options.testing.lanes == 1 => &raw const *inner.executor.constants,
            None => in_workspace,
        }
    }

    /// Returns the header that a launch passes to its session.
    #[inline(always)]
    fn header(&self, call: u64, count: u64) -> LaunchHeader {
        LaunchHeader {
            constants: self.constants(),
            call,
            count,
            timeout_ns: self.timeout_ns(),
        }
    }

    /// Returns the timeout of a call in nanoseconds, for kernels, or 0 for
    /// [`Options::timeout`].
    #[inline(always)]
    fn timeout_ns(&self) -> u64 {
        match self.timeout_ns {
            0 => self.inner.group.timeout_ns.load(Ordering::Relaxed),
            of_call => of_call,
        }
    }

    /// Allocates `count` zeroed elements on the communicator's device, outside any window.
    ///
    /// # Errors
    /// The errors of [`Tensor::on_device`].
    pub fn tensor(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Tensor::on_device(self.inner.group.device, dtype, count)
    }

    /// Copies `values` to new memory of the communicator's device, outside any window.
    ///
    /// # Errors
    /// The errors of [`Tensor::on_device`].
    pub fn tensor_from<T: Element>(&self, values: &[T]) -> Result<Tensor> {
        let tensor = self.tensor(T::DTYPE, values.len())?;
        tensor.copy_from(values)?;
        Ok(tensor)
    }

    /// Returns the window address of `tensor`, by which kernels of different ranks refer to its
    /// memory. A kernel that gets the address, and not the tensor, does not keep the memory: every
    /// rank must keep its tensor of the window until the kernels of all ranks have ended.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tensor is not in a window of this communicator.
    pub fn window_addr(&self, tensor: &Tensor) -> Result<fusewire_device::comm::WindowAddr> {
        let bytes = tensor.len() * tensor.dtype().size();
        let windows = &self.inner.windows;
        // Kernels may write to the address, so memory that peers may only read has none.
        let addr = windows.target_addr_of(tensor.as_ptr(), bytes);
        if addr.is_some() {
            return Ok(addr);
        }
        let detail = match windows.addr_of(tensor.as_ptr(), bytes).is_some() {
            true => {
                "peers must not write this tensor, because it was allocated outside Fusewire and \
                 its memory may be coarse-grained; allocate it with Communicator::alloc"
            }
            false => "the tensor lies in no window; allocate it by Communicator::alloc",
        };
        Err(Error::InvalidArgument {
            operation: "window_addr",
            detail: detail.to_owned(),
        })
    }
}

/// Owner of the window of a tensor from [`Communicator::alloc`].
struct AllocatedWindow {
    inner: Arc<Inner>,
    id: usize,
}

impl Drop for AllocatedWindow {
    fn drop(&mut self) {
        self.inner.windows.note_dropped(self.id);
    }
}

fn nanoseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX).max(1)
}
