//! Element types, reductions, and the loops that Gloo calls for them.

use half::{bf16, f16};

/// Element type of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum DataType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 double precision.
    F64,
    /// IEEE 754 half precision. Reductions compute in `f32` and round to nearest even at each step.
    F16,
    /// bfloat16, the upper half of an `f32`. Reductions compute in `f32` and round to nearest even
    /// at each step.
    Bf16,
    /// Signed 8 bits.
    I8,
    /// Unsigned 8 bits.
    U8,
    /// Signed 32 bits.
    I32,
    /// Signed 64 bits.
    I64,
    /// Unsigned 64 bits.
    U64,
}

impl DataType {
    /// All types.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::I64,
        Self::U64,
    ];

    /// Returns the size of one element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// Returns true if the elements are floating point.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16)
    }
}

/// Reduction operation. Integers wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Product.
    Product,
    /// Minimum; NaN propagates, and -0 is less than +0.
    Min,
    /// Maximum; NaN propagates, and +0 is greater than -0.
    Max,
    /// Bitwise and; integers only.
    BitAnd,
    /// Bitwise or; integers only.
    BitOr,
    /// Bitwise exclusive or; integers only.
    BitXor,
}

impl ReduceOp {
    /// All reductions.
    pub const ALL: [Self; 7] = [
        Self::Sum,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// Returns true if elements of `dtype` support this reduction.
    #[must_use]
    pub const fn supports(self, dtype: DataType) -> bool {
        !dtype.is_float() || !matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor)
    }
}

/// Combines two elements of type `T`.
trait Reduce: Copy {
    fn pick(op: ReduceOp) -> Option<fn(Self, Self) -> Self>;
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Reduce for $t {
            fn pick(op: ReduceOp) -> Option<fn(Self, Self) -> Self> {
                Some(match op {
                    ReduceOp::Sum => Self::wrapping_add,
                    ReduceOp::Product => Self::wrapping_mul,
                    ReduceOp::Min => |a, b| if b < a { b } else { a },
                    ReduceOp::Max => |a, b| if b > a { b } else { a },
                    ReduceOp::BitAnd => |a, b| a & b,
                    ReduceOp::BitOr => |a, b| a | b,
                    ReduceOp::BitXor => |a, b| a ^ b,
                })
            }
        }
    )*};
}

integers!(i8, u8, i32, i64, u64);

macro_rules! floats {
    ($($t:ty),*) => {$(
        impl Reduce for $t {
            fn pick(op: ReduceOp) -> Option<fn(Self, Self) -> Self> {
                Some(match op {
                    ReduceOp::Sum => |a, b| a + b,
                    ReduceOp::Product => |a, b| a * b,
                    ReduceOp::Min => |a, b| {
                        if a.is_nan() || a < b || (a == b && a.is_sign_negative()) { a } else { b }
                    },
                    ReduceOp::Max => |a, b| {
                        if a.is_nan() || a > b || (a == b && a.is_sign_positive()) { a } else { b }
                    },
                    ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return None,
                })
            }
        }
    )*};
}

floats!(f32, f64);

macro_rules! small_floats {
    ($($t:ty),*) => {$(
        impl Reduce for $t {
            fn pick(op: ReduceOp) -> Option<fn(Self, Self) -> Self> {
                Some(match op {
                    ReduceOp::Sum => |a, b| Self::from_f32(a.to_f32() + b.to_f32()),
                    ReduceOp::Product => |a, b| Self::from_f32(a.to_f32() * b.to_f32()),
                    ReduceOp::Min => |a, b| {
                        let (x, y) = (a.to_f32(), b.to_f32());
                        if x.is_nan() || x < y || (x == y && x.is_sign_negative()) { a } else { b }
                    },
                    ReduceOp::Max => |a, b| {
                        let (x, y) = (a.to_f32(), b.to_f32());
                        if x.is_nan() || x > y || (x == y && x.is_sign_positive()) { a } else { b }
                    },
                    ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => return None,
                })
            }
        }
    )*};
}

small_floats!(f16, bf16);

/// # Safety
/// The preconditions of [`reduce_into`], with elements of type `T`.
unsafe fn each<T: Reduce>(op: ReduceOp, out: *mut u8, a: *const u8, b: *const u8, count: usize) {
    let Some(combine) = T::pick(op) else {
        debug_assert!(false, "{op:?} was not refused");
        return;
    };
    let (out, a, b) = (out.cast::<T>(), a.cast::<T>(), b.cast::<T>());
    for index in 0..count {
        // SAFETY: `index < count`, and the caller's buffers hold `count` elements. Gloo's scratch
        // buffers may be unaligned, so all accesses are unaligned. Both reads precede the write, so
        // `out` may be `a` or `b`.
        unsafe {
            let value = combine(a.add(index).read_unaligned(), b.add(index).read_unaligned());
            out.add(index).write_unaligned(value);
        }
    }
}

/// Computes `out[i] = op(a[i], b[i])`. Gloo calls this function on the thread of the operation. The
/// function must not panic, because C++ frames are on the stack. `dtype` and `op` are the codes of
/// [`DataType`] and [`ReduceOp`].
///
/// # Safety
/// The three pointers are valid for `count` elements of the type; `out` is valid for writes. `out`
/// is equal to an input or disjoint from it.
pub(crate) unsafe fn reduce_into(
    dtype: u8,
    op: u8,
    out: *mut u8,
    a: *const u8,
    b: *const u8,
    count: usize,
) {
    let dtype = DataType::ALL
        .into_iter()
        .find(|known| *known as u8 == dtype);
    let op = ReduceOp::ALL.into_iter().find(|known| *known as u8 == op);
    let (Some(dtype), Some(op)) = (dtype, op) else {
        debug_assert!(false, "the codes come from this crate");
        return;
    };
    // SAFETY: the type of each arm belongs to `dtype`, and the caller's buffers hold `count`
    // elements of that type.
    unsafe {
        match dtype {
            DataType::F32 => each::<f32>(op, out, a, b, count),
            DataType::F64 => each::<f64>(op, out, a, b, count),
            DataType::F16 => each::<f16>(op, out, a, b, count),
            DataType::Bf16 => each::<bf16>(op, out, a, b, count),
            DataType::I8 => each::<i8>(op, out, a, b, count),
            DataType::U8 => each::<u8>(op, out, a, b, count),
            DataType::I32 => each::<i32>(op, out, a, b, count),
            DataType::I64 => each::<i64>(op, out, a, b, count),
            DataType::U64 => each::<u64>(op, out, a, b, count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply<T: Copy>(dtype: DataType, op: ReduceOp, a: T, b: T) -> T {
        assert_eq!(size_of::<T>(), dtype.size());
        let mut out = a;
        let (a, b) = (&raw const a, &raw const b);
        // SAFETY: each pointer refers to one element on the stack. The type of the element was
        // compared with `dtype`.
        unsafe {
            let out = (&raw mut out).cast();
            reduce_into(dtype as u8, op as u8, out, a.cast(), b.cast(), 1);
        }
        out
    }

    #[test]
    fn nan_wins_from_either_side() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            assert!(apply(DataType::F32, op, f32::NAN, 1.0).is_nan());
            assert!(apply(DataType::F32, op, 1.0, f32::NAN).is_nan());
            assert!(apply(DataType::F64, op, f64::NAN, 1.0).is_nan());
            assert!(apply(DataType::F64, op, 1.0, f64::NAN).is_nan());
            assert!(apply(DataType::F16, op, f16::NAN, f16::ONE).is_nan());
            assert!(apply(DataType::F16, op, f16::ONE, f16::NAN).is_nan());
            assert!(apply(DataType::Bf16, op, bf16::NAN, bf16::ONE).is_nan());
            assert!(apply(DataType::Bf16, op, bf16::ONE, bf16::NAN).is_nan());
        }
    }

    #[test]
    fn zeros_are_ordered_by_sign() {
        for (a, b) in [(0.0_f32, -0.0_f32), (-0.0, 0.0)] {
            assert!(apply(DataType::F32, ReduceOp::Min, a, b).is_sign_negative());
            assert!(apply(DataType::F32, ReduceOp::Max, a, b).is_sign_positive());
            let (a, b) = (bf16::from_f32(a), bf16::from_f32(b));
            assert!(apply(DataType::Bf16, ReduceOp::Min, a, b).is_sign_negative());
            assert!(apply(DataType::Bf16, ReduceOp::Max, a, b).is_sign_positive());
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(apply(DataType::I8, ReduceOp::Sum, i8::MAX, 1), i8::MIN);
        assert_eq!(apply(DataType::U8, ReduceOp::Product, 16_u8, 17), 16);
        assert_eq!(apply(DataType::I64, ReduceOp::Sum, i64::MIN, -1), i64::MAX);
        assert_eq!(apply(DataType::U64, ReduceOp::Sum, u64::MAX, 2), 1);
    }

    #[test]
    fn small_floats_round_to_nearest_even() {
        // 1 + 2^-8 is halfway between two adjacent bf16 values. The even one of the two is 1.
        let half_step = bf16::from_f32(1.0 / 256.0);
        assert_eq!(
            apply(DataType::Bf16, ReduceOp::Sum, bf16::ONE, half_step),
            bf16::ONE
        );
        let odd = bf16::from_bits(bf16::ONE.to_bits() + 1);
        assert_eq!(
            apply(DataType::Bf16, ReduceOp::Sum, odd, half_step).to_bits(),
            bf16::ONE.to_bits() + 2
        );
        let half_step = f16::from_f32(1.0 / 2048.0);
        assert_eq!(
            apply(DataType::F16, ReduceOp::Sum, f16::ONE, half_step),
            f16::ONE
        );
        let odd = f16::from_bits(f16::ONE.to_bits() + 1);
        assert_eq!(
            apply(DataType::F16, ReduceOp::Sum, odd, half_step).to_bits(),
            f16::ONE.to_bits() + 2
        );
    }

    #[test]
    fn bits_are_for_integers() {
        assert_eq!(
            apply(DataType::I32, ReduceOp::BitAnd, 0b1100, 0b1010),
            0b1000
        );
        assert_eq!(
            apply(DataType::I32, ReduceOp::BitOr, 0b1100, 0b1010),
            0b1110
        );
        assert_eq!(
            apply(DataType::I32, ReduceOp::BitXor, 0b1100, 0b1010),
            0b0110
        );
        assert!(!ReduceOp::BitXor.supports(DataType::Bf16));
        assert!(ReduceOp::BitXor.supports(DataType::U64));
        assert!(ReduceOp::Max.supports(DataType::F16));
    }
}
