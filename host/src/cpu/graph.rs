//! Graphs of captured work, which can be replayed.

use core::cell::Cell;
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::command::Command;
use super::stream::{CpuStream, CpuTicket};
use crate::usage::{AccessList, SharedAccess, merge};
use crate::{Error, Result};

/// A part of a graph that runs on a separate stream, concurrently with the rest of the graph.
#[derive(Clone, Default)]
pub(crate) struct Branch(CpuStream);

impl Branch {
    /// Enqueues `command` on the stream of the branch. A command that records an event gets its
    /// record number in this call, on the replaying thread. Therefore a later wait on any stream
    /// applies to that record.
    fn enqueue(&self, command: &Command) -> Result<()> {
        let replay = current_replay();
        let queued = match (command, replay) {
            (Command::Record(_) | Command::Wait(_), _) | (_, None) => command.clone(),
            (_, Some(replay)) => {
                let command = command.clone();
                let replay = Replay {
                    is_on_branch: true,
                    ..replay
                };
                Command::host(move || with_replay(replay, || command.execute()))
            }
        };
        self.0.enqueue(queued).map(drop)
    }

    /// Returns a command that enqueues `command` on the stream of the branch.
    pub(super) fn command(self, command: Command) -> Command {
        Command::host(move || self.enqueue(&command))
    }
}

/// A capture in progress. All streams that take part share one [`Capture`]. The nodes are in the
/// order in which they were captured. This order satisfies all dependencies between the streams.
#[derive(Default)]
pub(super) struct Capture {
    /// `None` once the capture has ended.
    nodes: Mutex<Option<Vec<Command>>>,
    /// If there are branches, event records and waits are captured as nodes, because the order of
    /// the nodes does not imply the dependencies between streams.
    branches: Mutex<Vec<Branch>>,
    /// Accesses of the captured operations to tensors.
    accesses: Mutex<Vec<SharedAccess>>,
}

impl fmt::Debug for Capture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Capture")
            .field("active", &self.is_active())
            .finish_non_exhaustive()
    }
}

impl Capture {
    pub(super) fn begin() -> Arc<Self> {
        Arc::new(Self {
            nodes: Mutex::new(Some(Vec::new())),
            ..Self::default()
        })
    }

    fn accesses(&self) -> MutexGuard<'_, Vec<SharedAccess>> {
        self.accesses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn note_accesses(&self, accesses: &AccessList<'_>) {
        accesses.append_to(&mut self.accesses());
    }

    fn nodes(&self) -> MutexGuard<'_, Option<Vec<Command>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_active(&self) -> bool {
        self.nodes().is_some()
    }

    fn branches(&self) -> MutexGuard<'_, Vec<Branch>> {
        self.branches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_branched(&self) -> bool {
        !self.branches().is_empty()
    }

    /// Adds a branch to the capture.
    pub(super) fn add_branch(&self) -> Branch {
        let branch = Branch::default();
        self.branches().push(branch.clone());
        branch
    }

    pub(super) fn push(&self, command: Command) -> Result<()> {
        match &mut *self.nodes() {
            Some(nodes) => {
                nodes.push(command);
                Ok(())
            }
            None => Err(Error::capture("another thread has just ended this capture")),
        }
    }

    pub(super) fn end(&self) -> Option<CpuGraph> {
        let nodes = self.nodes().take()?;
        Some(CpuGraph {
            nodes: nodes.into(),
            accesses: merge(core::mem::take(&mut *self.accesses())),
            branches: core::mem::take(&mut *self.branches()).into(),
        })
    }
}

/// A graph of captured work. [`CpuGraph::instantiate`] creates a [`CpuGraphExec`], which can be
/// replayed.
#[derive(Clone)]
pub struct CpuGraph {
    nodes: Arc<[Command]>,
    accesses: Arc<[SharedAccess]>,
    branches: Arc<[Branch]>,
}

impl fmt::Debug for CpuGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuGraph")
            .field("nodes", &self.nodes.len())
            .finish()
    }
}

impl CpuGraph {
    /// Returns the number of operations in the graph.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Returns true if nothing was captured. An empty graph can be instantiated and replayed.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Creates a runnable graph. The [`CpuGraphExec`] stays valid after this [`CpuGraph`] is
    /// dropped.
    ///
    /// # Errors
    /// Never fails on the CPU. The return type is a `Result` because GPU drivers may fail to
    /// instantiate a graph.
    pub fn instantiate(&self) -> Result<CpuGraphExec> {
        Ok(CpuGraphExec {
            nodes: Arc::clone(&self.nodes),
            accesses: Arc::clone(&self.accesses),
            branches: Arc::clone(&self.branches),
            id: next_graph(),
            replays: Arc::default(),
        })
    }
}

/// A runnable graph. Clones refer to the same graph.
///
/// A replay runs the captured work in order. The replay stops at the first operation that fails and
/// returns the error of that operation. Branches ([`CpuStream::branch`]) run concurrently with the
/// rest of the graph, and a replay is complete only after all branches are complete. Replays of one
/// graph on two streams are ordered only by the tensors that they use.
#[derive(Clone)]
pub struct CpuGraphExec {
    nodes: Arc<[Command]>,
    accesses: Arc<[SharedAccess]>,
    branches: Arc<[Branch]>,
    id: u64,
    replays: Arc<AtomicU64>,
}

/// Identifies a node that a thread is executing, and the replay to which the node belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Replay {
    pub(crate) graph: u64,
    pub(crate) replay: u64,
    pub(crate) index: u64,
    /// The graph whose replay contains this one, or this graph.
    pub(crate) outermost: u64,
    /// True on the thread of a [`Branch`].
    pub(crate) is_on_branch: bool,
}

/// Returns the graph whose replay this thread is executing, not a graph that is part of it, or
/// `graph` if there is none.
pub(crate) fn outermost_graph(graph: u64) -> u64 {
    current_replay().map_or(graph, |replay| replay.outermost)
}

thread_local! {
    static REPLAY: Cell<Option<Replay>> = const { Cell::new(None) };
}

/// Restores the previous [`Replay`] of the thread when dropped, even if a node panics.
struct ReplayGuard(Option<Replay>);

impl Drop for ReplayGuard {
    fn drop(&mut self) {
        REPLAY.set(self.0);
    }
}

/// Returns a new graph number, unique in the process.
pub(crate) fn next_graph() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Runs `body` with `replay` as the current replay of this thread.
pub(crate) fn with_replay<R>(replay: Replay, body: impl FnOnce() -> R) -> R {
    let _outer = ReplayGuard(REPLAY.replace(Some(replay)));
    body()
}

/// Returns the replay whose node this thread is executing, if any.
pub(crate) fn current_replay() -> Option<Replay> {
    REPLAY.get()
}

impl fmt::Debug for CpuGraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuGraphExec")
            .field("nodes", &self.nodes.len())
            .finish()
    }
}

impl CpuGraphExec {
    /// Enqueues a replay.
    ///
    /// # Errors
    /// The errors of [`CpuStream::enqueue`]. If the replay fails, its error is the result of the
    /// ticket.
    pub fn launch(&self, stream: &CpuStream) -> Result<CpuTicket> {
        stream.enqueue(Command::Graph(self.clone()))
    }

    /// Replays the graph and blocks until the replay is complete. On an idle stream the replay runs
    /// on the calling thread, and `run` itself neither allocates nor makes a system call.
    ///
    /// # Errors
    /// The first failure of the captured work.
    pub fn run(&self, stream: &CpuStream) -> Result<()> {
        stream.run_replay(self)
    }

    /// Returns the accesses of the captured operations to tensors.
    pub(super) fn accesses(&self) -> AccessList<'static> {
        AccessList::Shared(Arc::clone(&self.accesses))
    }

    /// Returns a number that is unique among the graphs of the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn execute(&self) -> Result<()> {
        let replay = self.replays.fetch_add(1, Ordering::Relaxed) + 1;
        let outermost = outermost_graph(self.id);
        let is_on_branch = current_replay().is_some_and(|replay| replay.is_on_branch);
        let _outer = ReplayGuard(REPLAY.get());
        let done = (0..).zip(&*self.nodes).try_for_each(|(index, node)| {
            REPLAY.set(Some(Replay {
                graph: self.id,
                replay,
                index,
                outermost,
                is_on_branch,
            }));
            node.execute()
        });
        self.branches
            .iter()
            .fold(done, |done, branch| done.and(branch.0.synchronize()))
    }
}
