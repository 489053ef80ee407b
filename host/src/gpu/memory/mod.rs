//! Device memory that ranks share.

mod descriptor;
mod wire;

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

pub(crate) use self::descriptor::MemoryDescriptor;
use self::descriptor::own_process;
pub(crate) use self::wire::Offer;
use self::wire::Wire;
use super::device::Gpu;
use super::driver::{Export, MemoryKind, Origin, RawMemory};
use super::share::PublishedDescriptor;
use super::stream;
use crate::{Error, Result};

/// Device memory. Dropping the value frees the memory, unless the memory is foreign or was exported
/// by IPC.
pub(crate) struct Memory {
    gpu: Arc<Gpu>,
    raw: RawMemory,
    bytes: u64,
    /// Key of this value in the table of [`pieces`], or 0 if `_whole` is set. A value with a
    /// `_whole` is not in the table.
    id: u64,
    /// True if dropping this value does not free the memory, because the memory was adopted or
    /// belongs to `_whole`.
    foreign: bool,
    /// The imported mapping that contains this memory, if this memory does not start at the start
    /// of the mapping.
    _whole: Option<Arc<Self>>,
    published: Mutex<Option<(Wire, Option<PublishedDescriptor>)>>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("address", &self.raw.address)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

type Pieces = HashMap<u64, Weak<Memory>>;

/// Returns the table of this process's [`Memory`] values, keyed by `Memory::id`. Ranks that are
/// threads of the same process find each other's memory in this table and need no second mapping.
fn pieces() -> MutexGuard<'static, Pieces> {
    static PIECES: OnceLock<Mutex<Pieces>> = OnceLock::new();
    PIECES
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Allocates `bytes` zeroed bytes that peers can map.
    pub(crate) fn create(gpu: &Arc<Gpu>, bytes: u64) -> Result<Arc<Self>> {
        gpu.sweep();
        let raw = gpu.driver().allocate(bytes.max(1), MemoryKind::Shared)?;
        Ok(Self::register(gpu, raw, bytes, false))
    }

    /// Wraps memory that other code allocated. The memory must outlive the returned value.
    pub(crate) fn adopt(gpu: &Arc<Gpu>, address: u64, bytes: u64) -> Arc<Self> {
        Self::register(gpu, RawMemory::at_address(address, bytes), bytes, true)
    }

    fn register(gpu: &Arc<Gpu>, raw: RawMemory, bytes: u64, foreign: bool) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let memory = Arc::new(Self {
            gpu: Arc::clone(gpu),
            raw,
            bytes,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            foreign,
            _whole: None,
            published: Mutex::default(),
        });
        pieces().insert(memory.id, Arc::downgrade(&memory));
        memory
    }

    /// Maps the memory that `descriptor` describes. `rank` is the rank that sent the descriptor.
    pub(crate) fn open(
        gpu: &Arc<Gpu>,
        descriptor: &MemoryDescriptor,
        rank: u32,
    ) -> Result<Arc<Self>> {
        let refused = |detail: String| Error::PeerSegment { rank, detail };
        if descriptor.pid == process::id() && descriptor.process == own_process() {
            let piece = pieces().get(&descriptor.id).and_then(Weak::upgrade);
            let piece =
                piece.ok_or_else(|| refused("this process has freed it already".to_owned()))?;
            if Arc::ptr_eq(&piece.gpu, gpu) {
                return Ok(piece);
            }
            // Memory from the virtual memory API is mapped only for the GPU that owns the memory.
            // Another GPU needs a separate mapping. An IPC handle cannot be opened in the process
            // that created it, so the owner's address is used, which needs peer access.
            if matches!(descriptor.wire, Wire::Ipc(..)) {
                gpu.driver()
                    .enable_peer_access(piece.gpu.properties().ordinal)
                    .map_err(|error| refused(error.to_string()))?;
                return Ok(piece);
            }
        }
        let driver = gpu.driver();
        let raw = descriptor
            .wire
            .import(rank, |import| Ok(driver.import(import, descriptor.mapped)?))?;
        let offset = match descriptor.wire {
            Wire::Ipc(_, start) => start,
            _ => 0,
        };
        let mut raw_start = raw;
        raw_start.address += offset;
        if offset == 0 {
            return Ok(Self::register(gpu, raw_start, descriptor.bytes, false));
        }
        // An IPC handle maps the whole allocation. The returned `Memory` is a part of this mapping
        // and keeps the mapping alive.
        let whole = Self::register(gpu, raw, descriptor.mapped, false);
        Ok(Arc::new(Self {
            gpu: Arc::clone(gpu),
            raw: raw_start,
            bytes: descriptor.bytes,
            id: 0,
            foreign: true,
            _whole: Some(whole),
            published: Mutex::default(),
        }))
    }

    /// Returns the descriptor that a peer passes to [`Memory::open`] to map this memory.
    pub(crate) fn descriptor(&self) -> Result<MemoryDescriptor> {
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let wire = match &*published {
            Some((wire, _)) => *wire,
            None => {
                let export = if self.foreign {
                    let (export, base, _) = self.gpu.driver().export_foreign(self.raw.address)?;
                    match export {
                        Export::Ipc(handle, _) => Export::Ipc(handle, self.raw.address - base),
                        other if base == self.raw.address => other,
                        _ => {
                            return Err(Error::InvalidArgument {
                                operation: "register",
                                detail: "memory that begins within another library's virtual \
                                         allocation cannot be shared; register the allocation \
                                         from its beginning"
                                    .to_owned(),
                            });
                        }
                    }
                } else {
                    self.gpu.driver().export(&self.raw)?
                };
                let (wire, held) = Wire::offer(export)?;
                *published = Some((wire, held));
                wire
            }
        };
        Ok(MemoryDescriptor {
            pid: process::id(),
            start_time: crate::process::start_time(process::id()).map_err(|error| {
                Error::MemoryMap {
                    operation: "reading /proc",
                    bytes: self.bytes,
                    source: error.into(),
                }
            })?,
            bytes: self.bytes,
            uuid: self.gpu.properties().uuid,
            multicast: self.gpu.properties().multicast,
            process: own_process(),
            mapped: self.raw.bytes,
            id: self.id,
            wire,
        })
    }

    pub(crate) fn address(&self) -> u64 {
        self.raw.address
    }

    /// Returns the allocation if this process allocated it with the virtual memory API. Only such
    /// an allocation can be bound to a multicast object.
    pub(crate) fn whole(&self) -> Option<RawMemory> {
        (self.raw.origin == Origin::Virtual && !self.foreign).then_some(self.raw)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if other code allocated the memory.
    pub(crate) fn is_foreign(&self) -> bool {
        self.foreign
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Copies `bytes` to this memory at byte `offset`, concurrently with other work on the device.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        // SAFETY: `check` has established that the range lies in the mapped memory. A race with a
        // kernel leaves unspecified bytes in device memory and is not undefined behaviour on the
        // host.
        unsafe { Ok(self.gpu.driver().write(self.raw.address + offset, bytes)?) }
    }

    /// Fills `bytes` from this memory at byte `offset`, concurrently with other work on the device.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        // SAFETY: `check` has established that the range lies in the mapped memory. The target is a
        // host slice that this call borrows exclusively. A race with a kernel yields unspecified
        // bytes.
        unsafe { Ok(self.gpu.driver().read(bytes, self.raw.address + offset)?) }
    }

    fn check(&self, offset: u64, bytes: usize) -> Result<()> {
        if offset
            .checked_add(bytes as u64)
            .is_some_and(|end| end <= self.bytes.max(1))
        {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation: "copy",
            detail: format!(
                "{bytes} bytes at {offset} of device memory of {}",
                self.bytes
            ),
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.id != 0 {
            pieces().remove(&self.id);
        }
        if self.foreign {
            return;
        }
        let published = self
            .published
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if self.raw.origin == Origin::Whole && matches!(published, Some((Wire::Ipc(..), _))) {
            // Freeing memory that another process has mapped by IPC is undefined behaviour. This
            // process cannot detect whether the other process has unmapped the memory, so the
            // memory is leaked.
            tracing::warn!(
                bytes = self.raw.bytes,
                "device memory that was shared by IPC stays allocated until the process ends"
            );
            return;
        }
        let last = UnusedMemory {
            gpu: Arc::clone(&self.gpu),
            raw: self.raw,
        };
        if stream::is_settling() {
            self.gpu.leave(Box::new(last));
        }
    }
}

/// Memory that is not used any more. Dropping this value passes the memory to [`Gpu::free`].
struct UnusedMemory {
    gpu: Arc<Gpu>,
    raw: RawMemory,
}

impl Drop for UnusedMemory {
    fn drop(&mut self) {
        self.gpu.free(self.raw);
    }
}
