//! Physical memory with exportable handles, and its mapping to virtual addresses.

use core::ffi::{c_int, c_uchar, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys::{self, CUmemAllocationHandleType as HandleType};

use super::library::Library;
use super::{error, memory};
use crate::Result;
use crate::gpu::{Export, HANDLE_BYTES, Import};

/// Handle type of memory that can be exported as a file descriptor.
pub(super) const DESCRIPTOR: u32 = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
/// Handle type of memory that can be exported as a fabric handle.
pub(super) const FABRIC: u32 = HandleType::CU_MEM_HANDLE_TYPE_FABRIC.0;

/// Returns the properties of device memory that can be exported by the given handle types.
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

/// Returns the memory location of a device.
const fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

/// Returns the allocation granularity that the library recommends, in bytes.
pub(super) fn granularity(
    library: &Library,
    device: sys::CUdevice,
    handles: u32,
    rdma: bool,
) -> Result<u64> {
    let properties = properties(device, handles, rdma);
    let mut granularity = 0_usize;
    // SAFETY: `granularity` is writable, and every field of `properties` is initialised.
    library.check("cuMemGetAllocationGranularity", unsafe {
        (library.cuMemGetAllocationGranularity)(
            &raw mut granularity,
            &raw const properties,
            sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
    })?;
    Ok(granularity as u64)
}

/// Handle of physical memory or of a multicast object. The handle is released on drop.
pub(super) struct Physical<'a> {
    library: &'a Library,
    handle: sys::CUmemGenericAllocationHandle,
}

impl<'a> Physical<'a> {
    /// Takes ownership of a handle.
    pub(super) const fn new(
        library: &'a Library,
        handle: sys::CUmemGenericAllocationHandle,
    ) -> Self {
        Self { library, handle }
    }

    /// Allocates physical memory.
    pub(super) fn create(
        library: &'a Library,
        properties: &sys::CUmemAllocationProp,
        bytes: u64,
    ) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: `handle` is writable, and every field of `properties` is initialised.
        let code = unsafe { (library.cuMemCreate)(&raw mut handle, bytes as usize, properties, 0) };
        memory::check_sized(library, "cuMemCreate", code, bytes)?;
        Ok(Self::new(library, handle))
    }

    /// Returns the handle.
    pub(super) const fn handle(&self) -> sys::CUmemGenericAllocationHandle {
        self.handle
    }

    /// Returns the handle without releasing it. The caller becomes its owner.
    pub(super) const fn keep(self) -> sys::CUmemGenericAllocationHandle {
        let handle = self.handle;
        core::mem::forget(self);
        handle
    }
}

impl Drop for Physical<'_> {
    fn drop(&mut self) {
        // SAFETY: a `Physical` owns its handle. An error is ignored, because `drop` cannot return
        // it.
        let _ = unsafe { (self.library.cuMemRelease)(self.handle) };
    }
}

/// Maps the whole allocation of a handle at a new address. The device can read and write the
/// mapping.
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
    // SAFETY: the address range was reserved above, and nothing is mapped in it.
    let code = unsafe { (library.cuMemMap)(address, size, 0, handle, 0) };
    if let Err(error) = library.check("cuMemMap", code) {
        // SAFETY: the address range was reserved above with the same size. A second error is
        // ignored, because the first error is returned.
        let _ = unsafe { (library.cuMemAddressFree)(address, size) };
        return Err(error::with(error, &format!("{bytes} bytes")));
    }
    let access = sys::CUmemAccessDesc {
        location: location(device),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the range was mapped above with the same size, and the count 1 matches the single
    // `access` descriptor.
    let code = unsafe { (library.cuMemSetAccess)(address, size, &raw const access, 1) };
    if let Err(error) = library.check("cuMemSetAccess", code) {
        // SAFETY: the range was mapped above, and no other code has its address. A second error is
        // ignored, because the first error is returned.
        let _ = unsafe { unmap(library, address, bytes) };
        return Err(error);
    }
    Ok(address)
}

/// Unmaps memory that [`map`] mapped. Continues after a failure and returns the first error.
///
/// # Safety
/// [`map`] must have returned `address` for `bytes` bytes, and the mapping must not be in use.
pub(super) unsafe fn unmap(library: &Library, address: u64, bytes: u64) -> Result<()> {
    let size = bytes as usize;
    // SAFETY: the caller guarantees that `map` mapped `size` bytes at `address`.
    let unmapped = library.check("cuMemUnmap", unsafe { (library.cuMemUnmap)(address, size) });
    // SAFETY: `map` reserved this address range with the same size.
    let freed = library.check("cuMemAddressFree", unsafe {
        (library.cuMemAddressFree)(address, size)
    });
    unmapped.and(freed)
}

/// Exports a handle for another process. `handles` is the bit mask of the handle types with which
/// the memory was created. If `handles` contains fabric handles, the export is a fabric handle,
/// which is valid on this host and on other hosts. Otherwise the export is a file descriptor.
pub(super) fn export(
    library: &Library,
    handle: sys::CUmemGenericAllocationHandle,
    handles: u32,
) -> Result<Export> {
    if handles & FABRIC != 0 {
        let mut fabric = [0_u8; HANDLE_BYTES];
        let out = fabric.as_mut_ptr().cast::<c_void>();
        // SAFETY: a fabric handle has `HANDLE_BYTES` bytes, the size of the writable buffer.
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
            "the memory was created without a handle for other processes: its allocator must \
             request CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR or CU_MEM_HANDLE_TYPE_FABRIC",
        ));
    }
    let mut descriptor: c_int = -1;
    let out = (&raw mut descriptor).cast::<c_void>();
    let kind = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: for this handle type the library writes an `int`, and `descriptor` is a writable
    // `int`.
    library.check("cuMemExportToShareableHandle", unsafe {
        (library.cuMemExportToShareableHandle)(out, handle, kind, 0)
    })?;
    if descriptor < 0 {
        return Err(error::driver(
            "cuMemExportToShareableHandle",
            "the driver returned no file descriptor",
        ));
    }
    // SAFETY: the call returned a new descriptor, and no other code owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // SAFETY: `descriptor` is open, and the call accesses no memory. If the call fails, child
    // processes inherit the descriptor and keep the memory allocated.
    unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) };
    Ok(Export::Descriptor(descriptor))
}

/// Imports the memory (or multicast object) that another process exported.
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
                "an IPC handle does not refer to virtual memory",
            ));
        }
    };
    let mut handle = 0;
    // SAFETY: `handle` is writable. `pointer` is the integer value of a descriptor or points to a
    // fabric handle, as `kind` requires.
    let code = unsafe { (library.cuMemImportFromShareableHandle)(&raw mut handle, pointer, kind) };
    library
        .check("cuMemImportFromShareableHandle", code)
        .map_err(|error| error::with(error, "the peer may have released the memory or ended"))?;
    Ok(Physical::new(library, handle))
}

/// Returns true if this process can create, export and import memory with the handle types in
/// `handles`, which must include fabric handles. A process without an IMEX channel has no
/// permission for fabric handles, even if the device supports them.
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
