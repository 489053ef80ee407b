//! Tests ranks that share a GPU: blocks that cannot all be resident at the same time, and memory
//! that processes share.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use fusewire::{
    Algorithm, Communicator, Compare, DType, Error, Options, ReduceOp, Result, SignalUpdate,
    Tensor, WindowOptions, new_comm,
};
use fusewire_tests::device;
use fusewire_tests::device::{run_threads, tensor};
use fusewire_tests::fake::Fake;
use fusewire_tests::process::{Host, Ranks, role};
use serde_json::Value;

use crate::{on_fake, options};

const TEST_TIMEOUT: Duration = Duration::from_secs(100);

/// Runs `body` in two processes on the fake, with `environment` for each rank.
fn two_processes(
    test: &str,
    environment: impl Fn(u32) -> Vec<(&'static str, String)>,
    body: impl FnOnce(&Options),
) {
    if role().as_deref() == Some("rank") {
        let mut options = options();
        options.timeout = Duration::from_secs(60);
        options.abort_process_on_timeout_or_error = Some(false);
        body(&options);
        return;
    }
    on_fake(test, &[], || {
        let mut ranks = Ranks::start_each(test, "rank", 2, Host::Parent, environment);
        ranks.succeed(TEST_TIMEOUT).expect("both ranks");
    });
}

fn sums(comm: &Communicator, x: &Tensor, what: &str) -> Result<()> {
    for round in 0..3u32 {
        let value = |rank: u32| (rank + 1 + round) as f32;
        x.copy_from(&vec![value(comm.rank()); x.len()])?;
        comm.all_reduce(x, ReduceOp::Sum)?;
        let sum: f32 = (0..comm.size()).map(value).sum();
        assert_eq!(x.to_vec::<f32>()?, vec![sum; x.len()], "{what}");
    }
    Ok(())
}

/// Returns the number of blocks of the last all_reduce in two shots.
fn blocks_of_last_launch(fake: &Fake) -> u64 {
    let launches = fake.launches(c"reduce_shards_f32_sum");
    let launches: Value = serde_json::from_str(&launches).expect("JSON");
    let last = launches.as_array().and_then(|all| all.last());
    let last = last.expect("a launch");
    last["grid"][0].as_u64().expect("a number")
}

fn sized(blocks: u32, threads: u32) -> Options {
    let mut options = options();
    (options.blocks, options.threads) = (blocks, threads);
    options.algorithm = Algorithm::TwoShot;
    options
}

/// An SM holds one block of 512 threads of a kernel with 128 registers, and two blocks of 128
/// threads of a kernel with 218 registers.
#[test]
fn launches_use_the_blocks_that_are_resident_together() {
    let test = "peers::launches_use_the_blocks_that_are_resident_together";
    let small = [("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", "2")];
    on_fake(test, &small, || {
        let fake = Fake::open().expect("the fake");
        for (ranks, options, blocks) in [
            (1, sized(9, 0), 2),
            (1, sized(1, 0), 1),
            (2, sized(3, 0), 1),
            (2, sized(9, 128), 2),
        ] {
            for result in run_threads(ranks, &options, |comm| {
                let x = comm.alloc(DType::F32, 100_000)?;
                sums(&comm, &x, "blocks that fit")
            }) {
                result.expect("every rank");
            }
            assert_eq!(blocks_of_last_launch(&fake), blocks, "{ranks} ranks");
        }
        // Not one block of each rank is resident.
        for (ranks, options) in [(3, sized(1, 0)), (7, sized(9, 128))] {
            let began = Instant::now();
            for result in run_threads(ranks, &options, |_| Ok(())) {
                let error = result.expect_err("the blocks do not fit");
                let text = error.to_string();
                assert!(matches!(error, Error::Launch { .. }), "{text}");
                for says in [
                    "the GPU of rank 0 can hold",
                    "share the GPU",
                    "run fewer ranks",
                ] {
                    assert!(text.contains(says), "{text}");
                }
            }
            assert!(began.elapsed() < Duration::from_secs(15), "at once");
        }
    });
}

#[test]
fn all_ranks_use_the_blocks_of_the_smallest_gpu() {
    let test = "peers::all_ranks_use_the_blocks_of_the_smallest_gpu";
    let processors = |rank: u32| {
        let count = if rank == 0 { "3" } else { "132" };
        vec![("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", count.to_owned())]
    };
    two_processes(test, processors, |options| {
        let fake = Fake::open().expect("the fake");
        let mut options = options.clone();
        options.algorithm = Algorithm::TwoShot;
        for (asked, used) in [(0, 3), (2, 2)] {
            options.blocks = asked;
            let name = format!("{asked} blocks");
            let comm = new_comm("fusewire", device(), &name, options.clone()).expect("both ranks");
            let x = comm.alloc(DType::F32, 100_000).expect("memory");
            sums(&comm, &x, "blocks that fit").expect("both ranks");
            assert_eq!(blocks_of_last_launch(&fake), used);
            assert_eq!(u64::from(comm.options().blocks), used);
            // A communicator of other ranks is formed with the options of the caller.
            let copy = comm.dup().expect("both ranks");
            sums(&copy, &x, "a copy").expect("both ranks");
            assert_eq!(u64::from(copy.options().blocks), used);
            let alone = comm
                .split(&[comm.rank()], "alone")
                .expect("both ranks")
                .expect("a part");
            let most = match (asked, comm.rank()) {
                (0, 1) => 16,
                _ => used,
            };
            assert_eq!(u64::from(alone.options().blocks), most);
        }
    });
}

#[test]
fn large_operations_have_more_blocks() {
    let test = "peers::large_operations_have_more_blocks";
    let processors = |_| vec![("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", "132".to_owned())];
    two_processes(test, processors, |options| {
        let fake = Fake::open().expect("the fake");
        for (asked, large, used) in [(0, 0, [32, 16]), (3, 0, [3, 3]), (2, 5, [5, 2])] {
            let mut options = options.clone().algorithm(Algorithm::TwoShot);
            (options.blocks, options.large_blocks) = (asked, large);
            let name = format!("{asked} and {large} blocks");
            let comm = new_comm("fusewire", device(), &name, options).expect("both ranks");
            for round in 0..2 {
                // 4 MiB, and less.
                for (count, used) in [1 << 20, (1 << 20) - 1].into_iter().zip(used) {
                    let x = comm.alloc(DType::F32, count).expect("memory");
                    sums(&comm, &x, "more blocks and fewer").expect("both ranks");
                    let blocks = blocks_of_last_launch(&fake);
                    assert_eq!(blocks, used, "{count} elements, round {round}, {name}");
                }
            }
        }
    });
}

#[test]
fn a_gpu_without_room_is_reported_to_the_other_process() {
    let test = "peers::a_gpu_without_room_is_reported_to_the_other_process";
    let processors = |rank: u32| {
        let count = if rank == 0 { "0" } else { "132" };
        vec![("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", count.to_owned())]
    };
    two_processes(test, processors, |options| {
        let began = Instant::now();
        let error = new_comm("fusewire", device(), "too small", options.clone())
            .map(drop)
            .expect_err("rank 0 holds no block");
        let text = error.to_string();
        assert!(
            text.contains("the GPU of rank 0 can hold 0 blocks"),
            "{text}"
        );
        assert!(began.elapsed() < Duration::from_secs(30), "{text}");
    });
}

/// Checks that a driver failure of one rank ends the formation on the other rank.
#[test]
fn a_driver_failure_of_one_rank_is_reported_to_the_other_process() {
    let test = "peers::a_driver_failure_of_one_rank_is_reported_to_the_other_process";
    const CALL: &str = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
    let failing = |rank: u32| match rank {
        0 => vec![("FUSEWIRE_CUDA_FAKE_FAIL", format!("{CALL}=1"))],
        _ => Vec::new(),
    };
    two_processes(test, failing, |options| {
        let began = Instant::now();
        let error = new_comm("fusewire", device(), "failing", options.clone())
            .map(drop)
            .expect_err("rank 0 fails");
        let text = error.to_string();
        assert!(text.contains(CALL), "{text}");
        assert!(began.elapsed() < Duration::from_secs(30), "{text}");
    });
}

/// Uses all kinds of memory that two processes share.
fn exchange(options: &Options) -> Result<()> {
    let comm = new_comm("fusewire", device(), "exchange", options.clone())?;
    for count in [7, 3000, 100_000] {
        sums(
            &comm,
            &comm.alloc(DType::F32, count)?,
            "allocated in a window",
        )?;
        let staged = tensor(DType::F32, count)?;
        sums(&comm, &staged, "staged")?;
        let registration = comm.tensor_register(&staged)?;
        sums(&comm, &staged, "registered")?;
        comm.tensor_deregister(&registration)?;
        sums(&comm, &staged, "staged again")?;
    }
    let (me, other) = (comm.rank(), 1 - comm.rank());
    let window = comm.alloc_window(DType::U64, 100, WindowOptions::default())?;
    let source = tensor(DType::U64, 50)?;
    for round in 1..=5u64 {
        source.copy_from(&vec![round * 10 + u64::from(me); 50])?;
        window.put_signal(&source, other, 50, 0)?;
        window.wait_signal(0, Some(other), Compare::GreaterEqual, round)?;
        let expected = vec![round * 10 + u64::from(other); 50];
        assert_eq!(window.tensor().slice(50, 50)?.to_vec::<u64>()?, expected);
        comm.barrier()?;
    }
    window.signal(other, 1, SignalUpdate::Set(9))?;
    window.wait_signal(1, Some(other), Compare::Equal, 9)?;
    comm.barrier()?;
    window.free()
}

/// Returns whether memory was shared by file descriptors, and whether memory was shared by IPC
/// handles.
fn ways() -> (bool, bool) {
    let fake = Fake::open().expect("the fake");
    let used = |name| fake.calls(name) > 0;
    (
        used(c"cuMemImportFromShareableHandle"),
        used(c"cuIpcOpenMemHandle_v2"),
    )
}

#[test]
fn memory_without_descriptors_is_shared_by_ipc() {
    let test = "peers::memory_without_descriptors_is_shared_by_ipc";
    let none = |_| vec![("FUSEWIRE_CUDA_FAKE_DESCRIPTORS", "0".to_owned())];
    two_processes(test, none, |options| {
        exchange(options).expect("by IPC");
        assert_eq!(ways(), (false, true), "descriptors, IPC");
    });
}

#[test]
fn memory_with_descriptors_is_shared_by_descriptor() {
    let test = "peers::memory_with_descriptors_is_shared_by_descriptor";
    two_processes(
        test,
        |_| Vec::new(),
        |options| {
            exchange(options).expect("by descriptors");
            assert_eq!(ways(), (true, false), "descriptors, IPC");
        },
    );
}

/// Stands for the owner of adopted memory. Counts how often a value of this type is dropped.
struct Owner(Arc<AtomicU32>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn adopted(options: &Options) -> Result<()> {
    let coarse = options.testing.coarse_memory;
    const COUNT: usize = 50_000;
    let fake = Fake::open().expect("the fake");
    let mut options = options.clone();
    // With this algorithm, peers write to registered memory.
    options.algorithm = Algorithm::TwoShot;
    let comm = new_comm("fusewire", device(), "adopted", options)?;
    let (blocks, opened) = (fake.live(c"block"), fake.live(c"ipc"));
    let at = fake.allocate(COUNT * 4 + 1024);
    let dropped = Arc::new(AtomicU32::new(0));
    // The tensor does not start at the start of the allocation, and its offset differs by rank.
    let offset = 256 * (comm.rank() as usize + 1);
    let own = at.wrapping_add(offset);
    let keep: Arc<Owner> = Arc::new(Owner(Arc::clone(&dropped)));
    // SAFETY: `offset` is at most 512, so `COUNT` f32 elements at `own` are in the allocation,
    // which is freed below, after `keep` is dropped.
    let x = unsafe { Tensor::adopt(device(), own, DType::F32, COUNT, Some(keep))? };
    if coarse {
        let refused = comm.new_window(&x, WindowOptions::default());
        let error = refused
            .map(drop)
            .expect_err("coarse-grained memory on every rank");
        assert!(
            error
                .to_string()
                .contains("rank 0 was allocated outside Fusewire"),
            "{error}"
        );
    }
    sums(&comm, &x, "adopted, staged")?;
    assert!(comm.window_addr(&x).is_err());
    assert_eq!(fake.live(c"ipc"), opened);
    let registration = comm.tensor_register(&x)?;
    // The peer's memory is mapped, and the tensor has a window address.
    assert_eq!(comm.window_addr(&x).is_ok(), !coarse);
    assert_eq!(fake.live(c"ipc"), opened + 1);
    sums(&comm, &x, "adopted, registered")?;
    comm.stream().begin_capture()?;
    let captured = comm.all_reduce_async(&x, ReduceOp::Sum);
    let graph = comm.stream().end_capture()?.instantiate()?;
    captured?;
    x.copy_from(&vec![comm.rank() as f32 + 1.0; COUNT])?;
    graph.run(comm.stream())?;
    assert_eq!(x.to_vec::<f32>()?, vec![3.0; COUNT]);
    comm.tensor_deregister(&registration)?;
    assert!(comm.window_addr(&x).is_err());
    comm.barrier()?;
    sums(&comm, &x, "adopted, staged again")?;
    // The graph uses the registration and cannot fall back to staging, so a replay fails without
    // the registration. It does not take another registration for the one that has ended.
    let other = tensor(DType::F32, COUNT)?;
    let other = comm.tensor_register(&other)?;
    // With coarse-grained memory, the graph has used staging from the beginning.
    let replayed = graph.run(comm.stream());
    if coarse {
        replayed?;
    } else {
        let failed = replayed.expect_err("the window was freed");
        assert!(matches!(failed, Error::Failed(_)), "{failed}");
    }
    drop((graph, comm, other));
    drop(x);
    let began = Instant::now();
    while dropped.load(Ordering::Relaxed) == 0 {
        assert!(began.elapsed() < Duration::from_secs(20), "still kept");
        drop(tensor(DType::U8, 1)?);
        std::thread::sleep(Duration::from_millis(5));
    }
    fake.call("cuMemFree_v2", at as usize);
    assert!(fake.live(c"block") <= blocks, "the memory was not freed");
    assert_eq!(
        fake.live(c"ipc"),
        opened,
        "the peer's memory is still mapped"
    );
    Ok(())
}

#[test]
fn memory_of_another_owner_is_registered_between_processes() {
    let test = "peers::memory_of_another_owner_is_registered_between_processes";
    two_processes(
        test,
        |_| Vec::new(),
        |options| {
            adopted(options).expect("both ranks");
        },
    );
}

/// Checks the treatment of memory of other code on AMD GPUs: peers read registered memory, and
/// results go through staging.
#[test]
fn coarse_grained_memory_is_only_read_by_peers() {
    let test = "peers::coarse_grained_memory_is_only_read_by_peers";
    two_processes(
        test,
        |_| Vec::new(),
        |options| {
            let mut options = options.clone();
            options.testing.coarse_memory = true;
            adopted(&options).expect("both ranks");
        },
    );
}
