//! The remote face of windows, on ranks that reach each other by load and store and on a network
//! that delays and reorders: the same kernels must give the same results.

use fusewire::{
    Communicator, Compare as HostCompare, DType, Result, SignalUpdate, WindowAccess, WindowOptions,
};
use fusewire_device::channel;
use fusewire_device::net::SignalOp;
use fusewire_device::window::Compare;
use fusewire_device::{
    Aborted, Group, In, Machine, Out, Session, Team, Thread, Unvoted, Window, kernel,
};
use fusewire_tests::runner::of_networks;

use super::{
    SHAPES, SHORT, all, assert_contains, await_failure, failing, failing_on, is_short, on_both,
    on_networks, options, tensor, zeros,
};

/// Ways to send a row.
const WAYS: u32 = 8;

/// Sends `row` to row `rank` of every rank's window, in the way that `way` says, and copies all
/// rows that have come to `received`. Then reads its own row back from every rank.
#[kernel(signals = 1)]
fn rows(
    s: &mut Session<impl Machine>,
    window: Window<u32>,
    row: In<u32>,
    received: Out<u32>,
    back: Out<u32>,
    way: u32,
) -> Result<(), Aborted> {
    let (block, ranks, count) = (s.block(), s.ranks() as usize, row.len());
    let (first, last) = block.slice(count, 1);
    let part = row.slice(first, last - first);
    let at = s.rank() as usize * count + first;
    // A row of its own is the source of puts and the target of gets.
    let source = window.local(s)?.slice(ranks * count + first, part.len());
    for index in block.elements_of_block(part.len()) {
        source.elements().set(index, part.get(index));
    }
    block.sync();
    for peer in s.peers(Team::World) {
        let target = window.at(peer).slice(at, part.len());
        match way {
            0 => target.put(s, block, source).raise(s, 0),
            1 => target.write(s, block, part).raise(s, 0),
            2 => {
                let put = target.write_with(s, block, |index| part.get(index));
                put.raise(s, 0);
            }
            3 => {
                let warp = block.warp();
                // Each warp of a block has a part of the row. Here a block has one or two.
                let (mine, warps) = (block.warp_index(), block.warps());
                let (first, last) =
                    fusewire_device::group::slice(part.len(), 1, mine as usize, warps as usize);
                let target = target.slice(first, last - first);
                target.write_with(s, warp, |index| part.get(first + index));
            }
            4 => {
                for index in block.elements_of_block(part.len()) {
                    target
                        .slice(index, 1)
                        .write(s, Thread, part.slice(index, 1));
                }
            }
            5 => {
                for index in block.elements_of_block(part.len()) {
                    target.store(s, index, [part.get(index)]);
                }
            }
            6 => {
                // Sixteen bytes each, and the rest one by one.
                for group in block.elements_of_block(part.len() / 4) {
                    let value = [0, 1, 2, 3].map(|index| part.get(4 * group + index));
                    target.store(s, 4 * group, value);
                }
                let whole = part.len() / 4 * 4;
                for index in block.elements_of_block(part.len() - whole) {
                    target.store(s, whole + index, [part.get(whole + index)]);
                }
            }
            _ => {}
        }
        if (3..7).contains(&way) {
            window.at(peer).raise(s, 0);
        }
    }
    if way == 7 {
        for index in 0..part.len() {
            window.store_each(s, at + index, part.get(index), Team::World);
        }
        window.raise_all(s, 0, Team::World);
    }
    let rows = window.wait_all(s, 0, Team::World)?;
    for row in 0..ranks {
        let row = row * count + first;
        for index in block.elements_of_block(part.len()) {
            received.set(row + index, rows.get(row + index));
        }
    }
    // Every rank has this rank's row: a get does not wait for puts.
    s.barrier()?;
    for peer in s.peers(Team::World) {
        let mine = window.at(peer).slice(at, part.len());
        let to = peer.index() as usize * count + first;
        if way.is_multiple_of(2) {
            mine.read(s, back.slice(to, part.len()))?;
        } else {
            let ticket = mine.get(s, source);
            let elements = ticket.wait(s)?;
            for index in block.elements_of_block(part.len()) {
                back.set(to + index, elements.get(index));
            }
            block.sync();
        }
    }
    // The next launch overwrites the rows.
    s.barrier()
}

#[test]
fn every_way_to_send_gives_the_same_rows_also_under_replay() {
    for shape in SHAPES {
        on_both(shape, |comm| {
            let ranks = comm.size() as usize;
            let counts: &[usize] = match is_short(shape.2) {
                true => &[0, 7],
                false => &[0, 1, 7, 100],
            };
            for &count in counts {
                let options = WindowOptions::default();
                let window = comm.alloc_window(DType::U32, (ranks + 1) * count, options)?;
                let row = zeros(DType::U32, count)?;
                let received = zeros(DType::U32, ranks * count)?;
                let back = zeros(DType::U32, ranks * count)?;
                for way in 0..WAYS {
                    let arguments = Rows {
                        window: (&window).into(),
                        row: (&row).into(),
                        received: (&received).into(),
                        back: (&back).into(),
                        way,
                    };
                    comm.stream().begin_capture()?;
                    comm.kernel(arguments).enqueue()?;
                    let graph = comm.stream().end_capture()?.instantiate()?;
                    for launch in 0..3u32 {
                        let value = |rank: usize, index: usize| {
                            (way << 24) + (launch << 16) + ((rank as u32) << 8) + index as u32
                        };
                        let me = comm.rank() as usize;
                        let own: Vec<u32> = (0..count).map(|index| value(me, index)).collect();
                        row.copy_from(&own)?;
                        received.copy_from(&vec![u32::MAX; ranks * count])?;
                        back.copy_from(&vec![u32::MAX; ranks * count])?;
                        if launch == 1 {
                            graph.run(comm.stream())?;
                            comm.stream().synchronize()?;
                        } else {
                            comm.kernel(arguments).launch()?;
                        }
                        let all: Vec<u32> = (0..ranks)
                            .flat_map(|rank| (0..count).map(move |index| value(rank, index)))
                            .collect();
                        assert_eq!(received.to_vec::<u32>()?, all, "way {way}");
                        assert_eq!(back.to_vec::<u32>()?, own.repeat(ranks), "way {way}");
                    }
                }
                window.free()?;
            }
            Ok(())
        });
    }
}

/// Every block adds its number plus 5 to signal 0 of every rank, `times` times. Block 0 of each
/// rank waits for the sum, then sets signal 1 to it.
#[kernel(signals = 2)]
fn adders(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    times: u64,
    launch: u64,
    sum: Out<u64>,
) -> Result<(), Aborted> {
    let (block, blocks) = (s.block(), u64::from(s.block().count()));
    for _ in 0..times {
        let value = SignalOp::Add(u64::from(block.index()) + 5);
        window.signal_all(s, 0, value, Team::World);
    }
    if block.index() == 0 {
        let of_a_rank = launch * times * (5 * blocks + blocks * (blocks - 1) / 2);
        for from in s.peers(Team::World) {
            window.wait_value(s, 0, Some(from), Compare::Equal, of_a_rank)?;
        }
        let all = of_a_rank * u64::from(s.ranks());
        window.wait_value(s, 0, None, Compare::GreaterEqual, all)?;
        window.signal_all(s, 1, SignalOp::Set(all), Team::World);
        for from in s.peers(Team::World) {
            window.wait_value(s, 1, Some(from), Compare::Equal, all)?;
        }
        if block.is_leader() {
            sum.set(0, all);
        }
    }
    s.barrier()
}

#[test]
fn blocks_that_add_at_the_same_time_lose_nothing() {
    for shape in [(2, 1, 1), (2, 2, 1), (3, 3, 1), (2, 2, 32)] {
        on_both(shape, |comm| {
            let (ranks, blocks) = (u64::from(comm.size()), u64::from(shape.1));
            let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
            let sum = zeros(DType::U64, 1)?;
            for launch in 1..4u64 {
                comm.kernel(Adders {
                    window: (&window).into(),
                    times: 7,
                    launch,
                    sum: (&sum).into(),
                })
                .launch()?;
                let all = ranks * launch * 7 * (5 * blocks + blocks * (blocks - 1) / 2);
                assert_eq!(sum.to_vec::<u64>()?, [all]);
                assert_eq!(window.read_signal(0, None)?, all);
                assert_eq!(window.read_signal(1, Some(0))?, all);
                comm.barrier()?;
            }
            // Another block sets what block 0 has set: the sum is still the value.
            comm.kernel(SetsLast {
                window: (&window).into(),
                value: 40,
            })
            .launch()?;
            assert_eq!(window.read_signal(1, None)?, 40 * ranks);
            comm.barrier()?;
            window.reset_signal(1)?;
            window.reset_signal(0)?;
            comm.barrier()?;
            let next = (comm.rank() + 1) % comm.size();
            window.signal(next, 1, SignalUpdate::Add(3))?;
            window.wait_signal(1, None, HostCompare::Equal, 3)?;
            comm.barrier()?;
            window.free()
        });
    }
}

/// The last block sets signal 1 of every rank.
#[kernel(signals = 2)]
fn sets_last(s: &mut Session<impl Machine>, window: Window<u8>, value: u64) -> Result<(), Aborted> {
    if s.block().index() == s.block().count() - 1 {
        window.signal_all(s, 1, SignalOp::Set(value), Team::World);
        for from in s.peers(Team::World) {
            window.wait_value(s, 1, Some(from), Compare::Equal, value)?;
        }
    }
    s.barrier()
}

/// Sends `count` elements to the next rank, each with a signal of its own, more than the network's
/// ring holds, and checks after each wait that its element is there.
#[kernel(blocks = 1, signals = 1, failures(STALE = "element {a} is {b}"))]
fn pipeline(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    count: u64,
    round: u64,
) -> Result<(), Aborted> {
    let count = count as usize;
    let source = window.local(s)?.slice(count, count);
    for index in s.block().elements_of_block(count) {
        source.elements().set(index, round + index as u64);
    }
    s.block().sync();
    for next in s.peers(Team::World).take(1) {
        for index in 0..count {
            let target = window.at(next).slice(index, 1);
            target.put(s, s.block(), source.slice(index, 1)).raise(s, 0);
        }
    }
    let before = s.rank().checked_sub(1).unwrap_or(s.ranks() - 1);
    if let Some(before) = s.peer(before) {
        for index in 0..count {
            let received = window.wait(s, 0, before)?;
            let seen = received.get(index);
            s.ensure(seen == round + index as u64, STALE, index as u64, seen)?;
        }
    }
    s.barrier()
}

/// Failure code of [`pipeline`] and [`trusts_order`].
const STALE: u32 = 1;

#[test]
fn each_signal_covers_its_put() {
    for shape in [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 32)] {
        on_both(shape, |comm| {
            let count = 40u64;
            let window = comm.alloc_window(DType::U64, 80, WindowOptions::default())?;
            for round in 1..5u64 {
                comm.kernel(Pipeline {
                    window: (&window).into(),
                    count,
                    round: round * 1000,
                })
                .launch()?;
            }
            window.free()
        });
    }
}

/// Writes a row to the next rank and at once reads what that rank has stored: on a network both
/// pass through the same staging memory. Waits for the row.
#[kernel(blocks = 1, signals = 1)]
fn write_then_read(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    row: In<u64>,
    received: Out<u64>,
    read: Out<u64>,
) -> Result<(), Aborted> {
    let (block, count) = (s.block(), row.len());
    let own = window.local(s)?.slice(count, count);
    for index in block.elements_of_block(count) {
        own.elements().set(index, !row.get(index));
    }
    s.barrier()?;
    for next in s.peers(Team::World).take(1) {
        let target = window.at(next).slice(0, count);
        target.write(s, block, row).raise(s, 0);
        window.at(next).slice(count, count).read(s, read)?;
    }
    let before = s.rank().checked_sub(1).unwrap_or(s.ranks() - 1);
    if let Some(before) = s.peer(before) {
        let row = window.wait(s, 0, before)?;
        for index in block.elements_of_block(count) {
            received.set(index, row.get(index));
        }
    }
    s.barrier()
}

#[test]
fn a_read_does_not_disturb_a_write_before_it() {
    for shape in [(2, 1, 1), (3, 1, 32)] {
        on_both(shape, |comm| {
            let window = comm.alloc_window(DType::U64, 80, WindowOptions::default())?;
            let (received, read) = (zeros(DType::U64, 40)?, zeros(DType::U64, 40)?);
            for launch in 0..10u64 {
                let value = |rank: u32| -> Vec<u64> {
                    let start = launch * 1000 + u64::from(rank) * 100;
                    (start..start + 40).collect()
                };
                comm.kernel(WriteThenRead {
                    window: (&window).into(),
                    row: (&tensor(&value(comm.rank()))?).into(),
                    received: (&received).into(),
                    read: (&read).into(),
                })
                .launch()?;
                let next = (comm.rank() + 1) % comm.size();
                let before = (comm.rank() + comm.size() - 1) % comm.size();
                assert_eq!(received.to_vec::<u64>()?, value(before));
                let theirs: Vec<u64> = value(next).iter().map(|value| !value).collect();
                assert_eq!(read.to_vec::<u64>()?, theirs);
            }
            window.free()
        });
    }
}

/// Rank 0 writes a row that does not fit, and raises a signal; rank 1 waits for it.
#[kernel(blocks = 1, signals = 1)]
fn writes_too_much(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    row: In<u64>,
    received: Out<u64>,
) -> Result<(), Aborted> {
    if s.rank() == 0 {
        for next in s.peers(Team::World).take(1) {
            window.at(next).write(s, s.block(), row).raise(s, 0);
        }
    } else if let Some(first) = s.peer(0) {
        let row = window.wait(s, 0, first)?;
        received.set(0, row.get(0));
    }
    s.barrier()
}

#[test]
fn a_write_that_fails_raises_no_signal() {
    let run = |comm: &Communicator| -> Result<()> {
        let window = comm.alloc_window(DType::U64, 3, WindowOptions::default())?;
        let received = tensor(&[77u64])?;
        let error = comm
            .kernel(WritesTooMuch {
                window: (&window).into(),
                row: (&tensor(&[1u64; 4])?).into(),
                received: (&received).into(),
            })
            .launch()
            .expect_err("the row does not fit")
            .to_string();
        let call = "rank 0 in kernel writes_too_much #";
        assert_contains(&error, &[call, ": argument window: element 3 of 3"]);
        assert_eq!(received.to_vec::<u64>()?, [77]);
        Ok(())
    };
    for shape in [(2, 1, 1), (2, 1, 32)] {
        on_both(shape, run);
    }
}

/// A mistake: polls an element instead of waiting for a signal, and trusts that the elements which
/// were written before are there, too.
#[kernel(blocks = 1, failures(STALE = "element {a} is {b}"))]
fn trusts_order(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    round: u64,
) -> Result<(), Aborted> {
    let count = window.len() - 1;
    for next in s.peers(Team::World).take(1) {
        for index in 0..count {
            window.at(next).store(s, index, [round]);
        }
        window.at(next).store(s, count, [round]);
    }
    let own = window.local(s)?.elements();
    let start = std::time::Instant::now();
    // Ends if the other rank has failed.
    while own.get(count) != round && !s.ctx().aborted() && start.elapsed().as_secs() < 15 {
        std::thread::yield_now();
    }
    let mut outcome = Ok(());
    for index in 0..count {
        let seen = own.get(index);
        outcome = outcome.and(s.ensure(seen == round, STALE, index as u64, seen));
    }
    s.vote(Unvoted::new(()))?;
    outcome?;
    s.barrier()
}

#[test]
fn the_network_finds_a_kernel_that_trusts_the_order_of_stores() {
    let run = |comm: &Communicator| -> Result<()> {
        let window = comm.alloc_window(DType::U64, 9, WindowOptions::default())?;
        for round in 1..30 {
            comm.kernel(TrustsOrder {
                window: (&window).into(),
                round,
            })
            .launch()?;
        }
        Ok(())
    };
    // By load and store, on this CPU, nothing goes wrong.
    #[cfg(target_arch = "x86_64")]
    all((2, 1, 1), run);
    let mut options = super::options(1, 1);
    options.testing.network = Some(fusewire::testing::TestNetwork { team: 1, seed: 1 });
    let results = fusewire::run_threads(2, &options, |comm| run(&comm));
    let errors: Vec<String> = results
        .into_iter()
        .filter_map(|result| Some(result.err()?.to_string()))
        .collect();
    assert!(!errors.is_empty(), "the network has kept the order");
    for error in errors {
        assert!(error.contains("in kernel trusts_order #"), "{error}");
        assert!(error.contains(": element "), "{error}");
    }
}

/// Takes the next rank's part for loads and stores.
#[kernel]
fn takes_direct(s: &mut Session<impl Machine>, window: Window<u8>) -> Result<(), Aborted> {
    for next in s.peers(Team::World).take(1) {
        window.at(next).direct(s)?;
    }
    s.barrier()
}

#[test]
fn loads_and_stores_of_a_peer_need_more_than_a_network() {
    let run = |comm: &Communicator| -> Result<()> {
        let window = comm.alloc_window(DType::U8, 4, WindowOptions::default())?;
        comm.kernel(TakesDirect {
            window: (&window).into(),
        })
        .launch()
    };
    for lanes in [1, 32] {
        all((2, 1, lanes), run);
        for options in of_networks(&options(1, lanes), 1, 1) {
            for message in failing(&options, run) {
                let texts = [
                    "in kernel takes_direct #",
                    ": argument window: rank ",
                    " cannot be reached: by load and store, which `direct` needs",
                ];
                assert_contains(&message, &texts);
            }
        }
    }
}

#[test]
fn attributes_tell_how_a_part_is_reached() {
    let check = |comm: &Communicator, expected| {
        let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
        let next = (comm.rank() + 1) % comm.size();
        assert_eq!(window.attributes(comm.rank())?, WindowAccess::Unified);
        assert_eq!(window.attributes(next)?, expected);
        window.free()
    };
    all((2, 1, 1), |comm| check(comm, WindowAccess::Unified));
    on_networks((2, 1, 1), |comm| check(comm, WindowAccess::Separate));
}

#[test]
fn windows_of_the_host_on_a_network() {
    on_both((3, 1, 1), |comm| {
        let next = (comm.rank() + 1) % comm.size();
        let before = (comm.rank() + comm.size() - 1) % comm.size();
        let window = comm.alloc_window(DType::U32, 1000, WindowOptions::default())?;
        for round in 1..6u64 {
            let value = |rank: u32| vec![rank * 100 + round as u32; 900];
            window.put_signal(&tensor(&value(comm.rank()))?, next, 50, 0)?;
            window.wait_signal(0, Some(before), HostCompare::Equal, round)?;
            let got = zeros(DType::U32, 900)?;
            window.get(&got, comm.rank(), 50)?;
            assert_eq!(got.to_vec::<u32>()?, value(before));
            window.get(&got, next, 50)?;
            assert_eq!(got.to_vec::<u32>()?, value(comm.rank()));
            comm.barrier()?;
        }
        // Collectives do not use windows that not all ranks reach.
        let x = comm.alloc(DType::F32, 1000)?;
        x.copy_from(&[1.0f32; 1000])?;
        comm.all_reduce(&x, fusewire::ReduceOp::Sum)?;
        assert_eq!(x.to_vec::<f32>()?, [3.0; 1000]);
        window.free()
    });
}

/// Sends `source` to the next rank by a channel, and receives from the rank before.
#[kernel]
fn by_channel(
    s: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
) -> Result<(), Aborted> {
    let (rank, ranks) = (s.rank(), s.ranks());
    let next = s.peer((rank + 1) % ranks);
    let before = s.peer((rank + ranks - 1) % ranks);
    let (Some(next), Some(before)) = (next, before) else {
        return Ok(());
    };
    // The message fits the channel, so every rank may send first. SAFETY: nothing else accesses the
    // memory during the launch.
    unsafe {
        channel::send(s, next, source)?;
        channel::receive(s, before, target)
    }
}

#[test]
fn channels_of_a_kernel_also_work_on_a_network() {
    let run = |comm: &Communicator| -> Result<()> {
        for (round, bytes) in [0, 1, 17, 900].into_iter().enumerate() {
            let value = |rank: u32| vec![(10 * round as u32 + rank) as u8; bytes];
            let before = (comm.rank() + comm.size() - 1) % comm.size();
            let source = tensor(&value(comm.rank()))?;
            let target = zeros(DType::U8, bytes)?;
            comm.kernel(ByChannel {
                source: (&source).into(),
                target: (&target).into(),
            })
            .launch()?;
            assert_eq!(target.to_vec::<u8>()?, value(before));
        }
        Ok(())
    };
    for lanes in [1, 32] {
        on_both((2, 1, lanes), run);
        on_both((4, 1, lanes), run);
    }
}

/// A message of many slots waits for credits, and a message of another size is a mismatch.
#[test]
fn sends_and_receives_on_a_network() {
    on_networks((2, 2, 1), |comm| {
        let peer = 1 - comm.rank();
        let values: Vec<u32> = (0..50_000).map(|i| i * 3 + comm.rank()).collect();
        for _ in 0..3 {
            let target = zeros(DType::U32, values.len())?;
            match comm.rank() {
                0 => {
                    comm.send(&tensor(&values)?, peer)?;
                    comm.recv(&target, peer)?;
                }
                _ => {
                    comm.recv(&target, peer)?;
                    comm.send(&tensor(&values)?, peer)?;
                }
            }
            let expected = (0..50_000).map(|i| i * 3 + peer);
            assert!(target.to_vec::<u32>()?.into_iter().eq(expected));
        }
        Ok(())
    });
    for options in of_networks(&options(1, 1), 1, 7) {
        for message in failing(&options, |comm| match comm.rank() {
            0 => {
                comm.send(&tensor(&[1u8; 4])?, 1)?;
                await_failure(comm)
            }
            _ => comm.recv(&zeros(DType::U8, 5)?, 0),
        }) {
            assert_contains(&message, &["recv", "4", "5"]);
        }
    }
}

/// Fails on rank 0, while the others wait for it.
#[kernel]
fn fails_on_rank_0(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    s.ensure(s.rank() != 0, 3, 40, 50)?;
    s.barrier()
}

#[test]
fn a_failure_reaches_the_ranks_of_all_teams() {
    for team in [1, 2, 4] {
        for options in of_networks(&options(1, 1), team, 5) {
            for message in failing_on(4, &options, |comm| {
                comm.barrier()?;
                comm.kernel(FailsOnRank0 {}).launch()
            }) {
                let text =
                    "rank 0 in kernel fails_on_rank_0 #2: the kernel recorded failure 3 (40, 50)";
                assert_contains(&message, &[text]);
            }
        }
    }
}

#[test]
fn a_late_rank_of_another_team_is_named_with_its_last_call() {
    for options in of_networks(&options(1, 1), 2, 5) {
        for message in failing_on(4, &options, |comm| {
            comm.barrier()?;
            if comm.rank() == 3 {
                return await_failure(comm);
            }
            let launch = comm.kernel(Enters {});
            match comm.rank() {
                0 => launch.timeout(SHORT).launch(),
                _ => launch.launch(),
            }
        }) {
            let text = "rank 3 never entered kernel enters #2 (its last was barrier #1";
            assert_contains(&message, &[text]);
        }
    }
}

/// Enters a barrier.
#[kernel]
fn enters(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    s.barrier()
}

#[test]
fn different_calls_of_teams_are_a_mismatch() {
    for options in of_networks(&options(1, 1), 2, 5) {
        for message in failing_on(4, &options, |comm| {
            if comm.rank() < 2 {
                return comm.barrier();
            }
            comm.kernel(Enters {}).launch()
        }) {
            assert_contains(&message, &["barrier #1", "kernel enters"]);
        }
    }
}
