//! `fusewire perf`: runs operations over a range of sizes, verifies every element, prints a table, in the
//! manner of nccl-tests.

mod buffers;
mod case;
mod operation;
mod plot;
mod rank;
mod report;

use core::time::Duration;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::ExitCode;

use fusewire::bootstrap::RankSize;
use fusewire::{
    Algorithm, DType, Determinism, Device, MAX_SIZE, Options, ReduceOp, new_comm, run_threads_on,
};

use self::operation::{Kind, Refusal};
use self::report::Row;
use crate::Usage;
use crate::launcher::{self, Job};

/// What to measure. Sizes are bytes, with K, M and G for powers of 1024.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Operations, separated by commas, or `all`.
    operations: String,
    /// Ranks to start (default: the number of cores, 2 at least and 8 at most).
    #[arg(long)]
    ranks: Option<u32>,
    /// Device that runs the kernels: cpu, cuda (cuda:1, ..), hip. With --threads all ranks share that one GPU; as processes,
    /// and without a number, each takes the GPU of its rank, in turn.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Backend that carries the operations out: fusewire (its own kernels), gloo, nccl, ncclx, rccl, rcclx, or one that
    /// FUSEWIRE_BACKEND_PATH_<NAME> names.
    #[arg(long, default_value = "fusewire")]
    backend: String,
    /// Ranks are threads of one process instead of processes.
    #[arg(long)]
    pub(crate) threads: bool,
    /// Smallest size.
    #[arg(long, default_value = "8")]
    min_bytes: String,
    /// Largest size.
    #[arg(long, default_value = "64M")]
    max_bytes: String,
    /// Each size is this many times the one before.
    #[arg(long, default_value_t = 2)]
    factor: u64,
    /// Element type: f64, f32, f16, bf16, e4m3, e5m2, i8, u8, i32, u32, i64, u64.
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Reduction: sum, product, min, max, average, premul_sum, band, bor, bxor.
    #[arg(long, default_value = "sum")]
    op: String,
    /// Algorithm of all_reduce: auto, packet, signal, two_shot, nvls (by multicast, whose bits may differ).
    #[arg(long, default_value = "auto")]
    algorithm: String,
    /// Timed calls per size (default: by size).
    #[arg(long)]
    iterations: Option<u32>,
    /// Calls before those (default: by size).
    #[arg(long)]
    warmup: Option<u32>,
    /// Input and output are the same memory.
    #[arg(long)]
    in_place: bool,
    /// Replays a captured graph instead of calling.
    #[arg(long)]
    graph: bool,
    /// Buffers outside of windows, so that data goes through staging.
    #[arg(long)]
    unregistered: bool,
    /// Compares every element with the reference (the default).
    #[arg(long, overrides_with = "no_check")]
    check: bool,
    /// Does not compare.
    #[arg(long)]
    no_check: bool,
    /// Time-out of every wait, in seconds.
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
    /// Writes the rows as a JSON array.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Writes a chart of latency and bandwidth as SVG.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Flips one element of this rank's result before it is compared: shows that the comparison works.
    #[arg(long, hide = true)]
    corrupt: Option<u32>,
}

/// The arguments, understood.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) operations: Vec<Kind>,
    pub(crate) ranks: u32,
    pub(crate) min_bytes: u64,
    pub(crate) max_bytes: u64,
    pub(crate) factor: u64,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) iterations: Option<u32>,
    pub(crate) warmup: Option<u32>,
    pub(crate) in_place: bool,
    pub(crate) graph: bool,
    pub(crate) registered: bool,
    pub(crate) check: bool,
    pub(crate) json: Option<PathBuf>,
    pub(crate) plot: Option<PathBuf>,
    pub(crate) corrupt: Option<u32>,
    pub(crate) options: Options,
    pub(crate) device: Device,
    pub(crate) backend: String,
    /// Notes to print above the table.
    pub(crate) notes: Vec<String>,
}

impl Settings {
    /// The nominal sizes of an operation.
    pub(crate) fn sizes(&self, kind: Kind) -> Vec<u64> {
        if kind.sizeless() {
            return vec![0];
        }
        let next = |bytes: &u64| Some(bytes.saturating_mul(self.factor).max(1));
        let sizes = core::iter::successors(Some(self.min_bytes), next);
        sizes
            .take_while(|bytes| *bytes <= self.max_bytes && *bytes < u64::MAX)
            .collect()
    }

    /// Elements of the longest buffer of any rank.
    pub(crate) fn longest(&self) -> usize {
        let shapes = self.operations.iter().flat_map(|kind| {
            let count = kind.count(self.max_bytes, self.dtype, self.ranks);
            (0..self.ranks).map(move |rank| kind.shape(count, self.ranks, rank))
        });
        shapes
            .map(|(input, output)| input.max(output))
            .max()
            .unwrap_or(0)
    }

    /// Refuses what this host's memory cannot hold: every rank has input and output, and for the check a
    /// copy of each.
    fn check_memory(&self) -> anyhow::Result<()> {
        let bytes = self.longest() as u64 * self.dtype.size() as u64;
        let needed = bytes.saturating_mul(4 * u64::from(self.ranks));
        match available_memory() {
            Some(available) if needed > available => Err(usage(format!(
                "--max-bytes {}: {} ranks need {} MiB, {} MiB are available",
                self.max_bytes,
                self.ranks,
                needed >> 20,
                available >> 20
            ))),
            _ => Ok(()),
        }
    }
}

/// Measures; the status is 1 if an element was wrong.
pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let rank_size = RankSize::from_env_if_set()?;
    let settings = understand(arguments, rank_size)?;
    if let Some(rank_size) = rank_size {
        let comm = new_comm(
            &settings.backend,
            settings.device,
            "world",
            settings.options.clone(),
        )?;
        let rows = rank::run(&comm, &settings)?;
        if rank_size.rank == 0 {
            report::write(&settings, &rows)?;
        }
        return Ok(status(&rows));
    }
    settings.check_memory()?;
    if arguments.threads {
        return threads(&settings);
    }
    let program = std::env::current_exe()?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let job = Job {
        program: program.as_os_str(),
        arguments: &arguments,
        ranks: settings.ranks,
        prefix: false,
        open_store: false,
        grace: settings.options.timeout + Duration::from_secs(2),
    };
    Ok(ExitCode::from(launcher::run(&job)?))
}

/// Ranks as threads of this process.
fn threads(settings: &Settings) -> anyhow::Result<ExitCode> {
    let (backend, ranks) = (&settings.backend, settings.ranks);
    let results = run_threads_on(settings.device, backend, ranks, &settings.options, |comm| {
        rank::run(&comm, settings)
    });
    let mut failed = false;
    let mut first = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(rows) => first = first.or(Some(rows)),
            Err(error) => {
                eprintln!("error: rank {rank}: {error}");
                failed = true;
            }
        }
    }
    match first {
        Some(rows) if !failed => {
            report::write(settings, &rows)?;
            Ok(status(&rows))
        }
        _ => Ok(ExitCode::FAILURE),
    }
}

fn status(rows: &[Row]) -> ExitCode {
    if rows.iter().all(|row| row.wrong == 0) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// What the system could give without swapping, where it says so.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

fn usage(text: String) -> anyhow::Error {
    Usage(text).into()
}

fn understand(arguments: &Arguments, rank_size: Option<RankSize>) -> anyhow::Result<Settings> {
    let device = device(&arguments.device, rank_size)?;
    let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get() as u32);
    let ranks = match (rank_size, arguments.ranks) {
        (Some(rank_size), Some(ranks)) if ranks != rank_size.size => {
            let size = rank_size.size;
            return Err(usage(format!(
                "--ranks {ranks}, but the launcher has started {size}"
            )));
        }
        (Some(rank_size), _) => rank_size.size,
        (None, ranks) => ranks.unwrap_or(cores.clamp(2, 8)),
    };
    if ranks == 0 || ranks > MAX_SIZE {
        return Err(usage(format!(
            "{ranks} ranks; 1 to {MAX_SIZE} are possible"
        )));
    }
    let dtype = DType::ALL
        .into_iter()
        .find(|dtype| dtype.name() == arguments.dtype)
        .ok_or_else(|| {
            let names = DType::ALL.map(DType::name).join(", ");
            usage(format!("type \"{}\" is none of {names}", arguments.dtype))
        })?;
    let op: ReduceOp = arguments
        .op
        .parse()
        .map_err(|error: fusewire::Error| usage(error.to_string()))?;
    let algorithm: Algorithm = arguments
        .algorithm
        .parse()
        .map_err(|error: fusewire::Error| usage(error.to_string()))?;
    let (min_bytes, max_bytes) = (bytes(&arguments.min_bytes)?, bytes(&arguments.max_bytes)?);
    if min_bytes > max_bytes {
        return Err(usage(format!(
            "--min-bytes {min_bytes} is above --max-bytes {max_bytes}"
        )));
    }
    // Every rank holds input, output and their guards.
    if max_bytes > 1 << 40 {
        return Err(usage(format!(
            "--max-bytes {max_bytes} is more than memory can hold"
        )));
    }
    if arguments.factor < 2 {
        return Err(usage(format!("--factor {}; 2 at least", arguments.factor)));
    }
    if arguments.iterations == Some(0) {
        return Err(usage("--iterations 0; 1 at least".to_owned()));
    }
    if !(arguments.timeout.is_finite() && arguments.timeout > 0.0 && arguments.timeout < 1e9) {
        return Err(usage(format!(
            "--timeout {}; a positive number of seconds",
            arguments.timeout
        )));
    }
    let mut options = Options::default();
    options.timeout = Duration::from_secs_f64(arguments.timeout);
    options.algorithm = algorithm;
    if algorithm == Algorithm::Nvls {
        options.determinism = Determinism::Any;
    }
    options.abort_process_on_timeout_or_error = Some(false);
    let backends = fusewire::backend::backend_names();
    if !fusewire::backend::is_backend(&arguments.backend) {
        return Err(usage(format!(
            "backend \"{}\"; this build has {} (others by --features, or by \
                FUSEWIRE_BACKEND_PATH_<NAME>)",
            arguments.backend,
            backends.join(", ")
        )));
    }
    for (option, path) in [("--json", &arguments.json), ("--plot", &arguments.plot)] {
        // Not found out after minutes of measuring.
        let Some(path) = path else { continue };
        if let Err(error) = OpenOptions::new().append(true).create(true).open(path) {
            return Err(usage(format!("{option} {}: {error}", path.display())));
        }
    }
    let (mut operations, mut notes) = operations(&arguments.operations, dtype, op, ranks)?;
    if arguments.backend != "fusewire" && arguments.operations == "all" {
        operations.retain(|kind| *kind != Kind::AllReduceRmsNorm);
        notes.push(format!(
            "all_reduce_rms_norm is left out: backend {} has no fused operations",
            arguments.backend
        ));
    }
    Ok(Settings {
        operations,
        ranks,
        min_bytes,
        max_bytes,
        factor: arguments.factor,
        dtype,
        op,
        iterations: arguments.iterations,
        warmup: arguments.warmup,
        in_place: arguments.in_place,
        graph: arguments.graph,
        registered: !arguments.unregistered,
        check: !arguments.no_check,
        json: arguments.json.clone(),
        plot: arguments.plot.clone(),
        corrupt: arguments.corrupt,
        options,
        device,
        backend: arguments.backend.clone(),
        notes,
    })
}

/// The device of this rank, which must be there.
fn device(name: &str, rank_size: Option<RankSize>) -> anyhow::Result<Device> {
    let device: Device = name
        .parse()
        .map_err(|error: fusewire::Error| usage(error.to_string()))?;
    let found = match device {
        Device::Cuda(_) => fusewire::cuda::devices(),
        Device::Hip(_) => fusewire::hip::devices(),
        _ => return Ok(device),
    };
    let found = found.map_err(|error| usage(error.to_string()))?;
    let count = found.len() as u32;
    if count == 0 {
        return Err(usage(format!("device {name}: there is no such GPU here")));
    }
    let local = rank_size.map_or(0, |rank_size| rank_size.rank);
    Ok(match device {
        Device::Cuda(_) if !name.contains(':') => Device::Cuda(local % count),
        Device::Hip(_) if !name.contains(':') => Device::Hip(local % count),
        Device::Cuda(ordinal) | Device::Hip(ordinal) if ordinal >= count => {
            return Err(usage(format!(
                "device {name}: there are {count} GPUs here, 0 to {}",
                count - 1
            )));
        }
        other => other,
    })
}

/// The operations of a list; `all` leaves out what a type does not have, with a note.
fn operations(
    list: &str,
    dtype: DType,
    op: ReduceOp,
    ranks: u32,
) -> anyhow::Result<(Vec<Kind>, Vec<String>)> {
    let all = list == "all";
    let named: Vec<Kind> = if all {
        Kind::ALL.to_vec()
    } else {
        let find = |name: &str| {
            Kind::ALL
                .into_iter()
                .find(|kind| kind.name() == name)
                .ok_or_else(|| {
                    let names = Kind::ALL.map(Kind::name).join(", ");
                    usage(format!("operation \"{name}\" is none of {names}, all"))
                })
        };
        list.split(',').map(find).collect::<anyhow::Result<_>>()?
    };
    let (mut kept, mut notes) = (Vec::new(), Vec::new());
    for kind in named {
        match kind.refuses(dtype, op, ranks) {
            None => kept.push(kind),
            Some(Refusal::Kind(reason)) if all => {
                notes.push(format!("{} is left out: {reason}", kind.name()));
            }
            Some(Refusal::Kind(reason) | Refusal::Op(reason)) => {
                return Err(usage(format!("{}: {reason}", kind.name())));
            }
        }
    }
    Ok((kept, notes))
}

/// A size: a number with K, M or G for powers of 1024.
fn bytes(text: &str) -> anyhow::Result<u64> {
    let (number, unit) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 1u64 << 10),
        Some((at, 'm' | 'M')) => (&text[..at], 1 << 20),
        Some((at, 'g' | 'G')) => (&text[..at], 1 << 30),
        _ => (text, 1),
    };
    let number: u64 = number.parse().map_err(|_| {
        usage(format!(
            "size \"{text}\"; a number with K, M or G is needed"
        ))
    })?;
    number
        .checked_mul(unit)
        .ok_or_else(|| usage(format!("size \"{text}\" overflows")))
}
