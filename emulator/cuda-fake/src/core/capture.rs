//! Stream captures: the streams of a capture, the calls that it prohibits, and the graph that it
//! records.
//!
//! Each stream of a capture has a separate recording stream. A replay runs the work of one
//! recording stream in order. Different recording streams run concurrently, and a replay starts
//! their work in the order of the captured calls. Events are the edges between recording streams.
//! The capture also stores the edges, so that it can find unjoined work when it ends.

use core::cell::Cell;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use fusewire::cpu;
use fusewire_emulator::{Mark, StreamOperation};

use super::emulated;
use super::graph::Graph;
use super::handles::{GRAPHS, STREAMS, fresh};
use super::lock;
use super::stream::Stream;
use crate::status::{Result, Status};

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`: no thread may make potentially unsafe calls. Mode 1 (thread
/// local) prohibits these calls only in the capturing thread.
const GLOBAL: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: potentially unsafe calls are allowed.
const RELAXED: u32 = 2;

/// A driver event and the execution state of its most recent record.
#[derive(Debug)]
pub(crate) struct EventRecord {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    pub(crate) timed: bool,
    pub(crate) inner: cpu::CpuEvent,
    pub(crate) recorded: AtomicBool,
    /// The last record, for the emulator.
    pub(crate) mark: Mutex<Mark>,
}

/// The end of a node of a capture.
#[derive(Debug)]
struct End {
    /// The stream that recorded the node.
    stream: usize,
    context: usize,
    event: cpu::CpuEvent,
    mark: Mark,
}

/// An active capture.
#[derive(Debug)]
struct Capture {
    mode: u32,
    thread: ThreadId,
    origin: usize,
    recorder: cpu::CpuStream,
    /// Start of the graph. Branches wait for this event instead of for earlier work of the origin
    /// stream.
    start: cpu::CpuEvent,
    start_mark: Mark,
    /// Recording streams of the capture's other streams, by stream handle.
    branches: BTreeMap<usize, cpu::CpuStream>,
    graph: Arc<Graph>,
    invalid: bool,
    /// Nodes of the graph. The value is true if another node depends on the node.
    nodes: BTreeMap<usize, bool>,
    ends: BTreeMap<usize, End>,
}

impl Capture {
    /// Records commands of `stream` that depend on the nodes `before`. Returns their node.
    fn push(
        &mut self,
        stream: &Stream,
        before: &[usize],
        commands: impl IntoIterator<Item = cpu::Command>,
    ) -> Result<usize> {
        let failed = |_| Status::Unknown;
        let add = |recorder: &cpu::CpuStream, command: Option<cpu::Command>| {
            command.map_or(Ok(()), |it| recorder.enqueue(it).map(drop).map_err(failed))
        };
        let note = |operation| emulated::note(stream.context, operation);
        if stream.handle != self.origin && !self.branches.contains_key(&stream.handle) {
            let branch = cpu::CpuStream::new();
            branch.wait_event(&self.start).map_err(failed)?;
            branch.branch();
            let after_start = StreamOperation::WaitFor(self.start_mark.clone());
            add(&branch, note(after_start))?;
            self.branches.insert(stream.handle, branch);
        }
        let recorder = self.branches.get(&stream.handle).unwrap_or(&self.recorder);
        for node in before {
            if let Some(end) = self.ends.get(node)
                && end.stream != stream.handle
            {
                recorder.wait_event(&end.event).map_err(failed)?;
                if end.context != stream.context {
                    add(recorder, note(StreamOperation::WaitFor(end.mark.clone())))?;
                }
            }
        }
        for command in commands {
            add(recorder, Some(command))?;
        }
        let end = End {
            stream: stream.handle,
            context: stream.context,
            event: cpu::CpuEvent::new(),
            mark: Mark::default(),
        };
        add(recorder, note(StreamOperation::Record(end.mark.clone())))?;
        recorder.record(&end.event).map_err(failed)?;
        let node = fresh();
        self.ends.insert(node, end);
        for node in before {
            self.nodes.insert(*node, true);
        }
        self.nodes.insert(node, false);
        Ok(node)
    }

    /// Orders the work after the graph after nodes of other devices.
    fn join(&self, context: usize, nodes: &[usize]) -> Result<()> {
        let failed = |_| Status::Unknown;
        for end in nodes.iter().filter_map(|node| self.ends.get(node)) {
            let after = StreamOperation::WaitFor(end.mark.clone());
            if end.context != context
                && let Some(note) = emulated::note(context, after)
            {
                self.recorder.wait_event(&end.event).map_err(failed)?;
                self.recorder.enqueue(note).map_err(failed)?;
            }
        }
        Ok(())
    }
}

/// A point of a capture: the capture's number and the last nodes before the point.
#[derive(Clone, Debug)]
struct Point {
    capture: u64,
    nodes: Vec<usize>,
}

#[derive(Debug)]
struct Captures {
    active: BTreeMap<u64, Capture>,
    /// Current points of capturing streams.
    streams: BTreeMap<usize, Point>,
    /// Points of events whose last record was in a capture. The capture may have ended.
    events: BTreeMap<usize, Point>,
}

static CAPTURES: Mutex<Captures> = Mutex::new(Captures {
    active: BTreeMap::new(),
    streams: BTreeMap::new(),
    events: BTreeMap::new(),
});

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// State of a stream's capture.
#[derive(Clone, Debug)]
pub(crate) enum Info {
    None,
    Active {
        id: u64,
        graph: usize,
        /// Address and length of the array of dependencies, valid until the next call with the
        /// stream.
        nodes: (*const usize, usize),
    },
    Invalidated(u64),
}

impl Captures {
    /// Returns the capture of a stream and the stream's point.
    fn of(&mut self, stream: usize) -> Option<(&mut Capture, &mut Point)> {
        let point = self.streams.get_mut(&stream)?;
        Some((self.active.get_mut(&point.capture)?, point))
    }

    fn invalidate(&mut self, stream: usize) {
        if let Some((capture, _)) = self.of(stream) {
            capture.invalid = true;
        }
    }

    /// Removes a capture and the capture state of all its streams.
    fn close(&mut self, id: u64) -> Option<Capture> {
        self.streams.retain(|_, point| point.capture != id);
        self.active.remove(&id)
    }

    /// Returns a blocking stream of the context that is being captured, if any.
    fn blocking(&self, context: usize) -> Option<usize> {
        self.streams.keys().copied().find(|handle| {
            STREAMS
                .get(*handle)
                .is_some_and(|stream| stream.context == context && stream.blocking)
        })
    }
}

/// Sets this thread's capture mode. Returns the previous mode.
pub(crate) fn exchange_mode(mode: u32) -> Result<u32> {
    if mode > RELAXED {
        return Err(Status::InvalidValue);
    }
    Ok(MODE.replace(mode))
}

/// Checks that potentially unsafe calls are allowed now. If the capture modes prohibit them,
/// invalidates the captures and returns an error.
pub(crate) fn potentially_unsafe() -> Result<()> {
    let (mode, me) = (MODE.get(), thread::current().id());
    if mode == RELAXED {
        return Ok(());
    }
    let mut refused = false;
    for capture in lock(&CAPTURES).active.values_mut() {
        let own = capture.thread == me && capture.mode != RELAXED;
        if own || (mode == GLOBAL && capture.mode == GLOBAL) {
            capture.invalid = true;
            refused = true;
        }
    }
    if refused {
        Err(Status::CaptureUnsupported)
    } else {
        Ok(())
    }
}

/// Checks that a call may wait for or query `stream` now.
pub(crate) fn observes_stream(stream: &Stream) -> Result<()> {
    {
        let mut captures = lock(&CAPTURES);
        if stream.is_legacy()
            && let Some(captured) = captures.blocking(stream.context)
        {
            captures.invalidate(captured);
            return Err(Status::CaptureImplicit);
        }
        if captures.of(stream.handle).is_some() {
            captures.invalidate(stream.handle);
            return Err(Status::CaptureUnsupported);
        }
    }
    potentially_unsafe()
}

/// Checks that a call may wait for or query `event` now.
pub(crate) fn observes_event(event: &EventRecord) -> Result<()> {
    {
        let mut captures = lock(&CAPTURES);
        if let Some(point) = captures.events.get(&event.handle) {
            let id = point.capture;
            if let Some(capture) = captures.active.get_mut(&id) {
                capture.invalid = true;
            }
            return Err(Status::CapturedEvent);
        }
    }
    potentially_unsafe()
}

/// Checks that a call may wait for the context now.
pub(crate) fn observes_context(context: usize) -> Result<()> {
    {
        let mut captures = lock(&CAPTURES);
        let mine = |stream: &Stream| stream.context == context;
        let captured: Vec<usize> = captures
            .streams
            .keys()
            .copied()
            .filter(|handle| STREAMS.get(*handle).is_some_and(|stream| mine(&stream)))
            .collect();
        for stream in &captured {
            captures.invalidate(*stream);
        }
        if !captured.is_empty() {
            return Err(Status::CaptureUnsupported);
        }
    }
    potentially_unsafe()
}

/// Starts a capture.
pub(crate) fn begin(stream: &Stream, mode: u32) -> Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if mode > RELAXED {
        return Err(Status::InvalidValue);
    }
    if stream.is_legacy() {
        return Err(Status::CaptureUnsupported);
    }
    let mut captures = lock(&CAPTURES);
    if captures.of(stream.handle).is_some() {
        return Err(Status::IllegalState);
    }
    let recorder = cpu::CpuStream::new();
    recorder.begin_capture().or(Err(Status::Unknown))?;
    let (start, start_mark) = (cpu::CpuEvent::new(), Mark::default());
    let mark = StreamOperation::Record(start_mark.clone());
    if let Some(note) = emulated::note(stream.context, mark) {
        recorder.enqueue(note).or(Err(Status::Unknown))?;
    }
    recorder.record(&start).or(Err(Status::Unknown))?;
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let graph = Graph::growing(stream.context);
    GRAPHS.insert_as(graph.handle, Arc::clone(&graph));
    let capture = Capture {
        mode,
        thread: thread::current().id(),
        origin: stream.handle,
        recorder,
        start,
        start_mark,
        branches: BTreeMap::new(),
        graph,
        invalid: false,
        nodes: BTreeMap::new(),
        ends: BTreeMap::new(),
    };
    captures.active.insert(id, capture);
    let point = Point {
        capture: id,
        nodes: Vec::new(),
    };
    captures.streams.insert(stream.handle, point);
    Ok(())
}

/// Ends a capture. Returns the handle of the graph.
pub(crate) fn end(stream: &Stream) -> Result<usize> {
    let mut captures = lock(&CAPTURES);
    let Some((capture, point)) = captures.of(stream.handle) else {
        return Err(Status::IllegalState);
    };
    let (id, tail) = (point.capture, point.nodes.clone());
    if capture.origin != stream.handle {
        capture.invalid = true;
        return Err(Status::CaptureUnmatched);
    }
    if capture.mode != RELAXED && capture.thread != thread::current().id() {
        return Err(Status::CaptureWrongThread);
    }
    let Some(capture) = captures.close(id) else {
        return Err(Status::IllegalState);
    };
    drop(captures);
    let unjoined = capture
        .nodes
        .iter()
        .any(|(node, followed)| !followed && !tail.contains(node));
    let refusal = if capture.invalid {
        Some(Status::CaptureInvalidated)
    } else if unjoined {
        Some(Status::CaptureUnjoined)
    } else {
        None
    };
    if let Some(refusal) = refusal {
        GRAPHS.remove(capture.graph.handle);
        return Err(refusal);
    }
    capture.join(stream.context, &tail)?;
    let graph = capture.recorder.end_capture().or(Err(Status::Unknown))?;
    capture
        .graph
        .finish(graph, capture.nodes.into_keys().collect());
    Ok(capture.graph.handle)
}

/// Returns the state of a stream's capture.
pub(crate) fn info(stream: &Stream) -> Result<Info> {
    let mut captures = lock(&CAPTURES);
    if stream.is_legacy() {
        return match captures.blocking(stream.context) {
            Some(_) => Err(Status::CaptureImplicit),
            None => Ok(Info::None),
        };
    }
    Ok(match captures.of(stream.handle) {
        None => Info::None,
        Some((capture, point)) if capture.invalid => Info::Invalidated(point.capture),
        Some((capture, point)) => Info::Active {
            id: point.capture,
            graph: capture.graph.handle,
            nodes: (point.nodes.as_ptr(), point.nodes.len()),
        },
    })
}

/// Enqueues work on a stream. If the stream is capturing, adds the work to the graph of the capture
/// and returns the graph.
pub(crate) fn submit(stream: &Stream, command: cpu::Command) -> Result<Option<Arc<Graph>>> {
    submit_with(stream, None, command, None)
}

/// [`submit`] with notes for the emulator before and after the work.
fn submit_with(
    stream: &Stream,
    before: Option<cpu::Command>,
    command: cpu::Command,
    after: Option<cpu::Command>,
) -> Result<Option<Arc<Graph>>> {
    let mut captures = lock(&CAPTURES);
    if stream.is_legacy()
        && let Some(captured) = captures.blocking(stream.context)
    {
        captures.invalidate(captured);
        return Err(Status::CaptureImplicit);
    }
    let Some((capture, point)) = captures.of(stream.handle) else {
        drop(captures);
        stream.order_with_legacy()?;
        before.map_or(Ok(()), |note| stream.enqueue_note(note))?;
        stream.enqueue(command)?;
        after.map_or(Ok(()), |note| stream.enqueue_note(note))?;
        return Ok(None);
    };
    if capture.invalid {
        return Err(Status::CaptureInvalidated);
    }
    let nodes = point.nodes.clone();
    let commands = before.into_iter().chain([command]).chain(after);
    let node = capture.push(stream, &nodes, commands)?;
    let graph = Arc::clone(&capture.graph);
    if let Some(point) = captures.streams.get_mut(&stream.handle) {
        point.nodes = vec![node];
    }
    Ok(Some(graph))
}

/// Records an event. If the stream is capturing, the event marks a point of the capture, or becomes
/// a node of the graph if `external` is true.
pub(crate) fn record(event: &EventRecord, stream: &Stream, external: bool) -> Result<()> {
    if event.context != stream.context {
        return Err(Status::InvalidHandle);
    }
    {
        let mut captures = lock(&CAPTURES);
        if let Some((capture, point)) = captures.of(stream.handle) {
            if capture.invalid {
                return Err(Status::CaptureInvalidated);
            }
            if !external {
                let point = point.clone();
                captures.events.insert(event.handle, point);
                return Ok(());
            }
        } else if external {
            return Err(Status::InvalidValue);
        }
        captures.events.remove(&event.handle);
    }
    event.recorded.store(true, Ordering::Release);
    let mark = Mark::default();
    lock(&event.mark).clone_from(&mark);
    let note = emulated::note(stream.context, StreamOperation::Record(mark));
    let record = cpu::Command::Record(event.inner.clone());
    submit_with(stream, note, record, None).map(drop)
}

/// Makes a stream wait for an event. If the event marks a point of a capture, the stream joins the
/// capture.
pub(crate) fn wait(stream: &Stream, event: &EventRecord, external: bool) -> Result<()> {
    let mut captures = lock(&CAPTURES);
    let from = captures.events.get(&event.handle).cloned();
    let joined = captures
        .of(stream.handle)
        .map(|(capture, point)| (point.capture, capture.invalid));
    match (joined, from) {
        (Some((_, true)), _) => return Err(Status::CaptureInvalidated),
        (Some((id, false)), Some(from)) => {
            if !captures.active.contains_key(&from.capture) {
                captures.invalidate(stream.handle);
                return Err(Status::CaptureIsolation);
            }
            if from.capture != id {
                captures.invalidate(stream.handle);
                if let Some(other) = captures.active.get_mut(&from.capture) {
                    other.invalid = true;
                }
                return Err(Status::CaptureMerge);
            }
            if let Some((_, point)) = captures.of(stream.handle) {
                for node in from.nodes {
                    if !point.nodes.contains(&node) {
                        point.nodes.push(node);
                    }
                }
            }
            return Ok(());
        }
        (Some(_), None) if !external => {
            if event.recorded.load(Ordering::Acquire) {
                captures.invalidate(stream.handle);
                return Err(Status::CaptureIsolation);
            }
            return Ok(());
        }
        (None, Some(from)) => {
            let Some(capture) = captures.active.get_mut(&from.capture) else {
                return Err(Status::CapturedEvent);
            };
            if capture.invalid {
                return Err(Status::CaptureInvalidated);
            }
            if stream.is_legacy() {
                capture.invalid = true;
                return Err(Status::CaptureImplicit);
            }
            captures.streams.insert(stream.handle, from);
            return Ok(());
        }
        (Some(_), None) | (None, None) => {}
    }
    drop(captures);
    let mark = lock(&event.mark).clone();
    let note = (event.context != stream.context)
        .then(|| emulated::note(stream.context, StreamOperation::WaitFor(mark)))
        .flatten();
    let wait = cpu::Command::Wait(event.inner.clone());
    submit_with(stream, None, wait, note).map(drop)
}

/// Removes the capture state of a destroyed event.
pub(crate) fn forget_event(event: &EventRecord) {
    lock(&CAPTURES).events.remove(&event.handle);
}

/// Removes the capture state of a destroyed stream. If the stream is the origin of a capture, ends
/// the capture.
pub(crate) fn forget_stream(stream: &Stream) {
    let mut captures = lock(&CAPTURES);
    let Some((capture, point)) = captures.of(stream.handle) else {
        return;
    };
    let (origin, id) = (capture.origin, point.capture);
    captures.streams.remove(&stream.handle);
    if origin == stream.handle
        && let Some(capture) = captures.close(id)
    {
        GRAPHS.remove(capture.graph.handle);
    }
}
