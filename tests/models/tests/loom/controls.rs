//! Negative controls under loom. Each control has an injected fault that loom must find.

use fusewire_device::mem::model::Fault;
use fusewire_models::broken::Kernel;
use fusewire_models::memory_image::Config;
use fusewire_models::mixture::Mixture;
use fusewire_models::moe::{Injected, Launch};
use fusewire_models::report::{Bound, Entry};
use fusewire_models::scenario::{Blocks, InjectedFault};
use fusewire_models::step::{Op, Step};
use fusewire_models::windows;

use crate::models::{
    BOUNDED, CHANNELS, EXPERT_MAJOR, NETWORK, PACKETS, RANK_MAJOR, ROUNDS, SIGNALS, WORDS, cells,
    channels_by_network, counted, grid, lanes_config, moe, moe_of_lanes, moe_without_room,
    packets_by_network, queue, scenario, single, staged_moe, two, two_rounds,
};

const BOUND: Bound = Bound::Preemptions(3);

/// Returns all controls.
pub(crate) fn entries() -> Vec<Entry> {
    [
        orders(),
        fences(),
        slots(),
        kernels(),
        overlapped(),
        experts(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Controls in which the memory gives weaker ordering guarantees than the kernels request.
fn orders() -> Vec<Entry> {
    let packets = || single(two(PACKETS), vec![Step::new(Op::Packet, 2); 4]);
    let signals = || single(two(ROUNDS), vec![Step::new(Op::Signal, 8); 3]);
    let channel = || single(two(CHANNELS), vec![Step::new(Op::Transfer(0, 1), 40)]);
    let rows = |kernel| Step::new(Op::Window(kernel), 1);
    let window = || single(two(SIGNALS), vec![rows(windows::Kernel::Rows); 2]);
    let barrier = || grid(windows::Kernel::Grid, 2, 1);
    let last = || grid(windows::Kernel::Last, 2, 1);
    let sum = || single(two(SIGNALS), vec![rows(windows::Kernel::Adders); 2]);
    let stream = vec![Step::new(Op::Window(windows::Kernel::Stream), 6)];
    let queue = || single(queue(4, two(SIGNALS)), stream.clone());
    let network = || single(two(NETWORK), vec![rows(windows::Kernel::OneWay)]);
    let added = || cells(SIGNALS, windows::Kernel::FetchAdd);
    let swaps = || cells(SIGNALS, windows::Kernel::CompareSwap);
    let read = || cells(SIGNALS, windows::Kernel::ReadCell);
    let far = || cells(NETWORK, windows::Kernel::CellByNetwork);
    let by_network = vec![rows(windows::Kernel::OneWayPackets)];
    let by_network = || single(packets_by_network(), by_network.clone());
    [
        ("relaxed stores", Fault::RelaxedStores, "packets", packets()),
        ("relaxed stores", Fault::RelaxedStores, "signal", signals()),
        ("no release", Fault::NoRelease, "channel", channel()),
        ("relaxed loads", Fault::RelaxedLoads, "packets", packets()),
        ("no acquire", Fault::NoAcquire, "signal", signals()),
        ("no acquire", Fault::NoAcquire, "channel", channel()),
        ("device scope", Fault::NarrowScope, "packets", packets()),
        ("device scope", Fault::NarrowScope, "signal", signals()),
        ("device scope", Fault::NarrowScope, "channel", channel()),
        ("relaxed stores", Fault::RelaxedStores, "window", window()),
        ("no acquire", Fault::NoAcquire, "window", window()),
        ("no acquire", Fault::NoAcquire, "window, sum", sum()),
        ("device scope", Fault::NarrowScope, "window", window()),
        ("relaxed stores", Fault::RelaxedStores, "queue", queue()),
        ("no acquire", Fault::NoAcquire, "queue", queue()),
        ("device scope", Fault::NarrowScope, "queue", queue()),
        ("relaxed stores", Fault::RelaxedStores, "blocks", barrier()),
        ("no acquire", Fault::NoAcquire, "blocks", barrier()),
        ("relaxed updates", Fault::RelaxedUpdates, "last", last()),
        ("relaxed stores", Fault::RelaxedStores, "network", network()),
        ("no acquire", Fault::NoAcquire, "network", network()),
        ("device scope", Fault::NarrowScope, "network", network()),
        (
            "relaxed updates",
            Fault::RelaxedUpdates,
            "counter",
            counted(1),
        ),
        ("no acquire", Fault::NoAcquire, "counter", counted(1)),
        ("relaxed updates", Fault::RelaxedUpdates, "cells", added()),
        ("relaxed updates", Fault::RelaxedUpdates, "swaps", swaps()),
        ("device scope", Fault::NarrowScope, "cells", added()),
        ("no acquire", Fault::NoAcquire, "a read cell", read()),
        ("no acquire", Fault::NoAcquire, "far cells", far()),
        ("relaxed stores", Fault::RelaxedStores, "far cells", far()),
        (
            "relaxed stores",
            Fault::RelaxedStores,
            "network, packets",
            by_network(),
        ),
        (
            "no acquire",
            Fault::NoAcquire,
            "network, packets",
            by_network(),
        ),
    ]
    .into_iter()
    .map(|(what, fault, name, scenario)| {
        Entry::control(
            &format!("control: {what}, {name}"),
            BOUND,
            Some(fault),
            scenario,
        )
    })
    .collect()
}

/// Controls with two lanes and a weak barrier. They show that the fences before and after the
/// barrier are necessary, and that a machine must not declare a noncumulative barrier cumulative.
fn fences() -> Vec<Entry> {
    let mut entries = Vec::new();
    for (what, fault, blocks) in [
        (
            "writes not complete before a barrier",
            Some(Fault::NoReleaseFences),
            Blocks::WeakLane,
        ),
        (
            "no fence after a wait",
            Some(Fault::NoAcquireFences),
            Blocks::WeakLane,
        ),
        (
            "a barrier wrongly declared cumulative",
            None,
            Blocks::Claimed,
        ),
    ] {
        for (name, parts, op, count) in [
            ("signal", ROUNDS, Op::SignalF32, 8),
            ("all_to_all", ROUNDS, Op::AllToAll, 32),
            ("channel", CHANNELS, Op::Transfer(0, 1), 64),
        ] {
            if fault == Some(Fault::NoAcquireFences) && name == "signal" {
                // The lane that acquires a signal also reads its words, and in this model no peer
                // writes the data during a launch.
                continue;
            }
            let steps = vec![Step::new(op, count); 2];
            entries.push(Entry::control(
                &format!("control: {what}, 2 lanes, {name}"),
                BOUND,
                fault,
                scenario(lanes_config(parts), blocks, steps),
            ));
        }
    }
    entries
}

/// Controls with one set of packet slots instead of two, with forged credits, or with an absent
/// rank.
fn slots() -> Vec<Entry> {
    let packets = |blocks| scenario(two(PACKETS), blocks, vec![Step::new(Op::Packet, 2); 4]);
    let channel = single(two(CHANNELS), vec![Step::new(Op::Transfer(0, 1), 40)]);
    let stream = Step::new(Op::Window(windows::Kernel::Stream), 6);
    let queue = single(queue(4, two(SIGNALS)), vec![stream]);
    let one_way = Step::new(Op::Window(windows::Kernel::OneWayPackets), 5);
    let by_network = |step, times| single(packets_by_network(), vec![step; times]);
    [
        (
            "no second slot set, packets by a network",
            by_network(Step::new(Op::Packet, 2), 3),
            InjectedFault::OneSlotSet,
        ),
        (
            "a signal before its put, packets by a network",
            by_network(one_way, 1),
            InjectedFault::EarlySignals,
        ),
        (
            "a signal before its put, channel by a network",
            single(
                channels_by_network(1),
                vec![Step::new(Op::Transfer(0, 1), 0)],
            ),
            InjectedFault::EarlySignals,
        ),
        (
            "no second slot set, one line",
            packets(Blocks::Single),
            InjectedFault::OneSlotSet,
        ),
        (
            "no second slot set, two-packet units",
            packets(Blocks::SingleLaneGpu),
            InjectedFault::OneSlotSet,
        ),
        (
            "no second slot set, packets in two shots",
            scenario(
                Config {
                    packet_slot: 256,
                    user: 128,
                    ..two(PACKETS)
                },
                Blocks::SingleLaneGpu,
                vec![Step::new(Op::PacketTwoShot, 2); 2],
            ),
            InjectedFault::OneSlotSet,
        ),
        ("no credits, channel", channel, InjectedFault::FreeCredits),
        ("no credits, queue", queue, InjectedFault::FreeCredits),
        (
            "an absent rank, packets",
            packets(Blocks::Single),
            InjectedFault::Absent,
        ),
    ]
    .into_iter()
    .map(|(what, scenario, injected)| {
        let name = format!("control: {what}");
        Entry::control(&name, BOUND, None, scenario.with_fault(injected))
    })
    .collect()
}

/// Deliberately broken kernels, and the correct kernel from which they are derived.
fn kernels() -> Vec<Entry> {
    let of = |kernel| single(two(ROUNDS), vec![Step::new(Op::Broken(kernel), 8); 2]);
    let mut entries = vec![Entry::model(
        "the correct kernel of the next controls",
        BOUND,
        of(Kernel::Correct),
    )];
    for (what, kernel) in [
        ("reads user memory after done", Kernel::ReadsAfterDone),
        ("no done signal", Kernel::NoDone),
        ("reads user memory before ready", Kernel::NoReady),
        ("a rank returns without done", Kernel::Leaves),
    ] {
        let name = format!("control: {what}");
        entries.push(Entry::control(&name, BOUND, None, of(kernel)));
    }
    let rows = Step::new(Op::Window(windows::Kernel::NoBarrier), 1);
    entries.push(Entry::control(
        "control: a window without a barrier",
        BOUND,
        None,
        single(two(SIGNALS), vec![rows; 2]),
    ));
    entries.push(Entry::control(
        "control: words of blocks that are sent twice in a launch",
        BOUND,
        None,
        grid(windows::Kernel::BlockWordsTwice, 2, 1),
    ));
    entries
}

/// Controls whose ready flags and arrival counters omit the release or the acquire, are set too
/// early, or are not cleared.
fn overlapped() -> Vec<Entry> {
    let gather = || single(two(WORDS), vec![Step::new(Op::GatherWithFlags, 8); 2]);
    let scatter = || single(two(WORDS), vec![Step::new(Op::ScatterOnArrival, 8); 2]);
    let relaxed = Some(Fault::NoRelease);
    let unordered = Some(Fault::NoAcquire);
    [
        ("no release, a ready flag per chunk", relaxed, gather()),
        (
            "no acquire, an arrival counter per tile",
            unordered,
            scatter(),
        ),
        (
            "flags that are not cleared",
            None,
            gather().with_fault(InjectedFault::KeptWords),
        ),
        (
            "counters that are not cleared",
            None,
            scatter().with_fault(InjectedFault::KeptWords),
        ),
        (
            "a tile marked as done before it is written",
            None,
            scatter().with_fault(InjectedFault::EarlyTiles),
        ),
    ]
    .into_iter()
    .map(|(what, fault, scenario)| {
        Entry::control(&format!("control: {what}"), BOUND, fault, scenario)
    })
    .collect()
}

/// Controls of a mixture of experts: memory with weaker orders, launches that skip the handshake
/// before they overwrite memory, and programs that read rows while peers may write them.
fn experts() -> Vec<Entry> {
    // The steps IDLE and DISPATCHED of a micro-batch.
    let (idle, dispatched) = (Injected::Step(0), Injected::Step(3));
    let mut entries = Vec::new();
    for (layout, mixture) in [
        ("expert-major", Mixture::new(EXPERT_MAJOR)),
        ("rank-major", Mixture::new(RANK_MAJOR)),
    ] {
        for (what, fault, scenario) in [
            (
                "relaxed stores",
                Some(Fault::RelaxedStores),
                moe(mixture, two_rounds()),
            ),
            (
                "no acquire",
                Some(Fault::NoAcquire),
                moe(mixture, two_rounds()),
            ),
            (
                "device scope",
                Some(Fault::NarrowScope),
                moe(mixture, two_rounds()),
            ),
            (
                "dispatch twice without a handshake",
                None,
                moe(
                    mixture,
                    [
                        Launch::dispatch(0),
                        Launch::dispatch(1).with_fault(idle),
                        Launch::combine(1),
                    ],
                ),
            ),
            (
                "combine twice without a handshake",
                None,
                moe(
                    mixture,
                    [
                        Launch::dispatch(0),
                        Launch::combine(0),
                        Launch::combine(0).pass(1).with_fault(dispatched),
                    ],
                ),
            ),
            (
                "rows are read before they are received",
                None,
                moe(
                    mixture,
                    [
                        Launch::dispatch(0).send(),
                        Launch::dispatch(0)
                            .receive()
                            .with_fault(Injected::ReadsRows),
                    ],
                ),
            ),
            (
                "rows are read after combine",
                None,
                moe(
                    mixture,
                    [
                        Launch::dispatch(0),
                        Launch::combine(0),
                        Launch::dispatch(1).with_fault(Injected::ReadsRows),
                    ],
                ),
            ),
        ] {
            let name = format!("control: moe: {what}, {layout}");
            entries.push(Entry::control(&name, BOUND, fault, scenario).within(20));
        }
    }
    let layouts = [("expert-major", EXPERT_MAJOR), ("rank-major", RANK_MAJOR)];
    for (layout, flags) in layouts {
        for (what, fault, blocks) in [
            (
                "writes not complete before a barrier",
                Some(Fault::NoReleaseFences),
                Blocks::WeakLane,
            ),
            (
                "no fence after a wait",
                Some(Fault::NoAcquireFences),
                Blocks::WeakLane,
            ),
            (
                "a barrier wrongly declared cumulative",
                None,
                Blocks::Claimed,
            ),
        ] {
            entries.push(Entry::control(
                &format!("control: moe: {what}, 2 lanes, {layout}"),
                BOUND,
                fault,
                moe_of_lanes(flags, blocks),
            ));
        }
    }
    for (layout, flags) in layouts {
        entries.push(Entry::control(
            &format!("control: moe: rows of a round are read two rounds later, {layout}"),
            BOUND,
            None,
            staged_moe(flags, Some(Injected::ReadsRows)),
        ));
    }
    let bounded = Mixture {
        capacity: 1,
        ..Mixture::new(BOUNDED)
    };
    let launches = [
        Launch::dispatch(0),
        Launch::dispatch(1).with_fault(idle),
        Launch::combine(1),
    ];
    entries.push(Entry::control(
        "control: moe: dispatch twice without a handshake, bounded",
        BOUND,
        None,
        moe(bounded, launches),
    ));
    entries.push(Entry::control(
        "control: moe: rows that do not fit are sent",
        BOUND,
        None,
        moe_without_room(EXPERT_MAJOR),
    ));
    entries
}
