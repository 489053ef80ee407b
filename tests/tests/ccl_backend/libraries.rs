//! Tests libraries that are missing, invalid, selected by the environment, or installed.

use std::sync::Arc;

use fusewire::store::MemoryStore;
use fusewire::{Communicator, Device, Error, Options, ReduceOp, Result, new_comm};
use fusewire_ccl_sys::{Kind, Library};
use fusewire_tests::process::{Host, Ranks, report, role};
use fusewire_tests::skip::skip;

use crate::{Fake, TEST_TIMEOUT};

fn alone(backend: &str, library: Option<&str>) -> Result<Communicator> {
    let mut options = Options::default();
    options.abort_process_on_timeout_or_error = Some(false);
    options.timeout = TEST_TIMEOUT;
    options.store = Some(Arc::new(MemoryStore::new()));
    options.rank_size = Some((0, 1));
    if let Some(library) = library {
        let path = library.to_owned();
        options.hints.insert("library_path".to_owned(), path);
    }
    new_comm(backend, Device::Cpu, "alone", options)
}

#[test]
fn a_missing_library_is_reported_with_what_to_do() {
    for (backend, variable) in [
        ("nccl", "FUSEWIRE_NCCL_PATH"),
        ("ncclx", "FUSEWIRE_NCCLX_PATH"),
        ("rccl", "FUSEWIRE_RCCL_PATH"),
        ("rcclx", "FUSEWIRE_RCCLX_PATH"),
    ] {
        let error = alone(backend, Some("/nowhere/lib.so")).expect_err("nowhere");
        assert!(matches!(error, Error::Backend { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("backend {backend}: open: ")),
            "{text}"
        );
        for part in ["/nowhere/lib.so", "No such file", "install", variable] {
            assert!(text.contains(part), "{text}");
        }
    }
}

#[test]
fn hints_set_the_configuration_of_the_library() {
    let create = |fake: &Fake, hints: &[(&str, &str)]| {
        let options = Options::new()
            .return_errors()
            .timeout(TEST_TIMEOUT)
            .store(Arc::new(MemoryStore::new()))
            .rank_size(0, 1)
            .hint("library_path", fake.path.to_str().expect("a path"));
        let add = |options: Options, hint: &(&str, &str)| options.hint(hint.0, hint.1);
        let options = hints.iter().fold(options, add);
        new_comm("nccl", Device::Cpu, "alone", options).and_then(|comm| comm.finalize())
    };
    let hints = [
        ("minCTAs", "2"),
        ("maxCTAs", "7"),
        ("cga_cluster_size", "4"),
        ("netName", "Socket"),
    ];
    let fake = Fake::new();
    create(&fake, &hints).expect("a communicator");
    create(&fake, &[]).expect("a communicator");
    let records = fake.take();
    let created: Vec<_> = records
        .iter()
        .filter(|record| record.name.starts_with("ncclCommInitRank"))
        .map(|of| {
            let values = [of.min_ctas, of.max_ctas, of.cga, of.net_name];
            (of.name.as_str(), values)
        })
        .collect();
    assert_eq!(
        created,
        [
            ("ncclCommInitRankConfig", [2, 7, 4, 6]),
            ("ncclCommInitRank", [-1; 4])
        ]
    );
    let error = create(&fake, &[("minCTAs", "two")]).expect_err("no number");
    assert!(error.to_string().contains("not a number"), "{error}");
    let old = Fake::of_version(21_800);
    let error = create(&old, &[("nvlsCTAs", "2")]).expect_err("too old");
    assert!(error.to_string().contains("too old"), "{error}");
}

#[test]
fn all_usual_names_are_tried() {
    const TEST: &str = "libraries::all_usual_names_are_tried";
    if role().as_deref() == Some("names") {
        return match alone("rccl", None) {
            Ok(_) => report("made"),
            Err(error) => report(error.to_string().replace('\n', " ")),
        };
    }
    // If RCCL is installed under one of the usual names, loading succeeds and there is no error to
    // check.
    if Library::open(Kind::Rccl, None).is_ok() {
        return skip("no-rccl", "RCCL is installed");
    }
    let mut ranks = Ranks::start(TEST, "names", 1, Host::Parent, &[]);
    let text = ranks.processes[0]
        .next_report(TEST_TIMEOUT)
        .expect("a report");
    for part in [
        "librccl.so.1",
        "librccl.so:",
        "ROCm's rccl",
        "FUSEWIRE_RCCL_PATH",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn another_library_is_refused() {
    let error = alone("nccl", Some("libc.so.6")).expect_err("not NCCL");
    assert!(
        error.to_string().contains("it has no ncclGetVersion"),
        "{error}"
    );
}

/// Tests both environment variables in child processes, because the environment is global to a
/// process.
#[test]
fn the_environment_names_the_library() {
    const TEST: &str = "libraries::the_environment_names_the_library";
    if role().as_deref() == Some("named") {
        let comm = alone("nccl", None).expect("by its variable");
        let mut x = [7i32];
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)
            .expect("a sum");
        comm.finalize().expect("sound");
        report(format!("{} {}", comm.backend_version(), x[0]));
        return;
    }
    let fake = Fake::new();
    let path = fake.path.display().to_string();
    for (own, torchcomms) in [(path.as_str(), "/nowhere"), ("", path.as_str())] {
        let environment = [
            ("FUSEWIRE_NCCL_PATH", own.to_owned()),
            ("TORCHCOMMS_BACKEND_LIB_PATH_NCCL", torchcomms.to_owned()),
            ("FUSEWIRE_CCL_FAKE_VERSION", "22304".to_owned()),
        ];
        let mut ranks = Ranks::start(TEST, "named", 1, Host::Parent, &environment);
        let report = ranks.processes[0].next_report(TEST_TIMEOUT);
        assert_eq!(report.as_deref(), Ok("2.23.4 7"));
        ranks.succeed(TEST_TIMEOUT).expect("it ends");
    }
}

/// Checks that NCCL is refused on the CPU before any call, because it cannot access host memory.
#[test]
fn the_real_library_needs_a_gpu() {
    let library = match Library::open(Kind::Nccl, None) {
        Ok(library) => library,
        Err(error) => return skip("nccl", &error.to_string()),
    };
    assert!(!library.uses_host_memory());
    println!(
        "{} {}: {}",
        library.path(),
        library.version(),
        library.features()
    );
    let error = alone("nccl", None).expect_err("no GPU");
    let expected = "backend nccl: init: nccl needs a GPU; this communicator's device is cpu";
    assert_eq!(error.to_string(), expected);
}
