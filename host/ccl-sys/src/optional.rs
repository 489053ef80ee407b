//! Optional functions of a communicator, which some libraries lack.

use core::ffi::c_void;

use crate::sys::ncclDataType_t;
use crate::{Comm, Library, Result, Stream, result};

impl Comm {
    /// Exchanges `count` elements between every pair of ranks.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], [`crate::Error::Call`], [`crate::Error::Argument`].
    ///
    /// # Safety
    /// The preconditions of [`Comm::all_gather`]; both buffers hold `count` elements per rank.
    pub unsafe fn all_to_all(
        &self,
        send: *const c_void,
        recv: *mut c_void,
        count: usize,
        dtype: ncclDataType_t,
        stream: Stream,
    ) -> Result<()> {
        const NAME: &str = "ncclAlltoAll";
        let table = self.library.as_raw();
        let all_to_all = table.all_to_all.ok_or_else(|| self.lacks(NAME))?;
        drop(self.alive(NAME)?);
        // SAFETY: the caller passes valid buffers and a valid stream; the library allows an abort
        // during its operations.
        self.check(NAME, unsafe {
            all_to_all(send, recv, count, dtype, self.raw, stream)
        })
    }

    /// Registers memory that operations will use often. Returns a handle.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], [`crate::Error::Call`], [`crate::Error::Argument`].
    ///
    /// # Safety
    /// Until [`Comm::deregister`] is called, `buffer` holds `bytes` bytes in memory that the
    /// library can access.
    pub unsafe fn register(&self, buffer: *mut c_void, bytes: usize) -> Result<*mut c_void> {
        const NAME: &str = "ncclCommRegister";
        let table = self.library.as_raw();
        let register = table.comm_register.ok_or_else(|| self.lacks(NAME))?;
        let _live = self.alive(NAME)?;
        let mut handle = core::ptr::null_mut();
        // SAFETY: the handle is live while `_live` is locked; the caller passes valid memory.
        self.check(NAME, unsafe {
            register(self.raw, buffer, bytes, &raw mut handle)
        })?;
        Ok(handle)
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], [`crate::Error::Call`], [`crate::Error::Argument`].
    ///
    /// # Safety
    /// `handle` came from [`Comm::register`] of this communicator and was not deregistered.
    pub unsafe fn deregister(&self, handle: *mut c_void) -> Result<()> {
        const NAME: &str = "ncclCommDeregister";
        let table = self.library.as_raw();
        let deregister = table.comm_deregister.ok_or_else(|| self.lacks(NAME))?;
        let _live = self.alive(NAME)?;
        // SAFETY: the communicator is live while `_live` is locked. The caller passes a registered
        // handle.
        self.check(NAME, unsafe { deregister(self.raw, handle) })
    }
}

/// Memory on the current device, allocated by the library. Freed on drop.
#[derive(Debug)]
pub struct Memory {
    library: Library,
    at: *mut c_void,
}

// SAFETY: device memory is not bound to the thread that allocated it.
unsafe impl Send for Memory {}
// SAFETY: no method reads or writes the memory.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates `bytes` bytes on the thread's current device.
    ///
    /// # Errors
    /// [`crate::Error::Unsupported`], [`crate::Error::Call`].
    pub fn new(library: Library, bytes: usize) -> Result<Self> {
        const NAME: &str = "ncclMemAlloc";
        let table = library.as_raw();
        let (Some(allocate), Some(_)) = (table.mem_alloc, table.mem_free) else {
            return Err(crate::Error::Unsupported {
                symbol: NAME,
                version: library.version(),
            });
        };
        let mut at = core::ptr::null_mut();
        // SAFETY: `at` is writable.
        result::check(table, NAME, unsafe { allocate(&raw mut at, bytes) })?;
        Ok(Self { library, at })
    }

    /// Returns the address on the device.
    pub const fn as_ptr(&self) -> *mut c_void {
        self.at
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(free) = self.library.as_raw().mem_free {
            // SAFETY: `at` was allocated by the same library, and is freed only here.
            let _ = unsafe { free(self.at) };
        }
    }
}
