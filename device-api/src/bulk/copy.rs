//! Copies.

use crate::group::{Block, Group, Machine, slice};
use crate::mem::{self, Policy};

use super::{AHEAD, Tables, prefetch_write};

/// Copies `bytes` bytes; the ranges must not overlap. All lanes of the group together.
///
/// # Safety
/// Both ranges must be valid; nothing else may write the source or access the target until the
/// group has synchronised.
#[inline(always)]
pub unsafe fn copy<G: Group>(group: G, to: *mut u8, from: *const u8, bytes: usize, policy: Policy) {
    // SAFETY: the precondition of this function; every access below stays inside the ranges.
    unsafe {
        if G::LANES == 1 {
            copy_single(to, from, bytes, policy);
            return;
        }
        let skew = (to as usize ^ from as usize) % 16;
        if skew == 0 {
            let head = (16 - from as usize % 16) % 16;
            let head = if head < bytes { head } else { bytes };
            let vectors = (bytes - head) / 16;
            for i in group.elements_of_group(head) {
                mem::write(to.add(i), mem::read(from.add(i)));
            }
            copy_vectors(group, to.add(head), from.add(head), vectors, policy);
            let tail = head + vectors * 16;
            for i in group.elements_of_group(bytes - tail) {
                mem::write(to.add(tail + i), mem::read(from.add(tail + i)));
            }
        } else if skew.is_multiple_of(4) && (from as usize).is_multiple_of(4) {
            let words = bytes / 4;
            for i in group.elements_of_group(words) {
                mem::write(
                    to.cast::<u32>().add(i),
                    mem::read(from.cast::<u32>().add(i)),
                );
            }
            for i in group.elements_of_group(bytes % 4) {
                mem::write(to.add(words * 4 + i), mem::read(from.add(words * 4 + i)));
            }
        } else {
            for i in group.elements_of_group(bytes) {
                mem::write(to.add(i), mem::read(from.add(i)));
            }
        }
    }
}

/// Does what [`copy`] does. On NVIDIA this is a function, so an image contains it once. Used for
/// copies to and from staging, which most launches skip.
///
/// # Safety
/// As [`copy`].
#[cfg_attr(any(target_arch = "nvptx64", target_arch = "amdgpu"), inline(never))]
#[cfg_attr(
    not(any(target_arch = "nvptx64", target_arch = "amdgpu")),
    inline(always)
)]
pub unsafe fn copy_staged<G: Group>(
    group: G,
    to: *mut u8,
    from: *const u8,
    bytes: usize,
    policy: Policy,
) {
    // SAFETY: the precondition of this function.
    unsafe { copy(group, to, from, bytes, policy) };
}

/// Copies rows: row i from source i of the tables to target i. The scalar of a row is its length in
/// bytes. A row whose source is its target is left out.
///
/// The warps share the rows, so that loads from all sources are in flight together: each source may
/// be another GPU. All lanes of the block together.
///
/// # Safety
/// Sources and targets `0..rows` must be set, and the block must have passed a barrier since. As
/// [`copy`] for each row.
#[inline(always)]
pub unsafe fn copy_rows<M: Machine>(block: Block<M>, tables: Tables, rows: u32, policy: Policy) {
    let Tables {
        sources,
        scalars,
        targets,
    } = tables;
    // SAFETY: the precondition of this function.
    unsafe { copy_table(block, sources, scalars, targets, rows, policy) };
}

/// Does what [`copy_rows`] does. On NVIDIA this is a function, so an image contains it once. The
/// tables are passed one by one, because a struct would be passed in local memory.
///
/// # Safety
/// As [`copy_rows`].
#[cfg_attr(any(target_arch = "nvptx64", target_arch = "amdgpu"), inline(never))]
#[cfg_attr(
    not(any(target_arch = "nvptx64", target_arch = "amdgpu")),
    inline(always)
)]
unsafe fn copy_table<M: Machine>(
    block: Block<M>,
    sources: *mut u64,
    scalars: *mut u64,
    targets: *mut u64,
    rows: u32,
    policy: Policy,
) {
    let tables = Tables {
        sources,
        scalars,
        targets,
    };
    // Not 0, because a division by it would be a panic.
    let divisor = rows.max(1);
    // Several warps share a row if there are enough.
    let pieces = (block.warps() / divisor).max(1);
    for piece in block.elements_of_warp((rows * pieces) as usize) {
        let (row, piece) = (piece as u32 % divisor, piece as u32 / divisor);
        let (to, from) = (tables.target(row), tables.source(row));
        let bytes = tables.scalar(row) as usize;
        let (first, last) = slice(bytes, 64, piece as usize, pieces as usize);
        if !core::ptr::eq(to, from) {
            // SAFETY: the precondition of this function; `first <= last`, and `last` is at most the
            // length of the row.
            unsafe {
                copy(
                    block.warp(),
                    to.add(first),
                    from.add(first),
                    last - first,
                    policy,
                );
            }
        }
    }
}

/// Copies `bytes` bytes like [`copy`], while other accesses to the memory of the peer may race:
/// that of the target of a put, or of the source of a get.
///
/// # Safety
/// Both ranges must be valid; nothing else may access the memory of this rank until the group has
/// synchronised.
#[inline(always)]
pub unsafe fn copy_shared<G: Group>(group: G, to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the precondition of this function.
    unsafe {
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu", loom, shuttle)))]
        if G::LANES == 1 {
            mem::copy_shared(to, from, bytes);
            return;
        }
        copy(group, to, from, bytes, Policy::Cached);
    }
}

/// Vectors that a lane loads before it stores the first, so that their loads are in flight
/// together.
const BATCH: usize = 4;

/// Copies `vectors` aligned vectors of 16 bytes, adjacent vectors by adjacent lanes.
#[inline(always)]
unsafe fn copy_vectors<G: Group>(
    group: G,
    to: *mut u8,
    from: *const u8,
    vectors: usize,
    policy: Policy,
) {
    let lanes = group.size() as usize;
    let mut index = group.rank() as usize;
    let stride = lanes * 16;
    // Only two pointers advance, because registers are scarce where this is inlined.
    let mut from = from.wrapping_add(index * 16);
    let mut to = to.wrapping_add(index * 16);
    // SAFETY: the ranges have `vectors` aligned vectors; every index is below `vectors`.
    unsafe {
        while index + (BATCH - 1) * lanes < vectors {
            // Separate variables, because an array's iterator would be in local memory.
            let first = mem::read_16(from, policy);
            from = from.add(stride);
            let second = mem::read_16(from, policy);
            from = from.add(stride);
            let third = mem::read_16(from, policy);
            from = from.add(stride);
            let fourth = mem::read_16(from, policy);
            from = from.wrapping_add(stride);
            mem::write_16(to, first, policy);
            to = to.add(stride);
            mem::write_16(to, second, policy);
            to = to.add(stride);
            mem::write_16(to, third, policy);
            to = to.add(stride);
            mem::write_16(to, fourth, policy);
            to = to.wrapping_add(stride);
            index += BATCH * lanes;
        }
        while index < vectors {
            mem::write_16(to, mem::read_16(from, policy), policy);
            from = from.wrapping_add(stride);
            to = to.wrapping_add(stride);
            index += lanes;
        }
    }
}

/// Copies by a block of one lane. Short and cached copies are explicit vector moves: the C
/// library's string moves, which it uses from some kilobytes on, are several times slower on lines
/// that another core holds.
#[inline(always)]
unsafe fn copy_single(to: *mut u8, from: *const u8, bytes: usize, policy: Policy) {
    // SAFETY: both ranges have `bytes` bytes.
    unsafe {
        if bytes < 64 {
            mem::copy(to, from, bytes);
        } else if policy == Policy::Streaming {
            copy_lines(to, from, bytes, Policy::Streaming);
            mem::drain();
        } else {
            copy_lines(to, from, bytes, Policy::Cached);
        }
    }
}

/// Copies at least 64 bytes: the target's lines whole, its ends by vectors that may overlap.
#[inline(always)]
unsafe fn copy_lines(to: *mut u8, from: *const u8, bytes: usize, policy: Policy) {
    // SAFETY: both ranges have `bytes` bytes, and every access stays inside.
    unsafe {
        let line = |at: usize, policy: Policy| {
            if policy == Policy::Cached {
                prefetch_write(to.wrapping_add(at + AHEAD));
            }
            let parts = [0, 16, 32, 48].map(|part| mem::read_16(from.add(at + part), policy));
            for (part, value) in parts.into_iter().enumerate() {
                mem::write_16(to.add(at + part * 16), value, policy);
            }
        };
        line(0, Policy::Cached);
        let mut at = 64 - to as usize % 64;
        while at + 64 <= bytes {
            line(at, policy);
            at += 64;
        }
        line(bytes - 64, Policy::Cached);
    }
}
