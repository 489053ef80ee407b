//! Compares Fusewire's kernels with the same algorithms in CUDA C++, on one GPU and in one process.
//! Ranks are threads with one stream each. Both sides use the same memory, the same streams, and
//! the same numbers of blocks and threads.

mod all_reduce;
mod benchmark;
mod buffers;
mod costs;
mod data;
pub(crate) mod entries;
mod fused;
mod module;
mod moe;
mod rendezvous;
mod report;
pub(crate) mod statistics;

use core::cell::Cell;
use core::time::Duration;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fusewire::gpu::Gpu;
use fusewire::{Communicator, DType, Device, Options, run_threads_on};

use self::all_reduce::{ONE_SHOT_BYTES, RankPart, TWO_SHOT_BYTES};
use self::benchmark::{Benchmark, Mode};
use self::buffers::{Buffers, Latch, Packets, Peers};
use self::costs::Cost;
use self::entries::{PAYLOADS, RANKS, SIGNAL_PAD_BYTES, TYPES, VECTOR};
use self::module::Baseline;
use self::rendezvous::{Rendezvous, RendezvousGuard};
use self::report::{Report, Row};
use crate::document::{Header, document};

/// Maximum number of blocks per rank.
const MOST_BLOCKS: u32 = 64;

/// A part of the measurements, selected on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Section {
    Costs,
    AllReduce,
    Fused,
    Moe,
}

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// GPU that all ranks share.
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// Numbers of ranks: 2, 4 or 8.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    ranks: Vec<usize>,
    /// Sizes of the all-reduce in bytes, multiples of 16, with suffix K or M for powers of 1024.
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = size,
        default_value = "512,2K,8K,32K,128K,512K,2M,8M,32M,64M"
    )]
    sizes: Vec<usize>,
    /// Element types: f32, bf16.
    #[arg(long, value_delimiter = ',', value_parser = dtype, default_value = "bf16,f32")]
    types: Vec<DType>,
    /// Launch modes of the operations.
    #[arg(long, value_delimiter = ',', default_value = "graph,eager")]
    modes: Vec<Mode>,
    /// Rounds. Each round times every candidate once. With 6 or more rounds, the tables have
    /// confidence intervals.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Blocks per rank. 0 selects the greatest power of two, at most 64, for which every block of
    /// every rank has its own SM.
    #[arg(long, default_value_t = 0)]
    blocks: u32,
    /// Threads per block: a multiple of 64, at most 512.
    #[arg(long, default_value_t = 512)]
    threads: u32,
    /// Rows of the fused operation.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64")]
    tokens: Vec<usize>,
    /// Elements of a row.
    #[arg(long, default_value_t = 7168)]
    hidden: usize,
    /// Tokens of a rank in a mixture of experts.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64,128,512")]
    moe_tokens: Vec<usize>,
    /// Elements of a token in a mixture of experts, multiples of 128.
    #[arg(long, value_delimiter = ',', default_value = "7168,2048")]
    moe_hidden: Vec<usize>,
    /// Types in which the tokens are sent to the experts: bf16, e4m3.
    #[arg(long, value_delimiter = ',', value_parser = payload, default_value = "bf16,e4m3")]
    payloads: Vec<DType>,
    /// Experts of all ranks, of which each token selects 8.
    #[arg(long, default_value_t = 256)]
    experts: usize,
    /// Parts to measure.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "costs,all-reduce,fused,moe"
    )]
    only: Vec<Section>,
    /// Operations per captured graph.
    #[arg(long, default_value_t = benchmark::OPERATIONS, hide = true)]
    operations: usize,
    /// Cubin of the baseline. By default, the cubin of the bundle or one compiled with nvcc.
    #[arg(long, value_name = "FILE")]
    cubin: Option<PathBuf>,
    /// Writes the tables into this Markdown file. Keeps its sections that start with "Prediction"
    /// or "Explanation".
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Writes every measurement into this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn size(text: &str) -> Result<usize> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    match digits.parse::<usize>()?.checked_mul(unit) {
        Some(bytes) if bytes > 0 && bytes.is_multiple_of(VECTOR) && bytes <= 1 << 30 => Ok(bytes),
        _ => bail!("{text} is no multiple of {VECTOR} bytes up to 1024M"),
    }
}

fn dtype(text: &str) -> Result<DType> {
    let mut known = TYPES.into_iter();
    known
        .find(|dtype| dtype.name() == text)
        .with_context(|| format!("{text} is none of f32, bf16"))
}

fn payload(text: &str) -> Result<DType> {
    let mut known = PAYLOADS.into_iter();
    known
        .find(|dtype| dtype.name() == text)
        .with_context(|| format!("{text} is none of bf16, e4m3"))
}

impl Arguments {
    fn mixtures(&self) -> moe::Cases {
        moe::Cases {
            tokens: self.moe_tokens.clone(),
            hidden: self.moe_hidden.clone(),
            payloads: self.payloads.clone(),
            experts: self.experts,
        }
    }
}

/// Number of ranks, and grid of each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) ranks: usize,
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
}

impl Shape {
    fn new(arguments: &Arguments, ranks: usize, multiprocessors: u32) -> Self {
        let each = (multiprocessors / ranks as u32).clamp(1, MOST_BLOCKS);
        let blocks = match arguments.blocks {
            0 => 1 << each.ilog2(),
            blocks => blocks,
        };
        Self {
            ranks,
            blocks,
            threads: arguments.threads,
        }
    }
}

/// Runs the measurements. Without a GPU, prints one line and returns status 2.
pub(crate) fn main(arguments: &Arguments) -> Result<ExitCode> {
    for ranks in &arguments.ranks {
        ensure!(
            RANKS.contains(ranks),
            "{ranks} ranks: there are kernels for 2, 4 and 8"
        );
    }
    ensure!(
        arguments.blocks <= MOST_BLOCKS
            && arguments.threads.is_multiple_of(64)
            && (64..=entries::MAX_THREADS).contains(&arguments.threads),
        "{} blocks of {} threads: at most {MOST_BLOCKS} of 64, 128, .. {}",
        arguments.blocks,
        arguments.threads,
        entries::MAX_THREADS
    );
    let per_vector = VECTOR / 2;
    let fits = fused::vectors_of_thread(arguments.hidden, arguments.threads).is_some();
    ensure!(
        arguments.hidden > 0 && arguments.hidden.is_multiple_of(per_vector) && fits,
        "rows of {} elements: no multiple of {per_vector}, or too long for {} threads",
        arguments.hidden,
        arguments.threads
    );
    ensure!(
        arguments.tokens.iter().all(|tokens| *tokens > 0),
        "no tokens"
    );
    ensure!(
        arguments.rounds > 0 && arguments.operations > 0,
        "no rounds"
    );
    arguments.mixtures().check(&arguments.ranks)?;
    let device = Device::Cuda(arguments.gpu);
    let gpu = match fusewire::open_gpu(device) {
        Ok(gpu) => gpu,
        Err(error @ fusewire::Error::NoDevice { .. }) => {
            eprintln!("versus cuda needs an NVIDIA GPU: {error}");
            return Ok(ExitCode::from(2));
        }
        Err(error) => return Err(error.into()),
    };
    let baseline = Baseline::load(&gpu, arguments.cubin.as_deref())?;
    let mut report = Report {
        header: header(arguments, &gpu, &baseline),
        ..Report::default()
    };
    if arguments.only.contains(&Section::Costs) {
        report.costs = costs::alone(&gpu, &baseline, arguments.rounds)?;
    }
    for &ranks in &arguments.ranks {
        let multiprocessors = gpu.properties().multiprocessors;
        let shape = Shape::new(arguments, ranks, multiprocessors);
        // The last section needs the most memory, so it has its own communicator.
        for sections in [
            &[Section::Costs, Section::AllReduce, Section::Fused][..],
            &[Section::Moe],
        ] {
            let is_chosen = |section: &&Section| arguments.only.contains(section);
            let sections: Vec<Section> = sections.iter().filter(is_chosen).copied().collect();
            if sections.is_empty() {
                continue;
            }
            let found = measure(arguments, &sections, device, &gpu, &baseline, shape)
                .with_context(|| format!("{ranks} ranks"))?;
            report.costs.extend(found.costs);
            report.all_reduce.extend(found.all_reduce);
            report.fused.extend(found.fused);
            report.moe.extend(found.moe);
            // Writes now, so that a later failure loses no results.
            write(arguments, &report)?;
        }
    }
    println!("{}", report.tables());
    let wrong: u64 = report.rows().map(Row::wrong).sum();
    ensure!(wrong == 0, "{wrong} wrong elements");
    Ok(ExitCode::SUCCESS)
}

fn header(arguments: &Arguments, gpu: &Gpu, baseline: &Baseline) -> Vec<String> {
    let properties = gpu.properties();
    vec![
        format!(
            "{}, {}, {} multiprocessors, driver {}; shared by all ranks, which are threads with a \
             stream each",
            properties.name,
            properties.architecture,
            properties.multiprocessors,
            properties.version
        ),
        format!("baseline: {}", baseline.origin),
        format!(
            "{} rounds, each with every candidate once, starting with a different one; ns of an \
             operation by the GPU's clock on the slowest rank, after operations that are not \
             timed; median of the rounds",
            arguments.rounds
        ),
        "ratios are by round: median [95 % interval by order statistics]; below 1 ours is faster"
            .to_owned(),
        "same memory, same streams, at most as many blocks and threads; all results verified on \
         all ranks"
            .to_owned(),
    ]
}

fn write(arguments: &Arguments, report: &Report) -> Result<()> {
    let create = |file: &PathBuf| match file.parent() {
        Some(folder) => fs::create_dir_all(folder),
        None => Ok(()),
    };
    if let Some(file) = &arguments.json {
        create(file)?;
        let text = serde_json::to_string_pretty(report)? + "\n";
        fs::write(file, text).with_context(|| format!("write {}", file.display()))?;
    }
    if let Some(file) = &arguments.out {
        create(file)?;
        let old = fs::read_to_string(file).unwrap_or_default();
        let header = Header::of(report.header.clone());
        let title = "# Kernels next to CUDA C++";
        let text = document(&old, title, &header, &report.tables());
        fs::write(file, text).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

/// Measures some sections with one number of ranks.
fn measure(
    arguments: &Arguments,
    sections: &[Section],
    device: Device,
    gpu: &Arc<Gpu>,
    baseline: &Baseline,
    shape: Shape,
) -> Result<Report> {
    let buffers = allocate(arguments, gpu, shape)?;
    let rendezvous = Rendezvous::new(shape.ranks);
    let mut options = Options::default();
    options.blocks = shape.blocks;
    options.threads = shape.threads;
    options.timeout = Duration::from_secs(30);
    let body = |comm: Communicator| {
        let attendance = RendezvousGuard::new(&rendezvous);
        let buffers = &buffers;
        let result = rank(
            arguments,
            sections,
            baseline,
            buffers,
            &rendezvous,
            shape,
            &comm,
        );
        if result.is_ok() {
            attendance.end();
        } else {
            drop(attendance);
        }
        Ok(result)
    };
    let ranks = shape.ranks as u32;
    let mut first = None;
    let mut errors = Vec::new();
    for result in run_threads_on(device, "fusewire", ranks, &options, body) {
        match result
            .map_err(anyhow::Error::from)
            .and_then(|result| result)
        {
            Ok(report) => first = first.or(Some(report)),
            Err(error) => errors.push(error),
        }
    }
    // Prefers errors other than `FREED`, because `FREED` only means that another rank has failed.
    let own = |error: &anyhow::Error| error.to_string() != rendezvous::FREED;
    if let Some(at) = errors.iter().position(own) {
        return Err(errors.swap_remove(at));
    }
    if let Some(error) = errors.pop() {
        return Err(error);
    }
    first.context("no rank has reported")
}

fn allocate(arguments: &Arguments, gpu: &Arc<Gpu>, shape: Shape) -> Result<Buffers> {
    let Shape { ranks, threads, .. } = shape;
    let (blocks, threads) = (shape.blocks as usize, threads as usize);
    let most = arguments.sizes.iter().copied().max().unwrap_or(0);
    let tokens = arguments.tokens.iter().copied().max().unwrap_or(0);
    let row = fused::row_vectors(arguments.hidden);
    // Size in bytes of the largest input, which is either an input of a plain all-reduce or all
    // rows of the fused operation.
    let most = most.max(tokens * row * VECTOR);
    let vectors = |bytes: usize| most.min(bytes) / VECTOR;
    let one = buffers::capacity(vectors(ONE_SHOT_BYTES), blocks, threads);
    let two = buffers::capacity(vectors(TWO_SHOT_BYTES).div_ceil(ranks), blocks, threads);
    let norm = (tokens.div_ceil(blocks) * row).next_multiple_of(32);
    Ok(Buffers {
        latch: Latch::new(gpu)?,
        pads: Peers::new(gpu, ranks, SIGNAL_PAD_BYTES)?,
        scratches: Peers::new(gpu, ranks, most.div_ceil(ranks) + VECTOR)?,
        one_shot: Packets::new(gpu, ranks, blocks, 1, one)?,
        two_shot: Packets::new(gpu, ranks, blocks, 2, two)?,
        norm: Packets::new(gpu, ranks, blocks, 1, norm)?,
        ping_pong: Peers::new(gpu, ranks, SIGNAL_PAD_BYTES)?,
    })
}

/// Runs the measurements of one rank.
fn rank(
    arguments: &Arguments,
    sections: &[Section],
    baseline: &Baseline,
    buffers: &Buffers,
    rendezvous: &Rendezvous,
    shape: Shape,
    comm: &Communicator,
) -> Result<Report> {
    comm.warm_up()?;
    let benchmark = Benchmark {
        stream: comm.stream().clone(),
        rendezvous,
        baseline,
        latch: &buffers.latch,
        rank: comm.rank() as usize,
        rounds: arguments.rounds,
        operations: arguments.operations,
        turn: Cell::new(0),
    };
    let part = RankPart {
        benchmark: &benchmark,
        comm,
        baseline,
        buffers,
        shape,
    };
    let say = |row: &Row| eprintln!("{}", row.line());
    let mut report = Report::default();
    if sections.contains(&Section::Costs) {
        let (pads, ping_pong) = (&buffers.pads, &buffers.ping_pong);
        let found: Vec<Cost> = costs::together(&benchmark, baseline, pads, ping_pong, shape)?;
        report.costs = found;
    }
    if sections.contains(&Section::AllReduce) {
        for &dtype in &arguments.types {
            let rows = part.all_sizes(dtype, &arguments.sizes, &arguments.modes, say)?;
            report.all_reduce.extend(rows);
        }
    }
    if sections.contains(&Section::Fused) {
        report.fused = part.all_tokens(&arguments.tokens, arguments.hidden, say)?;
    }
    if sections.contains(&Section::Moe) {
        report.moe = part.all_mixtures(&arguments.mixtures(), say)?;
    }
    benchmark.stream.synchronize()?;
    rendezvous.wait()?;
    comm.finalize()?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(words: &[&str]) -> Result<Arguments> {
        let line = Line::try_parse_from([&["versus"], words].concat())?;
        Ok(line.arguments)
    }

    #[test]
    fn sizes_are_whole_vectors() {
        assert_eq!(size("512").expect("a size"), 512);
        assert_eq!(size("64M").expect("a size"), 64 << 20);
        for wrong in ["", "8", "1G", "0", "3K1", "2048M"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
        assert!(parse(&["--types", "f16"]).is_err());
        assert!(parse(&["--payloads", "e5m2"]).is_err());
    }

    #[test]
    fn all_blocks_have_a_multiprocessor() {
        let arguments = parse(&[]).expect("the defaults");
        assert_eq!(arguments.sizes.first(), Some(&512));
        assert_eq!(arguments.sizes.last(), Some(&(64 << 20)));
        for (ranks, blocks) in [(2, 64), (4, 32), (8, 16)] {
            assert_eq!(Shape::new(&arguments, ranks, 132).blocks, blocks);
        }
        let few = parse(&["--blocks", "8"]).expect("blocks");
        assert_eq!(Shape::new(&few, 2, 132).blocks, 8);
        assert_eq!(Shape::new(&arguments, 8, 4).blocks, 1);
    }

    #[test]
    fn wrong_arguments_are_refused_before_a_gpu_is_asked_for() {
        for (words, expected) in [
            (&["--ranks", "3"][..], "3 ranks"),
            (&["--threads", "100"], "100 threads"),
            (&["--hidden", "7"], "rows of 7"),
            (&["--hidden", "80000"], "rows of 80000"),
            (&["--tokens", "0"], "no tokens"),
            (&["--rounds", "0"], "no rounds"),
            (&["--experts", "100"], "100 experts"),
            (&["--moe-hidden", "100"], "tokens of [100] elements"),
        ] {
            let arguments = parse(words).expect("words");
            let error = main(&arguments).expect_err("refused").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
