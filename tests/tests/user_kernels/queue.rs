//! Queues: batches of rows between blocks, on ranks that reach each other by load and store and on
//! a network that delays and reorders.

use core::time::Duration;

use fusewire::{Communicator, DType, Queue as HostQueue, Result, run_threads};
use fusewire_device::{
    Aborted, Group, In, InOut, Machine, Out, Queue, Session, Team, Unvoted, kernel,
};

use super::{SHAPES, THIRD, all, failing, keep_rank, on_both, options, tensor, zeros};

/// Elements of a row.
const WIDTH: usize = 3;

/// Sends `rows` to the ranks that `ids` names, in the way that `way` says, `rounds` times. In round
/// r the elements are those of `rows` plus r. Copies the rows of the last round to `received`,
/// which has room for `room` rows from each block of each rank, and their numbers to `counts`.
#[kernel]
fn exchange(
    s: &mut Session<impl Machine>,
    mut queue: Queue<u32>,
    ids: In<u32>,
    rows: In<u32>,
    places: InOut<u32>,
    received: Out<u32>,
    counts: Out<u32>,
    room: u32,
    rounds: u32,
    way: u32,
) -> Result<(), Aborted> {
    let (block, width) = (s.block(), queue.width());
    let (first, last) = block.slice(ids.len(), 1);
    let (count, blocks) = (last - first, block.count() as usize);
    let ids = ids.slice(first, count);
    let rows = rows.slice(first * width, count * width);
    let places = places.slice(first, count);
    for round in 0..rounds {
        let batch = queue.route(s, count, places, |item| s.peer(ids.get(item)))?;
        match way {
            0 => {
                let warp = block.warp();
                for item in block.elements_of_warp(count) {
                    if let Some(rank) = s.peer(ids.get(item)) {
                        let row = batch.row(s, rank, places.get(item) as usize);
                        row.write_with(s, warp, |index| rows.get(item * width + index) + round);
                    }
                }
            }
            1 => {
                for item in 0..count {
                    if let Some(rank) = s.peer(ids.get(item)) {
                        let row = batch.row(s, rank, places.get(item) as usize);
                        row.write_with(s, block, |index| rows.get(item * width + index) + round);
                    }
                }
            }
            _ => {
                for item in block.elements_of_block(count) {
                    if let Some(rank) = s.peer(ids.get(item)) {
                        let row = batch.row(s, rank, places.get(item) as usize);
                        for index in 0..width {
                            row.store(s, index, [rows.get(item * width + index) + round]);
                        }
                    }
                }
            }
        }
        batch.publish(s)?;
        let keep = |from: usize, index: usize, value: u32| {
            let row = (from * blocks + block.index() as usize) * room as usize;
            received.set(row * width + index, value);
        };
        if way == 1 {
            // One after the other; the rows are released as soon as they have been read.
            for from in s.peers(Team::World) {
                let arrived = queue.recv(s, from)?;
                for index in block.elements_of_block(arrived.len() * width) {
                    keep(from.index() as usize, index, arrived.elements().get(index));
                }
                if block.is_leader() {
                    let at = from.index() as usize * blocks + block.index() as usize;
                    counts.set(at, arrived.len() as u32);
                }
                queue.release(s, from);
            }
        } else {
            let arrived = queue.recv_all(s)?;
            for from in s.peers(Team::World) {
                let batch = arrived.of(from);
                for index in block.elements_of_block(batch.len()) {
                    let row = batch.row(index);
                    for element in 0..width {
                        keep(
                            from.index() as usize,
                            index * width + element,
                            row.get(element),
                        );
                    }
                }
                if block.is_leader() {
                    let at = from.index() as usize * blocks + block.index() as usize;
                    counts.set(at, batch.len() as u32);
                }
            }
            if way == 0 {
                queue.release_all(s);
            }
        }
    }
    Ok(())
}

/// Distributions of the items over ranks.
#[derive(Clone, Copy, Debug)]
enum Items {
    None,
    One,
    Even,
    Skewed,
    Masked,
    NotOnRank0,
}

/// The ranks of the items of `rank`. A number that is no rank masks an item.
fn ids(items: Items, rank: u32, ranks: u32, launch: u32) -> Vec<u32> {
    let count = 11 + 5 * launch;
    match items {
        Items::None => Vec::new(),
        Items::One => vec![(rank + launch) % ranks],
        Items::Even => (0..count).map(|item| (item * 7 + rank) % ranks).collect(),
        Items::Skewed => vec![ranks - 1; count as usize],
        Items::Masked => (0..count)
            .map(|item| {
                if item % 3 == 0 {
                    ranks + item
                } else {
                    item % ranks
                }
            })
            .collect(),
        Items::NotOnRank0 if rank == 0 => Vec::new(),
        Items::NotOnRank0 => (0..count).map(|item| item % ranks).collect(),
    }
}

fn element(rank: u32, launch: u32, item: usize, index: usize) -> u32 {
    (rank << 24) + (launch << 16) + ((item as u32) << 8) + ((index as u32) << 4)
}

/// Splits `count` items over blocks, as a kernel does.
fn parts(count: usize, blocks: usize) -> impl Iterator<Item = core::ops::Range<usize>> {
    (0..blocks).map(move |block| {
        let (first, last) = fusewire_device::group::slice(count, 1, block, blocks);
        first..last
    })
}

const ROOM: usize = 32;
const ROUNDS: u32 = 2;

fn exchanges(
    comm: &Communicator,
    queue: &HostQueue,
    (_, blocks, lanes): (u32, u32, u32),
    way: u32,
) -> Result<()> {
    let (me, ranks, blocks) = (comm.rank(), comm.size(), blocks as usize);
    let all = [
        Items::None,
        Items::One,
        Items::Even,
        Items::Skewed,
        Items::Masked,
        Items::NotOnRank0,
    ];
    for (index, items) in all.into_iter().enumerate() {
        for launch in 0..3 {
            // Many lanes are slow.
            if lanes > 1 && launch as usize != index % 3 {
                continue;
            }
            let own = ids(items, me, ranks, launch);
            let rows: Vec<u32> = (0..own.len())
                .flat_map(|item| (0..WIDTH).map(move |index| element(me, launch, item, index)))
                .collect();
            let (ids_of_items, rows) = (tensor(&own)?, tensor(&rows)?);
            let places = tensor(&vec![u32::MAX; own.len()])?;
            let received = zeros(DType::U32, ranks as usize * blocks * ROOM * WIDTH)?;
            let counts = zeros(DType::U32, ranks as usize * blocks)?;
            let arguments = Exchange {
                queue: queue.into(),
                ids: (&ids_of_items).into(),
                rows: (&rows).into(),
                places: (&places).into(),
                received: (&received).into(),
                counts: (&counts).into(),
                room: ROOM as u32,
                rounds: ROUNDS,
                way,
            };
            if launch == 1 {
                comm.stream().begin_capture()?;
                comm.kernel(arguments).enqueue()?;
                let graph = comm.stream().end_capture()?.instantiate()?;
                for _ in 0..2 {
                    graph.run(comm.stream())?;
                }
                comm.stream().synchronize()?;
            } else {
                comm.kernel(arguments).launch()?;
            }
            let received = received.to_vec::<u32>()?;
            let counts = counts.to_vec::<u32>()?;
            for from in 0..ranks {
                let sent = ids(items, from, ranks, launch);
                for (block, part) in parts(sent.len(), blocks).enumerate() {
                    let expected: Vec<u32> = part
                        .filter(|item| sent[*item] == me)
                        .flat_map(|item| {
                            (0..WIDTH).map(move |index| element(from, launch, item, index))
                        })
                        .map(|value| value + ROUNDS - 1)
                        .collect();
                    let at = from as usize * blocks + block;
                    let what = format!("way {way}, {items:?}, launch {launch}, {from} -> {me}");
                    assert_eq!(counts[at] as usize * WIDTH, expected.len(), "{what}");
                    let first = at * ROOM * WIDTH;
                    let found = &received[first..first + expected.len()];
                    assert_eq!(found, expected, "{what}");
                }
            }
            let places = places.to_vec::<u32>()?;
            for part in parts(own.len(), blocks) {
                for item in part.clone() {
                    let before = own[part.start..item].iter();
                    let expected = match own[item] < ranks {
                        true => before.filter(|id| **id == own[item]).count() as u32,
                        false => u32::MAX,
                    };
                    assert_eq!(places[item], expected, "{items:?}, item {item}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn rows_arrive_in_the_order_of_their_items() {
    for shape in SHAPES {
        on_both(shape, |comm| {
            let queue = comm.alloc_queue(DType::U32, WIDTH, ROOM)?;
            for way in 0..3 {
                exchanges(comm, &queue, shape, way)?;
            }
            queue.free()
        });
    }
}

/// Code of a failure.
const WRONG: u32 = 0;

/// Rank 0 sends `batches` batches to the last rank, of 0 to `queue.batch()` rows, without pause
/// until a ring is full. The receiver compares each element, and holds each batch until the next
/// one.
#[kernel(failures(WRONG = "batch {a} is wrong at {b}"))]
fn stream(
    s: &mut Session<impl Machine>,
    mut queue: Queue<u64>,
    batches: u32,
    launch: u64,
) -> Result<(), Aborted> {
    let (block, width) = (s.block(), queue.width());
    let Some(target) = s.peer(s.ranks() - 1) else {
        return Ok(());
    };
    let Some(source) = s.peer(0) else {
        return Ok(());
    };
    let most = queue.batch();
    let rows = |batch: u32| (batch as usize * 5 + launch as usize) % (most + 1);
    let first = |batch: u32| (launch << 40) + (u64::from(batch) << 20);
    if s.rank() == 0 {
        for batch in 0..batches {
            let open = queue.open(s, |rank| (rank == target).then(|| rows(batch)))?;
            let to = open.to(s, target);
            to.write_with(s, block, |index| first(batch) + index as u64);
            open.publish(s)?;
        }
    }
    if s.rank() == target.index() {
        for batch in 0..batches {
            let arrived = queue.recv(s, source)?;
            let is_right = arrived.len() == rows(batch);
            s.ensure(is_right, WRONG, u64::from(batch), u64::MAX)?;
            let mut wrong = u64::MAX;
            for index in block.elements_of_block(arrived.len() * width) {
                if arrived.elements().get(index) != first(batch) + index as u64 {
                    wrong = index as u64;
                }
            }
            s.ensure(wrong == u64::MAX, WRONG, u64::from(batch), wrong)?;
        }
    }
    Ok(())
}

#[test]
fn a_sender_runs_ahead_until_the_ring_is_full() {
    for shape in [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 1, 32), (2, 2, 64)] {
        on_both(shape, |comm| {
            let queue = comm.alloc_queue(DType::U64, 2, 5)?;
            assert_eq!((queue.batch(), queue.width()), (8, 2));
            // A rank that sends to itself must not run ahead of itself.
            let batches = if comm.size() == 1 { 2 } else { 50 };
            for launch in 0..3u64 {
                comm.kernel(Stream {
                    queue: (&queue).into(),
                    batches,
                    launch,
                })
                .launch()?;
            }
            Ok(())
        });
    }
}

/// Mistakes of [`errs`].
const TOO_MANY: u32 = 0;
const TOO_MANY_ITEMS: u32 = 1;
const FEW_PLACES: u32 = 2;
const ROW_TO_SEND: u32 = 3;
const ROW_TO_READ: u32 = 4;
const NO_ROWS: u32 = 5;
const NO_RECEIVER: u32 = 6;
const AFTER_A_FAULT: u32 = 7;
const RAISE: u32 = 8;
const FAULT_BEFORE_A_WAIT: u32 = 9;
const OTHER_RANK: u32 = 10;
const NONE: u32 = 11;

/// Makes the mistake `which` on rank 0; for [`NO_RECEIVER`], on rank 1. Otherwise, both ranks send
/// a row to each rank and wait for one.
#[kernel(failures(WRONG = "value {a}"))]
fn errs(
    s: &mut Session<impl Machine>,
    mut queue: Queue<u8>,
    places: InOut<u32>,
    which: u32,
) -> Result<(), Aborted> {
    let (block, me) = (s.block(), s.me());
    if which == NO_RECEIVER && s.rank() == 1 {
        return s.barrier();
    }
    let which = if s.rank() == 0 { which } else { NONE };
    if which == TOO_MANY_ITEMS || which == FEW_PLACES {
        let items = if which == FEW_PLACES { 3 } else { 5 };
        queue.route(s, items, places, |_| Some(me))?.publish(s)?;
    }
    if which == NO_RECEIVER {
        for _ in 0..5 {
            let batch = queue.open(s, |rank| (rank != me).then_some(4))?;
            batch.publish(s)?;
        }
    }
    if which == FAULT_BEFORE_A_WAIT {
        if block.rank() == block.size() - 1 {
            s.fault(WRONG, 4, 0);
        }
        queue.recv(s, me)?;
    }
    if which == OTHER_RANK {
        let third = THIRD.get().copied().unwrap_or(me);
        queue.recv(s, third)?;
    }
    let rows = if which == TOO_MANY { 5 } else { 1 };
    let batch = queue.open(s, |_| Some(rows))?;
    for peer in s.peers(Team::World) {
        let row = if which == ROW_TO_SEND { 1 } else { 0 };
        batch.row(s, peer, row).write_with(s, block, |_| 7);
    }
    if which == RAISE {
        batch.to(s, me).raise(s, 0);
    }
    if which == AFTER_A_FAULT && block.rank() == block.size() - 1 {
        s.fault(WRONG, 3, 0);
    }
    if which == NO_ROWS {
        return s.barrier();
    }
    batch.publish(s)?;
    for from in s.peers(Team::World) {
        let rows = queue.recv(s, from)?;
        let row = if which == ROW_TO_READ { 1 } else { 0 };
        let value = rows.row(row).get(0);
        s.ensure(value == 7, WRONG, u64::from(value), 0)?;
    }
    // Without it, rank 1 might succeed before rank 0 fails.
    s.barrier()
}

/// Sends rows of zeros, and drops the batch; then sends rows of `value` to the same places.
#[kernel(failures(WRONG = "element {a} is {b}"))]
fn drops_a_batch(
    s: &mut Session<impl Machine>,
    mut queue: Queue<u32>,
    value: u32,
) -> Result<(), Aborted> {
    let (block, rows) = (s.block(), queue.batch());
    for value in [0, value] {
        let batch = queue.open(s, |_| Some(rows))?;
        for peer in s.peers(Team::World) {
            let to = batch.to(s, peer);
            for index in block.elements_of_block(to.len()) {
                to.store(s, index, [value]);
            }
        }
        if value != 0 {
            batch.publish(s)?;
        }
    }
    let arrived = queue.recv_all(s)?;
    for from in s.peers(Team::World) {
        let rows = arrived.of(from).elements();
        for index in block.elements_of_block(rows.len()) {
            if rows.get(index) != value {
                s.fault(WRONG, index as u64, u64::from(rows.get(index)));
            }
        }
    }
    s.vote(Unvoted::new(()))
}

#[test]
fn a_batch_that_is_dropped_does_not_reach_the_next_one() {
    for shape in [(2, 1, 1), (2, 2, 32)] {
        on_both(shape, |comm| {
            let queue = comm.alloc_queue(DType::U32, 2, 4)?;
            for value in 1..40 {
                comm.kernel(DropsABatch {
                    queue: (&queue).into(),
                    value,
                })
                .launch()?;
            }
            Ok(())
        });
    }
}

/// Takes two queues.
#[kernel]
fn two_queues(
    s: &mut Session<impl Machine>,
    mut first: Queue<u8>,
    second: Queue<u8>,
) -> Result<(), Aborted> {
    let _ = second;
    first.open(s, |_| Some(1))?.publish(s)?;
    first.recv_all(s)?;
    Ok(())
}

#[test]
fn queues_of_a_launch_differ_and_are_equal_on_all_ranks() {
    all((2, 1, 1), |comm| {
        let queue = comm.alloc_queue(DType::U8, 3, 4)?;
        let twice = TwoQueues {
            first: (&queue).into(),
            second: (&queue).into(),
        };
        let text = comm
            .kernel(twice)
            .launch()
            .expect_err("one queue")
            .to_string();
        assert!(
            text.contains("argument second: the same queue as another"),
            "{text}"
        );
        Ok(())
    });
    let messages = failing(&options(1, 1), |comm| {
        let queues = [
            comm.alloc_queue(DType::U8, 3, 4)?,
            comm.alloc_queue(DType::U8, 3, 4)?,
        ];
        let (first, second) = (comm.rank() as usize, 1 - comm.rank() as usize);
        comm.kernel(TwoQueues {
            first: (&queues[first]).into(),
            second: (&queues[second]).into(),
        })
        .launch()
    });
    for message in messages {
        assert!(
            message.contains("other values of the agreed arguments"),
            "{message}"
        );
    }
}

#[test]
fn mistakes_with_queues_are_named() {
    let mistakes = [
        (
            TOO_MANY,
            "argument queue: 5 rows for one rank; a batch of this queue has at most 4",
        ),
        (TOO_MANY_ITEMS, "argument queue: 5 rows for one rank"),
        (FEW_PLACES, "argument places: element 2 of 2"),
        (ROW_TO_SEND, "argument queue: element 5 of 3"),
        (ROW_TO_READ, "argument queue: element 5 of 3"),
        (NO_ROWS, "waiting for rank 0, rows from its queue"),
        (NO_RECEIVER, "waiting for rank 1, room in the queue to it"),
        (AFTER_A_FAULT, "value 3"),
        (
            RAISE,
            "argument queue: number 0 of a signal, counter, barrier or cell, of which the ",
        ),
        (FAULT_BEFORE_A_WAIT, "value 4"),
        (OTHER_RANK, "argument queue: rank 2 of 2 ranks"),
    ];
    let run = |comm: &Communicator, which| {
        let queue = comm.alloc_queue(DType::U8, 3, 4)?;
        let places = zeros(DType::U32, if which == FEW_PLACES { 2 } else { 5 })?;
        // Only the rank that waits for the other one's mistake waits for so short a time.
        let seconds = match (which, comm.rank()) {
            (NO_ROWS, 1) | (NO_RECEIVER, 0) => 1,
            _ => 20,
        };
        comm.kernel(Errs {
            queue: (&queue).into(),
            places: (&places).into(),
            which,
        })
        .timeout(Duration::from_secs(seconds))
        .launch()
    };
    keep_rank();
    for lanes in [1, 32, 64] {
        for (which, text) in mistakes {
            for message in failing(&options(1, lanes), |comm| run(comm, which)) {
                assert!(message.contains(text), "{message:?} lacks {text:?}");
            }
        }
        all((2, 1, lanes), |comm| run(comm, NONE));
    }
}

#[test]
fn a_queue_is_checked_before_a_launch() {
    all((2, 1, 1), |comm| {
        for (width, batch) in [(0, 4), (4, 0), (usize::MAX, 4), (4, usize::MAX / 2)] {
            let error = comm.alloc_queue(DType::F32, width, batch);
            let text = error.expect_err("a bad size").to_string();
            assert!(
                text.contains("alloc_queue") && text.contains("batches of"),
                "{text}"
            );
        }
        let places = zeros(DType::U32, 5)?;
        let errs = |comm: &Communicator, queue: &HostQueue| {
            let arguments = Errs {
                queue: queue.into(),
                places: (&places).into(),
                which: NONE,
            };
            comm.kernel(arguments)
                .launch()
                .expect_err("an error")
                .to_string()
        };
        let floats = comm.alloc_queue(DType::F32, 3, 4)?;
        let text = errs(comm, &floats);
        assert!(
            text.contains("argument queue: elements of f32; the kernel takes u8"),
            "{text}"
        );
        let queue = comm.alloc_queue(DType::U8, 3, 4)?;
        assert_eq!(queue.bytes(), 2 * 16 * (3 + 8));
        let other = comm.dup()?;
        let text = errs(&other, &queue);
        assert!(text.contains("a window of another communicator"), "{text}");
        let kept = queue.clone();
        queue.free()?;
        let text = errs(comm, &kept);
        assert!(text.contains("freed"), "{text}");
        Ok(())
    });
    let different = run_threads(2, &options(1, 1), |comm| {
        comm.alloc_queue(DType::F32, 4 + comm.rank() as usize, 4)
            .map(drop)
    });
    for result in different {
        let text = result.expect_err("different widths").to_string();
        let both = ["of 4 rows of 4 f32", "of 4 rows of 5 f32"];
        assert!(both.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn a_replay_after_the_end_of_a_queue_is_an_error() {
    let messages = failing(&options(1, 32), |comm| {
        let queue = comm.alloc_queue(DType::U8, 3, 4)?;
        let places = zeros(DType::U32, 5)?;
        comm.stream().begin_capture()?;
        comm.kernel(Errs {
            queue: (&queue).into(),
            places: (&places).into(),
            which: NONE,
        })
        .enqueue()?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        graph.run(comm.stream())?;
        comm.stream().synchronize()?;
        queue.free()?;
        graph.run(comm.stream())?;
        comm.stream().synchronize()
    });
    for message in messages {
        assert!(message.contains("argument queue: rank"), "{message}");
        assert!(message.contains("has been freed"), "{message}");
    }
}
