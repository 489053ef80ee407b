//! Tests calls that wait in the store: windows, dup, split, reconfigure. They must end when a rank
//! that has not joined them dies, and when the communicator is aborted, long before the timeout.
//! Also tests the end of a registration while operations use the memory.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::thread;
use std::time::Instant;

use fusewire::{
    Communicator, DType, Device, InitHandle, Members, Operation, Options, ReconfigureOptions,
    ReduceOp, Result, Tensor, WindowOptions,
};
use fusewire_tests::process::{Host, Ranks, report, role};

/// Timeout of the communicators. Without the end of the wait, the calls would last this long.
const TIMEOUT: Duration = Duration::from_secs(40);
/// Time limit of the tests' waits, longer than the timeout.
const TEST_TIMEOUT: Duration = Duration::from_secs(100);
/// The rank that never joins the call.
const LATE: u32 = 2;

const CALL: &str = "FUSEWIRE_TEST_HOST_CALL";
const ABORTS: &str = "FUSEWIRE_TEST_ABORTS";

const CALLS: [&str; 7] = [
    "alloc",
    "alloc_window",
    "new_window",
    "tensor_register",
    "dup",
    "split",
    "reconfigure",
];

fn call(comm: &Communicator, name: &str, members: &[InitHandle]) -> Result<()> {
    match name {
        "alloc" => comm.alloc(DType::F32, 64).map(drop),
        "alloc_window" => {
            let options = WindowOptions::default();
            comm.alloc_window(DType::F32, 64, options).map(drop)
        }
        "new_window" => {
            let tensor = Tensor::new(DType::F32, 64)?;
            comm.new_window(&tensor, WindowOptions::default()).map(drop)
        }
        "tensor_register" => {
            let tensor = Tensor::new(DType::F32, 64)?;
            comm.tensor_register(&tensor).map(drop)
        }
        "dup" => comm.dup().map(drop),
        "split" => comm.split(&[2, 1, 0], "part").map(drop),
        "reconfigure" => {
            let members = Members::Ordered(members.to_vec());
            let options = ReconfigureOptions::new(7, members);
            comm.reconfigure(&options).map(drop)
        }
        other => panic!("no call {other}"),
    }
}

/// Runs as a child process: calls the function that the parent names, and reports its error.
fn child() -> bool {
    if role().as_deref() != Some("host-call") {
        return false;
    }
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    options.enable_reconfigure = true;
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    let own = comm.init_handle().expect("a handle").to_string();
    let members = comm.all_gather_object(&own).expect("all handles");
    let members: Vec<InitHandle> = members
        .iter()
        .map(|text| text.parse().expect("a handle"))
        .collect();
    comm.barrier().expect("a barrier");
    report("ready");
    let name = std::env::var(CALL).expect("set by the parent");
    if comm.rank() == LATE {
        // These calls first compare their arguments by an all_gather. The rank takes part in it,
        // and then stops.
        if ["alloc_window", "new_window", "tensor_register"].contains(&name.as_str()) {
            let _hook = comm.register_post_hook(|_| thread::sleep(TEST_TIMEOUT));
            let _ = call(&comm, &name, &members);
        }
        thread::sleep(TEST_TIMEOUT);
        return true;
    }
    let aborts = std::env::var(ABORTS).is_ok() && comm.rank() == 0;
    let started = Instant::now();
    let error = thread::scope(|scope| {
        if aborts {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(300));
                comm.abort();
            });
        }
        call(&comm, &name, &members).expect_err("a rank is missing")
    });
    report(started.elapsed().as_secs_f64());
    report(error);
    // Calls that create a communicator leave this one as it is.
    let creates = ["dup", "split", "reconfigure"].contains(&name.as_str());
    assert!(creates || comm.failure().is_some(), "{name}");
    // Ends only when the parent kills it, so that no rank takes this one for the one that died.
    thread::sleep(TEST_TIMEOUT);
    true
}

/// Returns the errors of ranks 0 and 1, and the seconds that they waited.
fn errors(test: &str, name: &str, aborts: bool) -> Vec<(String, f64)> {
    let mut environment = vec![(CALL, name.to_owned())];
    if aborts {
        environment.push((ABORTS, "1".to_owned()));
    }
    let mut ranks = Ranks::start(test, "host-call", 3, Host::Parent, &environment);
    for rank in &mut ranks.processes {
        assert_eq!(rank.next_report(TEST_TIMEOUT).as_deref(), Ok("ready"));
    }
    // Long enough for the other ranks to wait in the call. If they are later, they find the end of
    // the process in their first look.
    thread::sleep(Duration::from_millis(300));
    if !aborts {
        ranks.processes[LATE as usize].signal(libc::SIGKILL);
    }
    let errors = ranks.processes[..LATE as usize].iter_mut().map(|rank| {
        let seconds = rank.next_report(TEST_TIMEOUT).expect("the duration");
        let error = rank.next_report(TEST_TIMEOUT).expect("the error");
        (error, seconds.parse().expect("seconds"))
    });
    let errors = errors.collect();
    for process in &mut ranks.processes {
        process.signal(libc::SIGKILL);
    }
    errors
}

#[test]
fn a_rank_that_dies_ends_the_calls_that_wait_in_the_store() {
    if child() {
        return;
    }
    let test = "host_calls::a_rank_that_dies_ends_the_calls_that_wait_in_the_store";
    for name in CALLS {
        for (error, seconds) in errors(test, name, false) {
            // In the split's order, rank 2 of the parent is rank 0.
            let rank = if name == "split" { "rank 0" } else { "rank 2" };
            let is_named = error.contains(rank) && error.contains("has ended");
            assert!(is_named, "{name}: {error}");
            assert!(seconds < TIMEOUT.as_secs_f64() / 2.0, "{name}: {seconds} s");
        }
    }
}

#[test]
fn an_abort_ends_the_calls_that_wait_in_the_store() {
    if child() {
        return;
    }
    let test = "host_calls::an_abort_ends_the_calls_that_wait_in_the_store";
    for name in CALLS {
        for (error, seconds) in errors(test, name, true) {
            assert!(error.contains("abort"), "{name}: {error}");
            assert!(seconds < TIMEOUT.as_secs_f64() / 2.0, "{name}: {seconds} s");
        }
    }
}

/// Runs as a child process: a hook of the barrier inside `tensor_deregister` enqueues an operation
/// on the memory whose registration ends.
fn ending_child() -> bool {
    if role().as_deref() != Some("ending") {
        return false;
    }
    const COUNT: usize = 4 << 20;
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    let stream = fusewire::Stream::new();
    for round in 0..6 {
        let tensor = Tensor::new(DType::F32, COUNT).expect("memory");
        tensor.copy_from(&vec![1.0f32; COUNT]).expect("written");
        let registration = comm.tensor_register(&tensor).expect("a registration");
        let (on_stream, operand) = (comm.on(&stream), tensor.clone());
        let is_first = AtomicBool::new(true);
        let hook = comm.register_post_hook(move |arguments| {
            if arguments.operation == Operation::Barrier && is_first.swap(false, Ordering::Relaxed)
            {
                let work = on_stream.all_reduce_async(&operand, ReduceOp::Sum);
                drop(work.expect("enqueued"));
                // Sometimes the operation has begun, sometimes not, when the registration ends.
                thread::sleep(Duration::from_millis(2 * round));
            }
        });
        comm.tensor_deregister(&registration).expect("ended");
        hook.remove();
        stream.synchronize().expect("the operation");
        let sums = tensor.to_vec::<f32>().expect("read");
        assert!(sums.iter().all(|sum| *sum == 2.0), "round {round}");
    }
    comm.finalize().expect("finalized");
    true
}

#[test]
fn an_operation_that_a_hook_enqueues_keeps_the_memory_mapped() {
    if ending_child() {
        return;
    }
    let test = "host_calls::an_operation_that_a_hook_enqueues_keeps_the_memory_mapped";
    let mut ranks = Ranks::start(test, "ending", 2, Host::Parent, &[]);
    ranks.succeed(TEST_TIMEOUT).expect("no rank crashed");
}

const NEW_WINDOWS: [&str; 5] = [
    "alloc",
    "new_window",
    "alloc_window",
    "alloc_queue",
    "tensor_register",
];

/// Sets the soft limit of `resource` of this process and returns the previous one.
fn set_limit(resource: libc::__rlimit_resource_t, limit: u64) -> u64 {
    let mut all = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `all` is valid for writes.
    assert_eq!(unsafe { libc::getrlimit(resource, &raw mut all) }, 0);
    let before = core::mem::replace(&mut all.rlim_cur, limit);
    // SAFETY: `all` is initialized.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const all) }, 0);
    before
}

/// Creates a window by the call `name` and checks that it is the same window on all ranks.
fn create_and_use(comm: &Communicator, name: &str, tensor: &Tensor) -> Result<()> {
    let options = WindowOptions::default();
    let window = match name {
        "alloc" => {
            let tensor = comm.alloc(DType::F32, 64)?;
            let number = [comm.window_addr(&tensor)?.window()];
            let mut numbers = vec![0u32; comm.size() as usize];
            comm.all_gather_single(&mut numbers, number.as_slice())?;
            assert!(numbers.iter().all(|theirs| *theirs == number[0]));
            tensor.copy_from(&[1.0f32; 64])?;
            comm.all_reduce(&tensor, ReduceOp::Sum)?;
            assert_eq!(tensor.to_vec::<f32>()?, [comm.size() as f32; 64]);
            return Ok(());
        }
        "alloc_queue" => return comm.alloc_queue(DType::F32, 16, 4)?.free(),
        "tensor_register" => {
            let registration = comm.tensor_register(tensor)?;
            tensor.copy_from(&[1.0f32; 64])?;
            comm.all_reduce(tensor, ReduceOp::Sum)?;
            assert_eq!(tensor.to_vec::<f32>()?, [comm.size() as f32; 64]);
            return comm.tensor_deregister(&registration);
        }
        "new_window" => comm.new_window(tensor, options)?,
        "alloc_window" => comm.alloc_window(DType::F32, 64, options)?,
        other => panic!("no call {other}"),
    };
    let source = comm.tensor_from(&[comm.rank() as f32; 64])?;
    let (next, size) = ((comm.rank() + 1) % comm.size(), comm.size());
    window.put(&source, next, 0)?;
    window.raise(next, 0)?;
    let previous = (comm.rank() + size - 1) % size;
    window.wait_raised(0, Some(previous))?;
    assert_eq!(window.tensor().to_vec::<f32>()?, [previous as f32; 64]);
    window.free()
}

/// Creates a communicator of all ranks by the call `name`.
fn create_comm(comm: &Communicator, name: &str) -> Result<()> {
    let ranks: Vec<u32> = comm.ranks().collect();
    let created = match name {
        "dup" => comm.dup()?,
        _ => comm.split(&ranks, "part")?.expect("this rank is listed"),
    };
    created.barrier()?;
    created.finalize()
}

/// Runs as a child process: on the last rank, each call first fails, for lack of memory or because
/// it cannot map the memory of its peers. All ranks then repeat the call.
fn failing_child() -> bool {
    if role().as_deref() != Some("failing") {
        return false;
    }
    let mut options = Options::default();
    options.timeout = TIMEOUT;
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    let last = comm.size() - 1;
    for name in NEW_WINDOWS {
        let tensor = Tensor::new(DType::F32, 64).expect("memory");
        // A registration allocates nothing, but opens a file of each peer.
        let resource = match name {
            "tensor_register" => libc::RLIMIT_NOFILE,
            _ => libc::RLIMIT_FSIZE,
        };
        let succeeds = comm.size() == 1 && name == "tensor_register";
        comm.barrier().expect("a barrier");
        let started = Instant::now();
        let result = match comm.rank() == last {
            true => {
                let before = set_limit(resource, 0);
                let result = create_and_use(&comm, name, &tensor);
                set_limit(resource, before);
                result
            }
            false => create_and_use(&comm, name, &tensor),
        };
        let elapsed = started.elapsed();
        assert!(elapsed < TIMEOUT / 4, "{name}: {elapsed:?}");
        match result {
            Ok(()) => assert!(succeeds, "{name}"),
            Err(error) if comm.rank() == last => {
                let is_own = !matches!(error, fusewire::Error::Communicator { .. });
                assert!(is_own, "{name}: {error}");
            }
            Err(error) => {
                let start = format!("{name} failed on rank {last}: ");
                let error = error.to_string();
                assert!(error.contains(&start), "{name}: {error}");
                assert!(error.contains("no rank has the window"), "{error}");
            }
        }
        for _ in 0..2 {
            let repeated = create_and_use(&comm, name, &tensor);
            repeated.unwrap_or_else(|error| panic!("{name} repeated: {error}"));
        }
    }
    for name in ["dup", "split"] {
        comm.barrier().expect("a barrier");
        let before = (comm.rank() == last).then(|| set_limit(libc::RLIMIT_FSIZE, 0));
        let started = Instant::now();
        let error = create_comm(&comm, name).expect_err("the workspace of the last rank");
        assert!(started.elapsed() < TIMEOUT / 4, "{name}: {error}");
        let is_named = error.to_string().contains(&format!("rank {last} cannot"));
        assert!(comm.rank() == last || is_named, "{name}: {error}");
        if let Some(before) = before {
            set_limit(libc::RLIMIT_FSIZE, before);
        }
        create_comm(&comm, name).unwrap_or_else(|error| panic!("{name} repeated: {error}"));
        create_and_use(&comm, "alloc", &Tensor::new(DType::F32, 1).expect("memory"))
            .unwrap_or_else(|error| panic!("a window after {name}: {error}"));
    }
    comm.finalize().expect("finalized");
    true
}

#[test]
fn a_call_that_fails_on_one_rank_fails_on_all_and_can_be_repeated() {
    if failing_child() {
        return;
    }
    let test = "host_calls::a_call_that_fails_on_one_rank_fails_on_all_and_can_be_repeated";
    for size in [1, 2, 3] {
        let mut ranks = Ranks::start(test, "failing", size, Host::Parent, &[]);
        for rank in &mut ranks.processes {
            rank.succeed(TEST_TIMEOUT).expect("a rank");
        }
    }
}
