//! Sequential reference implementations of the operations, for tests and `fusewire perf`. Results
//! of operations must be bitwise identical to results of this module.
//!
//! This module follows the documentation and shares no code with the kernels, so a kernel and its
//! reference cannot have the same defect in common code. Inputs depend on rank, index and call. The
//! values of adjacent ranks nearly cancel, so a missing, repeated, stale or re-ordered contribution
//! changes bits of the result.

use core::fmt;

use half::{bf16, f16};

use crate::{DType, ReduceOp};

/// Decodes elements from bytes in memory order.
macro_rules! elements {
    ($bytes:expr, $t:ty) => {
        $bytes
            .chunks_exact(size_of::<$t>())
            .map(|bytes| <$t>::from_le_bytes(bytes.try_into().expect("whole elements")))
    };
}

/// Encodes elements as bytes in memory order.
macro_rules! bytes {
    ($values:expr) => {{
        let values = $values;
        let mut bytes = Vec::with_capacity(size_of_val(values.as_slice()));
        values
            .iter()
            .for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
        bytes
    }};
}

fn hash(rank: u32, call: u64, index: usize) -> u64 {
    let mut z = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ call.wrapping_mul(0xd6e8_feb8_6659_fd93)
        ^ u64::from(rank) << 57;
    z = (z ^ z >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ z >> 29
}

/// Returns the input of `rank` in call number `call`: `count` elements of `dtype`.
pub fn fill(dtype: DType, rank: u32, call: u64, count: usize) -> Vec<u8> {
    let float = |i: usize| {
        // The odd rank of a pair holds the negated value of the even rank plus a small number, so
        // the two values nearly cancel.
        let pair = hash(rank / 2, call, i);
        let own = hash(rank + 64, call, i);
        let exponent = (pair >> 50 & 7) as i32 - 3;
        let magnitude = (1.0 + (pair & 0x3ff) as f64 / 1024.0) * f64::from(exponent).exp2();
        let sign = if pair >> 60 & 1 == 1 { -1.0 } else { 1.0 };
        let little = (own & 0xff) as f64 / 2048.0 - 0.0625;
        if rank.is_multiple_of(2) {
            sign * magnitude
        } else {
            -sign * magnitude + little
        }
    };
    let bits = |i: usize| hash(rank, call, i) >> 5;
    let mut bytes = Vec::with_capacity(count * dtype.size());
    match dtype {
        DType::F64 => (0..count).for_each(|i| bytes.extend((float(i) * 1.000_000_1).to_le_bytes())),
        DType::F32 => {
            (0..count).for_each(|i| bytes.extend((float(i) as f32 * 1.0001).to_le_bytes()));
        }
        DType::F16 => {
            (0..count).for_each(|i| bytes.extend(f16::from_f64(float(i)).to_le_bytes()));
        }
        DType::Bf16 => {
            (0..count).for_each(|i| bytes.extend(bf16::from_f64(float(i)).to_le_bytes()));
        }
        // Values from a short list, so that some are equal on several ranks.
        DType::F32Index => (0..count).for_each(|i| {
            let values = [-2.5, -1.0, -0.0, 0.0, 1.0, 3.5, f32::NAN, f32::NEG_INFINITY];
            let bits = bits(i);
            bytes.extend(values[bits as usize & 7].to_le_bytes());
            bytes.extend(((bits >> 3) as u32).to_le_bytes());
        }),
        _ => (0..count).for_each(|i| bytes.extend(&bits(i).to_le_bytes()[..dtype.size()])),
    }
    bytes
}

/// Reduces element by element in rank order, as all_reduce and reduce do. `factors` holds each
/// rank's factor for [`ReduceOp::PreMulSum`].
///
/// # Panics
/// If the type does not support the reduction, or inputs differ in length.
pub fn reduce(dtype: DType, op: ReduceOp, factors: &[f64], inputs: &[Vec<u8>]) -> Vec<u8> {
    macro_rules! integers {
        ($t:ty) => {{
            let lift = |rank: usize| -> Vec<$t> {
                let values = elements!(inputs[rank], $t);
                match op {
                    ReduceOp::PreMulSum(_) => {
                        let factor = factors[rank] as i64 as $t;
                        values.map(|value| value.wrapping_mul(factor)).collect()
                    }
                    _ => values.collect(),
                }
            };
            let mut total = match op {
                ReduceOp::Sum | ReduceOp::Average | ReduceOp::PreMulSum(_) => {
                    fold(inputs.len(), lift, <$t>::wrapping_add)
                }
                ReduceOp::Product => fold(inputs.len(), lift, <$t>::wrapping_mul),
                ReduceOp::Min => fold(inputs.len(), lift, <$t>::min),
                ReduceOp::Max => fold(inputs.len(), lift, <$t>::max),
                ReduceOp::BitAnd => fold(inputs.len(), lift, |a, b| a & b),
                ReduceOp::BitOr => fold(inputs.len(), lift, |a, b| a | b),
                ReduceOp::BitXor => fold(inputs.len(), lift, |a, b| a ^ b),
            };
            if op == ReduceOp::Average {
                let ranks = inputs.len() as i128;
                total
                    .iter_mut()
                    .for_each(|value| *value = (*value as i128 / ranks) as $t);
            }
            bytes!(total)
        }};
    }
    macro_rules! floats {
        ($t:ty, $values:expr) => {{
            let values = $values;
            let lift = |rank: usize| -> Vec<$t> {
                let mut values: Vec<$t> = values(&inputs[rank]);
                if let ReduceOp::PreMulSum(_) = op {
                    let factor = factors[rank] as $t;
                    values.iter_mut().for_each(|value| *value *= factor);
                }
                values
            };
            let mut total: Vec<$t> = match op {
                ReduceOp::Sum | ReduceOp::Average | ReduceOp::PreMulSum(_) => {
                    fold(inputs.len(), lift, |a, b| a + b)
                }
                ReduceOp::Product => fold(inputs.len(), lift, |a, b| a * b),
                // NaN propagates; all other values have the order of real numbers, with -0 < +0.
                ReduceOp::Min => fold(inputs.len(), lift, |a, b| match () {
                    () if a.is_nan() => a,
                    () if b.is_nan() || b.total_cmp(&a).is_lt() => b,
                    () => a,
                }),
                ReduceOp::Max => fold(inputs.len(), lift, |a, b| match () {
                    () if a.is_nan() => a,
                    () if b.is_nan() || b.total_cmp(&a).is_gt() => b,
                    () => a,
                }),
                _ => panic!("{} has no {op:?}", dtype.name()),
            };
            if op == ReduceOp::Average {
                let ranks = inputs.len() as $t;
                total.iter_mut().for_each(|value| *value /= ranks);
            }
            total
        }};
    }
    match dtype {
        DType::I8 => integers!(i8),
        DType::U8 => integers!(u8),
        DType::I32 => integers!(i32),
        DType::U32 => integers!(u32),
        DType::I64 => integers!(i64),
        DType::U64 => integers!(u64),
        DType::F32Index => indexed(op, inputs),
        DType::F64 => {
            bytes!(floats!(f64, |input: &Vec<u8>| elements!(input, f64).collect()))
        }
        _ => narrow(dtype, &floats!(f32, |input: &Vec<u8>| widen(dtype, input))),
    }
}

/// Returns, for each element, the greatest or least value of all ranks and its index. NaN comes
/// first; of equal values, the lowest index.
fn indexed(op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let sign = match op {
        ReduceOp::Max => -1,
        ReduceOp::Min => 1,
        _ => panic!("pairs of a value and an index have no {op:?}"),
    };
    let rank = |pair: &&[u8]| {
        let value = f32::from_le_bytes(pair[..4].try_into().expect("a value"));
        let index = u32::from_le_bytes(pair[4..].try_into().expect("an index"));
        // The bits of a float are a sign and a magnitude.
        let magnitude = i64::from(value.abs().to_bits());
        let order = match value.is_sign_negative() {
            true => -magnitude - 1,
            false => magnitude,
        };
        (
            !value.is_nan(),
            sign * order * i64::from(!value.is_nan()),
            index,
        )
    };
    let best = |at: usize| {
        let pairs = inputs.iter().map(|input| &input[at * 8..][..8]);
        pairs.min_by_key(rank).expect("at least one rank").to_vec()
    };
    (0..inputs[0].len() / 8).flat_map(best).collect()
}

/// Combines the ranks' inputs element by element in rank order.
fn fold<T: Copy>(
    ranks: usize,
    values: impl Fn(usize) -> Vec<T>,
    combine: impl Fn(T, T) -> T,
) -> Vec<T> {
    let mut total = values(0);
    for rank in 1..ranks {
        let next = values(rank);
        assert_eq!(
            next.len(),
            total.len(),
            "the input of rank {rank} has another length"
        );
        total
            .iter_mut()
            .zip(next)
            .for_each(|(total, next)| *total = combine(*total, next));
    }
    total
}

/// Returns the result of reduce_scatter on `rank`: row `rank` of the reduced input.
///
/// # Panics
/// In the same cases as [`reduce`].
pub fn reduce_scatter(
    dtype: DType,
    op: ReduceOp,
    factors: &[f64],
    inputs: &[Vec<u8>],
    rank: usize,
) -> Vec<u8> {
    let rows: Vec<Vec<u8>> = inputs
        .iter()
        .map(|input| scatter(input, inputs.len(), rank))
        .collect();
    reduce(dtype, op, factors, &rows)
}

/// Returns the result of all_gather, all_gather_v and, on the root, gather: the concatenated
/// inputs.
pub fn gather(inputs: &[Vec<u8>]) -> Vec<u8> {
    inputs.concat()
}

/// Returns the result of scatter on `rank` of `ranks`: row `rank` of the root's `input`.
pub fn scatter(input: &[u8], ranks: usize, rank: usize) -> Vec<u8> {
    let row = input.len() / ranks;
    input[rank * row..(rank + 1) * row].to_vec()
}

/// Returns the result of all_to_all on `rank`: row `rank` of every input, in rank order.
pub fn all_to_all(inputs: &[Vec<u8>], rank: usize) -> Vec<u8> {
    inputs
        .iter()
        .flat_map(|input| scatter(input, inputs.len(), rank))
        .collect()
}

/// Returns the result of all_to_all_v on `rank`, if each rank f sends `split(f, t)` elements to
/// each rank t.
pub fn all_to_all_v(
    dtype: DType,
    inputs: &[Vec<u8>],
    rank: usize,
    split: impl Fn(usize, usize) -> usize,
) -> Vec<u8> {
    let part = |(from, input): (usize, &Vec<u8>)| {
        let start = (0..rank).map(|to| split(from, to)).sum::<usize>() * dtype.size();
        input[start..start + split(from, rank) * dtype.size()].to_vec()
    };
    inputs.iter().enumerate().flat_map(part).collect()
}

/// Returns a sum over the elements of a row, in the order of the fused norm: each of 4096
/// accumulators adds every 4096th term in order of the index; the accumulators are then added as a
/// binary tree, bit by bit of their indices.
pub fn row_sum(terms: impl Iterator<Item = f32>) -> f32 {
    let mut sums = vec![0f32; 4096];
    for (index, term) in terms.enumerate() {
        sums[index % 4096] += term;
    }
    for bit in [7, 6, 5, 4, 3, 11, 10, 9, 8, 2, 1, 0] {
        for index in (0..4096).filter(|index| index >> bit & 1 == 0) {
            sums[index] += sums[index | 1 << bit];
        }
    }
    sums[0]
}

/// Returns the results of the fused norm: the normalised rows, and the rows before the norm (`sum`,
/// from [`reduce`], plus the residual). A row has as many elements as `weight`. Sum and residual
/// are added in f32 and rounded. [`row_sum`] adds the squares. `value * scale * weight` is
/// evaluated from left to right.
///
/// # Panics
/// For types other than f32, f16 and bf16.
pub fn rms_norm(
    dtype: DType,
    sum: &[u8],
    residual: &[u8],
    weight: &[u8],
    epsilon: f32,
) -> (Vec<u8>, Vec<u8>) {
    let added: Vec<f32> = widen(dtype, sum)
        .iter()
        .zip(widen(dtype, residual))
        .map(|(s, r)| s + r)
        .collect();
    let kept = narrow(dtype, &added);
    let weight = widen(dtype, weight);
    let mut out = Vec::with_capacity(added.len());
    for row in widen(dtype, &kept).chunks(weight.len().max(1)) {
        let squares = row_sum(row.iter().map(|value| value * value));
        let scale = 1.0 / (squares / weight.len() as f32 + epsilon).sqrt();
        out.extend(
            row.iter()
                .zip(&weight)
                .map(|(value, weight)| value * scale * weight),
        );
    }
    (narrow(dtype, &out), kept)
}

/// Difference between two results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Index of the first wrong element.
    pub index: usize,
    /// Expected value of the first wrong element, with its bits.
    pub expected: String,
    /// Value of the first wrong element in the result, with its bits.
    pub got: String,
    /// Number of elements that differ.
    pub wrong: usize,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            index,
            expected,
            got,
            wrong,
        } = self;
        write!(
            f,
            "{wrong} wrong, the first at index {index}: expected {expected}, got {got}"
        )
    }
}

/// Compares two results bit by bit and returns the first difference.
///
/// # Panics
/// If the lengths differ.
pub fn first_difference(expected: &[u8], got: &[u8], dtype: DType) -> Option<Difference> {
    assert_eq!(expected.len(), got.len(), "results of different lengths");
    if expected == got {
        return None;
    }
    let size = dtype.size();
    let mut wrong = expected
        .chunks_exact(size)
        .zip(got.chunks_exact(size))
        .enumerate()
        .filter(|(_, (expected, got))| expected != got);
    let (index, (should, is)) = wrong.next()?;
    Some(Difference {
        index,
        expected: show(dtype, should),
        got: show(dtype, is),
        wrong: 1 + wrong.count(),
    })
}

/// Formats an element for a message. Appends the bits of floats, because a printed float may not
/// identify its bits.
fn show(dtype: DType, element: &[u8]) -> String {
    macro_rules! first {
        ($t:ty) => {
            elements!(element, $t)
                .next()
                .map_or_else(String::new, |value| format!("{value:?}"))
        };
    }
    let bits: String = element
        .iter()
        .rev()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let value = match dtype {
        DType::I8 => return first!(i8),
        DType::U8 => return first!(u8),
        DType::I32 => return first!(i32),
        DType::U32 => return first!(u32),
        DType::I64 => return first!(i64),
        DType::U64 => return first!(u64),
        DType::F64 => first!(f64),
        DType::F32 | DType::F16 | DType::Bf16 => format!("{:?}", widen(dtype, element)[0]),
        _ => return format!("0x{bits}"),
    };
    format!("{value} (0x{bits})")
}

/// Converts elements of f32, f16 or bf16 to f32.
///
/// # Panics
/// For other types.
pub fn widen(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F16 => elements!(bytes, f16).map(f16::to_f32).collect(),
        DType::Bf16 => elements!(bytes, bf16).map(bf16::to_f32).collect(),
        DType::F32 => elements!(bytes, f32).collect(),
        other => panic!("{} is not summed in f32", other.name()),
    }
}

/// Converts f32 values to f32, f16 or bf16, rounded to nearest even. A NaN becomes the canonical
/// NaN of the target type, unless the target is f32.
///
/// # Panics
/// For other types.
pub fn narrow(dtype: DType, values: &[f32]) -> Vec<u8> {
    const NAN: u16 = 0x7fff;
    let small = |round: fn(f32) -> u16| {
        let round = |value: f32| if value.is_nan() { NAN } else { round(value) };
        bytes!(
            values
                .iter()
                .map(|value| round(*value))
                .collect::<Vec<u16>>()
        )
    };
    match dtype {
        DType::F16 => small(|value| f16::from_f32(value).to_bits()),
        DType::Bf16 => small(|value| bf16::from_f32(value).to_bits()),
        DType::F32 => bytes!(values.to_vec()),
        other => panic!("{} is not summed in f32", other.name()),
    }
}

#[cfg(test)]
mod tests;
