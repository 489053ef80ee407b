//! The exported function table and its C functions. The functions convert failures and panics of
//! the Rust code to error codes. Comments cite rules such as "Lifetime", which the documentation of
//! `fusewire-backend-abi` states.

use core::ffi::{c_char, c_void};
use core::panic::AssertUnwindSafe;
use core::time::Duration;
use std::panic::catch_unwind;

use fusewire_backend_abi as abi;
use fusewire_backend_abi::{
    FusewireBackendSetup, FusewireBackendTable, FusewireCall, FusewireError,
};

use crate::failure::{Failure, Result};
use crate::handle::{Call, Handle};
use crate::reduce;
use crate::store::Store;

static TABLE: FusewireBackendTable = FusewireBackendTable {
    magic: abi::MAGIC,
    abi_major: abi::ABI_MAJOR,
    abi_minor: abi::ABI_MINOR,
    struct_bytes: size_of::<FusewireBackendTable>() as u32,
    reserved: 0,
    name: c"sample".as_ptr(),
    version: Some(version),
    create: Some(create),
    destroy: Some(destroy),
    supports: Some(supports),
    is_bitwise: Some(is_bitwise),
    group_start: Some(group_start),
    group_end: Some(group_end),
    all_reduce: Some(all_reduce),
    reduce: Some(reduce_to_root),
    broadcast: Some(broadcast),
    all_gather: Some(all_gather),
    reduce_scatter: Some(reduce_scatter),
    send: Some(send),
    recv: Some(recv),
    // The host composes these operations from `send`, `recv` and `all_reduce`.
    all_to_all: None,
    all_to_all_v: None,
    all_gather_v: None,
    scatter: None,
    gather: None,
    barrier: None,
    register_memory: None,
    deregister_memory: None,
    // Without `split`, the host calls `create` on the ranks of each new communicator.
    split: None,
    abort: Some(abort),
    async_error: None,
};

/// The library's only exported symbol.
#[unsafe(no_mangle)]
pub extern "C" fn fusewire_backend_v1() -> *const FusewireBackendTable {
    &raw const TABLE
}

/// Runs `body` and returns 0 with the result of `body`. Converts a failure or panic to a code and
/// writes the code and a message to `error`.
///
/// # Safety
/// `error` must meet the requirements of [`FusewireError::set`].
unsafe fn guard<T>(
    error: *mut FusewireError,
    body: impl FnOnce() -> Result<T>,
) -> (i32, Option<T>) {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return (abi::CODE_OK, Some(value)),
        Ok(Err(failure)) => failure,
        Err(_) => Failure::new(abi::CODE_INTERNAL, "the sample backend panicked"),
    };
    // SAFETY: the caller guarantees that `error` meets the requirements of `FusewireError::set`.
    unsafe { FusewireError::set(error, failure.code, &failure.message) };
    (failure.code, None)
}

/// Calls `body` with the `Handle` that `handle` points to.
///
/// # Safety
/// `handle` must be null, or a pointer that `create` returned and that is not yet destroyed.
/// `error` must meet the requirements of [`FusewireError::set`].
unsafe fn with_handle(
    handle: *mut c_void,
    error: *mut FusewireError,
    body: impl FnOnce(&Handle) -> Result<()>,
) -> i32 {
    // SAFETY: the caller guarantees that `handle` is null or points to a `Handle` that `create`
    // boxed and that is not yet destroyed. Concurrent calls also hold only shared references.
    let handle = unsafe { handle.cast::<Handle>().as_ref() };
    let body = || body(handle.ok_or_else(|| Failure::invalid("the handle is null"))?);
    // SAFETY: the caller guarantees that `error` meets the requirements of `FusewireError::set`.
    unsafe { guard(error, body) }.0
}

/// Checks and converts the arguments of a call.
///
/// # Safety
/// `call` must be null or point to a [`FusewireCall`] of at least `struct_bytes` bytes.
unsafe fn read(call: *const FusewireCall) -> Result<Call> {
    // SAFETY: the caller guarantees that `call` is null or readable.
    let call = unsafe { call.as_ref() };
    let call = call.filter(|call| call.struct_bytes as usize >= size_of::<FusewireCall>());
    Call::new(call.ok_or_else(|| Failure::invalid("the call is null or too small"))?)
}

unsafe extern "C" fn version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

unsafe extern "C" fn create(
    setup: *const FusewireBackendSetup,
    error: *mut FusewireError,
) -> *mut c_void {
    let body = || {
        // SAFETY: `setup` is null or points to the host's setup, which lives until this call
        // returns (rule "Lifetime").
        let setup = unsafe { setup.as_ref() };
        let setup = setup.ok_or_else(|| Failure::invalid("the setup is null"))?;
        if (setup.struct_bytes as usize) < size_of::<FusewireBackendSetup>() {
            return Err(Failure::invalid("the setup is too small"));
        }
        if setup.device != abi::DEVICE_CPU {
            let message = format!("memory of device kind {} cannot be sent", setup.device);
            return Err(Failure::new(abi::CODE_UNSUPPORTED, message));
        }
        // SAFETY: the host's store outlives the handle (rule "Lifetime").
        let store = unsafe { Store::new(setup.store) }?;
        let timeout = Duration::from_nanos(setup.timeout_ns);
        Handle::connect(setup.rank, setup.size, &store, timeout)
    };
    // SAFETY: `error` is null or points to the host's error, which lives until this call returns.
    match unsafe { guard(error, body) }.1 {
        Some(handle) => Box::into_raw(Box::new(handle)).cast(),
        None => core::ptr::null_mut(),
    }
}

unsafe extern "C" fn destroy(handle: *mut c_void) {
    if !handle.is_null() {
        // SAFETY: `create` made the pointer from a box, and `destroy` is the last call on a handle
        // (rule "Threads").
        let handle = unsafe { Box::from_raw(handle.cast::<Handle>()) };
        let _ = catch_unwind(AssertUnwindSafe(|| drop(handle)));
    }
}

unsafe extern "C" fn supports(
    _handle: *mut c_void,
    operation: u32,
    dtype: u32,
    reduction: u32,
) -> i32 {
    i32::from(match operation {
        abi::OPERATION_ALL_REDUCE | abi::OPERATION_REDUCE | abi::OPERATION_REDUCE_SCATTER => {
            reduce::has(dtype, reduction)
        }
        abi::OPERATION_ALL_GATHER
        | abi::OPERATION_BROADCAST
        | abi::OPERATION_SEND
        | abi::OPERATION_RECV => reduce::size_of_dtype(dtype).is_some(),
        _ => false,
    })
}

unsafe extern "C" fn is_bitwise(_handle: *mut c_void) -> i32 {
    1
}

unsafe extern "C" fn abort(handle: *mut c_void) {
    // SAFETY: the host passes null or a handle from `create` that is not yet destroyed. Concurrent
    // calls also hold only shared references.
    if let Some(handle) = unsafe { handle.cast::<Handle>().as_ref() } {
        let _ = catch_unwind(AssertUnwindSafe(|| handle.abort()));
    }
}

unsafe extern "C" fn group_start(handle: *mut c_void, error: *mut FusewireError) -> i32 {
    // SAFETY: the host passes a live handle from `create`, and an error that lives until this call
    // returns.
    unsafe { with_handle(handle, error, Handle::group_start) }
}

unsafe extern "C" fn group_end(handle: *mut c_void, error: *mut FusewireError) -> i32 {
    // SAFETY: the host passes a live handle from `create`, and an error that lives until this call
    // returns.
    unsafe { with_handle(handle, error, Handle::group_end) }
}

/// Defines C functions that convert the arguments and call a method of the handle.
macro_rules! operations {
    ($($name:ident($($arg:ident: $ty:ty),*) => $method:ident($($given:expr),*);)*) => {$(
        unsafe extern "C" fn $name(
            handle: *mut c_void,
            $($arg: $ty,)*
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32 {
            let body = |handle: &Handle| {
                // SAFETY: `call` is null or points to the host's call, which lives until this
                // function returns.
                let call = unsafe { read(call) }?;
                // SAFETY: the host's buffers have the sizes that this operation requires. They live
                // until the operation returns (rule "Lifetime") or until the group ends (rule
                // "Groups").
                unsafe { handle.$method($($given,)* &call) }
            };
            // SAFETY: the host passes a live handle from `create`, and an error that lives until
            // this call returns.
            unsafe { with_handle(handle, error, body) }
        }
    )*};
}

operations! {
    all_reduce(from: *const c_void, to: *mut c_void, count: u64)
        => all_reduce(from.cast(), to.cast(), count);
    reduce_to_root(from: *const c_void, to: *mut c_void, count: u64, root: u32)
        => reduce(from.cast(), to.cast(), count, root);
    broadcast(buffer: *mut c_void, count: u64, root: u32)
        => broadcast(buffer.cast(), count, root);
    all_gather(from: *const c_void, to: *mut c_void, count: u64)
        => all_gather(from.cast(), to.cast(), count);
    reduce_scatter(from: *const c_void, to: *mut c_void, count: u64)
        => reduce_scatter(from.cast(), to.cast(), count);
    send(from: *const c_void, count: u64, peer: u32) => send(from.cast(), count, peer);
    recv(to: *mut c_void, count: u64, peer: u32) => recv(to.cast(), count, peer);
}
