//! Graphs of any device.

use super::{Kind, Stream, Ticket, TicketKind, other_device};
use crate::Result;
use crate::{cpu, gpu};

/// Captured work; [`Graph::instantiate`] makes it runnable.
#[derive(Clone, Debug)]
pub struct Graph(pub(super) GraphKind);

#[derive(Clone, Debug)]
pub(super) enum GraphKind {
    Cpu(cpu::CpuGraph),
    Gpu(gpu::Graph),
}

impl Graph {
    /// Returns the number of operations in the graph.
    pub fn len(&self) -> usize {
        match &self.0 {
            GraphKind::Cpu(graph) => graph.len(),
            GraphKind::Gpu(graph) => graph.len(),
        }
    }

    /// Returns whether nothing was captured. An empty graph can be instantiated and replayed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Creates a runnable graph, which does not depend on the lifetime of this one.
    ///
    /// # Errors
    /// The GPU driver's error for a graph that it cannot run.
    pub fn instantiate(&self) -> Result<GraphExec> {
        Ok(GraphExec(match &self.0 {
            GraphKind::Cpu(graph) => ExecKind::Cpu(graph.instantiate()?),
            GraphKind::Gpu(graph) => ExecKind::Gpu(graph.instantiate()?),
        }))
    }
}

/// A runnable graph. Clones refer to the same graph.
///
/// On the CPU a replay runs the captured work in order and stops at the first failure, which is its
/// result; operations with [`crate::ReadyFlags`] run concurrently with the rest. On a GPU all of it
/// runs, and kernels of a communicator that has failed do nothing. Two replays of one graph on two
/// streams are not ordered with each other.
#[derive(Clone, Debug)]
pub struct GraphExec(ExecKind);

#[derive(Clone, Debug)]
enum ExecKind {
    Cpu(cpu::CpuGraphExec),
    Gpu(gpu::GraphExec),
}

impl GraphExec {
    /// Enqueues a replay.
    ///
    /// # Errors
    /// Fails if the stream refuses it. A failure of the replay itself is the ticket's result.
    pub fn launch(&self, stream: &Stream) -> Result<Ticket> {
        Ok(Ticket(match (&self.0, &stream.0) {
            (ExecKind::Cpu(graph), Kind::Cpu(stream)) => TicketKind::Cpu(graph.launch(stream)?),
            (ExecKind::Gpu(graph), Kind::Gpu(stream)) => {
                TicketKind::Gpu(stream.enqueue(gpu::Task::Graph(graph.clone()), true)?)
            }
            _ => return Err(other_device("the graph")),
        }))
    }

    /// Replays the graph and blocks until the replay is complete. On an idle CPU stream the replay
    /// runs on this thread, and `run` itself neither allocates nor makes a system call.
    ///
    /// # Errors
    /// The first failure of the captured work.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        match (&self.0, &stream.0) {
            (ExecKind::Cpu(graph), Kind::Cpu(stream)) => graph.run(stream),
            (ExecKind::Gpu(graph), Kind::Gpu(stream)) => {
                let number = stream.enqueue(gpu::Task::Graph(graph.clone()), false)?;
                stream.wait(number, None)
            }
            _ => Err(other_device("the graph")),
        }
    }

    /// Returns a number that is unique among the graphs of the process.
    pub fn id(&self) -> u64 {
        match &self.0 {
            ExecKind::Cpu(graph) => graph.id(),
            ExecKind::Gpu(graph) => graph.id(),
        }
    }
}
