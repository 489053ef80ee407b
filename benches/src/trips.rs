//! Counts the dependent loads, the fences and the bytes of each operation's launch, on the fake of
//! the CUDA driver with the emulator. Needs no GPU.

mod moe;
mod prediction;

use core::ffi::{CStr, c_char};
use core::time::Duration;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Barrier, Mutex};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use fusewire::{
    Algorithm, CallOptions, Communicator, DType, Determinism, Device, Norm, Options, ReduceOp,
    Stream, Tensor, VocabParallel, WindowOptions, run_threads_each,
};
use libloading::Library;
use serde::Deserialize;

/// Size of the longest row of a norm in bytes.
const ROW: usize = 16 << 10;
/// Number of ranks of a child process.
const RANKS: &str = "FUSEWIRE_BENCHES_TRIPS_RANKS";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Numbers of ranks, each with its own device. Even; the sizes must be multiples of them.
    #[arg(long, value_delimiter = ',', default_value = "2,8")]
    ranks: Vec<u32>,
    /// Sizes of the larger buffer of an operation. Sizes without an element for each rank are left
    /// out.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8,64,512,4096,32768,262144,1048576"
    )]
    bytes: Vec<usize>,
    /// Operations whose names contain one of these texts.
    #[arg(long, value_delimiter = ',', default_value = "")]
    operations: Vec<String>,
    /// Prints the longest chain of each launch of the kernels whose names contain this text.
    #[arg(long)]
    explain: Option<String>,
    /// Tokens of a rank in a mixture of experts.
    #[arg(long, value_delimiter = ',', default_value = "1,128")]
    tokens: Vec<usize>,
    /// Elements of a token in a mixture of experts: a multiple of 128.
    #[arg(long, default_value_t = 7168)]
    hidden: usize,
    /// Also prints the times that measured costs of an H100 predict.
    #[arg(long)]
    predict: bool,
    /// Scheduler of the emulator, as in `FUSEWIRE_CUDA_FAKE_SCHEDULER`.
    #[arg(long, default_value = "round-robin")]
    scheduler: String,
}

/// The operations, and the algorithm that the communicator must use.
const OPERATIONS: &[(&str, Algorithm)] = &[
    ("all_reduce auto", Algorithm::Auto),
    ("all_reduce packet", Algorithm::Packet),
    ("all_reduce packet_two_shot", Algorithm::PacketTwoShot),
    ("all_reduce signal", Algorithm::Signal),
    ("all_reduce two_shot", Algorithm::TwoShot),
    ("all_reduce nvls", Algorithm::Nvls),
    ("reduce", Algorithm::Auto),
    ("reduce_scatter", Algorithm::Auto),
    ("reduce_scatter nvls", Algorithm::Nvls),
    ("reduce_scatter_quantized", Algorithm::Auto),
    ("all_gather", Algorithm::Auto),
    ("all_gather nvls", Algorithm::Nvls),
    ("broadcast", Algorithm::Auto),
    ("scatter", Algorithm::Auto),
    ("gather", Algorithm::Auto),
    ("all_to_all", Algorithm::Auto),
    ("all_gather_v", Algorithm::Auto),
    ("all_to_all_v", Algorithm::Auto),
    ("send_recv", Algorithm::Auto),
    ("batch", Algorithm::Auto),
    ("barrier", Algorithm::Auto),
    ("window_put", Algorithm::Auto),
    ("window_get", Algorithm::Auto),
    ("window_signal", Algorithm::Auto),
    ("all_reduce_norm", Algorithm::Auto),
    ("reduce_scatter_norm", Algorithm::Auto),
    ("vocab_parallel", Algorithm::Auto),
    ("all_gather_with_flags", Algorithm::Auto),
    ("reduce_scatter_on_arrival", Algorithm::Auto),
    ("moe_dispatch", Algorithm::Auto),
    ("moe_dispatch fp8", Algorithm::Auto),
    ("moe_dispatch rank_major", Algorithm::Auto),
    ("moe_dispatch fp8 rank_major", Algorithm::Auto),
    ("moe_combine", Algorithm::Auto),
    ("moe_combine rank_major", Algorithm::Auto),
];

/// Strong loads, weak loads, fences.
type Steps = [u32; 3];

/// Trips of a launch, as the fake reports them.
#[derive(Clone, Debug, Deserialize)]
struct Launch {
    kernel: String,
    device: u32,
    number: u64,
    /// Number of the launch on its device.
    launch: u32,
    steps: Steps,
    to_data: Option<Steps>,
    leader_instructions: u64,
    /// Bytes read and written by route.
    bytes: BTreeMap<String, [u64; 2]>,
    /// Device, kernel, line, instruction, source.
    chain: Vec<(u32, String, u32, String, Option<String>)>,
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    if let Ok(ranks) = std::env::var(RANKS) {
        return table(arguments, ranks.parse()?);
    }
    println!(
        "| operation | kernel | ranks | bytes | strong loads | weak loads | fences | signal to \
         data | leader instructions | own memory | peers | host | multicast |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|");
    let folder = tempfile::tempdir()?;
    fusewire_cuda_fake_library::install(folder.path())?;
    // All devices of a process must launch the same number of kernels.
    for ranks in &arguments.ranks {
        let status = Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .env("LD_LIBRARY_PATH", folder.path())
            .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
            .env("FUSEWIRE_FAKE_GPU", "ptx")
            .env("FUSEWIRE_CUDA_FAKE_DEVICES", ranks.to_string())
            .env("FUSEWIRE_CUDA_FAKE_MULTICAST", "1")
            .env("FUSEWIRE_CUDA_FAKE_MEMORY_MODEL", "unchecked")
            .env("FUSEWIRE_CUDA_FAKE_SCHEDULER", &arguments.scheduler)
            .env("FUSEWIRE_CUDA_FAKE_TRIPS", "1")
            .env(RANKS, ranks.to_string())
            .status()?;
        ensure!(status.success(), "the child process ended with {status}");
    }
    Ok(())
}

/// Prints the rows of all operations.
fn table(arguments: &Arguments, ranks: u32) -> Result<()> {
    let started = Instant::now();
    let predictions = Mutex::new(Vec::new());
    let selected = |name: &str| arguments.operations.iter().any(|it| name.contains(it));
    for nvls in [false, true] {
        let operations: Vec<_> = OPERATIONS
            .iter()
            .filter(|(name, algorithm)| selected(name) && (*algorithm == Algorithm::Nvls) == nvls)
            .collect();
        if operations.is_empty() {
            continue;
        }
        let mut options = Options::default();
        options.timeout = Duration::from_secs(600);
        if nvls {
            options.determinism = Determinism::Any;
        }
        let (barrier, seen) = (Barrier::new(ranks as usize), Mutex::new(0));
        let run = Run {
            arguments,
            barrier: &barrier,
            seen: &seen,
            predictions: &predictions,
        };
        let results = run_threads_each(Device::Cuda, "fusewire", ranks, &options, |comm| {
            let all = || {
                // The first launch of a communicator reads its epochs twice.
                let warm_up = comm.alloc(DType::F32, 1 << 18)?;
                comm.all_reduce(&warm_up, ReduceOp::Sum)?;
                let mut all = operations.iter();
                all.try_for_each(|(name, algorithm)| run.operation(&comm, name, *algorithm))
            };
            let result: Result<()> = all();
            if let Err(error) = result {
                // The other ranks would wait for this one without end.
                eprintln!("error: rank {}: {error:#}", comm.rank());
                std::process::exit(1);
            }
            Ok(())
        });
        results.into_iter().collect::<Result<Vec<()>, _>>()?;
    }
    let predictions = predictions.into_inner().expect("no panic");
    if arguments.predict && !predictions.is_empty() {
        println!("\n{}\n{}\n", prediction::HEAD, predictions.join("\n"));
    }
    eprintln!("{ranks} ranks: {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// State that the ranks share.
struct Run<'a> {
    arguments: &'a Arguments,
    barrier: &'a Barrier,
    /// Number of the last launch before the current operation.
    seen: &'a Mutex<u64>,
    /// Rows of the table of predictions.
    predictions: &'a Mutex<Vec<String>>,
}

/// An operation on given tensors. The tensors have the size of the larger buffer.
struct Call<'a> {
    comm: &'a Communicator,
    name: &'a str,
    input: Tensor,
    output: Tensor,
    bytes: usize,
}

impl Run<'_> {
    /// Prints the rows of an operation.
    fn operation(&self, comm: &Communicator, name: &str, algorithm: Algorithm) -> Result<()> {
        if name.starts_with("moe") {
            return self.moe(comm, name);
        }
        let comm = match algorithm {
            Algorithm::Auto => comm.clone(),
            algorithm => comm.with_options(&CallOptions::default().algorithm(algorithm))?,
        };
        let has_size = !matches!(name, "barrier" | "window_signal");
        let is_whole = name.starts_with("all_reduce")
            || ["reduce", "broadcast", "send_recv", "batch"].contains(&name)
            || name.starts_with("window")
            || name == "vocab_parallel";
        let mut least = if is_whole {
            8
        } else {
            8 * comm.size() as usize
        };
        if name.ends_with("norm") {
            // Rows have at least 8 elements.
            least *= 2;
        }
        let sizes: Vec<usize> = if has_size {
            let sizes = self.arguments.bytes.iter().copied();
            sizes.filter(|bytes| *bytes >= least).collect()
        } else {
            vec![8]
        };
        let Some(most) = sizes.iter().max() else {
            return Ok(());
        };
        let dtype = match name {
            "reduce_scatter_quantized" => DType::F32,
            _ => DType::Bf16,
        };
        let count = most / dtype.size();
        let (input, output) = (comm.alloc(dtype, count)?, comm.alloc(dtype, count)?);
        input.copy_from_bytes(&vec![0; *most])?;
        for bytes in sizes {
            let call = Call {
                comm: &comm,
                name,
                input: input.slice(0, bytes / dtype.size())?,
                output: output.slice(0, bytes / dtype.size())?,
                bytes,
            };
            let result = call.run(&|| self.start(&comm))?;
            comm.synchronize()?;
            self.barrier.wait();
            if comm.rank() == 0 {
                self.print(name, comm.size(), if has_size { bytes } else { 0 })?;
            }
            self.barrier.wait();
            drop(result);
        }
        Ok(())
    }

    /// Prints the rows of an operation of a mixture of experts. Its bytes are those of the tokens
    /// of a rank.
    fn moe(&self, comm: &Communicator, name: &str) -> Result<()> {
        let layer = moe::Layer::new(comm, name, self.arguments)?;
        for &count in &self.arguments.tokens {
            let tokens = layer.tokens(count)?;
            // The first dispatch of a layer follows no combine.
            let received = layer.dispatch(&tokens)?;
            layer.combine(&tokens, &received)?;
            if name.starts_with("moe_dispatch") {
                self.start(comm)?;
                layer.dispatch(&tokens)?;
            } else {
                let received = layer.dispatch(&tokens)?;
                self.start(comm)?;
                layer.combine(&tokens, &received)?;
            }
            comm.synchronize()?;
            self.barrier.wait();
            if comm.rank() == 0 {
                self.print(name, comm.size(), 2 * count * self.arguments.hidden)?;
            }
            self.barrier.wait();
        }
        layer.free()
    }

    /// Waits until all ranks are ready for the operation.
    fn start(&self, comm: &Communicator) -> Result<()> {
        comm.synchronize()?;
        self.barrier.wait();
        if comm.rank() == 0 {
            let last = launches()?.iter().map(|it| it.number).max();
            *self.seen.lock().expect("no panic") = last.unwrap_or(0);
        }
        self.barrier.wait();
        Ok(())
    }

    /// Prints a row for each kernel that has been launched.
    fn print(&self, operation: &str, ranks: u32, bytes: usize) -> Result<()> {
        let seen = *self.seen.lock().expect("no panic");
        let mut kernels: BTreeMap<String, Vec<Launch>> = BTreeMap::new();
        for launch in launches()?.into_iter().filter(|it| it.number > seen) {
            kernels
                .entry(launch.kernel.clone())
                .or_default()
                .push(launch);
        }
        let mut counts = BTreeMap::new();
        for launch in kernels.values().flatten() {
            *counts.entry(launch.device).or_insert(0) += 1;
        }
        ensure!(
            counts.len() == ranks as usize,
            "{operation}: {} of {ranks} ranks have launched a kernel",
            counts.len()
        );
        let last = |device: &u32| {
            let all = kernels.values().flatten();
            all.filter(|it| it.device == *device)
                .map(|it| it.launch)
                .max()
        };
        let mut lasts: Vec<_> = counts.keys().map(last).collect();
        lasts.dedup();
        ensure!(
            lasts.len() == 1,
            "{operation}: the ranks have launched different numbers of kernels"
        );
        for (kernel, launches) in kernels {
            let length = |it: &&Launch| {
                let [strong, weak, fences] = it.steps;
                let bytes: u64 = it.bytes.values().flatten().sum();
                let device = core::cmp::Reverse(it.device);
                (strong + weak + fences, strong, fences, bytes, device)
            };
            let Some(slowest) = launches.iter().max_by_key(length) else {
                continue;
            };
            println!("{}", row(operation, ranks, bytes, slowest));
            let prediction = prediction::row(operation, ranks, bytes, slowest);
            self.predictions.lock().expect("no panic").push(prediction);
            let explained = self.arguments.explain.as_deref();
            if explained.is_some_and(|it| kernel.contains(it)) {
                println!(
                    "\n{kernel}, {ranks} ranks, {bytes} bytes, device {}:",
                    slowest.device
                );
                for (device, kernel, line, text, source) in &slowest.chain {
                    let source = source.as_ref().map(|it| format!(" ({it})"));
                    println!(
                        "  device {device}, {kernel}, PTX line {line}: {text}{}",
                        source.unwrap_or_default()
                    );
                }
                println!();
            }
        }
        Ok(())
    }
}

fn row(operation: &str, ranks: u32, bytes: usize, launch: &Launch) -> String {
    let [strong, weak, fences] = launch.steps;
    let to_data = launch.to_data.map_or_else(
        || "-".to_owned(),
        |[strong, weak, fences]| format!("{strong} + {weak} + {fences}"),
    );
    let route = |prefix: &str| {
        let found = launch
            .bytes
            .iter()
            .filter(|(name, _)| name.starts_with(prefix));
        let [read, written] = found.fold([0, 0], |all, (_, it)| [all[0] + it[0], all[1] + it[1]]);
        format!("{read} / {written}")
    };
    let routes = ["own", "peer", "host", "multicast"].map(route).join(" | ");
    format!(
        "| {operation} | {} | {ranks} | {bytes} | {strong} | {weak} | {fences} | {to_data} | {} | \
         {routes} |",
        launch.kernel, launch.leader_instructions
    )
}

impl Call<'_> {
    /// Prepares the operation, calls `start`, and runs it. Returns objects that must outlive it.
    fn run(&self, start: &dyn Fn() -> Result<()>) -> Result<Box<dyn core::any::Any>> {
        let (comm, bytes) = (self.comm, self.bytes);
        let (ranks, rank) = (comm.size() as usize, comm.rank());
        let (next, previous) = (
            (rank + 1) % comm.size(),
            (rank + comm.size() - 1) % comm.size(),
        );
        let op = ReduceOp::Sum;
        let (input, output) = (&self.input, &self.output);
        let part = |tensor: &Tensor| tensor.slice(0, tensor.len() / ranks);
        let counts = vec![(input.len() / ranks) as u64; ranks];
        match self.name {
            "reduce" => {
                start()?;
                comm.reduce_into(output, input, 0, op)?;
            }
            name if name.starts_with("all_reduce ") => {
                start()?;
                comm.all_reduce_into(output, input, op)?;
            }
            "reduce_scatter" | "reduce_scatter nvls" => {
                let part = part(output)?;
                start()?;
                comm.reduce_scatter_single(&part, input, op)?;
            }
            "reduce_scatter_quantized" => {
                let part = part(output)?;
                start()?;
                comm.reduce_scatter_quantized(&part, input, op, 1)?;
            }
            "all_gather" | "all_gather nvls" => {
                let part = part(input)?;
                start()?;
                comm.all_gather_single(output, &part)?;
            }
            "broadcast" => {
                start()?;
                comm.broadcast(output, 0)?;
            }
            "scatter" => {
                let part = part(output)?;
                start()?;
                comm.scatter_single(&part, input, 0)?;
            }
            "gather" => {
                let part = part(input)?;
                start()?;
                comm.gather_single(output, &part, 0)?;
            }
            "all_to_all" => {
                start()?;
                comm.all_to_all_single(output, input)?;
            }
            "all_gather_v" => {
                let part = part(input)?;
                start()?;
                comm.all_gather_v_single(output, &part, &counts)?;
            }
            "all_to_all_v" => {
                start()?;
                comm.all_to_all_v_single(output, input, &counts, &counts)?;
            }
            "send_recv" => {
                start()?;
                if rank.is_multiple_of(2) {
                    comm.send(input, next)?;
                    comm.recv(output, previous)?;
                } else {
                    comm.recv(output, previous)?;
                    comm.send(input, next)?;
                }
            }
            "batch" => {
                let mut batch = comm.batch_op_create();
                batch.send(input, next)?;
                batch.recv(output, previous)?;
                start()?;
                batch.issue()?;
            }
            "barrier" => {
                start()?;
                comm.barrier()?;
            }
            "window_put" | "window_get" | "window_signal" => {
                let window = comm.new_window(output, WindowOptions::new())?;
                start()?;
                match self.name {
                    "window_put" => window.put(input, next, 0)?,
                    "window_get" => window.get(input, next, 0)?,
                    _ => {
                        window.raise(next, 0)?;
                        window.wait_raised(0, Some(previous))?;
                    }
                }
                comm.synchronize()?;
                return Ok(Box::new(window));
            }
            "all_reduce_norm" | "reduce_scatter_norm" => {
                let scatters = self.name == "reduce_scatter_norm";
                let rows = if scatters { ranks } else { 1 };
                let width = (bytes / rows).min(ROW) / 2;
                let weight = comm.tensor(DType::Bf16, width)?;
                weight.copy_from_bytes(&vec![0; 2 * width])?;
                let out = if scatters {
                    part(output)?
                } else {
                    output.clone()
                };
                let norm = Norm::rms(&out, input, &weight, 1e-5);
                start()?;
                if scatters {
                    comm.reduce_scatter_norm(&norm)?;
                } else {
                    comm.all_reduce_norm(&norm)?;
                }
            }
            "vocab_parallel" => {
                let top = comm.tensor(DType::U64, 1)?;
                let vocab = VocabParallel::new(input, 1, ranks * input.len()).with_argmax(&top);
                start()?;
                comm.vocab_parallel(&vocab)?;
            }
            "all_gather_with_flags" => {
                let part = part(input)?;
                let flags = comm.ready_flags(comm.chunks(part.len(), part.len()))?;
                let other = Stream::on_device(comm.device())?;
                start()?;
                // SAFETY: the host accesses no tensor before the operation has completed.
                let work = unsafe {
                    comm.all_gather_with_flags_async(&other, output, &part, &flags, part.len())?
                };
                work.wait_blocking()?;
                other.synchronize()?;
            }
            "reduce_scatter_on_arrival" => {
                let part = part(output)?;
                let tiles = comm.ready_flags(comm.chunks(part.len(), part.len()))?;
                let other = Stream::on_device(comm.device())?;
                start()?;
                // SAFETY: `input` was written before, and the host accesses no tensor before the
                // operation has completed.
                let work = unsafe {
                    comm.reduce_scatter_on_arrival_async(
                        &other,
                        &part,
                        input,
                        &tiles,
                        part.len(),
                        1,
                        op,
                    )?
                };
                for index in 0..tiles.len() {
                    tiles.stream_write(&other, index, 1)?;
                }
                work.wait_blocking()?;
                other.synchronize()?;
            }
            name => bail!("{name} is no operation"),
        }
        Ok(Box::new(()))
    }
}

/// Returns the trips of the last launch of each kernel on each device.
fn launches() -> Result<Vec<Launch>> {
    type Query = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize;
    const ALL: &CStr = c"*";
    // SAFETY: the initializers of the driver and of the fake have no requirements.
    let library = unsafe { Library::new("libcuda.so.1") }?;
    // SAFETY: the fake declares the function with this type.
    let query = unsafe { library.get::<Query>(b"fusewireCudaFakeTrips\0") }
        .context("libcuda.so.1 is not the fake")?;
    // SAFETY: the name is a C string, and the function ignores a null buffer.
    let length = unsafe { query(ALL.as_ptr(), core::ptr::null_mut(), 0) };
    let mut text = vec![0u8; length + 1];
    // SAFETY: the name is a C string, and the buffer has `text.len()` bytes.
    unsafe { query(ALL.as_ptr(), text.as_mut_ptr().cast(), text.len()) };
    text.pop();
    Ok(serde_json::from_slice(&text)?)
}
