//! Handles of enqueued operations and of graphs.

use core::ffi::c_int;

use fusewire::{GraphExec, Work};

use crate::comm::FusewireComm;
use crate::error::{Outcome, give, guard};
use crate::handle::{destroy, live};
use crate::types::seconds;

/// An enqueued operation: `fusewire_work`.
#[derive(Debug)]
pub struct FusewireWork(Work);

/// Captured operations that can be replayed: `fusewire_graph`.
#[derive(Debug)]
pub struct FusewireGraph(GraphExec);

/// Writes a handle of `enqueued` to `to`, unless `to` is null.
///
/// # Safety
/// `to` is null or writable.
pub(crate) unsafe fn hand_out(enqueued: Work, to: *mut *mut FusewireWork) {
    if to.is_null() {
        return;
    }
    // SAFETY: `to` is not null, so the caller guarantees that it is writable.
    unsafe { to.write(Box::into_raw(Box::new(FusewireWork(enqueued)))) };
}

/// Waits until the operation is complete, and returns its result.
///
/// # Safety
/// `work` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_work_wait(
    work: *const FusewireWork,
    timeout_seconds: f64,
) -> c_int {
    const NAME: &str = "fusewire_work_wait";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let work = unsafe { live(NAME, "the work is", work)? };
        if timeout_seconds == 0.0 {
            return Ok(work.0.wait_blocking()?);
        }
        Ok(work.0.wait_timeout(seconds(NAME, timeout_seconds)?)?)
    })
}

/// Makes work that is enqueued on the handle's stream after this call wait for the operation.
///
/// # Safety
/// `work` and `comm` are null or live handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_work_join(
    work: *const FusewireWork,
    comm: *const FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_work_join";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let work = unsafe { live(NAME, "the work is", work)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        Ok(work.0.wait(handle.comm.stream())?)
    })
}

/// Destroys a handle. The operation continues.
///
/// # Safety
/// `work` is null or a live handle that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_work_destroy(work: *mut FusewireWork) -> c_int {
    // SAFETY: the caller passes null or a handle that nothing uses any more.
    unsafe { destroy(work) }
}

/// Begins to record the operations of the handle's stream.
///
/// # Safety
/// `comm` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_capture_begin(comm: *const FusewireComm) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of("fusewire_capture_begin", comm)? };
        Ok(handle.comm.stream().begin_capture()?)
    })
}

/// Ends the capture and creates a graph of the recorded operations.
///
/// # Safety
/// `comm` is null or a live handle; `graph` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_capture_end(
    comm: *const FusewireComm,
    graph: *mut *mut FusewireGraph,
) -> c_int {
    const NAME: &str = "fusewire_capture_end";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "graph", graph, core::ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        let captured = handle.comm.stream().end_capture()?.instantiate()?;
        let made = Box::into_raw(Box::new(FusewireGraph(captured)));
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "graph", graph, made) }
    })
}

/// Returns the graph of a handle.
///
/// # Safety
/// `graph` is null or a handle that lives as long as the result is used.
unsafe fn graph_of<'a>(operation: &str, graph: *const FusewireGraph) -> Outcome<&'a GraphExec> {
    // SAFETY: the caller passes null or a live handle.
    Ok(&unsafe { live(operation, "the graph is", graph)? }.0)
}

/// Replays a graph on the handle's stream and waits until the replay is complete.
///
/// # Safety
/// `graph` and `comm` are null or live handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_graph_run(
    graph: *const FusewireGraph,
    comm: *const FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_graph_run";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let graph = unsafe { graph_of(NAME, graph)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        Ok(graph.run(handle.comm.stream())?)
    })
}

/// Enqueues a replay of a graph on the handle's stream.
///
/// # Safety
/// `graph` and `comm` are null or live handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_graph_launch(
    graph: *const FusewireGraph,
    comm: *const FusewireComm,
) -> c_int {
    const NAME: &str = "fusewire_graph_launch";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let graph = unsafe { graph_of(NAME, graph)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        graph.launch(handle.comm.stream())?;
        Ok(())
    })
}

/// Destroys a graph. Replays that were enqueued continue.
///
/// # Safety
/// `graph` is null or a live handle that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_graph_destroy(graph: *mut FusewireGraph) -> c_int {
    // SAFETY: the caller passes null or a handle that nothing uses any more.
    unsafe { destroy(graph) }
}
