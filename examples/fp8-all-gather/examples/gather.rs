//! An all_gather that quantizes on the way: gathers bf16 rows as fp8, compares the bits with a
//! reference, and replays a graph of the kernel. The ranks are four threads, or the processes of a
//! launcher:
//!
//! ```text
//! cargo run --release --example gather
//! cargo ranks -n 4 -- target/release/examples/gather
//! ```
//!
//! The first argument names the device; `cuda` needs the images of `cargo gpu build`.

#[path = "../host/gather.rs"]
mod gather;

use std::time::Instant;

use fusewire::bootstrap::RankSize;
use fusewire::{Bf16, Communicator, Device, Options, Result, run_threads_on};

use crate::gather::{Fp8Gather, Gathered, expected, random_rows};

/// Rows of a rank.
const ROWS: usize = 64;
const WIDTH: usize = 1024;
const REPLAYS: u32 = 1000;

fn main() -> Result<()> {
    let device = std::env::args().nth(1).unwrap_or("cpu".to_owned());
    let (device, options): (Device, _) = (device.parse()?, Options::default());
    if RankSize::from_env_if_set()?.is_some() {
        return gather_rows(&Communicator::from_env(device, options)?);
    }
    let ranks = run_threads_on(device, "fusewire", 4, &options, |comm| gather_rows(&comm));
    ranks.into_iter().collect()
}

/// Gathers the rows on a rank. Rank 0 prints the results of all ranks.
fn gather_rows(comm: &Communicator) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let input = |rank: u32| random_rows(ROWS, WIDTH, u64::from(rank));
    // The reference needs the inputs of all ranks.
    let inputs: Vec<Vec<Bf16>> = comm.ranks().map(input).collect();
    let expected = expected(&inputs, WIDTH);

    let gather = Fp8Gather::new(comm, ROWS, WIDTH)?;
    let gathered = gather.run(&inputs[rank as usize])?;
    let graph = gather.capture()?;
    let start = Instant::now();
    for _ in 0..REPLAYS {
        graph.run(comm.stream())?;
    }
    let replay = start.elapsed() / REPLAYS;
    let is_right = gathered == expected && gather.read()? == expected;
    drop(graph);
    gather.free()?;

    let error = greatest_error(&inputs, &gathered);
    let all: Vec<(bool, f32)> = comm.all_gather_object(&(is_right, error))?;
    for (rank, (is_right, _)) in all.iter().enumerate() {
        assert!(
            *is_right,
            "results of rank {rank} differ from the reference"
        );
    }
    if rank != 0 {
        return Ok(());
    }
    println!("{ranks} ranks, each with {ROWS} rows of {WIDTH} bf16");
    let rows = (ranks as usize - 1) * ROWS;
    let scale = size_of::<f32>();
    println!(
        "each rank sends {} bytes of fp8 and {} bytes of scales instead of {} bytes of bf16",
        rows * WIDTH,
        rows * scale,
        rows * WIDTH * size_of::<Bf16>()
    );
    for (rank, (_, error)) in all.iter().enumerate() {
        println!("rank {rank}: errors of up to {error:.4} of the greatest element of the row");
    }
    println!("results equal to the reference on all ranks");
    let micros = replay.as_secs_f64() * 1e6;
    println!("{micros:.1} us per replay, mean of {REPLAYS}");
    Ok(())
}

/// Returns the greatest difference between an element and the number that is stored for it,
/// relative to the greatest magnitude of the row.
fn greatest_error(inputs: &[Vec<Bf16>], gathered: &Gathered) -> f32 {
    let rows = inputs.iter().flat_map(|input| input.as_chunks::<WIDTH>().0);
    let quantized = gathered
        .rows
        .as_chunks::<WIDTH>()
        .0
        .iter()
        .zip(&gathered.scales);
    let mut greatest: f32 = 0.0;
    for (row, (numbers, scale)) in rows.zip(quantized) {
        let scale = f32::from_bits(*scale);
        for (element, number) in row.iter().zip(numbers) {
            let error = (element.to_f32() - number.to_f32() * scale).abs();
            greatest = greatest.max(error / (scale * 448.0));
        }
    }
    greatest
}
