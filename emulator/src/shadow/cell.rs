//! The last accesses of each location.

use std::collections::HashMap;
use std::sync::Arc;

use super::clock::{Event, Knowledge, Thread};
use super::release::Release;
use crate::program::Scope;

/// Number of bytes of a cell.
const CELL: u64 = 8;
/// Number of cells of a page.
const PAGE: usize = 64;
/// Number of writes of a location that loads may return.
pub(super) const HISTORY: usize = 4;

/// A location in memory: a number for the memory and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) memory: u64,
    pub(crate) offset: u64,
}

/// Bytes of a cell, as a bit set.
pub(super) type Bytes = u8;

/// Returns the bits of the bytes of a set in an 8-byte word.
pub(super) fn bits(bytes: Bytes) -> u64 {
    const ALL: [u64; 256] = {
        let mut all = [0; 256];
        let mut at = 0;
        while at < 256 * 8 {
            if (at / 8) >> (at % 8) & 1 != 0 {
                all[at / 8] |= 0xff << (8 * (at % 8));
            }
            at += 1;
        }
        all
    };
    ALL[usize::from(bytes)]
}

/// Strength and proxy of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// The scope of a strong access.
    pub(crate) strong: Option<Scope>,
    /// True for `multimem` instructions.
    pub(crate) alias: bool,
    /// True for `ld.global.nc`.
    pub(crate) constant: bool,
    /// True for read-modify-write operations.
    pub(crate) atomic: bool,
}

impl Kind {
    pub(super) const HOST: Self = Self {
        strong: Some(Scope::Sys),
        alias: false,
        constant: false,
        atomic: false,
    };
}

/// A write of a location.
#[derive(Clone, Debug)]
pub(super) struct Version {
    pub(super) writer: Event,
    pub(super) kind: Kind,
    pub(super) bytes: Bytes,
    /// Index of the instruction.
    pub(super) pc: u32,
    /// Position in the coherence order.
    pub(super) order: u32,
    /// Round of the machine.
    pub(super) round: u64,
    /// Content of the cell after the write.
    pub(super) content: u64,
    /// Releases that a read of this value observes.
    pub(super) releases: Vec<Arc<Release>>,
    /// The writer's knowledge at a strong write.
    pub(super) trail: Option<Arc<Knowledge>>,
}

impl Version {
    fn is_by_stream(&self) -> bool {
        self.writer.thread == Thread::HOST && !self.releases.is_empty()
    }
}

/// The last reads of lanes of a warp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) block: u32,
    pub(super) warp: u16,
    pub(super) lanes: u32,
    pub(super) time: u64,
    pub(super) kind: Kind,
    pub(super) bytes: Bytes,
    pub(super) pc: u32,
    /// Position in the coherence order of the write whose value was read.
    pub(super) seen: u32,
}

impl Read {
    pub(super) fn event(&self, lane: u32) -> Event {
        Event {
            thread: Thread {
                block: self.block,
                number: self.warp * 32 + lane as u16,
            },
            time: self.time,
        }
    }
}

/// The last accesses of 8 bytes.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    /// In coherence order. The first one is the initial value, or the oldest write that is kept.
    pub(super) versions: Vec<Version>,
    /// The last read of each thread.
    pub(super) reads: Vec<Read>,
    /// The first read of each thread that has returned the value of a write, for each write that
    /// is kept. With the newest values, strong reads only.
    pub(super) floors: Vec<Read>,
    /// Bytes whose content is known.
    known: Bytes,
    /// Bytes that a kernel has written.
    pub(super) written: Bytes,
}

impl Cell {
    fn new() -> Self {
        Self {
            versions: vec![Version {
                writer: Event {
                    thread: Thread::HOST,
                    time: 0,
                },
                kind: Kind::HOST,
                bytes: 0xff,
                pc: 0,
                order: 0,
                round: 0,
                content: 0,
                releases: Vec::new(),
                trail: None,
            }],
            reads: Vec::new(),
            floors: Vec::new(),
            known: 0,
            written: 0,
        }
    }

    pub(super) fn newest(&self) -> &Version {
        self.versions.last().expect("a cell has an initial value")
    }

    /// Returns the index of the newest write of `bytes`.
    pub(super) fn newest_of(&self, bytes: Bytes) -> usize {
        let found = self.versions.iter().rposition(|it| it.bytes & bytes != 0);
        found.expect("the newest write of each byte is kept")
    }

    /// Returns the indices of writes of `bytes` from the newest one on. Stops where writes of the
    /// cell have been removed, but after at least one write.
    pub(super) fn history(&self, bytes: Bytes) -> impl Iterator<Item = usize> {
        let newest = self.newest_of(bytes);
        let last = self.newest().order as usize;
        let count = self.versions.len();
        let kept = move |at: &usize| {
            *at == newest || self.versions[*at].order as usize + count == last + at + 1
        };
        (0..=newest)
            .rev()
            .take_while(kept)
            .filter(move |at| self.versions[*at].bytes & bytes != 0)
    }

    /// Updates the cell with the bytes that are in memory. Other bytes than those of the newest
    /// write come from the host.
    pub(super) fn observe(&mut self, bytes: Bytes, content: u64) {
        let unknown = bits(bytes & !self.known);
        if unknown != 0 {
            for version in &mut self.versions {
                version.content |= content & unknown;
            }
            self.known |= bytes;
        }
        let newest = self.newest();
        let changed = bits(bytes) & (newest.content ^ content);
        if changed != 0 {
            let content = newest.content ^ changed;
            self.push_by_host(bytes, content, None);
        }
    }

    /// Appends a write by the host or, with a release, by a stream.
    pub(super) fn push_by_host(
        &mut self,
        bytes: Bytes,
        content: u64,
        release: Option<Arc<Release>>,
    ) {
        // The host has ordered its write after the reads.
        self.reads.retain(|read| read.bytes & bytes == 0);
        let initial = Self::new().versions.remove(0);
        self.push(Version {
            bytes,
            content,
            trail: release.as_ref().map(|it| Arc::clone(&it.knowledge)),
            releases: release.into_iter().collect(),
            ..initial
        });
    }

    /// Appends a write to the coherence order.
    pub(super) fn push(&mut self, version: Version) {
        let order = self.newest().order + 1;
        self.versions.push(Version { order, ..version });
        // Keeps the last writes, and the newest write of each byte.
        let mut at = self.versions.len();
        let mut covered: Bytes = 0;
        let mut kept = 0;
        self.versions.reverse();
        self.versions.retain(|version| {
            at -= 1;
            let needed = kept < HISTORY || version.bytes & !covered != 0;
            covered |= version.bytes;
            kept += 1;
            needed
        });
        self.versions.reverse();
        let versions = &self.versions;
        self.floors
            .retain(|it| versions.iter().any(|version| version.order == it.seen));
    }

    /// Remembers the write whose value a lane has read.
    pub(super) fn add_floor(&mut self, read: Read) {
        let known = self.floors.iter().any(|it| {
            (it.block, it.warp, it.seen) == (read.block, read.warp, read.seen)
                && (it.kind, it.bytes) == (read.kind, read.bytes)
                && it.lanes & read.lanes != 0
        });
        if !known {
            self.floors.push(read);
        }
    }

    /// Adds a read by a lane.
    pub(super) fn add_read(&mut self, read: Read) {
        let (mut merged, mut emptied) = (false, false);
        for it in &mut self.reads {
            if (it.block, it.warp, it.kind) != (read.block, read.warp, read.kind)
                || it.bytes & !read.bytes != 0
            {
                continue;
            }
            if (it.time, it.pc, it.bytes) == (read.time, read.pc, read.bytes) {
                it.lanes |= read.lanes;
                merged = true;
            } else {
                it.lanes &= !read.lanes;
                emptied |= it.lanes == 0;
            }
        }
        if emptied {
            self.reads.retain(|it| it.lanes != 0);
        }
        if !merged {
            self.reads.push(read);
        }
    }
}

type Page = Box<[Option<Box<Cell>>; PAGE]>;

/// The cells of memory that kernels have accessed.
#[derive(Debug, Default)]
pub(crate) struct Cells {
    pages: Vec<Page>,
    /// Index of each page, by memory and number.
    indices: HashMap<(u64, u64), usize>,
    /// The page of the last access.
    last: Option<((u64, u64), usize)>,
}

impl Cells {
    pub(super) fn cell(&mut self, place: Place) -> &mut Cell {
        let number = place.offset / CELL;
        let page = (place.memory, number / PAGE as u64);
        let index = match self.last {
            Some((last, index)) if last == page => index,
            _ => self.page(page),
        };
        let cells = &mut self.pages[index];
        cells[number as usize % PAGE].get_or_insert_with(|| Box::new(Cell::new()))
    }

    fn page(&mut self, page: (u64, u64)) -> usize {
        let index = *self.indices.entry(page).or_insert_with(|| {
            self.pages.push(Box::new([const { None }; PAGE]));
            self.pages.len() - 1
        });
        self.last = Some((page, index));
        index
    }

    /// Returns the number of pages.
    pub(super) fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Removes the cells whose accesses all satisfy a condition, unless a stream has written them.
    pub(super) fn forget(&mut self, is_old: impl Fn(u32) -> bool) {
        let is_old = |cell: &Cell| {
            cell.versions
                .iter()
                .all(|it| is_old(it.writer.thread.block) && !it.is_by_stream())
                && cell.reads.iter().all(|it| is_old(it.block))
        };
        let mut pages: Vec<_> = core::mem::take(&mut self.pages)
            .into_iter()
            .map(Some)
            .collect();
        self.last = None;
        self.indices.retain(|_, index| {
            let Some(mut page) = pages[*index].take() else {
                return false;
            };
            for slot in page.iter_mut() {
                slot.take_if(|cell| is_old(cell));
            }
            if page.iter().all(Option::is_none) {
                return false;
            }
            *index = self.pages.len();
            self.pages.push(page);
            true
        });
    }
}
