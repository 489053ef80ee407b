//! Tests ranks that installed launchers start: `mpirun` without a store address, and `torchrun`
//! with both kinds of store. If a launcher is missing, its tests are skipped, or fail if
//! `FUSEWIRE_REQUIRE` names `mpi` or `torch`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fusewire::{Communicator, Device, Options, ReduceOp};
use fusewire_tests::process::{child_arguments, report, role};
use fusewire_tests::skip::skip;

/// Runs one rank that a launcher has started. The rank creates `times` communicators in sequence to
/// check that a later rendezvous does not find the keys of an earlier rendezvous.
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

/// Environment variables of an outer job, which the started launchers must not inherit.
const OUTER: [&str; 6] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "FUSEWIRE_STORE_SECRET",
];

/// Runs `launcher` with test `test` of this binary. Panics if a rank does not report.
fn launch(launcher: &mut Command, test: &str, ranks: u32, times: u32) {
    let output = start(launcher, test);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    for call in 0..times {
        for rank in 0..ranks {
            let line = format!("{call}: rank {rank} of {ranks}");
            assert!(said.contains(&line), "{line} is not in:\n{said}");
        }
    }
}

/// Runs `launcher` with test `test` of this binary.
fn start(launcher: &mut Command, test: &str) -> Output {
    for name in OUTER {
        launcher.env_remove(name);
    }
    launcher
        .arg(std::env::current_exe().unwrap())
        .args(child_arguments(test))
        .env("FUSEWIRE_TEST_ROLE", "rank")
        .env("OMP_NUM_THREADS", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap()
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

/// Returns true if `mpirun` is installed. Skips the test otherwise.
fn has_mpirun() -> bool {
    let found = Command::new("mpirun").arg("--version").output().is_ok();
    if !found {
        skip("mpi", "there is no mpirun");
    }
    found
}

/// Returns the command `mpirun` of Open MPI with options for `ranks` ranks.
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

/// Returns the Python interpreters that have PyTorch. Skips the test if none has it.
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

/// Hydra (MPICH, Intel MPI) does not name the job, so ranks derive the name of their rendezvous
/// file from Hydra's proxy process. The test emulates the proxy with a copy of the shell under the
/// proxy's name, which sets Hydra's variables. Rank 2 runs in a second shell below the proxy.
#[test]
fn hydras_ranks_without_an_address() {
    const TEST: &str = "hydras_ranks_without_an_address";
    const START: &str = r#"
        export PMI_SIZE=3 MPI_LOCALNRANKS=3
        for rank in 0 1; do
            PMI_RANK=$rank MPI_LOCALRANKID=$rank "$@" &
        done
        PMI_RANK=2 MPI_LOCALRANKID=2 sh -c '"$@"; exit $?' sh "$@" || exit
        wait"#;
    if role().is_some() {
        return rank(2);
    }
    let runtime = PathBuf::from(format!("/tmp/fusewire-hydra-{}", std::process::id()));
    fs::create_dir(&runtime).unwrap();
    let proxy = runtime.join("hydra_pmi_proxy");
    // In a process of its own: a process that another test starts meanwhile would inherit the file
    // open for writing, and the program could not start ("text file busy").
    let copied = Command::new("cp").arg("/bin/sh").arg(&proxy).status();
    assert!(copied.unwrap().success());
    let mut launcher = Command::new(&proxy);
    launcher
        .args(["-c", START, "sh"])
        .env("XDG_RUNTIME_DIR", &runtime);
    launch(&mut launcher, TEST, 3, 2);
    fs::remove_file(proxy).unwrap();
    let left: Vec<_> = fs::read_dir(&runtime).unwrap().collect();
    fs::remove_dir_all(&runtime).unwrap();
    assert!(left.is_empty(), "{left:?}");
}

/// Tests Hydra if MPICH is installed.
#[test]
fn mpiexec_hydra_without_an_address() {
    if role().is_some() {
        return rank(2);
    }
    let hydra = "mpiexec.hydra";
    if Command::new(hydra).arg("--version").output().is_err() {
        return skip("mpich", "there is no mpiexec.hydra");
    }
    let mut launcher = Command::new(hydra);
    launcher.args(["-n", "2"]);
    launch(&mut launcher, "mpiexec_hydra_without_an_address", 2, 2);
}

/// Returns the arguments with which an interpreter runs `torchrun` with `count` workers.
fn workers(count: u32, logs: &Path) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = ["-m", "torch.distributed.run", "--no_python"]
        // PyTorch 1.13 with Python 3.11 accepts neither 0 nor 3 for these options.
        .into_iter()
        .chain(["--redirects=1", "--tee=2", "--log_dir"])
        .map(OsString::from)
        .collect();
    arguments.push(logs.into());
    arguments.push(format!("--nproc_per_node={count}").into());
    arguments
}

/// Creates a directory for the logs of `torchrun`.
fn logs(test: &str) -> PathBuf {
    let logs = PathBuf::from(format!(
        "/tmp/fusewire-torchrun-{}-{test}",
        std::process::id()
    ));
    fs::create_dir(&logs).unwrap();
    logs
}

/// Runs `python -m torch.distributed.run` with every interpreter that has PyTorch.
fn torchrun(test: &str, options: &[&str], times: u32) {
    if role().is_some() {
        return rank(times);
    }
    for python in pythons() {
        let logs = logs(test);
        let mut launcher = Command::new(&python);
        launcher.args(workers(4, &logs)).args(options);
        launch(&mut launcher, test, 4, times);
        fs::remove_dir_all(&logs).unwrap();
    }
}

/// Returns a port that was free at the time of the call.
fn free_port() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

#[test]
#[ignore = "starts PyTorch for a case much like the next ones; run by `.ci/run test-long`"]
fn torchrun_with_the_store_of_its_agent() {
    let port = free_port();
    let options = ["--master_addr=127.0.0.1", "--master_port", &port];
    torchrun("torchrun_with_the_store_of_its_agent", &options, 2);
}

#[test]
fn torchrun_with_a_rendezvous() {
    let options = ["--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"];
    // Rank 0 serves the store until it exits, so there is only one rendezvous.
    torchrun("torchrun_with_a_rendezvous", &options, 1);
}

/// Both workers inherit variables of `mpirun` that name rank 0 of 1. The variables of `torchrun`
/// take precedence.
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
        let logs = logs(TEST);
        let mut launcher = mpirun(1);
        launcher.arg(&python).args(workers(2, &logs)).args([
            "--master_addr=127.0.0.1",
            "--master_port",
            &free_port(),
        ]);
        launch(&mut launcher, TEST, 2, 1);
        fs::remove_dir_all(&logs).unwrap();
    }
}

/// Neither the killed rank nor the other ranks, which `mpirun` then kills, can remove files.
/// Nevertheless, no file may be left.
#[test]
fn mpirun_with_a_killed_rank_leaves_no_file() {
    const TEST: &str = "mpirun_with_a_killed_rank_leaves_no_file";
    if role().is_some() {
        let comm = Communicator::from_env(Device::Cpu, Options::default()).unwrap();
        report("joined");
        if comm.rank() == 1 {
            // SAFETY: kill accesses no memory.
            unsafe { libc::kill(std::process::id() as i32, libc::SIGKILL) };
        }
        let _ = comm.barrier();
        return;
    }
    if !has_mpirun() {
        return;
    }
    let runtime = PathBuf::from(format!("/tmp/fusewire-killed-{}", std::process::id()));
    fs::create_dir(&runtime).unwrap();
    let mut launcher = mpirun(2);
    launcher.env("XDG_RUNTIME_DIR", &runtime);
    let output = start(&mut launcher, TEST);
    let ours = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("fusewire");
    let left: Vec<_> = fs::read_dir(&runtime)
        .unwrap()
        .flatten()
        .filter(ours)
        .collect();
    fs::remove_dir_all(&runtime).unwrap();
    let said = text(&output);
    assert!(
        !output.status.success() && said.contains("joined"),
        "{said}"
    );
    assert!(left.is_empty(), "{left:?}");
}
