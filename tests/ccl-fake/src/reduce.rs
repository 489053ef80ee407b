//! Element types and their reductions.

use fusewire_ccl_sys::sys::*;
use half::{bf16, f16};

/// Returns the size of an element in bytes, or `None` for an unknown type.
pub(crate) const fn size(dtype: i32) -> Option<usize> {
    Some(match dtype {
        ncclInt8 | ncclUint8 | ncclFloat8e4m3 | ncclFloat8e5m2 => 1,
        ncclFloat16 | ncclBfloat16 => 2,
        ncclInt32 | ncclUint32 | ncclFloat32 => 4,
        ncclInt64 | ncclUint64 | ncclFloat64 => 8,
        _ => return None,
    })
}

/// Reduces `parts` in rank order. Each part consists of a rank's data and its scale. If the scale
/// is not empty, the data are multiplied by it first. Floats are reduced in double precision and
/// rounded once. Integers wrap. Returns `None` for types without arithmetic (the 8-bit floats).
pub(crate) fn reduce(dtype: i32, op: i32, parts: &[(&[u8], &[u8])]) -> Option<Vec<u8>> {
    macro_rules! typed {
        ($ty:ty, $read:expr, $write:expr, $add:expr, $mul:expr, $div:expr) => {{
            let step = size_of::<$ty>();
            let read = |bytes: &[u8]| $read(<$ty>::from_ne_bytes(bytes.try_into().unwrap()));
            let length = parts[0].0.len();
            let mut out = Vec::with_capacity(length);
            for at in (0..length).step_by(step) {
                let mut values = parts.iter().map(|(part, scale)| {
                    let value = read(&part[at..at + step]);
                    if scale.is_empty() {
                        value
                    } else {
                        $mul(value, read(&scale[..step]))
                    }
                });
                let first = values.next()?;
                let value = match op {
                    ncclProd => values.fold(first, $mul),
                    ncclMax => values.fold(first, |a, b| if b > a { b } else { a }),
                    ncclMin => values.fold(first, |a, b| if b < a { b } else { a }),
                    ncclAvg => $div(values.fold(first, $add), parts.len()),
                    _ => values.fold(first, $add),
                };
                let narrow: $ty = $write(value);
                out.extend_from_slice(&narrow.to_ne_bytes());
            }
            Some(out)
        }};
    }
    macro_rules! integer {
        ($ty:ty) => {
            typed!(
                $ty,
                |x: $ty| x,
                |x: $ty| x,
                <$ty>::wrapping_add,
                <$ty>::wrapping_mul,
                |x: $ty, ranks: usize| x.wrapping_div(ranks as $ty)
            )
        };
    }
    macro_rules! float {
        ($ty:ty, $read:expr, $write:expr) => {
            typed!(
                $ty,
                $read,
                $write,
                |a: f64, b: f64| a + b,
                |a: f64, b: f64| a * b,
                |x: f64, ranks: usize| x / ranks as f64
            )
        };
    }
    match dtype {
        ncclInt8 => integer!(i8),
        ncclUint8 => integer!(u8),
        ncclInt32 => integer!(i32),
        ncclUint32 => integer!(u32),
        ncclInt64 => integer!(i64),
        ncclUint64 => integer!(u64),
        ncclFloat16 => float!(f16, f16::to_f64, f16::from_f64),
        ncclBfloat16 => float!(bf16, bf16::to_f64, bf16::from_f64),
        ncclFloat32 => float!(f32, f64::from, |x| x as f32),
        ncclFloat64 => float!(f64, |x: f64| x, |x: f64| x),
        _ => None,
    }
}
