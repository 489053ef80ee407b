//! The part of the weights that a rank has.

use anyhow::{Result, ensure};
use candle_core::Tensor;

use crate::Config;

/// A rank and the number of ranks over which heads and feed-forward columns are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Index of the rank, below `size`.
    pub rank: usize,
    /// Number of ranks, at least 1.
    pub size: usize,
}

impl Shard {
    /// The whole model on one rank.
    pub const WHOLE: Self = Self { rank: 0, size: 1 };

    /// Checks that `config` can be divided by the ranks.
    ///
    /// # Errors
    /// Fails if the number of heads or of feed-forward columns is not divisible by the number of
    /// ranks. The message lists the possible numbers of ranks.
    pub fn check(self, config: &Config) -> Result<()> {
        let divides = |size: &usize| {
            config.num_attention_heads.is_multiple_of(*size)
                && config.intermediate_size.is_multiple_of(*size)
        };
        let possible: Vec<String> = (1..=config.num_attention_heads)
            .filter(divides)
            .map(|size| size.to_string())
            .collect();
        ensure!(
            self.size > 0 && self.rank < self.size && divides(&self.size),
            "{} heads and {} feed-forward columns cannot be cut over {} ranks; possible are {}",
            config.num_attention_heads,
            config.intermediate_size,
            self.size,
            possible.join(", ")
        );
        Ok(())
    }

    /// Copies this rank's part of dimension `dim`. For a linear layer's `[out, in]` weight,
    /// dimension 0 selects outputs (column-parallel) and dimension 1 selects inputs (row-parallel).
    pub(crate) fn of(self, tensor: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
        let part = tensor.dim(dim)? / self.size;
        // Copies the part even if it is contiguous, so that the whole tensor can be dropped.
        tensor
            .narrow(dim, self.rank * part, part)?
            .force_contiguous()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_do_not_divide_are_refused_by_name() {
        let config = Config::tiny();
        for size in [1, 2, 4] {
            Shard { rank: 0, size }.check(&config).unwrap();
        }
        let refused = Shard { rank: 0, size: 3 }.check(&config).unwrap_err();
        let text = refused.to_string();
        assert!(
            text.ends_with("over 3 ranks; possible are 1, 2, 4"),
            "{text}"
        );
        assert!(Shard { rank: 2, size: 2 }.check(&config).is_err());
    }

    #[test]
    fn parts_side_by_side_are_the_whole() {
        let whole = Tensor::arange(0_f32, 24.0, &candle_core::Device::Cpu).unwrap();
        let whole = whole.reshape((4, 6)).unwrap();
        for dim in [0, 1] {
            let parts: Vec<Tensor> = (0..2)
                .map(|rank| Shard { rank, size: 2 }.of(&whole, dim).unwrap())
                .collect();
            let joined = Tensor::cat(&parts, dim).unwrap();
            assert_eq!(
                joined.to_vec2::<f32>().unwrap(),
                whole.to_vec2::<f32>().unwrap()
            );
        }
    }
}
