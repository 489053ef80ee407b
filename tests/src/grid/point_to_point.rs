//! Batches of sends and receives around a ring.

use crate::device::tensor;
use fusewire::{DType, Result};

use super::modes::read;
use super::{Breadth, Grid};
use crate::grid::collectives::MILLION;

const GROUP: &str = "batch ring";

/// Form in which a batch is issued.
#[derive(Clone, Copy, Debug, PartialEq)]
enum IssueMode {
    Sync,
    Async,
    Dropped,
    Graph,
}

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    for dtype in [DType::F32, DType::I32, DType::I8] {
        for count in [0, 4, 1024, MILLION] {
            let few = grid.comm.size() == 2 && dtype == DType::F32;
            if count == MILLION && grid.breadth != Breadth::Full && !few {
                continue;
            }
            for mode in [
                IssueMode::Sync,
                IssueMode::Async,
                IssueMode::Dropped,
                IssueMode::Graph,
            ] {
                if grid.is_short() && mode != IssueMode::Sync {
                    continue;
                }
                ring(grid, dtype, count, mode)?;
            }
        }
    }
    both_ways(grid)
}

/// Sends to the next rank and receives from the previous one.
fn ring(grid: &mut Grid, dtype: DType, count: usize, mode: IssueMode) -> Result<()> {
    grid.doing = format!("batch ring of {count} {}, {mode:?}", dtype.name());
    grid.calls += 1;
    let (next, before) = grid.adjacent_ranks();
    let call = grid.calls;
    let mine = grid.contents(dtype, grid.comm.rank(), call, count);
    let (source, target) = (grid.tensor(dtype, &mine)?, tensor(dtype, count)?);
    let mut batch = grid.comm.batch_op_create();
    batch.send(&source, next)?;
    batch.recv(&target, before)?;
    let listed = batch.ops().len();
    match mode {
        IssueMode::Sync => batch.issue()?,
        IssueMode::Async => batch.issue_async()?.wait_blocking()?,
        IssueMode::Dropped => {
            drop(batch.issue_async()?);
            drop(source);
            grid.comm.synchronize()?;
        }
        IssueMode::Graph => {
            let stream = grid.comm.stream();
            stream.begin_capture()?;
            let issued = batch.issue_async();
            let graph = stream.end_capture()?.instantiate()?;
            issued?;
            for _ in 0..4 {
                graph.run(stream)?;
            }
        }
    }
    let right = read(&target) == grid.contents(dtype, before, call, count);
    grid.check(
        GROUP,
        right && listed == 2 && batch.ops().is_empty(),
        "the received bytes are wrong",
    );
    Ok(())
}

/// Exchanges data with both adjacent ranks in one batch, with the receives first.
fn both_ways(grid: &mut Grid) -> Result<()> {
    grid.doing = "batch with both adjacent ranks".to_owned();
    grid.calls += 1;
    let ((next, before), call) = (grid.adjacent_ranks(), grid.calls);
    let (dtype, count) = (DType::I32, 1024);
    // With two ranks, both adjacent ranks are the same peer, so sends and receives must match in
    // order.
    let a = grid.tensor(dtype, &grid.contents(dtype, grid.comm.rank(), call, count))?;
    let b = grid.tensor(
        dtype,
        &grid.contents(dtype, grid.comm.rank(), call + 1000, count),
    )?;
    let (from_before, from_next) = (tensor(dtype, count)?, tensor(dtype, count)?);
    let mut batch = grid.comm.batch_op_create();
    batch.recv(&from_before, before)?;
    batch.recv(&from_next, next)?;
    batch.send(&a, next)?;
    batch.send(&b, before)?;
    batch.issue()?;
    let right = read(&from_before) == grid.contents(dtype, before, call, count)
        && read(&from_next) == grid.contents(dtype, next, call + 1000, count);
    grid.check(
        GROUP,
        right,
        "an exchange with both adjacent ranks is wrong",
    );
    Ok(())
}
