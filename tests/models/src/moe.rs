//! Mixture of experts: memory of micro-batches, launches of dispatch and combine, and the check of
//! their results.
//!
//! Payload and weights are small integers in f32, so results are exact.

use fusewire_device::args::RawBuffer;
use fusewire_device::layout::LaunchHeader;
use fusewire_device::mem;
use fusewire_device::mem::model::{Kind, Model};
use fusewire_device::window::{DeviceWindow, signal_pad_bytes};
use fusewire_device::{Block, Machine};
use fusewire_kernels::moe::{
    MoeCombineParams, MoeDispatchParams, MoeFlags, MoeShape, NONE, moe_combine__run,
    moe_dispatch__run, place,
};

use crate::input::number;
use crate::memory_image::{MemoryImage, pages};

/// Elements of a token.
const HIDDEN: usize = 8;
/// Value of output words that no launch has written.
const POISON: u32 = 0xeeee_eeee;
/// Windows of a micro-batch: rows, signals of the rows, results, signals of the results.
const WINDOWS: usize = 4;

/// Tokens of the ranks, and their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Every rank has the most tokens. Selection k of a token is an expert of the rank k + 1
    /// positions after the token's rank.
    Next,
    /// The same, but rank 1 has no tokens.
    NoneOnRank1,
    /// The same as `Next`, but token 0 is not sent in odd rounds.
    Alternating,
    /// Numbers and experts depend on rank, round and token. Some selections have no expert.
    Varied,
    /// All selections are expert 0.
    ToExpert0,
    /// The same as `Next`, but an expert of rank 1 does not exist.
    UnknownExpert,
}

/// Sizes of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct Mixture {
    /// Experts of a rank.
    pub local_experts: u32,
    /// Experts of a token.
    pub top_k: u32,
    /// Greatest number of tokens of a rank.
    pub max_tokens: u32,
    /// Rows of a result in expert-major order.
    pub capacity: u32,
    /// Layout of the results.
    pub layout: MoeFlags,
    /// Micro-batches.
    pub batches: usize,
    /// Tokens, and their experts.
    pub tokens: Tokens,
}

impl Mixture {
    /// Creates a mixture with one token of each rank, one expert of each rank and one micro-batch.
    pub const fn new(layout: MoeFlags) -> Self {
        Self {
            local_experts: 1,
            top_k: 1,
            max_tokens: 1,
            capacity: 2,
            layout,
            batches: 1,
            tokens: Tokens::Next,
        }
    }

    fn shape(&self, ranks: u32, halves: MoeFlags) -> MoeShape {
        MoeShape {
            experts: ranks * self.local_experts,
            top_k: self.top_k,
            local_experts: self.local_experts,
            max_tokens: self.max_tokens,
            hidden: HIDDEN as u32,
            payload: HIDDEN as u32,
            scales: 0,
            capacity: self.capacity,
            alignment: 1,
            flags: self.layout.with(halves),
        }
    }

    fn is_expert_major(&self) -> bool {
        self.layout.has(MoeFlags::EXPERT_MAJOR)
    }

    /// Returns the number of tokens of `rank` in round `round`.
    fn count(&self, rank: u32, round: u64) -> usize {
        let most = self.max_tokens as usize;
        match self.tokens {
            Tokens::NoneOnRank1 if rank == 1 => 0,
            Tokens::Varied => (rank as usize + 2 * round as usize) % (most + 1),
            _ => most,
        }
    }

    /// Returns the expert of a selection.
    fn expert(&self, ranks: u32, rank: u32, round: u64, (token, k): (usize, usize)) -> i32 {
        let (experts, local) = (ranks * self.local_experts, self.local_experts);
        let (token, k, round) = (token as u32, k as u32, round as u32);
        let next = (rank + 1 + k) % ranks * local + (token + k) % local;
        match self.tokens {
            Tokens::ToExpert0 => 0,
            Tokens::Alternating if token == 0 && round % 2 == 1 => -1,
            Tokens::UnknownExpert if rank == 1 => experts as i32,
            Tokens::Varied => match 5 * rank + 3 * token + 7 * k + 2 * round {
                mixed if mixed % 4 == 3 => -1,
                mixed => (mixed % experts) as i32,
            },
            _ => next as i32,
        }
    }

    /// Returns the selections of expert `expert` by rank, token and selection in this order.
    fn selections(&self, ranks: u32, round: u64, expert: u32) -> Vec<(u32, usize, usize)> {
        let mut found = Vec::new();
        for rank in 0..ranks {
            for item in 0..self.count(rank, round) * self.top_k as usize {
                let (token, k) = (item / self.top_k as usize, item % self.top_k as usize);
                if self.expert(ranks, rank, round, (token, k)) == expert as i32 {
                    found.push((rank, token, k));
                }
            }
        }
        found
    }

    /// Returns the tokens of `from` with an expert of `to`.
    fn arrivals(&self, ranks: u32, round: u64, from: u32, to: u32) -> Vec<usize> {
        let is_here = |token| {
            (0..self.top_k as usize).any(|k| {
                let expert = self.expert(ranks, from, round, (token, k));
                expert >= 0 && expert as u32 / self.local_experts == to
            })
        };
        (0..self.count(from, round))
            .filter(|token| is_here(*token))
            .collect()
    }
}

fn element(rank: u32, round: u64, token: usize, column: usize) -> f32 {
    number(rank, round, token * HIDDEN + column) as f32
}

fn weight(rank: u32, token: usize, k: usize) -> f32 {
    (1 + rank as usize + token + 2 * k) as f32
}

/// Returns the result of an expert for element `x`, in the combine with number `pass` after a
/// dispatch.
fn result(expert: u32, pass: u64, x: f32) -> f32 {
    (expert + 2) as f32 * x + (100 * pass) as f32
}

/// Words of memory that only one rank accesses.
#[derive(Clone, Copy, Debug)]
struct Words {
    at: *mut u32,
    len: usize,
}

impl Words {
    fn new(len: usize) -> Self {
        Self {
            at: pages(4 * len.max(1)).cast(),
            len,
        }
    }

    fn get(self, index: usize) -> u32 {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: the index was checked, and only the threads of the rank access the memory.
        unsafe { self.at.add(index).read() }
    }

    fn set(self, index: usize, value: u32) {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: as in `get`.
        unsafe { self.at.add(index).write(value) };
    }

    fn fill(self, value: u32) {
        (0..self.len).for_each(|index| self.set(index, value));
    }

    /// Returns the first `len` words as an argument of a kernel.
    fn argument(self, len: usize) -> RawBuffer {
        RawBuffer {
            at: self.at.cast(),
            len: len as u64,
        }
    }
}

/// Memory of a micro-batch on one rank.
#[derive(Clone, Copy, Debug)]
struct Batch {
    /// The parts of the windows.
    windows: [*mut u8; WINDOWS],
    x: Words,
    ids: Words,
    weights: Words,
    placement: Words,
    own: Words,
    meta: Words,
    /// Rows in expert-major order.
    out: Words,
    /// Two words for each expert of the rank.
    tokens_per_expert: Words,
    y: Words,
    /// Result of combine.
    sums: Words,
}

/// Memory of a mixture of experts on all ranks.
#[derive(Debug)]
pub struct Memory {
    mixture: Mixture,
    ranks: u32,
    blocks: u32,
    /// Bytes of the windows of a micro-batch.
    bytes: [usize; WINDOWS],
    /// Memory of each rank and micro-batch.
    batches: Vec<Vec<Batch>>,
    /// Rows and results of each micro-batch.
    windows: Vec<[DeviceWindow; 2]>,
}

/// Signals of the windows of rows and of results.
const SIGNALS: [u32; 2] = [4, 1];

impl Memory {
    /// Allocates the memory. Its windows are numbered from `first` on.
    pub fn new(mixture: Mixture, ranks: u32, blocks: u32, first: usize) -> Self {
        let shape = mixture.shape(ranks, MoeFlags::default());
        let (k, tokens) = (mixture.top_k as usize, mixture.max_tokens as usize);
        let pad = |signals| signal_pad_bytes(ranks, blocks, signals, 0, 0, 0) as usize;
        let bytes = [
            4 * shape.window_words(ranks as usize, blocks as usize),
            pad(SIGNALS[0]),
            4 * tokens * k * HIDDEN,
            pad(SIGNALS[1]),
        ];
        let rows = shape.result_rows(ranks as usize);
        let each = if mixture.is_expert_major() { 1 } else { k };
        let batch = || Batch {
            windows: bytes.map(pages),
            x: Words::new(tokens * HIDDEN),
            ids: Words::new(tokens * k),
            weights: Words::new(tokens * k),
            placement: Words::new(shape.experts as usize),
            own: Words::new(shape.own(ranks as usize, blocks as usize).words),
            meta: Words::new(shape.meta(ranks as usize).words),
            out: Words::new(shape.capacity as usize * HIDDEN),
            tokens_per_expert: Words::new(2 * shape.local_experts as usize),
            y: Words::new(rows * each * HIDDEN),
            sums: Words::new(tokens * HIDDEN),
        };
        let window = |number: usize, which: usize| DeviceWindow {
            window: (number + 2 * which) as u32,
            signal_pad: (number + 2 * which + 1) as u32,
            offset: 0,
            bytes: bytes[2 * which] as u64,
            signals: SIGNALS[which],
            counters: 0,
            barriers: 0,
            size: ranks,
            blocks,
            ring: 0,
            width: 1,
            cells: 0,
        };
        Self {
            mixture,
            ranks,
            blocks,
            bytes,
            batches: (0..ranks)
                .map(|_| (0..mixture.batches).map(|_| batch()).collect())
                .collect(),
            windows: (0..mixture.batches)
                .map(|index| [0, 1].map(|which| window(first + WINDOWS * index, which)))
                .collect(),
        }
    }

    /// Returns the sizes and addresses of the windows: for each window the address on every rank.
    pub fn windows(&self) -> Vec<(u64, Vec<u64>)> {
        let all = (0..self.mixture.batches * WINDOWS).map(|index| {
            let (batch, window) = (index / WINDOWS, index % WINDOWS);
            let parts = self.batches.iter();
            let parts = parts.map(|rank| rank[batch].windows[window] as u64);
            (self.bytes[window] as u64, parts.collect())
        });
        all.collect()
    }

    /// Starts an execution: resets the memory, and registers the windows with the model checker.
    pub fn open(&self, model: &Model, signals: bool) {
        let each = self.mixture.local_experts;
        for batch in self.batches.iter().flatten() {
            for (window, bytes) in batch.windows.iter().zip(self.bytes) {
                // SAFETY: a live allocation of this size, and no thread of the execution has
                // started.
                unsafe { window.write_bytes(0, bytes) };
            }
            batch.own.fill(0);
            batch.tokens_per_expert.fill(0);
            for expert in 0..batch.placement.len as u32 {
                batch
                    .placement
                    .set(expert as usize, place(expert / each, expert % each));
            }
        }
        for (rank, index) in (0..self.ranks).flat_map(|rank| {
            let batches = 0..self.mixture.batches;
            batches.map(move |index| (rank, index))
        }) {
            let batch = &self.batches[rank as usize][index];
            for (which, window) in self.windows[index].iter().enumerate() {
                if cfg!(loom) {
                    let (part, bytes) = (batch.windows[2 * which], self.bytes[2 * which]);
                    model.register(part, bytes, Kind::Data);
                }
                if !signals {
                    continue;
                }
                for id in 0..window.signals {
                    for sender in 0..self.ranks {
                        let at = window.slot_at(id, sender, 0) as usize;
                        let slots = batch.windows[2 * which + 1].wrapping_add(at);
                        model.register(slots, 8 * self.blocks as usize, Kind::Peer);
                    }
                }
            }
        }
    }

    fn batch(&self, rank: u32, index: usize) -> &Batch {
        &self.batches[rank as usize][index]
    }

    /// Returns the address of row `slot` from rank `from` in the window of rows.
    fn row(&self, batch: &Batch, from: u32, slot: usize) -> *const f32 {
        let shape = self.mixture.shape(self.ranks, MoeFlags::default());
        let first = shape.rows(from as usize, self.ranks as usize, self.blocks as usize);
        let word = first + slot * shape.row_stride();
        batch.windows[0]
            .wrapping_add(4 * word)
            .cast::<f32>()
            .cast_const()
    }
}

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
}

impl Launch {
    /// Creates a launch of dispatch with the inputs of round `round`.
    pub const fn dispatch(round: u64) -> Self {
        Self {
            kernel: Kernel::Dispatch,
            halves: MoeFlags::SEND.with(MoeFlags::RECEIVE),
            batch: 0,
            round,
            pass: 0,
            injected: None,
        }
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
            None => {}
        }
        let (sends, receives) = (
            self.halves.has(MoeFlags::SEND),
            self.halves.has(MoeFlags::RECEIVE),
        );
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
                let x = if mixture.is_expert_major() {
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
                        scales: RawBuffer::EMPTY,
                        tokens_per_expert: RawBuffer {
                            at: batch.tokens_per_expert.at.cast(),
                            len: u64::from(mixture.local_experts),
                        },
                        wait_ns: RawBuffer::EMPTY,
                        shape,
                        config: 0,
                    },
                ),
                Kernel::Combine => moe_combine__run::<f32, _>(
                    block,
                    &MoeCombineParams {
                        header,
                        rows: &raw const *rows,
                        results: &raw const *results,
                        y: all(batch.y),
                        ids,
                        weights,
                        own: all(batch.own),
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
        if !self.halves.has(MoeFlags::RECEIVE) {
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
            let selections = mixture.selections(memory.ranks, self.round, expert);
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
        let most = mixture.max_tokens as usize;
        for from in 0..memory.ranks {
            let tokens = mixture.arrivals(memory.ranks, self.round, from, rank);
            let count = batch.meta.get(from as usize) as usize;
            assert_eq!(count, tokens.len(), "rows of rank {from}");
            for (slot, token) in tokens.iter().copied().enumerate() {
                let row = from as usize * most + slot;
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
                    let at = memory.row(batch, from, slot).wrapping_add(column);
                    // SAFETY: a row of the window has the column.
                    let found = unsafe { mem::read(at) };
                    let expected = element(from, self.round, token, column);
                    assert_eq!(found, expected, "element {column} of row {row}");
                }
            }
            for item in tokens.len() * meta.each..most * meta.each {
                let id = batch
                    .meta
                    .get(meta.ids_at + from as usize * most * meta.each + item);
                assert_eq!(id, NONE, "item {item} of rank {from}");
            }
        }
    }

    fn verify_sums(&self, memory: &Memory, batch: &Batch, rank: u32) {
        let mixture = &memory.mixture;
        for token in 0..mixture.count(rank, self.round) {
            for column in 0..HIDDEN {
                let x = element(rank, self.round, token, column);
                let terms = (0..mixture.top_k as usize).map(|k| {
                    let expert = mixture.expert(memory.ranks, rank, self.round, (token, k));
                    match expert {
                        0.. => weight(rank, token, k) * result(expert as u32, self.pass, x),
                        _ => 0.0,
                    }
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
        if self.halves.has(MoeFlags::RECEIVE) {
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
