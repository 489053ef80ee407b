//! Tests atomic updates of cells, on ranks that reach each other by load and store and on a
//! network. There, a proxy updates the cells of a rank by a load and a store, so that a native
//! update between the two would be lost.

use std::sync::{Mutex, PoisonError};

use fusewire::{
    Communicator, DType, Result, Tensor, Window as HostWindow, WindowOptions, run_threads,
};
use fusewire_device::{Aborted, Group, Machine, Out, Session, Team, Unvoted, Window, kernel};
use fusewire_tests::runner::of_networks;

use super::{
    LANES, SHAPES, THIRD, all, assert_contains, failing, fails, keep_rank, on_both, options, zeros,
};

/// Updates by each lane in a launch of [`Counts`].
const TIMES: u32 = 3;

/// Values that the ranks of a communicator have collected.
#[derive(Default)]
struct Collected(Mutex<Vec<u64>>);

impl Collected {
    /// Returns the values of all ranks in order on rank 0, and nothing on the others. All ranks
    /// together.
    fn gather(&self, comm: &Communicator, own: &Tensor) -> Result<Option<Vec<u64>>> {
        let own = own.to_vec::<u64>()?;
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lock().extend(own);
        comm.barrier()?;
        let all = (comm.rank() == 0).then(|| {
            let mut all = core::mem::take(&mut *lock());
            all.sort_unstable();
            all
        });
        comm.barrier()?;
        Ok(all)
    }
}

fn window(comm: &Communicator, cells: u32) -> Result<HostWindow> {
    let mut options = WindowOptions::default();
    options.cells = cells;
    comm.alloc_window(DType::U8, 1, options)
}

/// Returns the value of cell `id` of this rank.
fn value(comm: &Communicator, window: &HostWindow, id: u32) -> Result<u64> {
    let value = zeros(DType::U64, 1)?;
    comm.kernel(ReadsCell {
        window: window.into(),
        id,
        value: (&value).into(),
    })
    .launch()?;
    Ok(value.to_vec::<u64>()?[0])
}

/// Copies the value of a cell of this rank.
#[kernel]
fn reads_cell(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    id: u32,
    value: Out<u64>,
) -> Result<(), Aborted> {
    let mut read = Unvoted::new(());
    if s.block().index() == 0 && s.block().is_leader() {
        read = window.cell(s, id).map(|seen| value.set(0, seen));
    }
    s.vote(read)?;
    s.barrier()
}

/// Adds 1 to cell 1 of rank 0, [`TIMES`] times by each lane, and keeps the values before.
#[kernel]
fn counts(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    before: Out<u64>,
) -> Result<(), Aborted> {
    let block = s.block();
    let lane = block.index() * block.size() + block.rank();
    let mut counted = Unvoted::new(());
    if let Some(owner) = s.peer(0) {
        for time in 0..TIMES {
            let ticket = window.at(owner).fetch_add(s, 1, 1);
            if time == 1 {
                while !ticket.is_done(s) {
                    std::thread::yield_now();
                }
            }
            let index = (lane * TIMES + time) as usize;
            let kept = ticket.wait(s).map(|value| before.set(index, value));
            counted = counted.and(kept);
        }
    }
    s.vote(counted)?;
    s.barrier()
}

/// Launches [`Counts`] several times, also from a graph. `lanes` is the number of lanes of a rank.
fn check_counts(comm: &Communicator, lanes: u32, collected: &Collected) -> Result<()> {
    let window = window(comm, 2)?;
    let before = zeros(DType::U64, (lanes * TIMES) as usize)?;
    let arguments = Counts {
        window: (&window).into(),
        before: (&before).into(),
    };
    comm.stream().begin_capture()?;
    comm.kernel(arguments).enqueue()?;
    let graph = comm.stream().end_capture()?.instantiate()?;
    let updates = u64::from(comm.size() * lanes * TIMES);
    for launch in 0..4 {
        before.copy_from(&vec![u64::MAX; before.len()])?;
        if launch % 2 == 0 {
            comm.kernel(arguments).launch()?;
        } else {
            graph.run(comm.stream())?;
            comm.stream().synchronize()?;
        }
        if let Some(all) = collected.gather(comm, &before)? {
            let expected: Vec<u64> = (launch * updates..(launch + 1) * updates).collect();
            assert_eq!(all, expected, "launch {launch}");
        }
        let is_owner = u64::from(comm.rank() == 0);
        assert_eq!(value(comm, &window, 1)?, is_owner * (launch + 1) * updates);
        assert_eq!(value(comm, &window, 0)?, 0, "the other cell");
    }
    drop(graph);
    window.free()
}

#[test]
fn no_update_is_lost_and_each_returns_the_value_before() {
    for shape in SHAPES {
        let collected = Collected::default();
        on_both(shape, |comm| {
            check_counts(comm, shape.1 * shape.2, &collected)
        });
    }
}

#[test]
fn ranks_of_a_team_update_cells_by_the_owners_proxy() {
    let collected = Collected::default();
    for seed in 1..3 {
        for options in of_networks(&options(2, 1), 2, seed) {
            for result in run_threads(4, &options, |comm| check_counts(&comm, 2, &collected)) {
                result.expect("every rank succeeds");
            }
        }
    }
}

/// Claims cell 0 of every rank by replacing `launch` by the next number, and raises cell 1 of every
/// rank to a number of the lane, if that is larger. Keeps 1 for each cell that the lane claims.
#[kernel]
fn claims(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    claimed: Out<u64>,
    launch: u64,
) -> Result<(), Aborted> {
    let (block, ranks) = (s.block(), s.ranks());
    let lane = block.index() * block.size() + block.rank();
    let lanes = block.count() * block.size();
    let own = launch * 10_000 + u64::from(s.rank() * lanes + lane) + 1;
    let mut outcome = Unvoted::new(());
    for peer in s.peers(Team::World) {
        let cells = window.at(peer);
        let before = cells.compare_swap(s, 0, launch, launch + 1).wait(s);
        let index = (lane * ranks + peer.index()) as usize;
        let kept = before.map(|before| claimed.set(index, u64::from(before == launch)));
        outcome = outcome.and(kept);
        let mut seen = 0;
        while seen < own {
            let swapped = cells.compare_swap(s, 1, seen, own).wait(s);
            outcome = outcome.and(swapped.map(|_| ()));
            match swapped.ok() {
                Some(before) if before != seen => seen = before,
                _ => break,
            }
        }
    }
    s.vote(outcome)?;
    s.barrier()
}

#[test]
fn one_lane_of_all_ranks_claims_a_cell() {
    for shape in [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 1, 32)] {
        let collected = Collected::default();
        on_both(shape, |comm| {
            let (lanes, ranks) = (shape.1 * shape.2, comm.size());
            let window = window(comm, 2)?;
            let claimed = zeros(DType::U64, (lanes * ranks) as usize)?;
            for launch in 0..3u64 {
                comm.kernel(Claims {
                    window: (&window).into(),
                    claimed: (&claimed).into(),
                    launch,
                })
                .launch()?;
                if let Some(all) = collected.gather(comm, &claimed)? {
                    // One claim of the cell of each rank.
                    assert_eq!(all.iter().sum::<u64>(), u64::from(ranks));
                }
                assert_eq!(value(comm, &window, 0)?, launch + 1);
                let largest = launch * 10_000 + u64::from(ranks * lanes);
                assert_eq!(value(comm, &window, 1)?, largest);
            }
            window.free()
        });
    }
}

/// Adds 1 to cell 0 of the next rank, waits for the ticket, and raises a signal of that rank. The
/// rank that has waited for the signal reads its cell.
#[kernel(blocks = 1, signals = 1)]
fn adds_then_signals(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    times: u32,
    seen: Out<u64>,
) -> Result<(), Aborted> {
    let (block, ranks) = (s.block(), s.ranks());
    let before = s.rank().checked_sub(1).unwrap_or(ranks - 1);
    for time in 0..times {
        for next in s.peers(Team::World).take(1) {
            let mut added = Unvoted::new(0);
            if block.is_leader() {
                added = window.at(next).fetch_add(s, 0, 1).wait(s);
            }
            s.vote(added)?;
            window.at(next).raise(s, 0);
        }
        if let Some(before) = s.peer(before) {
            window.wait(s, 0, before)?;
        }
        let value = s.vote(window.cell(s, 0))?;
        if block.is_leader() {
            seen.set(time as usize, value);
        }
        s.barrier()?;
    }
    Ok(())
}

#[test]
fn a_signal_covers_the_updates_whose_tickets_were_waited_for() {
    for shape in [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 1, 32)] {
        on_both(shape, |comm| {
            let window = window(comm, 1)?;
            let seen = zeros(DType::U64, 10)?;
            for launch in 0..3u64 {
                comm.kernel(AddsThenSignals {
                    window: (&window).into(),
                    times: 10,
                    seen: (&seen).into(),
                })
                .launch()?;
                let expected: Vec<u64> = (launch * 10 + 1..launch * 10 + 11).collect();
                assert_eq!(seen.to_vec::<u64>()?, expected);
            }
            window.free()
        });
    }
}

/// Drops the tickets of four updates of this rank's cell.
#[kernel(blocks = 1)]
fn drops_tickets(s: &mut Session<impl Machine>, window: Window<u8>) -> Result<(), Aborted> {
    if s.block().is_leader() {
        let own = window.at(s.me());
        for value in 1..5 {
            let _ = own.fetch_add(s, 0, value);
        }
    }
    s.barrier()
}

#[test]
fn an_update_whose_ticket_is_dropped_is_made() {
    for shape in [(2, 1, 1), (2, 1, 32)] {
        on_both(shape, |comm| {
            let window = window(comm, 1)?;
            for launch in 1..4 {
                comm.kernel(DropsTickets {
                    window: (&window).into(),
                })
                .launch()?;
                assert_eq!(value(comm, &window, 0)?, launch * 10);
            }
            window.free()
        });
    }
}

/// A mistake: issues two updates and waits for the first ticket after the second update, before or
/// after the second ticket.
#[kernel(blocks = 1)]
fn keeps_a_ticket(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    second_first: u32,
) -> Result<(), Aborted> {
    let mut waited = Unvoted::new(0);
    if s.block().is_leader() {
        let own = window.at(s.me());
        let (first, second) = (own.fetch_add(s, 0, 1), own.compare_swap(s, 0, 1, 7));
        let (first, second) = match second_first {
            0 => (first.wait(s), second.wait(s)),
            _ => {
                let second = second.wait(s);
                (first.wait(s), second)
            }
        };
        waited = first.and(second);
    }
    s.vote(waited)?;
    s.barrier()
}

#[test]
fn a_lane_waits_for_each_ticket_before_the_next_on_a_network() {
    for second_first in [0, 1] {
        let run = |comm: &Communicator| -> Result<()> {
            let window = window(comm, 1)?;
            comm.kernel(KeepsATicket {
                window: (&window).into(),
                second_first,
            })
            .launch()?;
            assert_eq!(value(comm, &window, 0)?, 7);
            Ok(())
        };
        for lanes in LANES {
            // By load and store, the tickets have their values at once.
            all((2, 1, lanes), run);
            let mut options = options(1, lanes);
            options.testing.network = Some(fusewire::testing::TestNetwork { team: 1, seed: 1 });
            for message in failing(&options, run) {
                let texts = [
                    "in kernel keeps_a_ticket #",
                    "argument window: a lane waited for a ticket after it had issued another \
                     fetch_add or compare_swap",
                ];
                assert_contains(&message, &texts);
            }
        }
    }
}

/// Makes a mistake with a cell.
#[kernel(blocks = 1, failures(EXPECTED = "recorded before"))]
fn misuses_cells(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    mistake: u32,
) -> Result<(), Aborted> {
    let own = window.at(s.me());
    let third = THIRD.get().copied().unwrap_or(s.me());
    let outcome = match mistake {
        0 => own.fetch_add(s, 2, 1).wait(s),
        1 => own.compare_swap(s, u32::MAX, 0, 1).wait(s),
        2 => window.cell(s, 2),
        3 => window.at(third).fetch_add(s, 0, 1).wait(s),
        _ => {
            s.fault(EXPECTED, 0, 0);
            let ticket = own.fetch_add(s, 0, 1);
            assert!(ticket.is_done(s));
            ticket.wait(s)
        }
    };
    // After an error there is no value.
    assert!(outcome.is_failed());
    s.vote(outcome)?;
    s.barrier()
}

/// Failure code of [`MisusesCells`].
const EXPECTED: u32 = 1;

#[test]
fn a_cell_or_rank_that_does_not_exist_is_named() {
    keep_rank();
    let run = |comm: &Communicator, cells, mistake| {
        let window = window(comm, cells)?;
        comm.kernel(MisusesCells {
            window: (&window).into(),
            mistake,
        })
        .launch()
    };
    let id = |id: u32, cells: u32| {
        format!(
            "argument window: number {id} of a signal, counter, barrier or cell, of which the \
             window has {cells}"
        )
    };
    for (cells, mistake, text) in [
        (2, 0, id(2, 2)),
        (2, 1, id(u32::MAX, 2)),
        (2, 2, id(2, 2)),
        (0, 0, id(2, 0)),
        (0, 2, id(2, 0)),
        (2, 3, "argument window: rank 2 cannot be reached".to_owned()),
        (2, 4, "recorded before".to_owned()),
    ] {
        fails(&text, |comm| run(comm, cells, mistake));
        let mut options = options(1, 1);
        options.testing.network = Some(fusewire::testing::TestNetwork { team: 1, seed: 1 });
        for message in failing(&options, |comm| run(comm, cells, mistake)) {
            assert_contains(&message, &["in kernel misuses_cells #", &text]);
        }
    }
}

/// Adds a number just below 2^64, which differs between the ranks, to cell 0 of every rank.
#[kernel]
fn adds_large_values(s: &mut Session<impl Machine>, window: Window<u8>) -> Result<(), Aborted> {
    let mut added = Unvoted::new(0);
    for peer in s.peers(Team::World) {
        let value = u64::MAX - u64::from(s.rank());
        added = added.and(window.at(peer).fetch_add(s, 0, value).wait(s));
    }
    s.vote(added)?;
    s.barrier()
}

#[test]
fn sums_wrap() {
    for shape in [(3, 2, 1), (2, 1, 32)] {
        on_both(shape, |comm| {
            let window = window(comm, 1)?;
            comm.kernel(AddsLargeValues {
                window: (&window).into(),
            })
            .launch()?;
            let of_a_lane: u64 = (0..comm.size()).map(|rank| 1 + u64::from(rank)).sum();
            let sum = (of_a_lane * u64::from(shape.1 * shape.2)).wrapping_neg();
            assert_eq!(value(comm, &window, 0)?, sum);
            window.free()
        });
    }
}
