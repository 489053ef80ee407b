//! Checks the C calls of each operation and their arguments, as the fake records them.

use fusewire::{Communicator, DType, ReduceOp, Result, Tensor};

use crate::{Fake, Record, ranks_of};

const RANKS: u32 = 3;
const ROOT: u32 = 1;
const COUNT: usize = 5;

/// Formats a record as one line, such as `ncclReduce 5 of 7, op 0, root 1, in place`.
fn line(record: &Record) -> String {
    let mut line = record.name.clone();
    if record.count >= 0 {
        line += &format!(" {}", record.count);
    }
    if record.dtype >= 0 {
        line += &format!(" of {}", record.dtype);
    }
    for (name, value) in [
        ("op", record.op),
        ("root", record.root),
        ("peer", record.peer),
    ] {
        if value >= 0 {
            line += &format!(", {name} {value}");
        }
    }
    if record.in_place == 1 {
        line += ", in place";
    }
    if record.depth > 0 {
        line += &format!(", depth {}", record.depth);
    }
    line
}

/// Returns the calls of each rank, except calls that create or destroy communicators.
fn by_rank(records: &[Record], ranks: u32) -> Vec<Vec<String>> {
    let own = |rank: i64| {
        let threads: Vec<i64> = records
            .iter()
            .filter(|record| record.rank == rank)
            .map(|record| record.thread)
            .collect();
        let lines = records.iter().filter(|record| {
            let frame = ["ncclCommInitRank", "ncclCommDestroy", "ncclCommAbort"];
            let is_own = record.rank == rank || record.rank < 0 && threads.contains(&record.thread);
            is_own && !frame.contains(&&*record.name)
        });
        lines.map(line).collect()
    };
    (0..i64::from(ranks)).map(own).collect()
}

fn calls(fake: &Fake, body: impl Fn(&Communicator) -> Result<()> + Sync) -> Vec<Vec<String>> {
    fake.take();
    fake.all(RANKS, |comm| body(&comm));
    by_rank(&fake.take(), RANKS)
}

/// Runs `body` on three ranks and compares the calls of rank r with `expected(r)`.
fn check(
    fake: &Fake,
    body: impl Fn(&Communicator) -> Result<()> + Sync,
    expected: impl Fn(u32) -> Vec<String>,
) {
    for (rank, called) in (0..).zip(calls(fake, body)) {
        assert_eq!(called, expected(rank), "rank {rank}");
    }
}

/// Returns `calls` enclosed in the calls that start and end a group.
fn group(calls: Vec<String>) -> Vec<String> {
    let calls = calls.into_iter().map(|call| format!("{call}, depth 1"));
    ["ncclGroupStart, depth 1".to_owned()]
        .into_iter()
        .chain(calls)
        .chain(["ncclGroupEnd, depth 1".to_owned()])
        .collect()
}

fn send(count: usize, peer: u32) -> String {
    format!("ncclSend {count} of 7, peer {peer}")
}

fn recv(count: usize, peer: u32) -> String {
    format!("ncclRecv {count} of 7, peer {peer}")
}

fn one(call: &str) -> Vec<String> {
    vec![call.to_owned()]
}

fn floats(count: usize) -> Result<Tensor> {
    Tensor::new(DType::F32, count)
}

#[test]
fn types() {
    let fake = Fake::new();
    let numbers = [
        (DType::I8, 0),
        (DType::U8, 1),
        (DType::I32, 2),
        (DType::U32, 3),
        (DType::I64, 4),
        (DType::U64, 5),
        (DType::F16, 6),
        (DType::F32, 7),
        (DType::F64, 8),
        (DType::Bf16, 9),
        (DType::E4m3, 10),
        (DType::E5m2, 11),
    ];
    for (dtype, number) in numbers {
        check(
            &fake,
            |comm| {
                let (from, to) = (Tensor::new(dtype, COUNT)?, Tensor::new(dtype, 3 * COUNT)?);
                comm.all_gather_single(&to, &from)
            },
            |_| one(&format!("ncclAllGather 5 of {number}")),
        );
    }
    // For versions before 2.24, the adapter passes 8-bit floats as bytes.
    let old = Fake::of_version(22_304);
    for dtype in [DType::E4m3, DType::E5m2] {
        check(
            &old,
            |comm| comm.broadcast(&Tensor::new(dtype, COUNT)?, ROOT),
            |_| one("ncclBroadcast 5 of 1, root 1, in place"),
        );
    }
}

#[test]
fn reductions() {
    let fake = Fake::new();
    for (op, number) in [
        (ReduceOp::Sum, 0),
        (ReduceOp::Product, 1),
        (ReduceOp::Max, 2),
        (ReduceOp::Min, 3),
        (ReduceOp::Average, 4),
    ] {
        check(
            &fake,
            |comm| comm.all_reduce(&floats(COUNT)?, op),
            |_| vec![format!("ncclAllReduce 5 of 7, op {number}, in place")],
        );
    }
    fake.take();
    // The factor differs by rank. The adapter creates a reduction operator for the call and
    // destroys it afterwards.
    fake.all(RANKS, |comm| {
        let op = ReduceOp::PreMulSum(f64::from(comm.rank()) + 0.5);
        comm.all_reduce(&floats(COUNT)?, op)?;
        comm.reduce_scatter_single(&floats(COUNT)?, &floats(COUNT * 3)?, op)
    });
    let records = fake.take();
    for called in by_rank(&records, RANKS) {
        let expected = [
            "ncclRedOpCreatePreMulSum of 7, op 5",
            "ncclAllReduce 5 of 7, op 5, in place",
            "ncclRedOpDestroy, op 5",
            "ncclRedOpCreatePreMulSum of 7, op 6",
            "ncclReduceScatter 5 of 7, op 6",
            "ncclRedOpDestroy, op 6",
        ];
        assert_eq!(called, expected);
    }
    for record in &records {
        if record.name == "ncclRedOpCreatePreMulSum" {
            let factor = record.rank as f32 + 0.5;
            assert_eq!(record.scalar, i64::from(factor.to_bits()));
        }
    }
}

#[test]
fn collectives() {
    let fake = Fake::new();
    let root = |rank: u32| rank == ROOT;
    check(
        &fake,
        |comm| comm.all_reduce_into(&floats(COUNT)?, &floats(COUNT)?, ReduceOp::Max),
        |_| one("ncclAllReduce 5 of 7, op 2"),
    );
    check(
        &fake,
        |comm| comm.reduce(&floats(COUNT)?, ROOT, ReduceOp::Sum),
        |rank| {
            let suffix = if root(rank) { ", in place" } else { "" };
            vec![format!("ncclReduce 5 of 7, op 0, root 1{suffix}")]
        },
    );
    check(
        &fake,
        |comm| comm.reduce_into(&floats(COUNT)?, &floats(COUNT)?, ROOT, ReduceOp::Sum),
        |_| one("ncclReduce 5 of 7, op 0, root 1"),
    );
    check(
        &fake,
        |comm| comm.broadcast(&floats(COUNT)?, ROOT),
        |_| one("ncclBroadcast 5 of 7, root 1, in place"),
    );
    check(
        &fake,
        |comm| {
            let whole = floats(3 * COUNT)?;
            let row = whole.slice(comm.rank() as usize * COUNT, COUNT)?;
            comm.all_gather_single(&whole, &row)?;
            comm.reduce_scatter_single(&row, &whole, ReduceOp::Sum)
        },
        |_| {
            vec![
                "ncclAllGather 5 of 7, in place".to_owned(),
                "ncclReduceScatter 5 of 7, op 0, in place".to_owned(),
            ]
        },
    );
    check(
        &fake,
        |comm| comm.all_to_all_single(&floats(3 * COUNT)?, &floats(3 * COUNT)?),
        |_| one("ncclAlltoAll 5 of 7"),
    );
    check(&fake, Communicator::barrier, |_| {
        one("ncclAllReduce 1 of 7, op 0, in place")
    });
    check(
        &fake,
        |comm| comm.barrier_async()?.wait_blocking(),
        |_| one("ncclAllReduce 1 of 7, op 0, in place"),
    );
    check(
        &fake,
        |comm| comm.tensor_deregister(&comm.tensor_register(&floats(COUNT)?)?),
        |_| {
            vec![
                "ncclCommRegister 20".to_owned(),
                "ncclCommDeregister".to_owned(),
            ]
        },
    );
}

#[test]
fn messages() {
    let fake = Fake::new();
    check(
        &fake,
        |comm| match comm.rank() {
            0 => comm.send(&floats(COUNT)?, 2),
            2 => comm.recv(&floats(COUNT)?, 0),
            _ => Ok(()),
        },
        |rank| match rank {
            0 => vec![send(5, 2)],
            2 => vec![recv(5, 0)],
            _ => vec![],
        },
    );
    check(
        &fake,
        |comm| {
            let (rank, x) = (comm.rank(), floats(COUNT)?);
            let mut batch = comm.batch_op_create();
            batch.send(&x, (rank + 1) % 3)?;
            batch.recv(&floats(COUNT)?, (rank + 2) % 3)?;
            batch.send(&x.slice(1, 2)?, (rank + 2) % 3)?;
            batch.recv(&floats(2)?, (rank + 1) % 3)?;
            batch.issue_async()?.wait_blocking()
        },
        |rank| {
            let (next, before) = ((rank + 1) % 3, (rank + 2) % 3);
            group(vec![
                send(5, next),
                recv(5, before),
                send(2, before),
                recv(2, next),
            ])
        },
    );
}

/// Checks that operations are composed of grouped sends and receives if the libraries lack them or
/// support them only for equal sizes.
#[test]
fn composed() {
    let fake = Fake::new();
    // For each peer the send, then the receive. Empty rows need neither.
    let by_peer = |sent: &dyn Fn(u32) -> usize, received: &dyn Fn(u32) -> usize| {
        let pair = |peer: u32| {
            let (sent, received) = (sent(peer), received(peer));
            let send = (sent > 0).then(|| send(sent, peer));
            send.into_iter()
                .chain((received > 0).then(|| recv(received, peer)))
        };
        group((0..RANKS).flat_map(pair).collect())
    };
    let on_root = |rank: u32| move |_: u32| if rank == ROOT { COUNT } else { 0 };
    let of_root = |peer: u32| if peer == ROOT { COUNT } else { 0 };
    check(
        &fake,
        |comm| comm.scatter_single(&floats(COUNT)?, &floats(3 * COUNT)?, ROOT),
        |rank| by_peer(&on_root(rank), &of_root),
    );
    check(
        &fake,
        |comm| comm.gather_single(&floats(3 * COUNT)?, &floats(COUNT)?, ROOT),
        |rank| by_peer(&of_root, &on_root(rank)),
    );
    let gathered = |rank: u32| by_peer(&|_| rank as usize + 2, &|peer| peer as usize + 2);
    check(
        &fake,
        |comm| {
            let own = floats(comm.rank() as usize + 2)?;
            comm.all_gather_v_single(&floats(9)?, &own, &[2, 3, 4])
        },
        gathered,
    );
    check(
        &fake,
        |comm| {
            let own = floats(comm.rank() as usize + 2)?;
            comm.all_gather_v(&[floats(2)?, floats(3)?, floats(4)?], &own)
        },
        gathered,
    );
    check(
        &fake,
        |comm| {
            let own = floats(comm.rank() as usize + 2)?;
            let inputs = [floats(2)?, floats(3)?, floats(4)?];
            comm.reduce_scatter_v(&own, &inputs, ReduceOp::Sum)
        },
        |_| {
            let reduce = |root: usize| format!("ncclReduce {} of 7, op 0, root {root}", root + 2);
            (0..3).map(reduce).collect()
        },
    );
    // Some pairs of ranks exchange no elements. They need no send and no receive.
    let split = |from: u32, to: u32| ((from + 2 * to) % 3) as usize;
    check(
        &fake,
        |comm| {
            let rank = comm.rank();
            let sent: Vec<u64> = (0..3).map(|to| split(rank, to) as u64).collect();
            let got: Vec<u64> = (0..3).map(|from| split(from, rank) as u64).collect();
            comm.all_to_all_v_single(&floats(3)?, &floats(3)?, &got, &sent)
        },
        |rank| by_peer(&|to| split(rank, to), &|from| split(from, rank)),
    );
}

#[test]
fn lists_of_equal_lengths_use_the_librarys_collectives() {
    let fake = Fake::new();
    let three = || -> Result<_> { Ok([floats(COUNT)?, floats(COUNT)?, floats(COUNT)?]) };
    check(
        &fake,
        |comm| comm.all_gather(&three()?, &floats(COUNT)?),
        |_| one("ncclAllGather 5 of 7"),
    );
    check(
        &fake,
        |comm| comm.reduce_scatter(&floats(COUNT)?, &three()?, ReduceOp::Min),
        |_| one("ncclReduceScatter 5 of 7, op 3"),
    );
}

/// Every version of the fake exports all symbols, so only the version determines which functions
/// are called.
#[test]
fn an_old_version_gets_only_calls_that_it_has() {
    let fake = Fake::of_version(22_703);
    check(
        &fake,
        |comm| comm.all_to_all_single(&floats(3 * COUNT)?, &floats(3 * COUNT)?),
        |_| {
            group(
                (0..RANKS)
                    .flat_map(|peer| [send(5, peer), recv(5, peer)])
                    .collect(),
            )
        },
    );
    let older = Fake::of_version(21_405);
    check(
        &older,
        |comm| {
            comm.tensor_deregister(&comm.tensor_register(&floats(COUNT)?)?)?;
            let list: &[u32] = if comm.rank() == 1 { &[] } else { &[2, 0] };
            if let Some(part) = comm.split(list, "part")? {
                assert_eq!((part.size(), part.rank()), (2, u32::from(comm.rank() == 0)));
                part.all_reduce(&floats(COUNT)?, ReduceOp::Sum)?;
                part.finalize()?;
            }
            Ok(())
        },
        // Ranks 2 and 0 of the parent are ranks 0 and 1 of the split communicator.
        |rank| {
            if rank == 2 {
                vec![]
            } else {
                one("ncclAllReduce 5 of 7, op 0, in place")
            }
        },
    );
}

/// Checks that the adapter uses AMD's spelling only with AMD's libraries, for any version.
#[test]
fn all_to_all_has_each_vendors_spelling() {
    for (backend, version, call) in [
        ("rccl", 22_106, "ncclAllToAll 5 of 7"),
        ("rcclx", 22_106, "ncclAllToAll 5 of 7"),
        ("rccl", 22_803, "ncclAllToAll 5 of 7"),
        ("nccl", 22_803, "ncclAlltoAll 5 of 7"),
        ("ncclx", 22_803, "ncclAlltoAll 5 of 7"),
    ] {
        let fake = Fake::of_version(version);
        for result in ranks_of(backend, RANKS, &fake.options(), |comm| {
            comm.all_to_all_single(&floats(3 * COUNT)?, &floats(3 * COUNT)?)
        }) {
            result.expect("the library has it");
        }
        for called in by_rank(&fake.take(), RANKS) {
            assert_eq!(called, [call], "{backend} {version}");
        }
    }
}
