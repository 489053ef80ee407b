//! Compares a fused norm with its separate steps on the CPU. The steps are an all_reduce and a
//! kernel that adds the residual, normalises and writes fp8.
//!
//! The second step is the fused kernel on a communicator with a single rank. Both sides therefore
//! compute the same arithmetic, and their results are bitwise identical. The separate steps need
//! one more launch and one more pass over the rows.

use core::fmt::Write as _;
use core::time::Duration;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use fusewire::store::MemoryStore;
use fusewire::{Communicator, DType, Device, Norm, Options, ReduceOp, Tensor};

use crate::machine;
use crate::versus_cuda::statistics;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Number of ranks. Each rank is a thread, pinned to its own core if there are enough cores.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Elements of a row.
    #[arg(long, default_value_t = 7168)]
    hidden: usize,
    /// Rows per call.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64,256")]
    tokens: Vec<usize>,
    /// Rounds. Each round measures both sides once.
    #[arg(long, default_value_t = 31)]
    rounds: usize,
    /// Appends the table to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

const EPSILON: f32 = 1e-6;

/// One comparison.
#[derive(Clone, Copy, Debug)]
struct Case {
    tokens: usize,
    dtype: DType,
    fp8: bool,
}

/// Times of rank 0 for one case, in microseconds per call.
#[derive(Debug, Default)]
struct Times {
    fused: Vec<f64>,
    steps: Vec<f64>,
    all_reduce: Vec<f64>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let cores = machine::cores()?;
    let mut cases = Vec::new();
    for (dtype, fp8) in [
        (DType::Bf16, false),
        (DType::Bf16, true),
        (DType::F32, false),
    ] {
        for &tokens in &arguments.tokens {
            cases.push(Case { tokens, dtype, fp8 });
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

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    options
}

fn one_rank(
    arguments: &Arguments,
    rank: u32,
    store: Arc<MemoryStore>,
    cases: &[Case],
) -> Result<Vec<Times>> {
    let comm = Communicator::new(
        Device::Cpu,
        rank,
        arguments.ranks,
        store,
        "fused",
        options(),
    )?;
    let own = Arc::new(MemoryStore::new());
    let alone = Communicator::new(Device::Cpu, 0, 1, own, "alone", options())?;
    let mut all = Vec::new();
    for case in cases {
        all.push(Buffers::new(&comm, *case, arguments.hidden)?.measure(
            &comm,
            &alone,
            arguments.rounds,
        )?);
    }
    comm.barrier()?;
    Ok(all)
}

struct Buffers {
    case: Case,
    input: Tensor,
    sum: Tensor,
    residual: Tensor,
    kept: Tensor,
    weight: Tensor,
    out: Tensor,
    scales: Tensor,
}

impl Buffers {
    fn new(comm: &Communicator, case: Case, hidden: usize) -> Result<Self> {
        let elements = case.tokens * hidden;
        let written = if case.fp8 { DType::E4m3 } else { case.dtype };
        let buffers = Self {
            case,
            input: comm.alloc(case.dtype, elements)?,
            sum: comm.alloc(case.dtype, elements)?,
            residual: comm.alloc(case.dtype, elements)?,
            kept: comm.alloc(case.dtype, elements)?,
            weight: comm.alloc(case.dtype, hidden)?,
            out: comm.alloc(written, elements)?,
            scales: comm.alloc(DType::F32, case.tokens)?,
        };
        for (tensor, seed) in [
            (&buffers.input, comm.rank() + 3),
            (&buffers.residual, 1),
            (&buffers.weight, 2),
        ] {
            fill(tensor, seed)?;
        }
        Ok(buffers)
    }

    fn norm<'a>(&'a self, input: &'a Tensor) -> Norm<'a> {
        let norm = Norm::rms(&self.out, input, &self.weight, EPSILON)
            .with_residual(&self.residual)
            .with_residual_out(&self.kept);
        if self.case.fp8 {
            norm.with_row_scales(&self.scales)
        } else {
            norm
        }
    }

    fn fused(&self, comm: &Communicator) -> Result<()> {
        Ok(comm.all_reduce_norm(&self.norm(&self.input))?)
    }

    fn reduced(&self, comm: &Communicator) -> Result<()> {
        Ok(comm.all_reduce_into(&self.sum, &self.input, ReduceOp::Sum)?)
    }

    fn steps(&self, comm: &Communicator, alone: &Communicator) -> Result<()> {
        self.reduced(comm)?;
        Ok(alone.all_reduce_norm(&self.norm(&self.sum))?)
    }

    fn measure(&self, comm: &Communicator, alone: &Communicator, rounds: usize) -> Result<Times> {
        // Registers the memory, so that neither side copies its input.
        let registration = alone.tensor_register(&self.sum)?;
        self.fused(comm)?;
        let results = [&self.out, &self.kept, &self.scales];
        let fused = results.map(Tensor::to_bytes);
        for tensor in results {
            tensor.copy_from_bytes(&vec![0x5a; tensor.len() * tensor.dtype().size()])?;
        }
        self.steps(comm, alone)?;
        for (tensor, fused) in results.into_iter().zip(fused) {
            let poisoned = !self.case.fp8 && core::ptr::eq(tensor, &raw const self.scales);
            ensure!(
                poisoned || tensor.to_bytes()? == fused?,
                "{:?}: fused and separate steps differ",
                self.case
            );
        }
        // Chooses a number of calls that takes a few milliseconds per side.
        let bytes = self.case.tokens * self.weight.len() * self.case.dtype.size();
        let calls = (20_000_000 / bytes.max(1)).clamp(4, 400);
        let mut times = Times::default();
        for round in 0..=rounds {
            let timed = |call: &dyn Fn() -> Result<()>| -> Result<f64> {
                comm.barrier()?;
                let start = Instant::now();
                for _ in 0..calls {
                    call()?;
                }
                Ok(start.elapsed().as_secs_f64() * 1e6 / calls as f64)
            };
            let fused = timed(&|| self.fused(comm))?;
            let steps = timed(&|| self.steps(comm, alone))?;
            let all_reduce = timed(&|| self.reduced(comm))?;
            if round > 0 {
                // The first round warms up and is dropped.
                times.fused.push(fused);
                times.steps.push(steps);
                times.all_reduce.push(all_reduce);
            }
        }
        alone.tensor_deregister(&registration)?;
        Ok(times)
    }
}

/// Fills `tensor` with values between -1 and 1.
fn fill(tensor: &Tensor, seed: u32) -> Result<()> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let values: Vec<f32> = (0..tensor.len())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        })
        .collect();
    if tensor.dtype() == DType::F32 {
        return Ok(tensor.copy_from(&values)?);
    }
    let halves: Vec<u8> = values
        .iter()
        .flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes())
        .collect();
    Ok(tensor.copy_from_bytes(&halves)?)
}

fn report(arguments: &Arguments, cases: &[Case], times: &[Times]) -> Result<String> {
    let mut text = String::new();
    writeln!(
        text,
        "{}; {} ranks as threads, rows of {}, {} rounds; us a call, medians; the quotient by \
            round, with its 95 % interval.\n",
        machine::processor(),
        arguments.ranks,
        arguments.hidden,
        arguments.rounds
    )?;
    writeln!(
        text,
        "| input | output | tokens | all_reduce alone | all_reduce, then norm | fused | steps / \
            fused |"
    )?;
    writeln!(text, "|---|---|---|---|---|---|---|")?;
    for (case, times) in cases.iter().zip(times) {
        let median = |values: &[f64]| statistics::median(values).unwrap_or(f64::NAN);
        let ratio = statistics::ratio(&times.steps, &times.fused).map_or_else(
            || "-".to_owned(),
            |ratio| {
                format!(
                    "{:.2} ({:.2} to {:.2})",
                    ratio.median, ratio.low, ratio.high
                )
            },
        );
        writeln!(
            text,
            "| {} | {} | {} | {:.2} | {:.2} | {:.2} | {ratio} |",
            case.dtype.name(),
            if case.fp8 {
                "fp8, a scale a row"
            } else {
                case.dtype.name()
            },
            case.tokens,
            median(&times.all_reduce),
            median(&times.steps),
            median(&times.fused),
        )?;
    }
    Ok(text)
}
