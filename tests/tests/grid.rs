//! The conformance grid on all backends, with several numbers of ranks and ways to start them.

use core::time::Duration;
use std::sync::{Mutex, PoisonError};

use fusewire::DType;
use fusewire_tests::backends;
use fusewire_tests::factor;
use fusewire_tests::grid::{self, Breadth, Fault, Table, Tally};
use fusewire_tests::process::{self, Host};
use fusewire_tests::runner::{Processes, Setup, Threads};
use fusewire_tests::skip::full;

/// Serializes the runs, because each run starts one thread per rank.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn regular() -> Breadth {
    if full() {
        Breadth::Full
    } else {
        Breadth::Regular
    }
}

fn setup(backend: &'static str, ranks: u32) -> Setup {
    Setup {
        backend,
        // The default size. The conformance lists already test operations that need several rounds
        // of staging.
        staging: 1 << 20,
        ..Setup::new(ranks)
    }
}

fn threads(table: &mut Table, backend: &'static str, ranks: u32, breadth: Breadth) {
    let setup = setup(backend, ranks);
    let results = Threads.each(&setup, |comm| grid::run(comm, breadth));
    let tallies: Vec<Tally> = results
        .into_iter()
        .map(|result| result.unwrap_or_else(|wrong| panic!("{wrong}")))
        .collect();
    table.add(backend, &format!("{ranks} thr"), tallies[0].clone());
}

fn processes(
    table: &mut Table,
    test: &'static str,
    backend: &'static str,
    ranks: u32,
    breadth: Breadth,
) {
    let processes = Processes {
        test,
        host: Host::Parent,
    };
    let tallies = processes.each(
        &setup(backend, ranks),
        &format!("{breadth:?}"),
        Duration::from_secs(300),
    );
    let tallies = tallies.unwrap_or_else(|wrong| panic!("{wrong}"));
    let tally = Tally::decode(&tallies[0]).expect("what the child has written");
    table.add(backend, &format!("{ranks} proc"), tally);
}

/// If this process is a child, runs the grid on one rank and returns true. Otherwise, returns
/// false.
fn child() -> bool {
    Processes::child_of_each(|comm, breadth| {
        let breadth = match breadth {
            "Full" => Breadth::Full,
            "Short" => Breadth::Short,
            _ => Breadth::Regular,
        };
        grid::run(comm, breadth).map(|tally| tally.encode())
    })
}

/// Gloo gets the factor of a scaled sum from the host.
#[test]
fn gloo_has_factors_in_memory() {
    if !backends::is_here("gloo") {
        return;
    }
    let _alone = alone();
    let dtypes = [DType::F32, DType::F16, DType::Bf16, DType::I32, DType::U64];
    for result in Threads.each(&setup("gloo", 3), |comm| {
        assert_eq!(comm.backend(), "gloo");
        factor::compare(&comm, &dtypes, &[1, 1000]).map_err(|error| error.to_string())
    }) {
        result.unwrap_or_else(|wrong| panic!("{wrong}"));
    }
}

fn alone() -> impl Drop {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn fusewire() {
    if child() {
        return;
    }
    let _alone = alone();
    let mut table = Table::default();
    for ranks in 1..=8 {
        // The short form runs each number of ranks in one way.
        let (as_threads, as_processes) = match ranks {
            2 | 3 | 4 | 8 if full() => (true, true),
            2 | 8 => (true, false),
            3 | 4 => (false, true),
            _ => {
                threads(&mut table, "fusewire", ranks, Breadth::Short);
                (false, false)
            }
        };
        if as_threads {
            threads(&mut table, "fusewire", ranks, regular());
        }
        if as_processes {
            processes(&mut table, "fusewire", "fusewire", ranks, regular());
        }
    }
    println!("{table}");
}

#[test]
fn gloo() {
    if child() {
        return;
    }
    if !backends::is_here("gloo") {
        return;
    }
    let _alone = alone();
    let mut table = Table::default();
    for ranks in [2, 4] {
        threads(&mut table, "gloo", ranks, regular());
        processes(&mut table, "gloo", "gloo", ranks, regular());
    }
    println!("{table}");
}

#[test]
fn sample() {
    if child() {
        return;
    }
    let _alone = alone();
    let mut table = Table::default();
    threads(&mut table, "sample", 2, regular());
    let breadth = if full() {
        Breadth::Full
    } else {
        Breadth::Short
    };
    processes(&mut table, "sample", "sample", 2, breadth);
    println!("{table}");
}

#[test]
fn injected_faults_are_caught() {
    let _alone = alone();
    for backend in backends::NAMES {
        if !backends::is_here(backend) {
            continue;
        }
        let say =
            |fault| Threads.each(&setup(backend, 2), |comm| grid::run_with_fault(comm, fault));
        for result in say(Fault::None) {
            assert!(result.is_ok(), "{result:?}");
        }
        for (rank, result) in say(Fault::FlipBit).into_iter().enumerate() {
            assert_eq!(
                result.is_err(),
                rank == 1,
                "{backend}, rank {rank}: {result:?}"
            );
        }
        for result in say(Fault::SwapRanks) {
            let wrong = result.expect_err("ranks were swapped");
            assert!(wrong.contains("instead of"), "{wrong}");
        }
    }
    assert!(process::role().is_none());
}
