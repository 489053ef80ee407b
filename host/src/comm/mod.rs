//! Communicators: ranks that share windows and run operations in one order.

mod attributes;
mod batch;
mod bootstrap;
mod collectives;
mod create;
mod fused;
#[cfg(feature = "gloo")]
mod hierarchy;
mod host_calls;
mod hosts;
mod multi_rank_grid;
mod multicast;
mod network;
mod norm;
mod objects;
mod observability;
mod observe;
mod on_gpu;
mod operations;
mod peers;
mod persistent;
mod quantized;
mod ready_flags;
mod reconfigure;
mod rendezvous;
mod rma;
mod state;
mod submit;
mod topology;
mod vocab;
mod warm_up;
mod windows;
mod work;

#[cfg(test)]
mod tests;

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use core::time::Duration;
use std::sync::{Arc, Mutex, OnceLock};

use fusewire_device::DType;
use fusewire_device::layout::{CONSTANTS_AT, CommConst, LaunchHeader};
use fusewire_device::native::Isa;

pub use self::attributes::LaunchAttributes;
#[cfg(feature = "gloo")]
pub(crate) use self::batch::RawMessage;
pub use self::batch::{Batch, P2pKind, P2pOp};
pub use self::bootstrap::{run_threads, run_threads_on, run_threads_with};
pub use self::create::new_comm;
pub use self::norm::{Norm, ScaleLayout};
pub use self::observe::{
    FlightRecord, HookArguments, HookHandle, RecordState, ReplayArguments, ReplayEdge,
};
pub use self::persistent::AllGatherP;
pub use self::ready_flags::ReadyFlags;
pub use self::reconfigure::{Candidate, InitHandle, Members, ReconfigureOptions};
pub use self::rendezvous::bench_rendezvous;
pub use self::rma::{Queue, Registration, SignalUpdate, Window, WindowAccess, WindowOptions};
pub use self::submit::KernelLaunch;
pub use self::vocab::VocabParallel;
pub use self::work::{Work, WorkStatus};

use self::network::TestNetwork;
use self::observe::{Hooks, Recorder};
use self::on_gpu::OnGpu;
use self::windows::Windows;
use crate::algorithm::Algorithm;
use crate::backend::{Backend, Reach};
use crate::device::Device;
use crate::memory::Memory;
use crate::options::{CallOptions, Options};
use crate::store::Store;
use crate::stream::{Event, Stream};
use crate::tensor::{Allocation, Tensor, bytes_of};
use crate::{Error, Result};

/// Most ranks of a communicator. The tables of a fused norm for this number of ranks still fit a
/// block's shared memory.
pub const MAX_SIZE: u32 = fusewire_kernels::fused::MAX_RANKS;

/// One rank's end of a communicator.
///
/// Operations must be called by all ranks in the same order. Blocking methods return when the
/// result is there; those ending in `_async` enqueue on the communicator's stream and return a
/// [`Work`]. A clone, or the value returned by [`Communicator::on`] or
/// [`Communicator::with_timeout`], is the same communicator; [`Communicator::dup`] makes another
/// one, with an order of its own.
///
/// After the first failure every call returns that failure.
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
    stream: Stream,
    timeout_ns: u64,
    /// Algorithm asked for; the options' or the call's.
    algorithm: Algorithm,
}

struct Inner {
    name: String,
    rank: u32,
    size: u32,
    device: Device,
    options: Options,
    /// Whether there are more ranks than cores, as rank 0 sees it.
    oversubscribed: bool,
    isa: Isa,
    constants: Box<CommConst>,
    windows: Windows,
    network: Option<TestNetwork>,
    workspace: Memory,
    workspaces: Vec<Memory>,
    /// Their addresses, for kernels ([`CommConst::workspaces`]).
    _addresses: Box<[u64]>,
    /// Id and start time of each rank's process; empty where a backend takes care of its own.
    processes: Vec<Option<(u32, u64)>>,
    /// Whether all ranks can be parts of one multicast object, so that windows try to have one.
    multicast: bool,
    /// What kernels on a GPU need; none on the CPU.
    on_gpu: Option<OnGpu>,
    /// Keys of this communicator start with this.
    prefix: String,
    store: Arc<dyn Store>,
    /// Collective host calls (windows, dups) so far: they name keys.
    host_calls: AtomicU64,
    /// The stream of the last launch, by its id, and a way to wait for it.
    last_stream: AtomicUsize,
    order: Mutex<Option<(Stream, Event)>>,
    failure: OnceLock<Error>,
    /// Counts reconfigurations.
    generation: u64,
    /// The library that carries the operations out, where it is not Fusewire's kernels.
    backend: Option<Arc<dyn Backend>>,
    reach: Reach,
    hooks: Hooks,
    recorder: Arc<Recorder>,
    /// Longest timeout of a call in nanoseconds, if longer than the communicator's; or 0.
    longest_timeout_ns: Arc<AtomicU64>,
    /// The ranks of this communicator as ranks of the one that it was split or duplicated from
    /// first; empty where it has not been.
    world: OnceLock<Vec<u32>>,
    finalized: AtomicBool,
    /// Distinguishes this rank from every other rank of any communicator.
    identity: u64,
    /// Set once reconfigure has replaced this communicator.
    replaced: OnceLock<Error>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("name", &self.name)
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Communicator {
    /// This rank.
    pub fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.inner.size
    }

    /// Name, as in messages.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The device that runs the kernels.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Ranks of this communicator: 0 to size - 1.
    pub fn ranks(&self) -> core::ops::Range<u32> {
        0..self.size()
    }

    /// Name of the backend.
    pub fn backend(&self) -> &str {
        self.inner
            .backend
            .as_ref()
            .map_or("fusewire", |backend| backend.name())
    }

    /// Version of the backend.
    pub fn backend_version(&self) -> String {
        self.inner.backend.as_ref().map_or_else(
            || env!("CARGO_PKG_VERSION").to_owned(),
            |backend| backend.version(),
        )
    }

    /// The backend itself, where it is not Fusewire's kernels.
    pub fn backend_impl(&self) -> Option<&Arc<dyn Backend>> {
        self.inner.backend.as_ref()
    }

    /// How often the communicator has been reconfigured.
    pub fn generation(&self) -> u64 {
        self.inner.generation
    }

    /// The options that it was made with.
    pub fn options(&self) -> &Options {
        &self.inner.options
    }

    /// The stream that asynchronous operations are enqueued on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// This communicator with another stream. Launches of one communicator on several streams
    /// run in the order in which they were issued.
    #[must_use]
    pub fn on(&self, stream: &Stream) -> Self {
        Self {
            stream: stream.clone(),
            ..self.clone()
        }
    }

    /// This communicator with another timeout for the operations called on the returned value.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self {
            timeout_ns: self.inner.call_timeout(timeout),
            ..self.clone()
        }
    }

    /// This communicator with the timeout and hints of `options` for the operations called on the
    /// returned value. Unknown hints are warned of.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when a known hint has an unknown value, or one that the
    /// communicator's [`crate::Determinism`] excludes.
    pub fn with_options(&self, options: &CallOptions) -> Result<Self> {
        let mut comm = self.clone();
        if let Some(timeout) = options.timeout.filter(|timeout| !timeout.is_zero()) {
            comm.timeout_ns = self.inner.call_timeout(timeout);
        }
        for (name, value) in &options.hints {
            match name.as_str() {
                "algorithm" => {
                    comm.algorithm = value.parse()?;
                    if let Some(reason) = self.options().determinism.refuses(comm.algorithm) {
                        return Err(Error::InvalidArgument {
                            operation: "with_options",
                            detail: reason.to_owned(),
                        });
                    }
                }
                _ => crate::options::warn_unknown_hint(name, CallOptions::HINTS),
            }
        }
        Ok(comm)
    }

    /// Another communicator of the same ranks, with an order, epochs and workspaces of its own. All
    /// ranks together.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn dup(&self) -> Result<Self> {
        let call = self.next_host_call();
        let name = format!("{}.dup{call}", self.inner.name);
        let all: Vec<u32> = self.ranks().collect();
        let dup = self.sibling(&name, self.rank(), &all)?;
        Ok(dup.part_of(self, &all))
    }

    /// `count` zeroed elements in a new window: every rank contributes as many, and collectives
    /// work on them without a copy. All ranks together. The memory stays until the communicator and
    /// all its tensors are gone.
    ///
    /// # Errors
    /// [`Error::Communicator`] when ranks ask for different sizes or there are too many windows,
    /// and as [`Tensor::new`].
    pub fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        let bytes = bytes_of("alloc", dtype, count)?;
        if self.inner.backend.is_some() {
            // A library registers what it wants to by itself.
            return self.tensor(dtype, count);
        }
        let parts = self.share("window", bytes)?;
        let own = parts[self.rank() as usize].clone();
        let parts: Vec<_> = parts.into_iter().map(|part| (part, 0)).collect();
        self.add_window(parts, bytes)?;
        self.host_barrier("window")?;
        let allocation = Allocation::new(own, Some(Arc::clone(&self.inner) as _));
        Ok(Tensor::from_allocation(allocation, dtype, count))
    }

    /// Adds a window of every rank's part, with its multicast address where it has one; its number.
    /// All ranks together.
    fn add_window(&self, parts: Vec<windows::WindowPart>, bytes: u64) -> Result<usize> {
        let (own, offset) = &parts[self.rank() as usize];
        let multicast = self.multicast(own, *offset)?;
        let address = multicast.as_ref().map_or(0, multicast::Multicast::address);
        let windows = &self.inner.windows;
        let id = windows.add_parts(self.rank(), parts, bytes, address)?;
        if let Some(multicast) = multicast {
            windows.hold(id, multicast);
        }
        Ok(id)
    }

    /// Waits for all work on the stream, then returns its first error.
    ///
    /// # Errors
    /// The first failure of asynchronous work since the last call.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Bytes of workspace that this rank holds for the communicator: signals, slots and staging.
    pub fn workspace_bytes(&self) -> u64 {
        self.inner.workspace.bytes()
    }

    /// Address of the communicator's constants in device memory: what a kernel of the user's takes.
    pub fn constants(&self) -> *const CommConst {
        let inner = &*self.inner;
        // As `Machine::CONSTANTS_IN_WORKSPACE` of the kernels that get them.
        let in_workspace = (inner.constants.state + CONSTANTS_AT) as *const CommConst;
        match &inner.on_gpu {
            Some(on_gpu) => on_gpu.constants().unwrap_or(in_workspace),
            None if inner.options.testing.lanes == 1 => &raw const *inner.constants,
            None => in_workspace,
        }
    }

    /// Returns what the session of a launch needs.
    #[inline(always)]
    fn header(&self, call: u64, count: u64) -> LaunchHeader {
        LaunchHeader {
            constants: self.constants(),
            call,
            count,
            timeout_ns: self.timeout_ns,
        }
    }

    /// `count` zeroed elements on the communicator's device, in no window.
    ///
    /// # Errors
    /// As [`Tensor::on_device`].
    pub fn tensor(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Tensor::on_device(self.inner.device, dtype, count)
    }

    /// Returns the address in a window of `tensor`, by which kernels name its memory to each other.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the tensor lies in no window of this communicator.
    pub fn window_addr(&self, tensor: &Tensor) -> Result<fusewire_device::comm::WindowAddr> {
        let bytes = tensor.len() * tensor.dtype().size();
        let addr = self.inner.windows.addr_of(tensor.as_ptr(), bytes);
        if addr.is_some() {
            return Ok(addr);
        }
        Err(Error::InvalidArgument {
            operation: "window_addr",
            detail: "the tensor lies in no window; allocate it by Communicator::alloc".to_owned(),
        })
    }
}

fn nanoseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX).max(1)
}
