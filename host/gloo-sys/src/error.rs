//! Errors, classified by how the caller can react.

use thiserror::Error;

/// Error of an operation. Contains the operation's name, the peer if known, and Gloo's message.
///
/// The context cannot be used after an error: later calls return [`Closed`](Self::Closed). The only
/// exception is an [`Invalid`](Self::Invalid) error that is raised before anything was sent.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The operation did not complete within its timeout.
    #[error("{operation}: timed out{}: {text}", blame(*peer))]
    Timeout {
        /// Name of the failed operation.
        operation: &'static str,
        /// The rank whose message is missing, if known.
        peer: Option<usize>,
        /// Gloo's message.
        text: String,
    },
    /// A connection broke, because the peer died, closed its context, or failed.
    #[error("{operation}: connection failed{}: {text}", blame(*peer))]
    Io {
        /// Name of the failed operation.
        operation: &'static str,
        /// The peer of the connection, if known.
        peer: Option<usize>,
        /// Gloo's message.
        text: String,
    },
    /// An argument is invalid, or a check inside Gloo failed.
    #[error("{operation}: {text}")]
    Invalid {
        /// Name of the refused operation.
        operation: &'static str,
        /// Description of the invalid argument.
        text: String,
    },
    /// The rendezvous returned an error.
    #[error("{operation}: rendezvous failed: {text}")]
    Rendezvous {
        /// Name of the failed operation.
        operation: &'static str,
        /// Message of the rendezvous, including the key.
        text: String,
    },
    /// During this call, [`Context::abort`](crate::Context::abort) was called, or another thread's
    /// operation on this context failed.
    #[error("{operation}: {text}")]
    Aborted {
        /// Name of the interrupted operation.
        operation: &'static str,
        /// Description of the interruption.
        text: String,
    },
    /// The context failed or was aborted before this call, which did nothing.
    #[error("{operation}: the context is closed since: {first}")]
    Closed {
        /// Name of the refused operation.
        operation: &'static str,
        /// The failure that closed the context.
        first: String,
    },
}

fn blame(peer: Option<usize>) -> String {
    peer.map(|rank| format!(" at rank {rank}"))
        .unwrap_or_default()
}

impl Error {
    /// Returns the name of the failed operation.
    #[must_use]
    pub const fn operation(&self) -> &'static str {
        match self {
            Self::Timeout { operation, .. }
            | Self::Io { operation, .. }
            | Self::Invalid { operation, .. }
            | Self::Rendezvous { operation, .. }
            | Self::Aborted { operation, .. }
            | Self::Closed { operation, .. } => operation,
        }
    }

    pub(crate) fn invalid(operation: &'static str, text: impl Into<String>) -> Self {
        Self::Invalid {
            operation,
            text: text.into(),
        }
    }

    /// Parses the line that the C++ side creates from an exception. Its fields are kind, peer, `|`
    /// and text.
    pub(crate) fn from_bridge(operation: &'static str, error: &cxx::Exception) -> Self {
        Self::parse(operation, error.what())
    }

    fn parse(operation: &'static str, line: &str) -> Self {
        let (head, text) = line.split_once('|').unwrap_or(("", line));
        let text = text.to_owned();
        let mut head = head.chars();
        let kind = head.next();
        let peer = head.as_str().parse().ok();
        match kind {
            Some('T') => Self::Timeout {
                operation,
                peer,
                text,
            },
            Some('V') => Self::Invalid { operation, text },
            Some('A') => Self::Aborted { operation, text },
            Some('R') => Self::Rendezvous { operation, text },
            _ => Self::Io {
                operation,
                peer,
                text,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_bridge_become_variants() {
        let text = "Timed out | really".to_owned();
        assert_eq!(
            Error::parse("barrier", "T3|Timed out | really"),
            Error::Timeout {
                operation: "barrier",
                peer: Some(3),
                text
            }
        );
        assert_eq!(
            Error::parse("send", "I-1|reset"),
            Error::Io {
                operation: "send",
                peer: None,
                text: "reset".to_owned()
            }
        );
        assert!(matches!(
            Error::parse("send", "V-1|x"),
            Error::Invalid { .. }
        ));
        assert!(matches!(
            Error::parse("send", "A-1|x"),
            Error::Aborted { .. }
        ));
        assert!(matches!(
            Error::parse("send", "R0|x"),
            Error::Rendezvous { .. }
        ));
        assert!(matches!(Error::parse("send", "no head"), Error::Io { .. }));
    }

    #[test]
    fn messages_name_operation_and_peer() {
        let error = Error::parse("gather", "T2|no word");
        assert_eq!(error.to_string(), "gather: timed out at rank 2: no word");
        assert_eq!(error.operation(), "gather");
    }
}
