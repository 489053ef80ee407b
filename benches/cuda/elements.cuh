// Addition of f32 and bf16 vectors. The ranks' values are added in rank order in f32 and rounded
// once, so the results of all ranks are bitwise identical.
#pragma once

#include "memory.cuh"

// Passes a compile-time integer to a generic lambda, as the type of an argument.
template <int N>
struct Count {
    static constexpr int value = N;
};

struct F32 {
    static constexpr int LANES = 4;

    static __device__ __forceinline__ void unpack(const Vector &from, float (&to)[LANES]) {
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            to[i] = __uint_as_float(from.word[i]);
        }
    }

    static __device__ __forceinline__ Vector pack(const float (&from)[LANES]) {
        Vector to;
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            to.word[i] = __float_as_uint(from[i]);
        }
        return to;
    }
};

struct Bf16 {
    static constexpr int LANES = 8;

    static __device__ __forceinline__ void unpack(const Vector &from, float (&to)[LANES]) {
#pragma unroll
        for (int i = 0; i < LANES / 2; ++i) {
            to[2 * i] = __uint_as_float(from.word[i] << 16);
            to[2 * i + 1] = __uint_as_float(from.word[i] & 0xffff0000u);
        }
    }

    static __device__ __forceinline__ Vector pack(const float (&from)[LANES]) {
        Vector to;
#pragma unroll
        for (int i = 0; i < LANES / 2; ++i) {
            to.word[i] = bf16_pair(from[2 * i], from[2 * i + 1]);
        }
        return to;
    }
};

// Returns the sum of R vectors, in rank order.
template <class T, int R>
__device__ __forceinline__ Vector sum(const Vector (&parts)[R]) {
    float total[T::LANES];
    T::unpack(parts[0], total);
#pragma unroll
    for (int rank = 1; rank < R; ++rank) {
        float part[T::LANES];
        T::unpack(parts[rank], part);
#pragma unroll
        for (int i = 0; i < T::LANES; ++i) {
            total[i] = __fadd_rn(total[i], part[i]);
        }
    }
    return T::pack(total);
}

// Visits first, first + stride, ... below end. Each call body(Count<U>, i) handles the U indices i,
// i + stride, .., i + (U - 1) * stride, so that the loads of U indices are in flight concurrently.
// The remainder is handled with U / 2, U / 4, .., so it costs only a few round trips.
template <int U, class Body>
__device__ __forceinline__ void sweep(u32 first, u32 end, u32 stride, const Body &body) {
    u32 i = first;
    for (; i + (U - 1) * stride < end; i += U * stride) {
        body(Count<U>{}, i);
    }
    if constexpr (U > 1) {
        sweep<U / 2>(i, end, stride, body);
    }
}

// Index of this thread in the grid, and number of threads in the grid.
__device__ __forceinline__ u32 thread_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u32 threads_of_grid() { return gridDim.x * blockDim.x; }

__device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }
