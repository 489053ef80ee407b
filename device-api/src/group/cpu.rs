//! Blocks of a CPU.
//!
//! In production a block has one lane ([`Single`]). For tests the same body also runs with up to
//! 128 lanes, each a real thread ([`Lanes`]); then [`BlockShared`] is the barrier, the shuffle
//! network and the shared memory of the block.

mod block_shared;

use super::Machine;

pub use self::block_shared::BlockShared;

/// Most lanes that an emulated block can have; few in a loom model, where each costs an atomic.
pub const MAX_LANES: usize = if cfg!(loom) { 2 } else { 128 };

/// Most lanes that an emulated warp can have.
pub const MAX_WARP: usize = 64;

/// Most warps that an emulated block can have.
pub const MAX_WARPS: usize = 8;

/// Identity of one lane, as a native entry receives it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LaneContext {
    /// Index of the block in the launch.
    pub block: u32,
    /// Blocks in the launch.
    pub blocks: u32,
    /// Index of the lane in its block.
    pub lane: u32,
    /// Lanes in the block: 1 in production.
    pub lanes: u32,
    /// State that the lanes of this block share.
    pub shared: *const BlockShared,
}

/// A CPU block of one lane: barriers cost nothing, loops vectorise.
#[derive(Clone, Copy, Debug)]
pub struct Single<const ISA: u32 = 0> {
    block: u32,
    blocks: u32,
    shared: *mut u8,
}

impl<const ISA: u32> Single<ISA> {
    /// Wraps the block that `context` describes.
    ///
    /// # Safety
    /// `context` must be valid, and `context.shared` must be valid during the kernel.
    #[inline(always)]
    pub unsafe fn new(context: *const LaneContext) -> Self {
        // SAFETY: valid by the precondition.
        let context = unsafe { &*context };
        Self {
            block: context.block,
            blocks: context.blocks,
            // SAFETY: valid by the precondition.
            shared: unsafe { (*context.shared).shared() },
        }
    }
}

impl<const ISA: u32> Machine for Single<ISA> {
    const LANES: u32 = 1;
    const CONSTANTS_IN_WORKSPACE: bool = false;
    const ISA: u32 = ISA;
    const CUMULATIVE: bool = true;

    #[inline(always)]
    fn lane(self) -> u32 {
        0
    }
    #[inline(always)]
    fn lanes(self) -> u32 {
        1
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
        1
    }
    #[inline(always)]
    fn sync(self) {}
    #[inline(always)]
    fn sync_warp(self) {}
    #[inline(always)]
    fn any(self, value: bool) -> bool {
        value
    }
    #[inline(always)]
    fn ballot(self, value: bool) -> u64 {
        u64::from(value)
    }
    #[inline(always)]
    fn shuffle(self, value: u32, _from: u32) -> u32 {
        value
    }
    #[inline(always)]
    fn shuffle_xor(self, value: u32, _mask: u32) -> u32 {
        value
    }
    #[inline(always)]
    fn shared(self) -> *mut u8 {
        self.shared
    }
}

/// A lane of an emulated block: each lane is a thread.
#[derive(Clone, Copy, Debug)]
pub struct Lanes {
    context: LaneContext,
}

impl Lanes {
    /// Wraps the lane that `context` describes.
    ///
    /// # Safety
    /// `context` must be valid. `context.shared` must be valid during the kernel and shared by the
    /// block's lanes.
    #[inline(always)]
    pub unsafe fn new(context: *const LaneContext) -> Self {
        // SAFETY: valid by the precondition.
        let context = unsafe { *context };
        Self { context }
    }

    fn block_shared(&self) -> &BlockShared {
        // SAFETY: valid during the kernel by the precondition of `new`.
        unsafe { &*self.context.shared }
    }
}

impl Machine for Lanes {
    const LANES: u32 = 0;
    const CONSTANTS_IN_WORKSPACE: bool = true;
    const CUMULATIVE: bool = true;

    fn lane(self) -> u32 {
        self.context.lane
    }
    fn lanes(self) -> u32 {
        self.context.lanes
    }
    fn block(self) -> u32 {
        self.context.block
    }
    fn blocks(self) -> u32 {
        self.context.blocks
    }
    fn warp_size(self) -> u32 {
        self.block_shared().warp_size()
    }
    #[track_caller]
    fn sync(self) {
        self.block_shared().sync(self.context.lane);
    }
    #[track_caller]
    fn sync_warp(self) {
        self.block_shared().sync_warp(self.context.lane);
    }
    #[track_caller]
    fn any(self, value: bool) -> bool {
        let lanes = self.context.lanes;
        self.block_shared()
            .exchange(self.context.lane, u64::from(value), |of| {
                (0..lanes).any(|lane| of(lane) != 0)
            })
    }
    #[track_caller]
    fn ballot(self, value: bool) -> u64 {
        let warp = self.warp_size();
        self.block_shared()
            .exchange_warp(self.context.lane, u64::from(value), |of| {
                (0..warp).fold(0, |votes, lane| votes | of(lane) << lane)
            })
    }
    #[track_caller]
    fn shuffle(self, value: u32, from: u32) -> u32 {
        self.block_shared()
            .exchange_warp(self.context.lane, u64::from(value), |of| of(from) as u32)
    }
    #[track_caller]
    fn shuffle_xor(self, value: u32, mask: u32) -> u32 {
        let lane = self.context.lane % self.warp_size();
        self.block_shared()
            .exchange_warp(self.context.lane, u64::from(value), |of| {
                of(lane ^ mask) as u32
            })
    }
    fn shared(self) -> *mut u8 {
        self.block_shared().shared()
    }
    fn uniform(self, value: u64) {
        self.block_shared().uniform(self.context.lane, value);
    }
}
