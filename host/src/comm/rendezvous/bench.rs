//! A rendezvous that maps no memory, for benchmarks.

use core::time::Duration;

use super::{RankClaim, Rendezvous, Watched};
use crate::Result;
use crate::comm::topology::Locality;
use crate::cpu::SegmentDescriptor;
use crate::memory::MemoryDescriptor;
use crate::store::Store;

/// Runs the rendezvous of [`Communicator::new`](crate::Communicator::new) as a rank of the
/// simulated host `host`, without mapping memory. Returns the number of ranks on that host. For
/// benchmarks.
///
/// # Errors
/// The errors of [`Communicator::new`](crate::Communicator::new).
#[doc(hidden)]
pub fn bench_rendezvous(
    store: &dyn Store,
    name: &str,
    (rank, size): (u32, u32),
    host: &str,
    timeout: Duration,
) -> Result<usize> {
    let claim = RankClaim::take(store, name, rank, host)?;
    let rendezvous = Rendezvous {
        store,
        prefix: &claim.prefix,
        name,
        rank,
        size,
        timeout,
        watched: Watched::default(),
    };
    let own = MemoryDescriptor::Host(SegmentDescriptor {
        pid: std::process::id(),
        fd: rank,
        bytes: 1,
        inode: 1,
        start_time: 1,
    });
    let infos = rendezvous
        .gather("workspace-bench", &own, &Locality::on_host(host))?
        .infos;
    rendezvous.broadcast_bool("oversubscribed", true)?;
    rendezvous.end("mapped", "workspace-bench", host, &["oversubscribed"])?;
    Ok(infos.len())
}
