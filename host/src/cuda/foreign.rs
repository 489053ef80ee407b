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
    /// What another process imports, base and bytes of the allocation.
    ///
    /// Memory of `cuMemAlloc` goes by IPC. Virtual memory has no IPC handle; its physical piece
    /// goes by descriptor or fabric handle where its allocator asked for one, and then base and
    /// bytes are those of the piece.
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
                "neither cuMemAlloc nor cuMemCreate made this memory: memory of a pool \
                    (cudaMallocAsync) or of \
                 cudaMallocManaged cannot be shared; allocate it by this library, or with cudaMalloc",
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

/// The physical memory at an address, where it is virtual memory.
fn retain(library: &Library, address: u64) -> Option<Physical<'_>> {
    let mut handle = 0;
    let pointer = core::ptr::without_provenance_mut::<c_void>(address as usize);
    // SAFETY: `handle` is writable; an address without a mapping is refused, not accessed.
    let code = unsafe { (library.cuMemRetainAllocationHandle)(&raw mut handle, pointer) };
    (code == error::SUCCESS).then(|| Physical::new(library, handle))
}

/// The types of handles that memory was created with.
fn handles(library: &Library, physical: &Physical<'_>) -> Result<u32> {
    let mut properties = MaybeUninit::uninit();
    // SAFETY: `properties` are writable, the handle is live.
    library.check("cuMemGetAllocationPropertiesFromHandle", unsafe {
        (library.cuMemGetAllocationPropertiesFromHandle)(properties.as_mut_ptr(), physical.handle())
    })?;
    // SAFETY: written above. The other fields are enumerations that may hold values unknown to the
    // bindings, so only this one, a plain number, is read.
    Ok(unsafe { (&raw const (*properties.as_ptr()).requestedHandleTypes).read() }.0)
}
