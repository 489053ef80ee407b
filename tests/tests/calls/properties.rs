//! Compares the results of random cases with the reference, and shrinks a failing case to the
//! smallest one that still fails.

use fusewire::{Algorithm, DType, Operation, ReduceOp};
use fusewire_tests::cases::{Case, MEMORIES, REDUCTIONS, operations, reducing};
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{Setup, Threads};
use fusewire_tests::skip::full;
use proptest::prelude::*;
use proptest::sample::select;

fn reductions() -> impl Strategy<Value = (DType, Option<ReduceOp>)> {
    let pairs: Vec<_> = DType::ALL
        .into_iter()
        .flat_map(|dtype| {
            let ops = REDUCTIONS
                .into_iter()
                .filter(move |op| op.code().supports(dtype));
            ops.map(move |op| (dtype, Some(op)))
        })
        .collect();
    select(pairs)
}

fn kinds() -> impl Strategy<Value = (Operation, DType, Option<ReduceOp>)> {
    let moving: Vec<Operation> = operations()
        .into_iter()
        .filter(|operation| !operation.reduces() && *operation != Operation::AllReduceNorm)
        .collect();
    prop_oneof![
        (select(reducing()), reductions()).prop_map(|(o, (d, r))| (o, d, r)),
        (select(moving), select(DType::ALL.to_vec())).prop_map(|(o, d)| (o, d, None)),
        select(vec![DType::F32, DType::F16, DType::Bf16]).prop_map(|dtype| (
            Operation::AllReduceNorm,
            dtype,
            None
        )),
    ]
}

prop_compose! {
    fn case()(
        (operation, dtype, reduction) in kinds(),
        count in prop_oneof![0usize..80, 0usize..3000, 0usize..30_000],
        chunks in 1usize..75,
        root in 0u32..16,
        in_place in any::<bool>(),
        memory in select(MEMORIES.to_vec()),
        offset in 0usize..9,
    ) -> Case {
        let norm = operation == Operation::AllReduceNorm;
        Case {
            count: if norm { count % 9 } else { count },
            hidden: if norm { chunks * 8 } else { 0 },
            root: if norm { root % 2 } else { root },
            in_place: in_place && Case::has_in_place(operation),
            memory,
            offset,
            ..Case::new(operation, dtype, reduction)
        }
    }
}

prop_compose! {
    fn setup()(
        ranks in 1u32..6,
        algorithm in select(vec![
            Algorithm::Auto, Algorithm::Packet, Algorithm::PacketTwoShot, Algorithm::Signal,
            Algorithm::TwoShot,
        ]),
        mode in select(vec![CallMode::Blocking, CallMode::Async, CallMode::Graph]),
        (lanes, blocks) in select(vec![(1, 1), (1, 1), (1, 1), (1, 3), (32, 1)]),
        staging in select(vec![4u64 << 10, 20 << 10, 1 << 20]),
        first_epoch in prop_oneof![Just(0), (1u64 << 32) - 4..1 << 32, (1u64 << 31) - 4..1 << 31],
    ) -> Setup {
        Setup { ranks, lanes, blocks, algorithm, mode, staging, first_epoch, ..Setup::new(ranks) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if full() { 2000 } else { 150 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_calls_equal_the_reference(
        setup in setup(),
        mut cases in prop::collection::vec(case(), 1..5),
    ) {
        if setup.lanes > 1 {
            // Each call starts one thread per lane.
            cases.truncate(2);
            cases.iter_mut().for_each(|case| case.count %= 2000);
        }
        // A row of the fused norm must fit into staging.
        cases.iter_mut().for_each(|case| case.hidden %= 496);
        cases.retain(|case| case.operation != Operation::AllReduceNorm || case.hidden > 0);
        if let Err(wrong) = Threads.run_cases(&setup, &cases) {
            return Err(TestCaseError::fail(wrong));
        }
    }
}
