//! The prologue of a launch: how it enters a communicator.
//!
//! Every block has a [`BlockState`]: three epochs and the busy word, which only that block's
//! launches touch, and words of [`super::grid`].
//!
//! - **Who may overwrite what:** a launch overwrites its block's epochs,
//! - **after having acquired** the busy word as idle,
//! - **released by** the launch before, after it has written its own.
//!
//! On a GPU a launch loads all that it needs in one memory round trip: the abort word, the epochs,
//! the busy word and the communicator's constants, which lie in the rank's workspace at fixed
//! distances ([`Machine::CONSTANTS_IN_WORKSPACE`]). So epochs are read before the busy word is
//! taken, and may be older than the end of the previous launch. They are current exactly if an idle
//! busy word is twice their sum, because none of them ever decreases. Otherwise they are read
//! again, until they are. Therefore the end of a launch need not release its epochs on a GPU: the
//! busy word is relaxed there, because a fence would cost every launch a memory round trip.
//!
//! A launch can have fewer blocks than the communicator. Block 0 then counts the launch for the
//! others, whose rounds and packets do not advance.
//!
//! Lanes read epochs and constants from shared memory, after the block's barrier.

use core::mem::offset_of;

use crate::comm::Comm;
use crate::faults::Faults;
use crate::group::{Block, Group, Machine};
use crate::layout::{BLOCKS_AT, BlockState, CONSTANTS_AT, CommConst, CommState, LINE};
use crate::mem::{self, Order, Scope};
use crate::shared_cache;
use crate::wait::{BOUNDED, WaitContext};

/// Maximum number of times that a launch reads its epochs again. The stores of the launch before
/// become visible within a memory round trip or two; more tries mean that the state is damaged.
const MOST_TRIES: u32 = 1 << 20;

/// The epochs of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Epochs {
    pub(super) sequence: u64,
    pub(super) rounds: u64,
    pub(super) packet_epoch: u64,
}

impl Epochs {
    const NONE: Self = Self {
        sequence: 0,
        rounds: 0,
        packet_epoch: 0,
    };

    /// Returns the busy word of a block on which no launch is in flight.
    #[inline(always)]
    pub(super) const fn idle(self) -> u64 {
        BlockState::idle(self.sequence, self.rounds, self.packet_epoch)
    }
}

/// The words that the leader of a block has loaded to enter.
#[derive(Clone, Copy, Debug)]
pub struct Approach {
    epochs: Epochs,
    aborted: u64,
    /// Value of the busy word before this launch.
    busy: u64,
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

/// The words that a block accesses when it enters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prologue {
    state: *mut BlockState,
    workspace: *const CommState,
}

impl Prologue {
    /// Returns the prologue of block `block`.
    #[inline(always)]
    pub(super) fn new<M: Machine>(constants: *const CommConst, comm: &Comm, block: u32) -> Self {
        if !M::CONSTANTS_IN_WORKSPACE {
            return Self {
                state: WaitContext::block_state(comm, block),
                workspace: comm.own(0).cast_const().cast(),
            };
        }
        // At a fixed distance, so that nothing has to be read first.
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

    /// Returns rounds and packet epoch before the launch; `own` if a block has one lane.
    #[inline(always)]
    pub(super) fn begun<M: Machine>(block: Block<M>, own: (u64, u64)) -> (u64, u64) {
        if M::LANES == 1 {
            return own;
        }
        let cache = shared_cache::at(block.shared());
        // SAFETY: written before the barrier that ends the prologue.
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

    /// Enters on all lanes. Returns the context, with cached constants and the launch's sequence
    /// number, and the epochs, whose sequence is that of the launch. Returns `None` if the
    /// communicator has failed before, or another launch of the block is in flight. `collective` is
    /// 1 if the launch advances the sequence, else 0.
    ///
    /// # Safety
    /// `constants` must be those of the communicator of `ctx` and this prologue, and `approach`
    /// that of this prologue; this block must have no other session.
    #[inline(always)]
    pub(super) unsafe fn pass<M: Machine>(
        self,
        block: Block<M>,
        constants: *const CommConst,
        mut ctx: WaitContext,
        collective: u64,
        approach: Approach,
    ) -> Option<(WaitContext, Epochs)> {
        if M::LANES == 1 {
            let (mut epochs, refusal) = self.admit(approach);
            epochs.sequence += collective;
            if let Some(refusal) = refusal {
                ctx.set_sequence(epochs.sequence);
                ctx.refuse(refusal == Refusal::Busy);
                return None;
            }
            ctx.set_sequence(epochs.sequence);
            return Some((ctx, epochs));
        }
        let cache = shared_cache::at(block.shared());
        // SAFETY: the block's own memory. One lane writes each word, and all lanes read it only
        // after the barrier.
        let (copy, comm) = unsafe {
            let copy = &raw mut (*cache).constants;
            (copy.cast::<u64>(), Comm::new(copy.cast_const()))
        };
        // Meanwhile the leader's warp waits for the words that it takes, so the other warps copy if
        // there are enough.
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
            let (epochs, refusal) = self.admit(approach);
            let refusal = refusal.map_or(0, |refusal| refusal as u64);
            // SAFETY: as above.
            unsafe {
                (&raw mut (*cache).refused).write(refusal);
                let context = WaitContext {
                    comm,
                    sequence: epochs.sequence + collective,
                    ..ctx
                };
                (&raw mut (*cache).context).write(context);
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
                    sequence: (&raw const (*cache).context.sequence).read(),
                    rounds: (&raw const (*cache).rounds).read(),
                    packet_epoch: (&raw const (*cache).packet_epoch).read(),
                },
            )
        };
        if refused != 0 {
            if block.is_leader() {
                // Uses the copied constants, as all code after the prologue does.
                ctx.comm = comm;
                ctx.set_sequence(epochs.sequence);
                ctx.refuse(refused == Refusal::Busy as u64);
            }
            block.sync();
            return None;
        }
        ctx.comm = comm;
        ctx.set_sequence(epochs.sequence);
        Some((ctx, epochs))
    }

    /// Counts the launch for the blocks that it does not have, so that the sequence numbers of all
    /// blocks are equal in every launch. By block 0 of a collective launch, on all lanes. Launches
    /// of a communicator must not overlap, so that no other launch accesses these states meanwhile.
    /// (Block 0 refuses a launch if it is itself still in the launch before.)
    #[inline(always)]
    pub(super) fn count_absent<M: Machine>(block: Block<M>, comm: &Comm) {
        // From the last lane on: the first lanes have other work.
        let mut absent = block.count() + (block.size() - 1 - block.rank());
        while absent < comm.constants().max_blocks {
            let state = WaitContext::block_state(comm, absent);
            // SAFETY: the workspace has a state for each block; the words are only accessed
            // atomically. Both are changed, so that an idle busy word stays twice the sum.
            unsafe {
                mem::fetch_add_u64(&raw mut (*state).sequence, 1, Order::Relaxed, Scope::Device);
                mem::fetch_add_u64(&raw mut (*state).busy, 2, Order::Relaxed, Scope::Device);
            }
            absent += block.size();
        }
    }

    /// Loads the words that decide whether the launch is admitted, and takes the busy word; only
    /// the block's leader does. The loads are in flight together, because the launch has no earlier
    /// access to order. All lanes together.
    #[inline(always)]
    pub(super) fn approach<M: Machine>(self, block: Block<M>) -> Approach {
        if M::LANES != 1 && !block.is_leader() {
            return Approach {
                epochs: Epochs::NONE,
                aborted: 0,
                busy: 0,
            };
        }
        if !BOUNDED {
            return Approach {
                epochs: self.epochs(),
                aborted: 0,
                busy: 0,
            };
        }
        // SAFETY: every workspace starts with a CommState; the abort word is only accessed
        // atomically.
        let aborted = unsafe {
            mem::load_u64(
                &raw const (*self.workspace).abort,
                Order::Relaxed,
                Scope::System,
            )
        };
        let epochs = self.epochs();
        // SAFETY: the state lies in the workspace; its words are only accessed atomically.
        let busy = unsafe {
            mem::exchange_u64(&raw mut (*self.state).busy, 1, mem::AT_BEGIN, Scope::Device)
        };
        Approach {
            epochs,
            aborted,
            busy,
        }
    }

    /// Decides on one lane whether the launch is admitted. Returns the epochs before the launch.
    #[inline(always)]
    fn admit(self, approach: Approach) -> (Epochs, Option<Refusal>) {
        let Approach {
            mut epochs,
            aborted,
            busy,
        } = approach;
        if !BOUNDED {
            return (epochs, None);
        }
        #[cfg(target_arch = "nvptx64")]
        let aborted = crate::arch::used_here(aborted);
        let idle = busy & 1 == 0;
        let mut tries = 0;
        while idle && epochs.idle() != busy && tries < MOST_TRIES {
            epochs = self.epochs();
            tries += 1;
        }
        if aborted != 0 {
            if idle {
                // SAFETY: the state lies in the workspace; its words are only accessed atomically.
                // No launch enters a communicator that has failed.
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
