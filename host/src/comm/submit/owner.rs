//! Communicators as owners of their launches, which admit each launch and handle its end.

use core::mem::offset_of;
use core::panic::AssertUnwindSafe;
use std::panic;

use fusewire_device::call::{Call, Operation};
use fusewire_device::layout::{CommState, FailureKind};

use crate::comm::Inner;
use crate::comm::observe::{OpInfo, ReplayArguments, ReplayEdge};
use crate::cpu::{LaunchInfo, LaunchOwner, Replay, current_replay, message};
use crate::{Error, Result};

/// Most significant bit of the value that [`LaunchOwner::before`] returns: the entry belongs to a
/// replay.
const REPLAYED: u64 = 1 << 63;

impl LaunchOwner for Inner {
    fn before(&self, op_info: &LaunchInfo) -> Result<u64> {
        let [issued, call, input_count, output_count] = *op_info;
        let op_info = OpInfo {
            call,
            input_count,
            output_count,
        };
        if let Err(error) = self.check() {
            self.observer.recorder.end(issued, false);
            return Err(error);
        }
        let Some(replay) = current_replay() else {
            self.observer.recorder.start(issued);
            return Ok(issued);
        };
        let id = self.observer.recorder.issue(&op_info, true);
        self.observer.recorder.start_at_once(id);
        self.call_replay_hooks(&replay_arguments(replay, &op_info, ReplayEdge::Start))
            .inspect_err(|_| self.observer.recorder.end(id, false))?;
        Ok(id | REPLAYED)
    }

    fn after(&self, word: u64, op_info: &LaunchInfo, ran: bool) -> Result<()> {
        if !ran && self.executor.backend.is_none() {
            // Fails the other ranks now, which would otherwise wait for this rank until their
            // timeout.
            self.abort_for(FailureKind::Stopped);
        }
        if ran && Call(op_info[1]).operation() == Operation::User && self.has_arrivals() {
            self.abort_for(FailureKind::LastBlock);
        }
        let checked = self.check_launch();
        self.observer
            .recorder
            .end(word & !REPLAYED, ran && checked.is_ok());
        if word & REPLAYED != 0
            && self.observer.hooks.has_replay_hooks()
            && let Some(replay) = current_replay()
        {
            let [_, call, input_count, output_count] = *op_info;
            let op_info = OpInfo {
                call,
                input_count,
                output_count,
            };
            let end = replay_arguments(replay, &op_info, ReplayEdge::End);
            return self.call_replay_hooks(&end).and(checked);
        }
        checked
    }
}

impl Inner {
    /// Calls the hooks of replays. If a hook panics, fails the communicator on all ranks, because
    /// the peers would wait for the rest of the replay until their timeout.
    fn call_replay_hooks(&self, arguments: &ReplayArguments) -> Result<()> {
        if !self.observer.hooks.has_replay_hooks() {
            return Ok(());
        }
        let called =
            panic::catch_unwind(AssertUnwindSafe(|| self.observer.hooks.replay(arguments)));
        called.map_err(|panic| {
            self.abort_for(FailureKind::Stopped);
            Error::launch(format!(
                "a hook of a graph replay panicked: {}",
                message(&*panic)
            ))
        })
    }

    /// Returns true if the blocks of a completed launch on the CPU have made different numbers of
    /// calls of `last_block`.
    fn has_arrivals(&self) -> bool {
        let first = offset_of!(CommState, arrived) as u64;
        self.executor.on_gpu.is_none()
            && self.executor.backend.is_none()
            && self.executor.abort_word() == 0
            && (0..4).any(|word| self.executor.workspace.load(first + 8 * word) != 0)
    }
}

fn replay_arguments(replay: Replay, op_info: &OpInfo, edge: ReplayEdge) -> ReplayArguments {
    ReplayArguments {
        graph_id: replay.graph,
        replay_id: replay.replay,
        index: replay.index,
        operation: op_info.call().operation(),
        edge,
    }
}
