//! Errors of this crate.

use core::fmt;
use std::path::PathBuf;

/// A failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program ran and failed.
    #[error("{step} failed ({status}):\n{output}")]
    Command {
        /// The step that ran the program.
        step: String,
        /// Exit status of the program.
        status: String,
        /// The last part of the program's output.
        output: String,
    },
    /// A file could not be read, written or created.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// The action that failed, such as `read`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The output of a tool does not have the expected format.
    #[error("cannot read {what}: {detail}")]
    Parse {
        /// Description of the text that could not be parsed.
        what: String,
        /// The reason why the text could not be parsed.
        detail: String,
    },
    /// The crate to compile was not found, or is not usable.
    #[error("no kernel crate: {0}")]
    Project(String),
    /// A program could not be started.
    #[error("cannot start {program} for {step}: {source}")]
    Start {
        /// The program.
        program: PathBuf,
        /// The step that needs it.
        step: String,
        /// The reason.
        source: std::io::Error,
    },
    /// A target that does not exist.
    #[error("unknown target {0:?}; targets are sm_80, sm_90, sm_100, gfx90a, gfx942 and all")]
    Target(String),
    /// There is no device tool chain.
    #[error("no device tool chain\n{}", list(.0))]
    Toolchain(Vec<MissingTool>),
}

/// A missing tool, with a command that installs it.
#[derive(Clone, Debug)]
pub struct MissingTool {
    /// The tool or file.
    pub piece: String,
    /// The paths that were searched, or the reason why a found tool cannot be used.
    pub reason: String,
    /// A command that installs the tool or file.
    pub install: String,
}

impl fmt::Display for MissingTool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "  missing: {} ({})\n    install: {}",
            self.piece, self.reason, self.install
        )
    }
}

fn list(missing: &[MissingTool]) -> String {
    let lines: Vec<String> = missing.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

/// Result of this crate.
pub type Result<T> = core::result::Result<T, Error>;
