//! Dispatch and combine of Fusewire on a rank, their results, and what they have sent.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use fusewire::{
    Bf16, Communicator, DType, Dispatched, Moe, MoeConfig, MoeLayout, MoeMode, ReduceOp, Tensor,
};

use super::case::Case;
use super::routing::{self, Routing};
use super::traffic::Traffic;

/// Findings of [`Operations::verify`], over all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Verified {
    /// Wrong rows and elements. Rows of fp8 are not compared, but only part of the sum.
    pub(super) wrong: u64,
    /// Sums of the bits of the received rows and of the results.
    pub(super) sums: [u64; 2],
    pub(super) traffic: Traffic,
}

/// The operations of a case, and their tensors.
pub(super) struct Operations<'c> {
    pub(super) comm: &'c Communicator,
    routing: Routing,
    case: Case,
    moe: Moe,
    pub(super) x: Tensor,
    pub(super) ids: Tensor,
    weights: Tensor,
    y: Tensor,
    out: Tensor,
}

impl<'c> Operations<'c> {
    pub(super) fn new(comm: &'c Communicator, routing: &Routing, case: &Case) -> Result<Self> {
        let Case { hidden, tokens, .. } = *case;
        let (rank, top_k) = (comm.rank(), routing.top_k as usize);
        let mut config = MoeConfig::new(routing.experts, routing.top_k, hidden, tokens)
            .payload(case.payload)
            .layout(case.layout);
        if routing.staging > 0 {
            let mode = MoeMode::HighThroughput;
            config = config.mode(mode).staging(routing.staging);
        }
        let moe = Moe::new(comm, &config)?.blocking();
        let x: Vec<Bf16> = (0..tokens as u32)
            .flat_map(|token| routing::elements_of(rank, token, hidden))
            .collect();
        let weights: Vec<f32> = (0..tokens * top_k)
            .map(|item| routing::weight_of(item / top_k, item % top_k))
            .collect();
        Ok(Self {
            comm,
            routing: *routing,
            case: *case,
            x: comm.tensor_from(&x)?,
            ids: comm.tensor_from(&routing.experts_of(tokens, rank))?,
            weights: comm.tensor_from(&weights)?,
            y: comm.tensor(DType::Bf16, moe.info().results * hidden)?,
            out: comm.tensor(DType::Bf16, tokens * hidden)?,
            moe,
        })
    }

    pub(super) fn dispatch(&self) -> Result<Dispatched> {
        Ok(self.moe.dispatch(&self.x, &self.ids, &self.weights)?)
    }

    pub(super) fn combine(&self, received: &Dispatched) -> Result<()> {
        Ok(self.moe.combine(&self.y, received, &self.out)?)
    }

    /// Runs dispatch and combine once. Returns their times in microseconds.
    pub(super) fn call(&self) -> Result<[f64; 2]> {
        let start = Instant::now();
        let received = self.dispatch()?;
        let between = Instant::now();
        self.combine(&received)?;
        let times = [between - start, between.elapsed()];
        Ok(times.map(|time| time.as_secs_f64() * 1e6))
    }

    /// Frees the memory. All ranks call this together.
    pub(super) fn free(self) -> Result<()> {
        Ok(self.moe.free()?)
    }

    /// Runs the operations once, and verifies their results. Also writes the results of the
    /// experts, which later calls use. All ranks call this together.
    pub(super) fn verify(&self) -> Result<Verified> {
        let received = self.dispatch()?;
        let rows = self.received_rows(&received)?;
        let (wrong_rows, sum_of_rows) = self.check_rows(&received, &rows)?;
        self.write_results(&rows)?;
        self.combine(&received)?;
        let (wrong_results, sum_of_results) = self.check_results()?;
        let mut sent: Vec<_> = rows.iter().map(|row| (row.rank, row.token)).collect();
        sent.sort_unstable();
        sent.dedup();
        let mut all = [
            wrong_rows + wrong_results,
            sum_of_rows,
            sum_of_results,
            sent.len() as u64,
        ];
        self.comm.all_reduce(all.as_mut_slice(), ReduceOp::Sum)?;
        let info = self.moe.info();
        // A block sends each rank an announcement (four words, and one for each expert of the
        // receiver, rounded up to 16 bytes) and a signal of 8 bytes.
        let announcement = 16 + (4 * info.local_experts as usize).next_multiple_of(16);
        let messages = (self.comm.size() * info.blocks) as usize;
        Ok(Verified {
            wrong: all[0],
            sums: [all[1], all[2]],
            traffic: Traffic {
                rows: all[3],
                row_bytes: info.row_bytes as u64,
                other_bytes: (messages * (announcement + 8)) as u64,
            },
        })
    }

    /// Returns the rows of the result that have a token, in their order.
    fn received_rows(&self, received: &Dispatched) -> Result<Vec<Row>> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let first = rank as i32 * self.routing.each(ranks);
        let sources = received.sources.to_vec::<u32>()?;
        let ids = received.ids.to_vec::<i32>()?;
        let each = match self.case.layout {
            MoeLayout::RankMajor => self.routing.top_k as usize,
            _ => 1,
        };
        let mut rows = Vec::new();
        for (index, (ids, source)) in ids.chunks(each).zip(sources.chunks(2)).enumerate() {
            let experts = ids.iter().map(|id| (*id >= 0).then_some(*id + first));
            let experts: Vec<_> = experts.collect();
            if experts.iter().any(Option::is_some) {
                rows.push(Row {
                    index,
                    rank: source[0],
                    token: source[1],
                    experts,
                });
            }
        }
        Ok(rows)
    }

    /// Returns the number of wrong rows, and the sum of the bits of all rows.
    fn check_rows(&self, received: &Dispatched, rows: &[Row]) -> Result<(u64, u64)> {
        let Case { hidden, tokens, .. } = self.case;
        let (info, top_k) = (self.moe.info(), self.routing.top_k as usize);
        let x = received.x.to_bytes()?;
        let scales = received.scales.as_ref().map(Tensor::to_bytes).transpose()?;
        let weights = received.weights.to_vec::<f32>()?;
        let size = received.x.dtype().size();
        let mut of_ranks = Vec::new();
        for rank in 0..self.comm.size() {
            of_ranks.push(self.routing.experts_of(tokens, rank));
        }
        let (mut wrong, mut sum, mut selections) = (0, 0, 0);
        for row in rows {
            let payload = row.index * info.x_stride * size;
            let payload = x
                .get(payload..payload + hidden * size)
                .context("a row outside of the result")?;
            sum = sum_of(sum, payload);
            if let Some(scales) = &scales {
                let at = 4 * row.index * info.scales_stride;
                sum = sum_of(sum, &scales[at..at + hidden / 128 * 4]);
            } else {
                let bits = payload.chunks_exact(2);
                let bits = bits.map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
                let expected = routing::elements_of(row.rank, row.token, hidden);
                wrong += u64::from(!bits.eq(expected.map(|value| value.0)));
            }
            let of_token = row.token as usize * top_k;
            let of_token = &of_ranks[row.rank as usize][of_token..of_token + top_k];
            for (k, expert) in row.experts.iter().enumerate() {
                let Some(expert) = expert else { continue };
                selections += 1;
                let position = of_token.iter().position(|id| id == expert);
                let weight = position.map(|k| routing::weight_of(row.token as usize, k));
                let found = weights[row.index * row.experts.len() + k];
                wrong += u64::from(weight != Some(found));
            }
        }
        let each = self.routing.each(self.comm.size());
        let of_rank = |id: &&i32| **id / each == self.comm.rank() as i32;
        let expected = of_ranks.iter().flatten().filter(of_rank).count();
        wrong += expected.abs_diff(selections) as u64;
        Ok((wrong, sum))
    }

    /// Writes the results of the experts for the rows.
    fn write_results(&self, rows: &[Row]) -> Result<()> {
        let hidden = self.case.hidden;
        let mut y = vec![Bf16(0); self.y.len()];
        for row in rows {
            for (k, expert) in row.experts.iter().enumerate() {
                let Some(expert) = expert else { continue };
                let at = (row.index * row.experts.len() + k) * hidden;
                let results = routing::result_of(row.rank, row.token, *expert as u32, hidden);
                for (to, value) in y[at..at + hidden].iter_mut().zip(results) {
                    *to = value;
                }
            }
        }
        Ok(self.y.copy_from(&y)?)
    }

    /// Returns the number of wrong elements of the results, and the sum of their bits.
    pub(super) fn check_results(&self) -> Result<(u64, u64)> {
        let (hidden, top_k) = (self.case.hidden, self.routing.top_k as usize);
        let rank = self.comm.rank();
        let out = self.out.to_vec::<Bf16>()?;
        let ids = self.routing.experts_of(self.case.tokens, rank);
        let mut wrong = 0;
        for (token, out) in out.chunks_exact(hidden).enumerate() {
            let mut expected = vec![0.0f32; hidden];
            for (k, id) in ids[token * top_k..(token + 1) * top_k].iter().enumerate() {
                let results = routing::result_of(rank, token as u32, *id as u32, hidden);
                for (sum, value) in expected.iter_mut().zip(results) {
                    *sum += routing::weight_of(token, k) * value.to_f32();
                }
            }
            let is_wrong = |(out, sum): &(&Bf16, &f32)| out.0 != Bf16::from_f32(**sum).0;
            wrong += out.iter().zip(&expected).filter(is_wrong).count();
        }
        Ok((wrong as u64, sum_of(0, &self.out.to_bytes()?)))
    }
}

/// A row of the result of dispatch.
struct Row {
    /// Number of the row.
    index: usize,
    rank: u32,
    token: u32,
    /// For each selection of the row, its expert if that is on this rank.
    experts: Vec<Option<i32>>,
}

/// Adds the words of 4 bytes to a sum that depends on their order.
fn sum_of(sum: u64, bytes: &[u8]) -> u64 {
    bytes.chunks_exact(4).fold(sum, |sum, word| {
        let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        (sum ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Returns an error if results were wrong.
pub(super) fn ensure_right(wrong: u64, case: &Case) -> Result<()> {
    ensure!(wrong == 0, "{case:?}: {wrong} wrong rows and elements");
    Ok(())
}
