//! What a session keeps near: in shared memory, where a block has several lanes.
//!
//! Written by the block's lanes when a launch enters its communicator, read behind the barrier that ends the entry, and not
//! changed while the session lasts.

use crate::arch::{RESERVED_BYTES, SHARED_BYTES};
use crate::layout::CommConst;

/// The block's own; in front of what [`crate::Block::broadcast`] uses.
#[repr(C)]
pub(crate) struct SharedCache {
    /// 1 where the launch is refused.
    pub(crate) refused: u64,
    /// Sequence number of the launch.
    pub(crate) sequence: u64,
    /// Rounds at its begin.
    pub(crate) rounds: u64,
    /// The packet epoch at its begin.
    pub(crate) packet_epoch: u64,
    /// Address of the block's state.
    pub(crate) state: u64,
    /// A copy.
    pub(crate) constants: CommConst,
}

const CACHE_AT: usize = SHARED_BYTES - RESERVED_BYTES;

const _: () = assert!(CACHE_AT.is_multiple_of(64));
const _: () = assert!(CACHE_AT + size_of::<SharedCache>() + 16 <= SHARED_BYTES);

/// Where it is in a block's shared memory.
#[inline(always)]
pub(crate) fn at(shared: *mut u8) -> *mut SharedCache {
    shared.wrapping_add(CACHE_AT).cast()
}
