//! Who has come for the grid that gathers, and what becomes of it.

use core::fmt::Write as _;
use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::super::driver::{LaunchShape, RawEvent, RawFunction, RawStream};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct State {
    /// Who has come for the grid that gathers, by rank.
    pub(super) launches: Vec<Option<RankLaunch>>,
    /// What becomes of that grid: shared with all who wait for it.
    pub(super) outcome: Arc<OnceLock<Result<()>>>,
    /// Why nothing can be launched any more.
    pub(super) broken: Option<Error>,
    pub(super) functions: HashMap<String, RawFunction>,
    /// The end of the grid that used each slot last.
    pub(super) slots: Vec<RawEvent>,
    pub(super) next_slot: usize,
    /// What each rank's stream had before a launch.
    pub(super) before: Vec<RawEvent>,
}

#[derive(Debug)]
pub(super) struct RankLaunch {
    pub(super) kernel: String,
    pub(super) params: Vec<u8>,
    pub(super) shape: LaunchShape,
    pub(super) stream: RawStream,
}

impl RankLaunch {
    /// What must be equal on all ranks, in words.
    pub(super) fn describe(&self) -> String {
        format!(
            "{} with {} blocks of {} threads, {} shared bytes and {} bytes of parameters",
            self.kernel,
            self.shape.blocks,
            self.shape.threads,
            self.shape.shared_bytes,
            self.params.len()
        )
    }

    pub(super) fn matches(&self, other: &Self) -> bool {
        self.kernel == other.kernel
            && self.shape == other.shape
            && self.params.len() == other.params.len()
    }
}

impl State {
    /// Ends the gathering with a result for everybody who has come.
    pub(super) fn finish(&mut self, result: Result<()>) {
        for launch in &mut self.launches {
            *launch = None;
        }
        // Set once: nobody else has this gathering's outcome but to read it.
        let _ = core::mem::take(&mut self.outcome).set(result);
    }

    /// Breaks the grid.
    pub(super) fn fail(&mut self, error: &Error) {
        self.broken.get_or_insert_with(|| error.clone());
        self.finish(Err(error.clone()));
    }

    /// Why `rank` cannot join those who have come.
    pub(super) fn mismatch(&self, rank: u32, launch: &RankLaunch) -> Option<Error> {
        let (other, earlier) = self
            .launches
            .iter()
            .enumerate()
            .find_map(|(other, earlier)| Some((other, earlier.as_ref()?)))?;
        if earlier.matches(launch) {
            return None;
        }
        Some(Error::launch(format!(
            "ranks of a multi-rank grid launch different things: rank {other} {}, rank {rank} {}; all ranks \
             must launch the same kernels in the same order",
            earlier.describe(),
            launch.describe()
        )))
    }

    /// Who has not come, and for what.
    pub(super) fn timeout_error(&self, timeout: Duration) -> Error {
        let (mut missing, mut count) = (String::new(), 0);
        for (rank, _) in self
            .launches
            .iter()
            .enumerate()
            .filter(|(_, launch)| launch.is_none())
        {
            let _ = write!(missing, "{}{rank}", if count == 0 { "" } else { ", " });
            count += 1;
        }
        let launch = self.launches.iter().flatten().next();
        Error::launch(format!(
            "rank{} {missing} of {} did not launch within {} s; another rank launched {}. All ranks must \
             launch the same kernels in the same order, each from a thread of its own",
            if count == 1 { "" } else { "s" },
            self.launches.len(),
            timeout.as_secs_f64(),
            launch.map_or_else(String::new, RankLaunch::describe)
        ))
    }
}
