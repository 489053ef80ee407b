//! Compares dispatch and combine with `MPI_Alltoallv` of the same rows. Ranks are processes. In
//! each round, every library runs once, in alternating order.

use core::fmt::Write as _;
use core::time::Duration;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fusewire::store::TcpStoreServer;
use fusewire::{Communicator, Device, Options, ReduceOp};

use super::case::{Case, Schedule};
use super::operations::Operations;
use super::routing::Routing;
use super::traffic::{self, Traffic};
use crate::document::{Header, document};
use crate::mpi::{self, Mpi};
use crate::versus::rank_of;
use crate::versus_cuda::statistics;
use crate::{children, machine};

/// Settings of the comparison.
#[derive(Debug)]
pub(super) struct Comparison<'a> {
    pub(super) routing: &'a Routing,
    pub(super) ranks: &'a [u32],
    pub(super) cases: &'a [Case],
    pub(super) rounds: usize,
    pub(super) limit: Duration,
    /// Cases in which the results of a rank's experts may have this number of bytes are left out.
    pub(super) largest: usize,
    pub(super) mpicc: &'a [PathBuf],
    pub(super) mpirun: &'a [PathBuf],
    pub(super) out: Option<&'a PathBuf>,
}

/// Arguments of a rank of Fusewire.
#[derive(Debug, Args)]
pub(crate) struct RankArguments {
    #[command(flatten)]
    routing: Routing,
    #[arg(long)]
    rank: usize,
    /// Cores. Rank r runs on the core at index r modulo the number of cores.
    #[arg(long, value_delimiter = ',')]
    cores: Vec<usize>,
    /// Cases and numbers of calls: HIDDEN:TOKENS:PAYLOAD:LAYOUT:CALLS,...
    #[arg(long)]
    schedule: Schedule,
}

/// Runs a rank. Rank 0 prints the same lines as `c/mpi_moe.c`.
pub(crate) fn rank(arguments: &RankArguments) -> Result<()> {
    let RankArguments { rank, cores, .. } = arguments;
    ensure!(!cores.is_empty(), "no cores");
    machine::pin(cores[rank % cores.len()])?;
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    let comm = Communicator::from_env(Device::Cpu, options)?;
    for (case, calls) in &arguments.schedule.0 {
        let line = measure(&comm, &arguments.routing, case, *calls)?;
        if comm.rank() == 0 {
            let words = line.map(|word| word.to_string());
            println!("{}", words.join(" "));
        }
    }
    Ok(comm.barrier()?)
}

fn measure(comm: &Communicator, routing: &Routing, case: &Case, calls: usize) -> Result<[u64; 8]> {
    let operations = Operations::new(comm, routing, case)?;
    let verified = operations.verify()?;
    let warm = calls / 10 + 2;
    let mut times = [Vec::new(), Vec::new()];
    for call in 0..warm + calls {
        comm.barrier()?;
        let start = Instant::now();
        let received = operations.dispatch()?;
        let dispatched = start.elapsed();
        comm.barrier()?;
        let start = Instant::now();
        operations.combine(&received)?;
        let combined = start.elapsed();
        if call >= warm {
            times[0].push(dispatched.as_nanos() as u64);
            times[1].push(combined.as_nanos() as u64);
        }
    }
    let mut wrong = [operations.check_results()?.0];
    comm.all_reduce(wrong.as_mut_slice(), ReduceOp::Sum)?;
    operations.free()?;
    let [dispatch, combine] = times.map(|mut times| {
        times.sort_unstable();
        times[calls / 2]
    });
    let Traffic {
        rows,
        row_bytes,
        other_bytes,
    } = verified.traffic;
    let wrong = wrong[0] + verified.wrong;
    let [of_rows, of_results] = verified.sums;
    Ok([
        dispatch,
        combine,
        wrong,
        rows,
        of_rows,
        of_results,
        row_bytes,
        other_bytes,
    ])
}

/// Measurement of a case.
#[derive(Clone, Copy, Debug)]
struct Figure {
    /// Medians of dispatch and combine in microseconds.
    times: [f64; 2],
    wrong: u64,
    sums: [u64; 2],
    traffic: Traffic,
}

impl Figure {
    fn new(line: &[u64]) -> Result<Self> {
        let [
            dispatch,
            combine,
            wrong,
            rows,
            of_rows,
            of_results,
            row_bytes,
            other_bytes,
        ] = line[..]
        else {
            bail!("{line:?} is no line of eight figures");
        };
        Ok(Self {
            times: [dispatch as f64 / 1e3, combine as f64 / 1e3],
            wrong,
            sums: [of_rows, of_results],
            traffic: Traffic {
                rows,
                row_bytes,
                other_bytes,
            },
        })
    }
}

/// A library.
enum Library {
    Fusewire,
    Mpi(Mpi),
}

impl Library {
    fn name(&self) -> &str {
        match self {
            Self::Fusewire => "Fusewire",
            Self::Mpi(mpi) => &mpi.name,
        }
    }

    /// Runs the cases. Returns `None` if the ranks do not exit within the limit.
    fn run(
        &self,
        comparison: &Comparison<'_>,
        ranks: u32,
        cores: &[usize],
        schedule: &Schedule,
    ) -> Result<Option<Vec<Figure>>> {
        let (routing, ranks) = (comparison.routing, ranks as usize);
        let (experts, top_k) = (routing.experts.to_string(), routing.top_k.to_string());
        let store;
        let commands = match self {
            Self::Mpi(mpi) => {
                let mut command = mpi.command(ranks, cores);
                command
                    .args([&schedule.to_string(), &mpi::list(cores), &experts, &top_k])
                    .arg(if routing.skewed { "1" } else { "0" });
                vec![command]
            }
            Self::Fusewire => {
                let program = env::current_exe().context("this program's own path")?;
                store = TcpStoreServer::bind("127.0.0.1:0")?;
                let rank = |rank: usize| {
                    let mut command = rank_of(&program, rank, ranks, &store);
                    command
                        .args(["moe-rank", "--rank", &rank.to_string()])
                        .args(["--cores", &mpi::list(cores)])
                        .args(["--schedule", &schedule.to_string()])
                        .args(["--experts", &experts, "--top-k", &top_k])
                        .args(["--staging", &routing.staging.to_string()])
                        .args(routing.skewed.then_some("--skewed"));
                    command
                };
                (0..ranks).map(rank).collect()
            }
        };
        let Some(lines) = children::numbers(commands, comparison.limit)? else {
            return Ok(None);
        };
        ensure!(
            lines.len() == schedule.0.len(),
            "{} lines for {} cases",
            lines.len(),
            schedule.0.len()
        );
        let figures = lines.iter().map(|line| Figure::new(line));
        figures.collect::<Result<_>>().map(Some)
    }
}

/// The runs of a number of ranks.
struct Runs {
    ranks: u32,
    schedule: Schedule,
    /// For each library the figures of each round; none for a library that was left out.
    figures: Vec<Vec<Vec<Figure>>>,
    /// Libraries that have exceeded the time limit.
    left_out: Vec<bool>,
}

pub(super) fn main(comparison: &Comparison<'_>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (mpicc, mpirun) = (comparison.mpicc, comparison.mpirun);
    let mpis = mpi::find(&mpi::MOE, mpicc, mpirun, folder.path())?;
    let cores = machine::cores()?;
    let mut libraries = vec![Library::Fusewire];
    libraries.extend(mpis.into_iter().map(Library::Mpi));
    let header = header(comparison, &libraries, cores.len());
    print!("{header}");
    let mut all: Vec<_> = comparison
        .ranks
        .iter()
        .map(|&ranks| {
            let routing = comparison.routing;
            let fits = |case: &&Case| case.most_bytes(routing, ranks) < comparison.largest;
            let cases = comparison.cases.iter().filter(fits);
            Runs {
                ranks,
                schedule: Schedule(cases.map(|case| (*case, case.calls(routing))).collect()),
                figures: libraries.iter().map(|_| Vec::new()).collect(),
                left_out: vec![false; libraries.len()],
            }
        })
        .collect();
    all.retain(|runs| !runs.schedule.0.is_empty());
    let mut ping_pong = Vec::new();
    for round in 0..comparison.rounds {
        for runs in &mut all {
            for index in 0..libraries.len() {
                let who = match round % 2 {
                    0 => index,
                    _ => libraries.len() - 1 - index,
                };
                if runs.left_out[who] {
                    continue;
                }
                ping_pong.extend(machine::ping_pong(&cores));
                let library = &libraries[who];
                let figures = library
                    .run(comparison, runs.ranks, &cores, &runs.schedule)
                    .with_context(|| format!("{}, {} ranks", library.name(), runs.ranks))?;
                match figures {
                    Some(figures) => runs.figures[who].push(figures),
                    None => {
                        eprintln!(
                            "{} did not end {} ranks within {:?}; left out",
                            library.name(),
                            runs.ranks,
                            comparison.limit
                        );
                        runs.left_out[who] = true;
                        runs.figures[who].clear();
                    }
                }
            }
        }
        eprintln!("round {} of {}", round + 1, comparison.rounds);
    }
    let wrong = all.iter().map(|runs| runs.wrong(&libraries)).sum::<u64>();
    let mut text = String::new();
    ping_pong.sort_unstable_by(f64::total_cmp);
    if let (Some(least), Some(most)) = (ping_pong.first(), ping_pong.last()) {
        let median = ping_pong[ping_pong.len() / 2];
        writeln!(
            text,
            "Cache-line ping-pong before each run, two lines, one way: median {median:.0} ns, \
             {least:.0} to {most:.0} ns.\n"
        )?;
    }
    for runs in &all {
        text += &runs.report(comparison, &libraries, cores.len())?;
    }
    print!("{text}");
    if let Some(path) = comparison.out {
        let old = fs::read_to_string(path).unwrap_or_default();
        let title = "# Dispatch and combine of a mixture of experts next to MPI";
        fs::write(path, document(&old, title, &header, &text))
            .with_context(|| format!("write {}", path.display()))?;
    }
    ensure!(wrong == 0, "{wrong} wrong results");
    Ok(())
}

fn header(comparison: &Comparison<'_>, libraries: &[Library], cores: usize) -> Header {
    let routing = comparison.routing;
    let mut lines = vec![
        format!(
            "{}; {cores} core(s); Linux {}",
            machine::processor(),
            machine::kernel()
        ),
        format!(
            "top {} of {} experts, {}; the payload of dispatch is bf16 or fp8 with an f32 \
             scale for 128 channels, that of combine bf16",
            routing.top_k,
            routing.experts,
            routing.name()
        ),
        format!(
            "{} rounds, in each every library once, in alternating order; barrier, clock, \
             dispatch, clock, and the same for combine; rank 0's median of a run, then the median \
             of the runs",
            comparison.rounds
        ),
        "ranks are processes; rank r pinned to core r mod cores; all results verified on all \
         ranks, and the bits of all libraries compared"
            .to_owned(),
        "MPI does the same: it counts the rows of each rank, packs a row for each (token, rank), \
         exchanges the counts by MPI_Alltoall and the rows by MPI_Alltoallv, and copies them to \
         their experts; combine packs the results, returns them by MPI_Alltoallv and adds them"
            .to_owned(),
    ];
    for library in libraries {
        if let Library::Mpi(mpi) = library {
            lines.push(format!("{}: {}", mpi.name, mpi.settings()));
        }
    }
    Header::of(lines)
}

impl Runs {
    /// Returns the number of wrong results, and reports them.
    fn wrong(&self, libraries: &[Library]) -> u64 {
        let mut wrong = 0;
        let first = self.figures.iter().flatten().next();
        for (library, rounds) in libraries.iter().zip(&self.figures) {
            for (index, (case, _)) in self.schedule.0.iter().enumerate() {
                for figure in rounds.iter().map(|figures| &figures[index]) {
                    let expected = first.map(|figures| &figures[index]);
                    let is_equal = expected.is_none_or(|expected| {
                        expected.sums == figure.sums && expected.traffic.rows == figure.traffic.rows
                    });
                    if figure.wrong > 0 || !is_equal {
                        eprintln!(
                            "{}, {} ranks, {case:?}: {} wrong rows and elements{}",
                            library.name(),
                            self.ranks,
                            figure.wrong,
                            if is_equal { "" } else { "; other bits" }
                        );
                        wrong += figure.wrong + u64::from(!is_equal);
                    }
                }
            }
        }
        wrong
    }

    fn report(
        &self,
        comparison: &Comparison<'_>,
        libraries: &[Library],
        cores: usize,
    ) -> Result<String> {
        let mut text = String::new();
        let (own, others) = (&self.figures[0], &self.figures[1..]);
        for (library, figures) in libraries[1..].iter().zip(others) {
            let shared = match self.ranks as usize > cores {
                true => format!(" on {cores} cores: oversubscribed"),
                false => String::new(),
            };
            writeln!(
                text,
                "### {}, {} ranks{shared}\n",
                library.name(),
                self.ranks
            )?;
            if figures.is_empty() || own.is_empty() {
                let limit = comparison.limit;
                writeln!(text, "Not measured: a run did not end within {limit:?}.\n")?;
                continue;
            }
            writeln!(
                text,
                "us; MPI / Fusewire by round, with the 95 % interval of the median.\n\n\
                 | hidden | payload | layout | tokens | dispatch | MPI | MPI / Fusewire | combine \
                 | MPI | MPI / Fusewire |\n\
                 |---|---|---|---|---|---|---|---|---|---|"
            )?;
            for (index, (case, _)) in self.schedule.0.iter().enumerate() {
                write!(
                    text,
                    "| {} | {} | {} | {} |",
                    case.hidden,
                    case.payload_name(),
                    case.layout_name(),
                    case.tokens
                )?;
                for operation in 0..2 {
                    let times = |rounds: &[Vec<Figure>]| -> Vec<f64> {
                        let times = rounds.iter().map(|figures| figures[index].times[operation]);
                        times.collect()
                    };
                    let (own, theirs) = (times(own), times(figures));
                    write!(
                        text,
                        " {:.1} | {:.1} | {} |",
                        statistics::median(&own).unwrap_or(f64::NAN),
                        statistics::median(&theirs).unwrap_or(f64::NAN),
                        super::ratio(&theirs, &own)
                    )?;
                }
                text.push('\n');
            }
            text.push('\n');
        }
        writeln!(text, "### Bytes, {} ranks\n", self.ranks)?;
        let traffic: Vec<Vec<_>> = (0..self.schedule.0.len())
            .map(|index| {
                let of_library = |(library, rounds): (&Library, &Vec<Vec<Figure>>)| {
                    let figure = rounds.first()?.get(index)?;
                    Some((library.name().to_owned(), figure.traffic))
                };
                let both = libraries.iter().zip(&self.figures).take(2);
                both.filter_map(of_library).collect()
            })
            .collect();
        let cases = self.schedule.0.iter().map(|(case, _)| case);
        let cases = cases.zip(traffic.iter().map(Vec::as_slice));
        text += &traffic::table(comparison.routing, self.ranks, cases)?;
        text.push('\n');
        Ok(text)
    }
}
