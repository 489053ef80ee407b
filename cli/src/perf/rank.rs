//! One rank's part: buffers, verified calls, timed calls.

use std::io::IsTerminal;
use std::time::Instant;

use fusewire::cpu::GraphExec;
use fusewire::{Communicator, Result, Tensor};
use indicatif::{ProgressBar, ProgressStyle};

use super::Settings;
use super::case::{Case, Difference, factor};
use super::operation::{Buffers, Kind, call, counts, hidden, split};
use super::report::{Report, Row};

/// Elements around every output that must stay as they are.
const GUARD: usize = 64;
/// What they hold.
const POISON: u8 = 0xa5;

/// Runs all operations and sizes; the number of wrong elements over all ranks.
pub(crate) fn run(comm: &Communicator, settings: &Settings) -> Result<u64> {
    let mut report = Report::new(comm.rank() == 0, settings);
    let mut wrong = 0;
    let mut arena = Arena::new(comm, settings)?;
    let sizes = |kind: Kind| {
        let mut sizes = Vec::new();
        let mut bytes = settings.min_bytes;
        while bytes <= settings.max_bytes {
            sizes.push(bytes);
            if kind.sizeless() || bytes == 0 {
                break;
            }
            bytes = bytes.saturating_mul(settings.factor);
        }
        sizes
    };
    let total = settings
        .operations
        .iter()
        .map(|kind| sizes(*kind).len())
        .sum::<usize>();
    let progress = progress(
        comm.rank() == 0 && std::io::stderr().is_terminal(),
        total as u64,
    );
    for &kind in &settings.operations {
        for bytes in sizes(kind) {
            progress.set_message(format!("{} {bytes} B", kind.name()));
            let count = kind.count(bytes, settings.dtype, comm.size());
            let row = measure(comm, settings, &mut arena, kind, count)?;
            wrong += row.wrong;
            progress.suspend(|| report.row(row));
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    report
        .finish()
        .map_err(|error| fusewire::Error::InvalidArgument {
            operation: "perf",
            detail: format!("cannot write the report: {error}"),
        })?;
    Ok(wrong)
}

fn progress(shown: bool, total: u64) -> ProgressBar {
    if !shown {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

/// The two largest buffers, which all sizes share.
struct Arena {
    input: Tensor,
    output: Tensor,
    call: u64,
}

impl Arena {
    fn new(comm: &Communicator, settings: &Settings) -> Result<Self> {
        let mut longest = 0;
        for &kind in &settings.operations {
            let count = kind.count(settings.max_bytes, settings.dtype, comm.size());
            for rank in 0..comm.size() {
                let (input, output) = kind.shape(count, comm.size(), rank);
                longest = longest.max(input).max(output);
            }
        }
        let elements = longest + 2 * GUARD;
        let alloc = || {
            if settings.registered {
                comm.alloc(settings.dtype, elements)
            } else {
                Tensor::new(settings.dtype, elements)
            }
        };
        Ok(Self {
            input: alloc()?,
            output: alloc()?,
            call: 0,
        })
    }
}

#[allow(clippy::mut_from_ref)] // device memory: the tensor is only a handle
fn bytes_mut(tensor: &Tensor) -> &mut [u8] {
    let bytes = tensor.len() * tensor.dtype().size();
    // SAFETY: this rank's own memory, which no operation uses between calls (a barrier separates them).
    unsafe { core::slice::from_raw_parts_mut(tensor.as_ptr(), bytes) }
}

/// Measures one operation at one size.
fn measure(
    comm: &Communicator,
    settings: &Settings,
    arena: &mut Arena,
    kind: Kind,
    count: usize,
) -> Result<Row> {
    let (ranks, rank, dtype) = (comm.size(), comm.rank(), settings.dtype);
    let in_place = settings.in_place && kind.has_in_place() || kind == Kind::Broadcast;
    let (given, gotten) = kind.shape(count, ranks, rank);
    let (mut input, mut output) = (
        arena.input.slice(GUARD, given)?,
        arena.output.slice(GUARD, gotten)?,
    );
    if in_place {
        let (input_inside, at) = kind.in_place_at(count, ranks, rank);
        if input_inside && at + given <= gotten {
            input = output.slice(at, given)?;
        } else if !input_inside {
            output = arena.input.slice(GUARD + at, gotten)?;
        }
    }
    let vector = match kind {
        Kind::AllGatherV => Some(counts(count, ranks)),
        Kind::AllToAllV => Some(
            (0..ranks)
                .map(|from| split(count, from, rank))
                .chain((0..ranks).map(|to| split(count, rank, to)))
                .collect(),
        ),
        _ => None,
    };
    let counts = vector
        .map(|values: Vec<u64>| {
            let tensor = Tensor::new(fusewire::DType::U64, values.len())?;
            tensor.copy_from(&values)?;
            Ok::<_, fusewire::Error>(tensor)
        })
        .transpose()?;
    let fused = if kind == Kind::AllReduceRmsNorm {
        count
    } else {
        0
    };
    let buffers = Buffers {
        input,
        output,
        residual: Tensor::new(dtype, fused)?,
        weight: Tensor::new(dtype, if fused == 0 { 0 } else { hidden(count) })?,
        counts,
    };
    let op = factor(settings.op, rank);
    let exec = if settings.graph {
        Some(capture(comm, kind, op, &buffers)?)
    } else {
        None
    };
    let once = || match &exec {
        Some(exec) => exec.run(comm.stream()),
        None => call(comm, kind, op, &buffers, false),
    };

    let mut wrong = 0;
    if settings.check {
        wrong += verified(comm, settings, arena, (kind, count), &buffers, &once)?;
    }
    let bytes = kind.bytes(count, dtype, ranks);
    let iterations = settings.iterations.unwrap_or(automatic(bytes, ranks));
    let warmup = settings.warmup.unwrap_or(iterations / 10 + 1);
    let mut times = Vec::with_capacity(iterations as usize);
    for i in 0..warmup + iterations {
        comm.barrier()?;
        let started = Instant::now();
        once()?;
        let elapsed = started.elapsed();
        if i >= warmup {
            times.push(elapsed.as_secs_f64() * 1e6);
        }
    }
    if settings.check {
        wrong += verified(comm, settings, arena, (kind, count), &buffers, &once)?;
    }
    let mut all = [wrong];
    comm.all_reduce(all.as_mut_slice(), fusewire::ReduceOp::Sum)?;
    let reduction = kind.reduces().then_some(settings.op);
    let plan = comm.plan(kind.operation(), count, dtype, reduction)?;
    Ok(Row::new(
        settings,
        kind,
        comm,
        count,
        plan.algorithm,
        in_place,
        &mut times,
        all[0],
    ))
}

/// Timed calls for a size: about a second's worth.
fn automatic(bytes: u64, ranks: u32) -> u32 {
    let most = if ranks > 2 { 500 } else { 5000 };
    ((256u64 << 20) / (bytes + 1)).clamp(5, most) as u32
}

fn capture(
    comm: &Communicator,
    kind: Kind,
    op: fusewire::ReduceOp,
    buffers: &Buffers,
) -> Result<GraphExec> {
    comm.stream().begin_capture()?;
    let captured = call(comm, kind, op, buffers, true);
    let graph = comm.stream().end_capture()?;
    captured?;
    graph.instantiate()
}

/// One call with new inputs and poisoned outputs, every element and the guards compared.
fn verified(
    comm: &Communicator,
    settings: &Settings,
    arena: &mut Arena,
    (kind, count): (Kind, usize),
    buffers: &Buffers,
    once: &dyn Fn() -> Result<()>,
) -> Result<u64> {
    if kind == Kind::Barrier {
        return once().map(|()| 0);
    }
    arena.call += 1;
    let (ranks, rank) = (comm.size(), comm.rank());
    let case = Case::new(
        (kind, settings.op),
        settings.dtype,
        (ranks, rank),
        count,
        arena.call,
    );
    comm.barrier()?;
    let size = settings.dtype.size();
    let (input, output) = (bytes_mut(&buffers.input), bytes_mut(&buffers.output));
    let (first, last) = (GUARD * size, GUARD * size);
    let whole = bytes_mut(&arena.output);
    // The guards of the output's own arena; in place in the input's arena the input is around it.
    let apart = buffers.output.as_ptr() as usize == whole.as_ptr() as usize + first;
    if apart {
        whole[..first].fill(POISON);
        whole[first + output.len()..][..last].fill(POISON);
    }
    output.fill(POISON);
    input.copy_from_slice(&case.input(buffers.input.len()));
    bytes_mut(&buffers.residual).copy_from_slice(&case.residual(buffers.residual.len()));
    bytes_mut(&buffers.weight).copy_from_slice(&case.weight(buffers.weight.len()));
    if kind == Kind::Broadcast && rank != super::operation::ROOT {
        output.fill(POISON);
    }
    comm.barrier()?;
    once()?;
    if settings.corrupt == Some(rank)
        && let Some(byte) = output.last_mut()
    {
        *byte ^= 1;
    }
    let mut wrong = 0;
    if let Some(expected) = case.expected()
        && let Some(difference) = case.difference(&expected, output)
    {
        let Difference {
            index,
            expected,
            got,
            wrong: count,
        } = difference;
        eprintln!(
            "rank {rank}: {} of {} bytes: {count} wrong elements, the first at index {index}: \
             expected {expected}, got {got}",
            kind.name(),
            output.len()
        );
        wrong += count;
    }
    if apart {
        let after = &whole[first + output.len()..][..last];
        let touched = whole[..first]
            .iter()
            .chain(after)
            .filter(|byte| **byte != POISON)
            .count() as u64;
        if touched > 0 {
            eprintln!(
                "rank {rank}: {}: {touched} bytes written outside of the output",
                kind.name()
            );
            wrong += touched;
        }
    }
    Ok(wrong)
}
