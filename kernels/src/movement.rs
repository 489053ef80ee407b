//! Operations that only move bytes: all_gather, broadcast, scatter, gather, all_to_all. Protocol:
//! rounds (`exchange`).
//!
//! A rank copies what it needs from its peers' inputs (or their staging) to its output, so an
//! output needs no staging. `count` is in units of `size` bytes.
//!
//! In place: the input of all_gather may be row r of its output, the output of scatter row `root`
//! of its input, the input of gather row `root` of its output, and the input of broadcast its
//! output. Other ranks do not read the memory that a rank then writes. For all_to_all in place, the
//! host passes no window address for the input, so the input is staged.

use fusewire_device::comm::ring;
use fusewire_device::mem::Policy;
use fusewire_device::{Aborted, Group, In, Machine, Out, Session, kernel};

use crate::Exchange;
use crate::exchange::{Body, Memory, MemoryLayout, Round};

/// Rows that a rank pulls from each peer. If the output has several rows, the data of rank p goes
/// to row p.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PullPlan {
    /// First rank to pull from.
    pub(crate) first: u32,
    /// Number of ranks, in the order of the ring.
    pub(crate) ranks: u32,
    /// Row of the peer's input.
    pub(crate) row: u32,
    pub(crate) policy: Policy,
}

impl<M: Machine> Body<M> for PullPlan {
    const ONLY_READS_PEERS: bool = true;

    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let part = memory.part(session.block(), round, 0);
        let mut step = 0;
        while step < self.ranks {
            let rank = ring(self.first, step, session.ranks());
            let row = match memory.layout().target_rows {
                0 | 1 => 0,
                _ => rank,
            };
            memory.pull(session, part, (rank, self.row), row, self.policy)?;
            step += 1;
        }
        session.block().sync();
        Ok(())
    }
}

/// Parameters of every kernel of this module.
pub type MovementParams = AllGatherParams;

/// Defines a kernel that pulls rows. From the rank, the number of ranks and the root, it computes
/// `(rows of the input, rows of the output)` and `(first rank to pull from, number of ranks to pull
/// from, row of their inputs)`.
macro_rules! movement_kernel {
    (
        $(#[$doc:meta])* $name:ident, $(params = $params:path,)?
        |$rank:ident, $ranks:ident, $root:ident| ($source_rows:expr, $target_rows:expr),
        ($first:expr, $count:expr, $row:expr)
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// `exchange` must have the window address of the input, and a chunk of each row must fit
        /// staging. During the launch, nothing else may write the input or access the output.
        #[kernel($(params = $params)?)]
        pub unsafe fn $name(
            session: &mut Session<impl Machine>,
            source: In<u8>,
            target: Out<u8>,
            #[words(6)] exchange: Exchange,
        ) -> Result<(), Aborted> {
            let ($rank, $ranks) = (session.rank(), session.ranks());
            let $root = session.call().root();
            let _ = ($rank, $ranks, $root);
            let layout = MemoryLayout {
                source_rows: $source_rows,
                target_rows: $target_rows,
                ..exchange.layout(session.count(), exchange.size as usize)
            };
            let plan = PullPlan {
                first: $first,
                ranks: $count,
                row: $row,
                policy: exchange.policy(),
            };
            // SAFETY: the precondition of this function.
            let memory = unsafe { Memory::new(session, source, target, layout)? };
            memory.run(session, exchange.policy(), &plan)
        }
    };
}

movement_kernel!(
    /// Runs an all_gather: `count` units of rank r go to row r of every rank's output.
    all_gather,
    |rank, ranks, root| (1, ranks),
    (rank, ranks, 0)
);

movement_kernel!(
    /// Runs a broadcast: `count` units of the root go to every rank's output.
    broadcast, params = AllGatherParams,
    |rank, ranks, root| (u32::from(rank == root), 1),
    (root, 1, 0)
);

movement_kernel!(
    /// Runs a scatter: row r of the root's input, `count` units, goes to rank r's output.
    scatter, params = AllGatherParams,
    |rank, ranks, root| (if rank == root { ranks } else { 0 }, 1),
    (root, 1, rank)
);

movement_kernel!(
    /// Runs a gather: `count` units of rank r go to row r of the root's output.
    gather, params = AllGatherParams,
    |rank, ranks, root| (1, if rank == root { ranks } else { 0 }),
    (rank, if rank == root { ranks } else { 0 }, 0)
);

movement_kernel!(
    /// Runs an all_to_all: `count` units, row r of rank p's input, go to row p of rank r's output.
    all_to_all, params = AllGatherParams,
    |rank, ranks, root| (ranks, ranks),
    (rank, ranks, rank)
);
