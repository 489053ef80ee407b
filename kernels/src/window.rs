//! Put, get, signal and wait on a window, for the host to enqueue. The root of the call is the
//! peer. Only block 0 does any work.

use fusewire_device::net::SignalOp;
use fusewire_device::session::Session;
use fusewire_device::window::Compare;
use fusewire_device::{Aborted, Group, In, Machine, Out, Team, Window, kernel, mem};

/// Argument for no signal or no sender.
pub const NONE: u64 = u64::MAX;

/// Comparison that waits for one more raise than the waits before it, by [`Window::wait`] or
/// [`Window::wait_all`]. The other values are those of [`Compare`].
pub const RAISED: u32 = u32::MAX;

/// Failure code: the rank does not exist.
pub const PEER: u32 = 1;

/// Puts `source` to byte `offset` of the peer's part, then adds 1 to signal `signal` there if it is
/// not [`NONE`].
#[kernel(failures(PEER = "there is no rank {a}"))]
pub fn window_put(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    source: In<u8>,
    offset: u64,
    signal: u64,
) -> Result<(), Aborted> {
    let (block, rank) = (s.block(), s.call().root());
    if block.index() != 0 {
        return Ok(());
    }
    let Some(peer) = s.peer(rank) else {
        return s.ensure(false, PEER, u64::from(rank), 0);
    };
    let target = window.at(peer).slice(offset as usize, source.len());
    target.write(s, block, source);
    if signal != NONE {
        target.signal(s, signal as u32, SignalOp::Add(1));
    }
    // Publishes the data also to ranks that observe the end of this launch without the signal.
    mem::fence(mem::Order::Release, mem::Scope::System);
    block.sync();
    Ok(())
}

/// Gets `target.len()` bytes from byte `offset` of the peer's part.
#[kernel(failures(PEER = "there is no rank {a}"))]
pub fn window_get(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    target: Out<u8>,
    offset: u64,
) -> Result<(), Aborted> {
    let (block, rank) = (s.block(), s.call().root());
    if block.index() != 0 {
        return Ok(());
    }
    let Some(peer) = s.peer(rank) else {
        return s.ensure(false, PEER, u64::from(rank), 0);
    };
    mem::fence(mem::Order::Acquire, mem::Scope::System);
    let source = window.at(peer).slice(offset as usize, target.len());
    source.read(s, target)
}

/// Changes this rank's part of signal `signal` at the peer: sets it to `value`, or adds `value` if
/// `add` is 1.
#[kernel(failures(PEER = "there is no rank {a}"))]
pub fn window_signal(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    signal: u64,
    value: u64,
    add: u32,
) -> Result<(), Aborted> {
    let rank = s.call().root();
    if s.block().index() != 0 {
        return Ok(());
    }
    let Some(peer) = s.peer(rank) else {
        return s.ensure(false, PEER, u64::from(rank), 0);
    };
    let op = match add {
        1 => SignalOp::Add(value),
        _ => SignalOp::Set(value),
    };
    window.at(peer).signal(s, signal as u32, op);
    Ok(())
}

/// Waits until the value of this rank's signal `signal`, from rank `sender` or (with [`NONE`])
/// summed over all senders, meets the condition `compare` with `value`. With [`RAISED`], waits
/// until `sender`, or every rank, has raised the signal once more, and ignores `value`.
#[kernel]
pub fn window_wait(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    signal: u64,
    sender: u64,
    value: u64,
    compare: u32,
) -> Result<(), Aborted> {
    if s.block().index() != 0 {
        return Ok(());
    }
    let sender = s.peer(sender as u32).filter(|_| sender != NONE);
    if compare == RAISED {
        match sender {
            Some(sender) => window.wait(s, signal as u32, sender)?,
            None => window.wait_all(s, signal as u32, Team::World)?,
        };
        return Ok(());
    }
    let compare = Compare::from_code(compare);
    window.wait_value(s, signal as u32, sender, compare, value)?;
    Ok(())
}
