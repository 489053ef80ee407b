//! Queues: batches of rows between blocks, on ranks that reach each other by load and store and on
//! a network that delays and reorders.

use fusewire::{Communicator, DType, Queue as HostQueue, Result, run_threads};
use fusewire_device::{Aborted, Group, In, InOut, Machine, Out, Queue, Session, Team, kernel};

use super::{SHAPES, all, failing, on_both, options, tensor, zeros};

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
                let warps = (block.size() / warp.size()) as usize;
                let mut item = (block.rank() / warp.size()) as usize;
                while item < count {
                    if let Some(row) = batch.row(s, item) {
                        row.write_with(s, warp, |index| rows.get(item * width + index) + round);
                    }
                    item += warps;
                }
            }
            1 => {
                for item in 0..count {
                    if let Some(row) = batch.row(s, item) {
                        row.write_with(s, block, |index| rows.get(item * width + index) + round);
                    }
                }
            }
            _ => {
                for item in block.elements_of_block(count) {
                    if let Some(row) = batch.row(s, item) {
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
                arrived.release(s);
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
                arrived.release(s);
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
const ROUNDS: u32 = 3;

fn exchanges(comm: &Communicator, queue: &HostQueue, blocks: usize, way: u32) -> Result<()> {
    let (me, ranks) = (comm.rank(), comm.size());
    let all = [
        Items::None,
        Items::One,
        Items::Even,
        Items::Skewed,
        Items::Masked,
        Items::NotOnRank0,
    ];
    for items in all {
        for launch in 0..3 {
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
                exchanges(comm, &queue, shape.1 as usize, way)?;
            }
            queue.free()
        });
    }
}

/// Code of a failure.
const WRONG: u32 = 0;

/// Rank 0 sends `batches` batches to the last rank, of 0 to `queue.batch()` rows, as fast as there
/// is room. The receiver compares each element. It holds each batch until the next one.
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
