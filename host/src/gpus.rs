//! Opens the GPUs of this process, of any vendor.

use std::sync::Arc;

use crate::device::Device;
use crate::gpu::Gpu;
use crate::{Error, Result};

/// Returns the GPU `device`. All calls for a device return the same value.
///
/// # Errors
/// [`Error::NoDevice`] if there is no driver or no such GPU; [`Error::InvalidArgument`] for the
/// CPU.
pub fn open(device: Device) -> Result<Arc<Gpu>> {
    Gpu::open_with(device, || match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(ordinal) => Ok(crate::cuda::open(ordinal)?),
        #[cfg(feature = "hip")]
        Device::Hip(ordinal) => Ok(crate::hip::open(ordinal)?),
        #[cfg(not(feature = "cuda"))]
        Device::Cuda(_) => Err(not_built(device, "cuda")),
        #[cfg(not(feature = "hip"))]
        Device::Hip(_) => Err(not_built(device, "hip")),
        Device::Cpu => Err(Error::InvalidArgument {
            operation: "open GPU",
            detail: "the CPU device has no driver".to_owned(),
        }),
    })
}

/// Returns the error for a device whose driver is not compiled into this build.
#[cfg(not(all(feature = "cuda", feature = "hip")))]
fn not_built(device: Device, feature: &str) -> Error {
    Error::NoDevice {
        device: device.to_string(),
        detail: format!("the crate fusewire was built without the feature {feature}"),
    }
}
