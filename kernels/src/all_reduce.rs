//! all_reduce and reduce.
//!
//! - **Packets, one shot:** every rank sends its input to every rank; each reduces all streams. One
//!   hop, P - 1 times the data out of each rank. Protocol: [`fusewire_device::packet`].
//! - **Signal, one shot:** every rank reads every rank's input. Protocol: rounds.
//! - **Two shots:** rank r reduces shard r of all inputs and writes it to all outputs (to the
//!   root's only for reduce): 2 (P - 1) / P times the data. Protocol: rounds.
//!
//! All three reduce an element by itself in rank order, so they give the same bits.

use fusewire_device::bulk::{self, Range, Tables};
use fusewire_device::element::{Average, Max, Number, Reduction, Sum};
use fusewire_device::mem::{self, Policy};
use fusewire_device::packet::{PAIR_DATA, Prefetch, Slots};
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Bf16, Block, Element, F16, Group, Machine, kernel};

use crate::exchange::{Body, Memory, Round};
use crate::reducer::{Reducer, reduction_kernel};

/// Runs a one-shot all_reduce by packets: `count` elements at `source` to `target`, which may be
/// the same.
///
/// # Safety
/// `constants` as for [`Session::begin`]; the buffers valid for `count` elements; `count` elements
/// of each block's part must fit [`fusewire_device::packet::capacity`].
#[kernel(
    each(T: f32 = f32, f16 = F16, bf16 = Bf16),
    each(O: sum = Sum, average = Average, max = Max)
)]
pub unsafe fn all_reduce_packet<T: Element, O: Reduction<T>>(
    session: &mut Session<impl Machine>,
    source: *const u8,
    target: *mut u8,
    // SAFETY: this block's part of the source, which the caller guarantees to be readable.
    #[before(unsafe { prefetch_part::<_, T>(block, header_count, source) })] prefetch: Prefetch,
) -> Result<(), Aborted> {
    let (first, bytes) = part::<_, T>(session.block(), session.count());
    let from = source.wrapping_add(first);
    let to = target.wrapping_add(first);
    let slots = Slots::open(session, bytes)?;
    // SAFETY: this block's part of the caller's buffers.
    let received = unsafe {
        slots.send_to_each(session, from, prefetch);
        reduce_streams::<_, T, O>(session, &slots, from, to, bytes)
    };
    session.settle(received)?;
    slots.close(session);
    Ok(())
}

/// Returns the byte offset and the bytes of this block's part of `count` elements.
#[inline(always)]
fn part<M: Machine, T>(block: Block<M>, count: u64) -> (usize, usize) {
    let (first, last) = block.slice(count as usize, crate::ALIGNMENT);
    (first * size_of::<T>(), (last - first) * size_of::<T>())
}

/// Reads ahead in this block's part of the source.
///
/// # Safety
/// `source` must be readable for `count` elements.
#[inline(always)]
unsafe fn prefetch_part<M: Machine, T>(block: Block<M>, count: u64, source: *const u8) -> Prefetch {
    let (first, bytes) = part::<_, T>(block, count);
    // SAFETY: the part is within the source.
    unsafe { Prefetch::read(block, source.wrapping_add(first), bytes) }
}

/// Reduces this rank's input with every peer's stream. False after a failure.
#[inline(always)]
unsafe fn reduce_streams<M: Machine, T: Element, O: Reduction<T>>(
    session: &Session<M>,
    slots: &Slots,
    from: *const u8,
    to: *mut u8,
    bytes: usize,
) -> bool {
    let block = session.block();
    let (me, ranks) = (session.comm().rank(), session.comm().size());
    let size = size_of::<T>();
    if M::LANES == 1 {
        // SAFETY: the kernels of this module leave these bytes to the tables.
        let tables = unsafe { Tables::new(block, session.ranks()) };
        let mut rank = 0;
        while rank < ranks {
            if rank == me {
                tables.set_source(rank, from, 0);
            } else {
                match slots.receive_stream(session, rank).ok() {
                    Some(at) => tables.set_source(rank, at, 0),
                    None => return false,
                }
            }
            rank += 1;
        }
        tables.set_target(0, to);
        let range = Range {
            ranks,
            targets: 1,
            count: bytes / size,
            policy: Policy::Cached,
        };
        // SAFETY: every stream has been acquired; the rest is the caller's promise.
        unsafe { bulk::reduce::<M, T, O>(block, tables, range) };
        return true;
    }
    // This rank's own packets are received like any other's: whoever writes over an input in place
    // has received what was sent of it.
    let mut failed = false;
    // All headers must have come before this block ends: that keeps ranks within one epoch of each
    // other. The last lanes look after them, which have no data where there is little.
    let mut source = block.size() - 1 - block.rank();
    while source < ranks && !failed {
        failed = slots.receive_header(session, source).is_failed();
        source += block.size();
    }
    let fold = |acc: &mut [T::Acc; 4], rank: u32, data: u64| {
        if rank >= ranks {
            return;
        }
        for i in 0..PAIR_DATA / size {
            let next = O::lift(T::from_bits(data >> (8 * i * size)), 0);
            acc[i] = if rank == 0 {
                next
            } else {
                O::combine(acc[i], next)
            };
        }
    };
    for pair in block.elements_of_block(bytes.div_ceil(PAIR_DATA)) {
        let unit = 1 + pair;
        let mut acc = [T::Acc::ZERO; 4];
        let mut rank = 0;
        while rank < ranks && !failed {
            // Packets of several ranks under way at once: each alone would cost a trip to memory.
            let last = ranks - 1;
            let peek = |i: u32| {
                let rank = if rank + i < last { rank + i } else { last };
                // SAFETY: a rank, and a unit of its stream.
                let (data, there) = unsafe { slots.peek_pairs::<1>(session.comm(), rank, unit) };
                (data[0], there)
            };
            let four = [peek(0), peek(1), peek(2), peek(3)];
            let next = if rank + 4 < ranks {
                [peek(4), peek(5), peek(6), peek(7)]
            } else {
                [(0, false); 4]
            };
            if four[0].1 & four[1].1 & four[2].1 & four[3].1 {
                fold(&mut acc, rank, four[0].0);
                fold(&mut acc, rank + 1, four[1].0);
                fold(&mut acc, rank + 2, four[2].0);
                fold(&mut acc, rank + 3, four[3].0);
                rank += 4;
                if next[0].1 & next[1].1 & next[2].1 & next[3].1 {
                    fold(&mut acc, rank, next[0].0);
                    fold(&mut acc, rank + 1, next[1].0);
                    fold(&mut acc, rank + 2, next[2].0);
                    fold(&mut acc, rank + 3, next[3].0);
                    rank += 4;
                }
                continue;
            }
            // SAFETY: a rank, and a unit of its stream.
            match unsafe { slots.receive_pair(session, rank, unit) }.ok() {
                Some(data) => fold(&mut acc, rank, data),
                None => failed = true,
            }
            rank += 1;
        }
        if failed {
            break;
        }
        let start = pair * PAIR_DATA;
        for i in 0..PAIR_DATA / size {
            if start + i * size < bytes {
                // SAFETY: within this block's part of the output.
                unsafe {
                    let at = to.wrapping_add(start + i * size).cast::<T>();
                    mem::write(at, O::finish(acc[i], ranks));
                }
            }
        }
    }
    !block.any(failed)
}

/// Every rank, or the root, reads every rank's input.
struct OneShot<R> {
    reducer: R,
    policy: Policy,
}

impl<M: Machine, R: Reducer> Body<M> for OneShot<R> {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let block = session.block();
        let root = session.call().root();
        if root != ALL && root != session.rank() {
            return true;
        }
        // SAFETY: the kernels of this module leave these bytes to the tables.
        let tables = unsafe { Tables::new(block, session.ranks()) };
        let (first, last) = memory.part(block, round, 0);
        if !memory.fill_sources(session, tables, round, 0, first, last - first) {
            return false;
        }
        if block.is_leader() {
            let at = (round.start + first) * memory.size;
            tables.set_target(0, memory.target.wrapping_add(at));
        }
        block.sync();
        let ranks = session.comm().size();
        let range = Range {
            ranks,
            targets: 1,
            count: last - first,
            policy: self.policy,
        };
        // SAFETY: the sources were checked against their windows; the rest is the caller's promise.
        unsafe { self.reducer.reduce(block, tables, range) };
        true
    }
}

/// One-shot all_reduce over rounds. False after a failure.
///
/// # Safety
/// As the kernels below promise.
#[inline(always)]
unsafe fn one_shot<M: Machine, R: Reducer>(
    session: &mut Session<M>,
    reducer: R,
    memory: Memory,
    policy: Policy,
) -> bool {
    let memory = Memory {
        source_rows: 1,
        shards: 1,
        target_shared: false,
        ..memory
    };
    // SAFETY: the caller's promise.
    unsafe { memory.run(session, policy, &OneShot { reducer, policy }) }
}

/// Parameters of every kernel that reduces over rounds.
pub type ReductionParams = AllReduceSignalParams;

/// The root that means every rank.
pub(crate) const ALL: u32 = 0xffff;

/// This rank reduces its shard and writes it to all outputs, or to the root's.
pub(crate) struct TwoShot<R> {
    pub(crate) reducer: R,
    pub(crate) policy: Policy,
    pub(crate) root: u32,
}

impl<M: Machine, R: Reducer> Body<M> for TwoShot<R> {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let (first, last) = memory.part(session.block(), round, session.comm().rank());
        // SAFETY: the caller's promise.
        unsafe { self.range(session, memory, round, first, last - first) }
    }
}

impl<R: Reducer> TwoShot<R> {
    /// Reduces elements `[first, first + length)` of the round. False after a failure. All lanes
    /// together; the block must synchronise before the next range.
    ///
    /// # Safety
    /// As [`Body::round`]; the elements are this rank's to reduce.
    #[inline(always)]
    pub(crate) unsafe fn range<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
        round: Round,
        first: usize,
        length: usize,
    ) -> bool {
        let ranks = session.comm().size();
        let block = session.block();
        // SAFETY: the kernels of this module leave these bytes to the tables.
        let tables = unsafe { Tables::new(block, session.ranks()) };
        if !memory.fill_sources(session, tables, round, 0, first, length) {
            return false;
        }
        let (from, targets) = if self.root == ALL {
            (0, ranks)
        } else {
            (self.root, 1)
        };
        let mut failed = false;
        for index in block.elements_of_block(targets as usize) {
            let index = index as u32;
            match memory.target_of(session, round, from + index, first, length) {
                Some(at) => tables.set_target(index, at),
                None => failed = true,
            }
        }
        if block.any(failed) {
            return false;
        }
        block.sync();
        let range = Range {
            ranks,
            targets,
            count: length,
            policy: self.policy,
        };
        // SAFETY: sources and targets were checked against their windows; the rest is the caller's
        // promise.
        unsafe { self.reducer.reduce(block, tables, range) };
        true
    }
}

/// Two-shot all_reduce, or reduce to `root`, over rounds. False after a failure.
///
/// # Safety
/// As the kernels below promise.
#[inline(always)]
unsafe fn two_shot<M: Machine, R: Reducer>(
    session: &mut Session<M>,
    reducer: R,
    memory: Memory,
    policy: Policy,
    root: u32,
) -> bool {
    let (me, ranks) = (session.comm().rank(), session.comm().size());
    let target_shared = root == ALL || root == me;
    let memory = Memory {
        source_rows: 1,
        shards: ranks,
        target_shared,
        ..memory
    };
    // SAFETY: the caller's promise.
    unsafe {
        memory.run(
            session,
            policy,
            &TwoShot {
                reducer,
                policy,
                root,
            },
        )
    }
}

reduction_kernel!(
    /// Runs a one-shot all_reduce by signal: every rank reads every rank's input.
    all_reduce_signal,
    all_reduce_signal_any,
    any_params = AllReduceSignalParams,
    |session, reducer, memory, policy| one_shot(session, reducer, memory, policy)
);

reduction_kernel!(
    /// Two-shot all_reduce (root 0xffff), or reduce to the call's root: rank r reduces shard r.
    reduce_shards,
    reduce_shards_any,
    params = AllReduceSignalParams,
    any_params = AllReduceSignalParams,
    |session, reducer, memory, policy| {
        let root = session.call().root();
        two_shot(session, reducer, memory, policy, root)
    }
);
