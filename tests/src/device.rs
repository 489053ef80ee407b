//! The device that the tests run on: the CPU, or the device that `FUSEWIRE_TEST_DEVICE` names
//! (`cuda`, `cuda:1`, `hip`). `cuda:each` and `hip:each` give every rank a separate GPU; rank r
//! uses GPU r modulo the number of GPUs. With `FUSEWIRE_TEST_MULTI_RANK_GRID=1`, ranks that are
//! threads launch multi-rank grids, and tests that need separate launches are skipped.

use core::cell::Cell;
use std::sync::OnceLock;

use fusewire::bootstrap::RankSize;
use fusewire::gpu::driver::Properties;
use fusewire::testing::GridMode;
use fusewire::{Communicator, DType, Device, Options, Result, Stream, Tensor, run_threads_each};

use crate::skip::skip;

thread_local! {
    /// Rank that this thread runs, if the thread is a rank.
    static RANK: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The device that `FUSEWIRE_TEST_DEVICE` names.
struct TestDevice {
    /// The device, or the first of the devices.
    first: Device,
    /// True if every rank has a separate GPU.
    each: bool,
    /// The GPUs of the machine; empty on the CPU.
    gpus: Vec<Properties>,
}

impl TestDevice {
    fn find() -> &'static Self {
        static DEVICE: OnceLock<TestDevice> = OnceLock::new();
        DEVICE.get_or_init(|| {
            let name = std::env::var("FUSEWIRE_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned());
            let prefix = name.strip_suffix(":each");
            let first: Device = prefix
                .unwrap_or(&name)
                .parse()
                .expect("FUSEWIRE_TEST_DEVICE");
            // If there is no driver, the tests report its error when they use the device.
            let gpus = match first {
                Device::Cuda(_) => fusewire::cuda::devices().unwrap_or_default(),
                Device::Hip(_) => fusewire::hip::devices().unwrap_or_default(),
                _ => Vec::new(),
            };
            Self {
                first,
                each: prefix.is_some() && first.is_gpu(),
                gpus,
            }
        })
    }
}

/// Returns the device of the calling rank. A rank is a thread that runs in [`as_rank`], or a
/// process with a rank in its environment. Other threads get the device of rank 0.
///
/// # Panics
/// Panics if `FUSEWIRE_TEST_DEVICE` is not the name of a device.
pub fn device() -> Device {
    let of_process = || Some(RankSize::from_env_if_set().ok()??.rank);
    device_of(RANK.get().or_else(of_process).unwrap_or(0))
}

/// Returns the device of a rank: the device of the tests, or a separate GPU per rank.
pub fn device_of(rank: u32) -> Device {
    let found = TestDevice::find();
    let ordinal = rank % (found.gpus.len() as u32).max(1);
    match found.first {
        Device::Cuda(_) if found.each => Device::Cuda(ordinal),
        Device::Hip(_) if found.each => Device::Hip(ordinal),
        other => other,
    }
}

/// Runs `body` on this thread as rank `rank`, so that [`device`] returns the device of this rank.
pub fn as_rank<R>(rank: u32, body: impl FnOnce() -> R) -> R {
    let before = RANK.replace(Some(rank));
    let result = body();
    RANK.set(before);
    result
}

/// Returns the properties of the machine's GPUs if every rank has a separate GPU and there are at
/// least two GPUs. Otherwise calls [`skip`] and returns `None`.
///
/// # Panics
/// Panics if `FUSEWIRE_REQUIRE` names `gpus` and this function would return `None`.
pub fn separate_gpus() -> Option<&'static [Properties]> {
    let found = TestDevice::find();
    if !found.each {
        skip("gpus", "FUSEWIRE_TEST_DEVICE is not cuda:each or hip:each");
    } else if found.gpus.len() < 2 {
        skip("gpus", "this machine has fewer than two GPUs");
    } else {
        return Some(&found.gpus);
    }
    None
}

/// Returns the grid mode of ranks that are threads.
pub fn grid_mode() -> GridMode {
    match std::env::var("FUSEWIRE_TEST_MULTI_RANK_GRID") {
        Ok(value) if value == "1" => GridMode::MultiRankGrid,
        _ => GridMode::Separate,
    }
}

/// Runs ranks as threads like [`fusewire::run_threads`], each on its [`device_of`] and in the
/// [`grid_mode`] of the tests.
pub fn run_threads<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let mut options = options.clone();
    if grid_mode() == GridMode::MultiRankGrid {
        options.testing.grid_mode = GridMode::MultiRankGrid;
    }
    run_threads_each(device_of, "fusewire", size, &options, |comm| {
        as_rank(comm.rank(), || body(comm))
    })
}

/// Creates a tensor on the device of the calling rank.
///
/// # Errors
/// Returns the errors of [`Tensor::on_device`].
pub fn tensor(dtype: DType, count: usize) -> Result<Tensor> {
    Tensor::on_device(device(), dtype, count)
}

/// Creates a stream on the device of the calling rank.
///
/// # Panics
/// Panics if the device does not exist.
pub fn stream() -> Stream {
    Stream::on_device(device()).expect("the device of the tests")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_a_rank_only_within_the_call() {
        assert_eq!(RANK.get(), None);
        as_rank(2, || {
            assert_eq!(RANK.get(), Some(2));
            as_rank(5, || assert_eq!(RANK.get(), Some(5)));
            assert_eq!(RANK.get(), Some(2));
            let other = std::thread::spawn(|| RANK.get());
            assert_eq!(other.join().expect("no panic"), None);
        });
        assert_eq!(RANK.get(), None);
    }
}
