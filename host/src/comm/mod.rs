//! Communicators: ranks that share windows and run operations in one order.

mod bootstrap;
mod directory;
mod failure;
mod fused;
mod instances;
mod meeting;
mod operations;
mod submit;
mod windows;
mod work;

#[cfg(test)]
mod tests;

use core::fmt;
use core::sync::atomic::{AtomicU64, AtomicUsize};
use core::time::Duration;
use std::sync::{Arc, Mutex, OnceLock};

use fusewire_device::DType;
use fusewire_device::layout::{CommConst, FailureRecord};
use fusewire_device::native::Isa;

pub use self::bootstrap::run_threads;
pub use self::failure::{Activity, Failure};
pub use self::fused::RmsNorm;
pub use self::meeting::rehearse_meeting;
pub use self::work::{Work, WorkStatus};

use self::windows::Windows;
use crate::cpu::{Event, Segment, Stream};
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;
use crate::tensor::{Allocation, Tensor, bytes_of};
use crate::{Error, Result};

/// Most ranks of a communicator: those that reach each other by load and store.
pub const MAX_SIZE: u32 = fusewire_device::layout::MAX_RANKS as u32;

/// One rank's end of a communicator.
///
/// Operations must be called by all ranks in the same order. Blocking methods return when the
/// result is there; those ending in `_async` enqueue on the communicator's stream and return a [`Work`].
/// A clone, or the value returned by [`Communicator::on`] or [`Communicator::with_timeout`], is the same
/// communicator; [`Communicator::dup`] makes another one, with an order of its own.
///
/// After the first failure every call returns that failure.
#[derive(Clone)]
pub struct Communicator {
    inner: Arc<Inner>,
    stream: Stream,
    timeout_ns: u64,
}

struct Inner {
    name: String,
    rank: u32,
    size: u32,
    device: Device,
    options: Options,
    /// Whether there are more ranks than cores, as rank 0 sees it.
    crowded: bool,
    isa: Isa,
    constants: Box<CommConst>,
    windows: Windows,
    pad: Arc<Segment>,
    pads: Vec<Arc<Segment>>,
    /// Keys of this communicator start with this.
    prefix: String,
    store: Arc<dyn Store>,
    /// Collective host calls (windows, dups) so far: they name keys.
    host_calls: AtomicU64,
    /// The stream of the last launch, by its id, and a way to wait for it.
    last_stream: AtomicUsize,
    order: Mutex<Option<(Stream, Event)>>,
    failure: OnceLock<Error>,
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

    /// Name of the backend.
    pub fn backend(&self) -> &'static str {
        "fusewire"
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

    /// This communicator with another time-out for the operations called on the returned value.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self {
            timeout_ns: nanoseconds(timeout),
            ..self.clone()
        }
    }

    /// Another communicator of the same ranks, with an order, epochs and pads of its own. All ranks
    /// together.
    ///
    /// # Errors
    /// As [`Communicator::new`].
    pub fn dup(&self) -> Result<Self> {
        let call = self.next_host_call();
        let name = format!("{}.dup{call}", self.inner.name);
        let (rank, size) = (self.rank(), self.size());
        let store = Arc::clone(&self.inner.store);
        Self::new(
            self.inner.device,
            rank,
            size,
            store,
            &name,
            self.inner.options.clone(),
        )
    }

    /// `count` zeroed elements in a new window: every rank contributes as many, and collectives
    /// work on them without a copy. All ranks together. The memory stays until the communicator and
    /// all its tensors are gone.
    ///
    /// # Errors
    /// [`Error::Communicator`] when ranks ask for different sizes or there are too many windows, and
    /// as [`Tensor::new`].
    pub fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        let bytes = bytes_of("alloc", dtype, count)?;
        let parts = self.share("window", bytes)?;
        let own = Arc::clone(&parts[self.rank() as usize]);
        self.inner.windows.add(self.rank(), parts);
        self.meet("window")?;
        let allocation = Allocation::new(own, Some(Arc::clone(&self.inner) as _));
        Ok(Tensor::from_allocation(allocation, dtype, count))
    }

    /// The failure of this communicator, if it has one.
    pub fn failure(&self) -> Option<Error> {
        self.inner.check().err()
    }

    /// Waits for all work on the stream, then returns its first error.
    ///
    /// # Errors
    /// The first failure of asynchronous work since the last call.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Bytes of workspace that this rank holds for the communicator: pad and staging.
    pub fn workspace_bytes(&self) -> u64 {
        self.inner.pad.bytes()
    }

    /// Address of the communicator's constants in device memory: what a kernel of the user's takes.
    pub fn constants(&self) -> *const CommConst {
        &raw const *self.inner.constants
    }

    /// The place of `count` elements of `tensor` in a window, as kernels name memory to each other.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the tensor lies in no window of this communicator.
    pub fn place(&self, tensor: &Tensor) -> Result<fusewire_device::comm::Place> {
        let bytes = tensor.len() * tensor.dtype().size();
        let place = self.inner.windows.place(tensor.as_ptr(), bytes);
        if place.is_some() {
            return Ok(place);
        }
        Err(Error::InvalidArgument {
            operation: "place",
            detail: "the tensor lies in no window; allocate it by Communicator::alloc".to_owned(),
        })
    }
}

impl Inner {
    /// Reads this rank's failure, once it has one.
    #[inline]
    fn check(&self) -> Result<()> {
        use fusewire_device::layout::CommState;
        use fusewire_device::mem::{Order, Scope, load_u64};
        let state = self.pad.ptr().cast::<CommState>();
        // SAFETY: the pad starts with a CommState, whose abort word is only accessed atomically.
        let abort = unsafe { load_u64(&raw const (*state).abort, Order::Acquire, Scope::System) };
        if abort == 0 {
            return Ok(());
        }
        Err(self
            .failure
            .get_or_init(|| self.read_failure(abort as u32))
            .clone())
    }

    #[cold]
    fn read_failure(&self, reporter: u32) -> Error {
        use fusewire_device::layout::CommState;
        use fusewire_device::mem::{Order, Scope, load_u64};
        let reporter = reporter.min(self.size - 1);
        let state = self.pads[reporter as usize].ptr().cast::<CommState>();
        // SAFETY: every pad starts with a CommState; the record is complete once its state is 2, and
        // the abort word was written after that.
        let record = unsafe {
            let record = &raw const (*state).failure;
            let _ = load_u64(&raw const (*record).state, Order::Acquire, Scope::System);
            record.cast::<FailureRecord>().read_volatile()
        };
        Failure::decode(&self.name, reporter, &record).into_error()
    }
}

fn nanoseconds(timeout: Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX).max(1)
}
