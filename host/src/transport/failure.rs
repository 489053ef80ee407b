//! Kinds of failure of transport calls.

use core::fmt;

/// Kind of failure of a [`Transport`](super::Transport) call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportFailure {
    /// The call did not complete within its timeout. After a timeout of a write or read, the
    /// connection is broken. A timeout of a wait for a notification leaves it usable.
    Timeout,
    /// The connection has ended: the peer died, closed it, or is unreachable. Call `bind` and
    /// `connect` again, with the peer's new URL, to create a new one.
    Broken,
    /// `abort` was called on this side, or the transport was dropped.
    Aborted,
    /// The owner of the memory refused the request: the key is not registered (any more), or the
    /// range exceeds the memory. The connection stays usable.
    Refused,
    /// The call requires a connection, which has not been created yet.
    NotConnected,
    /// No connection could be made.
    Connect,
    /// The operating system refused a resource.
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
