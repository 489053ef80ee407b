//! The command `fusewire-build`.

mod command;

use std::process::ExitCode;

use clap::Parser;

use crate::command::{Command, build, bundle, check, doctor, images, new};

/// Compiles Fusewire kernels for GPUs and checks the result.
#[derive(Debug, Parser)]
#[command(name = "fusewire-build", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Build(arguments) => build::run(&arguments),
        Command::Bundle(arguments) => bundle::run(&arguments),
        Command::Check(arguments) => check::run(&arguments),
        Command::Doctor => doctor::run(),
        Command::Images(arguments) => images::run(&arguments),
        Command::New(arguments) => new::run(&arguments),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
