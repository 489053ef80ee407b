//! The barrier of all blocks of a launch.

use core::time::Duration;

use fusewire::{Communicator, DType, Result};
use fusewire_device::{Aborted, Group, InOut, Machine, Out, Session, kernel};

use super::{all, failing, options, zeros};

/// In each step, every block writes a number of its own and adds up those of all blocks after the
/// barrier. A cell is written again two steps later, when a barrier has ended after it was read.
#[kernel(grid)]
fn add_up(
    s: &mut Session<impl Machine>,
    cells: InOut<u64>,
    sums: Out<u64>,
    steps: u64,
) -> Result<(), Aborted> {
    let block = s.block();
    let (index, blocks) = (block.index() as usize, block.count() as usize);
    for step in 0..steps {
        let cells = cells.slice((step % 2) as usize * blocks, blocks);
        // A rank that depends on another one, in a block of its own.
        if index == 1 {
            s.barrier()?;
        }
        if block.rank() == block.size() - 1 {
            cells.set(index, number(step, index));
        }
        s.grid_barrier()?;
        if block.is_leader() {
            let sum = (0..blocks).map(|other| cells.get(other)).sum();
            sums.set(step as usize * blocks + index, sum);
        }
    }
    Ok(())
}

fn number(step: u64, block: usize) -> u64 {
    (step + 1) * 1000 + (block as u64) * (block as u64)
}

const STEPS: u64 = 5;

#[test]
fn every_block_sees_what_all_blocks_wrote_before_the_barrier() {
    for shape in [(1, 1, 1), (2, 4, 1), (2, 7, 1), (2, 3, 32), (1, 4, 64)] {
        all(shape, |comm| {
            // Launches of other numbers of blocks come between.
            for blocks in [shape.1, 1, shape.1, shape.1.div_ceil(2), shape.1] {
                let count = blocks as usize;
                let cells = zeros(DType::U64, 2 * count)?;
                let sums = zeros(DType::U64, STEPS as usize * count)?;
                let arguments = AddUp {
                    cells: (&cells).into(),
                    sums: (&sums).into(),
                    steps: STEPS,
                };
                comm.stream().begin_capture()?;
                comm.kernel(arguments).blocks(blocks).enqueue()?;
                let graph = comm.stream().end_capture()?.instantiate()?;
                for launch in 0..4 {
                    if launch % 2 == 0 {
                        comm.kernel(arguments).blocks(blocks).launch()?;
                    } else {
                        graph.run(comm.stream())?;
                        comm.stream().synchronize()?;
                    }
                    let sum = |step| (0..count).map(|block| number(step, block)).sum::<u64>();
                    let expected: Vec<u64> =
                        (0..STEPS).flat_map(|step| vec![sum(step); count]).collect();
                    assert_eq!(sums.to_vec::<u64>()?, expected, "{blocks} blocks");
                }
            }
            Ok(())
        });
    }
}

/// Block `missing` does not enter the barrier.
#[kernel(grid)]
fn lacks_one(s: &mut Session<impl Machine>, missing: u32) -> Result<(), Aborted> {
    if s.block().index() == missing {
        return Ok(());
    }
    s.grid_barrier()
}

#[kernel]
fn unmarked(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    s.grid_barrier()
}

#[test]
fn mistakes_with_the_barrier_are_named() {
    for lanes in [1, 32] {
        let fails = |text: &str, run: &(dyn Fn(&Communicator) -> Result<()> + Sync)| {
            for message in failing(&options(3, lanes), run) {
                assert!(message.contains(text), "{message:?} lacks {text:?}");
            }
        };
        for missing in [0, 2] {
            let text = format!("waiting for block {missing} of this launch in grid_barrier");
            fails(&text, &|comm| {
                let launch = comm.kernel(LacksOne { missing });
                let result = launch.timeout(Duration::from_millis(300)).launch();
                result.and_then(|()| comm.barrier())
            });
        }
        fails("in kernel unmarked #1: grid_barrier in a kernel", &|comm| {
            comm.kernel(Unmarked {}).launch()
        });
    }
}
