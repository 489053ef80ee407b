//! Measures dispatch and combine of a mixture of experts.
//!
//! Before timing, the results of each candidate are compared with expected ones: the rows that
//! every rank receives, and after the host has written a result for each selection, the sums of all
//! tokens. Products and sums in the order of the selections are rounded in the same way on both
//! sides, so all comparisons are bitwise.

use core::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use fusewire::{
    Bf16, DType, Dispatched, E4m3, Moe, MoeConfig, MoeLayout, MoePayload, MoeScales, Tensor,
};

use super::all_reduce::{RankPart, grid};
use super::benchmark::{Candidate, Mode, MoeCall, Side, Stage, Step};
use super::data::{self, element, from_bf16, to_bf16};
use super::entries::{
    Entry, INFO_TOKEN, INFO_WORDS, Kernel, MAX_EXPERTS, MOE_COUNTS, MOE_PAD_WORDS, MoeValues,
    TOP_K, Team, VECTOR, Values,
};
use super::report::{MoeRow, Row};

/// Type of the tokens and of the results.
const DTYPE: DType = DType::Bf16;
/// Channels of a scale.
const GROUP: usize = 128;

/// Measured settings: every combination.
#[derive(Clone, Debug)]
pub(crate) struct Cases {
    pub(crate) tokens: Vec<usize>,
    pub(crate) hidden: Vec<usize>,
    pub(crate) payloads: Vec<DType>,
    pub(crate) experts: usize,
}

impl Cases {
    /// Rejects cases for which the baseline has no kernels.
    pub(crate) fn check(&self, ranks: &[usize]) -> Result<()> {
        let experts = self.experts;
        ensure!(
            (TOP_K..=MAX_EXPERTS).contains(&experts)
                && ranks.iter().all(|ranks| experts.is_multiple_of(*ranks)),
            "{experts} experts: must be {TOP_K} to {MAX_EXPERTS}, and a multiple of all numbers of \
             ranks"
        );
        let fits = |hidden: &usize| *hidden > 0 && hidden.is_multiple_of(GROUP);
        ensure!(
            self.hidden.iter().all(fits),
            "tokens of {:?} elements: must be multiples of {GROUP}",
            self.hidden
        );
        ensure!(
            self.tokens.iter().all(|tokens| *tokens > 0),
            "no tokens for the experts"
        );
        Ok(())
    }
}

/// A measurement.
#[derive(Clone, Copy, Debug)]
struct Case {
    ranks: usize,
    experts: usize,
    hidden: usize,
    /// Maximum number of tokens of a rank, and the number that each rank has.
    most: usize,
    tokens: usize,
    layout: MoeLayout,
    payload: DType,
    /// Selects the values of the elements, and the experts.
    salt: usize,
}

/// A selection of a received row: the index among the token's selections, the expert's index on
/// its rank, and the weight.
type Selection = (usize, i32, f32);

/// A row that a rank has received.
#[derive(Clone, Debug)]
struct ReceivedRow {
    source: usize,
    token: usize,
    selections: Vec<Selection>,
    elements: Vec<u8>,
    scales: Vec<u8>,
    /// First row of its results. Selection k has row `first + k` in rank-major order, and row
    /// `first` in expert-major order.
    first_result: usize,
}

impl Case {
    fn per_rank(&self) -> usize {
        self.experts / self.ranks
    }

    fn is_expert_major(&self) -> bool {
        self.layout == MoeLayout::ExpertMajor
    }

    /// Vectors of a token, and of a row of the baseline.
    fn width(&self) -> usize {
        self.hidden * DTYPE.size() / VECTOR
    }

    fn stride(&self) -> usize {
        match self.payload {
            DType::E4m3 => self.hidden / VECTOR + self.scales().div_ceil(4),
            _ => self.width(),
        }
    }

    /// Scales of a token.
    fn scales(&self) -> usize {
        match self.payload {
            DType::E4m3 => self.hidden / GROUP,
            _ => 0,
        }
    }

    /// Returns the experts of a rank's tokens, without repetition in a token.
    fn experts(&self, rank: usize) -> Vec<i32> {
        let seed = (rank + 1 + 64 * self.salt) as u64;
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut ids = Vec::with_capacity(self.tokens * TOP_K);
        while ids.len() < self.tokens * TOP_K {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let id = ((state >> 11) % self.experts as u64) as i32;
            let start = ids.len() / TOP_K * TOP_K;
            if !ids[start..].contains(&id) {
                ids.push(id);
            }
        }
        ids
    }

    /// Returns the weight of a selection. Sums of products are not exact, so they depend on the
    /// order and on the rounding.
    fn weight(&self, rank: usize, selection: usize) -> f32 {
        (1 + (rank * 3 + selection * 5 + self.salt) % 13) as f32 / 29.0
    }

    /// Returns an element of a token. The magnitudes of channels differ, also among those that
    /// share a scale.
    fn token(&self, rank: usize, token: usize, channel: usize) -> f32 {
        let value = element(rank, token * self.hidden + channel, self.salt);
        value as f32 * (1 + channel / 32 % 7) as f32 / 8.0
    }

    /// Returns an element of the result of a selection.
    fn result(&self, rank: usize, selection: usize, channel: usize) -> f32 {
        element(rank, selection * 37 + channel, self.salt) as f32
    }

    fn result_row(&self, rank: usize, selection: usize) -> Vec<u8> {
        let value = |channel| self.result(rank, selection, channel);
        data::encode(DTYPE, self.hidden, value)
    }

    /// Returns the elements and the scales of the row of a token.
    fn row(&self, rank: usize, token: usize) -> (Vec<u8>, Vec<u8>) {
        let value = |channel| self.token(rank, token, channel);
        if self.payload != DType::E4m3 {
            return (data::encode(DTYPE, self.hidden, value), Vec::new());
        }
        let (mut elements, mut scales) = (Vec::new(), Vec::new());
        for group in 0..self.hidden / GROUP {
            let values = (group * GROUP..(group + 1) * GROUP).map(value);
            let largest = values.clone().map(f32::abs).fold(1e-4, f32::max);
            scales.extend((largest / 448.0).to_ne_bytes());
            let factor = 448.0 / largest;
            elements.extend(values.map(|value| E4m3::from_f32(value * factor).0));
        }
        (elements, scales)
    }

    /// Counts the wrong elements of the rows that `rank` has received. A row that is missing, or
    /// has a wrong expert or weight, is counted as a whole.
    fn wrong_rows(&self, rank: usize, received: &[ReceivedRow]) -> u64 {
        let per_rank = self.per_rank() as i32;
        // By source, token and, in expert-major order, expert.
        let mut expected: HashMap<(usize, usize, i32), Vec<Selection>> = HashMap::new();
        for source in 0..self.ranks {
            for (at, id) in self.experts(source).into_iter().enumerate() {
                if id / per_rank == rank as i32 {
                    let local = id % per_rank;
                    let key = if self.is_expert_major() { local } else { -1 };
                    let selection = (at % TOP_K, local, self.weight(source, at));
                    let key = (source, at / TOP_K, key);
                    expected.entry(key).or_default().push(selection);
                }
            }
        }
        let mut wrong = 0;
        for row in received {
            let key = match (self.is_expert_major(), row.selections.first()) {
                (true, Some((_, expert, _))) => *expert,
                _ => -1,
            };
            let selections = expected.remove(&(row.source, row.token, key));
            if selections.as_ref() != Some(&row.selections) {
                wrong += self.hidden as u64;
                continue;
            }
            let (elements, scales) = self.row(row.source, row.token);
            wrong += data::differing(self.payload, &row.elements, &elements);
            wrong += data::differing(DType::F32, &row.scales, &scales);
        }
        wrong + (expected.len() * self.hidden) as u64
    }

    /// Returns the sums of a rank's tokens for results that `result` returns for each selection,
    /// expert and channel.
    fn sums(&self, rank: usize, result: impl Fn(usize, i32, usize) -> f32) -> Vec<u8> {
        let ids = self.experts(rank);
        data::encode(DTYPE, self.tokens * self.hidden, |at| {
            let (token, channel) = (at / self.hidden, at % self.hidden);
            let selections = token * TOP_K..(token + 1) * TOP_K;
            selections.fold(0.0, |sum, at| {
                let value = from_bf16(to_bf16(result(at, ids[at], channel)));
                sum + self.weight(rank, at) * value
            })
        })
    }
}

/// Memory of every rank, of equal size.
#[derive(Debug)]
struct Shared {
    own: Tensor,
    /// Addresses by rank.
    at: Vec<u64>,
}

/// Memory of one rank, for all tokens and for both layouts.
#[derive(Debug)]
struct Memory {
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    out: Tensor,
    /// Results of the experts, of both sides.
    y: Shared,
    /// The baseline's memory.
    pads: Shared,
    arrivals: Shared,
    infos: Shared,
    results: Shared,
    slots: Tensor,
    rows: Tensor,
    offsets: Tensor,
    origins: Tensor,
    row_weights: Tensor,
}

/// Value of all results of a rank's experts while candidates are timed.
fn timed_result(rank: usize) -> f32 {
    (rank + 1) as f32
}

impl Memory {
    fn new(part: &RankPart<'_>, case: &Case) -> Result<Self> {
        let tensor = |dtype, count| part.comm.tensor(dtype, count);
        let shared = |dtype, count| -> Result<Shared> {
            let own = tensor(dtype, count)?;
            let rank = part.benchmark.rank;
            let at = part
                .benchmark
                .rendezvous
                .exchange(rank, own.as_ptr() as u64)?;
            Ok(Shared { own, at })
        };
        let Case { hidden, most, .. } = *case;
        let (rows, selections) = (case.ranks * most, case.ranks * most * TOP_K);
        let copies = match case.layout {
            MoeLayout::ExpertMajor => selections,
            _ => 0,
        };
        let row = case.stride() * VECTOR;
        let memory = Self {
            x: tensor(DTYPE, most * hidden)?,
            ids: tensor(DType::I32, most * TOP_K)?,
            weights: tensor(DType::F32, most * TOP_K)?,
            out: tensor(DTYPE, most * hidden)?,
            y: shared(DTYPE, selections * hidden)?,
            pads: shared(DType::U32, MOE_PAD_WORDS)?,
            arrivals: shared(DType::U8, rows * row)?,
            infos: shared(DType::U32, rows * INFO_WORDS)?,
            results: shared(DTYPE, most * TOP_K * hidden)?,
            slots: tensor(DType::U32, most * TOP_K)?,
            rows: tensor(DType::U8, copies * row)?,
            offsets: tensor(DType::U32, case.per_rank() + 1)?,
            origins: tensor(DType::U32, copies)?,
            row_weights: tensor(DType::F32, copies)?,
        };
        memory.pads.own.fill(0u32)?;
        let value = timed_result(part.benchmark.rank);
        memory.y.own.fill(Bf16::from_f32(value))?;
        Ok(memory)
    }

    /// Writes the inputs, and overwrites the results.
    fn spoil(&self, case: &Case, rank: usize) -> Result<()> {
        let Case { tokens, hidden, .. } = *case;
        let x = data::encode(DTYPE, tokens * hidden, |at| {
            case.token(rank, at / hidden, at % hidden)
        });
        self.x.slice(0, tokens * hidden)?.copy_from_bytes(&x)?;
        let selections = tokens * TOP_K;
        let weights: Vec<f32> = (0..selections).map(|at| case.weight(rank, at)).collect();
        self.weights.slice(0, selections)?.copy_from(&weights)?;
        let ids = self.ids.slice(0, selections)?;
        ids.copy_from(&case.experts(rank))?;
        let out = self.out.slice(0, tokens * hidden)?;
        Ok(out.copy_from_bytes(&vec![0xff; x.len()])?)
    }

    /// Writes the result of each selection of the received rows.
    fn write_results(
        &self,
        case: &Case,
        received: &[ReceivedRow],
        result: impl Fn(usize, usize) -> Vec<u8>,
    ) -> Result<()> {
        for row in received {
            for (k, ..) in &row.selections {
                let add = if case.is_expert_major() { 0 } else { *k };
                let at = (row.first_result + add) * case.hidden;
                let bytes = result(row.source, row.token * TOP_K + k);
                self.y.own.slice(at, case.hidden)?.copy_from_bytes(&bytes)?;
            }
        }
        Ok(())
    }

    /// Returns the rows that the baseline has received.
    fn received(&self, case: &Case) -> Result<Vec<ReceivedRow>> {
        let stride = case.stride() * VECTOR;
        let payload = case.hidden * case.payload.size();
        let split = |row: &[u8]| {
            let scales = &row[payload..payload + 4 * case.scales()];
            (row[..payload].to_vec(), scales.to_vec())
        };
        if case.is_expert_major() {
            let offsets = self.offsets.to_vec::<u32>()?;
            let rows = *offsets.last().context("no offsets")? as usize;
            ensure!(rows <= self.origins.len(), "{rows} rows");
            let origins = self.origins.slice(0, rows)?.to_vec::<u32>()?;
            let weights = self.row_weights.slice(0, rows)?.to_vec::<f32>()?;
            let bytes = self.rows.slice(0, rows * stride)?.to_bytes()?;
            let row = |(at, bytes): (usize, &[u8])| {
                // Of an empty expert, the offset equals the one of the next expert.
                let expert = offsets.partition_point(|offset| *offset as usize <= at) as i32 - 1;
                let selection = (origins[at] & 0xff_ffff) as usize;
                let (elements, scales) = split(bytes);
                ReceivedRow {
                    source: (origins[at] >> 24) as usize,
                    token: selection / TOP_K,
                    selections: vec![(selection % TOP_K, expert, weights[at])],
                    elements,
                    scales,
                    first_result: at,
                }
            };
            return Ok(bytes.chunks_exact(stride).enumerate().map(row).collect());
        }
        let counts = self.pads.own.slice(MOE_COUNTS, case.ranks)?;
        let infos = self.infos.own.to_vec::<u32>()?;
        let mut received = Vec::new();
        for (source, count) in counts.to_vec::<u32>()?.into_iter().enumerate() {
            let (first, count) = (source * case.most, count as usize);
            ensure!(count <= case.most, "{count} rows from rank {source}");
            let rows = self.arrivals.own.slice(first * stride, count * stride)?;
            for (at, row) in rows.to_bytes()?.chunks_exact(stride).enumerate() {
                let info = &infos[(first + at) * INFO_WORDS..][..INFO_WORDS];
                let (elements, scales) = split(row);
                let weights: Vec<f32> = info[TOP_K..2 * TOP_K]
                    .iter()
                    .map(|bits| f32::from_bits(*bits))
                    .collect();
                let ids: Vec<i32> = info[..TOP_K].iter().map(|id| *id as i32).collect();
                received.push(ReceivedRow {
                    source,
                    token: info[INFO_TOKEN] as usize,
                    selections: selections(&ids, &weights),
                    elements,
                    scales,
                    first_result: (first + at) * TOP_K,
                });
            }
        }
        Ok(received)
    }
}

/// Returns the selections of experts of this rank, of a row in rank-major order.
fn selections(ids: &[i32], weights: &[f32]) -> Vec<Selection> {
    let all = ids.iter().zip(weights).enumerate();
    all.filter(|(_, (id, _))| **id >= 0)
        .map(|(k, (id, weight))| (k, *id, *weight))
        .collect()
}

/// Returns the rows that Fusewire has received.
fn received_by_fusewire(
    case: &Case,
    rank: usize,
    moe: &Moe,
    result: &Dispatched,
) -> Result<Vec<ReceivedRow>> {
    let info = moe.info();
    let experts: Vec<Vec<i32>> = (0..case.ranks).map(|rank| case.experts(rank)).collect();
    let counts = result.counts.to_vec::<u32>()?;
    let sources = result.sources.to_vec::<u32>()?;
    let ids = result.ids.to_vec::<i32>()?;
    let weights = result.weights.to_vec::<f32>()?;
    let offsets = match &result.offsets {
        Some(offsets) => offsets.to_vec::<u32>()?,
        None => (0..case.ranks as u32)
            .map(|rank| rank * case.most as u32)
            .collect(),
    };
    // Returns the elements of a range of rows, `stride` apart.
    let read = |tensor: &Tensor, rows: (usize, usize), stride: usize, width: usize| {
        let (first, count) = rows;
        let elements = (count.max(1) - 1) * stride + if count > 0 { width } else { 0 };
        let bytes = tensor.slice(first * stride, elements)?.to_bytes()?;
        let size = tensor.dtype().size();
        let rows = bytes.chunks(stride * size);
        anyhow::Ok(
            rows.map(|row| row[..width * size].to_vec())
                .collect::<Vec<_>>(),
        )
    };
    let mut received = Vec::new();
    for (group, count) in counts.iter().enumerate() {
        let (first, count) = (offsets[group] as usize, *count as usize);
        let x = read(&result.x, (first, count), info.x_stride, case.hidden)?;
        let scales = match &result.scales {
            Some(scales) => read(scales, (first, count), info.scales_stride, case.scales())?,
            None => vec![Vec::new(); count],
        };
        for (at, (elements, scales)) in (first..).zip(x.into_iter().zip(scales)) {
            let (source, token) = (sources[2 * at] as usize, sources[2 * at + 1] as usize);
            let selections = if case.is_expert_major() {
                let id = ids[at];
                ensure!(
                    id == group as i32 && source < case.ranks && token < case.tokens,
                    "row {at} of expert {group} has expert {id}, rank {source}, token {token}"
                );
                // The description of a row does not contain k.
                let expert = (rank * case.per_rank()) as i32 + id;
                let all = &experts[source][token * TOP_K..(token + 1) * TOP_K];
                let k = all.iter().position(|other| *other == expert);
                vec![(k.unwrap_or(TOP_K), id, weights[at])]
            } else {
                let each = at * TOP_K..(at + 1) * TOP_K;
                selections(&ids[each.clone()], &weights[each])
            };
            received.push(ReceivedRow {
                source,
                token,
                selections,
                elements,
                scales,
                first_result: match case.layout {
                    MoeLayout::ExpertMajor => at,
                    _ => at * TOP_K,
                },
            });
        }
    }
    Ok(received)
}

impl RankPart<'_> {
    /// Measures all cases, with captured graphs.
    pub(crate) fn all_mixtures(&self, cases: &Cases, say: impl Fn(&Row)) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for &hidden in &cases.hidden {
            for &payload in &cases.payloads {
                for layout in [MoeLayout::RankMajor, MoeLayout::ExpertMajor] {
                    let most = cases.tokens.iter().copied().max().unwrap_or(0);
                    let case = Case {
                        ranks: self.shape.ranks,
                        experts: cases.experts,
                        hidden,
                        most,
                        tokens: most,
                        layout,
                        payload,
                        salt: 0,
                    };
                    rows.extend(self.mixtures(&case, &cases.tokens, &say)?);
                }
            }
        }
        Ok(rows)
    }

    /// Measures all numbers of tokens with the same memory.
    fn mixtures(&self, case: &Case, tokens: &[usize], say: impl Fn(&Row)) -> Result<Vec<Row>> {
        let config = MoeConfig::new(case.experts as u32, TOP_K as u32, case.hidden, case.most);
        let payload = match case.payload {
            DType::E4m3 => MoePayload::Fp8(MoeScales::F32),
            _ => MoePayload::Same,
        };
        let moe = Moe::new(self.comm, &config.layout(case.layout).payload(payload))?;
        let memory = Memory::new(self, case)?;
        // Every check has other values, so that stale results are detected.
        let salt = Cell::new(0);
        let mut rows = Vec::new();
        for &tokens in tokens {
            let case = Case { tokens, ..*case };
            let row = self.mixture(&case, &memory, &moe, &salt)?;
            if self.benchmark.rank == 0 {
                say(&row);
            }
            rows.push(row);
        }
        self.benchmark.stream.synchronize()?;
        // No rank frees its memory while a peer may use it.
        self.benchmark.rendezvous.wait()?;
        moe.free()?;
        Ok(rows)
    }

    fn mixture(&self, case: &Case, memory: &Memory, moe: &Moe, salt: &Cell<usize>) -> Result<Row> {
        let rank = self.benchmark.rank;
        let Case { tokens, hidden, .. } = *case;
        let out = memory.out.slice(0, tokens * hidden)?;
        let call = Rc::new(MoeCall {
            moe: moe.clone(),
            x: memory.x.slice(0, tokens * hidden)?,
            ids: memory.ids.slice(0, tokens * TOP_K)?,
            weights: memory.weights.slice(0, tokens * TOP_K)?,
            y: memory.y.own.slice(0, moe.info().results * hidden)?,
            out: out.clone(),
            received: RefCell::new(None),
        });
        let candidates = self.moe_candidates(case, memory, &call)?;
        let current = || Case {
            salt: salt.get(),
            ..*case
        };
        let spoil = |_| {
            salt.set(salt.get() + 1);
            memory.spoil(&current(), rank)
        };
        let received = RefCell::new(Vec::new());
        let check = |stage: Stage| {
            let case = current();
            let differing = |expected: Vec<u8>| -> Result<u64> {
                Ok(data::differing(DTYPE, &out.to_bytes()?, &expected))
            };
            match stage.step {
                None => {
                    let per_rank = case.per_rank();
                    let sums = case.sums(rank, |_, id, _| timed_result(id as usize / per_rank));
                    differing(sums)
                }
                Some(0) => {
                    let rows = match stage.side {
                        Side::Ours => {
                            let result = call.received.borrow();
                            let result = result.as_ref().context("no dispatch")?;
                            received_by_fusewire(&case, rank, moe, result)?
                        }
                        _ => memory.received(&case)?,
                    };
                    let wrong = case.wrong_rows(rank, &rows);
                    if wrong == 0 {
                        let result = |rank, selection| case.result_row(rank, selection);
                        memory.write_results(&case, &rows, result)?;
                        received.replace(rows);
                    }
                    Ok(wrong)
                }
                Some(_) => {
                    let result = |at, _, channel| case.result(rank, at, channel);
                    let wrong = differing(case.sums(rank, result))?;
                    let timed = |_| timed_result(rank);
                    let timed = data::encode(DTYPE, hidden, timed);
                    let rows = received.take();
                    memory.write_results(&case, &rows, |_, _| timed.clone())?;
                    Ok(wrong)
                }
            }
        };
        let benchmark = self.benchmark;
        let figures = benchmark.compare(Mode::Graph, candidates, spoil, check)?;
        Ok(Row {
            ranks: case.ranks,
            dtype: DTYPE.name().to_owned(),
            bytes: tokens * hidden * DTYPE.size(),
            tokens,
            moe: Some(MoeRow {
                hidden,
                experts: case.experts,
                top_k: TOP_K,
                layout: match case.layout {
                    MoeLayout::ExpertMajor => "expert-major",
                    _ => "rank-major",
                },
                payload: case.payload.name(),
            }),
            mode: Mode::Graph,
            blocks: self.shape.blocks,
            threads: self.shape.threads,
            figures,
        })
    }

    /// Returns Fusewire's candidate, and the baseline's for both sizes of teams.
    fn moe_candidates(
        &self,
        case: &Case,
        memory: &Memory,
        call: &Rc<MoeCall>,
    ) -> Result<Vec<Candidate>> {
        let mut list = vec![Candidate {
            name: "dispatch, combine".to_owned(),
            side: Side::Ours,
            waits: (0, 0, 0),
            steps: vec![
                Step::MoeDispatch(Rc::clone(call)),
                Step::MoeCombine(Rc::clone(call)),
            ],
            is_split: true,
        }];
        for team in [Team::Block, Team::Warp] {
            list.push(self.moe_baseline(case, memory, team)?);
        }
        Ok(list)
    }

    fn moe_baseline(&self, case: &Case, memory: &Memory, team: Team) -> Result<Candidate> {
        let at = |tensor: &Tensor| tensor.as_ptr() as u64;
        let ranks = case.ranks;
        let (dispatch, combine) = match case.layout {
            MoeLayout::ExpertMajor => (Kernel::MoeDispatchExperts(team), Kernel::MoeCombinePush),
            _ => (Kernel::MoeDispatch(team), Kernel::MoeCombinePull),
        };
        let results = match case.layout {
            MoeLayout::ExpertMajor => &memory.results,
            _ => &memory.y,
        };
        let values = Values {
            rank: self.benchmark.rank as u32,
            pads: memory.pads.at.clone(),
            input: at(&memory.x),
            output: at(&memory.out),
            weight: at(&memory.weights),
            width: u32::try_from(case.width())?,
            moe: MoeValues {
                arrivals: memory.arrivals.at.clone(),
                infos: memory.infos.at.clone(),
                results: results.at.clone(),
                experts: at(&memory.ids),
                slots: at(&memory.slots),
                rows: at(&memory.rows),
                offsets: at(&memory.offsets),
                origins: at(&memory.origins),
                row_weights: at(&memory.row_weights),
                y: at(&memory.y.own),
                tokens: u32::try_from(case.tokens)?,
                capacity: u32::try_from(case.most)?,
                per_rank: u32::try_from(case.per_rank())?,
            },
            ..Values::default()
        };
        // A rank receives at most one row for each token. Their number is the work of the second
        // phase of dispatch.
        let rows = match case.layout {
            MoeLayout::ExpertMajor => case.tokens * ranks,
            _ => case.tokens,
        };
        let threads = self.shape.threads;
        let teams = match team {
            Team::Block => rows * threads as usize,
            Team::Warp => rows * 32,
        };
        let sums = case.tokens * case.width();
        let sums = match case.layout {
            MoeLayout::ExpertMajor => sums * TOP_K,
            _ => sums,
        };
        let launch = |kernel, dtype, work| {
            let entry = Entry {
                kernel,
                dtype,
                ranks,
            };
            let blocks = grid(work, threads, self.shape.blocks);
            let together = ranks as u32;
            let launch = self
                .baseline
                .launch(entry, &values, blocks, threads, together)?;
            anyhow::Ok(Step::Launch(launch))
        };
        Ok(Candidate {
            name: format!("{}, {}", dispatch.name(), combine.name()),
            side: Side::Theirs,
            waits: (0, 0, 0),
            steps: vec![
                launch(dispatch, case.payload, teams)?,
                launch(combine, DTYPE, sums)?,
            ],
            is_split: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(layout: MoeLayout, payload: DType) -> Case {
        Case {
            ranks: 4,
            experts: 16,
            hidden: 256,
            most: 9,
            tokens: 7,
            layout,
            payload,
            salt: 3,
        }
    }

    /// Returns the rows that a rank must receive.
    fn rows(case: &Case, rank: usize) -> Vec<ReceivedRow> {
        let mut rows: Vec<ReceivedRow> = Vec::new();
        for source in 0..case.ranks {
            for (at, id) in case.experts(source).into_iter().enumerate() {
                let per_rank = case.per_rank() as i32;
                if id / per_rank != rank as i32 {
                    continue;
                }
                let selection = (at % TOP_K, id % per_rank, case.weight(source, at));
                let token = at / TOP_K;
                let last = rows.last_mut().filter(|last| {
                    !case.is_expert_major() && (last.source, last.token) == (source, token)
                });
                if let Some(last) = last {
                    last.selections.push(selection);
                    continue;
                }
                let (elements, scales) = case.row(source, token);
                rows.push(ReceivedRow {
                    source,
                    token,
                    selections: vec![selection],
                    elements,
                    scales,
                    first_result: 0,
                });
            }
        }
        rows
    }

    #[test]
    fn wrong_rows_are_found() {
        for layout in [MoeLayout::RankMajor, MoeLayout::ExpertMajor] {
            for payload in [DType::Bf16, DType::E4m3] {
                let case = case(layout, payload);
                let right = rows(&case, 1);
                assert_eq!(case.wrong_rows(1, &right), 0);
                let mut reversed = right.clone();
                reversed.reverse();
                assert_eq!(case.wrong_rows(1, &reversed), 0, "in any order");
                let wrong = |change: &dyn Fn(&mut Vec<ReceivedRow>)| {
                    let mut rows = right.clone();
                    change(&mut rows);
                    case.wrong_rows(1, &rows)
                };
                assert_eq!(wrong(&|rows| rows[2].elements[5] ^= 1), 1);
                assert_eq!(wrong(&|rows| drop(rows.pop())), 256, "a missing row");
                assert_eq!(
                    wrong(&|rows| rows.push(rows[0].clone())),
                    256,
                    "a row twice"
                );
                assert_eq!(wrong(&|rows| rows[0].selections[0].2 += 1.0), 256);
                assert!(wrong(&|rows| rows[0].token += 1) >= 256);
                if payload == DType::E4m3 {
                    assert_eq!(wrong(&|rows| rows[1].scales[0] ^= 1), 1);
                }
                let stale = Case { salt: 4, ..case };
                assert!(stale.wrong_rows(1, &right) > 256);
            }
        }
    }

    #[test]
    fn sums_depend_on_the_order() {
        let case = case(MoeLayout::RankMajor, DType::Bf16);
        let sums = case.sums(2, |at, _, channel| case.result(2, at, channel));
        assert_eq!(sums.len(), 2 * case.tokens * case.hidden);
        let value = data::decode(DTYPE, &sums)[case.hidden + 3];
        let exact: f64 = (TOP_K..2 * TOP_K)
            .map(|at| f64::from(case.weight(2, at)) * f64::from(case.result(2, at, 3)))
            .sum();
        assert!(
            (f64::from(value) - exact).abs() <= exact.abs() / 128.0,
            "{value} {exact}"
        );
        let ids = case.experts(2);
        for token in ids.chunks_exact(TOP_K) {
            let mut token = token.to_vec();
            token.sort_unstable();
            token.dedup();
            assert_eq!(token.len(), TOP_K);
        }
    }

    #[test]
    fn unsuitable_cases_are_refused() {
        let cases = Cases {
            tokens: vec![1],
            hidden: vec![7168],
            payloads: vec![DType::Bf16],
            experts: 256,
        };
        assert!(cases.check(&[2, 4, 8]).is_ok());
        let refused = |change: &dyn Fn(&mut Cases)| {
            let mut cases = cases.clone();
            change(&mut cases);
            assert!(cases.check(&[2, 4, 8]).is_err());
        };
        refused(&|cases| cases.experts = 260);
        refused(&|cases| cases.experts = 12);
        refused(&|cases| cases.hidden = vec![2000]);
        refused(&|cases| cases.tokens = vec![0]);
    }
}
