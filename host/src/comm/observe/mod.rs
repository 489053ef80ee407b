//! Observation of a communicator's operations: hooks and the flight recorder.

mod call;
pub(crate) mod clock;
mod dump;
mod hooks;
mod log;
mod nan_check;
mod recorder;

pub(super) use self::call::{
    Arguments, Buffers, FusedBuffers, HookResult, HookedCall, function_name,
};
pub(super) use self::dump::{CommDump, path_of_environment};
pub(super) use self::hooks::Hooks;
pub use self::hooks::{HookArguments, HookBuffer, HookHandle, ReplayArguments, ReplayEdge};
pub(super) use self::log::Log;
pub(super) use self::nan_check::check_inputs;
pub(super) use self::recorder::Recorder;
pub use self::recorder::{FlightRecord, RecordState};

use std::sync::Arc;

use fusewire_device::call::Call;

/// Observes the operations of a rank.
pub(super) struct Observer {
    pub(super) hooks: Hooks,
    pub(super) recorder: Arc<Recorder>,
}

/// Description of an operation for the recorder and for hooks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpInfo {
    /// Call word.
    pub(crate) call: u64,
    /// Elements of this rank's input.
    pub(crate) input_count: u64,
    /// Elements of this rank's output.
    pub(crate) output_count: u64,
}

impl OpInfo {
    /// Returns the info of a launch, with the recorder's number `id`.
    pub(crate) const fn launch(&self, id: u64) -> crate::cpu::LaunchInfo {
        [id, self.call, self.input_count, self.output_count]
    }

    pub(crate) const fn call(&self) -> Call {
        Call(self.call)
    }
}
