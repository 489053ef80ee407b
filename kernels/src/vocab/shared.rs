//! Layout of a block's shared memory.

use fusewire_device::arch::{self, MAX_LANES, MAX_WARPS};
use fusewire_device::{Block, Machine};

use super::MAX_K;
use crate::fused::stripe::PARTIALS;

/// Keys that are sorted at once.
pub(super) const BUFFER: usize = 1024;
/// Partial sums of a row.
pub(super) const SUMS: usize = 2048;

const MAXIMA_AT: usize = 0;
const WARPS_AT: usize = MAXIMA_AT + 8 * MAX_LANES;
const LIST_AT: usize = WARPS_AT + 2 * 8 * MAX_WARPS;
const BUFFER_AT: usize = LIST_AT + 8 * MAX_K;
const SUMS_AT: usize = BUFFER_AT + 8 * BUFFER;
const FOLDED_AT: usize = SUMS_AT + 4 * SUMS;
const THRESHOLD_AT: usize = FOLDED_AT + 4 * PARTIALS;

const _: () = assert!(THRESHOLD_AT + 8 + arch::RESERVED_BYTES <= arch::SHARED_BYTES);

macro_rules! addresses {
    ($($(#[$doc:meta])* $name:ident: $t:ty = $at:expr;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name<M: Machine>(block: Block<M>) -> *mut $t {
            block.shared().wrapping_add($at).cast()
        }
    )*};
}

addresses! {
    /// The greatest key of each lane.
    maxima: u64 = MAXIMA_AT;
    /// The `k` greatest keys, in order.
    list: u64 = LIST_AT;
    /// [`BUFFER`] keys.
    buffer: u64 = BUFFER_AT;
    /// [`SUMS`] partial sums of a row.
    sums: f32 = SUMS_AT;
    /// [`PARTIALS`] sums, of the partial sums whose indices are equal modulo [`PARTIALS`].
    folded: f32 = FOLDED_AT;
    /// Lower bound of the `k` greatest keys.
    threshold: u64 = THRESHOLD_AT;
}

/// Returns the table of the greatest key of each warp. `turn` selects one of two tables, because
/// slow lanes may still read the previous one.
#[inline(always)]
pub(super) fn warps<M: Machine>(block: Block<M>, turn: usize) -> *mut u64 {
    let table = turn % 2 * MAX_WARPS;
    block.shared().wrapping_add(WARPS_AT + 8 * table).cast()
}
