//! Capture, graphs, and what graphs own.

use core::ffi::c_void;
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};

use super::bindings::{self as hip, hipGraph_t, hipGraphExec_t, hipStream_t, hipUserObject_t};
use super::device::Hip;
use crate::Result;
use crate::gpu::driver::{Callback, CaptureStatus, RawGraph, RawGraphExec, RawStream};

impl Hip {
    /// Other threads go on as they like; this one may not allocate, free or wait by calls of its
    /// own until the capture ends (those of this driver may be made), and has to end it.
    pub(super) fn begin_capture(&self, stream: RawStream) -> Result<()> {
        self.current()?;
        // SAFETY: the run time checks handle and mode.
        let status = unsafe {
            (self.functions.hipStreamBeginCapture)(
                stream.0 as hipStream_t,
                hip::CAPTURE_THREAD_LOCAL,
            )
        };
        self.functions.check("hipStreamBeginCapture", status)
    }

    pub(super) fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        self.current()?;
        let mut graph: hipGraph_t = ptr::null_mut();
        // SAFETY: `graph` is writable. After an error it may hold anything, and is not looked at.
        let status =
            unsafe { (self.functions.hipStreamEndCapture)(stream.0 as hipStream_t, &mut graph) };
        self.functions.check("hipStreamEndCapture", status)?;
        Ok(RawGraph(graph as usize))
    }

    pub(super) fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        self.current()?;
        let (mut state, mut id) = (hip::CAPTURE_STATUS_NONE, 0);
        let mut graph: hipGraph_t = ptr::null_mut();
        // SAFETY: what is not null is writable; the run time checks the handle.
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
    /// As `Driver::retain`.
    pub(super) unsafe fn retain(
        &self,
        graph: RawGraph,
        callback: Callback,
        data: *mut c_void,
    ) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let retained = UserObjectData::leak(callback, data);
        let mut object: hipUserObject_t = ptr::null_mut();
        // SAFETY: `object` is writable; `last_released` may be called with `retained`, once.
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
            // SAFETY: the run time has not taken it.
            unsafe { UserObjectData::discard(retained) };
            return Err(error);
        }
        // SAFETY: the object was made just now; the graph gets its only reference.
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
        // SAFETY: the graph has not taken the object, whose one reference keeps it.
        unsafe { UserObjectData::disarm(retained) };
        // SAFETY: the one reference is ours.
        let status = unsafe { (self.functions.hipUserObjectRelease)(object, 1) };
        if let Err(second) = self.functions.check("hipUserObjectRelease", status) {
            tracing::warn!(%second, "a few bytes are lost");
        }
        Err(error)
    }

    pub(super) fn graph_nodes(&self, graph: RawGraph) -> Result<usize> {
        self.current()?;
        let mut nodes = 0;
        // SAFETY: `nodes` is writable; without a list only the number is given.
        let status = unsafe {
            (self.functions.hipGraphGetNodes)(graph.0 as hipGraph_t, ptr::null_mut(), &mut nodes)
        };
        self.functions.check("hipGraphGetNodes", status)?;
        Ok(nodes)
    }

    pub(super) fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        let _relaxed = self.relaxed()?;
        let mut exec: hipGraphExec_t = ptr::null_mut();
        // SAFETY: `exec` is writable; the graph came from this driver.
        let status = unsafe {
            (self.functions.hipGraphInstantiateWithFlags)(&mut exec, graph.0 as hipGraph_t, 0)
        };
        self.functions
            .check("hipGraphInstantiateWithFlags", status)?;
        Ok(RawGraphExec(exec as usize))
    }

    /// # Safety
    /// As `Driver::launch_graph`.
    pub(super) unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        self.current()?;
        // SAFETY: the caller promises what the graph needs.
        let status = unsafe {
            (self.functions.hipGraphLaunch)(exec.0 as hipGraphExec_t, stream.0 as hipStream_t)
        };
        self.functions.check("hipGraphLaunch", status)
    }

    /// # Safety
    /// As `Driver::destroy_graph`.
    pub(super) unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: the caller promises that nobody uses it any more.
        let status = unsafe { (self.functions.hipGraphDestroy)(graph.0 as hipGraph_t) };
        self.functions.check("hipGraphDestroy", status)
    }

    /// # Safety
    /// As `Driver::destroy_exec`.
    pub(super) unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: the caller promises that nobody uses it any more.
        let status = unsafe { (self.functions.hipGraphExecDestroy)(exec.0 as hipGraphExec_t) };
        self.functions.check("hipGraphExecDestroy", status)
    }
}

/// What a user object calls in the end, unless it never became a graph's.
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

    /// The callback will not be called.
    ///
    /// # Safety
    /// It is still there.
    unsafe fn disarm(this: *mut Self) {
        // SAFETY: as above.
        let this = unsafe { &*this };
        this.armed.store(false, Ordering::Release);
    }

    /// # Safety
    /// Nobody else has it.
    unsafe fn discard(this: *mut Self) {
        // SAFETY: it came from `leak`; as above.
        drop(unsafe { Box::from_raw(this) });
    }
}

/// Called by the run time with a [`UserObjectData`], when its last reference is released.
///
/// # Safety
/// `data` came from [`UserObjectData::leak`], and is nobody's after this.
unsafe extern "C" fn last_released(data: *mut c_void) {
    // SAFETY: as above.
    let retained = unsafe { Box::from_raw(data.cast::<UserObjectData>()) };
    if retained.armed.load(Ordering::Acquire) {
        // SAFETY: whoever called `retain` promised it.
        unsafe { (retained.callback)(retained.data) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn count(data: *mut c_void) {
        // SAFETY: the tests give a counter.
        unsafe { *data.cast::<u32>() += 1 };
    }

    #[test]
    fn a_graphs_object_calls_back_once() {
        let mut calls = 0_u32;
        let retained = UserObjectData::leak(count, ptr::from_mut(&mut calls).cast());
        // SAFETY: it was leaked just now.
        unsafe { last_released(retained.cast()) };
        assert_eq!(calls, 1);
    }

    #[test]
    fn an_object_that_no_graph_took_does_not_call_back() {
        let mut calls = 0_u32;
        let retained = UserObjectData::leak(count, ptr::from_mut(&mut calls).cast());
        // SAFETY: it was leaked just now.
        unsafe { UserObjectData::disarm(retained) };
        // SAFETY: as above.
        unsafe { last_released(retained.cast()) };
        let discarded = UserObjectData::leak(count, ptr::from_mut(&mut calls).cast());
        // SAFETY: as above.
        unsafe { UserObjectData::discard(discarded) };
        assert_eq!(calls, 0);
    }
}
