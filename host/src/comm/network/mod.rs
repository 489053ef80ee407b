//! Reaching ranks that are not reachable by load and store: kernels append requests to a ring
//! ([`fusewire_device::net`]), and an agent executes them.
//!
//! | module | content |
//! |---|---|
//! | `ring` | the memory that kernels and the agent share |
//! | `proxy` | the agent between hosts: a thread of the process, and the kernels that wait |
//! | `endpoint` | a rank as other processes reach it: windows, mirrors, failures |
//! | `testing` | an agent that delays and reorders requests between ranks of one host |

mod endpoint;
mod proxy;
mod ring;
mod testing;

use std::sync::Arc;

pub(super) use self::proxy::{Attached, NetworkParts, Proxy};
pub(super) use self::testing::TestNetwork;

use fusewire_device::comm::WindowAddr;

use super::Inner;
use crate::Result;

/// Agent of a communicator whose ranks do not all reach each other by load and store.
pub(super) enum Network {
    /// Executes requests in random order, between ranks of one host.
    Test(TestNetwork),
    /// Sends requests to other processes.
    Proxy(Attached),
}

impl Network {
    /// Returns the address of the context for kernels.
    pub(super) fn context(&self) -> u64 {
        match self {
            Self::Test(network) => network.context(),
            Self::Proxy(attached) => attached.context(),
        }
    }

    /// Starts the agent, if it needs the communicator.
    pub(super) fn start(inner: &Arc<Inner>) -> Result<()> {
        match (&inner.executor.network, inner.group.options.testing.network) {
            (Some(Self::Test(_)), Some(options)) => testing::start(inner, options.seed),
            (Some(Self::Proxy(attached)), _) => {
                attached.serve(Arc::downgrade(inner));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Called after a failure. The first call stops the ranks that are not reachable by load and
    /// store, if this rank has detected the failure. The proxy writes nothing to this rank's memory
    /// after the call.
    pub(super) fn after_failure(&self, inner: &Inner) {
        match self {
            Self::Test(network) => network.stop_others(inner),
            Self::Proxy(attached) => attached.after_failure(),
        }
    }

    /// Stores a word in the memory of a rank of another process. Later requests to that rank are
    /// executed after it.
    pub(super) fn store(&self, rank: u32, addr: WindowAddr, value: u64) {
        match self {
            Self::Test(_) => {}
            Self::Proxy(attached) => attached.store(rank, addr, value),
        }
    }

    /// Notifies the ranks of connected processes that this rank has left.
    pub(super) fn leave(&self) {
        match self {
            Self::Test(_) => {}
            Self::Proxy(attached) => attached.leave(),
        }
    }

    /// Waits up to 1 s until the ranks of connected processes have left, too.
    pub(super) fn await_others(&self) {
        match self {
            Self::Test(_) => {}
            Self::Proxy(attached) => attached.await_others(),
        }
    }

    /// Returns true if the ranks' memory is mapped in this process although kernels do not use it.
    pub(super) fn maps_all(&self) -> bool {
        matches!(self, Self::Test(_))
    }

    /// Returns the reason why `rank` can no longer be reached, if the network has found one.
    pub(super) fn reason_of_loss(&self, rank: u32) -> Option<String> {
        match self {
            Self::Test(_) => None,
            Self::Proxy(attached) => attached.reason_of_loss(rank),
        }
    }
}
