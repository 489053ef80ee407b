//! Checks which driver calls repeated launches and replays make.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;

use fusewire::{Communicator, DType, ReduceOp, Result, Stream};
use fusewire_tests::device::{run_threads, stream, tensor};
use fusewire_tests::fake::Fake;
use serde_json::Value;

use crate::{on_fake, options};

/// Returns the number of calls of each function since the process started.
fn calls(fake: &Fake) -> BTreeMap<String, u64> {
    let report: Value = serde_json::from_str(&fake.report()).expect("JSON");
    let calls = report["calls"].as_object().expect("the calls");
    let count = |count: &Value| count.as_u64().expect("a number");
    calls
        .iter()
        .map(|(name, it)| (name.clone(), count(it)))
        .collect()
}

/// Number of times that `of` issues the work to compute the average number of calls.
const TIMES: u64 = 10;

/// Returns the number of calls of each driver function that one execution of `work` makes. The
/// stream is blocked during the measurement, so no enqueued operation completes.
fn of(
    fake: &Fake,
    stream: &Stream,
    work: impl Fn() -> Result<()>,
) -> Result<BTreeMap<String, u64>> {
    // Pools grow to the number of operations in flight.
    for _ in 0..2 * TIMES {
        work()?;
    }
    stream.synchronize()?;
    let (open, wait) = channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    stream.host_fn(Arc::new(move || {
        let _ = wait.lock().expect("no panic").recv();
        Ok(())
    }))?;
    let before = calls(fake);
    for _ in 0..TIMES {
        work()?;
    }
    let after = calls(fake);
    drop(open);
    stream.synchronize()?;
    let mut out = BTreeMap::new();
    for (name, count) in after {
        let more = count - before.get(&name).copied().unwrap_or(0);
        if more > 0 {
            assert_eq!(more % TIMES, 0, "{name}: {more} calls in {TIMES} times");
            out.insert(name, more / TIMES);
        }
    }
    Ok(out)
}

fn one(body: impl Fn(&Fake, Communicator) -> Result<()> + Sync) {
    let fake = Fake::open().expect("the fake");
    for result in run_threads(1, &options(), |comm| body(&fake, comm)) {
        result.expect("one rank");
    }
}

fn list(calls: &[(&str, u64)]) -> BTreeMap<String, u64> {
    let owned = |(name, count): &(&str, u64)| ((*name).to_owned(), *count);
    calls.iter().map(owned).collect()
}

/// Checks that launches and replays neither allocate nor wait, and query the capture state only
/// once.
#[test]
fn driver_calls_of_steady_launches_and_replays() {
    let test = "calls::driver_calls_of_steady_launches_and_replays";
    on_fake(test, &[], || {
        one(|fake, comm| {
            // The current context of a thread that uses PyTorch.
            fake.make_current(fake.primary_context(0));
            let stream = stream();
            let on = comm.on(&stream);
            on.warm_up()?;
            let x = comm.alloc(DType::F32, 3000)?;
            let staged = tensor(DType::F32, 3000)?;
            for tensor in [&x, &staged] {
                let launch = || on.all_reduce_async(tensor, ReduceOp::Sum).map(drop);
                let seen = of(fake, &stream, launch)?;
                assert_eq!(seen, list(EAGER), "a launch");
                stream.begin_capture()?;
                let captured = launch();
                let graph = stream.end_capture()?.instantiate()?;
                captured?;
                let seen = of(fake, &stream, || graph.launch(&stream).map(drop))?;
                assert_eq!(seen, list(REPLAY), "a replay");
            }
            // Negative control: the driver call that records an additional event must be counted.
            let event = fusewire::Event::new();
            stream.record(&event)?;
            let seen = of(fake, &stream, || {
                on.all_reduce_async(&x, ReduceOp::Sum)?;
                stream.record(&event)
            })?;
            assert_ne!(seen, list(EAGER));
            assert_eq!(seen["cuEventRecord"], 2);
            // On a thread with another context, or none, each call switches to the context of the
            // communicator and back.
            fake.make_current(0);
            let mut switched = list(EAGER);
            for name in ["cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"] {
                switched.insert(name.to_owned(), EAGER_CALLS);
            }
            let launch = || on.all_reduce_async(&x, ReduceOp::Sum).map(drop);
            assert_eq!(
                of(fake, &stream, launch)?,
                switched,
                "a launch on a thread without context"
            );
            assert_eq!(fake.current_context(), 0);
            Ok(())
        });
    });
}

/// Driver calls of one launch on a stream with unfinished work: a query of the capture state, a
/// query of the oldest work, the launch, and the record of an event. The query of the oldest work
/// runs in relaxed capture mode, so captures of other threads stay valid. Two calls switch the
/// mode.
const EAGER: &[(&str, u64)] = &[
    ("cuStreamGetCaptureInfo_v3", 1),
    ("cuThreadExchangeStreamCaptureMode", 2),
    ("cuEventQuery", 1),
    ("cuLaunchKernel", 1),
    ("cuEventRecord", 1),
    // The library checks the thread's current context before each call above, except the calls that
    // switch the mode.
    ("cuCtxGetCurrent", EAGER_CALLS),
];

/// Number of driver calls of one launch for which the library makes its context current.
const EAGER_CALLS: u64 = 4;

/// Driver calls of one replay.
const REPLAY: &[(&str, u64)] = &[
    ("cuStreamGetCaptureInfo_v3", 1),
    ("cuThreadExchangeStreamCaptureMode", 2),
    ("cuEventQuery", 1),
    ("cuGraphLaunch", 1),
    ("cuEventRecord", 1),
    ("cuCtxGetCurrent", 4),
];
