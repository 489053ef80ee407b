//! Put, get and signal to any rank.
//!
//! Ranks that are reachable by load and store are served by stores. The others need a network
//! context ([`crate::layout::CommConst::contexts`]); none exists yet, so they give [`NoRoute`].
//!
//! What is promised is what the weakest path keeps: a signal covers the puts before it to that
//! peer on that context; [`flush`] means that sources may be reused.

use crate::bulk;
use crate::comm::{Comm, PeerPtr};
use crate::group::{Block, Group, Machine};
use crate::mem::{self, Order, Policy, Scope};

/// The rank is not reachable by load and store and there is no network context, or the range
/// leaves its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoute;

/// Update of a word by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalOp {
    /// Stores the value.
    Set(u64),
    /// Adds the value, wrapping.
    Add(u64),
}

/// Writes `count` elements at `from` to `to`. All lanes together.
///
/// # Safety
/// `from` must be readable; the range at the peer must be free to be written.
#[inline(always)]
pub unsafe fn put<M: Machine, T: Copy>(
    block: Block<M>,
    comm: &Comm,
    to: PeerPtr<T>,
    from: *const T,
    count: u64,
) -> Result<(), NoRoute> {
    let target = comm.pointer(to, count).ok_or(NoRoute)?;
    let bytes = count as usize * size_of::<T>();
    // SAFETY: the caller's promise; the target was checked against its window.
    unsafe { bulk::copy(block, target.cast(), from.cast(), bytes, Policy::Cached) };
    Ok(())
}

/// Writes one value of 4 or 8 bytes, by one lane.
///
/// # Safety
/// The target at the peer must be free to be written.
#[inline(always)]
pub unsafe fn put_value<T: Copy>(comm: &Comm, to: PeerPtr<T>, value: T) -> Result<(), NoRoute> {
    let target = comm.pointer(to, 1).ok_or(NoRoute)?;
    // SAFETY: the caller's promise; the target was checked against its window.
    unsafe { mem::write(target, value) };
    Ok(())
}

/// Writes `count` elements, then signals `signal` once all of them are visible. All lanes together.
///
/// # Safety
/// As [`put`]; `signal` must be an aligned word that is only accessed as a signal.
#[inline(always)]
#[track_caller]
pub unsafe fn put_signal<M: Machine, T: Copy>(
    block: Block<M>,
    comm: &Comm,
    to: PeerPtr<T>,
    from: *const T,
    count: u64,
    at: PeerPtr<u64>,
    op: SignalOp,
) -> Result<(), NoRoute> {
    // SAFETY: the caller's promise.
    unsafe {
        put(block, comm, to, from, count)?;
        signal(block, comm, at, op)
    }
}

/// Reads `count` elements of a peer. All lanes together.
///
/// # Safety
/// `to` must be writable; the range at the peer must not be written meanwhile.
#[inline(always)]
pub unsafe fn get<M: Machine, T: Copy>(
    block: Block<M>,
    comm: &Comm,
    to: *mut T,
    from: PeerPtr<T>,
    count: u64,
) -> Result<(), NoRoute> {
    let source = comm.pointer(from, count).ok_or(NoRoute)?;
    let bytes = count as usize * size_of::<T>();
    // SAFETY: the caller's promise; the source was checked against its window.
    unsafe { bulk::copy(block, to.cast(), source.cast(), bytes, Policy::Cached) };
    Ok(())
}

/// Signals a peer: everything that this block has put to it before is visible to whoever acquires
/// the new value. All lanes together; one lane stores.
///
/// # Safety
/// `at` must be an aligned word that is only accessed as a signal.
#[inline(always)]
#[track_caller]
pub unsafe fn signal<M: Machine>(
    block: Block<M>,
    comm: &Comm,
    at: PeerPtr<u64>,
    op: SignalOp,
) -> Result<(), NoRoute> {
    let word = comm.pointer(at, 1).ok_or(NoRoute)?;
    block.publish(Scope::System);
    if block.is_leader() {
        // SAFETY: the caller's promise; the word was checked against its window.
        unsafe {
            match op {
                SignalOp::Set(value) => mem::store_u64(word, value, Order::Release, Scope::System),
                SignalOp::Add(value) => {
                    mem::fetch_add_u64(word, value, Order::Release, Scope::System);
                }
            }
        }
    }
    Ok(())
}

/// Waits until the sources of all puts of this block may be reused. Stores have read them when
/// they return, so this is a barrier of the block.
#[inline(always)]
#[track_caller]
pub fn flush<M: Machine>(block: Block<M>) {
    block.sync();
}
