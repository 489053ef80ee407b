//! Dispatch: sends rows to the ranks of their experts.

use fusewire_device::bulk;
use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Block, Group, In, InOut, Machine, Out, Team, Warp, Window};

use super::mask::{Mask, TimedMask};
use super::memory::Memory;
use super::routing::{Own, Routing};
use super::shape::{
    ANNOUNCED, HEADER, Meta, MoeFlags, MoeShape, NONE, SELECTION, local_of, rank_of,
};
use super::{
    ANNOUNCEMENT, ARRIVED, CAPACITY, COMBINED, COUNTS, DISPATCHED, ENTRY, FITS, IDLE, ORDER, ROWS,
    SELECTION_INDEX, SENT,
};

/// Ranks whose announcements a lane reads at once.
const RANKS_AT_ONCE: u32 = 8;

/// Payload of the tokens.
pub(super) trait Payload: Copy {
    /// Computes the payload of this block's tokens `first .. last` in their rows. All lanes of the
    /// block together; the caller synchronizes.
    ///
    /// # Safety
    /// On a GPU, the elements must be aligned to 16 bytes.
    unsafe fn prepare<M: Machine>(
        self,
        block: Block<M>,
        shape: &MoeShape,
        own: &Own<'_>,
        tokens: (usize, usize),
    );

    /// Returns the payload of `token`, whose row is `packed`.
    fn of<'a>(self, shape: &MoeShape, token: usize, packed: In<'a, u32>) -> In<'a, u32>
    where
        Self: 'a;

    /// Writes the payload of a row that has arrived to row `row` of the result. All lanes of the
    /// warp together.
    ///
    /// # Safety
    /// On a GPU, the result and the row must be aligned to 16 bytes. The row must not be in the
    /// result.
    unsafe fn place<M: Machine>(
        self,
        warp: Warp<M>,
        shape: &MoeShape,
        from: Memory<u32>,
        out: Out<u32>,
        row: usize,
    );
}

/// Payload that is sent unchanged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raw<'a> {
    pub(super) x: In<'a, u32>,
}

impl Payload for Raw<'_> {
    #[inline(always)]
    unsafe fn prepare<M: Machine>(
        self,
        _block: Block<M>,
        _shape: &MoeShape,
        _own: &Own<'_>,
        _tokens: (usize, usize),
    ) {
    }

    #[inline(always)]
    fn of<'a>(self, shape: &MoeShape, token: usize, _packed: In<'a, u32>) -> In<'a, u32>
    where
        Self: 'a,
    {
        let words = shape.payload as usize;
        self.x.slice(token * words, words)
    }

    #[inline(always)]
    unsafe fn place<M: Machine>(
        self,
        warp: Warp<M>,
        shape: &MoeShape,
        from: Memory<u32>,
        out: Out<u32>,
        row: usize,
    ) {
        let words = shape.payload as usize;
        copy(warp, out.slice(row * words, words), from.slice(0, words));
    }
}

/// A launch of dispatch: the results, and the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dispatch<'a> {
    pub(super) shape: MoeShape,
    pub(super) rows: Window<'a, u32>,
    pub(super) meta: Out<'a, u32>,
    pub(super) out: Out<'a, u32>,
    pub(super) tokens_per_expert: InOut<'a, u64>,
    pub(super) wait_ns: InOut<'a, u64>,
}

impl<'a> Dispatch<'a> {
    /// Runs the halves that the flags name.
    ///
    /// # Safety
    /// As [`super::moe_dispatch`].
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn run<M: Machine>(
        &self,
        s: &Session<M>,
        payload: impl Payload,
        inputs: (In<i32>, In<f32>, In<u32>),
        own: (InOut<u32>, InOut<u32>),
    ) -> Result<(), Aborted> {
        // SAFETY: the precondition of this function.
        let own = unsafe { Own::new(s, self.shape, own)? };
        let mut step = own.step();
        if self.shape.flags.has(MoeFlags::SEND) {
            let may_send = step == IDLE || step == DISPATCHED || step == COMBINED;
            s.ensure(may_send, ORDER, u64::from(step), 0)?;
            // SAFETY: the precondition of this function.
            let routing = unsafe { Routing::new(s, self.shape, inputs, own)? };
            if self.shape.flags.has(MoeFlags::REUSE) {
                routing.reuse(s)?;
            } else {
                routing.run(s)?;
            }
            let tokens = (routing.first, routing.last);
            // SAFETY: the precondition of this function.
            unsafe { payload.prepare(s.block(), &self.shape, &own, tokens) };
            self.agree(s, &own, step)?;
            self.send(s, payload, &own, tokens);
            self.rows.raise_present(s, ROWS, Team::World, own.mask());
            step = SENT;
        }
        if self.shape.flags.has(MoeFlags::WAIT) {
            s.ensure(step == SENT, ORDER, u64::from(step), 0)?;
            let ranks = TimedMask::new(s, own.mask(), self.wait_ns);
            self.rows.wait_present(s, ROWS, Team::World, ranks)?;
            step = ARRIVED;
        }
        if self.shape.flags.has(MoeFlags::RECEIVE) {
            s.ensure(step == ARRIVED, ORDER, u64::from(step), 0)?;
            self.receive(s, payload, &own)?;
            step = DISPATCHED;
        }
        if s.block().is_leader() {
            own.set_step(step);
        }
        Ok(())
    }

    /// Writes the announcements, after the peers have read those of the last dispatch. In a bounded
    /// launch, also waits until the rows of all ranks fit. All lanes of the block together.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes, if a rank has no room or does not arrive.
    #[inline(always)]
    #[track_caller]
    fn agree<M: Machine>(&self, s: &Session<M>, own: &Own<'_>, step: u32) -> Result<(), Aborted> {
        let is_bounded = self.shape.flags.has(MoeFlags::BOUNDED);
        // After a dispatch without a combine, no signal proves that the peers have read the rows.
        let mut signal = if step == DISPATCHED { ENTRY } else { COUNTS };
        // A single call site does all waits.
        loop {
            if signal == COUNTS {
                // Lanes read what other lanes have written, and may send it to a network.
                s.block().publish();
                self.announce(s, own);
                if !is_bounded {
                    return Ok(());
                }
            }
            let mask = own.mask();
            self.rows.raise_present(s, signal, Team::World, mask);
            self.rows.wait_present(s, signal, Team::World, mask)?;
            if signal == FITS {
                s.block().publish();
                return Ok(());
            }
            if signal == COUNTS {
                let arrived = Arrived::new(s, self.shape, &self.rows, mask)?;
                arrived.check(s)?;
                self.check_capacity(s, &arrived)?;
            }
            signal = if signal == ENTRY { COUNTS } else { FITS };
        }
    }

    /// Writes the announcements. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    fn announce<M: Machine>(&self, s: &Session<M>, own: &Own<'_>) {
        let block = s.block();
        let (me, ranks, blocks) = place_of(s);
        let first = self.shape.announcement(me, block.index() as usize, blocks);
        for rank in block.elements_of_warp(ranks) {
            if let Some(peer) = s.peer(rank as u32)
                && !own.mask().has(rank as u32)
            {
                let announcement = own.announcement_to_send(s, rank as u32);
                let to = self.rows.at(peer).slice(first, announcement.len());
                to.write(s, block.warp(), announcement);
            }
        }
    }

    /// Fails the launch if the rows of the experts exceed the capacity. All lanes of the block
    /// together.
    #[inline(always)]
    #[track_caller]
    fn check_capacity<M: Machine>(
        &self,
        s: &Session<M>,
        arrived: &Arrived<'_>,
    ) -> Result<(), Aborted> {
        let mut rows = 0;
        for expert in s
            .block()
            .elements_of_block(self.shape.local_experts as usize)
        {
            rows += self.rows_of(arrived.selections_of_all(expert));
        }
        let (rows, capacity) = (s.block().sum(rows), u64::from(self.shape.capacity));
        s.ensure(rows <= capacity, CAPACITY, rows, capacity)
    }

    /// Returns the rows of an expert with `count` selections.
    #[inline(always)]
    fn rows_of(&self, count: u32) -> u64 {
        let alignment = if self.shape.alignment == 0 {
            1
        } else {
            self.shape.alignment
        };
        u64::from(count.div_ceil(alignment)) * u64::from(alignment)
    }

    /// Writes the rows of this block's tokens. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    fn send<M: Machine>(
        &self,
        s: &Session<M>,
        payload: impl Payload,
        own: &Own<'_>,
        (first, last): (usize, usize),
    ) {
        let (shape, block) = (&self.shape, s.block());
        let (me, ranks, blocks) = place_of(s);
        let (slots, k) = (own.slots(), shape.k());
        let header_words = shape.row_words() - shape.payload as usize;
        for item in block.elements_of_warp((last - first) * k) {
            let item = first * k + item;
            let slot = slots.get(item);
            if slot == NONE {
                continue;
            }
            let rank = own.rank(item);
            let Some(peer) = s.peer(rank) else {
                continue;
            };
            if own.mask().has(rank) {
                continue;
            }
            let token = item / k;
            let packed = own.packed_to_send(token);
            let row = shape.rows(me, ranks, blocks) + slot as usize * shape.row_stride();
            let row = self.rows.at(peer).slice(row, shape.row_words());
            let source = payload.of(shape, token, packed);
            row.write(s, block.warp(), source);
            row.slice(shape.payload as usize, header_words).write(
                s,
                block.warp(),
                packed.slice(shape.payload as usize, header_words),
            );
        }
    }

    /// Writes the results, after the rows have arrived. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    fn receive<M: Machine>(
        &self,
        s: &Session<M>,
        payload: impl Payload,
        own: &Own<'_>,
    ) -> Result<(), Aborted> {
        let arrived = Arrived::new(s, self.shape, &self.rows, own.mask())?;
        arrived.check(s)?;
        let layout = self.shape.meta(s.ranks() as usize);
        let local = self.shape.local_experts as usize;
        // SAFETY: the precondition of the kernel. Barriers order lanes that access a word; blocks
        // write different words.
        let (words, tokens_per_expert) = unsafe {
            (
                Memory::written(s, self.meta, layout.words)?,
                Memory::updated(s, self.tokens_per_expert, local)?,
            )
        };
        let meta = Description {
            layout,
            words,
            tokens_per_expert,
        };
        if self.shape.flags.has(MoeFlags::EXPERT_MAJOR) {
            self.place_experts(s, &arrived, own, &meta)?;
            self.copy_rows(s, payload, &arrived, own, &meta);
        } else {
            self.describe_ranks(s, &arrived, &meta);
        }
        s.vote(Unvoted::new(()))
    }

    /// Computes the first row of each expert, and of each rank's selections of it. All lanes of the
    /// block together.
    #[inline(always)]
    #[track_caller]
    fn place_experts<M: Machine>(
        &self,
        s: &Session<M>,
        arrived: &Arrived<'_>,
        own: &Own<'_>,
        meta: &Description<'_>,
    ) -> Result<(), Aborted> {
        let (block, shape) = (s.block(), &self.shape);
        let local = shape.local_experts as usize;
        let writes = block.index() == 0;
        let ids = meta.words.slice(meta.layout.ids_at, meta.layout.rows);
        // Uses 64 bits, because nothing bounds the sum of what a peer announces.
        let (mut first, mut start) = (0, 0u64);
        // All lanes stay in the loop, because of the scan.
        while first < local {
            let expert = first + block.rank() as usize;
            first += block.size() as usize;
            let count = match expert < local {
                true => arrived.selections_of_all(expert),
                false => 0,
            };
            let rows = self.rows_of(count);
            let (before, all) = block.exclusive_sum(rows);
            if expert < local {
                let first_row = start + before;
                let mut row = first_row as u32;
                if writes {
                    meta.words.set(expert, count);
                    meta.words.set(
                        meta.layout.offsets_at + expert + 1,
                        (first_row + rows) as u32,
                    );
                    let so_far = meta.tokens_per_expert.get(expert);
                    let count = u64::from(count);
                    meta.tokens_per_expert
                        .set(expert, so_far.wrapping_add(count));
                }
                let mut rank = 0;
                while rank < s.ranks() {
                    let counts = arrived.selections_of_ranks(rank, expert);
                    for i in 0..counts.len() {
                        if rank + (i as u32) < s.ranks() {
                            own.bases(rank + i as u32).set(expert, row);
                        }
                        row = row.wrapping_add(counts[i]);
                    }
                    rank += RANKS_AT_ONCE;
                }
            }
            start += all;
        }
        if writes && block.is_leader() {
            meta.words.set(meta.layout.offsets_at, 0);
        }
        let capacity = u64::from(shape.capacity);
        s.ensure(start <= capacity, CAPACITY, start, capacity)?;

        // Marks the rows between the experts, and those after the last one, as unused.
        let warp = block.warp();
        let mut expert = block.index() as usize * block.warps() as usize;
        expert += block.warp_index() as usize;
        while expert < local {
            let last = own.end_of(arrived, s.ranks(), expert);
            let next = match expert + 1 < local {
                true => own.bases(0).get(expert + 1),
                false => start as u32,
            };
            for row in warp.elements_of_group(next.saturating_sub(last) as usize) {
                ids.set(last as usize + row, NONE);
            }
            expert += (block.count() * block.warps()) as usize;
        }
        for row in block.elements(ids.len().saturating_sub(start as usize)) {
            ids.set(start as usize + row, NONE);
        }
        Ok(())
    }

    /// Copies the rows of this block to their experts. All lanes of the block together.
    #[inline(always)]
    fn copy_rows<M: Machine>(
        &self,
        s: &Session<M>,
        payload: impl Payload,
        arrived: &Arrived<'_>,
        own: &Own<'_>,
        meta: &Description<'_>,
    ) {
        let shape = &self.shape;
        let (scales_at, scales) = (shape.payload as usize, shape.scales as usize);
        let warp = s.block().warp();
        for (rank, selection) in arrived.selections_of_warp(s.block()) {
            let (expert, index) = (local_of(selection.place) as usize, selection.index);
            if index >= arrived.selections(rank, expert) {
                s.fault(SELECTION_INDEX, u64::from(rank), u64::from(index));
                continue;
            }
            let row = own.bases(rank).get(expert).wrapping_add(index) as usize;
            if row >= shape.capacity as usize {
                s.fault(CAPACITY, row as u64, u64::from(shape.capacity));
                continue; // The announcement has changed since it was checked.
            }
            let from = selection.row;
            // SAFETY: the precondition of the kernel; the row is in the window.
            unsafe { payload.place(warp, shape, from, self.out, row) };
            if scales > 0 && !shape.flags.has(MoeFlags::DEQUANTIZE) {
                let from = from.slice(scales_at, scales);
                let to = self.out.slice(shape.scales_at(), shape.scales_words());
                if shape.flags.has(MoeFlags::COLUMNS) {
                    for word in warp.elements_of_group(scales) {
                        let at = word * shape.scales_column() + row;
                        to.set(at, from.get(word));
                    }
                } else {
                    copy(warp, to.slice(row * scales, scales), from);
                }
            }
            if warp.is_leader() {
                meta.words.set(meta.layout.sources_at + 2 * row, rank);
                meta.words
                    .set(meta.layout.sources_at + 2 * row + 1, selection.token);
                meta.words.set(meta.layout.ids_at + row, expert as u32);
                meta.words
                    .set(meta.layout.weights_at + row, selection.weight);
            }
        }
    }

    /// Describes the rows in place. All lanes of the block together.
    #[inline(always)]
    fn describe_ranks<M: Machine>(
        &self,
        s: &Session<M>,
        arrived: &Arrived<'_>,
        meta: &Description<'_>,
    ) {
        let (block, shape) = (s.block(), &self.shape);
        let (k, most) = (shape.k(), shape.max_tokens as usize);
        for rank in 0..s.ranks() {
            let (first, count) = arrived.of_block(rank);
            let region = rank as usize * most;
            for item in block.elements_of_block(count * k) {
                let (row, k_of) = (first + item / k, item % k);
                let words = arrived.row(rank, row);
                let selection = arrived.selection(words, k_of);
                let row = region + row;
                let expert = if arrived.is_here(selection.place) {
                    local_of(selection.place)
                } else {
                    NONE
                };
                meta.words.set(meta.layout.ids_at + row * k + k_of, expert);
                meta.words
                    .set(meta.layout.weights_at + row * k + k_of, selection.weight);
                if k_of == 0 {
                    meta.words.set(meta.layout.sources_at + 2 * row, rank);
                    meta.words
                        .set(meta.layout.sources_at + 2 * row + 1, selection.token);
                }
            }
            let total = arrived.total(rank) as usize;
            for item in block.elements(most.saturating_sub(total) * k) {
                meta.words
                    .set(meta.layout.ids_at + (region + total) * k + item, NONE);
            }
        }
        if block.index() == 0 {
            for rank in block.elements_of_block(s.ranks() as usize) {
                meta.words.set(rank, arrived.total(rank as u32));
            }
            for expert in block.elements_of_block(shape.local_experts as usize) {
                let count = u64::from(arrived.selections_of_all(expert));
                let so_far = meta.tokens_per_expert.get(expert);
                meta.tokens_per_expert
                    .set(expert, so_far.wrapping_add(count));
            }
        }
    }
}

/// The description of the result, and the statistics.
#[derive(Clone, Copy, Debug)]
struct Description<'a> {
    layout: Meta,
    words: Memory<'a, u32>,
    tokens_per_expert: Memory<'a, u64>,
}

impl Own<'_> {
    /// Returns the row after the last one of an expert.
    #[inline(always)]
    fn end_of(&self, arrived: &Arrived<'_>, ranks: u32, expert: usize) -> u32 {
        let last = ranks - 1;
        let first = self.bases(last).get(expert);
        first.wrapping_add(arrived.selections(last, expert))
    }
}

/// The rows that have arrived for this rank. A peer can write its announcements and rows at any
/// time, so nothing that they contain is used as an index without a check.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived<'a> {
    shape: MoeShape,
    words: Memory<'a, u32>,
    mask: Mask<'a>,
    me: u32,
    block: usize,
    blocks: usize,
    ranks: usize,
}

/// A selection in a row that has arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    /// The row.
    pub(super) row: Memory<'a, u32>,
    /// Index of the row in the region of its rank.
    pub(super) slot: usize,
    /// The token.
    pub(super) token: u32,
    /// Number of the selection among those of the token.
    pub(super) k: usize,
    /// The place of the expert.
    pub(super) place: u32,
    /// Index among the selections of the expert by the rank.
    pub(super) index: u32,
    /// Bits of the weight.
    pub(super) weight: u32,
}

impl<'a> Arrived<'a> {
    /// Wraps this rank's part of the window, after a wait for the signals of the ranks that the
    /// mask includes.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes, if the window has been freed.
    #[inline(always)]
    pub(super) fn new<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        rows: &Window<'a, u32>,
        mask: Mask<'a>,
    ) -> Result<Self, Aborted> {
        let words = rows.local(s)?.elements().as_in();
        let (_, ranks, blocks) = place_of(s);
        Ok(Self {
            shape,
            // SAFETY: after the wait, honest peers write the words only in the next dispatch; what
            // others write is checked before it is used.
            words: unsafe { Memory::of(words) },
            mask,
            me: s.rank(),
            block: s.block().index() as usize,
            blocks,
            ranks,
        })
    }

    /// Returns a word of the announcement of `rank` for this block; 0 if the rank is masked.
    #[inline(always)]
    fn announced(&self, rank: u32, word: usize) -> u32 {
        if self.mask.has(rank) {
            return 0;
        }
        let first = self
            .shape
            .announcement(rank as usize, self.block, self.blocks);
        self.words.get(first + word)
    }

    /// Returns the number of rows from `rank`.
    #[inline(always)]
    fn total(&self, rank: u32) -> u32 {
        let (total, most) = (self.announced(rank, 0), self.shape.max_tokens);
        if total < most { total } else { most }
    }

    /// Returns the first row from `rank` of this block, and the number of rows.
    #[inline(always)]
    pub(super) fn of_block(&self, rank: u32) -> (usize, usize) {
        let (first, count) = (self.announced(rank, 1), self.announced(rank, 2));
        if self.is_possible(first, count) {
            (first as usize, count as usize)
        } else {
            (0, 0)
        }
    }

    #[inline(always)]
    fn is_possible(&self, first: u32, count: u32) -> bool {
        let most = self.shape.max_tokens;
        first <= most && count <= most - first
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
    fn selections_of_ranks(&self, first: u32, expert: usize) -> [u32; RANKS_AT_ONCE as usize] {
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
    fn selections_of_all(&self, expert: usize) -> u32 {
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
    fn check<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        let most = self.shape.max_tokens;
        for rank in s.block().elements_of_block(self.ranks) {
            let rank = rank as u32;
            let (total, first) = (self.announced(rank, 0), self.announced(rank, 1));
            let count = self.announced(rank, 2);
            if total > most || !self.is_possible(first, count) || first + count > total {
                s.fault(ANNOUNCEMENT, u64::from(rank), u64::from(total));
            }
        }
        s.vote(Unvoted::new(()))
    }

    /// Returns row `slot` from `rank`.
    #[inline(always)]
    fn row(&self, rank: u32, slot: usize) -> Memory<'a, u32> {
        let first = self.shape.rows(rank as usize, self.ranks, self.blocks);
        let first = first + slot * self.shape.row_stride();
        self.words.slice(first, self.shape.row_words())
    }

    /// Returns selection `k` of a row, without the slot.
    #[inline(always)]
    fn selection(&self, row: Memory<'a, u32>, k: usize) -> Selection<'a> {
        let header = self.shape.header_at();
        let at = header + HEADER + SELECTION * k;
        Selection {
            row,
            slot: 0,
            token: row.get(header),
            k,
            place: row.get(at),
            index: row.get(at + 1),
            weight: row.get(at + 2),
        }
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

    /// Returns true if the expert at `place` is on this rank.
    #[inline(always)]
    fn is_here(&self, place: u32) -> bool {
        place != NONE && rank_of(place) == self.me && local_of(place) < self.shape.local_experts
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
    /// Numbers the selections of the next ranks. All lanes of the warp together.
    #[inline(always)]
    #[track_caller]
    fn number(&mut self, lane: u32, lanes: u32) {
        let rank = self.next_rank + lane;
        let (mut first, mut count) = (0, 0);
        if (rank as usize) < self.arrived.ranks {
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
            let left = self.arrived.ranks as u32 - self.first_rank;
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
            let row = self.arrived.row(self.rank, self.slot as usize);
            let selection = self.arrived.selection(row, self.k as usize);
            is_here = self.arrived.is_here(selection.place);
        }
        self.here = match M::LANES {
            1 => u64::from(is_here),
            _ => self.block.warp().ballot(is_here),
        };
    }
}

impl<'a, M: Machine> Iterator for Selections<'a, M> {
    /// The rank that has sent the selection, and the selection.
    type Item = (u32, Selection<'a>);

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
                if self.next_rank as usize >= self.arrived.ranks {
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
            let row = self.arrived.row(rank, slot as usize);
            let selection = self.arrived.selection(row, k as usize);
            let slot = slot as usize;
            return Some((rank, Selection { slot, ..selection }));
        }
    }
}

/// Returns this rank, the number of ranks and the number of blocks.
#[inline(always)]
fn place_of<M: Machine>(s: &Session<M>) -> (usize, usize, usize) {
    (
        s.rank() as usize,
        s.ranks() as usize,
        s.block().count() as usize,
    )
}

/// Copies words with a warp.
#[inline(always)]
pub(super) fn copy<M: Machine>(warp: Warp<M>, to: Out<u32>, from: Memory<u32>) {
    let words = if to.len() < from.len() {
        to.len()
    } else {
        from.len()
    };
    // SAFETY: both ranges have the words. They do not overlap: one is in the window, the other is
    // not (precondition of the kernel).
    unsafe { bulk::copy_shared(warp, to.as_ptr().cast(), from.as_ptr().cast(), 4 * words) };
}
