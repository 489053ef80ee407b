//! Number formats and reductions, with one rounding on every machine.
//!
//! Small floats are summed in f32, in rank order, and rounded once. Integers wrap. Minimum and
//! maximum propagate NaN and take -0 as less than +0. Nothing is contracted or approximated.

mod float;
mod indexed;
mod reduce;

pub use self::float::{Bf16, E4m3, E5m2, F16};
pub use self::indexed::F32Index;
pub use self::reduce::{
    Average, BitAnd, BitOr, BitXor, Max, Min, PreMulSum, Product, Reduction, ReductionCode, Sum,
    WithReduction, dispatch, scalar_at,
};

/// Type of an element, as its code in a call word and in metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum DType {
    /// IEEE binary64.
    F64 = 1,
    /// IEEE binary32.
    F32 = 2,
    /// IEEE binary16.
    F16 = 3,
    /// bfloat16.
    Bf16 = 4,
    /// fp8 E4M3FN: copied and converted, not reduced.
    E4m3 = 5,
    /// fp8 E5M2: copied and converted, not reduced.
    E5m2 = 6,
    /// Signed 8 bit.
    I8 = 7,
    /// Unsigned 8 bit.
    U8 = 8,
    /// Signed 32 bit.
    I32 = 9,
    /// Unsigned 32 bit.
    U32 = 10,
    /// Signed 64 bit.
    I64 = 11,
    /// Unsigned 64 bit.
    U64 = 12,
    /// [`F32Index`]: a value and its index, reduced by minimum and maximum.
    F32Index = 13,
}

impl DType {
    /// All types.
    pub const ALL: [Self; 13] = [
        Self::F64,
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::E4m3,
        Self::E5m2,
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F32Index,
    ];

    /// Returns the type with this code.
    #[inline(always)]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1..=13 => Some(Self::ALL[code as usize - 1]),
            _ => None,
        }
    }

    /// Returns the size of an element in bytes.
    #[inline(always)]
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 | Self::F32Index => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::I8 | Self::U8 => 1,
        }
    }

    /// Returns the name, as in `--dtype`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::I64 => "i64",
            Self::U64 => "u64",
            Self::F32Index => "f32_index",
        }
    }

    /// Returns true for integers, the only types with bitwise reductions.
    pub const fn is_integer(self) -> bool {
        matches!(
            self,
            Self::I8 | Self::U8 | Self::I32 | Self::U32 | Self::I64 | Self::U64
        )
    }

    /// Returns true if reductions exist for it (they do not for fp8).
    pub const fn is_reducible(self) -> bool {
        !matches!(self, Self::E4m3 | Self::E5m2)
    }
}

/// Trait that only this crate can implement.
pub(crate) mod sealed {
    /// Its size and bits are those of its [`super::DType`]; unsafe code relies on it.
    pub trait Sealed {}
}

/// An element of a buffer. Sealed: unsafe code relies on its type code.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// Its type code.
    const DTYPE: DType;
    /// Type in which elements are combined.
    type Acc: Ordered;
    /// Exact conversion to the accumulator.
    fn widen(self) -> Self::Acc;
    /// Rounds to nearest, ties to even.
    fn narrow(acc: Self::Acc) -> Self;
    /// The bits, in the low end.
    fn to_bits(self) -> u64;
    /// The element with these low bits.
    fn from_bits(bits: u64) -> Self;
}

/// Order of an accumulator.
pub trait Ordered: Copy + 'static {
    /// Zero.
    const ZERO: Self;
    /// The lesser value; NaN propagates, -0 < +0.
    fn min(self, other: Self) -> Self;
    /// The greater value; NaN propagates, -0 < +0.
    fn max(self, other: Self) -> Self;
}

/// Arithmetic of an accumulator; integers wrap.
pub trait Number: Ordered {
    /// a + b.
    fn add(self, other: Self) -> Self;
    /// a * b.
    fn mul(self, other: Self) -> Self;
    /// a / count; truncates for integers.
    fn div_count(self, count: u32) -> Self;
    /// The value in a scalar word: f64 bits for floats, the integer itself otherwise.
    fn from_scalar(word: u64) -> Self;
    /// The scalar word that has this value: the inverse of [`Number::from_scalar`].
    fn to_scalar(self) -> u64;
}

/// Bit operations of an integer.
pub trait Bits: Number {
    /// a & b.
    fn and(self, other: Self) -> Self;
    /// a | b.
    fn or(self, other: Self) -> Self;
    /// a ^ b.
    fn xor(self, other: Self) -> Self;
}

macro_rules! float {
    ($t:ty, $bits:ty, $signed:ty, $dtype:ident) => {
        impl Ordered for $t {
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                let take = (key(self) <= key(other) || self != self) && other == other;
                return if take || self != self { self } else { other };
                #[inline(always)]
                fn key(x: $t) -> $signed {
                    let bits = x.to_bits() as $signed;
                    bits ^ (((bits >> (<$bits>::BITS - 1)) as $bits) >> 1) as $signed
                }
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                let take = (key(self) >= key(other) || self != self) && other == other;
                return if take || self != self { self } else { other };
                #[inline(always)]
                fn key(x: $t) -> $signed {
                    let bits = x.to_bits() as $signed;
                    bits ^ (((bits >> (<$bits>::BITS - 1)) as $bits) >> 1) as $signed
                }
            }
        }

        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn div_count(self, count: u32) -> Self {
                self / count as $t
            }
            #[inline(always)]
            fn from_scalar(word: u64) -> Self {
                f64::from_bits(word) as $t
            }
            #[inline(always)]
            fn to_scalar(self) -> u64 {
                (self as f64).to_bits()
            }
        }

        impl sealed::Sealed for $t {}

        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            type Acc = Self;
            #[inline(always)]
            fn widen(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(acc: Self) -> Self {
                acc
            }
            #[inline(always)]
            fn to_bits(self) -> u64 {
                <$t>::to_bits(self) as u64
            }
            #[inline(always)]
            fn from_bits(bits: u64) -> Self {
                <$t>::from_bits(bits as $bits)
            }
        }
    };
}

float!(f32, u32, i32, F32);
float!(f64, u64, i64, F64);

macro_rules! integer {
    ($t:ty, $dtype:ident) => {
        impl Ordered for $t {
            const ZERO: Self = 0;
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }
        }

        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn div_count(self, count: u32) -> Self {
                // Limited to 1 to 2^31 - 1, so that the compiler omits the checks of a division.
                // Small integers divide as i32, because they cannot hold every count.
                let divisor = Ord::max(count & i32::MAX as u32, 1);
                if size_of::<Self>() < 4 {
                    (self as i32 / divisor as i32) as Self
                } else {
                    self / divisor as Self
                }
            }
            #[inline(always)]
            fn from_scalar(word: u64) -> Self {
                word as Self
            }
            #[inline(always)]
            fn to_scalar(self) -> u64 {
                self as u64
            }
        }

        impl Bits for $t {
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
        }

        impl sealed::Sealed for $t {}

        impl Element for $t {
            const DTYPE: DType = DType::$dtype;
            type Acc = Self;
            #[inline(always)]
            fn widen(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(acc: Self) -> Self {
                acc
            }
            #[inline(always)]
            fn to_bits(self) -> u64 {
                self as u64
            }
            #[inline(always)]
            fn from_bits(bits: u64) -> Self {
                bits as Self
            }
        }
    };
}

integer!(i8, I8);
integer!(u8, U8);
integer!(i32, I32);
integer!(u32, U32);
integer!(i64, I64);
integer!(u64, U64);

#[cfg(test)]
mod tests {
    use super::Number;

    #[test]
    fn averages_of_small_integers_divide_by_any_count() {
        for count in [1, 2, 3, 127, 128, 129, 200, 255, 256, 257, 643] {
            for value in i8::MIN..=i8::MAX {
                let exact = i64::from(value) / i64::from(count);
                assert_eq!(
                    i64::from(value.div_count(count)),
                    exact,
                    "{value} by {count}"
                );
            }
            for value in u8::MIN..=u8::MAX {
                let exact = i64::from(value) / i64::from(count);
                assert_eq!(
                    i64::from(value.div_count(count)),
                    exact,
                    "{value} by {count}"
                );
            }
        }
        assert_eq!(i64::MIN.div_count(643), i64::MIN / 643);
        assert_eq!(u64::MAX.div_count(643), u64::MAX / 643);
    }
}
