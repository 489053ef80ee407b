//! Tests of multi-rank grids with a fake driver that runs grid forms natively.

mod fake;

use core::mem::size_of;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::thread;

use fusewire_device::mem::{Order, Scope, fetch_add_u32, load_u32};
use fusewire_device::{Block, Group, Machine, arch, kernel};

use super::super::driver::{LaunchShape, RawModule, RawStream};
use super::{MultiRankGrid, MultiRankGridOptions, SLOT_BYTES};
use crate::{Error, Result};
use fake::{Call, Fake};

/// Increments `counter` once per block and waits up to two seconds until `all` blocks have arrived.
/// Then each block writes the number of blocks of its rank and `mark + bias` to its element of
/// `own`. If a block is missing, the elements stay 0.
#[kernel]
unsafe fn grid_barrier(
    block: Block<impl Machine>,
    mark: u8,
    counter: *mut u32,
    all: u32,
    own: *mut u64,
    bias: u16,
) {
    if block.is_leader() {
        // SAFETY: `counter` outlives the grid, and all blocks access it atomically.
        unsafe { fetch_add_u32(counter, 1, Order::AcqRel, Scope::System) };
    }
    let start = arch::clock_ns();
    // SAFETY: `counter` outlives the grid, and all blocks access it atomically.
    while unsafe { load_u32(counter, Order::Acquire, Scope::System) } < all {
        if arch::clock_ns() - start > 2_000_000_000 {
            return;
        }
        arch::nap(0);
    }
    block.sync();
    if block.is_leader() {
        let word = (u64::from(block.count()) << 32) | (u64::from(mark) + u64::from(bias));
        // SAFETY: `own` has one element per block of the rank, and only the leader of a block
        // writes the element of the block.
        unsafe { *own.add(block.index() as usize) = word };
    }
}

/// A second kernel, which does nothing.
#[kernel]
unsafe fn grid_idle(block: Block<impl Machine>, _nothing: u64) {
    block.sync();
}

fn fake(multiprocessors: u32) -> Arc<Fake> {
    Arc::new(Fake::new(
        multiprocessors,
        &[*GRID_BARRIER.info(), *GRID_IDLE.info()],
    ))
}

fn grid(driver: &Arc<Fake>, size: u32) -> MultiRankGrid {
    let options = MultiRankGridOptions {
        timeout: Duration::from_millis(300),
        slots: 2,
        ..MultiRankGridOptions::new(size)
    };
    // SAFETY: the fake driver never unloads a module.
    unsafe { MultiRankGrid::new(Arc::clone(driver) as Arc<_>, module(), options) }.unwrap()
}

fn shape(blocks: u32, threads: u32) -> LaunchShape {
    LaunchShape {
        blocks,
        threads,
        ..LaunchShape::default()
    }
}

fn module() -> RawModule {
    // SAFETY: the fake driver has one module, whose handle it ignores.
    unsafe { RawModule::from_raw(0) }
}

/// Returns the handle of a rank's stream.
fn stream(rank: u32) -> RawStream {
    // SAFETY: the fake driver only compares handles.
    unsafe { RawStream::from_raw(1000 + rank as usize) }
}

/// Returns the bytes of a parameter struct of `grid_barrier`, with zeros as padding.
fn bytes(counter: &AtomicU32, all: u32, own: &mut [u64], mark: u8) -> Vec<u8> {
    let mut bytes = vec![0; size_of::<GridBarrierParams>()];
    let mut put = |name: &str, value: &[u8]| {
        let field = GridBarrierParams::FIELDS
            .iter()
            .find(|field| field.name == name)
            .unwrap();
        assert_eq!(field.size, value.len());
        bytes[field.offset..][..value.len()].copy_from_slice(value);
    };
    put("mark", &[mark]);
    put("counter", &(counter.as_ptr() as usize).to_ne_bytes());
    put("all", &all.to_ne_bytes());
    put("own", &(own.as_mut_ptr() as usize).to_ne_bytes());
    put("bias", &1000u16.to_ne_bytes());
    bytes
}

/// Launches `grid_barrier` for all ranks. Returns true if every block wrote the expected value to
/// its element.
fn all_arrive(
    grid: &MultiRankGrid,
    blocks: u32,
    lanes: u32,
    all: u32,
    first_mark: u8,
) -> Result<bool> {
    let counter = AtomicU32::new(0);
    let ranks = (0..grid.options.size).map(|rank| {
        let counter = &counter;
        move || {
            let mut own = vec![0; blocks as usize];
            let mark = first_mark + rank as u8;
            let params = bytes(counter, all, &mut own, mark);
            let shape = shape(blocks, lanes);
            // SAFETY: `params` contains the parameter struct of `grid_barrier`. The memory that the
            // struct points to outlives the grid, because the fake driver completes the grid within
            // the call.
            unsafe {
                grid.launch(
                    grid.options.timeout,
                    rank,
                    "grid_barrier",
                    &params,
                    shape,
                    stream(rank),
                )
            }?;
            let word = (u64::from(blocks) << 32) | (u64::from(mark) + 1000);
            Ok(own.iter().all(|found| *found == word))
        }
    });
    thread::scope(|scope| {
        let ranks: Vec<_> = ranks.map(|rank| scope.spawn(rank)).collect();
        let results: Vec<Result<bool>> =
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        results.into_iter().try_fold(true, |all, it| Ok(all & it?))
    })
}

/// Launches `kernel` for one rank, with a parameter struct of 8 zero bytes.
fn idle(grid: &MultiRankGrid, rank: u32, kernel: &str, blocks: u32) -> Result<()> {
    // SAFETY: the parameter struct of `grid_idle` has 8 bytes. Launches of other kernels with this
    // size fail before they run.
    unsafe {
        grid.launch(
            grid.options.timeout,
            rank,
            kernel,
            &[0; 8],
            shape(blocks, 1),
            stream(rank),
        )
    }
}

/// Calls `idle` for ranks 0, 1, ... on separate threads. `launches` contains the kernel and the
/// number of blocks of each rank. Returns the results in the order of the ranks.
fn idle_all(grid: &MultiRankGrid, launches: &[(&str, u32)]) -> Vec<Result<()>> {
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(launches)
            .map(|(rank, &(kernel, blocks))| scope.spawn(move || idle(grid, rank, kernel, blocks)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn text(result: Result<()>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn ranks_synchronise_in_a_multi_rank_grid() {
    let driver = fake(64);
    for (ranks, blocks, lanes) in [(1, 1, 1), (4, 3, 1), (3, 2, 4)] {
        let grid = grid(&driver, ranks);
        // Launches more grids than there are slots.
        for round in 0..5 {
            assert!(all_arrive(&grid, blocks, lanes, ranks * blocks, round * 10).unwrap());
        }
    }
    assert_eq!(driver.allocated.load(Ordering::Relaxed), 0);
    assert_eq!(
        driver.live.load(Ordering::Relaxed),
        0,
        "a stream or an event is left"
    );
}

#[test]
fn a_launch_has_a_timeout_of_its_own_and_fail_breaks_the_grid() {
    let driver = fake(64);
    let patient = MultiRankGridOptions::new(2);
    // SAFETY: the fake driver never unloads a module.
    let make = || unsafe { MultiRankGrid::new(Arc::clone(&driver) as Arc<_>, module(), patient) };
    let launch = |grid: &MultiRankGrid, timeout: u64| {
        let timeout = Duration::from_millis(timeout);
        // SAFETY: the parameter struct of `grid_idle` has 8 bytes, and the kernel has no
        // requirements.
        unsafe { grid.launch(timeout, 0, "grid_idle", &[0; 8], shape(1, 1), stream(0)) }
    };
    let grid = make().unwrap();
    assert!(grid.failure().is_none());
    let error = text(launch(&grid, 50));
    assert!(
        error.contains("rank 1 of 2 did not launch within 0.05 s"),
        "{error}"
    );
    assert_eq!(grid.failure().unwrap().to_string(), error);

    let grid = make().unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| text(launch(&grid, 60_000)));
        thread::sleep(Duration::from_millis(50));
        grid.fail(&Error::launch("the reason"));
        assert!(waits.join().unwrap().contains("the reason"));
    });
    grid.fail(&Error::launch("another one"));
    assert!(
        text(launch(&grid, 60_000)).contains("the reason"),
        "the first stays"
    );
}

#[test]
fn the_check_of_arrivals_can_fail() {
    let driver = fake(64);
    let grid = grid(&driver, 2);
    assert!(
        !all_arrive(&grid, 1, 1, 3, 0).unwrap(),
        "one block more than there are"
    );
    driver.miscounts.store(true, Ordering::Relaxed);
    assert!(
        !all_arrive(&grid, 1, 1, 2, 0).unwrap(),
        "all blocks ran as the first rank's"
    );
}

#[test]
fn a_grid_is_ordered_with_the_work_of_every_stream() {
    let driver = fake(64);
    let grid = grid(&driver, 3);
    let mut tables = Vec::new();
    for _ in 0..3 {
        driver.calls.lock().unwrap().clear();
        assert!(all_arrive(&grid, 2, 1, 6, 0).unwrap());
        let calls = driver.calls.lock().unwrap().clone();
        let at = calls
            .iter()
            .position(|call| matches!(call, Call::Launch(..)))
            .unwrap();
        let Call::Launch(shape, own) = calls[at] else {
            unreachable!()
        };
        assert_eq!(
            (shape.blocks, shape.threads, shape.cooperative),
            (6, 1, true)
        );
        let Call::Write(table) = calls[0] else {
            panic!("the table is not written first: {calls:?}")
        };
        tables.push(table);
        let (before, after) = (&calls[1..at], &calls[at + 1..]);
        assert_eq!((before.len(), after.len()), (6, 4), "{calls:?}");
        for (rank, pair) in (0..).zip(before.chunks(2)) {
            let Call::Record(event, _) = pair[0] else {
                panic!("{calls:?}")
            };
            assert_eq!(
                pair,
                [Call::Record(event, stream(rank)), Call::Wait(own, event)]
            );
        }
        let Call::Record(end, last) = after[0] else {
            panic!("{calls:?}")
        };
        assert_eq!(last, own);
        for (rank, call) in (0..).zip(&after[1..]) {
            assert_eq!(*call, Call::Wait(stream(rank), end));
        }
    }
    assert_eq!(tables[1] - tables[0], 3 * SLOT_BYTES);
    assert_eq!(tables[2], tables[0], "two slots, in turn");
}

#[test]
fn a_missing_rank_is_named() {
    let driver = fake(64);
    let grid = grid(&driver, 4);
    let results = idle_all(&grid, &[("grid_idle", 1), ("grid_idle", 1)]);
    let said: Vec<String> = results.into_iter().map(text).collect();
    assert!(
        said[0].contains("ranks 2, 3 of 4 did not launch within 0.3 s"),
        "{}",
        said[0]
    );
    assert!(said[0].contains("grid_idle"), "{}", said[0]);
    assert_eq!(said[0], said[1]);
    assert_eq!(
        text(idle(&grid, 2, "grid_idle", 1)),
        said[0],
        "a late rank gets the error too"
    );
    assert!(
        driver.calls.lock().unwrap().is_empty(),
        "nothing was launched"
    );
}

#[test]
fn different_launches_are_named() {
    for (one, other) in [
        (("grid_idle", 1), ("grid_barrier", 1)),
        (("grid_idle", 1), ("grid_idle", 2)),
    ] {
        let driver = fake(64);
        let grid = grid(&driver, 2);
        let said: Vec<String> = idle_all(&grid, &[one, other])
            .into_iter()
            .map(text)
            .collect();
        assert_eq!(said[0], said[1]);
        for (rank, (kernel, blocks)) in [one, other].iter().enumerate() {
            let part = format!("rank {rank} {kernel} with {blocks} blocks");
            assert!(said[0].contains(&part), "{}", said[0]);
        }
        assert_eq!(
            text(idle(&grid, 0, "grid_idle", 1)),
            said[0],
            "the grid is broken"
        );
        assert!(
            driver.calls.lock().unwrap().is_empty(),
            "nothing was launched"
        );
    }
}

#[test]
fn a_refused_launch_fails_on_all_ranks_and_leaves_the_grid_usable() {
    let driver = fake(4);
    let grid = grid(&driver, 2);
    for (kernel, blocks, part) in [
        ("grid_ghost", 1, "the image has no grid_ghost__grid"),
        ("grid_idle", 3, "4 multiprocessors hold 1 blocks"),
        ("grid_idle", u32::MAX, "not resident together"),
    ] {
        let said: Vec<String> = idle_all(&grid, &[(kernel, blocks); 2])
            .into_iter()
            .map(text)
            .collect();
        assert!(said[0].contains(part), "{}", said[0]);
        assert_eq!(said[0], said[1]);
    }
    driver.mistakes.store(true, Ordering::Relaxed);
    // The earlier launches did not look up `grid_barrier`, so this launch looks up its grid form
    // and checks the arguments of the grid form.
    for result in idle_all(&grid, &[("grid_barrier", 1); 2]) {
        assert!(text(result).contains("[(0, 8)]"));
    }
    driver.mistakes.store(false, Ordering::Relaxed);
    assert!(
        driver.calls.lock().unwrap().is_empty(),
        "nothing was launched"
    );
    assert!(all_arrive(&grid, 2, 1, 4, 0).unwrap());
}

#[test]
fn a_launch_that_fails_breaks_the_grid() {
    let driver = fake(64);
    let grid = grid(&driver, 2);
    driver.refuses.store(true, Ordering::Relaxed);
    for result in idle_all(&grid, &[("grid_idle", 1); 2]) {
        assert!(matches!(result, Err(Error::Driver { call: "launch", .. })));
    }
    driver.refuses.store(false, Ordering::Relaxed);
    assert!(text(idle(&grid, 1, "grid_idle", 1)).contains("refused"));
}

#[test]
fn a_table_is_not_written_while_a_grid_reads_it() {
    let driver = fake(64);
    let grid = grid(&driver, 2);
    driver.hangs.store(true, Ordering::Relaxed);
    for result in idle_all(&grid, &[("grid_idle", 1); 2]) {
        assert!(text(result).contains("has not ended within 0.3 s"));
    }
    assert!(
        driver.calls.lock().unwrap().is_empty(),
        "the table was written"
    );
}

#[test]
fn driver_errors_reach_every_rank() {
    let driver = fake(64);
    let grid = grid(&driver, 2);
    // Native execution supports at most 64 lanes.
    let launch = |rank| {
        let shape = shape(1, 65);
        // SAFETY: the parameter struct of `grid_idle` has 8 bytes, and the kernel has no
        // requirements.
        unsafe {
            grid.launch(
                grid.options.timeout,
                rank,
                "grid_idle",
                &[0; 8],
                shape,
                stream(rank),
            )
        }
    };
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || launch(rank)));
        for rank in ranks {
            assert!(text(rank.join().unwrap()).contains("at most 64 lanes"));
        }
    });
}

#[test]
fn invalid_arguments_fail_on_their_own_rank() {
    let driver = fake(64);
    let grid = grid(&driver, 1);
    let refused = |rank, bytes: usize, shape| {
        let params = vec![0; bytes];
        // SAFETY: the launch fails before a kernel reads the parameters.
        let result = unsafe {
            grid.launch(
                grid.options.timeout,
                rank,
                "grid_idle",
                &params,
                shape,
                stream(0),
            )
        };
        assert!(
            matches!(result, Err(Error::InvalidArgument { .. })),
            "{result:?}"
        );
    };
    refused(1, 8, shape(1, 1));
    refused(0, 257, shape(1, 1));
    refused(0, 8, shape(0, 1));
    refused(0, 8, shape(1, 0));
    refused(
        0,
        8,
        LaunchShape {
            cluster: 2,
            ..shape(2, 1)
        },
    );
    refused(
        0,
        8,
        LaunchShape {
            dependent: true,
            ..shape(2, 1)
        },
    );
    driver.captures.store(true, Ordering::Relaxed);
    refused(0, 8, shape(1, 1));
    driver.captures.store(false, Ordering::Relaxed);
    idle(&grid, 0, "grid_idle", 1).unwrap();
    for (size, slots) in [(0, 1), (1, 0)] {
        let options = MultiRankGridOptions {
            slots,
            ..MultiRankGridOptions::new(size)
        };
        // SAFETY: the fake driver never unloads a module.
        let made = unsafe { MultiRankGrid::new(Arc::clone(&driver) as Arc<_>, module(), options) };
        assert!(matches!(made, Err(Error::InvalidArgument { .. })));
    }
}
