//! The prologue of a launch: how it enters a communicator.
//!
//! Every block has a [`BlockState`]: three epochs and the busy word, which only that block's
//! launches touch, and words of [`super::grid`].
//!
//! - **Who may overwrite what:** a launch overwrites its block's epochs,
//! - **after having acquired** the busy word as idle,
//! - **released by** the launch before, after it has written its own.
//!
//! On a GPU a launch asks for all that it needs in one trip to memory: the abort word, the epochs,
//! the busy word and the communicator's constants, which lie in the rank's workspace at fixed
//! distances ([`Machine::CONSTANTS_IN_WORKSPACE`]). So epochs are read before the busy word is
//! taken, and may be those of a launch that has ended since. They are the newest exactly if the
//! busy word says so: idle it is twice their sum, and none of them ever shrinks. Otherwise they are
//! read again.
//!
//! Lanes get epochs and constants through shared memory: after the block's barrier both are there.

use core::mem::offset_of;

use crate::comm::Comm;
use crate::faults::Faults;
use crate::group::{Block, Group, Machine};
use crate::layout::{BLOCKS_AT, BlockState, CONSTANTS_AT, CommConst, CommState, FailureKind, LINE};
use crate::mem::{self, Order, Scope};
use crate::shared_cache;
use crate::wait::{BOUNDED, WaitContext, WaitKind};

/// The epochs of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Epochs {
    pub(super) sequence: u64,
    pub(super) rounds: u64,
    pub(super) packet_epoch: u64,
}

impl Epochs {
    /// The busy word of a block that nothing runs on.
    #[inline(always)]
    pub(super) const fn idle(self) -> u64 {
        BlockState::idle(self.sequence, self.rounds, self.packet_epoch)
    }
}

/// Reason why a launch is not admitted. Stored in shared memory, where 0 means admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
enum Refusal {
    /// Another launch of the block is in flight.
    Busy = 1,
    /// The communicator has failed.
    Aborted = 2,
}

impl Refusal {
    /// Records an overlap with a launch in flight. A failed communicator has its record.
    #[inline(always)]
    fn report(self, ctx: &mut WaitContext, sequence: u64) {
        if self == Self::Aborted {
            return;
        }
        ctx.set_sequence(sequence);
        let rank = ctx.comm.rank();
        let (kind, busy) = (FailureKind::Overlap, self as u64);
        ctx.fail(kind, WaitKind::Launch, rank, rank, 0, busy, 0);
    }
}

/// The words at which a block enters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prologue {
    state: *mut BlockState,
    workspace: *const CommState,
}

impl Prologue {
    /// Block `block`'s.
    #[inline(always)]
    pub(super) fn new<M: Machine>(constants: *const CommConst, comm: &Comm, block: u32) -> Self {
        if !M::CONSTANTS_IN_WORKSPACE {
            return Self {
                state: WaitContext::block_state(comm, block),
                workspace: comm.own(0).cast_const().cast(),
            };
        }
        // By distances alone: nothing has to be read first.
        let workspace = constants
            .cast_mut()
            .cast::<u8>()
            .wrapping_sub(CONSTANTS_AT as usize);
        let state = workspace.wrapping_add((BLOCKS_AT + u64::from(block) * LINE) as usize);
        Self {
            state: state.cast(),
            workspace: workspace.cast_const().cast(),
        }
    }

    /// Rounds and packet epoch with which the block has entered; `own` where a block has one lane.
    #[inline(always)]
    pub(super) fn begun<M: Machine>(block: Block<M>, own: (u64, u64)) -> (u64, u64) {
        if M::LANES == 1 {
            return own;
        }
        let cache = shared_cache::at(block.shared());
        // SAFETY: written before the barrier behind which the session began.
        unsafe {
            (
                (&raw const (*cache).rounds).read(),
                (&raw const (*cache).packet_epoch).read(),
            )
        }
    }

    /// Returns the address of the block's state, for the leader of a block that has entered.
    #[inline(always)]
    pub(super) fn state<M: Machine>(block: Block<M>, comm: &Comm) -> *mut BlockState {
        if M::LANES == 1 {
            return WaitContext::block_state(comm, block.index());
        }
        // SAFETY: as above.
        unsafe { (&raw const (*shared_cache::at(block.shared())).state).read() as *mut BlockState }
    }

    /// All lanes enter: the communicator with cached constants, and the epochs, of which the
    /// sequence is the launch's own; `None` if the communicator has failed before, or another
    /// launch of the block is in flight. `collective` is 1 for a launch that counts.
    ///
    /// # Safety
    /// `constants` must be those of the communicator of `ctx` and this prologue; this block must
    /// have no other session.
    #[inline(always)]
    pub(super) unsafe fn pass<M: Machine>(
        self,
        block: Block<M>,
        constants: *const CommConst,
        ctx: &mut WaitContext,
        collective: u64,
    ) -> Option<(Comm, Epochs)> {
        if M::LANES == 1 {
            let (mut epochs, refusal) = self.take(ctx);
            epochs.sequence += collective;
            if let Some(refusal) = refusal {
                refusal.report(ctx, epochs.sequence);
                return None;
            }
            ctx.set_sequence(epochs.sequence);
            return Some((ctx.comm, epochs));
        }
        let cache = shared_cache::at(block.shared());
        // SAFETY: the block's own, which is written here by one lane each word, and read behind the
        // barrier.
        let (copy, comm) = unsafe {
            let copy = &raw mut (*cache).constants;
            (copy.cast::<u64>(), Comm::new(copy.cast_const()))
        };
        // The leader's warp waits for words of its own meanwhile, so others copy where there are
        // enough.
        let warp = block.warp().size();
        let first = if block.size() >= 4 * warp { warp } else { 0 };
        let mut word = block.rank().wrapping_sub(first);
        while word < (size_of::<CommConst>() / 8) as u32 {
            // SAFETY: as above; within the constants.
            unsafe {
                let at = constants.cast::<u64>().add(word as usize);
                let mut value = mem::load_u64(at, Order::Relaxed, Scope::Device);
                // Addresses that are copied, too, are read from the copy.
                let is_near = value == CommConst::near_of(constants as u64);
                if word as usize == offset_of!(CommConst, workspaces) / 8 && is_near {
                    value = CommConst::near_of(copy as u64);
                }
                copy.add(word as usize).write(value);
            }
            word += block.size() - first;
        }
        if block.is_leader() {
            Faults::new(block).clear();
            let (epochs, refusal) = self.take(ctx);
            let refusal = refusal.map_or(0, |refusal| refusal as u64);
            // SAFETY: as above.
            unsafe {
                (&raw mut (*cache).refused).write(refusal);
                (&raw mut (*cache).sequence).write(epochs.sequence + collective);
                (&raw mut (*cache).rounds).write(epochs.rounds);
                (&raw mut (*cache).packet_epoch).write(epochs.packet_epoch);
                (&raw mut (*cache).state).write(self.state as u64);
            }
        }
        block.sync();
        // SAFETY: as above.
        let (refused, epochs) = unsafe {
            (
                (&raw const (*cache).refused).read(),
                Epochs {
                    sequence: (&raw const (*cache).sequence).read(),
                    rounds: (&raw const (*cache).rounds).read(),
                    packet_epoch: (&raw const (*cache).packet_epoch).read(),
                },
            )
        };
        if refused != 0 {
            if block.is_leader() && refused == Refusal::Busy as u64 {
                // Like all that follows, by the copied constants.
                ctx.comm = comm;
                Refusal::Busy.report(ctx, epochs.sequence);
            }
            block.sync();
            return None;
        }
        ctx.set_sequence(epochs.sequence);
        Some((comm, epochs))
    }

    /// One lane takes the busy word. Returns the epochs before the launch.
    #[inline(always)]
    fn take(self, ctx: &WaitContext) -> (Epochs, Option<Refusal>) {
        if !BOUNDED {
            return (self.epochs(), None);
        }
        // All under way at once: nothing of this launch came before that they could order. SAFETY:
        // every workspace starts with a CommState; the abort word is only accessed atomically.
        let aborted = unsafe {
            mem::load_u64(
                &raw const (*self.workspace).abort,
                Order::Relaxed,
                Scope::System,
            )
        };
        let mut epochs = self.epochs();
        // SAFETY: the state lies in the workspace; its words are only accessed atomically.
        let busy = unsafe {
            mem::exchange_u64(
                &raw mut (*self.state).busy,
                1,
                Order::Acquire,
                Scope::Device,
            )
        };
        let idle = busy & 1 == 0;
        if idle && epochs.idle() != busy {
            epochs = self.epochs();
        }
        if aborted != 0 {
            // The failure that the word stands for is read, too.
            ctx.aborted();
            if idle {
                // SAFETY: as above; no launch enters a communicator that has failed.
                unsafe {
                    mem::store_u64(
                        &raw mut (*self.state).busy,
                        busy,
                        Order::Relaxed,
                        Scope::Device,
                    );
                }
            }
            return (epochs, Some(Refusal::Aborted));
        }
        (epochs, (!idle).then_some(Refusal::Busy))
    }

    #[inline(always)]
    fn epochs(self) -> Epochs {
        let load = |at| {
            // SAFETY: the state lies in the workspace; its words are only accessed atomically.
            unsafe { mem::load_u64(at, Order::Relaxed, Scope::Device) }
        };
        // SAFETY: as above.
        let (sequence, rounds, packet_epoch) = unsafe {
            (
                &raw const (*self.state).sequence,
                &raw const (*self.state).rounds,
                &raw const (*self.state).packet_epoch,
            )
        };
        Epochs {
            sequence: load(sequence),
            rounds: load(rounds),
            packet_epoch: load(packet_epoch),
        }
    }
}
