//! Tests windows with multicast addresses: their creation and release, the results of operations on
//! them, and ranks without multicast, which disable multicast on all ranks.

use core::ffi::CStr;
use core::time::Duration;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Instant;

use fusewire::store::{MemoryStore, Store};
use fusewire::{Algorithm, Communicator, DType, Result, Tensor, WindowOptions};
use fusewire_tests::device::device_of;
use fusewire_tests::fake::Fake;
use fusewire_tests::grid::warnings;
use fusewire_tests::process::{Host, Ranks, report, role};
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{Processes, Runner, Setup, Threads};

use super::{Driver, TEST_TIMEOUT, algorithm, on_fake, options, sum};

const SWITCH: (&str, &str) = ("FUSEWIRE_CUDA_FAKE_MULTICAST", "1");

/// Returns the environment of `count` devices with a switch.
const fn devices(count: &str) -> [(&str, &str); 2] {
    [("FUSEWIRE_CUDA_FAKE_DEVICES", count), SWITCH]
}

/// Returns the numbers of live multicast objects and of the driver objects that belong to them.
fn live(fake: &Fake) -> [u64; 5] {
    [
        c"multicast",
        c"binding",
        c"allocation",
        c"mapping",
        c"reservation",
    ]
    .map(|kind| fake.live(kind))
}

/// Waits until the numbers of live objects are `wanted`. A device releases the resources of its
/// last operation only when the device is used again.
fn settles(fake: &Fake, wanted: &[u64]) {
    let devices = std::env::var("FUSEWIRE_CUDA_FAKE_DEVICES").expect("set by the parent");
    let devices: u32 = devices.parse().expect("a number");
    let began = Instant::now();
    while live(fake)[..wanted.len()] != *wanted {
        let found = live(fake);
        let timeout = Duration::from_secs(20);
        assert!(began.elapsed() < timeout, "{found:?}, not {wanted:?}");
        for rank in 0..devices {
            drop(Tensor::on_device(device_of(rank), DType::U8, 1).expect("memory"));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Runs ranks as threads with a separate device per rank.
pub(super) fn run_each<R: Send>(
    size: u32,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<R> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let run = |rank: u32| {
        let (device, store) = (device_of(rank), Arc::clone(&store));
        let comm = Communicator::new(device, rank, size, store, "each", options())?;
        body(comm)
    };
    thread::scope(|scope| {
        let run = &run;
        let ranks: Vec<_> = (0..size)
            .map(|rank| scope.spawn(move || run(rank)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic").expect("all ranks"))
            .collect()
    })
}

fn nvls(ranks: u32) -> Setup {
    Setup {
        algorithm: Algorithm::Nvls,
        ..Setup::new(ranks)
    }
}

fn run(runner: &dyn Runner, setup: Setup) {
    match runner.run(&setup, "nvls") {
        Ok(calls) => assert!(calls > 300, "{calls}"),
        Err(wrong) => panic!("{wrong}"),
    }
}

#[test]
fn multicast_between_threads() {
    let test = "multicast::multicast_between_threads";
    on_fake(test, &devices("4"), || {
        let fake = Fake::open().expect("the fake");
        for setup in [
            nvls(2),
            Setup {
                blocks: 3,
                ..nvls(3)
            },
            nvls(4),
            Setup {
                mode: CallMode::Graph,
                ..nvls(2)
            },
        ] {
            let before = fake.calls(c"cuMulticastBindMem");
            run(&Threads, setup);
            let bound = fake.calls(c"cuMulticastBindMem") - before;
            assert!(
                bound > 0 && bound.is_multiple_of(u64::from(setup.ranks)),
                "{bound}"
            );
            settles(&fake, &[0, 0]);
            assert_eq!(
                fake.calls(c"cuMulticastUnbind"),
                fake.calls(c"cuMulticastBindMem")
            );
        }
    });
}

#[test]
fn multicast_between_processes() {
    if Processes::child() {
        let fake = Fake::open().expect("the fake");
        assert!(fake.calls(c"cuMulticastBindMem") > 0);
        settles(&fake, &[0, 0]);
        return;
    }
    let test = "multicast::multicast_between_processes";
    on_fake(test, &devices("3"), || {
        let host = Host::Parent;
        run(&Processes { test, host }, nvls(3));
    });
}

#[test]
fn a_window_has_a_multicast_address_until_it_is_freed() {
    let test = "multicast::a_window_has_a_multicast_address_until_it_is_freed";
    on_fake(test, &devices("3"), || {
        let fake = Fake::open().expect("the fake");
        let barrier = Barrier::new(3);
        let work = |comm: Communicator| {
            assert_eq!(algorithm(&comm)?, Algorithm::TwoShot, "without a window");
            let window =
                comm.alloc_window(DType::F32, 70_000, fusewire::WindowOptions::default())?;
            assert_eq!(algorithm(&comm)?, Algorithm::Nvls);
            sum(&comm, window.tensor())?;
            barrier.wait();
            // Each of the three ranks has two handles and two bindings: one for the tensor and one
            // for the signals.
            assert_eq!(live(&fake)[..2], [6, 6]);
            barrier.wait();
            window.free()?;
            comm.barrier()?;
            barrier.wait();
            assert_eq!(live(&fake)[..2], [0, 0], "objects of a freed window");
            barrier.wait();
            let (first, second) = (
                comm.alloc(DType::F32, 1000)?,
                comm.alloc(DType::F32, 1 << 20)?,
            );
            sum(&comm, &first)?;
            sum(&comm, &second)?;
            barrier.wait();
            assert_eq!(live(&fake)[..2], [6, 6]);
            barrier.wait();
            comm.finalize()
        };
        // Runs twice: each run must free all its objects, so the second run starts from zero again.
        run_each(3, work);
        settles(&fake, &[0, 0, 0, 0, 0]);
        run_each(3, work);
        settles(&fake, &[0, 0, 0, 0, 0]);
    });
}

/// Driver functions, each with the number of the call that fails. These numbers depend on the
/// number of ranks, because each rank maps the memory of all three ranks.
const REFUSED: [(&CStr, u64); 9] = [
    (c"cuMulticastCreate", 1),
    // The export of the multicast object, after the exports of three windows.
    (c"cuMemExportToShareableHandle", 4),
    // The first import of the multicast object, after six imports of windows (two per rank).
    (c"cuMemImportFromShareableHandle", 7),
    (c"cuMulticastAddDevice", 1),
    (c"cuMulticastAddDevice", 3),
    (c"cuMulticastBindMem", 1),
    (c"cuMulticastBindMem", 2),
    (c"cuMemMap", 10),
    (c"cuMemSetAccess", 10),
];

#[test]
fn a_driver_error_on_one_rank_disables_multicast_on_all() {
    let test = "multicast::a_driver_error_on_one_rank_disables_multicast_on_all";
    on_fake(test, &devices("3"), || {
        let fake = Fake::open().expect("the fake");
        let barrier = Barrier::new(3);
        let work = |refused: Option<(&CStr, u64)>| {
            let said = run_each(3, |comm| {
                barrier.wait();
                if let Some((call, nth)) = refused.filter(|_| comm.rank() == 0) {
                    // 801 is CUDA_ERROR_NOT_SUPPORTED.
                    fake.fail(call, nth, 801);
                }
                barrier.wait();
                let (window, said) = warnings::of(|| comm.alloc(DType::F32, 70_000));
                let window = window?;
                let by = algorithm(&comm)?;
                barrier.wait();
                let held = live(&fake)[..2].to_vec();
                barrier.wait();
                sum(&comm, &window)?;
                // The second window gets a multicast address even if the first window has none. The
                // plan of a large operation still follows the first window.
                sum(&comm, &comm.alloc(DType::F32, 1000)?)?;
                assert_eq!(algorithm(&comm)?, by);
                Ok((by, said, held))
            });
            for (by, said, held) in said {
                let warned = said
                    .iter()
                    .any(|said| said.contains("no multicast address"));
                let expected = if refused.is_some() {
                    (Algorithm::TwoShot, true, vec![0, 0])
                } else {
                    (Algorithm::Nvls, false, vec![3, 3])
                };
                assert_eq!((by, warned, held), expected, "{refused:?}: {said:?}");
            }
        };
        work(None);
        settles(&fake, &[0, 0, 0, 0, 0]);
        for refused in REFUSED {
            work(Some(refused));
            settles(&fake, &[0, 0, 0, 0, 0]);
        }
        work(None);
    });
}

/// Driver functions with which a rank creates a window: for memory, the entry of the window in the
/// GPU's table, and the description of the window.
const FAULTS: [&CStr; 5] = [
    c"cuMemCreate",
    c"cuMemExportToShareableHandle",
    c"cuMemImportFromShareableHandle",
    c"cuMemMap",
    c"cuMemcpyHtoDAsync_v2",
];

/// Each call of the driver fails once, on one of the ranks, while they create a window. Then no
/// rank has a window, no driver object remains, and the ranks can repeat the call.
#[test]
fn a_driver_error_on_one_rank_leaves_no_window_on_any() {
    let test = "multicast::a_driver_error_on_one_rank_leaves_no_window_on_any";
    on_fake(test, &devices("2"), || {
        let fake = Fake::open().expect("the fake");
        let barrier = Arc::new(Barrier::new(2));
        let fault = Arc::new(Mutex::new(None::<(&CStr, u64)>));
        let failures = run_each(2, |comm| {
            let is_first = comm.rank() == 0;
            let set_fault = |new| {
                barrier.wait();
                if is_first {
                    *fault.lock().expect("no panic") = new;
                }
                barrier.wait();
            };
            // The ranks first compare their arguments by an operation. If it fails on one rank, the
            // others time out, so the fault begins afterwards.
            let (meet, current) = (Arc::clone(&barrier), Arc::clone(&fault));
            let _hook = comm.register_post_hook(move |arguments| {
                let fault = *current.lock().expect("no panic");
                let Some((call, nth)) = fault.filter(|_| arguments.name == "all_gather_single")
                else {
                    return;
                };
                meet.wait();
                if is_first {
                    // 2 is CUDA_ERROR_OUT_OF_MEMORY.
                    Fake::open().expect("the fake").fail(call, nth, 2);
                }
                meet.wait();
            });
            let tensor = comm.tensor(DType::F32, 70_000)?;
            let create = || comm.new_window(&tensor, WindowOptions::default());
            let mut failures = [0; FAULTS.len()];
            for (at, call) in FAULTS.into_iter().enumerate() {
                for nth in 1..16 {
                    set_fault(Some((call, nth)));
                    let result = create();
                    set_fault(None);
                    // Removes a fault that no call has met.
                    fake.fail(call, 0, 0);
                    match result {
                        Ok(window) => window.free()?,
                        Err(error) => {
                            failures[at] += 1;
                            assert!(comm.failure().is_none(), "{call:?} {nth}: {error}");
                        }
                    }
                    barrier.wait();
                    assert_eq!(live(&fake)[..2], [0, 0], "{call:?} {nth}");
                }
            }
            let window = create()?;
            assert_eq!(algorithm(&comm)?, Algorithm::Nvls);
            sum(&comm, &tensor)?;
            window.free()?;
            Ok(failures)
        });
        assert!(failures[0].iter().all(|count| *count > 0), "{failures:?}");
        assert_eq!(failures[0], failures[1]);
        settles(&fake, &[0, 0, 0, 0, 0]);
    });
}

#[test]
fn ranks_that_share_a_gpu_do_not_use_multicast() {
    let test = "multicast::ranks_that_share_a_gpu_do_not_use_multicast";
    on_fake(test, &devices("2"), || {
        let fake = Fake::open().expect("the fake");
        // Runs `ranks` ranks on two devices.
        let use_windows = |ranks: u32, expected: Algorithm| {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
            thread::scope(|scope| {
                for rank in 0..ranks {
                    let store = Arc::clone(&store);
                    scope.spawn(move || {
                        let device = device_of(rank % 2);
                        let comm = Communicator::new(device, rank, ranks, store, "two", options())
                            .expect("a communicator");
                        let window = comm.alloc(DType::F32, 70_000).expect("memory");
                        sum(&comm, &window).expect("a sum");
                        assert_eq!(algorithm(&comm).expect("a plan"), expected);
                    });
                }
            });
        };
        use_windows(3, Algorithm::TwoShot);
        // Two ranks share device 0.
        assert_eq!(fake.calls(c"cuMulticastCreate"), 0);
        use_windows(2, Algorithm::Nvls);
        assert_eq!(fake.calls(c"cuMulticastCreate"), 1);
    });
}

/// If this process is a child, allocates a window, reports its multicast objects, and returns true.
/// Returns false otherwise.
fn one_window() -> bool {
    if role().as_deref() != Some("one window") {
        return false;
    }
    let fake = Fake::open().expect("the fake");
    let rank: u32 = std::env::var("TORCHCOMM_RANK")
        .ok()
        .and_then(|rank| rank.parse().ok())
        .expect("set by the parent");
    let comm = Communicator::from_env(device_of(rank), options()).expect("a communicator");
    let (window, said) = warnings::of(|| comm.alloc(DType::F32, 70_000));
    let window = window.expect("a window");
    sum(&comm, &window).expect("a sum");
    let by = algorithm(&comm).expect("a plan");
    report(format!(
        "{by}, {} warnings, {} objects, {} attempts",
        said.len(),
        live(&fake)[0],
        fake.calls(c"cuMulticastCreate") + fake.calls(c"cuMulticastAddDevice"),
    ));
    comm.finalize().expect("an end");
    true
}

/// Starts three processes and returns their reports. The last process has `last` in its
/// environment.
fn three_processes(test: &str, last: (&'static str, &str)) -> Vec<String> {
    let driver = Driver::install();
    let mut ranks = Ranks::start_each(test, "one window", 3, Host::Parent, |rank| {
        let mut all = driver.environment("cuda:each", &devices("3"));
        if rank == 2 {
            all.push((last.0, last.1.to_owned()));
        }
        all
    });
    let processes = ranks.processes.iter_mut();
    let said = processes
        .map(|process| process.next_report(TEST_TIMEOUT).expect("a report"))
        .collect();
    ranks.succeed(TEST_TIMEOUT).expect("all ranks");
    said
}

#[test]
fn a_process_without_multicast_disables_it_on_all() {
    if one_window() {
        return;
    }
    let test = "multicast::a_process_without_multicast_disables_it_on_all";
    let said = three_processes(test, ("FUSEWIRE_TEST_NOTHING", ""));
    assert_eq!(said[0], "nvls, 0 warnings, 1 objects, 2 attempts");
    assert_eq!(said[1], "nvls, 0 warnings, 1 objects, 1 attempts");
    assert_eq!(said[2], said[1]);
    let said = three_processes(test, ("FUSEWIRE_CUDA_FAKE_MULTICAST", "0"));
    assert_eq!(said, ["two_shot, 0 warnings, 0 objects, 0 attempts"; 3]);
    let refused = ("FUSEWIRE_CUDA_FAKE_FAIL", "cuMulticastBindMem=801");
    let said = three_processes(test, refused);
    assert_eq!(said[0], "two_shot, 1 warnings, 0 objects, 2 attempts");
    assert_eq!(said[1], "two_shot, 1 warnings, 0 objects, 1 attempts");
    assert_eq!(said[2], said[1]);
}
