//! Launches the kernels of the crate `seeded-bugs`, with and without their errors.

use fusewire::{Communicator, DType, Error, LaunchAttributes, Options, Result};
use seeded_bugs::{SEEDED_DIVERGENCE, SEEDED_RACE, SeededDivergenceParams, SeededRaceParams};

use crate::device::{run_threads, tensor};
use crate::skip::skip;

/// Lanes of the launched block: two warps.
pub const LANES: u32 = 64;

/// A kernel and the argument that enables or disables its error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeededBug {
    /// Lanes write shared memory and read words that other lanes have written.
    Race {
        /// If true, a barrier separates writes and reads.
        ordered: bool,
    },
    /// A barrier that only the lanes below a limit execute.
    Divergence {
        /// Number of lanes that execute the barrier. The kernel is correct if it is [`LANES`].
        limit: u32,
    },
}

impl SeededBug {
    /// Returns true if a sanitizer must find an error.
    pub fn is_wrong(self) -> bool {
        match self {
            Self::Race { ordered } => !ordered,
            Self::Divergence { limit } => limit != LANES,
        }
    }

    /// Returns the output that the kernel must write if its error is disabled.
    pub fn expected(self) -> Vec<u32> {
        let other = |lane| match self {
            Self::Race { .. } => (lane + LANES / 2) % LANES,
            Self::Divergence { .. } => lane,
        };
        (0..LANES).map(other).collect()
    }

    /// Launches the kernel and returns its output.
    ///
    /// # Errors
    /// Returns the errors of the launch and of the kernel.
    pub fn launch(self, comm: &Communicator) -> Result<Vec<u32>> {
        let out = tensor(DType::U32, LANES as usize)?;
        let attributes = LaunchAttributes {
            blocks: 1,
            threads: LANES,
            ..LaunchAttributes::default()
        };
        let tensors = [&out];
        let words = out.as_ptr().cast();
        let work = match self {
            Self::Race { ordered } => {
                let params = SeededRaceParams {
                    ordered: u32::from(ordered),
                    out: words,
                };
                // SAFETY: one block of `LANES` lanes is launched, and `out` has `LANES` words.
                unsafe { comm.launch_raw(&SEEDED_RACE, params, &tensors, attributes)? }
            }
            Self::Divergence { limit } => {
                let params = SeededDivergenceParams { limit, out: words };
                // SAFETY: one block of `LANES` lanes is launched, and `out` has `LANES` words.
                unsafe { comm.launch_raw(&SEEDED_DIVERGENCE, params, &tensors, attributes)? }
            }
        };
        println!("seeded bug: {self:?} was launched");
        work.wait_blocking()?;
        out.to_vec()
    }

    /// Launches the kernel on the GPU of the tests. Skips the test if it runs without a GPU.
    ///
    /// If the error is disabled, checks the output. If the error is enabled, accepts every outcome
    /// of the launch, because a sanitizer may stop the kernel. In that case, the caller checks the
    /// sanitizer's report.
    ///
    /// # Panics
    /// Panics if the launch is rejected, or if the kernel fails with its error disabled.
    pub fn run(self) {
        if !crate::device().is_gpu() {
            return skip("gpu", "the seeded bugs need the threads of a GPU");
        }
        let mut options = Options::default();
        options.blocks = 1;
        options.abort_process_on_timeout_or_error = Some(false);
        for result in run_threads(1, &options, |comm| Ok(self.launch(&comm))) {
            match result.expect("a communicator") {
                Err(error @ (Error::Image { .. } | Error::Launch { .. })) => panic!("{error}"),
                Err(error) if self.is_wrong() => println!("seeded bug: the launch failed: {error}"),
                Ok(_) if self.is_wrong() => {}
                result => assert_eq!(result.expect("a correct kernel"), self.expected()),
            }
        }
    }
}
