//! The memory of a mixture of experts: sizes, inputs, and the windows of its micro-batches.
//!
//! Payload and weights are small integers in f32, so results are exact.

use fusewire_device::args::RawBuffer;
use fusewire_device::mem::model::{Kind, Model};
use fusewire_device::window::{DeviceWindow, signal_pad_bytes};
use fusewire_kernels::moe::{MoeFlags, MoeShape, place};

use crate::input::number;

/// Elements of a token.
pub(crate) const HIDDEN: usize = 8;
/// Value of output words that no launch has written.
pub(crate) const POISON: u32 = 0xeeee_eeee;
/// Windows of a micro-batch: rows, signals of the rows, results, signals of the results.
pub(crate) const WINDOWS: usize = 4;

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
    /// Tokens of a block in a round; 0 without staging.
    pub staging: u32,
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
            staging: 0,
        }
    }

    pub(crate) fn shape(&self, ranks: u32, halves: MoeFlags) -> MoeShape {
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
            result: HIDDEN as u32,
            staging: self.staging,
        }
    }

    pub(crate) fn is_staged(&self) -> bool {
        self.staging > 0
    }

    /// Returns true if dispatch copies rows from where they arrive.
    pub(crate) fn copies_rows(&self) -> bool {
        self.is_expert_major() || self.is_staged()
    }

    pub(crate) fn is_expert_major(&self) -> bool {
        self.layout.has(MoeFlags::EXPERT_MAJOR)
    }

    /// Returns the number of tokens of `rank` in round `round`.
    pub(crate) fn count(&self, rank: u32, round: u64) -> usize {
        let most = self.max_tokens as usize;
        match self.tokens {
            Tokens::NoneOnRank1 if rank == 1 => 0,
            Tokens::Varied => (rank as usize + 2 * round as usize) % (most + 1),
            _ => most,
        }
    }

    /// Returns the expert of a selection.
    pub(crate) fn expert(
        &self,
        ranks: u32,
        rank: u32,
        round: u64,
        (token, k): (usize, usize),
    ) -> i32 {
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
    pub(crate) fn selections(
        &self,
        ranks: u32,
        round: u64,
        expert: u32,
    ) -> Vec<(u32, usize, usize)> {
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
    pub(crate) fn arrivals(&self, ranks: u32, round: u64, from: u32, to: u32) -> Vec<usize> {
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

pub(crate) fn element(rank: u32, round: u64, token: usize, column: usize) -> f32 {
    number(rank, round, token * HIDDEN + column) as f32
}

pub(crate) fn weight(rank: u32, token: usize, k: usize) -> f32 {
    (1 + rank as usize + token + 2 * k) as f32
}

/// Returns the result of an expert for element `x`, in the combine with number `pass` after a
/// dispatch.
pub(crate) fn result(expert: u32, pass: u64, x: f32) -> f32 {
    (expert + 2) as f32 * x + (100 * pass) as f32
}

/// Words of memory that only one rank accesses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    pub(crate) at: *mut u32,
    pub(crate) len: usize,
}

impl Words {
    pub(crate) fn new(len: usize, pages: fn(usize) -> *mut u8) -> Self {
        Self {
            at: pages(4 * len.max(1)).cast(),
            len,
        }
    }

    pub(crate) fn get(self, index: usize) -> u32 {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: the index was checked, and only the threads of the rank access the memory.
        unsafe { self.at.add(index).read() }
    }

    pub(crate) fn set(self, index: usize, value: u32) {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: as in `get`.
        unsafe { self.at.add(index).write(value) };
    }

    pub(crate) fn fill(self, value: u32) {
        (0..self.len).for_each(|index| self.set(index, value));
    }

    /// Returns the first `len` words as an argument of a kernel.
    pub(crate) fn argument(self, len: usize) -> RawBuffer {
        RawBuffer {
            at: self.at.cast(),
            len: len as u64,
        }
    }
}

/// Memory of a micro-batch on one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    /// The parts of the windows.
    pub(crate) windows: [*mut u8; WINDOWS],
    pub(crate) x: Words,
    pub(crate) ids: Words,
    pub(crate) weights: Words,
    pub(crate) placement: Words,
    pub(crate) own: Words,
    pub(crate) meta: Words,
    /// Rows that have been copied.
    pub(crate) out: Words,
    /// Two words for each expert of the rank.
    pub(crate) tokens_per_expert: Words,
    pub(crate) y: Words,
    /// Result of combine.
    pub(crate) sums: Words,
    /// The selections of each token whose results are missing.
    pub(crate) missing: Words,
}

/// Memory of a mixture of experts on all ranks.
#[derive(Debug)]
pub struct Memory {
    pub(crate) mixture: Mixture,
    pub(crate) ranks: u32,
    pub(crate) blocks: u32,
    /// Bytes of the windows of a micro-batch.
    pub(crate) bytes: [usize; WINDOWS],
    /// Memory of each rank and micro-batch.
    pub(crate) batches: Vec<Vec<Batch>>,
    /// Mask of each rank.
    pub(crate) masks: Vec<Words>,
    /// Rows and results of each micro-batch.
    pub(crate) windows: Vec<[DeviceWindow; 2]>,
}

/// Signals of the windows of rows and of results.
pub(crate) const SIGNALS: [u32; 2] = [4, 2];

impl Memory {
    /// Allocates the memory by `pages`. Its windows are numbered from `first` on.
    pub fn new(
        mixture: Mixture,
        ranks: u32,
        blocks: u32,
        first: usize,
        pages: fn(usize) -> *mut u8,
    ) -> Self {
        let shape = mixture.shape(ranks, MoeFlags::default());
        let (k, tokens) = (mixture.top_k as usize, mixture.max_tokens as usize);
        let pad = |signals| signal_pad_bytes(ranks, blocks, signals, 0, 0, 0) as usize;
        let bytes = [
            4 * shape.window_words(ranks as usize, blocks as usize),
            pad(SIGNALS[0]),
            4 * shape.window_results(ranks as usize, blocks as usize) * HIDDEN,
            pad(SIGNALS[1]),
        ];
        let rows = shape.result_rows(ranks as usize);
        let each = if mixture.is_expert_major() { 1 } else { k };
        let new = |len| Words::new(len, pages);
        let batch = || Batch {
            windows: bytes.map(pages),
            x: new(tokens * HIDDEN),
            ids: new(tokens * k),
            weights: new(tokens * k),
            placement: new(shape.experts as usize),
            own: new(shape.own(ranks as usize, blocks as usize).words),
            meta: new(shape.meta(ranks as usize).words),
            out: new(shape.capacity as usize * HIDDEN),
            tokens_per_expert: new(2 * shape.local_experts as usize),
            y: new(rows * each * HIDDEN),
            sums: new(tokens * HIDDEN),
            missing: new(tokens),
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
            masks: (0..ranks).map(|_| new(ranks as usize)).collect(),
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
        self.masks.iter().for_each(|mask| mask.fill(0));
        for batch in self.batches.iter().flatten() {
            for (window, bytes) in batch.windows.iter().zip(self.bytes) {
                // SAFETY: a live allocation of this size, and no thread of the execution has
                // started.
                unsafe { window.write_bytes(0, bytes) };
            }
            batch.own.fill(0);
            batch.missing.fill(0);
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

    /// Returns true if `rank` has masked `other`.
    pub(crate) fn is_masked(&self, rank: u32, other: u32) -> bool {
        self.masks[rank as usize].get(other as usize) != 0
    }

    pub(crate) fn batch(&self, rank: u32, index: usize) -> &Batch {
        &self.batches[rank as usize][index]
    }

    /// Returns the address of row `slot` from rank `from` in the window of rows: with staging, in
    /// the region of block 0 for even rounds.
    pub(crate) fn row(&self, batch: &Batch, from: u32, slot: usize) -> *const f32 {
        let shape = self.mixture.shape(self.ranks, MoeFlags::default());
        let (ranks, blocks) = (self.ranks as usize, self.blocks as usize);
        let word = if self.mixture.is_staged() {
            shape.region(ranks, (from as usize, 0), blocks, 0) + shape.staged_row(slot)
        } else {
            shape.rows(from as usize, ranks, blocks) + slot * shape.row_stride()
        };
        batch.windows[0]
            .wrapping_add(4 * word)
            .cast::<f32>()
            .cast_const()
    }
}
