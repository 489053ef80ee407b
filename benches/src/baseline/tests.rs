//! Tests that the baseline compiles, that its argument layout matches the harness, and that its
//! algorithms are correct. Host threads run the algorithms. The check must fail on copies of the
//! sources with a seeded bug.

use std::collections::BTreeMap;
use std::process::Output;

use super::*;
use crate::versus_cuda::entries;

/// Prints why a test is skipped. Panics if `FUSEWIRE_REQUIRE` names `what`.
fn skip(what: &str, reason: &str) {
    let required = env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name.trim() == what),
        "FUSEWIRE_REQUIRE names {what}, but: {reason}"
    );
    eprintln!("skipped ({what}): {reason}");
}

fn nvcc() -> Option<PathBuf> {
    find()
        .map_err(|error| skip("nvcc", &error.to_string()))
        .ok()
}

#[test]
fn every_file_is_a_source() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
    for file in fs::read_dir(folder).expect("the folder").flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        if name.ends_with(".cu") || name.ends_with(".cuh") {
            let known = SOURCES.iter().any(|(source, _)| *source == name);
            assert!(known, "{name} is not in SOURCES");
        }
    }
}

#[test]
fn cubins_are_made() {
    let Some(nvcc) = nvcc() else { return };
    let out = tempfile::tempdir().expect("a folder");
    let arguments = Arguments {
        out: out.path().join("new"),
        target: vec!["sm_80".to_owned(), "sm_90".to_owned()],
    };
    main(&arguments).expect("compiled");
    for target in &arguments.target {
        let cubin = fs::read(arguments.out.join(file_name(target))).expect("a cubin");
        assert!(cubin.starts_with(b"\x7fELF"), "{target}");
    }
    let error = compile(&nvcc, "sm_1", &STRICT).expect_err("no such architecture");
    assert!(error.to_string().contains("sm_1"), "{error}");
}

/// Returns the kernels of a PTX text with the offsets and sizes of their parameters.
fn parameters(ptx: &str) -> BTreeMap<String, Vec<(usize, usize)>> {
    let mut kernels = BTreeMap::new();
    for kernel in ptx.split(".visible .entry ").skip(1) {
        let (name, rest) = kernel.split_once('(').expect("parameters");
        let list = rest.split_once("\n)").map_or("", |(list, _)| list);
        let mut end = 0_usize;
        let mut fields = Vec::new();
        for line in list.lines().filter(|line| line.contains(".param")) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |text: &str| text.parse::<usize>().expect("a number");
            let (align, size) = if words[1] == ".align" {
                let count = line.rsplit_once('[').expect("an array").1;
                (number(words[2]), number(count.trim_end_matches([']', ','])))
            } else {
                let bits = number(words[1].trim_start_matches(['.', 'u', 'b', 'f', 's']));
                (bits / 8, bits / 8)
            };
            let offset = end.next_multiple_of(align);
            fields.push((offset, size));
            end = offset + size;
        }
        kernels.insert(name.trim().to_owned(), fields);
    }
    kernels
}

#[test]
fn arguments_lie_where_they_are_expected() {
    let Some(nvcc) = nvcc() else { return };
    let ptx = compile(&nvcc, "sm_90", &["-ptx"]).expect("compiled");
    let ptx = String::from_utf8(ptx).expect("text");
    let there = parameters(&ptx);
    let expected: BTreeMap<String, Vec<(usize, usize)>> = entries::all()
        .into_iter()
        .map(|entry| (entry.symbol(), entry.layout()))
        .collect();
    assert!(there.len() > 90, "{} kernels", there.len());
    assert_eq!(there, expected);
    // No load may use the non-coherent path, because peers write the data. Synchronisation with
    // other GPUs requires system scope. Only the counter of a rank's blocks has the GPU's.
    assert!(!ptx.contains("ld.global.nc"));
    assert!(ptx.contains("st.release.sys") && ptx.contains("ld.acquire.sys"));
    assert_eq!(
        ptx.matches(".gpu.").count(),
        ptx.matches("atom.acq_rel.gpu.global.add.u32").count()
    );
}

/// Compiles and runs the check of a kernel. `change` replaces a text in one of the sources. Returns
/// `None` if g++ is missing.
fn check(folder: &Path, change: Option<(&str, &str, &str)>, kernel: &[&str]) -> Option<Output> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/emulation");
    let emulation = folder.join("emulation");
    fs::create_dir_all(&emulation).expect("a folder");
    for file in fs::read_dir(source).expect("the emulation").flatten() {
        fs::copy(file.path(), emulation.join(file.file_name())).expect("copied");
    }
    write_sources(folder).expect("written");
    if let Some((file, old, new)) = change {
        let path = folder.join(file);
        let text = fs::read_to_string(&path).expect("a source");
        assert!(text.contains(old), "{file} has no {old}");
        fs::write(&path, text.replacen(old, new, 1)).expect("written");
    }
    let program = folder.join("check");
    // Lowers the limit on polls, because a seeded bug may cause a wait that never ends.
    let polls = change.map(|_| "-DPOLLS=(1u << 14)");
    let made = Command::new("g++")
        .args(polls)
        .args(["-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra"])
        .args(["-Wno-sign-compare", "-Wno-unknown-pragmas", "-Werror"])
        .args(["-x", "c++", "-o"])
        .args([&program, &emulation.join("check.cpp")])
        .output();
    let made = match made {
        Ok(made) => made,
        Err(error) => {
            skip("nvcc", &format!("g++ cannot be started: {error}"));
            return None;
        }
    };
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let output = Command::new(&program).args(kernel).output();
    Some(output.expect("the check runs"))
}

#[test]
#[ignore = "compiles and runs the CUDA C++ baseline, which takes long; run by `.ci/run bench`"]
fn host_threads_get_the_right_sums() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(output) = check(folder.path(), None, &[]) else {
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let unknown = Command::new(folder.path().join("check"))
        .arg("nothing")
        .status();
    assert_eq!(unknown.expect("it runs").code(), Some(2));
}

/// Removes one wait of each protocol; the check must fail. Thread timing is random, so this may
/// take several runs.
#[test]
#[ignore = "compiles and runs the CUDA C++ baseline, which takes long; run by `.ci/run bench`"]
fn a_missing_wait_is_found() {
    let relaxed = "barrier.template finish<Order::Relaxed>();";
    let release = "barrier.template finish<Order::Release>();";
    let arrived = "wait_for_flag<Order::Release>(pad->arrived, epoch);";
    let pulled = "wait_for_flag<Order::Relaxed>(pad->combined, epoch);";
    let pushed = "wait_for_flag<Order::Release>(pad->combined, epoch);";
    for (change, kernel) in [
        (("all_reduce.cuh", relaxed, "barrier.close();"), "one_stage"),
        (
            ("all_reduce.cuh", release, "barrier.close();"),
            "two_stage_push",
        ),
        (
            ("all_reduce.cuh", "barrier.middle();", ""),
            "two_stage_pull",
        ),
        (
            ("barrier.cuh", "arrive_and_wait<Order::Relaxed>();", ""),
            "one_stage",
        ),
        (("packets.cuh", "(flag & 1)", "0"), "packets_one_shot"),
        (
            ("fused.cuh", "offset = MOST_WARPS / 2", "offset = 0"),
            "norm_alone",
        ),
        (("moe.cuh", arrived, ""), "moe_rank_major"),
        (("moe.cuh", arrived, ""), "moe_expert_major"),
        (("moe.cuh", pulled, ""), "moe_rank_major"),
        (("moe.cuh", pushed, ""), "moe_expert_major"),
        (("moe.cuh", "== gridDim.x - 1", "== 0"), "moe_expert_major"),
        (
            ("moe.cuh", "offset = 4; offset", "offset = 2; offset"),
            "moe_rank_major",
        ),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let Some(first) = check(folder.path(), Some(change), &[kernel]) else {
            return;
        };
        let mut codes = vec![first.status.code()];
        while codes.last() == Some(&Some(0)) && codes.len() < 20 {
            let again = Command::new(folder.path().join("check"))
                .arg(kernel)
                .output();
            codes.push(again.expect("it runs").status.code());
        }
        let found = matches!(codes.last(), Some(Some(1 | 3)));
        assert!(found, "{kernel} without {:?}: {codes:?}", change.1);
    }
}
