//! Integer, bit, comparison and integer conversion instructions, compared with functions that
//! follow the PTX ISA.

mod common;

use common::{
    bits, check, evaluate, interesting, kernel, mask, number, pairs, register, run, run_body,
    triples,
};

const INTEGERS: [&str; 6] = ["u16", "s16", "u32", "s32", "u64", "s64"];

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
            ((x[0] as u128 * x[1] as u128) >> 64) as i128
        } else {
            (x[0] * x[1]) >> bits(kind)
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
        .map(|(at, x)| vec![x[0], x[1], x[2] ^ ((at as u64 * 0x9e37) & 0xffff)])
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
