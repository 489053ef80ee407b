//! A pair of linear layers, distributed over ranks as in Megatron's sequence parallelism, with
//! collectives and matrix products first in sequence, then overlapped:
//!
//! - column-parallel: all_gather of the tokens' rows, then `y = x * w`. Overlapped, each chunk of
//!   rows is
//!   multiplied as soon as its ready flag is raised.
//! - row-parallel: `z = y * v`, then reduce_scatter of the rows. Overlapped, each tile of rows is
//!   sent
//!   as soon as its product is done.
//!
//! ```text
//! cargo run --release -p gemm-overlap                      # on the CPU, with matrixmultiply
//! cargo run --release -p gemm-overlap -- --device cuda     # on a GPU, with cuBLAS
//! ```
//!
//! Prints the greatest difference between the results of both ways, for an eager call and for
//! replays of a graph with changing input, and the median times. Exits with status 2 without the
//! device or cuBLAS, and with 1 if the results differ.

mod cpu;
mod cublas;
mod layer;

use std::process::ExitCode;

use clap::Parser;
use fusewire::{Device, Error, Options, Stream, run_threads_on};

use crate::layer::{Layer, Outcome, Shape};

/// A library of matrix products.
pub(crate) trait Gemm {
    /// Enqueues `c = a * b` on `stream`: row-major f32, with `a` of m by k, `b` of k by n and `c`
    /// of m by n elements.
    ///
    /// # Errors
    /// The failure of the library or the stream.
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
    /// Number of ranks, which are threads of this process
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
    /// Timed calls, and replays
    #[arg(long, default_value_t = 20)]
    rounds: u32,
}

/// Prints a line and returns the status for a missing device or library.
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
