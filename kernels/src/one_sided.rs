//! One-sided communication from a kernel: put with signal, and waiting for a signal.

use fusewire_device::comm::WindowAddr;
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::net::{self, SignalOp};
use fusewire_device::{Aborted, Group, Machine, PeerPtr, Session, kernel, wait};

/// The next rank or the signal cannot be reached.
pub const UNREACHABLE: u32 = 1;

/// Puts, on every rank, `count` words at `source` into the next rank's memory at `target_at` and
/// raises user signal `signal` there, then waits until the rank before it has done the same.
///
/// The user signal counts up by one each launch; how often is read from `launches`, a word of this
/// rank's memory that the kernel increments, so that a replay waits for the next value and not for
/// an old one.
///
/// User memory: the put is between an entry signal (the target may be written) and an exit signal
/// (it may be reused) of the same launch.
///
/// # Safety
/// `source` must be readable for `count` words; `target_at` must be the same free range of a window
/// on every rank; `launches` must be this rank's own, starting at 0. One block.
#[kernel(failures(UNREACHABLE = "rank {a} cannot be reached, or there is no user signal {b}"))]
pub unsafe fn ring_put(
    session: &mut Session<impl Machine>,
    source: *const u64,
    #[agreed] count: u64,
    target_at: u64,
    signal: u64,
    launches: *mut u64,
) -> Result<(), Aborted> {
    let block = session.block();
    session.barrier()?;
    let comm = *session.comm();
    let next = comm.after(1);
    let previous = comm.after(comm.size() - 1);
    let target = WindowAddr(target_at);
    let is_known = signal < comm.workspace().user_signal_count;
    session.ensure(is_known, UNREACHABLE, u64::from(next), signal)?;
    let signal_offset = comm.workspace().user_signals + signal * 8;
    // SAFETY: the caller's promise; the signal word is a user signal of the workspace.
    let put = unsafe {
        net::put_signal(
            block,
            &comm,
            PeerPtr::new(target.window(), next, target.offset()),
            source,
            count,
            PeerPtr::new(0, next, signal_offset),
            SignalOp::Add(1),
        )
    };
    session.ensure(put.is_ok(), UNREACHABLE, u64::from(next), signal)?;
    // SAFETY: this rank's own word.
    let expected = unsafe { mem::read(launches) } + 1;
    let word = comm.own(signal_offset).cast::<u64>();
    let mut failed = false;
    if block.is_leader() {
        failed = session
            .ctx()
            .until(wait::WaitKind::Signal, previous, expected, || {
                // SAFETY: a user signal of this rank's workspace.
                let seen = unsafe { mem::load_u64(word, Order::Acquire, Scope::System) };
                if seen >= expected { Ok(()) } else { Err(seen) }
            })
            .is_none();
    }
    if block.any(failed) || session.done().is_err() {
        return session.settle(false);
    }
    if block.is_leader() {
        // SAFETY: this rank's own word.
        unsafe { mem::write(launches, expected) };
    }
    Ok(())
}
