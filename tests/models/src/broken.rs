//! Deliberately broken kernels, for faults that the memory cannot inject: each leaves out one thing that the
//! rules between ranks demand.

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::CommConst;
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::session::Session;
use fusewire_device::{Block, Group, Machine};

/// What is broken. All of them sum bytes over the ranks, one lane reads everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Nothing: the pattern that the others break must pass.
    Whole,
    /// Reads the peers' memory after its done signal.
    ReadsAfterDone,
    /// Gives no done signal and awaits none.
    NoDone,
    /// Reads the peers' memory without having awaited their ready signals.
    NoReady,
    /// Returns without its done signal: peers wait for ever.
    Leaves,
}

impl Kernel {
    /// Runs the kernel.
    ///
    /// # Safety
    /// As a one-shot all_reduce over registered memory, which lies at `addr` on every rank.
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
        // SAFETY: the caller's promise.
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
                    // SAFETY: within the rank's window; whether it may be read now is what the model asks.
                    sum = sum.wrapping_add(unsafe { mem::read(from.add(i)) });
                }
                // SAFETY: this rank's own output.
                unsafe { mem::write(target.add(i), sum) };
            }
        }
        if self == Self::Leaves && session.comm().rank() == 1 {
            session.end();
            return;
        }
        if matches!(self, Self::Whole | Self::NoReady | Self::Leaves) && !session.done() {
            return;
        }
        session.end();
    }
}
