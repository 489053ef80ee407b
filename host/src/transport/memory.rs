//! Registered memory: what a peer may write and read, and what local operations take views of.

use core::cell::UnsafeCell;
use core::fmt;
use core::ops::{Bound, RangeBounds};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};

use super::key::RemoteKey;
use super::url::fill_random;
use super::wire::Refusal;
use crate::cpu::Segment;
use crate::{Error, Result};

/// Where the bytes of [`Memory::allocate`] start in their segment: behind the header's page.
pub(super) const DATA_OFFSET: usize = 4096;

/// First bytes of a segment of [`Memory::allocate`].
#[repr(C)]
#[derive(Debug)]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) id: AtomicU64,
    pub(super) bytes: AtomicU64,
    /// Not 0 once the memory is deregistered.
    pub(super) closed: AtomicU32,
}

impl Header {
    pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"FWMEMSEG");

    /// The header at the start of a segment of at least [`DATA_OFFSET`] bytes.
    pub(super) fn of(segment: &Segment) -> &Self {
        assert!(segment.bytes() >= DATA_OFFSET as u64);
        // SAFETY: the segment is mapped while it is borrowed, page aligned and long enough
        // (asserted above); it is zeroed or written by peers through atomics only, and every bit
        // pattern is valid for atomics.
        unsafe { &*segment.ptr().cast::<Self>() }
    }
}

/// Registered memory: a peer that has its [`RemoteKey`] may write and read it until the last clone
/// of this handle is dropped. From then on the peer is refused; no remote access touches the
/// memory after the drop has returned.
///
/// Peers write while this side reads: all bytes have arrived once the peer's
/// notification was waited for or its write has ended; what is read earlier may be torn.
#[derive(Clone, Debug)]
pub struct Memory {
    handle: Arc<Handle>,
    reused: bool,
}

/// Dropped with the last clone of a memory, and ends the registration.
#[derive(Debug)]
struct Handle {
    grant: Arc<Grant>,
}

/// The right of peers to access a storage.
#[derive(Debug)]
pub(super) struct Grant {
    id: u64,
    storage: Arc<Storage>,
    /// Held for reading during each access of a peer, which is one bounded copy.
    open: RwLock<bool>,
}

/// The bytes, which live as long as a memory, a view or an operation of them.
pub(super) struct Storage {
    start: *mut u8,
    len: usize,
    keep: Backing,
}

/// What keeps the bytes.
enum Backing {
    /// Held only to be dropped.
    Buffer { _buffer: Box<[UnsafeCell<u8>]> },
    /// Made by [`Memory::allocate`], with a [`Header`].
    Allocated(Arc<Segment>),
    /// A segment of somebody's.
    Segment { _segment: Arc<Segment> },
    /// Nobody: the caller of [`Memory::register_raw`] promised.
    Raw,
}

// SAFETY: a storage gives out a raw pointer to bytes that stay valid while it lives (or as its
// registrar promised); copies go through that pointer only.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Everything that is registered in this process.
#[derive(Default)]
struct Table {
    by_id: HashMap<u64, (Arc<Grant>, Weak<Handle>)>,
    /// Foreign memory by start, length and whether a segment is kept for it.
    by_range: HashMap<(usize, usize, bool), u64>,
}

fn table() -> MutexGuard<'static, Table> {
    static TABLE: OnceLock<Mutex<Table>> = OnceLock::new();
    // Valid after every statement.
    TABLE
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Zeroed memory of `bytes` bytes that peers of the same host can map, so that the
    /// shared-memory provider writes it without the help of this process.
    ///
    /// # Errors
    /// [`Error::MemoryMap`] or [`Error::InvalidArgument`] when it cannot be made.
    pub fn allocate(bytes: usize) -> Result<Self> {
        let total = bytes
            .checked_add(DATA_OFFSET)
            .ok_or_else(|| out_of_bounds("allocate", "more bytes than can be mapped".into()))?;
        let segment = Segment::create(total as u64, "fusewire-transport")?;
        // SAFETY: the segment is longer than the header's page.
        let start = unsafe { segment.ptr().add(DATA_OFFSET) };
        Self::add(
            Storage {
                start,
                len: bytes,
                keep: Backing::Allocated(segment),
            },
            None,
        )
    }

    /// Registers a buffer, which this memory owns from now on.
    ///
    /// # Errors
    /// [`Error::Transport`] when the system has no random numbers.
    pub fn register(buffer: impl Into<Box<[u8]>>) -> Result<Self> {
        let raw = Box::into_raw(buffer.into());
        // SAFETY: `UnsafeCell<u8>` has the layout of `u8`, and the pointer was just made of a box.
        let buffer = unsafe { Box::from_raw(raw as *mut [UnsafeCell<u8>]) };
        let len = buffer.len();
        // Through the cells, so that writes are allowed while the box is only kept.
        let start = buffer.as_ptr().cast_mut().cast();
        let keep = Backing::Buffer { _buffer: buffer };
        Self::add(Storage { start, len, keep }, None)
    }

    /// Registers a whole segment. The same segment registered twice gives the same registration.
    ///
    /// # Errors
    /// [`Error::Transport`] when the system has no random numbers.
    pub fn register_segment(segment: Arc<Segment>) -> Result<Self> {
        let start = segment.ptr();
        let len = segment.bytes() as usize;
        let keep = Backing::Segment { _segment: segment };
        Self::add(Storage { start, len, keep }, Some(true))
    }

    /// Registers `len` bytes from `start` on. The same range registered twice gives the same
    /// registration.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a null pointer or an impossible length.
    ///
    /// # Safety
    /// The bytes must stay valid for reads and writes, and no Rust reference to them may be used
    /// while a peer or an operation accesses them, until the last of these is gone: clones of the
    /// returned memory, views of it, and operations with such views.
    pub unsafe fn register_raw(start: *mut u8, len: usize) -> Result<Self> {
        if start.is_null() || isize::try_from(len).is_err() {
            return Err(out_of_bounds(
                "register_raw",
                format!("{len} bytes at {start:p} are no memory"),
            ));
        }
        let keep = Backing::Raw;
        Self::add(Storage { start, len, keep }, Some(false))
    }

    /// Adds a registration; `shared` is set if the range may be registered already, and then says
    /// whether a segment is kept.
    fn add(storage: Storage, shared: Option<bool>) -> Result<Self> {
        let range = shared
            .filter(|_| storage.len > 0)
            .map(|segment| (storage.start as usize, storage.len, segment));
        let mut table = table();
        let known = range
            .and_then(|range| table.by_range.get(&range))
            .and_then(|id| table.by_id.get(id))
            .and_then(|(_, handle)| handle.upgrade());
        if let Some(handle) = known {
            // Outside of the lock, because it may hold the last reference of a segment.
            drop(table);
            drop(storage);
            return Ok(Self {
                handle,
                reused: true,
            });
        }
        let id = loop {
            let mut bytes = [0; 8];
            fill_random(&mut bytes)?;
            let id = u64::from_le_bytes(bytes);
            if id != 0 && !table.by_id.contains_key(&id) {
                break id;
            }
        };
        if let Backing::Allocated(segment) = &storage.keep {
            let header = Header::of(segment);
            header.id.store(id, Ordering::Relaxed);
            header.bytes.store(storage.len as u64, Ordering::Relaxed);
            header.magic.store(Header::MAGIC, Ordering::Release);
        }
        let grant = Arc::new(Grant {
            id,
            storage: Arc::new(storage),
            open: RwLock::new(true),
        });
        let handle = Arc::new(Handle {
            grant: Arc::clone(&grant),
        });
        table.by_id.insert(id, (grant, Arc::downgrade(&handle)));
        if let Some(range) = range {
            table.by_range.insert(range, id);
        }
        Ok(Self {
            handle,
            reused: false,
        })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.storage().len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.storage().start
    }

    /// Whether this registration existed already when this handle was made.
    pub fn reused_registration(&self) -> bool {
        self.reused
    }

    /// What a peer needs to access this memory.
    pub fn remote_key(&self) -> RemoteKey {
        RemoteKey {
            id: self.handle.grant.id,
            bytes: self.len() as u64,
            segment: match &self.storage().keep {
                Backing::Allocated(segment) => Some(segment.descriptor()),
                _ => None,
            },
        }
    }

    /// A part of the memory, in bytes, as the source of a write.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the range is not inside of the memory.
    pub fn view(&self, range: impl RangeBounds<usize>) -> Result<View> {
        self.part("view", range).map(View)
    }

    /// A part of the memory, in bytes, as the target of a read.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the range is not inside of the memory.
    pub fn view_mut(&self, range: impl RangeBounds<usize>) -> Result<ViewMut> {
        self.part("view_mut", range).map(ViewMut)
    }

    /// Copies `source` to byte `offset`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it does not fit.
    pub fn copy_from(&self, offset: usize, source: &[u8]) -> Result<()> {
        let end = offset.saturating_add(source.len());
        let part = self.part("copy_from", offset..end)?;
        // SAFETY: the part is inside of the storage, and a borrowed slice is elsewhere.
        unsafe { part.start().copy_from(source.as_ptr(), source.len()) };
        Ok(())
    }

    /// Copies from byte `offset` on to `target`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there are fewer bytes.
    pub fn copy_to(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(target.len());
        let part = self.part("copy_to", offset..end)?;
        // SAFETY: the part is inside of the storage, and a borrowed slice is elsewhere.
        unsafe { part.start().copy_to(target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    fn storage(&self) -> &Arc<Storage> {
        &self.handle.grant.storage
    }

    fn part(
        &self,
        operation: &'static str,
        range: impl RangeBounds<usize>,
    ) -> Result<StorageRange> {
        let from = match range.start_bound() {
            Bound::Included(from) => Some(*from),
            Bound::Excluded(before) => before.checked_add(1),
            Bound::Unbounded => Some(0),
        };
        let to = match range.end_bound() {
            Bound::Included(last) => last.checked_add(1),
            Bound::Excluded(to) => Some(*to),
            Bound::Unbounded => Some(self.len()),
        };
        match (from, to) {
            (Some(from), Some(to)) if from <= to && to <= self.len() => Ok(StorageRange {
                storage: Arc::clone(self.storage()),
                offset: from,
                len: to - from,
            }),
            _ => Err(out_of_bounds(
                operation,
                format!("the range is not inside of the {} bytes", self.len()),
            )),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let grant = &self.grant;
        let mut table = table();
        table.by_id.remove(&grant.id);
        table.by_range.retain(|_, id| *id != grant.id);
        drop(table);
        if let Backing::Allocated(segment) = &grant.storage.keep {
            Header::of(segment).closed.store(1, Ordering::SeqCst);
        }
        // Waits for the one bounded copy that a peer's request may be in.
        *grant.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// The right to access one range, for as long as it is not deregistered.
#[derive(Debug)]
pub(super) struct Target {
    grant: Arc<Grant>,
    offset: usize,
    len: usize,
}

impl Target {
    /// Looks up what a peer asks for.
    pub(super) fn find(id: u64, offset: u64, len: u64) -> Result<Self, Refusal> {
        let grant = match table().by_id.get(&id) {
            Some((grant, _)) => Arc::clone(grant),
            None => return Err(Refusal::Key),
        };
        let end = offset.checked_add(len).ok_or(Refusal::Range)?;
        if end > grant.storage.len as u64 {
            return Err(Refusal::Range);
        }
        // Both are at most the length of the memory.
        let (offset, len) = (offset as usize, len as usize);
        Ok(Self { grant, offset, len })
    }

    /// Calls `access` with the bytes from `from` on; `None` when the memory has been deregistered.
    /// It is not deregistered during the call, so the call must be short.
    pub(super) fn access<R>(
        &self,
        from: usize,
        access: impl FnOnce(*mut u8, usize) -> R,
    ) -> Option<R> {
        assert!(from <= self.len);
        let open: RwLockReadGuard<'_, bool> = self
            .grant
            .open
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `offset + len` was checked against the storage, `from` against `len` above.
        let start = unsafe { self.grant.storage.start.add(self.offset + from) };
        open.then(|| access(start, self.len - from))
    }
}

/// A range of a storage.
#[derive(Clone, Debug)]
pub(super) struct StorageRange {
    storage: Arc<Storage>,
    offset: usize,
    pub(super) len: usize,
}

impl StorageRange {
    /// First byte.
    pub(super) fn start(&self) -> *mut u8 {
        // SAFETY: the offset is inside of the storage, checked where the part was made.
        unsafe { self.storage.start.add(self.offset) }
    }

    /// The bytes from `from` on.
    pub(super) fn rest(&self, from: usize) -> (*mut u8, usize) {
        assert!(from <= self.len);
        // SAFETY: inside of the part, asserted above.
        (unsafe { self.start().add(from) }, self.len - from)
    }
}

/// A part of a [`Memory`] that a write takes its bytes from. Keeps the memory, not its
/// registration.
#[derive(Clone, Debug)]
pub struct View(pub(super) StorageRange);

impl View {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// First byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.start()
    }
}

/// A part of a [`Memory`] that a read puts its bytes into. Keeps the memory, not its registration.
#[derive(Clone, Debug)]
pub struct ViewMut(pub(super) StorageRange);

impl ViewMut {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// First byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start()
    }
}

fn out_of_bounds(operation: &'static str, detail: String) -> Error {
    Error::InvalidArgument { operation, detail }
}
