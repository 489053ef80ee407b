//! Kernels with deliberate errors that sanitizers must find.
//!
//! An argument of each kernel enables or disables its error, so that a sanitizer's report and the
//! absence of one are about the same machine code. `fusewire-build bundle` includes their image;
//! the tests of `on_device` whose names start with `seeded_` launch them.
#![no_std]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_gpu_kernel),
    allow(improper_gpu_kernel_arg)
)]

use fusewire_device::{Block, Group, Machine, kernel, mem};

/// Kernels of this crate.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub static KERNELS: &[&[fusewire_device::native::KernelInfo]] =
    &[SEEDED_RACE_INSTANCES, SEEDED_DIVERGENCE_INSTANCES];

/// Exchanges lane numbers through the block's shared memory: each lane writes its own, reads that
/// of the lane half a block ahead, and writes it to `out`.
///
/// A barrier separates writes and reads, unless `ordered` is 0; without it they race.
///
/// # Safety
/// `out` must have a writable word for each lane. The grid must be one block of at most 64 lanes.
#[kernel]
pub unsafe fn seeded_race(block: Block<impl Machine>, ordered: u32, out: *mut u32) {
    let (rank, size) = (block.rank() as usize, block.size() as usize);
    let cells = block.shared().cast::<u32>();
    let other = (rank + size / 2) % size;
    // `mem` has accesses to global memory only; this is shared memory.
    // SAFETY: shared memory has a word for each of the block's at most 64 lanes.
    unsafe { cells.add(rank).write(rank as u32) };
    if ordered != 0 {
        block.sync();
    }
    // SAFETY: `other < size`, for which shared memory has words. Without the barrier the read
    // races, which is the deliberate error.
    let seen = unsafe { cells.add(other).read() };
    // SAFETY: `rank` is below the number of lanes, and `out` has a word for each.
    unsafe { mem::write(out.add(rank), seen) };
}

/// Executes a block barrier only in lanes below `limit`; then every lane writes its number to
/// `out`.
///
/// This is an error if `limit` is below the number of lanes. If `limit` is a multiple of the warp
/// size, hardware releases the waiting warps when the others exit.
///
/// # Safety
/// `out` must have a writable word for each lane. The grid must be one block.
#[kernel]
pub unsafe fn seeded_divergence(block: Block<impl Machine>, limit: u32, out: *mut u32) {
    let rank = block.rank();
    if rank < limit {
        block.sync();
    }
    // SAFETY: `rank` is below the number of lanes, and `out` has a word for each.
    unsafe { mem::write(out.add(rank as usize), rank) };
}
