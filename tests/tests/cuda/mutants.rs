//! Schedules of one kernel of each protocol with the weak memory model, and mutants of these
//! kernels: one instruction of the PTX is deleted, weakened or moved, and a check of the emulator
//! must find the error.

use core::fmt;
use core::hash::{Hash as _, Hasher as _};
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::hash::DefaultHasher;
use std::path::Path;
use std::sync::Mutex;

use fusewire::{
    Algorithm, CallOptions, Communicator, DType, Determinism, Options, ReduceOp, Result, Tensor,
};
use fusewire_tests::device::run_threads;
use fusewire_tests::fake::Fake;
use fusewire_tests::process::{report, role, start};

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
    name: &'static str,
    kernel: &'static str,
    algorithm: Algorithm,
    run: fn(&Communicator, u32) -> Result<bool>,
}

/// One scenario for each protocol.
const SCENARIOS: [Scenario; 7] = [
    Scenario {
        name: "packet",
        kernel: "all_reduce_packet_f32_sum",
        algorithm: Algorithm::Packet,
        run: all_reduce,
    },
    Scenario {
        name: "signal",
        kernel: "reduce_whole_f32_sum",
        algorithm: Algorithm::Signal,
        run: all_reduce,
    },
    Scenario {
        name: "nvls",
        kernel: "all_reduce_nvls_f32",
        algorithm: Algorithm::Nvls,
        run: all_reduce,
    },
    Scenario {
        name: "gather",
        kernel: "move_rows",
        algorithm: Algorithm::Auto,
        run: all_gather,
    },
    Scenario {
        name: "send",
        kernel: "send",
        algorithm: Algorithm::Auto,
        run: ring,
    },
    Scenario {
        name: "recv",
        kernel: "recv",
        algorithm: Algorithm::Auto,
        run: ring,
    },
    Scenario {
        name: "two shots",
        kernel: "all_reduce_packet_two_shot_f32_sum",
        algorithm: Algorithm::PacketTwoShot,
        run: all_reduce,
    },
];

/// Returns the contribution of a rank to a round.
fn values(rank: u32, round: u32) -> Vec<f32> {
    let value = |at: usize| (at as u32 % 97 + 100 * rank + 1000 * round) as f32;
    (0..COUNT).map(value).collect()
}

/// Sends `x` to the next rank in launches that follow those of the stream, and receives into `y`.
/// The launches wait for no other rank than the previous one.
fn pass_on(comm: &Communicator, x: &Tensor, y: &Tensor) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.size());
    let sent = comm.send_async(x, (rank + 1) % size)?;
    comm.recv(y, (rank + size - 1) % size)?;
    sent.wait_blocking()
}

/// Reduces a tensor. Then passes the sums on.
fn all_reduce(comm: &Communicator, round: u32) -> Result<bool> {
    let (x, y) = (
        comm.alloc(DType::F32, COUNT)?,
        comm.alloc(DType::F32, COUNT)?,
    );
    x.copy_from(&values(comm.rank(), round))?;
    let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
    pass_on(comm, &x, &y)?;
    work.wait_blocking()?;
    let rows: Vec<_> = (0..comm.size()).map(|rank| values(rank, round)).collect();
    let sum = |at: usize| rows.iter().map(|row| row[at]).sum();
    let sums: Vec<f32> = (0..COUNT).map(sum).collect();
    Ok(x.to_vec::<f32>()? == sums && y.to_vec::<f32>()? == sums)
}

/// Gathers a tensor. Then overwrites the input with that of the previous rank.
fn all_gather(comm: &Communicator, round: u32) -> Result<bool> {
    let (x, y) = (
        comm.alloc(DType::F32, COUNT)?,
        comm.alloc(DType::F32, COUNT)?,
    );
    let all = comm.alloc(DType::F32, COUNT * comm.size() as usize)?;
    x.copy_from(&values(comm.rank(), round))?;
    y.copy_from(&values(comm.rank(), round))?;
    let work = comm.all_gather_single_async(&all, &x)?;
    pass_on(comm, &y, &x)?;
    work.wait_blocking()?;
    let rows = (0..comm.size()).flat_map(|rank| values(rank, round));
    let before = (comm.rank() + comm.size() - 1) % comm.size();
    Ok(all.to_vec::<f32>()? == rows.collect::<Vec<_>>()
        && x.to_vec::<f32>()? == values(before, round))
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
    // The host's threads may be late on a machine with other work. Only mutants wait in vain.
    let is_mutant = std::env::var("FUSEWIRE_CUDA_FAKE_PATCH").is_ok();
    options.timeout = Duration::from_secs(if is_mutant { 8 } else { 60 });
    options.blocks = 2;
    options.staging_bytes = 16 << 10;
    if scenario.kernel == "send" || scenario.kernel == "recv" {
        options.channel_slot_bytes = 512;
        options.channel_depth = 2;
    }
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
                "no thread of the block has written",
                Some(Self::Uninitialized),
            ),
            ("no memory of this address", Some(Self::Address)),
            ("not a multiple of", Some(Self::Address)),
            ("bytes at", Some(Self::Address)),
            (
                "does not execute the aligned barrier",
                Some(Self::Divergence),
            ),
            ("arrived at barrier", Some(Self::Divergence)),
            ("lanes of one warp are at", Some(Self::Divergence)),
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

#[test]
fn protocols_have_no_races_in_20_schedules() {
    const TEST: &str = "mutants::protocols_have_no_races_in_20_schedules";
    if role().is_some() {
        SCENARIOS.iter().for_each(play);
        return report("right");
    }
    for seed in 1..=20 {
        let reported = child(TEST, 0, seed, None);
        assert_eq!(reported.as_deref(), Ok("right"), "seed {seed}");
    }
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

/// Named mutants: the scenario, the instruction (the n-th executed line that contains the text),
/// the change, the checks that may find it first, and the error.
const NAMED: &str = "
packet | st.relaxed.sys.global.v2 0 | .relaxed.sys => | Race | the packet's store is weak
packet | st.relaxed.sys.global.v2 0 | .sys => .gpu | Race | the packet's store has device scope
packet | ld.relaxed.sys.global.v2 0 | .relaxed.sys => | Race | the packet's load is weak
packet | ld.relaxed.sys.global.v2 0 | .sys => .gpu | Race | the packet's load has device scope
packet | st.relaxed.sys.global.v2 0 | shift | Address | the packet goes to another slot
packet | st.relaxed.sys.global.v2 0 | delete | Hang | the packet is not sent
packet | st.global.b64 0 | shift | Race | the output goes to another element
packet | bar.sync 0 | delete | Race Uninitialized | no barrier after the prologue
packet | bar.sync 0 | diverge | Divergence Uninitialized Race | a barrier in a branch
signal | st.release.sys 0 | .release => .relaxed | Race | the entry signal is relaxed
signal | st.release.sys 0 | .sys => .gpu | Race | the entry signal has device scope
signal | st.release.sys 0 | delete | Hang | the entry signal is not sent
signal | st.relaxed.sys 5 | delete | Hang | the exit signal is not sent
signal | ld.acquire.sys 0 | .acquire => .relaxed | Race | the entry wait is relaxed
signal | ld.acquire.sys 0 | .sys => .gpu | Race | the entry wait has device scope
signal | bar.sync 1 | delete | Race Uninitialized | no barrier before the entry signal
signal | bar.sync 2 | delete | Race | no barrier before the exit signal
signal | bar.red 1 | delete | Race Uninitialized | no vote after the entry wait
signal | bar.sync 1 | diverge | Divergence Uninitialized Race | the entry barrier in a branch
signal | ld.global.L1 0 | ld.global. => ld.global.nc. | Constant | the input is read as a constant
signal | st.global.v2.b64 0 | shift | Address Race | the output goes to another element
nvls | st.release.sys 0 | .release => .relaxed | Race | the entry signal is relaxed
nvls | ld.acquire.sys 0 | .acquire => .relaxed | Race | the entry wait is relaxed
nvls | multimem.st 0 | shift | Address Race | the sums go to other elements
gather | st.release.sys 0 | .release => .relaxed | Race | the entry signal is relaxed
gather | ld.acquire.sys 0 | .acquire => .relaxed | Race | the entry wait is relaxed
send | st.release.sys 0 | .release => .relaxed | Race | the chunk's signal is relaxed
send | st.release.sys 0 | .sys => .gpu | Race | the chunk's signal has device scope
send | bar.sync 1 | delete | Race | no barrier after the chunk
recv | ld.acquire.sys 0 | .acquire => .relaxed | Race | the chunk's wait is relaxed
recv | ld.acquire.sys 0 | .sys => .gpu | Race | the chunk's wait has device scope
recv | bar.sync 1 | delete | Race | no barrier before the credit
recv | ld.global.v2 0 | ld.global. => ld.global.nc. | Constant | the chunk is read as a constant
recv | st.release.sys 0 | delete | Hang | the credit is not returned
nvls | st.release.sys 1 | .release => .relaxed | Race | the exit signal is relaxed
nvls | ld.acquire.sys 2 | .acquire => .relaxed | Race | the exit wait is relaxed
nvls | fence.proxy.alias 1 | delete | Race | no fence after the sums
two shots | st.relaxed.sys.global.v2 0 | .relaxed.sys => | Race | the header's store is weak
two shots | st.relaxed.sys.global.v2 1 | .sys => .gpu | Race | a packet's store has device scope
two shots | st.relaxed.sys.global.v2 1 | delete | Hang | a packet of the input is not sent
two shots | ld.relaxed.sys.global.v2 1 | .relaxed.sys => | Race | a packet's load is weak
";

/// Reads a change of [`NAMED`].
fn mutation(text: &'static str) -> Mutation {
    match text {
        "delete" => Mutation::Delete,
        "diverge" => Mutation::Diverge,
        "shift" => Mutation::Shift,
        _ => {
            let (from, to) = text.split_once("=>").expect("a replacement");
            Mutation::Replace(from.trim(), to.trim())
        }
    }
}

/// Returns the named mutants of a scenario, and the check and error of each.
fn named(test: &str, scenario: usize) -> Vec<(Mutant, &'static str, &'static str)> {
    let lines = executed(test, scenario);
    let rows = NAMED.lines().map(|row| row.split('|').map(str::trim));
    let rows = rows.map(Iterator::collect::<Vec<_>>);
    rows.filter(|row| row[0] == SCENARIOS[scenario].name)
        .map(|row| {
            let (text, nth) = row[1].rsplit_once(' ').expect("a text and a number");
            let nth = nth.parse().expect("a number");
            let mut matching = lines.iter().filter(|(_, line)| line.contains(text));
            let found = matching.nth(nth).and_then(|(line, old)| {
                let new = mutation(row[2]).apply(old)?;
                let (line, old) = (*line, old.clone());
                Some(Mutant {
                    scenario,
                    line,
                    old,
                    new,
                })
            });
            (found.unwrap_or_else(|| panic!("{row:?}")), row[3], row[4])
        })
        .collect()
}

/// Runs the named mutants of scenarios. The check that the error calls for must find each.
fn find_named(test: &str, scenarios: core::ops::Range<usize>) {
    if role().is_some() {
        return run_child();
    }
    let named: Vec<_> = scenarios.flat_map(|it| named(test, it)).collect();
    let mutants: Vec<Mutant> = named.iter().map(|(mutant, ..)| mutant.clone()).collect();
    let mut wrong = Vec::new();
    for ((mutant, checks, error), found) in named.iter().zip(find_all(test, &mutants)) {
        println!("{error}: {found:?}: {mutant}");
        let found = found.map_or("no check".to_owned(), |check| format!("{check:?}"));
        if !checks.split(' ').any(|check| check == found) {
            wrong.push(format!(
                "{mutant}: {error}: found by {found}, not by {checks}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn named_mutants_of_packets_and_signals_are_found() {
    const TEST: &str = "mutants::named_mutants_of_packets_and_signals_are_found";
    find_named(TEST, 0..2);
}

#[test]
#[ignore = "takes a minute; the lane emulator-long runs it"]
fn named_mutants_of_other_protocols_are_found() {
    const TEST: &str = "mutants::named_mutants_of_other_protocols_are_found";
    find_named(TEST, 2..SCENARIOS.len());
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
    let mut all: Vec<Mutant> = Vec::new();
    for scenario in 0..SCENARIOS.len() {
        for (line, old) in executed(TEST, scenario) {
            // Inline assembly is in braces.
            if MUTATED.iter().any(|it| old.starts_with(it)) || old.starts_with('{') {
                all.extend(mutations(&old).into_iter().map(|new| Mutant {
                    scenario,
                    line,
                    old: old.clone(),
                    new,
                }));
            }
        }
    }
    let total = all.len();
    // The executed lines differ a little between runs. The order by a hash keeps the sample almost
    // the same.
    all.sort_by_cached_key(|mutant| {
        let mut hasher = DefaultHasher::new();
        (mutant.scenario, mutant.line, &mutant.new).hash(&mut hasher);
        hasher.finish()
    });
    all.truncate(count);
    let mutants = all;
    println!("{} of {total} mutants", mutants.len());
    let mut counts: BTreeMap<Option<Check>, usize> = BTreeMap::new();
    for (mutant, check) in mutants.iter().zip(find_all(TEST, &mutants)) {
        *counts.entry(check).or_default() += 1;
        println!("{check:?}: {mutant}");
    }
    println!("{counts:?}");
    // Most survivors change words that only failures read, or accesses that others order already.
    let found = mutants.len() - counts.get(&None).copied().unwrap_or(0);
    assert!(
        found * 5 > mutants.len() * 2,
        "{found} of {} are found",
        mutants.len()
    );
}
