//! Example of a user kernel crate: vocabulary-parallel argmax in one kernel.
//!
//! In tensor-parallel decoding, each rank has the logits of a part of the vocabulary. Greedy
//! sampling needs the index of the greatest logit over all parts. With library calls, this takes a
//! local argmax, two all_gathers and another argmax. This kernel computes the index in one launch:
//! local argmax, exchange by packets, global argmax.
//!
//! ```text
//! cargo run --release --example argmax               # on the CPU
//! cargo gpu build --crate examples/vocab-argmax          # for GPUs
//! ```
#![no_std]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_gpu_kernel),
    allow(improper_gpu_kernel_arg)
)]

use fusewire_device::layout::CommConst;
use fusewire_device::packet::Slots;
use fusewire_device::session::Session;
use fusewire_device::{Block, Group, Machine, kernel, mem};

/// Kernels of this crate.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub static KERNELS: &[&[fusewire_device::native::KernelInfo]] = &[VOCAB_ARGMAX_INSTANCES];

/// Finds, for every row, the column of the greatest logit over the parts of all ranks. If several
/// columns have the greatest logit, finds the lowest of these columns.
///
/// Rank r holds columns `[r * columns, (r + 1) * columns)` of each of `rows` rows. `keys` is
/// scratch memory for `rows` words. The kernel writes `rows` column indices to `winners`. The
/// indices are equal on all ranks. NaN is less than any number.
///
/// # Safety
/// `constants` must meet the requirements of [`Session::begin`]. `logits` must be readable for
/// `rows * columns` elements, and `keys` and `winners` must be writable for `rows` elements.
/// `rows * 8` must be at most [`fusewire_device::packet::capacity`] of a slot, and all ranks
/// together must have fewer than 2^32 columns. The launch must have one block.
#[kernel]
pub unsafe fn vocab_argmax(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    rows: u64,
    columns: u64,
    timeout_ns: u64,
    logits: *const f32,
    keys: *mut u64,
    winners: *mut u64,
) {
    // SAFETY: the caller guarantees that `constants` meets the requirements of `Session::begin`.
    let Some(mut session) = (unsafe { Session::begin(block, constants, call, rows, timeout_ns) })
    else {
        return;
    };
    let (rows, columns) = (rows as usize, columns as usize);
    let (me, ranks) = (session.comm().rank(), session.comm().size());
    let first_column = me as usize * columns;
    for row in block.elements_of_block(rows) {
        let mut best = 0;
        for column in 0..columns {
            // SAFETY: `row < rows` and `column < columns`, so the element is readable.
            let logit = unsafe { mem::read(logits.add(row * columns + column)) };
            let key = rank_key(logit, (first_column + column) as u32);
            best = if key > best { key } else { best };
        }
        // SAFETY: `row < rows`, so the word is writable. `elements_of_block` assigns each row to a
        // single lane.
        unsafe { mem::write(keys.add(row), best) };
    }
    block.sync();

    let slots = Slots::open(&mut session, rows * 8);
    // SAFETY: `keys` has `rows` initialized words. `block.sync` orders the writes of these words
    // before this read, and the caller guarantees that `rows * 8` bytes fit in a slot.
    unsafe { slots.send_to_all(&mut session, keys.cast()) };
    let mut failed = false;
    for source in block.elements_of_block(ranks as usize) {
        failed |= source as u32 != me && slots.receive_header(&session, source as u32).is_none();
    }
    for row in block.elements_of_block(rows) {
        // SAFETY: `row < rows`, and this lane wrote the key above.
        let mut best = unsafe { mem::read(keys.add(row)) };
        for source in (0..ranks).filter(|source| *source != me) {
            match slots.receive_word(&session, source, row) {
                Some(key) => best = if key > best { key } else { best },
                None => failed = true,
            }
            if failed {
                break;
            }
        }
        // SAFETY: `row < rows`, so the word is writable, and each row belongs to a single lane.
        unsafe { mem::write(winners.add(row), u64::from(!(best as u32))) };
    }
    if !block.any(failed) {
        slots.close(&session);
        session.end();
    }
}

/// Returns a key for comparing logits. A greater logit has a greater key. Of equal logits, the
/// logit in the lower column has the greater key. Keys of numbers are greater than 0.
#[inline(always)]
fn rank_key(logit: f32, column: u32) -> u64 {
    let bits = logit.to_bits();
    let sortable = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    let sortable = if logit.is_nan() { 0 } else { sortable };
    u64::from(sortable) << 32 | u64::from(!column)
}
