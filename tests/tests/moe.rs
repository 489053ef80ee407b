//! Tests mixture-of-experts dispatch and combine on ranks that are threads or processes.

use core::time::Duration;
use std::error::Error;

use fusewire::testing::GridMode;
use fusewire::{
    Bf16, Communicator, DType, Dispatched, Element, F16, GraphExec, Moe, MoeConfig, MoeLayout,
    MoePayload, MoeScales, ReduceOp,
};
use fusewire_tests::device::grid_mode;
use fusewire_tests::moe::{
    Buffers, Expected, Expert, GROUP, Inputs, LAYOUTS, MoeCase, PAYLOADS, Placement, Routing,
    check_dispatched, combined, expected, inputs, list, outputs, payload, results, run,
};
use fusewire_tests::oracle::narrow;
use fusewire_tests::process::Host;
use fusewire_tests::rng::Rng;
use fusewire_tests::runner::{Processes, Setup, Threads};
use fusewire_tests::skip::{full, skip};

/// An error of the library, or a description of a wrong result.
type AnyError = Box<dyn Error + Send + Sync>;

/// Runs `test` on every rank. Panics with the errors of all ranks.
fn all(setup: Setup, test: impl Fn(&Communicator) -> Result<(), AnyError> + Sync) {
    let ranks = Threads.each(&setup, |comm| {
        test(&comm).map_err(|error| format!("rank {}: {error}", comm.rank()))
    });
    let wrong: Vec<String> = ranks.into_iter().filter_map(Result::err).collect();
    assert!(wrong.is_empty(), "{setup:?}:\n{}", wrong.join("\n"));
}

/// Runs each case for `rounds` rounds.
fn run_cases(setup: Setup, cases: &[MoeCase], rounds: usize) {
    all(setup, |comm| {
        for case in cases {
            run(comm, case, rounds)?;
        }
        Ok(())
    });
}

/// Returns every `step`-th case of the list, or all cases in a full run.
fn sample(ranks: u32, step: usize) -> Vec<MoeCase> {
    let step = if full() { 1 } else { step };
    list(ranks).into_iter().step_by(step).collect()
}

/// Runs `test`, which must fail on every rank. Returns the messages of the ranks.
fn failing(
    setup: Setup,
    test: impl Fn(&Communicator) -> fusewire::Result<()> + Sync,
) -> Vec<String> {
    let ranks = Threads.each(&setup, |comm| match test(&comm) {
        Ok(()) => Err(format!("rank {} succeeds", comm.rank())),
        Err(error) => Ok(error.to_string()),
    });
    ranks
        .into_iter()
        .map(|rank| rank.unwrap_or_else(|wrong| panic!("{setup:?}: {wrong}")))
        .collect()
}

/// Checks that every message contains `text`.
#[track_caller]
fn assert_all_contain(messages: &[String], text: &str) {
    for (rank, message) in messages.iter().enumerate() {
        let found = message.to_lowercase().contains(text);
        assert!(found, "rank {rank}: {message:?} lacks {text:?}");
    }
}

/// Returns true if launches can be captured. Skips the test otherwise.
fn can_capture() -> bool {
    let can_capture = grid_mode() != GridMode::MultiRankGrid;
    if !can_capture {
        skip(
            "separate",
            "launches in a multi-rank grid cannot be captured",
        );
    }
    can_capture
}

/// Captures `calls` as a graph. Returns the graph and the result of `calls`.
fn capture<R>(
    comm: &Communicator,
    calls: impl FnOnce() -> fusewire::Result<R>,
) -> fusewire::Result<(GraphExec, R)> {
    comm.stream().begin_capture()?;
    let called = calls();
    let graph = comm.stream().end_capture()?;
    let called = called?;
    Ok((graph.instantiate()?, called))
}

/// Returns one case for each layout and payload.
fn formats(case: &MoeCase) -> Vec<MoeCase> {
    let mut cases = Vec::new();
    for layout in LAYOUTS {
        for payload in PAYLOADS {
            cases.push(MoeCase {
                layout,
                payload,
                ..case.clone()
            });
        }
    }
    cases
}

/// A case with rows of two groups, so that every payload supports it.
fn two_groups() -> MoeCase {
    MoeCase {
        uneven: true,
        ..MoeCase::new(7, 3, 2 * GROUP, 9)
    }
}

#[test]
fn every_number_of_ranks() {
    for ranks in 1..=8 {
        let cases = sample(ranks, if ranks <= 4 { 1 } else { 5 });
        run_cases(Setup::new(ranks), &cases, 4);
    }
}

#[test]
fn several_blocks() {
    let setup = Setup {
        blocks: 3,
        ..Setup::new(3)
    };
    run_cases(setup, &sample(3, 1), 3);
    // The layer may have fewer blocks than the communicator.
    for (of_comm, blocks) in [(3, 1), (3, 2), (5, 5)] {
        let setup = Setup {
            blocks: of_comm,
            ..Setup::new(2)
        };
        let mut cases = formats(&two_groups());
        cases.iter_mut().for_each(|case| case.blocks = blocks);
        run_cases(setup, &cases, 3);
    }
}

#[test]
fn lanes_as_threads() {
    let shapes = [(1, 32, 0, 1), (2, 32, 8, 1), (3, 32, 0, 2), (2, 64, 16, 1)];
    for (ranks, lanes, warp, blocks) in shapes {
        let setup = Setup {
            lanes,
            warp,
            blocks,
            ..Setup::new(ranks)
        };
        let mut cases = formats(&MoeCase {
            routing: Routing::Masked,
            ..two_groups()
        });
        // More tokens and experts than lanes, and fewer elements than lanes have vectors.
        cases.extend(LAYOUTS.map(|layout| MoeCase {
            layout,
            routing: Routing::Skewed,
            ..MoeCase::new(70, 2, 8, 67)
        }));
        run_cases(setup, &cases, 2);
        if full() {
            run_cases(setup, &list(ranks), 2);
        }
    }
}

#[test]
fn ranks_on_a_network() {
    for (ranks, team, blocks, lanes, step) in [
        (2, 1, 1, 1, 3),
        (3, 1, 1, 1, 5),
        (4, 2, 1, 1, 5),
        (2, 1, 3, 1, 7),
        (2, 1, 1, 32, 31),
    ] {
        let setup = Setup {
            team,
            blocks,
            lanes,
            ..Setup::new(ranks)
        };
        run_cases(setup, &sample(ranks, step), 3);
    }
}

#[test]
fn ranks_as_processes() {
    let run_rank = |comm: Communicator| -> Result<String, String> {
        for case in list(comm.size()).iter().step_by(4) {
            run(&comm, case, 4)?;
        }
        Ok("done".to_owned())
    };
    if Processes::child_of_each(|comm, _| run_rank(comm)) {
        return;
    }
    if grid_mode() == GridMode::MultiRankGrid {
        return skip("separate", "ranks of a multi-rank grid are threads");
    }
    for (host, ranks, blocks) in [(Host::Parent, 2, 1), (Host::RankZero, 3, 2)] {
        let processes = Processes {
            test: "ranks_as_processes",
            host,
        };
        let setup = Setup {
            blocks,
            ..Setup::new(ranks)
        };
        let timeout = Duration::from_secs(120);
        if let Err(wrong) = processes.each(&setup, "", timeout) {
            panic!("{setup:?}: {wrong}");
        }
    }
}

/// Every setting gives the bits of the reference, so all settings give equal bits.
#[test]
fn results_do_not_depend_on_blocks_lanes_layout_and_ranks() {
    let case = MoeCase {
        routing: Routing::Distinct,
        uneven: false,
        ..two_groups()
    };
    for ranks in [1, 2, 3] {
        for (blocks, lanes) in [(1, 1), (2, 1), (4, 1), (1, 32), (2, 32)] {
            let setup = Setup {
                blocks,
                lanes,
                ..Setup::new(ranks)
            };
            run_cases(setup, &formats(&case), 2);
        }
    }
}

#[test]
fn ranks_without_tokens() {
    let mut cases = Vec::new();
    for routing in [Routing::Empty, Routing::SomeEmpty] {
        for halves in [false, true] {
            cases.extend(formats(&MoeCase {
                routing,
                halves,
                ..two_groups()
            }));
        }
    }
    for blocks in [1, 3] {
        let setup = Setup {
            blocks,
            ..Setup::new(3)
        };
        run_cases(setup, &cases, 3);
    }
}

/// A layer with its memory on a rank.
struct Layer<'a> {
    comm: &'a Communicator,
    case: MoeCase,
    moe: Moe,
    buffers: Buffers,
}

impl<'a> Layer<'a> {
    fn new(comm: &'a Communicator, case: &MoeCase) -> fusewire::Result<Self> {
        let moe = Moe::new(comm, &case.config())?;
        let buffers = Buffers::new(comm, case, moe.info())?;
        Ok(Self {
            comm,
            case: case.clone(),
            moe,
            buffers,
        })
    }

    /// Returns the inputs of this rank in round `round`.
    fn inputs(&self, round: usize) -> Inputs {
        inputs(&self.case, self.comm.rank(), round)
    }

    /// Returns the expected results of the dispatch of round `round`.
    fn expected(&self, round: usize) -> Expected {
        expected(&self.case, self.comm.size(), self.comm.rank(), round)
    }

    /// Dispatches the tokens of round `round`.
    fn dispatch(&self, round: usize) -> fusewire::Result<Dispatched> {
        let it = self.buffers.write(&self.case, &self.inputs(round))?;
        self.moe.dispatch(&it.x, &it.ids, &it.weights)
    }

    /// Compares the results of the dispatch of round `round` with the expected results.
    fn check_dispatched(&self, dispatched: &Dispatched, round: usize) -> Result<(), String> {
        let expected = self.expected(round);
        check_dispatched(&self.case, self.moe.info(), dispatched, &expected, false)
            .map_err(|wrong| format!("{:?}, round {round}: {wrong}", self.case))
    }

    /// Writes the results of `expert` for the rows of round `round`.
    fn write_results(&self, round: usize, expert: Expert) -> fusewire::Result<()> {
        let count = self.moe.info().results;
        let y = results(&self.case, &self.expected(round), count, expert);
        self.buffers.y.copy_from_bytes(&y)
    }

    /// Combines the results of a dispatch.
    fn combine(&self, dispatched: &Dispatched, round: usize) -> fusewire::Result<()> {
        let it = self
            .buffers
            .arguments(&self.case, self.inputs(round).tokens)?;
        self.moe.combine(&self.buffers.y, dispatched, &it.out)
    }

    /// Compares the results of the tokens of round `round` with the expected results.
    fn check(&self, round: usize, expert: Expert) -> Result<(), String> {
        self.buffers
            .check(
                &self.case,
                &outputs(&self.case, &self.inputs(round), expert),
            )
            .map_err(|wrong| format!("{:?}, round {round}: {wrong}", self.case))
    }
}

/// Replays a graph of dispatch and combine `rounds` times. Each replay has other tokens, experts,
/// weights and, with [`Placement::Rotating`], another placement. The rows that an expert gets are
/// its results.
fn replay(comm: &Communicator, case: &MoeCase, rounds: usize) -> Result<(), AnyError> {
    let mut layer = Layer::new(comm, case)?;
    let tokens = layer.inputs(0).tokens;
    let it = layer.buffers.arguments(case, tokens)?;
    let (graph, dispatched) = capture(comm, || {
        let dispatched = layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
        layer.moe.combine(&dispatched.x, &dispatched, &it.out)?;
        Ok(dispatched)
    })?;
    let routings = [
        Routing::Uniform,
        Routing::Masked,
        Routing::OneExpert,
        Routing::Skewed,
        Routing::Distinct,
    ];
    for round in 0..rounds {
        layer.case.routing = routings[round % routings.len()];
        if case.placement == Placement::Rotating {
            let words = layer.case.placement_words(comm.size(), round);
            layer.moe.placement().copy_from(&words)?;
        }
        let inputs = layer.inputs(round);
        assert_eq!(
            inputs.tokens, tokens,
            "a graph has a fixed number of tokens"
        );
        layer.buffers.write(&layer.case, &inputs)?;
        graph.run(comm.stream())?;
        layer.check_dispatched(&dispatched, round)?;
        layer.check(round, Expert::Identity)?;
    }
    drop((graph, dispatched));
    layer.moe.free()?;
    Ok(())
}

#[test]
fn a_graph_is_replayed_with_other_routings() {
    if !can_capture() {
        return;
    }
    let case = MoeCase::new(5, 2, 16, 9);
    for (ranks, blocks, rounds) in [(1, 1, 100), (2, 1, 1000), (3, 1, 1000), (3, 3, 300)] {
        let setup = Setup {
            blocks,
            ..Setup::new(ranks)
        };
        all(setup, |comm| replay(comm, &case, rounds));
    }
    let aligned = MoeCase {
        alignment: 8,
        input: DType::F32,
        ..case.clone()
    };
    all(Setup::new(2), |comm| replay(comm, &aligned, 100));
    let on_network = Setup {
        team: 1,
        ..Setup::new(3)
    };
    all(on_network, |comm| replay(comm, &case, 20));
    let lanes = Setup {
        lanes: 32,
        ..Setup::new(2)
    };
    all(lanes, |comm| replay(comm, &case, 20));
}

#[test]
fn the_placement_changes_between_replays() {
    if !can_capture() {
        return;
    }
    for local_experts in [0, 4] {
        let case = MoeCase {
            placement: Placement::Rotating,
            local_experts,
            ..MoeCase::new(7, 3, 16, 9)
        };
        for ranks in [2, 3] {
            all(Setup::new(ranks), |comm| replay(comm, &case, 200));
        }
    }
}

/// Returns the result in row `row` of rank `rank`. The values are exact in every input type.
fn constant_row(case: &MoeCase, rank: u32, row: usize) -> Vec<u8> {
    let values: Vec<f32> = (0..case.hidden)
        .map(|i| ((rank as usize * 31 + row * 7 + i) % 251) as f32 - 125.0)
        .collect();
    narrow(case.input, &values)
}

/// Replays a graph while the results of the experts stay the same and depend only on rank and row,
/// so that the results of the tokens show which rows combine reads.
fn replay_with_constant_results(
    comm: &Communicator,
    case: &MoeCase,
    rounds: usize,
) -> Result<(), AnyError> {
    let (rank, ranks) = (comm.rank(), comm.size());
    let layer = Layer::new(comm, case)?;
    let rows = 0..layer.moe.info().results;
    let y: Vec<u8> = rows.flat_map(|row| constant_row(case, rank, row)).collect();
    layer.buffers.y.copy_from_bytes(&y)?;
    let it = layer.buffers.arguments(case, layer.inputs(0).tokens)?;
    let (graph, dispatched) = capture(comm, || {
        let dispatched = layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
        layer.moe.combine(&layer.buffers.y, &dispatched, &it.out)?;
        Ok(dispatched)
    })?;
    let top_k = case.top_k as usize;
    for round in 0..rounds {
        let inputs = layer.inputs(round);
        layer.buffers.write(case, &inputs)?;
        graph.run(comm.stream())?;
        if case.layout == MoeLayout::ExpertMajor {
            // In rank-major order, peers may overwrite the rows after combine.
            layer.check_dispatched(&dispatched, round)?;
        }
        // Rank and row of the result of each selection of this rank.
        let mut places = vec![None; inputs.ids.len()];
        for owner in 0..ranks {
            let expected = expected(case, ranks, owner, round);
            for row in expected.rows.iter().filter(|row| row.source == rank) {
                for it in &row.selections {
                    places[row.token * top_k + it.k] = Some((owner, it.result));
                }
            }
        }
        let mut out = Vec::new();
        for token in 0..inputs.tokens {
            out.extend(combined(case, &inputs, token, |k| {
                let place = places[token * top_k + k];
                let (owner, row) = place.expect("a rank receives the selection");
                constant_row(case, owner, row)
            }));
        }
        let checked = layer.buffers.check(case, &out);
        checked.map_err(|wrong| format!("{case:?}, round {round}: {wrong}"))?;
    }
    drop((graph, dispatched));
    layer.moe.free()?;
    Ok(())
}

#[test]
fn combine_reads_the_row_of_each_selection() {
    if !can_capture() {
        return;
    }
    for routing in [Routing::Masked, Routing::Duplicates] {
        let case = MoeCase {
            routing,
            ..MoeCase::new(7, 4, GROUP, 9)
        };
        for case in formats(&case) {
            let test = |comm: &Communicator| replay_with_constant_results(comm, &case, 20);
            all(Setup::new(3), test);
            let setup = Setup {
                blocks: 2,
                ..Setup::new(2)
            };
            all(setup, test);
        }
    }
}

/// Runs two micro-batches whose halves are interleaved.
fn interleave(comm: &Communicator, case: &MoeCase, rounds: usize) -> Result<(), AnyError> {
    let layer = Layer::new(comm, case)?;
    let moe = &layer.moe;
    let other = Buffers::new(comm, case, moe.info())?;
    let buffers = [&layer.buffers, &other];
    let rank = comm.rank();
    for round in 0..rounds {
        // The micro-batches have different tokens, in a different order in every other round.
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        let number = |batch: usize| 2 * round + batch;
        let inputs = [0, 1].map(|batch| inputs(case, rank, number(batch)));
        let expert = |batch: usize| Expert::Affine(number(batch) as f32);
        let mut dispatched = [None, None];
        let mut outs = [None, None];
        for batch in order {
            let it = buffers[batch].write(case, &inputs[batch])?;
            let sent = moe
                .micro_batch(batch)?
                .dispatch_send(&it.x, &it.ids, &it.weights)?;
            (dispatched[batch], outs[batch]) = (Some(sent), Some(it.out));
        }
        let dispatched = dispatched.map(|it| it.expect("sent"));
        let outs = outs.map(|it| it.expect("sent"));
        for batch in [0, 1] {
            moe.micro_batch(batch)?
                .dispatch_receive(&dispatched[batch])?;
        }
        comm.synchronize()?;
        for batch in [0, 1] {
            let expected = expected(case, comm.size(), rank, number(batch));
            check_dispatched(case, moe.info(), &dispatched[batch], &expected, false)
                .map_err(|wrong| format!("{case:?}, round {round}, batch {batch}: {wrong}"))?;
            let y = results(case, &expected, moe.info().results, expert(batch));
            buffers[batch].y.copy_from_bytes(&y)?;
        }
        for batch in order {
            let y = &buffers[batch].y;
            moe.micro_batch(batch)?
                .combine_send(y, &dispatched[batch])?;
        }
        for batch in [0, 1] {
            let out = &outs[batch];
            moe.micro_batch(batch)?
                .combine_receive(&dispatched[batch], out)?;
        }
        comm.synchronize()?;
        for batch in [0, 1] {
            buffers[batch]
                .check(case, &outputs(case, &inputs[batch], expert(batch)))
                .map_err(|wrong| format!("{case:?}, round {round}, batch {batch}: {wrong}"))?;
        }
    }
    layer.moe.free()?;
    Ok(())
}

#[test]
fn two_micro_batches_are_interleaved() {
    let case = MoeCase {
        in_flight: 2,
        ..two_groups()
    };
    for (ranks, blocks, lanes, team) in [
        (1, 1, 1, 0),
        (2, 1, 1, 0),
        (3, 3, 1, 0),
        (2, 1, 32, 0),
        (3, 1, 1, 1),
    ] {
        let setup = Setup {
            blocks,
            lanes,
            team,
            ..Setup::new(ranks)
        };
        all(setup, |comm| {
            for case in formats(&case) {
                interleave(comm, &case, if lanes == 1 { 6 } else { 2 })?;
            }
            Ok(())
        });
    }
}

/// Both micro-batches also support the operations that are not split.
#[test]
fn micro_batches_alternate() {
    let case = MoeCase {
        in_flight: 2,
        ..two_groups()
    };
    all(Setup::new(3), |comm| {
        for case in formats(&case) {
            let layer = Layer::new(comm, &case)?;
            for round in 0..6 {
                let batch = layer.moe.micro_batch(round % 2)?;
                let it = layer.buffers.write(&case, &layer.inputs(round))?;
                let dispatched = batch.dispatch(&it.x, &it.ids, &it.weights)?;
                comm.synchronize()?;
                layer.check_dispatched(&dispatched, round)?;
                let expert = Expert::Affine(1.5);
                layer.write_results(round, expert)?;
                batch.combine(&layer.buffers.y, &dispatched, &it.out)?;
                comm.synchronize()?;
                layer.check(round, expert)?;
            }
            assert!(layer.moe.micro_batch(2).is_err(), "there are two");
            layer.moe.free()?;
        }
        Ok(())
    });
}

#[test]
fn a_dispatch_may_follow_a_dispatch() {
    for (ranks, team) in [(1, 0), (3, 0), (2, 1)] {
        let setup = Setup {
            team,
            ..Setup::new(ranks)
        };
        all(setup, |comm| {
            for case in formats(&two_groups()) {
                let layer = Layer::new(comm, &case)?;
                for rounds in [0..2, 2..5, 5..6] {
                    let round = rounds.end - 1;
                    let mut dispatched = None;
                    for round in rounds {
                        dispatched = Some(layer.dispatch(round)?);
                    }
                    let dispatched = dispatched.ok_or("no rounds")?;
                    comm.synchronize()?;
                    layer.check_dispatched(&dispatched, round)?;
                    let expert = Expert::Affine(-1.0);
                    layer.write_results(round, expert)?;
                    layer.combine(&dispatched, round)?;
                    comm.synchronize()?;
                    layer.check(round, expert)?;
                }
                layer.moe.free()?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_dispatch_may_be_combined_twice() {
    for (ranks, team) in [(1, 0), (3, 0), (2, 1)] {
        let setup = Setup {
            team,
            ..Setup::new(ranks)
        };
        all(setup, |comm| {
            for case in formats(&two_groups()) {
                let layer = Layer::new(comm, &case)?;
                for round in 0..3 {
                    let dispatched = layer.dispatch(round)?;
                    for repetition in 0..3 {
                        let expert = Expert::Affine(repetition as f32);
                        layer.write_results(round, expert)?;
                        layer.combine(&dispatched, round)?;
                        comm.synchronize()?;
                        layer.check(round, expert)?;
                    }
                }
                layer.moe.free()?;
            }
            Ok(())
        });
    }
}

#[test]
fn an_expert_that_does_not_exist_is_named_on_all_ranks() {
    for id in [6, 4711, i32::MAX] {
        for layout in LAYOUTS {
            for (blocks, lanes, team) in [(1, 1, 0), (3, 1, 0), (1, 32, 0), (1, 1, 1)] {
                let setup = Setup {
                    blocks,
                    lanes,
                    team,
                    ..Setup::new(3)
                };
                let case = MoeCase {
                    layout,
                    ..MoeCase::new(6, 2, 16, 9)
                };
                let messages = failing(setup, |comm| {
                    let layer = Layer::new(comm, &case)?;
                    let mut inputs = layer.inputs(0);
                    if comm.rank() == 1 {
                        inputs.ids[13] = id;
                    }
                    let it = layer.buffers.write(&case, &inputs)?;
                    layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
                    comm.synchronize()
                });
                assert_all_contain(&messages, &id.to_string());
                assert_all_contain(&messages, "rank 1");
                assert_all_contain(&messages, "expert");
            }
        }
    }
}

#[test]
fn rows_that_exceed_the_capacity_fail_on_all_ranks() {
    // In round 0, all selections are the last expert, which is on the last rank.
    let (ranks, tokens, top_k) = (3, 5, 2);
    let rows = ranks as usize * tokens * top_k as usize;
    for alignment in [1, 8] {
        let needed = rows.next_multiple_of(alignment);
        let case = |capacity| MoeCase {
            routing: Routing::OneExpert,
            capacity: Some(capacity),
            alignment,
            ..MoeCase::new(6, top_k, 16, tokens)
        };
        for (blocks, lanes, team) in [(1, 1, 0), (3, 1, 0), (1, 32, 0), (1, 1, 1)] {
            let setup = Setup {
                blocks,
                lanes,
                team,
                ..Setup::new(ranks)
            };
            run_cases(setup, &[case(needed)], 3);
            let messages = failing(setup, |comm| {
                let layer = Layer::new(comm, &case(needed - alignment))?;
                layer.dispatch(0)?;
                comm.synchronize()
            });
            assert_all_contain(&messages, "capacity");
        }
    }
}

/// Calls that fail because an operation before them is missing.
#[derive(Clone, Copy, Debug)]
enum WrongOrder {
    ReceiveWithoutSend,
    CombineBeforeReceive,
    CombineReceiveWithoutSend,
}

#[test]
fn operations_in_a_wrong_order_fail() {
    for (wrong, name) in [
        (WrongOrder::ReceiveWithoutSend, "dispatch"),
        (WrongOrder::CombineBeforeReceive, "combine"),
        (WrongOrder::CombineReceiveWithoutSend, "combine"),
    ] {
        for layout in LAYOUTS {
            let case = MoeCase {
                layout,
                ..MoeCase::new(6, 2, 16, 9)
            };
            let messages = failing(Setup::new(2), |comm| {
                let layer = Layer::new(comm, &case)?;
                let it = layer.buffers.write(&case, &layer.inputs(0))?;
                let (moe, y) = (&layer.moe, &layer.buffers.y);
                let dispatched = layer.moe.dispatch_send(&it.x, &it.ids, &it.weights)?;
                match wrong {
                    WrongOrder::ReceiveWithoutSend => {
                        moe.dispatch_receive(&dispatched)?;
                        comm.synchronize()?;
                        moe.dispatch_receive(&dispatched)?;
                    }
                    WrongOrder::CombineBeforeReceive => moe.combine_send(y, &dispatched)?,
                    WrongOrder::CombineReceiveWithoutSend => {
                        moe.dispatch_receive(&dispatched)?;
                        comm.synchronize()?;
                        moe.combine_receive(&dispatched, &it.out)?;
                    }
                }
                comm.synchronize()
            });
            assert_all_contain(&messages, name);
        }
    }
}

/// Refused configurations and arguments leave the communicator usable.
#[test]
fn invalid_configurations_are_refused() {
    let case = MoeCase::new(6, 2, 16, 9);
    let fp8 = MoePayload::Fp8(MoeScales::F32);
    let config = || case.config();
    let refused: Vec<(&str, MoeConfig)> = vec![
        ("no experts", MoeConfig::new(0, 2, 16, 9)),
        ("no selections", MoeConfig::new(6, 0, 16, 9)),
        ("17 selections", MoeConfig::new(6, 17, 16, 9)),
        ("no elements", MoeConfig::new(6, 2, 0, 9)),
        ("12 elements", MoeConfig::new(6, 2, 12, 9)),
        (
            "136 elements in groups",
            MoeConfig::new(6, 2, 136, 9).payload(fp8),
        ),
        ("no tokens", MoeConfig::new(6, 2, 16, 0)),
        ("no micro-batch", config().in_flight(0)),
        ("three micro-batches", config().in_flight(3)),
        ("integers", config().input(DType::I32)),
        ("f64", config().input(DType::F64)),
        ("no alignment", config().alignment(0)),
        ("too few places", config().local_experts(2)),
    ];
    all(Setup::new(2), |comm| {
        for (name, config) in &refused {
            assert!(Moe::new(comm, config).is_err(), "{name}: {config:?}");
        }
        let x = comm.tensor_from(&[1.0f32])?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x.to_vec::<f32>()?, [2.0]);
        run(comm, &case, 1)?;
        Ok(())
    });
}

#[test]
fn invalid_arguments_are_refused() {
    let case = MoeCase::new(6, 2, 16, 9);
    all(Setup::new(2), |comm| {
        let layer = Layer::new(comm, &case)?;
        let moe = &layer.moe;
        let new = |dtype, count| comm.tensor(dtype, count);
        let (x, ids) = (new(DType::Bf16, 9 * 16)?, new(DType::I32, 9 * 2)?);
        let weights = new(DType::F32, 9 * 2)?;
        let refused = [
            (
                "f16",
                moe.dispatch(&new(DType::F16, 9 * 16)?, &ids, &weights),
            ),
            ("u32 ids", moe.dispatch(&x, &new(DType::U32, 18)?, &weights)),
            (
                "bf16 weights",
                moe.dispatch(&x, &ids, &new(DType::Bf16, 18)?),
            ),
            (
                "8 tokens",
                moe.dispatch(&new(DType::Bf16, 8 * 16)?, &ids, &weights),
            ),
            ("17 ids", moe.dispatch(&x, &ids.slice(0, 17)?, &weights)),
            ("17 weights", moe.dispatch(&x, &ids, &weights.slice(0, 17)?)),
            (
                "10 tokens",
                moe.dispatch(
                    &new(DType::Bf16, 10 * 16)?,
                    &new(DType::I32, 20)?,
                    &new(DType::F32, 20)?,
                ),
            ),
        ];
        for (name, result) in refused {
            assert!(result.is_err(), "{name}");
        }
        for ranks in [
            vec![0; 5],
            vec![0; 7],
            vec![0, 0, 0, 1, 1, 2],
            vec![0, 0, 0, 0, 1, 1],
        ] {
            assert!(moe.set_placement(&ranks).is_err(), "{ranks:?}");
        }
        let default = moe.placement().to_vec::<u32>()?;
        moe.set_placement(&[1, 0, 1, 0, 1, 0])?;
        let words = moe.placement().to_vec::<u32>()?;
        assert_eq!(words, [1 << 16, 0, 1 << 16 | 1, 1, 1 << 16 | 2, 2]);
        moe.set_placement(&[0, 0, 0, 1, 1, 1])?;
        assert_eq!(moe.placement().to_vec::<u32>()?, default);
        assert!(moe.micro_batch(1).is_err(), "there is one micro-batch");
        // The layer still works.
        let dispatched = layer.dispatch(0)?;
        comm.synchronize()?;
        layer.check_dispatched(&dispatched, 0)?;
        let y = new(DType::Bf16, (moe.info().results - 1) * 16)?;
        let out = new(DType::Bf16, 9 * 16)?;
        assert!(
            moe.combine(&y, &dispatched, &out).is_err(),
            "too few results"
        );
        let out = new(DType::Bf16, 8 * 16)?;
        let refused = moe.combine(&layer.buffers.y, &dispatched, &out);
        assert!(refused.is_err(), "too few tokens");
        layer.write_results(0, Expert::Identity)?;
        layer.combine(&dispatched, 0)?;
        comm.synchronize()?;
        layer.check(0, Expert::Identity)?;
        layer.moe.free()?;
        Ok(())
    });
}

#[test]
fn statistics_accumulate() {
    for layout in LAYOUTS {
        let case = MoeCase {
            layout,
            uneven: true,
            routing: Routing::Distinct,
            ..MoeCase::new(7, 3, 16, 9)
        };
        all(Setup::new(3), |comm| {
            let layer = Layer::new(comm, &case)?;
            let ranks = comm.size() as usize;
            let mut received = vec![0; case.places(comm.size()) as usize];
            let mut waited = vec![0; ranks];
            for round in 0..10 {
                layer.dispatch(round)?;
                comm.synchronize()?;
                for (sum, count) in received.iter_mut().zip(layer.expected(round).selections) {
                    *sum += count;
                }
                let found = layer.moe.tokens_per_expert().to_vec::<u64>()?;
                assert_eq!(found, received, "{layout:?}, round {round}");
                let times = layer.moe.wait_ns().to_vec::<u64>()?;
                assert_eq!(times.len(), ranks);
                let pairs = times.iter().zip(&waited);
                let grows = pairs.clone().all(|(now, before)| now >= before);
                assert!(grows, "{times:?} after {waited:?}");
                waited = times;
            }
            layer.moe.free()?;
            Ok(())
        });
    }
}

/// Dispatches `tokens` on one rank and compares all codes and scales with the reference.
fn quantize<T: Element>(tokens: &[T], case: &MoeCase) {
    let mut bytes = Vec::new();
    for value in tokens {
        bytes.extend_from_slice(&value.to_bits().to_le_bytes()[..T::DTYPE.size()]);
    }
    let tokens = tokens.len() / case.hidden;
    let mut rows = expected(case, 1, 0, 0);
    assert_eq!(rows.rows.len(), tokens);
    let row_bytes = case.hidden * T::DTYPE.size();
    for row in &mut rows.rows {
        row.payload = payload(case, &bytes[row.token * row_bytes..][..row_bytes]);
    }
    all(Setup::new(1), |comm| {
        let layer = Layer::new(comm, case)?;
        let inputs = Inputs {
            x: bytes.clone(),
            ..layer.inputs(0)
        };
        let it = layer.buffers.write(case, &inputs)?;
        let dispatched = layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
        comm.synchronize()?;
        check_dispatched(case, layer.moe.info(), &dispatched, &rows, false)
            .map_err(|wrong| format!("{case:?}: {wrong}"))?;
        layer.moe.free()?;
        Ok(())
    });
}

/// Quantizes `values` in all formats. The number of values is a multiple of [`GROUP`].
fn quantize_all<T: Element>(values: &[T]) {
    for layout in LAYOUTS {
        for scales in [MoeScales::F32, MoeScales::Ue8m0] {
            let case = MoeCase {
                input: T::DTYPE,
                payload: MoePayload::Fp8(scales),
                layout,
                ..MoeCase::new(1, 1, GROUP, values.len() / GROUP)
            };
            quantize(values, &case);
        }
    }
}

/// Returns all words of 16 bits twice: adjacent words in a group, and one word of every 512.
fn all_words() -> impl Iterator<Item = u16> {
    let strided = (0..512u16).flat_map(|group| (0..GROUP as u16).map(move |i| i * 512 + group));
    (0..=u16::MAX).chain(strided)
}

/// Returns groups whose greatest value is `greatest`, so that all groups have the same scale. The
/// other elements are the values of `words` that are not greater.
fn with_greatest<T: Element<Acc = f32>>(greatest: f32, words: impl Iterator<Item = T>) -> Vec<T> {
    let fits: Vec<T> = words
        .filter(|word| word.widen().abs() <= greatest)
        .collect();
    let mut values = Vec::new();
    for chunk in fits.chunks(GROUP - 1) {
        values.extend_from_slice(chunk);
        values.resize(values.len().next_multiple_of(GROUP), T::narrow(greatest));
    }
    values
}

#[test]
fn all_bf16_values_have_the_fp8_codes_of_the_reference() {
    let words: Vec<Bf16> = all_words().map(Bf16).collect();
    quantize_all(&words);
    // With a scale of 1, and with a scale that is not a power of two.
    for greatest in [448.0, 3.0, 1e-5] {
        quantize_all(&with_greatest(greatest, (0..=u16::MAX).map(Bf16)));
    }
}

#[test]
fn all_f16_values_have_the_fp8_codes_of_the_reference() {
    let words: Vec<F16> = all_words().map(F16).collect();
    quantize_all(&words);
    for greatest in [448.0, 3.0, 65504.0] {
        quantize_all(&with_greatest(greatest, (0..=u16::MAX).map(F16)));
    }
}

#[test]
fn f32_values_have_the_fp8_codes_of_the_reference() {
    let mut rng = Rng::new(0xf8);
    let count = 256 * GROUP;
    // All bit patterns, most of them with other exponents than the greatest value of the group.
    let patterns: Vec<f32> = (0..count)
        .map(|_| f32::from_bits(rng.bits() as u32))
        .collect();
    quantize_all(&patterns);
    // Values of similar exponents, and values halfway between two codes or next to such values.
    let mut values: Vec<f32> = (0..count)
        .map(|_| f32::from_bits((rng.bits() as u32 & 0x83ff_ffff) | 0x3c00_0000))
        .collect();
    for code in 1..=0x7e_u32 {
        let step = |bits: u32| f32::from_bits(bits);
        // Normal codes of E4M3 are the upper bits of an f32 with another exponent bias.
        let halfway = ((code << 20) | 1 << 19) + (120 << 23);
        values.extend([step(halfway - 1), step(halfway), -step(halfway + 1)]);
    }
    values.resize(values.len().next_multiple_of(GROUP - 1), -0.0);
    let halves: Vec<f32> = values[count..].to_vec();
    values.truncate(count);
    quantize_all(&values);
    quantize_all(&with_greatest(448.0, halves.into_iter()));
}
