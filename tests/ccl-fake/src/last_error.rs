//! The text of the last error of each thread.

use core::cell::RefCell;
use core::ffi::c_char;
use std::ffi::CString;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Sets the text that `ncclGetLastError` returns on this thread.
pub(crate) fn set(text: &str) {
    LAST.set(CString::new(text).unwrap_or_default());
}

/// Returns the error text of this thread. The pointer is valid until the next error of the thread.
pub(crate) fn get() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}
