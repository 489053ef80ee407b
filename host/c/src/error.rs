//! Error codes, the message of each thread's last failure, and the conversion of panics to codes.

use core::cell::RefCell;
use core::ffi::{CStr, c_char, c_int};
use core::panic::AssertUnwindSafe;
use std::ffi::CString;
use std::panic::catch_unwind;

use fusewire::{Error, FailureKind, store};

/// Codes that functions return: `FUSEWIRE_OK`, or the kind of failure.
pub mod codes {
    use core::ffi::c_int;

    /// Success.
    pub const FUSEWIRE_OK: c_int = 0;
    /// An argument is invalid; no data was moved.
    pub const FUSEWIRE_ERROR_ARGUMENT: c_int = 1;
    /// A wait timed out.
    pub const FUSEWIRE_ERROR_TIMEOUT: c_int = 2;
    /// Ranks called different operations, sizes or types.
    pub const FUSEWIRE_ERROR_MISMATCH: c_int = 3;
    /// A rank's process has ended.
    pub const FUSEWIRE_ERROR_PEER: c_int = 4;
    /// The communicator was aborted.
    pub const FUSEWIRE_ERROR_ABORTED: c_int = 5;
    /// A kernel stopped for another reason.
    pub const FUSEWIRE_ERROR_FAILED: c_int = 6;
    /// Rank, size or store is unknown, or the store failed.
    pub const FUSEWIRE_ERROR_BOOTSTRAP: c_int = 7;
    /// No communicator or window was created, or the communicator has ended.
    pub const FUSEWIRE_ERROR_COMMUNICATOR: c_int = 8;
    /// A device does not exist, or its driver failed.
    pub const FUSEWIRE_ERROR_DEVICE: c_int = 9;
    /// Memory could not be allocated, mapped or shared.
    pub const FUSEWIRE_ERROR_MEMORY: c_int = 10;
    /// The call is not allowed in the capture state of the stream.
    pub const FUSEWIRE_ERROR_CAPTURE: c_int = 11;
    /// Another library failed.
    pub const FUSEWIRE_ERROR_BACKEND: c_int = 12;
    /// A bounded wait timed out before the work was complete.
    pub const FUSEWIRE_ERROR_NOT_DONE: c_int = 13;
    /// Another failure.
    pub const FUSEWIRE_ERROR_OTHER: c_int = 14;
    /// A bug of the library: it panicked.
    pub const FUSEWIRE_ERROR_INTERNAL: c_int = 15;
}

/// A failure as C code receives it: code and message.
#[derive(Debug)]
pub(crate) struct Failure {
    code: c_int,
    message: String,
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::InvalidArgument { .. } => codes::FUSEWIRE_ERROR_ARGUMENT,
            Error::Timeout(_) | Error::Store(store::Error::Timeout { .. }) => {
                codes::FUSEWIRE_ERROR_TIMEOUT
            }
            Error::Mismatch(_) => codes::FUSEWIRE_ERROR_MISMATCH,
            Error::Failed(failure) => match failure.kind {
                FailureKind::Dead => codes::FUSEWIRE_ERROR_PEER,
                FailureKind::Abort => codes::FUSEWIRE_ERROR_ABORTED,
                _ => codes::FUSEWIRE_ERROR_FAILED,
            },
            Error::Store(_) | Error::Bootstrap { .. } => codes::FUSEWIRE_ERROR_BOOTSTRAP,
            Error::Communicator { .. } | Error::Ended { .. } => codes::FUSEWIRE_ERROR_COMMUNICATOR,
            Error::NoDevice { .. }
            | Error::Driver { .. }
            | Error::Image { .. }
            | Error::Launch { .. } => codes::FUSEWIRE_ERROR_DEVICE,
            Error::MemoryMap { .. } | Error::PeerSegment { .. } | Error::ShareDescriptor { .. } => {
                codes::FUSEWIRE_ERROR_MEMORY
            }
            Error::CaptureState { .. } => codes::FUSEWIRE_ERROR_CAPTURE,
            Error::Backend { .. } => codes::FUSEWIRE_ERROR_BACKEND,
            Error::StreamTimeout { .. } => codes::FUSEWIRE_ERROR_NOT_DONE,
            _ => codes::FUSEWIRE_ERROR_OTHER,
        };
        Self {
            code,
            message: error.to_string(),
        }
    }
}

/// Creates the failure for an invalid argument.
pub(crate) fn argument(operation: &str, detail: impl core::fmt::Display) -> Failure {
    Failure {
        code: codes::FUSEWIRE_ERROR_ARGUMENT,
        message: format!("{operation}: {detail}"),
    }
}

/// Creates the failure for a rendezvous that cannot start.
pub(crate) fn bootstrap(operation: &str, detail: impl core::fmt::Display) -> Failure {
    Failure {
        code: codes::FUSEWIRE_ERROR_BOOTSTRAP,
        message: format!("{operation}: {detail}"),
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

fn keep(message: String) {
    let mut bytes = message.into_bytes();
    bytes.retain(|byte| *byte != 0);
    let text = CString::new(bytes).unwrap_or_default();
    // `try_with` fails only while the thread ends, after its thread-local values were dropped. No
    // code reads the message then.
    let _ = LAST.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = text;
        }
    });
}

/// Runs a call and returns its code. Stores the message of a failure for this thread. Converts a
/// panic to a failure.
pub(crate) fn guard(call: impl FnOnce() -> Outcome) -> c_int {
    let ended = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let said = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        // The payload is leaked, because dropping it may panic.
        core::mem::forget(panic);
        Err(Failure {
            code: codes::FUSEWIRE_ERROR_INTERNAL,
            message: format!("the library panicked, which is a defect of it: {said}"),
        })
    });
    match ended {
        Ok(()) => codes::FUSEWIRE_OK,
        Err(Failure { code, message }) => {
            keep(message);
            code
        }
    }
}

/// Returns the text at `text`, or `default` if `text` is null.
///
/// # Safety
/// `text` is null, or a C string that lives as long as the result is used.
pub(crate) unsafe fn text<'a>(
    operation: &str,
    what: &str,
    text: *const c_char,
    default: Option<&'a str>,
) -> Outcome<&'a str> {
    if text.is_null() {
        return default.ok_or_else(|| argument(operation, format!("{what} is NULL")));
    }
    // SAFETY: `text` is not null (checked above), so the caller guarantees a C string that outlives
    // the result.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str()
        .map_err(|_| argument(operation, format!("{what} is not UTF-8: {text:?}")))
}

/// Writes `value` to `to`. Returns an error if `to` is null.
///
/// # Safety
/// `to` is null or valid for writing a `T`.
pub(crate) unsafe fn give<T>(operation: &str, what: &str, to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(argument(operation, format!("{what} is NULL")));
    }
    // SAFETY: `to` is not null (checked above), so the caller guarantees that it is valid for
    // writing.
    unsafe { to.write(value) };
    Ok(())
}

/// Returns the message of the last call of this thread that failed, or "" if no call has failed.
#[unsafe(no_mangle)]
pub extern "C" fn fusewire_last_error() -> *const c_char {
    LAST.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.as_ptr()))
        .unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> String {
        // SAFETY: the message is a C string that stays valid until the next failure of this thread.
        let text = unsafe { CStr::from_ptr(fusewire_last_error()) };
        text.to_str().unwrap().to_owned()
    }

    #[test]
    fn panics_become_codes() {
        assert_eq!(message(), "");
        assert_eq!(
            guard(|| panic!("with {}", 7)),
            codes::FUSEWIRE_ERROR_INTERNAL
        );
        assert!(message().ends_with("defect of it: with 7"), "{}", message());
        assert_eq!(guard(|| Ok(())), codes::FUSEWIRE_OK);
        assert!(message().ends_with("with 7"), "a success leaves it");
        std::thread::spawn(|| assert_eq!(message(), ""))
            .join()
            .unwrap();
    }

    #[test]
    fn zero_bytes_do_not_cut_a_message() {
        guard(|| Err(argument("op", "a\0b")));
        assert_eq!(message(), "op: ab");
    }
}
