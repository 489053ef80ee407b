//! Measures dispatch and combine of a mixture of experts on the CPU, and compares them with copies
//! of the same rows in a rank's own memory and with `all_to_all_v` of the same rows, or with MPI.
//!
//! The copies are those that the operation has to make: for dispatch in rank-major order one for
//! each (token, rank), in expert-major order also one for each selection that a rank receives, and
//! for combine one for each selection. `all_to_all_v` includes the packing of its input; it
//! gets the numbers of rows from the caller.

mod case;
mod operations;
mod routing;
mod traffic;
mod versus_mpi;

use core::fmt::Write as _;
use core::time::Duration;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use fusewire::store::MemoryStore;
use fusewire::{Communicator, DType, Device, MoeLayout, MoePayload, MoeScales, Options, Tensor};

use self::case::Case;
use self::operations::{Operations, ensure_right};
pub(crate) use self::routing::Routing;
use self::traffic::Traffic;
use self::versus_mpi::Comparison;
pub(crate) use self::versus_mpi::{RankArguments, rank};
use crate::machine;
use crate::versus::size;
use crate::versus_cuda::statistics;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Numbers of ranks. Each rank is a thread, or a process for MPI, pinned to its own core if
    /// there are enough cores.
    #[arg(long, value_delimiter = ',', default_value = "2")]
    ranks: Vec<u32>,
    /// Elements of a token.
    #[arg(long, value_delimiter = ',', default_value = "2048,7168")]
    hidden: Vec<usize>,
    /// Tokens of a rank.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64,128,512")]
    tokens: Vec<usize>,
    #[command(flatten)]
    routing: Routing,
    /// Number of rounds. Each round measures every operation or library once.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Compiler of an MPI: compares with `MPI_Alltoallv` instead of with copies and
    /// `all_to_all_v`. May be repeated, each time with its launcher.
    #[arg(long, value_name = "PATH")]
    mpicc: Vec<PathBuf>,
    /// Launcher of the MPI. By default, the mpirun in the compiler's folder.
    #[arg(long, value_name = "PATH")]
    mpirun: Vec<PathBuf>,
    /// With MPI, time limit in seconds for one run. A library that exceeds it is not run again.
    #[arg(long, default_value_t = 300)]
    limit: u64,
    /// With MPI, leaves out cases in which the results of a rank's experts may have this number of
    /// bytes, with suffix K, M or G for powers of 1024.
    #[arg(long, value_parser = size, default_value = "512M")]
    largest: usize,
    /// Appends the tables to this file. With MPI, writes them into this Markdown file, and keeps
    /// its sections that start with "Prediction" or "Explanation".
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Times of rank 0 for a case, in microseconds per call.
#[derive(Debug)]
struct Times {
    traffic: Traffic,
    dispatch: Vec<f64>,
    combine: Vec<f64>,
    dispatch_copies: Vec<f64>,
    combine_copies: Vec<f64>,
    all_to_all_v: Vec<f64>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let (routing, ranks) = (&arguments.routing, &arguments.ranks);
    ensure!(
        routing.top_k <= routing.experts && ranks.iter().all(|ranks| *ranks > 0),
        "no ranks, or more experts of a token than experts"
    );
    let cases = cases(arguments);
    if !(arguments.mpicc.is_empty() && arguments.mpirun.is_empty()) {
        return versus_mpi::main(&Comparison {
            routing,
            ranks,
            cases: &cases,
            rounds: arguments.rounds,
            limit: Duration::from_secs(arguments.limit),
            largest: arguments.largest,
            mpicc: &arguments.mpicc,
            mpirun: &arguments.mpirun,
            out: arguments.out.as_ref(),
        });
    }
    for &ranks in ranks {
        let times = all_ranks(arguments, ranks, &cases)?;
        let text = report(arguments, ranks, &cases, &times)?;
        print!("{text}");
        if let Some(path) = &arguments.out {
            let before = fs::read_to_string(path).unwrap_or_default();
            fs::write(path, before + &text).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

fn cases(arguments: &Arguments) -> Vec<Case> {
    let mut cases = Vec::new();
    for &hidden in &arguments.hidden {
        for payload in [MoePayload::Same, MoePayload::Fp8(MoeScales::F32)] {
            for layout in [MoeLayout::RankMajor, MoeLayout::ExpertMajor] {
                for &tokens in &arguments.tokens {
                    cases.push(Case {
                        hidden,
                        tokens,
                        payload,
                        layout,
                    });
                }
            }
        }
    }
    cases
}

/// Runs the ranks as threads. Returns the times of rank 0.
fn all_ranks(arguments: &Arguments, ranks: u32, cases: &[Case]) -> Result<Vec<Times>> {
    let cores = machine::cores()?;
    let store = Arc::new(MemoryStore::new());
    let all: Vec<Result<Vec<Times>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let store = store.clone();
                let core = cores[rank as usize % cores.len()];
                scope.spawn(move || {
                    machine::pin(core)?;
                    one_rank(arguments, (rank, ranks), store, cases)
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a rank panicked")))
        };
        threads.into_iter().map(join).collect()
    });
    let mut first = None;
    for (rank, times) in all.into_iter().enumerate() {
        let times = times.with_context(|| format!("rank {rank}"))?;
        first.get_or_insert(times);
    }
    first.context("no ranks")
}

fn one_rank(
    arguments: &Arguments,
    (rank, ranks): (u32, u32),
    store: Arc<MemoryStore>,
    cases: &[Case],
) -> Result<Vec<Times>> {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    let comm = Communicator::new(Device::Cpu, rank, ranks, store, "moe", options)?;
    let times = cases
        .iter()
        .map(|case| Side::new(&comm, &arguments.routing, case)?.measure(arguments));
    let times = times.collect::<Result<Vec<_>>>()?;
    comm.barrier()?;
    Ok(times)
}

/// State of a case on a rank: the operations to compare.
struct Side<'c> {
    case: Case,
    operations: Operations<'c>,
    /// Copies of rows of payload by dispatch, and of results by combine.
    copies: [usize; 2],
    /// The token of each row that this rank sends, rank by rank; the bytes for each rank, and from
    /// each rank.
    sent: Vec<usize>,
    splits: [Vec<u64>; 2],
    packed: Vec<u8>,
    unpacked: Tensor,
}

impl<'c> Side<'c> {
    fn new(comm: &'c Communicator, routing: &Routing, case: &Case) -> Result<Self> {
        let (ranks, rank, tokens) = (comm.size(), comm.rank(), case.tokens);
        let (top_k, each) = (routing.top_k as usize, routing.each(ranks));
        let all: Vec<Vec<i32>> = (0..ranks)
            .map(|rank| routing.experts_of(tokens, rank))
            .collect();
        let sent_to = |from: u32, to: u32| -> Vec<usize> {
            let ids = &all[from as usize];
            let is_sent = |token: &usize| {
                let ids = &ids[token * top_k..(token + 1) * top_k];
                ids.iter().any(|id| id / each == to as i32)
            };
            (0..tokens).filter(is_sent).collect()
        };
        let sent: Vec<Vec<usize>> = (0..ranks).map(|to| sent_to(rank, to)).collect();
        let [row, _] = case.bytes();
        let split = |rows: usize| (rows * row) as u64;
        let splits = [
            sent.iter().map(|rows| split(rows.len())).collect(),
            (0..ranks)
                .map(|from| split(sent_to(from, rank).len()))
                .collect(),
        ];
        let of_rank = |id: &&i32| **id / each == rank as i32;
        let selections = all.iter().flatten().filter(of_rank).count();
        let sent: Vec<usize> = sent.concat();
        let rows = sent.len();
        let copies = match case.layout {
            MoeLayout::RankMajor => [rows, selections],
            _ => [rows + selections, selections],
        };
        let [to, from]: &[Vec<u64>; 2] = &splits;
        let total = |splits: &[u64]| splits.iter().sum::<u64>() as usize;
        Ok(Self {
            case: *case,
            operations: Operations::new(comm, routing, case)?,
            copies,
            sent,
            packed: vec![0; total(to)],
            unpacked: comm.tensor(DType::U8, total(from))?,
            splits,
        })
    }

    /// Packs the rows and exchanges them.
    fn exchange(&mut self, source: &[u8]) -> Result<()> {
        let [row, _] = self.case.bytes();
        for (target, token) in self.packed.chunks_exact_mut(row).zip(&self.sent) {
            target.copy_from_slice(&source[token * row..(token + 1) * row]);
        }
        let [to, from] = &self.splits;
        self.operations.comm.all_to_all_v_single(
            &self.unpacked,
            &*self.packed,
            from.as_slice(),
            to.as_slice(),
        )?;
        Ok(())
    }

    fn measure(mut self, arguments: &Arguments) -> Result<Times> {
        let verified = self.operations.verify()?;
        ensure_right(verified.wrong, &self.case)?;
        let [row, result] = self.case.bytes();
        let source = vec![1u8; self.case.tokens * row.max(result)];
        let most = self.copies.map(|copies| copies.max(1));
        let mut target = vec![0u8; (most[0] * row).max(most[1] * result)];
        let tokens = self.case.tokens;
        let mut copy = |copies: usize, row: usize| {
            for (index, target) in target.chunks_exact_mut(row).take(copies).enumerate() {
                let token = index % tokens;
                target.copy_from_slice(&source[token * row..(token + 1) * row]);
            }
            core::hint::black_box(&mut target);
        };
        let calls = self.case.calls(&arguments.routing);
        let comm = self.operations.comm;
        let timed = |call: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
            comm.barrier()?;
            let start = Instant::now();
            for _ in 0..calls {
                call()?;
            }
            Ok(start.elapsed().as_secs_f64() * 1e6 / calls as f64)
        };
        let mut times = Times {
            traffic: verified.traffic,
            dispatch: Vec::new(),
            combine: Vec::new(),
            dispatch_copies: Vec::new(),
            combine_copies: Vec::new(),
            all_to_all_v: Vec::new(),
        };
        for round in 0..=arguments.rounds {
            comm.barrier()?;
            let mut both = [0.0; 2];
            for _ in 0..calls {
                let call = self.operations.call()?;
                both = [both[0] + call[0], both[1] + call[1]];
            }
            let [dispatch, combine] = both.map(|time| time / calls as f64);
            let dispatch_copies = timed(&mut || {
                copy(self.copies[0], row);
                Ok(())
            })?;
            let combine_copies = timed(&mut || {
                copy(self.copies[1], result);
                Ok(())
            })?;
            let all_to_all_v = timed(&mut || self.exchange(&source))?;
            if round > 0 {
                // The first round warms up and is dropped.
                times.dispatch.push(dispatch);
                times.combine.push(combine);
                times.dispatch_copies.push(dispatch_copies);
                times.combine_copies.push(combine_copies);
                times.all_to_all_v.push(all_to_all_v);
            }
        }
        self.operations.free()?;
        Ok(times)
    }
}

/// Returns the median of the ratios by round, with its interval.
fn ratio(over: &[f64], under: &[f64]) -> String {
    statistics::ratio(over, under).map_or_else(
        || "-".to_owned(),
        |ratio| {
            format!(
                "{:.2} ({:.2} to {:.2})",
                ratio.median, ratio.low, ratio.high
            )
        },
    )
}

fn report(arguments: &Arguments, ranks: u32, cases: &[Case], times: &[Times]) -> Result<String> {
    let mut text = String::new();
    let routing = &arguments.routing;
    let cores = machine::cores()?.len();
    writeln!(
        text,
        "{}; {ranks} ranks as threads on {cores} cores{}, top {} of {} experts, {}, bf16, \
         {} rounds; us a call, medians; quotients by round, with their 95 % intervals.\n",
        machine::processor(),
        if ranks as usize > cores {
            " (oversubscribed)"
        } else {
            ""
        },
        routing.top_k,
        routing.experts,
        routing.name(),
        arguments.rounds
    )?;
    writeln!(
        text,
        "| hidden | payload | layout | tokens | dispatch | / copies | all_to_all_v / dispatch | \
         combine | / copies |"
    )?;
    writeln!(text, "|---|---|---|---|---|---|---|---|---|")?;
    for (case, times) in cases.iter().zip(times) {
        let median = |values: &[f64]| statistics::median(values).unwrap_or(f64::NAN);
        writeln!(
            text,
            "| {} | {} | {} | {} | {:.1} | {} | {} | {:.1} | {} |",
            case.hidden,
            case.payload_name(),
            case.layout_name(),
            case.tokens,
            median(&times.dispatch),
            ratio(&times.dispatch, &times.dispatch_copies),
            ratio(&times.all_to_all_v, &times.dispatch),
            median(&times.combine),
            ratio(&times.combine, &times.combine_copies),
        )?;
    }
    text.push('\n');
    let traffic = times
        .iter()
        .map(|times| [("Fusewire".to_owned(), times.traffic)]);
    let traffic: Vec<_> = traffic.collect();
    let all = cases.iter().zip(traffic.iter().map(<[_; 1]>::as_slice));
    text += &traffic::table(routing, ranks, all)?;
    Ok(text)
}
