//! Types and operations by their names.

use crate::float::{Arith, Format, Modifiers, Rounding};
use crate::program::Atomic;

/// Returns the width in bits of a type; 1 for predicates.
pub(super) fn width(kind: &str) -> Option<u32> {
    Some(match kind {
        "pred" => 1,
        "b8" | "u8" | "s8" => 8,
        "b16" | "u16" | "s16" | "f16" | "bf16" | "e4m3x2" | "e5m2x2" => 16,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" => 32,
        "b64" | "u64" | "s64" | "f64" => 64,
        _ => return None,
    })
}

/// Returns the format of a floating-point type, and true for two packed elements.
pub(super) fn format(kind: &str) -> Option<(Format, bool)> {
    Some(match kind {
        "f16" => (Format::F16, false),
        "f16x2" => (Format::F16, true),
        "bf16" => (Format::Bf16, false),
        "bf16x2" => (Format::Bf16, true),
        "tf32" => (Format::Tf32, false),
        "f32" => (Format::F32, false),
        "f64" => (Format::F64, false),
        "e4m3x2" => (Format::E4m3, true),
        "e5m2x2" => (Format::E5m2, true),
        _ => return None,
    })
}

/// Reads the modifiers of a floating-point operation. Returns `None` for an unknown modifier.
pub(super) fn float_modifiers(words: &[&str]) -> Option<Modifiers> {
    let mut modifiers = Modifiers::default();
    for word in words {
        match *word {
            "rn" | "rni" => modifiers.rounding = Rounding::Nearest,
            "rz" | "rzi" => modifiers.rounding = Rounding::Zero,
            "rm" | "rmi" => modifiers.rounding = Rounding::Down,
            "rp" | "rpi" => modifiers.rounding = Rounding::Up,
            "rna" => modifiers.rounding = Rounding::Away,
            "ftz" => modifiers.ftz = true,
            "sat" => modifiers.saturate = true,
            "satfinite" => modifiers.satfinite = true,
            "relu" => modifiers.relu = true,
            "NaN" => modifiers.nan = true,
            "xorsign" => modifiers.xorsign = true,
            "abs" | "approx" | "full" | "noftz" => {}
            _ => return None,
        }
    }
    Some(modifiers)
}

/// Returns the read-modify-write function of an operation and a type.
pub(super) fn atomic_of(operation: &str, kind: &str) -> Option<Atomic> {
    if let Some((format, packed)) = format(kind) {
        let op = match operation {
            "add" => Arith::Add,
            "min" => Arith::Min,
            "max" => Arith::Max,
            "exch" if !packed => return Some(Atomic::Exchange),
            _ => return None,
        };
        return Some(Atomic::Float(op, format, packed));
    }
    let signed = kind.starts_with('s');
    Some(match operation {
        "exch" => Atomic::Exchange,
        "cas" => Atomic::CompareSwap,
        "add" => Atomic::Add,
        "and" => Atomic::And,
        "or" => Atomic::Or,
        "xor" => Atomic::Xor,
        "inc" => Atomic::Inc,
        "dec" => Atomic::Dec,
        "min" if signed => Atomic::MinSigned,
        "max" if signed => Atomic::MaxSigned,
        "min" => Atomic::Min,
        "max" => Atomic::Max,
        _ => return None,
    })
}
