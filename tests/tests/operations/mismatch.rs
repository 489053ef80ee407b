//! Ranks that call different operations: all of them get an error at once, not at the time-out.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use fusewire::store::MemoryStore;
use fusewire::{
    Algorithm, Communicator, DType, Device, Error, FailureKind, Norm, Options, ReduceOp, Result,
};
use fusewire_tests::device::run_threads;

/// The time-out; a mismatch must be reported in much less.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Bound for that: not a measurement, but far from the time-out.
const AT_ONCE: Duration = Duration::from_secs(5);

type Call = fn(&Communicator) -> Result<()>;

fn f32s(count: usize) -> Vec<f32> {
    vec![1.0; count]
}

/// One row, perhaps with a residual and a bias.
fn norm(comm: &Communicator, residual: bool, bias: bool, epsilon: f32) -> Result<()> {
    let (mut out, row) = (f32s(16), f32s(16));
    let mut norm = Norm::rms(&mut out[..], &row[..], &row[..], epsilon);
    if residual {
        norm = norm.with_residual(&row[..]);
    }
    if bias {
        norm = norm.with_bias(&row[..]);
    }
    comm.all_reduce_norm(&norm)
}

/// What most ranks call, what one calls instead, and whether ranks can go different ways.
const CASES: &[(&str, Call, Call)] = &[
    (
        "another operation, packets against signals",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.barrier(),
    ),
    (
        "another operation, signals against signals",
        |comm| comm.barrier(),
        |comm| comm.broadcast(&mut f32s(16), 0),
    ),
    (
        "another count, packets",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(17), ReduceOp::Sum),
    ),
    (
        "another count of as many lines",
        |comm| comm.all_reduce(&mut f32s(1), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(2), ReduceOp::Sum),
    ),
    (
        "no elements against some",
        |comm| comm.all_reduce(&mut f32s(0), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(2), ReduceOp::Sum),
    ),
    (
        "another count, two shots",
        |comm| comm.all_reduce(&mut f32s(100_000), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(100_001), ReduceOp::Sum),
    ),
    (
        "another algorithm, by a size on the other side of a threshold",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(100_000), ReduceOp::Sum),
    ),
    (
        "another type of equal size, packets against signals",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut vec![1i32; 16], ReduceOp::Sum),
    ),
    (
        "another type of equal size, packets",
        |comm| comm.all_reduce(&mut vec![fusewire::F16(0); 16], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut vec![fusewire::Bf16(0); 16], ReduceOp::Sum),
    ),
    (
        "another type of equal size, moved",
        |comm| comm.broadcast(&mut vec![1i32; 16], 0),
        |comm| comm.broadcast(&mut f32s(16), 0),
    ),
    (
        "another reduction, packets",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Max),
    ),
    (
        "another reduction, signals",
        |comm| comm.all_reduce(&mut vec![1i64; 16], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut vec![1i64; 16], ReduceOp::BitXor),
    ),
    (
        "another root",
        |comm| comm.broadcast(&mut f32s(16), 0),
        |comm| comm.broadcast(&mut f32s(16), 1),
    ),
    (
        "another root of a reduction",
        |comm| comm.reduce(&mut f32s(16), 0, ReduceOp::Sum),
        |comm| comm.reduce(&mut f32s(16), 1, ReduceOp::Sum),
    ),
    (
        "gather against all_gather",
        |comm| {
            let mut out = f32s(16 * comm.size() as usize);
            comm.all_gather_single(&mut out, &f32s(16))
        },
        |comm| {
            let mut out = f32s(16 * comm.size() as usize);
            comm.gather_single(&mut out, &f32s(16), 0)
        },
    ),
    (
        "counts of an all_gather_v",
        |comm| {
            let counts = vec![4; comm.size() as usize];
            let mut out = f32s(4 * comm.size() as usize);
            comm.all_gather_v_single(&mut out, &f32s(4), &counts)
        },
        |comm| {
            let mut counts = vec![4; comm.size() as usize];
            let r = comm.rank() as usize;
            counts[(r + 1) % 3] = 5;
            let mut out = f32s(counts.iter().sum::<u64>() as usize);
            comm.all_gather_v_single(&mut out, &f32s(4), &counts)
        },
    ),
    (
        "splits of an all_to_all_v",
        |comm| {
            let splits = vec![4; comm.size() as usize];
            let mut out = f32s(4 * comm.size() as usize);
            let input = out.clone();
            comm.all_to_all_v_single(&mut out, &input, &splits, &splits)
        },
        |comm| {
            let splits = vec![4; comm.size() as usize];
            let mut send = splits.clone();
            send[(comm.rank() as usize + 1) % 3] = 3;
            let mut out = f32s(4 * comm.size() as usize);
            let input = out.clone();
            comm.all_to_all_v_single(&mut out, &input, &splits, &send)
        },
    ),
    (
        "a norm with a residual on one rank only",
        |comm| norm(comm, false, false, 1e-6),
        |comm| norm(comm, true, false, 1e-6),
    ),
    (
        "a norm with a bias on one rank only",
        |comm| norm(comm, true, false, 1e-6),
        |comm| norm(comm, true, true, 1e-6),
    ),
    (
        "a norm with another epsilon",
        |comm| norm(comm, true, true, 1e-6),
        |comm| norm(comm, true, true, 1e-5),
    ),
];

fn run_case(name: &str, usual: Call, odd: Call, ranks: u32, who: u32, options: &Options) {
    let started = Instant::now();
    let results = run_threads(ranks, options, |comm| {
        // A slower rank may get the mismatch while it is still in an earlier call.
        let call = if comm.rank() == who { odd } else { usual };
        let first = comm
            .barrier()
            .and_then(|()| comm.all_reduce(&mut [1f32; 40][..], ReduceOp::Sum))
            .and_then(|()| call(&comm))
            .and_then(|()| comm.barrier());
        let again = comm.barrier();
        Ok((first, again))
    });
    let context = format!(
        "{name}, {ranks} ranks, rank {who} is odd, lanes {}",
        options.lanes
    );
    for (rank, result) in results.into_iter().enumerate() {
        let (first, again) = result.expect("joined");
        let error = first.expect_err(&context);
        let Error::Mismatch(failure) = &error else {
            panic!("{context}: rank {rank} got {error}");
        };
        assert_eq!(failure.kind, FailureKind::Mismatch);
        assert!(
            [failure.rank, failure.reporter].contains(&who) && failure.rank != failure.reporter,
            "{context}: {error}"
        );
        assert!(failure.activity.sequence >= 3, "{context}: {error}");
        assert_eq!(
            again.unwrap_err().to_string(),
            error.to_string(),
            "{context}"
        );
    }
    assert!(
        started.elapsed() < AT_ONCE,
        "{context}: reported only after {:?}",
        started.elapsed()
    );
}

#[test]
fn different_calls_are_reported_at_once() {
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    for (name, usual, odd) in CASES {
        for who in 0..3 {
            run_case(name, *usual, *odd, 3, who, &options);
        }
    }
}

#[test]
fn different_calls_are_told_with_lanes_as_threads() {
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    options.lanes = 32;
    for (i, (name, usual, odd)) in CASES.iter().enumerate() {
        run_case(name, *usual, *odd, 3, i as u32 % 3, &options);
    }
}

#[test]
fn sizes_and_types_of_send_and_receive() {
    let calls: [(Call, Call); 3] = [
        (
            |comm| comm.send(&f32s(8), 1),
            |comm| comm.recv(&mut f32s(9), 0),
        ),
        (
            |comm| comm.send(&f32s(8), 1),
            |comm| comm.recv(&mut vec![0i32; 8], 0),
        ),
        (
            |comm| comm.send(&f32s(0), 1),
            |comm| comm.recv(&mut f32s(1), 0),
        ),
    ];
    for (send, receive) in calls {
        let mut options = Options::default();
        options.timeout = TIMEOUT;
        let started = Instant::now();
        let results = run_threads(2, &options, |comm| {
            Ok(if comm.rank() == 0 {
                // A short send may return before it is received; the next call returns the error.
                send(&comm).and_then(|()| comm.barrier()).err()
            } else {
                receive(&comm).err()
            })
        });
        for error in results {
            let error = error.expect("joined").expect("a failure on both ranks");
            let Error::Mismatch(failure) = &error else {
                panic!("{error}");
            };
            assert_eq!((failure.reporter, failure.rank), (1, 0), "{error}");
            assert_eq!(failure.peer, Some(0), "{error}");
        }
        assert!(started.elapsed() < AT_ONCE);
    }
}

#[test]
fn options_that_must_agree_are_compared_at_bootstrap() {
    let changes: [fn(&mut Options); 7] = [
        |options| options.algorithm = Algorithm::TwoShot,
        |options| options.staging_bytes *= 2,
        |options| options.packet_slot_bytes *= 2,
        |options| options.channel_depth += 1,
        |options| options.blocks = 2,
        |options| options.lanes = 32,
        |options| options.first_epoch = 7,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let store = Arc::new(MemoryStore::new());
        let join = |rank: u32| {
            let mut options = Options::default();
            options.timeout = Duration::from_secs(2);
            if rank == 1 {
                change(&mut options);
            }
            Communicator::new(Device::Cpu, rank, 2, store.clone(), "differ", options)
        };
        let (a, b) = std::thread::scope(|scope| {
            let a = scope.spawn(|| join(0));
            let b = scope.spawn(|| join(1));
            (a.join().expect("no panic"), b.join().expect("no panic"))
        });
        for result in [a, b] {
            let error = result.expect_err("refused").to_string();
            assert!(error.contains("options"), "change {i}: {error}");
        }
    }
}

#[test]
fn local_options_may_differ() {
    let store = Arc::new(MemoryStore::new());
    let join = |rank: u32| -> Result<f32> {
        let mut options = Options::default();
        options.timeout = Duration::from_secs(20 + u64::from(rank));
        options.spins = Some(1 + rank * 100);
        let comm = Communicator::new(Device::Cpu, rank, 2, store.clone(), "local", options)?;
        let x = comm.alloc(DType::F32, 1)?;
        x.copy_from(&[1.0f32])?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        Ok(x.to_vec::<f32>()?[0])
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        assert_eq!(join(0).expect("a sum"), 2.0);
        assert_eq!(other.join().expect("no panic").expect("a sum"), 2.0);
    });
}

#[test]
fn a_wrong_packet_header_is_seen_without_a_stall() {
    // Polls go on for so long that no wait stalls: only what travels with the data can show it.
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    options.lanes = 32;
    options.spins = Some(300_000);
    for result in run_threads(2, &options, |comm| {
        let op = [ReduceOp::Sum, ReduceOp::Max][comm.rank() as usize];
        Ok(comm.all_reduce(&mut f32s(16), op))
    }) {
        let error = result
            .expect("joined")
            .expect_err("ranks reduced differently");
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
    }
}
