//! Runs programs and captures their output.

use std::process::Command;

use crate::{Error, Result};

/// Output of a program.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a program and waits until it exits. Errors contain the last part of the program's output.
pub(crate) fn run(step: &str, command: &mut Command) -> Result<Output> {
    let output = command.output().map_err(|source| Error::Start {
        program: command.get_program().into(),
        step: step.to_owned(),
        source,
    })?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        return Ok(Output { stdout, stderr });
    }
    let mut text = format!("{stdout}{stderr}");
    const KEPT: usize = 8000;
    if text.len() > KEPT {
        let mut start = text.len() - KEPT;
        while !text.is_char_boundary(start) {
            start += 1;
        }
        text = format!("...{}", &text[start..]);
    }
    Err(Error::Command {
        step: step.to_owned(),
        status: output.status.to_string(),
        output: text,
    })
}

/// Returns a command that runs `program` without the environment variables through which an outer
/// cargo or rustup would affect an inner one.
pub(crate) fn clean(program: &std::path::Path) -> Command {
    let mut command = Command::new(program);
    for name in [
        "CARGO",
        "CARGO_BUILD_RUSTC",
        "CARGO_BUILD_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_MANIFEST_DIR",
        "CARGO_MANIFEST_PATH",
        "CARGO_TARGET_DIR",
        "RUSTC",
        "RUSTC_BOOTSTRAP",
        "RUSTC_WORKSPACE_WRAPPER",
        "RUSTC_WRAPPER",
        "RUSTDOC",
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
    ] {
        command.env_remove(name);
    }
    command
}
