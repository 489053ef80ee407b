//! Calls with wrong arguments, object collectives (serialized Rust values), random cases, long
//! runs, and negative controls of the checkers.

mod arguments;
mod controls;
mod hooks;
mod objects;
mod parity;
mod properties;
mod smoke;
mod stress;
mod tensors;
mod work;
