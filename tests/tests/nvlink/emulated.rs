//! Tests emulated multicast: when the plan selects it, when the library refuses it, and which
//! elements it reduces.
//!
//! The switch returns rounded sums of bf16, so multicast rounds an average twice, while the other
//! algorithms round once. The tests use inputs for which the two results differ, so every element
//! of the output shows which algorithm reduced it.

use fusewire::{
    Algorithm, CallOptions, Communicator, DType, Determinism, Error, Op, Operation, Options,
    ReduceOp, ReductionCode, Result, Tensor, run_threads,
};
use fusewire_tests::cases::{Case, op_of};
use half::bf16;

const RANKS: u32 = 3;
/// Number of elements in 16 bytes.
const VECTOR: usize = 8;
/// Alignment of a rank's shard in elements.
const ALIGNMENT: usize = 64;

fn options(algorithm: Algorithm) -> Options {
    let mut options = Options::default();
    options.algorithm = algorithm;
    options.determinism = Determinism::Any;
    options.testing.spins = Some(200);
    options.abort_process_on_timeout_or_error = Some(false);
    options
}

/// Returns one number per rank, their average rounded once, and their average rounded twice. The
/// two averages differ.
fn distinguishing_values() -> ([bf16; 3], bf16, bf16) {
    for i in 0..128u16 {
        for j in 0..128u16 {
            let numbers = [
                bf16::from_bits(0x3f80 + i),
                bf16::from_bits(0x3c80 + j),
                bf16::from_bits(0x3b81),
            ];
            let sum = numbers.iter().map(|x| x.to_f32()).sum::<f32>();
            let once = bf16::from_f32(sum / 3.0);
            let twice = bf16::from_f32(bf16::from_f32(sum).to_f32() / 3.0);
            if once != twice {
                return (numbers, once, twice);
            }
        }
    }
    panic!("no numbers with different averages");
}

fn fill(tensor: &Tensor, value: bf16) {
    for i in 0..tensor.len() {
        // SAFETY: `i` is less than the tensor's length, and no operation is running.
        unsafe { tensor.as_ptr().cast::<bf16>().add(i).write(value) };
    }
}

fn read(tensor: &Tensor) -> Vec<bf16> {
    (0..tensor.len())
        // SAFETY: `i` is less than the tensor's length, and no operation is running.
        .map(|i| unsafe { tensor.as_ptr().cast::<bf16>().add(i).read() })
        .collect()
}

/// Returns true for each element that multicast reduces, and false for the other elements.
/// Multicast reduces only whole vectors. The first of the `length` elements is element `offset` of
/// a window.
fn carried(offset: usize, length: usize) -> Vec<bool> {
    let head = ((VECTOR - offset % VECTOR) % VECTOR).min(length);
    let end = head + (length - head) / VECTOR * VECTOR;
    (0..length).map(|i| i >= head && i < end).collect()
}

/// Averages `count` elements over all ranks with one all_reduce. The input starts at index `input`
/// of the window, and the result is written at index `output`. Checks that multicast reduced
/// exactly the expected elements.
fn all_reduce(
    comm: &Communicator,
    memory: &Tensor,
    input: usize,
    output: usize,
    count: usize,
    multicast: bool,
) -> Result<()> {
    let (numbers, once, twice) = distinguishing_values();
    fill(memory, bf16::ZERO);
    let (from, to) = (memory.slice(input, count)?, memory.slice(output, count)?);
    fill(&from, numbers[comm.rank() as usize]);
    comm.all_reduce_into(&to, &from, ReduceOp::Average)?;
    let shard = count.div_ceil(RANKS as usize).div_ceil(ALIGNMENT) * ALIGNMENT;
    let result = read(&to);
    let mut start = 0;
    while start < count {
        let length = shard.min(count - start);
        for (i, carried) in carried(input + start, length).into_iter().enumerate() {
            let expected = if carried && multicast { twice } else { once };
            assert!(
                result[start + i] == expected,
                "element {} of {count} from {input} to {output}: {} instead of {expected}",
                start + i,
                result[start + i]
            );
        }
        start += length;
    }
    Ok(())
}

#[test]
fn all_reduce_carries_whole_vectors_where_offsets_agree() {
    for result in run_threads(RANKS, &options(Algorithm::Nvls), |comm| {
        let memory = comm.alloc(DType::Bf16, 4096)?;
        let me = comm.rank() as usize;
        for count in [0, 1, 7, 8, 9, 64, 200, 1001] {
            for offset in [0, 1, 5, 8, 15] {
                // Multicast reduces in place, and out of place if the distance between input and
                // output is a multiple of 16 bytes.
                all_reduce(&comm, &memory, offset, offset, count, true)?;
                all_reduce(&comm, &memory, offset, offset + 2048, count, true)?;
                // The distance is not a multiple of 16 bytes.
                all_reduce(&comm, &memory, offset, offset + 2049, count, false)?;
                // The offsets differ on all ranks, on rank 1 only, and on rank 1 for the output
                // only.
                let moved = offset + 8 * me;
                all_reduce(&comm, &memory, moved, moved, count, false)?;
                let moved = offset + 8 * usize::from(me == 1);
                all_reduce(&comm, &memory, moved, moved, count, false)?;
                all_reduce(&comm, &memory, offset, moved + 2048, count, false)?;
            }
        }
        // The buffers are outside windows, first on all ranks and then on rank 2 only.
        let ordinary = Tensor::new(DType::Bf16, 4096)?;
        all_reduce(&comm, &ordinary, 0, 2048, 1001, false)?;
        let one = if me == 2 { &ordinary } else { &memory };
        all_reduce(&comm, one, 0, 2048, 1001, false)?;
        all_reduce(&comm, &memory, 0, 2048, 1001, true)
    }) {
        result.expect("all ranks");
    }
}

#[test]
fn the_ordinary_algorithms_round_once() {
    // Negative control of the previous test: for the same inputs, the other algorithms round once.
    for algorithm in [Algorithm::Auto, Algorithm::Signal, Algorithm::TwoShot] {
        for result in run_threads(RANKS, &options(algorithm), |comm| {
            let memory = comm.alloc(DType::Bf16, 4096)?;
            all_reduce(&comm, &memory, 0, 0, 1001, false)?;
            all_reduce(&comm, &memory, 0, 2048, 1001, false)
        }) {
            result.expect("all ranks");
        }
    }
}

#[test]
fn reduce_scatter_carries_whole_vectors_of_a_row() {
    for result in run_threads(RANKS, &options(Algorithm::Nvls), |comm| {
        let (numbers, once, twice) = distinguishing_values();
        let me = comm.rank() as usize;
        let memory = comm.alloc(DType::Bf16, 8192)?;
        for (input, output, multicast) in [
            (0, 3200, true),
            (3, 3201, true),
            // The output's offset may differ by rank.
            (8, 3200 + me, true),
            (8 * me, 3200, false),
        ] {
            for count in [0, 1, 9, 64, 333, 1000] {
                let from = memory.slice(input, count * RANKS as usize)?;
                let to = memory.slice(output, count)?;
                fill(&memory, bf16::ZERO);
                fill(&from, numbers[me]);
                comm.reduce_scatter_single(&to, &from, ReduceOp::Average)?;
                let carried = carried(input + me * count, count);
                for (i, result) in read(&to).into_iter().enumerate() {
                    let expected = if carried[i] && multicast { twice } else { once };
                    assert!(
                        result == expected,
                        "element {i} of {count} from {input} to {output} on rank {me}: {result}, \
                            not {expected}"
                    );
                }
            }
        }
        Ok(())
    }) {
        result.expect("all ranks");
    }
}

#[test]
fn multicast_is_refused_with_bitwise_determinism() {
    let refused = |error: &Error| {
        let text = error.to_string();
        text.contains("nvls")
            && text.contains("may change from call to call")
            && text.contains("\"any\"")
    };
    let mut bitwise = options(Algorithm::Nvls);
    bitwise.determinism = Determinism::Bitwise;
    for result in run_threads(2, &bitwise, |_| Ok(())) {
        let error = result.expect_err("determinism is bitwise");
        assert!(refused(&error), "{error}");
    }
    bitwise.algorithm = Algorithm::Auto;
    let hint = CallOptions::new().hint("algorithm", "nvls");
    for result in run_threads(2, &bitwise, |comm| {
        let error = comm
            .with_options(&hint)
            .expect_err("determinism is bitwise");
        assert!(refused(&error), "{error}");
        // The communicator remains usable.
        comm.barrier()
    }) {
        result.expect("both ranks");
    }
    for result in run_threads(2, &options(Algorithm::Auto), |comm| {
        let comm = comm.with_options(&hint)?;
        let plan = comm.plan(&sum(1000))?;
        assert_eq!(plan.algorithm, Algorithm::Nvls);
        comm.all_reduce(&comm.alloc(DType::F32, 1000)?, ReduceOp::Sum)
    }) {
        result.expect("both ranks");
    }
}

fn sum(count: usize) -> Op {
    Op::AllReduce {
        count,
        dtype: DType::F32,
        reduction: ReductionCode::Sum,
    }
}

#[test]
fn the_plan_names_multicast() {
    for result in run_threads(1, &options(Algorithm::Nvls), |comm| {
        let algorithm = |operation, dtype, op| {
            let op = op_of(&Case {
                count: 1 << 20,
                ..Case::new(operation, dtype, op)
            });
            let op = op.expect("an operation");
            comm.plan(&op)
                .map(|plan| (plan.algorithm == Algorithm::Nvls, plan.bitwise))
        };
        let (reduce, scatter) = (Operation::AllReduce, Operation::ReduceScatter);
        for operation in [reduce, scatter] {
            for dtype in [DType::F32, DType::F16, DType::Bf16] {
                assert_eq!(
                    algorithm(operation, dtype, Some(ReduceOp::Sum))?,
                    (true, false)
                );
                assert_eq!(
                    algorithm(operation, dtype, Some(ReduceOp::Average))?,
                    (true, false)
                );
                let small = dtype != DType::F32;
                assert_eq!(
                    algorithm(operation, dtype, Some(ReduceOp::Max))?,
                    (small, !small)
                );
                let none = (false, true);
                assert_eq!(algorithm(operation, dtype, Some(ReduceOp::Product))?, none);
            }
            for dtype in [DType::F64, DType::I32] {
                let none = (false, true);
                assert_eq!(algorithm(operation, dtype, Some(ReduceOp::Sum))?, none);
            }
        }
        assert_eq!(
            algorithm(Operation::AllGather, DType::I64, None)?,
            (true, true)
        );
        assert_eq!(
            algorithm(Operation::Reduce, DType::F32, Some(ReduceOp::Sum))?,
            (false, true)
        );
        // The CPU has no multicast hardware, so multicast is emulated only on request.
        let auto = comm.with_options(&CallOptions::new().hint("algorithm", "auto"))?;
        let memory = comm.alloc(DType::F32, 16)?;
        let plan = auto.plan(&sum(1 << 20))?;
        assert_eq!(plan.algorithm, Algorithm::TwoShot);
        drop(memory);
        Ok(())
    }) {
        result.expect("the rank");
    }
}
