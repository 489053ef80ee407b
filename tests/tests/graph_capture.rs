//! Tests the resources that captures keep alive, the driver calls that must not be made during a
//! capture, and captures that another library begins.
//!
//! On the fake of the CUDA driver, the tests need `--test-threads=1`, because the fake counts the
//! calls of the whole process.

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use fusewire::{
    Communicator, DType, Device, Error, Event, GraphExec, Options, ReduceOp, ReplayEdge, Result,
    Stream, Tensor,
};
use fusewire_tests::device;
use fusewire_tests::device::{run_threads, stream, tensor};
use fusewire_tests::fake::Fake;
use fusewire_tests::mix::Mix;

/// Returns options with one block, which the user kernels require.
fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    options.blocks = 1;
    options
}

fn all<R: Send>(ranks: u32, body: impl Fn(Communicator) -> Result<R> + Sync) -> Vec<R> {
    let results = run_threads(ranks, &options(), body).into_iter();
    results.map(|result| result.expect("all ranks")).collect()
}

/// Captures `calls` on the communicator's stream as a graph.
fn capture(comm: &Communicator, calls: impl FnOnce() -> Result<()>) -> Result<GraphExec> {
    comm.stream().begin_capture()?;
    let called = calls();
    let graph = comm.stream().end_capture()?;
    called?;
    graph.instantiate()
}

/// Enqueues work that waits until the returned sender is dropped or sends a value.
fn latch(stream: &Stream) -> Result<Sender<()>> {
    let (open, wait) = channel();
    let wait: Mutex<Receiver<()>> = Mutex::new(wait);
    stream.host_fn(Arc::new(move || {
        let _ = wait.lock().expect("no panic").recv();
        Ok(())
    }))?;
    Ok(open)
}

/// Waits until `done` returns true. Allocates in each iteration, because an allocation makes the
/// library poll for completed work.
fn soon(comm: &Communicator, what: &str, done: impl Fn() -> bool) -> Result<()> {
    for _ in 0..500 {
        drop(comm.tensor(DType::U8, 1)?);
        if done() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} did not happen");
}

/// Returns the number of rounds: `usual` on the CPU and `usual / 20` on a GPU, because a launch
/// takes longer on a GPU.
fn rounds(usual: u32) -> u32 {
    if device().is_gpu() { usual / 20 } else { usual }
}

/// A communicator that ends marks its rank in the memory of its peers, by copies that the driver
/// must accept during a capture.
#[test]
fn a_communicator_that_ends_during_a_capture_leaves_it_valid() {
    let sums = all(2, |comm| {
        let [dropped, finalized] = [comm.dup()?, comm.dup()?];
        let (x, y) = (comm.alloc(DType::F32, 8)?, comm.alloc(DType::F32, 8)?);
        let exec = capture(&comm, || {
            comm.all_reduce_into_async(&y, &x, ReduceOp::Sum)?;
            drop(dropped);
            finalized.finalize()
        })?;
        x.copy_from(&[3f32; 8])?;
        exec.run(comm.stream())?;
        y.to_vec::<f32>()
    });
    assert_eq!(sums, vec![vec![6f32; 8]; 2]);
}

#[test]
fn buffers_are_registered_after_the_capture_that_uses_them() {
    const N: usize = 3000;
    all(2, |comm| {
        let (x, y, rows) = (
            tensor(DType::F32, N)?,
            tensor(DType::F32, N)?,
            tensor(DType::F32, 2 * N)?,
        );
        let of = |rank: u32, round: u32| vec![(round * 2 + rank) as f32; N];
        let replay = |graph: &GraphExec, from: u32| -> Result<()> {
            for round in from..from + rounds(200) {
                x.copy_from(&of(comm.rank(), round))?;
                y.copy_from(&[f32::NAN; N])?;
                graph.run(comm.stream())?;
                let sum = (round * 4 + 1) as f32;
                assert_eq!(y.to_vec::<f32>()?, vec![sum; N]);
                assert_eq!(rows.to_vec::<f32>()?, [of(0, round), of(1, round)].concat());
            }
            Ok(())
        };
        let work = || {
            comm.all_reduce_into_async(&y, &x, ReduceOp::Sum)?;
            comm.all_gather_single_async(&rows, &x).map(drop)
        };
        let staged = capture(&comm, work)?;
        replay(&staged, 0)?;
        let registrations = [
            comm.tensor_register(&x)?,
            comm.tensor_register(&y)?,
            comm.tensor_register(&rows)?,
        ];
        replay(&staged, 1000)?;
        let direct = capture(&comm, work)?;
        replay(&direct, 2000)?;
        replay(&staged, 3000)?;
        for registration in registrations {
            comm.tensor_deregister(&registration)?;
        }
        replay(&staged, 4000)
    });
}

#[test]
fn a_graph_of_freed_windows_fails() {
    let errors = all(2, |comm| {
        let x = tensor(DType::F32, 3000)?;
        let registration = comm.tensor_register(&x)?;
        let y = comm.alloc(DType::F32, 6000)?;
        let graph = capture(&comm, || comm.all_gather_single_async(&y, &x).map(drop))?;
        graph.run(comm.stream())?;
        comm.tensor_deregister(&registration)?;
        // The graph must not take another window for the one that is gone.
        let other = tensor(DType::F32, 3000)?;
        let _other = comm.tensor_register(&other)?;
        Ok(graph.run(comm.stream()).expect_err("a window that is gone"))
    });
    for error in errors {
        assert!(matches!(error, Error::Failed(_)), "{error}");
    }
}

#[test]
fn warm_up_is_refused_in_a_capture_and_may_be_repeated() {
    all(2, |comm| {
        comm.warm_up()?;
        comm.warm_up()?;
        comm.stream().begin_capture()?;
        let refused = comm.warm_up().expect_err("within a capture");
        assert!(matches!(refused, Error::CaptureState { .. }), "{refused}");
        // The refused call leaves the capture valid.
        comm.barrier_async()?;
        comm.stream()
            .end_capture()?
            .instantiate()?
            .run(comm.stream())
    });
}

/// Driver calls that load, allocate, free or wait. Steady launches and replays must not make them.
const DISTURBING: [&CStr; 16] = [
    c"cuMemAlloc_v2",
    c"cuMemCreate",
    c"cuMemMap",
    c"cuMemAddressReserve",
    c"cuMemHostAlloc",
    c"cuMemFree_v2",
    c"cuMemFreeHost",
    c"cuMemUnmap",
    c"cuModuleLoadDataEx",
    c"cuLibraryLoadData",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventSynchronize",
    c"cuStreamCreate",
    c"cuStreamSynchronize",
    c"cuCtxSynchronize",
];

fn disturbed(fake: &Fake) -> Vec<(&'static CStr, u64)> {
    DISTURBING
        .into_iter()
        .map(|name| (name, fake.calls(name)))
        .collect()
}

#[test]
fn warm_captures_launches_and_replays_neither_allocate_nor_synchronise() {
    let Some(fake) = Fake::open() else {
        return;
    };
    // The counters are global to the process, so both ranks enter each phase together.
    let barrier = std::sync::Barrier::new(2);
    all(2, |comm| {
        let mix = Mix::new(&comm)?;
        let stream = stream();
        let on = comm.on(&stream);
        on.warm_up()?;
        mix.fill(1)?;
        barrier.wait();
        let before = disturbed(&fake);
        stream.begin_capture()?;
        mix.issue(&on)?;
        let graph = stream.end_capture()?;
        // `cuStreamSynchronize` is excluded, because the capture of the batch writes a table to the
        // GPU and waits for the copy.
        let after = disturbed(&fake);
        barrier.wait();
        for ((name, before), (_, after)) in before.iter().zip(&after) {
            if *name != c"cuStreamSynchronize" {
                assert_eq!(before, after, "{name:?} in a capture");
            }
        }
        let graph = graph.instantiate()?;
        // The first launches allocate some buffers.
        graph.run(&stream)?;
        mix.issue(&on)?;
        on.barrier()?;
        barrier.wait();
        let before = disturbed(&fake);
        for _ in 0..5 {
            graph.run(&stream)?;
            graph.launch(&stream)?;
            mix.issue(&on)?;
            on.barrier()?;
        }
        let after = disturbed(&fake);
        assert_eq!(before, after, "steady launches and replays");
        barrier.wait();
        mix.check(1)?;
        // Negative control: these calls must change the counters.
        let event = Event::new();
        stream.record(&event)?;
        stream.synchronize()?;
        assert_ne!(disturbed(&fake), after);
        Ok(())
    });
}

/// Returns the numbers of live driver objects that a program could leak.
fn live(fake: &Fake) -> Vec<(&'static CStr, u64)> {
    [
        c"stream",
        c"event",
        c"graph",
        c"exec",
        c"user_object",
        c"allocation",
        c"mapping",
        c"reservation",
        c"block",
        c"host",
    ]
    .into_iter()
    .map(|kind| (kind, fake.live(kind)))
    .collect()
}

#[test]
fn graphs_streams_events_and_memory_are_freed() {
    let Some(fake) = Fake::open() else {
        return;
    };
    let life = || {
        all(2, |comm| {
            let streams = [stream(), stream()];
            for round in 0..3 {
                let on = comm.on(&streams[round % 2]);
                // This eager call orders the stream after the work on the other stream. A replay
                // alone would not be ordered after that work.
                on.barrier()?;
                let x = comm.tensor(DType::F32, 70_000)?;
                let graph = capture(&on, || on.all_reduce_async(&x, ReduceOp::Sum).map(drop))?;
                graph.run(on.stream())?;
                on.all_reduce(&x, ReduceOp::Sum)?;
                let mix = Mix::new(&comm)?;
                mix.issue(&on)?;
                // This launch is still queued when its stream is dropped.
                graph.launch(on.stream())?;
            }
            comm.barrier()
        });
    };
    // Returns the numbers of live objects once they no longer change. Each allocation makes the
    // library release completed work.
    let settled = || {
        let mut last = live(&fake);
        for _ in 0..200 {
            drop(tensor(DType::U8, 1).expect("memory"));
            std::thread::sleep(Duration::from_millis(5));
            let now = live(&fake);
            if now == last {
                break;
            }
            last = now;
        }
        live(&fake)
    };
    // The first run allocates the pools, so it is not part of the measurement.
    life();
    let before = settled();
    const LIVES: u64 = 8;
    for _ in 0..LIVES {
        life();
    }
    for ((kind, before), (_, after)) in before.iter().zip(settled()) {
        // Pools grow with the number of operations that two ranks have in flight at the same time,
        // by at most one allocation per run.
        let pooled = [c"block", c"host"].contains(kind);
        let most = before + if pooled { LIVES } else { 0 };
        assert!(after <= most, "{kind:?}: {before}, then {after}");
    }
    // Negative control: a leaked stream must change the numbers.
    let before = settled();
    core::mem::forget(stream());
    assert_ne!(settled(), before);
}

/// Captures a graph with direct driver calls in every capture mode.
#[test]
fn a_capture_begun_by_another_library_keeps_its_resources() {
    const N: usize = 40_000;
    let Some(fake) = Fake::open() else {
        return;
    };
    for mode in 0..3 {
        let barrier = std::sync::Barrier::new(2);
        all(2, |comm| {
            let raw = fake.stream();
            // SAFETY: `raw` is a stream of the fake. It is destroyed below, after `stream` is
            // dropped.
            let stream = unsafe { Stream::adopt(device(), raw as *mut c_void)? };
            let on = comm.on(&stream);
            let (x, y) = (tensor(DType::F32, N)?, tensor(DType::F32, N)?);
            let between = tensor(DType::F32, N)?;
            let mix = Mix::new(&comm)?;
            mix.fill(5)?;
            barrier.wait();
            fake.begin_capture(raw, mode);
            assert!(stream.is_capturing());
            let captured = on
                .all_reduce_into_async(&between, &x, ReduceOp::Sum)
                .and_then(|_| on.all_reduce_into_async(&y, &between, ReduceOp::Average))
                .and_then(|_| mix.issue(&on));
            let refused = stream
                .end_capture()
                .expect_err("a capture of another library");
            assert!(matches!(refused, Error::CaptureState { .. }), "{refused}");
            // In global mode, calls of any thread can invalidate a capture, so both ranks wait
            // before they end their captures.
            barrier.wait();
            let (graph, exec) = fake.end_capture(raw);
            captured?;
            barrier.wait();
            let held = Tensor::clone(&between);
            drop((between, held));
            let noise: Vec<Tensor> = (0..8)
                .map(|_| tensor(DType::F32, N))
                .collect::<Result<_>>()?;
            for tensor in &noise {
                tensor.copy_from(&[f32::NAN; N])?;
            }
            for round in 0..10 {
                x.copy_from(&[(round + comm.rank()) as f32; N])?;
                mix.fill(u64::from(round))?;
                fake.launch(exec, raw);
                fake.call("cuStreamSynchronize", raw);
                assert_eq!(y.to_vec::<f32>()?, [(2 * round + 1) as f32; N]);
                mix.check(u64::from(round))?;
            }
            barrier.wait();
            let before = fake.live(c"user_object");
            barrier.wait();
            drop((on, stream, mix));
            fake.call("cuGraphExecDestroy", exec);
            fake.call("cuGraphDestroy", graph);
            soon(&comm, "the release of the graph's resources", || {
                fake.live(c"user_object") < before
            })?;
            barrier.wait();
            // The last work of the communicator was on `raw`, so move the communicator to its own
            // stream before `raw` is destroyed.
            comm.barrier()?;
            fake.call("cuStreamDestroy_v2", raw);
            Ok(())
        });
    }
}

#[test]
fn a_failed_replay_by_another_library_is_reported_by_the_next_call() {
    let Some(fake) = Fake::open() else {
        return;
    };
    let mut options = options();
    options.timeout = Duration::from_millis(500);
    for result in run_threads(2, &options, |comm| {
        let raw = fake.stream();
        // SAFETY: `raw` is a stream of the fake, and no call destroys it.
        let stream = unsafe { Stream::adopt(device(), raw as *mut c_void)? };
        let x = comm.alloc(DType::F32, 10)?;
        fake.begin_capture(raw, 1);
        comm.on(&stream).all_reduce_async(&x, ReduceOp::Sum)?;
        let (_, exec) = fake.end_capture(raw);
        if comm.rank() == 0 {
            fake.launch(exec, raw);
            fake.call("cuStreamSynchronize", raw);
        } else {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(comm.barrier().expect_err("rank 1 launched nothing"))
    }) {
        let error = result.expect("joined");
        assert!(error.to_string().contains("all_reduce"), "{error}");
        assert!(matches!(error, Error::Timeout(_)), "{error}");
    }
}

/// Stands for the owner of adopted memory. Counts how often a value of this type is dropped.
struct DropCount(Arc<AtomicU32>);

impl Drop for DropCount {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn adopted_streams_and_memory_are_not_freed() {
    const N: usize = 1000;
    let Some(fake) = Fake::open() else {
        return;
    };
    all(1, |comm| {
        comm.warm_up()?;
        let raw = fake.stream();
        let at = fake.allocate(4 * N);
        let dropped = Arc::new(AtomicU32::new(0));
        let calls = || {
            [
                c"cuStreamDestroy_v2",
                c"cuMemFree_v2",
                c"cuMemUnmap",
                c"cuStreamSynchronize",
                c"cuCtxSynchronize",
            ]
            .map(|name| fake.calls(name))
        };
        let open = {
            // SAFETY: `raw` is a stream of the fake. It is destroyed below, after `stream` is
            // dropped.
            let stream = unsafe { Stream::adopt(device(), raw as *mut c_void)? };
            let keep = Arc::new(DropCount(Arc::clone(&dropped)));
            // SAFETY: `at` points to `4 * N` bytes, which are freed below after `keep` is dropped.
            let x = unsafe { Tensor::adopt(device(), at, DType::F32, N, Some(keep))? };
            x.copy_from(&[3f32; N])?;
            let before = calls();
            let open = latch(&stream)?;
            let on = comm.on(&stream);
            on.all_reduce_async(&x, ReduceOp::Sum)?;
            assert_eq!(stream.as_raw(), raw as *mut c_void);
            // The communicator releases the adopted stream when the communicator is used on another
            // stream. The other stream then waits for the work of the adopted stream.
            let elsewhere = self::stream();
            comm.on(&elsewhere).barrier_async()?;
            drop((on, stream, x, elsewhere));
            assert_eq!(calls(), before);
            open
        };
        assert_eq!(dropped.load(Ordering::Acquire), 0, "the work has not run");
        drop(open);
        soon(&comm, "the drop of the memory's keeper", || {
            dropped.load(Ordering::Acquire) == 1
        })?;
        // The owner can still use and free the stream and the memory.
        fake.call("cuStreamSynchronize", raw);
        fake.call("cuStreamDestroy_v2", raw);
        fake.call("cuMemFree_v2", at as usize);
        Ok(())
    });
}

#[test]
fn launches_free_nothing_and_allocations_do() {
    let Some(fake) = Fake::open() else {
        return;
    };
    all(1, |comm| {
        comm.warm_up()?;
        let y = comm.tensor(DType::F32, 100)?;
        let x = comm.tensor(DType::F32, 100)?;
        let open = latch(comm.stream())?;
        comm.all_reduce_async(&x, ReduceOp::Sum)?;
        drop(x);
        let before = fake.live(c"mapping") + fake.live(c"block");
        let calls = || fake.calls(c"cuMemFree_v2") + fake.calls(c"cuMemUnmap");
        let freed = calls();
        drop(open);
        for _ in 0..10 {
            comm.all_reduce_async(&y, ReduceOp::Sum)?;
            comm.all_reduce(&y, ReduceOp::Sum)?;
            comm.synchronize()?;
        }
        assert_eq!(calls(), freed, "launches freed memory");
        soon(&comm, "the release of the memory", || {
            fake.live(c"mapping") + fake.live(c"block") < before
        })
    });
}

#[test]
fn handles_of_other_devices_are_not_adopted() {
    for handle in [0, 2, 8] {
        // SAFETY: the CPU has no streams to adopt, so `adopt` refuses the handle before any use.
        let refused = unsafe { Stream::adopt(Device::Cpu, handle as *mut c_void) };
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
    }
    // SAFETY: the address is not aligned for f32, so `adopt` refuses it before any use.
    let refused = unsafe { Tensor::adopt(device(), 2 as *mut u8, DType::F32, 1, None) };
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
}

#[test]
fn a_query_does_not_invalidate_a_capture() {
    all(1, |comm| {
        let x = comm.alloc(DType::F32, 4)?;
        x.copy_from(&[2f32; 4])?;
        let graph = capture(&comm, || {
            comm.all_reduce_async(&x, ReduceOp::Average)?;
            let stream = comm.stream();
            let _ = stream.is_idle();
            assert!(stream.is_capturing());
            assert!(stream.synchronize().is_err());
            assert!(stream.begin_capture().is_err());
            assert!(comm.failure().is_none());
            x.to_vec::<f32>().map(drop)
        })?;
        graph.run(comm.stream())?;
        assert_eq!(x.to_vec::<f32>()?, [2.0; 4]);
        Ok(())
    });
}

#[test]
fn a_stream_with_earlier_work_may_be_dropped_during_a_capture() {
    all(1, |comm| {
        let stream = stream();
        let x = comm.tensor(DType::F32, 100)?;
        let open = latch(&stream)?;
        let on = comm.on(&stream);
        on.all_reduce_async(&x, ReduceOp::Sum)?;
        stream.begin_capture()?;
        on.all_reduce_async(&x, ReduceOp::Sum)?;
        drop(open);
        drop((on, stream, x));
        comm.barrier()
    });
}

#[test]
fn a_hook_that_panics_is_an_error_and_no_hang() {
    for edge in [ReplayEdge::Start, ReplayEdge::End] {
        let mut options = options();
        options.timeout = core::time::Duration::from_secs(60);
        let began = std::time::Instant::now();
        let results = run_threads(2, &options, |comm| {
            let x = comm.alloc(DType::F32, 4)?;
            let graph = capture(&comm, || {
                comm.all_reduce_async(&x, ReduceOp::Sum)?;
                comm.all_reduce_async(&x, ReduceOp::Sum).map(drop)
            })?;
            if comm.rank() == 1 {
                comm.register_graph_replay_hook(move |replay| {
                    let is_panic = replay.edge == edge && replay.replay_id == 2;
                    assert!(!is_panic || replay.index > 0, "panic of the hook");
                });
            }
            // Rank 1 may panic in its second replay before rank 0 has returned from its first.
            let result = graph
                .run(comm.stream())
                .and_then(|()| graph.launch(comm.stream()))
                .and_then(|ticket| comm.stream().wait(ticket, None));
            // On a GPU, the hook is called at the end after the replay has ended on the other rank.
            let may_succeed = device().is_gpu() && edge == ReplayEdge::End && comm.rank() == 0;
            if !may_succeed || result.is_err() {
                let error = result.expect_err("a panic");
                let expected = ["did not run to its end on rank 1", "panic of the hook"];
                let expected = expected[comm.rank() as usize];
                assert!(error.to_string().contains(expected), "{error}");
            }
            assert!(graph.run(comm.stream()).is_err());
            Ok(())
        });
        for result in results {
            result.expect("no error but the expected ones");
        }
        assert!(began.elapsed().as_secs() < 30, "a rank waited");
    }
}

#[test]
fn memory_is_kept_until_its_work_ends_if_the_driver_fails() {
    const N: usize = 100;
    let Some(fake) = Fake::open() else {
        return;
    };
    all(1, |comm| {
        let dropped = Arc::new(AtomicU32::new(0));
        let at = fake.allocate(4 * N);
        let adopted = || {
            let keep = Arc::new(DropCount(Arc::clone(&dropped)));
            // SAFETY: `at` points to `4 * N` bytes, which are freed below after all keepers are
            // dropped.
            unsafe { Tensor::adopt(device(), at, DType::F32, N, Some(keep)) }
        };
        // If an event cannot be created, the operation does not run.
        let stream = stream();
        let on = comm.on(&stream);
        let x = adopted()?;
        x.copy_from(&[5f32; N])?;
        let sequence = comm.flight_records().len();
        fake.fail(c"cuEventCreate", 1, 2);
        let refused = on.all_reduce_async(&x, ReduceOp::Sum).map(drop);
        assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
        assert!(comm.flight_records().len() <= sequence + 1);
        drop(x);
        assert_eq!(dropped.swap(0, Ordering::AcqRel), 1);

        // If an event cannot be recorded, the work runs, and its memory is kept until the work
        // completes.
        let open = latch(&stream)?;
        let x = adopted()?;
        fake.fail(c"cuEventRecord", 1, 700);
        let work = on.all_reduce_async(&x, ReduceOp::Sum)?;
        drop(x);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!work.is_completed());
        assert_eq!(dropped.load(Ordering::Acquire), 0);
        drop(open);
        let failed = work.wait_blocking();
        assert!(matches!(failed, Err(Error::Driver { .. })), "{failed:?}");
        soon(&comm, "the drop of the memory's keeper", || {
            dropped.swap(0, Ordering::AcqRel) == 1
        })?;

        // If a graph cannot keep resources, no work is captured.
        let x = adopted()?;
        stream.begin_capture()?;
        fake.fail(c"cuGraphRetainUserObject", 1, 2);
        let refused = on.all_reduce_async(&x, ReduceOp::Sum).map(drop);
        assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
        let graph = stream.end_capture()?;
        assert!(graph.is_empty(), "{graph:?}");

        // A failed launch of a graph returns an error.
        let graph = capture(&on, || on.all_reduce_async(&x, ReduceOp::Sum).map(drop))?;
        fake.fail(c"cuGraphLaunch", 1, 719);
        let failed = graph.run(&stream);
        assert!(matches!(failed, Err(Error::Driver { .. })), "{failed:?}");
        drop((x, graph, stream, on));
        soon(&comm, "the drop of the memory's keeper", || {
            dropped.load(Ordering::Acquire) == 1
        })?;
        fake.call("cuMemFree_v2", at as usize);
        Ok(())
    });
}
