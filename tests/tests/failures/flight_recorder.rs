//! Tests dumps of the flight recorder. The library must write a dump automatically when a
//! communicator fails, and PyTorch's analyser must be able to read it.
//!
//! The analyser is `torch.distributed.flight_recorder.fr_trace` (PyTorch 2.10 or later), run by
//! `python3`. `FUSEWIRE_FR_TRACE` names a folder that is searched first. The analyser
//! needs no other part of PyTorch: the folder may have `torch/distributed/flight_recorder` of any
//! wheel, an empty `torch/__init__.py`, an empty `torch/distributed/__init__.py`, and `tabulate`.

use core::time::Duration;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use fusewire::{Communicator, DType, Error, Options, ReduceOp, Result};
use fusewire_tests::device::run_threads;
use fusewire_tests::process::{role, start};
use fusewire_tests::skip::skip;
use serde_json::{Value, json};

/// Time limit of the tests' waits, long enough for a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

fn options(timeout: Duration) -> Options {
    let mut options = Options::default();
    options.timeout = timeout;
    options
}

fn read(path: &Path) -> Value {
    let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_pickle::from_slice(&bytes, serde_pickle::DeOptions::new()).expect("a pickle")
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name())
        .map(|name| name.into_string().expect("a name"))
        .collect();
    names.sort();
    names
}

/// Returns the analyser's output for the dumps `fw_<rank>` in `folder`, or `None` if the analyser
/// is not installed.
fn fr_trace(folder: &Path, arguments: &[&str]) -> Option<String> {
    let run = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command
            .args(["-m", "torch.distributed.flight_recorder.fr_trace"])
            .args(arguments);
        if let Some(path) = std::env::var_os("FUSEWIRE_FR_TRACE") {
            command.env("PYTHONPATH", path);
        }
        command.output()
    };
    match run(&["--help"]) {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.trim().lines().last().unwrap_or_default().to_owned();
            skip("fr_trace", &format!("python3 has no fr_trace: {last}"));
            return None;
        }
        Err(error) => {
            skip("fr_trace", &format!("python3: {error}"));
            return None;
        }
    }
    let folder = folder.to_str().expect("a path");
    let output = run(&[&[folder, "-p", "fw_"], arguments].concat()).expect("python3 runs");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{said}");
    Some(said)
}

/// Runs in a child. Rank 1 does not call the second all_reduce, but queries the failure.
fn late() -> Result<()> {
    let ranks = run_threads(2, &options(Duration::from_millis(200)), |comm| {
        let mut x = [1f32; 16];
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
        if comm.rank() == 0 {
            let error = comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum);
            assert!(matches!(error, Err(Error::Timeout(_))), "{error:?}");
        }
        let started = Instant::now();
        while comm.failure().is_none() {
            assert!(started.elapsed() < TEST_TIMEOUT, "no failure was reported");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    ranks.into_iter().collect()
}

/// Runs [`late`] in a child process with `environment`.
fn run_late(test: &str, environment: &[(&str, String)]) {
    // Overrides these variables, because the caller's environment may set them.
    let mut all: Vec<_> = [
        "TORCHCOMM_FR_DUMP_TEMP_FILE",
        "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME",
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ]
    .map(|name| (name.to_owned(), String::new()))
    .into();
    // Also records the end time of short calls.
    all.push(("FUSEWIRE_FR_TIMING".to_owned(), "1".to_owned()));
    all.extend(
        environment
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone())),
    );
    start(test, "late", &all)
        .succeed(TEST_TIMEOUT)
        .expect("the child succeeds");
}

#[test]
fn a_failure_is_dumped_by_every_rank() {
    if role().is_some() {
        return late().expect("ranks");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("fw_").display().to_string();
    run_late(
        "flight_recorder::a_failure_is_dumped_by_every_rank",
        &[("TORCHCOMM_FR_DUMP_TEMP_FILE", prefix)],
    );
    assert_eq!(names(folder.path()), ["fw_0", "fw_1"]);
    let dumps = [0, 1].map(|rank| read(&folder.path().join(format!("fw_{rank}"))));
    let seen = dumps.each_ref().map(|dump| {
        let entries = dump["entries"].as_array().expect("entries");
        let entry = |entry: &Value| {
            json!([
                entry["collective_seq_id"],
                entry["profiling_name"],
                entry["state"],
                entry["time_discovered_completed_ns"].is_null(),
            ])
        };
        Value::from_iter(entries.iter().map(entry))
    });
    let done = json!([1, "nccl:all_reduce", "completed", false]);
    let incomplete = json!([2, "nccl:all_reduce", "started", true]);
    assert_eq!(seen, [json!([done, incomplete]), json!([done])]);
    for (dump, last) in dumps.iter().zip([2, 1]) {
        assert_eq!(dump["pg_status"]["0"]["last_enqueued_collective"], last);
        assert_eq!(dump["pg_status"]["0"]["last_completed_collective"], 1);
        let why = dump["fusewire"]["failures"]["threads"].as_str();
        assert!(why.is_some_and(|why| why.contains("rank 1 never entered")));
    }
    if let Some(said) = fr_trace(folder.path(), &[]) {
        assert!(
            said.contains("Not all ranks joining collective, sequence number: 2"),
            "{said}"
        );
        for part in [
            "missing ranks: {1}",
            "collective: nccl:all_reduce",
            "state: started",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}

#[test]
fn the_environment_names_the_file() {
    if role().is_some() {
        return late().expect("ranks");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).display().to_string();
    let run = |environment: &[(&str, String)]| {
        run_late(
            "flight_recorder::the_environment_names_the_file",
            environment,
        );
        let written = names(folder.path());
        for name in &written {
            let dump = read(&folder.path().join(name));
            assert_eq!(dump["version"], "2.10");
            fs::remove_file(folder.path().join(name)).expect("a file");
        }
        written
    };
    assert_eq!(
        run(&[("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", file("nccl_"))]),
        ["nccl_0", "nccl_1"]
    );
    assert_eq!(
        run(&[
            ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", file("nccl_")),
            ("TORCH_FR_DUMP_TEMP_FILE", file("torch_")),
        ]),
        ["torch_0", "torch_1"]
    );
    // With `TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME=1`, the file variable contains the whole file name,
    // without a rank at its end.
    assert_eq!(
        run(&[
            ("TORCH_FR_DUMP_TEMP_FILE", file("torch_")),
            ("TORCHCOMM_FR_DUMP_TEMP_FILE", file("whole")),
            ("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", "1".to_owned()),
        ]),
        ["whole"]
    );
    // Without a variable, no dump is written, not even in the child's working directory.
    assert_eq!(run(&[]), [""; 0]);
    assert!(!Path::new("0").exists() && !Path::new("1").exists());
    // A dump that cannot be written does not cause an error in the program.
    assert_eq!(
        run(&[("TORCHCOMM_FR_DUMP_TEMP_FILE", "/dev/null/fw_".to_owned())]),
        [""; 0]
    );
}

/// Runs every kind of operation, with lengths that differ by rank.
fn every_operation(comm: &Communicator) -> Result<()> {
    let (rank, size) = (comm.rank() as usize, comm.size() as usize);
    let mut x = [1f32; 12];
    let mut rows = vec![0f32; 12 * size];
    let root = 1;
    let is_root = comm.rank() == root;
    comm.all_reduce(&mut x[..], ReduceOp::Sum)?;
    comm.broadcast(&mut x[..], root)?;
    comm.reduce(&mut x[..], root, ReduceOp::Max)?;
    comm.all_gather_single(&mut rows[..], &x[..])?;
    comm.reduce_scatter_single(&mut x[..], &rows[..], ReduceOp::Sum)?;
    comm.scatter_single(&mut x[..], if is_root { &rows[..] } else { &[] }, root)?;
    comm.gather_single(if is_root { &mut rows[..] } else { &mut [] }, &x[..], root)?;
    let mut other = rows.clone();
    comm.all_to_all_single(&mut other[..], &rows[..])?;
    let counts: Vec<u64> = (1..=size as u64).collect();
    let total = counts.iter().sum::<u64>() as usize;
    let mut all = vec![0f32; total];
    comm.all_gather_v_single(&mut all[..], &x[..=rank], &counts)?;
    // Rank f sends f + 1 elements to every rank.
    let from = counts.clone();
    let to = vec![rank as u64 + 1; size];
    let mut received = vec![0f32; total];
    comm.all_to_all_v_single(&mut received[..], &rows[..(rank + 1) * size], &from, &to)?;
    // Sends and receives in a ring. Odd ranks receive first.
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    if rank % 2 == 0 {
        comm.send(&x[..], next as u32)?;
        comm.recv(&mut rows[..12], before as u32)?;
    } else {
        comm.recv(&mut rows[..12], before as u32)?;
        comm.send(&x[..], next as u32)?;
    }
    comm.barrier()?;
    let tensor = comm.alloc(DType::Bf16, 8)?;
    comm.stream().begin_capture()?;
    comm.all_reduce_async(&tensor, ReduceOp::Sum)?;
    comm.barrier_async()?;
    let graph = comm.stream().end_capture()?.instantiate()?;
    for _ in 0..2 {
        let launched = graph.launch(comm.stream())?;
        // This operation is enqueued while the replay may still run.
        let work = comm.all_reduce_async(&tensor, ReduceOp::Max)?;
        comm.stream().wait(launched, None)?;
        work.wait_blocking()?;
    }
    Ok(())
}

#[test]
fn the_analyser_finds_no_fault_in_a_correct_run() {
    let folder = tempfile::tempdir().expect("a folder");
    for rank in run_threads(4, &options(TEST_TIMEOUT), |comm| {
        every_operation(&comm)?;
        every_operation(&comm)?;
        comm.dump_flight_record_to(folder.path().join(format!("fw_{}", comm.rank())))
    }) {
        rank.expect("the rank succeeds");
    }
    if let Some(said) = fr_trace(folder.path(), &[]) {
        for fault in [
            "Not all ranks",
            "has errors",
            "ismatch",
            "coalesced end",
            "cannot decide",
        ] {
            assert!(!said.contains(fault), "{fault}: {said}");
        }
    }
    if let Some(said) = fr_trace(folder.path(), &["-j"]) {
        for part in [
            "Rank 3",
            "ALLGATHER_coalesced(",
            "send(s=0 d=1",
            "recv(s=3 d=0",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}

#[test]
fn the_analyser_names_the_rank_with_a_different_call() {
    let folder = tempfile::tempdir().expect("a folder");
    // All ranks wait for each other before the last operation. Otherwise, the failure could also
    // reach a rank that is still in the previous operation.
    let together = Barrier::new(3);
    for rank in run_threads(3, &options(TEST_TIMEOUT), |comm| {
        let mut x = [1f32; 4];
        every_operation(&comm)?;
        together.wait();
        let result = if comm.rank() == 2 {
            comm.broadcast(x.as_mut_slice(), 0)
        } else {
            comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)
        };
        assert!(matches!(result, Err(Error::Mismatch(_))), "{result:?}");
        comm.dump_flight_record_to(folder.path().join(format!("fw_{}", comm.rank())))
    }) {
        rank.expect("the rank writes");
    }
    let dump = read(&folder.path().join("fw_2"));
    let last = dump["entries"]
        .as_array()
        .and_then(|entries| entries.last());
    let last = last.expect("an entry");
    assert_eq!(last["profiling_name"], "nccl:broadcast");
    assert_eq!(last["fusewire"]["failed"], true);
    assert_eq!(last["state"], "started");
    assert_eq!(last["retired"], false);
    if let Some(said) = fr_trace(folder.path(), &[]) {
        let errors = format!("sequence number: {} has errors", last["collective_seq_id"]);
        for part in [
            errors.as_str(),
            "Culprit rank 2",
            "COLLECTIVE_TYPE_MISMATCH",
            "'all_reduce' does not match found collective type: 'broadcast'",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}

/// Rank 0 makes its call after the other ranks have failed, so the call is refused. The record of
/// rank 0 must still contain the call.
#[test]
fn the_analyser_compares_a_call_that_was_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let failed = Barrier::new(3);
    for rank in run_threads(3, &options(TEST_TIMEOUT), |comm| {
        let mut x = [1f32; 8];
        let count = if comm.rank() == 2 { 8 } else { 4 };
        if comm.rank() == 0 {
            failed.wait();
        }
        let result = comm.all_reduce(&mut x[..count], ReduceOp::Sum);
        assert!(matches!(result, Err(Error::Mismatch(_))), "{result:?}");
        if comm.rank() != 0 {
            failed.wait();
        }
        let again = comm.all_reduce(&mut x[..count], ReduceOp::Sum);
        assert!(again.is_err());
        comm.dump_flight_record_to(folder.path().join(format!("fw_{}", comm.rank())))
    }) {
        rank.expect("the rank writes");
    }
    for (rank, count) in [(0, 4), (1, 4), (2, 8)] {
        let dump = read(&folder.path().join(format!("fw_{rank}")));
        let entries = dump["entries"].as_array().expect("entries");
        assert_eq!(entries.len(), 1, "rank {rank}: {entries:?}");
        assert_eq!(entries[0]["profiling_name"], "nccl:all_reduce");
        assert_eq!(entries[0]["input_sizes"], json!([[count]]));
        let state = if rank == 0 { "scheduled" } else { "started" };
        assert_eq!(entries[0]["state"], state, "rank {rank}");
    }
    if let Some(said) = fr_trace(folder.path(), &[]) {
        assert!(said.contains("SIZE_OR_SYNTAX_MISMATCH"), "{said}");
        assert!(!said.contains("missing ranks"), "{said}");
    }
}

#[test]
fn the_analyser_names_a_send_without_a_receive() {
    let folder = tempfile::tempdir().expect("a folder");
    for rank in run_threads(3, &options(TEST_TIMEOUT), |comm| {
        comm.barrier()?;
        if comm.rank() == 2 {
            // The message is small, so the send returns without a receiver.
            comm.send(&[1i32; 4][..], 0)?;
        }
        comm.barrier()?;
        comm.dump_flight_record_to(folder.path().join(format!("fw_{}", comm.rank())))
    }) {
        rank.expect("the rank succeeds");
    }
    if let Some(said) = fr_trace(folder.path(), &[]) {
        for part in [
            "group info: threads.2to0",
            "missing ranks: {0}",
            "nccl:send 1->0",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains("all_reduce_barrier"), "{said}");
    }
}

#[test]
fn the_active_record_has_the_operations_that_have_not_completed() {
    let dumped = Barrier::new(2);
    for rank in run_threads(2, &options(TEST_TIMEOUT), |comm| {
        let entries = |text: &str| -> Vec<Value> {
            let dump: Value = serde_json::from_str(text).expect("JSON");
            dump["entries"].as_array().expect("entries").clone()
        };
        comm.barrier()?;
        let x = fusewire_tests::device::tensor(DType::F32, 4)?;
        if comm.rank() == 0 {
            let pending = [comm.recv_async(&x, 1)?, comm.barrier_async()?];
            let active = entries(&comm.dump_active_flight_record());
            assert_eq!(entries(&comm.dump_flight_record()).len(), 3);
            let names = active.iter().map(|entry| entry["profiling_name"].clone());
            let names = names.collect::<Vec<_>>();
            assert_eq!(names, ["nccl:recv 0<-1", "nccl:all_reduce_barrier"]);
            dumped.wait();
            pending.iter().try_for_each(|work| work.wait_blocking())?;
        } else {
            dumped.wait();
            comm.send(&x, 0)?;
            comm.barrier()?;
        }
        let all = comm.dump_active_flight_record();
        assert!(entries(&all).is_empty(), "{all}");
        Ok(())
    }) {
        rank.expect("the rank succeeds");
    }
}
