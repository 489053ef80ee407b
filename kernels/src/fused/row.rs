//! One row: its values, its statistics. Written twice, for a block of one lane and for several;
//! both give the same bits, because partial j of a statistic is that of the elements with index = j
//! mod 128, in order, and the partials are added by a fixed binary tree.

use core::marker::PhantomData;

use fusewire_device::arch;
use fusewire_device::bulk::Tables;
use fusewire_device::comm::WindowAddr;
use fusewire_device::{Block, Element, Group, Machine, Session};

use super::chunk;
use super::spec::NormSpec;
use super::sum::Sums;

/// Partial sums of a row.
pub(crate) const PARTIALS: usize = 128;
/// Elements that a lane moves at once.
pub(super) const CHUNK: usize = 8;
/// Most elements of a row that shared memory holds, in f32.
const SHARED_ROW: usize = 8192;
/// Words of an entry of [`Targets`].
const TARGET_WORDS: usize = 4;

// In shared memory: the tables of sources, the targets, the row; and at the end, at offsets that do
// not depend on the number of ranks, these.
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

/// Returns the memory of this block for the values of a row of `hidden` elements: shared, or at
/// byte `scratch` of staging for output.
#[inline(always)]
pub(super) fn row_memory<M: Machine>(session: &Session<M>, scratch: u64, hidden: u64) -> *mut f32 {
    let (comm, block) = (session.comm(), session.block());
    if hidden as usize <= shared_row(comm.size()) {
        return block.shared().wrapping_add(row_at(comm.size())).cast();
    }
    let at = comm.workspace().staging_out + scratch + u64::from(block.index()) * hidden * 4;
    comm.own(at).cast()
}

/// Most ranks whose tables fit shared memory.
pub const MAX_RANKS: u32 = {
    let mut ranks = 1;
    while row_at(ranks + 1) <= SUMS_AT {
        ranks += 1;
    }
    ranks
};

const _: () = assert!(shared_row(64) == SHARED_ROW && MAX_RANKS >= 576);

/// Buffers of a norm. In shared memory: too much for the registers of hundreds of lanes, and rarely
/// looked at.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Arguments {
    /// Rows of this rank's residual; null: none.
    pub(super) residual: *const u8,
    pub(super) weight: *const u8,
    /// Null: none.
    pub(super) bias: *const u8,
    /// Normalised rows.
    pub(super) out: *mut u8,
    pub(super) out_at: WindowAddr,
    /// Sums with the residual; null: not wanted.
    pub(super) kept: *mut u8,
    pub(super) kept_at: WindowAddr,
    /// Scales: computed, or the given one.
    pub(super) scales: *mut u8,
    pub(super) scales_at: WindowAddr,
    /// Scales from one group's first to the next one's, where these lie side by side.
    pub(super) stride: usize,
    /// Rows that staging holds.
    pub(super) chunk: usize,
    /// Memory of this block for the values of a row: shared, or staging if the row is too long.
    pub(super) values: *mut f32,
    pub(super) spec: NormSpec,
    pub(super) epsilon: f32,
}

impl Arguments {
    /// Puts them in io; gives where. The block must synchronise before use, which beginning a round
    /// does.
    #[inline(always)]
    pub(super) fn put<M: Machine>(self, block: Block<M>) -> *const Self {
        let at = block.shared().wrapping_add(ARGUMENTS_AT).cast::<Self>();
        if block.is_leader() {
            // SAFETY: within this block's shared memory, which one lane writes.
            unsafe { at.write(self) };
        }
        at
    }
}

/// A fused norm, as far as it is the same for all rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm<T> {
    /// Table in shared memory, written before any row.
    pub(super) arguments: *const Arguments,
    pub(super) hidden: usize,
    pub(super) element: PhantomData<T>,
}

/// Targets of rows: a table in shared memory, one entry a target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Targets {
    table: *mut [u64; TARGET_WORDS],
    /// Entries in use.
    pub(super) count: u32,
}

impl Targets {
    /// Returns the table, on `ranks` ranks. `count` is at most `ranks`.
    #[inline(always)]
    pub(super) fn new<M: Machine>(block: Block<M>, ranks: u32, count: u32) -> Self {
        Self {
            table: block.shared().wrapping_add(targets_at(ranks)).cast(),
            count,
        }
    }

    /// Sets target `index`, which is below the count; scales of row r and group g go to
    /// `scales[r * stride + g * step]`. One lane an entry; the block must synchronise before use.
    #[inline(always)]
    pub(super) fn set(
        &self,
        index: u32,
        out: *mut u8,
        kept: *mut u8,
        scales: *mut u8,
        strides: (u32, u32),
    ) {
        let words = [
            out as u64,
            kept as u64,
            scales as u64,
            u64::from(strides.0) | u64::from(strides.1) << 32,
        ];
        for word in 0..TARGET_WORDS {
            // SAFETY: within the table; one lane writes an entry.
            unsafe { self.at(word, index).write(words[word]) };
        }
    }

    #[inline(always)]
    fn at(&self, word: usize, index: u32) -> *mut u64 {
        let entry = self.table.wrapping_add(index as usize);
        entry.cast::<u64>().wrapping_add(word)
    }

    #[inline(always)]
    fn word(&self, word: usize, index: u32) -> u64 {
        // SAFETY: within the table, which the block has filled.
        unsafe { self.at(word, index).read() }
    }

    /// Normalised rows of target `index`.
    #[inline(always)]
    pub(super) fn out(&self, index: u32) -> *mut u8 {
        self.word(0, index) as *mut u8
    }

    /// Rows of the sum with the residual of target `index`.
    #[inline(always)]
    pub(super) fn kept(&self, index: u32) -> *mut u8 {
        self.word(1, index) as *mut u8
    }

    /// Scale of row `row` and group `group` of target `index`.
    #[inline(always)]
    pub(super) fn scale(&self, index: u32, row: usize, group: usize, bytes: usize) -> *mut u8 {
        let strides = self.word(3, index);
        let at = row * (strides as u32) as usize + group * (strides >> 32) as usize;
        (self.word(2, index) as *mut u8).wrapping_add(at * bytes)
    }
}

/// A row whose values are known: where they are, and what it is normalised by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// The values, in f32.
    pub(super) values: *mut f32,
    /// 0 for the root mean square.
    pub(super) mean: f32,
    /// Reciprocal of the root.
    pub(super) scale: f32,
}

impl<T> Norm<T> {
    /// The buffers; what is not used of them is not read.
    #[inline(always)]
    pub(super) fn arguments(&self) -> Arguments {
        // SAFETY: the block has put its arguments there, and passed a barrier, before any row.
        unsafe { self.arguments.read() }
    }

    /// Returns the specification.
    #[inline(always)]
    pub(super) fn spec(&self) -> NormSpec {
        self.arguments().spec
    }

    /// Returns true if the sum with the residual is written.
    #[inline(always)]
    pub(super) fn keeps(&self) -> bool {
        !self.arguments().kept.is_null()
    }
}

impl<T: Element<Acc = f32>> Norm<T> {
    /// Sums row `row` (counted from the first row of `sums` and of the targets; row `residual` of
    /// this rank's residual), adds the residual, writes the sum to the targets if it is wanted, and
    /// takes the statistics. `None` after a failure. All lanes together.
    ///
    /// # Safety
    /// As the kernel promises.
    #[inline(always)]
    pub(super) unsafe fn reduce<M: Machine, S: Sums<M>>(
        &self,
        block: Block<M>,
        targets: Targets,
        sums: &S,
        row: usize,
        residual: usize,
    ) -> Option<Row> {
        let io = RowContext {
            sums,
            targets,
            values: self.arguments().values,
            row,
            residual,
            machine: PhantomData::<M>,
        };
        // SAFETY: the caller's promise.
        let (mean, squares) = unsafe {
            if M::LANES == 1 {
                self.statistics_single(&io)?
            } else {
                self.statistics_lanes(block, &io)?
            }
        };
        let variance = squares / self.hidden as f32;
        Some(Row {
            values: io.values,
            mean,
            scale: 1.0 / arch::sqrt_f32(variance + self.arguments().epsilon),
        })
    }

    /// Elements `[at, at + N)` of the row: summed, rounded, the residual added, rounded; written
    /// where they are wanted.
    ///
    /// # Safety
    /// As [`Norm::reduce`]; the elements are in the row.
    #[inline(always)]
    unsafe fn values<M: Machine, S: Sums<M>, const N: usize>(
        &self,
        io: &RowContext<'_, M, S>,
        at: usize,
    ) -> Option<[f32; N]> {
        // SAFETY: the caller's promise.
        let sum = unsafe { io.sums.sum::<N>(io.row * self.hidden + at)? };
        let rounded: [T; N] = chunk::narrow(sum);
        let mut values = chunk::widen(rounded);
        if self.spec().has_wide_residual() {
            // SAFETY: as above.
            unsafe { self.add_residual::<M, S, f32, N>(io, at, &mut values) };
        } else {
            // SAFETY: as above.
            unsafe { self.add_residual::<M, S, T, N>(io, at, &mut values) };
        }
        // SAFETY: the row's values are this block's, these elements this lane's.
        unsafe { io.values.add(at).cast::<[f32; N]>().write(values) };
        Some(values)
    }

    /// # Safety
    /// As [`Norm::values`]; the residual's type is `R`.
    #[inline(always)]
    unsafe fn add_residual<M: Machine, S, R: Element<Acc = f32>, const N: usize>(
        &self,
        io: &RowContext<'_, M, S>,
        at: usize,
        values: &mut [f32; N],
    ) {
        let rows = self.arguments().residual;
        if !rows.is_null() {
            let from = io.residual * self.hidden + at;
            // SAFETY: the caller's promise.
            let residual = unsafe { chunk::read::<M, R, N>(rows.cast::<R>().add(from)) };
            for i in 0..N {
                values[i] += residual[i].widen();
            }
        }
        let rounded: [R; N] = chunk::narrow(*values);
        *values = chunk::widen(rounded);
        if self.keeps() {
            let to = io.row * self.hidden + at;
            let mut target = 0;
            while target < io.targets.count {
                // SAFETY: rows of the targets.
                unsafe {
                    let kept = io.targets.kept(target).cast::<R>().add(to);
                    chunk::write::<M, R, N>(kept, rounded);
                }
                target += 1;
            }
        }
    }

    /// Mean (or 0) and sum of squares, by one lane.
    ///
    /// # Safety
    /// As [`Norm::reduce`].
    #[inline(always)]
    unsafe fn statistics_single<M: Machine, S: Sums<M>>(
        &self,
        io: &RowContext<'_, M, S>,
    ) -> Option<(f32, f32)> {
        let layer = self.spec().is_layer();
        let whole = self.hidden / PARTIALS * PARTIALS;
        let mut partials = [0f32; PARTIALS];
        let mut at = 0;
        while at < whole {
            // SAFETY: the caller's promise.
            let values = unsafe { self.values::<M, S, PARTIALS>(io, at)? };
            for j in 0..PARTIALS {
                let value = values[j];
                partials[j] += if layer { value } else { value * value };
            }
            at += PARTIALS;
        }
        while at < self.hidden {
            // SAFETY: as above.
            let values = unsafe { self.values::<M, S, CHUNK>(io, at)? };
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
        let mean = total / self.hidden as f32;
        let mut partials = [0f32; PARTIALS];
        let mut at = 0;
        while at < whole {
            // SAFETY: the row's values, which this lane has written.
            let values = unsafe { io.values.add(at).cast::<[f32; PARTIALS]>().read() };
            for j in 0..PARTIALS {
                let off = values[j] - mean;
                partials[j] += off * off;
            }
            at += PARTIALS;
        }
        while at < self.hidden {
            // SAFETY: as above.
            let off = unsafe { io.values.add(at).read() } - mean;
            partials[at % PARTIALS] += off * off;
            at += 1;
        }
        Some((mean, tree(&mut partials)))
    }

    /// As [`Norm::statistics_single`], by several lanes.
    ///
    /// # Safety
    /// As [`Norm::reduce`].
    #[inline(always)]
    unsafe fn statistics_lanes<M: Machine, S: Sums<M>>(
        &self,
        block: Block<M>,
        io: &RowContext<'_, M, S>,
    ) -> Option<(f32, f32)> {
        let mut failed = false;
        for index in block.elements_of_block(self.hidden / CHUNK) {
            // SAFETY: the caller's promise.
            if unsafe { self.values::<M, S, CHUNK>(io, index * CHUNK) }.is_none() {
                failed = true;
                break;
            }
        }
        if S::WAITS {
            // The vote is a barrier too.
            if block.any(failed) {
                return None;
            }
        } else {
            block.sync();
        }
        let table = |offset: usize| block.shared().wrapping_add(offset).cast::<f32>();
        if !self.spec().is_layer() {
            // SAFETY: the block has written the row's values, and passed a barrier.
            let squares = unsafe {
                partial_sums(block, io.values, self.hidden, table(SQUARES_AT), |x| x * x)
            };
            return Some((0.0, squares));
        }
        // SAFETY: as above.
        let sum = unsafe { partial_sums(block, io.values, self.hidden, table(SUMS_AT), |x| x) };
        let mean = sum / self.hidden as f32;
        let square = |x: f32| {
            let off = x - mean;
            off * off
        };
        // SAFETY: as above.
        let squares =
            unsafe { partial_sums(block, io.values, self.hidden, table(SQUARES_AT), square) };
        Some((mean, squares))
    }
}

/// Where a row comes from and goes to.
struct RowContext<'a, M, S> {
    sums: &'a S,
    targets: Targets,
    values: *mut f32,
    row: usize,
    residual: usize,
    machine: PhantomData<M>,
}

/// The fixed tree.
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

/// The sum of `of` over a row, in every lane: lane j takes partial j, then all warps walk the tree.
/// All lanes together; one barrier, so `table` may be written again behind the next one.
///
/// # Safety
/// `values` has `hidden` elements, which nobody writes meanwhile; `table` is this block's, for
/// [`PARTIALS`] elements.
#[inline(always)]
unsafe fn partial_sums<M: Machine>(
    block: Block<M>,
    values: *const f32,
    hidden: usize,
    table: *mut f32,
    of: impl Fn(f32) -> f32,
) -> f32 {
    /// Elements that are under way at once.
    const AHEAD: usize = 4;
    for j in block.elements_of_block(PARTIALS) {
        let mut partial = 0f32;
        let mut i = j;
        // SAFETY: every index stays below `hidden`; entry j is this lane's.
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

/// The sum of a table's [`PARTIALS`] entries by the fixed tree, in every lane; all lanes together,
/// behind a barrier. The table is this call's until the next one.
///
/// # Safety
/// `table` is this block's, for [`PARTIALS`] elements.
#[inline(always)]
pub(crate) unsafe fn table_sum<M: Machine>(block: Block<M>, table: *mut f32) -> f32 {
    let warp = block.warp();
    if block.machine().warp_size() < 32 {
        let mut width = PARTIALS / 2;
        while width > 0 {
            for j in block.elements_of_block(width) {
                // SAFETY: within the table; entry j is this lane's until the barrier.
                unsafe {
                    let sum = table.add(j).read() + table.add(j + width).read();
                    table.add(j).write(sum);
                }
            }
            block.sync();
            width /= 2;
        }
        // SAFETY: within the table, which nobody writes before the next barrier.
        return unsafe { table.read() };
    }
    let lane = warp.rank() as usize % 32;
    // SAFETY: within the table, which nobody writes before the next barrier.
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
