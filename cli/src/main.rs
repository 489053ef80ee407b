//! The command `fusewire`: `perf` runs and verifies every operation, `run` starts local ranks,
//! `info` lists the devices and libraries of a machine.

mod info;
mod launcher;
mod perf;
mod processes;
mod run;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

/// GPU-resident collectives written in Rust: measure them, start ranks, look at the machine.
#[derive(Debug, Parser)]
#[command(name = "fusewire", version)]
struct Command {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Debug, Subcommand)]
enum Subject {
    /// Run operations over a range of sizes, verify every element, print a table.
    Perf(Box<perf::Arguments>),
    /// Start N local ranks of a program, with torchrun's environment.
    Run(run::Arguments),
    /// List devices, libraries, tool chains and transports.
    Info(info::Arguments),
}

fn main() -> ExitCode {
    // If the reader closes the pipe early, as in `fusewire info | head -1`, this process ends
    // without a message.
    // SAFETY: `SIG_DFL` is a valid action for every signal. No other thread exists yet that could
    // change the action at the same time.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(error) if error.use_stderr() => {
            eprintln!("{} (see {} --help)", one_line(&error), command_name());
            return ExitCode::from(2);
        }
        Err(help) => {
            print!("{help}");
            return ExitCode::SUCCESS;
        }
    };
    if let Subject::Perf(arguments) = &command.subject
        && arguments.threads
    {
        // SAFETY: `prepare` writes the environment, which no other thread may read at
        // the same time. `main` has not started any thread.
        unsafe { fusewire::environment::prepare() };
    }
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

/// Returns `fusewire`, followed by the subcommand if the arguments name one.
fn command_name() -> String {
    let subcommands = Command::command();
    let named = std::env::args().nth(1).filter(|name| {
        subcommands
            .get_subcommands()
            .any(|subcommand| subcommand.get_name() == name)
    });
    named.map_or_else(|| "fusewire".to_owned(), |name| format!("fusewire {name}"))
}

/// Returns the first paragraph of an argument error in one line, without the usage text.
fn one_line(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "error: a command is needed: perf, run or info".to_owned();
    }
    let text = error.to_string();
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    lines.join(" ")
}

/// A usage error: the command prints one line and exits with status 2.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl core::fmt::Display for Usage {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for Usage {}
