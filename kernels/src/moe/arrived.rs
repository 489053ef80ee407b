//! The rows that have arrived, and the selections in their headers.

use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Block, Group, Machine, Window};

use super::ANNOUNCEMENT;
use super::memory::Memory;
use super::routing::Own;
use super::shape::{ANNOUNCED, HEADER, MoeShape, NONE, ORIGIN, SELECTION, local_of, rank_of};

/// Ranks whose announcements a lane reads at once.
pub(super) const RANKS_AT_ONCE: u32 = 8;

/// The rows that have arrived for this rank. A peer can write its announcements and rows at any
/// time, so nothing that they contain is used as an index without a check.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived<'a> {
    shape: MoeShape,
    words: Memory<'a, u32>,
    own: Own<'a>,
    round: usize,
    is_kept: bool,
    me: u32,
    block: usize,
    blocks: usize,
    ranks: usize,
}

/// A selection in a row that has arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection {
    /// Index of the row among those of its rank; with staging, among those of this block.
    pub(super) slot: usize,
    /// The token.
    pub(super) token: u32,
    /// Index of the selection among those of the token.
    pub(super) k: usize,
    /// The place of the expert.
    pub(super) place: u32,
    /// Index among the selections of the expert by the rank.
    pub(super) index: u32,
    /// Bits of the weight.
    pub(super) weight: u32,
}

impl<'a> Arrived<'a> {
    /// Wraps this rank's part of the window, after a wait for the signals of the ranks that are not
    /// masked. With staging, the rows are those of `round`.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes, if the window has been freed.
    #[inline(always)]
    pub(super) fn new<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        rows: &Window<'a, u32>,
        own: Own<'a>,
        round: usize,
    ) -> Result<Self, Aborted> {
        let words = rows.local(s)?.elements().as_in();
        let (_, ranks, blocks) = place_of(s);
        Ok(Self {
            shape,
            // SAFETY: after the wait, correct peers write the words that the launch reads only
            // after a later launch of this rank; what others write is checked before it is used.
            words: unsafe { Memory::of(words) },
            own,
            round,
            is_kept: false,
            me: s.rank(),
            block: s.block().index() as usize,
            blocks,
            ranks,
        })
    }

    /// Returns the same rows, with the headers that have been kept. Without staging, the rows are
    /// still where they have arrived.
    #[inline(always)]
    pub(super) fn kept(self) -> Self {
        Self {
            is_kept: self.shape.is_staged(),
            ..self
        }
    }

    /// Returns a word of the announcement of `rank` for this block; 0 if the rank is masked.
    #[inline(always)]
    fn announced(&self, rank: u32, word: usize) -> u32 {
        if self.own.mask().has(rank) {
            return 0;
        }
        let first = self
            .shape
            .announcement(rank as usize, self.block, self.blocks);
        self.words.get(first + word)
    }

    /// Returns the number of rows from `rank`.
    #[inline(always)]
    pub(super) fn total(&self, rank: u32) -> u32 {
        let (total, most) = (self.announced(rank, 0), self.shape.max_tokens);
        if total < most { total } else { most }
    }

    #[inline(always)]
    fn is_possible(&self, first: u32, count: u32) -> bool {
        let most = self.shape.max_tokens;
        first <= most && count <= most - first
    }

    /// Returns the number of tokens of `rank`.
    #[inline(always)]
    pub(super) fn tokens(&self, rank: u32) -> u32 {
        let (tokens, most) = (self.announced(rank, 3), self.shape.max_tokens);
        if tokens < most { tokens } else { most }
    }

    /// Returns the number of selections of an expert of this rank by `rank`.
    #[inline(always)]
    pub(super) fn selections(&self, rank: u32, expert: usize) -> u32 {
        let count = self.announced(rank, ANNOUNCED + expert);
        let most = self.shape.max_tokens * self.shape.k() as u32;
        if count < most { count } else { most }
    }

    /// Returns the numbers of selections of an expert of this rank by the ranks from `first` on,
    /// and 0 for ranks that do not exist. Their loads are in flight together.
    #[inline(always)]
    pub(super) fn selections_of_ranks(
        &self,
        first: u32,
        expert: usize,
    ) -> [u32; RANKS_AT_ONCE as usize] {
        let mut counts = [0; RANKS_AT_ONCE as usize];
        for i in 0..RANKS_AT_ONCE {
            if first + i < self.ranks as u32 {
                counts[i as usize] = self.selections(first + i, expert);
            }
        }
        counts
    }

    /// Returns the number of selections of an expert of this rank by all ranks.
    #[inline(always)]
    pub(super) fn selections_of_all(&self, expert: usize) -> u32 {
        let (mut rank, mut count) = (0, 0u32);
        while rank < self.ranks as u32 {
            let counts = self.selections_of_ranks(rank, expert);
            for i in 0..counts.len() {
                count = count.wrapping_add(counts[i]);
            }
            rank += RANKS_AT_ONCE;
        }
        count
    }

    /// Fails the launch if a rank has announced impossible numbers. All lanes of the block
    /// together.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes.
    #[inline(always)]
    #[track_caller]
    pub(super) fn check<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        let most = self.shape.max_tokens;
        for rank in s.block().elements_of_block(self.ranks) {
            let rank = rank as u32;
            let (total, first) = (self.announced(rank, 0), self.announced(rank, 1));
            let count = self.announced(rank, 2);
            let tokens = self.announced(rank, 3);
            let is_possible = self.is_possible(first, count) && first + count <= total;
            if total > most || tokens > most || !is_possible {
                s.fault(ANNOUNCEMENT, u64::from(rank), u64::from(total));
            }
        }
        s.vote(Unvoted::new(()))
    }

    /// Returns the first row from `rank` of this block, and the number of rows.
    #[inline(always)]
    pub(super) fn of_block(&self, rank: u32) -> (usize, usize) {
        if self.shape.is_staged() {
            let origin = self.own.origin(rank);
            let first = origin.get(ORIGIN + self.round);
            let count = match self.is_kept {
                true => origin.get(ORIGIN + self.round + 1).wrapping_sub(first),
                false => self.words.get(self.region(rank)),
            };
            let most = self.shape.staging;
            let count = if count < most { count } else { most };
            return (first as usize, count as usize);
        }
        let (first, count) = (self.announced(rank, 1), self.announced(rank, 2));
        if self.is_possible(first, count) {
            (first as usize, count as usize)
        } else {
            (0, 0)
        }
    }

    /// Returns the announced number of rows from `rank` before those of this block, and the
    /// announced number of rows of this block.
    #[inline(always)]
    pub(super) fn announced_of_block(&self, rank: u32) -> (u32, u32) {
        (self.announced(rank, 1), self.announced(rank, 2))
    }

    /// Returns the first word of the region for the rows from `rank` in this round.
    #[inline(always)]
    fn region(&self, rank: u32) -> usize {
        let source = (rank as usize, self.block);
        self.shape
            .region(self.ranks, source, self.blocks, self.round)
    }

    /// Returns row `slot` from `rank`.
    #[inline(always)]
    pub(super) fn row(&self, rank: u32, slot: usize) -> Memory<'a, u32> {
        let first = if self.shape.is_staged() {
            self.region(rank) + self.shape.staged_row(slot)
        } else {
            let first = self.shape.rows(rank as usize, self.ranks, self.blocks);
            first + slot * self.shape.row_stride()
        };
        self.words.slice(first, self.shape.row_words())
    }

    /// Returns the header of row `slot` from `rank`.
    #[inline(always)]
    pub(super) fn header(&self, rank: u32, slot: usize) -> Memory<'a, u32> {
        if self.is_kept {
            return self.own.kept(self.own.kept_index(rank, slot));
        }
        let words = self.shape.header_words();
        self.row(rank, slot).slice(self.shape.header_at(), words)
    }

    /// Returns selection `k` of row `slot` from `rank`.
    #[inline(always)]
    pub(super) fn selection(&self, rank: u32, slot: usize, k: usize) -> Selection {
        let header = self.header(rank, slot);
        let at = HEADER + SELECTION * k;
        Selection {
            slot,
            token: header.get(0),
            k,
            place: header.get(at),
            index: header.get(at + 1),
            weight: header.get(at + 2),
        }
    }

    /// Returns the index of the expert at `place` on this rank, or [`NONE`].
    #[inline(always)]
    pub(super) fn expert_here(&self, place: u32) -> u32 {
        match self.is_here(place) {
            true => local_of(place),
            false => NONE,
        }
    }

    /// Returns true if the expert at `place` is on this rank.
    #[inline(always)]
    fn is_here(&self, place: u32) -> bool {
        place != NONE && rank_of(place) == self.me && local_of(place) < self.shape.local_experts
    }

    /// Returns the selections of this rank's experts, in the rows of this block, that this lane's
    /// warp works on: the warps take them in turn. All lanes of the warp together.
    #[inline(always)]
    pub(super) fn selections_of_warp<M: Machine>(self, block: Block<M>) -> Selections<'a, M> {
        Selections {
            arrived: self,
            block,
            next_rank: 0,
            first_rank: 0,
            first: 0,
            start: 0,
            items: 0,
            next: 0,
            rank: 0,
            slot: 0,
            k: 0,
            here: 0,
            turn: block.warp_index(),
        }
    }
}

/// Iterator over the selections that a warp works on. A closure for each selection would hold
/// references that keep the launch in local memory on AMD.
///
/// The selections of as many ranks as the warp has lanes are numbered in sequence. Each lane looks
/// at one of as many selections as the warp has lanes, so their loads are in flight together.
#[derive(Debug)]
pub(super) struct Selections<'a, M> {
    arrived: Arrived<'a>,
    block: Block<M>,
    /// The first rank after those whose selections are numbered, and the first of those.
    next_rank: u32,
    first_rank: u32,
    /// The first row of this lane's rank, and the number of the first of its selections.
    first: u32,
    start: u32,
    /// The selections of all lanes' ranks.
    items: u32,
    /// The first selection after those that the lanes look at.
    next: u32,
    /// The selection that this lane looks at: its rank, row, and number among those of the token.
    rank: u32,
    slot: u32,
    k: u32,
    /// The lanes whose selection of this rank's experts has not been visited.
    here: u64,
    /// Selections before the next one of this warp.
    turn: u32,
}

impl<M: Machine> Selections<'_, M> {
    #[inline(always)]
    fn ranks(&self) -> u32 {
        self.arrived.ranks as u32
    }

    /// Numbers the selections of the next ranks. All lanes of the warp together.
    #[inline(always)]
    #[track_caller]
    fn number(&mut self, lane: u32, lanes: u32) {
        let rank = self.next_rank + lane;
        let (mut first, mut count) = (0, 0);
        if rank < self.ranks() {
            (first, count) = self.arrived.of_block(rank);
        }
        self.first = first as u32;
        let items = (count * self.arrived.shape.k()) as u32;
        (self.start, self.items) = match M::LANES {
            1 => (0, items),
            _ => self.block.warp().exclusive_sum(items),
        };
        self.first_rank = self.next_rank;
        self.next_rank += lanes;
        self.next = 0;
    }

    /// Looks at the next selections. All lanes of the warp together.
    #[inline(always)]
    #[track_caller]
    fn look(&mut self, lane: u32, lanes: u32) {
        let position = self.next + lane;
        self.next += lanes;
        // The last rank whose first selection is not after the position.
        let (mut first, mut item) = (self.first, position);
        self.rank = self.first_rank;
        if M::LANES != 1 {
            let warp = self.block.warp();
            let left = self.ranks() - self.first_rank;
            for other in 0..if left < lanes { left } else { lanes } {
                let start = warp.shuffle(self.start, other);
                let row = warp.shuffle(self.first, other);
                if start <= position {
                    self.rank = self.first_rank + other;
                    (first, item) = (row, position - start);
                }
            }
        }
        let k = self.arrived.shape.k() as u32;
        (self.slot, self.k) = (first + item / k, item % k);
        let mut is_here = false;
        if position < self.items {
            let header = self.arrived.header(self.rank, self.slot as usize);
            let place = header.get(HEADER + SELECTION * self.k as usize);
            is_here = self.arrived.is_here(place);
        }
        self.here = match M::LANES {
            1 => u64::from(is_here),
            _ => self.block.warp().ballot(is_here),
        };
    }
}

impl<M: Machine> Iterator for Selections<'_, M> {
    /// The rank that has sent the selection, and the selection.
    type Item = (u32, Selection);

    #[inline(always)]
    #[track_caller]
    fn next(&mut self) -> Option<Self::Item> {
        let (lane, lanes) = match M::LANES {
            1 => (0, 1),
            _ => {
                let warp = self.block.warp();
                (warp.rank(), warp.size())
            }
        };
        loop {
            if self.here == 0 && self.next >= self.items {
                if self.next_rank >= self.ranks() {
                    return None;
                }
                self.number(lane, lanes);
                continue;
            }
            if self.here == 0 {
                self.look(lane, lanes);
                continue;
            }
            let from = self.here.trailing_zeros();
            self.here &= self.here - 1;
            if self.turn > 0 {
                self.turn -= 1;
                continue;
            }
            self.turn = self.block.warps() - 1;
            let (rank, slot, k) = match M::LANES {
                1 => (self.rank, self.slot, self.k),
                _ => {
                    let warp = self.block.warp();
                    (
                        warp.shuffle(self.rank, from),
                        warp.shuffle(self.slot, from),
                        warp.shuffle(self.k, from),
                    )
                }
            };
            let selection = self.arrived.selection(rank, slot as usize, k as usize);
            return Some((rank, selection));
        }
    }
}

/// Returns this rank, the number of ranks and the number of blocks.
#[inline(always)]
pub(super) fn place_of<M: Machine>(s: &Session<M>) -> (usize, usize, usize) {
    (
        s.rank() as usize,
        s.ranks() as usize,
        s.block().count() as usize,
    )
}
