//! Tests the script `run.sh` of the bundle with fake programs.

use core::time::Duration;
use std::process::Stdio;
use std::time::Instant;

use crate::fake::{Bundle, stderr};

const CUDA: &[(&str, &str)] = &[("FAKE_CUDA", "found  "), ("FAKE_DETAIL", "cuda:0: a GPU")];

/// A fake of compute-sanitizer. It reports the seeded bugs and runs all other tests.
const SANITIZER: &str = r#"
case " $* " in
    *' --version '*) echo 'a version'; exit 0 ;;
    *seeded_write*)
        printf '========= Invalid __global__ write of size 2 bytes\n'
        printf '========= ERROR SUMMARY: 1 error\n'
        exit 86 ;;
    *_fixed*) echo 'seeded bug: launched' ; exit 0 ;;
    *seeded_race*)
        printf 'seeded bug: launched\n'
        printf '========= Error: Race reported between Write access at 0x10\n'
        exit 86 ;;
    *seeded_divergence_of_warps*)
        printf 'seeded bug: launched\n'
        printf '========= Barrier error detected. Divergent thread(s) in block\n'
        exit 86 ;;
esac
while [ "${1#/}" = "$1" ]; do shift; done
"$@"
"#;

#[test]
fn all_is_well() {
    let bundle = Bundle::new();
    let output = bundle.run(&[], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let rows = bundle.rows();
    let names: Vec<&str> = rows.iter().map(|row| row.0.as_str()).collect();
    let all = "files info conformance graphs failures bitwise multi sanitizers benches";
    assert_eq!(names, all.split(' ').collect::<Vec<_>>());
    for (section, result, what) in &rows {
        let expected = if ["multi", "sanitizers"].contains(&section.as_str()) {
            "skip"
        } else {
            "pass"
        };
        assert_eq!(result, expected, "{section}: {what}");
        assert!(bundle.results().join(format!("{section}.log")).is_file());
    }
    // A skipped section fails with --strict.
    let output = bundle.run(&["--strict", "--only", "sanitizers"], &[]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_binary_that_fails_is_named() {
    let bundle = Bundle::new();
    bundle.program(
        "tests/graphs",
        "printf 'failures:\\n\\n---- a stdout ----\\n\\nfailures:\\n    the_culprit\\n\\n'
         echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'
         exit 101",
    );
    let output = bundle.run(&["--quick"], &[]);
    assert_eq!(output.status.code(), Some(1));
    let (result, what) = bundle.row("graphs");
    assert_eq!(result, "FAIL");
    assert!(
        what.contains("tests/graphs (the_culprit): status 101"),
        "{what}"
    );
    // The replaced binary also differs from the bundled one, so the section `files` fails. A
    // section that does not use the binary passes.
    let (result, what) = bundle.row("files");
    assert_eq!(
        (result.as_str(), what.as_str()),
        ("FAIL", "not as bundled: tests/graphs")
    );
    assert_eq!(bundle.row("conformance").0, "pass");
    let page = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        page.contains("3 sections failed: files (files.log) graphs (graphs.log)"),
        "{page}"
    );
}

#[test]
fn tests_that_do_not_run_are_a_failure() {
    let bundle = Bundle::new();
    bundle.program(
        "tests/on_device",
        "echo 'test result: ok. 1 passed; 0 failed'",
    );
    bundle.run(&["--only", "bitwise,conformance", "--quick"], &[]);
    assert_eq!(bundle.row("bitwise").0, "pass");
    let (result, what) = bundle.row("conformance");
    assert_eq!(result, "FAIL");
    assert!(what.contains("1 tests have passed, expected 6"), "{what}");
    std::fs::remove_file(bundle.path().join("tests/on_device")).expect("it was there");
    let output = bundle.run(&["--only", "bitwise"], &[]);
    assert_eq!(output.status.code(), Some(1));
    let (_, what) = bundle.row("bitwise");
    assert!(
        what.contains("tests/on_device: cannot be started"),
        "{what}"
    );
}

#[test]
fn wrong_usage_and_missing_devices_are_one_line() {
    let bundle = Bundle::new();
    for (arguments, says) in [
        (&["--device", "tpu"][..], "--device tpu: expected cpu"),
        (&["--device", "cuda:x"], "expected a number or `each` after"),
        (
            &["--only", "bitwise,luck"],
            "--only luck: expected one of files",
        ),
        (&["--fast"], "unknown argument --fast"),
        (
            &["--device", "cuda"],
            "--device cuda: no driver: libcuda.so.1 was not found",
        ),
        (&["--device", "hip"], "--device hip: no such device"),
    ] {
        let output = bundle.run(arguments, &[]);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(says), "{arguments:?}: {said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
        assert!(output.stdout.is_empty());
    }
    // Selects a second GPU on a machine that has only one.
    let output = bundle.run(&["--device", "cuda:1", "--quick"], CUDA);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("no such device"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn variables_of_an_outer_launcher_are_removed() {
    let bundle = Bundle::new();
    bundle.program(
        "tests/on_device",
        "echo RANK=$RANK QUEUES=$CUDA_DEVICE_MAX_CONNECTIONS+$GPU_MAX_HW_QUEUES \
         ON=$FUSEWIRE_TEST_DEVICE\nfalse",
    );
    let mut environment = CUDA.to_vec();
    environment.push(("RANK", "3"));
    bundle.run(&["--device", "cuda:0", "--only", "bitwise"], &environment);
    let log = std::fs::read_to_string(bundle.results().join("bitwise.log")).expect("a log");
    assert!(log.contains("RANK= QUEUES=32+ ON=cuda:0"), "{log}");
    let hip = ["--device", "hip", "--only", "bitwise"];
    bundle.run(&hip, &[("FAKE_HIP", "yes"), ("RANK", "3")]);
    let log = std::fs::read_to_string(bundle.results().join("bitwise.log")).expect("a log");
    assert!(log.contains("RANK= QUEUES=+16 ON=hip"), "{log}");
}

#[test]
fn sanitizers_must_find_the_seeded_bugs_and_nothing_else() {
    let bundle = Bundle::new();
    let only = ["--device", "cuda", "--only", "sanitizers"];
    let (result, what) = {
        bundle.run(&only, CUDA);
        bundle.row("sanitizers")
    };
    assert_eq!(result, "skip", "{what}");
    assert!(what.contains("not in the path"), "{what}");

    bundle.program("path/compute-sanitizer", SANITIZER);
    let output = bundle.run(&only, CUDA);
    let (result, what) = bundle.row("sanitizers");
    assert_eq!(result, "pass", "{what}");
    assert_eq!(output.status.code(), Some(0));
    for says in [
        "finds the seeded write",
        "racecheck finds seeded_race;",
        "synccheck finds seeded_divergence_of_warps",
        "racecheck: no errors",
        "synccheck: no errors",
    ] {
        assert!(what.contains(says), "{what}");
    }
    bundle.program("images/fusewire-kernels-multi-rank-grid.sm_90.ptx", "");
    let strict = [&only[..], &["--strict"]].concat();
    let output = bundle.run(&strict, CUDA);
    assert_eq!(output.status.code(), Some(0));

    // Replaces the tool with one that reports nothing.
    bundle.program(
        "path/compute-sanitizer",
        "echo '========= ERROR SUMMARY: 0 errors'",
    );
    bundle.run(&only, CUDA);
    let (result, what) = bundle.row("sanitizers");
    assert_eq!(result, "FAIL");
    for says in [
        "does not find the seeded write",
        "racecheck does not find the seeded bug (seeded_race: status 0, 0 lines",
        "synccheck does not find the seeded bug (seeded_divergence_in_a_warp: status 0",
    ] {
        assert!(what.contains(says), "{what}");
    }

    // Replaces the tool with one that reports an error in every test.
    bundle.program(
        "path/compute-sanitizer",
        "echo 'Invalid __global__ write'
         echo 'seeded bug: launched, Race reported between it and Divergent thread(s) in it'
         exit 86",
    );
    bundle.run(&only, CUDA);
    let (result, what) = bundle.row("sanitizers");
    assert_eq!(result, "FAIL");
    assert!(
        what.contains("racecheck found errors in short_form_of_1_rank"),
        "{what}"
    );
    for says in [
        "racecheck, seeded_race_fixed, the kernel without its bug: status 86",
        "synccheck, seeded_divergence_fixed, the kernel without its bug: status 86",
    ] {
        assert!(what.contains(says), "{what}");
    }
}

#[test]
fn a_seeded_bug_counts_only_with_its_report() {
    let bundle = Bundle::new();
    let only = ["--device", "cuda", "--only", "sanitizers"];
    let run = |body: &str| {
        bundle.program("path/compute-sanitizer", &format!("{body}{SANITIZER}"));
        bundle.run(&only, CUDA);
        bundle.row("sanitizers")
    };
    // If the tool does not report the first form of a bug, the script tries the second form.
    let second = "case \" $* \" in *divergence_of_warps*) exit 0 ;;
         *divergence_in_a_warp*)
             printf 'seeded bug: 1\\n====== Divergent thread(s) in warp\\n'; exit 86 ;; esac";
    let (result, what) = run(second);
    assert_eq!(result, "pass", "{what}");
    assert!(
        what.contains("synccheck finds seeded_divergence_in_a_warp"),
        "{what}"
    );
    for (body, says) in [
        // Case: the tool reports an error other than the seeded bug.
        (
            "printf 'seeded bug: 1\\n====== Program hit an error\\n'; exit 86",
            "racecheck does not find the seeded bug (seeded_race: status 86, 1 lines",
        ),
        // Case: the tool reports the bug, but no kernel was launched.
        (
            "echo '====== Race reported between'; exit 86",
            "racecheck does not find the seeded bug (seeded_race: status 86, 0 lines",
        ),
        // Case: the tool reports the bug, but exits with status 0.
        (
            "printf 'seeded bug: 1\\n====== Race reported between\\n'; exit 0",
            "racecheck does not find the seeded bug (seeded_race: status 0, 1 lines",
        ),
    ] {
        let (result, what) = run(&format!(
            "case \" $* \" in *'seeded_race '*) {body} ;; esac"
        ));
        assert_eq!(result, "FAIL", "{body}: {what}");
        assert!(what.contains(says), "{body}: {what}");
    }
    // Without the image of the seeded bugs, the other tools still run, and the section names the
    // missing image.
    std::fs::remove_dir_all(bundle.path().join("images")).expect("it was there");
    let (result, what) = run("");
    assert_eq!(result, "skip", "{what}");
    assert!(
        what.contains("no image of the seeded bugs") && what.contains("racecheck: no errors"),
        "{what}"
    );
}

#[test]
fn the_baseline_is_measured_if_there_is_one() {
    let bundle = Bundle::new();
    bundle.program("bin/fusewire-benches", "echo \"benches $*\"");
    let only = ["--device", "cuda:0", "--only", "benches", "--quick"];
    bundle.run(&only, CUDA);
    let (result, what) = bundle.row("benches");
    assert_eq!(result, "pass", "{what}");
    if !std::path::Path::new("/usr/local/cuda/bin/nvcc").exists() {
        assert!(
            what.contains("neither cubins in the bundle nor nvcc"),
            "{what}"
        );
    }

    bundle.program("cuda/baseline.sm_90.cubin", "");
    bundle.run(&only, CUDA);
    let (result, what) = bundle.row("benches");
    assert_eq!(result, "pass", "{what}");
    assert!(
        what.contains("comparison with CUDA C++: versus-cuda.md"),
        "{what}"
    );
    let log = std::fs::read_to_string(bundle.results().join("benches.log")).expect("a log");
    assert!(
        log.contains("benches versus cuda --gpu 0 --ranks 2"),
        "{log}"
    );

    // If the comparison finds wrong results, the section fails.
    bundle.program(
        "bin/fusewire-benches",
        "echo 'error: 3 wrong elements'; exit 1",
    );
    bundle.run(&only, CUDA);
    let (result, what) = bundle.row("benches");
    assert_eq!(result, "FAIL", "{what}");
    assert!(
        what.contains("bin/fusewire-benches versus cuda: status 1"),
        "{what}"
    );
}

/// Returns the environment of a machine with `gpus` GPUs, with NCCL if `nccl` is `found  `.
fn machine<'a>(gpus: &'a str, nccl: &'a str) -> Vec<(&'a str, &'a str)> {
    [CUDA, &[("FAKE_GPUS", gpus), ("FAKE_NCCL", nccl)]].concat()
}

/// Returns the page of the results.
fn page(bundle: &Bundle) -> String {
    std::fs::read_to_string(bundle.results().join("results.md")).expect("a page")
}

#[test]
fn several_gpus_are_tested_and_measured() {
    let bundle = Bundle::new();
    let only = ["--device", "cuda", "--only", "multi", "--quick"];
    let output = bundle.run(&only, &machine("4", "found  "));
    let (result, what) = bundle.row("multi");
    assert_eq!(result, "pass", "{what}");
    assert_eq!(output.status.code(), Some(0));
    assert!(
        what.contains("9 tests passed on up to 4 GPUs; 14 tables"),
        "{what}"
    );
    let log = std::fs::read_to_string(bundle.results().join("multi.log")).expect("a log");
    for says in [
        "perf all --max-bytes 64K --factor 8 --device cuda --ranks 4 --json",
        "perf all_reduce --backend nccl --max-bytes 64K --factor 8 --graph --device cuda --ranks 2",
        "perf all_reduce --algorithm nvls --max-bytes 64K --factor 8 --device cuda --ranks 4",
        "on_device --test-threads=1 --nocapture --exact several_gpus::nvls_as_threads",
    ] {
        assert!(log.contains(says), "{says}: {log}");
    }
    assert!(
        !log.contains("--threads") && !log.contains("--ranks 8"),
        "{log}"
    );
    let text = page(&bundle);
    for line in [
        "| device | `cuda`: 4 x a GPU |",
        "| NVLS, processes | pass | - |  |",
        "| 8 | 10.0 | packet | 12.5 | 20.0 | 0.50 |",
        "Timing: GPU events around batches of operations.",
        "Not measured: this machine has 4 GPUs.",
        "Not measured: not selected by --only.",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }

    // Without NCCL, the figures of the earlier run, whose files still exist, are not on the page.
    bundle.run(&only, &machine("4", "missing"));
    let text = page(&bundle);
    assert!(
        text.contains("NCCL was not measured: libnccl not found (a path)."),
        "{text}"
    );
    assert!(
        text.contains("| 8 | 10.0 | packet | 12.5 | - | - |"),
        "{text}"
    );

    // If a command fails, the section fails, and the page has no figure of this command.
    let fusewire = std::fs::read_to_string(bundle.path().join("bin/fusewire")).expect("a script");
    bundle.program(
        "bin/fusewire",
        &format!("case $* in *nccl*) exit 1 ;; esac\n{fusewire}"),
    );
    bundle.run(&only, &machine("4", "found  "));
    let (result, what) = bundle.row("multi");
    assert_eq!(result, "FAIL", "{what}");
    assert!(
        what.contains("bin/fusewire perf all_reduce: status 1"),
        "{what}"
    );
    assert!(page(&bundle).contains("| 8 | 10.0 | packet | 12.5 | - | - |"));
}

#[test]
fn a_test_on_several_gpus_that_fails_or_is_skipped_is_on_the_page() {
    let bundle = Bundle::new();
    let only = ["--device", "cuda", "--only", "multi", "--quick"];
    let ranks = "echo 'test several_gpus::x ... ranks on separate GPUs: [2, 4]'";
    let skips = "case $* in *nvls*) echo 'skipped (multicast): GPU 0 has no switch' ;; esac";
    let passes = "echo 'test result: ok. 1 passed; 0 failed'";
    bundle.program("tests/on_device", &format!("{ranks}\n{skips}\n{passes}"));
    bundle.run(&only, &machine("4", "missing"));
    let (result, what) = bundle.row("multi");
    assert_eq!(result, "pass", "{what}");
    assert!(
        what.contains("7 tests passed on up to 4 GPUs; 6 tables"),
        "{what}"
    );
    let text = page(&bundle);
    for line in [
        "| conformance (short list), threads | pass | 2, 4 |  |",
        "| NVLS, threads | skip | 2, 4 | GPU 0 has no switch |",
        "NVLS was not measured: GPU 0 has no switch.",
        "- multi: (multicast): GPU 0 has no switch",
        "| 8 | 10.0 | packet | - | - | - |",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    let strict = [&only[..], &["--strict"]].concat();
    bundle.run(&strict, &machine("4", "missing"));
    assert_eq!(bundle.row("multi").0, "FAIL");

    let fails = "case $* in *killed*) echo 'test result: FAILED. 0 passed'; exit 101 ;; esac";
    bundle.program("tests/on_device", &format!("{ranks}\n{fails}\n{passes}"));
    let output = bundle.run(&only, &machine("4", "missing"));
    assert_eq!(output.status.code(), Some(1));
    let line = "| failure: a process is killed, processes | FAIL | 2, 4 | \
                tests/on_device (in several_gpus::x): status 101 |";
    let text = page(&bundle);
    assert!(text.lines().any(|found| found == line), "{text}");
    assert!(
        text.contains("| NVLS, threads | pass | 2, 4 |  |"),
        "{text}"
    );
}

#[test]
fn the_section_multi_needs_two_gpus() {
    let bundle = Bundle::new();
    for (device, gpus, says) in [
        (
            "cuda",
            "1",
            "ranks on separate GPUs need 2 GPUs, this machine has 1",
        ),
        (
            "cuda:0",
            "4",
            "--device cuda:0 selects one GPU; --device cuda uses all",
        ),
        ("cpu", "4", "the device is cpu"),
    ] {
        let only = ["--device", device, "--only", "multi"];
        bundle.run(&only, &machine(gpus, "missing"));
        let (result, what) = bundle.row("multi");
        assert_eq!(result, "skip", "{what}");
        assert!(what.contains(says), "{what}");
        assert!(page(&bundle).contains(&format!("Not tested: skip: {what}.")));
    }
}

#[test]
fn each_rank_can_have_a_gpu_in_all_sections() {
    let bundle = Bundle::new();
    let test = "echo ON=$FUSEWIRE_TEST_DEVICE; \
                echo 'test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured'";
    bundle.program("tests/on_device", test);
    bundle.program("path/compute-sanitizer", SANITIZER);
    bundle.program("images/fusewire-kernels-multi-rank-grid.sm_90.ptx", "");
    let each = ["--device", "cuda:each", "--only"];
    let log_of = |section: &str, gpus: &str| {
        let arguments = [&each[..], &[section]].concat();
        let output = bundle.run(&arguments, &machine(gpus, "missing"));
        let log = std::fs::read_to_string(bundle.results().join(format!("{section}.log")));
        (
            output.status.code(),
            stderr(&output),
            log.unwrap_or_default(),
        )
    };
    let (status, said, log) = log_of("bitwise", "4");
    assert_eq!(status, Some(0), "{said}");
    assert!(log.contains("ON=cuda:each"), "{log}");
    // Ranks on separate GPUs are processes, and there are at most as many ranks as GPUs.
    let (_, _, log) = log_of("benches", "4");
    let line = "perf all --max-bytes 64M --factor 4 --device cuda --ranks 4 --json";
    assert!(log.contains(line), "{log}");
    assert!(
        !log.contains("--threads") && !log.contains("--ranks 8"),
        "{log}"
    );
    // Multi-rank grids and sanitizers use one GPU.
    let (_, _, log) = log_of("conformance", "4");
    assert!(
        log.contains("ON=cuda:each") && log.contains("ON=cuda\n"),
        "{log}"
    );
    let (_, _, log) = log_of("sanitizers", "4");
    assert!(
        !log.contains("ON=cuda:each") && log.contains("ON=cuda\n"),
        "{log}"
    );

    let (status, said, _) = log_of("bitwise", "1");
    assert_eq!(status, Some(2));
    assert!(said.contains("this machine has 1 GPU;"), "{said}");
}

#[test]
fn timeouts_of_two_ranks_under_a_tool_are_distinguished_from_errors() {
    let bundle = Bundle::new();
    let only = ["--device", "cuda", "--only", "sanitizers"];
    for (says, expected) in [("rank 1 timed out", "pass"), ("all is lost", "FAIL")] {
        let body = format!(
            "case \" $* \" in *short_form_of_2*) echo '{says}'; exit 101 ;; esac{SANITIZER}"
        );
        bundle.program("path/compute-sanitizer", &body);
        bundle.run(&only, CUDA);
        let (result, what) = bundle.row("sanitizers");
        assert_eq!(result, expected, "{what}");
        let part = match expected {
            "pass" => "memcheck: two ranks do not run concurrently",
            _ => "synccheck, short_form_of_2_ranks: status 101",
        };
        assert!(what.contains(part), "{what}");
    }
}

#[test]
fn tools_check_ranks_in_a_multi_rank_grid() {
    let bundle = Bundle::new();
    let only = ["--device", "cuda", "--only", "sanitizers"];
    // A timeout is an error in a multi-rank grid; only ranks in separate grids may time out.
    let in_multi_rank_grid = |body: &str| {
        format!("if [ -n \"${{FUSEWIRE_TEST_MULTI_RANK_GRID-}}\" ]; then {body}; fi{SANITIZER}")
    };
    bundle.program("path/compute-sanitizer", &in_multi_rank_grid("exit 86"));
    bundle.run(&only, CUDA);
    let (result, what) = bundle.row("sanitizers");
    assert_eq!(result, "pass", "{what}");
    assert!(what.contains("no tests in a multi-rank grid"), "{what}");
    bundle.run(&[&only[..], &["--strict"]].concat(), CUDA);
    let (_, what) = bundle.row("sanitizers");
    assert!(what.contains("--strict requires them"), "{what}");

    bundle.program("images/fusewire-kernels-multi-rank-grid.sm_90.ptx", "");
    for (body, expected, says) in [
        (
            "true",
            "pass",
            "racecheck: no errors in short_form_of_2_ranks in a multi-rank grid",
        ),
        (
            "exit 86",
            "FAIL",
            "synccheck found errors in short_form_of_2_ranks in a multi-rank grid",
        ),
        (
            "echo 'rank 1 timed out'; exit 101",
            "FAIL",
            "memcheck, short_form_of_2_ranks in a multi-rank grid: status 101",
        ),
    ] {
        bundle.program("path/compute-sanitizer", &in_multi_rank_grid(body));
        bundle.run(&only, CUDA);
        let (result, what) = bundle.row("sanitizers");
        assert_eq!(result, expected, "{what}");
        assert!(what.contains(says), "{what}");
        assert!(
            what.contains("memcheck: no errors in short_form_of_1_rank;"),
            "{what}"
        );
    }
    // The section conformance also runs in a multi-rank grid, but not on the CPU.
    let test = "echo \"a multi-rank grid: ${FUSEWIRE_TEST_MULTI_RANK_GRID-no}\"";
    let passes =
        "echo 'test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out'";
    bundle.program("tests/on_device", &format!("{test}; {passes}"));
    for (device, times) in [("cuda", 1), ("cpu", 0)] {
        bundle.run(&["--device", device, "--only", "conformance"], CUDA);
        assert_eq!(bundle.row("conformance").0, "pass");
        let log = std::fs::read_to_string(bundle.results().join("conformance.log"));
        let log = log.expect("the section's log");
        assert_eq!(log.matches("a multi-rank grid: 1").count(), times, "{log}");
        assert_eq!(log.matches("a multi-rank grid: no").count(), 1, "{log}");
    }
}

#[test]
fn an_interrupt_ends_the_children() {
    let bundle = Bundle::new();
    // Like a test whose ranks are processes, the fake test binary starts a child process.
    bundle.program(
        "tests/on_device",
        "sleep 300 &\necho $$ $! > \"$PWD/ids\"\nwait",
    );
    let mut script = bundle
        .command(&["--only", "bitwise"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let started = Instant::now();
    let ids = loop {
        let text = std::fs::read_to_string(bundle.path().join("ids")).unwrap_or_default();
        if text.ends_with('\n') {
            break text;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "no child");
        std::thread::sleep(Duration::from_millis(10));
    };
    // Sends TERM, because a shell cannot trap INT if INT was ignored when the shell started.
    let id = script.id().to_string();
    let sent = std::process::Command::new("sh")
        .args(["-c", &format!("kill -TERM {id}")])
        .status();
    assert!(sent.expect("a shell").success());
    let status = script.wait().expect("its end");
    assert_eq!(status.code(), Some(130));
    for id in ids.split_whitespace() {
        let started = Instant::now();
        // A zombie counts as ended, because not every container has a process that reaps zombies.
        let alive = || {
            std::fs::read_to_string(format!("/proc/{id}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        while alive() {
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "{id} still runs"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
