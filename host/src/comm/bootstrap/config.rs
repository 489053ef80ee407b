//! Configuration that a communicator is formed from.

use core::time::Duration;
use std::sync::Arc;

use crate::backend::Reach;
use crate::comm::observe::Hooks;
use crate::comm::rendezvous::Rendezvous;
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;

/// Configuration that a communicator is formed from.
pub(in crate::comm) struct CommConfig {
    pub(in crate::comm) device: Device,
    pub(in crate::comm) rank: u32,
    pub(in crate::comm) size: u32,
    pub(in crate::comm) store: Arc<dyn Store>,
    pub(in crate::comm) name: String,
    pub(in crate::comm) options: Options,
    /// Its keys in the store start with this.
    pub(in crate::comm) prefix: String,
    pub(in crate::comm) generation: u64,
    pub(in crate::comm) hooks: Hooks,
    /// Timeout of the rendezvous; `options.timeout` if it is `None`.
    pub(in crate::comm) rendezvous_timeout: Option<Duration>,
    pub(in crate::comm) reach: Reach,
}

impl CommConfig {
    pub(in crate::comm) fn rendezvous(&self) -> Rendezvous<'_> {
        Rendezvous {
            store: &*self.store,
            prefix: &self.prefix,
            name: &self.name,
            rank: self.rank,
            size: self.size,
            timeout: self.rendezvous_timeout.unwrap_or(self.options.timeout),
        }
    }
}
