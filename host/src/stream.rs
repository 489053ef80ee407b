//! Streams, events and graphs of any device.

use core::ffi::c_void;
use core::fmt;
use core::time::Duration;
use std::sync::{Arc, OnceLock};

use crate::cpu::{self, HostFn, Node};
use crate::device::Device;
use crate::gpu::driver::CaptureStatus;
use crate::gpu::{self, Gpu};
use crate::{Error, Result};

/// A queue of work that runs in order, on the CPU ([`crate::cpu::Stream`]) or on a GPU. Clones are the same stream.
///
/// Work that fails does not stop the work behind it; its error is the result of its [`Ticket`], and the first error is
/// returned by the next [`Stream::synchronize`]. When the last clone is dropped, what is queued still runs to its end.
#[derive(Clone)]
pub struct Stream(Kind);

#[derive(Clone)]
enum Kind {
    Cpu(cpu::Stream),
    Gpu(gpu::Stream),
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Cpu(stream) => stream.fmt(f),
            Kind::Gpu(stream) => stream.fmt(f),
        }
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self::new()
    }
}

impl From<cpu::Stream> for Stream {
    fn from(stream: cpu::Stream) -> Self {
        Self(Kind::Cpu(stream))
    }
}

/// Names a piece of work on the stream that it was enqueued on. Captured work has a ticket that is complete from the
/// start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(TicketKind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TicketKind {
    Cpu(cpu::Ticket),
    Gpu(u64),
}

/// Work of the communicator's, for any stream.
#[derive(Clone)]
pub(crate) enum Task {
    /// A kernel's native entry.
    Launch(cpu::Launch),
    /// A kernel of a GPU.
    Kernel(gpu::Launch),
    /// A closure that a graph may replay.
    Host(HostFn),
    /// A closure that puts work on a GPU's stream itself, called by whoever enqueues it.
    Call(HostFn),
    /// Copies within device memory.
    Copies(Arc<[gpu::Copy]>),
}

/// Whether a stream is captured: asked once for all that a piece of work takes, since on a GPU it is a call of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recording(RecordingKind);

#[derive(Clone, Copy, Debug)]
enum RecordingKind {
    Cpu(bool),
    Gpu(CaptureStatus),
}

impl Recording {
    /// Whether work is recorded instead of run (or, where a capture has become invalid, refused).
    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        match self.0 {
            RecordingKind::Cpu(captured) => captured,
            RecordingKind::Gpu(status) => status != CaptureStatus::None,
        }
    }

    /// What a GPU's driver has said.
    fn status(self) -> Result<CaptureStatus> {
        match self.0 {
            RecordingKind::Gpu(status) => Ok(status),
            RecordingKind::Cpu(_) => Err(other_device("the capture")),
        }
    }
}

fn other_device(what: &str) -> Error {
    Error::launch(format!("{what} is of another device than the stream"))
}

impl Task {
    fn node(self) -> Result<Node> {
        match self {
            Self::Launch(launch) => Ok(Node::Launch(launch)),
            Self::Host(call) | Self::Call(call) => Ok(Node::Host(call)),
            Self::Kernel(_) => Err(other_device("the kernel")),
            Self::Copies(copies) => Ok(Node::Host(Arc::new(move || {
                for copy in &*copies {
                    // SAFETY: `keep` has both ranges mapped; stream order keeps other users away.
                    unsafe {
                        core::ptr::copy_nonoverlapping(
                            copy.from as *const u8,
                            copy.to as *mut u8,
                            copy.bytes as usize,
                        );
                    }
                }
                Ok(())
            }))),
        }
    }

    /// Runs the work on this thread.
    pub(crate) fn execute(&self) -> Result<()> {
        match self {
            Self::Launch(launch) => launch.execute(),
            other => other.clone().node()?.execute(),
        }
    }

    fn gpu_task(self) -> Result<gpu::Task> {
        match self {
            Self::Launch(_) => Err(other_device("the kernel")),
            Self::Kernel(launch) => Ok(gpu::Task::Launch(launch)),
            Self::Host(call) => Ok(gpu::Task::Host(call)),
            Self::Call(call) => Ok(gpu::Task::Call(call)),
            Self::Copies(copies) => Ok(gpu::Task::Copies(copies)),
        }
    }
}

impl Stream {
    /// An idle stream of the CPU.
    pub fn new() -> Self {
        Self(Kind::Cpu(cpu::Stream::new()))
    }

    /// An idle stream of `device`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when the device is not there; what its driver says.
    pub fn on_device(device: Device) -> Result<Self> {
        match device {
            Device::Cpu => Ok(Self::new()),
            _ => Ok(Self(Kind::Gpu(gpu::Stream::new(&Gpu::open(device)?)?))),
        }
    }

    /// A stream of a GPU that somebody else made: a `CUstream` or `hipStream_t` of PyTorch, candle or C++. It is never
    /// synchronised but by the calls of this value that say so.
    ///
    /// # Safety
    /// `raw` is a stream of that device's primary context, and outlives this value, its clones and everything that was
    /// enqueued by them. A communicator keeps a clone of the stream that it was used on last, until it is used on
    /// another one or ends.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when the device is not there; [`Error::InvalidArgument`] for the CPU, and for the legacy default
    /// stream (0), which can be neither captured nor overlapped.
    pub unsafe fn adopt(device: Device, raw: *mut c_void) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::InvalidArgument {
                operation: "adopt stream",
                detail: "the legacy default stream cannot be captured, and orders all others: use a stream of your own \
                         (PyTorch: torch.cuda.Stream())"
                    .to_owned(),
            });
        }
        let raw = gpu::driver::RawStream(raw as usize);
        Ok(Self(Kind::Gpu(gpu::Stream::adopt(
            &Gpu::open(device)?,
            raw,
        ))))
    }

    /// Which device runs the work.
    pub fn device(&self) -> Device {
        match &self.0 {
            Kind::Cpu(_) => Device::Cpu,
            Kind::Gpu(stream) => stream.gpu().device(),
        }
    }

    /// The driver's handle (`CUstream`, `hipStream_t`); null on the CPU.
    pub fn as_raw(&self) -> *mut c_void {
        match &self.0 {
            Kind::Cpu(_) => core::ptr::null_mut(),
            Kind::Gpu(stream) => stream.raw().0 as *mut c_void,
        }
    }

    /// Tells streams apart: equal for clones of one stream.
    pub(crate) fn id(&self) -> usize {
        match &self.0 {
            Kind::Cpu(stream) => stream.id(),
            Kind::Gpu(stream) => stream.id(),
        }
    }

    /// Enqueues a closure, or puts it into the graph while the stream is captured. On a GPU it must not use the device.
    ///
    /// # Errors
    /// When the stream refuses it; a failure of the closure is the ticket's result.
    pub fn host_fn(&self, call: HostFn) -> Result<Ticket> {
        self.enqueue(Task::Host(call))
    }

    /// Whether the stream is captured.
    ///
    /// # Errors
    /// What a GPU's driver says.
    #[inline]
    pub(crate) fn recording(&self) -> Result<Recording> {
        Ok(Recording(match &self.0 {
            Kind::Cpu(stream) => RecordingKind::Cpu(stream.is_capturing()),
            Kind::Gpu(stream) => RecordingKind::Gpu(stream.capture_status()?),
        }))
    }

    pub(crate) fn enqueue(&self, task: Task) -> Result<Ticket> {
        self.enqueue_in(self.recording()?, task)
    }

    /// Enqueues work, or puts it into the graph while the stream is captured, as [`Stream::recording`] has just said.
    pub(crate) fn enqueue_in(&self, recording: Recording, task: Task) -> Result<Ticket> {
        Ok(Ticket(match &self.0 {
            Kind::Cpu(stream) => TicketKind::Cpu(stream.enqueue(match task.node()? {
                Node::Launch(launch) => cpu::Item::Launch(launch),
                Node::Host(call) => cpu::Item::HostFn(call),
                _ => return Err(Error::launch("a task is a launch or a call")),
            })?),
            Kind::Gpu(stream) => {
                let status = recording.status()?;
                TicketKind::Gpu(stream.enqueue_in(status, task.gpu_task()?, true)?)
            }
        }))
    }

    /// Runs `direct` on this thread if this is an idle stream of the CPU, else enqueues the same work and waits for it. The
    /// stream is not captured, as [`Stream::recording`] has just said.
    #[inline]
    pub(crate) fn run_or_enqueue(
        &self,
        recording: Recording,
        direct: impl FnOnce() -> Result<()>,
        task: impl FnOnce() -> Result<Task>,
    ) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.run_or_enqueue(direct, || {
                task().and_then(Task::node).unwrap_or_else(failing)
            }),
            Kind::Gpu(stream) => {
                let status = recording.status()?;
                let number = stream.enqueue_in(status, task()?.gpu_task()?, false)?;
                stream.wait(number, None)
            }
        }
    }

    /// Makes what `flights` pieces of work in flight take on a GPU.
    pub(crate) fn prime(&self, flights: usize) -> Result<()> {
        match &self.0 {
            Kind::Cpu(_) => Ok(()),
            Kind::Gpu(stream) => stream.prime(flights),
        }
    }

    /// Records `event` behind all work of the stream.
    ///
    /// # Errors
    /// When the stream refuses it, or the event was recorded on another device before.
    pub fn record(&self, event: &Event) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.record(&event.cpu).map(drop),
            Kind::Gpu(stream) => stream.record(event.on_gpu(stream.gpu())?),
        }
    }

    /// Has the work behind this wait for the latest record of `event`. A stream that waits for an event of a capture
    /// joins that capture.
    ///
    /// # Errors
    /// When the stream refuses it, or the event was recorded on another device.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        match (&self.0, event.gpu.get()) {
            (Kind::Cpu(stream), None) => stream.wait_event(&event.cpu).map(drop),
            (Kind::Gpu(stream), Some(event)) => stream.wait_event(event),
            // Never recorded.
            (Kind::Gpu(_), None) => Ok(()),
            (Kind::Cpu(_), Some(_)) => Err(other_device("the event")),
        }
    }

    /// Waits until all work is complete; returns the first error since the last call.
    ///
    /// # Errors
    /// The first failure of enqueued work since the last call; [`Error::CaptureState`] while the stream is capturing.
    pub fn synchronize(&self) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.synchronize(),
            Kind::Gpu(stream) => stream.synchronize(),
        }
    }

    /// Whether all work is complete.
    pub fn is_idle(&self) -> bool {
        match &self.0 {
            Kind::Cpu(stream) => stream.is_idle(),
            Kind::Gpu(stream) => stream.is_idle(),
        }
    }

    /// Whether a piece of work is complete, with or without success.
    pub fn is_complete(&self, ticket: Ticket) -> bool {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.is_complete(ticket),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => stream.is_complete(number),
            _ => false,
        }
    }

    /// Whether a piece of work has begun to run (or has ended). A GPU does not tell: there, work counts as begun when the
    /// work before it has ended.
    pub fn is_started(&self, ticket: Ticket) -> bool {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.is_started(ticket),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => {
                stream.is_complete(number.saturating_sub(1))
            }
            _ => false,
        }
    }

    /// The result of a piece of work, or `None` while it is not complete.
    pub fn result(&self, ticket: Ticket) -> Option<Result<()>> {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.result(ticket),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => stream.result(number),
            _ => Some(Err(other_device("the ticket"))),
        }
    }

    /// Waits until a piece of work is complete and returns its result. Without a timeout it waits as long as the work
    /// takes.
    ///
    /// # Errors
    /// The work's failure, or [`Error::StreamTimeout`].
    pub fn wait(&self, ticket: Ticket, timeout: Option<Duration>) -> Result<()> {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.wait(ticket, timeout),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => stream.wait(number, timeout),
            _ => Err(other_device("the ticket")),
        }
    }

    /// From now on work of this stream is recorded instead of run.
    ///
    /// # Errors
    /// [`Error::CaptureState`] when the stream is capturing already.
    pub fn begin_capture(&self) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.begin_capture(),
            Kind::Gpu(stream) => stream.begin_capture(),
        }
    }

    /// Ends the capture and returns what was recorded. Streams that joined it leave it.
    ///
    /// # Errors
    /// [`Error::CaptureState`] when the stream is not capturing, or joined a capture that another stream began.
    pub fn end_capture(&self) -> Result<Graph> {
        Ok(Graph(match &self.0 {
            Kind::Cpu(stream) => GraphKind::Cpu(stream.end_capture()?),
            Kind::Gpu(stream) => GraphKind::Gpu(stream.end_capture()?),
        }))
    }

    /// Whether work of this stream is recorded instead of run.
    #[inline]
    pub fn is_capturing(&self) -> bool {
        match &self.0 {
            Kind::Cpu(stream) => stream.is_capturing(),
            Kind::Gpu(stream) => stream.is_capturing(),
        }
    }
}

fn failing(error: Error) -> Node {
    Node::Host(Arc::new(move || Err(error.clone())))
}

/// A point in a stream's work that others can wait for. Clones are the same event.
///
/// As on CUDA, a wait is for the latest record that was enqueued before it, recording anew does not disturb earlier
/// waits, and an event that was never recorded counts as complete. An event belongs to the device on which it is recorded
/// first.
#[derive(Clone, Debug, Default)]
pub struct Event {
    cpu: cpu::Event,
    gpu: Arc<OnceLock<gpu::Event>>,
}

impl Event {
    /// An event that was never recorded.
    pub fn new() -> Self {
        Self::default()
    }

    fn on_gpu(&self, gpu: &Arc<Gpu>) -> Result<&gpu::Event> {
        if let Some(event) = self.gpu.get() {
            return Ok(event);
        }
        let made = gpu::Event::new(gpu)?;
        Ok(self.gpu.get_or_init(|| made))
    }

    /// Whether the latest record is complete.
    pub fn query(&self) -> bool {
        match self.gpu.get() {
            Some(event) => event.query().unwrap_or(true),
            None => self.cpu.query(),
        }
    }

    /// Waits until the record that is the latest now is complete.
    pub fn synchronize(&self) {
        match self.gpu.get() {
            Some(event) => {
                while !event.query().unwrap_or(true) {
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
            None => self.cpu.synchronize(),
        }
    }

    /// Time between the latest completed records of `start` and of this event; zero when this one came first. A GPU
    /// measures by its own clock.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when one of them is not complete or was never recorded.
    pub fn elapsed_since(&self, start: &Self) -> Result<Duration> {
        match (self.gpu.get(), start.gpu.get()) {
            (Some(end), Some(start)) => end.elapsed_since(start),
            (None, None) => self.cpu.elapsed_since(&start.cpu),
            _ => Err(Error::InvalidArgument {
                operation: "elapsed time",
                detail: "both events must have been recorded on one device".to_owned(),
            }),
        }
    }
}

/// Captured work; [`Graph::instantiate`] makes it runnable.
#[derive(Clone, Debug)]
pub struct Graph(GraphKind);

#[derive(Clone, Debug)]
enum GraphKind {
    Cpu(cpu::Graph),
    Gpu(gpu::Graph),
}

impl Graph {
    /// Number of pieces of work in the graph.
    pub fn len(&self) -> usize {
        match &self.0 {
            GraphKind::Cpu(graph) => graph.len(),
            GraphKind::Gpu(graph) => graph.len(),
        }
    }

    /// Whether nothing was captured. An empty graph can be instantiated and replayed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes a runnable graph. It holds all it needs: the captured graph may be dropped.
    ///
    /// # Errors
    /// What a GPU's driver says of a graph that it cannot run.
    pub fn instantiate(&self) -> Result<GraphExec> {
        Ok(GraphExec(match &self.0 {
            GraphKind::Cpu(graph) => ExecKind::Cpu(graph.instantiate()?),
            GraphKind::Gpu(graph) => ExecKind::Gpu(graph.instantiate()?),
        }))
    }
}

/// A runnable graph. Clones are the same graph.
///
/// On the CPU a replay runs the captured work in order and ends at the first failure, which is its result; on a GPU all of
/// it runs, and kernels of a communicator that has failed do nothing. Two replays of one graph on two streams are not
/// ordered with each other.
#[derive(Clone, Debug)]
pub struct GraphExec(ExecKind);

#[derive(Clone, Debug)]
enum ExecKind {
    Cpu(cpu::GraphExec),
    Gpu(gpu::GraphExec),
}

impl GraphExec {
    /// Enqueues a replay.
    ///
    /// # Errors
    /// When the stream refuses it. A failure of the replay itself is the ticket's result.
    pub fn launch(&self, stream: &Stream) -> Result<Ticket> {
        Ok(Ticket(match (&self.0, &stream.0) {
            (ExecKind::Cpu(graph), Kind::Cpu(stream)) => TicketKind::Cpu(graph.launch(stream)?),
            (ExecKind::Gpu(graph), Kind::Gpu(stream)) => {
                TicketKind::Gpu(stream.enqueue(gpu::Task::Graph(graph.clone()), true)?)
            }
            _ => return Err(other_device("the graph")),
        }))
    }

    /// Replays and waits for the end. When the stream is an idle one of the CPU the replay runs on this thread, without
    /// an allocation or a system call of its own.
    ///
    /// # Errors
    /// The first failure of the captured work.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        match (&self.0, &stream.0) {
            (ExecKind::Cpu(graph), Kind::Cpu(stream)) => graph.run(stream),
            (ExecKind::Gpu(graph), Kind::Gpu(stream)) => {
                let number = stream.enqueue(gpu::Task::Graph(graph.clone()), false)?;
                stream.wait(number, None)
            }
            _ => Err(other_device("the graph")),
        }
    }

    /// A number that no other graph of the process has.
    pub fn id(&self) -> u64 {
        match &self.0 {
            ExecKind::Cpu(graph) => graph.id(),
            ExecKind::Gpu(graph) => graph.id(),
        }
    }
}
