//! The driver calls of steady work, all of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::channel;

use fusewire::{Communicator, DType, ReduceOp, Result, Stream};
use fusewire_tests::device::{run_threads, stream, tensor};
use fusewire_tests::fake::Fake;
use serde_json::Value;

use crate::{on_fake, options};

/// How often each was called since the process began.
fn calls(fake: &Fake) -> BTreeMap<String, u64> {
    let report: Value = serde_json::from_str(&fake.report()).expect("JSON");
    let calls = report["calls"].as_object().expect("the calls");
    let count = |count: &Value| count.as_u64().expect("a number");
    calls
        .iter()
        .map(|(name, it)| (name.clone(), count(it)))
        .collect()
}

/// Times that the work is issued, for the average.
const TIMES: u64 = 10;

/// What one issue of `work` calls, in a stream that is busy meanwhile, so that nothing ends on its
/// way.
fn of(
    fake: &Fake,
    stream: &Stream,
    work: impl Fn() -> Result<()>,
) -> Result<BTreeMap<String, u64>> {
    // Pools grow to what is in flight.
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

/// Nothing is allocated, nothing is waited for, and whether the stream is captured is asked once.
#[test]
fn driver_calls_of_steady_launches_and_replays() {
    let test = "calls::driver_calls_of_steady_launches_and_replays";
    on_fake(test, &[], || {
        one(|fake, comm| {
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
            // A negative control: an event more is seen.
            let event = fusewire::Event::new();
            stream.record(&event)?;
            let seen = of(fake, &stream, || {
                on.all_reduce_async(&x, ReduceOp::Sum)?;
                stream.record(&event)
            })?;
            assert_ne!(seen, list(EAGER));
            assert_eq!(seen["cuEventRecord"], 2);
            Ok(())
        });
    });
}

/// Driver calls of one launch on a stream with unfinished work: whether the stream is captured,
/// whether the first of the earlier work has ended (in relaxed mode, lest that disturbs captures of
/// others), the launch, and an event behind it.
const EAGER: &[(&str, u64)] = &[
    ("cuStreamGetCaptureInfo_v3", 1),
    ("cuThreadExchangeStreamCaptureMode", 2),
    ("cuEventQuery", 1),
    ("cuLaunchKernel", 1),
    ("cuEventRecord", 1),
    // Whether the device's context is the thread's: before each of the other calls.
    ("cuCtxGetCurrent", 4),
];

/// What one replay calls.
const REPLAY: &[(&str, u64)] = &[
    ("cuStreamGetCaptureInfo_v3", 1),
    ("cuThreadExchangeStreamCaptureMode", 2),
    ("cuEventQuery", 1),
    ("cuGraphLaunch", 1),
    ("cuEventRecord", 1),
    ("cuCtxGetCurrent", 4),
];
