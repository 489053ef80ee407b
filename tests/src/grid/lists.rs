//! Operations on lists of tensors, persistent all_gather, and quantized reduce_scatter.

use crate::device::tensor;
use fusewire::{Communicator, DType, ReduceOp, Result, Tensor, Work};

use super::Grid;
use super::modes::read;

const GROUP: &str = "list forms";

/// Form of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CallMode {
    Sync,
    Async,
    Graph,
}

const CALL_MODES: [CallMode; 3] = [CallMode::Sync, CallMode::Async, CallMode::Graph];

/// Returns the values that rank `from` sends to rank `to`. The values are small, so no reduction
/// overflows.
fn values(from: u32, to: u32, count: usize) -> Vec<i32> {
    let value = |i: usize| i as i32 % 50 + from as i32 * 100 + to as i32 * 10_000;
    (0..count).map(value).collect()
}

fn filled(values: &[i32]) -> Result<Tensor> {
    let tensor = tensor(DType::I32, values.len())?;
    tensor.copy_from(values)?;
    Ok(tensor)
}

fn empty(lengths: &[usize]) -> Result<Vec<Tensor>> {
    lengths
        .iter()
        .map(|length| tensor(DType::I32, *length))
        .collect()
}

/// Runs an operation in `mode`: calls its blocking form, enqueues it and waits, or captures it as a
/// graph and replays the graph four times.
fn call(
    comm: &Communicator,
    mode: CallMode,
    blocking: &dyn Fn() -> Result<()>,
    later: &dyn Fn() -> Result<Work>,
) -> Result<()> {
    match mode {
        CallMode::Sync => blocking(),
        CallMode::Async => later()?.wait_blocking(),
        CallMode::Graph => {
            let stream = comm.stream();
            stream.begin_capture()?;
            let captured = later();
            let graph = stream.end_capture()?.instantiate()?;
            captured?;
            (0..4).try_for_each(|_| graph.run(stream))
        }
    }
}

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    for mode in CALL_MODES {
        let counts: &[usize] = if grid.is_short() { &[4] } else { &[0, 4, 1024] };
        for &count in counts {
            lists(grid, mode, count, false)?;
            lists(grid, mode, count, true)?;
        }
        persistent(grid, mode)?;
        quantised(grid, mode)?;
    }
    Ok(())
}

/// Runs every list operation once. If `variable` is true, lengths differ by rank.
fn lists(grid: &mut Grid, mode: CallMode, count: usize, variable: bool) -> Result<()> {
    grid.doing = format!("list forms of {count}, variable {variable}, {mode:?}");
    let comm = grid.comm.clone();
    let (me, size) = (comm.rank(), comm.size());
    let length = |rank: u32| {
        if variable {
            count * (rank as usize % 3)
        } else {
            count
        }
    };
    let lengths: Vec<usize> = comm.ranks().map(length).collect();
    let mine = filled(&values(me, 0, length(me)))?;
    let mut wrong = Vec::new();
    let mut same = |name: &str, tensor: &Tensor, must: &[i32]| -> Result<()> {
        if tensor.to_vec::<i32>()? != must {
            wrong.push(name.to_owned());
        }
        Ok(())
    };

    let outputs = empty(&lengths)?;
    if variable {
        let (sync, later) = (
            || comm.all_gather_v(&outputs, &mine),
            || comm.all_gather_v_async(&outputs, &mine),
        );
        call(&comm, mode, &sync, &later)?;
    } else {
        let (sync, later) = (
            || comm.all_gather(&outputs, &mine),
            || comm.all_gather_async(&outputs, &mine),
        );
        call(&comm, mode, &sync, &later)?;
    }
    for (from, output) in (0..).zip(&outputs) {
        same("all_gather", output, &values(from, 0, length(from)))?;
    }

    let rows: Vec<Tensor> = comm
        .ranks()
        .map(|to| filled(&values(me, to, length(to))))
        .collect::<Result<_>>()?;
    let output = tensor(DType::I32, length(me))?;
    let op = ReduceOp::Sum;
    if variable {
        let (sync, later) = (
            || comm.reduce_scatter_v(&output, &rows, op),
            || comm.reduce_scatter_v_async(&output, &rows, op),
        );
        call(&comm, mode, &sync, &later)?;
    } else {
        let (sync, later) = (
            || comm.reduce_scatter(&output, &rows, op),
            || comm.reduce_scatter_async(&output, &rows, op),
        );
        call(&comm, mode, &sync, &later)?;
    }
    let mut sum = vec![0; length(me)];
    for from in 0..size {
        sum.iter_mut()
            .zip(values(from, me, length(me)))
            .for_each(|(sum, value)| *sum += value);
    }
    same("reduce_scatter", &output, &sum)?;

    let pair = |from: u32, to: u32| {
        if variable {
            count * ((from + 2 * to) as usize % 3)
        } else {
            count
        }
    };
    let inputs: Vec<Tensor> = comm
        .ranks()
        .map(|to| filled(&values(me, to, pair(me, to))))
        .collect::<Result<_>>()?;
    let outputs = empty(&comm.ranks().map(|from| pair(from, me)).collect::<Vec<_>>())?;
    let (sync, later) = (
        || comm.all_to_all(&outputs, &inputs),
        || comm.all_to_all_async(&outputs, &inputs),
    );
    call(&comm, mode, &sync, &later)?;
    for (from, output) in (0..).zip(&outputs) {
        same("all_to_all", output, &values(from, me, pair(from, me)))?;
    }
    let mut done = 3;

    if !variable {
        done += 2;
        let root = 1 % size;
        let rows: Vec<Tensor> = if me == root {
            comm.ranks()
                .map(|to| filled(&values(me, to, count)))
                .collect::<Result<_>>()?
        } else {
            Vec::new()
        };
        let output = tensor(DType::I32, count)?;
        let (sync, later) = (
            || comm.scatter(&output, &rows, root),
            || comm.scatter_async(&output, &rows, root),
        );
        call(&comm, mode, &sync, &later)?;
        same("scatter", &output, &values(root, me, count))?;
        let outputs = empty(if me == root { &lengths } else { &[] })?;
        let (sync, later) = (
            || comm.gather(&outputs, &mine, root),
            || comm.gather_async(&outputs, &mine, root),
        );
        call(&comm, mode, &sync, &later)?;
        for (from, output) in (0..).zip(&outputs) {
            same("gather", output, &values(from, 0, count))?;
        }
    }
    (0..done).for_each(|_| grid.tally.ran(GROUP));
    grid.require(wrong.is_empty(), &format!("{wrong:?}"));
    Ok(())
}

/// Runs a persistent all_gather, whose output is fixed at initialization.
fn persistent(grid: &mut Grid, mode: CallMode) -> Result<()> {
    grid.doing = format!("persistent all_gather, {mode:?}");
    let comm = grid.comm.clone();
    for dtype in [DType::F32, DType::I8] {
        grid.calls += 1;
        let (call_number, count) = (grid.calls, 333);
        let output = tensor(dtype, count * comm.size() as usize)?;
        let mine = grid.tensor(
            dtype,
            &grid.contents(dtype, comm.rank(), call_number, count),
        )?;
        let all_gather = comm.all_gather_p_init(&output)?;
        for _ in 0..2 {
            call(&comm, mode, &|| all_gather.exec(&mine), &|| {
                all_gather.exec_async(&mine)
            })?;
        }
        let rows = comm
            .ranks()
            .flat_map(|rank| grid.contents(dtype, rank, call_number, count));
        let right = read(&output) == rows.collect::<Vec<_>>();
        grid.check("persistent all_gather", right, "rows are wrong");
        comm.barrier()?; // No rank frees the operation before all ranks have read their outputs.
        all_gather.free();
    }
    Ok(())
}

/// Checks quantized reduce_scatter with inputs that bf16 represents exactly, so quantization does
/// not change them.
fn quantised(grid: &mut Grid, mode: CallMode) -> Result<()> {
    grid.doing = format!("quantised reduce_scatter, {mode:?}");
    let comm = grid.comm.clone();
    let (me, size) = (comm.rank(), comm.size());
    for count in [4usize, 1024] {
        let value = |rank: u32, i: usize| (i % 16) as f32 + rank as f32 * 16.0;
        let input = tensor(DType::F32, count * size as usize)?;
        let mine: Vec<f32> = (0..input.len()).map(|i| value(me, i)).collect();
        input.copy_from(&mine)?;
        let output = tensor(DType::F32, count)?;
        for (op, over) in [(ReduceOp::Sum, 1.0), (ReduceOp::Average, size as f32)] {
            call(
                &comm,
                mode,
                &|| comm.reduce_scatter_quantized(&output, &input, op, 7),
                &|| comm.reduce_scatter_quantized_async(&output, &input, op, 7),
            )?;
            let first = me as usize * count;
            let sum = |i: usize| (0..size).map(|rank| value(rank, first + i)).sum::<f32>();
            let must: Vec<f32> = (0..count).map(|i| sum(i) / over).collect();
            let right = output.to_vec::<f32>()? == must;
            grid.check("quantised reduce_scatter", right, "sums are wrong");
        }
    }
    Ok(())
}
