//! The session's record in a block's shared memory.
//!
//! In a block of several lanes, the lanes write the context, epochs and constants when a launch
//! enters its communicator, and read them after the barrier that ends the prologue. These do not
//! change during the session. A block of one lane uses only the [`Fault`].

use crate::arch::{MAX_WARPS, RESERVED_BYTES, SHARED_BYTES};
use crate::context::WaitContext;
use crate::layout::{CommConst, FailureKind, SIGNAL_WORDS};

/// Number of ranks whose words of a round are copied to shared memory.
pub(crate) const WORDS_OF: u32 = 16;

/// The first fault of a block: an error of a lane, such as an index out of range, or, on a GPU, a
/// failed wait. The next vote of the block fails on all lanes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Fault {
    /// 0 if there is none. The lane that replaces 0 by 1 writes the other words before the next
    /// barrier of the block; the block's leader reads them after it.
    pub(crate) claim: u64,
    /// A [`crate::layout::FailureKind`]; in the upper half the number of the argument, the author's
    /// code, or the awaited rank.
    pub(crate) kind: u64,
    /// The value that was found.
    pub(crate) observed: u64,
    /// Its bound, or another value.
    pub(crate) expected: u64,
    /// A [`crate::wait::WaitKind`]; in the upper half the rank to blame, if it is known. 0 if the
    /// fault is not of a wait.
    pub(crate) wait: u64,
    /// Duration of the wait, in nanoseconds.
    pub(crate) elapsed: u64,
}

impl Fault {
    /// Makes a fault that is not of a wait. `detail` is the upper half of [`Fault::kind`].
    #[inline(always)]
    pub(crate) const fn new(kind: FailureKind, detail: u32) -> Self {
        Self {
            claim: 1,
            kind: Self::pair(kind as u32, detail),
            observed: 0,
            expected: 0,
            wait: 0,
            elapsed: 0,
        }
    }

    /// Returns a word of two halves.
    #[inline(always)]
    pub(crate) const fn pair(low: u32, high: u32) -> u64 {
        (high as u64) << 32 | low as u64
    }
}

/// Epochs, constants and fault of the session; ends before [`partials`].
#[repr(C)]
pub(crate) struct SharedCache {
    /// The first error of a lane.
    pub(crate) fault: Fault,
    /// 0 where the launch is admitted, otherwise the prologue's `Refusal`.
    pub(crate) refused: u64,
    /// Context of the launch's waits, with the sequence number of the launch. Functions that are
    /// not inlined take its address.
    pub(crate) context: WaitContext,
    /// Signal rounds before the launch.
    pub(crate) rounds: u64,
    /// Packet epoch before the launch.
    pub(crate) packet_epoch: u64,
    /// Address of the block's state.
    pub(crate) state: u64,
    /// Copy of the communicator's constants.
    pub(crate) constants: CommConst,
    /// Words of the round, by rank. Written by the lane that acquires the rank's ready signal, and
    /// read after the barrier that ends `ready`.
    pub(crate) words: [[u64; SIGNAL_WORDS]; WORDS_OF as usize],
}

const CACHE_AT: usize = SHARED_BYTES - RESERVED_BYTES;
/// The memory of [`crate::Block::broadcast`].
pub(crate) const BROADCAST_AT: usize = SHARED_BYTES - 16;
const PARTIALS_AT: usize = BROADCAST_AT - 8 * MAX_WARPS;

const _: () = assert!(CACHE_AT.is_multiple_of(64));
const _: () = assert!(CACHE_AT + size_of::<SharedCache>() <= PARTIALS_AT);

/// Returns the address of the [`SharedCache`] in a block's shared memory.
#[inline(always)]
pub(crate) fn at(shared: *mut u8) -> *mut SharedCache {
    shared.wrapping_add(CACHE_AT).cast()
}

/// Returns the address of [`MAX_WARPS`] words, one for each warp of the block, for its reductions
/// and scans.
#[inline(always)]
pub(crate) fn partials(shared: *mut u8) -> *mut u64 {
    shared.wrapping_add(PARTIALS_AT).cast()
}
