//! Selection of the kernel instance for a type and a reduction.

use fusewire_device::DType;
use fusewire_device::native::Kernel;
use fusewire_kernels::all_reduce::{self as ar, ReductionParams};
use fusewire_kernels::nvls;
use fusewire_kernels::reduce_scatter as rs;

use crate::options::ReduceOp;

/// Returns the kernel instance for a type and a reduction.
pub(super) type Select = fn(DType, ReduceOp) -> &'static Kernel<ReductionParams>;

/// Returns the instance that is compiled for the type and the reduction, or the generic one, which
/// switches at run time.
macro_rules! select {
    ($select:path, $any:path, $dtype:ident, $op:ident) => {
        $select($dtype, $op.code()).unwrap_or(const { &$any })
    };
}

pub(super) fn all_reduce_signal(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    select!(
        ar::select_all_reduce_signal,
        ar::ALL_REDUCE_SIGNAL_ANY,
        dtype,
        op
    )
}

pub(super) fn reduce_shards(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    select!(ar::select_reduce_shards, ar::REDUCE_SHARDS_ANY, dtype, op)
}

pub(super) fn reduce_scatter(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    select!(rs::select_reduce_scatter, rs::REDUCE_SCATTER_ANY, dtype, op)
}

/// Returns the multicast kernel, which the plan selects only for f32, f16 and bf16.
pub(super) fn all_reduce_nvls(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    nvls::select_all_reduce_nvls(dtype).unwrap_or_else(|| reduce_shards(dtype, op))
}

pub(super) fn reduce_scatter_nvls(dtype: DType, op: ReduceOp) -> &'static Kernel<ReductionParams> {
    nvls::select_reduce_scatter_nvls(dtype).unwrap_or_else(|| reduce_scatter(dtype, op))
}
