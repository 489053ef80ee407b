//! Reductions of elements, in rank order.

use fusewire_backend_abi as abi;

/// Returns the size in bytes of an element of type `dtype`, or `None` for an unknown type.
pub(crate) fn size_of_dtype(dtype: u32) -> Option<usize> {
    Some(match dtype {
        abi::DTYPE_F64 | abi::DTYPE_I64 | abi::DTYPE_U64 | abi::DTYPE_F32_INDEX => 8,
        abi::DTYPE_F32 | abi::DTYPE_I32 | abi::DTYPE_U32 => 4,
        abi::DTYPE_F16 | abi::DTYPE_BF16 => 2,
        abi::DTYPE_E4M3 | abi::DTYPE_E5M2 | abi::DTYPE_I8 | abi::DTYPE_U8 => 1,
        _ => return None,
    })
}

/// Returns true if `reduction` is implemented for `dtype`. Floats with fewer than 32 bits, pairs of
/// a value and an index, and scaled sums are not implemented.
pub(crate) fn has(dtype: u32, reduction: u32) -> bool {
    let float = matches!(dtype, abi::DTYPE_F32 | abi::DTYPE_F64);
    let integer = (abi::DTYPE_I8..=abi::DTYPE_U64).contains(&dtype);
    match reduction {
        abi::REDUCE_SUM..=abi::REDUCE_AVERAGE => float || integer,
        abi::REDUCE_BIT_AND..=abi::REDUCE_BIT_XOR => integer,
        _ => false,
    }
}

/// Reduces `rows` into the first row. There is one row per rank, in rank order, and all rows have
/// the same length. Does nothing if [`has`] returns false.
pub(crate) fn reduce(dtype: u32, reduction: u32, rows: &mut [Vec<u8>]) {
    match dtype {
        abi::DTYPE_F64 => fold::<f64, 8>(rows, reduction),
        abi::DTYPE_F32 => fold::<f32, 4>(rows, reduction),
        abi::DTYPE_I8 => fold::<i8, 1>(rows, reduction),
        abi::DTYPE_U8 => fold::<u8, 1>(rows, reduction),
        abi::DTYPE_I32 => fold::<i32, 4>(rows, reduction),
        abi::DTYPE_U32 => fold::<u32, 4>(rows, reduction),
        abi::DTYPE_I64 => fold::<i64, 8>(rows, reduction),
        abi::DTYPE_U64 => fold::<u64, 8>(rows, reduction),
        _ => {}
    }
}

/// An element of `N` bytes.
trait Element<const N: usize>: Copy {
    fn read(bytes: [u8; N]) -> Self;
    fn write(self) -> [u8; N];
    fn combine(self, other: Self, reduction: u32) -> Self;
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! integer {
    ($t:ty, $n:literal) => {
        impl Element<$n> for $t {
            fn read(bytes: [u8; $n]) -> Self {
                Self::from_ne_bytes(bytes)
            }
            fn write(self) -> [u8; $n] {
                self.to_ne_bytes()
            }
            fn combine(self, other: Self, reduction: u32) -> Self {
                match reduction {
                    abi::REDUCE_PRODUCT => self.wrapping_mul(other),
                    abi::REDUCE_MIN => self.min(other),
                    abi::REDUCE_MAX => self.max(other),
                    abi::REDUCE_BIT_AND => self & other,
                    abi::REDUCE_BIT_OR => self | other,
                    abi::REDUCE_BIT_XOR => self ^ other,
                    _ => self.wrapping_add(other),
                }
            }
            fn divide(self, ranks: usize) -> Self {
                self.wrapping_div(ranks as Self)
            }
        }
    };
}

macro_rules! float {
    ($t:ty, $n:literal) => {
        impl Element<$n> for $t {
            fn read(bytes: [u8; $n]) -> Self {
                Self::from_ne_bytes(bytes)
            }
            fn write(self) -> [u8; $n] {
                self.to_ne_bytes()
            }
            fn combine(self, other: Self, reduction: u32) -> Self {
                let other_wins = |wins: bool| !self.is_nan() && (other.is_nan() || wins);
                match reduction {
                    abi::REDUCE_PRODUCT => self * other,
                    abi::REDUCE_MIN if other_wins(other.total_cmp(&self).is_lt()) => other,
                    abi::REDUCE_MAX if other_wins(other.total_cmp(&self).is_gt()) => other,
                    abi::REDUCE_MIN | abi::REDUCE_MAX => self,
                    _ => self + other,
                }
            }
            fn divide(self, ranks: usize) -> Self {
                self / ranks as Self
            }
        }
    };
}

integer!(i8, 1);
integer!(u8, 1);
integer!(i32, 4);
integer!(u32, 4);
integer!(i64, 8);
integer!(u64, 8);
float!(f32, 4);
float!(f64, 8);

fn fold<T: Element<N>, const N: usize>(rows: &mut [Vec<u8>], reduction: u32) {
    let ranks = rows.len();
    let Some((total, others)) = rows.split_first_mut() else {
        return;
    };
    let (total, _) = total.as_chunks_mut::<N>();
    for row in others {
        let (row, _) = row.as_chunks::<N>();
        for (total, other) in total.iter_mut().zip(row) {
            *total = T::read(*total).combine(T::read(*other), reduction).write();
        }
    }
    if reduction == abi::REDUCE_AVERAGE {
        for total in total {
            *total = T::read(*total).divide(ranks).write();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(reduction: u32, values: &[f32]) -> f32 {
        let mut rows: Vec<Vec<u8>> = values.iter().map(|v| v.to_ne_bytes().to_vec()).collect();
        reduce(abi::DTYPE_F32, reduction, &mut rows);
        f32::read(rows[0][..].try_into().expect("one element"))
    }

    #[test]
    fn min_and_max_know_nan_and_signed_zeros() {
        assert!(one(abi::REDUCE_MIN, &[1.0, f32::NAN, 2.0]).is_nan());
        assert!(one(abi::REDUCE_MAX, &[f32::NAN, 1.0]).is_nan());
        assert!(one(abi::REDUCE_MIN, &[0.0, -0.0]).is_sign_negative());
        assert!(one(abi::REDUCE_MAX, &[-0.0, 0.0]).is_sign_positive());
        assert_eq!(
            one(abi::REDUCE_MIN, &[3.0, -1.0, 2.0]).to_bits(),
            (-1f32).to_bits()
        );
        assert_eq!(
            one(abi::REDUCE_MAX, &[3.0, -1.0, 2.0]).to_bits(),
            3f32.to_bits()
        );
    }

    #[test]
    fn small_floats_and_scaled_sums_are_not_had() {
        assert!(
            has(abi::DTYPE_U8, abi::REDUCE_BIT_XOR) && has(abi::DTYPE_F64, abi::REDUCE_AVERAGE)
        );
        assert!(!has(abi::DTYPE_F32, abi::REDUCE_BIT_AND));
        assert!(
            !has(abi::DTYPE_BF16, abi::REDUCE_SUM) && !has(abi::DTYPE_F32, abi::REDUCE_PREMUL_SUM)
        );
        assert!(!has(abi::DTYPE_F32, abi::REDUCE_NONE) && !has(99, abi::REDUCE_SUM));
    }
}
