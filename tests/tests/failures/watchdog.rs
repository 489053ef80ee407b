//! Tests that a rank detects a failure although it makes no call: its abort hook runs, and its
//! flight record is written.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::Instant;

use fusewire::{Communicator, Device, Members, Options, ReconfigureOptions, Result, run_threads};
use fusewire_tests::device;
use fusewire_tests::process::{Host, Ranks, report, role, start};

/// Time within which a failure must be detected. The watchdog needs 0.2 seconds.
const LIMIT: Duration = Duration::from_secs(5);
/// Time limit of the tests' waits, long enough for a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Registers an abort hook. The receiver gets its errors.
fn errors_of(comm: &Communicator) -> Receiver<String> {
    let (sender, errors): (Sender<String>, _) = channel();
    let sender = Mutex::new(sender);
    comm.register_abort_hook(move |error| {
        let sender = sender.lock().expect("no panic");
        sender.send(error.to_string()).expect("the test receives");
    });
    errors
}

/// Returns the number of watchdog threads of this process.
fn watchdogs() -> usize {
    let tasks = fs::read_dir("/proc/self/task").expect("the threads");
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names
        .filter(|name| name.starts_with("fusewire-watchd"))
        .count()
}

/// Waits until the process has `count` watchdog threads.
fn await_watchdogs(count: usize) {
    let begin = Instant::now();
    while watchdogs() != count {
        assert!(begin.elapsed() < LIMIT, "{} watchdogs", watchdogs());
        thread::sleep(Duration::from_millis(10));
    }
}

/// Rank 0 aborts. Rank 1 makes no call until its hook has run.
fn abort_is_detected(options: &Options) {
    let registered = Barrier::new(2);
    for result in device::run_threads(2, options, |comm| {
        let [errors, others] = [errors_of(&comm), errors_of(&comm)];
        registered.wait();
        if comm.rank() == 0 {
            comm.abort();
        }
        for errors in [errors, others] {
            let error = errors.recv_timeout(LIMIT).expect("the hook has run");
            assert!(error.contains("aborted by the program"), "{error}");
            assert!(comm.barrier().is_err());
            let again = errors.recv_timeout(Duration::from_millis(300));
            assert!(again.is_err(), "the hook has run twice");
        }
        // The refused call is recorded although the failure was known before.
        if comm.rank() == 1 {
            assert_eq!(comm.flight_records().len(), 1);
        }
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn the_abort_hook_of_a_rank_without_a_call_runs() {
    abort_is_detected(&Options::default());
    let mut options = Options::default();
    options.enable_reconfigure = true;
    // Without `enable_reconfigure`, the watchdog would end the process.
    options.abort_process_on_timeout_or_error = Some(true);
    abort_is_detected(&options);
}

/// A hook also applies to the parts that exist when it is registered, and to later ones.
#[test]
fn the_abort_hook_runs_for_parts() {
    let registered = Barrier::new(2);
    for result in run_threads(2, &Options::default(), |comm| {
        let before = comm.dup()?;
        let errors = errors_of(&comm);
        let after = comm.dup()?;
        registered.wait();
        if comm.rank() == 0 {
            before.abort();
            after.abort();
        }
        for _ in 0..2 {
            errors.recv_timeout(LIMIT).expect("the hook has run");
        }
        assert!(errors.recv_timeout(Duration::from_millis(300)).is_err());
        assert!(comm.failure().is_none());
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// Runs in a process of its own, because it counts threads.
fn watchdogs_end() -> Result<()> {
    let step = Barrier::new(3);
    let drops = Arc::new(AtomicU32::new(0));
    thread::scope(|scope| -> Result<()> {
        scope.spawn(|| {
            step.wait();
            assert_eq!(watchdogs(), 0, "without hooks");
            step.wait();
            step.wait();
            await_watchdogs(2);
            step.wait();
            // One rank has finalized, the other has dropped its communicator.
            step.wait();
            await_watchdogs(0);
        });
        for result in run_threads(2, &Options::default(), |comm| {
            step.wait();
            step.wait();
            struct Counted(Arc<AtomicU32>);
            impl Drop for Counted {
                fn drop(&mut self) {
                    self.0.fetch_add(1, Ordering::Relaxed);
                }
            }
            let counted = Counted(Arc::clone(&drops));
            comm.register_abort_hook(move |_| {
                let _ = &counted;
            });
            step.wait();
            step.wait();
            comm.barrier()?;
            let kept = (comm.rank() == 0).then(|| comm.clone());
            if let Some(comm) = &kept {
                comm.finalize()?;
            }
            drop(comm);
            step.wait();
            await_watchdogs(0);
            Ok(())
        }) {
            result?;
        }
        Ok(())
    })?;
    assert_eq!(drops.load(Ordering::Relaxed), 2, "hooks were dropped");
    Ok(())
}

#[test]
fn watchdogs_end_with_their_communicators() {
    if role().is_some() {
        return watchdogs_end().expect("both ranks");
    }
    let unset = ["TORCHCOMM_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"];
    let unset = unset.map(|name| (name.to_owned(), String::new()));
    let test = "watchdog::watchdogs_end_with_their_communicators";
    let mut child = start(test, "threads", &unset);
    child.succeed(TEST_TIMEOUT).expect("the child succeeds");
}

/// Runs as a child process: rank 0 aborts, rank 1 makes no call.
fn silent_rank() -> bool {
    let Some(role) = role() else { return false };
    let mut options = Options::default();
    options.enable_reconfigure = true;
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    let errors = (role == "hook").then(|| errors_of(&comm));
    comm.barrier().expect("a barrier");
    // Rank 1 makes no call of the communicator from now on.
    let store = comm.store();
    match comm.rank() {
        0 => {
            store.get("silent", TEST_TIMEOUT).expect("rank 1");
            comm.abort();
        }
        _ => store.set("silent", b"").expect("the store"),
    }
    if let Some(errors) = errors {
        report(errors.recv_timeout(LIMIT).expect("the hook has run"));
    } else {
        report("ready");
    }
    // Ends only when the parent kills it.
    thread::sleep(TEST_TIMEOUT);
    true
}

#[test]
fn a_process_without_a_call_detects_an_abort() {
    if silent_rank() {
        return;
    }
    let test = "watchdog::a_process_without_a_call_detects_an_abort";
    let mut ranks = Ranks::start(test, "hook", 2, Host::Parent, &[]);
    for rank in &mut ranks.processes {
        let error = rank.next_report(TEST_TIMEOUT).expect("the error");
        assert!(error.contains("aborted by the program"), "{error}");
    }
}

#[test]
fn a_process_without_a_call_writes_its_record_once() {
    if silent_rank() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("fw_").display().to_string();
    let test = "watchdog::a_process_without_a_call_writes_its_record_once";
    let environment = [("TORCHCOMM_FR_DUMP_TEMP_FILE", prefix)];
    let mut ranks = Ranks::start(test, "record", 2, Host::Parent, &environment);
    for rank in &mut ranks.processes {
        assert_eq!(rank.next_report(TEST_TIMEOUT).as_deref(), Ok("ready"));
    }
    for rank in 0..2 {
        let file = folder.path().join(format!("fw_{rank}"));
        let begin = Instant::now();
        while !file.exists() {
            assert!(begin.elapsed() < LIMIT, "no record of rank {rank}");
            thread::sleep(Duration::from_millis(10));
        }
        fs::remove_file(&file).expect("a file");
    }
    thread::sleep(Duration::from_millis(500));
    let files = fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(files, 0, "a record was written twice");
}

/// Runs as a child process: rank 0 aborts, rank 1 makes no call. The first of two hooks panics.
fn panicking_hook() -> bool {
    let Some(role) = role() else { return false };
    assert_eq!(role, "panic");
    let mut options = Options::default();
    options.abort_process_on_timeout_or_error = Some(true);
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    comm.register_abort_hook(|_| panic!("this hook is wrong"));
    comm.register_abort_hook(|error| report(error));
    comm.barrier().expect("a barrier");
    let store = comm.store();
    match comm.rank() {
        0 => {
            store.get("silent", TEST_TIMEOUT).expect("rank 1");
            comm.abort();
            report("abort has returned");
        }
        _ => store.set("silent", b"").expect("the store"),
    }
    // Ends when the watchdog ends the process.
    thread::sleep(TEST_TIMEOUT);
    true
}

#[test]
fn a_hook_that_panics_stops_neither_the_record_nor_the_end_of_the_process() {
    if panicking_hook() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("fw_").display().to_string();
    let test = "watchdog::a_hook_that_panics_stops_neither_the_record_nor_the_end_of_the_process";
    let environment = [("TORCHCOMM_FR_DUMP_TEMP_FILE", prefix)];
    let mut ranks = Ranks::start(test, "panic", 2, Host::Parent, &environment);
    for (rank, process) in ranks.processes.iter_mut().enumerate() {
        let error = process.next_report(LIMIT).expect("the second hook has run");
        assert!(error.contains("aborted by the program"), "{error}");
        if rank == 0 {
            let returned = process.next_report(LIMIT).expect("no unwinding");
            assert_eq!(returned, "abort has returned");
        }
        let status = process.wait(LIMIT).expect("the watchdog ends the process");
        assert_eq!(
            status.signal(),
            Some(libc::SIGABRT),
            "rank {rank}: {status}"
        );
        assert!(
            folder.path().join(format!("fw_{rank}")).exists(),
            "rank {rank}"
        );
    }
}

/// The communicator that replaces another one has the same abort hook.
#[test]
fn the_abort_hook_runs_after_a_reconfiguration() {
    let registered = Barrier::new(2);
    for result in run_threads(2, &Options::default(), |comm| {
        let errors = errors_of(&comm);
        let own = comm.init_handle()?.to_string();
        let members = comm.all_gather_object(&own)?;
        let members = members.iter().map(|text| text.parse());
        let members = members.collect::<Result<Vec<_>>>()?;
        let made = comm.reconfigure(&ReconfigureOptions::new(1, Members::Ordered(members)))?;
        registered.wait();
        if comm.rank() == 0 {
            made.abort();
        }
        errors.recv_timeout(LIMIT).expect("the hook has run");
        assert!(errors.recv_timeout(Duration::from_millis(300)).is_err());
        Ok(())
    }) {
        result.expect("both ranks");
    }
}
