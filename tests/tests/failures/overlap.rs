//! Tests overlapping launches of one communicator, which must be reported, and concurrent launches
//! of different communicators, which are permitted.

use core::time::Duration;
use std::sync::Barrier;

use fusewire::{Communicator, DType, Error, FailureKind, Options, ReduceOp, Result};
use fusewire::{GraphExec, Stream};
use fusewire_tests::device;
use fusewire_tests::device::{run_threads, stream};
use fusewire_tests::fake::Fake;

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(2);
    options
}

/// Captures a graph of one all_reduce of `count` elements from `x` to `y`.
fn graph(
    comm: &Communicator,
    stream: &Stream,
    count: usize,
) -> Result<(GraphExec, fusewire::Tensor, fusewire::Tensor)> {
    let (x, y) = (
        comm.alloc(DType::F32, count)?,
        comm.alloc(DType::F32, count)?,
    );
    stream.begin_capture()?;
    comm.on(stream)
        .all_reduce_into_async(&y, &x, ReduceOp::Sum)?;
    Ok((stream.end_capture()?.instantiate()?, x, y))
}

#[test]
fn graphs_of_one_communicator_on_two_streams_never_give_wrong_data() {
    let mut overlaps = 0;
    let mut right = 0u64;
    let (trials, replays) = if device().is_gpu() {
        (12, 300)
    } else {
        (40, 2000)
    };
    for trial in 0..trials {
        // The sizes of the graphs differ, so ranks that replay different graphs are detected.
        let sizes = if trial % 2 == 0 {
            [16, 24]
        } else {
            [6000, 7000]
        };
        let ranks = 1 + trial % 3;
        let barrier = Barrier::new(ranks as usize);
        let results = run_threads(ranks, &options(), |comm| {
            let streams = [stream(), stream()];
            let graphs = [
                graph(&comm, &streams[0], sizes[0])?,
                graph(&comm, &streams[1], sizes[1])?,
            ];
            // A rank may fail as soon as replays start, so all ranks finish their captures first.
            barrier.wait();
            let replay = |which: usize| -> (u64, Option<Error>) {
                let (graph, x, y) = &graphs[which];
                for i in 0..replays {
                    let value = (i * 3 + which as u64) as f32;
                    x.copy_from(&vec![value; sizes[which]]).expect("its size");
                    if let Err(error) = graph.run(&streams[which]) {
                        return (i, Some(error));
                    }
                    // Only replays of equal graphs can succeed together, so the i-th successful
                    // replay of this graph is the same operation on every rank.
                    let expected = value * ranks as f32;
                    let got = y.to_vec::<f32>().expect("its type");
                    assert!(
                        got.iter().all(|got| *got == expected),
                        "wrong data in replay {i} of graph {which}: {} for {expected}",
                        got[0]
                    );
                }
                (replays, None)
            };
            Ok(std::thread::scope(|scope| {
                let other = scope.spawn(|| replay(1));
                [replay(0), other.join().expect("no panic")]
            }))
        });
        for result in results {
            for (done, error) in result.expect("joined") {
                right += done;
                match error {
                    None => {}
                    Some(Error::Failed(failure)) => {
                        assert_eq!(failure.kind, FailureKind::Overlap, "{failure}");
                        overlaps += 1;
                    }
                    // Ranks that replay in different orders wait for each other or make different
                    // calls.
                    Some(Error::Timeout(_) | Error::Mismatch(_)) => {}
                    Some(other) => panic!("{other}"),
                }
            }
        }
    }
    println!("{right} right replays, {overlaps} overlaps reported");
    assert!(
        overlaps > 0,
        "no launches overlapped, so the test checked nothing"
    );
}

#[test]
fn an_overlap_is_reported_by_name() {
    for lanes in [1, 32] {
        // One replay waits for the other rank while a second replay is launched concurrently.
        let barrier = Barrier::new(2);
        let mut options = options();
        options.testing.lanes = lanes;
        let results = run_threads(2, &options, |comm| {
            let streams = [stream(), stream()];
            let (first, ..) = graph(&comm, &streams[0], 100)?;
            let (second, ..) = graph(&comm, &streams[1], 200)?;
            barrier.wait();
            if comm.rank() == 1 {
                while comm.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(2));
                }
                return Ok(comm.failure());
            }
            let waiting = first.launch(&streams[0])?;
            std::thread::sleep(Duration::from_millis(100));
            let error = second.run(&streams[1]).unwrap_err();
            let same = streams[0].wait(waiting, None).unwrap_err();
            assert_eq!(error.to_string(), same.to_string());
            Ok(Some(error))
        });
        for error in results {
            let error = error.expect("joined").expect("a failure on both ranks");
            let Error::Failed(failure) = &error else {
                panic!("{error}");
            };
            assert_eq!(failure.kind, FailureKind::Overlap);
            assert_eq!(failure.reporter, 0);
            assert!(error.to_string().contains("dup()"), "{error}");
        }
    }
}

#[test]
fn duplicates_run_concurrently_on_two_streams() {
    for result in run_threads(3, &options(), |comm| {
        let other = comm.dup()?;
        let streams = [stream(), stream()];
        let comms = [comm.on(&streams[0]), other.on(&streams[1])];
        let graphs = [
            graph(&comms[0], &streams[0], 3000)?,
            graph(&comms[1], &streams[1], 3000)?,
        ];
        let replay = |which: usize| {
            let (graph, x, y) = &graphs[which];
            for i in 0..500u32 {
                let value = (i * 2 + which as u32) as f32;
                x.copy_from(&vec![value; 3000]).expect("its size");
                graph.run(&streams[which]).expect("a replay");
                assert_eq!(
                    y.to_vec::<f32>().expect("its type"),
                    vec![value * 3.0; 3000]
                );
                let mut eager = [value; 20];
                let sum = comms[which].all_reduce(&mut eager[..], ReduceOp::Sum);
                sum.expect("an eager call between");
                assert_eq!(eager, [value * 3.0; 20]);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| replay(1));
            replay(0);
        });
        Ok(())
    }) {
        result.expect("all ranks");
    }
}

#[test]
fn eager_calls_on_several_streams_keep_their_order() {
    for result in run_threads(2, &options(), |comm| {
        let streams: Vec<Stream> = (0..3).map(|_| stream()).collect();
        let x = comm.alloc(DType::F32, 5000)?;
        for i in 0..300 {
            x.copy_from(&vec![1f32; 5000])?;
            let mut last = None;
            for k in 0..4 {
                // Each operation doubles the previous result, on any stream.
                let on = comm.on(&streams[(i * 7 + k * 5) % 3]);
                last = Some(on.all_reduce_async(&x, ReduceOp::Sum)?);
            }
            last.expect("four of them").wait_blocking()?;
            assert_eq!(x.to_vec::<f32>()?, vec![16f32; 5000], "round {i}");
        }
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// Returns the number of operations that block 0 of this rank has finished.
fn finished(comm: &Communicator) -> u64 {
    use fusewire_device::layout::{BLOCKS_AT, BlockState};
    use fusewire_device::mem::{Order, Scope, load_u64};
    // SAFETY: the constants are valid as long as the communicator, and `comm` keeps the
    // communicator alive.
    let constants = unsafe { &*comm.constants() };
    let state = (constants.state + BLOCKS_AT) as *const BlockState;
    // SAFETY: the state of block 0 is at this address of the workspace, and all accesses to it are
    // atomic.
    unsafe { load_u64(&raw const (*state).sequence, Order::Acquire, Scope::System) }
}

#[test]
fn no_launch_goes_uncounted_when_launches_overlap() {
    // If a launch read epochs before it owned the communicator, two launches could use the same
    // epoch, and the number of finished operations would be too low. This number is in device
    // memory, which the host can read only on the CPU and on the fake.
    if device().is_gpu() && Fake::open().is_none() {
        return;
    }
    let (trials, replays) = if device().is_gpu() {
        (40, 200)
    } else {
        (2000, 3000)
    };
    let mut reported = 0;
    for _ in 0..trials {
        for result in run_threads(1, &options(), |comm| {
            let streams = [stream(), stream()];
            let graphs = streams.each_ref().map(|stream| {
                stream.begin_capture().expect("idle");
                comm.on(stream).barrier_async().expect("captured");
                let graph = stream.end_capture().expect("capturing");
                graph.instantiate().expect("a graph")
            });
            let start = Barrier::new(2);
            let replay = |which: usize| {
                start.wait();
                (0..replays)
                    .take_while(|_| graphs[which].run(&streams[which]).is_ok())
                    .count() as u64
            };
            let right = std::thread::scope(|scope| {
                let other = scope.spawn(|| replay(1));
                replay(0) + other.join().expect("no panic")
            });
            assert!(
                finished(&comm) >= right,
                "{right} launches succeeded, {} were counted",
                finished(&comm)
            );
            Ok(u64::from(comm.failure().is_some()))
        }) {
            reported += result.expect("joined");
        }
    }
    println!("{reported} overlaps reported");
    assert!(
        reported > 0,
        "no launches overlapped, so the test checked nothing"
    );
}
