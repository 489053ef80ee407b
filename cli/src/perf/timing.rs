//! Time measurement: single blocking calls by the host's clock on the CPU, batches of enqueued
//! operations by events on a GPU.

use core::time::Duration;
use std::time::Instant;

use fusewire::{Communicator, Event, GraphExec, ReduceOp, Result};

use super::Settings;

/// Duration of the warm-up of one row, unless `--warmup` gives the number of its calls.
const WARM_UP: Duration = Duration::from_millis(20);
/// Total duration of the samples of one row, unless `--iterations` gives their number.
const BUDGET: Duration = Duration::from_millis(200);
/// Maximum number of samples of one row.
const MOST: u64 = 5000;
/// Minimum number of samples of one row.
const FEWEST: u64 = 5;
/// Duration of a sample on a GPU, unless `--batch` gives the number of its operations. The events
/// and the different starts of the ranks contribute a few microseconds to a sample.
const SAMPLE: Duration = Duration::from_millis(1);
/// Maximum number of operations of a sample on a GPU, unless `--batch` gives the number.
const LARGEST_BATCH: u64 = 256;

/// Method of measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timing {
    /// The host's clock around a blocking call.
    HostClock,
    /// Two events of the stream around a batch of operations.
    GpuEvents,
}

impl Timing {
    /// Returns the method for the device of `comm`. On a GPU, every backend executes operations on
    /// the stream, so events measure them.
    pub(crate) fn of(comm: &Communicator) -> Self {
        if comm.device().is_gpu() {
            Self::GpuEvents
        } else {
            Self::HostClock
        }
    }

    /// Returns the name in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::HostClock => "host_clock",
            Self::GpuEvents => "gpu_events",
        }
    }

    /// Describes the method for the header of the table.
    pub(crate) const fn description(self, graph: bool) -> &'static str {
        match (self, graph) {
            (Self::HostClock, false) => "host clock around each blocking call",
            (Self::HostClock, true) => "host clock around each replay of a graph of one operation",
            (Self::GpuEvents, false) => {
                "GPU events around n operations enqueued back to back, divided by n (column n)"
            }
            (Self::GpuEvents, true) => {
                "GPU events around a replay of a graph of n operations, divided by n (column n)"
            }
        }
    }
}

/// The times of one row.
#[derive(Debug)]
pub(crate) struct Samples {
    /// Time of an operation on the slowest rank in microseconds, for each sample.
    pub(crate) times: Vec<f64>,
    /// Number of operations of a sample.
    pub(crate) batch: u64,
}

/// Returns the largest value of all ranks, and at least 1 ns. All ranks use this value for
/// decisions, so that they make the same calls.
fn slowest(comm: &Communicator, elapsed: Duration) -> Result<u64> {
    let mut elapsed = [elapsed.as_nanos() as u64];
    comm.all_reduce(elapsed.as_mut_slice(), ReduceOp::Max)?;
    Ok(elapsed[0].max(1))
}

/// Returns true if the warm-up that began at `first` has taken long enough on a rank.
fn is_warm(comm: &Communicator, first: Instant) -> Result<bool> {
    Ok(slowest(comm, first.elapsed())? > WARM_UP.as_nanos() as u64)
}

/// Returns the number of samples of a row, each of which takes `each` nanoseconds.
fn samples(settings: &Settings, each: u64) -> u64 {
    match settings.iterations {
        Some(iterations) => u64::from(iterations),
        None => (BUDGET.as_nanos() as u64 / each.max(1)).clamp(FEWEST, MOST),
    }
}

/// Replaces each time by the time of the slowest rank. A rank that starts late measures a shorter
/// time, because the data of its peers has already arrived.
fn of_slowest_rank(comm: &Communicator, mut times: Vec<f64>, batch: u64) -> Result<Samples> {
    comm.all_reduce(times.as_mut_slice(), ReduceOp::Max)?;
    Ok(Samples { times, batch })
}

/// Measures blocking calls by the host's clock. A barrier precedes every call.
pub(crate) fn by_host_clock(
    comm: &Communicator,
    settings: &Settings,
    once: &dyn Fn() -> Result<()>,
) -> Result<Samples> {
    // Makes at least one warm-up call, because the number of timed calls is derived from its
    // duration. By default, the warm-up lasts 20 ms, so that caches are filled, the clock frequency
    // has risen, and the OS has moved the threads of two ranks to different cores.
    let mut calls = settings.warmup.map_or(3, |warmup| u64::from(warmup).max(1));
    let first = Instant::now();
    let each = loop {
        let started = Instant::now();
        for _ in 0..calls {
            comm.barrier()?;
            once()?;
        }
        let each = slowest(comm, started.elapsed())? / calls;
        if settings.warmup.is_some() || is_warm(comm, first)? {
            break each;
        }
        calls = 50;
    };
    let iterations = samples(settings, each);
    let mut times = Vec::with_capacity(iterations as usize);
    for _ in 0..iterations {
        comm.barrier()?;
        let started = Instant::now();
        once()?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    of_slowest_rank(comm, times, 1)
}

/// The events of a sample on the stream of a communicator.
struct Stopwatch<'a> {
    comm: &'a Communicator,
    start: Event,
    end: Event,
}

impl Stopwatch<'_> {
    /// Enqueues a barrier and, between two events, the work of `enqueue`. Waits for its completion
    /// and returns the time between the events. The barrier starts the ranks together.
    fn measure(&self, enqueue: impl FnOnce() -> Result<()>) -> Result<Duration> {
        let stream = self.comm.stream();
        self.comm.barrier_async()?;
        stream.record(&self.start)?;
        enqueue()?;
        stream.record(&self.end)?;
        stream.synchronize()?;
        self.end.elapsed_since(&self.start)
    }
}

/// Measures batches of operations by two events on the stream. `enqueue` enqueues one operation.
/// With `--graph`, a batch is a replay of a graph that contains the operations.
pub(crate) fn by_gpu_events(
    comm: &Communicator,
    settings: &Settings,
    enqueue: &dyn Fn() -> Result<()>,
) -> Result<Samples> {
    let watch = Stopwatch {
        comm,
        start: Event::new(),
        end: Event::new(),
    };
    let eager = |count: u64| watch.measure(|| (0..count).try_for_each(|_| enqueue()));
    let mut calls = settings.warmup.map_or(3, |warmup| u64::from(warmup).max(1));
    let first = Instant::now();
    let each = loop {
        let mut elapsed = Duration::ZERO;
        let mut left = calls;
        while left > 0 {
            let count = left.min(LARGEST_BATCH);
            elapsed += eager(count)?;
            left -= count;
        }
        let each = (slowest(comm, elapsed)? / calls).max(1);
        if settings.warmup.is_some() || is_warm(comm, first)? {
            break each;
        }
        calls = batch_of(each);
    };
    let batch = settings.batch.map_or_else(|| batch_of(each), u64::from);
    let graph = settings
        .graph
        .then(|| capture(comm, batch, enqueue))
        .transpose()?;
    let sample = || match &graph {
        Some(graph) => watch.measure(|| graph.launch(comm.stream()).map(drop)),
        None => eager(batch),
    };
    if graph.is_some() {
        // The first replay uploads the graph.
        sample()?;
    }
    let samples = samples(settings, each.saturating_mul(batch));
    let mut times = Vec::with_capacity(samples as usize);
    for _ in 0..samples {
        times.push(sample()?.as_secs_f64() * 1e6 / batch as f64);
    }
    of_slowest_rank(comm, times, batch)
}

/// Returns the number of operations of a sample, if an operation takes `each` nanoseconds.
fn batch_of(each: u64) -> u64 {
    (SAMPLE.as_nanos() as u64 / each).clamp(1, LARGEST_BATCH)
}

/// Captures a graph of `count` operations, each of which `enqueue` enqueues.
pub(crate) fn capture(
    comm: &Communicator,
    count: u64,
    enqueue: &dyn Fn() -> Result<()>,
) -> Result<GraphExec> {
    comm.stream().begin_capture()?;
    let captured = (0..count).try_for_each(|_| enqueue());
    let graph = comm.stream().end_capture()?;
    captured?;
    graph.instantiate()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_takes_about_a_millisecond() {
        assert_eq!(batch_of(5_000), 200);
        assert_eq!(batch_of(400_000), 2);
        // Bounds: very short and very long operations.
        assert_eq!(batch_of(1), LARGEST_BATCH);
        assert_eq!(batch_of(10_000_000), 1);
    }
}
