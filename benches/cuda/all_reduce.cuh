// All-reduce of user memory with barriers, in three forms: one stage, two stages by pull, and two
// stages by push. n is the size of a rank's input in bytes, R the number of ranks. A vector has 16
// bytes, and n is a multiple of 16.
#pragma once

#include "barrier.cuh"
#include "elements.cuh"

// Maximum number of 16-byte loads in flight per thread. With one block of 512 threads per SM, 128
// blocks then have 16 MiB in flight. A rate of 4.8 TB/s at a latency of 0.7 us needs 3.5 MiB in
// flight at all times, also while threads store and sum between loads.
#ifndef LOADS_IN_FLIGHT
#define LOADS_IN_FLIGHT 16
#endif

template <int R>
constexpr int UNROLLED = LOADS_IN_FLIGHT / R > 1 ? LOADS_IN_FLIGHT / R : 1;

// Sums vectors i, i + stride, .. of all ranks. All loads are issued before the first addition.
template <class T, int R, int U>
__device__ __forceinline__ void reduce(const Peers<R> &inputs, u32 i, u32 stride,
                                       Vector (&sums)[U]) {
    Vector parts[U][R];
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int rank = 0; rank < R; ++rank) {
            parts[u][rank] = load(at<const Vector>(inputs, rank) + i + u * stride);
        }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
        sums[u] = sum<T, R>(parts[u]);
    }
}

// One stage: every rank reads every input and computes the whole sum.
//
// Traffic per rank: reads R n, of which (R - 1) n from peers, and writes n. There are two barriers
// without fences. Small sizes are bound by the barriers and one read. Large sizes are bound by the
// links, which carry (R - 1) n. On one GPU, large sizes are bound by the L2: it serves all but the
// first of the R reads of a line if these reads are close in time.
//
// Who may overwrite what: the rank's next kernel may overwrite the rank's input. Block b of every
// peer arrives at the end barrier after its last read of the input, and this kernel ends only after
// all its blocks have passed that barrier. Block b reads the same part on every rank. No peer
// accesses the output.
template <class T, int R>
__device__ __forceinline__ void one_stage(const Peers<R> &inputs, const Peers<R> &pads,
                                          void *output, u32 vectors, u32 rank) {
    Barrier<R> barrier(pads, rank);
    barrier.start();
    Vector *to = static_cast<Vector *>(output);
    const u32 stride = threads_of_grid();
    sweep<UNROLLED<R>>(thread_of_grid(), vectors, stride, [&](auto count, u32 i) {
        constexpr int U = decltype(count)::value;
        Vector sums[U];
        reduce<T, R, U>(inputs, i, stride, sums);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            store(to + i + u * stride, sums[u]);
        }
    });
    barrier.template finish<Order::Relaxed>();
}

// Two stages by pull, as in vLLM. Rank r sums part r of all inputs into its scratch and its own
// output. After a barrier, every rank copies the other parts from the peers' scratch. Ranks need
// not know the addresses of the peers' outputs.
//
// Traffic per rank: reads n + n (R - 1) / R and writes n + n / R. The links carry 2 n (R - 1) / R
// of this traffic. There are two barriers, the second with a fence. Large sizes are bound by the
// links or, on one GPU, by memory, which moves slightly more than 3 n. A copy moves 2 n.
//
// Who may overwrite what:
// - The rank's next kernel may overwrite the rank's input. Block b of every peer arrives at the
//   middle barrier after its last read of the input, and this kernel ends only after all its blocks
//   have passed that barrier.
// - The rank's next kernel of this kind may overwrite the rank's scratch after the start barrier.
//   When a peer arrives at that barrier, the peer's previous kernel, including all reads of the
//   scratch, has ended (stream order).
//
// In stage two, block b reads exactly the vectors that the peers' block b wrote in stage one, so
// barriers between blocks of the same index suffice.
template <class T, int R>
__device__ __forceinline__ void two_stage_pull(const Peers<R> &inputs, const Peers<R> &pads,
                                               const Peers<R> &scratches, void *output, u32 vectors,
                                               u32 rank) {
    const u32 part = (vectors + R - 1) / R;
    const u32 begin = least(part * rank, vectors);
    const u32 own = least(part, vectors - begin);
    const u32 stride = threads_of_grid();
    Vector *to = static_cast<Vector *>(output);
    Vector *scratch = at<Vector>(scratches, rank);
    Barrier<R> barrier(pads, rank);
    barrier.start();
    sweep<UNROLLED<R>>(thread_of_grid(), own, stride, [&](auto count, u32 i) {
        constexpr int U = decltype(count)::value;
        Vector sums[U];
        reduce<T, R, U>(inputs, begin + i, stride, sums);
#pragma unroll
        for (int u = 0; u < U; ++u) {
            store(scratch + i + u * stride, sums[u]);
            store(to + begin + i + u * stride, sums[u]);
        }
    });
    barrier.middle();
    // i visits the indices of the vectors that this thread wrote in stage one. Only parts at the
    // end of the message may be shorter than `part`.
    sweep<UNROLLED<R>>(thread_of_grid(), part, stride, [&](auto count, u32 i) {
        constexpr int U = decltype(count)::value;
        Vector taken[R][U];
        const auto each = [&](const auto &body) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
#pragma unroll
                for (int u = 0; u < U; ++u) {
                    const u32 local = i + u * stride;
                    if (r != rank && part * r + local < vectors) {
                        body(r, u, local);
                    }
                }
            }
        };
        each([&](int r, int u, u32 local) {
            taken[r][u] = load(at<const Vector>(scratches, r) + local);
        });
        each([&](int r, int u, u32 local) { store(to + part * r + local, taken[r][u]); });
    });
    barrier.close();
}

// Two stages by push. Rank r sums part r of all inputs and stores the sum to all outputs. The ranks
// must exchange the addresses of the outputs.
//
// Traffic per rank: reads n and writes n. The links carry (R - 1) / R of the reads and of the
// writes. On one GPU, the traffic equals that of a copy of n. There are two barriers, the second
// with a fence. Stores are posted, so the second stage costs no round trip.
//
// Who may overwrite what:
// - The rank's next kernel may overwrite the rank's input and output. Block b of every peer arrives
//   at the end barrier after its last read of inputs and its last write to outputs, and this kernel
//   ends only after all its blocks have passed that barrier.
// - A peer's kernel may write to the rank's output after the start barrier. When the rank arrives
//   at that barrier, its previous kernel, which may have read the output, has ended (stream order).
template <class T, int R>
__device__ __forceinline__ void two_stage_push(const Peers<R> &inputs, const Peers<R> &pads,
                                               const Peers<R> &outputs, u32 vectors, u32 rank) {
    const u32 part = (vectors + R - 1) / R;
    const u32 begin = least(part * rank, vectors);
    const u32 own = least(part, vectors - begin);
    const u32 stride = threads_of_grid();
    Barrier<R> barrier(pads, rank);
    barrier.start();
    sweep<UNROLLED<R>>(thread_of_grid(), own, stride, [&](auto count, u32 i) {
        constexpr int U = decltype(count)::value;
        Vector sums[U];
        reduce<T, R, U>(inputs, begin + i, stride, sums);
#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int u = 0; u < U; ++u) {
                store(at<Vector>(outputs, r) + begin + i + u * stride, sums[u]);
            }
        }
    });
    barrier.template finish<Order::Release>();
}
