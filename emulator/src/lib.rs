//! Emulator of PTX.

mod alu;
mod arena;
mod atomic;
mod block;
mod decode;
mod error;
mod float;
mod launch;
mod liveness;
mod machine;
mod memory;
mod module;
mod program;
mod ptx;
mod report;
mod warp;

pub use arena::{Arg, Buffer, Gpus, Kernel};
pub use error::{Error, Fault, FaultKind, Hang, Result, Site};
pub use launch::{Counts, Launch};
pub use machine::{Config, IdleTime, Machine, Scheduler};
pub use memory::{Memory, Range};
pub use module::{Entry, KernelParam, LoadedModule, Module};
