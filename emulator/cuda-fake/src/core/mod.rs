//! Implements the fake without its C interface: devices, memory, streams, captures, graphs, images.

pub(crate) mod backing;
pub(crate) mod capture;
pub(crate) mod constants;
pub(crate) mod context;
pub(crate) mod emulated;
pub(crate) mod graph;
pub(crate) mod grid;
pub(crate) mod handles;
pub(crate) mod handoff;
pub(crate) mod hardware_queue;
pub(crate) mod image;
pub(crate) mod ipc;
pub(crate) mod kernel;
pub(crate) mod memory;
pub(crate) mod multicast;
pub(crate) mod record;
pub(crate) mod settings;
pub(crate) mod shared_object;
pub(crate) mod stream;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. Ignores poisoning, because a driver call that panics returns an error and the
/// process continues.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
