//! Calls that a thread makes after it has ended its accesses to tensors and the work of a stream.
//!
//! Hooks of failures are such calls: a hook may wait for other operations, which may wait for what
//! the thread holds.

use core::cell::RefCell;
use core::panic::AssertUnwindSafe;
use std::collections::VecDeque;
use std::panic;

type Call = Box<dyn FnOnce()>;

thread_local!(static CALLS: RefCell<VecDeque<Call>> = const { RefCell::new(VecDeque::new()) });

/// Makes `call` at the next [`run`] of this thread.
pub(crate) fn push(call: impl FnOnce() + 'static) {
    CALLS.with_borrow_mut(|calls| calls.push_back(Box::new(call)));
}

/// Returns true if a call is due.
#[inline]
pub(crate) fn is_due() -> bool {
    CALLS.with_borrow(|calls| !calls.is_empty())
}

/// Makes the calls that are due. The thread must hold no access.
pub(crate) fn run() {
    while let Some(call) = CALLS.with_borrow_mut(VecDeque::pop_front) {
        // The panic hook has reported it, and the other calls are of other communicators.
        let _ = panic::catch_unwind(AssertUnwindSafe(call));
    }
}
