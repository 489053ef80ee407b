//! Exported functions that query and control the fake. The driver does not have them.
//!
//! The fake does not count calls of these functions and cannot inject failures into them.

use core::ffi::{CStr, c_char};

use crate::core::context::current;
use crate::core::emulated;
use crate::core::record;
use crate::core::stream::Stream;

/// Borrows a C string of the caller. Returns the empty string if `text` is null.
///
/// # Safety
/// `text` must be null or a live C string.
unsafe fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: `text` is not null (checked above), so the caller guarantees that it is a live C
    // string.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("")
}

/// Returns the number of calls of a function since the process started.
///
/// # Safety
/// `name` must be null or a live C string.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeCalls(name: *const c_char) -> u64 {
    // SAFETY: the caller guarantees that `name` is null or a live C string.
    record::calls(unsafe { text(name) })
}

/// Returns the number of launches of an entry since the process started, including captured
/// launches.
///
/// A leading `*` matches all entries whose names end with the rest of `name`. `*__grid` matches all
/// grid forms, and `*` matches all entries.
///
/// # Safety
/// `name` must be null or a live C string.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLaunchCount(name: *const c_char) -> u64 {
    // SAFETY: the caller guarantees that `name` is null or a live C string.
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
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLive(kind: *const c_char) -> u64 {
    // SAFETY: the caller guarantees that `kind` is null or a live C string.
    let kind = unsafe { text(kind) };
    let live = record::live();
    if kind == "all" {
        let others = live.iter().filter(|(kind, _)| *kind != "context");
        return others.map(|(_, count)| count).sum();
    }
    let found = live.iter().find(|(name, _)| *name == kind);
    found.map_or(u64::MAX, |(_, count)| *count)
}

/// Makes the `nth` subsequent call of a function (1 for the next call) return `code` without any
/// effect. Later calls succeed again. If `nth` is 0, removes the failures of the function that have
/// not occurred.
///
/// # Safety
/// `name` must be null or a live C string.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeFail(name: *const c_char, nth: u64, code: u32) {
    // SAFETY: the caller guarantees that `name` is null or a live C string.
    record::fail(unsafe { text(name) }, nth, code);
}

/// Creates a non-blocking stream of a green context with `multiprocessors` SMs in the current
/// context. Returns its handle, or 0 without a current context.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub extern "C" fn fusewireCudaFakeGreenStream(multiprocessors: u32) -> usize {
    let Ok(context) = current() else {
        return 0;
    };
    Stream::create_green(&context, false, 0, Some(multiprocessors))
}

/// Writes the numbers of calls and of live objects into `buffer` as JSON with a terminating zero
/// byte, truncated to `bytes`. Returns the untruncated length without the zero byte.
///
/// # Safety
/// `buffer` must be null or have `bytes` writable bytes.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeReport(buffer: *mut c_char, bytes: usize) -> usize {
    let report = record::report();
    // SAFETY: the caller guarantees that `buffer` is null or has `bytes` writable bytes, as
    // `write_text` requires.
    unsafe { super::device::write_text(buffer, bytes, &report) };
    report.len()
}

/// Writes the last launches of a kernel, oldest first, into `buffer` as a JSON list with a
/// terminating zero byte, truncated to `bytes`. Returns the untruncated length without the zero
/// byte.
///
/// Each element of the list is `{"grid": [x, y, z], "block": [x, y, z], "shared_bytes": ..,
/// "attributes": [[number in cuda.h, words of the value ..] ..], "captured": .., "code": result of
/// the call}`. The fake keeps the last 256 launches of all kernels together, including rejected
/// launches.
///
/// # Safety
/// `kernel` must be null or a live C string. `buffer` must be null or have `bytes` writable bytes.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeLaunches(
    kernel: *const c_char,
    buffer: *mut c_char,
    bytes: usize,
) -> usize {
    // SAFETY: the caller guarantees that `kernel` is null or a live C string.
    let launches = record::launches(unsafe { text(kernel) });
    // SAFETY: the caller guarantees that `buffer` is null or has `bytes` writable bytes, as
    // `write_text` requires.
    unsafe { super::device::write_text(buffer, bytes, &launches) };
    launches.len()
}

/// Writes the lines of a kernel that the emulator has executed into `buffer`, as
/// [`fusewireCudaFakeReport`] does. Each line has the number of the PTX line after the kernel's
/// entry, a tabulator, and the text.
///
/// # Safety
/// `kernel` must be null or a live C string. `buffer` must be null or have `bytes` writable bytes.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeExecuted(
    kernel: *const c_char,
    buffer: *mut c_char,
    bytes: usize,
) -> usize {
    // SAFETY: the caller guarantees that `kernel` is null or a live C string.
    let lines = emulated::executed(unsafe { text(kernel) });
    // SAFETY: the caller guarantees that `buffer` is null or has `bytes` writable bytes, as
    // `write_text` requires.
    unsafe { super::device::write_text(buffer, bytes, &lines) };
    lines.len()
}

/// Writes the trips of the last launch of a kernel on each device into `buffer`, as
/// [`fusewireCudaFakeReport`] does. `*` stands for all kernels. `FUSEWIRE_CUDA_FAKE_TRIPS=1` must
/// be set.
///
/// The text is a JSON list of `{"kernel": .., "device": .., "number": number of the launch,
/// "launch": number of the launch on its device, "steps": [strong loads, weak loads, fences],
/// "to_data": steps or null, "leader_instructions": .., "bytes": {route: [read, written]}, "chain":
/// [[device, kernel, line, instruction, source] ..]}`.
///
/// # Safety
/// `kernel` must be null or a live C string. `buffer` must be null or have `bytes` writable bytes.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeTrips(
    kernel: *const c_char,
    buffer: *mut c_char,
    bytes: usize,
) -> usize {
    // SAFETY: the caller guarantees that `kernel` is null or a live C string.
    let trips = emulated::trips_report(unsafe { text(kernel) });
    // SAFETY: the caller guarantees that `buffer` is null or has `bytes` writable bytes, as
    // `write_text` requires.
    unsafe { super::device::write_text(buffer, bytes, &trips) };
    trips.len()
}

/// Writes the errors of launches that the emulator has recorded. Returns the length of the text.
///
/// # Safety
/// `buffer` must be null or have `bytes` writable bytes.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn fusewireCudaFakeFaults(buffer: *mut c_char, bytes: usize) -> usize {
    let faults = emulated::faults();
    // SAFETY: the caller guarantees that `buffer` is null or has `bytes` writable bytes, as
    // `write_text` requires.
    unsafe { super::device::write_text(buffer, bytes, &faults) };
    faults.len()
}
