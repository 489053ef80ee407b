//! Tensors that operations, threads and the host use at the same time.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use fusewire::{DType, Error, Options, ReduceOp};
use fusewire_tests::device::{device, run_threads, stream, tensor};
use fusewire_tests::safe_programs::PROGRAMS;

#[test]
fn safe_programs_have_no_races() {
    for program in PROGRAMS {
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
    for result in run_threads(2, &Options::default(), |comm| {
        let x = tensor(DType::F32, 1000)?;
        let (inside, reads) = (x.clone(), Arc::new(Mutex::new(0)));
        let counter = Arc::clone(&reads);
        let _hook = comm.register_abort_hook(move |_| {
            inside.to_vec::<f32>().expect("the elements");
            *counter.lock().expect("the lock") += 1;
        });
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
