//! GPU streams. Each stream has a list of its work in flight, which keeps the memory of the work
//! alive. When work completes or fails, the stream notifies the owners of the work.
//!
//! Only [`Stream::wait`], [`Stream::synchronize`] and launches of a multi-rank grid wait for the
//! device. Dropping a stream passes its work in flight to the [`Gpu`] and does not wait. No
//! background thread exists: completed work is detected when a method polls.

mod capture;
mod ends;
mod issue;

use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockReadGuard, Weak};

pub(super) use self::ends::{is_settling, settling};
pub(crate) use self::issue::Command;
use super::device::Gpu;
use super::driver::{CaptureStatus, RawEvent, RawStream, StreamPriority};
use super::event::Event;
use super::graph;
pub(crate) use super::in_flight::Copy;
use super::in_flight::{DeferredRelease, InFlight, end_stream};
use crate::usage::{AccessList, PendingWork, WorkSource};
use crate::{Error, Result};

/// Sleep between two polls of the work of a dropped stream.
const NAP: Duration = Duration::from_micros(100);

/// A stream. Clones refer to the same stream.
#[derive(Clone)]
pub(crate) struct Stream {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    gpu: Arc<Gpu>,
    raw: RawStream,
    /// True if this crate created the driver's stream. In that case, the driver's stream is
    /// destroyed after this value has been dropped and the work is complete.
    owned: bool,
    /// The thread that adopted the stream, if it is a per-thread default stream. On another thread,
    /// the handle refers to another stream.
    thread: Option<usize>,
    /// True if the stream synchronises with the legacy default stream.
    blocking: bool,
    /// Number of SMs that kernels of an adopted stream may use, if the driver reports it.
    multiprocessors: Option<u32>,
    state: Mutex<State>,
    /// Locked by the thread that polls.
    poller: Mutex<()>,
    progress: Arc<Progress>,
}

/// The completed work of a stream. Lives longer than the stream if work is in flight when the
/// stream is dropped.
pub(super) struct Progress {
    /// Number of the latest completed operation.
    pub(super) completed: AtomicU64,
    stream: Weak<Inner>,
    gpu: Arc<Gpu>,
}

#[derive(Default)]
struct State {
    /// Number of the last enqueued operation.
    issued: u64,
    in_flight: VecDeque<InFlight>,
    /// Unused events, for reuse.
    events: Vec<RawEvent>,
    /// Unused lists for the results of `LaunchOwner::before` in graph replays, for reuse.
    words: Vec<Vec<u64>>,
    sticky: Option<Error>,
    failures: VecDeque<(u64, Error)>,
    /// The driver's number of the capture that this crate began on this stream.
    capture: Option<u64>,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Stream")
            .field("device", &self.inner.gpu.device())
            .field("in_flight", &state.in_flight.len())
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// Creates a stream.
    pub(crate) fn new(gpu: &Arc<Gpu>, priority: StreamPriority) -> Result<Self> {
        let raw = gpu.driver().create_stream(priority)?;
        Ok(Self::over(gpu, raw, true, (false, None)))
    }

    /// Wraps a stream that other code created, or a default stream. The stream must outlive the
    /// returned value and all work that is enqueued through the value.
    pub(crate) fn adopt(gpu: &Arc<Gpu>, raw: RawStream) -> Result<Self> {
        // 1 is a second handle of the legacy default stream in CUDA and HIP.
        let raw = match raw.as_raw() {
            1 => RawStream::LEGACY,
            _ => raw,
        };
        let driver = gpu.driver();
        let properties = (
            driver.is_blocking(raw)?,
            driver.stream_multiprocessors(raw)?,
        );
        Ok(Self::over(gpu, raw, false, properties))
    }

    fn over(
        gpu: &Arc<Gpu>,
        raw: RawStream,
        owned: bool,
        (blocking, multiprocessors): (bool, Option<u32>),
    ) -> Self {
        gpu.sweep();
        let inner = Arc::new_cyclic(|stream| Inner {
            gpu: Arc::clone(gpu),
            raw,
            owned,
            thread: (raw == RawStream::PER_THREAD).then(thread_number),
            blocking,
            multiprocessors,
            state: Mutex::default(),
            poller: Mutex::default(),
            progress: Arc::new(Progress {
                completed: AtomicU64::new(0),
                stream: Weak::clone(stream),
                gpu: Arc::clone(gpu),
            }),
        });
        gpu.know(Arc::downgrade(&inner));
        Self { inner }
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.inner.gpu
    }

    pub(crate) fn raw(&self) -> RawStream {
        self.inner.raw
    }

    /// Returns an identifier of the stream. It is equal for clones of a [`Stream`] and for all
    /// values that adopted the same driver stream.
    pub(crate) fn id(&self) -> usize {
        let gpu = self.inner.gpu.properties().ordinal as usize;
        match self.inner.raw {
            // The address of an `Inner` is even.
            _ if self.inner.owned => Arc::as_ptr(&self.inner) as usize,
            // An odd number that is less than the numbers of adopted handles, which are addresses.
            RawStream::LEGACY => gpu << 1 | 1,
            // A number that is greater than every address.
            RawStream::PER_THREAD => !(self.inner.thread.unwrap_or(0) << 12 | gpu),
            raw => raw.as_raw() << 1 | 1,
        }
    }

    /// Returns the [`source_id`](crate::usage::source_id) of the stream.
    pub(crate) fn source_id(&self) -> usize {
        Arc::as_ptr(&self.inner.progress) as usize
    }

    /// Returns the operation `number`.
    pub(crate) fn work(&self, number: u64) -> PendingWork {
        PendingWork {
            source: Arc::clone(&self.inner.progress) as Arc<dyn WorkSource>,
            number,
        }
    }

    /// Makes all later work of this stream wait for `work`.
    pub(crate) fn wait_work(&self, work: &PendingWork) -> Result<()> {
        let progress = work.source.as_any().downcast_ref::<Progress>();
        match progress.and_then(|progress| progress.stream.upgrade()) {
            Some(inner) => self.wait_operation(&Self { inner }, work.number),
            // The stream was dropped, and its events are gone.
            None => {
                work.source.wait(work.number);
                Ok(())
            }
        }
    }

    /// Adds accesses to those of the graph that the stream is capturing.
    pub(crate) fn note_accesses(&self, status: CaptureStatus, accesses: &AccessList<'_>) {
        if let CaptureStatus::Active(capture, _) = status {
            graph::log_accesses(&self.inner.gpu, capture, accesses);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.lock()
    }

    /// Makes all later work of this stream wait for all work that was enqueued on `source` through
    /// this library.
    pub(crate) fn wait_issued(&self, source: &Self) -> Result<()> {
        let issued = source.state().issued;
        self.wait_operation(source, issued)
    }

    pub(crate) fn record(&self, event: &Event) -> Result<()> {
        let _no_capture = self.enqueueing()?;
        let driver = self.inner.gpu.driver();
        Ok(driver.record_event(event.raw(), self.inner.raw)?)
    }

    /// Makes all later work of this stream wait for the operation `number` of `source`, and not for
    /// later operations of `source`.
    pub(crate) fn wait_operation(&self, source: &Self, number: u64) -> Result<()> {
        // The lock keeps the event of the operation from being recorded again. Once the wait is
        // enqueued, a later record does not change it.
        let _no_capture = self.enqueueing()?;
        let state = source.state();
        let Some(work) = state.in_flight.iter().find(|work| work.number == number) else {
            // The operation is complete.
            return Ok(());
        };
        if let Some(error) = &work.unrecorded {
            return Err(error.clone());
        }
        let driver = self.inner.gpu.driver();
        Ok(driver.wait_event(self.inner.raw, work.event)?)
    }

    pub(crate) fn wait_event(&self, event: &Event) -> Result<()> {
        let _no_capture = self.enqueueing()?;
        let driver = self.inner.gpu.driver();
        Ok(driver.wait_event(self.inner.raw, event.raw())?)
    }
}

impl Stream {
    /// Returns the number of SMs that kernels of an adopted stream may use, if the driver reports
    /// it.
    pub(crate) fn multiprocessors(&self) -> Option<u32> {
        self.inner.multiprocessors
    }

    /// Returns true if the driver synchronizes this stream and `other` implicitly, because one is
    /// the legacy default stream and the other is blocking.
    pub(crate) fn synchronizes_with(&self, other: &Self) -> bool {
        self.is_legacy() && other.inner.blocking || other.is_legacy() && self.inner.blocking
    }

    /// Returns true for the legacy default stream, of which a GPU has one per process.
    pub(crate) fn is_legacy(&self) -> bool {
        self.inner.raw == RawStream::LEGACY
    }

    /// Returns false for a default stream that cannot be used now: of another thread, or during the
    /// capture of another stream.
    pub(crate) fn can_record(&self) -> bool {
        self.check_use().is_ok()
    }

    /// Prepares a call that enqueues work. For the legacy default stream, locks out captures of
    /// this library that would begin before the returned guard is dropped. The caller must hold the
    /// guard only during calls of the driver.
    fn enqueueing(&self) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        match self.inner.raw {
            RawStream::LEGACY => {
                let guard = self.inner.gpu.no_capture();
                let guard = guard.ok_or_else(capture::legacy_blocked)?;
                // Another library may be capturing a blocking stream.
                self.capture_status()?;
                Ok(Some(guard))
            }
            RawStream::PER_THREAD => self.inner.check_thread().map(|()| None),
            _ => Ok(None),
        }
    }

    /// Refuses a call that would use the handle of a default stream where it cannot be used: on
    /// another thread, or during the capture of another stream.
    fn check_use(&self) -> Result<()> {
        match self.inner.raw {
            RawStream::LEGACY | RawStream::PER_THREAD => self.capture_status().map(|_| ()),
            _ => Ok(()),
        }
    }
}

/// Returns a number of the calling thread that no other thread of the process gets.
fn thread_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// Returns true if `number` is the number of the calling thread.
pub(super) fn is_this_thread(number: usize) -> bool {
    number == thread_number()
}

impl Progress {
    /// Returns the address of the stream, which may have been dropped.
    pub(super) fn stream(&self) -> *const Inner {
        self.stream.as_ptr()
    }
}

impl WorkSource for Progress {
    fn is_complete(&self, number: u64) -> bool {
        self.completed.load(Ordering::Acquire) >= number
    }

    fn wait(&self, number: u64) {
        if let Some(inner) = self.stream.upgrade() {
            let _ = Stream { inner }.wait(number, None);
            return;
        }
        while !self.is_complete(number) {
            self.gpu.sweep();
            std::thread::sleep(NAP);
        }
    }

    fn is_started(&self, _number: u64) -> bool {
        // Drivers do not report starts.
        true
    }

    fn poll(&self, number: u64) -> bool {
        match self.stream.upgrade() {
            Some(inner) => Stream { inner }.is_complete(number),
            None => {
                self.gpu.sweep();
                self.is_complete(number)
            }
        }
    }

    fn is_current(&self) -> bool {
        ends::is_settling_of(self.stream.as_ptr())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Inner {
    /// Fails if this is a per-thread default stream that another thread adopted.
    fn check_thread(&self) -> Result<()> {
        match self.thread {
            Some(thread) if thread != thread_number() => Err(Error::InvalidArgument {
                operation: "stream",
                detail: "the per-thread default stream (handle 2) was adopted by another thread, \
                         and the handle refers to a different stream on this thread; adopt it on \
                         this thread, or use a stream that all threads can use"
                    .to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let driver = self.gpu.driver();
        if let Some(capture) = self.take_capture() {
            let _ = graph::end(&self.gpu, capture);
            if self.check_thread().is_ok()
                && let Ok(raw) = driver.end_capture(self.raw)
            {
                // SAFETY: `end_capture` has just returned the graph, and no other code has its
                // handle.
                let _ = unsafe { driver.destroy_graph(raw) };
            }
        }
        self.poll();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in state.events.drain(..) {
            // SAFETY: `create_event` returned the event, and this list was its only owner.
            let _ = unsafe { driver.destroy_event(event) };
        }
        // Enqueued work continues to run, and its memory must live until the work is complete.
        // `drop` must not wait for the work, because the work may be waiting for a later call by
        // this thread, and because the stream may belong to other code.
        let in_flight = core::mem::take(&mut state.in_flight);
        let stream = self.owned.then_some(self.raw);
        if in_flight.is_empty() {
            if let Some(stream) = stream {
                end_stream(driver, stream);
            }
        } else {
            self.gpu.defer_release(DeferredRelease {
                in_flight,
                stream,
                progress: Arc::clone(&self.progress),
            });
        }
        self.gpu.reap();
    }
}
