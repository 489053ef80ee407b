//! Failures that a stalled wait reports, by the progress words that it reads.

extern crate std;

use core::mem::offset_of;
use core::ptr::from_ref;
use std::boxed::Box;
use std::vec;
use std::vec::Vec;

use bytemuck::Zeroable;

use super::{WaitContext, WaitKind};
use crate::call::{Call, Operation};
use crate::comm::Comm;
use crate::layout::{
    BLOCKS_AT, BlockState, CONST_MAGIC, CommConst, CommState, FailureKind, FailureRecord,
    LAYOUT_VERSION, LINE, WorkspaceConfig, WorkspaceLayout,
};

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
        timeout_ns: 2_000_000,
    };
    let never: Option<()> = match wait {
        WaitKind::Sum => ctx.until_signalled(wait, || awaited, 1, || Err(0)),
        _ => ctx.until(wait, awaited, 1, || Err(0)),
    };
    assert_eq!(never, None);
    // SAFETY: a workspace begins with its state, and nothing else accesses it.
    let record = unsafe { (*(bases[0] as *const CommState)).failure };
    assert_eq!(record.state, 2);
    record
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
