//! Functions that no driver has: how tests query and control the fake.
//!
//! They are counted nowhere and never fail by command.

use core::ffi::{CStr, c_char};

use crate::core::record;

/// A C string of the caller.
///
/// # Safety
/// Null, or a live C string.
unsafe fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("")
}

/// How often a function was called since the process began.
///
/// # Safety
/// `name` is null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeCalls(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    record::calls(unsafe { text(name) })
}

/// How often entries of images were launched, or captured, since the process began: those of that name, or with a leading
/// `*` those whose names end so (`*__grid`: the grid forms; `*`: all).
///
/// # Safety
/// `name` is null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLaunchCount(name: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    record::launch_count(unsafe { text(name) })
}

/// How many objects of a kind live: `context`, `stream`, `event`, `module`, `graph`, `exec`, `user_object`,
/// `allocation` (of `cuMemCreate`), `multicast`, `binding` (of memory to a multicast object), `reservation`, `mapping`, `block` (of `cuMemAlloc`), `ipc`, `host`, `registered`;
/// or of all kinds but contexts (`all`). Of an unknown kind: the greatest number.
///
/// # Safety
/// `kind` is null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLive(kind: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    let kind = unsafe { text(kind) };
    let live = record::live();
    if kind == "all" {
        let others = live.iter().filter(|(kind, _)| *kind != "context");
        return others.map(|(_, count)| count).sum();
    }
    let found = live.iter().find(|(name, _)| *name == kind);
    found.map_or(u64::MAX, |(_, count)| *count)
}

/// Has the `nth` call of a function from now on (1 for the next) answer `code`, once, and do nothing.
///
/// # Safety
/// `name` is null or a live C string.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeFail(name: *const c_char, nth: u64, code: u32) {
    // SAFETY: the caller's promise.
    record::fail(unsafe { text(name) }, nth, code);
}

/// Writes calls and live objects as JSON with its zero byte into `buffer`, as far as it has room; gives the length
/// without the zero byte.
///
/// # Safety
/// `bytes` bytes at `buffer` are writable.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeReport(buffer: *mut c_char, bytes: usize) -> usize {
    let report = record::report();
    // SAFETY: the caller's promise.
    unsafe { super::device::write_text(buffer, bytes, &report) };
    report.len()
}

/// Writes the last launches of a kernel, the oldest first, as a JSON list with its zero byte into `buffer`, as far as it has
/// room; gives the length without the zero byte. An element: `{"grid": [x, y, z], "block": [x, y, z], "shared_bytes": ..,
/// "attributes": [[number in cuda.h, words of the value ..] ..], "captured": .., "code": what the call answered}`. 256 launches
/// of all kernels together are remembered, refused ones too.
///
/// # Safety
/// `kernel` is null or a live C string; `bytes` bytes at `buffer` are writable.
#[unsafe(no_mangle)]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLaunches(
    kernel: *const c_char,
    buffer: *mut c_char,
    bytes: usize,
) -> usize {
    // SAFETY: the caller's promise.
    let launches = record::launches(unsafe { text(kernel) });
    // SAFETY: the caller's promise.
    unsafe { super::device::write_text(buffer, bytes, &launches) };
    launches.len()
}
