//! Fusewire's kernels: collectives and fused operations, written once for NVIDIA, AMD and the CPU.
//!
//! The kernels of collectives take each buffer with its address in a window, which peers can
//! resolve ([`Exchange`]). Data in no window ([`fusewire_device::comm::WindowAddr::NONE`]) is
//! copied through this rank's staging.
//!
//! | module | kernels |
//! |---|---|
//! | [`all_reduce`] | all_reduce by packets |
//! | [`reduction`] | `reduce_whole`, `reduce_shards`: all_reduce, reduce, reduce_scatter |
//! | [`movement`] | `move_rows`: all_gather, broadcast, scatter, gather, all_to_all |
//! | [`nvls`] | all_reduce, reduce_scatter, all_gather by multicast |
//! | [`vector`] | all_gather_v, all_to_all_v with counts in device memory |
//! | [`point`] | send, recv |
//! | [`batch`] | concurrent sends to and receives from several peers |
//! | [`quantize`] | stochastic rounding to bf16, sum of bf16 rows in f32 |
//! | [`window`] | put, get, signal and wait on a window |
//! | [`barrier`] | barrier |
//! | [`fused`] | reduction over the ranks + residual add + norm, optionally to fp8 |
//! | [`moe`] | mixture of experts: dispatch and combine |
//! | [`vocab`] | top-k and log-sum-exp of logits that are split by columns |
//! | [`overlap`] | all_gather with ready flags and reduce_scatter with arrival counters |
//! | [`one_sided`] | put with signal around a ring |
#![no_std]
// Models do not compile the native entries, which use the other imports.
#![cfg_attr(any(loom, shuttle), allow(unused_imports))]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_gpu_kernel),
    allow(improper_gpu_kernel_arg)
)]

pub mod all_reduce;
pub mod barrier;
pub mod batch;
mod chunk;
mod exchange;
pub mod fused;
pub mod moe;
pub mod movement;
pub mod nvls;
pub mod one_sided;
pub mod overlap;
pub mod point;
pub mod quantize;
mod reducer;
pub mod reduction;
pub mod vector;
pub mod vocab;
pub mod window;

/// All kernel instances of this crate. The host loads them together. A test compares the list with
/// the kernels that `#[kernel]` registers.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub static KERNELS: &[&[fusewire_device::native::KernelInfo]] = &[
    all_reduce::ALL_REDUCE_PACKET_INSTANCES,
    all_reduce::two_shot::ALL_REDUCE_PACKET_TWO_SHOT_INSTANCES,
    barrier::BARRIER_INSTANCES,
    batch::BATCH_INSTANCES,
    fused::REDUCE_NORM_INSTANCES,
    fused::REDUCE_NORM_PACKET_INSTANCES,
    moe::MOE_COMBINE_INSTANCES,
    moe::MOE_DISPATCH_INSTANCES,
    movement::MOVE_ROWS_INSTANCES,
    nvls::ALL_GATHER_NVLS_INSTANCES,
    nvls::ALL_REDUCE_NVLS_INSTANCES,
    nvls::REDUCE_SCATTER_NVLS_INSTANCES,
    one_sided::RING_PUT_INSTANCES,
    overlap::ALL_GATHER_WITH_FLAGS_INSTANCES,
    overlap::REDUCE_SCATTER_ON_ARRIVAL_INSTANCES,
    overlap::REDUCE_SCATTER_ON_ARRIVAL_ANY_INSTANCES,
    point::RECV_INSTANCES,
    point::SEND_INSTANCES,
    quantize::QUANTIZE_INSTANCES,
    quantize::SUM_ROWS_INSTANCES,
    reduction::REDUCE_SHARDS_INSTANCES,
    reduction::REDUCE_SHARDS_ANY_INSTANCES,
    reduction::REDUCE_WHOLE_INSTANCES,
    reduction::REDUCE_WHOLE_ANY_INSTANCES,
    vector::ALL_GATHER_V_INSTANCES,
    vector::ALL_TO_ALL_V_INSTANCES,
    vocab::VOCAB_INSTANCES,
    window::WINDOW_GET_INSTANCES,
    window::WINDOW_PUT_INSTANCES,
    window::WINDOW_SIGNAL_INSTANCES,
    window::WINDOW_WAIT_INSTANCES,
];

pub use exchange::Exchange;

/// Alignment of parts of a range, in elements. Blocks and staged rows start at multiples of it.
pub const ALIGNMENT: usize = 64;
