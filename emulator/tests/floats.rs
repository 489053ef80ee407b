//! Floating-point instructions and conversions, compared with functions that follow the PTX ISA.

mod common;

use common::{bits, check, evaluate, interesting, mask, number, register};

/// A binary floating-point format: width, mantissa bits, and true if it has infinities.
#[derive(Clone, Copy)]
struct Format {
    bits: u32,
    mantissa: u32,
    infinities: bool,
}

const F16: Format = Format {
    bits: 16,
    mantissa: 10,
    infinities: true,
};
const BF16: Format = Format {
    bits: 16,
    mantissa: 7,
    infinities: true,
};
const F32: Format = Format {
    bits: 32,
    mantissa: 23,
    infinities: true,
};
const E4M3: Format = Format {
    bits: 8,
    mantissa: 3,
    infinities: false,
};
const E5M2: Format = Format {
    bits: 8,
    mantissa: 2,
    infinities: true,
};

impl Format {
    fn exponent_ones(self) -> u64 {
        (1 << (self.bits - 1)) - (1 << self.mantissa)
    }

    fn bias(self) -> i32 {
        (1 << (self.bits - self.mantissa - 2)) - 1
    }

    fn nan(self) -> u64 {
        (1 << (self.bits - 1)) - 1
    }

    fn largest(self) -> u64 {
        if self.infinities {
            self.exponent_ones() - 1
        } else {
            self.nan() - 1
        }
    }

    fn is_nan(self, bits: u64) -> bool {
        let magnitude = bits & self.nan();
        if self.infinities {
            magnitude > self.exponent_ones()
        } else {
            magnitude == self.nan()
        }
    }

    /// Returns the exact value of bits.
    fn value(self, bits: u64) -> f64 {
        let sign = if bits >> (self.bits - 1) & 1 != 0 {
            -1.0
        } else {
            1.0
        };
        let magnitude = bits & self.nan();
        if self.is_nan(bits) {
            return f64::NAN;
        }
        if self.infinities && magnitude == self.exponent_ones() {
            return sign * f64::INFINITY;
        }
        let fraction = (magnitude & ((1 << self.mantissa) - 1)) as f64;
        let exponent = (magnitude >> self.mantissa) as i32;
        let unit = 2f64.powi(1 - self.bias() - self.mantissa as i32);
        if exponent == 0 {
            return sign * fraction * unit;
        }
        let implicit = (1u64 << self.mantissa) as f64;
        sign * (fraction + implicit) * unit * 2f64.powi(exponent - 1)
    }

    /// Rounds a number in the mode `rn`, `rz`, `rm`, `rp` or `rna` by a search of the neighbours in
    /// the ordered list of all magnitudes. With `satfinite`, overflow gives the largest number.
    fn round(self, x: f64, mode: &str, satfinite: bool) -> u64 {
        if x.is_nan() {
            return self.nan();
        }
        let sign = u64::from(x.is_sign_negative()) << (self.bits - 1);
        let magnitude = x.abs();
        let largest = self.largest();
        let (mut low, mut high) = (0, largest + 1);
        // The largest `low` with `value(low) <= magnitude`.
        while high - low > 1 {
            let middle = (low + high) / 2;
            if self.value(middle) <= magnitude {
                low = middle;
            } else {
                high = middle;
            }
        }
        let overflow = if satfinite || !self.infinities {
            largest
        } else {
            largest + 1
        };
        let exact = self.value(low) == magnitude;
        let up = match mode {
            _ if exact => false,
            "rz" => false,
            "rm" => sign != 0,
            "rp" => sign == 0,
            mode => {
                let below = self.value(low);
                // Overflow rounds as if the exponent had no limit.
                let above = if low == largest {
                    below + (below - self.value(low - 1))
                } else {
                    self.value(low + 1)
                };
                match (magnitude - below).partial_cmp(&(above - magnitude)) {
                    Some(core::cmp::Ordering::Less) => false,
                    Some(core::cmp::Ordering::Greater) => true,
                    _ => mode == "rna" || low % 2 == 1,
                }
            }
        };
        let rounded = low + u64::from(up);
        if magnitude.is_infinite() || rounded > largest {
            let down = (mode == "rz" || mode == "rm" && sign == 0 || mode == "rp" && sign != 0)
                && !magnitude.is_infinite();
            return sign | if down { largest } else { overflow };
        }
        sign | rounded
    }
}

/// Rounds the sum `x + error`, where `error` is smaller than half a unit of `x`, to odd: the result
/// can be rounded to formats with at most 51 bits in any mode.
fn to_odd(x: f64, error: f64) -> f64 {
    if error == 0.0 || !x.is_finite() || x.to_bits() & 1 == 1 {
        return x;
    }
    if error > 0.0 {
        x.next_up()
    } else {
        x.next_down()
    }
}

/// Returns the error of the rounded sum of two numbers (Knuth's two-sum).
fn sum_error(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let b_part = sum - a;
    let a_part = sum - b_part;
    let error = (a - a_part) + (b - b_part);
    if error.is_finite() { error } else { 0.0 }
}

fn add_odd(a: f64, b: f64) -> f64 {
    to_odd(a + b, sum_error(a, b))
}

/// Divides; the error has the sign of the remainder divided by `b`.
fn div_odd(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    if !quotient.is_finite() || a == 0.0 || b.is_infinite() {
        return quotient;
    }
    to_odd(quotient, (-quotient).mul_add(b, a) * b.signum())
}

fn sqrt_odd(a: f64) -> f64 {
    let root = a.sqrt();
    if !root.is_finite() || a == 0.0 {
        return root;
    }
    to_odd(root, (-root).mul_add(root, a))
}

/// Returns the sum of a zero result with the sign that the rounding mode prescribes.
fn zero_sum(sum: f64, a: f64, b: f64, mode: &str) -> f64 {
    if sum != 0.0 {
        return sum;
    }
    if a.is_sign_negative() == b.is_sign_negative() && a == 0.0 && b == 0.0 {
        return a;
    }
    if mode == "rm" { -0.0 } else { 0.0 }
}

const MODES: [&str; 4] = ["rn", "rz", "rm", "rp"];

/// Returns encodings of a format: limits of its ranges and pseudo-random ones.
fn encodings(format: Format) -> Vec<u64> {
    let one = (format.bias() as u64) << format.mantissa;
    let mut values = vec![
        0,
        1,
        (1 << format.mantissa) - 1,
        1 << format.mantissa,
        one - 1,
        one,
        one + 1,
        one + 3,
        one + (1 << format.mantissa),
        one + (3 << (format.mantissa - 1)),
        format.largest(),
        format.exponent_ones(),
        format.nan(),
    ];
    let mut random = common::Random(99);
    values.extend((0..6).map(|_| random.next() & (format.nan() >> 1)));
    // Numbers of similar size.
    values.extend((0..6).map(|_| one + random.next() % (4 << format.mantissa)));
    let sign = 1 << (format.bits - 1);
    let negative: Vec<u64> = values.iter().map(|it| it | sign).collect();
    values.extend(negative);
    values
}

fn encoding_pairs(format: Format) -> Vec<Vec<u64>> {
    let values = encodings(format);
    let mut cases = Vec::new();
    for a in &values {
        cases.extend(values.iter().map(|b| vec![*a, *b]));
    }
    cases
}

/// Replaces each NaN by one encoding. The payload is not specified.
fn canonical(format: Format, bits: u64) -> u64 {
    if format.is_nan(bits) {
        format.nan()
    } else {
        bits
    }
}

/// Checks a floating-point instruction against a function that returns bits. All NaN are equal.
fn check_floats(
    text: &str,
    format: Format,
    operands: usize,
    cases: &[Vec<u64>],
    expected: impl Fn(&[u64]) -> u64,
) {
    let register = format!("b{}", format.bits);
    let results = evaluate(text, &register, &vec![register.as_str(); operands], cases);
    for (case, got) in cases.iter().zip(results) {
        let (got, want) = (canonical(format, got), canonical(format, expected(case)));
        assert_eq!(got, want, "{text} {case:x?}: {got:#x}; expected {want:#x}");
    }
}

fn name(format: Format) -> &'static str {
    match (format.bits, format.mantissa) {
        (32, _) => "f32",
        (_, 10) => "f16",
        _ => "bf16",
    }
}

#[test]
fn arithmetic_in_f32_f16_bf16() {
    for format in [F32, F16, BF16] {
        let kind = name(format);
        let cases = encoding_pairs(format);
        let modes = if kind == "f32" {
            &MODES[..]
        } else {
            &MODES[..1]
        };
        for mode in modes {
            let round = |x: f64| format.round(x, mode, false);
            let value = |bits: u64| format.value(bits);
            check_floats(
                &format!("add.{mode}.{kind} %d, %s0, %s1;"),
                format,
                2,
                &cases,
                |x| {
                    let (a, b) = (value(x[0]), value(x[1]));
                    round(zero_sum(add_odd(a, b), a, b, mode))
                },
            );
            check_floats(
                &format!("sub.{mode}.{kind} %d, %s0, %s1;"),
                format,
                2,
                &cases,
                |x| {
                    let (a, b) = (value(x[0]), -value(x[1]));
                    round(zero_sum(add_odd(a, b), a, b, mode))
                },
            );
            // The product of two numbers of 24 bits is exact in f64.
            check_floats(
                &format!("mul.{mode}.{kind} %d, %s0, %s1;"),
                format,
                2,
                &cases,
                |x| round(value(x[0]) * value(x[1])),
            );
            if kind == "f32" {
                check_floats(
                    &format!("div.{mode}.{kind} %d, %s0, %s1;"),
                    format,
                    2,
                    &cases,
                    |x| round(div_odd(value(x[0]), value(x[1]))),
                );
                check_floats(
                    &format!("sqrt.{mode}.{kind} %d, %s0;"),
                    format,
                    1,
                    &cases,
                    |x| round(sqrt_odd(value(x[0]))),
                );
                check_floats(
                    &format!("rcp.{mode}.{kind} %d, %s0;"),
                    format,
                    1,
                    &cases,
                    |x| round(div_odd(1.0, value(x[0]))),
                );
            }
            let mut three = cases.clone();
            let values = encodings(format);
            for (at, case) in three.iter_mut().enumerate() {
                case.push(values[(at * 11 + at / 7) % values.len()]);
            }
            check_floats(
                &format!("fma.{mode}.{kind} %d, %s0, %s1, %s2;"),
                format,
                3,
                &three,
                |x| {
                    let (product, c) = (value(x[0]) * value(x[1]), value(x[2]));
                    round(zero_sum(add_odd(product, c), product, c, mode))
                },
            );
        }
    }
}

#[test]
fn arithmetic_in_f64() {
    let mut cases = Vec::new();
    let mut values = vec![
        0.0,
        1.0,
        1.5,
        3.0,
        0.1,
        1e300,
        1e-300,
        7.0,
        f64::INFINITY,
        1e10,
    ];
    values.extend([
        f64::MAX,
        f64::from_bits(1),
        f64::MIN_POSITIVE,
        f64::NAN,
        1.0 / 3.0,
    ]);
    values.extend(values.clone().iter().map(|x| -x));
    for a in &values {
        cases.extend(values.iter().map(|b| vec![a.to_bits(), b.to_bits()]));
    }
    let same = |text: &str, operands: usize, f: &dyn Fn(&[f64]) -> f64| {
        let results = evaluate(text, "b64", &vec!["b64"; operands], &cases);
        for (case, got) in cases.iter().zip(results) {
            let x: Vec<f64> = case.iter().map(|it| f64::from_bits(*it)).collect();
            let want = f(&x);
            let got = f64::from_bits(got);
            let equal = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(equal, "{text} {x:?}: {got:?}; expected {want:?}");
        }
    };
    same("add.f64 %d, %s0, %s1;", 2, &|x| x[0] + x[1]);
    same("sub.f64 %d, %s0, %s1;", 2, &|x| x[0] - x[1]);
    same("mul.f64 %d, %s0, %s1;", 2, &|x| x[0] * x[1]);
    same("div.rn.f64 %d, %s0, %s1;", 2, &|x| x[0] / x[1]);
    same("fma.rn.f64 %d, %s0, %s1, %s1;", 2, &|x| {
        x[0].mul_add(x[1], x[1])
    });
    same("rcp.rn.f64 %d, %s0;", 1, &|x| 1.0 / x[0]);
    same("sqrt.rn.f64 %d, %s0;", 1, &|x| x[0].sqrt());
    same("abs.f64 %d, %s0;", 1, &|x| x[0].abs());
    same("neg.f64 %d, %s0;", 1, &|x| -x[0]);
    same("fma.rn.f64 %d, %s0, 0d3FF8000000000000, %s1;", 2, &|x| {
        x[0].mul_add(1.5, x[1])
    });
    // Directed rounding: the nearest number, corrected by the sign of its error.
    let directed = |nearest: f64, error: f64, mode: &str| {
        let toward_zero = if nearest > 0.0 {
            error < 0.0
        } else {
            error > 0.0
        };
        match mode {
            "rz" if toward_zero && nearest > 0.0 => nearest.next_down(),
            "rz" if toward_zero => nearest.next_up(),
            "rm" if error < 0.0 => nearest.next_down(),
            "rp" if error > 0.0 => nearest.next_up(),
            _ => nearest,
        }
    };
    let mut random = common::Random(5);
    let mut number = || {
        let exponent = 1023 - 20 + random.next() % 40;
        f64::from_bits(random.next() >> 12 | exponent << 52 | random.next() << 63)
    };
    let cases: Vec<Vec<u64>> = (0..300)
        .map(|_| vec![number().to_bits(), number().to_bits()])
        .collect();
    for mode in MODES {
        let float = |x: &[u64]| (f64::from_bits(x[0]), f64::from_bits(x[1]));
        check(
            &format!("add.{mode}.f64 %d, %s0, %s1;"),
            "b64",
            &["b64"; 2],
            &cases,
            |x| {
                let (a, b) = float(x);
                directed(a + b, sum_error(a, b), mode).to_bits()
            },
        );
        check(
            &format!("mul.{mode}.f64 %d, %s0, %s1;"),
            "b64",
            &["b64"; 2],
            &cases,
            |x| {
                let (a, b) = float(x);
                directed(a * b, a.mul_add(b, -(a * b)), mode).to_bits()
            },
        );
        check(
            &format!("div.{mode}.f64 %d, %s0, %s1;"),
            "b64",
            &["b64"; 2],
            &cases,
            |x| {
                let (a, b) = float(x);
                let q = a / b;
                directed(q, (-q).mul_add(b, a) * b.signum(), mode).to_bits()
            },
        );
        check(
            &format!("sqrt.{mode}.f64 %d, %s0;"),
            "b64",
            &["b64"],
            &cases,
            |x| {
                let a = float(x).0;
                if a < 0.0 {
                    return 0xfff8_0000_0000_0000;
                }
                let root = a.sqrt();
                directed(root, (-root).mul_add(root, a), mode).to_bits()
            },
        );
    }
}

#[test]
fn minimum_and_maximum() {
    for format in [F32, F16, BF16] {
        let kind = name(format);
        let cases = encoding_pairs(format);
        for max in [false, true] {
            let op = if max { "max" } else { "min" };
            let choose = |x: &[u64]| {
                let key = |bits: u64| (format.value(bits), bits >> (format.bits - 1) == 0);
                let (a, b) = (key(x[0]), key(x[1]));
                // -0 is less than +0.
                let less = a.0 < b.0 || a.0 == b.0 && !a.1 && b.1;
                if less != max { x[0] } else { x[1] }
            };
            check_floats(
                &format!("{op}.{kind} %d, %s0, %s1;"),
                format,
                2,
                &cases,
                |x| match (format.is_nan(x[0]), format.is_nan(x[1])) {
                    (true, _) => x[1],
                    (_, true) => x[0],
                    _ => choose(x),
                },
            );
            check_floats(
                &format!("{op}.NaN.{kind} %d, %s0, %s1;"),
                format,
                2,
                &cases,
                |x| {
                    if format.is_nan(x[0]) || format.is_nan(x[1]) {
                        format.nan()
                    } else {
                        choose(x)
                    }
                },
            );
        }
    }
    let text = "min.f64 %d, %s0, %s1;";
    let cases = [vec![0, 1 << 63], vec![f64::NAN.to_bits(), 1f64.to_bits()]];
    assert_eq!(
        evaluate(text, "b64", &["b64"; 2], &cases),
        [1 << 63, 1f64.to_bits()]
    );
}

#[test]
fn packed_halves() {
    for format in [F16, BF16] {
        let kind = name(format);
        let singles = encoding_pairs(format);
        let cases: Vec<Vec<u64>> = singles
            .iter()
            .zip(singles.iter().rev())
            .map(|(low, high)| vec![low[0] | high[0] << 16, low[1] | high[1] << 16])
            .collect();
        let check_packed = |text: &str, f: &dyn Fn(u64, u64) -> u64| {
            let results = evaluate(text, "b32", &["b32"; 2], &cases);
            for (case, got) in cases.iter().zip(results) {
                for shift in [0, 16] {
                    let got = canonical(format, got >> shift & 0xffff);
                    let want = f(case[0] >> shift & 0xffff, case[1] >> shift & 0xffff);
                    assert_eq!(got, canonical(format, want), "{text} {case:x?}");
                }
            }
        };
        check_packed(&format!("add.rn.{kind}x2 %d, %s0, %s1;"), &|a, b| {
            let (a, b) = (format.value(a), format.value(b));
            format.round(zero_sum(add_odd(a, b), a, b, "rn"), "rn", false)
        });
        check_packed(&format!("mul.rn.{kind}x2 %d, %s0, %s1;"), &|a, b| {
            format.round(format.value(a) * format.value(b), "rn", false)
        });
        check_packed(&format!("fma.rn.{kind}x2 %d, %s0, %s1, %s1;"), &|a, b| {
            let (product, c) = (format.value(a) * format.value(b), format.value(b));
            format.round(zero_sum(add_odd(product, c), product, c, "rn"), "rn", false)
        });
        check_packed(&format!("neg.{kind}x2 %d, %s0;"), &|a, _| a ^ 0x8000);
        check_packed(&format!("abs.{kind}x2 %d, %s0;"), &|a, _| a & 0x7fff);
    }
}

#[test]
fn float_modifiers() {
    let f = |x: f32| u64::from(x.to_bits());
    let one = |text: &str, a: u64, b: u64| evaluate(text, "b32", &["b32"; 2], &[vec![a, b]])[0];
    // Saturation.
    assert_eq!(one("add.sat.f32 %d, %s0, %s1;", f(0.75), f(0.5)), f(1.0));
    assert_eq!(one("add.sat.f32 %d, %s0, %s1;", f(-0.75), f(0.5)), 0);
    assert_eq!(one("add.sat.f32 %d, %s0, %s1;", f(f32::NAN), f(0.5)), 0);
    // Subnormal operands and results.
    assert_eq!(one("add.ftz.f32 %d, %s0, %s1;", 1, f(0.0)), 0);
    assert_eq!(
        one("mul.ftz.f32 %d, %s0, %s1;", 0x8080_0000, f(0.5)),
        0x8000_0000
    );
    assert_eq!(
        one("mul.f32 %d, %s0, %s1;", 0x8080_0000, f(0.5)),
        0x8040_0000
    );
    // Signs.
    assert_eq!(one("neg.f32 %d, %s0;", f(0.0), 0), f(-0.0));
    assert_eq!(one("abs.f32 %d, %s0;", f(-2.0), 0), f(2.0));
    assert_eq!(
        one("max.xorsign.abs.f32 %d, %s0, %s1;", f(-2.0), f(1.0)),
        f(-2.0)
    );
    assert_eq!(
        one("max.xorsign.abs.f32 %d, %s0, %s1;", f(-2.0), f(-1.0)),
        f(2.0)
    );
    // The ISA lists the results for special operands.
    assert_eq!(one("rcp.approx.f32 %d, %s0;", f(0.0), 0), f(f32::INFINITY));
    assert_eq!(one("sqrt.approx.f32 %d, %s0;", f(-0.0), 0), f(-0.0));
    assert_eq!(one("rsqrt.approx.f32 %d, %s0;", f(f32::INFINITY), 0), 0);
    assert_eq!(one("ex2.approx.f32 %d, %s0;", f(3.0), 0), f(8.0));
    assert_eq!(
        one("lg2.approx.f32 %d, %s0;", f(0.0), 0),
        f(f32::NEG_INFINITY)
    );
    assert_eq!(one("div.approx.f32 %d, %s0, %s1;", f(6.0), f(3.0)), f(2.0));
    assert_eq!(one("div.full.f32 %d, %s0, %s1;", f(6.0), f(3.0)), f(2.0));
}

#[test]
fn testp_classifies() {
    // The ISA: "positive and negative zero are considered normal numbers".
    let values = [
        (0.0, "finite number normal"),
        (-0.0, "finite number normal"),
        (1.0, "finite number normal"),
        (-3.5, "finite number normal"),
        (f32::INFINITY, "infinite number"),
        (f32::NEG_INFINITY, "infinite number"),
        (f32::NAN, "notanumber"),
        (f32::from_bits(1), "finite number subnormal"),
        (f32::from_bits(0x8040_0000), "finite number subnormal"),
    ];
    let cases: Vec<Vec<u64>> = values
        .iter()
        .map(|it| vec![it.0.to_bits().into()])
        .collect();
    for property in [
        "finite",
        "infinite",
        "number",
        "notanumber",
        "normal",
        "subnormal",
    ] {
        let text = format!("testp.{property}.f32 %d, %s0;");
        let results = evaluate(&text, "pred", &["b32"], &cases);
        for ((value, properties), got) in values.iter().zip(results) {
            let want = properties.split(' ').any(|it| it == property);
            assert_eq!(got, u64::from(want), "{text} {value}");
        }
    }
    let cases = [vec![1], vec![f64::MIN_POSITIVE.to_bits()]];
    let text = "testp.subnormal.f64 %d, %s0;";
    assert_eq!(evaluate(text, "pred", &["b64"], &cases), [1, 0]);
}

#[test]
fn cvt_between_floats() {
    let formats = [("f32", F32), ("f16", F16), ("bf16", BF16)];
    for (to, target) in formats {
        let mut cases = encoding_pairs(F32);
        // Ties and their neighbours.
        for at in 0..200u64 {
            for low in [0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001] {
                cases.push(vec![0x3f80_0000 + (at << 13 | low), 0]);
                cases.push(vec![0xb380_0000 + (at << 16 | low), 0]);
                cases.push(vec![0x3800_0000 + (at << 12) + low, 0]);
            }
        }
        if to == "f32" {
            continue;
        }
        for mode in ["rn", "rz"] {
            let text = format!("cvt.{mode}.{to}.f32 %d, %s0;");
            let results = evaluate(&text, "b16", &["b32"], &cases);
            for (case, got) in cases.iter().zip(results) {
                let want = target.round(F32.value(case[0]), mode, false);
                assert_eq!(canonical(target, got), want, "{text} {case:x?}");
            }
            let text = format!("cvt.{mode}.{to}x2.f32 %d, %s0, %s1;");
            let results = evaluate(&text, "b32", &["b32"; 2], &cases);
            for (case, got) in cases.iter().zip(results) {
                // The first operand is in the upper half.
                let high = target.round(F32.value(case[0]), mode, false);
                let low = target.round(F32.value(case[1]), mode, false);
                assert_eq!(canonical(target, got & 0xffff), low, "{text} {case:x?}");
                assert_eq!(canonical(target, got >> 16), high, "{text} {case:x?}");
            }
        }
        // All numbers of 16 bits widen exactly.
        let all: Vec<Vec<u64>> = (0..0x1_0000).map(|it| vec![it]).collect();
        let text = format!("cvt.f32.{to} %d, %s0;");
        let results = evaluate(&text, "b32", &["b16"], &all);
        for (case, got) in all.iter().zip(results) {
            let (got, want) = (f32::from_bits(got as u32), target.value(case[0]) as f32);
            let equal = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(equal, "{text} {case:x?}");
        }
        let relu = evaluate(
            &format!("cvt.rn.relu.{to}.f32 %d, %s0;"),
            "b16",
            &["b32"],
            &[vec![0xbf80_0000], vec![0x3f80_0000], vec![0x8000_0000]],
        );
        assert_eq!(relu, [0, target.round(1.0, "rn", false), 0]);
    }
    // f64 to f32 in all modes.
    let mut random = common::Random(7);
    let cases: Vec<Vec<u64>> = (0..2000)
        .map(|_| {
            let exponent = 1023 - 160 + random.next() % 300;
            vec![random.next() >> 12 | exponent << 52 | random.next() << 63]
        })
        .collect();
    for mode in MODES {
        let text = format!("cvt.{mode}.f32.f64 %d, %s0;");
        check(&text, "b32", &["b64"], &cases, |x| {
            F32.round(f64::from_bits(x[0]), mode, false)
        });
    }
    let mut cases = encoding_pairs(F32);
    cases.retain(|case| !F32.is_nan(case[0]));
    check("cvt.f64.f32 %d, %s0;", "b64", &["b32"], &cases, |x| {
        f64::from(f32::from_bits(x[0] as u32)).to_bits()
    });
}

#[test]
fn cvt_to_and_from_8_bit_floats() {
    for (to, target) in [("e4m3x2", E4M3), ("e5m2x2", E5M2)] {
        let mut cases = encoding_pairs(F32);
        for at in 0..2000u64 {
            cases.push(vec![0x3a00_0000 + at * 0x8001, 0x4000_0000 + at * 0x1_0000]);
            cases.push(vec![0xba00_0000 + at * 0x1_0000, 0xc300_0000 + at * 0x7fff]);
        }
        let text = format!("cvt.rn.satfinite.{to}.f32 %d, %s0, %s1;");
        let results = evaluate(&text, "b16", &["b32"; 2], &cases);
        for (case, got) in cases.iter().zip(results) {
            let want = |bits: u64| target.round(F32.value(bits), "rn", true);
            assert_eq!(got & 0xff, want(case[1]), "{text} {case:x?}");
            assert_eq!(got >> 8, want(case[0]), "{text} {case:x?}");
        }
        let halves: Vec<Vec<u64>> = (0..0x1_0000u64)
            .map(|it| vec![it | (it * 7) << 16])
            .collect();
        let text = format!("cvt.rn.satfinite.{to}.f16x2 %d, %s0;");
        let results = evaluate(&text, "b16", &["b32"], &halves);
        for (case, got) in halves.iter().zip(results) {
            let want = |bits: u64| target.round(F16.value(bits & 0xffff), "rn", true);
            assert_eq!(got & 0xff, want(case[0]), "{text} {case:x?}");
            assert_eq!(got >> 8, want(case[0] >> 16), "{text} {case:x?}");
        }
        let all: Vec<Vec<u64>> = (0..0x1_0000).map(|it| vec![it]).collect();
        let text = format!("cvt.rn.f16x2.{to} %d, %s0;");
        let results = evaluate(&text, "b32", &["b16"], &all);
        for (case, got) in all.iter().zip(results) {
            for (shift, wide) in [(0, 0), (8, 16)] {
                let value = target.value(case[0] >> shift & 0xff);
                let want = F16.round(value, "rn", false);
                let got = canonical(F16, got >> wide & 0xffff);
                assert_eq!(got, want, "{text} {case:x?}");
            }
        }
        let text = format!("cvt.rn.satfinite.relu.{to}.f32 %d, %s0, %s1;");
        let negative = [vec![0xc000_0000, 0x3f80_0000]];
        let want = target.round(1.0, "rn", true);
        assert_eq!(evaluate(&text, "b16", &["b32"; 2], &negative), [want]);
    }
}

#[test]
fn cvt_floats_to_integers_round_and_clamp() {
    let values = [
        0.0,
        -0.0,
        0.4,
        0.5,
        0.6,
        1.5,
        2.5,
        -0.5,
        -1.5,
        -2.4,
        127.5,
        128.0,
        255.6,
        -129.0,
        32768.0,
        65535.4,
        65536.0,
        -32769.0,
        2147483648.0,
        -2147483904.0,
        4294967296.0,
        1e19,
        -1e19,
        1e30,
        f64::INFINITY,
        f64::NEG_INFINITY,
        8388609.0,
        16777217.0,
    ];
    for from in ["f32", "f64"] {
        let cases: Vec<Vec<u64>> = values
            .iter()
            .map(|x| match from {
                "f32" => vec![(*x as f32).to_bits().into()],
                _ => vec![x.to_bits()],
            })
            .collect();
        for to in ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"] {
            for mode in ["rni", "rzi", "rmi", "rpi"] {
                let text = format!("cvt.{mode}.{to}.{from} %d, %s0;");
                check(&text, register(to), &[register(from)], &cases, |x| {
                    let x = match from {
                        "f32" => f64::from(f32::from_bits(x[0] as u32)),
                        _ => f64::from_bits(x[0]),
                    };
                    let x = match mode {
                        "rni" => x.round_ties_even(),
                        "rzi" => x.trunc(),
                        "rmi" => x.floor(),
                        _ => x.ceil(),
                    };
                    let (low, high) = match &to[..1] {
                        "s" => (-(1i128 << (bits(to) - 1)), (1i128 << (bits(to) - 1)) - 1),
                        _ => (0, (1i128 << bits(to)) - 1),
                    };
                    // The conversion `as` clamps. The result is extended to its register.
                    (x as i128).clamp(low, high) as u64 & mask(register(to))
                });
            }
        }
    }
    // NaN converts to 0 in narrow types.
    let nan = [vec![0x7fc0_0000]];
    assert_eq!(
        evaluate("cvt.rzi.s32.f32 %d, %s0;", "b32", &["b32"], &nan),
        [0]
    );
    assert_eq!(
        evaluate("cvt.rzi.u16.f32 %d, %s0;", "b16", &["b32"], &nan),
        [0]
    );
}

#[test]
fn cvt_integers_to_floats() {
    for from in ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"] {
        let register = register(from);
        let cases: Vec<Vec<u64>> = interesting(bits(from).max(16))
            .into_iter()
            .map(|it| vec![it])
            .collect();
        for mode in MODES {
            let text = format!("cvt.{mode}.f32.{from} %d, %s0;");
            check(&text, "b32", &[register], &cases, |x| {
                let x = number(from, x[0]);
                // A number of 64 bits is the sum of two that are exact in f64.
                let (high, low) = (x >> 32 << 32, x & 0xffff_ffff);
                F32.round(add_odd(high as f64, low as f64), mode, false)
            });
            if mode == "rn" {
                let text = format!("cvt.{mode}.f64.{from} %d, %s0;");
                check(&text, "b64", &[register], &cases, |x| {
                    (number(from, x[0]) as f64).to_bits()
                });
                let text = format!("cvt.{mode}.f16.{from} %d, %s0;");
                check(&text, "b16", &[register], &cases, |x| {
                    let x = number(from, x[0]);
                    let (high, low) = (x >> 32 << 32, x & 0xffff_ffff);
                    F16.round(add_odd(high as f64, low as f64), mode, false)
                });
            }
        }
    }
}

#[test]
fn cvt_rounds_to_integral_values() {
    let cases: Vec<Vec<u64>> = [0.5f32, 1.5, 2.5, -0.5, -1.2, 3.7, 1e10, -0.0]
        .iter()
        .map(|x| vec![x.to_bits().into()])
        .collect();
    for mode in ["rni", "rzi", "rmi", "rpi"] {
        check(
            &format!("cvt.{mode}.f32.f32 %d, %s0;"),
            "b32",
            &["b32"],
            &cases,
            |x| {
                let x = f32::from_bits(x[0] as u32);
                let x = match mode {
                    "rni" => x.round_ties_even(),
                    "rzi" => x.trunc(),
                    "rmi" => x.floor(),
                    _ => x.ceil(),
                };
                x.to_bits().into()
            },
        );
    }
    let sat = evaluate("cvt.sat.f32.f32 %d, %s0;", "b32", &["b32"], &cases);
    assert_eq!(sat[0], u64::from(0.5f32.to_bits()));
    assert_eq!(sat[1], u64::from(1f32.to_bits()));
    assert_eq!(sat[4], 0);
}
