//! The weights of the layer, and the reference: the layer on a single thread, without Fusewire.

use core::fmt;
use std::sync::Arc;

use half::bf16;

use crate::arithmetic::{Random, dot, silu};
use crate::experts::Expert;
use crate::router::Router;

/// Sizes of the layer.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Shape {
    /// Tokens of all ranks together
    #[arg(long, default_value_t = 256)]
    pub(crate) tokens: usize,
    /// Elements of a token; a multiple of 8
    #[arg(long, default_value_t = 256)]
    pub(crate) hidden: usize,
    /// Number of experts
    #[arg(long, default_value_t = 8)]
    pub(crate) experts: usize,
    /// Experts of each token
    #[arg(long, default_value_t = 2)]
    pub(crate) top_k: usize,
    /// Elements between the two projections of an expert
    #[arg(long, default_value_t = 512)]
    pub(crate) intermediate: usize,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tokens of {} elements (bf16), {} experts, top {}, intermediate {}",
            self.tokens, self.hidden, self.experts, self.top_k, self.intermediate
        )
    }
}

/// The weights of the layer.
pub(crate) struct Model {
    pub(crate) router: Arc<Router>,
    pub(crate) experts: Vec<Arc<Expert>>,
}

impl Model {
    /// Creates a layer with random weights.
    pub(crate) fn new(shape: Shape, random: &mut Random) -> Self {
        let router = Router::new(shape.experts, shape.hidden, shape.top_k, random);
        let mut expert = || Arc::new(Expert::new(shape.hidden, shape.intermediate, random));
        Self {
            experts: (0..shape.experts).map(|_| expert()).collect(),
            router: Arc::new(router),
        }
    }

    /// Returns the results of one token, as bits of bf16. Computes them expert by expert and
    /// element by element, without groups of rows.
    ///
    /// The results of experts are rounded to bf16, the type in which they are sent. They are added
    /// in the order that Fusewire's combine guarantees: `0 + weight * result + weight * result ..`,
    /// in the order of the selections, with every product rounded to f32.
    pub(crate) fn reference(&self, token: &[f32]) -> Vec<u16> {
        let mut sums = vec![0.0_f32; token.len()];
        for selection in self.router.select(token) {
            let expert = &self.experts[selection.expert];
            let row = |matrix: &[f32], index: usize| {
                let columns = matrix.len() / expert.intermediate;
                dot(&matrix[index * columns..][..columns], token)
            };
            let inner: Vec<f32> = (0..expert.intermediate)
                .map(|index| silu(row(&expert.gate, index)) * row(&expert.up, index))
                .collect();
            for (sum, down) in sums.iter_mut().zip(expert.down.chunks(expert.intermediate)) {
                let result = bf16::from_f32(dot(down, &inner)).to_f32();
                *sum += selection.weight * result;
            }
        }
        let rounded = sums.into_iter().map(bf16::from_f32);
        rounded.map(bf16::to_bits).collect()
    }
}
