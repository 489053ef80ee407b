//! Tests failures of ranks on other hosts, which the proxy connects: killed, stopped and left ranks
//! are named, no rank waits longer than its timeout, and the others reconfigure.

use core::time::Duration;
use std::time::Instant;

use fusewire::{
    Communicator, DType, Device, InitHandle, Members, Options, ReconfigureOptions, ReduceOp, Result,
};
use fusewire_tests::process::{Host, Ranks, report, role};

/// Time limit of the tests' waits.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of the calls.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Number of elements of the calls.
const COUNT: &str = "FUSEWIRE_TEST_COUNT";
/// Set if the survivors reconfigure.
const SURVIVE: &str = "FUSEWIRE_TEST_SURVIVE";
/// Number of ranks, two on each host.
const RANKS: u32 = 4;

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(30);
    options.testing.spins = Some(200);
    options.abort_process_on_timeout_or_error = Some(false);
    options
}

/// Calls all_reduce, send and recv, and put until a call fails. Returns the error and the time that
/// the call took.
fn calls_without_end(comm: &Communicator, count: usize) -> Result<(fusewire::Error, Duration)> {
    let comm = comm.with_timeout(TIMEOUT);
    let mut x = vec![1f32; count];
    let window = comm.alloc_window(DType::F32, count, fusewire::WindowOptions::default())?;
    let source = comm.tensor(DType::F32, count)?;
    let next = (comm.rank() + 2) % comm.size();
    for i in 0.. {
        let started = Instant::now();
        let mut step = || -> Result<()> {
            comm.all_reduce(x.as_mut_slice(), ReduceOp::Max)?;
            window.put_signal(&source, next, 0, 0)?;
            window.wait_raised(0, Some(next))?;
            match comm.rank() < next {
                true => {
                    comm.send(&source, next)?;
                    comm.recv(&source, next)
                }
                false => {
                    comm.recv(&source, next)?;
                    comm.send(&source, next)
                }
            }
        };
        let ended = step();
        if i == 10 {
            report("started");
        }
        if let Err(error) = ended {
            return Ok((error, started.elapsed()));
        }
    }
    unreachable!("the loop has no end")
}

/// If this process is a child, runs until a call fails, and returns true. Returns false otherwise.
fn runs() -> bool {
    if role().as_deref() != Some("runs") {
        return false;
    }
    let count = std::env::var(COUNT).ok().and_then(|text| text.parse().ok());
    let count = count.expect("set by the parent");
    let comm = Communicator::from_env(Device::Cpu, options()).expect("a communicator");
    let (error, took) = calls_without_end(&comm, count).expect("windows");
    report(format!("{} {error}", took.as_millis()));
    let again = Instant::now();
    let next = comm.barrier().expect_err("the communicator has failed");
    assert!(again.elapsed() < TIMEOUT, "later calls fail at once");
    assert_eq!(next.to_string(), error.to_string());
    if let Ok(survivors) = std::env::var(SURVIVE) {
        let size: u32 = survivors.parse().expect("a number");
        if comm.rank() < size {
            let survivor = reconfigured(&comm, size).expect("the survivors");
            let mut x = [survivor.rank() + 1; 3];
            survivor
                .all_reduce(x.as_mut_slice(), ReduceOp::Sum)
                .expect("a sum");
            assert_eq!(x, [size * (size + 1) / 2; 3]);
            survivor.finalize().expect("an end");
            report("reconfigured");
        }
    }
    true
}

/// Joins a communicator of the first `size` ranks.
fn reconfigured(comm: &Communicator, size: u32) -> Result<Communicator> {
    let store = comm.store();
    let key = |rank| format!("survivor/{rank}");
    let handle = comm.init_handle()?.to_string();
    store.set(&key(comm.rank()), handle.as_bytes())?;
    let handles: Result<Vec<InitHandle>> = (0..size)
        .map(|rank| {
            let text = store.get(&key(rank), TEST_TIMEOUT)?;
            String::from_utf8_lossy(&text).parse()
        })
        .collect();
    comm.reconfigure(&ReconfigureOptions::new(77, Members::Ordered(handles?)))
}

/// Starts four ranks on two hosts, and returns once all have completed calls.
fn start(test: &str, count: usize, survivors: Option<u32>) -> Ranks {
    let mut ranks = Ranks::start_each(test, "runs", RANKS, Host::Parent, |rank| {
        let mut variables = vec![
            ("FUSEWIRE_HOST_ID", format!("host-{}", rank / 2)),
            (COUNT, count.to_string()),
        ];
        variables.extend(survivors.map(|size| (SURVIVE, size.to_string())));
        variables
    });
    for process in &mut ranks.processes {
        assert_eq!(process.next_report(TEST_TIMEOUT).as_deref(), Ok("started"));
    }
    ranks
}

/// Reads the error of rank `rank`, which must come in time.
fn error_of(ranks: &mut Ranks, rank: usize) -> String {
    let said = ranks.processes[rank].next_report(TEST_TIMEOUT);
    let said = said.expect("an error");
    let (took, error) = said.split_once(' ').expect("a time and an error");
    let took: u128 = took.parse().expect("milliseconds");
    eprintln!("rank {rank}, after {took} ms: {error}");
    assert!(took < 3 * TIMEOUT.as_millis(), "{said}");
    error.to_owned()
}

fn kill(test: &str, count: usize, killed: &[usize]) {
    let survivors = RANKS - killed.len() as u32;
    let mut ranks = start(test, count, Some(survivors));
    for rank in killed {
        ranks.processes[*rank].signal(libc::SIGKILL);
    }
    for rank in 0..survivors as usize {
        let error = error_of(&mut ranks, rank);
        let names = |rank: &usize| error.contains(&format!("rank {rank}"));
        assert!(killed.iter().any(names), "{error}");
    }
    for process in &mut ranks.processes[..survivors as usize] {
        assert_eq!(
            process.next_report(TEST_TIMEOUT).as_deref(),
            Ok("reconfigured")
        );
        process.succeed(TEST_TIMEOUT).expect("every survivor");
    }
}

#[test]
fn a_killed_rank_is_named_and_the_others_reconfigure() {
    if runs() {
        return;
    }
    let test = "failures::a_killed_rank_is_named_and_the_others_reconfigure";
    for count in [2, 300_000] {
        kill(test, count, &[3]);
    }
}

#[test]
fn a_killed_host_is_named_and_the_others_reconfigure() {
    if runs() {
        return;
    }
    let test = "failures::a_killed_host_is_named_and_the_others_reconfigure";
    for count in [2, 300_000] {
        kill(test, count, &[2, 3]);
    }
}

/// A stopped rank is late for the others, and fails itself when it continues.
#[test]
fn a_stopped_host_is_late() {
    if runs() {
        return;
    }
    let test = "failures::a_stopped_host_is_late";
    for count in [2, 300_000] {
        let mut ranks = start(test, count, None);
        for rank in [2, 3] {
            ranks.processes[rank].signal(libc::SIGSTOP);
        }
        for rank in [0, 1] {
            // The named rank may be one of this host that waits for the stopped one.
            let error = error_of(&mut ranks, rank);
            assert!(error.contains("timed out after"), "{error}");
            assert!(error.contains("waiting for rank"), "{error}");
        }
        for rank in [2, 3] {
            ranks.processes[rank].signal(libc::SIGCONT);
        }
        for rank in [2, 3] {
            let said = ranks.processes[rank].next_report(TEST_TIMEOUT);
            said.expect("an error");
        }
        ranks.succeed(TEST_TIMEOUT).expect("every rank ends");
    }
}
