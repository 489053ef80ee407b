//! Floating-point semantics of PTX.
//!
//! Every value is a bit pattern in the low bits of a `u64`; the upper bits of results are zero,
//! and the upper bits of operands are ignored. Rules without another source come from the PTX ISA,
//! sections "Floating-Point Instructions", "Half Precision Floating-Point Instructions" and "cvt".
//!
//! The PTX ISA leaves the NaN results of f32, f16 and bf16 instructions unspecified. This module
//! returns the canonical NaN that NVIDIA GPUs return: `0x7fffffff` for f32, `0x7fff` for f16 and
//! bf16. For f64, "NaN payloads are supported": the result is the first NaN operand, quieted. An
//! invalid f64 operation returns `0xfff8000000000000`, the value of `CUDART_NAN`.

use rustc_apfloat::ieee::{
    BFloat, Double, Float8E4M3FN, Float8E5M2, Half, IeeeFloat, Quad, Semantics, Single,
};
use rustc_apfloat::{Float, FloatConvert, Round};

/// Floating-point format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// 8 bits, 4 of exponent, 3 of mantissa. Has no infinities; `0x7f` and `0xff` are NaN.
    E4m3,
    /// 8 bits, 5 of exponent, 2 of mantissa.
    E5m2,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// A binary32 with a mantissa of 10 bits. The low 13 bits are zero in results and ignored in
    /// operands.
    Tf32,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
}

/// Semantics of tf32 as a number of 19 bits, which are the upper bits of the stored 32 bits.
struct Tf32Semantics;

impl Semantics for Tf32Semantics {
    const BITS: usize = 19;
    const EXP_BITS: usize = 8;
}

type Tf32Float = IeeeFloat<Tf32Semantics>;

/// Evaluates an expression with a type parameter bound to the `rustc_apfloat` type of a format.
macro_rules! with_format {
    ($format:expr, $F:ident => $body:expr) => {
        match $format {
            Format::E4m3 => {
                type $F = Float8E4M3FN;
                $body
            }
            Format::E5m2 => {
                type $F = Float8E5M2;
                $body
            }
            Format::F16 => {
                type $F = Half;
                $body
            }
            Format::Bf16 => {
                type $F = BFloat;
                $body
            }
            Format::Tf32 => {
                type $F = Tf32Float;
                $body
            }
            Format::F32 => {
                type $F = Single;
                $body
            }
            Format::F64 => {
                type $F = Double;
                $body
            }
        }
    };
}

impl Format {
    /// Returns the number of bits that a value occupies in a register.
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::E4m3 | Self::E5m2 => 8,
            Self::F16 | Self::Bf16 => 16,
            Self::Tf32 | Self::F32 => 32,
            Self::F64 => 64,
        }
    }

    /// Returns the number of stored mantissa bits. Tf32 counts its 13 low bits.
    fn mantissa_bits(self) -> u32 {
        match self {
            Self::E4m3 => 3,
            Self::E5m2 => 2,
            Self::F16 => 10,
            Self::Bf16 => 7,
            Self::Tf32 | Self::F32 => 23,
            Self::F64 => 52,
        }
    }

    /// Clears the bits of a register that are not part of the value.
    fn mask(self, bits: u64) -> u64 {
        match self {
            Self::Tf32 => bits & 0xffff_e000,
            _ => bits & (u64::MAX >> (64 - self.bits())),
        }
    }

    fn sign_bit(self) -> u64 {
        1 << (self.bits() - 1)
    }

    fn mantissa_mask(self) -> u64 {
        (1 << self.mantissa_bits()) - 1
    }

    /// Returns the exponent field with all bits set. This is +infinity, except in E4m3.
    fn exponent_mask(self) -> u64 {
        self.sign_bit() - (1 << self.mantissa_bits())
    }

    fn bias(self) -> i64 {
        (1 << (self.bits() - self.mantissa_bits() - 2)) - 1
    }

    /// Returns the encoding of 1.0.
    fn one(self) -> u64 {
        (self.bias() as u64) << self.mantissa_bits()
    }

    /// Returns the largest finite number (`MAX_NORM` in the PTX ISA).
    fn largest(self) -> u64 {
        match self {
            Self::E4m3 => 0x7e,
            Self::Tf32 => 0x7f7f_e000,
            _ => self.exponent_mask() - 1,
        }
    }

    /// Returns the NaN of operations that do not propagate an operand.
    fn canonical_nan(self) -> u64 {
        match self {
            Self::E4m3 | Self::E5m2 => 0x7f,
            Self::F16 | Self::Bf16 => 0x7fff,
            Self::Tf32 => 0x7fff_e000,
            Self::F32 => 0x7fff_ffff,
            Self::F64 => 0xfff8_0000_0000_0000,
        }
    }

    fn is_negative(self, bits: u64) -> bool {
        bits & self.sign_bit() != 0
    }

    fn magnitude(self, bits: u64) -> u64 {
        self.mask(bits) & !self.sign_bit()
    }

    fn is_infinite(self, bits: u64) -> bool {
        self != Self::E4m3 && self.magnitude(bits) == self.exponent_mask()
    }

    fn is_subnormal(self, bits: u64) -> bool {
        let magnitude = self.magnitude(bits);
        magnitude != 0 && magnitude & self.exponent_mask() == 0
    }

    /// Replaces a subnormal number with a zero of the same sign.
    fn flush(self, bits: u64) -> u64 {
        if self.is_subnormal(bits) {
            bits & self.sign_bit()
        } else {
            self.mask(bits)
        }
    }

    /// Maps numbers to integers of the same order, with -0 before +0. NaN must be excluded.
    fn order_key(self, bits: u64) -> i128 {
        let magnitude = i128::from(self.magnitude(bits));
        if self.is_negative(bits) {
            -1 - magnitude
        } else {
            magnitude
        }
    }
}

/// Rounding mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To nearest, ties to even (`.rn`, `.rni`).
    #[default]
    Nearest,
    /// Toward zero (`.rz`, `.rzi`).
    Zero,
    /// Toward negative infinity (`.rm`, `.rmi`).
    Down,
    /// Toward positive infinity (`.rp`, `.rpi`).
    Up,
    /// To nearest, ties away from zero (`.rna`).
    Away,
}

impl Rounding {
    fn to_apfloat(self) -> Round {
        match self {
            Self::Nearest => Round::NearestTiesToEven,
            Self::Zero => Round::TowardZero,
            Self::Down => Round::TowardNegative,
            Self::Up => Round::TowardPositive,
            Self::Away => Round::NearestTiesToAway,
        }
    }

    /// Rounds to an integral value. Keeps the sign of zero, infinities and NaN.
    fn round_f64(self, value: f64) -> f64 {
        match self {
            Self::Nearest => value.round_ties_even(),
            Self::Zero => value.trunc(),
            Self::Down => value.floor(),
            Self::Up => value.ceil(),
            Self::Away => value.round(),
        }
    }
}

/// Modifiers of a floating-point instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Modifiers {
    /// Rounding mode.
    pub(crate) rounding: Rounding,
    /// `.ftz`: flushes subnormal operands and results to zeros of the same sign. Conversions flush
    /// only f32 operands and f32 results. f64 operands and results are flushed only by
    /// `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`.
    pub(crate) ftz: bool,
    /// `.sat`: clamps the result to [+0.0, 1.0]; NaN becomes +0.0.
    pub(crate) saturate: bool,
    /// `.satfinite`: replaces a result that exceeds the largest finite number of the destination.
    /// Applies to conversions only, and always to 8-bit destinations.
    pub(crate) satfinite: bool,
    /// `.relu`: replaces a result with the sign bit set by +0.0, and NaN by the canonical NaN.
    pub(crate) relu: bool,
    /// `.NaN`: `min` and `max` return NaN if an operand is NaN.
    pub(crate) nan: bool,
    /// `.xorsign.abs`: `min` and `max` compare magnitudes and multiply the signs.
    pub(crate) xorsign: bool,
}

/// Floating-point operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arith {
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `a * b`.
    Mul,
    /// `a / b`, correctly rounded.
    Div,
    /// `a * b + c`, rounded once.
    Fma,
    /// Square root of `a`, correctly rounded.
    Sqrt,
    /// `1 / a`, correctly rounded.
    Rcp,
    /// Minimum of `a` and `b`.
    Min,
    /// Maximum of `a` and `b`.
    Max,
    /// `-a`.
    Neg,
    /// `|a|`.
    Abs,
    /// The magnitude of `b` with the sign of `a`. Ignores all modifiers.
    Copysign,
    /// `rcp.approx`. In F64 it is `rcp.approx.ftz.f64`, whose result has a mantissa of 20 bits.
    RcpApprox,
    /// `rsqrt.approx`. In F64 with `ftz`, the mantissa of the result has 20 bits.
    RsqrtApprox,
    /// `sqrt.approx`.
    SqrtApprox,
    /// `div.approx`.
    DivApprox,
    /// `div.full`.
    DivFull,
    /// `ex2.approx`: 2 to the power of `a`.
    Ex2,
    /// `lg2.approx`: binary logarithm of `a`.
    Lg2,
    /// `sin.approx`.
    Sin,
    /// `cos.approx`.
    Cos,
    /// `tanh.approx`.
    Tanh,
}

impl Arith {
    /// Returns the number of operands.
    fn arity(self) -> usize {
        match self {
            Self::Fma => 3,
            Self::Add | Self::Sub | Self::Mul | Self::Div | Self::Min | Self::Max => 2,
            Self::Copysign | Self::DivApprox | Self::DivFull => 2,
            Self::Sqrt | Self::Rcp | Self::Neg | Self::Abs => 1,
            Self::RcpApprox | Self::RsqrtApprox | Self::SqrtApprox => 1,
            Self::Ex2 | Self::Lg2 | Self::Sin | Self::Cos | Self::Tanh => 1,
        }
    }
}

/// Returns the result of an operation in `format`. Ignores operands that the operation lacks.
///
/// Approximate operations are computed in f64 and rounded to nearest. They return the special
/// values that the PTX ISA lists. On hardware the last bits of other results may differ, within
/// the error bounds of the PTX ISA.
pub(crate) fn arith(op: Arith, format: Format, m: Modifiers, a: u64, b: u64, c: u64) -> u64 {
    let [a, b, c] = [a, b, c].map(|bits| format.mask(bits));
    match op {
        Arith::Copysign => return format.magnitude(b) | (a & format.sign_bit()),
        Arith::RcpApprox if format == Format::F64 => return gross_approximation(a, |x| 1.0 / x),
        Arith::RsqrtApprox if format == Format::F64 && m.ftz => {
            return gross_approximation(a, |x| 1.0 / x.sqrt());
        }
        _ => {}
    }
    let m = Modifiers {
        ftz: m.ftz && format != Format::F64,
        ..m
    };
    let [a, b, c] = [a, b, c].map(|bits| if m.ftz { format.flush(bits) } else { bits });
    let operands = &[a, b, c][..op.arity()];
    let result = match op {
        Arith::Min | Arith::Max => min_max(op, format, m, a, b),
        Arith::Neg | Arith::Abs if is_nan(format, a) => match format {
            // "For abs.f64, NaN input is passed through unchanged." The CUDA C++ Programming Guide
            // says the same of the negation of f64.
            Format::F64 => a,
            _ => format.canonical_nan(),
        },
        Arith::Neg => a ^ format.sign_bit(),
        Arith::Abs => format.magnitude(a),
        _ if operands.iter().any(|&bits| is_nan(format, bits)) => propagate_nan(format, operands),
        _ => {
            let bits = compute(op, format, m.rounding, a, b, c);
            if is_nan(format, bits) {
                format.canonical_nan()
            } else {
                bits
            }
        }
    };
    finish(format, m, result)
}

/// Converts a value from one format to another.
///
/// A NaN becomes the canonical NaN of the destination, because the PTX ISA requires only a NaN. An
/// f64 destination keeps the payload, and quiets it. 8-bit destinations are always saturated as
/// `.satfinite` requires: "If the absolute value of input (ignoring sign) is greater than MAX_NORM
/// of the specified destination format, then the result is sign-preserved MAX_NORM".
pub(crate) fn convert(bits: u64, from: Format, to: Format, m: Modifiers) -> u64 {
    let bits = flush_source(bits, from, m);
    let result = if !is_nan(from, bits) {
        narrow(widen(bits, from), to, m)
    } else if to == Format::F64 {
        let payload = (bits & from.mantissa_mask()) << (52 - from.mantissa_bits());
        let sign = u64::from(from.is_negative(bits)) << 63;
        sign | Format::F64.exponent_mask() | 1 << 51 | payload
    } else {
        to.canonical_nan()
    };
    finish(
        to,
        Modifiers {
            ftz: m.ftz && to == Format::F32,
            ..m
        },
        result,
    )
}

/// Rounds a value to an integral value of the same format (`cvt.rni.f32.f32`).
pub(crate) fn round_to_integral(bits: u64, format: Format, m: Modifiers) -> u64 {
    let bits = flush_source(bits, format, m);
    if is_nan(format, bits) {
        return finish(format, m, propagate_nan(format, &[bits]));
    }
    // The rounded value is representable in `format`, so that `narrow` is exact.
    let rounded = m.rounding.round_f64(widen(bits, format));
    finish(format, m, narrow(rounded, format, m))
}

/// Rounds a value to an integer and clamps it to the range of the destination, an integer of
/// `width` bits. The upper bits of the result are zero. `width` must be in `1..=64`.
///
/// NaN: "1. Zero if source is not .f64 and destination is not .s64, .u64. 2. Otherwise
/// 1 << (BitWidth(dst) - 1)".
pub(crate) fn to_int(bits: u64, from: Format, m: Modifiers, width: u32, signed: bool) -> u64 {
    let bits = flush_source(bits, from, m);
    if is_nan(from, bits) {
        return if from == Format::F64 || width == 64 {
            1 << (width - 1)
        } else {
            0
        };
    }
    let (min, max) = if signed {
        (-(1_i128 << (width - 1)), (1_i128 << (width - 1)) - 1)
    } else {
        (0, (1_i128 << width) - 1)
    };
    // The cast saturates.
    let integer = m.rounding.round_f64(widen(bits, from)) as i128;
    integer.clamp(min, max) as u64 & (u64::MAX >> (64 - width))
}

/// Converts the integer in the low `width` bits to a floating-point format. `width` must be in
/// `1..=64`.
pub(crate) fn from_int(bits: u64, width: u32, signed: bool, to: Format, m: Modifiers) -> u64 {
    let unused = 64 - width;
    let integer = if signed {
        i128::from(((bits << unused) as i64) >> unused)
    } else {
        i128::from(bits << unused >> unused)
    };
    let result = match (to, m.rounding) {
        (Format::F32, Rounding::Nearest) => u64::from((integer as f32).to_bits()),
        (Format::F64, Rounding::Nearest) => (integer as f64).to_bits(),
        _ => with_format!(to, F => {
            store(to, F::from_i128_r(integer, m.rounding.to_apfloat()).value)
        }),
    };
    finish(to, m, clamp_finite(result, integer < 0, to, m))
}

/// Returns whether a value is NaN.
pub(crate) fn is_nan(format: Format, bits: u64) -> bool {
    let magnitude = format.magnitude(bits);
    match format {
        Format::E4m3 => magnitude == 0x7f,
        _ => magnitude > format.exponent_mask(),
    }
}

/// Returns the result of `testp.kind`, or `None` if `kind` is unknown. "As a special case, positive
/// and negative zero are considered normal numbers."
pub(crate) fn testp(kind: &str, format: Format, bits: u64) -> Option<bool> {
    let nan = is_nan(format, bits);
    let finite = !nan && !format.is_infinite(bits);
    match kind {
        "finite" => Some(finite),
        "infinite" => Some(format.is_infinite(bits)),
        "number" => Some(!nan),
        "notanumber" => Some(nan),
        "normal" => Some(finite && !format.is_subnormal(bits)),
        "subnormal" => Some(format.is_subnormal(bits)),
        _ => None,
    }
}

/// Returns the NaN that results from operands of which one is NaN.
fn propagate_nan(format: Format, operands: &[u64]) -> u64 {
    match operands.iter().find(|&&bits| is_nan(format, bits)) {
        Some(&bits) if format == Format::F64 => bits | 1 << 51,
        _ => format.canonical_nan(),
    }
}

/// Applies `.ftz`, `.relu` and `.sat` to a result.
fn finish(format: Format, m: Modifiers, bits: u64) -> u64 {
    let bits = if m.ftz && format != Format::F64 {
        format.flush(bits)
    } else {
        bits
    };
    let nan = is_nan(format, bits);
    if m.saturate {
        return if nan || format.is_negative(bits) {
            0
        } else {
            bits.min(format.one())
        };
    }
    match (m.relu, nan) {
        (true, true) => format.canonical_nan(),
        (true, false) if format.is_negative(bits) => 0,
        _ => bits,
    }
}

/// Clears the unused bits of the source of a conversion and flushes an f32 under `.ftz`.
fn flush_source(bits: u64, from: Format, m: Modifiers) -> u64 {
    if m.ftz && from == Format::F32 {
        from.flush(bits)
    } else {
        from.mask(bits)
    }
}

/// Converts a value to f64 exactly. NaN must be excluded.
fn widen(bits: u64, format: Format) -> f64 {
    if format == Format::F64 {
        return f64::from_bits(bits);
    }
    let magnitude = format.magnitude(bits);
    let fraction = magnitude & format.mantissa_mask();
    let exponent = (magnitude >> format.mantissa_bits()) as i64;
    let value = if format.is_infinite(bits) {
        f64::INFINITY
    } else {
        let significand = if exponent == 0 {
            fraction
        } else {
            fraction | 1 << format.mantissa_bits()
        };
        let exponent = exponent.max(1) - format.bias() - i64::from(format.mantissa_bits());
        // The power is a normal number, and the product is exact, because the exponents of the
        // other formats are at least -149.
        significand as f64 * f64::from_bits(((exponent + 1023) as u64) << 52)
    };
    if format.is_negative(bits) {
        -value
    } else {
        value
    }
}

/// Rounds a number to `to` and applies `.satfinite`. NaN must be excluded.
fn narrow(value: f64, to: Format, m: Modifiers) -> u64 {
    let result = match (to, m.rounding) {
        (Format::F64, _) => value.to_bits(),
        (Format::F32, Rounding::Nearest) => u64::from((value as f32).to_bits()),
        _ => {
            let wide = Double::from_bits(u128::from(value.to_bits()));
            with_format!(to, F => store(to, convert_apfloat::<_, F>(wide, m.rounding)))
        }
    };
    clamp_finite(result, value.is_sign_negative(), to, m)
}

/// Replaces the result of an overflow by the largest finite number under `.satfinite`, and always
/// in 8-bit formats. The unrounded value must be a number, so that NaN in E4m3 is an overflow.
fn clamp_finite(bits: u64, negative: bool, to: Format, m: Modifiers) -> u64 {
    let overflow = to.is_infinite(bits) || is_nan(to, bits);
    if overflow && (m.satfinite || to.bits() == 8) {
        to.largest() | if negative { to.sign_bit() } else { 0 }
    } else {
        bits
    }
}

fn convert_apfloat<S: FloatConvert<F>, F: Float>(value: S, rounding: Rounding) -> F {
    let mut loses_info = false;
    value
        .convert_r(rounding.to_apfloat(), &mut loses_info)
        .value
}

fn load<F: Float>(format: Format, bits: u64) -> F {
    F::from_bits(u128::from(if format == Format::Tf32 {
        bits >> 13
    } else {
        bits
    }))
}

fn store<F: Float>(format: Format, value: F) -> u64 {
    let bits = value.to_bits() as u64;
    if format == Format::Tf32 {
        bits << 13
    } else {
        bits
    }
}

/// Returns the minimum or maximum. "If values of both inputs are 0.0, then +0.0 > -0.0."
fn min_max(op: Arith, format: Format, m: Modifiers, a: u64, b: u64) -> u64 {
    let sign = (a ^ b) & format.sign_bit();
    let [x, y] = [a, b].map(|bits| {
        if m.xorsign {
            format.magnitude(bits)
        } else {
            bits
        }
    });
    let result = match (is_nan(format, a), is_nan(format, b)) {
        (false, false) => {
            let less = format.order_key(x) < format.order_key(y);
            if less == (op == Arith::Min) { x } else { y }
        }
        (true, false) if !m.nan => y,
        (false, true) if !m.nan => x,
        _ => return propagate_nan(format, &[a, b]),
    };
    if m.xorsign {
        format.magnitude(result) | sign
    } else {
        result
    }
}

/// Computes an operation on numbers. Any NaN may represent an invalid operation.
fn compute(op: Arith, format: Format, rounding: Rounding, a: u64, b: u64, c: u64) -> u64 {
    let approximation = match op {
        Arith::Add | Arith::Sub | Arith::Mul | Arith::Div | Arith::Fma | Arith::Rcp => {
            return compute_rounded(op, format, rounding, a, b, c);
        }
        Arith::Sqrt => return square_root(format, rounding, a),
        Arith::Min | Arith::Max | Arith::Neg | Arith::Abs | Arith::Copysign => {
            unreachable!("the caller handles operations that do not round")
        }
        Arith::RcpApprox => 1.0 / widen(a, format),
        Arith::RsqrtApprox => 1.0 / widen(a, format).sqrt(),
        Arith::SqrtApprox => widen(a, format).sqrt(),
        Arith::DivApprox => divide_approximately(widen(a, format), widen(b, format)),
        Arith::DivFull => widen(a, format) / widen(b, format),
        Arith::Ex2 => widen(a, format).exp2(),
        Arith::Lg2 => widen(a, format).log2(),
        Arith::Sin => widen(a, format).sin(),
        Arith::Cos => widen(a, format).cos(),
        Arith::Tanh => widen(a, format).tanh(),
    };
    if approximation.is_nan() {
        format.canonical_nan()
    } else {
        narrow(approximation, format, Modifiers::default())
    }
}

/// Computes an operation with one rounding. Uses the host's arithmetic where it rounds the same.
fn compute_rounded(op: Arith, format: Format, rounding: Rounding, a: u64, b: u64, c: u64) -> u64 {
    macro_rules! native {
        ($a:expr, $b:expr, $c:expr) => {
            match op {
                Arith::Add => $a + $b,
                Arith::Sub => $a - $b,
                Arith::Mul => $a * $b,
                Arith::Div => $a / $b,
                Arith::Fma => $a.mul_add($b, $c),
                _ => 1.0 / $a,
            }
        };
    }
    let f32 = |bits: u64| f32::from_bits(bits as u32);
    match (format, rounding) {
        (Format::F32, Rounding::Nearest) => u64::from(native!(f32(a), f32(b), f32(c)).to_bits()),
        (Format::F64, Rounding::Nearest) => {
            native!(f64::from_bits(a), f64::from_bits(b), f64::from_bits(c)).to_bits()
        }
        _ => with_format!(format, F => {
            let [a, b, c] = [a, b, c].map(|bits| load::<F>(format, bits));
            let round = rounding.to_apfloat();
            let result = match op {
                Arith::Add => a.add_r(b, round),
                Arith::Sub => a.sub_r(b, round),
                Arith::Mul => a.mul_r(b, round),
                Arith::Div => a.div_r(b, round),
                Arith::Fma => a.mul_add_r(b, c, round),
                _ => load::<F>(format, format.one()).div_r(a, round),
            };
            store(format, result.value)
        }),
    }
}

/// Returns the correctly rounded square root.
fn square_root(format: Format, rounding: Rounding, a: u64) -> u64 {
    let value = widen(a, format);
    if value < 0.0 {
        return format.canonical_nan();
    }
    if value == 0.0 || value.is_infinite() {
        return a;
    }
    match (format, rounding) {
        (Format::F32, Rounding::Nearest) => {
            return u64::from(f32::from_bits(a as u32).sqrt().to_bits());
        }
        (Format::F64, Rounding::Nearest) => return value.sqrt().to_bits(),
        _ => {}
    }
    // value = significand * 2^exponent. The shift makes the exponent even and leaves a root of at
    // least 63 bits. Rounding to 53 bits or fewer needs 2 more bits and the sticky bit.
    let field = (value.to_bits() >> 52) as i32;
    let fraction = value.to_bits() & Format::F64.mantissa_mask();
    let significand = u128::from(if field == 0 {
        fraction
    } else {
        fraction | 1 << 52
    });
    let exponent = field.max(1) - 1075;
    let shift = significand.leading_zeros() as i32 - 1;
    let shift = shift - ((exponent - shift) & 1);
    let scaled = significand << shift;
    let root = scaled.isqrt();
    // The low bit records that the root is inexact. A Quad holds all bits.
    let sticky = root << 1 | u128::from(root * root != scaled);
    let exact = Quad::from_u128(sticky)
        .value
        .scalbn((exponent - shift) / 2 - 1);
    with_format!(format, F => store(format, convert_apfloat::<_, F>(exact, rounding)))
}

/// Computes `div.approx`: "For 2^126 < |b| < 2^128, if a is infinity, div.approx.f32 returns NaN,
/// otherwise it returns a sign-preserving zero."
fn divide_approximately(a: f64, b: f64) -> f64 {
    if b.is_finite() && b.abs() > 2.0_f64.powi(126) {
        // Infinity times zero is NaN.
        a * 0.0_f64.copysign(b)
    } else {
        a / b
    }
}

/// Computes `rcp.approx.ftz.f64` or `rsqrt.approx.ftz.f64`. They ignore the low word of the operand
/// and clear that of the result. "Input NaNs map to a canonical NaN with encoding
/// 0x7fffffff00000000", as do the results of negative operands here.
fn gross_approximation(a: u64, function: fn(f64) -> f64) -> u64 {
    const LOW_WORD: u64 = 0xffff_ffff;
    let operand = Format::F64.flush(a & !LOW_WORD);
    let result = function(f64::from_bits(operand));
    if result.is_nan() {
        return 0x7fff_ffff_0000_0000;
    }
    Format::F64.flush((result.to_bits() + (1 << 31)) & !LOW_WORD)
}

#[cfg(test)]
mod tests;
