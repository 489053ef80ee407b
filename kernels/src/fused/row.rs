//! One row: its values and its statistics, for blocks of one lane and of several. Both give the
//! same bits.
//!
//! A statistic is a sum over the row. Accumulator a of 4096 sums the elements with index = a mod
//! 4096 in order. A fixed binary tree adds the accumulators, from bit to bit of their indices: bits
//! 7 to 3, then 11 to 8, then 2 to 0. The 128 sums after the first five bits are the partials. So a
//! GPU sums in registers what a lane has loaded, and a CPU adds whole vectors.
//!
//! A lane works on chunks of [`CHUNK`] elements. It computes the values of its chunks first; then
//! the block sums them. Chunk c belongs to virtual lane c mod 512, and virtual lane v to lane v mod
//! the size of the block. So the accumulators of a virtual lane are those with bits 3 to 11 = v,
//! and the first five bits of the tree are those of a lane in a warp of 32.
//!
//! Several blocks can share a row ([`Stripe`]). Each then sends its partials to the others.

use core::marker::PhantomData;

use fusewire_device::arch;
use fusewire_device::bulk::Tables;
use fusewire_device::comm::WindowAddr;
use fusewire_device::{Aborted, Block, Element, Group, In, InOut, Machine, Out, Session};

use super::NormShape;
use super::spec::{NormSpec, OutputFormat};
use super::stripe::{ACCUMULATORS, CHUNK, PARTIALS, Stripe, VIRTUAL_LANES};
use super::sum::{Exchange, Sums};
use crate::chunk;

/// Number of virtual lanes whose accumulators form [`CHUNK`] partials.
const VIRTUAL_WARP: usize = 32;
/// Greatest number of elements of a row that shared memory holds, in f32.
const SHARED_ROW: usize = 8192;
/// Number of words of an entry of [`Targets`].
const TARGET_WORDS: usize = 4;

// Shared memory has the tables of sources, the targets and the row. The following parts are at its
// end, at offsets that do not depend on the number of ranks.
const END: usize = arch::SHARED_BYTES - arch::RESERVED_BYTES;
const ARGUMENTS_AT: usize = (END - size_of::<Arguments>()) / 128 * 128;
/// Two tables of partials. The two statistics of a row use different ones, because a lane may still
/// read one when others write the next.
const PARTIALS_AT: usize = ARGUMENTS_AT - 2 * 4 * PARTIALS;

/// Returns the offset of the row in shared memory.
const fn row_at(ranks: u32) -> usize {
    (targets_at(ranks) + 8 * TARGET_WORDS * ranks as usize).next_multiple_of(128)
}

/// Returns the offset of the targets in shared memory.
const fn targets_at(ranks: u32) -> usize {
    Tables::bytes(ranks)
}

/// Returns the number of elements of a row that shared memory holds, in f32.
pub const fn shared_row(ranks: u32) -> usize {
    let room = PARTIALS_AT.saturating_sub(row_at(ranks)) / 4;
    if room < SHARED_ROW { room } else { SHARED_ROW }
}

/// Returns the memory of this block for the values of a row of `hidden` elements: shared memory, or
/// staging for output from byte `scratch` on.
#[inline(always)]
fn row_memory<M: Machine>(session: &Session<M>, scratch: u64, hidden: u64) -> *mut f32 {
    let (comm, block) = (session.comm(), session.block());
    if hidden as usize <= shared_row(comm.size()) {
        return block.shared().wrapping_add(row_at(comm.size())).cast();
    }
    let at = comm.workspace().staging_out + scratch + u64::from(block.index()) * hidden * 4;
    comm.own(at).cast()
}

/// Greatest number of ranks whose tables fit shared memory.
pub const MAX_RANKS: u32 = {
    let mut ranks = 1;
    while row_at(ranks + 1) <= PARTIALS_AT {
        ranks += 1;
    }
    ranks
};

const _: () = assert!(shared_row(64) == SHARED_ROW && MAX_RANKS >= 576);

/// The buffers of a norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers<'a, T> {
    pub(super) source: In<'a, T>,
    pub(super) residual: In<'a, u8>,
    pub(super) weight: In<'a, T>,
    pub(super) bias: In<'a, T>,
    pub(super) kept: Out<'a, u8>,
    pub(super) out: Out<'a, u8>,
    pub(super) scales: InOut<'a, u8>,
}

/// Arguments of a norm, in shared memory: they are rarely read, and would occupy registers of every
/// lane.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Arguments {
    /// Rows of this rank's residual, or null if there is none.
    residual: *const u8,
    pub(super) weight: *const u8,
    /// Null if there is none.
    pub(super) bias: *const u8,
    /// Normalized rows.
    pub(super) out: *mut u8,
    pub(super) out_at: WindowAddr,
    /// Sums with the residual, or null if they are not wanted.
    pub(super) kept: *mut u8,
    pub(super) kept_at: WindowAddr,
    /// Computed scales, or the given one.
    pub(super) scales: *mut u8,
    pub(super) scales_at: WindowAddr,
    /// Number of scales from one group to the next, if scales are column-major.
    pub(super) stride: usize,
    /// Number of rows that are staged at once.
    pub(super) chunk: usize,
    /// Memory of this block for the values of a row.
    values: *mut f32,
    spec: NormSpec,
    epsilon: f32,
    /// The block's part of rows.
    stripe: Stripe,
}

/// The part of a fused norm that is the same for all rows. The buffers have these rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm<T> {
    arguments: *const Arguments,
    rows: usize,
    hidden: usize,
    /// False if the stripe is known to be the whole row.
    is_divided: bool,
    element: PhantomData<T>,
}

impl<T: Element<Acc = f32>> Norm<T> {
    /// Writes the arguments to shared memory. The block handles a stripe of its rows, or if it is
    /// `None`, whole rows. All lanes together.
    ///
    /// # Errors
    /// [`Aborted`] if the buffers are too short for `shape`.
    ///
    /// # Safety
    /// - A chunk of rows, and after it the memory of all blocks for long rows at `scratch`, must
    ///   fit staging. The window addresses must be those of the buffers.
    /// - Byte buffers must be aligned to their elements; on a GPU, all buffers to 16 bytes.
    /// - During the launch, nothing else may write the inputs or access the outputs.
    /// - Only the leader may use the arguments before the next barrier of the block.
    /// - If the norm is the body of an exchange, the elements of the exchange must be its rows.
    #[inline(always)]
    pub(super) unsafe fn new<M: Machine>(
        session: &Session<M>,
        buffers: &Buffers<T>,
        shape: &NormShape,
        stripe: Option<Stripe>,
    ) -> Result<Self, Aborted> {
        let Buffers {
            source,
            residual,
            weight,
            bias,
            kept,
            out,
            scales,
        } = *buffers;
        let (spec, size) = (shape.spec, size_of::<T>());
        let (rows, hidden) = (shape.rows as usize, shape.hidden as usize);
        // The bound keeps numbers of bytes and scales of a row from overflowing.
        let is_row = hidden != 0 && u32::try_from(hidden).is_ok() && hidden.is_multiple_of(CHUNK);
        let kept_bytes = || rows.saturating_mul(spec.residual_bytes(hidden, size));
        // The scales come last: their number does not overflow if the output has the rows.
        let fits = is_row
            && weight.len() >= hidden
            && (bias.as_ptr().is_null() || bias.len() >= hidden)
            && source.len() >= rows.saturating_mul(hidden)
            && out.len() >= rows.saturating_mul(spec.out_bytes(hidden, size))
            && (residual.as_ptr().is_null() || residual.len() >= kept_bytes())
            && (kept.as_ptr().is_null() || kept.len() >= kept_bytes())
            && scales.len()
                >= match spec.output_format() {
                    OutputFormat::StaticFp8 => size_of::<f32>(),
                    _ => spec.scale_span(hidden, rows, spec.strides(hidden, shape.stride)),
                };
        if !fits {
            // One record for all buffers: the host checks them first and names the wrong one.
            session.fault(u32::MAX, shape.rows, shape.hidden);
        }
        session.settle(fits)?;
        let arguments = Arguments {
            residual: residual.as_ptr(),
            weight: weight.as_ptr().cast(),
            bias: bias.as_ptr().cast(),
            out: out.as_ptr(),
            out_at: shape.out_at,
            kept: kept.as_ptr(),
            kept_at: shape.kept_at,
            scales: scales.as_ptr(),
            scales_at: shape.scales_at,
            stride: shape.stride as usize,
            chunk: shape.chunk as usize,
            values: row_memory(session, shape.scratch, shape.hidden),
            spec,
            epsilon: shape.epsilon,
            stripe: stripe.unwrap_or(Stripe::WHOLE),
        };
        let block = session.block();
        let at = block
            .shared()
            .wrapping_add(ARGUMENTS_AT)
            .cast::<Arguments>();
        if block.is_leader() {
            // SAFETY: `ARGUMENTS_AT` leaves room for the arguments at the end of shared memory.
            // Only the leader writes them, and the other lanes read them after a barrier.
            unsafe { at.write(arguments) };
        }
        Ok(Self {
            arguments: at,
            rows,
            hidden,
            is_divided: stripe.is_some(),
            element: PhantomData,
        })
    }

    /// Returns the arguments. The compiler removes the loads of unused fields.
    #[inline(always)]
    pub(super) fn arguments(&self) -> Arguments {
        // SAFETY: the leader has written the arguments in `new`, which requires that other lanes
        // pass a barrier first.
        unsafe { self.arguments.read() }
    }

    /// Returns the specification.
    #[inline(always)]
    pub(super) fn spec(&self) -> NormSpec {
        self.arguments().spec
    }

    /// Returns the number of rows.
    #[inline(always)]
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of elements of a row.
    #[inline(always)]
    pub(super) fn hidden(&self) -> usize {
        self.hidden
    }

    /// Returns the address of the part of rows that the block handles, in shared memory.
    #[inline(always)]
    pub(super) fn stripe_at(&self) -> *const Stripe {
        // SAFETY: computes an address within the arguments.
        unsafe { &raw const (*self.arguments).stripe }
    }

    /// Returns the part of rows that the block handles.
    #[inline(always)]
    pub(super) fn stripe(&self) -> Stripe {
        match self.is_divided {
            true => self.arguments().stripe,
            false => Stripe::WHOLE,
        }
    }

    /// Returns true if the sum with the residual is written.
    #[inline(always)]
    pub(super) fn keeps(&self) -> bool {
        !self.arguments().kept.is_null()
    }

    /// Reduces, normalizes and writes `rows` rows: those of the sums and of the targets, which are
    /// rows `first ..` of this rank's residual. Returns false after a failure, which is recorded.
    /// All lanes together. The block must pass a barrier before it changes the sums or the targets.
    ///
    /// # Safety
    /// The norm must have rows `first .. first + rows`. All ranks' rows of `sums`, and the rows at
    /// every target, must be valid for `rows` rows. No other block or rank may write the former or
    /// access the latter until this block releases them. Since the arguments, the sums and the
    /// targets were written, the block must have passed a barrier.
    #[inline(always)]
    pub(super) unsafe fn each_row<M: Machine, S: Sums<M>>(
        &self,
        block: Block<M>,
        targets: Targets,
        sums: &S,
        first: usize,
        rows: usize,
    ) -> bool {
        let mut index = 0;
        while index < rows {
            let sum = RowSum {
                norm: *self,
                block,
                targets,
                sums,
                index,
                residual: first + index,
                values: self.arguments().values,
            };
            let Some(row) = sum.reduce() else {
                return false;
            };
            if !row.write(sums) {
                return false;
            }
            index += 1;
        }
        true
    }
}

/// Targets of rows: a table in shared memory, with one entry per target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Targets {
    table: *mut [u64; TARGET_WORDS],
    count: u32,
}

impl Targets {
    /// Returns the table of `count` targets, on `ranks` ranks.
    ///
    /// # Safety
    /// `count` must be at most `ranks`, and `ranks` the number of ranks. No two lanes may set the
    /// same entry, and a barrier of the block must separate writes and reads of entries. The kernel
    /// must not use this shared memory for anything else.
    #[inline(always)]
    pub(super) unsafe fn new<M: Machine>(block: Block<M>, ranks: u32, count: u32) -> Self {
        Self {
            table: block.shared().wrapping_add(targets_at(ranks)).cast(),
            count,
        }
    }

    /// Sets target `index`, if there is one. The scale of row r and group g is at
    /// `scales[r * strides.0 + g * strides.1]`.
    #[inline(always)]
    pub(super) fn set(
        &self,
        index: u32,
        out: *mut u8,
        kept: *mut u8,
        scales: *mut u8,
        strides: (u32, u32),
    ) {
        if index >= self.count {
            return;
        }
        let words = [
            out as u64,
            kept as u64,
            scales as u64,
            u64::from(strides.0) | u64::from(strides.1) << 32,
        ];
        for word in 0..TARGET_WORDS {
            // SAFETY: `index` is below the count, and `new` requires that one lane sets an entry.
            unsafe { self.at(word, index).write(words[word]) };
        }
    }

    #[inline(always)]
    fn at(&self, word: usize, index: u32) -> *mut u64 {
        let entry = self.table.wrapping_add(index as usize);
        entry.cast::<u64>().wrapping_add(word)
    }

    /// Returns word `WORD` of target `index`, if there is one.
    #[inline(always)]
    fn word<const WORD: usize>(&self, index: u32) -> Option<u64> {
        const { assert!(WORD < TARGET_WORDS) };
        if index >= self.count {
            return None;
        }
        // SAFETY: `index` is below the count; `new` requires a barrier after the lanes have set the
        // entries.
        Some(unsafe { self.at(WORD, index).read() })
    }

    /// Returns the address of the normalized rows of target `index`, if there is one.
    #[inline(always)]
    pub(super) fn out(&self, index: u32) -> Option<*mut u8> {
        Some(self.word::<0>(index)? as *mut u8)
    }

    /// Returns the address of the sums with the residual of target `index`, if there is one.
    #[inline(always)]
    fn kept(&self, index: u32) -> Option<*mut u8> {
        Some(self.word::<1>(index)? as *mut u8)
    }

    /// Returns the address of the scale of `bytes` bytes of row `row` and group `group` of target
    /// `index`, if there is one.
    #[inline(always)]
    pub(super) fn scale(
        &self,
        index: u32,
        row: usize,
        group: usize,
        bytes: usize,
    ) -> Option<*mut u8> {
        let strides = self.word::<3>(index)?;
        let at = row * (strides as u32) as usize + group * (strides >> 32) as usize;
        Some((self.word::<2>(index)? as *mut u8).wrapping_add(at * bytes))
    }
}

/// A row whose values are written, and the numbers to normalize it by. Made by [`RowSum::reduce`].
pub(super) struct Row<M, T> {
    // By value: a reference would keep the norm in local memory.
    pub(super) norm: Norm<T>,
    pub(super) block: Block<M>,
    pub(super) targets: Targets,
    /// Index of the row at the targets, which have it.
    pub(super) index: usize,
    /// The values, in f32.
    values: *mut f32,
    /// Mean, or 0 for the root mean square.
    pub(super) mean: f32,
    /// Reciprocal of the root.
    pub(super) scale: f32,
}

impl<M: Machine, T> Row<M, T> {
    /// Returns a table of partials of the last row's statistics. Until the block has passed a
    /// barrier, lanes may still read it.
    #[inline(always)]
    pub(super) fn table(&self) -> *mut f32 {
        table(self.block, 0)
    }

    /// Returns values `[at, at + N)`.
    ///
    /// # Safety
    /// The values must be in the row. If another lane has written them, it must pass a barrier of
    /// the block before it writes the next row, or the result must not be used.
    #[inline(always)]
    pub(super) unsafe fn values<const N: usize>(&self, at: usize) -> [f32; N] {
        // SAFETY: the precondition of this function. `RowSum::reduce` has written the values, and
        // the block has passed a barrier.
        unsafe { self.values.add(at).cast::<[f32; N]>().read() }
    }
}

/// A row that is being reduced. Made by [`Norm::each_row`], whose preconditions hold for it.
struct RowSum<'a, M, T, S> {
    norm: Norm<T>,
    block: Block<M>,
    targets: Targets,
    sums: &'a S,
    /// Index of the row in the sums and at the targets.
    index: usize,
    /// Index of the row in this rank's residual.
    residual: usize,
    /// Memory of the block for the values.
    values: *mut f32,
}

impl<'a, M: Machine, T: Element<Acc = f32>, S: Sums<M>> RowSum<'a, M, T, S> {
    /// Sums the row, adds the residual, writes the sum to the targets if it is wanted, and computes
    /// the statistics. `None` after a failure. All lanes together.
    #[inline(always)]
    fn reduce(&self) -> Option<Row<M, T>> {
        let (mean, squares) = if M::LANES == 1 {
            self.statistics_single()?
        } else {
            self.statistics_lanes()?
        };
        let variance = squares / self.norm.hidden as f32;
        Some(Row {
            norm: self.norm,
            block: self.block,
            targets: self.targets,
            index: self.index,
            values: self.values,
            mean,
            scale: 1.0 / arch::sqrt_f32(variance + self.norm.arguments().epsilon),
        })
    }

    /// Computes values `[at, at + N)`: the sum, rounded, with the residual, rounded. Writes them to
    /// the memory for values and, if they are wanted, to the targets.
    ///
    /// # Safety
    /// The values must be in the row, and no other lane may access them until the next barrier of
    /// the block.
    #[inline(always)]
    unsafe fn chunk<const N: usize>(&self, at: usize) -> Option<[f32; N]> {
        let wide = self.norm.spec().has_wide_residual();
        // Before the sum, so that its loads are in flight together with those of the sum.
        // SAFETY: the precondition of this function; the residual has this type.
        let residual = unsafe {
            match wide {
                true => self.residual::<f32, N>(at),
                false => self.residual::<T, N>(at),
            }
        };
        // SAFETY: the sums have row `index` (`each_row`), and the row has the elements.
        let sum = unsafe { self.sums.sum::<N>(self.index * self.norm.hidden + at)? };
        let rounded: [T; N] = chunk::narrow(sum);
        let mut values = chunk::widen(rounded);
        if !self.norm.arguments().residual.is_null() {
            for i in 0..N {
                values[i] += residual[i];
            }
        }
        // SAFETY: the precondition of this function; the residual has this type.
        unsafe {
            match wide {
                true => self.keep::<f32, N>(at, &mut values),
                false => self.keep::<T, N>(at, &mut values),
            }
        }
        // SAFETY: the memory has room for a row, and only this lane accesses these values.
        unsafe { self.values.add(at).cast::<[f32; N]>().write(values) };
        Some(values)
    }

    /// Returns elements `[at, at + N)` of the row of the residual; zeros if there is none.
    ///
    /// # Safety
    /// As [`RowSum::chunk`]; `R` must be the type of the residual.
    #[inline(always)]
    unsafe fn residual<R: Element<Acc = f32>, const N: usize>(&self, at: usize) -> [f32; N] {
        let rows = self.norm.arguments().residual;
        if rows.is_null() {
            return [0.0; N];
        }
        let from = self.residual * self.norm.hidden + at;
        // SAFETY: `Norm::new` has checked that the residual has the norm's rows, of which
        // `residual` is one.
        chunk::widen(unsafe { chunk::read::<M, R, N>(rows.cast::<R>().add(from)) })
    }

    /// Rounds values `[at, at + N)`, and writes them to the targets if they are wanted.
    ///
    /// # Safety
    /// As [`RowSum::chunk`]; `R` must be the type of the residual.
    #[inline(always)]
    unsafe fn keep<R: Element<Acc = f32>, const N: usize>(&self, at: usize, values: &mut [f32; N]) {
        let rounded: [R; N] = chunk::narrow(*values);
        *values = chunk::widen(rounded);
        if self.norm.keeps() {
            let to = self.index * self.norm.hidden + at;
            let mut target = 0;
            while let Some(kept) = self.targets.kept(target) {
                // SAFETY: every target has row `index` (`each_row`), and only this lane accesses
                // these elements.
                unsafe { chunk::write::<M, R, N>(kept.cast::<R>().add(to), rounded) };
                target += 1;
            }
        }
    }

    /// Returns the mean (or 0) and the sum of squares, computed by one lane.
    #[inline(always)]
    fn statistics_single(&self) -> Option<(f32, f32)> {
        let (hidden, layer) = (self.norm.hidden, self.norm.spec().is_layer());
        let total = sum_single(hidden, SumTerms { sum: self, layer })?;
        if !layer {
            return Some((0.0, total));
        }
        let mean = total / hidden as f32;
        let terms = SquareTerms {
            values: self.values,
            hidden,
            mean,
        };
        Some((mean, sum_single(hidden, terms)?))
    }

    /// Does what [`RowSum::statistics_single`] does, by several lanes. All lanes together.
    #[inline(always)]
    fn statistics_lanes(&self) -> Option<(f32, f32)> {
        let (block, hidden, stripe) = (self.block, self.norm.hidden, self.norm.stripe());
        let (layer, chunks) = (self.norm.spec().is_layer(), hidden / CHUNK);
        let mut failed = false;
        chunks_of_lane(block, stripe, chunks, |index| {
            // SAFETY: `index < chunks`; each index goes to one lane.
            failed = failed || unsafe { self.chunk::<CHUNK>(index * CHUNK) }.is_none();
        });
        if S::WAITS {
            // The vote is a barrier, too.
            if block.any(failed) {
                return None;
            }
        } else {
            block.sync();
        }
        // A layer norm has a second pass. One loop, so that the compiled code has the body once.
        let (mut mean, mut pass) = (0.0, 0);
        loop {
            let of = |mut terms: [f32; CHUNK]| {
                if pass == 1 {
                    for j in 0..CHUNK {
                        terms[j] -= mean;
                    }
                }
                if !layer || pass == 1 {
                    for j in 0..CHUNK {
                        terms[j] *= terms[j];
                    }
                }
                terms
            };
            let sums = table(block, pass);
            // SAFETY: the block has written the values of its stripe, and passed a barrier. The
            // table is memory of this block, which no lane uses after the last barrier.
            unsafe { put_partials(block, stripe, chunks as u32, self.values, sums, of) };
            block.sync();
            let exchange = match pass {
                0 => Exchange::Sum,
                _ => Exchange::Squares,
            };
            // SAFETY: the block has written the table, and passed a barrier.
            let total = unsafe { self.table_total(exchange, sums, |x| of([x; CHUNK])[0])? };
            if !layer || pass == 1 {
                return Some((mean, total));
            }
            mean = total / hidden as u32 as f32;
            pass = 1;
        }
    }

    /// Returns the sum of the partials in a table, on every lane, after the blocks of the row have
    /// exchanged them. `of` is the statistic of a value. `None` after a failure, which is recorded.
    /// All lanes together.
    ///
    /// # Safety
    /// The block must have called [`put_partials`] for the table, and passed a barrier.
    #[inline(always)]
    unsafe fn table_total(
        &self,
        exchange: Exchange,
        table: *mut f32,
        of: impl Fn(f32) -> f32,
    ) -> Option<f32> {
        let (block, hidden, stripe) = (self.block, self.norm.hidden, self.norm.stripe());
        if has_small_warps(block) {
            for index in block.elements_of_block(stripe.partials().len()) {
                let partial = stripe.partials().start + index;
                // SAFETY: the block has written the values of its stripe, and passed a barrier;
                // each entry goes to one lane.
                unsafe {
                    let sum = partial_of_values(self.values, hidden, partial, &of);
                    table.add(partial).write(sum);
                }
            }
            block.sync();
        }
        // SAFETY: the block has written its partials to the table, and passed a barrier.
        unsafe {
            if !self.sums.complete(stripe, exchange, table.cast()) {
                return None;
            }
            Some(table_sum(block, table))
        }
    }
}

/// Returns table `which` of partials, 0 or 1, in shared memory.
#[inline(always)]
fn table<M: Machine>(block: Block<M>, which: usize) -> *mut f32 {
    let at = PARTIALS_AT + which * 4 * PARTIALS;
    block.shared().wrapping_add(at).cast()
}

/// Returns true if warps are smaller than [`VIRTUAL_WARP`], which is possible only for emulated
/// lanes.
#[inline(always)]
fn has_small_warps<M: Machine>(block: Block<M>) -> bool {
    block.machine().warp_size() < VIRTUAL_WARP as u32
}

/// The terms of a statistic, for one lane. A trait instead of a closure: its method can be forced
/// inline.
trait Terms {
    /// Returns the terms of elements `[at, at + PARTIALS)`, and zeros beyond the row. `None` after
    /// a failure.
    fn get(&self, at: usize) -> Option<[f32; PARTIALS]>;

    /// Returns the terms of elements `[at, at + CHUNK)` of the row.
    ///
    /// # Safety
    /// The elements must be in the row, and there must be one lane.
    unsafe fn chunk(&self, at: usize) -> Option<[f32; CHUNK]>;

    /// Does what [`Terms::get`] does, for elements of which the row has not all.
    #[inline(always)]
    fn padded(&self, at: usize, hidden: usize) -> Option<[f32; PARTIALS]> {
        let mut terms = [0f32; PARTIALS];
        let mut start = 0;
        while start < PARTIALS && at + start < hidden {
            // SAFETY: `at + start + CHUNK <= hidden`: all are multiples of it. There is one lane.
            let some = unsafe { self.chunk(at + start)? };
            for j in 0..CHUNK {
                terms[start + j] += some[j];
            }
            start += CHUNK;
        }
        Some(terms)
    }
}

/// Values, or their squares, of a row that is summed meanwhile.
struct SumTerms<'a, 'b, M, T, S> {
    sum: &'a RowSum<'b, M, T, S>,
    /// True for the values.
    layer: bool,
}

impl<M: Machine, T: Element<Acc = f32>, S: Sums<M>> Terms for SumTerms<'_, '_, M, T, S> {
    #[inline(always)]
    fn get(&self, at: usize) -> Option<[f32; PARTIALS]> {
        let hidden = self.sum.norm.hidden;
        if at + PARTIALS > hidden {
            return self.padded(at, hidden);
        }
        // SAFETY: within the row by the condition. There is one lane.
        let mut terms = unsafe { self.sum.chunk::<PARTIALS>(at)? };
        if !self.layer {
            for j in 0..PARTIALS {
                terms[j] *= terms[j];
            }
        }
        Some(terms)
    }

    #[inline(always)]
    unsafe fn chunk(&self, at: usize) -> Option<[f32; CHUNK]> {
        // SAFETY: the precondition of this function.
        let mut terms = unsafe { self.sum.chunk::<CHUNK>(at)? };
        if !self.layer {
            for j in 0..CHUNK {
                terms[j] *= terms[j];
            }
        }
        Some(terms)
    }
}

/// Squares of the differences from the mean. The lane has written the values.
struct SquareTerms {
    values: *const f32,
    hidden: usize,
    mean: f32,
}

impl Terms for SquareTerms {
    #[inline(always)]
    fn get(&self, at: usize) -> Option<[f32; PARTIALS]> {
        if at + PARTIALS > self.hidden {
            return self.padded(at, self.hidden);
        }
        // SAFETY: within the row by the condition.
        let mut terms = unsafe { self.values.add(at).cast::<[f32; PARTIALS]>().read() };
        for j in 0..PARTIALS {
            let off = terms[j] - self.mean;
            terms[j] = off * off;
        }
        Some(terms)
    }

    #[inline(always)]
    unsafe fn chunk(&self, at: usize) -> Option<[f32; CHUNK]> {
        // SAFETY: the precondition of this function.
        let mut terms = unsafe { self.values.add(at).cast::<[f32; CHUNK]>().read() };
        for j in 0..CHUNK {
            let off = terms[j] - self.mean;
            terms[j] = off * off;
        }
        Some(terms)
    }
}

/// Returns the sum of a statistic over a row of `hidden` elements. By one lane.
#[inline(always)]
fn sum_single(hidden: usize, terms: impl Terms) -> Option<f32> {
    const WARP_ELEMENTS: usize = VIRTUAL_WARP * CHUNK;
    const _: () = assert!(WARP_ELEMENTS == 2 * PARTIALS);
    let mut partials = [0f32; PARTIALS];
    let mut warp = 0;
    while warp < ACCUMULATORS / WARP_ELEMENTS && warp * WARP_ELEMENTS < hidden {
        let mut at = warp * WARP_ELEMENTS;
        let mut low = accumulators(terms.get(at)?);
        if at + PARTIALS < hidden {
            let mut high = accumulators(terms.get(at + PARTIALS)?);
            at += ACCUMULATORS;
            while at < hidden {
                add(&mut low, &terms.get(at)?);
                if at + PARTIALS < hidden {
                    add(&mut high, &terms.get(at + PARTIALS)?);
                }
                at += ACCUMULATORS;
            }
            // Bit 7 of the index.
            add(&mut low, &high);
        }
        // Bits 6 to 3.
        let mut width = PARTIALS / 2;
        while width >= CHUNK {
            for j in 0..width {
                low[j] += low[j + width];
            }
            width /= 2;
        }
        for k in 0..CHUNK {
            partials[warp * CHUNK + k] = low[k];
        }
        warp += 1;
    }
    Some(tree(&mut partials))
}

/// Returns accumulators after their first terms.
#[inline(always)]
fn accumulators(mut terms: [f32; PARTIALS]) -> [f32; PARTIALS] {
    for j in 0..PARTIALS {
        // The accumulators begin at 0, and a term may be -0.
        terms[j] += 0.0;
    }
    terms
}

#[inline(always)]
fn add(acc: &mut [f32; PARTIALS], terms: &[f32; PARTIALS]) {
    for j in 0..PARTIALS {
        acc[j] += terms[j];
    }
}

/// Writes the partials of a stripe of a row of `chunks` chunks to `table`. `of` is the statistic of
/// a value. All lanes together. Emulated lanes in small warps write nothing
/// ([`RowSum::table_total`]).
///
/// # Safety
/// `values` must have the stripe's values, which no lane writes during the call. `table` must be
/// memory of this block for [`PARTIALS`] elements, which no lane uses until the next barrier.
#[inline(always)]
unsafe fn put_partials<M: Machine>(
    block: Block<M>,
    stripe: Stripe,
    chunks: u32,
    values: *const f32,
    table: *mut f32,
    of: impl Fn([f32; CHUNK]) -> [f32; CHUNK],
) {
    if has_small_warps(block) {
        return;
    }
    let lanes = stripe.lanes();
    let mut lane = lanes.start + block.rank();
    while lane < lanes.end {
        let (warp, within) = (lane / VIRTUAL_WARP as u32, lane % VIRTUAL_WARP as u32);
        let (mut k, mut sum) = (within / 4, 0.0);
        // All lanes of a warp, of up to 64, have the same condition.
        if lane - lane % 64 < chunks {
            let mut acc = [0f32; CHUNK];
            let mut index = lane;
            while index < chunks {
                // SAFETY: a chunk of the stripe.
                let terms = unsafe { values.cast::<[f32; CHUNK]>().add(index as usize).read() };
                let terms = of(terms);
                for k in 0..CHUNK {
                    acc[k] += terms[k];
                }
                index += VIRTUAL_LANES as u32;
            }
            (k, sum) = fold(block, within, acc);
        }
        if within.is_multiple_of(4) {
            // SAFETY: the entry of a virtual warp and an element of a chunk, which this lane alone
            // writes.
            unsafe { table.add(warp as usize * CHUNK + k as usize).write(sum) };
        }
        lane += block.size();
    }
}

/// Calls `work` with each chunk of this lane, of a stripe of a row of `chunks` chunks. Each chunk
/// goes to one lane, always the same.
#[inline(always)]
pub(super) fn chunks_of_lane<M: Machine>(
    block: Block<M>,
    stripe: Stripe,
    chunks: usize,
    mut work: impl FnMut(usize),
) {
    let count = stripe.chunks(chunks as u32);
    let mut position = block.rank();
    while position < count {
        work(stripe.chunk(position) as usize);
        position += block.size();
    }
}

/// Adds the accumulators of a virtual warp, of which this is lane `lane`, by the tree. Returns, on
/// each lane, the sum for one element k of a chunk; four adjacent lanes have the same. All lanes of
/// a warp together.
#[inline(always)]
fn fold<M: Machine>(block: Block<M>, lane: u32, acc: [f32; CHUNK]) -> (u32, f32) {
    let exchange =
        |value: f32, mask: u32| f32::from_bits(block.machine().shuffle_xor(value.to_bits(), mask));
    // Each step halves the elements that a lane keeps: the upper half if its bit is set.
    let halve = |low: f32, high: f32, mask: u32| {
        let upper = lane & mask != 0;
        let (keep, send) = if upper { (high, low) } else { (low, high) };
        keep + exchange(send, mask)
    };
    let four = [
        halve(acc[0], acc[4], 16),
        halve(acc[1], acc[5], 16),
        halve(acc[2], acc[6], 16),
        halve(acc[3], acc[7], 16),
    ];
    let two = [halve(four[0], four[2], 8), halve(four[1], four[3], 8)];
    let mut sum = halve(two[0], two[1], 4);
    sum += exchange(sum, 2);
    sum += exchange(sum, 1);
    // From bit to bit of the lane: the halves that it has kept.
    (lane / 4, sum)
}

/// Returns partial `partial` of a row of `hidden` values.
///
/// # Safety
/// `values` must have `hidden` elements, which no lane writes during the call.
#[inline(always)]
unsafe fn partial_of_values(
    values: *const f32,
    hidden: usize,
    partial: usize,
    of: impl Fn(f32) -> f32,
) -> f32 {
    let (warp, k) = (partial / CHUNK, partial % CHUNK);
    let mut acc = [0f32; VIRTUAL_WARP];
    for lane in 0..VIRTUAL_WARP {
        let mut at = (warp * VIRTUAL_WARP + lane) * CHUNK + k;
        while at < hidden {
            // SAFETY: `at < hidden`.
            acc[lane] += of(unsafe { values.add(at).read() });
            at += ACCUMULATORS;
        }
    }
    let mut width = VIRTUAL_WARP / 2;
    while width > 0 {
        for j in 0..width {
            acc[j] += acc[j + width];
        }
        width /= 2;
    }
    acc[0]
}

/// Adds the partials by the fixed tree.
#[inline(always)]
fn tree(partials: &mut [f32; PARTIALS]) -> f32 {
    let mut width = PARTIALS / 2;
    while width > 0 {
        for j in 0..width {
            partials[j] += partials[j + width];
        }
        width /= 2;
    }
    partials[0]
}

/// Returns the sum of the [`PARTIALS`] entries of a table by the fixed tree, on every lane. All
/// lanes together.
///
/// # Safety
/// `table` must be memory of this block for [`PARTIALS`] elements, which the block has written
/// before a barrier. No lane may write the table until the next barrier after the call.
#[inline(always)]
pub(crate) unsafe fn table_sum<M: Machine>(block: Block<M>, table: *mut f32) -> f32 {
    let warp = block.warp();
    if block.machine().warp_size() < 32 {
        let mut width = PARTIALS / 2;
        while width > 0 {
            for j in block.elements_of_block(width) {
                // SAFETY: `j + width < PARTIALS`; only this lane accesses both entries until the
                // barrier.
                unsafe {
                    let sum = table.add(j).read() + table.add(j + width).read();
                    table.add(j).write(sum);
                }
            }
            block.sync();
            width /= 2;
        }
        // SAFETY: the table has an entry 0, which no lane writes before the next barrier.
        return unsafe { table.read() };
    }
    let lane = warp.rank() as usize % 32;
    // SAFETY: `lane < 32`; no lane writes the table before the next barrier.
    let four = unsafe {
        [
            table.add(lane).read(),
            table.add(lane + 32).read(),
            table.add(lane + 64).read(),
            table.add(lane + 96).read(),
        ]
    };
    let mut sum = (four[0] + four[2]) + (four[1] + four[3]);
    let mut mask = 16;
    while mask > 0 {
        let other = block.machine().shuffle_xor(sum.to_bits(), mask);
        sum += f32::from_bits(other);
        mask /= 2;
    }
    sum
}
