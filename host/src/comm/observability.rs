//! Hooks and the flight recorder: methods of a communicator.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use super::observe::{
    CommDump, FlightRecord, HookArguments, HookHandle, Log, ReplayArguments, check_inputs,
};
use super::{Communicator, Inner};
use crate::{Error, Result};

impl Communicator {
    /// Registers `hook` to be called before every operation is issued or captured, and before
    /// `split`, `dup`, `new_window`, `alloc_window` and `finalize`, on the calling thread. An
    /// operation on lists of tensors, or a batch, is one call. The operations by which
    /// `new_window` and other host calls compare their arguments are calls too. No lock is held,
    /// so the hook may call operations, which call hooks again. A panic of the hook unwinds into
    /// the caller of the operation, which then does not run. A hook that captures a clone of the
    /// communicator keeps the communicator alive until the hook is removed; use
    /// [`HookArguments::comm`] instead.
    ///
    /// The hook also applies to communicators that are created from this one by
    /// [`Communicator::split`] or [`Communicator::dup`]. A hook that is registered on such a part
    /// does not apply to this communicator.
    pub fn register_pre_hook(
        &self,
        hook: impl Fn(&HookArguments<'_>) + Send + Sync + 'static,
    ) -> HookHandle {
        let hook = move |arguments: &HookArguments<'_>| {
            hook(arguments);
            Ok(())
        };
        self.inner.observer.hooks.add_before(Arc::new(hook))
    }

    /// Registers `hook` to be called after every call that [`Communicator::register_pre_hook`]
    /// lists: when a blocking operation has ended, when an asynchronous one, which has a
    /// [`crate::Work`], was enqueued, or when an operation was captured. It is also called if the
    /// call has failed.
    pub fn register_post_hook(
        &self,
        hook: impl Fn(&HookArguments<'_>) + Send + Sync + 'static,
    ) -> HookHandle {
        let hook = move |arguments: &HookArguments<'_>| {
            hook(arguments);
            Ok(())
        };
        self.inner.observer.hooks.add_after(Arc::new(hook))
    }

    /// Registers a pre-hook that refuses a call whose input has a NaN with
    /// [`Error::InvalidArgument`], before data moves. The error names the function, the rank, and
    /// the index of the first NaN. The communicator has not failed then, but other ranks wait for
    /// the refused call until their timeout, or until the program calls [`Communicator::abort`].
    ///
    /// The check waits until operations of this process that write the input have ended. An
    /// operation that is captured is checked at its capture only, not at replays. Inputs of user
    /// kernels are not checked. The check does not wait for kernels of other libraries: if one
    /// writes the input, synchronize its stream before the call.
    pub fn register_nan_check(&self) -> HookHandle {
        self.inner.observer.hooks.add_before(Arc::new(check_inputs))
    }

    /// Registers a pre-hook that writes one line per call to `sink`: fields separated by `|`, with
    /// the names of torchcomms' `clog`. The first field is the number of seconds since this call.
    /// Errors of the sink are logged as warnings.
    pub fn register_log(&self, sink: impl Write + Send + 'static) -> HookHandle {
        let log = Log::new(sink);
        self.register_pre_hook(move |arguments| log.write(arguments))
    }

    /// Registers `hook` to be called once when this rank detects that the communicator has failed
    /// or was aborted. On the CPU, an operation that finds the failure ends before the hook is
    /// called, on the same thread, so the hook may use the tensors of the operation. A panic of the
    /// hook is logged; it does not unwind into the call that detected the failure.
    ///
    /// If this rank makes no call, a watchdog thread detects the failure within about 0.2 seconds
    /// and calls the hook. The first abort hook starts the thread, which ends when the communicator
    /// is finalized or dropped.
    pub fn register_abort_hook(&self, hook: impl Fn(&Error) + Send + Sync + 'static) -> HookHandle {
        self.inner.observer.hooks.add_abort(Arc::new(hook))
    }

    /// Registers `hook` to be called around every operation of a graph's replay, on the thread that
    /// replays.
    pub fn register_graph_replay_hook(
        &self,
        hook: impl Fn(&ReplayArguments) + Send + Sync + 'static,
    ) -> HookHandle {
        self.inner.observer.hooks.add_replay(Arc::new(hook))
    }

    /// Returns the last operations of this rank, oldest first: at most
    /// [`crate::Options::flight_recorder_entries`].
    pub fn flight_records(&self) -> Vec<FlightRecord> {
        self.inner.observer.recorder.records()
    }

    /// Returns the number of operations issued so far.
    pub fn operations_issued(&self) -> u64 {
        self.inner.observer.recorder.issued()
    }

    /// Removes the recorded operations.
    pub fn reset_flight_recorder(&self) {
        self.inner.observer.recorder.reset();
    }

    /// Returns the flight record as JSON, in the format (2.10) of PyTorch's flight recorder, with
    /// this rank's view of this communicator. Times are in nanoseconds since 1970, durations in
    /// milliseconds. A failed operation has the state `started` or `scheduled`, because it has not
    /// completed.
    pub fn dump_flight_record(&self) -> String {
        self.inner.part().json()
    }

    /// Returns [`Communicator::dump_flight_record`] with the operations that have not completed:
    /// those that are scheduled, running or failed.
    pub fn dump_active_flight_record(&self) -> String {
        self.inner.part().active_json()
    }

    /// Writes the flight record to `path` for PyTorch's `fr_trace`: a pickle of the content of
    /// [`Communicator::dump_flight_record`]. `fr_trace` reads a folder with one file per rank, each
    /// named by a common prefix and the rank.
    ///
    /// When the communicator fails, every rank writes such a file itself, even if it makes no call,
    /// if the environment names a prefix: `TORCHCOMM_FR_DUMP_TEMP_FILE` (the complete name, with
    /// `TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME=1`), else `TORCH_FR_DUMP_TEMP_FILE`, else
    /// `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`. The rank is that in the communicator which this one was
    /// split from; failed communicators of one process and rank share a file.
    ///
    /// # Errors
    /// [`Error::Communicator`] if the file cannot be written.
    pub fn dump_flight_record_to(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.inner.part().write(path).map_err(|error| {
            self.inner
                .group
                .error(format!("flight record to {}: {error}", path.display()))
        })
    }
}

impl Inner {
    pub(super) fn part(&self) -> CommDump {
        let (backend, version) = match &self.executor.backend {
            Some(backend) => (backend.name().to_owned(), backend.version()),
            None => ("fusewire".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        };
        CommDump {
            name: self.group.full_name.clone(),
            backend,
            version,
            world: self.group.world(),
            rank: self.group.rank,
            timeout_ms: u64::try_from(self.group.timeout(0).as_millis()).unwrap_or(u64::MAX),
            failure: self.status.failure.get().map(ToString::to_string),
            records: self.observer.recorder.records(),
        }
    }

    /// Writes the flight record if the environment names a file.
    pub(super) fn dump_on_failure(&self) {
        match self.part().write_by_environment() {
            Ok(None) => {}
            Ok(Some(path)) => tracing::info!("flight record written to {}", path.display()),
            Err(error) => tracing::warn!(%error, "the flight record could not be written"),
        }
    }
}
