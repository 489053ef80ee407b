//! Sequences of dispatch and combine: graphs, micro-batches, repeated operations, and readers on
//! another stream.

use core::time::Duration;
use std::sync::Arc;
use std::thread;

use fusewire::{Communicator, DType, GraphExec, MoeLayout};
use fusewire_tests::device::stream;
use fusewire_tests::moe::{
    Buffers, Expert, GROUP, LAYOUTS, MoeCase, Placement, Routing, check_dispatched, combined,
    expected, inputs, outputs, results,
};
use fusewire_tests::oracle::narrow;
use fusewire_tests::runner::Setup;

use super::{AnyError, Layer, all, launches_separately, modes, two_groups};

/// Returns true if launches can be captured. Skips the test otherwise.
fn can_capture() -> bool {
    launches_separately("launches in a multi-rank grid cannot be captured")
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

/// Replays a graph of dispatch and combine `rounds` times. Each replay has other tokens, experts,
/// weights and, with [`Placement::Rotating`], another placement. The rows that an expert gets are
/// its results.
fn replay(comm: &Communicator, case: &MoeCase, rounds: usize) -> Result<(), AnyError> {
    let mut layer = Layer::new(comm, case)?;
    let tokens = layer.inputs(0).tokens;
    let it = layer.buffers.arguments(case, tokens)?;
    let (graph, dispatched) = capture(comm, || {
        let dispatched = layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
        // Blocking operations are captured too.
        let moe = layer.moe.blocking();
        moe.combine(&dispatched.x, &dispatched, &it.out)?;
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
    // With one block, five of six rounds have tokens.
    let staged = MoeCase {
        max_tokens: 12,
        ..case.clone()
    };
    // A staged operation has several launches, so it is replayed less often.
    for (case, divisor, few) in [(case, 1, 20), (staged.staged(2), 10, 5)] {
        for (ranks, blocks, rounds) in [(1, 1, 100), (2, 1, 1000), (3, 1, 1000), (3, 3, 300)] {
            let setup = Setup {
                blocks,
                ..Setup::new(ranks)
            };
            all(setup, |comm| replay(comm, &case, rounds / divisor));
        }
        let aligned = MoeCase {
            alignment: 8,
            input: DType::F32,
            ..case.clone()
        };
        all(Setup::new(2), |comm| replay(comm, &aligned, 100 / divisor));
        let on_network = Setup {
            team: 1,
            ..Setup::new(3)
        };
        all(on_network, |comm| replay(comm, &case, few));
        let lanes = Setup {
            lanes: 32,
            ..Setup::new(2)
        };
        all(lanes, |comm| replay(comm, &case, few));
    }
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
        for (case, rounds) in [(case.clone(), 200), (case.staged(4), 20)] {
            for ranks in [2, 3] {
                all(Setup::new(ranks), |comm| replay(comm, &case, rounds));
            }
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
        if case.layout == MoeLayout::ExpertMajor || case.is_staged() {
            // Otherwise peers may overwrite the rows after combine.
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
        for case in modes(&case) {
            let rounds = if case.is_staged() { 5 } else { 20 };
            let test = |comm: &Communicator| replay_with_constant_results(comm, &case, rounds);
            all(Setup::new(3), test);
            let setup = Setup {
                blocks: 2,
                ..Setup::new(2)
            };
            all(setup, test);
        }
    }
}

/// Runs two micro-batches whose halves are interleaved. In high throughput mode, which has no
/// halves, the operations are interleaved.
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
            let of_moe = moe.micro_batch(batch)?;
            let sent = if case.is_staged() {
                of_moe.dispatch(&it.x, &it.ids, &it.weights)?
            } else {
                of_moe.dispatch_send(&it.x, &it.ids, &it.weights)?
            };
            (dispatched[batch], outs[batch]) = (Some(sent), Some(it.out));
        }
        let dispatched = dispatched.map(|it| it.expect("sent"));
        let outs = outs.map(|it| it.expect("sent"));
        if !case.is_staged() {
            for batch in [0, 1] {
                moe.micro_batch(batch)?
                    .dispatch_receive(&dispatched[batch])?;
            }
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
            let (of_moe, y) = (moe.micro_batch(batch)?, &buffers[batch].y);
            if case.is_staged() {
                of_moe.combine(y, &dispatched[batch], &outs[batch])?;
            } else {
                of_moe.combine_send(y, &dispatched[batch])?;
            }
        }
        if !case.is_staged() {
            for batch in [0, 1] {
                let out = &outs[batch];
                moe.micro_batch(batch)?
                    .combine_receive(&dispatched[batch], out)?;
            }
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
            for case in modes(&case) {
                let is_slow = lanes > 1 || case.is_staged();
                interleave(comm, &case, if is_slow { 2 } else { 6 })?;
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
        for case in modes(&case) {
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
            for case in modes(&two_groups()) {
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
            for case in modes(&two_groups()) {
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

/// A redispatch may follow a dispatch, a redispatch and a combine.
#[test]
fn a_redispatch_sends_other_tokens_to_the_same_experts() {
    for (ranks, blocks, team) in [(1, 1, 0), (3, 2, 0), (2, 1, 1)] {
        let setup = Setup {
            blocks,
            team,
            ..Setup::new(ranks)
        };
        all(setup, |comm| {
            for case in modes(&two_groups()) {
                let mut layer = Layer::new(comm, &case)?;
                for round in 0..2 {
                    let mut dispatched = layer.dispatch(round)?;
                    for combines in [false, false, true, true] {
                        if combines {
                            layer.finish(&dispatched, round, Expert::Affine(1.0))?;
                        }
                        layer.case.negated = !layer.case.negated;
                        let it = layer.buffers.write(&layer.case, &layer.inputs(round))?;
                        dispatched = layer.moe.redispatch(&it.x, &dispatched)?;
                        comm.synchronize()?;
                        layer.check_dispatched(&dispatched, round)?;
                    }
                    layer.finish(&dispatched, round, Expert::Affine(2.0))?;
                }
                layer.moe.free()?;
            }
            Ok(())
        });
    }
}

#[test]
fn layers_of_both_modes_alternate() {
    for (ranks, blocks, team) in [(1, 1, 0), (3, 2, 0), (2, 1, 1)] {
        let setup = Setup {
            blocks,
            team,
            ..Setup::new(ranks)
        };
        all(setup, |comm| {
            for layout in LAYOUTS {
                let case = MoeCase {
                    layout,
                    ..two_groups()
                };
                let staged = case.clone().staged(4);
                let layers = [Layer::new(comm, &case)?, Layer::new(comm, &staged)?];
                let expert = Expert::Affine(0.5);
                for round in 0..4 {
                    // The layers have different tokens.
                    let received = [layers[0].dispatch(round)?, layers[1].dispatch(round + 1)?];
                    comm.synchronize()?;
                    for (i, layer) in layers.iter().enumerate() {
                        layer.check_dispatched(&received[i], round + i)?;
                        layer.write_results(round + i, expert)?;
                    }
                    for i in if round % 2 == 0 { [0, 1] } else { [1, 0] } {
                        layers[i].combine(&received[i], round + i)?;
                    }
                    comm.synchronize()?;
                    for (i, layer) in layers.iter().enumerate() {
                        layer.check(round + i, expert)?;
                    }
                }
                for layer in layers {
                    layer.moe.free()?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn statistics_accumulate() {
    for (layout, staging) in [
        (MoeLayout::ExpertMajor, 0),
        (MoeLayout::RankMajor, 0),
        (MoeLayout::ExpertMajor, 4),
        (MoeLayout::RankMajor, 4),
    ] {
        let case = MoeCase {
            layout,
            staging,
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
                assert_eq!(found, received, "{case:?}, round {round}");
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

/// Reads rows on another stream, whose work is late on rank 0, and enqueues the operations after
/// which the peers write the rows of the next dispatch: combine and dispatch, or only dispatch.
fn read_late(comm: &Communicator, case: &MoeCase, combines: bool) -> Result<(), AnyError> {
    let layer = Layer::new(comm, case)?;
    let next = Buffers::new(comm, case, layer.moe.info())?;
    let reader = comm
        .split(&[comm.rank()], "reader")?
        .ok_or("the rank is in its group")?
        .on(&stream());
    reader.warm_up()?;
    let expert = Expert::Affine(0.5);
    for round in [0, 2, 4] {
        let first = layer.dispatch(round)?;
        comm.synchronize()?;
        layer.check_dispatched(&first, round)?;
        layer.write_results(round, expert)?;
        let later = layer.inputs(round + 1);
        let it = next.write(case, &later)?;
        let rows = first.x.to_bytes()?;
        let copy = comm.tensor(first.x.dtype(), first.x.len())?;
        if comm.rank() == 0 {
            reader.stream().host_fn(Arc::new(|| {
                thread::sleep(Duration::from_millis(50));
                Ok(())
            }))?;
            reader.all_gather_single_async(&copy, &first.x)?;
        }
        if combines {
            layer.combine(&first, round)?;
        }
        let second = layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
        comm.synchronize()?;
        if comm.rank() == 0 && copy.to_bytes()? != rows {
            return Err(format!("{case:?}, round {round}: rows of the next dispatch").into());
        }
        layer.check_dispatched(&second, round + 1)?;
        if combines {
            layer.check(round, expert)?;
        }
        let y = results(
            case,
            &layer.expected(round + 1),
            layer.moe.info().results,
            expert,
        );
        next.y.copy_from_bytes(&y)?;
        layer.moe.combine(&next.y, &second, &it.out)?;
        comm.synchronize()?;
        next.check(case, &outputs(case, &later, expert))?;
    }
    layer.moe.free()?;
    Ok(())
}

#[test]
fn rows_stay_until_a_reader_on_another_stream_has_ended() {
    if !launches_separately("a rank of a multi-rank grid cannot launch alone") {
        return;
    }
    let case = MoeCase {
        uneven: true,
        ..MoeCase::new(7, 3, 16, 9)
    };
    for (ranks, blocks, team) in [(2, 1, 0), (3, 2, 0), (2, 1, 1)] {
        let setup = Setup {
            blocks,
            team,
            ..Setup::new(ranks)
        };
        for layout in LAYOUTS {
            for combines in [true, false] {
                let case = MoeCase {
                    layout,
                    ..case.clone()
                };
                all(setup, |comm| read_late(comm, &case, combines));
            }
        }
    }
}
