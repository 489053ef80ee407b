//! Tests the fake through its C functions. cudarc's bindings open the fake as the driver library.
//!
//! Each test runs in a child process that opens the fake as `libcuda.so`. This isolates sticky
//! errors, crashes and environment variables.

mod captures;
mod devices;
mod grid;
mod memory;
mod modules;
mod multicast;
mod processes;
mod start;
mod streams;
mod support;
