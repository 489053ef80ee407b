//! Graphs of any device.

use super::{Kind, Stream, Ticket, TicketKind, other_device};
use crate::Result;
use crate::gpu::driver::CaptureStatus;
use crate::usage::{InUse, Name, PendingWork, Uses};
use crate::{cpu, gpu};

/// A graph of captured work. [`Graph::instantiate`] creates a [`GraphExec`], which can be replayed.
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

    /// Returns true if nothing was captured. An empty graph can be instantiated and replayed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Creates a runnable graph. The [`GraphExec`] stays valid after this [`Graph`] is dropped.
    ///
    /// # Errors
    /// The error of the GPU driver if the driver cannot instantiate the graph.
    pub fn instantiate(&self) -> Result<GraphExec> {
        Ok(GraphExec(match &self.0 {
            GraphKind::Cpu(graph) => ExecKind::Cpu(graph.instantiate()?),
            GraphKind::Gpu(graph) => ExecKind::Gpu(graph.instantiate()?),
        }))
    }
}

/// A runnable graph. Clones refer to the same graph.
///
/// On the CPU a replay runs the captured operations in order, except that operations with
/// [`crate::ReadyFlags`] run concurrently with the other operations. The replay stops at the first
/// operation that fails and returns the error of that operation. On a GPU a replay runs all
/// captured operations, but kernels of a failed communicator do nothing. Replays of one graph on
/// two streams are ordered only by the tensors that they use.
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
    /// Fails if the stream cannot enqueue the replay. If the replay fails, its error is the result
    /// of the ticket.
    pub fn launch(&self, stream: &Stream) -> Result<Ticket> {
        Ok(Ticket(match (&self.0, &stream.0) {
            (ExecKind::Cpu(graph), Kind::Cpu(stream)) => TicketKind::Cpu(graph.launch(stream)?),
            (ExecKind::Gpu(graph), Kind::Gpu(_)) => {
                return self.enqueue_on_gpu(graph, stream, true);
            }
            _ => return Err(other_device("the graph")),
        }))
    }

    /// Replays the graph and blocks until the replay is complete. On an idle CPU stream the replay
    /// runs on the calling thread, and `run` itself neither allocates nor makes a system call.
    ///
    /// # Errors
    /// The first failure of the captured work.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        match (&self.0, &stream.0) {
            (ExecKind::Cpu(graph), Kind::Cpu(stream)) => graph.run(stream),
            (ExecKind::Gpu(graph), Kind::Gpu(on_gpu)) => {
                on_gpu.refuse_from_own_work()?;
                let ticket = self.enqueue_on_gpu(graph, stream, false)?;
                stream.wait(ticket, None)
            }
            _ => Err(other_device("the graph")),
        }
    }

    /// Enqueues a replay, ordered with other accesses to the tensors of the graph.
    fn enqueue_on_gpu(
        &self,
        graph: &gpu::GraphExec,
        stream: &Stream,
        sticky: bool,
    ) -> Result<Ticket> {
        let Kind::Gpu(on_gpu) = &stream.0 else {
            return Err(other_device("the graph"));
        };
        // One query for the whole replay, because it is a driver call.
        let status = on_gpu.capture_status()?;
        let command = gpu::Command::Graph(graph.clone());
        let number = if status == CaptureStatus::None {
            let accesses = graph.accesses();
            let user = stream.user().as_replay(graph.id());
            let order = |work: &PendingWork| stream.wait_work(work);
            let uses = Uses {
                accesses: &accesses,
                user,
                operation: Name::Text("graph"),
                flagged: None,
            };
            let held = InUse::begin_enqueue(uses, !sticky, order)?;
            let number = on_gpu.enqueue_in(status, command, sticky)?;
            held.enqueued(&on_gpu.work(number));
            number
        } else {
            // The stream refuses the replay. A wait before it would invalidate the capture.
            on_gpu.enqueue_in(status, command, sticky)?
        };
        Ok(Ticket(TicketKind::Gpu(number)))
    }

    /// Returns a number that is unique among the graphs of the process.
    pub fn id(&self) -> u64 {
        match &self.0 {
            ExecKind::Cpu(graph) => graph.id(),
            ExecKind::Gpu(graph) => graph.id(),
        }
    }
}
