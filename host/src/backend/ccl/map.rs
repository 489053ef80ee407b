//! Converts types and reductions to NCCL's constants.

use fusewire_ccl_sys::sys::*;
use fusewire_ccl_sys::{Library, RedOp};
use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use half::{bf16, f16};

use crate::options::ReduceOp;

/// First library version that supports averages.
const AVERAGE: i32 = 21_000;
/// First library version that supports 8-bit floats. With earlier versions, 8-bit floats are
/// transferred as bytes.
const FLOAT8: i32 = 22_400;

/// Returns the library's constant for `dtype`.
pub(super) const fn data_type(library: &Library, dtype: DType) -> Option<ncclDataType_t> {
    Some(match dtype {
        DType::F64 => ncclFloat64,
        DType::F32 => ncclFloat32,
        DType::F16 => ncclFloat16,
        DType::Bf16 => ncclBfloat16,
        DType::E4m3 if library.version().code() >= FLOAT8 => ncclFloat8e4m3,
        DType::E5m2 if library.version().code() >= FLOAT8 => ncclFloat8e5m2,
        DType::E4m3 | DType::E5m2 | DType::U8 => ncclUint8,
        DType::I8 => ncclInt8,
        DType::I32 => ncclInt32,
        DType::U32 => ncclUint32,
        DType::I64 => ncclInt64,
        DType::U64 | DType::F32Index => ncclUint64,
        _ => return None,
    })
}

/// Returns the library's reduction for `code`. Returns `None` for the scaled sum, whose reduction
/// is created for each call, and for reductions that the library lacks.
pub(super) const fn reduction(code: ReductionCode) -> Option<RedOp> {
    Some(match code {
        ReductionCode::Sum => RedOp::SUM,
        ReductionCode::Product => RedOp::PROD,
        ReductionCode::Min => RedOp::MIN,
        ReductionCode::Max => RedOp::MAX,
        ReductionCode::Average => RedOp::AVG,
        _ => return None,
    })
}

/// Returns true if the library supports the reduction for `dtype`. The libraries have no bit
/// operations, and reduce neither 8-bit floats nor pairs of a value and an index.
pub(super) fn reduces(library: &Library, dtype: DType, code: ReductionCode) -> bool {
    code.supports(dtype)
        && dtype != DType::F32Index
        && match code {
            ReductionCode::Average => library.version().code() >= AVERAGE,
            ReductionCode::PreMulSum => {
                let features = library.features();
                features.has("ncclRedOpCreatePreMulSum") && features.has("ncclRedOpDestroy")
            }
            code => reduction(code).is_some(),
        }
}

/// Returns the factor of a scaled sum as an element of `dtype`, stored in the first bytes of a
/// word.
pub(super) fn scalar(op: ReduceOp, dtype: DType) -> [u64; 1] {
    let word = op.scalar(dtype);
    let value = f64::from_bits(word);
    let mut bytes = word.to_ne_bytes();
    match dtype {
        DType::F32 => bytes[..4].copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F16 => bytes[..2].copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        DType::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
        // `word` holds an f64 or an integer. In little-endian order, an integer of `dtype` is at
        // the start of the word.
        _ => bytes = word.to_le_bytes(),
    }
    [u64::from_ne_bytes(bytes)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_are_elements() {
        let bytes = |factor: f64, dtype: DType| {
            let [word] = scalar(ReduceOp::PreMulSum(factor), dtype);
            word.to_ne_bytes()[..dtype.size()].to_vec()
        };
        assert_eq!(bytes(0.5, DType::F64), 0.5f64.to_ne_bytes());
        assert_eq!(bytes(-1.25, DType::F32), (-1.25f32).to_ne_bytes());
        assert_eq!(bytes(0.1, DType::F16), f16::from_f64(0.1).to_ne_bytes());
        assert_eq!(bytes(0.1, DType::Bf16), bf16::from_f64(0.1).to_ne_bytes());
        assert_eq!(bytes(-3.0, DType::I8), (-3i8).to_ne_bytes());
        assert_eq!(bytes(-3.0, DType::I32), (-3i32).to_ne_bytes());
        assert_eq!(bytes(300.0, DType::U64), 300u64.to_ne_bytes());
    }
}
