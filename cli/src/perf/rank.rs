//! The work of one rank: verified calls and timed calls for each size.

use std::io::IsTerminal;

use fusewire::{Communicator, ReduceOp, Result};
use indicatif::{ProgressBar, ProgressStyle};

use super::buffers::{Arena, Buffers};
use super::call::{algorithm, call};
use super::case::{Case, factor};
use super::operation::Kind;
use super::report::Report;
use super::row::Row;
use super::timing::{Timing, by_gpu_events, by_host_clock, capture};
use super::{Settings, complain};

/// Runs all operations with all sizes. Returns the rows of the table. Each row counts the wrong
/// elements of all ranks.
pub(crate) fn run(comm: &Communicator, settings: &Settings) -> Result<Vec<Row>> {
    let mut report = Report::new(comm, settings);
    let mut arena = Arena::new(comm, settings)?;
    let total: usize = settings
        .operations
        .iter()
        .map(|kind| settings.sizes(*kind).len())
        .sum();
    let progress = progress(comm.rank() == 0, total as u64);
    'measured: for &kind in &settings.operations {
        for bytes in settings.sizes(kind) {
            progress.set_message(format!("{} {bytes} B", kind.name()));
            let count = kind.count(bytes, settings.dtype, comm.size());
            let row = measure(comm, settings, &mut arena, kind, count)?;
            progress.suspend(|| report.row(row));
            progress.inc(1);
            // All ranks must make the same calls, so they all stop at the same row.
            let mut unread = [u64::from(report.is_unread())];
            comm.all_reduce(unread.as_mut_slice(), ReduceOp::Max)?;
            if unread[0] != 0 {
                break 'measured;
            }
        }
    }
    progress.finish_and_clear();
    Ok(report.into_rows())
}

fn progress(shown: bool, total: u64) -> ProgressBar {
    if !shown || !std::io::stderr().is_terminal() || total < 2 {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

/// Measures one operation at one size.
fn measure(
    comm: &Communicator,
    settings: &Settings,
    arena: &mut Arena,
    kind: Kind,
    count: usize,
) -> Result<Row> {
    let buffers = Buffers::new(comm, settings, arena, kind, count)?;
    let op = factor(settings.op, comm.rank());
    let enqueue = || call(comm, kind, op, &buffers, true);
    let exec = settings
        .graph
        .then(|| capture(comm, 1, &enqueue))
        .transpose()?;
    let once = || match &exec {
        Some(exec) => exec.run(comm.stream()),
        None => call(comm, kind, op, &buffers, false),
    };

    let mut wrong = 0;
    if settings.check {
        wrong += verified(comm, settings, arena, (kind, count), &buffers, &once)?;
    }
    let timing = Timing::of(comm);
    let mut samples = match timing {
        Timing::HostClock => by_host_clock(comm, settings, &once)?,
        Timing::GpuEvents => by_gpu_events(comm, settings, &enqueue)?,
    };
    if settings.check {
        wrong += verified(comm, settings, arena, (kind, count), &buffers, &once)?;
    }
    let mut all = [wrong];
    comm.all_reduce(all.as_mut_slice(), ReduceOp::Sum)?;
    let algorithm = algorithm(comm, kind, settings.op, &buffers)?;
    samples.times.sort_by(f64::total_cmp);
    let row = Row::new(
        settings,
        kind,
        comm,
        count,
        algorithm,
        buffers.in_place,
        &samples,
        wrong.max(all[0]),
    );
    drop(exec);
    buffers.free()?;
    Ok(row)
}

/// Runs one call with new inputs and poisoned outputs. Compares every element, the guards around
/// the output and, unless in place, the input. Returns the number of wrong elements.
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
    let (ranks, rank) = (comm.size(), comm.rank());
    let number = arena.next_call();
    let case = Case::new(
        (kind, settings.op),
        settings.dtype,
        (ranks, rank),
        count,
        number,
    );
    // After this barrier, no peer accesses this rank's memory any more.
    comm.barrier()?;
    buffers.prepare(&case)?;
    comm.barrier()?;
    once()?;
    if settings.corrupt == Some(rank) {
        buffers.flip()?;
    }
    let bytes = kind.bytes(count, settings.dtype, ranks);
    let mut wrong = 0;
    let exact = comm
        .backend_impl()
        .is_none_or(|backend| backend.is_bitwise());
    for (output, difference) in buffers.differences(&case, exact || !kind.reduces())? {
        complain(format_args!(
            "rank {rank}: {} of {bytes} bytes, {output}: {difference}",
            kind.name()
        ));
        wrong += difference.wrong as u64;
    }
    let touched = buffers.touched(&case)?;
    if touched > 0 {
        complain(format_args!(
            "rank {rank}: {} of {bytes} bytes, {}: {touched} bytes changed that are no output",
            kind.name(),
            settings.dtype.name()
        ));
        wrong += touched;
    }
    Ok(wrong)
}
