//! Captures, graphs, and user objects that graphs own.

use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};

use super::bindings::{self as hip, hipGraph_t, hipGraphExec_t, hipStream_t, hipUserObject_t};
use super::device::Hip;
use crate::Result;
use crate::gpu::{Callback, CaptureStatus, GraphDriver, RawGraph, RawGraphExec, RawStream};

impl GraphDriver for Hip {
    /// Begins a capture in thread-local mode, which does not restrict other threads. The same
    /// thread must end the capture. Until then, this thread may allocate, free and wait only
    /// through this driver, not by calling HIP directly.
    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: `stream` is a live handle (documentation of the module `gpu`).
        let status = unsafe {
            (self.functions.hipStreamBeginCapture)(
                stream.0 as hipStream_t,
                hip::CAPTURE_THREAD_LOCAL,
            )
        };
        self.functions.check("hipStreamBeginCapture", status)
    }

    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        let _current = self.current()?;
        let mut graph: hipGraph_t = ptr::null_mut();
        // SAFETY: `graph` is writable. The runtime leaves `graph` undefined after an error, and
        // `check` then returns before `graph` is read.
        let status =
            unsafe { (self.functions.hipStreamEndCapture)(stream.0 as hipStream_t, &mut graph) };
        self.functions.check("hipStreamEndCapture", status)?;
        Ok(RawGraph(graph as usize))
    }

    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        let _current = self.current()?;
        let (mut state, mut id) = (hip::CAPTURE_STATUS_NONE, 0);
        if stream == RawStream::LEGACY {
            // `hipStreamGetCaptureInfo_v2` does not accept the legacy default stream in all
            // releases. This function does, and does not invalidate a capture.
            // SAFETY: `state` is writable.
            let status =
                unsafe { (self.functions.hipStreamIsCapturing)(ptr::null_mut(), &mut state) };
            if status == hip::ERROR_CAPTURE_IMPLICIT {
                self.functions.forget();
                return Ok(CaptureStatus::Blocked);
            }
            self.functions.check("hipStreamIsCapturing", status)?;
            return Ok(CaptureStatus::None);
        }
        let mut graph: hipGraph_t = ptr::null_mut();
        // SAFETY: `stream` is a live handle. `state`, `id` and `graph` are writable. The other
        // pointers are optional and null.
        let status = unsafe {
            (self.functions.hipStreamGetCaptureInfo_v2)(
                stream.0 as hipStream_t,
                &mut state,
                &mut id,
                &mut graph,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        self.functions.check("hipStreamGetCaptureInfo_v2", status)?;
        Ok(match state {
            hip::CAPTURE_STATUS_NONE => CaptureStatus::None,
            hip::CAPTURE_STATUS_ACTIVE => CaptureStatus::Active(id, RawGraph(graph as usize)),
            _ => CaptureStatus::Invalidated,
        })
    }

    /// # Safety
    /// The preconditions of `Driver::retain`.
    unsafe fn retain(&self, graph: RawGraph, callback: Callback, data: *mut c_void) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let retained = UserObjectData::leak(callback, data);
        let mut object: hipUserObject_t = ptr::null_mut();
        // SAFETY: `object` is writable. `last_released` accepts `retained`, a leaked
        // `UserObjectData`, and the runtime calls `last_released` once.
        let status = unsafe {
            (self.functions.hipUserObjectCreate)(
                &mut object,
                retained.cast(),
                Some(last_released),
                1,
                hip::USER_OBJECT_NO_SYNC,
            )
        };
        if let Err(error) = self.functions.check("hipUserObjectCreate", status) {
            // SAFETY: the call failed, so the runtime will not call `last_released`, and this
            // function still owns `retained`.
            unsafe { UserObjectData::discard(retained) };
            return Err(error);
        }
        // SAFETY: the user object was created above. The flag moves the only reference to the user
        // object to the graph.
        let status = unsafe {
            (self.functions.hipGraphRetainUserObject)(
                graph.0 as hipGraph_t,
                object,
                1,
                hip::USER_OBJECT_MOVE,
            )
        };
        let Err(error) = self.functions.check("hipGraphRetainUserObject", status) else {
            return Ok(());
        };
        // SAFETY: the graph did not take the reference to the user object. This function still
        // holds the reference, so `retained` has not been freed.
        unsafe { UserObjectData::disarm(retained) };
        // SAFETY: this function holds the only reference to the user object and does not use the
        // object afterwards.
        let status = unsafe { (self.functions.hipUserObjectRelease)(object, 1) };
        if let Err(second) = self.functions.check("hipUserObjectRelease", status) {
            tracing::warn!(%second, "an object of a few bytes leaks");
        }
        Err(error)
    }

    fn graph_nodes(&self, graph: RawGraph) -> Result<usize> {
        let _current = self.current()?;
        let mut nodes = 0;
        // SAFETY: `nodes` is writable. With a null array the runtime writes only the number of
        // nodes.
        let status = unsafe {
            (self.functions.hipGraphGetNodes)(graph.0 as hipGraph_t, ptr::null_mut(), &mut nodes)
        };
        self.functions.check("hipGraphGetNodes", status)?;
        Ok(nodes)
    }

    fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        let _relaxed = self.relaxed()?;
        let mut exec: hipGraphExec_t = ptr::null_mut();
        // SAFETY: `exec` is writable, and `graph` is a live handle.
        let status = unsafe {
            (self.functions.hipGraphInstantiateWithFlags)(&mut exec, graph.0 as hipGraph_t, 0)
        };
        self.functions
            .check("hipGraphInstantiateWithFlags", status)?;
        Ok(RawGraphExec(exec as usize))
    }

    /// # Safety
    /// The preconditions of `Driver::launch_graph`.
    unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        let _current = self.current()?;
        // SAFETY: `exec` and `stream` are live handles. The caller guarantees the preconditions of
        // every operation in the graph.
        let status = unsafe {
            (self.functions.hipGraphLaunch)(exec.0 as hipGraphExec_t, stream.0 as hipStream_t)
        };
        self.functions.check("hipGraphLaunch", status)
    }

    /// # Safety
    /// The preconditions of `Driver::destroy_graph`.
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: the caller guarantees that the graph is not in use.
        let status = unsafe { (self.functions.hipGraphDestroy)(graph.0 as hipGraph_t) };
        self.functions.check("hipGraphDestroy", status)
    }

    /// # Safety
    /// The preconditions of `Driver::destroy_exec`.
    unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: the caller guarantees that the instantiated graph is not in use.
        let status = unsafe { (self.functions.hipGraphExecDestroy)(exec.0 as hipGraphExec_t) };
        self.functions.check("hipGraphExecDestroy", status)
    }
}

/// Data of a user object. The destructor [`last_released`] calls `callback` with `data`, unless
/// [`UserObjectData::disarm`] was called.
#[derive(Debug)]
struct UserObjectData {
    callback: Callback,
    data: *mut c_void,
    armed: AtomicBool,
}

impl UserObjectData {
    fn leak(callback: Callback, data: *mut c_void) -> *mut Self {
        Box::into_raw(Box::new(Self {
            callback,
            data,
            armed: AtomicBool::new(true),
        }))
    }

    /// Disables the callback.
    ///
    /// # Safety
    /// `this` must point to a live [`UserObjectData`].
    unsafe fn disarm(this: *mut Self) {
        // SAFETY: the caller guarantees that `this` points to a live `UserObjectData`.
        let this = unsafe { &*this };
        this.armed.store(false, Ordering::Release);
    }

    /// Frees the data without calling the callback.
    ///
    /// # Safety
    /// `this` must come from `leak` and must not be used by other code.
    unsafe fn discard(this: *mut Self) {
        // SAFETY: the caller guarantees that `this` came from `leak` and is not used by other code.
        drop(unsafe { Box::from_raw(this) });
    }
}

/// Destructor of a user object. The runtime calls it when the last reference to the object is
/// released.
///
/// # Safety
/// `data` must come from [`UserObjectData::leak`] and must not be used after the call.
unsafe extern "C" fn last_released(data: *mut c_void) {
    // SAFETY: the caller guarantees that `data` came from `leak` and is not used after the call.
    let retained = unsafe { Box::from_raw(data.cast::<UserObjectData>()) };
    if retained.armed.load(Ordering::Acquire) {
        // SAFETY: the contract of `retain` permits one call of `callback` with `data`.
        unsafe { (retained.callback)(retained.data) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the tests pass a pointer to a counter.
        unsafe { *data.cast::<u32>() += 1 };
    }

    #[test]
    fn a_graphs_object_calls_back_once() {
        let mut calls = 0_u32;
        let retained = UserObjectData::leak(count, ptr::from_mut(&mut calls).cast());
        // SAFETY: the object was leaked above.
        unsafe { last_released(retained.cast()) };
        assert_eq!(calls, 1);
    }

    #[test]
    fn an_object_that_no_graph_took_does_not_call_back() {
        let mut calls = 0_u32;
        let retained = UserObjectData::leak(count, ptr::from_mut(&mut calls).cast());
        // SAFETY: the object was leaked above.
        unsafe { UserObjectData::disarm(retained) };
        // SAFETY: the object was leaked above.
        unsafe { last_released(retained.cast()) };
        let discarded = UserObjectData::leak(count, ptr::from_mut(&mut calls).cast());
        // SAFETY: the object was leaked above.
        unsafe { UserObjectData::discard(discarded) };
        assert_eq!(calls, 0);
    }
}
