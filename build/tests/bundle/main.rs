//! Tests of the bundle's script. Most tests use fake programs that pass, fail, hang or are missing.
//! One test, which only CI runs, uses a bundle with the real programs.

mod fake;
mod real;
mod script;
