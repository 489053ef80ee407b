//! barrier: no rank leaves before every rank has entered.

use fusewire_device::{Aborted, Machine, Session, kernel};

/// Blocks until every rank has entered the barrier.
#[kernel]
pub fn barrier(session: &mut Session<impl Machine>) -> Result<(), Aborted> {
    session.barrier()
}
