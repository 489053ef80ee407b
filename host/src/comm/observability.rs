//! Hooks and the flight recorder, as users of a communicator see them.

use std::path::Path;
use std::sync::Arc;

use super::observe::{CommDump, FlightRecord, HookArguments, HookHandle, ReplayArguments};
use super::{Communicator, Inner};
use crate::{Error, Result};

impl Communicator {
    /// Has `hook` called before every operation is issued, on the thread that issues it.
    /// Communicators made from this one by [`Communicator::split`] or [`Communicator::dup`] have
    /// the same hooks.
    pub fn register_pre_hook(
        &self,
        hook: impl Fn(&HookArguments<'_>) + Send + Sync + 'static,
    ) -> HookHandle {
        self.inner.hooks.add_before(Arc::new(hook))
    }

    /// Has `hook` called after every operation: a blocking one has ended then, an enqueued one has
    /// a [`crate::Work`].
    pub fn register_post_hook(
        &self,
        hook: impl Fn(&HookArguments<'_>) + Send + Sync + 'static,
    ) -> HookHandle {
        self.inner.hooks.add_after(Arc::new(hook))
    }

    /// Has `hook` called once when this rank learns that the communicator has failed or was
    /// aborted.
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

    /// The last operations of this rank ([`crate::Options::flight_recorder_entries`] of them),
    /// oldest first.
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

    /// The flight record as JSON, in the format (2.10) of PyTorch's flight recorder, with this
    /// rank's view of this communicator. Times are in nanoseconds since 1970, durations in
    /// milliseconds; an operation that failed is in state `started` or `scheduled`, as it has not
    /// completed.
    pub fn dump_flight_record(&self) -> String {
        self.inner.part().json()
    }

    /// Writes the flight record to `path` as PyTorch's `fr_trace` reads it: a pickle of what
    /// [`Communicator::dump_flight_record`] gives. `fr_trace` takes a folder with one file per
    /// rank, named by a common prefix and the rank.
    ///
    /// When the communicator fails, every rank that learns of it writes such a file by itself, if
    /// the environment names a prefix: `TORCHCOMM_FR_DUMP_TEMP_FILE` (the whole name, with
    /// `TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME=1`), else `TORCH_FR_DUMP_TEMP_FILE`, else
    /// `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`. The rank is that of the communicator which this one was
    /// split from; failed communicators of one process and rank share a file.
    ///
    /// # Errors
    /// [`Error::Communicator`] when the file cannot be written.
    pub fn dump_flight_record_to(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.inner
            .part()
            .write(path)
            .map_err(|error| Error::Communicator {
                name: self.inner.name.clone(),
                detail: format!("flight record to {}: {error}", path.display()),
            })
    }
}

impl Inner {
    /// The ranks of this communicator, as ranks of the one that it comes from.
    pub(super) fn world(&self) -> Vec<u32> {
        self.world
            .get()
            .cloned()
            .unwrap_or_else(|| (0..self.size).collect())
    }

    pub(super) fn part(&self) -> CommDump {
        let (backend, version) = match &self.backend {
            Some(backend) => (backend.name().to_owned(), backend.version()),
            None => ("fusewire".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        };
        CommDump {
            name: self.name.clone(),
            backend,
            version,
            world: self.world(),
            rank: self.rank,
            timeout_ms: u64::try_from(self.options.timeout.as_millis()).unwrap_or(u64::MAX),
            failure: self.failure.get().map(ToString::to_string),
            records: self.recorder.records(),
        }
    }

    /// Writes the flight record where the environment asks for it.
    pub(super) fn dump_on_failure(&self) {
        match self.part().write_by_environment() {
            Ok(None) => {}
            Ok(Some(path)) => tracing::info!("flight record written to {}", path.display()),
            Err(error) => tracing::warn!(%error, "the flight record could not be written"),
        }
    }
}
