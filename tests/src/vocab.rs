//! Computes the expected results of vocabulary-parallel reductions, bit for bit and in f64. The
//! code follows the documentation. It shares only the exponential and the logarithm with the
//! kernels. These two functions have separate tests.

use core::cmp::Ordering;
use core::ops::Range;

use fusewire::DType;
use fusewire_device::math;

use crate::oracle::{narrow, widen};
use crate::rng::Rng;

/// Distribution of the logits in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Logits like those of a model: from -20 to 20, most of them small.
    Ordinary,
    /// Five different values, including +0 and -0.
    Ties,
    /// -inf except in a few columns.
    Masked,
    /// Some logits are NaN.
    Nan,
    /// Rows alternate between all -inf, all NaN, and some +inf.
    Extreme,
    /// The greatest logits are in eight adjacent columns of every 256.
    Periodic,
    /// Each logit is greater than all logits before it.
    Ascending,
}

impl Contents {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::Ordinary,
        Self::Ties,
        Self::Masked,
        Self::Nan,
        Self::Extreme,
        Self::Periodic,
        Self::Ascending,
    ];

    /// Returns row `row` of `columns` logits, rounded to `dtype`. All ranks get the same values.
    pub fn row(self, dtype: DType, round: u64, row: usize, columns: usize) -> Vec<f32> {
        let mut rng = Rng::new(round << 32 ^ row as u64 ^ 0x70c4);
        let values: Vec<f32> = (0..columns)
            .map(|column| {
                let bits = rng.bits();
                let unit = (bits >> 40) as f32 / (1u64 << 24) as f32;
                let few = bits.is_multiple_of(37);
                let ordinary = (unit - 0.5) * if few { 40.0 } else { 8.0 };
                match self {
                    Self::Ordinary => ordinary,
                    Self::Ties => [0.0, -0.0, 1.5, -1.5, 0.25][(bits % 5) as usize],
                    Self::Masked if few => ordinary,
                    Self::Masked => f32::NEG_INFINITY,
                    Self::Nan if bits.is_multiple_of(11) => {
                        f32::from_bits(0x7fc0_0000 | (bits as u32 & 0x803f_ffff))
                    }
                    Self::Nan => ordinary,
                    Self::Extreme => match row % 3 {
                        0 => f32::NEG_INFINITY,
                        1 => f32::NAN,
                        _ if few => f32::INFINITY,
                        _ => ordinary,
                    },
                    Self::Periodic if column % 256 < 8 => 100.0 + ordinary,
                    Self::Periodic => ordinary,
                    Self::Ascending => column as f32 / 16.0 - 30.0,
                }
            })
            .collect();
        widen(dtype, &narrow(dtype, &values))
    }
}

/// Expected results of a row.
#[derive(Clone, Debug, Default)]
pub struct RowResult {
    /// Columns of the greatest logits in descending order of the logits, padded with `u32::MAX`.
    pub indices: Vec<u32>,
    /// Bits of the logits of these columns, padded with NaN.
    pub values: Vec<u32>,
    /// Bits of the log-sum-exp.
    pub log_sum_exp: u32,
    /// The log-sum-exp in f64.
    pub exact: f64,
}

/// Returns the bits of `value`, or the bits of the canonical NaN if `value` is NaN.
fn bits(value: f32) -> u32 {
    if value.is_nan() {
        0x7fc0_0000
    } else {
        value.to_bits()
    }
}

/// Orders columns by descending logits. -0 is less than +0, NaN is last, and equal logits are
/// ordered by column.
fn order(row: &[f32], a: usize, b: usize) -> Ordering {
    let by_value = match (row[a].is_nan(), row[b].is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Greater,
        (false, true) => Ordering::Less,
        (false, false) => row[b].total_cmp(&row[a]),
    };
    by_value.then(a.cmp(&b))
}

/// Returns the expected results of `row` if rank i holds the columns `shards[i]`.
pub fn expected(row: &[f32], shards: &[Range<usize>], k: usize) -> RowResult {
    let mut columns: Vec<usize> = shards.iter().cloned().flatten().collect();
    let exact = exact(row, &columns);
    columns.sort_by(|a, b| order(row, *a, *b));
    let mut out = RowResult {
        exact,
        ..RowResult::default()
    };
    for position in 0..k {
        let column = columns.get(position).copied();
        out.indices.push(column.map_or(u32::MAX, |c| c as u32));
        out.values
            .push(column.map_or(bits(f32::NAN), |c| bits(row[c])));
    }
    let greatest = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let finite = |m: f32| if m.is_finite() { m } else { 0.0 };
    let maxima: Vec<f32> = shards.iter().map(|s| greatest(&row[s.clone()])).collect();
    let all = finite(greatest(&maxima));
    let mut total = 0f32;
    for (shard, m) in shards.iter().zip(&maxima) {
        let mut partial = [0f32; 2048];
        for (i, logit) in row[shard.clone()].iter().enumerate() {
            partial[i % 2048] += math::exp(logit - finite(*m));
        }
        let mut width = 1024;
        while width > 0 {
            for j in 0..width {
                partial[j] += partial[j + width];
            }
            width /= 2;
        }
        let factor = if m.is_finite() {
            math::exp(m - all)
        } else {
            1.0
        };
        total += partial[0] * factor;
    }
    out.log_sum_exp = bits(all + math::log(total));
    out
}

/// Returns the log-sum-exp, in f64, of the logits of `row` at `columns`.
fn exact(row: &[f32], columns: &[usize]) -> f64 {
    let logits = || columns.iter().map(|column| f64::from(row[*column]));
    if logits().any(f64::is_nan) {
        return f64::NAN;
    }
    let m = logits().fold(f64::NEG_INFINITY, f64::max);
    if m.is_infinite() {
        return m;
    }
    m + logits().map(|logit| (logit - m).exp()).sum::<f64>().ln()
}

/// Returns a description of the first difference between expected and actual results, or `None` if
/// they are equal.
pub fn difference(
    want: &RowResult,
    indices: &[u32],
    values: &[u32],
    log_sum_exp: Option<u32>,
) -> Option<String> {
    for position in 0..want.indices.len() {
        let found = (indices[position], values[position]);
        let wanted = (want.indices[position], want.values[position]);
        if found != wanted {
            return Some(format!(
                "position {position}: column {} with {}, instead of {} with {}",
                found.0,
                f32::from_bits(found.1),
                wanted.0,
                f32::from_bits(wanted.1)
            ));
        }
    }
    let found = log_sum_exp?;
    let (value, exact) = (f32::from_bits(found), want.exact);
    let near = if exact.is_finite() {
        (f64::from(value) - exact).abs() <= 4e-6 * exact.abs().max(1.0)
    } else {
        bits(value) == bits(exact as f32)
    };
    if found != want.log_sum_exp || !near {
        return Some(format!(
            "log-sum-exp {value} ({found:#x}) instead of {} ({:#x}), in f64 {exact}",
            f32::from_bits(want.log_sum_exp),
            want.log_sum_exp
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let nan = f32::NAN;
        let row = [1.0, nan, 3.0, 3.0, -0.0, 0.0, f32::NEG_INFINITY];
        let found = expected(&row, &[0..4, 4..7], 7);
        assert_eq!(found.indices, [2, 3, 0, 5, 4, 6, 1]);
        assert!(f32::from_bits(found.log_sum_exp).is_nan() && found.exact.is_nan());
        let found = expected(&[0.0, 0.0], &[0..1, 1..1], 2);
        assert_eq!(found.indices, [0, u32::MAX]);
        assert_eq!(f32::from_bits(found.log_sum_exp), 0.0);
        let found = expected(&[0.0, 0.0], &[0..1, 1..2], 1);
        assert!((found.exact - 2f64.ln()).abs() < 1e-15);
    }

    /// Checks that the comparison detects each kind of difference.
    #[test]
    fn differences_are_seen() {
        let row = Contents::Ordinary.row(DType::F32, 1, 2, 500);
        let want = expected(&row, &[0..200, 200..500], 5);
        let same = |indices: &[u32], values: &[u32], sum: u32| {
            difference(&want, indices, values, Some(sum)).is_none()
        };
        let (i, v, sum) = (&want.indices[..], &want.values[..], want.log_sum_exp);
        assert!(same(i, v, sum));
        let mut swapped = i.to_vec();
        swapped.swap(3, 4);
        assert!(!same(&swapped, v, sum));
        let mut other = v.to_vec();
        other[4] ^= 1;
        assert!(!same(i, &other, sum));
        assert!(!same(i, v, sum ^ 1));
        // Other shard boundaries change the order of summation, but not the selected columns and
        // values.
        let moved = expected(&row, &[0..201, 201..500], 5);
        let mut wrong = want.clone();
        wrong.exact += 1e-3;
        assert!(difference(&wrong, i, v, Some(sum)).is_some());
        assert_eq!(
            (&moved.indices, &moved.values),
            (&want.indices, &want.values)
        );
    }
}
