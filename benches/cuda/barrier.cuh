// Barrier between the blocks of the same index of all ranks, with counters that work in replayed
// graphs.
#pragma once

#include "memory.cuh"

// One per rank, zeroed once at allocation. Peers write the flags; only the owner writes the rest.
struct SignalPad {
    // Number of barriers that block b has passed, and of its packet exchanges.
    u32 barriers[MAX_BLOCKS];
    u32 exchanges[MAX_BLOCKS];
    // flags[set][b][r]: number of the last barrier of that set at which block b of rank r has
    // arrived. The sets alternate, so a peer that is one barrier ahead does not write a line that
    // is still polled here.
    u32 flags[2][MAX_BLOCKS][MAX_RANKS];
    // For the ping-pong: the peer's signal and the number of turns, each on a line of its own.
    u32 signal[32];
    u32 turns[32];
};
static_assert(sizeof(SignalPad) == 18688, "the harness allocates as much");

enum class Order {
    // Orders execution only; no data of this kernel is published.
    Relaxed,
    // Writes before the barrier are visible to the peers' blocks after it.
    Release,
};

// Barriers of a block with the blocks of the same index at the other ranks. Thread r of the block
// signals rank r and waits for rank r, so R stores and R polls are in flight at once. The cost is
// the one-way latency of a store and half a poll.
//
// Who may overwrite what: flags[set][b][r] of a rank is overwritten by rank r at its barrier e + 2,
//   after having acquired: its own barrier e + 1, which ends after this rank's arrival at e + 1,
//   released by: this rank, whose wait at e (the only reader) ended before it arrived at e + 1.
// Values only grow; a wait ends at "at least e", so a peer may be ahead.
//
// Epochs have 32 bits and are compared by their difference, so they may wrap.
template <int R>
struct Barrier {
    const Peers<R> &pads;
    u32 rank;
    u32 epoch = 0;

    // Reads the counter, in the threads that signal. The access to the L2 overlaps with other loads
    // at the start of the kernel.
    __device__ __forceinline__ Barrier(const Peers<R> &pads, u32 rank) : pads(pads), rank(rank) {
        if (threadIdx.x < R) {
            epoch = load_word(&at<SignalPad>(pads, rank)->barriers[blockIdx.x]);
        }
    }

    // Arrives and waits, without synchronizing the block before or after.
    template <Order ORDER>
    __device__ __forceinline__ void arrive_and_wait() {
        if (threadIdx.x < R) {
            ++epoch;
            const u32 set = epoch & 1;
            u32 *to = &at<SignalPad>(pads, threadIdx.x)->flags[set][blockIdx.x][rank];
            const u32 *from = &at<SignalPad>(pads, rank)->flags[set][blockIdx.x][threadIdx.x];
            Timeout timeout;
            if constexpr (ORDER == Order::Release) {
                store_release(to, epoch);
                while (static_cast<int>(load_acquire(from) - epoch) < 0) {
                    timeout.count_poll();
                }
            } else {
                store_relaxed(to, epoch);
                while (static_cast<int>(load_relaxed(from) - epoch) < 0) {
                    timeout.count_poll();
                }
            }
        }
    }

    // Waits before peers' inputs are read. Earlier kernels of the peers' streams have written
    // these, and the end of a kernel makes its writes visible. This kernel has published no writes,
    // so no fence is needed (as in vLLM).
    __device__ __forceinline__ void start() {
        arrive_and_wait<Order::Relaxed>();
        __syncthreads();
    }

    // Synchronizes two stages: peers' blocks read what the block wrote.
    __device__ __forceinline__ void middle() {
        __syncthreads();
        arrive_and_wait<Order::Release>();
        __syncthreads();
    }

    // Waits until the peers have read the inputs (Relaxed: __syncthreads follows the use of every
    // loaded value, so the loads have completed), or have also written what this rank's next kernel
    // reads (Release).
    template <Order ORDER>
    __device__ __forceinline__ void finish() {
        __syncthreads();
        arrive_and_wait<ORDER>();
        close();
    }

    // Stores the counter for the next launch.
    __device__ __forceinline__ void close() {
        if (threadIdx.x == 0) {
            store_word(&at<SignalPad>(pads, rank)->barriers[blockIdx.x], epoch);
        }
    }
};
