//! Configuration that a communicator is formed from.

use core::time::Duration;
use std::sync::Arc;

use crate::backend::Reach;
use crate::comm::Inner;
use crate::comm::observe::Hooks;
use crate::comm::rendezvous::{Rendezvous, Watched, WatchedMember};
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;

/// Configuration that a communicator is formed from.
pub(in crate::comm) struct CommConfig {
    pub(in crate::comm) device: Device,
    pub(in crate::comm) rank: u32,
    pub(in crate::comm) size: u32,
    pub(in crate::comm) store: Arc<dyn Store>,
    /// Set if the other ranks have other stores.
    pub(in crate::comm) has_private_store: bool,
    /// Name that no other communicator of the ranks has.
    pub(in crate::comm) name: String,
    /// Name that the program has given.
    pub(in crate::comm) label: String,
    pub(in crate::comm) options: Options,
    /// Prefix of the communicator's keys in the store.
    pub(in crate::comm) prefix: String,
    pub(in crate::comm) generation: u64,
    pub(in crate::comm) hooks: Hooks,
    /// Timeout of the rendezvous; that of the options if it is `None`.
    pub(in crate::comm) rendezvous_timeout: Option<Duration>,
    pub(in crate::comm) reach: Reach,
    /// The communicator whose ranks form this one. Its failure ends the rendezvous.
    pub(in crate::comm) parent: Option<Arc<Inner>>,
    /// The communicator that this one replaces, and the number of its aborts on this rank when the
    /// call began. A further abort ends the rendezvous.
    pub(in crate::comm) replaced: Option<(Arc<Inner>, u64)>,
    /// The other ranks on this host, as far as they are known before the rendezvous.
    pub(in crate::comm) members: Vec<WatchedMember>,
}

impl CommConfig {
    pub(in crate::comm) fn rendezvous(&self) -> Rendezvous<'_> {
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
