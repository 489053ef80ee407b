//! Where the ranks find each other's addresses.

use core::time::Duration;

/// A key-value store that all ranks of one context see, and no other context with the same keys:
/// Gloo's keys are rank numbers (`0`, `rank_0`), so prefix them where several contexts share a
/// store.
///
/// Called only from the thread that runs [`Context::new`](crate::Context::new), while it runs. An
/// error ends the attempt and comes back in
/// [`Error::Rendezvous`](crate::Error::Rendezvous) or, when the attempt's time is over,
/// [`Error::Timeout`](crate::Error::Timeout), with the text kept.
pub trait Rendezvous {
    /// Stores `value` under `key`, in place of what was there.
    ///
    /// # Errors
    /// A text that says why the store could not be written.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String>;

    /// The value under `key`. Asked only after [`wait`](Self::wait) has returned for the key, so it
    /// need not block for long.
    ///
    /// # Errors
    /// A text that says why there is no value.
    fn get(&self, key: &str) -> Result<Vec<u8>, String>;

    /// Blocks until all `keys` are there, at most for `timeout`.
    ///
    /// # Errors
    /// A text that names the keys that are missing.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), String>;
}
