//! Failures that a stalled wait reports, by the progress words that it reads.

extern crate std;

use core::mem::offset_of;
use core::ptr::from_ref;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::boxed::Box;
use std::thread;
use std::time::Instant;
use std::vec;
use std::vec::Vec;

use bytemuck::Zeroable;

use super::{Absence, Arrival, WaitContext, WaitKind};
use crate::call::{Call, Operation};
use crate::comm::Comm;
use crate::layout::{
    BLOCKS_AT, BlockState, CONST_MAGIC, CommConst, CommState, FailureKind, FailureRecord,
    LAYOUT_VERSION, LINE, Progress, WorkspaceConfig, WorkspaceLayout,
};

/// Timeout of the waits.
const TIMEOUT_NS: u64 = 2_000_000;

/// Sequence number of the operation that waits.
const SEQUENCE: u64 = 7;

fn call(operation: Operation, count: u64) -> Call {
    Call::new(operation, 0, 0, 0, 0xffff, count)
}

/// Returns the failure that rank 0 of two records when its block 1 waits in vain in an all_reduce
/// of 16 elements, while block 0 is in `own` and block 0 of the peer in `theirs`.
fn failure_of(own: Call, theirs: Call) -> FailureKind {
    let record = record_of(&[own, theirs], None, WaitKind::Ready, 1);
    [FailureKind::Timeout, FailureKind::Mismatch]
        .into_iter()
        .find(|kind| *kind as u64 == record.kind)
        .expect("one of the two")
}

/// Rank 0 waits as in [`failure_of`] for rank `awaited`, while block 0 of each rank is in one of
/// `calls`. The host has found that rank `dead` has ended. Returns the record.
fn record_of(calls: &[Call], dead: Option<u32>, wait: WaitKind, awaited: u32) -> FailureRecord {
    record_after(
        calls,
        &[],
        dead.map(|rank| (rank, SEQUENCE - 1)),
        wait,
        awaited,
    )
}

/// Does what [`record_of`] does. `steps` are the words with the steps of the first ranks; `dead`
/// has the number of collectives that the rank had finished.
fn record_after(
    calls: &[Call],
    steps: &[u64],
    dead: Option<(u32, u64)>,
    wait: WaitKind,
    awaited: u32,
) -> FailureRecord {
    with_ranks(calls, steps, dead, |ctx, ranks| {
        let never: Option<()> = match wait {
            WaitKind::Sum => ctx.until_signalled(wait, || awaited, 1, || Err(0)),
            _ => ctx.until(wait, awaited, 1, || Err(0)),
        };
        assert_eq!(never, None);
        let record = ranks.record();
        assert_eq!(record.state, 2);
        record
    })
}

/// The workspaces of the ranks.
struct Workspaces {
    bases: Vec<u64>,
    layout: WorkspaceLayout,
}

impl Workspaces {
    /// Returns the failure record of rank 0.
    fn record(&self) -> FailureRecord {
        // SAFETY: a workspace begins with its state, and nothing else accesses it.
        unsafe { (*(self.bases[0] as *const CommState)).failure }
    }

    /// Returns the word [`Progress::beat`] of `rank`.
    fn beat(&self, rank: usize) -> &AtomicU64 {
        let at = self.bases[rank] + self.layout.progress + offset_of!(Progress, beat) as u64;
        // SAFETY: the word lies in the workspace of the rank, and is only accessed atomically.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }
}

/// Calls `run` with the wait context of block 1 of rank 0, as [`record_after`] describes it.
fn with_ranks<T>(
    calls: &[Call],
    steps: &[u64],
    dead: Option<(u32, u64)>,
    run: impl FnOnce(&WaitContext, &Workspaces) -> T,
) -> T {
    let size = calls.len() as u32;
    let workspace = WorkspaceLayout::new(&WorkspaceConfig {
        size,
        team: size,
        max_blocks: 2,
        blocks: 2,
        packet_slot: 256,
        channel_slot: 64,
        channel_depth: 1,
        staging: 0,
    });
    const { assert!(size_of::<[u64; 8]>() as u64 == LINE) };
    let lines = (workspace.bytes / LINE) as usize;
    let mut workspaces = vec![vec![[0u64; 8]; lines].into_boxed_slice(); calls.len()];
    for (memory, call) in workspaces.iter_mut().zip(calls) {
        memory[(workspace.progress / LINE) as usize][0] = SEQUENCE << 40 | call.0 & 0xff_ffff_ffff;
    }
    for (memory, step) in workspaces.iter_mut().zip(steps) {
        memory[(workspace.progress / LINE) as usize][2] = *step;
    }
    if let Some((rank, finished)) = dead {
        let sequence = BLOCKS_AT + LINE + offset_of!(BlockState, sequence) as u64;
        workspaces[rank as usize].as_flattened_mut()[sequence as usize / 8] = finished;
        let words = workspaces[0].as_flattened_mut();
        words[(workspace.dead / 8 + u64::from(rank / 64)) as usize] |= 1 << (rank % 64);
        words[offset_of!(CommState, dead) / 8] = 1;
    }
    let bases: Vec<u64> = workspaces
        .iter_mut()
        .map(|memory| memory.as_mut_ptr() as u64)
        .collect();
    let constants = Box::new(CommConst {
        magic: CONST_MAGIC,
        version: LAYOUT_VERSION,
        bytes: size_of::<CommConst>() as u32,
        size,
        team_size: size,
        max_blocks: 2,
        spins: 1,
        state: bases[0],
        workspace,
        workspaces: bases.as_ptr() as u64,
        ..CommConst::zeroed()
    });
    let ctx = WaitContext {
        // SAFETY: the constants and the workspaces outlive the wait context.
        comm: unsafe { Comm::new(from_ref(&*constants)) },
        call: call(Operation::AllReduce, 16),
        count: 16,
        sequence: SEQUENCE,
        block: 1,
        timeout_ns: TIMEOUT_NS,
    };
    let layout = workspace;
    run(&ctx, &Workspaces { bases, layout })
}

#[test]
fn a_dead_rank_is_found_among_many() {
    let calls = vec![call(Operation::AllReduce, 16); 200];
    for dead in [1, 63, 64, 130, 199] {
        for wait in [WaitKind::Ready, WaitKind::Sum] {
            let record = record_of(&calls, Some(dead), wait, dead);
            assert_eq!(record.kind, FailureKind::Dead as u64, "{dead}");
            assert_eq!(record.blamed, u64::from(dead));
        }
        // Another rank is awaited, which is alive.
        let record = record_of(&calls, Some(dead), WaitKind::Ready, 66);
        assert_eq!(record.kind, FailureKind::Dead as u64, "{dead}");
        assert_eq!(record.blamed, u64::from(dead));
        // The dead rank has done its part, so the wait may still end.
        let finished = Some((dead, SEQUENCE));
        let record = record_after(&calls, &[], finished, WaitKind::Ready, 66);
        assert_eq!(record.kind, FailureKind::Timeout as u64, "{dead}");
    }
}

#[test]
fn steps_of_another_operation_do_not_count() {
    let calls = [call(Operation::AllReduce, 16); 4];
    let of = |sequence: u64, steps: u64| sequence << 40 | steps;
    let steps = [3, 2, 9, 3].map(|steps| of(SEQUENCE, steps));
    let blamed = |steps: &[u64]| record_after(&calls, steps, None, WaitKind::Ready, 3).blamed;
    assert_eq!(blamed(&steps), 1);
    // Rank 2 has just entered; its word of steps is still the last operation's.
    let stale = [steps[0], steps[1], of(SEQUENCE - 1, 9), steps[3]];
    assert_eq!(blamed(&stale), 2);
}

#[test]
fn a_peer_in_another_collective_is_a_mismatch() {
    let ours = call(Operation::AllReduce, 16);
    for theirs in [call(Operation::AllReduce, 17), call(Operation::Barrier, 16)] {
        assert_eq!(failure_of(ours, theirs), FailureKind::Mismatch);
    }
    assert_eq!(failure_of(ours, ours), FailureKind::Timeout);
}

#[test]
fn a_transfer_counts_no_sequence_whoever_is_in_it() {
    // Block 0 is still in the previous transfer, while this block waits in the collective that the
    // peer is in too.
    let ours = call(Operation::AllReduce, 16);
    for transfer in [Operation::Send, Operation::Recv].map(|operation| call(operation, 16)) {
        assert_eq!(failure_of(transfer, ours), FailureKind::Timeout);
        assert_eq!(failure_of(ours, transfer), FailureKind::Timeout);
    }
}

/// Waits as rank 0 for a signal of rank 1, which may be absent. Returns the outcome and the time.
fn await_absent(
    ctx: &WaitContext,
    absence: Absence,
    poll: impl Fn() -> Result<(), u64>,
) -> (Arrival, Duration) {
    let began = Instant::now();
    let arrival = ctx.until_raised(1, 1, absence, poll);
    (arrival, began.elapsed())
}

#[test]
fn a_late_rank_is_absent_and_fails_nothing() {
    let calls = [call(Operation::AllReduce, 16); 3];
    let timeout = Duration::from_nanos(TIMEOUT_NS);
    with_ranks(&calls, &[], None, |ctx, ranks| {
        let (arrival, waited) = await_absent(ctx, Absence::AfterTimeout, || Err(0));
        assert_eq!(arrival, Arrival::Late);
        assert!(waited >= timeout, "{waited:?}");
        assert_eq!(ranks.record().state, 0);
        let (arrival, _) = await_absent(ctx, Absence::AtOnce, || Err(0));
        assert_eq!(arrival, Arrival::Late);
        let (arrival, _) = await_absent(ctx, Absence::AtOnce, || Ok(()));
        assert_eq!(arrival, Arrival::Arrived);
        assert_eq!(ranks.record().state, 0);
        let (arrival, _) = await_absent(ctx, Absence::Fails, || Err(0));
        assert_eq!(arrival, Arrival::Failed);
        assert_eq!(ranks.record().kind, FailureKind::Timeout as u64);
    });
}

/// The wait of a process that was stopped until after the time limit sees what has arrived.
#[test]
fn a_wait_polls_after_its_time_limit() {
    let calls = [call(Operation::AllReduce, 16); 2];
    with_ranks(&calls, &[], None, |ctx, _| {
        let began = Instant::now();
        let timeout = Duration::from_nanos(TIMEOUT_NS);
        let polls = AtomicU64::new(0);
        let (arrival, _) = await_absent(ctx, Absence::AfterTimeout, || {
            if polls.fetch_add(1, Ordering::Relaxed) == 1 {
                thread::sleep(2 * timeout);
            }
            match began.elapsed() > timeout && polls.load(Ordering::Relaxed) > 2 {
                true => Ok(()),
                false => Err(0),
            }
        });
        assert_eq!(arrival, Arrival::Arrived);
    });
}

#[test]
fn a_rank_that_waits_itself_is_not_late() {
    let calls = [call(Operation::AllReduce, 16); 2];
    // Longer than a time slice of another thread on a busy core, which stops the beat.
    let timeout = Duration::from_millis(400);
    with_ranks(&calls, &[], None, |ctx, ranks| {
        let ctx = &WaitContext {
            timeout_ns: timeout.as_nanos() as u64,
            ..*ctx
        };
        let (beat, ended) = (ranks.beat(1), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                while ended.load(Ordering::Relaxed) == 0 {
                    beat.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                }
            });
            let (arrival, waited) = await_absent(ctx, Absence::AfterTimeout, || Err(0));
            ended.store(1, Ordering::Relaxed);
            assert_eq!(arrival, Arrival::Late);
            assert!(waited >= 4 * timeout, "{waited:?}");
        });
        // This rank also shows that it waits.
        assert_ne!(ranks.beat(0).load(Ordering::Relaxed), 0);
    });
}

#[test]
fn only_the_awaited_rank_ends_the_wait_for_it() {
    let ours = call(Operation::AllReduce, 16);
    for dead in [1, 2] {
        let dead_rank = Some((dead, SEQUENCE - 1));
        with_ranks(&[ours; 3], &[], dead_rank, |ctx, ranks| {
            let (arrival, _) = await_absent(ctx, Absence::AfterTimeout, || Err(0));
            let expected = if dead == 1 {
                Arrival::Dead
            } else {
                Arrival::Late
            };
            assert_eq!(arrival, expected);
            assert_eq!(ranks.record().state, 0);
        });
    }
    let other = call(Operation::AllReduce, 17);
    with_ranks(&[ours, ours, other], &[], None, |ctx, ranks| {
        let (arrival, _) = await_absent(ctx, Absence::AfterTimeout, || Err(0));
        assert_eq!((arrival, ranks.record().state), (Arrival::Late, 0));
    });
    with_ranks(&[ours, other, ours], &[], None, |ctx, ranks| {
        let (arrival, _) = await_absent(ctx, Absence::AfterTimeout, || Err(0));
        assert_eq!(arrival, Arrival::Failed);
        assert_eq!(ranks.record().kind, FailureKind::Mismatch as u64);
    });
}
