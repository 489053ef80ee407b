//! A pair of linear layers, distributed over ranks as in Megatron's sequence parallelism. The
//! collectives and GEMMs run first in sequence, then overlapped:
//!
//! - column-parallel: all_gather of the tokens' rows, then `y = x * w`. When overlapped, the GEMM
//!   of each chunk of rows starts as soon as the chunk's ready flag is set.
//! - row-parallel: `z = y * v`, then reduce_scatter of the rows. When overlapped, each tile of rows
//!   is sent as soon as its GEMM has completed.
//!
//! ```text
//! cargo run --release --bin gemm-overlap                      # on the CPU, with matrixmultiply
//! cargo run --release --bin gemm-overlap -- --device cuda     # on a GPU, with cuBLAS
//! ```
//!
//! Prints the median times and the greatest difference between sequential and overlapped results,
//! for an eager call and for replays of a graph with changing input. Exits with status 1 if the
//! results differ, and with status 2 if the device or cuBLAS is missing.

mod cpu;
mod cublas;
mod layer;

use std::process::ExitCode;

use clap::Parser;
use fusewire::{Device, Error, Options, Stream, run_threads_on};

use crate::layer::{Layer, Outcome, Shape};

/// A library that computes GEMMs.
pub(crate) trait Gemm {
    /// Enqueues `c = a * b` on `stream`. The matrices are row-major f32: `a` is m by k, `b` is k by
    /// n and `c` is m by n.
    ///
    /// # Errors
    /// Fails if the library or the stream fails.
    fn enqueue(
        &self,
        stream: &Stream,
        matrices: [&fusewire::Tensor; 3],
        shape: [usize; 3],
    ) -> fusewire::Result<()>;
}

#[derive(Debug, Parser)]
#[command(about = "Matrix products that overlap with all_gather and reduce_scatter")]
struct Arguments {
    /// cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Number of ranks (threads of this process)
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Tokens per rank
    #[arg(long, default_value_t = 256)]
    tokens: usize,
    /// Elements per token
    #[arg(long, default_value_t = 512)]
    hidden: usize,
    /// Columns of the inner layer per rank
    #[arg(long, default_value_t = 512)]
    inner: usize,
    /// Tokens per chunk; need not divide the tokens per rank
    #[arg(long, default_value_t = 64)]
    chunk: usize,
    /// Number of timed calls and of replays
    #[arg(long, default_value_t = 20)]
    rounds: u32,
}

/// Prints a line that names the missing device or library, and returns status 2.
fn absent(what: &str) -> ExitCode {
    eprintln!("gemm-overlap: {what}");
    ExitCode::from(2)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let device: Device = match arguments.device.parse() {
        Ok(device) => device,
        Err(error) => return absent(&format!("--device {}: {error}", arguments.device)),
    };
    if let Err(error) = Stream::on_device(device) {
        return absent(&error.to_string());
    }
    match device {
        Device::Cpu => {}
        Device::Cuda(_) if cublas::is_there() => {}
        Device::Cuda(_) => {
            return absent(
                "libcublas.so not found; install CUDA's cuBLAS (pip: nvidia-cublas-cu12) and add \
                 its folder to LD_LIBRARY_PATH",
            );
        }
        _ => {
            return absent(&format!(
                "no matrix product for {device}; use --device cpu or cuda"
            ));
        }
    }
    let shape = Shape {
        tokens: arguments.tokens,
        hidden: arguments.hidden,
        inner: arguments.inner,
        chunk: arguments.chunk.max(1),
    };
    let rounds = arguments.rounds.max(1);
    let options = Options::default();
    let ranks = run_threads_on(device, "fusewire", arguments.ranks, &options, |comm| {
        let gemm: Box<dyn Gemm> = match device {
            Device::Cuda(ordinal) => Box::new(cublas::Cublas::new(ordinal)?),
            _ => Box::new(cpu::Cpu),
        };
        Layer::new(&comm, &*gemm, shape)?.benchmark(rounds)
    });
    let mut worst: Option<Outcome> = None;
    for (rank, outcome) in ranks.into_iter().enumerate() {
        match outcome {
            Ok(outcome) => worst = Some(worst.map_or(outcome, |worst| worst.or(outcome))),
            Err(error @ Error::NoDevice { .. }) => return absent(&error.to_string()),
            Err(error) => {
                eprintln!("gemm-overlap: rank {rank}: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    let Some(outcome) = worst else {
        return absent("--ranks 0");
    };
    println!(
        "{device}, {} ranks, {shape}: greatest difference {:.1e} eager, {:.1e} in {rounds} \
         replays; {:.3} ms in sequence, {:.3} ms overlapped, {:.3} ms replayed",
        arguments.ranks,
        outcome.eager,
        outcome.replayed,
        outcome.sequential_ms,
        outcome.overlapped_ms,
        outcome.replay_ms
    );
    if outcome.is_right() {
        ExitCode::SUCCESS
    } else {
        eprintln!("gemm-overlap: the results differ");
        ExitCode::FAILURE
    }
}
