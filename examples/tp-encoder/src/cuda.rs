//! Passes candle's GPU memory and stream to Fusewire without copies.
//!
//! All work is enqueued on candle's stream. Earlier work on the stream has written the inputs when
//! Fusewire's kernel begins, and later work reads the kernel's output. Candle also frees memory in
//! stream order, so the launch need not keep memory alive after the call. Peers do not access
//! candle's memory, because it is in no window. Peers read the copy that the kernel makes in
//! staging.

use core::ffi::c_void;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtrMut};
use candle_core::{CudaDevice, CudaStorage, Result, Storage};
use fusewire::{Communicator, DType, Device, Norm, ReduceOp, Stream, Tensor};

use crate::operand::{LayerNorm, contiguous, no_floats};

/// Index of the first element, and index after the last element.
type Range = (usize, usize);

pub(crate) fn on_stream_of(
    comm: &Communicator,
    device: &CudaDevice,
) -> anyhow::Result<Communicator> {
    let raw = device.cuda_stream().cu_stream().cast::<c_void>();
    // SAFETY: the stream belongs to the GPU's primary context, which candle uses. `device` and its
    // clones in the encoder's tensors keep the stream alive, and the encoder outlives the
    // communicator.
    let stream = unsafe { Stream::adopt(comm.device(), raw)? };
    Ok(comm.on(&stream))
}

pub(crate) fn all_reduce(
    comm: &Communicator,
    storage: &mut CudaStorage,
    range: Range,
) -> Result<()> {
    let stream = storage.device.cuda_stream();
    let slice = storage.as_cuda_slice_mut::<f32>()?;
    let mut view = slice.slice_mut(range.0..range.1);
    let (at, _recorded) = view.device_ptr_mut(&stream);
    let values = adopt(comm.device(), at, range.1 - range.0)?;
    comm.all_reduce_async(&values, ReduceOp::Sum)
        .map_err(candle_core::Error::wrap)?;
    Ok(())
}

/// Sums `partial` over the ranks, adds `residual` and normalizes. The ranges are element positions
/// in candle's storage.
pub(crate) fn all_reduce_norm(
    comm: &Communicator,
    (partial, partial_range): (&CudaStorage, Range),
    (residual, residual_range): (&CudaStorage, Range),
    norm: &LayerNorm,
) -> Result<CudaStorage> {
    let device = partial.device.clone();
    let stream = device.cuda_stream();
    let (weight, weight_layout) = norm.weight.storage_and_layout();
    let (bias, bias_layout) = norm.bias.storage_and_layout();
    let (Storage::Cuda(weight), Storage::Cuda(bias)) = (&*weight, &*bias) else {
        return Err(no_floats("all_reduce_norm"));
    };
    let count = partial_range.1 - partial_range.0;
    // SAFETY: the kernel enqueued below writes every element before later work on the stream reads
    // it.
    let mut out = unsafe { device.alloc::<f32>(count)? };
    {
        let gpu = comm.device();
        let (partial, _partial) = input(gpu, partial, partial_range, &stream)?;
        let (residual, _residual) = input(gpu, residual, residual_range, &stream)?;
        let (weight, _weight) = input(gpu, weight, contiguous("weight", weight_layout)?, &stream)?;
        let (bias, _bias) = input(gpu, bias, contiguous("bias", bias_layout)?, &stream)?;
        let (at, _out) = out.device_ptr_mut(&stream);
        let written = adopt(gpu, at, count)?;
        let norm = Norm::layer(&written, &partial, &weight, norm.epsilon)
            .with_bias(&bias)
            .with_residual(&residual);
        comm.all_reduce_norm_async(&norm)
            .map_err(candle_core::Error::wrap)?;
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}

/// Returns candle's elements as a Fusewire tensor, and a guard. When the guard is dropped, it
/// records in candle that work on `stream` reads the elements.
fn input<'a>(
    gpu: Device,
    storage: &'a CudaStorage,
    range: Range,
    stream: &'a CudaStream,
) -> Result<(Tensor, impl Drop + use<'a>)> {
    let view = storage.as_cuda_slice::<f32>()?.slice(range.0..range.1);
    let (at, recorded) = view.view_ptr(stream);
    Ok((adopt(gpu, at, range.1 - range.0)?, recorded))
}

fn adopt(gpu: Device, at: u64, count: usize) -> Result<Tensor> {
    // SAFETY: `at` is the address of `count` f32 of candle on this GPU. Candle frees them in the
    // order of its stream, that is, after all work that is enqueued on the stream now.
    unsafe { Tensor::adopt(gpu, at as *mut u8, DType::F32, count, None) }
        .map_err(candle_core::Error::wrap)
}
