// The barrier between block b of every rank, and the counters that make it work in a replayed graph.
#pragma once

#include "memory.cuh"

// One for each rank, zeroed when it is allocated, never again. Flags are written by peers, the rest by the owner alone.
struct SignalPad {
    // How many barriers block b has passed, and how many times it has exchanged packets.
    u32 barriers[MAX_BLOCKS];
    u32 exchanges[MAX_BLOCKS];
    // flags[set][b][r]: the last barrier of that set at which block b of rank r arrived. The sets alternate, so a peer that is
    // one barrier ahead writes no line that is still polled here.
    u32 flags[2][MAX_BLOCKS][MAX_RANKS];
    // The ping-pong: what the peer has signalled, and how many turns have been. Each has a line of its own.
    u32 signal[32];
    u32 turns[32];
};
static_assert(sizeof(SignalPad) == 18688, "the harness allocates as much");

enum class Order {
    // Execution only: no data of this kernel is handed over.
    Relaxed,
    // What the blocks wrote before is seen by the others' blocks behind it.
    Release,
};

// Barriers of a block with the blocks of the same number at the other ranks. Thread r of the block signals rank r and waits
// for rank r, so R stores and R polls are in flight at once: the cost is one way of a store, and half a poll.
//
// Who may overwrite what: flags[set][b][r] of a rank is overwritten by rank r at its barrier e + 2,
//   after having acquired: its own barrier e + 1, which ends after this rank's arrival at e + 1,
//   released by: this rank, whose wait at e (the only reader) ended before it arrived at e + 1.
// Values only grow, so a wait ends at "at least e" and also survives a peer that is ahead.
//
// Epochs are 32 bits and compared by their difference, so they may wrap.
template <int R>
struct Barrier {
    const Peers<R> &pads;
    u32 rank;
    u32 epoch = 0;

    // Reads the counter; only the threads that signal need it. It costs one access of the L2, in the shadow of
    // whatever is loaded beside it.
    __device__ __forceinline__ Barrier(const Peers<R> &pads, u32 rank) : pads(pads), rank(rank) {
        if (threadIdx.x < R) {
            epoch = load_word(&at<SignalPad>(pads, rank)->barriers[blockIdx.x]);
        }
    }

    // Arrives and waits, without gathering the block before or behind.
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

    // Before peers' inputs are read. Those were written by earlier kernels of the peers' streams, and the end of a kernel
    // makes its writes visible; nothing that this kernel wrote is handed over, so no fence is paid. (As vLLM does.)
    __device__ __forceinline__ void start() {
        arrive_and_wait<Order::Relaxed>();
        __syncthreads();
    }

    // Between two stages: what the block wrote is read by the others' blocks.
    __device__ __forceinline__ void middle() {
        __syncthreads();
        arrive_and_wait<Order::Release>();
        __syncthreads();
    }

    // At the end: the peers have read what they wanted (Relaxed: every load has returned before the block gathers, as what was
    // made of it has been stored), or have also written what this rank's next kernel reads (Release).
    template <Order ORDER>
    __device__ __forceinline__ void finish() {
        __syncthreads();
        arrive_and_wait<ORDER>();
        close();
    }

    // The last act: the counter for the next launch.
    __device__ __forceinline__ void close() {
        if (threadIdx.x == 0) {
            store_word(&at<SignalPad>(pads, rank)->barriers[blockIdx.x], epoch);
        }
    }
};
