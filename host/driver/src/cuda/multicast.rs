//! Multicast objects (NVLink SHARP). A store to the mapping of a multicast object writes the memory
//! that each device has bound to the object.

use core::ffi::c_ulonglong;

use cudarc::driver::sys;

use super::context::Cuda;
use super::error;
use super::library::Library;
use super::memory::round_up;
use super::virtual_memory;
use crate::Result;
use crate::gpu::{Export, Import, MulticastDriver, Origin, RawMemory, RawMulticast};

/// Returns the properties of a multicast object as the library's structure.
fn properties(bytes: u64, devices: u32, handles: u32) -> sys::CUmulticastObjectProp {
    sys::CUmulticastObjectProp {
        numDevices: devices,
        size: bytes as usize,
        handleTypes: c_ulonglong::from(handles),
        flags: 0,
    }
}

/// Returns the minimum granularity of the size of a multicast object and of the ranges bound to it.
/// The recommended granularity may be many times larger and would enlarge every window.
pub(super) fn granularity(
    library: &Library,
    bytes: u64,
    devices: u32,
    handles: u32,
) -> Result<u64> {
    let properties = properties(bytes, devices, handles);
    let mut granularity = 0_usize;
    let function = library.cuMulticastGetGranularity.need()?;
    // SAFETY: `granularity` is writable, and every field of `properties` is initialised.
    library.check("cuMulticastGetGranularity", unsafe {
        function(
            &raw mut granularity,
            &raw const properties,
            sys::CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM,
        )
    })?;
    Ok(granularity as u64)
}

impl Cuda {
    /// Fails if the device does not support multicast.
    fn has_multicast(&self) -> Result<()> {
        if self.properties.multicast {
            Ok(())
        } else {
            Err(self.no_multicast())
        }
    }

    /// Unbinds this device's memory. The library requires the same range as for binding.
    fn unbind(&self, library: &Library, multicast: &RawMulticast) -> Result<()> {
        let function = library.cuMulticastUnbind.need()?;
        // SAFETY: `bind_multicast` bound this range.
        library.check("cuMulticastUnbind", unsafe {
            function(multicast.handle, self.device, 0, multicast.bytes as usize)
        })
    }
}

impl MulticastDriver for Cuda {
    /// Creates a multicast object.
    fn create_multicast(&self, bytes: u64, devices: u32) -> Result<RawMulticast> {
        self.has_multicast()?;
        let library = self.relaxed()?;
        let bytes = round_up(bytes, self.granularity)?;
        let granularity = granularity(&library, bytes, devices, self.handles)?;
        let bytes = round_up(bytes, granularity)?;
        let properties = properties(bytes, devices, self.handles);
        let function = library.cuMulticastCreate.need()?;
        let mut handle = 0;
        // SAFETY: `handle` is writable, and every field of `properties` is initialised.
        library.check("cuMulticastCreate", unsafe {
            function(&raw mut handle, &raw const properties)
        })?;
        Ok(RawMulticast { handle, bytes })
    }

    /// Exports a multicast object for another process.
    fn export_multicast(&self, multicast: &RawMulticast) -> Result<Export> {
        self.has_multicast()?;
        let library = self.relaxed()?;
        virtual_memory::export(&library, multicast.handle, self.handles)
    }

    /// Imports a multicast object that another process exported.
    fn import_multicast(&self, import: Import<'_>, bytes: u64) -> Result<RawMulticast> {
        self.has_multicast()?;
        let library = self.relaxed()?;
        let handle = virtual_memory::import(&library, import)?.keep();
        Ok(RawMulticast { handle, bytes })
    }

    /// Adds this device to a multicast object.
    fn join_multicast(&self, multicast: &RawMulticast) -> Result<()> {
        self.has_multicast()?;
        let library = self.relaxed()?;
        let function = library.cuMulticastAddDevice.need()?;
        // SAFETY: `multicast.handle` is a live handle (documentation of the module `gpu`).
        library.check("cuMulticastAddDevice", unsafe {
            function(multicast.handle, self.device)
        })
    }

    /// Binds memory to the object, maps the object, and returns the address of the mapping.
    fn bind_multicast(&self, multicast: &RawMulticast, memory: &RawMemory) -> Result<u64> {
        self.has_multicast()?;
        let library = self.relaxed()?;
        if memory.origin != Origin::Virtual || memory.bytes < multicast.bytes {
            return Err(error::driver(
                "cuMulticastBindMem",
                format!(
                    "an object of {} bytes needs as much memory of this device that was allocated \
                     as shared; this memory has {} bytes and is {:?}",
                    multicast.bytes, memory.bytes, memory.origin
                ),
            ));
        }
        let size = multicast.bytes as usize;
        let bind = library.cuMulticastBindMem.need()?;
        // SAFETY: both handles are live (documentation of the module `gpu`), and `memory` has
        // at least `size` bytes.
        let code = unsafe { bind(multicast.handle, 0, memory.handle, 0, size, 0) };
        library
            .check("cuMulticastBindMem", code)
            .map_err(|error| error::with(error, "all devices must join before memory is bound"))?;
        let alignment = self.granularity;
        let mapped = virtual_memory::map(
            &library,
            self.device,
            multicast.handle,
            multicast.bytes,
            alignment,
        );
        if mapped.is_err() {
            // A second error is ignored, because the first error is returned.
            let _ = self.unbind(&library, multicast);
        }
        mapped
    }

    /// Unmaps, unbinds and releases the object. Continues after a failure and returns the first
    /// error.
    ///
    /// # Safety
    /// The preconditions of [`Driver::release_multicast`].
    unsafe fn release_multicast(&self, multicast: RawMulticast, address: u64) -> Result<()> {
        self.has_multicast()?;
        let library = self.relaxed()?;
        let mut result = Ok(());
        if address != 0 {
            // SAFETY: `bind_multicast` mapped the object at `address`, and the caller guarantees
            // that the object is not in use.
            let unmapped = unsafe { virtual_memory::unmap(&library, address, multicast.bytes) };
            let unbound = self.unbind(&library, &multicast);
            result = unmapped.and(unbound);
        }
        // SAFETY: the caller guarantees that `create_multicast` or `import_multicast` returned the
        // handle and that it is released once.
        let released = library.check("cuMemRelease", unsafe {
            (library.cuMemRelease)(multicast.handle)
        });
        result.and(released)
    }
}
