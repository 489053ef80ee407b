//! Measures dispatch and combine of a mixture of experts on the CPU, and compares them with copies
//! of the same rows in a rank's own memory, and with `all_to_all_v` of the same rows.
//!
//! The copies are those that the operation has to make: for dispatch in rank-major order one for
//! each (token, rank), in expert-major order also one for each selection that a rank receives, and
//! for combine one for each selection. `all_to_all_v` includes the packing of its input; it
//! gets the numbers of rows from the caller.

use core::fmt::Write as _;
use core::time::Duration;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use fusewire::store::MemoryStore;
use fusewire::{
    Communicator, DType, Device, Moe, MoeConfig, MoeLayout, MoePayload, MoeScales, Options, Tensor,
};

use crate::machine;
use crate::versus_cuda::statistics;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of ranks. Each rank is a thread, pinned to its own core if there are enough cores.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Elements of a token.
    #[arg(long, value_delimiter = ',', default_value = "2048,7168")]
    hidden: Vec<usize>,
    /// Tokens of a rank.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64,128,512")]
    tokens: Vec<usize>,
    /// Experts of all ranks.
    #[arg(long, default_value_t = 64)]
    experts: u32,
    /// Experts of a token.
    #[arg(long, default_value_t = 8)]
    top_k: u32,
    /// Sends 80 % of the selections to the first eighth of the experts.
    #[arg(long)]
    skewed: bool,
    /// Number of rounds. Each round measures every operation once.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Appends the table to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Shape, payload and layout of a measurement.
#[derive(Clone, Copy, Debug)]
struct Case {
    hidden: usize,
    tokens: usize,
    payload: MoePayload,
    layout: MoeLayout,
}

/// Times of rank 0 for a case, in microseconds per call.
#[derive(Debug, Default)]
struct Times {
    dispatch: Vec<f64>,
    combine: Vec<f64>,
    dispatch_copies: Vec<f64>,
    combine_copies: Vec<f64>,
    all_to_all_v: Vec<f64>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let cores = machine::cores()?;
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
    let store = Arc::new(MemoryStore::new());
    let ranks: Vec<Result<Vec<Times>>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.ranks)
            .map(|rank| {
                let (store, cases) = (store.clone(), &cases);
                let core = cores[rank as usize % cores.len()];
                scope.spawn(move || {
                    machine::pin(core)?;
                    one_rank(arguments, rank, store, cases)
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
    for (rank, times) in ranks.into_iter().enumerate() {
        let times = times.with_context(|| format!("rank {rank}"))?;
        first.get_or_insert(times);
    }
    let text = report(arguments, &cases, &first.context("no ranks")?)?;
    print!("{text}");
    if let Some(path) = &arguments.out {
        let before = fs::read_to_string(path).unwrap_or_default();
        fs::write(path, before + &text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn one_rank(
    arguments: &Arguments,
    rank: u32,
    store: Arc<MemoryStore>,
    cases: &[Case],
) -> Result<Vec<Times>> {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    let comm = Communicator::new(Device::Cpu, rank, arguments.ranks, store, "moe", options)?;
    let times = cases
        .iter()
        .map(|case| Side::new(&comm, arguments, *case)?.measure(arguments));
    let times = times.collect::<Result<Vec<_>>>()?;
    comm.barrier()?;
    Ok(times)
}

/// Random numbers of an xorshift generator.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// Returns the experts of the tokens of `rank`, without repetition in a token.
fn experts(arguments: &Arguments, tokens: usize, rank: u32) -> Vec<i32> {
    let mut random = Random((u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let all = u64::from(arguments.experts);
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let mut chosen: Vec<i32> = Vec::new();
        while chosen.len() < arguments.top_k as usize {
            let is_favored = arguments.skewed && random.below(10) < 8;
            let bound = if is_favored { (all / 8).max(1) } else { all };
            let id = random.below(bound) as i32;
            let id = match chosen.contains(&id) {
                true => random.below(all) as i32,
                false => id,
            };
            if !chosen.contains(&id) {
                chosen.push(id);
            }
        }
        ids.extend(chosen);
    }
    ids
}

/// State of a case on a rank: the operations to compare, and their tensors.
struct Side<'c> {
    comm: &'c Communicator,
    case: Case,
    moe: Moe,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    y: Tensor,
    out: Tensor,
    /// Bytes of a row of payload and of a result.
    bytes: [usize; 2],
    /// Copies of rows of payload by dispatch, and of results by combine.
    copies: [usize; 2],
    /// The token of each row that this rank sends, rank by rank; the elements for each rank, and
    /// from each rank.
    sent: Vec<usize>,
    splits: [Vec<u64>; 2],
    packed: Tensor,
    unpacked: Tensor,
}

impl<'c> Side<'c> {
    fn new(comm: &'c Communicator, arguments: &Arguments, case: Case) -> Result<Self> {
        let Case { hidden, tokens, .. } = case;
        let (ranks, rank) = (comm.size(), comm.rank());
        let top_k = arguments.top_k as usize;
        let config = MoeConfig::new(arguments.experts, arguments.top_k, hidden, tokens)
            .payload(case.payload)
            .layout(case.layout);
        let moe = Moe::new(comm, &config)?;
        let each = arguments.experts.div_ceil(ranks) as i32;
        let all: Vec<Vec<i32>> = (0..ranks)
            .map(|rank| experts(arguments, tokens, rank))
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
        let row = match case.payload {
            MoePayload::Same => 2 * hidden,
            _ => hidden + hidden / 128 * 4,
        };
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
        let side = Self {
            comm,
            case,
            x: comm.tensor(DType::Bf16, tokens * hidden)?,
            ids: comm.tensor_from(&all[rank as usize])?,
            weights: comm.tensor_from(&vec![1.0 / top_k as f32; tokens * top_k])?,
            y: comm.tensor(DType::Bf16, moe.info().results * hidden)?,
            out: comm.tensor(DType::Bf16, tokens * hidden)?,
            moe,
            bytes: [row, 2 * hidden],
            copies,
            sent,
            packed: comm.tensor(DType::U8, total(to))?,
            unpacked: comm.tensor(DType::U8, total(from))?,
            splits,
        };
        side.x.fill(fusewire::Bf16::from_f32(1.5))?;
        side.y.fill(fusewire::Bf16::from_f32(1.5))?;
        Ok(side)
    }

    /// Runs dispatch and combine once. Returns their times in microseconds.
    fn call(&self) -> Result<[f64; 2]> {
        let start = Instant::now();
        let received = self.moe.dispatch(&self.x, &self.ids, &self.weights)?;
        self.comm.synchronize()?;
        let between = Instant::now();
        self.moe.combine(&self.y, &received, &self.out)?;
        self.comm.synchronize()?;
        let times = [between - start, between.elapsed()];
        Ok(times.map(|time| time.as_secs_f64() * 1e6))
    }

    /// Packs the rows and exchanges them.
    fn exchange(&self, source: &[u8], packed: &mut [u8]) -> Result<()> {
        let row = self.bytes[0];
        for (target, token) in packed.chunks_exact_mut(row).zip(&self.sent) {
            target.copy_from_slice(&source[token * row..(token + 1) * row]);
        }
        let [to, from] = &self.splits;
        self.comm
            .all_to_all_v_single(&self.unpacked, &*packed, from.as_slice(), to.as_slice())?;
        Ok(())
    }

    fn measure(&self, arguments: &Arguments) -> Result<Times> {
        self.call()?;
        let sum = self.out.to_vec::<fusewire::Bf16>()?;
        let expected = fusewire::Bf16::from_f32(1.5);
        ensure!(sum.iter().all(|value| *value == expected), "a wrong result");
        let [row, result] = self.bytes;
        let source = vec![1u8; self.case.tokens * row.max(result)];
        let mut packed = vec![0u8; self.packed.len()];
        let most = self.copies.map(|copies| copies.max(1));
        let mut target = vec![0u8; (most[0] * row).max(most[1] * result)];
        let mut copy = |copies: usize, row: usize| {
            for (index, target) in target.chunks_exact_mut(row).take(copies).enumerate() {
                let token = index % self.case.tokens;
                target.copy_from_slice(&source[token * row..(token + 1) * row]);
            }
            core::hint::black_box(&mut target);
        };
        // All ranks make the same number of calls, however many rows they receive.
        let bytes = self.ids.len() * (row + result);
        let calls = (40_000_000 / bytes.max(1)).clamp(3, 300);
        let mut times = Times::default();
        for round in 0..=arguments.rounds {
            self.comm.barrier()?;
            let mut both = [0.0; 2];
            for _ in 0..calls {
                let call = self.call()?;
                both = [both[0] + call[0], both[1] + call[1]];
            }
            let [dispatch, combine] = both.map(|time| time / calls as f64);
            let timed = |call: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
                self.comm.barrier()?;
                let start = Instant::now();
                for _ in 0..calls {
                    call()?;
                }
                Ok(start.elapsed().as_secs_f64() * 1e6 / calls as f64)
            };
            let dispatch_copies = timed(&mut || {
                copy(self.copies[0], row);
                Ok(())
            })?;
            let combine_copies = timed(&mut || {
                copy(self.copies[1], result);
                Ok(())
            })?;
            let all_to_all_v = timed(&mut || self.exchange(&source, &mut packed))?;
            if round > 0 {
                // The first round warms up and is dropped.
                times.dispatch.push(dispatch);
                times.combine.push(combine);
                times.dispatch_copies.push(dispatch_copies);
                times.combine_copies.push(combine_copies);
                times.all_to_all_v.push(all_to_all_v);
            }
        }
        self.moe.clone().free()?;
        Ok(times)
    }
}

fn report(arguments: &Arguments, cases: &[Case], times: &[Times]) -> Result<String> {
    let mut text = String::new();
    writeln!(
        text,
        "{}; {} ranks as threads, top {} of {} experts, {} routing, bf16, {} rounds; us a call, \
         medians; quotients by round, with their 95 % intervals.\n",
        machine::processor(),
        arguments.ranks,
        arguments.top_k,
        arguments.experts,
        if arguments.skewed {
            "skewed"
        } else {
            "uniform"
        },
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
        let ratio = |a: &[f64], b: &[f64]| {
            statistics::ratio(a, b).map_or_else(
                || "-".to_owned(),
                |ratio| {
                    format!(
                        "{:.2} ({:.2} to {:.2})",
                        ratio.median, ratio.low, ratio.high
                    )
                },
            )
        };
        writeln!(
            text,
            "| {} | {} | {} | {} | {:.1} | {} | {} | {:.1} | {} |",
            case.hidden,
            match case.payload {
                MoePayload::Same => "bf16",
                _ => "fp8",
            },
            match case.layout {
                MoeLayout::RankMajor => "rank",
                _ => "expert",
            },
            case.tokens,
            median(&times.dispatch),
            ratio(&times.dispatch, &times.dispatch_copies),
            ratio(&times.all_to_all_v, &times.dispatch),
            median(&times.combine),
            ratio(&times.combine, &times.combine_copies),
        )?;
    }
    Ok(text)
}
