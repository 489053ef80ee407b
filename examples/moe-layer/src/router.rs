//! The router: selects the experts of a token, and their weights.

use crate::arithmetic::{Random, dot};

/// An expert of a token, with the weight of its result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Selection {
    pub(crate) expert: usize,
    pub(crate) weight: f32,
}

/// A router: a linear layer, a softmax over the experts, and the `top_k` experts with the greatest
/// probabilities. Their probabilities, divided by their sum, are the weights.
pub(crate) struct Router {
    /// One row for each expert.
    matrix: Vec<f32>,
    hidden: usize,
    top_k: usize,
}

impl Router {
    /// Creates a router with random weights.
    pub(crate) fn new(experts: usize, hidden: usize, top_k: usize, random: &mut Random) -> Self {
        Self {
            matrix: random.matrix(experts, hidden),
            hidden,
            top_k,
        }
    }

    /// Returns the experts of a token. The expert with the greatest probability is the first.
    pub(crate) fn select(&self, token: &[f32]) -> Vec<Selection> {
        let rows = self.matrix.chunks_exact(self.hidden);
        let logits: Vec<f32> = rows.map(|row| dot(row, token)).collect();
        select_from(&logits, self.top_k)
    }
}

/// Returns the `top_k` experts with the greatest logits. Of equal logits, the first is taken.
fn select_from(logits: &[f32], top_k: usize) -> Vec<Selection> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // The numerators of the softmax. Its denominator does not change the weights, which are divided
    // by their sum.
    let numerators: Vec<f32> = logits.iter().map(|x| (x - greatest).exp()).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // A stable sort keeps the order of equal logits.
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    order.truncate(top_k);
    let sum = order
        .iter()
        .fold(0.0, |sum, expert| sum + numerators[*expert]);
    let selection = |expert: usize| Selection {
        expert,
        weight: numerators[expert] / sum,
    };
    order.into_iter().map(selection).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_logits_are_selected() {
        let selected = select_from(&[0.5, 2.0, -1.0, 2.0_f32.ln() + 2.0], 2);
        let experts: Vec<usize> = selected.iter().map(|selection| selection.expert).collect();
        assert_eq!(experts, [3, 1]);
        // The logits differ by ln 2, so the first weight is twice the second.
        assert!((selected[0].weight - 2.0 / 3.0).abs() < 1e-6);
        assert!((selected[1].weight - 1.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn equal_logits_select_the_first_experts() {
        let equal = [0, 1].map(|expert| Selection {
            expert,
            weight: 0.5,
        });
        assert_eq!(select_from(&[1.0; 4], 2), equal);
    }
}
