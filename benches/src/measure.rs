//! Measurement loop, which is the same for every library (`c/mpi_allreduce.c` has a copy for MPI):
//! barrier, read the clock, call, read the clock. The reported times are those of rank 0. Results
//! are verified before and after the timed calls.

use core::fmt;
use core::hint::black_box;
use core::str::FromStr;
use std::time::Instant;

use anyhow::{Context, Result};

/// Sizes in bytes, each with the number of timed calls.
#[derive(Clone, Debug)]
pub(crate) struct Schedule(pub(crate) Vec<(usize, usize)>);

impl Schedule {
    /// Chooses fewer calls for larger sizes, so that every size takes about ten milliseconds.
    pub(crate) fn new(sizes: &[usize]) -> Self {
        let calls = |bytes: usize| match bytes {
            0..=4_096 => 3000,
            4_097..=65_536 => 1000,
            65_537..=1_048_576 => 200,
            1_048_577..=8_388_608 => 40,
            _ => 8,
        };
        Self(sizes.iter().map(|&bytes| (bytes, calls(bytes))).collect())
    }

    pub(crate) fn longest(&self) -> usize {
        self.0.iter().map(|size| size.0).max().unwrap_or(0)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (bytes, calls)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{bytes}:{calls}")?;
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let entry = |part: &str| -> Result<(usize, usize)> {
            let (bytes, calls) = part.split_once(':').context("BYTES:CALLS is needed")?;
            Ok((bytes.parse()?, calls.parse()?))
        };
        text.split(',').map(entry).collect::<Result<_>>().map(Self)
    }
}

/// One rank of a library that can all_reduce.
pub(crate) trait Peer {
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    /// Prepares buffers of `count` elements. All ranks call this together.
    fn prepare(&mut self, count: usize) -> Result<()>;
    fn input(&mut self) -> &mut [f32];
    fn output(&mut self) -> &mut [f32];
    fn barrier(&mut self) -> Result<()>;
    /// Sums all ranks' inputs into all ranks' outputs.
    fn all_reduce(&mut self) -> Result<()>;
    /// Returns the sum of every rank's `value`.
    fn total(&mut self, value: u64) -> Result<u64>;
}

/// Fills `input` with small integers, whose sums are exact in any order.
fn fill(rank: usize, input: &mut [f32]) {
    for (i, element) in input.iter_mut().enumerate() {
        *element = ((rank + 1) * (i % 13 + 1)) as f32;
    }
}

fn wrong_elements(ranks: usize, output: &[f32]) -> u64 {
    let factor = (ranks * (ranks + 1) / 2) as f32;
    let wrong = |(i, element): &(usize, &f32)| **element != factor * (i % 13 + 1) as f32;
    output.iter().enumerate().filter(wrong).count() as u64
}

/// Runs the schedule. Rank 0 prints a line `bytes median_ns min_ns wrong` for each size. With
/// `touch`, every rank rewrites its input and reads its output between calls.
pub(crate) fn run<P: Peer>(peer: &mut P, schedule: &Schedule, touch: bool) -> Result<()> {
    let (rank, ranks) = (peer.rank(), peer.ranks());
    for &(bytes, calls) in &schedule.0 {
        peer.prepare(bytes / 4)?;
        fill(rank, peer.input());
        peer.output().fill(f32::NAN);
        peer.all_reduce()?;
        let mut wrong = wrong_elements(ranks, peer.output());
        let warm = calls / 10 + 2;
        let mut times = vec![0u64; calls];
        for call in 0..warm + calls {
            if touch {
                fill(rank, peer.input());
                black_box(peer.output().iter().step_by(16).sum::<f32>());
            }
            peer.barrier()?;
            let start = Instant::now();
            peer.all_reduce()?;
            let end = Instant::now();
            if call >= warm {
                times[call - warm] = (end - start).as_nanos() as u64;
            }
        }
        wrong += wrong_elements(ranks, peer.output());
        let total = peer.total(wrong)?;
        times.sort_unstable();
        if rank == 0 {
            println!("{bytes} {} {} {total}", times[calls / 2], times[0]);
        }
    }
    Ok(())
}
