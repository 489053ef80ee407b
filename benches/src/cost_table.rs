//! Measures the parts of an operation on the CPU (a launch, a graph node, a signal, a barrier), and
//! compares their sum with the time of an all_reduce of 64 bytes.

use core::fmt::Write as _;
use core::time::Duration;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use fusewire::store::MemoryStore;
use fusewire::{Algorithm, Communicator, DType, Device, GraphExec, Options, ReduceOp, Tensor};

use crate::machine;
use crate::versus_cuda::statistics::{Interval, interval};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Rounds, at least 6. Each round measures every part once.
    #[arg(long, default_value_t = 31)]
    rounds: usize,
    /// Appends the table to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Number of calls per measurement. [`NODES`] is the number of operations per graph.
const CALLS: usize = 2000;
const NODES: usize = 100;
/// Elements of the all_reduce.
const COUNT: usize = 16;

/// Names of the measurements, in order.
const WHAT: [&str; 6] = [
    "launch: barrier of one rank, called",
    "node: barrier of one rank, in a graph of 100",
    "barrier of 2 ranks, called",
    "barrier of 2 ranks, in a graph of 100",
    "all_reduce of 64 bytes, 2 ranks, packets, in a graph of 100",
    "all_reduce of 64 bytes, 2 ranks, signal, in a graph of 100",
];

/// Nanoseconds per call of each measurement, one value per round.
type Times = [Vec<f64>; WHAT.len()];

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    ensure!(
        arguments.rounds >= 6,
        "--rounds {}: a confidence interval needs at least 6 rounds",
        arguments.rounds
    );
    let cores = machine::cores()?;
    ensure!(cores.len() >= 2, "two ranks need a core each");
    let one_way = machine::ping_pong(&cores).context("no ping-pong between two cores")?;
    let store = Arc::new(MemoryStore::new());
    let ranks: Vec<Result<Times>> = std::thread::scope(|scope| {
        let threads = [0, 1].map(|rank| {
            let (store, core) = (store.clone(), cores[rank as usize]);
            scope.spawn(move || {
                machine::pin(core)?;
                one_rank(arguments.rounds, rank, &store)
            })
        });
        let threads = threads.map(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|_| Err(anyhow!("a rank panicked")))
        });
        threads.into()
    });
    let mut first = None;
    for (rank, times) in ranks.into_iter().enumerate() {
        let times = times.with_context(|| format!("rank {rank}"))?;
        first.get_or_insert(times);
    }
    let text = table(one_way, &first.context("no ranks")?)?;
    print!("{text}");
    if let Some(path) = &arguments.out {
        let before = fs::read_to_string(path).unwrap_or_default();
        fs::write(path, before + &text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn communicator(
    store: &Arc<MemoryStore>,
    rank: u32,
    size: u32,
    algorithm: Algorithm,
) -> Result<Communicator> {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    options.algorithm = algorithm;
    let name = format!("{algorithm:?}");
    let comm = Communicator::new(Device::Cpu, rank, size, store.clone(), &name, options)?;
    Ok(comm)
}

/// Captures [`NODES`] calls of `issue` as a graph.
fn graph(comm: &Communicator, issue: impl Fn() -> Result<()>) -> Result<GraphExec> {
    comm.stream().begin_capture()?;
    let issued = (0..NODES).try_for_each(|_| issue());
    let graph = comm.stream().end_capture();
    issued?;
    Ok(graph?.instantiate()?)
}

fn one_rank(rounds: usize, rank: u32, store: &Arc<MemoryStore>) -> Result<Times> {
    let own = Arc::new(MemoryStore::new());
    let alone = communicator(&own, 0, 1, Algorithm::Signal)?;
    let signal = communicator(store, rank, 2, Algorithm::Signal)?;
    let packet = communicator(store, rank, 2, Algorithm::Packet)?;
    let node = graph(&alone, || Ok(alone.barrier_async().map(drop)?))?;
    let barriers = graph(&signal, || Ok(signal.barrier_async().map(drop)?))?;
    let reduces = |comm: &Communicator| -> Result<(GraphExec, Tensor)> {
        let (input, output) = (
            comm.alloc(DType::F32, COUNT)?,
            comm.alloc(DType::F32, COUNT)?,
        );
        input.copy_from(&[1.5f32; COUNT])?;
        let captured = graph(comm, || {
            Ok(comm
                .all_reduce_into_async(&output, &input, ReduceOp::Sum)
                .map(drop)?)
        })?;
        Ok((captured, output))
    };
    let (by_packets, sum_by_packets) = reduces(&packet)?;
    let (by_signal, sum_by_signal) = reduces(&signal)?;
    let replay = |graph: &GraphExec, comm: &Communicator| -> Result<f64> {
        signal.barrier()?;
        let start = Instant::now();
        for _ in 0..CALLS / NODES {
            graph.run(comm.stream())?;
        }
        Ok(start.elapsed().as_nanos() as f64 / CALLS as f64)
    };
    let call = |comm: &Communicator| -> Result<f64> {
        signal.barrier()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            comm.barrier()?;
        }
        Ok(start.elapsed().as_nanos() as f64 / CALLS as f64)
    };
    let mut times = Times::default();
    for round in 0..=rounds {
        let found = [
            call(&alone)?,
            replay(&node, &alone)?,
            call(&signal)?,
            replay(&barriers, &signal)?,
            replay(&by_packets, &packet)?,
            replay(&by_signal, &signal)?,
        ];
        if round > 0 {
            // The first round warms up and is dropped.
            for (all, ns) in times.iter_mut().zip(found) {
                all.push(ns);
            }
        }
    }
    for sum in [sum_by_packets, sum_by_signal] {
        ensure!(sum.to_vec::<f32>()? == [3.0; COUNT], "a wrong sum");
    }
    signal.barrier()?;
    Ok(times)
}

fn table(one_way: f64, times: &Times) -> Result<String> {
    let mut text = String::new();
    let rounds = times[0].len();
    writeln!(
        text,
        "{}; ranks as threads with a core each; {rounds} rounds; ns, median [95 % interval by \
            order statistics].\n",
        machine::processor()
    )?;
    writeln!(text, "| | ns |\n|---|---|")?;
    writeln!(
        text,
        "| a cache line to the other core, one way | {one_way:.0} |"
    )?;
    let mut medians = [0.0; WHAT.len()];
    for ((what, all), found) in WHAT.iter().zip(times).zip(&mut medians) {
        let Interval { median, low, high } =
            interval(all).context("an interval needs six rounds")?;
        *found = median;
        writeln!(text, "| {what} | {median:.0} [{low:.0}, {high:.0}] |")?;
    }
    let [_, node, _, barrier, packets, signal] = medians;
    let round = barrier - node;
    writeln!(
        text,
        "\n| all_reduce of 64 bytes | its parts | sum | measured |"
    )?;
    writeln!(text, "|---|---|---|---|")?;
    writeln!(
        text,
        "| packets | a node, a cache line one way | {:.0} | {packets:.0} |",
        node + one_way
    )?;
    writeln!(
        text,
        "| signal | a node, two rounds of signals of {round:.0}, the other's input | {:.0} | \
            {signal:.0} |",
        2.0f64.mul_add(round, node) + one_way
    )?;
    Ok(text)
}
