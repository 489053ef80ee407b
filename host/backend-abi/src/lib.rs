//! The C table through which Fusewire loads a communication backend at run time.
//!
//! A backend is a shared library that exports one function, [`ENTRY_SYMBOL`]:
//!
//! ```c
//! const FusewireBackendTable *fusewire_backend_v1(void);
//! ```
//!
//! This crate declares the table as plain data. `include/fusewire_backend.h` declares it for C and
//! C++, and a test compares both declarations. `examples/backend-sample` is a complete backend.
//!
//! # Rules
//!
//! **Lifetime.** The table, its name and the string that `version` returns live as long as the
//! process: the host never closes a library. Arguments of a call (setup, call, counts, error) live
//! until the call returns, except [`FusewireStore`], which lives until the handle and every handle
//! split from it are destroyed. Buffers live until the call returns; with a stream, until the
//! operation has completed on the stream.
//!
//! **Threads.** Calls of one handle do not overlap, but may come from any thread. Calls of
//! different handles may run concurrently. The host may call `supports`, `is_bitwise` and `abort`
//! at any time, even while another call of the handle runs. `destroy` is the last call of a handle
//! and does not overlap with another call of the handle. The backend may call the store's functions
//! from any thread, and from several threads at the same time.
//!
//! **Collective calls.** All ranks call `create` and the collectives, in the same order. `split` is
//! called by the ranks in the list that is passed to it.
//!
//! **Blocking.** On the CPU (`stream` is 0) a call returns when its result is complete. No call may
//! block forever: a call returns [`CODE_TIMEOUT`] no later than [`FusewireCall::timeout_ns`] after
//! its start, and [`CODE_ABORTED`] soon after `abort`. After the first failure the host calls
//! `abort`, and then only `destroy`.
//!
//! **Groups.** Between `group_start` and `group_end` the host calls only `send` and `recv`. All
//! calls of a group run when the group ends, so no order of the calls can deadlock. A rank may send
//! to itself only in a group. Groups may be nested.
//!
//! **Null.** In the table, `all_to_all`, `all_to_all_v`, `all_gather_v`, `scatter`, `gather`,
//! `barrier`, `register_memory`, `deregister_memory`, `split` and `async_error` may be null. The
//! host composes the missing operations from `send`, `recv` and `all_reduce`, and skips the other
//! functions. All other functions must be present. `error` may be null; an error's `message` is
//! null only if its capacity is 0. A buffer of 0 elements may be null or dangling. On ranks other
//! than the root, so may a buffer that only the root uses.
//!
//! **Failure.** A function returns 0 or one of the codes. It also stores the code and a message in
//! the error. Neither a panic nor an exception may leave a function of the backend or of the host.
//!
//! **Growth.** New fields are appended to the end of a struct, and the minor version is
//! incremented. A reader checks `struct_bytes` before it reads a field that the first version did
//! not have. If a backend is older than the host, the host sets the missing fields of its table to
//! null. If a backend is newer, the host ignores the additional fields. Any other change requires a
//! new major version, whose entry function has another name.
#![no_std]

mod codes;

use core::ffi::{c_char, c_void};

pub use self::codes::*;

/// Description of a failure. The caller owns the struct and the message's memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireError {
    /// Size of this struct in bytes, as the caller was compiled with it.
    pub struct_bytes: u32,
    /// One of the `CODE_` numbers.
    pub code: i32,
    /// UTF-8 text that ends with a zero byte; truncated if it does not fit.
    pub message: *mut c_char,
    /// Capacity of `message` in bytes.
    pub message_capacity: usize,
}

impl FusewireError {
    /// Creates an error with [`CODE_OK`]. A later message is written to `buffer`.
    pub const fn new(buffer: &mut [u8]) -> Self {
        if let [first, ..] = buffer {
            *first = 0;
        }
        Self {
            struct_bytes: size_of::<Self>() as u32,
            code: CODE_OK,
            message: buffer.as_mut_ptr().cast(),
            message_capacity: buffer.len(),
        }
    }

    /// Stores a code and a message. Truncates a message that is too long at a character boundary.
    ///
    /// # Safety
    /// `error` is null, or points to a valid error whose message is writable for its capacity.
    pub unsafe fn set(error: *mut Self, code: i32, message: &str) {
        // SAFETY: the caller passes null or a pointer to a valid error.
        let Some(error) = (unsafe { error.as_mut() }) else {
            return;
        };
        error.code = code;
        if error.message.is_null() || error.message_capacity == 0 {
            return;
        }
        let mut end = message.len().min(error.message_capacity - 1);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let target: *mut u8 = error.message.cast();
        // SAFETY: `end` is less than the capacity, and the caller guarantees that the message is
        // writable for its capacity.
        unsafe { core::ptr::copy_nonoverlapping(message.as_ptr(), target, end) };
        // SAFETY: `end` is less than the capacity.
        unsafe { target.add(end).write(0) };
    }
}

/// Store for the rendezvous of the ranks of one communicator. Keys are UTF-8 without zero bytes,
/// and at most [`MAX_KEY_BYTES`] long. Other communicators cannot access these keys.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireStore {
    /// Size of this struct in bytes, as the host was compiled with it.
    pub struct_bytes: u32,
    /// Must be 0.
    pub reserved: u32,
    /// First argument of the functions.
    pub context: *mut c_void,
    /// Stores the `value_bytes` bytes at `value` under the key.
    pub set: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            key_bytes: usize,
            value: *const u8,
            value_bytes: usize,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Waits for the key, copies its value to `value`, and stores the value's length in
    /// `value_bytes`. If the value does not fit, stores the length, copies nothing, and returns
    /// [`CODE_INVALID`].
    pub get: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            key_bytes: usize,
            timeout_ns: u64,
            value: *mut u8,
            capacity: usize,
            value_bytes: *mut usize,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Waits until the key exists.
    pub wait: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            key_bytes: usize,
            timeout_ns: u64,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Adds to the counter under the key. A new counter starts at 0. Stores the new value in `sum`,
    /// unless `sum` is null.
    pub add: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            key_bytes: usize,
            amount: i64,
            sum: *mut i64,
            error: *mut FusewireError,
        ) -> i32,
    >,
}

/// Arguments of `create`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireBackendSetup {
    /// Size of this struct in bytes, as the host was compiled with it.
    pub struct_bytes: u32,
    /// Minor version of the host.
    pub abi_minor: u32,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Kind of the device that holds the buffers: one of the `DEVICE_` numbers.
    pub device: u32,
    /// Index of the device among the devices of its kind.
    pub device_index: u32,
    /// Timeout of `create`, and of calls without a timeout argument, in nanoseconds.
    pub timeout_ns: u64,
    /// Name of the communicator.
    pub name: *const c_char,
    /// Number of hints.
    pub hint_count: usize,
    /// Array of `hint_count` names; null if there are no hints.
    pub hint_keys: *const *const c_char,
    /// Array of `hint_count` values, in the order of the names.
    pub hint_values: *const *const c_char,
    /// Store for the rendezvous of the ranks.
    pub store: *const FusewireStore,
}

/// Arguments that all operations take.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireCall {
    /// Size of this struct in bytes, as the host was compiled with it.
    pub struct_bytes: u32,
    /// Type of the elements: one of the `DTYPE_` numbers.
    pub dtype: u32,
    /// One of the `REDUCE_` numbers; [`REDUCE_NONE`] for operations without a reduction.
    pub reduction: u32,
    /// Must be 0.
    pub reserved: u32,
    /// This rank's factor for [`REDUCE_PREMUL_SUM`]; 0 for other reductions.
    pub factor: f64,
    /// Timeout of the call in nanoseconds.
    pub timeout_ns: u64,
    /// The device's stream as a driver handle; 0 on the CPU.
    pub stream: u64,
}

/// Type of a function with an input and an output buffer.
pub type MoveFn = unsafe extern "C" fn(
    handle: *mut c_void,
    from: *const c_void,
    to: *mut c_void,
    count: u64,
    call: *const FusewireCall,
    error: *mut FusewireError,
) -> i32;

/// Type of a function with an input and an output buffer, and a root.
pub type RootedFn = unsafe extern "C" fn(
    handle: *mut c_void,
    from: *const c_void,
    to: *mut c_void,
    count: u64,
    root: u32,
    call: *const FusewireCall,
    error: *mut FusewireError,
) -> i32;

/// Type of a function that takes only a handle.
pub type PlainFn = unsafe extern "C" fn(handle: *mut c_void, error: *mut FusewireError) -> i32;

/// Table of a backend's functions. The crate's documentation states the rules. Counts are in
/// elements.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireBackendTable {
    /// Must be [`MAGIC`].
    pub magic: u64,
    /// Value of [`ABI_MAJOR`] when the backend was built.
    pub abi_major: u32,
    /// Value of [`ABI_MINOR`] when the backend was built.
    pub abi_minor: u32,
    /// Size of this struct in bytes, as the backend was compiled with it.
    pub struct_bytes: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Name of the backend, for messages.
    pub name: *const c_char,
    /// Returns the version of the backend as text.
    pub version: Option<unsafe extern "C" fn() -> *const c_char>,
    /// Creates this rank's handle. Returns null on failure. Called by all ranks.
    pub create: Option<
        unsafe extern "C" fn(
            setup: *const FusewireBackendSetup,
            error: *mut FusewireError,
        ) -> *mut c_void,
    >,
    /// Frees a handle.
    pub destroy: Option<unsafe extern "C" fn(handle: *mut c_void)>,
    /// Returns 1 if the backend itself supports the operation (one of the `OPERATION_` numbers) for
    /// the element type and reduction. The host calls it only for operations whose function is not
    /// null.
    pub supports: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            operation: u32,
            dtype: u32,
            reduction: u32,
        ) -> i32,
    >,
    /// Returns 1 if results of reductions are bitwise identical on all ranks and in every run:
    /// ranks are reduced in rank order with Fusewire's arithmetic.
    pub is_bitwise: Option<unsafe extern "C" fn(handle: *mut c_void) -> i32>,
    /// Starts a group of sends and receives.
    pub group_start: Option<PlainFn>,
    /// Ends a group and runs its operations.
    pub group_end: Option<PlainFn>,
    /// Reduces `count` elements and stores the result on every rank. `from` and `to` may be equal.
    pub all_reduce: Option<MoveFn>,
    /// Reduces `count` elements to the root. `from` and `to` may be equal.
    pub reduce: Option<RootedFn>,
    /// Copies the root's elements to all ranks.
    pub broadcast: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            buffer: *mut c_void,
            count: u64,
            root: u32,
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Gathers the `count` elements of rank r as row r of `to`. `from` may be this rank's row of
    /// `to`.
    pub all_gather: Option<MoveFn>,
    /// Reduces row r of every rank's `from` and stores the result in `to` of rank r. A row has
    /// `count` elements. `to` may be this rank's row of `from`.
    pub reduce_scatter: Option<MoveFn>,
    /// Sends `count` elements to `peer`.
    pub send: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            from: *const c_void,
            count: u64,
            peer: u32,
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Receives `count` elements from `peer`.
    pub recv: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            to: *mut c_void,
            count: u64,
            peer: u32,
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Sends row r of `from` to rank r. Rank r stores the row in `to`, at the index of the sending
    /// rank. A row has `count` elements. May be null.
    pub all_to_all: Option<MoveFn>,
    /// Like `all_to_all`, but with one count per rank for each direction. May be null.
    pub all_to_all_v: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            from: *const c_void,
            from_counts: *const u64,
            to: *mut c_void,
            to_counts: *const u64,
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Like `all_gather`, but with one count per rank. May be null.
    pub all_gather_v: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            from: *const c_void,
            to: *mut c_void,
            counts: *const u64,
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Sends row r of the root's `from` to rank r, which stores it in `to`. A row has `count`
    /// elements. May be null.
    pub scatter: Option<RootedFn>,
    /// Gathers every rank's `count` elements as row r of the root's `to`. May be null.
    pub gather: Option<RootedFn>,
    /// Returns when all ranks have called `barrier`. May be null on the CPU.
    pub barrier: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Registers memory that operations will use often, and stores a registration for
    /// `deregister_memory`. May be null.
    pub register_memory: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            at: *mut c_void,
            bytes: u64,
            registration: *mut u64,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Ends a registration. May be null.
    pub deregister_memory: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            registration: u64,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Creates a handle for the ranks in the list `ranks`, in the order of the list, and stores the
    /// handle in `part`. A backend that cannot split stores null and returns 0; the host then calls
    /// `create`. May be null.
    pub split: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            ranks: *const u32,
            count: u32,
            part: *mut *mut c_void,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Ends all waits of the handle on this rank and, if possible, on its peers. May be called at
    /// any time and more than once.
    pub abort: Option<unsafe extern "C" fn(handle: *mut c_void)>,
    /// Returns a failure that the backend has detected since the last call. May be null.
    pub async_error: Option<PlainFn>,
}

// SAFETY: the table is plain data that is never written. Its pointers refer to data and functions
// that live as long as the process (the crate's rules).
unsafe impl Sync for FusewireBackendTable {}

/// Type of the function that a library exports as [`ENTRY_SYMBOL`].
pub type EntryFn = unsafe extern "C" fn() -> *const FusewireBackendTable;
