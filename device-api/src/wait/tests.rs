//! What a stalled wait says, from the progress words that it finds.

extern crate std;

use core::ptr::from_ref;
use std::boxed::Box;
use std::vec;

use bytemuck::Zeroable;

use super::{WaitContext, WaitKind};
use crate::comm::Comm;
use crate::layout::{
    CONST_MAGIC, CommConst, CommState, FailureKind, LAYOUT_VERSION, LINE, WorkspaceConfig,
    WorkspaceLayout,
};
use crate::session::{Call, Operation};

/// Sequence number of the operation that waits.
const SEQUENCE: u64 = 7;

fn call(operation: Operation, count: u64) -> Call {
    Call::new(operation, 0, 0, 0, 0xffff, count)
}

/// A rank of two waits in an all_reduce of 16 elements, in block 1, for what never comes; `own` and
/// `theirs` are what its block 0 and its peer's are in. The failure that it records.
fn failure_of(own: Call, theirs: Call) -> FailureKind {
    let workspace = WorkspaceLayout::new(&WorkspaceConfig {
        size: 2,
        team: 2,
        max_blocks: 2,
        packet_slot: 256,
        channel_slot: 64,
        channel_depth: 1,
        staging: 0,
    });
    const { assert!(size_of::<[u64; 8]>() as u64 == LINE) };
    let lines = (workspace.bytes / LINE) as usize;
    let mut workspaces = [
        vec![[0u64; 8]; lines].into_boxed_slice(),
        vec![[0u64; 8]; lines].into_boxed_slice(),
    ];
    for (memory, call) in workspaces.iter_mut().zip([own, theirs]) {
        memory[(workspace.progress / LINE) as usize][0] = SEQUENCE << 40 | call.0 & 0xff_ffff_ffff;
    }
    let bases = workspaces
        .each_mut()
        .map(|memory| memory.as_mut_ptr() as u64);
    let constants = Box::new(CommConst {
        magic: CONST_MAGIC,
        version: LAYOUT_VERSION,
        bytes: size_of::<CommConst>() as u32,
        size: 2,
        team_size: 2,
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
    let never: Option<()> = ctx.until(WaitKind::Ready, 1, 1, || Err(0));
    assert_eq!(never, None);
    // SAFETY: a workspace begins with its state, and nobody else looks at it.
    let record = unsafe { (*(bases[0] as *const CommState)).failure };
    assert_eq!(record.state, 2);
    [FailureKind::Timeout, FailureKind::Mismatch]
        .into_iter()
        .find(|kind| *kind as u64 == record.kind)
        .expect("one of the two")
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
    // Block 0 is still in the transfer before, while this block waits in the collective that the
    // peer is in too.
    let ours = call(Operation::AllReduce, 16);
    for transfer in [Operation::Send, Operation::Recv].map(|operation| call(operation, 16)) {
        assert_eq!(failure_of(transfer, ours), FailureKind::Timeout);
        assert_eq!(failure_of(ours, transfer), FailureKind::Timeout);
    }
}
