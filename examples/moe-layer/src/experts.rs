//! The experts: feed-forward networks with SwiGLU, computed for all rows of an expert at once.

use std::sync::Arc;

use fusewire::{Bf16, Dispatched, Result, Tensor};

use crate::arithmetic::{Random, dot, silu};

/// An expert: `down * (silu(gate * x) * (up * x))`, with weights in f32. A matrix has one row for
/// each output.
#[derive(Clone)]
pub(crate) struct Expert {
    pub(crate) gate: Vec<f32>,
    pub(crate) up: Vec<f32>,
    pub(crate) down: Vec<f32>,
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
}

impl Expert {
    /// Creates an expert with random weights.
    pub(crate) fn new(hidden: usize, intermediate: usize, random: &mut Random) -> Self {
        Self {
            gate: random.matrix(intermediate, hidden),
            up: random.matrix(intermediate, hidden),
            down: random.matrix(hidden, intermediate),
            hidden,
            intermediate,
        }
    }

    /// Returns the results of rows of `hidden` elements, in f32.
    ///
    /// The loops over the rows are the inner ones: each row of a matrix is read from memory once
    /// for all rows of `x`. The bits of a result do not depend on the other rows.
    pub(crate) fn forward(&self, x: &[f32]) -> Vec<f32> {
        let (hidden, intermediate) = (self.hidden, self.intermediate);
        let rows = x.len() / hidden;
        let mut inner = vec![0.0; rows * intermediate];
        let matrices = self
            .gate
            .chunks_exact(hidden)
            .zip(self.up.chunks_exact(hidden));
        for (column, (gate, up)) in matrices.enumerate() {
            for (row, x) in x.chunks_exact(hidden).enumerate() {
                inner[row * intermediate + column] = silu(dot(gate, x)) * dot(up, x);
            }
        }
        let mut y = vec![0.0; rows * hidden];
        for (column, down) in self.down.chunks_exact(intermediate).enumerate() {
            for (row, inner) in inner.chunks_exact(intermediate).enumerate() {
                y[row * hidden + column] = dot(down, inner);
            }
        }
        y
    }
}

/// Computes the results of the rows that a rank has received for its `experts`, and writes them to
/// the same rows of `y`. Rows without a token are neither read nor written.
pub(crate) fn run(experts: &[Arc<Expert>], received: &Dispatched, y: &Tensor) -> Result<()> {
    let counts = received.counts.to_vec::<u32>()?;
    let offsets = received.offsets.as_ref().expect("expert-major order");
    let offsets = offsets.to_vec::<u32>()?;
    for (expert, (first, count)) in experts.iter().zip(offsets.into_iter().zip(counts)) {
        let (start, elements) = (
            first as usize * expert.hidden,
            count as usize * expert.hidden,
        );
        let x = received.x.slice(start, elements)?.to_vec::<Bf16>()?;
        let x: Vec<f32> = x.into_iter().map(Bf16::to_f32).collect();
        let results: Vec<Bf16> = expert.forward(&x).into_iter().map(Bf16::from_f32).collect();
        y.slice(start, elements)?.copy_from(&results)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_does_not_depend_on_the_other_rows() {
        let (hidden, mut random) = (24, Random::new(1));
        let expert = Expert::new(hidden, 20, &mut random);
        let x = random.numbers(5 * hidden, 1.0);
        let together = expert.forward(&x);
        let alone = x.chunks_exact(hidden).flat_map(|row| expert.forward(row));
        assert_eq!(together, alone.collect::<Vec<f32>>());
        assert!(expert.forward(&[]).is_empty());
    }
}
