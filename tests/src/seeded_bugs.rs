//! Launches of the kernels that have an error on purpose (`seeded-bugs`), and of the same kernels without it.

use fusewire::{Communicator, DType, Error, LaunchAttributes, Options, Result};
use seeded_bugs::{SEEDED_DIVERGENCE, SEEDED_RACE, SeededDivergenceParams, SeededRaceParams};

use crate::device::{run_threads, tensor};
use crate::skip::skip;

/// Lanes of the block that is launched: two warps.
pub const LANES: u32 = 64;

/// A kernel, and how it is wrong or right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeededBug {
    /// Accesses to shared memory, with or without a barrier between.
    Race {
        /// Whether there is one.
        ordered: bool,
    },
    /// A barrier that the first lanes reach; right with all of them.
    Divergence {
        /// How many.
        limit: u32,
    },
}

impl SeededBug {
    /// Whether a tool must find an error.
    pub fn is_wrong(self) -> bool {
        match self {
            Self::Race { ordered } => !ordered,
            Self::Divergence { limit } => limit != LANES,
        }
    }

    /// What the kernel leaves where it is right.
    fn expected(self) -> Vec<u32> {
        let other = |lane| match self {
            Self::Race { .. } => (lane + LANES / 2) % LANES,
            Self::Divergence { .. } => lane,
        };
        (0..LANES).map(other).collect()
    }

    fn launch(self, comm: &Communicator) -> Result<Vec<u32>> {
        let out = tensor(DType::U32, LANES as usize)?;
        let attributes = LaunchAttributes {
            blocks: 1,
            threads: LANES,
            ..LaunchAttributes::default()
        };
        let tensors = [Some(&out), None, None];
        let words = out.as_ptr().cast();
        let work = match self {
            Self::Race { ordered } => {
                let params = SeededRaceParams {
                    ordered: u32::from(ordered),
                    out: words,
                };
                // SAFETY: a word for each lane of one block; the kernel touches nothing of the communicator's.
                unsafe { comm.launch_shaped(&SEEDED_RACE, params, tensors, attributes)? }
            }
            Self::Divergence { limit } => {
                let params = SeededDivergenceParams { limit, out: words };
                // SAFETY: as above.
                unsafe { comm.launch_shaped(&SEEDED_DIVERGENCE, params, tensors, attributes)? }
            }
        };
        println!("seeded bug: {self:?} was launched");
        work.wait_blocking()?;
        out.to_vec()
    }

    /// Launches it on the GPU of the tests; elsewhere the test is skipped. What is right is checked. What is wrong may end in any
    /// way, for a tool may end it: that tool's report is what counts.
    ///
    /// # Panics
    /// Where it cannot be launched, or what is right goes wrong.
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
                Err(error) if self.is_wrong() => println!("seeded bug: it ended with {error}"),
                Ok(_) if self.is_wrong() => {}
                right => assert_eq!(right.expect("nothing is wrong"), self.expected()),
            }
        }
    }
}
