//! Runs many ranks under shuttle with random schedules and probabilistic concurrency testing.
//! Under shuttle, memory is sequentially consistent. These models are too large for loom's
//! exhaustive exploration.

#[cfg(shuttle)]
mod models {
    use fusewire_kernels::moe::MoeFlags;
    use fusewire_models::broken::Kernel;
    use fusewire_models::memory_image::{Config, MemoryImage, Parts};
    use fusewire_models::mixture::{Mixture, Tokens};
    use fusewire_models::moe::{Injected, Launch};
    use fusewire_models::report::{Bound, Entry};
    use fusewire_models::scenario::{Blocks, InjectedFault, Scenario};
    use fusewire_models::step::{Memory, Op, Step};
    use fusewire_models::windows;

    const ALL: Parts = Parts {
        packets: true,
        rounds: true,
        staging: true,
        channels: true,
        failure: true,
        words: true,
        signals: true,
        network: false,
        grid: true,
    };

    fn config(ranks: u32, lanes: u32) -> Config {
        Config {
            lanes,
            packet_slot: 256,
            channel_slot: 32,
            staging: 1024,
            user: 1024,
            ..Config::new(ranks, ALL)
        }
    }

    fn scenario(config: Config, blocks: Blocks, steps: Vec<Step>) -> Scenario {
        Scenario::new(MemoryImage::new(config), blocks, steps)
    }

    /// Returns a sequence of launches that uses every protocol and switches between protocols.
    fn program(ranks: u32) -> Vec<Step> {
        let packet = Step::new(Op::Packet, 6);
        let last = ranks - 1;
        vec![
            packet,
            Step::new(Op::TwoShot, 72),
            packet,
            Step::new(Op::PacketTwoShot, 30),
            Step::new(Op::Transfer(0, last), 72),
            Step::new(Op::Ring, 72),
            Step::new(Op::AllToAll, 8).memory(Memory::Staged),
            Step::new(Op::Broadcast(last), 16),
            packet.in_place(),
            Step::new(Op::ReduceScatter, 8).memory(Memory::Mixed),
            Step::new(Op::Transfer(last, 0), 0),
            Step::new(Op::AllGather, 8),
            Step::new(Op::RingPut, 1),
            Step::new(Op::Window(windows::Kernel::Rows), 1),
            Step::new(Op::Signal, 40).memory(Memory::Staged).in_place(),
            Step::new(Op::AllToAllV, 1),
            Step::new(Op::Gather(0), 8),
            Step::new(Op::Scatter(last), 8),
            Step::new(Op::Reduce(0), 72),
            Step::new(Op::AllGatherV, 9),
            Step::new(Op::Barrier, 0),
            packet,
        ]
    }

    fn models() -> Vec<Entry> {
        let mut entries = Vec::new();
        for (ranks, schedules) in [(2, 6000), (3, 3000), (5, 1000), (8, 300), (16, 60)] {
            for (sampling, bound) in [
                ("random", Bound::Random(schedules)),
                ("PCT", Bound::Pct(schedules, 3)),
            ] {
                entries.push(Entry::model(
                    &format!("a program of every operation, {ranks} ranks, {sampling}"),
                    bound,
                    scenario(config(ranks, 1), Blocks::Single, program(ranks)),
                ));
            }
        }
        for (machine, blocks) in [("emulator's", Blocks::Lanes), ("weak", Blocks::WeakLane)] {
            for (ranks, lanes, schedules) in [(2, 4, 1500), (3, 2, 1500), (4, 4, 500)] {
                entries.push(Entry::model(
                    &format!(
                        "a program of every operation, {ranks} ranks x {lanes} lanes, {machine} \
                         barrier"
                    ),
                    Bound::Random(schedules),
                    scenario(config(ranks, lanes), blocks, program(ranks)),
                ));
            }
        }
        entries.extend(blocks_and_queues());
        entries.extend(experts());
        entries.extend(staged_experts());
        entries.extend(masking_experts());
        for (name, op, count) in [
            ("packets", Op::Packet, 6),
            ("packets in two shots", Op::PacketTwoShot, 20),
            ("two-shot", Op::TwoShot, 72),
            ("barrier", Op::Barrier, 0),
        ] {
            entries.push(Entry::model(
                &format!("{name}, 4 ranks x 300 epochs"),
                Bound::Random(40),
                scenario(
                    config(4, 1),
                    Blocks::Single,
                    vec![Step::new(op, count); 300],
                ),
            ));
            let mut aborted =
                scenario(config(4, 1), Blocks::Single, vec![Step::new(op, count); 6]).may_fail();
            aborted.host_aborts = true;
            entries.push(Entry::model(
                &format!("the host aborts, {name}, 4 ranks x 6"),
                Bound::Random(1500),
                aborted,
            ));
            let step = Step::new(op, count).timeouts([1, u64::MAX, 0, 0]);
            entries.push(
                Entry::model(
                    &format!("the timeout of rank 0 expires, {name}, 4 ranks x 6"),
                    Bound::Random(1500),
                    scenario(config(4, 1), Blocks::Single, vec![step; 6]).may_fail(),
                )
                .tick(100_000),
            );
        }
        entries
    }

    /// Barriers of many blocks, and queues whose rings wrap many times.
    fn blocks_and_queues() -> Vec<Entry> {
        let step = |kernel, count| Step::new(Op::Window(kernel), count);
        let blocks = Config {
            blocks: 6,
            ..config(1, 1)
        };
        let queue = |ring, lanes| Config {
            ring,
            ..config(2, lanes)
        };
        let exchange = || vec![step(windows::Kernel::Exchange, 1); 30];
        vec![
            Entry::model(
                "barriers, last and words of 6 blocks, 15 launches",
                Bound::Random(1000),
                scenario(
                    blocks,
                    Blocks::Single,
                    [
                        windows::Kernel::Grid,
                        windows::Kernel::Last,
                        windows::Kernel::BlockWords,
                    ]
                    .map(|kernel| step(kernel, 1))
                    .repeat(5),
                ),
            ),
            Entry::model(
                "a stream of batches, a ring of 8 slots, 60 batches",
                Bound::Random(1000),
                scenario(
                    queue(8, 1),
                    Blocks::Single,
                    vec![step(windows::Kernel::Stream, 60)],
                ),
            ),
            Entry::model(
                "both ranks send batches, a ring of 8 slots, 30 epochs",
                Bound::Random(1000),
                scenario(queue(8, 1), Blocks::Single, exchange()),
            ),
            Entry::model(
                "both ranks send batches, 2 ranks x 2 lanes, weak barrier, 30 epochs",
                Bound::Random(300),
                scenario(queue(8, 2), Blocks::WeakLane, exchange()),
            ),
        ]
    }

    const LAYOUTS: [(&str, MoeFlags); 3] = [
        ("expert-major", MoeFlags::EXPERT_MAJOR),
        (
            "expert-major, bounded",
            MoeFlags::EXPERT_MAJOR.with(MoeFlags::BOUNDED),
        ),
        ("rank-major", MoeFlags(0)),
    ];

    /// Returns launches of a mixture of experts with several tokens, experts and selections.
    fn moe(layout: MoeFlags, config: Config, blocks: Blocks, launches: &[Launch]) -> Scenario {
        let mixture = Mixture {
            local_experts: 2,
            top_k: 3,
            max_tokens: 5,
            capacity: 15 * config.ranks,
            layout,
            batches: 2,
            tokens: Tokens::Varied,
            staging: 0,
        };
        moe_of(mixture, config, blocks, launches)
    }

    fn moe_of(mixture: Mixture, config: Config, blocks: Blocks, launches: &[Launch]) -> Scenario {
        let config = Config {
            mixture: Some(mixture),
            ..config
        };
        let steps = launches
            .iter()
            .map(|launch| Step::new(Op::Moe(*launch), 0))
            .collect();
        scenario(config, blocks, steps)
    }

    /// Dispatch and combine in every order that is possible, in one launch and in halves, of two
    /// micro-batches.
    fn experts() -> Vec<Entry> {
        let mut launches = Vec::new();
        for round in 0..6 {
            let (dispatch, combine) = (Launch::dispatch(round), Launch::combine(round));
            let (next, other) = (Launch::dispatch(round + 1), Launch::combine(round + 1));
            launches.extend([
                dispatch,
                combine,
                combine.pass(1),
                dispatch.send(),
                next.of(1).send(),
                dispatch.receive(),
                combine.send(),
                next.of(1).receive(),
                other.of(1).send(),
                combine.receive(),
                next.send(),
                other.of(1).receive(),
                next.receive(),
            ]);
        }
        let mut entries = Vec::new();
        for (layout, flags) in LAYOUTS {
            for (ranks, blocks, lanes, schedules) in
                [(3, 1, 1, 300), (4, 2, 1, 100), (2, 1, 4, 40), (3, 1, 2, 40)]
            {
                let machine = if lanes > 1 {
                    Blocks::Lanes
                } else {
                    Blocks::Single
                };
                let config = Config {
                    blocks,
                    ..config(ranks, lanes)
                };
                entries.push(Entry::model(
                    &format!(
                        "moe: dispatch and combine, {layout}, {ranks} ranks x {blocks} blocks x \
                         {lanes} lanes"
                    ),
                    Bound::Random(schedules),
                    moe(flags, config, machine, &launches),
                ));
            }
        }
        entries
    }

    /// Returns a mixture of experts with staging for `staging` tokens of a block.
    fn staged_mixture(layout: MoeFlags, ranks: u32, staging: u32) -> Mixture {
        Mixture {
            local_experts: 2,
            top_k: 3,
            max_tokens: 7,
            capacity: 21 * ranks,
            layout,
            batches: 1,
            tokens: Tokens::Varied,
            staging,
        }
    }

    /// Returns launches of a mixture of experts with staging for two tokens of a block. Each
    /// operation has as many rounds as its block with the most tokens may need.
    fn staged_moe(layout: MoeFlags, config: Config, blocks: Blocks) -> Scenario {
        let rounds = 7usize.div_ceil(config.blocks as usize).div_ceil(2);
        let mut launches = Vec::new();
        for round in 1..4 {
            let (dispatch, combine) = (Launch::dispatch(round), Launch::combine(round));
            launches.extend(dispatch.staged(rounds));
            launches.extend(combine.staged(rounds));
            if round == 2 {
                launches.extend(combine.pass(1).staged(rounds));
                launches.extend(dispatch.staged(rounds));
            }
        }
        let mixture = staged_mixture(layout, config.ranks, 2);
        moe_of(mixture, config, blocks, &launches)
    }

    /// Dispatch and combine in rounds.
    fn staged_experts() -> Vec<Entry> {
        let mut entries = Vec::new();
        for (layout, flags) in LAYOUTS {
            for (ranks, blocks, lanes, schedules) in
                [(3, 1, 1, 200), (4, 2, 1, 60), (2, 1, 4, 20), (3, 2, 2, 20)]
            {
                let machine = match lanes {
                    1 => Blocks::Single,
                    _ => Blocks::Lanes,
                };
                let config = Config {
                    blocks,
                    ..config(ranks, lanes)
                };
                let name = format!(
                    "moe: rounds, {layout}, {ranks} ranks x {blocks} blocks x {lanes} lanes"
                );
                let scenario = staged_moe(flags, config, machine);
                entries.push(Entry::model(&name, Bound::Random(schedules), scenario));
            }
        }
        entries
    }

    /// Returns launches of a mixture of experts whose ranks mask each other if one is late, which
    /// may happen in every wait.
    fn masking_moe(
        layout: MoeFlags,
        config: Config,
        blocks: Blocks,
        launches: &[Launch],
    ) -> Scenario {
        let mut scenario = moe(layout.with(MoeFlags::MASK), config, blocks, launches);
        for step in &mut scenario.steps {
            *step = step.timeouts([1; 4]);
        }
        scenario
    }

    /// Ranks of a mixture of experts that may mask each other, in launches of one or two parts.
    fn masking_experts() -> Vec<Entry> {
        let mut launches = Vec::new();
        for round in 0..3 {
            let (dispatch, combine) = (Launch::dispatch(round), Launch::combine(round));
            launches.extend([
                dispatch.wait(),
                dispatch.interpret(),
                combine.wait(),
                combine.interpret(),
            ]);
        }
        let mut entries = Vec::new();
        for (layout, flags) in LAYOUTS {
            for (ranks, blocks, lanes, schedules) in
                [(3, 1, 1, 300), (3, 2, 1, 300), (3, 2, 4, 40), (4, 1, 2, 40)]
            {
                let machine = match lanes {
                    1 => Blocks::Single,
                    _ => Blocks::Lanes,
                };
                let config = Config {
                    blocks,
                    ..config(ranks, lanes)
                };
                let name = format!(
                    "moe: late ranks are masked, {layout}, {ranks} ranks x {blocks} blocks x \
                     {lanes} lanes"
                );
                let scenario = masking_moe(flags, config, machine, &launches);
                let entry = Entry::model(&name, Bound::Random(schedules), scenario);
                entries.push(entry.tick(100_000));
            }
        }
        entries
    }

    /// Launches of a mixture of experts whose blocks interpret what has arrived by different masks.
    fn launches_with_two_masks() -> Vec<Entry> {
        let control = |(layout, flags): (&str, MoeFlags)| {
            let config = Config {
                blocks: 2,
                ..config(3, 1)
            };
            let launches = [Launch::dispatch(1), Launch::combine(1)];
            let scenario = masking_moe(flags, config, Blocks::Single, &launches);
            let name = format!("control: moe: blocks with different masks, {layout}");
            Entry::control(&name, Bound::Random(20_000), None, scenario).tick(100_000)
        };
        LAYOUTS.map(control).into()
    }

    /// Launches of a mixture of experts that skip the handshake before they overwrite memory.
    fn broken_experts() -> Vec<Entry> {
        let (idle, dispatched) = (Injected::Step(0), Injected::Step(3));
        let bound = Bound::Random(20_000);
        let mut entries = Vec::new();
        for (layout, flags) in LAYOUTS {
            for (what, launches) in [
                (
                    "dispatch",
                    [
                        Launch::dispatch(1),
                        Launch::dispatch(2).with_fault(idle),
                        Launch::combine(2),
                    ],
                ),
                (
                    "combine",
                    [
                        Launch::dispatch(1),
                        Launch::combine(1),
                        Launch::combine(1).pass(1).with_fault(dispatched),
                    ],
                ),
            ] {
                entries.push(Entry::control(
                    &format!("control: moe: {what} twice without a handshake, {layout}"),
                    bound,
                    None,
                    moe(flags, config(3, 1), Blocks::Single, &launches),
                ));
            }
        }
        for (layout, flags) in LAYOUTS {
            // In one round, so that both combines use the same region.
            let combine = Launch::combine(1);
            let mut launches = Launch::dispatch(1).staged(1);
            launches.extend(combine.staged(1));
            launches.push(combine.pass(1).staged(1)[0].with_fault(dispatched));
            let mixture = staged_mixture(flags, 3, 7);
            entries.push(Entry::control(
                &format!("control: moe: rounds of combine twice without a handshake, {layout}"),
                bound,
                None,
                moe_of(mixture, config(3, 1), Blocks::Single, &launches),
            ));
        }
        entries
    }

    fn controls() -> Vec<Entry> {
        let bound = Bound::Random(20_000);
        let packets = |blocks| scenario(config(3, 1), blocks, vec![Step::new(Op::Packet, 6); 6]);
        let channel = || {
            let steps = vec![Step::new(Op::Transfer(0, 1), 400); 2];
            scenario(config(2, 1), Blocks::Single, steps)
        };
        let stream = Step::new(Op::Window(windows::Kernel::Stream), 20);
        let queue = Config {
            ring: 8,
            ..config(2, 1)
        };
        let queue = scenario(queue, Blocks::Single, vec![stream]);
        let broken = |kernel| {
            let steps = vec![Step::new(Op::Broken(kernel), 8); 4];
            scenario(config(3, 1), Blocks::Single, steps)
        };
        let mut entries = vec![
            (
                "no second slot set, one line",
                packets(Blocks::Single).with_fault(InjectedFault::OneSlotSet),
            ),
            (
                "no second slot set, two-packet units",
                packets(Blocks::SingleLaneGpu).with_fault(InjectedFault::OneSlotSet),
            ),
            (
                "no credits",
                channel().with_fault(InjectedFault::FreeCredits),
            ),
            (
                "no credits, queue",
                queue.with_fault(InjectedFault::FreeCredits),
            ),
            (
                "an absent rank",
                packets(Blocks::Single).with_fault(InjectedFault::Absent),
            ),
            (
                "reads user memory after done",
                broken(Kernel::ReadsAfterDone),
            ),
            ("no done signal", broken(Kernel::NoDone)),
            ("reads user memory before ready", broken(Kernel::NoReady)),
            ("a rank returns without done", broken(Kernel::Leaves)),
        ];
        entries
            .drain(..)
            .map(|(what, scenario)| {
                Entry::control(&format!("control: {what}"), bound, None, scenario)
            })
            .chain(broken_experts())
            .chain(launches_with_two_masks())
            .chain([Entry::model(
                "the correct kernel of the last controls",
                Bound::Random(2000),
                broken(Kernel::Correct),
            )])
            .collect()
    }

    /// Returns all models and controls.
    pub(crate) fn entries() -> Vec<Entry> {
        models().into_iter().chain(controls()).collect()
    }
}

#[cfg(shuttle)]
fn main() -> std::process::ExitCode {
    fusewire_models::report::run("shuttle", models::entries())
}

#[cfg(not(shuttle))]
fn main() {
    println!("skipped: needs --cfg shuttle, see tests/models/run.sh");
}
