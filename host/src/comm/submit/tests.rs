//! Tests with buffers that are shorter than their description. The host checks buffers before a
//! launch, so these tests change the parameters of prepared operations.

use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::thread;

use fusewire_device::args::RawBuffer;
use fusewire_kernels::all_reduce::AllReducePacketParams;
use fusewire_kernels::fused::ReduceNormParams;
use fusewire_kernels::overlap::{AllGatherWithFlagsParams, ReduceScatterOnArrivalParams};
use fusewire_kernels::reduction::ReductionParams;
use fusewire_kernels::vector::AllToAllVParams;
use fusewire_kernels::vocab::VocabParams;

use super::PreparedOp;
use crate::comm::Communicator;
use crate::comm::windows::EndFlag;
use crate::options::testing::TestOptions;
use crate::{
    Algorithm, Collective, DType, Norm, Options, ReduceOp, Result, Stream, Tensor, VocabParallel,
    run_threads,
};
use fusewire_device::call::Operation;

/// Value of all outputs before the launch.
const BEFORE: f32 = -7.0;
const COUNT: usize = 512;

/// Runs an operation. If `is_short`, first reduces the length of the buffer at byte `field` of the
/// parameters by one element.
fn run(
    comm: &Communicator,
    mut prepared: PreparedOp<'_>,
    is_short: bool,
    field: usize,
) -> Result<()> {
    if is_short {
        let len = &mut prepared.params[(field + offset_of!(RawBuffer, len)) / 8];
        assert!(*len > 0, "a buffer");
        *len -= 1;
    }
    comm.run(&prepared)
}

fn filled(comm: &Communicator, count: usize, value: f32) -> Result<Tensor> {
    let tensor = comm.alloc(DType::F32, count)?;
    tensor.copy_from(&vec![value; count])?;
    Ok(tensor)
}

/// Runs `launch` on 2 ranks; its argument is true on rank 1, whose buffer is too short, and it
/// returns the output. Expects that both ranks fail with `text` of rank 1, and that no rank has
/// written to rank 1.
#[track_caller]
fn expect_failure(
    algorithm: Algorithm,
    text: &str,
    launch: impl Fn(&Communicator, bool) -> Result<(Result<()>, Tensor)> + Sync,
) {
    for (blocks, lanes) in [(1, 1), (2, 1), (2, 32)] {
        let options = Options {
            algorithm,
            blocks,
            testing: TestOptions {
                lanes,
                ..TestOptions::default()
            },
            timeout: Duration::from_secs(20),
            abort_process_on_timeout_or_error: Some(false),
            ..Options::default()
        };
        let results = run_threads(2, &options, |comm| {
            let (outcome, output) = launch(&comm, comm.rank() == 1)?;
            Ok((outcome, output.to_vec::<f32>()?))
        });
        for (rank, result) in results.into_iter().enumerate() {
            let (outcome, output) = result.expect("a rank that ran");
            let error = outcome.expect_err("a buffer that is too short").to_string();
            let is_right = error.contains("rank 1 in ") && error.contains(text);
            assert!(is_right, "rank {rank}: {error}");
            if rank == 1 {
                let is_unchanged = output.iter().all(|value| *value == BEFORE);
                assert!(
                    is_unchanged,
                    "{blocks} blocks of {lanes} lanes wrote: {error}"
                );
            }
        }
    }
}

#[test]
fn an_all_reduce_with_a_short_buffer_fails_on_all_ranks_and_writes_nothing() {
    let packets = [
        offset_of!(AllReducePacketParams, source),
        offset_of!(AllReducePacketParams, target),
    ];
    let rounds = [
        offset_of!(ReductionParams, source),
        offset_of!(ReductionParams, target),
    ];
    let (words, bytes) = ("element 511 of 511", "element 2047 of 2047");
    let cases = [
        (Algorithm::Packet, packets, words),
        (Algorithm::PacketTwoShot, packets, words),
        (Algorithm::Signal, rounds, bytes),
        (Algorithm::TwoShot, rounds, bytes),
    ];
    for (algorithm, field, text) in cases
        .into_iter()
        .flat_map(|(algorithm, fields, text)| fields.map(|field| (algorithm, field, text)))
    {
        expect_failure(algorithm, text, |comm, is_short| {
            let (input, output) = (filled(comm, COUNT, 1.0)?, filled(comm, COUNT, BEFORE)?);
            let prepared = comm.prepare(Collective::all_reduce(&output, &input, ReduceOp::Sum))?;
            let outcome = run(comm, prepared, is_short, field);
            Ok((outcome, output))
        });
    }
}

#[test]
fn a_norm_with_a_short_buffer_fails_on_all_ranks_and_writes_nothing() {
    for algorithm in [Algorithm::Packet, Algorithm::Signal, Algorithm::TwoShot] {
        for field in [
            offset_of!(ReduceNormParams, source),
            offset_of!(ReduceNormParams, weight),
            offset_of!(ReduceNormParams, out),
        ] {
            expect_failure(algorithm, "recorded a failure", |comm, is_short| {
                let (input, output) = (filled(comm, COUNT, 1.0)?, filled(comm, COUNT, BEFORE)?);
                let weight = filled(comm, COUNT / 4, 1.0)?;
                let norm = Norm::rms(&output, &input, &weight, 1e-5).with_algorithm(algorithm);
                let prepared = comm.prepare_norm(Operation::AllReduceNorm, &norm, false)?;
                let outcome = run(comm, prepared, is_short, field);
                Ok((outcome, output))
            });
        }
    }
}

#[test]
fn a_vocab_parallel_with_a_short_buffer_fails_on_all_ranks_and_writes_nothing() {
    const K: usize = 4;
    const ROWS: usize = 8;
    for field in [
        offset_of!(VocabParams, logits),
        offset_of!(VocabParams, values),
        offset_of!(VocabParams, indices),
    ] {
        expect_failure(Algorithm::Auto, "recorded a failure", |comm, is_short| {
            let (logits, values) = (filled(comm, COUNT, 1.0)?, filled(comm, ROWS * K, BEFORE)?);
            let indices = comm.alloc(DType::U32, ROWS * K)?;
            let vocab = VocabParallel::new(&logits, ROWS, COUNT / ROWS * 2)
                .with_top_k(K, &indices)
                .with_values(&values);
            let prepared = comm.prepare_vocab(&vocab, false)?;
            let outcome = run(comm, prepared, is_short, field);
            Ok((outcome, values))
        });
    }
}

#[test]
fn an_overlap_with_short_words_fails_on_all_ranks_and_writes_nothing() {
    const TILE: usize = 64;
    for field in [
        offset_of!(AllGatherWithFlagsParams, words),
        offset_of!(AllGatherWithFlagsParams, arrivals),
    ] {
        expect_failure(Algorithm::Auto, "element 15 of 15", |comm, is_short| {
            let (input, output) = (filled(comm, COUNT, 1.0)?, filled(comm, 2 * COUNT, BEFORE)?);
            let (flags, consumer) = (comm.ready_flags(2 * COUNT / TILE)?, Stream::new());
            let prepared =
                comm.prepare_all_gather_with_flags(&consumer, &output, &input, &flags, TILE)?;
            let outcome = run(comm, prepared, is_short, field);
            Ok((outcome, output))
        });
    }
    expect_failure(Algorithm::Auto, "element 15 of 15", |comm, is_short| {
        let (input, output) = (filled(comm, 2 * COUNT, 1.0)?, filled(comm, COUNT, BEFORE)?);
        let (flags, producer) = (comm.ready_flags(2 * COUNT / TILE)?, Stream::new());
        let tensors = [&output, &input];
        let (target, op) = (1, ReduceOp::Sum);
        let prepared =
            comm.prepare_reduce_scatter_on_arrival(&producer, tensors, &flags, TILE, target, op)?;
        let outcome = run(
            comm,
            prepared,
            is_short,
            offset_of!(ReduceScatterOnArrivalParams, counters),
        );
        Ok((outcome, output))
    });
}

#[test]
fn a_vector_operation_with_short_counts_fails_on_all_ranks_and_writes_nothing() {
    for field in [
        offset_of!(AllToAllVParams, send_counts),
        offset_of!(AllToAllVParams, receive_counts),
    ] {
        expect_failure(Algorithm::Auto, "element 1 of 1", |comm, is_short| {
            let (input, output) = (filled(comm, COUNT, 1.0)?, filled(comm, COUNT, BEFORE)?);
            let counts = [COUNT as u64 / 2; 2];
            let collective = Collective::all_to_all_v(&output, &input, &counts, &counts);
            let prepared = comm.prepare(collective)?;
            let outcome = run(comm, prepared, is_short, field);
            Ok((outcome, output))
        });
    }
}

/// A thread that runs a launch directly, while the last launch was on another stream, delays the
/// end of windows. A launch that comes after the end is refused.
#[test]
fn windows_do_not_end_during_a_launch_on_a_passed_window() {
    let results = run_threads(1, &Options::default(), |comm| {
        let flag = EndFlag::default();
        let tensor = filled(&comm, COUNT, 1.0)?;
        let collective = Collective::all_reduce(&tensor, &tensor, ReduceOp::Sum);
        let prepared = comm.prepare(collective)?.taking(Arc::from([flag.clone()]));
        let last_stream = &comm.inner.executor.last_stream;
        let retired = AtomicBool::new(false);
        thread::scope(|scope| {
            last_stream.store(usize::MAX, Ordering::SeqCst);
            comm.with_windows_now(&prepared, |_| {
                flag.set();
                scope.spawn(|| {
                    comm.retire_windows(&[]).expect("no failure");
                    retired.store(true, Ordering::SeqCst);
                });
                thread::sleep(Duration::from_millis(100));
                assert!(!retired.load(Ordering::SeqCst), "during the launch");
            })
        })?;
        assert!(retired.load(Ordering::SeqCst));
        let late = comm.with_windows_now(&prepared, |_| panic!("the window was freed"));
        assert!(late.is_err());
        let late = comm.with_windows_queued(&prepared, |_| -> Result<()> {
            panic!("the window was freed")
        });
        assert!(late.is_err());
        Ok(())
    });
    results
        .into_iter()
        .for_each(|result| result.expect("one rank"));
}
