//! Elements of every type, and their reductions.

use fusewire_ccl_sys::sys::*;
use half::{bf16, f16};

/// Bytes of one element.
pub(crate) const fn size(dtype: i32) -> Option<usize> {
    Some(match dtype {
        ncclInt8 | ncclUint8 | ncclFloat8e4m3 | ncclFloat8e5m2 => 1,
        ncclFloat16 | ncclBfloat16 => 2,
        ncclInt32 | ncclUint32 | ncclFloat32 => 4,
        ncclInt64 | ncclUint64 | ncclFloat64 => 8,
        _ => return None,
    })
}

/// Reduces `parts` in order of rank: floats in double precision, rounded once; integers wrap. `None`
/// for a type without arithmetic here (the 8-bit floats). `scales` multiply the parts.
pub(crate) fn reduce(
    dtype: i32,
    op: i32,
    parts: &[&[u8]],
    scales: Option<&[&[u8]]>,
) -> Option<Vec<u8>> {
    macro_rules! typed {
        ($ty:ty, $wide:ty, $read:expr, $write:expr) => {{
            let step = size_of::<$ty>();
            let read =
                |bytes: &[u8]| -> $wide { $read(<$ty>::from_ne_bytes(bytes.try_into().unwrap())) };
            let mut out = Vec::with_capacity(parts[0].len());
            for at in (0..parts[0].len()).step_by(step) {
                let mut values = parts.iter().enumerate().map(|(rank, part)| {
                    let value = read(&part[at..at + step]);
                    scales.map_or(value, |scales| value * read(&scales[rank][..step]))
                });
                let first = values.next()?;
                let value: $wide = match op {
                    ncclProd => values.fold(first, |a, b| a * b),
                    ncclMax => values.fold(first, |a, b| if b > a { b } else { a }),
                    ncclMin => values.fold(first, |a, b| if b < a { b } else { a }),
                    ncclAvg => values.fold(first, |a, b| a + b) / (parts.len() as $wide),
                    _ => values.fold(first, |a, b| a + b),
                };
                let narrow: $ty = $write(value);
                out.extend_from_slice(&narrow.to_ne_bytes());
            }
            Some(out)
        }};
    }
    macro_rules! whole {
        ($ty:ty) => {
            typed!($ty, i128, |x| x as i128, |x| x as $ty)
        };
    }
    match dtype {
        ncclInt8 => whole!(i8),
        ncclUint8 => whole!(u8),
        ncclInt32 => whole!(i32),
        ncclUint32 => whole!(u32),
        ncclInt64 => whole!(i64),
        ncclUint64 => whole!(u64),
        ncclFloat16 => typed!(f16, f64, f16::to_f64, f16::from_f64),
        ncclBfloat16 => typed!(bf16, f64, bf16::to_f64, bf16::from_f64),
        ncclFloat32 => typed!(f32, f64, |x| x as f64, |x| x as f32),
        ncclFloat64 => typed!(f64, f64, |x| x, |x| x),
        _ => None,
    }
}
