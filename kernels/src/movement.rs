//! Operations that only move bytes: all_gather, broadcast, scatter, gather, all_to_all. Protocol:
//! rounds.
//!
//! Data is pulled: a rank reads what it needs from its peers' inputs (or their staging) straight
//! into its output, so an output needs no staging. `count` is in units of `size` bytes.
//!
//! In place: all_gather's input may be row r of the output, scatter's output row root of the input,
//! gather's input row root of the output, broadcast's input the output: what is written then is
//! read by nobody else. all_to_all in place is staged by the host.

use fusewire_device::bulk;
use fusewire_device::comm::{WindowAddr, ring};
use fusewire_device::mem::Policy;
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Group, Machine, kernel};

use crate::exchange::{Body, Memory, Round};
use crate::policy;

/// Rows that a rank pulls from each peer.
#[derive(Clone, Copy)]
pub(crate) struct PullPlan {
    /// First rank to pull from, and how many (from there on, wrapping round).
    pub(crate) first: u32,
    pub(crate) ranks: u32,
    /// Row of the peer's input.
    pub(crate) row: usize,
    /// True if the data of rank p goes to row p of the output, else to row 0.
    pub(crate) by_rank: bool,
    pub(crate) policy: Policy,
}

impl<M: Machine> Body<M> for PullPlan {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let block = session.block();
        let size = session.comm().size();
        let (first, last) = memory.part(block, round, 0);
        let length = last - first;
        let mut step = 0;
        while step < self.ranks {
            let rank = ring(self.first, step, size);
            let Some(from) = memory.pulled(session, round, rank, self.row, first, length) else {
                return false;
            };
            let row = if self.by_rank { rank as usize } else { 0 };
            let at = (row * memory.count + round.start + first) * memory.size;
            let to = memory.target.wrapping_add(at);
            if !core::ptr::eq(to, from) {
                // SAFETY: the source was checked against its window; the target is the caller's.
                unsafe { bulk::copy(block, to, from, length * memory.size, self.policy) };
            }
            step += 1;
        }
        block.sync();
        true
    }
}

/// Parameters of every kernel of this module.
pub type MovementParams = AllGatherParams;

macro_rules! movement_kernel {
    (
        $(#[$doc:meta])* $name:ident, $(params = $params:path,)?
        |$rank:ident, $ranks:ident, $root:ident| $rows:expr,
        $pulls:expr
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The buffers valid for what the operation reads and writes; `chunk` units of each row (a
        /// multiple of [`crate::ALIGNMENT`]) must fit staging.
        #[kernel($(params = $params)?)]
        pub unsafe fn $name(
            session: &mut Session<impl Machine>,
            size: u64,
            source: *const u8,
            source_at: u64,
            target: *mut u8,
            chunk: u64,
            hint: u32,
        ) -> Result<(), Aborted> {
            let count = session.count();
            let ($rank, $ranks) = (session.comm().rank(), session.comm().size());
            let $root = session.call().root();
            let _ = ($rank, $ranks, $root);
            let memory = Memory {
                size: size as usize,
                count: count as usize,
                chunk: chunk as usize,
                source,
                source_at: WindowAddr(source_at),
                source_rows: $rows,
                target,
                target_at: WindowAddr::NONE,
                target_shared: false,
                shards: 1,
                alignment: crate::ALIGNMENT,
                scalar: 0,
            };
            let policy = policy(hint);
            let pulls = PullPlan { policy, ..$pulls };
            // SAFETY: the caller's promise.
            let done = unsafe { memory.run(session, policy, &pulls) };
            session.settle(done)
        }
    };
}

movement_kernel!(
    /// all_gather: `count` units of every rank, to row r of every rank's output.
    all_gather,
    |rank, ranks, root| 1,
    PullPlan { first: rank, ranks, row: 0, by_rank: true, policy: Policy::Cached }
);

movement_kernel!(
    /// broadcast: `count` units of the root to every rank's output.
    broadcast, params = AllGatherParams,
    |rank, ranks, root| u32::from(rank == root),
    PullPlan { first: root, ranks: 1, row: 0, by_rank: false, policy: Policy::Cached }
);

movement_kernel!(
    /// scatter: row r of the root's input, `count` units, to rank r's output.
    scatter, params = AllGatherParams,
    |rank, ranks, root| if rank == root { ranks } else { 0 },
    PullPlan { first: root, ranks: 1, row: rank as usize, by_rank: false, policy: Policy::Cached }
);

movement_kernel!(
    /// gather: `count` units of every rank, to row r of the root's output.
    gather, params = AllGatherParams,
    |rank, ranks, root| 1,
    PullPlan {
        first: rank,
        ranks: if rank == root { ranks } else { 0 },
        row: 0,
        by_rank: true,
        policy: Policy::Cached,
    }
);

movement_kernel!(
    /// all_to_all: row r of every rank's input, `count` units, to rank r's output.
    all_to_all, params = AllGatherParams,
    |rank, ranks, root| ranks,
    PullPlan { first: rank, ranks, row: rank as usize, by_rank: true, policy: Policy::Cached }
);
