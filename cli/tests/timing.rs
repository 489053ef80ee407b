//! Tests how `fusewire perf` measures times: by the host's clock on the CPU, and by events around
//! batches of operations on a GPU, for which the fake of the CUDA driver stands.

use std::path::Path;
use std::process::Command;

use serde_json::{Map, Value};

/// A run of `fusewire perf`.
struct Run {
    /// Standard error, which contains the table.
    table: String,
    /// The rows of the JSON.
    rows: Vec<Map<String, Value>>,
    /// Number of kernel launches, including launches that were captured.
    launches: u64,
    /// Number of launched graphs.
    replays: u64,
}

impl Run {
    fn row(&self) -> &Map<String, Value> {
        assert_eq!(self.rows.len(), 1, "{}", self.table);
        &self.rows[0]
    }
}

/// Returns a command that runs `fusewire perf` with two ranks as threads. Its driver is the fake in
/// `folder`, with two devices.
fn command(folder: &Path, arguments: &str) -> Command {
    fusewire_cuda_fake_library::install(folder).expect("the fake, built with this test");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusewire"));
    command
        .arg("perf")
        .args(arguments.split(' '))
        .args(["--threads", "--ranks", "2", "--json", "-"])
        .env("LD_LIBRARY_PATH", folder)
        .env("FUSEWIRE_CUDA_FAKE_DEVICES", "2")
        .env("FUSEWIRE_CUDA_FAKE_REPORT", folder.join("report.json"))
        .env_remove("RANK")
        .env_remove("WORLD_SIZE");
    command
}

/// Runs `fusewire perf` with two ranks as threads.
fn perf(arguments: &str) -> Run {
    let folder = tempfile::tempdir().expect("a folder");
    let output = command(folder.path(), arguments).output();
    let output = output.expect("the command starts");
    let table = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{table}");
    let calls = |names: &[&str]| calls(&folder.path().join("report.json"), names);
    Run {
        rows: serde_json::from_slice(&output.stdout).expect("an array of objects"),
        launches: calls(&["cuLaunchKernel", "cuLaunchKernelEx"]),
        replays: calls(&["cuGraphLaunch"]),
        table,
    }
}

/// Returns the number of calls of the driver's functions `names`. Returns 0 if the process has not
/// opened the driver.
fn calls(report: &Path, names: &[&str]) -> u64 {
    let Ok(text) = std::fs::read(report) else {
        return 0;
    };
    let report: Value = serde_json::from_slice(&text).expect("JSON");
    let count = |name: &&str| report["calls"][*name].as_u64().unwrap_or(0);
    names.iter().map(count).sum()
}

const RANKS: u64 = 2;
const SAMPLES: u64 = 3;
/// A size, the number of samples, one warm-up call, and no verified calls.
const FIXED: &str = "all_reduce --bytes 1K --iterations 3 --warmup 1 --no-check";

#[test]
fn the_cpu_is_timed_by_the_host_clock() {
    for (graph, says) in [
        ("", "# timing: host clock around each blocking call"),
        (
            " --graph",
            "# timing: host clock around each replay of a graph of one operation",
        ),
    ] {
        let run = perf(&format!("{FIXED}{graph}"));
        assert!(run.table.lines().any(|line| line == says), "{}", run.table);
        let row = run.row();
        assert_eq!(row["timing"], "host_clock");
        assert_eq!((&row["batch"], &row["iterations"]), (&1.into(), &3.into()));
        assert_eq!((run.launches, run.replays), (0, 0));
    }
}

#[test]
fn a_gpu_is_timed_by_events_around_batches() {
    let batch = |count: u64| perf(&format!("{FIXED} --device cuda --batch {count}"));
    let (small, large) = (batch(1), batch(7));
    let says = "# timing: GPU events around n operations enqueued back to back, divided by n \
                (column n)";
    for (run, batch) in [(&small, 1), (&large, 7)] {
        assert!(run.table.lines().any(|line| line == says), "{}", run.table);
        let row = run.row();
        assert_eq!(row["timing"], "gpu_events");
        assert_eq!(
            (&row["batch"], &row["iterations"]),
            (&batch.into(), &3.into())
        );
        let line = run.table.lines().last().expect("a row");
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells[6], batch.to_string(), "{}", run.table);
        assert_eq!(run.replays, 0);
    }
    // Each rank launches six more operations in each of the samples.
    assert_eq!(large.launches - small.launches, RANKS * SAMPLES * 6);

    // Without the option, a sample has as many operations as the output says.
    let chosen = perf(&format!("{FIXED} --device cuda"));
    let batch = chosen.row()["batch"].as_u64().expect("a number");
    let more = RANKS * SAMPLES * (batch - 1);
    assert_eq!(chosen.launches - small.launches, more, "{batch}");
}

#[test]
fn a_graph_contains_a_batch() {
    let batch = |count: u64| perf(&format!("{FIXED} --graph --device cuda --batch {count}"));
    let (small, large) = (batch(1), batch(7));
    let says =
        "# timing: GPU events around a replay of a graph of n operations, divided by n (column n)";
    for (run, batch) in [(&small, 1), (&large, 7)] {
        assert!(run.table.lines().any(|line| line == says), "{}", run.table);
        assert_eq!(run.row()["batch"], batch);
        // One replay before the samples uploads the graph.
        assert_eq!(run.replays, RANKS * (1 + SAMPLES));
    }
    // Each rank captures six more operations, once.
    assert_eq!(large.launches - small.launches, RANKS * 6);
}

#[test]
fn calls_on_a_gpu_are_verified() {
    for more in ["--graph", "--in-place"] {
        let call = format!("all_reduce --bytes 1K -n 3 -w 1 --device cuda --batch 5 {more}");
        let run = perf(&call);
        assert_eq!(run.row()["wrong"], 0);
        // A corrupted element is counted before and after the samples.
        let folder = tempfile::tempdir().expect("a folder");
        let output = command(folder.path(), &format!("{call} --corrupt 1")).output();
        let output = output.expect("the command starts");
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(text.matches("rank 1: all_reduce").count(), 2, "{text}");
    }
}

#[test]
fn a_mixture_of_experts_is_timed_and_verified_on_a_gpu() {
    for operation in ["moe_dispatch", "moe_combine"] {
        for graph in ["", " --graph"] {
            let run = perf(&format!(
                "{operation} --bytes 1K --hidden 64 --experts 6 --top-k 3 -n 3 -w 1 --device cuda \
                 --batch 5{graph}"
            ));
            let row = run.row();
            assert_eq!(row["timing"], "gpu_events");
            assert_eq!((&row["batch"], &row["wrong"]), (&5.into(), &0.into()));
        }
    }
}
