//! Integer, logical and comparison operations, and the common floating-point operations, on the
//! registers of a warp.

use crate::row::{AluFn, LANES, Row};

/// Properties that `testp` tests.
pub(crate) const TESTP: [&str; 6] = [
    "finite",
    "infinite",
    "number",
    "notanumber",
    "normal",
    "subnormal",
];

/// Defines an [`AluFn`] from an expression of three values. With few lanes, it is computed for
/// these lanes, otherwise for all.
macro_rules! alu {
    ($a:ident, $b:ident, $c:ident => $value:expr) => {{
        fn operation(d: &mut Row, [x, y, z]: [&Row; 3], mut mask: u32) {
            #[inline(always)]
            #[allow(unused_variables, clippy::unnecessary_cast)]
            fn lane($a: u64, $b: u64, $c: u64) -> u64 {
                $value
            }
            if mask.count_ones() > 3 {
                for l in 0..LANES {
                    d[l] = lane(x[l], y[l], z[l]);
                }
            } else {
                while mask != 0 {
                    let l = mask.trailing_zeros() as usize % LANES;
                    d[l] = lane(x[l], y[l], z[l]);
                    mask &= mask - 1;
                }
            }
        }
        operation as AluFn
    }};
}

/// Defines an [`AluFn`] for an integer type. The operands and the result have this type.
macro_rules! typed {
    ($T:ty, $U:ty; $a:ident, $b:ident, $c:ident => $value:expr) => {
        alu!(x, y, z => {
            let ($a, $b, $c) = (x as $T, y as $T, z as $T);
            ($value) as $U as u64
        })
    };
}

/// Selects an [`AluFn`] by an integer type.
macro_rules! integers {
    ($kind:expr; $a:ident, $b:ident, $c:ident => $value:expr) => {
        match $kind {
            "u16" | "b16" => Some(typed!(u16, u16; $a, $b, $c => $value)),
            "s16" => Some(typed!(i16, u16; $a, $b, $c => $value)),
            "u32" | "b32" => Some(typed!(u32, u32; $a, $b, $c => $value)),
            "s32" => Some(typed!(i32, u32; $a, $b, $c => $value)),
            "u64" | "b64" => Some(typed!(u64, u64; $a, $b, $c => $value)),
            "s64" => Some(typed!(i64, u64; $a, $b, $c => $value)),
            _ => None,
        }
    };
}

/// Selects an [`AluFn`] by a bit width, or for predicates.
macro_rules! bits {
    ($kind:expr; $a:ident, $b:ident, $c:ident => $value:expr) => {
        match $kind {
            "pred" => Some(alu!($a, $b, $c => ($value) & 1)),
            "b16" | "u16" | "s16" => Some(typed!(u16, u16; $a, $b, $c => $value)),
            "b32" | "u32" | "s32" => Some(typed!(u32, u32; $a, $b, $c => $value)),
            "b64" | "u64" | "s64" => Some(typed!(u64, u64; $a, $b, $c => $value)),
            _ => None,
        }
    };
}

/// Returns the first operand.
pub(crate) fn copy() -> AluFn {
    alu!(a, b, c => a)
}

/// Returns the first operand if the third operand is true, else the second.
pub(crate) fn select() -> AluFn {
    alu!(a, b, c => if c & 1 != 0 { a } else { b })
}

/// Sign-extends the low `from` bits to `to` bits.
pub(crate) fn sign_extend(from: u32, to: u32) -> Option<AluFn> {
    Some(match (from, to) {
        (8, 16) => alu!(a, b, c => a as i8 as u16 as u64),
        (8, 32) => alu!(a, b, c => a as i8 as u32 as u64),
        (8, 64) => alu!(a, b, c => a as i8 as u64),
        (16, 32) => alu!(a, b, c => a as i16 as u32 as u64),
        (16, 64) => alu!(a, b, c => a as i16 as u64),
        (32, 64) => alu!(a, b, c => a as i32 as u64),
        _ => return None,
    })
}

/// Truncates to a number of bits.
pub(crate) fn truncate(bits: u32) -> AluFn {
    match bits {
        1 => alu!(a, b, c => a & 1),
        8 => alu!(a, b, c => a as u8 as u64),
        16 => alu!(a, b, c => a as u16 as u64),
        32 => alu!(a, b, c => a as u32 as u64),
        _ => copy(),
    }
}

/// Shifts the first operand left or right by the second.
pub(crate) fn shift(left: bool) -> AluFn {
    if left {
        alu!(a, b, c => a << (b & 63))
    } else {
        alu!(a, b, c => a >> (b & 63))
    }
}

/// Combines the operands with a bitwise or.
pub(crate) fn or() -> AluFn {
    alu!(a, b, c => a | b)
}

/// Adds 64-bit addresses.
pub(crate) fn add64() -> AluFn {
    alu!(a, b, c => a.wrapping_add(b))
}

/// Tests if a generic address is in the state space with a base address. The second operand is the
/// base, or 0 for global memory.
pub(crate) fn in_space() -> AluFn {
    alu!(a, b, c => {
        let high = a & 0xffff_0000_0000_0000;
        u64::from(high == b)
    })
}

/// Returns the mask of a bit field: the first operand is its position, the second its length.
pub(crate) fn field(width: u32) -> AluFn {
    fn mask(position: u64, length: u64, width: u32) -> u64 {
        let ones = match length & 0xff {
            64.. => u64::MAX,
            length => (1 << length) - 1,
        };
        let all = u64::MAX >> (64 - width);
        match (position & 0xff) as u32 {
            position if position < width => (ones << position) & all,
            _ => 0,
        }
    }
    if width == 64 {
        alu!(a, b, c => mask(a, b, 64))
    } else {
        alu!(a, b, c => mask(a, b, 32))
    }
}

/// Returns the bits of the first operand where the third is set, else those of the second.
pub(crate) fn blend() -> AluFn {
    alu!(a, b, c => (a & c) | (b & !c))
}

fn prmt(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = (a & 0xffff_ffff) | b << 32;
    (0..4).fold(0, |all, at| {
        let select = selector >> (4 * at) & 15;
        let byte = (bytes >> (8 * (select & 7))) as u8;
        let byte = if select & 8 != 0 {
            ((byte as i8) >> 7) as u8
        } else {
            byte
        };
        all | u64::from(byte) << (8 * at)
    })
}

fn bfe(value: u64, position: u64, length: u64, width: u32, signed: bool) -> u64 {
    let (position, length) = ((position & 0xff) as u32, (length & 0xff) as u32);
    let sign = if !signed || length == 0 {
        0
    } else {
        value >> (position + length - 1).min(width - 1) & 1
    };
    (0..width).fold(0, |all, at| {
        let from = position + at;
        let bit = if at < length && from < width {
            value >> from & 1
        } else {
            sign
        };
        all | bit << at
    })
}

fn bfe_unsigned(value: u64, position: u64, length: u64, width: u32) -> u64 {
    let (position, length) = ((position & 0xff) as u32, (length & 0xff) as u32);
    let shifted = value.checked_shr(position).unwrap_or(0);
    let limited = if width == 32 && position >= 32 {
        0
    } else {
        shifted
    };
    match length {
        64.. => limited,
        length => limited & ((1 << length) - 1),
    }
}

/// Returns the integer operation `base` with modifiers. The last modifier is the type.
pub(crate) fn integer(base: &str, modifiers: &[&str]) -> Option<AluFn> {
    let (kind, modifiers) = modifiers.split_last()?;
    let kind = *kind;
    match (base, modifiers) {
        ("add", []) => integers!(kind; a, b, c => a.wrapping_add(b)),
        ("add", ["sat"]) if kind == "s32" => Some(typed!(i32, u32; a, b, c => a.saturating_add(b))),
        ("sub", []) => integers!(kind; a, b, c => a.wrapping_sub(b)),
        ("sub", ["sat"]) if kind == "s32" => Some(typed!(i32, u32; a, b, c => a.saturating_sub(b))),
        ("mul", ["lo"]) => integers!(kind; a, b, c => a.wrapping_mul(b)),
        ("mad", ["lo"]) => integers!(kind; a, b, c => a.wrapping_mul(b).wrapping_add(c)),
        ("mul", ["hi"]) => Some(match kind {
            "u16" => typed!(u16, u16; a, b, c => (u32::from(a) * u32::from(b)) >> 16),
            "s16" => typed!(i16, u16; a, b, c => (i32::from(a) * i32::from(b)) >> 16),
            "u32" => typed!(u32, u32; a, b, c => (u64::from(a) * u64::from(b)) >> 32),
            "s32" => typed!(i32, u32; a, b, c => (i64::from(a) * i64::from(b)) >> 32),
            "u64" => typed!(u64, u64; a, b, c => (u128::from(a) * u128::from(b)) >> 64),
            "s64" => typed!(i64, u64; a, b, c => (i128::from(a) * i128::from(b)) >> 64),
            _ => return None,
        }),
        ("mad", ["hi"]) => Some(match kind {
            "u32" => {
                typed!(u32, u32; a, b, c =>
                    (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c))
            }
            "s32" => {
                typed!(i32, u32; a, b, c =>
                    (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c))
            }
            "u64" => {
                typed!(u64, u64; a, b, c =>
                    (((u128::from(a) * u128::from(b)) >> 64) as u64).wrapping_add(c))
            }
            "s64" => {
                typed!(i64, u64; a, b, c =>
                    (((i128::from(a) * i128::from(b)) >> 64) as i64).wrapping_add(c))
            }
            _ => return None,
        }),
        ("mul", ["wide"]) => Some(match kind {
            "u16" => alu!(a, b, c => u64::from(a as u16 as u32 * b as u16 as u32)),
            "s16" => alu!(a, b, c => (a as i16 as i32).wrapping_mul(b as i16 as i32) as u32 as u64),
            "u32" => alu!(a, b, c => (a as u32 as u64) * (b as u32 as u64)),
            "s32" => alu!(a, b, c => (a as i32 as i64 * b as i32 as i64) as u64),
            _ => return None,
        }),
        ("mad", ["wide"]) => Some(match kind {
            "u16" => {
                alu!(a, b, c => (a as u16 as u32 * b as u16 as u32).wrapping_add(c as u32) as u64)
            }
            "s16" => alu!(a, b, c => {
                (a as i16 as i32).wrapping_mul(b as i16 as i32).wrapping_add(c as i32) as u32 as u64
            }),
            "u32" => alu!(a, b, c => ((a as u32 as u64) * (b as u32 as u64)).wrapping_add(c)),
            "s32" => {
                alu!(a, b, c => (a as i32 as i64 * b as i32 as i64).wrapping_add(c as i64) as u64)
            }
            _ => return None,
        }),
        ("mul24", ["lo"]) => Some(match kind {
            "u32" => typed!(u32, u32; a, b, c => (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff)),
            "s32" => typed!(i32, u32; a, b, c => (a << 8 >> 8).wrapping_mul(b << 8 >> 8)),
            _ => return None,
        }),
        ("mad24", ["lo"]) => Some(match kind {
            "u32" => {
                typed!(u32, u32; a, b, c =>
                    (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff).wrapping_add(c))
            }
            "s32" => {
                typed!(i32, u32; a, b, c =>
                    (a << 8 >> 8).wrapping_mul(b << 8 >> 8).wrapping_add(c))
            }
            _ => return None,
        }),
        ("sad", []) => integers!(kind; a, b, c => {
            (if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) }).wrapping_add(c)
        }),
        // PTX leaves the result of a division by zero unspecified.
        ("div", []) => integers!(kind; a, b, c => if b == 0 { !0 } else { a.wrapping_div(b) }),
        ("rem", []) => integers!(kind; a, b, c => if b == 0 { a } else { a.wrapping_rem(b) }),
        ("abs", []) => Some(match kind {
            "s16" => typed!(i16, u16; a, b, c => a.wrapping_abs()),
            "s32" => typed!(i32, u32; a, b, c => a.wrapping_abs()),
            "s64" => typed!(i64, u64; a, b, c => a.wrapping_abs()),
            _ => return None,
        }),
        ("neg", []) => integers!(kind; a, b, c => a.wrapping_neg()),
        ("min", []) => integers!(kind; a, b, c => a.min(b)),
        ("max", []) => integers!(kind; a, b, c => a.max(b)),
        ("popc", []) => Some(match kind {
            "b32" => alu!(a, b, c => u64::from((a as u32).count_ones())),
            "b64" => alu!(a, b, c => u64::from(a.count_ones())),
            _ => return None,
        }),
        ("clz", []) => Some(match kind {
            "b32" => alu!(a, b, c => u64::from((a as u32).leading_zeros())),
            "b64" => alu!(a, b, c => u64::from(a.leading_zeros())),
            _ => return None,
        }),
        ("brev", []) => Some(match kind {
            "b32" => typed!(u32, u32; a, b, c => a.reverse_bits()),
            "b64" => typed!(u64, u64; a, b, c => a.reverse_bits()),
            _ => return None,
        }),
        ("bfind", [] | ["shiftamt"]) => {
            let shift = !modifiers.is_empty();
            Some(match (kind, shift) {
                ("u32", false) => alu!(a, b, c => find(u64::from(a as u32), 32, false)),
                ("u32", true) => alu!(a, b, c => find(u64::from(a as u32), 32, true)),
                ("s32", false) => alu!(a, b, c => find(fold_sign(a as i32 as i64, 32), 32, false)),
                ("s32", true) => alu!(a, b, c => find(fold_sign(a as i32 as i64, 32), 32, true)),
                ("u64", false) => alu!(a, b, c => find(a, 64, false)),
                ("u64", true) => alu!(a, b, c => find(a, 64, true)),
                ("s64", false) => alu!(a, b, c => find(fold_sign(a as i64, 64), 64, false)),
                ("s64", true) => alu!(a, b, c => find(fold_sign(a as i64, 64), 64, true)),
                _ => return None,
            })
        }
        ("bfe", []) => Some(match kind {
            "u32" => alu!(a, b, c => bfe_unsigned(a & 0xffff_ffff, b, c, 32)),
            "u64" => alu!(a, b, c => bfe_unsigned(a, b, c, 64)),
            "s32" => alu!(a, b, c => bfe(a, b, c, 32, true)),
            "s64" => alu!(a, b, c => bfe(a, b, c, 64, true)),
            _ => return None,
        }),
        ("and", []) => bits!(kind; a, b, c => a & b),
        ("or", []) => bits!(kind; a, b, c => a | b),
        ("xor", []) => bits!(kind; a, b, c => a ^ b),
        ("not", []) => bits!(kind; a, b, c => !a),
        ("cnot", []) => Some(match kind {
            "b16" => alu!(a, b, c => u64::from(a as u16 == 0)),
            "b32" => alu!(a, b, c => u64::from(a as u32 == 0)),
            "b64" => alu!(a, b, c => u64::from(a == 0)),
            _ => return None,
        }),
        ("shl", []) => Some(match kind {
            "b16" => {
                alu!(a, b, c => u64::from((a as u16).checked_shl(b as u32).unwrap_or(0)))
            }
            "b32" => {
                alu!(a, b, c => u64::from((a as u32).checked_shl(b as u32).unwrap_or(0)))
            }
            "b64" => alu!(a, b, c => a.checked_shl(b as u32).unwrap_or(0)),
            _ => return None,
        }),
        ("shr", []) => Some(match kind {
            "b16" | "u16" => {
                alu!(a, b, c => u64::from((a as u16).checked_shr(b as u32).unwrap_or(0)))
            }
            "b32" | "u32" => {
                alu!(a, b, c => u64::from((a as u32).checked_shr(b as u32).unwrap_or(0)))
            }
            "b64" | "u64" => alu!(a, b, c => a.checked_shr(b as u32).unwrap_or(0)),
            "s16" => alu!(a, b, c => (a as i16 >> (b as u32).min(15)) as u16 as u64),
            "s32" => alu!(a, b, c => (a as i32 >> (b as u32).min(31)) as u32 as u64),
            "s64" => alu!(a, b, c => (a as i64 >> (b as u32).min(63)) as u64),
            _ => return None,
        }),
        ("shf", ["l", "wrap"]) => {
            Some(alu!(a, b, c => (pair(a, b) << (c & 31) >> 32) & 0xffff_ffff))
        }
        ("shf", ["r", "wrap"]) => Some(alu!(a, b, c => pair(a, b) >> (c & 31) & 0xffff_ffff)),
        ("shf", ["l", "clamp"]) => Some(alu!(a, b, c => {
            let shift = (c & 0xffff_ffff).min(32) as u32;
            ((pair(a, b) as u128) << shift >> 32) as u64 & 0xffff_ffff
        })),
        ("shf", ["r", "clamp"]) => {
            Some(alu!(a, b, c => pair(a, b) >> (c & 0xffff_ffff).min(32) & 0xffff_ffff))
        }
        ("prmt", []) if kind == "b32" => Some(alu!(a, b, c => prmt(a, b, c))),
        _ => None,
    }
}

/// Returns `a` in the low and `b` in the high 32 bits.
fn pair(a: u64, b: u64) -> u64 {
    (a & 0xffff_ffff) | b << 32
}

/// Returns the position of the highest bit, or all ones if there is none.
fn find(value: u64, width: u32, shift: bool) -> u64 {
    match value {
        0 => 0xffff_ffff,
        value => {
            let position = 63 - value.leading_zeros();
            u64::from(if shift {
                width - 1 - position
            } else {
                position
            })
        }
    }
}

/// Returns the bits of a signed value that differ from its sign.
fn fold_sign(value: i64, width: u32) -> u64 {
    let folded = if value < 0 { !value } else { value } as u64;
    if width == 32 {
        folded & 0xffff_ffff
    } else {
        folded
    }
}

/// Returns the carry of `base` (`add`, `addc`, `sub`, `subc`): operands a, b and the carry flag.
pub(crate) fn carry(base: &str, wide: bool) -> Option<AluFn> {
    Some(match (base, wide) {
        ("add", false) => alu!(a, b, c => ((a as u32 as u64) + (b as u32 as u64)) >> 32),
        ("add", true) => alu!(a, b, c => u64::from(a.overflowing_add(b).1)),
        ("addc", false) => alu!(a, b, c => ((a as u32 as u64) + (b as u32 as u64) + c) >> 32),
        ("addc", true) => {
            alu!(a, b, c => ((u128::from(a) + u128::from(b) + u128::from(c)) >> 64) as u64)
        }
        ("sub", false) => alu!(a, b, c => u64::from((a as u32) < b as u32)),
        ("sub", true) => alu!(a, b, c => u64::from(a < b)),
        ("subc", false) => alu!(a, b, c => u64::from((a as u32 as u64) < (b as u32 as u64) + c)),
        ("subc", true) => alu!(a, b, c => u64::from(u128::from(a) < u128::from(b) + u128::from(c))),
        _ => return None,
    })
}

/// Returns the sum or difference of `base` (`add`, `addc`, `sub`, `subc`) with the carry flag.
pub(crate) fn with_carry(base: &str, wide: bool) -> Option<AluFn> {
    Some(match (base, wide) {
        ("add", false) => typed!(u32, u32; a, b, c => a.wrapping_add(b)),
        ("add", true) => typed!(u64, u64; a, b, c => a.wrapping_add(b)),
        ("addc", false) => typed!(u32, u32; a, b, c => a.wrapping_add(b).wrapping_add(c)),
        ("addc", true) => typed!(u64, u64; a, b, c => a.wrapping_add(b).wrapping_add(c)),
        ("sub", false) => typed!(u32, u32; a, b, c => a.wrapping_sub(b)),
        ("sub", true) => typed!(u64, u64; a, b, c => a.wrapping_sub(b)),
        ("subc", false) => typed!(u32, u32; a, b, c => a.wrapping_sub(b).wrapping_sub(c)),
        ("subc", true) => typed!(u64, u64; a, b, c => a.wrapping_sub(b).wrapping_sub(c)),
        _ => return None,
    })
}

macro_rules! compare {
    ($kind:expr; $a:ident, $b:ident => $value:expr) => {
        match $kind {
            "pred" => Some(alu!($a, $b, c => u64::from($value))),
            "u16" | "b16" => {
                Some(alu!(x, y, c => { let ($a, $b) = (x as u16, y as u16); u64::from($value) }))
            }
            "s16" => {
                Some(alu!(x, y, c => { let ($a, $b) = (x as i16, y as i16); u64::from($value) }))
            }
            "u32" | "b32" => {
                Some(alu!(x, y, c => { let ($a, $b) = (x as u32, y as u32); u64::from($value) }))
            }
            "s32" => {
                Some(alu!(x, y, c => { let ($a, $b) = (x as i32, y as i32); u64::from($value) }))
            }
            "u64" | "b64" => Some(alu!($a, $b, c => u64::from($value))),
            "s64" => {
                Some(alu!(x, y, c => { let ($a, $b) = (x as i64, y as i64); u64::from($value) }))
            }
            "f32" => Some(alu!(x, y, c => {
                let ($a, $b) = (f32::from_bits(x as u32), f32::from_bits(y as u32));
                u64::from($value)
            })),
            "f64" => Some(alu!(x, y, c => {
                let ($a, $b) = (f64::from_bits(x), f64::from_bits(y));
                u64::from($value)
            })),
            _ => None,
        }
    };
}

/// Returns the comparison `name` of a type. The result is 0 or 1.
// Comparisons with NaN are unordered.
#[allow(
    clippy::double_comparisons,
    clippy::neg_cmp_op_on_partial_ord,
    clippy::nonminimal_bool,
    clippy::overly_complex_bool_expr
)]
pub(crate) fn comparison(name: &str, kind: &str) -> Option<AluFn> {
    let float = kind.starts_with('f');
    match name {
        "eq" => compare!(kind; a, b => a == b),
        "ne" if float => compare!(kind; a, b => a < b || a > b),
        "ne" => compare!(kind; a, b => a != b),
        "lt" => compare!(kind; a, b => a < b),
        "le" => compare!(kind; a, b => a <= b),
        "gt" => compare!(kind; a, b => a > b),
        "ge" => compare!(kind; a, b => a >= b),
        "lo" | "ls" | "hi" | "hs" => {
            let unsigned = match kind {
                "u16" | "u32" | "u64" => kind,
                _ => return None,
            };
            let name = match name {
                "lo" => "lt",
                "ls" => "le",
                "hi" => "gt",
                _ => "ge",
            };
            comparison(name, unsigned)
        }
        _ if !float => None,
        "equ" => compare!(kind; a, b => !(a < b || a > b)),
        "neu" => compare!(kind; a, b => a != b),
        "ltu" => compare!(kind; a, b => !(a >= b)),
        "leu" => compare!(kind; a, b => !(a > b)),
        "gtu" => compare!(kind; a, b => !(a <= b)),
        "geu" => compare!(kind; a, b => !(a < b)),
        "num" => compare!(kind; a, b => a <= b || a > b),
        "nan" => compare!(kind; a, b => !(a <= b || a > b)),
        _ => None,
    }
}

macro_rules! floats {
    ($kind:expr; $a:ident, $b:ident, $c:ident => $value:expr) => {
        match $kind {
            "f32" => Some(alu!(x, y, z => {
                let f = |bits: u64| f32::from_bits(bits as u32);
                let ($a, $b, $c) = (f(x), f(y), f(z));
                let value: f32 = $value;
                u64::from(if value.is_nan() { 0x7fff_ffff } else { value.to_bits() })
            })),
            _ => None,
        }
    };
}

/// Returns the single-precision operation `base`, rounded to nearest, for the modifiers for which
/// the host's arithmetic has the bits that PTX prescribes.
pub(crate) fn float(base: &str, modifiers: &[&str]) -> Option<AluFn> {
    let (kind, modifiers) = modifiers.split_last()?;
    let kind = *kind;
    match (base, modifiers) {
        ("add", [] | ["rn"]) => floats!(kind; a, b, c => a + b),
        ("sub", [] | ["rn"]) => floats!(kind; a, b, c => a - b),
        ("mul", [] | ["rn"]) => floats!(kind; a, b, c => a * b),
        ("div", ["rn"]) => floats!(kind; a, b, c => a / b),
        ("rcp", ["rn"]) => floats!(kind; a, b, c => 1.0 / a),
        ("sqrt", ["rn"]) => floats!(kind; a, b, c => a.sqrt()),
        _ => None,
    }
}

/// Combines two predicates: `and`, `or` or `xor`.
pub(crate) fn combine(name: &str) -> Option<AluFn> {
    integer(name, &["pred"])
}

/// Inverts a predicate.
pub(crate) fn invert() -> AluFn {
    alu!(a, b, c => a & 1 ^ 1)
}
