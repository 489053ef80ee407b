//! Mutants of compiled kernels: one instruction of the PTX is deleted, weakened or moved, and a check
//! of the emulator must find the error.

use core::fmt;
use core::time::Duration;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use fusewire::{
    Algorithm, CallOptions, Communicator, DType, Determinism, Options, ReduceOp, Result,
};
use fusewire_tests::device::run_threads;
use fusewire_tests::fake::Fake;
use fusewire_tests::process::{report, role, start};
use fusewire_tests::rng::Rng;

use super::emulated::EMULATED;
use super::fake_environment;

const TIMEOUT: Duration = Duration::from_secs(120);
/// Number of schedules that run each mutant.
const SEEDS: u64 = 3;
/// Number of ranks and elements of the scenarios.
const RANKS: u32 = 3;
const COUNT: usize = 700;

/// A kernel, and calls that launch it.
struct Scenario {
    kernel: &'static str,
    algorithm: Algorithm,
    run: fn(&Communicator, u32) -> Result<bool>,
}

/// One scenario for each protocol.
const SCENARIOS: [Scenario; 6] = [
    Scenario {
        kernel: "all_reduce_packet_f32_sum",
        algorithm: Algorithm::Packet,
        run: all_reduce,
    },
    Scenario {
        kernel: "all_reduce_signal_f32_sum",
        algorithm: Algorithm::Signal,
        run: all_reduce,
    },
    Scenario {
        kernel: "all_reduce_nvls_f32",
        algorithm: Algorithm::Nvls,
        run: all_reduce,
    },
    Scenario {
        kernel: "all_gather",
        algorithm: Algorithm::Auto,
        run: all_gather,
    },
    Scenario {
        kernel: "send",
        algorithm: Algorithm::Auto,
        run: ring,
    },
    Scenario {
        kernel: "recv",
        algorithm: Algorithm::Auto,
        run: ring,
    },
];

/// Returns the contribution of a rank to a round.
fn values(rank: u32, round: u32) -> Vec<f32> {
    let value = |at: usize| (at as u32 % 97 + 100 * rank + 1000 * round) as f32;
    (0..COUNT).map(value).collect()
}

/// Reduces a tensor. A second launch, which starts when the first one has ended on this rank, reads
/// the sums.
fn all_reduce(comm: &Communicator, round: u32) -> Result<bool> {
    let x = comm.alloc(DType::F32, COUNT)?;
    let all = comm.alloc(DType::F32, COUNT * comm.size() as usize)?;
    x.copy_from(&values(comm.rank(), round))?;
    let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
    comm.all_gather_single(&all, &x)?;
    work.wait_blocking()?;
    let rows: Vec<_> = (0..comm.size()).map(|rank| values(rank, round)).collect();
    let sum = |at: usize| rows.iter().map(|row| row[at]).sum();
    let sums: Vec<f32> = (0..COUNT).map(sum).collect();
    Ok(all.to_vec::<f32>()? == sums.repeat(comm.size() as usize))
}

fn all_gather(comm: &Communicator, round: u32) -> Result<bool> {
    let x = comm.alloc(DType::F32, COUNT)?;
    let all = comm.alloc(DType::F32, COUNT * comm.size() as usize)?;
    x.copy_from(&values(comm.rank(), round))?;
    comm.all_gather_single(&all, &x)?;
    let rows = (0..comm.size()).flat_map(|rank| values(rank, round));
    Ok(all.to_vec::<f32>()? == rows.collect::<Vec<_>>())
}

/// Sends around the ranks. The channel of the test has fewer slots than the message needs.
fn ring(comm: &Communicator, round: u32) -> Result<bool> {
    let (rank, size) = (comm.rank(), comm.size());
    let (x, y) = (
        comm.alloc(DType::F32, COUNT)?,
        comm.alloc(DType::F32, COUNT)?,
    );
    x.copy_from(&values(rank, round))?;
    let before = (rank + size - 1) % size;
    if rank == 0 {
        comm.send(&x, 1)?;
        comm.recv(&y, before)?;
    } else {
        comm.recv(&y, before)?;
        comm.send(&x, (rank + 1) % size)?;
    }
    Ok(y.to_vec::<f32>()? == values(before, round))
}

/// Runs a scenario in this process, which uses the fake.
fn play(scenario: &Scenario) {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(2);
    options.blocks = 2;
    options.staging_bytes = 16 << 10;
    options.channel_slot_bytes = 512;
    options.channel_depth = 2;
    options.abort_process_on_timeout_or_error = Some(false);
    if scenario.algorithm == Algorithm::Nvls {
        options.determinism = Determinism::Any;
    }
    let results = run_threads(RANKS, &options, |comm| {
        let hint = CallOptions::new().hint("algorithm", scenario.algorithm.name());
        let by = comm.with_options(&hint)?;
        for round in 0..4 {
            if !(scenario.run)(&by, round)? {
                return Ok(false);
            }
        }
        Ok(true)
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(true) => {}
            Ok(false) => panic!("wrong result on rank {rank}"),
            Err(error) => panic!("rank {rank}: {error}"),
        }
    }
}

/// A change of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    Delete,
    /// Replaces a part of the instruction.
    Replace(&'static str, &'static str),
    /// Executes the instruction in some lanes only.
    Diverge,
    /// Adds 8 bytes to the address.
    Shift,
}

impl Mutation {
    /// Returns the mutated instruction, or `None` if the mutation does not apply.
    fn apply(self, text: &str) -> Option<String> {
        let changed = match self {
            Self::Delete => String::new(),
            Self::Replace(from, to) => text.replacen(from, to, 1),
            Self::Diverge => format!(
                "{{ .reg .pred %mutant; .reg .b32 %lane_of_mutant; \
                 mov.u32 %lane_of_mutant, %tid.x; \
                 setp.lt.u32 %mutant, %lane_of_mutant, 40; @%mutant {text} }}"
            ),
            Self::Shift => {
                let (start, rest) = text.split_once('[')?;
                let (address, end) = rest.split_once(']')?;
                let (base, offset) = address.split_once('+').unwrap_or((address, "0"));
                let offset = offset.parse::<i64>().ok()? + 8;
                format!("{start}[{base}+{offset}]{end}")
            }
        };
        (changed != text).then_some(changed)
    }
}

/// A mutant: a line after the entry of the kernel of a scenario, and its new text.
#[derive(Clone, Debug)]
struct Mutant {
    scenario: usize,
    line: usize,
    old: String,
    new: String,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} line {}: `{}` becomes `{}`",
            SCENARIOS[self.scenario].kernel, self.line, self.old, self.new
        )
    }
}

/// The check that has found a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Check {
    Race,
    Constant,
    Uninitialized,
    Address,
    Divergence,
    Hang,
    /// A wrong result, or an error of the library.
    Result,
}

impl Check {
    fn of(output: &str) -> Self {
        let checks = [
            ("the emulator does not support", None),
            ("races with another thread", Some(Self::Race)),
            ("during the launch", Some(Self::Constant)),
            (
                "that no thread of the block has written",
                Some(Self::Uninitialized),
            ),
            ("no memory of this address", Some(Self::Address)),
            ("not a multiple of", Some(Self::Address)),
            ("bytes at", Some(Self::Address)),
            (
                "does not execute the aligned barrier",
                Some(Self::Divergence),
            ),
            ("all threads wait for each other", Some(Self::Divergence)),
            ("timed out", Some(Self::Hang)),
            ("no progress", Some(Self::Hang)),
        ];
        match checks.iter().find(|(text, _)| output.contains(text)) {
            Some((_, Some(check))) => *check,
            Some((_, None)) => panic!("not PTX: {output}"),
            None => Self::Result,
        }
    }
}

/// Runs a scenario in a child process with a scheduler seed, with `patch` as the value of
/// `FUSEWIRE_CUDA_FAKE_PATCH`. Returns the child's report, or its output.
fn child(
    test: &str,
    scenario: usize,
    seed: u64,
    patch: Option<&str>,
) -> core::result::Result<String, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let (number, scheduler) = (scenario.to_string(), format!("random:{seed}"));
    let mut environment = EMULATED.to_vec();
    environment.extend([
        ("FUSEWIRE_CUDA_FAKE_MULTICAST", "1"),
        ("FUSEWIRE_CUDA_FAKE_MEMORY_MODEL", "weak"),
        ("FUSEWIRE_CUDA_FAKE_SCHEDULER", scheduler.as_str()),
        ("SCENARIO", number.as_str()),
    ]);
    environment.extend(patch.map(|patch| ("FUSEWIRE_CUDA_FAKE_PATCH", patch)));
    let all = fake_environment(folder.path(), &environment);
    let mut child = start(test, "fake", &all);
    let reported = child.next_report(TIMEOUT);
    child.signal(9);
    reported
}

/// The body of a child: runs the scenario, and reports the executed lines of its kernel.
fn run_child() {
    let number = std::env::var("SCENARIO").expect("set by the parent");
    let scenario = &SCENARIOS[number.parse::<usize>().expect("a number")];
    play(scenario);
    let fake = Fake::open().expect("the fake");
    let lines = fake.executed(&CString::new(scenario.kernel).expect("a name"));
    assert!(!lines.is_empty(), "{} was not launched", scenario.kernel);
    let lines: Vec<String> = lines
        .iter()
        .map(|(line, text)| format!("{line} {text}"))
        .collect();
    report(lines.join("\u{1}").replace('\n', " "));
}

/// Returns the lines of a scenario's kernel that threads execute.
fn executed(test: &str, scenario: usize) -> Vec<(usize, String)> {
    let reported = child(test, scenario, 0, None);
    let lines = reported.unwrap_or_else(|output| panic!("without a mutation: {output}"));
    let parse = |line: &str| {
        let (number, text) = line.split_once(' ').expect("a number and a text");
        (number.parse().expect("a number"), text.trim().to_owned())
    };
    lines.split('\u{1}').map(parse).collect()
}

/// Runs a mutant with several schedules. Returns the check that finds it.
fn find(test: &str, mutant: &Mutant) -> Option<Check> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join(SCENARIOS[mutant.scenario].kernel);
    std::fs::write(&file, &mutant.new).expect("a file");
    let patch = format!("{}:{}", Path::new(&file).display(), mutant.line);
    (1..=SEEDS).find_map(|seed| {
        let reported = child(test, mutant.scenario, seed, Some(&patch));
        reported.err().map(|output| Check::of(&output))
    })
}

/// Runs mutants on two threads. Returns the checks that find them.
fn find_all(test: &str, mutants: &[Mutant]) -> Vec<Option<Check>> {
    let found: Vec<Mutex<Option<Check>>> = mutants.iter().map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(mutant) = mutants.get(at) else {
                        return;
                    };
                    *found[at].lock().expect("no panic") = find(test, mutant);
                }
            });
        }
    });
    found
        .into_iter()
        .map(|it| it.into_inner().expect("no panic"))
        .collect()
}

/// Instructions that mutants change.
const MUTATED: [&str; 9] = [
    "ld.global",
    "ld.relaxed",
    "ld.acquire",
    "ld.shared",
    "st.",
    "atom.",
    "fence.",
    "bar.",
    "multimem.",
];

/// Returns the mutations that random mutants use, with those that apply to `text`.
fn mutations(text: &str) -> Vec<String> {
    let all = [
        Mutation::Delete,
        Mutation::Replace(".release.sys", ".relaxed.sys"),
        Mutation::Replace(".acquire.sys", ".relaxed.sys"),
        Mutation::Replace(".acq_rel.sys", ".relaxed.sys"),
        Mutation::Replace(".relaxed.sys", ""),
        Mutation::Replace(".sys", ".gpu"),
        Mutation::Replace(".sys", ".cta"),
        Mutation::Replace(".gpu", ".cta"),
        Mutation::Replace("ld.global.", "ld.global.nc."),
        Mutation::Shift,
        Mutation::Diverge,
    ];
    let is_load = text.contains("ld.") || text.contains("multimem.ld");
    let applies = |mutation: &Mutation| match mutation {
        // The result of a load would be undefined.
        Mutation::Delete => !is_load && !text.starts_with("atom"),
        Mutation::Diverge => text.starts_with("bar."),
        Mutation::Shift => !text.contains("shared"),
        _ => true,
    };
    let apply = |mutation: &Mutation| mutation.apply(text);
    all.iter()
        .filter(|it| applies(it))
        .filter_map(apply)
        .collect()
}

#[test]
#[ignore = "takes minutes; the lane emulator-long runs it"]
fn random_mutants_are_found() {
    const TEST: &str = "mutants::random_mutants_are_found";
    if role().is_some() {
        return run_child();
    }
    let count =
        std::env::var("FUSEWIRE_TEST_MUTANTS").map_or(200, |it| it.parse().expect("a number"));
    let lines: Vec<_> = (0..SCENARIOS.len()).map(|it| executed(TEST, it)).collect();
    let mut rng = Rng::new(1);
    let mut mutants: Vec<Mutant> = Vec::new();
    while mutants.len() < count {
        let scenario = mutants.len() % SCENARIOS.len();
        let (line, old) = &lines[scenario][rng.below(lines[scenario].len())];
        let is_mutated = MUTATED
            .iter()
            .any(|it| old.starts_with(it) || old.contains(" multimem."));
        let news = mutations(old);
        if !is_mutated || news.is_empty() {
            continue;
        }
        let new = news[rng.below(news.len())].clone();
        let line = *line;
        if !mutants
            .iter()
            .any(|it| it.scenario == scenario && it.line == line && it.new == new)
        {
            let old = old.clone();
            mutants.push(Mutant {
                scenario,
                line,
                old,
                new,
            });
        }
    }
    let mut counts: BTreeMap<Option<Check>, usize> = BTreeMap::new();
    for (mutant, check) in mutants.iter().zip(find_all(TEST, &mutants)) {
        *counts.entry(check).or_default() += 1;
        println!("{check:?}: {mutant}");
    }
    println!("{counts:?}");
    let survivors = counts.get(&None).copied().unwrap_or(0);
    assert!(
        survivors * 4 < mutants.len(),
        "{survivors} of {} mutants survive",
        mutants.len()
    );
}
