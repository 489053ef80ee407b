//! The protocols between ranks under model checkers: the very source that runs on GPUs, on memory whose
//! every word is the tool's.
//!
//! | module | subject |
//! |---|---|
//! | `memory_image` | memory of all ranks of one execution, and what of it is under the tool |
//! | `step` | one launch of a real kernel on one rank, its input and the check of its output |
//! | `machine` | blocks of one lane with the GPU's packets; a block barrier as weak as a GPU's |
//! | `scenario` | ranks as the tool's threads, launches in sequence |
//! | `broken` | deliberately broken kernels, for negative controls |
//! | `report` | one line a model: executions, complete or bounded, or what a control caught |
//!
//! Started by `run.sh` beside this crate; without `--cfg loom`, `shuttle` or `tsan` it is empty.
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

/// Threads of the tool in charge.
#[cfg(any(loom, shuttle))]
pub mod tool {
    #[cfg(loom)]
    pub use loom::thread::{spawn, yield_now};
    #[cfg(shuttle)]
    pub use shuttle::thread::{spawn, yield_now};
}
