//! Tests streams, events and callbacks.

use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;

use crate::support::*;

static COUNT: AtomicU32 = AtomicU32::new(0);
static SEEN: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count(_: *mut c_void) {
    COUNT.fetch_add(1, Ordering::SeqCst);
}

driver_test! {
    /// Work of a stream runs in order, after the events that the stream waits for, and concurrently
    /// with the caller.
    order_and_events() {
        start();
        let (first, second, event) = (stream(), stream(), event());
        let switch = Switch::new();
        ok!(cuEventQuery(event));
        switch.block(first);
        ok!(cuEventRecord(event, first));
        ok!(cuStreamWaitEvent(second, event, 0));
        ok!(cuLaunchHostFunc(second, Some(count), null_mut()));
        fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(first));
        fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(second));
        fails!(CUDA_ERROR_NOT_READY, cuEventQuery(event));
        assert_eq!(COUNT.load(Ordering::SeqCst), 0);
        switch.open();
        ok!(cuStreamSynchronize(second));
        ok!(cuEventQuery(event));
        ok!(cuStreamSynchronize(first));
        ok!(cuStreamQuery(first));
        assert_eq!(COUNT.load(Ordering::SeqCst), 1);
        ok!(cuEventDestroy_v2(event));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(event));
    }
}

driver_test! {
    /// A stream waits for a word of device memory, both eagerly and in a graph. The comparison is
    /// cyclic.
    memory_operations() {
        start();
        let (waiting, writing) = (stream(), stream());
        let mut word = 0;
        ok!(cuMemAlloc_v2(&raw mut word, 64));
        ok!(cuMemsetD8Async(word, 0, 64, writing));
        ok!(cuStreamSynchronize(writing));
        fails!(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32_v2(waiting, word + 2, 1, 0));
        fails!(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32_v2(waiting, 0, 1, 0));
        fails!(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32_v2(waiting, word + 64, 1, 0));
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuStreamWaitValue32_v2(waiting, word, 1, 3));
        ok!(cuStreamWaitValue32_v2(waiting, word, 5, 0));
        ok!(cuLaunchHostFunc(waiting, Some(count), null_mut()));
        for value in [4, u32::MAX] {
            ok!(cuStreamWriteValue32_v2(writing, word, value, 0));
            ok!(cuStreamSynchronize(writing));
            std::thread::sleep(core::time::Duration::from_millis(5));
            fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(waiting));
        }
        ok!(cuStreamWriteValue32_v2(writing, word, 6, 0));
        ok!(cuStreamSynchronize(waiting));
        assert_eq!(COUNT.load(Ordering::SeqCst), 1);
        // In the graph, the origin stream clears the word and a branch sets it again. A replay of
        // the fake starts work in the order of the captured calls, so the write must be captured
        // before the wait. Otherwise the wait would never return.
        let (fork, join) = (event(), event());
        let relaxed = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        ok!(cuStreamBeginCapture_v2(waiting, relaxed));
        ok!(cuMemsetD8Async(word, 0, 4, waiting));
        ok!(cuEventRecord(fork, waiting));
        ok!(cuStreamWaitEvent(writing, fork, 0));
        ok!(cuStreamWriteValue32_v2(writing, word, 1, 0));
        ok!(cuEventRecord(join, writing));
        ok!(cuStreamWaitValue32_v2(waiting, word, 1, 0));
        ok!(cuLaunchHostFunc(waiting, Some(count), null_mut()));
        ok!(cuStreamWaitEvent(waiting, join, 0));
        let (mut graph, mut exec) = (null_mut(), null_mut());
        ok!(cuStreamEndCapture(waiting, &raw mut graph));
        ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        for _ in 0..3 {
            ok!(cuGraphLaunch(exec, waiting));
        }
        ok!(cuStreamSynchronize(waiting));
        assert_eq!(COUNT.load(Ordering::SeqCst), 4);
    }
}

driver_test! {
    /// A host callback must not call the driver. The same call from other code succeeds.
    callbacks_are_outside() {
        unsafe extern "C" fn calls(event: *mut c_void) {
            let code = code!(cuEventQuery(event.cast()));
            SEEN.store(code as u32, Ordering::SeqCst);
        }
        start();
        let (stream, event) = (stream(), event());
        ok!(cuLaunchHostFunc(stream, Some(calls), event.cast()));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(SEEN.load(Ordering::SeqCst), CUDA_ERROR_NOT_PERMITTED as u32);
        ok!(cuEventQuery(event));
        fails!(CUDA_ERROR_INVALID_VALUE, cuLaunchHostFunc(stream, None, null_mut()));
    }
}

driver_test! {
    durations() {
        start();
        let stream = stream();
        let (mut begin, mut end) = (null_mut(), null_mut());
        ok!(cuEventCreate(&raw mut begin, 0));
        ok!(cuEventCreate(&raw mut end, 0));
        let mut time = -1.0;
        fails!(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&raw mut time, begin, end));
        let switch = Switch::new();
        ok!(cuEventRecord(begin, stream));
        switch.block(stream);
        ok!(cuEventRecord(end, stream));
        fails!(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&raw mut time, begin, end));
        std::thread::sleep(core::time::Duration::from_millis(5));
        switch.open();
        ok!(cuEventSynchronize(end));
        ok!(cuEventElapsedTime(&raw mut time, begin, end));
        assert!(time >= 4.0, "{time}");
        let untimed = event();
        ok!(cuEventRecord(untimed, stream));
        ok!(cuStreamSynchronize(stream));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&raw mut time, begin, untimed));
    }
}

driver_test! {
    /// A destroyed stream finishes its work, but the call that destroys it does not wait.
    destroyed_with_work() {
        start();
        let stream = stream();
        let switch = Switch::new();
        switch.block(stream);
        ok!(cuLaunchHostFunc(stream, Some(count), null_mut()));
        ok!(cuStreamDestroy_v2(stream));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery(stream));
        assert_eq!(COUNT.load(Ordering::SeqCst), 0);
        switch.open();
        eventually("the work has ended", || COUNT.load(Ordering::SeqCst) == 1);
    }
}

driver_test! {
    /// The default stream waits for blocking streams only.
    default_stream() {
        start();
        let mut blocking = null_mut();
        ok!(cuStreamCreate(&raw mut blocking, 0));
        let other = stream();
        let (held, free) = (Switch::new(), Switch::new());
        free.block(other);
        ok!(cuLaunchHostFunc(null_mut(), Some(count), null_mut()));
        ok!(cuStreamSynchronize(null_mut()));
        assert_eq!(COUNT.load(Ordering::SeqCst), 1);
        held.block(blocking);
        ok!(cuLaunchHostFunc(null_mut(), Some(count), null_mut()));
        ok!(cuLaunchHostFunc(blocking, Some(count), null_mut()));
        fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(null_mut()));
        assert_eq!(COUNT.load(Ordering::SeqCst), 1);
        held.open();
        ok!(cuStreamSynchronize(blocking));
        assert_eq!(COUNT.load(Ordering::SeqCst), 3);
        free.open();
        ok!(cuStreamSynchronize(other));
    }
}

driver_test! {
    /// An event can be recorded only on a stream of its context. A stream can wait for an event of
    /// another context.
    contexts_apart("DEVICES" = "2") {
        let first = start();
        let (stream, event) = (stream(), event());
        let mut second = null_mut();
        ok!(cuDevicePrimaryCtxRetain(&raw mut second, 1));
        ok!(cuCtxSetCurrent(second));
        assert_ne!(first, second);
        let (far, far_event) = (crate::support::stream(), crate::support::event());
        fails!(CUDA_ERROR_INVALID_HANDLE, cuEventRecord(event, far));
        ok!(cuEventRecord(far_event, far));
        ok!(cuStreamWaitEvent(stream, far_event, 0));
        ok!(cuStreamSynchronize(stream));
        let mut owner: sys::CUcontext = null_mut();
        ok!(cuStreamGetCtx(stream, &raw mut owner));
        assert_eq!(owner, first);
    }
}
