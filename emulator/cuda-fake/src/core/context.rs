//! Devices, their primary contexts, and the current context of each thread.

use core::cell::{Cell, RefCell};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::handles::{CONTEXTS, EVENTS, EXECS, FUNCTIONS, GRAPHS, MODULES, STREAMS, fresh};
use super::hardware_queue::HardwareQueues;
use super::settings::settings;
use super::stream::Stream;
use super::{capture, lock, memory};
use crate::status::{Result, Status};

static READY: AtomicBool = AtomicBool::new(false);

/// Primary contexts by device.
static PRIMARY: Mutex<BTreeMap<u32, Primary>> = Mutex::new(BTreeMap::new());

#[derive(Debug, Default)]
struct Primary {
    references: u32,
    flags: u32,
    context: Option<Arc<Context>>,
}

thread_local! {
    /// Stack of context handles. The last handle is the current context.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// True while this thread runs a callback, which must not call the driver.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// A device's context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) handle: usize,
    pub(crate) device: u32,
    /// Legacy default stream, which has handle 0.
    pub(crate) legacy: Arc<Stream>,
    /// Code of the device's sticky error, or 0. If the code is not 0, all later calls return it.
    failed: AtomicU32,
    /// Handles of the contexts whose memory this context may access.
    pub(crate) peers: Mutex<Vec<usize>>,
    pub(crate) queues: HardwareQueues,
}

impl Context {
    /// Returns the device's sticky error as `Err`, if the device has one.
    pub(crate) fn failure(&self) -> Result<()> {
        match self.failed.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Status::from_code(code).unwrap_or(Status::Unknown)),
        }
    }

    /// Sets the device's sticky error, unless it already has one.
    pub(crate) fn fail(&self, status: Status) {
        let _ = self
            .failed
            .compare_exchange(0, status as u32, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Waits for all streams of the context. Fails if the device has a sticky error.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let handle = self.handle;
        for stream in STREAMS.select(|stream| stream.context == handle) {
            stream.settle();
        }
        self.legacy.settle();
        self.failure()
    }
}

/// Implements `cuInit`.
pub(crate) fn initialize() -> Result<()> {
    if settings().devices == 0 {
        return Err(Status::NoDevice);
    }
    READY.store(true, Ordering::Release);
    Ok(())
}

/// Fails if `cuInit` has not been called.
pub(crate) fn ready() -> Result<()> {
    if READY.load(Ordering::Acquire) {
        Ok(())
    } else {
        Err(Status::NotInitialized)
    }
}

/// Converts a device ordinal to a device. Fails if the device does not exist.
pub(crate) fn device(number: i32) -> Result<u32> {
    ready()?;
    u32::try_from(number)
        .ok()
        .filter(|number| *number < settings().devices)
        .ok_or(Status::InvalidDevice)
}

/// Returns the unique id of a device.
pub(crate) fn uuid(device: u32) -> [u8; 16] {
    let mut bytes = *b"fusewire-fake\0\0\0";
    bytes[14] = bytes[14].wrapping_add(settings().host);
    bytes[15] = device as u8;
    bytes
}

/// Returns this thread's current context. Fails if the thread has no current context, or if the
/// context has a sticky error.
pub(crate) fn current() -> Result<Arc<Context>> {
    ready()?;
    let context = current_or_none()?.ok_or(Status::InvalidContext)?;
    context.failure()?;
    Ok(context)
}

/// Returns this thread's current context, or `None` if the thread has none.
pub(crate) fn current_or_none() -> Result<Option<Arc<Context>>> {
    let Some(handle) = CURRENT.with_borrow(|stack| stack.last().copied()) else {
        return Ok(None);
    };
    if handle == 0 {
        return Ok(None);
    }
    match CONTEXTS.get(handle) {
        Some(context) => Ok(Some(context)),
        None => Err(Status::ContextIsDestroyed),
    }
}

/// Replaces the current context with the context of `handle`. With handle 0, the thread has no
/// current context afterwards.
pub(crate) fn set_current(handle: usize) -> Result<()> {
    ready()?;
    if handle != 0 && CONTEXTS.get(handle).is_none() {
        return Err(Status::InvalidContext);
    }
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    });
    Ok(())
}

/// Pushes a context onto the stack, so it becomes the current context.
pub(crate) fn push(handle: usize) -> Result<()> {
    ready()?;
    if CONTEXTS.get(handle).is_none() {
        return Err(Status::InvalidContext);
    }
    CURRENT.with_borrow_mut(|stack| stack.push(handle));
    Ok(())
}

/// Pops the current context. Returns its handle.
pub(crate) fn pop() -> Result<usize> {
    ready()?;
    CURRENT
        .with_borrow_mut(Vec::pop)
        .ok_or(Status::InvalidContext)
}

/// Takes a reference to a device's primary context.
pub(crate) fn retain_primary(device: u32) -> usize {
    let mut primary = lock(&PRIMARY);
    let primary = primary.entry(device).or_default();
    primary.references += 1;
    let context = primary.context.get_or_insert_with(|| {
        let handle = fresh();
        let queues = HardwareQueues::default();
        let context = Arc::new(Context {
            handle,
            device,
            legacy: Arc::new(Stream::legacy(handle, &queues)),
            queues,
            failed: AtomicU32::new(0),
            peers: Mutex::default(),
        });
        CONTEXTS.insert_as(handle, Arc::clone(&context));
        context
    });
    context.handle
}

/// Releases a reference to a device's primary context. Releasing the last reference destroys the
/// context and all its objects.
pub(crate) fn release_primary(device: u32) -> Result<()> {
    let mut all = lock(&PRIMARY);
    let primary = all.entry(device).or_default();
    if primary.references == 0 {
        return Err(Status::InvalidContext);
    }
    primary.references -= 1;
    let gone = if primary.references == 0 {
        primary.context.take()
    } else {
        None
    };
    drop(all);
    if let Some(context) = gone {
        destroy(&context);
    }
    Ok(())
}

/// Destroys a primary context regardless of its reference count.
pub(crate) fn reset_primary(device: u32) {
    let gone = lock(&PRIMARY).entry(device).or_default().context.take();
    if let Some(context) = gone {
        destroy(&context);
    }
}

fn destroy(context: &Context) {
    let _ = context.synchronize();
    let handle = context.handle;
    CONTEXTS.remove(handle);
    for stream in STREAMS.take(|stream| stream.context == handle) {
        capture::forget_stream(&stream);
    }
    EVENTS.take(|event| event.context == handle);
    MODULES.take(|module| module.context == handle);
    FUNCTIONS.take(|function| function.context == handle);
    EXECS.take(|exec| exec.context == handle);
    GRAPHS.take(|graph| graph.context == handle);
    memory::free_context(handle);
}

/// Returns the flags of a device's primary context, and true if the context exists.
pub(crate) fn primary_state(device: u32) -> (u32, bool) {
    let all = lock(&PRIMARY);
    all.get(&device).map_or((0, false), |primary| {
        (primary.flags, primary.context.is_some())
    })
}

/// Returns true if the primary context of a device may access memory of the context `peer`.
pub(crate) fn has_peer(device: u32, peer: usize) -> bool {
    let all = lock(&PRIMARY);
    let context = all
        .get(&device)
        .and_then(|primary| primary.context.as_ref());
    context.is_some_and(|context| lock(&context.peers).contains(&peer))
}

/// Sets the flags of a primary context.
pub(crate) fn set_primary_flags(device: u32, flags: u32) {
    lock(&PRIMARY).entry(device).or_default().flags = flags;
}

/// Returns true if this thread is running a callback.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.try_with(Cell::get).unwrap_or(false)
}

/// Runs a user callback. Driver calls of this thread fail until the callback returns.
pub(crate) fn callback(call: impl FnOnce()) {
    let before = IN_CALLBACK.replace(true);
    call();
    IN_CALLBACK.set(before);
}
