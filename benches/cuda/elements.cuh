// Sums of vectors of f32 and bf16. The ranks' values are added in rank order in f32 and rounded
// once, so every rank gets the same bits.
#pragma once

#include "memory.cuh"

// Compile-time number.
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

// Calls body(Count<U>, i) for i, i + stride, ... below end, where one call handles i, i + stride,
// .., i + (U - 1) * stride, with U times as many loads in flight. The remainder is handled by
// halves of U, so it costs only a few round trips.
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

// Index of this thread in the grid, and the number of threads of the grid.
__device__ __forceinline__ u32 thread_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u32 threads_of_grid() { return gridDim.x * blockDim.x; }

__device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }
