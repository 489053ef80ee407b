//! Which kernel instance serves a type and a reduction.

use fusewire_device::DType;
use fusewire_device::layout::CommConst;
use fusewire_device::native::{Kernel, KernelInfo};
use fusewire_kernels::all_reduce as ar;
use fusewire_kernels::nvls;
use fusewire_kernels::reduce_scatter as rs;

use crate::options::ReduceOp;

/// The arguments that every reduction over rounds takes, in the kernels' order and layout.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Reduction {
    pub(super) constants: *const CommConst,
    pub(super) call: u64,
    pub(super) count: u64,
    pub(super) timeout_ns: u64,
    pub(super) source: *const u8,
    pub(super) source_at: u64,
    pub(super) target: *mut u8,
    pub(super) target_at: u64,
    pub(super) scalar: u64,
    pub(super) chunk: u64,
    pub(super) hint: u32,
}

/// Chooses an instance and binds the arguments to it.
pub(super) type Select = fn(DType, ReduceOp, Reduction) -> (&'static KernelInfo, Reduction);

const _: () = {
    assert!(size_of::<Reduction>() == size_of::<ar::AllReduceSignalParams>());
    assert!(size_of::<Reduction>() == size_of::<ar::AllReduceSignalAnyParams>());
    assert!(size_of::<Reduction>() == size_of::<ar::ReduceShardsParams>());
    assert!(size_of::<Reduction>() == size_of::<ar::ReduceShardsAnyParams>());
    assert!(size_of::<Reduction>() == size_of::<rs::ReduceScatterParams>());
    assert!(size_of::<Reduction>() == size_of::<rs::ReduceScatterAnyParams>());
    assert!(size_of::<Reduction>() == size_of::<nvls::AllReduceNvlsParams>());
    assert!(size_of::<Reduction>() == size_of::<nvls::ReduceScatterNvlsParams>());
};

/// Instances of the kernels whose names start with this function's.
pub(super) fn all_reduce_signal(
    dtype: DType,
    op: ReduceOp,
    arguments: Reduction,
) -> (&'static KernelInfo, Reduction) {
    let info: &'static KernelInfo = match (dtype, op) {
        (DType::F32, ReduceOp::Sum) => const { ar::ALL_REDUCE_SIGNAL_F32_SUM.info() },
        (DType::F32, ReduceOp::Average) => const { ar::ALL_REDUCE_SIGNAL_F32_AVERAGE.info() },
        (DType::F32, ReduceOp::Max) => const { ar::ALL_REDUCE_SIGNAL_F32_MAX.info() },
        (DType::F16, ReduceOp::Sum) => const { ar::ALL_REDUCE_SIGNAL_F16_SUM.info() },
        (DType::F16, ReduceOp::Average) => const { ar::ALL_REDUCE_SIGNAL_F16_AVERAGE.info() },
        (DType::F16, ReduceOp::Max) => const { ar::ALL_REDUCE_SIGNAL_F16_MAX.info() },
        (DType::Bf16, ReduceOp::Sum) => const { ar::ALL_REDUCE_SIGNAL_BF16_SUM.info() },
        (DType::Bf16, ReduceOp::Average) => const { ar::ALL_REDUCE_SIGNAL_BF16_AVERAGE.info() },
        (DType::Bf16, ReduceOp::Max) => const { ar::ALL_REDUCE_SIGNAL_BF16_MAX.info() },
        _ => const { ar::ALL_REDUCE_SIGNAL_ANY.info() },
    };
    (info, arguments)
}

/// Instances of the kernels whose names start with this function's.
pub(super) fn reduce_shards(
    dtype: DType,
    op: ReduceOp,
    arguments: Reduction,
) -> (&'static KernelInfo, Reduction) {
    let info: &'static KernelInfo = match (dtype, op) {
        (DType::F32, ReduceOp::Sum) => const { ar::REDUCE_SHARDS_F32_SUM.info() },
        (DType::F32, ReduceOp::Average) => const { ar::REDUCE_SHARDS_F32_AVERAGE.info() },
        (DType::F32, ReduceOp::Max) => const { ar::REDUCE_SHARDS_F32_MAX.info() },
        (DType::F16, ReduceOp::Sum) => const { ar::REDUCE_SHARDS_F16_SUM.info() },
        (DType::F16, ReduceOp::Average) => const { ar::REDUCE_SHARDS_F16_AVERAGE.info() },
        (DType::F16, ReduceOp::Max) => const { ar::REDUCE_SHARDS_F16_MAX.info() },
        (DType::Bf16, ReduceOp::Sum) => const { ar::REDUCE_SHARDS_BF16_SUM.info() },
        (DType::Bf16, ReduceOp::Average) => const { ar::REDUCE_SHARDS_BF16_AVERAGE.info() },
        (DType::Bf16, ReduceOp::Max) => const { ar::REDUCE_SHARDS_BF16_MAX.info() },
        _ => const { ar::REDUCE_SHARDS_ANY.info() },
    };
    (info, arguments)
}

/// Instances of the kernels whose names start with this function's.
pub(super) fn reduce_scatter(
    dtype: DType,
    op: ReduceOp,
    arguments: Reduction,
) -> (&'static KernelInfo, Reduction) {
    let info: &'static KernelInfo = match (dtype, op) {
        (DType::F32, ReduceOp::Sum) => const { rs::REDUCE_SCATTER_F32_SUM.info() },
        (DType::F32, ReduceOp::Average) => const { rs::REDUCE_SCATTER_F32_AVERAGE.info() },
        (DType::F32, ReduceOp::Max) => const { rs::REDUCE_SCATTER_F32_MAX.info() },
        (DType::F16, ReduceOp::Sum) => const { rs::REDUCE_SCATTER_F16_SUM.info() },
        (DType::F16, ReduceOp::Average) => const { rs::REDUCE_SCATTER_F16_AVERAGE.info() },
        (DType::F16, ReduceOp::Max) => const { rs::REDUCE_SCATTER_F16_MAX.info() },
        (DType::Bf16, ReduceOp::Sum) => const { rs::REDUCE_SCATTER_BF16_SUM.info() },
        (DType::Bf16, ReduceOp::Average) => const { rs::REDUCE_SCATTER_BF16_AVERAGE.info() },
        (DType::Bf16, ReduceOp::Max) => const { rs::REDUCE_SCATTER_BF16_MAX.info() },
        _ => const { rs::REDUCE_SCATTER_ANY.info() },
    };
    (info, arguments)
}

/// The kernels by multicast, one a type: the plan takes them for f32, f16 and bf16 only.
pub(super) fn all_reduce_nvls(
    dtype: DType,
    op: ReduceOp,
    arguments: Reduction,
) -> (&'static KernelInfo, Reduction) {
    let info: &'static KernelInfo = match dtype {
        DType::F32 => const { nvls::ALL_REDUCE_NVLS_F32.info() },
        DType::F16 => const { nvls::ALL_REDUCE_NVLS_F16.info() },
        DType::Bf16 => const { nvls::ALL_REDUCE_NVLS_BF16.info() },
        _ => return reduce_shards(dtype, op, arguments),
    };
    (info, arguments)
}

/// As [`all_reduce_nvls`].
pub(super) fn reduce_scatter_nvls(
    dtype: DType,
    op: ReduceOp,
    arguments: Reduction,
) -> (&'static KernelInfo, Reduction) {
    let info: &'static KernelInfo = match dtype {
        DType::F32 => const { nvls::REDUCE_SCATTER_NVLS_F32.info() },
        DType::F16 => const { nvls::REDUCE_SCATTER_NVLS_F16.info() },
        DType::Bf16 => const { nvls::REDUCE_SCATTER_NVLS_BF16.info() },
        _ => return reduce_scatter(dtype, op, arguments),
    };
    (info, arguments)
}

/// The packet instances; other types and reductions have none.
pub(super) fn all_reduce_packet(
    dtype: DType,
    op: ReduceOp,
) -> Option<Kernel<ar::AllReducePacketParams>> {
    Some(match (dtype, op) {
        (DType::F32, ReduceOp::Sum) => ar::ALL_REDUCE_PACKET_F32_SUM,
        (DType::F32, ReduceOp::Average) => ar::ALL_REDUCE_PACKET_F32_AVERAGE,
        (DType::F32, ReduceOp::Max) => ar::ALL_REDUCE_PACKET_F32_MAX,
        (DType::F16, ReduceOp::Sum) => ar::ALL_REDUCE_PACKET_F16_SUM,
        (DType::F16, ReduceOp::Average) => ar::ALL_REDUCE_PACKET_F16_AVERAGE,
        (DType::F16, ReduceOp::Max) => ar::ALL_REDUCE_PACKET_F16_MAX,
        (DType::Bf16, ReduceOp::Sum) => ar::ALL_REDUCE_PACKET_BF16_SUM,
        (DType::Bf16, ReduceOp::Average) => ar::ALL_REDUCE_PACKET_BF16_AVERAGE,
        (DType::Bf16, ReduceOp::Max) => ar::ALL_REDUCE_PACKET_BF16_MAX,
        _ => return None,
    })
}
