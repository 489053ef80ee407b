//! Dispatch: sends rows to the ranks of their experts.

use fusewire_device::bulk;
use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Block, Group, In, InOut, Machine, Out, Team, Warp, Window};

use super::arrived::{Arrived, RANKS_AT_ONCE, place_of};
use super::fp8::{Quantizer, dequantize};
use super::mask::TimedMask;
use super::memory::Memory;
use super::routing::{Own, Routing};
use super::shape::{Meta, MoeFlags, MoeShape, NONE, local_of, with_element};
use super::{
    ARRIVED, CAPACITY, COMBINED, COUNTS, DISPATCHED, ENTRY, FITS, IDLE, ORDER, ROWS,
    SELECTION_INDEX, SENT,
};

/// A launch of dispatch: the tokens, the results, and the window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dispatch<'a> {
    pub(super) shape: MoeShape,
    pub(super) rows: Window<'a, u32>,
    pub(super) x: In<'a, u32>,
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
        inputs: (In<i32>, In<f32>, In<u32>),
        own: (InOut<'a, u32>, InOut<'a, u32>),
    ) -> Result<(), Aborted> {
        // SAFETY: the precondition of this function.
        let own = unsafe { Own::new(s, self.shape, own)? };
        let (flags, is_staged) = (self.shape.flags, self.shape.is_staged());
        let is_round = flags.has(MoeFlags::ROUND);
        let (mut step, round) = (own.step(), if is_round { own.round() } else { 0 });
        if is_round && step == DISPATCHED && round == own.rounds() {
            return Ok(()); // All rounds are complete; launches are enqueued for `max_tokens`.
        }
        if flags.has(MoeFlags::SEND) {
            let may_send = match is_round {
                true => step == SENT,
                false => step == IDLE || step == DISPATCHED || step == COMBINED,
            };
            s.ensure(may_send, ORDER, u64::from(step), 0)?;
            let tokens = if is_round {
                self.shape
                    .tokens_of_round(s.block().slice(own.tokens(), 1), round)
            } else {
                // SAFETY: the precondition of this function.
                let routing = unsafe { Routing::new(s, self.shape, inputs, own)? };
                if flags.has(MoeFlags::REUSE) {
                    routing.reuse(s)?;
                } else {
                    routing.run(s)?;
                }
                (routing.first, routing.last)
            };
            if is_round || !is_staged {
                // SAFETY: the precondition of this function.
                unsafe { self.quantize(s.block(), &own, tokens) };
            }
            let signal = match is_round {
                true => NONE,
                // Without a combine, no signal proves that the peers have read the rows.
                false if step == DISPATCHED => ENTRY,
                false => COUNTS,
            };
            self.agree(s, &own, signal)?;
            if is_round || !is_staged {
                self.send(s, &own, tokens, round);
                self.rows.raise_present(s, ROWS, Team::World, own.mask());
            } else {
                self.describe_staged(s, &own)?;
            }
            step = SENT;
        }
        if flags.has(MoeFlags::WAIT) {
            s.ensure(step == SENT, ORDER, u64::from(step), 0)?;
            let ranks = TimedMask::new(s, own.mask(), self.wait_ns);
            self.rows.wait_present(s, ROWS, Team::World, ranks)?;
            step = ARRIVED;
        }
        if flags.has(MoeFlags::RECEIVE) {
            s.ensure(step == ARRIVED, ORDER, u64::from(step), 0)?;
            self.receive(s, &own, round)?;
            let rounds = if is_round { own.rounds() } else { 1 };
            step = if round + 1 < rounds { SENT } else { DISPATCHED };
        }
        if s.block().is_leader() {
            own.set_step(step);
            if is_round {
                own.set_round(round + 1);
            }
        }
        Ok(())
    }

    /// Adds `count` to the number of tokens of an expert. One lane.
    #[inline(always)]
    fn count_tokens(&self, expert: usize, count: u32) {
        let so_far = self.tokens_per_expert.get(expert);
        self.tokens_per_expert
            .set(expert, so_far.wrapping_add(u64::from(count)));
    }

    /// Awaits the signal with which a launch begins: [`NONE`] if the peers have certainly read the
    /// last rows. From [`ENTRY`] or [`COUNTS`] on, also writes the announcements. With staging or
    /// in a bounded launch, waits for those of the other ranks, and in a bounded launch also until
    /// the rows of all ranks fit. All lanes of the block together.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes, if a rank has no room or does not arrive.
    #[inline(always)]
    #[track_caller]
    fn agree<M: Machine>(
        &self,
        s: &Session<M>,
        own: &Own<'a>,
        mut signal: u32,
    ) -> Result<(), Aborted> {
        let is_bounded = self.shape.flags.has(MoeFlags::BOUNDED);
        let is_staged = self.shape.is_staged();
        // A single call site does all waits.
        loop {
            // Lanes read what other lanes have written, and may send it to a network.
            s.block().publish();
            if signal == COUNTS {
                self.announce(s, own);
            }
            if signal == NONE || signal == COUNTS && !is_bounded && !is_staged {
                return Ok(());
            }
            let mask = own.mask();
            self.rows.raise_present(s, signal, Team::World, mask);
            let is_timed = is_staged && signal == COUNTS;
            let len = if is_timed { self.wait_ns.len() } else { 0 };
            let timed = TimedMask::new(s, mask, self.wait_ns.slice(0, len));
            self.rows.wait_present(s, signal, Team::World, timed)?;
            if signal == COUNTS {
                let arrived = Arrived::new(s, self.shape, &self.rows, *own, 0)?;
                arrived.check(s)?;
                if is_bounded {
                    self.check_capacity(s, &arrived)?;
                }
            }
            signal = match signal {
                ENTRY => COUNTS,
                COUNTS if is_bounded => FITS,
                _ => NONE,
            };
        }
    }

    /// Writes the announcements. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    fn announce<M: Machine>(&self, s: &Session<M>, own: &Own<'a>) {
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
        if self.shape.flags.has(MoeFlags::EXPERT_MAJOR) {
            let local = self.shape.local_experts as usize;
            for expert in s.block().elements_of_block(local) {
                rows += self.rows_of(arrived.selections_of_all(expert));
            }
        } else {
            for rank in s.block().elements_of_block(s.ranks() as usize) {
                rows += u64::from(arrived.total(rank as u32));
            }
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

    /// Quantizes tokens `first .. last`, if they are sent in fp8. All lanes of the block together;
    /// the caller synchronizes.
    ///
    /// # Safety
    /// On a GPU, the tokens must be aligned to 16 bytes.
    #[inline(always)]
    #[track_caller]
    unsafe fn quantize<M: Machine>(
        &self,
        block: Block<M>,
        own: &Own<'a>,
        (first, last): (usize, usize),
    ) {
        let shape = &self.shape;
        if !shape.flags.has(MoeFlags::FP8) {
            return;
        }
        let (words, count) = (shape.input_words(), last - first);
        let quantizer = Quantizer {
            source: self.x.slice(first * words, count * words),
            row: words,
            target: own.packed(self.first_packed(block, first), count),
            stride: shape.header_at(),
            payload: shape.payload as usize,
            is_ue8m0: shape.flags.has(MoeFlags::UE8M0),
        };
        with_element!(shape.flags, T => {
            // SAFETY: the precondition of this function.
            unsafe { quantizer.run::<M, T>((block.machine(), block), count) };
        });
    }

    /// Returns the index of the quantized row of token `first`, the first one of the block or of
    /// the round.
    #[inline(always)]
    fn first_packed<M: Machine>(&self, block: Block<M>, first: usize) -> usize {
        match self.shape.staging {
            0 => first,
            staging => block.index() as usize * staging as usize,
        }
    }

    /// Writes the rows of tokens `first .. last`. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    fn send<M: Machine>(
        &self,
        s: &Session<M>,
        own: &Own<'a>,
        (first, last): (usize, usize),
        round: usize,
    ) {
        let (shape, block) = (&self.shape, s.block());
        let (me, ranks, blocks) = place_of(s);
        let (slots, k) = (own.slots(), shape.k());
        let packed = self.first_packed(block, first);
        let region = shape.region(ranks, (me, block.index() as usize), blocks, round);
        if shape.is_staged() {
            self.send_counts(s, own, (first, last), region);
        }
        for item in block.elements_of_warp((last - first) * k) {
            let (token, item) = (item / k, first * k + item);
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
            let row = if shape.is_staged() {
                let before = own.announcement(rank).get(1);
                region + shape.staged_row(slot.wrapping_sub(before) as usize)
            } else {
                shape.rows(me, ranks, blocks) + slot as usize * shape.row_stride()
            };
            let row = self.rows.at(peer).slice(row, shape.row_words());
            let words = shape.payload as usize;
            let source = if shape.flags.has(MoeFlags::FP8) {
                own.packed_to_send(packed + token)
            } else {
                self.x.slice((first + token) * words, words)
            };
            row.write(s, block.warp(), source);
            let header = row.slice(shape.header_at(), shape.header_words());
            header.write(s, block.warp(), own.header_to_send(first + token));
        }
    }

    /// Writes the results, after the rows have arrived: with staging, those of a round. All lanes
    /// of the block together.
    #[inline(always)]
    #[track_caller]
    fn receive<M: Machine>(
        &self,
        s: &Session<M>,
        own: &Own<'a>,
        round: usize,
    ) -> Result<(), Aborted> {
        let arrived = Arrived::new(s, self.shape, &self.rows, *own, round)?;
        // SAFETY: the precondition of the kernel.
        let meta = unsafe { Description::new(s, self.shape, self.meta)? };
        let is_expert_major = self.shape.flags.has(MoeFlags::EXPERT_MAJOR);
        if self.shape.is_staged() {
            self.keep(s, &arrived, own, &meta, round);
            s.block().sync();
        } else {
            arrived.check(s)?;
            if is_expert_major {
                self.place_experts(s, &arrived, own, &meta)?;
            } else {
                self.describe_ranks(s, &arrived, &meta);
            }
        }
        if is_expert_major {
            self.copy_rows(s, &arrived, own, &meta);
        }
        s.vote(Unvoted::new(()))
    }

    /// Computes the first row of each expert, and of each rank's selections of it. All lanes of the
    /// block together.
    #[inline(always)]
    #[track_caller]
    pub(super) fn place_experts<M: Machine>(
        &self,
        s: &Session<M>,
        arrived: &Arrived<'_>,
        own: &Own<'a>,
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
                    self.count_tokens(expert, count);
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
        arrived: &Arrived<'_>,
        own: &Own<'_>,
        meta: &Description<'_>,
    ) {
        let warp = s.block().warp();
        for (rank, selection) in arrived.selections_of_warp(s.block()) {
            let (expert, index) = (local_of(selection.place) as usize, selection.index);
            if index >= arrived.selections(rank, expert) {
                s.fault(SELECTION_INDEX, u64::from(rank), u64::from(index));
                continue;
            }
            let row = own.bases(rank).get(expert).wrapping_add(index) as usize;
            if row >= self.shape.capacity as usize {
                s.fault(CAPACITY, row as u64, u64::from(self.shape.capacity));
                continue; // The announcement has changed since it was checked.
            }
            self.copy_row(warp, arrived.row(rank, selection.slot), row);
            if warp.is_leader() {
                meta.set_source(row, rank, selection.token);
                meta.set_selection(row, expert as u32, selection.weight);
            }
        }
    }

    /// Copies the payload and scales of a row to row `row` of the result. All lanes of the warp
    /// together.
    #[inline(always)]
    pub(super) fn copy_row<M: Machine>(&self, warp: Warp<M>, from: Memory<u32>, row: usize) {
        let shape = &self.shape;
        let (words, scales) = (shape.payload as usize, shape.scales as usize);
        if shape.flags.has(MoeFlags::DEQUANTIZE) {
            // SAFETY: the precondition of the kernel; the row is in a window.
            return unsafe { dequantize(warp, shape, from, self.out, row) };
        }
        let to = self.out.slice(row * words, words);
        copy(warp, to, from.slice(0, words));
        if scales > 0 {
            let from = from.slice(words, scales);
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
                let (slot, k_of) = (first + item / k, item % k);
                let row = region + slot;
                let selection = arrived.selection(rank, slot, k_of);
                let expert = arrived.expert_here(selection.place);
                meta.set_selection(row * k + k_of, expert, selection.weight);
                if k_of == 0 {
                    meta.set_source(row, rank, selection.token);
                }
            }
            let total = arrived.total(rank) as usize;
            for item in block.elements(most.saturating_sub(total) * k) {
                meta.words
                    .set(meta.layout.ids_at + (region + total) * k + item, NONE);
            }
        }
        if block.index() == 0 {
            self.count_ranks(s, arrived, meta);
        }
    }

    /// Writes the numbers of rows from each rank, and the statistics. Block 0.
    #[inline(always)]
    pub(super) fn count_ranks<M: Machine>(
        &self,
        s: &Session<M>,
        arrived: &Arrived<'_>,
        meta: &Description<'_>,
    ) {
        let block = s.block();
        for rank in block.elements_of_block(s.ranks() as usize) {
            meta.words.set(rank, arrived.total(rank as u32));
        }
        for expert in block.elements_of_block(self.shape.local_experts as usize) {
            self.count_tokens(expert, arrived.selections_of_all(expert));
        }
    }
}

/// The description of the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Description<'a> {
    pub(super) layout: Meta,
    pub(super) words: Memory<'a, u32>,
}

impl<'a> Description<'a> {
    /// Checks the number of words.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes.
    ///
    /// # Safety
    /// During the launch, nothing else may access the words.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn new<M: Machine>(
        s: &Session<M>,
        shape: MoeShape,
        words: Out<'a, u32>,
    ) -> Result<Self, Aborted> {
        let layout = shape.meta(s.ranks() as usize);
        // SAFETY: the precondition of this function. Barriers order lanes that access a word;
        // blocks write different words.
        let words = unsafe { Memory::written(s, words, layout.words)? };
        Ok(Self { layout, words })
    }

    /// Sets the rank and token of a row.
    #[inline(always)]
    pub(super) fn set_source(&self, row: usize, rank: u32, token: u32) {
        let at = self.layout.sources_at + 2 * row;
        self.words.set(at, rank);
        self.words.set(at + 1, token);
    }

    /// Sets the expert and the weight of a selection: in expert-major order that of a row.
    #[inline(always)]
    pub(super) fn set_selection(&self, item: usize, expert: u32, weight: u32) {
        self.words.set(self.layout.ids_at + item, expert);
        self.words.set(self.layout.weights_at + item, weight);
    }
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
