//! The command `fusewire`: `perf` runs and verifies every operation, `run` starts local ranks, `info` says
//! what a machine has.

mod info;
mod launcher;
mod perf;
mod processes;
mod run;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// GPU-resident collectives written in Rust: measure them, start ranks, look at the machine.
#[derive(Debug, Parser)]
#[command(name = "fusewire", version)]
struct Command {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// Runs operations over a range of sizes, verifies every element, prints a table.
    Perf(Box<perf::Arguments>),
    /// Starts N local ranks of a program, with torchrun's environment.
    Run(run::Arguments),
    /// Says which devices, libraries, tool chains and transports there are.
    Info(info::Arguments),
}

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(error) if error.use_stderr() => {
            // One line: what is wrong, without the usage below it.
            let text = error.to_string();
            let line = text.lines().next().unwrap_or("error: bad arguments");
            eprintln!("{line} (see fusewire --help)");
            return ExitCode::from(2);
        }
        Err(help) => {
            print!("{help}");
            return ExitCode::SUCCESS;
        }
    };
    let result = match command.subject {
        Subject::Perf(arguments) => perf::main(&arguments),
        Subject::Run(arguments) => run::main(&arguments),
        Subject::Info(arguments) => info::main(&arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
    })
}

/// A mistake in the arguments: one line, exit status 2.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl core::fmt::Display for Usage {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for Usage {}
