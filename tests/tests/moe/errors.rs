//! Refused configurations and arguments, and failures, which all ranks report.

use core::fmt::Debug;
use core::time::Duration;
use std::sync::Arc;
use std::thread;

use fusewire::{
    Communicator, DType, Dispatched, Error, MicroBatch, MissingRanks, Moe, MoeConfig, MoeLayout,
    MoeMode, MoePayload, MoeReceived, MoeResults, MoeScales, MoeScalesLayout, ReduceOp, Tensor,
};
use fusewire_tests::device::device;
use fusewire_tests::moe::{Expert, LAYOUTS, MoeCase, Routing, run};
use fusewire_tests::runner::{Setup, Threads};

use super::{Layer, all, is_supported, launches_separately, run_cases};

/// Layouts, and the tokens of a round in high throughput mode; 0 for low latency mode.
const FORMS: [(MoeLayout, usize); 3] = [
    (MoeLayout::ExpertMajor, 0),
    (MoeLayout::RankMajor, 0),
    (MoeLayout::ExpertMajor, 4),
];

/// Runs `test`, which must fail on every rank. Returns the messages of the ranks, or none if the
/// device does not support the setup.
fn failing(
    setup: Setup,
    test: impl Fn(&Communicator) -> fusewire::Result<()> + Sync,
) -> Vec<String> {
    if !is_supported(&setup) {
        return Vec::new();
    }
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

/// Checks that a call was refused as an invalid argument, for a reason that contains `text`.
#[track_caller]
fn assert_refused<T: Debug>(call: &str, result: fusewire::Result<T>, text: &str) {
    match result {
        Err(Error::InvalidArgument { detail, .. }) => {
            assert!(detail.contains(text), "{call}: {detail:?} lacks {text:?}");
        }
        other => panic!("{call}: {other:?}"),
    }
}

#[test]
fn an_expert_that_does_not_exist_is_named_on_all_ranks() {
    for id in [6, 4711, i32::MAX] {
        for (layout, staging) in FORMS {
            for (blocks, lanes, team) in [(1, 1, 0), (3, 1, 0), (1, 32, 0), (1, 1, 1)] {
                let setup = Setup {
                    blocks,
                    lanes,
                    team,
                    ..Setup::new(3)
                };
                let case = MoeCase {
                    layout,
                    staging,
                    ..MoeCase::new(6, 2, 16, 9)
                };
                let messages = failing(setup, |comm| {
                    let layer = Layer::new(comm, &case)?;
                    let mut inputs = layer.inputs(0);
                    if comm.rank() == 1 {
                        inputs.ids[13] = id;
                    }
                    let it = layer.buffers.write(&case, &inputs)?;
                    if blocks == 1 {
                        // The operation itself returns the failure.
                        let moe = layer.moe.blocking();
                        return moe.dispatch(&it.x, &it.ids, &it.weights).map(drop);
                    }
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
    for (layout, staging, alignment) in [
        (MoeLayout::ExpertMajor, 0, 1),
        (MoeLayout::ExpertMajor, 0, 8),
        (MoeLayout::ExpertMajor, 2, 8),
        (MoeLayout::RankMajor, 2, 1),
    ] {
        let rows = match layout {
            MoeLayout::RankMajor => ranks as usize * tokens,
            _ => ranks as usize * tokens * top_k as usize,
        };
        let needed = rows.next_multiple_of(alignment);
        let case = |capacity| MoeCase {
            routing: Routing::OneExpert,
            capacity: Some(capacity),
            layout,
            staging,
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
                let mut layer = Layer::new(comm, &case(needed - alignment))?;
                layer.case.routing = Routing::Empty;
                let x = layer.dispatch(0)?.x;
                comm.synchronize()?;
                let before = vec![0x5a; x.len() * x.dtype().size()];
                x.copy_from_bytes(&before)?;
                layer.case.routing = Routing::OneExpert;
                let failed = layer.dispatch(0).and_then(|_| comm.synchronize());
                assert!(x.to_bytes()? == before, "{setup:?}: rows have moved");
                failed
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
        (
            "136 elements of results in groups",
            MoeConfig::new(6, 2, 136, 9).results(MoeResults::Fp8),
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
fn settings_that_need_others_are_refused() {
    let fp8 = MoeConfig::new(6, 2, 256, 4).payload(MoePayload::Fp8(MoeScales::F32));
    let columns = |config: &MoeConfig| {
        let config = config.clone();
        config.scales_layout(MoeScalesLayout::ColumnMajor)
    };
    let converted = |config: &MoeConfig| config.clone().received(MoeReceived::Dequantized);
    let same = MoeConfig::new(6, 2, 256, 4);
    let rank_major = fp8.clone().layout(MoeLayout::RankMajor);
    let staged = |config: &MoeConfig| config.clone().mode(MoeMode::HighThroughput);
    all(Setup::new(2), |comm| {
        for config in [&same, &rank_major, &staged(&same)] {
            assert_refused("columns", Moe::new(comm, &columns(config)), "column-major");
            assert_refused(
                "converted",
                Moe::new(comm, &converted(config)),
                "dequantized",
            );
        }
        for config in [&fp8, &staged(&rank_major)] {
            Moe::new(comm, &columns(config))?.free()?;
            Moe::new(comm, &converted(config))?.free()?;
        }
        let masked = staged(&same).missing_ranks(MissingRanks::Mask);
        assert_refused("masked", Moe::new(comm, &masked), "low latency mode");
        let staging = same.clone().staging(2);
        assert_refused("staging", Moe::new(comm, &staging), "high throughput mode");
        Ok(())
    });
    let setup = Setup {
        team: 1,
        ..Setup::new(2)
    };
    all(setup, |comm| {
        let masked = MoeConfig::new(6, 2, 16, 4).missing_ranks(MissingRanks::Mask);
        assert_refused("masked", Moe::new(comm, &masked), "network");
        Ok(())
    });
    let messages = failing(Setup::new(2), |comm| {
        let timeout = Duration::from_secs(5 + u64::from(comm.rank()));
        Moe::new(comm, &MoeConfig::new(6, 2, 16, 4).timeout(timeout)).map(drop)
    });
    assert_all_contain(&messages, "timeout 6000000000 ns");
    let messages = failing(Setup::new(2), |comm| {
        let config = match comm.rank() {
            0 => same.clone(),
            _ => staged(&same),
        };
        Moe::new(comm, &config).map(drop)
    });
    assert_all_contain(&messages, "low latency");
    assert_all_contain(&messages, "high throughput");
}

#[test]
fn halves_are_refused_in_high_throughput_mode() {
    for layout in LAYOUTS {
        let case = MoeCase {
            layout,
            staging: 4,
            ..MoeCase::new(6, 2, 16, 9)
        };
        all(Setup::new(2), |comm| {
            let layer = Layer::new(comm, &case)?;
            let (moe, y) = (&layer.moe, &layer.buffers.y);
            let text = "high throughput mode has no halves";
            for round in 0..2 {
                let it = layer.buffers.write(&case, &layer.inputs(round))?;
                let sent = moe.dispatch_send(&it.x, &it.ids, &it.weights);
                assert_refused("dispatch_send", sent, text);
                let received = layer.dispatch(round)?;
                comm.synchronize()?;
                let sent = moe.dispatch_send(&it.x, &it.ids, &it.weights);
                assert_refused("dispatch_send", sent, text);
                let sent = moe.redispatch_send(&it.x, &received);
                assert_refused("redispatch_send", sent, text);
                assert_refused("dispatch_receive", moe.dispatch_receive(&received), text);
                assert_refused("combine_send", moe.combine_send(y, &received), text);
                let combined = moe.combine_receive(&received, &it.out);
                assert_refused("combine_receive", combined, text);
                // Refused calls preserve the results of the last dispatch.
                layer.check_dispatched(&received, round)?;
                layer.finish(&received, round, Expert::Affine(1.0))?;
            }
            layer.moe.free()?;
            Ok(())
        });
    }
}

/// A graph whose dispatch reuses a routing is replayed after a dispatch of fewer tokens.
#[test]
fn a_routing_of_other_tokens_is_not_reused() {
    if !launches_separately("launches in a multi-rank grid cannot be captured") {
        return;
    }
    for (layout, staging) in FORMS {
        let case = MoeCase {
            layout,
            staging,
            ..MoeCase::new(6, 2, 16, 9)
        };
        let fewer = MoeCase {
            tokens: 7,
            ..case.clone()
        };
        let messages = failing(Setup::new(3), |comm| {
            let layer = Layer::new(comm, &case)?;
            let dispatched = layer.dispatch(0)?;
            let x = layer.buffers.arguments(&case, 9)?.x;
            comm.stream().begin_capture()?;
            let again = layer.moe.redispatch(&x, &dispatched)?;
            let graph = comm.stream().end_capture()?.instantiate()?;
            graph.run(comm.stream())?;
            comm.synchronize()?;
            assert_refused(
                "redispatch",
                layer.moe.redispatch(&x, &dispatched),
                "dispatch 1",
            );
            let it = layer.buffers.arguments(&fewer, 7)?;
            layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
            comm.synchronize()?;
            drop(again);
            graph.run(comm.stream())
        });
        assert_all_contain(&messages, "was of 7 tokens");
        assert_all_contain(&messages, "has 9 tokens");
    }
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

/// A case of f32, whose tokens, rows, weights and results have one type.
fn of_f32(layout: MoeLayout) -> MoeCase {
    MoeCase {
        input: DType::F32,
        layout,
        ..MoeCase::new(6, 2, 16, 9)
    }
}

#[test]
fn a_dispatch_of_memory_that_it_writes_is_refused() {
    for layout in LAYOUTS {
        let case = of_f32(layout);
        all(Setup::new(2), |comm| {
            let layer = Layer::new(comm, &case)?;
            let moe = &layer.moe;
            let received = layer.dispatch(0)?;
            comm.synchronize()?;
            let it = layer.buffers.arguments(&case, 9)?;
            let rows = received.x.slice(0, it.x.len())?;
            let ids = received.ids.slice(0, it.ids.len())?;
            let weights = received.weights.slice(0, it.weights.len())?;
            let text = "overlaps memory of the Moe";
            for (name, x, ids, weights) in [
                ("x", &rows, &it.ids, &it.weights),
                ("ids", &it.x, &ids, &it.weights),
                ("weights", &it.x, &it.ids, &weights),
            ] {
                assert_refused(name, moe.dispatch(x, ids, weights), text);
                assert_refused(name, moe.dispatch_send(x, ids, weights), text);
            }
            // A refused dispatch preserves the results of the last one.
            layer.check_dispatched(&received, 0)?;
            layer.finish(&received, 0, Expert::Affine(1.0))?;
            let received = layer.dispatch(1)?;
            comm.synchronize()?;
            layer.check_dispatched(&received, 1)?;
            layer.finish(&received, 1, Expert::Affine(2.0))?;
            layer.moe.free()?;
            Ok(())
        });
    }
}

#[test]
fn a_combine_to_memory_that_it_reads_is_refused() {
    for layout in LAYOUTS {
        let case = of_f32(layout);
        all(Setup::new(2), |comm| {
            let layer = Layer::new(comm, &case)?;
            let (moe, y) = (&layer.moe, &layer.buffers.y);
            let received = layer.dispatch(0)?;
            comm.synchronize()?;
            let count = 9 * case.hidden;
            let out = y.slice(count, count)?;
            assert_refused("y", moe.combine(y, &received, &out), "y overlaps out");
            let out = received.x.slice(0, count)?;
            let text = "out overlaps memory of the Moe";
            assert_refused("x", moe.combine(y, &received, &out), text);
            moe.combine_send(y, &received)?;
            assert_refused("x", moe.combine_receive(&received, &out), text);
            let it = layer.buffers.arguments(&case, 9)?;
            moe.combine_receive(&received, &it.out)?;
            comm.synchronize()?;
            // The results of the first combine do not matter.
            layer.finish(&received, 0, Expert::Affine(1.0))?;
            layer.moe.free()?;
            Ok(())
        });
    }
}

#[test]
fn a_combine_to_the_ids_or_weights_is_refused() {
    let case = of_f32(MoeLayout::ExpertMajor);
    all(Setup::new(2), |comm| {
        let layer = Layer::new(comm, &case)?;
        let moe = &layer.moe;
        let it = layer.buffers.write(&case, &layer.inputs(0))?;
        let items = it.ids.len();
        // The last elements of `out` are the first ones of weights and ids.
        let memory = comm.tensor(DType::F32, it.out.len() + items)?;
        let out = memory.slice(0, it.out.len())?;
        let shared = memory.slice(it.out.len() - 4, items)?;
        shared.copy_from_bytes(&it.weights.to_bytes()?)?;
        let received = moe.dispatch(&it.x, &it.ids, &shared)?;
        comm.synchronize()?;
        layer.check_dispatched(&received, 0)?;
        let y = &layer.buffers.y;
        let text = "weights overlaps out";
        assert_refused("weights", moe.combine(y, &received, &out), text);
        layer.finish(&received, 0, Expert::Affine(1.0))?;

        shared.copy_from_bytes(&it.ids.to_bytes()?)?;
        let (at, keep) = (shared.as_ptr(), Arc::new(shared.clone()));
        // SAFETY: `keep` keeps the memory allocated, which has as many elements of the same size.
        // Nothing else accesses it before `synchronize` has waited for the launches.
        let ids = unsafe { Tensor::adopt(device(), at, DType::I32, items, Some(keep))? };
        let received = moe.dispatch(&it.x, &ids, &it.weights)?;
        comm.synchronize()?;
        layer.check_dispatched(&received, 0)?;
        let text = "ids overlaps out";
        assert_refused("ids", moe.combine(y, &received, &out), text);
        layer.finish(&received, 0, Expert::Affine(2.0))?;
        layer.moe.free()?;
        Ok(())
    });
}

#[test]
fn a_combine_of_the_rows_that_arrived_is_possible() {
    let case = of_f32(MoeLayout::ExpertMajor);
    all(Setup::new(2), |comm| {
        let layer = Layer::new(comm, &case)?;
        for round in 0..3 {
            let received = layer.dispatch(round)?;
            let it = layer.buffers.arguments(&case, 9)?;
            layer.moe.combine(&received.x, &received, &it.out)?;
            comm.synchronize()?;
            layer.check(round, Expert::Identity)?;
        }
        layer.moe.free()?;
        Ok(())
    });
}

/// Checks that all calls of `batch` refuse `dispatched`.
#[track_caller]
fn assert_all_refused(layer: &Layer<'_>, batch: &MicroBatch, dispatched: &Dispatched, text: &str) {
    let (y, tokens) = (&layer.buffers.y, layer.case.tokens);
    let it = layer.buffers.arguments(&layer.case, tokens);
    let out = it.expect("slices of the buffers").out;
    assert_refused("combine", batch.combine(y, dispatched, &out), text);
    assert_refused("combine_send", batch.combine_send(y, dispatched), text);
    let refused = batch.combine_receive(dispatched, &out);
    assert_refused("combine_receive", refused, text);
    let refused = batch.dispatch_receive(dispatched);
    assert_refused("dispatch_receive", refused, text);
}

#[test]
fn only_the_last_dispatch_of_a_micro_batch_is_accepted() {
    for layout in LAYOUTS {
        let case = MoeCase {
            layout,
            in_flight: 2,
            ..MoeCase::new(6, 2, 16, 9)
        };
        all(Setup::new(2), |comm| {
            let layer = Layer::new(comm, &case)?;
            let other = Layer::new(comm, &case)?;
            let moe = &layer.moe;
            let stale = layer.dispatch(0)?;
            let received = layer.dispatch(1)?;
            comm.synchronize()?;
            let text = "no longer valid";
            assert_all_refused(&layer, &moe.micro_batch(0)?, &stale, text);
            assert_refused("of the Moe", moe.dispatch_receive(&stale), text);
            let text = "another micro-batch";
            assert_all_refused(&layer, &moe.micro_batch(1)?, &received, text);
            assert_all_refused(&layer, &other.moe.micro_batch(0)?, &received, text);
            assert_refused("another Moe", other.moe.dispatch_receive(&received), text);
            // Nothing ran, so both layers still work.
            layer.check_dispatched(&received, 1)?;
            layer.finish(&received, 1, Expert::Affine(1.0))?;
            // A combine preserves the dispatch.
            assert_all_refused(&layer, &moe.micro_batch(0)?, &stale, "no longer valid");
            layer.finish(&received, 1, Expert::Affine(2.0))?;
            let received = other.dispatch(2)?;
            comm.synchronize()?;
            other.check_dispatched(&received, 2)?;
            other.finish(&received, 2, Expert::Affine(3.0))?;
            other.moe.free()?;
            layer.moe.free()?;
            Ok(())
        });
    }
}

/// Text of the failure of ranks that call one kernel with different arguments.
const MISMATCH: &str = "with other values of the agreed arguments than rank";

#[test]
fn different_micro_batches_are_a_mismatch() {
    for layout in LAYOUTS {
        for lanes in [1, 32] {
            for combines in [false, true] {
                let case = MoeCase {
                    layout,
                    in_flight: 2,
                    ..MoeCase::new(6, 2, 16, 9)
                };
                let setup = Setup {
                    lanes,
                    ..Setup::new(2)
                };
                let messages = failing(setup, |comm| {
                    let layer = Layer::new(comm, &case)?;
                    let it = layer.buffers.write(&case, &layer.inputs(0))?;
                    let own = comm.rank() as usize;
                    let batches = [layer.moe.micro_batch(0)?, layer.moe.micro_batch(1)?];
                    let dispatch = |batch: &MicroBatch| batch.dispatch(&it.x, &it.ids, &it.weights);
                    if !combines {
                        dispatch(&batches[own])?;
                        return comm.synchronize();
                    }
                    let received = [dispatch(&batches[0])?, dispatch(&batches[1])?];
                    comm.synchronize()?;
                    batches[own].combine(&layer.buffers.y, &received[own], &it.out)?;
                    comm.synchronize()
                });
                assert_all_contain(&messages, MISMATCH);
            }
        }
    }
}

/// Calls dispatch on rank 0 and, after `delay`, only its sending half on rank 1.
fn dispatch_and_send(comm: &Communicator, case: &MoeCase, delay: Duration) -> fusewire::Result<()> {
    let layer = Layer::new(comm, case)?;
    let it = layer.buffers.write(case, &layer.inputs(0))?;
    if comm.rank() == 0 {
        layer.moe.dispatch(&it.x, &it.ids, &it.weights)?;
    } else {
        thread::sleep(delay);
        layer.moe.dispatch_send(&it.x, &it.ids, &it.weights)?;
    }
    // The sending half may succeed. Its rank gets the failure in the barrier.
    comm.synchronize()?;
    comm.barrier()
}

#[test]
fn a_half_instead_of_the_operation_is_a_mismatch() {
    if !launches_separately("the ranks of a multi-rank grid launch at the same time") {
        return;
    }
    for layout in LAYOUTS {
        for lanes in [1, 32] {
            let case = MoeCase {
                layout,
                ..MoeCase::new(6, 2, 16, 9)
            };
            let setup = Setup {
                lanes,
                ..Setup::new(2)
            };
            // Only a wait that stalls finds it. On a busy machine rank 0 may be as late as rank 1.
            let messages = [30, 300, 3_000]
                .map(Duration::from_millis)
                .into_iter()
                .find_map(|delay| {
                    let ranks = Threads.each(&setup, |comm| {
                        let result = dispatch_and_send(&comm, &case, delay);
                        Ok(result.err().map(|error| error.to_string()))
                    });
                    ranks
                        .into_iter()
                        .map(|rank| rank.ok().flatten())
                        .collect::<Option<Vec<String>>>()
                })
                .expect("a wait stalls, and both ranks fail");
            assert_all_contain(&messages, MISMATCH);
        }
    }
}

#[test]
fn an_expert_at_a_place_that_is_not_possible_is_named_on_all_ranks() {
    // 2 ranks have 3 places each. All selections of round 0 are expert 5.
    let wrong = 5;
    for place in [
        2,            // That of expert 2.
        1 << 16,      // That of expert 3.
        1 << 16 | 3,  // Index 3 of rank 1.
        2 << 16,      // Rank 2.
        0xffff << 16, // The greatest rank.
        u32::MAX,
    ] {
        for (layout, staging) in FORMS {
            for (blocks, lanes, team) in [(1, 1, 0), (3, 1, 0), (1, 32, 0), (1, 1, 1)] {
                let setup = Setup {
                    blocks,
                    lanes,
                    team,
                    ..Setup::new(2)
                };
                let case = MoeCase {
                    layout,
                    staging,
                    routing: Routing::OneExpert,
                    ..MoeCase::new(6, 2, 16, 9)
                };
                let places = case.placement_words(2, 0);
                let messages = failing(setup, |comm| {
                    let layer = Layer::new(comm, &case)?;
                    let mut places = places.clone();
                    places[wrong] = place;
                    layer.moe.placement().copy_from(&places)?;
                    layer.dispatch(0)?;
                    comm.synchronize()
                });
                // Either of two experts at one place is named.
                let named = |expert: usize| format!("expert {expert} has the place {place} ");
                let shared = places[..wrong].iter().position(|other| *other == place);
                for (rank, message) in messages.iter().enumerate() {
                    let found = message.contains(&named(wrong))
                        || shared.is_some_and(|expert| message.contains(&named(expert)));
                    assert!(found, "rank {rank}, place {place}: {message:?}");
                }
            }
        }
    }
}
