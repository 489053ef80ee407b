//! barrier: no rank leaves before every rank has entered.

use fusewire_device::layout::CommConst;
use fusewire_device::session::Session;
use fusewire_device::{Block, Machine, kernel};

/// Waits for every rank.
///
/// # Safety
/// `constants` as for [`Session::begin`].
#[kernel]
pub unsafe fn barrier(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    timeout_ns: u64,
) {
    // SAFETY: the caller's promise.
    let Some(mut session) = (unsafe { Session::begin(block, constants, call, 0, timeout_ns) })
    else {
        return;
    };
    if session.ready(|_| [0; 7]) {
        session.end();
    }
}
