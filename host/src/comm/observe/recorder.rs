//! The flight recorder: the last operations of a communicator, kept for when something goes wrong.
//!
//! An entry is one line of memory, written by the thread that issues the operation and by the one that runs
//! it; a reader that meets an entry half written drops it, because its number is written last.

use core::sync::atomic::{AtomicU64, Ordering};

use super::Note;
use super::clock::{self, Dates};
use crate::Activity;

/// State of a recorded operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordState {
    /// Issued, not started.
    Scheduled,
    /// Running.
    Started,
    /// Ended well.
    Completed,
    /// Ended by a failure.
    Failed,
}

/// One operation that the flight recorder has seen.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct FlightRecord {
    /// Number of the operation on this communicator and rank, from 1.
    pub id: u64,
    /// What it was; `sequence` is its number.
    pub activity: Activity,
    /// Peer or root, where it has one.
    pub peer: Option<u32>,
    /// Elements of this rank's input.
    pub input_count: u64,
    /// Elements of this rank's output.
    pub output_count: u64,
    /// Whether it is a replay of a captured operation.
    pub is_replay: bool,
    /// When it was issued, nanoseconds since 1970.
    pub created_ns: u64,
    /// When it started to run.
    pub started_ns: Option<u64>,
    /// When it ended.
    pub ended_ns: Option<u64>,
    /// Where it stands.
    pub state: RecordState,
}

/// Words: number, call, input count, output count, created, started, ended, flags.
type Slot = [AtomicU64; 8];

const FAILED: u64 = 1;
const REPLAY: u64 = 2;

#[repr(align(64))]
#[derive(Debug, Default)]
struct Line(Slot);

/// A ring of entries.
#[derive(Debug)]
pub(crate) struct Recorder {
    lines: Box<[Line]>,
    issued: AtomicU64,
}

impl Recorder {
    pub(crate) fn new(entries: usize) -> Self {
        clock::start();
        Self {
            lines: (0..entries.min(1 << 20)).map(|_| Line::default()).collect(),
            issued: AtomicU64::new(0),
        }
    }

    /// Records an operation that is issued now; its number.
    #[inline]
    pub(crate) fn issue(&self, note: &Note, is_replay: bool) -> u64 {
        let id = self.issued.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(slot) = self.slot(id) {
            let words = [
                0,
                note.call,
                note.input_count,
                note.output_count,
                clock::ticks(),
                0,
                0,
                u64::from(is_replay) * REPLAY,
            ];
            for (word, value) in slot.iter().zip(words) {
                word.store(value, Ordering::Relaxed);
            }
            slot[0].store(id, Ordering::Release);
        }
        id
    }

    /// The operation starts.
    #[inline]
    pub(crate) fn start(&self, id: u64) {
        if let Some(slot) = self.current(id) {
            slot[5].store(clock::ticks(), Ordering::Relaxed);
        }
    }

    /// The operation starts as it is issued, on this thread.
    #[inline]
    pub(crate) fn start_at_once(&self, id: u64) {
        if let Some(slot) = self.current(id) {
            slot[5].store(slot[4].load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// The operation has ended.
    #[inline]
    pub(crate) fn end(&self, id: u64, well: bool) {
        if let Some(slot) = self.current(id) {
            slot[6].store(clock::ticks(), Ordering::Relaxed);
            if !well {
                slot[7].fetch_or(FAILED, Ordering::Relaxed);
            }
        }
    }

    fn slot(&self, id: u64) -> Option<&Slot> {
        let entries = self.lines.len() as u64;
        let at = id.checked_rem(entries)?;
        self.lines.get(at as usize).map(|line| &line.0)
    }

    fn current(&self, id: u64) -> Option<&Slot> {
        self.slot(id)
            .filter(|slot| slot[0].load(Ordering::Relaxed) == id)
    }

    /// Operations issued so far.
    pub(crate) fn issued(&self) -> u64 {
        self.issued.load(Ordering::Relaxed)
    }

    /// Forgets all entries.
    pub(crate) fn reset(&self) {
        for line in &self.lines {
            line.0[0].store(0, Ordering::Relaxed);
        }
    }

    /// The entries, oldest first.
    pub(crate) fn records(&self) -> Vec<FlightRecord> {
        let dates = Dates::new();
        let mut records: Vec<_> = self
            .lines
            .iter()
            .filter_map(|line| decode(&line.0, &dates))
            .collect();
        records.sort_by_key(|record| record.id);
        records
    }
}

fn decode(slot: &Slot, dates: &Dates) -> Option<FlightRecord> {
    let id = slot[0].load(Ordering::Acquire);
    if id == 0 {
        return None;
    }
    let words: [u64; 8] = core::array::from_fn(|at| slot[at].load(Ordering::Acquire));
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
    let date = |ticks: u64| (ticks != 0).then(|| dates.of(ticks));
    let note = Note {
        call,
        input_count,
        output_count,
    };
    let root = note.call().root();
    Some(FlightRecord {
        id,
        activity: Activity::new(call, id, input_count.max(output_count)),
        peer: (root != 0xffff).then_some(root),
        input_count,
        output_count,
        is_replay: flags & REPLAY != 0,
        created_ns: dates.of(created),
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
