//! Programs like those of `safe_programs` that use operations with ready flags. Flags order the
//! accesses of the consumer and the producer, as these operations require. The other accesses are
//! those of safe code.

use std::sync::Arc;

use fusewire::{Communicator, DType, ReadyFlags, ReduceOp, Result, Stream, Tensor, Work};

use crate::device::{stream, tensor};
use crate::safe_programs::{COUNT, Program, ROUNDS, element, filled, tensors};

/// The programs. They access tensors in closures on a stream.
pub const PROGRAMS: &[Program] = &[
    Program {
        host_only: true,
        ..Program::new("all_gather with flags", overlapped_gather)
    },
    Program {
        host_only: true,
        ..Program::new("reduce_scatter on arrival", overlapped_scatter)
    },
    Program {
        host_only: true,
        ..Program::new("branches of a graph", branches_of_a_graph)
    },
];

/// Number of elements of a chunk or tile.
const CHUNK: usize = 3000;

/// Returns index, first element and length of each chunk of two rows, in the order in which a
/// reduce_scatter reads tiles.
fn chunks() -> impl Iterator<Item = (usize, usize, usize)> {
    let per_row = COUNT.div_ceil(CHUNK);
    let both = move |chunk| [chunk, per_row + chunk];
    (0..per_row).flat_map(both).map(move |index| {
        let (row, at) = (index / per_row, index % per_row * CHUNK);
        (index, row * COUNT + at, CHUNK.min(COUNT - at))
    })
}

fn gather(
    comm: &Communicator,
    consumer: &Stream,
    [y, x]: [&Tensor; 2],
    flags: &ReadyFlags,
) -> Result<Work> {
    // SAFETY: the closures of `read_chunks` follow the words, and the other accesses are to all of
    // `y`, or follow `Work::wait` in a graph.
    unsafe { comm.all_gather_with_flags_async(consumer, y, x, flags, CHUNK) }
}

/// Enqueues a closure for each chunk of `y`, after its flag: it copies the chunk to `seen`.
fn read_chunks(consumer: &Stream, [seen, y]: [&Tensor; 2], flags: &ReadyFlags) -> Result<()> {
    for (index, at, length) in chunks() {
        flags.stream_wait(consumer, index)?;
        let (to, from) = (seen.slice(at, length)?, y.slice(at, length)?);
        consumer.host_fn(Arc::new(move || to.copy_from(&from.to_vec::<f32>()?)))?;
    }
    Ok(())
}

/// The consumer reads chunks, or the host accesses the whole output, during an all_gather.
fn overlapped_gather(comm: &Communicator) -> Result<()> {
    let (consumer, operations) = (stream(), stream());
    let on = comm.on(&operations);
    for x in tensors(comm)? {
        let (y, seen) = (
            tensor(DType::F32, 2 * COUNT)?,
            tensor(DType::F32, 2 * COUNT)?,
        );
        let flags = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
        for round in 0..ROUNDS {
            let value = round as f32 + 1.0;
            x.copy_from(&filled(value))?;
            gather(&on, &consumer, [&y, &x], &flags)?;
            match round % 3 {
                0 => {
                    read_chunks(&consumer, [&seen, &y], &flags)?;
                    consumer.synchronize()?;
                    assert_eq!(element(&seen)?, value, "a chunk was read before its flag");
                }
                1 => assert_eq!(element(&y)?, value, "read before the end"),
                _ => {
                    y.copy_from(&[filled(-1.0), filled(-1.0)].concat())?;
                    assert_eq!(element(&y)?, -1.0, "the write is lost");
                }
            }
        }
    }
    consumer.synchronize()?;
    operations.synchronize()
}

/// The producer writes tiles during a reduce_scatter, and the host then writes the whole input.
fn overlapped_scatter(comm: &Communicator) -> Result<()> {
    let (producer, operations) = (stream(), stream());
    let on = comm.on(&operations);
    let output = tensor(DType::F32, COUNT)?;
    for input in [
        comm.alloc(DType::F32, 2 * COUNT)?,
        tensor(DType::F32, 2 * COUNT)?,
    ] {
        let tiles = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
        for round in 0..ROUNDS {
            let value = round as f32 + 1.0;
            // SAFETY: the producer writes each tile before its word, and the host accesses the
            // whole input.
            unsafe {
                let (sum, target) = (ReduceOp::Sum, 1);
                on.reduce_scatter_on_arrival_async(
                    &producer, &output, &input, &tiles, CHUNK, target, sum,
                )?;
            }
            for (index, at, length) in chunks() {
                let part = input.slice(at, length)?;
                producer.host_fn(Arc::new(move || part.copy_from(&vec![value; length])))?;
                tiles.stream_write(&producer, index, 1)?;
            }
            input.copy_from(&[filled(-1.0), filled(-1.0)].concat())?;
            assert_eq!(element(&output)?, 2.0 * value, "written before the end");
            assert_eq!(element(&input)?, -1.0, "the write is lost");
        }
    }
    producer.synchronize()?;
    operations.synchronize()
}

/// Both branches of a graph read one tensor, and one of them reads what the other one writes, after
/// the flags.
fn branches_of_a_graph(comm: &Communicator) -> Result<()> {
    let (consumer, operations) = (stream(), stream());
    let on = comm.on(&operations);
    for x in tensors(comm)? {
        let (y, seen) = (
            tensor(DType::F32, 2 * COUNT)?,
            tensor(DType::F32, 2 * COUNT)?,
        );
        let copy = tensor(DType::F32, COUNT)?;
        let flags = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
        x.copy_from(&filled(0.0))?;
        consumer.begin_capture()?;
        let work = gather(&on, &consumer, [&y, &x], &flags)?;
        let (to, from) = (copy.clone(), x.clone());
        consumer.host_fn(Arc::new(move || to.copy_from(&from.to_vec::<f32>()?)))?;
        read_chunks(&consumer, [&seen, &y], &flags)?;
        work.wait(&consumer)?;
        let graph = consumer.end_capture()?.instantiate()?;
        for round in 0..ROUNDS {
            let value = round as f32 + 1.0;
            x.copy_from(&filled(value))?;
            graph.launch(&consumer)?;
            // Waits for the replay, which reads the tensor.
            x.copy_from(&filled(-1.0))?;
            for (tensor, name) in [(&copy, "the input"), (&seen, "a chunk"), (&y, "the output")] {
                assert_eq!(element(tensor)?, value, "{name} of another round");
            }
        }
        consumer.synchronize()?;
    }
    Ok(())
}
