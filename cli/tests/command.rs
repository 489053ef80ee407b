//! Tests of the command as a process: exit statuses, messages, files, signals.

use core::time::Duration;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Instant;

fn fusewire(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusewire"));
    command.args(arguments);
    for name in [
        "RANK",
        "WORLD_SIZE",
        "TORCHCOMM_RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
    ] {
        command.env_remove(name);
    }
    command
}

/// Starts `command` with pipes for its output.
fn spawn(command: &mut Command) -> Child {
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts")
}

fn output(arguments: &[&str]) -> Output {
    fusewire(arguments).output().expect("the command starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the process ids of the children of `parent`.
fn children(parent: u32) -> Vec<u32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .filter_map(|id| id.parse().ok())
        .collect()
}

fn kill(id: u32, signal: i32) {
    // SAFETY: `kill` accesses no memory. `id` is a process that this test or its child has started
    // and that still exists, so the system has not reused the id.
    assert_eq!(unsafe { libc::kill(id as i32, signal) }, 0);
}

/// Returns the process ids of the ranks of the launcher `id`, which is two processes.
fn ranks_of(id: u32) -> Vec<u32> {
    children(id).into_iter().flat_map(children).collect()
}

/// Starts a `perf` command that runs for several seconds. Returns the command's process and the
/// process ids of the ranks.
fn long_perf(ranks: &str) -> (Child, Vec<u32>) {
    let mut command = fusewire(&[
        "perf",
        "all_reduce",
        "--ranks",
        ranks,
        "--min-bytes",
        "1M",
        "--max-bytes",
        "1M",
        "--iterations",
        "1000000",
        "--timeout",
        "1",
    ]);
    // SAFETY: the closure only calls `signal`, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            // A shell without job control ignores SIGINT in its background jobs, and children
            // inherit that.
            libc::signal(libc::SIGINT, libc::SIG_DFL);
            Ok(())
        });
    }
    let child = spawn(&mut command);
    let expected: usize = ranks.parse().expect("a number");
    let started = Instant::now();
    while ranks_of(child.id()).len() < expected {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "the ranks do not start"
        );
        thread::sleep(Duration::from_millis(10));
    }
    // Gives the ranks time to reach the measured calls.
    thread::sleep(Duration::from_millis(1500));
    let ranks = ranks_of(child.id());
    (child, ranks)
}

fn all_gone(ids: &[u32]) {
    for id in ids {
        assert!(
            !Path::new(&format!("/proc/{id}")).exists(),
            "process {id} is left"
        );
    }
}

#[test]
fn bad_arguments_are_one_line_and_status_2() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["perf", "all_reduced"],
            "operation \"all_reduced\" is none of",
        ),
        (
            &["perf", "recv"],
            "recv is not measured: it is a part of send_recv",
        ),
        (&["perf", "all_reduce", "--ranks", "65536"], "are possible"),
        (
            &["perf", "all_reduce", "--max-bytes", "99999999999G"],
            "overflows",
        ),
        (
            &["perf", "all_reduce", "--max-bytes", "lots"],
            "size \"lots\"",
        ),
        (
            &[
                "perf",
                "all_reduce",
                "--min-bytes",
                "2K",
                "--max-bytes",
                "1K",
            ],
            "above",
        ),
        (&["perf", "all_reduce", "--dtype", "f99"], "type \"f99\""),
        (
            &["perf", "all_reduce", "--op", "band"],
            "f32 has no reduction band",
        ),
        (
            &["perf", "all_reduce", "--algorithm", "ring"],
            "\"ring\" is none of",
        ),
        (
            &["perf", "all_reduce", "--device", "tpu"],
            "\"tpu\" is none of cpu, cuda",
        ),
        // Fails on every machine: there is no driver, or no GPU with this index.
        (
            &["perf", "all_reduce", "--device", "cuda:99"],
            "device cuda",
        ),
        (&["frobnicate"], "unrecognized subcommand"),
        (&["--frob"], "(see fusewire --help)"),
        (&["perf", "barrier", "--frob"], "(see fusewire perf --help)"),
        (
            &["run", "-n", "two", "--", "true"],
            "(see fusewire run --help)",
        ),
        (&["perf", "allreduce"], "did you mean all_reduce?"),
        (&["perf", "all-reduce"], "did you mean all_reduce?"),
        (&["perf", "barrier", "-d", "float32"], "did you mean f32?"),
        (&["perf", "barrier", "-o", "mean"], "did you mean average?"),
        (
            &["perf", "barrier", "--check", "--no-check"],
            "'--check' cannot be used with '--no-check'",
        ),
        (
            &["perf", "all_reduce", "--bytes", "1M", "-e", "2M"],
            "cannot be used with",
        ),
        (&["perf", "all_reduce", "-c", "2"], "-c takes 0 or 1"),
        (
            &["perf", "all_reduce", "--batch", "20"],
            "--batch 20: batches are timed only on a GPU; omit --batch",
        ),
        (
            &["perf", "all_reduce", "--plot", "chart.png"],
            "name a file that ends in .svg",
        ),
        (
            &["perf", "all_reduce", "--plot", "chart"],
            "name a file that ends in .svg",
        ),
        (
            &["perf", "barrier", "--plot", "chart.svg"],
            "barrier has no sizes to plot",
        ),
        (
            &["perf", "moe_dispatch", "-d", "i32"],
            "moe_dispatch: it is for f32, f16 and bf16",
        ),
        (
            &["perf", "moe_combine", "--hidden", "100"],
            "--hidden 100; a multiple of 8 is needed",
        ),
        (
            &["perf", "moe_combine", "--top-k", "17"],
            "1 to 16 are possible",
        ),
        (
            &["perf", "moe_combine", "--top-k", "0"],
            "1 to 16 are possible",
        ),
        (
            &["perf", "moe_dispatch", "--experts", "4"],
            "--top-k 8, but there are only 4 experts (--experts)",
        ),
    ];
    for &(arguments, message) in cases {
        let output = output(arguments);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(message), "{arguments:?}: {text}");
        assert_eq!(text.trim_end().lines().count(), 1, "{arguments:?}: {text}");
    }
}

#[test]
fn every_operation_is_verified_and_written_as_json() {
    let folder = tempfile::tempdir().expect("a folder");
    let (json, plot) = (
        folder.path().join("rows.json"),
        folder.path().join("chart.svg"),
    );
    let output = fusewire(&[
        "perf",
        "all",
        "--ranks",
        "3",
        "--min-bytes",
        "64",
        "--max-bytes",
        "16K",
        "--factor",
        "16",
        "--iterations",
        "3",
        "--json",
    ])
    .arg(&json)
    .arg("--plot")
    .arg(&plot)
    .output()
    .expect("the command starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let rows: Vec<serde_json::Map<String, serde_json::Value>> =
        serde_json::from_slice(&std::fs::read(&json).expect("rows")).expect("an array of objects");
    let mut operations: Vec<&str> = Vec::new();
    for row in &rows {
        let mut keys: Vec<&str> = row.keys().map(String::as_str).collect();
        let mut expected = vec![
            "operation",
            "device",
            "backend",
            "ranks",
            "bytes",
            "count",
            "dtype",
            "redop",
            "algorithm",
            "in_place",
            "graph",
            "timing",
            "batch",
            "iterations",
            "min_us",
            "median_us",
            "p99_us",
            "algbw_gbps",
            "busbw_gbps",
            "wrong",
        ];
        let operation = row["operation"].as_str().expect("a name");
        if operation.starts_with("moe_") {
            expected.push("moe");
        }
        keys.sort_unstable();
        expected.sort_unstable();
        assert_eq!(keys, expected);
        assert_eq!(row["wrong"], 0);
        operations.push(operation);
    }
    operations.dedup();
    assert_eq!(operations.len(), 16, "{operations:?}");
    let svg = std::fs::read_to_string(&plot).expect("a chart");
    assert!(svg.starts_with("<svg") && svg.contains("all_reduce"));
}

#[test]
fn a_wrong_element_is_found_and_gives_status_1() {
    for more in [&["--threads"][..], &[]] {
        let mut arguments = vec![
            "perf",
            "all_gather",
            "--ranks",
            "2",
            "--min-bytes",
            "1K",
            "--max-bytes",
            "1K",
        ];
        arguments.extend(["--iterations", "1", "--corrupt", "1"]);
        arguments.extend(more);
        let output = output(&arguments);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("rank 1: all_gather") && text.contains("index 255"),
            "{text}"
        );
    }
}

#[test]
fn wrong_rows_descriptions_and_sums_of_experts_are_found() {
    let run = |operation: &str| {
        let arguments =
            format!("perf {operation} --threads --ranks 2 --bytes 16K --iterations 1 --corrupt 1");
        let output = output(&arguments.split(' ').collect::<Vec<_>>());
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{text}");
        text
    };
    let text = run("moe_dispatch");
    for wrong in ["f32", "counts", "sources", "ids", "weights", "offsets"] {
        let line = format!("rank 1: moe_dispatch of 16384 bytes, {wrong}: 1 wrong");
        // Before and after the samples.
        assert_eq!(text.matches(&line).count(), 2, "{wrong}: {text}");
    }
    let text = run("moe_combine");
    let line = "rank 1: moe_combine of 16384 bytes, f32: 1 wrong, the first at index 4095";
    assert_eq!(text.matches(line).count(), 2, "{text}");
}

#[test]
fn a_mixture_of_experts_reports_the_bytes_that_a_rank_sends() {
    let output_of = |arguments: &str| output(&arguments.split(' ').collect::<Vec<_>>());
    // Each token selects all experts: two on each rank. A rank sends each token once, and two
    // results for each token of the other rank.
    for (more, staging) in [
        ("", 0),
        (" --graph", 0),
        (" --threads", 0),
        (" --unregistered --in-place", 0),
        (" --staging 1", 1),
    ] {
        let measured = output_of(&format!(
            "perf moe_dispatch,moe_combine --ranks 2 --hidden 64 --experts 4 --top-k 4 -b 8 -e 1K \
             -f 4 -d bf16 -n 3 --json -{more}"
        ));
        let rows = rows(&measured);
        // 8, 32 and 128 bytes are one token.
        let bytes: Vec<_> = rows.iter().map(|row| row["bytes"].as_u64()).collect();
        let sizes = [Some(128), Some(512)];
        assert_eq!(bytes, [sizes, sizes].concat());
        for row in &rows {
            let bandwidth = |key: &str| row[key].as_f64().expect("a number");
            let sent = if row["operation"] == "moe_dispatch" {
                1.0
            } else {
                2.0
            };
            let (algbw, busbw) = (bandwidth("algbw_gbps"), bandwidth("busbw_gbps"));
            // Both are rounded to three decimals.
            assert!((busbw - sent * algbw).abs() < 0.003, "{row:?}");
            assert_eq!(row["wrong"], 0);
            assert_eq!(row["in_place"], false);
            let layer = serde_json::json!({
                "hidden": 64, "experts": 4, "top_k": 4, "staging": staging
            });
            assert_eq!(row["moe"], layer);
        }
    }
}

#[test]
fn a_mixture_of_experts_has_a_smaller_largest_size() {
    let arguments = "perf moe_combine --threads --ranks 2 --top-k 16 --min-bytes 4M -n 1 -w 1 \
                     --no-check --json -";
    let measured = output(&arguments.split(' ').collect::<Vec<_>>());
    let bytes: Vec<_> = rows(&measured)
        .iter()
        .map(|row| row["bytes"].as_u64())
        .collect();
    // 64 MiB / 16.
    assert_eq!(bytes, [Some(4 << 20)]);
}

#[test]
fn the_help_lists_the_operations() {
    let output = output(&["perf", "--help"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for name in [
        "all_reduce",
        "send_recv",
        "moe_dispatch",
        "moe_combine",
        "--top-k",
    ] {
        assert!(text.contains(name), "{name}: {text}");
    }
}

#[test]
fn a_killed_rank_is_named_by_the_others() {
    for signal in [libc::SIGKILL, libc::SIGSTOP] {
        let (child, ranks) = long_perf("3");
        kill(ranks[1], signal);
        let output = child.wait_with_output().expect("it ends");
        let text = stderr(&output);
        assert!(!output.status.success(), "{text}");
        assert!(
            text.contains("all_reduce #") || text.contains("barrier #"),
            "{text}"
        );
        let named = if signal == libc::SIGKILL {
            "the process of rank 1 has ended"
        } else {
            "look at rank 1"
        };
        assert!(text.contains(named), "{text}");
        all_gone(&ranks);
    }
}

#[test]
fn an_interrupt_stops_all() {
    let (child, ranks) = long_perf("2");
    kill(child.id(), libc::SIGINT);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130));
    all_gone(&ranks);
}

fn await_end_of(ids: &[u32]) {
    let started = Instant::now();
    let lives = |id: &u32| Path::new(&format!("/proc/{id}")).exists();
    while ids.iter().any(lives) {
        assert!(started.elapsed() < Duration::from_secs(5), "ranks are left");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ranks_die_with_a_killed_launcher() {
    let (mut child, ranks) = long_perf("2");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    await_end_of(&ranks);
}

/// The system kills only the direct children of a process that was killed.
#[test]
fn programs_below_a_shell_die_with_a_killed_launcher() {
    for victim in ["outer", "inner"] {
        let script = "sleep 1000; true";
        let mut child = spawn(&mut fusewire(&["run", "-n", "2", "--", "sh", "-c", script]));
        let started = Instant::now();
        let programs = loop {
            let programs: Vec<u32> = ranks_of(child.id())
                .into_iter()
                .flat_map(children)
                .collect();
            if programs.len() == 2 {
                break programs;
            }
            assert!(started.elapsed() < Duration::from_secs(20), "no programs");
            thread::sleep(Duration::from_millis(10));
        };
        match victim {
            "outer" => child.kill().expect("it runs"),
            _ => kill(children(child.id())[0], libc::SIGKILL),
        }
        let status = child.wait().expect("it ends");
        if victim == "inner" {
            assert_eq!(status.code(), Some(128 + libc::SIGKILL));
        }
        await_end_of(&programs);
    }
}

#[test]
fn run_prefixes_lines_and_gives_the_failing_rank_s_status() {
    let script = "echo rank $RANK of $WORLD_SIZE; [ $RANK != 1 ] || exit 7";
    let output = output(&["run", "-n", "3", "--", "sh", "-c", script]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(7));
    assert!(text.contains("[1] rank 1 of 3"), "{text}");
    let output = fusewire(&["run", "-n", "2", "--", "/nonexistent/program"])
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("cannot start /nonexistent/program"));
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn run_gives_the_store_a_secret_that_only_its_ranks_have() {
    let script = "echo secret=$FUSEWIRE_STORE_SECRET";
    let secrets = |command: &mut Command| {
        let output = command.output().expect("the command starts");
        let text = stdout(&output);
        let mut secrets: Vec<String> = text
            .lines()
            .map(|line| line.split("secret=").nth(1).expect("a secret").to_owned())
            .collect();
        assert_eq!(secrets.len(), 2, "{text}");
        secrets.dedup();
        assert_eq!(secrets.len(), 1, "ranks have different secrets: {text}");
        secrets.remove(0)
    };
    let run = ["run", "-n", "2", "--", "sh", "-c", script];
    let first = secrets(fusewire(&run).env_remove("FUSEWIRE_STORE_SECRET"));
    assert_eq!(first.len(), 64, "{first}");
    let second = secrets(fusewire(&run).env_remove("FUSEWIRE_STORE_SECRET"));
    assert_ne!(first, second);
    assert_eq!(
        secrets(fusewire(&run).env("FUSEWIRE_STORE_SECRET", "mine")),
        "mine"
    );
    let open = ["run", "-n", "2", "--open-store", "--", "sh", "-c", script];
    assert_eq!(
        secrets(fusewire(&open).env("FUSEWIRE_STORE_SECRET", "mine")),
        ""
    );

    // A process without the secret gets no data from the store.
    let mut child = fusewire(&[
        "run",
        "-n",
        "1",
        "--",
        "sh",
        "-c",
        "echo $MASTER_PORT; sleep 60",
    ])
    .env_remove("FUSEWIRE_STORE_SECRET")
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .expect("the command starts");
    let mut line = String::new();
    let out = child.stdout.as_mut().expect("a pipe");
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a line");
    let port = line
        .trim()
        .rsplit(' ')
        .next()
        .and_then(|port| port.parse().ok());
    let timeout = Duration::from_secs(20);
    let options = fusewire::store::StoreOptions::default();
    let port = port.expect("a port");
    let error = fusewire::store::TcpStore::connect_with("127.0.0.1", port, timeout, options)
        .expect_err("a stranger");
    kill(child.id(), libc::SIGTERM);
    let said = stderr(&child.wait_with_output().expect("it ends"));
    assert!(error.to_string().contains("wants a secret"), "{error}");
    assert!(
        said.contains("did not show that it has the secret"),
        "{said}"
    );
}

/// Ranks 0 and 1 exit because rank 2 was killed, or has made an invalid access to memory. The
/// launcher must name rank 2 as the first failure.
#[test]
fn a_killed_rank_is_the_first_failure() {
    for signal in [libc::SIGKILL, libc::SIGSEGV] {
        let directory = tempfile::tempdir().expect("a directory");
        let victim = directory.path().join("victim");
        let victim = victim.display();
        // Ranks 0 and 1 exit only after the launcher has waited for rank 2, because `kill -0`
        // succeeds for a zombie.
        let script = format!(
            "if [ $RANK = 2 ]; then
               echo $$ > {victim}.new; mv {victim}.new {victim}; kill -{signal} $$
             fi
             while [ ! -e {victim} ] || kill -0 $(cat {victim}) 2> /dev/null; do sleep 0.02; done
             exit 3"
        );
        let output = output(&["run", "-n", "3", "--", "sh", "-c", &script]);
        assert_eq!(output.status.code(), Some(128 + signal));
        let text = stderr(&output);
        let last = text.lines().last().unwrap_or_default();
        assert_eq!(
            last,
            format!("fusewire: the first failure: rank 2 was killed by signal {signal}")
        );
    }
}

#[test]
fn a_signal_that_nohup_ignores_does_not_end_the_ranks() {
    let mut command = fusewire(&[
        "run",
        "-n",
        "1",
        "--",
        "sh",
        "-c",
        "echo up; sleep 1; echo end",
    ]);
    // SAFETY: `signal` is async-signal-safe, and the closure calls nothing else between fork and
    // exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            Ok(())
        });
    }
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut reader = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    let mut text = String::new();
    std::io::BufRead::read_line(&mut reader, &mut text).expect("a line");
    kill(child.id(), libc::SIGHUP);
    std::io::Read::read_to_string(&mut reader, &mut text).expect("text");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert_eq!(text, "[0] up\n[0] end\n");
}

/// The system discards the statuses of children if SIGCHLD is ignored, which programs inherit.
#[test]
fn the_status_of_a_rank_is_known_although_sigchld_was_ignored() {
    let mut command = fusewire(&["run", "-n", "1", "--", "sh", "-c", "exit 7"]);
    // SAFETY: `signal` is async-signal-safe, and the closure calls nothing else between fork and
    // exec.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            Ok(())
        });
    }
    let status = command.status().expect("the command starts");
    assert_eq!(status.code(), Some(7));
}

#[test]
fn a_closed_output_ends_perf_quietly_and_does_not_end_the_ranks_of_run() {
    let first_line = |child: &mut Child| {
        let mut reader = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        std::io::BufRead::read_line(&mut reader, &mut line).expect("a line");
    };
    let perf = [
        "perf",
        "all_reduce",
        "--ranks",
        "3",
        "--max-bytes",
        "16M",
        "--backend",
        "fusewire",
    ];
    let mut child = spawn(&mut fusewire(&perf));
    first_line(&mut child);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(stderr(&output), "");
    assert!(
        matches!(output.status.code(), Some(141 | 0)),
        "{:?}",
        output.status
    );

    // A requested file is complete, even if the reader closes the pipe.
    let directory = tempfile::tempdir().expect("a directory");
    let rows = directory.path().join("rows.json");
    let mut command = fusewire(&perf);
    command.args(["--min-bytes", "1K", "-n", "20", "--json"]);
    let mut child = spawn(command.arg(&rows));
    first_line(&mut child);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(stderr(&output), "");
    assert_eq!(output.status.code(), Some(0));
    let text = std::fs::read_to_string(&rows).expect("the file");
    let rows: Vec<serde_json::Value> = serde_json::from_str(&text).expect("an array");
    // One row for each power of two from 1 KiB to 16 MiB.
    assert_eq!(rows.len(), 15);

    let end = directory.path().join("end");
    let script = format!(
        "echo one; sleep 0.5; echo two; echo three; echo end > {}",
        end.display()
    );
    let mut child = fusewire(&["run", "-n", "1", "--", "sh", "-c", &script])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the command starts");
    first_line(&mut child);
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert!(end.exists());
}

#[test]
fn info_names_what_is_missing_and_how_to_install_it() {
    let output = output(&["info", "--json"]);
    let items: Vec<serde_json::Value> =
        serde_json::from_slice(&output.stdout).expect("an array of objects");
    let cpu = items
        .iter()
        .find(|item| item["name"] == "cpu")
        .expect("the CPU device");
    assert_eq!(cpu["found"], true);
    for item in items.iter().filter(|item| item["found"] == false) {
        assert!(
            item["gives"].as_str().is_some_and(|text| !text.is_empty()),
            "{item}"
        );
        assert!(
            item["install"]
                .as_str()
                .is_some_and(|text| !text.is_empty()),
            "{item}"
        );
    }
}

#[test]
fn a_launcher_that_said_half_is_not_ignored() {
    let output = fusewire(&["perf", "barrier", "--ranks", "2"])
        .env("RANK", "0")
        .output()
        .expect("the command starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("RANK is set but WORLD_SIZE is not"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn run_sets_what_pytorch_reads_with_an_agent_s_store() {
    let output = output(&["run", "-n", "2", "--", "env"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for name in [
        "TORCHELASTIC_RESTART_COUNT=0",
        "TORCHELASTIC_MAX_RESTARTS=0",
        "TORCHELASTIC_RUN_ID=",
        "ROLE_RANK=1",
        "ROLE_WORLD_SIZE=2",
        "GROUP_WORLD_SIZE=1",
        "MASTER_PORT=",
    ] {
        assert!(text.contains(name), "{name} is not in {text}");
    }
}

#[test]
fn vector_operations_report_the_bytes_that_they_move() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("rows.json");
    let path = file.to_str().expect("a name");
    let output = output(&[
        "perf",
        "all_gather_v",
        "--ranks",
        "2",
        "--min-bytes",
        "24K",
        "--max-bytes",
        "24K",
        "--json",
        path,
    ]);
    assert!(output.status.success(), "{}", stderr(&output));
    let rows = std::fs::read_to_string(&file).expect("rows");
    // 24 KiB are two rows of 3,072 elements. Rank 0 contributes one third of a row, rank 1 two
    // thirds. So the output has 3,072 elements of 4 bytes.
    assert!(rows.contains("\"bytes\": 12288"), "{rows}");
}

#[test]
fn ranks_start_with_as_many_hardware_queues_as_there_are() {
    const NAME: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    let script = format!("echo queues ${{{NAME}-none}}");
    for (outside, expected) in [(None, "32"), (Some("5"), "5"), (Some(""), "")] {
        let mut command = fusewire(&["run", "-n", "2", "--", "sh", "-c", &script]);
        match outside {
            Some(value) => command.env(NAME, value),
            None => command.env_remove(NAME),
        };
        let output = command.output().expect("the command starts");
        assert!(output.status.success(), "{}", stderr(&output));
        let said = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<&str> = said.lines().map(str::trim_end).collect();
        let line = |rank| format!("[{rank}] queues {expected}").trim_end().to_owned();
        assert_eq!(lines.len(), 2, "{said}");
        for rank in 0..2 {
            assert!(lines.contains(&line(rank).as_str()), "{outside:?}: {said}");
        }
    }
}

/// Returns the rows in the standard output of a successful `perf --json -`.
fn rows(output: &Output) -> Vec<serde_json::Map<String, serde_json::Value>> {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).expect("an array of objects")
}

#[test]
fn flags_of_nccl_tests_and_json_on_standard_output() {
    let arguments = "perf all_reduce, broadcast -b 1KiB -e 2kb -f 2 -n 2 -w 1 -c 1 --ranks 2 \
                     --json -";
    let output_of = |arguments: &str| output(&arguments.split(' ').collect::<Vec<_>>());
    let output = output_of(arguments);
    let measured: Vec<String> = rows(&output)
        .iter()
        .map(|row| {
            assert_eq!(row["iterations"], 2);
            format!(
                "{} {}",
                row["operation"].as_str().expect("a name"),
                row["bytes"]
            )
        })
        .collect();
    assert_eq!(
        measured,
        [
            "all_reduce 1024",
            "all_reduce 2048",
            "broadcast 1024",
            "broadcast 2048"
        ]
    );
    assert!(stderr(&output).contains("busbw"), "{}", stderr(&output));
    assert!(!Path::new("-").exists());

    let output = output_of("perf all_reduce --bytes 1.5K -c 0 -n 1 --ranks 2 --json -");
    let rows = rows(&output);
    assert_eq!((rows.len(), &rows[0]["bytes"]), (1, &1536.into()));
    let table = stderr(&output);
    let line = table.lines().find(|line| line.starts_with("all_reduce"));
    assert!(line.is_some_and(|line| line.ends_with(" -")), "{table}");
}

#[test]
fn a_chart_of_one_size_has_ticks() {
    let folder = tempfile::tempdir().expect("a folder");
    let plot = folder.path().join("chart.svg");
    let path = plot.to_str().expect("a name");
    let arguments = [
        "perf",
        "all_reduce",
        "--bytes",
        "1K",
        "-n",
        "1",
        "--ranks",
        "2",
        "--plot",
        path,
    ];
    let output = output(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let svg = std::fs::read_to_string(&plot).expect("a chart");
    let labels: Vec<&str> = svg.lines().map(str::trim).collect();
    for label in ["512", "1K", "2K"] {
        assert_eq!(
            labels.iter().filter(|line| **line == label).count(),
            2,
            "{label}: {svg}"
        );
    }
}

#[test]
fn a_closed_output_ends_threads_quietly() {
    let arguments = [
        "perf",
        "all_reduce",
        "--threads",
        "--ranks",
        "2",
        "-n",
        "1000",
    ];
    let mut child = spawn(&mut fusewire(&arguments));
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    assert!(line.starts_with("# 2 ranks"), "{line}");
    drop(lines);
    let started = Instant::now();
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{:?}", output.status);
    assert_eq!(stderr(&output), "");
    // Measuring all sizes up to 64 MiB would take a minute.
    assert!(started.elapsed() < Duration::from_secs(30));
}

/// Returns the item `name` of `fusewire info`.
fn info_item(name: &str, environment: &[(&str, &Path)]) -> serde_json::Value {
    let mut command = fusewire(&["info", "--json"]);
    for variable in ["FUSEWIRE_NCCL_PATH", "TORCHCOMMS_BACKEND_LIB_PATH_NCCL"] {
        command.env_remove(variable);
    }
    let output = command
        .envs(environment.iter().copied())
        .output()
        .expect("the command starts");
    let items: Vec<serde_json::Value> =
        serde_json::from_slice(&output.stdout).expect("an array of objects");
    items
        .into_iter()
        .find(|item| item["name"] == name)
        .expect("the item")
}

#[test]
fn info_takes_the_path_of_nccl_from_the_environment() {
    let text = |item: &serde_json::Value, key: &str| item[key].as_str().unwrap_or("").to_owned();
    // The command opens any library at the path that the variable gives. libc always exists.
    let libc = Path::new("libc.so.6");
    let item = info_item("libnccl.so", &[("FUSEWIRE_NCCL_PATH", libc)]);
    assert_eq!(item["found"], true, "{item}");
    assert_eq!(text(&item, "detail"), "libc.so.6 (FUSEWIRE_NCCL_PATH)");
    let item = info_item(
        "libnccl.so",
        &[("FUSEWIRE_NCCL_PATH", Path::new("/nowhere"))],
    );
    assert_eq!(item["found"], false, "{item}");
    assert!(
        text(&item, "detail").starts_with("FUSEWIRE_NCCL_PATH is /nowhere: "),
        "{item}"
    );
}

#[test]
fn info_says_what_to_set_for_nccl_in_a_virtual_environment() {
    let folder = tempfile::tempdir().expect("a folder");
    let packages = folder.path().join("lib/python3/site-packages");
    let library = packages.join("nvidia/nccl/lib/libnccl.so.2");
    std::fs::create_dir_all(library.parent().expect("a folder")).expect("folders");
    std::fs::write(&library, "").expect("a file");
    let python = folder.path().join("bin/python3");
    std::fs::create_dir_all(folder.path().join("bin")).expect("a folder");
    std::fs::write(&python, format!("#!/bin/sh\necho {}\n", packages.display())).expect("a file");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&python, executable).expect("permissions");
    let item = info_item("libnccl.so", &[("VIRTUAL_ENV", folder.path())]);
    if item["found"] == true {
        // The dynamic linker finds an installed NCCL, so the command does not search the virtual
        // environment.
        return;
    }
    let install = item["install"].as_str().expect("a text");
    assert_eq!(
        install,
        format!("export FUSEWIRE_NCCL_PATH={}", library.display()),
        "{item}"
    );
}
