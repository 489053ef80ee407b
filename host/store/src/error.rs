//! The crate's error type.

use core::fmt;
use std::io::{self, ErrorKind};
use std::sync::Arc;

use thiserror::Error as ThisError;

/// Result of the calls of a [`Store`](crate::Store).
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Error of a [`Store`](crate::Store). Clones share the underlying operating system error.
///
/// `{:?}` prints the message, because a program whose `main` returns a [`Result`] prints errors
/// with `{:?}`. `{:#?}` prints the variant with its fields.
#[derive(Clone, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A call failed.
    #[error("store {operation}{} failed: {detail}", subject(operation, key))]
    Call {
        /// Name of the store operation, such as `set`.
        operation: &'static str,
        /// The key. For `connect` and `open`: the address or path. May be empty.
        key: String,
        /// Description of the failure.
        detail: String,
        /// The underlying operating system error.
        #[source]
        source: Option<Arc<io::Error>>,
    },

    /// A key did not appear in time.
    #[error(
        "key \"{key}\" did not appear in the store within {seconds} s; the rank that sets it has \
         not come this far, or uses another store"
    )]
    Timeout {
        /// The first key that was missing.
        key: String,
        /// Duration of the wait in seconds.
        seconds: f64,
    },

    /// An argument or an option is outside the range that is accepted.
    #[error("{operation}: {detail}")]
    InvalidArgument {
        /// The operation that was called.
        operation: &'static str,
        /// The argument, and the values it accepts.
        detail: String,
    },
}

/// Formats the subject of a store operation for a message: the key, address or path.
fn subject(operation: &str, key: &str) -> String {
    match operation {
        _ if key.is_empty() => String::new(),
        "connect" => format!(" to {key}"),
        "open" => format!(" of {key}"),
        _ => format!(" of key \"{key}\""),
    }
}

/// Returns true for the errors of a connection that the peer has closed.
pub(crate) const fn is_disconnect(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
    )
}

impl Error {
    /// Creates an error of a call without an operating system error.
    pub fn call(operation: &'static str, key: &str, detail: impl Into<String>) -> Self {
        Self::Call {
            operation,
            key: key.to_owned(),
            detail: detail.into(),
            source: None,
        }
    }

    /// Creates an error of a call that the operating system caused.
    pub fn io(operation: &'static str, key: &str, error: io::Error) -> Self {
        Self::Call {
            operation,
            key: key.to_owned(),
            detail: error.to_string(),
            source: Some(Arc::new(error)),
        }
    }

    /// Creates an error of an argument.
    pub fn invalid(operation: &'static str, detail: impl Into<String>) -> Self {
        Self::InvalidArgument {
            operation,
            detail: detail.into(),
        }
    }

    /// Returns true if the server has closed the connection.
    pub fn is_disconnect(&self) -> bool {
        self.kind().is_some_and(is_disconnect)
    }

    /// Returns the kind of the operating system error, if it caused this error.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            Self::Call {
                source: Some(source),
                ..
            } => Some(source.kind()),
            _ => None,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        match self {
            Self::Call {
                operation,
                key,
                detail,
                source,
            } => f
                .debug_struct("Call")
                .field("operation", operation)
                .field("key", key)
                .field("detail", detail)
                .field("source", source)
                .finish(),
            Self::Timeout { key, seconds } => f
                .debug_struct("Timeout")
                .field("key", key)
                .field("seconds", seconds)
                .finish(),
            Self::InvalidArgument { operation, detail } => f
                .debug_struct("InvalidArgument")
                .field("operation", operation)
                .field("detail", detail)
                .finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_is_the_message_and_alternate_the_structure() {
        let error = Error::io("set", "key", io::Error::from(ErrorKind::NotFound));
        assert_eq!(format!("{error:?}"), error.to_string());
        assert_eq!(error.kind(), Some(ErrorKind::NotFound));
        let structure = format!("{error:#?}");
        for part in [
            "Call {",
            "operation: \"set\"",
            "key: \"key\"",
            "source: Some(",
        ] {
            assert!(structure.contains(part), "{structure}");
        }
    }
}
