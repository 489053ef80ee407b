//! Tests backends that are loaded at run time: every operation of the sample backend, and libraries
//! that must be refused.

mod failures;
mod operations;
mod rejections;

use core::time::Duration;
use std::sync::Arc;
use std::thread;

use fusewire::store::MemoryStore;
use fusewire::{Communicator, Device, Options, Result, backend, new_comm};
use fusewire_tests::backends::{self, sample};

/// Time limit of the tests' waits, long enough for a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Registers `sample` as a backend of this process.
fn register() {
    backends::register("sample");
    assert!(backend::backend_names().contains(&"sample".to_owned()));
}

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = TEST_TIMEOUT;
    options.abort_process_on_timeout_or_error = Some(false);
    options
}

/// Runs `body` on `size` ranks of the sample backend, as threads.
fn ranks<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    register();
    let store = Arc::new(MemoryStore::new());
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let mut options = options.clone();
                options.store = Some(Arc::clone(&store) as _);
                options.rank_size = Some((rank, size));
                let body = &body;
                scope.spawn(move || body(new_comm("sample", Device::Cpu, "test", options)?))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}
