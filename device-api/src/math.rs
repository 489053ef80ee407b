//! Exponential and logarithm in f32: the same bits on every machine.
//!
//! A GPU's and a CPU's own functions differ in their last bits. These are written from additions,
//! multiplications and bit operations alone, each rounded once; there is no fused multiply-add, no
//! table, no branch (so that loops vectorise) and no call. Method and coefficients are those of
//! Cephes (S. Moshier, `expf.c` and `logf.c`).
//!
//! | function | most error, of all f32 | special values |
//! |---|---|---|
//! | [`exp`] | 0.991 ulp | `exp(-inf) = 0`, `exp(inf) = inf`, from 88.72284 on `inf`, below -103.97208 `0` |
//! | [`log`] | 0.847 ulp | `log(+-0) = -inf`, `log(inf) = inf`, NaN of what is negative |
//!
//! An ulp is the distance of the two f32 values adjacent to the exact result, 2^-149 where that is
//! subnormal. NaN gives NaN; which one is not promised, as everywhere in floating point.

/// 1.5 * 2^23: added to and taken from a number below 2^22, it rounds that to an integer, which is
/// in the sum's low bits.
const ROUNDER: f32 = 12_582_912.0;
/// The upper part of ln 2, of 9 bits: its products with exponents are exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
/// [`LN2_HIGH`] - ln 2.
const LN2_LOW: f32 = 2.121_944_4e-4;

/// 2^n for -126 <= n <= 127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(((n + 127) as u32) << 23)
}

/// Returns e^x. See the module for its error.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these the result is known; NaN goes to a bound, too, and comes back below.
    let inside = if x < -104.0 { -104.0 } else { x };
    let inside = if inside < 89.0 { inside } else { 89.0 };
    let shifted = inside * core::f32::consts::LOG2_E + ROUNDER;
    let n = shifted.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let whole = shifted - ROUNDER;
    // |r| <= ln 2 / 2, up to rounding.
    let r = (inside - whole * LN2_HIGH) + whole * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let value = (p * (r * r) + r) + 1.0;
    // In two steps, of which the first is exact and the second rounds where the result is
    // subnormal.
    let half = n >> 1;
    let scaled = value * power_of_two(half) * power_of_two(n - half);
    if x.is_nan() { x } else { scaled }
}

/// Returns the natural logarithm. See the module for its error.
#[inline(always)]
pub fn log(x: f32) -> f32 {
    const LEAST_NORMAL: f32 = f32::MIN_POSITIVE;
    // Subnormals are made normal.
    let small = x < LEAST_NORMAL;
    let normal = if small { x * 8_388_608.0 } else { x };
    let bias = if small { 23 } else { 0 };
    // x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
    let bits = normal.to_bits();
    let above = bits.wrapping_sub(core::f32::consts::FRAC_1_SQRT_2.to_bits());
    let e = (above as i32 >> 23) - bias;
    let m = f32::from_bits(bits.wrapping_sub(above & 0xff80_0000));
    let f = m - 1.0;
    let z = f * f;
    let mut p = 7.037_683_6e-2;
    p = p * f - 1.151_461e-1;
    p = p * f + 1.167_699_9e-1;
    p = p * f - 1.242_014_1e-1;
    p = p * f + 1.424_932_3e-1;
    p = p * f - 1.666_805_8e-1;
    p = p * f + 2.000_071_5e-1;
    p = p * f - 2.499_999_4e-1;
    p = p * f + 3.333_333e-1;
    let whole = e as f32;
    let low = (f * z) * p - whole * LN2_LOW - 0.5 * z;
    let value = (f + low) + whole * LN2_HIGH;
    let value = if x == f32::INFINITY { x } else { value };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x >= 0.0 { value } else { f32::NAN }
}
