//! Graphs of a GPU: captured by the driver library, with what this crate must know of them beside.

use core::any::Any;
use core::ffi::c_void;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::device::Gpu;
use super::driver::{RawGraph, RawGraphExec};
use super::in_flight::HostCall;
use crate::cpu::{LaunchInfo, LaunchOwner, Replay, with_replay};
use crate::{Error, Result};

/// What a replay reports of a node.
#[derive(Clone)]
pub(super) enum Logged {
    Launch(Arc<dyn LaunchOwner>, LaunchInfo),
    Host(Arc<HostCall>),
}

type Log = Arc<Mutex<Vec<Logged>>>;

/// The captures that this crate has begun, by the library's number of the capture.
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

/// A capture of this crate's begins.
pub(super) fn begin(gpu: &Arc<Gpu>, capture: u64) {
    captures().insert(key(gpu, capture), Log::default());
}

/// Logs a node of a capture, if this crate has begun it.
pub(super) fn log_node(gpu: &Arc<Gpu>, capture: u64, node: Logged) {
    let log = captures().get(&key(gpu, capture)).map(Arc::clone);
    if let Some(log) = log {
        log.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(node);
    }
}

/// A capture of this crate's has ended.
pub(super) fn end(gpu: &Arc<Gpu>, capture: u64) -> Vec<Logged> {
    let log = captures().remove(&key(gpu, capture));
    log.map(|log| core::mem::take(&mut *log.lock().unwrap_or_else(PoisonError::into_inner)))
        .unwrap_or_default()
}

/// What a graph keeps alive, and where it goes then.
struct Retained {
    gpu: Arc<Gpu>,
    value: Box<dyn Any + Send>,
}

/// Keeps `value` alive as long as a graph, its clones and what was instantiated from them, also where another
/// library captures.
pub(super) fn retain(gpu: &Arc<Gpu>, graph: RawGraph, value: Box<dyn Any + Send>) -> Result<()> {
    unsafe extern "C" fn release(data: *mut c_void) {
        // SAFETY: the pointer of the box below, given once.
        let retained = unsafe { Box::from_raw(data.cast::<Retained>()) };
        let Retained { gpu, value } = *retained;
        // The driver may not be called here, and the value may hold its memory.
        gpu.leave(value);
    }
    let data = Box::into_raw(Box::new(Retained {
        gpu: Arc::clone(gpu),
        value,
    }));
    // SAFETY: `release` takes the box, on any thread.
    let result = unsafe { gpu.driver().retain(graph, release, data.cast()) };
    if result.is_err() {
        // SAFETY: then nobody has taken it.
        drop(unsafe { Box::from_raw(data) });
    }
    result
}

/// A captured graph.
#[derive(Clone)]
pub(crate) struct Graph {
    inner: Arc<Captured>,
}

struct Captured {
    gpu: Arc<Gpu>,
    raw: RawGraph,
    nodes: usize,
    log: Arc<[Logged]>,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph")
            .field("nodes", &self.inner.nodes)
            .finish_non_exhaustive()
    }
}

impl Graph {
    pub(super) fn new(gpu: &Arc<Gpu>, raw: RawGraph, log: Vec<Logged>) -> Result<Self> {
        let nodes = gpu.driver().graph_nodes(raw);
        let inner = Captured {
            gpu: Arc::clone(gpu),
            raw,
            nodes: *nodes.as_ref().unwrap_or(&0),
            log: log.into(),
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
                id: crate::cpu::next_graph(),
                replays: AtomicU64::new(0),
            }),
        })
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: the last handle of a graph that `end_capture` gave.
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
    log: Arc<[Logged]>,
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
}

impl Exec {
    fn replay(&self, number: u64, index: usize) -> Replay {
        Replay {
            graph: self.id,
            replay: number,
            index: index as u64,
        }
    }

    /// Asks every owner of a captured launch whether it may run; fills `words` with what [`Exec::settle`] needs. The number
    /// of the replay.
    pub(super) fn admit(&self, words: &mut Vec<u64>) -> (u64, Result<()>) {
        let number = self.replays.fetch_add(1, Ordering::Relaxed) + 1;
        words.clear();
        for (index, logged) in self.log.iter().enumerate() {
            let Logged::Launch(owner, info) = logged else {
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

    /// Reports the end of a replay, or that it was not launched, to the owners of the launches that
    /// `words` are for.
    pub(super) fn settle(&self, number: u64, words: &[u64], ran: bool) -> Result<()> {
        let mut result = Ok(());
        for (index, (logged, word)) in self.log.iter().zip(words).enumerate() {
            let after = match logged {
                Logged::Launch(owner, info) => {
                    with_replay(self.replay(number, index), || owner.after(*word, info, ran))
                }
                Logged::Host(call) => call.take_error().map_or(Ok(()), Err),
            };
            result = result.and(after);
        }
        result
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // SAFETY: the last handle of a graph that `instantiate` gave; one that runs is not stopped.
        if let Err(error) = unsafe { self.gpu.driver().destroy_exec(self.raw) } {
            tracing::warn!(%error, "an instantiated graph could not be destroyed");
        }
        self.gpu.reap();
    }
}

/// The error for a graph of another device than the stream's.
pub(crate) fn other_device() -> Error {
    Error::launch("the graph was captured on another device than the stream's")
}
