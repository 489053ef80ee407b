//! Memory that ranks share, on a CPU or a GPU.
//!
//! The host accesses CPU memory directly. The host reads and writes GPU memory by copies, which run
//! concurrently with the GPU's work. A copy of eight aligned bytes is atomic, but the host cannot
//! perform an atomic compare-exchange on GPU memory.

use core::fmt;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::Arc;

use fusewire_device::mem::{self, Order, Scope};

use crate::cpu::{Segment, SegmentDescriptor};
use crate::device::Device;
use crate::gpu::driver::RawMemory;
use crate::gpu::{self, Gpu};
use crate::{Error, Result};

/// Memory that this rank and its peers can access. Clones refer to the same memory.
#[derive(Clone)]
pub(crate) enum Memory {
    Host(Arc<Segment>),
    Device(Arc<gpu::Memory>),
}

/// Descriptor with which a peer maps this rank's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MemoryDescriptor {
    Host(SegmentDescriptor),
    Device(Box<gpu::MemoryDescriptor>),
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(segment) => segment.fmt(f),
            Self::Device(memory) => memory.fmt(f),
        }
    }
}

impl From<Arc<Segment>> for Memory {
    fn from(segment: Arc<Segment>) -> Self {
        Self::Host(segment)
    }
}

impl Memory {
    /// Allocates `bytes` zeroed bytes on `device`. For CPU memory, `name` appears in
    /// `/proc/<pid>/maps`.
    pub(crate) fn create(device: Device, bytes: u64, name: &str) -> Result<Self> {
        Ok(match device {
            Device::Cpu => Self::Host(Segment::create(bytes, name)?),
            _ => Self::Device(gpu::Memory::create(&crate::gpus::open(device)?, bytes)?),
        })
    }

    /// Maps the memory that `descriptor` describes for access from `device`. `rank` is the rank
    /// that sent the descriptor.
    pub(crate) fn open(device: Device, descriptor: &MemoryDescriptor, rank: u32) -> Result<Self> {
        match (device, descriptor) {
            (Device::Cpu, MemoryDescriptor::Host(descriptor)) => {
                Ok(Self::Host(Segment::open(descriptor, rank)?))
            }
            (Device::Cuda(_) | Device::Hip(_), MemoryDescriptor::Device(descriptor)) => {
                let gpu = crate::gpus::open(device)?;
                Ok(Self::Device(gpu::Memory::open(&gpu, descriptor, rank)?))
            }
            _ => Err(Error::PeerSegment {
                rank,
                detail: format!(
                    "it is on another kind of device than {device}; all ranks of a communicator \
                     must use the same kind"
                ),
            }),
        }
    }

    /// Returns the descriptor that a peer passes to [`Memory::open`].
    pub(crate) fn descriptor(&self) -> Result<MemoryDescriptor> {
        Ok(match self {
            Self::Host(segment) if segment.is_foreign() => {
                return Err(Error::InvalidArgument {
                    operation: "share memory",
                    detail:
                        "other processes cannot map CPU memory that Fusewire did not allocate: \
                             allocate it with Communicator::alloc or Tensor::new, or pass it \
                             unregistered, which copies it through staging"
                            .to_owned(),
                });
            }
            Self::Host(segment) => MemoryDescriptor::Host(segment.descriptor()),
            Self::Device(memory) => MemoryDescriptor::Device(Box::new(memory.descriptor()?)),
        })
    }

    /// Returns the allocation if this process allocated it with the virtual memory API of a GPU.
    /// Only such an allocation can be bound to a multicast object.
    pub(crate) fn whole(&self) -> Option<RawMemory> {
        match self {
            Self::Host(_) => None,
            Self::Device(memory) => memory.whole(),
        }
    }

    /// Returns true for memory of a GPU that other code allocated.
    pub(crate) fn is_foreign_on_gpu(&self) -> bool {
        match self {
            Self::Host(_) => false,
            Self::Device(memory) => memory.is_foreign(),
        }
    }

    /// Returns the GPU that holds the memory, or `None` for CPU memory.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        match self {
            Self::Host(_) => None,
            Self::Device(memory) => Some(memory.gpu()),
        }
    }

    /// Returns the first byte's address on this rank's device.
    pub(crate) fn ptr(&self) -> *mut u8 {
        match self {
            Self::Host(segment) => segment.ptr(),
            Self::Device(memory) => memory.address() as *mut u8,
        }
    }

    /// Returns the requested size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(segment) => segment.bytes(),
            Self::Device(memory) => memory.bytes(),
        }
    }

    /// Copies `bytes` to this memory at byte `offset`. In CPU memory, every byte is stored
    /// atomically.
    ///
    /// # Safety
    /// No other access of this process to these bytes may race with this call, except atomic
    /// accesses.
    pub(crate) unsafe fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        match self {
            Self::Host(segment) => {
                // SAFETY: `check` verified that the range lies in the segment. The caller excludes
                // racing accesses.
                unsafe { store_bytes(segment.ptr().add(offset as usize), bytes) };
                Ok(())
            }
            Self::Device(memory) => memory.write(offset, bytes),
        }
    }

    /// Fills `bytes` from this memory at byte `offset`. In CPU memory, every byte is loaded
    /// atomically.
    ///
    /// # Safety
    /// No write of this process to these bytes may race with this call, except atomic accesses.
    pub(crate) unsafe fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        match self {
            Self::Host(segment) => {
                // SAFETY: `check` verified that the range lies in the segment. The caller excludes
                // racing writes.
                unsafe { load_bytes(bytes, segment.ptr().add(offset as usize)) };
                Ok(())
            }
            Self::Device(memory) => memory.read(offset, bytes),
        }
    }

    /// Reads the word at byte `offset`. All accesses to this word must be atomic. Returns 0 if
    /// `offset` is out of bounds or the GPU driver fails.
    pub(crate) fn load(&self, offset: u64) -> u64 {
        match self {
            Self::Host(_) => {
                let Some(at) = self.word(offset) else {
                    return 0;
                };
                // SAFETY: `word` returns an address inside the mapped segment. Callers pass offsets
                // of aligned `u64` words.
                unsafe { mem::load_u64(at, Order::Acquire, Scope::System) }
            }
            Self::Device(memory) => {
                let mut bytes = [0; 8];
                if let Err(error) = memory.read(offset, &mut bytes) {
                    tracing::debug!(%error, "a word of device memory cannot be read");
                }
                u64::from_ne_bytes(bytes)
            }
        }
    }

    /// Writes the word at byte `offset`. All accesses to this word must be atomic. In CPU memory,
    /// ignores an `offset` that is out of bounds.
    pub(crate) fn store(&self, offset: u64, value: u64) -> Result<()> {
        match self {
            Self::Host(_) => {
                if let Some(at) = self.word(offset) {
                    // SAFETY: `word` returns an address inside the mapped segment. Callers pass
                    // offsets of aligned `u64` words.
                    unsafe { mem::store_u64(at, value, Order::Release, Scope::System) };
                }
                Ok(())
            }
            Self::Device(memory) => memory.write(offset, &value.to_ne_bytes()),
        }
    }

    /// Replaces the word at byte `offset` with `new` if the word equals `old`. Returns the previous
    /// word. In GPU memory the exchange is not atomic: a concurrent store between the read and the
    /// write is lost. In CPU memory, returns `old` if `offset` is out of bounds.
    pub(crate) fn compare_exchange(&self, offset: u64, old: u64, new: u64) -> u64 {
        match self {
            Self::Host(_) => {
                let Some(at) = self.word(offset) else {
                    return old;
                };
                // SAFETY: `word` returns an address inside the mapped segment. Callers pass offsets
                // of aligned `u64` words.
                unsafe { mem::compare_exchange_u64(at, old, new, Order::AcqRel, Scope::System) }
            }
            Self::Device(_) => {
                let found = self.load(offset);
                if found == old
                    && let Err(error) = self.store(offset, new)
                {
                    tracing::warn!(%error, "a word of device memory cannot be written");
                }
                found
            }
        }
    }

    /// Returns the address of the word at byte `offset`, or `None` if the word is in GPU memory or
    /// out of bounds.
    pub(crate) fn word(&self, offset: u64) -> Option<*mut u64> {
        let Self::Host(segment) = self else {
            return None;
        };
        self.check(offset, 8).ok()?;
        Some(segment.ptr().wrapping_add(offset as usize).cast())
    }

    fn check(&self, offset: u64, bytes: usize) -> Result<()> {
        let end = offset.checked_add(bytes as u64);
        if end.is_some_and(|end| end <= self.bytes().max(1)) {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation: "copy",
            detail: format!(
                "{bytes} bytes at offset {offset} of memory of {} bytes",
                self.bytes()
            ),
        })
    }
}

/// Returns the number of bytes before the first multiple of 8 at or after `at`, and the number of
/// whole words of 8 bytes after it, in a range of `bytes` bytes.
fn words_of(at: *const u8, bytes: usize) -> (usize, usize) {
    let head = at.align_offset(8).min(bytes);
    (head, (bytes - head) / 8)
}

/// Copies `from` to `to` by relaxed atomic stores, of 8 bytes where `to` is aligned.
///
/// # Safety
/// `to` must be valid for `from.len()` bytes. Racing accesses must be atomic.
unsafe fn store_bytes(to: *mut u8, from: &[u8]) {
    let (head, words) = words_of(to, from.len());
    let (first, rest) = from.split_at(head);
    let (middle, last) = rest.split_at(8 * words);
    let store = |at: usize, byte: u8| {
        // SAFETY: `at < from.len()`: `at` is the index of a byte of `first` or `last` in `from`.
        unsafe { AtomicU8::from_ptr(to.add(at)) }.store(byte, Ordering::Relaxed);
    };
    for (index, byte) in first.iter().enumerate() {
        store(index, *byte);
    }
    for (index, bytes) in middle.as_chunks::<8>().0.iter().enumerate() {
        // SAFETY: `words_of` found `words` aligned words after `head` bytes, and `index < words`.
        let word = unsafe { AtomicU64::from_ptr(to.add(head + 8 * index).cast()) };
        word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
    }
    for (index, byte) in last.iter().enumerate() {
        store(head + 8 * words + index, *byte);
    }
}

/// Fills `to` from `from` by relaxed atomic loads, of 8 bytes where `from` is aligned.
///
/// # Safety
/// `from` must be valid for `to.len()` bytes. Racing accesses must be atomic.
unsafe fn load_bytes(to: &mut [u8], from: *mut u8) {
    let (head, words) = words_of(from, to.len());
    let load = |at: usize| {
        // SAFETY: `at < to.len()`: `at` is the index of a byte of `first` or `last` in `to`.
        unsafe { AtomicU8::from_ptr(from.add(at)) }.load(Ordering::Relaxed)
    };
    let (first, rest) = to.split_at_mut(head);
    let (middle, last) = rest.split_at_mut(8 * words);
    for (index, byte) in first.iter_mut().enumerate() {
        *byte = load(index);
    }
    for (index, bytes) in middle.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        // SAFETY: `words_of` found `words` aligned words after `head` bytes, and `index < words`.
        let word = unsafe { AtomicU64::from_ptr(from.add(head + 8 * index).cast()) };
        *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    for (index, byte) in last.iter_mut().enumerate() {
        *byte = load(head + 8 * words + index);
    }
}

impl MemoryDescriptor {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Host(descriptor) => descriptor.to_bytes().to_vec(),
            Self::Device(descriptor) => descriptor.to_bytes(),
        }
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        SegmentDescriptor::from_bytes(bytes)
            .ok()
            .map(Self::Host)
            .or_else(|| {
                gpu::MemoryDescriptor::from_bytes(bytes)
                    .map(Box::new)
                    .map(Self::Device)
            })
    }

    /// Returns the size of the memory in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(descriptor) => descriptor.bytes,
            Self::Device(descriptor) => descriptor.bytes,
        }
    }

    /// Returns the id and start time of the process that allocated the memory.
    pub(crate) fn process(&self) -> (u32, u64) {
        match self {
            Self::Host(descriptor) => (descriptor.pid, descriptor.start_time),
            Self::Device(descriptor) => (descriptor.pid, descriptor.start_time),
        }
    }

    /// Returns the UUID of the GPU that owns the memory, or `None` for CPU memory.
    pub(crate) fn uuid(&self) -> Option<[u8; 16]> {
        match self {
            Self::Host(_) => None,
            Self::Device(descriptor) => Some(descriptor.uuid),
        }
    }

    /// Returns true if the memory is on a GPU that supports multicast objects.
    pub(crate) fn has_multicast(&self) -> bool {
        match self {
            Self::Host(_) => false,
            Self::Device(descriptor) => descriptor.multicast,
        }
    }

    /// Returns true if processes on other hosts of the same NVLink domain can open the memory.
    pub(crate) fn is_for_other_hosts(&self) -> bool {
        match self {
            Self::Host(_) => false,
            Self::Device(descriptor) => descriptor.is_for_other_hosts(),
        }
    }
}
