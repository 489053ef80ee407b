//! How a call of a transport fails.

use core::fmt;

/// Kind of failure of a [`Transport`](super::Transport) call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportFailure {
    /// The call did not end within its time-out. After a write or a read that timed out the
    /// connection is broken; after a wait for a notification it is as usable as before.
    Timeout,
    /// The connection has ended: the peer died, closed it or was cut off. `bind` and `connect`
    /// again, with the peer's new url, make a fresh one.
    Broken,
    /// `abort` was called on this side, or the transport was dropped.
    Aborted,
    /// The owner of the memory said no: no such key (any more), or bytes outside of it. The
    /// connection stays usable.
    Refused,
    /// The call needs a connection, and there is none yet.
    NotConnected,
    /// No connection could be made.
    Connect,
    /// The operating system refused what the transport needs.
    System,
}

impl fmt::Display for TransportFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "not done in time",
            Self::Broken => "the connection is broken",
            Self::Aborted => "aborted",
            Self::Refused => "refused by the peer",
            Self::NotConnected => "not connected",
            Self::Connect => "no connection",
            Self::System => "the system refused",
        })
    }
}
