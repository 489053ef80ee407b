//! Routing: the slot of each row at its receiver, and the index of each selection at its expert.
//!
//! Rows for a rank have slots in the order of their tokens, and the selections of an expert have
//! indices in the order of the tokens and their selections, for any number of blocks and
//! lanes. Each block counts the selections of all tokens, so that no block waits for another.

use fusewire_device::arch::MAX_WARPS;
use fusewire_device::group::slice;
use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Block, Group, In, InOut, Machine};

use super::mask::Mask;
use super::memory::Memory;
use super::shape::{
    ANNOUNCED, COUNTERS_AT, HEADER, MoeShape, NONE, OwnLayout, SEGMENTS, SELECTION, local_of,
    rank_of,
};
use super::{PLACEMENT, REUSED, UNKNOWN_EXPERT};

/// The memory that only this rank uses, as a block sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own<'a> {
    shape: MoeShape,
    layout: OwnLayout,
    argument: InOut<'a, u32>,
    words: Memory<'a, u32>,
    block: Memory<'a, u32>,
    mask: Mask<'a>,
}

impl<'a> Own<'a> {
    /// Wraps the words of the rank, and those of its mask.
    ///
    /// # Safety
    /// During the launch, nothing else may access the words. Other launches of the communicator
    /// may access the mask.
    #[inline(always)]
    pub(super) unsafe fn new<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        (argument, mask): (InOut<'a, u32>, InOut<'a, u32>),
    ) -> Result<Self, Aborted> {
        let block = s.block();
        let layout = shape.own(s.ranks() as usize, block.count() as usize);
        // SAFETY: the precondition of this function. Barriers order the lanes of a block; blocks
        // have separate parts.
        let words = unsafe { Memory::updated(s, argument, layout.words)? };
        let first = block.index() as usize * layout.block;
        let copy = words.slice(first + layout.mask_at, s.ranks() as usize);
        // SAFETY: the precondition of this function.
        let mask = unsafe { Mask::new(s, shape, mask, copy)? };
        Ok(Self {
            shape,
            layout,
            argument,
            words,
            block: words.slice(first, layout.block),
            mask,
        })
    }

    /// Returns the mask of the missing ranks.
    #[inline(always)]
    pub(super) fn mask(&self) -> Mask<'a> {
        self.mask
    }

    /// Returns the step of the block.
    #[inline(always)]
    pub(super) fn step(&self) -> u32 {
        self.block.get(0)
    }

    /// Sets the step of the block. One lane.
    #[inline(always)]
    pub(super) fn set_step(&self, step: u32) {
        self.block.set(0, step);
    }

    /// Returns the number of tokens of the last routing plus 1, or 0 if there was none.
    #[inline(always)]
    fn routed(&self) -> u32 {
        self.block.get(1)
    }

    /// Returns the number of tokens of the last routing.
    #[inline(always)]
    pub(super) fn tokens(&self) -> usize {
        self.routed().saturating_sub(1) as usize
    }

    /// Returns the counters of a warp; those after the last warp's have the sums.
    #[inline(always)]
    fn counters(&self, warp: u32) -> Memory<'a, u32> {
        let counters = self.layout.counters;
        let first = COUNTERS_AT + warp as usize * counters;
        self.block.slice(first, counters)
    }

    /// Returns the announcement for a rank.
    #[inline(always)]
    pub(super) fn announcement(&self, rank: u32) -> Memory<'a, u32> {
        let first = self.layout.announced_at + rank as usize * self.layout.announced;
        self.block.slice(first, self.shape.announcement_words())
    }

    /// Returns the announcement for a rank, to be sent.
    #[inline(always)]
    pub(super) fn announcement_to_send<M: Machine>(
        &self,
        s: &Session<M>,
        rank: u32,
    ) -> In<'a, u32> {
        let first = s.block().index() as usize * self.layout.block + self.layout.announced_at;
        let first = first + rank as usize * self.layout.announced;
        let words = self.argument.as_in();
        words.slice(first, self.shape.announcement_words())
    }

    /// Returns the first row of this rank's experts for selections of rank `source`.
    #[inline(always)]
    pub(super) fn bases(&self, source: u32) -> Memory<'a, u32> {
        let local = self.shape.local_experts as usize;
        let first = self.layout.bases_at + source as usize * local;
        self.block.slice(first, local)
    }

    /// Returns the slot of each selection that is the first of its token for its rank, and `NONE`
    /// for the others.
    #[inline(always)]
    pub(super) fn slots(&self) -> Memory<'a, u32> {
        let items = self.shape.max_tokens as usize * self.shape.k();
        self.words.slice(self.layout.slots_at, items)
    }

    /// Returns the headers of all tokens.
    #[inline(always)]
    fn headers(&self) -> Memory<'a, u32> {
        let len = self.layout.packed_at - self.layout.headers_at;
        self.words.slice(self.layout.headers_at, len)
    }

    /// Returns the header of a token, to be sent.
    #[inline(always)]
    pub(super) fn header_to_send(&self, token: usize) -> In<'a, u32> {
        let words = self.shape.header_words();
        let first = self.layout.headers_at + token * words;
        self.argument.as_in().slice(first, words)
    }

    /// Returns the payload and scales of rows `first .. first + count` in fp8.
    #[inline(always)]
    pub(super) fn packed(&self, first: usize, count: usize) -> Memory<'a, u32> {
        let words = self.shape.header_at();
        let first = self.layout.packed_at + first * words;
        self.words.slice(first, count * words)
    }

    /// Returns the payload and scales of a row in fp8, to be sent.
    #[inline(always)]
    pub(super) fn packed_to_send(&self, row: usize) -> In<'a, u32> {
        let words = self.shape.header_at();
        let first = self.layout.packed_at + row * words;
        self.argument.as_in().slice(first, words)
    }

    /// Returns the memory of a result of this lane's warp in fp8.
    #[inline(always)]
    pub(super) fn result<M: Machine>(&self, block: Block<M>) -> Memory<'a, u32> {
        let first = self.layout.results_at + self.result_of(block);
        self.words.slice(first, self.shape.result as usize)
    }

    /// Returns the result of this lane's warp in fp8, to be sent.
    #[inline(always)]
    pub(super) fn result_to_send<M: Machine>(&self, block: Block<M>) -> In<'a, u32> {
        let first = self.layout.results_at + self.result_of(block);
        self.argument
            .as_in()
            .slice(first, self.shape.result as usize)
    }

    #[inline(always)]
    fn result_of<M: Machine>(&self, block: Block<M>) -> usize {
        let warp = block.index() as usize * MAX_WARPS + block.warp_index() as usize;
        warp * self.shape.result as usize
    }

    /// Returns [what is known](super::shape::ORIGIN) about the rows of a rank.
    #[inline(always)]
    pub(super) fn origin(&self, rank: u32) -> Memory<'a, u32> {
        let words = self.layout.origin;
        let first = self.layout.origins_at + rank as usize * words;
        self.block.slice(first, words)
    }

    /// Returns a header that has been kept.
    #[inline(always)]
    pub(super) fn kept(&self, index: usize) -> Memory<'a, u32> {
        let words = self.shape.header_words();
        let first = self.layout.kept_at + index * words;
        let exists = index < self.shape.capacity as usize;
        self.words.slice(first, if exists { words } else { 0 })
    }

    /// Returns the number of row `slot` from `rank` of this block, among the rows of all ranks.
    #[inline(always)]
    pub(super) fn kept_index(&self, rank: u32, slot: usize) -> usize {
        (self.origin(rank).get(1) as usize).wrapping_add(slot)
    }

    /// Returns the number of rounds of the last dispatch.
    #[inline(always)]
    pub(super) fn rounds(&self) -> usize {
        self.block.get(2) as usize
    }

    /// Sets the number of rounds. One lane.
    #[inline(always)]
    pub(super) fn set_rounds(&self, rounds: usize) {
        self.block.set(2, rounds as u32);
    }

    /// Returns the number of the next round.
    #[inline(always)]
    pub(super) fn round(&self) -> usize {
        self.block.get(3) as usize
    }

    /// Sets the number of the next round. One lane.
    #[inline(always)]
    pub(super) fn set_round(&self, round: usize) {
        self.block.set(3, round as u32);
    }

    /// Returns the word of selection `item` in the header of its token: its place.
    #[inline(always)]
    fn selection(&self, item: usize) -> (Memory<'a, u32>, usize) {
        let (token, k) = (item / self.shape.k(), item % self.shape.k());
        let words = self.shape.header_words();
        let header = self.headers().slice(token * words, words);
        (header, HEADER + SELECTION * k)
    }

    /// Returns the rank of selection `item`, or [`NONE`].
    #[inline(always)]
    pub(super) fn rank(&self, item: usize) -> u32 {
        let (header, at) = self.selection(item);
        match header.get(at) {
            NONE => NONE,
            place => rank_of(place),
        }
    }
}

/// The selections of this rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routing<'a> {
    shape: MoeShape,
    ids: Memory<'a, i32>,
    weights: Memory<'a, f32>,
    placement: Memory<'a, u32>,
    own: Own<'a>,
    /// Number of tokens.
    tokens: usize,
    /// Tokens of this block: `first .. last`.
    pub(super) first: usize,
    pub(super) last: usize,
}

impl<'a> Routing<'a> {
    /// Checks the sizes of the arguments.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes.
    ///
    /// # Safety
    /// During the launch, nothing may write the arguments.
    #[inline(always)]
    pub(super) unsafe fn new<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        (ids, weights, placement): (In<'a, i32>, In<'a, f32>, In<'a, u32>),
        own: Own<'a>,
    ) -> Result<Self, Aborted> {
        let tokens = ids.len() / shape.k();
        let tokens = if tokens < shape.max_tokens as usize {
            tokens
        } else {
            shape.max_tokens as usize
        };
        let (first, last) = s.block().slice(tokens, 1);
        let items = tokens * shape.k();
        // SAFETY: the precondition of this function; the lanes only read.
        let (ids, weights, placement) = unsafe {
            (
                Memory::read_only(s, ids, items)?,
                Memory::read_only(s, weights, items)?,
                Memory::read_only(s, placement, shape.experts as usize)?,
            )
        };
        Ok(Self {
            shape,
            ids,
            weights,
            placement,
            own,
            tokens,
            first,
            last,
        })
    }

    /// Returns the place of the expert of selection `item`, or [`NONE`]. Records an error for
    /// experts that do not exist.
    #[inline(always)]
    fn place<M: Machine>(&self, s: &Session<M>, item: usize) -> u32 {
        let id = self.ids.get(item);
        if id < 0 {
            return NONE;
        }
        if id as u32 >= self.shape.experts {
            s.fault(UNKNOWN_EXPERT, id as u64, u64::from(self.shape.experts));
            return NONE;
        }
        let place = self.placement.get(id as usize);
        if !self.is_valid(s, place) {
            s.fault(PLACEMENT, id as u64, u64::from(place));
            return NONE;
        }
        place
    }

    #[inline(always)]
    fn is_valid<M: Machine>(&self, s: &Session<M>, place: u32) -> bool {
        rank_of(place) < s.ranks() && local_of(place) < self.shape.local_experts
    }

    /// Uses what the last launch has computed. All lanes of the block together.
    ///
    /// # Errors
    /// [`Aborted`] if it had another number of tokens.
    #[inline(always)]
    #[track_caller]
    pub(super) fn reuse<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        let routed = self.own.routed();
        let tokens = routed.wrapping_sub(1);
        let is_same = routed != 0 && tokens as usize == self.tokens;
        s.ensure(is_same, REUSED, u64::from(tokens), self.tokens as u64)
    }

    /// Returns the counter of the rows for `rank` in a segment of the tokens.
    #[inline(always)]
    fn rows<M: Machine>(&self, s: &Session<M>, segment: usize, rank: u32) -> usize {
        self.shape.experts as usize + segment * s.ranks() as usize + rank as usize
    }

    /// Computes the headers and slots of this block's tokens, and the announcements. All lanes of
    /// the block together.
    ///
    /// # Errors
    /// [`Aborted`] if an expert does not exist, or two experts have one place.
    #[inline(always)]
    #[track_caller]
    pub(super) fn run<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        let (block, own, ranks) = (s.block(), self.own, s.ranks());
        let warps = block.warps();
        let experts = self.shape.experts as usize;
        let counters = experts + SEGMENTS * ranks as usize;
        for warp in 0..warps {
            let counts = own.counters(warp);
            for counter in block.elements_of_block(counters) {
                counts.set(counter, 0);
            }
        }
        for rank in 0..ranks {
            let announcement = own.announcement(rank);
            for word in block.elements_of_block(announcement.len()) {
                announcement.set(word, 0);
            }
        }
        block.sync();
        self.count(s);
        block.sync();

        // Replaces the counters of a warp by the sums of those of the warps before it.
        let sums = own.counters(warps);
        for counter in block.elements_of_block(counters) {
            let mut sum = 0;
            for warp in 0..warps {
                let counts = own.counters(warp);
                let count = counts.get(counter);
                counts.set(counter, sum);
                sum += count;
            }
            sums.set(counter, sum);
        }
        block.sync();
        self.add_bases(s, sums);
        self.announce(s, sums);
        s.vote(Unvoted::new(()))?;
        self.check_places(s);
        s.vote(Unvoted::new(()))?;
        if block.is_leader() {
            own.block.set(1, self.tokens as u32 + 1);
        }
        Ok(())
    }

    /// Returns the selections of this warp.
    #[inline(always)]
    fn items_of_warp<M: Machine>(&self, block: Block<M>) -> (usize, usize) {
        let (warp, warps) = (block.warp_index() as usize, block.warps() as usize);
        let (first, last) = slice(self.tokens, 1, warp, warps);
        (first * self.shape.k(), last * self.shape.k())
    }

    /// Counts the selections of each warp, and writes their indices and slots within the warp's
    /// selections.
    #[inline(always)]
    #[track_caller]
    fn count<M: Machine>(&self, s: &Session<M>) {
        let (block, own, k) = (s.block(), self.own, self.shape.k());
        let counts = own.counters(block.warp_index());
        let (lane, lanes) = match M::LANES {
            1 => (0, 1),
            _ => (block.warp().rank() as usize, block.warp().size() as usize),
        };
        let slots = own.slots();
        let (mut start, end) = self.items_of_warp(block);
        // All lanes stay in the loop, because `claim` is a collective of the warp.
        while start < end {
            let item = start + lane;
            start += lanes;
            let is_there = item < end;
            let token = item / k;
            let is_own = is_there && token >= self.first && token < self.last;
            let place = match is_there {
                true => self.place(s, item),
                false => NONE,
            };
            let (mut expert, mut row) = (NONE, NONE);
            let is_first = self.is_first(s, item, item - lane, place);
            if place != NONE {
                expert = self.ids.get(item) as u32;
                if is_first {
                    let segment =
                        usize::from(token >= self.first) + usize::from(token >= self.last);
                    row = self.rows(s, segment, rank_of(place)) as u32;
                }
            }
            let (index, slot) = claim(block, counts, expert, row);
            if is_own {
                let (header, at) = own.selection(item);
                if at == HEADER {
                    header.set(0, token as u32);
                }
                header.set(at, place);
                header.set(at + 1, index);
                header.set(at + 2, self.weights.get(item).to_bits());
                slots.set(item, if row == NONE { NONE } else { slot });
            }
        }
    }

    /// Returns true if no earlier selection of the token is on the rank of `place`. The lanes of
    /// the warp have the selections from `start` on. All lanes of the warp together.
    #[inline(always)]
    #[track_caller]
    fn is_first<M: Machine>(&self, s: &Session<M>, item: usize, start: usize, place: u32) -> bool {
        let k = self.shape.k();
        let token = item / k;
        let mut is_first = true;
        if M::LANES != 1 {
            let warp = s.block().warp();
            let key = match place {
                NONE => NONE,
                place => ((token - start / k) as u32) << 16 | rank_of(place),
            };
            let below = (1 << warp.rank()) - 1;
            is_first = warp.match_any(key) & below == 0;
        }
        // The selections of the token that are not those of lanes.
        let end = if M::LANES == 1 { item } else { start };
        let mut before = token * k;
        while before < end && place != NONE {
            // An expert that does not exist has no place.
            let id = self.ids.get(before);
            if id >= 0 && (id as usize) < self.placement.len() {
                let other = self.placement.get(id as usize);
                if rank_of(other) == rank_of(place) && self.is_valid(s, other) {
                    return false;
                }
            }
            before += 1;
        }
        is_first
    }

    /// Adds the counts of the warps before to the indices and slots of this block's tokens.
    #[inline(always)]
    fn add_bases<M: Machine>(&self, s: &Session<M>, sums: Memory<u32>) {
        let (block, own, k) = (s.block(), self.own, self.shape.k());
        let (first, last) = (self.first * k, self.last * k);
        let (start, end) = self.items_of_warp(block);
        let start = if start < first { first } else { start };
        let end = if end < last { end } else { last };
        if M::LANES == 1 && block.count() == 1 {
            return; // All bases are 0.
        }
        let (bases, slots) = (own.counters(block.warp_index()), own.slots());
        for item in block.warp().elements_of_group(end.saturating_sub(start)) {
            let item = start + item;
            let (header, at) = own.selection(item);
            let place = header.get(at);
            if place == NONE {
                continue;
            }
            let expert = self.ids.get(item) as usize;
            header.set(at + 1, header.get(at + 1) + bases.get(expert));
            let slot = slots.get(item);
            if slot != NONE {
                let before = sums.get(self.rows(s, 0, rank_of(place)));
                let here = bases.get(self.rows(s, 1, rank_of(place)));
                slots.set(item, slot + before + here);
            }
        }
    }

    /// Writes the announcements.
    #[inline(always)]
    fn announce<M: Machine>(&self, s: &Session<M>, sums: Memory<u32>) {
        let (block, own) = (s.block(), self.own);
        for rank in block.elements_of_block(s.ranks() as usize) {
            let rank = rank as u32;
            let announcement = own.announcement(rank);
            let before = sums.get(self.rows(s, 0, rank));
            let here = sums.get(self.rows(s, 1, rank));
            let after = sums.get(self.rows(s, 2, rank));
            announcement.set(0, before + here + after);
            announcement.set(1, before);
            announcement.set(2, here);
            announcement.set(3, self.tokens as u32);
        }
        let inverse = own.inverse(s);
        for expert in block.elements_of_block(self.shape.experts as usize) {
            let place = self.placement.get(expert);
            if self.is_valid(s, place) {
                let announcement = own.announcement(rank_of(place));
                announcement.set(ANNOUNCED + local_of(place) as usize, sums.get(expert));
                inverse.set(self.inverse_of(place), expert as u32);
            }
        }
    }

    /// Records an error for two experts at one place. After a barrier.
    #[inline(always)]
    fn check_places<M: Machine>(&self, s: &Session<M>) {
        let inverse = self.own.inverse(s);
        for expert in s.block().elements_of_block(self.shape.experts as usize) {
            let place = self.placement.get(expert);
            if self.is_valid(s, place) && inverse.get(self.inverse_of(place)) != expert as u32 {
                s.fault(PLACEMENT, expert as u64, u64::from(place));
            }
        }
    }

    #[inline(always)]
    fn inverse_of(&self, place: u32) -> usize {
        (rank_of(place) * self.shape.local_experts + local_of(place)) as usize
    }
}

impl<'a> Own<'a> {
    /// Returns the expert of each place. If two experts have one place, lanes race, so accesses are
    /// those of the argument.
    #[inline(always)]
    fn inverse<M: Machine>(&self, s: &Session<M>) -> InOut<'a, u32> {
        let first = s.block().index() as usize * self.layout.block + self.layout.inverse_at;
        let len = self.layout.bases_at - self.layout.inverse_at;
        self.argument.slice(first, len)
    }
}

/// Increments up to two counters of the warp's table for each lane, in the order of the lanes.
/// Returns their values before. [`NONE`] increments nothing. All lanes of the warp together.
#[inline(always)]
#[track_caller]
fn claim<M: Machine>(block: Block<M>, counts: Memory<u32>, first: u32, second: u32) -> (u32, u32) {
    if M::LANES == 1 {
        let increment = |counter: u32| {
            if counter == NONE {
                return 0;
            }
            let count = counts.get(counter as usize);
            counts.set(counter as usize, count + 1);
            count
        };
        return (increment(first), increment(second));
    }
    let warp = block.warp();
    let below = (1 << warp.rank()) - 1;
    let (same_first, same_second) = (warp.match_any(first), warp.match_any(second));
    let count = |counter: u32| match counter {
        NONE => 0,
        counter => counts.get(counter as usize),
    };
    let (count_first, count_second) = (count(first), count(second));
    // Every lane has read a counter before the first of the lanes that share it writes it.
    warp.sync();
    let write = |counter: u32, count: u32, same: u64| {
        if counter != NONE && same & below == 0 {
            counts.set(counter as usize, count + same.count_ones());
        }
    };
    write(first, count_first, same_first);
    write(second, count_second, same_second);
    warp.sync();
    (
        count_first + (same_first & below).count_ones(),
        count_second + (same_second & below).count_ones(),
    )
}
