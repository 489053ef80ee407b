//! Executes a kernel on the CPU as a multi-rank grid, which contains the blocks of several ranks.
//! The entry `NAME__grid` of a GPU image does the same on a GPU.

use fusewire_device::group::cpu::{LaneContext, MAX_WARP};
use fusewire_device::multi_rank_grid::{GridParams, run_lane};
use fusewire_device::native::{Isa, KernelInfo};

use super::MAX_THREADS;
use super::launch::{check_float_environment, is_warp, on_threads};
use crate::{Error, Result};

/// Runs the blocks of `ranks` ranks to completion as a multi-rank grid, with every lane on a
/// separate thread. Equivalent to a launch of the entry `NAME__grid` of `kernel` with the arguments
/// `params`, on `ranks * params.blocks_per_rank` blocks of `lanes` lanes.
///
/// # Safety
/// `params.parameters` must point to `ranks` contiguous parameter structs of the kernel. The
/// structs must stay alive and unchanged during the call, and each struct must fulfil the
/// requirements of the kernel.
///
/// # Errors
/// [`Error::InvalidArgument`] if the grid is empty or larger than [`MAX_THREADS`] threads;
/// [`Error::Launch`] if a thread cannot be started or a lane panics. The message contains the
/// number of the block in the whole grid.
pub(crate) unsafe fn run_multi_rank_grid(
    kernel: &KernelInfo,
    isa: Isa,
    params: &GridParams,
    ranks: u32,
    lanes: u32,
) -> Result<()> {
    let blocks = ranks.checked_mul(params.blocks_per_rank).unwrap_or(0);
    let threads = blocks.checked_mul(lanes).unwrap_or(0);
    if threads == 0 || threads > MAX_THREADS || !is_warp(lanes, lanes) {
        return Err(Error::InvalidArgument {
            operation: "run_multi_rank_grid",
            detail: format!(
                "{}: {ranks} ranks of {} blocks of {lanes} lanes; a grid has 1 to {MAX_THREADS} \
                 threads, a block one warp of at most {MAX_WARP} lanes",
                kernel.name, params.blocks_per_rank
            ),
        });
    }
    check_float_environment()?;
    on_threads(kernel.name, blocks, lanes, lanes, &|block, lane, shared| {
        let context = LaneContext {
            block,
            blocks,
            lane,
            lanes,
            shared,
        };
        // SAFETY: `blocks` is `ranks * params.blocks_per_rank`, so `block / blocks_per_rank` is
        // less than `ranks`. The caller guarantees that `params.parameters` points to `ranks`
        // structs. `on_threads` passes the same `shared` to all lanes of a block.
        unsafe { run_lane(kernel, isa, params, &context) }
    })
}
