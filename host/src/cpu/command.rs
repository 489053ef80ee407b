//! Work of a stream.

use core::fmt;
use std::sync::Arc;

use super::event::CpuEvent;
use super::graph::CpuGraphExec;
use super::launch::Launch;
use crate::Result;

/// A closure that a graph can replay.
pub type HostFn = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// Work for a stream. A graph contains the same commands, and executes them at each replay.
#[derive(Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "a boxed launch would allocate at each call"
)]
pub enum Command {
    /// Runs a kernel.
    Launch(Launch),
    /// Calls a closure.
    Host(HostFn),
    /// Records an event.
    Record(CpuEvent),
    /// Waits for the latest record of an event that was enqueued before this command.
    Wait(CpuEvent),
    /// Replays a graph.
    Graph(CpuGraphExec),
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Launch(launch) => f.debug_tuple("Launch").field(launch).finish(),
            Self::Host(_) => f.write_str("Host"),
            Self::Record(event) => f.debug_tuple("Record").field(event).finish(),
            Self::Wait(event) => f.debug_tuple("Wait").field(event).finish(),
            Self::Graph(graph) => f.debug_tuple("Graph").field(graph).finish(),
        }
    }
}

impl Command {
    /// Returns a command that calls `call`.
    pub fn host(call: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        Self::Host(Arc::new(call))
    }

    /// Counts the record of a [`Command::Record`] that is about to be enqueued, and returns its
    /// number. For a [`Command::Wait`], returns the number of the record to wait for.
    pub(super) fn issue(&self) -> u64 {
        match self {
            Self::Record(event) => event.issue(),
            Self::Wait(event) => event.issued(),
            _ => 0,
        }
    }

    /// Executes the command. `record` is the result of [`Command::issue`].
    pub(super) fn execute_issued(&self, record: u64) -> Result<()> {
        match self {
            Self::Launch(launch) => return launch.execute(),
            Self::Host(call) => return call(),
            Self::Graph(graph) => return graph.execute(),
            Self::Record(event) => event.complete(record),
            Self::Wait(event) => event.wait_for(record),
        }
        Ok(())
    }

    /// Executes the command on the calling thread.
    pub(crate) fn execute(&self) -> Result<()> {
        self.execute_issued(self.issue())
    }
}
