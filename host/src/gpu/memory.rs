//! Device memory of a GPU that ranks share.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use super::device::Gpu;
use super::driver::{
    Driver, Export, HANDLE_BYTES, Import, MemoryKind, Origin, RawMemory, RawMulticast,
};
use super::share::{self, Published, Token};
use super::stream;
use crate::{Error, Result};

/// How long a rank waits for another process to hand a descriptor over.
const FETCH: Duration = Duration::from_secs(10);

/// A piece of device memory; freed with the last `Arc` of it.
pub(crate) struct Memory {
    gpu: Arc<Gpu>,
    raw: RawMemory,
    bytes: u64,
    /// Tells the pieces of this process apart.
    id: u64,
    /// Memory that somebody else allocated and frees.
    foreign: bool,
    /// The mapping that this is a part of.
    _whole: Option<Arc<Self>>,
    published: Mutex<Option<(Wire, Option<Published>)>>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("address", &self.raw.address)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

/// How another process gets a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wire {
    Descriptor(Token),
    Fabric([u8; HANDLE_BYTES]),
    Ipc([u8; HANDLE_BYTES], u64),
}

/// What a peer needs to reach a piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryDescriptor {
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
    pub(crate) bytes: u64,
    /// Of the GPU that the memory is on.
    pub(crate) uuid: [u8; 16],
    /// Whether that GPU can be part of a multicast object.
    pub(crate) multicast: bool,
    /// Tells the process from those that have the same id on other hosts or in other containers.
    process: u64,
    mapped: u64,
    id: u64,
    wire: Wire,
}

/// A number that no other process has, with its id.
fn own_process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        let mut bytes = [0; 8];
        // Without random numbers the start time must do.
        match getrandom::fill(&mut bytes) {
            Ok(()) => u64::from_le_bytes(bytes),
            Err(_) => crate::process::start_time(process::id()).unwrap_or_default(),
        }
    })
}

type Pieces = HashMap<u64, Weak<Memory>>;

/// The pieces that this process made, which ranks that are its threads use as they are.
fn pieces() -> MutexGuard<'static, Pieces> {
    static PIECES: OnceLock<Mutex<Pieces>> = OnceLock::new();
    PIECES
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// `bytes` zeroed bytes that peers can reach.
    pub(crate) fn create(gpu: &Arc<Gpu>, bytes: u64) -> Result<Arc<Self>> {
        gpu.sweep();
        let raw = gpu.driver().allocate(bytes.max(1), MemoryKind::Shared)?;
        Ok(Self::register(gpu, raw, bytes, false))
    }

    /// Memory that somebody else allocated, and keeps alive longer than this value.
    pub(crate) fn adopt(gpu: &Arc<Gpu>, address: u64, bytes: u64) -> Arc<Self> {
        let raw = RawMemory {
            address,
            bytes,
            handle: 0,
            origin: Origin::Whole,
        };
        Self::register(gpu, raw, bytes, true)
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

    /// Maps the memory that `rank` described.
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
            // Virtual memory is mapped for the GPU that it is on; another one needs a mapping of its own.
            if Arc::ptr_eq(&piece.gpu, gpu) || matches!(descriptor.wire, Wire::Ipc(..)) {
                return Ok(piece);
            }
        }
        let driver = gpu.driver();
        let raw = descriptor
            .wire
            .import(rank, |import| driver.import(import, descriptor.mapped))?;
        let offset = match descriptor.wire {
            Wire::Ipc(_, start) => start,
            _ => 0,
        };
        let raw_start = RawMemory {
            address: raw.address + offset,
            ..raw
        };
        if offset == 0 {
            return Ok(Self::register(gpu, raw_start, descriptor.bytes, false));
        }
        // The whole allocation was mapped; a piece within it keeps that mapping.
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

    /// What a peer needs to [`Memory::open`] this.
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
                                detail: "memory that begins within another library's virtual allocation \
                                         cannot be shared; register the allocation from its beginning"
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

    /// The allocation, where this process made it and it can be bound to a multicast object.
    pub(crate) fn whole(&self) -> Option<RawMemory> {
        (self.raw.origin == Origin::Virtual && !self.foreign).then_some(self.raw)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Copies `bytes` to byte `offset`, beside whatever runs.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        // SAFETY: within the mapped memory; what runs beside is the caller's affair, as for any device memory.
        unsafe { self.gpu.driver().write(self.raw.address + offset, bytes) }
    }

    /// Copies bytes from byte `offset` on.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        // SAFETY: as above.
        unsafe { self.gpu.driver().read(bytes, self.raw.address + offset) }
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
            // Freeing memory that other processes may still have open is undefined; nobody tells when they are done.
            tracing::warn!(
                bytes = self.raw.bytes,
                "device memory that was shared by IPC stays allocated until the process ends"
            );
            return;
        }
        let last = Freed {
            gpu: Arc::clone(&self.gpu),
            raw: self.raw,
        };
        if stream::is_settling() {
            self.gpu.leave(Box::new(last));
        }
    }
}

/// Memory that nobody uses any more; freed when this is dropped, or later.
struct Freed {
    gpu: Arc<Gpu>,
    raw: RawMemory,
}

impl Drop for Freed {
    fn drop(&mut self) {
        self.gpu.free(self.raw);
    }
}

impl MemoryDescriptor {
    const MAGIC: u32 = 0x4644_4732; // "FDG2"

    /// Whether processes of other hosts can open the memory, in one NVLink domain.
    pub(crate) const fn is_for_other_hosts(&self) -> bool {
        matches!(self.wire, Wire::Fabric(_))
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(176);
        bytes.extend(Self::MAGIC.to_le_bytes());
        bytes.extend(self.pid.to_le_bytes());
        for word in [self.start_time, self.bytes, self.mapped, self.id] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.uuid);
        bytes.push(u8::from(self.multicast));
        bytes.extend(self.wire.to_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        if u32::from_le_bytes(*magic) != Self::MAGIC {
            return None;
        }
        let (pid, rest) = rest.split_first_chunk::<4>()?;
        let word = |rest: &mut &[u8]| {
            let (word, after) = rest.split_first_chunk::<8>()?;
            *rest = after;
            Some(u64::from_le_bytes(*word))
        };
        let mut rest = rest;
        let (start_time, size) = (word(&mut rest)?, word(&mut rest)?);
        let (mapped, id) = (word(&mut rest)?, word(&mut rest)?);
        let process = word(&mut rest)?;
        let (uuid, rest) = rest.split_first_chunk::<16>()?;
        let (multicast, rest) = rest.split_first()?;
        let multicast = match multicast {
            0 => false,
            1 => true,
            _ => return None,
        };
        let wire = Wire::from_bytes(rest)?;
        Some(Self {
            pid: u32::from_le_bytes(*pid),
            start_time,
            bytes: size,
            uuid: *uuid,
            multicast,
            process,
            mapped,
            id,
            wire,
        })
    }
}

impl Wire {
    /// Makes an exported handle fetchable; what is fetched lives as long as the second value.
    fn offer(export: Export) -> Result<(Self, Option<Published>)> {
        Ok(match export {
            Export::Descriptor(fd) => {
                let held = share::publish(fd)?;
                (Self::Descriptor(held.token()), Some(held))
            }
            Export::Fabric(handle) => (Self::Fabric(handle), None),
            Export::Ipc(handle, start) => (Self::Ipc(handle, start), None),
        })
    }

    /// Fetches what `rank` has offered.
    fn import<R>(&self, rank: u32, import: impl FnOnce(Import<'_>) -> Result<R>) -> Result<R> {
        let refused = |detail: String| Error::PeerSegment { rank, detail };
        let imported = match self {
            Self::Descriptor(token) => {
                let fd = share::fetch(token, FETCH).map_err(|error| refused(error.to_string()))?;
                import(Import::Descriptor(fd.as_fd()))
            }
            Self::Fabric(handle) => import(Import::Fabric(handle)),
            Self::Ipc(handle, _) => import(Import::Ipc(handle)),
        };
        imported.map_err(|error| refused(error.to_string()))
    }

    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(80);
        match self {
            Self::Descriptor(token) => {
                bytes.push(1);
                bytes.extend(token.to_bytes());
            }
            Self::Fabric(handle) => {
                bytes.push(2);
                bytes.extend(handle);
            }
            Self::Ipc(handle, start) => {
                bytes.push(3);
                bytes.extend(handle);
                bytes.extend(start.to_le_bytes());
            }
        }
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match kind {
            1 => Token::from_bytes(rest).ok().map(Self::Descriptor),
            2 => rest.try_into().ok().map(Self::Fabric),
            3 => {
                let (handle, start) = rest.split_first_chunk::<HANDLE_BYTES>()?;
                let start = u64::from_le_bytes(start.try_into().ok()?);
                Some(Self::Ipc(*handle, start))
            }
            _ => None,
        }
    }
}

/// A multicast object that is offered to the other ranks, as long as this lives.
#[derive(Debug)]
pub(crate) struct Offer {
    wire: Wire,
    _held: Option<Published>,
}

impl Offer {
    pub(crate) fn new(export: Export) -> Result<Self> {
        let (wire, held) = Wire::offer(export)?;
        Ok(Self { wire, _held: held })
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        self.wire.to_bytes()
    }

    /// Takes what `rank` has offered: an object of `size` bytes.
    pub(crate) fn take(
        driver: &dyn Driver,
        bytes: &[u8],
        size: u64,
        rank: u32,
    ) -> Result<RawMulticast> {
        let wire = Wire::from_bytes(bytes).ok_or_else(|| Error::PeerSegment {
            rank,
            detail: "it offers no multicast object".to_owned(),
        })?;
        wire.import(rank, |import| driver.import_multicast(import, size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_survive_their_bytes_and_others_are_none() {
        let mut token = vec![0u8; Token::ENCODED_BYTES];
        token[..4].copy_from_slice(b"FDT1");
        token[4] = 1;
        let token = Token::from_bytes(&token).expect("a token");
        for wire in [
            Wire::Descriptor(token),
            Wire::Fabric([7; HANDLE_BYTES]),
            Wire::Ipc([9; HANDLE_BYTES], 4096),
        ] {
            let descriptor = MemoryDescriptor {
                pid: 1,
                start_time: 2,
                bytes: 3,
                uuid: [4; 16],
                multicast: true,
                process: 7,
                mapped: 5,
                id: 6,
                wire,
            };
            let bytes = descriptor.to_bytes();
            assert_eq!(MemoryDescriptor::from_bytes(&bytes), Some(descriptor));
            for length in 0..bytes.len() {
                assert_eq!(MemoryDescriptor::from_bytes(&bytes[..length]), None);
            }
            let longer = [bytes.as_slice(), &[0]].concat();
            assert_eq!(MemoryDescriptor::from_bytes(&longer), None);
            let mut other = bytes;
            other[0] ^= 1;
            assert_eq!(MemoryDescriptor::from_bytes(&other), None);
        }
    }
}
