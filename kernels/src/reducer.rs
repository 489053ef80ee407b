//! Reductions of every rank's input, over rounds. A reduction is compiled for one type and
//! operation, or selected at run time.

use core::marker::PhantomData;

use fusewire_device::bulk::{self, Range, Tables};
use fusewire_device::call::{Call, Operation};
use fusewire_device::element::{Reduction, WithReduction, dispatch};
use fusewire_device::mem::Policy;
use fusewire_device::session::{Aborted, Session};
use fusewire_device::{Block, DType, Element, Group, Machine};

use crate::exchange::{Body, Exchange, Memory, MemoryLayout, Part, Round};

/// Reduces ranges of one type by one reduction.
pub(crate) trait Reducer: Copy {
    /// Returns the bytes of an element.
    fn size(self) -> usize;

    /// Reduces `range`. All lanes together.
    ///
    /// # Safety
    /// As [`bulk::reduce`].
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range);
}

/// Reduces elements of `T` by `O`.
pub(crate) struct StaticReducer<T, O>(pub(crate) PhantomData<(T, O)>);

impl<T, O> Clone for StaticReducer<T, O> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, O> Copy for StaticReducer<T, O> {}

impl<T: Element, O: Reduction<T>> Reducer for StaticReducer<T, O> {
    #[inline(always)]
    fn size(self) -> usize {
        size_of::<T>()
    }

    #[inline(always)]
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range) {
        // SAFETY: the precondition of this function.
        unsafe { bulk::reduce::<M, T, O>(block, tables, range) }
    }
}

/// Reduces by the type and the reduction of a call.
#[derive(Clone, Copy)]
pub(crate) struct DynReducer {
    dtype: DType,
    reduction: u8,
}

impl DynReducer {
    /// Returns the reducer of `call`, if the call has a type.
    #[inline(always)]
    pub(crate) fn of(call: Call) -> Option<Self> {
        let dtype = DType::from_code(call.dtype())?;
        Some(Self {
            dtype,
            reduction: call.reduction(),
        })
    }

    /// Returns the type.
    #[inline(always)]
    pub(crate) const fn dtype(self) -> DType {
        self.dtype
    }
}

impl Reducer for DynReducer {
    #[inline(always)]
    fn size(self) -> usize {
        self.dtype.size()
    }

    #[inline(always)]
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range) {
        struct Switch<M> {
            block: Block<M>,
            tables: Tables,
            range: Range,
        }
        impl<M: Machine> WithReduction for Switch<M> {
            type Output = ();
            #[inline(always)]
            fn run<T: Element, O: Reduction<T>>(self) {
                // SAFETY: the precondition of `Reducer::reduce`.
                unsafe { bulk::reduce_rare::<M, T, O>(self.block, self.tables, self.range) }
            }
        }
        // Before a launch, the host rejects combinations that do not exist.
        let _ = dispatch(
            self.dtype as u8,
            self.reduction,
            Switch {
                block,
                tables,
                range,
            },
        );
    }
}

/// Value of the root that means every rank.
pub(crate) const ALL: u32 = 0xffff;

/// Reduces a row of every rank's input. If `SHARDS` is true, each rank reduces its shard of the
/// row, and writes it to the output of the root or, if the root is [`ALL`], of every rank.
/// Otherwise, each rank with a result reduces the whole row into its own output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduce<R, const SHARDS: bool> {
    pub(crate) reducer: R,
    pub(crate) policy: Policy,
    /// The row of every rank's input.
    row: u32,
    root: u32,
}

impl<M: Machine, R: Reducer, const SHARDS: bool> Body<M> for Reduce<R, SHARDS> {
    #[inline(always)]
    fn writes_for_peers(&self) -> bool {
        SHARDS
    }

    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let me = session.rank();
        if !SHARDS && self.root != ALL && self.root != me {
            return Ok(());
        }
        let shard = if SHARDS { me } else { 0 };
        self.part(session, memory, memory.part(session.block(), round, shard))
    }
}

impl<R: Reducer, const SHARDS: bool> Reduce<R, SHARDS> {
    /// Reduces a part of the round. All lanes together; the block must synchronize before the next
    /// part.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn part<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
        part: Part,
    ) -> Result<(), Aborted> {
        let (block, ranks) = (session.block(), session.ranks());
        // SAFETY: the kernels of this crate that reduce over rounds use the start of shared memory
        // for these tables only.
        let tables = unsafe { Tables::new(block, ranks) };
        // Only a shared output may lack the row.
        let (part, own) = match memory.own_target(0, part) {
            Some(own) => (part, own),
            None if SHARDS => (part, core::ptr::null_mut()),
            None => (part.slice(0, 0), core::ptr::null_mut()),
        };
        memory.fill_sources(session, tables, part, self.row)?;
        let (first, targets) = match self.root {
            _ if !SHARDS => (session.rank(), 1),
            ALL => (0, ranks),
            root => (root, 1),
        };
        if SHARDS {
            let mut failed = false;
            for index in block.elements_of_block(targets as usize) {
                let index = index as u32;
                match memory.target_of(session, part, first + index) {
                    Some(at) => tables.set_target(index, at),
                    None => failed = true,
                }
            }
            session.settle(!block.any(failed))?;
        } else if block.is_leader() {
            tables.set_target(0, own);
        }
        block.sync();
        let range = Range {
            ranks,
            targets,
            count: part.len(),
            policy: self.policy,
        };
        // SAFETY: the tables have an address for each rank and target, which `Memory` has checked
        // against its buffers and the windows. In a round, no other rank or block writes this part
        // of the inputs or accesses it in the outputs.
        unsafe { self.reducer.reduce(block, tables, range) };
        Ok(())
    }
}

/// Returns the layout and the work of a call whose ranks reduce into their own outputs only:
/// [`rows`] for a reduce_scatter, otherwise [`one_shot`].
#[inline(always)]
pub(crate) fn whole<M: Machine, R: Reducer>(
    session: &Session<M>,
    reducer: R,
    exchange: &Exchange,
) -> (MemoryLayout, Reduce<R, false>) {
    if session.call().is(Operation::ReduceScatter) {
        rows(session, reducer, exchange)
    } else {
        one_shot(session, reducer, exchange)
    }
}

/// Returns the layout and the work of a reduction of one row in one shot: every rank, or the root,
/// reduces all inputs.
#[inline(always)]
pub(crate) fn one_shot<M: Machine, R: Reducer>(
    session: &Session<M>,
    reducer: R,
    exchange: &Exchange,
) -> (MemoryLayout, Reduce<R, false>) {
    let root = session.call().root();
    let layout = MemoryLayout {
        target_rows: u32::from(root == ALL || root == session.rank()),
        ..exchange.layout(session.count(), reducer.size())
    };
    (layout, reduce(reducer, exchange, 0, root))
}

/// Returns the layout and the work of a reduction of one row in two shots: rank r reduces shard r
/// of all inputs, and writes it to all outputs, or to the root's.
#[inline(always)]
pub(crate) fn shards<M: Machine, R: Reducer>(
    session: &Session<M>,
    reducer: R,
    exchange: &Exchange,
) -> (MemoryLayout, Reduce<R, true>) {
    let root = session.call().root();
    let has_result = root == ALL || root == session.rank();
    let layout = MemoryLayout {
        target_rows: u32::from(has_result),
        target_shared: has_result,
        shards: session.ranks(),
        ..exchange.layout(session.count(), reducer.size())
    };
    (layout, reduce(reducer, exchange, 0, root))
}

/// Returns the layout and the work of a reduction of a row for each rank: rank r reduces row r of
/// all inputs.
#[inline(always)]
pub(crate) fn rows<M: Machine, R: Reducer>(
    session: &Session<M>,
    reducer: R,
    exchange: &Exchange,
) -> (MemoryLayout, Reduce<R, false>) {
    let layout = MemoryLayout {
        source_rows: session.ranks(),
        ..exchange.layout(session.count(), reducer.size())
    };
    (layout, reduce(reducer, exchange, session.rank(), ALL))
}

#[inline(always)]
fn reduce<R: Reducer, const SHARDS: bool>(
    reducer: R,
    exchange: &Exchange,
    row: u32,
    root: u32,
) -> Reduce<R, SHARDS> {
    Reduce {
        reducer,
        policy: exchange.policy(),
        row,
        root,
    }
}
