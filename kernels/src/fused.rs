//! all_reduce, residual add and RMSNorm in one launch. Protocol: rounds; a round is a range of rows.
//!
//! For a row x of each rank: `s = round(sum of x over ranks)`, `v = round(s + residual)`,
//! `out = round(v * (1 / sqrt(mean(v * v) + eps)) * weight)`, where `round` is to the element type and all
//! else is f32. The sum of squares has one shape on every machine: partial j sums the elements with index
//! = j mod 128 in order, then a fixed binary tree; so a row's bits depend on nothing but the row.

use fusewire_device::arch;
use fusewire_device::bulk::Tables;
use fusewire_device::comm::Place;
use fusewire_device::layout::CommConst;
use fusewire_device::mem::{self, Policy};
use fusewire_device::session::Session;
use fusewire_device::{Bf16, Block, Element, F16, Group, Machine, kernel};

use crate::exchange::{Body, Memory, Round};

/// Partial sums of a row.
const PARTIALS: usize = 128;
/// Where they lie in shared memory: behind the tables.
const PARTIALS_AT: usize = 2048;

/// The local side of the operation.
struct Norm<T> {
    residual: *const T,
    weight: *const T,
    residual_out: *mut T,
    out: *mut T,
    hidden: usize,
    epsilon: f32,
}

/// `rows` rows of `hidden` elements: the sum of `source` over all ranks, plus `residual`, written to
/// `residual_out` unless that is null, normalised and multiplied by `weight` into `out`.
///
/// `residual_out` may be `residual`, `out` may be `source` (then staged by the host).
///
/// # Safety
/// `constants` as for [`Session::begin`]; all buffers valid for their rows, `weight` for one; `chunk` rows must fit
/// staging.
#[kernel(each(T: f32 = f32, f16 = F16, bf16 = Bf16))]
pub unsafe fn all_reduce_rms_norm<T: Element<Acc = f32>>(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    rows: u64,
    hidden: u64,
    timeout_ns: u64,
    source: *const u8,
    source_at: u64,
    residual: *const u8,
    weight: *const u8,
    residual_out: *mut u8,
    out: *mut u8,
    chunk: u64,
    epsilon: f32,
) {
    // SAFETY: the caller's promise.
    let Some(mut session) =
        (unsafe { Session::begin(block, constants, call, rows * hidden, timeout_ns) })
    else {
        return;
    };
    let norm = Norm::<T> {
        residual: residual.cast(),
        weight: weight.cast(),
        residual_out: residual_out.cast(),
        out: out.cast(),
        hidden: hidden as usize,
        epsilon,
    };
    // A row is the element of this exchange.
    let memory = Memory {
        size: hidden as usize * size_of::<T>(),
        count: rows as usize,
        chunk: chunk as usize,
        source,
        source_at: Place(source_at),
        source_rows: 1,
        target: out,
        target_at: Place::NONE,
        target_shared: false,
        shards: 1,
        granule: 1,
        scalar: 0,
    };
    // SAFETY: the caller's promise.
    if unsafe { memory.run(&mut session, Policy::Cached, &norm) } {
        session.end();
    }
}

impl<M: Machine, T: Element<Acc = f32>> Body<M> for Norm<T> {
    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        // SAFETY: the caller's promise.
        unsafe { normalise_round(session, memory, self, round) }
    }
}

/// # Safety
/// As the kernel promises.
#[inline(always)]
unsafe fn normalise_round<M: Machine, T: Element<Acc = f32>>(
    session: &Session<M>,
    memory: &Memory,
    norm: &Norm<T>,
    round: Round,
) -> bool {
    let block = session.block();
    let tables = Tables::new(block);
    let (first, last) = memory.part(block, round, 0);
    if !memory.fill_sources(session, tables, round, 0, first, last - first) {
        return false;
    }
    block.sync();
    let ranks = session.comm().size();
    let mut row = 0;
    while row < last - first {
        let to = (round.start + first + row) * norm.hidden;
        // SAFETY: rows of the caller's buffers, and of inputs that were checked against their window.
        unsafe {
            let squares = add_row(block, tables, norm, ranks, row * norm.hidden, to);
            let mean = squares / norm.hidden as f32;
            let scale = 1.0 / arch::sqrt_f32(mean + norm.epsilon);
            scale_row(block, norm, to, scale);
        }
        row += 1;
    }
    block.sync();
    true
}

/// Sums a row over the ranks, adds the residual, writes it; the sum of squares in every lane.
///
/// # Safety
/// As the kernel promises.
#[inline(always)]
unsafe fn add_row<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    tables: Tables,
    norm: &Norm<T>,
    ranks: u32,
    from: usize,
    to: usize,
) -> f32 {
    let keep = if norm.residual_out.is_null() {
        norm.out
    } else {
        norm.residual_out
    };
    let partials = block.shared().wrapping_add(PARTIALS_AT).cast::<f32>();
    // SAFETY: rows of the caller's buffers; the partials are this block's shared memory.
    unsafe {
        let one = |i: usize| -> f32 {
            let mut sum = mem::read(tables.source(0).cast::<T>().add(from + i)).widen();
            let mut rank = 1;
            while rank < ranks {
                sum += mem::read(tables.source(rank).cast::<T>().add(from + i)).widen();
                rank += 1;
            }
            let residual = mem::read(norm.residual.add(to + i)).widen();
            let value = T::narrow(T::narrow(sum).widen() + residual);
            mem::write(keep.add(to + i), value);
            value.widen()
        };
        if M::LANES == 1 {
            let mut sums = [0f32; PARTIALS];
            let whole = norm.hidden / PARTIALS * PARTIALS;
            let mut start = 0;
            while start < whole {
                let mut sum = [0f32; PARTIALS];
                let mut rank = 0;
                while rank < ranks {
                    let at = tables.source(rank).cast::<T>().add(from + start);
                    let tile = mem::read(at.cast::<[T; PARTIALS]>());
                    for j in 0..PARTIALS {
                        let x = tile[j].widen();
                        sum[j] = if rank == 0 { x } else { sum[j] + x };
                    }
                    rank += 1;
                }
                let at = norm.residual.add(to + start).cast::<[T; PARTIALS]>();
                let mut tile = mem::read(at);
                for j in 0..PARTIALS {
                    tile[j] = T::narrow(T::narrow(sum[j]).widen() + tile[j].widen());
                    let value = tile[j].widen();
                    sums[j] += value * value;
                }
                mem::write(keep.add(to + start).cast::<[T; PARTIALS]>(), tile);
                start += PARTIALS;
            }
            for j in 0..norm.hidden - whole {
                let value = one(whole + j);
                sums[j] += value * value;
            }
            let mut width = PARTIALS / 2;
            while width > 0 {
                for j in 0..width {
                    sums[j] += sums[j + width];
                }
                width /= 2;
            }
            return sums[0];
        }
        for j in block.elements_of_block(PARTIALS) {
            let mut partial = 0f32;
            let mut i = j;
            while i < norm.hidden {
                let value = one(i);
                partial += value * value;
                i += PARTIALS;
            }
            partials.add(j).write(partial);
        }
        block.sync();
        let mut width = PARTIALS / 2;
        while width > 0 {
            for j in block.elements_of_block(width) {
                partials
                    .add(j)
                    .write(partials.add(j).read() + partials.add(j + width).read());
            }
            block.sync();
            width /= 2;
        }
        let squares = partials.read();
        block.sync();
        squares
    }
}

/// Scales a row that [`add_row`] has written and multiplies it by the weight.
///
/// # Safety
/// As the kernel promises.
#[inline(always)]
unsafe fn scale_row<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    norm: &Norm<T>,
    to: usize,
    scale: f32,
) {
    let kept = if norm.residual_out.is_null() {
        norm.out
    } else {
        norm.residual_out
    };
    // A lane reads what it wrote itself in `add_row`: element i belongs to partial i mod 128.
    // SAFETY: rows of the caller's buffers.
    unsafe {
        let one = |i: usize| {
            let value = mem::read(kept.add(to + i)).widen();
            let weight = mem::read(norm.weight.add(i)).widen();
            mem::write(norm.out.add(to + i), T::narrow(value * scale * weight));
        };
        if M::LANES == 1 {
            let whole = norm.hidden / PARTIALS * PARTIALS;
            let mut start = 0;
            while start < whole {
                let mut tile = mem::read(kept.add(to + start).cast::<[T; PARTIALS]>());
                let weights = mem::read(norm.weight.add(start).cast::<[T; PARTIALS]>());
                for j in 0..PARTIALS {
                    tile[j] = T::narrow(tile[j].widen() * scale * weights[j].widen());
                }
                mem::write(norm.out.add(to + start).cast::<[T; PARTIALS]>(), tile);
                start += PARTIALS;
            }
            for i in whole..norm.hidden {
                one(i);
            }
            return;
        }
        for j in block.elements_of_block(PARTIALS) {
            let mut i = j;
            while i < norm.hidden {
                one(i);
                i += PARTIALS;
            }
        }
    }
}
