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

/// Makes `call` at the next [`run`] of this thread, or now if the thread is ending.
pub(crate) fn push(call: impl FnOnce() + 'static) {
    let mut call: Option<Call> = Some(Box::new(call));
    let pushed = CALLS.try_with(|calls| calls.borrow_mut().extend(call.take()));
    if let (Err(_), Some(call)) = (pushed, call) {
        call();
    }
}

/// Returns true if a call is due.
#[inline]
pub(crate) fn is_due() -> bool {
    let is_due = CALLS.try_with(|calls| !calls.borrow().is_empty());
    is_due.unwrap_or(false)
}

/// Makes the calls that are due. The thread must hold no access.
pub(crate) fn run() {
    let next = || CALLS.try_with(|calls| calls.borrow_mut().pop_front());
    while let Ok(Some(call)) = next() {
        // The panic hook has reported it, and the other calls are of other communicators.
        let _ = panic::catch_unwind(AssertUnwindSafe(call));
    }
}
