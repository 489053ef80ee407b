//! Deliberately broken kernels, for faults that the memory cannot inject. Each omits one step that
//! the protocol between ranks requires.

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::CommConst;
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::session::Session;
use fusewire_device::{Block, Group, Machine};

/// Selects the omitted step. Every kernel sums bytes over the ranks; one lane reads all inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Omits nothing: the correct kernel that the others are derived from, which must pass.
    Correct,
    /// Reads the peers' memory after its done signal.
    ReadsAfterDone,
    /// Neither sends nor awaits done signals.
    NoDone,
    /// Reads the peers' memory without awaiting their ready signals.
    NoReady,
    /// Rank 1 returns without its done signal, so that its peers never stop waiting.
    Leaves,
}

impl Kernel {
    /// Runs the kernel.
    ///
    /// # Safety
    /// `constants` must be those of a live communicator, and every rank must launch the same kernel
    /// with the same `call` and `count`. `source` must have `count` readable bytes at `addr` on
    /// every rank, and `target` `count` writable ones.
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
        // SAFETY: `constants` are those of a live communicator, as this function requires.
        let session = unsafe { Session::begin(block, constants, call, count, timeout_ns) };
        let Some(mut session) = session else {
            return;
        };
        let words = [addr.0, 0, 0, 0, 0, 0, 0];
        if self == Self::NoReady {
            mem::fence(Order::AcqRel, Scope::System);
        } else if !session.ready(|_| words) {
            return;
        }
        if self == Self::ReadsAfterDone && !session.done() {
            return;
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
                    // SAFETY: `i < count`, and `resolve` checked `count` bytes against the window.
                    // The model checker tests whether the read may race.
                    sum = sum.wrapping_add(unsafe { mem::read(from.add(i)) });
                }
                // SAFETY: `i < count`, and `target` has `count` writable bytes.
                unsafe { mem::write(target.add(i), sum) };
            }
        }
        if self == Self::Leaves && session.comm().rank() == 1 {
            session.end();
            return;
        }
        if matches!(self, Self::Correct | Self::NoReady | Self::Leaves) && !session.done() {
            return;
        }
        session.end();
    }
}
