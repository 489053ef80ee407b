//! Interface through which the ranks exchange addresses.

use core::time::Duration;

/// Key-value store that all ranks of one context share. No other context may use the same keys.
/// Gloo's keys are rank numbers (`0`, `rank_0`), so add a prefix if several contexts share a store.
///
/// Only [`Context::new`](crate::Context::new) calls the methods, on the thread of its caller. An
/// error ends the connection attempt. `Context::new` returns the error's text in an
/// [`Error::Rendezvous`](crate::Error::Rendezvous) or, if the timeout has passed, in an
/// [`Error::Timeout`](crate::Error::Timeout).
pub trait Rendezvous {
    /// Stores `value` under `key`. Replaces an earlier value.
    ///
    /// # Errors
    /// A message with the reason why the store could not be written.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String>;

    /// Returns the value under `key`. Called only after [`wait`](Self::wait) has returned for the
    /// key, so the value exists and the call returns soon.
    ///
    /// # Errors
    /// A message with the reason why there is no value.
    fn get(&self, key: &str) -> Result<Vec<u8>, String>;

    /// Blocks until all `keys` exist, but at most for `timeout`.
    ///
    /// # Errors
    /// A message with the missing keys.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), String>;
}
