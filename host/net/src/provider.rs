//! Traits of transport providers.
//!
//! The interface has the operations *write*, *store*, *read* and *notify* instead of a byte stream,
//! because RDMA hardware implements these operations. [`Verbs`](super::Verbs) maps them as follows:
//!
//! - `write` is `IBV_WR_RDMA_WRITE`. With a notification it is `IBV_WR_RDMA_WRITE_WITH_IMM`, which
//!   is ordered after the earlier writes of its queue pair, as this interface requires.
//! - `store` is an `IBV_WR_RDMA_WRITE` of 8 bytes, sent inline if the device supports it.
//! - `read` is `IBV_WR_RDMA_READ`. A later write waits until the read has completed (fence).
//! - `wait_for_write` counts receive completions. The sender thread, or any thread that holds the
//!   link's lock, polls the completion queue and completes the [`Pending`]s.
//! - `bind` creates the queue pair, and listens on a TCP port. The first messages of the TCP
//!   connections exchange the addresses of the queue pairs.
//! - The first use of a [`RemoteKey`](super::RemoteKey) sends a request to the owner of the memory
//!   over the TCP connection. The owner registers the memory with the device, and returns the
//!   memory's address and rkey. Dropping the memory revokes them.
//! - A timeout or failure destroys this side's queue pair before it is reported, so this side's
//!   device accesses no memory afterwards.
//!
//! Providers without one-sided operations use a thread that serves requests, as TCP does.

use core::fmt;
use core::time::Duration;
use std::sync::Arc;

use crate::Result;
use crate::key::RemoteBuffer;
use crate::memory::{View, ViewMut};
use crate::pending::Pending;
use crate::url::Url;

/// Effect of a write on the peer's [`wait_for_write`](super::Transport::wait_for_write).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The write is a notification: it makes one call of `wait_for_write` return.
    Yes,
    /// The write is not a notification.
    No,
}

/// Creates links over one kind of connection.
pub trait Provider: fmt::Debug + Send + Sync {
    /// Returns the scheme of the provider's URLs, such as `tcp`.
    fn scheme(&self) -> &'static str;

    /// Returns true if this machine supports the provider.
    fn supported(&self) -> bool;

    /// Creates one side of a link, which listens for its peer.
    ///
    /// # Errors
    /// `Error::Call` or `Error::Memory` if a system call fails.
    fn bind(&self) -> Result<Arc<dyn ByteTransport>>;
}

/// One side of a link between two processes. [`Transport`](super::Transport) documents the calls,
/// and checks the lengths before it calls a link. A link that has failed stays failed; a new link
/// replaces it. Dropping a link aborts it.
pub trait ByteTransport: fmt::Debug + Send + Sync {
    /// Returns the URL at which the peer reaches this side.
    fn url(&self) -> &Url;

    /// Connects to the peer. Called once per link.
    ///
    /// # Errors
    /// `Error::Call` if the connection is not established within `timeout`.
    fn connect(&self, peer: &Url, timeout: Duration) -> Result<()>;

    /// Returns true if both directions are connected.
    fn connected(&self) -> bool;

    /// Returns true if the link is broken or aborted.
    fn has_failed(&self) -> bool;

    /// Writes to the peer's memory. Writes of one link are applied in order.
    fn write(
        &self,
        source: View,
        target: RemoteBuffer,
        notify: Notify,
        timeout: Duration,
    ) -> Pending;

    /// Stores a word to the peer's memory by one instruction, after the earlier writes of this
    /// link.
    fn store(&self, word: u64, target: RemoteBuffer, timeout: Duration) -> Pending;

    /// Reads the peer's memory, after the earlier writes of this link.
    fn read(&self, target: ViewMut, source: RemoteBuffer, timeout: Duration) -> Pending;

    /// Takes one notification.
    ///
    /// # Errors
    /// `Error::Call` if no notification arrives in time, or if the link ends.
    fn wait_for_write(&self, timeout: Duration) -> Result<()>;

    /// Ends the link. All waiting calls return an error.
    fn abort(&self);
}
