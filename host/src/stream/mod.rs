//! Streams, events and graphs of any device.

mod event;
mod graph;
mod task;

use core::ffi::c_void;
use core::fmt;
use core::time::Duration;

pub use self::event::Event;
use self::graph::GraphKind;
pub use self::graph::{Graph, GraphExec};
pub(crate) use self::task::{Recording, Task};
use self::task::{RecordingKind, failing};
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

fn other_device(what: &str) -> Error {
    Error::launch(format!("{what} is of another device than the stream"))
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

    /// Creates the events that `count` operations in flight use on a GPU.
    pub(crate) fn prime(&self, count: usize) -> Result<()> {
        match &self.0 {
            Kind::Cpu(_) => Ok(()),
            Kind::Gpu(stream) => stream.prime(count),
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

    /// While the stream is captured: a replay on the CPU runs what it records from now on beside the work of other streams, as
    /// a GPU does by itself.
    pub(crate) fn branch(&self) {
        if let Kind::Cpu(stream) = &self.0 {
            stream.branch();
        }
    }

    /// Tells the capture that the stream is in from every other that goes on.
    pub(crate) fn capture_number(&self) -> Result<Option<u64>> {
        match &self.0 {
            Kind::Cpu(stream) => Ok(stream.capture_number()),
            Kind::Gpu(stream) => match stream.capture_status()? {
                CaptureStatus::None => Ok(None),
                CaptureStatus::Active(number, _) => Ok(Some(number)),
                CaptureStatus::Invalidated => Err(Error::capture(
                    "the capture became invalid by an earlier call; end it, and begin anew",
                )),
            },
        }
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
