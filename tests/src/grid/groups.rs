//! Communicators created by `split`.

use fusewire::{Communicator, DType, Operation, ReduceOp, Result};

use super::{Grid, Mode};
use crate::cases::Case;

const GROUP: &str = "split";

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    let size = grid.comm.size();
    let all: Vec<u32> = (0..size).collect();
    let half = size.div_ceil(2);
    let halves = [all[..half as usize].to_vec(), all[half as usize..].to_vec()];
    part_each(grid, "contiguous", &halves)?;
    let of = |rest: u32| {
        all.iter()
            .copied()
            .filter(|rank| rank % 2 == rest)
            .collect()
    };
    part_each(grid, "non-contiguous", &[of(0), of(1)])?;
    part_each(grid, "reversed", &[all.iter().rev().copied().collect()])?;
    // Overlapping groups need a separate call for each group. Ranks outside a group pass an empty
    // list.
    part_each(
        grid,
        "overlapping, first",
        &[all[..=(half as usize).min(all.len() - 1)].to_vec()],
    )?;
    part_each(
        grid,
        "overlapping, second",
        &[all[half as usize - 1..].to_vec()],
    )?;
    nested(grid, &halves)?;
    refused(grid)
}

/// Splits the communicator by `lists`, which must be disjoint, and runs operations on the new
/// communicator.
fn part_each(grid: &mut Grid, name: &str, lists: &[Vec<u32>]) -> Result<Option<Communicator>> {
    grid.doing = format!("split, {name}");
    let rank = grid.comm.rank();
    let none = Vec::new();
    let list = lists
        .iter()
        .find(|list| list.contains(&rank))
        .unwrap_or(&none);
    let part = grid.comm.split(list, name)?;
    let Some(part) = part else {
        grid.check(GROUP, list.is_empty(), "no communicator of the part");
        return Ok(None);
    };
    let index = list.iter().position(|listed| *listed == rank);
    let right = part.size() as usize == list.len()
        && index == Some(part.rank() as usize)
        && part.ranks().count() == list.len()
        && part.backend() == grid.comm.backend();
    grid.check(GROUP, right, "ranks of the part are wrong");
    work_in(grid, part.clone())?;
    Ok(Some(part))
}

/// Runs a few operations on `comm`.
pub(super) fn work_in(grid: &mut Grid, comm: Communicator) -> Result<()> {
    let mut inner = grid.over(comm);
    let done = few(&mut inner);
    let doing = inner.doing.clone();
    grid.take(inner, GROUP);
    if done.is_err() {
        grid.doing = format!("{}, {doing}", grid.doing);
    }
    done
}

fn few(grid: &mut Grid) -> Result<()> {
    for operation in [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::AllToAll,
        Operation::Send,
        Operation::Barrier,
    ] {
        let reduction = operation.reduces().then_some(ReduceOp::Sum);
        let case = Case {
            count: 100,
            ..Case::new(operation, DType::I32, reduction)
        };
        for mode in [Mode::Sync, Mode::Async, Mode::Graph] {
            grid.run(GROUP, &case, mode)?;
        }
    }
    Ok(())
}

/// Splits a communicator that `split` has created, uses the new communicator, and then uses its
/// parent again.
fn nested(grid: &mut Grid, halves: &[Vec<u32>]) -> Result<()> {
    let Some(half) = part_each(grid, "outer", halves)? else {
        return Ok(());
    };
    let mut inner = grid.over(half.clone());
    let all: Vec<u32> = half.ranks().collect();
    let middle = all.len().div_ceil(2);
    let quarters = [all[..middle].to_vec(), all[middle..].to_vec()];
    let done = part_each(&mut inner, "inner", &quarters);
    grid.doing = inner.doing.clone();
    grid.take(inner, GROUP);
    if let Some(quarter) = done? {
        quarter.finalize()?;
    }
    work_in(grid, half)
}

/// Checks that `split` with an invalid list of ranks returns an error on every rank, and that the
/// communicator remains usable.
fn refused(grid: &mut Grid) -> Result<()> {
    grid.doing = "split, refused".to_owned();
    let (rank, size) = (grid.comm.rank(), grid.comm.size());
    for (list, name) in [
        (vec![rank, rank], "a rank named twice"),
        (vec![rank, size], "a rank out of range"),
        (vec![(rank + 1) % size], "a list without its own rank"),
    ] {
        if list == [rank] {
            continue; // With a single rank, the next rank is the rank itself, so the list is valid.
        }
        let answer = grid.comm.split(&list, "refused");
        grid.check(GROUP, answer.is_err(), &format!("{name} was accepted"));
    }
    let nothing = grid.comm.split(&[], "none")?;
    grid.check(
        GROUP,
        nothing.is_none(),
        "an empty list gives a communicator",
    );
    let case = Case {
        count: 8,
        ..Case::new(Operation::AllReduce, DType::F32, Some(ReduceOp::Max))
    };
    grid.run(GROUP, &case, Mode::Sync)
}
