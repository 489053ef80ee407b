//! Conversions of small floats, exhaustively, against the `half` crate and against the definition.

use fusewire_device::element::{Average, Max, Min, Ordered, Reduction};
use fusewire_device::{Bf16, E4m3, E5m2, Element, F16};

/// f32 values around every rounding decision, and a sweep over all exponents.
fn samples() -> impl Iterator<Item = f32> {
    let sweep = (0..=u32::MAX).step_by(9973).map(f32::from_bits);
    let edges = (0..=u16::MAX).flat_map(|half| {
        let bits = half::f16::from_bits(half).to_f32().to_bits();
        [0i32, 1, -1, 0x1000, 0x0fff, 0x1001]
            .map(|step| f32::from_bits(bits.wrapping_add_signed(step)))
    });
    sweep.chain(edges)
}

#[test]
fn f16_equals_half() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (F16(bits).to_f32(), half::f16::from_bits(bits).to_f32());
        assert!(
            ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
            "{bits:#x}"
        );
    }
    for value in samples() {
        let theirs = half::f16::from_f32(value);
        let theirs = if value.is_nan() {
            0x7fff
        } else {
            theirs.to_bits()
        };
        assert_eq!(
            F16::from_f32(value).0,
            theirs,
            "{value:e} ({:#x})",
            value.to_bits()
        );
    }
}

#[test]
fn bf16_equals_half() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (Bf16(bits).to_f32(), half::bf16::from_bits(bits).to_f32());
        assert!(
            ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
            "{bits:#x}"
        );
    }
    for value in samples() {
        let theirs = half::bf16::from_f32(value);
        let theirs = if value.is_nan() {
            0x7fff
        } else {
            theirs.to_bits()
        };
        assert_eq!(
            Bf16::from_f32(value).0,
            theirs,
            "{value:e} ({:#x})",
            value.to_bits()
        );
    }
}

/// The value of an fp8 code by its definition: sign, exponent with a bias, mantissa.
fn fp8(code: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let fraction = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1u32 << mantissa_bits);
    sign * if exponent == 0 {
        fraction * 2f64.powi(1 - bias)
    } else {
        (1.0 + fraction) * 2f64.powi(exponent - bias)
    }
}

/// The nearest of `codes` to `value`, ties to the even code.
fn nearest(value: f64, codes: &[(u8, f64)]) -> u8 {
    let mut best = codes[0];
    for &(code, candidate) in codes {
        let (distance, least) = ((candidate - value).abs(), (best.1 - value).abs());
        if distance < least || distance == least && code & 1 == 0 && best.0 & 1 == 1 {
            best = (code, candidate);
        }
    }
    best.0
}

fn check_fp8(
    mantissa_bits: u32,
    bias: i32,
    largest: u8,
    to: impl Fn(u8) -> f32,
    from: impl Fn(f32) -> u8,
) {
    let codes: Vec<(u8, f64)> = (0..=largest)
        .map(|code| (code, fp8(code, mantissa_bits, bias)))
        .collect();
    for code in (0..=largest).chain(0x80..=0x80 | largest) {
        assert_eq!(
            f64::from(to(code)),
            fp8(code, mantissa_bits, bias),
            "{code:#x}"
        );
        assert_eq!(from(to(code)), code, "round trip of {code:#x}");
    }
    let values = (0..0x7f80_0000u32).step_by(40_009).map(f32::from_bits);
    let ties = codes
        .windows(2)
        .map(|pair| ((pair[0].1 + pair[1].1) / 2.0) as f32);
    for value in values.chain(ties) {
        // Beyond the largest value, distances in f64 would all round to the same.
        let bounded = f64::from(value).min(codes[usize::from(largest)].1 * 2.0);
        let expected = nearest(bounded, &codes);
        assert_eq!(from(value), expected, "{value:e}");
        assert_eq!(from(-value), expected | 0x80, "-{value:e}");
    }
}

#[test]
fn fp8_rounds_to_nearest_even_and_saturates() {
    check_fp8(3, 7, 0x7e, |c| E4m3(c).to_f32(), |v| E4m3::from_f32(v).0);
    check_fp8(2, 15, 0x7b, |c| E5m2(c).to_f32(), |v| E5m2::from_f32(v).0);
    assert!(E4m3(0x7f).to_f32().is_nan() && E4m3::from_f32(f32::NAN).0 & 0x7f == 0x7f);
    assert_eq!(E4m3::from_f32(f32::INFINITY).0, 0x7e);
    assert!(E5m2(0x7e).to_f32().is_nan() && E5m2::from_f32(f32::NAN).to_f32().is_nan());
    assert_eq!(E5m2::from_f32(f32::NEG_INFINITY).0, 0xfc);
    assert_eq!(E5m2::from_f32(1e9).0, 0x7b);
}

#[test]
fn minimum_and_maximum_order_zeros_and_propagate_nan() {
    assert_eq!(Ordered::min(0.0f32, -0.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!(Ordered::max(-0.0f32, 0.0).to_bits(), 0.0f32.to_bits());
    assert!(Ordered::min(1.0f32, f32::NAN).is_nan() && Ordered::min(f32::NAN, 1.0f32).is_nan());
    assert!(Ordered::max(1.0f64, f64::NAN).is_nan() && Ordered::max(f64::NAN, 1.0f64).is_nan());
    assert_eq!(Ordered::min(f32::NEG_INFINITY, -1e30), f32::NEG_INFINITY);
    assert_eq!(Ordered::max(-5.0f64, -7.0), -5.0);
    assert_eq!(<Min as Reduction<i8>>::combine(-3, 4), -3);
    assert_eq!(<Max as Reduction<u64>>::combine(u64::MAX, 4), u64::MAX);
}

#[test]
fn integer_averages_truncate() {
    assert_eq!(<Average as Reduction<i32>>::finish(-7, 2), -3);
    assert_eq!(<Average as Reduction<u8>>::finish(250, 3), 83);
    let sum = <Average as Reduction<i8>>::combine(Element::widen(i8::MAX), 1);
    assert_eq!(sum, i8::MIN, "sums wrap");
}
