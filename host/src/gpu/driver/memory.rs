//! Device memory: kinds, mappings, and handles for export to other processes.

use std::os::fd::{BorrowedFd, OwnedFd};

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
    pub handle: u64,
    /// Origin of the mapping.
    pub origin: Origin,
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
    pub handle: u64,
    /// Size in bytes, a multiple of the multicast granularity.
    pub bytes: u64,
}
