//! Models for loom. Every model must pass.

use fusewire_device::call::Operation;
use fusewire_device::layout::FailureKind;
use fusewire_kernels::fused::Route;
use fusewire_kernels::moe::MoeFlags;
use fusewire_models::memory_image::{Config, MemoryImage, Parts};
use fusewire_models::mixture::{Mixture, Tokens};
use fusewire_models::moe::{Injected, Launch, Number};
use fusewire_models::report::{Bound, Entry};
use fusewire_models::scenario::{Blocks, InjectedFault, Scenario};
use fusewire_models::step::{Memory, Op, Step};
use fusewire_models::windows::Kernel;

const NONE: Parts = Parts {
    packets: false,
    rounds: false,
    staging: false,
    channels: false,
    failure: false,
    words: false,
    signals: false,
    network: false,
    grid: false,
};
pub(crate) const PACKETS: Parts = Parts {
    packets: true,
    ..NONE
};
pub(crate) const ROUNDS: Parts = Parts {
    rounds: true,
    ..NONE
};
const STAGED: Parts = Parts {
    staging: true,
    ..ROUNDS
};
pub(crate) const WORDS: Parts = Parts {
    words: true,
    ..ROUNDS
};
pub(crate) const SIGNALS: Parts = Parts {
    signals: true,
    ..NONE
};
pub(crate) const NETWORK: Parts = Parts {
    network: true,
    ..SIGNALS
};
pub(crate) const GRID: Parts = Parts { grid: true, ..NONE };
pub(crate) const CHANNELS: Parts = Parts {
    channels: true,
    ..NONE
};

/// Returns the configuration of packets to a rank that only a network reaches.
pub(crate) fn packets_by_network() -> Config {
    let parts = Parts {
        network: true,
        rounds: true,
        ..PACKETS
    };
    Config {
        packet_slot: 128,
        ..two(parts)
    }
}

/// Returns the configuration of channels to a rank that only a network reaches.
pub(crate) fn channels_by_network(channel_depth: u64) -> Config {
    Config {
        channel_depth,
        ..two(Parts {
            network: true,
            ..CHANNELS
        })
    }
}

pub(crate) fn two(parts: Parts) -> Config {
    Config::new(2, parts)
}

pub(crate) fn scenario(config: Config, blocks: Blocks, steps: Vec<Step>) -> Scenario {
    Scenario::new(MemoryImage::new(config), blocks, steps)
}

pub(crate) fn single(config: Config, steps: Vec<Step>) -> Scenario {
    scenario(config, Blocks::Single, steps)
}

/// Returns true if a model must launch `operation`.
const fn needs_model(operation: Operation) -> bool {
    match operation {
        Operation::AllReduce
        | Operation::ReduceScatter
        | Operation::AllGather
        | Operation::AllGatherV
        | Operation::Broadcast
        | Operation::Reduce
        | Operation::Scatter
        | Operation::Gather
        | Operation::AllToAll
        | Operation::AllToAllV
        | Operation::Barrier
        | Operation::AllReduceNorm
        | Operation::ReduceScatterNorm
        | Operation::AllGatherWithFlags
        | Operation::ReduceScatterOnArrival
        | Operation::Send
        | Operation::Recv
        | Operation::Batch
        | Operation::User => true,
        // Its protocol is that of packets, which the models of all_reduce cover.
        Operation::VocabParallel => false,
        // The models of windows run these operations inside user kernels.
        Operation::Put | Operation::Get | Operation::Signal | Operation::WaitSignal => false,
        Operation::None => false,
    }
}

/// Returns all models.
///
/// # Panics
/// Panics if an operation that needs a model has none.
pub(crate) fn entries() -> Vec<Entry> {
    let entries = all_entries();
    let launches = |scenario: &Scenario, operation| {
        let ranks = 0..scenario.image.config().ranks;
        let mut steps = scenario.steps.iter();
        steps.any(|step| ranks.clone().any(|rank| step.operation(rank) == operation))
    };
    for &operation in Operation::ALL {
        let mut scenarios = entries.iter().map(|entry| &entry.scenario);
        let has_model = scenarios.any(|scenario| launches(scenario, operation));
        assert_eq!(has_model, needs_model(operation), "{}", operation.name());
    }
    entries
}

fn all_entries() -> Vec<Entry> {
    [
        packets(),
        rounds(),
        windows(),
        queues(),
        grids(),
        channels(),
        mixtures(),
        overlapped(),
        many_ranks(),
        lanes(),
        failures(),
        experts(),
        failing_experts(),
        masking_experts(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn packets() -> Vec<Entry> {
    let all_reduce = Step::new(Op::Packet, 2);
    let wrapping = |config: Config| Config {
        first_epoch: (1 << 32) - 2,
        ..config
    };
    let vectors = Config {
        packet_slot: 256,
        user: 128,
        ..two(PACKETS)
    };
    vec![
        Entry::model(
            "packets, one line, 2 ranks x 4 epochs",
            Bound::Exhaustive,
            single(two(PACKETS), vec![all_reduce; 4]),
        ),
        Entry::model(
            "packets, several lines, 2 ranks x 3 epochs",
            Bound::Exhaustive,
            single(vectors, vec![Step::new(Op::Packet, 18); 3]),
        ),
        Entry::model(
            "packets, one line, across 2^32, 2 ranks x 3 epochs",
            Bound::Exhaustive,
            single(wrapping(two(PACKETS)), vec![all_reduce; 3]),
        ),
        Entry::model(
            "two-packet units, header only, 2 ranks x 1 epoch",
            Bound::Exhaustive,
            scenario(
                two(PACKETS),
                Blocks::SingleLaneGpu,
                vec![Step::new(Op::Packet, 0)],
            ),
        ),
        Entry::model(
            "two-packet units, header only, 2 ranks x 4 epochs",
            Bound::Preemptions(2),
            scenario(
                two(PACKETS),
                Blocks::SingleLaneGpu,
                vec![Step::new(Op::Packet, 0); 4],
            ),
        ),
        Entry::model(
            "two-packet units, 2 ranks x 4 epochs",
            Bound::Preemptions(1),
            scenario(two(PACKETS), Blocks::SingleLaneGpu, vec![all_reduce; 4]),
        ),
        Entry::model(
            "packets in two shots, 2 ranks x 4 launches",
            Bound::Preemptions(3),
            single(vectors, vec![Step::new(Op::PacketTwoShot, 18); 4]),
        ),
        Entry::model(
            "two-packet units in two shots, 2 ranks x 3 launches",
            Bound::Preemptions(1),
            scenario(
                vectors,
                Blocks::SingleLaneGpu,
                vec![Step::new(Op::PacketTwoShot, 2); 3],
            ),
        ),
        Entry::model(
            "two-packet units in two shots, both parts, 2 ranks x 2 launches",
            Bound::Preemptions(1),
            scenario(
                vectors,
                Blocks::SingleLaneGpu,
                vec![Step::new(Op::PacketTwoShot, 18); 2],
            ),
        ),
        Entry::model(
            "two-packet units, across 2^32, 2 ranks x 4 epochs",
            Bound::Preemptions(1),
            scenario(
                wrapping(two(PACKETS)),
                Blocks::SingleLaneGpu,
                vec![all_reduce; 4],
            ),
        ),
    ]
}

fn rounds() -> Vec<Entry> {
    let mut entries = vec![
        Entry::model(
            "barrier, 2 ranks x 3 epochs",
            Bound::Exhaustive,
            single(two(ROUNDS), vec![Step::new(Op::Barrier, 0); 3]),
        )
        .within(25),
        Entry::model(
            "barrier, 2 ranks x 4 epochs",
            Bound::Preemptions(3),
            single(two(ROUNDS), vec![Step::new(Op::Barrier, 0); 4]),
        ),
        Entry::model(
            "signal all_reduce, 2 ranks x 2 epochs",
            Bound::Exhaustive,
            single(two(ROUNDS), vec![Step::new(Op::Signal, 8); 2]),
        ),
        Entry::model(
            "signal all_reduce, 2 ranks x 4 epochs",
            Bound::Preemptions(3),
            single(two(ROUNDS), vec![Step::new(Op::Signal, 8); 4]),
        ),
        Entry::model(
            "staged all_reduce, 2 ranks x 2 chunks",
            Bound::Preemptions(3),
            single(
                Config {
                    user: 128,
                    ..two(STAGED)
                },
                vec![Step::new(Op::Signal, 72).memory(Memory::Staged)],
            ),
        ),
    ];
    let big = |parts| Config {
        user: 256,
        ..two(parts)
    };
    let cases = [
        ("two-shot all_reduce", Op::TwoShot, 72),
        ("reduce", Op::Reduce(1), 72),
        ("reduce_scatter", Op::ReduceScatter, 8),
        ("all_gather", Op::AllGather, 8),
        ("broadcast", Op::Broadcast(0), 8),
        ("scatter", Op::Scatter(1), 8),
        ("gather", Op::Gather(0), 8),
        ("all_to_all", Op::AllToAll, 8),
        ("all_gather_v", Op::AllGatherV, 9),
        ("all_to_all_v, zero splits", Op::AllToAllV, 1),
        ("all_reduce + norm, one shot", Op::Norm(Route::OneShot), 1),
        ("all_reduce + norm, two shots", Op::Norm(Route::TwoShot), 1),
        ("reduce_scatter + norm", Op::Norm(Route::ReduceScatter), 1),
    ];
    for (name, op, count) in cases {
        entries.push(Entry::model(
            &format!("{name}, 2 ranks x 4 epochs"),
            Bound::Preemptions(2),
            single(big(ROUNDS), vec![Step::new(op, count); 4]),
        ));
    }
    entries.push(Entry::model(
        "all_reduce + norm by packets, 2 ranks x 4 epochs",
        Bound::Preemptions(2),
        single(
            Config {
                packet_slot: 256,
                ..big(PACKETS)
            },
            vec![Step::new(Op::NormPacket, 1); 4],
        ),
    ));
    for (name, op, count) in [
        ("two-shot all_reduce", Op::TwoShot, 72),
        ("all_to_all", Op::AllToAll, 8),
        ("two-shot norm", Op::Norm(Route::TwoShot), 1),
    ] {
        entries.push(Entry::model(
            &format!("{name}, one rank staged, 2 ranks x 2 epochs"),
            Bound::Preemptions(2),
            single(
                big(STAGED),
                vec![Step::new(op, count).memory(Memory::Mixed); 2],
            ),
        ));
    }
    entries.push(Entry::model(
        "signal and two-shot all_reduce in place, 2 ranks x 4 epochs",
        Bound::Preemptions(2),
        single(
            big(STAGED),
            vec![
                Step::new(Op::TwoShot, 72).in_place(),
                Step::new(Op::Signal, 8).memory(Memory::Staged).in_place(),
                Step::new(Op::TwoShot, 72).in_place(),
                Step::new(Op::TwoShot, 8).memory(Memory::Staged).in_place(),
            ],
        ),
    ));
    entries
}

fn windows() -> Vec<Entry> {
    let step = |kernel, count| Step::new(Op::Window(kernel), count);
    let of = |parts, blocks, steps| {
        let config = Config {
            blocks,
            ..two(parts)
        };
        single(config, steps)
    };
    let rounds = Parts {
        rounds: true,
        ..SIGNALS
    };
    vec![
        Entry::model(
            "write with signal in a ring, 2 ranks x 3 epochs",
            Bound::Preemptions(2),
            of(rounds, 1, vec![Step::new(Op::RingPut, 1); 3]),
        ),
        Entry::model(
            "window: rows, signals and a barrier, 2 ranks x 2 epochs",
            Bound::Exhaustive,
            of(SIGNALS, 1, vec![step(Kernel::Rows, 1); 2]),
        )
        .within(25),
        Entry::model(
            "window: rows, signals and a barrier, 2 ranks x 4 epochs",
            Bound::Preemptions(3),
            of(SIGNALS, 1, vec![step(Kernel::Rows, 1); 4]),
        ),
        Entry::model(
            "window: two blocks add to a signal, 2 ranks x 2 epochs",
            Bound::Preemptions(2),
            of(SIGNALS, 2, vec![step(Kernel::Adders, 2); 2]),
        ),
        Entry::model(
            "window: one block adds while another sets, 2 ranks",
            Bound::Preemptions(3),
            of(SIGNALS, 2, vec![step(Kernel::AddBesideSet, 2)]),
        ),
        Entry::model(
            "window: a row by requests to a network, more than the ring holds",
            Bound::Preemptions(3),
            of(NETWORK, 1, vec![step(Kernel::OneWay, 5)]),
        ),
        Entry::model(
            "packets: a stream by requests to a network",
            Bound::Preemptions(3),
            single(packets_by_network(), vec![step(Kernel::OneWayPackets, 5)]),
        ),
        Entry::model(
            "packets: all_reduce by requests to a network, 2 ranks x 3 epochs",
            Bound::Preemptions(2),
            single(packets_by_network(), vec![Step::new(Op::Packet, 2); 3]),
        ),
        Entry::model(
            "packets: units by requests to a network, 2 ranks x 3 epochs",
            Bound::Preemptions(2),
            scenario(
                packets_by_network(),
                Blocks::SingleLaneGpu,
                vec![Step::new(Op::Packet, 2); 3],
            ),
        ),
        Entry::model(
            "packets: a stream by requests to a network, 2 lanes",
            Bound::Preemptions(2),
            scenario(
                Config {
                    lanes: 2,
                    ..packets_by_network()
                },
                Blocks::Lanes,
                vec![step(Kernel::OneWayPackets, 3)],
            ),
        ),
        Entry::model(
            "cells: both ranks add, and the second reads what the first wrote",
            Bound::Preemptions(3),
            cells(SIGNALS, Kernel::FetchAdd),
        ),
        Entry::model(
            "cells: both ranks claim, and the second reads what the first wrote",
            Bound::Preemptions(3),
            cells(SIGNALS, Kernel::CompareSwap),
        ),
        Entry::model(
            "cells: one rank adds, and the owner reads",
            Bound::Exhaustive,
            cells(SIGNALS, Kernel::ReadCell),
        ),
        Entry::model(
            "cells: updates by requests to a network, more than the ring holds",
            Bound::Preemptions(3),
            cells(NETWORK, Kernel::CellByNetwork),
        ),
        Entry::model(
            "window: a block counts, and 2 blocks wait, 2 launches",
            Bound::Preemptions(3),
            counted(2),
        ),
        Entry::model(
            "window: rows by requests of two blocks",
            Bound::Preemptions(2),
            of(NETWORK, 2, vec![step(Kernel::OneWay, 4)]),
        ),
    ]
}

/// Returns launches of three blocks on one rank whose window has a counter.
pub(crate) fn counted(launches: usize) -> Scenario {
    let config = Config {
        blocks: 3,
        counters: 1,
        ..Config::new(1, SIGNALS)
    };
    single(
        config,
        vec![Step::new(Op::Window(Kernel::Counted), 1); launches],
    )
}

/// Returns a launch of a kernel on two ranks whose window has a cell.
pub(crate) fn cells(parts: Parts, kernel: Kernel) -> Scenario {
    let config = Config {
        cells: 1,
        ..two(parts)
    };
    single(config, vec![Step::new(Op::Window(kernel), 1)])
}

/// Returns `config` with a queue.
pub(crate) fn queue(ring: u32, config: Config) -> Config {
    Config {
        ring,
        user: 32 * ring as usize,
        ..config
    }
}

fn queues() -> Vec<Entry> {
    let step = |kernel, count| Step::new(Op::Window(kernel), count);
    let stream =
        |ring, parts, batches| single(queue(ring, two(parts)), vec![step(Kernel::Stream, batches)]);
    let exchange = |launches| vec![step(Kernel::Exchange, 1); launches];
    let failing = Parts {
        failure: true,
        ..SIGNALS
    };
    let abort = Scenario {
        host_aborts: true,
        ..single(queue(4, two(failing)), exchange(2)).may_fail()
    };
    vec![
        Entry::model(
            "queue: a ring of 4 slots that is full and wraps, 6 batches",
            Bound::Preemptions(2),
            stream(4, SIGNALS, 6),
        ),
        Entry::model(
            "queue: a ring of 8 slots of which a batch skips one, an empty batch, 7 batches",
            Bound::Preemptions(2),
            stream(8, SIGNALS, 7),
        ),
        Entry::model(
            "queue: both ranks send and receive, 2 ranks x 5 epochs",
            Bound::Preemptions(1),
            single(queue(4, two(SIGNALS)), exchange(5)),
        ),
        Entry::model(
            "queue: both ranks send and receive, 2 lanes, a weak barrier",
            Bound::Preemptions(1),
            scenario(
                queue(4, lanes_config(SIGNALS)),
                Blocks::WeakLane,
                exchange(6),
            ),
        ),
        Entry::model(
            "queue: a host aborts while both ranks send and receive",
            Bound::Preemptions(2),
            abort,
        ),
        Entry::model(
            "queue: batches by requests to a network, 2 batches",
            Bound::Preemptions(2),
            stream(16, NETWORK, 2),
        ),
    ]
}

/// Returns launches of a kernel whose `blocks` blocks synchronise, on one rank.
pub(crate) fn grid(kernel: Kernel, blocks: u32, launches: usize) -> Scenario {
    let config = Config {
        blocks,
        ..Config::new(1, GRID)
    };
    single(config, vec![Step::new(Op::Window(kernel), 1); launches])
}

fn grids() -> Vec<Entry> {
    vec![
        Entry::model(
            "barrier of 2 blocks, 2 launches of 2 barriers",
            Bound::Exhaustive,
            grid(Kernel::Grid, 2, 2),
        ),
        Entry::model(
            "last of 2 blocks, 1 launch of 2 calls",
            Bound::Exhaustive,
            grid(Kernel::Last, 2, 1),
        ),
        Entry::model(
            "last of 2 blocks, 2 launches of 2 calls",
            Bound::Preemptions(2),
            grid(Kernel::Last, 2, 2),
        ),
        Entry::model(
            "last of 3 blocks, 1 launch of 2 calls",
            Bound::Preemptions(2),
            grid(Kernel::Last, 3, 1),
        ),
        Entry::model(
            "words of 2 blocks, 2 launches",
            Bound::Preemptions(3),
            grid(Kernel::BlockWords, 2, 2),
        ),
        Entry::model(
            "words of 3 blocks, 1 launch",
            Bound::Preemptions(2),
            grid(Kernel::BlockWords, 3, 1),
        ),
    ]
}

fn channels() -> Vec<Entry> {
    let depth = |channel_depth| Config {
        channel_depth,
        ..two(CHANNELS)
    };
    vec![
        Entry::model(
            "send and recv by requests to a network, depth 1, 2 chunks",
            Bound::Preemptions(2),
            single(
                channels_by_network(1),
                vec![Step::new(Op::Transfer(0, 1), 24)],
            ),
        )
        .within(40),
        Entry::model(
            "send and recv by requests to a network, depth 2, 2 messages",
            Bound::Preemptions(2),
            single(
                channels_by_network(2),
                vec![Step::new(Op::Transfer(0, 1), 8); 2],
            ),
        )
        .within(40),
        Entry::model(
            "send and recv, depth 1, 3 chunks",
            Bound::Exhaustive,
            single(depth(1), vec![Step::new(Op::Transfer(0, 1), 40)]),
        ),
        Entry::model(
            "send and recv, depth 2, 3 chunks",
            Bound::Exhaustive,
            single(depth(2), vec![Step::new(Op::Transfer(0, 1), 40)]),
        ),
        Entry::model(
            "send and recv, depth 2, 3 messages, one empty",
            Bound::Exhaustive,
            single(
                depth(2),
                [8, 0, 16]
                    .map(|bytes| Step::new(Op::Transfer(0, 1), bytes))
                    .to_vec(),
            ),
        ),
        Entry::model(
            "batch: both send and receive, depth 1, 3 chunks each way",
            Bound::Preemptions(2),
            single(depth(1), vec![Step::new(Op::Ring, 40)]),
        )
        .within(60),
        Entry::model(
            "send and recv, depth 1, both ways, 4 messages",
            Bound::Preemptions(3),
            single(
                depth(1),
                [(0, 1), (1, 0), (1, 0), (0, 1)]
                    .map(|(from, to)| Step::new(Op::Transfer(from, to), 8))
                    .to_vec(),
            ),
        ),
    ]
}

fn mixtures() -> Vec<Entry> {
    let packet = Step::new(Op::Packet, 2);
    vec![
        Entry::model(
            "packets, signal, packets",
            Bound::Exhaustive,
            single(
                two(Parts {
                    packets: true,
                    ..ROUNDS
                }),
                vec![packet, Step::new(Op::Signal, 8), packet],
            ),
        )
        .within(60),
        Entry::model(
            "packets, send, packets",
            Bound::Exhaustive,
            single(
                two(Parts {
                    packets: true,
                    ..CHANNELS
                }),
                vec![packet, Step::new(Op::Transfer(0, 1), 8), packet],
            ),
        )
        .within(60),
        Entry::model(
            "barrier, packets, two-shot, barrier",
            Bound::Preemptions(2),
            single(
                Config {
                    user: 128,
                    ..two(Parts {
                        packets: true,
                        ..ROUNDS
                    })
                },
                vec![
                    Step::new(Op::Barrier, 0),
                    packet,
                    Step::new(Op::TwoShot, 72),
                    Step::new(Op::Barrier, 0),
                ],
            ),
        ),
    ]
}

/// Operations with a concurrent consumer or producer on rank 0, which is a separate thread.
fn overlapped() -> Vec<Entry> {
    let gather = Step::new(Op::GatherWithFlags, 8);
    let scatter = Step::new(Op::ScatterOnArrival, 8);
    let staged = |step: Step| vec![step.memory(Memory::Staged)];
    let staging = Parts {
        staging: true,
        ..WORDS
    };
    [
        (
            "a ready flag per chunk, 2 ranks x 2 epochs",
            WORDS,
            vec![gather; 2],
        ),
        (
            "a ready flag per chunk, staged, 2 ranks",
            staging,
            staged(gather),
        ),
        (
            "an arrival counter per tile, 2 ranks x 2 epochs",
            WORDS,
            vec![scatter; 2],
        ),
        (
            "an arrival counter per tile, staged, 2 ranks",
            staging,
            staged(scatter),
        ),
    ]
    .into_iter()
    .map(|(name, parts, steps)| {
        let bound = Bound::Preemptions(2);
        Entry::model(name, bound, single(two(parts), steps)).within(30)
    })
    .collect()
}

fn many_ranks() -> Vec<Entry> {
    let mut entries = Vec::new();
    for (ranks, preemptions) in [(3, 1), (4, 0)] {
        let cases = [
            ("packets", PACKETS, Op::Packet, 2, 3),
            ("barrier", ROUNDS, Op::Barrier, 0, 2),
            ("signal all_reduce", ROUNDS, Op::Signal, 8, 2),
            ("broadcast", ROUNDS, Op::Broadcast(1), 8, 2),
        ];
        for (name, parts, op, count, epochs) in cases {
            entries.push(
                Entry::model(
                    &format!("{name}, {ranks} ranks x {epochs} epochs"),
                    Bound::Preemptions(preemptions),
                    single(
                        Config::new(ranks, parts),
                        vec![Step::new(op, count); epochs],
                    ),
                )
                .within(12),
            );
        }
    }
    entries
}

/// Returns the configuration of two ranks with two lanes each. 32 bytes are one vector per lane.
pub(crate) fn lanes_config(parts: Parts) -> Config {
    Config {
        lanes: 2,
        packet_slot: 256,
        channel_slot: 32,
        user: 128,
        ..two(parts)
    }
}

fn lanes() -> Vec<Entry> {
    let mut entries = Vec::new();
    for (machine, blocks) in [("emulator's", Blocks::Lanes), ("weak", Blocks::WeakLane)] {
        let cases = [
            ("two-packet units", PACKETS, Op::Packet, 2, 2),
            (
                "two-packet units in two shots",
                PACKETS,
                Op::PacketTwoShot,
                2,
                2,
            ),
            ("signal all_reduce", ROUNDS, Op::SignalF32, 8, 1),
            ("all_to_all", ROUNDS, Op::AllToAll, 32, 1),
            ("send and recv", CHANNELS, Op::Transfer(0, 1), 64, 1),
        ];
        for (name, parts, op, count, epochs) in cases {
            entries.push(
                Entry::model(
                    &format!("{name}, 2 ranks x 2 lanes, {machine} barrier"),
                    Bound::Preemptions(1),
                    scenario(
                        lanes_config(parts),
                        blocks,
                        vec![Step::new(op, count); epochs],
                    ),
                )
                .within(10),
            );
        }
    }
    entries
}

fn failures() -> Vec<Entry> {
    let failing = |parts: Parts| {
        two(Parts {
            failure: true,
            ..parts
        })
    };
    let mut entries = Vec::new();
    for (name, parts, op, count) in [
        ("packets", PACKETS, Op::Packet, 2),
        ("barrier", ROUNDS, Op::Barrier, 0),
        ("signal all_reduce", ROUNDS, Op::Signal, 8),
    ] {
        let step = Step::new(op, count);
        for (who, timeouts) in [
            ("rank 0", [1, u64::MAX, 0, 0]),
            ("either rank", [1, 1, 0, 0]),
        ] {
            entries.push(
                Entry::model(
                    &format!("the timeout of {who} expires, {name} x 2"),
                    Bound::Preemptions(2),
                    single(failing(parts), vec![step.timeouts(timeouts); 2]).may_fail(),
                )
                .tick(100_000)
                .within(20),
            );
        }
        let mut aborted = single(failing(parts), vec![step; 2]).may_fail();
        aborted.host_aborts = true;
        entries.push(
            Entry::model(
                &format!("the host aborts, {name} x 2"),
                Bound::Preemptions(2),
                aborted.clone(),
            )
            .within(20),
        );
        entries.push(Entry::model(
            &format!("the host aborts while a rank is absent, {name}"),
            Bound::Exhaustive,
            aborted.with_fault(InjectedFault::Absent),
        ));
    }
    entries
}

/// Layouts of a mixture of experts.
pub(crate) const EXPERT_MAJOR: MoeFlags = MoeFlags::EXPERT_MAJOR;
pub(crate) const RANK_MAJOR: MoeFlags = MoeFlags(0);
pub(crate) const BOUNDED: MoeFlags = EXPERT_MAJOR.with(MoeFlags::BOUNDED);

/// Returns launches of a mixture of experts on two ranks.
pub(crate) fn moe<const N: usize>(mixture: Mixture, launches: [Launch; N]) -> Scenario {
    let config = Config {
        mixture: Some(mixture),
        ..two(SIGNALS)
    };
    single(config, launches.map(moe_step).to_vec())
}

/// Returns launches of a mixture of experts with three tokens of each rank, in three rounds: two
/// dispatches, with two combines between them. `fault` is an error of the third launch of a round.
pub(crate) fn staged_moe(layout: MoeFlags, fault: Option<Injected>) -> Scenario {
    let mixture = Mixture {
        max_tokens: 3,
        capacity: 6,
        staging: 1,
        ..Mixture::new(layout)
    };
    let config = Config {
        mixture: Some(mixture),
        ..two(SIGNALS)
    };
    let mut launches = Launch::dispatch(0).staged(3);
    if let Some(fault) = fault {
        launches[3] = launches[3].with_fault(fault);
    } else {
        launches.extend(Launch::combine(0).staged(3));
        launches.extend(Launch::combine(0).pass(1).staged(3));
        launches.extend(Launch::dispatch(1).staged(3));
    }
    single(config, launches.into_iter().map(moe_step).collect())
}

fn moe_step(launch: Launch) -> Step {
    Step::new(Op::Moe(launch), 0)
}

/// Returns two rounds of dispatch and combine.
pub(crate) fn two_rounds() -> [Launch; 4] {
    [
        Launch::dispatch(0),
        Launch::combine(0),
        Launch::dispatch(1),
        Launch::combine(1),
    ]
}

/// Returns a dispatch and a combine by two lanes. An announcement is a multiple of 16 bytes, so
/// that no two lanes write to one word of the model.
pub(crate) fn moe_of_lanes(layout: MoeFlags, blocks: Blocks) -> Scenario {
    let mixture = Mixture {
        local_experts: 4,
        top_k: 2,
        capacity: 4,
        ..Mixture::new(layout)
    };
    let config = Config {
        mixture: Some(mixture),
        ..lanes_config(SIGNALS)
    };
    let launches = [Launch::dispatch(0), Launch::combine(0)];
    scenario(config, blocks, launches.map(moe_step).to_vec())
}

/// Dispatch and combine of a mixture of experts.
fn experts() -> Vec<Entry> {
    let bound = Bound::Preemptions(3);
    let mut entries = Vec::new();
    for (layout, mixture) in [
        ("expert-major", Mixture::new(EXPERT_MAJOR)),
        ("rank-major", Mixture::new(RANK_MAJOR)),
    ] {
        let mut add = |what: &str, bound, scenario| {
            let name = format!("moe: {what}, {layout}, 2 ranks");
            entries.push(Entry::model(&name, bound, scenario).within(12));
        };
        add(
            "dispatch and combine, once",
            Bound::Exhaustive,
            moe(mixture, [Launch::dispatch(0), Launch::combine(0)]),
        );
        add("2 rounds", bound, moe(mixture, two_rounds()));
        let none = Mixture {
            tokens: Tokens::NoneOnRank1,
            ..mixture
        };
        add(
            "2 rounds, no tokens on rank 1",
            bound,
            moe(none, two_rounds()),
        );
        add(
            "dispatch twice, combine twice, dispatch",
            bound,
            moe(
                mixture,
                [
                    Launch::dispatch(0),
                    Launch::dispatch(1),
                    Launch::combine(1),
                    Launch::combine(1).pass(1),
                    Launch::dispatch(2),
                ],
            ),
        );
        add(
            "2 rounds of halves",
            bound,
            moe(
                mixture,
                [
                    Launch::dispatch(0).send(),
                    Launch::dispatch(0).receive(),
                    Launch::combine(0).send(),
                    Launch::combine(0).receive(),
                    Launch::dispatch(1).send(),
                    Launch::dispatch(1).receive(),
                    Launch::combine(1).send(),
                    Launch::combine(1).receive(),
                ],
            ),
        );
        add(
            "halves, dispatch twice, combine twice",
            bound,
            moe(
                mixture,
                [
                    Launch::dispatch(0).send(),
                    Launch::dispatch(0).receive(),
                    Launch::dispatch(1).send(),
                    Launch::dispatch(1).receive(),
                    Launch::combine(1).send(),
                    Launch::combine(1).receive(),
                    Launch::combine(1).pass(1).send(),
                    Launch::combine(1).pass(1).receive(),
                ],
            ),
        );
        add(
            "2 micro-batches whose halves alternate",
            Bound::Preemptions(2),
            moe(
                Mixture {
                    batches: 2,
                    ..mixture
                },
                [
                    Launch::dispatch(0).send(),
                    Launch::dispatch(1).of(1).send(),
                    Launch::dispatch(0).receive(),
                    Launch::combine(0).send(),
                    Launch::dispatch(1).of(1).receive(),
                    Launch::combine(1).of(1).send(),
                    Launch::combine(0).receive(),
                    Launch::dispatch(2).send(),
                    Launch::combine(1).of(1).receive(),
                    Launch::dispatch(2).receive(),
                ],
            ),
        );
        add("2 rounds of 2 blocks", Bound::Preemptions(1), {
            let mixture = Mixture {
                max_tokens: 2,
                capacity: 4,
                tokens: Tokens::Alternating,
                ..mixture
            };
            let config = Config {
                blocks: 2,
                mixture: Some(mixture),
                ..two(SIGNALS)
            };
            single(config, two_rounds().map(moe_step).to_vec())
        });
    }
    for (layout, flags) in [("expert-major", EXPERT_MAJOR), ("rank-major", RANK_MAJOR)] {
        entries.push(
            Entry::model(
                &format!("moe: 2 dispatches and 2 combines of 3 rounds, {layout}, 2 ranks"),
                Bound::Preemptions(1),
                staged_moe(flags, None),
            )
            .within(20),
        );
        entries.push(
            Entry::model(
                &format!("moe: dispatch and combine, {layout}, 2 ranks x 2 lanes, weak barrier"),
                Bound::Preemptions(1),
                moe_of_lanes(flags, Blocks::WeakLane),
            )
            .within(10),
        );
    }
    let bounded = Mixture {
        capacity: 1,
        ..Mixture::new(BOUNDED)
    };
    entries.push(
        Entry::model(
            "moe: 2 rounds, a capacity that suffices, 2 ranks",
            bound,
            moe(bounded, two_rounds()),
        )
        .within(20),
    );
    let twice = [
        Launch::dispatch(0),
        Launch::dispatch(1),
        Launch::combine(1),
        Launch::dispatch(2),
    ];
    entries.push(
        Entry::model(
            "moe: dispatch twice, a capacity that suffices, 2 ranks",
            Bound::Preemptions(2),
            moe(bounded, twice),
        )
        .within(20),
    );
    entries
}

/// Returns launches of a mixture of experts whose ranks mask each other if one is late, which may
/// happen in every wait.
fn masking_moe<const N: usize>(mixture: Mixture, blocks: u32, launches: [Launch; N]) -> Scenario {
    let mixture = Mixture {
        layout: mixture.layout.with(MoeFlags::MASK),
        ..mixture
    };
    let parts = Parts {
        failure: true,
        ..SIGNALS
    };
    let config = Config {
        mixture: Some(mixture),
        blocks,
        ..two(parts)
    };
    let step = |launch| moe_step(launch).timeouts([1; 4]);
    single(config, launches.map(step).to_vec())
}

/// Ranks of a mixture of experts that may mask each other.
fn masking_experts() -> Vec<Entry> {
    let mut entries = Vec::new();
    for (layout, mixture) in [
        ("expert-major", Mixture::new(EXPERT_MAJOR)),
        ("rank-major", Mixture::new(RANK_MAJOR)),
    ] {
        let mut add = |what: &str, bound, scenario| {
            let name = format!("moe: late ranks are masked, {what}, {layout}, 2 ranks");
            let entry = Entry::model(&name, bound, scenario);
            entries.push(entry.tick(100_000).within(20));
        };
        add(
            "2 rounds",
            Bound::Preemptions(2),
            masking_moe(mixture, 1, two_rounds()),
        );
        add(
            "dispatch twice, combine twice",
            Bound::Preemptions(2),
            masking_moe(
                mixture,
                1,
                [
                    Launch::dispatch(0),
                    Launch::dispatch(1),
                    Launch::combine(1),
                    Launch::combine(1).pass(1),
                ],
            ),
        );
        let two_tokens = Mixture {
            max_tokens: 2,
            capacity: 4,
            ..mixture
        };
        add(
            "2 blocks",
            Bound::Preemptions(1),
            masking_moe(
                two_tokens,
                2,
                [
                    Launch::dispatch(0).wait(),
                    Launch::dispatch(0).interpret(),
                    Launch::combine(0).wait(),
                    Launch::combine(0).interpret(),
                ],
            ),
        );
        let absent = masking_moe(mixture, 1, two_rounds());
        add(
            "rank 1 is absent",
            Bound::Exhaustive,
            absent.with_fault(InjectedFault::Absent),
        );
    }
    let bounded = Mixture {
        capacity: 1,
        ..Mixture::new(BOUNDED)
    };
    let scenario = masking_moe(bounded, 1, [Launch::dispatch(0), Launch::combine(0)]);
    let name = "moe: late ranks are masked, a capacity that suffices, 2 ranks";
    let entry = Entry::model(name, Bound::Preemptions(2), scenario);
    entries.push(entry.tick(100_000).within(20));
    entries
}

/// Returns launches of a mixture of experts on two ranks, whose failures the checker controls.
fn failing_moe(mixture: Mixture, launches: &[Launch]) -> Scenario {
    let parts = Parts {
        failure: true,
        ..SIGNALS
    };
    let config = Config {
        mixture: Some(mixture),
        ..two(parts)
    };
    single(config, launches.iter().copied().map(moe_step).collect())
}

/// Launches of a mixture of experts that fail on all ranks, or may fail.
fn failing_experts() -> Vec<Entry> {
    let halves = [
        Launch::dispatch(0).send(),
        Launch::dispatch(0).receive(),
        Launch::combine(0).send(),
        Launch::combine(0).receive(),
    ];
    let mut entries = Vec::new();
    for (layout, mixture) in [
        ("expert-major", Mixture::new(EXPERT_MAJOR)),
        ("rank-major", Mixture::new(RANK_MAJOR)),
    ] {
        let unknown = Mixture {
            tokens: Tokens::UnknownExpert,
            ..mixture
        };
        for (launches, steps) in [("halves", &halves[..]), ("dispatch", &two_rounds()[..1])] {
            entries.push(
                Entry::model(
                    &format!("moe: an expert of rank 1 does not exist, {launches}, {layout}"),
                    Bound::Preemptions(3),
                    failing_moe(unknown, steps).must_fail(FailureKind::User),
                )
                .within(20),
            );
        }
        let mut aborted = failing_moe(mixture, &halves).may_fail();
        aborted.host_aborts = true;
        entries.push(
            Entry::model(
                &format!("moe: the host aborts between halves, {layout}"),
                Bound::Preemptions(2),
                aborted,
            )
            .within(20),
        );
        let mut expires = failing_moe(mixture, &halves).may_fail();
        for step in &mut expires.steps {
            *step = step.timeouts([1, u64::MAX, 0, 0]);
        }
        entries.push(
            Entry::model(
                &format!("moe: the timeout of rank 0 expires between halves, {layout}"),
                Bound::Preemptions(1),
                expires,
            )
            .tick(100_000)
            .within(12),
        );
    }
    for number in [
        Number::Rows,
        Number::FirstRow,
        Number::Tokens,
        Number::Selections,
        Number::Index,
        Number::Token,
    ] {
        // Each rank sends one of its two tokens, to the other rank.
        let mixture = Mixture {
            max_tokens: 2,
            capacity: 1,
            tokens: Tokens::Alternating,
            ..Mixture::new(EXPERT_MAJOR)
        };
        let mut launches = vec![
            Launch::dispatch(1).wait(),
            Launch::dispatch(1).interpret(),
            Launch::combine(1),
        ];
        // The token only matters to combine.
        let (faulty, kind) = match number {
            Number::Token => (2, FailureKind::Index),
            _ => (1, FailureKind::User),
        };
        launches[faulty] = launches[faulty].with_fault(Injected::False(number));
        launches.truncate(faulty + 1);
        entries.push(Entry::model(
            &format!("moe: a false number arrives: {number:?}"),
            Bound::Preemptions(1),
            failing_moe(mixture, &launches).must_fail(kind),
        ));
    }
    entries.push(
        Entry::model(
            "moe: the rows of rank 0 do not fit, no rank writes rows",
            Bound::Preemptions(3),
            moe_without_room(BOUNDED),
        )
        .within(20),
    );
    entries
}

/// Returns a dispatch of two rows to rank 0, which has room for one, and must fail on both ranks
/// before rows move.
pub(crate) fn moe_without_room(layout: MoeFlags) -> Scenario {
    let full = Mixture {
        capacity: 1,
        tokens: Tokens::ToExpert0,
        ..Mixture::new(layout)
    };
    failing_moe(full, &[Launch::dispatch(0)]).must_fail(FailureKind::User)
}
