//! Runs the layer on ranks that are threads, and compares all results with the reference.

use core::ops::Range;
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use fusewire::{Communicator, Options, Result, run_threads};

use crate::clock::PARTS;
use crate::experts::Expert;
use crate::layer::Layer;
use crate::model::{Model, Shape};

/// A way of running the layer: its name, the number of micro-batches, and true to replay a graph
/// instead of enqueueing the operations.
pub(crate) type Mode = (&'static str, usize, bool);

pub(crate) const MODES: [Mode; 4] = [
    ("eager", 1, false),
    ("graph", 1, true),
    ("two micro-batches", 2, false),
    ("two, in a graph", 2, true),
];

/// Tokens, and the results that the layer must have for them, as bits of bf16.
pub(crate) struct Case {
    pub(crate) tokens: Vec<f32>,
    pub(crate) expected: Vec<u16>,
}

/// The times of one run of the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Times {
    pub(crate) total: Duration,
    pub(crate) parts: [Duration; PARTS],
}

/// An element that differs from the reference. `index` counts the elements of all tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Difference {
    pub(crate) iteration: usize,
    pub(crate) index: usize,
    pub(crate) found: u16,
}

/// Times and comparison of a mode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    /// The iteration with the median total time, on the rank where this time is greatest.
    pub(crate) times: Times,
    /// The first element that differs.
    pub(crate) difference: Option<Difference>,
}

impl Outcome {
    /// Combines the outcomes of two ranks.
    fn or(self, other: Self) -> Self {
        let differences = [self.difference, other.difference];
        Self {
            times: self.times.max(other.times),
            difference: differences.into_iter().flatten().min(),
        }
    }
}

/// Returns the experts of a rank in [`fusewire::Moe`]'s default placement.
pub(crate) fn experts_of(rank: u32, ranks: u32, experts: usize) -> Range<usize> {
    let each = experts.div_ceil(ranks as usize);
    let first = (rank as usize * each).min(experts);
    first..(first + each).min(experts)
}

/// A run of the layer in all modes.
pub(crate) struct Run<'a> {
    pub(crate) shape: Shape,
    pub(crate) model: &'a Model,
    /// The iterations use these in turn.
    pub(crate) cases: &'a [Case],
    pub(crate) iterations: usize,
    /// A rank that changes a weight of its first expert.
    pub(crate) spoiled: Option<u32>,
}

impl Run<'_> {
    /// Runs the layer on `ranks` ranks. Returns the outcomes in the order of [`MODES`].
    pub(crate) fn on_ranks(&self, ranks: u32) -> Result<Vec<Outcome>> {
        let results = run_threads(ranks, &Options::default(), |comm| self.on_rank(&comm));
        let of_ranks = results.into_iter().collect::<Result<Vec<_>>>()?;
        let of_mode = |mode| {
            of_ranks
                .iter()
                .map(move |outcomes: &Vec<Outcome>| outcomes[mode])
        };
        let combined = (0..MODES.len()).filter_map(|mode| of_mode(mode).reduce(Outcome::or));
        Ok(combined.collect())
    }

    fn on_rank(&self, comm: &Communicator) -> Result<Vec<Outcome>> {
        let (rank, ranks) = (comm.rank(), comm.size());
        let mut experts = self.model.experts[experts_of(rank, ranks, self.shape.experts)].to_vec();
        if self.spoiled == Some(rank) {
            let mut spoiled = Expert::clone(&experts[0]);
            spoiled.down[0] += 1.0;
            experts[0] = Arc::new(spoiled);
        }
        let first_token = |rank: u32| self.shape.tokens * rank as usize / ranks as usize;
        let tokens = first_token(rank)..first_token(rank + 1);
        let run = |mode: Mode| {
            let (router, count) = (&self.model.router, tokens.len());
            let layer = Layer::new(comm, self.shape, router, experts.clone(), count, mode.1)?;
            let outcome = self.measure(comm, mode, &layer, tokens.clone())?;
            layer.free()?;
            Ok(outcome)
        };
        MODES.into_iter().map(run).collect()
    }

    /// Runs the layer once for each iteration, and compares the results of this rank's `tokens`.
    fn measure(
        &self,
        comm: &Communicator,
        (_, _, is_graph): Mode,
        layer: &Layer,
        tokens: Range<usize>,
    ) -> Result<Outcome> {
        comm.warm_up()?;
        let graph = is_graph.then(|| layer.capture()).transpose()?;
        let elements = tokens.start * self.shape.hidden..tokens.end * self.shape.hidden;
        let (mut times, mut difference) = (Vec::new(), None);
        for (iteration, case) in (0..self.iterations).zip(self.cases.iter().cycle()) {
            layer.write(&case.tokens[elements.clone()])?;
            comm.barrier()?;
            let start = Instant::now();
            match &graph {
                Some(graph) => graph.run(comm.stream())?,
                None => layer.enqueue()?,
            }
            comm.synchronize()?;
            times.push(Times {
                total: start.elapsed(),
                parts: layer.times(),
            });
            let results = layer.read()?;
            let mut pairs = results.iter().zip(&case.expected[elements.clone()]);
            let first = pairs.position(|(found, expected)| found != expected);
            // Continues after a difference, because the other ranks wait for this rank's calls.
            difference = difference.or(first.map(|at| Difference {
                iteration,
                index: elements.start + at,
                found: results[at],
            }));
        }
        times.sort();
        Ok(Outcome {
            times: times[times.len() / 2],
            difference,
        })
    }
}
