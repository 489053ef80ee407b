//! Dispatch: rows to the ranks of their experts.

use fusewire_device::arch;
use fusewire_device::bulk;
use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Block, Group, In, InOut, Machine, Out, Received, Team, Warp, Window};

use super::routing::{Own, Routing};
use super::shape::{
    ANNOUNCED, HEADER, Meta, MoeFlags, MoeShape, NONE, SELECTION, local_of, rank_of,
};
use super::{
    ANNOUNCEMENT, CAPACITY, COMBINED, COUNTS, DISPATCHED, ENTRY, FITS, IDLE, ORDER, ROWS, SENT,
};

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
}

/// Payload that is sent as it is.
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
}

/// A launch of dispatch: the results, and the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dispatch<'a> {
    pub(super) shape: MoeShape,
    pub(super) rows: Window<'a, u32>,
    pub(super) meta: Out<'a, u32>,
    pub(super) out: Out<'a, u32>,
    pub(super) scales: Out<'a, u32>,
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
        own: InOut<u32>,
    ) -> Result<(), Aborted> {
        let own = Own::new(s, self.shape, own)?;
        let mut step = own.step();
        if self.shape.flags.has(MoeFlags::SEND) {
            let may_send = step == IDLE || step == DISPATCHED || step == COMBINED;
            s.ensure(may_send, ORDER, u64::from(step), 0)?;
            if step == DISPATCHED {
                // Nothing has told that the peers have read the rows of the last dispatch.
                self.rows.raise_all(s, ENTRY, Team::World);
                self.rows.wait_all(s, ENTRY, Team::World)?;
            }
            let routing = Routing::new(s, self.shape, inputs, own)?;
            routing.run(s)?;
            let tokens = (routing.first, routing.last);
            // SAFETY: the precondition of this function.
            unsafe { payload.prepare(s.block(), &self.shape, &own, tokens) };
            s.block().sync();
            self.announce(s, &own);
            if self.shape.flags.has(MoeFlags::BOUNDED) {
                self.rows.raise_all(s, COUNTS, Team::World);
                let counts = self.rows.wait_all(s, COUNTS, Team::World)?;
                let arrived = Arrived::new(s, self.shape, counts);
                arrived.check(s)?;
                self.check_capacity(s, &arrived)?;
                self.rows.raise_all(s, FITS, Team::World);
                self.rows.wait_all(s, FITS, Team::World)?;
            }
            self.send(s, payload, &own, tokens);
            self.rows.raise_all(s, ROWS, Team::World);
            step = SENT;
        }
        if self.shape.flags.has(MoeFlags::RECEIVE) {
            s.ensure(step == SENT, ORDER, u64::from(step), 0)?;
            self.receive(s, &own)?;
            step = DISPATCHED;
        }
        if s.block().is_leader() {
            own.set_step(step);
        }
        Ok(())
    }

    /// Writes the announcements. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    fn announce<M: Machine>(&self, s: &Session<M>, own: &Own<'_>) {
        let block = s.block();
        let (me, ranks, blocks) = place_of(s);
        let first = self.shape.announcement(me, block.index() as usize, blocks);
        for rank in block.elements_of_warp(ranks) {
            if let Some(peer) = s.peer(rank as u32) {
                let announcement = own.announcement(rank as u32).as_in();
                let to = self.rows.at(peer).slice(first, announcement.len());
                to.write(s, block.warp(), announcement);
            }
        }
    }

    /// Fails the launch if the announced rows exceed the capacity. All lanes of the block together.
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
        let (rows, capacity) = (s.block().sum(rows), self.shape.capacity);
        s.ensure(
            rows <= capacity,
            CAPACITY,
            u64::from(rows),
            u64::from(capacity),
        )
    }

    /// Returns the rows of an expert with `count` selections.
    #[inline(always)]
    fn rows_of(&self, count: u32) -> u32 {
        let alignment = if self.shape.alignment == 0 {
            1
        } else {
            self.shape.alignment
        };
        count.div_ceil(alignment) * alignment
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
            let Some(peer) = s.peer(own.rank(item)) else {
                continue;
            };
            let token = item / k;
            let packed = own.packed(token).as_in();
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

    /// Waits for the rows, and makes the results. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    fn receive<M: Machine>(&self, s: &Session<M>, own: &Own<'_>) -> Result<(), Aborted> {
        let block = s.block();
        let start = if self.wait_ns.is_empty() {
            0
        } else {
            arch::clock_ns()
        };
        let rows = self.rows.wait_each(s, ROWS, Team::World, |rank| {
            let rank = rank.index() as usize;
            if block.index() == 0 && !self.wait_ns.is_empty() {
                let waited = arch::clock_ns().saturating_sub(start);
                self.wait_ns
                    .set(rank, self.wait_ns.get(rank).wrapping_add(waited));
            }
        })?;
        let arrived = Arrived::new(s, self.shape, rows);
        arrived.check(s)?;
        let meta = self.shape.meta(s.ranks() as usize);
        self.meta.require(s, meta.words)?;
        if self.shape.flags.has(MoeFlags::EXPERT_MAJOR) {
            self.place_experts(s, &arrived, own, &meta)?;
            self.copy_rows(s, &arrived, own, &meta);
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
        meta: &Meta,
    ) -> Result<(), Aborted> {
        let (block, shape) = (s.block(), &self.shape);
        let local = shape.local_experts as usize;
        let writes = block.index() == 0;
        let ids = self.meta.slice(meta.ids_at, meta.rows);
        let (mut first, mut start) = (0, 0);
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
                let mut row = start + before;
                if writes {
                    self.meta.set(expert, count);
                    self.meta.set(meta.offsets_at + expert + 1, row + rows);
                    let so_far = self.tokens_per_expert.get(expert);
                    let count = u64::from(count);
                    self.tokens_per_expert
                        .set(expert, so_far.wrapping_add(count));
                }
                for rank in 0..s.ranks() {
                    own.bases(rank).set(expert, row);
                    row += arrived.selections(rank, expert);
                }
            }
            start += all;
        }
        if writes && block.is_leader() {
            self.meta.set(meta.offsets_at, 0);
        }
        let fits = start <= shape.capacity;
        s.ensure(fits, CAPACITY, u64::from(start), u64::from(shape.capacity))?;

        // No expert has the rows between the experts, and those after the last.
        for expert in 0..local {
            let last = own.end_of(arrived, s.ranks(), expert) as usize;
            let next = if expert + 1 < local {
                own.bases(0).get(expert + 1)
            } else {
                shape.capacity
            };
            for row in block.elements((next as usize).saturating_sub(last)) {
                ids.set(last + row, NONE);
            }
        }
        if local == 0 {
            for row in block.elements(meta.rows) {
                ids.set(row, NONE);
            }
        }
        Ok(())
    }

    /// Copies the rows of this block to their experts. All lanes of the block together.
    #[inline(always)]
    fn copy_rows<M: Machine>(
        &self,
        s: &Session<M>,
        arrived: &Arrived<'_>,
        own: &Own<'_>,
        meta: &Meta,
    ) {
        let shape = &self.shape;
        let (payload, scales) = (shape.payload as usize, shape.scales as usize);
        arrived.each_selection(s, |warp, rank, selection| {
            let (expert, index) = (local_of(selection.place) as usize, selection.index);
            if index >= arrived.selections(rank, expert) {
                s.fault(ANNOUNCEMENT, u64::from(rank), u64::from(index));
                return;
            }
            let row = (own.bases(rank).get(expert) + index) as usize;
            let from = selection.row;
            copy(
                warp,
                self.out.slice(row * payload, payload),
                from.slice(0, payload),
            );
            if scales > 0 {
                let to = self.scales.slice(row * scales, scales);
                copy(warp, to, from.slice(payload, scales));
            }
            if warp.is_leader() {
                self.meta.set(meta.sources_at + 2 * row, rank);
                self.meta
                    .set(meta.sources_at + 2 * row + 1, selection.token);
                self.meta.set(meta.ids_at + row, expert as u32);
                self.meta.set(meta.weights_at + row, selection.weight);
            }
        });
    }

    /// Describes the rows where they lie. All lanes of the block together.
    #[inline(always)]
    fn describe_ranks<M: Machine>(&self, s: &Session<M>, arrived: &Arrived<'_>, meta: &Meta) {
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
                let is_here = selection.place != NONE && rank_of(selection.place) == s.rank();
                let expert = if is_here {
                    local_of(selection.place)
                } else {
                    NONE
                };
                self.meta.set(meta.ids_at + row * k + k_of, expert);
                self.meta
                    .set(meta.weights_at + row * k + k_of, selection.weight);
                if k_of == 0 {
                    self.meta.set(meta.sources_at + 2 * row, rank);
                    self.meta
                        .set(meta.sources_at + 2 * row + 1, selection.token);
                }
            }
            let total = arrived.total(rank) as usize;
            for item in block.elements(most.saturating_sub(total) * k) {
                self.meta
                    .set(meta.ids_at + (region + total) * k + item, NONE);
            }
        }
        if block.index() == 0 {
            for rank in block.elements_of_block(s.ranks() as usize) {
                self.meta.set(rank, arrived.total(rank as u32));
            }
            for expert in block.elements_of_block(shape.local_experts as usize) {
                let count = u64::from(arrived.selections_of_all(expert));
                let so_far = self.tokens_per_expert.get(expert);
                self.tokens_per_expert
                    .set(expert, so_far.wrapping_add(count));
            }
        }
    }
}

impl Own<'_> {
    /// Returns the row after the last one of an expert.
    #[inline(always)]
    fn end_of(&self, arrived: &Arrived<'_>, ranks: u32, expert: usize) -> u32 {
        let last = ranks - 1;
        self.bases(last).get(expert) + arrived.selections(last, expert)
    }
}

/// The rows that have arrived for this rank. A peer can write its announcements and rows at any
/// time, so nothing that they contain is used as an index without a check.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived<'a> {
    shape: MoeShape,
    words: In<'a, u32>,
    block: usize,
    blocks: usize,
    ranks: usize,
}

/// A selection in a row that has arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selection<'a> {
    /// The row.
    pub(super) row: In<'a, u32>,
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
    /// Wraps this rank's part of the window, after the wait for the rows.
    #[inline(always)]
    pub(super) fn new<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        rows: Received<'a, u32>,
    ) -> Self {
        Self::wrap(s, shape, rows.slice(0, rows.len()))
    }

    /// Wraps this rank's part of the window, in a launch after the one that has waited.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes, if the window has been freed.
    #[inline(always)]
    pub(super) fn local<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        rows: &Window<'a, u32>,
    ) -> Result<Self, Aborted> {
        Ok(Self::wrap(s, shape, rows.local(s)?.elements().as_in()))
    }

    #[inline(always)]
    fn wrap<M: Machine>(s: &Session<M>, shape: MoeShape, words: In<'a, u32>) -> Self {
        let (_, ranks, blocks) = place_of(s);
        Self {
            shape,
            words,
            block: s.block().index() as usize,
            blocks,
            ranks,
        }
    }

    /// Returns a word of the announcement of `rank` for this block.
    #[inline(always)]
    fn announced(&self, rank: u32, word: usize) -> u32 {
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
    fn selections(&self, rank: u32, expert: usize) -> u32 {
        let count = self.announced(rank, ANNOUNCED + expert);
        let most = self.shape.max_tokens * self.shape.k() as u32;
        if count < most { count } else { most }
    }

    /// Returns the number of selections of an expert of this rank by all ranks.
    #[inline(always)]
    fn selections_of_all(&self, expert: usize) -> u32 {
        let mut count = 0;
        for rank in 0..self.ranks {
            count += self.selections(rank as u32, expert);
        }
        count
    }

    /// Fails the launch if a rank has announced what is not possible. All lanes of the block
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
            let [total, first, count] = [0, 1, 2].map(|word| self.announced(rank, word));
            if total > most || !self.is_possible(first, count) || first + count > total {
                s.fault(ANNOUNCEMENT, u64::from(rank), u64::from(total));
            }
        }
        s.vote(Unvoted::new(()))
    }

    /// Returns row `slot` from `rank`.
    #[inline(always)]
    fn row(&self, rank: u32, slot: usize) -> In<'a, u32> {
        let first = self.shape.rows(rank as usize, self.ranks, self.blocks);
        let first = first + slot * self.shape.row_stride();
        self.words.slice(first, self.shape.row_words())
    }

    /// Returns selection `k` of a row, without the slot.
    #[inline(always)]
    fn selection(&self, row: In<'a, u32>, k: usize) -> Selection<'a> {
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

    /// Calls `work` by this lane's warp for a part of the selections of this rank's experts in the
    /// rows of this block.
    #[inline(always)]
    pub(super) fn each_selection<M: Machine>(
        &self,
        s: &Session<M>,
        mut work: impl FnMut(Warp<M>, u32, Selection<'a>),
    ) {
        let (block, k) = (s.block(), self.shape.k());
        let (warp, warps) = (block.warp_index() as usize, block.warps() as usize);
        // Number of selections before those of the rank, modulo the number of warps.
        let mut before = 0;
        for rank in 0..self.ranks as u32 {
            let (first, count) = self.of_block(rank);
            let mut item = (warp + warps - before) % warps;
            while item < count * k {
                let slot = first + item / k;
                let selection = self.selection(self.row(rank, slot), item % k);
                if selection.place != NONE
                    && rank_of(selection.place) == s.rank()
                    && local_of(selection.place) < self.shape.local_experts
                {
                    work(block.warp(), rank, Selection { slot, ..selection });
                }
                item += warps;
            }
            before = (before + count * k) % warps;
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

/// Copies words by a warp.
#[inline(always)]
fn copy<M: Machine>(warp: Warp<M>, to: Out<u32>, from: In<u32>) {
    let words = if to.len() < from.len() {
        to.len()
    } else {
        from.len()
    };
    // SAFETY: both ranges have the words. They do not overlap: one is in the window, the other is
    // not (precondition of the kernel).
    unsafe { bulk::copy_shared(warp, to.as_ptr().cast(), from.as_ptr().cast(), 4 * words) };
}
