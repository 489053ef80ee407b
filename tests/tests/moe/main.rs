//! Tests mixture-of-experts dispatch and combine on ranks that are threads or processes.

mod conformance;
mod errors;
mod sequences;

use core::error::Error;

use fusewire::testing::GridMode;
use fusewire::{Communicator, Dispatched, Moe};
use fusewire_tests::device::{device, grid_mode};
use fusewire_tests::moe::{
    Buffers, Expected, Expert, GROUP, Inputs, LAYOUTS, MoeCase, PAYLOADS, check_dispatched,
    expected, inputs, outputs, results, run,
};
use fusewire_tests::runner::{Setup, Threads};
use fusewire_tests::skip::skip;

/// An error of the library, or a description of a wrong result.
type AnyError = Box<dyn Error + Send + Sync>;

/// Returns true if the device supports the setup. Skips the setup otherwise.
fn is_supported(setup: &Setup) -> bool {
    let is_supported = setup.team == 0 || !device().is_gpu();
    if !is_supported {
        skip("network", "the network for tests connects ranks on the CPU");
    }
    is_supported
}

/// Runs `test` on every rank. If a network connects the ranks, runs it also on hosts of as many
/// ranks. Panics with the errors of all ranks.
fn all(setup: Setup, test: impl Fn(&Communicator) -> Result<(), AnyError> + Sync) {
    if !is_supported(&setup) {
        return;
    }
    all_on(setup, &test);
    if setup.team > 0 {
        let hosts = Setup {
            team: 0,
            hosts: setup.team,
            ..setup
        };
        all_on(hosts, &test);
    }
}

fn all_on(setup: Setup, test: &(impl Fn(&Communicator) -> Result<(), AnyError> + Sync)) {
    let ranks = Threads.each(&setup, |comm| {
        test(&comm).map_err(|error| format!("rank {}: {error}", comm.rank()))
    });
    let wrong: Vec<String> = ranks.into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "{setup:?}:\n{}", wrong.join("\n"));
}

/// Runs each case for `rounds` rounds.
fn run_cases(setup: Setup, cases: &[MoeCase], rounds: usize) {
    all(setup, |comm| {
        for case in cases {
            run(comm, case, rounds)?;
        }
        Ok(())
    });
}

/// Returns one case for each layout and payload.
fn formats(case: &MoeCase) -> Vec<MoeCase> {
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        for payload in PAYLOADS {
            cases.push(MoeCase {
                layout,
                payload,
                ..case.clone()
            });
        }
    }
    cases
}

/// Returns one case for each layout and payload in low latency mode, and one for each payload in
/// high throughput mode, with 4 tokens in a round.
fn modes(case: &MoeCase) -> Vec<MoeCase> {
    let mut cases = formats(case);
    let staged = formats(case).into_iter().step_by(2);
    cases.extend(staged.map(|case| case.staged(4)));
    cases
}

/// A case with rows of two groups, so that every payload supports it.
fn two_groups() -> MoeCase {
    MoeCase {
        uneven: true,
        ..MoeCase::new(7, 3, 2 * GROUP, 9)
    }
}

/// Returns true if each rank launches separately. Skips the test for the reason `why` otherwise.
fn launches_separately(why: &str) -> bool {
    let launches_separately = grid_mode() != GridMode::MultiRankGrid;
    if !launches_separately {
        skip("separate", why);
    }
    launches_separately
}

/// A layer with its memory on a rank.
struct Layer<'a> {
    comm: &'a Communicator,
    case: MoeCase,
    moe: Moe,
    buffers: Buffers,
}

impl<'a> Layer<'a> {
    fn new(comm: &'a Communicator, case: &MoeCase) -> fusewire::Result<Self> {
        let moe = Moe::new(comm, &case.config())?;
        let buffers = Buffers::new(comm, case, moe.info())?;
        Ok(Self {
            comm,
            case: case.clone(),
            moe,
            buffers,
        })
    }

    /// Returns the inputs of this rank in round `round`.
    fn inputs(&self, round: usize) -> Inputs {
        inputs(&self.case, self.comm.rank(), round)
    }

    /// Returns the expected results of the dispatch of round `round`.
    fn expected(&self, round: usize) -> Expected {
        expected(&self.case, self.comm.size(), self.comm.rank(), round)
    }

    /// Dispatches the tokens of round `round`.
    fn dispatch(&self, round: usize) -> fusewire::Result<Dispatched> {
        let it = self.buffers.write(&self.case, &self.inputs(round))?;
        self.moe.dispatch(&it.x, &it.ids, &it.weights)
    }

    /// Compares the results of the dispatch of round `round` with the expected results.
    fn check_dispatched(&self, dispatched: &Dispatched, round: usize) -> Result<(), String> {
        let expected = self.expected(round);
        check_dispatched(&self.case, self.moe.info(), dispatched, &expected, false)
            .map_err(|wrong| format!("{:?}, round {round}: {wrong}", self.case))
    }

    /// Writes the results of `expert` for the rows of round `round`.
    fn write_results(&self, round: usize, expert: Expert) -> fusewire::Result<()> {
        let count = self.moe.info().results;
        let y = results(&self.case, &self.expected(round), count, expert);
        self.buffers.y.copy_from_bytes(&y)
    }

    /// Combines the results of a dispatch.
    fn combine(&self, dispatched: &Dispatched, round: usize) -> fusewire::Result<()> {
        let it = self
            .buffers
            .arguments(&self.case, self.inputs(round).tokens)?;
        self.moe.combine(&self.buffers.y, dispatched, &it.out)
    }

    /// Compares the results of the tokens of round `round` with the expected results.
    fn check(&self, round: usize, expert: Expert) -> Result<(), String> {
        self.buffers
            .check(
                &self.case,
                &outputs(&self.case, &self.inputs(round), expert),
            )
            .map_err(|wrong| format!("{:?}, round {round}: {wrong}", self.case))
    }

    /// Combines the results of `expert` for the dispatch of round `round`, and checks them.
    fn finish(
        &self,
        dispatched: &Dispatched,
        round: usize,
        expert: Expert,
    ) -> Result<(), AnyError> {
        self.write_results(round, expert)?;
        self.combine(dispatched, round)?;
        self.comm.synchronize()?;
        self.check(round, expert)?;
        Ok(())
    }
}
