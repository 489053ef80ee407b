//! Deliberately broken kernels, for faults that `memory_image` cannot inject. Each kernel
//! omits or reorders one step that the protocol between ranks requires.

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::CommConst;
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::session::Session;
use fusewire_device::{Block, Group, Machine};

/// Kind of protocol violation. Every kernel sums bytes over the ranks, and one lane reads the
/// inputs of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Follows the protocol. The other kernels are derived from this correct kernel, which must
    /// pass.
    Correct,
    /// Reads the peers' memory after sending done signals, although a peer may then overwrite its
    /// memory.
    ReadsAfterDone,
    /// Neither sends nor awaits done signals.
    NoDone,
    /// Reads the peers' memory without awaiting their ready signals.
    NoReady,
    /// Rank 1 returns without sending done signals, so its peers wait forever.
    Leaves,
}

impl Kernel {
    /// Runs the kernel.
    ///
    /// Callers must ensure that `constants` belongs to a live communicator, and that every rank
    /// launches the same kernel with the same `call` and `count`. `source` must have `count`
    /// readable bytes at `addr` on every rank, and `target` must have `count` writable bytes.
    #[allow(clippy::too_many_arguments)] // the arguments of a kernel
    pub unsafe fn run<M: Machine>(
        self,
        block: Block<M>,
        constants: *const CommConst,
        call: u64,
        count: u64,
        timeout_ns: u64,
        addr: WindowAddr,
        source: *const u8,
        target: *mut u8,
    ) {
        // SAFETY: the caller guarantees that `constants` belongs to a live communicator.
        let session = unsafe { Session::begin(block, constants, call, count, timeout_ns) };
        let Some(mut session) = session else {
            return;
        };
        let words = [addr.0, 0, 0, 0, 0, 0, 0];
        if self == Self::NoReady {
            mem::fence(Order::AcqRel, Scope::System);
        } else if session.ready(|_| words).is_err() {
            return;
        }
        if self == Self::ReadsAfterDone && session.done().is_err() {
            return;
        }
        if cfg!(tsan) && self == Self::NoDone && session.comm().rank() == 1 {
            // Rank 0 overwrites its memory meanwhile. Otherwise, this rank would usually read
            // first, and locks of the host would then order the read before the write.
            std::thread::sleep(core::time::Duration::from_millis(1));
        }
        if block.is_leader() {
            for i in 0..count as usize {
                let mut sum = 0u8;
                for rank in 0..session.comm().size() {
                    let from = if rank == session.comm().rank() {
                        source
                    } else {
                        match session.comm().resolve(addr, rank, count) {
                            Some(at) => at.cast_const(),
                            None => return,
                        }
                    };
                    // SAFETY: `i < count`. The caller guarantees `count` bytes at `source`, and
                    // `resolve` checked `count` bytes of a peer against the window. The model
                    // checker reports writes that race with this read.
                    sum = sum.wrapping_add(unsafe { mem::read(from.add(i)) });
                }
                // SAFETY: `i < count`, and the caller guarantees `count` writable bytes at
                // `target`.
                unsafe { mem::write(target.add(i), sum) };
            }
        }
        if self == Self::Leaves && session.comm().rank() == 1 {
            session.end(Ok(()));
            return;
        }
        if matches!(self, Self::Correct | Self::NoReady | Self::Leaves) && session.done().is_err() {
            return;
        }
        session.end(Ok(()));
    }
}
