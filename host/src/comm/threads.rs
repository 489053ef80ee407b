//! Ranks as threads of one process.

use std::sync::Arc;
use std::thread;

use super::{Communicator, new_comm};
use crate::Result;
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;

/// Runs `size` ranks as threads of this process and passes each its communicator. Returns the
/// results in rank order; the result of a rank that cannot join is its error.
///
/// # Errors
/// The errors of [`Communicator::new`] and of `body`, per rank.
pub fn run_threads<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_with("fusewire", size, options, body)
}

/// Runs ranks like [`run_threads`], with the backend of that name.
///
/// # Errors
/// The errors of [`crate::new_comm`] and of `body`, per rank.
pub fn run_threads_with<R: Send>(
    backend: &str,
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_on(Device::Cpu, backend, size, options, body)
}

/// Runs ranks like [`run_threads_with`], with communicators on `device`. Ranks on a GPU share it,
/// and each has its own stream.
///
/// # Errors
/// The errors of [`run_threads_with`]; and [`Error::NoDevice`](crate::Error::NoDevice) of every
/// rank if the device does not exist.
pub fn run_threads_on<R: Send>(
    device: Device,
    backend: &str,
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_each(|_| device, backend, size, options, body)
}

/// Runs ranks like [`run_threads_on`], with rank `r` on the device `device_of(r)`: a GPU for each
/// rank with `|rank| Device::Cuda(rank)`.
///
/// # Errors
/// The errors of [`run_threads_with`]; and [`Error::NoDevice`](crate::Error::NoDevice) of a rank
/// whose device does not exist.
pub fn run_threads_each<R: Send>(
    device_of: impl Fn(u32) -> Device + Sync,
    backend: &str,
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let store: Arc<dyn Store> = Arc::new(crate::store::MemoryStore::new());
    let run = |rank: u32| {
        let mut options = options.clone();
        options.store = Some(Arc::clone(&store));
        options.rank_size = Some((rank, size));
        // The caller gets the errors, so the watchdog must not end the process.
        options
            .abort_process_on_timeout_or_error
            .get_or_insert(false);
        let comm = new_comm(backend, device_of(rank), "threads", options)?;
        // The closure may end a rank by returning.
        body(comm.requiring_finalize(false))
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let run = &run;
                scope.spawn(move || run(rank))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| match rank.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    })
}
