//! Tests ranks on several hosts, emulated by network namespaces of this machine. A virtual cable
//! that a test can cut connects the namespaces.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use fusewire::{Communicator, Determinism, Device, InterHost, Options, ReduceOp, new_comm};
use fusewire_tests::netns::{self, ADDRESSES, Cable};
use fusewire_tests::process::{Process, free_port, report, role, start};
use fusewire_tests::runner::Setup;
use fusewire_tests::skip::{has_gloo, skip};

use super::names;

/// Time limit of the tests' waits.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Timeout of the operations over the cut cable.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Connection of the hosts: `proxy`, `gloo`, or `any by gloo`.
const BY: &str = "FUSEWIRE_TEST_BY";
const NAMESPACE: &str = "FUSEWIRE_TEST_NAMESPACE";
/// Number of f32 elements in 64 MiB.
const LARGE: usize = 16 << 20;

/// Starts two ranks at each end of the cable.
fn at_both_ends(test: &str, role: &str, cable: &Cable, more: &[(&str, &str)]) -> Vec<Process> {
    let port = free_port();
    (0..4usize)
        .map(|rank| {
            let end = rank / 2;
            let variables = [
                ("TORCHCOMM_RANK", rank.to_string()),
                ("TORCHCOMM_SIZE", "4".to_owned()),
                ("MASTER_ADDR", ADDRESSES[0].to_owned()),
                ("MASTER_PORT", port.to_string()),
                ("FUSEWIRE_HOST_ID", format!("end-{end}")),
                (NAMESPACE, cable.name(end).to_owned()),
            ];
            let more = more
                .iter()
                .map(|(name, value)| (*name, (*value).to_owned()));
            let all: Vec<_> = variables
                .into_iter()
                .chain(more)
                .map(|(name, value)| (name.to_owned(), value))
                .collect();
            start(test, role, &all)
        })
        .collect()
}

fn cable(tag: &str) -> Option<Cable> {
    match Cable::new(tag) {
        Ok(cable) => Some(cable),
        Err(reason) => {
            skip("netns", &reason);
            None
        }
    }
}

fn enter() {
    let name = std::env::var(NAMESPACE).expect("set by the parent");
    netns::enter(&name).expect("the namespace");
}

/// Runs `run` three times. Returns the shortest time in seconds.
fn best_of_three(mut run: impl FnMut()) -> f64 {
    let times = (0..3).map(|_| {
        let started = Instant::now();
        run();
        started.elapsed().as_secs_f64()
    });
    times.fold(f64::INFINITY, f64::min)
}

/// If this process is a child, checks and measures an all_reduce of 64 MiB on each communicator,
/// and returns true. Returns false otherwise.
fn sums_of_large() -> bool {
    if role().as_deref() != Some("large") {
        return false;
    }
    enter();
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    // The ranks of both ends share the cores of this machine.
    options.testing.spins = Some(200);
    let comm = Communicator::from_env(Device::Cpu, options.clone()).expect("a communicator");
    let (store, rank) = (Arc::clone(comm.store()), comm.rank());
    options.store = Some(Arc::clone(&store));
    options.rank_size = Some((rank, 4));
    let mut comms = vec![("proxy", comm)];
    if has_gloo() {
        options.inter_host = InterHost::Gloo;
        for (name, determinism) in [
            ("bitwise by gloo", Determinism::Bitwise),
            ("any by gloo", Determinism::Any),
        ] {
            options.determinism = determinism;
            let store = Arc::clone(&store);
            let comm = Communicator::new(Device::Cpu, rank, 4, store, name, options.clone());
            comms.push((name, comm.expect("a communicator")));
        }
        let flat = new_comm("gloo", Device::Cpu, "flat", options).expect("gloo");
        comms.push(("flat gloo", flat));
    }
    let value = |rank: u32, i: usize| (i % 1021) as f32 * 0.5 + rank as f32;
    let mut x = vec![0f32; LARGE];
    let mut said = Vec::new();
    for (name, comm) in &comms {
        x.iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = value(rank, i));
        comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)
            .expect("a sum");
        for (i, x) in x.iter().enumerate() {
            let must: f32 = (0..4).map(|rank| value(rank, i)).sum();
            assert_eq!(*x, must, "element {i} by {name}");
        }
        let best = best_of_three(|| {
            comm.all_reduce(x.as_mut_slice(), ReduceOp::Max)
                .expect("a maximum");
        });
        said.push(format!("{name} {:.0} ms", best * 1e3));
    }
    report(said.join(", "));
    for (_, comm) in &comms {
        comm.barrier().expect("a barrier");
    }
    // Rank 0 serves the store, so every rank must finalize before rank 0 exits.
    for (_, comm) in &comms {
        comm.finalize().expect("an end");
    }
    true
}

#[test]
fn two_namespaces_have_the_bits_of_one_host() {
    if role().as_deref() == Some("conforms") {
        enter();
        assert!(names::conforms());
        return;
    }
    let Some(cable) = cable("n") else {
        return;
    };
    let test = "cable::two_namespaces_have_the_bits_of_one_host";
    let hosts = [(names::HOSTS, "end-0,end-0,end-1,end-1")];
    let mut ranks = at_both_ends(test, "conforms", &cable, &hosts);
    for process in &mut ranks {
        let said = process.next_report(TEST_TIMEOUT).expect("a report");
        let calls: u64 = said.trim_end_matches(" calls").parse().expect("a number");
        assert!(calls > 300, "{said}");
    }
    for process in &mut ranks {
        process.succeed(TEST_TIMEOUT).expect("every rank");
    }
}

#[test]
fn large_sums_over_a_cable() {
    if sums_of_large() {
        return;
    }
    let Some(cable) = cable("l") else {
        return;
    };
    let mut ranks = at_both_ends("cable::large_sums_over_a_cable", "large", &cable, &[]);
    for (rank, process) in ranks.iter_mut().enumerate() {
        let said = process.next_report(TEST_TIMEOUT).expect("a report");
        if rank == 0 {
            eprintln!("all_reduce of 64 MiB between two namespaces: {said}");
        }
    }
    for process in &mut ranks {
        process.succeed(TEST_TIMEOUT).expect("every rank");
    }
}

/// If this process is a child, runs all_reduce until a call fails, and returns true. Returns false
/// otherwise.
fn sums_without_end() -> bool {
    if role().as_deref() != Some("cut") {
        return false;
    }
    enter();
    let mut options = Setup::new(4).options();
    options.timeout = Duration::from_secs(30);
    match std::env::var(BY).as_deref() {
        Ok("proxy") => {}
        Ok("gloo") => options.inter_host = InterHost::Gloo,
        _ => {
            options.inter_host = InterHost::Gloo;
            options.determinism = Determinism::Any;
        }
    }
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    let comm = comm.with_timeout(TIMEOUT);
    let mut x = vec![1f32; 100_000];
    for i in 0.. {
        let started = Instant::now();
        let ended = comm.all_reduce(x.as_mut_slice(), ReduceOp::Max);
        if i == 20 {
            report("started");
        }
        if let Err(error) = ended {
            report(format!("{} {error}", started.elapsed().as_millis()));
            let again = Instant::now();
            let next = comm.barrier().expect_err("the communicator has failed");
            assert!(again.elapsed() < TIMEOUT, "later calls fail at once");
            assert_eq!(next.to_string(), error.to_string());
            break;
        }
    }
    true
}

fn cut(test: &str, tag: &str, by: &str) {
    if by != "proxy" && !has_gloo() {
        return;
    }
    let Some(cable) = cable(tag) else {
        return;
    };
    let mut ranks = at_both_ends(test, "cut", &cable, &[(BY, by)]);
    for process in &mut ranks {
        assert_eq!(process.next_report(TEST_TIMEOUT).as_deref(), Ok("started"));
    }
    cable.cut().expect("the cable is cut");
    let cut = Instant::now();
    for (rank, process) in ranks.iter_mut().enumerate() {
        let said = process.next_report(TEST_TIMEOUT).expect("an error");
        let (took, error) = said.split_once(' ').expect("a time and an error");
        let took: u64 = took.parse().expect("milliseconds");
        eprintln!("rank {rank}, after {took} ms: {error}");
        assert!(u128::from(took) < 3 * TIMEOUT.as_millis(), "{said}");
        assert!(error.contains("all_reduce"), "{said}");
    }
    assert!(cut.elapsed() < 5 * TIMEOUT, "{:?}", cut.elapsed());
    for process in &mut ranks {
        process.succeed(TEST_TIMEOUT).expect("every rank ends");
    }
}

#[test]
fn a_cut_cable_is_an_error_on_all_ranks() {
    if sums_without_end() {
        return;
    }
    cut("cable::a_cut_cable_is_an_error_on_all_ranks", "c", "proxy");
}

#[test]
fn a_cut_cable_of_gloo_is_an_error_on_all_ranks() {
    if sums_without_end() {
        return;
    }
    let test = "cable::a_cut_cable_of_gloo_is_an_error_on_all_ranks";
    cut(test, "g", "gloo");
}

#[test]
fn a_cut_cable_of_gloo_is_an_error_in_any_order() {
    if sums_without_end() {
        return;
    }
    let test = "cable::a_cut_cable_of_gloo_is_an_error_in_any_order";
    cut(test, "d", "any by gloo");
}
