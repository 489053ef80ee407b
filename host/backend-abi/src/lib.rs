//! The C table by which Fusewire loads a communication backend at run time.
//!
//! A backend is a shared library that exports one function, [`ENTRY_SYMBOL`]:
//!
//! ```c
//! const FusewireBackendTable *fusewire_backend_v1(void);
//! ```
//!
//! This crate is that table as plain data; `include/fusewire_backend.h` is the same for C and C++,
//! and a test compares the two. `examples/backend-sample` is a complete backend.
//!
//! # Rules
//!
//! **Lifetime.** The table, its name and what `version` returns live as long as the process: the
//! host never closes a library. What a call is given (setup, call, counts, error) lives until the
//! call returns, but for [`FusewireStore`]: it lives until the handle, and every handle split from
//! it, was destroyed. Buffers live until the call returns (with a stream: until the stream has
//! passed it).
//!
//! **Threads.** The calls of one handle come one at a time, from whatever thread; calls of
//! different handles come at once. Three are made at any time, also while another call of the
//! handle runs: `supports`, `is_bitwise` and `abort`. `destroy` is the last call of a handle; no
//! other one is under way. The store's functions may be called from any thread, several at once.
//!
//! **All ranks together.** `create` and the collectives are called by all ranks in one order.
//! `split` is called by the ranks of its list.
//!
//! **Blocking.** On the CPU (`stream` is 0) a call returns when its result is there. Every call
//! ends: at the latest [`FusewireCall::timeout_ns`] after its start with [`CODE_TIMEOUT`], soon
//! after `abort` with [`CODE_ABORTED`]. After the first failure the host calls `abort`, and nothing
//! but `destroy` after that.
//!
//! **Groups.** Between `group_start` and `group_end` come only `send` and `recv`; they run at the
//! end, all at once, so that no order of them can deadlock. Only there a rank may send to itself.
//! Groups may be nested.
//!
//! **Null.** In the table, `all_to_all` to `gather`, `barrier`, `register_memory`,
//! `deregister_memory`, `split` and `async_error` may be null: the host composes the operations of
//! `send`, `recv` and `all_reduce`, and does without the others. All else must be there. `error`
//! may be null; of an error, `message` is null only where its capacity is 0. Buffers of 0 elements,
//! and buffers that only the root uses, may be null or dangling.
//!
//! **Failure.** A function returns 0 or one of the codes, which it also leaves in the error with a
//! message. Neither a panic nor an exception may leave a function, on either side.
//!
//! **Growth.** A new field is appended to the end of a struct, and the minor version counts up;
//! whoever reads a struct looks at `struct_bytes` before it reads a field that the first version
//! did not have. The table of an older backend is completed by nulls, the tail of a newer one is
//! not read. Anything else is another major version, with an entry of another name.
#![no_std]

mod codes;

use core::ffi::{c_char, c_void};

pub use self::codes::*;

/// What a function says of its failure. The caller owns it and the message's memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireError {
    /// Bytes of this struct, as the caller knows it.
    pub struct_bytes: u32,
    /// One of the codes.
    pub code: i32,
    /// UTF-8 that ends with a zero byte; cut off where it does not fit.
    pub message: *mut c_char,
    /// Bytes at `message`.
    pub message_capacity: usize,
}

impl FusewireError {
    /// An error without a failure, whose message goes to `buffer`.
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

    /// Leaves a code and a message, cut off between two characters where it is too long.
    ///
    /// # Safety
    /// `error` is null, or points to an error whose message is writable for its capacity.
    pub unsafe fn set(error: *mut Self, code: i32, message: &str) {
        // SAFETY: the caller's promise.
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
        // SAFETY: `end` is less than the capacity, which the caller promises to be writable.
        unsafe { core::ptr::copy_nonoverlapping(message.as_ptr(), target, end) };
        // SAFETY: as above.
        unsafe { target.add(end).write(0) };
    }
}

/// Store for the rendezvous of the ranks of one communicator. Keys are UTF-8 without a zero byte in
/// between, at most [`MAX_KEY_BYTES`] long; they are the communicator's own.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireStore {
    /// Bytes of this struct, as the host knows it.
    pub struct_bytes: u32,
    /// 0.
    pub reserved: u32,
    /// First argument of the functions.
    pub context: *mut c_void,
    /// Stores `value_bytes` at `value` under the key.
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
    /// Waits for the key and copies its value to `value`; `value_bytes` gets its length. A value
    /// that does not fit gives [`CODE_INVALID`] and its length, and nothing is copied.
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
    /// Waits for the key.
    pub wait: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            key: *const c_char,
            key_bytes: usize,
            timeout_ns: u64,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Adds to the counter under the key, which begins at 0; `sum` (which may be null) gets the
    /// result.
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

/// What a handle is made from.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireBackendSetup {
    /// Bytes of this struct, as the host knows it.
    pub struct_bytes: u32,
    /// Minor version of the host.
    pub abi_minor: u32,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Kind of the device whose memory calls name: one of the `DEVICE_` numbers.
    pub device: u32,
    /// Number of the device among those of its kind.
    pub device_index: u32,
    /// Bound of `create`, and of calls that have none of their own.
    pub timeout_ns: u64,
    /// Name of the communicator.
    pub name: *const c_char,
    /// Number of hints.
    pub hint_count: usize,
    /// Names of the hints; null where there are none.
    pub hint_keys: *const *const c_char,
    /// Values of the hints, as many.
    pub hint_values: *const *const c_char,
    /// Store for the rendezvous of the ranks.
    pub store: *const FusewireStore,
}

/// What all operations take.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireCall {
    /// Bytes of this struct, as the host knows it.
    pub struct_bytes: u32,
    /// Type of the elements: one of the `DTYPE_` numbers.
    pub dtype: u32,
    /// One of the `REDUCE_` numbers; [`REDUCE_NONE`] where nothing is reduced.
    pub reduction: u32,
    /// 0.
    pub reserved: u32,
    /// This rank's factor of [`REDUCE_PREMUL_SUM`]; 0 otherwise.
    pub factor: f64,
    /// Bound of the call.
    pub timeout_ns: u64,
    /// The device's stream as its driver names it; 0 on the CPU.
    pub stream: u64,
}

/// A function with elements in and out.
pub type MoveFn = unsafe extern "C" fn(
    handle: *mut c_void,
    from: *const c_void,
    to: *mut c_void,
    count: u64,
    call: *const FusewireCall,
    error: *mut FusewireError,
) -> i32;

/// A function with elements in and out, and a root.
pub type RootedFn = unsafe extern "C" fn(
    handle: *mut c_void,
    from: *const c_void,
    to: *mut c_void,
    count: u64,
    root: u32,
    call: *const FusewireCall,
    error: *mut FusewireError,
) -> i32;

/// A function that needs nothing.
pub type PlainFn = unsafe extern "C" fn(handle: *mut c_void, error: *mut FusewireError) -> i32;

/// What a backend is: see the crate's documentation for the rules. Counts are elements.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireBackendTable {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`ABI_MAJOR`].
    pub abi_major: u32,
    /// [`ABI_MINOR`] that the backend was built with.
    pub abi_minor: u32,
    /// Bytes of this struct, as the backend knows it.
    pub struct_bytes: u32,
    /// 0.
    pub reserved: u32,
    /// Name of the backend, for messages.
    pub name: *const c_char,
    /// Version of the backend, for people.
    pub version: Option<unsafe extern "C" fn() -> *const c_char>,
    /// Makes this rank's handle; null where that failed. All ranks together.
    pub create: Option<
        unsafe extern "C" fn(
            setup: *const FusewireBackendSetup,
            error: *mut FusewireError,
        ) -> *mut c_void,
    >,
    /// Frees a handle.
    pub destroy: Option<unsafe extern "C" fn(handle: *mut c_void)>,
    /// 1 where the backend itself has the operation (one of the `OPERATION_` numbers) for elements
    /// and reduction. Asked only of operations whose function is not null.
    pub supports: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            operation: u32,
            dtype: u32,
            reduction: u32,
        ) -> i32,
    >,
    /// 1 where reductions give the same bits on all ranks in every run, reduced in rank order with
    /// Fusewire's arithmetic.
    pub is_bitwise: Option<unsafe extern "C" fn(handle: *mut c_void) -> i32>,
    /// Starts a group.
    pub group_start: Option<PlainFn>,
    /// Runs a group.
    pub group_end: Option<PlainFn>,
    /// Reduces `count` elements; every rank gets the result. `from` and `to` may be equal.
    pub all_reduce: Option<MoveFn>,
    /// Reduces `count` elements to the root. `from` and `to` may be equal.
    pub reduce: Option<RootedFn>,
    /// Copies the root's elements to all.
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
    /// Collects `count` elements of rank r as row r of `to`. `from` may be the own row of `to`.
    pub all_gather: Option<MoveFn>,
    /// Reduces row r, of `count` elements, of every `from` to rank r. `to` may be the own row of
    /// `from`.
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
    /// Sends row r, of `count` elements, of `from` to rank r's row (this rank) of `to`. May be
    /// null.
    pub all_to_all: Option<MoveFn>,
    /// As `all_to_all` with a count for each rank, `size` each way. May be null.
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
    /// As `all_gather` with a count for each rank. May be null.
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
    /// Sends row r, of `count` elements, of the root's `from` to rank r's `to`. May be null.
    pub scatter: Option<RootedFn>,
    /// Collects every rank's `count` elements as row r of the root's `to`. May be null.
    pub gather: Option<RootedFn>,
    /// Returns when all ranks have called it. May be null.
    pub barrier: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            call: *const FusewireCall,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Registers memory that will be used often; `registration` gets what `deregister_memory`
    /// takes. May be null.
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
    /// Makes a handle of the ranks `ranks`, in that order; `part` gets it, or null where the
    /// backend cannot (and says 0): the host then makes one by `create`. May be null.
    pub split: Option<
        unsafe extern "C" fn(
            handle: *mut c_void,
            ranks: *const u32,
            count: u32,
            part: *mut *mut c_void,
            error: *mut FusewireError,
        ) -> i32,
    >,
    /// Ends whatever waits in the handle, on this rank and, as far as it can, on its peers. At any
    /// time, more than once.
    pub abort: Option<unsafe extern "C" fn(handle: *mut c_void)>,
    /// A failure that the backend found by itself since the last call. May be null.
    pub async_error: Option<PlainFn>,
}

// SAFETY: plain data that nobody writes; its pointers are to data and functions that live as long
// as the process (the crate's rules).
unsafe impl Sync for FusewireBackendTable {}

/// Type of the function that a library exports as [`ENTRY_SYMBOL`].
pub type EntryFn = unsafe extern "C" fn() -> *const FusewireBackendTable;
