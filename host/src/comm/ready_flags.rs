//! Ready flags per chunk and arrival counters per tile, shared by an operation and the computation
//! that consumes its output or produces its input.

use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use fusewire_device::DType;
use fusewire_kernels::overlap::{FAILED, THERE};

use super::submit::invalid;
use super::{Communicator, Inner};
use crate::device::Device;
use crate::gpu;
use crate::gpu::driver::RawStream;
use crate::stream::{Event, Stream, Ticket};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// Name of the flags in messages.
const NAME: &str = "ready flags";

/// Words in this rank's device memory, one for each chunk or tile.
/// [`Communicator::all_gather_with_flags_async`] sets the word of each chunk that has arrived, for
/// a consumer. A producer increases the word of each tile that it has completed, for
/// [`Communicator::reduce_scatter_on_arrival_async`]. Clones share the words.
///
/// Layout: contiguous u32 words, starting at [`ReadyFlags::as_ptr`]. Every operation clears all of
/// them on the compute stream, before any work that is enqueued on that stream afterwards. So a
/// replay of a captured graph does not see values of the previous replay.
///
/// | | word of a chunk | word of a tile |
/// |---|---|---|
/// | 0 | not arrived | no arrivals |
/// | 1 | arrived; written by system release, to be read by acquire (`ld.acquire.gpu`) | - |
/// | count | - | sum of arrivals; the operation waits for its `target`. Increased by release, after the tile's last write (`red.release.gpu`, or `atomicAdd` after `__threadfence`; on AMD by system release) |
/// | [`ReadyFlags::FAILED`] | the operation has failed, and its remaining chunks do not arrive; greater than 1 | - |
///
/// Only one operation at a time, and one compute stream, may use the words. The next use waits for
/// the previous operation if both are eager or in the same capture.
#[derive(Clone)]
pub struct ReadyFlags {
    state: Arc<State>,
}

struct State {
    comm: Arc<Inner>,
    timeout: Duration,
    words: Tensor,
    /// Number of units of each chunk that have arrived, a u64 each.
    arrivals: Tensor,
    /// Source for clearing `words` and `arrivals`, never written.
    zeros: Tensor,
    /// End of the latest use, and the capture that contained it.
    last: Mutex<Option<(Event, Option<u64>)>>,
}

impl fmt::Debug for ReadyFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadyFlags")
            .field("len", &self.len())
            .field("device", &self.device())
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// Allocates `count` words on the communicator's device, one for each chunk or tile
    /// ([`Communicator::chunks`]).
    ///
    /// # Errors
    /// The errors of [`Communicator::tensor`].
    pub fn ready_flags(&self, count: usize) -> Result<ReadyFlags> {
        self.adopt_ready_flags(&self.tensor(DType::U32, count)?)
    }

    /// Uses the memory of `words`, a tensor of u32 on the communicator's device, as ready flags.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another type or device; the errors of
    /// [`Communicator::tensor`].
    pub fn adopt_ready_flags(&self, words: &Tensor) -> Result<ReadyFlags> {
        if words.dtype() != DType::U32 || words.device() != self.device() {
            return Err(invalid(
                NAME,
                format!(
                    "words of {} on {}; a tensor of u32 on {} is needed",
                    words.dtype().name(),
                    words.device(),
                    self.device()
                ),
            ));
        }
        // Device memory is allocated with a coarse granularity, so one allocation holds both
        // tensors.
        let counts = self.tensor(DType::U64, 2 * words.len())?;
        Ok(ReadyFlags {
            state: Arc::new(State {
                comm: Arc::clone(&self.inner),
                timeout: self.timeout(),
                words: words.clone(),
                arrivals: counts.slice(0, words.len())?,
                zeros: counts.slice(words.len(), words.len())?,
                last: Mutex::default(),
            }),
        })
    }

    /// Returns the number of words of an operation over `count` elements per rank, split into
    /// chunks or tiles of `chunk` elements each (the last one may be shorter). Chunk c of rank or
    /// row r has word `r * count.div_ceil(chunk) + c`.
    pub fn chunks(&self, count: usize, chunk: usize) -> usize {
        self.size() as usize * count.div_ceil(chunk.max(1))
    }
}

impl ReadyFlags {
    /// Value of the words of chunks that had not arrived when the operation failed.
    pub const FAILED: u32 = FAILED;

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.state.words.len()
    }

    /// Returns true if there are no words.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the device whose memory holds the words.
    pub fn device(&self) -> Device {
        self.state.words.device()
    }

    /// Returns the address of the first word, for the kernels of a consumer or producer.
    pub fn as_ptr(&self) -> *mut u32 {
        self.state.words.as_ptr().cast()
    }

    /// Returns the tensor of the words.
    pub fn words(&self) -> &Tensor {
        &self.state.words
    }

    /// Returns the address of the words that count the arrived units of each chunk.
    pub(super) fn arrivals(&self) -> *mut u64 {
        self.state.arrivals.as_ptr().cast()
    }

    pub(super) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.state) as _
    }

    pub(super) fn is_of(&self, comm: &Arc<Inner>) -> bool {
        Arc::ptr_eq(&self.state.comm, comm)
    }

    /// Blocks this thread until chunk `index` has arrived. CPU only; on a GPU use a wait on a
    /// stream or in a kernel.
    ///
    /// # Errors
    /// The communicator's failure; [`Error::InvalidArgument`] for a word that does not exist or is
    /// in GPU memory; [`Error::Launch`], which names the chunk, if the chunk has not arrived within
    /// twice the communicator's timeout.
    pub fn wait(&self, index: usize) -> Result<()> {
        self.wait_for(index, THERE)
    }

    /// Adds `count` to the word of tile `index` by release: publishes all writes of this thread,
    /// and all writes of other threads that it has acquired. CPU only.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a word that does not exist or is in GPU memory.
    pub fn add(&self, index: usize, count: u32) -> Result<()> {
        self.on_cpu(index)?.fetch_add(count, Ordering::Release);
        Ok(())
    }

    /// Makes later work on `stream` wait until chunk `index` has arrived. On a GPU this is a stream
    /// memory operation (`cuStreamWaitValue32`, greater than or equal to 1), which occupies no
    /// multiprocessor; during a capture it becomes a node of the graph. The wait also ends if the
    /// operation fails; the operation's [`Work`](super::Work) reports the failure.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a word that does not exist, or a stream of another device;
    /// errors of the driver. On the CPU the returned ticket has the result of [`ReadyFlags::wait`].
    pub fn stream_wait(&self, stream: &Stream, index: usize) -> Result<Ticket> {
        let this = self.clone();
        self.on_stream(
            stream,
            index,
            Arc::new(move || this.wait_for(index, THERE)),
            |driver, raw, at| {
                // SAFETY: `on_stream` checked the index, and the closure keeps the words alive.
                unsafe { Ok(driver.wait_value(raw, at, THERE)?) }
            },
        )
    }

    /// Makes `stream` write `value` to the word of tile `index` after its previous work
    /// (`cuStreamWriteValue32`). Pass the tile's `target` if one producer completes the tile.
    ///
    /// # Errors
    /// The errors of [`ReadyFlags::stream_wait`].
    pub fn stream_write(&self, stream: &Stream, index: usize, value: u32) -> Result<Ticket> {
        let this = self.clone();
        let write = move || {
            this.on_cpu(index)?.store(value, Ordering::Release);
            Ok(())
        };
        self.on_stream(stream, index, Arc::new(write), move |driver, raw, at| {
            // SAFETY: `on_stream` checked the index, and the closure keeps the words alive.
            unsafe { Ok(driver.write_value(raw, at, value)?) }
        })
    }

    fn on_stream<G>(
        &self,
        stream: &Stream,
        index: usize,
        on_cpu: crate::cpu::HostFn,
        on_gpu: G,
    ) -> Result<Ticket>
    where
        G: Fn(&dyn gpu::driver::Driver, RawStream, u64) -> Result<()> + Send + Sync + 'static,
    {
        self.check(index)?;
        if stream.device() != self.device() {
            return Err(invalid(
                NAME,
                format!(
                    "a stream of {} for words on {}",
                    stream.device(),
                    self.device()
                ),
            ));
        }
        if !stream.device().is_gpu() {
            return stream.enqueue(stream.host_command(on_cpu));
        }
        let gpu = crate::gpus::open(stream.device())?;
        // SAFETY: `call` runs during the call of `enqueue`, while `stream` lives.
        let raw = unsafe { RawStream::from_raw(stream.as_raw() as usize) };
        let this = self.clone();
        let call = stream.call_command(Arc::new(move || {
            let at = this.as_ptr().wrapping_add(index) as u64;
            on_gpu(gpu.driver(), raw, at)
        }));
        stream.enqueue(call)
    }

    fn check(&self, index: usize) -> Result<()> {
        if index < self.len() {
            return Ok(());
        }
        Err(invalid(
            NAME,
            format!("word {index}; there are {}", self.len()),
        ))
    }

    fn on_cpu(&self, index: usize) -> Result<&AtomicU32> {
        self.check(index)?;
        if self.device().is_gpu() {
            return Err(invalid(
                NAME,
                format!(
                    "the words are in memory of {}, which this thread does not touch; use \
                     stream_wait, stream_write or a kernel",
                    self.device()
                ),
            ));
        }
        // SAFETY: `check` established `index < len`, and `self` keeps the words alive. While
        // operations run, the words are accessed only atomically.
        Ok(unsafe { AtomicU32::from_ptr(self.as_ptr().add(index)) })
    }

    fn wait_for(&self, index: usize, value: u32) -> Result<()> {
        let word = self.on_cpu(index)?;
        let (started, mut polls) = (Instant::now(), 0_u32);
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen >= FAILED {
                self.state.comm.check()?;
                return Err(Error::launch(format!(
                    "chunk {index} does not come: the operation that brings it has failed"
                )));
            }
            if seen >= value {
                return Ok(());
            }
            polls = polls.saturating_add(1);
            if polls < 64 {
                core::hint::spin_loop();
                continue;
            }
            if polls < 256 {
                thread::yield_now();
                continue;
            }
            self.state.comm.check()?;
            let waited = started.elapsed();
            if waited > 2 * self.state.timeout {
                return Err(Error::launch(format!(
                    "chunk {index} was not ready within {:.3} s (its word is {seen}): was its \
                     operation enqueued, on a stream that does not wait for this one?",
                    waited.as_secs_f64()
                )));
            }
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Clears all words on `compute`, after their latest use.
    pub(super) fn clear_on(&self, compute: &Stream) -> Result<()> {
        let capture = compute.capture_number()?;
        let last = self.last().clone();
        if let Some((event, _)) = last.filter(|(_, before)| *before == capture) {
            compute.wait_event(&event)?;
        }
        let state = &self.state;
        let clear = |of: &Tensor| gpu::Copy {
            to: of.as_ptr() as u64,
            from: state.zeros.as_ptr() as u64,
            bytes: (of.len() * of.dtype().size()) as u64,
            keep: [of.keep(), state.zeros.keep()],
        };
        let copies = Arc::new([clear(&state.words), clear(&state.arrivals)]);
        compute.enqueue(compute.copy_command(copies)).map(drop)
    }

    /// Records that the work just enqueued on `stream` uses the words.
    pub(super) fn used_on(&self, stream: &Stream) -> Result<()> {
        let event = Event::new();
        stream.record(&event)?;
        *self.last() = Some((event, stream.capture_number()?));
        Ok(())
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Option<(Event, Option<u64>)>> {
        // The value is replaced as a whole, so a poisoned lock still holds a valid value.
        self.state
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
