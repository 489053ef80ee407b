//! Memory that another library allocated.

use core::ffi::c_void;
use core::mem::MaybeUninit;

use super::error;
use super::library::Library;
use super::virtual_memory::Physical;
use crate::Result;

/// Returns the physical allocation at an address, if the address was mapped by the virtual memory
/// API.
pub(super) fn retain(library: &Library, address: u64) -> Option<Physical<'_>> {
    let mut handle = 0;
    let pointer = core::ptr::without_provenance_mut::<c_void>(address as usize);
    // SAFETY: `handle` is writable. The library does not access the memory at the address and
    // returns an error if nothing is mapped there.
    let code = unsafe { (library.cuMemRetainAllocationHandle)(&raw mut handle, pointer) };
    (code == error::SUCCESS).then(|| Physical::new(library, handle))
}

/// Returns the bit mask of the handle types that the allocator requested for a physical allocation.
pub(super) fn handles(library: &Library, physical: &Physical<'_>) -> Result<u32> {
    let mut properties = MaybeUninit::uninit();
    // SAFETY: `properties` is writable, and the handle is live.
    library.check("cuMemGetAllocationPropertiesFromHandle", unsafe {
        (library.cuMemGetAllocationPropertiesFromHandle)(properties.as_mut_ptr(), physical.handle())
    })?;
    // SAFETY: the call above has written the properties. The other fields are enumerations and may
    // have values that the bindings do not know, so only this integer field is read.
    Ok(unsafe { (&raw const (*properties.as_ptr()).requestedHandleTypes).read() }.0)
}
