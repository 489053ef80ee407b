// All-reduce, residual and RMSNorm in one launch. One block processes a row (token) and keeps it in
// registers between the sum and the result. This file also has a norm without communication, which
// follows a separate all-reduce.
//
// Rounding: the sum over the ranks is rounded to the element type. That sum plus the residual is
// rounded again (residual_out). The norm is computed in f32 from the rounded values, multiplied by
// the weight, and rounded.
//
// A row has at most V * blockDim.x vectors, and blockDim.x is a multiple of 32.
#pragma once

#include "packets.cuh"

// Arguments that all three kernels share.
struct Norm {
    const void *residual;
    const void *weight;
    void *residual_out;
    void *output;
    u32 rows;
    // Vectors per row.
    u32 width;
    float epsilon;
};

// Returns the sum over the block. The parity of `turn` selects one of two buffers, because one warp
// may be one row ahead of another.
__device__ __forceinline__ float block_sum(float value, u32 turn) {
    SHARED_PARTIALS(partial);
    const u32 warp = threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(~0u, value, offset);
    }
    if (lane == 0) {
        partial[turn & 1][warp] = value;
    }
    __syncthreads();
    // Every half warp adds all partial sums, so no second exchange is needed.
    constexpr u32 MOST_WARPS = MAX_THREADS / 32;
    const u32 other = lane % MOST_WARPS;
    value = other < blockDim.x / 32 ? partial[turn & 1][other] : 0.0f;
#pragma unroll
    for (int offset = MOST_WARPS / 2; offset > 0; offset /= 2) {
        value += __shfl_xor_sync(~0u, value, offset);
    }
    return value;
}

// Adds the residual to a sum, rounds the result, and returns the sum of squares of the rounded
// values.
template <class T>
__device__ __forceinline__ float add_residual(Vector &value, const Vector &residual) {
    float values[T::LANES], residuals[T::LANES];
    T::unpack(value, values);
    T::unpack(residual, residuals);
#pragma unroll
    for (int i = 0; i < T::LANES; ++i) {
        values[i] = __fadd_rn(values[i], residuals[i]);
    }
    value = T::pack(values);
    T::unpack(value, values);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < T::LANES; ++i) {
        squares += values[i] * values[i];
    }
    return squares;
}

template <class T>
__device__ __forceinline__ Vector scaled(const Vector &value, float scale, const Vector &weight) {
    float values[T::LANES], weights[T::LANES];
    T::unpack(value, values);
    T::unpack(weight, weights);
#pragma unroll
    for (int i = 0; i < T::LANES; ++i) {
        values[i] = values[i] * scale * weights[i];
    }
    return T::pack(values);
}

// Processes the rows blockIdx.x, blockIdx.x + gridDim.x, ... The weight and the first row's
// residual belong to this rank, so they are loaded before `ready` waits for peers. fetch(row, turn,
// values) writes this thread's part of the row's sum to values.
template <class T, int V, class Ready, class Fetch>
__device__ __forceinline__ void norm_rows(const Norm &norm, const Ready &ready,
                                          const Fetch &fetch) {
    const Vector *residual = static_cast<const Vector *>(norm.residual);
    Vector *residual_out = static_cast<Vector *>(norm.residual_out);
    Vector *output = static_cast<Vector *>(norm.output);
    const u32 columns = norm.width;
    const auto each = [&](const auto &body) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const u32 column = v * blockDim.x + threadIdx.x;
            if (column < columns) {
                body(v, column);
            }
        }
    };
    Vector weights[V], residuals[V];
    each([&](int v, u32 column) {
        weights[v] = load(static_cast<const Vector *>(norm.weight) + column);
        if (blockIdx.x < norm.rows) {
            residuals[v] = load(residual + blockIdx.x * columns + column);
        }
    });
    ready();
    u32 turn = 0;
    for (u32 row = blockIdx.x; row < norm.rows; row += gridDim.x, ++turn) {
        Vector values[V];
        fetch(row, turn, values);
        float squares = 0.0f;
        each([&](int v, u32 column) {
            squares += add_residual<T>(values[v], residuals[v]);
            store(residual_out + row * columns + column, values[v]);
            if (row + gridDim.x < norm.rows) {
                residuals[v] = load(residual + (row + gridDim.x) * columns + column);
            }
        });
        const float total = block_sum(squares, turn);
        const float scale = rsqrtf(total / static_cast<float>(columns * T::LANES) + norm.epsilon);
        each([&](int v, u32 column) {
            store(output + row * columns + column, scaled<T>(values[v], scale, weights[v]));
        });
    }
}

// Number of a thread's vectors whose loads or packets are in flight concurrently.
template <int V, int FIT>
constexpr int TOGETHER = V < FIT ? V : (FIT > 1 ? FIT : 1);

// Fused kernel with barriers: every rank reads the rows of all inputs.
//
// Traffic per rank, for rows of n bytes in total: reads R n of inputs, of which (R - 1) n from
// peers, and n of residual; writes 2 n. There are two barriers without fences. With few rows, the
// kernel is bound by the barriers, one read and the reduction within the block.
//
// Who may overwrite what: as in one_stage. Only the rank itself accesses residual, weight and
// outputs.
template <class T, int R, int V>
__device__ __forceinline__ void norm_by_barrier(const Peers<R> &inputs, const Peers<R> &pads,
                                                const Norm &norm, u32 rank) {
    Barrier<R> barrier(pads, rank);
    norm_rows<T, V>(
        norm, [&] { barrier.start(); },
        [&](u32 row, u32, Vector(&values)[V]) {
            constexpr int K = TOGETHER<V, (V > 2 ? 8 : 16) / R>;
            static_assert(V % K == 0, "groups are whole");
#pragma unroll
            for (int v = 0; v < V; v += K) {
                Vector parts[K][R];
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    const u32 column = (v + k) * blockDim.x + threadIdx.x;
                    if (column < norm.width) {
#pragma unroll
                        for (int r = 0; r < R; ++r) {
                            parts[k][r] =
                                load(at<const Vector>(inputs, r) + row * norm.width + column);
                        }
                    }
                }
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    if ((v + k) * blockDim.x + threadIdx.x < norm.width) {
                        values[v + k] = sum<T, R>(parts[k]);
                    }
                }
            }
        });
    barrier.template finish<Order::Relaxed>();
}

// Fused kernel with packets: every rank pushes its rows to all peers. There must be at least one
// row, and `capacity` must be at least the number of vectors in all rows of a block.
//
// Traffic per rank: reads n twice, 2 n (R - 1) of packets, and n of residual; writes 2 n (R - 1) of
// packets to peers and 2 n of results. There is no barrier.
//
// Who may overwrite what: as in packets_one_shot.
template <class T, int R, int V>
__device__ __forceinline__ void norm_by_packets(const void *input, const Peers<R> &pads,
                                                const Peers<R> &buffers, const Norm &norm, u32 rank,
                                                u32 capacity) {
    const Vector *from = static_cast<const Vector *>(input);
    const u32 width = norm.width;
    // These loads are issued before the load of the exchange counter, so their latencies overlap.
    Vector own[V] = {};
#pragma unroll
    for (int v = 0; v < V; ++v) {
        const u32 column = v * blockDim.x + threadIdx.x;
        if (column < width && blockIdx.x < norm.rows) {
            own[v] = load(from + blockIdx.x * width + column);
        }
    }
    const Exchange<R, 1> exchange(buffers, pads, rank, capacity);
    const auto send = [&] {
        u32 turn = 0;
        for (u32 row = blockIdx.x; row < norm.rows; row += gridDim.x, ++turn) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const u32 column = v * blockDim.x + threadIdx.x;
                if (column < width) {
                    const Vector value = turn == 0 ? own[v] : load(from + row * width + column);
                    exchange.send_all(0, turn * width + column, value);
                }
            }
        }
    };
    norm_rows<T, V>(norm, send, [&](u32 row, u32 turn, Vector(&values)[V]) {
        constexpr int K = TOGETHER<V, (V > 2 ? 4 : 8) / R>;
        static_assert(V % K == 0, "groups are whole");
#pragma unroll
        for (int v = 0; v < V; v += K) {
            const u32 column = v * blockDim.x + threadIdx.x;
            Vector mine[K];
#pragma unroll
            for (int k = 0; k < K; ++k) {
                // Reloads the value while polls are in flight. The value is in the L2, and the
                // reload saves registers.
                mine[k] = column + k * blockDim.x < width
                              ? load(from + row * width + column + k * blockDim.x)
                              : Vector{};
            }
            Vector parts[K][R];
            exchange.template take<K>(0, turn * width + column, blockDim.x, mine, parts,
                                      [&](int k, u32) { return column + k * blockDim.x < width; });
#pragma unroll
            for (int k = 0; k < K; ++k) {
                values[v + k] = sum<T, R>(parts[k]);
            }
        }
    });
    exchange.close();
}

// Norm without communication, after an all-reduce in a separate launch.
//
// Traffic: reads 2 n and writes 2 n, all in local memory. The kernel is bound by one read and the
// reduction within the block or, with many rows, by memory.
template <class T, int V>
__device__ __forceinline__ void norm_alone(const void *input, const Norm &norm) {
    const Vector *from = static_cast<const Vector *>(input);
    norm_rows<T, V>(
        norm, [] {},
        [&](u32 row, u32, Vector(&values)[V]) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const u32 column = v * blockDim.x + threadIdx.x;
                if (column < norm.width) {
                    values[v] = load(from + row * norm.width + column);
                }
            }
        });
}
