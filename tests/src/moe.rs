//! Computes the expected results of mixture-of-experts dispatch and combine, bit for bit, and runs
//! cases of them. The code follows the documentation and shares no code with the library's
//! operations.
//!
//! Inputs depend only on case, rank and round. Each rank computes the inputs of all ranks, and from
//! them the rows that it must receive and the results of its own tokens.

use fusewire::{
    Communicator, DType, Dispatched, MissingRanks, Moe, MoeConfig, MoeInfo, MoeLayout, MoeMode,
    MoePayload, MoeReceived, MoeResults, MoeScales, MoeScalesLayout, Tensor,
};

use crate::norm::e4m3;
use crate::oracle::{narrow, widen};
use crate::rng::Rng;

/// Channels that share a scale.
pub const GROUP: usize = 128;

/// Byte that fills outputs before an operation that must not write them.
const POISON: u8 = 0x5a;

/// Byte of a NaN in every input type.
const NAN: u8 = 0xff;

/// Distribution of the selected experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Every selection is a random expert.
    Uniform,
    /// 80 % of the selections are one of the first two experts.
    Skewed,
    /// All selections of a round are the same expert.
    OneExpert,
    /// About 30 % of the selections, and all selections of every fifth token, have no expert. The
    /// weights of these selections are NaN.
    Masked,
    /// Each token selects only two experts.
    Duplicates,
    /// No rank has tokens.
    Empty,
    /// Odd ranks have no tokens.
    SomeEmpty,
    /// The selections of a token are different experts. Selections beyond the number of experts
    /// have no expert.
    Distinct,
}

impl Routing {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Uniform,
        Self::Skewed,
        Self::OneExpert,
        Self::Masked,
        Self::Duplicates,
        Self::Empty,
        Self::SomeEmpty,
        Self::Distinct,
    ];

    /// Returns the selections of token `token`.
    fn select(self, case: &MoeCase, round: usize, token: usize, rng: &mut Rng) -> Vec<i32> {
        let (experts, top_k) = (case.experts as usize, case.top_k as usize);
        let any = |rng: &mut Rng| rng.below(experts) as i32;
        let mut shuffled: Vec<i32> = (0..experts as i32).collect();
        for i in 0..top_k.min(experts) {
            let other = i + rng.below(experts - i);
            shuffled.swap(i, other);
        }
        let two = [any(rng), any(rng)];
        (0..top_k)
            .map(|k| match self {
                Self::Uniform | Self::Empty | Self::SomeEmpty => any(rng),
                Self::Skewed if rng.below(5) < 4 => rng.below(experts.min(2)) as i32,
                Self::Skewed => any(rng),
                Self::OneExpert => (experts - 1 - round % experts) as i32,
                Self::Masked if token % 5 == 4 || rng.below(10) < 3 => {
                    rng.pick(&[-1, -1, -2, i32::MIN])
                }
                Self::Masked => any(rng),
                Self::Duplicates => rng.pick(&two),
                Self::Distinct => shuffled.get(k).copied().unwrap_or(-1),
            })
            .collect()
    }
}

/// Placement of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The placement of a new [`Moe`].
    Default,
    /// The ranks in reverse order.
    Reversed,
    /// Every round moves each expert to the next place, of this rank or of the next rank.
    Rotating,
}

/// Function that an expert applies to the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expert {
    /// Returns the element.
    Identity,
    /// Multiplies by a factor that depends on the expert. Adds this number and a term that depends
    /// on the expert and the position of the selection.
    Affine(f32),
}

impl Expert {
    /// Returns the result of expert `expert` for element `x` of selection `k`.
    fn apply(self, expert: u32, k: usize, x: f32) -> f32 {
        match self {
            Self::Identity => x,
            Self::Affine(offset) => {
                let factor = (1 + expert % 7) as f32;
                x * factor + expert as f32 * 0.25 + k as f32 * 0.125 + offset
            }
        }
    }

    /// Returns the results of expert `expert` for a row, as bytes of the input type.
    fn row(self, case: &MoeCase, expert: u32, k: usize, x: &[f32]) -> Vec<u8> {
        let results: Vec<f32> = x.iter().map(|x| self.apply(expert, k, *x)).collect();
        narrow(case.input, &results)
    }
}

/// Settings and inputs of a layer.
#[derive(Clone, Debug)]
pub struct MoeCase {
    /// Number of experts.
    pub experts: u32,
    /// Selections of a token.
    pub top_k: u32,
    /// Elements of a token.
    pub hidden: usize,
    /// Greatest number of tokens of a rank.
    pub max_tokens: usize,
    /// Number of tokens of a rank, unless the routing or `uneven` makes it smaller.
    pub tokens: usize,
    /// The number of tokens depends on rank and round.
    pub uneven: bool,
    /// Distribution of the selected experts.
    pub routing: Routing,
    /// Placement of the experts.
    pub placement: Placement,
    /// Type of the tokens.
    pub input: DType,
    /// Format of dispatched rows.
    pub payload: MoePayload,
    /// Format of results that are sent.
    pub results: MoeResults,
    /// Tokens of a rank in a round, in high throughput mode; 0 for low latency.
    pub staging: usize,
    /// Order of the scales.
    pub scales_layout: MoeScalesLayout,
    /// Type of received rows.
    pub received: MoeReceived,
    /// Consequence of missing ranks.
    pub missing_ranks: MissingRanks,
    /// Order of dispatched rows.
    pub layout: MoeLayout,
    /// Alignment of each expert's rows.
    pub alignment: usize,
    /// Number of rows for dispatched tokens. `None` selects the default.
    pub capacity: Option<usize>,
    /// Places for experts on a rank. 0 selects the default.
    pub local_experts: u32,
    /// Number of micro-batches.
    pub in_flight: usize,
    /// Number of blocks. 0 selects the default.
    pub blocks: u32,
    /// Calls the halves of the operations.
    pub halves: bool,
    /// Calls operations that wait.
    pub blocking: bool,
    /// Each round dispatches other tokens to the same experts after the first tokens.
    pub reuse: bool,
    /// The tokens are negated.
    pub negated: bool,
    /// The ranks that this rank has masked, as bits.
    pub masked: u64,
}

impl MoeCase {
    /// Returns a case of bf16 tokens that are dispatched without conversion in expert-major order.
    pub const fn new(experts: u32, top_k: u32, hidden: usize, tokens: usize) -> Self {
        Self {
            experts,
            top_k,
            hidden,
            max_tokens: if tokens == 0 { 1 } else { tokens },
            tokens,
            uneven: false,
            routing: Routing::Uniform,
            placement: Placement::Default,
            input: DType::Bf16,
            payload: MoePayload::Same,
            results: MoeResults::Same,
            staging: 0,
            scales_layout: MoeScalesLayout::RowMajor,
            received: MoeReceived::AsSent,
            missing_ranks: MissingRanks::Fail,
            layout: MoeLayout::ExpertMajor,
            alignment: 1,
            capacity: None,
            local_experts: 0,
            in_flight: 1,
            blocks: 0,
            halves: false,
            blocking: false,
            reuse: false,
            negated: false,
            masked: 0,
        }
    }

    /// Returns the configuration of the case.
    pub fn config(&self) -> MoeConfig {
        let mut config = MoeConfig::new(self.experts, self.top_k, self.hidden, self.max_tokens)
            .input(self.input)
            .payload(self.payload)
            .results(self.results)
            .scales_layout(self.scales_layout)
            .received(self.received)
            .missing_ranks(self.missing_ranks)
            .layout(self.layout)
            .alignment(self.alignment)
            .in_flight(self.in_flight);
        if let Some(rows) = self.capacity {
            config = config.capacity(rows);
        }
        if self.is_staged() {
            config = config.mode(MoeMode::HighThroughput).staging(self.staging);
        }
        if self.local_experts > 0 {
            config = config.local_experts(self.local_experts);
        }
        if self.blocks > 0 {
            config = config.blocks(self.blocks);
        }
        config
    }

    /// Returns the case in high throughput mode, with `staging` tokens in a round.
    #[must_use]
    pub fn staged(self, staging: usize) -> Self {
        Self {
            staging,
            halves: false,
            missing_ranks: MissingRanks::Fail,
            ..self
        }
    }

    /// Returns true in high throughput mode.
    pub fn is_staged(&self) -> bool {
        self.staging > 0
    }

    /// Returns true if dispatch copies rows from where they arrive.
    fn copies_rows(&self) -> bool {
        self.is_expert_major() || self.is_staged()
    }

    /// Returns true if the rows are in expert-major order.
    pub fn is_expert_major(&self) -> bool {
        self.layout == MoeLayout::ExpertMajor
    }

    /// Returns the number of ids and weights of a dispatched row.
    fn width(&self) -> usize {
        if self.is_expert_major() {
            1
        } else {
            self.top_k as usize
        }
    }

    /// Returns the number of scales of a row.
    pub fn groups(&self) -> usize {
        match self.payload {
            MoePayload::Fp8(_) => self.hidden / GROUP,
            _ => 0,
        }
    }

    /// Returns the bytes of a token.
    fn row_bytes(&self) -> usize {
        self.hidden * self.input.size()
    }

    /// Returns the number of places for experts on each of `ranks` ranks.
    pub fn places(&self, ranks: u32) -> u32 {
        match self.local_experts {
            0 => self.experts.div_ceil(ranks),
            places => places,
        }
    }

    /// Returns the least number of rows that every routing fits into.
    pub fn all_rows(&self, ranks: u32) -> usize {
        let rows = ranks as usize * self.max_tokens;
        if self.is_expert_major() {
            let padding = self.places(ranks) as usize * (self.alignment - 1);
            rows * self.top_k as usize + padding
        } else {
            rows
        }
    }

    /// Returns the number of tokens of `rank` in round `round`.
    pub fn tokens_of(&self, rank: u32, round: usize) -> usize {
        match self.routing {
            Routing::Empty => 0,
            Routing::SomeEmpty if rank % 2 == 1 => 0,
            _ if self.uneven => self.tokens.saturating_sub((rank as usize + round) % 4),
            _ => self.tokens,
        }
    }

    /// Returns true if this rank has masked `rank`.
    fn is_masked(&self, rank: u32) -> bool {
        self.masked >> rank & 1 == 1
    }

    /// Returns inputs in which the selections of experts on masked ranks have no expert, and these
    /// selections of each token as bits.
    pub fn present(&self, ranks: u32, round: usize, inputs: &Inputs) -> (Inputs, Vec<u32>) {
        let placement = self.placement_words(ranks, round);
        let (mut inputs, top_k) = (inputs.clone(), self.top_k as usize);
        let mut missing = vec![0; inputs.tokens];
        for (item, id) in inputs.ids.iter_mut().enumerate() {
            let place = usize::try_from(*id).map(|id| placement[id]);
            if place.is_ok_and(|place| self.is_masked(place >> 16)) {
                *id = -1;
                missing[item / top_k] |= 1 << (item % top_k);
            }
        }
        (inputs, missing)
    }

    /// Returns the word of each expert in the placement of round `round`.
    pub fn placement_words(&self, ranks: u32, round: usize) -> Vec<u32> {
        let per = self.experts.div_ceil(ranks);
        let places = self.places(ranks);
        (0..self.experts)
            .map(|expert| match self.placement {
                Placement::Default => ((expert / per) << 16) | (expert % per),
                Placement::Reversed => ((ranks - 1 - expert / per) << 16) | (expert % per),
                Placement::Rotating => {
                    let place = (expert + round as u32) % (ranks * places);
                    ((place / places) << 16) | (place % places)
                }
            })
            .collect()
    }
}

/// Inputs of a rank.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// Number of tokens.
    pub tokens: usize,
    /// Bytes of the tokens.
    pub x: Vec<u8>,
    /// Experts of each token.
    pub ids: Vec<i32>,
    /// Weights of the selections.
    pub weights: Vec<f32>,
}

/// Returns the inputs of `rank` in round `round`.
pub fn inputs(case: &MoeCase, rank: u32, round: usize) -> Inputs {
    let mut rng = Rng::new((round as u64) << 40 ^ u64::from(rank) << 20 ^ 0x30e5);
    let tokens = case.tokens_of(rank, round);
    let mut x = Vec::with_capacity(tokens * case.hidden);
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for token in 0..tokens {
        for group in (0..case.hidden).step_by(GROUP) {
            let factor = match rng.below(16) {
                0 => 0.0,
                1 => 1e-6,
                2..=4 => 0.0625,
                5..=7 => 8.0,
                _ => 1.0,
            };
            for _ in group..case.hidden.min(group + GROUP) {
                let unit = (rng.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0;
                x.push(if case.negated {
                    -unit * factor
                } else {
                    unit * factor
                });
            }
        }
        for id in case.routing.select(case, round, token, &mut rng) {
            let unit = (rng.bits() >> 40) as f32 / (1 << 24) as f32;
            ids.push(id);
            weights.push(match rng.below(16) {
                _ if id < 0 => f32::NAN,
                0 => 0.0,
                1 | 2 => -unit,
                _ => unit,
            });
        }
    }
    Inputs {
        tokens,
        x: narrow(case.input, &x),
        ids,
        weights,
    }
}

/// A row in the format of the payload.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Payload {
    /// Bytes of the elements.
    pub x: Vec<u8>,
    /// Scale of each group: the bits of the f32, or the byte.
    pub scales: Vec<u32>,
}

/// Returns the bits of `value`, or the bits of the canonical NaN if `value` is NaN.
fn bits(value: f32) -> u32 {
    if value.is_nan() {
        0x7fc0_0000
    } else {
        value.to_bits()
    }
}

/// Returns the value of a code of E4M3.
fn e4m3_value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code >= 0x80 { -magnitude } else { magnitude }
}

/// Quantizes a group. Returns the codes and the scale as in [`Payload`].
fn quantize(group: &[f32], scales: MoeScales) -> (Vec<u8>, u32) {
    let is_byte = scales == MoeScales::Ue8m0;
    let invalid = (
        vec![0x7f; group.len()],
        if is_byte { 255 } else { bits(f32::NAN) },
    );
    if group.iter().any(|x| x.is_nan()) {
        return invalid;
    }
    let greatest = group.iter().fold(1e-4f32, |a, x| a.max(x.abs()));
    let (scale, factor) = if !is_byte {
        (bits(greatest / 448.0), 448.0 / greatest)
    } else if greatest.is_infinite() {
        return invalid;
    } else {
        let exact = (greatest / 448.0).to_bits();
        let byte = (exact >> 23) + u32::from(exact & 0x7f_ffff != 0);
        (byte, 2f64.powi(127 - byte as i32) as f32)
    };
    (group.iter().map(|x| e4m3(x * factor)).collect(), scale)
}

/// Converts a token to the format of the payload.
pub fn payload(case: &MoeCase, token: &[u8]) -> Payload {
    let MoePayload::Fp8(format) = case.payload else {
        return Payload {
            x: token.to_vec(),
            scales: Vec::new(),
        };
    };
    let mut row = Payload::default();
    for group in widen(case.input, token).chunks(GROUP) {
        let (codes, scale) = quantize(group, format);
        row.x.extend(codes);
        row.scales.push(scale);
    }
    row
}

/// Returns the values of a row.
fn values(case: &MoeCase, row: &Payload) -> Vec<f32> {
    let MoePayload::Fp8(format) = case.payload else {
        return widen(case.input, &row.x);
    };
    let scale = |group: usize| match format {
        MoeScales::Ue8m0 => 2f64.powi(row.scales[group] as i32 - 127) as f32,
        _ => f32::from_bits(row.scales[group]),
    };
    let codes = row.x.iter().enumerate();
    codes
        .map(|(i, code)| e4m3_value(*code) * scale(i / GROUP))
        .collect()
}

/// Returns a row as dispatch delivers it.
fn delivered(case: &MoeCase, row: &Payload) -> Payload {
    match case.received {
        MoeReceived::Dequantized => Payload {
            x: narrow(case.input, &values(case, row)),
            scales: Vec::new(),
        },
        _ => row.clone(),
    }
}

/// A selection that a rank receives.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// Position among the selections of the token.
    pub k: usize,
    /// The expert.
    pub expert: u32,
    /// Row of the selection's result.
    pub result: usize,
}

/// A row that a rank receives.
#[derive(Clone, Debug)]
pub struct Row {
    /// Number of the row.
    pub row: usize,
    /// Rank of the token.
    pub source: u32,
    /// Number of the token on its rank.
    pub token: usize,
    /// The token.
    pub payload: Payload,
    /// Ids of the row.
    pub ids: Vec<i32>,
    /// Weights of the row.
    pub weights: Vec<f32>,
    /// Selections whose results the row needs.
    pub selections: Vec<Selection>,
}

/// Expected results of a dispatch on a rank.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    /// Rows that contain tokens.
    pub rows: Vec<Row>,
    /// Rows of each expert or source rank.
    pub counts: Vec<u32>,
    /// Offsets of the experts; in rank-major order those of the ranks in high throughput mode, and
    /// otherwise empty.
    pub offsets: Vec<u32>,
    /// Selections of each expert.
    pub selections: Vec<u64>,
}

/// Returns the results of the dispatch of round `round` on `rank`.
pub fn expected(case: &MoeCase, ranks: u32, rank: u32, round: usize) -> Expected {
    let placement = case.placement_words(ranks, round);
    let places = case.places(ranks) as usize;
    let top_k = case.top_k as usize;
    let mut out = Expected {
        selections: vec![0; places],
        ..Expected::default()
    };
    // Rows of each local expert, in the order of sources, tokens and selections.
    let mut of_experts = vec![Vec::new(); places];
    for source in 0..ranks {
        let inputs = inputs(case, source, round);
        let mut of_source = 0;
        let tokens = if case.is_masked(source) {
            0
        } else {
            inputs.tokens
        };
        for token in 0..tokens {
            let ids = &inputs.ids[token * top_k..][..top_k];
            let weights = &inputs.weights[token * top_k..][..top_k];
            let local: Vec<i32> = ids
                .iter()
                .map(|id| match usize::try_from(*id) {
                    Ok(id) if placement[id] >> 16 == rank => (placement[id] & 0xffff) as i32,
                    _ => -1,
                })
                .collect();
            if local.iter().all(|id| *id < 0) {
                continue;
            }
            let first = match case.is_staged() {
                true => out.rows.len(),
                false => source as usize * case.max_tokens + of_source,
            };
            of_source += 1;
            let bytes = case.row_bytes();
            let mut row = Row {
                row: first,
                source,
                token,
                payload: payload(case, &inputs.x[token * bytes..][..bytes]),
                ids: local.clone(),
                weights: weights.to_vec(),
                selections: Vec::new(),
            };
            for k in (0..top_k).filter(|k| local[*k] >= 0) {
                let selection = Selection {
                    k,
                    expert: ids[k] as u32,
                    result: first * top_k + k,
                };
                out.selections[local[k] as usize] += 1;
                row.selections.push(selection);
                if case.is_expert_major() {
                    of_experts[local[k] as usize].push(Row {
                        ids: vec![local[k]],
                        weights: vec![weights[k]],
                        selections: vec![selection],
                        ..row.clone()
                    });
                }
            }
            if !case.is_expert_major() {
                out.rows.push(row);
            }
        }
        if !case.is_expert_major() {
            out.counts.push(of_source as u32);
            if case.is_staged() {
                out.offsets.resize(source as usize + 1, 0);
                out.offsets.push(out.rows.len() as u32);
            }
        }
    }
    if case.is_expert_major() {
        let mut offset = 0;
        out.offsets.push(0);
        for rows in of_experts {
            out.counts.push(rows.len() as u32);
            let end = (offset + rows.len()).next_multiple_of(case.alignment);
            for (i, mut row) in rows.into_iter().enumerate() {
                row.row = offset + i;
                row.selections[0].result = offset + i;
                out.rows.push(row);
            }
            offset = end;
            out.offsets.push(offset as u32);
        }
    }
    out
}

/// Returns `count` rows of results for the rows of `expected`, as bytes of the input type. Rows
/// that are no results are NaN.
pub fn results(case: &MoeCase, expected: &Expected, count: usize, expert: Expert) -> Vec<u8> {
    let bytes = case.row_bytes();
    let mut y = vec![NAN; count * bytes];
    for row in &expected.rows {
        let x = values(case, &row.payload);
        for it in &row.selections {
            let result = expert.row(case, it.expert, it.k, &x);
            y[it.result * bytes..][..bytes].copy_from_slice(&result);
        }
    }
    y
}

/// Returns the values of a result, as it is sent.
fn returned(case: &MoeCase, result: &[u8]) -> Vec<f32> {
    let values = widen(case.input, result);
    if case.results == MoeResults::Same {
        return values;
    }
    let of_group = |group: &[f32]| -> Vec<f32> {
        let (codes, scale) = quantize(group, MoeScales::F32);
        let scale = f32::from_bits(scale);
        codes.iter().map(|code| e4m3_value(*code) * scale).collect()
    };
    values.chunks(GROUP).flat_map(of_group).collect()
}

/// Adds the weighted results of a token in the order of its selections. `result` returns the bytes
/// of the result of selection `k`.
pub fn combined(
    case: &MoeCase,
    inputs: &Inputs,
    token: usize,
    mut result: impl FnMut(usize) -> Vec<u8>,
) -> Vec<u8> {
    let top_k = case.top_k as usize;
    let mut sum = vec![0f32; case.hidden];
    for k in (0..top_k).filter(|k| inputs.ids[token * top_k + k] >= 0) {
        let weight = inputs.weights[token * top_k + k];
        for (sum, y) in sum.iter_mut().zip(returned(case, &result(k))) {
            *sum += weight * y;
        }
    }
    narrow(case.input, &sum)
}

/// Returns the results of the tokens of a rank with these inputs.
pub fn outputs(case: &MoeCase, inputs: &Inputs, expert: Expert) -> Vec<u8> {
    let bytes = case.row_bytes();
    (0..inputs.tokens)
        .flat_map(|token| {
            let x = values(case, &payload(case, &inputs.x[token * bytes..][..bytes]));
            let ids = &inputs.ids[token * case.top_k as usize..];
            combined(case, inputs, token, |k| {
                expert.row(case, ids[k] as u32, k, &x)
            })
        })
        .collect()
}

/// Memory of a rank for the inputs and results of a micro-batch.
#[derive(Debug)]
pub struct Buffers {
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    /// Results of the experts.
    pub y: Tensor,
}

/// The arguments of an operation: slices of [`Buffers`].
#[derive(Debug)]
pub struct Arguments {
    /// The tokens.
    pub x: Tensor,
    /// Experts of each token.
    pub ids: Tensor,
    /// Weights of the selections.
    pub weights: Tensor,
    /// Results of the tokens.
    pub out: Tensor,
}

impl Buffers {
    /// Allocates the memory.
    ///
    /// # Errors
    /// Returns the errors of [`Communicator::tensor`].
    pub fn new(comm: &Communicator, case: &MoeCase, info: &MoeInfo) -> fusewire::Result<Self> {
        let elements = case.max_tokens * case.hidden;
        let items = case.max_tokens * case.top_k as usize;
        Ok(Self {
            x: comm.tensor(case.input, elements)?,
            ids: comm.tensor(DType::I32, items)?,
            weights: comm.tensor(DType::F32, items)?,
            out: comm.tensor(case.input, elements)?,
            y: comm.tensor(case.input, info.results * case.hidden)?,
        })
    }

    /// Returns the arguments for `tokens` tokens.
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::slice`].
    pub fn arguments(&self, case: &MoeCase, tokens: usize) -> fusewire::Result<Arguments> {
        let (elements, items) = (tokens * case.hidden, tokens * case.top_k as usize);
        Ok(Arguments {
            x: self.x.slice(0, elements)?,
            ids: self.ids.slice(0, items)?,
            weights: self.weights.slice(0, items)?,
            out: self.out.slice(0, elements)?,
        })
    }

    /// Copies inputs to the memory and fills the outputs with NaN. Returns the arguments.
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::copy_from`].
    pub fn write(&self, case: &MoeCase, inputs: &Inputs) -> fusewire::Result<Arguments> {
        let arguments = self.arguments(case, inputs.tokens)?;
        arguments.x.copy_from_bytes(&inputs.x)?;
        arguments.ids.copy_from(&inputs.ids)?;
        arguments.weights.copy_from(&inputs.weights)?;
        fill(&self.out, NAN)?;
        Ok(arguments)
    }

    /// Compares the results of the tokens with `expected`. No other outputs may be written.
    ///
    /// # Errors
    /// Returns a description of the first difference.
    pub fn check(&self, case: &MoeCase, expected: &[u8]) -> Result<(), String> {
        let found = self.out.to_bytes().map_err(text)?;
        let bytes = case.row_bytes();
        for (token, found) in found.chunks(bytes).enumerate() {
            let unused = vec![NAN; bytes];
            let expected = match expected.get(token * bytes..(token + 1) * bytes) {
                Some(expected) => expected,
                None => &unused,
            };
            same(
                &format!("token {token}: out"),
                case.input.size(),
                found,
                expected,
            )?;
        }
        Ok(())
    }
}

fn text(error: fusewire::Error) -> String {
    error.to_string()
}

/// Sets every byte of `tensor` to `byte`.
fn fill(tensor: &Tensor, byte: u8) -> fusewire::Result<()> {
    tensor.copy_from_bytes(&vec![byte; tensor.len() * tensor.dtype().size()])
}

/// Compares elements of `size` bytes. An error names the first element that differs.
fn same(name: &str, size: usize, found: &[u8], expected: &[u8]) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    if found.len() != expected.len() {
        return Err(format!(
            "{name} has {} bytes, expected {}",
            found.len(),
            expected.len()
        ));
    }
    let element = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let pairs = found.chunks(size).zip(expected.chunks(size)).enumerate();
    let wrong: Vec<String> = pairs
        .filter(|(_, (found, expected))| found != expected)
        .take(3)
        .map(|(i, (found, expected))| {
            let (found, expected) = (element(found), element(expected));
            format!("element {i} is {found:#x}, expected {expected:#x}")
        })
        .collect();
    Err(format!("{name}: {}", wrong.join("; ")))
}

/// Compares two values.
fn equal<T: PartialEq + core::fmt::Debug>(name: &str, found: T, expected: T) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{name} is {found:?}, expected {expected:?}"))
}

/// Fills the results of an earlier dispatch. The next dispatch must write or preserve them. All
/// ranks together: no peer may write them during this call. In rank-major order in low latency
/// mode, tokens and scales keep their contents, because peers write them directly.
///
/// # Errors
/// Returns the errors of [`Tensor::copy_from_bytes`] and of the barrier.
pub fn poison(
    comm: &Communicator,
    case: &MoeCase,
    dispatched: &Dispatched,
) -> fusewire::Result<()> {
    let it = dispatched;
    for tensor in [&it.counts, &it.sources, &it.ids, &it.weights] {
        fill(tensor, POISON)?;
    }
    if let Some(offsets) = &it.offsets {
        fill(offsets, POISON)?;
    }
    if case.copies_rows() {
        fill(&it.x, POISON)?;
        if let Some(scales) = &it.scales {
            fill(scales, POISON)?;
        }
    }
    comm.barrier()
}

/// Compares the results of a dispatch with `expected`. If `poisoned`, the results contained the
/// bytes of [`poison`] before the dispatch.
///
/// # Errors
/// Returns a description of the first difference.
pub fn check_dispatched(
    case: &MoeCase,
    info: &MoeInfo,
    dispatched: &Dispatched,
    expected: &Expected,
    poisoned: bool,
) -> Result<(), String> {
    let it = dispatched;
    let width = case.width();
    let counts = it.counts.to_vec::<u32>().map_err(text)?;
    equal("counts", &counts, &expected.counts)?;
    let offsets = match &it.offsets {
        Some(offsets) => offsets.to_vec::<u32>().map_err(text)?,
        None => Vec::new(),
    };
    equal("offsets", &offsets, &expected.offsets)?;
    let sources = it.sources.to_vec::<u32>().map_err(text)?;
    let ids = it.ids.to_vec::<i32>().map_err(text)?;
    let weights = it.weights.to_vec::<f32>().map_err(text)?;
    equal("length of sources", sources.len(), info.rows * 2)?;
    equal("length of ids", ids.len(), info.rows * width)?;
    equal("length of weights", weights.len(), info.rows * width)?;
    let format = match case.payload {
        MoePayload::Fp8(format) if case.received == MoeReceived::AsSent => Some(format),
        _ => None,
    };
    let dtype = if format.is_some() {
        DType::E4m3
    } else {
        case.input
    };
    equal("type of x", it.x.dtype(), dtype)?;
    let x = it.x.to_bytes().map_err(text)?;
    let (stride, row_bytes) = (info.x_stride * dtype.size(), case.hidden * dtype.size());
    let scales = match (&it.scales, format) {
        (Some(scales), Some(format)) => Some((scales.to_bytes().map_err(text)?, format)),
        (None, None) => None,
        (found, _) => return Err(format!("scales are {found:?} with {format:?}")),
    };
    let mut rows = vec![None; info.rows];
    for row in &expected.rows {
        *rows
            .get_mut(row.row)
            .ok_or_else(|| format!("row {} of {} rows", row.row, info.rows))? = Some(row);
    }
    // Where rows arrive, the other contents of unused rows are not specified.
    let preserved = poisoned && case.copies_rows();
    let poison = u32::from_le_bytes([POISON; 4]);
    for (number, row) in rows.into_iter().enumerate() {
        let name = |what: &str| format!("row {number}: {what}");
        let pair = [sources[2 * number], sources[2 * number + 1]];
        let ids = &ids[number * width..][..width];
        let weights: Vec<u32> = weights[number * width..][..width]
            .iter()
            .map(|weight| weight.to_bits())
            .collect();
        let columns = case.scales_layout == MoeScalesLayout::ColumnMajor;
        let scales_of = |count: usize| -> Option<(Vec<u8>, usize)> {
            let (bytes, format) = scales.as_ref()?;
            let size = if *format == MoeScales::Ue8m0 { 1 } else { 4 };
            let stride = info.scales_stride;
            if !columns {
                let first = number * stride * size;
                return Some((bytes.get(first..first + count * size)?.to_vec(), size));
            }
            // Columns of words: one f32, or the bytes of four groups.
            let each = 4 / size;
            let scale = |group: usize| {
                let first = 4 * (group / each * stride + number) + group % each * size;
                bytes.get(first..first + size)
            };
            let scales: Option<Vec<&[u8]>> = (0..count).map(scale).collect();
            Some((scales?.concat(), size))
        };
        let Some(row) = row else {
            equal(&name("ids"), ids, &vec![-1; width][..])?;
            if preserved {
                equal(&name("sources"), pair, [poison; 2])?;
                equal(&name("weights"), weights, vec![poison; width])?;
                let row = &x[number * stride..][..row_bytes];
                same(&name("x"), dtype.size(), row, &vec![POISON; row_bytes])?;
                let count = if columns {
                    case.groups()
                } else {
                    info.scales_stride
                };
                if let Some((bytes, size)) = scales_of(count) {
                    same(&name("scales"), size, &bytes, &vec![POISON; bytes.len()])?;
                }
            }
            continue;
        };
        equal(&name("sources"), pair, [row.source, row.token as u32])?;
        equal(&name("ids"), ids, &row.ids[..])?;
        let expected: Vec<u32> = row.weights.iter().map(|weight| weight.to_bits()).collect();
        equal(&name("weights"), weights, expected)?;
        let Some(found) = x.get(number * stride..number * stride + row_bytes) else {
            return Err(format!("row {number} exceeds x of {} bytes", x.len()));
        };
        let delivered = delivered(case, &row.payload);
        same(&name("x"), dtype.size(), found, &delivered.x)?;
        if scales.is_none() {
            continue;
        }
        let Some((found, size)) = scales_of(case.groups()) else {
            return Err(format!("row {number} exceeds the scales"));
        };
        let found: Vec<u32> = found
            .chunks(size)
            .map(|scale| match *scale {
                [byte] => u32::from(byte),
                [a, b, c, d] => bits(f32::from_le_bytes([a, b, c, d])),
                _ => unreachable!("scales of 1 or 4 bytes"),
            })
            .collect();
        equal(&name("scales"), &found, &delivered.scales)?;
    }
    Ok(())
}

/// A layer on a rank, with the state that its checks need.
struct Layer<'a> {
    comm: &'a Communicator,
    case: &'a MoeCase,
    moe: &'a Moe,
    buffers: Buffers,
    previous: Option<Dispatched>,
    /// Selections that each local place has received.
    received: Vec<u64>,
}

impl Layer<'_> {
    /// Waits for the stream, unless the operations have waited.
    fn complete(&self) -> Result<(), String> {
        match self.case.blocking {
            true => Ok(()),
            false => self.comm.synchronize().map_err(text),
        }
    }

    fn dispatch(&self, with: &Arguments) -> fusewire::Result<Dispatched> {
        let Arguments {
            x, ids, weights, ..
        } = with;
        if !self.case.halves {
            return self.moe.dispatch(x, ids, weights);
        }
        let dispatched = self.moe.dispatch_send(x, ids, weights)?;
        self.moe.dispatch_receive(&dispatched)?;
        Ok(dispatched)
    }

    fn combine(&self, dispatched: &Dispatched, out: &Tensor) -> fusewire::Result<()> {
        let y = &self.buffers.y;
        if !self.case.halves {
            return self.moe.combine(y, dispatched, out);
        }
        self.moe.combine_send(y, dispatched)?;
        self.moe.combine_receive(dispatched, out)
    }

    fn round(&mut self, round: usize) -> Result<(), String> {
        let (comm, case, moe) = (self.comm, self.case, self.moe);
        let (rank, ranks) = (comm.rank(), comm.size());
        if case.placement != Placement::Default {
            let words = case.placement_words(ranks, round);
            moe.placement().copy_from(&words).map_err(text)?;
        }
        let placement = moe.placement().to_vec::<u32>().map_err(text)?;
        equal("placement", placement, case.placement_words(ranks, round))?;
        let inputs = inputs(case, rank, round);
        let arguments = self.buffers.write(case, &inputs).map_err(text)?;
        // Poison needs a barrier, which may hide errors, so only every other round is poisoned.
        let poisoned = match &self.previous {
            Some(previous) if round % 2 == 1 => {
                poison(comm, case, previous).map_err(text)?;
                true
            }
            _ => false,
        };
        let dispatched = self.dispatch(&arguments).map_err(text)?;
        self.complete()?;
        if let Some(previous) = &self.previous {
            let (found, expected) = (dispatched.x.as_ptr(), previous.x.as_ptr());
            equal("address of x", found, expected)?;
        }
        let expected = expected(case, ranks, rank, round);
        check_dispatched(case, moe.info(), &dispatched, &expected, poisoned)?;
        if case.is_expert_major() {
            for (sum, count) in self.received.iter_mut().zip(&expected.selections) {
                *sum += count;
            }
            let found = moe.tokens_per_expert().to_vec::<u64>().map_err(text)?;
            equal("tokens_per_expert", &found, &self.received)?;
        }
        self.combine_and_check(case, round, &dispatched)?;
        self.previous = Some(if case.reuse {
            self.repeat(round, &dispatched)?
        } else {
            dispatched
        });
        if case.missing_ranks == MissingRanks::Mask {
            let mask = moe.mask().to_vec::<u32>().map_err(text)?;
            equal("mask", mask, vec![0; ranks as usize])?;
            let missing = moe.missing().to_vec::<u32>().map_err(text)?;
            equal("missing", missing, vec![0; case.max_tokens])?;
        }
        Ok(())
    }

    /// Combines the results of the experts in round `round` of `case`, and checks the sums.
    fn combine_and_check(
        &self,
        case: &MoeCase,
        round: usize,
        dispatched: &Dispatched,
    ) -> Result<(), String> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let inputs = inputs(case, rank, round);
        let out = self.buffers.arguments(case, inputs.tokens);
        let out = out.map_err(text)?.out;
        let expert = Expert::Affine(round as f32);
        let expected = expected(case, ranks, rank, round);
        let y = results(case, &expected, self.moe.info().results, expert);
        self.buffers.y.copy_from_bytes(&y).map_err(text)?;
        self.combine(dispatched, &out).map_err(text)?;
        self.complete()?;
        self.buffers.check(case, &outputs(case, &inputs, expert))
    }

    /// Dispatches the negated tokens of round `round` to the same experts, and combines them. The
    /// ids are not read again, so they are poisoned meanwhile.
    fn repeat(&mut self, round: usize, previous: &Dispatched) -> Result<Dispatched, String> {
        let case = MoeCase {
            negated: true,
            ..self.case.clone()
        };
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let inputs = inputs(&case, rank, round);
        let arguments = self.buffers.write(&case, &inputs).map_err(text)?;
        let poison = vec![i32::MAX; inputs.ids.len()];
        arguments.ids.copy_from(&poison).map_err(text)?;
        let again = if case.halves {
            let again = self.moe.redispatch_send(&arguments.x, previous);
            let again = again.map_err(text)?;
            self.moe.dispatch_receive(&again).map_err(text)?;
            again
        } else {
            let again = self.moe.redispatch(&arguments.x, previous);
            again.map_err(text)?
        };
        self.complete()?;
        let expected = expected(&case, ranks, rank, round);
        check_dispatched(&case, self.moe.info(), &again, &expected, false)?;
        for (sum, count) in self.received.iter_mut().zip(&expected.selections) {
            *sum += count;
        }
        // Combine reads the ids.
        arguments.ids.copy_from(&inputs.ids).map_err(text)?;
        self.combine_and_check(&case, round, &again)?;
        Ok(again)
    }
}

/// Checks the sizes of a layer.
fn check_info(case: &MoeCase, ranks: u32, info: &MoeInfo) -> Result<(), String> {
    equal("local_experts", info.local_experts, case.places(ranks))?;
    let rows = case.all_rows(ranks);
    match case.capacity {
        Some(capacity) if case.copies_rows() => equal("rows", info.rows, capacity)?,
        // The default capacity may be rounded up.
        _ if case.is_expert_major() && info.rows >= rows => {}
        _ => equal("rows", info.rows, rows)?,
    }
    equal("results", info.results, info.rows * case.width())?;
    if case.copies_rows() {
        equal("x_stride", info.x_stride, case.hidden)?;
    }
    let is_row = case.scales_layout == MoeScalesLayout::RowMajor;
    let has_scales = case.received == MoeReceived::AsSent && case.groups() > 0;
    let least = match (has_scales, is_row) {
        (false, _) => 0,
        (true, true) => case.groups(),
        (true, false) => info.rows,
    };
    if info.x_stride < case.hidden || info.scales_stride < least {
        return Err(format!("rows overlap: {info:?}"));
    }
    Ok(())
}

/// Creates the layer of `case`, and dispatches and combines `rounds` times. Compares all results
/// with the expected results. All ranks together.
///
/// # Errors
/// Returns a description of the first difference, or the error of a call.
pub fn run(comm: &Communicator, case: &MoeCase, rounds: usize) -> Result<(), String> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let named = |wrong: String| format!("rank {rank} of {ranks}, {case:?}: {wrong}");
    let mut moe = Moe::new(comm, &case.config()).map_err(|error| named(text(error)))?;
    if case.blocking {
        moe = moe.blocking();
    }
    check_info(case, ranks, moe.info()).map_err(named)?;
    let buffers = Buffers::new(comm, case, moe.info()).map_err(|error| named(text(error)))?;
    let mut layer = Layer {
        comm,
        case,
        moe: &moe,
        buffers,
        previous: None,
        received: vec![0; case.places(ranks) as usize],
    };
    for round in 0..rounds {
        layer
            .round(round)
            .map_err(|wrong| named(format!("round {round}: {wrong}")))?;
    }
    drop(layer);
    moe.free().map_err(|error| named(text(error)))
}

/// Layouts of the lists.
pub const LAYOUTS: [MoeLayout; 2] = [MoeLayout::ExpertMajor, MoeLayout::RankMajor];

/// Payloads of the lists.
pub const PAYLOADS: [MoePayload; 3] = [
    MoePayload::Same,
    MoePayload::Fp8(MoeScales::F32),
    MoePayload::Fp8(MoeScales::Ue8m0),
];

/// Input types of the lists.
pub const INPUTS: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

/// Greatest number of elements of the results of the experts of a rank in the lists.
const MAX_ELEMENTS: usize = 200_000;

/// Makes the case smaller until the results of a rank's experts have [`MAX_ELEMENTS`] elements.
fn shrink(case: &mut MoeCase, ranks: u32) {
    let elements = |case: &MoeCase| case.all_rows(ranks) * case.width() * case.hidden;
    while elements(case) > MAX_ELEMENTS {
        if case.tokens > 7 {
            case.tokens = if case.tokens > 33 { 33 } else { 7 };
            case.max_tokens = case.tokens;
        } else if case.hidden > 512 {
            case.hidden = 512;
        } else if case.top_k > 2 {
            case.top_k /= 2;
        } else if case.alignment > 8 {
            case.alignment = 8;
        } else if case.hidden > GROUP {
            case.hidden = GROUP;
        } else {
            return;
        }
    }
}

/// Returns small cases for `ranks` ranks of the settings that few users change.
pub fn settings(ranks: u32) -> Vec<MoeCase> {
    let base = MoeCase {
        uneven: true,
        routing: Routing::Masked,
        alignment: 4,
        ..MoeCase::new(7, 3, 2 * GROUP, 5)
    };
    let mut cases = Vec::new();
    for payload in &PAYLOADS[1..] {
        for (input, hidden) in [(DType::Bf16, 2 * GROUP), (DType::F32, 5 * GROUP)] {
            let base = MoeCase {
                input,
                hidden,
                payload: *payload,
                halves: cases.len() % 2 == 1,
                ..base.clone()
            };
            cases.push(MoeCase {
                scales_layout: MoeScalesLayout::ColumnMajor,
                ..base.clone()
            });
            cases.push(MoeCase {
                received: MoeReceived::Dequantized,
                ..base
            });
        }
    }
    for payload in PAYLOADS {
        for layout in LAYOUTS {
            let base = MoeCase {
                payload,
                layout,
                halves: cases.len() % 2 == 1,
                ..base.clone()
            };
            cases.push(MoeCase {
                missing_ranks: MissingRanks::Mask,
                blocking: layout == MoeLayout::ExpertMajor,
                ..base.clone()
            });
            cases.push(MoeCase {
                reuse: true,
                missing_ranks: match layout {
                    MoeLayout::RankMajor => MissingRanks::Mask,
                    _ => MissingRanks::Fail,
                },
                ..base
            });
        }
    }
    for (input, hidden) in [
        (DType::Bf16, 2 * GROUP),
        (DType::F16, GROUP),
        (DType::F32, 5 * GROUP),
    ] {
        for layout in LAYOUTS {
            let halves = cases.len() % 2 == 1;
            cases.push(MoeCase {
                input,
                hidden,
                layout,
                halves,
                results: MoeResults::Fp8,
                blocking: true,
                ..base.clone()
            });
        }
    }
    cases.extend(rounds(ranks));
    // All rows fit, but the ranks must find out.
    let bounded = |missing_ranks| MoeCase {
        capacity: Some(base.all_rows(ranks) - 1),
        missing_ranks,
        ..base.clone()
    };
    cases.extend([MissingRanks::Fail, MissingRanks::Mask].map(bounded));
    cases
}

/// Returns small cases for `ranks` ranks in high throughput mode, with one to five rounds.
pub fn rounds(ranks: u32) -> Vec<MoeCase> {
    let mut cases = Vec::new();
    for payload in PAYLOADS {
        for layout in LAYOUTS {
            let base = MoeCase {
                payload,
                layout,
                input: INPUTS[cases.len() % 3],
                uneven: true,
                routing: Routing::Masked,
                alignment: 4,
                ..MoeCase::new(7, 3, 2 * GROUP, 11)
            };
            let bounded = MoeCase {
                capacity: Some(base.all_rows(ranks) - 1),
                results: MoeResults::Fp8,
                ..base.clone()
            };
            let is_fp8 = payload != MoePayload::Same;
            let form = MoeCase {
                reuse: true,
                blocking: true,
                scales_layout: match is_fp8 {
                    true => MoeScalesLayout::ColumnMajor,
                    false => MoeScalesLayout::RowMajor,
                },
                ..base.clone()
            };
            let dequantized = MoeCase {
                received: match is_fp8 {
                    true => MoeReceived::Dequantized,
                    false => MoeReceived::AsSent,
                },
                routing: Routing::SomeEmpty,
                ..base.clone()
            };
            let pair = match (layout, payload) {
                (MoeLayout::ExpertMajor, MoePayload::Fp8(MoeScales::F32))
                | (MoeLayout::RankMajor, MoePayload::Fp8(MoeScales::Ue8m0)) => {
                    [dequantized.staged(1), bounded.staged(4)]
                }
                _ => [form.staged(3), bounded.staged(11)],
            };
            cases.extend(pair);
        }
    }
    cases
}

/// Returns a small case for each type, payload and layout, so that they use every kernel.
pub fn forms() -> Vec<MoeCase> {
    let mut cases = Vec::new();
    for input in INPUTS {
        for payload in PAYLOADS {
            for layout in LAYOUTS {
                cases.push(MoeCase {
                    input,
                    payload,
                    layout,
                    uneven: true,
                    routing: Routing::Masked,
                    alignment: 4,
                    halves: cases.len() % 2 == 1,
                    ..MoeCase::new(7, 3, 2 * GROUP, 5)
                });
            }
        }
    }
    cases
}

/// Returns the conformance list for `ranks` ranks. Each kind of routing occurs with each layout,
/// payload and input type.
pub fn list(ranks: u32) -> Vec<MoeCase> {
    let mut cases = Vec::new();
    for i in 0..54usize {
        let mut rng = Rng::new(i as u64 ^ 0x11d5);
        let (half, layout) = (i / 2, LAYOUTS[i % 2]);
        let payload = PAYLOADS[half % 3];
        let hidden = if payload == MoePayload::Same {
            [8, 24, 128, 136, 512, 2048][(half / 3 + i % 2 * 3) % 6]
        } else {
            [128, 512, 2048][(half / 3 + i) % 3]
        };
        let experts = [1, 3, 7, 16, 64][(half + 2 * (i % 2)) % 5];
        let top_k = rng.pick(&[1, 2, 8, 16]);
        let tokens = rng.pick(&[1, 2, 7, 33, 128]);
        let alignment = rng.pick(&[1, 8, 16]);
        let mut case = MoeCase {
            max_tokens: tokens + rng.pick(&[0, 0, 3]),
            uneven: rng.one_in(2),
            routing: Routing::ALL[(half + 4 * (i % 2)) % 8],
            placement: rng.pick(&[Placement::Default, Placement::Reversed, Placement::Rotating]),
            input: INPUTS[half / 3 % 3],
            payload,
            layout,
            alignment: if layout == MoeLayout::ExpertMajor {
                alignment
            } else {
                1
            },
            halves: rng.one_in(3),
            ..MoeCase::new(experts, top_k, hidden, tokens)
        };
        shrink(&mut case, ranks);
        cases.push(case);
    }
    for layout in LAYOUTS {
        let of = |experts, top_k, hidden, tokens, routing| MoeCase {
            routing,
            layout,
            ..MoeCase::new(experts, top_k, hidden, tokens)
        };
        cases.push(of(3, 16, 24, 7, Routing::Duplicates));
        cases.push(of(7, 16, 8, 33, Routing::Distinct));
        cases.push(of(64, 8, 24, 33, Routing::Distinct));
        cases.push(of(16, 2, 8, 128, Routing::Skewed));
        cases.push(MoeCase {
            local_experts: 9,
            placement: Placement::Rotating,
            ..of(7, 2, 24, 7, Routing::Uniform)
        });
    }
    for payload in PAYLOADS {
        cases.push(MoeCase {
            payload,
            ..MoeCase::new(7, 2, 2048, 7)
        });
    }
    cases.push(MoeCase {
        alignment: 16,
        ..MoeCase::new(64, 8, 8, 33)
    });
    cases.extend(settings(ranks));
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_covers_pairs_of_settings() {
        for ranks in [1, 4, 8] {
            let cases = list(ranks);
            let has = |what: &str, test: &dyn Fn(&MoeCase) -> bool| {
                assert!(cases.iter().any(test), "{ranks} ranks: no {what}");
            };
            for routing in Routing::ALL {
                for layout in LAYOUTS {
                    let what = format!("{routing:?} with {layout:?}");
                    has(&what, &|it| it.routing == routing && it.layout == layout);
                }
                for payload in PAYLOADS {
                    let what = format!("{routing:?} with {payload:?}");
                    has(&what, &|it| it.routing == routing && it.payload == payload);
                }
                for input in INPUTS {
                    let what = format!("{routing:?} with {input:?}");
                    has(&what, &|it| it.routing == routing && it.input == input);
                }
            }
            for layout in LAYOUTS {
                for top_k in [1, 2, 8, 16] {
                    let what = format!("{layout:?} with top_k {top_k}");
                    has(&what, &|it| it.layout == layout && it.top_k == top_k);
                }
                for experts in [1, 3, 7, 16, 64] {
                    let what = format!("{layout:?} with {experts} experts");
                    has(&what, &|it| it.layout == layout && it.experts == experts);
                }
                for payload in PAYLOADS {
                    for input in INPUTS {
                        let what = format!("{layout:?} with {payload:?} and {input:?}");
                        has(&what, &|it| {
                            (it.layout, it.payload, it.input) == (layout, payload, input)
                        });
                    }
                }
            }
            for hidden in [8, 24, 128, 136, 512, 2048] {
                has(&format!("hidden {hidden}"), &|it| it.hidden == hidden);
            }
            for tokens in [1, 2, 7, 33, 128] {
                has(&format!("{tokens} tokens"), &|it| it.tokens == tokens);
            }
            for alignment in [1, 8, 16] {
                has(&format!("alignment {alignment}"), &|it| {
                    it.is_expert_major() && it.alignment == alignment
                });
            }
        }
    }

    #[test]
    fn each_selection_arrives_once() {
        for ranks in [1, 3, 4] {
            for case in list(ranks) {
                let mut arrived = vec![0; ranks as usize];
                for rank in 0..ranks {
                    let expected = expected(&case, ranks, rank, 1);
                    for row in &expected.rows {
                        arrived[row.source as usize] += row.selections.len();
                        assert!(row.row < case.all_rows(ranks), "{case:?}: {row:?}");
                    }
                    let total: u32 = expected.counts.iter().sum();
                    assert_eq!(total as usize, expected.rows.len(), "{case:?}");
                }
                for (rank, arrived) in (0..ranks).zip(arrived) {
                    let ids = inputs(&case, rank, 1).ids;
                    let sent = ids.iter().filter(|id| **id >= 0).count();
                    assert_eq!(arrived, sent, "{case:?}, rank {rank}");
                }
            }
        }
    }

    #[test]
    fn groups_have_the_documented_scales() {
        let f32s = |group: &[f32]| quantize(group, MoeScales::F32);
        assert_eq!(
            f32s(&[448.0, -0.0, 1.0]),
            (vec![0x7e, 0x80, 0x38], bits(1.0))
        );
        assert_eq!(f32s(&[0.0, 0.0]).1, bits(1e-4 / 448.0));
        assert_eq!(f32s(&[f32::NAN, 1.0]), (vec![0x7f; 2], bits(f32::NAN)));
        let infinite = [f32::INFINITY, 1.0];
        assert_eq!(f32s(&infinite), (vec![0x7f, 0], bits(f32::INFINITY)));
        let bytes = |group: &[f32]| quantize(group, MoeScales::Ue8m0);
        assert_eq!(bytes(&[448.0, 1.0]), (vec![0x7e, 0x38], 127));
        assert_eq!(bytes(&[449.0, 2.0]), (vec![0x76, 0x38], 128));
        assert_eq!(bytes(&infinite), (vec![0x7f; 2], 255));
        assert_eq!(bytes(&[f32::NAN]), (vec![0x7f], 255));
        for code in (0..=0x7e).chain(0x80..=0xfe) {
            assert_eq!(e4m3(e4m3_value(code)), code);
        }
    }
}
