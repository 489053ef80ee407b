//! Litmus tests of the memory model: small programs whose outcomes the page
//! `docs/memory-model.md` allows or forbids.
//!
//! Each test executes a program with many seeds and compares the set of outcomes with the expected
//! set. It therefore fails if a forbidden outcome occurs, and also if an allowed one never does:
//! an emulator that always returns the newest value fails most tests.

mod causality;
mod coherence;
#[path = "../common/mod.rs"]
mod common;
mod groups;
mod history;
mod message;
mod proxies;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use common::{Place, Spot, kernel, launches};
use fusewire_emulator::{Config, Error, FaultKind, Gpus, Kernel, MemoryModel, Scheduler};

/// Distance of the variables in bytes.
const DISTANCE: usize = 64;
/// Declarations and addresses of the variables. `%m` is the multicast address of the variables
/// `%m0` of device 0 and `%m1` of device 1.
const START: &str = ".reg .b32 %o<8>; .reg .b64 %x, %y, %z, %out, %m, %m0, %m1;
    mov.u64 %x, %in0; add.u64 %y, %in0, 64; add.u64 %z, %in0, 128;
    mov.u64 %out, %in1; mov.u64 %m, %in2; mov.u64 %m0, %in3; mov.u64 %m1, %in4;
    mov.u32 %o0, 0; mov.u32 %o1, 0; mov.u32 %o2, 0; mov.u32 %o3, 0;";

/// Instructions without effect between those of a test. The random scheduler executes up to 256
/// instructions of a warp in a slice, and therefore seldom interrupts a short code.
const PADDING: &str = "\n    mov.u32 %r31, 0; mov.u32 %r31, 1; mov.u32 %r31, 2; mov.u32 %r31, 3;
    mov.u32 %r31, 4; mov.u32 %r31, 5; mov.u32 %r31, 6; mov.u32 %r31, 7;\n";

/// A litmus test. Its variables `%x`, `%y` and `%z` are 0 initially.
///
/// An outcome is the text of the numbers that the threads have read, each of one digit, and of the
/// final values of variables. The outcome of a program with an error is the name of the error.
#[derive(Clone, Debug)]
struct Litmus {
    kernels: Vec<Kernel>,
    text: String,
    /// Number of words that the threads write.
    words: usize,
    finals: &'static str,
    seeds: u64,
    multicast: bool,
    memory: MemoryModel,
}

impl Litmus {
    /// Creates a test with one code for each thread. The numbers that a thread has read are its
    /// registers `%o0`, `%o1`, .. at the end of its code.
    fn new(place: Place, codes: &[&str]) -> Self {
        let spots = (0..).map(|number| place.spot(number));
        Self::at(spots.zip(codes.iter().copied()))
    }

    /// Creates a test whose threads are at the given places.
    fn at<'c>(threads: impl IntoIterator<Item = (Spot, &'c str)>) -> Self {
        let mut words = 0;
        let mut parts = Vec::new();
        let mut text = String::new();
        for (spot, code) in threads {
            text += &format!("{spot:?}:\n{code}\n");
            let mut code = code.replace(';', &format!(";{PADDING}"));
            let count = (0..)
                .take_while(|it| code.contains(&format!("%o{it}")))
                .count();
            for register in 0..count {
                code += &format!("\nst.global.u32 [%out+{}], %o{register};", 4 * words);
                words += 1;
            }
            parts.push((spot, code));
        }
        let all = launches(5, START, &parts);
        Self {
            text,
            kernels: all.into_iter().map(|(kernel, _)| kernel).collect(),
            words,
            finals: "",
            seeds: 300,
            multicast: false,
            memory: MemoryModel::Weak,
        }
    }

    /// Creates a test of launches of one block on the devices 0, 1, .., in which all threads
    /// execute the same code. The codes write `words` numbers to `[%out]`.
    fn blocks(codes: &[(u32, &str)], words: usize) -> Self {
        let kernels = (0..).zip(codes).map(|(device, (threads, code))| {
            let module = kernel(5, &format!("{START}\n{code}\nret;"));
            Kernel::new(&module, "k").device(device).threads(*threads)
        });
        Self {
            kernels: kernels.collect(),
            text: codes
                .iter()
                .map(|(_, code)| format!("{code}\n\n"))
                .collect(),
            words,
            finals: "",
            seeds: 100,
            multicast: false,
            memory: MemoryModel::Weak,
        }
    }

    /// Appends the final values of variables to the outcomes.
    fn finals(mut self, variables: &'static str) -> Self {
        self.finals = variables;
        self
    }

    /// Sets the number of executions.
    fn seeds(mut self, count: u64) -> Self {
        self.seeds = count;
        self
    }

    /// Creates a multicast object.
    fn multicast(mut self) -> Self {
        self.multicast = true;
        self
    }

    /// Sets the memory model.
    fn memory(mut self, model: MemoryModel) -> Self {
        self.memory = model;
        self
    }

    /// Executes the test once.
    fn run_once(&self, seed: u64) -> String {
        let gpus = Gpus::new(Config {
            memory: self.memory,
            scheduler: Scheduler::Random(seed),
            hang_after_virtual: Duration::from_millis(100),
            ..Config::default()
        });
        let variables = gpus.allocate(0, 3 * DISTANCE);
        let out = gpus.allocate(0, 4 * self.words.max(1));
        let replicas = [0, 1].map(|device| self.multicast.then(|| gpus.allocate(device, 64)));
        let object = match &replicas {
            [Some(first), Some(second)] => Some(gpus.multicast(&[first, second])),
            _ => None,
        };
        let kernels = self.kernels.iter().map(|kernel| {
            let kernel = kernel.clone().arg(&variables).arg(&out);
            match (&object, &replicas) {
                (Some(object), [Some(first), Some(second)]) => {
                    kernel.arg(object).arg(first).arg(second)
                }
                _ => kernel.arg(0u64).arg(0u64).arg(0u64),
            }
        });
        match gpus.run(&kernels.collect::<Vec<_>>()) {
            Ok(_) => {}
            Err(Error::Fault(fault)) if fault.kind == FaultKind::Race => return "race".into(),
            Err(error) => panic!("{error} (seed {seed})\n{}", self.text),
        }
        let mut numbers = out.read_u32();
        numbers.truncate(self.words);
        let values = variables.read_u32();
        let value = |name: char| values["xyz".find(name).expect("a variable") * DISTANCE / 4];
        numbers.extend(self.finals.chars().map(value));
        numbers.iter().map(u32::to_string).collect()
    }

    /// Executes the test with all seeds.
    fn run(&self) -> Outcomes {
        let mut seen = BTreeMap::new();
        for seed in 0..self.seeds {
            seen.entry(self.run_once(seed)).or_insert((0, seed)).0 += 1;
        }
        Outcomes {
            seen,
            text: self.text.clone(),
        }
    }
}

/// The outcomes of a test.
#[derive(Debug)]
struct Outcomes {
    /// The number of executions with each outcome, and the seed of the first.
    seen: BTreeMap<String, (u64, u64)>,
    text: String,
}

impl Outcomes {
    /// Panics with the outcomes if `problem` is not empty.
    #[track_caller]
    fn report(&self, problem: &str, outcomes: &[&str]) {
        assert!(
            outcomes.is_empty(),
            "{problem} {outcomes:?}; outcomes, with count and first seed: {:?}\n{}",
            self.seen,
            self.text
        );
    }

    /// Checks that the outcomes are exactly the expected ones.
    #[track_caller]
    fn are<S: AsRef<str>>(&self, expected: &[S]) {
        let expected: BTreeSet<&str> = expected.iter().map(AsRef::as_ref).collect();
        self.never(|it| !expected.contains(it));
        self.include(&expected.into_iter().collect::<Vec<_>>());
    }

    /// Checks that no outcome is forbidden.
    #[track_caller]
    fn never(&self, is_forbidden: impl Fn(&str) -> bool) {
        let keys = self.seen.keys().map(String::as_str);
        self.report(
            "forbidden:",
            &keys.filter(|it| is_forbidden(it)).collect::<Vec<_>>(),
        );
    }

    /// Checks that an outcome has a property.
    #[track_caller]
    fn some(&self, is_expected: impl Fn(&str) -> bool) {
        if !self.seen.keys().any(|it| is_expected(it)) {
            self.report("missing:", &["with a property"]);
        }
    }

    /// Checks that all `expected` outcomes have occurred.
    #[track_caller]
    fn include(&self, expected: &[&str]) {
        let missing = expected
            .iter()
            .copied()
            .filter(|it| !self.seen.contains_key(*it));
        self.report("missing:", &missing.collect::<Vec<_>>());
    }
}

/// Returns all texts of `count` digits 0 or 1 except for some.
fn binary_except(count: u32, except: &[&str]) -> Vec<String> {
    let count = count as usize;
    let all = (0..1 << count).map(|number: u32| format!("{number:0count$b}"));
    all.filter(|it| !except.contains(&it.as_str())).collect()
}
