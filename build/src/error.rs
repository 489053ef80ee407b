//! What can go wrong.

use std::path::PathBuf;

use crate::toolchain::MissingTool;

/// A failure of this crate, named after what was being done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A program ran and failed.
    #[error("{step} failed ({status}):\n{output}")]
    Command {
        /// What it was to do.
        step: String,
        /// Its exit status.
        status: String,
        /// What it wrote.
        output: String,
    },
    /// A file could not be read, written or created.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A text that a tool wrote does not look as expected.
    #[error("cannot read {what}: {detail}")]
    Parse {
        /// Which text.
        what: String,
        /// What is wrong with it.
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
        /// What it was to do.
        step: String,
        /// The reason.
        source: std::io::Error,
    },
    /// A target that does not exist.
    #[error("unknown target {0:?}; targets are sm_80, sm_90, sm_100, gfx90a, gfx942 and all")]
    Target(String),
    /// There is no device tool chain.
    #[error("no device tool chain\n{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Toolchain(Vec<MissingTool>),
}

/// Result of this crate.
pub type Result<T> = core::result::Result<T, Error>;
