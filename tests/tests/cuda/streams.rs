//! Tests the default streams of CUDA and stream priorities. PyTorch's default stream is the legacy
//! default stream, handle 0.

use core::ffi::c_void;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use fusewire::{
    Communicator, DType, Device, Error, ReduceOp, Registration, ReplayEdge, Result, Stream,
    StreamPriority, run_threads_each,
};
use fusewire_tests::device;
use fusewire_tests::device::{run_threads, stream};
use fusewire_tests::fake::Fake;

use crate::{on_fake, options};

const LEGACY: usize = 0;
const PER_THREAD: usize = 2;

/// Time limit of waits that succeed.
const SOON: Duration = Duration::from_secs(60);

fn adopt(handle: usize) -> Result<Stream> {
    // SAFETY: the callers pass default streams, or streams that they destroy after the last use.
    unsafe { Stream::adopt(device(), handle as *mut c_void) }
}

/// Blocks a stream until the returned value is dropped.
fn latch(stream: &Stream) -> Result<Sender<()>> {
    let (open, wait) = channel();
    let wait: Mutex<Receiver<()>> = Mutex::new(wait);
    stream.host_fn(Arc::new(move || {
        let _ = wait.lock().expect("no panic").recv();
        Ok(())
    }))?;
    Ok(open)
}

fn ranks(count: u32, body: impl Fn(&Fake, &Communicator) -> Result<()> + Sync) {
    let fake = Fake::open().expect("the fake");
    for result in run_threads(count, &options(), |comm| body(&fake, &comm)) {
        result.expect("every rank");
    }
}

/// Checks that an operation on `on` waits for work of a blocking stream, as PyTorch's kernels do,
/// exactly if `waits` is true.
fn waits_for_blocking_streams(fake: &Fake, on: &Communicator, waits: bool) -> Result<()> {
    let raw = fake.blocking_stream();
    let blocking = adopt(raw)?;
    let x = on.tensor(DType::F32, 100)?;
    // Follows the communicator's last operation on another stream, which may be the legacy stream.
    on.all_reduce(&x, ReduceOp::Sum)?;
    let open = latch(&blocking)?;
    let work = on.all_reduce_async(&x, ReduceOp::Sum)?;
    if waits {
        std::thread::sleep(Duration::from_millis(50));
        assert!(!work.is_completed(), "the operation did not wait");
    } else {
        work.wait_timeout(SOON)?;
    }
    drop(open);
    work.wait_timeout(SOON)?;
    // In the other direction: later work of the blocking stream waits for the legacy stream.
    let open = latch(on.stream())?;
    let later = blocking.host_fn(Arc::new(|| Ok(())))?;
    if waits {
        std::thread::sleep(Duration::from_millis(50));
        assert!(
            !blocking.is_complete(later),
            "the blocking stream did not wait"
        );
    } else {
        blocking.wait(later, Some(SOON))?;
    }
    drop(open);
    blocking.synchronize()?;
    on.stream().synchronize()?;
    drop(blocking);
    fake.call("cuStreamDestroy_v2", raw);
    Ok(())
}

#[test]
fn the_legacy_stream_is_ordered_with_blocking_streams() {
    let test = "streams::the_legacy_stream_is_ordered_with_blocking_streams";
    on_fake(test, &[], || {
        ranks(1, |fake, comm| {
            for handle in [LEGACY, 1] {
                let legacy = adopt(handle)?;
                assert!(legacy.as_raw().is_null());
                waits_for_blocking_streams(fake, &comm.on(&legacy), true)?;
            }
            waits_for_blocking_streams(fake, &comm.on(&adopt(PER_THREAD)?), false)?;
            // Negative control: the streams of this library do not synchronise with others.
            waits_for_blocking_streams(fake, comm, false)
        });
        // Ranks on one GPU share its legacy stream, on which their kernels would run in sequence.
        ranks(2, |_, comm| {
            let error = comm
                .on(&adopt(LEGACY)?)
                .barrier()
                .expect_err("a shared stream");
            assert!(matches!(error, Error::Launch { .. }), "{error}");
            assert!(
                error.to_string().contains("2 ranks of this process share"),
                "{error}"
            );
            comm.barrier()
        });
    });
}

#[test]
fn operations_on_all_kinds_of_streams_run_in_the_order_of_the_calls() {
    let test = "streams::operations_on_all_kinds_of_streams_run_in_the_order_of_the_calls";
    on_fake(test, &[("FUSEWIRE_CUDA_FAKE_DEVICES", "3")], || {
        for result in run_threads_each(Device::Cuda, "fusewire", 3, &options(), |comm| {
            let adopt = |handle: usize| {
                // SAFETY: both handles are default streams.
                unsafe { Stream::adopt(comm.device(), handle as *mut c_void) }
            };
            let legacy = comm.on(&adopt(LEGACY)?);
            let per_thread = comm.on(&adopt(PER_THREAD)?);
            let x = comm.alloc(DType::F32, 3000)?;
            x.copy_from(&[1f32; 3000])?;
            for on in [&legacy, &per_thread, &comm, &per_thread, &legacy] {
                on.all_reduce_async(&x, ReduceOp::Average)?;
            }
            comm.barrier()?;
            for on in [&legacy, &per_thread, &comm] {
                on.stream().synchronize()?;
                assert!(on.stream().is_idle());
            }
            assert_eq!(x.to_vec::<f32>()?, [1.0; 3000]);
            Ok(())
        }) {
            result.expect("every rank");
        }
    });
}

/// Checks that every call on the legacy stream is refused, and that the capture stays valid.
fn refused(
    fake: &Fake,
    comm: &Communicator,
    legacy: &Communicator,
    registered: &Registration,
) -> Result<()> {
    let x = comm.tensor(DType::F32, 100)?;
    let calls = |name| fake.calls(name);
    let before = (calls(c"cuLaunchKernel"), calls(c"cuEventRecord"));
    let event = fusewire::Event::new();
    let stream = legacy.stream();
    for (what, result) in [
        ("all_reduce", legacy.all_reduce(&x, ReduceOp::Sum)),
        (
            "all_reduce_async",
            legacy.all_reduce_async(&x, ReduceOp::Sum).map(drop),
        ),
        ("host_fn", stream.host_fn(Arc::new(|| Ok(()))).map(drop)),
        ("record", stream.record(&event)),
        ("synchronize", stream.synchronize()),
        ("begin_capture", stream.begin_capture()),
        ("tensor_deregister", legacy.tensor_deregister(registered)),
    ] {
        let error = result.expect_err(what);
        assert!(
            matches!(error, Error::CaptureState { .. }),
            "{what}: {error}"
        );
        assert!(
            error.to_string().contains("legacy default stream"),
            "{error}"
        );
    }
    assert!(!stream.is_capturing());
    let after = (calls(c"cuLaunchKernel"), calls(c"cuEventRecord"));
    assert_eq!(before, after, "the refused calls launched something");
    Ok(())
}

#[test]
fn the_legacy_stream_is_refused_during_captures_which_stay_valid() {
    let test = "streams::the_legacy_stream_is_refused_during_captures_which_stay_valid";
    on_fake(test, &[], || {
        ranks(1, |fake, comm| {
            let legacy = comm.on(&adopt(LEGACY)?);
            let x = comm.tensor(DType::F32, 100)?;
            legacy.all_reduce(&x, ReduceOp::Sum)?;
            let registered = comm.tensor_register(&x)?;
            // A capture of a blocking stream by another library.
            let raw = fake.blocking_stream();
            for mode in 0..3 {
                fake.begin_capture(raw, mode);
                refused(fake, comm, &legacy, &registered)?;
                fake.end_capture(raw);
                legacy.all_reduce(&x, ReduceOp::Sum)?;
            }
            // A capture of this library, on a non-blocking stream.
            let own = stream();
            let on = comm.on(&own);
            own.begin_capture()?;
            on.all_reduce_async(&x, ReduceOp::Sum)?;
            refused(fake, comm, &legacy, &registered)?;
            let exec = own.end_capture()?.instantiate()?;
            legacy.all_reduce(&x, ReduceOp::Sum)?;
            exec.run(&own)?;
            // A graph may be replayed on the legacy stream.
            exec.run(legacy.stream())?;
            // A capture that this library began and other code ended.
            own.begin_capture()?;
            fake.end_capture(own.as_raw() as usize);
            legacy.all_reduce(&x, ReduceOp::Sum)?;
            // A capture whose stream was dropped.
            own.begin_capture()?;
            drop((on, own));
            legacy.all_reduce(&x, ReduceOp::Sum)?;
            fake.call("cuStreamDestroy_v2", raw);
            legacy.tensor_deregister(&registered)
        });
    });
}

#[test]
fn the_stream_of_a_thread_can_be_captured_and_belongs_to_the_thread() {
    let test = "streams::the_stream_of_a_thread_can_be_captured_and_belongs_to_the_thread";
    on_fake(test, &[], || {
        ranks(2, |_, comm| {
            let on = comm.on(&adopt(PER_THREAD)?);
            let x = comm.alloc(DType::F32, 3000)?;
            x.copy_from(&[1f32; 3000])?;
            on.stream().begin_capture()?;
            on.all_reduce_async(&x, ReduceOp::Sum)?;
            let exec = on.stream().end_capture()?.instantiate()?;
            exec.run(on.stream())?;
            exec.run(comm.stream())?;
            assert_eq!(x.to_vec::<f32>()?, [4.0; 3000]);
            // The handle is another stream on another thread.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let refused = on.all_reduce_async(&x, ReduceOp::Sum).map(drop);
                    let error = refused.expect_err("the stream of another thread");
                    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
                    assert!(error.to_string().contains("another thread"), "{error}");
                    // This wait covers only work of this library.
                    on.stream().synchronize().expect("no failure");
                });
            });
            // Each thread uses its own stream. The operations run in the order of the calls.
            let open = latch(on.stream())?;
            let first = on.all_reduce_async(&x, ReduceOp::Average)?;
            let second = std::thread::scope(|scope| {
                let call = || {
                    let on = comm.on(&adopt(PER_THREAD).expect("a stream"));
                    let work = on
                        .all_reduce_async(&x, ReduceOp::Average)
                        .expect("enqueued");
                    assert!(!work.is_completed());
                    drop(open);
                    work.wait_blocking().expect("the work");
                    work.is_completed()
                };
                scope.spawn(call).join().expect("no panic")
            });
            assert!(first.is_completed() && second);
            comm.barrier()?;
            assert_eq!(x.to_vec::<f32>()?, [4.0; 3000]);
            Ok(())
        });
    });
}

#[test]
fn streams_have_the_priority_that_was_asked_for() {
    let test = "streams::streams_have_the_priority_that_was_asked_for";
    on_fake(test, &[], || {
        let fake = Fake::open().expect("the fake");
        let of = |stream: &Stream| fake.priority(stream.as_raw() as usize);
        for (priority, number) in [
            (StreamPriority::Normal, 0),
            (StreamPriority::High, -4),
            (StreamPriority::Highest, -5),
        ] {
            let stream = Stream::with_priority(device(), priority).expect("a stream");
            assert_eq!(of(&stream), number);
        }
        for (high, number) in [(false, 0), (true, -4)] {
            let mut options = options();
            options.high_priority_stream = high;
            for result in run_threads(1, &options, |comm| Ok(of(comm.stream()))) {
                assert_eq!(result.expect("a communicator"), number);
            }
        }
        for (value, number) in [("0", 0), ("true", -4)] {
            let mut options = options();
            let hint = ("is_high_priority_stream".to_owned(), value.to_owned());
            options.hints.extend([hint]);
            for result in run_threads(1, &options, |comm| Ok(of(comm.stream()))) {
                assert_eq!(result.expect("a communicator"), number);
            }
        }
        let mut options = options();
        let hint = ("is_high_priority_stream".to_owned(), "perhaps".to_owned());
        options.hints.extend([hint]);
        for result in run_threads(1, &options, |_| Ok(())) {
            let error = result.expect_err("not a boolean").to_string();
            assert!(
                error.contains("is_high_priority_stream=\"perhaps\""),
                "{error}"
            );
        }
    });
}

#[test]
fn a_stream_with_too_few_sms_is_refused_by_name() {
    let test = "streams::a_stream_with_too_few_sms_is_refused_by_name";
    on_fake(test, &[], || {
        let fake = Fake::open().expect("the fake");
        let (small, large) = (fake.green_stream(8), fake.green_stream(32));
        // An SM holds one block.
        for (blocks, fits) in [(16, false), (8, true)] {
            let mut options = options();
            options.blocks = blocks;
            for result in run_threads(1, &options, |comm| {
                let x = comm.alloc(DType::F32, 1000)?;
                x.copy_from(&[1f32; 1000])?;
                comm.on(&adopt(large)?).all_reduce(&x, ReduceOp::Sum)?;
                let on = comm.on(&adopt(small)?);
                let result = on.all_reduce(&x, ReduceOp::Sum);
                if !fits {
                    on.stream().begin_capture()?;
                    let captured = on.all_reduce_async(&x, ReduceOp::Sum).map(drop);
                    captured.expect_err("too few SMs for the replay");
                    drop(on.stream().end_capture());
                    let text = result.expect_err("too few SMs").to_string();
                    for says in ["8 of 132 SMs", "hold 8 blocks", "launch 16 blocks each"] {
                        assert!(text.contains(says), "{text}");
                    }
                } else {
                    result?;
                }
                comm.all_reduce(&x, ReduceOp::Sum)?;
                assert_eq!(x.to_vec::<f32>()?, [1.0; 1000]);
                Ok(())
            }) {
                result.expect("one rank");
            }
        }
    });
}

/// Sets a flag when it is dropped, also after a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Starts an operation on rank 0 that rank 1 does not call, aborts rank 0 from another thread, and
/// returns the error of the operation. The operation runs on a stream of the given priority.
fn aborted(priority: StreamPriority, timeout: Duration) -> Error {
    let mut options = options();
    options.timeout = timeout;
    let ended = AtomicBool::new(false);
    let results = run_threads_each(Device::Cuda, "fusewire", 2, &options, |comm| {
        let comm = comm.on(&Stream::with_priority(comm.device(), priority)?);
        comm.barrier()?;
        if comm.rank() == 1 {
            while !ended.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(5));
            }
            return Ok(None);
        }
        let _ended = SetOnDrop(&ended);
        let x = comm.tensor(DType::F32, 1000)?;
        let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                // The kernel waits for rank 1.
                std::thread::sleep(Duration::from_millis(200));
                comm.abort();
            });
            work.wait_blocking().expect_err("rank 1 never calls")
        });
        Ok(Some(error))
    });
    let mut errors = results
        .into_iter()
        .filter_map(|result| result.ok().flatten());
    errors.next().expect("rank 0 has failed")
}

/// With one hardware queue per priority, work of other streams waits for the kernel, and aborts
/// must not: they use a stream of high priority.
#[test]
fn aborts_do_not_wait_for_the_kernel_that_they_stop() {
    let test = "streams::aborts_do_not_wait_for_the_kernel_that_they_stop";
    let environment = [
        ("FUSEWIRE_CUDA_FAKE_DEVICES", "2"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    ];
    on_fake(test, &environment, || {
        for priority in [StreamPriority::Normal, StreamPriority::High] {
            let error = aborted(priority, Duration::from_secs(100));
            assert!(error.to_string().contains("abort"), "{priority:?}: {error}");
        }
        // Negative control: the stream gets the only queue of the highest priority.
        let error = aborted(StreamPriority::Highest, Duration::from_secs(2));
        assert!(matches!(error, Error::Timeout(_)), "{error}");
    });
}

/// Negative control of the fake: ranks whose streams share a hardware queue wait for each other in
/// vain.
#[test]
fn ranks_that_share_a_hardware_queue_time_out() {
    let test = "streams::ranks_that_share_a_hardware_queue_time_out";
    let environment = [("CUDA_DEVICE_MAX_CONNECTIONS", "1")];
    on_fake(test, &environment, || {
        let mut options = options();
        options.timeout = Duration::from_secs(2);
        let results = run_threads(2, &options, |comm| comm.barrier());
        assert!(results.iter().any(Result::is_err), "both kernels ran");
    });
}

/// Checks that hooks may begin a capture while a graph is launched on the legacy stream, and may
/// use that stream. A lock that is held during hooks would deadlock.
#[test]
fn hooks_of_replays_on_the_legacy_stream_may_capture() {
    let test = "streams::hooks_of_replays_on_the_legacy_stream_may_capture";
    on_fake(test, &[], || {
        ranks(1, |_, comm| {
            let x = comm.alloc(DType::F32, 100)?;
            let own = stream();
            let on = comm.on(&own);
            own.begin_capture()?;
            on.all_reduce_async(&x, ReduceOp::Sum)?;
            let exec = own.end_capture()?.instantiate()?;
            let other = stream();
            let legacy = adopt(LEGACY)?;
            let (hook_stream, hook_legacy) = (other.clone(), legacy.clone());
            let called = Arc::new(AtomicBool::new(false));
            let in_hook = Arc::clone(&called);
            let _hook = comm.register_graph_replay_hook(move |arguments| {
                if arguments.edge == ReplayEdge::Start {
                    hook_legacy.host_fn(Arc::new(|| Ok(()))).expect("enqueued");
                    hook_stream.begin_capture().expect("a capture");
                    drop(hook_stream.end_capture().expect("a graph"));
                    in_hook.store(true, Ordering::Release);
                }
            });
            exec.run(&legacy)?;
            assert!(called.load(Ordering::Acquire));
            Ok(())
        });
    });
}

#[test]
fn overlap_on_streams_that_wait_for_each_other_is_refused() {
    let test = "streams::overlap_on_streams_that_wait_for_each_other_is_refused";
    on_fake(test, &[], || {
        ranks(1, |fake, comm| {
            let raw = fake.blocking_stream();
            let blocking = adopt(raw)?;
            let legacy = adopt(LEGACY)?;
            let per_thread = adopt(PER_THREAD)?;
            let x = comm.alloc(DType::F32, 1024)?;
            let y = comm.tensor(DType::F32, 1024)?;
            let flags = comm.ready_flags(4)?;
            for (operation, compute, refused) in [
                (&legacy, &blocking, true),
                (&blocking, &legacy, true),
                (&per_thread, &legacy, true),
                (&blocking, &per_thread, false),
                (comm.stream(), &legacy, false),
            ] {
                let on = comm.on(operation);
                // SAFETY: the flags order the accesses to chunks and tiles.
                let result =
                    unsafe { on.all_gather_with_flags_async(compute, &y, &x, &flags, 256) };
                let text = match &result {
                    Ok(_) => String::new(),
                    Err(error) => error.to_string(),
                };
                assert_eq!(
                    text.contains("each would wait for the other"),
                    refused,
                    "{text}"
                );
                drop(result);
                comm.synchronize()?;
            }
            drop(blocking);
            fake.call("cuStreamDestroy_v2", raw);
            Ok(())
        });
    });
}
