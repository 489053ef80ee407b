//! The context of a launch's waits. Its functions are in [`crate::wait`].

use crate::call::Call;
use crate::comm::Comm;

/// Bounds of one launch's waits.
#[derive(Clone, Copy, Debug)]
pub struct WaitContext {
    pub(crate) comm: Comm,
    pub(crate) call: Call,
    pub(crate) count: u64,
    pub(crate) sequence: u64,
    pub(crate) block: u32,
    /// 0 selects the communicator's timeout.
    pub(crate) timeout_ns: u64,
}
