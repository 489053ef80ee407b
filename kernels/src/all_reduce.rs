//! all_reduce by packets. Protocol: [`fusewire_device::packet`].
//!
//! - **One shot**: every rank sends its input to every rank, and reduces all streams. One hop; each
//!   rank sends P - 1 times the data.
//! - **Two shots** ([`two_shot`]): every rank sends part r of its input to rank r, which reduces it
//!   and sends the result to every rank. Two hops; each rank sends 2 (P - 1) / P times the data.
//!
//! Each element is reduced in rank order, as in [`crate::reduction`], so the results are equal bit
//! for bit.

mod parts;
pub mod two_shot;

use fusewire_device::bulk::{self, Range, Tables};
use fusewire_device::element::{Average, Max, Ordered, Reduction, Sum};
use fusewire_device::mem::{self, Policy};
use fusewire_device::packet::{PAIR_DATA, Prefetch, Segments, Slots};
use fusewire_device::session::{Session, Unvoted};
use fusewire_device::{Aborted, Bf16, Block, Element, F16, Group, In, Machine, Out, kernel};

/// Runs a one-shot all_reduce by packets. The output may be the input.
///
/// # Safety
/// During the launch, nothing else may write the input or access the output.
#[kernel(
    each(T: f32 = f32, f16 = F16, bf16 = Bf16),
    each(O: sum = Sum, average = Average, max = Max)
)]
pub unsafe fn all_reduce_packet<T: Element, O: Reduction<T>>(
    session: &mut Session<impl Machine>,
    source: In<T>,
    target: Out<T>,
    // SAFETY: the entry's parameters describe the input, which the host keeps alive.
    #[before(unsafe { Part::read::<_, T>(block, header_count, source, source_len) })] part: Part,
) -> Result<(), Aborted> {
    let count = session.count() as usize;
    let (source, target) = (
        source.require(session, count)?,
        target.require(session, count)?,
    );
    let Part {
        first,
        bytes,
        prefetch,
    } = part;
    let from = source.as_ptr().cast::<u8>().wrapping_add(first);
    let to = target.as_ptr().cast::<u8>().wrapping_add(first);
    let slots = Slots::open(session, bytes)?;
    // SAFETY: `from` and `to` have `bytes` bytes, because `target` is as long as `source`.
    let received = unsafe {
        slots.send_to_each(session, (from, Segments::ONE), prefetch);
        reduce::<_, T, O>(session, &slots, from, to, bytes)
    };
    // No lane uses what another one has received, so one vote suffices, at the end.
    session.fail_at_end(received);
    slots.close(session);
    Ok(())
}

/// A block's part of the input.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Offset in bytes.
    first: usize,
    /// Size in bytes.
    bytes: usize,
    prefetch: Prefetch,
}

impl Part {
    /// Returns this block's part of `count` elements, and prefetches it, unless the input of `len`
    /// elements is too short; the kernel then records an error.
    ///
    /// # Safety
    /// `source` must be readable for `len` elements.
    #[inline(always)]
    unsafe fn read<M: Machine, T>(block: Block<M>, count: u64, source: *mut u8, len: u64) -> Self {
        let (start, end) = block.slice(count as usize, crate::ALIGNMENT);
        let (first, bytes) = (start * size_of::<T>(), (end - start) * size_of::<T>());
        let readable = if count <= len { bytes } else { 0 };
        // SAFETY: the part is within the `count` elements, which the input has, or nothing is read.
        let prefetch =
            unsafe { Prefetch::read(block, source.wrapping_add(first), readable, Segments::ONE) };
        Self {
            first,
            bytes,
            prefetch,
        }
    }
}

/// Reduces the streams of all ranks. Each lane returns its own outcome.
///
/// # Safety
/// `from` and `to` must be this block's part of the input and of the output: `bytes` bytes. The
/// streams of `slots` must have as many.
#[inline(always)]
unsafe fn reduce<M: Machine, T: Element, O: Reduction<T>>(
    session: &Session<M>,
    slots: &Slots,
    from: *const u8,
    to: *mut u8,
    bytes: usize,
) -> Unvoted<()> {
    // SAFETY: the precondition of this function.
    unsafe {
        if M::LANES == 1 {
            return reduce_streams::<_, T, O>(session, slots, from, to, bytes);
        }
        reduce_pairs::<_, T, O>(session, slots, bytes, |pair, data| {
            write_pair::<T>(to, bytes, pair, data);
        })
    }
}

/// Reduces this rank's input with every peer's stream. For blocks of one lane.
///
/// # Safety
/// `from` and `to` must be this block's part of the input and of the output: `bytes` bytes.
#[inline(always)]
unsafe fn reduce_streams<M: Machine, T: Element, O: Reduction<T>>(
    session: &Session<M>,
    slots: &Slots,
    from: *const u8,
    to: *mut u8,
    bytes: usize,
) -> Unvoted<()> {
    let block = session.block();
    let (me, ranks) = (session.comm().rank(), session.comm().size());
    // SAFETY: the kernels of this module use the start of shared memory only for the tables.
    let tables = unsafe { Tables::new(block, session.ranks()) };
    let mut rank = 0;
    while rank < ranks {
        if rank == me {
            tables.set_source(rank, from, 0);
        } else {
            let arrived = slots.receive_stream(session, rank);
            match arrived.ok() {
                Some(at) => tables.set_source(rank, at, 0),
                None => return arrived.map(|_| ()),
            }
        }
        rank += 1;
    }
    tables.set_target(0, to);
    let range = Range {
        ranks,
        targets: 1,
        count: bytes / size_of::<T>(),
        policy: Policy::Cached,
    };
    // SAFETY: all streams have been acquired; `from` and `to` are valid (precondition).
    unsafe { bulk::reduce::<M, T, O>(block, tables, range) };
    Unvoted::new(())
}

/// Receives the headers of all ranks, the first from the last lane, which has no data if the part
/// is short. A block must do this before it ends, which keeps ranks within one epoch of each other.
/// Each lane returns its own outcome.
#[inline(always)]
fn receive_headers<M: Machine>(session: &Session<M>, slots: &Slots) -> Unvoted<()> {
    let block = session.block();
    let mut outcome = Unvoted::new(());
    let mut source = block.size() - 1 - block.rank();
    while source < session.ranks() && !outcome.is_failed() {
        outcome = slots.receive_header(session, source);
        source += block.size();
    }
    outcome
}

/// Reduces the streams of all ranks, this one included, and passes each pair of `bytes` bytes of
/// the result to `sink`, with its index. For blocks of several lanes. In place, a lane overwrites
/// elements of the input only after it has received their packets. Each lane returns its own
/// outcome.
///
/// # Safety
/// The streams of `slots` must have `bytes` bytes.
#[inline(always)]
unsafe fn reduce_pairs<M: Machine, T: Element, O: Reduction<T>>(
    session: &Session<M>,
    slots: &Slots,
    bytes: usize,
    mut sink: impl FnMut(usize, u64),
) -> Unvoted<()> {
    let block = session.block();
    let ranks = session.comm().size();
    let size = size_of::<T>();
    let mut outcome = receive_headers(session, slots);
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
        while rank < ranks && !outcome.is_failed() {
            // Keeps several loads in flight: one at a time, each would cost a memory latency.
            let last = ranks - 1;
            let peek = |i: u32| {
                let rank = if rank + i < last { rank + i } else { last };
                // SAFETY: `rank < ranks`; `pair` is below the number of pairs of each stream.
                let (data, there) = unsafe { slots.peek_pairs::<1>(session.comm(), rank, unit) };
                (data[0], there)
            };
            if ranks - rank < 4 {
                let two = [peek(0), peek(1)];
                if two[0].1 & two[1].1 {
                    fold(&mut acc, rank, two[0].0);
                    fold(&mut acc, rank + 1, two[1].0);
                    rank += 2;
                    continue;
                }
            } else {
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
            }
            // SAFETY: `rank < ranks`; `pair` is below the number of pairs of each stream.
            let arrived = unsafe { slots.receive_pair(session, rank, unit) };
            match arrived.ok() {
                Some(data) => fold(&mut acc, rank, data),
                None => outcome = arrived.map(|_| ()),
            }
            rank += 1;
        }
        if outcome.is_failed() {
            break;
        }
        let mut packed = [0; 2];
        for i in 0..PAIR_DATA / size {
            bulk::pack(&mut packed, i, O::finish(acc[i], ranks));
        }
        sink(pair, packed[0]);
    }
    outcome
}

/// Writes pair `pair` of the `bytes` bytes at `to`: 8 bytes, fewer at the end.
///
/// # Safety
/// `to` must be writable for `bytes` bytes, of elements of `T`, and the pair begin below them.
#[inline(always)]
unsafe fn write_pair<T: Element>(to: *mut u8, bytes: usize, pair: usize, data: u64) {
    let start = pair * PAIR_DATA;
    let at = to.wrapping_add(start);
    if start + PAIR_DATA <= bytes && (at as usize).is_multiple_of(PAIR_DATA) {
        // SAFETY: the pair is within the bytes, and aligned, by the condition.
        unsafe { mem::write(at.cast::<u64>(), data) };
        return;
    }
    let size = size_of::<T>();
    for i in 0..PAIR_DATA / size {
        if start + i * size < bytes {
            let element = T::from_bits(data >> (8 * i * size));
            // SAFETY: the element is within the bytes by the condition.
            unsafe { mem::write(at.wrapping_add(i * size).cast::<T>(), element) };
        }
    }
}
