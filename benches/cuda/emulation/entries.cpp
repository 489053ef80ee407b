// Table of the baseline's kernels for the fake CUDA driver (tests/cuda-fake). The driver calls a
// kernel once per block and passes the arguments in the layout of a launch's parameter buffer. A
// block always has 32 host threads, regardless of the launch configuration.

#include "../baseline.cu"

#include <tuple>
#include <utility>

namespace {

constexpr u32 THREADS = 32;

struct Field {
    u32 offset;
    u32 size;
};

template <class... Arguments>
struct Layout {
    static constexpr u32 COUNT = sizeof...(Arguments);
    Field fields[COUNT + 1] = {};

    constexpr Layout() {
        u32 end = 0, index = 0;
        const auto add = [&](u32 alignment, u32 size) {
            const u32 offset = (end + alignment - 1) / alignment * alignment;
            fields[index++] = {offset, size};
            end = offset + size;
        };
        (add(alignof(Arguments), sizeof(Arguments)), ...);
        (void)add;
    }
};

template <class... Arguments>
constexpr Layout<Arguments...> LAYOUT{};

template <auto KERNEL, class... Arguments, size_t... INDEX>
void call(u32 block, u32 blocks, const char *buffer, std::index_sequence<INDEX...>) {
    std::tuple<Arguments...> arguments;
    (std::memcpy(&std::get<INDEX>(arguments), buffer + LAYOUT<Arguments...>.fields[INDEX].offset,
                 sizeof(Arguments)),
     ...);
    (void)buffer;
    emulation::Block shared(THREADS);
    std::vector<std::thread> threads;
    for (u32 thread = 0; thread < THREADS; ++thread) {
        threads.emplace_back([&, thread] {
            threadIdx.x = thread;
            blockIdx.x = block;
            blockDim.x = THREADS;
            gridDim.x = blocks;
            emulation::block = &shared;
            // Each thread has its own sequence of delays.
            emulation::noise = (block * THREADS + thread) * 7919 +
                               static_cast<u32>(reinterpret_cast<size_t>(&shared));
            KERNEL(std::get<INDEX>(arguments)...);
        });
    }
    for (auto &thread : threads) {
        thread.join();
    }
}

} // namespace

struct Entry {
    const char *name;
    void (*run)(u32 block, u32 blocks, const char *buffer);
    const Field *fields;
    u32 count;
};

namespace {

template <auto KERNEL, class... Arguments>
Entry entry(const char *name, void (*)(Arguments...)) {
    return {name,
            [](u32 block, u32 blocks, const char *buffer) {
                call<KERNEL, Arguments...>(block, blocks, buffer,
                                           std::index_sequence_for<Arguments...>{});
            },
            LAYOUT<Arguments...>.fields, LAYOUT<Arguments...>.COUNT};
}

#define ENTRY_OF(NAME) entry<NAME>(#NAME, NAME)
#define OF_RANKS(T, R)                                                                             \
    ENTRY_OF(one_stage_##T##_##R), ENTRY_OF(two_stage_pull_##T##_##R),                             \
        ENTRY_OF(two_stage_push_##T##_##R), ENTRY_OF(packets_one_shot_##T##_##R),                  \
        ENTRY_OF(packets_two_shot_##T##_##R), OF_WIDTH(T, R, 1), OF_WIDTH(T, R, 2),                \
        OF_WIDTH(T, R, 4)
#define OF_WIDTH(T, R, V)                                                                          \
    ENTRY_OF(norm_by_barrier_##T##_##R##_##V), ENTRY_OF(norm_by_packets_##T##_##R##_##V)
#define OF_TYPE(T)                                                                                 \
    OF_RANKS(T, 2), OF_RANKS(T, 4), OF_RANKS(T, 8), ENTRY_OF(norm_alone_##T##_1),                  \
        ENTRY_OF(norm_alone_##T##_2), ENTRY_OF(norm_alone_##T##_4)
#define DISPATCHES_OF(T, TEAM, R)                                                                  \
    ENTRY_OF(moe_dispatch_##TEAM##_##T##_##R), ENTRY_OF(moe_dispatch_experts_##TEAM##_##T##_##R)
#define MOE_OF(R)                                                                                  \
    DISPATCHES_OF(bf16, block, R), DISPATCHES_OF(bf16, warp, R), DISPATCHES_OF(e4m3, block, R),    \
        DISPATCHES_OF(e4m3, warp, R), ENTRY_OF(moe_combine_pull_bf16_##R),                         \
        ENTRY_OF(moe_combine_push_bf16_##R)
#define BARRIERS(R) ENTRY_OF(barriers_relaxed_##R), ENTRY_OF(barriers_release_##R)

} // namespace

// Returns the list of kernels. The last entry has no name.
extern "C" const Entry *fusewire_cuda_fake_kernels() {
    static const Entry entries[] = {
        OF_TYPE(f32),
        OF_TYPE(bf16),
        MOE_OF(2),
        MOE_OF(4),
        MOE_OF(8),
        BARRIERS(2),
        BARRIERS(4),
        BARRIERS(8),
        ENTRY_OF(copy),
        ENTRY_OF(empty),
        ENTRY_OF(latch),
        ENTRY_OF(ping_pong_relaxed),
        ENTRY_OF(ping_pong_release),
        {nullptr, nullptr, nullptr, 0},
    };
    return entries;
}
