//! Failures, in the form in which the C functions return them.

use core::fmt;

use fusewire_backend_abi as abi;

/// A code and a message.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: i32,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { code, message }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(abi::CODE_INVALID, message)
    }

    pub(crate) fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        Self::new(abi::CODE_OTHER, format!("{what}: {error}"))
    }
}

/// Result type of this crate.
pub(crate) type Result<T, E = Failure> = core::result::Result<T, E>;
