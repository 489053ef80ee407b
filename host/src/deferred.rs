//! Calls that a thread makes after it has ended its accesses to tensors and the work of a stream.
//!
//! Hooks of failures are such calls: a hook may wait for other operations, which may wait for what
//! the thread holds.

use core::cell::RefCell;

type Call = Box<dyn FnOnce()>;

thread_local!(static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) });

/// Makes `call` at the next [`run`] of this thread.
pub(crate) fn push(call: impl FnOnce() + 'static) {
    CALLS.with_borrow_mut(|calls| calls.push(Box::new(call)));
}

/// Makes the calls that are due. The thread must hold no access, and execute no work of a stream.
#[cold]
pub(crate) fn run() {
    loop {
        let calls = CALLS.take();
        if calls.is_empty() {
            return;
        }
        calls.into_iter().for_each(|call| call());
    }
}
