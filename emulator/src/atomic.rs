//! Read-modify-write functions, and the reductions of multicast loads.

use crate::float::{self, Arith, Format, Modifiers};
use crate::program::{Atomic, MultimemType};

/// Returns the new value of an element of `size` bytes with the value `old`.
pub(crate) fn apply(atomic: Atomic, size: u8, old: u64, a: u64, b: u64) -> u64 {
    let bits = 8 * u32::from(size);
    let mask = u64::MAX >> (64 - bits);
    let signed = |value: u64| (value << (64 - bits)) as i64 >> (64 - bits);
    let (a, b) = (a & mask, b & mask);
    let new = match atomic {
        Atomic::Exchange => a,
        Atomic::CompareSwap if old == a => b,
        Atomic::CompareSwap => old,
        Atomic::Add => old.wrapping_add(a),
        Atomic::And => old & a,
        Atomic::Or => old | a,
        Atomic::Xor => old ^ a,
        Atomic::Inc if old >= a => 0,
        Atomic::Inc => old + 1,
        Atomic::Dec if old == 0 || old > a => a,
        Atomic::Dec => old - 1,
        Atomic::Min => old.min(a),
        Atomic::Max => old.max(a),
        Atomic::MinSigned if signed(old) <= signed(a) => old,
        Atomic::MaxSigned if signed(old) >= signed(a) => old,
        Atomic::MinSigned | Atomic::MaxSigned => a,
        Atomic::Float(op, format, packed) => {
            let of = |x, y| float::arith(op, format, Modifiers::default(), x, y, 0);
            if packed {
                of(old & 0xffff, a & 0xffff) | of(old >> 16 & 0xffff, a >> 16 & 0xffff) << 16
            } else {
                of(old, a)
            }
        }
    };
    new & mask
}

/// Reduces the values of an element on all devices. Sums of 16-bit elements are accumulated in f32
/// with `.acc::f32`, and rounded once.
pub(crate) fn reduce(kind: MultimemType, size: u8, mut values: impl Iterator<Item = u64>) -> u64 {
    let Some(first) = values.next() else {
        return 0;
    };
    let (Some(Format::F32), Atomic::Float(Arith::Add, format, packed)) =
        (kind.accumulator, kind.reduction)
    else {
        return values.fold(first, |all, value| {
            apply(kind.reduction, size, all, value, 0)
        });
    };
    let values: Vec<u64> = core::iter::once(first).chain(values).collect();
    let mode = Modifiers::default();
    let sum = |shift: u32| {
        let wide = |value: &u64| {
            let half = value >> shift & 0xffff;
            float::convert(half, format, Format::F32, mode)
        };
        let add = |all, value| float::arith(Arith::Add, Format::F32, mode, all, value, 0);
        let sum = values.iter().map(wide).reduce(add).unwrap_or(0);
        float::convert(sum, Format::F32, format, mode)
    };
    if packed {
        sum(0) | sum(16) << 16
    } else {
        sum(0)
    }
}
