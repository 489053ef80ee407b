//! Drops and finalizes communicators. Runs last, because it finalizes the grid's communicator.

use crate::device::tensor;
use fusewire::{DType, EndReason, Error, ReduceOp, Result};

use super::{Grid, warnings};

const GROUP: &str = "lifecycle";

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    dropped(grid)?;
    let rest = finalized(grid)?;
    grid.check(GROUP, rest, "finalize() aborted the communicator");
    Ok(())
}

/// Checks that dropping a communicator without `finalize` prints a warning and has no other effect.
fn dropped(grid: &mut Grid) -> Result<()> {
    grid.doing = "dropped without finalize".to_owned();
    let dup = grid.comm.dup()?;
    let mut x = [dup.rank() as i32];
    dup.all_reduce(x.as_mut_slice(), ReduceOp::Max)?;
    grid.check(
        GROUP,
        x == [grid.comm.size() as i32 - 1],
        "the other communicator's sum is wrong",
    );
    // No rank drops `dup` while a peer may still access the memory that `dup` owns on that rank.
    grid.comm.barrier()?;
    let ((), warned) = warnings::of(|| drop(dup));
    let is_warned = warned
        .iter()
        .any(|line| line.contains("without finalize()"));
    grid.check(
        GROUP,
        is_warned,
        &format!("no warning about finalize(): {warned:?}"),
    );
    grid.comm.barrier()?;
    let dup = grid.comm.dup()?;
    dup.barrier()?;
    dup.finalize()?;
    let ((), warned) = warnings::of(|| drop(dup));
    grid.check(
        GROUP,
        warned.is_empty(),
        &format!("a warning after finalize(): {warned:?}"),
    );
    Ok(())
}

/// Checks that `finalize` waits for running work, that later calls fail, and that a second
/// `finalize` does nothing.
fn finalized(grid: &mut Grid) -> Result<bool> {
    grid.doing = "finalize".to_owned();
    let comm = grid.comm.clone();
    comm.barrier()?;
    let tensor = tensor(DType::F32, 1024)?;
    tensor.copy_from(&[1f32; 1024])?;
    let work = comm.all_reduce_async(&tensor, ReduceOp::Sum)?;
    comm.finalize()?;
    grid.check(GROUP, work.is_completed(), "finalize does not wait");
    let sum = comm.size() as f32;
    grid.check(
        GROUP,
        tensor.to_vec::<f32>()? == [sum; 1024],
        "the last sum is wrong",
    );
    comm.finalize()?;
    let mut x = [1f32];
    let answers = [
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum),
        comm.all_reduce_async(&tensor, ReduceOp::Sum).map(drop),
        comm.barrier(),
        comm.split(&[comm.rank()], "late").map(drop),
        comm.all_gather_object(&1u8).map(drop),
    ];
    let is_refused = |answer: &Result<()>| {
        let reason = answer.as_ref().err().and_then(Error::end_reason);
        reason == Some(EndReason::Finalized)
    };
    for (at, answer) in answers.iter().enumerate() {
        grid.check(
            GROUP,
            is_refused(answer),
            &format!("call {at} after finalize returned {answer:?}"),
        );
    }
    Ok(!comm.is_aborted())
}
