//! Many ranks under shuttle.
fn main() {}
