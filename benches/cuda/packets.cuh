// All-reduce with packets. Data and flag arrive together, so no barrier is needed. A unit has 16
// bytes and holds two packets of 4 bytes of data and 4 bytes of flag each, as in NCCL's LL and
// MSCCL++'s LL16. n and R are as in all_reduce.cuh.
#pragma once

#include "barrier.cuh"
#include "elements.cuh"

// A vector is sent as two units. The units of a warp's 32 vectors are contiguous. They are ordered
// by source, and for each source all first units precede all second units. Every store of a warp
// therefore covers 512 contiguous bytes, and the units of all sources are at constant offsets from
// one address.
constexpr int PLANES = 2;
constexpr int GROUP = 32;

__device__ __forceinline__ Unit pack_unit(const Vector &value, int plane, u32 flag) {
    const u64 high = static_cast<u64>(flag) << 32;
    return Unit{{high | value.word[2 * plane], high | value.word[2 * plane + 1]}};
}

__device__ __forceinline__ bool is_of(const Unit &unit, u32 flag) {
    return static_cast<u32>(unit.pair[0] >> 32) == flag &&
           static_cast<u32>(unit.pair[1] >> 32) == flag;
}

__device__ __forceinline__ Vector unpack_units(const Unit (&units)[PLANES]) {
    Vector value;
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) {
        value.word[2 * plane] = static_cast<u32>(units[plane].pair[0]);
        value.word[2 * plane + 1] = static_cast<u32>(units[plane].pair[1]);
    }
    return value;
}

// Addresses of the packets of one launch. A rank's buffer has one region per block, so every flag
// in a region was written in an exchange of the same block, even if the grid sizes of launches
// differ:
//   buffer[block][parity of the exchange][part][group of 32 vectors][source][plane][vector of the
//   group].
// `capacity`, a multiple of 32, is the maximum number of vectors per block and part. PARTS is 1 for
// the one-shot and 2 for the two-shot algorithm.
template <int R, int PARTS>
struct Exchange {
    const Peers<R> &buffers;
    const Peers<R> &pads;
    u32 rank;
    u32 capacity;
    u32 flag;

    // The flag is the number of the exchange, starting at 1, so a zeroed buffer contains no valid
    // packet. (After 2^32 launches the flag would be 0 once, but no measurement makes that many.)
    __device__ __forceinline__ Exchange(const Peers<R> &buffers, const Peers<R> &pads, u32 rank,
                                        u32 capacity)
        : buffers(buffers), pads(pads), rank(rank), capacity(capacity),
          flag(load_word(&at<SignalPad>(pads, rank)->exchanges[blockIdx.x]) + 1) {}

    // Returns the offset of the first unit of source 0 for a vector of this block.
    __device__ __forceinline__ u64 unit_offset(u32 part, u32 local) const {
        const u32 groups = capacity / GROUP;
        const u32 group = ((blockIdx.x * 2 + (flag & 1)) * PARTS + part) * groups + local / GROUP;
        return static_cast<u64>(group) * (R * PLANES * GROUP) + local % GROUP;
    }

    // Sends this rank's vector to `peer`, at index `local` of the peer's buffer.
    __device__ __forceinline__ void send(u32 peer, u32 part, u32 local, const Vector &value) const {
        Unit *to = at<Unit>(buffers, peer) + unit_offset(part, local) + rank * (PLANES * GROUP);
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            store_unit(to + plane * GROUP, pack_unit(value, plane, flag));
        }
    }

    // Sends a vector to all peers.
    __device__ __forceinline__ void send_all(u32 part, u32 local, const Vector &value) const {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (r != rank) {
                send(r, part, local, value);
            }
        }
    }

    // Receives K vectors, `step` apart, from the peers for which wanted(k, r) is true. All polls
    // are in flight concurrently, and only units that have not arrived are polled again. For this
    // rank, and for peers for which wanted(k, r) is false, own[k] is the value.
    template <int K, class Wanted>
    __device__ __forceinline__ void take(u32 part, u32 local, u32 step, const Vector (&own)[K],
                                         Vector (&parts)[K][R], const Wanted &wanted) const {
        const Unit *from[K];
#pragma unroll
        for (int k = 0; k < K; ++k) {
            from[k] = at<const Unit>(buffers, rank) + unit_offset(part, local + k * step);
        }
        const auto poll = [&](int k, int r, int plane) {
            return load_unit(from[k] + (r * PLANES + plane) * GROUP);
        };
        Unit units[K][R][PLANES];
#pragma unroll
        for (int k = 0; k < K; ++k) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const bool asked = r != rank && wanted(k, r);
#pragma unroll
                for (int plane = 0; plane < PLANES; ++plane) {
                    units[k][r][plane] = pack_unit(own[k], plane, flag);
                    if (asked) {
                        units[k][r][plane] = poll(k, r, plane);
                    }
                }
            }
        }
        bool all;
        Timeout timeout;
        do {
            all = true;
#pragma unroll
            for (int k = 0; k < K; ++k) {
#pragma unroll
                for (int r = 0; r < R; ++r) {
#pragma unroll
                    for (int plane = 0; plane < PLANES; ++plane) {
                        if (!is_of(units[k][r][plane], flag)) {
                            units[k][r][plane] = poll(k, r, plane);
                            all = false;
                        }
                    }
                }
            }
            timeout.count_poll();
        } while (!all);
#pragma unroll
        for (int k = 0; k < K; ++k) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                parts[k][r] = unpack_units(units[k][r]);
            }
        }
    }

    // Stores the counter for the next launch, after all threads have read the old value.
    __device__ __forceinline__ void close() const {
        __syncthreads();
        if (threadIdx.x == 0) {
            store_word(&at<SignalPad>(pads, rank)->exchanges[blockIdx.x], flag);
        }
    }
};

// One shot: every rank pushes its input to all peers and sums the arriving packets. There must be
// at least one vector.
//
// Traffic per rank: reads n of input and 2 n (R - 1) of packets; writes 2 n (R - 1) of packets to
// peers and n of output. There is no barrier, so a small size costs the one-way latency of a store
// plus a poll. Large sizes are slow, because flags double the traffic, which also grows with
// R - 1.
//
// Who may overwrite what: in exchange e + 2, a rank overwrites the packets that it sent in exchange
// e. Its launch of exchange e + 1 has then ended, so it has received packets of e + 1 from every
// peer, in any block. Each peer sent these packets in a later launch than the launch that read the
// packets of e (stream order). Two buffers therefore suffice, even for a block that has nothing to
// exchange. User memory is accessed only by its own rank.
template <class T, int R>
__device__ __forceinline__ void packets_one_shot(const void *input, const Peers<R> &pads,
                                                 const Peers<R> &buffers, void *output, u32 vectors,
                                                 u32 rank, u32 capacity) {
    const Vector *from = static_cast<const Vector *>(input);
    Vector *to = static_cast<Vector *>(output);
    const u32 stride = threads_of_grid();
    const u32 first = thread_of_grid();
    // This load overlaps with the load of the counter.
    Vector own = {};
    if (first < vectors) {
        own = load(from + first);
    }
    const Exchange<R, 1> exchange(buffers, pads, rank, capacity);
    u32 local = threadIdx.x;
    for (u32 i = first; i < vectors; i += stride, local += blockDim.x) {
        exchange.send_all(0, local, i == first ? own : load(from + i));
    }
    local = threadIdx.x;
    for (u32 i = first; i < vectors; i += stride, local += blockDim.x) {
        const Vector mine[1] = {i == first ? own : load(from + i)};
        Vector parts[1][R];
        exchange.template take<1>(0, local, 0, mine, parts, [](int, u32) { return true; });
        store(to + i, sum<T, R>(parts[0]));
    }
    exchange.close();
}

// Two shots: rank r receives part r of all inputs as packets, sums the part, and pushes the sum to
// all peers as packets. There must be at least one vector.
//
// Traffic per rank: reads n of input and 4 n (R - 1) / R of packets; writes 4 n (R - 1) / R of
// packets to peers and n of output. There is no barrier, so the cost is two one-way latencies.
// The algorithm is for sizes between those of the one-shot algorithm and those of the kernels with
// barriers and two stages.
//
// Who may overwrite what: as in the one-shot algorithm. Here too, every rank has started its launch
// of exchange e + 1 when the sender's launch of that exchange has ended. At least one part is not
// empty, the owner of that part sends the sum only after it has received packets of all ranks, and
// all ranks wait for the sum.
template <class T, int R>
__device__ __forceinline__ void packets_two_shot(const void *input, const Peers<R> &pads,
                                                 const Peers<R> &buffers, void *output, u32 vectors,
                                                 u32 rank, u32 capacity) {
    const u32 part = (vectors + R - 1) / R;
    const u32 begin = least(part * rank, vectors);
    const u32 own = least(part, vectors - begin);
    const u32 stride = threads_of_grid();
    const u32 first = thread_of_grid();
    const Vector *from = static_cast<const Vector *>(input);
    Vector *to = static_cast<Vector *>(output);
    const Exchange<R, 2> exchange(buffers, pads, rank, capacity);
    u32 local = threadIdx.x;
    for (u32 i = first; i < part; i += stride, local += blockDim.x) {
        Vector values[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (r != rank && part * r + i < vectors) {
                values[r] = load(from + part * r + i);
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (r != rank && part * r + i < vectors) {
                exchange.send(r, 0, local, values[r]);
            }
        }
    }
    local = threadIdx.x;
    for (u32 i = first; i < own; i += stride, local += blockDim.x) {
        const Vector mine[1] = {load(from + begin + i)};
        Vector parts[1][R];
        exchange.template take<1>(0, local, 0, mine, parts, [](int, u32) { return true; });
        const Vector total = sum<T, R>(parts[0]);
        exchange.send_all(1, local, total);
        store(to + begin + i, total);
    }
    local = threadIdx.x;
    for (u32 i = first; i < part; i += stride, local += blockDim.x) {
        const Vector nothing[1] = {};
        Vector parts[1][R];
        const auto is_there = [&](int, u32 r) { return part * r + i < vectors; };
        exchange.template take<1>(1, local, 0, nothing, parts, is_there);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (r != rank && is_there(0, r)) {
                store(to + part * r + i, parts[0][r]);
            }
        }
    }
    exchange.close();
}
