// Emulates the parts of CUDA C++ that the baseline uses, with one host thread per GPU thread. The
// emulation checks algorithms. It does not measure time. memory.cuh includes this file, which uses
// the types of memory.cuh.
//
// Vectors are plain memory, so ThreadSanitizer detects accesses that no barrier orders. Flags and
// packets are sequentially consistent atomics, so a missing wait is detected, but a wait with too
// weak an order is not.
#pragma once

#include <array>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define SHARED_PARTIALS(NAME) auto &NAME = emulation::block->partial
#define SHARED_STATE(T, NAME) auto &NAME = emulation::shared_state<T>()

struct Index {
    u32 x;
};

inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

struct Warp {
    std::barrier<> gather{32};
    float values[32] = {};
    u32 words[32] = {};
};

// Shared state of the threads of a block.
struct Block {
    explicit Block(u32 threads) : gather(threads), warps(threads / 32) {}

    std::barrier<> gather;
    std::vector<Warp> warps;
    float partial[2][32] = {};
    alignas(16) unsigned char state[8192] = {};
};

inline thread_local Block *block;
inline thread_local u32 noise;

template <class T>
T &shared_state() {
    static_assert(sizeof(T) <= sizeof Block::state && std::is_trivial_v<T>);
    return *reinterpret_cast<T *>(block->state);
}

// Returns the values of all threads of the warp.
inline std::array<u32, 32> words_of_warp(u32 value) {
    Warp &warp = block->warps[threadIdx.x / 32];
    warp.words[threadIdx.x % 32] = value;
    warp.gather.arrive_and_wait();
    std::array<u32, 32> words;
    std::memcpy(words.data(), warp.words, sizeof warp.words);
    warp.gather.arrive_and_wait();
    return words;
}

// Delays a thread by a random time, sometimes for so long that other threads finish their launch.
inline void jitter() {
    noise = noise * 1664525 + 1013904223;
    if (noise >> 24 == 0) {
        const int turns = noise >> 22 == 0 ? 100 : 1;
        std::this_thread::sleep_for(std::chrono::microseconds(50 * turns));
    }
}

// Yields the core, or sleeps after many polls, because many threads poll on few cores.
inline void give_way(u32 polls) {
    if (polls < 64) {
        std::this_thread::yield();
    } else {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

} // namespace emulation

[[noreturn]] inline void __trap() {
    std::fprintf(stderr, "a wait without end\n");
    std::_Exit(3);
}

inline void __syncthreads() { emulation::block->gather.arrive_and_wait(); }

inline float __shfl_xor_sync(u32, float value, int offset) {
    emulation::Warp &warp = emulation::block->warps[threadIdx.x / 32];
    const u32 lane = threadIdx.x % 32;
    warp.values[lane] = value;
    warp.gather.arrive_and_wait();
    const float other = warp.values[lane ^ static_cast<u32>(offset)];
    warp.gather.arrive_and_wait();
    return other;
}

inline u32 __shfl_sync(u32, u32 value, u32 lane) { return emulation::words_of_warp(value)[lane]; }

inline u32 __match_any_sync(u32, u32 value) {
    u32 mask = 0, lane = 0;
    for (const u32 other : emulation::words_of_warp(value)) {
        mask |= static_cast<u32>(other == value) << lane++;
    }
    return mask;
}

inline void __syncwarp() { emulation::block->warps[threadIdx.x / 32].gather.arrive_and_wait(); }

inline int __ffs(u32 word) { return __builtin_ffs(static_cast<int>(word)); }

inline float __uint_as_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline u32 __float_as_uint(float value) {
    u32 bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }

inline Vector load(const Vector *from) {
    emulation::jitter();
    return *from;
}

inline void store(Vector *to, const Vector &value) {
    emulation::jitter();
    *to = value;
}

inline Unit load_unit(const Unit *from) {
    emulation::jitter();
    Unit value;
    for (int i = 0; i < 2; ++i) {
        value.pair[i] = std::atomic_ref(const_cast<u64 &>(from->pair[i])).load();
    }
    return value;
}

inline void store_unit(Unit *to, const Unit &value) {
    emulation::jitter();
    for (int i = 0; i < 2; ++i) {
        std::atomic_ref(to->pair[i]).store(value.pair[i]);
    }
}

inline u32 load_word(const u32 *from) { return *from; }
inline void store_word(u32 *to, u32 value) { *to = value; }
inline u32 load_relaxed(const u32 *from) {
    return std::atomic_ref(const_cast<u32 &>(*from)).load();
}
inline u32 load_acquire(const u32 *from) { return load_relaxed(from); }
inline void store_relaxed(u32 *to, u32 value) { std::atomic_ref(*to).store(value); }
inline void store_release(u32 *to, u32 value) { store_relaxed(to, value); }
inline u32 add_word(u32 *to, u32 value) { return std::atomic_ref(*to).fetch_add(value); }
inline u32 add_acq_rel(u32 *to, u32 value) { return add_word(to, value); }

// Rounds to nearest, ties to even, as the hardware does.
inline u32 bf16(float value) {
    const u32 bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline u32 bf16_pair(float low, float high) { return bf16(low) | bf16(high) << 16; }
