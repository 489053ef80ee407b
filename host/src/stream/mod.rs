//! Streams, events and graphs of any device.

mod command;
mod event;
mod graph;
mod recording;

use core::ffi::c_void;
use core::fmt;
use core::time::Duration;
use std::sync::Arc;

pub(crate) use self::command::Command;
pub use self::event::Event;
use self::graph::GraphKind;
pub use self::graph::{Graph, GraphExec};
pub(crate) use self::recording::Recording;
use self::recording::RecordingKind;
use crate::cpu::{self, HostFn};
use crate::device::Device;
use crate::gpu;
use crate::gpu::driver::StreamPriority;
use crate::usage::{AccessList, InUse, PendingWork, User, Uses, WorkSource};
use crate::{Error, Result};

/// A queue of work that runs in order, on the CPU ([`crate::cpu::CpuStream`]) or on a GPU. Clones
/// refer to the same stream.
///
/// If an operation fails, later operations still run. The error is the result of the [`Ticket`] of
/// the operation, and the next [`Stream::synchronize`] returns the first error. Dropping the last
/// clone does not cancel enqueued work.
#[derive(Clone)]
pub struct Stream(Kind);

#[derive(Clone)]
enum Kind {
    Cpu(cpu::CpuStream),
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

impl From<cpu::CpuStream> for Stream {
    fn from(stream: cpu::CpuStream) -> Self {
        Self(Kind::Cpu(stream))
    }
}

/// Identifies an operation. A ticket is valid only for the stream on which the operation was
/// enqueued. The ticket of a captured operation counts as complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(TicketKind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TicketKind {
    Cpu(cpu::CpuTicket),
    Gpu(u64),
}

fn other_device(what: &str) -> Error {
    Error::launch(format!("{what} is of another device than the stream"))
}

impl Stream {
    /// Creates an idle CPU stream.
    pub fn new() -> Self {
        Self(Kind::Cpu(cpu::CpuStream::new()))
    }

    /// Creates an idle stream of `device`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device does not exist, or the driver's error.
    pub fn on_device(device: Device) -> Result<Self> {
        Self::with_priority(device, StreamPriority::Normal)
    }

    /// Creates an idle stream of `device`, like [`Stream::on_device`], with a priority over other
    /// streams of the process on the same GPU. The CPU has no priorities.
    ///
    /// # Errors
    /// The errors of [`Stream::on_device`].
    pub fn with_priority(device: Device, priority: StreamPriority) -> Result<Self> {
        Ok(match device {
            Device::Cpu => Self::new(),
            _ => Self(Kind::Gpu(gpu::Stream::new(
                &crate::gpus::open(device)?,
                priority,
            )?)),
        })
    }

    /// Wraps a GPU stream that other code created, for example a `CUstream` or `hipStream_t` of
    /// PyTorch, candle or a C++ program. The wrapper never synchronises the stream, except in
    /// methods that are documented to block.
    ///
    /// The default streams are adopted by their handles:
    ///
    /// - **Legacy default stream** (null or 1), which is PyTorch's default stream. Work is launched
    ///   on this stream itself, so it runs in order with all other work of the stream and of the
    ///   blocking streams. The stream cannot be captured. While a blocking stream of any library or
    ///   a stream of this library is capturing, every call that would use the stream fails with
    ///   [`Error::CaptureState`] and leaves the capture valid.
    /// - **Per-thread default stream** (2), a blocking stream. The handle refers to a different
    ///   stream on each thread, so only the calling thread can enqueue work through the returned
    ///   value; other threads get [`Error::InvalidArgument`]. The stream can be captured. A capture
    ///   that is still active when the value is dropped on another thread is not ended.
    ///
    /// If a communicator was last used on a default stream that cannot be used now, its next
    /// operation on another stream waits for the work that was enqueued through this library, but
    /// not for replays by other code.
    ///
    /// # Safety
    /// `raw` must be a stream of the device's primary context, or of a green context of the device.
    /// The stream `raw` must outlive the returned [`Stream`], all clones of it, and all work that
    /// is enqueued through them. A communicator keeps a clone of the stream of its latest operation
    /// until the communicator is used on another stream or dropped.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device does not exist; [`Error::InvalidArgument`] if `device` is
    /// the CPU.
    pub unsafe fn adopt(device: Device, raw: *mut c_void) -> Result<Self> {
        // SAFETY: the precondition of this function.
        let raw = unsafe { gpu::driver::RawStream::from_raw(raw as usize) };
        Ok(Self(Kind::Gpu(gpu::Stream::adopt(
            &crate::gpus::open(device)?,
            raw,
        )?)))
    }

    /// Returns the device of the stream.
    pub fn device(&self) -> Device {
        match &self.0 {
            Kind::Cpu(_) => Device::Cpu,
            Kind::Gpu(stream) => stream.gpu().device(),
        }
    }

    /// Returns the driver's handle (`CUstream`, `hipStream_t`), or null for a CPU stream.
    pub fn as_raw(&self) -> *mut c_void {
        match &self.0 {
            Kind::Cpu(_) => core::ptr::null_mut(),
            Kind::Gpu(stream) => stream.raw().as_raw() as *mut c_void,
        }
    }

    /// Returns an identifier that is equal for clones of one stream and distinct otherwise.
    pub(crate) fn id(&self) -> usize {
        match &self.0 {
            Kind::Cpu(stream) => stream.id(),
            Kind::Gpu(stream) => stream.id(),
        }
    }

    /// Enqueues a closure, or captures it while the stream is capturing. On a GPU stream the
    /// closure must not call the driver library.
    ///
    /// # Errors
    /// Fails if the stream cannot enqueue the closure. If the closure fails, its error is the
    /// result of the ticket.
    pub fn host_fn(&self, call: HostFn) -> Result<Ticket> {
        self.enqueue(self.host_command(call))
    }

    /// Returns the capture state of the stream.
    ///
    /// # Errors
    /// Returns the GPU driver's error.
    #[inline]
    pub(crate) fn recording(&self) -> Result<Recording> {
        Ok(Recording(match &self.0 {
            Kind::Cpu(stream) if stream.is_capturing() => RecordingKind::CpuCapturing,
            Kind::Cpu(_) => RecordingKind::Cpu,
            Kind::Gpu(stream) => RecordingKind::Gpu(stream.capture_status()?),
        }))
    }

    pub(crate) fn enqueue(&self, command: Command) -> Result<Ticket> {
        self.enqueue_in(self.recording()?, command)
    }

    /// Enqueues an operation, or captures it while the stream is capturing. `recording` is the
    /// result of a preceding [`Stream::recording`].
    pub(crate) fn enqueue_in(&self, recording: Recording, command: Command) -> Result<Ticket> {
        self.enqueue_reporting(recording, command, true)
    }

    /// Enqueues an operation like [`Stream::enqueue_in`]. If `sticky` is true, the next
    /// [`Stream::synchronize`] reports its failure.
    fn enqueue_reporting(
        &self,
        recording: Recording,
        command: Command,
        sticky: bool,
    ) -> Result<Ticket> {
        Ok(Ticket(match (&self.0, command) {
            (Kind::Cpu(stream), Command::Cpu(command)) => {
                TicketKind::Cpu(stream.enqueue_if(command, recording.is_some(), sticky)?)
            }
            (Kind::Gpu(stream), Command::Gpu(command)) => {
                TicketKind::Gpu(stream.enqueue_in(recording.status()?, command, sticky)?)
            }
            _ => return Err(other_device("the work")),
        }))
    }

    /// Runs `direct` on the calling thread if this is an idle CPU stream. Otherwise calls
    /// `enqueue`, which passes a command that does the same work to its argument, and waits for it.
    /// `recording` is the result of a preceding [`Stream::recording`]. The stream must not be
    /// capturing. `uses` orders the work with other users of the same tensors.
    #[inline]
    pub(crate) fn run_ordered(
        &self,
        recording: Recording,
        uses: Uses<'_>,
        direct: impl FnOnce() -> Result<()>,
        enqueue: impl FnOnce(&dyn Fn(Command) -> Result<Ticket>) -> Result<Ticket>,
    ) -> Result<()> {
        let _after_work = cpu::AfterWork;
        while let Kind::Cpu(stream) = &self.0 {
            let mut held = None;
            let taken = match stream.take_favored(uses) {
                None => stream.take_unfavored(uses, &mut held)?,
                taken => taken,
            };
            if let Some(_taken) = taken {
                return direct();
            }
            if !stream.retries_direct(uses.accesses, uses.user)? {
                break;
            }
        }
        // Nothing is held now: the work before this may need the tensors.
        if let Kind::Gpu(stream) = &self.0 {
            stream.refuse_from_own_work()?;
        }
        let ticket = self.enqueue_using(recording, uses, enqueue, true)?;
        self.wait(ticket, None)
    }

    /// Enqueues an operation, which waits for work of other streams that uses the same tensors. The
    /// stream must not be capturing. `enqueue` passes the command to its argument, which enqueues
    /// it.
    pub(crate) fn enqueue_ordered(
        &self,
        recording: Recording,
        uses: Uses<'_>,
        enqueue: impl FnOnce(&dyn Fn(Command) -> Result<Ticket>) -> Result<Ticket>,
    ) -> Result<Ticket> {
        self.enqueue_using(recording, uses, enqueue, false)
    }

    /// If `waits` is true, the caller waits for the operation. Otherwise the next
    /// [`Stream::synchronize`] reports a failure.
    fn enqueue_using(
        &self,
        recording: Recording,
        uses: Uses<'_>,
        enqueue: impl FnOnce(&dyn Fn(Command) -> Result<Ticket>) -> Result<Ticket>,
        waits: bool,
    ) -> Result<Ticket> {
        let push = |command| self.enqueue_reporting(recording, command, !waits);
        if uses.accesses.is_empty() {
            return enqueue(&push);
        }
        let order = |work: &PendingWork| self.wait_work(work);
        let held = InUse::begin_enqueue(uses, waits, order)?;
        let ticket = enqueue(&push)?;
        held.enqueued(&self.work(ticket)?);
        Ok(ticket)
    }

    /// Returns the calling thread as a user that has work on this stream.
    #[inline]
    pub(crate) fn user(&self) -> User {
        let user = cpu::executing(User::this_thread());
        match &self.0 {
            Kind::Cpu(stream) => user.on_stream(stream.source_id()),
            Kind::Gpu(stream) => cpu::replaying(user).on_stream(stream.source_id()),
        }
    }

    /// Returns the source of the stream's work.
    pub(crate) fn source(&self) -> Arc<dyn WorkSource> {
        match &self.0 {
            Kind::Cpu(stream) => stream.source(),
            Kind::Gpu(stream) => stream.work(0).source,
        }
    }

    /// Returns the operation that `ticket` identifies.
    pub(crate) fn work(&self, ticket: Ticket) -> Result<PendingWork> {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => Ok(stream.work(ticket)),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => Ok(stream.work(number)),
            _ => Err(other_device("the ticket")),
        }
    }

    /// Makes all later work of the stream wait for `work` of another stream.
    pub(crate) fn wait_work(&self, work: &PendingWork) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.wait_work(work),
            Kind::Gpu(stream) => stream.wait_work(work),
        }
    }

    /// Adds accesses to those of the graph that the stream is capturing.
    pub(crate) fn note_accesses(
        &self,
        recording: Recording,
        accesses: &AccessList<'_>,
    ) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.note_accesses(accesses),
            Kind::Gpu(stream) => stream.note_accesses(recording.status()?, accesses),
        }
        Ok(())
    }

    /// Creates events in advance for `count` operations in flight on a GPU stream. Does nothing on
    /// the CPU.
    pub(crate) fn prime(&self, count: usize) -> Result<()> {
        match &self.0 {
            Kind::Cpu(_) => Ok(()),
            Kind::Gpu(stream) => stream.prime(count),
        }
    }

    /// Records `event` after all work enqueued so far.
    ///
    /// # Errors
    /// Fails if the stream cannot enqueue the record, or if the event was first recorded on another
    /// device.
    pub fn record(&self, event: &Event) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.record(&event.cpu).map(drop),
            Kind::Gpu(stream) => stream.record(event.on_gpu(stream.gpu())?),
        }
    }

    /// Makes all later work of the stream wait for the latest record of `event`. If the record
    /// belongs to a capture, the stream joins that capture.
    ///
    /// # Errors
    /// Fails if the stream cannot enqueue the wait, or if the event was first recorded on another
    /// device.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        match (&self.0, event.gpu.get()) {
            (Kind::Cpu(stream), None) => stream.wait_event(&event.cpu).map(drop),
            (Kind::Gpu(stream), Some(event)) => stream.wait_event(event),
            // The event was never recorded on a GPU, so it counts as complete.
            (Kind::Gpu(_), None) => Ok(()),
            (Kind::Cpu(_), Some(_)) => Err(other_device("the event")),
        }
    }

    /// Makes all later work of the stream wait for the operation `ticket` of `source`, and not for
    /// later operations of `source`. Returns false, without effect, if the ticket does not identify
    /// the operation because it was captured. Neither stream may be capturing.
    pub(crate) fn wait_ticket(&self, source: &Self, ticket: Ticket) -> Result<bool> {
        match (&self.0, &source.0, ticket.0) {
            (_, _, TicketKind::Cpu(cpu::CpuTicket::DONE) | TicketKind::Gpu(0)) => {
                return Ok(false);
            }
            _ if self.id() == source.id() => {}
            (Kind::Cpu(stream), Kind::Cpu(source), TicketKind::Cpu(ticket)) => {
                if !source.is_complete(ticket) {
                    stream.wait_ticket(source, ticket)?;
                }
            }
            (Kind::Gpu(stream), Kind::Gpu(source), TicketKind::Gpu(number)) => {
                stream.wait_operation(source, number)?;
            }
            _ => return Err(other_device("the operation")),
        }
        Ok(true)
    }

    /// Returns the number of SMs that kernels of the stream may use. Returns `None` for a stream
    /// that this library created, on AMD GPUs and on the CPU.
    pub(crate) fn multiprocessors(&self) -> Option<u32> {
        match &self.0 {
            Kind::Cpu(_) => None,
            Kind::Gpu(stream) => stream.multiprocessors(),
        }
    }

    /// Returns true if the driver synchronizes this stream and `other` implicitly.
    pub(crate) fn synchronizes_with(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Kind::Gpu(stream), Kind::Gpu(other)) => stream.synchronizes_with(other),
            _ => false,
        }
    }

    /// Returns true for the legacy default stream of a GPU.
    pub(crate) fn is_legacy(&self) -> bool {
        matches!(&self.0, Kind::Gpu(stream) if stream.is_legacy())
    }

    /// Makes all later work of the stream wait for all earlier work of `source`, by recording
    /// `event`. If `source` cannot record events now, or is capturing, waits only for work that was
    /// enqueued through this library before the capture.
    pub(crate) fn wait_stream(&self, source: &Self, event: &Event) -> Result<()> {
        match (&self.0, &source.0) {
            (Kind::Cpu(stream), Kind::Cpu(source)) if source.is_capturing() => {
                stream.wait_issued(source)
            }
            (Kind::Gpu(stream), Kind::Gpu(of_gpu)) if source.is_capturing() => {
                stream.wait_issued(of_gpu)
            }
            // Each operation of the stream has recorded an event. This does not cover work of other
            // libraries, such as replays of graphs.
            (Kind::Gpu(stream), Kind::Gpu(source)) if !source.can_record() => {
                stream.wait_issued(source)
            }
            _ => {
                source.record(event)?;
                self.wait_event(event)
            }
        }
    }

    /// Blocks until all work of the stream is complete. On another thread than the one that adopted
    /// it, a per-thread default stream waits only for work that was enqueued through this library.
    ///
    /// # Errors
    /// The first failure of enqueued work since the last call; [`Error::CaptureState`] while the
    /// stream is capturing, and on the legacy default stream while another stream is capturing.
    pub fn synchronize(&self) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.synchronize(),
            Kind::Gpu(stream) => stream.synchronize(),
        }
    }

    /// Returns true if all work of the stream is complete. Returns false for the legacy default
    /// stream while another stream is capturing, because it cannot be queried. On another thread
    /// than the one that adopted it, a per-thread default stream is idle if the work that was
    /// enqueued through this library is complete.
    pub fn is_idle(&self) -> bool {
        match &self.0 {
            Kind::Cpu(stream) => stream.is_idle(),
            Kind::Gpu(stream) => stream.is_idle(),
        }
    }

    /// Returns true if the operation is complete, whether it succeeded or failed.
    pub fn is_complete(&self, ticket: Ticket) -> bool {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.is_complete(ticket),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => stream.is_complete(number),
            _ => false,
        }
    }

    /// Returns true if the operation has started or is complete. GPU drivers do not report starts.
    /// On a GPU an operation counts as started when all earlier operations of the stream are
    /// complete.
    pub fn is_started(&self, ticket: Ticket) -> bool {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.is_started(ticket),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => {
                stream.is_complete(number.saturating_sub(1))
            }
            _ => false,
        }
    }

    /// Returns the result of the operation, or `None` while it is not complete.
    pub fn result(&self, ticket: Ticket) -> Option<Result<()>> {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.result(ticket),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => stream.result(number),
            _ => Some(Err(other_device("the ticket"))),
        }
    }

    /// Blocks until the operation is complete and returns its result. Waits indefinitely if
    /// `timeout` is `None`.
    ///
    /// # Errors
    /// The operation's failure, or [`Error::StreamTimeout`].
    pub fn wait(&self, ticket: Ticket, timeout: Option<Duration>) -> Result<()> {
        match (&self.0, ticket.0) {
            (Kind::Cpu(stream), TicketKind::Cpu(ticket)) => stream.wait(ticket, timeout),
            (Kind::Gpu(stream), TicketKind::Gpu(number)) => stream.wait(number, timeout),
            _ => Err(other_device("the ticket")),
        }
    }

    /// Starts a capture. Later work of this stream is recorded and does not run.
    ///
    /// # Errors
    /// [`Error::CaptureState`] if the stream is already capturing.
    pub fn begin_capture(&self) -> Result<()> {
        match &self.0 {
            Kind::Cpu(stream) => stream.begin_capture(),
            Kind::Gpu(stream) => stream.begin_capture(),
        }
    }

    /// Ends the capture and returns the recorded graph. Streams that joined the capture leave it.
    ///
    /// # Errors
    /// [`Error::CaptureState`] if the stream is not capturing, or if it joined a capture that
    /// another stream began.
    pub fn end_capture(&self) -> Result<Graph> {
        Ok(Graph(match &self.0 {
            Kind::Cpu(stream) => GraphKind::Cpu(stream.end_capture()?),
            Kind::Gpu(stream) => GraphKind::Gpu(stream.end_capture()?),
        }))
    }

    /// Starts a branch of the capture. The branch consists of all work that this stream records
    /// after this call. A replay on the CPU runs the branch concurrently with the work of the other
    /// captured streams. Does nothing on a GPU, because GPU graphs always run the streams of a
    /// capture concurrently.
    pub(crate) fn branch(&self) {
        if let Kind::Cpu(stream) = &self.0 {
            stream.branch();
        }
    }

    /// Returns the identifier of the stream's capture, or `None` if the stream is not capturing.
    /// The identifier is unique among active captures.
    pub(crate) fn capture_number(&self) -> Result<Option<u64>> {
        match &self.0 {
            Kind::Cpu(stream) => Ok(stream.capture_number()),
            Kind::Gpu(stream) => stream.capture_number(),
        }
    }

    /// Returns true if the stream is capturing.
    #[inline]
    pub fn is_capturing(&self) -> bool {
        match &self.0 {
            Kind::Cpu(stream) => stream.is_capturing(),
            Kind::Gpu(stream) => stream.is_capturing(),
        }
    }
}
