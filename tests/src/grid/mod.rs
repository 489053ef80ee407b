//! Every operation in every way to call it, over any communicator: torchcomms' conformance grid.
//!
//! A subject is a file; [`run`] goes through all of them on one rank. What a backend does not have
//! is counted and shown ([`Tally`]), never left out in silence.

mod collectives;
mod comms;
mod groups;
mod lifecycle;
mod lists;
mod modes;
mod objects;
mod options;
mod point_to_point;
mod tally;
mod timing;
pub mod warnings;
mod windows;

use std::collections::HashMap;

use crate::device::tensor;
use fusewire::{Communicator, DType, Result, Tensor};

pub use self::modes::Mode;
pub use self::tally::{GroupCounts, Table, Tally};

/// How much of the grid is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Breadth {
    /// Each subject, few sizes and types.
    Short,
    /// All of it, the largest counts for some combinations only.
    Regular,
    /// All of it.
    Full,
}

/// What a negative control does to a run that is right by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// A bit of every result on rank 1 is flipped.
    FlipBit,
    /// Ranks 0 and 1 put in what the other one should.
    SwapRanks,
}

/// Wrong results that are described; further ones only fail.
const DESCRIBED: usize = 5;
/// Elements of registered memory of each type.
const REGISTERED: usize = 40_000;

/// One rank's run of the grid.
#[derive(Debug)]
pub struct Grid {
    comm: Communicator,
    breadth: Breadth,
    fault: Fault,
    /// Whether reductions need contents that are exact in every order.
    exact: bool,
    calls: u64,
    tally: Tally,
    wrong: Vec<String>,
    /// What is being done, for errors.
    doing: String,
    registered: HashMap<DType, Tensor>,
    used: HashMap<DType, usize>,
}

/// A subject.
type Subject = fn(&mut Grid) -> Result<()>;

/// All subjects, in the order in which they run; the last one ends communicators.
const SUBJECTS: [(&str, Subject); 11] = [
    ("collectives", collectives::run),
    ("all_to_all_v", collectives::all_to_all_v),
    ("point to point", point_to_point::run),
    ("list forms", lists::run),
    ("objects", objects::run),
    ("options", options::run),
    ("time-outs, barrier", timing::run),
    ("split", groups::run),
    ("communicators", comms::run),
    ("windows", windows::run),
    ("lifecycle", lifecycle::run),
];

/// Runs the grid on this rank of `comm`; all ranks together.
///
/// # Errors
/// What was wrong on this rank.
pub fn run(comm: Communicator, breadth: Breadth) -> core::result::Result<Tally, String> {
    let mut grid = Grid::new(comm, breadth);
    for (name, subject) in SUBJECTS {
        grid.doing = name.to_owned();
        let done = subject(&mut grid);
        done.map_err(|error| grid.describe(&format!("{name}: {}: {error}", grid.doing)))?;
    }
    grid.finish()
}

/// As [`run`], of the collectives only, with an injected fault; returns what the checks find.
///
/// # Errors
/// What was wrong on this rank.
pub fn run_with_fault(comm: Communicator, fault: Fault) -> core::result::Result<Tally, String> {
    let mut grid = Grid {
        fault,
        ..Grid::new(comm, Breadth::Short)
    };
    let done = collectives::run(&mut grid);
    done.map_err(|error| grid.describe(&error.to_string()))?;
    grid.finish()
}

impl Grid {
    fn new(comm: Communicator, breadth: Breadth) -> Self {
        let exact = comm
            .backend_impl()
            .is_some_and(|backend| !backend.is_bitwise());
        Self {
            comm,
            breadth,
            fault: Fault::None,
            exact,
            calls: 0,
            tally: Tally::default(),
            wrong: Vec::new(),
            doing: String::new(),
            registered: HashMap::new(),
            used: HashMap::new(),
        }
    }

    /// The same checks over another communicator; what they find comes back by [`Grid::take`].
    fn over(&self, comm: Communicator) -> Self {
        Self {
            fault: self.fault,
            calls: self.calls,
            ..Self::new(comm, self.breadth)
        }
    }

    fn take(&mut self, other: Self, group: &str) {
        self.wrong.extend(other.wrong);
        self.tally.add(group, other.tally.total());
    }

    fn describe(&self, what: &str) -> String {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        format!("rank {rank} of {size}, {}: {what}", self.comm.backend())
    }

    fn finish(self) -> core::result::Result<Tally, String> {
        if self.wrong.is_empty() {
            return Ok(self.tally);
        }
        let described: Vec<&str> = self
            .wrong
            .iter()
            .take(DESCRIBED)
            .map(String::as_str)
            .collect();
        Err(self.describe(&format!(
            "{} wrong:\n{}",
            self.wrong.len(),
            described.join("\n")
        )))
    }

    /// Records a case of `group`, and `what` is wrong unless `right`.
    fn check(&mut self, group: &str, right: bool, what: &str) {
        self.tally.ran(group);
        self.require(right, what);
    }

    fn require(&mut self, right: bool, what: &str) {
        if !right {
            self.wrong
                .push(self.describe(&format!("{}: {what}", self.doing)));
        }
    }

    fn is_short(&self) -> bool {
        self.breadth == Breadth::Short
    }

    /// The rank after this one, and the one before.
    fn adjacent_ranks(&self) -> (u32, u32) {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        ((rank + 1) % size, (rank + size - 1) % size)
    }

    /// `count` elements of `dtype` that are to be compared byte for byte after having been moved.
    fn contents(&self, dtype: DType, rank: u32, call: u64, count: usize) -> Vec<u8> {
        crate::oracle::fill(dtype, rank, call, count)
    }

    /// A new tensor that holds `bytes`.
    fn tensor(&self, dtype: DType, bytes: &[u8]) -> Result<Tensor> {
        let tensor = tensor(dtype, bytes.len() / dtype.size())?;
        modes::write(&tensor, bytes);
        Ok(tensor)
    }
}
