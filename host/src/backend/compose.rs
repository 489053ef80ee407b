//! Composes the operations that a backend's library lacks from the backend's primitives.

use fusewire_device::DType;

use super::{Backend, CallArgs};
use crate::Result;
use crate::options::ReduceOp;

/// Runs `body` in a group, and ends the group even if `body` fails.
fn grouped<B: Backend + ?Sized>(backend: &B, body: impl FnOnce() -> Result<()>) -> Result<()> {
    backend.group_start()?;
    let ran = body();
    let ended = backend.group_end();
    ran.and(ended)
}

/// # Safety
/// The preconditions of [`Backend::all_to_all`].
pub(super) unsafe fn all_to_all<B: Backend + ?Sized>(
    backend: &B,
    from: *const u8,
    to: *mut u8,
    count: usize,
    args: &CallArgs,
) -> Result<()> {
    let counts = vec![count as u64; backend.size() as usize];
    // SAFETY: both buffers hold `count` elements per rank, and `counts` contains `count` for each
    // rank.
    unsafe { all_to_all_v(backend, from, &counts, to, &counts, args) }
}

/// # Safety
/// The preconditions of [`Backend::all_to_all_v`].
pub(super) unsafe fn all_to_all_v<B: Backend + ?Sized>(
    backend: &B,
    from: *const u8,
    from_counts: &[u64],
    to: *mut u8,
    to_counts: &[u64],
    args: &CallArgs,
) -> Result<()> {
    grouped(backend, || {
        let (mut from_at, mut to_at) = (0, 0);
        for (peer, (sent, received)) in from_counts.iter().zip(to_counts).enumerate() {
            let (sent, received, peer) = (*sent as usize, *received as usize, peer as u32);
            let (source, target) = (from.wrapping_add(from_at), to.wrapping_add(to_at));
            if sent > 0 {
                // SAFETY: `source` is a row of `from`, which holds all rows.
                unsafe { backend.send(source, sent, peer, args)? };
            }
            if received > 0 {
                // SAFETY: `target` is a row of `to`, which holds all rows.
                unsafe { backend.recv(target, received, peer, args)? };
            }
            from_at += args.bytes(sent);
            to_at += args.bytes(received);
        }
        Ok(())
    })
}

/// # Safety
/// The preconditions of [`Backend::all_gather_v`].
pub(super) unsafe fn all_gather_v<B: Backend + ?Sized>(
    backend: &B,
    from: *const u8,
    to: *mut u8,
    counts: &[u64],
    args: &CallArgs,
) -> Result<()> {
    let own = counts[backend.rank() as usize] as usize;
    let before: u64 = counts[..backend.rank() as usize].iter().sum();
    let own_row = to.wrapping_add(args.bytes(before as usize));
    let in_place = core::ptr::eq(from, own_row);
    grouped(backend, || {
        for peer in 0..backend.size() {
            if own > 0 && !(in_place && peer == backend.rank()) {
                // SAFETY: `from` holds `own` elements.
                unsafe { backend.send(from, own, peer, args)? };
            }
        }
        let mut at = 0;
        for (peer, count) in counts.iter().enumerate() {
            let count = *count as usize;
            if count > 0 && !(in_place && peer as u32 == backend.rank()) {
                // SAFETY: `to` holds the rows of all ranks, and the row of `peer` begins at byte
                // `at`.
                unsafe { backend.recv(to.wrapping_add(at), count, peer as u32, args)? };
            }
            at += args.bytes(count);
        }
        Ok(())
    })
}

/// # Safety
/// The preconditions of [`Backend::scatter`].
pub(super) unsafe fn scatter<B: Backend + ?Sized>(
    backend: &B,
    from: *const u8,
    to: *mut u8,
    count: usize,
    root: u32,
    args: &CallArgs,
) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let row = |rank: u32| from.wrapping_add(args.bytes(count) * rank as usize);
    let in_place = backend.rank() == root && core::ptr::eq(row(root), to);
    grouped(backend, || {
        if backend.rank() == root {
            for peer in 0..backend.size() {
                if !(in_place && peer == root) {
                    // SAFETY: on the root, `from` holds a row for each rank.
                    unsafe { backend.send(row(peer), count, peer, args)? };
                }
            }
        }
        if in_place {
            return Ok(());
        }
        // SAFETY: `to` holds `count` elements.
        unsafe { backend.recv(to, count, root, args) }
    })
}

/// # Safety
/// The preconditions of [`Backend::gather`].
pub(super) unsafe fn gather<B: Backend + ?Sized>(
    backend: &B,
    from: *const u8,
    to: *mut u8,
    count: usize,
    root: u32,
    args: &CallArgs,
) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let row = |rank: u32| to.wrapping_add(args.bytes(count) * rank as usize);
    let in_place = backend.rank() == root && core::ptr::eq(row(root), from);
    grouped(backend, || {
        if !in_place {
            // SAFETY: `from` holds `count` elements.
            unsafe { backend.send(from, count, root, args)? };
        }
        if backend.rank() == root {
            for peer in 0..backend.size() {
                if !(in_place && peer == root) {
                    // SAFETY: on the root, `to` holds a row for each rank.
                    unsafe { backend.recv(row(peer), count, peer, args)? };
                }
            }
        }
        Ok(())
    })
}

/// Runs an all_reduce of one element. It completes only after every rank has called `barrier`.
pub(super) fn barrier<B: Backend + ?Sized>(backend: &B, args: &CallArgs) -> Result<()> {
    let mut word = [0u8; 4];
    let args = &CallArgs {
        dtype: DType::F32,
        ..*args
    };
    let at = word.as_mut_ptr();
    // SAFETY: `at` points to one f32 in host memory, and all_reduce may run in place. Only backends
    // that access host memory and block may use this function. Other backends implement
    // `Backend::barrier`.
    unsafe { backend.all_reduce(at, at, 1, ReduceOp::Sum, args) }
}
