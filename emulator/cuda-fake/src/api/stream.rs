//! Streams and events.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::Arc;

use fusewire::cpu;
use fusewire_emulator::{Comparison, StreamOperation};

use super::{export, put, put_if, with};
use crate::core::capture::{self, Info};
use crate::core::context::{Context, current};
use crate::core::emulated;
use crate::core::graph::{Callback, run};
use crate::core::handles::EVENTS;
use crate::core::memory;
use crate::core::stream::{self, find};
use crate::status::{Result, Status};

/// Writes the status, id, graph and dependencies of a stream's capture.
fn capture_info(
    handle: usize,
    (status, id, graph): (*mut c_uint, *mut u64, *mut usize),
    (nodes, count): (*mut *const usize, *mut usize),
) -> Result<()> {
    let context = current()?;
    let stream = find(&context, handle)?;
    match capture::info(&stream)? {
        Info::None => put(status, 0),
        Info::Invalidated(number) => {
            put_if(id, number);
            put(status, 2)
        }
        Info::Active {
            id: number,
            graph: growing,
            nodes: (first, length),
        } => {
            put_if(id, number);
            put_if(graph, growing);
            put_if(nodes, first);
            put_if(count, length);
            put(status, 1)
        }
    }
}

/// Writes the milliseconds between two events.
fn elapsed(out: *mut f32, start: usize, end: usize) -> Result<()> {
    let (_, start) = with(&EVENTS, start)?;
    let (_, end) = with(&EVENTS, end)?;
    let usable =
        |event: &capture::EventRecord| event.timed && event.recorded.load(Ordering::Acquire);
    if !usable(&start) || !usable(&end) || start.context != end.context {
        return Err(Status::InvalidHandle);
    }
    capture::observes_event(&start)?;
    capture::observes_event(&end)?;
    if !start.inner.query() || !end.inner.query() {
        return Err(Status::NotReady);
    }
    let time = end.inner.elapsed_since(&start.inner);
    put(out, time.or(Err(Status::NotReady))?.as_secs_f32() * 1e3)
}

/// Creates a stream. `flags` and `priority` have the meaning of `cuda.h`.
fn create(out: *mut usize, flags: c_uint, priority: c_int) -> Result<()> {
    let context = current()?;
    if out.is_null() || flags > 1 {
        return Err(Status::InvalidValue);
    }
    put(
        out,
        stream::Stream::create(&context, flags == 0, priority.clamp(-5, 0)),
    )
}

/// Enqueues a memory operation on a word of device memory. The stream calls `act` with its context
/// and the word until it returns true.
fn memory_operation(
    handle: usize,
    address: u64,
    write: bool,
    act: impl Fn(&Context, &AtomicU32) -> bool + Send + Sync + 'static,
) -> Result<()> {
    let context = current()?;
    let stream = find(&context, handle)?;
    if address == 0 || !address.is_multiple_of(4) {
        return Err(Status::InvalidValue);
    }
    if !matches!(
        memory::check(address, 4, context.device, write),
        Ok(memory::Location::Device | memory::Location::Host)
    ) {
        return Err(Status::InvalidValue);
    }
    let owner = Arc::clone(&context);
    let command = cpu::Command::Host(Arc::new(move || {
        let mut attempts = 0_u32;
        while owner.failure().is_ok() {
            if memory::check(address, 4, owner.device, write).is_err() {
                owner.fail(Status::IllegalAddress);
                break;
            }
            // SAFETY: `address` is aligned, and `check` found its four bytes mapped. All writers of
            // a word that a stream waits for use atomic stores.
            if act(&owner, unsafe { AtomicU32::from_ptr(address as *mut u32) }) {
                break;
            }
            attempts = attempts.saturating_add(1);
            if attempts < 50 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        Ok(())
    }));
    capture::submit(&stream, command).map(drop)
}

export! {
    fn cuStreamWaitValue32_v2(handle: usize, address: u64, value: u32, flags: c_uint) {
        let comparison = match flags {
            0 => Comparison::AtLeast,
            1 => Comparison::Equal,
            2 => Comparison::CommonBit,
            // NOR (3) and the flush of remote writes (1 << 30) need device attributes that the fake
            // reports as 0.
            _ => return Err(Status::NotSupported),
        };
        memory_operation(handle, address, false, move |context, word| {
            let wait = StreamOperation::Wait { address, comparison, value };
            // The emulator repeats the comparison while no kernel executes.
            comparison.is_met(word.load(Ordering::Acquire), value)
                && emulated::execute_on_stream(context, wait).unwrap_or(true)
        })
    }

    fn cuStreamWriteValue32_v2(handle: usize, address: u64, value: u32, flags: c_uint) {
        if flags > 1 {
            return Err(Status::InvalidValue);
        }
        memory_operation(handle, address, true, move |context, word| {
            let write = StreamOperation::Write { address, value };
            if emulated::execute_on_stream(context, write).is_none() {
                word.store(value, Ordering::Release);
            }
            true
        })
    }

    fn cuStreamCreate(out: *mut usize, flags: c_uint) {
        create(out, flags, 0)
    }

    fn cuStreamCreateWithPriority(out: *mut usize, flags: c_uint, priority: c_int) {
        create(out, flags, priority)
    }

    fn cuStreamGetGreenCtx(handle: usize, out: *mut usize) {
        let context = current()?;
        let stream = find(&context, handle)?;
        // The handle of a green context is the handle of its only stream.
        put(out, stream.multiprocessors.map_or(0, |_| stream.handle))
    }

    fn cuGreenCtxGetDevResource(handle: usize, out: *mut u32, kind: c_uint) {
        let context = current()?;
        let stream = find(&context, handle)?;
        let sms = stream.multiprocessors.ok_or(Status::InvalidHandle)?;
        if kind != 1 || out.is_null() {
            return Err(Status::InvalidValue);
        }
        // `CUdevResource`: the type, 92 bytes of padding, and the number of SMs.
        put(out, kind)?;
        put(out.wrapping_add(24), sms)
    }

    fn cuStreamDestroy_v2(handle: usize) {
        current()?;
        stream::destroy(handle)
    }

    fn cuStreamGetCtx(handle: usize, out: *mut usize) {
        let context = current()?;
        put(out, find(&context, handle)?.context)
    }

    fn cuStreamGetFlags(handle: usize, out: *mut c_uint) {
        let context = current()?;
        put(out, c_uint::from(!find(&context, handle)?.blocking))
    }

    fn cuStreamGetPriority(handle: usize, out: *mut c_int) {
        let context = current()?;
        put(out, find(&context, handle)?.priority)
    }

    fn cuStreamQuery(handle: usize) {
        let context = current()?;
        let stream = find(&context, handle)?;
        stream::query(&context, &stream)
    }

    fn cuStreamSynchronize(handle: usize) {
        let context = current()?;
        let stream = find(&context, handle)?;
        stream::synchronize(&context, &stream)
    }

    fn cuStreamWaitEvent(handle: usize, event: usize, flags: c_uint) {
        let (context, event) = with(&EVENTS, event)?;
        let stream = find(&context, handle)?;
        if flags > 1 {
            return Err(Status::InvalidValue);
        }
        capture::wait(&stream, &event, flags == 1)
    }

    fn cuLaunchHostFunc(handle: usize, function: Option<Callback>, data: *mut c_void) {
        let context = current()?;
        let stream = find(&context, handle)?;
        let function = function.ok_or(Status::InvalidValue)?;
        let (data, owner) = (data as usize, Arc::clone(&context));
        let command = cpu::Command::Host(Arc::new(move || {
            if owner.failure().is_ok() {
                run(function, data);
            }
            Ok(())
        }));
        capture::submit(&stream, command).map(drop)
    }

    fn cuStreamBeginCapture_v2(handle: usize, mode: c_uint) {
        let context = current()?;
        let stream = find(&context, handle)?;
        capture::begin(&stream, mode)
    }

    fn cuStreamEndCapture(handle: usize, graph: *mut usize) {
        let context = current()?;
        let stream = find(&context, handle)?;
        put(graph, 0)?;
        put(graph, capture::end(&stream)?)
    }

    fn cuStreamIsCapturing(handle: usize, status: *mut c_uint) {
        use core::ptr::null_mut;
        capture_info(handle, (status, null_mut(), null_mut()), (null_mut(), null_mut()))
    }

    fn cuStreamGetCaptureInfo_v2(
        handle: usize,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut *const usize,
        count: *mut usize,
    ) {
        capture_info(handle, (status, id, graph), (nodes, count))
    }

    fn cuStreamGetCaptureInfo_v3(
        handle: usize,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut usize,
        nodes: *mut *const usize,
        edges: *mut *const c_void,
        count: *mut usize,
    ) {
        put_if(edges, core::ptr::null());
        capture_info(handle, (status, id, graph), (nodes, count))
    }

    fn cuEventCreate(out: *mut usize, flags: c_uint) {
        let context = current()?;
        // Interprocess events (4) are not supported.
        if out.is_null() || flags > 3 {
            return Err(Status::InvalidValue);
        }
        put(out, stream::create_event(&context, flags & 2 == 0))
    }

    fn cuEventDestroy_v2(handle: usize) {
        current()?;
        stream::destroy_event(handle)
    }

    fn cuEventRecord(event: usize, handle: usize) {
        let (context, event) = with(&EVENTS, event)?;
        let stream = find(&context, handle)?;
        capture::record(&event, &stream, false)
    }

    fn cuEventRecordWithFlags(event: usize, handle: usize, flags: c_uint) {
        let (context, event) = with(&EVENTS, event)?;
        let stream = find(&context, handle)?;
        if flags > 1 {
            return Err(Status::InvalidValue);
        }
        capture::record(&event, &stream, flags == 1)
    }

    fn cuEventQuery(event: usize) {
        let (_, event) = with(&EVENTS, event)?;
        capture::observes_event(&event)?;
        if event.inner.query() { Ok(()) } else { Err(Status::NotReady) }
    }

    fn cuEventSynchronize(event: usize) {
        let (context, event) = with(&EVENTS, event)?;
        capture::observes_event(&event)?;
        event.inner.synchronize();
        context.failure()
    }

    fn cuEventElapsedTime(out: *mut f32, start: usize, end: usize) {
        elapsed(out, start, end)
    }

    fn cuEventElapsedTime_v2(out: *mut f32, start: usize, end: usize) {
        elapsed(out, start, end)
    }
}
