//! One-sided communication from a kernel: put with signal, and waiting for a signal.

use fusewire_device::{Aborted, In, Machine, Session, Team, Window, kernel};

/// Puts `source` to the beginning of the next rank's part of `window`, and waits for the put of the
/// previous rank.
///
/// The put follows the entry barrier of the launch (the target may be written) and precedes its
/// exit barrier (the target may be reused). Uses signal 0.
#[kernel(blocks = 1, signals = 1)]
pub fn ring_put(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    #[agreed] source: In<u64>,
) -> Result<(), Aborted> {
    s.barrier()?;
    for next in s.peers(Team::World).take(1) {
        window.at(next).write(s, s.block(), source).raise(s, 0);
    }
    let before = s.rank().checked_sub(1).unwrap_or(s.ranks() - 1);
    if let Some(before) = s.peer(before) {
        window.wait(s, 0, before)?;
    }
    s.done()
}
