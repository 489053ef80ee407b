//! The last block of a launch to arrive: for results of all blocks that one block combines.
//!
//! The words [`CommState::arrived`] have a counter for each call of a launch. They are 0 between
//! launches, unless the communicator has failed.
//!
//! - **Who may overwrite what:** every block of the launch adds 1 to the counter of its n-th call;
//!   the last one subtracts what has been added.
//! - **After having acquired:** the last block has acquired the additions of all other blocks. The
//!   next launch begins after this one.
//! - **Released by:** each block by its addition, after its own writes. Additions are
//!   read-modify-writes, so that the last block acquires all of them.

use super::{Aborted, Session};
use crate::group::{Group, Machine};
use crate::layout::{CommState, FailureKind};
use crate::mem::{self, Order, Scope};

/// Calls of a launch.
const CALLS: u32 = 16;
/// Counters in a word.
const IN_WORD: u32 = 4;

impl<M: Machine> Session<M> {
    /// Returns true on the last block of this launch to make this call, and false on the others
    /// without waiting for them. All writes of the other blocks before their calls are visible to
    /// the last one after its call. All blocks make the call, up to 16 times in a launch; all lanes
    /// of a block together.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::LastBlock`], if a launch makes more calls, or if
    /// a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn last_block(&mut self) -> Result<bool, Aborted> {
        let block = self.block();
        if self.last_blocks == CALLS {
            let calls = u64::from(CALLS);
            return Err(self.refuse(FailureKind::LastBlock, 0, calls + 1, calls));
        }
        let (word, shift) = (self.last_blocks / IN_WORD, self.last_blocks % IN_WORD * 16);
        self.last_blocks += 1;
        block.publish();
        let mut is_last = false;
        if block.is_leader() {
            let state = self.comm.own(0).cast::<CommState>();
            let blocks = u64::from(block.count());
            // SAFETY: a word of this rank's state, which is only accessed atomically.
            unsafe {
                let word = (&raw mut (*state).arrived).cast::<u64>().add(word as usize);
                let add = |value| mem::fetch_add_u64(word, value, Order::AcqRel, Scope::Device);
                let before = add(1 << shift) >> shift & 0xffff;
                is_last = before + 1 == blocks;
                if is_last {
                    add((blocks << shift).wrapping_neg());
                }
            }
        }
        let failed = self.any_failed(false);
        let is_last = block.any(is_last);
        block.acquired(Scope::Device);
        if failed {
            Err(Aborted(()))
        } else {
            Ok(is_last)
        }
    }
}
