//! The inputs of every rank, and the expected outputs.

use fusewire::testing::reference::{fill, narrow, reduce, rms_norm, widen};
use fusewire::{DType, ReduceOp};

use super::moe::{ExpertLayer, Routing};
use super::operation::{EPSILON, Kind, ROOT, counts, hidden, split};

/// Period of the inputs in elements. It is prime, so reading at an offset that is wrong by a power
/// of two gives wrong data.
const PERIOD: usize = 65_521;

/// Inputs of all ranks for one call.
#[derive(Debug)]
pub(crate) struct Case {
    kind: Kind,
    dtype: DType,
    ranks: u32,
    rank: u32,
    count: usize,
    /// One period of every rank's input.
    patterns: Vec<Vec<u8>>,
    /// One period of the reduction of all inputs.
    reduced: Vec<u8>,
}

/// Returns `op` with the factor of `rank` if `op` is a [`ReduceOp::PreMulSum`]; otherwise returns
/// `op`.
pub(crate) fn factor(op: ReduceOp, rank: u32) -> ReduceOp {
    match op {
        ReduceOp::PreMulSum(_) => ReduceOp::PreMulSum(f64::from(rank + 1) * 0.5),
        other => other,
    }
}

impl Case {
    /// Returns an upper bound of the rounding error of a sum over the ranks, in any order, if the
    /// result is rounded after each addition. The inputs are below 32.
    pub(crate) fn rounding(&self) -> f32 {
        let epsilon = match self.dtype {
            DType::F16 => 1.0 / 1024.0,
            DType::Bf16 => 1.0 / 128.0,
            _ => f32::EPSILON,
        };
        (self.ranks * 32) as f32 * epsilon
    }

    /// Creates the inputs of call number `call` of an operation over rows of `count` elements.
    pub(crate) fn new(
        (kind, op): (Kind, ReduceOp),
        dtype: DType,
        (ranks, rank): (u32, u32),
        count: usize,
        call: u64,
    ) -> Self {
        let (longest, _) = (0..ranks).fold((0, 0), |(input, output), rank| {
            let shape = kind.shape(count, ranks, rank);
            (shape.0.max(input), shape.1.max(output))
        });
        // The rows that an expert receives exceed the tokens of a rank.
        let length = match kind.layer() {
            Some(_) => PERIOD,
            None => longest.min(PERIOD),
        };
        let patterns: Vec<Vec<u8>> = (0..ranks)
            .map(|rank| fill(dtype, rank, call, length))
            .collect();
        let reduced = match kind {
            _ if kind.is_norm() => reduce(dtype, ReduceOp::Sum, &[], &patterns),
            _ if kind.reduces() => {
                let factors: Vec<f64> = (0..ranks)
                    .map(|rank| match factor(op, rank) {
                        ReduceOp::PreMulSum(factor) => factor,
                        _ => 1.0,
                    })
                    .collect();
                reduce(dtype, op, &factors, &patterns)
            }
            _ => Vec::new(),
        };
        Self {
            kind,
            dtype,
            ranks,
            rank,
            count,
            patterns,
            reduced,
        }
    }

    /// Returns true if the operation reads this rank's input.
    pub(crate) fn gives(&self) -> bool {
        self.kind != Kind::Broadcast || self.rank == ROOT
    }

    /// Returns this rank's input.
    pub(crate) fn input(&self, elements: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(elements * self.dtype.size());
        self.repeat(&self.patterns[self.rank as usize], 0, elements, &mut bytes);
        bytes
    }

    /// Returns the residual of the fused norm, which is equal on all ranks.
    pub(crate) fn residual(&self, elements: usize) -> Vec<u8> {
        let pattern = fill(self.dtype, 99, 7, elements.min(PERIOD));
        let mut bytes = Vec::new();
        self.repeat(&pattern, 0, elements, &mut bytes);
        bytes
    }

    /// Returns the weight of the fused norm.
    pub(crate) fn weight(&self, elements: usize) -> Vec<u8> {
        fill(self.dtype, 98, 3, elements)
    }

    fn repeat(&self, pattern: &[u8], start: usize, elements: usize, to: &mut Vec<u8>) {
        let size = self.dtype.size();
        let period = pattern.len() / size;
        let mut at = start;
        let end = start + elements;
        while at < end {
            let from = at % period;
            let length = (period - from).min(end - at);
            to.extend_from_slice(&pattern[from * size..(from + length) * size]);
            at += length;
        }
    }

    /// Returns the expected output of this rank, or `None` if the rank gets no output.
    pub(crate) fn expected(&self) -> Option<Vec<u8>> {
        let (rank, count) = (self.rank as usize, self.count);
        let mut out = Vec::new();
        let p = &self.patterns;
        match self.kind {
            Kind::AllReduce => self.repeat(&self.reduced, 0, count, &mut out),
            Kind::Reduce if self.rank == ROOT => self.repeat(&self.reduced, 0, count, &mut out),
            Kind::ReduceScatter => self.repeat(&self.reduced, rank * count, count, &mut out),
            Kind::AllGather => p
                .iter()
                .for_each(|from| self.repeat(from, 0, count, &mut out)),
            Kind::Gather if self.rank == ROOT => {
                p.iter()
                    .for_each(|from| self.repeat(from, 0, count, &mut out));
            }
            Kind::AllGatherV => {
                for (from, count) in p.iter().zip(counts(count, self.ranks)) {
                    self.repeat(from, 0, count as usize, &mut out);
                }
            }
            Kind::Broadcast => self.repeat(&p[ROOT as usize], 0, count, &mut out),
            Kind::Scatter => self.repeat(&p[ROOT as usize], rank * count, count, &mut out),
            Kind::AllToAll => {
                p.iter()
                    .for_each(|from| self.repeat(from, rank * count, count, &mut out));
            }
            Kind::AllToAllV => {
                for (from, pattern) in (0..self.ranks).zip(p) {
                    let before: u64 = (0..self.rank).map(|to| split(count, from, to)).sum();
                    let length = split(count, from, self.rank) as usize;
                    self.repeat(pattern, before as usize, length, &mut out);
                }
            }
            Kind::SendRecv => {
                let previous = (rank + p.len() - 1) % p.len();
                self.repeat(&p[previous], 0, count, &mut out);
            }
            Kind::AllReduceNorm => out = self.normalised(0),
            Kind::ReduceScatterNorm => out = self.normalised(rank * count),
            Kind::MoeDispatch(layer) => {
                for row in self.routing(layer).received(self.rank) {
                    let start = row.token * layer.hidden;
                    self.repeat(&p[row.rank], start, layer.hidden, &mut out);
                }
            }
            Kind::MoeCombine(layer) => out = self.combined(layer),
            Kind::Barrier | Kind::Reduce | Kind::Gather => return None,
        }
        Some(out)
    }

    /// Returns the expected result of the fused norm, for the sums that begin at `start`.
    fn normalised(&self, start: usize) -> Vec<u8> {
        let mut sum = Vec::new();
        self.repeat(&self.reduced, start, self.count, &mut sum);
        let (residual, weight) = (self.residual(self.count), self.weight(hidden(self.count)));
        rms_norm(self.dtype, &sum, &residual, &weight, EPSILON).0
    }

    fn routing(&self, layer: ExpertLayer) -> Routing {
        Routing::new(layer, self.ranks, self.count / layer.hidden)
    }

    /// Returns the expected sums of the results of this rank's tokens, if the result of row i is
    /// row i of a rank's input.
    fn combined(&self, layer: ExpertLayer) -> Vec<u8> {
        let (hidden, top_k) = (layer.hidden, layer.top_k as usize);
        let widen = |pattern: &Vec<u8>| widen(self.dtype, pattern);
        let patterns: Vec<Vec<f32>> = self.patterns.iter().map(widen).collect();
        let routing = self.routing(layer);
        let tokens = routing.selections(self.rank).chunks_exact(top_k);
        let mut sums = vec![0.0; self.count];
        for (sums, selections) in sums.chunks_exact_mut(hidden).zip(tokens) {
            for selection in selections {
                let pattern = &patterns[selection.rank()];
                let start = selection.row() * hidden % pattern.len();
                let results = pattern.iter().cycle().skip(start);
                for (sum, result) in sums.iter_mut().zip(results) {
                    *sum += selection.weight() * result;
                }
            }
        }
        narrow(self.dtype, &sums)
    }

    /// Returns the expected descriptions of the rows that this rank receives, in the order of
    /// [`Buffers::descriptions`](super::buffers::Buffers).
    pub(crate) fn descriptions(&self) -> Vec<Vec<u8>> {
        match self.kind {
            Kind::MoeDispatch(layer) => self.routing(layer).descriptions(self.rank).into(),
            _ => Vec::new(),
        }
    }
}
