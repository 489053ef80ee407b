//! Sequential reference results, bit for bit: what tests and `fusewire perf` compare with.
//!
//! Written from the rules of the documentation with nothing of the kernels' code, so that it can
//! disagree with them. Inputs depend on rank, index and call, and their magnitudes cancel between neighbours, so a
//! missing, repeated, stale or re-ordered contribution changes bits.

use half::{bf16, f16};

use crate::{DType, ReduceOp};

fn hash(rank: u32, call: u64, index: usize) -> u64 {
    let mut z = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ call.wrapping_mul(0xd6e8_feb8_6659_fd93)
        ^ u64::from(rank) << 57;
    z = (z ^ z >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ z >> 29
}

/// `count` elements of `dtype` that `rank` holds at call number `call`.
pub fn fill(dtype: DType, rank: u32, call: u64, count: usize) -> Vec<u8> {
    let float = |i: usize| {
        // Neighbours nearly cancel: the even rank's number, negated, and a little more.
        let pair = hash(rank / 2, call, i);
        let own = hash(rank + 64, call, i);
        let exponent = (pair >> 50 & 7) as i32 - 3;
        let magnitude = (1.0 + (pair & 0x3ff) as f64 / 1024.0) * f64::from(exponent).exp2();
        let sign = if pair >> 60 & 1 == 1 { -1.0 } else { 1.0 };
        let little = (own & 0xff) as f64 / 2048.0 - 0.0625;
        if rank % 2 == 0 {
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
        _ => (0..count).for_each(|i| bytes.extend(&bits(i).to_le_bytes()[..dtype.size()])),
    }
    bytes
}

/// Reduces one element after the other in the order of the ranks; `factors` are the ranks' for a scaled
/// sum.
///
/// # Panics
/// When the type has no such reduction.
pub fn reduce(dtype: DType, op: ReduceOp, factors: &[f64], inputs: &[Vec<u8>]) -> Vec<u8> {
    macro_rules! elements {
        ($bytes:expr, $t:ty) => {
            $bytes
                .chunks_exact(size_of::<$t>())
                .map(|bytes| <$t>::from_le_bytes(bytes.try_into().expect("whole elements")))
                .collect()
        };
    }
    macro_rules! integers {
        ($t:ty) => {{
            let ranks = inputs.len();
            let all: Vec<Vec<$t>> = inputs.iter().map(|input| elements!(input, $t)).collect();
            let combine = |a: $t, b: $t| match op {
                ReduceOp::Sum | ReduceOp::Average | ReduceOp::PreMulSum(_) => a.wrapping_add(b),
                ReduceOp::Product => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::BitAnd => a & b,
                ReduceOp::BitOr => a | b,
                ReduceOp::BitXor => a ^ b,
            };
            (0..all[0].len())
                .flat_map(|i| {
                    let lift = |rank: usize| match op {
                        ReduceOp::PreMulSum(_) => {
                            all[rank][i].wrapping_mul(factors[rank] as i64 as $t)
                        }
                        _ => all[rank][i],
                    };
                    let total = (1..ranks).fold(lift(0), |acc, rank| combine(acc, lift(rank)));
                    let result = match op {
                        ReduceOp::Average => total / ranks as $t,
                        _ => total,
                    };
                    result.to_le_bytes()
                })
                .collect()
        }};
    }
    macro_rules! floats {
        ($t:ty, $all:expr, $narrow:expr) => {{
            let all: Vec<Vec<$t>> = $all;
            let ranks = all.len();
            let combine = |a: $t, b: $t| match op {
                ReduceOp::Sum | ReduceOp::Average | ReduceOp::PreMulSum(_) => a + b,
                ReduceOp::Product => a * b,
                // NaN wins, then the order of real numbers with -0 < +0.
                ReduceOp::Min | ReduceOp::Max if a.is_nan() => a,
                ReduceOp::Min | ReduceOp::Max if b.is_nan() => b,
                ReduceOp::Min if b.total_cmp(&a).is_lt() => b,
                ReduceOp::Max if b.total_cmp(&a).is_gt() => b,
                ReduceOp::Min | ReduceOp::Max => a,
                _ => panic!("{op:?}"),
            };
            let results: Vec<$t> = (0..all[0].len())
                .map(|i| {
                    let lift = |rank: usize| match op {
                        ReduceOp::PreMulSum(_) => all[rank][i] * factors[rank] as $t,
                        _ => all[rank][i],
                    };
                    let total = (1..ranks).fold(lift(0), |acc, rank| combine(acc, lift(rank)));
                    match op {
                        ReduceOp::Average => total / ranks as $t,
                        _ => total,
                    }
                })
                .collect();
            $narrow(&results)
        }};
    }
    match dtype {
        DType::I8 => integers!(i8),
        DType::U8 => integers!(u8),
        DType::I32 => integers!(i32),
        DType::U32 => integers!(u32),
        DType::I64 => integers!(i64),
        DType::U64 => integers!(u64),
        DType::F64 => floats!(
            f64,
            inputs.iter().map(|input| elements!(input, f64)).collect(),
            |results: &[f64]| results.iter().flat_map(|x| x.to_le_bytes()).collect()
        ),
        _ => floats!(
            f32,
            inputs.iter().map(|input| widen(dtype, input)).collect(),
            |results: &[f32]| narrow(dtype, results)
        ),
    }
}

/// The values of elements of f32, f16 or bf16.
///
/// # Panics
/// For other types.
pub fn widen(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pair = |bytes: &[u8]| [bytes[0], bytes[1]];
    match dtype {
        DType::F16 => bytes
            .chunks_exact(2)
            .map(|bytes| f16::from_le_bytes(pair(bytes)).to_f32())
            .collect(),
        DType::Bf16 => bytes
            .chunks_exact(2)
            .map(|bytes| bf16::from_le_bytes(pair(bytes)).to_f32())
            .collect(),
        DType::F32 => bytes
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().expect("whole elements")))
            .collect(),
        other => panic!("{other:?} is not summed in f32"),
    }
}

/// Values as elements of f32, f16 or bf16; a NaN of a small float is the canonical one.
pub fn narrow(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * dtype.size());
    for value in values {
        match dtype {
            DType::F16 | DType::Bf16 if value.is_nan() => bytes.extend(0x7fffu16.to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(*value).to_le_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(*value).to_le_bytes()),
            _ => bytes.extend(value.to_le_bytes()),
        }
    }
    bytes
}
