//! Tests a bundle with the real programs, outside the checkout.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::fake::{rows, stderr};

fn bundle(folder: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fusewire-build"))
        .arg("bundle")
        .arg(folder)
        .args(more)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .output()
        .expect("fusewire-build")
}

/// Runs the script in an environment that contains only `PATH`.
fn run(folder: &Path, arguments: &[&str], results: &Path) -> Output {
    Command::new(folder.join("run.sh"))
        .args(arguments)
        .arg("--out")
        .arg(results)
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .current_dir("/")
        .output()
        .expect("a shell")
}

#[test]
#[ignore = "builds for release and runs the tests of a bundle, which takes minutes; CI runs it"]
fn a_bundle_runs_elsewhere_on_the_cpu() {
    let here = tempfile::tempdir().expect("a folder");
    let made = here.path().join("bundle");
    let output = bundle(&made, &[]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", stderr(&output));
    assert!(said.contains("glibc 2."), "{said}");
    assert!(
        said.contains("left out: test launchers: needs mpirun"),
        "{said}"
    );

    let elsewhere = here.path().join("elsewhere");
    fs::rename(&made, &elsewhere).expect("another folder");
    let results = here.path().join("results");
    let output = run(&elsewhere, &["--device", "cpu", "--quick"], &results);
    let page = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{page}");
    assert_eq!(output.status.code(), Some(0), "{page}{}", stderr(&output));
    for (section, result, what) in rows(&results) {
        let expected = if ["multi", "sanitizers"].contains(&section.as_str()) {
            "skip"
        } else {
            "pass"
        };
        assert_eq!(result, expected, "{section}: {what}");
    }
    let page = fs::read_to_string(results.join("results.md")).expect("a page");
    let line = "| conformance | short conformance list: operations, sizes, types, reductions | \
                pass | 6 |";
    assert!(page.contains(line), "{page}");
    assert!(
        results
            .join("perf-2-graph.json")
            .metadata()
            .expect("a table")
            .len()
            > 1000
    );

    // Without a driver, the script prints one line and stops.
    if fs::read_to_string(results.join("devices.txt"))
        .expect("the devices")
        .contains("missing  cuda ")
    {
        let output = run(&elsewhere, &["--device", "cuda"], &here.path().join("none"));
        assert_eq!(output.status.code(), Some(2));
        let said = stderr(&output);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("--device cuda: "), "{said}");
    }

    // After a change of a file, the script reports failures. A second call of `bundle` replaces the
    // changed file, even if the bundle is too large. The size error names the largest files.
    let packed = std::process::Command::new("gzip")
        .args(["-c", "/bin/false"])
        .output()
        .expect("gzip");
    fs::write(elsewhere.join("tests/on_device.gz"), packed.stdout).expect("a program that fails");
    let output = run(&elsewhere, &["--only", "bitwise,files"], &results);
    assert_eq!(output.status.code(), Some(1));
    for (section, result, what) in rows(&results) {
        assert_eq!(result, "FAIL", "{section}");
        assert!(what.contains("tests/on_device"), "{section}: {what}");
    }
    let output = bundle(&elsewhere, &["--strip", "--max-mib", "1"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(
        said.contains("--max-mib 1 allows; the largest files are ") && said.contains("KiB"),
        "{said}"
    );
    let output = run(&elsewhere, &["--only", "files"], &results);
    assert_eq!(output.status.code(), Some(0), "after the second call");
}
