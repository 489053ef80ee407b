//! Failures: decoding of a failure record in device memory, and messages that name the ranks and
//! their calls.

use core::fmt;

use fusewire_device::DType;
use fusewire_device::call::{Call, Operation};
use fusewire_device::element::ReductionCode;
use fusewire_device::layout::{FailureKind, FailureRecord};
use fusewire_device::wait::WaitKind;

use super::Error;
use crate::algorithm::Algorithm;
use crate::user_kernels;

/// Code of a wait for a tile, and its name in messages.
const TILE: u64 = WaitKind::Tile as u64;
const TILE_WORDS: &str = "a tile of its own";
/// [`WaitKind::Grid`] in a record, and in messages.
const GRID: u64 = WaitKind::Grid as u64;
const GRID_WORDS: &str = "a block of its launch";
/// [`WaitKind::BlockWord`] in a record, and in messages.
const BLOCK_WORD: u64 = WaitKind::BlockWord as u64;
const BLOCK_WORD_WORDS: &str = "a part of its row";
/// [`WaitKind::Sum`] in a record, and in messages.
const SUM: u64 = WaitKind::Sum as u64;
const SUM_WORDS: &str = "its part of a sum of signals";

/// [`WaitKind::Counter`] in a record, and in messages.
const COUNTER: u64 = WaitKind::Counter as u64;
const COUNTER_WORDS: &str = "a counter of its window";

/// The call that a rank was in: one side of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Activity {
    /// The operation; [`Operation::None`] for a rank that has not called one yet.
    pub operation: Operation,
    /// Sequence number of the rank's last collective.
    pub sequence: u64,
    /// Elements; 0 for operations that have no single count. For a batch the number of its
    /// operations, for a signal its index.
    pub count: u64,
    /// Element type, if the operation has one.
    pub dtype: Option<DType>,
    /// Reduction, if the operation has one.
    pub reduction: Option<ReductionCode>,
    /// Root, if the operation has one and it is known.
    pub root: Option<u32>,
    /// Code of the algorithm.
    pub algorithm: u8,
    /// Name of the user kernel, if this process has launched it.
    pub kernel: Option<&'static str>,
}

impl Activity {
    /// Decodes a call word; `count` is in elements.
    pub(crate) fn new(call: u64, sequence: u64, count: u64) -> Self {
        let call = Call(call);
        let operation = call.operation();
        let activity = Self {
            operation,
            sequence,
            count,
            dtype: None,
            reduction: None,
            root: operation.is_rooted().then(|| call.root()),
            algorithm: 0,
            kernel: user_kernels::find(call).map(|kernel| kernel.name),
        };
        if operation == Operation::User {
            // The code of the kernel takes the place of type, reduction and algorithm.
            return activity;
        }
        Self {
            dtype: DType::from_code(call.dtype()),
            reduction: ReductionCode::ALL
                .into_iter()
                .find(|code| *code as u8 == call.reduction()),
            algorithm: call.algorithm(),
            ..activity
        }
    }

    /// Returns the operation's name, or that of the user kernel.
    pub fn name(&self) -> String {
        match self.kernel {
            Some(kernel) => format!("kernel {kernel}"),
            None => self.operation.name().to_owned(),
        }
    }

    /// Decodes the call word and the count of a launch, which is in bytes for transfers.
    fn from_launch(call: u64, sequence: u64, count: u64) -> Self {
        let mut activity = Self::new(call, sequence, count);
        if is_transfer(activity.operation) {
            activity.count /= activity.dtype.map_or(1, DType::size) as u64;
        }
        activity
    }

    /// Decodes progress words of a rank in a communicator of `size` ranks. They lack the root, but
    /// their fingerprint covers it: the root is known if exactly one rank gives this fingerprint.
    pub(crate) fn from_progress(call: u64, sequence: u64, count: u64, size: u32) -> Self {
        let mut activity = Self::from_launch(Call::from_progress(call).0, sequence, count);
        if activity.operation.is_rooted() {
            let call = Call(call);
            let fingerprint_with = |root: u32| {
                Call::new(
                    call.operation(),
                    call.dtype(),
                    call.reduction(),
                    call.algorithm(),
                    root as u16,
                    count,
                )
                .fingerprint()
            };
            let mut roots = (0..size).filter(|root| fingerprint_with(*root) == call.fingerprint());
            activity.root = roots.next().filter(|_| roots.next().is_none());
        }
        activity
    }

    /// Returns the algorithm's name, for the algorithms that an operation can choose among.
    fn algorithm_name(&self) -> Option<&'static str> {
        [
            Algorithm::Packet,
            Algorithm::PacketTwoShot,
            Algorithm::Signal,
            Algorithm::TwoShot,
            Algorithm::Nvls,
        ]
        .into_iter()
        .find(|algorithm| *algorithm as u8 == self.algorithm)
        .map(Algorithm::name)
    }

    /// Returns the count and the type, such as `200 f32`.
    fn elements(&self) -> Option<String> {
        let dtype = self.dtype.map(DType::name);
        match (self.operation, dtype) {
            (Operation::None | Operation::Barrier | Operation::User, _) => None,
            (Operation::AllGatherV | Operation::AllToAllV, dtype) => dtype.map(str::to_owned),
            (Operation::Signal | Operation::WaitSignal, _) => Some(format!("index {}", self.count)),
            (Operation::Batch, _) => Some(format!("{} operations", self.count)),
            (_, Some(dtype)) => Some(format!("{} {dtype}", self.count)),
            (_, None) => Some(self.count.to_string()),
        }
    }

    /// Returns the arguments in which this call differs from `other`, a call of the same operation.
    fn differences(&self, other: &Self) -> Vec<String> {
        let mut different = Vec::new();
        if (self.count, self.dtype) != (other.count, other.dtype) {
            different.extend(self.elements());
        }
        if self.reduction != other.reduction {
            let name = self.reduction.map_or("none", ReductionCode::name);
            different.push(format!("reduction {name}"));
        }
        if let (Some(root), true) = (self.root, self.root != other.root && other.root.is_some()) {
            different.push(format!("root {root}"));
        }
        if different.is_empty() && self.algorithm != other.algorithm {
            let name = self.algorithm_name().unwrap_or("none");
            different.push(format!("algorithm {name}"));
        }
        different
    }
}

/// Returns true if kernels of `operation` count bytes.
const fn is_transfer(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Send | Operation::Recv | Operation::Put | Operation::Get
    )
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.name(), self.sequence)?;
        let mut arguments: Vec<String> = self.elements().into_iter().collect();
        arguments.extend(self.reduction.map(|reduction| reduction.name().to_owned()));
        arguments.extend(self.root.map(|root| format!("root {root}")));
        if self.operation.is_collective() {
            arguments.extend(self.algorithm_name().map(str::to_owned));
        }
        if arguments.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", arguments.join(", "))
    }
}

/// The first failure of a communicator. Every later call returns it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Failure {
    /// Name of the communicator.
    pub communicator: String,
    /// Generation of the communicator.
    pub generation: u64,
    /// The rank that detected the failure.
    pub reporter: u32,
    /// The rank that caused the failure, as far as known: the one with the least progress.
    pub rank: u32,
    /// The rank that the reporter waited for. In a barrier of all blocks this is the reporter
    /// itself, and the upper half of `expected` is the block. For a failure that a kernel recorded,
    /// the number of an argument or the author's code ([`FailureKind`]).
    pub awaited: u32,
    /// The kind of the failure.
    pub kind: FailureKind,
    /// The call that the reporter was executing.
    pub activity: Activity,
    /// The call that the blamed rank was executing, from its progress words.
    pub blamed: Activity,
    /// Name of the event that the reporter waited for, for messages.
    pub wait_kind: &'static str,
    /// The value that the reporter waited for; for a mismatch of sizes, the expected size; for a
    /// failure that a kernel recorded, the value that [`FailureKind`] describes.
    pub expected: u64,
    /// The last value that the reporter read; for a mismatch of sizes, the size that was sent; for
    /// a failure that a kernel recorded, the value that [`FailureKind`] describes.
    pub observed: u64,
    /// Seconds that the reporter had waited.
    pub seconds: f64,
    /// Peer of a send or receive.
    pub peer: Option<u32>,
    /// The calls that the ranks were executing when this rank detected the failure, from their
    /// progress words.
    pub progress: Vec<Activity>,
    /// Name of the kernel argument that a failure concerns; for [`FailureKind::User`] the author's
    /// text with the values.
    pub detail: Option<String>,
}

impl Failure {
    /// Decodes the record of rank `reporter` of `size` ranks.
    pub(crate) fn decode(name: &str, reporter: u32, size: u32, record: &FailureRecord) -> Self {
        let kind = [
            FailureKind::Timeout,
            FailureKind::Mismatch,
            FailureKind::Overlap,
            FailureKind::Bounds,
            FailureKind::NoRoute,
            FailureKind::Counts,
            FailureKind::Dead,
            FailureKind::Index,
            FailureKind::Rank,
            FailureKind::Id,
            FailureKind::User,
            FailureKind::Capacity,
            FailureKind::Word,
            FailureKind::Aliasing,
            FailureKind::Batch,
            FailureKind::NotGrid,
            FailureKind::Stopped,
            FailureKind::LastBlock,
            FailureKind::Ticket,
        ]
        .into_iter()
        .find(|kind| *kind as u64 == record.kind)
        .unwrap_or(FailureKind::Abort);
        let call = Call(record.call);
        let activity = Activity::from_launch(record.call, record.sequence, record.count);
        // The progress words may have been read while they changed to the next operation.
        let count = match record.blamed_count >> 48 == record.blamed_sequence & 0xffff {
            true => record.blamed_count & 0xffff_ffff_ffff,
            false => 0,
        };
        let blamed =
            Activity::from_progress(record.blamed_call, record.blamed_sequence, count, size);
        Self {
            communicator: name.to_owned(),
            generation: record.generation,
            reporter,
            rank: record.blamed as u32,
            awaited: record.awaited as u32,
            kind,
            activity,
            blamed,
            wait_kind: match record.wait_kind {
                1 => "its entry",
                2 => "its exit",
                3 => "its packets",
                4 => "room in the channel to it",
                5 => "its data",
                6 => "its signal",
                TILE => TILE_WORDS,
                9 => "network requests to it",
                10 => "room in the queue to it",
                11 => "rows from its queue",
                GRID => GRID_WORDS,
                SUM => SUM_WORDS,
                COUNTER => COUNTER_WORDS,
                BLOCK_WORD => BLOCK_WORD_WORDS,
                _ => "the launch",
            },
            expected: record.expected,
            observed: record.observed,
            seconds: record.elapsed_ns as f64 * 1e-9,
            peer: match call.operation() {
                // Each operation of a batch has its own peer.
                Operation::Batch | Operation::WaitSignal => Some(record.awaited as u32),
                _ => (!call.is_collective()).then(|| call.root()),
            },
            progress: Vec::new(),
            detail: detail(kind, record),
        }
    }

    /// Returns the tile of this rank's own input, if the wait was for one.
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

/// Returns the kernel argument that a record concerns, or the author's text.
fn detail(kind: FailureKind, record: &FailureRecord) -> Option<String> {
    let contract = user_kernels::find(Call(record.call))?.contract;
    let code = record.awaited as u32;
    match kind {
        FailureKind::User if code == u32::MAX => {
            Some("the kernel recorded no reason; record one with s.ensure or s.fault".to_owned())
        }
        FailureKind::User => {
            let text = contract.failures.iter().find(|(of, _)| *of == code);
            Some(match text {
                Some((_, text)) => user_kernels::fill(text, record.observed, record.expected),
                None => format!(
                    "the kernel recorded failure {code} ({}, {})",
                    record.observed, record.expected
                ),
            })
        }
        FailureKind::Index
        | FailureKind::Rank
        | FailureKind::Id
        | FailureKind::Aliasing
        | FailureKind::Batch
        | FailureKind::Ticket
        | FailureKind::NoRoute => {
            let name = contract.arguments.get(code as usize)?.name;
            Some(format!("argument {name}"))
        }
        _ => None,
    }
}

impl Failure {
    fn detail(&self) -> &str {
        self.detail.as_deref().unwrap_or(match self.kind {
            FailureKind::User => "the kernel recorded a failure",
            _ => "an argument of the kernel",
        })
    }

    /// Writes the difference between the calls of two ranks.
    fn write_mismatch(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            reporter,
            rank,
            activity,
            blamed,
            ..
        } = self;
        if self.peer.is_some() {
            return self.write_message_mismatch(f);
        }
        let operation = activity.operation;
        let call = format!("{} #{}", activity.name(), activity.sequence);
        let is_same_call = blamed.sequence == activity.sequence;
        let is_other = blamed.operation != operation || blamed.kernel != activity.kernel;
        if is_same_call && is_other {
            return write!(
                f,
                "rank {rank} called {blamed}; rank {reporter} called {activity}. All ranks must \
                 make the same calls in the same order"
            );
        }
        let (theirs, own) = match is_same_call {
            true => (blamed.differences(activity), activity.differences(blamed)),
            false => (Vec::new(), Vec::new()),
        };
        if !theirs.is_empty() {
            return write!(
                f,
                "rank {rank} called {call} with {}; rank {reporter} called it with {}. All ranks \
                 must pass the same count, type, root and reduction, in the same order",
                theirs.join(", "),
                own.join(", ")
            );
        }
        match operation {
            Operation::AllToAllV => {
                let dtype = activity.dtype.map_or("elements", DType::name);
                write!(
                    f,
                    "rank {rank} sends {} {dtype}, rank {reporter} expects {} {dtype}. The splits \
                     of sender and receiver must agree",
                    self.observed, self.expected
                )
            }
            Operation::AllGatherV => write!(
                f,
                "rank {rank} called {call} with other counts than rank {reporter}. All ranks must \
                 pass the same counts"
            ),
            Operation::AllGatherWithFlags | Operation::ReduceScatterOnArrival => write!(
                f,
                "rank {rank} called {call} with another number of elements in a chunk or tile than \
                 rank {reporter}. All ranks must divide the buffer equally"
            ),
            Operation::User => write!(
                f,
                "rank {rank} called {call} with other values of the agreed arguments than rank \
                 {reporter}. All ranks must pass equal values for arguments that the kernel marks \
                 #[agreed], pass the same queues, and launch the same number of blocks"
            ),
            operation if operation.is_rooted() => write!(
                f,
                "rank {rank} called {call} with another root than rank {reporter}. All ranks must \
                 pass the same root"
            ),
            _ => write!(
                f,
                "rank {rank} called {call} with other arguments than rank {reporter}. All ranks \
                 must pass the same count, type, reduction and options, in the same order"
            ),
        }
    }

    /// Writes the difference between a message and the receive that it matched.
    fn write_message_mismatch(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            reporter,
            awaited,
            activity,
            expected,
            observed,
            ..
        } = self;
        if expected == observed {
            let dtype = activity.dtype.map_or("the receive's", DType::name);
            return write!(
                f,
                "types or tags differ: rank {awaited} sends {observed} bytes of another type than \
                 {dtype}, which rank {reporter} expects, or with another tag"
            );
        }
        write!(
            f,
            "sizes differ: rank {awaited} sends {observed} bytes, rank {reporter} expects \
             {expected} bytes"
        )?;
        // A kernel of several blocks compares the bytes that each block moves.
        let bytes = activity
            .dtype
            .map(|dtype| activity.count * dtype.size() as u64);
        if bytes.is_some_and(|bytes| bytes != *expected) {
            f.write_str(" in the part of one block")?;
        }
        f.write_str("; make counts and types agree")
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
                "timed out after {:.3} s waiting for tile {} of its own input (wanted count {}, \
                 saw {}); the computation that makes the tile has not raised its counter on rank \
                 {rank}: is it enqueued, on a stream that does not wait for this operation, with \
                 room on the device? Or raise the timeout",
                self.seconds,
                self.expected >> 32,
                self.expected as u32,
                self.observed
            ),
            FailureKind::Timeout if self.wait_kind == GRID_WORDS => write!(
                f,
                "timed out after {:.3} s waiting for block {} of this launch in grid_barrier; it \
                 has returned, or waits for something else: all blocks of a launch must make the \
                 same calls of grid_barrier",
                self.seconds,
                self.expected >> 32
            ),
            FailureKind::Timeout if self.wait_kind == BLOCK_WORD_WORDS => write!(
                f,
                "timed out after {:.3} s waiting for block {} of this launch, which handles \
                 another part of the same row; it waits for another rank, or does not run: are \
                 other kernels on the GPU that wait for this one? Or raise the timeout",
                self.seconds,
                self.expected >> 32
            ),
            FailureKind::Timeout if self.wait_kind == COUNTER_WORDS => write!(
                f,
                "timed out after {:.3} s waiting for {COUNTER_WORDS} (expected {}, saw {}), which \
                 only kernels of rank {rank} raise, by Window::count; or raise the timeout",
                self.seconds, self.expected, self.observed
            ),
            FailureKind::Timeout => {
                let late = match self.peer {
                    Some(peer) if self.wait_kind == SUM_WORDS => {
                        format!("rank {peer} has contributed least")
                    }
                    Some(peer) => format!("rank {peer} did not take part"),
                    None if blamed.operation == Operation::None => {
                        format!("rank {rank} never entered a collective")
                    }
                    None if blamed.sequence < activity.sequence => format!(
                        "rank {rank} never entered {} #{} (its last was {blamed})",
                        activity.name(),
                        activity.sequence
                    ),
                    None => format!("rank {rank} entered it and then stopped"),
                };
                write!(
                    f,
                    "timed out after {:.3} s waiting for rank {}, {} (expected {:#x}, saw {:#x}); \
                     {late}; look at rank {rank} (killed, stopped, or late?), or raise the \
                     timeout",
                    self.seconds, self.awaited, self.wait_kind, self.expected, self.observed
                )
            }
            FailureKind::Mismatch => self.write_mismatch(f),
            FailureKind::Overlap => f.write_str(
                "another launch of this communicator was in flight; replay one graph at a time, or \
                 give each its own communicator by dup()",
            ),
            FailureKind::Bounds => write!(
                f,
                "rank {} named {} bytes at {:#x}, outside of its windows",
                self.awaited, self.expected, self.observed
            ),
            FailureKind::NoRoute => {
                // In the record of a kernel, the observed value is the rank.
                let rank = match &self.detail {
                    Some(argument) => {
                        write!(f, "{argument}: ")?;
                        self.observed
                    }
                    None if self.awaited == u32::MAX => {
                        return write!(
                            f,
                            "rank {} cannot be reached by load and store, which the packets of \
                             this kernel need: put to a window instead",
                            self.observed
                        );
                    }
                    None => u64::from(self.awaited),
                };
                write!(
                    f,
                    "rank {rank} cannot be reached: by load and store, which `direct` needs, or by \
                     a network; or the window has been freed: drop the graphs that use a window \
                     before freeing it"
                )
            }
            FailureKind::Index => write!(
                f,
                "{}: element {} of {}",
                self.detail(),
                self.observed,
                self.expected
            ),
            FailureKind::Rank => write!(
                f,
                "{}: rank {} of {} ranks",
                self.detail(),
                self.observed,
                self.expected
            ),
            FailureKind::Id => write!(
                f,
                "{}: number {} of a signal, counter, barrier or cell, of which the window has {}",
                self.detail(),
                self.observed,
                self.expected
            ),
            FailureKind::User => f.write_str(self.detail()),
            FailureKind::Capacity => write!(
                f,
                "packets of {} bytes for each block and rank; a slot has room for {}: raise \
                 Options::packet_slot_bytes on all ranks, or use fewer blocks",
                self.observed, self.expected
            ),
            FailureKind::NotGrid => f.write_str(
                "grid_barrier in a kernel whose blocks need not run at the same time: declare it \
                 with #[kernel(grid)]",
            ),
            FailureKind::Batch => write!(
                f,
                "{}: {} rows for one rank; a batch of this queue has at most {}: pass a larger \
                 batch to alloc_queue on all ranks",
                self.detail(),
                self.observed,
                self.expected
            ),
            FailureKind::Aliasing => write!(
                f,
                "{}: a copy of {} bytes to an address {} bytes from their source",
                self.detail(),
                self.expected,
                self.observed
            ),
            FailureKind::Word => write!(
                f,
                "word {} of a packet stream of {} words",
                self.observed, self.expected
            ),
            FailureKind::Counts => write!(
                f,
                "the counts of rank {} add up to {} elements, its buffer has {}",
                self.awaited, self.observed, self.expected
            ),
            FailureKind::Dead => write!(
                f,
                "{}, {:.3} s into the wait for {}; {}; look at its output, then reconfigure \
                 without it or start the job again",
                self.detail.clone().unwrap_or_else(|| format!(
                    "the process of rank {rank} has ended (killed, crashed, or left before its \
                     part)"
                )),
                self.seconds,
                self.wait_kind,
                match blamed.operation {
                    Operation::None => "it never entered a collective".to_owned(),
                    _ => format!("its last operation was {blamed}"),
                }
            ),
            FailureKind::Abort => f.write_str("aborted by the program"),
            FailureKind::Stopped => write!(
                f,
                "the kernel did not run to its end on rank {rank}: it panicked, could not be \
                 launched, or broke its shared memory; the error on that rank says why"
            ),
            FailureKind::LastBlock if self.expected == 0 => f.write_str(
                "the blocks of the launch made different numbers of calls of last_block; all \
                 blocks must make the same calls",
            ),
            FailureKind::LastBlock => write!(
                f,
                "more than {} calls of last_block in a launch",
                self.expected
            ),
            FailureKind::Ticket => write!(
                f,
                "{}: a lane waited for a ticket after it had issued another fetch_add or \
                 compare_swap; over a network, a lane waits for each ticket before its next one",
                self.detail()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROGRESS: u64 = 0xff_ffff_ffff;

    #[test]
    fn the_fingerprint_names_the_root() {
        let mut unknown = 0;
        let rooted = Operation::ALL
            .iter()
            .filter(|operation| operation.is_rooted());
        for &operation in rooted {
            for count in [0u64, 1, 16, 1000, 1 << 20] {
                for root in 0..64u16 {
                    let call = Call::new(operation, DType::F32 as u8, 0, 0, root, count).0;
                    let seen = Activity::from_progress(call & PROGRESS, 5, count, 64);
                    assert!(seen.root.is_none_or(|seen| seen == u32::from(root)));
                    unknown += u32::from(seen.root.is_none());
                }
            }
        }
        // Two of 64 roots rarely share one of 65,536 fingerprints.
        assert!(unknown < 10, "{unknown} of 1280 roots are not known");
        let call = Call::new(Operation::AllReduce, DType::F32 as u8, 1, 0, 0xffff, 16).0;
        assert_eq!(
            Activity::from_progress(call & PROGRESS, 5, 16, 64).root,
            None
        );
    }

    #[test]
    fn a_missing_part_of_a_row_names_the_block() {
        let mut record: FailureRecord = bytemuck::Zeroable::zeroed();
        record.kind = FailureKind::Timeout as u64;
        record.call = Call::new(
            Operation::AllReduceNorm,
            DType::Bf16 as u8,
            0,
            0,
            0xffff,
            7168,
        )
        .0;
        (record.sequence, record.count) = (3, 7168);
        (record.wait_kind, record.expected) = (BLOCK_WORD, 5 << 32 | 17);
        (record.awaited, record.blamed) = (2, 2);
        record.elapsed_ns = 1_500_000_000;
        let text = Failure::decode("world", 2, 4, &record).to_string();
        let start = "communicator \"world\": rank 2 in all_reduce_norm #3 (7168 bf16): timed out \
                     after 1.500 s waiting for block 5 of this launch, which handles another part";
        assert!(text.starts_with(start), "{text}");
    }

    #[test]
    fn transfers_count_elements() {
        for operation in [
            Operation::Send,
            Operation::Recv,
            Operation::Put,
            Operation::Get,
        ] {
            let call = Call::new(operation, DType::F32 as u8, 0, 0, 1, 0).0;
            let activity = Activity::from_launch(call, 4, 800);
            assert_eq!(
                activity.to_string(),
                format!("{} #4 (200 f32)", operation.name())
            );
        }
        for (operation, expected) in [
            (Operation::AllToAllV, "all_to_all_v #4 (f32)"),
            (Operation::AllGatherV, "all_gather_v #4 (f32)"),
        ] {
            let call = Call::new(operation, DType::F32 as u8, 0, 0, 0xffff, 0).0;
            assert_eq!(Activity::from_launch(call, 4, 0).to_string(), expected);
        }
        let call = Call::new(Operation::Barrier, 0, 0, 0, 0xffff, 0).0;
        assert_eq!(Activity::from_launch(call, 4, 0).to_string(), "barrier #4");
    }
}
