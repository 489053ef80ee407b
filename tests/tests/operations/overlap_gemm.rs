//! Tests eager all_gather with a ready flag per chunk and eager reduce_scatter with an arrival
//! counter per tile: results, flags and counters, wrong arguments, and the error of a missing tile.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

use fusewire::testing::reference::{fill, reduce};
use fusewire::{
    Communicator, DType, Error, FailureKind, Operation, Options, ReadyFlags, ReduceOp, Result,
    Stream, Tensor,
};
use fusewire_tests::device::{device, run_threads, stream, tensor};

fn options(lanes: u32, blocks: u32) -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    if !device().is_gpu() {
        options.testing.lanes = lanes;
    }
    options.blocks = blocks;
    options
}

fn all<R: Send>(
    ranks: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<R> {
    let results = run_threads(ranks, options, body);
    results
        .into_iter()
        .map(|result| result.expect("all ranks"))
        .collect()
}

/// Returns the communicator on a new stream, and a second new stream for computation.
fn with_streams(comm: &Communicator) -> (Communicator, Stream) {
    (comm.on(&stream()), stream())
}

/// Kind of memory of the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Registered,
    Ordinary,
    /// Buffers are in windows on odd ranks only.
    Mixed,
}

impl Memory {
    fn take(self, comm: &Communicator, dtype: DType, count: usize) -> Result<Tensor> {
        let window = comm.alloc(dtype, count)?;
        match self {
            Self::Registered => Ok(window),
            Self::Mixed if comm.rank() % 2 == 1 => Ok(window),
            _ => tensor(dtype, count),
        }
    }
}

/// Number of guard flags after the flags of an operation. Guard flags must remain zero.
const GUARD: usize = 3;

fn gather(
    comm: &Communicator,
    compute: &Stream,
    flags: &ReadyFlags,
    memory: Memory,
    dtype: DType,
    [count, chunk]: [usize; 2],
) -> Result<()> {
    let (ranks, me) = (comm.size() as usize, comm.rank());
    let input = memory.take(comm, dtype, count)?;
    let output = tensor(dtype, count * ranks)?;
    for call in 0..3 {
        input.copy_from_bytes(&fill(dtype, me, call, count))?;
        output.copy_from_bytes(&vec![0xee; count * ranks * dtype.size()])?;
        // SAFETY: the flags order the accesses to chunks and tiles.
        let work =
            unsafe { comm.all_gather_with_flags_async(compute, &output, &input, flags, chunk) }?;
        // The compute stream continues when all chunks have arrived.
        let chunks = comm.chunks(count, chunk);
        for index in (0..chunks).rev() {
            flags.stream_wait(compute, index)?;
        }
        compute.synchronize()?;
        work.wait_blocking()?;
        let expected: Vec<u8> = (0..comm.size())
            .flat_map(|rank| fill(dtype, rank, call, count))
            .collect();
        let case = (dtype, count, chunk, memory, call);
        assert!(output.to_bytes()? == expected, "{case:?}");
        let words = flags.words().to_vec::<u32>()?;
        assert!(words[..chunks].iter().all(|word| *word == 1), "{case:?}");
        assert!(words[chunks..].iter().all(|word| *word == 0), "{case:?}");
    }
    Ok(())
}

/// Element counts and chunk lengths: zero elements, less than a chunk, multiples of a chunk, counts
/// with a shorter last chunk, and counts larger than staging.
const SHAPES: [[usize; 2]; 8] = [
    [0, 5],
    [1, 1],
    [7, 3],
    [64, 64],
    [1000, 130],
    [4099, 512],
    [70_001, 9000],
    [300, 1_000_000],
];

#[test]
fn chunks_of_every_rank_arrive() {
    let memories = [Memory::Registered, Memory::Ordinary, Memory::Mixed];
    for (ranks, lanes, blocks) in [
        (1, 1, 1),
        (2, 1, 1),
        (3, 1, 3),
        (4, 1, 2),
        (8, 1, 1),
        (2, 32, 1),
        (3, 64, 2),
    ] {
        let mut options = options(lanes, blocks);
        options.staging_bytes = 64 << 10;
        all(ranks, &options, |comm| {
            let (comm, compute) = with_streams(&comm);
            for (i, shape) in SHAPES.into_iter().enumerate() {
                let flags = comm.ready_flags(comm.chunks(shape[0], shape[1]) + GUARD)?;
                let dtype = [DType::F32, DType::U8, DType::I64, DType::Bf16][i % 4];
                let memory = memories[(i + ranks as usize) % 3];
                gather(&comm, &compute, &flags, memory, dtype, shape)?;
            }
            Ok(())
        });
    }
}

fn scatter(
    comm: &Communicator,
    compute: &Stream,
    (dtype, op): (DType, ReduceOp),
    memory: Memory,
    [count, tile]: [usize; 2],
) -> Result<()> {
    let (ranks, me) = (comm.size(), comm.rank());
    let rows = ranks as usize;
    let input = memory.take(comm, dtype, count * rows)?;
    let (output, whole) = (tensor(dtype, count)?, tensor(dtype, count)?);
    let tiles = comm.ready_flags(comm.chunks(count, tile) + GUARD)?;
    let per_row = count.div_ceil(tile);
    for call in 0..2 {
        input.copy_from_bytes(&fill(dtype, me, call, count * rows))?;
        // SAFETY: the flags order the accesses to chunks and tiles.
        let work = unsafe {
            comm.reduce_scatter_on_arrival_async(compute, &output, &input, &tiles, tile, 3, op)
        }?;
        // The producer finishes the tiles in reverse order, which is not the order in which the
        // operation reads them.
        for index in (0..per_row * rows).rev() {
            tiles.stream_write(compute, index, 3)?;
        }
        work.wait(compute)?;
        compute.synchronize()?;
        work.wait_blocking()?;
        comm.reduce_scatter_single(&whole, &input, op)?;
        let case = (dtype, op, count, tile, memory, call);
        let found = output.to_bytes()?;
        assert!(found == whole.to_bytes()?, "{case:?}: different bits");
        let inputs: Vec<Vec<u8>> = (0..ranks)
            .map(|rank| {
                let row = count * dtype.size();
                let from = me as usize * row;
                fill(dtype, rank, call, count * rows)[from..from + row].to_vec()
            })
            .collect();
        assert!(found == reduce(dtype, op, &[], &inputs), "{case:?}");
    }
    Ok(())
}

#[test]
fn tiles_of_every_rank_are_reduced_to_the_same_bits() {
    let memories = [Memory::Registered, Memory::Ordinary, Memory::Mixed];
    let kinds = [
        (DType::F32, ReduceOp::Sum),
        (DType::F16, ReduceOp::Sum),
        (DType::Bf16, ReduceOp::Sum),
        (DType::F32, ReduceOp::Average),
        (DType::I32, ReduceOp::Sum),
        (DType::Bf16, ReduceOp::Max),
        (DType::F64, ReduceOp::Product),
    ];
    let shapes: [[usize; 2]; 6] = [
        [0, 5],
        [1, 1],
        [70, 32],
        [1000, 300],
        [4099, 1024],
        [20_000, 1_000_000],
    ];
    for (ranks, lanes, blocks) in [
        (1, 1, 1),
        (2, 1, 1),
        (3, 1, 3),
        (4, 1, 2),
        (8, 1, 1),
        (2, 32, 1),
        (3, 64, 2),
    ] {
        let mut options = options(lanes, blocks);
        options.staging_bytes = 64 << 10;
        all(ranks, &options, |comm| {
            let (comm, compute) = with_streams(&comm);
            for (i, kind) in kinds.into_iter().enumerate() {
                let memory = memories[(i + ranks as usize) % 3];
                let shape = shapes[(i + lanes as usize) % shapes.len()];
                scatter(&comm, &compute, kind, memory, shape)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_host_thread_consumes_chunks_and_produces_tiles() {
    if device().is_gpu() {
        return;
    }
    const COUNT: usize = 1000;
    const CHUNK: usize = 300;
    let turn = AtomicU64::new(0);
    all(3, &options(1, 1), |comm| {
        let (comm, compute) = with_streams(&comm);
        let ranks = comm.size() as usize;
        let (x, y) = (
            comm.alloc(DType::U64, COUNT)?,
            comm.alloc(DType::U64, COUNT * ranks)?,
        );
        let flags = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
        let (input, output) = (
            comm.alloc(DType::U64, COUNT * ranks)?,
            tensor(DType::U64, COUNT)?,
        );
        let tiles = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
        for round in 1..60_u64 {
            // Ranks start one after another. The rank that starts first differs by round.
            let late = (u64::from(comm.rank()) + round) % 3;
            std::thread::sleep(Duration::from_micros(300 * late));
            x.copy_from(&vec![round * 10 + u64::from(comm.rank()); COUNT])?;
            // SAFETY: the flags order the accesses to chunks and tiles.
            let gathered =
                unsafe { comm.all_gather_with_flags_async(&compute, &y, &x, &flags, CHUNK) }?;
            // SAFETY: the flags order the accesses to chunks and tiles.
            let scattered = unsafe {
                comm.reduce_scatter_on_arrival_async(
                    &compute,
                    &output,
                    &input,
                    &tiles,
                    CHUNK,
                    2,
                    ReduceOp::Sum,
                )
            }?;
            // The compute stream clears the flags and counters. Wait for it before the host waits
            // for flags and sets counters.
            compute.synchronize()?;
            let per_row = COUNT.div_ceil(CHUNK);
            for chunk in 0..per_row {
                for rank in 0..ranks {
                    let index = rank * per_row + chunk;
                    flags.wait(index)?;
                    // A flag that was set too early would give data of the previous round.
                    let (from, to) = (chunk * CHUNK, COUNT.min((chunk + 1) * CHUNK));
                    let part = y.slice(rank * COUNT + from, to - from)?.to_vec::<u64>()?;
                    let value = round * 10 + rank as u64;
                    assert!(part.iter().all(|x| *x == value), "round {round}");
                    let row = input.slice(rank * COUNT + from, to - from)?;
                    row.copy_from(&part)?;
                    tiles.add(index, 1)?;
                    turn.fetch_add(1, Ordering::Relaxed);
                    tiles.add(index, 1)?;
                }
            }
            gathered.wait_blocking()?;
            scattered.wait_blocking()?;
            let sum = 3 * (round * 10 + u64::from(comm.rank()));
            assert_eq!(output.to_vec::<u64>()?, vec![sum; COUNT]);
        }
        Ok(())
    });
}

#[test]
fn flags_in_the_callers_memory() {
    all(2, &options(1, 1), |comm| {
        let (comm, compute) = with_streams(&comm);
        let words = tensor(DType::U32, 9)?;
        words.copy_from(&[7_u32; 9])?;
        let flags = comm.adopt_ready_flags(&words.slice(2, 5)?)?;
        assert_eq!((flags.len(), flags.is_empty()), (5, false));
        let (x, y) = (comm.alloc(DType::F32, 20)?, tensor(DType::F32, 40)?);
        // SAFETY: the flags order the accesses to chunks and tiles.
        let work = unsafe { comm.all_gather_with_flags_async(&compute, &y, &x, &flags, 10) }?;
        work.wait(&compute)?;
        compute.synchronize()?;
        assert_eq!(words.to_vec::<u32>()?, [7, 7, 1, 1, 1, 1, 0, 7, 7]);
        Ok(())
    });
}

#[test]
fn a_missing_tile_is_named() {
    let mut options = options(1, 1);
    options.timeout = Duration::from_secs(2);
    let failures = all(2, &options, |comm| {
        let (comm, compute) = with_streams(&comm);
        let (x, y) = (comm.alloc(DType::F32, 200)?, tensor(DType::F32, 100)?);
        let tiles = comm.ready_flags(comm.chunks(100, 30))?;
        let sum = ReduceOp::Sum;
        // SAFETY: the flags order the accesses to chunks and tiles.
        let work =
            unsafe { comm.reduce_scatter_on_arrival_async(&compute, &y, &x, &tiles, 30, 5, sum) }?;
        for index in 0..tiles.len() {
            // Rank 1's producer writes a count that is one too low for tile 2 of row 1.
            let short = u32::from(comm.rank() == 1 && index == 6);
            tiles.stream_write(&compute, index, 5 - short)?;
        }
        let error = work.wait_blocking().expect_err("a tile is missing");
        assert!(comm.barrier().is_err(), "the communicator has failed");
        Ok((error.to_string(), comm.failure().expect("a failure")))
    });
    for (text, failure) in failures {
        let Error::Timeout(failure) = failure else {
            panic!("{text}");
        };
        assert_eq!(failure.kind, FailureKind::Timeout);
        assert_eq!(
            failure.activity.operation,
            Operation::ReduceScatterOnArrival
        );
        assert_eq!((failure.reporter, failure.rank), (1, 1), "{text}");
        assert_eq!(failure.tile(), Some(6), "{text}");
        let named = "waiting for tile 6 of its own input (wanted count 5, saw 4)";
        assert!(text.contains(named), "{text}");
    }
}

#[test]
fn a_gather_that_fails_releases_its_consumer() {
    let mut options = options(1, 1);
    options.timeout = Duration::from_millis(400);
    all(2, &options, |comm| {
        if comm.rank() == 1 {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
            return Ok(());
        }
        let (comm, compute) = with_streams(&comm);
        let (x, y) = (tensor(DType::F32, 100)?, tensor(DType::F32, 200)?);
        let flags = comm.ready_flags(4)?;
        // SAFETY: the flags order the accesses to chunks and tiles.
        let work = unsafe { comm.all_gather_with_flags_async(&compute, &y, &x, &flags, 50) }?;
        for index in 0..4 {
            let _ = flags.stream_wait(&compute, index)?;
        }
        // On the CPU, the waits of the compute stream fail. On a GPU, a wait on a stream has no
        // error result: the failure ends the wait, and `synchronize` succeeds.
        assert_eq!(compute.synchronize().is_err(), !device().is_gpu());
        let error = work.wait_blocking().expect_err("rank 1 does not call it");
        assert!(matches!(error, Error::Timeout(_)), "{error}");
        let words = flags.words().to_vec::<u32>()?;
        assert_eq!(words[..2], [1, 1], "chunks of this rank are ready");
        assert_eq!(words[2..], [ReadyFlags::FAILED; 2]);
        // A call on a failed communicator is refused before it clears the flags.
        // SAFETY: the flags order the accesses to chunks and tiles.
        let again = unsafe { comm.all_gather_with_flags_async(&compute, &y, &x, &flags, 50) };
        assert!(matches!(again, Err(Error::Timeout(_))));
        assert_eq!(flags.words().to_vec::<u32>()?, words);
        Ok(())
    });
}

#[test]
fn different_chunk_lengths_are_an_error() {
    let mut options = options(1, 1);
    options.timeout = Duration::from_secs(5);
    let texts = all(2, &options, |comm| {
        let (comm, compute) = with_streams(&comm);
        let (x, y) = (tensor(DType::F32, 100)?, tensor(DType::F32, 200)?);
        let flags = comm.ready_flags(20)?;
        let chunk = 50 - 10 * comm.rank() as usize;
        // SAFETY: the flags order the accesses to chunks and tiles.
        let work = unsafe { comm.all_gather_with_flags_async(&compute, &y, &x, &flags, chunk) }?;
        Ok(work.wait_blocking().expect_err("chunks differ").to_string())
    });
    for text in texts {
        assert!(text.contains("number of elements in a chunk"), "{text}");
    }
}

#[test]
fn wrong_arguments_are_refused() {
    all(2, &options(1, 1), |comm| {
        let (comm, compute) = with_streams(&comm);
        let (x, y) = (tensor(DType::F32, 100)?, tensor(DType::F32, 200)?);
        let flags = comm.ready_flags(4)?;
        let says = |what: &str, result: Result<fusewire::Work>| match result {
            Err(Error::InvalidArgument { detail, .. }) => {
                assert!(detail.contains(what), "{detail}");
            }
            other => panic!("{what}: {other:?}"),
        };
        let gather = |stream: &Stream, output: &Tensor, flags: &ReadyFlags, chunk: usize| {
            // SAFETY: the flags order the accesses to chunks and tiles.
            unsafe { comm.all_gather_with_flags_async(stream, output, &x, flags, chunk) }
        };
        says("needed", gather(&compute, &x, &flags, 50));
        says("need 6", gather(&compute, &y, &flags, 40));
        says("no elements", gather(&compute, &y, &flags, 0));
        says("own", gather(comm.stream(), &y, &flags, 50));
        let other = comm.dup()?.ready_flags(4)?;
        says("another communicator", gather(&compute, &y, &other, 50));
        let ints = tensor(DType::I32, 200)?;
        says("output is i32", gather(&compute, &ints, &flags, 50));
        let scatter = |target: u32, op: ReduceOp| {
            // SAFETY: the flags order the accesses to chunks and tiles.
            unsafe {
                comm.reduce_scatter_on_arrival_async(&compute, &x, &y, &flags, 50, target, op)
            }
        };
        says("target 0", scatter(0, ReduceOp::Sum));
        says("target 1073741824", scatter(1 << 30, ReduceOp::Sum));
        says("no reduction", scatter(1, ReduceOp::BitAnd));
        let word = tensor(DType::I32, 4)?;
        assert!(comm.adopt_ready_flags(&word).is_err());
        assert!(flags.stream_wait(&compute, 4).is_err());
        assert!(flags.stream_write(&compute, 4, 1).is_err());
        assert_eq!(flags.words().to_vec::<u32>()?, [0; 4]);
        if device().is_gpu() {
            assert!(flags.wait(0).is_err());
            assert!(flags.add(0, 1).is_err());
            says("stream", gather(&Stream::new(), &y, &flags, 50));
        }
        // Refused calls use no sequence number, so the ranks still agree.
        comm.barrier()?;
        // Empty operations are permitted and need no flags.
        let (none, nothing) = (tensor(DType::F32, 0)?, comm.ready_flags(0)?);
        // SAFETY: the flags order the accesses to chunks and tiles.
        unsafe { comm.all_gather_with_flags_async(&compute, &none, &none, &nothing, 0) }?
            .wait_blocking()?;
        // SAFETY: the flags order the accesses to chunks and tiles.
        unsafe {
            comm.reduce_scatter_on_arrival_async(
                &compute,
                &none,
                &none,
                &nothing,
                0,
                1,
                ReduceOp::Sum,
            )
        }?
        .wait_blocking()
    });
}
