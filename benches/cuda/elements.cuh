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

__device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }

// Rounds to E4M3, to nearest with ties to even. Larger magnitudes than 448 become 448.
__device__ __forceinline__ u32 e4m3(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 sign = bits >> 24 & 0x80;
    const u32 magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        return sign | 0x7f;
    }
    // Below 2^-6, elements are multiples of 2^-9, the precision of floats from 2^14.
    if (magnitude < 0x3c800000) {
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) & 0xf);
    }
    const u32 rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
    return sign | least(rounded - (120u << 3), 0x7e);
}

// Converts two floats to E4M3. `low` is in the low byte of the result.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return e4m3(low) | e4m3(high) << 8;
#endif
}

// Index of this thread in the grid, and number of threads in the grid.
__device__ __forceinline__ u32 thread_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u32 threads_of_grid() { return gridDim.x * blockDim.x; }
