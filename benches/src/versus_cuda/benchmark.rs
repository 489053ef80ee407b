//! Checks and times the candidates of a comparison, on one rank.

use core::cell::{Cell, RefCell};
use core::time::Duration;
use std::rc::Rc;

use anyhow::{Context, Result};
use fusewire::gpu::driver::RawStream;
use fusewire::{
    Communicator, DType, Dispatched, Event, GraphExec, Moe, Norm, ReduceOp, Stream, Tensor,
};
use serde::Serialize;

use super::buffers::Latch;
use super::entries::{Entry, Kernel, Values};
use super::module::{Baseline, Launch};
use super::rendezvous::Rendezvous;

/// Default number of operations in a captured graph.
pub(crate) const OPERATIONS: usize = 100;
/// Number of eager warm-up operations before the first event.
const WARM: usize = 20;
/// A candidate that is slower than the best candidate of its side by this factor is not timed in
/// the rounds.
const SLOW: f64 = 1.5;
/// Intended duration of one measurement, in ns.
const TARGET_NS: f64 = 4e6;

/// Mode in which the operations are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// One launch per operation.
    Eager,
    /// Captured graphs of 100 operations each.
    Graph,
}

impl Mode {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Graph => "graph",
        }
    }

    /// Returns the number of launches (of operations or of graphs) per measurement, for an
    /// operation that takes `ns`.
    fn repeats(self, ns: f64, operations: usize) -> usize {
        let wanted = TARGET_NS / ns.max(1.0);
        match self {
            Self::Eager => wanted.clamp(20.0, 400.0) as usize,
            Self::Graph => (wanted / operations as f64).ceil().clamp(1.0, 20.0) as usize,
        }
    }
}

/// Side of the comparison that a candidate belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Side {
    Ours,
    /// Fusewire's all-reduce, followed by a separate kernel.
    OursApart,
    Theirs,
    TheirsApart,
    /// A copy of the same number of bytes.
    Floor,
}

/// A launch of a kernel, or a call that enqueues one.
#[derive(Debug)]
pub(crate) enum Step {
    AllReduce {
        comm: Communicator,
        input: Tensor,
        output: Tensor,
    },
    Norm {
        comm: Communicator,
        buffers: Box<NormBuffers>,
    },
    MoeDispatch(Rc<MoeCall>),
    /// Follows a [`Step::MoeDispatch`] with the same call.
    MoeCombine(Rc<MoeCall>),
    Launch(Launch),
}

/// Fusewire's dispatch and combine, and their tensors, on one rank.
#[derive(Debug)]
pub(crate) struct MoeCall {
    pub(crate) moe: Moe,
    pub(crate) x: Tensor,
    pub(crate) ids: Tensor,
    pub(crate) weights: Tensor,
    pub(crate) y: Tensor,
    pub(crate) out: Tensor,
    /// Result of the last enqueued dispatch.
    pub(crate) received: RefCell<Option<Dispatched>>,
}

/// Buffers of a norm, on one rank.
#[derive(Clone, Debug)]
pub(crate) struct NormBuffers {
    pub(crate) input: Tensor,
    pub(crate) residual: Tensor,
    pub(crate) weight: Tensor,
    pub(crate) residual_out: Tensor,
    pub(crate) output: Tensor,
    pub(crate) epsilon: f32,
}

impl Step {
    fn enqueue(&mut self, stream: RawStream) -> Result<()> {
        match self {
            Self::AllReduce {
                comm,
                input,
                output,
            } => {
                comm.all_reduce_into_async(output, input, ReduceOp::Sum)?;
            }
            Self::Norm { comm, buffers } => {
                let NormBuffers {
                    input,
                    residual,
                    weight,
                    residual_out,
                    output,
                    epsilon,
                } = &**buffers;
                let norm = Norm::rms(output, input, weight, *epsilon)
                    .with_residual(residual)
                    .with_residual_out(residual_out);
                comm.all_reduce_norm_async(&norm)?;
            }
            Self::MoeDispatch(call) => {
                let received = call.moe.dispatch(&call.x, &call.ids, &call.weights)?;
                call.received.replace(Some(received));
            }
            Self::MoeCombine(call) => {
                let received = call.received.borrow();
                let received = received.as_ref().context("combine before dispatch")?;
                call.moe.combine(&call.y, received, &call.out)?;
            }
            Self::Launch(launch) => {
                // SAFETY: the addresses belong to tensors that the caller of `compare` holds and to
                // `Buffers`, which outlive the ranks' threads. The kernels' protocols order the
                // accesses of different ranks.
                unsafe { launch.enqueue(stream)? };
            }
        }
        Ok(())
    }
}

/// One implementation of the compared operation.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) name: String,
    pub(crate) side: Side,
    /// Waits of one operation: the numbers of barriers without a fence, barriers with a fence, and
    /// one-way packet latencies.
    pub(crate) waits: (u32, u32, u32),
    pub(crate) steps: Vec<Step>,
    /// Also checks and times each step separately (only with [`Mode::Graph`]).
    pub(crate) is_split: bool,
}

/// State in which results are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stage {
    pub(crate) side: Side,
    /// Index of the candidate.
    pub(crate) index: usize,
    /// The step that has run, of candidates whose steps run separately; `None` after complete
    /// operations.
    pub(crate) step: Option<usize>,
}

/// Enqueues the steps of an operation.
fn enqueue(steps: &mut [Step], stream: &Stream) -> Result<()> {
    // SAFETY: `stream` is a live stream of a GPU.
    let raw = unsafe { RawStream::from_raw(stream.as_raw() as usize) };
    steps.iter_mut().try_for_each(|step| step.enqueue(raw))
}

/// Result of a candidate.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) side: Side,
    pub(crate) waits: (u32, u32, u32),
    /// Time in ns of one operation on the slowest rank, one value per round. Empty if the candidate
    /// was left out.
    pub(crate) ns: Vec<f64>,
    /// Times of each step, if the candidate is split: one value per step and round.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) steps_ns: Vec<Vec<f64>>,
    /// Reason why the candidate was left out; `None` if it was timed.
    pub(crate) left_out: Option<String>,
    /// Number of wrong elements on all ranks.
    pub(crate) wrong: u64,
}

/// A candidate that is being measured.
struct Runner {
    candidate: Candidate,
    graph: Option<GraphExec>,
    /// A graph for each step, if the candidate is split.
    steps: Vec<GraphExec>,
    figure: Figure,
    repeats: usize,
}

/// The benchmark on one rank.
#[derive(Debug)]
pub(crate) struct Benchmark<'a> {
    pub(crate) stream: Stream,
    pub(crate) rendezvous: &'a Rendezvous,
    pub(crate) baseline: &'a Baseline,
    pub(crate) latch: &'a Latch,
    pub(crate) rank: usize,
    pub(crate) rounds: usize,
    /// Operations per graph.
    pub(crate) operations: usize,
    /// Number of times that the latch has been used.
    pub(crate) turn: Cell<u32>,
}

impl Benchmark<'_> {
    /// Checks the candidates, leaves out wrong and slow candidates, and times the remaining ones in
    /// rounds. Each round starts with a different candidate. All ranks must call this with the same
    /// candidates. Before the check of a candidate, `spoil` overwrites the results and changes the
    /// inputs; it receives the index of the candidate. After the operation, `check` returns the
    /// number of wrong elements on this rank.
    pub(crate) fn compare(
        &self,
        mode: Mode,
        candidates: Vec<Candidate>,
        spoil: impl Fn(usize) -> Result<()>,
        check: impl Fn(Stage) -> Result<u64>,
    ) -> Result<Vec<Figure>> {
        let mut runners = Vec::new();
        for (index, candidate) in candidates.into_iter().enumerate() {
            let name = candidate.name.clone();
            let mut runner = self.runner(mode, candidate).with_context(|| name.clone())?;
            spoil(index)?;
            self.rendezvous.wait()?;
            self.launch(&mut runner, 1)?;
            self.stream.synchronize().with_context(|| name.clone())?;
            self.rendezvous.wait()?;
            let stage = Stage {
                side: runner.figure.side,
                index,
                step: None,
            };
            let mut wrong = check(stage)?;
            for (step, graph) in runner.steps.iter().enumerate() {
                if step == 0 {
                    spoil(index)?;
                }
                self.rendezvous.wait()?;
                graph.launch(&self.stream)?;
                self.stream.synchronize().with_context(|| name.clone())?;
                self.rendezvous.wait()?;
                let step = Some(step);
                wrong += check(Stage { step, ..stage })?;
            }
            runner.figure.wrong = self.rendezvous.exchange(self.rank, wrong)?.iter().sum();
            if runner.figure.wrong > 0 {
                runner.figure.left_out = Some("wrong".to_owned());
            } else {
                // The first measurement warms up and is dropped.
                for _ in 0..2 {
                    let ns = self.time(mode, &mut runner)?;
                    runner.figure.ns = vec![ns];
                    runner.repeats = mode.repeats(ns, self.operations);
                }
            }
            runners.push(runner);
        }
        leave_out_slow(runners.iter_mut().map(|runner| &mut runner.figure));
        for runner in &mut runners {
            runner.figure.ns.clear();
        }
        for round in 0..self.rounds {
            let count = runners.len();
            for index in 0..count {
                let runner = &mut runners[(index + round) % count];
                if runner.figure.left_out.is_none() {
                    let ns = self.time(mode, runner)?;
                    runner.figure.ns.push(ns);
                    let steps = self.time_steps(runner)?;
                    for (all, ns) in runner.figure.steps_ns.iter_mut().zip(steps) {
                        all.push(ns);
                    }
                }
            }
        }
        // Drops the graphs while no kernel runs, because freeing a graph may wait for the device.
        self.rendezvous.wait()?;
        let figures = runners.into_iter().map(|runner| {
            drop((runner.graph, runner.steps));
            runner.figure
        });
        let figures = figures.collect();
        self.rendezvous.wait()?;
        Ok(figures)
    }

    fn runner(&self, mode: Mode, mut candidate: Candidate) -> Result<Runner> {
        let figure = Figure {
            name: candidate.name.clone(),
            side: candidate.side,
            waits: candidate.waits,
            ns: Vec::new(),
            steps_ns: match candidate.is_split {
                true => vec![Vec::new(); candidate.steps.len()],
                false => Vec::new(),
            },
            left_out: None,
            wrong: 0,
        };
        self.rendezvous.wait()?;
        let graph = match mode {
            Mode::Eager => None,
            Mode::Graph => Some(self.capture(&mut candidate.steps, self.operations)?),
        };
        let steps = match candidate.is_split {
            true => {
                let steps = candidate.steps.chunks_mut(1);
                steps
                    .map(|step| self.capture(step, 1))
                    .collect::<Result<_>>()?
            }
            false => Vec::new(),
        };
        self.rendezvous.wait()?;
        Ok(Runner {
            candidate,
            graph,
            steps,
            figure,
            repeats: match mode {
                Mode::Eager => 20,
                Mode::Graph => 1,
            },
        })
    }

    /// Captures `operations` operations, each of which has the steps.
    fn capture(&self, steps: &mut [Step], operations: usize) -> Result<GraphExec> {
        self.stream.begin_capture()?;
        let enqueued = (0..operations).try_for_each(|_| enqueue(steps, &self.stream));
        let graph = self.stream.end_capture();
        enqueued?;
        let graph = graph?;
        let nodes = graph.len();
        anyhow::ensure!(
            nodes >= operations,
            "{nodes} nodes were captured of {operations} operations"
        );
        Ok(graph.instantiate()?)
    }

    fn launch(&self, runner: &mut Runner, times: usize) -> Result<()> {
        for _ in 0..times {
            match &runner.graph {
                Some(graph) => {
                    graph.launch(&self.stream)?;
                }
                None => enqueue(&mut runner.candidate.steps, &self.stream)?,
            }
        }
        Ok(())
    }

    /// Returns the time in ns of an operation on the slowest rank, measured by GPU events. The
    /// first launch synchronizes all ranks on the device, so the ranks start the measurement at the
    /// same time. Graphs wait on the device for a latch that the host opens after it has enqueued
    /// all graphs, so their time excludes the host's work. The time of eager operations includes
    /// the host's work.
    fn time(&self, mode: Mode, runner: &mut Runner) -> Result<f64> {
        let (start, end) = (Event::new(), Event::new());
        let name = runner.figure.name.clone();
        self.rendezvous.wait()?;
        let operations = match mode {
            Mode::Eager => {
                self.launch(runner, WARM)?;
                runner.repeats
            }
            Mode::Graph => {
                self.wait_for_latch()?;
                self.launch(runner, 1)?;
                runner.repeats * self.operations
            }
        };
        self.stream.record(&start)?;
        self.launch(runner, runner.repeats)?;
        self.stream.record(&end)?;
        if mode == Mode::Graph {
            self.rendezvous.wait()?;
            self.latch.open(self.turn.get());
        }
        self.stream.synchronize().with_context(|| name)?;
        let elapsed: Duration = end.elapsed_since(&start)?;
        let ns = elapsed.as_secs_f64() * 1e9 / operations as f64;
        self.rendezvous.greatest(self.rank, ns)
    }

    /// Returns the time in ns of each step of a split candidate on the slowest rank, in the mean of
    /// as many operations as a graph has. Each step is a graph between two events, which are part
    /// of its time. The host enqueues all graphs before it opens the latch.
    fn time_steps(&self, runner: &Runner) -> Result<Vec<f64>> {
        if runner.steps.is_empty() {
            return Ok(Vec::new());
        }
        let count = runner.steps.len();
        let events: Vec<Event> = (0..=count * self.operations)
            .map(|_| Event::new())
            .collect();
        self.rendezvous.wait()?;
        self.wait_for_latch()?;
        let mut graphs = runner.steps.iter().cycle();
        for graph in graphs.by_ref().take(count) {
            graph.launch(&self.stream)?;
        }
        for (event, graph) in events.iter().zip(graphs.take(count * self.operations)) {
            self.stream.record(event)?;
            graph.launch(&self.stream)?;
        }
        self.stream.record(&events[count * self.operations])?;
        self.rendezvous.wait()?;
        self.latch.open(self.turn.get());
        let name = &runner.figure.name;
        self.stream.synchronize().with_context(|| name.clone())?;
        let mut sums = vec![0.0; count];
        for (index, pair) in events.windows(2).enumerate() {
            let elapsed = pair[1].elapsed_since(&pair[0])?;
            sums[index % count] += elapsed.as_secs_f64() * 1e9 / self.operations as f64;
        }
        let sums = sums.into_iter();
        sums.map(|ns| self.rendezvous.greatest(self.rank, ns))
            .collect()
    }

    /// Enqueues a kernel that waits until the latch is opened for the next turn.
    fn wait_for_latch(&self) -> Result<()> {
        self.turn.set(self.turn.get() + 1);
        let entry = Entry {
            kernel: Kernel::Latch,
            dtype: DType::F32,
            ranks: 1,
        };
        let values = Values {
            input: self.latch.address(),
            turns: self.turn.get(),
            ..Values::default()
        };
        let mut latch = self.baseline.launch(entry, &values, 1, 32, 0)?;
        // SAFETY: the latch lives until the ranks' threads have waited for their streams and ended.
        unsafe { latch.enqueue(RawStream::from_raw(self.stream.as_raw() as usize)) }
    }
}

/// Leaves out the candidates that are much slower than the best candidate of their side. Never
/// leaves out the floor.
fn leave_out_slow<'a>(figures: impl Iterator<Item = &'a mut Figure>) {
    let mut figures: Vec<_> = figures.collect();
    for side in [Side::Ours, Side::OursApart, Side::Theirs, Side::TheirsApart] {
        let of_side = |figure: &&mut Figure| figure.side == side && figure.left_out.is_none();
        let times = figures.iter().filter(|figure| of_side(figure));
        let best = times
            .filter_map(|figure| figure.ns.first().copied())
            .min_by(f64::total_cmp);
        let Some(best) = best else { continue };
        // Fusewire's choice of algorithm is never left out.
        let stays = |figure: &Figure| figure.name.starts_with(AUTO);
        for figure in &mut figures {
            let slow = figure.ns.first().is_some_and(|ns| *ns > SLOW * best);
            if figure.side == side && slow && !stays(figure) {
                let times = figure.ns[0] / best;
                figure.left_out = Some(format!("{times:.1} times the best at first"));
            }
        }
    }
}

/// Name of the candidate that runs the algorithm of Fusewire's plan.
pub(crate) const AUTO: &str = "auto";

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(name: &str, side: Side, ns: f64) -> Figure {
        Figure {
            name: name.to_owned(),
            side,
            waits: (0, 0, 0),
            ns: vec![ns],
            steps_ns: Vec::new(),
            left_out: None,
            wrong: 0,
        }
    }

    #[test]
    fn a_measurement_has_a_sensible_length() {
        assert_eq!(Mode::Eager.repeats(1.0, OPERATIONS), 400);
        assert_eq!(Mode::Eager.repeats(1e5, OPERATIONS), 40);
        assert_eq!(Mode::Eager.repeats(1e9, OPERATIONS), 20);
        assert_eq!(Mode::Graph.repeats(5e3, OPERATIONS), 8);
        assert_eq!(Mode::Graph.repeats(1e9, OPERATIONS), 1);
        assert_eq!(Mode::Graph.repeats(0.0, OPERATIONS), 20);
    }

    #[test]
    fn the_slow_are_left_out_by_side() {
        let mut figures = [
            figure("auto: two_shot", Side::Ours, 90.0),
            figure("signal", Side::Ours, 40.0),
            figure("packet", Side::Ours, 10.0),
            figure("one_stage", Side::Theirs, 5.0),
            figure("two_stage_push", Side::Theirs, 7.5),
            figure("two_stage_pull", Side::Theirs, 7.6),
            figure("copy", Side::Floor, 1000.0),
        ];
        leave_out_slow(figures.iter_mut());
        let left: Vec<&str> = figures
            .iter()
            .filter(|figure| figure.left_out.is_some())
            .map(|figure| figure.name.as_str())
            .collect();
        assert_eq!(left, ["signal", "two_stage_pull"]);
        // A wrong candidate does not count as the best.
        let mut figures = [
            figure("one_stage", Side::Theirs, 1.0),
            figure("two_stage_push", Side::Theirs, 50.0),
        ];
        figures[0].left_out = Some("wrong".to_owned());
        leave_out_slow(figures.iter_mut());
        assert_eq!(figures[1].left_out, None);
    }
}
