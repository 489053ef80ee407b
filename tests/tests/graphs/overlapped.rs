//! Graphs of an operation and a concurrent computation. Every chunk and every tile that a replay
//! reads must belong to that replay. Negative controls show that the checks detect stale contents.
//!
//! The computation copies each chunk directly after the wait for the flag of that chunk. On every
//! device, the copies are operations of a single-rank communicator on the compute stream.

use core::time::Duration;

use fusewire::{Communicator, DType, GraphExec, ReadyFlags, ReduceOp, Result, Stream, Tensor};
use fusewire_tests::device::{device, stream, tensor};
use fusewire_tests::rng::Rng;

use super::{all, race};

const COUNT: usize = 700;
const CHUNK: usize = 256;

/// Returns the number of replays. The number is high, because the errors that the tests look for
/// are rare. It is lower on a GPU, because a launch takes longer on a GPU.
fn replays() -> u64 {
    if device().is_gpu() { 150 } else { 1500 }
}

/// A rank's communicators and streams: the communicator of the operations on a separate stream, a
/// single-rank communicator, and the compute stream.
struct Parts {
    comm: Communicator,
    single_rank: Communicator,
    compute: Stream,
}

impl Parts {
    fn new(comm: &Communicator) -> Result<Self> {
        let single_rank = comm
            .split(&[comm.rank()], "single_rank")?
            .expect("its own group");
        let compute = stream();
        let single_rank = single_rank.on(&compute);
        single_rank.warm_up()?;
        Ok(Self {
            comm: comm.on(&stream()),
            single_rank,
            compute,
        })
    }

    /// Copies on the compute stream.
    fn copy(&self, to: &Tensor, from: &Tensor) -> Result<()> {
        self.single_rank.all_gather_single_async(to, from).map(drop)
    }

    /// Captures `calls` on both streams as a graph.
    fn capture(&self, calls: impl FnOnce() -> Result<()>) -> Result<GraphExec> {
        self.compute.begin_capture()?;
        let called = calls();
        let graph = self.compute.end_capture()?;
        called?;
        graph.instantiate()
    }

    /// Returns row, first element and length of each chunk of a tensor with one row per rank.
    fn pieces(&self) -> Vec<(usize, usize, usize)> {
        let per_row = COUNT.div_ceil(CHUNK);
        let ranks = self.comm.size() as usize;
        (0..per_row * ranks)
            .map(|index| {
                let (row, at) = (index / per_row, index % per_row * CHUNK);
                (row, row * COUNT + at, CHUNK.min(COUNT - at))
            })
            .collect()
    }
}

fn value(round: u64, rank: usize) -> u64 {
    round * 16 + rank as u64 + 1
}

/// An all_gather with ready flags. The compute stream copies each chunk from `y` to `seen` once the
/// chunk's flag is set.
struct Gather {
    parts: Parts,
    x: Tensor,
    y: Tensor,
    seen: Tensor,
}

impl Gather {
    fn new(comm: &Communicator, registered: bool) -> Result<Self> {
        let parts = Parts::new(comm)?;
        let ranks = comm.size() as usize;
        let x = comm.alloc(DType::U64, COUNT)?;
        Ok(Self {
            parts,
            x: if registered {
                x
            } else {
                tensor(DType::U64, COUNT)?
            },
            y: tensor(DType::U64, COUNT * ranks)?,
            seen: tensor(DType::U64, COUNT * ranks)?,
        })
    }

    fn capture(&self, flags: &ReadyFlags, watched: &ReadyFlags) -> Result<GraphExec> {
        let (parts, comm) = (&self.parts, &self.parts.comm);
        parts.capture(|| {
            let compute = &parts.compute;
            // SAFETY: the flags order the accesses, except in the negative controls.
            let work = unsafe {
                comm.all_gather_with_flags_async(compute, &self.y, &self.x, flags, CHUNK)
            }?;
            // The row of this rank comes first, because its chunks are ready first.
            let (pieces, me) = (parts.pieces(), comm.rank() as usize);
            let ranks = comm.size() as usize;
            for step in 0..ranks {
                let row = (me + step) % ranks;
                for (index, (of, at, length)) in pieces.iter().copied().enumerate() {
                    if of == row {
                        watched.stream_wait(compute, index)?;
                        parts.copy(&self.seen.slice(at, length)?, &self.y.slice(at, length)?)?;
                    }
                }
            }
            work.wait(compute)
        })
    }

    /// Replays the graph with the inputs of `round`. Returns true if all copied chunks are from
    /// this round.
    fn replay(&self, graph: &GraphExec, round: u64) -> Result<bool> {
        let me = self.parts.comm.rank() as usize;
        self.x.copy_from(&vec![value(round, me); COUNT])?;
        graph.run(&self.parts.compute)?;
        let rows = self.seen.to_vec::<u64>()?;
        let right = |(rank, row): (usize, &[u64])| row.iter().all(|x| *x == value(round, rank));
        Ok(rows.chunks(COUNT).enumerate().all(right))
    }
}

#[test]
fn a_thousand_replays_consume_each_chunk_after_its_flag() {
    for (ranks, registered) in [(2, true), (3, false)] {
        all(ranks, |comm| {
            let gather = Gather::new(&comm, registered)?;
            let flags = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
            let graph = gather.capture(&flags, &flags)?;
            let mut rng = Rng::new(u64::from(comm.rank()));
            for round in 0..replays() {
                if rng.one_in(20) {
                    std::thread::sleep(Duration::from_micros(rng.below(800) as u64));
                }
                assert!(gather.replay(&graph, round)?, "replay {round}");
                // Some rounds also make an eager call with the same flags.
                if round % 64 == 63 {
                    let (parts, compute) = (&gather.parts, &gather.parts.compute);
                    let (comm, x, y) = (&parts.comm, &gather.x, &gather.y);
                    // SAFETY: the flags order the accesses, except in the negative controls.
                    unsafe { comm.all_gather_with_flags_async(compute, y, x, &flags, CHUNK) }?
                        .wait(compute)?;
                    compute.synchronize()?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn flags_that_are_not_cleared_give_stale_chunks() {
    race(2, |comm| {
        let gather = Gather::new(&comm, true)?;
        let count = comm.chunks(COUNT, CHUNK);
        let (flags, raised) = (comm.ready_flags(count)?, comm.ready_flags(count)?);
        // All flags are set before the replay, as if the previous replay's flags had not been
        // cleared.
        let graph = gather.capture(&flags, &raised)?;
        raised.words().copy_from(&vec![1_u32; count])?;
        let mut stale = 0;
        for round in 0..8 {
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            stale += u64::from(!gather.replay(&graph, round)?);
            comm.barrier()?;
        }
        assert!(
            comm.rank() == 1 || stale == 8,
            "rank 0 saw {stale} stale replays"
        );
        Ok(())
    });
}

/// Replays a reduce_scatter whose tiles are produced by copies. If `early` is true, the arrival
/// counters are set before the copies. Returns the number of wrong replays.
fn scatter(comm: &Communicator, early: bool, replays: u64) -> Result<u64> {
    let parts = Parts::new(comm)?;
    let (ranks, me) = (comm.size() as usize, comm.rank() as usize);
    let (made, input) = (
        tensor(DType::U64, COUNT * ranks)?,
        comm.alloc(DType::U64, COUNT * ranks)?,
    );
    let output = tensor(DType::U64, COUNT)?;
    let tiles = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
    let graph = parts.capture(|| {
        let (comm, compute) = (&parts.comm, &parts.compute);
        let sum = ReduceOp::Sum;
        // SAFETY: the flags order the accesses, except in the negative controls.
        let work = unsafe {
            comm.reduce_scatter_on_arrival_async(compute, &output, &input, &tiles, CHUNK, 1, sum)
        }?;
        let pieces = parts.pieces();
        if early {
            for index in 0..pieces.len() {
                tiles.stream_write(compute, index, 1)?;
            }
            compute.host_fn(std::sync::Arc::new(|| {
                std::thread::sleep(Duration::from_millis(20));
                Ok(())
            }))?;
        }
        // Tile t of all rows is produced before tile t + 1 of any row.
        let per_row = COUNT.div_ceil(CHUNK);
        for index in (0..per_row).flat_map(|t| (0..ranks).map(move |row| row * per_row + t)) {
            let (_, at, length) = pieces[index];
            parts.copy(&input.slice(at, length)?, &made.slice(at, length)?)?;
            if !early {
                tiles.stream_write(compute, index, 1)?;
            }
        }
        work.wait(compute)
    })?;
    let mut wrong = 0;
    let mut rng = Rng::new(me as u64);
    for round in 0..replays {
        if rng.one_in(20) {
            std::thread::sleep(Duration::from_micros(rng.below(800) as u64));
        }
        made.copy_from(&vec![value(round, me); COUNT * ranks])?;
        graph.run(&parts.compute)?;
        let sum: u64 = (0..ranks).map(|rank| value(round, rank)).sum();
        wrong += u64::from(output.to_vec::<u64>()? != vec![sum; COUNT]);
    }
    Ok(wrong)
}

#[test]
fn a_thousand_replays_send_each_tile_after_its_arrival() {
    for ranks in [2, 3] {
        all(ranks, |comm| {
            let wrong = scatter(&comm, false, replays())?;
            assert_eq!(wrong, 0);
            Ok(())
        });
    }
}

#[test]
fn tiles_that_are_signalled_too_early_are_caught() {
    race(2, |comm| {
        let wrong = scatter(&comm, true, 6)?;
        assert_eq!(wrong, 6);
        Ok(())
    });
}

#[test]
fn both_sides_of_a_layer_in_one_graph() {
    // Each graph repeats all_gather, computation and reduce_scatter on one communicator several
    // times with the same flags.
    all(2, |comm| {
        let parts = Parts::new(&comm)?;
        let (ranks, me) = (comm.size() as usize, comm.rank() as usize);
        let t = |count| comm.alloc(DType::U64, count);
        let (x, y, z, out) = (t(COUNT)?, t(COUNT * ranks)?, t(COUNT * ranks)?, t(COUNT)?);
        let words = comm.chunks(COUNT, CHUNK);
        let (flags, tiles) = (comm.ready_flags(words)?, comm.ready_flags(words)?);
        let graph = parts.capture(|| {
            let (comm, compute) = (&parts.comm, &parts.compute);
            for layer in 0..3 {
                let from = if layer == 0 { &x } else { &out };
                // SAFETY: the flags order the accesses, except in the negative controls.
                let gathered =
                    unsafe { comm.all_gather_with_flags_async(compute, &y, from, &flags, CHUNK) }?;
                // SAFETY: the flags order the accesses, except in the negative controls.
                let scattered = unsafe {
                    comm.reduce_scatter_on_arrival_async(
                        compute,
                        &out,
                        &z,
                        &tiles,
                        CHUNK,
                        1,
                        ReduceOp::Sum,
                    )
                }?;
                for (index, (_, at, length)) in parts.pieces().into_iter().enumerate() {
                    flags.stream_wait(compute, index)?;
                    parts.copy(&z.slice(at, length)?, &y.slice(at, length)?)?;
                    tiles.stream_write(compute, index, 1)?;
                }
                gathered.wait(compute)?;
                scattered.wait(compute)?;
            }
            Ok(())
        })?;
        for round in 0..replays() / 3 {
            x.copy_from(&vec![value(round, me); COUNT])?;
            graph.run(&parts.compute)?;
            // Each layer adds the equal rows of both ranks, which doubles the value.
            assert_eq!(out.to_vec::<u64>()?, vec![8 * value(round, me); COUNT]);
        }
        Ok(())
    });
}
