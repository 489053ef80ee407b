//! Arithmetic that the distributed layer and the reference share. Every function has a fixed order
//! of operations, so a result does not depend on the rank or on the batch that computes it.

/// Partial sums of a dot product: as many as fill four SSE registers, the smallest vector registers
/// of x86-64.
const LANES: usize = 16;

/// Returns the dot product of two rows of the same length. Sum `i` of [`LANES`] partial sums adds
/// the products of the elements `i`, `i + LANES`, ..; the partial sums are then added in order.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "rows of different lengths");
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0_f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    sums.iter().fold(0.0, |total, sum| total + sum)
}

/// Returns `x * sigmoid(x)`.
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// A generator of random numbers (xorshift), whose numbers depend only on the seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Returns `count` numbers between `-limit` and `limit`.
    pub(crate) fn numbers(&mut self, count: usize, limit: f32) -> Vec<f32> {
        let number = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            ((self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0) * limit
        };
        core::iter::repeat_with(number).take(count).collect()
    }

    /// Returns a matrix with one row for each output. Its outputs have about the variance of its
    /// inputs.
    pub(crate) fn matrix(&mut self, outputs: usize, inputs: usize) -> Vec<f32> {
        self.numbers(outputs * inputs, (3.0 / inputs as f32).sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_products_are_sums_of_all_products() {
        for count in [0, 1, 15, 16, 17, 48, 200] {
            let mut random = Random::new(count as u64);
            let (a, b) = (random.numbers(count, 1.0), random.numbers(count, 1.0));
            let products = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let difference = f64::from(dot(&a, &b)) - products.sum::<f64>();
            assert!(difference.abs() < 1e-5, "{count} elements: {difference:e}");
        }
    }
}
