//! Work of a stream of any device.

use std::sync::Arc;

use fusewire_device::mem;

use super::{Kind, Stream, other_device};
use crate::Result;
use crate::cpu::{self, HostFn};
use crate::gpu;

/// Work for a stream of the same kind of device.
#[derive(Clone)]
pub(crate) enum Command {
    Cpu(cpu::Command),
    Gpu(gpu::Command),
}

impl Command {
    /// Executes work of the CPU on the calling thread.
    pub(crate) fn execute(&self) -> Result<()> {
        match self {
            Self::Cpu(command) => command.execute(),
            Self::Gpu(_) => Err(other_device("the work")),
        }
    }
}

impl Stream {
    /// Returns a command that calls a closure, which a graph may replay.
    pub(crate) fn host_command(&self, call: HostFn) -> Command {
        match &self.0 {
            Kind::Cpu(_) => Command::Cpu(cpu::Command::Host(call)),
            Kind::Gpu(_) => Command::Gpu(gpu::Command::Host(call)),
        }
    }

    /// Returns a command for a closure that enqueues work on the driver's stream if this is a GPU
    /// stream. The closure then runs on the calling thread, during the call that enqueues the
    /// command. On the CPU, the closure is the work.
    pub(crate) fn call_command(&self, call: HostFn) -> Command {
        match &self.0 {
            Kind::Cpu(_) => self.host_command(call),
            Kind::Gpu(_) => Command::Gpu(gpu::Command::Call(call)),
        }
    }

    /// Returns a command that makes copies within the memory of the device, in order.
    pub(crate) fn copy_command(&self, copies: Arc<[gpu::Copy]>) -> Command {
        if let Kind::Gpu(_) = &self.0 {
            return Command::Gpu(gpu::Command::Copies(copies));
        }
        self.host_command(Arc::new(move || {
            for copy in &*copies {
                // SAFETY: `copy.keep` keeps the source and the target mapped. The two ranges do not
                // overlap: they belong to different allocations or are disjoint slices of one
                // allocation. Only ready flags may be accessed by others meanwhile.
                unsafe {
                    mem::copy_shared(
                        copy.to as *mut u8,
                        copy.from as *const u8,
                        copy.bytes as usize,
                    );
                }
            }
            Ok(())
        }))
    }
}
