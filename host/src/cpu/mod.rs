//! The CPU device: shared memory, streams, events and graphs, with the semantics of their CUDA
//! counterparts.

mod cache;
mod command;
mod event;
mod graph;
mod launch;
#[cfg(test)]
mod multi_rank_grid;
mod queue;
mod running;
mod stream;

#[cfg(test)]
mod tests;

pub use fusewire_driver::{Segment, SegmentDescriptor};

pub use command::{Command, HostFn};
pub use event::CpuEvent;
pub use graph::{CpuGraph, CpuGraphExec};
pub use launch::{BlockOrder, Grid, KeepAlive, Launch, LaunchInfo, LaunchOwner, MAX_PARAM_BYTES};
#[cfg(test)]
pub(crate) use multi_rank_grid::run_multi_rank_grid;
pub use stream::{CpuStream, CpuTicket};

pub(crate) use cache::last_level_bytes;
pub(crate) use graph::{Replay, current_replay, next_graph, outermost_graph, with_replay};
pub(crate) use launch::{MAX_THREADS, check_float_environment, is_warp, message, run_single};
pub(crate) use running::{RunningKernel, report_faults};
pub(crate) use stream::{AfterWork, call_after_work, executing, replaying};
