//! Handle of an external backend: creation, calls and destruction.

use core::ffi::{CStr, c_char, c_void};
use core::fmt;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError};

use fusewire_backend_abi::{
    ABI_MINOR, CODE_ABORTED, CODE_INTERNAL, CODE_INVALID, CODE_OK, CODE_PEER, CODE_STORE,
    CODE_TIMEOUT, CODE_UNSUPPORTED, DEVICE_CPU, DEVICE_CUDA, DEVICE_HIP, FusewireBackendSetup,
    FusewireError,
};

use super::library::Library;
use super::store::StoreContext;
use crate::backend::{Setup, backend_error};
use crate::device::Device;
use crate::{Error, Result};

/// Maximum length of a library's message in bytes.
const MESSAGE_BYTES: usize = 2048;

/// This rank's part of a communicator of an external backend. Owns the library's handle.
pub(super) struct External {
    pub(super) name: String,
    pub(super) library: &'static Library,
    pub(super) handle: *mut c_void,
    pub(super) rank: u32,
    pub(super) size: u32,
    /// Locked during a call, because calls with one handle must not overlap.
    pub(super) calls: Mutex<()>,
    /// Store that the library uses through the handle. `drop` destroys the handle before the fields
    /// are dropped, so the store outlives the handle.
    pub(super) store: Arc<StoreContext>,
}

// SAFETY: the table's rules allow calls from any thread, one at a time, and `calls` ensures that
// calls do not overlap. `supports`, `is_bitwise` and `abort` may be called at any time.
unsafe impl Send for External {}
// SAFETY: the rules that make the handle `Send` also allow shared use.
unsafe impl Sync for External {}

impl fmt::Debug for External {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("External")
            .field("name", &self.name)
            .field("path", &self.library.path)
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl Drop for External {
    fn drop(&mut self) {
        if let Some(destroy) = self.library.table.destroy {
            // SAFETY: the handle is live, and no other call uses it afterwards.
            unsafe { destroy(self.handle) };
        }
    }
}

/// Returns an error with the meaning of `code` and the message in `buffer`.
fn failure(name: &str, operation: &'static str, code: i32, buffer: &[u8]) -> Error {
    let said = CStr::from_bytes_until_nul(buffer)
        .map_or(String::new(), |text| text.to_string_lossy().into_owned());
    let kind = match code {
        CODE_TIMEOUT => "timed out",
        CODE_PEER => "a peer failed",
        CODE_ABORTED => "aborted",
        CODE_UNSUPPORTED => "not supported",
        CODE_INVALID => "invalid argument",
        CODE_STORE => "the store failed",
        CODE_INTERNAL => "a bug in the backend",
        _ => "failed",
    };
    let said = if said.is_empty() {
        "no message from the backend".to_owned()
    } else {
        said
    };
    backend_error(name, operation, format!("{kind} (code {code}): {said}"))
}

/// Converts text to a C string. Returns an error if the text contains a zero byte.
fn c_string(name: &str, what: &str, value: &str) -> Result<CString> {
    CString::new(value).map_err(|_| {
        let detail = format!("{what} \"{}\" has a zero byte", value.escape_debug());
        backend_error(name, "create", detail)
    })
}

impl External {
    /// Creates this rank's handle. All ranks call this function.
    pub(super) fn create(name: &str, library: &'static Library, setup: &Setup) -> Result<Self> {
        let store = StoreContext::new(Arc::clone(&setup.store));
        let communicator = c_string(name, "the name", &setup.name)?;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (key, value) in &setup.options.hints {
            keys.push(c_string(name, "a hint", key)?);
            values.push(c_string(name, "a hint's value", value)?);
        }
        let pointers = |texts: &[CString]| -> Vec<*const c_char> {
            texts.iter().map(|text| text.as_ptr()).collect()
        };
        let (keys_at, values_at) = (pointers(&keys), pointers(&values));
        let list = |pointers: &[*const c_char]| match pointers {
            [] => core::ptr::null(),
            _ => pointers.as_ptr(),
        };
        let given = FusewireBackendSetup {
            struct_bytes: size_of::<FusewireBackendSetup>() as u32,
            abi_minor: ABI_MINOR,
            rank: setup.rank,
            size: setup.size,
            device: match setup.device {
                Device::Cpu => DEVICE_CPU,
                Device::Cuda(_) => DEVICE_CUDA,
                Device::Hip(_) => DEVICE_HIP,
            },
            device_index: match setup.device {
                Device::Cpu => 0,
                Device::Cuda(ordinal) | Device::Hip(ordinal) => ordinal,
            },
            timeout_ns: nanoseconds(setup.options.timeout),
            name: communicator.as_ptr(),
            hint_count: keys_at.len(),
            hint_keys: list(&keys_at),
            hint_values: list(&values_at),
            store: store.table(),
        };
        let mut buffer = [0u8; MESSAGE_BYTES];
        let mut error = FusewireError::new(&mut buffer);
        let create = library.table.create;
        let create = create.ok_or_else(|| lacks(name, "create"))?;
        // SAFETY: all pointers in `given` refer to live memory, and `library::open` has checked the
        // library's table.
        let handle = unsafe { create(&raw const given, &raw mut error) };
        if handle.is_null() {
            return Err(failure(name, "create", error.code, &buffer));
        }
        Ok(Self {
            name: name.to_owned(),
            library,
            handle,
            rank: setup.rank,
            size: setup.size,
            calls: Mutex::default(),
            store,
        })
    }

    /// Runs `call` with the handle while `calls` is locked, and converts a failure code to an
    /// error.
    pub(super) fn call(
        &self,
        operation: &'static str,
        call: impl FnOnce(*mut c_void, *mut FusewireError) -> i32,
    ) -> Result<()> {
        let mut buffer = [0u8; MESSAGE_BYTES];
        let mut error = FusewireError::new(&mut buffer);
        let code = {
            let _alone = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            call(self.handle, &raw mut error)
        };
        if code == CODE_OK {
            return Ok(());
        }
        Err(failure(&self.name, operation, code, &buffer))
    }
}

pub(super) fn lacks(name: &str, function: &'static str) -> Error {
    backend_error(name, function, "the table has no such function")
}

pub(super) fn nanoseconds(timeout: core::time::Duration) -> u64 {
    u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX).max(1)
}
