//! What can go wrong, by what the caller can do about it.

use thiserror::Error;

/// A failed operation: its name, the peer where it is known, and Gloo's own text.
///
/// After every variant but [`Invalid`](Self::Invalid) raised before anything was sent, the context
/// is unusable: later calls return [`Closed`](Self::Closed).
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The time of the operation is over.
    #[error("{operation}: timed out{}: {text}", blame(*peer))]
    Timeout {
        /// The operation that failed.
        operation: &'static str,
        /// The rank whose message did not come, where it is known.
        peer: Option<usize>,
        /// What Gloo said.
        text: String,
    },
    /// A connection broke: the peer died, closed its context, or failed itself.
    #[error("{operation}: connection failed{}: {text}", blame(*peer))]
    Io {
        /// The operation that failed.
        operation: &'static str,
        /// The rank at the other end, where it is known.
        peer: Option<usize>,
        /// What Gloo said.
        text: String,
    },
    /// An argument that no call can have, or a check inside Gloo.
    #[error("{operation}: {text}")]
    Invalid {
        /// The operation that was refused.
        operation: &'static str,
        /// What is wrong.
        text: String,
    },
    /// The rendezvous returned an error.
    #[error("{operation}: rendezvous failed: {text}")]
    Rendezvous {
        /// The operation that failed.
        operation: &'static str,
        /// What the rendezvous said, with the key.
        text: String,
    },
    /// [`Context::abort`](crate::Context::abort) was called, or another thread's operation on this
    /// context failed, while this one ran.
    #[error("{operation}: {text}")]
    Aborted {
        /// The operation that was cut short.
        operation: &'static str,
        /// What was seen.
        text: String,
    },
    /// The context failed or was aborted before this call; nothing was done.
    #[error("{operation}: the context is closed since: {first}")]
    Closed {
        /// The operation that was refused.
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
    /// The operation that failed.
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

    /// From the line that the C++ side made of an exception: kind, peer, `|`, text.
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
