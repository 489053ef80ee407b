//! Memory that ranks share, on any device.
//!
//! On the CPU the host reads and writes it where it lies. On a GPU words are copied, beside
//! whatever runs; eight aligned bytes arrive in one piece, but there is no compare-exchange.

use core::fmt;
use std::sync::Arc;

use fusewire_device::mem::{self, Order, Scope};

use crate::cpu::{Segment, SegmentDescriptor};
use crate::device::Device;
use crate::gpu::driver::RawMemory;
use crate::gpu::{self, Gpu};
use crate::{Error, Result};

/// A piece of memory that its rank and its peers reach. Clones are the same piece.
#[derive(Clone)]
pub(crate) enum Memory {
    Host(Arc<Segment>),
    Device(Arc<gpu::Memory>),
}

/// What a peer needs to reach a piece of memory.
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
    /// `bytes` zeroed bytes on `device`; `name` is what the CPU's memory map shows.
    pub(crate) fn create(device: Device, bytes: u64, name: &str) -> Result<Self> {
        Ok(match device {
            Device::Cpu => Self::Host(Segment::create(bytes, name)?),
            _ => Self::Device(gpu::Memory::create(&Gpu::open(device)?, bytes)?),
        })
    }

    /// Reaches the memory that `rank` described, from `device`.
    pub(crate) fn open(device: Device, descriptor: &MemoryDescriptor, rank: u32) -> Result<Self> {
        match (device, descriptor) {
            (Device::Cpu, MemoryDescriptor::Host(descriptor)) => {
                Ok(Self::Host(Segment::open(descriptor, rank)?))
            }
            (Device::Cuda(_) | Device::Hip(_), MemoryDescriptor::Device(descriptor)) => {
                let gpu = Gpu::open(device)?;
                Ok(Self::Device(gpu::Memory::open(&gpu, descriptor, rank)?))
            }
            _ => Err(Error::PeerSegment {
                rank,
                detail: format!(
                    "it is on another kind of device than {device}; all ranks of a communicator \
                        use one kind"
                ),
            }),
        }
    }

    /// What a peer needs to [`Memory::open`] this.
    pub(crate) fn descriptor(&self) -> Result<MemoryDescriptor> {
        Ok(match self {
            Self::Host(segment) if segment.is_foreign() => {
                return Err(Error::InvalidArgument {
                    operation: "share memory",
                    detail: "other processes cannot map memory of the CPU that Fusewire did not \
                        allocate: allocate it by \
                             Communicator::alloc or Tensor::new, or let it go through staging"
                        .to_owned(),
                });
            }
            Self::Host(segment) => MemoryDescriptor::Host(segment.descriptor()),
            Self::Device(memory) => MemoryDescriptor::Device(Box::new(memory.descriptor()?)),
        })
    }

    /// The allocation, where it is one of this process' own on a GPU, as a whole.
    pub(crate) fn whole(&self) -> Option<RawMemory> {
        match self {
            Self::Host(_) => None,
            Self::Device(memory) => memory.whole(),
        }
    }

    /// The GPU that it is on.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        match self {
            Self::Host(_) => None,
            Self::Device(memory) => Some(memory.gpu()),
        }
    }

    /// First byte, as this rank's device addresses it.
    pub(crate) fn ptr(&self) -> *mut u8 {
        match self {
            Self::Host(segment) => segment.ptr(),
            Self::Device(memory) => memory.address() as *mut u8,
        }
    }

    /// Bytes, as asked for.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(segment) => segment.bytes(),
            Self::Device(memory) => memory.bytes(),
        }
    }

    /// Copies bytes to byte `offset`.
    ///
    /// # Safety
    /// Nobody else uses them in a way that races with this.
    pub(crate) unsafe fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        match self {
            Self::Host(segment) => {
                // SAFETY: within the segment; the rest is the caller's promise.
                unsafe {
                    let to = segment.ptr().add(offset as usize);
                    core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
                }
                Ok(())
            }
            Self::Device(memory) => memory.write(offset, bytes),
        }
    }

    /// Copies bytes from byte `offset` on.
    ///
    /// # Safety
    /// Nobody writes them in a way that races with this.
    pub(crate) unsafe fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.check(offset, bytes.len())?;
        match self {
            Self::Host(segment) => {
                // SAFETY: within the segment; the rest is the caller's promise.
                unsafe {
                    let from = segment.ptr().add(offset as usize);
                    core::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
                }
                Ok(())
            }
            Self::Device(memory) => memory.read(offset, bytes),
        }
    }

    /// The word at byte `offset`, which is only accessed atomically. Where a GPU's driver has
    /// failed, 0.
    pub(crate) fn load(&self, offset: u64) -> u64 {
        match self {
            Self::Host(_) => {
                let Some(at) = self.word(offset) else {
                    return 0;
                };
                // SAFETY: an aligned word of mapped memory.
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

    /// Writes the word at byte `offset`.
    pub(crate) fn store(&self, offset: u64, value: u64) -> Result<()> {
        match self {
            Self::Host(_) => {
                if let Some(at) = self.word(offset) {
                    // SAFETY: an aligned word of mapped memory.
                    unsafe { mem::store_u64(at, value, Order::Release, Scope::System) };
                }
                Ok(())
            }
            Self::Device(memory) => memory.write(offset, &value.to_ne_bytes()),
        }
    }

    /// Writes `new` where `old` is; what was there. On a GPU whoever writes in between is
    /// overwritten.
    pub(crate) fn compare_exchange(&self, offset: u64, old: u64, new: u64) -> u64 {
        match self {
            Self::Host(_) => {
                let Some(at) = self.word(offset) else {
                    return old;
                };
                // SAFETY: an aligned word of mapped memory.
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

    /// The word at byte `offset`, where the host can reach it and it lies inside.
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
            detail: format!("{bytes} bytes at {offset} of memory of {}", self.bytes()),
        })
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

    /// Bytes of the memory.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(descriptor) => descriptor.bytes,
            Self::Device(descriptor) => descriptor.bytes,
        }
    }

    /// The process that made it: its id and start time.
    pub(crate) fn process(&self) -> (u32, u64) {
        match self {
            Self::Host(descriptor) => (descriptor.pid, descriptor.start_time),
            Self::Device(descriptor) => (descriptor.pid, descriptor.start_time),
        }
    }

    /// The GPU that it is on.
    pub(crate) fn uuid(&self) -> Option<[u8; 16]> {
        match self {
            Self::Host(_) => None,
            Self::Device(descriptor) => Some(descriptor.uuid),
        }
    }

    /// Whether its GPU can be part of a multicast object.
    pub(crate) fn has_multicast(&self) -> bool {
        match self {
            Self::Host(_) => false,
            Self::Device(descriptor) => descriptor.multicast,
        }
    }

    /// Whether processes of other hosts can open it, in one NVLink domain.
    pub(crate) fn is_for_other_hosts(&self) -> bool {
        match self {
            Self::Host(_) => false,
            Self::Device(descriptor) => descriptor.is_for_other_hosts(),
        }
    }
}
