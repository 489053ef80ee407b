//! Windows: one-sided communication by put, get and signals.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::sync::{Arc, Weak};

use fusewire::{Compare, DType, SignalUpdate, Window, WindowOptions};

use crate::call::{Body, Call, operate};
use crate::comm::{FusewireComm, Shared};
use crate::error::{Outcome, argument, give, guard};
use crate::handle::{destroy, live};
use crate::memory::{Buffer, checked_size, refuse_capture};
use crate::region::Region;
use crate::types::{VersionedStruct, numbers as n, read};
use crate::work::FusewireWork;

/// `fusewire_window_options`. Zero selects the default of each field.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireWindowOptions {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Number of signals; 0 for the number of ranks.
    pub signals: u32,
    /// Number of counters; 0 for the number of ranks.
    pub counters: u32,
    /// Number of barriers; 0 for 1.
    pub barriers: u32,
    /// Number of cells.
    pub cells: u32,
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireWindowOptions {
    const NAME: &'static str = "fusewire_window_options";
    const FIRST: usize = 24;
}

const _: () = assert!(size_of::<FusewireWindowOptions>() >= FusewireWindowOptions::FIRST);

/// A window: the type `fusewire_window`.
#[derive(Debug)]
pub struct FusewireWindow {
    window: Window,
    /// State of the communicator that the window belongs to. Weak, because the last handle of the
    /// communicator ends it.
    comm: Weak<Shared>,
    /// True if the window allocated its memory.
    is_owner: bool,
}

/// Reads options. Null selects all defaults.
///
/// # Safety
/// `from` is null, or readable for its `struct_size` bytes.
unsafe fn options_of(
    operation: &str,
    from: *const FusewireWindowOptions,
) -> Outcome<WindowOptions> {
    let mut options = WindowOptions::default();
    if from.is_null() {
        return Ok(options);
    }
    // SAFETY: the caller passes a struct that is readable for `struct_size` bytes.
    let given = unsafe { read(operation, from)? };
    let or_default = |number: u32| (number != 0).then_some(number);
    options.signals = or_default(given.signals);
    options.counters = or_default(given.counters);
    options.barriers = or_default(given.barriers).unwrap_or(options.barriers);
    options.cells = given.cells;
    Ok(options)
}

/// Returns the handle at `window`, if the window belongs to the communicator of `comm`.
///
/// # Safety
/// `window` is null or a handle that lives as long as the result is used.
unsafe fn window_of<'a>(
    operation: &str,
    comm: &FusewireComm,
    window: *const FusewireWindow,
) -> Outcome<&'a FusewireWindow> {
    // SAFETY: the caller passes null or a live handle.
    let held = unsafe { live(operation, "the window is", window)? };
    if !ptr::eq(held.comm.as_ptr(), Arc::as_ptr(&comm.shared)) {
        let detail = "the window belongs to another communicator";
        return Err(argument(operation, detail));
    }
    Ok(held)
}

/// Returns the window on the stream of the call.
///
/// # Safety
/// `window` is null or a live handle.
unsafe fn on_stream(call: &Call<'_>, window: *const FusewireWindow) -> Outcome<Window> {
    // SAFETY: the caller passes null or a handle that stays alive during the call.
    let held = unsafe { window_of(call.name(), call.handle, window)? };
    Ok(held.window.on(call.handle.comm.stream()))
}

/// Returns a byte offset. An offset that exceeds `usize` becomes `usize::MAX`, which operations
/// refuse.
fn offset_of(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

fn sender_of(sender: u32) -> Option<u32> {
    (sender != n::FUSEWIRE_ALL_RANKS).then_some(sender)
}

/// Creates a window through `make` and stores its handle in `window`.
///
/// # Safety
/// `comm` is null or a live handle; `options` is null or readable for its `struct_size` bytes;
/// `window` is null or writable.
unsafe fn create(
    name: &'static str,
    comm: *const FusewireComm,
    options: *const FusewireWindowOptions,
    window: *mut *mut FusewireWindow,
    is_owner: bool,
    make: impl FnOnce(&FusewireComm, WindowOptions) -> Outcome<Window>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(name, "window", window, ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(name, comm)? };
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let options = unsafe { options_of(name, options)? };
        let made = Box::new(FusewireWindow {
            window: make(handle, options)?,
            comm: Arc::downgrade(&handle.shared),
            is_owner,
        });
        if is_owner {
            let tensor = made.window.tensor().clone();
            handle.shared.insert(Region {
                tensor,
                registration: None,
                owned: true,
            });
        }
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(name, "window", window, Box::into_raw(made)) }
    })
}

/// Creates a window over zeroed new memory. All ranks must call this function, with the same
/// arguments.
///
/// # Safety
/// `comm` is null or a live handle; `options` is null or readable for its `struct_size` bytes;
/// `window` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_alloc(
    comm: *const FusewireComm,
    bytes: u64,
    options: *const FusewireWindowOptions,
    window: *mut *mut FusewireWindow,
) -> c_int {
    const NAME: &str = "fusewire_window_alloc";
    let make = |handle: &FusewireComm, options| {
        let count = checked_size(NAME, bytes)?;
        Ok(handle.comm.alloc_window(DType::U8, count, options)?)
    };
    // SAFETY: the preconditions of `create` are also preconditions of this function.
    unsafe { create(NAME, comm, options, window, true, make) }
}

/// Creates a window over memory of [`fusewire_alloc`](crate::fusewire_alloc), or over GPU memory of
/// the caller. All ranks must call this function, with the same size and options.
///
/// # Safety
/// The preconditions of [`fusewire_window_alloc`]. `memory` is null, or valid memory of the
/// communicator's device for `bytes` bytes until the window is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_create(
    comm: *const FusewireComm,
    memory: *mut c_void,
    bytes: u64,
    options: *const FusewireWindowOptions,
    window: *mut *mut FusewireWindow,
) -> c_int {
    const NAME: &str = "fusewire_window_create";
    let make = |handle: &FusewireComm, options| {
        let count = checked_size(NAME, bytes)?;
        let buffer = Buffer::new(NAME, "memory", memory, Some(bytes), DType::U8)?;
        let tensor = match handle.shared.part(NAME, memory as usize, count)? {
            Some(tensor) => tensor,
            None if handle.comm.device().is_gpu() => buffer.tensor(handle)?,
            None => {
                return Err(argument(
                    NAME,
                    "peers cannot map this memory: on the CPU, pass memory from fusewire_alloc, \
                     or call fusewire_window_alloc",
                ));
            }
        };
        Ok(handle.comm.new_window(&tensor, options)?)
    };
    // SAFETY: the preconditions of `create` are also preconditions of this function.
    unsafe { create(NAME, comm, options, window, false, make) }
}

/// Ends a window. All ranks must call this function. The handle stays valid.
///
/// # Safety
/// `comm` and `window` are null or live handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_free(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
) -> c_int {
    const NAME: &str = "fusewire_window_free";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { window_of(NAME, handle, window)? };
        refuse_capture(handle)?;
        held.window.on(handle.comm.stream()).free()?;
        if held.is_owner {
            handle.shared.remove(held.window.tensor().as_ptr() as usize);
        }
        Ok(())
    })
}

/// Destroys a handle. A window that was not freed stays until the communicator ends.
///
/// # Safety
/// `window` is null or a live handle that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_destroy(window: *mut FusewireWindow) -> c_int {
    // SAFETY: the caller passes null or a handle that nothing uses any more.
    unsafe { destroy(window) }
}

/// Stores the address and the size of this rank's part.
///
/// # Safety
/// `window` is null or a live handle; `memory` and `bytes` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_memory(
    window: *const FusewireWindow,
    memory: *mut *mut c_void,
    bytes: *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_window_memory";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { live(NAME, "the window is", window)? };
        let tensor = held.window.tensor();
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "memory", memory, tensor.as_ptr().cast())? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "bytes", bytes, tensor.len() as u64) }
    })
}

/// Stores the address at which this process has mapped the part of `peer`.
///
/// # Safety
/// `window` is null or a live handle; `memory` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_peer_memory(
    window: *const FusewireWindow,
    peer: u32,
    memory: *mut *mut c_void,
) -> c_int {
    const NAME: &str = "fusewire_window_peer_memory";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "memory", memory, ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { live(NAME, "the window is", window)? };
        let at = held.window.map_remote(peer)?.as_ptr();
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "memory", memory, at.cast()) }
    })
}

/// Stores the device address of the window's description for kernels, a
/// [`DeviceWindow`](fusewire::DeviceWindow).
///
/// # Safety
/// `window` is null or a live handle; `device_window` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_device(
    window: *const FusewireWindow,
    device_window: *mut *const c_void,
) -> c_int {
    const NAME: &str = "fusewire_window_device";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { live(NAME, "the window is", window)? };
        let at = held.window.device_window().cast();
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "device_window", device_window, at) }
    })
}

/// Returns the body of [`fusewire_window_put`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn put(
    window: *const FusewireWindow,
    source: *const c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let window = unsafe { on_stream(call, window)? };
        let source = call.tensor("source", source, Some(bytes), DType::U8)?;
        let at = offset_of(offset);
        call.choose(
            || window.put(&source, peer, at),
            || window.put_async(&source, peer, at),
        )
    }
}

/// Writes `bytes` bytes at `source` to the part of `peer`, `offset` bytes after its start.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_put(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    source: *const c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_put",
            comm,
            None,
            put(window, source, bytes, peer, offset),
        )
    }
}

/// Enqueues [`fusewire_window_put`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_put_async(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    source: *const c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_put_async",
            comm,
            Some(work),
            put(window, source, bytes, peer, offset),
        )
    }
}

/// Returns the body of [`fusewire_window_put_signal`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn put_signal(
    window: *const FusewireWindow,
    source: *const c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
    signal: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let window = unsafe { on_stream(call, window)? };
        let source = call.tensor("source", source, Some(bytes), DType::U8)?;
        let at = offset_of(offset);
        call.choose(
            || window.put_signal(&source, peer, at, signal),
            || window.put_signal_async(&source, peer, at, signal),
        )
    }
}

/// Runs [`fusewire_window_put`], then adds 1 to this rank's value of signal `signal` at `peer`.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_put_signal(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    source: *const c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
    signal: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_put_signal",
            comm,
            None,
            put_signal(window, source, bytes, peer, offset, signal),
        )
    }
}

/// Enqueues [`fusewire_window_put_signal`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_put_signal_async(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    source: *const c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
    signal: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_put_signal_async",
            comm,
            Some(work),
            put_signal(window, source, bytes, peer, offset, signal),
        )
    }
}

/// Returns the body of [`fusewire_window_get`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn get(
    window: *const FusewireWindow,
    target: *mut c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let window = unsafe { on_stream(call, window)? };
        let target = call.tensor("target", target, Some(bytes), DType::U8)?;
        let at = offset_of(offset);
        call.choose(
            || window.get(&target, peer, at),
            || window.get_async(&target, peer, at),
        )
    }
}

/// Reads `bytes` bytes from the part of `peer`, `offset` bytes after its start, to `target`.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_get(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    target: *mut c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_get",
            comm,
            None,
            get(window, target, bytes, peer, offset),
        )
    }
}

/// Enqueues [`fusewire_window_get`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_get_async(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    target: *mut c_void,
    bytes: u64,
    peer: u32,
    offset: u64,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_get_async",
            comm,
            Some(work),
            get(window, target, bytes, peer, offset),
        )
    }
}

/// Returns the body of [`fusewire_window_raise`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn raise(window: *const FusewireWindow, peer: u32, signal: u32) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let window = unsafe { on_stream(call, window)? };
        call.choose(
            || window.raise(peer, signal),
            || window.raise_async(peer, signal),
        )
    }
}

/// Adds 1 to this rank's value of signal `signal` at `peer`.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_raise(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    peer: u32,
    signal: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_raise",
            comm,
            None,
            raise(window, peer, signal),
        )
    }
}

/// Enqueues [`fusewire_window_raise`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_raise_async(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    peer: u32,
    signal: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_raise_async",
            comm,
            Some(work),
            raise(window, peer, signal),
        )
    }
}

/// Returns the body of [`fusewire_window_wait_raised`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn wait_raised(window: *const FusewireWindow, signal: u32, sender: u32) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let window = unsafe { on_stream(call, window)? };
        let sender = sender_of(sender);
        call.choose(
            || window.wait_raised(signal, sender),
            || window.wait_raised_async(signal, sender),
        )
    }
}

/// Waits until `sender` has raised this rank's signal `signal` once more than this rank has
/// waited for it.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_wait_raised(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    signal: u32,
    sender: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_wait_raised",
            comm,
            None,
            wait_raised(window, signal, sender),
        )
    }
}

/// Enqueues [`fusewire_window_wait_raised`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_wait_raised_async(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    signal: u32,
    sender: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_wait_raised_async",
            comm,
            Some(work),
            wait_raised(window, signal, sender),
        )
    }
}

/// Returns the body of [`fusewire_window_signal`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn update_signal(
    window: *const FusewireWindow,
    peer: u32,
    signal: u32,
    update: u32,
    value: u64,
) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let window = unsafe { on_stream(call, window)? };
        let update = update_of(call.name(), update, value)?;
        call.choose(
            || window.signal(peer, signal, update),
            || window.signal_async(peer, signal, update),
        )
    }
}

/// Sets this rank's value of signal `signal` at `peer`, or adds to it.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_signal(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    peer: u32,
    signal: u32,
    update: u32,
    value: u64,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_signal",
            comm,
            None,
            update_signal(window, peer, signal, update, value),
        )
    }
}

/// Enqueues [`fusewire_window_signal`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_signal_async(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    peer: u32,
    signal: u32,
    update: u32,
    value: u64,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_signal_async",
            comm,
            Some(work),
            update_signal(window, peer, signal, update, value),
        )
    }
}

/// Returns the body of [`fusewire_window_wait_signal`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn wait_signal(
    window: *const FusewireWindow,
    signal: u32,
    sender: u32,
    compare: u32,
    value: u64,
) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let window = unsafe { on_stream(call, window)? };
        let compare = compare_of(call.name(), compare)?;
        let sender = sender_of(sender);
        call.choose(
            || window.wait_signal(signal, sender, compare, value),
            || window.wait_signal_async(signal, sender, compare, value),
        )
    }
}

/// Waits until this rank's signal `signal` satisfies a comparison with `value`.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_wait_signal(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    signal: u32,
    sender: u32,
    compare: u32,
    value: u64,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_wait_signal",
            comm,
            None,
            wait_signal(window, signal, sender, compare, value),
        )
    }
}

/// Enqueues [`fusewire_window_wait_signal`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_wait_signal_async(
    comm: *const FusewireComm,
    window: *const FusewireWindow,
    signal: u32,
    sender: u32,
    compare: u32,
    value: u64,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_window_wait_signal_async",
            comm,
            Some(work),
            wait_signal(window, signal, sender, compare, value),
        )
    }
}

/// Returns the update with this number.
fn update_of(operation: &str, number: u32, value: u64) -> Outcome<SignalUpdate> {
    match number {
        n::FUSEWIRE_SIGNAL_SET => Ok(SignalUpdate::Set(value)),
        n::FUSEWIRE_SIGNAL_ADD => Ok(SignalUpdate::Add(value)),
        _ => Err(argument(
            operation,
            format!("update {number} is neither FUSEWIRE_SIGNAL_SET nor FUSEWIRE_SIGNAL_ADD"),
        )),
    }
}

/// Returns the comparison with this number.
fn compare_of(operation: &str, number: u32) -> Outcome<Compare> {
    let all = [
        Compare::Equal,
        Compare::NotEqual,
        Compare::Less,
        Compare::LessEqual,
        Compare::Greater,
        Compare::GreaterEqual,
    ];
    all.into_iter()
        .find(|compare| *compare as u32 == number)
        .ok_or_else(|| {
            argument(
                operation,
                format!("{number} is no comparison (FUSEWIRE_COMPARE_EQUAL, ...)"),
            )
        })
}

/// Stores the current value of this rank's signal `signal` in `value`. Does not wait.
///
/// # Safety
/// `window` is null or a live handle; `value` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_read_signal(
    window: *const FusewireWindow,
    signal: u32,
    sender: u32,
    value: *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_window_read_signal";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { live(NAME, "the window is", window)? };
        let seen = held.window.read_signal(signal, sender_of(sender))?;
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "value", value, seen) }
    })
}

/// Sets this rank's signal `signal` to 0 for all senders.
///
/// # Safety
/// `window` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_reset_signal(
    window: *const FusewireWindow,
    signal: u32,
) -> c_int {
    const NAME: &str = "fusewire_window_reset_signal";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { live(NAME, "the window is", window)? };
        Ok(held.window.reset_signal(signal)?)
    })
}

/// Stores the current value of this rank's counter `counter` in `value`. Does not wait.
///
/// # Safety
/// `window` is null or a live handle; `value` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_read_counter(
    window: *const FusewireWindow,
    counter: u32,
    value: *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_window_read_counter";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { live(NAME, "the window is", window)? };
        let seen = held.window.read_counter(counter)?;
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "value", value, seen) }
    })
}

/// Sets this rank's counter `counter` to 0.
///
/// # Safety
/// `window` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_window_reset_counter(
    window: *const FusewireWindow,
    counter: u32,
) -> c_int {
    const NAME: &str = "fusewire_window_reset_counter";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { live(NAME, "the window is", window)? };
        Ok(held.window.reset_counter(counter)?)
    })
}
