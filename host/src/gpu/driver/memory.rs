//! Memory: its purpose, its address, and its export to other processes.

use std::os::fd::{BorrowedFd, OwnedFd};

/// The purpose of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Used by this device only.
    Private,
    /// Read and written by peers while kernels run: exportable, and fine-grained where the
    /// architecture distinguishes that from coarse-grained memory.
    Shared,
}

/// Memory of this or another device, mapped in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMemory {
    /// Device address.
    pub address: u64,
    /// Bytes mapped, a multiple of the granularity.
    pub bytes: u64,
    /// The allocation's handle, if the library needs one to free it, otherwise 0.
    pub handle: u64,
    /// Origin of the mapping.
    pub origin: Origin,
}

/// The origin of a mapping, which determines how it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Allocated by virtual memory management.
    Virtual,
    /// Allocated as a whole (`cuMemAlloc`, `hipExtMallocWithFlags`).
    Whole,
    /// Memory of a peer, imported from a descriptor or a fabric handle.
    ImportedVirtual,
    /// Memory of a peer, opened from an IPC handle.
    ImportedIpc,
}

/// Bytes of an IPC handle or a fabric handle.
pub const HANDLE_BYTES: usize = 64;

/// A handle of memory for another process.
#[derive(Debug)]
pub enum Export {
    /// A file descriptor, to be passed over a Unix socket.
    Descriptor(OwnedFd),
    /// A fabric handle, valid in the NVLink domain.
    Fabric([u8; HANDLE_BYTES]),
    /// An IPC handle, valid on this host, and the offset of the memory in the allocation.
    Ipc([u8; HANDLE_BYTES], u64),
}

/// A handle of memory from another process.
#[derive(Clone, Copy, Debug)]
pub enum Import<'a> {
    /// The counterpart of [`Export::Descriptor`].
    Descriptor(BorrowedFd<'a>),
    /// The counterpart of [`Export::Fabric`].
    Fabric(&'a [u8; HANDLE_BYTES]),
    /// The counterpart of [`Export::Ipc`]. The whole allocation is mapped.
    Ipc(&'a [u8; HANDLE_BYTES]),
}

/// Page-locked memory of the host that the device can read and write.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    /// Address on the host.
    pub host: *mut u8,
    /// Address on the device.
    pub device: u64,
    /// Bytes.
    pub bytes: usize,
}

/// A multicast object: an address whose stores reach the memory of several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMulticast {
    /// The driver library's handle.
    pub handle: u64,
    /// Bytes, a multiple of the granularity.
    pub bytes: u64,
}
