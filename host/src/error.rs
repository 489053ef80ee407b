//! The one error type of the crate: a variant is the operation that failed.

use core::fmt;
use std::io;
use std::sync::Arc;

use thiserror::Error as ThisError;

/// Result of every fallible call of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Returns what a store's operation was about, as a part of a message.
fn subject(operation: &str, key: &str) -> String {
    match operation {
        _ if key.is_empty() => String::new(),
        "connect" => format!(" to {key}"),
        "open" => format!(" of {key}"),
        _ => format!(" of key \"{key}\""),
    }
}

/// A failure. A variant names the operation that failed; its message says what to do next
/// where that is known.
///
/// Cheap to clone, because one failure is reported by several calls: by the work handle that it
/// belongs to, and by the next synchronisation of its stream.
///
/// `{:?}` prints the message, because that is what a program prints whose `main` returns a
/// [`Result`]. `{:#?}` prints the variant with its fields.
#[derive(Clone, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A call of a [`Store`](crate::store::Store) failed.
    #[error("store {operation}{} failed: {detail}", subject(operation, key))]
    Store {
        /// The store's operation, such as `set`.
        operation: &'static str,
        /// The key, or the address or path for `connect` and `open`, or nothing.
        key: String,
        /// What happened.
        detail: String,
        /// The failure of the operating system behind it.
        #[source]
        source: Option<Arc<io::Error>>,
    },

    /// A key did not appear in a [`Store`](crate::store::Store) in time.
    #[error(
        "key \"{key}\" did not appear in the store within {seconds} s; the rank that sets it has \
         not come this far, or uses another store"
    )]
    StoreTimeout {
        /// The first key that was missing.
        key: String,
        /// How long the call waited.
        seconds: f64,
    },

    /// Rank, size or store could not be found out from the environment.
    #[error("bootstrap failed: {detail}")]
    Bootstrap {
        /// What is missing or wrong, and what to set.
        detail: String,
    },

    /// Memory that ranks share could not be created or mapped.
    #[error("{operation} for {bytes} bytes of shared memory failed: {source}")]
    MemoryMap {
        /// The system call that failed.
        operation: &'static str,
        /// Size of the segment in bytes.
        bytes: u64,
        /// The failure of the operating system.
        #[source]
        source: Arc<io::Error>,
    },

    /// The memory that a peer offered cannot be mapped.
    #[error("memory of rank {rank} cannot be mapped: {detail}")]
    PeerSegment {
        /// The peer that offered the memory.
        rank: u32,
        /// What does not fit.
        detail: String,
    },

    /// A descriptor could not be made available to the other processes of this host.
    #[error("sharing a descriptor with the other ranks of this host: {operation} failed: {source}")]
    ShareDescriptor {
        /// What failed.
        operation: &'static str,
        /// The failure of the operating system.
        #[source]
        source: Arc<io::Error>,
    },

    /// An argument is outside of what the operation takes.
    #[error("{operation}: {detail}")]
    InvalidArgument {
        /// The operation that was called.
        operation: &'static str,
        /// Which argument, and what it has to be.
        detail: String,
    },

    /// A call does not fit the state of a stream's capture.
    #[error("graph capture: {detail}")]
    CaptureState {
        /// The call and the state that it found.
        detail: String,
    },

    /// Work of a stream could not run, or did not come to its end.
    #[error("launch failed: {detail}")]
    Launch {
        /// What happened.
        detail: String,
    },

    /// A GPU's driver library refused a call.
    #[error("{library}: {call}: {detail}")]
    Driver {
        /// The library: CUDA or HIP.
        library: &'static str,
        /// Its function.
        call: &'static str,
        /// What it said, and what to do.
        detail: String,
    },

    /// A GPU image is not there, is damaged, or does not fit the program.
    #[error("GPU image {image}: {detail}")]
    Image {
        /// The image: name and target, or path.
        image: String,
        /// What is wrong with it, and what to do.
        detail: String,
    },

    /// A device that was asked for is not there.
    #[error("device {device}: {detail}")]
    NoDevice {
        /// The device, as in `--device`.
        device: String,
        /// What is missing.
        detail: String,
    },

    /// An operation did not end in time.
    #[error("{}", .0)]
    Timeout(Box<crate::comm::Failure>),

    /// Ranks called different operations, sizes or types.
    #[error("{}", .0)]
    Mismatch(Box<crate::comm::Failure>),

    /// A kernel stopped for another reason: overlapping launches, memory outside of a window, an
    /// abort.
    #[error("{}", .0)]
    Failed(Box<crate::comm::Failure>),

    /// Ranks cannot form a communicator.
    #[error("communicator \"{name}\": {detail}")]
    Communicator {
        /// Name of the communicator.
        name: String,
        /// What does not fit, and what to do.
        detail: String,
    },

    /// Another library failed in a communicator's call.
    #[error("backend {backend}: {operation}: {detail}")]
    Backend {
        /// Name of the backend.
        backend: String,
        /// The library's operation.
        operation: &'static str,
        /// What it said, and what to do where that is known.
        detail: String,
    },

    /// An object that a peer sent is not what was asked for.
    #[error("{operation}: object of rank {rank}: {detail}")]
    Object {
        /// The operation that was called.
        operation: &'static str,
        /// The rank that sent it.
        rank: u32,
        /// What does not fit.
        detail: String,
    },

    /// A call of a [`Transport`](crate::transport::Transport) failed.
    #[error("transport {operation} with {peer}: {kind}: {detail}")]
    Transport {
        /// The call, such as `write`.
        operation: &'static str,
        /// The other side: its url without the secret, or what stands for it.
        peer: String,
        /// What kind of failure it is, to decide on.
        kind: crate::transport::TransportFailure,
        /// What happened, and what to do next.
        detail: String,
    },

    /// Work of a stream was not complete when a bounded wait for it ended.
    #[error("work of the stream is not complete after {seconds} s")]
    StreamTimeout {
        /// How long the call waited.
        seconds: f64,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        /// Writes the named fields of a variant.
        macro_rules! fields {
            ($($name:ident { $($field:ident),* },)*) => {
                match self {
                    Self::Timeout(failure) => f.debug_tuple("Timeout").field(failure).finish(),
                    Self::Mismatch(failure) => f.debug_tuple("Mismatch").field(failure).finish(),
                    Self::Failed(failure) => f.debug_tuple("Failed").field(failure).finish(),
                    $(Self::$name { $($field),* } => f
                        .debug_struct(stringify!($name))
                        $(.field(stringify!($field), $field))*
                        .finish(),)*
                }
            };
        }
        fields! {
            Store { operation, key, detail, source },
            StoreTimeout { key, seconds },
            Bootstrap { detail },
            MemoryMap { operation, bytes, source },
            PeerSegment { rank, detail },
            ShareDescriptor { operation, source },
            InvalidArgument { operation, detail },
            CaptureState { detail },
            Launch { detail },
            Driver { library, call, detail },
            Image { image, detail },
            NoDevice { device, detail },
            Communicator { name, detail },
            Backend { backend, operation, detail },
            Object { operation, rank, detail },
            Transport { operation, peer, kind, detail },
            StreamTimeout { seconds },
        }
    }
}

impl Error {
    /// A store failure without an operating system error.
    pub(crate) fn store(operation: &'static str, key: &str, detail: impl Into<String>) -> Self {
        Self::Store {
            operation,
            key: key.to_owned(),
            detail: detail.into(),
            source: None,
        }
    }

    /// A store failure caused by the operating system.
    pub(crate) fn store_io(operation: &'static str, key: &str, error: io::Error) -> Self {
        Self::Store {
            operation,
            key: key.to_owned(),
            detail: error.to_string(),
            source: Some(Arc::new(error)),
        }
    }

    /// A bootstrap failure.
    pub(crate) fn bootstrap(detail: impl Into<String>) -> Self {
        Self::Bootstrap {
            detail: detail.into(),
        }
    }

    /// A call that does not fit the state of a capture.
    pub(crate) fn capture(detail: impl Into<String>) -> Self {
        Self::CaptureState {
            detail: detail.into(),
        }
    }

    /// A launch that could not run.
    pub(crate) fn launch(detail: impl Into<String>) -> Self {
        Self::Launch {
            detail: detail.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn debug_is_the_message_and_alternate_the_structure() {
        let error = Error::store_io(
            "set",
            "key",
            std::io::Error::from(std::io::ErrorKind::NotFound),
        );
        assert_eq!(format!("{error:?}"), error.to_string());
        let structure = format!("{error:#?}");
        for part in [
            "Store {",
            "operation: \"set\"",
            "key: \"key\"",
            "source: Some(",
        ] {
            assert!(structure.contains(part), "{structure}");
        }
        // The end of a program whose `main` returns the error.
        let main: super::Result<()> = Err(Error::bootstrap("RANK is not set"));
        assert_eq!(
            format!("Error: {:?}", main.expect_err("an error")),
            "Error: bootstrap failed: RANK is not set"
        );
    }
}
