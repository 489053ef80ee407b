//! Collective calls that run on the host only: ranks share memory, exchange bytes or wait for each
//! other through the store.

use fusewire_device::layout::MAX_WINDOWS;

use super::Communicator;
use super::rendezvous::{Rendezvous, Watched};
use crate::Result;
use crate::memory::Memory;

impl Communicator {
    /// Shares a new segment of `bytes` bytes of every rank. All ranks must call this together.
    pub(super) fn share(&self, what: &str, bytes: u64) -> Result<Vec<Memory>> {
        let memory = Memory::create(self.device(), bytes, "fusewire-window")?;
        self.share_memory(what, memory)
    }

    /// Shares a piece of memory of every rank. All ranks must call this together.
    pub(super) fn share_memory(&self, what: &str, memory: Memory) -> Result<Vec<Memory>> {
        // Counted even if the window is refused, so that the keys of later calls agree on all
        // ranks.
        let what = format!("{what}-{}", self.inner.group.next_host_call());
        if self.inner.windows.count() == MAX_WINDOWS {
            return Err(self.inner.group.error(format!(
                "there are {MAX_WINDOWS} windows already, the most that a communicator can \
                     have; free windows, end registrations, or allocate fewer and larger tensors \
                     and slice them"
            )));
        }
        self.rendezvous().share(self.device(), &what, memory)
    }

    /// Waits in the store until all ranks have called this.
    pub(super) fn host_barrier(&self, what: &str) -> Result<()> {
        self.rendezvous()
            .barrier(&format!("{what}-{}", self.inner.group.next_host_call()))
    }

    /// Returns the bytes of every rank. All ranks must call this together.
    pub(super) fn exchange(&self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let what = format!("{what}-{}", self.inner.group.next_host_call());
        self.rendezvous().exchange(&what, own)
    }

    pub(super) fn rendezvous(&self) -> Rendezvous<'_> {
        let inner = &*self.inner;
        Rendezvous {
            store: &*inner.group.store,
            prefix: &inner.group.prefix,
            name: &inner.group.full_name,
            rank: inner.group.rank,
            size: inner.group.size,
            timeout: self.timeout(),
            watched: Watched {
                communicator: Some(inner),
                members: inner.group.watched_members(0..inner.group.size),
            },
        }
    }
}
