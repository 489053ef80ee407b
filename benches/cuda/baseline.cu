// The CUDA C++ baseline for Fusewire's kernels. It implements published algorithms (vLLM's custom
// all-reduce, the packets of NCCL's LL and MSCCL++, the mixtures of experts of TensorRT-LLM and
// DeepEP) for this comparison. The number of ranks is a
// template constant, so all loops over ranks are unrolled and all peers' addresses are in the
// constant bank.
//
// Entries are named KERNEL_TYPE_RANKS (and _VECTORS for the norms). The type of a dispatch is that
// of the payload. Arguments are passed without
// structs; benches/src/versus_cuda/entries.rs has the same list. Counts are in 16-byte vectors and
// have 32 bits.
//
// Loads of peers' memory never use `ld.global.nc`, because peers write this memory during the
// kernel.

#include "all_reduce.cuh"
#include "fused.cuh"
#include "moe.cuh"
#include "packets.cuh"
#include "costs.cuh"

// One block of 512 threads per SM, with up to 128 registers per thread. More loads in flight per
// thread gain more than a second block per SM.
#define ENTRY extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)

#define ALL_REDUCE(NAME, T, R)                                                                     \
    ENTRY                                                                                          \
    one_stage_##NAME##_##R(const __grid_constant__ Peers<R> inputs,                                \
                           const __grid_constant__ Peers<R> pads, void *output, u32 vectors,       \
                           u32 rank) {                                                             \
        one_stage<T, R>(inputs, pads, output, vectors, rank);                                      \
    }                                                                                              \
    ENTRY                                                                                          \
    two_stage_pull_##NAME##_##R(                                                                   \
        const __grid_constant__ Peers<R> inputs, const __grid_constant__ Peers<R> pads,            \
        const __grid_constant__ Peers<R> scratches, void *output, u32 vectors, u32 rank) {         \
        two_stage_pull<T, R>(inputs, pads, scratches, output, vectors, rank);                      \
    }                                                                                              \
    ENTRY                                                                                          \
    two_stage_push_##NAME##_##R(const __grid_constant__ Peers<R> inputs,                           \
                                const __grid_constant__ Peers<R> pads,                             \
                                const __grid_constant__ Peers<R> outputs, u32 vectors, u32 rank) { \
        two_stage_push<T, R>(inputs, pads, outputs, vectors, rank);                                \
    }                                                                                              \
    ENTRY                                                                                          \
    packets_one_shot_##NAME##_##R(const void *input, const __grid_constant__ Peers<R> pads,        \
                                  const __grid_constant__ Peers<R> buffers, void *output,          \
                                  u32 vectors, u32 rank, u32 capacity) {                           \
        packets_one_shot<T, R>(input, pads, buffers, output, vectors, rank, capacity);             \
    }                                                                                              \
    ENTRY                                                                                          \
    packets_two_shot_##NAME##_##R(const void *input, const __grid_constant__ Peers<R> pads,        \
                                  const __grid_constant__ Peers<R> buffers, void *output,          \
                                  u32 vectors, u32 rank, u32 capacity) {                           \
        packets_two_shot<T, R>(input, pads, buffers, output, vectors, rank, capacity);             \
    }

#define NORMS_OF(NAME, T, R, V)                                                                    \
    ENTRY                                                                                          \
    norm_by_barrier_##NAME##_##R##_##V(                                                            \
        const __grid_constant__ Peers<R> inputs, const __grid_constant__ Peers<R> pads,            \
        const void *residual, const void *weight, void *residual_out, void *output, u32 rows,      \
        u32 width, float epsilon, u32 rank) {                                                      \
        const Norm norm = {residual, weight, residual_out, output, rows, width, epsilon};          \
        norm_by_barrier<T, R, V>(inputs, pads, norm, rank);                                        \
    }                                                                                              \
    ENTRY                                                                                          \
    norm_by_packets_##NAME##_##R##_##V(const void *input, const __grid_constant__ Peers<R> pads,   \
                                       const __grid_constant__ Peers<R> buffers,                   \
                                       const void *residual, const void *weight,                   \
                                       void *residual_out, void *output, u32 rows, u32 width,      \
                                       float epsilon, u32 rank, u32 capacity) {                    \
        const Norm norm = {residual, weight, residual_out, output, rows, width, epsilon};          \
        norm_by_packets<T, R, V>(input, pads, buffers, norm, rank, capacity);                      \
    }

#define NORM_ALONE(NAME, T, V)                                                                     \
    ENTRY                                                                                          \
    norm_alone_##NAME##_##V(const void *input, const void *residual, const void *weight,           \
                            void *residual_out, void *output, u32 rows, u32 width,                 \
                            float epsilon) {                                                       \
        const Norm norm = {residual, weight, residual_out, output, rows, width, epsilon};          \
        norm_alone<T, V>(input, norm);                                                             \
    }

#define COSTS(R)                                                                                   \
    ENTRY barriers_relaxed_##R(const __grid_constant__ Peers<R> pads, u32 turns, u32 rank) {       \
        barrier_turns<R, Order::Relaxed>(pads, turns, rank);                                       \
    }                                                                                              \
    ENTRY barriers_release_##R(const __grid_constant__ Peers<R> pads, u32 turns, u32 rank) {       \
        barrier_turns<R, Order::Release>(pads, turns, rank);                                       \
    }

#define DISPATCHES(NAME, PAYLOAD, KIND, TEAM, R)                                                   \
    ENTRY                                                                                          \
    moe_dispatch_##TEAM##_##NAME##_##R(                                                            \
        const __grid_constant__ Peers<R> pads, const __grid_constant__ Peers<R> arrivals,          \
        const __grid_constant__ Peers<R> infos, const void *x, const void *experts,                \
        const void *weights, void *slots, u32 count, u32 capacity, u32 width, u32 per_rank,        \
        u32 rank) {                                                                                \
        const Tokens tokens = {x, experts, weights, slots, count, capacity, width};                \
        moe_dispatch<PAYLOAD, KIND, R>(pads, arrivals, infos, tokens, per_rank, rank);             \
    }                                                                                              \
    ENTRY                                                                                          \
    moe_dispatch_experts_##TEAM##_##NAME##_##R(                                                    \
        const __grid_constant__ Peers<R> pads, const __grid_constant__ Peers<R> arrivals,          \
        const __grid_constant__ Peers<R> infos, const void *x, const void *experts,                \
        const void *weights, void *slots, void *rows, void *offsets, void *origins,                \
        void *row_weights, u32 count, u32 capacity, u32 width, u32 per_rank, u32 rank) {           \
        const Tokens tokens = {x, experts, weights, slots, count, capacity, width};                \
        const ExpertRows out = {rows, offsets, origins, row_weights};                              \
        moe_dispatch_experts<PAYLOAD, KIND, R>(pads, arrivals, infos, tokens, out, per_rank,       \
                                               rank);                                              \
    }

#define COMBINES(R)                                                                                \
    ENTRY                                                                                          \
    moe_combine_pull_bf16_##R(const __grid_constant__ Peers<R> pads,                               \
                              const __grid_constant__ Peers<R> results, const void *weights,       \
                              const void *slots, void *output, u32 count, u32 capacity, u32 width, \
                              u32 rank) {                                                          \
        moe_combine_pull<R>(pads, results, weights, slots, output, count, capacity, width, rank);  \
    }                                                                                              \
    ENTRY                                                                                          \
    moe_combine_push_bf16_##R(const __grid_constant__ Peers<R> pads,                               \
                              const __grid_constant__ Peers<R> results, const void *y,             \
                              const void *offsets, const void *origins, const void *weights,       \
                              const void *slots, void *output, u32 count, u32 width, u32 per_rank, \
                              u32 rank) {                                                          \
        moe_combine_push<R>(pads, results, y, offsets, origins, weights, slots, output, count,     \
                            width, per_rank, rank);                                                \
    }

#define MOE(R)                                                                                     \
    DISPATCHES(bf16, PlainPayload, TeamKind::Block, block, R)                                      \
    DISPATCHES(bf16, PlainPayload, TeamKind::Warp, warp, R)                                        \
    DISPATCHES(e4m3, Fp8Payload, TeamKind::Block, block, R)                                        \
    DISPATCHES(e4m3, Fp8Payload, TeamKind::Warp, warp, R)                                          \
    COMBINES(R)

#define NORMS(NAME, T, R) NORMS_OF(NAME, T, R, 1) NORMS_OF(NAME, T, R, 2) NORMS_OF(NAME, T, R, 4)
#define TYPE(NAME, T)                                                                              \
    ALL_REDUCE(NAME, T, 2)                                                                         \
    ALL_REDUCE(NAME, T, 4)                                                                         \
    ALL_REDUCE(NAME, T, 8)                                                                         \
    NORMS(NAME, T, 2)                                                                              \
    NORMS(NAME, T, 4)                                                                              \
    NORMS(NAME, T, 8)                                                                              \
    NORM_ALONE(NAME, T, 1)                                                                         \
    NORM_ALONE(NAME, T, 2)                                                                         \
    NORM_ALONE(NAME, T, 4)

TYPE(f32, F32)
TYPE(bf16, Bf16)
MOE(2)
MOE(4)
MOE(8)
COSTS(2)
COSTS(4)
COSTS(8)

ENTRY copy(void *output, const void *input, u32 vectors) { copy_vectors(output, input, vectors); }

ENTRY empty() {}

ENTRY latch(const void *word, u32 value) { wait_for_latch(static_cast<const u32 *>(word), value); }

ENTRY ping_pong_relaxed(const __grid_constant__ Peers<2> pads, u32 turns, u32 rank) {
    ping_pong<Order::Relaxed>(pads, turns, rank);
}

ENTRY ping_pong_release(const __grid_constant__ Peers<2> pads, u32 turns, u32 rank) {
    ping_pong<Order::Release>(pads, turns, rank);
}
