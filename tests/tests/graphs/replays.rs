//! Tests many replays of all operations mixed with user kernels: replays of several graphs, on
//! several streams, between eager launches, and with different first epochs. Also tests the errors
//! of replays if a rank is late.

use core::panic::AssertUnwindSafe;
use core::time::Duration;

use fusewire::{
    Communicator, DType, Error, Event, Failure, FailureKind, GraphExec, Operation, Options,
    ReduceOp, Result, Stream,
};
use fusewire_tests::device;
use fusewire_tests::device::{run_threads, stream};
use fusewire_tests::mix::Mix;
use fusewire_tests::rng::Rng;

/// Returns options with one block, which the user kernels require.
fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    options.blocks = 1;
    options
}

/// Returns the number of replays: `FUSEWIRE_TEST_REPLAYS` if set, otherwise `usual` on the CPU and
/// `usual / 500` (at least 20) on a GPU, because a launch takes longer there.
fn replays(usual: u64) -> u64 {
    match std::env::var("FUSEWIRE_TEST_REPLAYS") {
        Ok(number) => number.parse().expect("FUSEWIRE_TEST_REPLAYS is a number"),
        Err(_) if device().is_gpu() => (usual / 500).max(20),
        Err(_) => usual,
    }
}

fn all(ranks: u32, options: &Options, body: impl Fn(Communicator) -> Result<()> + Sync) {
    for result in run_threads(ranks, options, body) {
        result.expect("all ranks");
    }
}

/// Captures `mix` on `stream` as a graph.
fn capture(mix: &Mix, comm: &Communicator, stream: &Stream) -> Result<GraphExec> {
    stream.begin_capture()?;
    let issued = mix.issue(&comm.on(stream));
    let graph = stream.end_capture()?;
    issued?;
    graph.instantiate()
}

#[test]
fn a_hundred_thousand_replays_of_a_mix() {
    let count = replays(100_000);
    all(2, &options(), |comm| {
        let mix = Mix::new(&comm)?;
        assert!(mix.has_argmax() || device().is_gpu());
        let graph = capture(&mix, &comm, comm.stream())?;
        for round in 0..count {
            mix.fill(round)?;
            graph.run(comm.stream())?;
            mix.check(round)?;
        }
        Ok(())
    });
    println!("{count} replays");
}

#[test]
fn the_check_of_a_mix_can_fail() {
    let ranks = run_threads(2, &options(), |comm| {
        let mix = Mix::new(&comm)?;
        let graph = capture(&mix, &comm, comm.stream())?;
        mix.fill(0)?;
        graph.run(comm.stream())?;
        mix.check(0)?;
        // Negative control: writes the inputs of another round without a replay.
        mix.fill(1)?;
        Ok(std::panic::catch_unwind(AssertUnwindSafe(|| mix.check(1))).is_err())
    });
    for (rank, noticed) in ranks.into_iter().enumerate() {
        assert!(
            noticed.expect("the first round is right"),
            "rank {rank} reported no difference"
        );
    }
}

/// Issues a mix once: eagerly, by a blocking replay or by an enqueued replay.
fn once(
    rng: &mut Rng,
    comm: &Communicator,
    mix: &Mix,
    graph: &GraphExec,
    stream: &Stream,
) -> Result<()> {
    match rng.below(3) {
        0 => mix.issue(&comm.on(stream)),
        1 => graph.run(stream),
        _ => graph.launch(stream).map(drop),
    }
}

#[test]
fn several_graphs_take_turns_with_eager_launches_on_several_streams() {
    let count = replays(3000);
    for (ranks, first_epoch) in [(3, 0), (2, (1 << 31) - 40), (2, (1 << 32) - 40)] {
        let mut options = options();
        options.testing.first_epoch = first_epoch;
        all(ranks, &options, |comm| {
            let streams = [stream(), stream(), stream()];
            let mixes = [Mix::new(&comm)?, Mix::new(&comm)?, Mix::new(&comm)?];
            let mut graphs = Vec::new();
            for (mix, stream) in mixes.iter().zip(&streams) {
                graphs.push(capture(mix, &comm, stream)?);
            }
            // All ranks use the same random sequence.
            let mut rng = Rng::new(first_epoch);
            let done = Event::new();
            for round in 0..count {
                for mix in &mixes {
                    mix.fill(round)?;
                }
                let mut used = [false; 3];
                for _ in 0..1 + rng.below(4) {
                    let (which, stream) = (rng.below(3), &streams[rng.below(3)]);
                    // The library does not order the launch of a graph after the work of other
                    // streams.
                    stream.wait_event(&done)?;
                    once(&mut rng, &comm, &mixes[which], &graphs[which], stream)?;
                    stream.record(&done)?;
                    used[which] = true;
                }
                for stream in &streams {
                    stream.synchronize()?;
                }
                for (mix, _) in mixes.iter().zip(used).filter(|(_, used)| *used) {
                    mix.check(round)?;
                }
                // Replaces a graph by a new graph of the same work.
                if rng.one_in(40) {
                    let which = rng.below(3);
                    graphs[which] = capture(&mixes[which], &comm, &streams[rng.below(3)])?;
                }
            }
            Ok(())
        });
    }
}

/// Returns the failure that a timeout error contains.
fn timed_out(error: &Error) -> &Failure {
    match error {
        Error::Timeout(failure) => failure,
        other => panic!("{other}"),
    }
}

/// Runs three operations, eagerly or as two graphs. Rank 1 never calls the last operation. Returns
/// the failures of ranks 0 and 1.
fn late(replayed: bool) -> Vec<Failure> {
    let mut options = options();
    options.timeout = Duration::from_millis(700);
    let results = run_threads(2, &options, |comm| {
        let (x, y) = (comm.alloc(DType::F32, 40)?, comm.alloc(DType::F32, 80)?);
        let both = || {
            comm.all_reduce_async(&x, ReduceOp::Sum)?;
            comm.barrier_async()
        };
        let last = || comm.all_gather_single_async(&y, &x);
        let graphs = if replayed {
            let stream = comm.stream();
            stream.begin_capture()?;
            both()?;
            let first = stream.end_capture()?.instantiate()?;
            stream.begin_capture()?;
            last()?;
            last()?;
            Some([first, stream.end_capture()?.instantiate()?])
        } else {
            None
        };
        match &graphs {
            Some(graphs) => graphs[0].run(comm.stream())?,
            None => both()?.wait_blocking()?,
        }
        let failure = if comm.rank() == 1 {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
            comm.failure().expect("just seen")
        } else {
            let failed = match &graphs {
                Some(graphs) => graphs[1].run(comm.stream()),
                None => last()?.wait_blocking(),
            };
            failed.expect_err("rank 1 calls nothing")
        };
        // All later calls and replays of both graphs return the same error.
        let says = |what: &str, result: Result<()>| {
            let again = result.expect_err(what);
            assert_eq!(again.to_string(), failure.to_string(), "{what}");
        };
        for graph in graphs.iter().flatten() {
            for _ in 0..3 {
                says("a replay", graph.run(comm.stream()));
                let ticket = graph.launch(comm.stream())?;
                says("a ticket", comm.stream().wait(ticket, None));
            }
        }
        says("a call", comm.all_reduce(&x, ReduceOp::Sum));
        says("a barrier", comm.barrier());
        Ok(timed_out(&failure).clone())
    });
    let failures = results.into_iter().map(|result| result.expect("joined"));
    failures.collect()
}

#[test]
fn a_late_rank_is_named_by_a_replay_as_by_a_call() {
    let (eager, replayed) = (late(false), late(true));
    for (eager, replayed) in eager.iter().zip(&replayed) {
        for failure in [eager, replayed] {
            assert_eq!(failure.kind, FailureKind::Timeout);
            assert_eq!((failure.reporter, failure.rank), (0, 1));
            assert_eq!(failure.activity.operation, Operation::AllGather);
            assert_eq!(failure.blamed.operation, Operation::Barrier);
        }
        // The failures are equal except for times and progress.
        assert_eq!(eager.activity, replayed.activity);
        assert_eq!(eager.blamed, replayed.blamed);
        assert_eq!(eager.wait_kind, replayed.wait_kind);
        assert_eq!(
            (eager.awaited, eager.expected, eager.observed),
            (replayed.awaited, replayed.expected, replayed.observed)
        );
    }
}
