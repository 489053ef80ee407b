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

use fusewire_device::packet::Slots;
use fusewire_device::{Aborted, Group, In, InOut, Machine, Out, Session, Unvoted, kernel};

/// Finds, for every row, the column of the greatest logit over the parts of all ranks. If several
/// columns have the greatest logit, finds the lowest of these columns.
///
/// Rank r has columns `[r * columns, (r + 1) * columns)` of each row in `logits`, row by row. The
/// kernel writes the column of each row to `winners`, which is equal on all ranks. `keys` is
/// scratch memory of the same length. NaN is less than any number. All ranks together must have
/// fewer than 2^32 columns.
#[kernel(blocks = 1)]
pub fn vocab_argmax(
    s: &mut Session<impl Machine>,
    logits: In<f32>,
    #[agreed] columns: u64,
    keys: InOut<u64>,
    #[agreed] winners: Out<u64>,
) -> Result<(), Aborted> {
    let (block, rows, columns) = (s.block(), winners.len(), columns as usize);
    let (me, ranks) = (s.rank(), s.ranks());
    let first_column = me as usize * columns;
    for row in block.elements_of_block(rows) {
        let mut best = 0;
        for column in 0..columns {
            let logit = logits.get(row * columns + column);
            best = best.max(rank_key(logit, (first_column + column) as u32));
        }
        keys.set(row, best);
    }
    block.sync();

    let slots = Slots::open(s, rows * 8)?;
    slots.send_elements(s, keys.as_in())?;
    let mut received = Unvoted::new(());
    for source in block.elements_of_block(ranks as usize) {
        if source as u32 != me {
            received = received.and(slots.receive_header(s, source as u32));
        }
    }
    for row in block.elements_of_block(rows) {
        let mut best = keys.get(row);
        for source in (0..ranks).filter(|source| *source != me) {
            let key = slots.receive_word(s, source, row);
            best = best.max(key.ok().unwrap_or(0));
            received = received.and(key.map(|_| ()));
        }
        if received.is_failed() {
            break;
        }
        winners.set(row, u64::from(!(best as u32)));
    }
    s.vote(received)?;
    slots.close(s);
    Ok(())
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
