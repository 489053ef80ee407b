//! Compares the kernels with the reference on the host, bit by bit.

#[path = "../host/moe.rs"]
mod moe;

use core::time::Duration;

use fusewire::{Communicator, Device, Options, Result, run_threads, run_threads_each};
use fusewire_build::Target;
use fusewire_cuda_fake::Settings;
use fusewire_tests::process::{Host, Ranks, role};
use fusewire_tests::skip::skip;
use moe_toy::NO_EXPERT;

use crate::moe::{Input, Moe, Shape, expected, random};

/// Three blocks get slices of different lengths of the tokens and the experts.
const SHAPE: Shape = Shape {
    tokens: 14,
    hidden: 5,
    k: 3,
    per_rank: 2,
};

/// Distributions of tokens and experts.
#[derive(Clone, Copy, Debug)]
enum Case {
    Random,
    /// A quarter of the items, and all items of token 2, have no expert.
    Masked,
    AllMasked,
    /// All experts are on the last rank.
    OneRank,
    NoTokensOnRank0,
    NoTokens,
}

/// The cases in which each rank has its [`tokens`].
const WITH_TOKENS: [Case; 4] = [Case::Random, Case::Masked, Case::AllMasked, Case::OneRank];

/// Returns the number of tokens of `rank`.
fn tokens(rank: u32) -> usize {
    SHAPE.tokens - rank as usize
}

/// Returns the inputs of all ranks.
fn inputs(case: Case, round: u32, ranks: u32) -> Vec<Input> {
    let input = |rank: u32| {
        let count = match case {
            Case::NoTokens => 0,
            Case::NoTokensOnRank0 if rank == 0 => 0,
            _ => tokens(rank),
        };
        let seed = u64::from(round * ranks + rank);
        Input::new(SHAPE, count, seed, |item| {
            let random = random(seed, item);
            match case {
                Case::AllMasked => NO_EXPERT,
                Case::Masked if item / SHAPE.k == 2 || random >> 30 == 0 => NO_EXPERT,
                Case::OneRank => (ranks - 1) * SHAPE.per_rank + random % SHAPE.per_rank,
                _ => random % (ranks * SHAPE.per_rank),
            }
        })
    };
    (0..ranks).map(input).collect()
}

/// Launches the kernels in each case.
fn launches(comm: &Communicator) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let moe = Moe::new(comm, SHAPE)?;
    let others = [Case::NoTokensOnRank0, Case::NoTokens, Case::Random];
    let cases = WITH_TOKENS.into_iter().chain(others);
    for (round, case) in (0..).zip(cases) {
        let inputs = inputs(case, round, ranks);
        let output = moe.run(&inputs[rank as usize])?;
        let expected = expected(SHAPE, &inputs, rank);
        assert_eq!(output, expected, "{case:?}, round {round}");
    }
    moe.free()
}

/// Replays a graph of the kernels, with `rounds` inputs, `replays` times each.
fn replays(comm: &Communicator, rounds: u32, replays: u32) -> Result<()> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let moe = Moe::new(comm, SHAPE)?;
    let graph = moe.capture(tokens(rank))?;
    for (round, case) in (0..rounds).zip(WITH_TOKENS.into_iter().cycle()) {
        let inputs = inputs(case, round, ranks);
        moe.write(&inputs[rank as usize])?;
        for _ in 0..replays {
            graph.run(comm.stream())?;
        }
        let output = moe.read(tokens(rank))?;
        let expected = expected(SHAPE, &inputs, rank);
        assert_eq!(output, expected, "{case:?}, round {round}");
    }
    drop(graph);
    moe.free()
}

/// Returns options for blocks of one lane, of one warp of 32 lanes, or of two such warps.
fn options(blocks: u32, lanes: u32) -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    (options.blocks, options.testing.lanes) = (blocks, lanes);
    options.testing.warp = lanes.min(32);
    options
}

/// Runs `test` on ranks that reach each other by load and store.
fn on_memory(ranks: u32, options: &Options, test: impl Fn(&Communicator) -> Result<()> + Sync) {
    for result in run_threads(ranks, options, |comm| test(&comm)) {
        result.unwrap_or_else(|error| panic!("{ranks} ranks, {options:?}: {error}"));
    }
}

/// Runs `test` on ranks that are connected by a network.
fn on_network(ranks: u32, options: &Options, test: impl Fn(&Communicator) -> Result<()> + Sync) {
    let mut options = options.clone();
    options.testing.network = Some(fusewire::testing::TestNetwork {
        team: 1,
        seed: u64::from(ranks),
    });
    on_memory(ranks, &options, test);
}

#[test]
fn results_have_the_bits_of_the_reference() {
    for ranks in 1..=4 {
        for blocks in [1, 3] {
            on_memory(ranks, &options(blocks, 1), launches);
            on_network(ranks, &options(blocks, 1), launches);
        }
    }
}

/// Every lane is a thread, so many lanes are slow, and only some shapes run.
#[test]
fn results_of_many_lanes_have_the_bits_of_the_reference() {
    for (ranks, blocks, lanes) in [(1, 3, 32), (2, 1, 64), (3, 3, 32), (4, 1, 32)] {
        on_memory(ranks, &options(blocks, lanes), launches);
    }
    for (ranks, blocks) in [(2, 3), (3, 1)] {
        on_network(ranks, &options(blocks, 32), launches);
    }
}

#[test]
fn a_graph_is_replayed_with_other_inputs() {
    for ranks in 1..=4 {
        on_memory(ranks, &options(1, 1), |comm| replays(comm, 20, 50));
    }
    on_memory(3, &options(3, 1), |comm| replays(comm, 20, 50));
    on_network(3, &options(1, 1), |comm| replays(comm, 20, 3));
}

/// Runs the compiled kernels on emulated GPUs, with a random schedule and the weak memory model.
#[test]
fn results_on_emulated_gpus_have_the_bits_of_the_reference() {
    match fusewire_build::install_images(env!("CARGO_MANIFEST_DIR"), Target::Sm90) {
        Ok(_) => {}
        Err(error @ fusewire_build::Error::Toolchain(_)) => return skip("ptx", &error.to_string()),
        Err(error) => panic!("{error}"),
    }
    let mut settings = Settings::default();
    settings.devices = 3;
    fusewire_cuda_fake::install(&settings).expect("no other test uses CUDA");
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    (options.blocks, options.threads) = (2, 64);
    let ranks = run_threads_each(Device::Cuda, "fusewire", 3, &options, |comm| {
        launches(&comm)?;
        replays(&comm, 4, 1)
    });
    for result in ranks {
        result.unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(fusewire_cuda_fake::launch_count("dispatch") > 0);
}

#[test]
fn ranks_are_processes() {
    if role().is_some() {
        let comm = Communicator::from_env(Device::Cpu, options(1, 1)).expect("a communicator");
        launches(&comm).expect("launches succeed");
        replays(&comm, 20, 10).expect("replays succeed");
        return;
    }
    let mut ranks = Ranks::start("ranks_are_processes", "rank", 4, Host::Parent, &[]);
    let ended = ranks.succeed(Duration::from_secs(120));
    ended.expect("every rank succeeds");
}

#[test]
fn an_expert_that_does_not_exist_is_named_on_all_ranks() {
    for (blocks, lanes, id) in [(1, 1, 4), (3, 1, u32::MAX - 1), (1, 32, 4)] {
        let messages = run_threads(2, &options(blocks, lanes), |comm| {
            let mut input = inputs(Case::Random, 0, 2).swap_remove(comm.rank() as usize);
            if comm.rank() == 1 {
                input.ids[17] = id;
            }
            let run = || Moe::new(&comm, SHAPE)?.run(&input).map(drop);
            Ok(run().expect_err("an error").to_string())
        });
        let text = format!(": no rank has expert {id}; there are 4 experts");
        for message in messages {
            let message = message.expect("joined");
            assert!(message.contains("rank 1 in kernel dispatch #"), "{message}");
            assert!(message.contains(&text), "{message} lacks {text}");
        }
    }
}
