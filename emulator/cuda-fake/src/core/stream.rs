//! Streams and events.

use core::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;

use fusewire::cpu;

use super::capture::{self, EventRecord};
use super::context::Context;
use super::handles::{CONTEXTS, EVENTS, STREAMS, fresh};
use super::hardware_queue::{HardwareQueues, QueueSlot};
use super::lock;
use crate::status::{Result, Status};

/// `CU_STREAM_LEGACY`: a handle of the legacy default stream, in addition to 0.
pub(crate) const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`: the default stream of the calling thread.
const PER_THREAD: usize = 2;

thread_local! {
    /// Handles of this thread's default streams, by context.
    static OWN: RefCell<BTreeMap<usize, usize>> = const { RefCell::new(BTreeMap::new()) };
}

/// A stream.
#[derive(Debug)]
pub(crate) struct Stream {
    /// 0 for the legacy default stream.
    pub(crate) handle: usize,
    pub(crate) context: usize,
    /// True if this stream and the legacy default stream wait for each other.
    pub(crate) blocking: bool,
    pub(crate) priority: i32,
    /// Number of SMs that kernels may use, if the stream belongs to a green context.
    pub(crate) multiprocessors: Option<u32>,
    pub(crate) work: cpu::CpuStream,
    queue: QueueSlot,
    /// Keeps the order of the turns that threads get equal to the order of their work.
    enqueueing: Mutex<()>,
}

impl Stream {
    /// Creates the legacy default stream.
    pub(crate) fn legacy(context: usize, queues: &HardwareQueues) -> Self {
        Self {
            handle: 0,
            context,
            blocking: true,
            priority: 0,
            multiprocessors: None,
            queue: queues.assign(0),
            enqueueing: Mutex::default(),
            work: cpu::CpuStream::new(),
        }
    }

    /// Creates a stream. Returns its handle.
    pub(crate) fn create(context: &Context, blocking: bool, priority: i32) -> usize {
        Self::create_green(context, blocking, priority, None)
    }

    /// Creates a stream of a green context with the given number of SMs, or an ordinary stream.
    /// Returns its handle.
    pub(crate) fn create_green(
        context: &Context,
        blocking: bool,
        priority: i32,
        multiprocessors: Option<u32>,
    ) -> usize {
        let handle = fresh();
        STREAMS.insert_as(
            handle,
            Arc::new(Self {
                handle,
                context: context.handle,
                blocking,
                priority,
                multiprocessors,
                queue: context.queues.assign(priority),
                enqueueing: Mutex::default(),
                work: cpu::CpuStream::new(),
            }),
        );
        handle
    }

    /// Enqueues work. Kernels, copies and host functions run in the order of the stream's hardware
    /// queue.
    pub(crate) fn enqueue(&self, command: cpu::Command) -> Result<()> {
        let failed = |_| Status::OperatingSystem;
        let _enqueueing = lock(&self.enqueueing);
        let turn = match &command {
            cpu::Command::Record(_) | cpu::Command::Wait(_) => None,
            _ => self.queue.turn(),
        };
        let Some(turn) = turn else {
            return self.work.enqueue(command).map(drop).map_err(failed);
        };
        let end = turn.clone();
        for command in [
            cpu::Command::Host(Arc::new(move || {
                turn.wait();
                Ok(())
            })),
            command,
            cpu::Command::Host(Arc::new(move || {
                end.end();
                Ok(())
            })),
        ] {
            self.work.enqueue(command).map_err(failed)?;
        }
        Ok(())
    }

    /// Enqueues a note for the emulator. It takes no place in the hardware queue.
    pub(crate) fn enqueue_note(&self, note: cpu::Command) -> Result<()> {
        let failed = |_| Status::OperatingSystem;
        let _enqueueing = lock(&self.enqueueing);
        self.work.enqueue(note).map(drop).map_err(failed)
    }

    pub(crate) fn is_legacy(&self) -> bool {
        self.handle == 0
    }

    /// Waits until all work has completed. Ignores failures of the work.
    pub(crate) fn settle(&self) {
        // A failure is not lost, because it is also a sticky error of the context.
        let _ = self.work.synchronize();
    }

    /// Orders the next work of this stream with the legacy default stream. A blocking stream waits
    /// for the legacy default stream. The legacy default stream waits for all blocking streams.
    pub(crate) fn order_with_legacy(&self) -> Result<()> {
        let failed = |_| Status::OperatingSystem;
        let follow = |first: &cpu::CpuStream, then: &cpu::CpuStream| {
            if !first.is_idle() {
                let event = cpu::CpuEvent::new();
                first.record(&event).map_err(failed)?;
                then.wait_event(&event).map_err(failed)?;
            }
            Ok(())
        };
        if self.is_legacy() {
            let context = self.context;
            for other in STREAMS.select(|other| other.context == context && other.blocking) {
                follow(&other.work, &self.work)?;
            }
        } else if self.blocking
            && let Some(context) = CONTEXTS.get(self.context)
        {
            follow(&context.legacy.work, &self.work)?;
        }
        Ok(())
    }
}

/// Returns the default stream of the calling thread in a context. The stream is blocking.
fn per_thread(context: &Context) -> Result<Arc<Stream>> {
    OWN.with_borrow_mut(|own| {
        let live = own.get(&context.handle).and_then(|own| STREAMS.get(*own));
        if let Some(stream) = live {
            return Ok(stream);
        }
        let handle = Stream::create(context, true, 0);
        own.insert(context.handle, handle);
        STREAMS.get(handle).ok_or(Status::InvalidHandle)
    })
}

/// Returns the stream of a handle. Handles 0 and 1 identify the context's legacy default stream,
/// and handle 2 identifies the default stream of the calling thread.
pub(crate) fn find(context: &Context, handle: usize) -> Result<Arc<Stream>> {
    match handle {
        0 | LEGACY => Ok(Arc::clone(&context.legacy)),
        PER_THREAD => per_thread(context),
        _ => STREAMS.get(handle).ok_or(Status::InvalidHandle),
    }
}

/// Destroys a stream without waiting for its work.
pub(crate) fn destroy(handle: usize) -> Result<()> {
    let stream = STREAMS.remove(handle).ok_or(Status::InvalidHandle)?;
    capture::forget_stream(&stream);
    if !stream.work.is_idle() {
        let waiting = Arc::clone(&stream);
        // Dropping the last reference waits for the stream's thread, so a separate thread drops it.
        // If that thread cannot be started, the caller waits.
        let _ = thread::Builder::new()
            .name("cuda-fake-stream".to_owned())
            .spawn(move || {
                waiting.settle();
                drop(waiting);
            });
    }
    Ok(())
}

/// Waits for the work of a stream. Fails if the stream's context has a sticky error.
pub(crate) fn synchronize(context: &Context, stream: &Stream) -> Result<()> {
    capture::observes_stream(stream)?;
    if stream.is_legacy() {
        stream.order_with_legacy()?;
    }
    stream.settle();
    owner(context, stream)?.map_or_else(|| context.failure(), |owner| owner.failure())
}

/// Fails with `NotReady` if a stream has unfinished work.
pub(crate) fn query(context: &Context, stream: &Stream) -> Result<()> {
    capture::observes_stream(stream)?;
    let idle = stream.work.is_idle();
    owner(context, stream)?.map_or_else(|| context.failure(), |owner| owner.failure())?;
    if idle { Ok(()) } else { Err(Status::NotReady) }
}

/// Returns the context of a stream, or `None` if that context is `context`.
fn owner(context: &Context, stream: &Stream) -> Result<Option<Arc<Context>>> {
    if stream.context == context.handle {
        return Ok(None);
    }
    CONTEXTS
        .get(stream.context)
        .map(Some)
        .ok_or(Status::ContextIsDestroyed)
}

/// Creates an event. Returns its handle.
pub(crate) fn create_event(context: &Context, timed: bool) -> usize {
    let handle = fresh();
    EVENTS.insert_as(
        handle,
        Arc::new(EventRecord {
            handle,
            context: context.handle,
            timed,
            inner: cpu::CpuEvent::new(),
            recorded: false.into(),
            mark: Mutex::default(),
        }),
    );
    handle
}

/// Destroys an event.
pub(crate) fn destroy_event(handle: usize) -> Result<()> {
    let event = EVENTS.remove(handle).ok_or(Status::InvalidHandle)?;
    capture::forget_event(&event);
    Ok(())
}
