//! The device that the tests run on: the CPU, or the device that `FUSEWIRE_TEST_DEVICE` names
//! (`cuda`, `cuda:1`, `hip`). `cuda:each` and `hip:each` give every rank a separate device. With
//! `FUSEWIRE_TEST_MULTI_RANK_GRID=1`, ranks that are threads launch multi-rank grids, and tests
//! that need separate launches are skipped.

use std::sync::OnceLock;

use fusewire::testing::GridMode;
use fusewire::{Communicator, DType, Device, Options, Result, Stream, Tensor, run_threads_each};

/// Returns the device of the tests.
///
/// # Panics
/// Panics if `FUSEWIRE_TEST_DEVICE` is not the name of a device.
pub fn device() -> Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    *DEVICE.get_or_init(|| match std::env::var("FUSEWIRE_TEST_DEVICE") {
        Ok(name) => {
            let first = name.strip_suffix(EACH).unwrap_or(&name);
            first.parse().expect("FUSEWIRE_TEST_DEVICE")
        }
        Err(_) => Device::Cpu,
    })
}

/// Returns the grid mode of ranks that are threads.
pub fn grid_mode() -> GridMode {
    match std::env::var("FUSEWIRE_TEST_MULTI_RANK_GRID") {
        Ok(value) if value == "1" => GridMode::MultiRankGrid,
        _ => GridMode::Separate,
    }
}

/// Suffix of the device name that gives every rank a separate device.
const EACH: &str = ":each";

/// Returns the device of a rank: the device of the tests, or a separate device per rank.
pub fn device_of(rank: u32) -> Device {
    let each = std::env::var("FUSEWIRE_TEST_DEVICE").is_ok_and(|name| name.ends_with(EACH));
    match device() {
        Device::Cuda(_) if each => Device::Cuda(rank),
        Device::Hip(_) if each => Device::Hip(rank),
        other => other,
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
    run_threads_each(device_of, "fusewire", size, &options, body)
}

/// Creates a tensor on the device of the tests.
///
/// # Errors
/// Returns the errors of [`Tensor::on_device`].
pub fn tensor(dtype: DType, count: usize) -> Result<Tensor> {
    Tensor::on_device(device(), dtype, count)
}

/// Creates a stream on the device of the tests.
///
/// # Panics
/// Panics if the device does not exist.
pub fn stream() -> Stream {
    Stream::on_device(device()).expect("the device of the tests")
}
