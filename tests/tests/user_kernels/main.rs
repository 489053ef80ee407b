//! Tests kernels of another crate: typed arguments, launches, and what happens after mistakes.
//!
//! The kernels have no image for a GPU, so all tests run on the CPU, with one and with many lanes
//! per block.

mod arguments;
mod contract;
mod grid;
mod mistakes;
mod queue;
mod remote;

use core::time::Duration;

use fusewire::{Communicator, DType, Element, Options, Result, Tensor, run_threads};

/// Numbers of ranks, blocks and lanes.
const SHAPES: [(u32, u32, u32); 6] = [
    (1, 1, 1),
    (2, 1, 1),
    (3, 2, 1),
    (2, 1, 32),
    (2, 3, 32),
    (2, 2, 64),
];

/// Returns options for blocks of one lane, of one warp of 32 lanes, or of four warps of 16 lanes.
fn options(blocks: u32, lanes: u32) -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    options.blocks = blocks;
    options.lanes = lanes;
    options.warp = if lanes == 64 { 16 } else { 0 };
    options
}

/// Runs `test` on every rank. It panics if a rank returns an error.
fn all(shape: (u32, u32, u32), test: impl Fn(&Communicator) -> Result<()> + Sync) {
    let (ranks, blocks, lanes) = shape;
    for result in run_threads(ranks, &options(blocks, lanes), |comm| test(&comm)) {
        result.expect("every rank succeeds");
    }
}

/// Runs `test` on ranks that reach each other by load and store, and on ranks that are connected by
/// a network.
fn on_both(shape: (u32, u32, u32), test: impl Fn(&Communicator) -> Result<()> + Sync) {
    all(shape, &test);
    on_networks(shape, test);
}

fn on_networks(shape: (u32, u32, u32), test: impl Fn(&Communicator) -> Result<()> + Sync) {
    let (ranks, blocks, lanes) = shape;
    for seed in 1..3 {
        let mut options = options(blocks, lanes);
        fusewire::testing::connect_by_network(&mut options, seed);
        for result in run_threads(ranks, &options, |comm| test(&comm)) {
            result.unwrap_or_else(|error| panic!("network {seed}, {shape:?}: {error}"));
        }
    }
}

/// Runs `test`, which must fail on every rank. Returns the messages of the ranks.
fn failing(options: &Options, test: impl Fn(&Communicator) -> Result<()> + Sync) -> Vec<String> {
    run_threads(2, options, |comm| Ok(test(&comm)))
        .into_iter()
        .map(|rank| {
            let error = rank.expect("joined").expect_err("the kernel fails");
            error.to_string()
        })
        .collect()
}

fn tensor<T: Element>(values: &[T]) -> Result<Tensor> {
    let tensor = Tensor::new(T::DTYPE, values.len())?;
    tensor.copy_from(values)?;
    Ok(tensor)
}

fn zeros(dtype: DType, count: usize) -> Result<Tensor> {
    Tensor::new(dtype, count)
}
