//! Tests multi-rank grids on a machine without a GPU. Each test runs in a child process in which
//! the executing fake of the driver replaces `libcuda.so.1`. The child finds an image of grid
//! forms: kernels whose names end with `__grid` and of which one launch runs all ranks.

use core::time::Duration;
use std::sync::Barrier;
use std::time::Instant;

use fusewire::testing::GridMode;
use fusewire::{
    CallOptions, Communicator, DType, Device, Error, Norm, Options, ReduceOp, Result, SignalUpdate,
    Tensor, VocabParallel, WindowOptions, new_comm, run_threads_on,
};
use fusewire_tests::device;
use fusewire_tests::fake::Fake;
use fusewire_tests::oracle;
use fusewire_tests::process::{Host, Ranks, report, role, start};
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{ALGORITHMS, Runner, Setup, Threads};

const TEST_TIMEOUT: Duration = Duration::from_secs(240);
/// A timeout that the tests let expire.
const SHORT: Duration = Duration::from_millis(700);
/// A duration much longer than `SHORT` and much shorter than the other time limits.
const SOON: Duration = Duration::from_secs(10);

/// Contents of the file that the child loads as the image of grid forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    /// A stand-in for the image of grid forms that `fusewire-build build --multi-rank-grid` writes.
    There,
    /// An image of ordinary forms, whose launches run one rank each.
    Ordinary,
    /// An image that claims to be built from other sources.
    Stale,
}

/// Runs `body` in a child process on the fake, with `environment`. `test` is the name of the
/// calling test.
fn on_fake(test: &str, image: Image, environment: &[(&str, &str)], body: impl FnOnce()) {
    if role().as_deref() == Some("fake") {
        assert!(device().is_gpu());
        body();
        report("done");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    fusewire_cuda_fake_library::install(folder.path()).expect("the fake, built with this test");
    let kernels = fusewire_cuda_fake_library::kernels_of("fusewire_kernels");
    let text = match image {
        Image::There => fusewire_cuda_fake_library::stand_in_multi_rank_grid(kernels, 90),
        Image::Stale => {
            fusewire_cuda_fake_library::stand_in_multi_rank_grid(kernels, 90)
                + "\n// fusewire sources 0b5e55ed\n"
        }
        Image::Ordinary => fusewire_cuda_fake_library::stand_in(kernels, 90),
    };
    let path = folder
        .path()
        .join("fusewire-kernels-multi-rank-grid.sm_90.ptx");
    std::fs::write(path, text).expect("an image");
    let image = fusewire_cuda_fake_library::stand_in(
        fusewire_cuda_fake_library::kernels_of("vocab_argmax"),
        90,
    );
    let path = folder.path().join("vocab_argmax.sm_90.ptx");
    std::fs::write(path, image).expect("an image");
    let path = folder.path().display().to_string();
    let mut all = vec![
        ("LD_LIBRARY_PATH".to_owned(), path.clone()),
        ("FUSEWIRE_IMAGES".to_owned(), path),
        ("FUSEWIRE_TEST_DEVICE".to_owned(), "cuda".to_owned()),
    ];
    for (name, value) in environment {
        all.push(((*name).to_owned(), (*value).to_owned()));
    }
    let started = Instant::now();
    let mut child = start(test, "fake", &all);
    let said = child.next_report(TEST_TIMEOUT);
    assert_eq!(said.as_deref(), Ok("done"), "{test}");
    child
        .succeed(TEST_TIMEOUT)
        .expect("success after its report");
    println!("{test}: {:.1} s", started.elapsed().as_secs_f64());
}

fn options(grid_mode: GridMode, timeout: Duration) -> Options {
    let mut options = Options::default();
    options.timeout = timeout;
    options.blocks = 2;
    options.testing.grid_mode = grid_mode;
    options
}

fn multi_rank_grid(timeout: Duration) -> Options {
    options(GridMode::MultiRankGrid, timeout)
}

/// Runs ranks as threads on the fake.
fn run<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_on(device(), "fusewire", size, options, body)
}

/// Returns the numbers of launches of grid forms and of ordinary forms.
fn launches(fake: &Fake) -> (u64, u64) {
    let grids = fake.launch_count(c"*__grid");
    (grids, fake.launch_count(c"*") - grids)
}

/// Checks the result of an all_reduce on a communicator of `size` ranks.
fn works(size: u32, options: &Options) {
    for result in run(size, options, |comm| {
        let x = comm.alloc(DType::F32, 1000)?;
        x.copy_from(&vec![comm.rank() as f32 + 1.0; 1000])?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        x.to_vec::<f32>()
    }) {
        let sum = (1..=size).sum::<u32>() as f32;
        assert_eq!(result.expect("every rank"), vec![sum; 1000]);
    }
}

/// Number of elements of one rank's block.
const PART: usize = 331;
const HIDDEN: usize = 96;

/// Calls every collective, some of them blocking and some enqueued. Returns the results of this
/// rank and the number of calls.
fn everything(comm: &Communicator) -> Result<(Vec<Vec<u8>>, u64)> {
    let ranks = comm.size() as usize;
    let filled = |dtype, count: usize, seed| -> Result<Tensor> {
        let tensor = comm.alloc(dtype, count)?;
        tensor.copy_from_bytes(&oracle::fill(dtype, comm.rank(), seed, count))?;
        Ok(tensor)
    };
    let (mut out, mut calls) = (Vec::new(), 0);
    for dtype in [DType::F32, DType::Bf16] {
        let small = filled(dtype, PART, 1)?;
        let large = filled(dtype, PART * ranks, 2)?;
        let (part, whole) = (comm.alloc(dtype, PART)?, comm.alloc(dtype, PART * ranks)?);
        for algorithm in ALGORITHMS {
            let by = comm.with_options(&CallOptions::new().hint("algorithm", algorithm.name()))?;
            by.all_reduce_into(&part, &small, ReduceOp::Sum)?;
            out.push(part.to_bytes()?);
            calls += 1;
        }
        comm.all_gather_single(&whole, &small)?;
        out.push(whole.to_bytes()?);
        comm.reduce_scatter_single(&part, &large, ReduceOp::Sum)?;
        out.push(part.to_bytes()?);
        comm.all_to_all_single(&whole, &large)?;
        out.push(whole.to_bytes()?);
        // Operations are enqueued without a wait in between, so there are more grids in flight than
        // parameter tables.
        let mut work = Vec::new();
        for round in 0..12 {
            work.push(comm.broadcast_async(&whole, round % comm.size())?);
            work.push(comm.all_reduce_async(&part, ReduceOp::Max)?);
            work.push(comm.barrier_async()?);
        }
        for work in work {
            work.wait_blocking()?;
        }
        comm.barrier()?;
        out.extend([whole.to_bytes()?, part.to_bytes()?]);
        let count = 5 * HIDDEN;
        let (x, residual) = (filled(dtype, count, 5)?, comm.alloc(dtype, count)?);
        residual.copy_from_bytes(&oracle::fill(dtype, 0, 7, count))?;
        let weight = comm.alloc(dtype, HIDDEN)?;
        weight.copy_from_bytes(&oracle::fill(dtype, 0, 6, HIDDEN))?;
        let (y, kept) = (comm.alloc(dtype, count)?, comm.alloc(dtype, count)?);
        let norm = Norm::rms(&y, &x, &weight, 1e-6)
            .with_residual(&residual)
            .with_residual_out(&kept);
        comm.all_reduce_norm(&norm)?;
        out.extend([y.to_bytes()?, kept.to_bytes()?]);
        let (rows, columns) = (3, 40);
        let logits = filled(dtype, rows * columns, 8)?;
        let (indices, sums) = (
            comm.alloc(DType::I64, rows * 5)?,
            comm.alloc(DType::F32, rows)?,
        );
        let sampling = VocabParallel::new(&logits, rows, columns * ranks)
            .with_top_k(5, &indices)
            .with_log_sum_exp(&sums);
        comm.vocab_parallel(&sampling)?;
        out.extend([indices.to_bytes()?, sums.to_bytes()?]);
        calls += 3 + 36 + 1 + 1 + 1;
    }
    Ok((out, calls))
}

fn all_of(device: Device, ranks: u32, grid_mode: GridMode) -> (Vec<Vec<Vec<u8>>>, u64) {
    let options = options(grid_mode, Duration::from_secs(30));
    let results = run_threads_on(device, "fusewire", ranks, &options, |comm| {
        everything(&comm)
    });
    let results = results.into_iter().map(|rank| rank.expect("every rank"));
    let (bytes, calls): (Vec<_>, Vec<_>) = results.unzip();
    (bytes, calls[0])
}

#[test]
fn the_bits_are_those_of_the_cpu() {
    on_fake("the_bits_are_those_of_the_cpu", Image::There, &[], || {
        let fake = Fake::open().expect("the fake");
        for ranks in [1, 2, 4, 8] {
            let before = launches(&fake);
            let (bytes, calls) = all_of(device(), ranks, GridMode::MultiRankGrid);
            let after = launches(&fake);
            // Each call launches one grid for all ranks, and there are no other launches.
            assert_eq!((after.0 - before.0, after.1 - before.1), (calls, 0));
            let (cpu, _) = all_of(Device::Cpu, ranks, GridMode::Separate);
            assert_eq!(bytes.len(), ranks as usize);
            assert!(bytes == cpu, "{ranks} ranks");
            assert!(bytes[0].iter().all(|out| out.iter().any(|byte| *byte != 0)));
        }
        // Control of the launch count: ranks with separate launches.
        let before = launches(&fake);
        let (_, calls) = all_of(device(), 2, GridMode::Separate);
        let after = launches(&fake);
        assert_eq!((after.0 - before.0, after.1 - before.1), (0, 2 * calls));
    });
}

#[test]
fn the_conformance_list_in_a_multi_rank_grid() {
    let environment = [("FUSEWIRE_TEST_MULTI_RANK_GRID", "1")];
    let test = "the_conformance_list_in_a_multi_rank_grid";
    on_fake(test, Image::There, &environment, || {
        let fake = Fake::open().expect("the fake");
        let setup = Setup::new(2);
        let blocks = Setup { blocks: 3, ..setup };
        let mode = CallMode::Async;
        let norms = Setup {
            staging: 32 << 10,
            ..Setup::new(3)
        };
        for (setup, list) in [
            (setup, "core"),
            (blocks, "core"),
            (Setup { mode, ..setup }, "core"),
            (Setup::new(3), "core"),
            (Setup::new(8), "core"),
            (norms, "norms"),
        ] {
            let before = fake.launch_count(c"*__grid");
            let calls = Threads.run(&setup, list).unwrap_or_else(|e| panic!("{e}"));
            let grids = fake.launch_count(c"*__grid") - before;
            assert!(calls > 0 && grids >= calls, "{calls} calls, {grids} grids");
            println!("{list}: {calls} calls a rank, {grids} grids, {setup:?}");
        }
        assert_eq!(launches(&fake).1, 0, "ordinary launches");
        let graphs = Setup {
            mode: CallMode::Graph,
            ..setup
        };
        assert_eq!(Threads.run(&graphs, "core"), Ok(0), "left out");
    });
}

#[test]
fn operations_of_some_ranks_are_launched_separately() {
    let test = "operations_of_some_ranks_are_launched_separately";
    on_fake(test, Image::There, &[], || {
        let fake = Fake::open().expect("the fake");
        for result in run(3, &multi_rank_grid(TEST_TIMEOUT), |comm| {
            let x = comm.alloc(DType::F32, 500)?;
            let y = comm.alloc(DType::F32, 500)?;
            let window = comm.alloc_window(DType::F32, 500, WindowOptions::default())?;
            for round in 0..3 {
                x.copy_from(&vec![comm.rank() as f32 + round as f32; 500])?;
                match comm.rank() {
                    0 => comm.send_async(&x, 2).map(drop)?,
                    2 => comm.recv_async(&y, 0).map(drop)?,
                    _ => {}
                }
                if comm.rank() == 1 {
                    window.put(&x, 0, 0)?;
                    window.signal(0, 0, SignalUpdate::Add(1))?;
                }
                comm.all_reduce(&x, ReduceOp::Sum)?;
                assert_eq!(x.to_vec::<f32>()?, vec![3.0 + 3.0 * round as f32; 500]);
                match comm.rank() {
                    2 => assert_eq!(y.to_vec::<f32>()?, vec![round as f32; 500]),
                    0 => {
                        let put = window.tensor().to_vec::<f32>()?;
                        assert_eq!(put, vec![1.0 + round as f32; 500]);
                    }
                    _ => {}
                }
                comm.barrier()?;
            }
            Ok(())
        }) {
            result.expect("every rank");
        }
        assert_eq!(fake.launch_count(c"send"), 3);
        assert_eq!(fake.launch_count(c"window_put"), 3);
        assert_eq!(fake.launch_count(c"send__grid"), 0);
    });
}

#[test]
fn communicators_have_grids_of_their_own() {
    let test = "communicators_have_grids_of_their_own";
    on_fake(test, Image::There, &[], || {
        for result in run(4, &multi_rank_grid(TEST_TIMEOUT), |comm| {
            let dup = comm.dup()?;
            let pair = [comm.rank() / 2 * 2, comm.rank() / 2 * 2 + 1];
            let pair = comm.split(&pair, "pair")?.expect("in a pair");
            let sum = |comm: &Communicator| -> Result<f32> {
                let x = comm.alloc(DType::F32, 10)?;
                x.copy_from(&[1f32; 10])?;
                comm.all_reduce(&x, ReduceOp::Sum)?;
                Ok(x.to_vec::<f32>()?[9])
            };
            for _ in 0..5 {
                assert_eq!((sum(&comm)?, sum(&pair)?, sum(&dup)?), (4.0, 2.0, 4.0));
            }
            Ok(())
        }) {
            result.expect("every rank");
        }
    });
}

#[test]
fn a_rank_that_never_launches_is_named() {
    let test = "a_rank_that_never_launches_is_named";
    on_fake(test, Image::There, &[], || {
        let results = run(3, &multi_rank_grid(SHORT), |comm| {
            let x = comm.alloc(DType::F32, 10)?;
            comm.all_reduce(&x, ReduceOp::Sum)?;
            let began = Instant::now();
            let error = if comm.rank() == 1 {
                while comm.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                comm.failure().expect("one")
            } else {
                comm.all_reduce(&x, ReduceOp::Sum).expect_err("rank 1")
            };
            let again = comm.barrier().expect_err("it stays failed").to_string();
            Ok((error.to_string(), again, began.elapsed()))
        });
        for result in results {
            let (error, again, took) = result.expect("joined");
            assert!(
                error.contains(
                    "rank 1 of 3 did not launch within 0.7 s; another rank launched all_reduce"
                ),
                "{error}"
            );
            assert_eq!(again, error);
            assert!(took < SOON, "{took:?}");
        }
        works(3, &multi_rank_grid(TEST_TIMEOUT));
    });
}

#[test]
fn a_call_has_a_time_out_of_its_own() {
    let test = "a_call_has_a_time_out_of_its_own";
    on_fake(test, Image::There, &[], || {
        for result in run(2, &multi_rank_grid(TEST_TIMEOUT), |comm| {
            comm.barrier()?;
            if comm.rank() == 1 {
                while comm.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return Ok(comm.failure().expect("one").to_string());
            }
            let hurried = comm.with_timeout(SHORT);
            Ok(hurried.barrier().expect_err("rank 1").to_string())
        }) {
            let error = result.expect("joined");
            assert!(error.contains("did not launch within 0.7 s"), "{error}");
        }
    });
}

#[test]
fn waiting_ranks_get_aborts_and_failures_of_other_ranks() {
    let test = "waiting_ranks_get_aborts_and_failures_of_other_ranks";
    on_fake(test, Image::There, &[], || {
        // Rank 1 aborts while rank 0 waits.
        let barrier = Barrier::new(2);
        for result in run(2, &multi_rank_grid(TEST_TIMEOUT), |comm| {
            comm.barrier()?;
            barrier.wait();
            let began = Instant::now();
            if comm.rank() == 1 {
                std::thread::sleep(Duration::from_millis(100));
                comm.abort();
                return Ok((comm.failure().expect("aborted"), began.elapsed()));
            }
            let error = comm.barrier().expect_err("rank 1 aborts");
            Ok((error, began.elapsed()))
        }) {
            let (error, took) = result.expect("joined");
            assert!(error.to_string().contains("aborted"), "{error}");
            assert!(took < SOON, "{took:?}");
        }
        // The kernel of another rank fails while this rank waits for that rank in the grid.
        for result in run(3, &multi_rank_grid(TEST_TIMEOUT), |comm| {
            let x = comm.alloc(DType::F32, 1 << 16)?;
            comm.barrier()?;
            let began = Instant::now();
            let error = if comm.rank() == 0 {
                let hurried = comm.with_timeout(SHORT);
                hurried.recv(&x, 1).expect_err("no rank sends")
            } else {
                comm.barrier().expect_err("rank 0 has failed")
            };
            Ok((error, began.elapsed()))
        }) {
            let (error, took) = result.expect("joined");
            let Error::Timeout(failure) = &error else {
                panic!("{error}");
            };
            assert_eq!(failure.rank, 1, "{error}");
            assert!(took < SOON, "{took:?}");
        }
        works(2, &multi_rank_grid(TEST_TIMEOUT));
    });
}

#[test]
fn different_calls_are_reported_at_once() {
    let test = "different_calls_are_reported_at_once";
    on_fake(test, Image::There, &[], || {
        for result in run(3, &multi_rank_grid(TEST_TIMEOUT), |comm| {
            let x = comm.alloc(DType::F32, 10)?;
            let began = Instant::now();
            let failed = if comm.rank() == 2 {
                comm.barrier()
            } else {
                comm.all_reduce(&x, ReduceOp::Sum)
            };
            Ok((failed.expect_err("different").to_string(), began.elapsed()))
        }) {
            let (error, took) = result.expect("joined");
            assert!(
                error.contains("launch different things") && error.contains("rank 2"),
                "{error}"
            );
            assert!(error.contains("all_reduce") && error.contains("barrier"));
            assert!(took < SOON, "{took:?}");
        }
        works(3, &multi_rank_grid(TEST_TIMEOUT));
    });
}

#[test]
fn captures_are_refused() {
    on_fake("captures_are_refused", Image::There, &[], || {
        for result in run(2, &multi_rank_grid(TEST_TIMEOUT), |comm| {
            let x = comm.alloc(DType::F32, 10)?;
            x.copy_from(&[1f32; 10])?;
            comm.stream().begin_capture()?;
            let refused = comm.all_reduce_async(&x, ReduceOp::Sum);
            comm.stream().end_capture()?;
            comm.all_reduce(&x, ReduceOp::Sum)?;
            assert_eq!(x.to_vec::<f32>()?, [2.0; 10]);
            Ok(refused.expect_err("a capture").to_string())
        }) {
            let error = result.expect("every rank");
            assert!(error.contains("stream is being captured"), "{error}");
            assert!(error.contains("launch eagerly"), "{error}");
        }
    });
}

/// Returns the error that each rank gets when it creates a communicator.
fn refusals(size: u32, options: &Options) -> Vec<String> {
    let results = run(size, options, |_| Ok(()));
    let errors = results.into_iter().map(|result| result.expect_err("no"));
    errors.map(|error| error.to_string()).collect()
}

#[test]
fn blocks_that_a_grid_cannot_hold_are_refused() {
    let test = "blocks_that_a_grid_cannot_hold_are_refused";
    // Each of the eight SMs holds one block of 512 threads.
    let environment = [("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", "8")];
    on_fake(test, Image::There, &environment, || {
        for error in refusals(5, &multi_rank_grid(TEST_TIMEOUT)) {
            assert!(
                error.contains("a multi-rank grid of 5 ranks with 2 blocks of 512 threads"),
                "{error}"
            );
            assert!(error.contains("holds 8 such blocks"), "{error}");
            assert!(error.contains("__grid at once"), "{error}");
        }
        works(4, &multi_rank_grid(TEST_TIMEOUT));
    });
}

#[test]
fn large_launches_have_the_blocks_that_a_grid_holds() {
    let test = "large_launches_have_the_blocks_that_a_grid_holds";
    // Each of the eight SMs holds one block, so that each rank has four of the 32.
    let environment = [("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", "8")];
    on_fake(test, Image::There, &environment, || {
        let options = multi_rank_grid(TEST_TIMEOUT).large_blocks(32);
        for result in run(2, &options, |comm| {
            assert_eq!(comm.options().large_blocks, 4);
            let count = (4 << 20) / 4;
            let x = comm.alloc(DType::F32, count)?;
            x.copy_from(&vec![1f32; count])?;
            comm.all_reduce(&x, ReduceOp::Sum)?;
            x.to_vec::<f32>()
        }) {
            let sums = result.expect("every rank");
            assert!(sums.iter().all(|&sum| sum == 2.0));
        }
    });
}

#[test]
fn ranks_in_processes_are_refused() {
    let test = "ranks_in_processes_are_refused";
    if role().as_deref() == Some("rank") {
        let made = new_comm("fusewire", device(), "apart", multi_rank_grid(TEST_TIMEOUT));
        let error = made.map(drop).expect_err("another process");
        report(error.to_string().replace('\n', " "));
        return;
    }
    on_fake(test, Image::There, &[], || {
        let mut ranks = Ranks::start(test, "rank", 2, Host::Parent, &[]);
        for process in &mut ranks.processes {
            let error = process.next_report(TEST_TIMEOUT).expect("an error");
            assert!(error.contains("threads of one process"), "{error}");
            assert!(error.contains("rank 0 is in process"), "{error}");
        }
        ranks.succeed(TEST_TIMEOUT).expect("clean ends");
    });
}

#[test]
fn unsupported_communicators_are_refused() {
    on_fake(
        "unsupported_communicators_are_refused",
        Image::There,
        &[],
        || {
            let options = multi_rank_grid(TEST_TIMEOUT);
            let on_cpu = run_threads_on(Device::Cpu, "fusewire", 2, &options, |_| Ok(()));
            for result in on_cpu {
                let error = result.expect_err("the CPU").to_string();
                assert!(error.contains("the device is the CPU"), "{error}");
            }
            // Only rank 0 selects the mode.
            let store: std::sync::Arc<dyn fusewire::store::Store> =
                std::sync::Arc::new(fusewire::store::MemoryStore::new());
            let make = |rank: u32| {
                let mut options = match rank {
                    0 => multi_rank_grid(SOON),
                    _ => self::options(GridMode::Separate, SOON),
                };
                options.store = Some(std::sync::Arc::clone(&store));
                options.rank_size = Some((rank, 2));
                options.abort_process_on_timeout_or_error = Some(false);
                new_comm("fusewire", device(), "mixed", options).map(drop)
            };
            std::thread::scope(|scope| {
                let other = scope.spawn(|| make(1));
                for made in [make(0), other.join().expect("no panic")] {
                    let error = made.expect_err("ranks differ").to_string();
                    assert!(error.contains("other options"), "{error}");
                }
            });
        },
    );
}

#[test]
fn an_image_of_other_forms_is_refused() {
    let test = "an_image_of_other_forms_is_refused";
    on_fake(test, Image::Ordinary, &[], || {
        for error in refusals(2, &multi_rank_grid(TEST_TIMEOUT)) {
            assert!(error.contains("it lacks all_reduce"), "{error}");
            assert!(
                error.contains("build --multi-rank-grid --target sm_90"),
                "{error}"
            );
        }
        // Communicators with separate launches do not need the image.
        works(2, &options(GridMode::Separate, TEST_TIMEOUT));
    });
}

#[test]
fn an_image_of_other_sources_is_refused() {
    let test = "an_image_of_other_sources_is_refused";
    on_fake(test, Image::Stale, &[], || {
        for error in refusals(2, &multi_rank_grid(TEST_TIMEOUT)) {
            assert!(error.contains("made from other sources"), "{error}");
            assert!(
                error.contains("build --multi-rank-grid --target sm_90"),
                "{error}"
            );
        }
    });
}

#[test]
fn a_missing_image_is_reported() {
    if role().as_deref() == Some("absent") {
        for error in refusals(2, &multi_rank_grid(TEST_TIMEOUT)) {
            assert!(
                error.contains("fusewire-kernels-multi-rank-grid: there is none for sm_90"),
                "{error}"
            );
            assert!(
                error.contains(
                    "`fusewire-build build --multi-rank-grid --target sm_90 --out FOLDER`"
                ),
                "{error}"
            );
        }
        works(2, &options(GridMode::Separate, TEST_TIMEOUT));
        println!("absent: reported");
        return;
    }
    // The folder is outside cargo's target folder, because cargo's folder may contain a built
    // image.
    let folder = tempfile::tempdir().expect("a folder");
    fusewire_cuda_fake_library::install(folder.path()).expect("the fake, built with this test");
    let copy = folder.path().join("multi_rank_grid");
    std::fs::copy(std::env::current_exe().expect("this binary"), &copy).expect("a copy");
    let output = std::process::Command::new(copy)
        .args(["a_missing_image_is_reported", "--exact"])
        .arg("--nocapture")
        .env("FUSEWIRE_TEST_ROLE", "absent")
        .env("FUSEWIRE_TEST_DEVICE", "cuda")
        .env("LD_LIBRARY_PATH", folder.path())
        .env_remove("FUSEWIRE_IMAGES")
        .output()
        .expect("the copy runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("absent: reported"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
