//! A hook that refuses calls whose input has a NaN.

use fusewire_device::DType;
use fusewire_device::call::Operation;

use super::{HookArguments, HookBuffer};
use crate::{Error, Result};

/// Number of elements that are copied at once.
const CHUNK: usize = 1 << 16;

/// Returns an error if an input of the call has a NaN. User kernels may take NaN.
pub(crate) fn check_inputs(arguments: &HookArguments<'_>) -> Result<()> {
    if arguments.operation == Operation::User {
        return Ok(());
    }
    for (index, input) in arguments.inputs.iter().enumerate() {
        if let Some(element) = first_nan(input)? {
            let of_list = match arguments.inputs.len() {
                1 => String::new(),
                _ => format!(" {index}"),
            };
            let (rank, comm) = (arguments.comm.rank(), arguments.comm.name());
            return Err(Error::InvalidArgument {
                operation: arguments.name,
                detail: format!(
                    "input{of_list} of rank {rank} of \"{comm}\" has a NaN at element {element} \
                     ({})",
                    input.dtype().name()
                ),
            });
        }
    }
    Ok(())
}

/// Returns the index of the first NaN.
fn first_nan(buffer: &HookBuffer<'_>) -> Result<Option<usize>> {
    let (size, Some(greatest)) = (buffer.dtype().size(), greatest_magnitude(buffer.dtype())) else {
        return Ok(None);
    };
    let without_sign = u64::MAX >> (65 - 8 * size);
    let tensor = buffer.as_tensor()?;
    for start in (0..buffer.len()).step_by(CHUNK) {
        let chunk = tensor.slice(start, CHUNK.min(buffer.len() - start))?;
        let bytes = chunk.to_bytes()?;
        let is_nan = |element: &[u8]| {
            let mut bits = [0; 8];
            bits[..size].copy_from_slice(element);
            u64::from_le_bytes(bits) & without_sign > greatest
        };
        if let Some(index) = bytes.chunks_exact(size).position(is_nan) {
            return Ok(Some(start + index));
        }
    }
    Ok(None)
}

/// Returns the bits of the greatest value of a floating-point type. Greater bits without the sign
/// are those of a NaN.
const fn greatest_magnitude(dtype: DType) -> Option<u64> {
    match dtype {
        DType::F64 => Some(f64::INFINITY.to_bits()),
        DType::F32 => Some(f32::INFINITY.to_bits() as u64),
        DType::F16 => Some(0x7c00),
        DType::Bf16 => Some(0x7f80),
        DType::E5m2 => Some(0x7c),
        // This type has no infinity and one NaN.
        DType::E4m3 => Some(0x7e),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Input, Tensor};
    use crate::{Bf16, Device, E4m3, E5m2, Element, F16};

    #[test]
    fn the_first_nan_is_found_in_every_type() -> Result<()> {
        fn check<T: Element>(nan: T, others: &[T]) -> Result<()> {
            let mut values: Vec<T> = (0..CHUNK + 7).map(|i| others[i % others.len()]).collect();
            let first = |values: &Vec<T>| {
                let tensor = Tensor::new(T::DTYPE, values.len())?;
                tensor.copy_from(values)?;
                let of_slice = HookBuffer::new(Input::from(values), Device::Cpu);
                Ok((
                    first_nan(&HookBuffer::new(Input::from(&tensor), Device::Cpu))?,
                    first_nan(&of_slice)?,
                ))
            };
            let found: Result<_> = first(&values);
            assert_eq!(found?, (None, None), "{}", T::DTYPE.name());
            for at in [CHUNK + 5, CHUNK - 1, 3] {
                values[at] = nan;
                let found: Result<_> = first(&values);
                assert_eq!(found?, (Some(at), Some(at)), "{}", T::DTYPE.name());
            }
            Ok(())
        }
        check(f64::NAN, &[0.0, -1.5, f64::INFINITY, f64::NEG_INFINITY])?;
        check(-f32::NAN, &[0.0, -1.5, f32::INFINITY, f32::NEG_INFINITY])?;
        let of = |bits: &[u16]| -> Vec<F16> { bits.iter().map(|bits| F16(*bits)).collect() };
        check(F16(0xfc01), &of(&[0x7c00, 0xfc00, 0x8000, 0x3c00]))?;
        check(Bf16(0x7fc0), &[Bf16(0x7f80), Bf16(0xff80), Bf16(0x3f80)])?;
        check(E5m2(0xfd), &[E5m2(0x7c), E5m2(0xfc), E5m2(0x80)])?;
        check(E4m3(0xff), &[E4m3(0x7e), E4m3(0xfe), E4m3(0x80)])?;
        assert_eq!(greatest_magnitude(DType::I32), None);
        Ok(())
    }
}
