//! The conformance grid of torchcomms: every operation in every mode, on any communicator.
//!
//! Each file has one subject. [`run`] runs all subjects on one rank. Cases that a backend does not
//! support are counted in the [`Tally`].

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

/// Extent of a run of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Breadth {
    /// Every subject with few counts and types.
    Short,
    /// All cases, except that only some combinations use the largest counts.
    Regular,
    /// All cases.
    Full,
}

/// An injected fault, for negative controls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    #[default]
    None,
    /// Flips a bit of every result on rank 1.
    FlipBit,
    /// Exchanges the inputs of ranks 0 and 1.
    SwapRanks,
}

/// Number of wrong results that are described in full. Later wrong results are only counted.
const DESCRIBED: usize = 5;
/// Number of elements of registered memory for each type.
const REGISTERED: usize = 40_000;

/// One rank's run of the grid.
#[derive(Debug)]
pub struct Grid {
    comm: Communicator,
    breadth: Breadth,
    fault: Fault,
    /// True if reductions need inputs that give the same bits in every order.
    exact: bool,
    calls: u64,
    tally: Tally,
    wrong: Vec<String>,
    /// Description of the current case, for errors.
    doing: String,
    registered: HashMap<DType, Tensor>,
    used: HashMap<DType, usize>,
}

/// Function that runs one subject on a grid.
type Subject = fn(&mut Grid) -> Result<()>;

/// All subjects in the order in which they run. `lifecycle` is last, because it finalizes the
/// communicator.
const SUBJECTS: [(&str, Subject); 11] = [
    ("collectives", collectives::run),
    ("all_to_all_v", collectives::all_to_all_v),
    ("point to point", point_to_point::run),
    ("list forms", lists::run),
    ("objects", objects::run),
    ("options", options::run),
    ("timeouts, barrier", timing::run),
    ("split", groups::run),
    ("communicators", comms::run),
    ("windows", windows::run),
    ("lifecycle", lifecycle::run),
];

/// Runs the grid on this rank of `comm`. All ranks must call this function.
///
/// # Errors
/// Returns a description of the wrong results of this rank.
pub fn run(comm: Communicator, breadth: Breadth) -> core::result::Result<Tally, String> {
    let mut grid = Grid::new(comm, breadth);
    for (name, subject) in SUBJECTS {
        grid.doing = name.to_owned();
        let done = subject(&mut grid);
        done.map_err(|error| grid.describe(&format!("{name}: {}: {error}", grid.doing)))?;
    }
    grid.finish()
}

/// Runs the collectives only, with an injected fault.
///
/// # Errors
/// Returns a description of the wrong results of this rank.
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

    /// Returns a new grid on `comm` with the settings of this grid. [`Grid::take`] merges the
    /// results of the new grid into this grid.
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

    /// Records a case of `group`. If `right` is false, records `what` as an error.
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

    /// Returns the next and the previous rank in the ring.
    fn adjacent_ranks(&self) -> (u32, u32) {
        let (rank, size) = (self.comm.rank(), self.comm.size());
        ((rank + 1) % size, (rank + size - 1) % size)
    }

    /// Returns the `count` elements of `dtype` that `rank` sends in call number `call`, as bytes.
    /// All ranks can compute them, to compare them with what they receive.
    fn contents(&self, dtype: DType, rank: u32, call: u64, count: usize) -> Vec<u8> {
        crate::oracle::fill(dtype, rank, call, count)
    }

    /// Creates a tensor that holds `bytes`.
    fn tensor(&self, dtype: DType, bytes: &[u8]) -> Result<Tensor> {
        let tensor = tensor(dtype, bytes.len() / dtype.size())?;
        modes::write(&tensor, bytes);
        Ok(tensor)
    }
}
