//! Configuration that a communicator is formed from.

use core::time::Duration;
use std::sync::Arc;

use super::Inner;
use super::observe::Hooks;
use super::rendezvous::{Rendezvous, Watched, WatchedMember};
use crate::backend::Reach;
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;

/// Configuration that a communicator is formed from.
pub(super) struct CommConfig {
    pub(super) device: Device,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) store: Arc<dyn Store>,
    /// Set if the other ranks have other stores.
    pub(super) has_private_store: bool,
    /// Name that no other communicator of the ranks has.
    pub(super) name: String,
    /// Name that the program has given.
    pub(super) label: String,
    pub(super) options: Options,
    /// Prefix of the communicator's keys in the store.
    pub(super) prefix: String,
    pub(super) generation: u64,
    pub(super) hooks: Hooks,
    /// Timeout of the rendezvous; that of the options if it is `None`.
    pub(super) rendezvous_timeout: Option<Duration>,
    pub(super) reach: Reach,
    /// The communicator whose ranks form this one. Its failure ends the rendezvous.
    pub(super) parent: Option<Arc<Inner>>,
    /// The communicator that this one replaces, and the number of its aborts on this rank when the
    /// call began. A further abort ends the rendezvous.
    pub(super) replaced: Option<(Arc<Inner>, u64)>,
    /// The other ranks on this host, as far as they are known before the rendezvous.
    pub(super) members: Vec<WatchedMember>,
}

impl CommConfig {
    pub(super) fn rendezvous(&self) -> Rendezvous<'_> {
        Rendezvous {
            store: &*self.store,
            prefix: &self.prefix,
            name: &self.name,
            rank: self.rank,
            size: self.size,
            timeout: (self.rendezvous_timeout).unwrap_or_else(|| self.options.rendezvous_timeout()),
            watched: Watched {
                communicator: self.parent.as_deref(),
                replaced: (self.replaced.as_ref()).map(|(inner, aborts)| (&**inner, *aborts)),
                members: self.members.clone(),
            },
        }
    }
}
