//! Captures and graphs.

use core::ffi::c_void;

use super::{Callback, RawGraph, RawGraphExec, RawStream};
use crate::Result;

/// The capture state of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Not capturing.
    None,
    /// Capturing: the driver's number of the capture, and the graph under construction.
    Active(u64, RawGraph),
    /// Capturing, but an earlier call invalidated the capture. The only permitted operation is to
    /// end the capture.
    Invalidated,
    /// Only for the legacy default stream: a blocking stream of the context is capturing. Work on
    /// the legacy default stream would invalidate that capture and fail.
    Blocked,
}

/// Captures and graphs.
pub trait GraphDriver {
    /// Begins a capture of a stream. CUDA captures in relaxed mode. HIP captures in thread-local
    /// mode, so the thread that begins the capture must also end it.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn begin_capture(&self, stream: RawStream) -> Result<()>;

    /// Ends the capture of a stream and returns the captured graph.
    ///
    /// # Errors
    /// `Error::Driver` if the capture is invalid.
    fn end_capture(&self, stream: RawStream) -> Result<RawGraph>;

    /// Returns the capture state of a stream. The query never invalidates a capture.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn capture_status(&self, stream: RawStream) -> Result<CaptureStatus>;

    /// Attaches `data` to a graph. After the graph, all its clones and all their instances have
    /// been destroyed, the driver calls `callback` once with `data`. The callback must not call the
    /// driver.
    ///
    /// # Safety
    /// `callback` must be callable with `data` on any thread.
    ///
    /// # Errors
    /// `Error::Driver`. If the call fails, `callback` is never called.
    unsafe fn retain(&self, graph: RawGraph, callback: Callback, data: *mut c_void) -> Result<()>;

    /// Returns the number of nodes of a graph.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn graph_nodes(&self, graph: RawGraph) -> Result<usize>;

    /// Instantiates a graph for launches. May allocate device memory.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn instantiate(&self, graph: RawGraph) -> Result<RawGraphExec>;

    /// Launches a graph on a stream.
    ///
    /// # Safety
    /// The safety requirements of every kernel and copy in the graph must hold until the replay has
    /// finished.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn launch_graph(&self, exec: RawGraphExec, stream: RawStream) -> Result<()>;

    /// Destroys a graph.
    ///
    /// # Safety
    /// `graph` must come from `end_capture` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<()>;

    /// Destroys an instantiated graph. A running replay is not affected.
    ///
    /// # Safety
    /// `exec` must come from `instantiate` and must not be used any more.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn destroy_exec(&self, exec: RawGraphExec) -> Result<()>;
}
