//! Kinds of failure of transport calls.

use core::fmt;

/// Kind of failure of a [`Transport`](crate::Transport) call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportFailure {
    /// The call did not complete within its timeout. A timeout of a write or read breaks the
    /// connection. After a timeout of a wait for a notification, the connection is still usable.
    Timeout,
    /// The connection has ended: the peer died, closed the connection, or is unreachable. To create
    /// a new connection, call `bind` and `connect` again with the peer's new URL.
    Broken,
    /// `abort` was called on this side, or the transport was dropped.
    Aborted,
    /// The owner of the memory refused the request, because no memory is registered under the key
    /// (any more), or because the range exceeds the memory. The connection stays usable.
    Refused,
    /// The call requires a connection, which has not been created yet.
    NotConnected,
    /// No connection could be established.
    Connect,
    /// The operating system did not provide a resource.
    System,
}

impl fmt::Display for TransportFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "timed out",
            Self::Broken => "the connection is broken",
            Self::Aborted => "aborted",
            Self::Refused => "refused by the peer",
            Self::NotConnected => "not connected",
            Self::Connect => "no connection",
            Self::System => "the system refused",
        })
    }
}
