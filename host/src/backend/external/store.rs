//! C functions through which external backends access the communicator's store.

use core::ffi::{c_char, c_void};
use core::panic::AssertUnwindSafe;
use core::time::Duration;
use std::panic::catch_unwind;
use std::sync::{Arc, Weak};

use fusewire_backend_abi::{
    CODE_INTERNAL, CODE_INVALID, CODE_OK, CODE_STORE, CODE_TIMEOUT, FusewireError, FusewireStore,
    MAX_KEY_BYTES, MAX_VALUE_BYTES,
};

use crate::store::{Error, Store};

/// Store, and the struct with the C functions that access it. The value is in an `Arc`, so neither
/// field moves.
#[derive(Debug)]
pub(super) struct StoreContext {
    store: Arc<dyn Store>,
    table: FusewireStore,
}

// SAFETY: the only raw pointer is `table.context`, the address of this value. Nothing is written
// after `new`, and the store is `Send + Sync`.
unsafe impl Send for StoreContext {}
// SAFETY: nothing is written after `new`, and the store is `Send + Sync`.
unsafe impl Sync for StoreContext {}

impl StoreContext {
    pub(super) fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new_cyclic(|this: &Weak<Self>| Self {
            store,
            table: FusewireStore {
                struct_bytes: size_of::<FusewireStore>() as u32,
                reserved: 0,
                // An `Arc` does not move its value, so this is the final address.
                context: this.as_ptr().cast_mut().cast(),
                set: Some(set),
                get: Some(get),
                wait: Some(wait),
                add: Some(add),
            },
        })
    }

    pub(super) fn table(&self) -> *const FusewireStore {
        &raw const self.table
    }
}

/// Code and message of a failed store function.
type StoreFailure = (i32, String);

fn invalid(detail: impl Into<String>) -> StoreFailure {
    (CODE_INVALID, detail.into())
}

fn failed(error: &Error) -> StoreFailure {
    let code = match error {
        Error::Timeout { .. } => CODE_TIMEOUT,
        Error::InvalidArgument { .. } => CODE_INVALID,
        _ => CODE_STORE,
    };
    (code, error.to_string())
}

/// Runs the body of a store function. Returns an error code if the body panics or `context` is
/// null.
///
/// # Safety
/// `context` is null or points to a [`StoreContext`], and `error` is valid for
/// [`FusewireError::set`].
unsafe fn guarded(
    context: *mut c_void,
    error: *mut FusewireError,
    body: impl FnOnce(&dyn Store) -> Result<(), StoreFailure>,
) -> i32 {
    // SAFETY: the caller passes null or the address of a `StoreContext`, which lives as long as the
    // backend's handle.
    let Some(bound) = (unsafe { context.cast::<StoreContext>().as_ref() }) else {
        // SAFETY: the caller passes an `error` that is valid for `FusewireError::set`.
        unsafe { FusewireError::set(error, CODE_INVALID, "the store's context is null") };
        return CODE_INVALID;
    };
    let (code, message) = match catch_unwind(AssertUnwindSafe(|| body(&*bound.store))) {
        Ok(Ok(())) => return CODE_OK,
        Ok(Err(failed)) => failed,
        Err(_) => (CODE_INTERNAL, "the store panicked".to_owned()),
    };
    // SAFETY: the caller passes an `error` that is valid for `FusewireError::set`.
    unsafe { FusewireError::set(error, code, &message) };
    code
}

/// Checks pointer and length, and returns the bytes at `at`.
///
/// # Safety
/// `at` is null or readable for `bytes` bytes.
unsafe fn bytes<'a>(
    what: &str,
    at: *const u8,
    bytes: usize,
    most: usize,
) -> Result<&'a [u8], StoreFailure> {
    if bytes == 0 {
        return Ok(&[]);
    }
    if at.is_null() {
        return Err(invalid(format!(
            "the {what} is null, but its length is {bytes}"
        )));
    }
    if bytes > most {
        return Err(invalid(format!(
            "the {what} has {bytes} bytes; at most {most} are allowed"
        )));
    }
    // SAFETY: `at` is not null (checked above), and the caller guarantees that `bytes` bytes are
    // readable.
    Ok(unsafe { core::slice::from_raw_parts(at, bytes) })
}

/// Checks pointer, length and encoding, and returns the key at `at`.
///
/// # Safety
/// The preconditions of [`bytes`].
unsafe fn key<'a>(at: *const c_char, length: usize) -> Result<&'a str, StoreFailure> {
    // SAFETY: this function and `bytes` have the same preconditions.
    let key = unsafe { bytes("key", at.cast(), length, MAX_KEY_BYTES) }?;
    match core::str::from_utf8(key) {
        Ok("") => Err(invalid("the key is empty")),
        Ok(key) if key.contains('\0') => Err(invalid("the key has a zero byte")),
        Ok(key) => Ok(key),
        Err(error) => Err(invalid(format!("the key is not UTF-8: {error}"))),
    }
}

unsafe extern "C" fn set(
    context: *mut c_void,
    key_at: *const c_char,
    key_bytes: usize,
    value: *const u8,
    value_bytes: usize,
    error: *mut FusewireError,
) -> i32 {
    let body = |store: &dyn Store| {
        // SAFETY: by the table's rules, the backend passes `key_bytes` readable bytes.
        let key = unsafe { key(key_at, key_bytes) }?;
        // SAFETY: by the table's rules, the backend passes `value_bytes` readable bytes.
        let value = unsafe { bytes("value", value, value_bytes, MAX_VALUE_BYTES) }?;
        store.set(key, value).map_err(|error| failed(&error))
    };
    // SAFETY: by the table's rules, the backend passes the store's context and a valid error.
    unsafe { guarded(context, error, body) }
}

unsafe extern "C" fn get(
    context: *mut c_void,
    key_at: *const c_char,
    key_bytes: usize,
    timeout_ns: u64,
    value: *mut u8,
    capacity: usize,
    value_bytes: *mut usize,
    error: *mut FusewireError,
) -> i32 {
    let body = |store: &dyn Store| {
        // SAFETY: by the table's rules, the backend passes `key_bytes` readable bytes.
        let key = unsafe { key(key_at, key_bytes) }?;
        if value_bytes.is_null() || (value.is_null() && capacity > 0) {
            return Err(invalid("there is no memory for the value or its length"));
        }
        let found = store.get(key, Duration::from_nanos(timeout_ns));
        let found = found.map_err(|error| failed(&error))?;
        // SAFETY: `value_bytes` is not null (checked above), and is writable by the table's rules.
        unsafe { value_bytes.write(found.len()) };
        if found.len() > capacity {
            return Err(invalid(format!(
                "the value of \"{key}\" has {} bytes; the buffer has {capacity}",
                found.len()
            )));
        }
        if !found.is_empty() {
            // SAFETY: by the table's rules, `value` is writable for `capacity` bytes, and
            // `found.len() <= capacity` (checked above).
            unsafe { core::ptr::copy_nonoverlapping(found.as_ptr(), value, found.len()) };
        }
        Ok(())
    };
    // SAFETY: by the table's rules, the backend passes the store's context and a valid error.
    unsafe { guarded(context, error, body) }
}

unsafe extern "C" fn wait(
    context: *mut c_void,
    key_at: *const c_char,
    key_bytes: usize,
    timeout_ns: u64,
    error: *mut FusewireError,
) -> i32 {
    let body = |store: &dyn Store| {
        // SAFETY: by the table's rules, the backend passes `key_bytes` readable bytes.
        let key = unsafe { key(key_at, key_bytes) }?;
        let found = store.wait(&[key], Duration::from_nanos(timeout_ns));
        found.map_err(|error| failed(&error))
    };
    // SAFETY: by the table's rules, the backend passes the store's context and a valid error.
    unsafe { guarded(context, error, body) }
}

unsafe extern "C" fn add(
    context: *mut c_void,
    key_at: *const c_char,
    key_bytes: usize,
    amount: i64,
    sum: *mut i64,
    error: *mut FusewireError,
) -> i32 {
    let body = |store: &dyn Store| {
        // SAFETY: by the table's rules, the backend passes `key_bytes` readable bytes.
        let key = unsafe { key(key_at, key_bytes) }?;
        let total = store.add(key, amount).map_err(|error| failed(&error))?;
        if !sum.is_null() {
            // SAFETY: `sum` is not null (checked above), and is writable by the table's rules.
            unsafe { sum.write(total) };
        }
        Ok(())
    };
    // SAFETY: by the table's rules, the backend passes the store's context and a valid error.
    unsafe { guarded(context, error, body) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemoryStore;

    /// Calls `get` for `key` with a buffer of `capacity` bytes. Returns the code, the value's
    /// length and the buffer.
    fn read(bound: &StoreContext, key: &[u8], capacity: usize) -> (i32, usize, Vec<u8>) {
        let (mut value, mut length) = (vec![0u8; capacity], 0);
        let timeout = Duration::from_millis(20).as_nanos() as u64;
        let get = bound.table.get.expect("it is there");
        // SAFETY: all pointers refer to live memory of the given lengths.
        let code = unsafe {
            get(
                bound.table.context,
                key.as_ptr().cast(),
                key.len(),
                timeout,
                value.as_mut_ptr(),
                capacity,
                &raw mut length,
                core::ptr::null_mut(),
            )
        };
        (code, length, value)
    }

    #[test]
    fn keys_and_values_are_bounded() {
        let store = Arc::new(MemoryStore::new());
        let bound = StoreContext::new(Arc::clone(&store) as _);
        let mut text = [0u8; 200];
        let mut write = |key: &[u8], value: *const u8, length: usize| {
            let mut error = FusewireError::new(&mut text);
            let set = bound.table.set.expect("it is there");
            let context = bound.table.context;
            // SAFETY: the key is live. The value is live, or `set` refuses the value before reading
            // it.
            let code = unsafe {
                set(
                    context,
                    key.as_ptr().cast(),
                    key.len(),
                    value,
                    length,
                    &mut error,
                )
            };
            assert_eq!(code, error.code);
            code
        };
        assert_eq!(write(b"a", b"value".as_ptr(), 5), CODE_OK);
        assert_eq!(write(b"empty", core::ptr::null(), 0), CODE_OK);
        assert_eq!(write(b"", b"value".as_ptr(), 5), CODE_INVALID);
        assert_eq!(write(b"\xff", b"value".as_ptr(), 5), CODE_INVALID);
        assert_eq!(write(b"z\0z", b"value".as_ptr(), 5), CODE_INVALID);
        assert_eq!(write(&[b'k'; 5000], b"value".as_ptr(), 5), CODE_INVALID);
        assert_eq!(write(b"a", core::ptr::null(), 5), CODE_INVALID);
        assert_eq!(write(b"a", b"value".as_ptr(), usize::MAX), CODE_INVALID);
        assert_eq!(store.get("a", Duration::ZERO).expect("set"), b"value");
        assert_eq!(read(&bound, b"a", 8), (CODE_OK, 5, b"value\0\0\0".to_vec()));
        assert_eq!(read(&bound, b"a", 4), (CODE_INVALID, 5, vec![0; 4]));
        assert_eq!(read(&bound, b"empty", 0), (CODE_OK, 0, vec![]));
        assert_eq!(read(&bound, b"absent", 8).0, CODE_TIMEOUT);
    }
}
