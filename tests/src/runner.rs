//! Ways to start ranks, and settings of their communicators. To add a way to start ranks, implement
//! [`Runner`]. The cases and checks do not change.

use core::time::Duration;
use std::sync::{Arc, RwLock};
use std::thread;

use fusewire::bootstrap::RankSize;
use fusewire::store::{MemoryStore, Store};
use fusewire::testing::GridMode;
use fusewire::testing::TestNetwork;
use fusewire::{Algorithm, Communicator, Determinism, Error, Operation, Options, new_comm};

use crate::backends;
use crate::cases::{self, Case};
use crate::device::{as_rank, device_of, grid_mode};
use crate::process::{self, Host, Ranks};
use crate::rank::{CallMode, Rank};
use crate::skip::skip;

/// Algorithms of all_reduce whose results have the same bits.
pub const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::Packet,
    Algorithm::PacketTwoShot,
    Algorithm::Signal,
    Algorithm::TwoShot,
];

/// Settings of a run of a list of cases.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setup {
    /// Backend.
    pub backend: &'static str,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of lanes of a block.
    pub lanes: u32,
    /// Number of lanes of a warp. 0 selects the default.
    pub warp: u32,
    /// Number of blocks of a launch.
    pub blocks: u32,
    /// Algorithm of all_reduce.
    pub algorithm: Algorithm,
    /// Form of calls.
    pub mode: CallMode,
    /// Size of staging in bytes. A small size causes many rounds.
    pub staging: u64,
    /// Value of the first epoch.
    pub first_epoch: u64,
    /// If not 0, the number of ranks of the teams that a network for tests connects. Only for ranks
    /// that are threads.
    pub team: u32,
    /// Number of successive ranks that count as one host, or 0 if all ranks are on one host. Hosts
    /// are connected by TCP.
    pub hosts: u32,
}

/// Returns the options twice: for teams of `team` ranks that a network for tests connects, with
/// this seed, and for hosts of as many ranks, which TCP connects.
pub fn of_networks(options: &Options, team: u32, seed: u64) -> [Options; 2] {
    let (mut disordered, mut by_proxy) = (options.clone(), options.clone());
    disordered.testing.network = Some(TestNetwork { team, seed });
    by_proxy.testing.ranks_per_host = Some(team);
    [disordered, by_proxy]
}

impl Setup {
    /// Returns the default settings for `ranks` ranks, with staging small enough for many rounds.
    pub fn new(ranks: u32) -> Self {
        Self {
            backend: "fusewire",
            ranks,
            lanes: 1,
            warp: 0,
            blocks: 1,
            algorithm: Algorithm::Auto,
            mode: CallMode::Blocking,
            staging: (u64::from(ranks) * 512).max(16 << 10),
            first_epoch: 0,
            team: 0,
            hosts: 0,
        }
    }

    /// Returns the options of a communicator with these settings.
    pub fn options(&self) -> Options {
        let mut options = Options::default();
        options.timeout = Duration::from_secs(60);
        // Tests run concurrently, so a long wait must yield the core.
        options.testing.spins = Some(200);
        (options.testing.lanes, options.testing.warp) = (self.lanes, self.warp);
        options.blocks = self.blocks;
        options.algorithm = self.algorithm;
        options.staging_bytes = self.staging;
        options.packet_slot_bytes = 4096;
        options.channel_slot_bytes = 2048;
        options.channel_depth = 3;
        options.testing.first_epoch = self.first_epoch;
        options.abort_process_on_timeout_or_error = Some(false);
        if self.team > 0 {
            options.testing.network = Some(TestNetwork {
                team: self.team,
                seed: u64::from(self.ranks),
            });
        }
        if self.hosts > 0 {
            options.testing.ranks_per_host = Some(self.hosts);
        }
        if !backends::is_bitwise(self.backend) || self.algorithm == Algorithm::Nvls {
            options.determinism = Determinism::Any;
        }
        options
    }

    /// Creates a communicator with these settings. If the ranks are threads, `thread` holds this
    /// thread's rank and the shared store. If `thread` is `None`, rank and store come from the
    /// environment.
    ///
    /// # Errors
    /// Returns the errors of [`new_comm`].
    pub fn communicator(
        &self,
        thread: Option<(u32, Arc<dyn Store>)>,
    ) -> Result<Communicator, Error> {
        let mut options = self.options();
        let rank = match thread {
            Some((rank, store)) => {
                options.store = Some(store);
                options.rank_size = Some((rank, self.ranks));
                options.testing.grid_mode = grid_mode();
                rank
            }
            None => RankSize::from_env()?.rank,
        };
        backends::register(self.backend);
        new_comm(self.backend, device_of(rank), "conformance", options)
    }

    /// Encodes the settings as text for a child's environment.
    fn encode(&self) -> String {
        let mode = match self.mode {
            CallMode::Blocking => 0,
            CallMode::Async => 1,
            CallMode::Graph => 2,
        };
        format!(
            "{} {} {} {} {} {} {mode} {} {}",
            self.backend,
            self.ranks,
            self.lanes,
            self.warp,
            self.blocks,
            self.algorithm,
            self.staging,
            self.first_epoch
        )
    }

    fn decode(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(' ').collect();
        let [
            backend,
            ranks,
            lanes,
            warp,
            blocks,
            algorithm,
            mode,
            staging,
            first_epoch,
        ] = words[..]
        else {
            return None;
        };
        Some(Self {
            backend: backends::NAMES.into_iter().find(|name| *name == backend)?,
            ranks: ranks.parse().ok()?,
            lanes: lanes.parse().ok()?,
            warp: warp.parse().ok()?,
            blocks: blocks.parse().ok()?,
            algorithm: algorithm.parse().ok()?,
            mode: [CallMode::Blocking, CallMode::Async, CallMode::Graph]
                [mode.parse::<usize>().ok()? % 3],
            staging: staging.parse().ok()?,
            first_epoch: first_epoch.parse().ok()?,
            team: 0,
            hosts: 0,
        })
    }
}

/// A way to start ranks.
pub trait Runner {
    /// Runs the list `list` with `setup` on every rank. Returns the number of calls that one rank
    /// made.
    ///
    /// # Errors
    /// Returns a description of the wrong results with their rank.
    fn run(&self, setup: &Setup, list: &str) -> Result<u64, String>;
}

/// Ranks as threads of this process, on the device of the tests.
#[derive(Clone, Copy, Debug)]
pub struct Threads;

impl Runner for Threads {
    fn run(&self, setup: &Setup, list: &str) -> Result<u64, String> {
        Self.run_cases(setup, &cases::list(list, setup.ranks))
    }
}

impl Threads {
    /// Runs `cases` with `setup` on every rank. Returns the number of calls that one rank made.
    ///
    /// # Errors
    /// Returns a description of the wrong results with their rank.
    pub fn run_cases(&self, setup: &Setup, cases: &[Case]) -> Result<u64, String> {
        if grid_mode() == GridMode::MultiRankGrid && setup.mode == CallMode::Graph {
            skip(
                "separate",
                "launches in a multi-rank grid cannot be captured",
            );
            return Ok(0);
        }
        let results = self.each(setup, |comm| run_rank(comm, setup, cases));
        let mut calls = 0;
        for result in results {
            calls = result?;
        }
        Ok(calls)
    }

    /// Runs `body` on every rank of a communicator with `setup`.
    ///
    /// # Panics
    /// Panics if a rank panics.
    pub fn each<R: Send>(
        &self,
        setup: &Setup,
        body: impl Fn(Communicator) -> Result<R, String> + Sync,
    ) -> Vec<Result<R, String>> {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let running = RwLock::new(());
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..setup.ranks)
                .map(|rank| {
                    let (store, body, running) = (Arc::clone(&store), &body, &running);
                    scope.spawn(move || {
                        // All ranks have this before the first has a communicator.
                        let runs = running.read();
                        let comm = setup.communicator(Some((rank, store)));
                        let comm = comm.map_err(|error| format!("rank {rank}, {setup:?}: {error}"));
                        as_rank(rank, || {
                            let comm = comm?;
                            let result = body(comm.clone());
                            drop(runs);
                            if result.is_ok() {
                                // Leaves when all ranks have returned. On the emulator with weak
                                // memory, a rank may see that another one has left, and not yet
                                // see its last signal.
                                drop(running.write());
                            }
                            result
                        })
                    })
                })
                .collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().expect("no panic"))
                .collect()
        })
    }
}

/// Ranks as processes on the device of the tests. Each process runs the test function `test`, which
/// must begin with [`Processes::child`].
#[derive(Clone, Copy, Debug)]
pub struct Processes {
    /// Name of the test function.
    pub test: &'static str,
    /// The process that serves the store.
    pub host: Host,
}

const LIST: &str = "FUSEWIRE_TEST_LIST";
const SETUP: &str = "FUSEWIRE_TEST_SETUP";

impl Processes {
    /// If this process is a child, runs the list that the parent requested and returns true.
    /// Otherwise, returns false.
    ///
    /// # Panics
    /// Panics if a result is wrong. The parent reports the panic.
    pub fn child() -> bool {
        if process::role().as_deref() != Some("conformance") {
            return false;
        }
        let variable = |name| std::env::var(name).expect("set by the parent");
        let setup = Setup::decode(&variable(SETUP)).expect("the parent's settings");
        let comm = setup
            .communicator(None)
            .expect("a communicator from the environment");
        match run_rank(comm, &setup, &cases::list(&variable(LIST), setup.ranks)) {
            Ok(calls) => process::report(calls),
            Err(wrong) => panic!("{wrong}"),
        }
        true
    }
}

impl Processes {
    /// Starts the test on every rank. Each child passes `argument` to [`Processes::child_of_each`].
    /// Returns the reports of the ranks.
    ///
    /// # Errors
    /// Returns a description of the wrong results with their rank.
    pub fn each(
        &self,
        setup: &Setup,
        argument: &str,
        bound: Duration,
    ) -> Result<Vec<String>, String> {
        self.start(setup, "each", argument, bound)
    }

    /// If this process is a child of [`Processes::each`], runs `body` with a communicator and the
    /// argument, reports the result, and returns true. Otherwise, returns false.
    ///
    /// # Panics
    /// Panics if `body` returns an error. The parent reports the panic.
    pub fn child_of_each(body: impl FnOnce(Communicator, &str) -> Result<String, String>) -> bool {
        if process::role().as_deref() != Some("each") {
            return false;
        }
        let variable = |name| std::env::var(name).expect("set by the parent");
        let setup = Setup::decode(&variable(SETUP)).expect("the parent's settings");
        let comm = setup
            .communicator(None)
            .expect("a communicator from the environment");
        match body(comm, &variable(LIST)) {
            Ok(said) => process::report(said),
            Err(wrong) => panic!("{wrong}"),
        }
        true
    }

    fn start(
        &self,
        setup: &Setup,
        role: &str,
        argument: &str,
        bound: Duration,
    ) -> Result<Vec<String>, String> {
        let environment = [(LIST, argument.to_owned()), (SETUP, setup.encode())];
        let mut ranks = Ranks::start(self.test, role, setup.ranks, self.host, &environment);
        let processes = ranks.processes.iter_mut();
        let said: Vec<String> = processes
            .map(|process| process.next_report(bound))
            .collect::<Result<_, _>>()?;
        ranks.succeed(bound)?;
        Ok(said)
    }
}

impl Runner for Processes {
    fn run(&self, setup: &Setup, list: &str) -> Result<u64, String> {
        if grid_mode() == GridMode::MultiRankGrid {
            skip("separate", "ranks of a multi-rank grid are threads");
            return Ok(0);
        }
        let said = self.start(setup, "conformance", list, Duration::from_secs(300))?;
        let calls = said.last().ok_or("there are no ranks")?;
        calls.parse().map_err(|_| calls.clone())
    }
}

/// Runs cases on one rank. Returns the number of calls.
fn run_rank(comm: Communicator, setup: &Setup, cases: &[Case]) -> Result<u64, String> {
    let failed = |error: fusewire::Error| format!("{setup:?}: {error}");
    // Backends that do not reduce in rank order need inputs for which every reduction order gives
    // bitwise identical results.
    let all_exact = comm
        .backend_impl()
        .is_some_and(|backend| !backend.is_bitwise());
    let mut unsupported = 0;
    let me = comm.rank();
    let mut rank = Rank::new(comm, setup.mode, cases).map_err(failed)?;
    for case in cases {
        let exact = all_exact || case.exact;
        let case = &Case { exact, ..*case };
        // A send launches a kernel on only two ranks, but a multi-rank grid starts only when every
        // rank has launched.
        let apart = case.operation == Operation::Send
            && rank.comm().options().testing.grid_mode == GridMode::MultiRankGrid;
        if apart || !backends::supports(rank.comm(), case) {
            unsupported += 1;
            continue;
        }
        rank.run(case)
            .map_err(|error| format!("{setup:?}, {case:?}: {error}"))?;
    }
    if unsupported > 0 && me == 0 {
        println!(
            "{unsupported} cases are skipped: not supported by {}, or not in a multi-rank grid",
            setup.backend
        );
    }
    let (calls, wrong) = rank.finish();
    if wrong.is_empty() {
        return Ok(calls);
    }
    Err(format!("{setup:?}:\n{}", wrong.join("\n")))
}
