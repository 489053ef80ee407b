//! A layer with experts: its sizes, the routing of its tokens, and its memory.

use fusewire::{Communicator, Dispatched, Moe, MoeConfig, MoeMode, Result, Tensor};
use serde::Serialize;

use super::usage;

/// Maximum number of experts of a token.
const MAX_TOP_K: u32 = 16;
/// Maximum number of elements of a token.
const MAX_HIDDEN: usize = 1 << 20;

/// Sizes of a layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::Args)]
#[command(next_help_heading = "Options of moe_dispatch and moe_combine")]
pub(crate) struct ExpertLayer {
    /// Elements of a token: a multiple of 8. The size of a row of the table is that of a rank's
    /// tokens, and at least one token.
    #[arg(long, default_value_t = Self::DEFAULT.hidden, value_name = "ELEMENTS")]
    pub(crate) hidden: usize,
    /// Experts of all ranks.
    #[arg(long, default_value_t = Self::DEFAULT.experts)]
    pub(crate) experts: u32,
    /// Experts of a token: 1 to 16.
    #[arg(long, default_value_t = Self::DEFAULT.top_k, value_name = "EXPERTS")]
    pub(crate) top_k: u32,
    /// Selects high throughput mode, with this number of tokens of a rank in a round. 0 selects low
    /// latency mode.
    #[arg(long, default_value_t = Self::DEFAULT.staging, value_name = "TOKENS")]
    pub(crate) staging: usize,
}

impl ExpertLayer {
    /// The sizes of Qwen3-30B-A3B.
    pub(crate) const DEFAULT: Self = Self {
        hidden: 2048,
        experts: 128,
        top_k: 8,
        staging: 0,
    };

    /// Returns an error if a layer cannot have these sizes.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let Self {
            hidden,
            experts,
            top_k,
            ..
        } = *self;
        if hidden == 0 || !hidden.is_multiple_of(8) || hidden > MAX_HIDDEN {
            return Err(usage(format!(
                "--hidden {hidden}; a multiple of 8 is needed, at most {MAX_HIDDEN}"
            )));
        }
        if top_k == 0 || top_k > MAX_TOP_K {
            return Err(usage(format!(
                "--top-k {top_k}; 1 to {MAX_TOP_K} are possible"
            )));
        }
        if top_k > experts {
            return Err(usage(format!(
                "--top-k {top_k}, but there are only {experts} experts (--experts)"
            )));
        }
        Ok(())
    }

    /// Describes the layer and its measurement for the header of the table.
    pub(crate) fn notes(&self) -> [String; 2] {
        let Self {
            hidden,
            experts,
            top_k,
            staging,
        } = self;
        let mode = match staging {
            0 => String::new(),
            staging => format!(", high throughput mode with staging {staging}"),
        };
        [
            format!(
                "moe: hidden {hidden}, {experts} experts, top {top_k}, expert-major{mode}; bytes \
                 are the tokens of a rank, busbw what the busiest rank sends to others"
            ),
            "moe: an operation is repeated alone, so it begins with an exchange of signals"
                .to_owned(),
        ]
    }
}

/// Routing of the tokens of all ranks. A token with one of its experts is a *selection*.
#[derive(Debug)]
pub(crate) struct Routing {
    layer: ExpertLayer,
    ranks: u32,
    tokens: usize,
    /// By rank, token, and order in the token.
    selections: Vec<Selection>,
    /// Number of selections of each expert.
    counts: Vec<u32>,
}

/// A selection, and the row that the rank of its expert receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Selection {
    expert: u32,
    weight: f32,
    rank: u32,
    row: u32,
}

impl Selection {
    /// Returns the factor of the expert's result.
    pub(crate) fn weight(&self) -> f32 {
        self.weight
    }

    /// Returns the rank of the expert.
    pub(crate) fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Returns the index of the row in expert-major order.
    pub(crate) fn row(&self) -> usize {
        self.row as usize
    }
}

/// A row that a rank receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// Rank of the token.
    pub(crate) rank: usize,
    /// Number of the token on its rank.
    pub(crate) token: usize,
    selection: Selection,
}

/// Returns pseudo-random bits that depend on all arguments.
fn bits(rank: u32, token: usize, draw: u64) -> u64 {
    let mut z = (token as u64) << 24 ^ u64::from(rank) << 8 ^ draw;
    z = z.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

impl Routing {
    /// Selects different experts for each of `tokens` tokens of each rank. All experts are equally
    /// probable. The selections depend only on the arguments.
    pub(crate) fn new(layer: ExpertLayer, ranks: u32, tokens: usize) -> Self {
        let local_experts = layer.experts.div_ceil(ranks);
        let mut selections = Vec::with_capacity(ranks as usize * tokens * layer.top_k as usize);
        let mut counts = vec![0u32; layer.experts as usize];
        for (rank, token) in (0..ranks).flat_map(|rank| (0..tokens).map(move |at| (rank, at))) {
            let first = selections.len();
            for bits in (0..).map(|draw| bits(rank, token, draw)) {
                if selections.len() - first == layer.top_k as usize {
                    break;
                }
                let expert = (bits % u64::from(layer.experts)) as u32;
                let is_selected = |other: &Selection| other.expert == expert;
                if selections[first..].iter().any(is_selected) {
                    continue;
                }
                selections.push(Selection {
                    expert,
                    weight: ((bits >> 48) + 1) as f32 / 65536.0,
                    rank: expert / local_experts,
                    // Among the rows of the expert.
                    row: counts[expert as usize],
                });
                counts[expert as usize] += 1;
            }
        }
        let firsts = first_rows(&counts, local_experts);
        for selection in &mut selections {
            selection.row += firsts[selection.expert as usize];
        }
        Self {
            layer,
            ranks,
            tokens,
            selections,
            counts,
        }
    }

    fn local_experts(&self) -> u32 {
        self.layer.experts.div_ceil(self.ranks)
    }

    /// Returns the selections of a rank's tokens.
    pub(crate) fn selections(&self, rank: u32) -> &[Selection] {
        let each = self.tokens * self.layer.top_k as usize;
        &self.selections[rank as usize * each..][..each]
    }

    /// Returns the numbers of rows of a rank's experts.
    fn counts(&self, rank: u32) -> Vec<u32> {
        let each = self.local_experts() as usize;
        let counts = self.counts.iter().copied().skip(rank as usize * each);
        counts.chain(core::iter::repeat(0)).take(each).collect()
    }

    /// Returns the number of rows that a rank receives.
    pub(crate) fn rows(&self, rank: u32) -> usize {
        self.counts(rank).iter().map(|count| *count as usize).sum()
    }

    /// Returns the rows that a rank receives, in expert-major order.
    pub(crate) fn received(&self, rank: u32) -> Vec<Received> {
        let (each, top_k) = (
            self.tokens * self.layer.top_k as usize,
            self.layer.top_k as usize,
        );
        let all = self.selections.iter().enumerate();
        let mut received: Vec<Received> = all
            .filter(|(_, selection)| selection.rank == rank)
            .map(|(index, selection)| Received {
                rank: index / each,
                token: index % each / top_k,
                selection: *selection,
            })
            .collect();
        received.sort_by_key(|received| received.selection.row);
        received
    }

    /// Returns the number of rows that the busiest rank sends to other ranks in dispatch: one for
    /// each token and rank.
    pub(crate) fn dispatched(&self) -> usize {
        let top_k = self.layer.top_k as usize;
        let sent = |rank: u32| -> usize {
            let tokens = self.selections(rank).chunks_exact(top_k);
            let is_new = |token: &[Selection], k: usize| {
                let before = token[..k].iter().map(|selection| selection.rank);
                token[k].rank != rank && before.into_iter().all(|other| other != token[k].rank)
            };
            tokens
                .map(|token| (0..top_k).filter(|k| is_new(token, *k)).count())
                .sum()
        };
        (0..self.ranks).map(sent).max().unwrap_or(0)
    }

    /// Returns the number of results that the busiest rank sends to other ranks in combine: one for
    /// each selection.
    pub(crate) fn combined(&self) -> usize {
        let sent = |rank: u32| {
            let own = self.selections(rank).iter();
            self.rows(rank) - own.filter(|selection| selection.rank == rank).count()
        };
        (0..self.ranks).map(sent).max().unwrap_or(0)
    }

    /// Returns the expected descriptions of the rows that a rank receives, in the order of
    /// [`Experts::descriptions`].
    pub(crate) fn descriptions(&self, rank: u32) -> [Vec<u8>; 5] {
        let counts = self.counts(rank);
        let offsets = first_rows(&counts, self.local_experts());
        let offsets = offsets.into_iter().chain([counts.iter().sum()]);
        let received = self.received(rank);
        let sources = received
            .iter()
            .flat_map(|row| [row.rank as u32, row.token as u32]);
        let local = |row: &Received| (row.selection.expert % self.local_experts()) as i32;
        let ids = received.iter().map(local).chain(core::iter::repeat(-1));
        let weights = received.iter().map(|row| row.selection.weight);
        [
            counts.iter().flat_map(|it| it.to_le_bytes()).collect(),
            sources.flat_map(u32::to_le_bytes).collect(),
            ids.take(self.selections.len())
                .flat_map(i32::to_le_bytes)
                .collect(),
            weights.flat_map(f32::to_le_bytes).collect(),
            offsets.flat_map(u32::to_le_bytes).collect(),
        ]
    }
}

/// Returns the first row of each expert on its rank. Each rank has `local_experts` of the experts.
fn first_rows(counts: &[u32], local_experts: u32) -> Vec<u32> {
    let ranks = counts.chunks(local_experts as usize);
    ranks
        .flat_map(|counts| {
            counts.iter().scan(0, |next, count| {
                let first = *next;
                *next += count;
                Some(first)
            })
        })
        .collect()
}

/// A layer with experts at one size: the [`Moe`], and its tensors.
#[derive(Debug)]
pub(crate) struct Experts {
    moe: Moe,
    /// The same layer with operations that wait.
    blocking: Moe,
    ids: Tensor,
    weights: Tensor,
    dispatched: Dispatched,
    /// Elements of the rows that this rank receives.
    elements: usize,
}

impl Experts {
    /// Creates the layer and dispatches `x`, the tokens of this rank. All ranks must call this
    /// together.
    pub(crate) fn new(comm: &Communicator, layer: ExpertLayer, x: &Tensor) -> Result<Self> {
        let ExpertLayer {
            hidden,
            experts,
            top_k,
            staging,
        } = layer;
        let tokens = x.len() / hidden;
        let routing = Routing::new(layer, comm.size(), tokens);
        let own = routing.selections(comm.rank()).iter();
        let (ids, weights): (Vec<i32>, Vec<f32>) = own
            .map(|selection| (selection.expert as i32, selection.weight))
            .unzip();
        let mut config = MoeConfig::new(experts, top_k, hidden, tokens).input(x.dtype());
        if staging > 0 {
            config = config.mode(MoeMode::HighThroughput).staging(staging);
        }
        let moe = Moe::new(comm, &config)?;
        let (ids, weights) = (comm.tensor_from(&ids)?, comm.tensor_from(&weights)?);
        let dispatched = moe.dispatch(x, &ids, &weights)?;
        comm.synchronize()?;
        Ok(Self {
            blocking: moe.blocking(),
            moe,
            ids,
            weights,
            dispatched,
            elements: routing.rows(comm.rank()) * hidden,
        })
    }

    /// Returns the rows that this rank receives, and the memory after them, which no operation
    /// changes.
    pub(crate) fn rows(&self) -> Result<(Tensor, Tensor)> {
        let x = &self.dispatched.x;
        let after = x.slice(self.elements, x.len() - self.elements)?;
        Ok((x.slice(0, self.elements)?, after))
    }

    /// Returns the tensors that describe the received rows, and their names.
    pub(crate) fn descriptions(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let Dispatched {
            counts,
            offsets,
            sources,
            ids,
            weights,
            ..
        } = &self.dispatched;
        let rows = self.elements / self.moe.config().hidden;
        let mut descriptions = vec![
            ("counts", counts.clone()),
            ("sources", sources.slice(0, 2 * rows)?),
            ("ids", ids.clone()),
            ("weights", weights.slice(0, rows)?),
        ];
        descriptions.extend(offsets.clone().map(|offsets| ("offsets", offsets)));
        Ok(descriptions)
    }

    /// Dispatches `x`. If `enqueue` is true, only enqueues the dispatch.
    pub(crate) fn dispatch(&self, x: &Tensor, enqueue: bool) -> Result<()> {
        let moe = self.moe(enqueue);
        moe.dispatch(x, &self.ids, &self.weights).map(drop)
    }

    /// Combines the results, which are in the memory of the rows. If `enqueue` is true, only
    /// enqueues the combine.
    pub(crate) fn combine(&self, out: &Tensor, enqueue: bool) -> Result<()> {
        let dispatched = &self.dispatched;
        self.moe(enqueue).combine(&dispatched.x, dispatched, out)
    }

    /// Returns the layer whose operations are enqueued, or wait.
    fn moe(&self, enqueue: bool) -> &Moe {
        match enqueue {
            true => &self.moe,
            false => &self.blocking,
        }
    }

    /// Frees the memory. All ranks must call this together.
    pub(crate) fn free(self) -> Result<()> {
        self.moe.free()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: ExpertLayer = ExpertLayer::DEFAULT;

    #[test]
    fn selections_are_different_and_on_all_ranks() {
        let (ranks, tokens) = (4, 100);
        let routing = Routing::new(LAYER, ranks, tokens);
        let top_k = LAYER.top_k as usize;
        let experts = |selections: &[Selection]| -> Vec<u32> {
            selections.iter().map(|it| it.expert).collect()
        };
        let mut all: Vec<Vec<u32>> = Vec::new();
        for rank in 0..ranks {
            let own = routing.selections(rank);
            let on = |other: usize| own.iter().filter(|it| it.rank() == other).count();
            let each = tokens * top_k / ranks as usize;
            for other in 0..ranks as usize {
                assert!(on(other) > each / 2, "{} from {rank} to {other}", on(other));
            }
            all.extend(own.chunks_exact(top_k).map(experts));
        }
        for token in &mut all {
            token.sort_unstable();
            token.dedup();
            assert_eq!(token.len(), top_k);
        }
        all.sort_unstable();
        all.dedup();
        assert_eq!(
            all.len(),
            ranks as usize * tokens,
            "tokens with equal experts"
        );
    }

    #[test]
    fn rows_are_in_expert_major_order() {
        // The last rank has fewer experts than the others.
        let layer = ExpertLayer {
            hidden: 8,
            experts: 10,
            top_k: 3,
            staging: 0,
        };
        let routing = Routing::new(layer, 4, 5);
        let mut rows = 0;
        for rank in 0..4 {
            let received = routing.received(rank);
            let order: Vec<_> = received
                .iter()
                .map(|it| (it.selection.expert, it.rank, it.token))
                .collect();
            assert!(order.is_sorted(), "{order:?}");
            assert!(order.iter().all(|(expert, ..)| expert / 3 == rank));
            let indices = received.iter().map(|it| it.selection.row());
            assert!(indices.eq(0..routing.rows(rank)));
            rows += received.len();
        }
        assert_eq!(rows, 4 * 5 * 3);
    }

    #[test]
    fn a_token_is_sent_once_to_a_rank_and_each_result_is_returned() {
        let layer = ExpertLayer {
            hidden: 8,
            experts: 4,
            top_k: 4,
            staging: 0,
        };
        // Each token selects all experts: two on each rank.
        let routing = Routing::new(layer, 2, 5);
        assert_eq!((routing.dispatched(), routing.combined()), (5, 10));
        let alone = Routing::new(layer, 1, 5);
        assert_eq!((alone.dispatched(), alone.combined()), (0, 0));
    }
}
