//! Multicast objects: one address for the same memory of several GPUs.

use super::{DeviceDriver, Export, Import, RawMemory, RawMulticast};
use crate::{Error, Result};

/// Multicast objects. The default implementations return an error, for devices without multicast.
pub trait MulticastDriver: DeviceDriver {
    /// Creates a multicast object of at least `bytes` bytes for `devices` devices.
    ///
    /// # Errors
    /// `Error::Driver`, also if the device has no multicast support.
    fn create_multicast(&self, bytes: u64, devices: u32) -> Result<RawMulticast> {
        let _ = (bytes, devices);
        Err(self.no_multicast())
    }

    /// Exports a multicast object. Another process passes the handle to
    /// [`MulticastDriver::import_multicast`].
    ///
    /// # Errors
    /// `Error::Driver`.
    fn export_multicast(&self, multicast: &RawMulticast) -> Result<Export> {
        let _ = multicast;
        Err(self.no_multicast())
    }

    /// Imports the multicast object of another process.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn import_multicast(&self, import: Import<'_>, bytes: u64) -> Result<RawMulticast> {
        let _ = (import, bytes);
        Err(self.no_multicast())
    }

    /// Adds this device to a multicast object. All devices must be added before any memory is
    /// bound.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn join_multicast(&self, multicast: &RawMulticast) -> Result<()> {
        let _ = multicast;
        Err(self.no_multicast())
    }

    /// Binds memory of this device to a multicast object at offset 0 and maps the object. Returns
    /// the address of the mapping.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn bind_multicast(&self, multicast: &RawMulticast, memory: &RawMemory) -> Result<u64> {
        let _ = (multicast, memory);
        Err(self.no_multicast())
    }

    /// Unbinds, unmaps and releases a multicast object. `address` is the result of
    /// `bind_multicast`, or 0 if nothing is bound.
    ///
    /// # Safety
    /// `multicast` must come from this driver, must not be in use, and must not have been released
    /// before.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn release_multicast(&self, multicast: RawMulticast, address: u64) -> Result<()> {
        let _ = (multicast, address);
        Err(self.no_multicast())
    }

    /// Returns the error for a device without multicast support.
    fn no_multicast(&self) -> Error {
        Error::Driver {
            library: self.library(),
            call: "multicast",
            detail: "this device has no multicast objects".to_owned(),
        }
    }
}
