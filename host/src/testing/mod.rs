//! Options and references for tests of the library and of kernels. Not a stable interface.

pub mod reference;

pub use crate::comm::bench_rendezvous;
pub use crate::gpu::images::MANIFEST as IMAGES_MANIFEST;
pub use crate::options::testing::{GridMode, TestNetwork, TestOptions};
