//! Tests of the bundle's script, with fake programs that pass, fail, hang or are missing, and of a
//! bundle with the real programs, which only CI runs.

mod fake;
mod real;
mod script;
