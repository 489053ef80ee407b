//! Exported functions that the driver does not have, with which tests query and control the fake.
//!
//! They are not counted as calls, and no failure can be injected into them.

use core::ffi::{CStr, c_char};

use crate::core::record;

/// Borrows a C string of the caller; null is the empty string.
///
/// # Safety
/// `text` must be null or a live C string.
unsafe fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: `text` is not null, so that it is a live C string.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("")
}

/// Returns the number of calls of a function since the process started.
///
/// # Safety
/// `name` must be null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeCalls(name: *const c_char) -> u64 {
    // SAFETY: `name` is null or a live C string, as this function requires.
    record::calls(unsafe { text(name) })
}

/// Returns the number of launches of an entry since the process started, captured ones included.
///
/// A leading `*` matches all entries that end with the rest of `name`: `*__grid` matches grid
/// forms, `*` matches all.
///
/// # Safety
/// `name` must be null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLaunchCount(name: *const c_char) -> u64 {
    // SAFETY: `name` is null or a live C string, as this function requires.
    record::launch_count(unsafe { text(name) })
}

/// Returns the number of live objects of a kind, or `u64::MAX` for an unknown kind.
///
/// Kinds are `context`, `stream`, `event`, `module`, `graph`, `exec`, `user_object`, `allocation`
/// (of `cuMemCreate`), `multicast`, `binding` (of memory to a multicast object), `reservation`,
/// `mapping`, `block` (of `cuMemAlloc`), `ipc`, `host`, `registered`, and `all` for all except
/// contexts.
///
/// # Safety
/// `kind` must be null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLive(kind: *const c_char) -> u64 {
    // SAFETY: `kind` is null or a live C string, as this function requires.
    let kind = unsafe { text(kind) };
    let live = record::live();
    if kind == "all" {
        let others = live.iter().filter(|(kind, _)| *kind != "context");
        return others.map(|(_, count)| count).sum();
    }
    let found = live.iter().find(|(name, _)| *name == kind);
    found.map_or(u64::MAX, |(_, count)| *count)
}

/// Makes the `nth` call of a function from now on (1 for the next) return `code` without effect,
/// once.
///
/// # Safety
/// `name` must be null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeFail(name: *const c_char, nth: u64, code: u32) {
    // SAFETY: `name` is null or a live C string, as this function requires.
    record::fail(unsafe { text(name) }, nth, code);
}

/// Writes calls and live objects into `buffer` as JSON with a terminating zero byte, truncated to
/// `bytes`. Returns the untruncated length without the zero byte.
///
/// # Safety
/// `buffer` must be null or have `bytes` writable bytes.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeReport(buffer: *mut c_char, bytes: usize) -> usize {
    let report = record::report();
    // SAFETY: `write_text` has the same requirement on `buffer` as this function.
    unsafe { super::device::write_text(buffer, bytes, &report) };
    report.len()
}

/// Writes the last launches of a kernel, oldest first, into `buffer` as a JSON list with a
/// terminating zero byte, truncated to `bytes`. Returns the untruncated length without the zero
/// byte.
///
/// An element is `{"grid": [x, y, z], "block": [x, y, z], "shared_bytes": .., "attributes":
/// [[number in cuda.h, words of the value ..] ..], "captured": .., "code": result of the call}`.
/// The fake keeps the last 256 launches of all kernels together, rejected ones included.
///
/// # Safety
/// `kernel` must be null or a live C string, and `buffer` null or have `bytes` writable bytes.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLaunches(
    kernel: *const c_char,
    buffer: *mut c_char,
    bytes: usize,
) -> usize {
    // SAFETY: `kernel` is null or a live C string, as this function requires.
    let launches = record::launches(unsafe { text(kernel) });
    // SAFETY: `write_text` has the same requirement on `buffer` as this function.
    unsafe { super::device::write_text(buffer, bytes, &launches) };
    launches.len()
}
