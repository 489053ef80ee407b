// Kernels that measure the parts of an operation: a launch, a barrier, a signal round trip, a copy.
#pragma once

#include "barrier.cuh"
#include "elements.cuh"

// Maximum number of polls of host memory. All polls together take a few tenths of a second.
constexpr u32 MAX_LATCH_POLLS = 1u << 18;

// Blocks a stream until the host has stored `value` at `word`, in host memory. The host enqueues
// all measured work before this store, so measurements contain only device time. Returns after
// MAX_LATCH_POLLS polls at the latest.
__device__ __forceinline__ void wait_for_latch(const u32 *word, u32 value) {
    for (u32 polls = 0; polls < MAX_LATCH_POLLS && load_relaxed(word) != value; ++polls) {
    }
}

// Copies `vectors` vectors, which gives the reference rate for large sizes. Reads n and writes n
// bytes. The kernel is bound by memory, or by the L2 if input and output fit in it.
__device__ __forceinline__ void copy_vectors(void *output, const void *input, u32 vectors) {
    const Vector *from = static_cast<const Vector *>(input);
    Vector *to = static_cast<Vector *>(output);
    const u32 stride = threads_of_grid();
    sweep<16>(thread_of_grid(), vectors, stride, [&](auto count, u32 i) {
        constexpr int U = decltype(count)::value;
        Vector values[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            values[u] = load(from + i + u * stride);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            store(to + i + u * stride, values[u]);
        }
    });
}

// Passes `turns` barriers in sequence, using the barrier of the other kernels.
template <int R, Order ORDER>
__device__ __forceinline__ void barrier_turns(const Peers<R> &pads, u32 turns, u32 rank) {
    Barrier<R> barrier(pads, rank);
    for (u32 turn = 0; turn < turns; ++turn) {
        __syncthreads();
        barrier.template arrive_and_wait<ORDER>();
        __syncthreads();
    }
    barrier.close();
}

// Sends a signal from rank 0 to rank 1 and back, `turns` times. One thread per rank takes part.
//
// Who may overwrite what: the other rank's next signal overwrites this rank's `signal`. The other
// rank sends that signal only after it has received this rank's answer, and this rank answers only
// after its wait for the previous signal has ended.
template <Order ORDER>
__device__ __forceinline__ void ping_pong(const Peers<2> &pads, u32 turns, u32 rank) {
    if (thread_of_grid() != 0) {
        return;
    }
    SignalPad *own = at<SignalPad>(pads, rank);
    u32 *signal = own->signal;
    u32 *answer = at<SignalPad>(pads, 1 - rank)->signal;
    const u32 before = load_word(own->turns);
    const auto answer_with = [&](u32 value) {
        if constexpr (ORDER == Order::Release) {
            store_release(answer, value);
        } else {
            store_relaxed(answer, value);
        }
    };
    for (u32 turn = 1; turn <= turns; ++turn) {
        const u32 expected = before + turn;
        if (rank == 0) {
            answer_with(expected);
        }
        Timeout timeout;
        if constexpr (ORDER == Order::Release) {
            while (load_acquire(signal) != expected) {
                timeout.count_poll();
            }
        } else {
            while (load_relaxed(signal) != expected) {
                timeout.count_poll();
            }
        }
        if (rank != 0) {
            answer_with(expected);
        }
    }
    store_word(own->turns, before + turns);
}
