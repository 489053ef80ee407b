//! Tests ranks on hosts that differ only in their names: every operation, with both settings of
//! `Determinism`. `cable.rs` contains the tests with a network.

use core::time::Duration;

use fusewire::testing::reference;
use fusewire::{
    Communicator, DType, Determinism, Device, InterHost, Op, Operation, Options, ReduceOp,
    ReductionCode,
};
use fusewire_tests::cases::{self, Case};
use fusewire_tests::factor;
use fusewire_tests::oracle;
use fusewire_tests::process::{Host, Ranks, report, role};
use fusewire_tests::rank::{CallMode, Rank};
use fusewire_tests::runner::Setup;
use fusewire_tests::skip::has_gloo;

/// Time limit of the tests' waits.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);
const ANY: &str = "FUSEWIRE_TEST_ANY";
const INTER_HOST: &str = "FUSEWIRE_TEST_INTER_HOST";
/// Number of f32 elements in 64 MiB.
const LARGE: usize = 16 << 20;

fn options(ranks: u32) -> Options {
    let mut options = Setup::new(ranks).options();
    if std::env::var(ANY).is_ok() {
        options.determinism = Determinism::Any;
    }
    if is_over_gloo() {
        options.inter_host = InterHost::Gloo;
    }
    options
}

/// Returns true if Gloo, and not the proxy, connects the hosts of this child.
fn is_over_gloo() -> bool {
    std::env::var(INTER_HOST).is_ok_and(|value| value == "gloo")
}

/// Names of the hosts of all ranks, separated by commas.
pub(super) const HOSTS: &str = "FUSEWIRE_TEST_HOSTS";

/// Starts one rank per element of `hosts`, on a host with that name.
fn on_hosts(test: &str, role: &str, hosts: &[&str], environment: &[(&str, String)]) -> Ranks {
    let host = |rank: usize| vec![("FUSEWIRE_HOST_ID", hosts[rank].to_owned())];
    let size = hosts.len() as u32;
    Ranks::start_each(test, role, size, Host::Parent, |rank| {
        let mut all = host(rank as usize);
        all.push(("TORCHCOMM_GLOO_HOSTNAME", "127.0.0.1".to_owned()));
        all.push((HOSTS, hosts.join(",")));
        all.extend(environment.iter().cloned());
        all
    })
}

fn is_inexact(case: &Case) -> bool {
    let is_float = !case.dtype.is_integer() && case.dtype.is_reducible();
    let sums = |op| !matches!(op, ReduceOp::Min | ReduceOp::Max);
    case.operation.reduces() && is_float && case.reduction.is_some_and(sums)
}

/// Returns the cases whose results must be bitwise identical to the reference on a communicator of
/// several hosts.
fn list(ranks: u32) -> Vec<Case> {
    let mut list = cases::sizes(ranks);
    list.extend(cases::types(ranks));
    list.retain(|case| case.operation != Operation::AllReduceNorm);
    list
}

fn run_list(comm: &Communicator, mode: CallMode, cases: &[Case]) -> u64 {
    let mut rank = Rank::new(comm.clone(), mode, cases).expect("memory");
    for case in cases {
        if let Err(error) = rank.run(case) {
            panic!("{case:?}: {error}");
        }
    }
    let (calls, wrong) = rank.finish();
    assert!(
        wrong.is_empty(),
        "{} wrong: {:#?}",
        wrong.len(),
        &wrong[..1]
    );
    calls
}

fn f32s(bytes: &[u8], dtype: DType) -> Vec<f32> {
    reference::widen(dtype, bytes)
}

/// Checks sums of floats that may be added in any order. The sums must be close to the reference
/// and bitwise identical on all ranks.
fn sums_are_near(comm: &Communicator) {
    let ranks = comm.size();
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for (call, count) in [1usize, 129, 9001, 70_003].into_iter().enumerate() {
            for op in [ReduceOp::Sum, ReduceOp::Average] {
                let inputs: Vec<_> = (0..ranks)
                    .map(|rank| reference::fill(dtype, rank, call as u64, count))
                    .collect();
                let sum = reference::reduce(dtype, op, &[], &inputs);
                let own = &inputs[comm.rank() as usize];
                let tensor = fusewire::Tensor::new(dtype, count).expect("memory");
                // SAFETY: the tensor has `own.len()` bytes, and only operations that block this
                // thread access them.
                let bytes = unsafe { core::slice::from_raw_parts_mut(tensor.as_ptr(), own.len()) };
                bytes.copy_from_slice(own);
                comm.all_reduce(&tensor, op).expect("an all_reduce");
                // Inputs are below 2^5, and the sum is rounded once per rank.
                let epsilon = match dtype {
                    DType::F32 => 2f32.powi(-23),
                    DType::F16 => 2f32.powi(-10),
                    _ => 2f32.powi(-7),
                };
                let bound = epsilon * 32.0 * ranks as f32;
                for (must, is) in f32s(&sum, dtype).iter().zip(f32s(bytes, dtype)) {
                    assert!(
                        (must - is).abs() <= bound,
                        "{dtype:?} {op:?}: {is}, not {must}"
                    );
                }
                let digest = [bytes.iter().fold(7u64, |sum, byte| {
                    sum.wrapping_mul(31).wrapping_add(u64::from(*byte))
                })];
                let mut all = vec![0u64; ranks as usize];
                comm.all_gather_single(all.as_mut_slice(), digest.as_slice())
                    .expect("an all_gather");
                assert!(all.iter().all(|other| *other == digest[0]), "{all:?}");
                for root in 0..ranks {
                    bytes.copy_from_slice(own);
                    comm.reduce(&tensor, root, op).expect("a reduce");
                    if root == comm.rank() {
                        for (must, is) in f32s(&sum, dtype).iter().zip(f32s(bytes, dtype)) {
                            assert!((must - is).abs() <= bound, "reduce: {is}, not {must}");
                        }
                    } else {
                        assert_eq!(bytes, &own[..], "only the root's memory changes");
                    }
                }
            }
        }
    }
    let rows: Vec<f32> = (0..ranks * 777).map(|i| (i + comm.rank()) as f32).collect();
    let mut row = [0f32; 777];
    comm.reduce_scatter_single(row.as_mut_slice(), rows.as_slice(), ReduceOp::Sum)
        .expect("a reduce_scatter");
    for (i, is) in row.iter().enumerate() {
        // Sums of integers below 2^24 are exact in every order.
        let first = comm.rank() * 777 + i as u32;
        let must: u32 = (0..ranks).map(|rank| first + rank).sum();
        assert_eq!(*is, must as f32);
    }
}

/// If this process is a child, runs the list and operations on derived communicators, and returns
/// true. Returns false otherwise.
pub(super) fn conforms() -> bool {
    if role().as_deref() != Some("conforms") {
        return false;
    }
    let ranks: u32 = std::env::var("TORCHCOMM_SIZE")
        .ok()
        .and_then(|size| size.parse().ok())
        .expect("set by the parent");
    let comm = Communicator::from_env(Device::Cpu, options(ranks)).expect("a communicator");
    assert_eq!(comm.backend(), "fusewire");
    assert_eq!(
        comm.backend_version().contains("gloo between"),
        is_over_gloo()
    );
    let any = std::env::var(ANY).is_ok();
    let op = Op::AllReduce {
        count: LARGE,
        dtype: DType::F32,
        reduction: ReductionCode::Sum,
    };
    let plan = comm.plan(&op).expect("a plan");
    let said = plan.to_string();
    if is_over_gloo() {
        assert_eq!(plan.bitwise, !any);
        assert!(said.contains(" hosts: "), "{said}");
        assert_eq!(said.contains("may differ"), any, "{said}");
    } else {
        assert!(plan.bitwise && said.contains(" over the network"), "{said}");
    }
    let mut list = list(ranks);
    if any {
        list.retain(|case| !is_inexact(case));
        sums_are_near(&comm);
    }
    let mut calls = run_list(&comm, CallMode::Blocking, &list);
    let few: Vec<_> = cases::core(ranks)
        .into_iter()
        .filter(|case| case.operation != Operation::AllReduceNorm)
        .filter(|case| !(any && is_inexact(case)))
        .collect();
    calls += run_list(&comm, CallMode::Async, &few);
    calls += run_list(&comm, CallMode::Graph, &few);
    if !any {
        let dtypes = [DType::F32, DType::Bf16, DType::I64];
        // The sizes of the routes `Gathered` and `Ordered`.
        factor::compare(&comm, &dtypes, &[5, 40_000]).expect("scaled sums");
    }
    let dup = comm.dup().expect("a dup");
    calls += run_list(&dup, CallMode::Blocking, &few);
    // This split has all ranks but the last, in reverse order.
    let part: Vec<u32> = (0..ranks - 1).rev().collect();
    let mine = if part.contains(&comm.rank()) {
        &part[..]
    } else {
        &[]
    };
    if let Some(part) = comm.split(mine, "part").expect("a split") {
        calls += run_list(&part, CallMode::Blocking, &few);
        part.finalize().expect("an end");
    }
    // A communicator of the ranks of one host needs no network.
    let [own, hosts] =
        ["FUSEWIRE_HOST_ID", HOSTS].map(|name| std::env::var(name).expect("set by the parent"));
    let hosts: Vec<&str> = hosts.split(',').collect();
    let here: Vec<u32> = (0..ranks)
        .filter(|rank| hosts[*rank as usize] == own)
        .collect();
    let here = comm.split(&here, "here").expect("a split").expect("a part");
    assert!(here.backend_impl().is_none(), "kernels alone");
    let mut x = [1f32; 5];
    here.all_reduce(x.as_mut_slice(), ReduceOp::Sum)
        .expect("a sum");
    assert_eq!(x, [here.size() as f32; 5]);
    comm.barrier().expect("a barrier");
    report(format!("{calls} calls"));
    for comm in [&here, &dup, &comm] {
        comm.finalize().expect("an end");
    }
    true
}

fn run_conformance(test: &str, hosts: &[&str], environment: &[(&str, String)]) {
    for connection in ["proxy", "gloo"] {
        if connection == "gloo" && !has_gloo() {
            continue;
        }
        let mut environment = environment.to_vec();
        environment.push((INTER_HOST, connection.to_owned()));
        let mut ranks = on_hosts(test, "conforms", hosts, &environment);
        for process in &mut ranks.processes {
            let said = process.next_report(TEST_TIMEOUT).expect("a report");
            let calls: u64 = said.trim_end_matches(" calls").parse().expect("a number");
            assert!(calls > 300, "{said}");
        }
        ranks.succeed(TEST_TIMEOUT).expect("all ranks");
    }
}

#[test]
fn two_hosts_have_the_bits_of_one() {
    if conforms() {
        return;
    }
    let test = "names::two_hosts_have_the_bits_of_one";
    run_conformance(test, &["x", "y", "x", "y"], &[]);
}

#[test]
fn uneven_hosts_have_the_bits_of_one() {
    if conforms() {
        return;
    }
    let test = "names::uneven_hosts_have_the_bits_of_one";
    run_conformance(test, &["x", "y", "y", "z"], &[]);
}

#[test]
fn two_hosts_in_any_order() {
    if conforms() {
        return;
    }
    let any = [(ANY, "1".to_owned())];
    run_conformance("names::two_hosts_in_any_order", &["x", "y", "x", "y"], &any);
}

#[test]
fn uneven_hosts_in_any_order() {
    if conforms() {
        return;
    }
    let any = [(ANY, "1".to_owned())];
    let test = "names::uneven_hosts_in_any_order";
    run_conformance(test, &["x", "y", "y", "z"], &any);
}

#[test]
fn without_gloo_the_error_says_what_to_build() {
    if role().as_deref() == Some("refused") {
        let error = Communicator::from_env(Device::Cpu, options(2)).expect_err("two hosts");
        let said = error.to_string();
        assert!(
            said.contains("another host")
                && said.contains("--features gloo")
                && said.contains("inter_host proxy"),
            "{said}"
        );
        return;
    }
    if fusewire::backend::backend_names()
        .iter()
        .any(|name| name == "gloo")
    {
        return;
    }
    let test = "names::without_gloo_the_error_says_what_to_build";
    let over_gloo = [(INTER_HOST, "gloo".to_owned())];
    let mut ranks = on_hosts(test, "refused", &["x", "y"], &over_gloo);
    ranks.succeed(TEST_TIMEOUT).expect("both ranks");
}

/// Checks that inputs differ from sums by more than the tolerance, so the comparison detects an
/// operation that does nothing.
#[test]
fn the_oracle_distinguishes_sums_from_inputs() {
    let inputs: Vec<_> = (0..4)
        .map(|rank| oracle::fill(DType::F32, rank, 0, 129))
        .collect();
    let sum = oracle::reduce(DType::F32, ReduceOp::Sum, &[], &inputs);
    let bound = 2f32.powi(-23) * 32.0 * 4.0;
    let far = |input: &Vec<u8>| {
        f32s(input, DType::F32)
            .iter()
            .zip(f32s(&sum, DType::F32))
            .all(|(a, b)| (a - b).abs() > bound)
    };
    assert!(inputs.iter().all(far));
}
