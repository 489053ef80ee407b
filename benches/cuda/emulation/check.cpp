// Runs the baseline's kernels with one host thread per GPU thread, in several launches of different
// sizes, and compares every element. An argument selects one kernel. Exit status: 0 if all elements
// are correct, 1 for a wrong element, 2 for an unknown kernel, 3 for a wait that does not end. If
// ThreadSanitizer is compiled in and reports an error, the exit status is ThreadSanitizer's.

#include "../all_reduce.cuh"
#include "../fused.cuh"
#include "../moe.cuh"
#include "../packets.cuh"
#include "../costs.cuh"

#include <functional>
#include <set>
#include <tuple>

constexpr u32 THREADS = 32;

namespace {

constexpr u32 BLOCKS = 2;
constexpr int LAUNCHES = 10;
// Numbers of vectors per launch. Some are smaller than the number of ranks, some are not a multiple
// of the number of ranks, and some give a thread more than one vector.
constexpr u32 SIZES[] = {1, 64, 3, 200, 517, 65, 7, 1000, 2, 320};
constexpr u32 MOST = 1000;
// Numbers of rows of the norms, and the largest of these numbers.
constexpr u32 ROWS[] = {1, 4, 2, 7, 3};
constexpr u32 MOST_ROWS = 7;

std::atomic<u64> wrong_elements;
const char *chosen = nullptr;
int checked = 0;

bool is_chosen(const char *name) {
    const bool is = chosen == nullptr || std::strcmp(chosen, name) == 0;
    checked += is;
    return is;
}

// Returns small integers, whose sums are also exact in bf16.
int element(u32 rank, u32 index, int launch) {
    return static_cast<int>((rank * 7 + index * 13 + static_cast<u32>(launch) * 5) % 31) - 15;
}

template <class T>
Vector vector_of(const std::function<float(u32)> &value, u32 index) {
    float values[T::LANES];
    for (u32 i = 0; i < T::LANES; ++i) {
        values[i] = value(index * T::LANES + i);
    }
    return T::pack(values);
}

void compare(const char *name, int launch, u32 rank, u32 index, const Vector &got,
             const Vector &expected) {
    if (std::memcmp(&got, &expected, sizeof got) != 0 && ++wrong_elements <= 10) {
        std::fprintf(stderr, "%s, launch %d, rank %u, vector %u: %08x.. where %08x.. is right\n",
                     name, launch, rank, index, got.word[0], expected.word[0]);
    }
}

// Zeroed memory with `count` elements on each of R ranks.
template <class E, int R>
struct Memory {
    explicit Memory(size_t count) {
        for (int r = 0; r < R; ++r) {
            ranks[r].resize(count);
            peers.at[r] = ranks[r].data();
        }
    }

    std::vector<E> ranks[R];
    Peers<R> peers;
};

// Runs `body(rank, launch, gather)` on every thread of the grids of R ranks. `gather` is a barrier
// between the threads of one rank and stands for the end of a kernel.
template <int R, u32 THREADS = ::THREADS>
void run(int launches, const std::function<void(u32, int, const std::function<void()> &)> &body) {
    std::vector<std::thread> threads;
    std::vector<std::unique_ptr<std::barrier<>>> streams;
    std::vector<std::unique_ptr<emulation::Block>> blocks;
    for (u32 rank = 0; rank < R; ++rank) {
        streams.push_back(std::make_unique<std::barrier<>>(BLOCKS * THREADS));
        for (u32 b = 0; b < BLOCKS; ++b) {
            blocks.push_back(std::make_unique<emulation::Block>(THREADS));
            for (u32 t = 0; t < THREADS; ++t) {
                threads.emplace_back(
                    [&, rank, b, t, stream = streams.back().get(), block = blocks.back().get()] {
                        threadIdx.x = t;
                        blockIdx.x = b;
                        blockDim.x = THREADS;
                        gridDim.x = BLOCKS;
                        emulation::block = block;
                        emulation::noise = (rank * BLOCKS + b) * THREADS + t;
                        for (int launch = 0; launch < launches; ++launch) {
                            body(rank, launch, [&] { stream->arrive_and_wait(); });
                        }
                    });
            }
        }
    }
    for (auto &thread : threads) {
        thread.join();
    }
}

enum class Way { OneStage, Pull, Push, OneShot, TwoShot };

template <class T, int R>
void check_all_reduce(const char *name, Way way) {
    if (!is_chosen(name)) {
        return;
    }
    const u32 capacity = (MOST / BLOCKS + GROUP + THREADS) / GROUP * GROUP;
    Memory<Vector, R> inputs(MOST), outputs(MOST), scratches(MOST);
    Memory<SignalPad, R> pads(1);
    Memory<Unit, R> buffers(BLOCKS * 2 * 2 * R * PLANES * capacity);
    run<R>(LAUNCHES, [&](u32 rank, int launch, const std::function<void()> &gather) {
        const u32 vectors = SIZES[launch];
        const u32 first = thread_of_grid(), stride = threads_of_grid();
        // This loop stands for the previous kernel on the stream.
        for (u32 i = first; i < vectors; i += stride) {
            inputs.ranks[rank][i] = vector_of<T>(
                [&](u32 at) { return static_cast<float>(element(rank, at, launch)); }, i);
            outputs.ranks[rank][i] = Vector{{~0u, ~0u, ~0u, ~0u}};
        }
        gather();
        void *output = outputs.peers.at[rank];
        const void *input = inputs.peers.at[rank];
        switch (way) {
        case Way::OneStage:
            one_stage<T, R>(inputs.peers, pads.peers, output, vectors, rank);
            break;
        case Way::Pull:
            two_stage_pull<T, R>(inputs.peers, pads.peers, scratches.peers, output, vectors, rank);
            break;
        case Way::Push:
            two_stage_push<T, R>(inputs.peers, pads.peers, outputs.peers, vectors, rank);
            break;
        case Way::OneShot:
            packets_one_shot<T, R>(input, pads.peers, buffers.peers, output, vectors, rank,
                                   capacity);
            break;
        case Way::TwoShot:
            packets_two_shot<T, R>(input, pads.peers, buffers.peers, output, vectors, rank,
                                   capacity);
            break;
        }
        gather();
        // This loop stands for the next kernel on the stream.
        for (u32 i = first; i < vectors; i += stride) {
            const auto total = [&](u32 at) {
                int all = 0;
                for (u32 r = 0; r < R; ++r) {
                    all += element(r, at, launch);
                }
                return static_cast<float>(all);
            };
            compare(name, launch, rank, i, outputs.ranks[rank][i], vector_of<T>(total, i));
        }
    });
}

enum class Norms { Barrier, Packets, Alone };

template <class T, int R, int V>
void check_norm(const char *name, Norms way) {
    if (!is_chosen(name)) {
        return;
    }
    const u32 width = V * THREADS - 5;
    const u32 capacity = ((MOST_ROWS + BLOCKS - 1) / BLOCKS * width + GROUP - 1) / GROUP * GROUP;
    const float epsilon = 0.5f;
    Memory<Vector, R> inputs(MOST_ROWS * width), outputs(MOST_ROWS * width),
        residual_outs(MOST_ROWS * width);
    Memory<Vector, R> residuals(MOST_ROWS * width), weights(width);
    Memory<SignalPad, R> pads(1);
    Memory<Unit, R> buffers(BLOCKS * 2 * R * PLANES * capacity);
    const auto residual = [](u32 at) { return static_cast<float>(element(9, at, 1)); };
    const auto weight = [](u32 at) { return static_cast<float>(at % 3 + 1); };
    for (u32 r = 0; r < R; ++r) {
        for (u32 i = 0; i < MOST_ROWS * width; ++i) {
            residuals.ranks[r][i] = vector_of<T>(residual, i);
        }
        for (u32 i = 0; i < width; ++i) {
            weights.ranks[r][i] = vector_of<T>(weight, i);
        }
    }
    run<R>(5, [&](u32 rank, int launch, const std::function<void()> &gather) {
        const u32 rows = ROWS[launch];
        const u32 first = thread_of_grid(), stride = threads_of_grid();
        for (u32 i = first; i < rows * width; i += stride) {
            inputs.ranks[rank][i] = vector_of<T>(
                [&](u32 at) { return static_cast<float>(element(rank, at, launch)); }, i);
        }
        gather();
        const Norm norm = {residuals.peers.at[rank],
                           weights.peers.at[rank],
                           residual_outs.peers.at[rank],
                           outputs.peers.at[rank],
                           rows,
                           width,
                           epsilon};
        switch (way) {
        case Norms::Barrier:
            norm_by_barrier<T, R, V>(inputs.peers, pads.peers, norm, rank);
            break;
        case Norms::Packets:
            norm_by_packets<T, R, V>(inputs.peers.at[rank], pads.peers, buffers.peers, norm, rank,
                                     capacity);
            break;
        case Norms::Alone:
            norm_alone<T, V>(inputs.peers.at[rank], norm);
            break;
        }
        gather();
        const auto added = [&](u32 at) {
            int all = element(9, at, 1);
            for (u32 r = 0; r < R; ++r) {
                all += way == Norms::Alone && r != rank ? 0 : element(r, at, launch);
            }
            return static_cast<float>(all);
        };
        // One row per thread. Threads without a row skip the loop.
        for (u32 row = first; row < rows; row += stride) {
            double squares = 0.0;
            for (u32 i = 0; i < width * T::LANES; ++i) {
                squares += std::pow(added(row * width * T::LANES + i), 2.0);
            }
            const double scale = 1.0 / std::sqrt(squares / (width * T::LANES) + epsilon);
            for (u32 column = 0; column < width; ++column) {
                const u32 i = row * width + column;
                compare(name, launch, rank, i, residual_outs.ranks[rank][i],
                        vector_of<T>(added, i));
                float got[T::LANES];
                T::unpack(outputs.ranks[rank][i], got);
                for (u32 lane = 0; lane < T::LANES; ++lane) {
                    const double expected =
                        added(i * T::LANES + lane) * scale * weight(column * T::LANES + lane);
                    const double bound = std::fabs(expected) * (T::LANES == 8 ? 1.0 / 256 : 1e-5);
                    if (!(std::fabs(got[lane] - expected) <= bound) && ++wrong_elements <= 10) {
                        std::fprintf(stderr,
                                     "%s, launch %d, rank %u, row %u: %g where %g is right\n", name,
                                     launch, rank, row, static_cast<double>(got[lane]), expected);
                    }
                }
            }
        }
        gather();
    });
}

// Numbers of tokens per launch, of rank 0, and their maximum for all ranks.
constexpr u32 TOKENS[] = {3, 0, 1, 9, 4, 9};
constexpr u32 MOST_TOKENS = 9;

u32 tokens_of(u32 rank, int launch) {
    return (TOKENS[launch] + rank * 4) % (MOST_TOKENS + 1);
}

// Returns the expert of a selection. Some selections have none, and some tokens select an expert
// twice.
u32 expert_of(u32 rank, u32 token, u32 k, int launch, u32 experts) {
    const u32 mixed = rank * 977 + token * 131 + k * 17 + static_cast<u32>(launch) * 7;
    const u32 drawn = mixed * 2654435761u >> 8;
    return drawn % 7 == 0 ? NONE : drawn / 7 % experts;
}

float weight_of(u32 rank, u32 token, u32 k) {
    return 1.0f / static_cast<float>(3 + rank + 2 * token + k);
}

// Element of a token. The magnitudes of channels differ, also among those that share a scale.
float token_element(u32 rank, u32 token, u32 channel, int launch) {
    const int value = element(rank, token * 1009 + channel, launch);
    return static_cast<float>(value) * static_cast<float>(1 + channel / 32 % 7) / 8.0f;
}

// Element of the result of selection k of a token.
float result_element(u32 rank, u32 token, u32 k, u32 channel, int launch) {
    return static_cast<float>(element(rank + 5 * k, token * 37 + channel, launch));
}

// Returns the vector of a row that PAYLOAD sends for a token.
template <class PAYLOAD>
Vector payload_vector(u32 rank, u32 token, u32 column, u32 width, int launch) {
    const auto value = [&](u32 channel) { return token_element(rank, token, channel, launch); };
    if (std::is_same_v<PAYLOAD, PlainPayload>) {
        return vector_of<Bf16>(value, column);
    }
    const auto largest = [&](u32 group) {
        float most = 1e-4f;
        for (u32 i = 0; i < 128; ++i) {
            most = std::max(most, std::fabs(value(group * 128 + i)));
        }
        return most;
    };
    Vector packed = {};
    for (u32 i = 0; i < 16; ++i) {
        const u32 channel = column * 16 + i;
        if (column < width / 2) {
            const float scaled = value(channel) * (448.0f / largest(channel / 128));
            // The nearest of all elements; of two, the one with an even code.
            u32 best = 0;
            const auto decode = [](u32 code) {
                const int exponent = static_cast<int>(code >> 3);
                const float fraction = static_cast<float>(code & 7) / 8.0f;
                return exponent == 0 ? std::ldexp(fraction, -6)
                                     : std::ldexp(1.0f + fraction, exponent - 7);
            };
            const auto distance = [&](u32 code) {
                return std::fabs(std::fabs(scaled) - decode(code));
            };
            for (u32 code = 1; code < 0x7f; ++code) {
                if (distance(code) < distance(best) ||
                    (distance(code) == distance(best) && code % 2 == 0)) {
                    best = code;
                }
            }
            packed.word[i / 4] |= (best | (std::signbit(scaled) ? 0x80 : 0)) << i % 4 * 8;
        } else if (i < 4 && (column - width / 2) * 4 + i < width / 16) {
            packed.word[i] = __float_as_uint(largest((column - width / 2) * 4 + i) / 448.0f);
        }
    }
    return packed;
}

template <class PAYLOAD, TeamKind KIND, bool EXPERTS, int R, u32 THREADS>
void check_moe(const char *name) {
    if (!is_chosen(name)) {
        return;
    }
    constexpr u32 WIDTH = 48, PER_RANK = 3, ROWS = R * MOST_TOKENS, ALL = ROWS * TOP_K;
    const u32 stride = PAYLOAD::stride(WIDTH);
    Memory<MoePad, R> pads(1);
    constexpr u32 SELECTIONS = MOST_TOKENS * TOP_K;
    Memory<Vector, R> x(MOST_TOKENS * WIDTH), rows(ROWS * stride), copies(ALL * stride);
    Memory<Vector, R> y(ALL * WIDTH), results(SELECTIONS * WIDTH), out(MOST_TOKENS * WIDTH);
    Memory<u32, R> infos(ROWS * INFO_WORDS), experts(SELECTIONS), slots(SELECTIONS);
    Memory<u32, R> weights(SELECTIONS), origins(ALL), row_weights(ALL), offsets(PER_RANK + 1);
    const auto wrong = [&](int launch, u32 rank, const char *what, u32 index) {
        if (++wrong_elements <= 10) {
            std::fprintf(stderr, "%s, launch %d, rank %u: %s %u is wrong\n", name, launch, rank,
                         what, index);
        }
    };
    run<R, THREADS>(6, [&](u32 rank, int launch, const std::function<void()> &gather) {
        const u32 tokens = tokens_of(rank, launch);
        const bool is_first = thread_of_grid() == 0;
        if (is_first) {
            for (u32 i = 0; i < tokens * TOP_K; ++i) {
                experts.ranks[rank][i] =
                    expert_of(rank, i / TOP_K, i % TOP_K, launch, R * PER_RANK);
                weights.ranks[rank][i] = __float_as_uint(weight_of(rank, i / TOP_K, i % TOP_K));
            }
            for (u32 i = 0; i < tokens * WIDTH; ++i) {
                const u32 token = i / WIDTH;
                x.ranks[rank][i] = vector_of<Bf16>(
                    [&](u32 at) { return token_element(rank, token, at, launch); }, i % WIDTH);
            }
        }
        gather();
        const Tokens of_rank = {x.peers.at[rank],     experts.peers.at[rank],
                                weights.peers.at[rank], slots.peers.at[rank],
                                tokens,               MOST_TOKENS,
                                WIDTH};
        if constexpr (EXPERTS) {
            const ExpertRows of_experts = {copies.peers.at[rank], offsets.peers.at[rank],
                                           origins.peers.at[rank], row_weights.peers.at[rank]};
            moe_dispatch_experts<PAYLOAD, KIND, R>(pads.peers, rows.peers, infos.peers, of_rank,
                                                   of_experts, PER_RANK, rank);
        } else {
            moe_dispatch<PAYLOAD, KIND, R>(pads.peers, rows.peers, infos.peers, of_rank, PER_RANK,
                                           rank);
        }
        gather();
        // This part stands for the experts: one thread checks the rows and computes the results.
        if (is_first) {
            const auto check_row = [&](const Vector *row, u32 source, u32 token) {
                for (u32 column = 0; column < stride; ++column) {
                    compare(name, launch, rank, column, row[column],
                            payload_vector<PAYLOAD>(source, token, column, WIDTH, launch));
                }
            };
            const auto compute = [&](u32 row, u32 source, u32 token, u32 k) {
                for (u32 column = 0; column < WIDTH; ++column) {
                    y.ranks[rank][row * WIDTH + column] = vector_of<Bf16>(
                        [&](u32 at) { return result_element(source, token, k, at, launch); },
                        column);
                }
            };
            // The selections that must arrive, as (source, token, k), and the tokens.
            std::set<std::tuple<u32, u32, u32>> expected;
            std::set<std::pair<u32, u32>> senders;
            for (u32 source = 0; source < R; ++source) {
                for (u32 i = 0; i < tokens_of(source, launch) * TOP_K; ++i) {
                    const u32 expert =
                        expert_of(source, i / TOP_K, i % TOP_K, launch, R * PER_RANK);
                    if (expert != NONE && expert / PER_RANK == rank) {
                        expected.emplace(source, i / TOP_K, i % TOP_K);
                        senders.emplace(source, i / TOP_K);
                    }
                }
            }
            const auto local_expert = [&](u32 source, u32 token, u32 k) {
                return expert_of(source, token, k, launch, R * PER_RANK) - rank * PER_RANK;
            };
            if (EXPERTS) {
                for (u32 e = 0; e < PER_RANK; ++e) {
                    const u32 end = offsets.ranks[rank][e + 1];
                    for (u32 row = offsets.ranks[rank][e]; row < end; ++row) {
                        const u32 origin = origins.ranks[rank][row];
                        const u32 source = origin >> PLACE_BITS;
                        const u32 token = (origin & PLACE_MASK) / TOP_K, k = origin % TOP_K;
                        const u32 weight = __float_as_uint(weight_of(source, token, k));
                        if (expected.erase({source, token, k}) != 1 ||
                            local_expert(source, token, k) != e ||
                            row_weights.ranks[rank][row] != weight) {
                            wrong(launch, rank, "row", row);
                            continue;
                        }
                        check_row(&copies.ranks[rank][row * stride], source, token);
                        compute(row, source, token, k);
                    }
                }
                if (!expected.empty()) {
                    wrong(launch, rank, "number of rows", offsets.ranks[rank][PER_RANK]);
                }
            } else {
                for (u32 source = 0; source < R; ++source) {
                    for (u32 i = 0; i < pads.ranks[rank][0].counts[source]; ++i) {
                        const u32 row = source * MOST_TOKENS + i;
                        const u32 *info = &infos.ranks[rank][row * INFO_WORDS];
                        const u32 token = info[INFO_TOKEN];
                        if (senders.erase({source, token}) != 1) {
                            wrong(launch, rank, "row", row);
                            continue;
                        }
                        check_row(&rows.ranks[rank][row * stride], source, token);
                        for (u32 k = 0; k < TOP_K; ++k) {
                            const bool is_own = expected.count({source, token, k}) == 1;
                            const u32 expert = is_own ? local_expert(source, token, k) : NONE;
                            const u32 weight = __float_as_uint(weight_of(source, token, k));
                            if (info[k] != expert || info[INFO_WEIGHTS + k] != weight) {
                                wrong(launch, rank, "selection of row", row);
                            }
                            if (is_own) {
                                compute(row * TOP_K + k, source, token, k);
                            }
                        }
                    }
                }
                if (!senders.empty()) {
                    wrong(launch, rank, "number of rows", static_cast<u32>(senders.size()));
                }
            }
        }
        gather();
        if constexpr (EXPERTS) {
            moe_combine_push<R>(pads.peers, results.peers, y.peers.at[rank], offsets.peers.at[rank],
                                origins.peers.at[rank], weights.peers.at[rank],
                                slots.peers.at[rank], out.peers.at[rank], tokens, WIDTH, PER_RANK,
                                rank);
        } else {
            moe_combine_pull<R>(pads.peers, y.peers, weights.peers.at[rank], slots.peers.at[rank],
                                out.peers.at[rank], tokens, MOST_TOKENS, WIDTH, rank);
        }
        gather();
        for (u32 i = thread_of_grid(); i < tokens * WIDTH; i += threads_of_grid()) {
            const u32 token = i / WIDTH;
            const auto total = [&](u32 channel) {
                float sum = 0.0f;
                for (u32 k = 0; k < TOP_K; ++k) {
                    if (expert_of(rank, token, k, launch, R * PER_RANK) != NONE) {
                        const float product = weight_of(rank, token, k) *
                                              result_element(rank, token, k, channel, launch);
                        sum += product;
                    }
                }
                return sum;
            };
            compare(name, launch, rank, i, out.ranks[rank][i], vector_of<Bf16>(total, i % WIDTH));
        }
        gather();
    });
}

template <int R, u32 THREADS>
void check_mixtures() {
    check_moe<PlainPayload, TeamKind::Block, false, R, THREADS>("moe_rank_major");
    check_moe<PlainPayload, TeamKind::Block, true, R, THREADS>("moe_expert_major");
    check_moe<Fp8Payload, TeamKind::Warp, false, R, THREADS>("moe_rank_major");
    check_moe<Fp8Payload, TeamKind::Warp, true, R, THREADS>("moe_expert_major");
    check_moe<PlainPayload, TeamKind::Warp, true, R, THREADS>("moe_expert_major");
    check_moe<Fp8Payload, TeamKind::Block, false, R, THREADS>("moe_rank_major");
}

// The ping-pong uses one thread per rank. The barriers use whole blocks.
void check_costs() {
    if (!is_chosen("costs")) {
        return;
    }
    Memory<SignalPad, 2> pads(1);
    run<2>(3, [&](u32 rank, int, const std::function<void()> &gather) {
        barrier_turns<2, Order::Release>(pads.peers, 20, rank);
        gather();
        barrier_turns<2, Order::Relaxed>(pads.peers, 5, rank);
        ping_pong<Order::Release>(pads.peers, 20, rank);
        gather();
    });
    for (int r = 0; r < 2; ++r) {
        const SignalPad &pad = pads.ranks[r][0];
        if (pad.barriers[0] != 75 || pad.barriers[1] != 75 || pad.turns[0] != 60 ||
            pad.signal[0] != 60) {
            std::fprintf(stderr, "rank %d: %u and %u barriers, %u turns\n", r, pad.barriers[0],
                         pad.barriers[1], pad.turns[0]);
            ++wrong_elements;
        }
    }
    std::vector<Vector> from(MOST), to(MOST);
    for (u32 i = 0; i < MOST; ++i) {
        from[i] = Vector{{i, i + 1, i + 2, i + 3}};
    }
    run<1>(1, [&](u32, int, const std::function<void()> &) {
        copy_vectors(to.data(), from.data(), MOST - 3);
    });
    for (u32 i = 0; i < MOST; ++i) {
        compare("copy", 0, 0, i, to[i], i < MOST - 3 ? from[i] : Vector{});
    }
}

template <class T, int R>
void check_all() {
    check_all_reduce<T, R>("one_stage", Way::OneStage);
    check_all_reduce<T, R>("two_stage_pull", Way::Pull);
    check_all_reduce<T, R>("two_stage_push", Way::Push);
    check_all_reduce<T, R>("packets_one_shot", Way::OneShot);
    check_all_reduce<T, R>("packets_two_shot", Way::TwoShot);
    check_norm<T, R, 2>("norm_by_barrier", Norms::Barrier);
    check_norm<T, R, 2>("norm_by_packets", Norms::Packets);
}

template <class T, int R, int V>
std::function<void()> check_norm_at(const char *name, Norms way) {
    return [=] { check_norm<T, R, V>(name, way); };
}

} // namespace

int main(int count, char **arguments) {
    chosen = count > 1 ? arguments[1] : nullptr;
    // Starts with small numbers of ranks. Stops at the first error.
    const std::function<void()> checks[] = {
        check_costs,
        check_mixtures<2, 64>,
        check_all<F32, 2>,
        check_norm_at<Bf16, 2, 1>("norm_alone", Norms::Alone),
        check_norm_at<Bf16, 2, 4>("norm_by_barrier", Norms::Barrier),
        check_norm_at<Bf16, 2, 4>("norm_by_packets", Norms::Packets),
        check_norm_at<F32, 4, 1>("norm_by_packets", Norms::Packets),
        check_mixtures<4, THREADS>,
        check_all<Bf16, 4>,
        check_mixtures<8, THREADS>,
        check_all<Bf16, 8>,
    };
    for (const auto &check : checks) {
        if (wrong_elements == 0) {
            check();
        }
    }
    if (wrong_elements != 0) {
        std::fprintf(stderr, "%llu wrong\n", static_cast<unsigned long long>(wrong_elements));
        return 1;
    }
    if (checked == 0) {
        std::fprintf(stderr, "there is no kernel %s\n", chosen);
        return 2;
    }
    std::printf("%d checks, all right\n", checked);
    return 0;
}
