//! Reduction over the ranks, residual add and norm in one launch; optionally with fp8 output.
//!
//! For a row x of each rank, T is the element type and R the type of the residual (T or f32). T(..)
//! and R(..) round.
//!
//! | value | |
//! |---|---|
//! | `s` | `T(sum of x over ranks)`, in rank order, in f32 |
//! | `v` | `R(s + residual)`; written if it is wanted |
//! | RMSNorm | `T(v * (1 / sqrt(mean(v * v) + epsilon)) * w)` |
//! | LayerNorm | `T((v - m) * (1 / sqrt(mean((v - m)^2) + epsilon)) * w + bias)`, `m = mean(v)` |
//!
//! `w` is the weight or `1 + weight`. Everything is computed in f32. Sums over a row have the same
//! order on every machine (`row`). So a row's bits depend only on the row: not on the route, the
//! number of rows, the lanes or the machine.
//!
//! | file | subject |
//! |---|---|
//! | `spec` | the operation, in one word |
//! | `sum` | a row's sum over the ranks, from memory or from packets |
//! | `row` | a row's values and statistics |
//! | `stripe` | the part of a row that a block handles |
//! | `output` | the normalized row, fp8 and its scales |
//! | `rounds` | the rows that a rank reduces, and their targets |

mod output;
mod rounds;
pub(crate) mod row;
mod spec;
pub(crate) mod stripe;
mod sum;

use core::marker::PhantomData;

use bytemuck::{Pod, Zeroable};
use fusewire_device::bulk::Tables;
use fusewire_device::comm::WindowAddr;
use fusewire_device::mem::Policy;
use fusewire_device::packet::{Prefetch, Segments, Slots};
use fusewire_device::session::{Session, Unvoted};
use fusewire_device::{Aborted, Bf16, Block, Element, F16, Group, In, InOut, Machine, Out, kernel};

use self::row::{Buffers, Norm, Targets};
use self::stripe::{CHUNK, Stripe};
use self::sum::{PacketRows, PulledRows};
use crate::exchange::{Memory, MemoryLayout};

pub use self::row::{MAX_RANKS, shared_row};
pub use self::spec::{GROUP, MOST_STRIPE_BITS, NormSpec, OutputFormat, Route, Statistics};
pub use self::stripe::first_stripe;

/// The shape of a norm, and the window addresses of its buffers.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NormShape {
    /// Number of rows of the result. In [`Route::ReduceScatter`], the input has this number times
    /// the number of ranks.
    pub rows: u64,
    /// Number of elements of a row: a multiple of 8, not 0, below 2^32.
    pub hidden: u64,
    /// Window address of the input.
    pub source_at: WindowAddr,
    /// Window address of the sums with the residual.
    pub kept_at: WindowAddr,
    /// Window address of the normalized rows.
    pub out_at: WindowAddr,
    /// Window address of the computed scales.
    pub scales_at: WindowAddr,
    /// Number of scales from one group to the next, if scales are column-major.
    pub stride: u64,
    /// Offset in staging for output of the memory for rows of more than [`shared_row`] elements: a
    /// row of f32 per block.
    pub scratch: u64,
    /// Number of rows that are staged at once.
    pub chunk: u64,
    /// Added to the mean square.
    pub epsilon: f32,
    /// The operation.
    pub spec: NormSpec,
}

/// Reduces rows, adds the residual and normalizes them, by the signal protocol: every rank reads
/// the rows of all ranks where they are. The route of the specification selects the rows.
///
/// The residual (f32 or the element type), `bias` and `kept` (the sums with the residual) are null
/// if there are none. `scales` are the computed scales, or the given one for
/// [`OutputFormat::StaticFp8`], in f32.
///
/// # Safety
/// - `shape` must have the window addresses of the buffers. A chunk of the input must fit staging.
///   A chunk of all outputs must fit staging for output before `scratch`, and the long rows of all
///   blocks after it.
/// - Buffers that are passed as bytes must be aligned to their elements; on a GPU, all buffers to
///   16 bytes.
/// - During the launch, nothing else may write the inputs or access the outputs. `out` and `kept`
///   may be the residual or the input, row for row; if one is the input, `source_at` must be
///   [`WindowAddr::NONE`] except in [`Route::TwoShot`]. Other outputs must not overlap anything.
#[kernel(dependent, each(T: f32 = f32, f16 = F16, bf16 = Bf16))]
pub unsafe fn reduce_norm<T: Element<Acc = f32>>(
    session: &mut Session<impl Machine>,
    source: In<T>,
    residual: In<u8>,
    weight: In<T>,
    bias: In<T>,
    kept: Out<u8>,
    out: Out<u8>,
    scales: InOut<u8>,
    #[words(10)] shape: NormShape,
) -> Result<(), Aborted> {
    let buffers = Buffers {
        source,
        residual,
        weight,
        bias,
        kept,
        out,
        scales,
    };
    // Read before the leader alone writes shared memory. The verifier assumes that a value that is
    // loaded after that differs between lanes.
    let ranks = session.ranks();
    // SAFETY: the precondition of this function. `Body::words`, which reads the arguments first,
    // begins with a barrier. The rows are the elements of the exchange.
    let norm = unsafe { Norm::<T>::new(session, &buffers, &shape, None)? };
    let (source_rows, shards) = match shape.spec.route() {
        Route::OneShot => (1, 1),
        Route::TwoShot => (1, ranks),
        Route::ReduceScatter => (ranks, 1),
    };
    // The body writes the outputs, so the exchange has none.
    let layout = MemoryLayout {
        size: norm.hidden() * size_of::<T>(),
        count: norm.rows(),
        chunk: shape.chunk as usize,
        source_rows,
        target_rows: 0,
        target_shared: false,
        shards,
        alignment: 1,
        source_at: shape.source_at,
        target_at: WindowAddr::NONE,
        scalar: 0,
    };
    // SAFETY: the precondition of this function.
    let memory = unsafe { Memory::new(session, source, out, layout)? };
    memory.run(session, Policy::Cached, &norm)
}

/// Does what [`reduce_norm`] does in [`Route::OneShot`], by packets ([`fusewire_device::packet`]):
/// every rank sends its rows to every rank. One hop, no barrier, two alternating sets of slots.
/// Each block's part of the rows must fit [`fusewire_device::packet::capacity`]. Several blocks can
/// share a row ([`NormSpec::with_stripe_bits`]); they exchange their parts of the statistics by
/// [`Session::send_block_word`].
///
/// # Safety
/// As [`reduce_norm`].
#[kernel(
    dependent,
    params = ReduceNormParams,
    each(T: f32 = f32, f16 = F16, bf16 = Bf16)
)]
pub unsafe fn reduce_norm_packet<T: Element<Acc = f32>>(
    session: &mut Session<impl Machine>,
    source: In<T>,
    residual: In<u8>,
    weight: In<T>,
    bias: In<T>,
    kept: Out<u8>,
    out: Out<u8>,
    scales: InOut<u8>,
    #[words(10)] shape: NormShape,
    // SAFETY: the entry's parameters describe the input, which the host keeps alive.
    #[before(unsafe {
        BlockRows::read::<_, T>(block, (source, source_len), [shape_0, shape_1, shape_9])
    })]
    of_block: BlockRows,
) -> Result<(), Aborted> {
    let block = session.block();
    let buffers = Buffers {
        source,
        residual,
        weight,
        bias,
        kept,
        out,
        scales,
    };
    // SAFETY: the precondition of this function. Before the barrier below, only the leader reads
    // the arguments.
    let norm = unsafe { Norm::<T>::new(session, &buffers, &shape, Some(of_block.stripe))? };
    let BlockRows {
        first,
        rows,
        stripe,
        prefetch,
    } = of_block;
    let hidden = norm.hidden();
    let start = first * hidden + stripe.lanes().start as usize * CHUNK;
    let stream = source.as_ptr().wrapping_add(start).cast::<u8>();
    let chunks = rows * stripe.chunks((hidden / CHUNK) as u32) as usize;
    let slots = Slots::open(session, chunks * CHUNK * size_of::<T>())?;
    let segments = BlockRows::segments::<T>(stripe);
    // SAFETY: the input has the norm's rows. If there are any, `prefetch` is of these bytes.
    unsafe { slots.send_to_each(session, (stream, segments), prefetch) };
    // SAFETY: a kernel with a norm uses this part of shared memory only for the targets. The leader
    // sets the only one before the barrier.
    let targets = unsafe { Targets::new(block, session.ranks(), 1) };
    if block.is_leader() {
        norm.set_own_target(targets, 0, first);
    }
    block.sync();
    let headers = receive_headers(session, &slots);
    // SAFETY: the slots are open for the rows that were sent from `stream`. This rank's outputs
    // have them from row `first` on, by `Norm::new`, and no other block accesses them.
    let done = unsafe { receive_rows(session, &slots, &norm, targets, stream, first, rows) };
    session.settle(done)?;
    session.fail_at_end(headers);
    slots.close(session);
    Ok(())
}

/// Receives the headers of all ranks. A block must do this before it ends, also if it has no rows,
/// which keeps ranks within one epoch of each other. Blocks of one lane receive whole streams. Each
/// lane returns its own outcome.
#[inline(always)]
fn receive_headers<M: Machine>(session: &Session<M>, slots: &Slots) -> Unvoted<()> {
    let block = session.block();
    let mut outcome = Unvoted::new(());
    // From the last lane on: it has less data if a row is short.
    let mut rank = block.size() - 1 - block.rank();
    while M::LANES != 1 && rank < session.ranks() && !outcome.is_failed() {
        outcome = slots.receive_header(session, rank);
        rank += block.size();
    }
    outcome
}

/// The rows of a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockRows {
    first: usize,
    rows: usize,
    stripe: Stripe,
    prefetch: Prefetch,
}

impl BlockRows {
    /// Returns this block's part of the rows, and prefetches it, unless it exceeds the input of
    /// `len` elements at `at`; the kernel then records an error.
    ///
    /// # Safety
    /// The input must be readable.
    #[inline(always)]
    unsafe fn read<M: Machine, T>(
        block: Block<M>,
        (at, len): (*mut u8, u64),
        [rows, hidden, last_word]: [u64; 3],
    ) -> Self {
        let spec = NormSpec((last_word >> 32) as u32);
        let (stripe, first, rows) = Stripe::of_block(block, rows as usize, spec);
        let row = (hidden as usize).wrapping_mul(size_of::<T>());
        let (start, bytes) = (first.wrapping_mul(row), rows.wrapping_mul(row));
        let end = len as usize * size_of::<T>();
        let is_inside = start <= end && bytes <= end - start;
        let chunk = CHUNK * size_of::<T>();
        let bytes = match is_inside {
            // The block has one row.
            true if stripe.bits != 0 && rows != 0 => {
                stripe.chunks((row / chunk) as u32) as usize * chunk
            }
            true => bytes,
            false => 0,
        };
        let within = stripe.lanes().start as usize * chunk;
        let at = at.wrapping_add(start.wrapping_add(within));
        // SAFETY: the input has bytes `start .. start + rows * row`, of which these are the
        // stripe's, or none are read.
        let prefetch = unsafe { Prefetch::read(block, at, bytes, Self::segments::<T>(stripe)) };
        Self {
            first,
            rows,
            stripe,
            prefetch,
        }
    }

    /// Returns the places of the elements of a stripe.
    #[inline(always)]
    fn segments<T>(stripe: Stripe) -> Segments {
        stripe.segments((CHUNK * size_of::<T>()).ilog2())
    }
}

/// Receives the rows of all ranks, and reduces, normalizes and writes them. Returns false after a
/// failure, which is recorded. All lanes together.
///
/// # Safety
/// The slots must be open for `rows` rows, and `stream` must be the rows that this rank has sent.
/// The preconditions of [`Norm::each_row`] must hold for the targets and for rows `first .. first +
/// rows`.
#[inline(always)]
unsafe fn receive_rows<M: Machine, T: Element<Acc = f32>>(
    session: &Session<M>,
    slots: &Slots,
    norm: &Norm<T>,
    targets: Targets,
    stream: *const u8,
    first: usize,
    rows: usize,
) -> bool {
    let (block, me, ranks) = (session.block(), session.rank(), session.ranks());
    if M::LANES == 1 {
        // SAFETY: a kernel with a norm uses the start of shared memory only for these tables.
        let tables = unsafe { Tables::new(block, ranks) };
        let mut rank = 0;
        while rank < ranks {
            let at = if rank == me {
                Some(stream)
            } else {
                slots.receive_stream(session, rank).ok()
            };
            let Some(at) = at else { return false };
            tables.set_source(rank, at, 0);
            rank += 1;
        }
        let sums = PulledRows::<T> {
            tables,
            ranks,
            element: PhantomData,
        };
        // SAFETY: every stream has been acquired, and has `rows` rows. The rest is a precondition
        // of this function.
        return unsafe { norm.each_row(block, targets, &sums, first, rows) };
    }
    let sums = PacketRows::<_, T> {
        stripe: norm.stripe_at(),
        session,
        slots,
        element: PhantomData,
    };
    // SAFETY: every slot has `rows` rows, whose packets `PacketRows` awaits. The rest is a
    // precondition of this function.
    unsafe { norm.each_row(block, targets, &sums, first, rows) }
}
