//! Handles: pointers to boxed values, which C code holds.

use core::ffi::c_int;

use crate::error::{Outcome, argument, guard};

/// Returns the value of a handle, or an error if it is null. `what` begins the message, such as
/// "the work is".
///
/// # Safety
/// `handle` is null, or came from `Box::into_raw` and lives as long as the result is used.
pub(crate) unsafe fn live<'a, T>(operation: &str, what: &str, handle: *const T) -> Outcome<&'a T> {
    // SAFETY: `handle` is null or points to a live value, by the precondition.
    unsafe { handle.as_ref() }.ok_or_else(|| argument(operation, format!("{what} NULL")))
}

/// Destroys a handle. Null is allowed.
///
/// # Safety
/// `handle` is null, or came from `Box::into_raw` and is not used any more.
pub(crate) unsafe fn destroy<T>(handle: *mut T) -> c_int {
    guard(|| {
        if !handle.is_null() {
            // SAFETY: the handle came from `Box::into_raw`, and nothing uses it any more, so it is
            // freed only once.
            drop(unsafe { Box::from_raw(handle) });
        }
        Ok(())
    })
}
