//! Kernels with deliberate errors that sanitizers must find.
//!
//! An argument of each kernel enables or disables its error, so the correct and the wrong run
//! execute the same machine code. `fusewire-build bundle` includes the image of these kernels. The
//! tests of `on_device` whose names start with `seeded_` launch the kernels.
#![no_std]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_gpu_kernel),
    allow(improper_gpu_kernel_arg)
)]

use fusewire_device::{Block, Group, Machine, kernel, mem};

/// Exchanges lane numbers through the block's shared memory. Each lane writes its own number, reads
/// the number of the lane half a block ahead, and writes that number to `out`.
///
/// If `ordered` is nonzero, a barrier separates the writes from the reads. If `ordered` is 0, the
/// reads race with the writes.
///
/// # Safety
/// `out` must have a writable word for each lane. The grid must be one block of at most 64 lanes.
#[kernel]
pub unsafe fn seeded_race(block: Block<impl Machine>, ordered: u32, out: *mut u32) {
    let (rank, size) = (block.rank() as usize, block.size() as usize);
    let cells = block.shared().cast::<u32>();
    let other = (rank + size / 2) % size;
    // Accesses `cells` through plain pointers, because it is in shared memory and the functions of
    // `mem` access only global memory.
    // SAFETY: `rank` is below the number of lanes, and shared memory has one word per lane (at most
    // 64).
    unsafe { cells.add(rank).write(rank as u32) };
    if ordered != 0 {
        block.sync();
    }
    // SAFETY: `other < size`, and shared memory has `size` words. Without the barrier, the read
    // races with the write of lane `other`, which is the deliberate error.
    let seen = unsafe { cells.add(other).read() };
    // SAFETY: `rank` is below the number of lanes, and the caller guarantees one writable word in
    // `out` per lane.
    unsafe { mem::write(out.add(rank), seen) };
}

/// Executes a block barrier only in lanes below `limit`. Every lane then writes its number to
/// `out`.
///
/// The kernel is wrong if `limit` is below the number of lanes. If `limit` is a multiple of the
/// warp size, the hardware releases the waiting warps when the other warps exit.
///
/// # Safety
/// `out` must have a writable word for each lane. The grid must be one block.
#[kernel]
pub unsafe fn seeded_divergence(block: Block<impl Machine>, limit: u32, out: *mut u32) {
    let rank = block.rank();
    if rank < limit {
        block.sync();
    }
    // SAFETY: `rank` is below the number of lanes, and the caller guarantees one writable word in
    // `out` per lane.
    unsafe { mem::write(out.add(rank as usize), rank) };
}
