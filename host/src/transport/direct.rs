//! Memory of a peer on the same host, mapped and accessed without its help.
//!
//! What a drop of the peer's memory means here: its pages are those of a memory file that lives
//! while it is mapped here, so a copy that is under way lands in pages that the peer has given up,
//! never in freed memory of its. The header's `closed` word is looked at before and after.
//! Processes that can map each other's memory run under one user and could do each other any harm
//! with a debugger too; what is checked here guards against mistakes.

use core::sync::atomic::Ordering;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::inbox::DoorbellHandle;
use super::key::{RemoteBuffer, RemoteKey};
use super::memory::{DATA_OFFSET, Header, StorageRange};
use crate::Result;
use crate::cpu::{Segment, SegmentDescriptor};

/// Most segments of a peer that stay mapped.
const MAX_MAPPED: usize = 256;

/// The way to a peer's memory and its bell.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) bell: DoorbellHandle,
    /// Only memory of this process is mapped.
    pid: u32,
    mapped: Mutex<HashMap<u64, Arc<Segment>>>,
}

impl Direct {
    pub(super) fn new(bell: &SegmentDescriptor) -> Result<Self> {
        Ok(Self {
            bell: DoorbellHandle::open(bell)?,
            pid: bell.pid,
            mapped: Mutex::default(),
        })
    }

    /// Copies to the peer; `false` when the memory cannot be reached this way, and the owner has to
    /// be asked.
    pub(super) fn write(&self, source: &StorageRange, remote: &RemoteBuffer) -> bool {
        self.access(remote, source.len, |target| {
            // SAFETY: the view and the checked range of the mapping are both valid; they may be the
            // same memory, which `copy_to` allows.
            unsafe { source.start().copy_to(target, source.len) };
        })
    }

    /// Copies from the peer; `false` as for [`Direct::write`].
    pub(super) fn read(&self, target: &StorageRange, remote: &RemoteBuffer) -> bool {
        self.access(remote, target.len, |source| {
            // SAFETY: as in `write`.
            unsafe { target.start().copy_from(source, target.len) };
        })
    }

    fn access(&self, remote: &RemoteBuffer, len: usize, copy: impl FnOnce(*mut u8)) -> bool {
        let Some(segment) = self.segment(&remote.key) else {
            return false;
        };
        let header = Header::of(&segment);
        let capacity = segment.bytes() - DATA_OFFSET as u64;
        let bytes = header.bytes.load(Ordering::Relaxed).min(capacity);
        let inside = remote
            .offset
            .checked_add(len as u64)
            .is_some_and(|end| end <= bytes);
        if !inside {
            return false;
        }
        // SAFETY: header and range are inside of the mapping, whose size the system vouched for.
        copy(unsafe { segment.ptr().add(DATA_OFFSET + remote.offset as usize) });
        let open = header.closed.load(Ordering::SeqCst) == 0;
        if !open {
            self.forget_closed();
        }
        open
    }

    /// The mapped segment of a key, when it is one of this peer's and still registered.
    fn segment(&self, key: &RemoteKey) -> Option<Arc<Segment>> {
        let descriptor = key.segment.as_ref()?;
        if descriptor.pid != self.pid || descriptor.bytes < DATA_OFFSET as u64 {
            return None;
        }
        let known = self.lock().get(&key.id).cloned();
        if let Some(segment) = known {
            if is_open(&segment, key) {
                return Some(segment);
            }
            self.forget_closed();
            return None;
        }
        let segment = Segment::open(descriptor, 0).ok()?;
        if segment.bytes() < DATA_OFFSET as u64 || !is_open(&segment, key) {
            return None;
        }
        self.forget_closed();
        let mut mapped = self.lock();
        if mapped.len() < MAX_MAPPED {
            mapped.insert(key.id, Arc::clone(&segment));
        }
        Some(segment)
    }

    /// Unmaps what its owner has dropped.
    fn forget_closed(&self) {
        self.lock()
            .retain(|_, segment| Header::of(segment).closed.load(Ordering::Acquire) == 0);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<Segment>>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_open(segment: &Segment, key: &RemoteKey) -> bool {
    let header = Header::of(segment);
    header.magic.load(Ordering::Acquire) == Header::MAGIC
        && header.id.load(Ordering::Relaxed) == key.id
        && header.closed.load(Ordering::SeqCst) == 0
}
