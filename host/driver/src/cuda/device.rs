//! Properties of a device.

use core::ffi::{CStr, c_char, c_int};
use std::ffi::CString;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::context::Cuda;
use super::domain;
use super::error::INVALID_VALUE;
use super::library::Library;
use crate::Result;
use crate::gpu::{DeviceDriver, Properties};

impl DeviceDriver for Cuda {
    fn library(&self) -> &'static str {
        "CUDA"
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn native_atomics(&self, peer: &[u8; 16]) -> Result<Option<bool>> {
        let library = self.library;
        for ordinal in 0..count(library)? {
            let other = device(library, ordinal)?;
            if uuid(library, other)? != *peer {
                continue;
            }
            let mut value: c_int = 0;
            let attribute =
                sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
            // SAFETY: `value` is writable.
            library.check("cuDeviceGetP2PAttribute", unsafe {
                (library.cuDeviceGetP2PAttribute)(&raw mut value, attribute, self.device, other)
            })?;
            return Ok(Some(value != 0));
        }
        Ok(None)
    }
}

/// Returns the number of devices that the process sees.
pub(super) fn count(library: &Library) -> Result<u32> {
    let mut count: c_int = 0;
    // SAFETY: `count` is writable.
    library.check("cuDeviceGetCount", unsafe {
        (library.cuDeviceGetCount)(&raw mut count)
    })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Returns the device with the given ordinal.
pub(super) fn device(library: &Library, ordinal: u32) -> Result<sys::CUdevice> {
    let mut device = 0;
    // SAFETY: `device` is writable.
    library.check("cuDeviceGet", unsafe {
        (library.cuDeviceGet)(&raw mut device, ordinal as c_int)
    })?;
    Ok(device)
}

/// Returns the value of an attribute, or 0 if the driver does not know the attribute.
pub(super) fn attribute(
    library: &Library,
    device: sys::CUdevice,
    attribute: Attribute,
) -> Result<u32> {
    let mut value: c_int = 0;
    // SAFETY: `value` is writable.
    let code = unsafe { (library.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
    if code == INVALID_VALUE {
        return Ok(0);
    }
    library.check("cuDeviceGetAttribute", code)?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// First CUDA version whose driver loads kernels that use multicast objects (PTX 8.2).
const MULTICAST_SINCE: u32 = 12_020;

/// Returns all properties that can be queried without a context. `fabric` is only the capability
/// that the driver reports. Opening the device also checks that the process can create fabric
/// handles.
pub(super) fn properties(
    library: &Library,
    device: sys::CUdevice,
    ordinal: u32,
) -> Result<Properties> {
    let ask = |asked| attribute(library, device, asked);
    let has = |asked| Ok::<bool, crate::Error>(ask(asked)? != 0);
    let mut memory = 0_usize;
    // SAFETY: `memory` is writable.
    library.check("cuDeviceTotalMem", unsafe {
        (library.cuDeviceTotalMem_v2)(&raw mut memory, device)
    })?;
    let version = u32::try_from(library.version()?).unwrap_or(0);
    let pieces = has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?;
    let fabric = pieces && has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?;
    Ok(Properties {
        ordinal,
        name: name(library, device)?,
        architecture: architecture(
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        uuid: uuid(library, device)?,
        memory: memory as u64,
        multiprocessors: ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        warp: ask(Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)?,
        max_threads: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        shared_bytes: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        version,
        descriptors: pieces
            && has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
        fabric,
        domain: fabric
            .then(|| domain::find(&bus(library, device)?))
            .transpose()?
            .flatten(),
        multicast: pieces
            && version >= MULTICAST_SINCE
            && library.cuMulticastCreate.find().is_some()
            && has(Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)?,
        cooperative: has(Attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)?,
    })
}

/// Formats the architecture, such as `sm_90` for compute capability 9.0.
pub(super) fn architecture(major: u32, minor: u32) -> String {
    format!("sm_{major}{minor}")
}

/// Returns the marketing name.
fn name(library: &Library, device: sys::CUdevice) -> Result<String> {
    let mut name = [0_u8; 256];
    let capacity = name.len() as c_int - 1;
    // SAFETY: `name` has `capacity` bytes.
    library.check("cuDeviceGetName", unsafe {
        (library.cuDeviceGetName)(name.as_mut_ptr().cast::<c_char>(), capacity, device)
    })?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    Ok(name.to_string_lossy().into_owned())
}

/// Returns the PCI bus address of the device. The address identifies the device to NVML, because
/// NVML and CUDA number the devices in different orders.
fn bus(library: &Library, device: sys::CUdevice) -> Result<CString> {
    let mut bus = [0_u8; 64];
    let capacity = bus.len() as c_int - 1;
    // SAFETY: `bus` has `capacity` bytes.
    library.check("cuDeviceGetPCIBusId", unsafe {
        (library.cuDeviceGetPCIBusId)(bus.as_mut_ptr().cast::<c_char>(), capacity, device)
    })?;
    Ok(CStr::from_bytes_until_nul(&bus).unwrap_or_default().into())
}

/// Returns the UUID of the device or, if the device is a MIG instance, the UUID of the instance.
fn uuid(library: &Library, device: sys::CUdevice) -> Result<[u8; 16]> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is writable.
    library.check("cuDeviceGetUuid", unsafe {
        (library.cuDeviceGetUuid_v2)(&raw mut uuid, device)
    })?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}
