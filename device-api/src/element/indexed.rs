//! A value with its index.

use bytemuck::{Pod, Zeroable};

use super::{DType, Element, Ordered, sealed};

/// A value and its index, such as a column of a matrix, a rank or a token. A reduction by maximum
/// finds the greatest value of all ranks together with its index, and a reduction by minimum the
/// least value, as MPI's `MPI_MAXLOC` and `MPI_MINLOC` do for `MPI_FLOAT_INT`. Of equal values, the
/// one with the lowest index is taken. NaN is taken before any number, and -0 is less than +0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct F32Index {
    /// The value.
    pub value: f32,
    /// Its index.
    pub index: u32,
}

impl F32Index {
    /// Returns this element if it is better than the other, or equal with a lower index. Otherwise
    /// returns the other element.
    #[inline(always)]
    fn select(self, other: Self, is_better: bool, is_equal: bool) -> Self {
        let take = is_better || is_equal && self.index <= other.index;
        if take { self } else { other }
    }

    /// Returns a key in which numbers are ordered as integers.
    #[inline(always)]
    fn key(self) -> i32 {
        let bits = self.value.to_bits() as i32;
        bits ^ ((bits >> 31) as u32 >> 1) as i32
    }

    /// Returns the key, or `nan` if the value is NaN.
    #[inline(always)]
    fn key_or(self, nan: i32) -> i32 {
        if self.value.is_nan() { nan } else { self.key() }
    }
}

impl Ordered for F32Index {
    const ZERO: Self = Self {
        value: 0.0,
        index: 0,
    };

    #[inline(always)]
    fn min(self, other: Self) -> Self {
        let (own, their) = (self.key_or(i32::MIN), other.key_or(i32::MIN));
        self.select(other, own < their, own == their)
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        let (own, their) = (self.key_or(i32::MAX), other.key_or(i32::MAX));
        self.select(other, own > their, own == their)
    }
}

impl sealed::Sealed for F32Index {}

impl Element for F32Index {
    const DTYPE: DType = DType::F32Index;
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
        u64::from(self.value.to_bits()) | u64::from(self.index) << 32
    }
    #[inline(always)]
    fn from_bits(bits: u64) -> Self {
        Self {
            value: f32::from_bits(bits as u32),
            index: (bits >> 32) as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(value: f32, index: u32) -> F32Index {
        F32Index { value, index }
    }

    #[test]
    fn ties_take_the_lowest_index_and_nan_comes_first() {
        for (a, b, max, min) in [
            (of(1.0, 7), of(2.0, 3), 3, 7),
            (of(2.0, 7), of(2.0, 3), 3, 3),
            (of(-1.0, 1), of(-2.0, 2), 1, 2),
            (of(-0.0, 1), of(0.0, 2), 2, 1),
            (of(f32::NAN, 9), of(f32::INFINITY, 1), 9, 9),
            (of(f32::NAN, 9), of(f32::NEG_INFINITY, 1), 9, 9),
            (of(f32::NAN, 9), of(-f32::NAN, 4), 4, 4),
        ] {
            for (a, b) in [(a, b), (b, a)] {
                assert_eq!((a.max(b).index, a.min(b).index), (max, min), "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn bits_are_the_memory() {
        let pair = of(-1.5, 0x8000_0001);
        assert_eq!(
            pair.to_bits().to_le_bytes(),
            bytemuck::cast::<_, [u8; 8]>(pair)
        );
        assert_eq!(F32Index::from_bits(pair.to_bits()), pair);
    }
}
