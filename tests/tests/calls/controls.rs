//! Negative controls: the checks of this crate must detect injected errors.

use core::time::Duration;

use fusewire::{DType, Error, LaunchAttributes, Operation, Options, ReduceOp, run_threads};
use fusewire_device::call::Call;
use fusewire_device::layout::CommConst;
use fusewire_device::session::Session;
use fusewire_device::{Block, Group, Machine, kernel};
use fusewire_tests::cases::{Case, MEMORIES};
use fusewire_tests::oracle;
use fusewire_tests::rank::{BufferRanges, CallMode, Rank};

type TamperFn = fn(&mut [u8], &BufferRanges);

/// Runs all_reduce operations and tampers with the buffers of one operation on rank 1. Returns the
/// errors of each rank.
fn tampered(tamper: TamperFn) -> Vec<Vec<String>> {
    let mut all = Vec::new();
    for memory in MEMORIES {
        let case = Case {
            memory,
            ..Case::new(Operation::AllReduce, DType::F32, Some(ReduceOp::Sum))
        };
        let results = run_threads(2, &Options::default(), |comm| {
            let me = comm.rank();
            let mut rank = Rank::new(comm, CallMode::Blocking, &[case])?;
            rank.run(&case)?;
            rank.run_tampered(&case, |bytes, ranges| {
                if me == 1 {
                    tamper(bytes, ranges);
                }
            })?;
            rank.run(&case)?;
            Ok(rank.finish().1)
        });
        all.extend(results.into_iter().map(|wrong| wrong.expect("joined")));
    }
    all
}

fn only_rank_1_reports(tamper: TamperFn, what: &str) {
    for (i, wrong) in tampered(tamper).into_iter().enumerate() {
        let expected = i % 2;
        assert_eq!(wrong.len(), expected, "{wrong:?}");
        assert!(
            wrong.iter().all(|wrong| wrong.contains(what)),
            "{wrong:?} lacks {what}"
        );
    }
}

#[test]
fn untouched_memory_is_right() {
    assert!(tampered(|_, _| {}).iter().all(Vec::is_empty));
}

#[test]
fn one_flipped_bit_of_the_output_is_caught() {
    only_rank_1_reports(
        |bytes, ranges| bytes[ranges.output.start * 4 + 400] ^= 1,
        "output[100]",
    );
    only_rank_1_reports(
        |bytes, ranges| bytes[ranges.output.end * 4 - 1] ^= 0x80,
        "output[999]",
    );
}

#[test]
fn a_write_outside_of_the_output_is_caught() {
    only_rank_1_reports(
        |bytes, ranges| bytes[ranges.output.end * 4] ^= 1,
        "guard zone",
    );
    only_rank_1_reports(
        |bytes, ranges| bytes[ranges.output.start * 4 - 1] ^= 1,
        "guard zone",
    );
    only_rank_1_reports(
        |bytes, ranges| bytes[ranges.total * 4 - 1] ^= 1,
        "guard zone",
    );
}

#[test]
fn a_write_into_the_input_is_caught() {
    only_rank_1_reports(
        |bytes, ranges| bytes[ranges.input.start * 4] ^= 1,
        "input[0]",
    );
}

#[test]
fn an_unwritten_output_is_caught() {
    // A call that does nothing leaves the poison in the output.
    only_rank_1_reports(
        |bytes, ranges| bytes[ranges.output.start * 4..ranges.output.end * 4].fill(0xa5),
        "output[0]",
    );
}

#[test]
fn inputs_differ_by_rank_index_and_call() {
    for dtype in DType::ALL {
        let a = oracle::fill(dtype, 0, 0, 500);
        for (rank, call) in [(1, 0), (2, 0), (0, 1)] {
            let b = oracle::fill(dtype, rank, call, 500);
            let size = dtype.size();
            let same = a.chunks(size).zip(b.chunks(size)).filter(|(a, b)| a == b);
            assert!(same.count() < 30, "{dtype:?}, rank {rank}, call {call}");
        }
        let shifted = a.chunks(dtype.size()).skip(1);
        let same = shifted.zip(a.chunks(dtype.size())).filter(|(a, b)| a == b);
        assert!(same.count() < 30, "{dtype:?}");
    }
}

#[test]
fn an_extra_missing_or_misplaced_contribution_changes_bits() {
    let inputs: Vec<Vec<u8>> = (0..4)
        .map(|rank| oracle::fill(DType::F32, rank, 3, 200))
        .collect();
    let sum = |order: &[usize]| {
        let inputs: Vec<Vec<u8>> = order.iter().map(|rank| inputs[*rank].clone()).collect();
        oracle::reduce(DType::F32, ReduceOp::Sum, &[], &inputs)
    };
    let right = sum(&[0, 1, 2, 3]);
    for wrong in [
        &[0, 1, 2][..],
        &[0, 1, 2, 2],
        &[0, 1, 2, 3, 3],
        &[3, 2, 1, 0],
        &[0, 2, 1, 3],
    ] {
        assert_ne!(right, sum(wrong), "{wrong:?}");
    }
}

#[test]
fn rank_ordered_sums_are_near_the_exact_ones() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for ranks in [1u32, 2, 5, 8, 16] {
            let inputs: Vec<Vec<u8>> = (0..ranks)
                .map(|rank| oracle::fill(dtype, rank, 9, 500))
                .collect();
            let sum = oracle::reduce(dtype, ReduceOp::Sum, &[], &inputs);
            let wide: Vec<Vec<f32>> = inputs
                .iter()
                .map(|input| oracle::widen(dtype, input))
                .collect();
            let unit = match dtype {
                DType::F16 => f64::from(2f32.powi(-11)),
                DType::Bf16 => f64::from(2f32.powi(-8)),
                _ => 0.0,
            };
            for (i, got) in oracle::widen(dtype, &sum).into_iter().enumerate() {
                let exact: f64 = wide.iter().map(|rank| f64::from(rank[i])).sum();
                let size: f64 = wide.iter().map(|rank| f64::from(rank[i].abs())).sum();
                let bound = size * f64::from(ranks) * 2f64.powi(-24) + exact.abs() * unit * 1.01;
                let error = (f64::from(got) - exact).abs();
                assert!(
                    error <= bound,
                    "{dtype:?}, {ranks} ranks, {i}: {got} for {exact}"
                );
            }
        }
    }
}

/// Returns on lane 3 while the other lanes enter a barrier.
///
/// # Safety
/// `constants` must meet the requirements of [`Session::begin`].
#[kernel]
unsafe fn leaves_early(block: Block<impl Machine>, constants: *const CommConst, call: u64) {
    // SAFETY: the caller guarantees that `constants` meets the requirements of `begin`.
    let session = unsafe { Session::begin(block, constants, call, 0, 0) };
    let Some(session) = session else {
        return;
    };
    if block.rank() == 3 {
        return;
    }
    block.sync();
    session.end(Ok(()));
}

#[test]
fn the_emulator_reports_a_lane_that_leaves() {
    let mut options = Options::default();
    options.testing.lanes = 32;
    options.timeout = Duration::from_secs(5);
    for result in run_threads(1, &options, |comm| {
        let params = LeavesEarlyParams {
            constants: comm.constants(),
            call: Call::new(Operation::User, 0, 0, 0, 0xffff, 1).0,
        };
        // SAFETY: `params` contains the constants of this communicator, and the kernel accesses no
        // tensors.
        let work =
            unsafe { comm.launch_raw(&LEAVES_EARLY, params, &[], LaunchAttributes::default())? };
        Ok(work.wait_blocking())
    }) {
        let error = result.expect("joined").expect_err("a lane left");
        assert!(matches!(error, Error::Launch { .. }), "{error}");
        assert!(
            error.to_string().contains("a lane left the kernel"),
            "{error}"
        );
    }
}
