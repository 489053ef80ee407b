//! One row: its values and its statistics, for blocks of one lane and of several. Both give the
//! same bits: partial j of a statistic sums the elements with index = j mod 128 in order, and a
//! fixed binary tree adds the partials.

use core::marker::PhantomData;

use fusewire_device::arch;
use fusewire_device::bulk::Tables;
use fusewire_device::comm::WindowAddr;
use fusewire_device::{Aborted, Block, Element, Group, In, InOut, Machine, Out, Session};

use super::spec::{NormSpec, OutputFormat};
use super::sum::Sums;
use super::{NormShape, chunk};

/// Number of partial sums of a row.
pub(crate) const PARTIALS: usize = 128;
/// Number of elements that a lane moves at once. The elements of a row are a multiple of it.
pub(super) const CHUNK: usize = 8;
/// Greatest number of elements of a row that shared memory holds, in f32.
const SHARED_ROW: usize = 8192;
/// Number of words of an entry of [`Targets`].
const TARGET_WORDS: usize = 4;

// Shared memory has the tables of sources, the targets and the row. The following parts are at its
// end, at offsets that do not depend on the number of ranks.
const END: usize = arch::SHARED_BYTES - arch::RESERVED_BYTES;
const ARGUMENTS_AT: usize = (END - size_of::<Arguments>()) / 128 * 128;
const SQUARES_AT: usize = ARGUMENTS_AT - 4 * PARTIALS;
const SUMS_AT: usize = SQUARES_AT - 4 * PARTIALS;

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
    let room = SUMS_AT.saturating_sub(row_at(ranks)) / 4;
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
    while row_at(ranks + 1) <= SUMS_AT {
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
}

/// The part of a fused norm that is the same for all rows. The buffers have these rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm<T> {
    arguments: *const Arguments,
    rows: usize,
    hidden: usize,
    element: PhantomData<T>,
}

impl<T: Element<Acc = f32>> Norm<T> {
    /// Writes the arguments to shared memory. All lanes together.
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

    /// Returns true if the sum with the residual is written.
    #[inline(always)]
    pub(super) fn keeps(&self) -> bool {
        !self.arguments().kept.is_null()
    }

    /// Reduces, normalizes and writes `rows` rows: those of the sums and of the targets, which are
    /// rows `first ..` of this rank's residual. Begins and ends with a barrier of the block.
    /// Returns false after a failure, which is recorded. All lanes together.
    ///
    /// # Safety
    /// The norm must have rows `first .. first + rows`. All ranks' rows of `sums`, and the rows at
    /// every target, must be valid for `rows` rows. No other block or rank may write the former or
    /// access the latter until this block releases them.
    #[inline(always)]
    pub(super) unsafe fn each_row<M: Machine, S: Sums<M>>(
        &self,
        block: Block<M>,
        targets: Targets,
        sums: &S,
        first: usize,
        rows: usize,
    ) -> bool {
        block.sync();
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
            row.write();
            index += 1;
        }
        block.sync();
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

impl<M, T> Row<M, T> {
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
        let whole = hidden / PARTIALS * PARTIALS;
        let mut partials = [0f32; PARTIALS];
        let mut at = 0;
        while at < whole {
            // SAFETY: `at + PARTIALS <= whole`: both are multiples of it. There is one lane.
            let values = unsafe { self.chunk::<PARTIALS>(at)? };
            for j in 0..PARTIALS {
                let value = values[j];
                partials[j] += if layer { value } else { value * value };
            }
            at += PARTIALS;
        }
        while at < hidden {
            // SAFETY: `at + CHUNK <= hidden`: both are multiples of it. There is one lane.
            let values = unsafe { self.chunk::<CHUNK>(at)? };
            for j in 0..CHUNK {
                let value = values[j];
                partials[(at + j) % PARTIALS] += if layer { value } else { value * value };
            }
            at += CHUNK;
        }
        let total = tree(&mut partials);
        if !layer {
            return Some((0.0, total));
        }
        let mean = total / hidden as f32;
        let mut partials = [0f32; PARTIALS];
        let mut at = 0;
        while at < whole {
            // SAFETY: within the values by `at < whole`; this lane has written them.
            let values = unsafe { self.values.add(at).cast::<[f32; PARTIALS]>().read() };
            for j in 0..PARTIALS {
                let off = values[j] - mean;
                partials[j] += off * off;
            }
            at += PARTIALS;
        }
        while at < hidden {
            // SAFETY: within the values by `at < hidden`; this lane has written them.
            let off = unsafe { self.values.add(at).read() } - mean;
            partials[at % PARTIALS] += off * off;
            at += 1;
        }
        Some((mean, tree(&mut partials)))
    }

    /// Does what [`RowSum::statistics_single`] does, by several lanes. All lanes together.
    #[inline(always)]
    fn statistics_lanes(&self) -> Option<(f32, f32)> {
        let (block, hidden) = (self.block, self.norm.hidden);
        let mut failed = false;
        for index in block.elements_of_block(hidden / CHUNK) {
            // SAFETY: `index < hidden / CHUNK`; each index goes to one lane.
            if unsafe { self.chunk::<CHUNK>(index * CHUNK) }.is_none() {
                failed = true;
                break;
            }
        }
        if S::WAITS {
            // The vote is a barrier, too.
            if block.any(failed) {
                return None;
            }
        } else {
            block.sync();
        }
        let table = |offset: usize| block.shared().wrapping_add(offset).cast::<f32>();
        if !self.norm.spec().is_layer() {
            // SAFETY: the block has written the values of the row, and passed a barrier.
            let squares =
                unsafe { partial_sums(block, self.values, hidden, table(SQUARES_AT), |x| x * x) };
            return Some((0.0, squares));
        }
        // SAFETY: the block has written the values of the row, and passed a barrier.
        let sum = unsafe { partial_sums(block, self.values, hidden, table(SUMS_AT), |x| x) };
        let mean = sum / hidden as f32;
        let square = |x: f32| {
            let off = x - mean;
            off * off
        };
        // SAFETY: as for the sum, with a different table.
        let squares =
            unsafe { partial_sums(block, self.values, hidden, table(SQUARES_AT), square) };
        Some((mean, squares))
    }
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

/// Returns the sum of `of` over a row on every lane: lane j computes partial j, then each warp adds
/// the partials by the tree. All lanes together, with one barrier; `table` may be written again
/// after the next one.
///
/// # Safety
/// `values` must have `hidden` elements, which no lane writes during the call. `table` must be
/// memory of this block for [`PARTIALS`] elements, and no lane may still use it.
#[inline(always)]
unsafe fn partial_sums<M: Machine>(
    block: Block<M>,
    values: *const f32,
    hidden: usize,
    table: *mut f32,
    of: impl Fn(f32) -> f32,
) -> f32 {
    /// Number of loads in flight.
    const AHEAD: usize = 4;
    for j in block.elements_of_block(PARTIALS) {
        let mut partial = 0f32;
        let mut i = j;
        // SAFETY: every index is below `hidden` by the conditions, and `j < PARTIALS`; only this
        // lane accesses entry j before the barrier.
        unsafe {
            while i + (AHEAD - 1) * PARTIALS < hidden {
                let mut some = [0f32; AHEAD];
                for k in 0..AHEAD {
                    some[k] = values.add(i + k * PARTIALS).read();
                }
                for k in 0..AHEAD {
                    partial += of(some[k]);
                }
                i += AHEAD * PARTIALS;
            }
            while i < hidden {
                partial += of(values.add(i).read());
                i += PARTIALS;
            }
            table.add(j).write(partial);
        }
    }
    block.sync();
    // SAFETY: the block has written the table, and passed a barrier.
    unsafe { table_sum(block, table) }
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
