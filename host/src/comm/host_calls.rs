//! Collective calls that run on the host only: ranks share memory, exchange bytes or wait for each
//! other through the store.

use core::sync::atomic::Ordering;

use fusewire_device::layout::MAX_WINDOWS;

use super::Communicator;
use super::rendezvous::{Rendezvous, Watched};
use crate::memory::Memory;
use crate::{Error, Result};

impl Communicator {
    /// Returns the number of the next collective host call.
    pub(super) fn next_host_call(&self) -> u64 {
        self.inner.host_calls.fetch_add(1, Ordering::Relaxed)
    }

    /// Shares a new segment of `bytes` bytes of every rank. All ranks must call this together.
    pub(super) fn share(&self, what: &str, bytes: u64) -> Result<Vec<Memory>> {
        let memory = Memory::create(self.device(), bytes, "fusewire-window")?;
        self.share_memory(what, memory)
    }

    /// Shares a piece of memory of every rank. All ranks must call this together.
    pub(super) fn share_memory(&self, what: &str, memory: Memory) -> Result<Vec<Memory>> {
        // Counted even if the window is refused, so that the keys of later calls agree on all
        // ranks.
        let what = format!("{what}-{}", self.next_host_call());
        if self.inner.windows.count() == MAX_WINDOWS {
            return Err(Error::Communicator {
                name: self.inner.name.clone(),
                detail: format!(
                    "there are {MAX_WINDOWS} windows already, the most that a communicator can \
                     have; free windows, end registrations, or allocate fewer and larger tensors \
                     and slice them"
                ),
            });
        }
        self.rendezvous().share(self.device(), &what, memory)
    }

    /// Waits in the store until all ranks have called this.
    pub(super) fn host_barrier(&self, what: &str) -> Result<()> {
        self.rendezvous()
            .barrier(&format!("{what}-{}", self.next_host_call()))
    }

    /// Returns the bytes of every rank. All ranks must call this together.
    pub(super) fn exchange(&self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let what = format!("{what}-{}", self.next_host_call());
        self.rendezvous().exchange(&what, own)
    }

    pub(super) fn rendezvous(&self) -> Rendezvous<'_> {
        let inner = &*self.inner;
        Rendezvous {
            store: &*inner.store,
            prefix: &inner.prefix,
            name: &inner.name,
            rank: inner.rank,
            size: inner.size,
            timeout: inner.options.timeout,
            watched: Watched {
                communicator: Some(inner),
                members: inner.watched_members(0..inner.size),
            },
        }
    }
}
