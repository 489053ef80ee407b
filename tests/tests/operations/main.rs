//! Operations beyond the conformance list, on the device of the tests, and what is said of calls
//! that differ.

mod abort;
mod batch;
mod determinism;
mod lists;
mod mismatch;
mod norms;
mod one_sided;
mod overlap_gemm;
mod vocab;
mod windows;
