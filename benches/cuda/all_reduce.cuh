// All-reduce of user memory with barriers: one stage, two stages by pull, two stages by push. n is
// the bytes of a rank's input, R the number of ranks. Vectors have 16 bytes; n is a multiple of
// that.
#pragma once

#include "barrier.cuh"
#include "elements.cuh"

// Maximum number of 16-byte loads in flight per thread. 128 blocks of 512 threads, one per
// multiprocessor, then have 16 MiB in flight; 4.8 TB/s with a latency of 0.7 us need 3.5 MiB at all
// times, including stores and sums between the loads.
#ifndef LOADS_IN_FLIGHT
#define LOADS_IN_FLIGHT 16
#endif

template <int R>
constexpr int UNROLLED = LOADS_IN_FLIGHT / R > 1 ? LOADS_IN_FLIGHT / R : 1;

// Sums vectors i, i + stride, .. of all ranks. All loads are issued before the first sum.
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
// Traffic per rank: R n read, of which (R - 1) n from peers, n written. Two barriers without a
// fence. Small sizes are bound by the barriers and one read. Large sizes are bound by the links ((R
// - 1) n) or, on one GPU, by the L2, which serves all but the first of the R reads of a line if
// they are close in time.
//
// Who may overwrite what: a rank's input, by the rank's next kernel,
//   after having acquired: the end barrier of all blocks (the kernel's end),
//   released by: every peer's block b after its last read of its part; block b of all ranks reads
//   the same part.
// The output belongs to the rank; no peer accesses it.
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

// Two stages by pull, as in vLLM: rank r sums part r of all inputs into its scratch and its own
// output; after a barrier every rank copies the other parts from the peers' scratch. Peers need no
// addresses of outputs.
//
// Traffic per rank: n + n (R - 1) / R read, n + n / R written, 2 n (R - 1) / R of it over the links
// for any R. Two barriers, the second with a fence. Large sizes are bound by the links, or on one
// GPU by memory: slightly more than 3 n, against 2 n of a copy.
//
// Who may overwrite what: a rank's input, by the rank's next kernel,
//   after having acquired: the middle barrier of all blocks (the kernel's end),
//   released by: every peer's block b after its last read of its share of the part;
// and a rank's scratch, by the rank's next kernel of this kind after its start barrier,
//   after having acquired: that barrier, at which block b of every peer has arrived,
//   released by: the peer, whose previous kernel, with all reads of scratch, has ended (stream
//   order).
// In stage two block b reads exactly the vectors that the peers' block b wrote in stage one, so
// barriers per block suffice.
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
    // i visits the vectors that this thread wrote in stage one. Only the last parts may be shorter.
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

// Two stages by push: rank r sums part r of all inputs and stores it to all outputs, whose
// addresses the ranks must exchange.
//
// Traffic per rank: n read, n written, (R - 1) / R of both over the links; on one GPU no more than
// a copy of n. Two barriers, the second with a fence. Stores are posted, so the second stage costs
// no round trip.
//
// Who may overwrite what: a rank's input and output, by the rank's next kernel,
//   after having acquired: the end barrier of all blocks (the kernel's end),
//   released by: every peer's block b after its last read of inputs and its last write to outputs;
// and a rank's output, by a peer's kernel,
//   after having acquired: the start barrier, at which block b of the rank has arrived,
//   released by: the rank, whose previous kernel, which may have read the output, has ended (stream
//   order).
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
