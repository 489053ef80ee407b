//! List forms: blocking, enqueued and captured, with contiguous lists and with separate tensors.

use fusewire::Stream;
use fusewire::{Communicator, DType, ReduceOp, Result, Tensor, Work};

use crate::Fake;

/// Returns the values that rank `from` sends to rank `to`.
fn values(from: u32, to: u32, count: usize) -> Vec<i32> {
    (0..count as i32)
        .map(|i| i * 7 + from as i32 * 1000 + to as i32 * 100_000)
        .collect()
}

fn tensor(values: &[i32]) -> Result<Tensor> {
    let tensor = Tensor::new(DType::I32, values.len())?;
    tensor.copy_from(values)?;
    Ok(tensor)
}

/// Allocates tensors of the given lengths. If `joined` is true, the tensors are contiguous slices
/// of one tensor. Otherwise, each tensor has separate memory.
fn list(lengths: &[usize], joined: bool) -> Result<Vec<Tensor>> {
    let each = |length: &usize| Tensor::new(DType::I32, *length);
    if !joined {
        return lengths.iter().map(each).collect();
    }
    let whole = Tensor::new(DType::I32, lengths.iter().sum())?;
    let mut at = 0;
    let part = |length: &usize| {
        at += length;
        whole.slice(at - length, *length)
    };
    lengths.iter().map(part).collect()
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    Blocking,
    Async,
    Graph,
}

fn check(comm: &Communicator, mode: Mode, joined: bool, count: usize) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let stream = Stream::new();
    let on = comm.on(&stream);
    type BlockingCall<'a> = &'a dyn Fn(&Communicator) -> Result<()>;
    type AsyncCall<'a> = &'a dyn Fn(&Communicator) -> Result<Work>;
    let run = |blocking: BlockingCall<'_>, later: AsyncCall<'_>| match mode {
        Mode::Blocking => blocking(comm),
        Mode::Async => later(&on)?.wait_blocking(),
        Mode::Graph => {
            stream.begin_capture()?;
            later(&on)?;
            let graph = stream.end_capture()?.instantiate()?;
            graph.run(&stream)?;
            graph.run(&stream)
        }
    };
    for variable in [false, true] {
        let length = |rank: u32| {
            if variable {
                count * ((rank as usize + 1) % 3)
            } else {
                count
            }
        };
        let lengths: Vec<usize> = comm.ranks().map(length).collect();
        let own = length(rank);
        let mine = tensor(&values(rank, 0, own))?;
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
            assert_eq!(output.to_vec::<i32>()?, values(from, 0, length(from)));
        }
        let inputs = list(&lengths, joined)?;
        for (to, input) in (0..).zip(&inputs) {
            input.copy_from(&values(rank, to, input.len()))?;
        }
        let (output, op) = (Tensor::new(DType::I32, own)?, ReduceOp::Sum);
        if variable {
            run(&|c| c.reduce_scatter_v(&output, &inputs, op), &|c| {
                c.reduce_scatter_v_async(&output, &inputs, op)
            })?;
        } else {
            run(&|c| c.reduce_scatter(&output, &inputs, op), &|c| {
                c.reduce_scatter_async(&output, &inputs, op)
            })?;
        }
        let sum = |i| comm.ranks().map(|from| values(from, rank, own)[i]).sum();
        let expected: Vec<i32> = (0..own).map(sum).collect();
        assert_eq!(output.to_vec::<i32>()?, expected);
    }
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
    for root in 0..size {
        let rows = vec![count; if rank == root { size as usize } else { 0 }];
        let inputs = list(&rows, joined)?;
        for (to, input) in (0..).zip(&inputs) {
            input.copy_from(&values(root, to, count))?;
        }
        let output = Tensor::new(DType::I32, count)?;
        run(&|c| c.scatter(&output, &inputs, root), &|c| {
            c.scatter_async(&output, &inputs, root)
        })?;
        assert_eq!(output.to_vec::<i32>()?, values(root, rank, count));
        let outputs = list(&rows, joined)?;
        let mine = tensor(&values(rank, root, count))?;
        run(&|c| c.gather(&outputs, &mine, root), &|c| {
            c.gather_async(&outputs, &mine, root)
        })?;
        for (from, output) in (0..).zip(&outputs) {
            assert_eq!(output.to_vec::<i32>()?, values(from, root, count));
        }
    }
    Ok(())
}

#[test]
fn every_list_operation() {
    let fake = Fake::new();
    for ranks in [1, 2, 3, 4, 8] {
        fake.all(ranks, |comm| {
            for mode in [Mode::Blocking, Mode::Async, Mode::Graph] {
                for joined in [false, true] {
                    for count in [0, 4, 300] {
                        check(&comm, mode, joined, count)?;
                    }
                }
            }
            Ok(())
        });
    }
}
