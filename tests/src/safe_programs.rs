//! Programs without unsafe code that try to race with operations in flight: copies between host and
//! tensors during operations, one tensor on several streams, in graphs and on several threads, and
//! handles that are dropped or forgotten. The tests check their results;
//! `tests/models/tests/tsan.rs` runs them under ThreadSanitizer.

#![forbid(unsafe_code)]

use core::mem::forget;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::thread;

use fusewire::{
    Communicator, Compare, DType, Error, Event, Options, ReduceOp, Result, SignalUpdate, Stream,
    Tensor, WindowOptions,
};

use crate::device::{run_threads, stream, tensor};

/// A program for two ranks, which are threads.
#[derive(Debug)]
pub struct Program {
    /// Name in reports.
    pub name: &'static str,
    /// Runs one rank of the program. Panics if a result is wrong.
    pub run: fn(&Communicator) -> Result<()>,
    /// True if the program accesses tensors in closures on a stream, which may not call the driver
    /// of a GPU.
    pub host_only: bool,
}

/// Number of elements of the tensors: more than a packet, so that operations take some time.
pub(crate) const COUNT: usize = 20_000;

/// Number of repetitions.
pub(crate) const ROUNDS: usize = 20;

/// Time in which another thread usually begins an operation.
const WAIT: Duration = Duration::from_millis(20);

/// All programs without operations with ready flags.
pub const PROGRAMS: &[Program] = &[
    Program::new("copies during all_reduce_async", copies_during_an_operation),
    Program::new("copies of other threads", copies_of_other_threads),
    Program::new("one tensor on two streams", two_streams),
    Program::new("copies during replays", copies_during_replays),
    Program::new("copies during puts", copies_during_puts),
    Program::new("dropped and forgotten handles", dropped_handles),
    Program::new("parts of one buffer", parts_of_one_buffer),
    Program::new("windows of another thread", windows_of_another_thread),
    Program::new("a replay as its window ends", replay_as_a_window_ends),
    Program {
        host_only: true,
        ..Program::new("closures on the stream", closures)
    },
    // On a GPU, the operation that is to wait would be enqueued before the end of the registration.
    Program {
        host_only: true,
        ..Program::new("registrations that end too early", early_ends)
    },
    Program {
        host_only: true,
        ..Program::new("closures that produce and consume", producer_and_consumer)
    },
];

impl Program {
    pub(crate) const fn new(name: &'static str, run: fn(&Communicator) -> Result<()>) -> Self {
        Self {
            name,
            run,
            host_only: false,
        }
    }

    /// Runs the program on two ranks.
    ///
    /// # Panics
    /// Panics if a rank fails.
    pub fn check(&self) {
        for (rank, result) in run_threads(2, &Options::default(), |comm| (self.run)(&comm))
            .into_iter()
            .enumerate()
        {
            result.unwrap_or_else(|error| panic!("{}: rank {rank}: {error}", self.name));
        }
    }
}

/// Returns the element that all elements of the tensor are equal to.
///
/// # Panics
/// Panics if two elements differ: the copy has seen a part of a write.
pub(crate) fn element(x: &Tensor) -> Result<f32> {
    let values = x.to_vec::<f32>()?;
    let first = values[0];
    let other = values.iter().position(|value| *value != first);
    assert_eq!(other, None, "a copy of {first} and other elements");
    Ok(first)
}

pub(crate) fn filled(value: f32) -> Vec<f32> {
    vec![value; COUNT]
}

/// Memory that the peers access directly, and memory that is staged.
pub(crate) fn tensors(comm: &Communicator) -> Result<[Tensor; 2]> {
    Ok([comm.alloc(DType::F32, COUNT)?, tensor(DType::F32, COUNT)?])
}

fn copies_during_an_operation(comm: &Communicator) -> Result<()> {
    for x in tensors(comm)? {
        let rows = tensor(DType::F32, 2 * COUNT)?;
        for round in 0..ROUNDS {
            let value = round as f32;
            x.copy_from(&filled(value + 1.0))?;
            comm.all_reduce_async(&x, ReduceOp::Sum)?;
            assert_eq!(element(&x)?, 2.0 * (value + 1.0), "read before the end");
            comm.all_gather_single_async(&rows, &x)?;
            x.copy_from(&filled(-1.0))?;
            assert_eq!(
                element(&rows)?,
                2.0 * (value + 1.0),
                "written before the end"
            );
            assert_eq!(element(&x)?, -1.0, "the write is lost");
        }
    }
    Ok(())
}

fn copies_of_other_threads(comm: &Communicator) -> Result<()> {
    let [x, y] = tensors(comm)?;
    thread::scope(|scope| {
        let reader = scope.spawn(|| -> Result<()> {
            for _ in 0..5 * ROUNDS {
                element(&x)?;
                element(&y)?;
                y.slice(0, COUNT / 2)?.to_vec::<f32>()?;
            }
            Ok(())
        });
        let writer = scope.spawn(|| -> Result<()> {
            for round in 0..ROUNDS {
                y.copy_from(&filled(round as f32))?;
            }
            Ok(())
        });
        for round in 0..ROUNDS {
            comm.all_reduce(&x, ReduceOp::Max)?;
            comm.all_reduce_async(&x, ReduceOp::Min)?;
            x.copy_from(&filled(round as f32))?;
        }
        reader.join().expect("the reader")?;
        writer.join().expect("the writer")
    })
}

fn two_streams(comm: &Communicator) -> Result<()> {
    let other = comm.dup()?;
    let (first, second) = (stream(), stream());
    let (a, b) = (comm.on(&first), other.on(&second));
    for x in tensors(comm)? {
        let rows = tensor(DType::F32, 2 * COUNT)?;
        for round in 0..ROUNDS {
            let value = round as f32 + 1.0;
            x.copy_from(&filled(value))?;
            a.all_reduce_async(&x, ReduceOp::Sum)?;
            b.all_gather_single_async(&rows, &x)?;
            a.all_reduce_async(&x, ReduceOp::Sum)?;
            b.all_reduce(&x, ReduceOp::Sum)?;
            assert_eq!(element(&rows)?, 2.0 * value, "the streams are not ordered");
            assert_eq!(element(&x)?, 8.0 * value, "the streams are not ordered");
        }
    }
    first.synchronize()?;
    second.synchronize()
}

fn copies_during_replays(comm: &Communicator) -> Result<()> {
    let (first, second) = (stream(), stream());
    for x in tensors(comm)? {
        let rows = tensor(DType::F32, 2 * COUNT)?;
        x.copy_from(&filled(0.0))?;
        first.begin_capture()?;
        let captured = comm.on(&first);
        captured.all_reduce(&x, ReduceOp::Sum)?;
        captured.all_gather_single_async(&rows, &x)?;
        let graph = first.end_capture()?.instantiate()?;
        for round in 0..ROUNDS {
            let value = round as f32 + 1.0;
            // Replays of one graph on two streams are ordered by the tensors.
            let on = if round % 2 == 0 { &first } else { &second };
            x.copy_from(&filled(value))?;
            graph.launch(on)?;
            assert_eq!(element(&x)?, 2.0 * value, "read before the end");
            x.copy_from(&filled(value))?;
            graph.run(on)?;
            x.copy_from(&filled(-1.0))?;
            assert_eq!(element(&rows)?, 2.0 * value, "written before the end");
        }
        first.synchronize()?;
        second.synchronize()?;
    }
    Ok(())
}

fn copies_during_puts(comm: &Communicator) -> Result<()> {
    let window = comm.alloc_window(DType::F32, COUNT, WindowOptions::default())?;
    let source = tensor(DType::F32, COUNT)?;
    let peer = 1 - comm.rank();
    for round in 1..=ROUNDS as u64 {
        source.copy_from(&filled(round as f32))?;
        window.put_async(&source, peer, 0)?;
        window.signal_async(peer, 0, SignalUpdate::Set(round))?;
        // Waits for the put.
        source.copy_from(&filled(-1.0))?;
        // Reads while the peer writes: each element is that of this or of an earlier round.
        for value in window.tensor().to_vec::<f32>()? {
            assert!(
                (0.0..=round as f32).contains(&value),
                "{value} in round {round}"
            );
        }
        window.wait_signal(0, Some(peer), Compare::GreaterEqual, round)?;
        assert_eq!(element(window.tensor())?, round as f32);
        comm.barrier()?;
    }
    window.free()
}

fn dropped_handles(comm: &Communicator) -> Result<()> {
    for round in 0..ROUNDS {
        let stream = stream();
        let comm = comm.on(&stream);
        let (x, y) = (tensor(DType::F32, COUNT)?, comm.alloc(DType::F32, COUNT)?);
        let kept = x.slice(0, COUNT / 2)?;
        x.copy_from(&filled(1.0))?;
        y.copy_from(&filled(1.0))?;
        let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
        drop(comm.all_reduce_async(&y, ReduceOp::Sum)?);
        if round % 2 == 0 {
            drop((x, y, work));
        } else {
            forget((x, work));
            drop(y);
        }
        if round % 3 == 0 {
            drop((comm, stream));
        }
        assert_eq!(kept.to_vec::<f32>()?, vec![2.0; COUNT / 2]);
    }
    Ok(())
}

/// Input and output of each operation are parts of one buffer, and operations on other parts are in
/// flight.
fn parts_of_one_buffer(comm: &Communicator) -> Result<()> {
    let other = comm.dup()?;
    let (first, second) = (stream(), stream());
    let communicators = [comm.on(&first), other.on(&second)];
    for buffer in [
        comm.alloc(DType::F32, 4 * COUNT)?,
        tensor(DType::F32, 4 * COUNT)?,
    ] {
        let part = |index: usize| buffer.slice(index * COUNT, COUNT);
        for round in 0..ROUNDS {
            let value = round as f32 + 1.0;
            part(0)?.copy_from(&filled(value))?;
            part(1)?.copy_from(&filled(2.0 * value))?;
            // The ranks enqueue the operations in different orders.
            let first = (round + comm.rank() as usize) % 2;
            for at in [first, 1 - first] {
                communicators[at].all_reduce_into_async(
                    &part(2 + at)?,
                    &part(at)?,
                    ReduceOp::Max,
                )?;
            }
            for at in 0..2 {
                communicators[at].all_reduce_into(&part(2 + at)?, &part(at)?, ReduceOp::Sum)?;
            }
            assert_eq!(element(&part(2)?)?, 2.0 * value);
            assert_eq!(element(&part(3)?)?, 4.0 * value);
        }
    }
    first.synchronize()?;
    second.synchronize()
}

/// A hook launches a graph between the last operation on its window and the removal of the window.
/// The replay writes to the window or fails.
fn replay_as_a_window_ends(comm: &Communicator) -> Result<()> {
    for _ in 0..ROUNDS {
        // A failed replay ends its communicator.
        let results = run_threads(1, comm.options(), |comm| {
            let window = comm.alloc_window(DType::F32, COUNT, WindowOptions::default())?;
            let source = tensor(DType::F32, COUNT)?;
            let captured = stream();
            captured.begin_capture()?;
            window.on(&captured).put_async(&source, 0, 0)?;
            let graph = captured.end_capture()?.instantiate()?;
            let launched = Arc::new(AtomicBool::new(false));
            let (was_launched, of_hook) = (Arc::clone(&launched), captured.clone());
            comm.register_post_hook(move |arguments| {
                if arguments.name == "all_reduce" {
                    graph.launch(&of_hook).expect("a launch");
                    was_launched.store(true, Ordering::Relaxed);
                }
            });
            window.free()?;
            assert!(launched.load(Ordering::Relaxed), "a replay");
            if let Err(error) = captured.synchronize() {
                assert!(matches!(error, Error::Failed(_)), "{error}");
            }
            Ok(())
        });
        results.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

/// Another thread ends a registration and frees a window while an operation on the tensor is in
/// flight and this thread reads the tensor.
fn windows_of_another_thread(comm: &Communicator) -> Result<()> {
    let x = tensor(DType::F32, COUNT)?;
    for round in 0..ROUNDS {
        let value = round as f32 + 1.0;
        let registration = comm.tensor_register(&x)?;
        let window = comm.new_window(&x, WindowOptions::default())?;
        x.copy_from(&filled(value))?;
        let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
        thread::scope(|scope| {
            let end = move || match round % 2 {
                0 => comm.tensor_deregister(&registration).and(window.free()),
                _ => window.free().and(comm.tensor_deregister(&registration)),
            };
            let ends = scope.spawn(end);
            assert_eq!(element(&x)?, 2.0 * value);
            x.copy_from(&filled(-1.0))?;
            ends.join().expect("the end of the windows")
        })?;
        work.wait_blocking()?;
        // The memory is in no window now.
        comm.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(element(&x)?, -2.0);
    }
    Ok(())
}

/// An operation waits for its tensor while the registration of the tensor ends, and another tensor
/// gets the number of the window.
fn early_ends(comm: &Communicator) -> Result<()> {
    let other = comm.dup()?;
    let y = tensor(DType::F32, COUNT)?;
    y.copy_from(&filled(-7.0))?;
    for round in 0..4 {
        let x = tensor(DType::F32, COUNT)?;
        x.copy_from(&filled(1.0))?;
        let registration = comm.tensor_register(&x)?;
        let next = &y;
        let replace = move || {
            comm.tensor_deregister(&registration)?;
            comm.tensor_register(next)
        };
        let reduce = || match round % 2 {
            0 => comm.all_reduce(&x, ReduceOp::Sum),
            _ => comm.all_reduce_async(&x, ReduceOp::Sum)?.wait_blocking(),
        };
        let use_elsewhere = || other.all_reduce(&x, ReduceOp::Max);
        let registered = match comm.rank() {
            0 => thread::scope(|scope| -> Result<_> {
                // Uses the tensor until the other rank takes part.
                let user = scope.spawn(use_elsewhere);
                thread::sleep(WAIT);
                let waiting = scope.spawn(reduce);
                thread::sleep(WAIT);
                let registered = replace()?;
                user.join().expect("the user")?;
                waiting.join().expect("the operation")?;
                Ok(registered)
            })?,
            _ => {
                let registered = replace()?;
                use_elsewhere()?;
                reduce()?;
                registered
            }
        };
        assert_eq!(element(&x)?, 2.0, "another tensor was reduced");
        assert_eq!(element(&y)?, -7.0, "another tensor was written");
        comm.tensor_deregister(&registered)?;
    }
    Ok(())
}

/// A closure on one stream fills a tensor for an operation of another stream, which waits for an
/// event, and a closure on a third stream reads the result. The closures run while the operations
/// after them are pending.
fn producer_and_consumer(comm: &Communicator) -> Result<()> {
    let (producer, consumer, operations) = (stream(), stream(), stream());
    let on = comm.on(&operations);
    let [x, _] = tensors(comm)?;
    let sum = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    for round in 0..ROUNDS {
        let (filled_event, reduced, read) = (Event::new(), Event::new(), Event::new());
        let inside = x.clone();
        producer.host_fn(std::sync::Arc::new(move || {
            inside.copy_from(&filled(round as f32))
        }))?;
        producer.record(&filled_event)?;
        operations.wait_event(&filled_event)?;
        on.all_reduce_async(&x, ReduceOp::Sum)?;
        operations.record(&reduced)?;
        consumer.wait_event(&reduced)?;
        let (inside, sum) = (x.clone(), std::sync::Arc::clone(&sum));
        consumer.host_fn(std::sync::Arc::new(move || {
            sum.lock().expect("the lock").push(element(&inside)?);
            Ok(())
        }))?;
        consumer.record(&read)?;
        producer.wait_event(&read)?;
    }
    for stream in [&producer, &operations, &consumer] {
        stream.synchronize()?;
    }
    let expected: Vec<f32> = (0..ROUNDS).map(|round| 2.0 * round as f32).collect();
    assert_eq!(*sum.lock().expect("the lock"), expected);
    Ok(())
}

/// A closure on a stream accesses a tensor that later work of the stream also uses, while the host
/// waits for that later work.
fn closures(comm: &Communicator) -> Result<()> {
    let (first, second): (Stream, Stream) = (stream(), stream());
    let a = comm.on(&first);
    for x in tensors(comm)? {
        for round in 0..ROUNDS {
            let value = round as f32 + 1.0;
            let (inside, seen) = (x.clone(), tensor(DType::F32, 1)?);
            let result = seen.clone();
            first.host_fn(std::sync::Arc::new(move || {
                inside.copy_from(&filled(value))?;
                result.copy_from(&[element(&inside)?])
            }))?;
            if round % 2 == 0 {
                a.all_reduce_async(&x, ReduceOp::Sum)?;
            } else {
                // Blocks while the closure accesses the tensor.
                a.all_reduce(&x, ReduceOp::Sum)?;
            }
            let inside = x.clone();
            second.host_fn(std::sync::Arc::new(move || element(&inside).map(drop)))?;
            assert_eq!(element(&x)?, 2.0 * value);
            assert_eq!(seen.to_vec::<f32>()?, [value]);
        }
    }
    first.synchronize()?;
    second.synchronize()
}
