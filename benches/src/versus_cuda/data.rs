//! Inputs with known sums, and checks of results against these sums.
//!
//! Elements are small integers. Any sum of at most eight elements is exact in f32 and bf16 in any
//! order, so a correct result is bitwise identical to the expected one.

use fusewire::DType;

/// Returns the size of an element in bytes.
pub(crate) const fn size(dtype: DType) -> usize {
    dtype.size()
}

/// Returns element `index` of `rank`'s input, from -15 to 15. Different values of `salt` give
/// different numbers, so that stale results are detected.
pub(crate) fn element(rank: usize, index: usize, salt: usize) -> i32 {
    ((rank * 7 + index * 13 + index / 1009 + salt * 5) % 31) as i32 - 15
}

/// Rounds to bf16: to nearest, ties to even. `value` must not be NaN.
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Encodes `count` values as elements of `dtype`, f32 or bf16.
pub(crate) fn encode(dtype: DType, count: usize, value: impl Fn(usize) -> f32) -> Vec<u8> {
    match dtype {
        DType::Bf16 => (0..count)
            .flat_map(|index| to_bf16(value(index)).to_ne_bytes())
            .collect(),
        _ => (0..count)
            .flat_map(|index| value(index).to_ne_bytes())
            .collect(),
    }
}

pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::Bf16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|two| from_bf16(u16::from_ne_bytes(*two)))
            .collect(),
        _ => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|four| f32::from_ne_bytes(*four))
            .collect(),
    }
}

/// Returns the input of a rank.
pub(crate) fn input(dtype: DType, rank: usize, count: usize, salt: usize) -> Vec<u8> {
    encode(dtype, count, |index| element(rank, index, salt) as f32)
}

fn total(ranks: usize, index: usize, salt: usize) -> f32 {
    let sum: i32 = (0..ranks).map(|rank| element(rank, index, salt)).sum();
    sum as f32
}

/// Returns the sum of the inputs of all ranks.
pub(crate) fn sum(dtype: DType, ranks: usize, count: usize, salt: usize) -> Vec<u8> {
    encode(dtype, count, |index| total(ranks, index, salt))
}

/// Counts the elements of `got` whose bits differ from `expected`.
pub(crate) fn differing(dtype: DType, got: &[u8], expected: &[u8]) -> u64 {
    let width = size(dtype);
    let pairs = got.chunks_exact(width).zip(expected.chunks_exact(width));
    let missing = got.len().abs_diff(expected.len()) / width;
    pairs.filter(|(got, expected)| got != expected).count() as u64 + missing as u64
}

/// A norm over rows of `hidden` elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) dtype: DType,
    pub(crate) ranks: usize,
    pub(crate) rows: usize,
    pub(crate) hidden: usize,
    pub(crate) epsilon: f32,
    pub(crate) salt: usize,
}

impl Norm {
    fn residual_at(index: usize) -> f32 {
        element(9, index, 0) as f32
    }

    fn weight_at(column: usize) -> f32 {
        (column % 3 + 1) as f32 / 2.0
    }

    pub(crate) fn residual(&self) -> Vec<u8> {
        encode(self.dtype, self.rows * self.hidden, Self::residual_at)
    }

    pub(crate) fn weight(&self) -> Vec<u8> {
        encode(self.dtype, self.hidden, Self::weight_at)
    }

    /// Returns the sum plus the residual. The result is exact.
    pub(crate) fn residual_out(&self) -> Vec<u8> {
        encode(self.dtype, self.rows * self.hidden, |index| {
            total(self.ranks, index, self.salt) + Self::residual_at(index)
        })
    }

    /// Counts the elements of a normalised output that are NaN or differ from the exact value by
    /// more than two roundings of the type. The tolerance is needed because the order in which the
    /// squares are summed is not specified.
    pub(crate) fn wrong(&self, output: &[u8]) -> u64 {
        let got = decode(self.dtype, output);
        let values = decode(self.dtype, &self.residual_out());
        let bound = match self.dtype {
            DType::Bf16 => 1.0 / 128.0,
            _ => 1e-5,
        };
        if got.len() != values.len() {
            return got.len().abs_diff(values.len()) as u64;
        }
        let rows = got
            .chunks_exact(self.hidden)
            .zip(values.chunks_exact(self.hidden));
        rows.map(|(got, values)| {
            let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
            let scale = 1.0 / (squares / self.hidden as f64 + f64::from(self.epsilon)).sqrt();
            let wrong = got
                .iter()
                .zip(values)
                .enumerate()
                .filter(|(column, (got, value))| {
                    let right = f64::from(**value) * scale * f64::from(Self::weight_at(*column));
                    let error = (f64::from(**got) - right).abs();
                    error.is_nan() || error > bound * right.abs()
                });
            wrong.count() as u64
        })
        .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_even() {
        let (half, more) = (1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0);
        for (value, bits) in [
            (1.0, 0x3f80),
            (-2.0, 0xc000),
            (half, 0x3f80),
            (more, 0x3f82),
        ] {
            assert_eq!(to_bf16(value), bits, "{value}");
        }
        for whole in -256..=256 {
            let value = whole as f32;
            assert_eq!(from_bf16(to_bf16(value)), value);
        }
    }

    #[test]
    fn sums_are_found_wrong_where_they_are() {
        for dtype in [DType::F32, DType::Bf16] {
            let inputs: Vec<Vec<f32>> = (0..3)
                .map(|rank| decode(dtype, &input(dtype, rank, 5000, 1)))
                .collect();
            let added = encode(dtype, 5000, |i| inputs[0][i] + inputs[1][i] + inputs[2][i]);
            let expected = sum(dtype, 3, 5000, 1);
            assert_eq!(differing(dtype, &added, &expected), 0);
            let mut broken = added;
            broken[17 * size(dtype)] ^= 1;
            assert_eq!(differing(dtype, &broken, &expected), 1);
            assert!(differing(dtype, &broken[size(dtype)..], &expected) > 1);
            assert!(inputs[0] != inputs[1]);
            let before = sum(dtype, 3, 5000, 0);
            assert!(differing(dtype, &before, &expected) > 4000, "other numbers");
        }
    }

    #[test]
    fn norms_are_found_wrong_where_they_are() {
        let norm = Norm {
            dtype: DType::Bf16,
            ranks: 4,
            rows: 3,
            hidden: 64,
            epsilon: 1e-6,
            salt: 1,
        };
        let values = decode(norm.dtype, &norm.residual_out());
        let right: Vec<f32> = values
            .chunks_exact(norm.hidden)
            .flat_map(|row| {
                let mean = row.iter().map(|value| value * value).sum::<f32>() / 64.0;
                let scale = 1.0 / (mean + norm.epsilon).sqrt();
                row.iter()
                    .enumerate()
                    .map(move |(column, value)| value * scale * Norm::weight_at(column))
            })
            .collect();
        let at = right
            .iter()
            .position(|value| value.abs() > 0.1)
            .expect("one");
        let output = encode(norm.dtype, right.len(), |index| right[index]);
        assert_eq!(norm.wrong(&output), 0);
        let broken = |factor: f32| {
            encode(norm.dtype, right.len(), |index| match index == at {
                true => right[index] * factor,
                false => right[index],
            })
        };
        assert_eq!(norm.wrong(&broken(1.05)), 1);
        assert_eq!(norm.wrong(&broken(f32::INFINITY)), 1);
        assert_eq!(norm.wrong(&output[2..]), 1);
    }
}
