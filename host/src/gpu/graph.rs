//! GPU graphs. The driver library captures the graphs. A log records the captured launches and host
//! calls, because every replay notifies the owners of the launches and collects the errors of the
//! host calls.

use core::any::Any;
use core::ffi::c_void;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::device::Gpu;
use super::driver::{RawGraph, RawGraphExec};
use super::in_flight::HostCall;
use crate::cpu::{LaunchInfo, LaunchOwner, Replay, outermost_graph, with_replay};
use crate::usage::{AccessList, SharedAccess, merge};
use crate::{Error, Result};

/// An entry of a capture's log: a captured launch or host call.
#[derive(Clone)]
pub(super) enum LoggedNode {
    Launch(Arc<dyn LaunchOwner>, LaunchInfo),
    Host(Arc<HostCall>),
}

/// The log of a capture: its launches and host calls, and their accesses to tensors.
#[derive(Default)]
pub(super) struct CaptureLog {
    nodes: Vec<LoggedNode>,
    accesses: Vec<SharedAccess>,
}

type Log = Arc<Mutex<CaptureLog>>;

/// Returns the logs of the captures that this crate began, keyed by GPU and the driver's capture
/// number.
fn captures() -> MutexGuard<'static, HashMap<(usize, u64), Log>> {
    static CAPTURES: OnceLock<Mutex<HashMap<(usize, u64), Log>>> = OnceLock::new();
    CAPTURES
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

fn key(gpu: &Arc<Gpu>, capture: u64) -> (usize, u64) {
    (Arc::as_ptr(gpu) as usize, capture)
}

/// Starts the log of a capture that this crate begins.
pub(super) fn begin(gpu: &Arc<Gpu>, capture: u64) {
    captures().insert(key(gpu, capture), Log::default());
}

/// Logs a node of a capture. Does nothing if another library began the capture.
pub(super) fn log_node(gpu: &Arc<Gpu>, capture: u64, node: LoggedNode) {
    log(gpu, capture, |log| log.nodes.push(node));
}

/// Logs accesses of a capture. Does nothing if another library began the capture.
pub(super) fn log_accesses(gpu: &Arc<Gpu>, capture: u64, accesses: &AccessList<'_>) {
    log(gpu, capture, |log| accesses.append_to(&mut log.accesses));
}

fn log(gpu: &Arc<Gpu>, capture: u64, add: impl FnOnce(&mut CaptureLog)) {
    let log = captures().get(&key(gpu, capture)).map(Arc::clone);
    if let Some(log) = log {
        add(&mut log.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Removes and returns the log of a capture.
pub(super) fn end(gpu: &Arc<Gpu>, capture: u64) -> CaptureLog {
    let log = captures().remove(&key(gpu, capture));
    log.map(|log| core::mem::take(&mut *log.lock().unwrap_or_else(PoisonError::into_inner)))
        .unwrap_or_default()
}

/// A value that a graph keeps alive. When the graph is destroyed, the value is passed to
/// [`Gpu::leave`].
struct RetainedValue {
    gpu: Arc<Gpu>,
    value: Box<dyn Any + Send>,
}

/// Keeps `value` alive until the graph, its clones and all their instances are destroyed. Also
/// works in a capture that another library began.
pub(super) fn retain(gpu: &Arc<Gpu>, graph: RawGraph, value: Box<dyn Any + Send>) -> Result<()> {
    unsafe extern "C" fn release(data: *mut c_void) {
        // SAFETY: `data` is the pointer from `Box::into_raw` below, and the driver calls this
        // function once.
        let retained = unsafe { Box::from_raw(data.cast::<RetainedValue>()) };
        let RetainedValue { gpu, value } = *retained;
        // A callback must not call the driver, and dropping the value here could free device
        // memory.
        gpu.leave(value);
    }
    let data = Box::into_raw(Box::new(RetainedValue {
        gpu: Arc::clone(gpu),
        value,
    }));
    // SAFETY: `release` may be called with `data` on any thread: `data` is a leaked box of a
    // `RetainedValue`, which is `Send`, and `release` takes ownership of the box.
    let result = unsafe { gpu.driver().retain(graph, release, data.cast()) };
    if result.is_err() {
        // SAFETY: `retain` failed, so the driver never calls `release`, and this function still
        // owns the box.
        drop(unsafe { Box::from_raw(data) });
    }
    Ok(result?)
}

/// A captured graph.
#[derive(Clone)]
pub(crate) struct Graph {
    inner: Arc<CapturedGraph>,
}

struct CapturedGraph {
    gpu: Arc<Gpu>,
    raw: RawGraph,
    nodes: usize,
    log: Arc<[LoggedNode]>,
    accesses: Arc<[SharedAccess]>,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("nodes", &self.inner.nodes)
            .finish_non_exhaustive()
    }
}

impl Graph {
    pub(super) fn new(gpu: &Arc<Gpu>, raw: RawGraph, log: CaptureLog) -> Result<Self> {
        let nodes = gpu.driver().graph_nodes(raw);
        let inner = CapturedGraph {
            gpu: Arc::clone(gpu),
            raw,
            nodes: *nodes.as_ref().unwrap_or(&0),
            log: log.nodes.into(),
            accesses: merge(log.accesses),
        };
        nodes?;
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.inner.nodes
    }

    pub(crate) fn instantiate(&self) -> Result<GraphExec> {
        let gpu = &self.inner.gpu;
        gpu.sweep();
        Ok(GraphExec {
            inner: Arc::new(Exec {
                raw: gpu.driver().instantiate(self.inner.raw)?,
                gpu: Arc::clone(gpu),
                log: Arc::clone(&self.inner.log),
                accesses: Arc::clone(&self.inner.accesses),
                id: crate::cpu::next_graph(),
                replays: AtomicU64::new(0),
            }),
        })
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        // SAFETY: `end_capture` returned the graph, and its last handle is being dropped.
        if let Err(error) = unsafe { self.gpu.driver().destroy_graph(self.raw) } {
            tracing::warn!(%error, "a graph could not be destroyed");
        }
        self.gpu.reap();
    }
}

/// An instantiated graph.
#[derive(Clone)]
pub(crate) struct GraphExec {
    pub(super) inner: Arc<Exec>,
}

pub(super) struct Exec {
    pub(super) gpu: Arc<Gpu>,
    pub(super) raw: RawGraphExec,
    log: Arc<[LoggedNode]>,
    accesses: Arc<[SharedAccess]>,
    id: u64,
    replays: AtomicU64,
}

impl fmt::Debug for GraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphExec")
            .field("id", &self.inner.id)
            .finish_non_exhaustive()
    }
}

impl GraphExec {
    pub(crate) fn id(&self) -> u64 {
        self.inner.id
    }

    /// Returns the accesses of the captured operations to tensors.
    pub(crate) fn accesses(&self) -> AccessList<'static> {
        AccessList::Shared(Arc::clone(&self.inner.accesses))
    }
}

impl Exec {
    fn replay(&self, number: u64, index: usize) -> Replay {
        Replay {
            graph: self.id,
            replay: number,
            index: index as u64,
            outermost: outermost_graph(self.id),
            is_on_branch: false,
        }
    }

    /// Calls [`LaunchOwner::before`] for every captured launch, and stores the results in `words`
    /// for [`Exec::settle`]. Returns the number of the replay. If an owner refuses its launch,
    /// calls [`LaunchOwner::after`] for the earlier launches and returns the owner's error.
    pub(super) fn admit(&self, words: &mut Vec<u64>) -> (u64, Result<()>) {
        let number = self.replays.fetch_add(1, Ordering::Relaxed) + 1;
        words.clear();
        for (index, logged) in self.log.iter().enumerate() {
            let LoggedNode::Launch(owner, info) = logged else {
                words.push(0);
                continue;
            };
            match with_replay(self.replay(number, index), || owner.before(info)) {
                Ok(word) => words.push(word),
                Err(error) => {
                    let _ = self.settle(number, words, false);
                    return (number, Err(error));
                }
            }
        }
        (number, Ok(()))
    }

    /// Calls [`LaunchOwner::after`] for the launches that have an entry in `words`. `ran` is true
    /// if the replay has completed, and false if it was not launched or the device was lost.
    /// Returns the first error of an owner or of a captured host call.
    pub(super) fn settle(&self, number: u64, words: &[u64], ran: bool) -> Result<()> {
        let mut result = Ok(());
        for (index, (logged, word)) in self.log.iter().zip(words).enumerate() {
            let after = match logged {
                LoggedNode::Launch(owner, info) => {
                    with_replay(self.replay(number, index), || owner.after(*word, info, ran))
                }
                LoggedNode::Host(call) => call.take_error().map_or(Ok(()), Err),
            };
            result = result.and(after);
        }
        result
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // SAFETY: `instantiate` returned the instantiated graph, and its last handle is being
        // dropped. A running replay is not affected.
        if let Err(error) = unsafe { self.gpu.driver().destroy_exec(self.raw) } {
            tracing::warn!(%error, "an instantiated graph could not be destroyed");
        }
        self.gpu.reap();
    }
}

/// Returns the error for launching a graph on a stream of another device.
pub(crate) fn other_device() -> Error {
    Error::launch("the graph was captured on another device than the stream's")
}
