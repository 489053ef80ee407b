//! Tests operations on lists of tensors, persistent all_gather, and quantized reduce_scatter.

use core::time::Duration;

use fusewire::{Communicator, DType, Options, ReduceOp, Result, Tensor};
use fusewire_tests::device::{run_threads, stream, tensor};

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(30);
    options.testing.spins = Some(200);
    options
}

fn all<R: Send>(ranks: u32, body: impl Fn(Communicator) -> Result<R> + Sync) -> Vec<R> {
    run_threads(ranks, &options(), body)
        .into_iter()
        .map(|result| result.unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

/// Returns the values that rank `from` sends to rank `to`.
fn values(from: u32, to: u32, count: usize) -> Vec<i32> {
    (0..count as i32)
        .map(|i| i * 7 + from as i32 * 1000 + to as i32 * 100_000)
        .collect()
}

fn filled(values: &[i32]) -> Result<Tensor> {
    let tensor = tensor(DType::I32, values.len())?;
    tensor.copy_from(values)?;
    Ok(tensor)
}

/// Allocates tensors of the given lengths. If `joined` is true, the tensors are contiguous slices
/// of one tensor. Otherwise, each tensor has separate memory.
fn list(lengths: &[usize], joined: bool) -> Result<Vec<Tensor>> {
    if !joined {
        return lengths
            .iter()
            .map(|length| tensor(DType::I32, *length))
            .collect();
    }
    let whole = tensor(DType::I32, lengths.iter().sum())?;
    let mut at = 0;
    lengths
        .iter()
        .map(|length| {
            at += length;
            whole.slice(at - length, *length)
        })
        .collect()
}

/// Form of a call: blocking, enqueued, or captured and replayed twice.
#[derive(Clone, Copy, Debug)]
enum Mode {
    Blocking,
    Async,
    Graph,
}

fn lengths(count: usize, size: u32, variable: bool) -> Vec<usize> {
    (0..size as usize)
        .map(|rank| {
            if variable {
                count * ((rank + 1) % 3)
            } else {
                count
            }
        })
        .collect()
}

fn check(comm: &Communicator, mode: Mode, joined: bool, count: usize) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let stream = stream();
    let on = comm.on(&stream);
    // Runs the blocking form in the first mode, and the asynchronous form in the other modes.
    let run = |blocking: &dyn Fn(&Communicator) -> Result<()>,
               later: &dyn Fn(&Communicator) -> Result<fusewire::Work>|
     -> Result<()> {
        match mode {
            Mode::Blocking => blocking(comm),
            Mode::Async => later(&on)?.wait_blocking(),
            Mode::Graph => {
                stream.begin_capture()?;
                later(&on)?;
                let graph = stream.end_capture()?.instantiate()?;
                graph.run(&stream)?;
                graph.run(&stream)
            }
        }
    };
    for variable in [false, true] {
        let lengths = lengths(count, size, variable);
        let mine = filled(&values(rank, 0, lengths[rank as usize]))?;
        // all_gather(_v)
        let outputs = list(&lengths, joined)?;
        if variable {
            run(&|c| c.all_gather_v(&outputs, &mine), &|c| {
                c.all_gather_v_async(&outputs, &mine)
            })?;
        } else {
            run(&|c| c.all_gather(&outputs, &mine), &|c| {
                c.all_gather_async(&outputs, &mine)
            })?;
        }
        for (from, output) in (0..).zip(&outputs) {
            assert_eq!(
                output.to_vec::<i32>()?,
                values(from, 0, lengths[from as usize])
            );
        }
        // reduce_scatter(_v)
        let inputs = list(&lengths, joined)?;
        for (to, input) in (0..).zip(&inputs) {
            input.copy_from(&values(rank, to, input.len()))?;
        }
        let output = tensor(DType::I32, lengths[rank as usize])?;
        let op = ReduceOp::Sum;
        if variable {
            run(&|c| c.reduce_scatter_v(&output, &inputs, op), &|c| {
                c.reduce_scatter_v_async(&output, &inputs, op)
            })?;
        } else {
            run(&|c| c.reduce_scatter(&output, &inputs, op), &|c| {
                c.reduce_scatter_async(&output, &inputs, op)
            })?;
        }
        let expected: Vec<i32> = (0..output.len())
            .map(|i| {
                (0..size)
                    .map(|from| values(from, rank, output.len())[i])
                    .sum()
            })
            .collect();
        assert_eq!(output.to_vec::<i32>()?, expected);
    }
    // all_to_all with a length for each pair
    let pair = |from: u32, to: u32| count * ((from + 2 * to) % 3) as usize;
    let sends: Vec<usize> = (0..size).map(|to| pair(rank, to)).collect();
    let receives: Vec<usize> = (0..size).map(|from| pair(from, rank)).collect();
    let (inputs, outputs) = (list(&sends, joined)?, list(&receives, joined)?);
    for (to, input) in (0..).zip(&inputs) {
        input.copy_from(&values(rank, to, input.len()))?;
    }
    run(&|c| c.all_to_all(&outputs, &inputs), &|c| {
        c.all_to_all_async(&outputs, &inputs)
    })?;
    for (from, output) in (0..).zip(&outputs) {
        assert_eq!(output.to_vec::<i32>()?, values(from, rank, output.len()));
    }
    // scatter and gather with every root
    for root in 0..size {
        let rows = if rank == root {
            vec![count; size as usize]
        } else {
            Vec::new()
        };
        let inputs = list(&rows, joined)?;
        for (to, input) in (0..).zip(&inputs) {
            input.copy_from(&values(root, to, count))?;
        }
        let output = tensor(DType::I32, count)?;
        run(&|c| c.scatter(&output, &inputs, root), &|c| {
            c.scatter_async(&output, &inputs, root)
        })?;
        assert_eq!(output.to_vec::<i32>()?, values(root, rank, count));
        let outputs = list(&rows, joined)?;
        let mine = filled(&values(rank, root, count))?;
        run(&|c| c.gather(&outputs, &mine, root), &|c| {
            c.gather_async(&outputs, &mine, root)
        })?;
        for (from, output) in (0..).zip(&outputs) {
            assert_eq!(output.to_vec::<i32>()?, values(from, root, count));
        }
    }
    comm.barrier()
}

#[test]
fn every_list_operation() {
    // On a GPU the test uses fewer ranks, because every rank has many blocks and all ranks share
    // the GPU.
    let most = if fusewire_tests::device().is_gpu() {
        3
    } else {
        4
    };
    for ranks in 1..=most {
        for mode in [Mode::Blocking, Mode::Async, Mode::Graph] {
            for joined in [false, true] {
                for count in [0, 4, 1024] {
                    all(ranks, |comm| check(&comm, mode, joined, count));
                }
            }
        }
    }
}

#[test]
fn wrong_lists_are_refused_before_anything_moves() {
    all(2, |comm| {
        let (two, three) = (tensor(DType::F32, 2)?, tensor(DType::F32, 3)?);
        let ints = tensor(DType::I32, 2)?;
        let sum = ReduceOp::Sum;
        assert!(
            comm.all_gather(core::slice::from_ref(&two), &two).is_err(),
            "one output"
        );
        assert!(
            comm.all_gather(&[two.clone(), three.clone()], &two)
                .is_err(),
            "length"
        );
        assert!(
            comm.all_gather(&[two.clone(), ints.clone()], &two).is_err(),
            "type"
        );
        assert!(
            comm.reduce_scatter(&two, &[two.clone(), three.clone()], sum)
                .is_err()
        );
        assert!(
            comm.reduce_scatter_v(&two, &[three.clone(), three.clone()], sum)
                .is_err()
        );
        assert!(comm.all_to_all(Tensor::NONE, Tensor::NONE).is_err());
        assert!(
            comm.scatter(&two, &[two.clone(), three.clone()], comm.rank())
                .is_err()
        );
        assert!(
            comm.gather(&[two.clone(), three], &two, comm.rank())
                .is_err()
        );
        assert!(comm.gather(Tensor::NONE, &two, 2).is_err(), "root");
        comm.barrier()
    });
}

#[test]
fn persistent_all_gather() {
    all(3, |comm| {
        let output = comm.alloc(DType::I32, 30)?;
        let handle = comm.all_gather_p_init(&output)?;
        let input = tensor(DType::I32, 10)?;
        for round in 0..20 {
            input.copy_from(&[comm.rank() as i32 + round * 10; 10])?;
            if round % 2 == 0 {
                handle.exec(&input)?;
            } else {
                handle.exec_async(&input)?.wait_blocking()?;
            }
            let expected: Vec<i32> = (0..30).map(|i| i / 10 + round * 10).collect();
            assert_eq!(handle.output().to_vec::<i32>()?, expected);
        }
        handle.free();
        assert!(comm.all_gather_p_init(&tensor(DType::I32, 31)?).is_err());
        let unequal = tensor(DType::I32, 3 + 3 * comm.rank() as usize)?;
        let error = comm
            .all_gather_p_init(&unequal)
            .expect_err("lengths differ");
        assert!(error.to_string().contains("prepares"), "{error}");
        comm.barrier()
    });
}

#[test]
fn quantised_reduce_scatter() {
    const COUNT: usize = 2000;
    all(4, |comm| {
        let (rank, size) = (comm.rank(), comm.size() as usize);
        let input = tensor(DType::F32, COUNT * size)?;
        let value = |rank: u32, i: usize| (i as f32).mul_add(0.001, 1.0 + rank as f32 * 0.37);
        let mine: Vec<f32> = (0..COUNT * size).map(|i| value(rank, i)).collect();
        input.copy_from(&mine)?;
        let output = tensor(DType::F32, COUNT)?;
        let exact: Vec<f64> = (0..COUNT)
            .map(|i| {
                (0..4)
                    .map(|from| f64::from(value(from, rank as usize * COUNT + i)))
                    .sum()
            })
            .collect();
        // Each of the four terms is rounded by at most one bf16 spacing, so a result is wrong by at
        // most four spacings. The mean of many results is much closer to the exact sum.
        let mut mean = vec![0.0f64; COUNT];
        const ROUNDS: u64 = 64;
        for seed in 0..ROUNDS {
            comm.reduce_scatter_quantized(&output, &input, ReduceOp::Sum, seed)?;
            let once = output.to_vec::<f32>()?;
            for ((mean, once), exact) in mean.iter_mut().zip(&once).zip(&exact) {
                assert!((f64::from(*once) - exact).abs() < 4.0 * exact / 128.0);
                *mean += f64::from(*once) / ROUNDS as f64;
            }
            comm.reduce_scatter_quantized_async(&output, &input, ReduceOp::Sum, seed)?
                .wait_blocking()?;
            assert_eq!(
                output.to_vec::<f32>()?,
                once,
                "different bits with the same seed"
            );
        }
        let bias: f64 = mean
            .iter()
            .zip(&exact)
            .map(|(mean, exact)| (mean - exact) / exact)
            .sum::<f64>()
            / COUNT as f64;
        // Rounding to nearest would also have no bias on average. Truncation would have a bias of
        // 1/512.
        assert!(bias.abs() < 1e-4, "{bias}");
        let nearest: f64 = mean
            .iter()
            .zip(&exact)
            .map(|(mean, exact)| ((mean - exact) / exact).abs())
            .sum::<f64>()
            / COUNT as f64;
        // The mean of 64 results has an eighth of the error of one result. With rounding to
        // nearest, all results would be equal, and their mean would have the error of one result,
        // about 1/1024.
        assert!(nearest < 4e-4, "{nearest}");
        // Rounding does not change values that bf16 represents exactly.
        input.copy_from(&vec![1.5f32; COUNT * size])?;
        comm.reduce_scatter_quantized(&output, &input, ReduceOp::Average, 7)?;
        assert_eq!(output.to_vec::<f32>()?, vec![1.5f32; COUNT]);
        input.copy_from(&vec![f32::INFINITY; COUNT * size])?;
        comm.reduce_scatter_quantized(&output, &input, ReduceOp::Sum, 7)?;
        assert_eq!(output.to_vec::<f32>()?, vec![f32::INFINITY; COUNT]);
        input.copy_from(&vec![f32::NAN; COUNT * size])?;
        comm.reduce_scatter_quantized(&output, &input, ReduceOp::Sum, 7)?;
        assert!(output.to_vec::<f32>()?.iter().all(|x| x.is_nan()));
        assert!(
            comm.reduce_scatter_quantized(&output, &input, ReduceOp::Max, 0)
                .is_err()
        );
        assert!(
            comm.reduce_scatter_quantized(&output, &output, ReduceOp::Sum, 0)
                .is_err()
        );
        comm.barrier()
    });
}

/// Sets or clears the flag of this thread that flushes subnormal results to zero. Threads of
/// streams that this thread creates inherit the flag.
#[cfg(target_arch = "x86_64")]
fn flush_to_zero(on: bool) {
    let mut flags = 0u32;
    // SAFETY: the instruction writes 4 bytes to `flags`.
    unsafe { core::arch::asm!("stmxcsr [{}]", in(reg) &raw mut flags, options(nostack)) };
    flags = if on {
        flags | 1 << 15
    } else {
        flags & !(1 << 15)
    };
    // SAFETY: the instruction reads 4 bytes from `flags`, which differ from the register only in a
    // flag that does not affect this test's arithmetic.
    unsafe { core::arch::asm!("ldmxcsr [{}]", in(reg) &raw const flags, options(nostack)) };
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_launch_that_fails_is_the_work_of_the_list_operation() {
    if fusewire_tests::device().is_gpu() {
        return fusewire_tests::skip::skip("cpu", "GPUs have no flush-to-zero flag of a thread");
    }
    // A stream refuses kernels if its thread flushes subnormal results to zero.
    all(1, |comm| {
        let input = filled(&[1, 2, 3])?;
        let output = filled(&[7, 7, 7])?;
        flush_to_zero(true);
        let stream = stream();
        let on = comm.on(&stream);
        // The tensors of the list are in separate memory, so a copy follows the operation.
        let other = filled(&[0, 0, 0])?;
        let work =
            on.reduce_scatter_async(&output, core::slice::from_ref(&input), ReduceOp::Sum)?;
        let gathered = on.all_gather_async(&[other.slice(0, 3)?], &input);
        flush_to_zero(false);
        assert!(work.wait_blocking().is_err());
        if let Ok(gathered) = gathered {
            assert!(gathered.wait_blocking().is_err());
        }
        // The failed operations did not copy their results.
        assert_eq!(output.to_vec::<i32>()?, [7, 7, 7]);
        assert_eq!(other.to_vec::<i32>()?, [0, 0, 0]);
        assert!(
            comm.is_aborted(),
            "the other ranks must not wait for this one"
        );
        Ok(())
    });
}
