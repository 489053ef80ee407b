//! Reduction over the ranks, residual add and norm in one launch; perhaps with fp8 output.
//!
//! For a row x of each rank, with T the element type, R that of the residual (T or f32) and
//! rounding where it says so:
//!
//! | value | |
//! |---|---|
//! | `s` | `T(sum of x over ranks)`, in rank order, in f32 |
//! | `v` | `R(s + residual)`; written as it is where that is wanted |
//! | RMSNorm | `T(v * (1 / sqrt(mean(v * v) + epsilon)) * w)` |
//! | LayerNorm | `T((v - m) * (1 / sqrt(mean((v - m)^2) + epsilon)) * w + bias)`, `m = mean(v)` |
//!
//! where `w` is the weight or `1 + weight`. All is f32 but for the roundings; sums over a row have
//! one shape on every machine (partial j sums the elements with index = j mod 128 in order, then a
//! fixed binary tree). So a row's bits depend on nothing but the row: not on the route, the number
//! of rows, the lanes or the machine.
//!
//! | file | subject |
//! |---|---|
//! | `spec` | what is computed, in one word |
//! | `sum` | a row's sum over the ranks, from memory or from packets |
//! | `row` | a row's values and statistics |
//! | `output` | normalising, fp8 and its scales |
//! | `rounds` | whose rows a rank reduces, and where they go |

pub(crate) mod chunk;
mod output;
mod rounds;
pub(crate) mod row;
mod spec;
mod sum;

use core::marker::PhantomData;

use fusewire_device::bulk::Tables;
use fusewire_device::comm::WindowAddr;
use fusewire_device::mem::Policy;
use fusewire_device::packet::{Prefetch, Slots};
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Bf16, Block, Element, F16, Group, Machine, kernel};

use self::rounds::Rounds;
use self::row::{Arguments, Norm, Targets};
use self::sum::{PacketRows, PulledRows, Sums};
use crate::exchange::Memory;

pub use self::row::{MAX_RANKS, shared_row};
pub use self::spec::{GROUP, NormSpec, OutputFormat, Route, Statistics};

/// Reduces, adds the residual and normalises `rows` rows of `hidden` elements, by the signal
/// protocol: every rank reads the ranks' rows where they are. The route of `spec` says whose;
/// `rows` are those of the result, so in [`Route::ReduceScatter`] each rank has `rows` times the
/// number of ranks at `source`.
///
/// `residual` (f32 or the element type) and `bias` may be null. `kept`, where sums with the
/// residual go, may be null, or be `residual`. `scales` is where computed scales go, of which a
/// group's begin `stride` apart where they are column-major; for [`OutputFormat::StaticFp8`] it is
/// the one that is given, in f32.
///
/// # Safety
/// All buffers valid for their rows, `weight` and `bias` for
/// one; `hidden` a multiple of 8; elsewhere than on a CPU all of them 16-byte aligned. Outputs
/// overlap nothing but where it says so. `chunk` rows must fit staging: the ranks' input, and all
/// outputs. Rows of more than [`shared_row`] elements are kept at byte `scratch` of staging for
/// output, 4 bytes an element and a row a block.
#[kernel(dependent, each(T: f32 = f32, f16 = F16, bf16 = Bf16))]
pub unsafe fn reduce_norm<T: Element<Acc = f32>>(
    session: &mut Session<impl Machine>,
    rows: u64,
    hidden: u64,
    source: *const u8,
    source_at: u64,
    residual: *const u8,
    weight: *const u8,
    bias: *const u8,
    kept: *mut u8,
    kept_at: u64,
    out: *mut u8,
    out_at: u64,
    scales: *mut u8,
    scales_at: u64,
    stride: u64,
    scratch: u64,
    chunk: u64,
    epsilon: f32,
    spec: u32,
) -> Result<(), Aborted> {
    let block = session.block();
    let spec = NormSpec(spec);
    let ranks = session.comm().size();
    let arguments = Arguments {
        residual,
        weight,
        bias,
        out,
        out_at: WindowAddr(out_at),
        kept,
        kept_at: WindowAddr(kept_at),
        scales,
        scales_at: WindowAddr(scales_at),
        stride: stride as usize,
        chunk: chunk as usize,
        values: row::row_memory(session, scratch, hidden),
        spec,
        epsilon,
    };
    let body = Rounds::<T> {
        norm: Norm {
            arguments: arguments.put(block),
            hidden: hidden as usize,
            element: PhantomData,
        },
    };
    // A row is the element of this exchange.
    let memory = Memory {
        size: hidden as usize * size_of::<T>(),
        count: rows as usize,
        chunk: chunk as usize,
        source,
        source_at: WindowAddr(source_at),
        source_rows: if spec.route() == Route::ReduceScatter {
            ranks
        } else {
            1
        },
        // The body's own.
        target: core::ptr::null_mut(),
        target_at: WindowAddr::NONE,
        target_shared: false,
        shards: if spec.route() == Route::TwoShot {
            ranks
        } else {
            1
        },
        alignment: 1,
        scalar: 0,
    };
    // SAFETY: the caller's promise.
    let done = unsafe { memory.run(session, Policy::Cached, &body) };
    session.settle(done)
}

/// Does what [`reduce_norm`] does in [`Route::OneShot`], by packets ([`fusewire_device::packet`]):
/// every rank sends its rows to every rank. One hop, no barrier, two alternating sets of slots.
///
/// # Safety
/// As [`reduce_norm`]; each block's part of the rows must fit
/// [`fusewire_device::packet::capacity`].
#[kernel(dependent, each(T: f32 = f32, f16 = F16, bf16 = Bf16))]
pub unsafe fn reduce_norm_packet<T: Element<Acc = f32>>(
    session: &mut Session<impl Machine>,
    rows: u64,
    hidden: u64,
    source: *const u8,
    residual: *const u8,
    weight: *const u8,
    bias: *const u8,
    kept: *mut u8,
    out: *mut u8,
    scales: *mut u8,
    stride: u64,
    scratch: u64,
    epsilon: f32,
    spec: u32,
    // SAFETY: this block's part of the rows, which the caller guarantees to be readable.
    #[before(unsafe { prefetch_rows::<_, T>(block, rows, hidden, source) })] prefetch: Prefetch,
) -> Result<(), Aborted> {
    let (block, size) = (session.block(), size_of::<T>());
    let (first, last) = block.slice(rows as usize, 1);
    let from = source.wrapping_add(first * hidden as usize * size);
    let bytes = (last - first) * hidden as usize * size;
    let spec = NormSpec(spec);
    let arguments = Arguments {
        residual,
        weight,
        bias,
        out,
        out_at: WindowAddr::NONE,
        kept,
        kept_at: WindowAddr::NONE,
        scales,
        scales_at: WindowAddr::NONE,
        stride: stride as usize,
        chunk: 0,
        values: row::row_memory(session, scratch, hidden),
        spec,
        epsilon,
    };
    let norm = Norm::<T> {
        arguments: arguments.put(block),
        hidden: hidden as usize,
        element: PhantomData,
    };
    let hidden = hidden as usize;
    let slots = Slots::open(session, bytes)?;
    // SAFETY: this block's part of the caller's rows.
    unsafe { slots.send_to_each(session, from, prefetch) };
    let targets = Targets::new(block, session.ranks(), 1);
    if block.is_leader() {
        let strides = if spec.is_column_major() {
            (1, stride as u32)
        } else {
            (spec.scales(hidden) as u32, 1)
        };
        let at = first * strides.0 as usize * spec.scale_bytes();
        targets.set(
            0,
            out.wrapping_add(first * spec.out_bytes(hidden, size)),
            kept.wrapping_add(first * spec.residual_bytes(hidden, size)),
            scales.wrapping_add(at),
            strides,
        );
    }
    // SAFETY: the caller's promise.
    let received = unsafe { all_rows(session, &slots, &norm, targets, from, first, last) };
    session.settle(received)?;
    slots.close(session);
    Ok(())
}

/// Reads ahead in this block's part of the rows.
///
/// # Safety
/// `source` must be readable for `rows` rows.
#[inline(always)]
unsafe fn prefetch_rows<M: Machine, T>(
    block: Block<M>,
    rows: u64,
    hidden: u64,
    source: *const u8,
) -> Prefetch {
    let (first, last) = block.slice(rows as usize, 1);
    let row = hidden as usize * size_of::<T>();
    // SAFETY: the part is within the rows.
    unsafe {
        Prefetch::read(
            block,
            source.wrapping_add(first * row),
            (last - first) * row,
        )
    }
}

/// This block's rows. False after a failure.
///
/// # Safety
/// As the kernel promises.
#[inline(always)]
unsafe fn all_rows<M: Machine, T: Element<Acc = f32>>(
    session: &Session<M>,
    slots: &Slots,
    norm: &Norm<T>,
    targets: Targets,
    from: *const u8,
    first: usize,
    last: usize,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        if M::LANES == 1 {
            single_rows(session, slots, norm, targets, from, first, last)
        } else {
            rows_of_lanes(session, slots, norm, targets, first, last)
        }
    }
}

/// The rows of a block of one lane: whole streams. False after a failure.
///
/// # Safety
/// As the kernel promises.
#[inline(always)]
unsafe fn single_rows<M: Machine, T: Element<Acc = f32>>(
    session: &Session<M>,
    slots: &Slots,
    norm: &Norm<T>,
    targets: Targets,
    from: *const u8,
    first: usize,
    last: usize,
) -> bool {
    // SAFETY: the kernels of this module leave these bytes to the tables.
    let tables = unsafe { Tables::new(session.block(), session.ranks()) };
    let (me, ranks) = (session.comm().rank(), session.comm().size());
    let mut rank = 0;
    while rank < ranks {
        let at = if rank == me {
            Some(from)
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
    // SAFETY: every stream has been acquired; the rest is the caller's promise.
    unsafe { each_row(session, &sums, norm, targets, first, last) }
}

/// The rows of a block of several lanes: units as they come. False after a failure.
///
/// # Safety
/// As the kernel promises.
#[inline(always)]
unsafe fn rows_of_lanes<M: Machine, T: Element<Acc = f32>>(
    session: &Session<M>,
    slots: &Slots,
    norm: &Norm<T>,
    targets: Targets,
    first: usize,
    last: usize,
) -> bool {
    let block = session.block();
    // The header must have come before a block without rows continues: it is what keeps ranks
    // within one epoch of each other.
    let mut failed = false;
    for rank in block.elements_of_block(session.comm().size() as usize) {
        let rank = rank as u32;
        failed |= slots.receive_header(session, rank).is_failed();
    }
    if block.any(failed) {
        return false;
    }
    let sums = PacketRows::<_, T> {
        session,
        slots,
        element: PhantomData,
    };
    // SAFETY: the caller's promise.
    unsafe { each_row(session, &sums, norm, targets, first, last) }
}

/// # Safety
/// As the kernel promises.
#[inline(always)]
unsafe fn each_row<M: Machine, T: Element<Acc = f32>, S: Sums<M>>(
    session: &Session<M>,
    sums: &S,
    norm: &Norm<T>,
    targets: Targets,
    first: usize,
    last: usize,
) -> bool {
    let block = session.block();
    block.sync();
    let mut row = 0;
    while row < last - first {
        // SAFETY: rows of the caller's buffers.
        unsafe {
            let Some(reduced) = norm.reduce(block, targets, sums, row, first + row) else {
                return false;
            };
            norm.write(block, targets, &reduced, row);
        }
        row += 1;
    }
    block.sync();
    true
}
