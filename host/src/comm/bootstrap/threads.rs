//! Ranks as threads of one process.

use std::sync::Arc;
use std::thread;

use crate::Result;
use crate::comm::{Communicator, new_comm};
use crate::device::Device;
use crate::options::Options;
use crate::store::Store;

/// Runs `size` ranks as threads of this process; each gets its communicator. The results are in
/// rank order; a rank that cannot join gives its error.
///
/// # Errors
/// Those of [`Communicator::new`] and of `body`, per rank.
pub fn run_threads<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_with("fusewire", size, options, body)
}

/// As [`run_threads`], with the backend of that name.
///
/// # Errors
/// Those of [`crate::new_comm`] and of `body`, per rank.
pub fn run_threads_with<R: Send>(
    backend: &str,
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_on(Device::Cpu, backend, size, options, body)
}

/// As [`run_threads_with`], with communicators of `device`: ranks on a GPU share it, with a stream
/// each.
///
/// # Errors
/// As there; and [`Error::NoDevice`](crate::Error::NoDevice) of every rank where the device is not
/// there.
pub fn run_threads_on<R: Send>(
    device: Device,
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
        // Errors are given to the caller.
        options
            .abort_process_on_timeout_or_error
            .get_or_insert(false);
        body(new_comm(backend, device, "threads", options)?)
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
