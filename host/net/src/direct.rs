//! Direct access to the mapped memory of a peer on the same host.
//!
//! The peer's pages belong to a memory file, which exists as long as this process maps it. If the
//! peer drops its memory during a copy, the copy accesses pages that the peer has released, never
//! memory that the peer uses for another purpose. The `closed` word in the header of the memory is
//! checked before and after each copy. The checks only detect mistakes. They are no protection,
//! because processes that can map each other's memory run as the same user, and could also access
//! each other through a debugger.

use core::sync::atomic::Ordering;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::inbox::DoorbellHandle;
use super::key::{RemoteBuffer, RemoteKey};
use super::memory::{DATA_OFFSET, Header, StorageRange, WORD_BYTES, store_word};
use crate::Result;
use fusewire_driver::{Segment, SegmentDescriptor};

/// Maximum number of a peer's segments that stay mapped at the same time.
const MAX_MAPPED: usize = 256;

/// Access to a peer's memory and doorbell.
#[derive(Debug)]
pub(super) struct Direct {
    pub(super) bell: DoorbellHandle,
    /// The peer's process id. Memory whose key names another process is not mapped.
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

    /// Copies to the peer. Returns false if the memory cannot be accessed directly. The caller must
    /// then send the request to the owner of the memory.
    pub(super) fn write(&self, source: &StorageRange, remote: &RemoteBuffer) -> bool {
        self.access(remote, source.len, |target| {
            // SAFETY: `source` and the range of the mapping at `target`, which `access` has
            // checked, are valid for `source.len` bytes. The two ranges may overlap, which
            // `copy_to` allows.
            unsafe { source.start().copy_to(target, source.len) };
        })
    }

    /// Stores the word in `source` to the peer's memory. Returns false in the same cases as
    /// [`Direct::write`], and if the target is not aligned.
    pub(super) fn store(&self, source: &StorageRange, remote: &RemoteBuffer) -> bool {
        let mut word = [0; WORD_BYTES];
        assert_eq!(source.len, WORD_BYTES);
        // SAFETY: `source` is valid for its 8 bytes.
        unsafe { source.start().copy_to(word.as_mut_ptr(), WORD_BYTES) };
        let mut is_aligned = false;
        let is_open = self.access(remote, WORD_BYTES, |target| {
            // SAFETY: `access` has checked that the range of the mapping at `target` is valid. The
            // owner of the memory accesses it concurrently only by copies and atomically.
            is_aligned = unsafe { store_word(target, word) };
        });
        is_open && is_aligned
    }

    /// Copies from the peer. Returns false in the same cases as [`Direct::write`].
    pub(super) fn read(&self, target: &StorageRange, remote: &RemoteBuffer) -> bool {
        self.access(remote, target.len, |source| {
            // SAFETY: `target` and the range of the mapping at `source`, which `access` has
            // checked, are valid for `target.len` bytes. The two ranges may overlap, which
            // `copy_from` allows.
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
        // SAFETY: the range lies within the mapping: its end is at most `bytes`, and `DATA_OFFSET +
        // bytes` is at most `segment.bytes()`, the size of the file.
        copy(unsafe { segment.ptr().add(DATA_OFFSET + remote.offset as usize) });
        let open = header.closed.load(Ordering::SeqCst) == 0;
        if !open {
            self.forget_closed();
        }
        open
    }

    /// Returns the mapped segment of a key, if the key is valid, belongs to this peer, and is still
    /// registered.
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

    /// Unmaps the segments whose owner has dropped them.
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
