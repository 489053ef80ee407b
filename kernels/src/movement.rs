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

use fusewire_device::bulk::{self, Tables};
use fusewire_device::call::Operation;
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
    #[inline(always)]
    fn writes_for_peers(&self) -> bool {
        false
    }

    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let block = session.block();
        let part = memory.part(block, round, 0);
        if M::LANES == 1 {
            let mut step = 0;
            while step < self.ranks {
                let (rank, row) = self.row(session, memory, step);
                memory.pull(session, part, (rank, self.row), row, self.policy)?;
                step += 1;
            }
            return Ok(());
        }
        // SAFETY: a kernel that moves rows uses the start of shared memory only for these tables.
        let tables = unsafe { Tables::new(block, session.ranks()) };
        let mut failed = false;
        for step in block.elements_of_block(self.ranks as usize) {
            let (rank, row) = self.row(session, memory, step as u32);
            let from = memory.fetch(session, part, rank, self.row);
            match (from, memory.own_target(row, part)) {
                (Some(from), Some(to)) => {
                    let bytes = part.len() * memory.layout().size;
                    tables.set_source(step as u32, from, bytes as u64);
                    tables.set_target(step as u32, to);
                }
                _ => failed = true,
            }
        }
        session.settle(!block.any(failed) && session.fetched())?;
        // SAFETY: the lanes have set an entry for each row, and passed a barrier. The sources were
        // checked against the input or their windows, and their owners write them only after this
        // rank's done signal; the targets were checked against the output.
        unsafe { bulk::copy_rows(block, tables, self.ranks, self.policy) };
        block.sync();
        Ok(())
    }
}

impl PullPlan {
    /// Returns rank number `step` to pull from, and the row of the output for its data.
    #[inline(always)]
    fn row<M: Machine>(&self, session: &Session<M>, memory: &Memory, step: u32) -> (u32, u32) {
        let rank = ring(self.first, step, session.ranks());
        match memory.layout().target_rows {
            0 | 1 => (rank, 0),
            _ => (rank, rank),
        }
    }
}

/// Parameters of every kernel that moves rows.
pub type MovementParams = MoveRowsParams;

/// Moves rows of `count` units as the call's operation requires:
///
/// - all_gather: the row of rank r goes to row r of every rank's output;
/// - broadcast: the root's row goes to every rank's output;
/// - scatter: row r of the root's input goes to rank r's output;
/// - gather: the row of rank r goes to row r of the root's output;
/// - all_to_all: row r of rank p's input goes to row p of rank r's output.
///
/// # Safety
/// `exchange` must have the window address of the input, and a chunk of each row must fit staging.
/// During the launch, nothing else may write the input or access the output.
#[kernel]
pub unsafe fn move_rows(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    #[words(6)] exchange: Exchange,
) -> Result<(), Aborted> {
    let (rank, ranks, root) = (session.rank(), session.ranks(), session.call().root());
    let at_root = |rows| if rank == root { rows } else { 0 };
    // Rows of the input and of the output; first rank to pull from, number of ranks to pull from,
    // and row of their inputs.
    let is = |operation| session.call().is(operation);
    let ([source_rows, target_rows], [first, ranks, row]) = if is(Operation::Broadcast) {
        ([at_root(1), 1], [root, 1, 0])
    } else if is(Operation::Scatter) {
        ([at_root(ranks), 1], [root, 1, rank])
    } else if is(Operation::Gather) {
        ([1, at_root(ranks)], [rank, at_root(ranks), 0])
    } else if is(Operation::AllToAll) {
        ([ranks, ranks], [rank, ranks, rank])
    } else {
        ([1, ranks], [rank, ranks, 0])
    };
    let layout = MemoryLayout {
        source_rows,
        target_rows,
        ..exchange.layout(session.count(), exchange.size as usize)
    };
    let plan = PullPlan {
        first,
        ranks,
        row,
        policy: exchange.policy(),
    };
    // SAFETY: the precondition of this function.
    let memory = unsafe { Memory::new(session, source, target, layout)? };
    memory.run(session, exchange.policy(), &plan)
}
