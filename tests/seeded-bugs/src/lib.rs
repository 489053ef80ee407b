//! Kernels with an error on purpose, for which a tool that looks for errors must not be blind.
//!
//! Each is right when it is asked to be, and wrong otherwise, so that the tool's silence over the first and its report of the
//! second are about one and the same kernel. `fusewire-build bundle` takes their image along; the tests of `on_device`
//! whose names begin with `seeded_` launch them.
#![no_std]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_gpu_kernel),
    allow(improper_gpu_kernel_arg)
)]

use fusewire_device::{Block, Group, Machine, kernel, mem};

/// The kernels of this crate.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub static KERNELS: &[&[fusewire_device::native::KernelInfo]] =
    &[SEEDED_RACE_INSTANCES, SEEDED_DIVERGENCE_INSTANCES];

/// Every lane writes its number into the block's shared memory and reads what the lane half a block further on has written,
/// into `out`. Unless `ordered` is 0 a barrier stands between; without it the accesses race.
///
/// # Safety
/// `out` writable for as many words as the block has lanes; one block, of at most 64 lanes.
#[kernel]
pub unsafe fn seeded_race(block: Block<impl Machine>, ordered: u32, out: *mut u32) {
    let (rank, size) = (block.rank() as usize, block.size() as usize);
    let cells = block.shared().cast::<u32>();
    let other = (rank + size / 2) % size;
    // SAFETY: a cell for each lane. (Shared memory: what `mem` has is for global memory.)
    unsafe { cells.add(rank).write(rank as u32) };
    if ordered != 0 {
        block.sync();
    }
    // SAFETY: as above; without the barrier the read races, which is the purpose.
    let seen = unsafe { cells.add(other).read() };
    // SAFETY: a word for each lane.
    unsafe { mem::write(out.add(rank), seen) };
}

/// The lanes below `limit` pass a barrier, the others do not; then every lane writes its number
/// into `out`. It is wrong where there are others. (They end, and hardware lets the waiting ones go
/// then, if `limit` is a number of whole warps.)
///
/// # Safety
/// `out` writable for as many words as the block has lanes; one block.
#[kernel]
pub unsafe fn seeded_divergence(block: Block<impl Machine>, limit: u32, out: *mut u32) {
    let rank = block.rank();
    if rank < limit {
        block.sync();
    }
    // SAFETY: a word for each lane.
    unsafe { mem::write(out.add(rank as usize), rank) };
}
