//! Computes the inputs of every rank and the expected outputs. The code follows the library's
//! documentation and shares no code with its operations, so an error in an operation cannot also be
//! in the expected output.
//!
//! Inputs depend on rank, index and call, and the inputs of adjacent ranks nearly cancel. A
//! missing, repeated, stale or reordered contribution therefore changes bits of the result.

pub use fusewire::testing::reference::{fill, narrow, reduce, row_sum, widen};
use fusewire::{DType, Operation, ReduceOp};
use half::{bf16, f16};

use crate::cases::{Case, Splits};

/// Epsilon of the fused norm, which is added to the mean of squares.
pub const EPSILON: f32 = 1e-5;

/// Numbers of elements that a rank reads and writes in a case.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Elements of the input.
    pub input: usize,
    /// Elements of the output.
    pub output: usize,
    /// Position of the smaller buffer in the larger buffer for an in-place call. `None` if the
    /// operation has no in-place form.
    pub in_place: Option<usize>,
}

impl Shape {
    /// Returns the shape of `case` on `rank`.
    pub fn new(case: &Case, ranks: u32, rank: u32) -> Self {
        let (count, n, r) = (case.count, ranks as usize, rank as usize);
        let is_root = case.root % ranks == rank;
        let root = (case.root % ranks) as usize;
        let shape = |input, output, in_place| Self {
            input,
            output,
            in_place,
        };
        match case.operation {
            Operation::AllReduce | Operation::Reduce => shape(count, count, Some(0)),
            // Broadcast always works in place, on one buffer.
            Operation::Broadcast => shape(count, count, Some(0)),
            Operation::ReduceScatter => shape(n * count, count, Some(r * count)),
            Operation::AllGather => shape(count, n * count, Some(r * count)),
            Operation::AllGatherV => {
                let counts = counts(case, ranks);
                let before: u64 = counts[..r].iter().sum();
                let total: u64 = counts.iter().sum();
                shape(counts[r] as usize, total as usize, Some(before as usize))
            }
            Operation::Scatter if is_root => shape(n * count, count, Some(root * count)),
            Operation::Scatter => shape(0, count, None),
            Operation::Gather if is_root => shape(count, n * count, Some(root * count)),
            Operation::Gather => shape(count, 0, None),
            Operation::AllToAll => shape(n * count, n * count, Some(0)),
            Operation::AllToAllV => {
                let (receive, send) = splits_of(case, ranks, rank);
                let sum = |splits: &[u64]| splits.iter().sum::<u64>() as usize;
                shape(sum(&send), sum(&receive), None)
            }
            Operation::Send => shape(count, count, None),
            Operation::AllReduceNorm => {
                let elements = count * case.hidden;
                shape(elements, elements, Some(0))
            }
            Operation::Barrier => shape(0, 0, None),
            other => panic!("{other:?} has no cases"),
        }
    }
}

/// Returns the number of elements that each rank contributes to an all_gather_v. Some numbers are
/// 0.
pub fn counts(case: &Case, ranks: u32) -> Vec<u64> {
    let count = case.count as u64;
    (0..u64::from(ranks))
        .map(|rank| match (rank + u64::from(case.root)) % 3 {
            0 => count,
            1 => count / 3,
            _ if rank % 2 == 0 => 0,
            _ => count + rank,
        })
        .collect()
}

/// Returns the number of elements that `from` sends to `to` in an all_to_all_v. The number is 0 for
/// many pairs.
pub fn split(case: &Case, from: u32, to: u32) -> u64 {
    let count = case.count as u64;
    match case.splits {
        Splits::Mixed => {}
        Splits::Uniform => return count,
        Splits::Variable => return count + u64::from(2 * from + to) + 1,
        Splits::Zeros => {
            return if (from + to).is_multiple_of(2) {
                0
            } else {
                count
            };
        }
        Splits::AllZero => return 0,
        Splits::Asymmetric => return count * u64::from(to),
    }
    match (from * 5 + to * 3 + case.root) % 4 {
        0 => 0,
        1 => count,
        2 => count / 2,
        _ => count / 5 + u64::from(to),
    }
}

/// Returns the splits of `rank` in an all_to_all_v: numbers of elements to receive and to send.
pub fn splits_of(case: &Case, ranks: u32, rank: u32) -> (Vec<u64>, Vec<u64>) {
    let receive = (0..ranks).map(|from| split(case, from, rank)).collect();
    let send = (0..ranks).map(|to| split(case, rank, to)).collect();
    (receive, send)
}

/// Returns the factor of `rank` in a scaled sum.
pub fn factor(dtype: DType, rank: u32) -> f64 {
    let rank = rank as usize;
    if dtype.is_integer() {
        [3.0, -2.0, 5.0, 1.0][rank % 4]
    } else {
        [0.5, -1.25, 3.0, 0.1, 1e-3][rank % 5]
    }
}

/// Returns the factor of `rank` in a scaled sum of `case`: a power of two if the sum must be exact.
pub fn factor_of(case: &Case, rank: u32) -> f64 {
    match (case.exact, case.dtype.is_integer()) {
        (false, _) => factor(case.dtype, rank),
        (true, true) => [1.0, 2.0][rank as usize % 2],
        (true, false) => [0.5, 2.0, -1.0, 1.0][rank as usize % 4],
    }
}

/// Returns `count` small integers. Their sums are exact in every type and order. Their averages are
/// also exact if the number of ranks is a power of two. For products, each number is 1, -1, 2 or
/// -2.
pub fn fill_exact(case: &Case, rank: u32, call: u64, count: usize) -> Vec<u8> {
    let mut rng = crate::rng::Rng::new(call << 8 ^ u64::from(rank) ^ 0x5eed);
    let product = case.reduction == Some(ReduceOp::Product);
    let numbers = (0..count).map(|_| {
        let bits = rng.bits() >> 20;
        if product {
            [1i8, -1, 2, -2][bits as usize % 4]
        } else if case.dtype.is_integer() {
            (bits % 15) as i8
        } else {
            (bits % 31) as i8 - 15
        }
    });
    let mut bytes = Vec::with_capacity(count * case.dtype.size());
    for number in numbers {
        match case.dtype {
            DType::F64 => bytes.extend(f64::from(number).to_le_bytes()),
            DType::F32 => bytes.extend(f32::from(number).to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(f32::from(number)).to_le_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(f32::from(number)).to_le_bytes()),
            dtype => bytes.extend(&i64::from(number).to_le_bytes()[..dtype.size()]),
        }
    }
    bytes
}

/// Returns the reduction that `rank` passes in `case`, or [`ReduceOp::Sum`] if the operation
/// reduces nothing.
pub fn reduction(case: &Case, rank: u32) -> ReduceOp {
    match case.reduction {
        Some(ReduceOp::PreMulSum(_)) => ReduceOp::PreMulSum(factor_of(case, rank)),
        Some(op) => op,
        None => ReduceOp::Sum,
    }
}

/// Contents of a rank's buffers before a call.
#[derive(Clone, Debug, Default)]
pub struct CallInputs {
    /// The input.
    pub input: Vec<u8>,
    /// The residual of the fused norm.
    pub residual: Vec<u8>,
    /// The weight of the fused norm.
    pub weight: Vec<u8>,
}

/// Expected contents of a rank's output buffers after a call.
#[derive(Clone, Debug, Default)]
pub struct CallOutputs {
    /// The output.
    pub output: Vec<u8>,
    /// The residual output of the fused norm.
    pub residual_out: Vec<u8>,
}

/// Returns the inputs of `rank` for call number `call`.
pub fn input(case: &Case, ranks: u32, rank: u32, call: u64) -> CallInputs {
    let count = Shape::new(case, ranks, rank).input;
    let mut given = CallInputs {
        input: if case.exact {
            fill_exact(case, rank, call, count)
        } else {
            fill(case.dtype, rank, call, count)
        },
        ..CallInputs::default()
    };
    if case.operation == Operation::AllReduceNorm {
        given.residual = fill(case.dtype, 0, call ^ 1 << 40, count);
        given.weight = fill(case.dtype, 0, call ^ 1 << 41, case.hidden);
    }
    given
}

/// Returns the expected outputs of `rank` after call number `call`, or `None` if the rank has no
/// output.
pub fn output(case: &Case, ranks: u32, rank: u32, call: u64) -> Option<CallOutputs> {
    let (dtype, count) = (case.dtype, case.count);
    let (size, root) = (dtype.size(), case.root % ranks);
    let input_of = |rank: u32| input(case, ranks, rank, call).input;
    let row = |from: u32, row: u32| {
        let start = row as usize * count * size;
        input_of(from)[start..start + count * size].to_vec()
    };
    let factors = || {
        (0..ranks)
            .map(|rank| factor_of(case, rank))
            .collect::<Vec<_>>()
    };
    let reduced = |inputs: Vec<Vec<u8>>| reduce(dtype, reduction(case, 0), &factors(), &inputs);
    let output = match case.operation {
        Operation::AllReduce => reduced((0..ranks).map(input_of).collect()),
        Operation::Reduce if rank != root => return None,
        Operation::Reduce => reduced((0..ranks).map(input_of).collect()),
        Operation::ReduceScatter => reduced((0..ranks).map(|from| row(from, rank)).collect()),
        Operation::AllGather | Operation::AllGatherV => (0..ranks).flat_map(input_of).collect(),
        Operation::Broadcast => input_of(root),
        Operation::Scatter => row(root, rank),
        Operation::Gather if rank != root => return None,
        Operation::Gather => (0..ranks).flat_map(input_of).collect(),
        Operation::AllToAll => (0..ranks).flat_map(|from| row(from, rank)).collect(),
        Operation::AllToAllV => (0..ranks)
            .flat_map(|from| {
                let before: u64 = (0..rank).map(|to| split(case, from, to)).sum();
                let start = before as usize * size;
                let bytes = split(case, from, rank) as usize * size;
                input_of(from)[start..start + bytes].to_vec()
            })
            .collect(),
        Operation::Send => input_of((rank + ranks - 1) % ranks),
        Operation::AllReduceNorm => return Some(rms_norm(case, ranks, rank, call)),
        Operation::Barrier => return None,
        other => panic!("{other:?} has no cases"),
    };
    Some(CallOutputs {
        output,
        residual_out: Vec::new(),
    })
}

/// Adds the inputs of all ranks and the residual. Returns this sum and the RMSNorm of its rows.
fn rms_norm(case: &Case, ranks: u32, rank: u32, call: u64) -> CallOutputs {
    let (dtype, hidden) = (case.dtype, case.hidden);
    let sum = reduce(
        dtype,
        ReduceOp::Sum,
        &[],
        &(0..ranks)
            .map(|rank| input(case, ranks, rank, call).input)
            .collect::<Vec<_>>(),
    );
    let given = input(case, ranks, rank, call);
    let (residual, weight) = (widen(dtype, &given.residual), widen(dtype, &given.weight));
    let kept: Vec<f32> = widen(dtype, &sum)
        .iter()
        .zip(&residual)
        .map(|(sum, residual)| round(dtype, sum + residual))
        .collect();
    let mut output = Vec::with_capacity(kept.len());
    for row in kept.chunks(hidden.max(1)) {
        let squares = row_sum(row.iter().map(|value| value * value));
        let scale = 1.0 / (squares / hidden as f32 + EPSILON).sqrt();
        output.extend(row.iter().zip(&weight).map(|(v, w)| v * scale * w));
    }
    CallOutputs {
        output: narrow(dtype, &output),
        residual_out: if case.root == 0 {
            narrow(dtype, &kept)
        } else {
            Vec::new()
        },
    }
}

/// Rounds `value` to `dtype`.
fn round(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}
