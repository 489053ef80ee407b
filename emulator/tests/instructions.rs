//! Integer, bit, comparison, conversion and floating-point instructions, compared with functions
//! that follow the PTX ISA.

mod common;

use common::{check, evaluate, interesting, kernel, mask, pairs, run, run_body, triples};

const INTEGERS: [&str; 6] = ["u16", "s16", "u32", "s32", "u64", "s64"];

fn bits(kind: &str) -> u32 {
    kind[1..].parse().expect("a type is a letter and a width")
}

/// Returns the register type of a type.
fn register(kind: &str) -> &'static str {
    match bits(kind) {
        64 => "b64",
        32 => "b32",
        _ => "b16",
    }
}

/// Returns the number that bits of a type represent.
fn number(kind: &str, value: u64) -> i128 {
    let bits = bits(kind);
    let value = value & mask(kind);
    if kind.starts_with('s') && value >> (bits - 1) != 0 {
        i128::from(value) - (1 << bits)
    } else {
        i128::from(value)
    }
}

/// Checks an instruction with operands and result of one type, from a function of numbers.
fn check_integers(name: &str, kinds: &[&str], operands: usize, f: impl Fn(&str, &[i128]) -> i128) {
    for kind in kinds {
        let register = register(kind);
        let sources = vec![register; operands];
        let list: Vec<String> = (0..operands).map(|at| format!("%s{at}")).collect();
        let cases = match operands {
            3 => triples(bits(kind)),
            _ => pairs(bits(kind)),
        };
        let instruction = format!("{name}.{kind} %d, {};", list.join(", "));
        check(&instruction, register, &sources, &cases, |case| {
            let numbers: Vec<i128> = case.iter().map(|it| number(kind, *it)).collect();
            f(kind, &numbers) as u64 & mask(kind)
        });
    }
}

#[test]
fn add_and_sub_wrap() {
    check_integers("add", &INTEGERS, 2, |_, x| x[0] + x[1]);
    check_integers("sub", &INTEGERS, 2, |_, x| x[0] - x[1]);
}

#[test]
fn add_and_sub_saturate() {
    let clamp = |x: i128| x.clamp(i32::MIN.into(), i32::MAX.into());
    check_integers("add.sat", &["s32"], 2, |_, x| clamp(x[0] + x[1]));
    check_integers("sub.sat", &["s32"], 2, |_, x| clamp(x[0] - x[1]));
}

#[test]
fn mul_and_mad() {
    check_integers("mul.lo", &INTEGERS, 2, |_, x| x[0].wrapping_mul(x[1]));
    let high = |kind: &str, x: &[i128]| {
        if kind == "u64" {
            (x[0] as u128 * x[1] as u128 >> 64) as i128
        } else {
            x[0] * x[1] >> bits(kind)
        }
    };
    check_integers("mul.hi", &INTEGERS, 2, high);
    check_integers("mad.lo", &INTEGERS, 3, |_, x| {
        x[0].wrapping_mul(x[1]).wrapping_add(x[2])
    });
    check_integers("mad.hi", &INTEGERS[2..], 3, |kind, x| high(kind, x) + x[2]);
}

#[test]
fn mul_and_mad_wide() {
    for (kind, wide) in [
        ("u16", "u32"),
        ("s16", "s32"),
        ("u32", "u64"),
        ("s32", "s64"),
    ] {
        let (from, to) = (register(kind), register(wide));
        let product = |x: &[u64]| number(kind, x[0]) * number(kind, x[1]);
        check(
            &format!("mul.wide.{kind} %d, %s0, %s1;"),
            to,
            &[from, from],
            &pairs(bits(kind)),
            |x| product(x) as u64 & mask(wide),
        );
        let mut cases = pairs(bits(kind));
        let thirds = interesting(bits(wide));
        for (at, case) in cases.iter_mut().enumerate() {
            case.push(thirds[at % thirds.len()]);
        }
        check(
            &format!("mad.wide.{kind} %d, %s0, %s1, %s2;"),
            to,
            &[from, from, to],
            &cases,
            |x| (product(x) + i128::from(x[2])) as u64 & mask(wide),
        );
    }
}

#[test]
fn mul24_uses_24_bits() {
    let low = |kind: &str, x: i128| match kind {
        "u32" => x & 0xff_ffff,
        _ => ((x as i32) << 8 >> 8).into(),
    };
    let kinds = ["u32", "s32"];
    check_integers("mul24.lo", &kinds, 2, |kind, x| {
        low(kind, x[0]) * low(kind, x[1])
    });
    check_integers("mad24.lo", &kinds, 3, |kind, x| {
        low(kind, x[0]) * low(kind, x[1]) + x[2]
    });
}

#[test]
fn immediate_operands_have_the_type_of_the_instruction() {
    let body = "mov.u32 %r0, 7;
        add.s32 %r1, %r0, -9; st.global.u32 [%in0], %r1;
        mul.wide.s32 %d0, %r0, -4; st.global.u64 [%in0+8], %d0;
        mad.wide.s32 %d1, %r0, -4, -1; st.global.u64 [%in0+16], %d1;
        mul.wide.u32 %d2, %r0, 0xffffffff; st.global.u64 [%in0+24], %d2;
        and.b32 %r2, %r0, 0b101; st.global.u32 [%in0+4], %r2;
        mov.u32 %r3, 017; st.global.u32 [%in0+32], %r3;
        mov.f32 %f0, 0f3F800000; st.global.f32 [%in0+36], %f0;
        mov.f64 %g0, 0d4000000000000000; st.global.f64 [%in0+40], %g0;
        mov.u16 %h0, -2; cvt.u32.u16 %r4, %h0; st.global.u32 [%in0+48], %r4;
        add.s64 %d3, %d0, -28; st.global.u64 [%in0+56], %d3;
        add.f32 %f1, %f0, 0f40000000; st.global.f32 [%in0+52], %f1; ret;";
    let out = run_body(body, 1, 16);
    let long = |at: usize| u64::from(out[at]) | u64::from(out[at + 1]) << 32;
    assert_eq!(out[0], -2i32 as u32);
    assert_eq!(out[1], 5);
    assert_eq!(long(2), -28i64 as u64);
    assert_eq!(long(4), -29i64 as u64);
    assert_eq!(long(6), 7 * 0xffff_ffff);
    assert_eq!(out[8], 15);
    assert_eq!(out[9], 1f32.to_bits());
    assert_eq!(long(10), 2f64.to_bits());
    assert_eq!(out[12], 0xfffe);
    assert_eq!(out[13], 3f32.to_bits());
    assert_eq!(long(14), -56i64 as u64);
}

#[test]
fn div_and_rem_truncate() {
    // The result of a division by zero is unspecified.
    for kind in INTEGERS {
        let register = register(kind);
        let mut cases = pairs(bits(kind));
        cases.retain(|case| case[1] != 0);
        let sources = [register; 2];
        for name in ["div", "rem"] {
            let instruction = format!("{name}.{kind} %d, %s0, %s1;");
            check(&instruction, register, &sources, &cases, |x| {
                let (a, b) = (number(kind, x[0]), number(kind, x[1]));
                (if name == "div" { a / b } else { a % b }) as u64 & mask(kind)
            });
        }
    }
}

#[test]
fn abs_neg_min_max_sad() {
    let signed = ["s16", "s32", "s64"];
    check_integers("abs", &signed, 1, |_, x| x[0].abs());
    check_integers("neg", &signed, 1, |_, x| -x[0]);
    check_integers("min", &INTEGERS, 2, |_, x| x[0].min(x[1]));
    check_integers("max", &INTEGERS, 2, |_, x| x[0].max(x[1]));
    check_integers("sad", &INTEGERS, 3, |_, x| (x[0] - x[1]).abs() + x[2]);
}

#[test]
fn logic() {
    for kind in ["b16", "b32", "b64"] {
        let m = mask(kind);
        let cases = pairs(bits(kind));
        let two = |name: &str, f: fn(u64, u64) -> u64| {
            let instruction = format!("{name}.{kind} %d, %s0, %s1;");
            check(&instruction, kind, &[kind; 2], &cases, |x| {
                f(x[0], x[1]) & m
            });
        };
        two("and", |a, b| a & b);
        two("or", |a, b| a | b);
        two("xor", |a, b| a ^ b);
        let one = |name: &str, f: fn(u64) -> u64| {
            let instruction = format!("{name}.{kind} %d, %s0;");
            check(&instruction, kind, &[kind], &cases, |x| f(x[0]) & m);
        };
        one("not", |a| !a);
        one("cnot", |a| u64::from(a == 0));
    }
    let cases: Vec<Vec<u64>> = (0..4).map(|at| vec![at & 1, at >> 1]).collect();
    let two = |name: &str, f: fn(u64, u64) -> u64| {
        let instruction = format!("{name}.pred %d, %s0, %s1;");
        check(&instruction, "pred", &["pred"; 2], &cases, |x| {
            f(x[0], x[1])
        });
    };
    two("and", |a, b| a & b);
    two("or", |a, b| a | b);
    two("xor", |a, b| a ^ b);
    check("not.pred %d, %s0;", "pred", &["pred"], &cases, |x| 1 - x[0]);
    check("mov.pred %d, %s0;", "pred", &["pred"], &cases, |x| x[0]);
}

#[test]
fn bit_counts_and_reversal() {
    for kind in ["b32", "b64"] {
        let cases = pairs(bits(kind));
        let width = u64::from(bits(kind));
        let count = |x: u64| (0..width).map(|at| x >> at & 1).sum::<u64>();
        let clz = |x: u64| {
            (0..width)
                .take_while(|at| x >> (width - 1 - at) & 1 == 0)
                .count()
        };
        let reversed = |x: u64| (0..width).fold(0, |all, at| all << 1 | (x >> at & 1));
        check(
            &format!("popc.{kind} %d, %s0;"),
            "b32",
            &[kind],
            &cases,
            |x| count(x[0]),
        );
        check(
            &format!("clz.{kind} %d, %s0;"),
            "b32",
            &[kind],
            &cases,
            |x| clz(x[0]) as u64,
        );
        check(
            &format!("brev.{kind} %d, %s0;"),
            kind,
            &[kind],
            &cases,
            |x| reversed(x[0]),
        );
    }
}

#[test]
fn bfind_finds_the_highest_bit_that_differs_from_the_sign() {
    for kind in ["u32", "s32", "u64", "s64"] {
        let width = bits(kind);
        let find = |x: u64, shift: bool| {
            let x = if number(kind, x) < 0 { !x } else { x } & mask(kind);
            match (0..width).rev().find(|at| x >> at & 1 != 0) {
                Some(at) if shift => u64::from(width - 1 - at),
                Some(at) => u64::from(at),
                None => 0xffff_ffff,
            }
        };
        let (source, cases) = ([register(kind)], pairs(width));
        let plain = format!("bfind.{kind} %d, %s0;");
        check(&plain, "b32", &source, &cases, |x| find(x[0], false));
        let shift = format!("bfind.shiftamt.{kind} %d, %s0;");
        check(&shift, "b32", &source, &cases, |x| find(x[0], true));
    }
}

/// Returns cases of a number of `bits` bits, a bit position and a length.
fn fields(bits: u32) -> Vec<Vec<u64>> {
    let mut cases = Vec::new();
    for value in interesting(bits).into_iter().step_by(2) {
        for position in [0, 1, 7, 15, 31, 32, 33, 40, 63, 64, 200, 255, 256, 0x1_0005] {
            for length in [0, 1, 5, 8, 16, 31, 32, 33, 63, 64, 65, 128, 255, 256, 0x201] {
                cases.push(vec![value, position, length]);
            }
        }
    }
    cases
}

#[test]
fn bfe_extracts_and_extends() {
    for kind in ["u32", "s32", "u64", "s64"] {
        let msb = u64::from(bits(kind)) - 1;
        let instruction = format!("bfe.{kind} %d, %s0, %s1, %s2;");
        let sources = [register(kind), "b32", "b32"];
        check(
            &instruction,
            register(kind),
            &sources,
            &fields(bits(kind)),
            |x| {
                let (a, position, length) = (x[0], x[1] & 0xff, x[2] & 0xff);
                let sign = if kind.starts_with('u') || length == 0 {
                    0
                } else {
                    a >> (position + length - 1).min(msb) & 1
                };
                (0..=msb).fold(0, |all, at| {
                    let inside = at < length && position + at <= msb;
                    all | (if inside {
                        a >> (position + at) & 1
                    } else {
                        sign
                    }) << at
                })
            },
        );
    }
}

#[test]
fn bfi_inserts() {
    for kind in ["b32", "b64"] {
        let msb = u64::from(bits(kind)) - 1;
        let mut cases = fields(bits(kind));
        let seconds = interesting(bits(kind));
        for (at, case) in cases.iter_mut().enumerate() {
            case.insert(1, seconds[at % seconds.len()]);
        }
        let expected = |x: &[u64]| {
            let (a, b, position, length) = (x[0], x[1], x[2] & 0xff, x[3] & 0xff);
            let mut d = b;
            for at in 0..length {
                let to = position + at;
                if to <= msb {
                    d = d & !(1 << to) | (if at <= 63 { a >> at & 1 } else { 0 }) << to;
                }
            }
            d
        };
        let sources = [kind, kind, "b32", "b32"];
        let instruction = format!("bfi.{kind} %d, %s0, %s1, %s2, %s3;");
        check(&instruction, kind, &sources, &cases, expected);
        // The result replaces an operand.
        let instruction = format!("bfi.{kind} %s1, %s0, %s1, %s2, %s3; mov.{kind} %d, %s1;");
        check(&instruction, kind, &sources, &cases, expected);
    }
}

#[test]
fn prmt_selects_bytes() {
    let cases: Vec<Vec<u64>> = triples(32)
        .into_iter()
        .enumerate()
        .map(|(at, x)| vec![x[0], x[1], x[2] ^ (at as u64 * 0x9e37 & 0xffff)])
        .collect();
    check(
        "prmt.b32 %d, %s0, %s1, %s2;",
        "b32",
        &["b32"; 3],
        &cases,
        |x| {
            let bytes = x[0] | x[1] << 32;
            (0..4).fold(0, |all, at| {
                let select = x[2] >> (4 * at) & 0xf;
                let byte = bytes >> (8 * (select & 7)) & 0xff;
                let byte = match (select & 8 != 0, byte >= 0x80) {
                    (false, _) => byte,
                    (true, true) => 0xff,
                    (true, false) => 0,
                };
                all | byte << (8 * at)
            })
        },
    );
}

#[test]
fn lop3_computes_all_functions_of_three_operands() {
    let cases = [vec![0xf0f0_3355, 0xcccc_a5a5, 0xaaaa_0ff0]];
    for table in 0..256u64 {
        let instruction = format!("lop3.b32 %d, %s0, %s1, %s2, {table};");
        check(&instruction, "b32", &["b32"; 3], &cases, |x| {
            (0..32).fold(0, |all, at| {
                let [a, b, c] = [0, 1, 2].map(|operand: usize| x[operand] >> at & 1);
                all | (table >> (a * 4 + b * 2 + c) & 1) << at
            })
        });
    }
    // The example of the ISA: (a & b) ^ c.
    let cases = triples(32);
    check(
        "lop3.b32 %d, %s0, %s1, %s2, 0x6a;",
        "b32",
        &["b32"; 3],
        &cases,
        |x| (x[0] & x[1]) ^ x[2],
    );
}

#[test]
fn shifts_clamp_their_amount() {
    for kind in [
        "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64",
    ] {
        let width = bits(kind);
        let mut cases = Vec::new();
        for value in interesting(width) {
            for amount in [
                0,
                1,
                7,
                15,
                16,
                17,
                31,
                32,
                33,
                63,
                64,
                65,
                255,
                0x8000_0001,
            ] {
                cases.push(vec![value, amount]);
            }
        }
        let register = register(kind);
        let right = format!("shr.{kind} %d, %s0, %s1;");
        check(&right, register, &[register, "b32"], &cases, |x| {
            let amount = x[1].min(u64::from(width));
            (number(kind, x[0]) >> amount) as u64 & mask(kind)
        });
        if kind.starts_with('b') {
            let left = format!("shl.{kind} %d, %s0, %s1;");
            check(&left, register, &[register, "b32"], &cases, |x| {
                let amount = x[1].min(u64::from(width));
                ((u128::from(x[0]) << amount) as u64) & mask(kind)
            });
        }
    }
}

#[test]
fn funnel_shifts() {
    let mut cases = Vec::new();
    for pair in pairs(32) {
        for amount in [0, 1, 8, 31, 32, 33, 63, 64, 0xffff_ffff] {
            cases.push(vec![pair[0], pair[1], amount]);
        }
    }
    for (direction, mode) in [("l", "wrap"), ("l", "clamp"), ("r", "wrap"), ("r", "clamp")] {
        let instruction = format!("shf.{direction}.{mode}.b32 %d, %s0, %s1, %s2;");
        check(&instruction, "b32", &["b32"; 3], &cases, |x| {
            let n = if mode == "wrap" {
                x[2] & 31
            } else {
                x[2].min(32)
            };
            let pair = u128::from(x[0]) | u128::from(x[1]) << 32;
            let all = if direction == "l" {
                pair << n >> 32
            } else {
                pair >> n
            };
            all as u64 & 0xffff_ffff
        });
    }
}

#[test]
fn selp_and_slct() {
    for kind in ["b16", "b32", "b64", "u16", "s32", "u64"] {
        let register = register(kind);
        let mut cases = pairs(bits(kind));
        for (at, case) in cases.iter_mut().enumerate() {
            case.push(at as u64 % 2);
        }
        let instruction = format!("selp.{kind} %d, %s0, %s1, %s2;");
        check(
            &instruction,
            register,
            &[register, register, "pred"],
            &cases,
            |x| {
                if x[2] != 0 { x[0] } else { x[1] }
            },
        );
    }
    let selectors = [0u64, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x7fc0_0000];
    let cases = |bits: u32| -> Vec<Vec<u64>> {
        let with = |(at, pair): (usize, Vec<u64>)| vec![pair[0], pair[1], selectors[at % 6]];
        pairs(bits).into_iter().enumerate().map(with).collect()
    };
    for kind in ["b16", "b32", "b64", "u32", "s32", "f32"] {
        let register = register(kind);
        let sources = [register, register, "b32"];
        let instruction = format!("slct.{kind}.s32 %d, %s0, %s1, %s2;");
        check(&instruction, register, &sources, &cases(bits(kind)), |x| {
            if (x[2] as i32) >= 0 { x[0] } else { x[1] }
        });
        // Negative zero equals zero; NaN selects the second operand.
        let instruction = format!("slct.{kind}.f32 %d, %s0, %s1, %s2;");
        check(&instruction, register, &sources, &cases(bits(kind)), |x| {
            if f32::from_bits(x[2] as u32) >= 0.0 {
                x[0]
            } else {
                x[1]
            }
        });
    }
    // Flushed subnormal numbers equal zero.
    let cases = [vec![1, 2, 0x8000_0001], vec![1, 2, 0x8080_0000]];
    let results = evaluate(
        "slct.ftz.b32.f32 %d, %s0, %s1, %s2;",
        "b32",
        &["b32"; 3],
        &cases,
    );
    assert_eq!(results, [1, 2]);
}

/// Returns the result of a comparison of integers.
fn compares(name: &str, order: core::cmp::Ordering) -> bool {
    match name {
        "eq" => order.is_eq(),
        "ne" => order.is_ne(),
        "lt" | "lo" => order.is_lt(),
        "le" | "ls" => order.is_le(),
        "gt" | "hi" => order.is_gt(),
        _ => order.is_ge(),
    }
}

#[test]
fn setp_of_integers() {
    let all: &[&str] = &["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"];
    for kind in ["b16", "b32", "b64"].iter().chain(&INTEGERS) {
        let names = match &kind[..1] {
            "b" => &all[..2],
            "s" => &all[..6],
            _ => all,
        };
        for name in names {
            let instruction = format!("setp.{name}.{kind} %d, %s0, %s1;");
            let sources = [register(kind); 2];
            check(&instruction, "pred", &sources, &pairs(bits(kind)), |x| {
                compares(name, number(kind, x[0]).cmp(&number(kind, x[1]))).into()
            });
        }
    }
}

/// Returns the result of a comparison of floating-point numbers.
fn compares_floats(name: &str, order: Option<core::cmp::Ordering>) -> bool {
    match (name, order) {
        ("num", _) => order.is_some(),
        ("nan", _) => order.is_none(),
        (name, None) => name.ends_with('u'),
        (name, Some(order)) => compares(name.trim_end_matches('u'), order),
    }
}

const COMPARISONS: [&str; 14] = [
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan",
];

#[test]
fn setp_of_floats() {
    let values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        1.5,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        -f64::NAN,
        65504.0,
    ];
    type Encode = fn(f64) -> u64;
    let kinds: [(&str, Encode); 4] = [
        ("f64", |x| x.to_bits()),
        ("f32", |x| (x as f32).to_bits().into()),
        ("f16", |x| half::f16::from_f64(x).to_bits().into()),
        ("bf16", |x| half::bf16::from_f64(x).to_bits().into()),
    ];
    for (kind, encode) in kinds {
        let register = match kind {
            "f64" => "b64",
            "f32" => "b32",
            _ => "b16",
        };
        let mut cases = Vec::new();
        let mut expected = Vec::new();
        for a in values {
            for b in values {
                cases.push(vec![encode(a), encode(b)]);
                expected.push(a.partial_cmp(&b));
            }
        }
        // 65504 is 65536 in bf16, which keeps the order.
        for name in COMPARISONS {
            let instruction = format!("setp.{name}.{kind} %d, %s0, %s1;");
            let results = evaluate(&instruction, "pred", &[register; 2], &cases);
            for ((case, order), got) in cases.iter().zip(&expected).zip(results) {
                let want = u64::from(compares_floats(name, *order));
                assert_eq!(got, want, "{instruction} {case:x?}");
            }
        }
    }
    // Subnormal numbers.
    let cases = [vec![1, 0], vec![0x8000_0001, 0], vec![1, 2]];
    let plain = evaluate("setp.eq.f32 %d, %s0, %s1;", "pred", &["b32"; 2], &cases);
    assert_eq!(plain, [0, 0, 0]);
    let flushed = evaluate("setp.eq.ftz.f32 %d, %s0, %s1;", "pred", &["b32"; 2], &cases);
    assert_eq!(flushed, [1, 1, 1]);
}

#[test]
fn setp_combines_with_a_predicate() {
    let cases: Vec<Vec<u64>> = (0..12).map(|at| vec![at / 4, 1, at % 2]).collect();
    for word in ["and", "or", "xor"] {
        for third in ["%s2", "!%s2"] {
            let combine = |compared: bool, x: &[u64]| {
                let c = (x[2] != 0) != third.starts_with('!');
                u64::from(match word {
                    "and" => compared && c,
                    "or" => compared || c,
                    _ => compared != c,
                })
            };
            let kinds = ["b32", "b32", "pred"];
            let text = format!("setp.le.{word}.u32 %d|%q0, %s0, %s1, {third};");
            check(&text, "pred", &kinds, &cases, |x| combine(x[0] <= x[1], x));
            let text = format!("setp.le.{word}.u32 %q0|%d, %s0, %s1, {third};");
            check(&text, "pred", &kinds, &cases, |x| combine(x[0] > x[1], x));
            let text = format!("setp.le.{word}.u32 %d, %s0, %s1, {third};");
            check(&text, "pred", &kinds, &cases, |x| combine(x[0] <= x[1], x));
            // The third operand is also the first result.
            let text = format!(
                "mov.pred %q1, %s2; setp.le.{word}.u32 %q1|%d, %s0, %s1, {};",
                third.replace("%s2", "%q1")
            );
            check(&text, "pred", &kinds, &cases, |x| combine(x[0] > x[1], x));
        }
    }
    check(
        "setp.lt.u32 %q0|%d, %s0, %s1;",
        "pred",
        &["b32"; 2],
        &cases,
        |x| u64::from(x[0] >= x[1]),
    );
    check(
        "setp.lt.u32 _|%d, %s0, %s1;",
        "pred",
        &["b32"; 2],
        &cases,
        |x| u64::from(x[0] >= x[1]),
    );
    // The second result of an unordered comparison is the complement of the first.
    let nan = [vec![0x7fc0_0000, 0]];
    check(
        "setp.lt.f32 %q0|%d, %s0, %s1;",
        "pred",
        &["b32"; 2],
        &nan,
        |_| 1,
    );
}

#[test]
fn set_returns_all_ones_or_one() {
    let cases: Vec<Vec<u64>> = (0..12).map(|at| vec![at / 4, 1, at % 2]).collect();
    for (result, one) in [
        ("u32", 0xffff_ffff),
        ("s32", 0xffff_ffff),
        ("f32", 0x3f80_0000),
    ] {
        let text = format!("set.ge.{result}.s32 %d, %s0, %s1;");
        check(&text, "b32", &["b32"; 2], &cases, |x| {
            if x[0] >= x[1] { one } else { 0 }
        });
        let text = format!("set.ge.and.{result}.s32 %d, %s0, %s1, %s2;");
        check(&text, "b32", &["b32", "b32", "pred"], &cases, |x| {
            if x[0] >= x[1] && x[2] != 0 { one } else { 0 }
        });
        let text = format!("set.ltu.{result}.f64 %d, %s0, %s1;");
        let floats = [
            vec![2f64.to_bits(), 1f64.to_bits()],
            vec![f64::NAN.to_bits(), 0],
        ];
        check(&text, "b32", &["b64"; 2], &floats, |x| {
            if f64::from_bits(x[0]).is_nan() {
                one
            } else {
                0
            }
        });
    }
}

#[test]
fn cvt_between_integers() {
    let kinds = ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"];
    for from in kinds {
        for to in kinds {
            let cases: Vec<Vec<u64>> = interesting(bits(register(from)))
                .into_iter()
                .map(|it| vec![it])
                .collect();
            // An 8-bit source is the low bits of its register. The result is extended to the width
            // of its register.
            let extended = |x: i128| number(to, x as u64) as u64;
            for result in ["b16", "b32", "b64"] {
                if bits(result) < bits(to) {
                    continue;
                }
                let m = mask(result);
                let text = format!("cvt.{to}.{from} %d, %s0;");
                check(&text, result, &[register(from)], &cases, |x| {
                    extended(number(from, x[0])) & m
                });
                let (low, high) = match &to[..1] {
                    "s" => (-(1i128 << (bits(to) - 1)), (1i128 << (bits(to) - 1)) - 1),
                    _ => (0, (1i128 << bits(to)) - 1),
                };
                let text = format!("cvt.sat.{to}.{from} %d, %s0;");
                check(&text, result, &[register(from)], &cases, |x| {
                    extended(number(from, x[0]).clamp(low, high)) & m
                });
            }
        }
    }
}

#[test]
fn cvt_accepts_a_wider_source_register() {
    let cases: Vec<Vec<u64>> = interesting(32).into_iter().map(|it| vec![it]).collect();
    check("cvt.u64.u8 %d, %s0;", "b64", &["b32"], &cases, |x| {
        x[0] & 0xff
    });
    check("cvt.s64.s8 %d, %s0;", "b64", &["b32"], &cases, |x| {
        x[0] as i8 as u64
    });
    check("cvt.s32.s16 %d, %s0;", "b32", &["b32"], &cases, |x| {
        x[0] as i16 as u32 as u64
    });
    check("cvt.rn.f32.u8 %d, %s0;", "b32", &["b32"], &cases, |x| {
        u64::from(f32::from(x[0] as u8).to_bits())
    });
    check("cvt.rn.f32.s8 %d, %s0;", "b32", &["b32"], &cases, |x| {
        u64::from(f32::from(x[0] as i8).to_bits())
    });
}

#[test]
fn mov_packs_and_unpacks() {
    let b64 = [vec![0x0123_4567_89ab_cdef]];
    let low = evaluate("mov.b64 {%d, %r1}, %s0;", "b32", &["b64"], &b64);
    assert_eq!(low, [0x89ab_cdef]);
    let high = evaluate("mov.b64 {_, %d}, %s0;", "b32", &["b64"], &b64);
    assert_eq!(high, [0x0123_4567]);
    for (at, part) in ["0xcdef", "0x89ab", "0x4567", "0x0123"]
        .into_iter()
        .enumerate()
    {
        let mut names = ["%h0", "%h1", "%h2", "%h3"];
        names[at] = "%d";
        let text = format!("mov.b64 {{{}}}, %s0;", names.join(", "));
        let value = u64::from_str_radix(&part[2..], 16).expect("the part is hexadecimal");
        assert_eq!(evaluate(&text, "b16", &["b64"], &b64), [value], "{text}");
    }
    let words = [vec![0x89ab_cdef, 0x0123_4567]];
    let text = "mov.b64 %d, {%s0, %s1};";
    assert_eq!(
        evaluate(text, "b64", &["b32"; 2], &words),
        [0x0123_4567_89ab_cdef]
    );
    let halves = [vec![0xcdef, 0x89ab, 0x4567, 0x0123]];
    let text = "mov.b64 %d, {%s0, %s1, %s2, %s3};";
    assert_eq!(
        evaluate(text, "b64", &["b16"; 4], &halves),
        [0x0123_4567_89ab_cdef]
    );
    let text = "mov.b32 %d, {%s0, %s1};";
    assert_eq!(evaluate(text, "b32", &["b16"; 2], &halves), [0x89ab_cdef]);
    // The result replaces an operand.
    let text = "mov.b64 {%s1, %s0}, %s2; mov.b64 %d, {%s0, %s1};";
    let swap = [vec![1, 2, 0x0123_4567_89ab_cdef]];
    let got = evaluate(text, "b64", &["b32", "b32", "b64"], &swap);
    assert_eq!(got, [0x89ab_cdef_0123_4567]);
    let text = "mov.b32 %r0, {%s0, %s1}; mov.b32 {%s1, %s0}, %r0; mov.b32 %d, {%s0, %s1};";
    assert_eq!(evaluate(text, "b32", &["b16"; 2], &halves), [0xcdef_89ab]);
}

#[test]
fn carries_chain() {
    let cases: Vec<Vec<u64>> = pairs(64);
    let split = "mov.b64 {%r0, %r1}, %s0; mov.b64 {%r2, %r3}, %s1;";
    let join = "mov.b64 %d, {%r4, %r5};";
    for (name, f) in [
        ("add", u64::wrapping_add as fn(u64, u64) -> u64),
        ("sub", u64::wrapping_sub),
    ] {
        let text =
            format!("{split} {name}.cc.u32 %r4, %r0, %r2; {name}c.u32 %r5, %r1, %r3; {join}");
        check(&text, "b64", &["b64"; 2], &cases, |x| f(x[0], x[1]));
        // The result replaces an operand.
        let text = format!(
            "{split} {name}.cc.s32 %r0, %r0, %r2; {name}c.s32 %r1, %r1, %r3; \
             mov.b64 %d, {{%r0, %r1}};"
        );
        check(&text, "b64", &["b64"; 2], &cases, |x| f(x[0], x[1]));
        // The flag after two words: 1 for a carry of an addition, a borrow of a subtraction.
        let text = format!(
            "{split} {name}.cc.u32 %r4, %r0, %r2; {name}c.cc.u32 %r5, %r1, %r3; \
             {name}c.u32 %d, 0, 0;"
        );
        check(&text, "b32", &["b64"; 2], &cases, |x| match name {
            "add" => u64::from(x[0].checked_add(x[1]).is_none()),
            _ if x[0] < x[1] => 0xffff_ffff,
            _ => 0,
        });
        let text = format!("{name}.cc.u64 %d, %s0, %s1; {name}c.u64 %d, 5, 3;");
        check(&text, "b64", &["b64"; 2], &cases, |x| match name {
            "add" => 8 + u64::from(x[0].checked_add(x[1]).is_none()),
            _ => 2 - u64::from(x[0] < x[1]),
        });
    }
    // Other instructions between keep the flag.
    let text = format!(
        "{split} add.cc.u32 %r4, %r0, %r2; add.u32 %r6, %r0, %r2; mul.lo.u32 %r7, %r6, 3; \
         addc.u32 %r5, %r1, %r3; {join}"
    );
    check(&text, "b64", &["b64"; 2], &cases, |x| {
        x[0].wrapping_add(x[1])
    });
}

#[test]
fn results_that_are_not_used_do_not_replace_others() {
    // Several destinations of one instruction, of which some are never read.
    let body = "mov.u32 %r0, 100; mov.u32 %r1, 101; mov.u32 %r2, 102; mov.u32 %r3, 103;
        st.global.v4.u32 [%in0+64], {%r0, %r1, %r2, %r3};
        ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%in0+64];
        shfl.sync.idx.b32 %r8|%p0, %r6, 0, 31, 1;
        shfl.sync.idx.b32 %r9|%p1, %r6, 0, 31, 1;
        setp.eq.u32 %p2|%p3, %r6, 102;
        selp.u32 %r10, 1, 2, %p0;
        selp.u32 %r11, 1, 2, %p3;
        st.global.u32 [%in0], %r6;
        st.global.u32 [%in0+4], %r10;
        st.global.u32 [%in0+8], %r9;
        st.global.u32 [%in0+12], %r11;
        ret;";
    assert_eq!(run_body(body, 1, 20)[..4], [102, 1, 102, 2]);
}

#[test]
fn guards_keep_old_values() {
    let body = "and.b32 %r0, %lane, 1; setp.eq.u32 %p0, %r0, 1; mov.u32 %r1, 5;
        @%p0 mov.u32 %r1, 6;
        @!%p0 add.u32 %r1, %r1, 10;
        @%p0 mov.b64 %d1, {%r1, %r1};
        @!%p0 mov.b64 %d1, {%r0, %r1};
        @%p0 bfi.b32 %r1, 0xff, %r1, 8, 8;
        mov.b64 {%r2, %r3}, %d1;
        mad.lo.u32 %r4, %r2, 1000, %r1;
        mul.wide.u32 %d0, %lane, 4; add.u64 %d0, %in0, %d0; st.global.u32 [%d0], %r4; ret;";
    let expected: Vec<u32> = (0..32)
        .map(|lane| if lane % 2 == 1 { 6000 + 0xff06 } else { 15 })
        .collect();
    assert_eq!(run_body(body, 32, 32), expected);
}

#[test]
fn registers_in_inner_scopes_hide_outer_ones() {
    let body = "mov.u32 %r0, 1; { .reg .b32 %r0; mov.u32 %r0, 2; st.global.u32 [%in0], %r0;
        { .reg .b32 %r<4>; mov.u32 %r0, 3; st.global.u32 [%in0+4], %r0; } }
        st.global.u32 [%in0+8], %r0; ret;";
    assert_eq!(run(&kernel(1, body), 1, 3), [2, 3, 1]);
}

// Floating point.

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
                let less = a.0 < b.0 || a.0 == b.0 && a.1 < b.1;
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
