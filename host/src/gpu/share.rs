//! Exchange of file descriptors with other processes of this host. A process can open another
//! process's memfd through `/proc`, but not its descriptors of exported GPU memory. Such
//! descriptors are therefore sent over a Unix socket with `SCM_RIGHTS`.
//!
//! The owner publishes a descriptor ([`publish`]) and sends the [`Token`] to its peers over the
//! store. A peer with the token can [`fetch()`] the descriptor any number of times until the
//! [`PublishedDescriptor`] is dropped. A server thread in the owner's process sends the
//! descriptors. The thread starts when the first descriptor is published and stops when the last
//! published descriptor is withdrawn. Its socket has a random name in the abstract namespace, so no
//! file remains after the process exits, even if the process is killed.
//!
//! # Trust
//! The server thread accepts requests only from processes of the same user or of root, and sends a
//! descriptor only if the request contains the secret of the descriptor's token. A peer sends the
//! secret only to the process that the token identifies.
//!
//! # Forks
//! A forked child inherits the descriptors of its parent, but not the server thread. Descriptors
//! that the parent published remain published by the parent. When the child publishes a descriptor,
//! it starts a separate server thread with another socket name. Dropping an inherited
//! [`PublishedDescriptor`] in the child closes the child's copy of the descriptor. The parent's
//! publication is not withdrawn. The child inherits the listener and the eventfd of the parent's
//! server thread. They stay open in the child until the child exits or executes another program.

mod fetch;
mod message;
mod server;
mod token;

#[cfg(test)]
mod tests;

use core::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub(crate) use self::fetch::fetch;
#[cfg(test)]
pub(crate) use self::fetch::{FetchError, FetchFailure};
pub(crate) use self::token::Token;
use crate::{Error, Result};

/// A descriptor that other processes can fetch until this value is dropped. Dropping the value
/// withdraws and closes the descriptor.
pub(crate) struct PublishedDescriptor {
    token: Token,
    /// The only long-lived reference to the descriptor. The server thread holds a second reference
    /// only while it sends the descriptor and holds the lock of the table. [`server::remove`] takes
    /// the same lock, so after the withdrawal no second reference exists.
    _descriptor: Arc<OwnedFd>,
}

/// Publishes `descriptor` for processes that have the token.
///
/// # Errors
/// [`Error::ShareDescriptor`] if the system fails to provide a socket, a thread or random numbers.
pub(crate) fn publish(descriptor: OwnedFd) -> Result<PublishedDescriptor> {
    let descriptor = Arc::new(descriptor);
    let token = server::add(Arc::downgrade(&descriptor))?;
    Ok(PublishedDescriptor {
        token,
        _descriptor: descriptor,
    })
}

impl PublishedDescriptor {
    /// Returns the token with which a process of this host can [`fetch()`] the descriptor.
    pub(crate) fn token(&self) -> Token {
        self.token
    }
}

impl Drop for PublishedDescriptor {
    fn drop(&mut self) {
        server::remove(&self.token);
    }
}

impl fmt::Debug for PublishedDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PublishedDescriptor")
            .field(&self.token)
            .finish()
    }
}

/// Returns a function that converts an I/O error of `operation` to [`Error::ShareDescriptor`].
fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::ShareDescriptor {
        operation,
        source: error.into(),
    }
}
