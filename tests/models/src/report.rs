//! Explores models and prints one line per model. The line states the number of executions and
//! whether the exploration was complete or bounded, or it describes the failure that was found.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fusewire_device::mem::model::{self, Fault};

use crate::scenario::Scenario;

/// Bound of an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// loom: every execution.
    Exhaustive,
    /// loom: every execution with at most this many preemptions of runnable threads.
    Preemptions(usize),
    /// shuttle: this many random schedules.
    Random(usize),
    /// shuttle: probabilistic concurrency testing with this many schedules and this many priority
    /// changes per schedule.
    Pct(usize, usize),
}

/// Required result of an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// No execution fails.
    Passes,
    /// At least one execution fails. This is a negative control.
    Caught,
}

/// A model and the parameters of its exploration.
#[derive(Debug)]
pub struct Entry {
    /// Name of the model in the table.
    pub name: String,
    /// Bound of the exploration.
    pub bound: Bound,
    /// Required result.
    pub expected: Expected,
    /// Ordering guarantee that the simulated memory omits, if any.
    pub fault: Option<Fault>,
    /// Nanoseconds that the clock advances at each read.
    pub tick_ns: u64,
    /// Time limit in seconds. An exploration that reaches it is reported as bounded.
    pub seconds: u64,
    /// Launches and memory to explore.
    pub scenario: Scenario,
}

impl Entry {
    /// Creates a model that must pass.
    pub fn model(name: &str, bound: Bound, scenario: Scenario) -> Self {
        Self {
            name: name.to_owned(),
            bound,
            expected: Expected::Passes,
            fault: None,
            tick_ns: 0,
            seconds: 40,
            scenario,
        }
    }

    /// Creates a negative control. The exploration must find a failing execution.
    pub fn control(name: &str, bound: Bound, fault: Option<Fault>, scenario: Scenario) -> Self {
        Self {
            expected: Expected::Caught,
            fault,
            ..Self::model(name, bound, scenario)
        }
    }

    /// Sets the number of nanoseconds that the clock advances at each read.
    #[must_use]
    pub fn tick(self, tick_ns: u64) -> Self {
        Self { tick_ns, ..self }
    }

    /// Sets the time limit.
    #[must_use]
    pub fn within(self, seconds: u64) -> Self {
        Self { seconds, ..self }
    }

    /// Explores the model for at most `limit` with another fault. Returns the message of a failing
    /// execution, if there is one, and the places of the memory operations that were executed.
    #[cfg(loom)]
    pub(crate) fn explore_with(
        self,
        fault: Option<Fault>,
        limit: Duration,
    ) -> (Option<String>, Vec<model::Site>) {
        model::inject(fault);
        model::set_tick(self.tick_ns);
        QUIET.set(true);
        let scenario = self.scenario.with_own_memory();
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            explore(self.bound, limit, move || scenario.execute());
        }));
        let failure = result.err().map(|panic| message(&*panic));
        (failure, model::sites())
    }

    /// Explores the model. Returns the model's line of the table, and true if the result is as
    /// required.
    fn run(self) -> (String, bool) {
        model::inject(self.fault);
        model::set_tick(self.tick_ns);
        QUIET.set(self.expected == Expected::Caught);
        let executions = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&executions);
        let scenario = self.scenario.with_own_memory();
        let start = Instant::now();
        let limit = match self.expected {
            Expected::Passes => longest(),
            // A control ends when it is caught, so this limit costs no time.
            Expected::Caught => longest().saturating_mul(4),
        };
        let limit = limit.min(Duration::from_secs(self.seconds));
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            explore(self.bound, limit, move || {
                counter.fetch_add(1, Ordering::Relaxed);
                scenario.execute();
            });
        }));
        let elapsed = start.elapsed();
        let executions = executions.load(Ordering::Relaxed);
        let seconds = limit.as_secs_f64();
        let (outcome, good) = match (&result, self.expected) {
            (Ok(()), Expected::Passes) => {
                let coverage = match self.bound {
                    Bound::Exhaustive if elapsed < limit => "complete".to_owned(),
                    Bound::Exhaustive => format!("bounded (seconds={seconds})"),
                    Bound::Preemptions(n) if elapsed < limit => {
                        format!("bounded (preemptions={n})")
                    }
                    Bound::Preemptions(n) => {
                        format!("bounded (preemptions={n}, seconds={seconds})")
                    }
                    Bound::Random(_) => "bounded (random schedules)".to_owned(),
                    Bound::Pct(_, depth) => format!("bounded (PCT schedules, depth={depth})"),
                };
                (format!("executions: {executions}, {coverage}"), true)
            }
            (Ok(()), Expected::Caught) => (format!("executions: {executions}, NOT CAUGHT"), false),
            (Err(panic), Expected::Caught) => (
                format!("caught in execution {executions}: {}", message(&**panic)),
                true,
            ),
            (Err(panic), Expected::Passes) => (
                format!("FAILED in execution {executions}: {}", message(&**panic)),
                false,
            ),
        };
        let line = format!(
            "{:<58} {outcome} [{:.1} s]",
            self.name,
            elapsed.as_secs_f64()
        );
        (line, good)
    }
}

/// Returns the time limit of every exploration, which `FUSEWIRE_MODEL_SECONDS` sets.
fn longest() -> Duration {
    let text = std::env::var("FUSEWIRE_MODEL_SECONDS").ok();
    text.map_or(Duration::MAX, |text| {
        let seconds = text.parse().ok();
        seconds
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .expect("FUSEWIRE_MODEL_SECONDS is a number of seconds")
    })
}

std::thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

#[cfg(loom)]
fn explore(bound: Bound, limit: Duration, execution: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.checkpoint_interval = 100;
    builder.max_duration = Some(limit);
    builder.preemption_bound = match bound {
        Bound::Preemptions(n) => Some(n),
        _ => None,
    };
    builder.check(execution);
}

#[cfg(shuttle)]
fn explore(bound: Bound, limit: Duration, execution: impl Fn() + Send + Sync + 'static) {
    use shuttle::scheduler::{PctScheduler, RandomScheduler};
    use shuttle::{Config, FailurePersistence, MaxSteps, Runner};
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(2_000_000);
    config.max_time = Some(limit);
    config.silence_warnings = true;
    // Fixed seeds make failures reproducible.
    match bound {
        Bound::Pct(schedules, depth) => {
            let scheduler = PctScheduler::new_from_seed(0xf05e, depth, schedules);
            Runner::new(scheduler, config).run(execution);
        }
        Bound::Random(schedules) | Bound::Preemptions(schedules) => {
            let scheduler = RandomScheduler::new_from_seed(0xf05e, schedules);
            Runner::new(scheduler, config).run(execution);
        }
        Bound::Exhaustive => unreachable!("shuttle cannot explore exhaustively"),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without a message");
    let line: String = text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    line.chars().take(150).collect()
}

/// Prevents the messages of panics that are expected.
pub(crate) fn quieten() {
    let previous = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !QUIET.get() {
            previous(info);
        }
    }));
}

/// Runs all entries whose name contains the program's first argument and prints the table.
///
/// Runs each entry in a new OS thread, with at most one running entry per core. Returns failure if
/// a result is not as required, or if no entry matches.
pub fn run(tool: &str, entries: Vec<Entry>) -> ExitCode {
    let filter = std::env::args().nth(1).unwrap_or_default();
    quieten();
    let chosen: VecDeque<Entry> = entries
        .into_iter()
        .filter(|entry| entry.name.contains(&filter))
        .collect();
    let total = chosen.len();
    let queue = Mutex::new(chosen);
    let bad = AtomicU64::new(0);
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let next = queue
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .pop_front();
                    let Some(entry) = next else {
                        return;
                    };
                    // Each entry runs in a new thread, because the thread-locals of the model
                    // checker are not usable after a failure.
                    let name = entry.name.clone();
                    let (line, good) = thread::spawn(move || entry.run())
                        .join()
                        .unwrap_or_else(|_| (format!("{name} the model checker panicked"), false));
                    println!("{tool}: {line}");
                    if !good {
                        bad.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let bad = bad.load(Ordering::Relaxed);
    println!("{tool}: {total} models and controls, {bad} not as expected");
    if bad == 0 && total > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
