//! Words between blocks of a launch on one rank: a value and a flag in one atomic unit of 8 bytes,
//! so that a word needs no fence.
//!
//! - **Who may overwrite what:** in a launch, one other block overwrites a word of a block, once,
//!   if the block then receives it. The block sets it to 0 again.
//! - **After having acquired:** the sender needs to acquire nothing: the word has been 0 since the
//!   launch before, which has ended. The block has loaded the word that it sets to 0.
//! - **Released by:** the end of each launch.
//!
//! A launch that fails may leave words. The communicator then launches nothing more.

use super::{Session, Unvoted};
use crate::group::Machine;
use crate::layout::BLOCK_WORDS;
use crate::mem::{self, Order, Scope};
use crate::wait::WaitKind;

/// Set in a word that has arrived.
const ARRIVED: u64 = 1 << 32;

impl<M: Machine> Session<M> {
    /// Sends `value` as word `word` to block `to` of this launch on this rank, which must receive
    /// it by [`Session::receive_block_word`] in this launch. Blocks that wait for each other must
    /// run at the same time: on a GPU, launches of at most `Options::blocks` blocks do. By any
    /// lane.
    ///
    /// # Safety
    /// `to` must be a block of this launch, which must have at most `Options::blocks` blocks.
    /// `word` must be below [`BLOCK_WORDS`].
    #[inline(always)]
    pub unsafe fn send_block_word(&self, to: u32, word: usize, value: u32) {
        let at = self.block_word(to, word);
        // SAFETY: a word of this rank's workspace, which is only accessed atomically.
        unsafe {
            mem::store_u64(
                at,
                ARRIVED | u64::from(value),
                Order::Relaxed,
                Scope::Device,
            )
        };
    }

    /// Awaits word `word` from block `from` of this launch, once in a launch. Another wait must not
    /// be for the same word. By any lane.
    ///
    /// # Safety
    /// The launch must have at most `Options::blocks` blocks. `word` must be below [`BLOCK_WORDS`].
    #[inline(always)]
    pub unsafe fn receive_block_word(&self, from: u32, word: usize) -> Unvoted<u32> {
        let at = self.block_word(self.block().index(), word);
        let expected = u64::from(from) << 32 | word as u64;
        let value = self
            .ctx
            .until(WaitKind::BlockWord, self.rank(), expected, || {
                // SAFETY: as in `send_block_word`.
                match unsafe { mem::load_u64(at, Order::Relaxed, Scope::Device) } {
                    0 => Err(0),
                    word => Ok(word as u32),
                }
            });
        // SAFETY: as above.
        unsafe { mem::store_u64(at, 0, Order::Relaxed, Scope::Device) };
        Unvoted::from_wait(value)
    }

    #[inline(always)]
    fn block_word(&self, block: u32, word: usize) -> *mut u64 {
        let index = block as usize * BLOCK_WORDS + word;
        let words: *mut u64 = self.comm.own(self.comm.workspace().block_words).cast();
        words.wrapping_add(index)
    }
}
