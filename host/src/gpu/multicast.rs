//! Multicast objects: one address for memory of several GPUs.

use core::fmt;
use std::sync::Arc;

use super::Gpu;
use super::driver::RawMulticast;

/// A multicast object to which this rank has bound memory.
pub(crate) struct Multicast {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) raw: RawMulticast,
    /// Address at which stores reach all ranks.
    pub(crate) address: u64,
}

impl fmt::Debug for Multicast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Multicast")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        // SAFETY: either the window has been freed on all ranks, or the object was never used.
        let released = unsafe { self.gpu.driver().release_multicast(self.raw, self.address) };
        if let Err(error) = released {
            tracing::warn!(%error, "a multicast object could not be freed");
        }
    }
}
