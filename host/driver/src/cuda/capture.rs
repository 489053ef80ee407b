//! Stream captures and graphs.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys;

use super::context::Cuda;
use super::error;
use super::stream::raw as raw_stream;
use crate::Result;
use crate::gpu::{Callback, CaptureStatus, GraphDriver, RawGraph, RawGraphExec, RawStream};

/// Converts a graph to the library's type.
const fn raw(graph: RawGraph) -> sys::CUgraph {
    graph.0 as sys::CUgraph
}

/// Converts an instantiated graph to the library's type.
const fn raw_exec(exec: RawGraphExec) -> sys::CUgraphExec {
    exec.0 as sys::CUgraphExec
}

/// Data of a CUDA user object that a graph retains. `callback` runs after the graph, its clones and
/// its instances are destroyed.
struct UserObjectData {
    callback: Callback,
    data: *mut c_void,
    /// True unless the graph failed to retain the user object. If false, `callback` is not called.
    given: AtomicBool,
}

/// Destructor of a user object. The library calls it once with a pointer to a [`UserObjectData`].
unsafe extern "C" fn gone(owned: *mut c_void) {
    // SAFETY: the library calls this function once, with the pointer that `retain` got from
    // `Box::into_raw`.
    let owned = unsafe { Box::from_raw(owned.cast::<UserObjectData>()) };
    if owned.given.load(Ordering::Acquire) {
        // SAFETY: the contract of `retain` permits one call of `callback` with `data` on any
        // thread.
        unsafe { (owned.callback)(owned.data) };
    }
}

/// Converts the library's capture status `number` to a [`CaptureStatus`].
fn status(number: c_int, id: u64, graph: usize) -> Result<CaptureStatus> {
    match number {
        0 => Ok(CaptureStatus::None),
        1 => Ok(CaptureStatus::Active(id, RawGraph(graph))),
        2 => Ok(CaptureStatus::Invalidated),
        other => Err(error::driver(
            "cuStreamGetCaptureInfo",
            format!("the driver reports the unknown capture status {other}"),
        )),
    }
}

impl GraphDriver for Cuda {
    /// Begins the capture of a stream.
    ///
    /// Uses relaxed mode for three reasons. Relaxed mode permits all calls that this crate makes
    /// during a capture, including calls on the capturing thread. It permits the connection setup
    /// of libraries that connect in their first operation (NCCL). It lets any thread end the
    /// capture. The stricter modes only protect against calls that depend on the legacy default
    /// stream, and the streams of this crate do not synchronise with that stream.
    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        let library = self.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `stream` is a live handle (documentation of the module `gpu`).
        library.check("cuStreamBeginCapture", unsafe {
            (library.cuStreamBeginCapture_v2)(raw_stream(stream), mode)
        })
    }

    /// Ends a capture and returns its graph.
    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        let library = self.enter()?;
        let mut graph = core::ptr::null_mut();
        // SAFETY: `stream` is a live handle (documentation of the module `gpu`), and `graph` is
        // writable.
        library.check("cuStreamEndCapture", unsafe {
            (library.cuStreamEndCapture)(raw_stream(stream), &raw mut graph)
        })?;
        if graph.is_null() {
            return Err(error::driver(
                "cuStreamEndCapture",
                "the capture became invalid and has no graph",
            ));
        }
        Ok(RawGraph(graph.addr()))
    }

    /// Returns the capture status of a stream.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus> {
        let library = self.enter()?;
        let (mut number, mut id, mut graph): (c_int, u64, sys::CUgraph) =
            (0, 0, core::ptr::null_mut());
        let out = (&raw mut number).cast::<sys::CUstreamCaptureStatus>();
        let stream = raw_stream(stream);
        let none = core::ptr::null_mut();
        let code = if let Some(ask) = library.cuStreamGetCaptureInfo_v3.find() {
            let (nodes, edges, count) = (none, core::ptr::null_mut(), core::ptr::null_mut());
            // SAFETY: `stream` is a live handle. The pointers to the status, the capture number and
            // the graph refer to local variables. The other pointers are optional and null.
            unsafe {
                ask(
                    stream,
                    out,
                    &raw mut id,
                    &raw mut graph,
                    nodes,
                    edges,
                    count,
                )
            }
        } else {
            let ask = library.cuStreamGetCaptureInfo_v2.need()?;
            // SAFETY: `stream` is a live handle. The pointers to the status, the capture number and
            // the graph refer to local variables. The other pointers are optional and null.
            unsafe {
                ask(
                    stream,
                    out,
                    &raw mut id,
                    &raw mut graph,
                    none,
                    core::ptr::null_mut(),
                )
            }
        };
        // Documented for the legacy default stream while a blocking stream is capturing. The query
        // does not invalidate that capture.
        if code == error::CAPTURE_IMPLICIT {
            return Ok(CaptureStatus::Blocked);
        }
        library.check("cuStreamGetCaptureInfo", code)?;
        status(number, id, graph.addr())
    }

    /// Attaches `data` to a graph. The library calls `callback` with `data` after the graph, its
    /// clones and its instances are destroyed.
    ///
    /// # Safety
    /// The preconditions of [`Driver::retain`](crate::gpu::Driver::retain).
    unsafe fn retain(&self, graph: RawGraph, callback: Callback, data: *mut c_void) -> Result<()> {
        let library = self.relaxed()?;
        let owned = Box::into_raw(Box::new(UserObjectData {
            callback,
            data,
            given: AtomicBool::new(true),
        }));
        let mut object = core::ptr::null_mut();
        let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        // SAFETY: `object` is writable. `gone` accepts `owned`, a leaked box, and the library calls
        // `gone` once.
        let code = unsafe {
            (library.cuUserObjectCreate)(
                &raw mut object,
                owned.cast::<c_void>(),
                Some(gone),
                1,
                flags,
            )
        };
        if let Err(error) = library.check("cuUserObjectCreate", code) {
            // SAFETY: the call failed, so the library will not call `gone`, and this function still
            // owns the box.
            drop(unsafe { Box::from_raw(owned) });
            return Err(error);
        }
        let flags = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        // SAFETY: `graph` is a live handle. The flag moves this function's only reference to the
        // user object to the graph.
        let code = unsafe { (library.cuGraphRetainUserObject)(raw(graph), object, 1, flags) };
        library
            .check("cuGraphRetainUserObject", code)
            .inspect_err(|_| {
                // SAFETY: the graph did not take the reference to the user object. This function
                // still holds the reference, so `gone` has not freed the box.
                unsafe { (*owned).given.store(false, Ordering::Release) };
                // SAFETY: this function holds the only reference to the user object and does not
                // use the object afterwards.
                let _ = unsafe { (library.cuUserObjectRelease)(object, 1) };
            })
    }

    /// Returns the number of nodes of a graph.
    fn graph_nodes(&self, graph: RawGraph) -> Result<usize> {
        let library = self.enter()?;
        let mut count = 0;
        // SAFETY: `graph` is a live handle. With a null array the library writes only the number of
        // nodes.
        library.check("cuGraphGetNodes", unsafe {
            (library.cuGraphGetNodes)(raw(graph), core::ptr::null_mut(), &raw mut count)
        })?;
        Ok(count)
    }

    /// Instantiates a graph and uploads it to the device. Without the upload, the first launch of
    /// the graph would allocate device memory.
    fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec> {
        let library = self.relaxed()?;
        let mut exec = core::ptr::null_mut();
        // SAFETY: `exec` is writable, `graph` is a live handle, and 0 is a valid value of the
        // flags.
        library.check("cuGraphInstantiate", unsafe {
            (library.cuGraphInstantiateWithFlags)(&raw mut exec, raw(graph), 0)
        })?;
        let uploaded = self.on_own_stream(&library, |stream| {
            // SAFETY: `exec` was instantiated above. The staging stream lives as long as the driver
            // object.
            library.check("cuGraphUpload", unsafe {
                (library.cuGraphUpload)(exec, stream)
            })
        });
        if let Err(error) = uploaded {
            // SAFETY: `exec` was instantiated above, and no other code has the handle. A second
            // error is ignored, because the first error is returned.
            let _ = unsafe { (library.cuGraphExecDestroy)(exec) };
            return Err(error);
        }
        Ok(RawGraphExec(exec.addr()))
    }

    /// Launches a graph.
    ///
    /// # Safety
    /// The preconditions of [`Driver::launch_graph`](crate::gpu::Driver::launch_graph).
    unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()> {
        let library = self.enter()?;
        // SAFETY: `exec` and `stream` are live handles. The caller guarantees the preconditions of
        // every operation in the graph.
        library.check("cuGraphLaunch", unsafe {
            (library.cuGraphLaunch)(raw_exec(exec), raw_stream(stream))
        })
    }

    /// Destroys a graph.
    ///
    /// # Safety
    /// The preconditions of [`Driver::destroy_graph`](crate::gpu::Driver::destroy_graph).
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        let library = self.relaxed()?;
        // SAFETY: the caller guarantees that the graph came from `end_capture` and is no longer
        // used.
        library.check("cuGraphDestroy", unsafe {
            (library.cuGraphDestroy)(raw(graph))
        })
    }

    /// Destroys an instantiated graph.
    ///
    /// # Safety
    /// The preconditions of [`Driver::destroy_exec`](crate::gpu::Driver::destroy_exec).
    unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()> {
        let library = self.relaxed()?;
        // SAFETY: the caller guarantees that `exec` came from `instantiate` and is no longer used.
        library.check("cuGraphExecDestroy", unsafe {
            (library.cuGraphExecDestroy)(raw_exec(exec))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_its_number() {
        assert_eq!(status(0, 7, 8).ok(), Some(CaptureStatus::None));
        let active = CaptureStatus::Active(7, RawGraph(8));
        assert_eq!(status(1, 7, 8).ok(), Some(active));
        assert_eq!(status(2, 7, 8).ok(), Some(CaptureStatus::Invalidated));
        assert!(status(3, 7, 8).is_err());
    }

    #[test]
    fn what_a_graph_did_not_get_is_not_called() {
        unsafe extern "C" fn count(data: *mut c_void) {
            // SAFETY: the test passes a pointer to a counter.
            unsafe { *data.cast::<u32>() += 1 };
        }
        for (given, calls) in [(true, 1), (false, 0)] {
            let mut counter = 0_u32;
            let owned = Box::into_raw(Box::new(UserObjectData {
                callback: count,
                data: (&raw mut counter).cast::<c_void>(),
                given: AtomicBool::new(given),
            }));
            // SAFETY: `owned` came from `Box::into_raw`, and only this call of `gone` receives it.
            unsafe { gone(owned.cast::<c_void>()) };
            assert_eq!(counter, calls);
        }
    }
}
