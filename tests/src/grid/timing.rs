//! Checks that barriers block the host until all ranks have entered, and that the timeout of one
//! call does not affect another call.

use core::time::Duration;
use std::thread::sleep;

use fusewire::{ReduceOp, Result};

use super::Grid;

const GROUP: &str = "barrier, timeouts";

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    barrier(grid)?;
    late(grid)?;
    if !grid.is_short() && grid.comm.size() <= 4 {
        short(grid)?;
    }
    Ok(())
}

/// Checks that no rank leaves a barrier before all ranks have entered it.
fn barrier(grid: &mut Grid) -> Result<()> {
    grid.doing = "a barrier holds the host".to_owned();
    let (comm, rank) = (grid.comm.clone(), grid.comm.rank());
    let size = i64::from(comm.size());
    for round in 0..4u32 {
        grid.calls += 1;
        let key = format!("grid/{}/{}", comm.name(), grid.calls);
        // A different rank is late in each round.
        if rank == round % comm.size() {
            sleep(Duration::from_millis(5));
        }
        comm.store().add(&key, 1)?;
        if round % 2 == 0 {
            comm.barrier()?;
        } else {
            comm.barrier_async()?.wait_blocking()?;
        }
        let came = comm.store().add(&key, 0)?;
        grid.check(
            GROUP,
            came == size,
            &format!("a rank left when {came} of {size} had entered"),
        );
        comm.barrier()?;
    }
    Ok(())
}

/// Checks that a rank that is late by less than the timeout causes no error in blocking calls,
/// enqueued calls and replays.
fn late(grid: &mut Grid) -> Result<()> {
    grid.doing = "a late rank within the timeout".to_owned();
    let comm = grid.comm.with_timeout(Duration::from_secs(30));
    let (rank, size) = (comm.rank(), comm.size());
    let sum = (size * (size + 1) / 2) as f32;
    let tensor = grid.tensor(fusewire::DType::F32, &[0; 4])?;
    let stream = comm.stream();
    stream.begin_capture()?;
    let captured = comm.all_reduce_async(&tensor, ReduceOp::Sum);
    let graph = stream.end_capture()?.instantiate()?;
    captured?;
    for way in 0..3 {
        tensor.copy_from(&[(rank + 1) as f32])?;
        if rank == way % size {
            sleep(Duration::from_millis(40));
        }
        match way {
            0 => comm.all_reduce(&tensor, ReduceOp::Sum)?,
            1 => comm
                .all_reduce_async(&tensor, ReduceOp::Sum)?
                .wait_blocking()?,
            _ => graph.run(stream)?,
        }
        grid.check(
            GROUP,
            tensor.to_vec::<f32>()? == [sum],
            "a sum with a late rank is wrong",
        );
    }
    Ok(())
}

/// Checks that the short timeout of a call does not apply to the next call.
fn short(grid: &mut Grid) -> Result<()> {
    grid.doing = "a short timeout does not outlive its call".to_owned();
    let comm = grid.comm.clone();
    let bound = Duration::from_millis(900);
    let mut x = [1f32];
    comm.barrier()?;
    comm.with_timeout(bound)
        .all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
    if comm.rank() == 0 {
        sleep(bound + Duration::from_millis(200));
    }
    comm.all_reduce(x.as_mut_slice(), ReduceOp::Max)?;
    grid.check(
        GROUP,
        x == [comm.size() as f32],
        "a sum with timeouts is wrong",
    );
    Ok(())
}
