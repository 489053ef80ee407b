//! Descriptors for other processes of this host. Exported GPU memory cannot be opened through
//! `/proc`, as memory files can, so its descriptor is sent over a Unix socket with `SCM_RIGHTS`.
//!
//! A process [`publish`]es a descriptor and sends the [`Token`] to its peers over the store. A
//! process with the token can [`fetch()`] descriptors of the same object, any number of times,
//! while the [`Published`] lives. The owner need not make a call for that, because a thread of its
//! process answers. The thread starts with the first published descriptor and ends with the last.
//! Its socket has a random name in the abstract namespace, so nothing remains in a file system,
//! however the process ends.
//!
//! # Trust
//! The thread answers only processes of the same user or of root that send the token's secret. A
//! fetching process sends the secret only to the process that the token names.
//!
//! # Forks
//! A forked child shares its parent's descriptors but not its thread. What the parent published
//! remains with the parent, and the child publishes under a name of its own. Dropping a
//! [`Published`] in the child closes the child's copy of the descriptor and withdraws nothing. Two
//! descriptors of the parent's thread stay open in the child until it ends or executes another
//! program.

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

/// A descriptor that other processes can fetch until this is dropped. Dropping it closes the
/// descriptor.
pub(crate) struct PublishedDescriptor {
    token: Token,
    /// The only lasting reference. The thread takes another while it sends, under a lock that
    /// withdrawing also takes.
    _descriptor: Arc<OwnedFd>,
}

/// Publishes `descriptor` for processes that have its token.
///
/// # Errors
/// [`Error::ShareDescriptor`] if the system refuses a socket, a thread or random numbers.
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

/// Returns the error constructor for an operation of [`publish`].
fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::ShareDescriptor {
        operation,
        source: error.into(),
    }
}
