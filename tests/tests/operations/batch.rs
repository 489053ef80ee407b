//! Tests batches of sends and receives. No pattern or size may deadlock, and messages of a pair of
//! ranks arrive in order.

use core::time::Duration;

use fusewire::{Communicator, DType, Error, Options, Result, Tensor};
use fusewire_tests::device::{run_threads, stream, tensor};

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(30);
    options.testing.spins = Some(200);
    options.channel_slot_bytes = 1024;
    options.channel_depth = 2;
    options
}

fn all<R: Send>(
    ranks: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<R> {
    run_threads(ranks, options, body)
        .into_iter()
        .map(|result| result.unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

fn filled(count: usize, seed: u32) -> Result<Tensor> {
    let tensor = tensor(DType::U32, count)?;
    let values: Vec<u32> = (0..count as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) ^ seed)
        .collect();
    tensor.copy_from(&values)?;
    Ok(tensor)
}

fn is_filled(tensor: &Tensor, seed: u32) -> Result<bool> {
    Ok(tensor.to_vec::<u32>()? == filled(tensor.len(), seed)?.to_vec::<u32>()?)
}

/// Sends to the next rank and receives from the previous rank, with messages that are smaller and
/// larger than a channel.
#[test]
fn a_ring_of_any_size_does_not_deadlock() {
    for ranks in [1, 2, 3, 5, 8] {
        for count in [0, 1, 4, 1000, 300_000] {
            all(ranks, &options(), |comm| {
                let (rank, size) = (comm.rank(), comm.size());
                let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
                let (from, to) = (filled(count, rank)?, tensor(DType::U32, count)?);
                let mut batch = comm.batch_op_create();
                batch.send(&from, next)?;
                batch.recv(&to, before)?;
                batch.issue()?;
                assert!(is_filled(&to, before)?, "{ranks} ranks, {count} elements");
                assert!(batch.ops().is_empty());
                comm.barrier()
            });
        }
    }
}

/// Every rank sends several messages to every rank. Odd ranks list receives before sends.
#[test]
fn every_pair_in_order() {
    let mut several = options();
    several.blocks = 2;
    let mut lanes = options();
    lanes.testing.lanes = 32;
    for (ranks, options) in [(4, options()), (3, several), (2, lanes)] {
        all(ranks, &options, |comm| {
            let (rank, size) = (comm.rank(), comm.size());
            let counts = [700usize, 0, 5000];
            let name = |from: u32, to: u32, i: usize| from * 1000 + to * 10 + i as u32;
            for _ in 0..3 {
                let mut batch = comm.batch_op_create();
                let mut received = Vec::new();
                let mut kept = Vec::new();
                for peer in 0..size {
                    for (i, count) in counts.into_iter().enumerate() {
                        let source = filled(count, name(rank, peer, i))?;
                        let target = tensor(DType::U32, count)?;
                        if rank % 2 == 1 {
                            batch.recv(&target, peer)?;
                            batch.send(&source, peer)?;
                        } else {
                            batch.send(&source, peer)?;
                            batch.recv(&target, peer)?;
                        }
                        received.push((target, name(peer, rank, i)));
                        kept.push(source);
                    }
                }
                let work = batch.issue_async()?;
                drop(kept);
                work.wait_blocking()?;
                for (tensor, name) in &received {
                    assert!(is_filled(tensor, *name)?, "rank {rank}: message {name}");
                }
            }
            comm.barrier()
        });
    }
}

#[test]
fn replayed_with_changing_data() {
    all(3, &options(), |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let (from, to) = (filled(3000, 0)?, tensor(DType::U32, 3000)?);
        let stream = stream();
        stream.begin_capture()?;
        let mut batch = comm.on(&stream).batch_op_create();
        batch.send(&from, next)?;
        batch.recv(&to, before)?;
        batch.issue_async()?;
        let graph = stream.end_capture()?.instantiate()?;
        for round in 0..20 {
            from.copy_from(&filled(3000, rank + 10 * round)?.to_vec::<u32>()?)?;
            graph.run(&stream)?;
            assert!(is_filled(&to, before + 10 * round)?);
        }
        comm.barrier()
    });
}

#[test]
fn mismatches_and_absent_peers_are_errors() {
    let results = run_threads(2, &options(), |comm| {
        let mut batch = comm.batch_op_create();
        let peer = 1 - comm.rank();
        if comm.rank() == 0 {
            batch.send(&tensor(DType::F32, 8)?, peer)?;
        } else {
            batch.recv(&tensor(DType::F32, 9)?, peer)?;
        }
        batch.issue()?;
        comm.barrier()
    });
    for result in results {
        let error = result.expect_err("sizes differ");
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
        assert!(
            error
                .to_string()
                .contains("sends 32 bytes, rank 1 expects 36 bytes"),
            "{error}"
        );
    }

    let mut short = options();
    short.timeout = Duration::from_millis(200);
    let results = run_threads(3, &short, |comm| {
        if comm.rank() == 2 {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            return comm.failure().map_or(Ok(()), Err);
        }
        let mut batch = comm.batch_op_create();
        let other = tensor(DType::U8, 10)?;
        batch.send(&tensor(DType::U8, 10)?, 1 - comm.rank())?;
        batch.recv(&other, 1 - comm.rank())?;
        batch.recv(&tensor(DType::U8, 10)?, 2)?;
        batch.issue()
    });
    for result in results {
        let error = result.expect_err("rank 2 sends nothing");
        assert!(
            error.to_string().contains("rank 2 did not take part"),
            "{error}"
        );
    }
}

#[test]
fn refused_before_anything_moves() {
    all(2, &options(), |comm| {
        let four = tensor(DType::F32, 4)?;
        let mut batch = comm.batch_op_create();
        assert!(batch.send(&four, 2).is_err());
        batch.send(&four, comm.rank())?;
        let error = batch
            .issue()
            .expect_err("a send to this rank without a receive");
        assert!(
            error.to_string().contains("each needs its other side"),
            "{error}"
        );
        batch.send(&four, comm.rank())?;
        batch.recv(&tensor(DType::F32, 5)?, comm.rank())?;
        assert!(batch.issue().is_err());
        comm.barrier()
    });
}
