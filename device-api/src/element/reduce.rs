//! Reductions, as types that a kernel is compiled for, and the run-time switch for the rare ones.

use super::{Bits, DType, Element, F32Index, Number, Ordered};
use crate::mem;

/// Code of a reduction in a call word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ReductionCode {
    /// Sum, in rank order.
    Sum = 1,
    /// Product, in rank order.
    Product = 2,
    /// Minimum.
    Min = 3,
    /// Maximum.
    Max = 4,
    /// Sum divided by the number of ranks.
    Average = 5,
    /// Sum of each rank's input times that rank's factor; the product is rounded before it is
    /// added.
    PreMulSum = 6,
    /// Bitwise and (integers).
    BitAnd = 7,
    /// Bitwise or (integers).
    BitOr = 8,
    /// Bitwise exclusive or (integers).
    BitXor = 9,
}

impl ReductionCode {
    /// All reductions.
    pub const ALL: [Self; 9] = [
        Self::Sum,
        Self::Product,
        Self::Min,
        Self::Max,
        Self::Average,
        Self::PreMulSum,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// Returns the name, as in `--op`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::Average => "average",
            Self::PreMulSum => "premul_sum",
            Self::BitAnd => "band",
            Self::BitOr => "bor",
            Self::BitXor => "bxor",
        }
    }

    /// Returns true if it works on bits, which only integers support.
    pub const fn is_bitwise(self) -> bool {
        matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor)
    }

    /// Returns true if elements of `dtype` can be reduced with it.
    pub const fn supports(self, dtype: DType) -> bool {
        match dtype {
            DType::F32Index => matches!(self, Self::Min | Self::Max),
            _ => dtype.is_reducible() && (!self.is_bitwise() || dtype.is_integer()),
        }
    }
}

/// Reduction of the elements of all ranks to one.
pub trait Reduction<T: Element>: Copy + 'static {
    /// Its code.
    const CODE: ReductionCode;
    /// Converts a rank's element before it is combined; `scalar` is that rank's factor.
    #[inline(always)]
    fn lift(x: T, scalar: u64) -> T::Acc {
        let _ = scalar;
        x.widen()
    }
    /// Combines the result so far with the next rank's.
    fn combine(acc: T::Acc, next: T::Acc) -> T::Acc;
    /// Converts the combination of all `ranks` ranks' elements to the result.
    #[inline(always)]
    fn finish(acc: T::Acc, ranks: u32) -> T {
        let _ = ranks;
        T::narrow(acc)
    }
}

macro_rules! reduction {
    ($(#[$doc:meta])* $name:ident, $method:ident, $bound:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl<T: Element<Acc: $bound>> Reduction<T> for $name {
            const CODE: ReductionCode = ReductionCode::$name;
            #[inline(always)]
            fn combine(acc: T::Acc, next: T::Acc) -> T::Acc {
                acc.$method(next)
            }
        }
    };
}

reduction!(
    /// Sum.
    Sum, add, Number
);
reduction!(
    /// Product.
    Product, mul, Number
);
reduction!(
    /// Minimum.
    Min, min, Ordered
);
reduction!(
    /// Maximum.
    Max, max, Ordered
);
reduction!(
    /// Bitwise and.
    BitAnd, and, Bits
);
reduction!(
    /// Bitwise or.
    BitOr, or, Bits
);
reduction!(
    /// Bitwise exclusive or.
    BitXor, xor, Bits
);

/// Sum divided by the number of ranks.
#[derive(Clone, Copy, Debug)]
pub struct Average;

impl<T: Element<Acc: Number>> Reduction<T> for Average {
    const CODE: ReductionCode = ReductionCode::Average;
    #[inline(always)]
    fn combine(acc: T::Acc, next: T::Acc) -> T::Acc {
        acc.add(next)
    }
    #[inline(always)]
    fn finish(acc: T::Acc, ranks: u32) -> T {
        T::narrow(acc.div_count(ranks))
    }
}

/// Sum of inputs scaled by their rank's factor.
#[derive(Clone, Copy, Debug)]
pub struct PreMulSum;

impl<T: Element<Acc: Number>> Reduction<T> for PreMulSum {
    const CODE: ReductionCode = ReductionCode::PreMulSum;
    #[inline(always)]
    fn lift(x: T, scalar: u64) -> T::Acc {
        x.widen().mul(T::Acc::from_scalar(scalar))
    }
    #[inline(always)]
    fn combine(acc: T::Acc, next: T::Acc) -> T::Acc {
        acc.add(next)
    }
}

/// Returns the element at `at` as a scalar word: the factor of a [`PreMulSum`] in memory. Returns 0
/// for types without arithmetic.
///
/// # Safety
/// `at` must be the address of an aligned element of `dtype` that is not written meanwhile.
#[inline(always)]
pub unsafe fn scalar_at(dtype: DType, at: *const u8) -> u64 {
    /// # Safety
    /// As [`scalar_at`].
    #[inline(always)]
    unsafe fn read<T: Element<Acc: Number>>(at: *const u8) -> u64 {
        // SAFETY: the precondition of this function.
        unsafe { mem::read(at.cast::<T>()) }.widen().to_scalar()
    }
    // SAFETY: each type is the one of `dtype`; the rest is the precondition of this function.
    unsafe {
        match dtype {
            DType::F64 => read::<f64>(at),
            DType::F32 => read::<f32>(at),
            DType::F16 => read::<super::F16>(at),
            DType::Bf16 => read::<super::Bf16>(at),
            DType::I8 => read::<i8>(at),
            DType::U8 => read::<u8>(at),
            DType::I32 => read::<i32>(at),
            DType::U32 => read::<u32>(at),
            DType::I64 => read::<i64>(at),
            DType::U64 => read::<u64>(at),
            DType::E4m3 | DType::E5m2 | DType::F32Index => 0,
        }
    }
}

/// Code that is generic over an element type and a reduction.
pub trait WithReduction {
    /// Result type.
    type Output;
    /// Runs the code for one element type and one reduction.
    fn run<T: Element, O: Reduction<T>>(self) -> Self::Output;
}

/// Runs `code` for the type and reduction that a call names at run time; `None` if the type does
/// not support the reduction. The switch is uniform: all lanes take the same branch.
#[inline(always)]
pub fn dispatch<W: WithReduction>(dtype: u8, reduction: u8, code: W) -> Option<W::Output> {
    match (DType::from_code(dtype)?, reduction) {
        // A bitwise reduction depends only on the width of the type.
        (DType::I8 | DType::U8, 7) => Some(code.run::<u8, BitAnd>()),
        (DType::I8 | DType::U8, 8) => Some(code.run::<u8, BitOr>()),
        (DType::I8 | DType::U8, 9) => Some(code.run::<u8, BitXor>()),
        (DType::I32 | DType::U32, 7) => Some(code.run::<u32, BitAnd>()),
        (DType::I32 | DType::U32, 8) => Some(code.run::<u32, BitOr>()),
        (DType::I32 | DType::U32, 9) => Some(code.run::<u32, BitXor>()),
        (DType::I64 | DType::U64, 7) => Some(code.run::<u64, BitAnd>()),
        (DType::I64 | DType::U64, 8) => Some(code.run::<u64, BitOr>()),
        (DType::I64 | DType::U64, 9) => Some(code.run::<u64, BitXor>()),
        (DType::F64, op) => arithmetic::<f64, W>(op, code),
        (DType::F32, op) => arithmetic::<f32, W>(op, code),
        (DType::F16, op) => arithmetic::<super::F16, W>(op, code),
        (DType::Bf16, op) => arithmetic::<super::Bf16, W>(op, code),
        (DType::I8, op) => arithmetic::<i8, W>(op, code),
        (DType::U8, op) => arithmetic::<u8, W>(op, code),
        (DType::I32, op) => arithmetic::<i32, W>(op, code),
        (DType::U32, op) => arithmetic::<u32, W>(op, code),
        (DType::I64, op) => arithmetic::<i64, W>(op, code),
        (DType::U64, op) => arithmetic::<u64, W>(op, code),
        (DType::F32Index, 3) => Some(code.run::<F32Index, Min>()),
        (DType::F32Index, 4) => Some(code.run::<F32Index, Max>()),
        (DType::E4m3 | DType::E5m2 | DType::F32Index, _) => None,
    }
}

#[inline(always)]
fn arithmetic<T: Element<Acc: Number>, W: WithReduction>(
    reduction: u8,
    code: W,
) -> Option<W::Output> {
    Some(match reduction {
        1 => code.run::<T, Sum>(),
        2 => code.run::<T, Product>(),
        3 => code.run::<T, Min>(),
        4 => code.run::<T, Max>(),
        5 => code.run::<T, Average>(),
        6 => code.run::<T, PreMulSum>(),
        _ => return None,
    })
}
