//! Tests of floating-point semantics against independent implementations.

use super::*;

const ALL: [Format; 7] = [
    Format::E4m3,
    Format::E5m2,
    Format::F16,
    Format::Bf16,
    Format::Tf32,
    Format::F32,
    Format::F64,
];
const ROUNDINGS: [Rounding; 5] = [
    Rounding::Nearest,
    Rounding::Zero,
    Rounding::Down,
    Rounding::Up,
    Rounding::Away,
];
const PLAIN: Modifiers = Modifiers {
    rounding: Rounding::Nearest,
    ftz: false,
    saturate: false,
    satfinite: false,
    relu: false,
    nan: false,
    xorsign: false,
};
const FTZ: Modifiers = Modifiers { ftz: true, ..PLAIN };
const SAT: Modifiers = Modifiers {
    saturate: true,
    ..PLAIN
};
const SATFINITE: Modifiers = Modifiers {
    satfinite: true,
    ..PLAIN
};
const RELU: Modifiers = Modifiers {
    relu: true,
    ..PLAIN
};
const OPS: [Arith; 22] = [
    Arith::Add,
    Arith::Sub,
    Arith::Mul,
    Arith::Div,
    Arith::Fma,
    Arith::Sqrt,
    Arith::Rcp,
    Arith::Min,
    Arith::Max,
    Arith::Neg,
    Arith::Abs,
    Arith::Copysign,
    Arith::RcpApprox,
    Arith::RsqrtApprox,
    Arith::SqrtApprox,
    Arith::DivApprox,
    Arith::DivFull,
    Arith::Ex2,
    Arith::Lg2,
    Arith::Sin,
    Arith::Cos,
    Arith::Tanh,
];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Returns random bits with few set mantissa bits in half of the cases.
    fn bits(&mut self, format: Format) -> u64 {
        let bits = self.next();
        let sparse = self.next() & self.next() & self.next() & self.next();
        let low = if bits & 1 == 0 { bits } else { sparse };
        let mantissa = format.mantissa_mask();
        format.mask(self.next() & !mantissa | low & mantissa)
    }
}

fn rounded(rounding: Rounding) -> Modifiers {
    Modifiers { rounding, ..PLAIN }
}

fn f32_bits(value: f32) -> u64 {
    u64::from(value.to_bits())
}

/// Returns an operand as `integer * 2^exponent`.
fn unpack(format: Format, bits: u64) -> (i128, i64) {
    let magnitude = format.magnitude(bits);
    let field = (magnitude >> format.mantissa_bits()) as i64;
    let fraction = i128::from(magnitude & format.mantissa_mask());
    let implicit = if field == 0 {
        0
    } else {
        1 << format.mantissa_bits()
    };
    let exponent = field.max(1) - format.bias() - i64::from(format.mantissa_bits());
    let significand = fraction + implicit;
    (
        if format.is_negative(bits) {
            -significand
        } else {
            significand
        },
        exponent,
    )
}

/// Rounds the nonzero number `integer * 2^exponent` in integer arithmetic.
fn round_exact(format: Format, rounding: Rounding, integer: i128, exponent: i64) -> u64 {
    let negative = integer < 0;
    let magnitude = integer.unsigned_abs();
    let length = i64::from(128 - magnitude.leading_zeros());
    let precision = i64::from(format.mantissa_bits()) + 1;
    let min_exponent = 2 - format.bias() - precision;
    let quantum = (length + exponent - precision).max(min_exponent);
    let shift = quantum - exponent;
    let mut kept = if shift <= 0 {
        magnitude << -shift
    } else {
        let shift = shift.min(127);
        let kept = magnitude >> shift;
        let rest = magnitude & ((1 << shift) - 1);
        let half = 1_u128 << (shift - 1);
        let up = match rounding {
            Rounding::Nearest => rest > half || rest == half && kept & 1 == 1,
            Rounding::Away => rest >= half,
            Rounding::Zero => false,
            Rounding::Down => negative && rest != 0,
            Rounding::Up => !negative && rest != 0,
        };
        kept + u128::from(up)
    } as u64;
    let mut quantum = quantum;
    if kept >> precision != 0 {
        kept >>= 1;
        quantum += 1;
    }
    let sign = if negative { format.sign_bit() } else { 0 };
    let normal = kept >> (precision - 1) != 0;
    let field = if normal {
        quantum - min_exponent + 1
    } else {
        0
    } as u64;
    let bits = (field << format.mantissa_bits()) | (kept & format.mantissa_mask());
    if bits < format.exponent_mask() {
        return sign | bits;
    }
    let to_largest = match rounding {
        Rounding::Nearest | Rounding::Away => false,
        Rounding::Zero => true,
        Rounding::Down => !negative,
        Rounding::Up => negative,
    };
    sign | if to_largest {
        format.largest()
    } else {
        format.exponent_mask()
    }
}

/// Returns `a * b + c`, or `None` if the exact value does not fit in an `i128`.
fn exact_fma(
    format: Format,
    rounding: Rounding,
    [a, b, c]: [u64; 3],
    zero: impl Fn() -> u64,
) -> Option<u64> {
    let ((ma, ea), (mb, eb), (mc, ec)) = (unpack(format, a), unpack(format, b), unpack(format, c));
    let (product, product_exponent) = (ma * mb, ea + eb);
    let exponent = match (product, mc) {
        (0, _) => ec,
        (_, 0) => product_exponent,
        _ => product_exponent.min(ec),
    };
    let align = |m: i128, e: i64| {
        if m == 0 {
            return Some(0);
        }
        let shift = e - exponent;
        (shift < i64::from(m.unsigned_abs().leading_zeros()) - 2).then(|| m << shift)
    };
    let sum = align(product, product_exponent)? + align(mc, ec)?;
    Some(if sum == 0 {
        zero()
    } else {
        round_exact(format, rounding, sum, exponent)
    })
}

/// Returns random operands of which `a * b` and `c` have close exponents.
fn close_operands(random: &mut Random, format: Format) -> [u64; 3] {
    let mantissa_bits = format.mantissa_bits();
    let fields = 1 << (format.bits() - mantissa_bits - 1);
    let (a, b) = (random.below(fields - 1), random.below(fields - 1));
    let product = (a + b) as i64 - format.bias();
    let c = product + random.below(60) as i64 - 30;
    let c = c.clamp(0, fields as i64 - 2) as u64;
    [a, b, c].map(|field| {
        let bits = random.bits(format) & !format.exponent_mask();
        let bits = if format == Format::F64 {
            bits & !0x7ff_ffff
        } else {
            bits
        };
        bits | field << mantissa_bits
    })
}

#[test]
fn add_mul_and_fma_match_integer_arithmetic() {
    let mut random = Random(1);
    let mut checked = 0;
    for format in [Format::F16, Format::Bf16, Format::F32, Format::F64] {
        for i in 0..20_000 {
            let mut operands = close_operands(&mut random, format);
            if i % 64 == 0 {
                // Makes the sum an exact zero.
                operands[1] = format.one();
                operands[2] = operands[0] ^ format.sign_bit();
            }
            let [a, b, c] = operands;
            for rounding in ROUNDINGS {
                let m = rounded(rounding);
                let cancelled = if rounding == Rounding::Down {
                    format.sign_bit()
                } else {
                    0
                };
                let zero = || {
                    let product = (a ^ b) & format.sign_bit();
                    let (x, y) = (format.magnitude(a), format.magnitude(b));
                    let underflow = (x == 0 || y == 0) && format.magnitude(c) == 0;
                    if underflow && product == c {
                        product
                    } else {
                        cancelled
                    }
                };
                if let Some(expected) = exact_fma(format, rounding, operands, zero) {
                    checked += 1;
                    let actual = arith(Arith::Fma, format, m, a, b, c);
                    assert_eq!(
                        actual, expected,
                        "{format:?} {rounding:?} {a:x} {b:x} {c:x}"
                    );
                }
                let one = format.one();
                let zero = || if format.mask(a) == c { a } else { cancelled };
                if let Some(expected) = exact_fma(format, rounding, [a, one, c], zero) {
                    checked += 1;
                    let actual = arith(Arith::Add, format, m, a, c, u64::MAX);
                    assert_eq!(actual, expected, "{format:?} {rounding:?} {a:x} + {c:x}");
                    let minus_c = c ^ format.sign_bit();
                    assert_eq!(arith(Arith::Sub, format, m, a, minus_c, 0), expected);
                }
                let zero = || (a ^ b) & format.sign_bit();
                let expected = exact_fma(format, rounding, [a, b, 0], zero).unwrap();
                let actual = arith(Arith::Mul, format, m, a, b, u64::MAX);
                assert_eq!(actual, expected, "{format:?} {rounding:?} {a:x} * {b:x}");
            }
        }
    }
    assert!(checked > 400_000, "{checked}");
}

#[test]
fn native_paths_match_apfloat() {
    fn apfloat<F: Float>(op: Arith, [a, b, c]: [u64; 3]) -> u64 {
        let [a, b, c] = [a, b, c].map(|bits| F::from_bits(u128::from(bits)));
        let result = match op {
            Arith::Add => a + b,
            Arith::Sub => a - b,
            Arith::Mul => a * b,
            Arith::Div => a / b,
            _ => a.mul_add(b, c),
        };
        result.value.to_bits() as u64
    }
    let mut random = Random(2);
    for format in [Format::F32, Format::F64] {
        for _ in 0..20_000 {
            let operands = [(); 3].map(|()| random.bits(format));
            let [a, b, c] = operands;
            for op in [Arith::Add, Arith::Sub, Arith::Mul, Arith::Div, Arith::Fma] {
                let actual = arith(op, format, PLAIN, a, b, c);
                let expected = match format {
                    Format::F32 => apfloat::<Single>(op, operands),
                    _ => apfloat::<Double>(op, operands),
                };
                if is_nan(format, actual) {
                    assert!(is_nan(format, expected));
                } else {
                    assert_eq!(actual, expected, "{op:?} {a:x} {b:x} {c:x}");
                }
            }
        }
    }
}

#[test]
fn div_and_sqrt_bracket_the_exact_value() {
    let mut random = Random(3);
    let value = |bits: u64| f64::from(f32::from_bits(bits as u32));
    for _ in 0..50_000 {
        let field = |random: &mut Random| (96 + random.below(64)) << 23;
        let a = random.bits(Format::F32) & 0x007f_ffff | field(&mut random);
        let b = random.bits(Format::F32) & 0x007f_ffff | field(&mut random);
        let run = |op, rounding| arith(op, Format::F32, rounded(rounding), a, b, 0);
        // Products of two f32 are exact in f64.
        let down = run(Arith::Div, Rounding::Down);
        assert!(value(down) * value(b) <= value(a));
        assert!(value(down + 1) * value(b) > value(a));
        let exact = value(down) * value(b) == value(a);
        let up = down + u64::from(!exact);
        assert_eq!(run(Arith::Div, Rounding::Up), up);
        assert_eq!(run(Arith::Div, Rounding::Zero), down);
        let nearest = run(Arith::Div, Rounding::Nearest);
        assert!(nearest == down || nearest == up);
        let sign = 0x8000_0000;
        let m = rounded(Rounding::Down);
        assert_eq!(arith(Arith::Div, Format::F32, m, a ^ sign, b, 0), up | sign);

        let down = run(Arith::Sqrt, Rounding::Down);
        assert!(value(down) * value(down) <= value(a));
        assert!(value(down + 1) * value(down + 1) > value(a));
        let exact = value(down) * value(down) == value(a);
        let up = down + u64::from(!exact);
        assert_eq!(run(Arith::Sqrt, Rounding::Up), up);
        assert_eq!(run(Arith::Sqrt, Rounding::Zero), down);
        // Ties are impossible, so that both nearest modes agree.
        assert_eq!(
            run(Arith::Sqrt, Rounding::Away),
            run(Arith::Sqrt, Rounding::Nearest)
        );

        let one = Format::F32.one();
        for rounding in ROUNDINGS {
            let m = rounded(rounding);
            let expected = arith(Arith::Div, Format::F32, m, one, a, 0);
            assert_eq!(arith(Arith::Rcp, Format::F32, m, a, 0, 0), expected);
        }
        let wide = random.bits(Format::F64) & !Format::F64.sign_bit();
        if !is_nan(Format::F64, wide) {
            let run = |r| arith(Arith::Sqrt, Format::F64, rounded(r), wide, 0, 0);
            assert_eq!(run(Rounding::Away), run(Rounding::Nearest), "{wide:x}");
            let (down, up) = (run(Rounding::Down), run(Rounding::Up));
            assert!(up - down <= 1);
            assert!((down..=up).contains(&run(Rounding::Nearest)));
            assert_eq!(run(Rounding::Zero), down);
        }
    }
}

#[test]
fn half_and_bfloat_widen_exactly() {
    for bits in 0..=u16::MAX {
        let pairs = [
            (Format::F16, half::f16::from_bits(bits).to_f32()),
            (Format::Bf16, half::bf16::from_bits(bits).to_f32()),
        ];
        for (format, expected) in pairs {
            let bits = u64::from(bits);
            let actual = convert(bits, format, Format::F32, PLAIN);
            if expected.is_nan() {
                assert!(is_nan(format, bits));
                assert_eq!(actual, 0x7fff_ffff);
            } else {
                assert_eq!(actual, f32_bits(expected));
                assert_eq!(convert(actual, Format::F32, format, PLAIN), bits);
                let wide = convert(bits, format, Format::F64, PLAIN);
                assert_eq!(wide, f64::from(expected).to_bits());
                assert_eq!(convert(wide, Format::F64, format, PLAIN), bits);
            }
        }
    }
}

#[test]
fn narrowing_matches_half() {
    let mut random = Random(4);
    for upper in 0..=0x1ff_u32 {
        for i in 0..256 {
            let mantissa = match i {
                0 => 0,
                1 => 0x007f_ffff,
                _ if i % 3 == 0 => random.next() as u32 & 0x007f_e000 | 0x1000,
                _ if i % 3 == 1 => random.next() as u32 & 0x007f_0000 | 0x8000,
                _ => random.next() as u32 & 0x007f_ffff,
            };
            let value = f32::from_bits(upper << 23 | mantissa);
            if value.is_nan() {
                continue;
            }
            let to = |format| convert(f32_bits(value), Format::F32, format, PLAIN);
            let (f16, bf16) = (half::f16::from_f32(value), half::bf16::from_f32(value));
            assert_eq!(to(Format::F16), u64::from(f16.to_bits()), "{value:e}");
            assert_eq!(to(Format::Bf16), u64::from(bf16.to_bits()), "{value:e}");
            let wide = f64::from(value).to_bits();
            assert_eq!(
                convert(wide, Format::F64, Format::F32, PLAIN),
                f32_bits(value)
            );
        }
    }
}

#[test]
fn narrowing_matches_integer_arithmetic() {
    let mut random = Random(5);
    for _ in 0..40_000 {
        let bits = random.bits(Format::F64);
        let exponent = random.below(320) + 1023 - 160;
        let bits = bits & !Format::F64.exponent_mask() | exponent << 52;
        let (integer, exponent) = unpack(Format::F64, bits);
        for rounding in ROUNDINGS {
            for to in [Format::E5m2, Format::F16, Format::Bf16, Format::F32] {
                let mut expected = round_exact(to, rounding, integer, exponent);
                if to == Format::E5m2 && to.is_infinite(expected) {
                    expected -= 1;
                }
                let actual = convert(bits, Format::F64, to, rounded(rounding));
                assert_eq!(actual, expected, "{to:?} {rounding:?} {bits:x}");
            }
        }
    }
}

#[test]
fn fp8_converts_to_and_from_wider_formats() {
    // The published tables of the two formats.
    let known = [
        (Format::E4m3, 0x01, 2.0_f32.powi(-9)),
        (Format::E4m3, 0x07, 0.875 * 2.0_f32.powi(-6)),
        (Format::E4m3, 0x08, 2.0_f32.powi(-6)),
        (Format::E4m3, 0x38, 1.0),
        (Format::E4m3, 0x78, 256.0),
        (Format::E4m3, 0xfe, -448.0),
        (Format::E5m2, 0x01, 2.0_f32.powi(-16)),
        (Format::E5m2, 0x04, 2.0_f32.powi(-14)),
        (Format::E5m2, 0x3c, 1.0),
        (Format::E5m2, 0x7b, 57344.0),
        (Format::E5m2, 0xfc, f32::NEG_INFINITY),
    ];
    for (format, bits, value) in known {
        assert_eq!(convert(bits, format, Format::F32, PLAIN), f32_bits(value));
    }
    for bits in 0..=0xff_u64 {
        // E5M2 is the upper byte of binary16.
        let f16 = convert(bits, Format::E5m2, Format::F16, PLAIN);
        assert_eq!(
            f16,
            if is_nan(Format::E5m2, bits) {
                0x7fff
            } else {
                bits << 8
            }
        );
        for format in [Format::E4m3, Format::E5m2] {
            for wide in [Format::F16, Format::F32, Format::F64] {
                let value = convert(bits, format, wide, PLAIN);
                let back = convert(value, wide, format, PLAIN);
                let expected = if is_nan(format, bits) {
                    assert!(is_nan(wide, value));
                    0x7f
                } else if format.is_infinite(bits) {
                    assert!(wide.is_infinite(value));
                    bits - 1
                } else {
                    bits
                };
                assert_eq!(back, expected, "{format:?} {bits:x} {wide:?}");
            }
        }
    }
    let e4m3 = |value: f32| convert(f32_bits(value), Format::F32, Format::E4m3, PLAIN);
    // Midpoints go to even: 1.0625 to 1.0, 1.1875 to 1.25.
    assert_eq!(e4m3(1.0625), 0x38);
    assert_eq!(e4m3(1.1875), 0x3a);
    assert_eq!(e4m3(1.062_500_1), 0x39);
    assert_eq!(e4m3(2.0_f32.powi(-10)), 0);
    assert_eq!(e4m3(-2.0_f32.powi(-10)), 0x80);
    assert_eq!(e4m3(1.5 * 2.0_f32.powi(-9)), 0x02);
    for value in [
        448.0,
        463.9,
        464.0,
        465.0,
        480.0,
        512.0,
        f32::MAX,
        f32::INFINITY,
    ] {
        assert_eq!(e4m3(value), 0x7e);
        assert_eq!(e4m3(-value), 0xfe);
    }
    assert_eq!(e4m3(f32::NAN), 0x7f);
    let relu = |value: f32| convert(f32_bits(value), Format::F32, Format::E4m3, RELU);
    assert_eq!(relu(-1e9), 0);
    assert_eq!(relu(-f32::NAN), 0x7f);
    assert_eq!(relu(1e9), 0x7e);
    // The result is the nearest number, found by search over all encodings.
    let mut random = Random(6);
    for format in [Format::E4m3, Format::E5m2] {
        let values: Vec<(u64, f64)> = (0..=format.largest())
            .map(|bits| (bits, widen(bits, format)))
            .collect();
        for _ in 0..2_000 {
            let bits = random.bits(Format::F16) & 0x7fff;
            if bits >= 0x7c00 {
                continue;
            }
            let value = widen(bits, Format::F16);
            let distance = |v: &f64| (v - value).abs();
            let best = values
                .iter()
                .map(|(_, v)| distance(v))
                .fold(f64::MAX, f64::min);
            let mut nearest: Vec<u64> = values
                .iter()
                .filter(|(_, v)| distance(v) == best)
                .map(|(bits, _)| *bits)
                .collect();
            if nearest.len() == 2 {
                nearest.retain(|bits| bits & 1 == 0);
            }
            assert_eq!(convert(bits, Format::F16, format, PLAIN), nearest[0]);
        }
    }
}

#[test]
fn tf32_rounds_to_eleven_bits() {
    let tf32 = |bits, m| convert(bits, Format::F32, Format::Tf32, m);
    let away = rounded(Rounding::Away);
    assert_eq!(tf32(0x3f80_1000, away), 0x3f80_2000);
    assert_eq!(tf32(0x3f80_1000, PLAIN), 0x3f80_0000);
    assert_eq!(tf32(0x3f80_3000, PLAIN), 0x3f80_4000);
    assert_eq!(tf32(0xbf80_1000, away), 0xbf80_2000);
    assert_eq!(tf32(0x3f80_0fff, away), 0x3f80_0000);
    assert_eq!(tf32(0x3f80_1fff, rounded(Rounding::Zero)), 0x3f80_0000);
    assert_eq!(tf32(0x7f7f_ffff, away), 0x7f80_0000);
    assert_eq!(tf32(0x7f7f_ffff, SATFINITE), 0x7f7f_e000);
    assert_eq!(tf32(0xff80_0000, SATFINITE), 0xff7f_e000);
    assert_eq!(tf32(0xff80_0001, PLAIN), 0x7fff_e000);
    assert_eq!(tf32(0x0000_1000, away), 0x0000_2000);
    assert_eq!(tf32(0xbf80_0000, RELU), 0);
    let mut random = Random(7);
    for _ in 0..20_000 {
        let bits = random.bits(Format::F32);
        if bits & 0x7f80_0000 != 0x7f80_0000 {
            assert_eq!(tf32(bits, away), (bits + 0x1000) & 0xffff_e000);
            let even = bits + 0xfff + (bits >> 13 & 1);
            assert_eq!(tf32(bits, PLAIN), even & 0xffff_e000);
        }
        let tf32 = bits & 0xffff_e000;
        if !is_nan(Format::Tf32, bits) {
            assert_eq!(convert(bits, Format::Tf32, Format::F32, PLAIN), tf32);
        }
    }
}

#[test]
fn conversion_modifiers() {
    let to = |value: f32, format, m| convert(f32_bits(value), Format::F32, format, m);
    assert_eq!(to(65520.0, Format::F16, PLAIN), 0x7c00);
    assert_eq!(to(65519.996, Format::F16, PLAIN), 0x7bff);
    assert_eq!(to(65520.0, Format::F16, SATFINITE), 0x7bff);
    assert_eq!(to(f32::NEG_INFINITY, Format::F16, SATFINITE), 0xfbff);
    assert_eq!(to(f32::NAN, Format::F16, SATFINITE), 0x7fff);
    assert_eq!(to(f32::MAX, Format::Bf16, PLAIN), 0x7f80);
    assert_eq!(to(f32::MAX, Format::Bf16, SATFINITE), 0x7f7f);
    assert_eq!(to(-2.0, Format::F16, RELU), 0);
    assert_eq!(to(-0.0, Format::F16, RELU), 0);
    assert_eq!(to(2.0, Format::F16, RELU), 0x4000);
    assert_eq!(to(-f32::NAN, Format::F16, RELU), 0x7fff);
    assert_eq!(to(f32::NEG_INFINITY, Format::Bf16, RELU), 0);
    assert_eq!(to(2.0, Format::F16, SAT), 0x3c00);
    assert_eq!(to(0.5, Format::F16, SAT), 0x3800);
    assert_eq!(to(-0.0, Format::F32, SAT), 0);
    assert_eq!(to(f32::NAN, Format::F64, SAT), 0);
    assert_eq!(to(-3.0, Format::F64, SAT), 0);
    // An f32 subnormal is flushed, an f16 subnormal is not.
    assert_eq!(to(-1e-40, Format::F64, FTZ), 1 << 63);
    assert_eq!(
        to(-1e-40, Format::F64, PLAIN),
        f64::from(-1e-40_f32).to_bits()
    );
    assert_eq!(to(1e-7, Format::F16, FTZ), 2);
    assert_eq!(
        convert(1, Format::F16, Format::F32, FTZ),
        f32_bits(2.0_f32.powi(-24))
    );
    assert_eq!(convert(0x8001, Format::Bf16, Format::F32, FTZ), 0x8000_0000);
    let tiny = 1e-40_f64.to_bits();
    assert_eq!(convert(tiny, Format::F64, Format::F32, FTZ), 0);
    assert_eq!(
        convert(tiny, Format::F64, Format::F32, PLAIN),
        f32_bits(1e-40)
    );
    // f64 keeps payloads.
    let nan = 0xfff0_0000_0000_1234;
    assert_eq!(
        convert(nan, Format::F64, Format::F64, PLAIN),
        0xfff8_0000_0000_1234
    );
    assert_eq!(convert(nan, Format::F64, Format::F32, PLAIN), 0x7fff_ffff);
    assert_eq!(
        convert(0xff80_0001, Format::F32, Format::F64, PLAIN),
        0xfff8_0000_2000_0000
    );
}

#[test]
fn rounds_to_integral() {
    let run = |value: f32, rounding| {
        let bits = round_to_integral(f32_bits(value), Format::F32, rounded(rounding));
        f32::from_bits(bits as u32)
    };
    assert_eq!(run(2.5, Rounding::Nearest), 2.0);
    assert_eq!(run(3.5, Rounding::Nearest), 4.0);
    assert_eq!(run(-2.5, Rounding::Away), -3.0);
    assert_eq!(run(-2.5, Rounding::Zero), -2.0);
    assert_eq!(run(-2.5, Rounding::Down), -3.0);
    assert_eq!(run(2.1, Rounding::Up), 3.0);
    assert_eq!(run(-0.3, Rounding::Up).to_bits(), 0x8000_0000);
    assert_eq!(run(f32::MAX, Rounding::Up), f32::MAX);
    assert_eq!(run(f32::NEG_INFINITY, Rounding::Up), f32::NEG_INFINITY);
    assert_eq!(run(-f32::NAN, Rounding::Up).to_bits(), 0x7fff_ffff);
    let up = rounded(Rounding::Up);
    assert_eq!(round_to_integral(1, Format::F32, up), f32_bits(1.0));
    assert_eq!(
        round_to_integral(1, Format::F32, Modifiers { ftz: true, ..up }),
        0
    );
    let mut random = Random(8);
    for _ in 0..5_000 {
        let bits = random.bits(Format::F64);
        let wide = Double::from_bits(u128::from(bits));
        let half = random.bits(Format::F16);
        for rounding in ROUNDINGS {
            let round = rounding.to_apfloat();
            if !is_nan(Format::F64, bits) {
                let expected = wide.round_to_integral(round).value.to_bits() as u64;
                let actual = round_to_integral(bits, Format::F64, rounded(rounding));
                assert_eq!(actual, expected);
            }
            if !is_nan(Format::F16, half) {
                let value = Half::from_bits(u128::from(half));
                let expected = value.round_to_integral(round).value.to_bits() as u64;
                let actual = round_to_integral(half, Format::F16, rounded(rounding));
                assert_eq!(actual, expected);
            }
        }
    }
}

#[test]
fn converts_to_integers() {
    let zero = rounded(Rounding::Zero);
    let f32_to =
        |value: f32, width, signed| to_int(f32_bits(value), Format::F32, zero, width, signed);
    let f64_to =
        |value: f64, width, signed| to_int(value.to_bits(), Format::F64, zero, width, signed);
    assert_eq!(f32_to(-1.9, 32, true), 0xffff_ffff);
    assert_eq!(f32_to(-1.9, 32, false), 0);
    assert_eq!(f32_to(3e9, 32, true), 0x7fff_ffff);
    assert_eq!(f32_to(-3e9, 32, true), 0x8000_0000);
    assert_eq!(f32_to(5e9, 32, false), 0xffff_ffff);
    assert_eq!(f32_to(300.0, 8, false), 255);
    assert_eq!(f32_to(-300.0, 8, true), 0x80);
    assert_eq!(f32_to(-1.0, 16, true), 0xffff);
    assert_eq!(f32_to(f32::INFINITY, 64, true), i64::MAX as u64);
    assert_eq!(f32_to(f32::INFINITY, 64, false), u64::MAX);
    assert_eq!(f32_to(f32::NEG_INFINITY, 64, true), 1 << 63);
    assert_eq!(
        f64_to(18_446_744_073_709_549_568.0, 64, false),
        18_446_744_073_709_549_568
    );
    assert_eq!(f64_to(f64::MAX, 64, false), u64::MAX);
    for signed in [false, true] {
        assert_eq!(f32_to(f32::NAN, 32, signed), 0);
        assert_eq!(f32_to(f32::NAN, 8, signed), 0);
        assert_eq!(f32_to(f32::NAN, 64, signed), 1 << 63);
        assert_eq!(f64_to(f64::NAN, 64, signed), 1 << 63);
        assert_eq!(f64_to(f64::NAN, 32, signed), 1 << 31);
        assert_eq!(f64_to(f64::NAN, 16, signed), 1 << 15);
        assert_eq!(to_int(0x7fff, Format::F16, zero, 32, signed), 0);
    }
    let round = |value: f32, rounding| {
        to_int(f32_bits(value), Format::F32, rounded(rounding), 32, true) as u32 as i32
    };
    assert_eq!(round(2.5, Rounding::Nearest), 2);
    assert_eq!(round(3.5, Rounding::Nearest), 4);
    assert_eq!(round(-2.5, Rounding::Away), -3);
    assert_eq!(round(-2.5, Rounding::Down), -3);
    assert_eq!(round(-2.5, Rounding::Up), -2);
    assert_eq!(round(1e-40, Rounding::Up), 1);
    let m = Modifiers {
        rounding: Rounding::Up,
        ..FTZ
    };
    assert_eq!(to_int(f32_bits(1e-40), Format::F32, m, 32, true), 0);
    let mut random = Random(9);
    for _ in 0..20_000 {
        let value = f32::from_bits(random.next() as u32);
        if !value.is_nan() {
            assert_eq!(f32_to(value, 64, true), value as i64 as u64);
            assert_eq!(f32_to(value, 32, false), u64::from(value as u32));
            assert_eq!(f32_to(value, 16, true), u64::from(value as i16 as u16));
            assert_eq!(f64_to(f64::from(value), 64, false), value as u64);
        }
    }
}

#[test]
fn converts_from_integers() {
    let f32_from = |bits, width, signed, rounding| {
        from_int(bits, width, signed, Format::F32, rounded(rounding))
    };
    assert_eq!(f32_from(0xff, 8, true, Rounding::Nearest), f32_bits(-1.0));
    assert_eq!(f32_from(0xff, 8, false, Rounding::Nearest), f32_bits(255.0));
    assert_eq!(
        f32_from(0x1_0000_0001, 32, true, Rounding::Nearest),
        f32_bits(1.0)
    );
    assert_eq!(f32_from(0, 32, true, Rounding::Down), 0);
    assert_eq!(
        f32_from(u64::MAX, 64, false, Rounding::Nearest),
        f32_bits(2.0_f32.powi(64))
    );
    assert_eq!(f32_from(u64::MAX, 64, false, Rounding::Zero), 0x5f7f_ffff);
    assert_eq!(
        f32_from(0x0100_0001, 32, true, Rounding::Nearest),
        0x4b80_0000
    );
    assert_eq!(f32_from(0x0100_0001, 32, true, Rounding::Up), 0x4b80_0001);
    let minus = -0x0100_0001_i64 as u64;
    assert_eq!(f32_from(minus, 64, true, Rounding::Up), 0xcb80_0000);
    assert_eq!(f32_from(minus, 64, true, Rounding::Down), 0xcb80_0001);
    assert_eq!(from_int(70_000, 32, false, Format::F16, PLAIN), 0x7c00);
    assert_eq!(from_int(70_000, 32, false, Format::F16, SATFINITE), 0x7bff);
    assert_eq!(
        from_int(70_000, 32, false, Format::F16, rounded(Rounding::Zero)),
        0x7bff
    );
    assert_eq!(from_int(5, 32, true, Format::F16, SAT), 0x3c00);
    let mut random = Random(10);
    for _ in 0..10_000 {
        let bits = random.next() >> random.below(64);
        if bits == 0 {
            continue;
        }
        for rounding in ROUNDINGS {
            for format in [Format::F16, Format::Bf16, Format::F32, Format::F64] {
                let m = rounded(rounding);
                let expected = round_exact(format, rounding, i128::from(bits), 0);
                assert_eq!(from_int(bits, 64, false, format, m), expected);
                let expected = round_exact(format, rounding, i128::from(bits as i64), 0);
                assert_eq!(from_int(bits, 64, true, format, m), expected);
            }
        }
    }
}

#[test]
fn min_and_max_tables() {
    let nan = Modifiers { nan: true, ..PLAIN };
    let xorsign = Modifiers {
        xorsign: true,
        ..PLAIN
    };
    for format in [Format::F16, Format::Bf16, Format::F32, Format::F64] {
        let min = |m, a, b| arith(Arith::Min, format, m, a, b, u64::MAX);
        let max = |m, a, b| arith(Arith::Max, format, m, a, b, u64::MAX);
        let (one, sign, infinity) = (format.one(), format.sign_bit(), format.exponent_mask());
        let quiet = infinity | 1 << (format.mantissa_bits() - 1) | 1;
        let canonical = if format == Format::F64 {
            quiet
        } else {
            format.canonical_nan()
        };
        let ascending = [
            sign | infinity,
            sign | one,
            sign | 1,
            sign,
            0,
            1,
            one,
            infinity,
        ];
        for (i, &a) in ascending.iter().enumerate() {
            for (j, &b) in ascending.iter().enumerate() {
                assert_eq!(min(PLAIN, a, b), ascending[i.min(j)]);
                assert_eq!(max(PLAIN, a, b), ascending[i.max(j)]);
            }
            for value in [min(PLAIN, a, quiet), max(PLAIN, quiet, a)] {
                assert_eq!(value, a);
            }
            for value in [min(nan, a, quiet), max(nan, quiet, a)] {
                assert_eq!(value, canonical);
            }
        }
        assert_eq!(min(PLAIN, quiet, quiet), canonical);
        assert_eq!(min(xorsign, sign | one, 1), sign | 1);
        assert_eq!(max(xorsign, sign | one, sign | 1), one);
        assert_eq!(max(xorsign, sign | one, quiet), sign | one);
        assert_eq!(max(xorsign, sign | quiet, one), sign | one);
        assert_eq!(
            min(xorsign, sign | quiet, quiet),
            canonical | { if format == Format::F64 { sign } else { 0 } }
        );
    }
    assert_eq!(arith(Arith::Max, Format::F32, FTZ, 1, 0x8000_0001, 0), 0);
}

#[test]
fn nan_results() {
    let f32_nan = 0xff80_0001;
    let one = Format::F32.one();
    for op in OPS {
        if op != Arith::Copysign && op != Arith::Min && op != Arith::Max {
            assert_eq!(
                arith(op, Format::F32, PLAIN, f32_nan, one, one),
                0x7fff_ffff
            );
            assert_eq!(arith(op, Format::F16, PLAIN, 0xfc01, 0x3c00, 0), 0x7fff);
            assert_eq!(arith(op, Format::Bf16, PLAIN, 0xff81, 0x3f80, 0), 0x7fff);
        }
    }
    assert_eq!(
        arith(Arith::Copysign, Format::F32, FTZ, 1 << 31, f32_nan, 0),
        f32_nan
    );
    assert_eq!(
        arith(Arith::Copysign, Format::F32, FTZ, 0, f32_nan, 0),
        0x7f80_0001
    );
    let infinity = 0x7ff0_0000_0000_0000;
    let (first, second) = (0xfff0_0000_0000_0005, 0x7ff8_0000_0000_0006);
    let run = |op, a, b, c| arith(op, Format::F64, PLAIN, a, b, c);
    assert_eq!(run(Arith::Add, first, second, 0), 0xfff8_0000_0000_0005);
    assert_eq!(run(Arith::Add, 0, second, first), second);
    assert_eq!(run(Arith::Fma, 0, infinity, second), second);
    assert_eq!(
        run(Arith::Sub, infinity, infinity, 0),
        0xfff8_0000_0000_0000
    );
    assert_eq!(
        run(Arith::Sqrt, 0xbff0_0000_0000_0000, 0, 0),
        0xfff8_0000_0000_0000
    );
    assert_eq!(run(Arith::Abs, first, 0, 0), first);
    assert_eq!(run(Arith::Neg, first, 0, 0), first);
    let m = rounded(Rounding::Up);
    assert_eq!(
        arith(Arith::Mul, Format::F32, m, 0, 0x7f80_0000, 0),
        0x7fff_ffff
    );
    assert_eq!(arith(Arith::Fma, Format::F16, RELU, 0, 0x7c00, 0), 0x7fff);
    assert_eq!(arith(Arith::Fma, Format::F32, SAT, 0, 0x7f80_0000, 0), 0);
}

#[test]
fn arithmetic_modifiers() {
    let one = Format::F32.one();
    let run = |op, m, a, b| arith(op, Format::F32, m, a, b, 0);
    assert_eq!(run(Arith::Add, FTZ, 0x8000_0001, 0x8000_0001), 0x8000_0000);
    assert_eq!(run(Arith::Add, FTZ, 1, one), one);
    // 2^-126 - 1.5 * 2^-126 is subnormal.
    assert_eq!(run(Arith::Sub, FTZ, 0x0080_0000, 0x00c0_0000), 0x8000_0000);
    assert_eq!(
        run(Arith::Sub, PLAIN, 0x0080_0000, 0x00c0_0000),
        0x8040_0000
    );
    assert_eq!(run(Arith::Neg, FTZ, 1, 0), 0x8000_0000);
    assert_eq!(run(Arith::Abs, FTZ, 0x8000_0001, 0), 0);
    assert_eq!(run(Arith::Rcp, FTZ, 0x8000_0001, 0), 0xff80_0000);
    assert_eq!(run(Arith::Rcp, FTZ, 0x7f00_0001, 0), 0);
    assert_eq!(run(Arith::Add, SAT, one, one), one);
    assert_eq!(run(Arith::Sub, SAT, one, f32_bits(2.0)), 0);
    assert_eq!(arith(Arith::Fma, Format::F16, RELU, 0x3c00, 0xbc00, 0), 0);
    assert_eq!(arith(Arith::Add, Format::F16, FTZ, 1, 1, 0), 0);
    assert_eq!(arith(Arith::Add, Format::F16, PLAIN, 1, 1, 0), 2);
    assert_eq!(arith(Arith::Add, Format::F64, FTZ, 1, 1, 0), 2);
    // (1 + 2^-10)^2 + 2^-11 is just above a tie. The rounded product would make it a tie.
    assert_eq!(
        arith(Arith::Fma, Format::F16, PLAIN, 0x3c01, 0x3c01, 0x1000),
        0x3c03
    );
    assert_eq!(run(Arith::Sqrt, PLAIN, 0x8000_0000, 0), 0x8000_0000);
    assert_eq!(run(Arith::Sqrt, FTZ, 0x8000_0001, 0), 0x8000_0000);
    assert_eq!(run(Arith::Sqrt, PLAIN, 0x8000_0001, 0), 0x7fff_ffff);
}

#[test]
fn approximations_return_the_listed_values() {
    let run = |op, a: f32| {
        let bits = arith(op, Format::F32, PLAIN, f32_bits(a), u64::MAX, u64::MAX);
        f32::from_bits(bits as u32)
    };
    let infinity = f32::INFINITY;
    // (operation, results of -inf, -1, -0, +0, +inf); NaN is 9.
    let table = [
        (Arith::RcpApprox, [-0.0, -1.0, -infinity, infinity, 0.0]),
        (Arith::RsqrtApprox, [9.0, 9.0, -infinity, infinity, 0.0]),
        (Arith::SqrtApprox, [9.0, 9.0, -0.0, 0.0, infinity]),
        (Arith::Ex2, [0.0, 0.5, 1.0, 1.0, infinity]),
        (Arith::Lg2, [9.0, 9.0, -infinity, -infinity, infinity]),
        (Arith::Sin, [9.0, (-1.0_f64).sin() as f32, -0.0, 0.0, 9.0]),
        (Arith::Cos, [9.0, 1.0_f64.cos() as f32, 1.0, 1.0, 9.0]),
        (
            Arith::Tanh,
            [-1.0, (-1.0_f64).tanh() as f32, -0.0, 0.0, 1.0],
        ),
    ];
    for (op, results) in table {
        let operands = [-infinity, -1.0, -0.0, 0.0, infinity];
        for (operand, result) in operands.into_iter().zip(results) {
            let expected = if result == 9.0 {
                0x7fff_ffff
            } else {
                result.to_bits()
            };
            assert_eq!(run(op, operand).to_bits(), expected, "{op:?} {operand}");
        }
    }
    assert_eq!(run(Arith::Ex2, -149.0).to_bits(), 1);
    assert_eq!(run(Arith::Ex2, 10.0), 1024.0);
    assert_eq!(run(Arith::Lg2, 1e-45), -149.0);
    assert_eq!(arith(Arith::Lg2, Format::F32, FTZ, 1, 0, 0), 0xff80_0000);
    assert_eq!(
        arith(Arith::Ex2, Format::F32, FTZ, f32_bits(-127.0), 0, 0),
        0
    );
    assert_eq!(
        arith(Arith::RsqrtApprox, Format::F32, FTZ, 0x8000_0001, 0, 0),
        0xff80_0000
    );
    assert_eq!(arith(Arith::Ex2, Format::F16, PLAIN, 0x3c00, 0, 0), 0x4000);
    assert_eq!(arith(Arith::Ex2, Format::Bf16, FTZ, 0x8001, 0, 0), 0x3f80);
    assert_eq!(
        arith(Arith::Tanh, Format::Bf16, PLAIN, 0xff80, 0, 0),
        0xbf80
    );

    let div = |op, a: f32, b: f32| {
        let bits = arith(op, Format::F32, PLAIN, f32_bits(a), f32_bits(b), 0);
        f32::from_bits(bits as u32)
    };
    let huge = 1.5 * 2.0_f32.powi(126);
    assert_eq!(div(Arith::DivApprox, 1.0, -4.0), -0.25);
    assert_eq!(
        div(Arith::DivApprox, 1.0, 2.0_f32.powi(126)),
        2.0_f32.powi(-126)
    );
    assert_eq!(div(Arith::DivApprox, -1.0, huge).to_bits(), 0x8000_0000);
    assert_eq!(div(Arith::DivApprox, infinity, huge).to_bits(), 0x7fff_ffff);
    assert_eq!(div(Arith::DivApprox, 1.0, -infinity).to_bits(), 0x8000_0000);
    assert_eq!(div(Arith::DivFull, huge, huge), 1.0);

    let gross = |op, bits| arith(op, Format::F64, FTZ, bits, 0, 0);
    assert_eq!(
        gross(Arith::RcpApprox, 4.0_f64.to_bits()),
        0.25_f64.to_bits()
    );
    assert_eq!(
        gross(Arith::RsqrtApprox, 4.0_f64.to_bits()),
        0.5_f64.to_bits()
    );
    assert_eq!(
        gross(Arith::RcpApprox, 3.0_f64.to_bits()),
        0x3fd5_5555_0000_0000
    );
    assert_eq!(
        gross(Arith::RcpApprox, (1 << 63) | 1),
        0xfff0_0000_0000_0000
    );
    assert_eq!(
        gross(Arith::RsqrtApprox, (1 << 63) | 1),
        0xfff0_0000_0000_0000
    );
    assert_eq!(gross(Arith::RcpApprox, f64::MAX.to_bits()), 0);
    assert_eq!(
        gross(Arith::RcpApprox, f64::NAN.to_bits()),
        0x7fff_ffff_0000_0000
    );
    assert_eq!(
        gross(Arith::RsqrtApprox, (-1.0_f64).to_bits()),
        0x7fff_ffff_0000_0000
    );
    let accurate = arith(
        Arith::RsqrtApprox,
        Format::F64,
        PLAIN,
        16.0_f64.to_bits(),
        0,
        0,
    );
    assert_eq!(accurate, 0.25_f64.to_bits());
}

#[test]
fn classifies() {
    let kinds = [
        "finite",
        "infinite",
        "number",
        "notanumber",
        "normal",
        "subnormal",
    ];
    let table = [
        (0x8000_0000, [true, false, true, false, true, false]),
        (0x0000_0001, [true, false, true, false, false, true]),
        (0x3f80_0000, [true, false, true, false, true, false]),
        (0xff80_0000, [false, true, true, false, false, false]),
        (0x7f80_0001, [false, false, false, true, false, false]),
    ];
    for (bits, results) in table {
        for (kind, result) in kinds.into_iter().zip(results) {
            assert_eq!(
                testp(kind, Format::F32, bits),
                Some(result),
                "{kind} {bits:x}"
            );
        }
    }
    assert_eq!(testp("odd", Format::F32, 0), None);
}

#[test]
fn every_function_accepts_all_bits() {
    let mut random = Random(12);
    let fits = |format: Format, bits: u64| assert_eq!(format.mask(bits), bits, "{format:?}");
    for _ in 0..4_000 {
        let flags = random.next();
        let m = Modifiers {
            rounding: ROUNDINGS[random.below(5) as usize],
            ftz: flags & 1 != 0,
            saturate: flags & 6 == 0,
            satfinite: flags & 8 != 0,
            relu: flags & 16 != 0,
            nan: flags & 32 != 0,
            xorsign: flags & 64 != 0,
        };
        let format = ALL[random.below(7) as usize];
        let [a, b, c] = [(); 3].map(|()| {
            let special = [
                0,
                1,
                format.largest(),
                format.exponent_mask(),
                u64::MAX,
                1 << 63,
            ];
            match random.below(4) {
                0 => special[random.below(6) as usize],
                1 => random.next(),
                _ => random.bits(format),
            }
        });
        for op in OPS {
            fits(format, arith(op, format, m, a, b, c));
        }
        for to in ALL {
            fits(to, convert(a, format, to, m));
            for width in [8, 16, 32, 64] {
                fits(to, from_int(a, width, flags & 128 != 0, to, m));
                let integer = to_int(a, to, m, width, flags & 128 != 0);
                assert_eq!(integer & (u64::MAX >> (64 - width)), integer);
            }
        }
        fits(format, round_to_integral(a, format, m));
        testp("normal", format, a);
    }
}
