//! The steps after a row-parallel GEMM: the sum over ranks, the residual and the LayerNorm.

use core::cell::Cell;
use core::fmt;
use core::time::Duration;
use std::time::Instant;

use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, InplaceOp1, Layout, Result, Shape, Storage, Tensor,
};
use fusewire::{Communicator, Norm, ReduceOp};

use crate::operand::{LayerNorm, contiguous, floats, no_floats};

/// The step that sums `partial` over the ranks, adds `residual` (equal on all ranks), and
/// normalizes each row. All tensors have shape `[rows, hidden]`.
pub trait Join: fmt::Debug {
    /// Computes the join; see [`Join`].
    ///
    /// # Errors
    /// Returns errors of candle, and wrapped errors of the communicator.
    fn join(&self, partial: Tensor, residual: &Tensor, norm: &LayerNorm) -> Result<Tensor>;
}

/// Join for a single process with the whole model. It needs no sum over ranks and does not use
/// Fusewire.
#[derive(Clone, Copy, Debug)]
pub struct SingleProcess;

impl Join for SingleProcess {
    fn join(&self, partial: Tensor, residual: &Tensor, norm: &LayerNorm) -> Result<Tensor> {
        norm.apply(&(partial + residual)?)
    }
}

/// Join that uses Fusewire's all_reduce in candle's memory, followed by candle's addition and
/// LayerNorm.
#[derive(Debug)]
pub struct UnfusedJoin<'a> {
    comm: &'a Communicator,
    clock: Clock,
}

impl<'a> UnfusedJoin<'a> {
    /// Creates a join over the ranks of `comm`.
    pub fn new(comm: &'a Communicator) -> Self {
        Self {
            comm,
            clock: Clock::default(),
        }
    }

    /// Returns the time spent in joins since the last call of this method, including waits for
    /// other ranks. On a GPU, the time includes only enqueueing the work.
    pub fn take_time(&self) -> Duration {
        self.clock.take()
    }
}

impl Join for UnfusedJoin<'_> {
    fn join(&self, partial: Tensor, residual: &Tensor, norm: &LayerNorm) -> Result<Tensor> {
        self.clock.time(|| {
            partial.inplace_op1(&AllReduce(self.comm))?;
            norm.apply(&(partial + residual)?)
        })
    }
}

/// Join that uses Fusewire's fused kernel, in one launch.
#[derive(Debug)]
pub struct FusedJoin<'a> {
    comm: &'a Communicator,
    clock: Clock,
}

impl<'a> FusedJoin<'a> {
    /// Creates a join over the ranks of `comm`.
    pub fn new(comm: &'a Communicator) -> Self {
        Self {
            comm,
            clock: Clock::default(),
        }
    }

    /// Returns the time spent in joins since the last call of this method, including waits for
    /// other ranks. On a GPU, the time includes only enqueueing the work.
    pub fn take_time(&self) -> Duration {
        self.clock.take()
    }
}

impl Join for FusedJoin<'_> {
    fn join(&self, partial: Tensor, residual: &Tensor, norm: &LayerNorm) -> Result<Tensor> {
        let op = AllReduceNorm {
            comm: self.comm,
            norm,
        };
        self.clock.time(|| partial.apply_op2_no_bwd(residual, &op))
    }
}

/// Accumulates time.
#[derive(Debug, Default)]
struct Clock(Cell<Duration>);

impl Clock {
    fn time<T>(&self, body: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = body();
        self.0.set(self.0.get() + started.elapsed());
        result
    }

    fn take(&self) -> Duration {
        self.0.take()
    }
}

struct AllReduce<'a>(&'a Communicator);

impl InplaceOp1 for AllReduce<'_> {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let range = contiguous(self.name(), layout)?;
        let CpuStorage::F32(values) = storage else {
            return Err(no_floats(self.name()));
        };
        self.0
            .all_reduce(&mut values[range.0..range.1], ReduceOp::Sum)
            .map_err(candle_core::Error::wrap)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        crate::cuda::all_reduce(self.0, storage, contiguous(self.name(), layout)?)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        Err(candle_core::Error::NotCompiledWithCudaSupport)
    }
}

struct AllReduceNorm<'a> {
    comm: &'a Communicator,
    norm: &'a LayerNorm,
}

impl CustomOp2 for AllReduceNorm<'_> {
    fn name(&self) -> &'static str {
        "all_reduce_norm"
    }

    /// Runs the kernel. It reads the partial product and the residual in candle's memory and writes
    /// to a new candle buffer.
    fn cpu_fwd(
        &self,
        partial: &CpuStorage,
        partial_layout: &Layout,
        residual: &CpuStorage,
        residual_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let partial = floats(self.name(), partial, partial_layout)?;
        let residual = floats(self.name(), residual, residual_layout)?;
        let (weight, weight_layout) = self.norm.weight.storage_and_layout();
        let (bias, bias_layout) = self.norm.bias.storage_and_layout();
        let (Storage::Cpu(weight), Storage::Cpu(bias)) = (&*weight, &*bias) else {
            return Err(no_floats(self.name()));
        };
        let weight = floats(self.name(), weight, weight_layout)?;
        let bias = floats(self.name(), bias, bias_layout)?;
        let mut out = vec![0_f32; partial.len()];
        let norm = Norm::layer(&mut out, partial, weight, self.norm.epsilon)
            .with_bias(bias)
            .with_residual(residual);
        self.comm
            .all_reduce_norm(&norm)
            .map_err(candle_core::Error::wrap)?;
        Ok((CpuStorage::F32(out), partial_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        partial: &CudaStorage,
        partial_layout: &Layout,
        residual: &CudaStorage,
        residual_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let out = crate::cuda::all_reduce_norm(
            self.comm,
            (partial, contiguous(self.name(), partial_layout)?),
            (residual, contiguous(self.name(), residual_layout)?),
            self.norm,
        )?;
        Ok((out, partial_layout.shape().clone()))
    }
}
