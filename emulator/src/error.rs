//! Errors of modules and launches.

use std::fmt;
use std::sync::Arc;

/// A `Result` with an [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// An error of a module or of a launch.
#[non_exhaustive]
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The text is not PTX, or uses a feature that the emulator does not support.
    #[error("PTX line {line}: {detail}")]
    Ptx {
        /// Line of the PTX text, starting with 1.
        line: u32,
        /// The problem.
        detail: String,
    },
    /// A launch is invalid: an unknown kernel, or a shape or arguments that do not fit it.
    #[error("kernel {kernel}: {detail}")]
    Launch {
        /// Name of the kernel.
        kernel: String,
        /// The problem.
        detail: String,
    },
    /// An operation of a stream is invalid: its device may not access the memory, for example.
    #[error("{operation}: {detail}")]
    Stream {
        /// The operation and its address.
        operation: String,
        /// The problem.
        detail: String,
    },
    /// A thread executed an invalid operation, which ends the launch.
    #[error(transparent)]
    Fault(Arc<Fault>),
    /// The threads of a launch wait for events that do not happen.
    #[error(transparent)]
    Hang(Arc<Hang>),
}

impl Error {
    pub(crate) fn syntax(line: u32, detail: impl Into<String>) -> Self {
        Self::Ptx {
            line,
            detail: detail.into(),
        }
    }

    pub(crate) fn launch(kernel: &str, detail: impl Into<String>) -> Self {
        Self::Launch {
            kernel: kernel.to_owned(),
            detail: detail.into(),
        }
    }
}

/// The kind of a [`Fault`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// An access to memory that is not mapped, not accessible to the device, or in another state
    /// space than the instruction names.
    IllegalAddress,
    /// An access to an address that is not a multiple of its size.
    MisalignedAddress,
    /// Lanes that must execute an instruction together do not do so.
    Divergence,
    /// The instruction `trap`.
    Trap,
    /// An operand has a value that the instruction does not allow.
    InvalidOperand,
    /// Two threads access the same bytes, at least one writes, and neither access happens before
    /// the other. The page `docs/memory-model.md` of the project defines races.
    Race,
    /// A read of shared memory that no thread of the block has written.
    Uninitialized,
    /// A write of memory that `ld.global.nc` reads during the launch.
    ConstantChanged,
}

/// An invalid operation of a thread.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The kind of the fault.
    pub kind: FaultKind,
    /// The problem, for example the address of an access.
    pub detail: String,
    /// The instruction and the thread.
    pub site: Site,
    /// The other access of a race, or the conflicting access to a constant.
    pub other: Option<Site>,
    /// The seed of the random scheduler, if the launch used it.
    pub seed: Option<u64>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.site, self.detail)?;
        if let Some(seed) = self.seed {
            write!(f, " (scheduler seed {seed})")?;
        }
        match &self.other {
            Some(other) => write!(f, "\n  the other access: {other}"),
            None => Ok(()),
        }
    }
}

impl core::error::Error for Fault {}

/// An instruction of a kernel, and a thread that executes it.
#[derive(Clone, Debug)]
pub struct Site {
    /// Name of the kernel.
    pub kernel: String,
    /// Number of the device.
    pub device: u32,
    /// Number of the block in the grid.
    pub block: u32,
    /// Number of the thread in the block.
    pub thread: u32,
    /// Line of the PTX text.
    pub line: u32,
    /// The instruction's text.
    pub instruction: String,
    /// Source file and line, if the PTX text has a line table.
    pub source: Option<String>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "kernel {}, device {}, block {}, thread {}, PTX line {} `{}`",
            self.kernel, self.device, self.block, self.thread, self.line, self.instruction
        )?;
        match &self.source {
            Some(source) => write!(f, " ({source})"),
            None => Ok(()),
        }
    }
}

/// A launch whose threads wait for events that do not happen.
#[derive(Clone, Debug)]
pub struct Hang {
    /// A summary in one sentence.
    pub summary: String,
    /// One line for each group of threads that wait for the same event, and for blocks that are not
    /// resident.
    pub waits: Vec<String>,
    /// The seed of the random scheduler, if the launch used it.
    pub seed: Option<u64>,
}

impl fmt::Display for Hang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.summary)?;
        if let Some(seed) = self.seed {
            write!(f, " (scheduler seed {seed})")?;
        }
        for wait in &self.waits {
            write!(f, "\n  {wait}")?;
        }
        Ok(())
    }
}

impl core::error::Error for Hang {}
