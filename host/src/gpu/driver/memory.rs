//! Memory: what it is for, where it is, and how it goes to other processes.

use std::os::fd::{BorrowedFd, OwnedFd};

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Used by this device only.
    Private,
    /// Peers read and write it while kernels run: exportable, and fine-grained where the architecture
    /// distinguishes that from coarse-grained memory.
    Shared,
}

/// Memory of the device, or of another one, mapped here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMemory {
    /// Device address.
    pub address: u64,
    /// Bytes mapped, a multiple of the granularity.
    pub bytes: u64,
    /// What else the library needs to free it: an allocation's handle, or 0.
    pub handle: u64,
    /// How it came here.
    pub origin: Origin,
}

/// How memory came here, which says how it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Allocated by pieces of virtual memory management.
    Virtual,
    /// Allocated as a whole (`cuMemAlloc`, `hipExtMallocWithFlags`).
    Whole,
    /// A peer's, imported from a descriptor or a fabric handle.
    ImportedVirtual,
    /// A peer's, opened from an IPC handle.
    ImportedIpc,
}

/// Bytes of an IPC handle or a fabric handle.
pub const HANDLE_BYTES: usize = 64;

/// Memory as it is given to another process.
#[derive(Debug)]
pub enum Export {
    /// A file descriptor, to be passed over a Unix socket.
    Descriptor(OwnedFd),
    /// A fabric handle, valid in the NVLink domain.
    Fabric([u8; HANDLE_BYTES]),
    /// An IPC handle, valid on this host, and where in the allocation the memory begins.
    Ipc([u8; HANDLE_BYTES], u64),
}

/// Memory as it is got from another process.
#[derive(Clone, Copy, Debug)]
pub enum Import<'a> {
    /// As [`Export::Descriptor`].
    Descriptor(BorrowedFd<'a>),
    /// As [`Export::Fabric`].
    Fabric(&'a [u8; HANDLE_BYTES]),
    /// As [`Export::Ipc`]: the whole allocation is mapped.
    Ipc(&'a [u8; HANDLE_BYTES]),
}

/// Page-locked memory of the host that the device can read and write.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory {
    /// Address for the host.
    pub host: *mut u8,
    /// Address for the device.
    pub device: u64,
    /// Bytes.
    pub bytes: usize,
}

/// A multicast object: an address whose stores reach the memory of several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMulticast {
    /// The library's handle.
    pub handle: u64,
    /// Bytes, a multiple of the granularity.
    pub bytes: u64,
}
