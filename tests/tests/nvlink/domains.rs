//! Tests ranks on hosts that differ only in their names. Their GPUs are in one NVLink domain or in
//! several domains.

use core::time::Duration;

use fusewire::{Communicator, DType, Device, Error, ReduceOp, Tensor, WindowOptions};
use fusewire_tests::fake::Fake;
use fusewire_tests::process::{Host, Ranks, report, role};

use super::{Driver, TEST_TIMEOUT, algorithm, options, sum};

/// Environment variables of a rank.
type Variables<'a> = Vec<(&'static str, &'a str)>;

/// Fabric state, status, cluster UUID and clique of a GPU that is registered in a domain.
const CLUSTER: &str = "3:0:00112233445566778899aabbccddeeff:7";

/// Returns the variables of host `name` with device number `number`, and `more`.
fn host<'a>(name: &'a str, number: &'a str, more: &[(&'static str, &'a str)]) -> Variables<'a> {
    let mut all = vec![
        ("FUSEWIRE_HOST_ID", name),
        ("FUSEWIRE_CUDA_FAKE_HOST", number),
        ("FUSEWIRE_CUDA_FAKE_FABRIC", "rack"),
        ("TORCHCOMM_GLOO_HOSTNAME", "127.0.0.1"),
    ];
    all.extend(more);
    all
}

fn start(driver: &Driver, test: &str, role: &str, ranks: &[Variables<'_>]) -> Ranks {
    Ranks::start_each(test, role, ranks.len() as u32, Host::Parent, |rank| {
        driver.environment("cuda", &ranks[rank as usize])
    })
}

/// Returns the next report of every rank.
fn reports(ranks: &mut Ranks) -> Vec<String> {
    let processes = ranks.processes.iter_mut();
    processes
        .map(|process| process.next_report(TEST_TIMEOUT).expect("a report"))
        .collect()
}

/// If this process is a child, uses everything that hosts of a domain share, and returns true.
/// Returns false otherwise.
fn works() -> bool {
    if role().as_deref() != Some("works") {
        return false;
    }
    let fake = Fake::open().expect("the fake");
    let comm = Communicator::from_env(Device::Cuda(0), options()).expect("a communicator");
    let (rank, size) = (comm.rank(), comm.size());
    assert!(comm.backend_impl().is_none(), "kernels alone");
    // Calls on staged memory, followed by calls on windows.
    for count in [1, 1000, 70_000] {
        sum(&comm, &comm.tensor(DType::F32, count).expect("memory")).expect("a staged sum");
        sum(&comm, &comm.alloc(DType::F32, count).expect("a window")).expect("a sum");
    }
    // The process of a rank does not see the GPUs of the others, so it cannot ask the driver.
    let mut cells = WindowOptions::default();
    cells.cells = 1;
    let refused = comm.alloc_window(DType::I32, 8, cells);
    let refused = refused.expect_err("unknown atomics").to_string();
    assert!(refused.contains("does not see the GPU"), "{refused}");
    let ring = WindowOptions::default();
    let window = comm.alloc_window(DType::I32, 8, ring).expect("a window");
    let source = comm.tensor(DType::I32, 8).expect("memory");
    source.copy_from(&[rank as i32 + 1; 8]).expect("contents");
    comm.barrier().expect("a barrier");
    window.put(&source, (rank + 1) % size, 0).expect("a put");
    comm.barrier().expect("a barrier");
    let before = (rank + size - 1) % size;
    let found = window.tensor().to_vec::<i32>().expect("contents");
    assert_eq!(found, [before as i32 + 1; 8]);
    let target = comm.tensor(DType::I32, 8).expect("memory");
    window.get(&target, before, 0).expect("a get");
    let theirs = (before + size - 1) % size;
    let found = target.to_vec::<i32>().expect("contents");
    assert_eq!(found, [theirs as i32 + 1; 8]);
    window.free().expect("an end");
    // Memory of another library has no fabric handle. All ranks refuse to register it, and the
    // communicator remains usable.
    let address = fake.allocate(4096);
    // SAFETY: `address` points to 4096 bytes, which hold 1024 f32 elements and are never freed.
    let foreign = unsafe { Tensor::adopt(Device::Cuda(0), address, DType::F32, 1024, None) };
    let foreign = foreign.expect("a tensor");
    let refused = comm
        .tensor_register(&foreign)
        .expect_err("no fabric handle");
    assert!(refused.to_string().contains("NVLink domain"), "{refused}");
    sum(&comm, &foreign).expect("a staged sum");
    let part = comm.dup().expect("a dup");
    sum(&part, &part.alloc(DType::F32, 100).expect("a window")).expect("a sum");
    report(format!("by {}", algorithm(&comm).expect("a plan")));
    part.finalize().expect("an end");
    comm.finalize().expect("an end");
    true
}

#[test]
fn hosts_of_one_domain_work_as_one() {
    if works() {
        return;
    }
    let driver = Driver::install();
    let test = "domains::hosts_of_one_domain_work_as_one";
    let named = ("FUSEWIRE_NVLINK_DOMAIN", "d");
    let reported = ("FUSEWIRE_CUDA_FAKE_NVML", CLUSTER);
    let switch = ("FUSEWIRE_CUDA_FAKE_MULTICAST", "1");
    let alone = ("FUSEWIRE_CUDA_FAKE_DESCRIPTORS", "0");
    for (ranks, by) in [
        (
            vec![host("x", "1", &[named]), host("y", "2", &[named])],
            "by two_shot",
        ),
        // NVML reports the domain, and memory cannot be exported as file descriptors.
        (
            vec![
                host("x", "1", &[reported, alone]),
                host("y", "2", &[reported, alone]),
            ],
            "by two_shot",
        ),
        // Two of the three ranks are on one host, and the GPUs have a switch.
        (
            vec![
                host("x", "1", &[reported, switch]),
                host("y", "2", &[reported, switch]),
                host("x", "3", &[reported, switch]),
            ],
            "by nvls",
        ),
    ] {
        let mut started = start(&driver, test, "works", &ranks);
        assert_eq!(reports(&mut started), vec![by; ranks.len()]);
        started.succeed(TEST_TIMEOUT).expect("all ranks");
    }
}

/// If this process is a child, reports the backend or the refusal, and returns true. Returns false
/// otherwise.
fn is_apart() -> bool {
    if role().as_deref() != Some("apart") {
        return false;
    }
    match Communicator::from_env(Device::Cuda(0), options()) {
        Err(error) => {
            let said = error.to_string();
            assert!(said.contains("is on another host"), "{said}");
            report("refused");
        }
        Ok(comm) => report(
            comm.backend_impl()
                .map_or("kernels", |backend| backend.name()),
        ),
    }
    true
}

#[test]
fn hosts_of_different_domains_do_not_share_memory() {
    if is_apart() {
        return;
    }
    let driver = Driver::install();
    let test = "domains::hosts_of_different_domains_do_not_share_memory";
    let gloo = fusewire::backend::backend_names()
        .iter()
        .any(|name| name == "gloo");
    let named = |name| ("FUSEWIRE_NVLINK_DOMAIN", name);
    let reported = |state| ("FUSEWIRE_CUDA_FAKE_NVML", state);
    let cluster = reported(CLUSTER);
    let no_fabric = ("FUSEWIRE_CUDA_FAKE_FABRIC", "");
    for (one, other) in [
        (vec![named("d")], vec![named("e")]),
        // An empty name means that the rank is in no domain, even if NVML reports a domain.
        (vec![named(""), cluster], vec![named(""), cluster]),
        // A name has no effect if the devices have no fabric handles.
        (vec![named("d"), no_fabric], vec![named("d"), no_fabric]),
        (vec![cluster], vec![named("d")]),
        // A different clique, a different cluster, a registration in progress, a failed
        // registration, a cluster id of zero, and no report.
        (
            vec![cluster],
            vec![reported("3:0:00112233445566778899aabbccddeeff:8")],
        ),
        (
            vec![cluster],
            vec![reported("3:0:10112233445566778899aabbccddeeff:7")],
        ),
        (
            vec![reported("2:0:00112233445566778899aabbccddeeff:7"); 1],
            vec![cluster],
        ),
        (
            vec![reported("3:999:00112233445566778899aabbccddeeff:7")],
            vec![cluster],
        ),
        (vec![reported("3:0:0:7")], vec![reported("3:0:0:7")]),
        (vec![], vec![]),
    ] {
        let ranks = [host("x", "1", &one), host("y", "2", &other)];
        let mut started = start(&driver, test, "apart", &ranks);
        if gloo {
            // With Gloo, the ranks may report any backend except "kernels", which would connect the
            // hosts by kernels alone.
            assert!(reports(&mut started).iter().all(|said| said != "kernels"));
            continue;
        }
        assert_eq!(reports(&mut started), ["refused"; 2], "{ranks:?}");
        started.succeed(TEST_TIMEOUT).expect("both ranks");
    }
}

/// If this process is a child, rank 1 waits until the parent kills it, and rank 0 reports the kind
/// of its failure, and returns true. Returns false otherwise.
fn outlives() -> bool {
    if role().as_deref() != Some("outlives") {
        return false;
    }
    let timeout = std::env::var("CALL_TIMEOUT").expect("set by the parent");
    let timeout = Duration::from_secs(timeout.parse().expect("seconds"));
    let comm = Communicator::from_env(Device::Cuda(0), options()).expect("a communicator");
    let window = comm.alloc(DType::F32, 1000).expect("a window");
    sum(&comm, &window).expect("a sum");
    report("ready");
    if comm.rank() == 1 {
        loop {
            std::thread::park();
        }
    }
    let late = comm.with_timeout(timeout);
    let error = late.all_reduce(&window, ReduceOp::Sum).expect_err("alone");
    let (Error::Timeout(failure) | Error::Failed(failure)) = &error else {
        panic!("{error}");
    };
    assert_eq!(failure.rank, 1, "{error}");
    report(format!("{:?}", failure.kind));
    true
}

#[test]
fn a_death_on_another_host_is_found_by_the_timeout() {
    if outlives() {
        return;
    }
    let driver = Driver::install();
    let test = "domains::a_death_on_another_host_is_found_by_the_timeout";
    // On the same host, the library watches the peer's process, so the call fails long before the
    // timeout.
    for (other, timeout, kind) in [("y", "2", "Timeout"), ("x", "600", "Dead")] {
        let more = [("FUSEWIRE_NVLINK_DOMAIN", "d"), ("CALL_TIMEOUT", timeout)];
        let ranks = [host("x", "1", &more), host(other, "2", &more)];
        let mut started = start(&driver, test, "outlives", &ranks);
        assert_eq!(reports(&mut started), ["ready"; 2]);
        started.processes[1].signal(libc::SIGKILL);
        let found = started.processes[0]
            .next_report(TEST_TIMEOUT)
            .expect("a report");
        assert_eq!(found, kind, "{other}");
        started.processes[0]
            .succeed(TEST_TIMEOUT)
            .expect("a clean end");
    }
}
