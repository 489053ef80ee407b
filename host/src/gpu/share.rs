//! Descriptors for other processes of this host: exported GPU memory cannot be opened anew through
//! `/proc`, as files of memory can, so it goes over a Unix socket with `SCM_RIGHTS`.
//!
//! A process [`publish`]es a descriptor and sends its peers the [`Token`], over the store. A
//! process that holds the token [`fetch()`]es a descriptor of the same object, as often as it
//! likes, as long as the [`PublishedDescriptor`] lives. The owner needs no call for that: one thread of its
//! process answers. It starts with the first published descriptor and ends with the last. Its
//! socket has a random name in the abstract namespace, so nothing is left in a file system, however
//! the process ends.
//!
//! # Trust
//! Only processes of the same user, or of root, are answered, and they must show the token's secret.
//! A fetching process shows it to nobody but the very process that the token names.
//!
//! # Forks
//! A forked child shares its parent's descriptors but not its thread: what the parent published
//! stays with the parent, and the child publishes under a name of its own. Dropping a [`PublishedDescriptor`]
//! in the child closes the child's copy of the descriptor and withdraws nothing. Two descriptors of
//! the parent's thread stay open in the child until it ends or executes another program.

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

/// A descriptor that other processes can fetch, until this is dropped. Dropping closes it.
pub(crate) struct PublishedDescriptor {
    token: Token,
    /// The only lasting reference: the thread takes another one while it sends, under a lock that
    /// withdrawing takes first.
    _descriptor: Arc<OwnedFd>,
}

/// Makes `descriptor` fetchable for those who know its token.
///
/// # Errors
/// [`Error::ShareDescriptor`] when the system refuses a socket, a thread or random numbers.
pub(crate) fn publish(descriptor: OwnedFd) -> Result<PublishedDescriptor> {
    let descriptor = Arc::new(descriptor);
    let token = server::add(Arc::downgrade(&descriptor))?;
    Ok(PublishedDescriptor {
        token,
        _descriptor: descriptor,
    })
}

impl PublishedDescriptor {
    /// What a process of this host needs to [`fetch()`] the descriptor.
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
        f.debug_tuple("PublishedDescriptor").field(&self.token).finish()
    }
}

/// Error of an operation of [`publish`].
fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::ShareDescriptor {
        operation,
        source: error.into(),
    }
}
