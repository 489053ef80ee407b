//! Candle's memory and stream on a GPU, handed to Fusewire as they are.
//!
//! All work is enqueued on candle's own stream: what is enqueued there before has written the
//! inputs when a kernel of Fusewire's begins, and what comes behind it finds its output. Candle
//! frees memory in that stream's order as well, so nothing need be kept for the launch beyond the
//! call. Peers never touch this memory: it lies in no window, so what they read is the copy in
//! staging that the kernel itself makes.

use core::ffi::c_void;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtrMut};
use candle_core::{CudaDevice, CudaStorage, Result, Storage};
use fusewire::{Communicator, DType, Device, Norm, ReduceOp, Stream, Tensor};

use crate::LayerNorm;
use crate::join::{contiguous, no_floats};

/// First element and the one behind the last.
type Range = (usize, usize);

pub(crate) fn on_stream_of(
    comm: &Communicator,
    device: &CudaDevice,
) -> anyhow::Result<Communicator> {
    let raw = device.cuda_stream().cu_stream().cast::<c_void>();
    // SAFETY: a stream of the GPU's primary context, which is the one that candle uses. The device has it, and so have its
    // clones in every tensor of the encoder that this communicator serves, which is there until the communicator has ended.
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

/// `partial` and `residual` with where in their memory they lie; what comes out has `partial`'s elements.
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
    // SAFETY: the kernel writes every element before anything reads one.
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

/// Candle's elements as a tensor of Fusewire's, and a guard that records for candle, when dropped,
/// that `stream` reads them until there.
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
    // SAFETY: as many elements of candle's on that GPU, which stay until what is enqueued on candle's stream now has run.
    unsafe { Tensor::adopt(gpu, at as *mut u8, DType::F32, count, None) }
        .map_err(candle_core::Error::wrap)
}
