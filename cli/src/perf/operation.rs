//! The operations that `perf` can measure: their sizes and bandwidth factors.

use fusewire::{DType, Operation, ReduceOp};

use super::moe::{ExpertLayer, Routing};

/// An operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllGatherV,
    Broadcast,
    Reduce,
    Scatter,
    Gather,
    AllToAll,
    AllToAllV,
    SendRecv,
    Barrier,
    AllReduceNorm,
    ReduceScatterNorm,
    MoeDispatch(ExpertLayer),
    MoeCombine(ExpertLayer),
}

/// Reason why an operation cannot run.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// The operation does not support the type, the number of ranks or the backend. `all` skips the
    /// operation.
    Kind(String),
    /// The reduction does not support the type. This is an error, even with `all`.
    Op(String),
}

/// Default of the largest size of a collective.
const MAX_BYTES: u64 = 64 << 20;
/// Maximum length of a row of the fused norm.
pub(crate) const HIDDEN: usize = 1024;
/// Value that the fused norm adds to the mean of squares.
pub(crate) const EPSILON: f32 = 1e-5;

impl Kind {
    /// Returns the kind that measures `operation`, or the reason why no kind does.
    pub(crate) const fn of(operation: Operation) -> core::result::Result<Self, &'static str> {
        Ok(match operation {
            Operation::AllReduce => Self::AllReduce,
            Operation::ReduceScatter => Self::ReduceScatter,
            Operation::AllGather => Self::AllGather,
            Operation::AllGatherV => Self::AllGatherV,
            Operation::Broadcast => Self::Broadcast,
            Operation::Reduce => Self::Reduce,
            Operation::Scatter => Self::Scatter,
            Operation::Gather => Self::Gather,
            Operation::AllToAll => Self::AllToAll,
            Operation::AllToAllV => Self::AllToAllV,
            Operation::Send => Self::SendRecv,
            Operation::Barrier => Self::Barrier,
            Operation::AllReduceNorm => Self::AllReduceNorm,
            Operation::ReduceScatterNorm => Self::ReduceScatterNorm,
            Operation::Recv => return Err("it is a part of send_recv"),
            Operation::VocabParallel => return Err("its outputs have other types than its input"),
            Operation::AllGatherWithFlags | Operation::ReduceScatterOnArrival => {
                return Err("it overlaps with a computation");
            }
            Operation::Put | Operation::Get | Operation::Signal | Operation::WaitSignal => {
                return Err("it needs a window");
            }
            Operation::Batch | Operation::User | Operation::None => {
                return Err("the program defines its transfers");
            }
        })
    }

    /// Returns all kinds, in the order in which `all` runs them. Those of a mixture of experts have
    /// the sizes of `layer`.
    pub(crate) fn all(layer: ExpertLayer) -> Vec<Self> {
        let all = Operation::ALL.iter();
        all.filter_map(|operation| Self::of(*operation).ok())
            .chain([Self::MoeDispatch(layer), Self::MoeCombine(layer)])
            .collect()
    }

    /// Returns the kind's name on the command line and in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SendRecv => "send_recv",
            Self::MoeDispatch(_) => "moe_dispatch",
            Self::MoeCombine(_) => "moe_combine",
            _ => Operation::ALL
                .iter()
                .find(|operation| Self::of(**operation) == Ok(self))
                .map_or("", |operation| operation.name()),
        }
    }

    /// Returns true if the operation takes a reduction as an argument.
    pub(crate) const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::Reduce)
    }

    /// Returns true if the operation is fused with an RMSNorm.
    pub(crate) const fn is_norm(self) -> bool {
        matches!(self, Self::AllReduceNorm | Self::ReduceScatterNorm)
    }

    /// Returns the sizes of the layer if the operation is part of a mixture of experts.
    pub(crate) const fn layer(self) -> Option<ExpertLayer> {
        match self {
            Self::MoeDispatch(layer) | Self::MoeCombine(layer) => Some(layer),
            _ => None,
        }
    }

    /// Returns the reason why the operation cannot run, or `None` if it can.
    pub(crate) fn refuses(
        self,
        dtype: DType,
        op: ReduceOp,
        (ranks, hosts): (u32, u32),
        backend: &str,
    ) -> Option<Refusal> {
        let code = op.code();
        let is_fused = self.is_norm() || self.layer().is_some();
        let has_fused = matches!(dtype, DType::F32 | DType::F16 | DType::Bf16);
        if self.reduces() && !dtype.is_reducible() {
            Some(Refusal::Kind(format!("{} has no reductions", dtype.name())))
        } else if self.reduces() && !code.supports(dtype) {
            Some(Refusal::Op(format!(
                "{} has no reduction {}",
                dtype.name(),
                code.name()
            )))
        } else if is_fused && !has_fused {
            Some(Refusal::Kind("it is for f32, f16 and bf16".to_owned()))
        } else if is_fused && backend != "fusewire" {
            Some(Refusal::Kind(format!(
                "backend {backend} has no fused operations"
            )))
        } else if self.is_norm() && hosts > 1 {
            Some(Refusal::Kind(
                "large rows need ranks that reach each other by load and store".to_owned(),
            ))
        } else if self == Self::SendRecv && ranks == 1 {
            Some(Refusal::Kind("one rank has no peer".to_owned()))
        } else {
            None
        }
    }

    /// Returns true if the operation moves no data and therefore has no size.
    pub(crate) const fn sizeless(self) -> bool {
        matches!(self, Self::Barrier)
    }

    /// Returns true if the operation can run in place.
    pub(crate) const fn has_in_place(self) -> bool {
        !matches!(self, Self::AllToAllV | Self::SendRecv | Self::Barrier) && self.layer().is_none()
    }

    /// Returns the default of the largest size. The rows of the experts have up to `top_k` times
    /// the size of the tokens.
    pub(crate) fn max_bytes(self) -> u64 {
        MAX_BYTES / u64::from(self.layer().map_or(1, |layer| layer.top_k))
    }

    /// Returns the number of elements of a row for a nominal size. As in nccl-tests, the nominal
    /// size is the total size of the input or of the output, whichever is larger. In a mixture of
    /// experts, it is the size of a rank's tokens, of which there is at least one.
    pub(crate) fn count(self, bytes: u64, dtype: DType, ranks: u32) -> usize {
        let elements = (bytes / dtype.size() as u64) as usize;
        match self {
            Self::AllReduce | Self::Broadcast | Self::Reduce | Self::SendRecv => elements,
            Self::Barrier => 0,
            Self::AllReduceNorm => whole_rows(elements),
            Self::ReduceScatterNorm => whole_rows(elements / ranks as usize),
            Self::MoeDispatch(layer) | Self::MoeCombine(layer) => {
                (elements / layer.hidden).max(1) * layer.hidden
            }
            _ => elements / ranks as usize,
        }
    }

    /// Returns the nominal size in bytes of rows of `count` elements.
    pub(crate) fn bytes(self, count: usize, dtype: DType, ranks: u32) -> u64 {
        let rows = match self {
            Self::AllReduce
            | Self::Broadcast
            | Self::Reduce
            | Self::SendRecv
            | Self::Barrier
            | Self::AllReduceNorm
            | Self::MoeDispatch(_)
            | Self::MoeCombine(_) => 1,
            Self::AllGatherV | Self::AllToAllV => {
                // The parts differ by rank. The nominal size is the size of the largest output.
                let most = (0..ranks)
                    .map(|rank| self.shape(count, ranks, rank).1)
                    .max();
                return (most.unwrap_or(0) * dtype.size()) as u64;
            }
            _ => u64::from(ranks),
        };
        rows * (count * dtype.size()) as u64
    }

    /// Returns the ratio of bus bandwidth to algorithm bandwidth, for rows of `count` elements. The
    /// bus bandwidth corresponds to the load of the busiest link.
    pub(crate) fn bus_factor(self, count: usize, ranks: u32) -> f64 {
        let n = f64::from(ranks);
        match self {
            Self::AllReduce | Self::AllReduceNorm => 2.0 * (n - 1.0) / n,
            Self::Broadcast | Self::Reduce | Self::SendRecv => 1.0,
            Self::Barrier => 0.0,
            Self::MoeDispatch(layer) => {
                let tokens = count / layer.hidden;
                Routing::new(layer, ranks, tokens).dispatched() as f64 / tokens as f64
            }
            Self::MoeCombine(layer) => {
                let tokens = count / layer.hidden;
                Routing::new(layer, ranks, tokens).combined() as f64 / tokens as f64
            }
            _ => (n - 1.0) / n,
        }
    }

    /// Returns the numbers of input and output elements of `rank`, for rows of `count` elements.
    /// The rows of experts are not among them, because the library allocates their memory.
    pub(crate) fn shape(self, count: usize, ranks: u32, rank: u32) -> (usize, usize) {
        let n = ranks as usize;
        match self {
            Self::AllReduce
            | Self::Broadcast
            | Self::Reduce
            | Self::SendRecv
            | Self::AllReduceNorm
            | Self::MoeDispatch(_)
            | Self::MoeCombine(_) => (count, count),
            Self::Barrier => (0, 0),
            Self::ReduceScatter | Self::ReduceScatterNorm => (n * count, count),
            Self::AllGather => (count, n * count),
            Self::AllGatherV => {
                let counts = counts(count, ranks);
                (
                    counts[rank as usize] as usize,
                    counts.iter().sum::<u64>() as usize,
                )
            }
            Self::Scatter => (if rank == ROOT { n * count } else { 0 }, count),
            Self::Gather => (count, if rank == ROOT { n * count } else { 0 }),
            Self::AllToAll => (n * count, n * count),
            Self::AllToAllV => {
                let sent: u64 = (0..ranks).map(|to| split(count, rank, to)).sum();
                let received: u64 = (0..ranks).map(|from| split(count, from, rank)).sum();
                (sent as usize, received as usize)
            }
        }
    }

    /// Returns the number of elements, for each of `count`, of the memory of a mixture of experts
    /// that an operation with `ranks` ranks and its check use.
    pub(crate) fn layer_memory(self, ranks: u32) -> u64 {
        self.layer().map_or(0, |layer| {
            // Rows of tokens in a window, results in a window, rows of experts, two copies of them.
            u64::from(layer.top_k.min(ranks) + 4 * layer.top_k)
        })
    }

    /// Returns the overlap of input and output in an in-place call. The flag is true if the input
    /// is a part of the output, and false if the output is a part of the input. The number is the
    /// offset of that part in elements.
    pub(crate) fn in_place_at(self, count: usize, ranks: u32, rank: u32) -> (bool, usize) {
        match self {
            Self::AllGather => (true, rank as usize * count),
            Self::AllGatherV => {
                let before: u64 = counts(count, ranks)[..rank as usize].iter().sum();
                (true, before as usize)
            }
            Self::Gather if rank == ROOT => (true, ROOT as usize * count),
            Self::ReduceScatter | Self::ReduceScatterNorm => (false, rank as usize * count),
            Self::Scatter if rank == ROOT => (false, ROOT as usize * count),
            _ => (true, 0),
        }
    }
}

/// Root of the operations that have a root.
pub(crate) const ROOT: u32 = 0;

/// Returns the length of a row of the fused norm, for a buffer of `elements` elements.
pub(crate) fn hidden(elements: usize) -> usize {
    (elements / 8 * 8).clamp(8, HIDDEN)
}

/// Returns the number of elements of all rows of the fused norm that fit in `elements` elements.
fn whole_rows(elements: usize) -> usize {
    elements / hidden(elements) * hidden(elements)
}

/// Returns the counts of all_gather_v. They differ by rank and are at most `count`.
pub(crate) fn counts(count: usize, ranks: u32) -> Vec<u64> {
    (0..ranks as usize)
        .map(|rank| (count * (rank % 3 + 1) / 3) as u64)
        .collect()
}

/// Returns the number of elements that rank `from` sends to rank `to` in all_to_all_v. The number
/// is 0 for some pairs of ranks.
pub(crate) fn split(count: usize, from: u32, to: u32) -> u64 {
    (count * ((from + 2 * to) as usize % 3) / 2) as u64
}
