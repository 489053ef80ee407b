//! all_reduce, reduce_scatter and all_gather by multicast (NVLink SHARP): the switch reduces and
//! copies.
//!
//! - **all_reduce:** rank r loads the reduction of shard r of all inputs and stores it to all
//!   outputs: each byte leaves and enters a rank once, for any number of ranks.
//! - **reduce_scatter:** rank r loads the reduction of row r of all inputs.
//! - **all_gather:** rank r stores its input to row r of all outputs.
//!
//! Protocol: rounds. In the terms of `exchange`:
//!
//! - **Who may overwrite what:** only rank r reads shard (row) r of every rank's input and writes
//!   shard (row) r of every rank's output; the owner overwrites its input, and reads its output,
//!   after the round;
//! - **after having acquired** every peer's done signal of the round;
//! - **released by** each peer after its last load and store by multicast, the block's barrier, and
//!   an alias fence in the lane that releases. Before them, each lane that has acquired a ready
//!   signal executes an alias fence, then the block votes ([`Session::declare_multicast`]).
//!
//! In place: a lane loads 16 bytes before it stores them, and no other lane or rank accesses those
//! bytes in the round.
//!
//! # Choice of the path
//! A multicast address refers to the same offset in every rank's part, but ranks may use different
//! offsets, or memory in no window. With its ready signal, each rank sends its window addresses and
//! flags that say whether multicast reaches them. All ranks see the same words, so they decide
//! alike. If the addresses differ, or 16-byte accesses are not possible, the launch takes the
//! ordinary path: two shots, own row, or pull. The bytes of a part before the first multiple of 16
//! and after the last one always take the ordinary path.

use core::marker::PhantomData;

use fusewire_device::bulk::{self, Range, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::element::{Average, Max, Min, Number, Reduction, ReductionCode, Sum};
use fusewire_device::mem::{self, Policy};
use fusewire_device::multimem::{self, BYTES, Combine, Multicast};
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Bf16, Block, Element, F16, Group, In, Machine, Out, kernel};

use crate::Exchange;
use crate::exchange::{Body, Memory, MemoryLayout, Part, Round, word};
use crate::movement::PullPlan;
use crate::reducer::{Reduce, Reducer, rows, shards};

/// Flag in a rank's [`word::SCALAR`]: multicast reaches its input.
const SOURCE: u64 = 1;
/// Flag: multicast reaches its output.
const TARGET: u64 = 2;
/// Flag: its input and its row of the output are aligned alike for 16-byte accesses.
const FITS: u64 = 4;

/// Number of multicast loads that a lane has in flight.
const BATCH: usize = 4;

const AVERAGE: u8 = ReductionCode::Average as u8;

/// Reduces ranges of one type by a reduction that the switch supports, selected at run time.
struct SwitchedReducer<T> {
    reduction: u8,
    element: PhantomData<T>,
}

impl<T> Clone for SwitchedReducer<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SwitchedReducer<T> {}

impl<T> SwitchedReducer<T> {
    /// Returns the reducer of the call.
    #[inline(always)]
    fn of<M: Machine>(session: &Session<M>) -> Self {
        Self {
            reduction: session.call().reduction(),
            element: PhantomData,
        }
    }

    /// Returns the number by which sums are divided, or 0 if they are not.
    #[inline(always)]
    fn divisor(self, ranks: u32) -> u32 {
        if self.reduction == AVERAGE { ranks } else { 0 }
    }
}

impl<T: Element<Acc: Number>> Reducer for SwitchedReducer<T> {
    #[inline(always)]
    fn size(self) -> usize {
        size_of::<T>()
    }

    #[inline(always)]
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range) {
        const MIN: u8 = ReductionCode::Min as u8;
        const MAX: u8 = ReductionCode::Max as u8;
        // SAFETY: the precondition of this function.
        unsafe {
            match self.reduction {
                AVERAGE => bulk::reduce::<M, T, Average>(block, tables, range),
                MIN => bulk::reduce_rare::<M, T, Min>(block, tables, range),
                MAX => bulk::reduce_rare::<M, T, Max>(block, tables, range),
                _ => bulk::reduce::<M, T, Sum>(block, tables, range),
            }
        }
    }
}

/// Returns the address that all ranks have sent as word `index`, if it is equal, all have the flags
/// `wanted` in [`word::SCALAR`], and none uses staging. The same result on every rank.
#[inline(always)]
fn common<M: Machine>(session: &Session<M>, index: usize, wanted: u64) -> Option<WindowAddr> {
    let addr = session.word(0, index);
    let mut same = true;
    let mut rank = 0;
    while rank < session.comm().size() {
        same &= session.word(rank, index) == addr
            && session.word(rank, word::FLAGS) == 0
            && session.word(rank, word::SCALAR) & wanted == wanted;
        rank += 1;
    }
    same.then_some(WindowAddr(addr))
}

/// Returns `bit` if multicast reaches the `bytes` bytes at `addr`, and `addr` is aligned to
/// elements of `size` bytes.
#[inline(always)]
fn reached<M: Machine>(
    session: &Session<M>,
    addr: WindowAddr,
    bytes: usize,
    size: usize,
    bit: u64,
) -> u64 {
    // Sizes are powers of two.
    let aligned = addr.offset() & (size as u64).wrapping_sub(1) == 0;
    if addr.is_some() && aligned && Multicast::of(session.comm(), addr, bytes as u64).is_some() {
        bit
    } else {
        0
    }
}

/// A part of a range: elements before the first multiple of 16 bytes, vectors of 16 bytes, and the
/// remaining elements.
#[derive(Clone, Copy)]
struct Split {
    head: usize,
    vectors: usize,
    tail: usize,
}

impl Split {
    /// Returns the split of `length` elements for which multicast is not used.
    #[inline(always)]
    const fn ordinary(length: usize) -> Self {
        Self {
            head: length,
            vectors: 0,
            tail: 0,
        }
    }

    /// Splits `length` elements of `size` bytes (a power of two), of which the first is at byte
    /// `offset` of a window.
    #[inline(always)]
    fn new(offset: usize, length: usize, size: usize) -> Self {
        // Shifts, because a division by a variable compiles to a branch into panic code.
        let log = size.trailing_zeros();
        let head = ((BYTES - offset % BYTES) % BYTES).wrapping_shr(log);
        let head = if head < length { head } else { length };
        let vectors = (length - head) * size / BYTES;
        Self {
            head,
            vectors,
            tail: length - head - vectors * BYTES.wrapping_shr(log),
        }
    }

    /// Returns the head of `part` as piece 0, or its tail as piece 1.
    #[inline(always)]
    const fn piece(self, piece: u32, part: Part) -> Part {
        if piece == 0 {
            part.slice(0, self.head)
        } else {
            part.slice(part.len() - self.tail, self.tail)
        }
    }
}

/// Destination of reduced vectors.
trait Sink: Copy {
    /// Stores 16 bytes at byte `byte`.
    ///
    /// # Safety
    /// As [`Multicast::store`]. Local bytes must be writable, and nothing else may access them.
    unsafe fn put(self, byte: usize, value: [u64; 2]);
}

impl Sink for Multicast {
    #[inline(always)]
    unsafe fn put(self, byte: usize, value: [u64; 2]) {
        // SAFETY: the precondition of this function.
        unsafe { self.store(byte, value) };
    }
}

/// This rank's own memory.
struct Local<T> {
    at: *mut T,
    policy: Policy,
}

impl<T> Clone for Local<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Local<T> {}

impl<T: Element<Acc: Number>> Sink for Local<T> {
    #[inline(always)]
    unsafe fn put(self, byte: usize, value: [u64; 2]) {
        let to = self.at.cast::<u8>().wrapping_add(byte);
        if (to as usize).is_multiple_of(BYTES) {
            // SAFETY: the precondition of this function; `to` is a multiple of 16.
            unsafe { mem::write_16(to, value, self.policy) };
            return;
        }
        let half = 8 / size_of::<T>();
        for i in 0..half {
            // SAFETY: the precondition of this function; `to` is aligned to an element.
            unsafe {
                let to = to.cast::<T>().add(i);
                mem::write(to, element::<T>(value[0], i));
                mem::write(to.add(half), element::<T>(value[1], i));
            }
        }
    }
}

/// Returns element `index` of 8 bytes. Shifts, because an array with a variable index would be in
/// local memory.
#[inline(always)]
fn element<T: Element<Acc: Number>>(word: u64, index: usize) -> T {
    let bits = 8 * size_of::<T>();
    T::from_bits(word >> (index * bits) & ((1 << bits) - 1))
}

/// Returns 8 bytes of sums, each divided by `divisor` unless it is 0.
#[inline(always)]
fn finish<T: Element<Acc: Number>>(sums: u64, divisor: u32) -> u64 {
    if divisor == 0 {
        return sums;
    }
    let mut out = 0;
    for i in 0..8 / size_of::<T>() {
        let average = <Average as Reduction<T>>::finish(element::<T>(sums, i).widen(), divisor);
        out |= average.to_bits() << (8 * i * size_of::<T>());
    }
    out
}

/// Does what [`finish`] does, for 16 bytes.
#[inline(always)]
fn finish_pair<T: Element<Acc: Number>>(sums: [u64; 2], divisor: u32) -> [u64; 2] {
    [finish::<T>(sums[0], divisor), finish::<T>(sums[1], divisor)]
}

/// Reduces `vectors` vectors of 16 bytes, from byte `from_byte` of `from` to byte `to_byte` of
/// `to`. Divides sums by `divisor` unless it is 0.
///
/// # Safety
/// As [`Multicast::load_reduce`] and [`Sink::put`], for all these bytes.
#[inline(always)]
unsafe fn reduce_vectors<M: Machine, T: Element<Acc: Number>, S: Sink>(
    block: Block<M>,
    (from, from_byte): (Multicast, usize),
    (to, to_byte): (S, usize),
    vectors: usize,
    combine: Combine,
    divisor: u32,
) {
    let step = block.size() as usize * BYTES;
    let end = vectors * BYTES;
    let mut at = block.rank() as usize * BYTES;
    // SAFETY: the precondition of this function; every access is below `end`. Unrolled by hand: an
    // array that a loop indexes would be in local memory.
    unsafe {
        while at + (BATCH - 1) * step < end {
            let a = from.load_reduce::<T>(from_byte + at, combine);
            let b = from.load_reduce::<T>(from_byte + at + step, combine);
            let c = from.load_reduce::<T>(from_byte + at + 2 * step, combine);
            let d = from.load_reduce::<T>(from_byte + at + 3 * step, combine);
            to.put(to_byte + at, finish_pair::<T>(a, divisor));
            to.put(to_byte + at + step, finish_pair::<T>(b, divisor));
            to.put(to_byte + at + 2 * step, finish_pair::<T>(c, divisor));
            to.put(to_byte + at + 3 * step, finish_pair::<T>(d, divisor));
            at += BATCH * step;
        }
        while at < end {
            let value = from.load_reduce::<T>(from_byte + at, combine);
            to.put(to_byte + at, finish_pair::<T>(value, divisor));
            at += step;
        }
    }
}

/// Does what [`reduce_vectors`] does, for a combination that is known at run time.
///
/// # Safety
/// As [`reduce_vectors`]; `combine` must be a result of [`multimem::combine`] for `T`.
#[inline(always)]
unsafe fn reduce_switched<M: Machine, T: Element<Acc: Number>, S: Sink>(
    block: Block<M>,
    from: (Multicast, usize),
    to: (S, usize),
    vectors: usize,
    combine: Combine,
    divisor: u32,
) {
    // SAFETY: the preconditions are the same. Each combination has its own copy of the loop,
    // without a branch on the combination. The f32 kernels have no minimum and maximum.
    unsafe {
        match combine {
            Combine::Min if size_of::<T>() == 2 => {
                reduce_vectors::<M, T, S>(block, from, to, vectors, Combine::Min, 0);
            }
            Combine::Max if size_of::<T>() == 2 => {
                reduce_vectors::<M, T, S>(block, from, to, vectors, Combine::Max, 0);
            }
            _ => reduce_vectors::<M, T, S>(block, from, to, vectors, Combine::Add, divisor),
        }
    }
}

/// Reduces the head and the tail of a part by the ordinary path.
#[inline(always)]
fn reduce_rest<M: Machine, R: Reducer, const SHARDS: bool>(
    ordinary: &Reduce<R, SHARDS>,
    session: &Session<M>,
    memory: &Memory,
    part: Part,
    split: Split,
) -> Result<(), Aborted> {
    let mut piece = 0;
    while piece < 2 {
        let rest = split.piece(piece, part);
        if rest.len() > 0 {
            ordinary.part(session, memory, rest)?;
        }
        session.block().sync();
        piece += 1;
    }
    Ok(())
}

/// Reduces this rank's shard of all inputs into all outputs.
struct AllReduce<T> {
    ordinary: Reduce<SwitchedReducer<T>, true>,
}

impl<T: Element<Acc: Number>> AllReduce<T> {
    /// Returns the input, its offset, the output and the combination, if all ranks use multicast.
    #[inline(always)]
    fn agreed<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
    ) -> Option<(Multicast, usize, Multicast, Combine)> {
        let combine = multimem::combine(T::DTYPE, self.ordinary.reducer.reduction)?;
        let source = common(session, word::SOURCE, SOURCE)?;
        let target = common(session, word::TARGET, TARGET)?;
        if (source.offset() ^ target.offset()) % BYTES as u64 != 0 {
            return None;
        }
        let bytes = (memory.layout().count * size_of::<T>()) as u64;
        Some((
            Multicast::of(session.comm(), source, bytes)?,
            source.offset() as usize,
            Multicast::of(session.comm(), target, bytes)?,
            combine,
        ))
    }
}

impl<M: Machine, T: Element<Acc: Number>> Body<M> for AllReduce<T> {
    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let size = size_of::<T>();
        let part = memory.part(session.block(), round, session.rank());
        let mut split = Split::ordinary(part.len());
        if let Some((from, offset, to, combine)) = self.agreed(session, memory) {
            split = Split::new(offset + part.start() * size, part.len(), size);
            let byte = (part.start() + split.head) * size;
            let divisor = self.ordinary.reducer.divisor(session.ranks());
            // SAFETY: every rank's part was checked against its window, and its ready signal
            // acquired; no other rank accesses this shard in the round.
            unsafe {
                reduce_switched::<M, T, Multicast>(
                    session.block(),
                    (from, byte),
                    (to, byte),
                    split.vectors,
                    combine,
                    divisor,
                );
            }
        }
        reduce_rest(&self.ordinary, session, memory, part, split)
    }
}

/// Reduces this rank's row of all inputs.
struct ReduceScatter<T> {
    ordinary: Reduce<SwitchedReducer<T>, false>,
}

impl<T: Element<Acc: Number>> ReduceScatter<T> {
    /// Returns the input, its offset and the combination, if all ranks can use multicast.
    #[inline(always)]
    fn agreed<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
    ) -> Option<(Multicast, usize, Combine)> {
        let combine = multimem::combine(T::DTYPE, self.ordinary.reducer.reduction)?;
        let source = common(session, word::SOURCE, SOURCE)?;
        let bytes = memory.layout().count * size_of::<T>() * session.ranks() as usize;
        let from = Multicast::of(session.comm(), source, bytes as u64)?;
        Some((from, source.offset() as usize, combine))
    }
}

impl<M: Machine, T: Element<Acc: Number>> Body<M> for ReduceScatter<T> {
    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let size = size_of::<T>();
        let part = memory.part(session.block(), round, 0);
        let mut split = Split::ordinary(part.len());
        let to = memory.own_target(0, part);
        if let (Some((from, offset, combine)), Some(to)) = (self.agreed(session, memory), to) {
            let row = session.rank() as usize * memory.layout().count + part.start();
            split = Split::new(offset + row * size, part.len(), size);
            let to = Local::<T> {
                at: to.cast(),
                policy: self.ordinary.policy,
            };
            let divisor = self.ordinary.reducer.divisor(session.ranks());
            // SAFETY: every rank's part was checked against its window, and its ready signal
            // acquired; the part was checked against the output.
            unsafe {
                reduce_switched::<M, T, Local<T>>(
                    session.block(),
                    (from, (row + split.head) * size),
                    (to, split.head * size),
                    split.vectors,
                    combine,
                    divisor,
                );
            }
        }
        reduce_rest(&self.ordinary, session, memory, part, split)
    }
}

/// Writes this rank's input to its row of all outputs.
struct AllGather {
    ordinary: PullPlan,
}

impl AllGather {
    /// Writes less than 16 bytes to every rank's output by ordinary stores, including this rank's
    /// (which changes nothing in place).
    #[inline(always)]
    fn push<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
        part: Part,
    ) -> Result<(), Aborted> {
        let Some(from) = memory.own_source(0, part) else {
            return session.settle(false);
        };
        let MemoryLayout { size, count, .. } = *memory.layout();
        let row = session.rank() as usize * count + part.start();
        let mut step = 0;
        while step < session.ranks() {
            let rank = session.comm().after(step);
            let addr = WindowAddr(session.word(rank, word::TARGET));
            let Some(to) = memory.named(session, addr, rank, row, part.len()) else {
                return session.settle(false);
            };
            for byte in session.block().elements_of_block(part.len() * size) {
                // SAFETY: the target was checked against its window, the source against the input.
                unsafe { mem::write(to.add(byte), mem::read(from.add(byte))) };
            }
            // Reconverges the lanes: otherwise, lanes that leave the loop at different times stay
            // diverged.
            session.block().sync();
            step += 1;
        }
        Ok(())
    }
}

impl<M: Machine> Body<M> for AllGather {
    #[inline(always)]
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let (block, ranks) = (session.block(), session.ranks());
        let MemoryLayout { size, count, .. } = *memory.layout();
        let bytes = (count * size * ranks as usize) as u64;
        let part = memory.part(block, round, 0);
        let agreed = common(session, word::TARGET, TARGET | FITS)
            .and_then(|target| Some((Multicast::of(session.comm(), target, bytes)?, target)));
        let (Some((to, target)), Some(from)) = (agreed, memory.own_source(0, part)) else {
            return self.ordinary.round(session, memory, round);
        };
        let row = session.rank() as usize * count + part.start();
        let split = Split::new(target.offset() as usize + row * size, part.len(), size);
        let from = from.wrapping_add(split.head * size);
        let to_byte = (row + split.head) * size;
        let step = block.size() as usize * BYTES;
        let end = split.vectors * BYTES;
        let policy = self.ordinary.policy;
        let mut at = block.rank() as usize * BYTES;
        // SAFETY: within the input, at aligned addresses ([`FITS`]); every rank's output was
        // checked against its window, and its ready signal acquired; no other rank writes this row.
        unsafe {
            // Two at a time: four would spill a register of the ordinary path.
            while at + step < end {
                let a = mem::read_16(from.add(at), policy);
                let b = mem::read_16(from.add(at + step), policy);
                to.store(to_byte + at, a);
                to.store(to_byte + at + step, b);
                at += 2 * step;
            }
            while at < end {
                to.store(to_byte + at, mem::read_16(from.add(at), policy));
                at += step;
            }
        }
        let mut piece = 0;
        while piece < 2 {
            let rest = split.piece(piece, part);
            if rest.len() > 0 {
                self.push(session, memory, rest)?;
            }
            piece += 1;
        }
        block.sync();
        Ok(())
    }
}

/// Runs an all_reduce by multicast if all ranks' memory allows it, otherwise in two shots. The call
/// selects sum, average or, except for f32, minimum or maximum.
///
/// # Safety
/// `exchange` must have the window addresses of the buffers, and a chunk of each row must fit
/// staging. During the launch, nothing else may write the input or access the output.
#[kernel(
    params = crate::reduction::ReductionParams,
    each(T: f32 = f32, f16 = F16, bf16 = Bf16)
)]
pub unsafe fn all_reduce_nvls<T: Element<Acc: Number>>(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    #[words(6)] exchange: Exchange,
) -> Result<(), Aborted> {
    session.declare_multicast();
    let reducer = SwitchedReducer::<T>::of(session);
    let (layout, ordinary) = shards(session, reducer, &exchange);
    let bytes = layout.count * layout.size;
    let reach = |addr, bit| reached(session, addr, bytes, layout.size, bit);
    let layout = MemoryLayout {
        scalar: reach(layout.source_at, SOURCE) | reach(layout.target_at, TARGET),
        ..layout
    };
    // SAFETY: the precondition of this function.
    let memory = unsafe { Memory::new(session, source, target, layout)? };
    memory.run(session, exchange.policy(), &AllReduce { ordinary })
}

/// Runs a reduce_scatter by multicast if all ranks' inputs allow it, otherwise by reading each
/// input: `count` elements per rank. Reductions as for [`all_reduce_nvls`].
///
/// # Safety
/// As [`all_reduce_nvls`].
#[kernel(
    params = crate::reduction::ReductionParams,
    each(T: f32 = f32, f16 = F16, bf16 = Bf16)
)]
pub unsafe fn reduce_scatter_nvls<T: Element<Acc: Number>>(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    #[words(6)] exchange: Exchange,
) -> Result<(), Aborted> {
    session.declare_multicast();
    let reducer = SwitchedReducer::<T>::of(session);
    let (layout, ordinary) = rows(session, reducer, &exchange);
    let bytes = layout.count * layout.size * session.ranks() as usize;
    let layout = MemoryLayout {
        scalar: reached(session, layout.source_at, bytes, layout.size, SOURCE),
        ..layout
    };
    // SAFETY: the precondition of this function.
    let memory = unsafe { Memory::new(session, source, target, layout)? };
    memory.run(session, exchange.policy(), &ReduceScatter { ordinary })
}

/// Runs an all_gather by multicast if all ranks' memory allows it, otherwise by pulling: `count`
/// units of rank r, each of `size` bytes (a divisor of 16), go to row r of every rank's output.
///
/// # Safety
/// As [`all_reduce_nvls`].
#[kernel(params = crate::movement::MovementParams)]
pub unsafe fn all_gather_nvls(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    #[words(6)] exchange: Exchange,
) -> Result<(), Aborted> {
    session.declare_multicast();
    let (rank, ranks) = (session.rank(), session.ranks());
    let layout = exchange.layout(session.count(), exchange.size as usize);
    let (target_at, size) = (layout.target_at, layout.size);
    let bytes = layout.count * size;
    let row = target_at.offset() as usize + rank as usize * bytes;
    let offset = source.as_ptr() as usize ^ row;
    let fits = match offset.is_multiple_of(BYTES) && BYTES.is_multiple_of(size) {
        true => FITS,
        false => 0,
    };
    let layout = MemoryLayout {
        target_rows: ranks,
        scalar: fits | reached(session, target_at, bytes * ranks as usize, size, TARGET),
        ..layout
    };
    let policy = exchange.policy();
    let body = AllGather {
        ordinary: PullPlan {
            first: rank,
            ranks,
            row: 0,
            policy,
        },
    };
    // SAFETY: the precondition of this function.
    let memory = unsafe { Memory::new(session, source, target, layout)? };
    memory.run(session, policy, &body)
}
