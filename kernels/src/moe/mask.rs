//! The mask of ranks that are missing.
//!
//! A rank is *masked* when it has not sent in time or its process has ended
//! ([`MoeFlags::MASK`]). This rank then sends it nothing, waits for it no longer, and uses nothing
//! that it has sent. Two ranks that mask each other do not see each other's memory in later
//! launches.
//!
//! - **Who may overwrite what:** a lane of any block sets the word of a rank that is 0, and no
//!   launch clears it. Each block also has a copy of the mask, which it makes at the start of the
//!   launch, and in which it sets the ranks that it finds missing,
//! - **after having acquired** nothing. The blocks of a launch that waits may have different
//!   copies, so it does not interpret what has arrived, unless it has a single block,
//! - **released by** the end of the launch: all blocks of the next launch copy the same mask.

use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::session::{Aborted, Session};
use fusewire_device::window::{Arrival, Presence};
use fusewire_device::{Group, InOut, Machine, Rank, arch};

use super::memory::Memory;
use super::shape::{MoeFlags, MoeShape};

/// Value of the word of a rank that was late.
pub const LATE: u32 = 1;
/// Value of the word of a rank whose process has ended.
pub const ENDED: u32 = 2;

/// The mask, as a block sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mask<'a> {
    /// The mask of the rank: a word for each rank.
    words: Memory<'a, u32>,
    /// The copy of the block.
    copy: Memory<'a, u32>,
    is_used: bool,
}

impl<'a> Mask<'a> {
    /// Copies the mask to the block's words `copy`. All lanes of the block together.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes, if the mask has not enough words.
    ///
    /// # Safety
    /// During the launch, only launches of this communicator may access the words of the mask, and
    /// only the block those of the copy.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn new<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        words: InOut<'a, u32>,
        copy: Memory<'a, u32>,
    ) -> Result<Self, Aborted> {
        let is_used = shape.flags.has(MoeFlags::MASK);
        let ranks = if is_used { s.ranks() as usize } else { 0 };
        // SAFETY: the words are only accessed atomically, by the functions below.
        let words = unsafe { Memory::updated(s, words, ranks)? };
        let mask = Self {
            words,
            copy,
            is_used,
        };
        if is_used {
            for rank in s.block().elements_of_block(ranks) {
                copy.set(rank, mask.word(rank));
            }
            s.block().sync();
        }
        Ok(mask)
    }

    /// Returns true if launches mask ranks.
    #[inline(always)]
    pub(super) fn is_used(self) -> bool {
        self.is_used
    }

    /// Returns true if `rank` is masked. Equal on all lanes of the block, except during a wait.
    #[inline(always)]
    pub(super) fn has(self, rank: u32) -> bool {
        self.is_used && self.copy.get(rank as usize) != 0
    }

    #[inline(always)]
    fn word(self, index: usize) -> u32 {
        if index >= self.words.len() {
            return 0;
        }
        // SAFETY: the index is in range; the words are only accessed atomically.
        unsafe {
            let at = self.words.as_ptr().wrapping_add(index).cast_const();
            mem::load_u32(at, Order::Relaxed, Scope::Device)
        }
    }

    #[inline(always)]
    fn set(self, rank: u32, value: u32) {
        let rank = rank as usize;
        self.copy.set(rank, value);
        if rank < self.words.len() && self.word(rank) == 0 {
            // SAFETY: as in `word`.
            unsafe {
                let at = self.words.as_ptr().wrapping_add(rank);
                mem::store_u32(at, value, Order::Relaxed, Scope::Device);
            }
        }
    }
}

impl Presence for Mask<'_> {
    #[inline(always)]
    fn includes(self, rank: Rank) -> bool {
        !self.has(rank.index())
    }

    #[inline(always)]
    fn may_be_absent(self) -> bool {
        self.is_used
    }

    #[inline(always)]
    fn awaited(self, rank: Rank, arrival: Arrival) {
        match arrival {
            Arrival::Late => self.set(rank.index(), LATE),
            Arrival::Dead => self.set(rank.index(), ENDED),
            _ => {}
        }
    }
}

/// The ranks that a mask includes, with the time for which this rank has waited for each.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimedMask<'a> {
    mask: Mask<'a>,
    wait_ns: InOut<'a, u64>,
    is_timed: bool,
    start: u64,
}

impl<'a> TimedMask<'a> {
    /// Starts the clock, if `wait_ns` has words and this is block 0.
    #[inline(always)]
    pub(super) fn new<M: Machine>(s: &Session<M>, mask: Mask<'a>, wait_ns: InOut<'a, u64>) -> Self {
        let is_timed = s.block().index() == 0 && !wait_ns.is_empty();
        Self {
            mask,
            wait_ns,
            is_timed,
            start: if is_timed { arch::clock_ns() } else { 0 },
        }
    }
}

impl Presence for TimedMask<'_> {
    #[inline(always)]
    fn includes(self, rank: Rank) -> bool {
        self.mask.includes(rank)
    }

    #[inline(always)]
    fn may_be_absent(self) -> bool {
        self.mask.may_be_absent()
    }

    #[inline(always)]
    fn awaited(self, rank: Rank, arrival: Arrival) {
        if self.is_timed {
            let index = rank.index() as usize;
            let waited = arch::clock_ns().saturating_sub(self.start);
            self.wait_ns
                .set(index, self.wait_ns.get(index).wrapping_add(waited));
        }
        self.mask.awaited(rank, arrival);
    }
}
