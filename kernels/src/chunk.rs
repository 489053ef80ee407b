//! Accesses to a few contiguous elements, by the widest accesses of the machine.

use fusewire_device::bulk::{pack, unpack};
use fusewire_device::element::Ordered;
use fusewire_device::mem::{self, Policy};
use fusewire_device::{Element, Machine};

/// Reads `N` elements: as a whole if a block has one lane, otherwise by 16-byte accesses.
///
/// # Safety
/// `at` must be valid for `N` elements, which nothing may write meanwhile. If a block has several
/// lanes, `at` must be 16-byte aligned, and `N` elements a multiple of 16 bytes.
#[inline(always)]
pub(crate) unsafe fn read<M: Machine, E: Element, const N: usize>(at: *const E) -> [E; N] {
    if M::LANES == 1 {
        // SAFETY: the precondition of this function. With one lane, this is a CPU, where
        // `mem::read` needs no alignment.
        return unsafe { mem::read(at.cast()) };
    }
    let per = 16 / size_of::<E>();
    let mut out = [E::narrow(E::Acc::ZERO); N];
    for unit in 0..N / per {
        // SAFETY: the unit is within the `N` elements, and aligned as `at` is.
        let pair = unsafe { mem::read_16(at.add(unit * per).cast(), Policy::Cached) };
        for i in 0..16 / size_of::<E>() {
            out[unit * per + i] = unpack(pair, i);
        }
    }
    out
}

/// Writes `N` elements by the same accesses as [`read`], or 8 bytes by one access.
///
/// # Safety
/// `at` must be valid for `N` elements, which nothing may access meanwhile. Alignment as for
/// [`read`], or to 8 bytes if `N` elements have 8 bytes.
#[inline(always)]
pub(crate) unsafe fn write<M: Machine, E: Element, const N: usize>(at: *mut E, values: [E; N]) {
    if M::LANES == 1 {
        // SAFETY: the precondition of this function, on a CPU as in `read`.
        unsafe { mem::write(at.cast(), values) };
        return;
    }
    if N * size_of::<E>() == 8 {
        let mut pair = [0; 2];
        for i in 0..N {
            pack(&mut pair, i, values[i]);
        }
        // SAFETY: the `N` elements have 8 bytes, and `at` is aligned to them.
        unsafe { mem::write(at.cast::<u64>(), pair[0]) };
        return;
    }
    let per = 16 / size_of::<E>();
    for unit in 0..N / per {
        let mut pair = [0; 2];
        for i in 0..16 / size_of::<E>() {
            pack(&mut pair, i, values[unit * per + i]);
        }
        // SAFETY: the unit is within the `N` elements, and aligned as `at` is.
        unsafe { mem::write_16(at.add(unit * per).cast(), pair, Policy::Cached) };
    }
}

/// Converts the values exactly.
#[inline(always)]
pub(crate) fn widen<E: Element<Acc = f32>, const N: usize>(values: [E; N]) -> [f32; N] {
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = values[i].widen();
    }
    out
}

/// Rounds the values.
#[inline(always)]
pub(crate) fn narrow<E: Element<Acc = f32>, const N: usize>(values: [f32; N]) -> [E; N] {
    let mut out = [E::narrow(0.0); N];
    for i in 0..N {
        out[i] = E::narrow(values[i]);
    }
    out
}
