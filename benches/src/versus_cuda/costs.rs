//! Measures the parts of an operation: a launch, a graph node, a barrier, a signal round trip, a
//! copy.

use std::sync::Arc;

use anyhow::{Result, ensure};
use fusewire::gpu::Gpu;
use fusewire::gpu::driver::RawStream;
use fusewire::{DType, Event, Stream};
use serde::Serialize;

use super::Shape;
use super::benchmark::{Benchmark, OPERATIONS};
use super::buffers::Peers;
use super::entries::{Entry, Kernel, Order, VECTOR, Values};
use super::module::{Baseline, Launch};
use super::statistics::{Interval, interval};

/// Size in bytes of the copy that measures memory bandwidth. It exceeds the L2 cache.
const COPIED: usize = 256 << 20;
/// Numbers of iterations (barriers or round trips) that the kernel runs in the short and in the
/// long launch of a measurement. The difference between the two times excludes the start and the
/// end of the kernel.
const TURNS: [u32; 2] = [200, 1200];

/// A measured cost.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cost {
    pub(crate) what: String,
    /// Number of ranks that take part.
    pub(crate) ranks: usize,
    pub(crate) unit: &'static str,
    pub(crate) values: Vec<f64>,
    pub(crate) interval: Option<Interval>,
}

impl Cost {
    fn new(what: impl Into<String>, ranks: usize, unit: &'static str, values: Vec<f64>) -> Self {
        Self {
            what: what.into(),
            ranks,
            unit,
            interval: interval(&values),
            values,
        }
    }
}

/// Returns the name of a barrier of this order in the table.
pub(crate) fn barrier_name(order: Order) -> String {
    format!("barrier, {}", order.name())
}

/// Returns the name of a signal round trip of this order in the table.
pub(crate) fn signal_name(order: Order) -> String {
    format!("signal round trip, {}", order.name())
}

fn entry(kernel: Kernel, ranks: usize) -> Entry {
    Entry {
        kernel,
        dtype: DType::F32,
        ranks,
    }
}

/// Returns the time in seconds of `times` calls of `one`, measured by device events after `warm`
/// warm-up calls.
fn timed(
    stream: &Stream,
    warm: usize,
    times: usize,
    mut one: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let (start, end) = (Event::new(), Event::new());
    (0..warm).try_for_each(|_| one())?;
    stream.record(&start)?;
    (0..times).try_for_each(|_| one())?;
    stream.record(&end)?;
    stream.synchronize()?;
    Ok(end.elapsed_since(&start)?.as_secs_f64())
}

fn enqueue(launch: &mut Launch, stream: &Stream) -> Result<()> {
    // SAFETY: the empty kernel accesses no memory. For the other kernels, the callers in this file
    // hold the pads and buffers until they have waited for the stream.
    unsafe { launch.enqueue(RawStream::from_raw(stream.as_raw() as usize)) }
}

/// Measures the costs that involve a single stream.
pub(crate) fn alone(gpu: &Arc<Gpu>, baseline: &Baseline, rounds: usize) -> Result<Vec<Cost>> {
    let stream = Stream::on_device(gpu.device())?;
    let mut empty = baseline.launch(entry(Kernel::Empty, 1), &Values::default(), 1, 32, 0)?;
    stream.begin_capture()?;
    let captured = (0..OPERATIONS).try_for_each(|_| enqueue(&mut empty, &stream));
    let graph = stream.end_capture();
    captured?;
    let graph = graph?;
    ensure!(
        graph.len() == OPERATIONS,
        "{} nodes were captured",
        graph.len()
    );
    let graph = graph.instantiate()?;

    let copied = Peers::new(gpu, 2, COPIED)?;
    let values = Values {
        input: copied.addresses()[0],
        output: copied.addresses()[1],
        vectors: (COPIED / VECTOR) as u32,
        ..Values::default()
    };
    let most = baseline.resident(entry(Kernel::Copy, 1), 512)?;
    let blocks = most.min(256);
    let mut copy = baseline.launch(entry(Kernel::Copy, 1), &values, blocks, 512, 0)?;

    let (mut launches, mut nodes, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..=rounds {
        let taken = timed(&stream, 20, 200, || enqueue(&mut empty, &stream))?;
        launches.push(taken * 1e6 / 200.0);
        let taken = timed(&stream, 1, 10, || {
            graph.launch(&stream)?;
            Ok(())
        })?;
        nodes.push(taken * 1e6 / (10 * OPERATIONS) as f64);
        let taken = timed(&stream, 2, 10, || enqueue(&mut copy, &stream))?;
        rates.push((10 * COPIED) as f64 / taken / 1e9);
    }
    // The first round warms up and is dropped.
    for values in [&mut launches, &mut nodes, &mut rates] {
        values.remove(0);
    }
    Ok(vec![
        Cost::new("empty kernel, launched one by one", 1, "us", launches),
        Cost::new("node of a graph of 100 empty kernels", 1, "us", nodes),
        Cost::new(
            format!(
                "copy of {} MiB by {blocks} blocks, bytes copied",
                COPIED >> 20
            ),
            1,
            "GB/s",
            rates,
        ),
    ])
}

/// Measures the costs that involve several ranks. All ranks must call this.
pub(crate) fn together(
    benchmark: &Benchmark<'_>,
    baseline: &Baseline,
    pads: &Peers,
    ping_pong: &Peers,
    shape: Shape,
) -> Result<Vec<Cost>> {
    let mut costs = Vec::new();
    let ranks = shape.ranks;
    for order in [Order::Relaxed, Order::Release] {
        let kernel = entry(Kernel::Barriers(order), ranks);
        let values = turns(
            benchmark,
            baseline,
            kernel,
            pads,
            shape.blocks,
            shape.threads,
        )?;
        costs.push(Cost::new(barrier_name(order), ranks, "us", values));
    }
    if ranks == 2 {
        for order in [Order::Relaxed, Order::Release] {
            let kernel = entry(Kernel::PingPong(order), ranks);
            let values = turns(benchmark, baseline, kernel, ping_pong, 1, 32)?;
            costs.push(Cost::new(signal_name(order), ranks, "us", values));
        }
    }
    Ok(costs)
}

/// Returns the time of one turn in microseconds, one value per round.
fn turns(
    benchmark: &Benchmark<'_>,
    baseline: &Baseline,
    kernel: Entry,
    pads: &Peers,
    blocks: u32,
    threads: u32,
) -> Result<Vec<f64>> {
    let ranks = pads.addresses().len() as u32;
    let launch = |turns| {
        let values = Values {
            rank: benchmark.rank as u32,
            pads: pads.addresses(),
            turns,
            ..Values::default()
        };
        baseline.launch(kernel, &values, blocks, threads, ranks)
    };
    let mut launches = [launch(TURNS[0])?, launch(TURNS[1])?];
    let mut found = Vec::new();
    for _ in 0..=benchmark.rounds {
        let mut taken = [0.0; 2];
        for (launch, taken) in launches.iter_mut().zip(&mut taken) {
            benchmark.rendezvous.wait()?;
            // The warm-up launch synchronizes the ranks.
            let own = timed(&benchmark.stream, 1, 1, || {
                enqueue(launch, &benchmark.stream)
            })?;
            *taken = benchmark.rendezvous.greatest(benchmark.rank, own)?;
        }
        found.push((taken[1] - taken[0]) * 1e6 / f64::from(TURNS[1] - TURNS[0]));
    }
    found.remove(0);
    Ok(found)
}
