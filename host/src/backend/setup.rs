//! Arguments and functions that create a backend.

use std::sync::Arc;

use super::Backend;
use crate::Result;
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;

/// Arguments for the creation of this rank's part of a backend's communicator. All ranks create
/// their parts at the same time.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Setup {
    /// This rank's number.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Store for the rendezvous of the ranks. Its keys are separate from those of other
    /// communicators.
    pub store: Arc<dyn Store>,
    /// Name of the communicator.
    pub name: String,
    /// Device whose memory the calls use.
    pub device: Device,
    /// Options of the communicator, such as timeout and hints.
    pub options: Options,
    /// Location of the ranks: on one host or on several.
    pub reach: Reach,
}

/// Location of a communicator's ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reach {
    /// All ranks are on one host: [`crate::bootstrap::host_id`] is equal on all of them.
    #[default]
    Host,
    /// Ranks may be on several hosts.
    Network,
}

/// Function that creates this rank's part of a communicator. Every rank calls the function.
pub type Factory = Arc<dyn Fn(&Setup) -> Result<Arc<dyn Backend>> + Send + Sync>;
