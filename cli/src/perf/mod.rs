//! `fusewire perf`: runs operations over a range of sizes, verifies every element and prints a
//! table, as nccl-tests do.

mod buffers;
mod call;
mod case;
mod moe;
mod operation;
mod parse;
mod plot;
mod rank;
mod report;
mod row;
mod timing;

use core::time::Duration;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use fusewire::bootstrap::RankSize;
use fusewire::{
    Algorithm, DType, Determinism, Device, MAX_SIZE, Options, ReduceOp, new_comm, run_threads_on,
};

use self::moe::ExpertLayer;
use self::operation::Kind;
use self::row::Row;
use crate::Usage;
use crate::launcher::{self, Job};

/// Arguments of `fusewire perf`. A size is a number of bytes, with K, M, G or T for powers of 1024:
/// 64, 1.5K, 2MiB.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Arguments {
    #[arg(required = true, help = operations_help())]
    operations: Vec<String>,
    /// Number of ranks (default: the number of cores, at least 2 and at most 8).
    #[arg(long)]
    ranks: Option<u32>,
    /// Number of hosts to emulate: the ranks are divided among them, and reach ranks of other hosts
    /// only by TCP on the loopback interface. Ranks must be a multiple of it.
    #[arg(long, default_value_t = 1)]
    hosts: u32,
    /// Device that runs the kernels: cpu, cuda (cuda:1, ..), hip. With --threads, all ranks share
    /// one GPU. Otherwise, without a number, rank r uses GPU r modulo the number of GPUs.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Backend that executes the operations: fusewire (the library's kernels), gloo, nccl, ncclx,
    /// rccl, rcclx, or NAME, whose library FUSEWIRE_BACKEND_PATH_<NAME> names.
    #[arg(long, default_value = "fusewire")]
    backend: String,
    /// Run the ranks as threads of one process.
    #[arg(long)]
    pub(crate) threads: bool,
    /// Smallest size.
    #[arg(short = 'b', long, default_value = "8")]
    min_bytes: String,
    /// Largest size (default: 64M, for moe_dispatch and moe_combine 64M / --top-k; or the smallest
    /// size if that is larger).
    #[arg(short = 'e', long)]
    max_bytes: Option<String>,
    /// Measure only this size.
    #[arg(long, conflicts_with_all = ["min_bytes", "max_bytes"])]
    bytes: Option<String>,
    /// Factor between successive sizes.
    #[arg(short = 'f', long, default_value_t = 2)]
    factor: u64,
    /// Element type: f64, f32, f16, bf16, e4m3, e5m2, i8, u8, i32, u32, i64, u64.
    #[arg(short = 'd', long, default_value = "f32")]
    dtype: String,
    /// Reduction: sum, product, min, max, average, premul_sum, band, bor, bxor.
    #[arg(short = 'o', long, default_value = "sum")]
    op: String,
    /// Algorithm of all_reduce: auto, packet, packet_two_shot, signal, two_shot, nvls (uses
    /// multicast; its results may differ in the last bits).
    #[arg(long, default_value = "auto")]
    algorithm: String,
    /// Number of samples per size (default: as many as fit in 200 ms, from 5 to 5000). A sample is
    /// a call on the CPU and a batch of operations on a GPU.
    #[arg(short = 'n', long)]
    iterations: Option<u32>,
    /// Number of operations per batch on a GPU (default: as many as fit in 1 ms, at most 256). An
    /// event is recorded before and after each batch.
    #[arg(long, value_name = "OPERATIONS")]
    batch: Option<u32>,
    /// Number of calls before the timed ones (default: as many as take 20 ms).
    #[arg(short = 'w', long)]
    warmup: Option<u32>,
    /// Use the same memory for input and output.
    #[arg(long)]
    in_place: bool,
    /// Replay a graph instead of calling the operation. The graph contains one operation on the
    /// CPU, and a batch of operations on a GPU.
    #[arg(long)]
    graph: bool,
    /// Use buffers outside of windows, so that data goes through staging.
    #[arg(long)]
    unregistered: bool,
    /// Compare every element with the reference (the default).
    #[arg(long)]
    check: bool,
    /// Do not compare.
    #[arg(long, conflicts_with = "check")]
    no_check: bool,
    /// 1 for --check, 0 for --no-check, as in nccl-tests.
    #[arg(short = 'c', value_name = "0|1", conflicts_with_all = ["check", "no_check"])]
    compare: Option<u32>,
    /// Timeout of every wait, in seconds.
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
    /// Write the rows as a JSON array; `-` is standard output, and the table goes to standard
    /// error.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write a chart of latency and bandwidth to a file whose name ends in .svg.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Rank whose output is corrupted before the comparison, to test that the comparison reports a
    /// mismatch.
    #[arg(long, hide = true)]
    corrupt: Option<u32>,
    #[command(flatten)]
    layer: ExpertLayer,
}

/// Returns the description of the argument with the operations.
fn operations_help() -> String {
    let all = Kind::all(ExpertLayer::DEFAULT);
    let names: Vec<&str> = all.iter().map(|kind| kind.name()).collect();
    format!(
        "Operations, separated by commas, or `all`: {}",
        names.join(", ")
    )
}

/// The arguments after validation.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) operations: Vec<Kind>,
    pub(crate) ranks: u32,
    pub(crate) min_bytes: u64,
    /// `None` selects the default of each operation.
    pub(crate) max_bytes: Option<u64>,
    pub(crate) factor: u64,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) iterations: Option<u32>,
    pub(crate) batch: Option<u32>,
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
    /// Returns the largest nominal size of an operation, in bytes.
    fn max_bytes(&self, kind: Kind) -> u64 {
        let default = || kind.max_bytes().max(self.min_bytes);
        self.max_bytes.unwrap_or_else(default)
    }

    /// Returns the nominal sizes of an operation, in bytes. Each gives a different number of
    /// elements.
    pub(crate) fn sizes(&self, kind: Kind) -> Vec<u64> {
        if kind.sizeless() {
            return vec![0];
        }
        let max_bytes = self.max_bytes(kind);
        let next = |bytes: &u64| Some(bytes.saturating_mul(self.factor).max(1));
        let sizes = core::iter::successors(Some(self.min_bytes), next);
        let mut sizes: Vec<u64> = sizes
            .take_while(|bytes| *bytes <= max_bytes && *bytes < u64::MAX)
            .collect();
        sizes.dedup_by_key(|bytes| kind.count(*bytes, self.dtype, self.ranks));
        sizes
    }

    /// Returns true if the rows are also written to a file. The file must be complete even if the
    /// reader of the table closes the pipe.
    pub(crate) fn writes_file(&self) -> bool {
        let json = self.json.as_ref();
        json.is_some_and(|path| !report::is_stdout(path)) || self.plot.is_some()
    }

    /// Returns the number of elements of the longest buffer of any rank.
    pub(crate) fn longest(&self) -> usize {
        let shapes = self.operations.iter().flat_map(|kind| {
            let count = kind.count(self.max_bytes(*kind), self.dtype, self.ranks);
            (0..self.ranks).map(move |rank| kind.shape(count, self.ranks, rank))
        });
        shapes
            .map(|(input, output)| input.max(output))
            .max()
            .unwrap_or(0)
    }

    /// Returns an error if the memory of this host cannot hold the buffers: an input and an output
    /// for every rank, a copy of each for the check, and the memory of a layer with experts.
    fn check_memory(&self) -> anyhow::Result<()> {
        let layer = |kind: &Kind| {
            let count = kind.count(self.max_bytes(*kind), self.dtype, self.ranks) as u64;
            count.saturating_mul(kind.layer_memory(self.ranks))
        };
        let layer = self.operations.iter().map(layer).max().unwrap_or(0);
        let elements = layer.saturating_add(4 * self.longest() as u64);
        let each = elements.saturating_mul(self.dtype.size() as u64);
        let needed = each.saturating_mul(u64::from(self.ranks));
        let max_bytes = self.operations.iter().map(|kind| self.max_bytes(*kind));
        match available_memory() {
            Some(available) if needed > available => Err(usage(format!(
                "--max-bytes {}: {} ranks need {} MiB, {} MiB are available",
                max_bytes.max().unwrap_or(0),
                self.ranks,
                needed >> 20,
                available >> 20
            ))),
            _ => Ok(()),
        }
    }
}

/// Runs the measurements. Returns status 1 if an element was wrong.
pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    // If the reader closes the pipe early, as in `fusewire perf all | head`, SIGPIPE must not kill
    // rank 0 between two calls. The report detects the closed pipe, and all ranks stop together.
    // SAFETY: no other thread of this process changes the action of a signal.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let rank_size = RankSize::from_env_if_set()?;
    let launches = rank_size.is_none() && !arguments.threads;
    // SAFETY: the command has not started threads.
    let guard = launches
        .then(|| unsafe { launcher::guarded() })
        .transpose()?;
    let settings = understand(arguments, rank_size)?;
    if let Some(rank_size) = rank_size {
        let comm = new_comm(
            &settings.backend,
            settings.device,
            "world",
            settings.options.clone(),
        )?;
        let rows = rank::run(&comm, &settings);
        let ended = comm.finalize();
        let rows = rows?;
        ended?;
        if rank_size.rank == 0 {
            report::write(&settings, &rows)?;
        }
        return Ok(status(&rows));
    }
    settings.check_memory()?;
    let Some(guard) = guard else {
        return threads(&settings);
    };
    let program = std::env::current_exe()?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let job = Job {
        program: program.as_os_str(),
        arguments: &arguments,
        ranks: settings.ranks,
        prefix: false,
        open_store: false,
        ends_with_output: !settings.writes_file(),
        grace: settings.options.timeout + Duration::from_secs(2),
    };
    Ok(ExitCode::from(launcher::run(&job, &guard)?))
}

/// Runs the ranks as threads of this process.
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
                complain(format_args!("error: rank {rank}: {error}"));
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

/// Returns the number of bytes that the system can allocate without swapping, if the system reports
/// it.
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

/// Writes a line to standard error. Unlike `eprintln!`, it does not panic if standard error is
/// closed.
fn complain(line: core::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
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
    let dtype = parse::dtype(&arguments.dtype)?;
    let op = parse::reduction(&arguments.op)?;
    let algorithm: Algorithm = arguments
        .algorithm
        .parse()
        .map_err(|error: fusewire::Error| usage(error.to_string()))?;
    let bytes = |text: &Option<String>| text.as_deref().map(parse::bytes).transpose();
    let (min_bytes, max_bytes) = match bytes(&arguments.bytes)? {
        Some(bytes) => (bytes, Some(bytes)),
        None => (
            parse::bytes(&arguments.min_bytes)?,
            bytes(&arguments.max_bytes)?,
        ),
    };
    let largest = max_bytes.unwrap_or(min_bytes);
    if min_bytes > largest {
        return Err(usage(format!(
            "--min-bytes {min_bytes} is above --max-bytes {largest}"
        )));
    }
    // Rejects sizes that no machine can hold: every rank allocates an input, an output and guards.
    if largest > 1 << 40 {
        return Err(usage(format!(
            "--max-bytes {largest} is more than memory can hold"
        )));
    }
    if arguments.factor < 2 {
        return Err(usage(format!("--factor {}; 2 at least", arguments.factor)));
    }
    if arguments.iterations == Some(0) {
        return Err(usage("--iterations 0; 1 at least".to_owned()));
    }
    match arguments.batch {
        Some(0) => return Err(usage("--batch 0: expected at least 1".to_owned())),
        Some(batch) if !device.is_gpu() => {
            return Err(usage(format!(
                "--batch {batch}: batches are timed only on a GPU; omit --batch, or select a GPU \
                 with --device"
            )));
        }
        _ => {}
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
    if arguments.hosts > 1 {
        if !ranks.is_multiple_of(arguments.hosts) {
            return Err(usage(format!(
                "--hosts {}: {ranks} ranks cannot be divided among them",
                arguments.hosts
            )));
        }
        options.testing.ranks_per_host = Some(ranks / arguments.hosts);
    }
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
    if arguments.compare.is_some_and(|compare| compare > 1) {
        return Err(usage("-c takes 0 or 1".to_owned()));
    }
    arguments.layer.check()?;
    let (operations, mut notes) = parse::operations(
        &arguments.operations.join(","),
        &Kind::all(arguments.layer),
        |kind| kind.refuses(dtype, op, (ranks, arguments.hosts), &arguments.backend),
    )?;
    if let Some(layer) = operations.iter().find_map(|kind| kind.layer()) {
        notes.extend(layer.notes());
    }
    if let Some(path) = &arguments.plot {
        plot::check(path, &operations)?;
    }
    for (option, path) in [("--json", &arguments.json), ("--plot", &arguments.plot)] {
        // Opens the files now, so that an error is reported before the measurements, which may take
        // minutes.
        let Some(path) = path.as_ref().filter(|path| !report::is_stdout(path)) else {
            continue;
        };
        if let Err(error) = OpenOptions::new().append(true).create(true).open(path) {
            return Err(usage(format!("{option} {}: {error}", path.display())));
        }
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
        batch: arguments.batch,
        warmup: arguments.warmup,
        in_place: arguments.in_place,
        graph: arguments.graph,
        registered: !arguments.unregistered,
        check: !arguments.no_check && arguments.compare != Some(0),
        json: arguments.json.clone(),
        plot: arguments.plot.clone(),
        corrupt: arguments.corrupt,
        options,
        device,
        backend: arguments.backend.clone(),
        notes,
    })
}

/// Returns the device of this rank. Fails if the device does not exist.
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
        return Err(usage(format!(
            "device {name}: this machine has no such GPU"
        )));
    }
    let local = rank_size.map_or(0, |rank_size| rank_size.rank);
    Ok(match device {
        Device::Cuda(_) if !name.contains(':') => Device::Cuda(local % count),
        Device::Hip(_) if !name.contains(':') => Device::Hip(local % count),
        Device::Cuda(ordinal) | Device::Hip(ordinal) if ordinal >= count => {
            return Err(usage(format!(
                "device {name}: this machine has {count} GPUs, 0 to {}",
                count - 1
            )));
        }
        other => other,
    })
}
