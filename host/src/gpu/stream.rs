//! Streams of a GPU: the driver's, with what is in flight on them beside, so that memory stays alive and owners hear
//! of ends and failures.
//!
//! Nothing here waits for the device but [`Stream::wait`] and [`Stream::synchronize`], not even the end of a stream:
//! what is in flight then is left to the [`Gpu`]. Whoever asks finds out what has ended since: there is no thread.

use core::cell::Cell;
use core::ffi::c_void;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::Instant;

use super::device::{Airborne, Gpu};
use super::driver::{CaptureStatus, RawEvent, RawGraph, RawStream};
use super::event::Event;
pub(crate) use super::flight::Copy;
use super::flight::{Flight, HostCall, Leftover, What, end_stream};
use super::graph::{self, Graph, GraphExec, Logged};
use super::launch::Launch;
use crate::cpu::HostFn;
use crate::{Error, Result};

/// Failures whose work can still be asked for.
const MAX_FAILURES: usize = 1024;

/// How long a wait polls without giving the core away.
const SPIN: Duration = Duration::from_micros(50);

/// Work for a stream.
#[derive(Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "a boxed launch would allocate at each call"
)]
pub(crate) enum Task {
    /// A kernel.
    Launch(Launch),
    /// A closure that a graph may replay.
    Host(HostFn),
    /// A closure that puts work on the stream itself, called at once.
    Call(HostFn),
    /// Copies, one behind the other.
    Copies(Arc<[Copy]>),
    /// A graph.
    Graph(GraphExec),
}

/// A stream. Clones are the same stream.
#[derive(Clone)]
pub(crate) struct Stream {
    inner: Arc<Inner>,
}

pub(super) struct Inner {
    gpu: Arc<Gpu>,
    raw: RawStream,
    /// Made here; else it belongs to somebody else.
    owned: bool,
    state: Mutex<State>,
    /// Held by the thread that looks for what has ended.
    poller: Mutex<()>,
    completed: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Number of the last piece of work.
    issued: u64,
    flights: VecDeque<Flight>,
    /// Events and lists to be used again.
    events: Vec<RawEvent>,
    words: Vec<Vec<u64>>,
    sticky: Option<Error>,
    failures: VecDeque<(u64, Error)>,
    /// The capture that this stream has begun.
    capture: Option<u64>,
}

thread_local! {
    /// This thread tells an owner of an end: waiting for the same stream would not end.
    static SETTLING: Cell<usize> = const { Cell::new(0) };
}

/// Whether this thread has come by the end of work on its way to something else, and must not wait: to free memory may
/// take long, and wait for work that waits for this very thread.
pub(super) fn is_settling() -> bool {
    SETTLING.get() != 0
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Stream")
            .field("device", &self.inner.gpu.device())
            .field("in_flight", &state.flights.len())
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// A new stream.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        let raw = gpu.driver().create_stream()?;
        Ok(Self::over(gpu, raw, true))
    }

    /// Somebody else's stream, which outlives this value and everything that was enqueued by it.
    pub(crate) fn adopt(gpu: &Arc<Gpu>, raw: RawStream) -> Self {
        Self::over(gpu, raw, false)
    }

    fn over(gpu: &Arc<Gpu>, raw: RawStream, owned: bool) -> Self {
        gpu.sweep();
        let inner = Arc::new(Inner {
            gpu: Arc::clone(gpu),
            raw,
            owned,
            state: Mutex::default(),
            poller: Mutex::default(),
            completed: AtomicU64::new(0),
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

    /// Tells streams apart; the same for two values that adopted one stream.
    pub(crate) fn id(&self) -> usize {
        if self.inner.owned {
            Arc::as_ptr(&self.inner) as usize
        } else {
            // An odd number is nobody's address.
            self.inner.raw.0 << 1 | 1
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.lock()
    }

    /// What the driver says of the stream's capture.
    pub(crate) fn capture_status(&self) -> Result<CaptureStatus> {
        self.inner.gpu.driver().capture_status(self.inner.raw)
    }

    /// The capture that the stream is in.
    fn capture(status: CaptureStatus) -> Result<Option<(u64, RawGraph)>> {
        match status {
            CaptureStatus::None => Ok(None),
            CaptureStatus::Active(number, graph) => Ok(Some((number, graph))),
            CaptureStatus::Invalidated => Err(Error::capture(
                "the capture became invalid by an earlier call; end it, and begin anew",
            )),
        }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        !matches!(self.capture_status(), Ok(CaptureStatus::None) | Err(_))
    }

    /// Puts work behind all work of the stream, or into the graph while it is captured; its number (0 then).
    /// `sticky`: its failure is reported by the next [`Stream::synchronize`].
    pub(crate) fn enqueue(&self, task: Task, sticky: bool) -> Result<u64> {
        self.enqueue_in(self.capture_status()?, task, sticky)
    }

    /// As [`Stream::enqueue`], where the driver has just said whether the stream is captured.
    pub(crate) fn enqueue_in(
        &self,
        status: CaptureStatus,
        task: Task,
        sticky: bool,
    ) -> Result<u64> {
        if let Some((capture, graph)) = Self::capture(status)? {
            self.capture_task(task, capture, graph)?;
            return Ok(0);
        }
        self.poll();
        // Before the work: what is in flight must be known to be.
        let spare = self.state().events.pop();
        let event = match spare {
            Some(event) => event,
            None => self.inner.gpu.driver().create_event(false)?,
        };
        let (airborne, _launching) = self.inner.gpu.launch();
        match self.issue(task) {
            Ok(what) => Ok(self.fly(event, what, sticky, airborne)),
            Err(error) => {
                self.state().events.push(event);
                Err(error)
            }
        }
    }

    /// Puts work on the stream. What fails without being refused ([`What::Failed`]) has its place in the order.
    fn issue(&self, task: Task) -> Result<What> {
        let driver = self.inner.gpu.driver();
        let raw = self.inner.raw;
        Ok(match task {
            Task::Launch(launch) => {
                let word = match &launch.owner {
                    Some(owner) => match owner.before(&launch.note) {
                        Ok(word) => word,
                        Err(error) => return Ok(What::Failed(error, launch.keep)),
                    },
                    None => 0,
                };
                if let Err(error) = launch.issue(driver, raw) {
                    if let Some(owner) = &launch.owner {
                        let _ = owner.after(word, &launch.note, false);
                    }
                    return Ok(What::Failed(error, launch.keep));
                }
                What::Launch(launch.owner, word, launch.note, launch.keep)
            }
            Task::Host(call) => {
                let call = Arc::new(HostCall {
                    call,
                    error: Mutex::default(),
                });
                let data = Arc::as_ptr(&call).cast_mut().cast::<c_void>();
                // SAFETY: the flight keeps the value alive until the stream has come past it.
                unsafe { driver.host_function(raw, HostCall::run, data)? };
                What::Host(call)
            }
            // What fails half-way may have put work on the stream all the same.
            Task::Call(call) => {
                let failed = call().err();
                What::Call(call, failed)
            }
            Task::Copies(copies) => {
                let failed = self.copy_all(&copies).err();
                What::Copies(copies, failed)
            }
            Task::Graph(exec) => {
                if !Arc::ptr_eq(&exec.inner.gpu, &self.inner.gpu) {
                    return Err(graph::other_device());
                }
                let mut words = self.state().words.pop().unwrap_or_default();
                let (number, admitted) = exec.inner.admit(&mut words);
                let launched = admitted.and_then(|()| {
                    // SAFETY: what the graph holds was checked as it was captured, and it keeps alive what it needs.
                    let launched = unsafe { driver.launch_graph(exec.inner.raw, raw) };
                    launched.inspect_err(|_| {
                        let _ = exec.inner.settle(number, &words, false);
                    })
                });
                if let Err(error) = launched {
                    self.state().words.push(words);
                    return Ok(What::Failed(error, Default::default()));
                }
                What::Graph(exec.inner, number, words)
            }
        })
    }

    fn copy_all(&self, copies: &[Copy]) -> Result<()> {
        for copy in copies.iter().filter(|copy| copy.bytes > 0) {
            // SAFETY: `keep` has both ranges mapped until the copy is done.
            unsafe {
                self.inner
                    .gpu
                    .driver()
                    .copy(copy.to, copy.from, copy.bytes, self.inner.raw)?;
            }
        }
        Ok(())
    }

    fn capture_task(&self, task: Task, capture: u64, raw_graph: RawGraph) -> Result<()> {
        let gpu = &self.inner.gpu;
        let driver = gpu.driver();
        match task {
            Task::Launch(launch) => {
                // First: a graph must not hold what nothing keeps alive.
                let keep = Box::new((launch.keep.clone(), launch.owner.clone()));
                graph::retain(gpu, raw_graph, keep)?;
                launch.issue(driver, self.inner.raw)?;
                if let Some(owner) = launch.owner {
                    graph::note(gpu, capture, Logged::Launch(owner, launch.note));
                }
            }
            Task::Host(call) => {
                let call = Arc::new(HostCall {
                    call,
                    error: Mutex::default(),
                });
                let data = Arc::as_ptr(&call).cast_mut().cast::<c_void>();
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&call)))?;
                // SAFETY: the graph keeps the value alive.
                unsafe { driver.host_function(self.inner.raw, HostCall::run, data)? };
                graph::note(gpu, capture, Logged::Host(call));
            }
            Task::Call(call) => {
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&call)))?;
                call()?;
            }
            Task::Copies(copies) => {
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&copies)))?;
                self.copy_all(&copies)?;
            }
            Task::Graph(_) => {
                return Err(Error::capture(
                    "a graph cannot be captured into another one on a GPU; capture its work itself",
                ));
            }
        }
        Ok(())
    }

    /// Notes work that was just put on the stream; its number.
    fn fly(&self, event: RawEvent, what: What, sticky: bool, airborne: Airborne) -> u64 {
        let mut state = self.state();
        let recorded = self.inner.gpu.driver().record_event(event, self.inner.raw);
        state.issued += 1;
        let number = state.issued;
        state.flights.push_back(Flight {
            number,
            event,
            unrecorded: recorded.err(),
            sticky,
            what,
            _airborne: airborne,
        });
        number
    }

    /// Makes the events of `flights` pieces of work in flight.
    pub(crate) fn prime(&self, flights: usize) -> Result<()> {
        self.poll();
        let missing = {
            let mut state = self.state();
            state.flights.reserve(flights);
            flights.saturating_sub(state.events.len() + state.flights.len())
        };
        for _ in 0..missing {
            let event = self.inner.gpu.driver().create_event(false)?;
            self.state().events.push(event);
        }
        Ok(())
    }

    /// Finds out what has ended, and tells its owners.
    fn poll(&self) {
        self.inner.poll();
    }

    pub(crate) fn is_complete(&self, number: u64) -> bool {
        if self.inner.completed.load(Ordering::Acquire) >= number {
            return true;
        }
        self.poll();
        self.inner.completed.load(Ordering::Acquire) >= number
    }

    /// The result of a piece of work, or `None` while it has not ended.
    pub(crate) fn result(&self, number: u64) -> Option<Result<()>> {
        self.is_complete(number).then(|| self.failure_of(number))
    }

    fn failure_of(&self, number: u64) -> Result<()> {
        let state = self.state();
        state
            .failures
            .iter()
            .find(|(failed, _)| *failed == number)
            .map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// Waits until a piece of work has ended; its result.
    pub(crate) fn wait(&self, number: u64, timeout: Option<Duration>) -> Result<()> {
        if !self.is_complete(number) {
            if SETTLING.get() == Arc::as_ptr(&self.inner) as usize {
                return Err(Error::launch("wait on a stream from within its own work"));
            }
            let start = Instant::now();
            let mut naps = 0;
            while !self.is_complete(number) {
                let elapsed = start.elapsed();
                if let Some(timeout) = timeout.filter(|timeout| elapsed > *timeout) {
                    let seconds = timeout.as_secs_f64();
                    return Err(Error::StreamTimeout { seconds });
                }
                if elapsed < SPIN {
                    core::hint::spin_loop();
                } else {
                    naps += 1;
                    thread::sleep(Duration::from_micros(10 * u64::from(naps.min(20u32))));
                }
            }
        }
        self.failure_of(number)
    }

    /// Waits until all work is done; the first failure since the last call.
    pub(crate) fn synchronize(&self) -> Result<()> {
        if self.is_capturing() {
            return Err(Error::capture("a capturing stream cannot be synchronized"));
        }
        let last = self.state().issued;
        let _ = self.wait(last, None);
        // What others have enqueued too.
        self.inner.gpu.driver().synchronize_stream(self.inner.raw)?;
        self.state().sticky.take().map_or(Ok(()), Err)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.poll();
        if !self.state().flights.is_empty() {
            return false;
        }
        // To ask for the stream would end a capture.
        let driver = self.inner.gpu.driver();
        self.is_capturing() || driver.query_stream(self.inner.raw).unwrap_or(false)
    }

    pub(crate) fn record(&self, event: &Event) -> Result<()> {
        self.inner
            .gpu
            .driver()
            .record_event(event.raw(), self.inner.raw)
    }

    pub(crate) fn wait_event(&self, event: &Event) -> Result<()> {
        self.inner
            .gpu
            .driver()
            .wait_event(self.inner.raw, event.raw())
    }

    pub(crate) fn begin_capture(&self) -> Result<()> {
        let gpu = &self.inner.gpu;
        if self.is_capturing() {
            return Err(Error::capture("begin: this stream is capturing already"));
        }
        if let Some(ended) = self.state().capture.take() {
            // Somebody else has ended the capture that began here.
            let _ = graph::end(gpu, ended);
        }
        gpu.driver().begin_capture(self.inner.raw)?;
        let capture = Self::capture(self.capture_status()?)?.map(|(capture, _)| capture);
        if let Some(capture) = capture {
            graph::begin(gpu, capture);
        }
        self.state().capture = capture;
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> Result<Graph> {
        let gpu = &self.inner.gpu;
        let Some(capture) = self.state().capture.take() else {
            let detail = if self.is_capturing() {
                "end: this stream joined a capture that another stream began, or its own was begun by somebody else; \
                 end it there"
            } else {
                "end: this stream is not capturing"
            };
            return Err(Error::capture(detail));
        };
        let log = graph::end(gpu, capture);
        let raw = gpu.driver().end_capture(self.inner.raw)?;
        Graph::new(gpu, raw, log)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn poll(&self) {
        // Whoever polls already does it for all.
        let _poller = match self.poller.try_lock() {
            Ok(poller) => poller,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let driver = self.gpu.driver();
        loop {
            let front = self.lock().flights.front().map(|flight| {
                let recorded = flight.unrecorded.is_none();
                (flight.event, recorded)
            });
            let Some((event, recorded)) = front else {
                return;
            };
            let ended = if recorded {
                driver.query_event(event)
            } else {
                self.is_past_unrecorded()
            };
            let mut lost = match ended {
                Ok(false) => return,
                Ok(true) => None,
                Err(error) => Some(error),
            };
            let Some(flight) = self.lock().flights.pop_front() else {
                return;
            };
            let outer = SETTLING.replace(core::ptr::from_ref(self) as usize);
            let (mut result, words) = Flight::settle(flight.what, lost.take());
            SETTLING.set(outer);
            if let Some(error) = flight.unrecorded {
                result = result.and(Err(error));
            }
            let mut state = self.lock();
            state.events.push(flight.event);
            state.words.extend(words);
            if let Err(error) = result {
                if flight.sticky && state.sticky.is_none() {
                    state.sticky = Some(error.clone());
                }
                if state.failures.len() == MAX_FAILURES {
                    state.failures.pop_front();
                }
                state.failures.push_back((flight.number, error));
            }
            self.completed.store(flight.number, Ordering::Release);
        }
    }

    /// Whether work has ended that has no event: when all of the stream's has.
    fn is_past_unrecorded(&self) -> Result<bool> {
        let driver = self.gpu.driver();
        match driver.capture_status(self.raw)? {
            CaptureStatus::None => driver.query_stream(self.raw),
            // To ask would end the capture.
            _ => Ok(false),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let driver = self.gpu.driver();
        let capture = self.lock().capture.take();
        if let Some(capture) = capture {
            let _ = graph::end(&self.gpu, capture);
            if let Ok(raw) = driver.end_capture(self.raw) {
                // SAFETY: nobody else has the graph.
                let _ = unsafe { driver.destroy_graph(raw) };
            }
        }
        self.poll();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in state.events.drain(..) {
            // SAFETY: an event of this stream, which nobody else has.
            let _ = unsafe { driver.destroy_event(event) };
        }
        // What is queued runs to its end, and its memory lives until then. Nobody waits for that here: the thread
        // may be the one whose next call the work waits for, and the stream may be somebody else's.
        let flights = core::mem::take(&mut state.flights);
        let stream = self.owned.then_some(self.raw);
        if flights.is_empty() {
            if let Some(stream) = stream {
                end_stream(driver, stream);
            }
        } else {
            self.gpu.linger(Leftover { flights, stream });
        }
        self.gpu.reap();
    }
}
