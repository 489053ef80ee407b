//! Registered memory, which a peer may access, and views of registered memory, which this side
//! passes to its writes and reads.

use core::cell::UnsafeCell;
use core::fmt;
use core::mem;
use core::ops::{Bound, RangeBounds};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::Instant;

use super::key::RemoteKey;
use super::url::fill_random;
use super::verbs::{Context, MemoryRegion, Registrable};
use super::wire::{Refusal, RemoteRegion};
use crate::{Error, Result};
use fusewire_driver::Segment;

/// Offset of the data in a segment of [`Memory::allocate`]. The [`Header`] occupies the first page.
pub(super) const DATA_OFFSET: usize = 4096;

/// Time in which the peers must confirm that they no longer access a memory that was dropped.
const REVOCATION: Duration = Duration::from_secs(1);

/// Header of a segment of [`Memory::allocate`].
#[repr(C)]
#[derive(Debug)]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    pub(super) id: AtomicU64,
    pub(super) bytes: AtomicU64,
    /// Non-zero after the memory is deregistered.
    pub(super) closed: AtomicU32,
}

impl Header {
    pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"FWMEMSEG");

    /// Returns the header of a segment of at least [`DATA_OFFSET`] bytes.
    pub(super) fn of(segment: &Segment) -> &Self {
        assert!(segment.bytes() >= DATA_OFFSET as u64);
        // SAFETY: the segment is mapped while it is borrowed, page-aligned, and long enough
        // (asserted above). The memory was zeroed when it was allocated. Afterwards it is accessed
        // only atomically, and every bit pattern is valid for atomics.
        unsafe { &*segment.ptr().cast::<Self>() }
    }
}

/// Registered memory. A peer that has the [`RemoteKey`] may write and read the memory until the
/// last clone of this handle is dropped. Requests of the peer are refused afterwards, and no remote
/// access touches the memory after the drop has returned. One exception remains: with the
/// shared-memory provider, a copy that the peer began before the drop may still be in progress.
///
/// Peers may write while this side reads. After this side has waited for the notification of a
/// write, or after the write has completed on the peer, all bytes of the write have arrived. Bytes
/// that are read earlier may be torn.
#[derive(Clone, Debug)]
pub struct Memory {
    handle: Arc<Handle>,
    reused: bool,
}

/// Shared by all clones of a [`Memory`]. Dropping the handle ends the registration.
#[derive(Debug)]
struct Handle {
    grant: Arc<Grant>,
}

/// Permission for peers to access a [`Storage`].
#[derive(Debug)]
pub(super) struct Grant {
    id: u64,
    storage: Arc<Storage>,
    /// True as long as the memory is registered. Locked for reading during each copy that accesses
    /// the memory for a peer. The size of each copy is bounded.
    open: RwLock<bool>,
    exports: Mutex<Exports>,
}

/// Registrations with RDMA devices through which peers access a [`Storage`].
#[derive(Debug, Default)]
struct Exports {
    regions: Vec<MemoryRegion>,
    /// Links whose peers know the registrations.
    links: Vec<Weak<dyn Revoke>>,
}

/// Link whose peer accesses memory without a request to this process.
pub(super) trait Revoke: fmt::Debug + Send + Sync {
    /// Requests that the peer stops to access the memory of `key`.
    fn revoke(&self, key: u64);

    /// Waits until the peer has stopped to access the memory of `key`. If it has not stopped at
    /// `deadline`, destroys the link's queue pair, which ends the accesses.
    fn wait_for_revocation(&self, key: u64, deadline: Instant);
}

/// Bytes that stay allocated as long as a [`Memory`], a [`View`], a [`ViewMut`] or an operation
/// uses them.
pub(super) struct Storage {
    /// Registrations for requests of this process. Dropped before `keep`, because fields are
    /// dropped in the order of their declaration.
    regions: Mutex<Vec<MemoryRegion>>,
    start: *mut u8,
    len: usize,
    keep: Backing,
}

/// Owner of the bytes.
enum Backing {
    /// A buffer that this crate owns.
    Buffer { _buffer: Box<[UnsafeCell<u8>]> },
    /// Allocated by [`Memory::allocate`], with a [`Header`].
    Allocated(Arc<Segment>),
    /// A segment that the caller registered.
    Segment { _segment: Arc<Segment> },
    /// Owned by the caller of [`Memory::register_raw`].
    Raw,
    /// Memory of a GPU, owned by the caller of [`Memory::register_device`].
    Device { dma_buf: Option<DmaBuf> },
}

/// Memory of a device that the kernel can pass to another device.
#[derive(Debug)]
pub struct DmaBuf {
    /// Descriptor of the buffer.
    pub fd: OwnedFd,
    /// First byte of the memory in the buffer.
    pub offset: u64,
}

// SAFETY: the bytes at `start` may be accessed from any thread. They stay valid while the `Storage`
// lives, because it owns them or because the caller of `register_raw` guarantees it. All accesses
// are copies through the raw pointer.
unsafe impl Send for Storage {}
// SAFETY: a shared `Storage` permits the same accesses as an owned one: copies through the raw
// pointer.
unsafe impl Sync for Storage {}

impl Storage {
    fn new(start: *mut u8, len: usize, keep: Backing) -> Self {
        Self {
            regions: Mutex::default(),
            start,
            len,
            keep,
        }
    }

    fn is_on_device(&self) -> bool {
        matches!(self.keep, Backing::Device { .. })
    }

    /// Returns the memory for its registration with an RDMA device.
    fn registrable(&self) -> Registrable<'_> {
        Registrable {
            start: self.start,
            len: self.len,
            dma_buf: match &self.keep {
                Backing::Device {
                    dma_buf: Some(dma_buf),
                } => Some((dma_buf.fd.as_fd(), dma_buf.offset)),
                _ => None,
            },
        }
    }

    fn of_buffer(buffer: Box<[u8]>) -> Self {
        let raw = Box::into_raw(buffer);
        // SAFETY: `raw` comes from `Box::into_raw`, and `UnsafeCell<u8>` has the layout of `u8`.
        let buffer = unsafe { Box::from_raw(raw as *mut [UnsafeCell<u8>]) };
        let len = buffer.len();
        // The pointer is derived from the `UnsafeCell`s, so writes through it are allowed as long
        // as nothing else accesses the box.
        let start = buffer.as_ptr().cast_mut().cast();
        Self::new(start, len, Backing::Buffer { _buffer: buffer })
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// All registrations of this process.
#[derive(Default)]
struct Table {
    by_id: HashMap<u64, (Arc<Grant>, Weak<Handle>)>,
    /// Registrations of memory that [`Memory::allocate`] did not allocate. A key of this map has
    /// the start address, the length, and true if the range is a segment.
    by_range: HashMap<(usize, usize, bool), u64>,
}

fn table() -> MutexGuard<'static, Table> {
    static TABLE: OnceLock<Mutex<Table>> = OnceLock::new();
    // The table is consistent after every statement, so a poisoned lock is harmless.
    TABLE
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Allocates `bytes` zeroed bytes that peers on the same host can map. Peers that use the
    /// shared-memory provider then access the bytes without involving this process.
    ///
    /// # Errors
    /// [`Error::Memory`] or [`Error::InvalidArgument`] if the allocation fails.
    pub fn allocate(bytes: usize) -> Result<Self> {
        let total = bytes.checked_add(DATA_OFFSET).ok_or_else(|| {
            out_of_bounds("allocate", "the size exceeds the address space".into())
        })?;
        let segment = Segment::create(total as u64, "fusewire-transport")?;
        // SAFETY: the segment has `DATA_OFFSET + bytes` bytes, so the result is within the segment
        // or one past its end.
        let start = unsafe { segment.ptr().add(DATA_OFFSET) };
        Self::add(
            Storage::new(start, bytes, Backing::Allocated(segment)),
            None,
        )
    }

    /// Registers a buffer and takes ownership of it.
    ///
    /// # Errors
    /// [`Error::Call`] if the system has no random numbers.
    pub fn register(buffer: impl Into<Box<[u8]>>) -> Result<Self> {
        Self::add(Storage::of_buffer(buffer.into()), None)
    }

    /// Registers a whole segment. Registering the same segment again reuses the existing
    /// registration.
    ///
    /// # Errors
    /// [`Error::Call`] if the system has no random numbers.
    pub fn register_segment(segment: Arc<Segment>) -> Result<Self> {
        let start = segment.ptr();
        let len = segment.bytes() as usize;
        let keep = Backing::Segment { _segment: segment };
        Self::add(Storage::new(start, len, keep), Some(true))
    }

    /// Registers the `len` bytes at `start`. Registering the same range again reuses the existing
    /// registration.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a null pointer or an impossible length.
    ///
    /// # Safety
    /// The bytes must stay valid for reads and writes until all clones of the returned [`Memory`]
    /// and all its views are dropped, and all operations that use these views have completed. Until
    /// then, no Rust reference to the bytes may be used while a peer or an operation accesses the
    /// bytes.
    pub unsafe fn register_raw(start: *mut u8, len: usize) -> Result<Self> {
        if start.is_null() || isize::try_from(len).is_err() {
            return Err(out_of_bounds(
                "register_raw",
                format!("{len} bytes at {start:p} are not valid memory"),
            ));
        }
        let keep = Backing::Raw;
        Self::add(Storage::new(start, len, keep), Some(false))
    }

    /// Registers memory of a GPU, at its address on the GPU. Only RDMA devices access such memory:
    /// operations over TCP and shared memory return [`Error::InvalidArgument`] for views of it, and
    /// a peer's requests over TCP and shared memory are refused.
    ///
    /// `dma_buf` is the memory as a dma-buf, which the driver exports
    /// (`cuMemGetHandleForAddressRange`, `hsa_amd_portable_export_dmabuf`). Without it, the RDMA
    /// device needs a peer-memory module of the GPU's vendor, such as `nvidia-peermem`.
    ///
    /// Not executed on a GPU so far: tests check the calls of libibverbs only.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a null pointer or an impossible length.
    ///
    /// # Safety
    /// The bytes must stay allocated on the device until all clones of the returned [`Memory`] and
    /// all its views are dropped, and all operations that use these views have completed. `dma_buf`
    /// must refer to these bytes.
    pub unsafe fn register_device(
        start: *mut u8,
        len: usize,
        dma_buf: Option<DmaBuf>,
    ) -> Result<Self> {
        if start.is_null() || isize::try_from(len).is_err() {
            return Err(out_of_bounds(
                "register_device",
                format!("{len} bytes at {start:p} are not valid memory"),
            ));
        }
        let keep = Backing::Device { dma_buf };
        Self::add(Storage::new(start, len, keep), Some(false))
    }

    /// Adds a registration. If `shared` is `Some`, an existing registration of the same range is
    /// reused. The value in `shared` is true for a segment, and false for a range of
    /// `register_raw`.
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
            // `storage` is dropped after the lock is released, because it may hold the last
            // reference to a segment.
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
            exports: Mutex::default(),
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

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.storage().len
    }

    /// Returns true if the size is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.storage().start
    }

    /// Returns true if this handle reuses an existing registration.
    pub fn reused_registration(&self) -> bool {
        self.reused
    }

    /// Returns the key with which a peer accesses this memory.
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

    /// Returns a view of `range`, in bytes, for use as the source of a write.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range exceeds the memory.
    pub fn view(&self, range: impl RangeBounds<usize>) -> Result<View> {
        self.part("view", range).map(View)
    }

    /// Returns a view of `range`, in bytes, for use as the destination of a read.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the range exceeds the memory.
    pub fn view_mut(&self, range: impl RangeBounds<usize>) -> Result<ViewMut> {
        self.part("view_mut", range).map(ViewMut)
    }

    /// Copies `source` to the memory at byte `offset`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `source` does not fit.
    pub fn copy_from(&self, offset: usize, source: &[u8]) -> Result<()> {
        let end = offset.saturating_add(source.len());
        let part = self.host_part("copy_from", offset..end)?;
        // SAFETY: `part` checked the range against the storage, and the slice is valid for its
        // length. The two may overlap.
        unsafe { part.start().copy_from(source.as_ptr(), source.len()) };
        Ok(())
    }

    /// Copies from the memory at byte `offset` to `target`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if fewer bytes follow `offset` than `target` holds.
    pub fn copy_to(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let end = offset.saturating_add(target.len());
        let part = self.host_part("copy_to", offset..end)?;
        // SAFETY: `part` checked the range against the storage, and the slice is valid for its
        // length. The two may overlap.
        unsafe { part.start().copy_to(target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    fn storage(&self) -> &Arc<Storage> {
        &self.handle.grant.storage
    }

    /// Returns a range of memory that the CPU accesses.
    fn host_part(
        &self,
        operation: &'static str,
        range: impl RangeBounds<usize>,
    ) -> Result<StorageRange> {
        let part = self.part(operation, range)?;
        match part.is_on_device() {
            true => Err(on_device(operation)),
            false => Ok(part),
        }
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
                format!("the range exceeds the {} bytes of the memory", self.len()),
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
        // Taking the write lock waits for accesses of peers that are in progress, each of which is
        // one bounded copy, and for a registration of the memory for a peer.
        *grant.open.write().unwrap_or_else(PoisonError::into_inner) = false;
        let exports = mem::take(&mut *lock(&grant.exports));
        let links: Vec<_> = exports.links.iter().filter_map(Weak::upgrade).collect();
        links.iter().for_each(|link| link.revoke(grant.id));
        let deadline = Instant::now() + REVOCATION;
        let wait = |link: &Arc<dyn Revoke>| link.wait_for_revocation(grant.id, deadline);
        links.iter().for_each(wait);
        drop(exports.regions);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is consistent after every statement, so a poisoned lock is harmless.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers the memory of `key` with the device of `context`, so that the peer of `link` accesses
/// it without requests to this process.
///
/// Three rules hold: the owner registers the memory while `open` is true and locked; the peer
/// accesses it after it has received the registration, until it confirms the revocation; the owner
/// ends the registration after it has set `open` to false, and after the peer has confirmed or the
/// queue pair of its link has been destroyed.
pub(super) fn export(
    key: u64,
    context: &Arc<Context>,
    link: Weak<dyn Revoke>,
) -> Result<RemoteRegion, Refusal> {
    let grant = match table().by_id.get(&key) {
        Some((grant, _)) => Arc::clone(grant),
        None => return Err(Refusal::Key),
    };
    let open = grant.open.read().unwrap_or_else(PoisonError::into_inner);
    if !*open {
        return Err(Refusal::Key);
    }
    let mut exports = lock(&grant.exports);
    let (start, len) = (grant.storage.start, grant.storage.len);
    let known = exports.regions.iter().find(|region| region.is_of(context));
    let remote_key = match known {
        Some(region) => region.remote_key(),
        // Devices cannot register memory of 0 bytes, and ignore the key of a request for 0 bytes.
        None if len == 0 => 0,
        None => {
            // SAFETY: the grant owns the storage, whose bytes are valid while it lives. The region
            // is dropped before the grant, because the grant owns it.
            let region = unsafe { MemoryRegion::remote(context, &grant.storage.registrable()) };
            let region = region.map_err(|error| {
                tracing::warn!(%error, "memory cannot be registered for a peer");
                Refusal::Registration
            })?;
            let key = region.remote_key();
            exports.regions.push(region);
            key
        }
    };
    exports.links.retain(|known| known.strong_count() > 0);
    if !exports.links.iter().any(|known| known.ptr_eq(&link)) {
        exports.links.push(link);
    }
    Ok(RemoteRegion {
        address: start as u64,
        key: remote_key,
        len: len as u64,
    })
}

/// Range of a [`Grant`] that a peer may access until the memory is deregistered.
#[derive(Debug)]
pub(super) struct Target {
    grant: Arc<Grant>,
    offset: usize,
    len: usize,
}

impl Target {
    /// Looks up the memory and the range of a peer's request.
    pub(super) fn find(id: u64, offset: u64, len: u64) -> Result<Self, Refusal> {
        let grant = match table().by_id.get(&id) {
            Some((grant, _)) => Arc::clone(grant),
            None => return Err(Refusal::Key),
        };
        if grant.storage.is_on_device() {
            return Err(Refusal::Device);
        }
        let end = offset.checked_add(len).ok_or(Refusal::Range)?;
        if end > grant.storage.len as u64 {
            return Err(Refusal::Range);
        }
        // Offset and length are at most the length of the memory, so they fit `usize`.
        let (offset, len) = (offset as usize, len as usize);
        Ok(Self { grant, offset, len })
    }

    /// Calls `access` with the address and length of the bytes that start at `from`. Returns `None`
    /// if the memory was deregistered. Deregistration waits for `access` to return, so `access`
    /// must be short.
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
        // SAFETY: `offset + len` was checked against the storage, and `from` against `len` above.
        let start = unsafe { self.grant.storage.start.add(self.offset + from) };
        open.then(|| access(start, self.len - from))
    }
}

/// Range of a [`Storage`], which keeps the storage allocated.
#[derive(Clone, Debug)]
pub(super) struct StorageRange {
    storage: Arc<Storage>,
    offset: usize,
    pub(super) len: usize,
}

/// Length of a word in bytes.
pub(super) const WORD_BYTES: usize = 8;

/// Stores a word by one release store, so that a thread that loads the word also sees all earlier
/// writes of this thread. Returns false if `target` is not aligned.
///
/// # Safety
/// `target` must be valid for writes of 8 bytes. Other threads may access the word only atomically
/// during the call.
pub(super) unsafe fn store_word(target: *mut u8, word: [u8; WORD_BYTES]) -> bool {
    let target = target.cast::<u64>();
    if target.is_aligned() {
        // SAFETY: the caller guarantees the validity, and the alignment was checked.
        unsafe { AtomicU64::from_ptr(target) }.store(u64::from_ne_bytes(word), Ordering::Release);
    }
    target.is_aligned()
}

impl StorageRange {
    /// Returns new memory that holds a word.
    pub(super) fn of_word(word: u64) -> Self {
        let storage = Storage::of_buffer(Box::new(word.to_ne_bytes()));
        Self {
            storage: Arc::new(storage),
            offset: 0,
            len: WORD_BYTES,
        }
    }

    /// Returns the address of the first byte.
    pub(super) fn start(&self) -> *mut u8 {
        // SAFETY: the offset was checked against the storage when the range was created.
        unsafe { self.storage.start.add(self.offset) }
    }

    /// Returns true if only RDMA devices access the memory.
    pub(super) fn is_on_device(&self) -> bool {
        self.storage.is_on_device()
    }

    /// Returns the key of the memory for requests of this process on the device of `context`.
    /// Registers the memory if necessary.
    pub(super) fn local_key(&self, context: &Arc<Context>) -> Result<u32> {
        let storage = &self.storage;
        let mut regions = lock(&storage.regions);
        if let Some(region) = regions.iter().find(|region| region.is_of(context)) {
            return Ok(region.local_key());
        }
        // SAFETY: the storage keeps its bytes valid, and drops the region first.
        let region = unsafe { MemoryRegion::local(context, &storage.registrable()) }?;
        let key = region.local_key();
        regions.push(region);
        Ok(key)
    }

    /// Returns the address and length of the bytes that start at `from`.
    pub(super) fn rest(&self, from: usize) -> (*mut u8, usize) {
        assert!(from <= self.len);
        // SAFETY: `from` is at most the length of the range, asserted above.
        (unsafe { self.start().add(from) }, self.len - from)
    }
}

/// Range of a [`Memory`] that is the source of a write. A `View` keeps the memory allocated, but
/// not registered.
#[derive(Clone, Debug)]
pub struct View(pub(super) StorageRange);

impl View {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.0.start()
    }
}

/// Range of a [`Memory`] that is the destination of a read. A `ViewMut` keeps the memory allocated,
/// but not registered.
#[derive(Clone, Debug)]
pub struct ViewMut(pub(super) StorageRange);

impl ViewMut {
    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns the address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.start()
    }
}

fn out_of_bounds(operation: &'static str, detail: String) -> Error {
    Error::InvalidArgument { operation, detail }
}

/// Returns the error of an operation for which the CPU would have to access memory of a device.
pub(super) fn on_device(operation: &'static str) -> Error {
    Error::InvalidArgument {
        operation,
        detail:
            "the memory is on a GPU, so the CPU cannot copy it; use the provider Verbs, or copy \
                 it to host memory first"
                .to_owned(),
    }
}
