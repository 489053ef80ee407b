//! The fake through its C functions, opened as the driver library by cudarc's bindings.
//!
//! Every test runs in a process of its own, which finds the fake as `libcuda.so`: rules that spoil a context,
//! faults that crash, and what the environment says stay apart.

mod captures;
mod grid;
mod memory;
mod modules;
mod multicast;
mod processes;
mod start;
mod streams;
mod support;
