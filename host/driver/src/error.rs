//! The crate's error type.

use core::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error as ThisError;

/// Result of the calls of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Error of a driver library or of shared memory. Clones share the underlying operating system
/// error.
///
/// `{:?}` prints the message, because a program whose `main` returns a [`Result`] prints errors
/// with `{:?}`. `{:#?}` prints the fields.
#[derive(Clone, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A GPU driver library is absent or too old, or one of its functions failed.
    #[error("{library}: {call}: {detail}")]
    Driver {
        /// Name of the library.
        library: &'static str,
        /// The function, or what the library was asked for.
        call: &'static str,
        /// The library's message.
        detail: String,
    },

    /// There is no such device.
    #[error("device {device}: {detail}")]
    NoDevice {
        /// The device.
        device: String,
        /// The reason.
        detail: String,
    },

    /// Shared memory could not be created or mapped.
    #[error("{operation} for {bytes} bytes of shared memory failed: {source}")]
    MemoryMap {
        /// The system call.
        operation: &'static str,
        /// Size of the memory.
        bytes: u64,
        /// The operating system error.
        #[source]
        source: Arc<io::Error>,
    },

    /// The memory of another rank could not be mapped.
    #[error("memory of rank {rank} cannot be mapped: {detail}")]
    PeerSegment {
        /// The rank that created the memory.
        rank: u32,
        /// The reason.
        detail: String,
    },

    /// An argument or an environment variable is outside the range that is accepted.
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
            Self::Driver {
                library,
                call,
                detail,
            } => f
                .debug_struct("Driver")
                .field("library", library)
                .field("call", call)
                .field("detail", detail)
                .finish(),
            Self::NoDevice { device, detail } => f
                .debug_struct("NoDevice")
                .field("device", device)
                .field("detail", detail)
                .finish(),
            Self::MemoryMap {
                operation,
                bytes,
                source,
            } => f
                .debug_struct("MemoryMap")
                .field("operation", operation)
                .field("bytes", bytes)
                .field("source", source)
                .finish(),
            Self::PeerSegment { rank, detail } => f
                .debug_struct("PeerSegment")
                .field("rank", rank)
                .field("detail", detail)
                .finish(),
            Self::InvalidArgument { operation, detail } => f
                .debug_struct("InvalidArgument")
                .field("operation", operation)
                .field("detail", detail)
                .finish(),
        }
    }
}
