//! Races, uninitialised shared memory, and changes of memory that `ld.global.nc` reads.
//! The page `docs/memory-model.md` defines the rules.

#[path = "../common/mod.rs"]
mod common;
mod conflicts;
mod order;
mod streams;
mod values;

use std::sync::Arc;

use common::{
    Place, Spot, expect_fault, kernel, kernel_text, launches, line_of, module, write_u32,
};
use fusewire_emulator::{
    Config, Error, Fault, FaultKind, Gpus, IdleTime, Kernel, LaunchOrder, MemoryModel, Scheduler,
    Site,
};

/// Declares the address `%x` of global memory, and initialises the shared variable `s`.
const START: &str = ".shared .align 16 .b8 s[64]; .reg .b64 %x, %y;
    mov.u64 %x, %in0; add.u64 %y, %in0, 128;
    setp.eq.u32 %p30, %thread, 0; @%p30 st.shared.v2.u64 [s], {0, 0};
    bar.sync 0;";

/// Returns configurations that detect races.
fn configs() -> Vec<Config> {
    let mut configs = Vec::new();
    for memory in [MemoryModel::Checked, MemoryModel::Weak] {
        let schedulers = (0..4).map(Scheduler::Random);
        for scheduler in [Scheduler::RoundRobin].into_iter().chain(schedulers) {
            configs.push(Config {
                memory,
                scheduler,
                ..Config::default()
            });
        }
    }
    configs
}

/// A program with one code for each thread. Its launches are in one run.
struct Program {
    spots: Vec<Spot>,
    codes: Vec<String>,
    launches: Vec<(Kernel, String)>,
}

impl Program {
    fn new(place: Place, codes: &[&str]) -> Self {
        let spots: Vec<_> = (0..codes.len() as u32).map(|it| place.spot(it)).collect();
        Self::at(&spots, codes)
    }

    fn at(spots: &[Spot], codes: &[&str]) -> Self {
        let codes: Vec<String> = codes.iter().map(|&it| it.to_owned()).collect();
        let parts: Vec<_> = spots.iter().copied().zip(codes.iter().cloned()).collect();
        Self {
            spots: spots.to_vec(),
            launches: launches(1, START, &parts),
            codes,
        }
    }

    fn run(&self, config: Config) -> Result<(), Error> {
        let gpus = Gpus::new(config);
        let data = gpus.allocate(0, 256);
        let kernels = self
            .launches
            .iter()
            .map(|(kernel, _)| kernel.clone().arg(&data));
        gpus.run(&kernels.collect::<Vec<_>>()).map(drop)
    }

    /// Returns the PTX line of the last line of a thread's code, and this line.
    fn last_line(&self, thread: usize) -> (u32, &str) {
        let launch = self.spots[thread].launch;
        let number = self.spots[..thread]
            .iter()
            .filter(|it| it.launch == launch)
            .count();
        let text = &self.launches[launch as usize].1;
        let code = &self.codes[thread];
        let start = format!("PART{number}:\n");
        let first = line_of(text, &start) + 1;
        let lines = code.matches('\n').count() as u32;
        (
            first + lines,
            code.lines().last().expect("a code has a line").trim(),
        )
    }

    /// Returns true if a site is the last line of a thread's code.
    fn is_site(&self, thread: usize, site: &Site) -> bool {
        let spot = self.spots[thread];
        (site.device, site.block, site.thread) == (spot.device, spot.block, spot.thread)
            && (site.line, &*site.instruction) == self.last_line(thread)
            && site.kernel == "k"
    }

    /// Checks that the last lines of the codes of two threads race. If `is_ordered`, the round
    /// robin scheduler executes the first thread first.
    #[track_caller]
    fn expect_race(&self, is_ordered: bool) {
        for config in configs() {
            let name = format!(
                "{:?}, {:?}: {:?}",
                config.memory, config.scheduler, self.codes
            );
            let is_ordered = is_ordered && config.scheduler == Scheduler::RoundRobin;
            let seed = match config.scheduler {
                Scheduler::Random(seed) => Some(seed),
                _ => None,
            };
            let fault = match self.run(config) {
                Err(Error::Fault(fault)) => fault,
                other => panic!("expected a race: {other:?}, {name}"),
            };
            assert_eq!(fault.kind, FaultKind::Race, "{fault}, {name}");
            let other = fault.other.as_ref().expect("a race has two accesses");
            let in_order = self.is_site(0, other) && self.is_site(1, &fault.site);
            let reverse = self.is_site(1, other) && self.is_site(0, &fault.site);
            assert!(in_order || reverse && !is_ordered, "{fault}, {name}");
            check_text(&fault);
            assert_eq!(fault.seed, seed);
        }
        let unchecked = Config {
            memory: MemoryModel::Unchecked,
            ..Config::default()
        };
        self.run(unchecked)
            .expect("the model `Unchecked` reports nothing");
    }

    /// Checks that all configurations execute the program without an error.
    #[track_caller]
    fn expect_no_race(&self) {
        for config in configs() {
            let name = format!(
                "{:?}, {:?}: {:?}",
                config.memory, config.scheduler, self.codes
            );
            if let Err(error) = self.run(config) {
                panic!("{error}\n{name}");
            }
        }
    }
}

/// Checks that the text of a fault has both accesses.
#[track_caller]
fn check_text(fault: &Fault) {
    let text = fault.to_string();
    let other = fault.other.as_ref().expect("the fault has two accesses");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].contains(&fault.site.to_string()), "{text}");
    assert!(lines[1].contains(&other.to_string()), "{text}");
}

/// Checks that two accesses race in both orders.
#[track_caller]
fn expect_race(place: Place, first: &str, second: &str) {
    // The last warp that arrives at the barrier of `START` is the first to continue.
    let is_ordered = place != Place::Warps;
    Program::new(place, &[first, second]).expect_race(is_ordered);
    Program::new(place, &[second, first]).expect_race(is_ordered);
}

/// Checks that two accesses do not race.
#[track_caller]
fn expect_no_race(place: Place, first: &str, second: &str) {
    Program::new(place, &[first, second]).expect_no_race();
    Program::new(place, &[second, first]).expect_no_race();
}
