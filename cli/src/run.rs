//! `fusewire run`: the local launcher.

use core::time::Duration;
use std::ffi::OsString;
use std::process::ExitCode;

use crate::Usage;
use crate::launcher::{self, Job};

/// Arguments of `fusewire run`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of ranks to start.
    #[arg(short = 'n', long = "ranks", default_value_t = 2)]
    ranks: u32,
    /// Seconds for which the other ranks may continue after a rank has failed.
    #[arg(long, default_value_t = 2.0)]
    grace: f64,
    /// Let clients without a secret, such as PyTorch's TCPStore, connect to the store.
    #[arg(long)]
    open_store: bool,
    /// The program and its arguments, after `--`.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Runs the program on all ranks. Returns the exit status of the first rank that failed.
pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if arguments.ranks == 0 || arguments.ranks > 1024 {
        return Err(Usage(format!(
            "{} ranks; 1 to 1024 can be started",
            arguments.ranks
        ))
        .into());
    }
    let grace = Duration::try_from_secs_f64(arguments.grace)
        .map_err(|_| Usage(format!("--grace {}; seconds are needed", arguments.grace)))?;
    let job = Job {
        program: &arguments.program[0],
        arguments: &arguments.program[1..],
        ranks: arguments.ranks,
        prefix: true,
        grace,
        open_store: arguments.open_store,
        ends_with_output: false,
    };
    // SAFETY: the command has not started threads.
    let guard = unsafe { launcher::guarded() }?;
    Ok(ExitCode::from(launcher::run(&job, &guard)?))
}
