//! The crate's error type.

use core::fmt;

use thiserror::Error as ThisError;

use crate::TransportFailure;

/// Result of the calls of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Error of a [`Transport`](crate::Transport).
///
/// `{:?}` prints the message, because a program whose `main` returns a [`Result`] prints errors
/// with `{:?}`. `{:#?}` prints the fields.
#[derive(Clone, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A call failed.
    #[error("transport {operation} with {peer}: {kind}: {detail}")]
    Call {
        /// Name of the call.
        operation: &'static str,
        /// The peer: host and port, or process id. `no peer` before a connection.
        peer: String,
        /// Kind of failure.
        kind: TransportFailure,
        /// Description of the failure, and what to do next.
        detail: String,
    },

    /// Memory could not be created or mapped.
    #[error(transparent)]
    Memory(fusewire_driver::Error),

    /// An argument is outside the range that is accepted.
    #[error("{operation}: {detail}")]
    InvalidArgument {
        /// The operation that was called.
        operation: &'static str,
        /// The argument, and the values it accepts.
        detail: String,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        match self {
            Self::Call {
                operation,
                peer,
                kind,
                detail,
            } => f
                .debug_struct("Call")
                .field("operation", operation)
                .field("peer", peer)
                .field("kind", kind)
                .field("detail", detail)
                .finish(),
            Self::InvalidArgument { operation, detail } => f
                .debug_struct("InvalidArgument")
                .field("operation", operation)
                .field("detail", detail)
                .finish(),
            Self::Memory(error) => f.debug_tuple("Memory").field(error).finish(),
        }
    }
}

impl From<fusewire_driver::Error> for Error {
    fn from(error: fusewire_driver::Error) -> Self {
        match error {
            fusewire_driver::Error::InvalidArgument { operation, detail } => {
                Self::InvalidArgument { operation, detail }
            }
            error => Self::Memory(error),
        }
    }
}
