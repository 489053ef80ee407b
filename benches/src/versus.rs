//! Compares all_reduce with MPI and with an earlier build of Fusewire. In each round, every library
//! runs once. Rounds alternate the order, so that no library always runs first. The machine's
//! ping-pong latency is measured between the runs.

mod report;

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::env;
use std::fs;
use std::os::fd::{AsRawFd as _, RawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fusewire::store::TcpStoreServer;

use crate::children::{self, Figure};
use crate::document::document;
use crate::machine::{self, Rate};
use crate::measure::Schedule;
use crate::mpi::{self, Mpi};
use crate::{bare, reduce};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Compiler of an MPI. By default, every MPI in PATH is measured. May be repeated, each time
    /// with its launcher.
    #[arg(long, value_name = "PATH")]
    mpicc: Vec<PathBuf>,
    /// Launcher of the MPI. By default, the mpirun in the compiler's folder.
    #[arg(long, value_name = "PATH")]
    mpirun: Vec<PathBuf>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    ranks: Vec<usize>,
    /// Sizes in bytes, with suffix K, M or G for powers of 1024.
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = size,
        default_value = "8,64,1K,4K,16K,64K,256K,1M,8M,64M"
    )]
    sizes: Vec<usize>,
    /// Number of runs of every library.
    #[arg(long, default_value_t = 9)]
    pub(crate) rounds: usize,
    /// Rewrites the input and reads the output of every rank between calls.
    #[arg(long)]
    pub(crate) touch: bool,
    /// Number of threads that compute meanwhile, on any core.
    #[arg(long, default_value_t = 0)]
    pub(crate) busy: usize,
    /// Leaves the placement of the ranks to the system.
    #[arg(long)]
    pub(crate) unpinned: bool,
    /// Fusewire's algorithm: auto, packet, signal, two_shot.
    #[arg(long, default_value = "auto")]
    algorithm: String,
    /// This program as built from another commit. It runs in the same rounds, and its ranks get
    /// the same options. They get --touch and --unpinned only if these are given, so an older
    /// program need not have them.
    #[arg(long, value_name = "PATH")]
    pub(crate) before: Option<PathBuf>,
    /// Time limit in seconds for one run. A library that exceeds it is not run again.
    #[arg(long, default_value_t = 120)]
    limit: u64,
    /// Writes the tables into this Markdown file. Keeps its sections that start with "Prediction"
    /// or "Explanation".
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(crate) fn size(text: &str) -> Result<usize> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1 << 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let bytes = digits.parse::<usize>()?.checked_mul(unit);
    match bytes {
        Some(bytes) if bytes >= 4 && bytes.is_multiple_of(4) && bytes <= 1 << 30 => Ok(bytes),
        _ => bail!("{text} is no multiple of 4 from 4 to 1G"),
    }
}

/// One of the compared libraries.
#[derive(Clone, Debug)]
pub(crate) enum Candidate {
    Mpi(Mpi),
    /// This program, or the program of `--before`.
    Own {
        name: String,
        /// Name of the library and memory on a rank's command line.
        kind: &'static str,
        program: PathBuf,
    },
}

/// Ends the names of candidates that run the program of `--before`.
pub(crate) const BEFORE: &str = " before";

impl Candidate {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Mpi(mpi) => &mpi.name,
            Self::Own { name, .. } => name,
        }
    }

    /// Returns the candidates of this program and of `before`. The two builds of a kind are
    /// adjacent, so that they run under similar conditions.
    fn own(before: Option<&Path>) -> Result<Vec<Self>> {
        let program = env::current_exe().context("this program's own path")?;
        let mut all = Vec::new();
        for kind in ["registered", "staged", "bare"] {
            all.push(Self::Own {
                name: kind.to_owned(),
                kind,
                program: program.clone(),
            });
            // The bare program contains nothing of Fusewire.
            if let (Some(before), "registered" | "staged") = (before, kind) {
                all.push(Self::Own {
                    name: format!("{kind}{BEFORE}"),
                    kind,
                    program: before.to_owned(),
                });
            }
        }
        Ok(all)
    }

    fn run(
        &self,
        ranks: usize,
        cores: &[usize],
        schedule: &Schedule,
        arguments: &Arguments,
    ) -> Result<Option<Vec<Figure>>> {
        let limit = Duration::from_secs(arguments.limit);
        let touch = arguments.touch;
        match self {
            Self::Mpi(mpi) => {
                let command = mpi.all_reduce(ranks, cores, !arguments.unpinned, schedule, touch);
                children::run(vec![command], limit)
            }
            Self::Own { kind, program, .. } => {
                let memory = bare::memory(ranks, schedule.longest())?;
                let ours = OwnProgram {
                    program,
                    kind,
                    algorithm: &arguments.algorithm,
                    touch,
                    is_pinned: !arguments.unpinned,
                    memory: Some(memory.as_raw_fd()),
                };
                ours.run(ranks, cores, schedule, limit)
            }
        }
    }
}

/// Starts the ranks of this program, or of the same program with other compiler flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnProgram<'a> {
    pub(crate) program: &'a Path,
    /// Name of the library and memory on a rank's command line.
    pub(crate) kind: &'a str,
    pub(crate) algorithm: &'a str,
    pub(crate) touch: bool,
    /// True if each rank runs on one core.
    pub(crate) is_pinned: bool,
    /// Descriptor of the bare program's shared memory.
    pub(crate) memory: Option<RawFd>,
}

impl OwnProgram<'_> {
    /// Runs the ranks as processes. Returns `None` if they do not exit within `limit`.
    pub(crate) fn run(
        &self,
        ranks: usize,
        cores: &[usize],
        schedule: &Schedule,
        limit: Duration,
    ) -> Result<Option<Vec<Figure>>> {
        let store = TcpStoreServer::bind("127.0.0.1:0")?;
        let rank = |rank: usize| {
            let mut command = rank_of(self.program, rank, ranks, &store);
            command
                .args(["rank", self.kind])
                .args(["--rank", &rank.to_string()])
                .args(["--ranks", &ranks.to_string()])
                .args(["--cores", &mpi::list(cores)])
                .args(["--schedule", &schedule.to_string()])
                .args(["--algorithm", self.algorithm])
                .args(self.touch.then_some("--touch"))
                .args((!self.is_pinned).then_some("--unpinned"))
                .args(self.memory.map(|fd| format!("--fd={fd}")));
            command
        };
        children::run((0..ranks).map(rank).collect(), limit)
    }
}

/// Returns a command that starts `program` as one of `ranks` ranks, which find each other in
/// `store`.
pub(crate) fn rank_of(
    program: &Path,
    rank: usize,
    ranks: usize,
    store: &TcpStoreServer,
) -> Command {
    let mut command = Command::new(program);
    command
        .env("TORCHCOMM_RANK", rank.to_string())
        .env("TORCHCOMM_SIZE", ranks.to_string())
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", store.port().to_string())
        .env("TORCHELASTIC_USE_AGENT_STORE", "True");
    command
}

/// Threads that compute until the value is dropped.
#[derive(Debug)]
struct Neighbors {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Neighbors {
    fn start(count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let compute = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    core::hint::spin_loop();
                }
            }
        };
        let threads = (0..count)
            .map(|_| thread::spawn(compute(Arc::clone(&stop))))
            .collect();
        Self { stop, threads }
    }
}

impl Drop for Neighbors {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The thread cannot panic.
            let _ = thread.join();
        }
    }
}

/// One run of one candidate.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) ranks: usize,
    /// Index of the candidate.
    pub(crate) who: usize,
    /// Ping-pong times before and after the run.
    pub(crate) ping_pong: [Option<f64>; 2],
    pub(crate) figures: Vec<Figure>,
}

/// Returns the absolute path of the program of `--before`. Fails if the file does not exist.
fn program_before(path: &Path) -> Result<PathBuf> {
    ensure!(
        path.is_file(),
        "--before {}: no such file; build fusewire-benches from the other commit, and pass the \
         path of the program",
        path.display()
    );
    std::path::absolute(path).with_context(|| format!("--before {}", path.display()))
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    for &ranks in &arguments.ranks {
        let fits = (2..=reduce::MAX).contains(&ranks);
        ensure!(fits, "{ranks} ranks: 2 to {} can be compared", reduce::MAX);
    }
    ensure!(arguments.rounds > 0, "no rounds");
    let earlier = arguments.before.as_deref();
    let earlier = earlier.map(program_before).transpose()?;
    let folder = tempfile::tempdir()?;
    let mpis = mpi::find(
        &mpi::ALL_REDUCE,
        &arguments.mpicc,
        &arguments.mpirun,
        folder.path(),
    )?;
    let cores = machine::cores()?;
    let schedule = Schedule::new(&arguments.sizes);
    let mut candidates: Vec<_> = mpis.into_iter().map(Candidate::Mpi).collect();
    candidates.extend(Candidate::own(earlier.as_deref())?);

    let header = report::header(&candidates, arguments);
    print!("{header}");
    let mut samples = Vec::new();
    let mut rates: Vec<Vec<Rate>> = Vec::new();
    let mut left_out = Vec::new();
    let mut wrong = 0;
    let mut before = machine::ping_pong(&cores);
    for round in 0..arguments.rounds {
        rates.push(machine::memory_rates(&cores));
        for &ranks in &arguments.ranks {
            for index in 0..candidates.len() {
                let who = match round % 2 {
                    0 => index,
                    _ => candidates.len() - 1 - index,
                };
                if left_out.contains(&(ranks, who)) {
                    continue;
                }
                let name = candidates[who].name();
                let neighbors = Neighbors::start(arguments.busy);
                let figures = candidates[who]
                    .run(ranks, &cores, &schedule, arguments)
                    .with_context(|| format!("{name}, {ranks} ranks"))?;
                drop(neighbors);
                let after = machine::ping_pong(&cores);
                let Some(figures) = figures else {
                    let limit = arguments.limit;
                    eprintln!("{name} did not end {ranks} ranks within {limit} s; left out");
                    left_out.push((ranks, who));
                    before = after;
                    continue;
                };
                for figure in figures.iter().filter(|figure| figure.wrong > 0) {
                    eprintln!(
                        "{name}, {ranks} ranks, {} bytes: {} wrong elements",
                        figure.bytes, figure.wrong
                    );
                    wrong += figure.wrong;
                }
                samples.push(Sample {
                    ranks,
                    who,
                    ping_pong: [before, after],
                    figures,
                });
                before = after;
            }
        }
        let ns = before.map_or_else(|| "-".to_owned(), |ns| format!("{ns:.0}"));
        eprintln!(
            "round {} of {}: ping-pong {ns} ns",
            round + 1,
            arguments.rounds
        );
    }
    let text = report::tables(&candidates, &arguments.ranks, &samples, &rates);
    print!("{text}");
    if let Some(file) = &arguments.out {
        let old = fs::read_to_string(file).unwrap_or_default();
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(
            file,
            document(&old, "# All_reduce next to MPI", &header, &text),
        )
        .with_context(|| format!("write {}", file.display()))?;
    }
    ensure!(wrong == 0, "{wrong} wrong elements");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(before: Option<&Path>) -> Vec<(String, PathBuf)> {
        let all = Candidate::own(before).expect("the path of this program");
        let parts = all.into_iter().filter_map(|candidate| match candidate {
            Candidate::Own { name, program, .. } => Some((name, program)),
            Candidate::Mpi(_) => None,
        });
        parts.collect()
    }

    #[test]
    fn the_program_before_runs_next_to_this_one() {
        let here = env::current_exe().expect("the path of this program");
        let before = Path::new("/other/program");
        let parts = |name: &str, program: &Path| (name.to_owned(), program.to_owned());
        assert_eq!(
            own(Some(before)),
            [
                parts("registered", &here),
                parts("registered before", before),
                parts("staged", &here),
                parts("staged before", before),
                parts("bare", &here),
            ]
        );
        assert_eq!(own(None).len(), 3);
    }

    #[test]
    fn a_missing_program_is_an_error_that_names_it() {
        let error = program_before(Path::new("no-such-program")).expect_err("no file");
        assert!(error.to_string().starts_with("--before no-such-program: "));
        // A folder is no program.
        assert!(program_before(&env::temp_dir()).is_err());
        let here = env::current_exe().expect("the path of this program");
        assert_eq!(program_before(&here).expect("a file"), here);
    }
}
