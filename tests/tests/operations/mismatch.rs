//! Tests ranks that make different calls. Every rank must get an error immediately instead of after
//! the timeout.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use fusewire::store::MemoryStore;
use fusewire::{
    Algorithm, Communicator, DType, Device, Error, FailureKind, Norm, Options, ReduceOp, Result,
};
use fusewire_tests::device::run_threads;

/// Timeout of the communicators. A mismatch must be reported much earlier.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for the report of a mismatch: much shorter than the timeout, and long enough for a
/// busy machine.
const AT_ONCE: Duration = Duration::from_secs(5);

type Call = fn(&Communicator) -> Result<()>;

fn f32s(count: usize) -> Vec<f32> {
    vec![1.0; count]
}

/// Calls the fused norm on one row, optionally with a residual and a bias.
fn norm(comm: &Communicator, residual: bool, bias: bool, epsilon: f32) -> Result<()> {
    // Tensors, because the fused norm takes no slices on a GPU.
    let (out, row) = (comm.tensor(DType::F32, 16)?, comm.tensor(DType::F32, 16)?);
    row.copy_from(&f32s(16))?;
    let mut norm = Norm::rms(&out, &row, &row, epsilon);
    if residual {
        norm = norm.with_residual(&row);
    }
    if bias {
        norm = norm.with_bias(&row);
    }
    comm.all_reduce_norm(&norm)
}

/// Cases: the name, the call that most ranks make, and the different call of one rank.
const CASES: &[(&str, Call, Call)] = &[
    (
        "different operations, packets and signals",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.barrier(),
    ),
    (
        "different operations, signals and signals",
        |comm| comm.barrier(),
        |comm| comm.broadcast(&mut f32s(16), 0),
    ),
    (
        "different counts, packets",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(17), ReduceOp::Sum),
    ),
    (
        "different counts with equal numbers of lines",
        |comm| comm.all_reduce(&mut f32s(1), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(2), ReduceOp::Sum),
    ),
    (
        "no elements and some",
        |comm| comm.all_reduce(&mut f32s(0), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(2), ReduceOp::Sum),
    ),
    (
        "different counts, two shots",
        |comm| comm.all_reduce(&mut f32s(100_000), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(100_001), ReduceOp::Sum),
    ),
    (
        "different algorithms by counts on both sides of a threshold",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(100_000), ReduceOp::Sum),
    ),
    (
        "different types of equal size, packets and signals",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut vec![1i32; 16], ReduceOp::Sum),
    ),
    (
        "different types of equal size, packets",
        |comm| comm.all_reduce(&mut vec![fusewire::F16(0); 16], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut vec![fusewire::Bf16(0); 16], ReduceOp::Sum),
    ),
    (
        "different types of equal size, moved",
        |comm| comm.broadcast(&mut vec![1i32; 16], 0),
        |comm| comm.broadcast(&mut f32s(16), 0),
    ),
    (
        "different reductions, packets",
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
        |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Max),
    ),
    (
        "different reductions, signals",
        |comm| comm.all_reduce(&mut vec![1i64; 16], ReduceOp::Sum),
        |comm| comm.all_reduce(&mut vec![1i64; 16], ReduceOp::BitXor),
    ),
    (
        "different roots",
        |comm| comm.broadcast(&mut f32s(16), 0),
        |comm| comm.broadcast(&mut f32s(16), 1),
    ),
    (
        "different roots of a reduction",
        |comm| comm.reduce(&mut f32s(16), 0, ReduceOp::Sum),
        |comm| comm.reduce(&mut f32s(16), 1, ReduceOp::Sum),
    ),
    (
        "gather and all_gather",
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
        "different counts of an all_gather_v",
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
        "different splits of an all_to_all_v",
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
        "norms with different epsilons",
        |comm| norm(comm, true, true, 1e-6),
        |comm| norm(comm, true, true, 1e-5),
    ),
];

fn run_case(name: &str, usual: Call, odd: Call, ranks: u32, who: u32, options: &Options) {
    let started = Instant::now();
    let results = run_threads(ranks, options, |comm| {
        // A slow rank may detect the mismatch in a call before `call`.
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
        "{name}, {ranks} ranks, rank {who} differs, lanes {}",
        options.testing.lanes
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
fn different_calls_are_reported_with_lanes_as_threads() {
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    options.testing.lanes = 32;
    for (i, (name, usual, odd)) in CASES.iter().enumerate() {
        run_case(name, *usual, *odd, 3, i as u32 % 3, &options);
    }
}

/// Runs `odd` on rank 1 and `usual` on the other two ranks. Returns the message, which is the same
/// on all ranks.
fn message(usual: Call, odd: Call) -> String {
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    let results = run_threads(3, &options, |comm| {
        let call = if comm.rank() == 1 { odd } else { usual };
        Ok(call(&comm).and_then(|()| comm.barrier()).err())
    });
    let messages: Vec<String> = results
        .into_iter()
        .map(|result| result.expect("joined").expect("a failure").to_string())
        .collect();
    assert!(
        messages.iter().all(|text| *text == messages[0]),
        "the ranks report different failures: {messages:#?}"
    );
    messages[0].clone()
}

#[test]
fn roots_that_differ_are_named() {
    let calls: [(&str, Call, Call); 4] = [
        (
            "broadcast",
            |comm| comm.broadcast(&mut f32s(16), 0),
            |comm| comm.broadcast(&mut f32s(16), 1),
        ),
        (
            "reduce",
            |comm| comm.reduce(&mut f32s(16), 0, ReduceOp::Sum),
            |comm| comm.reduce(&mut f32s(16), 1, ReduceOp::Sum),
        ),
        (
            "scatter",
            |comm| comm.scatter_single(&mut f32s(16), &f32s(48), 0),
            |comm| comm.scatter_single(&mut f32s(16), &f32s(48), 1),
        ),
        (
            "gather",
            |comm| comm.gather_single(&mut f32s(48), &f32s(16), 0),
            |comm| comm.gather_single(&mut f32s(48), &f32s(16), 1),
        ),
    ];
    for (name, usual, odd) in calls {
        let text = message(usual, odd);
        let odd_is_blamed = text.contains(&format!("rank 1 called {name} #1 with root 1; rank "))
            && text.contains(" called it with root 0. ");
        let usual_is_blamed = text.contains(&format!(" called {name} #1 with root 0; rank 1 "))
            && text.contains(" called it with root 1. ");
        assert!(odd_is_blamed || usual_is_blamed, "{text}");
    }
}

#[test]
fn other_differences_are_named() {
    let calls: [(Call, Call, &[&str]); 5] = [
        (
            |comm| comm.all_reduce(&mut f32s(1000), ReduceOp::Sum),
            |comm| comm.all_reduce(&mut f32s(1001), ReduceOp::Sum),
            &["all_reduce #1 with 100", "called it with 100"],
        ),
        (
            |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Sum),
            |comm| comm.all_reduce(&mut f32s(16), ReduceOp::Max),
            &["all_reduce #1 with reduction ", "called it with reduction "],
        ),
        (
            |comm| comm.barrier(),
            |comm| comm.broadcast(&mut f32s(16), 2),
            &["broadcast #1 (16 f32, root 2)", "called barrier #1"],
        ),
        (
            |comm| comm.all_gather_v_single(&mut f32s(12), &f32s(4), &[4, 4, 4]),
            |comm| comm.all_gather_v_single(&mut f32s(13), &f32s(4), &[4, 4, 5]),
            &["called all_gather_v #1 with other counts"],
        ),
        (
            |comm| {
                let splits = [4, 4, 4];
                comm.all_to_all_v_single(&mut f32s(12), &f32s(12), &splits, &splits)
            },
            |comm| {
                let (receive, send) = ([4, 4, 4], [3, 4, 4]);
                comm.all_to_all_v_single(&mut f32s(12), &f32s(12), &receive, &send)
            },
            &["rank 1 sends 3 f32, rank 0 expects 4 f32"],
        ),
    ];
    for (usual, odd, expected) in calls {
        let text = message(usual, odd);
        for part in expected {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

#[test]
fn sizes_and_types_of_send_and_receive() {
    let calls: [(Call, Call, &str); 3] = [
        (
            |comm| comm.send(&f32s(8), 1),
            |comm| comm.recv(&mut f32s(9), 0),
            "recv #0 (9 f32): sizes differ: rank 0 sends 32 bytes, rank 1 expects 36 bytes; ",
        ),
        (
            |comm| comm.send(&f32s(8), 1),
            |comm| comm.recv(&mut vec![0i32; 8], 0),
            "recv #0 (8 i32): types or tags differ: rank 0 sends 32 bytes of another type than i32",
        ),
        (
            |comm| comm.send(&f32s(0), 1),
            |comm| comm.recv(&mut f32s(1), 0),
            "recv #0 (1 f32): sizes differ: rank 0 sends 0 bytes, rank 1 expects 4 bytes; ",
        ),
    ];
    for (send, receive, expected) in calls {
        let mut options = Options::default();
        options.timeout = TIMEOUT;
        // With several blocks, the message may contain the bytes of a block's part.
        options.blocks = 1;
        let started = Instant::now();
        let results = run_threads(2, &options, |comm| {
            Ok(if comm.rank() == 0 {
                // A short send may return before the peer receives it. The next call then returns
                // the error.
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
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert!(started.elapsed() < AT_ONCE);
    }
}

#[test]
fn options_that_must_agree_are_compared_at_bootstrap() {
    let changes: [fn(&mut Options); 7] = [
        |options| options.algorithm = Algorithm::TwoShot,
        |options| options.staging_bytes = 2 << 20,
        |options| options.packet_slot_bytes = 16 << 10,
        |options| options.channel_depth += 1,
        |options| options.blocks = 2,
        |options| options.testing.lanes = 32,
        |options| options.testing.first_epoch = 7,
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
        options.testing.spins = Some(1 + rank * 100);
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
    // Waits poll for a long time before they check for failures of other ranks, so only the packet
    // header can reveal the mismatch in time.
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    options.testing.lanes = 32;
    options.testing.spins = Some(300_000);
    for result in run_threads(2, &options, |comm| {
        let op = [ReduceOp::Sum, ReduceOp::Max][comm.rank() as usize];
        Ok(comm.all_reduce(&mut f32s(16), op))
    }) {
        let error = result
            .expect("joined")
            .expect_err("ranks called different reductions");
        assert!(matches!(error, Error::Mismatch(_)), "{error}");
    }
}
