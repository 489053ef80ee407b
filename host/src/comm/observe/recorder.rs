//! The flight recorder: the last operations of a communicator, kept for the analysis of failures.
//!
//! An entry is one cache line. The thread that issues the operation and the thread that runs it
//! write the entry. Its number is written last, so a reader detects and drops an entry that is
//! incomplete.

use core::sync::atomic::{AtomicU64, Ordering, fence};
use core::time::Duration;

use super::OpInfo;
use super::clock::{self, TickConverter};
use crate::Activity;
use fusewire_device::call::Operation;

/// State of a recorded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordState {
    /// Issued, not started.
    Scheduled,
    /// Running.
    Started,
    /// Ended with success.
    Completed,
    /// Ended by a failure.
    Failed,
}

/// An operation in the flight recorder.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FlightRecord {
    /// Number of the operation on this communicator and rank, from 1.
    pub id: u64,
    /// Description of the operation; its `sequence` is `id`.
    pub activity: Activity,
    /// Sequence number, from 1, among the operations that must match those of other ranks: the
    /// collectives of this communicator, or the transfers from one rank to another. Replays have
    /// their own sequence numbers.
    pub sequence: u64,
    /// Peer or root, if the operation has one.
    pub peer: Option<u32>,
    /// Elements of this rank's input.
    pub input_count: u64,
    /// Elements of this rank's output.
    pub output_count: u64,
    /// True for a replay of a captured operation.
    pub is_replay: bool,
    /// Time at which it was issued, in nanoseconds since 1970.
    pub created_ns: u64,
    /// Clock ticks at the same time. Unlike times in nanoseconds, ticks are exact, so they order
    /// the operations of several recorders.
    pub(super) created_ticks: u64,
    /// Time at which it started to run.
    pub started_ns: Option<u64>,
    /// Time at which it ended; `None` for short blocking operations, unless `FUSEWIRE_FR_TIMING=1`.
    pub ended_ns: Option<u64>,
    /// State of the operation.
    pub state: RecordState,
}

/// Words of an entry: number, call, input count, output count, created, started, ended, and the
/// sequence number with flags.
type Slot = [AtomicU64; 8];

const FAILED: u64 = 1;
const REPLAY: u64 = 2;
/// Number of flag bits below the sequence number.
const SEQUENCE_SHIFT: u32 = 2;

#[repr(align(64))]
#[derive(Debug, Default)]
struct Line(Slot);

/// Blocking operations of fewer elements are recorded without the time of their end.
const TIMED_ELEMENTS: u64 = 16 << 10;

/// Marks the end of an operation without a time.
const UNTIMED: u64 = 1;

/// A ring of entries.
#[derive(Debug)]
pub(crate) struct Recorder {
    lines: Box<[Line]>,
    /// Number of entries that [`Recorder::records`] returns.
    entries: usize,
    /// Set by `FUSEWIRE_FR_TIMING=1`: every end is timed.
    always_timed: bool,
    issued: AtomicU64,
    size: usize,
    /// Last sequence numbers: of collectives, sends by peer, receives by peer; then the same for
    /// replays. Threads that use different streams may issue operations at the same time.
    sequences: Box<[AtomicU64]>,
}

impl Recorder {
    /// Creates a recorder of `entries` operations, for a communicator of `size` ranks.
    pub(crate) fn new(entries: usize, size: u32) -> Self {
        clock::start();
        let size = size as usize;
        Self {
            // Rounded up to a power of two, so that the slot of an entry needs no division.
            lines: (0..ring_lines(entries)).map(|_| Line::default()).collect(),
            entries,
            always_timed: std::env::var("FUSEWIRE_FR_TIMING").is_ok_and(|value| value == "1"),
            issued: AtomicU64::new(0),
            size,
            sequences: (0..2 * (1 + 2 * size)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the next sequence number of the kind of this operation.
    #[inline]
    fn count(&self, op_info: &OpInfo, is_replay: bool) -> u64 {
        let call = op_info.call();
        let kind = match call.operation() {
            Operation::Send => 1 + call.root() as usize,
            Operation::Recv => 1 + self.size + call.root() as usize,
            _ => 0,
        };
        let at = kind + usize::from(is_replay) * (1 + 2 * self.size);
        let Some(counter) = self.sequences.get(at) else {
            return 0;
        };
        counter.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Records an operation that is issued now. Returns its number.
    #[inline]
    pub(crate) fn issue(&self, op_info: &OpInfo, is_replay: bool) -> u64 {
        let id = self.issued.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(slot) = self.slot(id) {
            self.write(slot, id, op_info, is_replay, 0);
        }
        id
    }

    /// Records an operation that is issued and started now, by a thread that has the stream for
    /// itself.
    #[inline]
    pub(crate) fn open(&self, op_info: &OpInfo) -> RunningOp<'_> {
        // The thread has just taken the stream by a locked instruction, so that this one does not
        // wait for earlier stores.
        let id = self.issued.fetch_add(1, Ordering::Relaxed) + 1;
        let slot = self.slot(id);
        if let Some(slot) = slot {
            self.write(slot, id, op_info, false, 1);
        }
        RunningOp {
            slot,
            elements: op_info.input_count.max(op_info.output_count),
        }
    }

    /// Marks the operation as ended. Records the time only of failed and of large operations,
    /// because reading the clock takes a tenth of the duration of the shortest call.
    #[inline]
    pub(crate) fn close(&self, open: &RunningOp<'_>, well: bool) {
        let Some(slot) = open.slot else { return };
        let timed = !well || self.always_timed || open.elements >= TIMED_ELEMENTS;
        let ended = if timed { clock::ticks() } else { UNTIMED };
        slot[6].store(ended, Ordering::Relaxed);
        if !well {
            slot[7].fetch_or(FAILED, Ordering::Relaxed);
        }
    }

    #[inline]
    fn write(&self, slot: &Slot, id: u64, op_info: &OpInfo, is_replay: bool, started: u64) {
        let now = clock::ticks();
        slot[0].store(0, Ordering::Relaxed);
        // A reader that sees one of the new words also sees that the entry is being written.
        fence(Ordering::Release);
        let words = [
            0,
            op_info.call,
            op_info.input_count,
            op_info.output_count,
            now,
            now * started,
            0,
            (self.count(op_info, is_replay) << SEQUENCE_SHIFT) | (u64::from(is_replay) * REPLAY),
        ];
        for (word, value) in slot.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        slot[0].store(id, Ordering::Release);
    }

    /// Records the start of an operation.
    #[inline]
    pub(crate) fn start(&self, id: u64) {
        if let Some(slot) = self.current(id) {
            slot[5].store(clock::ticks(), Ordering::Relaxed);
        }
    }

    /// Records that an operation started when it was issued, on this thread.
    #[inline]
    pub(crate) fn start_at_once(&self, id: u64) {
        if let Some(slot) = self.current(id) {
            slot[5].store(slot[4].load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Records the end of an operation.
    #[inline]
    pub(crate) fn end(&self, id: u64, well: bool) {
        if let Some(slot) = self.current(id) {
            slot[6].store(clock::ticks(), Ordering::Relaxed);
            if !well {
                slot[7].fetch_or(FAILED, Ordering::Relaxed);
            }
        }
    }

    /// Records the failure of an operation that could not start, for example because a hook or an
    /// access to a tensor was refused.
    #[cold]
    pub(crate) fn refuse(&self, id: u64) {
        let has_started = |slot: &&Slot| slot[5].load(Ordering::Relaxed) != 0;
        if self.current(id).filter(has_started).is_none() {
            self.end(id, false);
        }
    }

    #[inline]
    fn slot(&self, id: u64) -> Option<&Slot> {
        let mask = self.lines.len().wrapping_sub(1);
        self.lines.get(id as usize & mask).map(|line| &line.0)
    }

    fn current(&self, id: u64) -> Option<&Slot> {
        self.slot(id)
            .filter(|slot| slot[0].load(Ordering::Relaxed) == id)
    }

    /// Returns the oldest operation that has run for longer than `limit` and whose number is
    /// greater than `after`.
    pub(crate) fn running(&self, limit: Duration, after: u64) -> Option<LongOp> {
        let clock = TickConverter::new();
        let mut oldest: Option<LongOp> = None;
        for line in &self.lines {
            let slot = &line.0;
            let id = slot[0].load(Ordering::Acquire);
            let words: [u64; 8] = core::array::from_fn(|at| slot[at].load(Ordering::Relaxed));
            let [_, call, input_count, output_count, _, started, ended, flags] = words;
            fence(Ordering::Acquire);
            let is_running = id > after && started != 0 && ended == 0;
            if !is_running || slot[0].load(Ordering::Relaxed) != id {
                continue;
            }
            let elapsed = Duration::from_nanos(clock.since(started));
            if elapsed > limit && oldest.as_ref().is_none_or(|oldest| id < oldest.id) {
                oldest = Some(LongOp {
                    id,
                    op_info: OpInfo {
                        call,
                        input_count,
                        output_count,
                    },
                    sequence: flags >> SEQUENCE_SHIFT,
                    elapsed,
                });
            }
        }
        oldest
    }

    /// Returns the number of operations issued so far.
    pub(crate) fn issued(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }

    /// Removes all entries.
    pub(crate) fn reset(&self) {
        for line in &self.lines {
            line.0[0].store(0, Ordering::Relaxed);
        }
    }

    /// Returns the entries, oldest first.
    pub(crate) fn records(&self) -> Vec<FlightRecord> {
        let dates = TickConverter::new();
        let mut records: Vec<_> = self
            .lines
            .iter()
            .filter_map(|line| decode(&line.0, &dates))
            .collect();
        records.sort_by_key(|record| record.id);
        records.drain(..records.len().saturating_sub(self.entries));
        records
    }
}

/// An operation that has run for a long time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LongOp {
    pub(crate) id: u64,
    pub(crate) op_info: OpInfo,
    pub(crate) sequence: u64,
    pub(crate) elapsed: Duration,
}

/// An operation that is running on the thread that issued it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunningOp<'a> {
    slot: Option<&'a Slot>,
    elements: u64,
}

fn ring_lines(entries: usize) -> usize {
    match entries.min(1 << 20) {
        0 => 0,
        entries => entries.next_power_of_two(),
    }
}

fn decode(slot: &Slot, dates: &TickConverter) -> Option<FlightRecord> {
    let id = slot[0].load(Ordering::Acquire);
    if id == 0 {
        return None;
    }
    let words: [u64; 8] = core::array::from_fn(|at| slot[at].load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    if slot[0].load(Ordering::Relaxed) != id {
        return None;
    }
    let [
        _,
        call,
        input_count,
        output_count,
        created,
        started,
        ended,
        flags,
    ] = words;
    let date = |ticks: u64| (ticks > UNTIMED).then(|| dates.of(ticks));
    let op_info = OpInfo {
        call,
        input_count,
        output_count,
    };
    let root = op_info.call().root();
    Some(FlightRecord {
        id,
        sequence: flags >> SEQUENCE_SHIFT,
        activity: Activity::new(call, id, input_count.max(output_count)),
        peer: (root != 0xffff).then_some(root),
        input_count,
        output_count,
        is_replay: flags & REPLAY != 0,
        created_ns: dates.of(created),
        created_ticks: created,
        started_ns: date(started),
        ended_ns: date(ended),
        state: match (started, ended, flags & FAILED) {
            (_, _, FAILED) => RecordState::Failed,
            (0, 0, _) => RecordState::Scheduled,
            (_, 0, _) => RecordState::Started,
            _ => RecordState::Completed,
        },
    })
}

#[cfg(test)]
mod tests {
    use core::hint::black_box;
    use std::time::Instant;

    use super::{OpInfo, Recorder};

    /// Threads may issue operations at the same time, on different streams.
    #[test]
    fn threads_never_get_the_same_sequence_number() {
        let recorder = Recorder::new(64, 2);
        let started = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while started.elapsed().as_millis() < 500 {
                        for _ in 0..1000 {
                            recorder.issue(black_box(&OpInfo::default()), false);
                        }
                    }
                });
            }
        });
        let last = recorder.issue(&OpInfo::default(), false);
        let records = recorder.records();
        let record = records.last().expect("the last operation");
        assert_eq!((record.id, record.sequence), (last, last));
    }

    /// `cargo test --release -p fusewire --lib cost_of_an_entry -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    fn cost_of_an_entry() {
        const CALLS: u32 = 100_000;
        let recorder = Recorder::new(2000, 8);
        let op_info = black_box(OpInfo::default());
        let mut times: Vec<_> = (0..51)
            .map(|_| {
                let start = Instant::now();
                for _ in 0..CALLS {
                    let id = recorder.issue(black_box(&op_info), false);
                    recorder.start_at_once(black_box(id));
                    recorder.end(black_box(id), true);
                }
                start.elapsed().as_nanos() as f64 / f64::from(CALLS)
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "issue, start and end: median {:.1} ns, least {:.1} ns",
            times[25], times[0]
        );
        assert_eq!(recorder.issued(), 51 * u64::from(CALLS));
    }
}
