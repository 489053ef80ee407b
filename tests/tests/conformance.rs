//! Runs the conformance lists with every way to start ranks and with many settings of
//! communicators.

use std::path::Path;

use fusewire::{Algorithm, DType, Operation, ReduceOp};
use fusewire_kernels::fused::shared_row;
use fusewire_tests::cases::{Case, MEMORIES, list, nvls, op_of, operations};
use fusewire_tests::device;
use fusewire_tests::process::Host;
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{ALGORITHMS, Processes, Runner, Setup, Threads};
use fusewire_tests::skip::{full, skip};

/// Returns true if the tests run on the CPU, as the network for tests requires. Skips the test
/// otherwise.
fn has_network() -> bool {
    let has_network = !device().is_gpu();
    if !has_network {
        skip("network", "the network for tests connects ranks on the CPU");
    }
    has_network
}

/// Runs `list` and prints the number of calls.
fn run(runner: &dyn Runner, setup: Setup, list: &str) {
    match runner.run(&setup, list) {
        Ok(calls) => println!("{list}: {calls} calls a rank, {setup:?}"),
        Err(wrong) => panic!("{wrong}"),
    }
}

#[test]
fn every_operation_has_cases_or_other_tests() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for &operation in Operation::ALL {
        if let Err(path) = op_of(&Case::new(operation, DType::F32, Some(ReduceOp::Sum))) {
            assert!(tests.join(path).exists(), "{}: no {path}", operation.name());
        }
    }
    let listed = operations();
    for name in ["sizes", "core"] {
        let cases = list(name, 2);
        let mut missing = listed.clone();
        missing.retain(|operation| cases.iter().all(|case| case.operation != *operation));
        assert!(missing.is_empty(), "{name} has no {missing:?}");
    }
}

#[test]
fn sizes_placement_and_registration() {
    let ranks: &[u32] = if full() {
        &[1, 2, 3, 4, 5, 6, 7, 8]
    } else {
        &[1, 2, 3, 4]
    };
    for ranks in ranks {
        run(&Threads, Setup::new(*ranks), "sizes");
    }
}

#[test]
fn every_number_of_ranks() {
    for ranks in [5, 6, 7, 8, 16] {
        run(&Threads, Setup::new(ranks), "core");
    }
}

/// More ranks than a block keeps addresses for, and than a word has bits.
#[test]
fn many_ranks() {
    let run_cases = |setup: Setup, cases: &[Case]| {
        if let Err(wrong) = Threads.run_cases(&setup, cases) {
            panic!("{wrong}");
        }
    };
    let mut cases: Vec<Case> = list("core", 70).into_iter().step_by(4).collect();
    // The tables of 70 ranks leave shared memory for rows that are a little shorter.
    let longest = shared_row(70) / 8 * 8;
    assert!(longest < shared_row(64));
    for hidden in [longest, longest + 8] {
        let norm = list("norms", 70)[0];
        cases.push(Case {
            count: 3,
            hidden,
            ..norm
        });
    }
    let setup = Setup {
        staging: 64 << 10,
        ..Setup::new(70)
    };
    run_cases(setup, &cases);
    // More ranks than the smallest integers count.
    let averages = [DType::I8, DType::U8, DType::F16].map(|dtype| Case {
        count: 129,
        ..Case::new(Operation::AllReduce, dtype, Some(ReduceOp::Average))
    });
    run_cases(Setup::new(130), &averages);
    // Blocks of several lanes copy the addresses of up to 64 workspaces.
    for ranks in [64, 65] {
        let mut cases = list("core", ranks);
        cases.retain(|case| case.count == 1);
        let setup = Setup {
            lanes: 32,
            ..Setup::new(ranks)
        };
        run_cases(setup, &cases[..1]);
    }
}

/// Ranks that only a network connects: all collectives but those that write to other ranks' memory.
#[test]
fn over_a_network() {
    if !has_network() {
        return;
    }
    let capacity = fusewire_device::packet::capacity(Setup::new(2).options().packet_slot_bytes);
    let shapes = [
        (2, 1, 1, 1, CallMode::Blocking),
        (3, 1, 1, 2, CallMode::Graph),
        (4, 2, 1, 1, CallMode::Async),
        (4, 2, 32, 1, CallMode::Blocking),
        (2, 1, 64, 2, CallMode::Graph),
    ];
    let by = |hosts: bool| move |shape: (u32, u32, u32, u32, CallMode)| (hosts, shape);
    let all = shapes
        .map(by(false))
        .into_iter()
        .chain(shapes.map(by(true)));
    for (hosts, (ranks, team, lanes, blocks, mode)) in all {
        let [team, hosts] = match hosts {
            false => [team, 0],
            true => [0, team],
        };
        let setup = Setup {
            team,
            hosts,
            lanes,
            blocks,
            mode,
            ..Setup::new(ranks)
        };
        let is_served = |case: &Case| match case.operation {
            Operation::AllReduceNorm => {
                let rows = case.count.div_ceil(blocks as usize);
                (rows * case.hidden * case.dtype.size()) as u64 <= capacity
            }
            _ => true,
        };
        let run = |list: Vec<Case>, step| {
            let cases: Vec<Case> = list.into_iter().filter(is_served).step_by(step).collect();
            match Threads.run_cases(&setup, &cases) {
                Ok(calls) => println!("network: {calls} calls a rank, {setup:?}"),
                Err(wrong) => panic!("{wrong}"),
            }
        };
        run(list("core", ranks), 1);
        run(list("norms", ranks), 1);
        // Lanes are threads here and therefore slow.
        let step = if full() { 1 } else { 7 * lanes.min(8) as usize };
        run(list("types", ranks), step);
        run(list("sizes", ranks), step);
    }
}

/// Slots of packets are scrubbed in epochs 4095 and 4096, when no network reads them any more.
#[test]
fn packets_are_scrubbed_after_the_network_has_read_them() {
    if !has_network() {
        return;
    }
    let case = Case {
        count: 300,
        ..Case::new(Operation::AllReduce, DType::F32, Some(ReduceOp::Sum))
    };
    for (ranks, lanes) in [(2, 32), (3, 64)] {
        let setup = Setup {
            team: 1,
            lanes,
            algorithm: Algorithm::Packet,
            first_epoch: 4090,
            ..Setup::new(ranks)
        };
        for _ in 0..8 {
            if let Err(wrong) = Threads.run_cases(&setup, &[case; 10]) {
                panic!("{wrong}");
            }
        }
    }
}

#[test]
fn every_type_and_reduction() {
    let ranks: &[u32] = if full() { &[1, 2, 3, 4, 8] } else { &[2, 3] };
    for ranks in ranks {
        run(&Threads, Setup::new(*ranks), "types");
    }
}

#[test]
fn fused_norm() {
    for ranks in [1, 2, 3, 4] {
        for mode in [CallMode::Blocking, CallMode::Graph] {
            let setup = Setup {
                mode,
                staging: 32 << 10,
                ..Setup::new(ranks)
            };
            run(&Threads, setup, "norms");
        }
    }
    for (lanes, warp) in [(32, 0), (64, 16)] {
        let setup = Setup {
            lanes,
            warp,
            staging: 32 << 10,
            ..Setup::new(2)
        };
        run(&Threads, setup, "norms");
    }
}

#[test]
fn every_algorithm() {
    for algorithm in ALGORITHMS {
        for ranks in [2, 3] {
            let setup = Setup {
                algorithm,
                ..Setup::new(ranks)
            };
            run(&Threads, setup, "sizes");
        }
    }
}

#[test]
fn multicast() {
    let base = |ranks| Setup {
        algorithm: Algorithm::Nvls,
        ..Setup::new(ranks)
    };
    for ranks in 1..=8 {
        run(&Threads, base(ranks), "nvls");
    }
    // Lanes are threads here and therefore slow. A short run uses a part of the list that still
    // covers all types, operations, counts and offsets.
    for (ranks, lanes, warp, blocks) in [(2, 32, 0, 1), (2, 64, 32, 1), (2, 1, 0, 3), (3, 32, 8, 2)]
    {
        let setup = Setup {
            lanes,
            warp,
            blocks,
            ..base(ranks)
        };
        if lanes == 1 || full() {
            run(&Threads, setup, "nvls");
            continue;
        }
        let cases: Vec<Case> = nvls(ranks).into_iter().step_by(11).collect();
        if let Err(wrong) = Threads.run_cases(&setup, &cases) {
            panic!("{wrong}");
        }
    }
    for mode in [CallMode::Async, CallMode::Graph] {
        run(&Threads, Setup { mode, ..base(3) }, "nvls");
    }
    // Also run cases that multicast does not support. Their results must be correct as well.
    run(&Threads, base(2), "core");
}

#[test]
fn enqueued_and_replayed() {
    for mode in [CallMode::Async, CallMode::Graph] {
        for ranks in [1, 2, 3] {
            let setup = Setup {
                mode,
                ..Setup::new(ranks)
            };
            run(&Threads, setup, "core");
            if full() {
                run(&Threads, setup, "sizes");
                run(&Threads, setup, "types");
            }
        }
    }
}

#[test]
fn lanes_as_threads() {
    // Blocks of one, two and four warps.
    for (ranks, lanes, warp) in [(2, 32, 0), (3, 32, 16), (2, 64, 0), (2, 64, 16)] {
        let setup = Setup {
            lanes,
            warp,
            ..Setup::new(ranks)
        };
        run(&Threads, setup, "core");
        if full() {
            run(&Threads, setup, "sizes");
            run(&Threads, setup, "types");
        }
    }
    if full() {
        for (lanes, warp) in [(64, 32), (128, 32)] {
            let setup = Setup {
                lanes,
                warp,
                ..Setup::new(2)
            };
            run(&Threads, setup, "all");
        }
    }
}

#[test]
fn several_blocks() {
    for (ranks, blocks, lanes) in [(2, 3, 1), (3, 2, 1), (2, 2, 32)] {
        let setup = Setup {
            blocks,
            lanes,
            ..Setup::new(ranks)
        };
        run(&Threads, setup, "core");
    }
    let setup = Setup {
        blocks: 3,
        mode: CallMode::Graph,
        ..Setup::new(2)
    };
    run(&Threads, setup, "core");
}

#[test]
fn one_large_round_instead_of_many() {
    for ranks in [2, 4] {
        let setup = Setup {
            staging: 1 << 20,
            ..Setup::new(ranks)
        };
        run(&Threads, setup, "core");
    }
}

#[test]
fn ranks_as_processes() {
    if Processes::child() {
        return;
    }
    for (host, ranks, mode) in [
        (Host::Parent, 2, CallMode::Blocking),
        (Host::RankZero, 3, CallMode::Blocking),
        (Host::Parent, 4, CallMode::Graph),
        (Host::RankZero, 2, CallMode::Async),
    ] {
        let runner = Processes {
            test: "ranks_as_processes",
            host,
        };
        let setup = Setup {
            mode,
            ..Setup::new(ranks)
        };
        run(&runner, setup, "core");
        if mode == CallMode::Blocking {
            run(&runner, setup, "types");
        }
    }
}

#[test]
fn blocks_in_different_rounds_use_disjoint_staging() {
    // The last round is shorter than the other rounds. If the blocks divided staging again for the
    // last round, their new parts would overlap memory that another block still reads in the
    // previous round.
    for (operation, reduction) in [
        (Operation::AllGather, None),
        (Operation::AllGatherV, None),
        (Operation::AllToAll, None),
        (Operation::AllToAllV, None),
        (Operation::Scatter, None),
        (Operation::AllReduce, Some(ReduceOp::Sum)),
        (Operation::ReduceScatter, Some(ReduceOp::Sum)),
    ] {
        let cases: Vec<Case> = (0..60)
            .map(|i| Case {
                count: 4200 + i * 61,
                memory: MEMORIES[1 + i % 2],
                ..Case::new(operation, DType::F32, reduction)
            })
            .collect();
        let setup = Setup {
            blocks: 4,
            staging: 8 << 10,
            ..Setup::new(2)
        };
        if let Err(wrong) = Threads.run_cases(&setup, &cases) {
            panic!("{wrong}");
        }
    }
}
