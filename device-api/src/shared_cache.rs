//! The session's cache in shared memory, used where a block has several lanes.
//!
//! The block's lanes write it when a launch enters its communicator and read it after the barrier
//! that ends the prologue. It does not change while the session lasts.

use crate::arch::{RESERVED_BYTES, SHARED_BYTES};
use crate::layout::CommConst;

/// Epochs and constants of the session; lies in front of the memory of [`crate::Block::broadcast`].
#[repr(C)]
pub(crate) struct SharedCache {
    /// 1 where the launch is refused.
    pub(crate) refused: u64,
    /// Sequence number of the launch.
    pub(crate) sequence: u64,
    /// Signal rounds before the launch.
    pub(crate) rounds: u64,
    /// Packet epoch before the launch.
    pub(crate) packet_epoch: u64,
    /// Address of the block's state.
    pub(crate) state: u64,
    /// Copy of the communicator's constants.
    pub(crate) constants: CommConst,
}

const CACHE_AT: usize = SHARED_BYTES - RESERVED_BYTES;

const _: () = assert!(CACHE_AT.is_multiple_of(64));
const _: () = assert!(CACHE_AT + size_of::<SharedCache>() + 16 <= SHARED_BYTES);

/// Returns its address in a block's shared memory.
#[inline(always)]
pub(crate) fn at(shared: *mut u8) -> *mut SharedCache {
    shared.wrapping_add(CACHE_AT).cast()
}
