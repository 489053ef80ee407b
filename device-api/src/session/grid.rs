//! The barrier of all blocks of a launch on one rank.
//!
//! Block 0 takes part in every launch, so it collects the others. Each other block has two words in
//! its [`BlockState`]: how often it has *entered* a barrier, and how often block 0 has *released*
//! it. The words are equal between launches, whatever the numbers of blocks of the launches were,
//! unless the communicator has failed.
//!
//! - **Who may overwrite what:** block b overwrites its word `entered`; block 0 overwrites the word
//!   `released` of block b.
//! - **After having acquired:** block b has acquired `released == entered` in its previous barrier
//!   of the launch, if any; block 0 has acquired `entered == released + 1` from every other block
//!   of the launch.
//! - **Released by:** block 0 stores `released`, and block b stores `entered`, each after its own
//!   writes before the barrier. The store of block 0 also covers the writes that it has acquired
//!   from the other blocks.

use super::{Aborted, Session, Unvoted};
use crate::group::{Group, Machine};
use crate::layout::{BlockState, FailureKind};
use crate::mem::{self, Order, Scope};
use crate::wait::{WaitContext, WaitKind};

impl<M: Machine> Session<M> {
    /// Waits until all blocks of this launch on this rank have entered the barrier as often as this
    /// one. All writes of these blocks before the barrier are visible to them after it; a signal to
    /// another rank still covers the writes of its own block only. All lanes together, in kernels
    /// that are declared `#[kernel(grid)]`.
    ///
    /// # Errors
    /// [`Aborted`] if a block, which the message names, does not enter within two to three times
    /// the timeout, so that a block that waits for another rank fails first; after recording
    /// [`FailureKind::NotGrid`], if the kernel is not declared so; or if a lane has recorded an
    /// error.
    #[inline(always)]
    #[track_caller]
    pub fn grid_barrier(&mut self) -> Result<(), Aborted> {
        if !self.is_grid {
            return Err(self.refuse(FailureKind::NotGrid, 0, 0, 0));
        }
        let block = self.block();
        block.publish();
        let mut arrived = Unvoted::new(());
        if block.index() == 0 {
            for other in block.elements_of_block(block.count() as usize - 1) {
                arrived = arrived.and(self.collect(1 + other as u32));
            }
            self.vote(arrived)?;
            for other in block.elements_of_block(block.count() as usize - 1) {
                self.release(1 + other as u32);
            }
        } else {
            if block.is_leader() {
                arrived = self.enter();
            }
            self.vote(arrived)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn words(&self, block: u32) -> (*mut u64, *mut u64) {
        let state: *mut BlockState = WaitContext::block_state(&self.comm, block);
        // SAFETY: computes addresses within the state of a block of this launch.
        unsafe { (&raw mut (*state).entered, &raw mut (*state).released) }
    }

    /// Waits on one lane of block 0 until `other` has entered.
    #[inline(always)]
    fn collect(&self, other: u32) -> Unvoted<()> {
        if self.faults().is_pending() {
            return Unvoted::new(());
        }
        let (entered, released) = self.words(other);
        // SAFETY: only block 0 writes this word.
        let wanted = unsafe { mem::load_u64(released, Order::Relaxed, Scope::Device) } + 1;
        self.await_grid(other, entered, wanted)
    }

    /// Releases `other`, on one lane of block 0, after a vote.
    #[inline(always)]
    fn release(&self, other: u32) {
        let (_, released) = self.words(other);
        // SAFETY: only block 0 writes this word.
        unsafe {
            let count = mem::load_u64(released, Order::Relaxed, Scope::Device);
            mem::store_u64(released, count + 1, Order::Release, Scope::Device);
        }
    }

    /// Enters on the leader of a block that is not block 0, and waits to be released.
    #[inline(always)]
    fn enter(&self) -> Unvoted<()> {
        let (entered, released) = self.words(self.block.index());
        // SAFETY: only this block writes this word.
        let count = unsafe { mem::load_u64(entered, Order::Relaxed, Scope::Device) } + 1;
        if self.faults().is_pending() {
            return Unvoted::new(());
        }
        // SAFETY: as above.
        unsafe { mem::store_u64(entered, count, Order::Release, Scope::Device) };
        self.await_grid(0, released, count)
    }

    /// Waits on one lane for a word of this rank, which `block` writes.
    #[inline(always)]
    fn await_grid(&self, block: u32, word: *mut u64, wanted: u64) -> Unvoted<()> {
        let (wait, rank) = (WaitKind::Grid, self.rank());
        let expected = u64::from(block) << 32 | wanted & 0xffff_ffff;
        Unvoted::from_wait(self.ctx.until(wait, rank, expected, || {
            // SAFETY: a word of a block's state, only accessed atomically.
            match unsafe { mem::load_u64(word, Order::Acquire, Scope::Device) } {
                seen if seen == wanted => Ok(()),
                seen => Err(seen),
            }
        }))
    }
}
