//! Work that a communicator enqueues on a stream of any device.

use std::sync::Arc;

use fusewire_device::mem;

use super::other_device;
use crate::Result;
use crate::cpu::{self, HostFn, Node};
use crate::gpu;
use crate::gpu::driver::CaptureStatus;

/// Work that a communicator enqueues on a stream.
#[derive(Clone)]
pub(crate) enum Task {
    /// A launch of a kernel's native entry on the CPU.
    Launch(cpu::Launch),
    /// A launch of a GPU kernel.
    Kernel(gpu::Launch),
    /// A closure that a graph may replay.
    Host(HostFn),
    /// A closure that enqueues work on a GPU stream. It runs on the calling thread, during the call
    /// that enqueues the task.
    Call(HostFn),
    /// Copies within device memory.
    Copies(Arc<[gpu::Copy]>),
}

/// The capture state of a stream. An operation queries the state only once, because the query is a
/// driver call on a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recording(pub(super) RecordingKind);

#[derive(Clone, Copy, Debug)]
pub(super) enum RecordingKind {
    Cpu,
    // No `Cpu(bool)`: the compiler would copy the bytes after the tag by unaligned loads, which
    // wait for the stores before them.
    CpuCapturing,
    Gpu(CaptureStatus),
}

impl Recording {
    /// Returns true if the stream is capturing or its capture is invalid.
    #[inline]
    pub(crate) fn is_some(&self) -> bool {
        match self.0 {
            RecordingKind::Cpu => false,
            RecordingKind::CpuCapturing => true,
            RecordingKind::Gpu(status) => status != CaptureStatus::None,
        }
    }

    /// Returns the capture status that the GPU driver reported.
    pub(super) fn status(self) -> Result<CaptureStatus> {
        match self.0 {
            RecordingKind::Gpu(status) => Ok(status),
            _ => Err(other_device("the capture")),
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
                    // SAFETY: `copy.keep` keeps the source and the target mapped. The two ranges do
                    // not overlap: they belong to different allocations or are disjoint slices of
                    // one allocation. Only ready flags may be accessed by others meanwhile.
                    unsafe {
                        mem::copy_shared(
                            copy.to as *mut u8,
                            copy.from as *const u8,
                            copy.bytes as usize,
                        );
                    }
                }
                Ok(())
            }))),
        }
    }

    /// Runs the work on the calling thread.
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
