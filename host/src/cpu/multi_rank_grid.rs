//! The grid form of a kernel, on threads: what a GPU does with the entry `NAME__grid`.

use fusewire_device::multi_rank_grid::{GridParams, run_lane};
use fusewire_device::native::{Isa, KernelInfo, LaneContext, MAX_LANES};

use super::MAX_THREADS;
use super::launch::{check_float_environment, on_threads};
use crate::{Error, Result};

/// Runs the blocks of `ranks` ranks as a multi-rank grid, all at once, every lane on a thread of its own, to their end: the native
/// counterpart of the entry `NAME__grid` of `kernel`, launched with `params` as its arguments on
/// `ranks * params.blocks_per_rank` blocks of `lanes` lanes.
///
/// # Safety
/// `params.parameters` points at `ranks` parameter structs of the kernel, one behind the other, alive and unchanged during
/// the call; each fulfils the kernel's requirements.
///
/// # Errors
/// [`Error::InvalidArgument`] when the grid is empty or larger than [`MAX_THREADS`] threads; [`Error::Launch`] when a
/// thread cannot be started, or when a lane panicked (blocks are counted over the whole grid).
pub unsafe fn run_multi_rank_grid(
    kernel: &KernelInfo,
    isa: Isa,
    params: &GridParams,
    ranks: u32,
    lanes: u32,
) -> Result<()> {
    let blocks = ranks.checked_mul(params.blocks_per_rank).unwrap_or(0);
    let threads = blocks.checked_mul(lanes).unwrap_or(0);
    if threads == 0 || threads > MAX_THREADS || lanes as usize > MAX_LANES {
        return Err(Error::InvalidArgument {
            operation: "run_multi_rank_grid",
            detail: format!(
                "{}: {ranks} ranks of {} blocks of {lanes} lanes; a grid has 1 to {MAX_THREADS} \
                 threads, a block at most {MAX_LANES} lanes",
                kernel.name, params.blocks_per_rank
            ),
        });
    }
    check_float_environment()?;
    on_threads(blocks, lanes, &|block, lane, shared| {
        let context = LaneContext {
            block,
            blocks,
            lane,
            lanes,
            shared,
        };
        // SAFETY: the context describes this lane of the whole grid, which has as many blocks as the caller's table has
        // ranks; the table is the caller's promise.
        unsafe { run_lane(kernel, isa, params, &context) }
    })
}
