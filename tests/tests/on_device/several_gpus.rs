//! Tests of ranks on separate GPUs, as threads and as processes, with 2, 4 and 8 ranks as far as
//! the machine has GPUs. They need `FUSEWIRE_TEST_DEVICE=cuda:each` (or `hip:each`).

use core::time::Duration;

use fusewire::gpu::driver::Properties;
use fusewire::{
    Algorithm, CallOptions, Communicator, DType, Device, Op, ReduceOp, ReductionCode, Result,
    Tensor,
};
use fusewire_tests::device;
use fusewire_tests::device::{separate_gpus, tensor};
use fusewire_tests::process::{Host, role};
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{Processes, Setup, Threads};
use fusewire_tests::skip::skip;

use super::{
    TEST_TIMEOUT, driver_memory, rank_1_ends, rank_1_never_launches, run, until_rank_1_ends, works,
};

/// Returns the numbers of ranks to test, and prints them. If the machine has fewer than two GPUs,
/// skips the test and returns no number.
fn rank_counts() -> Vec<u32> {
    let gpus = separate_gpus().map_or(0, <[Properties]>::len) as u32;
    let counts: Vec<u32> = [2, 4, 8]
        .into_iter()
        .filter(|ranks| *ranks <= gpus)
        .collect();
    if !counts.is_empty() {
        println!("ranks on separate GPUs: {counts:?}");
    }
    counts
}

/// Runs `test` in processes of ranks.
fn processes(test: &'static str) -> Processes {
    Processes {
        test,
        host: Host::Parent,
    }
}

/// Runs `body` on every rank: with ranks as threads and, if `test` is given, with ranks as
/// processes that run `test`.
fn on_every_rank(
    setup: &Setup,
    test: Option<&'static str>,
    body: impl Fn(&Communicator) -> Result<()> + Sync,
) {
    let results = match test {
        None => {
            let results = Threads.each(setup, |comm| {
                body(&comm).map_err(|error| format!("rank {}: {error}", comm.rank()))
            });
            results
                .into_iter()
                .collect::<core::result::Result<Vec<()>, String>>()
                .map(drop)
        }
        Some(test) => processes(test).each(setup, "", TEST_TIMEOUT).map(drop),
    };
    if let Err(wrong) = results {
        panic!("{setup:?}: {wrong}");
    }
}

/// Runs `body` and returns true if this process is a rank of [`on_every_rank`].
fn is_rank(body: impl Fn(&Communicator) -> Result<()>) -> bool {
    Processes::child_of_each(|comm, _| match body(&comm) {
        Ok(()) => Ok("done".to_owned()),
        Err(error) => Err(format!("rank {}: {error}", comm.rank())),
    })
}

/// Checks that the communicator, the tests' tensors and the rank are on the same GPU, which is a
/// different one for each rank.
fn has_own_gpu(comm: &Communicator) -> Result<()> {
    let (Device::Cuda(ordinal) | Device::Hip(ordinal)) = comm.device() else {
        panic!("rank {} is on {}", comm.rank(), comm.device());
    };
    assert_eq!(ordinal, comm.rank());
    assert_eq!(device(), comm.device());
    assert_eq!(tensor(DType::F32, 3)?.device(), comm.device());
    comm.barrier()
}

#[test]
fn every_rank_has_its_own_gpu() {
    if is_rank(has_own_gpu) {
        return;
    }
    for ranks in rank_counts() {
        let test = "several_gpus::every_rank_has_its_own_gpu";
        for test in [None, Some(test)] {
            on_every_rank(&Setup::new(ranks), test, has_own_gpu);
        }
    }
}

#[test]
fn short_form_as_threads() {
    for ranks in rank_counts() {
        for (blocks, mode) in [(1, CallMode::Graph), (0, CallMode::Blocking)] {
            let setup = Setup {
                blocks,
                mode,
                ..Setup::new(ranks)
            };
            run(&Threads, setup, "core");
        }
    }
}

#[test]
fn short_form_as_processes() {
    if Processes::child() {
        return;
    }
    for ranks in rank_counts() {
        for (blocks, mode) in [(1, CallMode::Graph), (0, CallMode::Blocking)] {
            let setup = Setup {
                blocks,
                mode,
                ..Setup::new(ranks)
            };
            let runner = processes("several_gpus::short_form_as_processes");
            run(&runner, setup, "core");
        }
    }
}

fn nvls(ranks: u32) -> Setup {
    Setup {
        algorithm: Algorithm::Nvls,
        ..Setup::new(ranks)
    }
}

/// Returns the numbers of ranks to test, or no number if a GPU does not support multicast objects.
fn rank_counts_with_multicast() -> Vec<u32> {
    let counts = rank_counts();
    if counts.is_empty() {
        return counts;
    }
    let gpus = separate_gpus().unwrap_or_default();
    if let Some(gpu) = gpus.iter().find(|gpu| !gpu.multicast) {
        let (number, name) = (gpu.ordinal, &gpu.name);
        let reason = format!("GPU {number} ({name}) does not support multicast objects");
        skip("multicast", &reason);
        return Vec::new();
    }
    counts
}

/// Checks that windows have multicast addresses. `Algorithm::Nvls` also works without them, but
/// `Algorithm::Auto` chooses it only with them.
fn has_multicast(comm: &Communicator) -> Result<()> {
    let auto = Algorithm::Auto.name();
    let comm = comm.with_options(&CallOptions::new().hint("algorithm", auto))?;
    let window = comm.alloc(DType::F32, 1 << 20)?;
    let op = Op::AllReduce {
        count: window.len(),
        dtype: DType::F32,
        reduction: ReductionCode::Sum,
    };
    let algorithm = comm.plan(&op)?.algorithm;
    assert_eq!(
        algorithm,
        Algorithm::Nvls,
        "the window has no multicast address"
    );
    comm.barrier()
}

#[test]
fn nvls_as_threads() {
    for ranks in rank_counts_with_multicast() {
        on_every_rank(&nvls(ranks), None, has_multicast);
        for (blocks, mode) in [(1, CallMode::Graph), (4, CallMode::Blocking)] {
            let setup = Setup {
                blocks,
                mode,
                ..nvls(ranks)
            };
            run(&Threads, setup, "nvls");
        }
    }
}

#[test]
fn nvls_as_processes() {
    const TEST: &str = "several_gpus::nvls_as_processes";
    if Processes::child() || is_rank(has_multicast) {
        return;
    }
    for ranks in rank_counts_with_multicast() {
        on_every_rank(&nvls(ranks), Some(TEST), has_multicast);
        run(&processes(TEST), nvls(ranks), "nvls");
    }
}

/// Computes sums of `x` by `algorithm` and compares all elements.
fn sums(comm: &Communicator, x: &Tensor, algorithm: Algorithm, what: &str) -> Result<()> {
    let comm = comm.with_options(&CallOptions::new().hint("algorithm", algorithm.name()))?;
    for round in 0..3 {
        let value = |rank: usize, i: usize| ((i + 7 * rank + round) % 97) as f32;
        let own: Vec<f32> = (0..x.len())
            .map(|i| value(comm.rank() as usize, i))
            .collect();
        x.copy_from(&own)?;
        comm.all_reduce(x, ReduceOp::Sum)?;
        let sum = |i: usize| (0..comm.size() as usize).map(|rank| value(rank, i)).sum();
        let expected: Vec<f32> = (0..x.len()).map(sum).collect();
        let wrong = x
            .to_vec::<f32>()?
            .iter()
            .zip(&expected)
            .filter(|(a, b)| a != b)
            .count();
        assert_eq!(wrong, 0, "{what}, {}, round {round}", algorithm.name());
    }
    Ok(())
}

/// Registers memory of `cuMemAlloc` and lets the kernels of peers read and write it.
fn registers_driver_memory(comm: &Communicator) -> Result<()> {
    const COUNT: usize = 50_000;
    let Device::Cuda(ordinal) = comm.device() else {
        panic!("rank {} is on {}", comm.rank(), comm.device());
    };
    // The tensor does not start at the start of the allocation, and its offset differs by rank.
    let offset = 256 * (comm.rank() as usize + 1);
    let memory = driver_memory(ordinal, offset + COUNT * 4).expect("memory of the driver");
    let address = (memory as *mut u8).wrapping_add(offset);
    // SAFETY: `address` points to `COUNT` f32 elements of an allocation that is never freed.
    let x = unsafe { Tensor::adopt(comm.device(), address, DType::F32, COUNT, None)? };
    sums(comm, &x, Algorithm::TwoShot, "staged")?;
    assert!(
        comm.window_addr(&x).is_err(),
        "the memory is not registered yet"
    );
    let registration = comm.tensor_register(&x)?;
    assert!(
        comm.window_addr(&x).is_ok(),
        "peers have no address of the memory"
    );
    // With `signal`, peers read the registered memory; with `two_shot`, they also write it.
    for algorithm in [Algorithm::Signal, Algorithm::TwoShot] {
        sums(comm, &x, algorithm, "registered")?;
    }
    comm.stream().begin_capture()?;
    let captured = comm.all_reduce_async(&x, ReduceOp::Sum);
    let graph = comm.stream().end_capture()?.instantiate()?;
    captured?;
    x.copy_from(&vec![comm.rank() as f32 + 1.0; COUNT])?;
    graph.run(comm.stream())?;
    let sum = (1..=comm.size()).sum::<u32>() as f32;
    assert_eq!(x.to_vec::<f32>()?, vec![sum; COUNT], "registered, replayed");
    drop(graph);
    comm.tensor_deregister(&registration)?;
    assert!(
        comm.window_addr(&x).is_err(),
        "the memory is still registered"
    );
    comm.barrier()?;
    sums(comm, &x, Algorithm::TwoShot, "staged again")
}

/// Runs [`registers_driver_memory`] as [`on_every_rank`] does.
fn driver_memory_is_registered(test: Option<&'static str>) {
    for ranks in rank_counts() {
        if !matches!(device(), Device::Cuda(_)) {
            return skip("cuda", "the memory is allocated by cuMemAlloc");
        }
        on_every_rank(&Setup::new(ranks), test, registers_driver_memory);
    }
}

#[test]
fn memory_of_the_driver_is_registered_as_threads() {
    driver_memory_is_registered(None);
}

#[test]
fn memory_of_the_driver_is_registered_as_processes() {
    if is_rank(registers_driver_memory) {
        return;
    }
    let test = "several_gpus::memory_of_the_driver_is_registered_as_processes";
    driver_memory_is_registered(Some(test));
}

#[test]
fn a_rank_that_never_launches_is_named() {
    for ranks in rank_counts() {
        rank_1_never_launches(ranks);
    }
}

#[test]
fn a_process_that_is_killed_is_named() {
    let test = "several_gpus::a_process_that_is_killed_is_named";
    if role().as_deref() == Some("rank") {
        until_rank_1_ends(|| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        return;
    }
    for ranks in rank_counts() {
        rank_1_ends(test, ranks, |process| process.signal(libc::SIGKILL));
        works(ranks);
    }
}
