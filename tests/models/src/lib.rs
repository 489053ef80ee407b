//! Runs the protocols between ranks under model checkers. The kernels are compiled from the same
//! source as for GPUs; their shared words are atomics of the checker.
//!
//! | module | subject |
//! |---|---|
//! | `memory_image` | memory of all ranks in one execution; which parts the tool controls |
//! | `step` | one launch of a real kernel on one rank, its input and the check of its output |
//! | `machine` | blocks of one lane with GPU packets; a block barrier as weak as AMD's |
//! | `scenario` | ranks as the tool's threads, launches in sequence |
//! | `broken` | deliberately broken kernels, for negative controls |
//! | `report` | one line per model: executions, complete or bounded, or the failure found |
//!
//! `tests/models/run.sh` runs the models. Without `--cfg loom`, `shuttle` or `tsan` this crate is
//! empty.
#![cfg(any(loom, shuttle, tsan))]

pub mod broken;
#[cfg(any(loom, shuttle))]
pub mod machine;
#[cfg(any(loom, shuttle))]
pub mod memory_image;
#[cfg(any(loom, shuttle))]
pub mod report;
#[cfg(any(loom, shuttle))]
pub mod scenario;
#[cfg(any(loom, shuttle))]
pub mod step;

/// Thread functions of the model checker in use.
#[cfg(any(loom, shuttle))]
pub mod tool {
    #[cfg(loom)]
    pub use loom::thread::yield_now;
    #[cfg(shuttle)]
    pub use shuttle::thread::{spawn, yield_now};

    /// Words of a thread's stack. loom's own threads have 32 KiB, which a failing launch exceeds.
    #[cfg(loom)]
    const STACK_WORDS: usize = 1 << 16;

    /// Spawns a thread of the model.
    #[cfg(loom)]
    pub fn spawn(body: impl FnOnce() + 'static) -> loom::thread::JoinHandle<()> {
        struct OneThread<F>(F);
        // SAFETY: loom's threads are coroutines of the operating system's thread that explores.
        unsafe impl<F> Send for OneThread<F> {}
        impl<F: FnOnce()> OneThread<F> {
            fn call(self) {
                (self.0)();
            }
        }
        let body = OneThread(body);
        loom::thread::Builder::new()
            .stack_size(STACK_WORDS)
            .spawn(move || body.call())
            .expect("loom has room for a thread")
    }
}
