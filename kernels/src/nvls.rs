//! all_reduce, reduce_scatter and all_gather by multicast (NVLink SHARP): the switch adds, and
//! copies.
//!
//! - **all_reduce:** rank r loads the reduction of shard r of all inputs and stores it to all
//!   outputs: each byte leaves a rank once and comes in once, whatever the number of ranks.
//! - **reduce_scatter:** rank r loads the reduction of row r of all inputs.
//! - **all_gather:** rank r stores its input to row r of all outputs.
//!
//! Protocol: rounds. In the terms of `exchange`:
//!
//! - **Who may overwrite what:** rank r reads shard (row) r of every rank's input and writes shard
//!   (row) r of every rank's output, and no other rank does either; the owner overwrites its input,
//!   and reads its output, after the round;
//! - **after having acquired** every peer's done signal of the round;
//! - **released by** each peer after its last load and store by multicast and the alias fence
//!   behind them ([`multimem::fence`]). The fence in front of them follows the acquisition of every
//!   ready signal.
//!
//! In place: a lane loads 16 bytes before it stores them, and nobody else touches those bytes in
//! the round.
//!
//! # When
//! A multicast address names the same offset of every rank's part, but offsets need not be
//! symmetric, and memory need not lie in a window. Each rank sends its window addresses and whether
//! multicast reaches them with its ready signal; all ranks see the same words and so decide alike.
//! Where they differ, or bytes cannot be taken 16 at a time, the launch goes the ordinary way: two
//! shots, own row, or pull. What lies in front of the first multiple of 16 bytes of a part, or
//! behind the last one, goes the ordinary way in any case.

use core::marker::PhantomData;

use fusewire_device::bulk::{self, Range, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::element::{Average, Max, Min, Reduction, ReductionCode, Sum};
use fusewire_device::mem::{self, Policy};
use fusewire_device::multimem::{self, BYTES, Combine, Multicast};
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Bf16, Block, Element, F16, Group, Machine, kernel};

use crate::all_reduce::{ALL, TwoShot};
use crate::exchange::{Body, Memory, Round, word};
use crate::movement::PullPlan;
use crate::policy;
use crate::reduce_scatter::OwnRow;
use crate::reducer::{Reducer, memory};

/// In a rank's [`word::SCALAR`]: multicast reaches its input.
const SOURCE: u64 = 1;
/// The same of its output.
const TARGET: u64 = 2;
/// Its input can be read by 16 bytes where its row of the output can be written so.
const FITS: u64 = 4;

/// Loads by multicast that a lane has under way at once.
const BATCH: usize = 4;

const AVERAGE: u8 = ReductionCode::Average as u8;

/// Reduces ranges of one type by the reductions that the switch knows, chosen at run time.
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

impl<T: Element> Reducer for SwitchedReducer<T> {
    #[inline(always)]
    fn size(self) -> usize {
        size_of::<T>()
    }

    #[inline(always)]
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range) {
        const MIN: u8 = ReductionCode::Min as u8;
        const MAX: u8 = ReductionCode::Max as u8;
        // SAFETY: the caller's promise.
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

/// The address that every rank has sent as word `index`, if all have sent the same one, all have
/// `wanted` in their [`word::SCALAR`], and nobody is staged. The same answer on every rank.
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

/// What this rank says of memory at `addr`: `bit` if multicast reaches its `bytes` bytes, and
/// elements of `size` bytes lie at multiples of their size.
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

/// A part of a range: elements in front of the first multiple of 16 bytes, 16 bytes at a time, the
/// rest.
#[derive(Clone, Copy)]
struct Split {
    head: usize,
    vectors: usize,
    tail: usize,
}

impl Split {
    /// Splits `length` elements of `size` bytes (a power of two), the first of which lies at byte
    /// `offset` of a window.
    #[inline(always)]
    fn new(offset: usize, length: usize, size: usize) -> Self {
        // Shifts: a division by what is not constant has a way into panic code.
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

    /// Piece 0 is the head of the `length` elements from `first` on, piece 1 the tail.
    #[inline(always)]
    const fn piece(self, piece: u32, first: usize, length: usize) -> (usize, usize) {
        if piece == 0 {
            (first, self.head)
        } else {
            (first + length - self.tail, self.tail)
        }
    }
}

/// Where reduced vectors go.
trait Sink: Copy {
    /// Stores 16 bytes at byte `byte`.
    ///
    /// # Safety
    /// The bytes are the caller's to write.
    unsafe fn put(self, byte: usize, value: [u64; 2]);
}

impl Sink for Multicast {
    #[inline(always)]
    unsafe fn put(self, byte: usize, value: [u64; 2]) {
        // SAFETY: the caller's promise.
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

impl<T: Element> Sink for Local<T> {
    #[inline(always)]
    unsafe fn put(self, byte: usize, value: [u64; 2]) {
        let to = self.at.cast::<u8>().wrapping_add(byte);
        if (to as usize).is_multiple_of(BYTES) {
            // SAFETY: the caller's promise; aligned.
            unsafe { mem::write_16(to, value, self.policy) };
            return;
        }
        let half = 8 / size_of::<T>();
        for i in 0..half {
            // SAFETY: the caller's promise; aligned to an element.
            unsafe {
                let to = to.cast::<T>().add(i);
                mem::write(to, element::<T>(value[0], i));
                mem::write(to.add(half), element::<T>(value[1], i));
            }
        }
    }
}

/// Element `index` of 8 bytes. Shifts, not an array: an index that is no constant would put it into
/// local memory.
#[inline(always)]
fn element<T: Element>(word: u64, index: usize) -> T {
    let bits = 8 * size_of::<T>();
    T::from_bits(word >> (index * bits) & ((1 << bits) - 1))
}

/// 8 bytes of sums, each divided by `divisor`, or as they are if that is 0.
#[inline(always)]
fn finish<T: Element>(sums: u64, divisor: u32) -> u64 {
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

/// As [`finish`], of 16 bytes.
#[inline(always)]
fn finish_pair<T: Element>(sums: [u64; 2], divisor: u32) -> [u64; 2] {
    [finish::<T>(sums[0], divisor), finish::<T>(sums[1], divisor)]
}

/// Reduces `vectors` times 16 bytes from byte `from_byte` of `from` on, to byte `to_byte` of `to`
/// on; sums are divided by `divisor` unless it is 0.
///
/// # Safety
/// As [`Multicast::load_reduce`] and [`Sink::put`], for all these bytes.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // two ranges and what to do between them
unsafe fn reduce_vectors<M: Machine, T: Element, S: Sink>(
    block: Block<M>,
    from: Multicast,
    from_byte: usize,
    to: S,
    to_byte: usize,
    vectors: usize,
    combine: Combine,
    divisor: u32,
) {
    let step = block.size() as usize * BYTES;
    let end = vectors * BYTES;
    let mut at = block.rank() as usize * BYTES;
    // SAFETY: the caller's promise. Four times the same: an array over which a loop runs lies in
    // local memory.
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

/// As [`reduce_vectors`], for the combination that a reduction at run time needs; between the two
/// alias fences.
///
/// # Safety
/// As there; `combine` is what [`multimem::combine`] gave for `T`.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // as there
unsafe fn reduce_switched<M: Machine, T: Element, S: Sink>(
    block: Block<M>,
    from: Multicast,
    from_byte: usize,
    to: S,
    to_byte: usize,
    vectors: usize,
    combine: Combine,
    divisor: u32,
) {
    multimem::fence();
    // SAFETY: the caller's promise; one way a combination, so that the loops hold no switch.
    // Minimum and maximum of f32 do not exist, and are no part of its kernels.
    unsafe {
        match combine {
            Combine::Min if size_of::<T>() == 2 => reduce_vectors::<M, T, S>(
                block,
                from,
                from_byte,
                to,
                to_byte,
                vectors,
                Combine::Min,
                0,
            ),
            Combine::Max if size_of::<T>() == 2 => reduce_vectors::<M, T, S>(
                block,
                from,
                from_byte,
                to,
                to_byte,
                vectors,
                Combine::Max,
                0,
            ),
            _ => reduce_vectors::<M, T, S>(
                block,
                from,
                from_byte,
                to,
                to_byte,
                vectors,
                Combine::Add,
                divisor,
            ),
        }
    }
    multimem::fence();
}

/// This rank reduces its shard of all inputs into all outputs.
struct AllReduce<T> {
    ordinary: TwoShot<SwitchedReducer<T>>,
}

impl<T: Element> AllReduce<T> {
    /// Input, output and combination, if all ranks can go by multicast.
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
        let bytes = (memory.count * memory.size) as u64;
        Some((
            Multicast::of(session.comm(), source, bytes)?,
            source.offset() as usize,
            Multicast::of(session.comm(), target, bytes)?,
            combine,
        ))
    }
}

impl<M: Machine, T: Element> Body<M> for AllReduce<T> {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        let block = session.block();
        let (first, last) = memory.part(block, round, me);
        let length = last - first;
        let mut split = Split {
            head: length,
            vectors: 0,
            tail: 0,
        };
        if let Some((from, offset, to, combine)) = self.agreed(session, memory) {
            let at = (round.start + first) * memory.size;
            split = Split::new(offset + at, length, memory.size);
            let byte = at + split.head * memory.size;
            let average = self.ordinary.reducer.reduction == AVERAGE;
            // SAFETY: every rank's part was checked against its window, and its ready signal
            // acquired; the shard is this rank's.
            unsafe {
                reduce_switched::<M, T, Multicast>(
                    block,
                    from,
                    byte,
                    to,
                    byte,
                    split.vectors,
                    combine,
                    if average { ranks } else { 0 },
                );
            }
        }
        let mut piece = 0;
        while piece < 2 {
            let (start, count) = split.piece(piece, first, length);
            // SAFETY: the caller's promise; elements of this rank's shard.
            if count > 0 && !unsafe { self.ordinary.range(session, memory, round, start, count) } {
                return false;
            }
            block.sync();
            piece += 1;
        }
        true
    }
}

/// This rank reduces its own row of all inputs.
struct ReduceScatter<T> {
    ordinary: OwnRow<SwitchedReducer<T>>,
}

impl<T: Element> ReduceScatter<T> {
    /// Input and combination, if all ranks can go by multicast.
    #[inline(always)]
    fn agreed<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
    ) -> Option<(Multicast, usize, Combine)> {
        let combine = multimem::combine(T::DTYPE, self.ordinary.reducer.reduction)?;
        let source = common(session, word::SOURCE, SOURCE)?;
        let bytes = memory.count * memory.size * session.comm().size() as usize;
        let from = Multicast::of(session.comm(), source, bytes as u64)?;
        Some((from, source.offset() as usize, combine))
    }
}

impl<M: Machine, T: Element> Body<M> for ReduceScatter<T> {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        let block = session.block();
        let (first, last) = memory.part(block, round, 0);
        let length = last - first;
        let mut split = Split {
            head: length,
            vectors: 0,
            tail: 0,
        };
        if let Some((from, offset, combine)) = self.agreed(session, memory) {
            let row = me as usize * memory.count + round.start + first;
            split = Split::new(offset + row * memory.size, length, memory.size);
            let to = Local {
                at: memory.target.cast::<T>(),
                policy: self.ordinary.policy,
            };
            let average = self.ordinary.reducer.reduction == AVERAGE;
            // SAFETY: every rank's part was checked against its window, and its ready signal
            // acquired; the output is the caller's.
            unsafe {
                reduce_switched::<M, T, Local<T>>(
                    block,
                    from,
                    (row + split.head) * memory.size,
                    to,
                    (round.start + first + split.head) * memory.size,
                    split.vectors,
                    combine,
                    if average { ranks } else { 0 },
                );
            }
        }
        let mut piece = 0;
        while piece < 2 {
            let (start, count) = split.piece(piece, first, length);
            // SAFETY: the caller's promise.
            if count > 0 && !unsafe { self.ordinary.range(session, memory, round, start, count) } {
                return false;
            }
            block.sync();
            piece += 1;
        }
        true
    }
}

/// This rank writes its input to its row of all outputs.
struct AllGather {
    ordinary: PullPlan,
}

impl AllGather {
    /// Pushes units `[first, first + length)` of the round, less than 16 bytes, by ordinary stores,
    /// to this rank's own row as well (in place that changes nothing). False after a failure.
    ///
    /// # Safety
    /// As [`Body::round`].
    #[inline(always)]
    unsafe fn push<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
        round: Round,
        first: usize,
        length: usize,
    ) -> bool {
        let from = memory
            .source
            .wrapping_add((round.start + first) * memory.size);
        let row = session.comm().rank() as usize * memory.count + round.start + first;
        let mut step = 0;
        while step < session.comm().size() {
            let rank = session.comm().after(step);
            let addr = WindowAddr(session.word(rank, word::TARGET));
            let Some(to) = memory.named(session, addr, rank, row, length) else {
                return false;
            };
            for byte in session.block().elements_of_block(length * memory.size) {
                // SAFETY: the target was checked against its window; the source is the caller's.
                unsafe { mem::write(to.add(byte), mem::read(from.add(byte))) };
            }
            // All lanes together again: the way on must not be cut up by where a lane's loop ended.
            session.block().sync();
            step += 1;
        }
        true
    }
}

impl<M: Machine> Body<M> for AllGather {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        let block = session.block();
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        let bytes = (memory.count * memory.size * ranks as usize) as u64;
        let agreed = common(session, word::TARGET, TARGET | FITS)
            .and_then(|target| Some((Multicast::of(session.comm(), target, bytes)?, target)));
        let Some((to, target)) = agreed else {
            // SAFETY: the caller's promise.
            return unsafe { self.ordinary.round(session, memory, round) };
        };
        let (first, last) = memory.part(block, round, 0);
        let length = last - first;
        let row = me as usize * memory.count + round.start + first;
        let split = Split::new(
            target.offset() as usize + row * memory.size,
            length,
            memory.size,
        );
        let from = memory
            .source
            .wrapping_add((round.start + first + split.head) * memory.size);
        let to_byte = (row + split.head) * memory.size;
        multimem::fence();
        let step = block.size() as usize * BYTES;
        let end = split.vectors * BYTES;
        let policy = self.ordinary.policy;
        let mut at = block.rank() as usize * BYTES;
        // SAFETY: within the caller's input, which is aligned, as this rank has said; every rank's
        // part was checked against its window, and its ready signal acquired; the row is this
        // rank's.
        unsafe {
            // Two at a time: four would spill a register of the ordinary way.
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
        multimem::fence();
        let mut piece = 0;
        while piece < 2 {
            let (start, count) = split.piece(piece, first, length);
            // SAFETY: the caller's promise; units of this rank's row.
            if count > 0 && !unsafe { self.push(session, memory, round, start, count) } {
                return false;
            }
            piece += 1;
        }
        block.sync();
        true
    }
}

/// Runs an all_reduce by multicast where all ranks' memory allows it, else in two shots. Sum,
/// average, and, but for f32, minimum and maximum, as the call says.
///
/// # Safety
/// The buffers valid for `count` elements; `chunk` elements
/// (a multiple of [`crate::ALIGNMENT`]) must fit staging.
#[kernel(
    params = crate::all_reduce::AllReduceSignalParams,
    each(T: f32 = f32, f16 = F16, bf16 = Bf16)
)]
pub unsafe fn all_reduce_nvls<T: Element>(
    session: &mut Session<impl Machine>,
    source: *const u8,
    source_at: u64,
    target: *mut u8,
    target_at: u64,
    scalar: u64,
    chunk: u64,
    hint: u32,
) -> Result<(), Aborted> {
    let count = session.count();
    let _ = scalar; // none of these reductions has one: the word says what multicast reaches
    let reducer = SwitchedReducer::<T> {
        reduction: session.call().reduction(),
        element: PhantomData,
    };
    let memory = memory(
        reducer, count, source, source_at, target, target_at, 0, chunk,
    );
    let bytes = memory.count * memory.size;
    let reach = |addr, bit| reached(session, addr, bytes, memory.size, bit);
    let memory = Memory {
        shards: session.comm().size(),
        target_shared: true,
        scalar: reach(memory.source_at, SOURCE) | reach(memory.target_at, TARGET),
        ..memory
    };
    let policy = policy(hint);
    let body = AllReduce {
        ordinary: TwoShot {
            reducer,
            policy,
            root: ALL,
        },
    };
    // SAFETY: the caller's promise.
    let done = unsafe { memory.run(session, policy, &body) };
    session.settle(done)
}

/// Runs a reduce_scatter by multicast where all ranks' inputs allow it, else by reading every
/// rank's: `count` elements a rank. Reductions as for [`all_reduce_nvls`].
///
/// # Safety
/// The input valid for `count` elements times the number of
/// ranks, the output for `count`; `chunk` elements of each row (a multiple of [`crate::ALIGNMENT`])
/// must fit staging.
#[kernel(
    params = crate::all_reduce::AllReduceSignalParams,
    each(T: f32 = f32, f16 = F16, bf16 = Bf16)
)]
pub unsafe fn reduce_scatter_nvls<T: Element>(
    session: &mut Session<impl Machine>,
    source: *const u8,
    source_at: u64,
    target: *mut u8,
    target_at: u64,
    scalar: u64,
    chunk: u64,
    hint: u32,
) -> Result<(), Aborted> {
    let count = session.count();
    let _ = scalar; // as above
    let reducer = SwitchedReducer::<T> {
        reduction: session.call().reduction(),
        element: PhantomData,
    };
    let memory = memory(
        reducer, count, source, source_at, target, target_at, 0, chunk,
    );
    let bytes = memory.count * memory.size * session.comm().size() as usize;
    let memory = Memory {
        source_rows: session.comm().size(),
        scalar: reached(session, memory.source_at, bytes, memory.size, SOURCE),
        ..memory
    };
    let policy = policy(hint);
    let body = ReduceScatter {
        ordinary: OwnRow { reducer, policy },
    };
    // SAFETY: the caller's promise.
    let done = unsafe { memory.run(session, policy, &body) };
    session.settle(done)
}

/// Runs an all_gather by multicast where all ranks' memory allows it, else by pulling: `count`
/// units of `size` bytes (a divisor of 16) of every rank, to row r of every rank's output.
///
/// # Safety
/// The input valid for `count` units, the output for `count`
/// units times the number of ranks; `chunk` units (a multiple of [`crate::ALIGNMENT`]) must fit
/// staging.
#[kernel]
pub unsafe fn all_gather_nvls(
    session: &mut Session<impl Machine>,
    size: u64,
    source: *const u8,
    source_at: u64,
    target: *mut u8,
    target_at: u64,
    chunk: u64,
    hint: u32,
) -> Result<(), Aborted> {
    let count = session.count();
    let (rank, ranks) = (session.comm().rank(), session.comm().size());
    let (count, size) = (count as usize, size as usize);
    let row = WindowAddr(target_at).offset() as usize + rank as usize * count * size;
    let fits = if (source as usize ^ row).is_multiple_of(BYTES) && BYTES.is_multiple_of(size) {
        FITS
    } else {
        0
    };
    let bytes = count * size * ranks as usize;
    let memory = Memory {
        size,
        count,
        chunk: chunk as usize,
        source,
        source_at: WindowAddr(source_at),
        source_rows: 1,
        target,
        target_at: WindowAddr(target_at),
        target_shared: false,
        shards: 1,
        alignment: crate::ALIGNMENT,
        scalar: fits | reached(session, WindowAddr(target_at), bytes, size, TARGET),
    };
    let policy = policy(hint);
    let body = AllGather {
        ordinary: PullPlan {
            first: rank,
            ranks,
            row: 0,
            by_rank: true,
            policy,
        },
    };
    // SAFETY: the caller's promise.
    let done = unsafe { memory.run(session, policy, &body) };
    session.settle(done)
}
