//! Runs ten thousand operations in sequence with random sizes, types, algorithms and memory. One
//! rank is late in each operation, and every result is verified. Epochs start at 0, or just below
//! 2^24, 2^31, 2^32 or 2^40, where a field of a protocol word could wrap.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use fusewire::store::{MemoryStore, Store};
use fusewire::{Algorithm, Communicator, DType, Device, Operation, ReduceOp};
use fusewire_tests::cases::{Case, MEMORIES, REDUCTIONS, operations};
use fusewire_tests::rank::{CallMode, Rank};
use fusewire_tests::rng::Rng;
use fusewire_tests::runner::Setup;
use fusewire_tests::skip::full;

/// Returns the next operation of the random sequence, which is the same on all ranks.
fn random_case(rng: &mut Rng, ranks: u32, large: usize) -> Case {
    // At least a third of the operations are all_reduce, because it has the most algorithms.
    let operation = if rng.one_in(3) {
        Operation::AllReduce
    } else {
        rng.pick(&operations())
    };
    let mut dtype = rng.pick(&DType::ALL);
    let mut reduction = None;
    if operation.reduces() {
        let op = rng.pick(&REDUCTIONS);
        // Half of the operations have a type and reduction that packets support.
        let (d, op) = if rng.one_in(2) {
            (
                rng.pick(&[DType::F32, DType::F16, DType::Bf16]),
                ReduceOp::Sum,
            )
        } else if op.code().supports(dtype) {
            (dtype, op)
        } else {
            (DType::F64, ReduceOp::PreMulSum(0.5))
        };
        (dtype, reduction) = (d, Some(op));
    }
    if operation == Operation::AllReduceNorm {
        dtype = rng.pick(&[DType::F32, DType::F16, DType::Bf16]);
    }
    let count = match rng.below(20) {
        0 => 0,
        1..=12 => 1 + rng.below(40),
        13..=18 => rng.below(500),
        _ => rng.below(large),
    };
    let norm = operation == Operation::AllReduceNorm;
    Case {
        count: if norm { rng.below(4) } else { count },
        hidden: if norm { 8 + 8 * rng.below(25) } else { 0 },
        root: rng.below(ranks as usize) as u32,
        in_place: rng.one_in(2) && Case::has_in_place(operation),
        memory: rng.pick(&MEMORIES),
        offset: rng.below(4),
        ..Case::new(operation, dtype, reduction)
    }
}

/// Algorithms of the communicators. All communicators are in use at once.
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::Auto,
    Algorithm::Packet,
    Algorithm::PacketTwoShot,
    Algorithm::Signal,
    Algorithm::TwoShot,
];

fn stress(setup: Setup, operations: usize, large: usize) {
    let started = Instant::now();
    let seed = setup.first_epoch ^ u64::from(setup.ranks) << 50 ^ u64::from(setup.lanes);
    let mut rng = Rng::new(seed);
    let cases: Vec<Case> = (0..operations)
        .map(|_| random_case(&mut rng, setup.ranks, large))
        .collect();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let run = |index: u32| -> fusewire::Result<Vec<String>> {
        let mut ranks = Vec::new();
        for algorithm in ALGORITHMS {
            let options = Setup { algorithm, ..setup }.options();
            let comm = Communicator::new(
                Device::Cpu,
                index,
                setup.ranks,
                Arc::clone(&store),
                algorithm.name(),
                options,
            )?;
            ranks.push(Rank::new(comm, setup.mode, &cases)?);
        }
        let mut shared = Rng::new(seed ^ 1);
        for case in &cases {
            let which = shared.below(4);
            let (late, by) = (shared.below(setup.ranks as usize), shared.below(8));
            if late == index as usize {
                delay(by);
            }
            ranks[which].run(case)?;
        }
        Ok(ranks.into_iter().flat_map(|rank| rank.finish().1).collect())
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..setup.ranks)
            .map(|index| scope.spawn(move || run(index)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|result| result.expect("no panic")).collect()
    });
    for (rank, result) in results.into_iter().enumerate() {
        let wrong = result.unwrap_or_else(|error| panic!("rank {rank}, {setup:?}: {error}"));
        assert!(wrong.is_empty(), "{setup:?}: {wrong:#?}");
    }
    println!(
        "{operations} operations in {:?}: {setup:?}",
        started.elapsed()
    );
}

/// Delays a rank in one of several ways, which `how` selects.
fn delay(how: usize) {
    match how {
        0 => std::thread::sleep(Duration::from_micros(100)),
        1..=3 => (0..how * 3).for_each(|_| std::thread::yield_now()),
        _ => {
            let until = Instant::now() + Duration::from_micros(how as u64 * 3);
            while Instant::now() < until {
                core::hint::spin_loop();
            }
        }
    }
}

fn setup(ranks: u32, first_epoch: u64) -> Setup {
    Setup {
        first_epoch,
        ..Setup::new(ranks)
    }
}

/// Returns an epoch just below `at`, so that each communicator soon passes `at`.
const fn below(at: u64) -> u64 {
    at - 100
}

#[test]
fn ten_thousand_operations_from_epoch_0() {
    stress(setup(2, 0), 10_000, 5000);
    stress(setup(3, 0), 10_000, 5000);
}

#[test]
fn ten_thousand_operations_across_2_to_the_31() {
    stress(setup(4, below(1 << 31)), 10_000, 3000);
    if full() {
        stress(setup(2, below(1 << 31)), 10_000, 20_000);
        stress(setup(5, below(1 << 31)), 10_000, 20_000);
    }
}

#[test]
fn ten_thousand_operations_across_2_to_the_32() {
    stress(setup(2, below(1 << 32)), 10_000, 5000);
    stress(setup(5, below(1 << 32)), 10_000, 2000);
    if full() {
        stress(setup(3, below(1 << 32)), 10_000, 20_000);
        stress(setup(4, below(1 << 32)), 10_000, 20_000);
    }
}

#[test]
fn operations_across_2_to_the_24_and_2_to_the_40() {
    // A progress word holds 24 bits of the sequence number, which wrap at 2^24. An epoch of 2^40
    // does not fit into the other 40 bits of a progress word.
    stress(setup(3, below(1 << 24)), 1000, 1000);
    stress(setup(3, below(1 << 40)), 1000, 1000);
}

#[test]
fn enqueued_and_replayed() {
    for mode in [CallMode::Async, CallMode::Graph] {
        let setup = Setup {
            mode,
            ..setup(3, below(1 << 32))
        };
        stress(setup, 1500, 2000);
    }
}

#[test]
fn lanes_as_threads_across_skipped_flags() {
    // GPU packets have 32-bit flags that are never 0. When the flag would be 0, two epochs are
    // skipped, so that slots still alternate.
    for first_epoch in [(1 << 32) - 10, (1 << 31) - 10, 0] {
        let setup = Setup {
            lanes: 32,
            ..setup(2, first_epoch)
        };
        stress(setup, if full() { 2000 } else { 250 }, 600);
    }
    let setup = Setup {
        lanes: 32,
        blocks: 2,
        ..setup(3, (1 << 32) - 10)
    };
    stress(setup, 60, 600);
}

#[test]
fn packets_of_single_lanes_across_skipped_flags() {
    let packets = [Algorithm::Packet, Algorithm::PacketTwoShot];
    let epochs = [(1 << 32) - 6, (1 << 32) - 5];
    for (algorithm, first_epoch) in packets.into_iter().flat_map(|it| epochs.map(|at| (it, at))) {
        let setup = Setup {
            lanes: 32,
            algorithm,
            ..setup(3, first_epoch)
        };
        for result in fusewire::run_threads(3, &setup.options(), |comm| {
            for i in 0..40 {
                let count = [1usize, 0, 17, 2, 60][i % 5];
                let mut x = vec![(i * 10) as f32 + comm.rank() as f32; count];
                comm.all_reduce(&mut x, ReduceOp::Sum)?;
                assert_eq!(x, vec![(i * 30) as f32 + 3.0; count], "call {i}");
            }
            Ok(())
        }) {
            result.expect("all ranks");
        }
    }
}
