//! Runs the committed PTX images on the emulator: every kernel, with several ranks, targets and
//! schedulers; graphs, failures and invalid kernels.

use std::collections::BTreeSet;
use std::ffi::CString;

use fusewire::gpu::driver::Properties;
use fusewire::{Algorithm, DType, Error, ReduceOp};
use fusewire_kernels::KERNELS;
use fusewire_tests::device::{run_threads, separate_gpus, tensor};
use fusewire_tests::fake::Fake;
use fusewire_tests::mix::Mix;
use fusewire_tests::process::Host;
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{Processes, Setup, Threads};
use fusewire_tests::seeded_bugs::{LANES, SeededBug};

use super::{on_fake, options, run};

/// Environment of all tests: the emulator executes kernels on eight devices, with blocks of at most
/// 64 threads.
const EMULATED: [(&str, &str); 5] = [
    ("FUSEWIRE_FAKE_GPU", "ptx"),
    ("FUSEWIRE_CUDA_FAKE_DEVICES", "8"),
    ("FUSEWIRE_CUDA_FAKE_THREADS", "64"),
    ("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", "24"),
    ("FUSEWIRE_TEST_DEVICE", "cuda:each"),
];

/// Runs `body` in a child process on the emulator, with `environment`. `test` is the name of the
/// calling test in this module.
fn on_emulator(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    let all = [&EMULATED, environment].concat();
    on_fake(&format!("emulated::{test}"), &all, body);
}

/// Runs calls that launch every kernel of the library, with 2, 3, 4 and 8 ranks. Results must have
/// the bits of the reference, which are those of the CPU device. Kernels whose names `is_absent`
/// accepts are not launched.
fn every_kernel(is_absent: impl Fn(&str) -> bool) {
    for ranks in [2, 3, 4, 8] {
        run(&Threads, Setup::new(ranks), "core");
    }
    let replayed = Setup {
        mode: CallMode::Graph,
        blocks: 2,
        ..Setup::new(3)
    };
    run(&Threads, replayed, "core");
    run(&Threads, Setup::new(2), "types");
    run(&Threads, Setup::new(3), "norms");
    let gpus = separate_gpus().unwrap_or_default();
    if gpus.iter().all(|gpu: &Properties| gpu.multicast) {
        for ranks in [2, 3, 4, 8] {
            let setup = Setup {
                algorithm: Algorithm::Nvls,
                ..Setup::new(ranks)
            };
            run(&Threads, setup, "nvls");
        }
    }
    mix();
    let fake = Fake::open().expect("the fake");
    let count = |name: &str| fake.launch_count(&CString::new(name).expect("a name"));
    let kernels = KERNELS.iter().copied().flatten().map(|kernel| kernel.name);
    let missing: BTreeSet<&str> = kernels
        .filter(|name| !is_absent(name) && count(name) == 0)
        .collect();
    assert!(missing.is_empty(), "kernels that were not launched: {missing:?}");
}

/// Issues all operations on three ranks, eagerly and by replays of a graph.
fn mix() {
    for result in run_threads(3, &options(), |comm| {
        comm.warm_up()?;
        let mix = Mix::new(&comm)?;
        comm.stream().begin_capture()?;
        mix.issue(&comm)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        for round in 0..4 {
            mix.fill(round)?;
            if round % 2 == 0 {
                graph.run(comm.stream())?;
            } else {
                mix.issue(&comm)?;
                comm.synchronize()?;
            }
            mix.check(round)?;
        }
        Ok(())
    }) {
        result.expect("all ranks");
    }
}

#[test]
fn every_kernel_of_sm_90() {
    let environment = [("FUSEWIRE_CUDA_FAKE_MULTICAST", "1")];
    on_emulator("every_kernel_of_sm_90", &environment, || {
        every_kernel(|_| false);
    });
}

#[test]
fn every_kernel_of_sm_80() {
    let environment = [("FUSEWIRE_CUDA_FAKE_SM", "80")];
    on_emulator("every_kernel_of_sm_80", &environment, || {
        // Multicast objects need sm_90.
        every_kernel(|name| name.contains("_nvls"));
    });
}
