//! Operands of a join: the weights of a LayerNorm, and checks of candle's tensors.

use candle_core::{CpuStorage, Layout, Result, Tensor};
use candle_nn::ops::layer_norm;

/// Weight and bias of a LayerNorm, with one element per column.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    pub(crate) weight: Tensor,
    pub(crate) bias: Tensor,
    pub(crate) epsilon: f32,
}

impl LayerNorm {
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        layer_norm(x, &self.weight, &self.bias, self.epsilon)
    }
}

/// Returns the elements of a contiguous tensor of f32 on the CPU.
pub(crate) fn floats<'a>(
    name: &str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [f32]> {
    let (start, end) = contiguous(name, layout)?;
    match storage {
        CpuStorage::F32(values) => Ok(&values[start..end]),
        _ => Err(no_floats(name)),
    }
}

/// Returns the index of the first element and the index after the last element.
pub(crate) fn contiguous(name: &str, layout: &Layout) -> Result<(usize, usize)> {
    layout
        .contiguous_offsets()
        .ok_or_else(|| candle_core::Error::msg(format!("{name}: a tensor that is not contiguous")))
}

/// Returns the error for a tensor of another type or device.
pub(crate) fn no_floats(name: &str) -> candle_core::Error {
    candle_core::Error::msg(format!(
        "{name}: a tensor of another type than f32, or on another device"
    ))
}
