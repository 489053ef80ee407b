//! Operations that the conformance lists do not cover, on the device of the tests, and errors of
//! different calls.

mod abort;
mod batch;
mod determinism;
mod factor;
mod lists;
mod mismatch;
mod norms;
mod one_sided;
mod overlap_gemm;
mod vocab;
mod windows;
