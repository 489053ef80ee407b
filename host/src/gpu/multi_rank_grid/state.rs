//! The state of a [`MultiRankGrid`](super::MultiRankGrid): the ranks' pending launches for the next
//! grid, and the outcome of that grid.

use core::fmt::Write as _;
use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use super::super::driver::{LaunchShape, RawEvent, RawFunction, RawStream};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct State {
    /// The pending launches for the next grid, by rank.
    pub(super) launches: Vec<Option<RankLaunch>>,
    /// The outcome of the next grid, shared with the ranks that wait for it.
    pub(super) outcome: Arc<OnceLock<Result<()>>>,
    /// The error that broke the [`MultiRankGrid`](super::MultiRankGrid).
    pub(super) broken: Option<Error>,
    pub(super) functions: HashMap<String, RawFunction>,
    /// For each slot, the event that was recorded after the latest grid that used the slot.
    pub(super) slots: Vec<RawEvent>,
    pub(super) next_slot: usize,
    /// For each rank, the event that is recorded on the rank's stream before a grid is launched.
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
    /// Describes the properties of a launch that must be equal on all ranks.
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
    /// Removes the pending launches and sets the outcome for the waiting ranks.
    pub(super) fn finish(&mut self, result: Result<()>) {
        for launch in &mut self.launches {
            *launch = None;
        }
        // `set` cannot fail: `take` replaces the cell with a new one, so every cell is set only
        // once.
        let _ = core::mem::take(&mut self.outcome).set(result);
    }

    /// Breaks the [`MultiRankGrid`](super::MultiRankGrid) with `error`, unless it is already
    /// broken. Sets `error` as the outcome for the waiting ranks.
    pub(super) fn fail(&mut self, error: &Error) {
        self.broken.get_or_insert_with(|| error.clone());
        self.finish(Err(error.clone()));
    }

    /// Returns an error if the launch of `rank` differs from the pending launches.
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
            "ranks of a multi-rank grid launch different things: rank {other} {}, rank {rank} \
             {}; all ranks must launch the same kernels in the same order",
            earlier.describe(),
            launch.describe()
        )))
    }

    /// Returns the error that names the ranks without a pending launch.
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
            "rank{} {missing} of {} did not launch within {} s; another rank launched {}. All \
             ranks must launch the same kernels in the same order, each from a thread of its own",
            if count == 1 { "" } else { "s" },
            self.launches.len(),
            timeout.as_secs_f64(),
            launch.map_or_else(String::new, RankLaunch::describe)
        ))
    }
}
