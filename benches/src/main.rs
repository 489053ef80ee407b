//! Benchmarks of Fusewire and other libraries. The measurements of the libraries alternate within
//! one run.
//!
//! ```text
//! cargo run --release --bin fusewire-benches -- versus mpi [--mpicc PATH --mpirun PATH]
//! cargo run --release --bin fusewire-benches -- versus mpi --before PATH
//! cargo run --release --bin fusewire-benches -- versus cuda [--out FILE --json FILE]
//! cargo run --release --bin fusewire-benches -- baseline --out DIR
//! cargo run --release --bin fusewire-benches -- sass --ours FILE
//! cargo run --release --bin fusewire-benches -- fused [--ranks 2 --tokens 1,16,64]
//! cargo run --release --bin fusewire-benches -- moe [--ranks 2 --tokens 1,64,512 --skewed]
//! cargo run --release --bin fusewire-benches -- moe --mpicc PATH [--mpirun PATH --ranks 2,4]
//! cargo run --release --bin fusewire-benches -- wait-cost --unbounded PATH [--device cuda]
//! cargo run --release --bin fusewire-benches -- cost-table
//! cargo run --release --bin fusewire-benches -- observe
//! cargo run --release --bin fusewire-benches -- plot FILE --table HEADING --column NAME --out SVG
//! cargo run --release --bin fusewire-benches -- trips [--operations all_reduce --explain KERNEL]
//! cargo run --release --bin fusewire-benches -- hosts [--rounds 21]
//! cargo run --release --bin fusewire-benches -- bootstrap [--ranks 64,256,1024,4096]
//! ```
//!
//! The exit status depends on the correctness of results, not on timings.

mod bare;
mod baseline;
mod bootstrap;
mod children;
mod cost_table;
mod document;
mod fused;
mod hosts;
mod machine;
mod measure;
mod moe;
mod mpi;
mod observe;
mod plot;
mod ranks;
mod reduce;
mod sass;
mod trips;
mod versus;
mod versus_cuda;
mod wait_cost;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "fusewire-benches", version, about)]
struct Command {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// Measures Fusewire and another library in one run.
    #[command(subcommand)]
    Versus(Versus),
    /// Compiles the CUDA C++ baseline of the kernels, for `versus cuda`.
    Baseline(baseline::Arguments),
    /// Compares the inner loops in the machine code of the kernels and of the baseline.
    Sass(sass::Arguments),
    /// Compares a fused norm with its separate steps, on the CPU.
    Fused(fused::Arguments),
    /// Compares dispatch and combine of a mixture of experts with copies of the same rows and with
    /// `all_to_all_v`, or with MPI, on the CPU.
    Moe(moe::Arguments),
    /// Measures the cost of bounded waits: runs all_reduce with kernels with and without them.
    WaitCost(wait_cost::Arguments),
    /// Measures a launch, a graph node, a signal and a barrier on the CPU, and compares the sum of
    /// their times with the time of an all_reduce.
    CostTable(cost_table::Arguments),
    /// Measures the overhead of the flight recorder and of hooks per call.
    Observe(observe::Arguments),
    /// Compares puts between emulated hosts with the same bytes on a bare TCP connection.
    Hosts(hosts::Arguments),
    /// Draws a recorded table as an SVG.
    Plot(plot::Arguments),
    /// Measures the cost of a rendezvous in a store.
    Bootstrap(bootstrap::Arguments),
    /// Counts the dependent loads, the fences and the bytes of each operation's launch, with the
    /// emulator.
    Trips(trips::Arguments),
    /// Runs one rank of a measurement; started by `versus`.
    #[command(hide = true)]
    Rank(ranks::Arguments),
    /// Runs one rank of a measurement; started by `moe`.
    #[command(hide = true)]
    MoeRank(moe::RankArguments),
    /// Prints whether this program's kernels have bounded waits; used by `wait-cost`.
    #[command(hide = true)]
    Built,
}

#[derive(Debug, Subcommand)]
enum Versus {
    /// Compares all_reduce of f32 sums with every installed MPI. Ranks are processes on this
    /// machine.
    Mpi(versus::Arguments),
    /// Compares all_reduce, with and without a norm after it, with the same algorithms in CUDA C++.
    /// All ranks are on one GPU.
    Cuda(Box<versus_cuda::Arguments>),
}

fn main() -> ExitCode {
    // SAFETY: `main` has started no thread yet, so no other thread reads the environment.
    unsafe { fusewire::environment::prepare() };
    let done = |()| ExitCode::SUCCESS;
    let result = match Command::parse().subject {
        Subject::Versus(Versus::Mpi(arguments)) => versus::main(&arguments).map(done),
        Subject::Versus(Versus::Cuda(arguments)) => versus_cuda::main(&arguments),
        Subject::Baseline(arguments) => baseline::main(&arguments).map(done),
        Subject::Sass(arguments) => sass::main(&arguments).map(done),
        Subject::Fused(arguments) => fused::main(&arguments).map(done),
        Subject::Moe(arguments) => moe::main(&arguments).map(done),
        Subject::WaitCost(arguments) => wait_cost::main(&arguments).map(done),
        Subject::CostTable(arguments) => cost_table::main(&arguments).map(done),
        Subject::Observe(arguments) => observe::main(&arguments).map(done),
        Subject::Hosts(arguments) => hosts::main(&arguments).map(done),
        Subject::Plot(arguments) => plot::main(&arguments).map(done),
        Subject::Bootstrap(arguments) => bootstrap::main(&arguments).map(done),
        Subject::Trips(arguments) => trips::main(&arguments).map(done),
        Subject::Rank(arguments) => ranks::main(&arguments).map(done),
        Subject::MoeRank(arguments) => moe::rank(&arguments).map(done),
        Subject::Built => {
            println!("{}", wait_cost::BUILT);
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
