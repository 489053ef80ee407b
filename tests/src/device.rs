//! The device that the tests run on: the CPU, or what `FUSEWIRE_TEST_DEVICE` names (`cuda`,
//! `cuda:1`, `hip`). With `cuda:each` or `hip:each` the ranks have one each. With
//! `FUSEWIRE_TEST_MULTI_RANK_GRID=1` ranks that are threads share a grid on it; what one grid
//! cannot have is left out.

use std::sync::OnceLock;

use fusewire::{
    Communicator, DType, Device, GridMode, Options, Result, Stream, Tensor, run_threads_on,
};

/// The device of the tests.
///
/// # Panics
/// When the variable names none.
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

/// How the blocks of ranks that are threads come to be on the device at once.
pub fn grid_mode() -> GridMode {
    match std::env::var("FUSEWIRE_TEST_MULTI_RANK_GRID") {
        Ok(value) if value == "1" => GridMode::MultiRankGrid,
        _ => GridMode::Separate,
    }
}

/// What the device's name ends with where ranks have one each.
const EACH: &str = ":each";

/// The device of a rank: that of the tests, or one of its own.
pub fn device_of(rank: u32) -> Device {
    let each = std::env::var("FUSEWIRE_TEST_DEVICE").is_ok_and(|name| name.ends_with(EACH));
    match device() {
        Device::Cuda(_) if each => Device::Cuda(rank),
        Device::Hip(_) if each => Device::Hip(rank),
        other => other,
    }
}

/// Runs ranks as threads like [`fusewire::run_threads`], on the device of the tests, in a
/// multi-rank grid if [`grid_mode`] says so.
pub fn run_threads<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let mut options = options.clone();
    if grid_mode() == GridMode::MultiRankGrid {
        options.grid_mode = GridMode::MultiRankGrid;
    }
    run_threads_on(device(), "fusewire", size, &options, body)
}

/// As [`Tensor::new`], on the device of the tests.
///
/// # Errors
/// As there.
pub fn tensor(dtype: DType, count: usize) -> Result<Tensor> {
    Tensor::on_device(device(), dtype, count)
}

/// As [`Stream::new`], on the device of the tests.
///
/// # Panics
/// When the device is not there.
pub fn stream() -> Stream {
    Stream::on_device(device()).expect("the device of the tests")
}
