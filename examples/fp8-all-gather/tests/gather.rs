//! Compares the kernel with the reference on the host, bit by bit.

#[path = "../host/gather.rs"]
mod gather;

use core::time::Duration;

use fusewire::{
    Bf16, Communicator, DType, Device, E4m3, Options, Result, run_threads, run_threads_each,
};
use fusewire_build::Target;
use fusewire_cuda_fake::Settings;
use fusewire_fp8_all_gather::GatherRows;
use fusewire_tests::process::{Host, Ranks, role};
use fusewire_tests::skip::skip;

use crate::gather::{Fp8Gather, expected, random, random_rows};

/// Numbers of rows of a rank.
const COUNTS: [usize; 4] = [0, 1, 7, 33];
const WIDTHS: [usize; 5] = [1, 8, 100, 128, 1000];

/// Numbers of rows and their widths for slow tests. Has each number and each width.
const FEW: [(usize, usize); 6] = [(0, 8), (1, 1000), (7, 100), (33, 8), (1, 1), (7, 128)];

/// Numbers of lanes of a block and of a warp: one lane, one warp, and four warps.
const SHAPES: [(u32, u32); 3] = [(1, 0), (32, 0), (64, 16)];

/// Returns rows in which values occur that the conversion must treat specially.
fn input(count: usize, width: usize, seed: u64) -> Vec<Bf16> {
    let mut x = random_rows(count, width, seed);
    for (row, values) in x.chunks_exact_mut(width).enumerate() {
        let any = random(seed, row) as usize % width;
        match (seed as usize + row) % 9 {
            0 => values[any] = Bf16::from_f32(f32::NAN),
            1 => values[any] = Bf16(0xff81), // a signaling NaN with a sign
            2 => values[any] = Bf16::from_f32(f32::INFINITY),
            3 => values[any] = Bf16::from_f32(f32::NEG_INFINITY),
            4 => values[any] = Bf16(0x7f7f), // the largest finite number
            5 => values.fill(Bf16::from_f32(-0.0)),
            6 => values.iter_mut().for_each(|value| value.0 &= 0x807f), // subnormal
            // Magnitudes below and above the lower bound, 1e-10.
            7 => values
                .iter_mut()
                .for_each(|value| *value = Bf16::from_f32(value.to_f32() * 1e-11)),
            _ => {}
        }
    }
    x
}

/// Returns the inputs of all ranks.
fn inputs(count: usize, width: usize, round: u64, ranks: u32) -> Vec<Vec<Bf16>> {
    let seeds = (0..ranks).map(|rank| round * u64::from(ranks) + u64::from(rank));
    seeds.map(|seed| input(count, width, seed)).collect()
}

/// Launches the kernel once for each number and width of `cases`.
fn launches(comm: &Communicator, cases: &[(usize, usize)]) -> Result<()> {
    for (round, &(count, width)) in (0..).zip(cases) {
        let inputs = inputs(count, width, round, comm.size());
        let gather = Fp8Gather::new(comm, count, width)?;
        let gathered = gather.run(&inputs[comm.rank() as usize])?;
        let expected = expected(&inputs, width);
        assert_eq!(gathered, expected, "{count} rows of {width}, round {round}");
        gather.free()?;
    }
    Ok(())
}

/// Launches the kernel for all numbers and widths.
fn all_launches(comm: &Communicator) -> Result<()> {
    for width in WIDTHS {
        launches(comm, &COUNTS.map(|count| (count, width)))?;
    }
    Ok(())
}

/// Replays a graph of the kernel `replays` times, each time with other rows.
fn replays(comm: &Communicator, replays: u64) -> Result<()> {
    let (count, width) = (7, 100);
    let gather = Fp8Gather::new(comm, count, width)?;
    let graph = gather.capture()?;
    for round in 0..replays {
        let inputs = inputs(count, width, round, comm.size());
        gather.write(&inputs[comm.rank() as usize])?;
        graph.run(comm.stream())?;
        assert_eq!(gather.read()?, expected(&inputs, width), "round {round}");
    }
    drop(graph);
    gather.free()
}

/// Returns options for `blocks` blocks of one of [`SHAPES`].
fn options(blocks: u32, (lanes, warp): (u32, u32)) -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    (options.blocks, options.testing.lanes, options.testing.warp) = (blocks, lanes, warp);
    options
}

/// Runs `test` on ranks that reach each other by load and store.
fn on_memory(ranks: u32, options: &Options, test: impl Fn(&Communicator) -> Result<()> + Sync) {
    for result in run_threads(ranks, options, |comm| test(&comm)) {
        result.unwrap_or_else(|error| panic!("{ranks} ranks, {options:?}: {error}"));
    }
}

/// Runs `test` on ranks that are connected by a network, with two orders of its requests.
fn on_networks(ranks: u32, options: &Options, test: impl Fn(&Communicator) -> Result<()> + Sync) {
    for seed in [1, 2] {
        let mut options = options.clone();
        options.testing.network = Some(fusewire::testing::TestNetwork { team: 1, seed });
        on_memory(ranks, &options, &test);
    }
}

#[test]
fn results_have_the_bits_of_the_reference() {
    for ranks in 1..=4 {
        for blocks in [1, 3] {
            on_memory(ranks, &options(blocks, SHAPES[0]), all_launches);
        }
    }
}

#[test]
fn results_over_a_network_have_the_bits_of_the_reference() {
    for ranks in 1..=4 {
        for blocks in [1, 3] {
            let options = options(blocks, SHAPES[0]);
            on_networks(ranks, &options, |comm| launches(comm, &FEW));
        }
    }
}

/// Every lane is a thread, so many lanes are slow, and only some combinations run.
#[test]
fn results_of_many_lanes_have_the_bits_of_the_reference() {
    for (ranks, blocks, shape) in [(1, 3, 1), (2, 1, 2), (3, 3, 1), (4, 1, 1), (2, 3, 2)] {
        let options = options(blocks, SHAPES[shape]);
        on_memory(ranks, &options, |comm| launches(comm, &FEW));
    }
    for (ranks, blocks, shape) in [(2, 3, 1), (3, 1, 2)] {
        let options = options(blocks, SHAPES[shape]);
        on_networks(ranks, &options, |comm| launches(comm, &FEW));
    }
}

#[test]
fn special_values_have_the_documented_bits() {
    let (infinity, nan) = (f32::INFINITY, f32::NAN);
    let least = 1e-10 / 448.0;
    // Elements of a row, their bits as E4M3, and the scale.
    let rows = [
        ([448.0, -448.0, 0.0, 1.0], [0x7e, 0xfe, 0x00, 0x38], 1.0),
        ([0.0, -0.0, 0.0, -0.0], [0x00, 0x80, 0x00, 0x80], least),
        (
            [infinity, -1.0, 2.0, -infinity],
            [0x7f, 0x80, 0, 0x7f],
            infinity,
        ),
        ([1.0, nan, -2.0, 0.0], [0x7f; 4], nan),
    ];
    for shape in SHAPES {
        on_memory(1, &options(1, shape), |comm| {
            let x = rows.iter().flat_map(|(values, ..)| *values);
            let x: Vec<Bf16> = x.map(Bf16::from_f32).collect();
            let gather = Fp8Gather::new(comm, rows.len(), 4)?;
            let gathered = gather.run(&x)?;
            for (index, (_, bits, scale)) in rows.into_iter().enumerate() {
                let row = &gathered.rows[index * 4..index * 4 + 4];
                assert_eq!(row, bits.map(E4m3), "row {index}");
                assert_eq!(gathered.scales[index], f32::to_bits(scale), "row {index}");
            }
            gather.free()
        });
    }
}

#[test]
fn a_graph_is_replayed_with_other_rows() {
    for ranks in 1..=4 {
        on_memory(ranks, &options(1, SHAPES[0]), |comm| replays(comm, 200));
    }
    on_memory(3, &options(3, SHAPES[0]), |comm| replays(comm, 200));
    on_memory(2, &options(1, SHAPES[2]), |comm| replays(comm, 10));
    on_networks(3, &options(1, SHAPES[0]), |comm| replays(comm, 20));
}

/// Runs the compiled kernel on emulated GPUs, with a random schedule and the weak memory model.
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
        launches(&comm, &FEW)?;
        replays(&comm, 3)
    });
    for result in ranks {
        result.unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(fusewire_cuda_fake::launch_count("gather_rows") > 0);
}

#[test]
fn ranks_are_processes() {
    if role().is_some() {
        let options = options(1, SHAPES[0]);
        let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
        launches(&comm, &FEW).expect("launches succeed");
        replays(&comm, 200).expect("replays succeed");
        return;
    }
    let mut ranks = Ranks::start("ranks_are_processes", "rank", 4, Host::Parent, &[]);
    let ended = ranks.succeed(Duration::from_secs(120));
    ended.expect("every rank succeeds");
}

/// Runs `launch` on two ranks, with blocks of one and of many lanes. Checks that the message of
/// every rank names the kernel and contains `text`.
fn fails(text: &str, launch: impl Fn(&Communicator) -> Result<()> + Sync) {
    for (blocks, shape) in [(1, SHAPES[0]), (3, SHAPES[0]), (1, SHAPES[1])] {
        let messages = run_threads(2, &options(blocks, shape), |comm| {
            Ok(launch(&comm).expect_err("an error").to_string())
        });
        for message in messages {
            let message = message.expect("joined");
            assert!(message.contains("kernel gather_rows #"), "{message}");
            assert!(message.contains(text), "{message} lacks {text}");
        }
    }
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let with_width = |comm: &Communicator, width: u32| {
        let gather = Fp8Gather::new(comm, 3, 8)?;
        let arguments = gather.arguments();
        comm.kernel(GatherRows { width, ..arguments }).launch()
    };
    for (width, text) in [
        (7, ": x has 24 elements, which are not whole rows of 7"),
        (48, ": x has 24 elements, which are not whole rows of 48"),
        (0, ": x has 24 elements, which are not whole rows of 0"),
    ] {
        fails(text, |comm| with_width(comm, width));
    }
    let text = ": the window rows has 32 elements; the rows of all ranks have 48";
    fails(text, |comm| {
        let (gather, small) = (Fp8Gather::new(comm, 3, 8)?, Fp8Gather::new(comm, 2, 8)?);
        let rows = small.arguments().rows;
        let arguments = gather.arguments();
        let arguments = GatherRows { rows, ..arguments };
        comm.kernel(arguments).launch()
    });
    let text = ": the window scales has 4 elements; all ranks have 6 rows";
    fails(text, |comm| {
        let (gather, small) = (Fp8Gather::new(comm, 3, 8)?, Fp8Gather::new(comm, 2, 8)?);
        let scales = small.arguments().scales;
        let arguments = gather.arguments();
        let arguments = GatherRows {
            scales,
            ..arguments
        };
        comm.kernel(arguments).launch()
    });
    // The control: no rows have any width, also 0.
    for (blocks, shape) in [(1, SHAPES[0]), (1, SHAPES[1])] {
        on_memory(2, &options(blocks, shape), |comm| {
            let gather = Fp8Gather::new(comm, 0, 0)?;
            let gathered = gather.run(&[])?;
            assert!(gathered.rows.is_empty() && gathered.scales.is_empty());
            with_width(comm, 24)
        });
    }
}

#[test]
fn ranks_with_other_widths_or_numbers_of_rows_are_a_mismatch() {
    let text = "with other values of the agreed arguments";
    fails(text, |comm| {
        let gather = Fp8Gather::new(comm, 2, 4)?;
        let (width, arguments) = (4 + 4 * comm.rank(), gather.arguments());
        comm.kernel(GatherRows { width, ..arguments }).launch()
    });
    fails(text, |comm| {
        let gather = Fp8Gather::new(comm, 2, 4)?;
        let x = comm.tensor(DType::Bf16, 4 + 4 * comm.rank() as usize)?;
        let (x, arguments) = ((&x).into(), gather.arguments());
        comm.kernel(GatherRows { x, ..arguments }).launch()
    });
}
