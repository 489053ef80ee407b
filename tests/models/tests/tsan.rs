//! Whole kernels under ThreadSanitizer.
fn main() {}
