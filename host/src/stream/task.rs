//! Work of the communicator's, for a stream of any device.

use std::sync::Arc;

use super::other_device;
use crate::cpu::{self, HostFn, Node};
use crate::gpu;
use crate::gpu::driver::CaptureStatus;
use crate::{Error, Result};

/// Work of the communicator's, for any stream.
#[derive(Clone)]
pub(crate) enum Task {
    /// A kernel's native entry.
    Launch(cpu::Launch),
    /// A kernel of a GPU.
    Kernel(gpu::Launch),
    /// A closure that a graph may replay.
    Host(HostFn),
    /// A closure that puts work on a GPU's stream itself, called by whoever enqueues it.
    Call(HostFn),
    /// Copies within device memory.
    Copies(Arc<[gpu::Copy]>),
}

/// Whether a stream is captured: asked once for all that a piece of work takes, since on a GPU it is a call of the driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recording(pub(super) RecordingKind);

#[derive(Clone, Copy, Debug)]
pub(super) enum RecordingKind {
    Cpu(bool),
    Gpu(CaptureStatus),
}

impl Recording {
    /// Whether work is recorded instead of run (or, where a capture has become invalid, refused).
    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        match self.0 {
            RecordingKind::Cpu(captured) => captured,
            RecordingKind::Gpu(status) => status != CaptureStatus::None,
        }
    }

    /// What a GPU's driver has said.
    pub(super) fn status(self) -> Result<CaptureStatus> {
        match self.0 {
            RecordingKind::Gpu(status) => Ok(status),
            RecordingKind::Cpu(_) => Err(other_device("the capture")),
        }
    }
}

impl Task {
    pub(super) fn node(self) -> Result<Node> {
        match self {
            Self::Launch(launch) => Ok(Node::Launch(launch)),
            Self::Host(call) | Self::Call(call) => Ok(Node::Host(call)),
            Self::Kernel(_) => Err(other_device("the kernel")),
            Self::Copies(copies) => Ok(Node::Host(Arc::new(move || {
                for copy in &*copies {
                    // SAFETY: `keep` has both ranges mapped; stream order keeps other users away.
                    unsafe {
                        core::ptr::copy_nonoverlapping(
                            copy.from as *const u8,
                            copy.to as *mut u8,
                            copy.bytes as usize,
                        );
                    }
                }
                Ok(())
            }))),
        }
    }

    /// Runs the work on this thread.
    pub(crate) fn execute(&self) -> Result<()> {
        match self {
            Self::Launch(launch) => launch.execute(),
            other => other.clone().node()?.execute(),
        }
    }

    pub(super) fn gpu_task(self) -> Result<gpu::Task> {
        match self {
            Self::Launch(_) => Err(other_device("the kernel")),
            Self::Kernel(launch) => Ok(gpu::Task::Launch(launch)),
            Self::Host(call) => Ok(gpu::Task::Host(call)),
            Self::Call(call) => Ok(gpu::Task::Call(call)),
            Self::Copies(copies) => Ok(gpu::Task::Copies(copies)),
        }
    }
}

pub(super) fn failing(error: Error) -> Node {
    Node::Host(Arc::new(move || Err(error.clone())))
}
