//! Launches of dispatch and combine of a mixture of experts, and the check of their results.

use fusewire_device::args::RawBuffer;
use fusewire_device::layout::LaunchHeader;
use fusewire_device::mem;
use fusewire_device::{Block, Machine};
use fusewire_kernels::moe::{
    MoeCombineParams, MoeDispatchParams, MoeFlags, NONE, moe_combine__run, moe_dispatch__run,
};

use crate::memory_image::MemoryImage;
use crate::mixture::{Batch, HIDDEN, Memory, POISON, Tokens, Words, element, result, weight};

/// Kernel of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Dispatch.
    Dispatch,
    /// Combine.
    Combine,
}

/// Error of a negative control, before a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Injected {
    /// The step of the micro-batch is this one.
    Step(u32),
    /// The program reads the rows that peers write.
    ReadsRows,
    /// The next rank has sent a false number.
    False(Number),
}

/// A number that a rank sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// The rows of the rank, in its announcement.
    Rows,
    /// The first row of a block, in the announcement.
    FirstRow,
    /// The tokens of the rank, in the announcement.
    Tokens,
    /// The selections of an expert, in the announcement.
    Selections,
    /// The index of a selection, in the header of its row.
    Index,
    /// The number of the token, in the header of the row.
    Token,
}

impl Number {
    /// Returns the word of the window of rows that has the number for block 0.
    fn word(self, memory: &Memory, rank: u32) -> usize {
        let shape = memory.mixture.shape(memory.ranks, MoeFlags::default());
        let (ranks, blocks) = (memory.ranks as usize, memory.blocks as usize);
        let from = (rank as usize + 1) % ranks;
        let announcement = shape.announcement(from, 0, blocks);
        let header = shape.rows(from, ranks, blocks) + shape.header_at();
        match self {
            Self::Rows => announcement,
            Self::FirstRow => announcement + 1,
            Self::Tokens => announcement + 3,
            Self::Selections => announcement + 4,
            Self::Token => header,
            Self::Index => header + 2,
        }
    }
}

/// A launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    kernel: Kernel,
    halves: MoeFlags,
    batch: usize,
    /// Number of the dispatch, which determines the inputs.
    round: u64,
    /// Number of the combine after the dispatch.
    pass: u64,
    injected: Option<Injected>,
    part: Part,
}

/// Part of an operation that a launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The halves.
    Halves,
    /// The numbers of rows, before the rounds.
    Counts,
    /// One of the rounds.
    Round {
        /// The first launch of combine.
        is_first: bool,
        /// After the launch, the operation is complete.
        is_last: bool,
    },
}

impl Launch {
    /// Creates a launch of dispatch with the inputs of round `round`.
    pub const fn dispatch(round: u64) -> Self {
        Self {
            kernel: Kernel::Dispatch,
            halves: MoeFlags::SEND.with(MoeFlags::WAIT).with(MoeFlags::RECEIVE),
            batch: 0,
            round,
            pass: 0,
            injected: None,
            part: Part::Halves,
        }
    }

    /// Returns the launches that run this one with staging, in `rounds` rounds.
    pub fn staged(self, rounds: usize) -> Vec<Self> {
        let is_combine = self.kernel == Kernel::Combine;
        let count = Self {
            halves: MoeFlags::SEND,
            part: Part::Counts,
            ..self
        };
        let round = |number| {
            let is_first = is_combine && number == 0;
            let flag = match (is_combine, is_first) {
                (false, _) => MoeFlags::ROUND,
                (true, true) => MoeFlags::FIRST,
                (true, false) => MoeFlags::default(),
            };
            Self {
                halves: self.halves.with(flag),
                part: Part::Round {
                    is_first,
                    is_last: number + 1 == rounds,
                },
                ..self
            }
        };
        let counts = (!is_combine).then_some(count);
        counts.into_iter().chain((0..rounds).map(round)).collect()
    }

    /// Creates a launch of combine after the dispatch of round `round`.
    pub const fn combine(round: u64) -> Self {
        Self {
            kernel: Kernel::Combine,
            ..Self::dispatch(round)
        }
    }

    /// Sets the number of the combine after the dispatch. Results differ between numbers.
    #[must_use]
    pub const fn pass(self, pass: u64) -> Self {
        Self { pass, ..self }
    }

    /// Makes the launch run only the half that sends.
    #[must_use]
    pub const fn send(self) -> Self {
        let halves = MoeFlags::SEND;
        Self { halves, ..self }
    }

    /// Makes the launch run only the half that receives.
    #[must_use]
    pub const fn receive(self) -> Self {
        let halves = MoeFlags::WAIT.with(MoeFlags::RECEIVE);
        Self { halves, ..self }
    }

    /// Makes the launch send, and wait for the other ranks.
    #[must_use]
    pub const fn wait(self) -> Self {
        let halves = MoeFlags::SEND.with(MoeFlags::WAIT);
        Self { halves, ..self }
    }

    /// Makes the launch interpret what has arrived.
    #[must_use]
    pub const fn interpret(self) -> Self {
        let halves = MoeFlags::RECEIVE;
        Self { halves, ..self }
    }

    /// Sets the micro-batch.
    #[must_use]
    pub const fn of(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// Injects an error.
    #[must_use]
    pub const fn with_fault(self, fault: Injected) -> Self {
        Self {
            injected: Some(fault),
            ..self
        }
    }

    /// Writes the inputs, and fills the outputs with poison. Before a combine, computes the
    /// experts.
    pub(crate) fn prepare(&self, image: &MemoryImage, rank: u32) {
        let memory = image.mixture();
        let batch = memory.batch(rank, self.batch);
        match self.injected {
            Some(Injected::Step(step)) => batch.own.set(0, step),
            Some(Injected::ReadsRows) => {
                for from in 0..memory.ranks {
                    // SAFETY: the window has a row from each rank.
                    unsafe { mem::read(memory.row(batch, from, 0)) };
                }
            }
            Some(Injected::False(number)) => {
                let at = batch.windows[0].cast::<u32>();
                // SAFETY: the window has the word. All ranks have written it, and no rank writes it
                // before the next dispatch.
                unsafe { mem::write(at.wrapping_add(number.word(memory, rank)), u32::MAX) };
            }
            None => {}
        }
        let (sends, receives) = match self.part {
            Part::Halves => (
                self.halves.has(MoeFlags::SEND),
                self.halves.has(MoeFlags::RECEIVE),
            ),
            Part::Counts => (true, true),
            Part::Round { is_first, .. } => (is_first, is_first),
        };
        match self.kernel {
            Kernel::Dispatch => {
                if sends {
                    self.write_tokens(memory, batch, rank);
                }
                if receives {
                    batch.meta.fill(POISON);
                    batch.out.fill(POISON);
                }
            }
            Kernel::Combine => {
                if sends {
                    self.compute_experts(memory, batch, rank);
                }
                if receives {
                    batch.sums.fill(POISON);
                }
            }
        }
    }

    fn write_tokens(&self, memory: &Memory, batch: &Batch, rank: u32) {
        let (mixture, k) = (&memory.mixture, memory.mixture.top_k as usize);
        for token in 0..mixture.count(rank, self.round) {
            for column in 0..HIDDEN {
                let value = element(rank, self.round, token, column);
                batch.x.set(token * HIDDEN + column, value.to_bits());
            }
            for k_of in 0..k {
                let expert = mixture.expert(memory.ranks, rank, self.round, (token, k_of));
                batch.ids.set(token * k + k_of, expert as u32);
                let weight = weight(rank, token, k_of);
                batch.weights.set(token * k + k_of, weight.to_bits());
            }
        }
    }

    /// Computes the experts of a rank on the rows that it has received.
    fn compute_experts(&self, memory: &Memory, batch: &Batch, rank: u32) {
        let mixture = &memory.mixture;
        let shape = mixture.shape(memory.ranks, MoeFlags::default());
        let meta = shape.meta(memory.ranks as usize);
        batch.y.fill(POISON);
        for item in 0..meta.rows * meta.each {
            let row = item / meta.each;
            let local = batch.meta.get(meta.ids_at + item);
            if local == NONE {
                continue;
            }
            let expert = rank * mixture.local_experts + local;
            for column in 0..HIDDEN {
                let x = if mixture.copies_rows() {
                    f32::from_bits(batch.out.get(row * HIDDEN + column))
                } else {
                    let most = mixture.max_tokens as usize;
                    let row = memory.row(batch, (row / most) as u32, row % most);
                    // SAFETY: a row of the window has the column.
                    unsafe { mem::read(row.wrapping_add(column)) }
                };
                let y = result(expert, self.pass, x);
                batch.y.set(item * HIDDEN + column, y.to_bits());
            }
        }
    }

    /// Runs the kernel.
    ///
    /// # Safety
    /// The header must belong to the image.
    pub(crate) unsafe fn run<M: Machine>(
        &self,
        block: Block<M>,
        header: LaunchHeader,
        image: &MemoryImage,
        rank: u32,
    ) {
        let memory = image.mixture();
        let (mixture, batch) = (&memory.mixture, memory.batch(rank, self.batch));
        let tokens = mixture.count(rank, self.round);
        let items = tokens * mixture.top_k as usize;
        let [rows, results] = &memory.windows[self.batch];
        let shape = mixture.shape(memory.ranks, self.halves);
        let all = |words: Words| words.argument(words.len);
        let (ids, weights) = (batch.ids.argument(items), batch.weights.argument(items));
        // SAFETY: the precondition of this function. The buffers have the lengths of the mixture,
        // and do not overlap.
        unsafe {
            match self.kernel {
                Kernel::Dispatch => moe_dispatch__run(
                    block,
                    &MoeDispatchParams {
                        header,
                        rows: &raw const *rows,
                        x: batch.x.argument(tokens * HIDDEN),
                        ids,
                        weights,
                        placement: all(batch.placement),
                        own: all(batch.own),
                        meta: all(batch.meta),
                        out: all(batch.out),
                        tokens_per_expert: RawBuffer {
                            at: batch.tokens_per_expert.at.cast(),
                            len: u64::from(mixture.local_experts),
                        },
                        wait_ns: RawBuffer::EMPTY,
                        mask: all(memory.masks[rank as usize]),
                        shape,
                        config: 0,
                    },
                ),
                Kernel::Combine => moe_combine__run(
                    block,
                    &MoeCombineParams {
                        header,
                        rows: &raw const *rows,
                        results: &raw const *results,
                        y: all(batch.y),
                        ids,
                        weights,
                        own: all(batch.own),
                        mask: all(memory.masks[rank as usize]),
                        missing: all(batch.missing),
                        out: batch.sums.argument(tokens * HIDDEN),
                        shape,
                        config: 0,
                    },
                ),
            }
        }
    }

    /// Checks the results of a launch that has succeeded.
    ///
    /// # Panics
    /// Panics if a result is wrong.
    pub(crate) fn verify(&self, image: &MemoryImage, rank: u32) {
        let is_complete = match self.part {
            Part::Halves => self.halves.has(MoeFlags::RECEIVE),
            Part::Counts => false,
            Part::Round { is_last, .. } => is_last,
        };
        if !is_complete {
            return;
        }
        let memory = image.mixture();
        let batch = memory.batch(rank, self.batch);
        match (self.kernel, memory.mixture.is_expert_major()) {
            (Kernel::Dispatch, true) => self.verify_experts(memory, batch, rank),
            (Kernel::Dispatch, false) => self.verify_ranks(memory, batch, rank),
            (Kernel::Combine, _) => self.verify_sums(memory, batch, rank),
        }
    }

    fn verify_experts(&self, memory: &Memory, batch: &Batch, rank: u32) {
        let mixture = &memory.mixture;
        let shape = mixture.shape(memory.ranks, MoeFlags::default());
        let meta = shape.meta(memory.ranks as usize);
        let mut row = 0;
        for local in 0..mixture.local_experts {
            let expert = rank * mixture.local_experts + local;
            let mut selections = mixture.selections(memory.ranks, self.round, expert);
            selections.retain(|(from, ..)| !memory.is_masked(rank, *from));
            let count = batch.meta.get(local as usize) as usize;
            assert_eq!(count, selections.len(), "rows of expert {expert}");
            let offset = batch.meta.get(meta.offsets_at + local as usize) as usize;
            assert_eq!(offset, row, "first row of expert {expert}");
            for (from, token, k) in selections {
                let found = [
                    batch.meta.get(meta.sources_at + 2 * row),
                    batch.meta.get(meta.sources_at + 2 * row + 1),
                    batch.meta.get(meta.ids_at + row),
                    batch.meta.get(meta.weights_at + row),
                ];
                let weight = weight(from, token, k).to_bits();
                assert_eq!(found, [from, token as u32, local, weight], "row {row}");
                for column in 0..HIDDEN {
                    let found = f32::from_bits(batch.out.get(row * HIDDEN + column));
                    let expected = element(from, self.round, token, column);
                    assert_eq!(found, expected, "element {column} of row {row}");
                }
                row += 1;
            }
        }
        for row in row..meta.rows {
            assert_eq!(batch.meta.get(meta.ids_at + row), NONE, "row {row}");
        }
    }

    fn verify_ranks(&self, memory: &Memory, batch: &Batch, rank: u32) {
        let (mixture, local) = (&memory.mixture, memory.mixture.local_experts);
        let shape = mixture.shape(memory.ranks, MoeFlags::default());
        let meta = shape.meta(memory.ranks as usize);
        let (most, mut first) = (mixture.max_tokens as usize, 0);
        for from in 0..memory.ranks {
            let tokens = match memory.is_masked(rank, from) {
                true => Vec::new(),
                false => mixture.arrivals(memory.ranks, self.round, from, rank),
            };
            let count = batch.meta.get(from as usize) as usize;
            assert_eq!(count, tokens.len(), "rows of rank {from}");
            if mixture.is_staged() {
                let offset = batch.meta.get(meta.offsets_at + from as usize) as usize;
                assert_eq!(offset, first, "first row of rank {from}");
            }
            for (slot, token) in tokens.iter().copied().enumerate() {
                let row = first + slot;
                let found = [0, 1].map(|word| batch.meta.get(meta.sources_at + 2 * row + word));
                assert_eq!(found, [from, token as u32], "row {row}");
                for k in 0..meta.each {
                    let at = row * meta.each + k;
                    let expert = mixture.expert(memory.ranks, from, self.round, (token, k));
                    let expected = match expert {
                        0.. if expert as u32 / local == rank => expert as u32 % local,
                        _ => NONE,
                    };
                    let found = batch.meta.get(meta.ids_at + at);
                    assert_eq!(found, expected, "expert {k} of row {row}");
                    let found = f32::from_bits(batch.meta.get(meta.weights_at + at));
                    assert_eq!(found, weight(from, token, k), "weight {k} of row {row}");
                }
                for column in 0..HIDDEN {
                    let found = if mixture.is_staged() {
                        f32::from_bits(batch.out.get(row * HIDDEN + column))
                    } else {
                        let at = memory.row(batch, from, slot).wrapping_add(column);
                        // SAFETY: a row of the window has the column.
                        unsafe { mem::read(at) }
                    };
                    let expected = element(from, self.round, token, column);
                    assert_eq!(found, expected, "element {column} of row {row}");
                }
            }
            let end = match mixture.is_staged() {
                true if from + 1 < memory.ranks => first + tokens.len(),
                true => meta.rows,
                false => first + most,
            };
            for item in (first + tokens.len()) * meta.each..end * meta.each {
                assert_eq!(batch.meta.get(meta.ids_at + item), NONE, "item {item}");
            }
            first = end;
        }
    }

    fn verify_sums(&self, memory: &Memory, batch: &Batch, rank: u32) {
        let mixture = &memory.mixture;
        for token in 0..mixture.count(rank, self.round) {
            let expert = |k| mixture.expert(memory.ranks, rank, self.round, (token, k));
            let is_missing = |k: usize| match u32::try_from(expert(k)) {
                Ok(expert) => memory.is_masked(rank, expert / mixture.local_experts),
                Err(_) => false,
            };
            let missing = (0..mixture.top_k as usize)
                .filter(|k| is_missing(*k))
                .fold(0, |bits, k| bits | 1 << k);
            assert_eq!(
                batch.missing.get(token),
                missing,
                "missing results of token {token}"
            );
            for column in 0..HIDDEN {
                let x = element(rank, self.round, token, column);
                let terms = (0..mixture.top_k as usize).map(|k| match expert(k) {
                    _ if is_missing(k) => 0.0,
                    expert @ 0.. => weight(rank, token, k) * result(expert as u32, self.pass, x),
                    _ => 0.0,
                });
                let found = f32::from_bits(batch.sums.get(token * HIDDEN + column));
                let expected: f32 = terms.sum();
                assert_eq!(
                    found, expected,
                    "element {column} of the sum of token {token}"
                );
            }
        }
    }

    /// Checks that a launch that has failed has written no results. If the rows do not fit, also
    /// checks that no rank has written rows.
    ///
    /// # Panics
    /// Panics if something has been written.
    pub(crate) fn verify_failed(&self, image: &MemoryImage, rank: u32) {
        let memory = image.mixture();
        let batch = memory.batch(rank, self.batch);
        if memory.mixture.tokens == Tokens::ToExpert0 {
            for from in 0..memory.ranks {
                // SAFETY: the window has a row from each rank. If a peer writes it, the model
                // checker reports a race.
                let found = unsafe { mem::read(memory.row(batch, from, 0)) };
                assert_eq!(found, 0.0, "a row from rank {from} that does not fit");
            }
        }
        let is_false = matches!(self.injected, Some(Injected::False(_)));
        if self.halves.has(MoeFlags::RECEIVE) && !is_false {
            let outputs = match self.kernel {
                Kernel::Dispatch => vec![batch.meta, batch.out],
                Kernel::Combine => vec![batch.sums],
            };
            for (output, words) in outputs.into_iter().enumerate() {
                let written = (0..words.len).find(|word| words.get(*word) != POISON);
                assert_eq!(written, None, "a failed launch has written output {output}");
            }
        }
    }
}
