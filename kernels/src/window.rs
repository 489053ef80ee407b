//! Put, get, signal and wait on a window, as the host enqueues them.

use fusewire_device::layout::{CommConst, FailureKind};
use fusewire_device::net::SignalOp;
use fusewire_device::session::{Call, Session};
use fusewire_device::wait::WaitKind;
use fusewire_device::window::{Compare, DeviceWindow};
use fusewire_device::{Block, Group, Machine, kernel, mem};

/// No signal, no sender.
pub const NONE: u64 = u64::MAX;

/// Puts `bytes` bytes at `source` to byte `offset` of the peer's part, then raises signal `signal`
/// there if it is not [`NONE`].
///
/// # Safety
/// `constants` as for [`Session::begin`]; `window` belongs to it; `source` readable for `bytes`
/// bytes; the range at the peer free to be written.
#[kernel]
pub unsafe fn window_put(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    bytes: u64,
    timeout_ns: u64,
    window: *const DeviceWindow,
    source: *const u8,
    offset: u64,
    signal: u64,
) {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { Session::begin(block, constants, call, bytes, timeout_ns) })
    else {
        return;
    };
    if block.index() == 0 {
        // SAFETY: the caller's promise.
        let window = unsafe { mem::read(window) };
        let comm = session.comm();
        let peer = Call(call).root();
        let signal = if signal == NONE {
            None
        } else {
            Some(signal as u32)
        };
        // SAFETY: the caller's promise.
        let put = unsafe { window.put(block, comm, offset, source, bytes, peer, signal, None) };
        if put.is_err() {
            refuse(&session, peer, bytes, offset);
            return;
        }
        // Whoever learns of the end of this launch by other means than the signal sees the data
        // too.
        mem::fence(mem::Order::Release, mem::Scope::System);
        block.sync();
    }
    session.end();
}

/// Gets `bytes` bytes from byte `offset` of the peer's part to `target`.
///
/// # Safety
/// As [`window_put`]; `target` writable for `bytes` bytes.
#[kernel]
pub unsafe fn window_get(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    bytes: u64,
    timeout_ns: u64,
    window: *const DeviceWindow,
    target: *mut u8,
    offset: u64,
) {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { Session::begin(block, constants, call, bytes, timeout_ns) })
    else {
        return;
    };
    if block.index() == 0 {
        // SAFETY: the caller's promise.
        let window = unsafe { mem::read(window) };
        let comm = session.comm();
        let peer = Call(call).root();
        mem::fence(mem::Order::Acquire, mem::Scope::System);
        // SAFETY: the caller's promise.
        let got = unsafe { window.get(block, comm, target, offset, bytes, peer) };
        if got.is_err() {
            refuse(&session, peer, bytes, offset);
            return;
        }
        block.sync();
    }
    session.end();
}

/// Changes this rank's slot of signal `signal` at the peer: sets it to `value`, or adds `value`
/// where `add` is 1.
///
/// # Safety
/// As [`window_put`].
#[kernel]
pub unsafe fn window_signal(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    signal: u64,
    timeout_ns: u64,
    window: *const DeviceWindow,
    value: u64,
    add: u32,
) {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { Session::begin(block, constants, call, signal, timeout_ns) })
    else {
        return;
    };
    if block.index() == 0 {
        // SAFETY: the caller's promise.
        let window = unsafe { mem::read(window) };
        let peer = Call(call).root();
        let op = if add == 1 {
            SignalOp::Add(value)
        } else {
            SignalOp::Set(value)
        };
        // SAFETY: the caller's promise.
        let signalled = unsafe { window.signal(block, session.comm(), peer, signal as u32, op) };
        if signalled.is_err() {
            refuse(&session, peer, signal, 0);
            return;
        }
    }
    session.end();
}

/// Waits until signal `signal` of this rank, of the rank `sender` or (with [`NONE`]) summed over
/// all senders, compares with `value` as `compare` says.
///
/// # Safety
/// As [`window_put`].
#[kernel]
pub unsafe fn window_wait(
    block: Block<impl Machine>,
    constants: *const CommConst,
    call: u64,
    signal: u64,
    timeout_ns: u64,
    window: *const DeviceWindow,
    sender: u64,
    value: u64,
    compare: u32,
) {
    // SAFETY: the caller's promise.
    let Some(session) = (unsafe { Session::begin(block, constants, call, signal, timeout_ns) })
    else {
        return;
    };
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
        if !window.wait_signal(block, &ctx, &comm, signal as u32, sender, compare, value) {
            return;
        }
    }
    session.end();
}

/// Records that the peer cannot be reached, or the range leaves the window.
#[inline(always)]
fn refuse<M: Machine>(session: &Session<M>, peer: u32, bytes: u64, offset: u64) {
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
}
