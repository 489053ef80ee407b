//! Tests ranks that are killed or stopped between the halves of mixture-of-experts operations, or
//! between the operations in high throughput mode. The other ranks get what the rank has sent, and
//! their next wait for it names the rank.

use core::time::Duration;
use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::Instant;

use fusewire::{Communicator, DType, Device, Dispatched, Error, Moe, MoeLayout, Options};
use fusewire_tests::moe::{
    Buffers, Expert, MoeCase, check_dispatched, expected, inputs, outputs, results,
};
use fusewire_tests::process::{Host, Process, Ranks, report, role};

use super::ranks::{failure, memory_files};

/// Timeout of the operations of ranks that wait for a stopped rank.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time within which an operation must fail.
const LIMIT: Duration = Duration::from_secs(20);
/// Time limit of the tests' waits, long enough for a busy machine. Also the timeout of the
/// operations of ranks that wait for a killed rank, which must fail long before it.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of ranks.
pub(super) const RANKS: u32 = 3;
/// The rank that is killed or stopped.
pub(super) const VICTIM: u32 = 1;
/// Variable with the number of calls that the victim makes.
pub(super) const CALLS: &str = "FUSEWIRE_TEST_CALLS";

/// A call of a round.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    DispatchSend,
    DispatchReceive,
    CombineSend,
    CombineReceive,
    Dispatch,
    Combine,
}

/// The calls of a round in low latency mode, in this order.
pub(super) const HALVES: [Call; 4] = [
    Call::DispatchSend,
    Call::DispatchReceive,
    Call::CombineSend,
    Call::CombineReceive,
];

/// The calls of a round in high throughput mode, in this order.
const OPERATIONS: [Call; 2] = [Call::Dispatch, Call::Combine];

/// A number of calls that the victim makes, and how the other ranks fail. Calls are numbered from 0
/// over all rounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    /// Calls of the victim.
    pub(super) calls: usize,
    /// Number of the first call that waits for what the victim has not sent.
    pub(super) failing: usize,
    /// The kernel of that call.
    kernel: &'static str,
}

/// Cases of the halves.
pub(super) const CASES: [Case; 4] = [
    // Before its dispatch_send.
    Case {
        calls: 0,
        failing: 1,
        kernel: "moe_dispatch",
    },
    // After its dispatch_send: the other ranks get its tokens.
    Case {
        calls: 1,
        failing: 3,
        kernel: "moe_combine",
    },
    // Before its combine_send.
    Case {
        calls: 2,
        failing: 3,
        kernel: "moe_combine",
    },
    // After its combine_send: the other ranks get its results, and fail in the next dispatch.
    Case {
        calls: 3,
        failing: 5,
        kernel: "moe_dispatch",
    },
];

/// Cases of the operations in high throughput mode.
const OPERATION_CASES: [Case; 3] = [
    // Before its dispatch.
    Case {
        calls: 0,
        failing: 0,
        kernel: "moe_dispatch",
    },
    // After its dispatch: the other ranks get its tokens.
    Case {
        calls: 1,
        failing: 1,
        kernel: "moe_combine",
    },
    // After its combine: the other ranks get its results.
    Case {
        calls: 2,
        failing: 2,
        kernel: "moe_dispatch",
    },
];

/// Returns the settings of a layer in low latency mode.
pub(super) const fn low_latency(layout: MoeLayout) -> MoeCase {
    MoeCase {
        input: DType::F32,
        layout,
        ..MoeCase::new(6, 2, 16, 9)
    }
}

/// Returns the settings of a layer in high throughput mode, with three rounds.
fn high_throughput(layout: MoeLayout) -> MoeCase {
    low_latency(layout).staged(4)
}

/// A layer on a rank.
pub(super) struct Layer<'a> {
    comm: &'a Communicator,
    pub(super) case: MoeCase,
    /// The calls of a round.
    calls: &'static [Call],
    pub(super) moe: Moe,
    buffers: Buffers,
    dispatched: Option<Dispatched>,
}

impl<'a> Layer<'a> {
    pub(super) fn new(
        comm: &'a Communicator,
        case: MoeCase,
        timeout: Duration,
    ) -> fusewire::Result<Self> {
        let calls: &[Call] = match case.is_staged() {
            true => &OPERATIONS,
            false => &HALVES,
        };
        let moe = Moe::new(comm, &case.config().timeout(timeout))?;
        let buffers = Buffers::new(comm, &case, moe.info())?;
        Ok(Self {
            comm,
            case,
            calls,
            moe,
            buffers,
            dispatched: None,
        })
    }

    /// Returns the result of the last `dispatch` or `dispatch_send`.
    fn dispatched(&self) -> &Dispatched {
        self.dispatched.as_ref().expect("a round begins with it")
    }

    /// Returns call number `call`, and its round.
    fn find(&self, call: usize) -> (Call, usize) {
        let count = self.calls.len();
        (self.calls[call % count], call / count)
    }

    /// Writes the results of the experts in round `round`.
    fn write_results(&self, round: usize) -> fusewire::Result<()> {
        let (case, count) = (&self.case, self.moe.info().results);
        let expected = expected(case, self.comm.size(), self.comm.rank(), round);
        let y = results(case, &expected, count, expert(round));
        self.buffers.y.copy_from_bytes(&y)
    }

    /// Makes call number `call`, and waits for it.
    pub(super) fn call(&mut self, call: usize) -> fusewire::Result<()> {
        let (case, moe, buffers) = (&self.case, &self.moe, &self.buffers);
        let (call, round) = self.find(call);
        let inputs = inputs(case, self.comm.rank(), round);
        match call {
            Call::DispatchSend => {
                let it = buffers.write(case, &inputs)?;
                self.dispatched = Some(moe.dispatch_send(&it.x, &it.ids, &it.weights)?);
            }
            Call::Dispatch => {
                let it = buffers.write(case, &inputs)?;
                self.dispatched = Some(moe.dispatch(&it.x, &it.ids, &it.weights)?);
            }
            Call::DispatchReceive => moe.dispatch_receive(self.dispatched())?,
            Call::CombineSend => {
                self.write_results(round)?;
                moe.combine_send(&buffers.y, self.dispatched())?;
            }
            Call::CombineReceive => {
                let it = buffers.arguments(case, inputs.tokens)?;
                moe.combine_receive(self.dispatched(), &it.out)?;
            }
            Call::Combine => {
                self.write_results(round)?;
                let it = buffers.arguments(case, inputs.tokens)?;
                moe.combine(&buffers.y, self.dispatched(), &it.out)?;
            }
        }
        self.comm.synchronize()
    }

    /// Compares the results of call number `call` with the expected results.
    pub(super) fn check(&self, call: usize) -> Result<(), String> {
        let (case, buffers) = (&self.case, &self.buffers);
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let (call, round) = self.find(call);
        match call {
            Call::DispatchSend | Call::CombineSend => Ok(()),
            Call::DispatchReceive | Call::Dispatch => {
                let expected = expected(case, ranks, rank, round);
                check_dispatched(case, self.moe.info(), self.dispatched(), &expected, false)
            }
            Call::CombineReceive | Call::Combine => {
                let inputs = inputs(case, rank, round);
                let (inputs, missing) = case.present(ranks, round, &inputs);
                let found = self.moe.missing().to_vec::<u32>();
                let found = found.map_err(|error| error.to_string())?;
                if found[..inputs.tokens] != missing {
                    return Err(format!("missing: {found:?}, expected {missing:?}"));
                }
                buffers.check(case, &outputs(case, &inputs, expert(round)))
            }
        }
    }
}

/// Returns the expert of round `round`.
fn expert(round: usize) -> Expert {
    Expert::Affine(round as f32)
}

/// Waits until all ranks that make call number `call` have completed it. The victim makes `calls`
/// calls. So no rank waits for another one than the victim.
pub(super) fn meet(comm: &Communicator, call: usize, calls: usize) {
    let met = (0..comm.size()).filter(|rank| *rank != VICTIM || call < calls);
    meet_ranks(comm, &format!("call {call}"), met);
}

/// Waits until the given ranks have come to the point `at`.
fn meet_ranks(comm: &Communicator, at: &str, ranks: impl Iterator<Item = u32>) {
    let store = comm.store();
    let key = |rank: u32| format!("{at} of rank {rank}");
    store.set(&key(comm.rank()), b"").expect("the store");
    for rank in ranks {
        store.get(&key(rank), TEST_TIMEOUT).expect("the other rank");
    }
}

/// Returns the settings of a layer with a layout.
type Settings = fn(MoeLayout) -> MoeCase;

/// Makes calls until one fails. Returns its number, its error, and the time until the error. The
/// victim reports when it has made `calls` calls, and makes the next one after the failure.
fn call_until_failure(
    comm: &Communicator,
    signal: i32,
    settings: Settings,
    calls: usize,
) -> (usize, Error, Duration) {
    let (layout, timeout) = match signal {
        libc::SIGSTOP => (MoeLayout::RankMajor, TIMEOUT),
        _ => (MoeLayout::ExpertMajor, TEST_TIMEOUT),
    };
    let mut layer = Layer::new(comm, settings(layout), timeout).expect("a layer");
    // Otherwise a slow rank finds the failure before it has its layer.
    meet_ranks(comm, "the layer", 0..comm.size());
    for call in 0..2 * layer.calls.len() {
        if comm.rank() == VICTIM && call == calls {
            report("ready");
            while comm.failure().is_none() {
                thread::sleep(Duration::from_millis(5));
            }
        }
        let began = Instant::now();
        if let Err(error) = layer.call(call) {
            return (call, error, began.elapsed());
        }
        let checked = layer.check(call);
        checked.unwrap_or_else(|wrong| panic!("call {call}: {wrong}"));
        meet(comm, call, calls);
    }
    panic!("no call has failed");
}

/// Runs a rank as a child process. Reports the failure, its message, and the number of the
/// library's memory files that are left.
fn run_rank(signal: i32, settings: Settings) {
    let calls = std::env::var(CALLS).expect("set by the parent");
    let calls = calls.parse().expect("a number");
    let mut options = Options::default();
    options.timeout = TEST_TIMEOUT;
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    let (call, error, waited) = call_until_failure(&comm, signal, settings, calls);
    let failed = failure(&error);
    report(format!(
        "{call} {:?} {} {} {} {}",
        failed.kind,
        failed.rank,
        failed.activity.kernel.unwrap_or("unknown"),
        failed.seconds,
        waited.as_secs_f64()
    ));
    report(&error);
    end(comm);
}

/// Drops the communicator, and reports the number of the library's memory files that are left.
pub(super) fn end(comm: Communicator) {
    drop(comm);
    // Threads of the library may hold the communicator for a short time.
    let began = Instant::now();
    while memory_files() > 0 && began.elapsed() < LIMIT {
        thread::sleep(Duration::from_millis(5));
    }
    report(format!("{} memory files", memory_files()));
}

/// Sends `signal` to the victim of `case`. Checks the failures of all ranks.
fn fail_victim(test: &str, signal: i32, case: Case) {
    let is_killed = signal == libc::SIGKILL;
    let environment = [(CALLS, case.calls.to_string())];
    let mut ranks = Ranks::start(test, "rank", RANKS, Host::Parent, &environment);
    let ready = ranks.processes[VICTIM as usize].next_report(TEST_TIMEOUT);
    assert_eq!(ready.as_deref(), Ok("ready"), "{case:?}");
    ranks.processes[VICTIM as usize].signal(signal);
    // The end of a process is detected immediately. A stopped process is detected by the timeout.
    let (kind, named) = match is_killed {
        true => ("Dead", format!("the process of rank {VICTIM} has ended")),
        false => ("Timeout", format!("look at rank {VICTIM} ")),
    };
    for (index, rank) in (0..).zip(&mut ranks.processes) {
        if index == VICTIM {
            continue;
        }
        let what = format!("rank {index}, {case:?}");
        let said = next_report(rank, &what);
        let begin = format!("{} {kind} {VICTIM} {} ", case.failing, case.kernel);
        let Some(times) = said.strip_prefix(&begin) else {
            panic!("{what}: {said:?} does not begin with {begin:?}");
        };
        let times: Vec<f64> = times
            .split(' ')
            .map(|seconds| seconds.parse().expect("seconds"))
            .collect();
        let [seconds, waited] = times[..] else {
            panic!("{what}: {said}");
        };
        assert!(
            is_killed || seconds >= TIMEOUT.as_secs_f64(),
            "{what}: {said}"
        );
        assert!(waited < LIMIT.as_secs_f64(), "{what}: {said}");
        let message = next_report(rank, &what);
        for text in [&named, &format!("in kernel {} #", case.kernel)] {
            assert!(message.contains(text), "{what}: {message:?} lacks {text:?}");
        }
        check_end(rank, &what);
    }
    let victim = &mut ranks.processes[VICTIM as usize];
    if is_killed {
        let status = victim.wait(TEST_TIMEOUT).expect("its end");
        assert_eq!(status.signal(), Some(signal));
    } else {
        victim.signal(libc::SIGCONT);
        // The continued process reports the same failure, in its next call.
        let what = format!("the stopped rank, {case:?}");
        let said = next_report(victim, &what);
        let begin = format!("{} {kind} {VICTIM} ", case.calls);
        assert!(said.starts_with(&begin), "{what}: {said}");
        let message = next_report(victim, &what);
        assert!(message.contains(&named), "{what}: {message}");
        check_end(victim, &what);
    }
}

/// Returns the next report of a rank.
pub(super) fn next_report(rank: &mut Process, what: &str) -> String {
    let said = rank.next_report(TEST_TIMEOUT);
    said.unwrap_or_else(|wrong| panic!("{what}: {wrong}"))
}

/// Checks that a rank has freed its memory, and waits for its end.
pub(super) fn check_end(rank: &mut Process, what: &str) {
    assert_eq!(next_report(rank, what), "0 memory files", "{what}");
    let ended = rank.succeed(TEST_TIMEOUT);
    ended.unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
}

/// Runs `cases`, or a rank if this process is a child.
fn fail_in_each(test: &str, signal: i32, settings: Settings, cases: &[Case]) {
    if role().is_some() {
        return run_rank(signal, settings);
    }
    for case in cases {
        fail_victim(test, signal, *case);
    }
}

#[test]
fn a_rank_that_is_killed_between_the_halves_is_named() {
    let test = "moe::a_rank_that_is_killed_between_the_halves_is_named";
    fail_in_each(test, libc::SIGKILL, low_latency, &CASES);
}

#[test]
fn a_rank_that_is_stopped_between_the_halves_is_named() {
    let test = "moe::a_rank_that_is_stopped_between_the_halves_is_named";
    fail_in_each(test, libc::SIGSTOP, low_latency, &CASES);
}

#[test]
fn a_rank_that_is_killed_in_high_throughput_mode_is_named() {
    let test = "moe::a_rank_that_is_killed_in_high_throughput_mode_is_named";
    fail_in_each(test, libc::SIGKILL, high_throughput, &OPERATION_CASES);
}

#[test]
fn a_rank_that_is_stopped_in_high_throughput_mode_is_named() {
    let test = "moe::a_rank_that_is_stopped_in_high_throughput_mode_is_named";
    fail_in_each(test, libc::SIGSTOP, high_throughput, &OPERATION_CASES);
}
