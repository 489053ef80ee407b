//! Example of a user kernel crate: an all_gather that quantizes on the way.
//!
//! Each rank has `n` rows of bf16 elements; `n` is equal on all ranks. The kernel [`gather_rows`]
//! converts the rows to fp8 and sends them to all ranks, each row with a scale. Afterwards every
//! rank has the rows of all ranks. The ranks exchange about half the bytes of an all_gather of bf16
//! elements, and need no second launch to quantize.
//!
//! ```text
//! cargo run --release --example gather               # on the CPU
//! cargo gpu build --crate examples/fp8-all-gather    # for GPUs
//! ```
//!
//! # Memory
//!
//! | argument | elements |
//! |---|---|
//! | `x` | `width` for each row of this rank |
//! | `rows` | `width` for each row of all ranks, in the order of the ranks |
//! | `scales` | one for each row of all ranks |
//!
//! # Numbers
//! With `a` the greatest magnitude of a row, the scale of the row is `max(a, 1e-10) / 448`, and an
//! element x becomes the E4M3 number that is nearest to `x * (1 / scale)`. This is also the rule of
//! the library's fused norms.
//!
//! - If a row has a NaN, its scale is NaN, and all its elements become NaN.
//! - If a row has an infinity, its scale is infinity, its infinities become NaN, and its other
//!   elements become zeros.
//! - A NaN is stored as `0x7f` in a row, and as `f32::NAN` in a scale, so that the results have the
//!   same bits on every device.
#![no_std]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_gpu_kernel),
    allow(improper_gpu_kernel_arg)
)]

use fusewire_device::{
    Aborted, Bf16, E4m3, Group, In, Machine, Session, Shared, Team, Window, kernel,
};

/// Failure code: the elements of `x` are not whole rows.
pub const PARTIAL_ROW: u32 = 1;

/// Failure code: the window `rows` is too small.
pub const FEW_ELEMENTS: u32 = 2;

/// Failure code: the window `scales` is too small.
pub const FEW_SCALES: u32 = 3;

/// Largest finite E4M3 number.
const LARGEST: f32 = 448.0;
/// Lower bound of the magnitude that a scale is computed from.
const LEAST: f32 = 1e-10;

/// Quantizes the rows of `x`, each of which has `width` elements, and sends them and their scales
/// to all ranks. Each block sends a slice of the rows. `chunk` collects the scales of some rows.
///
/// Row i of rank r is row `r * n + i` of the windows.
///
/// - **Who may overwrite what:** a block overwrites its rows and scales at a peer,
/// - **after having acquired** the peer's entry into the barrier at the start of this launch,
/// - **released by** the peer after its earlier launches, which may read the rows and scales.
///
/// A launch ends after the network has read the sources of its puts, so the next launch may
/// overwrite this rank's own rows.
///
/// A block waits only for the blocks with the same index. A launch that follows on the same stream
/// starts after all blocks have ended, so it may read all rows and scales.
#[kernel(
    signals = 1,
    failures(
        PARTIAL_ROW = "x has {a} elements, which are not whole rows of {b}",
        FEW_ELEMENTS = "the window rows has {a} elements; the rows of all ranks have {b}",
        FEW_SCALES = "the window scales has {a} elements; all ranks have {b} rows"
    )
)]
pub fn gather_rows(
    s: &mut Session<impl Machine>,
    #[agreed] x: In<Bf16>,
    #[agreed] width: u32,
    rows: Window<E4m3>,
    scales: Window<f32>,
    chunk: Shared<f32, 256>,
) -> Result<(), Aborted> {
    let (block, warp) = (s.block(), s.block().warp());
    let (rank, ranks) = (s.rank() as usize, s.ranks() as usize);
    let (elements, width) = (x.len(), width as usize);
    let count = elements.checked_div(width).unwrap_or(0);
    let is_whole = count * width == elements;
    s.ensure(is_whole, PARTIAL_ROW, elements as u64, width as u64)?;
    let (has, needs) = (rows.len(), ranks * elements);
    s.ensure(has >= needs, FEW_ELEMENTS, has as u64, needs as u64)?;
    let (has, needs) = (scales.len(), ranks * count);
    s.ensure(has >= needs, FEW_SCALES, has as u64, needs as u64)?;
    s.barrier()?;

    let own_part = rows.local(s)?;
    let (mut first, last) = block.slice(count, 1);
    while first < last {
        // The scales of a batch fill at most the chunk.
        let batch = (last - first).min(chunk.len());
        for index in block.elements_of_warp(batch) {
            let values = x.slice((first + index) * width, width);
            let mut greatest = 0;
            for element in warp.elements_of_group(width) {
                greatest = greatest.max(magnitude(values.get(element)));
            }
            let scale = scale_for(warp.reduce(greatest, u32::max));
            let inverse = 1.0 / scale;
            if warp.is_leader() {
                chunk.set(index, scale);
            }

            // Quantized once, to this rank's part, from which the put copies 16 bytes at a time.
            let row = rank * count + first + index;
            let own_row = rows.at(s.me()).slice(row * width, width);
            own_row.write_with(s, warp, |element| quantize(values.get(element), inverse));
            warp.sync();
            let source = own_part.slice(row * width, width);
            for peer in s.peers(Team::World) {
                if peer != s.me() {
                    let target = rows.at(peer).slice(row * width, width);
                    target.put(s, warp, source);
                }
            }
        }
        block.sync();
        // One message with all scales for each rank.
        for peer in s.peers(Team::World) {
            let target = scales.at(peer).slice(rank * count + first, batch);
            target.write_with(s, block, |index| chunk.get(index));
        }
        block.sync();
        first += batch;
    }
    // The signal covers all that this block has written to the rank, in both windows.
    rows.raise_all(s, 0, Team::World);
    rows.wait_all(s, 0, Team::World)?;
    Ok(())
}

/// Returns the bits of the magnitude. They are ordered as the magnitudes, and a NaN is greater than
/// all numbers.
#[inline(always)]
fn magnitude(value: Bf16) -> u32 {
    u32::from(value.0 & 0x7fff)
}

/// Returns the scale of a row from the bits of its greatest magnitude.
#[inline(always)]
fn scale_for(greatest: u32) -> f32 {
    let greatest = Bf16(greatest as u16).to_f32();
    if greatest.is_nan() {
        return f32::NAN;
    }
    let greatest = if greatest < LEAST { LEAST } else { greatest };
    greatest / LARGEST
}

/// Returns the E4M3 number that is nearest to `value * inverse`.
#[inline(always)]
fn quantize(value: Bf16, inverse: f32) -> E4m3 {
    let scaled = value.to_f32() * inverse;
    // The sign of a computed NaN differs between devices.
    if scaled.is_nan() {
        return E4m3(0x7f);
    }
    E4m3::from_f32(scaled)
}
