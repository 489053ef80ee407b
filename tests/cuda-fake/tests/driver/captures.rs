//! Tests captures and graphs.

use core::ffi::c_void;
use core::ptr::{null, null_mut};
use core::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{self, CUstreamCaptureMode, CUstreamCaptureStatus};

use crate::support::*;

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

static COUNT: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count(_: *mut c_void) {
    COUNT.fetch_add(1, Ordering::SeqCst);
}

fn work(stream: sys::CUstream) {
    ok!(cuLaunchHostFunc(stream, Some(count), null_mut()));
}

fn counted() -> u32 {
    COUNT.load(Ordering::SeqCst)
}

fn end(stream: sys::CUstream) -> sys::CUgraph {
    let mut graph = null_mut();
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    graph
}

fn exec(graph: sys::CUgraph) -> sys::CUgraphExec {
    let mut exec = null_mut();
    ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
    exec
}

fn nodes(graph: sys::CUgraph) -> usize {
    let mut nodes = 0;
    ok!(cuGraphGetNodes(graph, null_mut(), &raw mut nodes));
    nodes
}

/// Returns the status, the id and the graph of a stream's capture, and the number of dependencies.
fn info(stream: sys::CUstream) -> (CUstreamCaptureStatus, u64, sys::CUgraph, usize) {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, mut graph, mut count) = (0, null_mut(), 0);
    let mut first: *const sys::CUgraphNode = null();
    ok!(cuStreamGetCaptureInfo_v2(
        stream,
        &raw mut status,
        &raw mut id,
        &raw mut graph,
        &raw mut first,
        &raw mut count
    ));
    (status, id, graph, count)
}

driver_test! {
    /// Captured work does not run during the capture. Each launch of the graph runs it once.
    capture_and_replay() {
        start();
        let stream = stream();
        ok!(cuStreamBeginCapture_v2(stream, GLOBAL));
        fails!(CUDA_ERROR_ILLEGAL_STATE, cuStreamBeginCapture_v2(stream, GLOBAL));
        work(stream);
        work(stream);
        let (status, id, growing, dependencies) = info(stream);
        assert_eq!(status, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE);
        assert!(id > 0 && dependencies == 1);
        fails!(CUDA_ERROR_INVALID_VALUE, cuGraphDestroy(growing));
        let graph = end(stream);
        assert_eq!(graph, growing);
        fails!(CUDA_ERROR_ILLEGAL_STATE, cuStreamEndCapture(stream, &mut null_mut()));
        assert_eq!(info(stream).0, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
        assert_eq!((nodes(graph), counted()), (2, 0));
        let exec = exec(graph);
        ok!(cuGraphDestroy(graph));
        fails!(CUDA_ERROR_INVALID_VALUE, cuGraphDestroy(graph));
        for _ in 0..3 {
            ok!(cuGraphLaunch(exec, stream));
        }
        ok!(cuStreamSynchronize(stream));
        assert_eq!(counted(), 6);
        ok!(cuGraphExecDestroy(exec));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuGraphLaunch(exec, stream));
        assert_eq!((live(c"graph"), live(c"exec")), (0, 0));
    }
}

driver_test! {
    /// A stream that waits for an event of a capture joins the capture. Without a join back to the
    /// origin stream, the capture fails.
    fork_and_join() {
        start();
        let (stream, side) = (stream(), stream());
        let (fork, join) = (event(), event());
        for joined in [true, false] {
            ok!(cuStreamBeginCapture_v2(stream, LOCAL));
            ok!(cuEventRecord(fork, stream));
            ok!(cuStreamWaitEvent(side, fork, 0));
            assert_eq!(info(side).1, info(stream).1);
            work(side);
            work(stream);
            fails!(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, cuStreamEndCapture(side, &mut null_mut()));
            let mut graph = null_mut();
            fails!(
                CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                cuStreamEndCapture(stream, &raw mut graph)
            );
            assert!(graph.is_null());
            ok!(cuStreamBeginCapture_v2(stream, LOCAL));
            ok!(cuEventRecord(fork, stream));
            ok!(cuStreamWaitEvent(side, fork, 0));
            work(side);
            work(stream);
            if joined {
                ok!(cuEventRecord(join, side));
                ok!(cuStreamWaitEvent(stream, join, 0));
                assert_eq!(info(stream).3, 2);
                assert_eq!(nodes(end(stream)), 2);
            } else {
                fails!(
                    CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                    cuStreamEndCapture(stream, &raw mut graph)
                );
            }
            assert_eq!(info(side).0, CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
        }
        work(side);
        ok!(cuStreamSynchronize(side));
        assert_eq!(counted(), 1);
    }
}

/// Starts a capture, makes a call that must fail, and asserts that the call invalidated the
/// capture.
fn invalidates(what: &str, stream: sys::CUstream, call: impl FnOnce()) {
    ok!(cuStreamBeginCapture_v2(stream, LOCAL));
    call();
    let invalid = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    assert_eq!(info(stream).0, invalid, "{what}");
    let refused = code!(cuLaunchHostFunc(stream, Some(count), null_mut()));
    assert_eq!(refused, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "{what}");
    let mut graph = null_mut();
    fails!(
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        cuStreamEndCapture(stream, &raw mut graph)
    );
    assert!(graph.is_null(), "{what}");
    ok!(cuStreamSynchronize(stream));
}

driver_test! {
    /// A prohibited call fails and invalidates the capture. Without a capture, the same call
    /// succeeds.
    prohibited_calls() {
        start();
        let (stream, other) = (stream(), stream());
        let (inside, outside) = (event(), event());
        let held = block(64);
        let mut address = 0;
        invalidates("allocation", stream, || {
            fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuMemAlloc_v2(&raw mut address, 64));
        });
        invalidates("release", stream, || {
            fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuMemFree_v2(held));
        });
        invalidates("wait for the stream", stream, || {
            fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(stream));
        });
        invalidates("query of the stream", stream, || {
            fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamQuery(stream));
        });
        invalidates("wait for another stream", stream, || {
            fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamSynchronize(other));
        });
        invalidates("wait for the context", stream, || {
            fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuCtxSynchronize());
        });
        invalidates("query of an event of the capture", stream, || {
            ok!(cuEventRecord(inside, stream));
            fails!(CUDA_ERROR_CAPTURED_EVENT, cuEventQuery(inside));
        });
        fails!(CUDA_ERROR_CAPTURED_EVENT, cuEventSynchronize(inside));
        ok!(cuEventRecord(inside, stream));
        ok!(cuEventSynchronize(inside));
        ok!(cuEventRecord(outside, other));
        invalidates("wait for work outside", stream, || {
            fails!(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, cuStreamWaitEvent(stream, outside, 0));
        });
        invalidates("module", stream, || {
            let mut module = null_mut();
            let image = c".version 8.0\n.target sm_90\n.address_size 64\n".as_ptr().cast();
            fails!(
                CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                cuModuleLoadDataEx(&raw mut module, image, 0, null_mut(), null_mut())
            );
        });
        ok!(cuMemAlloc_v2(&raw mut address, 64));
        ok!(cuMemFree_v2(held));
        ok!(cuCtxSynchronize());
        // Virtual memory management and the creation of events are allowed during a capture.
        ok!(cuStreamBeginCapture_v2(stream, LOCAL));
        let mut reserved = 0;
        ok!(cuMemAddressReserve(&raw mut reserved, 2 << 20, 0, 0, 0));
        event();
        assert_eq!(nodes(end(stream)), 0);
        // Two captures do not merge.
        ok!(cuStreamBeginCapture_v2(stream, LOCAL));
        ok!(cuStreamBeginCapture_v2(other, LOCAL));
        ok!(cuEventRecord(inside, stream));
        fails!(CUDA_ERROR_STREAM_CAPTURE_MERGE, cuStreamWaitEvent(other, inside, 0));
        fails!(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &mut null_mut()));
        fails!(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(other, &mut null_mut()));
    }
}

/// Allocates on another thread in the given capture mode. Returns the result code.
fn allocate_elsewhere(context: sys::CUcontext, mode: CUstreamCaptureMode) -> sys::CUresult {
    let context = context as usize;
    std::thread::spawn(move || {
        ok!(cuCtxSetCurrent(context as _));
        let mut mode = mode;
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
        assert_eq!(mode, GLOBAL);
        let mut address = 0;
        code!(cuMemAlloc_v2(&raw mut address, 64))
    })
    .join()
    .unwrap()
}

driver_test! {
    /// The mode of the capture and the mode of the calling thread together determine whether the
    /// thread may make potentially unsafe calls.
    modes() {
        let context = start();
        let stream = stream();
        let unsupported = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        for (capture, thread, expected) in [
            (GLOBAL, GLOBAL, unsupported),
            (GLOBAL, LOCAL, CUDA_SUCCESS),
            (GLOBAL, RELAXED, CUDA_SUCCESS),
            (LOCAL, GLOBAL, CUDA_SUCCESS),
            (RELAXED, GLOBAL, CUDA_SUCCESS),
        ] {
            ok!(cuStreamBeginCapture_v2(stream, capture));
            assert_eq!(allocate_elsewhere(context, thread), expected, "{capture:?} {thread:?}");
            let ended = code!(cuStreamEndCapture(stream, &mut null_mut()));
            assert_eq!(ended == CUDA_SUCCESS, expected == CUDA_SUCCESS, "{capture:?} {thread:?}");
        }
        // The capturing thread may make potentially unsafe calls while its own mode is relaxed.
        ok!(cuStreamBeginCapture_v2(stream, GLOBAL));
        let mut mode = RELAXED;
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
        let held = block(64);
        ok!(cuMemFree_v2(held));
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
        assert_eq!(mode, RELAXED);
        end(stream);
        // Another thread can end a capture only if the capture is relaxed.
        for (capture, expected) in [
            (LOCAL, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD),
            (RELAXED, CUDA_SUCCESS),
        ] {
            ok!(cuStreamBeginCapture_v2(stream, capture));
            let (context, handle) = (context as usize, stream as usize);
            let code = std::thread::spawn(move || {
                ok!(cuCtxSetCurrent(context as _));
                code!(cuStreamEndCapture(handle as _, &mut null_mut()))
            });
            assert_eq!(code.join().unwrap(), expected);
            if expected != CUDA_SUCCESS {
                end(stream);
            }
        }
    }
}

driver_test! {
    /// The capture of a blocking stream prohibits work on the default stream. The capture of a
    /// nonblocking stream does not.
    default_stream() {
        start();
        let mut blocking = null_mut();
        ok!(cuStreamCreate(&raw mut blocking, 0));
        fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamBeginCapture_v2(null_mut(), RELAXED));
        let other = stream();
        for (stream, allowed) in [(blocking, false), (other, true)] {
            ok!(cuStreamBeginCapture_v2(stream, RELAXED));
            let code = code!(cuLaunchHostFunc(null_mut(), Some(count), null_mut()));
            assert_eq!(code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, !allowed);
            assert_eq!(code == CUDA_SUCCESS, allowed);
            let ended = code!(cuStreamEndCapture(stream, &mut null_mut()));
            assert_eq!(ended == CUDA_SUCCESS, allowed);
        }
    }
}

driver_test! {
    /// A user object lives until its owning graph and all instances of the graph are destroyed and
    /// all launches have completed.
    user_objects() {
        start();
        let stream = stream();
        let object = || {
            let mut object = null_mut();
            ok!(cuUserObjectCreate(&raw mut object, null_mut(), Some(count), 1, 1));
            object
        };
        ok!(cuUserObjectRelease(object(), 1));
        eventually("an object without references is destroyed", || counted() == 1);
        ok!(cuStreamBeginCapture_v2(stream, LOCAL));
        let switch = Switch::new();
        switch.block(stream);
        let owned = object();
        ok!(cuGraphRetainUserObject(info(stream).2, owned, 1, 1));
        let graph = end(stream);
        let exec = exec(graph);
        ok!(cuGraphDestroy(graph));
        ok!(cuGraphLaunch(exec, stream));
        ok!(cuGraphExecDestroy(exec));
        std::thread::sleep(core::time::Duration::from_millis(20));
        assert_eq!((counted(), live(c"user_object")), (1, 1));
        switch.open();
        ok!(cuStreamSynchronize(stream));
        eventually("the object is destroyed after the launch", || counted() == 2);
        assert_eq!(live(c"user_object"), 0);
        fails!(CUDA_ERROR_INVALID_VALUE, cuUserObjectRelease(owned, 1));
        // An invalidated capture releases its references to user objects.
        ok!(cuStreamBeginCapture_v2(stream, LOCAL));
        ok!(cuGraphRetainUserObject(info(stream).2, object(), 1, 1));
        fails!(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, cuStreamQuery(stream));
        fails!(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, cuStreamEndCapture(stream, &mut null_mut()));
        eventually("the object is destroyed with the capture", || counted() == 3);
    }
}

driver_test! {
    /// Launches of one graph run in sequence even on different streams. A captured copy records
    /// addresses, not contents.
    replays_and_copies() {
        start();
        let (first, second) = (stream(), stream());
        let (from, to) = (block(64), block(64));
        let switch = Switch::new();
        ok!(cuStreamBeginCapture_v2(first, LOCAL));
        switch.block(first);
        ok!(cuMemcpyAsync(to, from, 64, first));
        ok!(cuMemsetD8Async(from, 0, 8, first));
        let exec = exec(end(first));
        write(from, &[1, 2]);
        ok!(cuGraphLaunch(exec, first));
        ok!(cuGraphLaunch(exec, second));
        ok!(cuLaunchHostFunc(second, Some(count), null_mut()));
        assert_eq!(counted(), 0);
        switch.open();
        ok!(cuStreamSynchronize(second));
        assert_eq!((read(to, 2), read(from, 2)), (vec![0, 2], vec![0, 2]));
        write(from, &[9]);
        ok!(cuGraphLaunch(exec, first));
        ok!(cuStreamSynchronize(first));
        assert_eq!(read(to, 1), [9]);
    }
}

driver_test! {
    /// A clone and a child graph remain usable after the graphs that they were created from are
    /// destroyed.
    copies_and_children() {
        start();
        let stream = stream();
        ok!(cuStreamBeginCapture_v2(stream, LOCAL));
        work(stream);
        let graph = end(stream);
        let mut copy = null_mut();
        ok!(cuGraphClone(&raw mut copy, graph));
        ok!(cuGraphDestroy(graph));
        let child = exec(copy);
        ok!(cuGraphDestroy(copy));
        ok!(cuStreamBeginCapture_v2(stream, LOCAL));
        work(stream);
        ok!(cuGraphLaunch(child, stream));
        let parent = end(stream);
        ok!(cuGraphExecDestroy(child));
        assert_eq!((nodes(parent), counted()), (2, 0));
        ok!(cuGraphLaunch(exec(parent), stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(counted(), 2);
    }
}

driver_test! {
    /// Event records and waits are nodes of the graph only with the external flag.
    external_events() {
        start();
        let stream = stream();
        let (recorded, awaited) = (event(), event());
        ok!(cuEventRecord(awaited, stream));
        fails!(CUDA_ERROR_INVALID_VALUE, cuEventRecordWithFlags(recorded, stream, 1));
        ok!(cuStreamBeginCapture_v2(stream, LOCAL));
        ok!(cuStreamWaitEvent(stream, awaited, 1));
        ok!(cuEventRecordWithFlags(recorded, stream, 1));
        let graph = end(stream);
        assert_eq!(nodes(graph), 2);
        let exec = exec(graph);
        ok!(cuEventQuery(recorded));
        let switch = Switch::new();
        let other = crate::support::stream();
        switch.block(other);
        ok!(cuEventRecord(awaited, other));
        ok!(cuGraphLaunch(exec, stream));
        fails!(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
        switch.open();
        ok!(cuStreamSynchronize(stream));
        ok!(cuEventQuery(recorded));
    }
}
