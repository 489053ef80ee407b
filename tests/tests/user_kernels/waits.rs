//! Waits that cannot end, because a rank sends no signal, makes other calls than its peers, or its
//! process has ended. Kernels that end their process by a null pointer, and kernels that poll
//! memory without a wait of the session.

use core::ptr;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use core::time::Duration;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use fusewire::{Communicator, DType, Device, Result, SignalUpdate, WindowOptions, run_threads};
use fusewire_device::window::Compare;
use fusewire_device::{Aborted, Group, In, Machine, Session, Team, Window, kernel};
use fusewire_tests::process::{Host, Ranks, report, role, start};

use super::{
    LANES, LONG, assert_contains, failing, failing_on, launch_impatiently, options, tensor,
};

/// Waits on rank 0 until signal 0 has the value `sum`, added up over all ranks; if `sum` is 0,
/// until every rank has raised it.
#[kernel]
fn sums_in_vain(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    sum: u64,
) -> Result<(), Aborted> {
    if s.rank() == 0 {
        match sum {
            0 => _ = window.wait_all(s, 0, Team::World)?,
            _ => _ = window.wait_value(s, 0, None, Compare::GreaterEqual, sum)?,
        }
    }
    s.barrier()
}

#[test]
fn a_wait_for_several_ranks_names_the_one_that_lags() {
    // The number of ranks, those that signal, the awaited sum, and the rank to name. In the second
    // case rank 0 itself has contributed less than rank 1.
    let cases: [(u32, &[u32], u64, u32); 4] = [
        (2, &[0], 0, 1),
        (2, &[1], 2, 1),
        (3, &[0, 1], 0, 2),
        (3, &[1], 2, 2),
    ];
    for lanes in LANES {
        for (ranks, senders, sum, late) in cases {
            let missing = match sum {
                0 => "its signal",
                _ => "its part of a sum of signals",
            };
            let messages = failing_on(ranks, &options(1, lanes), |comm| {
                let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
                if senders.contains(&comm.rank()) {
                    window.signal(0, 0, SignalUpdate::Add(1))?;
                }
                // The signals have arrived before rank 0 waits.
                comm.barrier()?;
                let window = (&window).into();
                launch_impatiently(comm, SumsInVain { window, sum })
            });
            let text = format!("waiting for rank {late}, {missing} (");
            for message in messages {
                let call = "rank 0 in kernel sums_in_vain #";
                assert_contains(&message, &[call, "timed out after", &text]);
            }
        }
    }
}

/// Makes `rounds` barriers, or rounds of words.
#[kernel]
fn counts_rounds(
    s: &mut Session<impl Machine>,
    rounds: u32,
    has_words: u32,
) -> Result<(), Aborted> {
    for _ in 0..rounds {
        match has_words {
            0 => s.barrier()?,
            _ => s.ready(|_| [0; 7])?,
        }
    }
    Ok(())
}

#[test]
fn a_rank_that_makes_a_round_less_is_named() {
    for lanes in LANES {
        for has_words in [0, 1] {
            for message in failing(&options(1, lanes), |comm| {
                let rounds = 3 - comm.rank();
                launch_impatiently(comm, CountsRounds { rounds, has_words })
            }) {
                // Its entry; on a busy machine the timeout may expire in a round that rank 1 makes.
                let text = "waiting for rank 1, its e";
                let call = "rank 0 in kernel counts_rounds #1: timed out after";
                assert_contains(&message, &[call, text]);
            }
        }
    }
}

/// Raises signal 0 of every rank, and waits for those of the others: for each, or for their sum.
#[kernel]
fn waits_apart(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    #[agreed] value: u32,
    by_sum: u32,
) -> Result<(), Aborted> {
    let _ = value;
    window.raise_all(s, 0, Team::World);
    if by_sum == 0 {
        for peer in s.peers(Team::World).take(1) {
            window.wait(s, 0, peer)?;
        }
        return Ok(());
    }
    let all = u64::from(s.ranks());
    window.wait_value(s, 0, None, Compare::GreaterEqual, all)?;
    Ok(())
}

#[test]
fn unequal_agreed_values_are_found_where_ranks_only_signal() {
    let run = |comm: &Communicator, by_sum, value, late| {
        let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
        if comm.rank() == 1 {
            thread::sleep(late);
        }
        let arguments = WaitsApart {
            window: (&window).into(),
            value,
            by_sum,
        };
        // The rank whose wait does not stall may succeed. It gets the failure in the barrier.
        comm.kernel(arguments)
            .launch()
            .and_then(|()| comm.barrier())
    };
    let text = [
        "called kernel waits_apart #",
        "with other values of the agreed arguments than rank",
    ];
    for lanes in LANES {
        for by_sum in [0, 1] {
            // Only a wait that stalls finds it. On a busy machine rank 0 may be as late as rank 1.
            let messages = [30, 300, 3_000]
                .map(Duration::from_millis)
                .into_iter()
                .find_map(|late| {
                    run_threads(2, &options(1, lanes), |comm| {
                        run(&comm, by_sum, comm.rank(), late)
                    })
                    .into_iter()
                    .map(|result| Some(result.err()?.to_string()))
                    .collect::<Option<Vec<String>>>()
                })
                .expect("a wait stalls, and both ranks fail");
            for message in messages {
                assert_contains(&message, &text);
            }
            // The control: equal values.
            for result in run_threads(2, &options(1, lanes), |comm| {
                run(&comm, by_sum, 7, Duration::from_millis(30))
            }) {
                result.expect("the ranks agree");
            }
        }
    }
}

/// Name of the variable with the number of lanes of a child.
const CHILD_LANES: &str = "FUSEWIRE_TEST_LANES";
/// Name of the variable with the way in which a child waits.
const CHILD_WAY: &str = "FUSEWIRE_TEST_WAY";
/// Name of the variable with the path of a [`Gate`].
const CHILD_GATE: &str = "FUSEWIRE_TEST_GATE";

/// Returns the value of a variable that the parent has set.
fn variable(name: &str) -> String {
    std::env::var(name).expect("set by the parent")
}

fn number(name: &str) -> u32 {
    variable(name).parse().expect("a number")
}

/// Joins the processes of the other ranks. No wait reaches the timeout before the parent has given
/// up.
fn join(lanes: u32) -> Communicator {
    let mut options = options(1, lanes);
    options.timeout = 10 * LONG;
    Communicator::from_env(Device::Cpu, options).expect("a communicator")
}

/// A file that does not exist until the parent opens the gate.
struct Gate {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Gate {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        Self {
            path: directory.path().join("open"),
            _directory: directory,
        }
    }

    fn variable(&self) -> (&'static str, String) {
        (CHILD_GATE, self.path.display().to_string())
    }

    fn open(&self) {
        fs::write(&self.path, "").expect("a file");
    }

    /// Waits in a child until the parent has opened its gate, at most [`LONG`].
    fn pass() {
        let (path, started) = (variable(CHILD_GATE), Instant::now());
        while !fs::exists(&path).expect("a readable directory") && started.elapsed() < LONG {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Ends the process of rank 1 when rank 0 waits for it, or is about to, in the way that `way` says.
#[kernel]
fn dies(s: &mut Session<impl Machine>, window: Window<u8>, way: u32) -> Result<(), Aborted> {
    let (Some(first), Some(second)) = (s.peer(0), s.peer(1)) else {
        return Ok(());
    };
    if s.rank() == 1 {
        window.wait(s, 1, first)?;
        std::process::abort();
    }
    window.at(s.me()).raise(s, 0);
    window.at(second).raise(s, 1);
    match way {
        0 => _ = window.wait(s, 0, second)?,
        1 => _ = window.wait_all(s, 0, Team::World)?,
        _ => _ = window.wait_value(s, 0, None, Compare::GreaterEqual, 2)?,
    }
    s.barrier()
}

#[test]
fn a_process_that_ends_is_named_by_every_wait_for_it() {
    let test = "waits::a_process_that_ends_is_named_by_every_wait_for_it";
    if role().is_some() {
        let comm = join(number(CHILD_LANES));
        let window = comm
            .alloc_window(DType::U8, 1, WindowOptions::default())
            .expect("a window");
        let arguments = Dies {
            window: (&window).into(),
            way: number(CHILD_WAY),
        };
        report(comm.kernel(arguments).launch().expect_err("rank 1 ends"));
        return;
    }
    let sum = "into the wait for its part of a sum of signals";
    for (way, lanes, wait) in [
        (0u32, 1u32, "into the wait for its signal"),
        (1, 1, "into the wait for its signal"),
        (1, 32, "into the wait for its signal"),
        (2, 1, sum),
        (2, 32, sum),
    ] {
        let environment = [
            (CHILD_WAY, way.to_string()),
            (CHILD_LANES, lanes.to_string()),
        ];
        let mut ranks = Ranks::start(test, "rank", 2, Host::Parent, &environment);
        // The time limit is much shorter than the timeout.
        let said = ranks.processes[0].next_report(LONG).expect("a failure");
        let texts = [
            "rank 0 in kernel dies #",
            "the process of rank 1 has ended",
            "its last operation was kernel dies #",
            wait,
        ];
        assert_contains(&said, &texts);
        ranks.processes[0].succeed(LONG).expect("a clean end");
        let status = ranks.processes[1].wait(LONG).expect("its end");
        assert_eq!(status.signal(), Some(libc::SIGABRT));
    }
}

/// Raises signal 0 of rank 0, which waits for the sum over the other ranks.
#[kernel]
fn gathers_signals(s: &mut Session<impl Machine>, window: Window<u8>) -> Result<(), Aborted> {
    let Some(first) = s.peer(0) else {
        return Ok(());
    };
    if s.rank() != 0 {
        window.at(first).raise(s, 0);
        return Ok(());
    }
    let others = u64::from(s.ranks() - 1);
    window.wait_value(s, 0, None, Compare::Equal, others)?;
    Ok(())
}

#[test]
fn a_process_that_ends_after_its_part_fails_no_wait() {
    let test = "waits::a_process_that_ends_after_its_part_fails_no_wait";
    if role().is_some() {
        let comm = join(1);
        let window = comm
            .alloc_window(DType::U8, 1, WindowOptions::default())
            .expect("a window");
        if comm.rank() == 1 {
            // Opens when rank 2 has ended, which rank 0 then has time to notice.
            Gate::pass();
            thread::sleep(Duration::from_millis(300));
        }
        let window = (&window).into();
        let launched = comm.kernel(GathersSignals { window }).launch();
        launched.expect("every rank does its part");
        return;
    }
    let gate = Gate::new();
    let mut ranks = Ranks::start(test, "rank", 3, Host::Parent, &[gate.variable()]);
    ranks.processes[2].succeed(LONG).expect("a clean end");
    gate.open();
    ranks.succeed(LONG).expect("rank 0 gets the sum");
}

/// Reads the byte at `x` on the last lane, between two barriers.
///
/// # Safety
/// `x` must be valid.
#[kernel]
unsafe fn reads_null(s: &mut Session<impl Machine>, x: *const u8) -> Result<(), Aborted> {
    s.barrier()?;
    let block = s.block();
    if block.rank() == block.size() - 1 {
        // In debug builds, the compiler checks the pointers of other loads.
        // SAFETY: the precondition of this function, which the test violates on one rank.
        let value = unsafe { AtomicU8::from_ptr(x.cast_mut()) }.load(Ordering::Relaxed);
        if value == 0 {
            s.fault(0, 0, 0);
        }
    }
    s.barrier()
}

#[test]
fn an_access_by_a_null_pointer_names_the_kernel() {
    let test = "waits::an_access_by_a_null_pointer_names_the_kernel";
    if role().is_some() {
        let comm = join(number(CHILD_LANES));
        let byte = tensor(&[1u8]).expect("memory");
        let is_last = comm.rank() + 1 == comm.size();
        let x = match is_last {
            true => ptr::null(),
            false => byte.as_ptr().cast_const(),
        };
        // SAFETY: none on the last rank, whose process the read ends. On the others, the byte lives
        // until the launch has completed.
        let launched = unsafe { comm.kernel(ReadsNull { x }).launch_unchecked() };
        report(launched.expect_err("the last rank ends"));
        return;
    }
    for (size, lanes) in [(1u32, 1u32), (1, 32), (2, 1), (2, 32)] {
        let environment = [(CHILD_LANES, lanes.to_string())];
        let mut ranks = Ranks::start(test, "rank", size, Host::Parent, &environment);
        let (peers, last) = ranks.processes.split_at_mut(size as usize - 1);
        let rank = size - 1;
        let text =
            format!("fusewire: rank {rank} in kernel reads_null: SIGSEGV at address 0x0; a null");
        last[0].next_line_with(&text, LONG).expect("a message");
        let status = last[0].wait(LONG).expect("its end");
        assert_eq!(status.signal(), Some(libc::SIGSEGV));
        for peer in peers {
            let said = peer.next_report(LONG).expect("a failure");
            let texts = [
                "rank 0 in kernel reads_null #1: the process of rank 1 has ended",
                "its last operation was kernel reads_null #1",
            ];
            assert_contains(&said, &texts);
            peer.succeed(LONG).expect("a clean end");
        }
    }
}

/// Polls element 0 of `x` without a wait of the session.
#[kernel]
fn spins(s: &mut Session<impl Machine>, x: In<u32>) -> Result<(), Aborted> {
    while x.get(0) == 0 {
        thread::yield_now();
    }
    s.barrier()
}

#[test]
fn a_kernel_that_polls_without_a_wait_is_reported() {
    let test = "waits::a_kernel_that_polls_without_a_wait_is_reported";
    if role().is_some() {
        let mut options = options(1, 1);
        options.timeout = Duration::from_millis(300);
        for result in run_threads(1, &options, |comm| {
            let x = tensor(&[0u32])?;
            thread::scope(|scope| {
                scope.spawn(|| {
                    Gate::pass();
                    // `copy_from` would wait for the end of the kernel.
                    // SAFETY: the address is that of the aligned element of the tensor.
                    let word = unsafe { AtomicU32::from_ptr(x.as_ptr().cast()) };
                    word.store(1, Ordering::Release);
                });
                comm.kernel(Spins { x: (&x).into() }).launch()
            })?;
            // The report is a warning.
            comm.barrier()
        }) {
            result.expect("the kernel ends");
        }
        return;
    }
    let gate = Gate::new();
    let (name, path) = gate.variable();
    let mut child = start(test, "rank", &[(name.to_owned(), path)]);
    let text = "rank 0 has been in kernel spins #1 for ";
    child.next_line_with(text, LONG).expect("a report");
    gate.open();
    child.succeed(LONG).expect("a clean end");
}
