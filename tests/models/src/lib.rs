//! Runs the protocols between ranks under model checkers. The kernels are compiled from the same
//! source as for GPUs, but their shared words are atomics of the model checker.
//!
//! | module | subject |
//! |---|---|
//! | `memory_image` | memory of all ranks in one execution, and the parts that the checker controls |
//! | `input` | numbers of which the inputs of launches consist |
//! | `step` | one launch of a real kernel on one rank, the kernel's input, and the check of its output |
//! | `machine` | GPU-like blocks of one lane, and blocks whose barrier is as weak as AMD's |
//! | `scenario` | ranks as the checker's threads, each with a sequence of launches |
//! | `windows` | kernels with windows, queues and the barrier of all blocks, and the agent of a network |
//! | `mixture` | memory of a mixture of experts, and the inputs of its launches |
//! | `moe` | launches of dispatch and combine, and the check of their results |
//! | `broken` | deliberately broken kernels, for negative controls |
//! | `mutants` | weakens each memory operation of the device API once, and names those that no model misses |
//! | `report` | one line per model: executions, complete or bounded, or the failure found |
//!
//! `tests/models/run.sh` runs the models. Without `--cfg loom`, `shuttle` or `tsan` this crate is
//! empty.
#![cfg(any(loom, shuttle, tsan))]

pub mod broken;
#[cfg(any(loom, shuttle))]
pub mod input;
#[cfg(any(loom, shuttle))]
pub mod machine;
#[cfg(any(loom, shuttle))]
pub mod memory_image;
#[cfg(any(loom, shuttle))]
pub mod mixture;
#[cfg(any(loom, shuttle))]
pub mod moe;
#[cfg(loom)]
pub mod mutants;
#[cfg(any(loom, shuttle))]
pub mod report;
#[cfg(any(loom, shuttle))]
pub mod scenario;
#[cfg(any(loom, shuttle))]
pub mod step;
#[cfg(any(loom, shuttle))]
pub mod windows;

/// Thread functions and locks of the model checker in use.
#[cfg(any(loom, shuttle))]
pub mod tool {
    #[cfg(loom)]
    pub use loom::sync::{Condvar, Mutex};
    #[cfg(loom)]
    pub use loom::thread::{spawn, yield_now};
    #[cfg(shuttle)]
    pub use shuttle::sync::{Condvar, Mutex};
    #[cfg(shuttle)]
    pub use shuttle::thread::{spawn, yield_now};
}
