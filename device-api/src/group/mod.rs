//! Groups of threads: who runs a kernel together, and the functions that a group calls together.
//!
//! A [`Machine`] identifies a lane. On a GPU it is a zero-sized value over registers (if all ranks
//! share one grid, for tests, a value that says which blocks are this rank's:
//! [`crate::multi_rank_grid`]); on the CPU it is [`Single`] (a block of one lane, for production)
//! or [`Lanes`] (up to 128 lanes, each a thread, for tests). Kernels are generic over it and never
//! name one.
//!
//! All lanes of a block make the same collective calls of the block, from the same place of the
//! source and with the same arguments; all lanes of a warp make the same calls of the warp.
//! Emulated lanes compare the places at every barrier, and the arguments at barriers of the block.
//! The message of a failed launch names the two places.

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub mod cpu;
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
mod gpu;
mod reduce;

use crate::mem::{self, Order, Scope};

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use self::cpu::{Lanes, Single};
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
pub use self::gpu::{Gpu, PartOfGrid};
pub use self::reduce::LaneValue;

/// One lane's view of the machine that runs it.
///
/// Every method but the identities is collective: all lanes of the block (of the warp where the
/// name says so) must call it together, in convergent code.
pub trait Machine: Copy {
    /// Lanes in a block if that is known at compile time, else 0. It is 1 on a CPU in production,
    /// where loops over elements are written for vectorisation instead of for lanes.
    const LANES: u32;

    /// The CPU instruction set that the code is compiled for: 0 the target's baseline, 2 AVX2, 3
    /// AVX-512. Lets a machine's code call functions that are compiled for the same one.
    const ISA: u32 = 0;

    /// True if a communicator's constants lie in the rank's workspace, so that a launch computes
    /// the addresses of its words from theirs and need not read the constants first. False on AMD,
    /// where a workspace is memory that is not cached, and where blocks of a CPU have one lane,
    /// whose constants lie in memory of the process.
    const CONSTANTS_IN_WORKSPACE: bool;

    /// True if the block's barrier is cumulative: writes before it are covered by any later release
    /// in the block, and acquires before it by any later read. This holds on NVIDIA (PTX's
    /// causality order goes through barriers, and releases are cumulative) and on CPUs. Otherwise
    /// every lane completes its writes before a barrier, and executes a fence after it to acquire
    /// (AMD: a wave's fence does not await the writes of other waves; its write-back covers them
    /// once they are complete).
    const CUMULATIVE: bool;

    /// Index of this lane in its block.
    fn lane(self) -> u32;
    /// Lanes in the block.
    fn lanes(self) -> u32;
    /// Index of this block in the launch.
    fn block(self) -> u32;
    /// Blocks in the launch.
    fn blocks(self) -> u32;
    /// Lanes in a warp (a wave on AMD).
    fn warp_size(self) -> u32;
    /// Barrier over the block. Orders shared memory and this block's own global memory; publishes
    /// nothing to another rank, and need not let a later release cover other lanes' writes: see
    /// [`Group::publish`].
    #[track_caller]
    fn sync(self);
    /// Barrier over the warp.
    #[track_caller]
    fn sync_warp(self);
    /// True in every lane of the block if `value` is true in one.
    #[track_caller]
    fn any(self, value: bool) -> bool;
    /// The warp's votes, bit i for lane i.
    #[track_caller]
    fn ballot(self, value: bool) -> u64;
    /// Returns the lanes of the warp whose lower `bits` bits of `value` equal this lane's, bit i
    /// for lane i. `bits` is 32 or 64. This implementation takes a ballot for each bit.
    #[inline(always)]
    #[track_caller]
    fn match_any(self, value: u64, bits: u32) -> u64 {
        let mut equal = self.ballot(true);
        let mut bit = 0;
        while bit < bits {
            let is_set = value >> bit & 1 != 0;
            let votes = self.ballot(is_set);
            equal &= if is_set { votes } else { !votes };
            bit += 1;
        }
        equal
    }
    /// `value` of lane `from` of the warp.
    #[track_caller]
    fn shuffle(self, value: u32, from: u32) -> u32;
    /// `value` of the lane whose index differs by `mask` (exclusive or) in the warp.
    #[track_caller]
    fn shuffle_xor(self, value: u32, mask: u32) -> u32;
    /// Block-shared scratch memory, [`crate::arch::SHARED_BYTES`] bytes, 128-byte aligned.
    fn shared(self) -> *mut u8;
    /// States that `value` is equal on all lanes of the block. Emulated lanes compare it at their
    /// next barrier.
    #[inline(always)]
    fn uniform(self, value: u64) {
        let _ = value;
    }
}

/// A set of lanes that work together.
///
/// Sealed: unsafe code of windows relies on its implementations.
pub trait Group: Copy + sealed::Sealed {
    /// True for a block.
    const IS_BLOCK: bool = false;

    /// 1 if the group has one lane on a machine whose loops are written for vectorisation, else 0.
    const LANES: u32;

    /// Index of this lane in the group.
    fn rank(self) -> u32;
    /// Lanes in the group.
    fn size(self) -> u32;
    /// Barrier over the group; collective.
    #[track_caller]
    fn sync(self);

    /// True in exactly one lane of the group.
    #[inline(always)]
    fn is_leader(self) -> bool {
        self.rank() == 0
    }

    /// Waits until all lanes of the group have entered. A later release by a lane of the group, by
    /// a store or atomic of any scope, covers what all of them wrote before. Publishes nothing by
    /// itself. Collective over the group.
    #[track_caller]
    fn publish(self);

    /// States that `values` are equal on all lanes of the group. Emulated lanes of a block compare
    /// them at their next barrier.
    #[inline(always)]
    fn uniform<const N: usize>(self, values: [u64; N]) {
        let _ = values;
    }

    /// Returns this lane's share of the elements `0..count`, which the group divides among its
    /// lanes: adjacent elements go to adjacent lanes.
    #[inline(always)]
    fn elements_of_group(self, count: usize) -> Elements {
        if Self::LANES == 1 {
            return Elements {
                next: 0,
                end: count,
                step: 1,
            };
        }
        Elements {
            next: self.rank() as usize,
            end: count,
            step: self.size() as usize,
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Thread {}
    impl<M> Sealed for super::Warp<M> {}
    impl<M> Sealed for super::Block<M> {}
}

/// One lane by itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Thread;

impl Group for Thread {
    const LANES: u32 = if cfg!(any(target_arch = "nvptx64", target_arch = "amdgpu")) {
        0
    } else {
        1
    };

    #[inline(always)]
    fn publish(self) {}
    #[inline(always)]
    fn rank(self) -> u32 {
        0
    }
    #[inline(always)]
    fn size(self) -> u32 {
        1
    }
    #[inline(always)]
    fn sync(self) {}
}

/// Lets a release by another lane, after a barrier that is not cumulative, cover this lane's
/// writes.
#[inline(always)]
fn complete<M: Machine>() {
    if !M::CUMULATIVE {
        mem::complete();
    }
}

/// The lanes that run in lock step.
#[derive(Clone, Copy, Debug)]
pub struct Warp<M>(M);

impl<M: Machine> Group for Warp<M> {
    const LANES: u32 = if M::LANES == 1 { 1 } else { 0 };

    #[inline(always)]
    #[track_caller]
    fn publish(self) {
        complete::<M>();
        self.sync();
    }
    #[inline(always)]
    fn rank(self) -> u32 {
        self.0.lane() % self.0.warp_size()
    }
    #[inline(always)]
    fn size(self) -> u32 {
        self.0.warp_size().min(self.0.lanes())
    }
    #[inline(always)]
    #[track_caller]
    fn sync(self) {
        self.0.sync_warp();
    }
}

impl<M: Machine> Warp<M> {
    /// Returns the warp's votes, bit i for lane i; collective over the warp.
    #[inline(always)]
    #[track_caller]
    pub fn ballot(self, value: bool) -> u64 {
        self.0.ballot(value)
    }

    /// Returns true in all lanes if `value` is true in one; collective over the warp.
    #[inline(always)]
    #[track_caller]
    pub fn any(self, value: bool) -> bool {
        self.ballot(value) != 0
    }

    /// Returns true in all lanes if `value` is true in all; collective over the warp.
    #[inline(always)]
    #[track_caller]
    pub fn all(self, value: bool) -> bool {
        self.ballot(!value) == 0
    }
}

/// All lanes of one block.
#[derive(Clone, Copy, Debug)]
pub struct Block<M>(M);

impl<M: Machine> Group for Block<M> {
    const IS_BLOCK: bool = true;

    #[inline(always)]
    fn uniform<const N: usize>(self, values: [u64; N]) {
        for value in values {
            self.0.uniform(value);
        }
    }
    const LANES: u32 = if M::LANES == 1 { 1 } else { 0 };

    #[inline(always)]
    #[track_caller]
    fn publish(self) {
        complete::<M>();
        self.sync();
    }
    #[inline(always)]
    fn rank(self) -> u32 {
        self.0.lane()
    }
    #[inline(always)]
    fn size(self) -> u32 {
        if M::LANES == 1 { 1 } else { self.0.lanes() }
    }
    #[inline(always)]
    #[track_caller]
    fn sync(self) {
        if M::LANES != 1 {
            self.0.sync();
        }
    }
}

impl<M: Machine> Block<M> {
    /// Wraps the block that `machine` runs.
    #[inline(always)]
    pub fn new(machine: M) -> Self {
        Self(machine)
    }

    /// Returns the machine.
    #[inline(always)]
    pub fn machine(self) -> M {
        self.0
    }

    /// Returns this lane's warp.
    #[inline(always)]
    pub fn warp(self) -> Warp<M> {
        Warp(self.0)
    }

    /// Returns the index of the block in the launch.
    #[inline(always)]
    pub fn index(self) -> u32 {
        self.0.block()
    }

    /// Returns the number of blocks in the launch.
    #[inline(always)]
    pub fn count(self) -> u32 {
        self.0.blocks()
    }

    /// Returns true in every lane if `value` is true in one; collective over the block.
    #[inline(always)]
    #[track_caller]
    pub fn any(self, value: bool) -> bool {
        if M::LANES == 1 {
            value
        } else {
            self.0.any(value)
        }
    }

    /// Makes what one lane has acquired from `scope` readable by every lane. Called after a
    /// barrier, a vote or a broadcast of the block.
    #[inline(always)]
    pub fn acquired(self, scope: Scope) {
        if !M::CUMULATIVE {
            mem::fence(Order::Acquire, scope);
        }
    }

    /// Returns true in every lane if `value` is true in all; collective over the block.
    #[inline(always)]
    #[track_caller]
    pub fn all(self, value: bool) -> bool {
        !self.any(!value)
    }

    /// Returns the block-shared scratch memory: [`crate::arch::SHARED_BYTES`] bytes, 128-byte
    /// aligned, of which the last [`crate::arch::RESERVED_BYTES`] are the library's.
    #[inline(always)]
    pub fn shared(self) -> *mut u8 {
        self.0.shared()
    }

    /// Returns `value` of lane 0 in every lane; collective over the block. Uses the last 16 bytes
    /// of the shared memory.
    #[inline(always)]
    #[track_caller]
    pub fn broadcast(self, value: u64) -> u64 {
        if M::LANES == 1 {
            return value;
        }
        // SAFETY: the last 16 bytes of shared memory are reserved for this function, and the
        // barriers order the lanes' accesses.
        unsafe {
            let cell = self
                .shared()
                .add(crate::shared_cache::BROADCAST_AT)
                .cast::<u64>();
            if self.is_leader() {
                *cell = value;
            }
            self.sync();
            let out = *cell;
            self.sync();
            out
        }
    }

    /// Returns this lane's share of the elements `0..count`, which all blocks of the launch divide:
    /// adjacent elements go to adjacent lanes, or are contiguous if a block has one lane.
    #[inline(always)]
    pub fn elements(self, count: usize) -> Elements {
        if M::LANES == 1 {
            let (start, end) = self.slice(count, 1);
            return Elements {
                next: start,
                end,
                step: 1,
            };
        }
        let lanes = self.size() as usize;
        Elements {
            next: self.index() as usize * lanes + self.rank() as usize,
            end: count,
            step: lanes * self.count() as usize,
        }
    }

    /// Returns this lane's share of the elements `0..count`, which this block divides.
    #[inline(always)]
    pub fn elements_of_block(self, count: usize) -> Elements {
        self.elements_of_group(count)
    }

    /// Returns the number of warps of the block.
    #[inline(always)]
    pub fn warps(self) -> u32 {
        if M::LANES == 1 {
            return 1;
        }
        (self.size() / self.warp().size().max(1)).max(1)
    }

    /// Returns the index of this lane's warp in the block.
    #[inline(always)]
    pub fn warp_index(self) -> u32 {
        if M::LANES == 1 {
            return 0;
        }
        self.rank() / self.warp().size().max(1)
    }

    /// Returns the elements of `0..count` for this lane's warp, which the warps of this block take
    /// in turn.
    #[inline(always)]
    pub fn elements_of_warp(self, count: usize) -> Elements {
        Elements {
            next: self.warp_index() as usize,
            end: count,
            step: self.warps() as usize,
        }
    }

    /// Returns this block's contiguous part `[start, end)` of `count` elements; starts are
    /// multiples of `alignment`.
    #[inline(always)]
    pub fn slice(self, count: usize, alignment: usize) -> (usize, usize) {
        slice(
            count,
            alignment,
            self.index() as usize,
            self.count() as usize,
        )
    }
}

/// Returns part `index` of `parts` of `count` elements: `[start, end)`; starts are multiples of
/// `alignment`.
#[inline(always)]
pub fn slice(count: usize, alignment: usize, index: usize, parts: usize) -> (usize, usize) {
    if parts <= 1 {
        return (0, count);
    }
    let per = shared(count, parts).div_ceil(alignment) * alignment;
    let start = if per * index < count {
        per * index
    } else {
        count
    };
    let end = if start + per < count {
        start + per
    } else {
        count
    };
    (start, end)
}

/// Returns `count / parts`, rounded up. GPUs have no instruction for a division, and most launches
/// have a power of two of blocks.
#[inline(always)]
fn shared(count: usize, parts: usize) -> usize {
    let is_gpu = cfg!(any(target_arch = "nvptx64", target_arch = "amdgpu"));
    let few = parts as u32;
    if is_gpu && few as usize == parts && few.is_power_of_two() {
        let whole = count >> few.trailing_zeros();
        return whole + usize::from(count as u32 & (few - 1) != 0);
    }
    count.div_ceil(parts)
}

/// Iterator over the elements of one lane.
#[derive(Clone, Debug)]
pub struct Elements {
    next: usize,
    end: usize,
    step: usize,
}

impl Iterator for Elements {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        if self.next >= self.end {
            return None;
        }
        let out = self.next;
        self.next += self.step;
        Some(out)
    }
}
