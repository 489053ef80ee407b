//! From a failure record in device memory to an error that says what happened.

use core::fmt;

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::layout::{FailureKind, FailureRecord};
use fusewire_device::session::{Call, Operation};

use crate::Error;
use crate::options::Algorithm;

/// Code of a wait for a tile, and its name in messages.
const TILE: u64 = fusewire_device::wait::WaitKind::Tile as u64;
const TILE_WORDS: &str = "a tile of its own";

/// What a rank was doing: one side of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Activity {
    /// The operation; [`Operation::None`] where the rank has not called one yet.
    pub operation: Operation,
    /// Sequence number of the rank's last collective.
    pub sequence: u64,
    /// Elements.
    pub count: u64,
    /// Element type, where the operation has one.
    pub dtype: Option<DType>,
    /// Reduction, where the operation has one.
    pub reduction: Option<ReductionCode>,
    /// Algorithm.
    pub algorithm: u8,
}

impl Activity {
    pub(super) fn new(call: u64, sequence: u64, count: u64) -> Self {
        let call = Call(call);
        Self {
            operation: call.operation(),
            sequence,
            count,
            dtype: DType::from_code(call.dtype()),
            reduction: ReductionCode::ALL
                .into_iter()
                .find(|code| *code as u8 == call.reduction()),
            algorithm: call.algorithm(),
        }
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} #{} ({}",
            self.operation.name(),
            self.sequence,
            self.count
        )?;
        if let Some(dtype) = self.dtype {
            write!(f, " {}", dtype.name())?;
        }
        if let Some(reduction) = self.reduction {
            write!(f, ", {}", reduction.name())?;
        }
        let algorithm = [
            Algorithm::Packet,
            Algorithm::Signal,
            Algorithm::TwoShot,
            Algorithm::Nvls,
        ]
        .into_iter()
        .find(|algorithm| *algorithm as u8 == self.algorithm);
        if let Some(algorithm) = algorithm {
            write!(f, ", {algorithm}")?;
        }
        f.write_str(")")
    }
}

/// The first failure of a communicator: every later call returns it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Failure {
    /// Name of the communicator.
    pub communicator: String,
    /// Generation of the communicator.
    pub generation: u64,
    /// The rank that noticed.
    pub reporter: u32,
    /// The rank to blame: the one with the least progress.
    pub rank: u32,
    /// The rank that the reporter waited for.
    pub awaited: u32,
    /// What went wrong.
    pub kind: FailureKind,
    /// What the reporter was doing.
    pub activity: Activity,
    /// What the blamed rank was doing, by its progress words.
    pub blamed: Activity,
    /// What the wait was for, as messages name it.
    pub wait_kind: &'static str,
    /// The value that was awaited.
    pub expected: u64,
    /// The value that was there.
    pub observed: u64,
    /// Seconds that the reporter waited.
    pub seconds: f64,
    /// Peer of a send or receive.
    pub peer: Option<u32>,
    /// What every rank was doing when this rank learned of the failure, by its progress words.
    pub progress: Vec<Activity>,
}

impl Failure {
    pub(crate) fn decode(name: &str, reporter: u32, record: &FailureRecord) -> Self {
        let kind = [
            FailureKind::Timeout,
            FailureKind::Mismatch,
            FailureKind::Overlap,
            FailureKind::Bounds,
            FailureKind::NoRoute,
            FailureKind::Counts,
            FailureKind::Dead,
        ]
        .into_iter()
        .find(|kind| *kind as u64 == record.kind)
        .unwrap_or(FailureKind::Abort);
        let call = Call(record.call);
        Self {
            communicator: name.to_owned(),
            generation: record.generation,
            reporter,
            rank: record.blamed as u32,
            awaited: record.awaited as u32,
            kind,
            activity: Activity::new(record.call, record.sequence, record.count),
            blamed: Activity::new(
                record.blamed_call,
                record.blamed_sequence,
                record.blamed_count,
            ),
            wait_kind: match record.wait_kind {
                1 => "its entry",
                2 => "its exit",
                3 => "its packets",
                4 => "room in the channel to it",
                5 => "its data",
                6 => "its signal",
                TILE => TILE_WORDS,
                _ => "the launch",
            },
            expected: record.expected,
            observed: record.observed,
            seconds: record.elapsed_ns as f64 * 1e-9,
            peer: match call.operation() {
                // The operations of a batch have a peer each.
                Operation::Batch | Operation::WaitSignal => Some(record.awaited as u32),
                _ => (!call.is_collective()).then(|| call.root()),
            },
            progress: Vec::new(),
        }
    }

    /// The tile of this rank's own input that was waited for, where it was that.
    pub fn tile(&self) -> Option<u32> {
        (self.wait_kind == TILE_WORDS).then_some((self.expected >> 32) as u32)
    }

    pub(crate) fn into_error(self) -> Error {
        match self.kind {
            FailureKind::Timeout => Error::Timeout(Box::new(self)),
            FailureKind::Mismatch => Error::Mismatch(Box::new(self)),
            _ => Error::Failed(Box::new(self)),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            communicator,
            reporter,
            rank,
            activity,
            blamed,
            ..
        } = self;
        write!(
            f,
            "communicator \"{communicator}\": rank {reporter} in {activity}: "
        )?;
        match self.kind {
            FailureKind::Timeout if self.tile().is_some() => write!(
                f,
                "timed out after {:.3} s waiting for tile {} of its own input (wanted count {}, saw {}); the computation that \
                 makes the tile has not raised its counter on rank {rank}: is it enqueued, on a stream that does not wait \
                 for this operation, with room on the device? Or raise the time-out",
                self.seconds,
                self.expected >> 32,
                self.expected as u32,
                self.observed
            ),
            FailureKind::Timeout => {
                let late = match self.peer {
                    Some(peer) if peer == *reporter => {
                        "the signals of all ranks together did not get there".to_owned()
                    }
                    Some(peer) => format!("rank {peer} did not take part"),
                    None if blamed.operation == Operation::None => {
                        format!("rank {rank} never entered a collective")
                    }
                    None if blamed.sequence < activity.sequence => format!(
                        "rank {rank} never entered {} #{} (its last was {blamed})",
                        activity.operation.name(),
                        activity.sequence
                    ),
                    None => format!("rank {rank} entered it and then stopped"),
                };
                write!(
                    f,
                    "timed out after {:.3} s waiting for rank {}, {} (expected {:#x}, saw {:#x}); \
                     {late}; look at rank {rank} (killed, stopped, or behind?), or raise the time-out",
                    self.seconds, self.awaited, self.wait_kind, self.expected, self.observed
                )
            }
            FailureKind::Mismatch
                if self.activity == self.blamed
                    && matches!(
                        activity.operation,
                        Operation::AllGatherWithFlags | Operation::ReduceScatterOnArrival
                    ) =>
            {
                write!(
                    f,
                    "rank {rank} called it with another number of elements in a chunk or tile; all ranks must cut alike"
                )
            }
            FailureKind::Mismatch if self.peer.is_some() || self.activity == self.blamed => write!(
                f,
                "sizes differ: rank {} sends {}, this rank expects {}; make counts and types agree",
                self.awaited, self.observed, self.expected
            ),
            FailureKind::Mismatch => write!(
                f,
                "rank {rank} called something else: {blamed}; all ranks must make the same calls \
                 with the same counts, types, roots and options, in the same order"
            ),
            FailureKind::Overlap => f.write_str(
                "another launch of this communicator was in flight; replay one graph at a time, or \
                 give each its own communicator by dup()",
            ),
            FailureKind::Bounds => write!(
                f,
                "rank {} named {} bytes at {:#x}, outside of its windows",
                self.awaited, self.expected, self.observed
            ),
            FailureKind::NoRoute => write!(f, "rank {} cannot be reached", self.awaited),
            FailureKind::Counts => write!(
                f,
                "the counts of rank {} add up to {} elements, its buffer has {}",
                self.awaited, self.observed, self.expected
            ),
            FailureKind::Dead => write!(
                f,
                "the process of rank {rank} has ended (killed, crashed, or left before its part), {:.3} s into \
                 the wait for {}; look at its output, then reconfigure without it or start the job again",
                self.seconds, self.wait_kind
            ),
            FailureKind::Abort => f.write_str("aborted by the program"),
        }
    }
}
