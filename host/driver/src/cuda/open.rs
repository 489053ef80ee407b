//! Opens devices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::context::{Cuda, CurrentContext, RelaxedCapture};
use super::library::Library;
use super::staging::Staging;
use super::{device, multicast, virtual_memory};
use crate::environment::DeviceStreams;
use crate::gpu::{Driver, Properties};
use crate::{Error, Result};

/// Opens the CUDA device with index `ordinal`. All calls with the same `ordinal` return the same
/// driver. The first call retains the primary context of the device, which PyTorch and the CUDA
/// runtime also use, and may wait for the device.
///
/// # Errors
/// `Error::NoDevice` if there is no driver, if the driver does not support CUDA 12.0, or if there
/// is no such device; `Error::Driver` if the driver lacks a required symbol or if a call fails.
pub fn open(ordinal: u32) -> Result<Arc<dyn Driver>> {
    Ok(open_cuda(ordinal)?)
}

/// Opens the CUDA device with index `ordinal`, as [`open`] does.
pub(super) fn open_cuda(ordinal: u32) -> Result<Arc<Cuda>> {
    static OPEN: Mutex<BTreeMap<u32, Arc<Cuda>>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = open.get(&ordinal) {
        return Ok(Arc::clone(driver));
    }
    let driver = Arc::new(Cuda::new(Library::open()?, ordinal)?);
    open.insert(ordinal, Arc::clone(&driver));
    Ok(driver)
}

/// Returns the properties of every CUDA device that the process sees. Creates no context and uses
/// no device memory. [`Properties::fabric`] is not verified: only [`open`] checks that fabric
/// handles can be created.
///
/// # Errors
/// The errors of [`open`].
pub fn devices() -> Result<Vec<Properties>> {
    let library = Library::open()?;
    (0..device::count(library)?)
        .map(|ordinal| device::properties(library, device::device(library, ordinal)?, ordinal))
        .collect()
}

impl Cuda {
    /// Retains the primary context of device `ordinal` and queries the properties of the device.
    fn new(library: &'static Library, ordinal: u32) -> Result<Self> {
        let count = device::count(library)?;
        if ordinal >= count {
            return Err(Error::NoDevice {
                device: format!("cuda:{ordinal}"),
                detail: format!(
                    "this process sees {count} CUDA device(s), numbered from 0; check \
                        CUDA_VISIBLE_DEVICES"
                ),
            });
        }
        let number = device::device(library, ordinal)?;
        let mut properties = device::properties(library, number, ordinal)?;
        let major = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
        let major = device::attribute(library, number, major)?;
        let rdma = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        let rdma = device::attribute(library, number, rdma)? != 0;

        let mut context = core::ptr::null_mut();
        // SAFETY: `context` is writable. The context is never released, so its handle stays valid.
        library.check("cuDevicePrimaryCtxRetain", unsafe {
            (library.cuDevicePrimaryCtxRetain)(&raw mut context, number)
        })?;
        let relaxed = RelaxedCapture::new(CurrentContext::enter(library, context.addr())?)?;

        let mut handles = 0;
        if properties.descriptors {
            handles |= virtual_memory::DESCRIPTOR;
        }
        let both = handles | virtual_memory::FABRIC;
        properties.fabric =
            properties.fabric && virtual_memory::probe_fabric(&relaxed, number, both, rdma);
        if properties.fabric {
            handles = both;
        } else {
            properties.domain = None;
        }
        let granularity = if handles == 0 {
            super::memory::WHOLE_SHARED
        } else {
            let memory = virtual_memory::granularity(&relaxed, number, handles, rdma)?;
            let both = properties
                .multicast
                .then(|| multicast::granularity(&relaxed, memory, 2, handles))
                .and_then(Result::ok);
            memory.max(both.unwrap_or(0))
        };
        properties.multicast = properties.multicast && handles != 0;
        let streams = DeviceStreams::default();
        let staging = Mutex::new(Staging::new(&relaxed, &streams)?);
        Ok(Self {
            library,
            device: number,
            context: context.addr(),
            properties,
            major,
            handles,
            rdma,
            granularity,
            streams,
            staging,
        })
    }
}
