//! A few elements side by side, moved as the machine moves them best.

use fusewire_device::bulk::{pack, unpack};
use fusewire_device::element::Number;
use fusewire_device::mem::{self, Policy};
use fusewire_device::{Element, Machine};

/// `N` elements: by whole tiles where a block has one lane, else by 16-byte accesses.
///
/// # Safety
/// As [`mem::read`] for `N` elements; elsewhere than on a CPU `at` must be 16-byte aligned and `N`
/// elements whole 16-byte units.
#[inline(always)]
pub(crate) unsafe fn read<M: Machine, E: Element, const N: usize>(at: *const E) -> [E; N] {
    if M::LANES == 1 {
        // SAFETY: the caller's promise.
        return unsafe { mem::read(at.cast()) };
    }
    let per = 16 / size_of::<E>();
    let mut out = [E::narrow(E::Acc::ZERO); N];
    for unit in 0..N / per {
        // SAFETY: the caller's promise.
        let pair = unsafe { mem::read_16(at.add(unit * per).cast(), Policy::Cached) };
        for i in 0..16 / size_of::<E>() {
            out[unit * per + i] = unpack(pair, i);
        }
    }
    out
}

/// Writes what [`read`] reads; also for 8 bytes at a time.
///
/// # Safety
/// As [`mem::write`]; alignment as for [`read`], or to 8 bytes where the chunk has 8.
#[inline(always)]
pub(super) unsafe fn write<M: Machine, E: Element, const N: usize>(at: *mut E, values: [E; N]) {
    if M::LANES == 1 {
        // SAFETY: the caller's promise.
        unsafe { mem::write(at.cast(), values) };
        return;
    }
    if N * size_of::<E>() == 8 {
        let mut pair = [0; 2];
        for i in 0..N {
            pack(&mut pair, i, values[i]);
        }
        // SAFETY: the caller's promise.
        unsafe { mem::write(at.cast::<u64>(), pair[0]) };
        return;
    }
    let per = 16 / size_of::<E>();
    for unit in 0..N / per {
        let mut pair = [0; 2];
        for i in 0..16 / size_of::<E>() {
            pack(&mut pair, i, values[unit * per + i]);
        }
        // SAFETY: the caller's promise.
        unsafe { mem::write_16(at.add(unit * per).cast(), pair, Policy::Cached) };
    }
}

/// The exact values.
#[inline(always)]
pub(crate) fn widen<E: Element<Acc = f32>, const N: usize>(values: [E; N]) -> [f32; N] {
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = values[i].widen();
    }
    out
}

/// The values, rounded.
#[inline(always)]
pub(super) fn narrow<E: Element<Acc = f32>, const N: usize>(values: [f32; N]) -> [E; N] {
    let mut out = [E::narrow(0.0); N];
    for i in 0..N {
        out[i] = E::narrow(values[i]);
    }
    out
}
