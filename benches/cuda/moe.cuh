// Dispatch and combine of a mixture of experts: a router has selected TOP_K experts for each token,
// and each rank holds `per_rank` experts. Two published designs:
// - rank-major: the one-sided all-to-all over NVLink of TensorRT-LLM and FlashInfer. Dispatch
//   pushes a token once to each rank that holds any of its experts, combine pulls the results.
// - expert-major: the result of DeepEP's low-latency kernels. A second phase of dispatch copies
//   each row to its experts, combine pushes the results to the tokens' ranks.
//
// n is the number of tokens of a rank, H the size of a token in bytes, D the number of ranks that a
// token is sent to, at most the smaller of R and TOP_K. A negative expert id is not sent.
//
// A rank makes one dispatch, then one combine, and so on. The dispatch increments the epoch, which
// is in device memory, so graphs can replay the kernels. Flags hold the epoch in which they were
// raised, so they are never reset.
#pragma once

#include "barrier.cuh"
#include "elements.cuh"

constexpr int TOP_K = 8;
constexpr int MAX_EXPERTS = 256;
constexpr u32 NONE = ~0u;

// A place is a rank (bits 24 to 31) and a row, or a selection, of that rank.
constexpr u32 PLACE_BITS = 24;
constexpr u32 PLACE_MASK = (1u << PLACE_BITS) - 1;

// What a rank sends along with a row: for each selection of the token, the expert (NONE if it is on
// another rank), the weight, and the index among the rank's selections of the expert; then the
// token.
constexpr int INFO_WEIGHTS = TOP_K;
constexpr int INFO_INDICES = 2 * TOP_K;
constexpr int INFO_TOKEN = 3 * TOP_K;
constexpr int INFO_WORDS = 3 * TOP_K + 4;

// Counters and flags of a rank, zeroed once at allocation.
struct MoePad {
    // Number of dispatches, and number of blocks of the current launch that have sent everything.
    u32 epoch;
    u32 done;
    u32 unused[30];
    // Number of rows sent to each rank, and number of selections of each expert, in this dispatch.
    u32 sends[32];
    u32 selected[MAX_EXPERTS];
    // Written by peers: the number of rows from each rank, and at [e * R + r] the number of
    // selections of this rank's expert e from rank r.
    u32 counts[32];
    u32 selections[MAX_EXPERTS];
    // Flags, written by peers: epoch of the last dispatch whose rows have arrived from each rank,
    // and epoch of the last combine for which the results of each rank can be read.
    u32 arrived[32];
    u32 combined[32];
};
static_assert(sizeof(MoePad) == 2688, "the harness allocates as much");

// Shared memory of a block.
struct MoeShared {
    // Of each row of a batch: its index in the source, and the places of its copies, or NONE.
    u32 sources[MAX_THREADS / 32];
    u32 places[MAX_THREADS / 32][TOP_K];
    // begin[r]: number of rows that have arrived from ranks before r.
    u32 begin[MAX_RANKS + 1];
    // first[e * R + r]: expert-major row of the first selection of expert e from rank r.
    u32 first[MAX_EXPERTS + 1];
    u32 partial[32];
    u32 is_last;
};

// Threads that copy a row together. With a block, few tokens use more threads. With a warp, many
// tokens need no block barriers.
enum class TeamKind { Block, Warp };

// A team processes batches of `rows` rows: each of its warps prepares one row, then all its threads
// copy the batch, so the latencies of the preparation overlap.
template <TeamKind KIND>
struct Team {
    u32 index, count, thread, threads, rows, warp;
    u32 *sources;
    u32 (*places)[TOP_K];

    __device__ __forceinline__ explicit Team(MoeShared &shared) {
        const u32 of_block = threadIdx.x / 32;
        if constexpr (KIND == TeamKind::Block) {
            index = blockIdx.x;
            count = gridDim.x;
            thread = threadIdx.x;
            threads = blockDim.x;
            rows = blockDim.x / 32;
            warp = of_block;
            sources = shared.sources;
            places = shared.places;
        } else {
            index = thread_of_grid() / 32;
            count = threads_of_grid() / 32;
            thread = threadIdx.x % 32;
            threads = 32;
            rows = 1;
            warp = 0;
            sources = shared.sources + of_block;
            places = shared.places + of_block;
        }
    }

    __device__ __forceinline__ void sync() const {
        if constexpr (KIND == TeamKind::Block) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }

    // Processes all rows below `end`. A full warp calls prepare(row, source, places), then all
    // threads of the team call copy(number of rows of the batch).
    template <class Prepare, class Copy>
    __device__ __forceinline__ void each_batch(u32 end, const Prepare &prepare,
                                               const Copy &copy) const {
        for (u32 first = index; first < end; first += count * rows) {
            const u32 own = first + warp * count;
            if (own < end) {
                prepare(own, sources[warp], places[warp]);
            }
            sync();
            copy(least((end - first + count - 1) / count, rows));
            sync();
        }
    }

    // Copies a batch of rows of `width` vectors. from(source) and to(place) return the first
    // vectors of a row.
    template <class From, class To>
    __device__ __forceinline__ void copy_rows(u32 batch, u32 width, const From &from,
                                              const To &to) const {
        sweep<4>(thread, batch * width, threads, [&](auto unrolled, u32 i) {
            constexpr int U = decltype(unrolled)::value;
            Vector values[U];
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const u32 at = i + u * threads;
                values[u] = load(from(sources[at / width]) + at % width);
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const u32 at = i + u * threads;
                store_copies(at / width, at % width, values[u], to);
            }
        });
    }

    // Stores a vector to column `column` of all copies of a row.
    template <class To>
    __device__ __forceinline__ void store_copies(u32 row, u32 column, const Vector &value,
                                                 const To &to) const {
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            const u32 place = places[row][k];
            if (place != NONE) {
                store(to(place) + column, value);
            }
        }
    }
};

// Payload of the rows in the type of the tokens, bf16.
struct PlainPayload {
    // Returns the size of a row in vectors, for tokens of `width` vectors.
    static __device__ __forceinline__ u32 stride(u32 width) { return width; }

    template <TeamKind KIND, class From, class To>
    static __device__ __forceinline__ void send(const Team<KIND> &team, u32 batch, u32 width,
                                                const From &from, const To &to) {
        team.copy_rows(batch, width, from, to);
    }
};

// Payload in fp8 E4M3, followed by an f32 scale for each 128 channels. With `a` the largest
// magnitude of the channels, at least 1e-4, the scale is a / 448, and an element is x * (448 / a).
// `width` is a multiple of 16, as 8 threads process 128 channels.
struct Fp8Payload {
    static __device__ __forceinline__ u32 stride(u32 width) {
        return width / 2 + (width + 63) / 64;
    }

    template <TeamKind KIND, class From, class To>
    static __device__ __forceinline__ void send(const Team<KIND> &team, u32 batch, u32 width,
                                                const From &from, const To &to) {
        constexpr int U = 2;
        const u32 columns = width / 2;
        const u32 end = batch * columns;
        // The bound is equal for all threads of a warp, which the shuffles need.
        for (u32 base = 0; base < end; base += U * team.threads) {
            Vector values[U][2];
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const u32 at = base + u * team.threads + team.thread;
                const u32 i = at < end ? at : 0;
                const Vector *row = from(team.sources[i / columns]) + i % columns * 2;
                values[u][0] = load(row);
                values[u][1] = load(row + 1);
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const u32 at = base + u * team.threads + team.thread;
                float scale;
                const Vector packed = quantize(values[u], scale);
                if (at >= end) {
                    continue;
                }
                const u32 row = at / columns, column = at % columns;
                team.store_copies(row, column, packed, to);
                if (column % 8 == 0) {
                    for (int k = 0; k < TOP_K; ++k) {
                        const u32 place = team.places[row][k];
                        if (place != NONE) {
                            u32 *scales = reinterpret_cast<u32 *>(to(place) + columns);
                            store_word(scales + column / 8, __float_as_uint(scale));
                        }
                    }
                }
            }
        }
    }

    // Converts 16 channels. Groups of 8 lanes share the scale.
    static __device__ __forceinline__ Vector quantize(const Vector (&from)[2], float &scale) {
        float values[2][Bf16::LANES];
        float largest = 1e-4f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Bf16::unpack(from[half], values[half]);
#pragma unroll
            for (int i = 0; i < Bf16::LANES; ++i) {
                largest = fmaxf(largest, fabsf(values[half][i]));
            }
        }
#pragma unroll
        for (int offset = 4; offset > 0; offset /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
        }
        scale = __fdiv_rn(largest, 448.0f);
        const float factor = __fdiv_rn(448.0f, largest);
        Vector packed;
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            const float *four = values[word / 2] + word % 2 * 4;
            packed.word[word] = e4m3_pair(four[0] * factor, four[1] * factor) |
                                e4m3_pair(four[2] * factor, four[3] * factor) << 16;
        }
        return packed;
    }
};

// Tokens of a rank, and what the rank's next combine needs of them.
struct Tokens {
    const void *x;
    const void *experts;
    const void *weights;
    // slots[token][k]: the place of the row that contains selection k, or NONE.
    void *slots;
    u32 count;
    // Maximum number of tokens of any rank.
    u32 capacity;
    // Vectors per token.
    u32 width;
};

// Rows of a rank in expert-major order.
struct ExpertRows {
    void *rows;
    // First row of each expert, and the number of rows; [per_rank + 1].
    void *offsets;
    // Of each row: the rank and the selection (token * TOP_K + k) that it is for, and the weight.
    void *origins;
    void *weights;
};

// Returns true in the last block of the launch that calls this. The earlier writes of all blocks
// are then covered by this block's releases.
__device__ __forceinline__ bool is_last_block(MoeShared &shared, u32 *done) {
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.is_last = add_acq_rel(done, 1) == gridDim.x - 1;
        if (shared.is_last) {
            store_word(done, 0);
        }
    }
    __syncthreads();
    return shared.is_last;
}

// Waits until flag r has the value `epoch`, for each rank r. The threads below R call this.
template <Order ORDER>
__device__ __forceinline__ void wait_for_flag(const u32 *flags, u32 epoch) {
    const u32 *flag = flags + threadIdx.x;
    const auto poll = [&] {
        return ORDER == Order::Release ? load_acquire(flag) : load_relaxed(flag);
    };
    Timeout timeout;
    while (static_cast<int>(poll() - epoch) < 0) {
        timeout.count_poll();
    }
}

// Sends all tokens, and waits in the last block (EXPERTS: in all blocks) for the rows of all ranks.
template <class PAYLOAD, TeamKind KIND, bool EXPERTS, int R>
__device__ __forceinline__ void send_tokens(MoeShared &shared, const Peers<R> &pads,
                                            const Peers<R> &rows, const Peers<R> &infos,
                                            const Tokens &tokens, u32 per_rank, u32 rank) {
    MoePad *pad = at<MoePad>(pads, rank);
    u32 epoch = 0;
    if (threadIdx.x < R) {
        epoch = load_word(&pad->epoch) + 1;
    }
    const u32 lane = threadIdx.x % 32;
    const u32 stride = PAYLOAD::stride(tokens.width);
    const u32 region = rank * tokens.capacity;
    const u32 *experts = static_cast<const u32 *>(tokens.experts);
    const u32 *weights = static_cast<const u32 *>(tokens.weights);
    u32 *slots = static_cast<u32 *>(tokens.slots);
    const auto prepare = [&](u32 token, u32 &source, u32 (&places)[TOP_K]) {
        u32 expert = NONE, weight = 0;
        if (lane < TOP_K) {
            expert = load_word(experts + token * TOP_K + lane);
            weight = load_word(weights + token * TOP_K + lane);
        }
        const u32 target = expert < R * per_rank ? expert / per_rank : NONE;
        const u32 first = __ffs(__match_any_sync(~0u, target)) - 1;
        u32 slot = 0, index = 0;
        if (target != NONE) {
            if (lane == first) {
                slot = add_word(&pad->sends[target], 1);
            }
            if constexpr (EXPERTS) {
                index = add_word(&pad->selected[expert], 1);
            }
        }
        slot = __shfl_sync(~0u, slot, first);
        const u32 place = target == NONE ? NONE : target << PLACE_BITS | slot;
        // Only the first of a rank's selections sends the row.
        const u32 sent = lane == first ? place : NONE;
        if (lane < TOP_K) {
            store_word(slots + token * TOP_K + lane, place);
            places[lane] = sent;
        }
        if (lane == 0) {
            source = token;
        }
        for (int k = 0; k < TOP_K; ++k) {
            const u32 to = __shfl_sync(~0u, sent, k);
            if (to == NONE) {
                continue;
            }
            const u32 peer = to >> PLACE_BITS;
            u32 *info = at<u32>(infos, peer) + (region + (to & PLACE_MASK)) * INFO_WORDS;
            if (lane < TOP_K) {
                store_word(info + lane, target == peer ? expert - peer * per_rank : NONE);
                store_word(info + INFO_WEIGHTS + lane, weight);
                store_word(info + INFO_INDICES + lane, index);
            } else if (lane == TOP_K) {
                store_word(info + INFO_TOKEN, token);
            }
        }
    };
    const Team<KIND> team(shared);
    team.each_batch(tokens.count, prepare, [&](u32 batch) {
        PAYLOAD::send(
            team, batch, tokens.width,
            [&](u32 token) {
                return static_cast<const Vector *>(tokens.x) +
                       static_cast<u64>(token) * tokens.width;
            },
            [&](u32 place) {
                return at<Vector>(rows, place >> PLACE_BITS) +
                       static_cast<u64>(region + (place & PLACE_MASK)) * stride;
            });
    });
    const bool is_last = is_last_block(shared, &pad->done);
    if (is_last) {
        if constexpr (EXPERTS) {
            for (u32 e = threadIdx.x; e < R * per_rank; e += blockDim.x) {
                MoePad *peer = at<MoePad>(pads, e / per_rank);
                store_word(&peer->selections[e % per_rank * R + rank],
                           load_word(&pad->selected[e]));
                store_word(&pad->selected[e], 0);
            }
        }
        if (threadIdx.x < R) {
            store_word(&at<MoePad>(pads, threadIdx.x)->counts[rank],
                       load_word(&pad->sends[threadIdx.x]));
            store_word(&pad->sends[threadIdx.x], 0);
        }
        if (threadIdx.x == 0) {
            store_word(&pad->epoch, epoch);
        }
        __syncthreads();
        if (threadIdx.x < R) {
            store_release(&at<MoePad>(pads, threadIdx.x)->arrived[rank], epoch);
        }
    }
    if ((EXPERTS || is_last) && threadIdx.x < R) {
        wait_for_flag<Order::Release>(pad->arrived, epoch);
    }
}

// Dispatch in rank-major order. Each token is read once and pushed to the region of this rank at
// each target rank, [rank][slot]. The slot is taken from a counter per target rank, so the order of
// the rows differs between launches. The last block to finish sends the numbers of rows and raises
// a flag at every rank, then waits for the flags of all ranks. All other blocks end early.
//
// Traffic per rank: reads n H, writes n D H to the ranks, and 112 bytes for each row. Few tokens
// are bound by the latencies of the ids, the slot, the row, the counter of blocks and the flag.
// Many tokens are bound by the links or, on one GPU, by memory.
//
// Who may overwrite what:
// - A rank overwrites its rows, infos and counts of dispatch n at a peer in dispatch n + 1. It has
//   then waited for the peer's flag `combined` n in a combine, which the peer raises after it has
//   used the rows (stream order in rank-major order, the last block's counter in expert-major
//   order).
// - The rank's own counters are reset by the last block, after all blocks have used them. The
//   epoch is stored by the last block, after all blocks have read it.
template <class PAYLOAD, TeamKind KIND, int R>
__device__ __forceinline__ void moe_dispatch(const Peers<R> &pads, const Peers<R> &rows,
                                             const Peers<R> &infos, const Tokens &tokens,
                                             u32 per_rank, u32 rank) {
    SHARED_STATE(MoeShared, shared);
    send_tokens<PAYLOAD, KIND, false, R>(shared, pads, rows, infos, tokens, per_rank, rank);
}

// Dispatch in expert-major order: as moe_dispatch, then copies each row to the experts of its
// selections. Senders count the selections of each expert, and send each selection's index, so
// receivers compute all positions without further atomics. (DeepEP sends a row for each selection,
// and copies it once.)
//
// Traffic per rank: that of moe_dispatch; then reads n D H and writes n TOP_K H, in local memory,
// for equal numbers of selections of all ranks. All blocks wait for the flags, so the blocks of all
// ranks must be resident at the same time.
//
// Who may overwrite what: as in moe_dispatch. Only the rank itself accesses the copies.
template <class PAYLOAD, TeamKind KIND, int R>
__device__ __forceinline__ void moe_dispatch_experts(const Peers<R> &pads, const Peers<R> &rows,
                                                     const Peers<R> &infos, const Tokens &tokens,
                                                     const ExpertRows &out, u32 per_rank,
                                                     u32 rank) {
    SHARED_STATE(MoeShared, shared);
    send_tokens<PAYLOAD, KIND, true, R>(shared, pads, rows, infos, tokens, per_rank, rank);
    __syncthreads();
    const MoePad *pad = at<MoePad>(pads, rank);
    const u32 lane = threadIdx.x % 32;
    const u32 entries = per_rank * R;
    if (threadIdx.x < 32) {
        // Each lane adds consecutive entries, then the sums of the lanes before it.
        const u32 each = (entries + 31) / 32;
        const u32 begin = least(lane * each, entries), end = least(begin + each, entries);
        u32 total = 0;
        for (u32 i = begin; i < end; ++i) {
            total += load_word(&pad->selections[i]);
        }
        shared.partial[lane] = total;
        const u32 count = lane < R ? load_word(&pad->counts[lane]) : 0;
        u32 arrived = 0;
        for (int r = 0; r < R; ++r) {
            if (lane == 0) {
                shared.begin[r] = arrived;
            }
            arrived += __shfl_sync(~0u, count, r);
        }
        __syncwarp();
        u32 next = 0;
        for (u32 other = 0; other < lane; ++other) {
            next += shared.partial[other];
        }
        for (u32 i = begin; i < end; ++i) {
            shared.first[i] = next;
            next += load_word(&pad->selections[i]);
        }
        if (lane == 31) {
            shared.begin[R] = arrived;
            shared.first[entries] = next;
        }
    }
    __syncthreads();
    if (blockIdx.x == 0) {
        for (u32 e = threadIdx.x; e <= per_rank; e += blockDim.x) {
            store_word(static_cast<u32 *>(out.offsets) + e, shared.first[e * R]);
        }
    }
    const u32 stride = PAYLOAD::stride(tokens.width);
    const Vector *arrived = at<const Vector>(rows, rank);
    const auto prepare = [&](u32 row, u32 &source, u32 (&places)[TOP_K]) {
        u32 from = 0;
        for (int r = 1; r < R; ++r) {
            from += row >= shared.begin[r];
        }
        const u32 local = from * tokens.capacity + row - shared.begin[from];
        const u32 *info = at<const u32>(infos, rank) + local * INFO_WORDS;
        if (lane < TOP_K) {
            const u32 expert = load_word(info + lane);
            const u32 weight = load_word(info + INFO_WEIGHTS + lane);
            const u32 index = load_word(info + INFO_INDICES + lane);
            const u32 selection = load_word(info + INFO_TOKEN) * TOP_K + lane;
            u32 place = NONE;
            if (expert != NONE) {
                place = shared.first[expert * R + from] + index;
                store_word(static_cast<u32 *>(out.origins) + place,
                           from << PLACE_BITS | selection);
                store_word(static_cast<u32 *>(out.weights) + place, weight);
            }
            places[lane] = place;
        } else if (lane == TOP_K) {
            source = local;
        }
    };
    const Team<KIND> team(shared);
    team.each_batch(shared.begin[R], prepare, [&](u32 batch) {
        team.copy_rows(
            batch, stride,
            [&](u32 local) { return arrived + static_cast<u64>(local) * stride; },
            [&](u32 place) {
                return static_cast<Vector *>(out.rows) + static_cast<u64>(place) * stride;
            });
    });
}

// Slots and weights of a token's selections.
struct Selections {
    Vector slots[TOP_K / 4];
    Vector weights[TOP_K / 4];

    __device__ __forceinline__ Selections(const void *slots_, const void *weights_, u32 token) {
#pragma unroll
        for (int i = 0; i < TOP_K / 4; ++i) {
            const u32 at = token * (TOP_K / 4) + i;
            slots[i] = load(static_cast<const Vector *>(slots_) + at);
            weights[i] = load(static_cast<const Vector *>(weights_) + at);
        }
    }

    __device__ __forceinline__ u32 slot(int k) const { return slots[k / 4].word[k % 4]; }

    // Returns 0 + weight * result + weight * result .., in the order of the selections that were
    // sent. Products and sums are rounded to f32, and the sum is rounded to bf16.
    __device__ __forceinline__ Vector sum(const Vector (&results)[TOP_K]) const {
        float total[Bf16::LANES] = {};
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            const float weight = __uint_as_float(weights[k / 4].word[k % 4]);
            float result[Bf16::LANES];
            Bf16::unpack(results[k], result);
#pragma unroll
            for (int i = 0; i < Bf16::LANES; ++i) {
                if (slot(k) != NONE) {
                    total[i] = __fadd_rn(total[i], __fmul_rn(weight, result[i]));
                }
            }
        }
        return Bf16::pack(total);
    }
};

// Adds the results of all tokens. from(slot, k, token) returns the first vector of a result.
template <class Ready, class From>
__device__ __forceinline__ void sum_results(const void *slots, const void *weights, void *output,
                                            u32 tokens, u32 width, const Ready &ready,
                                            const From &from) {
    const u32 end = tokens * width;
    u32 i = thread_of_grid();
    // These loads overlap with the wait.
    Selections selections(slots, weights, i < end ? i / width : 0);
    ready();
    for (; i < end; i += threads_of_grid()) {
        const u32 token = i / width;
        if (i != thread_of_grid()) {
            selections = Selections(slots, weights, token);
        }
        Vector results[TOP_K];
#pragma unroll
        for (int k = 0; k < TOP_K; ++k) {
            const u32 slot = selections.slot(k);
            results[k] = slot == NONE ? Vector{} : load(from(slot, k, token) + i % width);
        }
        store(static_cast<Vector *>(output) + i, selections.sum(results));
    }
}

// Combine for rank-major order, by pull. `results` has TOP_K results for each row of a rank, at
// [(row * TOP_K + k)], in memory that peers can read. Block 0 raises a flag at every rank, all
// blocks wait for the flags of all ranks, then read the results and add them. (TensorRT-LLM's
// experts add the results of a rank, so that D rows are pulled.)
//
// Traffic per rank: reads n TOP_K H, of which the parts of other ranks over the links, and writes
// n H. Few tokens are bound by the flag and one read, many tokens by the links or, on one GPU, by
// memory. The blocks of all ranks must be resident at the same time.
//
// Who may overwrite what:
// - The rank's next computation may overwrite its results after its next dispatch. In that
//   dispatch it waits for all ranks, which have then ended this combine (stream order).
// - A rank overwrites its flag at a peer in the next combine, which needs the peer's next dispatch,
//   which follows the peer's wait for the flag. Values only grow.
template <int R>
__device__ __forceinline__ void moe_combine_pull(const Peers<R> &pads, const Peers<R> &results,
                                                 const void *weights, const void *slots,
                                                 void *output, u32 tokens, u32 capacity, u32 width,
                                                 u32 rank) {
    const MoePad *pad = at<MoePad>(pads, rank);
    const u32 epoch = load_word(&pad->epoch);
    const u32 region = rank * capacity;
    sum_results(
        slots, weights, output, tokens, width,
        [&] {
            if (threadIdx.x < R) {
                if (blockIdx.x == 0) {
                    // The end of an earlier kernel has made the results visible (as in vLLM).
                    store_relaxed(&at<MoePad>(pads, threadIdx.x)->combined[rank], epoch);
                }
                wait_for_flag<Order::Relaxed>(pad->combined, epoch);
            }
            __syncthreads();
        },
        [&](u32 slot, int k, u32) {
            const u32 row = (region + (slot & PLACE_MASK)) * TOP_K + k;
            return at<const Vector>(results, slot >> PLACE_BITS) + static_cast<u64>(row) * width;
        });
}

// Combine for expert-major order, by push, as in DeepEP's low-latency kernels. `y` has one result
// for each expert-major row. It is written to [token * TOP_K + k] of `results` at the token's rank.
// The last block to finish raises a flag at every rank. All blocks wait for the flags of all ranks,
// then add the results. The blocks of all ranks must be resident at the same time.
//
// Traffic per rank, for equal numbers of selections of all ranks: reads n TOP_K H and writes
// n TOP_K H to the ranks; then reads n TOP_K H and writes n H, in local memory. Few tokens are
// bound by the latencies of the row's origin, the counter of blocks and the flag, many tokens by
// the links or, on one GPU, by memory.
//
// Who may overwrite what:
// - A rank overwrites its results of this combine at a peer in the next combine. It has then
//   waited for the peer's flag of the dispatch between them, which the peer raises after this
//   combine has ended (stream order).
// - The flags: as in moe_combine_pull.
template <int R>
__device__ __forceinline__ void moe_combine_push(const Peers<R> &pads, const Peers<R> &results,
                                                 const void *y, const void *offsets,
                                                 const void *origins, const void *weights,
                                                 const void *slots, void *output, u32 tokens,
                                                 u32 width, u32 per_rank, u32 rank) {
    SHARED_STATE(MoeShared, shared);
    MoePad *pad = at<MoePad>(pads, rank);
    const u32 epoch = load_word(&pad->epoch);
    const u32 rows = load_word(static_cast<const u32 *>(offsets) + per_rank);
    const u32 stride = threads_of_grid();
    sweep<4>(thread_of_grid(), rows * width, stride, [&](auto unrolled, u32 i) {
        constexpr int U = decltype(unrolled)::value;
        Vector values[U];
        u32 origin[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            values[u] = load(static_cast<const Vector *>(y) + i + u * stride);
            origin[u] = load_word(static_cast<const u32 *>(origins) + (i + u * stride) / width);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            store(at<Vector>(results, origin[u] >> PLACE_BITS) +
                      static_cast<u64>(origin[u] & PLACE_MASK) * width + (i + u * stride) % width,
                  values[u]);
        }
    });
    sum_results(
        slots, weights, output, tokens, width,
        [&] {
            const bool is_last = is_last_block(shared, &pad->done);
            if (threadIdx.x < R) {
                if (is_last) {
                    store_release(&at<MoePad>(pads, threadIdx.x)->combined[rank], epoch);
                }
                wait_for_flag<Order::Release>(pad->combined, epoch);
            }
            __syncthreads();
        },
        [&](u32, int k, u32 token) {
            return at<const Vector>(results, rank) +
                   static_cast<u64>(token * TOP_K + k) * width;
        });
}
