//! Tests kernels of another crate: typed arguments, launches, and what happens after mistakes.
//!
//! The kernels have no image for a GPU, so all tests run on the CPU, with one and with many lanes
//! per block.

mod arguments;
mod cells;
mod contract;
mod counters;
mod counts;
mod grid;
mod groups;
mod mistakes;
mod queue;
mod remote;
mod scratch;
mod waits;

use core::time::Duration;
use std::sync::OnceLock;
use std::thread;
use std::time::Instant;

use fusewire::testing::TestNetwork;
use fusewire::{Communicator, DType, Element, Options, Result, Tensor, run_threads};
use fusewire_device::comm::Rank;
use fusewire_device::native::SafeKernel;
use fusewire_device::{Aborted, Machine, Session, kernel};
use fusewire_tests::runner::of_networks;
use fusewire_tests::skip::full;

/// Numbers of ranks, blocks and lanes.
const SHAPES: [(u32, u32, u32); 7] = [
    (1, 1, 1),
    (2, 1, 1),
    (3, 2, 1),
    (4, 2, 1),
    (2, 1, 32),
    (2, 3, 32),
    (2, 2, 64),
];

/// Numbers of lanes of the blocks that [`options`] describes.
const LANES: [u32; 3] = [1, 32, 64];

/// Timeout of waits that never end.
const SHORT: Duration = Duration::from_millis(100);
/// Time limit of the tests' own waits, long enough for a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Returns options for blocks of one lane, of one warp of 32 lanes, or of four warps of 16 lanes.
fn options(blocks: u32, lanes: u32) -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    options.blocks = blocks;
    options.testing.lanes = lanes;
    options.testing.warp = if lanes == 64 { 16 } else { 0 };
    options
}

/// Returns true if a test of blocks of `lanes` lanes makes fewer launches than others: with more
/// than one lane, each lane is a thread. `FUSEWIRE_FULL=1` makes all launches.
fn is_short(lanes: u32) -> bool {
    lanes > 1 && !full()
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

/// Runs `test` on ranks that a network connects, and on teams of two ranks that it connects; then
/// on hosts of as many ranks, connected by TCP.
fn on_networks(shape: (u32, u32, u32), test: impl Fn(&Communicator) -> Result<()> + Sync) {
    let (ranks, blocks, lanes) = shape;
    let teams = ranks > 2 && ranks.is_multiple_of(2);
    for (seed, team) in [(1, 1), (2, if teams { 2 } else { 1 })] {
        for options in of_networks(&options(blocks, lanes), team, seed) {
            for result in run_threads(ranks, &options, |comm| test(&comm)) {
                let network = &options.testing.network;
                result.unwrap_or_else(|error| panic!("{network:?}, {shape:?}: {error}"));
            }
        }
    }
}

/// Runs `test`, which must fail on both of two ranks. Returns the messages of the ranks.
fn failing(options: &Options, test: impl Fn(&Communicator) -> Result<()> + Sync) -> Vec<String> {
    failing_on(2, options, test)
}

/// Runs `test`, which must fail on every one of `ranks` ranks. Returns the messages of the ranks.
fn failing_on(
    ranks: u32,
    options: &Options,
    test: impl Fn(&Communicator) -> Result<()> + Sync,
) -> Vec<String> {
    run_threads(ranks, options, |comm| Ok(test(&comm)))
        .into_iter()
        .map(|rank| {
            let error = rank.expect("joined").expect_err("the kernel fails");
            error.to_string()
        })
        .collect()
}

/// Runs a kernel with a mistake on two ranks, with one and with many lanes and on a network, and
/// checks the message of every rank.
fn fails(text: &str, test: impl Fn(&Communicator) -> Result<()> + Sync) {
    for lanes in LANES {
        fails_with(&options(1, lanes), text, &test);
    }
    fails_with(&by_network(1), text, &test);
}

/// Returns options for ranks that a network connects.
fn by_network(lanes: u32) -> Options {
    let mut options = options(1, lanes);
    options.testing.network = Some(TestNetwork { team: 1, seed: 3 });
    options
}

fn fails_with(options: &Options, text: &str, test: &(impl Fn(&Communicator) -> Result<()> + Sync)) {
    for message in failing(options, test) {
        assert_contains(&message, &[text]);
    }
}

/// Checks that `message` contains all `texts`.
#[track_caller]
fn assert_contains(message: &str, texts: &[&str]) {
    for text in texts {
        assert!(message.contains(*text), "{message:?} lacks {text:?}");
    }
}

/// Launches a kernel whose waits time out soon on rank 0 and late on the others. Ranks on which the
/// kernel succeeds wait until another rank has failed.
fn launch_impatiently(comm: &Communicator, arguments: impl SafeKernel) -> Result<()> {
    let launch = comm.kernel(arguments);
    match comm.rank() {
        0 => launch.timeout(SHORT).launch(),
        _ => launch.launch().and_then(|()| await_failure(comm)),
    }
}

/// Waits until another rank has failed the communicator, and returns the failure.
fn await_failure(comm: &Communicator) -> Result<()> {
    let started = Instant::now();
    while started.elapsed() < LONG {
        if let Some(error) = comm.failure() {
            return Err(error);
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("no rank has failed the communicator");
}

/// A rank that a communicator of two ranks does not have, after a call of [`keep_rank`].
static THIRD: OnceLock<Rank> = OnceLock::new();

/// Keeps the third rank.
#[kernel]
fn keep_third(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    if let Some(third) = s.peer(2) {
        THIRD.get_or_init(|| third);
    }
    Ok(())
}

/// Keeps the third rank of a communicator in [`THIRD`].
fn keep_rank() {
    all((3, 1, 1), |comm| comm.kernel(KeepThird {}).launch());
}

fn tensor<T: Element>(values: &[T]) -> Result<Tensor> {
    let tensor = Tensor::new(T::DTYPE, values.len())?;
    tensor.copy_from(values)?;
    Ok(tensor)
}

fn zeros(dtype: DType, count: usize) -> Result<Tensor> {
    Tensor::new(dtype, count)
}
