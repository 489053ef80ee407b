//! Ranks that real launchers start: `mpirun` without an address, and `torchrun` with its two kinds of
//! store. What is not installed is skipped; `FUSEWIRE_REQUIRE` may name `mpi` and `torch`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use fusewire::{Communicator, Device, Options, ReduceOp};
use fusewire_tests::process::{report, role};
use fusewire_tests::skip::skip;

/// One rank, as a launcher has started it, which joins the others `times` times in sequence: a
/// later rendezvous must not find keys of an earlier one.
fn rank(times: u32) {
    for call in 0..times {
        let mut options = Options::default();
        options.timeout = core::time::Duration::from_secs(60);
        let comm = Communicator::from_env(Device::Cpu, options).unwrap();
        let mut x = [comm.rank() as f32 + 1.0; 3];
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum).unwrap();
        let n = comm.size() as f32;
        assert_eq!(x, [n * (n + 1.0) / 2.0; 3]);
        report(format_args!(
            "{call}: rank {} of {}",
            comm.rank(),
            comm.size()
        ));
    }
}

/// Runs `launcher` on this binary's test `test`, and requires that every rank came.
fn launch(launcher: &mut Command, test: &str, ranks: u32, times: u32) {
    let output = launcher
        .arg(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env("FUSEWIRE_TEST_ROLE", "rank")
        .env("OMP_NUM_THREADS", "1")
        .env_remove("MASTER_ADDR")
        .env_remove("MASTER_PORT")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for call in 0..times {
        for rank in 0..ranks {
            let line = format!("{call}: rank {rank} of {ranks}");
            assert!(said.contains(&line), "{line} is not in:\n{said}");
        }
    }
}

fn text(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .map(String::from_utf8_lossy)
        .concat()
}

#[test]
fn mpirun_without_an_address() {
    if role().is_some() {
        return rank(2);
    }
    if !has_mpirun() {
        return;
    }
    let runtime = PathBuf::from(format!("/tmp/fusewire-runtime-{}", std::process::id()));
    fs::create_dir(&runtime).unwrap();
    let mut mpirun = mpirun(2);
    mpirun.env("XDG_RUNTIME_DIR", &runtime);
    launch(&mut mpirun, "mpirun_without_an_address", 2, 2);
    let left: Vec<_> = fs::read_dir(&runtime).unwrap().collect();
    fs::remove_dir_all(&runtime).unwrap();
    assert!(left.is_empty(), "{left:?}");
}

/// Returns whether there is an `mpirun`; else the test is skipped.
fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").output().is_ok();
    if !found {
        skip("mpi", "there is no mpirun");
    }
    found
}

/// `mpirun` of Open MPI with its options for `ranks` ranks.
fn mpirun(ranks: u32) -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun
        .args([
            "--oversubscribe",
            "--mca",
            "btl_vader_single_copy_mechanism",
            "none",
        ])
        .args(["-n", &ranks.to_string()])
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    mpirun
}

/// Every interpreter that has PyTorch; without one the test is skipped.
fn pythons() -> Vec<String> {
    let named = std::env::var("FUSEWIRE_PYTHON").ok();
    let found: Vec<_> = named
        .into_iter()
        .chain(["/usr/bin/python3".to_owned()])
        .filter(|python| {
            let has_torch = Command::new(python).args(["-c", "import torch"]).output();
            has_torch.is_ok_and(|output| output.status.success())
        })
        .collect();
    if found.is_empty() {
        skip(
            "torch",
            "no interpreter of FUSEWIRE_PYTHON or /usr/bin/python3 imports torch",
        );
    }
    found
}

/// `python -m torch.distributed.run` of every interpreter that has it.
fn torchrun(test: &str, options: &[&str], times: u32) {
    if role().is_some() {
        return rank(times);
    }
    for python in pythons() {
        let logs = PathBuf::from(format!(
            "/tmp/fusewire-torchrun-{}-{test}",
            std::process::id()
        ));
        fs::create_dir(&logs).unwrap();
        let mut launcher = Command::new(&python);
        launcher
            .args([
                "-m",
                "torch.distributed.run",
                "--nproc_per_node=4",
                "--no_python",
            ])
            // Version 1.13 with Python 3.11 takes neither 0 nor 3 for these.
            .args(["--redirects=1", "--tee=2"])
            .arg("--log_dir")
            .arg(&logs)
            .args(options);
        launch(&mut launcher, test, 4, times);
        fs::remove_dir_all(&logs).unwrap();
    }
}

/// A port that was free a moment ago.
fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

#[test]
fn torchrun_with_the_store_of_its_agent() {
    let port = free_port();
    let options = ["--master_addr=127.0.0.1", "--master_port", &port];
    torchrun("torchrun_with_the_store_of_its_agent", &options, 2);
}

#[test]
fn torchrun_with_a_rendezvous() {
    let options = ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"];
    // Rank 0 hosts the store, and takes it along when it leaves.
    torchrun("torchrun_with_a_rendezvous", &options, 1);
}

/// The variables of `mpirun` say rank 0 of 1 in both workers: those of torchrun count.
#[test]
fn torchrun_below_mpirun_starts_its_own_ranks() {
    const TEST: &str = "torchrun_below_mpirun_starts_its_own_ranks";
    if role().is_some() {
        return rank(1);
    }
    if !has_mpirun() {
        return;
    }
    for python in pythons() {
        let mut launcher = mpirun(1);
        launcher
            .args([&python, "-m", "torch.distributed.run"])
            .args([
                "--nproc_per_node=2",
                "--no_python",
                "--master_addr=127.0.0.1",
            ])
            .args(["--master_port", &free_port()]);
        launch(&mut launcher, TEST, 2, 1);
    }
}
