//! Physical memory with a handle, and addresses that it is mapped at.

use core::ffi::{c_int, c_uchar, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys::{self, CUmemAllocationHandleType as HandleType};

use super::library::Library;
use super::{error, memory};
use crate::Result;
use crate::gpu::driver::{Export, HANDLE_BYTES, Import};

/// Memory that can be exported as a file descriptor.
pub(super) const DESCRIPTOR: u32 = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
/// Memory that can be exported as a fabric handle.
pub(super) const FABRIC: u32 = HandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;

/// Memory of a device, with these types of handles.
pub(super) const fn properties(
    device: sys::CUdevice,
    handles: u32,
    rdma: bool,
) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType_enum(handles),
        location: location(device),
        win32HandleMetaData: core::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: rdma as c_uchar,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// A device as a memory location.
const fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

/// The granularity that the library recommends.
pub(super) fn granularity(
    library: &Library,
    device: sys::CUdevice,
    handles: u32,
    rdma: bool,
) -> Result<u64> {
    let properties = properties(device, handles, rdma);
    let mut granularity = 0_usize;
    // SAFETY: `granularity` is writable, `properties` are complete.
    library.check("cuMemGetAllocationGranularity", unsafe {
        (library.cuMemGetAllocationGranularity)(
            &raw mut granularity,
            &raw const properties,
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
    })?;
    Ok(granularity as u64)
}

/// A handle of physical memory (or of a multicast object); released when dropped.
pub(super) struct Physical<'a> {
    library: &'a Library,
    handle: sys::CUmemGenericAllocationHandle,
}

impl<'a> Physical<'a> {
    /// Takes a handle over.
    pub(super) const fn new(
        library: &'a Library,
        handle: sys::CUmemGenericAllocationHandle,
    ) -> Self {
        Self { library, handle }
    }

    /// Allocates.
    pub(super) fn create(
        library: &'a Library,
        properties: &sys::CUmemAllocationProp,
        bytes: u64,
    ) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: `handle` is writable, `properties` are complete.
        let code = unsafe { (library.cuMemCreate)(&raw mut handle, bytes as usize, properties, 0) };
        memory::check_sized(library, "cuMemCreate", code, bytes)?;
        Ok(Self::new(library, handle))
    }

    /// The handle.
    pub(super) const fn handle(&self) -> sys::CUmemGenericAllocationHandle {
        self.handle
    }

    /// The handle, which the caller releases.
    pub(super) const fn keep(self) -> sys::CUmemGenericAllocationHandle {
        let handle = self.handle;
        core::mem::forget(self);
        handle
    }
}

impl Drop for Physical<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's own. It is on the way out of a failure that is
        // reported.
        let _ = unsafe { (self.library.cuMemRelease)(self.handle) };
    }
}

/// Maps all of a handle's memory at a fresh address, for reading and writing by the device.
pub(super) fn map(
    library: &Library,
    device: sys::CUdevice,
    handle: sys::CUmemGenericAllocationHandle,
    bytes: u64,
    alignment: u64,
) -> Result<u64> {
    let (size, alignment) = (bytes as usize, alignment as usize);
    let mut address = 0;
    // SAFETY: `address` is writable.
    library.check("cuMemAddressReserve", unsafe {
        (library.cuMemAddressReserve)(&raw mut address, size, alignment, 0, 0)
    })?;
    // SAFETY: the addresses are reserved, and nothing is mapped there.
    let code = unsafe { (library.cuMemMap)(address, size, 0, handle, 0) };
    if let Err(error) = library.check("cuMemMap", code) {
        // SAFETY: reserved above with that size. The error that counts is the first.
        let _ = unsafe { (library.cuMemAddressFree)(address, size) };
        return Err(error::with(error, &format!("{bytes} bytes")));
    }
    let access = sys::CUmemAccessDesc {
        location: location(device),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: mapped above with that size, `access` is one description.
    let code = unsafe { (library.cuMemSetAccess)(address, size, &raw const access, 1) };
    if let Err(error) = library.check("cuMemSetAccess", code) {
        // SAFETY: mapped above; nobody has the address. The error that counts is the first.
        let _ = unsafe { unmap(library, address, bytes) };
        return Err(error);
    }
    Ok(address)
}

/// Undoes [`map`]: as much of it as is possible, and the first failure.
///
/// # Safety
/// `address` came from it with as many bytes, and nobody uses it any more.
pub(super) unsafe fn unmap(library: &Library, address: u64, bytes: u64) -> Result<()> {
    let size = bytes as usize;
    // SAFETY: mapped by `map`, by this function's requirement.
    let unmapped = library.check("cuMemUnmap", unsafe { (library.cuMemUnmap)(address, size) });
    // SAFETY: reserved by `map`.
    let freed = library.check("cuMemAddressFree", unsafe {
        (library.cuMemAddressFree)(address, size)
    });
    unmapped.and(freed)
}

/// What another process imports: a fabric handle where there are such, since it serves both this
/// host and others; else a file descriptor. `handles` are the types that the memory was created
/// with.
pub(super) fn export(
    library: &Library,
    handle: sys::CUmemGenericAllocationHandle,
    handles: u32,
) -> Result<Export> {
    if handles & FABRIC != 0 {
        let mut fabric = [0_u8; HANDLE_BYTES];
        let out = fabric.as_mut_ptr().cast::<c_void>();
        // SAFETY: a fabric handle has HANDLE_BYTES bytes, which are writable.
        library.check("cuMemExportToShareableHandle", unsafe {
            (library.cuMemExportToShareableHandle)(
                out,
                handle,
                HandleType::CU_MEM_HANDLE_TYPE_FABRIC,
                0,
            )
        })?;
        return Ok(Export::Fabric(fabric));
    }
    if handles & DESCRIPTOR == 0 {
        return Err(error::driver(
            "cuMemExportToShareableHandle",
            "the memory was created without a handle for other processes: its allocator must ask \
                for \
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR or CU_MEM_HANDLE_TYPE_FABRIC",
        ));
    }
    let mut descriptor: c_int = -1;
    let out = (&raw mut descriptor).cast::<c_void>();
    let kind = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: a descriptor is an int, which is writable.
    library.check("cuMemExportToShareableHandle", unsafe {
        (library.cuMemExportToShareableHandle)(out, handle, kind, 0)
    })?;
    if descriptor < 0 {
        return Err(error::driver(
            "cuMemExportToShareableHandle",
            "the driver gave no file descriptor",
        ));
    }
    // SAFETY: the descriptor is fresh, and ours to close.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // SAFETY: an open descriptor. A child that inherits it would keep the memory; nothing else is
    // lost if this fails.
    unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    Ok(Export::Descriptor(descriptor))
}

/// The memory (or multicast object) behind what another process exported.
pub(super) fn import<'a>(library: &'a Library, import: Import<'_>) -> Result<Physical<'a>> {
    let mut fabric;
    let (pointer, kind) = match import {
        Import::Descriptor(descriptor) => (
            core::ptr::without_provenance_mut(descriptor.as_raw_fd() as usize),
            HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        ),
        Import::Fabric(handle) => {
            fabric = *handle;
            (
                fabric.as_mut_ptr().cast::<c_void>(),
                HandleType::CU_MEM_HANDLE_TYPE_FABRIC,
            )
        }
        Import::Ipc(_) => {
            return Err(error::driver(
                "cuMemImportFromShareableHandle",
                "an IPC handle is not one of virtual memory",
            ));
        }
    };
    let mut handle = 0;
    // SAFETY: `handle` is writable; `pointer` is a descriptor as a number, or a fabric handle.
    let code = unsafe { (library.cuMemImportFromShareableHandle)(&raw mut handle, pointer, kind) };
    library
        .check("cuMemImportFromShareableHandle", code)
        .map_err(|error| {
            error::with(error, "the peer may have released the memory, or has ended")
        })?;
    Ok(Physical::new(library, handle))
}

/// Whether memory with these types of handles, one of them fabric handles, can be created, exported
/// and imported: the device may have them and the process no right to them (no IMEX channel).
pub(super) fn probe_fabric(
    library: &Library,
    device: sys::CUdevice,
    handles: u32,
    rdma: bool,
) -> bool {
    let probe = || -> Result<()> {
        let bytes = granularity(library, device, handles, rdma)?;
        let properties = properties(device, handles, rdma);
        let physical = Physical::create(library, &properties, bytes)?;
        if let Export::Fabric(handle) = export(library, physical.handle(), handles)? {
            import(library, Import::Fabric(&handle))?;
        }
        Ok(())
    };
    match probe() {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(%error, "no fabric handles");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_types_of_handles_are_one_number() {
        assert_eq!((DESCRIPTOR, FABRIC), (1, 8));
        let properties = properties(3, DESCRIPTOR | FABRIC, true);
        assert_eq!(properties.requestedHandleTypes.0, 9);
        assert_eq!(properties.location.id, 3);
        assert_eq!(properties.allocFlags.gpuDirectRDMACapable, 1);
        assert_eq!(size_of::<sys::CUmemFabricHandle>(), HANDLE_BYTES);
        assert_eq!(size_of::<sys::CUipcMemHandle>(), HANDLE_BYTES);
    }
}
