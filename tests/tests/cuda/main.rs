//! Tests the CUDA device on a machine without a GPU. Each test runs in a child process in which the
//! executing fake of the driver replaces `libcuda.so.1`.

mod calls;
mod emulated;
mod mutants;
mod peers;
mod several;
mod shapes;
mod streams;

use core::time::Duration;
use std::path::Path;
use std::time::Instant;

use fusewire::{
    CallOptions, DType, Device, Error, Norm, Options, ReduceOp, Tensor, WindowOptions,
    run_threads_on,
};
use fusewire_tests::device::run_threads;
use fusewire_tests::mix::Mix;
use fusewire_tests::oracle;
use fusewire_tests::process::{Host, report, role, start};
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{ALGORITHMS, Processes, Runner, Setup, Threads};

const TEST_TIMEOUT: Duration = Duration::from_secs(240);

/// Runs `body` in a child process on the fake, with `environment`. `test` is the name of the
/// calling test.
pub(crate) fn on_fake(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if role().as_deref() == Some("fake") {
        assert!(fusewire_tests::device().is_gpu());
        body();
        report("done");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let all = fake_environment(folder.path(), environment);
    let started = Instant::now();
    let mut child = start(test, "fake", &all);
    let said = child.next_report(TEST_TIMEOUT);
    assert_eq!(said.as_deref(), Ok("done"), "{test}");
    child
        .succeed(TEST_TIMEOUT)
        .expect("success after its report");
    println!("{test}: {:.1} s", started.elapsed().as_secs_f64());
}

/// Installs the fake in `folder`. Returns the environment of a child process that uses it.
fn fake_environment(folder: &Path, environment: &[(&str, &str)]) -> Vec<(String, String)> {
    fusewire_cuda_fake_library::install(folder).expect("the fake, built with this test");
    // Stand-ins for the images that `fusewire-build` builds from user crates. They have no code for
    // the emulator.
    let emulated = environment.contains(&("FUSEWIRE_FAKE_GPU", "ptx"));
    let stand_ins = [
        ("vocab_argmax.sm_90.ptx", "vocab_argmax"),
        ("seeded-bugs.sm_80.ptx", "seeded_bugs"),
    ];
    for (name, kernels) in stand_ins.into_iter().filter(|_| !emulated) {
        let target = if name.contains("sm_90") { 90 } else { 80 };
        let image = fusewire_cuda_fake_library::stand_in(
            fusewire_cuda_fake_library::kernels_of(kernels),
            target,
        );
        std::fs::write(folder.join(name), image).expect("an image");
    }
    let path = folder.display().to_string();
    let mut all = vec![
        ("LD_LIBRARY_PATH".to_owned(), path.clone()),
        ("FUSEWIRE_IMAGES".to_owned(), path),
        ("FUSEWIRE_TEST_DEVICE".to_owned(), "cuda".to_owned()),
        // The value that `fusewire run` sets.
        ("CUDA_DEVICE_MAX_CONNECTIONS".to_owned(), "32".to_owned()),
    ];
    for (name, value) in environment {
        all.push(((*name).to_owned(), (*value).to_owned()));
    }
    all
}

fn run(runner: &dyn Runner, setup: Setup, list: &str) {
    match runner.run(&setup, list) {
        Ok(calls) => println!("{list}: {calls} calls a rank, {setup:?}"),
        Err(wrong) => panic!("{wrong}"),
    }
}

#[test]
fn ranks_as_threads() {
    on_fake("ranks_as_threads", &[], || {
        for ranks in [1, 2, 3, 4, 8] {
            run(&Threads, Setup::new(ranks), "core");
        }
    });
}

#[test]
fn blocks_norms_and_replays() {
    on_fake("blocks_norms_and_replays", &[], || {
        let setup = Setup {
            blocks: 3,
            ..Setup::new(2)
        };
        run(&Threads, setup, "core");
        let setup = Setup {
            mode: CallMode::Graph,
            staging: 32 << 10,
            ..Setup::new(2)
        };
        run(&Threads, setup, "core");
        run(&Threads, setup, "norms");
    });
}

#[test]
fn ranks_as_processes() {
    if Processes::child() {
        return;
    }
    on_fake("ranks_as_processes", &[], || {
        let runner = Processes {
            test: "ranks_as_processes",
            host: Host::Parent,
        };
        run(&runner, Setup::new(2), "core");
    });
}

/// Returns options with one block, which the user kernels require.
pub(crate) fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    options.blocks = 1;
    options
}

#[test]
fn a_mix_of_operations_eager_and_replayed() {
    on_fake("a_mix_of_operations_eager_and_replayed", &[], || {
        for has_argmax in mix(30) {
            assert!(has_argmax, "the image of a user's crate is found");
        }
    });
}

/// Issues all operations on three ranks in `rounds` rounds, eagerly and by replays of a graph.
/// Returns for each rank whether the image with the kernel `vocab_argmax` was found.
pub(crate) fn mix(rounds: u64) -> Vec<bool> {
    let results = run_threads(3, &options(), |comm| {
        comm.warm_up()?;
        let mix = Mix::new(&comm)?;
        comm.stream().begin_capture()?;
        mix.issue(&comm)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        for round in 0..rounds {
            mix.fill(round)?;
            if round % 2 == 0 {
                graph.run(comm.stream())?;
            } else {
                mix.issue(&comm)?;
                comm.synchronize()?;
            }
            mix.check(round)?;
        }
        Ok(mix.has_argmax())
    });
    let results = results.into_iter();
    results.map(|result| result.expect("all ranks")).collect()
}

#[test]
fn a_rank_that_never_launches_is_named() {
    on_fake(
        "a_rank_that_never_launches_is_named",
        &[],
        rank_1_never_launches,
    );
}

/// Runs three ranks, of which rank 1 does not launch an operation. The others must name rank 1, and
/// the next communicator must work.
pub(crate) fn rank_1_never_launches() {
    let mut options = options();
    options.timeout = Duration::from_millis(500);
    let barrier = std::sync::Barrier::new(3);
    let results = run_threads(3, &options, |comm| {
        let x = comm.alloc(DType::F32, 10)?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        barrier.wait();
        if comm.rank() == 1 {
            // This rank stays alive until the other ranks have returned their errors.
            barrier.wait();
            return Ok((comm.all_reduce(&x, ReduceOp::Sum), Duration::ZERO));
        }
        let began = Instant::now();
        let failed = comm.all_reduce(&x, ReduceOp::Sum);
        let took = began.elapsed();
        barrier.wait();
        Ok((failed, took))
    });
    for result in results {
        let (failed, took) = result.expect("joined");
        let error = failed.expect_err("rank 1 launches nothing");
        let Error::Timeout(failure) = &error else {
            panic!("{error}");
        };
        assert_eq!(failure.rank, 1, "{error}");
        assert!(error.to_string().contains("all_reduce"), "{error}");
        assert!(took < Duration::from_secs(10), "{took:?}");
    }
    for result in run_threads(3, &self::options(), |comm| {
        let x = comm.alloc(DType::F32, 10)?;
        x.copy_from(&[1f32; 10])?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        x.to_vec::<f32>()
    }) {
        assert_eq!(result.expect("the next communicator"), [3.0; 10]);
    }
}

/// Computes sums over three ranks on `device` by each algorithm. Returns the bytes of the results.
fn sums(device: Device, dtype: DType) -> Vec<Vec<u8>> {
    const COUNT: usize = 331;
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    let ranks = run_threads_on(device, "fusewire", 3, &options, |comm| {
        let (x, y) = (comm.alloc(dtype, COUNT)?, comm.alloc(dtype, COUNT)?);
        x.copy_from_bytes(&oracle::fill(dtype, comm.rank(), 9, COUNT))?;
        let mut all = Vec::new();
        for algorithm in ALGORITHMS {
            let by = comm.with_options(&CallOptions::new().hint("algorithm", algorithm.name()))?;
            by.all_reduce_into(&y, &x, ReduceOp::Sum)?;
            all.push(y.to_bytes()?);
        }
        Ok(all)
    });
    let ranks = ranks.into_iter().map(|rank| rank.expect("all ranks"));
    ranks.flatten().collect()
}

#[test]
fn sums_have_the_bits_of_the_cpu() {
    on_fake("sums_have_the_bits_of_the_cpu", &[], || {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            let gpu = sums(fusewire_tests::device(), dtype);
            let cpu = sums(Device::Cpu, dtype);
            assert_eq!(gpu.len(), 3 * ALGORITHMS.len());
            assert!(gpu.iter().all(|bits| *bits == gpu[0]), "{dtype:?}");
            assert_eq!(gpu, cpu, "{dtype:?}");
            assert!(gpu[0].iter().any(|byte| *byte != 0));
        }
    });
}

/// Calls that would access a GPU's memory from the CPU, or the other way round, are refused before
/// anything runs. Later calls succeed.
#[test]
fn tensors_of_another_device_are_refused() {
    on_fake("tensors_of_another_device_are_refused", &[], || {
        let gpu = fusewire_tests::device();
        for (device, other) in [(gpu, Device::Cpu), (Device::Cpu, gpu)] {
            let options = Options::default();
            for result in run_threads_on(device, "fusewire", 1, &options, |comm| {
                let foreign = Tensor::on_device(other, DType::F32, 8)?;
                let own = Tensor::on_device(device, DType::F32, 8)?;
                let counts = Tensor::on_device(other, DType::U64, 1)?;
                let window = comm.alloc_window(DType::F32, 8, WindowOptions::default())?;
                let weight = Tensor::on_device(device, DType::F32, 8)?;
                let norm = Norm::rms(&own, &foreign, &weight, 1e-5);
                let errors = [
                    comm.all_reduce(&foreign, ReduceOp::Sum),
                    comm.all_reduce_into_async(&own, &foreign, ReduceOp::Sum)
                        .map(drop),
                    comm.all_gather_v_single_async(&own, &own, &counts)
                        .map(drop),
                    comm.all_gather(core::slice::from_ref(&foreign), &own),
                    comm.batch_op_create().send(&foreign, 0),
                    window.put(&foreign, 0, 0),
                    window.get(&foreign, 0, 0),
                    comm.all_reduce_norm(&norm),
                ];
                for (index, result) in errors.into_iter().enumerate() {
                    let error = result.expect_err("another device").to_string();
                    assert!(error.contains("a tensor is on"), "{index}: {error}");
                }
                window.free()?;
                comm.all_reduce(&own, ReduceOp::Sum)
            }) {
                result.unwrap_or_else(|error| panic!("{device}: {error}"));
            }
        }
    });
}

/// An empty output may begin at the address of the input: the copies of slices in device memory
/// must stay apart.
#[test]
fn an_empty_slice_at_the_address_of_another_is_no_in_place_call() {
    let test = "an_empty_slice_at_the_address_of_another_is_no_in_place_call";
    on_fake(test, &[], || {
        const COUNT: usize = 100;
        for result in run_threads(2, &options(), |comm| {
            // Rank 0 sends all elements to rank 1, and receives none.
            let (sent, received) = [(COUNT, 0), (0, COUNT)][comm.rank() as usize];
            let peer = 1 - comm.rank() as usize;
            let splits = |count: usize| {
                let mut splits = [0; 2];
                splits[peer] = count as u64;
                splits
            };
            let mut memory = vec![comm.rank() as f32 + 1.0; COUNT];
            let (output, input) = memory.split_at_mut(received);
            comm.all_to_all_v_single(output, &*input, &splits(received), &splits(sent))?;
            assert!(memory.iter().all(|value| *value == 1.0));
            Ok(())
        }) {
            result.expect("both ranks");
        }
    });
}

#[test]
fn a_driver_with_a_fault_is_noticed_and_named() {
    let run = |environment: &[(&str, &str)]| {
        on_fake(
            "a_driver_with_a_fault_is_noticed_and_named",
            environment,
            faulty,
        );
    };
    if role().is_some() {
        return run(&[]);
    }
    // The children mostly wait for timeouts, so they run concurrently.
    std::thread::scope(|scope| {
        for (call, code, name) in [
            ("cuLaunchKernel:9", 719, "CUDA_ERROR_LAUNCH_FAILED"),
            ("cuMemcpyHtoDAsync_v2:12", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
            ("cuMemCreate:2", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
            ("cuEventRecord:4", 719, "CUDA_ERROR_LAUNCH_FAILED"),
        ] {
            scope.spawn(move || {
                let fault = format!("{call}={code}");
                run(&[("FUSEWIRE_CUDA_FAKE_FAIL", &fault), ("NAME", name)]);
            });
        }
    });
}

/// Runs in the child. One rank must report the failed driver call and the name of the error, all
/// ranks must return, and the next communicator must work.
fn faulty() {
    let fault = std::env::var("FUSEWIRE_CUDA_FAKE_FAIL").expect("set by the parent");
    let name = std::env::var("NAME").expect("set by the parent");
    let call = fault.split(['_', ':']).next().unwrap_or_default();
    let work = |options: &Options| {
        run_threads(2, options, |comm| {
            let x = comm.alloc(DType::F32, 100)?;
            x.copy_from(&[2f32; 100])?;
            for _ in 0..12 {
                comm.all_reduce(&x, ReduceOp::Average)?;
            }
            x.to_vec::<f32>()
        })
    };
    let mut short = options();
    short.timeout = Duration::from_secs(5);
    let results = work(&short);
    let errors: Vec<String> = results
        .iter()
        .filter_map(|result| Some(result.as_ref().err()?.to_string()))
        .collect();
    let named = |error: &&String| error.contains(call) && error.contains(&name);
    assert!(
        errors.iter().any(|error| named(&error)),
        "{fault}: {errors:?}"
    );
    for result in work(&options()) {
        assert_eq!(result.expect("only one call fails"), [2f32; 100]);
    }
}
