// Barrier between the blocks of the same index on all ranks. The counters are in device memory, so
// that the barrier works in replayed graphs.
#pragma once

#include "memory.cuh"

// Signal pad of a rank, zeroed once at allocation. Peers write `flags` and `signal`. Only the owner
// writes the other fields.
struct SignalPad {
    // barriers[b]: number of barriers that block b has passed. exchanges[b]: number of packet
    // exchanges that block b has completed.
    u32 barriers[MAX_BLOCKS];
    u32 exchanges[MAX_BLOCKS];
    // flags[set][b][r]: number of the last barrier of that set at which block b of rank r has
    // arrived. The sets alternate, so a peer that is one barrier ahead does not write a line that
    // this rank still polls.
    u32 flags[2][MAX_BLOCKS][MAX_RANKS];
    // For the ping-pong: the peer's signal and the number of turns, each on its own cache line.
    u32 signal[32];
    u32 turns[32];
};
static_assert(sizeof(SignalPad) == 18688, "the harness allocates as much");

enum class Order {
    // Orders execution only. Publishes no data of this kernel.
    Relaxed,
    // Writes before the barrier are visible to the peers' blocks after it.
    Release,
};

// Barriers between a block and the blocks of the same index on the other ranks. Thread r of the
// block signals rank r and waits for rank r, so R stores and R polls are in flight concurrently. A
// barrier costs the one-way latency of a store plus half the latency of a poll.
//
// Who may overwrite what: at barrier e + 2, rank r overwrites the value that it wrote to
// flags[set][b][r] of a peer at barrier e. Rank r has then passed barrier e + 1, at which the peer
// arrives only after its wait at e has ended. That wait is the only reader. Values only grow. A
// wait for e ends as soon as the value is at least e, so a peer may be ahead.
//
// Barrier numbers (epochs) have 32 bits and are compared by their signed difference, so they may
// wrap around.
template <int R>
struct Barrier {
    const Peers<R> &pads;
    u32 rank;
    u32 epoch = 0;

    // Reads the counter in the threads that signal. This access to the L2 overlaps with other loads
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

    // Barrier before the first read of peers' inputs. Earlier kernels on the peers' streams have
    // written the inputs, and the end of a kernel makes its writes visible. This kernel has
    // published no writes so far, so no fence is needed (as in vLLM).
    __device__ __forceinline__ void start() {
        arrive_and_wait<Order::Relaxed>();
        __syncthreads();
    }

    // Barrier between two stages, after which the peers' blocks read the vectors that this block
    // wrote.
    __device__ __forceinline__ void middle() {
        __syncthreads();
        arrive_and_wait<Order::Release>();
        __syncthreads();
    }

    // Barrier at the end of the kernel. With Relaxed, the barrier waits until the peers have read
    // the inputs: __syncthreads follows the use of every loaded value, so the loads have completed.
    // With Release, the barrier also waits until the peers' writes that this rank's next kernel
    // reads are visible.
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
