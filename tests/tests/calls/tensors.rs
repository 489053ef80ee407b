//! Tensors that operations, threads and the host use at the same time.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Instant;

use fusewire::store::MemoryStore;
use fusewire::{Communicator, DType, Error, Event, Options, ReduceOp, Stream, WindowOptions};
use fusewire_tests::device::{device, run_threads, stream, tensor};
use fusewire_tests::{overlap_programs, safe_programs};

#[test]
fn safe_programs_have_no_races() {
    let programs = safe_programs::PROGRAMS.iter();
    for program in programs.chain(overlap_programs::PROGRAMS) {
        if !program.host_only || !device().is_gpu() {
            program.check();
        }
    }
}

/// Ranks that are threads may use disjoint parts of one allocation, and read the same part.
#[test]
fn ranks_use_parts_of_one_tensor() {
    let shared = tensor(DType::F32, 3000).expect("memory");
    let input = tensor(DType::F32, 1000).expect("memory");
    input.copy_from(&[1.0f32; 1000]).expect("the values");
    for result in run_threads(3, &Options::default(), |comm| {
        let part = shared.slice(1000 * comm.rank() as usize, 1000)?;
        for _ in 0..10 {
            part.copy_from(&[1.0f32; 1000])?;
            comm.all_reduce(&part, ReduceOp::Sum)?;
            comm.all_reduce_async(&part, ReduceOp::Sum)?;
            assert_eq!(part.to_vec::<f32>()?, [9.0; 1000]);
            comm.all_reduce_into(&part, &input, ReduceOp::Sum)?;
            assert_eq!(part.to_vec::<f32>()?, [3.0; 1000]);
        }
        Ok(())
    }) {
        result.expect("every rank");
    }
}

/// Ranks that are threads may read the same tensors in lists, which are packed first.
#[test]
fn ranks_share_the_inputs_of_a_list() {
    let inputs = [0, 1].map(|_| tensor(DType::F32, 1000).expect("memory"));
    for input in &inputs {
        input.copy_from(&[1.0f32; 1000]).expect("the values");
    }
    for result in run_threads(2, &Options::default(), |comm| {
        let output = tensor(DType::F32, 1000)?;
        for _ in 0..50 {
            comm.reduce_scatter(&output, &inputs, ReduceOp::Sum)?;
        }
        assert_eq!(output.to_vec::<f32>()?[999], 2.0);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// Copies of ranges that contain no aligned word.
#[test]
fn short_ranges_are_copied() {
    let bytes = tensor(DType::U8, 32).expect("memory");
    let values: Vec<u8> = (0..32).collect();
    bytes.copy_from(&values).expect("the values");
    for first in 0..16 {
        for count in 0..16 {
            let part = bytes.slice(first, count).expect("a slice");
            assert_eq!(
                part.to_vec::<u8>().expect("the bytes"),
                values[first..first + count]
            );
            let zeros = vec![0u8; count];
            part.copy_from(&zeros).expect("zeros");
            let mut expected = values.clone();
            expected[first..first + count].fill(0);
            assert_eq!(bytes.to_vec::<u8>().expect("the bytes"), expected);
            bytes.copy_from(&values).expect("the values");
        }
    }
}

/// Two ranks that write one tensor would wait for each other until the timeout.
#[test]
fn ranks_that_write_one_tensor_get_an_error() {
    for asynchronous in [false, true] {
        let shared = tensor(DType::F32, 1000).expect("memory");
        let begin = Instant::now();
        let refused = AtomicBool::new(false);
        let mut options = Options::default();
        options.timeout = Duration::from_secs(30);
        let results = run_threads(2, &options, |comm| {
            let result = if asynchronous {
                let work = comm.all_reduce_async(&shared, ReduceOp::Sum);
                work.and_then(|work| work.wait_blocking())
            } else {
                comm.all_reduce(&shared, ReduceOp::Sum)
            };
            if let Err(Error::InvalidArgument { .. }) = &result {
                refused.store(true, Ordering::Release);
                // Ends the wait of the other rank.
                comm.abort();
            }
            result
        });
        assert!(
            refused.load(Ordering::Acquire),
            "both ranks wrote the tensor"
        );
        let refusals: Vec<String> = results
            .into_iter()
            .filter_map(Result::err)
            .map(|error| error.to_string())
            .filter(|text| text.contains("is using the same memory"))
            .collect();
        assert_eq!(refusals.len(), 1, "{refusals:?}");
        assert!(refusals[0].starts_with("all_reduce"), "{}", refusals[0]);
        assert!(
            refusals[0].contains("of this communicator"),
            "{}",
            refusals[0]
        );
        assert!(begin.elapsed() < Duration::from_secs(10), "a rank waited");
    }
}

/// A hook that runs while the thread executes an operation may read the operation's tensor.
#[test]
fn an_abort_hook_reads_the_tensor_of_the_operation() {
    let registered = Barrier::new(2);
    for result in run_threads(2, &Options::default(), |comm| {
        let x = tensor(DType::F32, 1000)?;
        let (inside, reads) = (x.clone(), Arc::new(Mutex::new(0)));
        let counter = Arc::clone(&reads);
        let _hook = comm.register_abort_hook(move |_| {
            inside.to_vec::<f32>().expect("the elements");
            *counter.lock().expect("the lock") += 1;
        });
        registered.wait();
        if comm.rank() == 1 {
            thread::sleep(Duration::from_millis(50));
            comm.abort();
        }
        assert!(comm.all_reduce(&x, ReduceOp::Sum).is_err());
        assert_eq!(*reads.lock().expect("the lock"), 1);
        x.to_vec::<f32>().map(drop)
    }) {
        result.expect("both ranks");
    }
}

/// A read waits for writes only, and a write waits for everything.
#[test]
fn reads_are_concurrent() {
    if device().is_gpu() {
        return; // A closure on a GPU stream may not call the driver.
    }
    let x = tensor(DType::F32, 10).expect("memory");
    let (held, released) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicBool::new(false)),
    );
    let on = stream();
    for result in run_threads(1, &Options::default(), |comm| {
        let comm = comm.on(&on);
        let (is_held, is_released) = (Arc::clone(&held), Arc::clone(&released));
        on.host_fn(Arc::new(move || {
            is_held.store(true, Ordering::Release);
            while !is_released.load(Ordering::Acquire) {
                thread::yield_now();
            }
            Ok(())
        }))?;
        let y = tensor(DType::F32, 10)?;
        comm.all_gather_single_async(&y, &x)?;
        // The operation that reads `x` has not started. Reads need not wait for it.
        assert_eq!(x.to_vec::<f32>()?, [0.0; 10]);
        let writer = thread::spawn({
            let x = x.clone();
            move || x.copy_from(&[1.0f32; 10])
        });
        thread::sleep(Duration::from_millis(20));
        assert!(
            !writer.is_finished(),
            "the write did not wait for the reader"
        );
        released.store(true, Ordering::Release);
        writer.join().expect("the writer")?;
        assert_eq!(y.to_vec::<f32>()?, [0.0; 10]);
        assert_eq!(x.to_vec::<f32>()?, [1.0; 10]);
        Ok(())
    }) {
        result.expect("the rank");
    }
}

/// Two groups of ranks that are threads may share a tensor, although both are named "threads".
/// Waiting would be a deadlock only within a group.
#[test]
fn ranks_of_two_groups_use_one_tensor() {
    let shared = tensor(DType::F32, 1000).expect("memory");
    shared.copy_from(&[0.0f32; 1000]).expect("the values");
    thread::scope(|scope| {
        for group in 0..2 {
            let shared = &shared;
            scope.spawn(move || {
                for result in run_threads(2, &Options::default(), |comm| {
                    let own = tensor(DType::F32, 1000)?;
                    let used = if comm.rank() == group { shared } else { &own };
                    for _ in 0..200 {
                        comm.all_reduce(used, ReduceOp::Sum)?;
                    }
                    Ok(())
                }) {
                    result.expect("every rank");
                }
            });
        }
    });
}

/// A rank may read what another rank reads, next to what that rank writes.
#[test]
fn an_input_between_outputs_stays_an_input() {
    let buffer = tensor(DType::F32, 3000).expect("memory");
    buffer.copy_from(&[1.0f32; 3000]).expect("the values");
    for result in run_threads(2, &Options::default(), |comm| {
        let input = buffer.slice(1000, 1000)?;
        let output = buffer.slice(2000 * comm.rank() as usize, 1000)?;
        for _ in 0..50 {
            comm.all_reduce_into(&output, &input, ReduceOp::Sum)?;
            comm.all_reduce_into_async(&output, &input, ReduceOp::Sum)?;
            assert_eq!(input.to_vec::<f32>()?, [1.0; 1000]);
        }
        assert_eq!(output.to_vec::<f32>()?, [2.0; 1000]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// Both tensors are the same memory of the other rank. So is the other rank's own tensor.
#[test]
fn mappings_of_one_part_are_ordered() {
    for result in run_threads(2, &Options::default(), |comm| {
        let window = comm.alloc_window(DType::F32, 100_000, WindowOptions::default())?;
        comm.barrier()?;
        if comm.rank() == 0 {
            let store = Arc::new(MemoryStore::new());
            let alone = Communicator::new(device(), 0, 1, store, "alone", Options::default())?;
            let [one, other] = [window.map_remote(1)?, window.map_remote(1)?];
            for round in 0..50 {
                one.copy_from(&vec![round as f32; 100_000])?;
                alone.all_reduce_async(&one, ReduceOp::Sum)?;
                other.copy_from(&vec![-1.0f32; 100_000])?;
                assert_eq!(one.to_vec::<f32>()?, vec![-1.0; 100_000]);
            }
        }
        comm.barrier()?;
        // A put to oneself writes the tensor of the window.
        let source = tensor(DType::F32, 100_000)?;
        for round in 0..20 {
            source.copy_from(&vec![round as f32; 100_000])?;
            window.put_async(&source, comm.rank(), 0)?;
            assert_eq!(
                window.tensor().to_vec::<f32>()?,
                vec![round as f32; 100_000]
            );
        }
        comm.barrier()
    }) {
        result.expect("both ranks");
    }
}

/// The abort hook of each rank reads the tensors of both, while the other rank's operation fails.
#[test]
fn abort_hooks_read_the_tensors_of_other_failing_operations() {
    for is_async in [false, true] {
        let tensors = [0, 1].map(|_| tensor(DType::F32, 1000).expect("memory"));
        let registered = Barrier::new(2);
        for result in run_threads(2, &Options::default(), |comm| {
            let all = tensors.clone();
            let _hook = comm.register_abort_hook(move |_| {
                // Gives the other hook time to begin.
                thread::sleep(Duration::from_millis(50));
                for tensor in &all {
                    tensor.to_vec::<f32>().expect("the elements");
                }
            });
            registered.wait();
            let other = comm.clone();
            let aborter = thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                if other.rank() == 1 {
                    other.abort();
                }
            });
            // Neither operation ends without the abort: nobody sends.
            let own = &tensors[comm.rank() as usize];
            let failed = match is_async {
                false => comm.recv(own, 1 - comm.rank()),
                true => comm.recv_async(own, 1 - comm.rank()).map(drop),
            };
            assert!(is_async || failed.is_err());
            aborter.join().expect("no panic");
            own.to_vec::<f32>().map(drop)
        }) {
            result.expect("both ranks");
        }
    }
}

/// The operations of a batch run concurrently.
#[test]
fn a_batch_that_receives_into_used_memory_is_refused() {
    let [x, y] = [0, 1].map(|_| tensor(DType::F32, 100).expect("memory"));
    for result in run_threads(1, &Options::default(), |comm| {
        let exchange = |from: (usize, usize), to: (usize, usize)| {
            let mut batch = comm.batch_op_create();
            batch.send(&x.slice(from.0, from.1)?, 0)?;
            batch.send(&y, 0)?;
            batch.recv(&x.slice(to.0, to.1)?, 0)?;
            batch.recv(&tensor(DType::F32, 100)?, 0)?;
            batch.issue()
        };
        for (from, to) in [((0, 10), (0, 10)), ((0, 10), (9, 10)), ((50, 10), (45, 10))] {
            let refused = exchange(from, to).expect_err("an overlap").to_string();
            assert!(refused.contains("rank 0 overlaps"), "{refused}");
        }
        exchange((0, 10), (10, 10))?;
        exchange((10, 10), (0, 10))
    }) {
        result.expect("the rank");
    }
}

/// A closure makes a blocking call on a busy stream, with a tensor that later work uses. That work
/// waits for the closure.
#[test]
fn a_closure_calls_on_a_busy_stream() {
    if device().is_gpu() {
        return; // A closure on a GPU stream must not call the driver.
    }
    let (ended, end) = channel();
    thread::spawn(move || {
        for result in run_threads(1, &Options::default(), |comm| {
            let (first, busy, last) = (Stream::new(), Stream::new(), Stream::new());
            let [inner, other] = [comm.dup()?, comm.dup()?];
            let t = tensor(DType::F32, 1000)?;
            let is_enqueued = Arc::new(AtomicBool::new(false));
            let (inside, gate) = (t.clone(), Arc::clone(&is_enqueued));
            let on_busy = inner.on(&busy);
            let ticket = first.host_fn(Arc::new(move || {
                while !gate.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                on_busy.all_reduce(&inside, ReduceOp::Sum)
            }))?;
            let event = Event::new();
            first.record(&event)?;
            last.wait_event(&event)?;
            let work = other.on(&last).all_reduce_async(&t, ReduceOp::Sum)?;
            busy.host_fn(Arc::new(|| {
                thread::sleep(Duration::from_millis(50));
                Ok(())
            }))?;
            is_enqueued.store(true, Ordering::Release);
            first.wait(ticket, None)?;
            work.wait_blocking()
        }) {
            result.expect("the rank");
        }
        ended.send(()).expect("the test waits");
    });
    end.recv_timeout(Duration::from_secs(60))
        .expect("no deadlock");
}
