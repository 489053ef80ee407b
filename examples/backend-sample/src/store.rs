//! Access to the host's store through its C functions.

use core::time::Duration;

use fusewire_backend_abi::{CODE_OK, CODE_STORE, FusewireError, FusewireStore};

use crate::failure::{Failure, Result};

/// The host's store, borrowed while `create` runs.
#[derive(Debug)]
pub(crate) struct Store<'a>(&'a FusewireStore);

impl<'a> Store<'a> {
    /// # Safety
    /// `table` must be null or point to the host's store, whose functions can be called during
    /// `'a`.
    pub(crate) unsafe fn new(table: *const FusewireStore) -> Result<Self> {
        // SAFETY: the caller guarantees that `table` is null or valid for `'a`.
        let table: Option<&'a FusewireStore> = unsafe { table.as_ref() };
        table
            .map(Self)
            .ok_or_else(|| Failure::invalid("the setup has no store"))
    }

    fn call(
        &self,
        what: &str,
        key: &str,
        call: impl FnOnce(*mut FusewireError) -> i32,
    ) -> Result<()> {
        let mut text = [0u8; 512];
        let mut error = FusewireError::new(&mut text);
        let code = call(&raw mut error);
        if code == CODE_OK {
            return Ok(());
        }
        let message = text.split(|byte| *byte == 0).next().unwrap_or_default();
        let message = String::from_utf8_lossy(message);
        Err(Failure::new(
            code,
            format!("store {what} of \"{key}\": {message}"),
        ))
    }

    pub(crate) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let set = self
            .0
            .set
            .ok_or_else(|| Failure::new(CODE_STORE, "the store has no set"))?;
        self.call("set", key, |error| {
            // SAFETY: the function and the context come from the same table. Key and value are live
            // slices that are passed with their lengths, and `error` is a live variable.
            unsafe {
                set(
                    self.0.context,
                    key.as_ptr().cast(),
                    key.len(),
                    value.as_ptr(),
                    value.len(),
                    error,
                )
            }
        })
    }

    pub(crate) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let get = self
            .0
            .get
            .ok_or_else(|| Failure::new(CODE_STORE, "the store has no get"))?;
        let mut value = vec![0u8; 256];
        let (at, capacity, mut length) = (value.as_mut_ptr(), value.len(), 0);
        let (timeout, length_at) = (timeout.as_nanos() as u64, &raw mut length);
        self.call("get", key, |error| {
            // SAFETY: the function and the context come from the same table. The key is a live
            // slice that is passed with its length, `value` has `capacity` writable bytes, and
            // `length` and `error` are live variables.
            unsafe {
                get(
                    self.0.context,
                    key.as_ptr().cast(),
                    key.len(),
                    timeout,
                    at,
                    capacity,
                    length_at,
                    error,
                )
            }
        })?;
        value.truncate(length);
        Ok(value)
    }
}
