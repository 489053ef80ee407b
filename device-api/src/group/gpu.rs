//! The lanes of a GPU.

use super::Machine;

/// The GPU that runs this code.
#[derive(Clone, Copy, Debug)]
pub struct Gpu;

impl Machine for Gpu {
    const LANES: u32 = 0;
    const CONSTANTS_IN_WORKSPACE: bool = cfg!(target_arch = "nvptx64");
    const CUMULATIVE: bool = cfg!(target_arch = "nvptx64");

    #[inline(always)]
    fn lane(self) -> u32 {
        crate::arch::lane()
    }
    #[inline(always)]
    fn lanes(self) -> u32 {
        crate::arch::lanes()
    }
    #[inline(always)]
    fn block(self) -> u32 {
        crate::arch::block()
    }
    #[inline(always)]
    fn blocks(self) -> u32 {
        crate::arch::blocks()
    }
    #[inline(always)]
    fn warp_size(self) -> u32 {
        crate::arch::WARP
    }
    #[inline(always)]
    fn sync(self) {
        crate::arch::sync();
    }
    #[inline(always)]
    fn sync_warp(self) {
        crate::arch::sync_warp();
    }
    #[inline(always)]
    fn any(self, value: bool) -> bool {
        crate::arch::any(value)
    }
    #[inline(always)]
    fn ballot(self, value: bool) -> u64 {
        crate::arch::ballot(value)
    }
    #[cfg(target_arch = "nvptx64")]
    #[inline(always)]
    fn match_any(self, value: u64, bits: u32) -> u64 {
        crate::arch::match_any(value, bits)
    }
    #[inline(always)]
    fn shuffle(self, value: u32, from: u32) -> u32 {
        crate::arch::shuffle(value, from)
    }
    #[inline(always)]
    fn shuffle_xor(self, value: u32, mask: u32) -> u32 {
        crate::arch::shuffle_xor(value, mask)
    }
    #[inline(always)]
    fn shared(self) -> *mut u8 {
        crate::arch::shared()
    }
}

/// A block of the GPU that runs this code, as one of a rank's blocks where all ranks share a grid
/// ([`crate::multi_rank_grid`]).
#[derive(Clone, Copy, Debug)]
pub struct PartOfGrid {
    block: u32,
    blocks: u32,
}

impl PartOfGrid {
    /// Wraps block `block` of the `blocks` of its rank.
    #[inline(always)]
    pub const fn new(block: u32, blocks: u32) -> Self {
        Self { block, blocks }
    }
}

impl Machine for PartOfGrid {
    const LANES: u32 = Gpu::LANES;
    const CONSTANTS_IN_WORKSPACE: bool = Gpu::CONSTANTS_IN_WORKSPACE;
    const CUMULATIVE: bool = Gpu::CUMULATIVE;

    #[inline(always)]
    fn lane(self) -> u32 {
        Gpu.lane()
    }
    #[inline(always)]
    fn lanes(self) -> u32 {
        Gpu.lanes()
    }
    #[inline(always)]
    fn block(self) -> u32 {
        self.block
    }
    #[inline(always)]
    fn blocks(self) -> u32 {
        self.blocks
    }
    #[inline(always)]
    fn warp_size(self) -> u32 {
        Gpu.warp_size()
    }
    #[inline(always)]
    fn sync(self) {
        Gpu.sync();
    }
    #[inline(always)]
    fn sync_warp(self) {
        Gpu.sync_warp();
    }
    #[inline(always)]
    fn any(self, value: bool) -> bool {
        Gpu.any(value)
    }
    #[inline(always)]
    fn ballot(self, value: bool) -> u64 {
        Gpu.ballot(value)
    }
    #[inline(always)]
    fn match_any(self, value: u64, bits: u32) -> u64 {
        Gpu.match_any(value, bits)
    }
    #[inline(always)]
    fn shuffle(self, value: u32, from: u32) -> u32 {
        Gpu.shuffle(value, from)
    }
    #[inline(always)]
    fn shuffle_xor(self, value: u32, mask: u32) -> u32 {
        Gpu.shuffle_xor(value, mask)
    }
    #[inline(always)]
    fn shared(self) -> *mut u8 {
        Gpu.shared()
    }
}
