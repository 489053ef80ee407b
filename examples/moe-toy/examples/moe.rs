//! A mixture of experts on several ranks: computes a layer, compares it with a reference, and
//! replays a graph of its three kernels. The ranks are four threads, or the processes of a
//! launcher:
//!
//! ```text
//! cargo run --release --example moe
//! cargo ranks -n 4 -- target/release/examples/moe
//! ```
//!
//! The first argument names the device; `cuda` needs the images of `cargo gpu build`.

#[path = "../host/moe.rs"]
mod moe;

use std::time::Instant;

use fusewire::bootstrap::RankSize;
use fusewire::{Communicator, Device, Options, Result, run_threads_on};

use crate::moe::{Input, Moe, Shape, expected, random};

const SHAPE: Shape = Shape {
    tokens: 64,
    hidden: 128,
    k: 2,
    per_rank: 4,
};
const REPLAYS: u32 = 1000;

fn main() -> Result<()> {
    let device = std::env::args().nth(1).unwrap_or("cpu".to_owned());
    let (device, options): (Device, _) = (device.parse()?, Options::default());
    if RankSize::from_env_if_set()?.is_some() {
        return layer(&Communicator::from_env(device, options)?);
    }
    let ranks = run_threads_on(device, "fusewire", 4, &options, |comm| layer(&comm));
    ranks.into_iter().collect()
}

/// Runs the layer on a rank. Rank 0 prints the results of all ranks.
fn layer(comm: &Communicator) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.size());
    // The reference for the sums of the experts needs the inputs of all ranks.
    let input = |rank: u32| {
        let seed = u64::from(rank);
        let id = |item| random(seed, item) % (ranks * SHAPE.per_rank);
        Input::new(SHAPE, SHAPE.tokens, seed, id)
    };
    let inputs: Vec<Input> = comm.ranks().map(input).collect();
    let expected = expected(SHAPE, &inputs, rank);

    let moe = Moe::new(comm, SHAPE)?;
    let output = moe.run(&inputs[rank as usize])?;
    let graph = moe.capture(SHAPE.tokens)?;
    let start = Instant::now();
    for _ in 0..REPLAYS {
        graph.run(comm.stream())?;
    }
    let replay = start.elapsed() / REPLAYS;
    let is_right = output == expected && moe.read(SHAPE.tokens)? == expected;
    drop(graph);
    moe.free()?;

    let all: Vec<(Vec<u32>, bool)> = comm.all_gather_object(&(output.rows, is_right))?;
    for (rank, (_, is_right)) in all.iter().enumerate() {
        assert!(
            *is_right,
            "results of rank {rank} differ from the reference"
        );
    }
    if rank != 0 {
        return Ok(());
    }
    println!(
        "{ranks} ranks, each with {} tokens of {} elements and {} experts; {} experts for a token",
        SHAPE.tokens, SHAPE.hidden, SHAPE.per_rank, SHAPE.k
    );
    for (rank, (rows, _)) in all.iter().enumerate() {
        let total: u32 = rows.iter().sum();
        println!("rank {rank} received {total} rows; from each rank: {rows:?}");
    }
    println!("results equal to the reference on all ranks");
    let micros = replay.as_secs_f64() * 1e6;
    println!("{micros:.1} us per replay of the three kernels, mean of {REPLAYS}");
    Ok(())
}
