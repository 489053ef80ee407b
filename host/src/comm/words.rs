//! Words of a workspace by which the host stops kernels and learns of their failures.

use core::mem::offset_of;

use fusewire_device::layout::{ABORT, CommState};

/// Offset of the abort word in a workspace.
pub(super) const ABORT_AT: u64 = offset_of!(CommState, abort) as u64;

/// Offset of the failure record in a workspace. The record starts with its state word.
pub(super) const FAILURE_AT: u64 = offset_of!(CommState, failure) as u64;

/// Bit in this rank's abort word, next to [`ABORT`]: the host has stopped the communicator and
/// holds the reason.
pub(super) const BY_HOST: u64 = 1 << 62;

const _: () = assert!(BY_HOST & ABORT == 0);
