//! Windows: puts in a ring, with signals.

use fusewire::{Compare, DType, Result, SignalUpdate, Window, WindowOptions};

use super::collectives::MILLION;
use super::modes::{read, write};
use super::{Breadth, Grid};

const GROUP: &str = "window ring put";

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    for dtype in [DType::F32, DType::I32, DType::I8] {
        for count in [4, 1024, MILLION] {
            let light = grid.comm.size() <= 4 && dtype == DType::I8;
            if count == MILLION && grid.breadth != Breadth::Full && !light {
                continue;
            }
            if !grid.comm.supports_window() {
                for _ in 0..4 {
                    grid.tally.unsupported(GROUP);
                }
                continue;
            }
            let window = grid
                .comm
                .alloc_window(dtype, count, WindowOptions::default())?;
            let mut round = 0;
            for async_put in [false, true] {
                for async_signal in [false, true] {
                    round += 1;
                    put(grid, &window, async_put, async_signal, round)?;
                }
            }
            window.free()?;
        }
    }
    Ok(())
}

/// Puts data to the next rank with a signal, waits for the signal of the previous rank, and checks
/// the data that the previous rank has put.
fn put(
    grid: &mut Grid,
    window: &Window,
    async_put: bool,
    async_signal: bool,
    round: u64,
) -> Result<()> {
    let (dtype, count) = (window.tensor().dtype(), window.tensor().len());
    grid.doing = format!(
        "put of {count} {}, async put {async_put}, async signal {async_signal}",
        dtype.name()
    );
    grid.calls += 1;
    let call = grid.calls;
    let (next, before) = grid.adjacent_ranks();
    write(window.tensor(), &vec![0x5a; count * dtype.size()]);
    let source = grid.tensor(dtype, &grid.contents(dtype, grid.comm.rank(), call, count))?;
    grid.comm.barrier()?; // The poison is written before any rank puts.
    if async_put {
        drop(window.put_async(&source, next, 0)?);
    } else {
        window.put(&source, next, 0)?;
    }
    if async_signal {
        window.signal_async(next, 0, SignalUpdate::Add(1))?;
        window
            .wait_signal_async(0, Some(before), Compare::GreaterEqual, round)?
            .wait_blocking()?;
    } else {
        window.signal(next, 0, SignalUpdate::Add(1))?;
        window.wait_signal(0, Some(before), Compare::GreaterEqual, round)?;
    }
    let right = read(window.tensor()) == grid.contents(dtype, before, call, count);
    grid.check(GROUP, right, "the data of the put is wrong");
    grid.comm.barrier()
}
