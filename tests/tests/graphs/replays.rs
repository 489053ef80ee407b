//! Replays, very many of them: of all operations mixed with kernels of users, of several graphs at
//! a time, on several streams, between eager launches, wherever epochs begin; and what they say
//! when a rank is late.

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

/// One block, as kernels of users want it.
fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    options.blocks = 1;
    options
}

/// `usual` replays on the CPU, and 1 in 500 of them where a launch takes longer; or what
/// `FUSEWIRE_TEST_REPLAYS` says.
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

/// `mix` as a graph, captured from `stream`.
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
        // Another round's inputs, and no replay of them.
        mix.fill(1)?;
        Ok(std::panic::catch_unwind(AssertUnwindSafe(|| mix.check(1))).is_err())
    });
    for (rank, noticed) in ranks.into_iter().enumerate() {
        assert!(
            noticed.expect("the round itself is right"),
            "rank {rank} noticed nothing"
        );
    }
}

/// The ways to do a mix once.
fn once(
    rng: &mut Rng,
    comm: &Communicator,
    mix: &Mix,
    graph: &GraphExec,
    stream: &Stream,
) -> Result<()> {
    match rng.below(3) {
        // Eager.
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
        options.first_epoch = first_epoch;
        all(ranks, &options, |comm| {
            let streams = [stream(), stream(), stream()];
            let mixes = [Mix::new(&comm)?, Mix::new(&comm)?, Mix::new(&comm)?];
            let mut graphs = Vec::new();
            for (mix, stream) in mixes.iter().zip(&streams) {
                graphs.push(capture(mix, &comm, stream)?);
            }
            // The same on all ranks.
            let mut rng = Rng::new(first_epoch);
            let done = Event::new();
            for round in 0..count {
                for mix in &mixes {
                    mix.fill(round)?;
                }
                let mut used = [false; 3];
                for _ in 0..1 + rng.below(4) {
                    let (which, stream) = (rng.below(3), &streams[rng.below(3)]);
                    // A graph's launch is ordered with other streams' work by nobody else.
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
                // A graph ends, and another one is made of the same work.
                if rng.one_in(40) {
                    let which = rng.below(3);
                    graphs[which] = capture(&mixes[which], &comm, &streams[rng.below(3)])?;
                }
            }
            Ok(())
        });
    }
}

/// The failure of a time-out.
fn timed_out(error: &Error) -> &Failure {
    match error {
        Error::Timeout(failure) => failure,
        other => panic!("{other}"),
    }
}

/// Three operations, of which rank 1 never calls the last, eager or as two graphs; what rank 0 and
/// then rank 1 say.
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
            failed.expect_err("rank 1 does not come")
        };
        // From now on everything says the same: replays of both graphs, in every form, and calls.
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
        // All but the time that it took, and what else moved meanwhile.
        assert_eq!(eager.activity, replayed.activity);
        assert_eq!(eager.blamed, replayed.blamed);
        assert_eq!(eager.wait_kind, replayed.wait_kind);
        assert_eq!(
            (eager.awaited, eager.expected, eager.observed),
            (replayed.awaited, replayed.expected, replayed.observed)
        );
    }
}
