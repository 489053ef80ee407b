//! Streams of a GPU: the driver's, with what is in flight on them beside, so that memory stays alive and owners hear
//! of ends and failures.
//!
//! Nothing here waits for the device but [`Stream::wait`] and [`Stream::synchronize`]. Whoever asks finds out what has
//! ended since: there is no thread.

use core::any::Any;
use core::cell::Cell;
use core::ffi::c_void;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use super::device::Gpu;
use super::driver::{CaptureStatus, RawEvent, RawGraph, RawStream};
use super::event::Event;
use super::graph::{self, Exec, Graph, GraphExec, Logged};
use super::launch::Launch;
use crate::cpu::{HostFn, LaunchNote, LaunchOwner, message};
use crate::{Error, Result};

/// Failures whose work can still be asked for.
const MAX_FAILURES: usize = 1024;

/// How long a wait polls without giving the core away.
const SPIN: Duration = Duration::from_micros(50);

/// Work for a stream.
#[derive(Clone)]
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

/// A copy from device memory to device memory.
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u64,
    /// Keeps both alive.
    #[expect(dead_code, reason = "keeps memory alive")]
    pub(crate) keep: [Arc<dyn Any + Send + Sync>; 2],
}

/// A closure that the driver calls, and what it gave last.
pub(super) struct HostCall {
    call: HostFn,
    error: Mutex<Option<Error>>,
}

impl HostCall {
    pub(super) fn take_error(&self) -> Option<Error> {
        self.error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    unsafe extern "C" fn run(data: *mut c_void) {
        // SAFETY: the value is kept alive by whatever is in flight, or by the graph.
        let this = unsafe { &*data.cast::<Self>() };
        let result =
            panic::catch_unwind(AssertUnwindSafe(|| (this.call)())).unwrap_or_else(|panic| {
                Err(Error::launch(format!(
                    "work of the stream panicked: {}",
                    message(&*panic)
                )))
            });
        if let Err(error) = result {
            this.error
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(error);
        }
    }
}

/// A stream. Clones are the same stream.
#[derive(Clone)]
pub(crate) struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
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

/// Work in flight.
struct Flight {
    number: u64,
    event: RawEvent,
    sticky: bool,
    what: What,
}

enum What {
    Launch(
        Option<Arc<dyn LaunchOwner>>,
        u64,
        LaunchNote,
        crate::cpu::Keep,
    ),
    Graph(Arc<Exec>, u64, Vec<u64>),
    Host(Arc<HostCall>),
    Call(#[expect(dead_code, reason = "keeps memory alive")] HostFn),
    Copies(#[expect(dead_code, reason = "keeps memory alive")] Arc<[Copy]>),
    Failed(Error),
}

thread_local! {
    /// This thread tells an owner of an end: waiting for the same stream would not end.
    static SETTLING: Cell<usize> = const { Cell::new(0) };
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
        Self {
            inner: Arc::new(Inner {
                gpu: Arc::clone(gpu),
                raw,
                owned,
                state: Mutex::default(),
                poller: Mutex::default(),
                completed: AtomicU64::new(0),
            }),
        }
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

    /// The capture that the stream is in.
    fn capture(&self) -> Result<Option<(u64, RawGraph)>> {
        match self.inner.gpu.driver().capture_status(self.inner.raw)? {
            CaptureStatus::None => Ok(None),
            CaptureStatus::Active(number, graph) => Ok(Some((number, graph))),
            CaptureStatus::Invalidated => Err(Error::capture(
                "the capture became invalid by an earlier call; end it, and begin anew",
            )),
        }
    }

    pub(crate) fn is_capturing(&self) -> bool {
        !matches!(
            self.inner.gpu.driver().capture_status(self.inner.raw),
            Ok(CaptureStatus::None) | Err(_)
        )
    }

    /// Puts work behind all work of the stream, or into the graph while it is captured; its number (0 then).
    /// `sticky`: its failure is reported by the next [`Stream::synchronize`].
    pub(crate) fn enqueue(&self, task: Task, sticky: bool) -> Result<u64> {
        if let Some((capture, graph)) = self.capture()? {
            self.capture_task(task, capture, graph)?;
            return Ok(0);
        }
        self.inner.gpu.reap();
        self.poll();
        let _launching = self.inner.gpu.launch();
        let issued = self.issue(task, sticky);
        if issued.is_err() {
            self.inner.gpu.landed();
        }
        issued
    }

    /// Puts work on the stream; its number.
    fn issue(&self, task: Task, sticky: bool) -> Result<u64> {
        let driver = self.inner.gpu.driver();
        let raw = self.inner.raw;
        let what = match task {
            Task::Launch(launch) => {
                let word = match &launch.owner {
                    Some(owner) => match owner.before(&launch.note) {
                        Ok(word) => word,
                        Err(error) => return self.fly(What::Failed(error), sticky),
                    },
                    None => 0,
                };
                if let Err(error) = launch.issue(driver, raw) {
                    if let Some(owner) = &launch.owner {
                        let _ = owner.after(word, &launch.note, false);
                    }
                    return self.fly(What::Failed(error), sticky);
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
            Task::Call(call) => match call() {
                Ok(()) => What::Call(call),
                Err(error) => What::Failed(error),
            },
            Task::Copies(copies) => {
                self.copy_all(&copies)?;
                What::Copies(copies)
            }
            Task::Graph(exec) => {
                if !Arc::ptr_eq(&exec.inner.gpu, &self.inner.gpu) {
                    return Err(graph::other_device());
                }
                let mut words = self.state().words.pop().unwrap_or_default();
                let (number, admitted) = exec.inner.admit(&mut words);
                if let Err(error) = admitted {
                    return self.fly(What::Failed(error), sticky);
                }
                // SAFETY: what the graph holds was checked as it was captured, and it keeps alive what it needs.
                if let Err(error) = unsafe { driver.launch_graph(exec.inner.raw, raw) } {
                    let _ = exec.inner.settle(number, &words, false);
                    return self.fly(What::Failed(error), sticky);
                }
                What::Graph(exec.inner, number, words)
            }
        };
        self.fly(what, sticky)
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
                launch.issue(driver, self.inner.raw)?;
                graph::retain(
                    gpu,
                    raw_graph,
                    Box::new((launch.keep, launch.owner.clone())),
                )?;
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
                call()?;
                graph::retain(gpu, raw_graph, Box::new(call))?;
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
    fn fly(&self, what: What, sticky: bool) -> Result<u64> {
        let driver = self.inner.gpu.driver();
        let mut state = self.state();
        let event = match state.events.pop() {
            Some(event) => event,
            None => driver.create_event(false)?,
        };
        let recorded = driver.record_event(event, self.inner.raw);
        state.issued += 1;
        let number = state.issued;
        state.flights.push_back(Flight {
            number,
            event,
            sticky,
            what,
        });
        drop(state);
        if let Err(error) = recorded {
            // The flight is there, and ends with the next poll.
            tracing::warn!(%error, "an event could not be recorded");
        }
        Ok(number)
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
        self.inner.gpu.reap();
        self.state().sticky.take().map_or(Ok(()), Err)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.poll();
        self.state().flights.is_empty()
            && self
                .inner
                .gpu
                .driver()
                .query_stream(self.inner.raw)
                .unwrap_or(false)
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
        gpu.driver().begin_capture(self.inner.raw)?;
        let capture = self.capture()?.map(|(capture, _)| capture);
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
                "end: this stream joined a capture that another stream began; end it there"
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

    fn poll(&self) {
        // Whoever polls already does it for all.
        let Ok(_poller) = self.poller.try_lock() else {
            return;
        };
        let driver = self.gpu.driver();
        loop {
            let Some(event) = self.lock().flights.front().map(|flight| flight.event) else {
                return;
            };
            let lost = match driver.query_event(event) {
                Ok(false) => return,
                Ok(true) => None,
                Err(error) => Some(error),
            };
            let Some(flight) = self.lock().flights.pop_front() else {
                return;
            };
            let outer = SETTLING.replace(core::ptr::from_ref(self) as usize);
            let mut words = None;
            let ran = lost.is_none();
            let result = match flight.what {
                What::Launch(owner, word, note, keep) => {
                    let after = owner.map_or(Ok(()), |owner| owner.after(word, &note, ran));
                    drop(keep);
                    after
                }
                What::Graph(exec, number, list) => {
                    let after = exec.settle(number, &list, ran);
                    words = Some(list);
                    after
                }
                What::Host(call) => call.take_error().map_or(Ok(()), Err),
                What::Call(_) | What::Copies(_) => Ok(()),
                What::Failed(error) => Err(error),
            };
            SETTLING.set(outer);
            self.gpu.landed();
            let result = lost.map_or(result, Err);
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
}

impl Drop for Inner {
    fn drop(&mut self) {
        let driver = self.gpu.driver();
        // What is queued runs to its end; its memory must live until then.
        let flying = !self.lock().flights.is_empty();
        if flying && let Err(error) = driver.synchronize_stream(self.raw) {
            tracing::warn!(%error, "a stream was dropped after a failure of the device");
        }
        self.poll();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in state.events.drain(..).chain(
            state
                .flights
                .iter()
                .map(|flight| flight.event)
                .collect::<Vec<_>>(),
        ) {
            // SAFETY: events of this stream, which nobody else has.
            let _ = unsafe { driver.destroy_event(event) };
        }
        if let Some(capture) = state.capture.take() {
            let _ = graph::end(&self.gpu, capture);
            if let Ok(raw) = driver.end_capture(self.raw) {
                // SAFETY: nobody else has the graph.
                let _ = unsafe { driver.destroy_graph(raw) };
            }
        }
        if self.owned {
            // SAFETY: the last handle of a stream that `create_stream` gave.
            if let Err(error) = unsafe { driver.destroy_stream(self.raw) } {
                tracing::warn!(%error, "a stream could not be destroyed");
            }
        }
        self.gpu.reap();
    }
}
