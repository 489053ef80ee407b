//! Conversion of HIP status codes to errors that contain the name, the description and a remedy.

use core::ffi::{CStr, c_char};

use super::bindings::{self as hip, hipError_t};
use super::library::{Functions, LIBRARY};
use crate::{Error, Result};

impl Functions {
    /// Converts the status of `call` to a result.
    ///
    /// The runtime stores the latest error of each thread for `hipGetLastError`. This function
    /// clears the stored error. Otherwise other code in the process, such as PyTorch after each
    /// launch, would attribute the error to its own calls.
    pub(super) fn check(&self, call: &'static str, status: hipError_t) -> Result<()> {
        if status == hip::SUCCESS {
            return Ok(());
        }
        Err(self.error(call, status))
    }

    /// Returns true if `status` is success, false if it is `hipErrorNotReady`, and an error
    /// otherwise.
    pub(super) fn ready(&self, call: &'static str, status: hipError_t) -> Result<bool> {
        if status == hip::ERROR_NOT_READY {
            self.forget();
            return Ok(false);
        }
        self.check(call, status).map(|()| true)
    }

    /// Clears the thread's latest error.
    pub(super) fn forget(&self) {
        // SAFETY: the function takes no arguments and only resets a thread-local variable.
        unsafe { (self.hipGetLastError)() };
    }

    fn error(&self, call: &'static str, status: hipError_t) -> Error {
        self.forget();
        // SAFETY: the function accepts any value.
        let name = unsafe { (self.hipGetErrorName)(status) };
        // SAFETY: the function accepts any value.
        let words = unsafe { (self.hipGetErrorString)(status) };
        driver_error(call, &describe(status, text(name), text(words)))
    }
}

/// Converts a constant string of the runtime. Returns `None` for a null pointer or invalid UTF-8.
fn text(pointer: *const c_char) -> Option<&'static str> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the strings of the runtime are zero-terminated constants, and the runtime stays
    // loaded.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().ok()
}

/// Creates an [`Error::Driver`] for the function `call`.
pub(super) fn driver_error(call: &'static str, detail: &str) -> Error {
    Error::Driver {
        library: LIBRARY,
        call,
        detail: detail.to_owned(),
    }
}

/// Formats the number of a status and, if known, the name, the description and a remedy.
fn describe(status: hipError_t, name: Option<&str>, words: Option<&str>) -> String {
    let mut out = format!("{} ({status})", name.unwrap_or("error"));
    if let Some(words) = words.filter(|words| Some(*words) != name) {
        out.push_str(": ");
        out.push_str(words);
    }
    if let Some(hint) = hint(status) {
        out.push_str("; ");
        out.push_str(hint);
    }
    out
}

/// Returns a remedy for the status, if the failure is a common one.
fn hint(status: hipError_t) -> Option<&'static str> {
    Some(match status {
        hip::ERROR_OUT_OF_MEMORY => {
            "free memory of this process or of others on the GPU (rocm-smi --showpids), or request \
             less"
        }
        hip::ERROR_NOT_INITIALIZED | hip::ERROR_NO_DEVICE | hip::ERROR_INVALID_DEVICE => {
            "check that the GPU is visible (HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES) and that \
             this user may open /dev/kfd and /dev/dri/renderD* (groups render and video)"
        }
        hip::ERROR_INVALID_CONFIGURATION => {
            "the launch has more threads in a block, or more shared memory, than the GPU allows"
        }
        hip::ERROR_INVALID_DEVICE_POINTER => {
            "the address is not memory that this process got from HIP, or the owner of an IPC \
             handle has ended or freed it; IPC also needs the amdgpu kernel driver on both sides"
        }
        hip::ERROR_INSUFFICIENT_DRIVER => "the amdgpu kernel driver is older than ROCm needs",
        hip::ERROR_INVALID_CONTEXT => {
            "an IPC handle cannot be opened by the process that created it; use the address itself"
        }
        hip::ERROR_INVALID_IMAGE | hip::ERROR_NO_BINARY | hip::ERROR_SHARED_OBJECT => {
            "the code object is not for this GPU; build one for its architecture \
             (fusewire-build build --target)"
        }
        hip::ERROR_ILLEGAL_ADDRESS | hip::ERROR_LAUNCH_FAILURE => {
            "a kernel failed, or was launched with more threads than it was compiled for; the \
             process cannot use the GPU any more after an illegal access"
        }
        hip::ERROR_COOPERATIVE_TOO_LARGE => {
            "not all blocks fit on the GPU at once: launch fewer, or with less shared memory"
        }
        hip::ERROR_CAPTURE_UNSUPPORTED | hip::ERROR_CAPTURE_INVALIDATED => {
            "a call that a capture forbids was made while a stream was captured (hipMemcpy, \
             hipMemset and hipDeviceSynchronize invalidate every capture of the process); end the \
             capture and begin again without that call"
        }
        hip::ERROR_CAPTURE_UNJOINED => {
            "a stream that joined the capture was not joined to it again: wait for its event first"
        }
        hip::ERROR_CAPTURE_WRONG_THREAD => "end the capture on the thread that began it",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_happened_and_what_to_do() {
        let text = describe(2, Some("hipErrorOutOfMemory"), Some("out of memory"));
        assert!(
            text.starts_with("hipErrorOutOfMemory (2): out of memory; free memory"),
            "{text}"
        );
        assert_eq!(
            driver_error("hipMalloc", &text).to_string(),
            format!("HIP: hipMalloc: {text}")
        );
    }

    #[test]
    fn unknown_errors_keep_their_number() {
        assert_eq!(describe(4711, None, None), "error (4711)");
        assert_eq!(describe(4711, Some("x"), Some("x")), "x (4711)");
    }

    #[test]
    fn strings_of_the_library_may_be_missing() {
        assert_eq!(text(core::ptr::null()), None);
        assert_eq!(text(c"hipSuccess".as_ptr()), Some("hipSuccess"));
        assert_eq!(text(c"\xff".as_ptr()), None);
    }
}
