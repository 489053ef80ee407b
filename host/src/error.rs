//! The crate's error type. Each variant names the operation that failed.

mod failure;

use core::fmt;
use std::io;
use std::sync::Arc;

use fusewire_device::layout::FailureKind;
use thiserror::Error as ThisError;

pub use self::failure::{Activity, Failure};

/// Result of every fallible call of this crate.
pub type Result<T, E = Error> = core::result::Result<T, E>;

/// Error of this crate. Each variant names the operation that failed. If a next step is known, the
/// message states it.
///
/// An error is cheap to clone. Clones are needed because two calls can report the same failure: the
/// wait on the `Work` handle, and the next synchronization of the handle's stream.
///
/// `{:?}` prints the message, because a program whose `main` returns a [`Result`] prints errors
/// with `{:?}`. `{:#?}` prints the variant with its fields.
#[derive(Clone, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// A [`Store`](crate::store::Store) call failed.
    #[error(transparent)]
    Store(crate::store::Error),

    /// The environment does not give a valid rank, size or store.
    #[error("bootstrap failed: {detail}")]
    Bootstrap {
        /// The missing or wrong setting, and the correct setting.
        detail: String,
    },

    /// Memory that ranks share could not be allocated or mapped.
    #[error("{operation} for {bytes} bytes of shared memory failed: {source}")]
    MemoryMap {
        /// Name of the failed system call.
        operation: &'static str,
        /// Size of the segment in bytes.
        bytes: u64,
        /// The operating system error.
        #[source]
        source: Arc<io::Error>,
    },

    /// Memory that a peer offered cannot be mapped.
    #[error("memory of rank {rank} cannot be mapped: {detail}")]
    PeerSegment {
        /// The peer that offered the memory.
        rank: u32,
        /// Reason why the memory cannot be mapped.
        detail: String,
    },

    /// A descriptor could not be shared with the other processes of this host.
    #[error("sharing a descriptor with the other ranks of this host: {operation} failed: {source}")]
    ShareDescriptor {
        /// Name of the failed step.
        operation: &'static str,
        /// The operating system error.
        #[source]
        source: Arc<io::Error>,
    },

    /// An argument is outside the range that the operation accepts.
    #[error("{operation}: {detail}")]
    InvalidArgument {
        /// The operation that was called.
        operation: &'static str,
        /// The argument, and the values it accepts.
        detail: String,
    },

    /// A call is not allowed in the current capture state of a stream.
    #[error("graph capture: {detail}")]
    CaptureState {
        /// The refused call and the capture state of the stream.
        detail: String,
    },

    /// Work on a stream could not start, or did not complete.
    #[error("launch failed: {detail}")]
    Launch {
        /// Description of the failure.
        detail: String,
    },

    /// A call of a GPU driver library failed.
    #[error("{library}: {call}: {detail}")]
    Driver {
        /// Name of the library: CUDA or HIP.
        library: &'static str,
        /// Name of the library function.
        call: &'static str,
        /// The library's message, and what to do next.
        detail: String,
    },

    /// A GPU image is missing, damaged or does not match the program.
    #[error("GPU image {image}: {detail}")]
    Image {
        /// The image: name and target, or path.
        image: String,
        /// The defect, and what to do next.
        detail: String,
    },

    /// A requested device does not exist.
    #[error("device {device}: {detail}")]
    NoDevice {
        /// The device, in the format of `--device`.
        device: String,
        /// Description of what is missing, such as a driver library.
        detail: String,
    },

    /// An operation did not complete in time.
    #[error("{}", .0)]
    Timeout(Box<Failure>),

    /// Ranks called different operations, or the same operation with different counts or types.
    #[error("{}", .0)]
    Mismatch(Box<Failure>),

    /// A kernel stopped for a reason other than a timeout or mismatch, such as an access outside
    /// of its memory, the end of another rank's process, or an abort.
    /// [`Failure::kind`](crate::Failure::kind) names the reason.
    #[error("{}", .0)]
    Failed(Box<Failure>),

    /// The ranks disagree about a communicator or window, or the communicator could not do what was
    /// asked. The detail states the reason.
    #[error("communicator \"{name}\": {detail}")]
    Communicator {
        /// Name of the communicator.
        name: String,
        /// The conflict, and what to do next.
        detail: String,
    },

    /// The program has ended the communicator.
    #[error("communicator \"{name}\": {detail}")]
    Ended {
        /// Name of the communicator.
        name: String,
        /// Call that has ended it.
        reason: EndReason,
        /// The call, and what to do next.
        detail: String,
    },

    /// A library that is used as the communicator's backend failed.
    #[error("backend {backend}: {operation}: {detail}")]
    Backend {
        /// Name of the backend.
        backend: String,
        /// Name of the library function.
        operation: &'static str,
        /// The library's message. If a next step is known, the message states it.
        detail: String,
    },

    /// An object that a peer sent has the wrong type, size or encoding.
    #[error("{operation}: object of rank {rank}: {detail}")]
    Object {
        /// The operation that was called.
        operation: &'static str,
        /// The rank that sent the object.
        rank: u32,
        /// The expected and the received type, size or encoding.
        detail: String,
    },

    /// A call of a [`Transport`](crate::transport::Transport) failed.
    #[error(transparent)]
    Transport(crate::transport::Error),

    /// A bounded wait for work on a stream timed out before the work was complete.
    #[error("work of the stream is not complete after {seconds} s")]
    StreamTimeout {
        /// Duration of the wait in seconds.
        seconds: f64,
    },
}

/// Reason why a communicator has ended without a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EndReason {
    /// A rank called [`abort`](crate::Communicator::abort).
    Aborted,
    /// This rank called [`finalize`](crate::Communicator::finalize).
    Finalized,
    /// [`reconfigure`](crate::Communicator::reconfigure) has replaced the communicator.
    Replaced,
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
                    Self::Store(error) => f.debug_tuple("Store").field(error).finish(),
                    Self::Transport(error) => f.debug_tuple("Transport").field(error).finish(),
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
            Ended { name, reason, detail },
            Backend { backend, operation, detail },
            Object { operation, rank, detail },
            StreamTimeout { seconds },
        }
    }
}

impl From<crate::store::Error> for Error {
    fn from(error: crate::store::Error) -> Self {
        match error {
            crate::store::Error::InvalidArgument { operation, detail } => {
                Self::InvalidArgument { operation, detail }
            }
            error => Self::Store(error),
        }
    }
}

impl From<crate::transport::Error> for Error {
    fn from(error: crate::transport::Error) -> Self {
        match error {
            crate::transport::Error::InvalidArgument { operation, detail } => {
                Self::InvalidArgument { operation, detail }
            }
            crate::transport::Error::Memory(error) => error.into(),
            error => Self::Transport(error),
        }
    }
}

impl From<fusewire_driver::Error> for Error {
    fn from(error: fusewire_driver::Error) -> Self {
        use fusewire_driver::Error as Low;
        match error {
            Low::Driver {
                library,
                call,
                detail,
            } => Self::Driver {
                library,
                call,
                detail,
            },
            Low::NoDevice { device, detail } => Self::NoDevice { device, detail },
            Low::MemoryMap {
                operation,
                bytes,
                source,
            } => Self::MemoryMap {
                operation,
                bytes,
                source,
            },
            Low::PeerSegment { rank, detail } => Self::PeerSegment { rank, detail },
            Low::InvalidArgument { operation, detail } => {
                Self::InvalidArgument { operation, detail }
            }
            error => Self::launch(error.to_string()),
        }
    }
}

impl Error {
    /// Returns the reason if the program has ended the communicator; `None` for all failures.
    ///
    /// ```
    /// use fusewire::{EndReason, Options, run_threads};
    ///
    /// run_threads(1, &Options::default(), |comm| {
    ///     comm.finalize()?;
    ///     let error = comm.barrier().expect_err("it has ended");
    ///     assert_eq!(error.end_reason(), Some(EndReason::Finalized));
    ///     Ok(())
    /// })
    /// .into_iter()
    /// .collect::<Result<(), _>>()?;
    /// # Ok::<(), fusewire::Error>(())
    /// ```
    pub fn end_reason(&self) -> Option<EndReason> {
        match self {
            Self::Ended { reason, .. } => Some(*reason),
            Self::Failed(failure) if failure.kind == FailureKind::Abort => Some(EndReason::Aborted),
            _ => None,
        }
    }

    /// Returns the failure of an operation or kernel: its kind, the rank that it names, and what
    /// the ranks were doing. `None` for other errors.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Timeout(failure) | Self::Mismatch(failure) | Self::Failed(failure) => {
                Some(failure)
            }
            _ => None,
        }
    }

    /// Creates a bootstrap error.
    pub(crate) fn bootstrap(detail: impl Into<String>) -> Self {
        Self::Bootstrap {
            detail: detail.into(),
        }
    }

    /// Creates an error for a call that is not allowed in the current capture state.
    pub(crate) fn capture(detail: impl Into<String>) -> Self {
        Self::CaptureState {
            detail: detail.into(),
        }
    }

    /// Creates an error for work that could not be launched.
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
        let error = Error::from(crate::store::Error::call("set", "key", "why"));
        assert_eq!(format!("{error:?}"), error.to_string());
        let structure = format!("{error:#?}");
        for part in ["Store(", "operation: \"set\"", "key: \"key\""] {
            assert!(structure.contains(part), "{structure}");
        }
        let error = Error::from(crate::transport::Error::Call {
            operation: "write",
            peer: "tcp://host:1".to_owned(),
            kind: crate::transport::TransportFailure::Timeout,
            detail: "why".to_owned(),
        });
        assert_eq!(format!("{error:?}"), error.to_string());
        let structure = format!("{error:#?}");
        for part in ["Transport(", "operation: \"write\"", "kind: Timeout"] {
            assert!(structure.contains(part), "{structure}");
        }
        // `main` prints a returned error with `{:?}`.
        let error = Error::bootstrap("RANK is not set");
        assert_eq!(
            format!("Error: {error:?}"),
            "Error: bootstrap failed: RANK is not set"
        );
    }
}
