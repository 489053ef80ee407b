//! Side-by-side measurements: Fusewire against its peers, alternating, in one run.
//!
//! ```text
//! cargo run --release -p fusewire-benches -- versus mpi [--mpicc PATH --mpirun PATH]
//! cargo run --release -p fusewire-benches -- observe
//! cargo run --release -p fusewire-benches -- bootstrap [--ranks 64,256,1024,4096]
//! ```
//!
//! Timings never decide the exit status; wrong results do.

mod bare;
mod bootstrap;
mod children;
mod machine;
mod measure;
mod mpi;
mod observe;
mod ranks;
mod reduce;
mod report;
mod versus;

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
    /// What the flight recorder and hooks add to a call.
    Observe(observe::Arguments),
    /// Counts what it costs ranks to meet in a store.
    Bootstrap(bootstrap::Arguments),
    /// One rank of a measurement; `versus` starts these.
    #[command(hide = true)]
    Rank(ranks::Arguments),
}

#[derive(Debug, Subcommand)]
enum Versus {
    /// All_reduce of float sums, ranks as processes of this machine, against every MPI found.
    Mpi(versus::Arguments),
}

fn main() -> ExitCode {
    let result = match Command::parse().subject {
        Subject::Versus(Versus::Mpi(arguments)) => versus::main(&arguments),
        Subject::Observe(arguments) => observe::main(&arguments),
        Subject::Bootstrap(arguments) => bootstrap::main(&arguments),
        Subject::Rank(arguments) => ranks::main(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
