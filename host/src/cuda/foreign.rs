//! Memory that another library allocated.

use core::ffi::c_void;
use core::mem::MaybeUninit;

use super::context::Cuda;
use super::error;
use super::library::Library;
use super::memory::{ipc_handle, range};
use super::virtual_memory::{self, DESCRIPTOR, FABRIC, Physical};
use crate::Result;
use crate::gpu::driver::Export;

impl Cuda {
    /// Exports the allocation that contains `address` for another process. Also returns the base
    /// address and the size of the allocation.
    ///
    /// Memory from `cuMemAlloc` is exported by IPC. Memory from the virtual memory API has no IPC
    /// handle. For such memory, this function exports the physical allocation as a file descriptor
    /// or as a fabric handle, if the allocator requested such a handle type. The returned base and
    /// size then describe the physical allocation.
    pub(super) fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)> {
        let library = self.relaxed()?;
        let (base, bytes) = range(&library, address).map_err(|error| {
            error::with(error, &format!("{address:#x} is not memory of this device"))
        })?;
        let refused = match ipc_handle(&library, base) {
            Ok(handle) => return Ok((Export::Ipc(handle, 0), base, bytes)),
            Err(error) => error,
        };
        let Some(physical) = retain(&library, address) else {
            return Err(error::with(
                refused,
                "neither cuMemAlloc nor cuMemCreate allocated this memory: memory of a pool \
                 (cudaMallocAsync) or of cudaMallocManaged cannot be shared; allocate it with \
                 Fusewire or with cudaMalloc",
            ));
        };
        let mut handles = handles(&library, &physical)?;
        if handles & DESCRIPTOR != 0 && !self.properties.fabric {
            handles &= !FABRIC;
        }
        let export = virtual_memory::export(&library, physical.handle(), handles)?;
        Ok((export, base, bytes))
    }
}

/// Returns the physical allocation at an address, if the address was mapped by the virtual memory
/// API.
fn retain(library: &Library, address: u64) -> Option<Physical<'_>> {
    let mut handle = 0;
    let pointer = core::ptr::without_provenance_mut::<c_void>(address as usize);
    // SAFETY: `handle` is writable. The library does not access the memory at the address and
    // returns an error if nothing is mapped there.
    let code = unsafe { (library.cuMemRetainAllocationHandle)(&raw mut handle, pointer) };
    (code == error::SUCCESS).then(|| Physical::new(library, handle))
}

/// Returns the bit mask of the handle types that the allocator requested for a physical allocation.
fn handles(library: &Library, physical: &Physical<'_>) -> Result<u32> {
    let mut properties = MaybeUninit::uninit();
    // SAFETY: `properties` is writable, and the handle is live.
    library.check("cuMemGetAllocationPropertiesFromHandle", unsafe {
        (library.cuMemGetAllocationPropertiesFromHandle)(properties.as_mut_ptr(), physical.handle())
    })?;
    // SAFETY: the call above has written the properties. The other fields are enumerations and may
    // have values that the bindings do not know, so only this integer field is read.
    Ok(unsafe { (&raw const (*properties.as_ptr()).requestedHandleTypes).read() }.0)
}
