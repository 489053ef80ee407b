//! Runs `versus cuda` without a GPU, on the fake CUDA driver, which executes the kernels of both
//! sides on host threads. Tests the results, the checks and the reports. The measured times have no
//! meaning.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fusewire::gpu::images::Images;
use fusewire_cuda_fake_library::{install, stand_in_of};

/// Compiles the baseline's kernels to a shared object. `change` names a source file and replaces a
/// text in it. Returns `None` if g++ is missing.
fn emulation(folder: &Path, change: Option<(&str, &str, &str)>) -> Option<PathBuf> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    let copy = |from: PathBuf, to: PathBuf| {
        fs::create_dir_all(&to).expect("a folder");
        for file in fs::read_dir(from).expect("the sources").flatten() {
            if file.path().is_file() {
                fs::copy(file.path(), to.join(file.file_name())).expect("copied");
            }
        }
    };
    copy(sources.clone(), folder.to_owned());
    copy(sources.join("emulation"), folder.join("emulation"));
    if let Some((file, old, new)) = change {
        let path = folder.join(file);
        let text = fs::read_to_string(&path).expect("a source");
        assert!(text.contains(old), "{file} has no {old}");
        fs::write(&path, text.replacen(old, new, 1)).expect("written");
    }
    let object = folder.join("baseline.so");
    let made = Command::new("g++")
        .args(["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread"])
        .args(["-Wno-unknown-pragmas", "-x", "c++", "-o"])
        .args([&object, &folder.join("emulation/entries.cpp")])
        .output();
    let made = match made {
        Ok(made) => made,
        Err(error) => {
            let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
            let is_required = required.split(',').any(|name| name.trim() == "nvcc");
            assert!(!is_required, "g++ cannot be started: {error}");
            eprintln!("skipped: g++ cannot be started: {error}");
            return None;
        }
    };
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{said}");
    Some(object)
}

/// Runs `versus cuda` on the fake driver.
fn versus(folder: &Path, object: &Path, arguments: &[&str]) -> Output {
    let cubin = cubin(folder, object);
    command(folder, object)
        .args(["versus", "cuda", "--ranks", "2", "--types", "bf16"])
        .args(["--threads", "64", "--blocks", "2", "--hidden", "248"])
        .args(["--rounds", "1", "--operations", "2", "--cubin"])
        .arg(cubin)
        .arg("--json")
        .arg(folder.join("out.json"))
        .arg("--out")
        .arg(folder.join("out.md"))
        .args(arguments)
        .output()
        .expect("the harness")
}

/// Returns a command that runs the program with the fake driver.
fn command(folder: &Path, object: &Path) -> Command {
    let driver = folder.join("driver");
    fs::create_dir_all(&driver).expect("a folder");
    install(&driver).expect("the fake");
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusewire-benches"));
    command
        .env("LD_LIBRARY_PATH", driver)
        .env("FUSEWIRE_CUDA_FAKE_KERNELS", object)
        .env_remove("FUSEWIRE_IMAGES");
    command
}

fn cubin(folder: &Path, object: &Path) -> PathBuf {
    let cubin = folder.join("baseline.image");
    let image = stand_in_of(object).expect("an image");
    fs::write(&cubin, format!("{image}\0")).expect("written");
    cubin
}

/// Returns the name and the number of wrong elements of every candidate of a section.
fn candidates(folder: &Path, section: &str) -> Vec<(String, u64)> {
    let text = fs::read_to_string(folder.join("out.json")).expect("JSON");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let rows = report[section].as_array().expect("rows");
    rows.iter()
        .flat_map(|row| row["figures"].as_array().expect("figures"))
        .map(|figure| {
            let name = figure["name"].as_str().expect("a name").to_owned();
            (name, figure["wrong"].as_u64().expect("a count"))
        })
        .collect()
}

#[test]
#[ignore = "compiles and runs the CUDA C++ baseline, which takes long; run by `.ci/run bench`"]
fn every_candidate_is_right_and_timed() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    let Some(object) = emulation(at, None) else {
        return;
    };
    let only = ["--only", "all-reduce,fused"];
    let sizes = ["--sizes", "512,6160", "--modes", "graph", "--tokens", "5"];
    let output = versus(at, &object, &[&only[..], &sizes].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    let found = candidates(at, "all_reduce");
    for name in [
        "one_stage",
        "two_stage_pull",
        "two_stage_push",
        "packets_one_shot",
        "packets_two_shot",
        "copy",
        "signal",
    ] {
        let times = found
            .iter()
            .filter(|(known, wrong)| known == name && *wrong == 0);
        assert_eq!(times.count(), 2, "{name}: {found:?}");
    }
    let fused = candidates(at, "fused");
    for name in [
        "fused",
        "norm_by_barrier",
        "norm_by_packets",
        "one_stage, then norm_alone",
    ] {
        assert!(fused.contains(&(name.to_owned(), 0)), "{name}: {fused:?}");
    }
    let tables = fs::read_to_string(at.join("out.md")).expect("tables");
    assert!(tables.contains("### All-reduce, 2 ranks, bf16, graph; 2 blocks of 64 threads"));
    assert!(
        tables.contains("| 5 | ") && tables.contains("| 512 B | "),
        "{tables}"
    );
}

/// Options of a small measurement of a mixture of experts.
const MIXTURE: [&str; 8] = [
    "--only",
    "moe",
    "--moe-tokens",
    "1,5",
    "--moe-hidden",
    "256",
    "--experts",
    "16",
];

#[test]
#[ignore = "compiles and runs the CUDA C++ baseline, which takes long; run by `.ci/run bench`"]
fn every_mixture_of_experts_is_right_and_timed() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    let Some(object) = emulation(at, None) else {
        return;
    };
    let output = versus(at, &object, &MIXTURE);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    let found = candidates(at, "moe");
    // Two payloads and two numbers of tokens in each layout.
    for (name, count) in [
        ("dispatch, combine", 8),
        ("moe_dispatch_block, moe_combine_pull", 4),
        ("moe_dispatch_warp, moe_combine_pull", 4),
        ("moe_dispatch_experts_block, moe_combine_push", 4),
        ("moe_dispatch_experts_warp, moe_combine_push", 4),
    ] {
        let right = found
            .iter()
            .filter(|(known, wrong)| known == name && *wrong == 0);
        assert_eq!(right.count(), count, "{name}: {found:?}");
    }
    let tables = fs::read_to_string(at.join("out.md")).expect("tables");
    for title in [
        "hidden 256, top 8 of 16, bf16 payload, rank-major, graph; 2 blocks",
        "hidden 256, top 8 of 16, e4m3 payload, expert-major, graph; 2 blocks",
    ] {
        assert!(tables.contains(title), "{title}: {tables}");
    }
}

#[test]
#[ignore = "compiles and runs the CUDA C++ baseline, which takes long; run by `.ci/run bench`"]
fn a_wrong_mixture_of_experts_is_named_and_makes_the_run_fail() {
    // One bug in the rows that dispatch delivers, and one in the sums.
    let copy = (
        "store(to(place) + column, value);",
        "store(to(place) + column / 2 * 2, value);",
    );
    let sum = ("__fmul_rn(weight, result[i])", "result[i]");
    for (old, new) in [copy, sum] {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        let Some(object) = emulation(at, Some(("moe.cuh", old, new))) else {
            return;
        };
        let output = versus(
            at,
            &object,
            &[&MIXTURE[..], &["--payloads", "bf16"]].concat(),
        );
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(
            said.contains("WRONG: moe_dispatch_block, moe_combine_pull, "),
            "{said}"
        );
        for (name, wrong) in candidates(at, "moe") {
            let is_baseline = name.starts_with("moe_");
            assert_eq!(wrong > 0, is_baseline, "{new}: {name} {wrong}");
        }
    }
}

#[test]
#[ignore = "compiles and runs the CUDA C++ baseline, which takes long; run by `.ci/run bench`"]
fn a_wrong_baseline_is_named_and_makes_the_run_fail() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    let change = (
        "all_reduce.cuh",
        "store(to + i + u * stride, sums[u]);",
        "store(to + i, sums[u]);",
    );
    // The seeded bug skips some vectors in the unrolled loop, which runs only if there are more
    // vectors than threads.
    let Some(object) = emulation(at, Some(change)) else {
        return;
    };
    let sizes = ["--sizes", "8K", "--modes", "eager", "--only", "all-reduce"];
    let output = versus(at, &object, &sizes);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("WRONG: one_stage, ") && said.contains("wrong elements"),
        "{said}"
    );
    let wrong: Vec<String> = candidates(at, "all_reduce")
        .into_iter()
        .filter(|(_, wrong)| *wrong > 0)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(wrong, ["one_stage"]);
}

#[test]
#[ignore = "compiles and runs the CUDA C++ baseline, which takes long; run by `.ci/run bench`"]
fn what_bounds_cost_is_measured_with_other_images_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    let Some(object) = emulation(at, None) else {
        return;
    };
    let cubin = cubin(at, &object);
    let images = at.join("unbounded");
    fs::create_dir_all(&images).expect("a folder");
    let run = || {
        command(at, &object)
            .args([
                "wait-cost",
                "--device",
                "cuda",
                "--rounds",
                "2",
                "--sizes",
                "512",
            ])
            .arg("--unbounded")
            .arg(&images)
            .args([
                "--",
                "--hidden",
                "248",
                "--threads",
                "64",
                "--blocks",
                "2",
                "--operations",
                "2",
            ])
            .arg("--cubin")
            .arg(&cubin)
            .output()
            .expect("the harness")
    };
    let refused = |expected: &str| {
        let output = run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains(expected),
            "{said}"
        );
    };
    refused("there is none for sm_");
    let own = |target| Images::in_folders(target, Vec::new()).without_cubins();
    let newer = own("sm_90").library("all_reduce");
    let mut own = own("sm_80").library("all_reduce").expect("an image").bytes;
    assert_eq!(own.pop(), Some(0));
    fs::write(images.join("all_reduce.sm_80.ptx"), &own).expect("written");
    // The library may have an image for the fake device's architecture.
    let mut newer = newer.expect("an image").bytes;
    assert_eq!(newer.pop(), Some(0));
    fs::write(images.join("all_reduce.sm_90.ptx"), &newer).expect("written");
    refused("is the library's own");
    for (name, mut bytes) in [("sm_80", own), ("sm_90", newer)] {
        bytes.extend(b"// another\n");
        fs::write(images.join(format!("all_reduce.{name}.ptx")), bytes).expect("written");
    }
    let output = run();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    // Slow candidates are left out of the rounds, but the candidate `auto` never is.
    assert!(
        table.contains("| auto: ") && table.contains(" | 512 | "),
        "{table}"
    );
}
