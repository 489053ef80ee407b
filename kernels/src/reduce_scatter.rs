//! reduce_scatter: rank r reads row r of every rank's input and keeps the result. Protocol: rounds.
//!
//! In place (the output is row r of the input) needs no staging: row r of rank r is read by rank r
//! only.

use fusewire_device::bulk::{Range, Tables};
use fusewire_device::mem::Policy;
use fusewire_device::session::Session;
use fusewire_device::{Group, Machine};

use crate::exchange::{Body, Memory, Round};
use crate::reducer::{Reducer, reduction_kernel};

/// This rank reduces its own row of every rank's input.
#[derive(Clone, Copy)]
pub(crate) struct OwnRow<R> {
    pub(crate) reducer: R,
    pub(crate) policy: Policy,
}

impl<M: Machine, R: Reducer> Body<M> for OwnRow<R> {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let (first, last) = memory.part(session.block(), round, 0);
        // SAFETY: the caller's promise.
        unsafe { self.range(session, memory, round, first, last - first) }
    }
}

impl<R: Reducer> OwnRow<R> {
    /// Reduces elements `[first, first + length)` of the round. False after a failure. All lanes
    /// together; the block must synchronise before the next range.
    ///
    /// # Safety
    /// As [`Body::round`].
    #[inline(always)]
    pub(crate) unsafe fn range<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
        round: Round,
        first: usize,
        length: usize,
    ) -> bool {
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        let block = session.block();
        // SAFETY: the kernels of this module leave these bytes to the tables.
        let tables = unsafe { Tables::new(block, session.ranks()) };
        if !memory.fill_sources(session, tables, round, me as usize, first, length) {
            return false;
        }
        if block.is_leader() {
            let at = (round.start + first) * memory.size;
            tables.set_target(0, memory.target.wrapping_add(at));
        }
        block.sync();
        let range = Range {
            ranks,
            targets: 1,
            count: length,
            policy: self.policy,
        };
        // SAFETY: the sources were checked against their windows; the rest is the caller's promise.
        unsafe { self.reducer.reduce(block, tables, range) };
        true
    }
}

/// # Safety
/// As the kernels below promise.
#[inline(always)]
unsafe fn reduce_rows<M: Machine, R: Reducer>(
    session: &mut Session<M>,
    reducer: R,
    memory: Memory,
    policy: Policy,
) -> bool {
    let memory = Memory {
        source_rows: session.comm().size(),
        ..memory
    };
    // SAFETY: the caller's promise.
    unsafe { memory.run(session, policy, &OwnRow { reducer, policy }) }
}

reduction_kernel!(
    /// reduce_scatter: `count` elements a rank; the input has `count` times the number of ranks.
    reduce_scatter,
    reduce_scatter_any,
    params = crate::all_reduce::AllReduceSignalParams,
    any_params = crate::all_reduce::AllReduceSignalParams,
    |session, reducer, memory, policy| reduce_rows(session, reducer, memory, policy)
);
