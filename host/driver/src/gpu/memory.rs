//! Device memory: kinds, mappings, and handles for export to other processes.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::RawStream;
use crate::Result;

/// The devices that access an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Used by this device only.
    Private,
    /// Read and written by peers while kernels run. The memory is exportable. A running kernel sees
    /// the writes of peers; for this purpose the memory is uncached on AMD GPUs.
    Shared,
}

/// Memory of this or another device, mapped in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMemory {
    /// Device address.
    pub address: u64,
    /// Size of the mapping in bytes. For allocated memory, a multiple of the allocation
    /// granularity.
    pub bytes: u64,
    /// Handle of the allocation, or 0 if the driver library frees the allocation by its address.
    pub(crate) handle: u64,
    /// Origin of the mapping.
    pub origin: Origin,
}

impl RawMemory {
    /// Describes memory that other code allocated, or that is freed by its address.
    pub const fn at_address(address: u64, bytes: u64) -> Self {
        Self {
            address,
            bytes,
            handle: 0,
            origin: Origin::Whole,
        }
    }
}

/// The origin of a mapping, which determines how it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Allocated and mapped by the virtual memory API (`cuMemCreate`, `cuMemMap`).
    Virtual,
    /// Allocated and mapped by one call (`cuMemAlloc`, `hipMalloc`, `hipExtMallocWithFlags`).
    Whole,
    /// Memory of a peer, imported from a descriptor or a fabric handle.
    ImportedVirtual,
    /// Memory of a peer, opened from an IPC handle.
    ImportedIpc,
}

/// Bytes of an IPC handle or a fabric handle.
pub const HANDLE_BYTES: usize = 64;

/// An exported handle with which another process can map the memory or import the multicast object.
#[derive(Debug)]
pub enum Export {
    /// A file descriptor, to be passed over a Unix socket.
    Descriptor(OwnedFd),
    /// A fabric handle, valid on all hosts of the NVLink domain.
    Fabric([u8; HANDLE_BYTES]),
    /// An IPC handle, valid on this host, and the byte offset at which the exported memory starts
    /// in its allocation.
    Ipc([u8; HANDLE_BYTES], u64),
}

/// A handle that another process exported.
#[derive(Clone, Copy, Debug)]
pub enum Import<'a> {
    /// The counterpart of [`Export::Descriptor`].
    Descriptor(BorrowedFd<'a>),
    /// The counterpart of [`Export::Fabric`].
    Fabric(&'a [u8; HANDLE_BYTES]),
    /// The counterpart of [`Export::Ipc`]. Importing the handle maps the whole allocation.
    Ipc(&'a [u8; HANDLE_BYTES]),
}

/// Page-locked memory of the host that the device can read and write.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    /// Address on the host.
    pub host: *mut u8,
    /// Address on the device.
    pub device: u64,
    /// Size in bytes.
    pub bytes: usize,
}

/// A multicast object. A store to the address at which the object is mapped writes the memory of
/// every device in the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMulticast {
    /// The driver library's handle.
    pub(crate) handle: u64,
    /// Size in bytes, a multiple of the multicast granularity.
    pub bytes: u64,
}

/// Memory: allocation, and sharing with other processes.
pub trait MemoryDriver {
    /// Allocates at least `bytes` bytes, zeroed. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver` if there is not enough memory.
    fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory>;

    /// Frees or unmaps memory. May wait for the device.
    ///
    /// # Safety
    /// `memory` must come from `allocate` or `import` of this driver, must not be in use, and must
    /// not have been released before.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release(&self, memory: RawMemory) -> Result<()>;

    /// Exports memory that `allocate` returned for [`MemoryKind::Shared`]. Another process passes
    /// the handle to [`MemoryDriver::import`].
    ///
    /// # Errors
    /// `Error::Driver`.
    fn export(&self, memory: &RawMemory) -> Result<Export>;

    /// Exports device memory that other code allocated. Also returns the base address and the size
    /// in bytes of the allocation that contains `address`. The handle is an IPC handle if the
    /// memory has one, and a file descriptor or a fabric handle otherwise.
    ///
    /// # Errors
    /// `Error::Driver` if `address` is not device memory, or if memory of this kind cannot be
    /// exported.
    fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)>;

    /// Maps a peer's memory. `bytes` is the peer's [`RawMemory::bytes`].
    ///
    /// # Errors
    /// `Error::Driver` if the handle is invalid, if the memory has another size, or if the peer has
    /// freed the memory.
    fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory>;

    /// Permits kernels of this device to access memory of the device with index `peer` at the
    /// address that the peer uses. Only memory of [`Origin::Whole`] needs this permission. Mapping
    /// virtual memory or opening an IPC handle grants access to that mapping. Does nothing if
    /// `peer` is this device or if access is already enabled. Access is never disabled.
    ///
    /// # Errors
    /// `Error::Driver` if this device cannot access memory of the peer.
    fn enable_peer_access(&self, peer: u32) -> Result<()>;

    /// Allocates zeroed page-locked host memory. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn allocate_host(&self, bytes: usize) -> Result<HostMemory>;

    /// Frees page-locked host memory. May wait for the device.
    ///
    /// # Safety
    /// `memory` must come from `allocate_host` of this driver, must not be in use, and must not
    /// have been released before.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release_host(&self, memory: HostMemory) -> Result<()>;
}

/// Copies.
pub trait CopyDriver {
    /// Copies host bytes to the device and blocks until the copy is complete. The copy runs on an
    /// internal stream of the driver object, concurrently with other work. Every aligned group of
    /// eight bytes is written atomically.
    ///
    /// # Safety
    /// The device memory must be mapped. Concurrent accesses to it must be reads by the device that
    /// accept each aligned group of eight bytes as it was before or after.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()>;

    /// Copies device bytes to the host and blocks until the copy is complete. The copy runs on the
    /// same internal stream as [`CopyDriver::write`]. Every aligned group of eight bytes is read
    /// atomically.
    ///
    /// # Safety
    /// The device memory must be mapped, and no concurrent access may race with the copy.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes to device memory from device memory or page-locked host
    /// memory.
    ///
    /// # Safety
    /// Both ranges must stay mapped until the copy is complete.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()>;
}
