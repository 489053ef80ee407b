//! Windows of a communicator: symmetric memory, and the lookup from an address to its place.

use core::cell::UnsafeCell;
use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fusewire_device::comm::Place;
use fusewire_device::layout::{MAX_WINDOWS, WindowConst};

use crate::cpu::Segment;

/// The device's table of windows and the host's index of this rank's parts.
pub(crate) struct Windows {
    table: Box<[UnsafeCell<WindowConst>]>,
    /// Start and end address of this rank's part of each window; 0 where there is none.
    index: Box<[(AtomicUsize, AtomicUsize)]>,
    used: AtomicUsize,
    /// Every rank's part, mapped as long as the communicator lives.
    parts: Mutex<Vec<Vec<Arc<Segment>>>>,
}

// SAFETY: an entry of the table is written once, under the lock, before its id is published; from then
// on it is only read.
unsafe impl Sync for Windows {}

impl fmt::Debug for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Windows")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

impl Windows {
    /// A table without windows.
    pub(crate) fn new() -> Self {
        Self {
            table: (0..MAX_WINDOWS)
                .map(|_| UnsafeCell::new(bytemuck::Zeroable::zeroed()))
                .collect(),
            index: (0..MAX_WINDOWS).map(|_| Default::default()).collect(),
            used: AtomicUsize::new(0),
            parts: Mutex::default(),
        }
    }

    /// Address of the device's table.
    pub(crate) fn table(&self) -> u64 {
        self.table.as_ptr() as u64
    }

    /// Number of windows so far; their ids are never used twice.
    pub(crate) fn count(&self) -> usize {
        self.used.load(Ordering::Acquire)
    }

    /// Adds a window of which rank r contributes `parts[r]`; gives its id. The caller has agreed on
    /// it with all ranks, so that the id is the same everywhere, and the table has room.
    pub(crate) fn add(&self, rank: u32, parts: Vec<Arc<Segment>>) -> usize {
        let mut all = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let id = self.used.load(Ordering::Acquire);
        let own = &parts[rank as usize];
        let entry = self.table[id].get();
        for (peer, part) in parts.iter().enumerate() {
            // SAFETY: an entry of this table; kernels look at it only after its id was published.
            unsafe { (&raw mut (*entry).peers[peer]).write(part.ptr() as u64) };
        }
        // SAFETY: as above.
        unsafe { (&raw mut (*entry).bytes).write(own.bytes()) };
        let start = own.ptr() as usize;
        self.index[id].0.store(start, Ordering::Relaxed);
        self.index[id]
            .1
            .store(start + own.bytes() as usize, Ordering::Relaxed);
        self.used.store(id + 1, Ordering::Release);
        all.push(parts);
        id
    }

    /// The place of `bytes` bytes at `at` in a window, or [`Place::NONE`].
    #[inline]
    pub(crate) fn place(&self, at: *const u8, bytes: usize) -> Place {
        let at = at as usize;
        for id in (0..self.used.load(Ordering::Acquire)).rev() {
            let start = self.index[id].0.load(Ordering::Relaxed);
            let end = self.index[id].1.load(Ordering::Relaxed);
            if at >= start && at < end && bytes <= end - at {
                return Place::new(id as u32, (at - start) as u64);
            }
        }
        Place::NONE
    }
}
