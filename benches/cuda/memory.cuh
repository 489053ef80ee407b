// All memory accesses of the kernels, with their scopes and orders. The algorithms access memory
// only through these functions, so that host threads can also run them (emulation/).
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;

// Maximum number of blocks per rank. `SignalPad` has one row of flags per block.
constexpr int MAX_BLOCKS = 256;
constexpr int MAX_RANKS = 8;
constexpr int MAX_THREADS = 512;

// Maximum number of polls of one wait, after which the kernel traps, so that a deadlock does not
// block the GPU. The limit takes about ten seconds. On host threads, which sleep between polls, it
// takes about a minute.
#ifdef __CUDACC__
#define POLLS (1u << 24)
#elif !defined POLLS
#define POLLS (1u << 19)
#endif
constexpr u32 MAX_POLLS = POLLS;

// 16 bytes, which one instruction can load or store.
struct alignas(16) Vector {
    u32 word[4];
};

// Packet unit: two pairs of 4 bytes of data and 4 bytes of flag. Each pair is one 8-byte access, so
// a reader that sees the flag also sees the data.
struct alignas(16) Unit {
    u64 pair[2];
};

// Addresses of the same object at every rank.
template <int R>
struct Peers {
    void *at[R];
};

#ifndef __CUDACC__

#include "emulation/device.hpp"

#else

// Loads data that each SM reads once or twice, and bypasses the L1. Does not use the non-coherent
// path, because peers write the data.
__device__ __forceinline__ Vector load(const Vector *from) {
    Vector value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]),
                   "=r"(value.word[3])
                 : "l"(from));
    return value;
}

__device__ __forceinline__ void store(Vector *to, const Vector &value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.word[0]),
                 "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
}

__device__ __forceinline__ Unit load_unit(const Unit *from) {
    Unit value;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(value.pair[0]), "=l"(value.pair[1])
                 : "l"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_unit(Unit *to, const Unit &value) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(value.pair[0]),
                 "l"(value.pair[1])
                 : "memory");
}

__device__ __forceinline__ u32 load_word(const u32 *from) {
    u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_word(u32 *to, u32 value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_relaxed(const u32 *from) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(u32 *to, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_acquire(const u32 *from) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u32 *to, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Adds to a counter that only this GPU accesses. Returns the old value. Orders no other access.
__device__ __forceinline__ u32 add_word(u32 *to, u32 value) {
    u32 old;
    asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(to), "r"(value) : "memory");
    return old;
}

// As add_word. Releases the earlier writes, and acquires those that earlier calls have released.
// The scope is the GPU, because only the rank's own blocks access the counter.
__device__ __forceinline__ u32 add_acq_rel(u32 *to, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(to), "r"(value)
                 : "memory");
    return old;
}

// Partial sums of the warps of a block, double-buffered.
#define SHARED_PARTIALS(NAME) __shared__ float NAME[2][32]

// A value of type T that the threads of a block share, not initialized.
#define SHARED_STATE(T, NAME) __shared__ T NAME

// Rounds two floats to bf16, to nearest with ties to even. `low` is in the low half of the result.
__device__ __forceinline__ u32 bf16_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif

// Counts the polls of one wait and traps at the limit.
struct Timeout {
    u32 polls = 0;

    __device__ __forceinline__ void count_poll() {
#ifndef __CUDACC__
        emulation::give_way(polls);
#endif
        if (++polls == MAX_POLLS) {
            __trap();
        }
    }
};

template <class T, int R>
__device__ __forceinline__ T *at(const Peers<R> &peers, u32 rank) {
    return static_cast<T *>(peers.at[rank]);
}
