//! Selection of the kernel instance for a type and a reduction.

use fusewire_device::DType;
use fusewire_device::native::Kernel;
use fusewire_kernels::nvls;
use fusewire_kernels::reduction::{
    REDUCE_SHARDS_ANY, REDUCE_WHOLE_ANY, ReductionParams, select_reduce_shards, select_reduce_whole,
};

use crate::options::ReduceOp;

/// Returns the kernel instance for a type and a reduction.
pub(super) type Select = fn(DType, ReduceOp) -> &'static Kernel<ReductionParams>;

/// Returns the instance that is compiled for the type and the reduction, or the generic one, which
/// switches at run time, of the kernel that reduces into each rank's own output.
pub(super) fn reduce_whole(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    select_reduce_whole(dtype, op.code()).unwrap_or(const { &REDUCE_WHOLE_ANY })
}

/// Does what [`reduce_whole`] does, for the kernel in two shots.
pub(super) fn reduce_shards(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    select_reduce_shards(dtype, op.code()).unwrap_or(const { &REDUCE_SHARDS_ANY })
}

/// Returns the multicast kernel, which the plan selects only for f32, f16 and bf16.
pub(super) fn all_reduce_nvls(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    nvls::select_all_reduce_nvls(dtype).unwrap_or_else(|| reduce_shards(dtype, op))
}

/// Returns the multicast kernel, which the plan selects only for f32, f16 and bf16.
pub(super) fn reduce_scatter_nvls(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    nvls::select_reduce_scatter_nvls(dtype).unwrap_or_else(|| reduce_whole(dtype, op))
}
