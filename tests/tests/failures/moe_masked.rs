//! Tests ranks that are killed or stopped between the halves of mixture-of-experts operations, and
//! are masked: the other ranks continue without them.

use core::time::Duration;
use std::thread;

use fusewire::{Communicator, Device, MissingRanks, MoeLayout, Options};
use fusewire_tests::moe::MoeCase;
use fusewire_tests::process::{Host, Ranks, report, role};

use super::moe::{
    CALLS, CASES, Call, Case, HALVES, Layer, RANKS, TEST_TIMEOUT, VICTIM, check_end, end,
    low_latency, meet, next_report,
};

/// Time after which a rank is late.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Rounds of the other ranks while the victim has ended or is stopped.
const ROUNDS: usize = 2;
/// Rounds of the other ranks afterwards. In the first one, a stopped victim continues.
const LATE_ROUNDS: usize = 2;
/// Number of the call before which the victim continues: the others have sent their results.
const LATE_CALL: usize = HALVES.len() * ROUNDS + 3;
/// Key with which the first rank lets the victim continue.
const CONTINUE: &str = "continue";
/// Key that the victim sets when it has written late.
const WRITTEN: &str = "written";
/// Variable with the signal that the victim gets.
const SIGNAL: &str = "FUSEWIRE_TEST_SIGNAL";

/// Makes the calls of a rank that is not the victim, and checks results and masks.
fn go_on(comm: &Communicator, layer: &mut Layer<'_>, case: Case) {
    let is_killed = number(SIGNAL) == libc::SIGKILL as usize;
    for call in 0..HALVES.len() * (ROUNDS + LATE_ROUNDS) {
        if call == LATE_CALL && !is_killed {
            report("masked");
            comm.store().set(CONTINUE, b"").expect("the store");
            let written = comm.store().get(WRITTEN, TEST_TIMEOUT);
            written.expect("the key of the victim");
        }
        let called = layer.call(call);
        called.unwrap_or_else(|error| panic!("call {call}: {error}"));
        let mask = layer.moe.mask().to_vec::<u32>().expect("the mask");
        let mut expected = vec![0; RANKS as usize];
        if call >= case.failing {
            expected[VICTIM as usize] = if is_killed { 2 } else { 1 };
            layer.case.masked = 1 << VICTIM;
        }
        assert_eq!(mask, expected, "call {call}");
        let checked = layer.check(call);
        checked.unwrap_or_else(|wrong| panic!("call {call}: {wrong}"));
        meet(comm, call, case.calls);
    }
}

/// Makes the calls of the victim. After it has been stopped and continued, the others have sent
/// what it receives up to its next `combine_send`, which writes results that they no longer read.
/// The others do not answer the calls after that, so the victim masks them.
fn be_victim(comm: &Communicator, layer: &mut Layer<'_>, case: Case) {
    let last = (case.calls..)
        .find(|call| matches!(HALVES[call % HALVES.len()], Call::CombineSend))
        .expect("one of four calls");
    for call in 0..=last + HALVES.len() {
        if call == case.calls {
            report("ready");
            // The signal arrives during this wait.
            let key = comm.store().get(CONTINUE, TEST_TIMEOUT);
            key.expect("the key of another rank");
        }
        let called = layer.call(call);
        called.unwrap_or_else(|error| panic!("call {call} of the victim: {error}"));
        if call < case.calls {
            meet(comm, call, case.calls);
        }
        let mask = layer.moe.mask().to_vec::<u32>().expect("the mask");
        if call <= last {
            assert_eq!(mask, [0; RANKS as usize], "call {call} of the victim");
        } else if call == last + HALVES.len() {
            // The others are late, or have ended.
            let others = [mask[0] > 0, mask[1] > 0, mask[2] > 0];
            assert_eq!(others, [true, false, true], "the mask of the victim");
        }
        if call == last {
            comm.store().set(WRITTEN, b"").expect("the store");
        }
    }
}

fn number(variable: &str) -> usize {
    let value = std::env::var(variable).expect("set by the parent");
    value.parse().expect("a number")
}

/// Runs a rank as a child process.
fn run_rank() {
    let is_killed = number(SIGNAL) == libc::SIGKILL as usize;
    let case = *CASES
        .iter()
        .find(|case| case.calls == number(CALLS))
        .expect("a case");
    let mut options = Options::default();
    options.timeout = TEST_TIMEOUT;
    // With several blocks, the half that receives has two launches.
    let (layout, blocks) = match is_killed {
        true => (MoeLayout::ExpertMajor, 1),
        false => (MoeLayout::RankMajor, 2),
    };
    options.blocks = blocks;
    let comm = Communicator::from_env(Device::Cpu, options).expect("a communicator");
    let settings = MoeCase {
        missing_ranks: MissingRanks::Mask,
        ..low_latency(layout)
    };
    let mut layer = Layer::new(&comm, settings, TIMEOUT).expect("a layer");
    if comm.rank() == VICTIM {
        be_victim(&comm, &mut layer, case);
    } else {
        go_on(&comm, &mut layer, case);
    }
    assert!(comm.failure().is_none());
    report("done");
    drop(layer);
    end(comm);
}

/// Sends `signal` to the victim of `case`, and checks that all other ranks continue.
fn mask_victim(test: &str, signal: i32, case: Case) {
    let environment = [
        (CALLS, case.calls.to_string()),
        (SIGNAL, signal.to_string()),
    ];
    let mut ranks = Ranks::start(test, "rank", RANKS, Host::Parent, &environment);
    let ready = ranks.processes[VICTIM as usize].next_report(TEST_TIMEOUT);
    assert_eq!(ready.as_deref(), Ok("ready"), "{case:?}");
    ranks.processes[VICTIM as usize].signal(signal);
    let what = |index: usize| format!("rank {index}, {case:?}");
    let mut left = vec![0, 2];
    if signal == libc::SIGSTOP {
        for &index in &left {
            let said = next_report(&mut ranks.processes[index], &what(index));
            assert_eq!(said, "masked", "{}", what(index));
        }
        ranks.processes[VICTIM as usize].signal(libc::SIGCONT);
        left.push(VICTIM as usize);
    }
    for index in left {
        let rank = &mut ranks.processes[index];
        assert_eq!(next_report(rank, &what(index)), "done", "{}", what(index));
        check_end(rank, &what(index));
    }
}

/// Runs all cases, or a rank if this process is a child.
fn mask_in_each_half(test: &str, signal: i32) {
    if role().is_some() {
        return run_rank();
    }
    // Most of the time is that of the timeouts.
    thread::scope(|scope| {
        for case in CASES {
            scope.spawn(move || mask_victim(test, signal, case));
        }
    });
}

#[test]
fn ranks_continue_without_a_rank_that_is_killed_between_the_halves() {
    let test = "moe_masked::ranks_continue_without_a_rank_that_is_killed_between_the_halves";
    mask_in_each_half(test, libc::SIGKILL);
}

#[test]
fn ranks_continue_without_a_rank_that_is_stopped_between_the_halves() {
    let test = "moe_masked::ranks_continue_without_a_rank_that_is_stopped_between_the_halves";
    mask_in_each_half(test, libc::SIGSTOP);
}
