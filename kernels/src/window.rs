//! Put, get, signal and wait on a window, as the host enqueues them.

use fusewire_device::layout::FailureKind;
use fusewire_device::net::SignalOp;
use fusewire_device::session::Session;
use fusewire_device::wait::WaitKind;
use fusewire_device::window::{Compare, DeviceWindow};
use fusewire_device::{Aborted, Group, Machine, kernel, mem};

/// No signal, no sender.
pub const NONE: u64 = u64::MAX;

/// Puts `bytes` bytes at `source` to byte `offset` of the peer's part, then raises signal `signal`
/// there if it is not [`NONE`].
///
/// # Safety
/// `window` belongs to the communicator; `source` readable for `bytes`
/// bytes; the range at the peer free to be written.
#[kernel]
pub unsafe fn window_put(
    session: &mut Session<impl Machine>,
    window: *const DeviceWindow,
    source: *const u8,
    offset: u64,
    signal: u64,
) -> Result<(), Aborted> {
    let (block, bytes) = (session.block(), session.count());
    if block.index() == 0 {
        // SAFETY: the caller's promise.
        let window = unsafe { mem::read(window) };
        let comm = session.comm();
        let peer = session.call().root();
        let signal = if signal == NONE {
            None
        } else {
            Some(signal as u32)
        };
        // SAFETY: the caller's promise.
        let put = unsafe { window.put(block, comm, offset, source, bytes, peer, signal, None) };
        if put.is_err() {
            return refuse(session, peer, bytes, offset);
        }
        // Whoever learns of the end of this launch by other means than the signal sees the data
        // too.
        mem::fence(mem::Order::Release, mem::Scope::System);
        block.sync();
    }
    Ok(())
}

/// Gets `bytes` bytes from byte `offset` of the peer's part to `target`.
///
/// # Safety
/// As [`window_put`]; `target` writable for `bytes` bytes.
#[kernel]
pub unsafe fn window_get(
    session: &mut Session<impl Machine>,
    window: *const DeviceWindow,
    target: *mut u8,
    offset: u64,
) -> Result<(), Aborted> {
    let (block, bytes) = (session.block(), session.count());
    if block.index() == 0 {
        // SAFETY: the caller's promise.
        let window = unsafe { mem::read(window) };
        let comm = session.comm();
        let peer = session.call().root();
        mem::fence(mem::Order::Acquire, mem::Scope::System);
        // SAFETY: the caller's promise.
        let got = unsafe { window.get(block, comm, target, offset, bytes, peer) };
        if got.is_err() {
            return refuse(session, peer, bytes, offset);
        }
        block.sync();
    }
    Ok(())
}

/// Changes this rank's slot of signal `signal` at the peer: sets it to `value`, or adds `value`
/// where `add` is 1.
///
/// # Safety
/// As [`window_put`].
#[kernel]
pub unsafe fn window_signal(
    session: &mut Session<impl Machine>,
    signal: u64,
    window: *const DeviceWindow,
    value: u64,
    add: u32,
) -> Result<(), Aborted> {
    let block = session.block();
    if block.index() == 0 {
        // SAFETY: the caller's promise.
        let window = unsafe { mem::read(window) };
        let peer = session.call().root();
        let op = if add == 1 {
            SignalOp::Add(value)
        } else {
            SignalOp::Set(value)
        };
        // SAFETY: the caller's promise.
        let signalled = unsafe { window.signal(block, session.comm(), peer, signal as u32, op) };
        if signalled.is_err() {
            return refuse(session, peer, signal, 0);
        }
    }
    Ok(())
}

/// Waits until signal `signal` of this rank, of the rank `sender` or (with [`NONE`]) summed over
/// all senders, compares with `value` as `compare` says.
///
/// # Safety
/// As [`window_put`].
#[kernel]
pub unsafe fn window_wait(
    session: &mut Session<impl Machine>,
    signal: u64,
    window: *const DeviceWindow,
    sender: u64,
    value: u64,
    compare: u32,
) -> Result<(), Aborted> {
    let block = session.block();
    if block.index() == 0 {
        // SAFETY: the caller's promise.
        let window = unsafe { mem::read(window) };
        let sender = if sender == NONE {
            None
        } else {
            Some(sender as u32)
        };
        let compare = Compare::from_code(compare);
        let (comm, ctx) = (*session.comm(), *session.ctx());
        let arrived = window.wait_signal(block, &ctx, &comm, signal as u32, sender, compare, value);
        session.settle(arrived)?;
    }
    Ok(())
}

/// Records that the peer cannot be reached, or the range leaves the window.
#[inline(always)]
fn refuse<M: Machine>(
    session: &Session<M>,
    peer: u32,
    bytes: u64,
    offset: u64,
) -> Result<(), Aborted> {
    if session.block().is_leader() {
        session.ctx().fail(
            FailureKind::Bounds,
            WaitKind::Signal,
            peer,
            peer,
            bytes,
            offset,
            0,
        );
    }
    session.settle(false)
}
