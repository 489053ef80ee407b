//! Descriptions of what the threads of a block wait for.

use crate::launch::{Block, Grid};
use crate::row::{LANES, lanes};
use crate::warp::Wait;

/// Describes what the threads of a block wait for: one line for each group of threads of a warp at
/// the same instruction.
pub(crate) fn waits(grid: &Grid, block: &Block) -> Vec<String> {
    let mut lines = Vec::new();
    for (number, warp) in block.warps.iter().enumerate() {
        let mut rest = warp.live;
        while rest != 0 {
            let first = rest.trailing_zeros() as usize;
            let same = lanes(rest)
                .filter(|lane| {
                    warp.pcs[*lane] == warp.pcs[first]
                        && kind(warp.waits[*lane]) == kind(warp.waits[first])
                })
                .fold(0u32, |mask, lane| mask | 1 << lane);
            rest &= !same;
            let inst = &grid.program.code[warp.pcs[first] as usize];
            let event = match warp.waits[first] {
                Wait::Barrier(id, _) => {
                    let barrier = &block.shared.barriers[usize::from(id)];
                    let expected = match barrier.expected {
                        0 => block.shared.threads,
                        expected => expected,
                    };
                    format!(
                        "barrier {id}, {} of {expected} threads have arrived",
                        barrier.arrived
                    )
                }
                Wait::Mask(mask) => format!("the other lanes of the mask {mask:#010x}"),
                Wait::Sleep(_) | Wait::No => match warp.polls[first] {
                    Some(poll) => {
                        let mut view = grid.view.clone_ranges();
                        let owner = match view.find(poll.address).map(|range| range.owner) {
                            Some(Some(device)) => format!("memory of device {device}"),
                            _ => "host memory".to_owned(),
                        };
                        format!(
                            "a change of the {} bytes at {:#x} in {owner}, whose value is {:#x}",
                            poll.size, poll.address, poll.value
                        )
                    }
                    None => "no event: they are executing instructions".to_owned(),
                },
            };
            let source = grid
                .program
                .source(inst)
                .map_or(String::new(), |it| format!(" ({it})"));
            lines.push(format!(
                "kernel {}, device {}, block {}, {}, PTX line {} `{}`{source}: {} for {event}",
                grid.program.name,
                grid.device,
                block.shared.number,
                threads(number * LANES, same),
                inst.line,
                grid.program.line_text(inst.line),
                if same.count_ones() == 1 {
                    "waits"
                } else {
                    "wait"
                },
            ));
        }
    }
    lines
}

/// Returns a number that is equal for waits of the same kind.
fn kind(wait: Wait) -> u64 {
    match wait {
        Wait::No | Wait::Sleep(_) => 0,
        Wait::Barrier(id, _) => 1 + u64::from(id),
        Wait::Mask(mask) => 1 << 32 | u64::from(mask),
    }
}

/// Describes the threads of the lanes `mask` of a warp: ranges of numbers in the block.
fn threads(first: usize, mask: u32) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for lane in lanes(mask) {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == lane => *last = lane,
            _ => ranges.push((lane, lane)),
        }
    }
    let texts = ranges
        .into_iter()
        .map(|(start, end)| match (start + first, end + first) {
            (start, end) if start == end => format!("{start}"),
            (start, end) => format!("{start} to {end}"),
        });
    let texts = texts.collect::<Vec<_>>().join(", ");
    if mask.count_ones() == 1 {
        format!("thread {texts}")
    } else {
        format!("threads {texts}")
    }
}
