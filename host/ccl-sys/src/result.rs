//! Conversion of the library's result codes to errors.

use core::ffi::CStr;

use crate::sys::{Table, ncclResult_t, ncclSuccess};

/// Result of this crate's functions.
pub type Result<T> = core::result::Result<T, Error>;

/// Failure of one library call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Name of the C function.
    pub operation: &'static str,
    /// Result code.
    pub code: ncclResult_t,
    /// `ncclGetErrorString` of the code.
    pub name: String,
    /// `ncclGetLastError`, if the library has the function and its text is not empty.
    pub last: Option<String>,
}

impl core::fmt::Display for Failure {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}: {} (code {})", self.operation, self.name, self.code)?;
        self.last
            .as_ref()
            .map_or(Ok(()), |last| write!(f, ": {last}"))
    }
}

/// An error of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library could be opened.
    #[error("open {kind}: {}; install {install}", tried.join("; "))]
    Open {
        /// The library that the caller requested.
        kind: crate::Kind,
        /// Each tried name or path, with the loader's message.
        tried: Vec<String>,
        /// The package to install, or the environment variable to set.
        install: &'static str,
    },
    /// The opened library lacks a required symbol.
    #[error("open {path}: it has no {symbol}")]
    Symbol {
        /// The name or path of the library.
        path: String,
        /// The first absent symbol.
        symbol: &'static str,
    },
    /// The library lacks an optional function.
    #[error("{symbol}: this library ({version}) does not have it")]
    Unsupported {
        /// Name of the function.
        symbol: &'static str,
        /// The version of the library.
        version: crate::Version,
    },
    /// A rank, count or root exceeds the range of `int`, or the communicator was aborted.
    #[error("{operation}: {reason}")]
    Argument {
        /// Name of the C function that was not called.
        operation: &'static str,
        /// Reason for the refusal.
        reason: &'static str,
    },
    /// A library call failed.
    #[error("{0}")]
    Call(Failure),
}

/// Converts a result code to a result. The error contains the library's messages.
///
/// # Errors
/// [`Error::Call`] for every code except `ncclSuccess`.
pub fn check(table: &Table, operation: &'static str, code: ncclResult_t) -> Result<()> {
    if code == ncclSuccess {
        return Ok(());
    }
    let name = code_text(table, code);
    let last = table.get_last_error.and_then(|get| {
        // SAFETY: with a null argument, the function returns the last error of any communicator.
        // This communicator is not passed, because an abort may have freed it.
        text(unsafe { get(core::ptr::null_mut()) })
    });
    Err(Error::Call(Failure {
        operation,
        code,
        name,
        last,
    }))
}

/// Returns the library's message for `code`.
pub(crate) fn code_text(table: &Table, code: ncclResult_t) -> String {
    // SAFETY: `ncclGetErrorString` accepts any integer and returns a static string.
    text(unsafe { (table.get_error_string)(code) }).unwrap_or_default()
}

/// Converts a C string of the library. Returns `None` if the string is null or empty.
fn text(string: *const core::ffi::c_char) -> Option<String> {
    if string.is_null() {
        return None;
    }
    // SAFETY: not null, and the library terminates its strings with a zero byte.
    let text = unsafe { CStr::from_ptr(string) }
        .to_string_lossy()
        .trim()
        .to_owned();
    (!text.is_empty()).then_some(text)
}
